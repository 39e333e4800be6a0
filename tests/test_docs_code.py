"""Code on the pages and in docstrings runs as printed, offline, with tiny models in place of the hub's.

A page's Python blocks run in order, in one namespace with the names that the text assumes. A block that cannot run here
is in `CANNOT_RUN` with the reason; such a doctest is marked `+SKIP`.
"""

from __future__ import annotations

import doctest
import importlib
import re
import shutil
import textwrap
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
EXTEND = ROOT / 'docs' / 'extend'  # tests/test_extend.py runs these whole files
PAGES = ['README.md', *sorted(str(p.relative_to(ROOT)) for p in (ROOT / 'docs').rglob('*.md') if p.parent != EXTEND)]
CANNOT_RUN = {
    "docs/publishing.md: trainer.push_to_hub('my-team/words'": 'uploads; tests/publish/test_push_runs.py does so, to a '
    'hub on this machine',
    'docs/workers.md: from chatgpt.rollout import RemoteEngine': 'starts Ray, as tests/trainer/test_remote_rollouts.py '
    'does',
    'docs/workers.md: from chatgpt.trainer.checkpointing import schedules': "reads a stream's checkpoint, as "
    'tests/trainer/test_stream.py does',
    'docs/vllm.md: from chatgpt.rollout import SharedEngine': 'needs GPUs, as rollout/test_ray_workers.py counts',
    'docs/algorithms/critic.md: from chatgpt.trainer import CriticTrainer': 'launch/test_critic_command.py makes such '
    'records and learns from them',
    'docs/strategies/your_own.md: # my_strategy.py': 'runs in strategies/test_strategy_conformance.py, with the next',
    'docs/strategies/your_own.md: # check_my_strategy.py': 'runs in strategies/test_strategy_conformance.py',
}
RUN_ELSEWHERE = {'README.md: from copy import deepcopy': 'tests/test_docs.py runs it and reads what it logs'}


def blocks(page: str) -> list[str]:
    """Returns the Python blocks of a page: fenced ones, and indented ones that import chatgpt."""
    text = (ROOT / page).read_text()
    found = [(m.start(), m[1]) for m in re.finditer(r'```python\n(.*?)```', text, re.DOTALL)]
    bare = re.sub(r'```.*?```', lambda m: re.sub(r'[^\n]', 'x', m[0]), text, flags=re.DOTALL)
    for m in re.finditer(r'(?:^    .*\n|^\n(?=    ))+', bare, re.MULTILINE):
        code = textwrap.dedent(m[0].strip('\n')).strip()
        if re.search(r'^(import chatgpt|from chatgpt)', code, re.MULTILINE):
            found.append((m.start(), code))
    return [code for _, code in sorted(found)]


def name_of(page: str, block: str) -> str:
    return f'{page}: {block.splitlines()[0].split("      ")[0]}'


ALL = {(page, number): block for page in PAGES for number, block in enumerate(blocks(page))}


def test_the_search_finds_code_and_every_exception_is_still_there():
    names = {name_of(page, block) for (page, _), block in ALL.items()}
    assert {'docs/train.md: import chatgpt', 'README.md: from copy import deepcopy'} <= names
    found = {known for known in {**CANNOT_RUN, **RUN_ELSEWHERE} for name in names if name.startswith(known)}
    assert found == set(CANNOT_RUN) | set(RUN_ELSEWHERE)


def runnable() -> list[str]:
    exceptions = (*CANNOT_RUN, *RUN_ELSEWHERE)
    return sorted({page for (page, _), block in ALL.items() if not name_of(page, block).startswith(exceptions)})


@pytest.fixture(scope='module')
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from chatgpt.testing import byte_tokenizer, tiny_causal_lm

    folder = tmp_path_factory.mktemp('docs') / 'model'
    tiny_causal_lm('gpt2', vocab_size=259, pad_token_id=256, bos_token_id=257, eos_token_id=258).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


def assumed() -> dict[str, Any]:
    """Returns the names that a page's code assumes."""
    prompts = [f'a {word}' for word in 'one two three four five six seven eight'.split()]
    return {
        '__name__': 'page',
        'score': lambda prompts, responses: [float(r.count('a')) for r in responses],
        'prompts': prompts,
        'eval_prompts': prompts[:2],
        'samples': [(p, ' b') for p in prompts],
        'rewards': [float(i % 2) for i in range(len(prompts))],
        'preferences': [{'prompt': p, 'chosen': ' b', 'rejected': ' c'} for p in prompts],
    }


def tiny(block: str, model: Path) -> str:
    """Returns the block with a folder in place of a hub name and fewer steps."""
    block = re.sub(r"'(gpt2|facebook/opt-\w+|EleutherAI/[\w.-]+)'", repr(str(model)), block)
    block = re.sub(r"(?<=from_pretrained\()'outputs/[\w/]+'", repr(str(model)), block)
    return re.sub(
        r'num_timesteps=\d+',
        'num_timesteps=1, experience_batch_size=8, train_batch_size=8',
        re.sub(r'max_new_tokens=\d+', 'max_new_tokens=4', block),
    )


@pytest.mark.parametrize('page', runnable())
def test_the_code_of_a_page_runs(page, model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copy(model / 'config.json', tmp_path)
    for name in ('ppo', 'grpo'):  # runs that a page reads
        folder = tmp_path / 'outputs' / name
        folder.mkdir(parents=True)
        (folder / 'metrics.jsonl').write_text('{"step": 1, "rollout/score_mean": 0.5}\n')
    names = assumed()
    for (where, _), block in ALL.items():
        if where == page and not name_of(page, block).startswith((*CANNOT_RUN, *RUN_ELSEWHERE)):
            exec(compile(tiny(block, model), page, 'exec'), names)


# ---------------------------------------------------------------- docstrings

MODULES = [
    str(p.relative_to(ROOT).with_suffix('')).replace('/', '.').removesuffix('.__init__')
    for p in sorted((ROOT / 'chatgpt').rglob('*.py'))
    if '>>> ' in p.read_text()
]


def examples(module: Any) -> list[doctest.DocTest]:
    import torch

    from chatgpt import types

    given = {'torch': torch, **{n: getattr(types, n) for n in ('Prompt', 'Sample', 'Sequence')}}
    return doctest.DocTestFinder(exclude_empty=True).find(module, extraglobs=given)


@pytest.mark.parametrize('name', MODULES)
def test_docstrings_run(name):
    module = importlib.import_module(name)
    flags = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS
    runner = doctest.DocTestRunner(optionflags=flags)
    for test in examples(module):
        output: list[str] = []
        runner.run(test, out=output.append)
        assert runner.summarize(verbose=False).failed == 0, ''.join(output)
