"""The environments of make test-versions, its table, and libraries that stand in for CUDA's."""

from __future__ import annotations

import ctypes
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]


@pytest.fixture(scope='module')
def script():
    return runpy.run_path(str(HERE / 'run.py'))


@pytest.fixture(scope='module')
def bounds():
    """package → its bounds in setup.py, those of the extras that the suite uses included."""
    pytest.importorskip('setuptools', reason='setup.py needs setuptools')
    setup = runpy.run_path(str(ROOT / 'setup.py'))
    extras = [
        r for name, extra in setup['EXTRAS_REQUIRE'].items() if name not in ('vllm', 'liger', 'dev') for r in extra
    ]
    required = map(Requirement, [*setup['INSTALL_REQUIRES'], *extras])
    own = {'mlflow': 'mlflow-skinny'}  # the part of it that is tested
    return {own.get(r.name, canonicalize_name(r.name)): r.specifier for r in required}


def test_lowest_is_the_lower_bound_of_everything(script, bounds):
    pins = script['pins']('lowest')
    lowest = {name: next(s.version for s in specifier if s.operator == '>=') for name, specifier in bounds.items()}
    assert {'torch', 'transformers', 'numpy', 'ray', 'mlflow-skinny'} <= set(lowest)
    # A bound of two numbers is the first release of them.
    wrong = {n: (pins[n], v) for n, v in lowest.items() if pins[n] != v and pins[n] != f'{v}.0'}
    assert not wrong


def test_newest_is_allowed(script, bounds):
    pins = script['pins']('newest')
    assert pins['torch'] > script['pins']('lowest')['torch']
    assert not {name: pins[name] for name, specifier in bounds.items() if not specifier.contains(pins[name])}


def test_a_file_of_versions_takes_the_place_of_others(script, tmp_path, monkeypatch):
    monkeypatch.setitem(script['pins'].__globals__, 'ROOT', tmp_path)
    for kind in script['KINDS']:
        (tmp_path / f'requirements{kind}.txt').write_text('# none\n')
    (tmp_path / 'requirements.txt').write_text('Jinja2==3.1.6\ntyping_extensions==4.16.0  # reason\n')
    (tmp_path / 'requirements-lowest.txt').write_text('jinja2==3.1.0\nsix==1.17.0\n')
    assert script['pins']('lowest') == {'jinja2': '3.1.0', 'typing-extensions': '4.16.0', 'six': '1.17.0'}


def test_the_row_is_that_of_pytest(script, tmp_path):
    (tmp_path / 'test_three.py').write_text(
        'import pytest\n'
        'def test_a(): pass\n'
        'def test_b(): pass\n'
        "def test_c(): pytest.skip('why')\n"
        'def test_d(): assert False\n'
    )
    report = tmp_path / 'report.xml'
    command = [sys.executable, '-m', 'pytest', '-q', '-p', 'no:cacheprovider', '--rootdir', tmp_path, '-c', '/dev/null']
    subprocess.run([*command, f'--junitxml={report}', tmp_path], capture_output=True, check=False)
    row = dict(zip(script['TITLES'], ['lowest', '3.11.7', '2.11.0', '5.17.0', *script['counts'](report)], strict=True))
    assert script['table']([row]).splitlines()[2] == '| lowest | 3.11.7 | 2.11.0 | 5.17.0 | 2 | 1 | 1 | 0 |'


@pytest.mark.skipif(not (shutil.which('gcc') and shutil.which('readelf')), reason='needs gcc and readelf')
def test_a_library_stands_in_for_one_of_cuda(tmp_path):
    """A binary linked to libraries, one with versioned functions, loads beside stand-ins, and calls end with a name.

    The names are none of CUDA's, for a torch in this process may have those."""
    (tmp_path / 'cusums.c').write_text('int cusumsOne(void) { return 1; }\n')
    (tmp_path / 'versions').write_text('libcusums.so.13 { global: cusumsOne; };\n')
    (tmp_path / 'nvsend.c').write_text('int nvsendOne(void) { return 1; }\n')
    (tmp_path / 'torch.c').write_text(
        'int cusumsOne(void); int nvsendOne(void);\nint one(void) { return 1; }\n'
        'int all(void) { return cusumsOne() + nvsendOne(); }\n'
    )

    def gcc(*words: str) -> None:
        subprocess.run(['gcc', '-shared', '-fPIC', *words], cwd=tmp_path, check=True)

    gcc('-Wl,-soname,libcusums.so.13', '-Wl,--version-script,versions', '-o', 'libcusums.so.13', 'cusums.c')
    gcc('-Wl,-soname,libnvsend.so.2', '-o', 'libnvsend.so.2', 'nvsend.c')
    gcc('-Wl,-rpath,$ORIGIN', '-o', 'libtorch.so', 'torch.c', './libcusums.so.13', './libnvsend.so.2')
    for name in ('libcusums.so.13', 'libnvsend.so.2'):
        (tmp_path / name).unlink()
    with pytest.raises(OSError, match='libcusums'):
        ctypes.CDLL(str(tmp_path / 'libtorch.so'))
    stand_ins = runpy.run_path(str(HERE / 'without_cuda.py'))['stand_ins']
    assert stand_ins([tmp_path / 'libtorch.so'], tmp_path) == ['libcusums.so.13', 'libnvsend.so.2']
    assert ctypes.CDLL(str(tmp_path / 'libtorch.so')).one() == 1
    code = f'import ctypes; ctypes.CDLL({str(tmp_path / "libtorch.so")!r}).all()'
    done = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, check=False)
    assert done.returncode != 0 and 'cusumsOne of libcusums.so.13 is not here' in done.stderr
