"""Rollout engines by name: `ENGINES['mine'] = EngineEntry(lambda pretrained: MyEngine())` adds one, which command lines
and config files then know; `my_file.py:name` of an entry needs no line at all. And who generates where nobody chose.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from chatgpt.registry import Registry
from chatgpt.rollout.engine import RolloutEngine
from chatgpt.rollout.hf import HFEngine
from chatgpt.rollout.local import LocalEngine
from chatgpt.rollout.vllm import VLLMEngine


@dataclass(frozen=True)
class EngineEntry:
    """How to build an engine."""

    make: Callable[[Any], RolloutEngine]
    """from the policy's folder or hub name"""


def default_engine(actor: Any, **options: Any) -> RolloutEngine:
    """Who generates with an actor where nobody chose: `model.generate` of an encoder-decoder, else the local engine,
    with `options`."""
    apart = getattr(getattr(actor, 'config', None), 'is_encoder_decoder', False)
    return HFEngine() if apart else LocalEngine(**options)


ENGINES: Registry[EngineEntry] = Registry(
    'engine',
    EngineEntry,
    {
        'local': EngineEntry(lambda pretrained: LocalEngine()),
        'hf': EngineEntry(lambda pretrained: HFEngine()),
        'vllm': EngineEntry(VLLMEngine),
    },
)
