"""The checks by the key of what they find, in the order in which they are asked."""

from __future__ import annotations

from collections.abc import Callable

from chatgpt.doctor.checks.entropy import entropy_collapses
from chatgpt.doctor.checks.gradients import grad_norm_spikes
from chatgpt.doctor.checks.kl import kl_coef_at_limit, kl_runs_away
from chatgpt.doctor.checks.motion import nothing_moves
from chatgpt.doctor.checks.overoptimisation import eval_loss_rises, overoptimisation
from chatgpt.doctor.checks.prompts import cut_prompts, duplicate_prompts, few_prompts
from chatgpt.doctor.checks.ratio import clip_fraction_high, clip_fraction_zero, ratio_not_one
from chatgpt.doctor.checks.schedule import schedule_ends_early
from chatgpt.doctor.checks.scores import (
    groups_without_signal,
    reward_model_disagrees,
    reward_outliers,
    score_saturates,
    scores_equal,
)
from chatgpt.doctor.checks.text import (
    ends_at_once,
    length_drifts,
    length_limit,
    never_ends,
    repetition_across,
    repetition_within,
)
from chatgpt.doctor.checks.time import slow_rank, time_elsewhere
from chatgpt.doctor.checks.values import explained_variance_low, value_loss_dominates
from chatgpt.doctor.finding import Finding
from chatgpt.doctor.history import History

Check = Callable[[History], Finding | None]

CHECKS: dict[str, Check] = {
    'ratio-not-one': ratio_not_one,
    'reward-model-disagrees': reward_model_disagrees,
    'few-prompts': few_prompts,
    'duplicate-prompts': duplicate_prompts,
    'cut-prompts': cut_prompts,
    'scores-equal': scores_equal,
    'nothing-moves': nothing_moves,
    'kl-runs-away': kl_runs_away,
    'kl-coef-at-limit': kl_coef_at_limit,
    'clip-fraction-high': clip_fraction_high,
    'clip-fraction-zero': clip_fraction_zero,
    'entropy-collapses': entropy_collapses,
    'value-loss-dominates': value_loss_dominates,
    'explained-variance-low': explained_variance_low,
    'over-optimisation': overoptimisation,
    'score-saturates': score_saturates,
    'groups-without-signal': groups_without_signal,
    'reward-outliers': reward_outliers,
    'repetition-within': repetition_within,
    'repetition-across': repetition_across,
    'ends-at-once': ends_at_once,
    'never-ends': never_ends,
    'length-limit': length_limit,
    'length-drifts': length_drifts,
    'eval-loss-rises': eval_loss_rises,
    'grad-norm-spikes': grad_norm_spikes,
    'schedule-ends-early': schedule_ends_early,
    'slow-rank': slow_rank,
    'time-elsewhere': time_elsewhere,
}

COVERED: dict[str, tuple[str, ...]] = {
    'duplicate-prompts': ('few-prompts',),
    'clip-fraction-zero': ('nothing-moves', 'schedule-ends-early'),
    'kl-coef-at-limit': ('kl-runs-away', 'nothing-moves'),
    'score-saturates': ('scores-equal',),
    'groups-without-signal': ('scores-equal',),
    'explained-variance-low': ('scores-equal',),
    'length-limit': ('never-ends',),
    'length-drifts': ('ends-at-once', 'length-limit', 'never-ends'),
    'repetition-across': ('ends-at-once',),
}
"""what is not said once one of these has been: the same thing seen from another side"""
