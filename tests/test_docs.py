"""The pages agree with the code: links, names, flags and messages exist, and the README's code runs."""

from __future__ import annotations

import json
import math
import re
import warnings
from dataclasses import fields
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / 'docs'
PAGES = [ROOT / 'README.md', ROOT / 'CONTRIBUTING.md', *sorted(DOCS.rglob('*.md'))]
METRICS = '\n'.join(page.read_text() for page in sorted(DOCS.glob('metrics*.md')))
ALGORITHMS = sorted((DOCS / 'algorithms').glob('*.md'))


# ---------------------------------------------------------------------- links and paths


def slugs(page: Path) -> set[str]:
    """Returns the anchors of the page's headings, as code hosts make them."""
    text = re.sub(r'^```.*?^```', '', page.read_text(), flags=re.DOTALL | re.MULTILINE)
    found: set[str] = set()
    for heading in re.findall(r'^#+ (.+)$', text, re.MULTILINE):
        words = re.sub(r'\[([^\]]+)\]\([^)]*\)', r'\1', heading).lower()
        slug = re.sub(r'[^\w\- ]', '', words).replace(' ', '-')
        found.add(next(s for s in (slug, *(f'{slug}-{n}' for n in range(1, 99))) if s not in found))
    return found


def test_links_lead_to_files_and_headings():
    wrong = []
    for page in PAGES:
        for path, anchor in re.findall(r'\]\((?!https?:)([^)#]*)#?([^)]*)\)', page.read_text()):
            target = (page.parent / path).resolve() if path else page
            if not target.exists() or anchor and target.suffix == '.md' and anchor not in slugs(target):
                wrong.append(f'{page.name}: {path}#{anchor}')
    assert not wrong
    assert 'the-reward-models-accuracy-stays-near-05' in slugs(DOCS / 'troubleshooting.md')


@pytest.mark.parametrize('page', ALGORITHMS, ids=lambda p: p.stem)
def test_a_page_of_an_algorithm_has_settings_that_exist_and_metrics_that_are_documented(page):
    from chatgpt.launch.methods import METHODS
    from chatgpt.launch.runs import run_class
    from chatgpt.rollout.sampling import generation_fields
    from chatgpt.trainer import RFTConfig
    from chatgpt.trainer.objectives.pairs import DPOConfig

    found = re.split(r'^## (.+)$', page.read_text(), flags=re.MULTILINE)[1:]
    parts = dict(zip(found[::2], found[1::2], strict=True))
    configs = (*(run_class(method) for method in METHODS), DPOConfig, RFTConfig)
    settings = {f.name for config in configs for f in fields(config)} | set(generation_fields())
    listed = re.findall(r'^\| `(\w+)`', parts['Defaults'], re.MULTILINE)
    assert listed and set(listed) <= settings
    metrics = re.findall(
        r'`((?:rollout|environment|ppo|sft|rm|dpo|orpo|simpo|kto|ilql|rft|perf)/[a-z_0-9.]+)`', parts['Metrics']
    )
    known = METRICS
    assert [name for name in metrics if f'`{name.removesuffix("...")}' not in known] == []


# ---------------------------------------------------------------------- the README's quickstart


def test_the_quickstart_runs_as_printed_and_logs_only_what_is_documented(tmp_path, monkeypatch):
    """Runs with a folder of a tiny model in place of the hub's name."""
    from chatgpt.testing import byte_tokenizer, tiny_causal_lm

    ids = {'vocab_size': 259, 'pad_token_id': 256, 'bos_token_id': 257, 'eos_token_id': 258}
    tiny_causal_lm('gpt2', **ids).save_pretrained(tmp_path / 'model')
    byte_tokenizer().save_pretrained(tmp_path / 'model')
    (block,) = re.findall(r'```python\n(.*?)```', (ROOT / 'README.md').read_text(), re.DOTALL)
    assert block.count("'gpt2'") == 3
    monkeypatch.chdir(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter('error', UserWarning)  # such as a ratio other than 1
        exec(compile(block.replace("'gpt2'", "'model'"), 'README.md', 'exec'), {'__name__': 'readme'})
    lines = [json.loads(line) for line in Path('outputs/quickstart/metrics.jsonl').read_text().splitlines()]
    assert [line.pop('step') for line in lines] == [1, 2]
    documented = set(re.findall(r'`([a-z_]+(?:/[a-z_0-9]+)+)`', METRICS))
    for line in lines:
        assert not set(line) - documented
        assert all(value is not None and math.isfinite(value) for value in line.values())


# ---------------------------------------------------------------------- length

MOST_LINES, WIDTH = 150, 120
GENERATED = {'results/model_types.md'}
"""written by a script from its first table to its last"""


def prose(text: str) -> list[str]:
    """Returns the lines of a page outside code, tables and generated parts, with links as their text."""
    text = re.sub(r'^```.*?^```', '', text, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r'^<!-- (?P<name>.+) -->$.*?^<!-- end of (?P=name) -->$', '', text, flags=re.DOTALL | re.MULTILINE)
    lines = (re.sub(r'\]\([^)]*\)', ']', line) for line in text.splitlines())
    return [line for line in lines if not line.startswith(('|', '    '))]


def too_long(text: str) -> list[str]:
    count = len(text.splitlines())
    found = [f'{count} lines, of at most {MOST_LINES}'] if count > MOST_LINES else []
    return found + [line for line in prose(text) if len(line) > WIDTH]


def test_pages_are_short():
    pages = {str(page.relative_to(DOCS)): too_long(page.read_text()) for page in sorted(DOCS.rglob('*.md'))}
    assert pages.keys() >= GENERATED
    assert {name: found for name, found in pages.items() if found and name not in GENERATED} == {}


def test_a_long_page_and_a_long_line_are_found():
    assert too_long('word\n' * 150) == [] and too_long('word\n' * 151) == ['151 lines, of at most 150']
    line = 'word ' * 25
    assert too_long(f'{line}\n') == [line]
    assert too_long(f'| {line} |\n    {line}\n```\n{line}\n```\n<!-- a -->\n{line}\n<!-- end of a -->\n') == []
    assert too_long(f'[words](https://example.org/{"x" * 120})\n') == []
