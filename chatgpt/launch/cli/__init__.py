"""The command: `chatgpt-rlhf`, or `python -m chatgpt`. What it does is elsewhere; here are its words."""
