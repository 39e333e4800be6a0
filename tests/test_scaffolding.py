"""The files around the package agree with it and with each other."""

from __future__ import annotations

import ast
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
    """package → version of every line of a requirements file; a line that is no exact pin fails."""
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


def test_setup_reads_the_version_of_the_package(metadata):
    tree = ast.parse((ROOT / 'chatgpt' / '__init__.py').read_text())
    (value,) = [n.value for n in tree.body if isinstance(n, ast.Assign) and ast.unparse(n.targets[0]) == '__version__']
    assert metadata['version']() == ast.literal_eval(value)


def test_the_distribution_has_a_name_of_its_own_and_no_page_or_message_says_another(metadata):
    assert metadata['NAME'] == 'chatgpt-rlhf'  # 'chatgpt' on PyPI is a stranger's
    wrong = re.compile(
        r"""(pip|uv|uvx|pipx) (install|add|download) [^\n`]*?(?<![\w./-])chatgpt(?![\w./-])|(?<![\w./-])chatgpt\["""
    )
    for text in (
        "pip install 'chatgpt[ray]'",
        'pip install chatgpt',
        'pip install -U "chatgpt"',
        'needs chatgpt[peft]',
    ):
        assert wrong.search(text), text
    for text in (
        "pip install '.[ray]'",
        'git clone ... chatgpt',
        'pip install -e chatgpt/',
        "pip install 'chatgpt-rlhf[ray]'",
    ):
        assert not wrong.search(text), text
    pages = [
        p
        for folder in ('docs', 'chatgpt', 'compat/chatgpt_compat', 'examples', 'benchmarks')
        for p in (ROOT / folder).rglob('*')
        if p.is_file()
    ]
    pages = [p for p in [*pages, *ROOT.glob('*.*'), ROOT / 'Makefile'] if p.is_file() and p.suffix != '.pyc']
    assert {ROOT / 'README.md', ROOT / 'setup.py', ROOT / 'docs/launch.md', ROOT / 'chatgpt/rollout/cluster.py'} <= set(
        pages
    )
    said = {
        f'{p.relative_to(ROOT)}: {found[0]}' for p in pages if (found := wrong.search(p.read_text(errors='ignore')))
    }
    assert not said


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


def test_the_oldest_supported_versions_are_allowed(metadata):
    required = {r.name: r.specifier for r in map(Requirement, metadata['INSTALL_REQUIRES'])}
    assert required['torch'].contains('2.11.0') and not required['torch'].contains('2.10.0')
    assert required['transformers'].contains('5.17.0') and not required['transformers'].contains('4.57.0')


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


def test_every_import_of_the_package_is_a_requirement(metadata):
    """A third-party module that the package imports on loading has to be installed with it."""
    known = {canonicalize_name(Requirement(r).name) for r in metadata['INSTALL_REQUIRES']} | {
        'pyyaml',
        'yaml',
        'chatgpt',
    }
    missing = set()
    for path in (ROOT / 'chatgpt').rglob('*.py'):
        for node in ast.parse(path.read_text()).body:
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ''] if isinstance(node, ast.ImportFrom) else []
            top = {n.split('.')[0] for n in names}
            missing |= {
                f'{path.name}: {n}'
                for n in top
                if n not in sys.stdlib_module_names and canonicalize_name(n) not in known
            }
    assert not missing


def make(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(['make', *arguments], cwd=ROOT, capture_output=True, text=True)


def test_make_installs_torch_pinned_before_anything_else(tmp_path):
    """In a machine without the environment: a venv, then torch alone at its pin, then the rest."""
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


def test_make_does_not_install_again_while_requirements_stay(tmp_path):
    venv = tmp_path / 'venv'
    (venv / 'bin').mkdir(parents=True)
    (venv / 'bin' / 'python').touch()
    (venv / '.stamp-core').touch()
    assert ' install ' not in make('--dry-run', 'demo', f'VENV={venv}').stdout
    assert ' install ' in make('--dry-run', '--what-if=requirements.txt', 'demo', f'VENV={venv}').stdout


def test_make_refuses_an_old_python_in_one_line(tmp_path):
    old = tmp_path / 'python3'
    old.write_text(
        f'#!/bin/sh\nexec {sys.executable} -c "import sys; sys.version_info = (3, 9, 1); ${{2#import sys; }}"\n'
    )
    old.chmod(0o755)
    done = make('venv', f'VENV={tmp_path}/venv', f'PYTHON={old}')
    assert done.returncode != 0 and 'Python 3.11 or newer is needed, PYTHON is 3.9' in done.stderr
    assert not (tmp_path / 'venv').exists()


def test_ci_runs_the_command_of_the_readme():
    script = (ROOT / '.ci' / 'run').read_text()
    readme = (ROOT / 'README.md').read_text()
    commands = re.findall(r'^(?:exec )?make (\S+) </dev/null$', script, re.MULTILINE)
    assert commands == ['test', 'test-avx2', 'test-vllm', 'test-system']
    told = re.search(r'^`\.ci/run` runs (.+),', (ROOT / 'CONTRIBUTING.md').read_text(), re.MULTILINE)
    assert told is not None and re.findall(r'`make (\S+)`', told[1]) == commands
    assert 'set -euo pipefail' in script
    assert 'make test' in readme and 'make demo' in readme
    assert (ROOT / '.ci' / 'run').stat().st_mode & 0o100


def test_no_test_has_a_limit_of_its_own_or_asks_how_long_something_took():
    wrong = re.compile(
        r'mark\.timeout\(|communicate\(timeout=|^ +timeout=\d|'
        r'assert .*\b(monotonic|perf_counter|process_time|time)\(\) - \w+ <',
        re.MULTILINE,
    )
    assert wrong.search('assert time.monotonic() - start < 3') and wrong.search('@pytest.mark.timeout(600)')
    files = [p for folder in ('tests', 'compat/tests') for p in (ROOT / folder).rglob('*.py') if p != Path(__file__)]
    assert [path.name for path in files if wrong.search(path.read_text())] == []


COMMAND = re.compile(r'(?<![\w./-])(?:python|torchrun)(?= )')


def wrong_commands(text: str) -> list[str]:
    """Indented lines of a docstring that cannot be pasted: two commands in one, or a command that goes on without a
    backslash."""
    found, before = [], ''
    for line in (line.strip() for line in text.splitlines() if line.startswith('    ') or not line.strip()):
        goes_on = COMMAND.match(before) is not None and '#' not in before and bool(line) and not COMMAND.match(line)
        if len(COMMAND.findall(line.split('#')[0])) > 1 or (goes_on and not before.endswith('\\')):
            found.append(line)
        before = line
    return found


def test_commands_in_module_docstrings_can_be_pasted():
    assert wrong_commands('A.\n\n    python a.py --b\n    c\n') == ['c']
    assert wrong_commands('A.\n\n    python a.py --b torchrun c.py\n') and not wrong_commands(
        'A.\n\n    python a.py \\\n        --b\n    python c.py    # d\n\nThen python and torchrun.'
    )
    files = [
        p for folder in ('chatgpt', 'compat', 'examples', 'benchmarks', 'tests') for p in (ROOT / folder).rglob('*.py')
    ]
    texts = {p: ast.get_docstring(ast.parse(p.read_text())) or '' for p in files}
    assert sum(bool(COMMAND.search(text)) for text in texts.values()) > 20
    assert not {p.name: lines for p, text in texts.items() if (lines := wrong_commands(text))}


def test_the_type_checker_sees_every_self():
    files = [p for p in (ROOT / 'chatgpt').rglob('*.py') if re.search(r'\bself: Any\b', p.read_text())]
    assert not files
