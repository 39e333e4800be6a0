"""What the arguments of transformers' TrainingArguments become in `train()` of TRL's later trainers: PPO of 0.12 to
1.12, DPO, SFT, reward models.

`ARGUMENTS` is the table; the functions below read the ones that need more than a name. Left out: what each trainer adds
(`config`, `dpo`, `sft`, `reward`).
"""

from __future__ import annotations

import math
import os
import warnings
from typing import Any

from chatgpt.trainer.callbacks import TRACKERS, SaveCheckpoint, TensorBoard, WandB
from chatgpt_compat.trl.arguments import Entry, each, refused, script_level, warned

ARGUMENTS: dict[str, Entry] = {
    **each(
        warned('a matter of memory or speed, without influence on numbers'),
        'eval_accumulation_steps tf32 torch_compile torch_compile_backend torch_compile_mode torch_empty_cache_steps '
        'use_liger_kernel',
    ),
    **each(
        warned('records are tokenized once and cut into batches in this process; there is no dataloader'),
        'dataloader_num_workers dataloader_persistent_workers dataloader_prefetch_factor',
    ),
    **each(
        warned('processes and what each holds are decided by the launcher: torchrun runs data-parallel'),
        'deepspeed fsdp fsdp_config ddp_backend ddp_timeout ddp_find_unused_parameters ddp_bucket_cap_mb '
        'ddp_broadcast_buffers accelerator_config',
    ),
    **each(
        warned('the strategy takes the accelerator where there is one; hide it with CUDA_VISIBLE_DEVICES='),
        'use_cpu no_cuda',
    ),
    'dataloader_drop_last': warned('the last batch of an epoch is learned from, whatever its size'),
    'group_by_length': warned('forwards leave padding out, so there is nothing to group for'),
    'auto_find_batch_size': warned('python -m chatgpt.plan says which batch fits before a run'),
    'optim_args': refused('there are no further arguments of AdamW or SGD here'),
    'lr_scheduler_kwargs': refused('the schedules here have no further arguments'),
    'label_smoothing_factor': refused('SFT has no label smoothing here'),
    'neftune_noise_alpha': refused('there is no noise on embeddings here'),
    'logging_first_step': warned('the first line comes after logging_steps'),
    'eval_delay': warned('evaluations begin with the first that is due'),
    'save_only_model': warned('a checkpoint here is what a run goes on from; save_model writes the model alone'),
    'load_best_model_at_end': warned('the model in hand is that of the last step; checkpoints are in output_dir'),
    'ignore_data_skip': warned('a resumed run goes on with the batch it would have had'),
    'include_num_input_tokens_seen': warned('perf/learn_tokens_per_s in metrics.jsonl counts tokens'),
}
"""argument of transformers' class that cannot be honoured: why"""

_ADAMW = ('adamw_torch', 'adamw_torch_fused', 'adamw_hf', 'adamw')
_SMALL_ADAMW = (
    *('paged_adamw_32bit', 'paged_adamw_8bit', 'paged_adamw', 'adamw_bnb_8bit', 'adamw_8bit', 'adamw_torch_8bit'),
    *('adamw_torch_4bit', 'adamw_apex_fused', 'adamw_anyprecision'),
)
"""AdamW with its states elsewhere or in fewer bits"""
_OPTIMIZERS = (*_ADAMW, 'sgd', *_SMALL_ADAMW)
_SCHEDULES = {'linear': 'linear', 'cosine': 'cosine', 'constant': 'constant', 'constant_with_warmup': 'constant'}
_EPOCH = 'epoch'


def one_of(args: Any, name: str, known: Any) -> str:
    """The argument as text, also of an enum of transformers. Raises ValueError for one that is not known."""
    value = getattr(args, name)
    value = str(getattr(value, 'value', value))
    if value not in known:
        raise ValueError(f'{type(args).__name__}: {name}={value!r} is not served here; use one of {", ".join(known)}')
    return value


def check_choices(args: Any) -> None:
    """The arguments with a choice of values. Raises ValueError."""
    for name, known in (
        ('optim', _OPTIMIZERS),
        ('lr_scheduler_type', _SCHEDULES),
        ('logging_strategy', ('steps', _EPOCH, 'no')),
        ('eval_strategy', ('steps', _EPOCH, 'no')),
        ('save_strategy', ('steps', _EPOCH, 'no')),
    ):
        one_of(args, name, known)
    if (name := one_of(args, 'optim', _OPTIMIZERS)) in _SMALL_ADAMW:
        warnings.warn(
            f'{type(args).__name__}: optim={name!r} is plain AdamW here, with states in 32 bits',
            stacklevel=script_level(),
        )
    if args.bf16 and args.fp16:
        raise ValueError(f'{type(args).__name__}: bf16=True and fp16=True; give one of them')


def precision(args: Any) -> str:
    return 'bf16' if args.bf16 else 'fp16' if args.fp16 else 'fp32'


def strategy_name() -> str:
    """One process, or as many as torchrun or accelerate launched."""
    return 'ddp' if int(os.environ.get('WORLD_SIZE', '1')) > 1 else 'naive'


def schedule(args: Any, total_steps: int) -> dict[str, Any]:
    """`lr_schedule` and `warmup_steps` of a run of so many optimizer steps."""
    name = _SCHEDULES[one_of(args, 'lr_scheduler_type', _SCHEDULES)]
    share = args.warmup_steps if 0 < args.warmup_steps < 1 else args.warmup_ratio
    steps = int(args.warmup_steps) if args.warmup_steps >= 1 else math.ceil(share * total_steps)
    return {'lr_schedule': name, 'warmup_steps': steps}


def make_optimizer(args: Any, strategy: Any, model: Any) -> Any:
    """AdamW or SGD over what the model trains; biases and norms do not decay."""
    import torch

    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    groups: list[dict[str, Any]] = [{'params': [p for _, p in named]}]
    if args.weight_decay:
        apart = [p for name, p in named if p.dim() < 2 or name.endswith('bias')]
        kept = {id(p) for p in apart}
        groups = [
            {'params': [p for _, p in named if id(p) not in kept], 'weight_decay': args.weight_decay},
            {'params': apart, 'weight_decay': 0.0},
        ]
        groups = [group for group in groups if group['params']]
    if one_of(args, 'optim', _OPTIMIZERS) == 'sgd':
        return torch.optim.SGD(groups, lr=args.learning_rate, weight_decay=args.weight_decay)
    betas = (args.adam_beta1, args.adam_beta2)
    return strategy.make_optimizer(groups, lr=args.learning_rate, betas=betas, eps=args.adam_epsilon)


def every(value: float | None, default: float, total_steps: int) -> int:
    """`logging_steps` and its like: a number of steps, or below 1 a share of the run."""
    value = default if value is None else value
    return max(math.ceil(value * total_steps) if value < 1 else int(value), 1)


def trackers(args: Any) -> list[Any]:
    """The callbacks of `report_to`; a warning names a tracker there is none of."""
    given = args.report_to if isinstance(args.report_to, (list, tuple)) else [args.report_to]
    made: list[Any] = []
    for name in given:
        if name in (None, 'none'):
            continue
        if name == 'tensorboard':
            made.append(TensorBoard(args.logging_dir) if args.logging_dir else TensorBoard())
        elif name == 'wandb':
            project = os.environ.get('WANDB_PROJECT', 'huggingface')
            made.append(WandB(project, **({'name': args.run_name} if args.run_name else {})))
        elif name in TRACKERS:
            made.append(TRACKERS.find(name)())
        else:
            warnings.warn(
                f'{type(args).__name__}: report_to={name!r} has no effect here; there are {", ".join(TRACKERS)}, and '
                'metrics.jsonl is always written to output_dir',
                stacklevel=script_level(),
            )
    return made


def saving(args: Any, interval: int | None) -> SaveCheckpoint:
    """The checkpoints of a run; `interval`: learning phases between two."""
    if one_of(args, 'save_strategy', ('steps', _EPOCH, 'no')) == 'no':
        return SaveCheckpoint(interval=None)
    return SaveCheckpoint(interval=interval, keep_last=args.save_total_limit)
