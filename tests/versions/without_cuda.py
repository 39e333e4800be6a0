"""Lets a CUDA build of torch run on a CPU without the 2 GB of CUDA libraries that it links to.

    python tests/versions/without_cuda.py      # with the interpreter that has torch, installed with --no-deps

For a Linux machine that reaches PyPI and no index with CPU builds. The CUDA runtime and CUPTI, 13 MB, are the real
ones (packages nvidia-cuda-runtime and nvidia-cuda-cupti). In place of each other library comes one of the same name,
compiled here, in which every function that torch would call ends the process with its name: on a CPU none is called, so
torch computes as it does beside the real ones. Needs gcc and readelf.
"""

from __future__ import annotations

import importlib.util
import re
import subprocess
import tempfile
from pathlib import Path

REAL = ('libcudart.so', 'libcupti.so')
LAZY = ('libtorch_cuda_linalg.so', 'libcaffe2_nvrtc.so')
"""loaded by torch when a GPU first needs them"""


def main() -> None:
    spec = importlib.util.find_spec('torch')
    if spec is None or spec.origin is None:
        raise SystemExit('torch is not installed in this environment')
    lib = Path(spec.origin).parent / 'lib'
    binaries = [p for p in sorted(lib.glob('lib*.so')) if p.name not in LAZY]
    made = stand_ins(binaries, lib)
    print(f'{len(made)} libraries stand in for CUDA: {", ".join(made)}' if made else f'{lib} needs no CUDA')


def stand_ins(binaries: list[Path], folder: Path) -> list[str]:
    """Compile into `folder` a library for each CUDA one that `binaries` need; names of those made."""
    needed: set[str] = set()
    defined: set[str] = set()
    undefined: set[tuple[str, str]] = set()
    """(symbol, its version or '')"""
    versions: dict[str, set[str]] = {}
    """library → names of the versions that are asked of it"""
    for path in binaries:
        needed |= set(re.findall(r'\(NEEDED\).*\[(lib(?:cu|nccl|nv)[^\]]+)\]', read(path, '-d')))
        for library, names in re.findall(r'File: (\S+)  Cnt: \d+\n((?:.*Name: .*\n)*)', read(path, '-V')):
            versions.setdefault(library, set()).update(re.findall(r'Name: (\S+)', names))
        for words in map(str.split, read(path, '--dyn-syms').splitlines()):
            if len(words) >= 8 and words[4] == 'GLOBAL':
                name, _, version = words[7].partition('@')
                if words[6] == 'UND':
                    undefined.add((name, version.lstrip('@')))
                else:
                    defined.add(name)
    needed = {name for name in needed if not name.startswith(REAL)}
    for library in needed:
        wanted = versions.get(library, set())
        prefix = library.removeprefix('lib').partition('.')[0].lower()
        own = {
            name: version
            for name, version in undefined - {(name, '') for name in defined}
            if version in wanted or (not version and name.lower().startswith(prefix))
        }
        compile_library(library, own, folder)
    return sorted(needed)


def compile_library(library: str, functions: dict[str, str], folder: Path) -> None:
    """A library with these functions, name → version or ''."""
    text = '#include <stdio.h>\n#include <stdlib.h>\n#define STOP(name) void name(void) { \\\n'
    text += f'fputs(#name " of {library} is not here: tests/versions/without_cuda.py\\n", stderr); abort(); }}\n'
    text += ''.join(f'STOP({name})\n' for name in sorted(functions))
    script = ''.join(
        f'{version} {{ global: {" ".join(f"{name};" for name in functions if functions[name] == version)} }};\n'
        for version in sorted({*functions.values()} - {''})
    )
    with tempfile.TemporaryDirectory() as temporary:
        Path(temporary, 'library.c').write_text(text)
        Path(temporary, 'versions').write_text(script)
        options = [f'-Wl,-soname,{library}', *([f'-Wl,--version-script,{temporary}/versions'] if script else [])]
        out = ['-o', str(folder / library), f'{temporary}/library.c']
        subprocess.run(['gcc', '-shared', '-fPIC', '-fno-builtin', *options, *out], check=True)


def read(path: Path, what: str) -> str:
    return subprocess.run(['readelf', '-W', what, path], capture_output=True, text=True, check=True).stdout


if __name__ == '__main__':
    main()
