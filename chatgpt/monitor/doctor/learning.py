"""Checks of learning (steps, KL, critic, gradients, schedule, evaluation) and of time."""

from __future__ import annotations

import re
from collections import Counter
from statistics import fmean, median

from chatgpt.monitor.doctor.finding import Seen, check
from chatgpt.monitor.doctor.history import NOW, START, History
from chatgpt.monitor.doctor.limits import LIMITS
from chatgpt.monitor.learning_rate import recommended_lr

AT_CHANCE = ('rm', 'dpo')
"""methods with an accuracy of 1/2 at the start"""


@check('nothing-moves', 'warning', 'nothing moves')
def nothing_moves(h: History) -> Seen | None:
    if h.learning is None or _warming_up(h):
        return None
    return _policy(h) if h.is_online else _supervised(h)


@check('chosen-unlikely', 'warning', 'the chosen answers become unlikely')
def chosen_unlikely(h: History) -> Seen | None:
    if h.count('dpo/reward_chosen') < NOW:
        return None
    beta, likely = h.setting('beta', 0.1), h.now('dpo/logp_chosen')
    gained = h.now('dpo/reward_chosen') / beta
    if -gained <= max(LIMITS['chosen_fall'], gained - likely):
        return None
    rate, rule = _rates(h, 'dpo/lr')
    lower = min(rate / 4, rule) if rate and rule else rate / 4 if rate else None
    return Seen(
        f'the log-prob of chosen answers is {likely:.3g} nats, under the reference {likely - gained:.3g}; accuracy '
        f'{h.now("dpo/accuracy"):.2f}',
        'the loss sees only the difference to rejected answers; with steps that are too large both become unlikely, '
        'and the model says something else',
        (f'lr from {rate:.1g} to {lower:.1g}, or ' if lower else '') + f'beta from {beta:g} to {5 * beta:g}',
    )


def _warming_up(h: History) -> bool:
    updates = (h.values('ppo/num_updates') or [0.0])[-1] if h.is_online else h.step * h.setting('log_interval', 1)
    return updates < 2 * h.setting('warmup_steps', 0)


def _policy(h: History) -> Seen | None:
    if h.step < LIMITS['min_phases'] or (h.values('ppo/num_updates') or [0.0])[-1] < LIMITS['min_updates']:
        return None
    if h.now('rollout/score_std') == 0.0:
        return None  # without different scores nothing can be learned, which is another finding
    seen = []
    length = max(median(h.drawn_lengths()[-NOW:]), 1.0)
    if h.highest('rollout/kl_k3_mean', 0.0) > 0.0:
        per_token = h.now('rollout/kl_k3_mean') / length
        if per_token > LIMITS['still_kl']:
            return None
        seen.append(f'KL to the initial model {per_token:.1g} nats per token')
    if h.updates_per_phase > 1 and h.count('ppo/ratio_max'):
        pairs = zip(h.last('ppo/ratio_max', NOW), h.last('ppo/ratio_min', NOW), strict=False)
        off = median(max(high - 1.0, 1.0 - low) for high, low in pairs)
        if off > LIMITS['still_ratio'] * min(h.setting('eps_clip', 0.2) / 0.2, 1.0):
            return None
        seen.append(f'ratio within {off:.1g} of 1')
    if not seen:
        return None
    updates = h.values('ppo/num_updates')[-1]
    return _finding(h, 'ppo/lr', f'after {h.step} phases and {updates:.0f} optimizer steps {", ".join(seen)}')


def _supervised(h: History) -> Seen | None:
    prefix = h.learning or ''
    name, accuracy = f'{prefix}/loss', f'{prefix}/accuracy'
    if h.count(name) < START + NOW:
        return None
    start, now = h.start(name), h.now(name)
    if prefix in AT_CHANCE and h.count(accuracy):
        # A new head starts above the loss of chance, and falls to it without learning anything.
        off = fmean(h.last(accuracy, START + NOW)) - 0.5
        still, at_chance = off <= LIMITS['chance'], off <= LIMITS['chance_late']
    else:
        at_chance = False
        still = start - now <= LIMITS['still_loss'] * abs(start)
    if not still:
        return None
    rate, rule = _rates(h, f'{prefix}/lr')
    low = rate is not None and rule is not None and rate * LIMITS['low_lr'] <= rule
    # Only a long run shows that the data have no signal.
    late = h.num_phases is not None and h.step >= max(LIMITS['late'] * h.num_phases, 2 * LIMITS['min_phases'])
    if not (low or (at_chance and late)):
        return None
    also = f', accuracy {fmean(h.last(accuracy, START + NOW)):.2f}' if h.count(accuracy) else ''
    return _finding(h, f'{prefix}/lr', f'in {h.step} logged phases {name} went from {start:.4g} to {now:.4g}{also}')


def _rates(h: History, name: str) -> tuple[float | None, float | None]:
    """Returns the highest learning rate so far, and the recommended one for this model."""
    rates, parameters = h.values(name), h.trained.get('parameters')
    about = {'trained': h.trained.get('trained'), 'batch': h.setting('train_batch_size')}
    rule = recommended_lr(parameters, h.learning or 'sft', **about) if parameters else None
    return (max(rates) if rates else None), rule


def _finding(h: History, lr_name: str, evidence: str) -> Seen:
    rate, rule = _rates(h, lr_name)
    parameters = h.trained.get('parameters')
    facts = f', lr {rate:.1g}' if rate is not None else ''
    facts += f', {parameters:,} parameters' if parameters else ''
    if rate is not None and rule is not None and rate * LIMITS['low_lr'] > rule:
        cause = (
            'the learning rate fits the size, so the data: labels without signal, answers that were cut to the same '
            'text, swapped columns'
        )
        change = f'look at some records as the trainer sees them; then try lr {3 * rule:.0e}'
    else:
        cause = 'the learning rate is too low for a model of this size'
        change = f'raise lr to {rule:.0e}' if rule is not None else 'raise lr tenfold, until the loss or the KL moves'
        change += f' ({rule / rate:.2g} times as much)' if rule is not None and rate else ''
    return Seen(evidence + facts, cause, change)


CAUSES = (
    'a model in train mode or with dropout while collecting or learning; weights or autocast of another dtype; a mask '
    'or a position shifted by a token; another temperature in learning than in sampling; an engine with stale weights'
)


@check('ratio-not-one', 'error', 'the ratio right after a rollout is not 1')
def ratio_not_one(h: History) -> Seen | None:
    error, kl = h.newest('ppo/first_ratio_error'), h.newest('ppo/first_approx_kl')
    if error is None or kl is None:
        return None
    most, most_kl = LIMITS['ratio_error'], LIMITS['ratio_kl']
    if not h.computes_in_fp32:
        most, most_kl = LIMITS['ratio_error_half'], LIMITS['ratio_kl_half']
    if error <= most and abs(kl) <= most_kl:
        return None
    return Seen(
        f'|ratio - 1| {error:.2g} (at most {most:g} is rounding), approximate KL {kl:.2g} (at most {most_kl:g})',
        CAUSES,
        'find which of these it is: every gradient is taken against the wrong policy until then; '
        'recompute_logprobs=True takes the old log-probs from the trainer and hides an inexact engine',
    )


@check('clip-fraction-high', 'warning', 'most of a phase is clipped away')
def clip_fraction_high(h: History) -> Seen | None:
    name = 'ppo/clip_fraction'
    if h.count(name) < NOW or h.now(name) <= LIMITS['clip_high']:
        return None
    epochs, rate = h.setting('max_epochs', 1), h.highest('ppo/lr', 0.0)
    fewer = f', or max_epochs from {epochs} to {epochs // 2}' if epochs > 1 else ''
    return Seen(
        f'clip fraction {h.now(name):.2f} over the last {NOW} phases, approximate KL '
        f'{h.now("ppo/approx_kl_k3"):.2g} nats per token',
        'the policy moves too far in one phase: the learning rate is too high, or there are too many updates of it',
        f'lr from {rate:.1g} to {rate / 3:.1g}{fewer}; target_kl=0.02 ends a phase in time',
    )


@check('clip-fraction-zero', 'note', 'the clip never acts', unless=('nothing-moves', 'schedule-ends-early'))
def clip_fraction_zero(h: History) -> Seen | None:
    name, phases = 'ppo/clip_fraction', int(LIMITS['min_phases'])
    if h.count(name) < phases or h.updates_per_phase < 2 or any(h.last(name, phases)):
        return None
    if h.setting('policy_loss', 'ppo') == 'reinforce':
        return None
    pairs = zip(h.last('ppo/ratio_max', phases), h.last('ppo/ratio_min', phases), strict=False)
    off = median(max(high - 1.0, 1.0 - low) for high, low in pairs)
    if off > LIMITS['clip_zero_ratio']:
        return None
    rate = h.highest('ppo/lr', 0.0)
    return Seen(
        f'no token clipped in {phases} phases; the farthest ratio of a phase is {off:.1g} from 1, in '
        f'{h.updates_per_phase:.0f} updates of a phase',
        'updates so small that most of what a phase could teach is left unused',
        f'lr from {rate:.1g} to {3 * rate:.1g}, or twice as many max_epochs',
    )


@check('kl-runs-away', 'error', 'the KL to the initial model runs away')
def kl_runs_away(h: History) -> Seen | None:
    values = h.values('rollout/kl_mean')
    if len(values) < NOW:
        return _thrown_away(h)
    now, length = h.now('rollout/kl_mean'), max(median(h.drawn_lengths()[-NOW:]), 1.0)
    before = median(values[-2 * NOW : -NOW] or values[:1])
    growing = now > LIMITS['kl_growth'] * max(before, 0.0)
    target = h.setting('kl_target')
    above = target is not None and now > LIMITS['kl_over_target'] * target and now / length > LIMITS['kl_notable']
    far = now / length > LIMITS['kl_per_token']
    if not ((far or above) and growing):
        return None
    coef = h.values('rollout/kl_coef')[-1] if h.count('rollout/kl_coef') else 0.0
    pulls = f'kl_coef {coef:.3g}' + (f', target {target:g}' if target is not None else '')
    rate = h.highest('ppo/lr', 0.0)
    if coef == 0.0 and h.setting('kl_in') != 'loss':
        change = f'set kl_coef to 0.05, or lr from {rate:.1g} to {rate / 3:.1g}'
    elif target is not None:
        change = f'divide kl_horizon by 4, so that the coefficient follows faster, or lr by 3 (from {rate:.1g})'
    else:
        used = h.setting('kl_coef', coef)
        change = f'multiply kl_coef by 4 (from {used:.3g} to {4 * used:.3g}), or divide lr by 3 (from {rate:.1g})'
    return Seen(
        f'{before:.3g} -> {now:.3g} nats per response in {NOW} phases, {now / length:.2g} per token, {pulls}',
        'steps too large for the pull of the KL, often towards a reward that can be gamed',
        change,
    )


def _thrown_away(h: History) -> Seen | None:
    """Checks the first phases, too few for a trend: a KL far above normal, or a large one with a lower score."""
    values, lengths = h.values('rollout/kl_mean'), h.drawn_lengths()
    if len(values) < 2 or not lengths:
        return None
    per_token = values[-1] / max(lengths[-1], 1.0)
    scores, spread = h.values('rollout/score_mean'), h.values('rollout/score_std')
    lost = bool(scores and spread) and scores[0] - scores[-1] > LIMITS['score_lost'] * spread[0] > 0.0
    if not (per_token > LIMITS['kl_at_once'] or (lost and per_token > LIMITS['kl_per_token'])):
        return None
    rate, parameters = h.highest('ppo/lr', 0.0), h.trained.get('parameters')
    rule = recommended_lr(parameters, 'ppo', h.trained.get('trained')) if parameters else rate / 100
    return Seen(
        f'KL to the initial model {values[0]:.3g} -> {values[-1]:.3g} nats per response in {len(values)} '
        f'phases, {per_token:.2g} per token'
        + (f', score {scores[0]:.3g} -> {scores[-1]:.3g}' if lost else '')
        + f'; lr {rate:g}',
        'a learning rate far too high: the first updates have replaced what the model knew, and no KL brings it back',
        f'start again from the initial model with lr {min(rule, rate / 10):.0e}',
    )


@check(
    'kl-coef-at-limit',
    'warning',
    'the adaptive KL coefficient is at its limit',
    unless=('kl-runs-away', 'nothing-moves'),
)
def kl_coef_at_limit(h: History) -> Seen | None:
    target, phases = h.setting('kl_target'), int(LIMITS['kl_error_phases'])
    values = h.last('rollout/kl_mean', phases)
    if target is None or len(values) < phases:
        return None
    errors = [value / target - 1.0 for value in values]
    bound = LIMITS['kl_error']
    above, below = all(e > bound for e in errors), all(e < -bound for e in errors)
    nearer = abs(median(errors[-NOW:])) < 0.9 * abs(median(errors[:NOW]))
    if not (above or below) or nearer:
        return None
    first, now = h.values('rollout/kl_coef')[-phases], h.values('rollout/kl_coef')[-1]
    factor = (now / first) ** (1 / (phases - 1))
    side = 'above' if above else 'below'
    if above:
        change = f'divide kl_horizon by 4 (the coefficient grows {factor:.3g} times a phase now), or lr by 2'
        cause = 'the coefficient moves as fast as it may, and the policy faster'
    else:
        change = 'set kl_target to what is reached, or multiply lr by 2; a coefficient near 0 holds nothing back later'
        cause = 'the policy does not move as far as the target, so the coefficient only falls'
    return Seen(
        f'{phases} phases in a row the KL was {side} its target of {target:g} (now '
        f'{median(values[-NOW:]):.3g}) and came no nearer, while kl_coef went from {first:.3g} to {now:.3g}',
        cause,
        change,
    )


@check('entropy-collapses', 'error', 'the entropy collapses')
def entropy_collapses(h: History) -> Seen | None:
    name = 'ppo/entropy'
    if h.count(name) < START + NOW or not h.count('rollout/score_mean'):
        return None
    start, now = h.start(name), h.now(name)
    if start <= 0.0 or now > LIMITS['entropy_share'] * start:
        return None
    gain = h.now('rollout/score_mean') - h.start('rollout/score_mean')
    spread = h.start('rollout/score_std')
    if gain > LIMITS['entropy_gain'] * spread:
        return None  # the policy has become certain of better responses
    rate, bonus = h.highest('ppo/lr', 0.0), h.setting('entropy_coef', 0.0)
    of_tokens = h.setting('policy_loss', 'ppo') == 'ppo'
    return Seen(
        f'{start:.3g} -> {now:.2g} nats per token since the start, while the score gained {gain:+.2g} '
        f'(its standard deviation was {spread:.2g})',
        'the policy has become sure of one response before it found a better one',
        f'lr from {rate:.1g} to {rate / 3:.1g}, or entropy_coef from {bonus:g} to {max(10 * bonus, 0.01):g}'
        + (', or eps_clip_high=0.28, which lets unlikely tokens grow' if of_tokens else ''),
    )


@check('value-loss-dominates', 'warning', 'the value loss dominates')
def value_loss_dominates(h: History) -> Seen | None:
    if not h.shares_trunk or h.count('ppo/value_loss') < NOW:
        return None
    coef, loss = h.setting('value_coef', 0.1), h.now('ppo/value_loss')
    term, norm, most = coef * loss, h.now('ppo/actor_grad_norm'), h.setting('max_grad_norm')
    if most is None or term <= LIMITS['value_term'] or norm <= most:
        return None
    wanted = coef * 0.1 / term
    return Seen(
        f'value_coef {coef:g} x value loss {loss:.3g} = {term:.3g}, where the policy term is about 0.8; '
        f'gradient norm {norm:.3g} is clipped to {most:g}, so little of the policy is left in it',
        "returns far from 0 with a value head on the policy's own trunk",
        f"score_scaling='running', which makes returns about 1, or value_coef from {coef:g} to {wanted:.1g}",
    )


@check('critic-worse-than-constant', 'warning', 'the critic is worse than a constant', unless=('scores-equal',))
def critic_worse_than_constant(h: History) -> Seen | None:
    phases = int(LIMITS['worse_phases'])
    latest = [value for _, value in h.since_actor('ppo/explained_variance')][-phases:]
    if not h.has_critic or len(latest) < phases or max(latest) >= 0.0 or median(latest) > LIMITS['variance_worse']:
        return None
    if _better(latest) or h.solved_share >= LIMITS['solved']:
        return None
    rate, rule = _critic_rate(h)
    high = rate > 3 * rule
    slower = f'critic_lr from {rate:.1g} to {rule if high or 3 * rate < rule else rate / 3:.1g}'
    return Seen(
        f'explained variance below 0 in {phases} phases in a row, {median(latest):.2f} in the median; a constant has 0',
        'a learning rate too high for a critic of this size'
        if high
        else 'a critic that learns the responses of each phase by heart, or starts far off and learns too slowly',
        slower
        + ('' if h.shares_trunk else ', or half as many critic_epochs')
        + '; or a start that is learned: critic_from, or critic_warmup_phases=5',
    )


def _better(values: list[float]) -> bool:
    """Returns True if the later half is nearer to 0 by a quarter: a critic that comes up from far below."""
    half = len(values) // 2
    return median(values[half:]) > 0.75 * median(values[:half])


def _critic_rate(h: History) -> tuple[float, float]:
    """Returns the critic's highest learning rate and the recommended one. A value head on the policy's trunk has that
    of the optimizer's second group, if it differs (`parameter_groups`)."""
    rate, owner = h.highest('ppo/critic_lr', 0.0), 'critic'
    models, optimizers = (h.record.models, h.record.optimizers) if h.record is not None else ({}, {})
    if h.shares_trunk:
        rates, owner = optimizers.get('actor', {}).get('lr'), 'actor'
        rate = rates[-1] if isinstance(rates, list) else h.highest('ppo/lr', 0.0)
    known = models.get(owner, {})
    if not known.get('parameters'):
        return rate, rate
    return rate, recommended_lr(known['parameters'], 'rm', known.get('trained'), adapters=h.shares_trunk or None)


@check('critic-warmup-short', 'note', 'the warm-up of the critic was too short', unless=('scores-equal',))
def critic_warmup_short(h: History) -> Seen | None:
    series = h.since_actor('ppo/explained_variance')
    warmup = h.setting('critic_warmup_phases', 0)
    if not warmup or not h.has_critic or not NOW < len(series) <= LIMITS['warm_phases']:
        return None
    (step, first), now = series[0], h.now('ppo/explained_variance')
    if not first <= LIMITS['warm_variance'] < now or now - first < LIMITS['warm_rise']:
        return None
    reached = next(at for at, value in series if value - first >= 0.75 * (now - first))
    return Seen(
        f'explained variance {first:.2f} at the first actor step (phase {step}), {now:.2f} over the last {NOW} phases',
        'the critic still learns where the actor already steps along its errors',
        f'critic_warmup_phases from {warmup} to {max(reached, 2 * warmup)}'
        + ('' if h.shares_trunk else ', or twice as many critic_epochs'),
    )


@check(
    'explained-variance-low',
    'warning',
    'the critic explains nothing',
    unless=('scores-equal', 'critic-worse-than-constant'),
)
def explained_variance_low(h: History) -> Seen | None:
    name, phases = 'ppo/explained_variance', int(LIMITS['variance_median'])
    if not h.has_critic or h.count(name) < LIMITS['variance_phases']:
        return None
    now = median(h.last(name, phases))
    if now > 0.0 or h.now('ppo/return_var') <= 1e-12 or h.solved_share >= LIMITS['solved']:
        return None
    rate, rule = _critic_rate(h)
    high = rate > 3 * rule
    return Seen(
        f'explained variance {now:.2f} in the median of {phases} phases, at phase {h.step}; a constant has 0',
        'a learning rate too high for a critic of this size'
        if high
        else 'a critic that learns too slowly, starts too far off, or whose target has no part that the text tells',
        f'critic_lr from {rate:.1g} to {rule if high else max(rule, 3 * rate):.1g}; begin it from the reward model '
        "(Critic.from_reward_model); or do without one: advantage_estimator='rloo', num_samples_per_prompt=4",
    )


WINDOW = 20


@check('grad-norm-spikes', 'warning', 'the gradient norm spikes')
def grad_norm_spikes(h: History) -> Seen | None:
    names = [name for name in h.names() if name.endswith('grad_norm_max')]
    return next(filter(None, (_of_model(h, name) for name in names)), None)


def _of_model(h: History, name: str) -> Seen | None:
    tops, means = h.values(name), h.values(name.removesuffix('_max'))
    if len(tops) <= LIMITS['min_phases']:
        return None
    spikes = []
    for i in range(max(len(tops) - WINDOW, int(LIMITS['min_phases'])), len(tops)):
        usual = median(means[max(i - WINDOW, 0) : i])
        if usual > 0.0 and tops[i] > LIMITS['spike'] * usual:
            spikes.append((tops[i] / usual, tops[i], usual))
    if not spikes or (len(spikes) < LIMITS['spikes'] and max(spikes)[0] <= LIMITS['spike_once']):
        return None
    times, top, usual = max(spikes)
    clip = h.setting('max_grad_norm')
    kind = 'critic_lr' if 'critic' in name and h.values(f'{name.split("/")[0]}/critic_lr') else 'lr'
    rate = h.highest(f'{name.split("/")[0]}/{kind}', 0.0)
    lower = f'max_grad_norm={2 * usual:.1g}, '
    if clip:
        lower = f'max_grad_norm from {clip:g} to {2 * usual:.1g}, ' if 2 * usual < clip else ''
    return Seen(
        f'{name} {top:.3g}, {times:.0f} times its usual {usual:.2g}; {len(spikes)} such of the last {WINDOW} phases',
        'a train batch of odd data (one very long or empty text, an extreme score), or a learning rate at the edge',
        f'{lower}{kind} from {rate:.1g} to {rate / 2:.1g}; look at the data of that phase',
    )


@check('schedule-ends-early', 'warning', 'the learning rate is at its end before the run is')
def schedule_ends_early(h: History) -> Seen | None:
    name, phases = f'{h.learning}/lr', h.num_phases
    rates = h.values(name)
    if phases is None or len(rates) < 3 or max(rates) <= 0.0:
        return None
    starts = h.record.starts if h.record is not None else []
    if starts and h.step <= starts[-1].phase:
        return None  # a resume has made the run longer since
    left = phases - h.step
    if left < max(LIMITS['schedule_left'] * phases, 2) or max(rates[-2:]) > LIMITS['schedule_lr'] * max(rates):
        return None
    if rates.index(max(rates)) == len(rates) - 1:
        return None
    steps = h.setting('lr_decay_steps')
    return Seen(
        f'{name} {max(rates):.1g} -> {rates[-1]:.1g} with {left} of {phases} phases to come',
        f'lr_decay_steps={steps} is shorter than the run' if steps else 'a schedule of another length than this run',
        'leave lr_decay_steps out, which ends the decay with the run'
        + (f', or multiply it by {phases / h.step:.2g}' if steps else '')
        + '; or stop here',
    )


HIGHER = re.compile(
    r'(?<![a-z])(scores?|rewards?|accurac(y|ies)|win(s|rate)?|optimality|truth(ful\w*)?|true|correct(ness)?|pass(ed)?|'
    r'success)(?![a-z])'
)
LOWER = re.compile(r'(?<![a-z])(loss(es)?|perplexity|errors?|failed)(?![a-z])')
NO_GOALS = ('_std', '_min', '_max', '_best')


@check('over-optimisation', 'error', 'the reward rises while the evaluation falls')
def overoptimisation(h: History) -> Seen | None:
    names = [name for name in h.names() if name.startswith('eval/') and not name.endswith(NO_GOALS)]
    return next(filter(None, (_of_metric(h, name) for name in names)), None)


def _sign(h: History, name: str) -> int:
    """Returns 1 if higher is better, −1 if lower is better, 0 if it is not known."""
    best = h.values(f'{name}_best')
    if len(best) >= 3 and len(best) == h.count(name):
        values = h.values(name)
        if any(v < b for v, b in zip(values, best, strict=True)):
            return 1
        if any(v > b for v, b in zip(values, best, strict=True)):
            return -1
    return -1 if LOWER.search(name) else 1 if HIGHER.search(name) else 0


def _of_metric(h: History, name: str) -> Seen | None:
    series, sign = h.series(name), _sign(h, name)
    if len(series) < 4 or sign == 0 or series[-1][0] != h.step:
        return None
    values = [sign * value for _, value in series]
    top = max(range(len(values)), key=lambda i: values[i])
    if top == 0 or len(values) - top < 3:
        return None
    noise = median(abs(b - a) for a, b in zip(values[: top + 1], values[1 : top + 1], strict=False))
    fall = values[top] - max(values[-2:])
    if fall <= max(LIMITS['eval_fall'] * (values[top] - values[0]), noise / 2):
        return None
    at = series[top][0]
    then, now = h.around('rollout/score_mean', at), h.now('rollout/score_mean') if h.is_online else None
    spread = h.around('rollout/score_std', at)
    if then is None or now is None or now - then <= LIMITS['eval_score_gain'] * (spread or 0.0):
        return None
    kl_then, coef = h.around('rollout/kl_mean', at), h.setting('kl_coef', 0.0)
    target = f'kl_target={max(kl_then or 0.0, 1.0):.2g} or ' if coef else ''  # it adapts a coefficient above 0
    kl = '' if kl_then is None else f', KL {kl_then:.3g} -> {h.now("rollout/kl_mean"):.3g} nats'
    return Seen(
        f'{name} {series[top][1]:.3g} at phase {at} -> {series[-1][1]:.3g}, score {then:.3g} -> {now:.3g}{kl}',
        'the policy has gone where the reward no longer measures what is wanted',
        f'take the checkpoint of phase {at}; to go further, {target}kl_coef '
        f'from {coef:g} to {max(3 * coef, 0.05):g}, and a reward model with pairs of responses of the new policy',
    )


@check('eval-loss-rises', 'warning', 'the eval loss rises while the train loss falls')
def eval_loss_rises(h: History) -> Seen | None:
    if h.is_online or h.learning is None:
        return None
    train, val = f'{h.learning}/loss', f'{h.learning}/val_loss'
    series = h.series(val)
    if len(series) < 3 or series[-1][0] != h.step:
        return None
    lowest = min(range(len(series)), key=lambda i: series[i][1])
    at, best = series[lowest]
    if len(series) - lowest < 3 or best <= 0.0:
        return None
    if min(value for _, value in series[-2:]) <= LIMITS['eval_loss_rise'] * best:
        return None
    then = h.around(train, at)
    if then is None or h.now(train) >= then:
        return None
    epochs = [value for step, value in h.series(f'{h.learning}/epoch') if step == at]
    epoch = f', after {epochs[0]:.2g} epochs' if epochs else ''
    return Seen(
        f'{val} {best:.4g} at phase {at} -> {series[-1][1]:.4g}, {train} {then:.4g} -> {h.now(train):.4g}',
        'the model learns its training records by heart',
        f'take the model of phase {at}{epoch}: max_epochs={max(round(epochs[0]), 1) if epochs else 1}; or more '
        'data, or StopOnPlateau on the eval loss',
    )


@check('slow-rank', 'warning', 'one rank is slow')
def slow_rank(h: History) -> Seen | None:
    ranks, seconds, others = (h.last(f'perf/{n}', NOW) for n in ('slowest_rank', 'slowest_rank_s', 'other_ranks_s'))
    if len(ranks) < NOW:
        return None
    rank, times = Counter(ranks).most_common(1)[0]
    slow = [a / b for r, a, b in zip(ranks, seconds, others, strict=True) if r == rank and b > 0.0]
    offending = [factor for factor in slow if factor > LIMITS['slow_rank']]
    if times < NOW - 1 or len(offending) < NOW - 1:
        return None
    return Seen(
        f'rank {rank:.0f} takes {median(seconds):.3g} s to generate its share where the others take '
        f'{median(others):.3g} s ({median(offending):.2g} times), in {len(offending)} of the last {NOW} phases',
        'another job on its processor or GPU, a GPU that throttles, or a slower machine; all ranks wait for it',
        'look at nvidia-smi or top on its machine; leave that machine out of the job if nothing else runs there',
    )


@check('time-elsewhere', 'note', 'time goes where it is not expected')
def time_elsewhere(h: History) -> Seen | None:
    if h.count('perf/other_s') < NOW or not h.count('perf/total_s'):
        return None
    other, known = h.now('perf/other_s'), h.now('perf/total_s')
    whole = other + known
    if whole < LIMITS['phase_s']:
        return None
    if other > LIMITS['other_share'] * whole:
        return Seen(
            f'{other:.3g} of {whole:.3g} s of a phase lie outside of collecting, scoring and learning',
            'evaluation, checkpoints, trackers or a callback of your own after each phase, or a slow disk',
            f'evaluate and save less often ({"--eval_interval, " if h.is_online else ""}--checkpoint_interval, '
            '--checkpoint_minutes; in Python the intervals of Evaluator and SaveCheckpoint) until this is a tenth; in '
            'a callback of your own, time it',
        )
    score = h.now('perf/score_s') if h.count('perf/score_s') else 0.0
    reward = h.record.reward if h.record is not None else None
    is_function = isinstance(reward, str) and 'Reward' not in reward and 'Pipeline' not in reward
    if is_function and score > LIMITS['score_share'] * whole:
        return Seen(
            f'{score:.3g} of {whole:.3g} s of a phase go into scoring, where the reward is the function {reward}',
            'a reward function that calls a service or another model one response at a time',
            'make it async (all calls then run at once) or let it work on the whole batch; with a remote engine, '
            'max_staleness=1 hides it behind generation',
        )
    return None
