"""The registry of rollout engines. `ENGINES['mine'] = EngineEntry(lambda pretrained: MyEngine())` makes an engine
available to the command line and config files; an entry given as `my_file.py:name` needs no registration.
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
    """An engine in the registry."""

    make: Callable[[Any], RolloutEngine | None]
    """builds the engine from the policy's folder or hub name; returns None to use `engine_for`"""


def engine_for(actor: Any, **options: Any) -> RolloutEngine:
    """Returns the default engine of a policy: 'hf' for an encoder-decoder and for a model whose cache holds more than
    keys and values, else 'local' with these options.

    actor: not wrapped by a strategy.
    """
    from chatgpt.nn.trunk import beyond_keys_and_values, is_encoder_decoder
    from chatgpt.rollout.hf import HFEngine
    from chatgpt.rollout.local import LocalEngine

    model = getattr(actor, 'model', None)
    if model is not None and (is_encoder_decoder(model) or beyond_keys_and_values(model)):
        return HFEngine()
    return LocalEngine(**options)


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
