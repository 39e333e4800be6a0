"""Preference optimisation of a Hugging Face model, without rollouts: DPO and its variants, KTO, ORPO, SimPO.

    python examples/train_preference.py pairs.jsonl --pretrain outputs/sft/actor --method dpo --loss_type ipo
    torchrun --nproc-per-node=2 examples/train_preference.py answers.jsonl --pretrain outputs/sft/actor \\
        --method kto --strategy fsdp

Takes prompt, chosen and rejected (or several ranked answers); KTO also takes text and label. The reference of DPO and
KTO is the initial model, or with --lora_rank the model with its adapter off. Without arguments a small model learns the
preferences of the embedded story world.
Writes metrics.jsonl, config.yaml, checkpoints/ and actor/, a Hugging Face folder with the tokenizer, to --save_path.
"""

from __future__ import annotations

from chatgpt.launch.arguments import Parser, run_main
from chatgpt.launch.config_file import parse_run
from chatgpt.launch.recipes import execute
from chatgpt.launch.runs import PreferenceRun, run_class


def main() -> None:
    chooser = Parser(add_help=False)
    chooser.add_argument('--method', default='dpo')
    chosen, words = chooser.parse_known_args()
    method = run_class(chosen.method)
    if not issubclass(method, PreferenceRun):
        raise ValueError(f'method={chosen.method!r} learns from no preferences; choose dpo, kto, orpo or simpo')
    execute(parse_run(method, description=__doc__, positional='dataset', argv=words))


if __name__ == '__main__':
    run_main(main)
