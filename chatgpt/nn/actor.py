"""The policy: computes log-probs of given tokens with any Hugging Face causal LM or encoder-decoder.

The head is applied only to the hidden states of response positions, and in chunks, so that the logits of a whole batch
are never allocated. Everything that needs gradients or sharded weights is inside `forward`. Generation is in
`chatgpt.rollout`.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from chatgpt.functional.choices import LogprobKernel
from chatgpt.functional.logprobs import WithEntropy, entropy_graph, entropy_of, logprobs_of
from chatgpt.nn import hydra, lora
from chatgpt.nn.compiled import not_compiled
from chatgpt.nn.head_kernels import check_kernel, head_logprobs
from chatgpt.nn.heads import critic_head, head_outputs
from chatgpt.nn.layouts import layout_of
from chatgpt.nn.loading import Role, add_lora, check_given, load_causal_lm
from chatgpt.nn.own_head import head_is_linear, head_is_linear_by_form, own_logits
from chatgpt.nn.packing import (
    check_batch_independence,
    enable_packing,
    flat_hidden,
    of_all_actions,
    own_actions,
    rows_joined,
)
from chatgpt.nn.trunk import (
    base_model,
    hidden_size,
    is_meta,
    looks_ahead,
    run_trunk,
    text_config,
    use_fused_gelu,
)
from chatgpt.types import Batch


class PolicyOutput(NamedTuple):
    """Per-action results of a batch, flat: N is the number of actions of all its sequences."""

    logprobs: Tensor
    """(N,) fp32, log π(action | state) at the given temperature"""
    entropy: Tensor | None = None
    """(N,) fp32, in nats"""
    values: Tensor | None = None
    """(N,) fp32, if the actor has a value head"""
    logits: Tensor | None = None
    """(N, V) in the model's dtype, not divided by the temperature; only on request"""
    reference: PolicyOutput | None = None
    """output of a hydra's frozen branch on the same trunk; only on request"""
    value_logits: Tensor | None = None
    """(N, K) fp32, the outputs of the value head; K is 1 but for a `CategoricalHead`"""


class Actor(Role):
    """A policy over a causal LM, or over an encoder-decoder (`chatgpt.nn.layouts`).

    Args:
        model: a transformers causal LM or `AutoModelForSeq2SeqLM`.
        lora_rank: adapters of this rank on the blocks' linear layers; only they are trained. 0 trains everything.
        lora_train_bias: 'none', 'all' or 'lora_only'.
        value_head: None; True for a new linear head; or a module (..., D) → (..., 1). Values then come with the
            log-probs, from one trunk.
        lora_options: alpha, dropout and targets of `chatgpt.nn.lora.convert_to_lora`.
        num_layers_unfrozen: hydra: train only the top blocks; their frozen copies are the reference. None or −1 trains
            everything.

    Raises:
        ValueError: `model` is not a language model, or its logits do not follow from its last hidden state.
    """

    by_name = 'AutoActor(pretrained=NAME_OR_FOLDER)'
    build_options = (*Role.build_options, 'num_layers_unfrozen')
    _logprob_kernel: LogprobKernel = 'auto'

    def __init__(
        self,
        model: nn.Module,
        lora_rank: int = 0,
        lora_train_bias: str = 'none',
        *,
        value_head: bool | nn.Module | None = None,
        num_layers_unfrozen: int | None = None,
        lora_options: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        _check_causal(model)
        use_fused_gelu(model)
        self.model = model
        if value_head is True:
            value_head = critic_head(hidden_size(model))
        self.value_head = value_head or None
        if lora_rank and num_layers_unfrozen not in (None, -1):
            raise ValueError(
                'lora_rank and num_layers_unfrozen are two ways to share the trunk with the reference; choose one'
            )
        # True if the logits are the output layer applied to the last hidden state; None if not known yet.
        self._linear_head = (head_is_linear_by_form if is_meta(model) else head_is_linear)(self.model)
        enable_packing(base_model(model))
        check_batch_independence(base_model(model))
        add_lora(model, lora_rank, lora_train_bias, lora_options)
        if num_layers_unfrozen not in (None, -1):
            hydra.make_hydra(self, num_layers_unfrozen)

    @property
    def config(self) -> Any:
        """The transformers config."""
        return self.model.config

    # ------------------------------------------------------------------ forward

    def forward(
        self,
        batch: Batch,
        *,
        temperature: float = 1.0,
        with_entropy: WithEntropy = False,
        with_logits: bool = False,
        with_reference: bool = False,
        values_only: bool = False,
    ) -> PolicyOutput:
        """Computes log-probs of a batch's actions.

        Args:
            temperature: divides the logits; that of sampling.
            with_entropy: also the entropy of each action's distribution; 'detached' without gradients, for metrics.
            with_logits: also the (N, V) logits, not divided by the temperature; memory for them is not bounded.
            with_reference: also the output of a hydra's reference, from the same pass through the trunk, without
                gradients.
            values_only: values alone, with gradients of the value head and none of the trunk; `logprobs` is empty.
        """
        base = base_model(self.model)
        own = own_actions(base, batch)
        with (
            torch.set_grad_enabled(torch.is_grad_enabled() and not values_only),
            hydra.recorded_trunk(self) if with_reference else nullcontext() as record,
        ):
            states = flat_hidden(base, batch)[own.action_index]
        if values_only:
            values, value_logits = head_outputs(self.value_head, states)
            out = PolicyOutput(values.new_zeros(0), values=values, value_logits=value_logits)
            return of_all_actions(base, out, batch)
        out = self._output(states, own, temperature, with_entropy, with_logits)
        if with_reference:
            branch: Any = self.ref_branch
            with torch.no_grad():
                frozen = rows_joined(base, branch(record), batch)[own.action_index]
                with hydra.reference_branch(self):  # its head, where that is not tied
                    reference = self._output(frozen, own, temperature, False, with_logits, with_values=False)
            out = out._replace(reference=reference)
        return of_all_actions(base, out, batch)

    def _output(
        self,
        states: Tensor,
        batch: Batch,
        temperature: float,
        with_entropy: WithEntropy,
        with_logits: bool,
        with_values: bool = True,
    ) -> PolicyOutput:
        """Computes the output from the (N, D) states that predict the actions."""
        values = value_logits = None
        if with_values and self.value_head is not None:
            values, value_logits = head_outputs(self.value_head, states)
        if with_logits:
            logits = self.head(states)
            with entropy_graph(with_entropy):
                entropy = entropy_of(logits, temperature) if with_entropy else None
            logprobs = logprobs_of(logits, batch.action_ids, temperature)
            return PolicyOutput(logprobs, entropy, values, logits, value_logits=value_logits)
        vocab = text_config(self.model.config).vocab_size
        logprobs, entropy = head_logprobs(
            states,
            self.head,
            self.model.get_output_embeddings() if self._linear_head else None,
            batch.action_ids,
            kernel=self.logprob_kernel,
            vocab_size=vocab,
            temperature=temperature,
            with_entropy=with_entropy,
        )
        return PolicyOutput(logprobs, entropy, values, value_logits=value_logits)

    def trunk(
        self,
        input_ids: Tensor,
        *,
        position_ids: Tensor,
        attention_mask: Tensor | dict[str, Tensor] | None = None,
        cache: Any = None,
        **kwargs: Any,
    ) -> Tensor:
        """Returns hidden states (B, S, D), for engines. `cache` is a `Cache` of transformers, which the forward reads
        and extends; other keywords are passed to the model."""
        given: dict[str, Any] = {'position_ids': position_ids, 'attention_mask': attention_mask, 'cache': cache}
        with not_compiled():
            return run_trunk(base_model(self.model), input_ids, **given, **kwargs)

    def head(self, hidden: Tensor) -> Tensor:
        """Returns logits (..., V) of hidden states (..., D)."""
        if not self._linear_head:  # also if not known yet: the model's own forward is always right
            return own_logits(self.model, hidden)
        layer = self.model.get_output_embeddings()
        weight = getattr(layer, 'weight', None)
        if weight is not None and weight.dtype != hidden.dtype and not torch.is_autocast_enabled(hidden.device.type):
            hidden = hidden.to(weight.dtype)  # Mamba's trunk returns fp32 when its weights are in 16 bits
        return layer(hidden)

    @property
    def logprob_kernel(self) -> LogprobKernel:
        """The kernel of log-probs: 'auto', 'plain', 'fused' or 'liger' (`chatgpt.nn.head_kernels`)."""
        return self._logprob_kernel

    @logprob_kernel.setter
    def logprob_kernel(self, kernel: LogprobKernel) -> None:
        check_kernel(kernel, self.model.get_output_embeddings(), self._linear_head, type(self.model).__name__)
        self._logprob_kernel = kernel

    # ------------------------------------------------------------------ reference

    @property
    def has_reference(self) -> bool:
        """True if the actor can compute the reference itself, with its adapter off or a frozen branch."""
        return lora.has_lora(self) and not lora.trains_biases(self) or hydra.has_hydra(self)

    def reference(self) -> AbstractContextManager[Any]:
        """Inside this context the actor computes the reference: adapter off, or frozen top blocks instead of the
        trained ones."""
        if lora.has_lora(self):
            return lora.adapter_disabled(self)
        if hydra.has_hydra(self):
            return hydra.reference_branch(self)
        raise ValueError('this actor has no reference of its own: it has neither LoRA nor num_layers_unfrozen')

    def adapter_disabled(self) -> AbstractContextManager[Any]:
        """Inside this context LoRA adapters do not contribute."""
        return lora.adapter_disabled(self)

    @classmethod
    def _load(cls, pretrained: Any = None, config: Any = None, **options: Any) -> Any:
        return load_causal_lm(pretrained, config, **options)

    _build = __init__


def _check_causal(model: Any) -> None:
    check_given(model)
    name = type(model).__name__
    if getattr(model, 'get_output_embeddings', lambda: None)() is None:
        raise ValueError(
            f'an Actor needs a causal language model or an encoder-decoder with an output head; {name} has none'
        )
    layout_of(model).check(model.config, name)
    if looks_ahead(model):
        raise ValueError(
            f'an Actor needs a causal language model; {name} looks ahead (for BERT-like models set is_decoder in the '
            'config)'
        )
