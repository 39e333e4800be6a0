"""Trains a reward model on preferences or labelled text.

    python examples/train_reward_model.py pairs.jsonl --pretrain gpt2 --save_path outputs/rm
    torchrun --nproc-per-node=2 examples/train_reward_model.py pairs.jsonl --pretrain gpt2 --strategy ddp

Takes prompt, chosen and rejected (or several ranked answers), or text and label. Without arguments a small model learns
the preferences of the embedded story world. Writes metrics.jsonl, config.yaml, checkpoints/ and reward_model/ to
--save_path. `RewardModel.from_pretrained`, `transformers.AutoModelForSequenceClassification` and train_prompts.py
--reward_model load that folder.
"""

from __future__ import annotations

from chatgpt.launch.arguments import run_main
from chatgpt.launch.config_file import parse_run
from chatgpt.launch.recipes import execute
from chatgpt.launch.runs import RewardRun


def main() -> None:
    execute(parse_run(RewardRun, description=__doc__, positional='dataset'))


if __name__ == '__main__':
    run_main(main)
