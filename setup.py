"""Package metadata. The bounds here say what the code runs with (`make test-versions` tests them); requirements.txt
pins what it is tested with otherwise."""

from __future__ import annotations

import re
from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent


def version() -> str:
    """`__version__` of chatgpt/__init__.py, read without importing it."""
    found = re.search(r"^__version__ = '([^']+)'$", (ROOT / 'chatgpt' / '__init__.py').read_text(), re.MULTILINE)
    if found is None:
        raise ValueError('chatgpt/__init__.py has no line __version__ = ...')
    return found[1]


class BuildWithPages(build_py):
    """Puts the explanations of the doctor's findings, which are pages of the docs, into the package as one file."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            pages = [page.read_text('utf-8') for page in sorted((ROOT / 'docs' / 'doctor').glob('*.md'))]
            Path(self.build_lib, 'chatgpt/monitor/doctor/explanations.md').write_text('\n'.join(pages), 'utf-8')


# The distribution has a name of its own, for 'chatgpt' on PyPI is somebody else's package. What is imported is
# `chatgpt`.
NAME = 'chatgpt-rlhf'

# transformers 5.17 itself asks for these tokenizers and safetensors, datasets 4.0 for this tqdm.
INSTALL_REQUIRES = [
    'torch>=2.11',
    'transformers>=5.17,<6',
    'datasets>=4.0',
    'tokenizers>=0.23.1',
    'safetensors>=0.8',
    'loralib>=0.1.2',
    'numpy>=1.26',
    'PyYAML>=6.0',
    'tqdm>=4.66.3',
    'shtab>=1.13',
    'Jinja2>=3.1',
]

# There is no extra for ColossalAI: the metadata of its newest release asks for torch <= 2.5.1 and transformers 4.51.3,
# which no resolver can reconcile with the above, although it runs with both. Install it beside the package:
#     pip install --no-deps -r requirements-colossalai.txt
EXTRAS_REQUIRE = {
    'tensorboard': ['tensorboard>=2.15'],
    'wandb': ['wandb>=0.16'],
    'trackio': ['trackio>=0.30'],
    'mlflow': ['mlflow>=3.0'],
    'sweep': ['optuna>=4.0', 'matplotlib>=3.8'],
    'plot': ['matplotlib>=3.8'],
    'peft': ['peft>=0.18'],  # 0.17 imports a name that transformers 5 has no more
    'vllm': ['vllm>=0.32,<0.34'],
    'liger': ['liger-kernel>=0.8.5'],
    'nf4': ['bitsandbytes>=0.50'],  # before, its optimizers have no kernels for a CPU
    'ray': ['ray>=2.10'],
    'openenv': ['openenv-core>=0.3.0'],
    'compare': ['starlette>=0.46', 'uvicorn>=0.34'],
    'dev': ['pytest>=8.0', 'pytest-timeout>=2.3', 'ruff', 'mypy', 'tensorboard>=2.15', 'matplotlib>=3.8'],
}

if __name__ == '__main__':
    setup(
        name=NAME,
        version=version(),
        description='RLHF on Hugging Face models: the algorithm is written once and the hardware is a plug',
        long_description=(ROOT / 'README.md').read_text(),
        long_description_content_type='text/markdown',
        license='Apache-2.0',
        license_files=['LICENSE'],
        python_requires='>=3.11',
        cmdclass={'build_py': BuildWithPages},
        packages=find_packages(include=['chatgpt', 'chatgpt.*']),
        package_data={
            'chatgpt': ['py.typed'],
            'chatgpt.monitor.report': ['assets/*'],
            'chatgpt.monitor.compare': ['assets/*'],
            'chatgpt.monitor.publish': ['*.j2'],
        },
        install_requires=INSTALL_REQUIRES,
        extras_require=EXTRAS_REQUIRE,
        entry_points={'console_scripts': ['chatgpt-rlhf = chatgpt.launch.cli.command:main']},
        classifiers=[
            'Programming Language :: Python :: 3',
            'Programming Language :: Python :: 3.11',
            'Programming Language :: Python :: 3.12',
            'Topic :: Scientific/Engineering :: Artificial Intelligence',
        ],
    )
