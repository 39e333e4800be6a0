"""What generates and learns: the actor, or a policy made of it.

`PPOTrainer` asks a `Policy` for the model that an engine generates with and for the forward that is learned, and tells
it when a phase has ended.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from chatgpt.registry import imported

if TYPE_CHECKING:
    from torch import nn

    from chatgpt.functional.logprobs import WithEntropy
    from chatgpt.strategies.base import Strategy
    from chatgpt.types import Batch

POLICIES: dict[str, str] = {}
"""setting of `PPOConfig` -> the policy, 'module:name', that is made where it is given, by the arguments of
`policy_for`"""


class Policy:
    """The actor as it is.

    Args:
        actor: as prepared.
        temperature: of the sampling, which log-probs are taken at.
        with_entropy: True where the loss has an entropy bonus; 'detached' where it is a metric only.
    """

    takes_copy = False
    """is made of the actor and a copy of it, `mask_model`"""

    def __init__(
        self, strategy: Strategy, actor: nn.Module, temperature: float, with_entropy: WithEntropy = True
    ) -> None:
        self.strategy, self.actor, self.temperature, self.with_entropy = strategy, actor, temperature, with_entropy

    @contextmanager
    def generating(self, **needs: Any) -> Iterator[Any]:
        """The model that an engine generates with in one collect phase. `needs`: `whole` and `read_only` of
        `Strategy.full_model`."""
        with self.strategy.full_model(self.actor, **needs) as full:
            yield full

    def forward(self, model: nn.Module, batch: Batch) -> Any:
        """The output that is learned, with entropy. `model` is the actor."""
        return model(batch, temperature=self.temperature, with_entropy=self.with_entropy)

    def models(self) -> Mapping[str, nn.Module]:
        """Further models whose weights belong to a checkpoint."""
        return {}

    def end_phase(self, phase: int) -> None:
        """Learning phase number `phase`, counted from 1, is done."""

    @classmethod
    def check(cls, strategy: Strategy) -> None:
        """Raises ValueError for a strategy that it cannot run under."""


def policy_class(config: Any) -> type[Policy]:
    """The class of the policy that the settings ask for."""
    asked = [spec for setting, spec in POLICIES.items() if getattr(config, setting) is not None]
    return imported(asked[0]) if asked else Policy


def policy_for(
    strategy: Strategy,
    actor: nn.Module,
    config: Any,
    temperature: float,
    mask_model: nn.Module | None,
    engine: Any,
) -> Policy:
    """The actor as it is, or the policy of `POLICIES` that a setting asks for.

    Raises:
        ValueError: `mask_model`, which only such a policy takes, and what that policy refuses.
    """
    with_entropy: WithEntropy = True if config.entropy_coef else 'detached'
    found: Any = policy_class(config)
    if found.takes_copy:
        return found(strategy, actor, config, temperature, mask_model, engine, with_entropy)
    if mask_model is not None:
        raise ValueError(f'mask_model is of a policy that is made of two models: give {" or ".join(POLICIES)}')
    return Policy(strategy, actor, temperature, with_entropy)
