"""Settings of the trainers as validated dataclasses.

Every keyword argument of a trainer is a field here. An unknown keyword is a ValueError that lists the nearest known
ones. Each number is checked against its range when an object is made (`ranges`), and `validate` checks all settings
together, before any weight is loaded.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Literal, Self, TypeVar

from chatgpt.functional.choices import Aggregation, KLKind
from chatgpt.names import hint
from chatgpt.rollout.sampling import generation_fields
from chatgpt.rules import check
from chatgpt.trainer.algorithms import ESTIMATORS, POLICY_LOSSES, Estimator
from chatgpt.trainer.experience.shaping import ScoreScaling
from chatgpt.trainer.nlpo import NLPOSettings
from chatgpt.trainer.ranges import check_values
from chatgpt.trainer.rules import LEARNING_RULES, PPO_RULES

KLLossKind = Literal['k1', 'k2', 'k3']
Schedule = Literal['constant', 'linear', 'cosine']

C = TypeVar('C', bound='Settings')


@dataclass(kw_only=True)
class Settings:
    """Base of the settings dataclasses: made from keywords, checked, turned back into a dict."""

    def __new__(cls, *args: Any, **values: Any) -> Self:
        cls.check_names(values)
        return super().__new__(cls)

    @classmethod
    def check_names(cls, names: Iterable[str]) -> None:
        """Raises ValueError for the first name that is no field, with the nearest ones."""
        known = cls.field_names()
        for name in names:
            if name not in known:
                raise ValueError(f'{cls.__name__} has no setting {name!r}{hint(name, known)}')

    def __post_init__(self) -> None:
        check_values(self)

    @classmethod
    def field_names(cls) -> list[str]:
        return [f.name for f in fields(cls)]

    @classmethod
    def from_dict(cls: type[C], values: Mapping[str, Any]) -> C:
        """Settings from keywords; an unknown one is a ValueError with the nearest names."""
        return cls(**values)

    @classmethod
    def split(cls: type[C], owner: str, config: C | None, kwargs: Mapping[str, Any]) -> tuple[C, dict[str, Any]]:
        """The keywords of a trainer that also generates: settings (over those of `config`), and generation keywords.

        Raises:
            ValueError: a keyword that is neither; lists the nearest known ones.
        """
        settings, generation = cls.field_names(), generation_fields()
        for name in kwargs:
            if name not in settings and name not in generation:
                raise ValueError(f'{owner} got an unknown keyword {name!r}{hint(name, [*settings, *generation])}')
        own = {k: v for k, v in kwargs.items() if k in settings}
        return replace(config, **own) if config is not None else cls(**own), {
            k: v for k, v in kwargs.items() if k not in settings
        }

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def check_cut(name: str, value: int, world_size: int) -> None:
    """A global batch size must be a multiple of the number of ranks."""
    if value % world_size:
        lower = value // world_size * world_size
        near = f'{lower} or {lower + world_size}' if lower else str(world_size)
        raise ValueError(
            f'{name}={value} cannot be split over {world_size} ranks; use a multiple of {world_size}, such as {near}'
        )


@dataclass(kw_only=True)
class LearningSettings(Settings):
    """What every trainer that learns has in common. Batch sizes are global: all ranks together."""

    max_tokens_per_batch: int | None = None
    """padded tokens of one forward on one rank; None puts a rank's share of a train batch into one forward"""
    packing: bool = True
    """forwards leave padding out where the model can (`chatgpt.nn.packing`); False runs every row of a batch at full
    width"""
    max_grad_norm: float | None = 1.0
    """clip the global gradient norm of each model to this; None only measures it"""
    lr_schedule: Schedule = 'constant'
    """'linear' and 'cosine' decay to 0 over the run, after the warm-up"""
    lr_end_factor: float = 0.0
    """they end at this multiple of the learning rate instead"""
    lr_decay_steps: int | None = None
    """and are there at this optimizer step, after which the rate holds; None is the end of the run"""
    warmup_steps: int = 0
    """optimizer steps over which the learning rate rises from 0"""
    dataloader_pin_memory: bool = True
    """copy batches to an accelerator from pinned host memory"""

    def validate(self, world_size: int = 1) -> None:
        check_values(self)  # again: fields may have been set since
        check(self, LEARNING_RULES)


@dataclass(kw_only=True)
class PPOConfig(NLPOSettings, LearningSettings):
    """Every setting of `PPOTrainer`.

    Sources: [Z] Ziegler et al. 2019, [S] Stiennon et al. 2020, [T] arXiv 2403.17031, [37] "The 37 implementation
    details of PPO".
    """

    # collect
    experience_batch_size: int = 8
    """prompts of one timestep, all ranks together"""
    num_samples_per_prompt: int = 1
    """responses to each prompt; a group for the group-relative estimators"""
    buffer_limit: int = 0
    """keep at most this many sequences; 0 keeps all of a phase"""
    buffer_cpu_offload: bool = True
    """experience waits in host memory"""
    offload: Literal['none', 'idle'] = 'none'
    """'idle': the reward and initial models leave the device for host memory whenever they are not scoring"""
    sample_replay_buffer: bool = False
    """each epoch takes one random train batch instead of a pass over the buffer"""
    recompute_logprobs: Literal['auto', True, False] = 'auto'
    """take the old log-probs from a forward pass instead of the decode; 'auto' does so unless computing in fp32, where
    both agree, and always with `tis_cap`, which compares the two, with vLLM, which rounds otherwise, and with
    reproducible='exact'"""
    score_timeout_s: float | None = None
    """a reward function that takes longer stops the run; None waits"""
    max_staleness: int = 0
    """learning phases that the weights behind a sample may be old: while the trainer learns, an engine with workers of
    its own generates for so many phases ahead. 0 waits for samples of the newest weights; more needs `tis_cap`"""

    # reward
    kl_coef: float = 0.1
    """β: weight of the per-token KL to the initial model in the reward"""
    kl_kind: KLKind = 'k1'
    """estimator in the reward; 'full' sums over the vocabulary and holds (N, V) logits of a micro-batch"""
    kl_in: Literal['reward', 'loss'] = 'reward'
    """where the KL to the initial model is paid: in each token's reward [Z], or as a term of the loss (GRPO, Shao et
    al. 2024)"""
    kl_loss_kind: KLLossKind = 'k3'
    """estimator in the loss; k3 is GRPO's. The gradient of k1 is 0 in expectation, so it only adds noise"""
    kl_importance: bool = False
    """multiply the KL in the loss by each token's ratio to the policy that collected, which makes it unbiased once the
    policy has moved (DeepSeek-V3.2); False takes it as it is, as GRPO does"""
    kl_target: float | None = None
    """adapt kl_coef towards this mean KL per response, in nats [Z]; None keeps it fixed"""
    kl_horizon: float = 10000.0
    """samples over which the adaptive coefficient reacts [Z]"""
    score_scaling: ScoreScaling = 'none'
    """'running', 'norm' or 'ref'; see `ScoreShaper`, also for what these settings do to scores per token"""
    score_clip: float | None = None
    """clip scaled scores to ± this; of scores per token, their sum"""
    missing_eos_score: float | None = None
    """score of a response that did not end (−1 in [T]); None leaves its score alone"""
    overlong_buffer: int | None = None
    """the last so many tokens before max_new_tokens or max_length cost up to 1, linearly (DAPO, Yu et al. 2025,
    equation 13)"""
    overlong_filter: bool = False
    """responses that ran out of room are left out of the loss (DAPO, section 3.4)"""
    token_penalty: float = 0.0
    """subtracted from the score per response token"""
    environment_failures: Literal['mask', 'penalise'] = 'mask'
    """episodes whose environment raised, took too long or answered nonsense: 'mask' counts none of their tokens and
    keeps their scores out of every baseline, 'penalise' pays `failure_reward` at their last token"""
    failure_reward: float | None = None
    """with 'penalise', on top of what the environment gave before; None is −1"""
    whiten_rewards: bool = False
    """divide the rewards of a timestep by their standard deviation over all tokens"""

    # advantages
    advantage_estimator: str = field(default='gae', metadata={'choices': ESTIMATORS})
    """how advantages follow from rewards (docs/algorithms); module:name is an `Estimator` of your own
    (docs/extend/algorithm.md)"""
    dynamic_sampling_rounds: int = 0
    """DAPO's dynamic sampling: groups whose scores are all equal teach nothing and are replaced by newly drawn ones, in
    at most so many further rounds; 0 keeps every group"""
    gae_over: Literal['token', 'turn'] = 'token'
    """the step of GAE: 'turn' takes each turn of an episode as one action, whose tokens all have its advantage
    (Turn-PPO, arXiv 2512.17008); γ and λ then count turns. A response without turns is one"""
    gamma: float = 1.0
    """discount per step of GAE, or per token; tokens of an observation are no steps"""
    lam: float = 0.95
    """λ of GAE (Schulman et al. 2016)"""
    lam_length: float | None = None
    """α of a λ that follows the length in place of `lam`: 1 − 1 / (α · steps), at least 0 (VAPO, arXiv 2504.05118, has
    0.05 for thousands of tokens)"""
    value_lam: float | None = None
    """λ of the returns that the critic learns (VC-PPO, arXiv 2503.01491, and VAPO have 1.0); None is the policy's"""
    whiten_advantages: bool | None = None
    """whiten advantages over all tokens of a learning phase (gdpo: over responses); None does what the estimator's
    entry in `chatgpt.trainer.algorithms` says: all of ours but grpo, dr_grpo and rloo do"""

    # learn
    policy_loss: str = field(default='ppo', metadata={'choices': POLICY_LOSSES})
    """'ppo' clips each token's ratio, 'gspo' one ratio per sequence (Zheng et al. 2025), 'cispo' the weight of −A log π
    from above (MiniMax-M1, arXiv 2506.13585), 'reinforce' is −A log π without a ratio; module:name is a `PolicyLoss` of
    your own"""
    loss_settings: dict[str, float] | None = None
    """settings of the policy loss itself, by name, where it has any (`PolicyLoss.settings`)"""
    loss_aggregation: Aggregation | None = None
    """'token' is a mean over all tokens of a train batch, 'sequence' a mean over sequences of their means,
    'sequence_sum' divides by sequences x max_new_tokens; None takes each paper's: 'sequence' for gspo, 'token' for
    cispo, else 'sequence' for grpo and gdpo, 'sequence_sum' for dr_grpo and 'token' for the rest"""
    tis_cap: float | None = None
    """weight each token by min(π_old / π_engine, cap), for engines whose log-probs differ from the trainer's (Yao et
    al. 2025), or whose weights are older (`max_staleness`)"""
    dual_clip: float | None = None
    """bound of the loss of a negative advantage, in multiples of it, above 1 (Ye et al. 2020)"""
    train_batch_size: int = 8
    """sequences of one optimizer step, all ranks together"""
    max_epochs: int = 1
    """passes over the buffer in one learning phase"""
    eps_clip: float = 0.2
    """the ratio is clipped to [1 − eps_clip, 1 + eps_clip]"""
    eps_clip_high: float | None = None
    """upper clip when it differs from the lower"""
    value_clip: float | None = 0.4
    """new values are clipped to old ± this; None does not clip"""
    value_coef: float = 0.1
    """weight of the value loss where actor and critic share a trunk ([T] has 0.1); separate critics have their own
    optimizer"""
    entropy_coef: float = 0.0
    """weight of the entropy bonus"""
    ptx_coef: float = 0.0
    """weight of the next-token loss on pretraining text (PPO-ptx, Ouyang et al. 2022)"""
    ratio_threshold: float | None = 10.0
    """a train batch whose mean ratio exceeds this is skipped (TRL); None never skips"""
    target_kl: float | None = None
    """leave the epochs of a phase when the approximate KL of a train batch exceeds 1.5 times this (TRL
    early_stopping)"""

    @property
    def estimator(self) -> Estimator:
        return ESTIMATORS.find(self.advantage_estimator)

    @property
    def of_loss(self) -> Any:
        """The policy loss's own settings."""
        return POLICY_LOSSES.find(self.policy_loss).own_settings(self.loss_settings)

    @property
    def whitens_advantages(self) -> bool:
        return self.estimator.whitens if self.whiten_advantages is None else self.whiten_advantages

    @property
    def aggregation(self) -> Aggregation:
        """What `loss_aggregation` comes to."""
        if self.loss_aggregation is not None:
            return self.loss_aggregation
        return POLICY_LOSSES.find(self.policy_loss).aggregation or self.estimator.aggregation

    @property
    def reward_of_failure(self) -> float:
        """What a failed episode is paid; 0 where it is left out."""
        if self.environment_failures == 'mask':
            return 0.0
        return -1.0 if self.failure_reward is None else self.failure_reward

    def validate(self, world_size: int = 1) -> None:
        super().validate(world_size)
        POLICY_LOSSES.find(self.policy_loss).own_settings(self.loss_settings)
        ESTIMATORS.find(self.advantage_estimator)
        check(self, PPO_RULES)
        check_cut('experience_batch_size', self.experience_batch_size, world_size)
        check_cut('train_batch_size', self.train_batch_size, world_size)


@dataclass(kw_only=True)
class SupervisedConfig(LearningSettings):
    """Settings of every trainer that passes over a fixed list of records."""

    train_batch_size: int = 4
    """records of one optimizer step, all ranks together"""
    max_epochs: int = 2
    """passes over the data"""
    max_steps: int | None = None
    """stop after this many optimizer steps"""
    log_interval: int = 10
    """optimizer steps of one logged phase"""
    shuffle: bool = True
    """a new order each epoch, from (seed, epoch)"""

    def validate(self, world_size: int = 1) -> None:
        super().validate(world_size)
        check_cut('train_batch_size', self.train_batch_size, world_size)


@dataclass(kw_only=True)
class SFTConfig(SupervisedConfig):
    """Every setting of `SFTTrainer`."""
