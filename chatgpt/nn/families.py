"""Actors, critics and reward models by family: GPT-2, OPT, BLOOM, Llama, DeBERTa (critic and reward model), or whatever a config says.

Each is a few lines on a common base; all take the ancestor's arguments (`pretrained`, `config`, `checkpoint`, `lora_rank`,
`lora_train_bias`).
"""

from __future__ import annotations

from typing import Any, ClassVar

from torch import nn

from chatgpt.nn.actor import Actor
from chatgpt.nn.critic import Critic
from chatgpt.nn.loading import load_base_model, load_causal_lm, load_config
from chatgpt.nn.reward_model import RewardModel


class _Family:
    """Where a family's model comes from. `pretrained` is a hub name or folder; neither that nor `config` means the family's default."""

    model_type: ClassVar[str | None] = None
    config_class: ClassVar[str | None] = None

    @classmethod
    def load(cls, causal: bool, pretrained: str | None, config: Any, checkpoint: bool, trust_remote_code: bool) -> nn.Module:
        """The transformers model. ValueError when it is of another family."""
        import transformers

        if pretrained is None and config is None:
            if cls.config_class is None:
                raise ValueError(f'{cls.__name__} needs pretrained=NAME_OR_FOLDER or a config')
            config = getattr(transformers, cls.config_class)()
        found = (config if config is not None else load_config(pretrained, trust_remote_code=trust_remote_code)).model_type  # type: ignore[arg-type]
        if cls.model_type is not None and found != cls.model_type:
            where = repr(pretrained) if pretrained is not None else 'the config'
            raise ValueError(
                f'{cls.__name__} takes {cls.model_type!r} models, but {where} is of the family {found!r}; use Auto or its own class'
            )
        load = load_causal_lm if causal else load_base_model
        return load(pretrained, config, checkpoint=checkpoint, trust_remote_code=trust_remote_code)


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
        pretrained: str | None = None,
        config: Any = None,
        checkpoint: bool = False,
        lora_rank: int = 0,
        lora_train_bias: str = 'none',
        *,
        trust_remote_code: bool = False,
        **kwargs: Any,
    ) -> None:
        """See `Actor` for the keyword arguments; `checkpoint` turns gradient checkpointing on."""
        Actor.__init__(
            self, self.load(True, pretrained, config, checkpoint, trust_remote_code), lora_rank, lora_train_bias, **kwargs
        )


class _FamilyCritic(_Family, Critic):
    def __init__(
        self,
        pretrained: str | None = None,
        config: Any = None,
        checkpoint: bool = False,
        lora_rank: int = 0,
        lora_train_bias: str = 'none',
        *,
        value_head: nn.Module | None = None,
        trust_remote_code: bool = False,
    ) -> None:
        """See `Critic`; `checkpoint` turns gradient checkpointing on."""
        model = self.load(False, pretrained, config, checkpoint, trust_remote_code)
        Critic.__init__(self, model, value_head, lora_rank, lora_train_bias)


class _FamilyRM(_Family, RewardModel):
    def __init__(
        self,
        pretrained: str | None = None,
        config: Any = None,
        checkpoint: bool = False,
        lora_rank: int = 0,
        lora_train_bias: str = 'none',
        *,
        value_head: nn.Module | None = None,
        trust_remote_code: bool = False,
    ) -> None:
        """See `RewardModel`; `checkpoint` turns gradient checkpointing on."""
        model = self.load(False, pretrained, config, checkpoint, trust_remote_code)
        RewardModel.__init__(self, model, value_head, lora_rank, lora_train_bias)


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
    """DeBERTa-v2 value model. It looks ahead: a value may depend on later tokens of the sequence."""


class DebertaRM(_Deberta, _FamilyRM):
    """DeBERTa-v2 reward model, read at the first token."""


class AutoActor(_Auto, _FamilyActor):
    """Policy of the family that the config names."""


class AutoCritic(_Auto, _FamilyCritic):
    """Value model of the family that the config names."""


class AutoRM(_Auto, _FamilyRM):
    """Reward model of the family that the config names."""
