"""Checks each model type of transformers by tests/families, compares the local engine's speed with `model.generate`,
and writes docs/results/model_types.md and the table of docs/models.md.

    python benchmarks/models.py llama mixtral
    python benchmarks/models.py --json found.json --pages
    python benchmarks/models.py --json found.json --speed llama mixtral --pages

For speed both generate the same number of tokens for the same prompts in turns, with a model 256 wide on one thread.
CPU seconds are compared pair by pair, since other load slows both, until it is clear which is faster.
"""

from __future__ import annotations

import importlib
import math
import statistics
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import transformers
from harness import PAGES, Results, cpu_seconds, generate, markdown, script_parser, write_json, write_page
from transformers import AutoModelForCausalLM, GenerationConfig

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / 'tests/families'))
from family_checks import CHECKS, cell, cells, check_apart, line_of
from family_configs import VOCAB, family_config, model_types

from chatgpt.nn import Actor
from chatgpt.rollout import Call, LocalEngine, SamplingParams
from chatgpt.types import Prompt

SPEED = 'local ÷ generate'
"""the column of `check_speed`"""
WIDTH, ROWS, PROMPT, NEW = 256, 16, 16, 48
LEAST_PAIRS, MOST_PAIRS = 9, 45
MOST = 200_000_000
"""number of parameters above which a type is not measured, since its other sizes do not shrink with the width"""


def speed(model_type: str) -> float:
    """Returns CPU seconds of `model.generate` divided by those of the local engine, the median over pairs.

    Raises ValueError if the engine refuses the model, and transformers' error if it has no such width.
    """
    torch.manual_seed(0)
    config = family_config(model_type, width=WIDTH)
    with torch.device('meta'):
        size = sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())
    if size > MOST:
        raise ValueError(f'{size} parameters at a width of {WIDTH}')
    model = AutoModelForCausalLM.from_config(config).eval()
    ids = torch.randint(3, VOCAB, (ROWS, PROMPT), generator=torch.Generator().manual_seed(1))
    prompts, sampling = [Prompt(ids=row) for row in ids], SamplingParams(max_new_tokens=NEW, eos_token_ids=())
    model.generation_config = GenerationConfig()
    engine = LocalEngine()
    engine.begin(Actor(model))

    def ours() -> Any:
        return engine.generate(Call.of(prompts, sampling, seed=1, indices=range(ROWS)))

    def theirs() -> Any:
        return generate(model, ids, NEW, eos_token_id=None)

    assert theirs().shape[1] == PROMPT + NEW and all(s.num_actions == NEW for s in ours())  # also the warm-up
    found: list[float] = []
    while len(found) < LEAST_PAIRS or (len(found) < MOST_PAIRS and not differs_from_one(found)):
        found.append(cpu_seconds(theirs) / cpu_seconds(ours))
    engine.end()
    return statistics.median(found)


def differs_from_one(ratios: list[float]) -> bool:
    """Returns True if the count of ratios above 1 is over two standard deviations of a fair coin away from half."""
    return abs(sum(ratio > 1 for ratio in ratios) - len(ratios) / 2) > math.sqrt(len(ratios))


def check_speed(model_type: str) -> dict[str, str]:
    """CPU seconds of `model.generate` divided by those of the local engine, for the same number of tokens of a model
    256 wide, on one thread: the median of 9 pairs, up to 45 where it is near 1. ✗: the local engine refuses the
    model."""
    transformers.logging.set_verbosity_error()
    try:
        return {SPEED: f'ok: {speed(model_type):.2f}'}
    except Exception as error:
        return {SPEED: f'none: {line_of(error)}'}


def tables(found: dict[str, dict[str, str]]) -> dict[str, str]:
    """Returns the generated parts of both pages, by name."""
    found = dict(sorted(found.items()))
    tried = {kind: checks for kind, checks in found.items() if 'config' not in checks}
    useful = {k: c for k, c in tried.items() if not c['forward'].startswith('no:')}
    refused = [f'- {kind}: {_reason(checks["forward"])}' for kind, checks in tried.items() if kind not in useful]
    for kind, checks in useful.items():
        reasons = [f'{name}: {_reason(text)}' for name, text in checks.items() if text.startswith('no:')]
        refused += [f'- {kind}, {"; ".join(reasons)}'] if reasons else []

    def with_outcome(outcome: str) -> list[str]:
        every = [(kind, name, text) for kind, checks in tried.items() for name, text in checks.items()]
        return [f'- {kind}, {name}: {_reason(text)}' for kind, name, text in every if text.startswith(f'{outcome}:')]

    left_out = [f'- {kind}: {_reason(checks["config"])}' for kind, checks in found.items() if 'config' in checks]
    about = {name: ' '.join((check.__doc__ or '').split()) for name, check in (CHECKS | {SPEED: check_speed}).items()}
    rows = [[kind, *cells(checks), _speed(checks)] for kind, checks in useful.items()]
    lists = {'refused': sorted(refused), 'crashes': with_outcome('CRASH'), 'wrong': with_outcome('WRONG')}
    lists['left_out'] = sorted(left_out + with_outcome('none'))
    return {
        'version': f'Each model type of transformers {transformers.__version__} that has a causal language model, with tiny random weights on a CPU.',
        'limits': limits(tried, useful),
        'columns': markdown('column | what is compared', about.items()),
        'works': markdown(['model type', *about], rows),
        **{name: '\n'.join(lines) or 'Nothing.' for name, lines in lists.items()},
    }


LIMITS = {
    'local': "the local engine; `engine='hf'` generates",
    'hf': 'generating, by any engine',
    'LoRA': 'LoRA on all linear layers',
    'PEFT': "adapters in PEFT's format",
    'hydra': 'hydra (`num_layers_unfrozen`)',
    'checkpointing': 'gradient checkpointing',
}


def limits(tried: dict[str, dict[str, str]], useful: dict[str, dict[str, str]]) -> str:
    """Returns the table of docs/models.md: the refused model types by check."""
    refused = {name: [k for k, checks in useful.items() if checks[name].startswith('no:')] for name in CHECKS}
    full = len(useful) - len({kind for kinds in refused.values() for kind in kinds})
    rows = [(LIMITS.get(name, name), ', '.join(kinds)) for name, kinds in refused.items() if kinds]
    rows += [('an actor, critic or reward model', ', '.join(kind for kind in tried if kind not in useful))]
    return (
        f'{full} of {len(tried)} model types work with everything.\n\n{markdown("not available | model types", rows)}'
    )


def _speed(checks: dict[str, str]) -> str:
    """Returns the ratio, or the cell of the local engine if it refuses the model."""
    return cell(checks['local'] if checks['local'].startswith('no:') else checks.get(SPEED, 'none'))


def _reason(text: str) -> str:
    return text.partition(': ')[2].replace('|', '/').replace('<', '(').replace('>', ')')


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument('types', nargs='*', help='model types; default: all')
    parser.add_argument('--pages', action='store_true', help='write the tables of both pages')
    parser.add_argument('--json', type=Path, help='file of results; the types in it are skipped')
    parser.add_argument('--speed', action='store_true', help='measure the speed of types in the file')
    args = parser.parse_args()
    torch.set_num_threads(1)
    with suppress(Exception):  # for all types, which are processes of their own; where there is none, its check says so
        importlib.import_module('peft')
    found = Results(args.json)
    for model_type in args.types or model_types():
        begin = time.perf_counter()
        if args.speed:
            if SPEED in found.get(model_type, {}) or not found.get(model_type, {}).get('local', '').startswith('ok'):
                continue
            found[model_type] |= check_apart(model_type, check_speed)
        elif model_type in found:
            continue
        else:
            found[model_type] = check_apart(model_type)
        wrong = {name: text for name, text in found[model_type].items() if not text.startswith('ok')}
        print(f'{model_type} {time.perf_counter() - begin:.0f} s {wrong or "ok"}', flush=True)
        if args.json:
            write_json(args.json, dict(sorted(found.items())))
    if args.pages:
        parts = tables(found)
        write_page(PAGES.parent / 'models.md', limits=parts.pop('limits'))
        write_page('model_types.md', **parts)


if __name__ == '__main__':
    main()
