"""Settings of PPO and related methods, each a keyword argument of the trainer. `validate` checks them together, before
any weight is loaded."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from chatgpt.functional.choices import Aggregation, KLKind, OffPolicy
from chatgpt.rules import check
from chatgpt.trainer.algorithms import ESTIMATORS, POLICY_LOSSES, Estimator, settings_of
from chatgpt.trainer.experience.shaping import ScoreScaling
from chatgpt.trainer.nlpo import NLPOSettings
from chatgpt.trainer.objectives.config import CriticLossSettings
from chatgpt.trainer.rules import PPO_RULES
from chatgpt.trainer.settings import LearningSettings, check_cut

KLLossKind = Literal['k1', 'k2', 'k3']


@dataclass(kw_only=True)
class PPOConfig(NLPOSettings, CriticLossSettings, LearningSettings):
    """Settings of `PPOTrainer`.

    Sources: [Z] Ziegler et al. 2019, [S] Stiennon et al. 2020, [T] arXiv 2403.17031, [37] "The 37 implementation
    details of PPO".
    """

    # collect
    experience_batch_size: int = 8
    """prompts of one timestep, over all ranks"""
    num_samples_per_prompt: int = 1
    """responses to each prompt; at least 2 in a group"""
    buffer_limit: int = 0
    """maximum number of sequences kept to learn from; 0: all of a phase"""
    buffer_cpu_offload: bool = True
    """keep collected experience in host memory instead of on the device"""
    offload: Literal['none', 'idle'] = 'none'
    """idle: move the reward and initial models to host memory while they do not score; saves device memory, costs
    time"""
    sample_replay_buffer: bool = False
    """true: an epoch is one random train batch instead of a pass over everything collected"""
    recompute_logprobs: Literal['auto', True, False] = 'auto'
    """compute the old log-probs with a forward pass instead of taking those of generation. auto: only where the two may
    differ: outside of fp32, with `tis_cap`, which compares them, with vLLM, and with reproducible='exact'"""
    score_timeout_s: float | None = None
    """seconds that a reward function may take; after that the run stops. none: no limit"""
    max_staleness: int = 0
    """number of learning phases that the weights behind a sample may lag: engines with their own workers generate this
    many phases ahead while the trainer learns. 0: samples always come from the newest weights; above 0 they
    are weighed by `tis_cap`"""

    # reward
    kl_coef: float = 0.1
    """weight β of the KL to the initial model; 0: the command loads no copy of it"""
    kl_kind: KLKind = 'k1'
    """estimator of the KL in the reward: k1, k2, k3 and abs use the sampled tokens; full sums over the vocabulary and
    needs memory for (N, V) logits of a micro-batch"""
    kl_in: Literal['reward', 'loss'] = 'reward'
    """where the KL to the initial model counts: in each token's reward [Z], or as a term of the loss (GRPO, Shao et al.
    2024)"""
    kl_loss_kind: KLLossKind = 'k3'
    """estimator of the KL in the loss; k3 is GRPO's. The gradient of k1 is 0 in expectation, so it only adds noise"""
    kl_importance: bool = False
    """multiply the KL in the loss by each token's probability ratio, which keeps it unbiased after the policy has moved
    (DeepSeek-V3.2); false: without it, as in GRPO"""
    kl_target: float | None = None
    """mean KL per response, in nats, that kl_coef is adapted to keep [Z]; none: kl_coef stays fixed"""
    kl_horizon: float = 10000.0
    """number of samples over which the adaptive kl_coef reacts [Z]; larger is slower"""
    score_scaling: ScoreScaling = 'none'
    """running: divide scores by their running standard deviation; norm: also subtract their running mean; ref: divide
    by the standard deviation of the first scores (`ScoreShaper`)"""
    score_clip: float | None = None
    """clip scaled scores to [-score_clip, score_clip]; for scores per token, clip their sum. none: no clip"""
    missing_eos_score: float | None = None
    """score of a response that did not end within its tokens, such as -1 [T]; none: its own score"""
    overlong_buffer: int | None = None
    """length penalty: over the last this many tokens before max_new_tokens or max_length it rises linearly from 0 to 1
    (DAPO, Yu et al. 2025, equation 13). none: no penalty"""
    overlong_filter: bool = False
    """exclude responses that were cut at the length limit from the loss (DAPO, section 3.4)"""
    token_penalty: float = 0.0
    """subtracted from the score for each token of the response; above 0 favours short responses"""
    environment_failures: Literal['mask', 'penalise'] = 'mask'
    """an episode ends as failed if its environment raises, takes too long or returns invalid values. mask: exclude it
    from the loss and every baseline; penalise: give it `failure_reward` at its last token"""
    failure_reward: float | None = None
    """reward of a failed episode with environment_failures=penalise, added to its earlier rewards; none: -1"""
    whiten_rewards: bool = False
    """divide the rewards of a timestep by their standard deviation over all tokens"""

    # advantages
    advantage_estimator: str = field(default='gae', metadata={'choices': ESTIMATORS})
    """how advantages follow from rewards (docs/algorithms); gae and a2c need a critic; module:name is an `Estimator` of
    your own (docs/extend/algorithm.md)"""
    dynamic_sampling_rounds: int = 0
    """maximum number of times that groups with equal scores, which give no gradient, are replaced by newly sampled ones
    (DAPO); 0: keep every group"""
    gae_over: Literal['token', 'turn'] = 'token'
    """what one step of GAE is: a token; or a turn of an episode, with one advantage for all of its tokens, so γ and λ
    count turns (Turn-PPO, arXiv 2512.17008). A response without turns is one turn"""
    gamma: float = 1.0
    """discount γ per token or step of GAE"""
    lam: float = 0.95
    """λ of GAE (Schulman et al. 2016); lower relies more on the critic"""
    lam_length: float | None = None
    """α of a λ that follows the response length, instead of `lam`: λ = 1 − 1 / (α · steps), at least 0; for thousands
    of tokens VAPO (arXiv 2504.05118) uses 0.05. none: use `lam`"""
    value_lam: float | None = None
    """λ of the returns that the critic learns; VC-PPO (arXiv 2503.01491) and VAPO use 1.0. none: the same as the
    policy's"""
    whiten_advantages: bool | None = None
    """give the advantages of a learning phase mean 0 and standard deviation 1, over tokens (gdpo: over responses).
    none: as the estimator's paper does: all but grpo, dr_grpo and rloo"""

    # learn
    policy_loss: str = field(default='ppo', metadata={'choices': POLICY_LOSSES})
    """ppo clips each token's ratio, gspo one ratio per sequence (Zheng et al. 2025), gspo_token the same for advantages
    that differ within a response, cispo the weight of −A log π (arXiv 2506.13585), reinforce has no ratio; module:name
    is a `PolicyLoss` of your own"""
    loss_settings: dict[str, float] | None = None
    """settings of the policy loss itself, by name, if it has any (`PolicyLoss.settings`)"""
    loss_aggregation: Aggregation | None = None
    """token: mean over all tokens of a train batch; sequence: mean of the sequences' means; sequence_sum: sum divided
    by sequences x max_new_tokens. none: as in the method's paper: sequence for gspo, token for cispo, otherwise
    sequence for grpo and gdpo, sequence_sum for dr_grpo, token for the rest"""
    tis_cap: float | None = None
    """weight each token by min(π_old / π_engine, cap), to correct for an engine with different log-probs (Yao et al.
    2025) or older weights (`max_staleness`). none: 2 with vLLM and with `max_staleness`, otherwise no weight; 0: no
    weight"""
    tis_floor: float = 0.0
    """lowest weight, below `tis_cap`; IcePop (arXiv 2510.18855) masks outside of 0.5 and 5"""
    off_policy: OffPolicy = 'token_truncate'
    """how `tis_cap` and `tis_floor` bound the weight: of each token, or one product per sequence; weights outside are
    moved to the bound (truncate), or to 0, so that what they weigh teaches nothing (mask)"""
    dual_clip: float | None = None
    """bound of the loss of negative advantages, as a multiple of the advantage, above 1 (Ye et al. 2020); none: no
    bound"""
    train_batch_size: int = 8
    """sequences of one optimizer step, over all ranks"""
    max_epochs: int = 1
    """passes over the collected responses in one learning phase"""
    eps_clip: float = 0.2
    """clip the ratio of new to old policy to 1 ± eps_clip"""
    eps_clip_high: float | None = None
    """upper clip range where it differs from eps_clip: up to 1 + eps_clip_high (DAPO uses 0.28); none: the same"""
    value_clip: float | None = 0.4
    """clip new values to old value ± this; none: no clip"""
    critic_warmup_phases: int = 0
    """number of first learning phases in which only the critic learns: the actor waits, and the rollouts of these
    phases are kept until the last of them (docs/critic.md)"""
    critic_epochs: int | None = None
    """passes of a separate critic over the collected responses in one phase; none: max_epochs"""
    critic_train_batch_size: int | None = None
    """sequences of one optimizer step of a separate critic; none: train_batch_size"""
    value_coef: float = 0.1
    """weight of the value loss where actor and critic share a trunk ([T] uses 0.1); a separate critic has its own
    optimizer"""
    entropy_coef: float = 0.0
    """weight of the entropy bonus; above 0 keeps sampling diverse"""
    ptx_coef: float = 0.0
    """weight of the next-token loss on ptx_data (PPO-ptx, Ouyang et al. 2022), which limits forgetting; 0: none"""
    positive_coef: float = 0.0
    """weight of the next-token loss on correct responses, those with success in their environment or else a score of at
    least 1; VAPO (arXiv 2504.05118) uses 0.1. 0: none"""
    ratio_threshold: float | None = 10.0
    """skip a train batch if its mean ratio exceeds this (TRL); none: never skip"""
    target_kl: float | None = None
    """end a learning phase early when the approximate KL of a train batch exceeds 1.5 times this (TRL's
    early_stopping); none: never"""

    @property
    def estimator(self) -> Estimator:
        return ESTIMATORS.find(self.advantage_estimator)

    @property
    def of_loss(self) -> Any:
        """The settings of the policy loss itself."""
        own = POLICY_LOSSES.find(self.policy_loss).settings
        return settings_of(own, self.loss_settings, 'loss_settings', 'policy_loss')

    @property
    def critic_apart(self) -> bool:
        """True if a separate critic learns in passes of its own, and not from the actor's train batches."""
        return bool(self.critic_warmup_phases or self.critic_epochs or self.critic_train_batch_size)

    @property
    def whitens_advantages(self) -> bool:
        return self.estimator.whitens if self.whiten_advantages is None else self.whiten_advantages

    @property
    def aggregation(self) -> Aggregation:
        """`loss_aggregation`, or the default of the policy loss or the estimator."""
        if self.loss_aggregation is not None:
            return self.loss_aggregation
        return POLICY_LOSSES.find(self.policy_loss).aggregation or self.estimator.aggregation

    @property
    def reward_of_failure(self) -> float:
        """Reward of a failed episode; 0 where failed episodes are masked."""
        if self.environment_failures == 'mask':
            return 0.0
        return -1.0 if self.failure_reward is None else self.failure_reward

    def validate(self, world_size: int = 1) -> None:
        super().validate(world_size)
        _ = self.of_loss
        _ = self.of_critic_loss
        check(self, PPO_RULES)
        check_cut('experience_batch_size', self.experience_batch_size, world_size)
        check_cut('train_batch_size', self.train_batch_size, world_size)
        if self.critic_train_batch_size is not None:
            check_cut('critic_train_batch_size', self.critic_train_batch_size, world_size)
