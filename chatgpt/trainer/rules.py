"""Combinations of trainer settings that are refused: tables of `chatgpt.rules`.

The range of each number is in `settings.RANGES`. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from chatgpt.rules import Rule, changed, is_changed
from chatgpt.trainer.algorithms import ESTIMATORS, GAE_SETTINGS, POLICY_LOSSES


def _loss(s: Any) -> Any:
    return POLICY_LOSSES.find(s.policy_loss)


def _estimators(test: Callable[[Any], Any]) -> str:
    return ', '.join(name for name, entry in ESTIMATORS.items() if test(entry))


LEARNING_RULES = [
    Rule(
        lambda s: s.lr_schedule == 'constant' and (s.lr_end_factor or s.lr_decay_steps is not None),
        "lr_end_factor and lr_decay_steps are of a rate that decays, and lr_schedule is 'constant': give 'linear' or "
        "'cosine'",
    ),
    Rule(
        lambda s: s.lr_decay_steps is not None and s.lr_decay_steps <= s.warmup_steps,
        'lr_decay_steps={s.lr_decay_steps} counts from the start, warm-up included: it must be above '
        'warmup_steps={s.warmup_steps}',
    ),
]
"""for every trainer (`LearningSettings`)"""

PPO_RULES = [
    Rule(
        lambda s: _loss(s).per_sequence and s.aggregation != 'sequence',
        'policy_loss={s.policy_loss!r} has one ratio per sequence: loss_aggregation={s.loss_aggregation!r} does not '
        'fit it',
    ),
    Rule(
        lambda s: _loss(s).clip == 'none' and (s.dual_clip is not None or s.eps_clip_high is not None),
        'policy_loss={s.policy_loss!r} has no ratio to clip: leave dual_clip and eps_clip_high out',
    ),
    *changed(
        ('eps_clip',),
        lambda s: _loss(s).clip == 'none',
        '{name}={value} clips a ratio, and policy_loss={s.policy_loss!r} has none: leave it out',
    ),
    Rule(
        lambda s: _loss(s).clip == 'upper' and s.dual_clip is not None,
        'policy_loss={s.policy_loss!r} has no clipped surrogate to bound: leave dual_clip out',
    ),
    Rule(
        lambda s: s.kl_target is not None and not s.kl_coef,
        'kl_target={s.kl_target} adapts kl_coef, which must be above 0 at the start',
    ),
    *changed(
        ('kl_horizon',), lambda s: s.kl_target is None, '{name}={value} is of an adaptive kl_coef: give kl_target too'
    ),
    *changed(
        ('kl_kind',),
        lambda s: s.kl_in == 'loss',
        "{name}={value!r} is the estimator of the KL in the reward; with kl_in='loss' give kl_loss_kind",
    ),
    Rule(
        lambda s: s.estimator.rewards_apart and s.kl_in == 'reward' and s.kl_coef,
        'advantage_estimator={s.advantage_estimator!r} has no sum of rewards that a KL could be taken from: set '
        "kl_in='loss', or kl_coef=0",
    ),
    *changed(
        (
            *('score_scaling', 'score_clip', 'missing_eos_score', 'overlong_buffer', 'token_penalty'),
            *('environment_failures', 'whiten_rewards'),
        ),
        lambda s: s.estimator.rewards_apart,
        '{name}={value!r} acts on the sum of the rewards, which advantage_estimator={s.advantage_estimator!r} never '
        'forms: leave it out, or make it a reward of the list',
    ),
    *changed(
        (
            *('value_clip', 'value_coef', 'critic', 'critic_lr', 'critic_from', 'critic_loss', 'critic_loss_settings'),
            *('critic_warmup_phases', 'critic_epochs', 'critic_train_batch_size'),
        ),
        lambda s: not s.estimator.needs_values,
        '{name}={value!r} is of a critic, and advantage_estimator={s.advantage_estimator!r} takes no critic: leave one '
        'out',
    ),
    Rule(
        lambda s: s.critic_loss == 'categorical' and is_changed(s, 'value_clip') and s.value_clip is not None,
        "value_clip={s.value_clip} clips a value, and critic_loss='categorical' learns probabilities of bins: leave "
        'it out',
    ),
    *(
        Rule(
            lambda s, name=name: name not in s.estimator.follows and is_changed(s, name),  # type: ignore[misc]
            lambda s, name=name: (  # type: ignore[misc]
                f'{name}={getattr(s, name)!r} is a setting of advantage_estimator='
                f'{_estimators(lambda entry: name in entry.follows)}; {s.advantage_estimator!r} does not follow it: '
                'leave it out'
            ),
        )
        for name in GAE_SETTINGS
    ),
    *(
        Rule(
            lambda s, name=name: name in s.estimator.ignores and is_changed(s, name),  # type: ignore[misc]
            f'{name}={{s.{name}}} does nothing with advantage_estimator={{s.advantage_estimator!r}}: leave it out',
        )
        for name in ('gamma', 'lam')
    ),
    Rule(
        lambda s: s.lam_length is not None and is_changed(s, 'lam'),
        'lam_length={s.lam_length!r} takes the place of lam={s.lam!r}: give one of the two',
    ),
    Rule(
        lambda s: s.kl_importance and s.kl_in != 'loss',
        "kl_importance weighs the KL in the loss: it needs kl_in='loss'",
    ),
    Rule(
        lambda s: s.dynamic_sampling_rounds and not s.estimator.needs_groups,
        lambda s: (
            'dynamic_sampling_rounds compares the scores of a group; '
            f'advantage_estimator={s.advantage_estimator!r} has none, use one of '
            f'{_estimators(lambda entry: entry.needs_groups)}'
        ),
    ),
    Rule(
        lambda s: s.estimator.needs_groups and s.num_samples_per_prompt < 2,
        'advantage_estimator={s.advantage_estimator!r} compares responses to the same prompt; set '
        'num_samples_per_prompt to 2 or more (got {s.num_samples_per_prompt})',
    ),
    Rule(
        lambda s: s.tis_cap and s.recompute_logprobs is False,
        "tis_cap compares the engine's log-probs with recomputed ones: recompute_logprobs=False does not fit it",
    ),
    *changed(
        ('off_policy', 'tis_floor'),
        lambda s: not s.tis_cap,
        '{name}={value!r} bounds the weights of tis_cap: give tis_cap, such as 2',
    ),
    Rule(
        lambda s: s.tis_cap and s.tis_floor >= s.tis_cap,
        'tis_floor={s.tis_floor} must be below tis_cap={s.tis_cap}',
    ),
    Rule(
        lambda s: s.max_staleness and (s.tis_cap == 0 or s.recompute_logprobs is False),
        'max_staleness={s.max_staleness} learns from samples of older weights, which tis_cap weighs by recomputed '
        'log-probs: leave tis_cap=0 and recompute_logprobs=False out',
    ),
    Rule(
        lambda s: s.failure_reward is not None and s.environment_failures != 'penalise',
        "failure_reward={s.failure_reward!r} is paid with environment_failures='penalise'; got "
        '{s.environment_failures!r}, which leaves those episodes out',
    ),
    Rule(
        lambda s: s.overlong_filter and s.missing_eos_score is not None,
        'overlong_filter leaves responses without an end out of the loss, so missing_eos_score would do nothing',
    ),
]
"""for `PPOConfig`"""


def reads_decode(name: str, reads: Callable[[Any], bool]) -> Rule:
    """Returns a rule that refuses `name` where its value makes it read the log-probs of the decode."""
    return Rule(
        lambda s: reads(getattr(s, name)),
        f'{name}={{s.{name}}} reads the log-probs of the decode, whose last bits depend on its batch, and '
        f"reproducible='exact' takes them from a forward of its own: leave {name} out",
    )


DECODE_RULES = [
    reads_decode('tis_cap', bool),
    reads_decode('recompute_logprobs', lambda value: value is False),
]
"""for `PPOConfig` with reproducible='exact'"""

STEP_RULES = [
    Rule(
        lambda s: s.tis_cap,
        "tis_cap needs the engine's log-probs, which step is not given: use fit, or leave tis_cap out",
    ),
    Rule(
        lambda s: s.estimator.rewards_apart,
        'advantage_estimator={s.advantage_estimator!r} needs the scores of each reward, which step is not given: use '
        'fit',
    ),
    Rule(
        lambda s: s.dynamic_sampling_rounds,
        'dynamic_sampling_rounds draws further prompts, which step does not have: use fit',
    ),
]
"""for `PPOConfig` where the caller drives `generate` and `step`"""

PAIR_RULES = changed(
    ('positive_label',), lambda _: True, '{name}={value!r} is of labelled text, and the data is pairs: leave it out'
)
"""for `RewardModelConfig` with pairs of responses"""

LABELLED_RULES = changed(
    ('loss_fn', 'use_margins', 'center_rewards_coefficient'),
    lambda _: True,
    '{name}={value!r} is of pairs of responses, and the data is labelled text: leave it out',
)
"""for `RewardModelConfig` with labelled text"""
