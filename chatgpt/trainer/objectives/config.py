"""Settings of the objectives, and of a critic's loss. Imports no torch, for command lines."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from chatgpt.trainer.algorithms import CRITIC_LOSSES, settings_of
from chatgpt.trainer.settings import LearningSettings, Schedule, Settings, check_cut

LossName = Literal['log_sig', 'log_exp']
DPOLoss = Literal['sigmoid', 'ipo', 'cdpo', 'robust', 'hinge']


@dataclass(kw_only=True)
class SupervisedConfig(LearningSettings):
    """Settings of all trainers over a fixed list of records."""

    train_batch_size: int = 4
    """records of one optimizer step, over all ranks"""
    max_epochs: int = 2
    """passes over the data"""
    max_steps: int | None = None
    """maximum number of optimizer steps; training stops there. none: no limit"""
    log_interval: int = 10
    """optimizer steps between two lines of metrics.jsonl"""
    shuffle: bool = True
    """take the records in a new random order in each epoch; false: in the order of the file"""

    def validate(self, world_size: int = 1) -> None:
        super().validate(world_size)
        check_cut('train_batch_size', self.train_batch_size, world_size)


@dataclass(kw_only=True)
class SFTConfig(SupervisedConfig):
    """Settings of `SFTTrainer`."""


@dataclass(kw_only=True)
class RewardModelConfig(SupervisedConfig):
    """Settings of `RewardModelTrainer`. A record is a prompt with all its answers, or a labelled text."""

    lr_schedule: Schedule = 'cosine'
    max_epochs: int = 1
    """passes over the data; reward models overfit soon after the first (Ouyang et al. 2022, appendix C.2)"""
    loss_fn: LossName = 'log_sig'
    """log_sig: −log σ(better − worse); log_exp: log(1 + exp(worse − better)), the same function with different
    rounding"""
    use_margins: bool = False
    """require the score difference of a pair to exceed the difference of the scores in the data (Touvron et al. 2023,
    equation 2); only for data with scores"""
    center_rewards_coefficient: float = 0.0
    """weight of the mean of (better + worse)², which keeps scores near 0 (Eisenstein et al. 2023, equation 2); TRL
    suggests 0.01; 0: off"""
    positive_label: str | None = None
    """label of labelled text that counts as good; none: 1, true, yes, pos, positive, good, like are good, and their
    opposites bad"""
    calibrate: bool = True
    """after training, shift the scores so that reference answers, without any the best answers, have mean 0 (arXiv
    2403.17031); scores of labelled text are logits and stay"""
    calibration_samples: int = 512
    """maximum number of reference answers used for that, sampled with the seed if there are more"""
    early_stopping_patience: int | None = None
    """number of evaluations in a row without a better eval loss after which training stops; none: never"""

    def validate(self, world_size: int = 1) -> None:
        super().validate(world_size)
        if self.use_margins and self.loss_fn == 'log_exp':
            raise ValueError("use_margins=True needs loss_fn='log_sig'; the log-exp form has no margin")


@dataclass(kw_only=True)
class PreferenceConfig(SupervisedConfig):
    """Settings of the preference trainers. A record is a pair."""

    max_epochs: int = 1


@dataclass(kw_only=True)
class ReferenceConfig(PreferenceConfig):
    """Settings of methods that compare with a reference."""

    beta: float = 0.1
    """strength β of the tie to the reference (Rafailov et al. 2023): higher keeps the policy closer to it"""
    precompute_ref_logprobs: bool = True
    """compute the reference's log-probs once, before the first step; false: with every batch, which takes more time"""


@dataclass(kw_only=True)
class DPOConfig(ReferenceConfig):
    """Settings of `DPOTrainer`."""

    loss_type: DPOLoss = 'sigmoid'
    """loss of a pair: sigmoid is DPO (Rafailov et al. 2023); ipo, Azar et al. 2023; cdpo, Mitchell 2023; robust,
    Chowdhury et al. 2024; hinge, Zhao et al. 2023"""
    label_smoothing: float | None = None
    """share of pairs assumed to be in the wrong order, with loss_type cdpo or robust; none: 0.1 with these"""

    @property
    def flipped_share(self) -> float:
        return 0.1 if self.label_smoothing is None else self.label_smoothing

    def validate(self, world_size: int = 1) -> None:
        super().validate(world_size)
        if self.label_smoothing is not None and self.loss_type not in ('cdpo', 'robust'):
            raise ValueError(
                f'label_smoothing={self.label_smoothing} belongs to the losses cdpo and robust, not to '
                f'{self.loss_type!r}; choose one of '
                'them, or leave it out'
            )


@dataclass(kw_only=True)
class ORPOConfig(PreferenceConfig):
    """Settings of `ORPOTrainer`."""

    weight: float = 0.1
    """weight λ of the odds-ratio term beside the SFT loss (Hong et al. 2024)"""


@dataclass(kw_only=True)
class SimPOConfig(PreferenceConfig):
    """Settings of `SimPOTrainer`."""

    beta: float = 2.0
    """factor β of the mean log-prob per token, the reward (Meng et al. 2024 use 2 to 2.5)"""
    gamma: float = 1.0
    """margin γ by which the better answer's reward is to exceed the other's (Meng et al. 2024 use 0.3 to 1.6)"""


@dataclass(kw_only=True)
class KTOConfig(ReferenceConfig):
    """Settings of `KTOTrainer`. A record is a labelled answer."""

    train_batch_size: int = 8
    """answers of one optimizer step, over all ranks; at least 2, because each answer is also compared with another's
    prompt"""
    desirable_weight: float = 1.0
    """weight λ_D of good answers; with n_D good and n_U bad ones, the paper keeps λ_D n_D / (λ_U n_U) between 1 and
    4/3"""
    undesirable_weight: float = 1.0
    """weight λ_U of bad answers"""
    positive_label: str | None = None
    """label that counts as good; none: true, 1, good, positive are good, and their opposites bad"""


@dataclass(kw_only=True)
class ILQLConfig(SupervisedConfig):
    """Settings of `ILQLTrainer`. Defaults are trlX's, which follow Snell et al. 2022."""

    tau: float = 0.7
    """expectile of V: 0.5 is the mean of Q over the actions in the data, values towards 1 approach their maximum"""
    gamma: float = 0.99
    """discount of rewards per token"""
    cql_scale: float = 0.1
    """weight of the conservative (CQL) term, which lowers Q of actions that are not in the data"""
    awac_scale: float = 1.0
    """weight of the policy's next-token loss"""
    beta: float = 0.0
    """the next-token loss is weighted by exp(β (Q − V)); 0: not weighted"""
    alpha: float = 0.001
    """step of the target Q heads towards the trained ones: target ← α Q + (1 − α) target"""
    target_sync_interval: int = 5
    """optimizer steps between two such steps"""
    standardize_rewards: bool = True
    """shift and scale rewards to mean 0 and standard deviation 1 over the training data, eval data by the same numbers;
    rewards per token are divided by the deviation of their sums"""


@dataclass(kw_only=True)
class CriticLossSettings(Settings):
    """The loss of a critic."""

    critic_loss: Literal['mse', 'huber', 'categorical'] = 'mse'
    """mse: half the squared error of the value; huber: linear beyond delta; categorical: the value is the mean of bins
    whose probabilities are learned by cross-entropy (HL-Gauss, Farebrother et al. 2024; docs/critic.md)"""
    critic_loss_settings: dict[str, float] | None = None
    """settings of that loss, such as '{low: -1, high: 1}': delta of huber, 1; bins, low, high and sigma of categorical,
    101, -10, 10 and 0.75"""

    @property
    def of_critic_loss(self) -> Any:
        """The settings of the critic's loss itself: None for mse."""
        return settings_of(
            CRITIC_LOSSES[self.critic_loss], self.critic_loss_settings, 'critic_loss_settings', 'critic_loss'
        )

    @property
    def critic_support(self) -> dict[str, float]:
        """The bins of the critic's head (`CategoricalHead.support`); {} for a head with one output."""
        return self.of_critic_loss.support if self.critic_loss == 'categorical' else {}


@dataclass(kw_only=True)
class CriticConfig(CriticLossSettings, SupervisedConfig):
    """Settings of `CriticTrainer`. A record is a recorded response."""

    train_batch_size: int = 8
    """responses of one optimizer step, over all ranks"""
    gamma: float = 1.0
    """discount γ per token of the returns, which have λ = 1: recorded values are another critic's, or 0 without one"""
    returns_from: Literal['rewards', 'score'] = 'rewards'
    """rewards: returns are sums of the recorded rewards of tokens, with the KL penalty of their run; score: the shaped
    score alone, for a run without a KL in the reward"""

    def validate(self, world_size: int = 1) -> None:
        super().validate(world_size)
        _ = self.of_critic_loss
