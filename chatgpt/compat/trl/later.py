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

from chatgpt.compat.trl.arguments import Entry, converted, label, ours, refused, script_level, warned
from chatgpt.trainer.callbacks import TRACKERS, SaveCheckpoint, TensorBoard, WandB

_PROCESSES = warned('processes and what each holds are decided by the launcher: torchrun runs data-parallel')
_MEMORY = warned('a matter of memory or speed, without influence on numbers')
_NO_DATALOADER = warned('records are tokenized once and cut into batches in this process; there is no dataloader')
_FILES = label('weights are always safetensors')

ARGUMENTS: dict[str, Entry] = {
    'output_dir': ours('run_dir, and where save_model writes'),
    'overwrite_output_dir': label('an earlier run in the folder is never deleted'),
    'run_name': converted('the name of the W&B run'),
    'seed': converted('seed of the strategy'),
    'data_seed': converted('seed of the strategy, where it is given'),
    'do_train': label('what scripts ask'),
    'do_eval': label('what scripts ask'),
    'do_predict': label('what scripts ask'),
    'per_device_train_batch_size': converted('train_batch_size = this x gradient_accumulation_steps x processes'),
    'per_device_eval_batch_size': converted('no number depends on it; prompts of generate_completions(sampling=True)'),
    'gradient_accumulation_steps': converted('see per_device_train_batch_size; the loss is one mean over the batch'),
    'eval_accumulation_steps': _MEMORY,
    'num_train_epochs': ours('max_epochs; a part of an epoch as max_steps'),
    'max_steps': ours('max_steps; -1 is none'),
    'dataloader_drop_last': warned('the last batch of an epoch is learned from, whatever its size'),
    'dataloader_num_workers': _NO_DATALOADER,
    'dataloader_pin_memory': ours('dataloader_pin_memory'),
    'dataloader_persistent_workers': _NO_DATALOADER,
    'dataloader_prefetch_factor': _NO_DATALOADER,
    'group_by_length': warned('forwards leave padding out, so there is nothing to group for'),
    'remove_unused_columns': label('columns that a trainer does not know stay out of it'),
    'label_names': label('of datasets that are tokenized by the script'),
    'auto_find_batch_size': warned('python -m chatgpt.plan says which batch fits before a run'),
    'learning_rate': ours('lr'),
    'optim': converted('AdamW or SGD; of the paged and 8-bit kinds of AdamW the plain one, with a warning'),
    'optim_args': refused('there are no further arguments of AdamW or SGD here'),
    'weight_decay': converted('of weights, not of biases and norms, as in transformers'),
    'adam_beta1': ours('betas'),
    'adam_beta2': ours('betas'),
    'adam_epsilon': ours('eps'),
    'max_grad_norm': ours('max_grad_norm'),
    'lr_scheduler_type': converted('linear, cosine, constant, constant_with_warmup; another is an error'),
    'lr_scheduler_kwargs': refused('the schedules here have no further arguments'),
    'warmup_steps': converted('warmup_steps; below 1 a share of the run. Ours begins at lr / warmup, theirs at 0'),
    'warmup_ratio': converted('warmup_steps, a share of the run'),
    'label_smoothing_factor': refused('SFT has no label smoothing here'),
    'neftune_noise_alpha': refused('there is no noise on embeddings here'),
    'bf16': converted("precision='bf16' of the strategy; by default fp32, also where 1.x has bf16"),
    'fp16': converted("precision='fp16' of the strategy"),
    'bf16_full_eval': label('evaluation runs in the precision of the training'),
    'fp16_full_eval': label('evaluation runs in the precision of the training'),
    'tf32': _MEMORY,
    'gradient_checkpointing': converted("the model's own gradient_checkpointing_enable(); off by default"),
    'gradient_checkpointing_kwargs': label('use_reentrant is always False'),
    'torch_compile': _MEMORY,
    'torch_compile_backend': _MEMORY,
    'torch_compile_mode': _MEMORY,
    'torch_empty_cache_steps': _MEMORY,
    'use_liger_kernel': _MEMORY,
    'deepspeed': _PROCESSES,
    'fsdp': _PROCESSES,
    'fsdp_config': _PROCESSES,
    'ddp_backend': _PROCESSES,
    'ddp_timeout': _PROCESSES,
    'ddp_find_unused_parameters': _PROCESSES,
    'ddp_bucket_cap_mb': _PROCESSES,
    'ddp_broadcast_buffers': _PROCESSES,
    'local_rank': label('the launcher sets LOCAL_RANK'),
    'use_cpu': warned('the strategy takes the accelerator where there is one; hide it with CUDA_VISIBLE_DEVICES='),
    'no_cuda': warned('the strategy takes the accelerator where there is one; hide it with CUDA_VISIBLE_DEVICES='),
    'accelerator_config': _PROCESSES,
    'full_determinism': label(
        'on a CPU runs repeat bit for bit on the same layout; for a GPU give deterministic=True to the strategy'
    ),
    'logging_dir': converted("the folder of TensorBoard's files"),
    'logging_strategy': converted('steps, epoch or no'),
    'logging_steps': converted('log_interval; None is 10, below 1 a share of the run'),
    'logging_first_step': warned('the first line comes after logging_steps'),
    'log_level': label('what is shown is set by disable_tqdm'),
    'disable_tqdm': converted('ProgressBar(enabled=False)'),
    'report_to': converted(
        'tensorboard, wandb, trackio and mlflow; another is a warning. metrics.jsonl is always in output_dir'
    ),
    'eval_strategy': converted('evaluation every eval_steps steps, or at the end of each epoch'),
    'evaluation_strategy': converted('the older name of eval_strategy'),
    'eval_steps': converted('see eval_strategy; None is logging_steps'),
    'eval_delay': warned('evaluations begin with the first that is due'),
    'eval_on_start': converted('an evaluation before the first step'),
    'save_strategy': converted('SaveCheckpoint every save_steps steps or every epoch, and one at the end; no: none'),
    'save_steps': converted('see save_strategy'),
    'save_total_limit': ours('keep_last'),
    'save_only_model': warned('a checkpoint here is what a run goes on from; save_model writes the model alone'),
    'save_safetensors': _FILES,
    'load_best_model_at_end': warned('the model in hand is that of the last step; checkpoints are in output_dir'),
    'metric_for_best_model': label('see load_best_model_at_end'),
    'greater_is_better': label('see load_best_model_at_end'),
    'resume_from_checkpoint': label('what scripts hand to train()'),
    'ignore_data_skip': warned('a resumed run goes on with the batch it would have had'),
    'push_to_hub': converted(
        'whether one may upload is asked when the trainer is made; save_model and push_to_hub upload the model'
    ),
    'hub_model_id': converted("the repository of push_to_hub; None is the name of output_dir, under one's account"),
    'hub_strategy': converted('the model is uploaded when it is saved; checkpoints stay here, whatever this says'),
    'hub_token': converted('the token of push_to_hub; None is that of HF_TOKEN or of a login'),
    'hub_private_repo': converted('of a repository that push_to_hub makes'),
    'hub_revision': converted('the branch of push_to_hub'),
    'include_num_input_tokens_seen': warned('perf/learn_tokens_per_s in metrics.jsonl counts tokens'),
}
"""argument of transformers' class: what becomes of it"""

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
