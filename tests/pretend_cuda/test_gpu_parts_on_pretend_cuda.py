"""The parts of gpu_check.py on the pretend device: what they do on CUDA alone (caps, the allocator's peaks, attention
of cuDNN), at tiny sizes. What they measure means nothing there."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from cuda_on_cpu import pretend_cuda

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / 'benchmarks'))
import dummy
import gpu_parts
import ladders
from gpu_parts import Note

CARD = 2**31
TINY = {
    'num_episodes': 1,
    'max_timesteps': 1,
    'update_timesteps': 1,
    'max_epochs': 1,
    'ignore_phases': 0,
    'precision': 'fp32',
}
SHORT = {'prompt_length': 8, 'max_length': 12, 'experience_batch_size': 2, 'train_batch_size': 2}


class Card:
    """What torch says of the card's memory: one MiB more is in use at every look."""

    def __init__(self) -> None:
        self.fractions: list[float] = []
        self.now, self.peak = 0, 0

    def look(self, device: object = None) -> int:
        self.now += 2**20
        self.peak = max(self.peak, self.now)
        return self.peak

    def reset(self, device: object = None) -> None:
        self.peak = self.now

    def cap(self, fraction: float, device: object = None) -> None:
        self.fractions.append(fraction)


@pytest.fixture
def card(monkeypatch):
    # these look at torch.cuda when they are imported
    pytest.importorskip('bitsandbytes')
    importlib.import_module('transformers.models.gpt2.modeling_gpt2')
    importlib.import_module('transformers.models.qwen2.modeling_qwen2')
    made = Card()
    with pretend_cuda():
        monkeypatch.setattr(torch.cuda, 'is_available', lambda: True)
        monkeypatch.setattr(torch.cuda, 'get_device_name', lambda device=None: 'Pretended')
        monkeypatch.setattr(torch.cuda, 'get_device_capability', lambda device=None: (9, 0))
        monkeypatch.setattr(torch.cuda, 'get_device_properties', lambda device=None: SimpleNamespace(total_memory=CARD))
        monkeypatch.setattr(torch.cuda, 'max_memory_allocated', made.look)
        monkeypatch.setattr(torch.cuda, 'max_memory_reserved', made.look)
        monkeypatch.setattr(torch.cuda, 'reset_peak_memory_stats', made.reset)
        monkeypatch.setattr(torch.cuda, 'set_per_process_memory_fraction', made.cap)
        monkeypatch.setattr(torch.cuda, 'get_rng_state', lambda device=None: torch.get_rng_state())
        monkeypatch.setattr(torch.cuda, 'host_memory_stats', lambda: {'allocated_bytes.peak': 0})
        # its sizes are for a GPU
        monkeypatch.setattr(gpu_parts, 'matmul_peak', lambda device, dtype: 2e12)
        monkeypatch.setattr(dummy, 'matmul_peak', lambda device, dtype: 2e12)
        yield made


def note_of(folder: Path, seconds: float = 10_000.0) -> Note:
    return Note(torch.device('cuda:0'), folder / 'out.json', seconds)


def written(folder: Path) -> dict:
    return json.loads((folder / 'out.json').read_text())


def test_device(card, tmp_path):
    gpu_parts.device(note_of(tmp_path))
    found = written(tmp_path)
    assert found['matmul_tflops'] == {'bfloat16': 2.0, 'float32': 2.0, 'float16': 2.0}
    assert found['host_to_device_gb_per_s'] > 0 and found['device_copy_gb_per_s'] > 0


def test_decode_with_cudnn_and_without(card, tmp_path):
    before = torch.backends.cuda.cudnn_sdp_enabled()
    gpu_parts.decode(note_of(tmp_path), model='tiny-gpt2', batch=2, prompt=3, new=4, precision='fp32', rounds=1)
    found = written(tmp_path)
    assert found['generate'].keys() == found['times'].keys() == {'with cuDNN', 'without cuDNN'}
    assert {g['new'] for g in found['generate'].values()} == {4}
    for kind, times in found['times'].items():
        assert times == pytest.approx(found['engine']['tokens_per_s'] / found['generate'][kind]['tokens_per_s'])
    assert found['engine']['tokens_per_s'] == pytest.approx(2 * 4 / found['engine']['seconds'])
    assert found['engine']['begin_s'] <= found['engine']['seconds']
    assert torch.backends.cuda.cudnn_sdp_enabled() == before


def test_ppo_and_the_largest_rung_that_the_card_holds(card, tmp_path, monkeypatch):
    monkeypatch.setattr(dummy, '_warm_up', lambda *given: None)  # a second run
    # 124 million parameters: 16 bytes of each of two trained networks, 4 of two frozen ones
    gpu_parts.ppo(note_of(tmp_path), rungs=['s', 'tiny'], **TINY, **SHORT)
    found = written(tmp_path)
    assert found['rung'] == 'tiny' and found['too_large_by_plan']['s'] > 124.4e6 * (2 * 16 + 2 * 4)
    assert found['matmul_peak_tflops'] == 2.0 and found['share_of_peak'].keys() == {
        'collect',
        'score',
        'learn',
        'total',
    }
    assert found['memory']['peak'] % 2**20 == 0 and found['memory']['planned_phase'] != 'load'
    with pytest.raises(gpu_parts.LeftOut, match=r'the card has 2\.00 GiB, and by the plan s needs'):
        gpu_parts.ppo(note_of(tmp_path), rungs=['s'], **TINY, **SHORT)


def test_trunk_under_a_cap(card, tmp_path):
    kept = torch.cuda.mem_get_info
    sizes = {'prompt': 4, 'new': 4, 'sequences': 2, 'precision': 'fp32', 'lora_rank': 2}
    gpu_parts.trunk(note_of(tmp_path), model='tiny-qwen2', memory=2**28, **sizes)
    found = written(tmp_path)
    assert found['peaks'].keys() == found['seconds'].keys() == {'load', 'collect', 'score', 'learn'}
    assert found['peak'] == max(found['peaks'].values())
    ratios = {phase: found['planned'][phase] / peak for phase, peak in found['peaks'].items()}
    assert found['planned_over_measured'] == pytest.approx(ratios)
    assert card.fractions == [2**28 / CARD, 1.0] and torch.cuda.mem_get_info is kept
    with pytest.raises(gpu_parts.LeftOut, match='the cap of 16 GiB is more than the card has'):
        gpu_parts.trunk(note_of(tmp_path), model='tiny-qwen2', memory=2**34, **sizes)


def test_capacity_under_caps(card, tmp_path, monkeypatch):
    monkeypatch.setitem(ladders.FAMILIES, 'tiny', ('GPT', {'a': (32, 1, 2), 'b': (128, 4, 4)}))
    monkeypatch.setattr(dummy, '_warm_up', lambda *given: None)  # a second run
    sizes = {'batch_size': 2, 'prompt_length': 4, 'max_length': 6, 'precision': 'fp32'}
    cap = 4 * 2**20  # by the plan the first rung takes less than 1 MB, and the next 11
    gpu_parts.capacity(note_of(tmp_path), caps=[cap, 2**32], options=['lean'], ladder='tiny', **sizes)
    small, large = written(tmp_path)['rows']
    assert (small['rung'], list(small['tried']), small['limit_at']) == ('a', ['a'], 'b')
    assert small['tried']['a']['trained'] and small['tried']['a']['peak'] > 0
    assert card.fractions == [cap / CARD, 1.0]
    assert large['left_out'] == 'the cap of 4 GiB is more than the card has'
