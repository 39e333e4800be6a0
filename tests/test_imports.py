"""The package's imports: arrows between packages point down, no circle, optional packages stay optional, `import
chatgpt` light."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

# What each room may import, as docs/design.md draws it, from the ground up. A room may import its own parts that are
# named here, and who may import a room may import its parts; the
# version in `chatgpt` itself and `names` may be imported by all.
MODELS = {'types', 'functional', 'batching', 'nn'}
ALLOWED: dict[str, set[str]] = {
    'types': set(),
    'names': set(),
    'hub': set(),
    'registry': set(),
    'rules': set(),
    'functional': set(),
    'batching': {'types', 'functional'},
    'nn': {'types', 'functional', 'batching', 'registry', 'hub', 'data'},
    'data': {'types', 'hub'},
    'environments': {'registry', 'data'},
    'monitor': {'data'},
    'strategies.checkpoint': set(),
    'strategies': MODELS | {'registry', 'rules'},
    'plan': MODELS | {'rules', 'strategies'},
    'plan.__main__': {'launch', 'plan', 'strategies'},
    'rollout': MODELS | {'registry', 'environments'},
    'trainer.experience': MODELS | {'rollout', 'data'},
    'trainer.callbacks': MODELS | {'registry', 'monitor', 'strategies'},
    'trainer': MODELS | {'registry', 'rules', 'data', 'environments', 'monitor', 'strategies', 'rollout'},
    'testing': MODELS | {'data', 'strategies', 'rollout', 'trainer'},
    'launch': MODELS
    | {'registry', 'rules', 'hub', 'data', 'environments', 'monitor', 'strategies', 'plan', 'rollout', 'trainer'},
    '__main__': {'launch'},
    'chatgpt': {'launch'},
}

# Optional packages: imported inside a function, in files whose path begins so. `None`: inside a function anywhere.
OPTIONAL: dict[str, str | None] = {
    'colossalai': 'strategies/colossalai/',
    'vllm': 'rollout/vllm',
    'ray': 'rollout/cluster.py',
    'wandb': 'trainer/callbacks/trackers',
    'trackio': 'trainer/callbacks/trackers',
    'mlflow': 'trainer/callbacks/trackers',
    'tensorboard': 'trainer/callbacks/trackers',
    'torch.utils.tensorboard': 'trainer/callbacks/trackers',
    'datasets': 'data/',
    'liger_kernel': 'nn/head_kernels',
    'matplotlib': None,
    'bitsandbytes': None,
    'optuna': 'launch/search/study',
    'vaderSentiment': 'data/rewards/checkable',
    'jinja2': 'monitor/',
    'starlette': 'monitor/compare/',
    'uvicorn': 'monitor/compare/',
    'openenv': 'environments/openenv',
    'peft': None,
    'pandas': None,
    'pyarrow': None,
}
PROCESS_GROUPS = ('strategies/', 'launch/', 'testing/')


@dataclass(frozen=True)
class Import:
    """One imported module, and when it is imported: with its file ('module'), when a function runs, or only for type
    checkers."""

    file: str
    line: int
    target: str
    when: str


def is_type_checking(node: ast.If) -> bool:
    return ast.unparse(node.test) in ('TYPE_CHECKING', 'typing.TYPE_CHECKING')


def statements(body: list[ast.stmt], when: str) -> Iterator[tuple[ast.Import | ast.ImportFrom, str]]:
    """Every import statement below `body`."""
    for node in body:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            yield node, when
            continue
        inner = when
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            inner = 'function' if when == 'module' else when
        elif isinstance(node, ast.If) and is_type_checking(node):
            yield from statements(node.body, 'types')
            yield from statements(node.orelse, when)
            continue
        for field in ('body', 'orelse', 'finalbody'):
            yield from statements(getattr(node, field, []), inner)
        for handler in [*getattr(node, 'handlers', []), *getattr(node, 'cases', [])]:
            yield from statements(handler.body, inner)


def module_name(path: Path, root: Path) -> str:
    parts = path.relative_to(root).with_suffix('').parts
    return '.'.join(parts[:-1] if parts[-1] == '__init__' else parts)


def walk(root: Path) -> tuple[set[str], list[Import]]:
    """The modules of `root`/chatgpt and all their imports, `from package import submodule` resolved to the
    submodule."""
    files = {module_name(p, root): p for p in sorted((root / 'chatgpt').rglob('*.py'))}
    found = []
    for path in files.values():
        for node, when in statements(ast.parse(path.read_text()).body, 'module'):
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
    """The room of a module: the longest name in ALLOWED that it lies in."""
    name = module.partition('.')[2]
    inside = [room for room in ALLOWED if f'{name}.'.startswith(f'{room}.')]
    return max(inside, key=len, default=name.partition('.')[0] or 'chatgpt')


def module_of(file: str) -> str:
    return module_name(Path(file), Path('.'))


def wrong_arrows(imports: list[Import]) -> list[str]:
    """Imports of a package that the importing package may not see, at whatever time."""
    wrong = []
    for i in imports:
        if i.target != 'chatgpt' and not i.target.startswith('chatgpt.'):
            continue
        here, there = package_of(module_of(i.file)), package_of(i.target)
        if there in (here, 'chatgpt', 'names') or there.startswith(f'{here}.'):
            continue
        if here not in ALLOWED:
            wrong.append(f'{i.file}:{i.line}: package {here!r} is unknown; add it to docs/design.md and to ALLOWED')
        elif not {there, there.partition('.')[0]} & ALLOWED[here]:
            wrong.append(f'{i.file}:{i.line}: {here} imports {there}')
    return wrong


def circles(modules: set[str], imports: list[Import]) -> list[list[str]]:
    """Groups of modules that reach one another by imports, each sorted: the strongly connected components (Tarjan,
    1972)."""
    edges: dict[str, set[str]] = {m: set() for m in modules}
    for i in imports:
        if i.target in modules:
            edges[module_of(i.file)].add(i.target)
    number: dict[str, int] = {}
    low: dict[str, int] = {}
    open_modules: list[str] = []
    found: list[list[str]] = []

    def visit(module: str) -> None:
        number[module] = low[module] = len(number)
        open_modules.append(module)
        for target in edges[module]:
            if target not in number:
                visit(target)
                low[module] = min(low[module], low[target])
            elif target in open_modules:
                low[module] = min(low[module], number[target])
        if low[module] == number[module]:
            place = open_modules.index(module)
            group = sorted(open_modules[place:])
            del open_modules[place:]
            if len(group) > 1 or module in edges[module]:
                found.append(group)

    for module in sorted(modules):
        if module not in number:
            visit(module)
    return sorted(found)


def matches(target: str, package: str) -> bool:
    return target == package or target.startswith(package + '.')


def eager_or_misplaced(imports: list[Import]) -> list[str]:
    """Optional packages imported with a file, or outside the file that is theirs; process groups outside the
    strategies."""
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


def rows_of_the_page() -> dict[str, set[str]]:
    """Which packages each may import, by the table of docs/design.md."""
    words = {'models': MODELS}
    rows = re.findall(r'^\| `([\w.]+)` \| [^|]+ \| ([^|]*)\|$', (ROOT / 'docs' / 'design.md').read_text(), re.MULTILINE)
    return {
        name: set().union(*(words.get(w.strip(), {w.strip()}) for w in may.split(',') if w.strip()))
        for name, may in rows
    }


def test_the_page_of_the_design_and_this_table_agree():
    rows = rows_of_the_page()
    assert {name: rows.get(name) for name in ALLOWED} == ALLOWED


def test_the_way_of_a_prompt_names_functions_that_are_there():
    text = (ROOT / 'docs' / 'design.md').read_text().split('## The way of one prompt')[1].split('\n## ')[0]
    rows = re.findall(r'^\| .+ \| (`.+`) \| (`.+`) \|$', text, re.MULTILINE)
    assert len(rows) > 20
    for names, files in rows:
        code = ''.join((ROOT / 'chatgpt' / file).read_text() for file in re.findall(r'`([^`]+)`', files))
        for name in re.findall(r'`([^`]+)`', names):
            for part in name.split('.'):
                assert re.search(rf'^ *(?:def|class) {part}\b', code, re.MULTILINE), f'{name} is not in {files}'


def calls_in(file: str, function: str) -> set[str]:
    """Names of what a function of a file calls."""
    tree = ast.parse((ROOT / file).read_text())
    body = next(n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and n.name == function)
    called = [node.func for node in ast.walk(body) if isinstance(node, ast.Call)]
    return {f.attr if isinstance(f, ast.Attribute) else getattr(f, 'id', '') for f in called}


def test_from_the_script_to_the_optimizer_step_in_four_hops():
    hops = [
        ('examples/train_prompts.py', 'main', 'execute'),
        ('chatgpt/launch/recipes.py', 'execute', 'fit'),
        ('chatgpt/trainer/ppo.py', 'fit', 'learn'),
        ('chatgpt/trainer/ppo.py', 'learn', 'learn_batch'),
        ('chatgpt/trainer/step.py', 'learn_batch', 'optimizer_step'),
    ]
    for file, function, called in hops:
        assert called in calls_in(file, function), f'{function} of {file} does not call {called}'
    assert '(`execute` → `PPOTrainer.fit` → `learn` → `learn_batch`)' in (ROOT / 'README.md').read_text()


def test_arrows_point_down():
    modules, imports = walk(ROOT)
    assert len(modules) > 20 and len(imports) > 100  # the walk saw the package
    assert wrong_arrows(imports) == []


def test_no_circle():
    """At any time of import, types and functions included."""
    assert circles(*walk(ROOT)) == []


def test_the_library_knows_no_compat():
    assert [i for i in walk(ROOT)[1] if matches(i.target, 'chatgpt_compat')] == []


def test_optional_packages_and_process_groups_have_their_place():
    assert eager_or_misplaced(walk(ROOT)[1]) == []


def shared_between_tests(root: Path) -> list[str]:
    """Imports of one test file by another, at whatever depth."""
    wrong = []
    for path in sorted(root.rglob('*.py')):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                names = [f'{node.module or ""}.{a.name}' for a in node.names]
            wrong += [
                f'{path.relative_to(root)}:{node.lineno}: imports {name}; what both need belongs into a module beside '
                'them'
                for name in names
                if any(part.startswith('test_') for part in name.split('.'))
            ]
    return wrong


def test_no_test_file_imports_another():
    assert shared_between_tests(ROOT / 'tests') == []


@pytest.mark.parametrize(
    'source', ['import test_a\n', 'from test_a import f\n', 'def g():\n    from tests.test_a import f\n']
)
def test_a_test_file_that_imports_another_is_caught(tmp_path, source):
    (tmp_path / 'test_a.py').write_text('def f(): ...\n')
    (tmp_path / 'runs.py').write_text('import testing_things\n')
    (tmp_path / 'test_b.py').write_text(source)
    (wrong,) = shared_between_tests(tmp_path)
    assert wrong.startswith('test_b.py:')


def write_package(root: Path, files: dict[str, str]) -> tuple[set[str], list[Import]]:
    for name, text in files.items():
        path = root / 'chatgpt' / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return walk(root)


UPWARD = {
    'at the top': 'from chatgpt.trainer.ppo import PPOTrainer\n',
    'in a function': 'def f():\n    import chatgpt.trainer.ppo\n',
    'in a method, in a branch': 'class A:\n def f(self):\n  try:\n   pass\n  except E:\n   from chatgpt.trainer import '
    'ppo\n',
    'for types': 'from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from chatgpt.trainer.ppo import '
    'PPOTrainer\n',
}


@pytest.mark.parametrize('source', UPWARD.values(), ids=UPWARD.keys())
def test_an_arrow_that_points_up_is_caught(tmp_path, source):
    _, imports = write_package(tmp_path, {'__init__.py': '', 'trainer/ppo.py': '', 'nn/actor.py': source})
    assert [w.split(': ')[1] for w in wrong_arrows(imports)] == ['nn imports trainer']


def test_a_strategy_must_not_know_its_trainer_nor_an_unknown_package_slip_in(tmp_path):
    files = {
        'strategies/ddp.py': 'from chatgpt.trainer.base import Trainer\n',
        'trainer/base.py': '',
        'attic/x.py': 'import chatgpt.nn\n',
    }
    _, imports = write_package(tmp_path, files)
    wrong = wrong_arrows(imports)
    assert len(wrong) == 2 and "package 'attic' is unknown" in wrong[0] and 'strategies imports trainer' in wrong[1]


@pytest.mark.parametrize(
    'closing',
    [
        'from chatgpt.nn.a import x\n',
        'def f():\n    from chatgpt.nn.a import x\n',
        'from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import chatgpt.nn.a\n',
    ],
    ids=['at the top', 'in a function', 'for types'],
)
def test_a_circle_is_caught_at_whatever_time_it_closes(tmp_path, closing):
    files = {
        'nn/a.py': 'from chatgpt.nn import b\n',
        'nn/b.py': 'import chatgpt.nn.c\n',
        'nn/c.py': closing,
        'nn/d.py': 'import chatgpt.nn.a\n',
        'nn/__init__.py': '',
    }
    assert circles(*write_package(tmp_path, files)) == [['chatgpt.nn.a', 'chatgpt.nn.b', 'chatgpt.nn.c']]
    files['nn/c.py'] = 'import torch\n'
    assert circles(*write_package(tmp_path, files)) == []


@pytest.mark.parametrize(
    ('name', 'source', 'complaint'),
    [
        ('strategies/colossalai/strategy.py', 'import colossalai\n', 'inside the function'),
        ('nn/actor.py', 'def f():\n    import colossalai.zero\n', 'outside strategies/colossalai/'),
        ('trainer/callbacks/trackers.py', 'from torch.utils.tensorboard import SummaryWriter\n', 'inside the function'),
        ('nn/actor.py', 'import torch.distributed as dist\n', 'belongs to the strategies'),
        ('nn/actor.py', 'from torch import distributed\n', 'belongs to the strategies'),
        (
            'trainer/experience/maker.py',
            'def f():\n    from torch.distributed import all_reduce\n',
            'belongs to the strategies',
        ),
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


def test_names_of_a_package_are_not_those_of_its_modules():
    """A name that `on_demand` imports late would be hidden by the module of that name as soon as that is imported."""
    for init in (ROOT / 'chatgpt').rglob('__init__.py'):
        if '__getattr__, __dir__ = on_demand(' not in (source := init.read_text()):
            continue
        body = [each for node in ast.parse(source).body if isinstance(node, ast.If) for each in node.body]
        names = {alias.name for node in body if isinstance(node, ast.ImportFrom) for alias in node.names}
        modules = {
            path.stem for path in init.parent.iterdir() if path.suffix == '.py' or (path / '__init__.py').exists()
        }
        assert names, init
        assert not names & modules, init
