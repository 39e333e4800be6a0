"""Randomwalks with old samples from an engine whose weights are noisy: what the corrections of docs/algorithms/off_policy.md
keep of the synchronous result.

    python benchmarks/off_policy.py --seeds 1 2 3 4 5
    python benchmarks/off_policy.py --page

GRPO from one model trained on the walks (`randomwalks.py`). The engine generates `STALENESS` phases ahead, from a copy of the
policy whose matrices have Gaussian noise of `NOISE` times their standard deviation, drawn anew with every copy, and gives
the log-probs of that copy.
"""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import harness
import randomwalks
import randomwalks_task as rw
import torch

from chatgpt.rollout import LocalEngine
from chatgpt.rollout.engine import Abilities, EngineAround
from chatgpt.strategies import NaiveStrategy
from chatgpt.trainer.callbacks import Evaluator

GRAPH, STALENESS, NOISE, PHASES, LR = 1000, 4, 0.05, 90, 4e-4
SHARE = 0.95
"""of the synchronous result that a correction shall reach"""
CASES: dict[str, dict[str, Any]] = {
    'synchronous': {},
    'no correction': {},
    'engine as old policy': {},
    'token_truncate': {'tis_cap': 2.0},
    'token_mask': {'tis_cap': 5.0, 'tis_floor': 0.5, 'off_policy': 'token_mask'},
    'sequence_truncate': {'tis_cap': 2.0, 'off_policy': 'sequence_truncate'},
    'sequence_truncate_1': {'tis_cap': 1.0, 'off_policy': 'sequence_truncate'},
    'sequence_mask': {'tis_cap': 3.0, 'off_policy': 'sequence_mask'},
}


class NoisyEngine(EngineAround):
    """Draws when it is asked, from a noisy copy of the weights of the latest `begin`."""

    def __init__(self, noise: float, seed: int) -> None:
        super().__init__(LocalEngine())
        self.abilities = Abilities(copies_weights=False, reproducible=True, exact_logprobs=False, answers_ahead=True)
        self.noise, self.source = noise, torch.Generator().manual_seed(seed)

    def begin(self, actor: Any) -> None:
        copy = deepcopy(actor)
        with torch.no_grad():
            for weight in copy.parameters():
                if weight.dim() > 1:
                    weight += self.noise * weight.std() * torch.randn(weight.shape, generator=self.source)
        super().begin(copy)

    def submit(self, call: Any) -> list[Any]:
        return self.generate(call)

    def take(self, ticket: list[Any]) -> list[Any]:
        return ticket

    def cancel(self, ticket: list[Any]) -> None:
        pass


def run(
    case: str, seed: int, cache: Path, phases: int = PHASES, noise: float = NOISE, **changes: Any
) -> dict[str, Any]:
    task, tokenizer = rw.make_task(GRAPH), rw.tokenizer()
    actor, _ = randomwalks.sft_model(task, GRAPH, 1, cache)
    curve = randomwalks.Curve(randomwalks.evaluation(task, tokenizer))
    ahead: dict[str, Any] = (
        {} if case == 'synchronous' else {'engine': NoisyEngine(noise, seed), 'max_staleness': STALENESS}
    )
    settings = randomwalks.ONLINE['grpo'] | {'kl_coef': 0.0, 'max_epochs': 1, 'lr': LR} | CASES[case] | changes
    lr = settings.pop('lr')
    with NaiveStrategy(seed=seed, device='cpu') as strategy:
        trainer = harness.ppo_trainer(
            strategy,
            actor,
            None,
            randomwalks.reward_of(task),
            optimizer=partial(torch.optim.AdamW, lr=lr, eps=1e-5, weight_decay=0.0),
            callbacks=[Evaluator(curve, phases // 2)],
            tokenizer=tokenizer,
            experience_batch_size=randomwalks.BATCH // 5,
            train_batch_size=randomwalks.BATCH,
            max_new_tokens=rw.MAX_LENGTH - 1,
            **settings,
            **ahead,
        )
        if case in ('no correction', 'engine as old policy'):  # refused by the settings
            trainer.tis_cap = 0.0
        if case == 'engine as old policy':
            trainer.maker.settings = replace(trainer.maker.settings, recompute_logprobs=False)
        _, spent = harness.timed(lambda: trainer.fit(task.starts, 1, phases, 1))
    return {
        'case': case,
        'seed': seed,
        'optimality': [row['score_mean'] for row in curve.rows],
        'lr': lr,
        'phases': phases,
        **spent,
    }


def table(runs: list[dict[str, Any]]) -> str:
    last = {(r['case'], r['seed']): r['optimality'][-1] for r in runs}
    seeds, rows = sorted({r['seed'] for r in runs}), []
    for case in CASES:
        found = [s for s in seeds if (case, s) in last]
        if found:
            reached = sum(last[case, s] >= SHARE * last['synchronous', s] for s in found)
            settings = ', '.join(f'{k}={v}' for k, v in CASES[case].items())
            numbers = [f'{last[case, s]:.3f}' if s in found else '' for s in seeds]
            rows.append([case, settings, *numbers, f'{reached} of {len(found)}'])
    return harness.markdown(['case', 'settings', *(f'seed {s}' for s in seeds), f'{SHARE:.0%} of synchronous'], rows)


def main() -> None:
    parser = harness.script_parser(__doc__, 'off_policy.md')
    cases = ['synchronous', 'no correction', 'token_truncate', 'sequence_truncate', 'sequence_truncate_1']
    parser.add_argument('--cases', nargs='*', choices=CASES, default=cases)
    parser.add_argument('--seeds', type=int, nargs='+', default=[1, 2, 3, 4, 5])
    parser.add_argument(
        '--cache', type=Path, default=harness.ROOT / 'outputs' / 'randomwalks', help='folder of the SFT models'
    )
    args = parser.parse_args()
    torch.set_num_threads(1)
    results = harness.Results('off_policy.json')
    for seed, case in product(args.seeds, args.cases):
        results.measure(f'{case} {seed}', lambda c=case, s=seed: run(c, s, args.cache), lambda r: r['optimality'])
    if args.page:
        harness.write_page('off_policy.md', runs=table(list(results.values())))


if __name__ == '__main__':
    main()
