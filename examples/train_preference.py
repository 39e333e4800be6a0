"""Preference optimisation of a Hugging Face model, without rollouts: DPO and its relatives, KTO, ORPO, SimPO.

    python examples/train_preference.py pairs.jsonl --pretrain outputs/sft/actor --method dpo --loss ipo --save_path outputs/dpo
    torchrun --nproc-per-node=2 examples/train_preference.py answers.jsonl --pretrain outputs/sft/actor --method kto --strategy fsdp

Takes prompt, chosen and rejected (or several ranked answers); KTO also takes text and label. The reference of DPO and KTO is the
model as given, or under --lora_rank the model with its adapter off. The learning rate is 1e-6 (dpo, simpo) or 5e-6 (kto, orpo), and 1e-4
without arguments, when a small model learns the preferences of the embedded story world. Under --save_path it leaves metrics.jsonl,
config.yaml, checkpoints/ and actor/, a Hugging Face folder with the tokenizer.
"""

from __future__ import annotations

from copy import deepcopy
from typing import Any

from chatgpt.launch.arguments import run_main, strategy_of, world_size_from_env
from chatgpt.launch.config_file import parse_run
from chatgpt.launch.destination import check_destination
from chatgpt.launch.preference import PreferenceRun, check_judged, check_judgements


def main() -> None:
    run = parse_run(PreferenceRun, description=__doc__, positional='dataset')
    from chatgpt.dataset import embedded
    from chatgpt.launch import learning

    if run.plan:
        raise ValueError('--plan knows PPO, SFT and reward models; python -m chatgpt.plan CONFIG --task sft comes nearest')
    # Everything that can be wrong is found before any weight is loaded.
    learning.check_data_run(run, world_size_from_env())
    config, tokenizer = learning.read_model(run)
    source = run.dataset or embedded.demo_preferences(learning.EMBEDDED_EXAMPLES, seed=0)
    train, validation = read(run, source, tokenizer)
    check_destination(run, config, 'actor')
    with strategy_of(run) as strategy:
        learning.report_data(run, strategy, train, validation, tokenizer)
        learn(run, strategy, config, tokenizer, train, validation)


def read(run: PreferenceRun, source: Any, tokenizer: Any) -> Any:
    """Preferences, or for KTO judged answers.

    Raises:
        ValueError: judged answers for a method that learns from pairs, or for KTO answers that nobody judged.
    """
    from chatgpt.dataset import load_examples, load_labelled, load_preferences
    from chatgpt.dataset.examples import Labelled
    from chatgpt.launch import learning

    first = load_examples(source, max_examples=1, skip_bad_records=run.skip_bad_records)[0]
    if run.method == 'kto':
        check_judged(source, first)
    if not isinstance(first, Labelled):
        return load_preferences(source, tokenizer, **learning.reading_options(run))
    if run.method != 'kto':
        raise ValueError(f'{run.dataset}: {run.method} learns from pairs, and these are labelled answers; use --method kto')
    train, validation = load_labelled(source, tokenizer, **learning.reading_options(run))
    check_judgements(source, (record.label for record in [*train, *validation]), run.positive_label)
    return train, validation


def learn(run: PreferenceRun, strategy: Any, config: Any, tokenizer: Any, train: Any, validation: Any) -> None:
    from chatgpt.launch import learning

    pretrained = learning.embedded_start(run, strategy)
    with strategy.model_init_context():
        actor = learning.build_model(run, 'Actor', pretrained, config)
        initial = deepcopy(actor) if run.needs_initial_model else None
    actor, optimizer = strategy.prepare((actor, learning.make_optimizer(run, strategy, actor)))
    trainer = run.trainer_class(
        strategy, actor, optimizer, train, validation, initial_model=None if initial is None else strategy.prepare(initial),
        config=run.method_config(), callbacks=learning.make_callbacks(run), tokenizer=tokenizer, run_dir=run.save_path,
    )  # fmt: skip
    learning.resume(run, trainer)
    trainer.fit()
    learning.finish(run, trainer, 'actor')


if __name__ == '__main__':
    run_main(main)
