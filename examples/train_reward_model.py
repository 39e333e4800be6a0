"""A reward model from preferences, or from labelled text.

    python examples/train_reward_model.py pairs.jsonl --pretrain gpt2 --save_path outputs/rm
    torchrun --nproc-per-node=2 examples/train_reward_model.py pairs.jsonl --pretrain gpt2 --strategy ddp --loss_fn log_exp

Takes prompt, chosen and rejected (or several ranked answers), or text and label. Without arguments a small model learns the
preferences of the embedded story world. Under --save_path it leaves metrics.jsonl, config.yaml, checkpoints/ and reward_model/,
which `RewardModel.from_pretrained` and `transformers.AutoModelForSequenceClassification` load, and train_prompts.py --reward_model
takes.
"""

from __future__ import annotations

from typing import Any

from chatgpt.launch.arguments import run_main, strategy_of, world_size_from_env
from chatgpt.launch.config_file import parse_run
from chatgpt.launch.destination import check_destination
from chatgpt.launch.planning import memory_advice, setup_of_data, show_plan
from chatgpt.launch.runs import RewardRun


def main() -> None:
    run = parse_run(RewardRun, description=__doc__, positional='dataset')
    from chatgpt.dataset import embedded, load_examples, load_labelled, load_preferences
    from chatgpt.dataset.examples import Labelled
    from chatgpt.launch import learning

    # Everything that can be wrong is found before any weight is loaded.
    learning.check_data_run(run, world_size_from_env())
    config, tokenizer = learning.read_model(run)
    source = run.dataset or embedded.demo_preferences(learning.EMBEDDED_EXAMPLES, seed=0)
    first = load_examples(source, max_examples=1, skip_bad_records=run.skip_bad_records)[0]
    load = load_labelled if isinstance(first, Labelled) else load_preferences
    train, validation = load(source, tokenizer, **learning.reading_options(run))
    if run.plan:
        show_plan(lambda: setup_of_data(run, config, 'reward_model'))
    check_destination(run, config, 'reward_model')
    with (
        memory_advice(lambda: setup_of_data(run, config, 'reward_model')),
        strategy_of(run) as strategy,
    ):
        learning.report_data(run, strategy, train, validation, tokenizer)
        learn(run, strategy, config, tokenizer, train, validation)


def learn(run: RewardRun, strategy: Any, config: Any, tokenizer: Any, train: Any, validation: Any) -> None:
    from chatgpt.launch import learning
    from chatgpt.trainer import RewardModelConfig, RewardModelTrainer

    pretrained = learning.embedded_start(run, strategy)
    with strategy.model_init_context():
        model = learning.build_model(run, 'RM', pretrained, config)
    model, optimizer = strategy.prepare((model, learning.make_optimizer(run, strategy, model)))
    trainer = RewardModelTrainer(
        strategy, model, optimizer, train, validation, config=run.only(RewardModelConfig), callbacks=learning.make_callbacks(run),
        tokenizer=tokenizer, run_dir=run.save_path,
    )  # fmt: skip
    learning.resume(run, trainer)
    trainer.fit()
    learning.finish(run, trainer, 'reward_model')


if __name__ == '__main__':
    run_main(main)
