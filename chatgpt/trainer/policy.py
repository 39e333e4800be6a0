"""The model that generates and learns: the actor, or a policy made from it.

`PPOTrainer` gets from a `Policy` the model for the engine and the forward of the loss, and notifies it of the end of a
phase.
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
"""setting of `PPOConfig` -> the policy, 'module:name', that is made if the setting is given, with the arguments of
`policy_for`"""


class Policy:
    """The actor itself as the policy.

    Args:
        actor: as prepared.
        temperature: of sampling, at which log-probs are computed.
        with_entropy: True if the loss has an entropy bonus; 'detached' if entropy is only a metric.
    """

    takes_copy = False
    """True if made from the actor and a copy of it, `mask_model`"""

    def __init__(
        self, strategy: Strategy, actor: nn.Module, temperature: float, with_entropy: WithEntropy = True
    ) -> None:
        self.strategy, self.actor, self.temperature, self.with_entropy = strategy, actor, temperature, with_entropy

    @contextmanager
    def generating(self, **needs: Any) -> Iterator[Any]:
        """Yields the model that an engine generates with during a collect phase. `needs`: `whole`, `read_only` and
        `folded` of `Strategy.full_model`."""
        with self.strategy.full_model(self.actor, **needs) as full:
            yield full

    def forward(self, model: nn.Module, batch: Batch) -> Any:
        """Returns the output of `model` (the actor) for the loss, with entropy."""
        return model(batch, temperature=self.temperature, with_entropy=self.with_entropy)

    def models(self) -> Mapping[str, nn.Module]:
        """Returns further models that a checkpoint includes."""
        return {}

    def end_phase(self, phase: int) -> None:
        """Called after learning phase number `phase`, counted from 1."""

    @classmethod
    def check(cls, strategy: Strategy) -> None:
        """Raises ValueError for a strategy that it cannot run under."""


def policy_class(config: Any) -> type[Policy]:
    """Returns the class of the policy that the settings select."""
    selected = [spec for setting, spec in POLICIES.items() if getattr(config, setting) is not None]
    return imported(selected[0]) if selected else Policy


def policy_for(
    strategy: Strategy,
    actor: nn.Module,
    config: Any,
    temperature: float,
    mask_model: nn.Module | None,
    engine: Any,
) -> Policy:
    """Returns the actor itself as the policy, or the policy of `POLICIES` that a setting selects.

    Raises:
        ValueError: a `mask_model` without such a policy, or arguments that the policy refuses.
    """
    with_entropy: WithEntropy = True if config.entropy_coef else 'detached'
    found: Any = policy_class(config)
    if found.takes_copy:
        return found(strategy, actor, config, temperature, mask_model, engine, with_entropy)
    if mask_model is not None:
        raise ValueError(f'mask_model is of a policy that is made of two models: give {" or ".join(POLICIES)}')
    return Policy(strategy, actor, temperature, with_entropy)
