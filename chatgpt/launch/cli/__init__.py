"""The subcommands of `chatgpt-rlhf`, or `python -m chatgpt`."""
