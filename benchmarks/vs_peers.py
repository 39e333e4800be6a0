"""The same work in TRL and here, A B A B in one run: how many times the new tokens per CPU-second of a whole update.

    python benchmarks/vs_peers.py --page docs/results/peers.md    # everything; the peers' environments are made first
    python benchmarks/vs_peers.py --only trl_ppo fp32             # the cases whose names hold all of these words
    python benchmarks/vs_peers.py --without-16-bits --only bf16   # as on a CPU without instructions of 16 bits
    python benchmarks/vs_peers.py --profile docs/results/peers_profile.md

The work: GPT-2 of 4 layers x 256 (vocabulary 512), 32 sequences of 16 prompt tokens and up to 48 new ones per update
(PPO: 32 prompts; GRPO and RLOO: 4 prompts x 8), one optimizer step per epoch over all 32, AdamW (fused), one thread.
Both sides load the same saved folder. 'fixed' runs every response to the limit; 'eos' rigs the model's end token so
that lengths are geometric with a mean of a third of the limit. Each peer runs in a process and an environment of its
own (`benchmarks/peers/`), and does one update when told to.

Peers: PPO with four networks in TRL 1.12.0, classic PPO with a value head in 0.11.4, GRPO and RLOO in 1.16.0.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE / 'peers'))

from work import EOS, NEW_TOKENS, PAD, VOCAB, Case, prompt_ids  # noqa: E402

# torch comes first and pinned, from the same place as the library's: trl asks for any torch, which may bring gigabytes
# of CUDA.
ENVIRONMENTS: dict[str, list[str]] = {
    'trl_ppo': ['trl==1.12.0', 'transformers==5.23.0', 'accelerate==1.15.0'],
    'trl_classic': ['trl==0.11.4', 'transformers==4.46.3', 'accelerate==1.15.0', 'rich==15.0.0'],
    'trl_now': ['trl==1.16.0', 'transformers==5.23.0', 'accelerate==1.15.0'],
}
TORCH = 'torch==2.13.0'
NARROW = {'ONEDNN_MAX_CPU_ISA': 'AVX512_CORE', 'ATEN_CPU_CAPABILITY': 'avx512'}
"""what both sides run under with `--without-16-bits`"""
NEVER = -30.0
"""a logit that is never drawn"""
TARGETS = {('fixed', 'fp32'): 1.5, ('fixed', 'bf16'): 3.0, ('eos', 'fp32'): 3.0, ('eos', 'bf16'): 3.0}


def all_cases() -> list[Case]:
    cases = []
    for precision in ('fp32', 'bf16', 'bf16 weights'):
        for peer in ('trl_ppo', 'trl_classic'):
            for lengths in ('fixed', 'eos'):
                cases += [
                    Case(peer, 'ppo', lengths, precision, epochs)
                    for epochs in ((1,) if 'weights' in precision else (1, 4))
                ]
        for method in ('grpo', 'rloo') if 'weights' not in precision else ():
            for lengths in ('fixed', 'eos'):
                cases += [Case('trl_now', method, lengths, precision, kl=kl) for kl in (False, True)]
    return cases


# ---------------------------------------------------------------- the peers' environments and the model


def environment(name: str, folder: Path) -> Path:
    """The Python of a peer's own environment, made on first use."""
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


def save_model(folder: Path, lengths: str) -> str:
    """A random GPT-2 whose end token has one probability everywhere, as a Hugging Face folder.

    The final norm gives 1 in the last dimension whatever the input, and only the end token's embedding reads it, so its
    logit is a constant; the padding token is never drawn.
    """
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=VOCAB,
        n_embd=256,
        n_layer=4,
        n_head=4,
        n_positions=128,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=EOS,
        eos_token_id=EOS,
        pad_token_id=PAD,
    )
    model = GPT2LMHeadModel(config).eval()
    words, norm = model.transformer.wte.weight, model.transformer.ln_f
    with torch.no_grad():
        norm.weight[-1], norm.bias[-1] = 0.0, 1.0
        words[:, -1] = 0.0
        words[[PAD, EOS]] = 0.0
        words[PAD, -1] = words[EOS, -1] = NEVER
        if lengths == 'eos':
            others = model(prompt_ids(64)).logits.logsumexp(-1).mean().item()
            p = end_prob_for(1 / 3, NEW_TOKENS)
            words[EOS, -1] = others + math.log(p / (1 - p))
    path = folder / 'models' / lengths
    model.save_pretrained(path)
    return str(path)


def end_prob_for(share: float, limit: int) -> float:
    """The end probability at which min(geometric, limit) is share * limit on average, by bisection."""
    low, high = 1e-6, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if (1 - (1 - middle) ** limit) / middle > share * limit else (low, middle)
    return low


# ---------------------------------------------------------------- one side, and the comparison of two


class Worker:
    """A side of a comparison in a process of its own; see the protocol in `peers/work.py`."""

    def __init__(self, command: Sequence[str], log: Path) -> None:
        log.parent.mkdir(parents=True, exist_ok=True)
        self.log = log
        paths = os.pathsep.join([str(HERE.parent), str(HERE / 'peers')])
        env = os.environ | {
            'OMP_NUM_THREADS': '1',
            'MKL_NUM_THREADS': '1',
            'HF_HUB_OFFLINE': '1',
            'TOKENIZERS_PARALLELISM': 'false',
            'TRL_EXPERIMENTAL_SILENCE': '1',
            'PYTHONPATH': paths,
        }
        with log.open('w') as errors:
            self.process = subprocess.Popen(
                list(map(str, command)),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=env,
            )
        self.about: dict[str, Any] = self._hear()['ready']

    def _hear(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            tail = ''.join(self.log.read_text().splitlines(keepends=True)[-12:])
            raise RuntimeError(f'{self.log.name}: the worker ended with {self.process.wait()}:\n{tail}')
        return json.loads(line)

    def update(self) -> dict[str, float]:
        assert self.process.stdin is not None
        self.process.stdin.write('go\n')
        self.process.stdin.flush()
        return self._hear()

    def close(self) -> None:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.close()
        try:
            self.process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process.stdout.close()


def spread(values: Sequence[float]) -> dict[str, float]:
    return {'min': min(values), 'median': statistics.median(values), 'max': max(values)}


def summary(rounds: Sequence[tuple[dict[str, float], dict[str, float]]]) -> dict[str, Any]:
    """Of (ours, theirs) pairs: ratios of new tokens per CPU-second (and per second) of neighbours, and each side's own
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

    return {
        'ratio': spread([rate(a, 'cpu_s') / rate(b, 'cpu_s') for a, b in rounds]),
        'ratio_wall': spread([rate(a, 'wall_s') / rate(b, 'wall_s') for a, b in rounds]),
        # over all rounds together: with lengths that vary, a round's ratio depends on what was drawn
        'ratio_total': _total_rate(rounds, 0) / _total_rate(rounds, 1),
        'ours': own(0),
        'theirs': own(1),
    }


def _total_rate(rounds: Sequence[tuple[dict[str, float], dict[str, float]]], which: int) -> float:
    return sum(pair[which]['new_tokens'] for pair in rounds) / sum(pair[which]['cpu_s'] for pair in rounds)


def compare(
    case: Case, ours: Sequence[str], theirs: Sequence[str], *, rounds: int, warmup: int, logs: Path
) -> dict[str, Any]:
    """A B A B ...: an update here, an update there."""
    sides: list[Worker] = []
    try:
        sides.append(Worker([*ours, case.to_json()], logs / f'{case.name} ours.log'))
        sides.append(Worker([*theirs, case.to_json()], logs / f'{case.name} theirs.log'))
        for _ in range(warmup):
            for side in sides:
                side.update()
        pairs = [(sides[0].update(), sides[1].update()) for _ in range(rounds)]
        about = {'ours': sides[0].about, 'theirs': sides[1].about}
    finally:
        for side in sides:
            side.close()
    wanted = next((v for k, v in TARGETS.items() if k == (case.lengths, case.precision.split()[0])), None)
    settings = {k: getattr(case, k) for k in ('peer', 'method', 'lengths', 'precision', 'epochs', 'kl')}
    return {'case': settings, 'name': case.name, 'target': wanted, **summary(pairs), 'about': about, 'rounds': pairs}


# ---------------------------------------------------------------- output


def machine() -> dict[str, Any]:
    flags: set[str] = set()
    model = platform.processor()
    info = Path('/proc/cpuinfo')
    if info.exists():
        for line in info.read_text().splitlines():
            key, _, value = line.partition(':')
            if key.strip() == 'flags':
                flags = set(value.split())
            elif key.strip() == 'model name':
                model = value.strip()
    return {
        'cpu': model,
        'cores': os.cpu_count(),
        'avx512_bf16': 'avx512_bf16' in flags,
        'amx_bf16': 'amx_bf16' in flags,
    }


def table(results: Sequence[dict[str, Any]]) -> str:
    head = (
        '| case | ratio min | median | max | all rounds | target | of wall | ours CPU s | theirs | ours tokens / CPU '
        's | theirs | mean lengths |\n|---|---|---|---|---|---|---|---|---|---|---|---|\n'
    )
    rows = []
    for r in results:
        ratio, ours, theirs = r['ratio'], r['ours'], r['theirs']
        mark = '' if r['target'] is None else f'{r["target"]:g} {"met" if ratio["median"] >= r["target"] else "missed"}'
        rows.append(
            f'| {r["name"]} | {ratio["min"]:.2f} | **{ratio["median"]:.2f}** | {ratio["max"]:.2f} | '
            f'{r["ratio_total"]:.2f} | {mark} | '
            f'{r["ratio_wall"]["median"]:.2f} | {ours["cpu_s"]:.2f} | {theirs["cpu_s"]:.2f} | '
            f'{ours["new_tokens_per_cpu_s"]:.0f} | '
            f'{theirs["new_tokens_per_cpu_s"]:.0f} | {ours["mean_length"]:.1f} / {theirs["mean_length"]:.1f} |\n'
        )
    return head + ''.join(rows)


def table_without(after: Sequence[dict[str, Any]], before: Sequence[dict[str, Any]]) -> str:
    """Of `--without-16-bits`: with all products of 16 bits left to torch (`before`), and as it is."""
    earlier = {r['name']: r for r in before}
    rows = [
        '| case | ratio, all by torch | ratio min | median | max | all rounds | ours CPU s, all by torch | ours CPU s | '
        'theirs |\n|---|---|---|---|---|---|---|---|---|\n'
    ]
    for r in after:
        old, ratio = earlier.get(r['name']), r['ratio']
        was = (
            ('not run', 'not run') if old is None else (f'{old["ratio"]["median"]:.2f}', f'{old["ours"]["cpu_s"]:.2f}')
        )
        rows.append(
            f'| {r["name"]} | {was[0]} | {ratio["min"]:.2f} | **{ratio["median"]:.2f}** | {ratio["max"]:.2f} | '
            f'{r["ratio_total"]:.2f} | {was[1]} | {r["ours"]["cpu_s"]:.2f} | {r["theirs"]["cpu_s"]:.2f} |\n'
        )
    return ''.join(rows)


def page(
    results: Sequence[dict[str, Any]],
    where: dict[str, Any],
    command: str,
    without: Sequence[dict[str, Any]] = (),
    before: Sequence[dict[str, Any]] = (),
) -> str:
    from report import PAGE, WITHOUT

    text = PAGE.format(command=command, table=table(results), **where, rounds=len(results[0]['rounds']))
    if not without:
        return text
    of = {'rounds': len(without[0]['rounds']), 'variables': ' '.join(f'{k}={v}' for k, v in NARROW.items())}
    return text + WITHOUT.format(table=table_without(without, before), **without[0]['machine'], **of)


def results_in(folder: Path) -> list[dict[str, Any]]:
    """Of one JSON per case, in the order of the cases."""
    order = {case.name: i for i, case in enumerate(all_cases())}
    found = [json.loads(path.read_text()) for path in folder.glob('*.json')]
    return sorted(found, key=lambda r: order.get(r['name'], len(order)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--only', nargs='+', default=[], help='words that a case name must hold, all of them')
    parser.add_argument('--rounds', type=int, default=5)
    parser.add_argument('--warmup', type=int, default=1)
    parser.add_argument('--without', nargs='+', default=[], help='words that a case name must not hold')
    parser.add_argument('--work-dir', type=Path, default=Path('outputs/peers'), help='environments, models and logs')
    parser.add_argument(
        '--out', type=Path, default=Path('benchmarks/results/peers'), help='folder of one JSON per case'
    )
    parser.add_argument(
        '--without-16-bits', action='store_true', help='let oneDNN use no instructions of 16 bits; a table of its own'
    )
    parser.add_argument('--page', type=Path, help='write the page from every JSON in --out')
    parser.add_argument('--page-only', action='store_true', help='measure nothing')
    parser.add_argument('--profile', type=Path, help='instead of comparing, write where our time goes to this page')
    args = parser.parse_args()
    work = args.work_dir.resolve()
    folders = {} if args.page_only else {lengths: save_model(work, lengths) for lengths in ('fixed', 'eos')}
    chosen = [c for c in all_cases() if c.words >= set(args.only) and not c.words & set(args.without)]
    if args.profile is not None:
        from profile_ours import write_profile

        ours = [
            Case(**{**vars(case), 'model': folders[case.lengths]}) for case in chosen if 'weights' not in case.precision
        ]
        write_profile(args.profile, ours, args.out)
        return
    out = args.out / 'without_16_bits' if args.without_16_bits else args.out
    if args.without_16_bits:
        os.environ.update(NARROW)
    out.mkdir(parents=True, exist_ok=True)
    for case in [] if args.page_only else chosen:
        case = Case(**{**vars(case), 'model': folders[case.lengths]})
        peer = [environment(case.peer, work), HERE / 'peers' / f'{case.peer}.py']
        start = time.perf_counter()
        mine = [sys.executable, HERE / 'peers' / 'ours.py']
        result = compare(case, mine, peer, rounds=args.rounds, warmup=args.warmup, logs=work / 'logs')
        result['machine'] = machine()
        (out / case.file_name).write_text(json.dumps(result, indent=1) + '\n')
        print(table([result]).splitlines()[-1], f'({time.perf_counter() - start:.0f} s)', flush=True)
    results = results_in(out)
    if results:
        print(table(results))
    if args.page is not None:
        ordinary = results_in(args.out)
        where = ordinary[0].get('machine') or machine()
        others = [results_in(args.out / name) for name in ('without_16_bits', 'without_16_bits/all_by_torch')]
        args.page.write_text(page(ordinary, where, f'python benchmarks/vs_peers.py --page {args.page}', *others))


if __name__ == '__main__':
    main()
