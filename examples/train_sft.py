"""Supervised fine-tuning of a Hugging Face model on demonstrations.

    python examples/train_sft.py alpaca.json --pretrain gpt2 --save_path outputs/sft
    torchrun --nproc-per-node=2 examples/train_sft.py chats.jsonl --pretrain gpt2 --strategy fsdp

Takes Alpaca rows, chats (with the tokenizer's chat template), prompt and response, or plain text; only what the assistant says is
learned. Without arguments a small model learns the language of the embedded story world. Under --save_path it leaves metrics.jsonl,
config.yaml, checkpoints/ and actor/, a Hugging Face folder with the tokenizer.
"""

from __future__ import annotations

from typing import Any

from chatgpt.launch.arguments import run_main, strategy_of, world_size_from_env
from chatgpt.launch.config_file import parse_run
from chatgpt.launch.destination import check_destination
from chatgpt.launch.planning import memory_advice, setup_of_data, show_plan
from chatgpt.launch.runs import SFTRun


def main() -> None:
    run = parse_run(SFTRun, description=__doc__, positional='dataset')
    from chatgpt.dataset import embedded, load_demonstrations, pack
    from chatgpt.launch import learning

    # Everything that can be wrong is found before any weight is loaded.
    learning.check_data_run(run, world_size_from_env())
    config, tokenizer = learning.read_model(run)
    source = run.dataset or embedded.demo_corpus(learning.EMBEDDED_EXAMPLES, seed=0)
    train, validation = load_demonstrations(source, tokenizer, **learning.reading_options(run))
    if run.pack_examples:
        train[:] = pack(train, run.max_tokens)
    if run.early_stopping_patience is not None and not validation:
        raise ValueError('early_stopping_patience needs held-back data: give --validation_file or --validation_percentage')
    if run.plan:
        show_plan(lambda: setup_of_data(run, config, 'sft'))
    check_destination(run, config, 'actor')
    with (
        memory_advice(lambda: setup_of_data(run, config, 'sft')),
        strategy_of(run) as strategy,
    ):
        learning.report_data(run, strategy, train, validation, tokenizer)
        learn(run, strategy, config, tokenizer, train, validation)


def learn(run: SFTRun, strategy: Any, config: Any, tokenizer: Any, train: Any, validation: Any) -> None:
    from chatgpt.launch import learning
    from chatgpt.trainer import SFTConfig, SFTTrainer
    from chatgpt.trainer.callbacks import StopOnPlateau

    callbacks = learning.make_callbacks(run)
    if run.early_stopping_patience is not None:
        callbacks.append(StopOnPlateau('sft/val_loss', mode='min', patience=run.early_stopping_patience))
    with strategy.model_init_context():
        actor = learning.build_model(run, 'Actor', run.pretrain, config)
    actor, optimizer = strategy.prepare((actor, learning.make_optimizer(run, strategy, actor)))
    trainer = SFTTrainer(
        strategy, actor, optimizer, train, validation, config=run.only(SFTConfig), callbacks=callbacks, tokenizer=tokenizer,
        run_dir=run.save_path,
    )  # fmt: skip
    learning.resume(run, trainer)
    trainer.fit()
    learning.finish(run, trainer, 'actor')


if __name__ == '__main__':
    run_main(main)
