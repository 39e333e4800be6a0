"""The model card of a trained model: README.md with the hub's front matter, and training_curves.png beside it.

A card says what the run's folder says, or what the trainer knows where there is none. It never shows more of a path
than its last part, nor the command line, the machine's name or anybody's account. Left out: the sentences' words
(`words`), the code that uses the model (`use`).
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from chatgpt.publish import words
from chatgpt.publish.facts import ModelFacts
from chatgpt.publish.method_words import LIBRARY, METHOD_WORDS
from chatgpt.publish.picture import can_draw, draw, panels_of
from chatgpt.publish.text import block, fenced, hub_name
from chatgpt.publish.use import Role, is_classifier, is_encoder_decoder, snippet
from chatgpt.report.series import number
from chatgpt.run_folder import RunRecord

CARD, PICTURE = 'README.md', 'training_curves.png'
MARKER = f'<!-- Written by {LIBRARY}.'
NOTE = f'{MARKER} Saving the model here again replaces this page; without this line it is yours, and stays. -->'
NUM_SAMPLES = 3
LONGEST_EXAMPLE = 200
"""characters of the prompt in the code"""
RUN_FILES = ('actor', 'reward_model', 'model', 'hf_model', 'adapter', 'critic')
"""folders whose name says nothing of the run"""


# ---------------------------------------------------------------------- writing


def is_ours(text: str) -> bool:
    """Whether this library has written a card, and nobody has made it his own."""
    return MARKER in text


def write_card(folder: str | Path, facts: ModelFacts, *, role: Role = 'actor', num_samples: int = NUM_SAMPLES) -> bool:
    """Write README.md, and the picture where there is something to draw, into a saved model's folder.

    Returns False where there is a README.md that is somebody's own; then nothing is written.
    """
    folder = Path(folder)
    path = folder / CARD
    if path.exists() and not is_ours(path.read_text(encoding='utf-8', errors='replace')):
        return False
    title = title_of(folder, facts)
    panels = panels_of(facts.metrics, facts.eval)
    drawn = can_draw() and draw(folder / PICTURE, panels, title)
    if not drawn:
        (folder / PICTURE).unlink(missing_ok=True)
    samples = list(facts.samples)[:num_samples]
    body = _body(folder, facts, title, role, samples, drawn)
    text = f'---\n{front_matter(folder, facts, title, role)}\n---\n\n{NOTE}\n\n{body}'
    path.write_text(text, encoding='utf-8')
    return True


def set_name(folder: str | Path, repo_id: str) -> None:
    """Where the code of our card reads the model from, once the model has an address."""
    path = Path(folder, CARD)
    if path.is_file() and is_ours(text := path.read_text(encoding='utf-8', errors='replace')):
        path.write_text(re.sub(r'(?m)^name = .*$', f'name = {repo_id!r}', text, count=1), encoding='utf-8')


def title_of(folder: Path, facts: ModelFacts) -> str:
    """What was said, else the name of the model's folder, or of the run's where the former says nothing. That of a home
    is its owner's, and is not shown."""
    place = folder.absolute()
    is_home = place.parent == Path(os.path.expanduser('~'))
    run = facts.run_name or ('' if is_home else place.parent.name)
    return facts.title or (run if place.name in RUN_FILES else '') or place.name or 'model'


# ---------------------------------------------------------------------- front matter


def front_matter(folder: Path, facts: ModelFacts, title: str, role: Role) -> str:
    """YAML as the hub reads it."""
    from huggingface_hub import EvalResult, ModelCardData

    base = base_of(facts)
    adapter = (folder / 'adapter_config.json').is_file()
    classifier = role == 'reward_model' and is_classifier(folder)
    method = facts.record.method if facts.record is not None else None
    writes = 'text2text-generation' if is_encoder_decoder(folder) else 'text-generation'
    evaluated = words.measured(facts.metrics, facts.eval)
    where = facts.settings.get('validation_file')
    results = [
        EvalResult(
            task_type=writes if role == 'actor' else 'text-classification',
            dataset_type=hub_name(where) or 'local',
            dataset_name=words.eval_data(facts.settings),
            metric_type=name.rpartition('/')[2],
            metric_name=name,
            metric_value=last,
        )
        for name, _, last, _ in evaluated
    ]
    datasets = [found for key in ('dataset', 'prompt_path', 'ptx_data') if (found := hub_name(facts.settings.get(key)))]
    more = dict(facts.more)
    tags = [LIBRARY, *([method] if method in METHOD_WORDS else []), *(['rlhf'] if method != 'sft' else [])]
    tags += ['lora'] * bool(adapter or facts.settings.get('lora_rank'))
    tags += [tag for tag in more.pop('tags', None) or () if tag not in tags]
    datasets += [name for name in more.pop('datasets', None) or () if name not in datasets]
    data = ModelCardData(
        base_model=base.hub,
        base_model_relation=('adapter' if adapter else 'finetune') if base.hub else None,
        library_name='peft' if adapter else 'transformers' if role == 'actor' or classifier else LIBRARY,
        pipeline_tag=writes if role == 'actor' else 'text-classification' if classifier else None,
        tags=tags,
        datasets=datasets or None,
        license=more.pop('license', None) or base.license,
        model_name=title if results else None,
        eval_results=results or None,
        **more,
    )
    return data.to_yaml()


@dataclass(frozen=True)
class Base:
    """What a model started from."""

    hub: str | None = None
    """the nearest that has a name of the hub"""
    shown: str = ''
    license: str | None = None


def base_of(facts: ModelFacts) -> Base:
    """A name of the hub is taken as it is; of a folder that has a card, what that says it started from."""
    source = facts.source
    if not source:
        return Base()
    if (name := hub_name(source)) is not None:
        return Base(name, f'[{name}](https://huggingface.co/{name})')
    card, named = Path(source, CARD), Path(source).name
    known: Mapping[str, Any] = {}
    if card.is_file():
        from huggingface_hub import ModelCard

        text = card.read_text(encoding='utf-8', errors='replace')
        if is_ours(text) and (title := re.search(r'(?m)^# (.+)$', text)):
            named = title[1]
        try:
            known = ModelCard(text, ignore_metadata_errors=True).data.to_dict()
        except Exception:  # somebody's own, whatever is wrong with it
            known = {}
    base = known.get('base_model')
    base = base[0] if isinstance(base, list) and base else base
    hub = hub_name(base)
    license = known.get('license')
    shown = f'the model `{named}`'
    if hub:
        shown += f', which is made of [{hub}](https://huggingface.co/{hub})'
    return Base(hub, shown, license if isinstance(license, str) else None)


# ---------------------------------------------------------------------- the page


def _body(
    folder: Path, facts: ModelFacts, title: str, role: Role, samples: SequenceOf[Mapping[str, Any]], drawn: bool
) -> str:
    record = facts.record
    generation = record.generation if record is not None else {}
    prompt, response = _example(samples)
    code = snippet(folder, role, name=folder.absolute().name, prompt=prompt, response=response, generation=generation)
    base = base_of(facts)
    sections: list[tuple[str, str]] = [('', words.introduction(facts, role, base.shown, title))]
    sections.append(('How to use it', f'{fenced(code, "python")}\n\n{words.about_use(folder, facts, role)}'))
    sections.append(('Training', words.training(facts, drawn, PICTURE)))
    sections.append(('Data', words.data(facts)))
    sections.append(('Evaluation', words.evaluation(facts)))
    if samples:
        sections.append(('Samples', _samples(samples, facts)))
    sections.append(('Limits', words.limits(facts, role, bool(base.shown))))
    sections.append(('Settings', words.settings(facts)))
    sections.append(('Versions', words.versions(versions_of(record), facts)))
    sections.append(('Citation', words.citation(facts)))
    text = [f'# {title}']
    for name, content in sections:
        if content.strip():
            text.append(f'## {name}\n\n{content.strip()}' if name else content.strip())
    return '\n\n'.join(text) + '\n'


def _example(samples: SequenceOf[Mapping[str, Any]]) -> tuple[str, str]:
    for row in samples:
        if isinstance(row.get('prompt'), str) and 0 < len(row['prompt']) <= LONGEST_EXAMPLE:
            return row['prompt'], str(row.get('response', ''))[:LONGEST_EXAMPLE]
    return 'Once upon a time', ' there was a fox.'


def _samples(samples: SequenceOf[Mapping[str, Any]], facts: ModelFacts) -> str:
    step = samples[0].get('step')
    where = 'eval prompts' if facts.eval else 'training prompts'
    when = f' after phase {step}' if step else ''
    parts = [f'The first {len(samples)} of the {where}{when}; they are not chosen.']
    for row in samples:
        score = row.get('score')
        told_score = f', score {number(score)}' if isinstance(score, (int, float)) else ''
        parts.append(f'Prompt:\n\n{block(str(row.get("prompt", "")))}\n\nResponse{told_score}:')
        parts.append(block(str(row.get('response', ''))))
    return '\n\n'.join(parts)


def versions_of(record: RunRecord | None) -> dict[str, str]:
    """Of the run's last start, or of what is installed here."""
    if record is not None and record.starts:
        return dict(record.starts[-1].versions)
    found = {}
    for package in ('torch', 'transformers', 'tokenizers'):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
