"""TRL's names on this library: `PPOTrainer` of both of its eras, models with a value head, `core`.

    from chatgpt.compat.trl import AutoModelForCausalLMWithValueHead, PPOConfig, PPOTrainer

`SERVED` and `INSTEAD` are what `python -m chatgpt.compat run` and `check` go by; docs/coming_from/trl.md says what is
the same and what is not.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_HERE = 'chatgpt.compat.trl'

SERVED: dict[str, str] = {
    'PPOConfig': f'{_HERE}.config:PPOConfig',
    'PPOv2Config': f'{_HERE}.config:PPOConfig',
    'trainer.PPOConfig': f'{_HERE}.config:PPOConfig',
    'trainer.ppo_config.PPOConfig': f'{_HERE}.config:PPOConfig',
    'DPOConfig': f'{_HERE}.dpo:DPOConfig',
    'DPOTrainer': f'{_HERE}.dpo:DPOTrainer',
    'SFTConfig': f'{_HERE}.sft:SFTConfig',
    'SFTTrainer': f'{_HERE}.sft:SFTTrainer',
    'RewardConfig': f'{_HERE}.reward:RewardConfig',
    'RewardTrainer': f'{_HERE}.reward:RewardTrainer',
}
"""name below `trl`: where it is, 'module:attribute'"""

INSTEAD: dict[str, str] = {}
"""name below `trl` that is not served: what to write instead"""


def __getattr__(name: str) -> Any:
    if name in SERVED:
        module, _, attribute = SERVED[name].partition(':')
        return getattr(import_module(module), attribute)
    if name in INSTEAD:
        raise AttributeError(f'trl.{name} is not served: {INSTEAD[name]}')
    raise AttributeError(f'module {__name__!r} has no attribute {name!r}')


def __dir__() -> list[str]:
    return [*globals(), *(name for name in SERVED if '.' not in name)]
