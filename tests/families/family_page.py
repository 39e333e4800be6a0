"""docs/models.md out of what `family_checks` found."""

from __future__ import annotations

import transformers

HEAD = """# Models

What was found for each model type of transformers {version} that has a causal language model, with tiny random weights
on a CPU:

    python tests/families/family_checks.py --json found.json --page docs/models.md
    python tests/families/family_checks.py --json found.json --page docs/models.md --speed

The second adds the last column. No real checkpoint was tried. A cross means that the library refuses it by name, before
any work; the reasons stand below. A dash: not tried. "packed" and "padded" say how a batch runs, "up to the window"
that longer sequences are refused, a percentage which share of the blocks' weights has adapters. Models of BERT's kind
are decoders here (`is_decoder=True` in the config); as they come they look ahead, and an actor refuses them. T5, BART
and their like are on the page of [encoder-decoders](encoder_decoders.md).

| column | what is compared |
|---|---|
{columns}
| {speed} | {about_speed} |

RoPE of the kinds 'longrope' and 'dynamic' is taken up to its original length: beyond it, the numbers of a batch follow
from its longest sequence. Llama 4 with `attn_temperature_tuning` generates `floor_scale` tokens and more with the hf
engine alone. A model that cuts its attention window out by slots of the cache (GPT-Neo) decodes without steps of fixed
shape where these show.

## What works

| model type | {names} |
|---|{rule}|
{rows}

## Refused

{refused}

## Crashes

An exception that is not the library's own, before any number is used.

{crashes}

## Wrong

Other numbers, without a word.

{wrong}

## Not tried

{left_out}
"""


def page(found: dict[str, dict[str, str]]) -> str:
    from family_checks import CHECKS, SPEED, check_speed

    found = dict(sorted(found.items()))
    tried = {kind: checks for kind, checks in found.items() if 'config' not in checks}
    useful = {k: c for k, c in tried.items() if not c['forward'].startswith('no:')}
    rows = [f'| {kind} | {" | ".join([*cells(checks), _speed(checks)])} |' for kind, checks in useful.items()]
    refused = [f'- {kind}: {_reason(checks["forward"])}' for kind, checks in tried.items() if kind not in useful]
    for kind, checks in useful.items():
        reasons = [f'{name}: {_reason(text)}' for name, text in checks.items() if text.startswith('no:')]
        refused += [f'- {kind}, {"; ".join(reasons)}'] if reasons else []

    def with_outcome(outcome: str) -> list[str]:
        every = [(kind, name, text) for kind, checks in tried.items() for name, text in checks.items()]
        return [f'- {kind}, {name}: {_reason(text)}' for kind, name, text in every if text.startswith(f'{outcome}:')]

    left_out = [f'- {kind}: {_reason(checks["config"])}' for kind, checks in found.items() if 'config' in checks]
    columns = [f'| {name} | {" ".join((fn.__doc__ or "").split())} |' for name, fn in CHECKS.items()]
    return HEAD.format(
        version=transformers.__version__,
        columns='\n'.join(columns),
        speed=SPEED,
        about_speed=' '.join((check_speed.__doc__ or '').split()),
        names=' | '.join([*CHECKS, SPEED]),
        rule='|'.join('---' for _ in [*CHECKS, SPEED]),
        rows='\n'.join(rows),
        refused='\n'.join(sorted(refused)) or 'Nothing.',
        crashes='\n'.join(with_outcome('CRASH')) or 'Nothing.',
        wrong='\n'.join(with_outcome('WRONG')) or 'Nothing.',
        left_out='\n'.join(sorted(left_out + with_outcome('none'))) or 'Nothing.',
    )


def cells(checks: dict[str, str]) -> list[str]:
    """What the page's table says of a model type, one for each check."""
    from family_checks import CHECKS

    return [_cell(checks[name]) for name in CHECKS]


def read_page(text: str) -> dict[str, list[str]]:
    """By model type the cells of a page's table; [] for a type that is refused in whole, or was not tried."""
    from family_checks import CHECKS

    found: dict[str, list[str]] = {}
    for line in text.splitlines():
        if line.startswith('| ') and line.count(' | ') > len(CHECKS):
            kind, *rest = line.strip('| ').split(' | ')
            if kind != 'model type':
                found[kind] = rest[: len(CHECKS)]
        elif line.startswith('- ') and ',' not in line.partition(':')[0]:
            found[line[2:].partition(':')[0]] = []
    return found


def _speed(checks: dict[str, str]) -> str:
    """A ratio, or what the local engine's own cell says of an engine that is refused."""
    from family_checks import SPEED

    return _cell(checks['local'] if checks['local'].startswith('no:') else checks.get(SPEED, 'none'))


def _cell(text: str) -> str:
    if text.startswith('ok'):
        return text.partition(': ')[2] or 'yes'
    if text.startswith('none'):
        return '–'
    return '✗' if text.startswith('no:') else text.partition(':')[0].lower()


def _reason(text: str) -> str:
    return text.partition(': ')[2].replace('|', '/').replace('<', '(').replace('>', ')')
