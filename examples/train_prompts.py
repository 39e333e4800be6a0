"""PPO on prompts: `python examples/train_prompts.py`, or `torchrun --nproc_per_node 2 examples/train_prompts.py
--strategy ddp`.

    python examples/train_prompts.py prompts.csv --pretrain gpt2 --reward_fn my_rewards.py:score --save_path outputs/run

Without arguments it trains a small model on the embedded story world. Writes metrics.jsonl, samples.jsonl, run.json,
checkpoints/ and actor/, a Hugging Face folder with the tokenizer, to --save_path.
"""

from __future__ import annotations

from chatgpt.launch.arguments import run_main
from chatgpt.launch.config_file import parse_run
from chatgpt.launch.recipes import execute
from chatgpt.launch.runs import PPORun


def main() -> None:
    execute(parse_run(PPORun, description=__doc__, positional='prompt_path'))


if __name__ == '__main__':
    run_main(main)
