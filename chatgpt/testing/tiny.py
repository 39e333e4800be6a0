"""A tiny policy and batches of sequences for it, to test strategies. Deterministic, with torch alone."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn

from chatgpt.batching import collate, micro_batches
from chatgpt.types import Batch, Sequence

VOCAB = 13


class TinyBlock(nn.Module):
    """x + W2 tanh(W1 norm(x)), x (..., D)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class TinyPolicy(nn.Module):
    """A policy with tied embeddings and a persistent buffer; `forward(batch)` returns log-probs of actions, (N,) fp32.

    Its width is odd, so that tensors cannot be split equally over two ranks. Each state depends on its own token and on
    the mean of all tokens up to it.
    """

    _tp_plan: ClassVar[dict[str, str]] = {
        'blocks.*.norm': 'replicate',
        'blocks.*.up': 'colwise',
        'blocks.*.down': 'rowwise',
        'embed': 'embedding_rowwise',
        'head': 'colwise_gather_output',
    }
    """the plan of tensor parallelism, as in transformers"""

    def __init__(self, width: int = 7, num_blocks: int = 2, seed: int = 0) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.embed = nn.Embedding(VOCAB, width)
            self.blocks = nn.ModuleList(TinyBlock(width) for _ in range(num_blocks))
            self.norm = nn.LayerNorm(width)
            self.head = nn.Linear(width, VOCAB, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer('temperature', torch.tensor([1.25]))

    def forward(self, batch: Batch) -> Tensor:
        x = self.embed(batch.input_ids)
        seen = torch.arange(1, x.shape[1] + 1, device=x.device, dtype=x.dtype).view(1, -1, 1)
        x = x + x.cumsum(1) / seen
        for block in self.blocks:
            x = block(x)
        states = self.norm(x).flatten(0, 1)[batch.action_index]
        logits = self.head(states).float() / self.temperature.float()
        return logits.log_softmax(-1).gather(-1, batch.action_ids[:, None]).squeeze(-1)


def tiny_sequences(num: int = 8, seed: int = 0) -> list[Sequence]:
    """Returns sequences of 1 to 3 prompt tokens and 1 to 9 response tokens, some of them masked out."""
    generator = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int, *size: int) -> Tensor:
        return torch.randint(low, high, size, generator=generator)

    sequences = []
    for number in range(num):
        length = 1 + (5 * number + int(draw(0, 3))) % 9
        mask = draw(0, 5, length) > 0
        mask[-1] = True
        sequences.append(
            Sequence(prompt_ids=draw(0, VOCAB, 1 + number % 3), response_ids=draw(0, VOCAB, length), response_mask=mask)
        )
    return sequences


def tiny_micro_batches(
    sequences: list[Sequence], rank: int = 0, world_size: int = 1, max_tokens: int | None = None
) -> list[tuple[Batch, Tensor]]:
    """Returns this rank's micro-batches as (batch, weights), weights (N,) fp32 with sum 1 over ranks and micro-batches.

    All ranks have equally many; a rank with less data has dummy batches of weight 0.
    """
    num_valid = sum(int(s.response_mask.sum()) for s in sequences)
    lengths = [s.num_tokens for s in sequences]
    batches = []
    for cut in micro_batches(lengths, world_size, max_tokens)[rank]:
        batch = collate([sequences[i] for i in cut])
        batches.append((batch, batch.action_mask.float() / num_valid))
    return batches


def tiny_loss(logprobs: Tensor, weights: Tensor) -> Tensor:
    """Returns this micro-batch's share of the mean negative log-likelihood."""
    return -(logprobs * weights).sum()
