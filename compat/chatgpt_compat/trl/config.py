"""`PPOConfig` with the arguments of both of TRL's eras: 0.4 to 0.11 ('classic': the user's own loop of `generate` and
`step`) and 0.12 to 1.12 ('second': `PPOTrainer.train()`).

`UNSUPPORTED` lists the unsupported arguments of each era. A script may mix names of both eras: synonyms get the same
value, and the trainer that is made decides which era's defaults apply.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from chatgpt_compat.tables import load
from chatgpt_compat.trl.arguments import ARGUMENTS, Entry, SamplingArguments, check_given, each, given, refused, warned

Era = Literal['classic', 'second']

_BOTH = {'ppo_epochs': 4, 'gradient_checkpointing': False}
DEFAULTS: dict[str, dict[str, Any]] = {
    'classic': {'seed': 0, 'learning_rate': 1.41e-5, 'adap_kl_ctrl': True, 'init_kl_coef': 0.2, 'max_grad_norm': None}
    | _BOTH,
    'second': {'seed': 42, 'learning_rate': 3e-6, 'adap_kl_ctrl': False, 'init_kl_coef': 0.05, 'max_grad_norm': 1.0}
    | _BOTH,
}
"""defaults, of 0.11.4 and of 1.12, of the arguments that are None until the era is known"""

SYNONYMS = {'num_ppo_epochs': 'ppo_epochs', 'kl_coef': 'init_kl_coef', 'optimize_cuda_cache': 'optimize_device_cache'}
"""argument → the other name of it"""

_MEMORY = warned('a matter of memory or speed, without influence on numbers')
_ONE_ADAPTER = each(
    refused('a model has one adapter here; its reference is the model without it'),
    'model_adapter_name ref_adapter_name',
)
_CACHE = 'optimize_device_cache optimize_cuda_cache local_rollout_forward_batch_size ds3_gather_for_generation'
UNSUPPORTED: dict[Era, dict[str, Entry]] = {
    'classic': {
        **_ONE_ADAPTER,
        **each(
            _MEMORY,
            f'{_CACHE} dataloader_num_workers dataloader_persistent_workers dataloader_prefetch_factor torch_compile '
            'gradient_checkpointing_kwargs torch_compile_backend torch_compile_mode torch_empty_cache_steps '
            'use_liger_kernel tf32',
        ),
        **each(
            warned('the loop of `generate` and `step` is the script'),
            'total_episodes num_sample_generations num_total_batches max_steps num_train_epochs logging_steps '
            'logging_strategy eval_strategy eval_steps eval_on_start save_strategy overwrite_output_dir data_seed '
            'per_device_eval_batch_size eval_accumulation_steps dataloader_drop_last dataloader_pin_memory '
            'group_by_length label_names auto_find_batch_size label_smoothing_factor neftune_noise_alpha '
            'bf16_full_eval fp16_full_eval logging_dir logging_first_step log_level disable_tqdm evaluation_strategy '
            'eval_delay save_steps save_total_limit save_only_model save_safetensors load_best_model_at_end '
            'metric_for_best_model greater_is_better resume_from_checkpoint ignore_data_skip hub_revision '
            'include_num_input_tokens_seen',
        ),
        **each(
            warned('the optimizer is the one the trainer is given, or Adam with learning_rate'),
            'optim_args optim weight_decay adam_beta1 adam_beta2 adam_epsilon lr_scheduler_type lr_scheduler_kwargs '
            'warmup_steps warmup_ratio',
        ),
        **each(
            warned('how many processes and how weights are split over them is the strategy of a launcher here'),
            'deepspeed fsdp fsdp_config ddp_backend ddp_timeout ddp_find_unused_parameters ddp_bucket_cap_mb '
            'ddp_broadcast_buffers accelerator_config use_cpu no_cuda',
        ),
        **each(
            warned('the script calls push_to_hub'), 'push_to_hub hub_model_id hub_strategy hub_token hub_private_repo'
        ),
        **each(warned('give eos_token_id to generate'), 'stop_token stop_token_id'),
        'response_length': warned('give max_new_tokens to generate'),
        'temperature': warned('give temperature to generate'),
        'missing_eos_penalty': warned('take it from the scores given to step'),
        'output_dir': warned('the script calls save_pretrained'),
        'bf16': warned('load the model with torch_dtype=torch.bfloat16'),
        'fp16': warned('load the model with torch_dtype'),
        'accelerator_kwargs': warned(
            'but for logging_dir: there is no accelerate; precision and processes are those of the strategy'
        ),
    },
    'second': {
        **ARGUMENTS,
        **_ONE_ADAPTER,
        **each(_MEMORY, _CACHE),
        **each(
            warned('an argument of 0.4 to 0.11'),
            'tracker_kwargs accelerator_kwargs project_kwargs tracker_project_name steps kl_penalty forward_batch_size '
            'early_stopping target_kl',
        ),
        'max_steps': warned('total_episodes, or num_train_epochs, says how long'),
    },
}
"""era → its unsupported arguments → reason"""


@dataclass(kw_only=True)
class PPOConfig(SamplingArguments):
    """Arguments of TRL's `PPOTrainer`, of 0.4 to 0.11 and of 0.12 to 1.12, described in docs/coming_from/trl/.

    Arguments with a default of None take the value of the era (`DEFAULTS`): that of the given arguments, until a
    trainer is made.

    Raises:
        ValueError: an unknown name, synonyms with different values, or batch sizes that do not divide.
    """

    # both eras
    exp_name: str = 'ppo'
    reward_model: str = 'sentiment-analysis:lvwerra/distilbert-imdb'
    gamma: float = 1.0
    lam: float = 0.95
    cliprange_value: float = 0.2
    vf_coef: float = 0.1

    # 0.4 to 0.11
    log_with: str | None = None
    task_name: str | None = None
    model_name: str = 'gpt2'
    query_dataset: str = 'stanfordnlp/imdb'
    tracker_kwargs: dict = field(default_factory=dict)
    accelerator_kwargs: dict = field(default_factory=dict)
    project_kwargs: dict = field(default_factory=dict)
    tracker_project_name: str = 'trl'
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
    sft_model_path: str | None = None
    reward_model_path: str | None = None
    num_ppo_epochs: int | None = None
    kl_coef: float | None = None
    kl_estimator: str = 'k1'
    ds3_gather_for_generation: bool = True
    model_adapter_name: str | None = None
    ref_adapter_name: str | None = None

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
        """The era of the given arguments: 'second' if some exist only there and none only in the classic one."""
        return 'second' if self._given & _ONLY_SECOND and not self._given & _ONLY_CLASSIC else 'classic'

    def resolve(self, era: Era) -> None:
        """Sets arguments that were not given to this era's defaults.

        Raises:
            ValueError: batch sizes that do not divide.
        """
        for name, value in self._filled.items():
            if getattr(self, name) == value:  # else the script has changed it
                setattr(self, name, None)
        self._match_synonyms()
        before = {name: getattr(self, name) for name in _DEPEND}
        for name, value in DEFAULTS[era].items():
            if getattr(self, name) is None:
                setattr(self, name, value)
        self._match_synonyms()
        if era == 'classic':
            self._classic_batches()
        self._filled = {name: getattr(self, name) for name, value in before.items() if value is None}

    def _match_synonyms(self) -> None:
        """Gives synonyms the same value.

        Raises:
            ValueError: both were given with different values.
        """
        for name, other in SYNONYMS.items():
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
        """Steps of the loop for `steps` sequences."""
        return math.ceil(self.steps / (self.batch_size or 1))

    def check(self, era: Era) -> None:
        """Raises and warns for unsupported arguments of the era's trainer; see `check_given`."""
        check_given(self, UNSUPPORTED[era])

    def settings(self) -> dict[str, Any]:
        """Returns the fields of our `PPOConfig` that both trainers derive from these arguments alone."""
        scaling = 'none' if not self.use_score_scaling else 'norm' if self.use_score_norm else 'running'
        adapts = bool(self.adap_kl_ctrl and self.init_kl_coef and self.target is not None)
        return {
            'max_epochs': self.ppo_epochs,
            'kl_coef': self.init_kl_coef,
            **({'kl_target': self.target, 'kl_horizon': self.horizon} if adapts else {}),
            'score_scaling': scaling,
            'score_clip': self.score_clip,
            'gamma': self.gamma,
            'lam': self.lam,
            'eps_clip': self.cliprange,
            'value_clip': self.cliprange_value,
        }


_DEPEND = (*DEFAULTS['classic'], *SYNONYMS, 'batch_size', 'mini_batch_size', 'backward_batch_size')
"""arguments that are filled in if they were not given"""
_ONLY_CLASSIC = {
    *('adap_kl_ctrl', 'init_kl_coef', 'ppo_epochs', 'batch_size', 'mini_batch_size', 'forward_batch_size'),
    *('target', 'horizon', 'kl_penalty', 'early_stopping', 'steps', 'log_with', 'use_score_scaling', 'model_name'),
}
_ONLY_SECOND = {
    *('output_dir', 'per_device_train_batch_size', 'num_mini_batches', 'total_episodes', 'response_length'),
    *('stop_token', 'stop_token_id', 'missing_eos_penalty', 'num_ppo_epochs', 'kl_coef', 'kl_estimator'),
    *('reward_model_path', 'sft_model_path', 'num_sample_generations', 'local_rollout_forward_batch_size'),
}


# ---------------------------------------------------------------------- which trainer a call means

_TRAINERS = {
    'classic': 'chatgpt_compat.trl.ppo_step:ClassicPPOTrainer',
    'second': 'chatgpt_compat.trl.ppo_train:PPOTrainer',
}
_CLASSIC = {'dataset', 'optimizer', 'num_shared_layers', 'lr_scheduler', 'training_data_collator'}
_SECOND = {
    *('args', 'processing_class', 'policy', 'ref_policy', 'reward_model', 'value_model', 'train_dataset'),
    *('eval_dataset', 'callbacks', 'optimizers', 'peft_config'),
}


class _PPOTrainer:
    """TRL's `PPOTrainer` of either era, chosen by names and positions of a call's arguments. As a base class it is the
    classic one."""

    __name__ = 'PPOTrainer'

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return load(_TRAINERS['second' if is_second(args, kwargs) else 'classic'])(*args, **kwargs)

    def chosen(self, keywords: Sequence[str]) -> type | None:
        """Returns the class of a call with these keywords; None if they do not tell."""
        try:
            era = 'second' if is_second((), dict.fromkeys(keywords)) else 'classic'
        except ValueError:
            return None
        return load(_TRAINERS[era])

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[type, ...]:
        return (load(_TRAINERS['classic']),)

    def __instancecheck__(self, trainer: Any) -> bool:
        return isinstance(trainer, tuple(map(load, _TRAINERS.values())))


PPOTrainer = _PPOTrainer()


def is_second(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Returns True if the arguments are those of the second era's trainer.

    Raises:
        ValueError: they fit both eras or neither.
    """
    classic, second = sorted(_CLASSIC & kwargs.keys()), sorted(_SECOND & kwargs.keys())
    if len(args) > 1:  # the model, or the tokenizer
        if hasattr(args[1], 'parameters') or hasattr(args[1], 'pretrained_model'):
            classic.append('a model in the second place')
        elif hasattr(args[1], 'decode'):
            second.append('a tokenizer in the second place')
    if classic and second:
        raise ValueError(
            f'PPOTrainer: {classic[0]} is an argument of 0.4 to 0.11, {second[0]} of 0.12 to 1.12; give the arguments '
            'of one of them'
        )
    if not classic and not second and not {'model', 'tokenizer'} & kwargs.keys():
        raise ValueError(
            'PPOTrainer: give (config, model, ref_model, tokenizer, ...) as up to 0.11, or (args, processing_class, '
            'model, ref_model, reward_model, train_dataset, value_model, ...) as from 0.12 on'
        )
    return bool(second)
