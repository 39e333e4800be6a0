"""The sentences and tables of a model card, each made of what is known; what is not known is not mentioned."""

from __future__ import annotations

import re
from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from pathlib import Path
from typing import Any

import yaml

from chatgpt.publish.facts import ModelFacts
from chatgpt.publish.method_words import LIBRARY, METHOD_WORDS, MethodWords
from chatgpt.publish.picture import can_draw, curve, panels_of
from chatgpt.publish.text import code, count, fenced, hub_name, table, without_paths
from chatgpt.publish.use import Role, is_classifier
from chatgpt.report.series import number

FEW = 200
"""prompts or records, below which the card says that they are few"""
UNSHOWN = frozenset({'save_path', 'model_path', 'resume', 'push_to_hub', 'hub_private', 'card_samples', 'plan'})
"""settings of where things are written"""
SOURCES = {
    'dataset': 'training data',
    'prompt_path': 'prompts',
    'environment': 'environment',
    'ptx_data': 'pretraining text',
    'validation_file': 'eval data',
    'reward_model': 'reward model',
    'reward_fn': 'reward function',
}
Measured = list[tuple[str, float | None, float, float | None]]


def method_of(facts: ModelFacts) -> MethodWords | None:
    return METHOD_WORDS.get(facts.record.method) if facts.record is not None else None


def introduction(facts: ModelFacts, role: Role, base: str, title: str) -> str:
    """What it is, in two or three sentences."""
    what = {
        'actor': 'a language model',
        'reward_model': 'a reward model',
        'critic': 'a value model',
    }[role]
    if facts.rank is not None:
        what = f'a LoRA adapter of rank {facts.rank}, to be loaded onto {base or "the model that it was trained on"}'
        base = ''
    size = ', '.join(
        [
            *([facts.family] if facts.family else []),
            *([f'{count(facts.parameters)} parameters'] if facts.parameters else []),
        ]
    )
    origin = f', made of {base}' if base else ''
    sentences = [f'`{title}` is {what}{origin}{f" ({size})" if size else ""}.']
    if role != 'actor':
        sentences.append(
            {
                'reward_model': 'It reads a prompt with an answer, and says in one number how good the answer is.',
                'critic': 'It says of every token of an answer how good the whole will be.',
            }[role]
        )
    method = method_of(facts)
    if method is not None:
        source = f' ({method.paper.shown})' if method.paper is not None else ''
        verb = 'trained with' if role == 'actor' else 'trained as'
        sentences.append(f'It was {verb} {method.name}{source} by {LIBRARY}: {method.what}.')
    elif facts.record is not None:
        sentences.append(f'It was trained with `{facts.record.method}` by {LIBRARY}.')
    else:
        sentences.append(f'It was saved with {LIBRARY}, outside a run, so this card knows nothing of its training.')
    if facts.record is not None and facts.settings.get('lora_rank') and facts.rank is None:
        sentences.append(f'LoRA adapters of rank {facts.settings["lora_rank"]} were trained, and are folded in.')
    return ' '.join(sentences)


def _rates(optimizers: Mapping[str, Any]) -> str:
    """With which learning rates it began."""
    rates = {name: o['lr'] for name, o in optimizers.items() if isinstance(o, Mapping) and 'lr' in o}
    if len(rates) < 2:
        return ''.join(f', learning rate {rate:g}' for rate in rates.values())
    return f', learning rates {" and ".join(f"{rate:g} ({name})" for name, rate in rates.items())}'


def about_use(folder: Path, facts: ModelFacts, role: Role) -> str:
    """What to know beside the code."""
    notes = ['`name` is the folder of the model, or its name on the hub.']
    if (folder / 'adapter_config.json').is_file():
        notes.append('It is an adapter, which is loaded onto the model that it was trained on; this needs `peft`.')
    elif role != 'actor' and not is_classifier(folder):
        notes.append(f'This needs {LIBRARY}, for transformers has no class for its head.')
    elif role == 'reward_model':
        notes.append('Scores of answers to the same prompt can be compared; a score alone means nothing.')
    elif facts.record is not None and facts.record.method == 'ilql':
        notes.append(
            f'transformers loads the language model alone. Its Q heads are in a file beside it, with which {LIBRARY} '
            'answers: `python -m chatgpt generate`.'
        )
    elif facts.record is not None and facts.record.generation:
        notes.append('It draws as the model was drawn from in training.')
    return ' '.join(notes)


# ---------------------------------------------------------------------- training


def training(facts: ModelFacts, drawn: bool, picture: str) -> str:
    """How it went: the picture, and the ends of its curves in numbers."""
    record = facts.record
    parts = []
    if record is not None:
        strategy = record.strategy
        ranks = strategy.get('processes') or strategy.get('world_size') or 1
        where = f'{ranks} processes ({strategy.get("name")})' if ranks > 1 else 'one process'
        device = next((gpu for start in record.starts[-1:] for gpu in start.machine.get('gpus') or ()), None)
        on = f' on {device}' if device and str(strategy.get('device')) != 'cpu' else ''
        planned = f' of {record.num_phases}' if record.num_phases and record.num_phases != record.phase else ''
        phases = max(record.phase, max((int(row['step']) for row in facts.metrics), default=0))
        resumed = f', started {len(record.starts)} times' if len(record.starts) > 1 else ''
        parts.append(
            f'{phases}{planned} learning phase{"s" * (phases != 1 or bool(planned))} in '
            f'{strategy.get("precision", "fp32")}, {where}{on}, seed '
            f'{strategy.get("seed")}{_rates(record.optimizers)}{resumed}.'
        )
        ends = {'stopped': 'It was stopped before its end.', 'failed': 'The run ended with an error.'}
        if record.status in ends:
            parts[-1] += f' {ends[record.status]}'
    if facts.improved and facts.metrics:
        parts.append(f'{facts.improved[0].upper()}{facts.improved[1:]}.')
    rows = []
    panels = panels_of(facts.metrics, facts.eval)
    for title, curves in panels:
        for label, points in curves:
            name = f'{title} ({label})' if label else title
            rows.append([name, *(f'{number(v)} (phase {s})' for s, v in (points[0], points[-1]))])
    if drawn:
        names = ', '.join(title for title, _ in panels)
        parts.append(f'![Training curves: {names}; the table below has their first and last values]({picture})')
    if rows:
        parts.append(table(['', 'first', 'last'], rows))
    if rows and not drawn and not can_draw():
        parts.append(
            'With matplotlib installed, saving the model again draws these curves here; `python -m chatgpt report` '
            'draws all of them.'
        )
    return '\n\n'.join(parts)


def data(facts: ModelFacts) -> str:
    """Which data, how much, and the names of its columns. Of a file its name alone."""
    record = facts.record
    if record is None:
        return ''
    known, settings = record.data, facts.settings
    rows = []
    for key, what in SOURCES.items():
        source = settings.get(key)
        if not source:
            continue
        hub = hub_name(source)
        name = f'[{hub}](https://huggingface.co/datasets/{hub})' if hub and key in DATA else code(without_paths(source))
        amount = {'dataset': known.get('records'), 'prompt_path': known.get('prompts')}.get(key)
        amount = known.get('eval_records') if key == 'validation_file' else amount
        columns = columns_of(source) if key in DATA else None
        rows.append([what, name, '' if amount is None else str(amount), ', '.join(map(code, columns or ()))])
    sentences = []
    if not any(settings.get(key) for key in ('dataset', 'prompt_path', 'environment')):
        amount, unit = (known['prompts'], 'prompts') if 'prompts' in known else (known.get('records'), 'records')
        if amount is not None:
            embedded = " of the library's embedded stories" if 'save_path' in settings else ''
            sentences.append(f'{amount} {unit}{embedded}.')
    if known.get('eval_records') and not settings.get('validation_file'):
        sentences.append(f'{known["eval_records"]} records were held back to evaluate on.')
    distinct, prompts = known.get('distinct'), known.get('prompts')
    if distinct and prompts and distinct < prompts:
        sentences.append(f'{distinct} of the {prompts} prompts are distinct.')
    if known.get('cut'):
        sentences.append(f'{known["cut"]} were cut, for they were too long.')
    if known.get('skipped'):
        sentences.append(f'{known["skipped"]} unusable ones were left out.')
    if record.reward is not None and not (settings.get('reward_model') or settings.get('reward_fn')):
        sentences.append(f'The reward is {reward_shown(facts)}.')
    parts = [table(['', 'source', 'rows', 'columns'], rows)] if rows else []
    return '\n\n'.join([*parts, *([' '.join(sentences)] if sentences else [])])


DATA = ('dataset', 'prompt_path', 'ptx_data', 'validation_file')


def columns_of(source: Any) -> list[str] | None:
    """Of a file that is there; None where it cannot be read again."""
    if not isinstance(source, str) or not Path(source).is_file():
        return None
    from chatgpt.dataset.reading import BadRecords, read_records

    try:
        return list(next(iter(read_records(source, BadRecords(skip=True)))).data)
    except Exception:  # moved or changed since the run read it
        return None


def reward_shown(facts: ModelFacts) -> str:
    """What scored, in the words of the command line or of a checkpoint."""
    for key in ('reward_model', 'reward_fn'):
        if facts.settings.get(key):
            return code(without_paths(facts.settings[key]))
    found = facts.record.reward if facts.record is not None else None
    if isinstance(found, list):
        return 'a weighted sum of rewards: ' + ', '.join(
            f'{number(weight)} × {_scorer(name)}' for weight, name in found
        )
    return _scorer(found)


def _scorer(found: Any) -> str:
    """`name, detail` of a checkpoint, without checksums and folders."""
    name, _, detail = str(found).partition(', ')
    if name == 'RewardModelScorer':
        return f'the reward model {code(without_paths(detail))}' if detail else 'a reward model'
    if name == 'EnvironmentScorer':
        return f'the reward {code(detail)} of its environment' if detail else 'the rewards of its environment'
    return code(name)


# ---------------------------------------------------------------------- evaluation


def measured(metrics: SequenceOf[Mapping[str, Any]], evals: SequenceOf[Mapping[str, Any]]) -> Measured:
    """(metric, before training, at the end, best) of everything measured on eval data. The best is the greatest, of a
    loss or perplexity the least; of what is neither better nor worse, such as a length, there is none."""
    names = [name for row in [*evals, *metrics] for name in row if _is_eval(name)]
    found: Measured = []
    for name in dict.fromkeys(names):
        points = [(step, float(value)) for step, value in curve(metrics, evals, name)]
        if not points:
            continue
        before = points[0][1] if points[0][0] == 0 and len(points) > 1 else None
        best = None
        if len(points) > 2 and (_UP.search(name) or _DOWN.search(name)):
            best = (min if _DOWN.search(name) else max)(value for _, value in points)
        found.append((name, before, points[-1][1], best))
    return found


_UP, _DOWN = re.compile(r'score_mean$|success_share$|accuracy|margin|reward|/metrics/'), re.compile(r'loss|perplexity')


def _is_eval(name: str) -> bool:
    return (name.startswith('eval/') and not name.endswith('_best')) or '/val_' in name


def eval_data(settings: Mapping[str, Any]) -> str:
    """What was evaluated on."""
    if settings.get('validation_file'):
        return str(without_paths(settings['validation_file']))
    if settings.get('validation_percentage'):
        source = without_paths(settings.get('dataset') or settings.get('prompt_path') or 'the data')
        return f'{settings["validation_percentage"]:g} % of {source}, held back'
    return 'eval data of the run'


def evaluation(facts: ModelFacts) -> str:
    found = measured(facts.metrics, facts.eval)
    if not found:
        return ''
    phase = max(int(row['step']) for row in [*facts.eval, *facts.metrics])
    rows = [
        [code(name), *('' if v is None else number(v) for v in (before, last, best))]
        for name, before, last, best in found
    ]
    head = ['metric', 'before training', f'last (of {phase} phases)', 'best']
    kept = [i for i, title in enumerate(head) if i in (0, 2) or any(row[i] for row in rows)]
    shown = table([head[i] for i in kept], [[row[i] for i in kept] for row in rows])
    return f'On {eval_data(facts.settings)}:\n\n{shown}'


# ---------------------------------------------------------------------- limits


def limits(facts: ModelFacts, role: Role, has_base: bool) -> str:
    """What the numbers do not say, made of what is known of this run."""
    record, method = facts.record, method_of(facts)
    points = []
    kind = method.kind if method is not None else None
    if kind == 'reward':
        points += _of_rewards(facts)
    elif kind == 'demonstrations':
        points.append('It imitates its demonstrations: their mistakes, gaps and tone are its own now.')
    elif kind == 'preferences':
        points.append(
            'It was optimised to tell the chosen answers of its data from the others, not to be right; what those who '
            'chose did not see or care for is not in it.'
        )
    elif kind == 'labels':
        points.append('It learned from the rewards that stood in its data, and has never tried an answer of its own.')
    if role == 'reward_model':
        points.append(
            'It is a proxy for the judgement of those who gave the preferences. A policy that is trained on it finds '
            'its weak points; keep another measure beside it.'
        )
    amount = None if record is None else record.data.get('distinct', record.data.get('records'))
    if amount is not None and amount < FEW:
        points.append(f'It has seen {amount} {"prompts" if "distinct" in record.data else "records"} only.')  # type: ignore[union-attr]
    if record is not None and not measured(facts.metrics, facts.eval):
        points.append('It was not evaluated on data that it was not trained on.')
    if facts.findings:
        names = ', '.join(f'`{name}`' for name in dict.fromkeys(str(row.get('finding')) for row in facts.findings))
        points.append(f'The checks during the run found: {names}.')
    points.append(
        'It was not evaluated for truth, safety, bias or privacy, nor in languages and on tasks that its data does not '
        'have.'
    )
    if has_base:
        points.append('What is known of the model that it is made of holds for it as well, its licence included.')
    return '\n'.join(f'- {point}' for point in points)


def _of_rewards(facts: ModelFacts) -> list[str]:
    points = [
        f'It was optimised for {reward_shown(facts)}. That is a proxy: a high score is not a good answer, and may have '
        'been reached by means that nobody meant. Read samples.'
    ]
    ends = curve(facts.metrics, facts.eval, 'rollout/kl_mean')
    if ends and ends[-1][1] > 0:
        points.append(
            f'It has moved {number(ends[-1][1])} nats per response away from the model that it started from (KL); the '
            'farther, the less the score can be trusted.'
        )
    cut = curve(facts.metrics, facts.eval, 'environment/end_tokens_share')  # of episodes
    if not cut:
        cut = [(at, 1 - ended) for at, ended in curve(facts.metrics, facts.eval, 'rollout/ended_share')]
    room = facts.record.generation.get('max_new_tokens') if facts.record is not None else None
    if cut and cut[-1][1] > 0.1:
        limit = f' of {room} tokens' if room else ''
        points.append(f'{100 * cut[-1][1]:.0f} % of its last responses were cut off by the limit{limit}.')
    if room:
        points.append(f'It was trained on responses of up to {room} tokens; longer ones were never scored.')
    evals = [name for name, *_ in measured(facts.metrics, facts.eval)]
    if evals and all(name.startswith('eval/score') or name in _OF_LENGTH for name in evals):
        points.append('It was evaluated by the very reward that it was trained on.')
    return points


_OF_LENGTH = ('eval/length_mean', 'eval/ended', 'eval/ended_share', 'eval/num_prompts')


# ---------------------------------------------------------------------- settings, versions, citation


def settings(facts: ModelFacts) -> str:
    """Those that differ from their defaults, and all of them behind a fold."""
    record = facts.record
    if record is None:
        return ''
    changed = {k: v for k, v in record.changed_settings().items() if k not in UNSHOWN}
    rows = [[code(k), code(without_paths(v)), code(without_paths(d))] for k, (v, d) in sorted(changed.items())]
    told_changed = table(['setting', 'value', 'default'], rows) if rows else 'All are at their defaults.'
    everything = {
        'settings': {k: v for k, v in record.settings.items() if k not in UNSHOWN},
        'generation': record.generation,
        'optimizers': record.optimizers,
    }
    text = yaml.safe_dump(
        _plain(without_paths({k: v for k, v in everything.items() if v})), sort_keys=True, allow_unicode=True
    )
    fold = f'<details>\n<summary>All settings</summary>\n\n{fenced(text.rstrip(), "yaml")}\n\n</details>'
    return f'{told_changed}\n\n{fold}'


def _plain(value: Any) -> Any:
    """What YAML can write safely."""
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_plain(v) for v in value]
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)


def versions(found: Mapping[str, str], facts: ModelFacts) -> str:
    from chatgpt import __version__

    named = {LIBRARY: found.get('chatgpt', __version__)} | {k: v for k, v in found.items() if k != 'chatgpt'}
    return ', '.join(f'{name} {number}' for name, number in named.items())


def citation(facts: ModelFacts) -> str:
    method = method_of(facts)
    if method is None or method.paper is None:
        return ''
    return fenced(method.paper.bibtex, 'bibtex')
