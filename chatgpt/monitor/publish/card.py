"""The model card of a saved model: README.md from the template `card.md.j2`.

Of paths the card shows only the last part; it does not show the command line or names of machines and accounts.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from textwrap import indent
from typing import Any, Literal, NamedTuple

import yaml

from chatgpt import __version__
from chatgpt.data.formats import TEXT_CHOICE
from chatgpt.monitor.report.series import Column, columns, number, what_improved
from chatgpt.monitor.report.text import value_text
from chatgpt.monitor.run_folder import RunFolder, RunRecord
from chatgpt.monitor.run_folder.record import without_secrets

CARD, NUM_SAMPLES = 'README.md', 3
MARKER = '<!-- Written by chatgpt-rlhf.'
NOTE = f'{MARKER} Saving the model here again replaces this page; without this line it is yours, and stays. -->'
MOST_CHARACTERS = 600
"""maximum length of a sample"""
UNSHOWN = frozenset({'save_path', 'model_path', 'resume', 'push_to_hub', 'hub_private', 'card_samples', 'plan'})
"""settings that the card does not show"""
RUN_FILES = ('actor', 'reward_model', 'model', 'hf_model', 'adapter', 'critic')
"""folder names that do not identify a run"""
FILES = ('.jsonl', '.json', '.csv', '.tsv', '.parquet', '.txt', '.arrow', '.py', '.gz', '.yaml', '.yml', '.bin', '.git')
Role = Literal['actor', 'reward_model', 'critic']
Measured = list[tuple[str, float | None, float, float | None]]


@dataclass(kw_only=True)
class ModelFacts:
    """Facts about a model and the run that trained it; `record` is None for a model saved without a run.

    Args:
        samples: rows of one phase with prompt, response and score.
        of_eval: the samples are of eval prompts.
        improved: the improvement over the run, in a line.
        source: hub name or folder that the model was loaded from.
        rank: rank of the adapters, if only these are saved.
        more: front matter, such as license or language; takes precedence over derived values.
    """

    record: RunRecord | None = None
    metrics: Sequence[Mapping[str, Any]] = ()
    eval: Sequence[Mapping[str, Any]] = ()
    samples: Sequence[Mapping[str, Any]] = ()
    findings: Sequence[Mapping[str, Any]] = ()
    of_eval: bool = False
    improved: str = ''
    source: str | None = None
    parameters: int | None = None
    family: str | None = None
    rank: int | None = None
    run_name: str | None = None
    more: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, run: RunFolder, **more: Any) -> ModelFacts:
        """Returns the facts of a run's folder."""
        rows: Any = {name: getattr(run, name) for name in ('record', 'metrics', 'eval', 'findings')}
        samples = run.eval_samples or run.samples
        last = [row for row in samples if row['step'] == samples[-1]['step']]
        of_eval = bool(run.eval_samples)
        return cls(**rows, samples=last, of_eval=of_eval, run_name=run.name, improved=what_improved(run), **more)


class Base(NamedTuple):
    """The base of a model: the nearest hub name, the title of a local model, and the licence."""

    hub: str | None = None
    local: str = ''
    license: str | None = None


class Shape(NamedTuple):
    """How a saved model is loaded. `auto`: class of transformers, or of `chatgpt.nn` for heads that transformers does
    not have. `adapter_base`: base of a folder with adapters only. `chats`: it was trained on turns of a chat."""

    auto: str
    own_head: bool
    writes: bool
    encoder_decoder: bool
    has_tokenizer: bool
    adapter_base: str | None
    chats: bool


def is_ours(text: str) -> bool:
    """Returns True if a card has the marker of this library."""
    return MARKER in text


def write_card(folder: str | Path, facts: ModelFacts, *, role: Role = 'actor', num_samples: int = NUM_SAMPLES) -> bool:
    """Writes README.md into a saved model's folder. Returns False, without writing, if one has no marker."""
    from huggingface_hub import ModelCard

    path = Path(folder, CARD)
    if path.exists() and not is_ours(path.read_text(encoding='utf-8', errors='replace')):
        return False
    place, record = path.absolute().parent, facts.record or RunRecord(method='', trainer='')
    run = facts.run_name or ('' if place.parent == Path.home() else place.parent.name)
    title = (run if place.name in RUN_FILES else '') or place.name or 'model'
    found = columns([*facts.metrics, *facts.eval])
    base, shape, measured = base_of(facts.source), shape_of(place, role), measured_on_eval(found)
    settings = {key: value for key, value in record.settings.items() if key not in UNSHOWN}
    everything = {'settings': settings, 'generation': record.generation, 'optimizers': record.optimizers}
    functions: dict[str, Any] = {'block': block, 'code': code, 'hub_name': hub_name, 'number': number, 'repr': repr}
    about_model: dict[str, Any] = {'title': title, 'name': place.name, 'role': role, 'base': base, 'shape': shape}
    card = ModelCard.from_template(
        front_matter(facts, title, role, shape, measured, base),
        template_path=str(Path(__file__).with_name('card.md.j2')),
        facts=facts,
        note=NOTE,
        version=__version__,
        reward=reward_of(record),
        settings=without_paths(settings),
        measured=measured,
        only_score=all(re.match('eval/(score|length|ended|num_prompts)', name) for name, *_ in measured),
        samples=list(facts.samples)[:num_samples],
        last={name: values[-1] for name, (_, values) in found.items()},
        everything=yaml.safe_dump(json.loads(json.dumps(without_paths(everything), default=str))).rstrip(),
        **about_model,
        **functions,
    )
    card.save(path)
    return True


def set_name(folder: str | Path, repo_id: str) -> None:
    """Changes the code of our card to load the model from a repository."""
    path = Path(folder, CARD)
    if path.is_file() and is_ours(text := path.read_text(encoding='utf-8', errors='replace')):
        path.write_text(re.sub(r'(?m)^name = .*$', f'name = {repo_id!r}', text, count=1), encoding='utf-8')


def front_matter(facts: ModelFacts, title: str, role: Role, shape: Shape, measured: Measured, base: Base) -> Any:
    """Returns the card's metadata for the hub, a `ModelCardData`."""
    from huggingface_hub import EvalResult, ModelCardData

    method, settings = (facts.record.method, facts.record.settings) if facts.record else ('', {})
    writes = 'text2text-generation' if shape.encoder_decoder else 'text-generation'
    task = writes if role == 'actor' else 'text-classification'
    tags = ['chatgpt-rlhf', method, '' if method == 'sft' else 'rlhf']
    tags += ['lora'] if shape.adapter_base or settings.get('lora_rank') else []
    datasets = [hub_name(settings.get(key)) for key in ('dataset', 'prompt_path', 'ptx_data')]
    evaluated = settings.get('validation_file')
    data = hub_name(evaluated) or 'local', str(without_paths(evaluated) or 'eval data of the run')
    results = [
        EvalResult(task, *data, name.rpartition('/')[2], last, metric_name=name) for name, _, last, _ in measured
    ]
    known: dict[str, Any] = {
        'base_model': base.hub,
        'base_model_relation': ('adapter' if shape.adapter_base else 'finetune') if base.hub else None,
        'library_name': 'peft' if shape.adapter_base else 'chatgpt-rlhf' if shape.own_head else 'transformers',
        'pipeline_tag': None if shape.own_head else task,
        'tags': list(dict.fromkeys(filter(None, tags))),
        'datasets': list(dict.fromkeys(filter(None, datasets))) or None,
        'license': base.license,
        'model_name': title if results else None,
        'eval_results': results or None,
    }
    return ModelCardData(**known | facts.more)


def base_of(source: str | None) -> Base:
    """Returns the base for a hub name or a folder; the card of a folder names the base of its model."""
    from huggingface_hub import ModelCard

    if not source or hub_name(source):
        return Base(source or None)
    title, known = Path(source).name, {}
    try:
        card = ModelCard(Path(source, CARD).read_text(encoding='utf-8'), ignore_metadata_errors=True)
        title = found[1] if is_ours(card.text) and (found := re.search(r'(?m)^# (.+)$', card.text)) else title
        known = card.data.to_dict()
    except Exception:  # there is no card, or a broken one
        pass
    base, license = known.get('base_model'), known.get('license')
    hub = hub_name(base[0] if isinstance(base, list) and base else base)
    return Base(hub, title, license if isinstance(license, str) else None)


def shape_of(folder: Path, role: Role) -> Shape:
    """Returns the `Shape` of a saved folder, from its files."""
    files = (folder / name for name in ('adapter_config.json', 'config.json'))
    adapter, config = (json.loads(path.read_text()) if path.is_file() else {} for path in files)
    tokenizer = folder / 'tokenizer_config.json'
    chats = tokenizer.is_file() and bool(json.loads(tokenizer.read_text(encoding='utf-8')).get(TEXT_CHOICE))
    encoder_decoder = adapter.get('task_type') == 'SEQ_2_SEQ_LM' or bool(config.get('is_encoder_decoder'))
    auto = 'AutoModelForSeq2SeqLM' if encoder_decoder else 'AutoModelForCausalLM'
    if adapter:
        writes, base = adapter.get('task_type') in ('CAUSAL_LM', 'SEQ_2_SEQ_LM'), adapter.get('base_model_name_or_path')
        named = hub_name(base) or Path(base or 'base').name
        return Shape(auto if writes else 'AutoModel', False, writes, encoder_decoder, writes, named, chats)
    classifier = any('ForSequenceClassification' in name for name in config.get('architectures') or ())
    own_head = role == 'critic' or (role == 'reward_model' and not classifier)
    scores = {'critic': 'Critic', 'reward_model': 'RewardModel' if own_head else 'AutoModelForSequenceClassification'}
    return Shape(scores.get(role, auto), own_head, role == 'actor', encoder_decoder, tokenizer.is_file(), None, chats)


def measured_on_eval(found: Mapping[str, Column]) -> Measured:
    """Returns (metric, before training, last, best) of the metrics on eval data. The best is the maximum, of a loss or
    perplexity the minimum; None for metrics without a direction, such as a length."""
    rows: Measured = []
    for name, (steps, column) in found.items():
        values = [value for value in column if value is not None]
        if not values or name.endswith('_best') or not (name.startswith('eval/') or '/val_' in name):
            continue
        falls = re.search('loss|perplexity', name)
        rises = re.search('score_mean$|success_share$|accuracy|margin|reward|/metrics/', name)
        best = (min if falls else max)(values) if len(values) > 2 and (falls or rises) else None
        rows.append((name, column[0] if steps[0] == 0 and len(values) > 1 else None, values[-1], best))
    return rows


def reward_of(record: RunRecord) -> str:
    """Returns the reward as the command line or a checkpoint describes it, without checksums and folders."""
    if named := record.settings.get('reward_model') or record.settings.get('reward_fn'):
        return code(named)
    parts = record.reward if isinstance(record.reward, list) else [(None, record.reward)] if record.reward else []
    parts_text = []
    for weight, described in parts:
        name, _, detail = str(described).partition(', ')
        kind = {'RewardModelScorer': 'the reward model', 'EnvironmentScorer': "the environment's reward"}.get(name)
        text = code(name) if kind is None else f'{kind} {code(detail)}' if detail else kind
        parts_text.append(text if weight is None else f'{number(weight)} × {text}')
    return ('a weighted sum of rewards: ' if isinstance(record.reward, list) else '') + ', '.join(parts_text)


# ---------------------------------------------------------------------- values and texts for a public page


def hub_name(source: Any) -> str | None:
    """Returns a hub name, `NAME` or `ACCOUNT/NAME`; None for a file, a folder, or anything else."""
    part = r'[A-Za-z0-9][\w.-]{0,95}'
    if not isinstance(source, str) or not re.fullmatch(f'{part}(/{part})?', source) or '--' in source or '..' in source:
        return None
    return None if source.endswith((*FILES, '.')) or Path(source).exists() else source


def without_paths(value: Any) -> Any:
    """Returns the value with every path, at any depth, replaced by its last part; a secret becomes ***, a hub name
    stays."""
    value = without_secrets(value)
    if isinstance(value, Mapping):
        return {str(k): without_paths(v) for k, v in value.items()}
    if isinstance(value, list):
        return [without_paths(v) for v in value]
    text = str(value) if isinstance(value, Path) else value
    if not isinstance(text, str) or hub_name(text) or re.fullmatch(r'(</?[\w|:.-]+/?>)+', text):
        return text  # the ends of XML elements are stop strings
    begins = re.match(r'(~|\.\.?)?[/\\]\S|[A-Za-z]:[/\\]', text)
    if begins or (re.search(r'[/\\]', text) and not re.search(r'\s', text)):
        return re.split(r'[/\\]', text.rstrip('/\\'))[-1] or text
    return re.sub(r'(?<![\w.])(?:~|\.\.?|[A-Za-z]:)?[/\\](?:[^\s/\\:]+[/\\])+', '', text)


def code(value: Any) -> str:
    """Formats a value without folders, as a code span inside a table."""
    text = value_text(without_paths(value)).replace('\n', '⏎')
    fence = '`' * (1 + max(map(len, re.findall('`+', text)), default=0))
    pad = ' ' if '`' in text else ''
    return f'{fence}{pad}{text}{pad}{fence}'.replace('|', '\\|')


def block(text: Any) -> str:
    """Formats a text as an indented block, which no text can end, cut at `MOST_CHARACTERS`. Characters that are
    invisible or change the reading order are shown as escapes."""
    shown = str(text)[:MOST_CHARACTERS] + (' …' if len(str(text)) > MOST_CHARACTERS else '')
    return indent(''.join(c if c in '\n\t' or c.isprintable() else f'\\u{ord(c):04x}' for c in shown), 4 * ' ')
