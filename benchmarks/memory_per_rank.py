"""What one rank holds of a trained model under each strategy: bytes of weights, gradients and optimizer states, and the process's peak.

    python benchmarks/memory_per_rank.py [--out docs/results/memory_per_rank.md] [--world_sizes 1 2 4]

A GPT-2 of 8 layers x 512 (26 million parameters, fp32 masters), one AdamW step on the CPU with gloo. Held bytes are counted from tensors
alive after the backward pass, on the rank that holds most; `peak RSS over start` is the process's highest resident memory minus that before
the model was built, so it includes activations and buffers of the moment.
"""

from __future__ import annotations

import argparse
import gc
import resource
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
STRATEGIES: dict[str, tuple[str, dict[str, Any]]] = {
    'ddp': ('DDPStrategy', {'device': 'cpu'}),
    'fsdp': ('FSDPStrategy', {'device': 'cpu', 'meta_init': True}),
    'colossalai_zero1': ('ColossalAIStrategy', {'stage': 1, 'precision': 'bf16'}),
    'colossalai_zero2': ('ColossalAIStrategy', {'stage': 2, 'precision': 'bf16'}),
    'colossalai_gemini': ('ColossalAIStrategy', {'stage': 3, 'precision': 'bf16', 'search_range_mb': 1, 'min_chunk_size_mb': 1}),
}


def local_bytes(tensors: Any) -> int:
    """Bytes of what this process holds of some tensors, each storage once."""
    seen: dict[int, int] = {}
    for tensor in tensors:
        local = tensor.to_local() if hasattr(tensor, 'to_local') else tensor
        storage = local.untyped_storage()
        seen[storage.data_ptr()] = storage.nbytes()
    return sum(seen.values())


def measure(kind: str, options: dict[str, Any]) -> dict[str, float]:
    import torch
    from transformers import GPT2Config

    from chatgpt.batching import collate
    from chatgpt.nn import GPTActor
    from chatgpt.trainer import strategies as s
    from chatgpt.types import Sequence

    strategy: Any = getattr(s, kind)(seed=0, **options)
    with strategy:
        start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        config = GPT2Config(
            vocab_size=2048, n_positions=64, n_embd=512, n_layer=8, n_head=8, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0
        )
        with strategy.model_init_context():
            actor = GPTActor(config=config)
        optimizer = strategy.make_optimizer(actor.parameters(), lr=1e-4)
        actor, optimizer = strategy.prepare((actor, optimizer))
        ids = torch.arange(32) % 2048
        batch = collate([Sequence(prompt_ids=ids[:2], response_ids=ids, response_mask=torch.ones(32, dtype=torch.bool))])
        for last_step in (False, True):
            with strategy.accumulate(actor, last=True):
                with strategy.autocast():
                    loss = -actor(batch).logprobs.sum() / (32 * strategy.world_size)
                strategy.backward(loss, actor, optimizer)
            if not last_step:
                strategy.optimizer_step(optimizer)
        del loss
        gc.collect()
        tensors = [
            t for t in gc.get_objects() if isinstance(t, torch.Tensor) and t.device.type == 'cpu' and t.is_floating_point()
        ]
        tensors += [t.grad for t in tensors if t.is_leaf and t.grad is not None]
        held = local_bytes(tensors)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return {'held_mib': held / 2**20, 'peak_mib': (peak - start) / 1024}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--out', type=Path, default=ROOT / 'docs' / 'results' / 'memory_per_rank.md')
    parser.add_argument('--world_sizes', type=int, nargs='+', default=[1, 2, 4])
    args = parser.parse_args()
    from chatgpt.testing.processes import run_distributed

    header = ['strategy', *(f'{w} rank{"s" * (w > 1)}: held MiB (peak RSS over start)' for w in args.world_sizes)]
    lines = [
        '# Memory per rank',
        '',
        '`python benchmarks/memory_per_rank.py`. ' + ' '.join((__doc__ or '').split('\n\n')[2].split()),
        '',
    ]
    lines += ['| ' + ' | '.join(header) + ' |', '|---' * len(header) + '|']
    for name, (kind, options) in STRATEGIES.items():
        cells = []
        for world_size in args.world_sizes:
            ranks = run_distributed(measure, world_size, kind, options, timeout_s=300.0)
            cells.append(f'{max(r["held_mib"] for r in ranks):.0f} ({max(r["peak_mib"] for r in ranks):.0f})')
        lines.append(f'| {name} | ' + ' | '.join(cells) + ' |')
        print(lines[-1], flush=True)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text('\n'.join(lines) + '\n')


if __name__ == '__main__':
    main()
