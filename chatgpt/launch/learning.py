"""What scripts that train have in common, and data and models of SFT and reward-model runs. Left out: PPO's own (`build`)."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

from chatgpt.launch.build import FAMILIES, check_resume, context_of, read_config, write_embedded_model
from chatgpt.launch.config_file import write_resolved
from chatgpt.launch.destination import final_folder
from chatgpt.launch.runs import DataRun, PPORun, Run

EMBEDDED_EXAMPLES = 2000
"""preferences or stories of a run without data"""


def make_optimizer(run: Run, strategy: Any, model: Any, lr: float | None = None) -> Any:
    """The run's optimizer over what the model trains."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    lr = (run.lr or 0.0) if lr is None else lr
    if run.optimizer == 'sgd':
        import torch

        return torch.optim.SGD(parameters, lr=lr, weight_decay=run.weight_decay)
    return strategy.make_optimizer(parameters, lr=lr, eps=1e-5, weight_decay=run.weight_decay)


def make_callbacks(run: Run) -> list[Any]:
    """Checkpoints and TensorBoard, where the run asks for them."""
    from chatgpt.trainer.callbacks import SaveCheckpoint, TensorBoard

    minutes = run.checkpoint_minutes or None
    callbacks: list[Any] = [SaveCheckpoint(interval=run.checkpoint_interval or None, minutes=minutes, keep_last=run.keep_last)]
    if run.tensorboard:
        callbacks.append(TensorBoard())
    return callbacks


def resume(run: Run, trainer: Any) -> None:
    """Go on from the checkpoint that the run names, if any, and write down what runs from here on."""
    from chatgpt.launch.relaunch import sign

    strategy = trainer.strategy
    if strategy.is_rank_0 and (text := short_step(run, trainer)):
        warnings.warn(text, stacklevel=2)
    sign(run.save_path, strategy)
    if run.resume:
        found = trainer.load_checkpoint(run.resume)
        if strategy.is_rank_0:
            text = f'going on from {trainer.resumed_from}' if found else 'nothing to resume yet: starting from the beginning'
            print(text, flush=True)
    lines = Path(run.save_path, 'metrics.jsonl')
    if trainer.phase == 0 and strategy.is_rank_0 and lines.is_file() and lines.stat().st_size:
        print(f'{run.save_path} holds an earlier run without checkpoints: its lines are kept in *.previous.jsonl', flush=True)
    strategy.run_on_rank0(lambda: write_resolved(run, run.save_path))


def short_step(run: Run, trainer: Any) -> str | None:
    """What to say where the last step of a pass learns from a quarter of a batch or less: it weighs as much as a whole one's."""
    if isinstance(run, PPORun):
        what, count = 'samples of a learning phase', run.update_timesteps * run.experience_batch_size * run.num_samples_per_prompt
        if run.buffer_limit:
            count = min(count, run.buffer_limit)
        if run.sample_replay_buffer:
            return None
    else:
        what, count = 'records', len(trainer.train_data)
    size, rest = run.train_batch_size, count % run.train_batch_size  # type: ignore[attr-defined]
    if count < size or not 0 < rest <= size / 4:
        return None
    return (
        f'{count} {what} in batches of train_batch_size={size}: the last step of each pass learns from {rest} alone, and counts as much as '
        f'one of {size}'
    )


def finish(run: Run, trainer: Any, name: str) -> Path:
    """Write the trained model as a Hugging Face folder, and its optimizer's states where that is asked for."""
    path = final_folder(run, name)
    trainer.save_pretrained(path)
    if run.save_adapter:
        write_adapter(run, trainer.strategy, trainer.models()[name])
    if run.need_optim_ckpt:
        optimizer = next(iter(trainer.optimizers().values()))
        trainer.strategy.save_optimizer(optimizer, Path(run.save_path, f'{name}_optim.pt'), only_rank0=False)
    if trainer.strategy.is_rank_0:
        print(f'{name} written to {path}', flush=True)
    return path


def write_adapter(run: Run, strategy: Any, model: Any) -> None:
    """The adapters alone as `save_path`/adapter, which PEFT loads onto `pretrain`."""
    from chatgpt.nn.peft_format import export_peft

    path = Path(run.save_path, 'adapter')
    weights = strategy.full_state_dict(model, run.save_path)
    strategy.run_on_rank0(lambda: export_peft(strategy.unwrap(model), path, base_model=run.pretrain, state=weights))
    if strategy.is_rank_0:
        print(f'adapter written to {path}', flush=True)


def check_data_run(run: DataRun, world_size: int) -> None:
    """Everything that can be wrong in the settings; fills the learning rate.

    Raises:
        ValueError: settings that are out of range or do not fit together.
    """
    run.fill_defaults()
    run.validate(world_size)
    run.apply_resources()
    if run.dataset and not run.pretrain:
        raise ValueError('data of your own needs a model: give --pretrain NAME_OR_FOLDER')
    check_resume(run)


def read_model(run: DataRun) -> tuple[Any, Any]:
    """As `read_config`; without `max_len` sequences are cut to the model's context where that is less than 512.

    Raises:
        ValueError: `max_len` is beyond the context.
    """
    config, tokenizer = read_config(run)
    limit = context_of(config)
    if limit is not None and run.max_len is not None and run.max_len > limit:
        raise ValueError(
            f'max_len={run.max_len} is beyond the context of {run.pretrain or "the embedded model"}, {limit} tokens; give at most {limit}, '
            'or leave it out'
        )
    run.max_len = run.max_tokens if limit is None else min(run.max_tokens, limit)
    return config, tokenizer


def reading_options(run: DataRun) -> dict[str, Any]:
    """Keywords of the `load_` functions of `chatgpt.dataset`."""
    percentage = run.validation_percentage if run.dataset else run.validation_percentage or 5.0
    return {
        'max_length': run.max_len, 'skip_bad_records': run.skip_bad_records, 'validation_source': run.validation_file,
        'validation_percentage': 0 if run.validation_file else percentage, 'seed': run.seed,
    }  # fmt: skip


def report_data(run: DataRun, strategy: Any, train: Any, validation: Any, tokenizer: Any) -> None:
    if strategy.is_rank_0:
        from chatgpt.dataset.formats import shown_format
        from chatgpt.dataset.loading import left_out

        if train.has_turns:
            print(f'conversations read {shown_format(tokenizer)}, the chat template that is saved with the tokenizer', flush=True)

        print(f'{len(train)} examples to learn from{left_out(train)}, {len(validation)} held back{left_out(validation)}', flush=True)


def embedded_start(run: DataRun, strategy: Any) -> str:
    """The model to start from: the run's, or one that has learned the embedded world's language."""
    if run.pretrain:
        return run.pretrain
    folder = Path(run.save_path, 'initial')
    if not (run.resume and strategy.run_on_rank0(folder.is_dir)):
        strategy.run_on_rank0(lambda: write_embedded_model(folder, run.seed))
    return str(folder)


def build_model(run: DataRun, kind: str, pretrained: Any, config: Any) -> Any:
    """An 'Actor' or 'RM' of the run's family; from `config`, with new weights, where `pretrained` is None."""
    from chatgpt import nn

    source = {'config': config} if pretrained is None else {'pretrained': pretrained}
    options = {**run.lora_keywords(), 'checkpoint': run.gradient_checkpointing}
    if pretrained is not None:
        options['trust_remote_code'] = run.trust_remote_code
    return getattr(nn, FAMILIES[run.model] + kind)(**source, **options)
