"""Every threshold of the doctor with its reason: one table, which docs/doctor.md prints.

"Median" in a check is that of the latest five phases, "at the start" that of the first three.
"""

from __future__ import annotations

from typing import NamedTuple


class Limit(NamedTuple):
    value: float
    why: str


LIMITS: dict[str, Limit] = {
    'min_phases': Limit(10, 'a trend needs more phases than the eight that two medians of three and five take'),
    'min_updates': Limit(20, 'Adam moves no weight further than about lr in a step; fewer steps show nothing'),
    'still_kl': Limit(
        1e-4, 'nats per token: a run that learns has 0.01 to 0.1 after ten phases (docs/results/stories.md)'
    ),
    'still_ratio': Limit(0.01, 'a twentieth of the usual clip range of 0.2: no token came near the clip'),
    'still_loss': Limit(0.02, 'share of the loss: the spread of a mean over a few hundred records'),
    'low_lr': Limit(5, 'times below the rule for this size: the rule is no better than a factor of three'),
    'chance': Limit(0.05, 'above an accuracy of 0.5, in the mean of eight phases: two standard errors of 400 pairs'),
    'chance_late': Limit(0.02, 'above 0.5, with a rate that fits: two standard errors of 2,500 pairs'),
    'late': Limit(0.9, 'of the run: a weak signal shows late'),
    'kl_per_token': Limit(
        1.0, 'nats: the typical token is e times likelier than under the initial model; published runs end below 0.5'
    ),
    'kl_growth': Limit(1.3, 'times in five phases: it has not settled'),
    'kl_notable': Limit(0.1, 'nats per token: below that no target is worth an error'),
    'kl_over_target': Limit(3, 'times the target; the adaptive coefficient holds a run within a factor of two of it'),
    'kl_error': Limit(0.2, 'where the adaptive coefficient clips its error (Ziegler et al. 2019, section 2.2)'),
    'kl_error_phases': Limit(20, 'phases in a row on one side of the target without coming nearer'),
    'clip_high': Limit(0.4, 'share of tokens; healthy runs have 0.02 to 0.3'),
    'clip_zero_ratio': Limit(0.02, 'a tenth of the usual clip range: the clip has nothing to do'),
    'ratio_error': Limit(1e-4, 'rounding in fp32, of |ratio − 1| and of the approximate KL'),
    'ratio_error_half': Limit(
        0.5, 'bf16 and fp16: log-probs of decode and scoring differ by .33 at most on a small model; e^.33 − 1 = .39'
    ),
    'ratio_kl_half': Limit(0.05, 'bf16 and fp16: they differ by .02 on average'),
    'entropy_share': Limit(0.1, 'of the entropy at the start: nine tenths of what was tried is no longer tried'),
    'entropy_gain': Limit(0.5, 'standard deviations of the score at the start: less gain was not worth it'),
    'value_term': Limit(1.0, 'value_coef · value loss; the mean |advantage| of the policy term is 0.8 when whitened'),
    'variance_phases': Limit(20, 'phases: a new critic needs some'),
    'variance_median': Limit(10, 'phases whose median must be above 0'),
    'saturated_std': Limit(0.05, 'of the standard deviation at the start'),
    'equal_phases': Limit(3, 'phases in a row: one may be chance'),
    'outlier_size': Limit(
        10,
        'robust standard deviations (1.4826 · median absolute deviation, now or at the start): no bell curve has that',
    ),
    'outlier_weight': Limit(2, 'times the robust standard deviation: outliers make up most of the ordinary one'),
    'rescore': Limit(0.01, 'of the standard deviation of scores, in fp32: rounding gives about 1e-6'),
    'rescore_half': Limit(0.2, 'in bf16 and fp16, which keep two to three digits'),
    'eval_fall': Limit(0.2, 'of what the evaluation had gained at its best'),
    'eval_score_gain': Limit(0.2, 'standard deviations of the score, since the evaluation was at its best'),
    'repetition_rise': Limit(0.1, 'of all runs of four tokens, above the start'),
    'repetition_rise_across': Limit(0.3, 'of all different runs of four tokens, above the start'),
    'length_factor': Limit(2.5, 'times longer or shorter than at the start'),
    'cut_share': Limit(0.5, 'of responses: half of the scores are of unfinished texts'),
    'cut_share_start': Limit(0.25, 'of responses at the start: the model does end its responses'),
    'long_limit': Limit(128, 'tokens: below that a run may well be meant to draw pieces of longer texts'),
    'short_limit': Limit(
        16,
        'tokens: a shorter limit, or shorter responses, belong to the task: a number, a word, a way in a small graph',
    ),
    'at_once_len': Limit(1.5, 'tokens: the end token, and now and then one more'),
    'equal_groups': Limit(0.5, 'of groups: half of the generating is thrown away'),
    'solved': Limit(
        0.8,
        'of the range of scores so far: what is left are few failures, of which neither a group nor a critic says much',
    ),
    'spike': Limit(10, 'times the median of the twenty phases before'),
    'spike_once': Limit(
        1000, 'times: one is enough; on a solved task, where gradients are near 0, one failure stands out a hundredfold'
    ),
    'spikes': Limit(3, 'phases of the last twenty: one odd text may come up in two'),
    'few_prompts': Limit(16, 'different prompts; the smallest benchmark has 20, which is all there is in its world'),
    'prompt_passes': Limit(4, "times that each was drawn: a trial of a phase or two is none of the doctor's business"),
    'duplicates': Limit(0.5, 'of prompts stand there before: chance does not do that to a set of any size'),
    'cut_prompts': Limit(0.1, 'of prompts without their beginning, where instructions stand'),
    'schedule_lr': Limit(0.01, 'of the highest learning rate: such steps are lost in rounding'),
    'schedule_left': Limit(0.1, 'of the run still to come; a cosine is there for the last 6 %'),
    'slow_rank': Limit(1.5, 'times the median of the other ranks, in four phases of five, always the same rank'),
    'other_share': Limit(0.5, 'of the time of a phase outside of collecting, scoring and learning'),
    'score_share': Limit(0.5, 'of the time of a phase in a reward function'),
    'phase_s': Limit(1.0, 'seconds: in shorter phases writing a log line counts'),
    'eval_loss_rise': Limit(1.02, 'times its lowest, in two evaluations in a row'),
}


def limit(name: str) -> float:
    return LIMITS[name].value
