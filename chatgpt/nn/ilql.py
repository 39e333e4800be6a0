"""A policy with the heads of implicit language Q-learning: V, Q over the vocabulary, and slowly moving copies of Q.

    hidden (…, D) ─ lm head ─▶ logits      π
                  ├ V head ───▶ V(s)
                  ├ Q heads ──▶ Q(s, ·)
                  └ target Q ─▶ Q̂(s, ·)    moved by `sync_targets`, never by an optimizer

Source: Snell et al. 2022, section 4; head shapes as in trlX (D → 2D → ReLU → out). The losses are in
`chatgpt.functional.ilql`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from chatgpt.functional.ilql import ilql_logits, min_q
from chatgpt.functional.logprobs import map_row_chunks, rows_per_chunk
from chatgpt.nn.actor import Actor
from chatgpt.nn.head_kernels import head_logprobs
from chatgpt.nn.heads import SeededLinear, in_fp32, mlp_head, set_state
from chatgpt.nn.loading import hub_options
from chatgpt.nn.packing import flat_hidden
from chatgpt.nn.tensor_files import Q_HEADS_FILE, check_fit, read_weights, save_tensors, stored_file
from chatgpt.nn.trunk import base_model, hidden_size, text_config
from chatgpt.types import Batch


class ILQLOutput(NamedTuple):
    """All (N,) fp32, of the actions of a batch."""

    logprobs: Tensor
    values: Tensor
    """V of the state before each action"""
    qs: list[Tensor]
    """Q of the action taken, per head"""
    q_losses: list[Tensor]
    """log Σ_v exp Q(s, v) − Q(s, a), per head"""
    target_q: Tensor
    """minimum of the target heads for the action taken, without gradient"""


def q_head(width: int, vocab_size: int) -> nn.Sequential:
    """width → 2 width → ReLU → vocab_size."""
    first = SeededLinear(width, 2 * width, 1 / math.sqrt(3 * width))
    return nn.Sequential(first, nn.ReLU(), SeededLinear(2 * width, vocab_size, 1 / math.sqrt(6 * width)))


class ILQLModel(Actor):
    """An `Actor` with ILQL's heads.

    Args:
        model: a transformers causal LM.
        two_qs: use two Q heads and the smaller of their values.

    Inside `decoding(beta)` an engine samples from the policy that the Q function has improved.
    """

    by_name = 'ILQLModel.from_pretrained(NAME_OR_FOLDER)'

    def __init__(self, model: nn.Module, *, two_qs: bool = True) -> None:
        super().__init__(model)
        width, vocab = hidden_size(model), text_config(model.config).vocab_size
        self.v_head = mlp_head(width)
        self.q_heads = nn.ModuleList(q_head(width, vocab) for _ in range(2 if two_qs else 1))
        self.target_q_heads = deepcopy(self.q_heads).requires_grad_(False)
        self.decoding_beta: float | None = None

    def forward(self, batch: Batch, **_: Any) -> ILQLOutput:  # type: ignore[override]
        """Computes the inputs of the losses in one pass through the trunk, without a whole (N, V) table."""
        states = flat_hidden(base_model(self.model), batch)[batch.action_index]
        vocab = text_config(self.model.config).vocab_size
        layer = self.model.get_output_embeddings() if self._linear_head else None
        logprobs = head_logprobs(
            states, super().head, layer, batch.action_ids, kernel=self.logprob_kernel, vocab_size=vocab
        )[0]
        chunk = rows_per_chunk(states, self.q_heads[0], vocab)

        def of_chunk(head: nn.Module) -> Any:
            def run(hidden: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
                table = _wide(head, hidden)
                taken = table.gather(-1, ids[:, None])[:, 0]
                return taken, table.logsumexp(-1) - taken

            return run

        found = [map_row_chunks(of_chunk(head), states, batch.action_ids, chunk_size=chunk) for head in self.q_heads]
        with torch.no_grad():
            targets = [
                map_row_chunks(of_chunk(h), states.detach(), batch.action_ids, chunk_size=chunk)[0]
                for h in self.target_q_heads
            ]
        return ILQLOutput(
            logprobs, in_fp32(self.v_head, states), [q for q, _ in found], [loss for _, loss in found], min_q(targets)
        )

    def head(self, hidden: Tensor) -> Tensor:
        """Returns the policy's logits; inside `decoding` log π + β (min target Q − V)."""
        logits = super().head(hidden)
        if self.decoding_beta is None:
            return logits
        target = min_q([_wide(head, hidden) for head in self.target_q_heads])
        return ilql_logits(logits, target, in_fp32(self.v_head, hidden), beta=self.decoding_beta)

    @property
    def changes_logits(self) -> bool:
        """True inside `decoding`: `head` then differs from the head of `model`, which `model.generate` uses."""
        return self.decoding_beta is not None

    @contextmanager
    def decoding(self, beta: float) -> Iterator[None]:
        """Inside this context `head` returns the logits that ILQL decodes from (Snell et al. 2022, section 5); the
        engine applies top-k and temperature."""
        before, self.decoding_beta = self.decoding_beta, beta
        try:
            yield
        finally:
            self.decoding_beta = before

    @torch.no_grad()
    def sync_targets(self, alpha: float) -> None:
        """target ← α Q + (1 − α) target (Polyak averaging), on the part of the heads that this rank holds."""
        for target, source in zip(self.target_q_heads.parameters(), self.q_heads.parameters(), strict=True):
            _local(target).lerp_(_local(source).to(_local(target).dtype), alpha)

    def _write(self, folder: str | Path, weights: Any, state: dict[str, Tensor], tokenizer: Any, dtype: Any) -> None:
        super()._write(folder, weights, state, tokenizer, dtype)
        heads = {n: t for n, t in state.items() if n.startswith(('v_head.', 'q_heads.', 'target_q_heads.'))}
        save_tensors(heads, Path(folder, Q_HEADS_FILE))

    @classmethod
    def from_pretrained(cls, folder: str | Path, *, two_qs: bool | None = None, **options: Any) -> ILQLModel:  # type: ignore[override]
        """Loads a folder or hub name of `save_pretrained` with its heads, or any causal LM with new heads."""
        base = cls._load(folder, **options)
        path = stored_file(folder, Q_HEADS_FILE, **hub_options(options))
        tensors = None if path is None else read_weights(path)
        if tensors is not None:
            two_qs = any(name.startswith('q_heads.1.') for name in tensors)
        model = cls(base, two_qs=two_qs is not False)
        if tensors is not None:
            own = {n: t for n, t in model.state_dict().items() if not n.startswith('model.')}
            misshaped = [(n, tensors[n].shape, t.shape) for n, t in own.items() if n in tensors]
            check_fit(
                model,
                lambda _: path,
                missing=own.keys() - tensors.keys(),
                unexpected=(),
                misshaped=[m for m in misshaped if m[1] != m[2]],
            )
            set_state(model, tensors)
        return model


def _wide(head: nn.Module, hidden: Tensor) -> Tensor:
    """Returns `head(hidden)` in fp32, also under autocast."""
    wide = torch.promote_types(hidden.dtype, torch.float32)
    with torch.autocast(device_type=hidden.device.type, enabled=False):
        weight = next(head.parameters())
        return head(hidden.to(weight.dtype)).to(wide)


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if hasattr(tensor, 'to_local') else tensor
