"""Families of models by name. `MODELS['mine'] = ModelKind(MyActor, MyCritic, MyRewardModel)` adds one for command lines
and config files. Imports no torch; the classes are in `families`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from chatgpt.registry import Registry

if TYPE_CHECKING:
    from chatgpt.nn.actor import Actor
    from chatgpt.nn.critic import Critic
    from chatgpt.nn.reward_model import RewardModel


@dataclass(frozen=True)
class ModelKind:
    """The classes of a family. Each takes `pretrained` or `config`, `checkpoint`, and the keywords of its base."""

    actor: type[Actor] | None
    """None for a family of encoders, which cannot generate"""
    critic: type[Critic]
    reward_model: type[RewardModel]


MODELS: Registry[ModelKind] = Registry(
    'model',
    ModelKind,
    {
        'auto': 'chatgpt.nn.families:AUTO',
        'gpt2': 'chatgpt.nn.families:GPT',
        'opt': 'chatgpt.nn.families:OPT',
        'bloom': 'chatgpt.nn.families:BLOOM',
        'llama': 'chatgpt.nn.families:LLAMA',
        'deberta': 'chatgpt.nn.families:DEBERTA',
    },
)
