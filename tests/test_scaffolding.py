"""Files around the package agree with it and with each other; the build of torch that `make` installs."""

from __future__ import annotations

import ast
import json
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]


def pins(name: str) -> dict[str, str]:
    """Returns {package: version} of a requirements file; fails for a line that is not an exact pin."""
    found: dict[str, str] = {}
    for line in (ROOT / name).read_text().splitlines():
        line = line.split('#')[0].strip()
        if line:
            match = re.fullmatch(r'([A-Za-z0-9._-]+)==([A-Za-z0-9.+!]+)', line)
            assert match, f'{name}: {line!r} is not an exact pin'
            assert canonicalize_name(match[1]) not in found, f'{name}: {match[1]} is pinned twice'
            found[canonicalize_name(match[1])] = match[2]
    return found


@pytest.fixture(scope='module')
def metadata() -> dict:
    pytest.importorskip('setuptools', reason='setup.py needs setuptools')
    return runpy.run_path(str(ROOT / 'setup.py'))


def test_no_page_or_message_installs_the_package_of_a_stranger(metadata):
    assert metadata['NAME'] == 'chatgpt-rlhf'  # 'chatgpt' on PyPI is another project
    wrong = re.compile(
        r"""(pip|uv|uvx|pipx) (install|add|download) [^\n`]*?(?<![\w./-])chatgpt(?![\w./-])|(?<![\w./-])chatgpt\["""
    )
    assert wrong.search('pip install -U "chatgpt"') and not wrong.search("pip install 'chatgpt-rlhf[ray]'")
    folders = ('docs', 'chatgpt', 'compat/chatgpt_compat', 'examples', 'benchmarks')
    pages = [p for folder in folders for end in ('md', 'py') for p in (ROOT / folder).rglob(f'*.{end}')]
    pages += [*ROOT.glob('*.*'), ROOT / 'Makefile']
    assert {p.name: found[0] for p in pages if p.is_file() and (found := wrong.search(p.read_text()))} == {}


def test_setup_finds_every_package():
    from setuptools import find_packages

    found = set(find_packages(str(ROOT), include=['chatgpt', 'chatgpt.*']))
    folders = {p.parent.relative_to(ROOT).as_posix().replace('/', '.') for p in (ROOT / 'chatgpt').rglob('*.py')}
    assert found == folders and 'chatgpt.trainer.callbacks' in found


def test_every_requirement_is_pinned_to_a_version_that_setup_allows(metadata):
    pinned = pins('requirements.txt')
    required = [Requirement(r) for r in metadata['INSTALL_REQUIRES']]
    assert {r.name for r in required} >= {'torch', 'transformers', 'loralib', 'safetensors'}
    for requirement in required:
        version = pinned[canonicalize_name(requirement.name)]
        assert requirement.specifier.contains(version), f'{requirement} does not allow the pinned {version}'


def test_requirement_files_do_not_contradict_each_other():
    core, dev = pins('requirements.txt'), pins('requirements-dev.txt')
    assert not set(core) & set(dev)
    both = core | dev
    vllm = pins('requirements-vllm.txt')
    assert vllm['ray'] == pins('requirements-ray.txt')['ray'] and 'torch' not in vllm
    for kind in ('colossalai', 'ray', 'docs', 'openenv'):
        extra = pins(f'requirements-{kind}.txt')
        assert {name: both[name] for name in extra if name in both} == {
            name: extra[name] for name in extra if name in both
        }


def imported_on_loading(path: Path) -> set[str]:
    body = ast.parse(path.read_text()).body
    names = [alias.name for node in body if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module or '' for node in body if isinstance(node, ast.ImportFrom)]
    return {name.split('.')[0] for name in names}


def test_every_import_of_the_package_is_a_requirement(metadata):
    known = {canonicalize_name(Requirement(r).name) for r in metadata['INSTALL_REQUIRES']} | {'yaml', 'chatgpt'}
    found = set().union(*map(imported_on_loading, (ROOT / 'chatgpt').rglob('*.py'))) - sys.stdlib_module_names
    assert {name for name in found if canonicalize_name(name) not in known} == set()


def make(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(['make', *arguments], cwd=ROOT, capture_output=True, text=True)


def test_make_installs_torch_pinned_before_anything_else(tmp_path):
    """Without an environment, make creates a venv, then installs torch alone at its pin, then the rest."""
    done = make('--dry-run', 'demo', f'VENV={tmp_path}/venv', 'PYTHON=some-python')
    assert done.returncode == 0, done.stderr
    steps = [
        line for line in done.stdout.splitlines() if ' -m venv ' in line or ' install ' in line or line.endswith('.py')
    ]
    assert 'some-python -m venv' in steps[0]
    assert (
        steps[1].endswith('install_torch.py') and '-r requirements.txt' in steps[2] and 'examples/demo.py' in steps[-1]
    )
    assert not any('colossalai' in step for step in steps)


def test_ci_runs_the_commands_that_the_page_names():
    commands = re.findall(r'^(?:exec )?make (\S+) </dev/null$', (ROOT / '.ci' / 'run').read_text(), re.MULTILINE)
    listed = re.search(r'^`\.ci/run` runs (.+),', (ROOT / 'CONTRIBUTING.md').read_text(), re.MULTILINE)
    assert listed is not None and commands and re.findall(r'`make (\S+)`', listed[1]) == commands


CPU = 'https://download.pytorch.org/whl/cpu'


@pytest.fixture
def script():
    return runpy.run_path(str(ROOT / 'install_torch.py'))


def test_without_a_gpu_it_is_the_cpu_build_where_its_index_answers(script, monkeypatch):
    choose = script['choose']
    for answers, want in ((True, CPU), (False, None)):
        monkeypatch.setitem(choose.__globals__, 'answers', lambda index, a=answers: a)
        index, why = choose(None, 0, 'Linux')
        assert index == want and why.startswith('the CPU build' if answers else 'the default build')
    monkeypatch.setitem(choose.__globals__, 'answers', lambda index: pytest.fail('asked'))
    assert choose(None, 0, 'Darwin')[0] is None
    assert script['answers']('http://127.0.0.1:9') is False
    assert choose('https://host/whl', 4, 'Linux') == ('https://host/whl', 'from https://host/whl, as TORCH_INDEX says')


def test_every_mutant_has_its_statement():
    """A renamed function or a changed statement leaves a mutant 'gone', which `try` does not count as an error."""
    planted = runpy.run_path(str(ROOT / 'tests' / 'mutants' / 'run.py'))['planted']
    mutants = json.loads((ROOT / 'tests' / 'mutants' / 'mutants.json').read_text())
    assert mutants and [m['function'] for m in mutants if planted(ROOT, m) is None] == []
    assert planted(ROOT, mutants[0] | {'function': 'no_such_function'}) is None


def test_every_page_that_the_packages_name_exists():
    paths = [*(ROOT / 'chatgpt').rglob('*.py'), *(ROOT / 'compat').rglob('*.py'), *(ROOT / 'examples').rglob('*.py')]
    named = {(path.name, page) for path in paths for page in re.findall(r'\bdocs/[\w/+-]+\.md', path.read_text())}
    assert len(named) > 20
    assert [(name, page) for name, page in sorted(named) if not (ROOT / page).is_file()] == []
