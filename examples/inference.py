"""Generates text with a trained model: `chatgpt-rlhf generate`, or `chatgpt-rlhf chat` without --input.

python examples/inference.py --pretrain outputs/run/actor --input "Once upon a time"
python examples/inference.py --pretrain outputs/run/actor --input prompts.jsonl --output answers.jsonl
python examples/inference.py --pretrain outputs/run/actor            # chat, in one process
torchrun --nproc-per-node=2 examples/inference.py --strategy fsdp --pretrain outputs/run/actor --input prompts.jsonl
"""

from __future__ import annotations

from chatgpt.launch.arguments import run_main
from chatgpt.launch.cli import generate


def main() -> None:
    generate.main(chats=None)


if __name__ == '__main__':
    run_main(main)
