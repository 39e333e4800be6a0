"""Mutation tests: plants small faults one at a time and checks that the tests catch them.

    python tests/mutants/run.py sample --count 60 --out mutants.json    # chooses mutants by a seed
    python tests/mutants/run.py try mutants.json --out caught.json      # plants each and runs tests until one fails

A mutant is one changed expression of functional/, trainer/, strategies/ or rollout/: a reversed comparison, plus for
minus, times for divided by, `and` for `or`, a negated condition, a number plus one. It is stored as the statement
before and after and the name of its function, so that it applies to a tree where the function is in another file; a
statement that is not found is 'gone'. The tests are the files that name the mutant's module or function, nearest first,
at most 40, without `slow`, `gpu` and `system`. If a mutant with `caught` in the file survives, `try` ends with exit
code 1.
"""

from __future__ import annotations

import argparse
import ast
import copy
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PACKAGES = ('functional', 'trainer', 'strategies', 'rollout')
PAIRS: list[tuple[type[ast.AST], type[ast.AST]]] = [(ast.Lt, ast.GtE), (ast.LtE, ast.Gt), (ast.Eq, ast.NotEq)]
PAIRS += [(ast.Add, ast.Sub), (ast.Mult, ast.Div), (ast.And, ast.Or)]
TURNED = dict([*PAIRS, *((b, a) for a, b in PAIRS)])
SIMPLE = (ast.Assign, ast.AugAssign, ast.AnnAssign, ast.Return, ast.Expr, ast.If, ast.While, ast.Assert)


def heads(function: ast.AST) -> Iterator[ast.stmt]:
    """Yields the statements of a function, without those of nested functions."""
    for node in ast.iter_child_nodes(function):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)):
            continue
        if isinstance(node, SIMPLE) and not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)):
            yield node
        yield from heads(node)


def expression(statement: ast.stmt) -> ast.expr | None:
    """Returns the part of a statement that may change, such as the condition of an `if`."""
    return getattr(statement, 'test', None) or getattr(statement, 'value', None)


def changes(statement: ast.stmt) -> Iterator[ast.stmt]:
    """Yields copies of the statement with one change each."""
    nodes = list(ast.walk(expression(statement) or ast.Pass()))
    for place, node in enumerate(nodes):
        changed = copy.deepcopy(statement)
        twin: Any = list(ast.walk(expression(changed) or ast.Pass()))[place]
        if isinstance(node, ast.Compare) and type(node.ops[0]) in TURNED:
            twin.ops[0] = TURNED[type(node.ops[0])]()
        elif isinstance(node, (ast.BinOp, ast.BoolOp)) and type(node.op) in TURNED:
            twin.op = TURNED[type(node.op)]()
        elif isinstance(node, ast.Constant) and type(node.value) in (int, float):
            twin.value = node.value + 1
        else:
            continue
        yield changed
    if isinstance(statement, ast.If):
        changed = copy.deepcopy(statement)
        changed.test = ast.UnaryOp(ast.Not(), changed.test)
        yield changed


def head(statement: ast.stmt) -> str:
    """Returns the text of a statement without its body, as `ast` writes it."""
    if isinstance(statement, (ast.If, ast.While)):
        return f'{type(statement).__name__} {ast.unparse(statement.test)}'
    return ast.unparse(statement)


def functions(tree: ast.Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    return (node for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)))


def sample(root: Path, count: int, seed: int) -> list[dict[str, str]]:
    """Returns mutants of the tree at `root`, equally many per package and at most one per function."""
    rng = random.Random(seed)
    by_package: list[list[dict[str, str]]] = []
    for package in PACKAGES:
        found = [
            {'file': str(path.relative_to(root)), 'function': f.name, 'before': head(statement), 'after': head(each)}
            for path in sorted((root / 'chatgpt' / package).rglob('*.py'))
            for f in functions(ast.parse(path.read_text()))
            for statement in heads(f)
            for each in changes(statement)
        ]
        rng.shuffle(found)
        by_package.append(list({(m['file'], m['function']): m for m in found}.values()))
    return [mutant for row in zip(*by_package, strict=False) for mutant in row][:count]


def planted(root: Path, mutant: dict[str, str]) -> tuple[Path, str] | None:
    """Returns the mutant's file in this tree and its text with the change; None if the statement is not found."""
    own = root / mutant['file']
    paths = [own, *(p for p in sorted((root / 'chatgpt').rglob('*.py')) if p != own)]
    for path in paths:
        if not path.is_file() or f'def {mutant["function"]}(' not in (text := path.read_text()):
            continue
        for function in functions(ast.parse(text)):
            if function.name != mutant['function']:
                continue
            for statement in heads(function):
                if head(statement) != mutant['before']:
                    continue
                part = statement.test if isinstance(statement, (ast.If, ast.While)) else statement
                new = mutant['after'].split(' ', 1)[1] if part is not statement else mutant['after']
                return path, replaced(text, part, f'({new})' if part is not statement else new)
    return None


def replaced(text: str, node: ast.expr | ast.stmt, new: str) -> str:
    lines = text.encode().splitlines(keepends=True)
    start = sum(map(len, lines[: node.lineno - 1])) + node.col_offset
    stop = sum(map(len, lines[: (node.end_lineno or 0) - 1])) + (node.end_col_offset or 0)
    whole = text.encode()
    return (whole[:start] + new.encode() + whole[stop:]).decode()


def tests_of(root: Path, path: Path, function: str) -> list[str]:
    """Returns test files that name the function or its module: both first, then those of the package's folder."""
    module = '.'.join(path.relative_to(root).with_suffix('').parts)
    found = []
    for file in sorted((root / 'tests').rglob('test_*.py')):
        text = file.read_text()
        near = 2 * bool(re.search(rf'\b{function}\b', text)) + 2 * (module in text) + (path.parts[-2] == file.parts[-2])
        if near:
            found.append((-near, str(file.relative_to(root))))
    return [name for _, name in sorted(found)][:40]


def attempt(root: Path, mutant: dict[str, str]) -> str:
    """Returns 'caught by ...', 'survived' or 'gone', and restores the tree at `root`."""
    place = planted(root, mutant)
    if place is None:
        return 'gone'
    path, text = place
    before = path.read_text()
    environment = os.environ | {'PYTHONPATH': str(root), 'OMP_NUM_THREADS': '1', 'HF_HUB_OFFLINE': '1'}
    pytest = [sys.executable, '-m', 'pytest', '-q', '-x', '-p', 'no:cacheprovider', '-m', 'not (slow or gpu or system)']
    pytest.append('--timeout=600')  # catches a mutant that never ends
    path.write_text(text)
    try:
        files = tests_of(root, path, mutant['function'])
        done = subprocess.run([*pytest, *files], cwd=root, env=environment, capture_output=True, text=True)
    finally:
        path.write_text(before)
    failed = re.search(r'^(?:FAILED|ERROR) (\S+)', done.stdout, re.MULTILINE)
    return (
        f'caught by {failed[1]}' if failed else 'survived' if done.returncode == 0 else 'caught by the start of pytest'
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words = parser.add_subparsers(dest='word', required=True)
    one = words.add_parser('sample')
    one.add_argument('--count', type=int, default=60)
    one.add_argument('--seed', type=int, default=0)
    two = words.add_parser('try')
    two.add_argument('mutants')
    for each in (one, two):
        each.add_argument('--root', default='.', help='the tree; `try` changes a copy')
        each.add_argument('--out', required=True)
    args = parser.parse_args()
    root = Path(args.root).resolve()
    if args.word == 'sample':
        Path(args.out).write_text(json.dumps(sample(root, args.count, args.seed), indent=1) + '\n')
        return
    mutants = json.loads(Path(args.mutants).read_text())
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / 'tree'
        shutil.copytree(root, tree, ignore=shutil.ignore_patterns('.git', '.venv*', '__pycache__', '.*_cache'))
        for number, mutant in enumerate(mutants, 1):
            mutant['outcome'] = attempt(tree, mutant)
            print(f'{number}/{len(mutants)} {mutant["file"]} {mutant["function"]}: {mutant["outcome"]}', flush=True)
            Path(args.out).write_text(json.dumps(mutants, indent=1) + '\n')
    outcomes = [m['outcome'].split()[0] for m in mutants]
    print({word: outcomes.count(word) for word in ('caught', 'survived', 'gone')})
    lost = [m for m in mutants if m.get('caught') and m['outcome'] == 'survived']
    if lost:
        sys.exit('caught once, and no more: ' + ', '.join(f'{m["file"]} {m["function"]}' for m in lost))


if __name__ == '__main__':
    main()
