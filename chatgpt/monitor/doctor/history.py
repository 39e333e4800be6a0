"""The numbers of a run up to some phase, as the checks look at them.

The same object is built phase by phase while a run goes on and afterwards from its folder, so both see the same. Left
out: what the numbers mean (docs/metrics.md).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from statistics import median
from typing import Any

from chatgpt.monitor.run_folder.record import RunRecord

ONLINE, OFFLINE = 'ppo', ('sft', 'rm', 'dpo', 'orpo', 'simpo', 'kto', 'ilql')
START, NOW = 3, 5
"""phases whose median is 'at the start' and 'now': one odd phase in three, or two in five, do not move it"""


class History:
    """Metrics so far, and what the run is.

    Args:
        record: what run.json says; None of a folder without one.
        settings: in place of the record's, where it has none.
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
        """The metrics of one more phase, with its `step`. What is no finite number is left out."""
        self.step = int(row['step'])
        for name, value in row.items():
            if name != 'step' and isinstance(value, (int, float)) and math.isfinite(value):
                self._series.setdefault(name, []).append((self.step, float(value)))
                self._values.setdefault(name, []).append(float(value))
                low, high = self._range.get(name, (math.inf, -math.inf))
                self._range[name] = min(low, value), max(high, value)

    # ------------------------------------------------------------------ metrics

    def series(self, name: str) -> list[tuple[int, float]]:
        """(phase, value), oldest first."""
        return self._series.get(name, [])

    def values(self, name: str) -> list[float]:
        return self._values.get(name, [])

    def names(self) -> list[str]:
        """Metrics seen so far."""
        return list(self._values)

    def count(self, name: str) -> int:
        """Phases that measured it."""
        return len(self.values(name))

    def last(self, name: str, count: int) -> list[float]:
        """The latest `count` values, or fewer."""
        return self.values(name)[-count:]

    def newest(self, name: str) -> float | None:
        """Of the present phase; None where it was not measured in it."""
        series = self.series(name)
        return series[-1][1] if series and series[-1][0] == self.step else None

    def lowest(self, name: str) -> float:
        """Of all phases so far. Ask `count` first."""
        return self._range[name][0]

    def highest(self, name: str, otherwise: float | None = None) -> float:
        """Of all phases so far. Ask `count` first, or give what it is where nothing was measured."""
        return self._range[name][1] if otherwise is None or name in self._range else otherwise

    def start(self, name: str) -> float:
        """Median of the first phases. Ask `count` first."""
        return median(self.values(name)[:START])

    def now(self, name: str) -> float:
        """Median of the latest phases. Ask `count` first."""
        return median(self.values(name)[-NOW:])

    def around(self, name: str, step: int) -> float | None:
        """Median of the phases within two of `step`."""
        near = [value for at, value in self.series(name)[: step + NOW] if abs(at - step) <= NOW // 2]
        return median(near) if near else None

    # ------------------------------------------------------------------ what the run is

    @property
    def is_online(self) -> bool:
        """It collects and learns with PPO or a relative of it."""
        return 'rollout/score_mean' in self._values

    @property
    def learning(self) -> str | None:
        """First part of the names of what is learned: 'ppo', 'sft', 'rm', ...; None where that is not known."""
        if self.is_online:
            return ONLINE
        return next((prefix for prefix in OFFLINE if f'{prefix}/loss' in self._values), None)

    def setting(self, name: str, otherwise: Any = None) -> Any:
        """A setting of the trainer; `otherwise` where it is not known."""
        known = self.record.settings if self.record is not None and self.record.settings else self._settings
        value = known.get(name, otherwise)
        return otherwise if value is None else value

    def generation(self, name: str) -> Any:
        """A setting of generating; None where it is not known."""
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
        """The policy, or the one model that is trained: kind, parameters, trained; empty where it is not known."""
        models = self.record.models if self.record is not None else {}
        return models.get('actor') or next(iter(models.values()), {})

    @property
    def has_critic(self) -> bool:
        return 'ppo/value_loss' in self._values

    @property
    def shares_trunk(self) -> bool:
        """Policy and value head are one model, with one optimizer."""
        return self.has_critic and 'ppo/critic_lr' not in self._values

    @property
    def has_episodes(self) -> bool:
        """The policy acts in an environment, over several turns."""
        return 'environment/num_turns_mean' in self._values

    def drawn_lengths(self) -> list[float]:
        """Tokens of a response that the policy drew, by phase: all but an environment's observations."""
        lengths, observed = self.values('rollout/response_len_mean'), self.values('environment/observation_share')
        return [n * (1.0 - share) for n, share in zip(lengths, observed, strict=False)] if observed else lengths

    @property
    def solved_share(self) -> float:
        """Where the mean score stands in the range of all scores so far: 0 at the lowest, 1 at the highest."""
        low, high = self.lowest('rollout/score_min'), self.highest('rollout/score_max')
        return (self.now('rollout/score_mean') - low) / (high - low) if high > low else 0.0

    @property
    def updates_per_phase(self) -> float:
        """Optimizer steps of the latest phase."""
        before = self.values('ppo/num_updates')[-2:]
        return before[-1] - (before[0] if len(before) > 1 else 0.0) if before else 0.0
