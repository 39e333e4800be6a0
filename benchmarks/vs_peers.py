"""Compares the speed of TRL and this library on the same work: new tokens per CPU-second of whole updates, A B A B.

    python benchmarks/vs_peers.py                                 # everything; the peers' environments are made first
    python benchmarks/vs_peers.py --page                          # the page of what has been measured
    python benchmarks/vs_peers.py --only trl_ppo fp32             # the cases whose names hold all of these words
    python benchmarks/vs_peers.py --wheels FOLDER                 # no network: installs from FOLDER/<peer>
    python benchmarks/vs_peers.py --without-16-bits --only bf16   # as on a CPU without 16-bit instructions

The work: GPT-2 of 4 layers x 256 (vocabulary 512), 32 sequences of 16 prompt tokens and up to 48 new ones per update
(PPO: 32 prompts; GRPO and RLOO: 4 prompts x 8), one optimizer step per epoch over all 32, AdamW (fused), one thread.
Both sides load the same saved folder. 'fixed' runs every response to the limit; 'eos' rigs the model's end token so
that lengths are geometric with a mean of a third of the limit. Each peer runs in its own process and environment
(`benchmarks/peers/`), one update per command.

Peers: PPO with four networks in TRL 1.12.0, classic PPO with a value head in 0.11.4, GRPO and RLOO in 1.16.0.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import harness

PEERS = Path(__file__).resolve().parent / 'peers'
sys.path.insert(0, str(PEERS))

from work import EOS, PAD, Case, prompt_ids  # noqa: E402

# torch is pinned and installed first, from the library's index: trl accepts any torch, which may bring gigabytes of
# CUDA.
ENVIRONMENTS: dict[str, list[str]] = {
    'trl_ppo': ['trl==1.12.0', 'transformers==5.23.0', 'accelerate==1.15.0'],
    'trl_classic': ['trl==0.11.4', 'transformers==4.46.3', 'accelerate==1.15.0', 'rich==15.0.0'],
    'trl_now': ['trl==1.16.0', 'transformers==5.23.0', 'accelerate==1.15.0'],
}
TORCH = 'torch==2.13.0'
NARROW = {'ONEDNN_MAX_CPU_ISA': 'AVX512_CORE', 'ATEN_CPU_CAPABILITY': 'avx512'}
"""environment of both sides with `--without-16-bits`"""
NEVER = -30.0
"""the logit of a token that is never sampled"""
TARGETS = {('fixed', 'fp32'): 1.5, ('fixed', 'bf16'): 3.0, ('eos', 'fp32'): 3.0, ('eos', 'bf16'): 3.0}


def all_cases() -> list[Case]:
    cases, lengths = [], ('fixed', 'eos')
    for precision in ('fp32', 'bf16', 'bf16 weights'):
        weights = precision == 'bf16 weights'  # a setting of PPO's peers
        for peer, kind, epochs in product(('trl_ppo', 'trl_classic'), lengths, (1,) if weights else (1, 4)):
            cases.append(Case(peer, 'ppo', kind, precision, epochs))
        for method, kind, kl in product(() if weights else ('grpo', 'rloo'), lengths, (False, True)):
            cases.append(Case('trl_now', method, kind, precision, kl=kl))
    return cases


# ---------------------------------------------------------------- the peers' environments and the model


def own_python(name: str, folder: Path) -> Path:
    """Returns the Python of a peer's environment, which is made on first use."""
    python, stamp = folder / name / 'bin' / 'python', folder / name / 'made.txt'
    wanted = '\n'.join([TORCH, *ENVIRONMENTS[name]])
    if not stamp.exists() or stamp.read_text() != wanted:
        print(f'making the environment {folder / name}', file=sys.stderr)
        subprocess.run([sys.executable, '-m', 'venv', folder / name], check=True)
        pip = [python, '-m', 'pip', 'install', '--quiet', '--disable-pip-version-check']
        subprocess.run([*pip, TORCH], check=True)
        subprocess.run([*pip, TORCH, *ENVIRONMENTS[name]], check=True)
        stamp.write_text(wanted)
    return python


def site_of(name: str, wheels: Path, folder: Path, timeout_s: float = 300.0) -> Path:
    """Installs the wheels of a peer and returns their folder, to be put first on Python's path.

    Raises:
        ValueError: no wheels there, or pip cannot install them.
    """
    site = folder / name / 'site'
    if not site.exists():
        harness.install_wheels(wheels / name, site, timeout_s)
    return site


def save_model(
    folder: Path, lengths: str, *, layers: int = 4, width: int = 256, heads: int = 4, like: Case | None = None
) -> str:
    """Saves a random GPT-2 with a constant probability of the end token as a Hugging Face folder.

    The final norm gives 1 in the last dimension for every input, and only the end token's embedding reads it, so its
    logit is constant; the padding token is never sampled. like: a case with the sizes, and with the device that the
    weights are drawn on.
    """
    import torch
    from transformers import GPT2LMHeadModel

    like = like or Case('', '', lengths, '')
    torch.manual_seed(0)
    positions = max(128, like.prompt_tokens + like.new_tokens)
    ends = {'bos_token_id': EOS, 'eos_token_id': EOS, 'pad_token_id': PAD}
    config = harness.gpt2(like.vocab, layers, width, heads, positions, **ends)
    with torch.device(like.device):
        model = GPT2LMHeadModel(config).eval()
    words, norm = model.transformer.wte.weight, model.transformer.ln_f
    with torch.no_grad():
        norm.weight[-1], norm.bias[-1] = 0.0, 1.0
        words[:, -1] = 0.0
        words[[PAD, EOS]] = 0.0
        words[PAD, -1] = words[EOS, -1] = NEVER
        if lengths == 'eos':
            prompts = prompt_ids(64, like.prompt_tokens, like.vocab).to(like.device)
            others = model(prompts).logits.float().logsumexp(-1).mean().item()
            p = harness.end_probability(1 / 3, like.new_tokens)
            words[EOS, -1] = others + math.log(p / (1 - p))
    path = folder / 'models' / lengths
    model.save_pretrained(path)
    return str(path)


# ---------------------------------------------------------------- one side, and the comparison of two


class Side(harness.Worker):
    """A side of a comparison, by the protocol in `peers/work.py`. site: first folder on Python's path."""

    def __init__(self, command: Sequence[str], log: Path, *, site: Path | None = None) -> None:
        own = {
            'OMP_NUM_THREADS': '1',
            'MKL_NUM_THREADS': '1',
            'HF_HUB_OFFLINE': '1',
            'TOKENIZERS_PARALLELISM': 'false',
            'TRL_EXPERIMENTAL_SILENCE': '1',
        }
        env = harness.environment(site, PEERS, **own)
        if str(command[0]) != sys.executable:  # a separate environment uses no other path
            env['PYTHONPATH'] = os.pathsep.join(map(str, (PEERS, harness.ROOT)))
        log.unlink(missing_ok=True)
        super().__init__(command, env, log)
        self.log = log

    def receive(self, timeout_s: float = float('inf')) -> dict[str, Any]:  # type: ignore[override]
        try:
            return super().receive(timeout_s) or {}
        except EOFError as error:
            tail = ''.join(self.log.read_text().splitlines(keepends=True)[-12:])
            raise RuntimeError(f'{self.log.name}: {error}:\n{tail}') from None


def summary(rounds: Sequence[tuple[dict[str, float], dict[str, float]]]) -> dict[str, Any]:
    """Returns, for (ours, theirs) pairs, the ratios of new tokens per CPU-second and per second, and each side's
    numbers."""

    def rate(side: dict[str, float], clock: str) -> float:
        return side['new_tokens'] / side[clock]

    def own(which: int) -> dict[str, float]:
        updates = [pair[which] for pair in rounds]
        return {
            'cpu_s': statistics.median(u['cpu_s'] for u in updates),
            'wall_s': statistics.median(u['wall_s'] for u in updates),
            'new_tokens_per_cpu_s': statistics.median(rate(u, 'cpu_s') for u in updates),
            'mean_length': sum(u['new_tokens'] for u in updates) / sum(u['sequences'] for u in updates),
        }

    def total(which: int) -> float:
        return sum(pair[which]['new_tokens'] for pair in rounds) / sum(pair[which]['cpu_s'] for pair in rounds)

    return {
        'ratio': harness.spread([rate(a, 'cpu_s') / rate(b, 'cpu_s') for a, b in rounds]),
        'ratio_wall': harness.spread([rate(a, 'wall_s') / rate(b, 'wall_s') for a, b in rounds]),
        # over all rounds: with varying lengths, the ratio of a round depends on its samples
        'ratio_total': total(0) / total(1),
        'ours': own(0),
        'theirs': own(1),
    }


def compare(
    case: Case,
    ours: Sequence[str],
    theirs: Sequence[str],
    *,
    rounds: int,
    warmup: int = 1,
    logs: Path,
    site: Path | None = None,
    report: Callable[[list[tuple[dict[str, float], dict[str, float]]]], None] | None = None,
) -> dict[str, Any]:
    """Alternates updates of both sides.

    site: folder of the peer's packages. report: called after each round with all rounds so far.
    """
    sides: list[Side] = []
    try:
        sides.append(Side([*ours, case.to_json()], logs / f'{case.name} ours.log'))
        sides.append(Side([*theirs, case.to_json()], logs / f'{case.name} theirs.log', site=site))
        about = {name: side.receive()['ready'] for name, side in zip(('ours', 'theirs'), sides, strict=True)}
        pairs: list[tuple[dict[str, float], dict[str, float]]] = []
        for number in range(warmup + rounds):
            pair = sides[0].ask('go'), sides[1].ask('go')
            if number >= warmup:
                pairs.append(pair)  # type: ignore[arg-type]
                if report is not None:
                    report(pairs)
    finally:
        for side in sides:
            side.end()
    wanted = TARGETS.get((case.lengths, case.precision.split()[0]))
    settings = {k: getattr(case, k) for k in ('peer', 'method', 'lengths', 'precision', 'epochs', 'kl')}
    return {'case': settings, 'name': case.name, 'target': wanted, **summary(pairs), 'about': about, 'rounds': pairs}


# ---------------------------------------------------------------- output


def table(results: Sequence[dict[str, Any]], *, short: bool = False) -> str:
    """Returns the table of results; short: with the columns of `--without-16-bits`."""
    rows = []
    for r in results:
        ratio, sides = r['ratio'], (r['ours'], r['theirs'])
        met = '' if r['target'] is None else f'{r["target"]:g} {"met" if ratio["median"] >= r["target"] else "missed"}'
        row = [r['name'], f'{ratio["min"]:.2f}', f'**{ratio["median"]:.2f}**', f'{ratio["max"]:.2f}']
        row += [f'{r["ratio_total"]:.2f}', met, f'{r["ratio_wall"]["median"]:.2f}']
        row += [f'{side["cpu_s"]:.2f}' for side in sides]
        row += [f'{side["new_tokens_per_cpu_s"]:.0f}' for side in sides]
        row += [' / '.join(f'{side["mean_length"]:.1f}' for side in sides)]
        rows.append(row)
    names = 'case | ratio min | median | max | all rounds | target | of wall | ours CPU s | theirs'.split(' | ')
    names += ['ours tokens / CPU s', 'theirs', 'mean lengths']
    shown = [0, 1, 2, 3, 4, 7, 8] if short else range(len(names))
    return harness.markdown([names[i] for i in shown], [[row[i] for i in shown] for row in rows])


def results_in(folder: Path) -> list[dict[str, Any]]:
    """Returns the results of a folder with a JSON per case, in the order of the cases."""
    order = {case.name: i for i, case in enumerate(all_cases())}
    found = [json.loads(path.read_text()) for path in folder.glob('*.json')]
    return sorted(found, key=lambda r: order.get(r['name'], len(order)))


def main() -> None:
    parser = harness.script_parser(__doc__)
    parser.add_argument('--only', nargs='+', default=[], help='words that a case name must hold, all of them')
    parser.add_argument('--without', nargs='+', default=[], help='words that a case name must not hold')
    parser.add_argument('--rounds', type=int, default=5)
    parser.add_argument('--warmup', type=int, default=1)
    parser.add_argument('--work-dir', type=Path, default=Path('outputs/peers'), help='environments, models and logs')
    parser.add_argument('--out', type=Path, default=harness.RESULTS / 'peers', help='folder of one JSON per case')
    parser.add_argument(
        '--without-16-bits', action='store_true', help='disable 16-bit instructions in oneDNN; fills a separate table'
    )
    parser.add_argument(
        '--page', action='store_true', help='write docs/results/peers.md from the JSON files in --out only'
    )
    parser.add_argument(
        '--wheels', type=Path, metavar='FOLDER', help='folder of wheels by peer, for use without a network'
    )
    args = parser.parse_args()
    narrow = args.out / 'without_16_bits'
    if args.page:
        harness.write_page('peers.md', cases=table(results_in(args.out)), without=table(results_in(narrow), short=True))
        return
    work, out = args.work_dir.resolve(), narrow if args.without_16_bits else args.out
    if args.without_16_bits:
        os.environ.update(NARROW)
    folders = {lengths: save_model(work, lengths) for lengths in ('fixed', 'eos')}
    for case in all_cases():
        if not case.words >= set(args.only) or case.words & set(args.without):
            continue
        case = replace(case, model=folders[case.lengths])
        site = site_of(case.peer, args.wheels, work) if args.wheels else None
        python = own_python(case.peer, work) if site is None else sys.executable
        peer = [python, PEERS / f'{case.peer}.py']
        mine = [sys.executable, PEERS / 'ours.py']
        result = compare(case, mine, peer, rounds=args.rounds, warmup=args.warmup, logs=work / 'logs', site=site)
        result['machine'] = harness.machine()
        harness.write_json(out / case.file_name, result)
        print(table([result]).splitlines()[-1], flush=True)


if __name__ == '__main__':
    main()
