"""Slow float64 loops of the estimators and losses of PPO's family, each with negative controls: the same loop with one
planted mistake.

Our function must equal the loop and differ from every negative control, so the test detects such mistakes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from chatgpt.functional import advantages as estimators
from chatgpt.functional import losses, ppo
from chatgpt.functional.masking import masked_sum, whiten

Numbers = list[float]


# Seven tokens of three sequences; the fifth and the last do not count.
ROWS = [0, 0, 0, 1, 1, 2, 2]
MASK = [True, True, True, True, False, True, False]
NEW = [-0.3, -2.5, -1.0, -0.2, -1.4, -3.0, -0.9]
OLD = [-0.9, -1.2, -1.1, -1.9, -0.4, -0.6, -2.0]
ADVANTAGES = [1.5, -0.7, 0.4, -2.0, 1.1, 0.8, -0.3]
SCORES, GROUPS = [1.0, 4.0, 0.5, 2.5, 2.0, -1.0], [7, 3, 7, 3, 7, 3]
REWARDS = [[0.3, -1.2, 0.8], [2.0], [0.1, 0.4, -0.6, 1.7]]
VALUES = [[0.5, -0.1, 1.4], [0.2], [-0.7, 0.9, 0.6, -0.3]]
MASKS = [[True, False, True], [True], [True, True, True, False]]


def f64(values: Sequence[float]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def lists(values: Sequence[Sequence[float]]) -> list[torch.Tensor]:
    return [f64(v) for v in values]


def masks(values: Sequence[Sequence[bool]]) -> list[torch.Tensor]:
    return [torch.tensor(v) for v in values]


def flat(parts: Sequence[torch.Tensor]) -> Numbers:
    return torch.cat(list(parts)).tolist()


def holds(ours: Numbers, slow: Callable[..., Numbers], *mistakes: str) -> None:
    """Asserts that our result equals the slow loop's, and differs from the loop's with each planted mistake."""
    assert ours == pytest.approx(slow(), rel=1e-12, abs=1e-12)
    for mistake in mistakes:
        assert ours != pytest.approx(slow(mistake), rel=1e-6, abs=1e-9), f'the mistake {mistake!r} is not seen'


def mean(values: Numbers) -> float:
    return sum(values) / len(values)


def variance(values: Numbers, less: int = 1) -> float:
    return sum((v - mean(values)) ** 2 for v in values) / (len(values) - less)


def test_token_rewards():
    kl, counts, score, beta = [0.5, 0.25, -1.0, 0.7], [True, True, True, False], 3.0, 0.2

    def slow(mistake: str = '') -> Numbers:
        last = 3 if mistake == 'at the last token, counting or not' else 2
        out = []
        for t in range(4):
            reward = (beta if mistake == 'the KL pays' else -beta) * kl[t] if counts[t] else 0.0
            if t == last or (mistake == 'at every token' and counts[t]):
                reward += score
            out.append(reward)
        return out

    ours = ppo.token_rewards(f64(kl), beta, score, torch.tensor(counts)).tolist()
    holds(ours, slow, 'at the last token, counting or not', 'the KL pays', 'at every token')
    dense = ppo.token_rewards(f64(kl), beta, 0.0, torch.tensor(counts), token_scores=f64([1, 2, 3, 4])).tolist()
    assert dense == pytest.approx([1 - 0.1, 2 - 0.05, 3 + 0.2, 0.0])
    assert ppo.token_rewards(f64(kl), beta, score, torch.zeros(4, dtype=torch.bool)).tolist() == [0] * 4


def slow_returns(rewards: Numbers, counts: Sequence[bool], gamma: float) -> Numbers:
    """Returns Σ_k γ^k r from each token that counts, over those that count."""
    out = []
    for t in range(len(rewards)):
        rest = [rewards[k] for k in range(t, len(rewards)) if counts[k]]
        out.append(sum(gamma**k * r for k, r in enumerate(rest)) if counts[t] else 0.0)
    return out


def test_a2c():
    gamma = 0.9

    def slow(mistake: str = '') -> Numbers:
        out = []
        for rewards, values, counts in zip(REWARDS, VALUES, MASKS, strict=True):
            returns = slow_returns(rewards, counts, 1.0 if mistake == 'gamma forgotten' else gamma)
            steps = [t for t, c in enumerate(counts) if c]
            for t in range(len(rewards)):
                if not counts[t]:
                    out.append(0.0)
                elif mistake == 'one step and the next value':
                    after = [values[k] for k in steps if k > t]
                    out.append(rewards[t] + gamma * (after[0] if after else 0.0) - values[t])
                elif mistake == 'no value':
                    out.append(returns[t])
                else:
                    out.append(returns[t] + (values[t] if mistake == 'sign of the value' else -values[t]))
        return out

    advantages, returns = estimators.a2c(lists(REWARDS), lists(VALUES), masks(MASKS), gamma=gamma)
    holds(flat(advantages), slow, 'gamma forgotten', 'one step and the next value', 'no value', 'sign of the value')
    want = [x for r, c in zip(REWARDS, MASKS, strict=True) for x in slow_returns(r, c, gamma)]
    assert flat(returns) == pytest.approx(want)


def peers(i: int, *, itself: bool) -> Numbers:
    return [s for j, (s, g) in enumerate(zip(SCORES, GROUPS, strict=True)) if g == GROUPS[i] and (itself or j != i)]


def test_grpo_and_dr_grpo():
    def slow(mistake: str = '') -> Numbers:
        out = []
        for i, score in enumerate(SCORES):
            group = SCORES if mistake == 'over the batch' else peers(i, itself=True)
            std = math.sqrt(variance(group, 0 if mistake == 'biased std' else 1))
            if mistake == 'variance for std':
                std = std**2
            scale = 1.0 if mistake == 'not divided' else std + (0.0 if mistake == 'no epsilon' else 1e-4)
            out.append((score - mean(group)) / scale)
        return out

    ours = estimators.grpo(f64(SCORES), torch.tensor(GROUPS)).tolist()
    holds(ours, slow, 'over the batch', 'biased std', 'variance for std', 'no epsilon')
    plain = estimators.dr_grpo(f64(SCORES), torch.tensor(GROUPS)).tolist()
    assert plain == pytest.approx(slow('not divided')) and plain != pytest.approx(ours)


def test_gdpo():
    columns, weights = [SCORES, [0.0, 1.0, 0.0, 1.0, 1.0, 0.0]], [1.0, 0.3]

    def group_normalised(column: Numbers) -> Numbers:
        groups = [[s for s, g in zip(column, GROUPS, strict=True) if g == group] for group in GROUPS]
        return [
            (s - mean(group)) / (math.sqrt(variance(group)) + 1e-4) for s, group in zip(column, groups, strict=True)
        ]

    def slow(mistake: str = '') -> Numbers:
        def summed(own: Numbers, parts: list[Numbers]) -> Numbers:
            return [sum(w * a for w, a in zip(own, row, strict=True)) for row in zip(*parts, strict=True)]

        if mistake == 'summed, then normalised':
            return group_normalised(summed(weights, columns))
        if mistake == 'weights before the normalisation':
            weighted = [[w * s for s in c] for w, c in zip(weights, columns, strict=True)]
            return summed([1.0, 1.0], [group_normalised(c) for c in weighted])
        own = weights[::-1] if mistake == 'weights swapped' else weights
        return summed(own, [group_normalised(c) for c in columns])

    ours = estimators.gdpo(f64(columns[0] + columns[1]).view(2, 6).T, f64(weights), torch.tensor(GROUPS))
    holds(ours.tolist(), slow, 'summed, then normalised', 'weights before the normalisation', 'weights swapped')

    def batch(mistake: str = '') -> Numbers:
        got = slow()
        std = math.sqrt(variance(got, 0 if mistake == 'biased std' else 1))
        return [(a - (0.0 if mistake == 'mean kept' else mean(got))) / (std + 1e-4) for a in got]

    holds(estimators.normalised(ours).tolist(), batch, 'biased std')
    shifted = estimators.normalised(ours + 3.0)  # group means are 0, so only a shift tests that the mean is subtracted
    assert shifted.tolist() == pytest.approx(batch())
    assert estimators.normalised(f64([4.0])).tolist() == [0.0]


def test_rloo():
    def slow(mistake: str = '') -> Numbers:
        return [
            mean(peers(i, itself=mistake == 'the mean has itself in it')) * (1 if mistake == 'sign' else -1) + score
            for i, score in enumerate(SCORES)
        ]

    holds(estimators.rloo(f64(SCORES), torch.tensor(GROUPS)).tolist(), slow, 'the mean has itself in it', 'sign')


def slow_whitened(returns: list[Numbers], counts: list[list[bool]], mistake: str) -> Numbers:
    counted = [
        [x for x, c in zip(r, m, strict=True) if c or mistake == 'masked tokens too']
        for r, m in zip(returns, counts, strict=True)
    ]
    out = []
    for i, (r, m) in enumerate(zip(returns, counts, strict=True)):
        alone = mistake == 'each sequence alone' and len(counted[i]) > 1
        pool = counted[i] if alone else [x for part in counted for x in part]
        scale = math.sqrt(variance(pool, 0 if mistake == 'biased std' else 1) + 1e-8)
        shift = 0.0 if mistake == 'not centred' else mean(pool)
        out += [(x - shift) / scale if c else 0.0 for x, c in zip(r, m, strict=True)]
    return out


def whitened(advantages: list[torch.Tensor]) -> Numbers:
    return whiten(torch.cat(advantages), torch.cat(masks(MASKS))).tolist()


WHITENING = ('masked tokens too', 'each sequence alone', 'biased std', 'not centred')


def test_reinforce_pp():
    def slow(mistake: str = '') -> Numbers:
        gamma = 1.0 if mistake == 'gamma forgotten' else 0.8
        return slow_whitened([slow_returns(r, m, gamma) for r, m in zip(REWARDS, MASKS, strict=True)], MASKS, mistake)

    advantages, _ = estimators.reinforce_pp(lists(REWARDS), masks(MASKS), gamma=0.8)
    holds(whitened(advantages), slow, 'gamma forgotten', *WHITENING)


def test_reinforce_pp_baseline():
    scores, groups = [1.0, 4.0, 0.5], [0, 1, 0]

    def slow(mistake: str = '') -> Numbers:
        returns = []
        for i, counts in enumerate(MASKS):
            others = [j for j in range(3) if groups[j] == groups[i] and not (mistake == 'leave one out' and j == i)]
            group = [scores[j] for j in others]
            rewards = [0.0] * len(counts)
            last = max(t for t, c in enumerate(counts) if c)
            rewards[last] += scores[i] - (0.0 if mistake == 'no baseline' else mean(group or [0.0]))
            returns.append(slow_returns(rewards, counts, 1.0))
        return slow_whitened(returns, MASKS, mistake)

    advantages, _ = estimators.reinforce_pp_baseline(f64(scores), torch.tensor(groups), masks(MASKS))
    holds(whitened(advantages), slow, 'leave one out', 'no baseline', *WHITENING)


def surrogate(ratio, advantage, low, high, mistake='', dual=None) -> float:
    if mistake == 'lower clip for the upper':
        high = low
    if mistake == 'upper clip for the lower':
        low = high
    both = -advantage * ratio, -advantage * min(max(ratio, 1 - low), 1 + high)
    loss = min(both) if mistake == 'min for max' else max(both)
    if dual is not None and advantage < 0:
        loss = (max if mistake == 'max for min in the dual clip' else min)(loss, dual * abs(advantage))
    return loss


CLIPS = ('lower clip for the upper', 'upper clip for the lower', 'min for max')


def test_asymmetric_clip():
    def slow(mistake: str = '') -> Numbers:
        sign = -1 if mistake == 'ratio upside down' else 1
        ratios = [math.exp(sign * (n - o)) for n, o in zip(NEW, OLD, strict=True)]
        return [surrogate(r, a, 0.2, 0.28, mistake) for r, a in zip(ratios, ADVANTAGES, strict=True)]

    ours = ppo.clipped_policy_loss(f64(NEW), f64(OLD), f64(ADVANTAGES), eps_low=0.2, eps_high=0.28)
    holds(ours.tolist(), slow, 'ratio upside down', *CLIPS)


def test_dual_clip():
    def slow(mistake: str = '') -> Numbers:
        ratios = [math.exp(n - o) for n, o in zip(NEW, OLD, strict=True)]
        dual = None if mistake == 'off' else 1.5
        return [surrogate(r, a, 0.2, 0.2, mistake, dual) for r, a in zip(ratios, signed, strict=True)]

    signed = [-a for a in ADVANTAGES]
    ours = ppo.clipped_policy_loss(f64(NEW), f64(OLD), f64(signed), eps_low=0.2, dual_clip=1.5)
    holds(ours.tolist(), slow, 'off', 'max for min in the dual clip', 'min for max')


def test_gspo():
    advantages = [[1.5, -0.8, 0.6][row] for row in ROWS]

    def slow(mistake: str = '') -> Numbers:
        out = []
        for t, row in enumerate(ROWS):
            counted = [k for k in range(7) if ROWS[k] == row and (MASK[k] or mistake == 'masked tokens too')]
            of_row = [NEW[k] - OLD[k] for k in ([t] if mistake == 'a ratio per token' else counted)]
            total = sum(of_row) if mistake == 'sum for mean' else mean(of_row)
            out.append(surrogate(math.exp(total), advantages[t], 0.3, 0.6, mistake))
        return out

    ours = losses.gspo_policy_loss(
        f64(NEW), f64(OLD), f64(advantages), torch.tensor(MASK), torch.tensor(ROWS), 3, eps_low=0.3, eps_high=0.6
    )
    holds(ours.tolist(), slow, 'masked tokens too', 'a ratio per token', 'sum for mean', 'min for max')


def test_cispo():
    def slow(mistake: str = '') -> Numbers:
        out = []
        for new, old, a in zip(NEW, OLD, ADVANTAGES, strict=True):
            ratio = math.exp(old - new if mistake == 'ratio upside down' else new - old)
            weight = {'no clip': ratio, 'a lower bound too': min(max(ratio, 0.8), 1.28)}.get(mistake, min(ratio, 1.28))
            out.append((1 if mistake == 'sign' else -1) * a * weight * (1.0 if mistake == 'no log-prob' else new))
        return out

    ours = losses.cispo_policy_loss(f64(NEW), f64(OLD), f64(ADVANTAGES), eps_high=0.28)
    holds(ours.tolist(), slow, 'ratio upside down', 'no clip', 'a lower bound too', 'sign', 'no log-prob')


def test_positive_example_loss():
    correct = [True, True, False, False, False, True, True]

    def slow(mistake: str = '') -> Numbers:
        total = 0.0
        for t in range(7):
            if MASK[t] and correct[t] != (mistake == 'wrong responses') or mistake == 'all responses':
                total += NEW[t] if mistake == 'sign' else -NEW[t]
        return [total]

    ours = losses.positive_example_loss(f64(NEW), torch.tensor(correct))
    assert ours[[2, 3, 4]].tolist() == [0.0] * 3
    holds([masked_sum(ours, torch.tensor(MASK)).item()], slow, 'wrong responses', 'all responses', 'sign')


def test_cispo_with_a_lower_bound():
    def slow(mistake: str = '') -> Numbers:
        low = {'none': 0.0, 'of the upper': 0.72}.get(mistake, 0.9)
        ratios = [math.exp(n - o) for n, o in zip(NEW, OLD, strict=True)]
        return [-a * min(max(r, low), 1.28) * n for a, r, n in zip(ADVANTAGES, ratios, NEW, strict=True)]

    ours = losses.cispo_policy_loss(f64(NEW), f64(OLD), f64(ADVANTAGES), eps_high=0.28, eps_low=0.1)
    holds(ours.tolist(), slow, 'none', 'of the upper')


def test_gspo_token_has_the_sequences_ratio_and_each_tokens_own_gradient():
    new, mask, rows = f64(NEW).requires_grad_(), torch.tensor(MASK), torch.tensor(ROWS)
    losses_of = losses.gspo_token_policy_loss(new, f64(OLD), f64(ADVANTAGES), mask, rows, 3, eps_low=0.3, eps_high=0.6)
    losses_of.sum().backward()
    values, gradients = [], []
    for t, row in enumerate(ROWS):
        ratio = math.exp(mean([NEW[k] - OLD[k] for k in range(7) if ROWS[k] == row and MASK[k]]))
        values.append(surrogate(ratio, ADVANTAGES[t], 0.3, 0.6))
        clipped = ratio > 1.6 if ADVANTAGES[t] > 0 else ratio < 0.7
        gradients.append(0.0 if clipped else -ADVANTAGES[t] * ratio)
    assert losses_of.tolist() == pytest.approx(values, rel=1e-12)
    assert new.grad.tolist() == pytest.approx(gradients, rel=1e-12)
    # Negative control: where advantages differ within a response, the gradient of GSPO is another.
    other = f64(NEW).requires_grad_()
    losses.gspo_policy_loss(other, f64(OLD), f64(ADVANTAGES), mask, rows, 3, eps_low=0.3, eps_high=0.6).sum().backward()
    assert other.grad.tolist() != pytest.approx(gradients, rel=1e-3)


def test_gspo_token_is_gspo_for_one_advantage_per_sequence():
    advantages, mask, rows, gradients = (
        f64([1.5, 1.5, 1.5, -2.0, -2.0, 0.8, 0.8]),
        torch.tensor(MASK),
        torch.tensor(ROWS),
        [],
    )
    for of in (losses.gspo_policy_loss, losses.gspo_token_policy_loss):
        new = f64(NEW).requires_grad_()
        loss = of(new, f64(OLD), advantages, mask, rows, 3, eps_low=0.9, eps_high=9.0)
        ppo.aggregate(loss, mask, rows, 3, 'sequence', 3).backward()
        gradients.append(new.grad.tolist())
    assert gradients[0] == pytest.approx(gradients[1], rel=1e-12)


def test_cispo_has_a_gradient_at_every_token_and_none_through_its_weight():
    new = f64(NEW).requires_grad_()
    losses.cispo_policy_loss(new, f64(OLD), f64(ADVANTAGES), eps_high=0.28).sum().backward()
    weights = [min(math.exp(n - o), 1.28) for n, o in zip(NEW, OLD, strict=True)]
    assert new.grad.tolist() == pytest.approx([-a * w for a, w in zip(ADVANTAGES, weights, strict=True)])
    # Negative control: the clipped surrogate loses the tokens beyond its range.
    clipped = f64(NEW).requires_grad_()
    ppo.clipped_policy_loss(clipped, f64(OLD), f64(ADVANTAGES), eps_low=0.2, eps_high=0.28).sum().backward()
    assert 0.0 in clipped.grad.tolist() and 0.0 not in new.grad.tolist()


@pytest.mark.parametrize('kind', ['truncate', 'mask'])
@pytest.mark.parametrize('level', ['token', 'sequence'])
def test_importance_weights(level, kind):
    low, high = 0.4, 1.9  # some of the ratios are below, some above, some between

    def slow(mistake: str = '') -> Numbers:
        out = []
        for t, row in enumerate(ROWS):
            counted = [k for k in range(7) if ROWS[k] == row and (MASK[k] or mistake == 'masked tokens too')]
            if (level == 'token') != (mistake == 'the other level'):
                counted = [t]
            sign = -1 if mistake == 'engine over trainer' else 1
            ratio = math.exp(sign * sum(OLD[k] - NEW[k] for k in counted))
            if mistake == 'mean for product':
                ratio **= 1 / len(counted)
            inside = low <= ratio <= high or mistake == 'no bounds' or (mistake == 'no floor' and ratio < low)
            if (kind == 'mask') != (mistake == 'the other kind'):
                out.append(ratio if inside else 0.0)
            else:
                out.append(ratio if inside else min(max(ratio, low), high))
        return out

    new = f64(OLD).requires_grad_()
    where = torch.tensor(MASK), torch.tensor(ROWS), 3
    ours = losses.importance_weights(new, f64(NEW), *where, f'{level}_{kind}', low=low, high=high)
    assert not ours.requires_grad
    mistakes = ['engine over trainer', 'the other level', 'the other kind', 'no bounds', 'no floor']
    holds(ours.tolist(), slow, *mistakes, *(['masked tokens too', 'mean for product'] if level == 'sequence' else []))


def test_decoupled_ppo_weighs_the_clipped_loss_of_the_proximal_policy_by_the_behaviour_policy():
    behaviour = [-0.2, -1.8, -1.5, -0.9, -0.7, -0.5, -1.1]

    def slow(mistake: str = '') -> Numbers:
        out = []
        for new, proximal, old, a in zip(NEW, OLD, behaviour, ADVANTAGES, strict=True):
            clipped = surrogate(
                math.exp(new - (old if mistake == 'clipped at the behaviour' else proximal)), a, 0.2, 0.2
            )
            weight = math.exp(old - proximal if mistake == 'upside down' else proximal - old)
            out.append(clipped if mistake == 'no weight' else clipped * (weight if weight <= 1.5 else 0.0))
        return out

    where = torch.tensor(MASK), torch.tensor(ROWS), 3
    weights = losses.importance_weights(f64(OLD), f64(behaviour), *where, 'token_mask', high=1.5)
    ours = weights * ppo.clipped_policy_loss(f64(NEW), f64(OLD), f64(ADVANTAGES))
    holds(ours.tolist(), slow, 'clipped at the behaviour', 'upside down', 'no weight')


def test_value_clip():
    old, returns = [v + 0.5 for v in NEW[::-1]], ADVANTAGES

    def slow(mistake: str = '') -> Numbers:
        out = []
        for v, o, r in zip(NEW, old, returns, strict=True):
            centre = r if mistake == 'around the return' else o
            near = min(max(v, centre - 0.4), centre + 0.4)
            both = (v - r) ** 2, (near - r) ** 2
            loss = {'min for max': min(both), 'not clipped': both[0], 'always clipped': both[1]}.get(mistake, max(both))
            out.append(loss if mistake == 'no half' else 0.5 * loss)
        return out

    ours = ppo.clipped_value_loss(f64(NEW), f64(old), f64(returns), 0.4).tolist()
    holds(ours, slow, 'around the return', 'min for max', 'not clipped', 'always clipped', 'no half')
    plain = ppo.clipped_value_loss(f64(NEW), f64(old), f64(returns)).tolist()
    assert plain == pytest.approx([0.5 * (v - r) ** 2 for v, r in zip(NEW, returns, strict=True)])


def test_explained_variance():
    def slow(mistake: str = '') -> Numbers:
        pairs = [(v, r) for v, r, c in zip(NEW, ADVANTAGES, MASK, strict=True) if c or mistake == 'masked tokens too']
        rest, returns, values = [r - v for v, r in pairs], [r for _, r in pairs], [v for v, _ in pairs]
        if mistake == 'mean square for variance':
            return [1 - mean([x * x for x in rest]) / variance(returns, 0)]
        return [1 - variance(rest, 0) / variance(values if mistake == 'over the variance of V' else returns, 0)]

    ours = [ppo.explained_variance(f64(NEW), f64(ADVANTAGES), torch.tensor(MASK)).item()]
    holds(ours, slow, 'masked tokens too', 'mean square for variance', 'over the variance of V')
    small = [ppo.explained_variance(f64(NEW) / 100, f64(ADVANTAGES) / 100, torch.tensor(MASK)).item()]
    assert small == pytest.approx(ours)
    constant = f64([5.0] * len(MASK))
    assert ppo.explained_variance(f64(NEW), constant, torch.tensor(MASK)).item() == 0


def counted_by_row(*, masked_too: bool) -> list[Numbers]:
    tokens = list(zip(NEW, ROWS, MASK, strict=True))
    return [[x for x, r, c in tokens if r == row and (c or masked_too)] for row in range(3)]


@pytest.mark.parametrize(
    ('mode', 'mistakes'),
    [
        ('token', ('mean over sequences', 'masked tokens too')),
        ('sequence', ('mean over tokens', 'masked tokens too')),
        ('sequence_sum', ('own lengths', 'mean over tokens', 'masked tokens too')),
    ],
)
def test_aggregation(mode, mistakes):
    length = 5

    def slow(mistake: str = '') -> Numbers:
        parts = counted_by_row(masked_too=mistake == 'masked tokens too')
        tokens = [x for part in parts for x in part]
        if mistake == 'mean over tokens' or (mode == 'token' and mistake != 'mean over sequences'):
            return [mean(tokens)]
        if mode == 'sequence_sum' and mistake != 'own lengths':
            return [sum(sum(part) / length for part in parts) / 3]
        return [mean([mean(part) for part in parts])]

    mask, rows = torch.tensor(MASK), torch.tensor(ROWS)
    count = ppo.aggregation_count(mask, rows, 3, mode, length)
    holds([ppo.aggregate(f64(NEW), mask, rows, 3, mode, count).item()], slow, *mistakes)


def test_policy_stats():
    def slow(mistake: str = '') -> dict[str, Any]:
        logs = [n - o for n, o, c in zip(NEW, OLD, MASK, strict=True) if c or mistake == 'masked tokens too']
        if mistake == 'upside down':
            logs = [-x for x in logs]
        ratios = [math.exp(x) for x in logs]
        high = 0.2 if mistake == 'one range' else 0.9
        return {
            'num_tokens': len(logs),
            'approx_kl': sum(-x for x in logs),
            'approx_kl_k3': sum(r - 1 - x for r, x in zip(ratios, logs, strict=True)),
            'clipped': sum(r < 0.8 or r > 1 + high for r in ratios),
            'ratio': sum(ratios),
            'ratio_min': min(ratios),
            'ratio_max': max(ratios),
        }

    got = ppo.policy_stats(f64(NEW), f64(OLD), torch.tensor(MASK), eps_low=0.2, eps_high=0.9)
    ours = {name: value.item() for name, value in got._asdict().items()}
    assert ours == pytest.approx(slow(), rel=1e-12)
    for mistake, seen in (('upside down', 'ratio'), ('masked tokens too', 'num_tokens'), ('one range', 'clipped')):
        assert ours[seen] != pytest.approx(slow(mistake)[seen], rel=1e-6), mistake


@pytest.mark.parametrize('average', [False, True])
def test_sequence_logprobs(average):
    def slow(mistake: str = '') -> Numbers:
        parts = counted_by_row(masked_too=mistake == 'masked tokens too')
        return [mean(part) if average != (mistake == 'mean and sum exchanged') else sum(part) for part in parts]

    ours = losses.sequence_logprobs(f64(NEW), torch.tensor(MASK), torch.tensor(ROWS), 3, average=average).tolist()
    holds(ours, slow, 'masked tokens too', 'mean and sum exchanged')
