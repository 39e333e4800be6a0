"""A card that torch cannot use is named, and never used in silence as a CPU; nvidia-smi is a script of the test."""

from __future__ import annotations

import warnings

import pytest
import torch

from chatgpt.strategies import NaiveStrategy
from chatgpt.strategies.machine import unused_card

CARD = 'echo "NVIDIA H100, 470.57.02"; echo "NVIDIA H100, 470.57.02"'


@pytest.fixture
def nvidia_smi(tmp_path, monkeypatch):
    def put(script: str) -> None:
        program = tmp_path / 'nvidia-smi'
        program.write_text(f'#!/bin/sh\n{script}\n')
        program.chmod(0o755)
        monkeypatch.setenv('PATH', f'{tmp_path}:/usr/bin:/bin')
        monkeypatch.setattr(torch.cuda, 'is_available', lambda: False)
        monkeypatch.setattr(torch, '__version__', '9.9')
        for name in ('CUDA_VISIBLE_DEVICES', 'LOCAL_RANK'):
            monkeypatch.delenv(name, raising=False)

    unused_card.cache_clear()
    yield put
    unused_card.cache_clear()


def warned() -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter('always')
        assert NaiveStrategy().device.type == 'cpu'
    return [str(w.message) for w in caught if 'NVIDIA' in str(w.message)]


@pytest.mark.parametrize(
    ('built', 'said'),
    [
        (None, 'torch 9.9 is a build without CUDA'),
        ('13.0', 'torch 9.9 is built for CUDA 13.0, for which driver 470.57.02'),
    ],
)
def test_a_card_that_stays_idle_is_named_with_both_versions(nvidia_smi, monkeypatch, built, said):
    nvidia_smi(CARD)
    monkeypatch.setattr(torch.version, 'cuda', built)
    (text,) = warned()
    assert 'NVIDIA H100 (driver 470.57.02), and the run goes to the CPU' in text and said in text


@pytest.mark.parametrize(
    ('script', 'variables'),
    [
        ('exit 9', {}),
        ('echo "No devices were found"', {}),
        (CARD, {'CUDA_VISIBLE_DEVICES': ''}),
        (CARD, {'LOCAL_RANK': '1'}),
    ],
)
def test_silent(nvidia_smi, monkeypatch, script, variables):
    """No card, cards that were hidden on purpose, and another process of the machine."""
    nvidia_smi(script)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert warned() == []
