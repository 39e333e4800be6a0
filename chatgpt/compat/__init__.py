"""Other systems' programs on this library: `trl`, `trlx`, ColossalAI's `chatgpt`; `python -m chatgpt.compat run|check`."""
