"""Several roles on one frozen base model in memory, such as PPO's actor and critic on one trunk.

    trunk = SharedTrunk.from_pretrained('Qwen/Qwen2.5-7B', quantize='nf4', dtype=torch.bfloat16, device=strategy.device)
    actor, critic = trunk.actor(lora_rank=16), trunk.critic(lora_rank=16)
    reward_model = trunk.reward_model(adapter='reward_adapter')
    initial_model = None                                       # the actor with its adapter off

Each role is an ordinary `Actor`, `Critic` or `RewardModel`: a separate module tree over the same base tensors, with its
own adapter and head. Sharded strategies raise an error, because they would shard the base that other roles use.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from transformers import PreTrainedModel

from chatgpt.nn.actor import Actor
from chatgpt.nn.critic import Critic
from chatgpt.nn.heads import load_head
from chatgpt.nn.layouts import check_causal
from chatgpt.nn.loading import load_causal_lm
from chatgpt.nn.peft_format import import_peft
from chatgpt.nn.quantized import NF4Linear, quantize_blocks
from chatgpt.nn.reward_model import RewardModel
from chatgpt.nn.tensor_files import HEAD_FILE
from chatgpt.nn.weights import fill_model

Quantization = Literal['nf4']


def _check_quantize(quantize: str | None) -> None:
    if quantize not in (None, 'nf4'):
        raise ValueError(f"quantize={quantize!r}; give 'nf4' or None")


class SharedTrunk:
    """A frozen causal LM for several roles, each with its own adapter.

    Args:
        model: a causal LM in fp32. It is frozen, cast and quantized in place.
        quantize: 'nf4' stores the linear layers of the blocks in 4 bits; None keeps them in `dtype`.
        dtype: of everything that is not quantized; use the strategy's compute dtype.
    """

    def __init__(
        self, model: PreTrainedModel, *, quantize: Quantization | None = None, dtype: torch.dtype = torch.float32
    ) -> None:
        _check_quantize(quantize)
        check_causal(model, 'SharedTrunk takes', 'give roles models of their own, with lora_rank')
        self.model: Any = model
        if quantize is not None:
            quantize_blocks(model, dtype=dtype)
        for parameter in model.requires_grad_(False).parameters():
            parameter.data = parameter.data.to(dtype)
            parameter.in_shared_trunk = True  # type: ignore[attr-defined]

    @classmethod
    def from_pretrained(
        cls,
        pretrained: str | os.PathLike[str],
        *,
        quantize: Quantization | None = None,
        dtype: torch.dtype = torch.float32,
        device: str | torch.device | None = None,
        **options: Any,
    ) -> SharedTrunk:
        """Loads from a hub name or folder block by block, so that the whole dense model is never in memory.

        device: of the base; use the strategy's. `options` are those of `chatgpt.nn.loading.load_model`.
        """
        _check_quantize(quantize)
        with torch.device('meta'):
            model = load_causal_lm(pretrained, **options)
        check_causal(model, 'SharedTrunk takes', 'give roles models of their own, with lora_rank')

        def on_filled(name: str, module: nn.Module) -> None:
            if quantize is not None and name.rpartition('.')[2].isdigit():  # a block
                quantize_blocks(module, True, dtype, device)
            for parameter in module.parameters():  # cast before moving: fp32 may not fit on the device
                parameter.data = parameter.data.to(dtype)
            if device is not None:
                module.to(device)

        fill_model(model, model.weights_source, on_filled=on_filled)
        return cls(model, dtype=dtype)

    def actor(self, lora_rank: int = 8, **options: Any) -> Actor:
        """Returns a policy.

        Args:
            lora_rank: of a new adapter.
            options: `adapter`, a folder in PEFT's format to start from instead of a new adapter; `lora_options`.
        """
        return self._role(Actor, {}, lora_rank, **options)

    def critic(self, lora_rank: int = 8, *, value_head: nn.Module | None = None, **options: Any) -> Critic:
        """Returns a value model. With the `adapter` of a reward model it starts from that and its head, if there is
        one."""
        head = value_head or _head_of(options.get('adapter'))
        return self._role(Critic, {'value_head': head}, lora_rank, **options)

    def reward_model(self, lora_rank: int = 8, *, value_head: nn.Module | None = None, **options: Any) -> RewardModel:
        """Returns a reward model: a trained `adapter`, or a new one to train."""
        adapter = options.get('adapter')
        head = value_head or _head_of(adapter)
        if adapter is not None and head is None:
            raise ValueError(f'{adapter}: an adapter without {HEAD_FILE}, which the scores of a reward model need')
        return self._role(RewardModel, {'value_head': head}, lora_rank, **options)

    def _role(
        self,
        kind: Any,
        own: dict[str, Any],
        lora_rank: int,
        *,
        adapter: str | os.PathLike[str] | None = None,
        lora_options: Mapping[str, Any] | None = None,
    ) -> Any:
        taken = {} if adapter else {'lora_rank': lora_rank, 'lora_options': lora_options}
        role = kind(self._view(), **taken, **own)
        if adapter is not None:
            import_peft(role, adapter)
        return role

    def _view(self) -> Any:
        """Returns a new module tree over the same tensors."""
        packed = [module for module in self.model.modules() if isinstance(module, NF4Linear)]
        shared = (*packed, *self.model.parameters(), *self.model.buffers())
        return copy.deepcopy(self.model, {id(part): part for part in shared})


def _head_of(adapter: str | os.PathLike[str] | None) -> nn.Module | None:
    return None if adapter is None else load_head(Path(adapter))
