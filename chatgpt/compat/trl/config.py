"""`PPOConfig` with the arguments of both of TRL's eras: 0.4 to 0.11 ('classic': the user's own loop of `generate` and
`step`) and 0.12 to 1.12 ('second': `PPOTrainer.train()`).

`FIELDS` says for each argument and era what becomes of it. A script may mix both eras' names: two names for one thing
follow each other, and which trainer is made decides whose defaults hold for what was not given.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Literal

from chatgpt.compat.trl.arguments import (
    Entry,
    TrainingArguments,
    absent,
    check_given,
    converted,
    given,
    label,
    ours,
    refused,
    warned,
)
from chatgpt.compat.trl.later import ARGUMENTS

Era = Literal['classic', 'second']

DEFAULTS: dict[str, dict[str, Any]] = {
    'classic': {
        'seed': 0,
        'learning_rate': 1.41e-5,
        'adap_kl_ctrl': True,
        'init_kl_coef': 0.2,
        'ppo_epochs': 4,
        'max_grad_norm': None,
        'gradient_checkpointing': False,
    },
    'second': {
        'seed': 42,
        'learning_rate': 3e-6,
        'adap_kl_ctrl': False,
        'init_kl_coef': 0.05,
        'ppo_epochs': 4,
        'max_grad_norm': 1.0,
        'gradient_checkpointing': False,
    },
}
"""of the arguments that both eras have with different defaults: those of 0.11.4 and of 1.12"""

TWINS = {'num_ppo_epochs': 'ppo_epochs', 'kl_coef': 'init_kl_coef', 'optimize_cuda_cache': 'optimize_device_cache'}
"""an argument, and the other that means the same"""

_SECOND = 'an argument of 0.12 to 1.12, whose trainer has a loop of its own'
_CLASSIC = 'an argument of 0.4 to 0.11'
_LOOP = absent('the loop of `generate` and `step` is the script')
_HUB = absent('the script calls push_to_hub')
_PROCESSES = warned('how many processes and how weights are split over them is the strategy of a launcher here')
_MEMORY = warned('a matter of memory or speed, without influence on numbers')
_OPTIM = absent('the optimizer is the one the trainer is given, or Adam with learning_rate')

# For each argument, what becomes of it in the classic trainer and in the second one.
FIELDS: dict[str, tuple[Entry, Entry]] = {
    # both
    'learning_rate': (converted("lr of the trainer's own Adam; a given optimizer has its own"), ours('lr')),
    'seed': (converted('seed of the strategy, and of Python, numpy and torch'), converted('seed of the strategy')),
    'batch_size': (
        converted('sequences of one step(), of one process'),
        converted('episodes of one update; computed when not given'),
    ),
    'mini_batch_size': (
        converted('x gradient_accumulation_steps is train_batch_size'),
        converted('train_batch_size; computed when not given'),
    ),
    'gradient_accumulation_steps': (
        converted('train_batch_size is mini_batch_size x this; one optimizer step each, as in TRL'),
        converted('part of the batch size'),
    ),
    'world_size': (label('filled in by the trainer'), label('filled in by the trainer')),
    'max_grad_norm': (ours('max_grad_norm'), ours('max_grad_norm')),
    'ppo_epochs': (ours('max_epochs'), ours('max_epochs')),
    'num_ppo_epochs': (ours('max_epochs'), ours('max_epochs')),
    'init_kl_coef': (ours('kl_coef'), ours('kl_coef')),
    'kl_coef': (ours('kl_coef'), ours('kl_coef')),
    'adap_kl_ctrl': (converted('kl_target is `target`, or None when False'), converted('kl_target; fixed by default')),
    'target': (ours('kl_target'), ours('kl_target')),
    'horizon': (ours('kl_horizon'), ours('kl_horizon')),
    'gamma': (ours('gamma'), ours('gamma')),
    'lam': (ours('lam'), ours('lam')),
    'cliprange': (ours('eps_clip'), ours('eps_clip')),
    'cliprange_value': (ours('value_clip'), ours('value_clip')),
    'vf_coef': (
        ours('value_coef'),
        converted(
            "factor on the value model's loss, whose optimizer is its own; Adam takes the same step for any factor"
        ),
    ),
    'whiten_rewards': (
        converted("TRL's formula in an estimator of its own, which adds the mean back; whiten_rewards here scales it"),
        converted(
            'whiten_rewards: rewards are divided by their deviation; TRL then adds back what is left of the mean'
        ),
    ),
    'gradient_checkpointing': (
        converted("the model's own gradient_checkpointing_enable()"),
        converted("the model's own gradient_checkpointing_enable()"),
    ),
    'remove_unused_columns': (
        converted('columns of a `datasets` dataset that no model takes do not reach the dataloader'),
        converted('only input_ids of the dataset are read'),
    ),
    'dataset_num_proc': (label(), label()),
    'exp_name': (label(), label()),
    'reward_model': (label(), label()),
    # classic
    'log_with': (
        converted("log_stats writes to 'tensorboard' or 'wandb' through our callbacks"),
        converted('the same as report_to'),
    ),
    'task_name': (label(), label()),
    'model_name': (label(), label()),
    'query_dataset': (label(), label()),
    'tracker_kwargs': (
        converted("'wandb': project, name and the other arguments of wandb.init"),
        absent(_CLASSIC),
    ),
    'accelerator_kwargs': (
        warned('but for logging_dir: there is no accelerate; precision and processes are those of the strategy'),
        absent(_CLASSIC),
    ),
    'project_kwargs': (converted("'logging_dir' is the folder of TensorBoard's files"), absent(_CLASSIC)),
    'tracker_project_name': (converted('the project of W&B'), absent(_CLASSIC)),
    'push_to_hub_if_best_kwargs': (
        converted('push_to_hub after each compare_steps-th step whose mean score is the highest so far'),
        absent(_CLASSIC),
    ),
    'compare_steps': (converted('see push_to_hub_if_best_kwargs'), absent(_CLASSIC)),
    'steps': (label('total_ppo_epochs is steps / batch_size, which scripts loop over'), absent(_CLASSIC)),
    'kl_penalty': (converted("kl_kind: 'kl' is 'k1', 'mse' is 'k2', 'abs' and 'full' the same"), absent(_CLASSIC)),
    'forward_batch_size': (converted('mini_batch_size'), absent(_CLASSIC)),
    'optimize_device_cache': (_MEMORY, _MEMORY),
    'optimize_cuda_cache': (_MEMORY, _MEMORY),
    'early_stopping': (
        converted('target_kl counts; here the batch beyond it does not change the weights, TRL stops after it'),
        absent(_CLASSIC),
    ),
    'target_kl': (ours('target_kl'), absent(_CLASSIC)),
    'ratio_threshold': (ours('ratio_threshold'), converted('ratio_threshold where it is given, else None')),
    'use_score_scaling': (ours("score_scaling='running'"), ours("score_scaling='running'")),
    'use_score_norm': (ours("score_scaling='norm'"), ours("score_scaling='norm'")),
    'score_clip': (ours('score_clip'), ours('score_clip')),
    'is_encoder_decoder': (label('filled in by the trainer'), label("read from the model's config")),
    'is_peft_model': (label('filled in by the trainer'), label()),
    'backward_batch_size': (label('filled in: mini_batch_size x gradient_accumulation_steps'), label()),
    'global_backward_batch_size': (label('filled in by the trainer'), label()),
    'global_batch_size': (label('filled in by the trainer'), label()),
    # second
    'num_mini_batches': (
        converted('mini_batch_size = batch_size / this, where mini_batch_size is not given'),
        converted('train_batch_size = batch size / this'),
    ),
    'total_episodes': (_LOOP, ours('num_episodes')),
    'local_rollout_forward_batch_size': (_MEMORY, _MEMORY),
    'num_sample_generations': (_LOOP, converted('how often generate_completions runs while training')),
    'response_length': (absent('give max_new_tokens to generate'), ours('max_new_tokens')),
    'stop_token': (absent('give eos_token_id to generate'), converted("'eos' ends responses at the end token")),
    'stop_token_id': (absent('give eos_token_id to generate'), ours('eos_token_id')),
    'temperature': (absent('give temperature to generate'), ours('temperature')),
    'missing_eos_penalty': (
        absent('take it from the scores given to step'),
        converted('subtracted from the score of a response without end'),
    ),
    'sft_model_path': (label('what the script loads'), label('what the script loads')),
    'reward_model_path': (label('what the script loads'), label('what the script loads')),
    'kl_estimator': (converted('kl_kind'), ours('kl_kind')),
    'ds3_gather_for_generation': (_MEMORY, _MEMORY),
    'model_adapter_name': (
        refused('a model has one adapter here; its reference is the model without it'),
        refused('a model has one adapter here; its reference is the model without it'),
    ),
    'ref_adapter_name': (
        refused('a model has one adapter here; its reference is the model without it'),
        refused('a model has one adapter here; its reference is the model without it'),
    ),
    'num_total_batches': (_LOOP, label('computed')),
    'micro_batch_size': (label(), label('computed')),
    'local_batch_size': (label(), label('computed')),
    'local_mini_batch_size': (label(), label('computed')),
    # transformers' TrainingArguments
    'max_steps': (_LOOP, warned('total_episodes, or num_train_epochs, says how long')),
    'num_train_epochs': (_LOOP, converted('of the dataset, where total_episodes is not given')),
    'logging_steps': (_LOOP, label('every update is logged, as in TRL')),
    'logging_strategy': (_LOOP, label('every update is logged, as in TRL')),
    'eval_strategy': (_LOOP, label('generate_completions runs num_sample_generations times, as in TRL')),
    'eval_steps': (_LOOP, label('see eval_strategy')),
    'eval_on_start': (_LOOP, label('see eval_strategy')),
    'save_strategy': (_LOOP, converted('SaveCheckpoint every save_steps updates, or every pass over the dataset')),
    'optim_args': (_OPTIM, refused('there are no further arguments of AdamW or SGD here')),
    'output_dir': (absent('the script calls save_pretrained'), converted('where train() and save_model write')),
    'per_device_train_batch_size': (
        converted('batch_size = this x gradient_accumulation_steps, where batch_size is not given'),
        converted('part of the batch size'),
    ),
    'bf16': (
        absent('load the model with torch_dtype=torch.bfloat16'),
        converted("precision='bf16' of the strategy"),
    ),
    'fp16': (absent('load the model with torch_dtype'), converted("precision='fp16' of the strategy")),
    'report_to': (converted('log_with'), converted('our callbacks')),
}
"""argument: what becomes of it in the classic trainer, and in the second one"""

_REST: dict[str, Entry] = {
    'run_name': label('the name of the run for the tracker'),
    'do_train': label('what scripts ask'),
    'do_eval': label('what scripts ask'),
    'do_predict': label('what scripts ask'),
    'local_rank': label('the launcher sets LOCAL_RANK'),
    'deepspeed': _PROCESSES,
    'fsdp': _PROCESSES,
    'fsdp_config': _PROCESSES,
    'ddp_backend': _PROCESSES,
    'ddp_timeout': _PROCESSES,
    'ddp_find_unused_parameters': _PROCESSES,
    'ddp_bucket_cap_mb': _PROCESSES,
    'ddp_broadcast_buffers': _PROCESSES,
    'accelerator_config': _PROCESSES,
    'use_cpu': _PROCESSES,
    'no_cuda': _PROCESSES,
    'full_determinism': label(
        'on a CPU runs repeat bit for bit on the same layout; for a GPU give deterministic=True to the strategy'
    ),
    'dataloader_num_workers': _MEMORY,
    'dataloader_persistent_workers': _MEMORY,
    'dataloader_prefetch_factor': _MEMORY,
    'gradient_checkpointing_kwargs': _MEMORY,
    'torch_compile': _MEMORY,
    'torch_compile_backend': _MEMORY,
    'torch_compile_mode': _MEMORY,
    'torch_empty_cache_steps': _MEMORY,
    'use_liger_kernel': _MEMORY,
    'tf32': _MEMORY,
}
"""further arguments of transformers' class that both trainers treat alike"""

_OPTIMIZER = (
    *('optim', 'optim_args', 'weight_decay', 'adam_beta1', 'adam_beta2', 'adam_epsilon'),
    *('lr_scheduler_type', 'lr_scheduler_kwargs', 'warmup_steps', 'warmup_ratio'),
)
_HUB_NAMES = ('push_to_hub', 'hub_model_id', 'hub_strategy', 'hub_token', 'hub_private_repo')
_LATER_CLASSIC = dict.fromkeys(_OPTIMIZER, _OPTIM) | dict.fromkeys(_HUB_NAMES, _HUB)


def fates(era: Era) -> dict[str, Entry]:
    """Each argument of `PPOConfig`, and what becomes of it in the trainer of this era."""
    position = 0 if era == 'classic' else 1
    table = {name: entries[position] for name, entries in FIELDS.items()} | _REST
    if era == 'second':
        return ARGUMENTS | {name: entries[1] for name, entries in FIELDS.items()}
    for name in PPOConfig.__dataclass_fields__:
        if name not in table:
            table[name] = _LATER_CLASSIC.get(name, _LOOP)
    return table


@dataclass(kw_only=True)
class PPOConfig(TrainingArguments):
    """Arguments of TRL's `PPOTrainer`, of 0.4 to 0.11 and of 0.12 to 1.12. `FIELDS` says what each one does here.

    What is None by default takes the value of the era (`DEFAULTS`): that of the arguments given, until a trainer is
    made with it.

    Raises:
        ValueError: an unknown name, two names of one thing with two values, batch sizes that do not divide.
    """

    # both eras
    exp_name: str = 'ppo'
    reward_model: str = 'sentiment-analysis:lvwerra/distilbert-imdb'
    dataset_num_proc: int | None = None
    batch_size: int | None = None
    mini_batch_size: int | None = None
    world_size: int | None = None
    gamma: float = 1.0
    lam: float = 0.95
    cliprange: float = 0.2
    cliprange_value: float = 0.2
    vf_coef: float = 0.1
    whiten_rewards: bool = False

    # 0.4 to 0.11
    log_with: str | None = None
    task_name: str | None = None
    model_name: str = 'gpt2'
    query_dataset: str = 'stanfordnlp/imdb'
    tracker_kwargs: dict = field(default_factory=dict)
    accelerator_kwargs: dict = field(default_factory=dict)
    project_kwargs: dict = field(default_factory=dict)
    tracker_project_name: str = 'trl'
    push_to_hub_if_best_kwargs: dict = field(default_factory=dict)
    compare_steps: int = 1
    steps: int = 20000
    adap_kl_ctrl: bool | None = None
    init_kl_coef: float | None = None
    kl_penalty: str = 'kl'
    target: float = 6.0
    horizon: float = 10000.0
    forward_batch_size: int | None = None
    ppo_epochs: int | None = None
    optimize_cuda_cache: bool | None = None
    optimize_device_cache: bool | None = None
    early_stopping: bool = False
    target_kl: float = 1.0
    ratio_threshold: float = 10.0
    use_score_scaling: bool = False
    use_score_norm: bool = False
    score_clip: float | None = None
    is_encoder_decoder: bool | None = None
    is_peft_model: bool | None = None
    backward_batch_size: int | None = None
    global_backward_batch_size: int | None = None
    global_batch_size: int | None = None

    # 0.12 to 1.12
    num_mini_batches: int = 1
    total_episodes: int | None = None
    local_rollout_forward_batch_size: int = 64
    num_sample_generations: int = 10
    response_length: int = 53
    stop_token: str | None = None
    stop_token_id: int | None = None
    temperature: float = 0.7
    missing_eos_penalty: float | None = None
    sft_model_path: str | None = None
    reward_model_path: str | None = None
    num_ppo_epochs: int | None = None
    kl_coef: float | None = None
    kl_estimator: str = 'k1'
    ds3_gather_for_generation: bool = True
    model_adapter_name: str | None = None
    ref_adapter_name: str | None = None
    num_total_batches: int | None = None
    micro_batch_size: int | None = None
    local_batch_size: int | None = None
    local_mini_batch_size: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.kl_penalty not in ('kl', 'abs', 'mse', 'full'):
            raise ValueError(f"kl_penalty={self.kl_penalty!r} is not known; choose one of 'kl', 'abs', 'mse', 'full'")
        if self.evaluation_strategy is not None:
            self.eval_strategy = self.evaluation_strategy
        self._filled: dict[str, Any] = {}
        self.resolve(self.era)

    @property
    def era(self) -> Era:
        """That of the arguments given: the second, where some are only of the second and none only of the classic."""
        return 'second' if self._given & _ONLY_SECOND and not self._given & _ONLY_CLASSIC else 'classic'

    def resolve(self, era: Era) -> None:
        """Fill in what was not given with this era's defaults.

        Raises:
            ValueError: batch sizes that do not divide.
        """
        for name, value in self._filled.items():
            if getattr(self, name) == value:  # else the script has set it since
                setattr(self, name, None)
        self._follow_twins()
        before = {name: getattr(self, name) for name in _DEPEND}
        for name, value in DEFAULTS[era].items():
            if getattr(self, name) is None:
                setattr(self, name, value)
        self._follow_twins()
        if era == 'classic':
            self._classic_batches()
        self._filled = {name: getattr(self, name) for name, value in before.items() if value is None}

    def _follow_twins(self) -> None:
        """Two names of one thing hold one value.

        Raises:
            ValueError: both were given, with two values.
        """
        for name, other in TWINS.items():
            one, two = getattr(self, name), getattr(self, other)
            if one is not None and two is not None and one != two:
                raise ValueError(f'{name}={one!r} and {other}={two!r} mean the same setting: give one of them')
            value = one if two is None else two
            setattr(self, name, value)
            setattr(self, other, value)

    def _classic_batches(self) -> None:
        if self.batch_size is None:
            steps = self.per_device_train_batch_size * self.gradient_accumulation_steps
            self.batch_size = steps if given(self, 'per_device_train_batch_size') else 128
        if self.forward_batch_size is not None:
            self.mini_batch_size = self.forward_batch_size
        if self.mini_batch_size is None and self.num_mini_batches > 1:
            self.mini_batch_size = self.batch_size // self.num_mini_batches // self.gradient_accumulation_steps
        if self.mini_batch_size is None:
            self.mini_batch_size = min(128, max(self.batch_size // self.gradient_accumulation_steps, 1))
        self.backward_batch_size = self.mini_batch_size * self.gradient_accumulation_steps
        if self.backward_batch_size < 1 or self.batch_size % self.backward_batch_size:
            raise ValueError(
                f'batch_size={self.batch_size} must be a multiple of mini_batch_size x gradient_accumulation_steps = '
                f'{self.mini_batch_size} x {self.gradient_accumulation_steps}'
            )

    @property
    def total_ppo_epochs(self) -> int:
        """Steps of the loop until `steps` sequences are seen."""
        return math.ceil(self.steps / (self.batch_size or 1))

    def check(self, era: Era) -> None:
        """Errors and warnings for what the trainer of this era cannot honour; see `check_given`."""
        check_given(self, fates(era))


_DEPEND = (*DEFAULTS['classic'], *TWINS, 'batch_size', 'mini_batch_size', 'backward_batch_size')
"""what is filled in where it was not given"""
_ONLY_CLASSIC = {
    *('adap_kl_ctrl', 'init_kl_coef', 'ppo_epochs', 'batch_size', 'mini_batch_size', 'forward_batch_size'),
    *('target', 'horizon', 'kl_penalty', 'early_stopping', 'steps', 'log_with', 'use_score_scaling', 'model_name'),
}
_ONLY_SECOND = {
    *('output_dir', 'per_device_train_batch_size', 'num_mini_batches', 'total_episodes', 'response_length'),
    *('stop_token', 'stop_token_id', 'missing_eos_penalty', 'num_ppo_epochs', 'kl_coef', 'kl_estimator'),
    *('reward_model_path', 'sft_model_path', 'num_sample_generations', 'local_rollout_forward_batch_size'),
}
