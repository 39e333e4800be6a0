"""Every setting of PPO and its relatives, each a keyword argument of the trainer. `validate` checks all together,
before any weight is loaded."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from chatgpt.functional.choices import Aggregation, KLKind
from chatgpt.rules import check
from chatgpt.trainer.algorithms import ESTIMATORS, POLICY_LOSSES, Estimator
from chatgpt.trainer.experience.shaping import ScoreScaling
from chatgpt.trainer.nlpo import NLPOSettings
from chatgpt.trainer.rules import PPO_RULES
from chatgpt.trainer.settings import LearningSettings, check_cut

KLLossKind = Literal['k1', 'k2', 'k3']


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
        check(self, PPO_RULES)
        check_cut('experience_batch_size', self.experience_batch_size, world_size)
        check_cut('train_batch_size', self.train_batch_size, world_size)
