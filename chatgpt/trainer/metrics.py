"""Metrics of a learning phase: sums over micro-batches, ranks and train batches, and statistics of rollouts.
docs/metrics.md gives the formulas."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from typing import Any, NamedTuple, get_args

import numpy as np
import torch
from torch import Tensor

from chatgpt.functional.masking import joined_moments, moments
from chatgpt.functional.ppo import explained, kl_penalty
from chatgpt.nn.records import is_here, numbers
from chatgpt.nn.sweep import Communicator
from chatgpt.trainer.config import PPOConfig
from chatgpt.trainer.experience import ScoreShaper
from chatgpt.trainer.selection import compared
from chatgpt.types import EpisodeEnd, Experience


class Mean(NamedTuple):
    """A mean over a train batch: the sum of `total` over the sum of `weight`. A weight of 0 makes it a plain sum."""

    total: Tensor
    weight: Tensor | float
    of_some: bool = False
    """a mean over some records only: NaN in a batch without them, which a phase leaves out"""


class Highest(NamedTuple):
    """The greatest value of a train batch."""

    value: Tensor


class Lowest(NamedTuple):
    """The least value of a train batch."""

    value: Tensor


Metrics = Mapping[str, Mean | Highest | Lowest]


class BatchStats:
    """Sums of metrics over micro-batches. Tensors stay on the device; only `reduced` waits for it."""

    def __init__(self) -> None:
        self._sums: dict[str, list[tuple[Tensor, Tensor]]] = {}
        """per micro-batch"""
        self._extremes: dict[str, Tensor] = {}
        self._of_some: set[str] = set()

    def add(self, metrics: Metrics) -> None:
        for name, metric in metrics.items():
            if isinstance(metric, Mean):
                total, weight = metric.total.detach().double(), metric.weight
                # `new_full` fills on the device; copying a number there would make the host wait.
                weight = weight.to(total) if isinstance(weight, Tensor) else total.new_full((), weight)
                self._sums.setdefault(name, []).append((total, weight))
                if metric.of_some:
                    self._of_some.add(name)
                continue
            value = metric.value.detach().double()
            if isinstance(metric, Lowest):  # the maximum of the negative, so that one reduction serves both
                name, value = '-' + name, -value
            self._extremes[name] = torch.maximum(self._extremes[name], value) if name in self._extremes else value

    def reduced(self, strategy: Communicator) -> dict[str, float]:
        """Returns the metrics over all ranks. Every rank must have added the same names."""
        result: dict[str, float] = {}
        if names := sorted(self._sums):
            totals = strategy.sums.totals([[torch.stack(pair) for pair in self._sums[n]] for n in names])
            found = zip(names, totals, strict=True)
            result = {n: t / w if w else math.nan if n in self._of_some else t for n, (t, w) in found}
        if self._extremes:
            names = sorted(self._extremes)
            flat = torch.stack([self._extremes[name] for name in names]).to(strategy.device)
            for name, value in zip(names, strategy.all_reduce(flat, op='max').tolist(), strict=True):
                result[name.removeprefix('-')] = -value if name.startswith('-') else value
        return result


class PhaseMetrics:
    """Reduces the metrics of a phase's train batches: to their mean, or to the extreme of `_max` and `_min`."""

    def __init__(self) -> None:
        self._values: dict[str, list[float]] = {}

    def add(self, metrics: dict[str, float]) -> None:
        for name, value in metrics.items():
            self._values.setdefault(name, []).append(value)

    def add_batch(self, metrics: dict[str, float], rates: Mapping[str, float]) -> None:
        """Adds those of an online train batch, with the learning rates of its step."""
        first = {} if self._values else first_batch_metrics(metrics)
        norms = {f'{k}_max': v for k, v in metrics.items() if k.endswith('_grad_norm')}
        lr = {'lr' if name == 'actor' else f'{name}_lr': rate for name, rate in rates.items()}
        self.add(first | metrics | norms | lr)

    def result(self, prefix: str) -> dict[str, float]:
        return {f'{prefix}/{name}': self._one(name, values) for name, values in self._values.items()}

    @staticmethod
    def _one(name: str, values: list[float]) -> float:
        if name.endswith('_max'):
            return max(values)
        if name.endswith('_min'):
            return min(values)
        counted = [value for value in values if not math.isnan(value)]  # NaN: see `Mean.of_some`
        return math.fsum(counted) / len(counted) if counted else math.nan


def _median(values: Tensor) -> Tensor:
    """Returns the median; of an even number the mean of the two in the middle, unlike `Tensor.median`."""
    return values.quantile(0.5)


def _spread(values: Tensor) -> float:
    return float(values.std()) if len(values) > 1 else 0.0


def sampled_mask(e: Experience) -> Tensor:
    """Returns the mask of sampled tokens, including those that no longer count; (A,) bool.

    Of an episode, its turns. Otherwise the tokens that count, or all if a filter has masked all.
    """
    if e.episode is None:
        return e.response_mask if bool(e.response_mask.any()) else torch.ones_like(e.response_mask)
    mask = torch.zeros_like(e.response_mask)
    for turn in e.episode.turns:
        mask[turn.start : turn.stop] = True
    return mask


def rollout_metrics(
    experiences: SequenceOf[Experience],
    kl_coef: float,
    *,
    in_reward: bool = True,
    strategy: Communicator | None = None,
) -> dict[str, float]:
    """Returns `rollout/...`: scores, KL to the initial model, lengths. The list must not be empty. A collective;
    without a strategy this rank has all records.

    Without `in_reward` the KL is in the loss and not in the reward. Responses without a token that counts are excluded
    from the KL.
    """

    def row(e: Experience) -> Tensor:
        gaps = e.old_logprobs - e.ref_logprobs, kl_penalty(e.old_logprobs, e.ref_logprobs, 'k3'), e.kl, e.old_logprobs
        return torch.stack([torch.where(e.response_mask, x, 0.0).double().sum() for x in gaps])

    scored = compared(experiences) or list(experiences)
    scores = torch.tensor([e.score for e in scored], dtype=torch.float64)
    lengths = torch.tensor([e.num_actions for e in experiences], dtype=torch.float64)
    # Sums per response: the unit is nats per response, and long responses have more weight.
    table = numbers(experiences, row, 4, strategy)
    some = torch.tensor([bool(e.response_mask.any()) for e in experiences])
    kl, k3, penalty = table[some if bool(some.any()) else ~some, :3].T.contiguous()
    counted = sum(int(e.response_mask.sum()) for e in experiences)
    surprisal = -sum(table[:, 3].tolist())
    apart = torch.tensor([[score for _, score in e.weighted_scores] for e in scored], dtype=torch.float64)
    rewards = {f'rollout/score_{k}_mean': float(column.mean()) for k, column in enumerate(apart.T, 1)}
    rewards |= {f'rollout/score_{k}_std': _spread(column) for k, column in enumerate(apart.T, 1)}
    return (
        rewards
        | {
            'rollout/score_mean': float(scores.mean()),
            'rollout/score_std': _spread(scores),
            'rollout/score_min': float(scores.min()),
            'rollout/score_max': float(scores.max()),
            'rollout/score_mad': float(_median((scores - _median(scores)).abs())),
            'rollout/kl_mean': float(kl.mean()),
            'rollout/kl_k3_mean': float(k3.mean()),
            'rollout/kl_coef': kl_coef,
            'rollout/non_score_reward_mean': float(-kl_coef * penalty.mean()) if in_reward else 0.0,
            'rollout/response_len_mean': float(lengths.mean()),
            'rollout/response_len_std': _spread(lengths),
            'rollout/prompt_len_mean': sum(len(e.prompt_ids) for e in experiences) / len(experiences),
            'rollout/ended_share': sum(e.ended for e in experiences) / len(experiences),
            'rollout/entropy': surprisal / max(counted, 1),
        }
        | repetition_metrics(experiences, strategy)
    )


def mismatch_metrics(
    experiences: SequenceOf[Experience], phase: int | None = None, strategy: Communicator | None = None
) -> dict[str, float]:
    """Returns `rollout/...`: how far the engine's log-probs are from those that the trainer recomputed, over the tokens
    that count; {} without such tokens. A collective; without a strategy this rank has all records. phase: of the
    trainer's weights; tokens of these and of older ones are then also reported apart."""

    def row(e: Experience) -> Tensor:
        old, engine = e.old_logprobs[e.response_mask].double(), e.logprobs[e.response_mask].double()
        far, kl = (old - engine).abs(), kl_penalty(engine, old, 'k3')
        stale = e.token_versions[e.response_mask] < (0 if phase is None else phase)
        highest = far.max() if len(far) else far.sum()
        return torch.stack([far.sum(), highest, (~stale).sum(), kl[~stale].sum(), stale.sum(), kl[stale].sum()])

    table = numbers(experiences, row, 6, strategy)
    far, _, new, kl_new, old, kl_old = (math.fsum(column) for column in table.T.tolist())
    if not new + old:
        return {}
    metrics = {
        'rollout/logprob_mismatch': far / (new + old),
        'rollout/logprob_mismatch_max': float(table[:, 1].max()),
        'rollout/engine_kl': (kl_new + kl_old) / (new + old),
    }
    apart = {'rollout/mismatch_kl': (kl_new, new), 'rollout/staleness_kl': (kl_old, old)}
    return metrics | {name: kl / n for name, (kl, n) in apart.items() if n and phase is not None}


def experience_metrics(
    experiences: SequenceOf[Experience],
    config: PPOConfig,
    kl_coef: float,
    shaper: ScoreShaper,
    strategy: Communicator | None = None,
) -> dict[str, float]:
    """Returns all metrics of the experience of a phase; the list must not be empty. A collective; without a strategy
    this rank has all records."""
    return (
        rollout_metrics(experiences, kl_coef, in_reward=config.kl_in == 'reward', strategy=strategy)
        | group_metrics(experiences, apart=config.estimator.rewards_apart)
        | environment_metrics(experiences)
        | ({'rollout/score_scaling_idle': float(shaper.is_idle)} if shaper.scaling != 'none' else {})
        | value_metrics(experiences, strategy)
        | (bias_metrics(experiences, strategy) if config.estimator.needs_values else {})
    )


def group_metrics(experiences: SequenceOf[Experience], *, apart: bool = False) -> dict[str, float]:
    """Returns `rollout/...`: the share of groups with equal scores; {} without groups. `apart`: equal in each reward
    instead of in their sum."""
    groups: dict[int, list[Any]] = {}
    for e in compared(experiences):
        groups.setdefault(e.group, []).append(e.weighted_scores if apart else e.score)
    equal = [all(score == scores[0] for score in scores) for scores in groups.values() if len(scores) > 1]
    return {'rollout/equal_groups_share': sum(equal) / len(equal)} if equal else {}


def environment_metrics(experiences: SequenceOf[Experience]) -> dict[str, float]:
    """Returns `environment/...`, statistics of the episodes; {} without episodes."""
    episodes = [e.episode for e in experiences if e.episode is not None]
    if not episodes:
        return {}
    count = len(episodes)
    observed = [int((~sampled_mask(e)).sum()) for e in experiences if e.episode is not None]
    tokens = sum(e.num_actions for e in experiences if e.episode is not None)
    judged = [episode.success for episode in episodes if episode.success is not None]
    return (
        {
            'environment/return_mean': sum(x for e in episodes for t in e.turns for x in t.rewards.values()) / count,
            'environment/num_turns_mean': sum(len(e.turns) for e in episodes) / count,
            'environment/observation_share': sum(observed) / tokens,
            'environment/failed_share': sum(e.failed for e in episodes) / count,
        }
        | {f'environment/end_{end}_share': sum(e.end == end for e in episodes) / count for end in get_args(EpisodeEnd)}
        | ({'environment/success_share': sum(judged) / count} if judged else {})
    )


def value_metrics(experiences: SequenceOf[Experience], strategy: Communicator | None = None) -> dict[str, float]:
    """Returns `ppo/...` of the whole phase: returns, advantages, explained variance. A collective; without a strategy
    this rank has all records."""

    def row(e: Experience) -> Tensor:
        returns = e.returns.double()
        columns = returns, returns - e.values.double(), e.advantages
        return torch.cat([moments(x, e.response_mask) for x in columns])

    table = numbers(experiences, row, 9, strategy)
    returns, errors, advantages = map(joined_moments, table.split(3, dim=1))
    count, total, squares = returns.tolist()
    if not count:
        return {}
    return {
        'ppo/return_mean': total / count,
        'ppo/return_var': squares / count,
        'ppo/advantage_mean': float(advantages[1]) / count,
        'ppo/advantage_std': math.sqrt(float(advantages[2]) / max(count - 1, 1)),
        'ppo/explained_variance': float(explained(returns[2], errors[2])),
    }


QUARTERS = 4


def bias_metrics(experiences: SequenceOf[Experience], strategy: Communicator | None = None) -> dict[str, float]:
    """Returns `ppo/value_bias_K`: mean over tokens of V − R in the K-th quarter of their responses. A collective;
    without a strategy this rank has all records.

    Token i, from 0, of the n that count in a response is in quarter ⌊4 i / n⌋ + 1. Quarters without a token are left
    out.
    """

    def row(e: Experience) -> Tensor:
        errors = (e.values[e.response_mask].double() - e.returns[e.response_mask].double()).cpu()
        quarter = torch.arange(len(errors)) * QUARTERS // max(len(errors), 1)
        found = torch.zeros(2, QUARTERS, dtype=torch.float64)
        return found.index_add_(1, quarter, torch.stack([errors, torch.ones_like(errors)])).flatten()

    sums = [math.fsum(column) for column in numbers(experiences, row, 2 * QUARTERS, strategy).T.tolist()]
    totals = zip(sums[:QUARTERS], sums[QUARTERS:], strict=True)
    return {f'ppo/value_bias_{k}': total / count for k, (total, count) in enumerate(totals, 1) if count}


def first_batch_metrics(metrics: dict[str, float]) -> dict[str, float]:
    """Returns the deviation of the first train batch after a rollout from ratio 1 and KL 0, its values before any
    step; {} if the actor does not learn from it."""
    if 'ratio_max' not in metrics:
        return {}
    error = max(metrics['ratio_max'] - 1.0, 1.0 - metrics['ratio_min'])
    return {'first_ratio_error': error, 'first_approx_kl': metrics['approx_kl']}


def rank_metrics(strategy: Communicator, seconds: float) -> dict[str, float]:
    """Returns `perf/...`: the rank with the most `seconds`, and the median of the others. A collective; {} on one
    process."""
    if strategy.world_size == 1:
        return {}
    everyone = strategy.all_gather_object(seconds)
    slowest = max(range(len(everyone)), key=lambda rank: everyone[rank])
    others = everyone[:slowest] + everyone[slowest + 1 :]
    return {
        'perf/slowest_rank': float(slowest),
        'perf/slowest_rank_s': everyone[slowest],
        'perf/other_ranks_s': statistics.median(others),
    }


def performance_metrics(
    experiences: SequenceOf[Experience], seconds: dict[str, float], num_learned: int
) -> dict[str, float]:
    """Returns `perf/...`: the given seconds of each part, and tokens per second, all ranks together. num_learned:
    tokens learned from."""
    new_tokens = sum(int(sampled_mask(e).sum()) for e in experiences)
    episodes = [e.episode for e in experiences if e.episode is not None]
    metrics = seconds | {'perf/new_tokens_per_s': new_tokens / max(seconds['perf/total_s'], 1e-9)}
    if episodes:
        num_turns = sum(len(episode.turns) for episode in episodes)
        metrics['perf/environment_step_s'] = sum(episode.step_s for episode in episodes) / max(num_turns, 1)
    if metrics.get('perf/learn_s'):
        metrics['perf/learn_tokens_per_s'] = num_learned / metrics['perf/learn_s']
    return metrics


RUN = 4
"""tokens of an n-gram"""
FACTORS = np.array([0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0xD6E8FEB86659FD93], dtype=np.uint64)
"""odd 64-bit numbers: sums of their products with four ids are equal for different n-grams once in about 10^19 pairs"""


def repetition(responses: SequenceOf[Tensor]) -> dict[str, float]:
    """Returns `rollout/repetition_within` and `_across` of (A,) id tensors; {} if no response has four tokens.

    Within: mean over the responses of the share of their 4-grams that occur earlier in the same response. Across: the
    share of the responses' distinct 4-grams that an earlier response of the phase has too; it grows with the number of
    responses, so compare phases of the same size.
    """
    found = [different_runs(ids, None) for ids in responses]
    counts = [(total, len(runs)) for total, runs in found]
    return _repetition(counts, len(np.unique(np.concatenate([NONE, *(runs for _, runs in found)]))))


def repetition_metrics(experiences: SequenceOf[Experience], strategy: Communicator | None) -> dict[str, float]:
    """Returns `repetition` of the sampled tokens of all ranks. A collective; without a strategy this rank has all
    records."""
    found = {id(e): different_runs(e.response_ids, sampled_mask(e)) for e in experiences if is_here(e)}
    table = numbers(experiences, lambda e: torch.tensor([found[id(e)][0], len(found[id(e)][1])]), 2, strategy)
    own = np.unique(np.concatenate([NONE, *(runs for _, runs in found.values())]))
    if strategy is None or strategy.world_size == 1:
        return _repetition(table.tolist(), len(own))
    # Each rank counts a part of all different 4-grams, which their hashes deal out.
    part = own % np.uint64(strategy.world_size)
    sent = [torch.from_numpy(own[part == rank].view(np.int64)) for rank in range(strategy.world_size)]
    counted = torch.cat(strategy.exchange(sent)).unique()
    return _repetition(table.tolist(), int(strategy.all_reduce(torch.tensor(len(counted)), 'sum')))


NONE = np.zeros(0, dtype=np.uint64)


def different_runs(ids: Tensor, mask: Tensor | None) -> tuple[int, Any]:
    """Returns the number of 4-grams of a response, (A,), and hashes of the different ones, (n,) uint64. With `mask`,
    (A,) bool, 4-grams with all tokens True."""
    words = ids.cpu().numpy().astype(np.uint64)
    if len(words) < RUN:
        return 0, NONE
    runs = sum(words[k : len(words) - RUN + 1 + k] * FACTORS[k] for k in range(RUN))
    if mask is not None:
        own = mask.cpu().numpy()
        runs = runs[np.logical_and.reduce([own[k : len(own) - RUN + 1 + k] for k in range(RUN)])]
    return len(runs), np.unique(runs)


def _repetition(counts: SequenceOf[SequenceOf[float]], different: int) -> dict[str, float]:
    """Returns the metrics from numbers of all and of different 4-grams in each response, and of different ones in all
    of them together."""
    total, own = np.array([pair for pair in counts if pair[0]]).reshape(-1, 2).T
    if not len(total):
        return {}
    return {
        'rollout/repetition_within': float(np.mean(1.0 - own / total)),
        'rollout/repetition_across': 1.0 - different / float(own.sum()),
    }
