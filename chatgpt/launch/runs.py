"""What a script's run is made of: one dataclass each for PPO, SFT, reward models and preferences, behind flags and
config files alike.

A run has the settings of its trainer, and beside them where models and data are and what is written. Left out: reading
flags and files (`config_file`), and building the objects (`recipes`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, Literal, cast, get_args

from chatgpt.batching import Exact
from chatgpt.environments import EnvironmentSettings
from chatgpt.functional.logprobs import LogprobKernel
from chatgpt.launch.arguments import check_precision
from chatgpt.launch.methods import METHODS, PREFERENCE_RUN, Recipe, methods_of
from chatgpt.names import hint
from chatgpt.nn.families import MODELS
from chatgpt.nn.head_kernels import check_name
from chatgpt.nn.liger import check_liger_temperature
from chatgpt.publish import NUM_SAMPLES
from chatgpt.rollout import SamplingParams
from chatgpt.rollout.registry import ENGINES
from chatgpt.trainer.callbacks.checkpoint import CHECKPOINT_MINUTES
from chatgpt.trainer.callbacks.trackers import TRACKERS, tracker_names
from chatgpt.trainer.config import (
    LearningSettings,
    PPOConfig,
    Settings,
    SFTConfig,
    SupervisedConfig,
)
from chatgpt.trainer.objectives.ilql import ILQLConfig
from chatgpt.trainer.objectives.pairs import DPOLoss, PreferenceConfig
from chatgpt.trainer.objectives.reward_model import RewardModelConfig
from chatgpt.trainer.strategies.registry import STRATEGIES, that_cut_layers

Precision = Literal['auto', 'fp32', 'bf16', 'fp16']
Optimizer = Literal['adamw', 'adamw8bit', 'paged_adamw8bit', 'sgd']
Quantize = Literal['none', 'nf4']
BiasMode = Literal['none', 'all', 'lora_only']
CriticStart = Literal['reward_model', 'actor']
CRITIC_STARTS = get_args(CriticStart)
EMBEDDED = 'embedded'
"""the name of the small GPT-2 that a run makes for itself, and teaches the stories first unless it is SFT"""
Groups = dict[str, tuple[str, ...]]
MODEL = ('pretrain', 'lora_rank', 'gradient_checkpointing')
RUN = (
    *('save_path', 'model_path', 'push_to_hub', 'resume', 'checkpoint_interval', 'log_with'),
    *('strategy', 'precision', 'seed', 'plan'),
)


def same_file(a: str, b: str) -> bool:
    return Path(a).resolve() == Path(b).resolve()


_NOT_IN_PARTS = (
    ('reproducible', None),
    ('compile_blocks', False),
    ('num_layers_unfrozen', None),
    ('environment', None),
)
"""settings, as they are by default, that do not go with tensor_parallel"""


@dataclass(kw_only=True)
class Run(LearningSettings):
    """What the runs of all scripts have in common."""

    said = cast(Mapping[str, Any], MappingProxyType({}))  # no annotation: not a setting
    """the settings that the user gave, in this start or in one that it goes on from"""
    strategy: str = field(default='naive', metadata={'choices': STRATEGIES})
    """what prepares and shards the models; module:name is a class of your own (docs/strategies.md)"""
    precision: Precision = 'auto'
    """compute dtype; auto: bf16 on a GPU, fp32 on a CPU"""
    seed: int = 42
    """decides every draw, whatever the layout"""
    model: str = field(default='auto', metadata={'choices': MODELS})
    """family; auto reads it from the config; module:name is a `ModelKind` of your own"""
    pretrain: str | None = None
    """hub name or folder of the model to start from; embedded: a small GPT-2 for trials, which the run makes and,
    unless it is SFT, teaches to write stories first"""
    tokenizer: str | None = None
    """hub name or folder; none: that of pretrain"""
    save_path: str = 'outputs/run'
    """folder of this run"""
    model_path: str | None = None
    """where the trained model is written; none: a folder in save_path"""
    push_to_hub: str | None = None
    """name on the Hugging Face Hub to upload the model to"""
    hub_private: bool = False
    """make that repository private, where it is made"""
    card_samples: int = NUM_SAMPLES
    """texts of the run that the model card shows; 0: none"""
    save_adapter: bool = False
    """also write the adapters alone, for PEFT, to adapter/ in save_path; with lora_rank"""
    lr: float | None = None
    """learning rate"""
    weight_decay: float = 0.0
    """decoupled, on all trained weights"""
    optimizer: Optimizer = 'adamw'
    """adamw8bit keeps its states in 8 bits, paged ones go to host memory where a GPU's is short (bitsandbytes)"""
    lora_rank: int = 0
    """adapters of this rank instead of all weights; 0: all weights"""
    lora_alpha: float | None = None
    """adapters are scaled by alpha / rank; none: alpha = rank"""
    lora_dropout: float = 0.0
    """on the input of adapters"""
    lora_target_modules: list[str] | None = None
    """patterns of layers that get adapters; none: every linear layer of the blocks"""
    lora_train_bias: BiasMode = 'none'
    """biases that are trained with the adapters"""
    quantize: Quantize = 'none'
    """keep the frozen weights under the adapters in 4 bits; with lora_rank, for PPO with shared_trunk"""
    gradient_checkpointing: bool = False
    """recompute activations in the backward pass"""
    logprob_kernel: LogprobKernel = 'auto'
    """how an actor's states become log-probs: plain, fused (blocks of the vocabulary), liger (its extra), or auto:
    fused on a GPU where the output layer allows"""
    compile_blocks: bool = False
    """run transformer blocks through torch.compile when learning and scoring; the first steps compile"""
    trust_remote_code: bool = False
    """allow a hub model to bring code of its own"""
    skip_bad_records: bool = False
    """leave bad records out and count them"""
    rank_timeout_s: float = 1800.0
    """a rank that keeps the others waiting for longer ends the run, with a message that names it"""
    tensor_parallel: int = 1
    """processes that hold each layer together and are one rank, with strategy fsdp (docs/strategies.md)"""
    deterministic: bool = False
    """torch's deterministic algorithms, and only those attention kernels: slower on a GPU (docs/strategies.md)"""
    reproducible: Literal['exact'] | None = None
    """exact: the same weights to the last bit under naive, ddp and fsdp, on 1, 2, 4 or 8 processes of the same machine
    (docs/strategies.md)"""
    atoms: int = 8
    """pieces that every batch of an exact run is computed in: a power of two, and the most processes there can be"""
    plan: bool = False
    """print what memory each phase takes, whether it fits here and what would make it fit, and stop; no weight is
    loaded"""
    resume: str | None = None
    """a checkpoint folder, or auto: the newest of save_path"""
    checkpoint_interval: int = 0
    """phases between checkpoints; 0 goes by checkpoint_minutes alone"""
    checkpoint_minutes: float = CHECKPOINT_MINUTES
    """also after a phase that ends so long after the last one, and at the end of the run; 0, without
    checkpoint_interval, writes one only when the run is interrupted or fails"""
    keep_last: int = 2
    """checkpoints to keep, the one of an interruption among them"""
    log_with: list[str] | None = field(default=None, metadata={'choices': lambda: [*TRACKERS, 'none']})
    """trackers beside metrics.jsonl, separated by commas or given several times; or none"""
    tensorboard: bool = False
    """the same as log_with tensorboard"""
    need_optim_ckpt: bool = False
    """also write the optimizers' states with the final model"""
    validation_file: str | None = None
    """eval data"""
    validation_percentage: float = 0.0
    """evaluate on this share of the data, in per cent, instead of a file"""

    method = ''  # no annotation: a setting of preference runs alone
    """name in `METHODS`"""
    common: ClassVar[Groups] = {'the model': MODEL, 'the run': RUN}
    """what --help and `init` show, by what it is about; the others stand behind --help-all"""
    trained: ClassVar[str] = 'actor'
    """the model that is trained, and the name of its folder"""
    config_class: ClassVar[type[Settings]] = LearningSettings
    """the trainer's settings"""

    @property
    def base(self) -> str | None:
        """The model to start from; None: the small one of the embedded world."""
        return None if self.pretrain == EMBEDDED else self.pretrain

    def fill_defaults(self) -> None:
        entry = self.entry()
        for name, value in (entry.defaults if self.base else entry.embedded_defaults).items():
            if getattr(self, name) is None:
                setattr(self, name, value)

    def entry(self) -> Recipe:
        """How it trains."""
        return METHODS.find(self.method)

    @classmethod
    def shown_default(cls, name: str, default: Any, method: str | None = None) -> str:
        """What --help says of a run, or of a run with that method."""
        entry = METHODS.find(method or cls.method)
        if default is None and entry.defaults.get(name) is not None:
            return f'{entry.defaults[name]}; {entry.embedded_defaults[name]} without --pretrain'
        return 'none' if default is None else str(default)

    def validate(self, world_size: int = 1) -> None:
        super().validate(world_size)
        for name, kind in (
            ('precision', Precision),
            ('optimizer', Optimizer),
            ('lora_train_bias', BiasMode),
            ('quantize', Quantize),
            ('logprob_kernel', LogprobKernel),
        ):
            self._one_of(name, get_args(kind))
        if MODELS.find(self.model).actor is None and self.trained != 'reward_model':
            raise ValueError(f'model={self.model!r} is a family of reward models; it cannot write')
        check_precision(self.strategy, self.precision)
        self._positive('keep_last', 'lora_alpha', 'rank_timeout_s', 'atoms')
        self.check_tensor_parallel()
        if self.reproducible is not None:
            Exact(self.atoms).check(world_size)
        self._check_kernels()
        self.trackers()
        self._not_negative(
            'checkpoint_interval', 'checkpoint_minutes', 'lora_rank', 'weight_decay', 'lr', 'card_samples'
        )
        if self.hub_private and not self.push_to_hub:
            raise ValueError('hub_private is about a repository of the hub: give push_to_hub too')
        if self.lr is not None and not self.lr < float('inf'):
            raise ValueError(f'lr={self.lr} must be a number of at least 0')
        if not self.lora_rank:
            for name, unset in (
                ('lora_alpha', None),
                ('lora_dropout', 0.0),
                ('lora_target_modules', None),
                ('lora_train_bias', 'none'),
                ('save_adapter', False),
                ('quantize', 'none'),
                ('shared_trunk', False),
            ):
                if getattr(self, name, unset) != unset:
                    raise ValueError(f'{name} is about adapters, and there are none: give lora_rank too')
        if self.optimizer.endswith('8bit') and not STRATEGIES.find(self.strategy).memory_model().whole:
            raise ValueError(
                f'optimizer={self.optimizer} needs whole weights on each process: use strategy naive or ddp'
            )
        if not self.plan:
            from chatgpt.nn.quantized import check_bitsandbytes

            if self.quantize != 'none':
                check_bitsandbytes(f'quantize={self.quantize}')
            if self.optimizer.endswith('8bit'):
                check_bitsandbytes(f'optimizer={self.optimizer}')
        if self.on_trunk:
            if self.lora_train_bias != 'none':
                raise ValueError('lora_train_bias: the biases of a shared or quantized base are frozen; leave it out')
            if not STRATEGIES.find(self.strategy).memory_model().whole:
                raise ValueError(
                    f'strategy={self.strategy} shards weights; a shared or quantized base is whole on each process: '
                    'use naive or ddp'
                )
        if self.validation_file and self.validation_percentage:
            raise ValueError('validation_file and validation_percentage are both given; give one')
        if 0 < self.validation_percentage < 1:
            percent = self.validation_percentage
            raise ValueError(
                f'validation_percentage={percent:g} may mean {100 * percent:g} % or {percent:g} %: give '
                f'{100 * percent:g} for the first; '
                'for the second keep records back yourself, with --validation_file'
            )
        data = self.data_source()
        if data and self.validation_file and same_file(data, self.validation_file):
            raise ValueError(
                f'validation_file={self.validation_file} is the training data: give another, or --validation_percentage'
            )

    def check_tensor_parallel(self) -> None:
        """Raises ValueError for what does not go with tensor_parallel, whatever the number of processes."""
        self._positive('tensor_parallel')
        if self.tensor_parallel == 1:
            return
        if not STRATEGIES.find(self.strategy).takes_tensor_parallel:
            raise ValueError(
                f'tensor_parallel={self.tensor_parallel} needs strategy {that_cut_layers()}, and it is {self.strategy}'
            )
        for name, unset in _NOT_IN_PARTS:
            if (given := getattr(self, name, unset)) not in (unset, -1):
                raise ValueError(
                    f'tensor_parallel={self.tensor_parallel} does not go with {name}={given!r}: leave one of them out'
                )

    def _check_kernels(self) -> None:
        check_name(self.logprob_kernel)
        if self.logprob_kernel != 'auto' and self.trained == 'reward_model':
            raise ValueError('logprob_kernel is about log-probs, and a reward model has none; leave it out')
        if self.logprob_kernel not in ('auto', 'plain') and STRATEGIES.find(self.strategy).only_16_bits:
            raise ValueError(
                f'strategy={self.strategy} shards the output layer, which logprob_kernel={self.logprob_kernel!r} reads '
                "whole; choose 'plain' or 'auto'"
            )
        if self.compile_blocks and self.reproducible is not None:
            raise ValueError(
                "reproducible='exact' promises bits, which compiled graphs do not repeat under another layout: leave "
                'compile_blocks out'
            )
        if self.compile_blocks and STRATEGIES.find(self.strategy).only_16_bits:
            raise ValueError(
                f'strategy={self.strategy} acts on every use of a weight, which compiled graphs do not show: use '
                'naive, ddp or fsdp, or leave compile_blocks out'
            )

    def trackers(self) -> list[str]:
        """Names in `TRACKERS`."""
        return tracker_names([*(self.log_with or ()), *(['tensorboard'] if self.tensorboard else [])])

    def data_source(self) -> str | None:
        """File or hub name of the training data."""
        return None

    @property
    def on_trunk(self) -> bool:
        """Whether models are adapters on a frozen base of `SharedTrunk`."""
        return self.quantize != 'none'

    def lora_keywords(self) -> dict[str, Any]:
        """Keywords of the model classes."""
        if not self.lora_rank:
            return {}
        options = {'alpha': self.lora_alpha, 'dropout': self.lora_dropout, 'targets': self.lora_target_modules}
        return {'lora_rank': self.lora_rank, 'lora_train_bias': self.lora_train_bias, 'lora_options': options}

    def config(self) -> Any:
        """The trainer's own settings."""
        return self.config_class(**{name: getattr(self, name) for name in self.config_class.field_names()})


@dataclass(kw_only=True)
class PPORun(Run, PPOConfig):
    """A run of examples/train_prompts.py."""

    save_path: str = 'outputs/train_prompts'
    prompt_path: str | None = None
    """csv, json, jsonl, parquet or hub data set with a prompt column; none: embedded"""
    prompt_column: str = 'prompt'
    """its name"""
    reward_model: str | None = None
    """folder of a reward model, or of any sequence-classification model"""
    reward_fn: str | None = None
    """module:function or file.py:function, fn(prompts, responses, **columns) -> scores"""
    environment: str | None = None
    """games:countdown (docs/environments.md has more) or module:Class: what to act in over several turns"""
    environment_options: dict[str, Any] | None = None
    """keyword arguments of the environment's class, such as '{numbers: 4}'"""
    max_turns: int = 16
    """turns of an episode"""
    max_turn_tokens: int | None = None
    """most tokens of one turn; none: what max_new_tokens leaves, which bounds the whole episode"""
    step_timeout_s: float = 30.0
    """an environment that takes longer for one step ends its episode"""
    apply_chat_template: bool = False
    """what an environment says in text is a turn of the user, in the tokenizer's chat template; messages always go
    through it"""
    environment_workers: Literal['threads', 'processes'] = 'threads'
    """where environments run; processes compute beside the trainer, and one that hangs is replaced"""
    num_environment_workers: int = 8
    """how many environments step at the same time"""
    reward_weights: dict[str, float] | None = None
    """of an environment's rewards by name; none: their sum"""
    eval_episodes: int = 0
    """episodes of an evaluation, whose tasks the training has not"""
    num_episodes: int = 10
    """of max_timesteps each"""
    max_timesteps: int | None = 10
    """timesteps of an episode; none: as many as visit every prompt once"""
    update_timesteps: int = 10
    """timesteps between learning phases"""
    max_epochs: int = 5
    """passes over the buffer in one learning phase"""
    critic: Literal['own', 'shared'] = 'own'
    """own: a model of its own; shared: a value head on the actor's trunk, with num_layers_unfrozen on the frozen one"""
    shared_trunk: bool = False
    """actor, critic, reward model and reference as adapters on one frozen base; with lora_rank"""
    critic_from: CriticStart = 'reward_model'
    """what a critic of its own starts from: the reward model, where there is one that reads the policy's tokens and has
    a head; or the actor's weights with a new head"""
    critic_lr: float | None = None
    """learning rate of a critic of its own"""
    num_layers_unfrozen: int = -1
    """hydra: train only the top blocks, whose frozen copies are the reference; -1 trains all"""
    max_new_tokens: int | None = None
    """most tokens of a response"""
    max_prompt_tokens: int | None = None
    """cut longer prompts on the left"""
    temperature: float = 1.0
    """of drawing a response"""
    top_k: int = 0
    """draw from so many of the likeliest tokens; 0: from all"""
    top_p: float = 1.0
    """draw from the likeliest tokens of this probability"""
    min_new_tokens: int = 0
    """a response does not end before"""
    stop_string: list[str] | None = None
    """end a response where this text appears; may be given several times"""
    engine: str = field(default='auto', metadata={'choices': ENGINES})
    """who generates: the local engine, model.generate, or vLLM, in this process or on rollout_workers; module:name is
    an `EngineEntry` of your own; auto: the local engine, for encoder-decoders model.generate"""
    ema_decay: float | None = None
    """also keep a moving average of the actor's weights, written as actor_ema/; 0.992 is DeepSpeed-Chat's"""
    rollout_workers: int = 0
    """generate on so many Ray actors for each rank, with engine=vllm for all of them together (RAY_ADDRESS names a
    cluster); 0 generates in the process itself"""
    rollout_chunk_size: int | None = None
    """prompts that go to an actor together; none: those of a timestep"""
    rollout_resources: dict[str, float] | None = None
    """of each actor: {CPU: its threads, GPU: devices, over which vLLM cuts the model}; none: as many threads as this
    process has, with engine=vllm one GPU"""
    ptx_data: str | None = None
    """text or demonstrations for PPO-ptx, with ptx_coef"""
    sample_interval: int = 5
    """learning phases between tables of samples"""
    eval_interval: int = 5
    """learning phases between evaluations on eval prompts, where there are any"""

    method = 'ppo'
    common = {
        'data and reward': (
            *('prompt_path', 'prompt_column', 'reward_fn', 'reward_model', 'environment', 'validation_file'),
        ),
        'the model': (*MODEL, 'critic'),
        'responses': ('max_new_tokens', 'max_prompt_tokens', 'temperature', 'top_p', 'stop_string'),
        'how long, how much': (
            *('num_episodes', 'max_timesteps', 'update_timesteps', 'experience_batch_size', 'num_samples_per_prompt'),
            *('train_batch_size', 'max_epochs', 'max_tokens_per_batch'),
        ),
        'the method': (
            *('lr', 'critic_lr', 'advantage_estimator', 'policy_loss', 'kl_coef', 'eps_clip'),
            *('gamma', 'lam'),
        ),
        'the run': RUN,
    }
    config_class = PPOConfig

    def data_source(self) -> str | None:
        return self.prompt_path

    def fill_defaults(self) -> None:
        if self.critic == 'shared' and self.critic_lr is not None:
            raise ValueError("critic_lr is of a critic with an optimizer of its own; with critic='shared' leave it out")
        if self.environment is not None and self.max_new_tokens is None:
            self.max_new_tokens = EPISODE_TOKENS
        super().fill_defaults()

    def validate(self, world_size: int = 1) -> None:
        super().validate(world_size)
        for name in (
            'num_episodes',
            'max_timesteps',
            'update_timesteps',
            'max_prompt_tokens',
            'sample_interval',
            'eval_interval',
        ):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f'{name}={value} must be at least 1')
        if self.critic_lr is not None and not 0 <= self.critic_lr < float('inf'):
            raise ValueError(f'critic_lr={self.critic_lr} must be a number of at least 0')
        for name, known in (('critic', ('own', 'shared')), ('critic_from', CRITIC_STARTS)):
            if getattr(self, name) not in known:
                raise ValueError(f'{name}={getattr(self, name)!r} is not one of {", ".join(known)}')
        ENGINES.find(self.engine)
        if self.reproducible is not None:
            self.check_exact()
            ours = self.engine in ('auto', 'local')
            if not ours or self.rollout_workers:
                given = f'rollout_workers={self.rollout_workers}' if ours else f'engine={self.engine!r}'
                raise ValueError(
                    f"reproducible='exact' draws again what rounding could change, which only the local engine in the "
                    f'training process can: {given} does not fit it'
                )
        if self.quantize != 'none' and not self.shared_trunk:
            raise ValueError(f'quantize={self.quantize!r} is of the base that the models share: give shared_trunk too')
        if self.logprob_kernel == 'liger':
            if self.entropy_coef:
                raise ValueError(
                    f"entropy_coef={self.entropy_coef:g}: logprob_kernel='liger' has no gradient of the entropy; "
                    "choose 'fused'"
                )
            check_liger_temperature(self.temperature, self.precision in ('fp32', 'auto'))  # auto: known at the device
        if self.shared_trunk and (self.critic == 'shared' or self.num_layers_unfrozen > 0):
            raise ValueError(
                'shared_trunk gives the critic an adapter of its own; leave critic=shared and num_layers_unfrozen out'
            )
        if self.shared_trunk and (self.rollout_workers or self.engine == 'vllm'):
            given = f'rollout_workers={self.rollout_workers}' if self.rollout_workers else "engine='vllm'"
            raise ValueError(
                f'shared_trunk: {given} generates with weights of its own, and the base is one, in this process; leave '
                'it out, or take engine local or hf'
            )
        if self.shared_trunk and self.offload != 'none':
            raise ValueError(
                f'shared_trunk: offload={self.offload} would move the base that all models compute with; leave it out'
            )
        if self.critic == 'shared' and not self.estimator.needs_values:
            raise ValueError(
                f"critic='shared', but advantage_estimator={self.advantage_estimator!r} takes no critic; leave one out"
            )
        if self.lora_rank and self.num_layers_unfrozen > 0:
            raise ValueError(
                'lora_rank and num_layers_unfrozen are two ways to share the trunk with the reference; choose one'
            )
        if self.temperature == 0:
            raise ValueError(
                'temperature=0 draws nothing, and a policy learns from what it draws: give a number above 0'
            )
        sampling = self.generation() | {'max_new_tokens': 1 if self.max_new_tokens is None else self.max_new_tokens}
        SamplingParams(**{name: value for name, value in sampling.items() if name != 'stop_strings'})
        self._check_environment()
        if self.estimator.rewards_apart and len(self.reward_weights or ()) < 2:
            raise ValueError(
                f'advantage_estimator={self.advantage_estimator!r} takes a list of rewards, which the command line '
                'cannot give but for an environment, by reward_weights; use PPOTrainer or chatgpt.train'
            )
        if self.reward_model and self.reward_fn:
            raise ValueError('give --reward_model or --reward_fn, not both')
        if self.prompt_path and not (self.reward_model or self.reward_fn or self.environment):
            raise ValueError('nothing to learn from: give --reward_model FOLDER or --reward_fn module:function')
        if self.prompt_path and not self.pretrain:
            raise ValueError('prompts of your own need a model: give --pretrain NAME_OR_FOLDER')
        if bool(self.ptx_coef) != bool(self.ptx_data):
            raise ValueError('PPO-ptx needs both: --ptx_data FILE with text, and --ptx_coef above 0')

    def _check_environment(self) -> None:
        """What belongs to an environment, and what does not go with one."""
        if self.environment is None:
            for name in ENVIRONMENT:
                if getattr(self, name) != PLAIN[name]:
                    raise ValueError(
                        f'{name}={getattr(self, name)!r} is about an environment, and there is none: give --environment'
                    )
            return
        self.environment_settings()
        if self.eval_episodes < 0:
            raise ValueError(f'eval_episodes={self.eval_episodes} must not be negative')
        if self.eval_episodes and (self.validation_file or self.validation_percentage):
            raise ValueError('eval_episodes are of tasks without prompts: with eval prompts leave it out')
        if self.reward_weights is not None and (self.reward_fn or self.reward_model):
            raise ValueError(
                'reward_weights weigh the rewards of the environment, whose place --reward_fn or --reward_model takes: '
                'leave one out'
            )
        is_own = ':' in self.environment and not self.environment.startswith('games:')
        if is_own and not self.pretrain:
            raise ValueError('an environment of your own needs a model: give --pretrain NAME_OR_FOLDER')

    def environment_settings(self) -> EnvironmentSettings:
        return EnvironmentSettings(
            max_turns=self.max_turns,
            max_turn_tokens=self.max_turn_tokens,
            step_timeout_s=self.step_timeout_s,
            workers=self.environment_workers,
            apply_chat_template=self.apply_chat_template or None,
            num_workers=self.num_environment_workers,
        )

    @property
    def on_trunk(self) -> bool:
        return self.shared_trunk

    @property
    def reference_in_actor(self) -> bool:
        """Whether the actor is its own reference: under hydra, and under LoRA unless biases move with the adapters."""
        return self.num_layers_unfrozen > 0 or (self.lora_rank > 0 and self.lora_train_bias == 'none')

    def generation(self) -> dict[str, Any]:
        """Generation keywords of the trainer."""
        return {
            'max_new_tokens': self.max_new_tokens,
            'min_new_tokens': self.min_new_tokens,
            'temperature': self.temperature,
            'top_k': self.top_k,
            'top_p': self.top_p,
            'stop_strings': self.stop_string,
        }


ENVIRONMENT = (
    *('environment_options', 'max_turns', 'max_turn_tokens', 'step_timeout_s', 'environment_workers'),
    *('num_environment_workers', 'apply_chat_template', 'reward_weights', 'eval_episodes'),
)
"""settings that say nothing without an environment"""
PLAIN = {f.name: f.default for f in fields(PPORun)}
EPISODE_TOKENS = 256
"""most tokens of an episode, turns and observations together, unless max_new_tokens says it"""
DATA = ('dataset', 'max_len', 'validation_file', 'validation_percentage', 'skip_bad_records')
LENGTH = ('max_epochs', 'max_steps', 'train_batch_size', 'max_tokens_per_batch', 'lr', 'lr_schedule', 'warmup_steps')


@dataclass(kw_only=True)
class DataRun(Run, SupervisedConfig):
    """What the runs that only learn have in common."""

    dataset: str | None = None
    """file or hub name; none: embedded"""
    max_len: int | None = None
    """tokens of prompt and response, at most the model's context; longer ones are cut, and counted; none: 512, or the
    context where that is less"""

    common = {
        'data': DATA,
        'the model': MODEL,
        'how long, how much': LENGTH,
        'the run': RUN,
    }

    def data_source(self) -> str | None:
        return self.dataset

    @property
    def max_tokens(self) -> int:
        return 512 if self.max_len is None else self.max_len

    def validate(self, world_size: int = 1) -> None:
        self._positive('max_len')
        super().validate(world_size)
        if self.dataset and not self.pretrain:
            raise ValueError('data of your own needs a model: give --pretrain NAME_OR_FOLDER')


def run_class(name: str) -> type[Run]:
    """The settings of a command line of the method of that name."""
    method = METHODS.find(name)
    found, config = method.part('run'), method.part('config')
    if found is not None:
        return found
    if issubclass(config, PreferenceConfig):
        return PreferenceRun
    common = DataRun.common | {'the method': tuple(n for n in config.field_names() if n not in DataRun.field_names())}
    own = {'__doc__': method.about, 'method': name, 'config_class': config, 'common': common}
    return dataclass(kw_only=True)(type(f'{config.__name__}Run', (DataRun, config), own))


@dataclass(kw_only=True)
class SFTRun(DataRun, SFTConfig):
    """A run of examples/train_sft.py: Alpaca, messages, prompt and response, or plain text."""

    save_path: str = 'outputs/train_sft'
    pack_examples: bool = False
    """join short examples of plain text up to max_len"""
    early_stopping_patience: int | None = None
    """stop after so many evaluations in a row without a better loss on the eval data"""

    method = 'sft'
    common = DataRun.common | {'data': (*DATA, 'pack_examples')}
    config_class = SFTConfig


@dataclass(kw_only=True)
class RewardRun(DataRun, RewardModelConfig):
    """A run of examples/train_reward_model.py: preferences (prompt, chosen, rejected, or ranked answers) or labelled
    text."""

    save_path: str = 'outputs/train_reward_model'

    method = 'reward-model'
    common = DataRun.common | {'the method': ('loss_fn',)}
    trained = 'reward_model'
    config_class = RewardModelConfig


@dataclass(kw_only=True)
class ILQLRun(DataRun, ILQLConfig):
    """A run of ILQL: prompt, response and reward, or text and reward."""

    save_path: str = 'outputs/train_ilql'

    method = 'ilql'
    common = DataRun.common | {'the method': ('tau', 'gamma', 'cql_scale', 'awac_scale', 'beta', 'standardize_rewards')}
    config_class = ILQLConfig

    def validate(self, world_size: int = 1) -> None:
        super().validate(world_size)
        if self.lora_rank:
            raise ValueError('lora_rank: ILQL trains all weights; leave it out')


OPTIONS = {
    'loss': 'loss_type',
    'beta': 'beta',
    'label_smoothing': 'label_smoothing',
    'precompute_ref_logprobs': 'precompute_ref_logprobs',
    'desirable_weight': 'desirable_weight',
    'undesirable_weight': 'undesirable_weight',
    'positive_label': 'positive_label',
    'weight': 'weight',
    'gamma': 'gamma',
}
"""settings that only some methods have, and what their configs call them"""
NO_PLAN = '--plan knows PPO, SFT and reward models; python -m chatgpt.plan CONFIG --task sft comes nearest'


@dataclass(kw_only=True)
class PreferenceRun(DataRun):
    """A run of examples/train_preference.py: preferences (prompt, chosen, rejected, or ranked answers); for KTO also
    text and label.

    A setting of some methods only is None until it is given: then the method's own default holds.
    """

    save_path: str = 'outputs/train_preference'
    method: str = field(default='dpo', metadata={'choices': lambda: methods_of(PREFERENCE_RUN)})
    """dpo, kto, orpo or simpo; module:name is a `Recipe` of your own, with a `PreferenceConfig`"""
    max_epochs: int = 1
    loss: DPOLoss | None = None
    """dpo: sigmoid, ipo, cdpo, robust or hinge; none: sigmoid"""
    beta: float | None = None
    """dpo, kto: how strongly the policy is held to the reference, none: 0.1; simpo: of the mean log-prob, none: 2"""
    label_smoothing: float | None = None
    """dpo with cdpo or robust: share of labels assumed to be flipped; none: 0.1"""
    precompute_ref_logprobs: bool | None = None
    """dpo, kto: the reference's log-probs once, before the first step; none: true"""
    desirable_weight: float | None = None
    """kto: weight of good answers; none: 1"""
    undesirable_weight: float | None = None
    """kto: weight of bad answers; none: 1"""
    positive_label: str | None = None
    """kto: which label is a success; none: true, 1, good, positive are"""
    weight: float | None = None
    """orpo: of the odds-ratio term; none: 0.1"""
    gamma: float | None = None
    """simpo: target margin; none: 1"""

    def entry(self) -> Recipe:
        known = methods_of(PREFERENCE_RUN)
        entry = METHODS.find(self.method) if ':' in self.method else known.get(self.method)
        if entry is None or not issubclass(entry.part('config'), PreferenceConfig):
            raise ValueError(
                f'method={self.method!r} is not one of {", ".join(known)}, nor module:name of a method with a '
                f'PreferenceConfig{hint(self.method, known)}'
            )
        return entry

    common = DataRun.common | {'the method': ('method', *OPTIONS)}

    @classmethod
    def shown_default(cls, name: str, default: Any, method: str | None = None) -> str:
        if name == 'lr' and method is None:
            known = sorted(methods_of(PREFERENCE_RUN).items(), key=lambda item: item[1].defaults['lr'])
            rates = ', '.join(f'{entry.defaults["lr"]} for {other}' for other, entry in known)
            return f'{rates}; {METHODS[cls.method].embedded_defaults["lr"]} without --pretrain'
        return super().shown_default(name, default, method)

    def validate(self, world_size: int = 1) -> None:
        if self.plan:
            raise ValueError(NO_PLAN)
        own = self.entry().part('config').field_names()
        for name, setting in OPTIONS.items():
            if getattr(self, name) is not None and setting not in own:
                known = methods_of(PREFERENCE_RUN)
                who = ' or '.join(m for m, entry in known.items() if setting in entry.part('config').field_names())
                raise ValueError(
                    f'{name}={getattr(self, name)} is a setting of {who}, not of {self.method}; leave it out'
                )
        super().validate(world_size)
        self.config().validate(world_size)

    def config(self) -> PreferenceConfig:
        """The settings of this run's trainer."""
        cls = self.entry().part('config')
        shared = {f.name for f in fields(PreferenceConfig)}
        values: dict[str, Any] = {name: getattr(self, name) for name in shared}
        for name, setting in OPTIONS.items():
            if getattr(self, name) is not None:
                values[setting] = getattr(self, name)
        return cls(**values)
