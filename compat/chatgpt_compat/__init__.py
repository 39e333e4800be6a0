"""Runs programs of TRL, trlX and ColossalAI's `chatgpt` and `coati`: `python -m chatgpt_compat run|check`."""
