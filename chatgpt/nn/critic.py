"""The value model: V of the state before each action."""

from __future__ import annotations

import json
from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from chatgpt.nn.heads import critic_head, head_outputs
from chatgpt.nn.loading import Role, add_lora, hub_options, load_base_model, load_config, trunk_of
from chatgpt.nn.packing import check_batch_independence, enable_packing, flat_hidden, of_all_actions, own_actions
from chatgpt.nn.trunk import causal_encoder_hidden, hidden_size, looks_ahead, use_fused_gelu
from chatgpt.types import Batch

if TYPE_CHECKING:
    from chatgpt.nn.reward_model import RewardModel


class Critic(Role):
    """A transformers base model with a value head.

    Args:
        model: a base model, or a causal LM, whose base model is used. A DeBERTa-v2 gets a causal attention mask.
        value_head: (..., D) → (..., 1), or a `CategoricalHead`; None makes a linear one that starts near zero.
        lora_rank, lora_train_bias, lora_options: as for `Actor`; the value head is always trained.

    Raises:
        ValueError: the attention of `model` is bidirectional and cannot be masked: a value must not depend on later
            tokens.
    """

    by_name = 'AutoCritic(pretrained=NAME_OR_FOLDER)'

    def __init__(
        self,
        model: nn.Module,
        value_head: nn.Module | None = None,
        lora_rank: int = 0,
        lora_train_bias: str = 'none',
        *,
        lora_options: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self.model = trunk_of(model)
        use_fused_gelu(self.model)
        self._cut = looks_ahead(self.model)
        if self._cut:
            known = self.model.config.model_type == 'deberta-v2'
            if not known or self.model.encoder.conv is not None or getattr(self.model, 'z_steps', 0) > 1:
                raise ValueError(
                    f'a Critic must not look ahead, and {type(self.model).__name__} does; '
                    'use a causal model, or DeBERTa-v2 without convolution'
                )
        enable_packing(self.model)
        if not self._cut:
            check_batch_independence(self.model)
        self.value_head = value_head if value_head is not None else critic_head(hidden_size(self.model))
        add_lora(self.model, lora_rank, lora_train_bias, lora_options)

    def forward(self, batch: Batch, *, with_logits: bool = False) -> Any:
        """Returns values (N,) fp32 of the states before each action of the batch.

        Args:
            with_logits: also return the outputs of the head, (N, K): (values, logits).
        """
        hidden = (causal_encoder_hidden if self._cut else flat_hidden)(self.model, batch)
        own = own_actions(self.model, batch)
        found = head_outputs(self.value_head, hidden[own.action_index])
        values, logits = of_all_actions(self.model, found, batch)
        return (values, logits) if with_logits else values

    @classmethod
    def from_reward_model(
        cls, reward_model: RewardModel, lora_rank: int = 0, *, value_head: nn.Module | None = None, **options: Any
    ) -> Critic:
        """Returns a critic that starts from a copy of a reward model, so V of a whole sequence is its score (arXiv
        2403.17031).

        The reward model's `score_bias` is folded into the head. Raises ValueError for a whole classifier, which has no
        separate head.

        Args:
            value_head: in place of the reward model's head.
            options: keywords of the constructor.
        """
        if reward_model.value_head is None:
            raise ValueError(
                'from_reward_model: this reward model is a whole classifier without a value head; build a new Critic'
            )
        head = _score_head(reward_model) if value_head is None else value_head
        critic = cls.__new__(cls)
        model = deepcopy(reward_model.model).requires_grad_(True)  # the reward model may be frozen
        Critic.__init__(critic, model, head, lora_rank, **options)
        return critic

    def _write(self, folder: str | Path, *given: Any) -> None:
        super()._write(folder, *given)
        path = Path(folder, 'config.json')
        stored = json.loads(path.read_text())
        if stored.pop('score_bias', None) is not None:  # folded into the head
            path.write_text(json.dumps(stored, indent=2, sort_keys=True) + '\n')

    @classmethod
    def from_pretrained(cls, folder: str | Path, *, value_head: nn.Module | None = None, **options: Any) -> Critic:
        """Loads a folder as `Role.from_pretrained`, that of a reward model with a head as `from_reward_model`."""
        from chatgpt.nn.reward_model import RewardModel, is_scorer, scores_one

        hub = hub_options(options)
        config = load_config(folder, trust_remote_code=options.get('trust_remote_code', False), **hub)
        if value_head is None and is_scorer(folder, config, **hub) and scores_one(config):
            own = {name: options.pop(name) for name in cls.build_options if name in options}
            if (check := getattr(cls, 'check_family', None)) is not None:
                check(folder, None, {k: v for k, v in options.items() if k != 'checkpoint'})
            scorer = RewardModel.from_pretrained(folder, **options)
            if scorer.value_head is not None:
                return cls.from_reward_model(scorer, own.pop('lora_rank', 0), **own)
            options |= own
        return super().from_pretrained(folder, value_head=value_head, **options)  # type: ignore[no-any-return]

    @classmethod
    def _load(cls, pretrained: Any = None, config: Any = None, **options: Any) -> Any:
        return load_base_model(pretrained, config, **options)

    _build = __init__


def _score_head(reward_model: RewardModel) -> Any:
    """Returns a copy of a reward model's head, with `score_bias` subtracted from its last bias."""
    head: Any = deepcopy(reward_model.value_head).requires_grad_(True)  # type: ignore[union-attr]
    last: Any = next((part for part in reversed(list(head.modules())) if isinstance(part, nn.Linear)), None)
    kept: dict[str, Tensor] = getattr(reward_model, 'initial_state', {})
    shift = kept.get('score_bias', torch.zeros(())) if reward_model.score_bias.is_meta else reward_model.score_bias
    if float(shift) != 0:
        if last is None:
            raise ValueError(f'from_reward_model: {type(head).__name__} has no linear layer for the score bias')
        if last.bias is None:
            last.bias = nn.Parameter(last.weight.new_zeros(last.out_features))
        with torch.no_grad():
            bias = last.initial_state['bias'] if last.bias.is_meta else last.bias
            bias.sub_(shift)
    return head
