"""Imports of the package: they point down without a cycle, optional packages stay optional, `import chatgpt` is
light."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[1]


def allowed_imports() -> dict[str, set[str]]:
    """Returns what each package may import, by the table of docs/design.md.

    A package may import its own parts in the table, and permission for a package includes its parts; all may import the
    version in `chatgpt` and `names`.
    """
    models = {'types', 'functional', 'batching', 'nn'}
    rows = re.findall(r'^\| `([\w.]+)` \| [^|]+ \| ([^|]*)\|$', (ROOT / 'docs' / 'design.md').read_text(), re.MULTILINE)
    may = {name: {word.strip() for word in words.split(',') if word.strip()} for name, words in rows}
    return {name: words - {'models'} | (models if 'models' in words else set()) for name, words in may.items()}


ALLOWED = allowed_imports()

# Optional packages: imported inside a function, in files with this prefix. `None`: inside a function anywhere.
OPTIONAL: dict[str, str | None] = dict.fromkeys(('matplotlib', 'bitsandbytes', 'peft', 'pandas', 'pyarrow'))
TRACKERS = 'wandb', 'trackio', 'mlflow', 'tensorboard', 'torch.utils.tensorboard'
OPTIONAL |= dict.fromkeys(TRACKERS, 'trainer/callbacks/trackers')
OPTIONAL |= {'colossalai': 'strategies/colossalai/', 'vllm': 'rollout/vllm', 'ray': 'rollout/cluster.py'}
OPTIONAL |= {'datasets': 'data/', 'vaderSentiment': 'data/rewards/checkable', 'openenv': 'environments/openenv'}
OPTIONAL |= {'liger_kernel': 'nn/head_kernels', 'optuna': 'launch/search/study'}
OPTIONAL |= {'jinja2': 'monitor/', 'starlette': 'monitor/compare/', 'uvicorn': 'monitor/compare/'}
PROCESS_GROUPS = ('strategies/', 'launch/', 'testing/')


class Import(NamedTuple):
    """An import, and when it happens: with its file ('module'), in a function ('function'), or for types only
    ('types')."""

    file: str
    line: int
    target: str
    when: str


def statements(tree: ast.Module) -> Iterator[tuple[ast.Import | ast.ImportFrom, str]]:
    """Yields every import statement and when it runs."""
    when: dict[ast.AST, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            when |= {inner: 'function' for inner in ast.walk(node) if when.get(inner) != 'types'}
        elif isinstance(node, ast.If) and ast.unparse(node.test).endswith('TYPE_CHECKING'):
            when |= {inner: 'types' for each in node.body for inner in ast.walk(each)}
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            yield node, when.get(node, 'module')


def module_name(path: Path, root: Path) -> str:
    parts = path.relative_to(root).with_suffix('').parts
    return '.'.join(parts[:-1] if parts[-1] == '__init__' else parts)


@cache
def walk(root: Path) -> tuple[set[str], list[Import]]:
    """Returns the modules of `root`/chatgpt and their imports, with `from package import submodule` resolved."""
    files = {module_name(p, root): p for p in sorted((root / 'chatgpt').rglob('*.py'))}
    found = []
    for path in files.values():
        for node, when in statements(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                targets = [alias.name for alias in node.names]
            else:
                assert node.level == 0, f'{path}:{node.lineno}: relative import; write it in full'
                base = node.module or ''
                targets = [
                    f'{base}.{a.name}' if f'{base}.{a.name}' in files or base == 'torch' else base for a in node.names
                ]
            found += [Import(path.relative_to(root).as_posix(), node.lineno, t, when) for t in dict.fromkeys(targets)]
    return set(files), found


def package_of(module: str) -> str:
    """Returns the package of a module: the longest matching name in ALLOWED."""
    name = module.partition('.')[2]
    inside = [room for room in ALLOWED if f'{name}.'.startswith(f'{room}.')]
    return max(inside, key=len, default=name.partition('.')[0] or 'chatgpt')


def module_of(file: str) -> str:
    return module_name(Path(file), Path('.'))


def wrong_arrows(imports: list[Import]) -> list[str]:
    """Returns the imports, at any time, of a package that the importing package may not import."""
    wrong = []
    for i in imports:
        if i.target != 'chatgpt' and not i.target.startswith('chatgpt.'):
            continue
        here, there = package_of(module_of(i.file)), package_of(i.target)
        if there in (here, 'chatgpt', 'names') or there.startswith(f'{here}.'):
            continue
        if here not in ALLOWED:
            wrong.append(f'{i.file}:{i.line}: package {here!r} is unknown; add it to docs/design.md')
        elif not {there, there.partition('.')[0]} & ALLOWED[here]:
            wrong.append(f'{i.file}:{i.line}: {here} imports {there}')
    return wrong


def cycle(modules: set[str], imports: list[Import]) -> list[str]:
    """Returns the first cycle of imports that is found."""
    edges: dict[str, set[str]] = {module: set() for module in modules}
    for i in imports:
        if i.target in modules:
            edges[module_of(i.file)].add(i.target)
    try:
        TopologicalSorter(edges).prepare()
    except CycleError as error:
        return error.args[1]
    return []


def matches(target: str, package: str) -> bool:
    return target == package or target.startswith(package + '.')


def eager_or_misplaced(imports: list[Import]) -> list[str]:
    """Returns imports of optional packages at module level or in other files, and process groups outside strategies."""
    wrong = []
    for i in imports:
        file = i.file.removeprefix('chatgpt/')
        for package, home in OPTIONAL.items():
            if matches(i.target, package) and i.when != 'types':
                if i.when == 'module':
                    wrong.append(
                        f'{i.file}:{i.line}: {package} is optional; import it inside the function that needs it'
                    )
                if home is not None and not file.startswith(home):
                    wrong.append(f'{i.file}:{i.line}: {package} is imported outside {home}')
        if matches(i.target, 'torch.distributed') and i.when != 'types' and not file.startswith(PROCESS_GROUPS):
            wrong.append(f'{i.file}:{i.line}: torch.distributed belongs to the strategies')
    return wrong


def test_arrows_point_down():
    modules, imports = walk(ROOT)
    assert len(modules) > 20 and len(imports) > 100  # the walk found the package
    assert {'strategies', 'trainer.callbacks', 'launch'} <= ALLOWED.keys() and not ALLOWED['functional']
    assert wrong_arrows(imports) == []


def test_no_cycle():
    """Covers imports in functions and for types."""
    assert cycle(*walk(ROOT)) == []


def test_the_library_knows_no_compat():
    assert [i for i in walk(ROOT)[1] if matches(i.target, 'chatgpt_compat')] == []


def test_optional_packages_and_process_groups_have_their_place():
    assert eager_or_misplaced(walk(ROOT)[1]) == []


def test_no_test_file_imports_another():
    """Shared code belongs in a module beside them."""
    wrong = re.compile(r'^ *(?:from|import) (?:tests?\.)?(?:\w+\.)*test_', re.MULTILINE)
    assert wrong.search('    from tests.nn.test_a import f')
    assert [path.name for path in (ROOT / 'tests').rglob('*.py') if wrong.search(path.read_text())] == []


def write_package(root: Path, files: dict[str, str]) -> tuple[set[str], list[Import]]:
    for name, text in files.items():
        path = root / 'chatgpt' / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return walk(root)


TIMES = {
    'at the top': 'from {0} import x\n',
    'in a method, in a branch': 'class A:\n def f(self):\n  try:\n   pass\n  except E:\n   from {0} import x\n',
    'for types': 'from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import {0}\n',
}


@pytest.mark.parametrize('source', TIMES.values(), ids=TIMES.keys())
def test_an_import_that_points_up_and_a_cycle_are_caught_at_any_time(tmp_path, source):
    files = {'__init__.py': '', 'nn/__init__.py': '', 'trainer/ppo.py': '', 'attic/x.py': 'import chatgpt.nn\n'}
    files |= {'nn/actor.py': source.format('chatgpt.trainer.ppo')}
    files |= {'nn/a.py': 'from chatgpt.nn import b\n', 'nn/b.py': source.format('chatgpt.nn.a')}
    modules, imports = write_package(tmp_path, files)
    lines = [w.split(': ', 1)[1] for w in wrong_arrows(imports)]
    assert (
        sorted(lines)[0] == 'nn imports trainer'
        and "package 'attic' is unknown" in sorted(lines)[1]
        and len(lines) == 2
    )
    assert {*cycle(modules, imports)} == {'chatgpt.nn.a', 'chatgpt.nn.b'}


@pytest.mark.parametrize(
    ('name', 'source', 'complaint'),
    [
        ('strategies/colossalai/strategy.py', 'import colossalai\n', 'inside the function'),
        ('nn/actor.py', 'def f():\n    import colossalai.zero\n', 'outside strategies/colossalai/'),
        ('nn/actor.py', 'from torch import distributed\n', 'belongs to the strategies'),
    ],
)
def test_a_misplaced_import_is_caught(tmp_path, name, source, complaint):
    wrong = eager_or_misplaced(write_package(tmp_path, {name: source})[1])
    assert len(wrong) == 1 and complaint in wrong[0]


def loaded_after(statement: str) -> set[str]:
    code = f'import sys\n{statement}\nprint(*sorted({{m.split(".")[0] for m in sys.modules}}))'
    done = subprocess.run([sys.executable, '-c', code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


def test_importing_the_package_is_light():
    loaded = loaded_after('import chatgpt')
    assert 'chatgpt' in loaded
    assert not loaded & {'torch', 'transformers', 'datasets', 'colossalai', 'matplotlib', 'pandas'}


def test_importing_strategies_and_callbacks_loads_nothing_optional():
    loaded = loaded_after('from chatgpt.strategies import NaiveStrategy; import chatgpt.trainer.callbacks')
    assert 'torch' in loaded
    assert not loaded & {*OPTIONAL, 'transformers'}
