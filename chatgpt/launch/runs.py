"""The settings of a run: dataclasses for model, adapters, strategy, sampling, environment and folder, composed with the
settings of a trainer into `PPORun`, `SFTRun`, `RewardRun` and the classes of `run_class`.

Flags, config files, `chatgpt.train`, `--plan`, reports and sweeps use these fields; `chatgpt.launch.rules` lists the
combinations that are errors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from types import MappingProxyType
from typing import Any, ClassVar, Literal, cast, get_type_hints

from chatgpt.environments import EnvironmentSettings
from chatgpt.functional.choices import LogprobKernel
from chatgpt.launch.demo_world import trial_defaults
from chatgpt.launch.methods import METHODS, Recipe
from chatgpt.launch.rules import DATA_RULES, PPO_RUN_RULES, RUN_RULES, own_policy
from chatgpt.monitor.run_folder.record import RunRecord
from chatgpt.monitor.run_folder.rollouts import check_recorded
from chatgpt.nn.kinds import MODELS
from chatgpt.rollout.registry import ENGINES
from chatgpt.rollout.sampling import SamplingParams
from chatgpt.rules import check
from chatgpt.strategies.checkpoint import CHECKPOINT_MINUTES
from chatgpt.strategies.registry import STRATEGIES
from chatgpt.strategies.rules import MODEL_RULES
from chatgpt.trainer.callbacks.trackers import TRACKERS, tracker_names
from chatgpt.trainer.config import PPOConfig
from chatgpt.trainer.objectives.config import (
    CriticConfig,
    PreferenceConfig,
    RewardModelConfig,
    SFTConfig,
    SupervisedConfig,
)
from chatgpt.trainer.rules import DECODE_RULES
from chatgpt.trainer.settings import LearningSettings, Schedule, Settings

EMBEDDED = 'embedded'
"""name of the small GPT-2 that a run creates and, except for SFT, trains on stories first"""
EPISODE_TOKENS = 256
"""default of max_new_tokens for an episode, turns and observations together"""
Groups = dict[str, tuple[str, ...]]
MODEL = ('pretrain', 'apply_chat_template', 'lora_rank', 'gradient_checkpointing')
RUN = (
    *('save_path', 'model_path', 'push_to_hub', 'resume', 'checkpoint_interval', 'log_with'),
    *('strategy', 'precision', 'seed', 'plan'),
)


@dataclass(kw_only=True)
class StrategySettings(Settings):
    """Hardware and numerics."""

    strategy: str = field(default='naive', metadata={'choices': STRATEGIES})
    """naive: one process; ddp: a copy per process; fsdp, colossalai_*: shards; _cpu: weights in host memory;
    module:name: your own class (docs/strategies.md)"""
    precision: Literal['auto', 'fp32', 'bf16', 'fp16'] = 'auto'
    """dtype of the computation; auto: bf16 on a GPU, fp32 on a CPU"""
    seed: int = 42
    """same seed, same samples, on any number of processes"""
    rank_timeout_s: float = 1800.0
    """seconds that the other ranks wait for one rank; after that the run ends and names it. Raise it if a reward or an
    evaluation takes longer"""
    tensor_parallel: int = 1
    """number of processes that split each layer and act as one rank; needs strategy fsdp. For layers too large for one
    device (docs/strategies.md)"""
    sequence_parallel: int = 1
    """number of processes that split each sequence and act as one rank; needs strategy fsdp. For sequences too long for
    one device (docs/strategies.md)"""
    deterministic: bool = False
    """use only deterministic algorithms of torch, so that a run repeats to the bit on a GPU; slower there
    (docs/strategies.md)"""
    reproducible: Literal['exact'] | None = None
    """exact: the weights are the same to the last bit under naive, ddp, fsdp and ZeRO 1 and 2, on 1, 2, 4 or 8
    processes of the same machine; slower (docs/strategies.md)"""
    atoms: int = 8
    """number of parts in which reproducible=exact computes every batch: a power of two, and the largest number of
    processes such a run can use"""


@dataclass(kw_only=True)
class ModelSettings(Settings):
    """The model to start from, and its optimizer."""

    model: str = field(default='auto', metadata={'choices': MODELS})
    """model family; auto: read from the model's config; module:name is a `ModelKind` of your own"""
    pretrain: str | None = None
    """hub name or folder to start from; embedded: a small GPT-2, taught to write stories first unless the method is
    SFT"""
    tokenizer: str | None = None
    """hub name or folder of the tokenizer; none: the one in pretrain"""
    apply_chat_template: bool | None = None
    """true: plain text becomes a turn of the user; false: it is used as it is; none: as the model was trained"""
    lr: float | None = None
    """learning rate (docs/learning_rates.md)"""
    weight_decay: float = 0.0
    """decoupled weight decay of all trained weights"""
    optimizer: Literal['adamw', 'adamw8bit', 'paged_adamw8bit', 'sgd'] = 'adamw'
    """adamw8bit stores its states in 8 bits, paged_adamw8bit also moves them to host memory when the GPU is full; both
    need bitsandbytes"""
    gradient_checkpointing: bool = False
    """recompute activations in the backward pass, for less memory"""
    logprob_kernel: LogprobKernel = 'auto'
    """how log-probs are computed from the last hidden states: plain, with all logits; fused, by blocks of the
    vocabulary, with less memory; liger, with the liger package; auto: fused on a GPU if the output layer allows it"""
    compile_blocks: bool = False
    """run transformer blocks through torch.compile when learning and scoring: faster in long runs, but the first steps
    take long"""
    trust_remote_code: bool = False
    """run Python code that comes with a model of the hub; only for models that you trust"""


@dataclass(kw_only=True)
class LoraSettings(Settings):
    """Adapters on frozen weights."""

    lora_rank: int = 0
    """rank of LoRA adapters; 0: train all weights"""
    lora_alpha: float | None = None
    """the adapters' output is scaled by alpha / rank; none: alpha = rank"""
    lora_dropout: float = 0.0
    """dropout probability of the input of the adapters"""
    lora_target_modules: list[str] | None = None
    """name patterns of the layers that get adapters; none: every linear layer of the transformer blocks"""
    lora_train_bias: Literal['none', 'all', 'lora_only'] = 'none'
    """which biases are trained too: none, all, or lora_only: those of layers with adapters"""
    quantize: Literal['none', 'nf4'] = 'none'
    """nf4: store the frozen weights in 4 bits, about a quarter of bf16; needs lora_rank, and in PPO shared_trunk"""
    save_adapter: bool = False
    """also write the adapters alone, in PEFT's format, to adapter/ in save_path; needs lora_rank"""


@dataclass(kw_only=True)
class FolderSettings(Settings):
    """The folder of a run: checkpoints, metrics, the trained model."""

    save_path: str = 'outputs/run'
    """folder of this run"""
    model_path: str | None = None
    """folder of the trained model; none: a folder in save_path"""
    save_dtype: Literal['auto', 'fp32', 'bf16', 'fp16'] = 'auto'
    """dtype of the trained model's files. auto: fp32, in which weights are trained; for adapters on weights in 16 or 4
    bits the dtype of pretrain"""
    push_to_hub: str | None = None
    """hub repository to upload the trained model to"""
    hub_private: bool = False
    """make that repository private if the run creates it"""
    card_samples: int = 3
    """number of the run's samples that the model card shows; 0: none"""
    plan: bool = False
    """print the memory of each phase and whether it fits, then stop"""
    resume: str | None = None
    """checkpoint folder, or auto: the newest in save_path"""
    checkpoint_interval: int = 0
    """phases between checkpoints; 0: by checkpoint_minutes"""
    checkpoint_minutes: float = CHECKPOINT_MINUTES
    """minutes after which the end of a phase writes a checkpoint; the end of the run writes one too. 0 without
    checkpoint_interval: only when the run is interrupted or fails"""
    keep_last: int = 2
    """number of newest checkpoints to keep, including one written at an interruption"""
    background_checkpoints: bool = False
    """write checkpoints while the run goes on, from a copy in host memory; the last one is written before it ends"""
    log_with: list[str] | None = field(default=None, metadata={'choices': lambda: [*TRACKERS, 'none']})
    """trackers beside metrics.jsonl, separated by commas (docs/trackers.md)"""
    tensorboard: bool = False
    """write TensorBoard files; the same as log_with tensorboard"""
    need_optim_ckpt: bool = False
    """also write the optimizer states beside the trained model; a resume does not need them"""


@dataclass(kw_only=True)
class Run(StrategySettings, ModelSettings, LoraSettings, FolderSettings, LearningSettings):
    """The settings of every run."""

    given = cast(Mapping[str, Any], MappingProxyType({}))  # no annotation: not a setting
    """settings given in this start, or in an earlier one of a resumed run"""
    skip_bad_records: bool = False
    """skip and count records that cannot be used, instead of stopping at the first"""
    validation_file: str | None = None
    """file or hub name of the eval data"""
    validation_percentage: float = 0.0
    """percentage of the training data to evaluate on instead of learning from; for when there is no validation_file"""

    method = ''  # no annotation: not a setting
    """name in `METHODS`"""
    common: ClassVar[Groups] = {'the model': MODEL, 'the run': RUN}
    """settings that --help and `init` show, in groups; --help-all shows all"""
    trained: ClassVar[str] = 'actor'
    """the trained model, and the name of its folder"""
    has_trial: ClassVar[bool] = True
    """without data it trains on embedded ones"""
    config_class: ClassVar[type[Settings]] = LearningSettings
    """class of the trainer's settings"""

    @property
    def base(self) -> str | None:
        """The initial model; None: the small one of `demo_world`."""
        return None if self.pretrain == EMBEDDED else self.pretrain

    def fill_defaults(self) -> None:
        entry = self.entry()
        for name, value in (entry.defaults if self.base else trial_defaults(self.method, entry.defaults)).items():
            if getattr(self, name) is None and name not in self.unused():
                setattr(self, name, value)

    def unused(self) -> tuple[str, ...]:
        """Returns settings that have no effect in this run, and get no default."""
        return ()

    def entry(self) -> Recipe:
        """Returns the method's entry in `METHODS`."""
        return METHODS.find(self.method)

    @classmethod
    def shown_default(cls, name: str, default: Any, method: str | None = None) -> str:
        """Returns the default of a setting as --help shows it, for this class or a method."""
        entry = METHODS.find(method or cls.method)
        if default is None and entry.defaults.get(name) is not None:
            trial = trial_defaults(method or cls.method, entry.defaults)
            return f'{entry.defaults[name]}; {trial[name]} without --pretrain'
        if name in ('lr', 'critic_lr'):
            return f'by size; {trial_defaults(method or cls.method, entry.defaults)[name]} without --pretrain'
        if (method, name) == ('dapo', 'overlong_buffer'):
            return 'a fifth of max_new_tokens'
        return 'none' if default is None else str(default)

    def validate(self, world_size: int = 1) -> None:
        super().validate(world_size)
        check(self, [*MODEL_RULES, *RUN_RULES])
        self.trackers()
        if self.reproducible is not None:
            from chatgpt.strategies.sums import check_atoms

            check_atoms(self.atoms, world_size)
        self._check_installed()

    def _check_installed(self) -> None:
        """Raises ValueError if an optional package that the run needs is not installed."""
        if self.logprob_kernel == 'liger':
            from chatgpt.nn.head_kernels import check_name

            check_name(self.logprob_kernel)
        for name in ('quantize', 'optimizer') if not self.plan else ():
            if getattr(self, name) in ('nf4', 'adamw8bit', 'paged_adamw8bit'):
                from chatgpt.nn.quantized import check_bitsandbytes

                check_bitsandbytes(f'{name}={getattr(self, name)}')

    def trackers(self) -> list[str]:
        """Returns the run's trackers, names in `TRACKERS`."""
        return tracker_names([*(self.log_with or ()), *(['tensorboard'] if self.tensorboard else [])])

    def data_source(self) -> str | None:
        """Returns the file or hub name of the training data."""
        return None

    @property
    def on_trunk(self) -> bool:
        """True if the models are adapters on a frozen base, a `SharedTrunk`."""
        return self.quantize != 'none'

    def lora_keywords(self) -> dict[str, Any]:
        """Returns the LoRA keywords of the model classes."""
        if not self.lora_rank:
            return {}
        options = {'alpha': self.lora_alpha, 'dropout': self.lora_dropout, 'targets': self.lora_target_modules}
        return {'lora_rank': self.lora_rank, 'lora_train_bias': self.lora_train_bias, 'lora_options': options}

    def config(self) -> Any:
        """Returns the trainer's settings."""
        return self.config_class(**{name: getattr(self, name) for name in self.config_class.field_names()})


@dataclass(kw_only=True)
class RolloutSettings(Settings):
    """The engine that generates responses, and its sampling."""

    max_new_tokens: int | None = None
    """maximum tokens of a response"""
    max_prompt_tokens: int | None = None
    """keep only this many last tokens of a longer prompt"""
    min_new_tokens: int = 0
    """minimum number of tokens of a response; it cannot end earlier"""
    temperature: float = 1.0
    """sampling temperature; higher is more varied"""
    top_k: int = 0
    """sample only from this many likeliest tokens; 0: from all"""
    top_p: float = 1.0
    """sample from the likeliest tokens of this total probability"""
    stop_string: list[str] | None = None
    """text that ends a response; may be repeated"""
    engine: str = field(default='auto', metadata={'choices': ENGINES})
    """what generates responses: local, the engine of this library; hf, model.generate of transformers; vllm;
    module:name is an `EngineEntry` of your own. auto: local, or hf for encoder-decoders and models with a running
    state (Mamba)"""
    rollout_workers: int = 0
    """number of Ray workers per rank that generate (with engine vllm: for all ranks together); RAY_ADDRESS names a
    cluster. 0: the training processes generate"""
    rollout_chunk_size: int | None = None
    """number of prompts sent to a worker at once; none: all prompts of a timestep"""
    rollout_slice_tokens: int | None = None
    """with max_staleness, responses are generated in parts of this many tokens, rollout_chunk_size at a time, with the
    newest weights. none: whole"""
    rollout_resources: dict[str, float] | None = None
    """resources of each worker: {CPU: threads, GPU: devices}; vllm splits the model over the GPUs. none: as many
    threads as this process, with vllm one GPU"""
    vllm_tensor_parallel: int = 1
    """with engine vllm and no rollout_workers: number of neighbouring training processes that generate together, each
    with a part of the model on its GPU"""


@dataclass(kw_only=True)
class EpisodeSettings(Settings):
    """The environment of a run of several turns."""

    environment: str | None = None
    """environment of several turns: games:countdown (others: docs/environments.md) or module:Class"""
    environment_options: dict[str, Any] | None = None
    """keyword arguments of the environment's class, such as '{numbers: 4}'"""
    max_turns: int = 16
    """maximum number of turns of an episode"""
    max_turn_tokens: int | None = None
    """maximum number of tokens of one turn; none: what is left of max_new_tokens, the limit of the whole episode"""
    step_timeout_s: float = 30.0
    """seconds that one step of an environment may take; after that its episode ends as failed"""
    environment_workers: Literal['threads', 'processes'] = 'threads'
    """where environments run: threads of the trainer; processes, for environments that compute much or may hang"""
    num_environment_workers: int = 8
    """number of environments that step at the same time"""
    reward_weights: dict[str, float] | None = None
    """weights of an environment's rewards by name, such as '{solved: 1, format: 0.2}'; none: their sum. reward_fn and
    reward_model are the names of a reward function or model used beside them"""
    eval_episodes: int = 0
    """number of episodes of an evaluation, on tasks that training does not use; 0: none"""


@dataclass(kw_only=True)
class PPORun(Run, RolloutSettings, EpisodeSettings, PPOConfig):
    """A run of examples/train_prompts.py."""

    save_path: str = 'outputs/train_prompts'
    prompt_path: str | None = None
    """file (csv, json, jsonl, parquet) or hub data set of prompts; none: embedded stories"""
    prompt_column: str = 'prompt'
    """column of the prompts"""
    reward_model: str | None = None
    """folder of a reward or sequence-classification model"""
    reward_fn: str | None = None
    """module:function or file.py:function, called as fn(prompts, responses, **columns); returns a score per response"""
    num_episodes: int = 10
    """episodes of the run, each of max_timesteps timesteps"""
    max_timesteps: int | None = 10
    """timesteps of an episode; none: every prompt once"""
    update_timesteps: int = 10
    """timesteps collected before each learning phase"""
    max_epochs: int = 5
    """passes over the collected responses in one phase"""
    critic: Literal['own', 'shared'] = 'own'
    """own: a separate model; shared: a value head on the actor's last hidden states"""
    shared_trunk: bool = False
    """hold actor, critic, reward model and reference as adapters on one frozen model: least memory; needs lora_rank
    (docs/one_card.md)"""
    critic_from: str = 'reward_model'
    """initial weights of the critic: reward_model, if there is one with the policy's tokens and a head, otherwise the
    actor; actor: the actor's weights with a new head; or a folder or hub name: a saved critic, a reward model, or
    another model, of any size but with the policy's tokenizer (docs/critic.md)"""
    critic_lr: float | None = None
    """learning rate of the critic; with critic=shared that of the value head"""
    num_layers_unfrozen: int = -1
    """train only this many top blocks; frozen copies of these blocks are the reference (hydra), so no second model is
    held. -1: train all"""
    ema_decay: float | None = None
    """also keep a moving average of the actor's weights with this decay, such as 0.992 (DeepSpeed-Chat), written to
    actor_ema/; none: no average"""
    ptx_data: str | None = None
    """file or hub name of texts or demonstrations for the PPO-ptx loss; needs ptx_coef"""
    sample_interval: int = 5
    """learning phases between printed tables of samples"""
    eval_interval: int = 5
    """learning phases between evaluations, if there are eval prompts"""

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

    def unused(self) -> tuple[str, ...]:
        return () if self.estimator.needs_values else ('critic_lr',)

    def data_source(self) -> str | None:
        return self.prompt_path

    def fill_defaults(self) -> None:
        if self.environment is not None and self.max_new_tokens is None:
            self.max_new_tokens = EPISODE_TOKENS
        if own_policy(self) is not None and self.precision == 'auto':
            self.precision = 'fp32'  # the log-probs of engine and trainer agree in fp32
        super().fill_defaults()
        if self.method == 'dapo' and self.overlong_buffer is None and self.max_new_tokens:
            self.overlong_buffer = -(-self.max_new_tokens // 5)  # 4,096 of 20,480 tokens in the paper

    def validate(self, world_size: int = 1) -> None:
        super().validate(world_size)
        ENGINES.find(self.engine)
        check(self, PPO_RUN_RULES if self.reproducible is None else [*DECODE_RULES, *PPO_RUN_RULES])
        sampling = self.generation() | {'max_new_tokens': 1 if self.max_new_tokens is None else self.max_new_tokens}
        SamplingParams(**{name: value for name, value in sampling.items() if name != 'stop_strings'})
        if self.environment is not None:
            self.environment_settings()

    def environment_settings(self) -> EnvironmentSettings:
        return EnvironmentSettings(
            max_turns=self.max_turns,
            max_turn_tokens=self.max_turn_tokens,
            step_timeout_s=self.step_timeout_s,
            workers=self.environment_workers,
            apply_chat_template=self.apply_chat_template,
            num_workers=self.num_environment_workers,
        )

    @property
    def on_trunk(self) -> bool:
        return self.shared_trunk

    @property
    def reference_in_actor(self) -> bool:
        """True if the actor contains the reference: with hydra, and with LoRA unless biases are trained."""
        return self.num_layers_unfrozen > 0 or (self.lora_rank > 0 and self.lora_train_bias == 'none')

    def generation(self) -> dict[str, Any]:
        """Returns the generation keywords of the trainer."""
        names = ('max_new_tokens', 'min_new_tokens', 'temperature', 'top_k', 'top_p')
        return {name: getattr(self, name) for name in names} | {'stop_strings': self.stop_string}


DATA = ('dataset', 'max_len', 'validation_file', 'validation_percentage', 'skip_bad_records')
LENGTH = ('max_epochs', 'max_steps', 'train_batch_size', 'max_tokens_per_batch', 'lr', 'lr_schedule', 'warmup_steps')


@dataclass(kw_only=True)
class DataRun(Run, SupervisedConfig):
    """The settings of runs that do not collect."""

    dataset: str | None = None
    """file or hub name of the training data; none: embedded data for trials"""
    max_len: int | None = None
    """maximum tokens of prompt and response; longer records are cut, and counted. none: 512, or the model's context if
    that is less"""

    common = {'data': DATA, 'the model': MODEL, 'how long, how much': LENGTH, 'the run': RUN}

    def data_source(self) -> str | None:
        return self.dataset

    @property
    def max_tokens(self) -> int:
        return 512 if self.max_len is None else self.max_len

    def validate(self, world_size: int = 1) -> None:
        super().validate(world_size)
        check(self, DATA_RULES)


@dataclass(kw_only=True)
class SFTRun(DataRun, SFTConfig):
    """A run of examples/train_sft.py: Alpaca, messages, prompt and response, or plain text."""

    save_path: str = 'outputs/train_sft'
    pack_examples: bool = False
    """join short plain texts into examples of max_len tokens"""
    early_stopping_patience: int | None = None
    """number of evaluations in a row without a better eval loss after which training stops; none: never"""

    method = 'sft'
    common = DataRun.common | {'data': (*DATA, 'pack_examples')}
    config_class = SFTConfig


@dataclass(kw_only=True)
class RewardRun(DataRun, RewardModelConfig):
    """A run of examples/train_reward_model.py: preferences (prompt, chosen, rejected, or ranked answers) or labelled
    text."""

    save_path: str = 'outputs/train_reward_model'
    lr_schedule: Schedule = 'cosine'
    max_epochs: int = 1  # repeated from RewardModelConfig, for a dataclass takes the defaults of its first base

    method = 'reward-model'
    common = DataRun.common | {'the method': ('loss_fn',)}
    trained = 'reward_model'
    config_class = RewardModelConfig


@dataclass(kw_only=True)
class CriticRun(Run, CriticConfig):
    """A run that learns a critic from the recorded responses of earlier runs."""

    save_path: str = 'outputs/train_critic'
    pretrain: str | None = None
    """hub name or folder to start from: a model, a reward model, or a saved critic; none: the model from which the
    policy of the first run started"""
    rollouts: list[str] | None = None
    """folders of runs with recorded responses, of one tokenizer"""
    validation_percentage: float = 10.0
    """percentage of the prompts whose responses are held out, for explained variance before and after"""

    method = 'critic'
    common = {
        'data': ('rollouts', 'returns_from', 'gamma', 'validation_percentage'),
        'the model': MODEL,
        'how long, how much': LENGTH,
        'the method': ('critic_loss', 'critic_loss_settings'),
        'the run': RUN,
    }
    trained = 'critic'
    has_trial = False
    config_class = CriticConfig

    def data_source(self) -> str | None:
        return ', '.join(self.rollouts or ()) or None

    def fill_defaults(self) -> None:
        if self.pretrain is None and self.rollouts:
            self.pretrain = policy_of(self.rollouts[0])
        super().fill_defaults()

    def validate(self, world_size: int = 1) -> None:
        if not self.rollouts:
            raise ValueError('critic learns from recorded responses: give folders of runs, as in critic outputs/ppo')
        for folder in self.rollouts:
            check_recorded(folder)
        if self.base is None:
            raise ValueError(
                f'{self.rollouts[0]} does not say which model its policy was: give --pretrain, with the same tokenizer'
            )
        if self.validation_file is not None:
            raise ValueError('critic holds out responses by their prompts: give --validation_percentage')
        super().validate(world_size)


def policy_of(folder: str) -> str | None:
    """Returns the name or folder of the model from which the policy of a run started; None if it is not known."""
    record = RunRecord.read(folder)
    return record.models.get('actor', {}).get('source') if record is not None else None


NO_PLAN = '--plan knows PPO, SFT, reward models and critics; python -m chatgpt.plan CONFIG --task sft comes nearest'


@dataclass(kw_only=True)
class PreferenceRun(DataRun):
    """The settings of methods with a `PreferenceConfig`, on preferences or ranked responses; for KTO also on labels."""

    save_path: str = 'outputs/train_preference'
    max_epochs: int = 1

    def validate(self, world_size: int = 1) -> None:
        if self.plan:
            raise ValueError(NO_PLAN)
        super().validate(world_size)


def run_class(name: str) -> type[Run]:
    """Returns the class of a method's settings: its own, or its config class combined with the settings of a run."""
    method = METHODS.find(name)
    return method.part('run') or _run_class(name, method.about, method.part('config'))


@cache
def _run_class(name: str, about: str, config: type[Settings]) -> type[Run]:
    base = PreferenceRun if issubclass(config, PreferenceConfig) else DataRun
    common = DataRun.common | {'the method': tuple(n for n in config.field_names() if n not in DataRun.field_names())}
    trained = {'RM': 'reward_model', 'Critic': 'critic'}.get(METHODS.find(name).model, 'actor')
    own = {'__doc__': about, 'method': name, 'config_class': config, 'common': common, 'trained': trained}
    known = {f.name: f.default for f in fields(base)}
    others = [f for f in fields(config) if f.name in known and f.default != known[f.name]]  # as in RewardRun
    hints = get_type_hints(config)  # types of a user's own module are not known here by their names
    own |= {'__annotations__': {f.name: hints[f.name] for f in others}}
    own |= {f.name: field(default=f.default, metadata=f.metadata) for f in others}
    return dataclass(kw_only=True)(type(f'{config.__name__}Run', (base, config), own))
