"""Other systems' programs on this library: `trl`, `trlx`, ColossalAI's `chatgpt`; `python -m chatgpt_compat
run|check`."""
