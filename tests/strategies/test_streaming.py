"""Streamed blocks (their tokens: test_fast_paths.py), and saving of whole models that no rank holds in memory."""

from __future__ import annotations

import ctypes
import errno
import os
import threading
import time
from contextlib import closing
from pathlib import Path

import pytest
import torch
from sharded_checks import actor_with
from transformers import AutoModelForCausalLM, GPT2Config

from chatgpt.nn import Actor, GPTActor
from chatgpt.strategies import FSDPStrategy, NaiveStrategy, machine, streaming
from chatgpt.strategies.streaming import BlockStream, MappedTensors, mapped_copy, transformer_blocks
from chatgpt.testing.processes import run_distributed
from chatgpt.trainer.saving import save_pretrained


def mapped(layers: int = 5) -> tuple[Actor, torch.nn.Module, MappedTensors]:
    model = actor_with('gpt2', layers)
    copied, tensors = mapped_copy(NaiveStrategy(device='cpu'), model, list(model.named_parameters()), torch.float32)
    return model, copied, tensors


@pytest.mark.parametrize('layers', [1, 2, 3, 4])
def test_any_number_and_order_of_blocks(layers):
    model, copied, tensors = mapped(layers)
    x = torch.randn(1, 3, 32)
    with closing(BlockStream(copied, tensors, torch.device('cpu'))), torch.no_grad():
        pairs = list(zip(transformer_blocks(model), transformer_blocks(copied), strict=True))
        assert len(pairs) == layers
        for want, got in (*pairs, *reversed(pairs), *pairs[::2], *pairs[::2]):
            assert torch.equal(want.eval()(x), got(x))


def test_a_stale_buffer_is_noticed():
    """Negative control: without `before_block` a block computes with another block's weights."""
    model, copied, tensors = mapped()
    stream = BlockStream(copied, tensors, torch.device('cpu'))
    stream.before_block = lambda i: None  # type: ignore[method-assign]
    x = torch.randn(1, 3, 32)
    with torch.no_grad():
        stream._copy(0), stream._copy(2)
        assert not torch.equal(transformer_blocks(model)[0].eval()(x), transformer_blocks(copied)[0](x))
    stream.close()


def test_mapped_tensors_leave_no_file(tmp_path):
    shapes = {'a': ((2, 3), torch.float32), 'empty': ((0,), torch.float32), 'b': ((), torch.int64)}
    shapes |= {'c': ((5,), torch.bfloat16)}
    mapped = MappedTensors(shapes, tmp_path)
    assert list(tmp_path.iterdir()) == []
    for name, (shape, dtype) in shapes.items():
        tensor = mapped.tensors[name]
        assert (tuple(tensor.shape), tensor.dtype) == (shape, dtype)
        tensor.fill_(7)
        assert tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()  # each has its own storage
    assert all((t == 7).all() for t in mapped.tensors.values())


def test_a_full_disk_is_named(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(streaming.os, 'posix_fallocate', full)
    monkeypatch.setattr('tempfile.tempdir', str(tmp_path))
    for folder, change in ((tmp_path, 'free some$'), (None, 'free some, or point TMPDIR to another disk$')):
        with pytest.raises(OSError, match=f'whole weights in {tmp_path}: No space left on device; {change}'):
            MappedTensors({'a': ((2,), torch.float32)}, folder)
    assert list(tmp_path.iterdir()) == []


def test_an_option_that_cannot_be_honoured():
    with pytest.raises(ValueError, match="stream_blocks='yes' must be True, False or 'auto'"):
        FSDPStrategy(stream_blocks='yes')


def anonymous_kib() -> int:
    """Returns the anonymous memory of this process, without mapped files, whose pages the kernel can drop."""
    text = Path('/proc/self/status').read_text()
    return int(next(line for line in text.splitlines() if line.startswith('RssAnon')).split()[1])


class Peak:
    """A context that measures the peak of `anonymous_kib` above its start, every millisecond."""

    def __enter__(self):
        self.start = self.highest = anonymous_kib()
        self.over = threading.Event()
        self.thread = threading.Thread(target=self.watch)
        self.thread.start()
        return self

    def watch(self):
        while not self.over.is_set():
            self.highest = max(self.highest, anonymous_kib())
            time.sleep(0.001)

    def __exit__(self, *_):
        self.highest = max(self.highest, anonymous_kib())  # the thread may not have run
        self.over.set()
        self.thread.join()
        self.mib = (self.highest - self.start) / 1024


def notices() -> float:
    with Peak() as peak:
        held = torch.ones(2**23)
        time.sleep(0.05)
    return peak.mib + 0 * float(held[0])


def write_and_read(folder: str) -> tuple[float, dict[str, float]]:
    os.environ['MALLOC_TRIM_THRESHOLD_'] = '131072'  # freed memory is returned, so resident memory is in use
    for name in (machine.M_TRIM_THRESHOLD, machine.M_MMAP_THRESHOLD):
        ctypes.CDLL(None).mallopt(name, 131072)
    config = GPT2Config(vocab_size=64, n_positions=16, n_embd=512, n_layer=8, n_head=8)
    with FSDPStrategy(device='cpu', meta_init=True) as strategy:
        with strategy.model_init_context():
            model = GPTActor(config=config)
        whole = sum(p.numel() for p in model.parameters()) * 4 / 2**20
        model = strategy.prepare(model)
        strategy.save_model(model, Path(folder) / 'warm.pt')  # imports and allocates once
        peaks = {}
        actions = {
            'save': lambda: strategy.save_model(model, Path(folder) / 'model.pt'),
            'save safetensors': lambda: strategy.save_model(model, Path(folder) / 'model.safetensors'),
            'export': lambda: save_pretrained(strategy, model, Path(folder) / 'exported'),
            'load': lambda: strategy.load_model(model, Path(folder) / 'model.pt'),
            'load safetensors': lambda: strategy.load_model(model, Path(folder) / 'model.safetensors'),
        }
        for name, act in actions.items():
            with Peak() as peak:
                act()
            peaks[name] = peak.mib
        return whole, peaks


@pytest.mark.skipif(not Path('/proc/self/status').exists(), reason='reads /proc/self/status')
def test_no_rank_holds_the_whole_model_to_save_or_load_it(tmp_path):
    assert run_distributed(notices, 1)[0] > 30, 'a tensor that is held was not noticed'
    for whole, peaks in run_distributed(write_and_read, 2, str(tmp_path)):
        assert whole > 90
        assert all(mib < 0.25 * whole for mib in peaks.values()), peaks
    state = torch.load(tmp_path / 'model.pt', weights_only=True)
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / 'exported').state_dict()
    assert all(torch.equal(exported[n], state[f'model.{n}']) for n in exported)
    assert list(tmp_path.glob('.*')) == []


class Cudart:
    """A fake of torch.cuda.cudart() for page-locking, with CUDA's last error."""

    def __init__(self, status: int, monkeypatch) -> None:
        self.status, self.pending = status, 0
        ones = torch.ones

        def launch(*args, device=None, **kwargs):
            error, self.pending = self.pending, 0
            if error:
                raise RuntimeError('CUDA error: operation not supported')
            return ones(*args, **kwargs)

        monkeypatch.setattr(torch.cuda, 'cudart', lambda: self)
        monkeypatch.setattr(torch, 'ones', launch)

    def cudaHostRegister(self, pointer, size, flags):
        self.registered, self.pending = (pointer, size), self.status
        return self.status


@pytest.mark.parametrize('status', [0, 801])
def test_a_refused_page_lock_is_not_reported_by_the_next_kernel(status, monkeypatch):
    memory, cudart = torch.zeros(5, dtype=torch.int16), Cudart(status, monkeypatch)
    assert streaming.page_locked(memory, torch.device('cuda', 0)) is (status == 0)
    assert cudart.registered == (memory.data_ptr(), 10)
    assert torch.ones(1, device='cuda').item() == 1
