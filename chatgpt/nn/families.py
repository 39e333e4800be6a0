"""Actors, critics and reward models by family: GPT-2, OPT, BLOOM, Llama, DeBERTa (critic and reward model), or the
family of a config. All take `pretrained`, `config`, `checkpoint`, `lora_rank` and `lora_train_bias`.
"""

from __future__ import annotations

import os
from typing import Any, ClassVar

import transformers

from chatgpt.nn.actor import Actor
from chatgpt.nn.critic import Critic
from chatgpt.nn.kinds import ModelKind
from chatgpt.nn.loading import Role, check_options, load_config
from chatgpt.nn.reward_model import RewardModel


class _Family(Role):
    """Loads a family's model. `pretrained` is a hub name or folder; without it and `config`, the family's default
    config is used."""

    model_type: ClassVar[str | None] = None
    config_class: ClassVar[str | None] = None

    @classmethod
    def check_family(cls, pretrained: Any, config: Any, options: dict[str, Any]) -> Any:
        """Returns the config to build from, or None with `pretrained`. Raises ValueError for neither, both, or a config
        of another family."""
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
            kind = 'Actor' if issubclass(cls, Actor) else 'Critic' if issubclass(cls, Critic) else 'RM'
            raise ValueError(
                f'{cls.__name__} takes models of the family {cls.model_type!r}, but {where} is of the family '
                f'{found!r}; use Auto{kind}, which takes any'
            )
        return config

    def __init__(
        self,
        pretrained: str | os.PathLike[str] | None = None,
        config: Any = None,
        checkpoint: bool = False,
        lora_rank: int = 0,
        lora_train_bias: str = 'none',
        **options: Any,
    ) -> None:
        """See `Actor`, `Critic` and `RewardModel` for the other keywords.

        Args:
            pretrained: a hub name or folder. A reward model keeps the head of a pretrained reward model, or gets a new
                one. A critic gets a new one; `from_pretrained` keeps the one that is saved there.
            config: for a model with new weights.
            checkpoint: turns gradient checkpointing on.
            options: also those of `chatgpt.nn.loading.load_model`.
        """
        own = {name: options.pop(name) for name in (*self.build_options, 'value_head') if name in options}
        model = self._load(pretrained, config, checkpoint=checkpoint, **options)
        self._build(model, lora_rank=lora_rank, lora_train_bias=lora_train_bias, **own)

    @classmethod
    def _load(cls, pretrained: Any = None, config: Any = None, **options: Any) -> Any:
        config = cls.check_family(
            pretrained, config, {k: v for k, v in options.items() if k not in ('checkpoint', 'head')}
        )
        return super()._load(pretrained, config, **options)


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


class GPTActor(_GPT, Actor):
    """GPT-2 policy."""


class GPTCritic(_GPT, Critic):
    """GPT-2 value model."""


class GPTRM(_GPT, RewardModel):
    """GPT-2 reward model."""


class OPTActor(_OPT, Actor):
    """OPT policy."""


class OPTCritic(_OPT, Critic):
    """OPT value model."""


class OPTRM(_OPT, RewardModel):
    """OPT reward model."""


class BLOOMActor(_BLOOM, Actor):
    """BLOOM policy."""


class BLOOMCritic(_BLOOM, Critic):
    """BLOOM value model."""


class BLOOMRM(_BLOOM, RewardModel):
    """BLOOM reward model."""


class LlamaActor(_Llama, Actor):
    """Llama policy."""


class LlamaCritic(_Llama, Critic):
    """Llama value model."""


class LlamaRM(_Llama, RewardModel):
    """Llama reward model."""


class DebertaCritic(_Deberta, Critic):
    """DeBERTa-v2 value model with a causal attention mask, so that no value depends on later tokens."""


class DebertaRM(_Deberta, RewardModel):
    """DeBERTa-v2 reward model; the score is that of the first token."""


class AutoActor(_Family, Actor):
    """Policy of the config's family."""


class AutoCritic(_Family, Critic):
    """Value model of the config's family."""


class AutoRM(_Family, RewardModel):
    """Reward model of the config's family."""


AUTO = ModelKind(AutoActor, AutoCritic, AutoRM)
GPT = ModelKind(GPTActor, GPTCritic, GPTRM)
OPT = ModelKind(OPTActor, OPTCritic, OPTRM)
BLOOM = ModelKind(BLOOMActor, BLOOMCritic, BLOOMRM)
LLAMA = ModelKind(LlamaActor, LlamaCritic, LlamaRM)
DEBERTA = ModelKind(None, DebertaCritic, DebertaRM)
