"""Where the time of our side goes, beside the floor of its matrix products: the page behind `vs_peers.py --profile`."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from work import PROMPT_TOKENS, SEQUENCES, VOCAB, Case

LAYERS, WIDTH = 4, 256
GROUPS: dict[str, tuple[str, ...]] = {
    'matrix products': ('aten::addmm', 'aten::mm', 'aten::bmm', 'aten::baddbmm', 'mkldnn::_linear_pointwise', 'aten::mkldnn_linear'),
    'attention': ('scaled_dot_product',),
    'GELU': ('_NewGELU', 'aten::gelu', 'aten::tanh', 'aten::pow'),
    'layer norm': ('layer_norm',),
    'AdamW': ('adamw',),
}
CASES = (('fixed', 'fp32'), ('eos', 'fp32'), ('fixed', 'bf16'), ('eos', 'bf16'))


def cpu_seconds(act: Callable[[], Any]) -> float:
    start = time.process_time()
    act()
    return time.process_time() - start


def products_per_s(dtype: Any) -> float:
    """FLOP/s of a bare product of an MLP layer's shape."""
    import torch

    x, w, b = (torch.randn(*s, dtype=dtype) for s in ((2048, WIDTH), (WIDTH, 4 * WIDTH), (4 * WIDTH,)))
    torch.addmm(b, x, w)
    best = min(cpu_seconds(lambda: [torch.addmm(b, x, w) for _ in range(20)]) for _ in range(5))
    return 20 * 2 * x.numel() * 4 * WIDTH / best


def product_flop(new_tokens: int, recompute: bool) -> float:
    """Of one PPO update with four networks and one epoch: products only, no padding, no head on prompt positions."""
    tokens, trunk, head = SEQUENCES * PROMPT_TOKENS + new_tokens, 2 * 12 * LAYERS * WIDTH**2, 2 * WIDTH * VOCAB
    scored = 3 + recompute  # reference, critic, reward model, and in 16 bits the policy
    passes = 1 + scored + 2 * 3  # the decode, and forward with a backward of twice that for policy and critic
    heads = 1 + 1 + recompute + 3
    return passes * tokens * trunk + heads * new_tokens * head


def profiled(update: Callable[[], Any]) -> tuple[dict[str, float], str]:
    """Shares of self time by group, and torch's own table."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU]) as prof:
        update()
    events = prof.key_averages()
    total = sum(e.self_cpu_time_total for e in events)
    shares = dict.fromkeys(GROUPS, 0.0)
    for event in events:
        for group, names in GROUPS.items():
            if any(name in event.key for name in names):
                shares[group] += event.self_cpu_time_total / total
                break
    shares['everything else'] = 1 - sum(shares.values())
    return shares, events.table(sort_by='self_cpu_time_total', row_limit=12, max_name_column_width=48)


def bound(results: Path, case: Case, tokens: float, floor: float) -> str:
    """What the floor would be against the peer as measured, if it was."""
    measured = results / case.file_name
    if not measured.exists():
        return ''
    result = json.loads(measured.read_text())
    most = tokens / floor / result['theirs']['new_tokens_per_cpu_s']
    return f' Measured beside TRL: {result["ratio_total"]:.2f} times; with nothing but the products it would be {most:.2f}.'


def write_profile(path: Path, folders: dict[str, str], results: Path) -> None:
    import ours
    import torch

    torch.set_num_threads(1)
    parts = [HEAD]
    for lengths, precision in CASES:
        case = Case('trl_ppo', 'ppo', lengths, precision, model=folders[lengths])
        trainer = ours.make_trainer(case)
        for _ in range(2):
            ours.update(trainer)
        done, cpu = [], []
        for _ in range(5):
            start = time.process_time()
            done.append(ours.update(trainer))
            cpu.append(time.process_time() - start)
        tokens = sum(d[0] for d in done) / len(done)
        seconds = {p: sum(d[2][f'perf/{p}_cpu_s'] for d in done) / len(done) for p in ('collect', 'score', 'learn')}
        rate = products_per_s(torch.bfloat16 if precision == 'bf16' else torch.float32)
        floor = product_flop(int(tokens), trainer.maker.settings.recompute_logprobs) / rate
        shares, table = profiled(partial(ours.update, trainer))
        mean = sum(cpu) / len(cpu)
        rows = '\n'.join(f'| {name} | {share:.0%} | {share * mean:.2f} |' for name, share in shares.items())
        body = '\n'.join(line[:132].rstrip() for line in table.splitlines() if not line.startswith('USDT'))
        parts.append(
            f'## {lengths}, {precision}\n\n{tokens:.0f} new tokens per update; CPU seconds: '
            + ', '.join(f'{name} {s:.2f}' for name, s in seconds.items())
            + f', together {mean:.2f}. The matrix products alone, at the {rate / 1e9:.0f} GFLOP/s of a bare `addmm`, are {floor:.2f}.'
            + bound(results, case, tokens, floor)
            + '\n\n'
            f'| part | share | CPU s |\n|---|---|---|\n{rows}\n\n```\n{body}\n```\n'
        )
    path.write_text('\n'.join(parts))


HEAD = """# Where an update's time goes

`python benchmarks/vs_peers.py --profile docs/results/peers_profile.md`: our side of [peers.md](peers.md), PPO with four networks, one
epoch, one thread. Shares are self times under torch.profiler, turned into seconds of an update without it. The floor counts what the
method cannot do without: one pass of the tokens in the decode, one of reference, critic and reward model, forward and backward of policy
and critic (in bf16 one more forward for the old log-probs), without padding, at the speed of one large bare product.
"""
