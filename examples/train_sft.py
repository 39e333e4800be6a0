"""Supervised fine-tuning of a Hugging Face model on demonstrations.

    python examples/train_sft.py alpaca.json --pretrain gpt2 --save_path outputs/sft
    torchrun --nproc-per-node=2 examples/train_sft.py chats.jsonl --pretrain gpt2 --strategy fsdp

Takes Alpaca rows, chats (with the tokenizer's chat template), prompt and response, or plain text; only what the
assistant says is learned. Without arguments a small model learns the language of the embedded story world. Writes
metrics.jsonl, config.yaml, checkpoints/ and actor/, a Hugging Face folder with the tokenizer, to --save_path.
"""

from __future__ import annotations

from chatgpt.launch.arguments import run_main
from chatgpt.launch.config_file import parse_run
from chatgpt.launch.recipes import execute
from chatgpt.launch.runs import SFTRun


def main() -> None:
    execute(parse_run(SFTRun, description=__doc__, positional='dataset'))


if __name__ == '__main__':
    run_main(main)
