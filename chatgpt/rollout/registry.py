"""Rollout engines by name: `ENGINES['mine'] = EngineEntry(lambda pretrained: MyEngine())` adds one, which command lines
and config files then know; `my_file.py:name` of an entry needs no line at all. And who generates where nobody chose.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from chatgpt.registry import Registry, late

if TYPE_CHECKING:
    from chatgpt.rollout.engine import RolloutEngine


@dataclass(frozen=True)
class EngineEntry:
    """How to build an engine."""

    make: Callable[[Any], RolloutEngine | None]
    """from the policy's folder or hub name; None leaves it to the trainer (`engine_for`)"""


def engine_for(actor: Any, **options: Any) -> RolloutEngine:
    """The engine of a policy where nobody has chosen one: 'local' with these options, or 'hf' for an encoder-decoder.

    actor: not wrapped by a strategy.
    """
    from chatgpt.nn.trunk import is_encoder_decoder
    from chatgpt.rollout.hf import HFEngine
    from chatgpt.rollout.local import LocalEngine

    return HFEngine() if is_encoder_decoder(getattr(actor, 'model', None)) else LocalEngine(**options)


ENGINES: Registry[EngineEntry] = Registry(
    'engine',
    EngineEntry,
    {
        'auto': EngineEntry(lambda pretrained: None),
        'local': EngineEntry(lambda pretrained: late('chatgpt.rollout.local:LocalEngine')()),
        'hf': EngineEntry(lambda pretrained: late('chatgpt.rollout.hf:HFEngine')()),
        'vllm': EngineEntry(late('chatgpt.rollout.vllm:VLLMEngine')),
    },
)
