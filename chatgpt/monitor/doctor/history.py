"""The metrics of a run up to some phase, for the checks of the doctor. See docs/metrics.md for their meaning.

It is built phase by phase, during a run or from its folder, so that both give the same findings.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping
from statistics import median
from typing import Any

from chatgpt.monitor.run_folder.record import RunRecord

ONLINE, OFFLINE = 'ppo', ('sft', 'rm', 'critic', 'dpo', 'orpo', 'simpo', 'kto', 'ilql')
START, NOW = 3, 5
"""number of first and latest phases of the medians 'at the start' and 'now': one outlier in three, or two in five, do
not move them"""


class History:
    """The metrics of a run so far, and facts about the run.

    Args:
        record: content of run.json; None if there is none.
        settings: settings of a run without a record.
    """

    def __init__(self, record: RunRecord | None = None, settings: Mapping[str, Any] | None = None) -> None:
        self.record = record
        self.step = 0
        """learning phases so far"""
        self._settings = dict(settings or {})
        self._series: dict[str, list[tuple[int, float]]] = {}
        self._values: dict[str, list[float]] = {}
        self._range: dict[str, tuple[float, float]] = {}

    def add(self, row: Mapping[str, Any]) -> None:
        """Adds the metrics of a phase, with its `step`. Values that are not finite numbers are ignored."""
        self.step = int(row['step'])
        for name, value in row.items():
            if name != 'step' and isinstance(value, (int, float)) and math.isfinite(value):
                self._series.setdefault(name, []).append((self.step, float(value)))
                self._values.setdefault(name, []).append(float(value))
                low, high = self._range.get(name, (math.inf, -math.inf))
                self._range[name] = min(low, value), max(high, value)

    # ------------------------------------------------------------------ metrics

    def series(self, name: str) -> list[tuple[int, float]]:
        """Returns (phase, value), oldest first."""
        return self._series.get(name, [])

    def values(self, name: str) -> list[float]:
        return self._values.get(name, [])

    def names(self) -> list[str]:
        """Returns the names of the metrics so far."""
        return list(self._values)

    def count(self, name: str) -> int:
        """Returns the number of phases with the metric."""
        return len(self.values(name))

    def last(self, name: str, count: int) -> list[float]:
        """Returns the latest `count` values, or fewer."""
        return self.values(name)[-count:]

    def newest(self, name: str) -> float | None:
        """Returns the value of the present phase; None if it has none."""
        series = self.series(name)
        return series[-1][1] if series and series[-1][0] == self.step else None

    def lowest(self, name: str) -> float:
        """Returns the minimum so far. The metric must have a value (see `count`)."""
        return self._range[name][0]

    def highest(self, name: str, otherwise: float | None = None) -> float:
        """Returns the maximum so far, `otherwise` if there is no value."""
        return self._range[name][1] if otherwise is None or name in self._range else otherwise

    def start(self, name: str) -> float:
        """Returns the median of the first phases. The metric must have a value."""
        return median(self.values(name)[:START])

    def now(self, name: str) -> float:
        """Returns the median of the latest phases. The metric must have a value."""
        return median(self.values(name)[-NOW:])

    def around(self, name: str, step: int) -> float | None:
        """Returns the median of the phases within 2 of `step`; None if there is none."""
        near = [value for at, value in self.series(name)[: step + NOW] if abs(at - step) <= NOW // 2]
        return median(near) if near else None

    # ------------------------------------------------------------------ the run

    @property
    def is_online(self) -> bool:
        """True if the run collects and learns, with PPO or a related method."""
        return 'rollout/score_mean' in self._values

    @property
    def learning(self) -> str | None:
        """Prefix of the metrics of learning: 'ppo', 'sft', 'rm', ...; None if it is not known."""
        if self.is_online:
            return ONLINE
        return next((prefix for prefix in OFFLINE if f'{prefix}/loss' in self._values), None)

    def setting(self, name: str, otherwise: Any = None) -> Any:
        """Returns a setting of the trainer, `otherwise` if it is not known."""
        known = self.record.settings if self.record is not None and self.record.settings else self._settings
        value = known.get(name, otherwise)
        return otherwise if value is None else value

    def generation(self, name: str) -> Any:
        """Returns a setting of generation, None if it is not known."""
        return self.record.generation.get(name) if self.record is not None else None

    def data(self, name: str) -> Any:
        return self.record.data.get(name) if self.record is not None else None

    @property
    def num_phases(self) -> int | None:
        return self.record.num_phases if self.record is not None else None

    @property
    def computes_in_fp32(self) -> bool:
        precision = self.record.strategy.get('precision') if self.record is not None else None
        return precision in (None, 'fp32', 'fp64')

    @property
    def trained(self) -> dict[str, Any]:
        """Facts about the policy, or the trained model: kind, parameters, trained; empty if they are not known."""
        models = self.record.models if self.record is not None else {}
        return models.get('actor') or next(iter(models.values()), {})

    @property
    def has_critic(self) -> bool:
        return 'ppo/value_loss' in self._values

    @property
    def first_actor_step(self) -> int | None:
        """The phase of the actor's first optimizer step: the first after the warm-up of the critic."""
        series = self.series('ppo/policy_loss')
        return series[0][0] if series else None

    def since_actor(self, name: str) -> list[tuple[int, float]]:
        """Returns (phase, value) from the phase of the actor's first step on."""
        first, series = self.first_actor_step, self.series(name)
        return [] if first is None else series[bisect_left(series, (first,)) :]

    @property
    def shares_trunk(self) -> bool:
        """True if policy and value head are one model, with one optimizer. It logs ppo/critic_lr in a warm-up only."""
        rates = self.series('ppo/critic_lr') if self.first_actor_step is None else self.since_actor('ppo/critic_lr')
        return self.has_critic and not rates

    @property
    def has_episodes(self) -> bool:
        """True if the policy acts in an environment, over several turns."""
        return 'environment/num_turns_mean' in self._values

    def drawn_lengths(self) -> list[float]:
        """Returns the mean number of sampled tokens of a response, by phase, without observations of an environment."""
        lengths, observed = self.values('rollout/response_len_mean'), self.values('environment/observation_share')
        return [n * (1.0 - share) for n, share in zip(lengths, observed, strict=False)] if observed else lengths

    @property
    def solved_share(self) -> float:
        """The position of the mean score in the range of all scores so far, from 0 to 1."""
        low, high = self.lowest('rollout/score_min'), self.highest('rollout/score_max')
        return (self.now('rollout/score_mean') - low) / (high - low) if high > low else 0.0

    @property
    def updates_per_phase(self) -> float:
        """Optimizer steps of the latest phase."""
        before = self.values('ppo/num_updates')[-2:]
        return before[-1] - (before[0] if len(before) > 1 else 0.0) if before else 0.0
