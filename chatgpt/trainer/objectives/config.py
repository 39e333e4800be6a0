"""Settings of the objectives. Imports no torch, so that a command line can read them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from chatgpt.trainer.settings import LearningSettings, Schedule, check_cut

LossName = Literal['log_sig', 'log_exp']
DPOLoss = Literal['sigmoid', 'ipo', 'cdpo', 'robust', 'hinge']


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


@dataclass(kw_only=True)
class RewardModelConfig(SupervisedConfig):
    """Every setting of `RewardModelTrainer`. One record is a prompt with all its answers, or one labelled text."""

    lr_schedule: Schedule = 'cosine'
    max_epochs: int = 1
    """more than one overfits soon (Ouyang et al. 2022, appendix C.2)"""
    loss_fn: LossName = 'log_sig'
    """−log σ(better − worse), or log(1 + exp(worse − better)): the same function, with another way of rounding"""
    use_margins: bool = False
    """subtract the difference of the data's own scores from that of the model's (Touvron et al. 2023, equation 2)"""
    center_rewards_coefficient: float = 0.0
    """weight of the mean of (better + worse)², which keeps scores near 0 (Eisenstein et al. 2023, equation 2); TRL
    suggests 0.01"""
    positive_label: str | None = None
    """which label of labelled text is a success; None knows 1, true, yes, pos, positive, good, like and their
    opposites"""
    calibrate: bool = True
    """at the end make the mean score of reference answers 0 (arXiv 2403.17031); they are the best answers where none
    are given"""
    calibration_samples: int = 512
    """reference answers that this reads, drawn by seed where there are more"""
    early_stopping_patience: int | None = None
    """stop after so many evaluations in a row without a better loss on the eval data"""

    def validate(self, world_size: int = 1) -> None:
        super().validate(world_size)
        if self.use_margins and self.loss_fn == 'log_exp':
            raise ValueError("use_margins=True needs loss_fn='log_sig'; the log-exp form has no margin")


@dataclass(kw_only=True)
class PreferenceConfig(SupervisedConfig):
    """Settings that the preference trainers share. A record is a pair."""

    max_epochs: int = 1


@dataclass(kw_only=True)
class ReferenceConfig(PreferenceConfig):
    """Of those that compare with a reference."""

    beta: float = 0.1
    """how strongly the policy is held to the reference (Rafailov et al. 2023)"""
    precompute_ref_logprobs: bool = True
    """the reference's log-probs once, before the first step; False computes them with every batch"""


@dataclass(kw_only=True)
class DPOConfig(ReferenceConfig):
    """Every setting of `DPOTrainer`."""

    loss_type: DPOLoss = 'sigmoid'
    """'sigmoid' is DPO (Rafailov et al. 2023), 'ipo' Azar et al. 2023, 'cdpo' Mitchell 2023, 'robust' Chowdhury et al.
    2024, 'hinge' Zhao et al. 2023"""
    label_smoothing: float | None = None
    """share of labels assumed to be flipped, of 'cdpo' and 'robust' (None: 0.1); the other losses have none"""

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
    """Every setting of `ORPOTrainer`."""

    weight: float = 0.1
    """λ of the odds-ratio term (Hong et al. 2024)"""


@dataclass(kw_only=True)
class SimPOConfig(PreferenceConfig):
    """Every setting of `SimPOTrainer`."""

    beta: float = 2.0
    """of the mean log-prob per token (Meng et al. 2024, whose range is 2 to 2.5)"""
    gamma: float = 1.0
    """target margin (Meng et al. 2024: 0.3 to 1.6)"""


@dataclass(kw_only=True)
class KTOConfig(ReferenceConfig):
    """Every setting of `KTOTrainer`. A record is one labelled answer."""

    train_batch_size: int = 8
    """answers of one optimizer step, all ranks together; at least 2, for each is compared with another's prompt"""
    desirable_weight: float = 1.0
    """λ_D; the paper keeps λ_D n_D / (λ_U n_U) between 1 and 4/3"""
    undesirable_weight: float = 1.0
    """λ_U"""
    positive_label: str | None = None
    """which label is a success; None knows true, 1, good, positive and their opposites"""


@dataclass(kw_only=True)
class ILQLConfig(SupervisedConfig):
    """Every setting of `ILQLTrainer`. Defaults are trlX's, which follow Snell et al. 2022."""

    tau: float = 0.7
    """expectile of V: 0.5 is the mean of Q over the data's actions, towards 1 their maximum"""
    gamma: float = 0.99
    cql_scale: float = 0.1
    """weight of the conservative term"""
    awac_scale: float = 1.0
    """weight of the policy's next-token loss"""
    beta: float = 0.0
    """that loss is weighted by exp(β (Q − V)); 0 is plain next-token loss"""
    alpha: float = 0.001
    """Polyak averaging of the target Q heads"""
    target_sync_interval: int = 5
    """optimizer steps between two of them"""
    standardize_rewards: bool = True
    """rewards have mean 0 and standard deviation 1 over the training data, by whose moments those of the eval data go
    too (per-token rewards: divided by the deviation of their sums)"""
