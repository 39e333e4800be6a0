"""Actors, critics and reward models by family: GPT-2, OPT, BLOOM, Llama, DeBERTa (critic and reward model), or whatever
a config says.

Each is a few lines on a common base; all take the ancestor's arguments (`pretrained`, `config`, `checkpoint`,
`lora_rank`, `lora_train_bias`).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
import transformers
from torch import nn

from chatgpt.nn.actor import Actor
from chatgpt.nn.critic import Critic
from chatgpt.nn.heads import set_state
from chatgpt.nn.loading import check_options, load_base_model, load_causal_lm, load_config
from chatgpt.nn.reward_model import BIAS_KEY, RewardModel, ScorerParts, load_scorer
from chatgpt.registry import Registry


class _Family:
    """Where a family's model comes from. `pretrained` is a hub name or folder; neither that nor `config` means the
    family's default."""

    model_type: ClassVar[str | None] = None
    config_class: ClassVar[str | None] = None

    @classmethod
    def check_family(cls, pretrained: Any, config: Any, options: dict[str, Any]) -> Any:
        """The config to build from, or None with `pretrained`. ValueError when there is neither, both, or another
        family's."""
        if pretrained is None and config is None:
            if cls.config_class is None:
                raise ValueError(f'{cls.__name__} needs pretrained=NAME_OR_FOLDER or a config')
            return getattr(transformers, cls.config_class)()
        check_options(options)
        if pretrained is not None and config is not None:
            raise ValueError(f'{cls.__name__}: give either pretrained (a hub name or folder) or config, not both')
        options = {k: v for k, v in options.items() if k != 'attn_implementation'}
        found = (load_config(pretrained, **options) if config is None else config).model_type
        if cls.model_type is not None and found != cls.model_type:
            where = repr(os.fspath(pretrained)) if pretrained is not None else 'the config'
            kind = next(k for k in ('Actor', 'Critic', 'RM') if cls.__name__.endswith(k))
            raise ValueError(
                f'{cls.__name__} takes models of the family {cls.model_type!r}, but {where} is of the family '
                f'{found!r}; use Auto{kind}, which takes any'
            )
        return config

    @classmethod
    def _load_pretrained(cls, folder: str | Path, **options: Any) -> Any:
        cls.check_family(folder, None, {k: v for k, v in options.items() if k != 'checkpoint'})
        return super()._load_pretrained(folder, **options)  # type: ignore[misc]  # of the kind: Actor, Critic, RewardModel


class _GPT(_Family):
    model_type, config_class = 'gpt2', 'GPT2Config'


class _OPT(_Family):
    model_type, config_class = 'opt', 'OPTConfig'


class _BLOOM(_Family):
    model_type, config_class = 'bloom', 'BloomConfig'


class _Llama(_Family):
    model_type, config_class = 'llama', 'LlamaConfig'


class _Deberta(_Family):
    model_type, config_class = 'deberta-v2', 'DebertaV2Config'


class _Auto(_Family):
    pass


class _FamilyActor(_Family, Actor):
    def __init__(
        self,
        pretrained: str | os.PathLike[str] | None = None,
        config: Any = None,
        checkpoint: bool = False,
        lora_rank: int = 0,
        lora_train_bias: str = 'none',
        *,
        value_head: bool | nn.Module | None = None,
        num_layers_unfrozen: int | None = None,
        lora_options: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        """See `Actor`; `checkpoint` turns gradient checkpointing on, `options` are those of
        `chatgpt.nn.loading.load_model`."""
        config = self.check_family(pretrained, config, options)
        model = load_causal_lm(pretrained, config, checkpoint=checkpoint, **options)
        Actor.__init__(
            self,
            model,
            lora_rank,
            lora_train_bias,
            value_head=value_head,
            num_layers_unfrozen=num_layers_unfrozen,
            lora_options=lora_options,
        )


class _FamilyCritic(_Family, Critic):
    def __init__(
        self,
        pretrained: str | os.PathLike[str] | None = None,
        config: Any = None,
        checkpoint: bool = False,
        lora_rank: int = 0,
        lora_train_bias: str = 'none',
        *,
        value_head: nn.Module | None = None,
        lora_options: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        """See `Critic`; `checkpoint` turns gradient checkpointing on, `options` are those of
        `chatgpt.nn.loading.load_model`."""
        config = self.check_family(pretrained, config, options)
        model = load_base_model(pretrained, config, checkpoint=checkpoint, **options)
        Critic.__init__(self, model, value_head, lora_rank, lora_train_bias, lora_options=lora_options)


class _FamilyRM(_Family, RewardModel):
    def __init__(
        self,
        pretrained: str | os.PathLike[str] | None = None,
        config: Any = None,
        checkpoint: bool = False,
        lora_rank: int = 0,
        lora_train_bias: str = 'none',
        *,
        value_head: nn.Module | None = None,
        lora_options: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        """See `RewardModel`. `pretrained` may be a reward model, whose head is taken over, or a model without one,
        which gets a new head.

        `checkpoint` turns gradient checkpointing on, `options` are those of `chatgpt.nn.loading.load_model`.
        """
        config = self.check_family(pretrained, config, options)
        if pretrained is None:
            parts = ScorerParts(load_base_model(None, config, checkpoint=checkpoint, **options), None, 0.0)
        else:
            parts = load_scorer(pretrained, checkpoint=checkpoint, **options)  # type: ignore[arg-type]
        RewardModel.__init__(
            self, parts.model, value_head or parts.head, lora_rank, lora_train_bias, lora_options=lora_options
        )
        if value_head is None:
            set_state(self, {BIAS_KEY: torch.tensor(parts.bias, device='cpu')})


class GPTActor(_GPT, _FamilyActor):
    """GPT-2 policy."""


class GPTCritic(_GPT, _FamilyCritic):
    """GPT-2 value model."""


class GPTRM(_GPT, _FamilyRM):
    """GPT-2 reward model."""


class OPTActor(_OPT, _FamilyActor):
    """OPT policy."""


class OPTCritic(_OPT, _FamilyCritic):
    """OPT value model."""


class OPTRM(_OPT, _FamilyRM):
    """OPT reward model."""


class BLOOMActor(_BLOOM, _FamilyActor):
    """BLOOM policy."""


class BLOOMCritic(_BLOOM, _FamilyCritic):
    """BLOOM value model."""


class BLOOMRM(_BLOOM, _FamilyRM):
    """BLOOM reward model."""


class LlamaActor(_Llama, _FamilyActor):
    """Llama policy."""


class LlamaCritic(_Llama, _FamilyCritic):
    """Llama value model."""


class LlamaRM(_Llama, _FamilyRM):
    """Llama reward model."""


class DebertaCritic(_Deberta, _FamilyCritic):
    """DeBERTa-v2 value model; its attention is cut so that no value depends on later tokens."""


class DebertaRM(_Deberta, _FamilyRM):
    """DeBERTa-v2 reward model, read at the first token."""


class AutoActor(_Auto, _FamilyActor):
    """Policy of the family that the config names."""


class AutoCritic(_Auto, _FamilyCritic):
    """Value model of the family that the config names."""


class AutoRM(_Auto, _FamilyRM):
    """Reward model of the family that the config names."""


@dataclass(frozen=True)
class ModelKind:
    """The classes of a family. Each is called with `pretrained` or `config`, `checkpoint`, and the keywords of its
    base."""

    actor: type[Actor] | None
    """None for a family of encoders, which cannot write"""
    critic: type[Critic]
    reward_model: type[RewardModel]


MODELS: Registry[ModelKind] = Registry(
    'model',
    ModelKind,
    {
        'auto': ModelKind(AutoActor, AutoCritic, AutoRM),
        'gpt2': ModelKind(GPTActor, GPTCritic, GPTRM),
        'opt': ModelKind(OPTActor, OPTCritic, OPTRM),
        'bloom': ModelKind(BLOOMActor, BLOOMCritic, BLOOMRM),
        'llama': ModelKind(LlamaActor, LlamaCritic, LlamaRM),
        'deberta': ModelKind(None, DebertaCritic, DebertaRM),
    },
)
