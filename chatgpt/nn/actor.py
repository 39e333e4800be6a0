"""The policy: any Hugging Face causal LM, asked for log-probs of given tokens.

Hidden states of the response positions go through the head in chunks, so logits of a whole batch never exist, and prompt
positions never see the head. Everything that needs gradients or sharded weights happens inside `forward`.

Left out: generation (`chatgpt.rollout`), losses.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from chatgpt.functional.logprobs import chunked_logprobs
from chatgpt.nn import hydra, lora
from chatgpt.nn.heads import critic_head, in_fp32
from chatgpt.nn.loading import write_folder
from chatgpt.nn.output import PolicyOutput
from chatgpt.nn.own_head import head_is_linear, own_logits
from chatgpt.nn.trunk import base_model, flat_hidden, hidden_size, is_meta, run_trunk, text_config
from chatgpt.types import Batch

VALUE_HEAD_FILE = 'value_head.safetensors'


class Actor(nn.Module):
    """A policy over a causal LM.

    Args:
        model: a transformers causal LM.
        lora_rank: adapters of this rank on the blocks' linear layers; only they are trained. 0 trains everything.
        lora_train_bias: 'none', 'all' or 'lora_only'.
        value_head: None; True for a new linear head; or a module (..., D) → (..., 1). Values then come with the log-probs, from one trunk.
        num_layers_unfrozen: hydra: train only the top blocks; their frozen copies are the reference. None or −1 trains everything.

    Raises:
        ValueError: `model` is no causal LM.
    """

    model: Any  # transformers' PreTrainedModel, whose attributes nn.Module does not know

    def __init__(
        self,
        model: nn.Module,
        lora_rank: int = 0,
        lora_train_bias: str = 'none',
        *,
        value_head: bool | nn.Module | None = None,
        num_layers_unfrozen: int | None = None,
    ) -> None:
        super().__init__()
        if getattr(model, 'get_output_embeddings', lambda: None)() is None:
            raise ValueError(f'an Actor needs a causal language model with an output head; {type(model).__name__} has none')
        self.model = model
        if value_head is True:
            value_head = critic_head(hidden_size(model))
        self.value_head: nn.Module | None = value_head or None
        self._linear_head: bool | None = None
        if lora_rank and num_layers_unfrozen not in (None, -1):
            raise ValueError('lora_rank and num_layers_unfrozen are two ways to share the trunk with the reference; choose one')
        if lora_rank:
            lora.convert_to_lora(model, lora_rank, bias=lora_train_bias)  # type: ignore[arg-type]
        if num_layers_unfrozen not in (None, -1):
            hydra.make_hydra(self, num_layers_unfrozen)
        if not is_meta(model):
            self.check_head()

    # ------------------------------------------------------------------ forward

    def forward(
        self, batch: Batch, *, temperature: float = 1.0, with_entropy: bool = False, with_logits: bool = False
    ) -> PolicyOutput:
        """Log-probs of a batch's actions.

        Args:
            temperature: divides the logits; the one the tokens were sampled with.
            with_entropy: also the entropy of each action's distribution.
            with_logits: also the (N, V) logits; memory for them is not bounded.
        """
        states = flat_hidden(base_model(self.model), batch)[batch.action_index]
        values = None if self.value_head is None else in_fp32(self.value_head, states)
        vocab = text_config(self.model).vocab_size
        logprobs, entropy = chunked_logprobs(
            states, self.head, batch.action_ids, temperature=temperature, with_entropy=with_entropy, vocab_size=vocab
        )
        return PolicyOutput(logprobs, entropy, values, self.head(states) if with_logits else None)

    def trunk(self, input_ids: Tensor, *, position_ids: Tensor, attention_mask: Tensor | None = None, **kwargs: Any) -> Tensor:
        """Hidden states (B, S, D); `past_key_values` and the like go to the model."""
        return run_trunk(base_model(self.model), input_ids, position_ids=position_ids, attention_mask=attention_mask, **kwargs)

    def head(self, hidden: Tensor) -> Tensor:
        """Logits (..., V) of hidden states (..., D)."""
        if self._linear_head is None:
            self.check_head()
        return self.model.get_output_embeddings()(hidden) if self._linear_head else own_logits(self.model, hidden)

    def check_head(self) -> None:
        """Find out on a few tokens whether the output layer alone gives the model's logits; else its own head is used."""
        self._linear_head = head_is_linear(self.model)

    # ------------------------------------------------------------------ reference

    @property
    def has_reference(self) -> bool:
        """Whether the actor can serve as its own reference."""
        return lora.has_lora(self) or hydra.has_hydra(self)

    def reference(self) -> AbstractContextManager[Any]:
        """Inside, the actor computes the reference: adapter off, or the frozen top blocks in place of the trained ones."""
        if lora.has_lora(self):
            return lora.adapter_disabled(self)
        if hydra.has_hydra(self):
            return hydra.reference_branch(self)
        raise ValueError('this actor has no reference of its own: it has neither LoRA nor num_layers_unfrozen')

    def adapter_disabled(self) -> AbstractContextManager[Any]:
        """Inside, LoRA adapters do not contribute."""
        return lora.adapter_disabled(self)

    # ------------------------------------------------------------------ files

    @torch.no_grad()
    def save_pretrained(self, folder: str | Path, tokenizer: Any = None, *, state_dict: dict[str, Tensor] | None = None) -> None:
        """A Hugging Face folder that `AutoModelForCausalLM` loads; adapters folded in, the value head beside it.

        Args:
            state_dict: full weights by this module's parameter names, when they do not lie in the module itself.
        """
        weights = lora.merged_state_dict(self.model) if lora.has_lora(self.model) else None
        if state_dict is not None:
            if lora.has_lora(self.model):
                raise ValueError('save_pretrained with given weights cannot fold adapters in; merge them first')
            weights = {k.removeprefix('model.'): v for k, v in state_dict.items() if k.startswith('model.')}
        write_folder(self.model, folder, weights)
        if self.value_head is not None:
            from safetensors.torch import save_file

            full = state_dict or self.state_dict()
            head = {k.removeprefix('value_head.'): v.contiguous() for k, v in full.items() if k.startswith('value_head.')}
            save_file(head, Path(folder, VALUE_HEAD_FILE))
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)

    @classmethod
    def from_pretrained(cls, folder: str | Path, **kwargs: Any) -> Actor:
        """An actor from a folder that `save_pretrained` wrote, or from any causal LM."""
        from chatgpt.nn.loading import load_causal_lm

        model = load_causal_lm(str(folder))
        head_file = Path(folder, VALUE_HEAD_FILE)
        if head_file.is_file() and 'value_head' not in kwargs:
            from safetensors.torch import load_file

            kwargs['value_head'] = head = critic_head(hidden_size(model))
            head.load_state_dict(load_file(head_file))
        return cls(model, **kwargs)
