"""What recording sequences costs: a phase with it beside the next one without, in one run, and the recorder's own hooks.

    python benchmarks/rollouts_cost.py [--phases 60] [--out docs/results/rollouts_cost.md]

Every second phase is recorded. Of both kinds, wall and CPU seconds from the start of collecting to the end of the
phase's hooks; the difference of neighbours is paired, because other work on the machine moves every number. The
recorder's hooks are timed in addition, by themselves: that share is what the noise of a phase cannot hide.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import tempfile
import time
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from chatgpt.dataset import embedded
from chatgpt.nn import GPTActor, GPTCritic
from chatgpt.testing import byte_tokenizer
from chatgpt.trainer import PPOTrainer
from chatgpt.trainer.callbacks import ProgressBar, RolloutRecorder
from chatgpt.trainer.strategies import NaiveStrategy

LIMIT = 0.02
WARM_UP = 4
"""phases that are not counted: the first imports pyarrow"""


@dataclass
class Clock:
    """Wall and CPU seconds, of this process with all its threads."""

    wall: float = 0.0
    cpu: float = 0.0

    def __enter__(self) -> Clock:
        self._at = time.perf_counter(), time.process_time()
        return self

    def __exit__(self, *_: Any) -> None:
        self.wall += time.perf_counter() - self._at[0]
        self.cpu += time.process_time() - self._at[1]


@dataclass
class Phase:
    recorded: bool
    whole: Clock = field(default_factory=Clock)
    hooks: Clock = field(default_factory=Clock)


class Timed(RolloutRecorder):
    """Times its own hooks, and phases from their start to behind its last hook."""

    order = 1000  # after all others, so that the whole phase is behind it

    def __init__(self) -> None:
        super().__init__(every=2)
        self.phases: list[Phase] = []
        self.first_ms = 0.0

    def on_make_experience_start(self, trainer: Any) -> None:
        self.phases.append(Phase(recorded=(trainer.phase + 1) % 2 == 0))
        self.phases[-1].whole.__enter__()

    def on_learn_epoch_start(self, trainer: Any, epoch: int) -> None:
        with self.phases[-1].hooks:
            super().on_learn_epoch_start(trainer, epoch)

    def on_policy_output(self, trainer: Any, batch: Any, output: Any) -> None:
        with self.phases[-1].hooks:
            super().on_policy_output(trainer, batch, output)

    def on_learn_epoch_end(self, trainer: Any, epoch: int) -> None:
        with self.phases[-1].hooks:
            super().on_learn_epoch_end(trainer, epoch)

    def on_phase_end(self, trainer: Any, step: int, metrics: dict[str, float]) -> None:
        with self.phases[-1].hooks:
            super().on_phase_end(trainer, step, metrics)
        self.phases[-1].whole.__exit__()
        if step == 1:
            self.first_ms = 1e3 * self.phases[-1].hooks.wall


CASES: dict[str, dict[str, Any]] = {
    'tiny: the demo, 64 responses of 32 tokens': {'experience_batch_size': 64, 'max_new_tokens': 32},
    'small: 4 layers x 128, 32 responses of 64 tokens': {'experience_batch_size': 32, 'max_new_tokens': 64},
    'small, groups: 4 layers x 128, 8 prompts of 4 responses of 128 tokens': {
        'experience_batch_size': 8,
        'num_samples_per_prompt': 4,
        'max_new_tokens': 128,
    },
}


def run(name: str, phases: int, folder: Path) -> Timed:
    """`phases` counted phases of the case."""
    torch.manual_seed(0)
    if name.startswith('tiny'):
        config, tokenizer = embedded.demo_config(), embedded.demo_tokenizer()
    else:
        from transformers import GPT2Config

        tokenizer = byte_tokenizer()
        config = GPT2Config(
            vocab_size=259, n_embd=128, n_layer=4, n_head=4, n_positions=256, bos_token_id=257, eos_token_id=258
        )
    strategy, timed = NaiveStrategy(seed=0), Timed()
    actor, critic = GPTActor(config=config), GPTCritic(config=config)
    initial = strategy.prepare(deepcopy(actor))
    (actor, actor_optim), (critic, critic_optim) = strategy.prepare(
        *((m, torch.optim.AdamW(m.parameters(), lr=1e-4)) for m in (actor, critic))
    )
    trainer = PPOTrainer(
        strategy,
        actor,
        critic,
        lambda prompts, responses: [float(len(set(r.split()))) for r in responses],
        initial,
        actor_optim,
        critic_optim,
        tokenizer=tokenizer,
        run_dir=folder,
        callbacks=[ProgressBar(enabled=False), timed],
        train_batch_size=16,
        max_epochs=2,
        **CASES[name],
    )
    trainer.fit(
        [f'it felt {w}' for w in 'good bad slow fast'.split()], max_timesteps=phases + WARM_UP, update_timesteps=1
    )
    return timed


def interval(values: list[float]) -> tuple[float, float]:
    """Of the median, 95 %, by resampling."""
    draw = random.Random(0)
    medians = sorted(statistics.median(draw.choices(values, k=len(values))) for _ in range(2000))
    return medians[50], medians[1949]


def row(name: str, timed: Timed, folder: Path) -> tuple[str, float]:
    """Of the table, and the larger share of the hooks."""
    counted = timed.phases[WARM_UP:]
    pairs = [(a, b) if b.recorded else (b, a) for a, b in zip(counted[::2], counted[1::2], strict=True)]
    cells, shares = [], []
    for kind in ('wall', 'cpu'):
        plain = [getattr(p.whole, kind) for p, _ in pairs]
        hooks = statistics.median(getattr(r.hooks, kind) for _, r in pairs)
        base = statistics.median(plain)
        gaps = [(getattr(r.whole, kind) - getattr(p.whole, kind)) / base for p, r in pairs]
        low, high = interval(gaps)
        shares.append(hooks / base)
        cells.append(
            f'{1e3 * base:.0f} | {1e3 * hooks:.1f} | {hooks / base:.2%} | '
            f'{statistics.median(gaps):+.1%} ({low:+.1%} to {high:+.1%})'
        )
    sizes = [p.stat().st_size for p in (folder / 'rollouts').iterdir()]
    cells.append(f'{timed.first_ms:.0f} | {statistics.median(sizes) / 1024:.1f}')
    return f'| {name} | {" | ".join(cells)} |', max(shares)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--phases', type=int, default=60, help='counted phases of each case; every second is recorded')
    parser.add_argument('--out', type=Path, help='write the page to this file')
    args = parser.parse_args()
    if args.phases < 2 or args.phases % 2:
        parser.error(f'--phases {args.phases}: an even number, at least 2')
    torch.set_num_threads(1)
    rows, worst = [], 0.0
    for name in CASES:
        with tempfile.TemporaryDirectory() as folder:
            timed = run(name, args.phases, Path(folder))
            line, share = row(name, timed, Path(folder))
        print(line, flush=True)
        rows.append(line)
        worst = max(worst, share)
    if args.out is not None:
        args.out.write_text(page(rows, args.phases, worst))
    return int(worst > LIMIT)


def page(rows: list[str], phases: int, worst: float) -> str:
    head = (
        'model and phase | ms of a phase | ms of the hooks | share | paired difference | CPU ms of a phase | of the hooks '
        '| share | paired difference | first recording, ms | KiB of a phase'
    )
    return '\n'.join(
        [
            '# What recording sequences costs',
            '',
            f'`python benchmarks/rollouts_cost.py --phases {phases} --out docs/results/rollouts_cost.md`: PPO with a critic, '
            f'16 sequences recorded in every second of {phases} phases, one thread on {os.cpu_count()} cores shared with other work, torch {torch.__version__}.',
            '',
            f'| {head} |',
            f'|{"---|" * (head.count("|") + 1)}',
            *rows,
            '',
            f'The hooks of the recorder take at most {worst:.2%} of a phase (the limit is {LIMIT:.0%}). Their times are medians, '
            'and what they do is in no other number. The paired difference is that of a recorded phase and its neighbour '
            'that was not, over the median of the latter, with 95 % in brackets: where the machine does other work, it is as '
            'wide as that work. The first recording of a process imports pyarrow, once.',
            '',
        ]
    )


if __name__ == '__main__':
    raise SystemExit(main())
