"""Where the time of our side goes, beside the floor of its matrix products: the page behind `vs_peers.py --profile`."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from work import PROMPT_TOKENS, SEQUENCES, VOCAB, Case

LAYERS, WIDTH = 4, 256
GROUPS: dict[str, tuple[str, ...]] = {
    'matrix products': (
        'aten::addmm',
        'aten::mm',
        'aten::bmm',
        'aten::baddbmm',
        'mkldnn::_linear_pointwise',
        'aten::mkldnn_linear',
    ),
    'attention': ('scaled_dot_product',),
    'GELU': ('_NewGELU', 'aten::gelu', 'aten::tanh', 'aten::pow'),
    'layer norm': ('layer_norm',),
    'AdamW': ('adamw',),
}


PARTS = ('collect', 'score', 'learn')
REST = 'everything else'


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


def product_flop(case: Case, new_tokens: float, recompute: bool) -> float:
    """Of one update: products only, no padding, no head on prompt positions, the prompt of a group once in the
    decode."""
    tokens, trunk, head = SEQUENCES * PROMPT_TOKENS + new_tokens, 2 * 12 * LAYERS * WIDTH**2, 2 * WIDTH * VOCAB
    # Value network and reward model of four; of a shared trunk the policy's pass for the values, which gives old
    # log-probs as well.
    scored = 2 if case.peer == 'trl_ppo' else 1 if case.peer == 'trl_classic' else 0
    scored += (recompute and case.peer != 'trl_classic') + case.kl
    networks = 2 if case.peer == 'trl_ppo' else 1
    passes = scored + networks * 3 * case.epochs  # a backward is two forwards
    heads = 1 + case.kl + recompute + 3 * case.epochs
    return (case.num_prompts * PROMPT_TOKENS + new_tokens + passes * tokens) * trunk + heads * new_tokens * head


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
    shares[REST] = 1 - sum(shares.values())
    return shares, events.table(sort_by='self_cpu_time_total', row_limit=12, max_name_column_width=48)


@dataclass(frozen=True)
class Spent:
    """What a case's update takes on our side, in CPU seconds."""

    case: Case
    tokens: float
    parts: dict[str, float]
    total: float
    rate: float
    floor: float
    shares: dict[str, float]
    table: str
    measured: dict[str, Any] | None
    """what `vs_peers.py` wrote of this case"""

    @property
    def most(self) -> float | None:
        """The ratio that nothing but the products would have."""
        return self.tokens / self.floor / self.measured['theirs']['new_tokens_per_cpu_s'] if self.measured else None

    def row(self) -> str:
        beside = f'{self.measured["ratio_total"]:.2f} | {self.most:.2f}' if self.measured else '|'
        return (
            f'| {self.case.name} | {self.total:.2f} | '
            + ' | '.join(f'{self.parts[part]:.2f}' for part in PARTS)
            + f' | {self.floor:.2f} | '
            + ' | '.join(f'{self.shares[name]:.0%}' for name in (*GROUPS, REST))
            + f' | {beside} |\n'
        )

    def section(self) -> str:
        rows = '\n'.join(f'| {name} | {share:.0%} | {share * self.total:.2f} |' for name, share in self.shares.items())
        body = '\n'.join(line[:132].rstrip() for line in self.table.splitlines() if not line.startswith('USDT'))
        beside = ''
        if self.measured:
            beside = f' Measured beside TRL: {self.measured["ratio_total"]:.2f} times; with nothing but the products: {self.most:.2f}.'
        return (
            f'## {self.case.name}\n\n{self.tokens:.0f} new tokens per update; CPU seconds: '
            + ', '.join(f'{name} {s:.2f}' for name, s in self.parts.items())
            + f', together {self.total:.2f}. The matrix products alone, at the {self.rate / 1e9:.0f} GFLOP/s of a bare `addmm`, are '
            + f'{self.floor:.2f}.{beside}\n\n| part | share | CPU s |\n|---|---|---|\n{rows}\n\n```\n{body}\n```\n'
        )


def spend(case: Case, results: Path, updates: int = 3) -> Spent:
    import ours
    import torch

    trainer = ours.make_trainer(case)
    for _ in range(2):
        ours.update(trainer)
    done, cpu = [], []
    for _ in range(updates):
        start = time.process_time()
        done.append(ours.update(trainer))
        cpu.append(time.process_time() - start)
    tokens = sum(d[0] for d in done) / len(done)
    parts = {p: sum(d[2][f'perf/{p}_cpu_s'] for d in done) / len(done) for p in PARTS}
    rate = products_per_s(torch.bfloat16 if case.precision == 'bf16' else torch.float32)
    floor = product_flop(case, tokens, trainer.maker.settings.recompute_logprobs) / rate
    shares, table = profiled(partial(ours.update, trainer))
    measured = results / case.file_name
    known = json.loads(measured.read_text()) if measured.exists() else None
    return Spent(case, tokens, parts, sum(cpu) / len(cpu), rate, floor, shares, table, known)


def write_profile(path: Path, cases: Iterable[Case], results: Path) -> None:
    """A row for every case in which our side computes in `fp32` or `bf16`, and torch's own table for those of one epoch
    with a KL."""
    import torch

    torch.set_num_threads(1)
    spent = []
    for case in cases:
        spent.append(spend(case, results))
        print(spent[-1].row(), end='', flush=True)
    titles = ['case', 'CPU s', *PARTS, 'floor', *GROUPS, REST, 'beside TRL', 'at the floor']
    head = f'| {" | ".join(titles)} |\n|{"---|" * len(titles)}\n'
    sections = [s.section() for s in spent if s.case.epochs == 1 and s.case.kl]
    path.write_text('\n'.join([HEAD, head + ''.join(s.row() for s in spent), *sections]))


HEAD = """# Where an update's time goes

`python benchmarks/vs_peers.py --only 1 --without no --profile docs/results/peers_profile.md`: our side of [peers.md](peers.md), one thread.
Shares are self times under torch.profiler of one update; CPU seconds are the mean of three without it. The floor counts what a method
cannot do without, at the speed of one large bare product: one pass of the tokens in the decode (a group's prompt once), one of each frozen
model that scores, of the value network, and in bf16 of the policy for the old log-probs; forward and backward of what is trained, per
epoch; the head on response tokens only; no padding. "At the floor" is the ratio to TRL that nothing but these products would have.
"Beside TRL" and TRL's speed are of the runs behind peers.md: where the machine is slower today than it was then, "at the floor" is too low.
"""
