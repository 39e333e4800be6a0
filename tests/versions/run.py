"""Runs the suite with the lowest and with the newest versions that setup.py allows, each in an environment of its own.

    python tests/versions/run.py lowest newest      # make test-versions
    python tests/versions/run.py lowest --tests tests/nn tests/rollout -- -x

The environment .venv-NAME has the pins of the requirements files, those of requirements-NAME.txt in place of others,
and is made again where they change. It prints a row for each, and exits with 1 where a test failed. Standard library
only.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
NAMES = ('lowest', 'newest')
KINDS = ('', '-dev', '-ray', '-openenv', '-colossalai')
TITLES = ('', 'Python', 'torch', 'transformers', 'passed', 'skipped', 'failed', 'minutes')
"""of the columns"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('names', nargs='*', default=NAMES, metavar='NAME', help='lowest, newest; default: both')
    for name in NAMES:
        told = f'interpreter of .venv-{name}; default: this one'
        parser.add_argument(f'--{name}-python', default=sys.executable, help=told)
    parser.add_argument('--tests', nargs='+', default=['tests'], help='files or folders; default: all')
    parser.add_argument('--workers', type=int, default=2, help='processes of pytest; default: %(default)s')
    parser.add_argument('--install-only', action='store_true', help='make the environments and run nothing')
    cut = sys.argv.index('--') if '--' in sys.argv else len(sys.argv)
    args = parser.parse_args(sys.argv[1:cut])
    if unknown := [name for name in args.names if name not in NAMES]:
        parser.error(f'{unknown[0]!r} is neither {" nor ".join(NAMES)}')
    rows = []
    for name in args.names:
        python = environment(name, getattr(args, f'{name}_python'))
        if not args.install_only:
            rows.append(run(name, python, [*args.tests, '-n', str(args.workers), *sys.argv[cut + 1 :]]))
    print(table(rows), end='')
    return int(any(row['failed'] != '0' for row in rows))


def pins(name: str) -> dict[str, str]:
    """package → version of the environment `name`."""
    found = {}
    for file in (*(f'requirements{kind}.txt' for kind in KINDS), f'requirements-{name}.txt'):
        for line in (ROOT / file).read_text().splitlines():
            if pin := line.split('#')[0].strip():
                package, _, version = pin.partition('==')
                found[re.sub(r'[-_.]+', '-', package).lower()] = version
    return found


def environment(name: str, interpreter: str) -> Path:
    """The interpreter of .venv-`name`, which has its pins."""
    folder = ROOT / f'.venv-{name}'
    python, stamp = folder / 'bin' / 'python', folder / 'pins.txt'
    wanted = pins(name)
    text = ''.join(f'{package}=={version}\n' for package, version in wanted.items())
    if stamp.is_file() and stamp.read_text() == text:
        return python
    subprocess.run([interpreter, '-m', 'venv', '--clear', folder], check=True)
    install_torch(python, wanted.pop('torch'))
    rest = folder / 'rest.txt'
    rest.write_text(''.join(f'{package}=={version}\n' for package, version in wanted.items()))
    # The pins are complete, and some contradict the metadata of others: ColossalAI's, gradio's.
    pip(python, '--no-deps', '-r', str(rest))
    pip(python, '--no-deps', '--no-build-isolation', '--editable', str(ROOT / 'compat'))
    stamp.write_text(text)
    return python


def install_torch(python: Path, version: str) -> None:
    """In the build that make venv would choose; a CUDA build on a machine without a GPU without CUDA's libraries."""
    sys.path.insert(0, str(ROOT))
    from install_torch import choose, gpus

    index, why = choose(os.environ.get('TORCH_INDEX'), gpus(), platform.system())
    print(f'torch {version}: {why}', flush=True)
    other = ['--extra-index-url', index] if index else []
    if gpus():
        pip(python, f'torch=={version}', *other)
        return
    pip(python, '--no-deps', f'torch=={version}', *other)
    code = "import importlib.metadata as m; print(*m.requires('torch'), sep='\\n')"
    requires = subprocess.run([python, '-c', code], capture_output=True, text=True, check=True).stdout
    if cuda := re.search(r'^cuda-toolkit\[.*\]==([\d.]+)', requires, re.MULTILINE):
        pip(python, f'cuda-toolkit[cudart,cupti]=={cuda[1]}')
        subprocess.run([python, HERE / 'without_cuda.py'], check=True)


def pip(python: Path, *words: str) -> None:
    subprocess.run([python, '-m', 'pip', 'install', '--quiet', '--disable-pip-version-check', *words], check=True)


def run(name: str, python: Path, words: list[str]) -> dict[str, str]:
    """The row of `name`."""
    report = ROOT / 'outputs' / 'versions' / f'{name}.xml'
    report.parent.mkdir(parents=True, exist_ok=True)
    report.unlink(missing_ok=True)
    variables = {
        'PYTHONPATH': os.pathsep.join([str(ROOT), str(ROOT / 'compat')]),
        'OMP_NUM_THREADS': '1',
        'HF_HUB_OFFLINE': '1',
        'TOKENIZERS_PARALLELISM': 'false',
    }
    command = [python, '-m', 'pytest', '--quiet', '--dist', 'worksteal', f'--junitxml={report}', *words]
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, **variables}, check=False)
    if not report.is_file():
        raise SystemExit(f'{name}: pytest wrote no report and ended with {done.returncode}')
    code = (
        'import platform, torch, transformers as t; print(platform.python_version(), torch.__version__, t.__version__)'
    )
    versions = subprocess.run([python, '-c', code], capture_output=True, text=True, check=True).stdout.split()
    return dict(zip(TITLES, [name, *versions, *counts(report)], strict=True))


def counts(report: Path) -> list[str]:
    """passed, skipped, failed, minutes of a junit file."""
    (suite,) = ElementTree.parse(report).iter('testsuite')
    tests, skipped, failures, errors = (int(suite.attrib[k]) for k in ('tests', 'skipped', 'failures', 'errors'))
    failed = failures + errors
    return [str(tests - skipped - failed), str(skipped), str(failed), f'{float(suite.attrib["time"]) / 60:.0f}']


def table(rows: list[dict[str, str]]) -> str:
    """As a page has it."""
    lines = [TITLES, ['---'] * len(TITLES), *(row.values() for row in rows)] if rows else []
    return ''.join(f'| {" | ".join(line)} |\n' for line in lines)


if __name__ == '__main__':
    sys.exit(main())
