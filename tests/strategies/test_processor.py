"""The processor's instructions: from torch and oneDNN, and from the variable that answers for them."""

from __future__ import annotations

import ast
import os
from pathlib import Path

import pytest
import torch

import chatgpt
from chatgpt.strategies.machine import Processor, processor
from chatgpt.testing.processes import run_distributed


@pytest.fixture
def found(monkeypatch):
    """A function that says what torch finds, and gives the answer."""
    monkeypatch.delenv('CHATGPT_PROCESSOR')
    monkeypatch.delenv('ONEDNN_MAX_CPU_ISA', raising=False)
    monkeypatch.delenv('DNNL_MAX_CPU_ISA', raising=False)

    def ask(onednn: bool = True, architecture: str = 'x86_64', **capabilities: bool) -> tuple[bool, bool]:
        for kind in ('bf16', 'fp16'):
            monkeypatch.setattr(torch.ops.mkldnn, f'_is_mkldnn_{kind}_supported', lambda: onednn)
        monkeypatch.setattr(torch.cpu, 'get_capabilities', lambda: {'architecture': architecture, **capabilities})
        monkeypatch.setattr(torch.backends.cpu, 'get_cpu_capability', lambda: 'AVX512')
        answer = processor()
        assert answer.vectors == 'avx512'
        return answer.bf16, answer.fp16

    return ask


def test_what_torch_finds(found, monkeypatch):
    assert found(avx512_f=True) == (False, False)
    assert found(avx512_f=True, avx512_bf16=True) == (True, False)
    assert found(amx_bf16=True, avx512_fp16=True) == (True, True)
    assert found(architecture='aarch64', bf16=True) == (True, True)
    assert found(onednn=False, amx_bf16=True, amx_fp16=True) == (False, False)
    for limit, can in (('AVX512_CORE', (False, False)), ('avx512_core_bf16', (True, False)), ('ALL', (True, True))):
        monkeypatch.setenv('ONEDNN_MAX_CPU_ISA', limit)
        assert found(avx512_bf16=True, avx512_fp16=True) == can


@pytest.mark.parametrize(
    ('given', 'answer'),
    [('avx2', ('avx2', False, False)), ('avx512,bf16', ('avx512', True, False)), ('default,fp16', ('default', 0, 1))],
)
def test_the_variable_answers_in_its_place(monkeypatch, given, answer):
    monkeypatch.setenv('CHATGPT_PROCESSOR', given)
    monkeypatch.setenv('ONEDNN_MAX_CPU_ISA', 'AVX2')
    assert processor() == Processor(*answer) and str(processor()) == given


@pytest.mark.parametrize('given', ['sse', 'bf16', 'avx2,int8', 'avx2;bf16'])
def test_another_word_is_an_error(monkeypatch, given):
    monkeypatch.setenv('CHATGPT_PROCESSOR', given)
    with pytest.raises(ValueError, match=f"CHATGPT_PROCESSOR='{given}': give one of default, avx2, avx512"):
        processor()


def test_every_test_has_the_same_answer_and_ranks_have_it_too(without_16_bits):
    assert str(processor()) == os.environ['CHATGPT_PROCESSOR'] == 'avx2'
    assert run_distributed(processor, 1) == run_distributed(processor, 1, fresh=True) == [processor()]


ASKS = {'get_capabilities', 'get_cpu_capability', '_is_avx512_supported', '_is_amx_tile_supported', 'cpuinfo'}


def test_nothing_else_asks_the_processor():
    """In the library and in tests, by the names of what can be asked."""
    root = Path(chatgpt.__file__).parents[1]
    own = {'chatgpt/strategies/machine.py', 'tests/strategies/test_processor.py'}
    own |= {'chatgpt/trainer/callbacks/run_record.py'}  # its name
    own |= {'tests/fixed_runs/record.py'}  # a record of the machine, beside numbers
    asking = set()
    for path in (*root.glob('chatgpt/**/*.py'), *root.glob('tests/**/*.py')):
        text = path.read_text()
        if any(word in text for word in ASKS) and any(
            (isinstance(node, ast.Attribute) and node.attr in ASKS)
            or (isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value == '/proc/cpuinfo')
            for node in ast.walk(ast.parse(text))
        ):
            asking.add(path.relative_to(root).as_posix())
    assert asking - own == set()
