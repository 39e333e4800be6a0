"""Which charts a report has: the metrics of each and one sentence on what good looks like.

A metric is matched by the first chart that names it, with `*` for a part of a name. Whatever no chart names is drawn
under 'Other', so nothing that a run has logged is left out. What the metrics mean is in docs/metrics.md.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple


class Chart(NamedTuple):
    """One set of axes over the learning phases.

    Args:
        key: the end of its address in the page, `#chart-<key>`.
        lines: names of metrics, or patterns of them.
        band: a least and a greatest value of `lines[0]`, drawn as an area behind it.
        stacked: the lines are parts of a whole.
    """

    key: str
    title: str
    good: str
    lines: tuple[str, ...]
    band: tuple[str, str] | tuple[()] = ()
    stacked: bool = False


class Drawn(NamedTuple):
    """A chart with the metrics that a run has for it."""

    chart: Chart
    lines: list[str]
    band: list[str]


GROUPS: dict[str, tuple[Chart, ...]] = {
    'Evaluation': (
        Chart(
            'eval-score',
            'Score on the evaluation prompts',
            'Rises together with the training score; when it falls while that one rises, the reward is being gamed.',
            ('eval/score_mean', 'eval/score_mean_best'),
        ),
        Chart(
            'eval-success',
            'Success in evaluated episodes',
            'Rises towards 1, or towards what the best player reaches.',
            ('eval/success_share',),
        ),
        Chart(
            'eval-length',
            'Length of evaluation responses',
            'Stays where good answers of this task are; a drift to the limit or to nothing is a trick of the policy.',
            ('eval/length_mean',),
        ),
        Chart(
            'eval-ended', 'Share of evaluation responses that ended', 'Near 1: answers come to an end.', ('eval/ended',)
        ),
    ),
    'Reward': (
        Chart(
            'score',
            'Score',
            'Rises, fast at first, and levels off; the least and the greatest (the area) rise with the mean.',
            ('rollout/score_mean',),
            ('rollout/score_min', 'rollout/score_max'),
        ),
        Chart(
            'score-spread',
            'Spread of scores',
            'Stays above 0: when all responses get the same score there is nothing left to learn from.',
            ('rollout/score_std', 'rollout/score_mad', 'rollout/score_[0-9]+_std'),
        ),
        Chart(
            'scores-apart',
            'Each reward by itself',
            'All rise, or hold; one that falls pays for the others.',
            ('rollout/score_[0-9]+_mean',),
        ),
        Chart(
            'non-score-reward',
            'Reward that is not score (the KL penalty)',
            'Small beside the score; when it outweighs the score, the policy is held back more than it is taught.',
            ('rollout/non_score_reward_mean',),
        ),
        Chart(
            'groups',
            'Groups with signal',
            'Near 1: most prompts have responses of different scores, which is all that a group can teach.',
            ('rollout/informative_share', 'rollout/filtered_share'),
        ),
        Chart(
            'equal-groups',
            'Groups without signal',
            'Low: a group of responses that all have the same score teaches nothing.',
            ('rollout/equal_groups_share',),
        ),
        Chart(
            'rescore-error',
            'Difference of a score from itself',
            'About 0: a response that is scored again gets the same score.',
            ('rollout/rescore_error',),
        ),
    ),
    'Distance from the initial model': (
        Chart(
            'kl',
            'KL to the initial model',
            'Grows slowly and settles at a few nats per response, or at its target; without end means text is rotting.',
            ('rollout/kl_mean', 'rollout/kl_k3_mean'),
        ),
        Chart(
            'kl-coef',
            'KL coefficient',
            'Constant, or moving gently towards a level; stuck at a limit, the controller cannot hold the KL.',
            ('rollout/kl_coef',),
        ),
        Chart('kl-loss', 'KL in the loss', 'As the KL: grows slowly and settles.', ('ppo/kl_loss', 'kto/kl')),
    ),
    'Learning': (
        Chart(
            'loss',
            'Loss',
            'Falls and levels off; if the loss on eval data (val) turns up while the other falls, stop: it memorises.',
            ('*/loss', '*/val_loss'),
        ),
        Chart(
            'perplexity',
            'Perplexity',
            'Falls, and stays close to that on eval data.',
            ('*/perplexity', '*/val_perplexity'),
        ),
        Chart(
            'accuracy',
            'Accuracy',
            'Well above 0.5, which is guessing; on eval data close to that on training data.',
            ('*/accuracy', '*/val_accuracy'),
        ),
        Chart(
            'margin',
            'Margin between the better and the worse',
            'Above 0 and growing, on eval data too.',
            ('*/margin', '*/val_margin'),
        ),
        Chart(
            'answer-scores',
            'Scores of all answers',
            'Stays in range; only differences of scores are learned, so its level means nothing.',
            ('rm/score_mean', 'rm/val_score_mean'),
        ),
        Chart(
            'rewards',
            'Implicit reward of chosen and rejected',
            'They part, the chosen above the rejected; if both fall far, the model leaves even the good answers.',
            ('*/reward_chosen', '*/reward_rejected', '*/val_reward_chosen', '*/val_reward_rejected'),
        ),
        Chart(
            'logps',
            'Log-probability of chosen and rejected',
            'The chosen does not fall much; the rejected falls below it.',
            ('*/logp_chosen', '*/logp_rejected', '*/val_logp_chosen', '*/val_logp_rejected'),
        ),
        Chart(
            'policy-loss',
            'Policy loss',
            'Small and around or below 0; its size says little, a jump says that a step was too large.',
            ('ppo/policy_loss',),
        ),
        Chart(
            'value-loss',
            'Value loss',
            'Falls while the critic learns, then follows the scale of the rewards.',
            ('ppo/value_loss',),
        ),
        Chart('ptx-loss', 'Pretraining loss', 'Does not rise: what was known is kept.', ('ppo/ptx_loss',)),
        Chart(
            'ilql-losses',
            'Parts of the loss',
            'Each falls and settles; none dwarfs the others for long.',
            tuple(
                f'*/{val}{part}' for val in ('', 'val_') for part in ('td_loss', 'value_loss', 'cql_loss', 'awac_loss')
            ),
        ),
        Chart(
            'ilql-values',
            'Q and V',
            'Q and V settle close together and do not grow without end.',
            ('ilql/q_mean', 'ilql/value_mean', 'ilql/val_q_mean', 'ilql/val_value_mean'),
        ),
        Chart(
            'ratio',
            'Ratio of the new policy to the old',
            'The mean stays close to 1; extremes (the area) beyond a factor of about 10 mean too large steps.',
            ('ppo/ratio_mean',),
            ('ppo/ratio_min', 'ppo/ratio_max'),
        ),
        Chart(
            'first-ratio',
            'Ratio error before the first step',
            'About 0 (below 0.001): before any step the new policy is the old one, or something is wrong.',
            ('ppo/first_ratio_error', 'ppo/first_approx_kl'),
        ),
        Chart(
            'clip-fraction',
            'Clip fraction',
            'Between about 0.02 and 0.3: 0 means steps too small to matter, more means steps too large to trust.',
            ('ppo/clip_fraction',),
        ),
        Chart(
            'value-clip-fraction',
            'Value clip fraction',
            'Falls as the critic settles; high for long, the clip keeps the critic from learning.',
            ('ppo/value_clip_fraction',),
        ),
        Chart(
            'approx-kl',
            'KL of one phase of learning',
            'Below about 0.02 nats per token: each phase moves the policy a little.',
            ('ppo/approx_kl', 'ppo/approx_kl_k3'),
        ),
        Chart(
            'entropy',
            'Entropy',
            'Falls slowly and stays clear of 0; near 0 the policy says one thing only and stops exploring.',
            ('ppo/entropy', 'rollout/entropy'),
        ),
        Chart(
            'grad-norm',
            'Gradient norm',
            'Steady within a factor of a few; spikes call for a lower learning rate or a tighter clip.',
            ('*/grad_norm', '*/actor_grad_norm', '*/critic_grad_norm', '*/grad_norm_max', '*/*_grad_norm_max'),
        ),
        Chart(
            'lr',
            'Learning rate',
            'As planned: it warms up, and reaches its end when the run does, not before.',
            ('*/lr', '*/critic_lr'),
        ),
        Chart(
            'skipped',
            'Batches not learned from',
            'Stays at 0: every batch is used, and no phase is left early.',
            ('ppo/skipped_batches', 'ppo/early_stopped'),
        ),
        Chart('updates', 'Optimizer steps so far', 'Straight: each phase takes as many.', ('ppo/num_updates',)),
        Chart(
            'epoch',
            'Passes over the data so far',
            'Straight; each pass beyond the first invites memorising.',
            ('*/epoch',),
        ),
    ),
    'Responses': (
        Chart(
            'length',
            'Length of responses',
            'Stays where good answers of this task are; a drift to the limit or to nothing is a trick of the policy.',
            ('rollout/response_len_mean', 'rollout/response_len_std', 'rollout/prompt_len_mean'),
        ),
        Chart(
            'ended',
            'Why responses ended',
            'Most end by themselves; the share that runs out of room was cut off in the middle of its sentence.',
            ('rollout/ended_share', 'rollout/cut_share'),
            stacked=True,
        ),
        Chart(
            'recorded-ends',
            'Why recorded responses ended',
            'Most end by the end token or a stop string; this is of the recorded sequences only.',
            ('recorded/eos', 'recorded/stop', 'recorded/length'),
            stacked=True,
        ),
        Chart(
            'repetition',
            'Repetition',
            'Stays where it was at the start; a rise means that the same words are said again and again.',
            ('rollout/repetition_within', 'rollout/repetition_across'),
        ),
        Chart(
            'staleness',
            'Age of the weights that drew the samples',
            'Low: samples come from a policy close to the one that learns.',
            ('rollout/staleness_mean', 'rollout/staleness_max'),
        ),
        Chart(
            'rft-kept',
            'Samples kept',
            'Falls slowly from round to round; near 0 there is nothing left to learn from.',
            ('rft/kept', 'rft/quantile'),
        ),
        Chart(
            'rft-score',
            'Scores of the round and of what was kept',
            'Both rise; the kept ones lie above the rest.',
            ('rft/score_mean', 'rft/kept_score_mean'),
        ),
    ),
    'Episodes': (
        Chart(
            'success',
            'Share of episodes that succeeded',
            'Rises; where it stays while the score rises, the reward pays for something else.',
            ('environment/success_share',),
        ),
        Chart(
            'return',
            'Rewards of an episode',
            'Rises, in step with the score.',
            ('environment/return_mean',),
        ),
        Chart(
            'turns',
            'Turns of an episode',
            'As many as the task needs; at the limit, the policy does not come to an end.',
            ('environment/num_turns_mean',),
        ),
        Chart(
            'episode-ends',
            'Why episodes ended',
            'Most are terminated by the environment; errors, timeouts and invalid answers are faults of it.',
            ('environment/end_*_share',),
            stacked=True,
        ),
        Chart(
            'failures',
            'Episodes that the environment failed',
            'Stays at 0: these episodes teach nothing about the task.',
            ('environment/failed_share',),
        ),
        Chart(
            'observations',
            'Share of tokens that are observations',
            'Steady; the policy learns from the rest.',
            ('environment/observation_share',),
        ),
    ),
    'Critic': (
        Chart(
            'explained-variance',
            'Explained variance',
            'Rises from below 0 towards 1; at or below 0 for long, the critic helps no more than a constant would.',
            ('ppo/explained_variance',),
        ),
        Chart(
            'values',
            'Values and returns',
            'The two curves come together: the critic expects what really comes.',
            ('ppo/value_mean', 'ppo/return_mean'),
        ),
        Chart('return-var', 'Variance of returns', 'Above 0 and without jumps.', ('ppo/return_var',)),
        Chart(
            'advantages',
            'Advantages',
            'The mean lies near 0, the spread above it.',
            ('ppo/advantage_mean', 'ppo/advantage_std'),
        ),
    ),
    'Time and memory': (
        Chart(
            'time',
            'Where time goes',
            'Steady; a part that grows or jumps is worth a look, as is one that takes more than you expect of it.',
            ('perf/collect_s', 'perf/score_s', 'perf/learn_s', 'perf/other_s'),
            stacked=True,
        ),
        Chart('total', 'Seconds per phase', 'As above, without what lies between phases.', ('perf/total_s',)),
        Chart(
            'throughput',
            'Throughput',
            'Steady or rising; a slow fall often means longer responses or a machine that is shared.',
            ('perf/*_per_s',),
        ),
        Chart(
            'memory',
            'Memory against the plan',
            'Level soon, below the plan (dashed; on a CPU the process adds half a GiB); a steady climb is a leak.',
            ('perf/peak_memory_gib', 'plan/peak_gib'),
        ),
        Chart(
            'ranks',
            'The slowest rank and the others',
            'Close together: all ranks wait for the slowest.',
            ('perf/slowest_rank_s', 'perf/other_ranks_s'),
        ),
        Chart(
            'cpu-time',
            'Processor time',
            'In step with the time above, times the number of threads at work.',
            ('perf/collect_cpu_s', 'perf/score_cpu_s', 'perf/learn_cpu_s'),
            stacked=True,
        ),
        Chart('tflops', 'Arithmetic', 'Steady; higher is better.', ('perf/*_tflops',)),
    ),
}

PLANNED = 'plan/peak_gib'
"""memory by plan, a constant: no metric, but what run.json says"""
CUT = 'rollout/cut_share'
"""1 − rollout/ended_share: no metric either"""
RECORDED_ENDS = {'recorded/eos': 'eos', 'recorded/stop': 'stop', 'recorded/length': 'length'}
"""shares of the recorded sequences by finish_reason: the same"""
DERIVED = {PLANNED: 'plan', CUT: 'ran out of room', 'recorded/eos': 'end token', 'recorded/stop': 'stop string'} | {
    'recorded/length': 'ran out of room'
}
"""what is drawn and no metric, with its label"""


def choose(names: Iterable[str]) -> dict[str, list[Drawn]]:
    """The charts of a run that has these metrics, by group; each metric is in exactly one of them."""
    left = dict.fromkeys(names)
    found: dict[str, list[Drawn]] = {}
    for group, charts in GROUPS.items():
        drawn = []
        for chart in charts:
            lines = _taken(chart.lines, left)
            band = _taken(chart.band, left) if lines else []
            if len(band) == 1:  # a least without a greatest is a line like others
                lines, band = lines + band, []
            if lines:
                drawn.append(Drawn(chart, lines, band))
        if group == 'Evaluation':
            drawn += _one_each([name for name in left if name.startswith('eval/')], left)
        if drawn:
            found[group] = drawn
    if left:
        found['Other'] = _one_each(list(left), left)
    return found


def one_metric_each(drawn: Sequence[Drawn]) -> list[Drawn]:
    """The same metrics with a chart for each, for the curves of several runs to be told apart by colour."""
    return [
        Drawn(
            Chart(_key(name), f'{d.chart.title} ({name})' if i else d.chart.title, d.chart.good, ()),
            [name],
            [],
        )
        for d in drawn
        for names in [[*d.lines, *d.band]]
        for i, name in enumerate(names)
        if name not in DERIVED
    ]


def words(name: str) -> str:
    """The metric's own words, without its phase: 'score mean'."""
    return name.split('/', 1)[-1].replace('_', ' ')


def _taken(patterns: Sequence[str], left: dict[str, None]) -> list[str]:
    """The names that match, in the order of the patterns; they are taken out of `left`."""
    found = []
    for pattern in patterns:
        expression = re.compile(pattern.replace('*', '[^/]+'))
        found += [name for name in left if expression.fullmatch(name)]
        for name in found:
            left.pop(name, None)
    return found


def _taken_names(names: Sequence[str], left: dict[str, None]) -> list[str]:
    found = [name for name in names if name in left]
    for name in found:
        del left[name]
    return found


def _one_each(names: list[str], left: dict[str, None]) -> list[Drawn]:
    """A chart for each, together with the best value so far and the same on eval data where there are any."""
    drawn = []
    for name in names:
        if name not in left:
            continue
        phase, _, quantity = name.rpartition('/')
        lines = _taken_names((name, f'{name}_best', f'{phase}/val_{quantity}'), left)
        drawn.append(Drawn(Chart(_key(name), name, '', ()), lines, []))
    return drawn


def _key(name: str) -> str:
    return re.sub(r'[^a-zA-Z0-9]+', '-', name).strip('-')
