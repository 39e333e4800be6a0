"""FLOP of a PPO phase, counted from its modules; the device's measured peak at a matrix product; peak memory.

A token through a weight matrix of n numbers costs 2n FLOP (a multiplication and an addition each); its backward pass
costs 2n for the gradient of the activations and 2n for that of the weights (Kaplan et al. 2020, section 2.1), and
recomputation another 2n (Narayanan et al. 2021, section 5.1). N is the sum over the matrices inside the blocks, H =
vocabulary x width is the output head, which prompt positions never see. For each sequence of P prompt and A response
tokens:

    collect   2 N (P + A - 1) + 2 H A                             each token once, with a KV cache; the last is never fed
    score     2 (N_critic + N_initial + N_reward) (P + A) + 2 H A
              + 2 N (P + A) + 2 H A                               where the actor scores as well: its old log-probs are
                                                                  recomputed (16 bits), or it carries the values
    learn     E [2 N 3 (P + A) + 2 H 3 A]                         the actor
              + E 2 N 3 (P + A)                                   a critic of its own
              4 in place of 3 with gradient checkpointing (for H: where its chunks are recomputed)

E is the number of epochs over the phase. torch ends a block's recomputation at the last tensor that its backward pass
needs, so the block's last matrix is not multiplied a fourth time. With frozen weights (LoRA, hydra) the 3 splits into 1
for the forward pass, 1 for the activations' gradient from the lowest trained block up, and 1 for the trained weights.
Adapters are merged while generating. A reference that is the actor itself costs the same as a copy; a hydra's costs
only its branch where the actor scores anyway.

Not counted: attention scores (4 · length · width per block and token, a few per cent at 512 tokens), embeddings (a
lookup), norms, heads with one output, the optimizer. Counted though not computed: with LoRA, the gradient of the inputs
of the lowest block's first matrices. The count agrees with `torch.utils.flop_counter`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from harness import forget_peak, process_memory, wall_seconds

PARTS = ('collect', 'score', 'learn')


@dataclass(frozen=True)
class Matrices:
    """Sizes of the weight matrices of one model."""

    blocks: int
    """numbers inside the blocks, with adapters"""
    adapters: int = 0
    through: int = 0
    """numbers of matrices that get a gradient of their activations"""
    trained: int = 0
    spared: int = 0
    """of these, the last matrix of each block, which is not recomputed"""
    head: int = 0
    head_trained: bool = False

    def forward(self, tokens: int, heads: int = 0, *, merged: bool = False) -> int:
        """Returns the FLOP of a forward pass of `tokens` tokens, `heads` of them through the output head."""
        return 2 * (self.blocks - (self.adapters if merged else 0)) * tokens + 2 * self.head * heads

    def learn(self, tokens: int, heads: int = 0, *, checkpointing: bool = False, head_again: bool = False) -> int:
        """Returns the FLOP of a forward and a backward pass."""
        per_token = self.blocks + self.through + self.trained + (self.through - self.spared if checkpointing else 0)
        per_head = self.head * (2 + self.head_trained + head_again)
        return 2 * per_token * tokens + 2 * per_head * heads


def matrices(module: Any) -> Matrices:
    """Counts the matrices of a model before `prepare` shards it."""
    from chatgpt.nn import Actor, lora
    from chatgpt.strategies.streaming import transformer_blocks

    blocks = adapters = through = trained = spared = 0
    copies = {id(p) for m in module.modules() if getattr(m, 'is_reference_branch', False) for p in m.parameters()}
    for block in transformer_blocks(module):
        weights = [(n, p) for n, p in block.named_parameters() if p.dim() == 2 and id(p) not in copies]
        size = sum(p.numel() for _, p in weights)
        blocks += size
        trained += sum(p.numel() for _, p in weights if p.requires_grad)
        adapters += sum(layer.lora_A.numel() + layer.lora_B.numel() for layer in lora.lora_layers(block).values())
        if weights and (through or any(p.requires_grad for p in block.parameters())):
            through += size
            spared += weights[-1][1].numel()
    if not isinstance(module, Actor):
        return Matrices(blocks, adapters, through, trained, spared)
    head = module.model.get_output_embeddings().weight
    return Matrices(blocks, adapters, through, trained, spared, head.numel(), head.requires_grad)


@dataclass(frozen=True)
class Models:
    """The networks of a run; None for one that it does not have (a critic on the actor's trunk, a reward function)."""

    actor: Matrices
    critic: Matrices | None
    initial: Matrices | None
    reward: Matrices | None
    reference_is_actor: bool = False
    reference_branch: int = 0
    """hydra: numbers in the frozen copies of its top blocks, the cost of a reference where the policy runs anyway"""


def phase_flop(
    models: Models,
    *,
    sequences: int,
    prompt: int,
    response: int,
    passes: float,
    actor_scores: bool = False,
    checkpointing: bool = False,
    head_again: bool = False,
) -> dict[str, float]:
    """Returns the FLOP of each part of a phase, summed over ranks, by the formulas at the top of this file."""
    tokens = prompt + response
    actor = models.actor
    score = sum(m.forward(tokens) for m in (models.critic, models.reward) if m is not None)
    score += models.initial.forward(tokens, response) if models.initial is not None else 0
    if models.reference_branch and actor_scores:
        score += 2 * models.reference_branch * tokens + 2 * actor.head * response
    elif models.reference_is_actor:
        score += actor.forward(tokens, response, merged=True)
    score += actor.forward(tokens, response) if actor_scores else 0
    learn = actor.learn(tokens, response, checkpointing=checkpointing, head_again=head_again)
    learn += models.critic.learn(tokens, checkpointing=checkpointing) if models.critic is not None else 0
    return {
        'collect': float(sequences * actor.forward(tokens - 1, 0, merged=True) + sequences * 2 * actor.head * response),
        'score': float(sequences * score),
        'learn': passes * sequences * learn,
    }


# ---------------------------------------------------------------------- the device


def matmul_peak(device: Any, dtype: Any) -> float:
    """Returns the FLOP/s of the fastest of several square products of random matrices in `dtype`, with the process's
    TF32 setting."""
    import torch

    best = _best_product(device, dtype)
    if device.type == 'cuda':
        torch.cuda.empty_cache()
    return best


def _best_product(device: Any, dtype: Any) -> float:
    import torch

    on_cuda = device.type == 'cuda'
    side = (8192 if dtype.itemsize == 2 else 4096) if on_cuda else 768
    a, b = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    out, repeats = torch.empty(side, side, device=device, dtype=dtype), 10 if on_cuda else 1

    def products() -> None:
        for _ in range(repeats):
            torch.mm(a, b, out=out)

    wall_seconds(products, device)  # warm-up
    # About a second on a CPU: on a busy one a few products in a row may all have been interrupted.
    least = min(wall_seconds(products, device) for _ in range(7 if on_cuda else 50))
    return repeats * 2.0 * side**3 / least


class MemoryMeter:
    """Peak memory of this process since construction: torch's allocator on CUDA, resident memory on the host."""

    def __init__(self, device: Any) -> None:
        self.device = device
        self.restart_device()
        forget_peak()
        self.start = process_memory()

    def restart_device(self) -> None:
        """Resets the device's peak and keeps the host's."""
        import torch

        if self.device.type == 'cuda':
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self.device)

    def read(self) -> dict[str, int]:
        """Returns the peaks in bytes. `peak` is the device's: allocated on CUDA, resident above the start on a CPU."""
        import torch

        now = process_memory()
        host = {
            'host_peak': now.get('VmHWM', 0),
            'host_peak_over_start': now.get('VmHWM', 0) - self.start.get('VmRSS', 0),
            'host_anonymous': now.get('RssAnon', 0),
        }
        if self.device.type != 'cuda':
            return {'peak': host['host_peak_over_start'], **host}
        # resident memory excludes what cudaHostAlloc allocates, which older torch does not count
        pinned = torch.cuda.host_memory_stats() if hasattr(torch.cuda, 'host_memory_stats') else {}
        return {
            'peak': torch.cuda.max_memory_allocated(self.device),
            'reserved': torch.cuda.max_memory_reserved(self.device),
            'host_pinned': int(pinned.get('allocated_bytes.peak', 0)),
            **host,
        }
