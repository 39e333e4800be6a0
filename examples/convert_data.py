"""Converts a data file from one known shape to another: `chatgpt-rlhf convert`.

python examples/convert_data.py examples/data/alpaca.json messages.jsonl --to messages
python examples/convert_data.py Anthropic/hh-rlhf pairs.jsonl --to preference --split test --max_examples 1000
"""

from __future__ import annotations

from chatgpt.launch.arguments import run_main
from chatgpt.launch.cli.convert import main

if __name__ == '__main__':
    run_main(main)
