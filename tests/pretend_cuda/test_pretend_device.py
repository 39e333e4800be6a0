"""The pretend device behaves as CUDA where our code could tell: places, indices, waits, page-locked copies, graphs."""

from __future__ import annotations

import pytest
import torch
from cuda_on_cpu import Sync, pretend_cuda
from torch import nn


@pytest.fixture
def cuda():
    with pretend_cuda(2) as device:
        yield device


def kinds(cuda) -> list[str]:
    """What has been counted since the last call."""
    found = sorted(sync.kind for sync in cuda.syncs.elements())
    cuda.syncs.clear()
    return found


@pytest.mark.parametrize('other', ['cpu', 'cuda:1'])
def test_mixing_is_refused(cuda, other):
    x, y = torch.ones(3, device='cuda:0'), torch.ones(3, device=other)
    for mix in (
        lambda x, y: x + y,
        lambda x, y: torch.cat([x, y]),
        lambda x, y: torch.where(x > 0, x, y),
        lambda x, y: nn.functional.embedding(y.long(), x[:, None]),
        lambda x, y: x.add_(y),
        lambda x, y: y[x.long()],
    ):
        with pytest.raises(RuntimeError, match='same device'):
            mix(x, y)


@pytest.mark.parametrize(
    ('ask', 'want'),
    [
        (lambda x: float(x[0]) + bool(x.any()), ['item', 'item']),
        (lambda x: x.tolist(), ['tolist']),
        (lambda x: x.cpu(), ['copy to host']),
        (lambda x: x[x > 1], ['boolean mask']),
        (lambda x: x.nonzero(), ['nonzero']),
        (lambda x: torch.where(x > 1), ['nonzero']),
        (lambda x: x.repeat_interleave(x.long()), ['repeat_interleave']),
        (lambda x: x.new_tensor([1.0]), ['copy to device']),
        (lambda x: torch.ones(1).to(x.device), ['copy to device']),
        (lambda x: torch.ones(1).to(x.device, non_blocking=True), ['copy to device']),  # not page-locked
        (lambda x: x.copy_(torch.ones(3)), ['copy to device']),
        (lambda x: torch.cuda.synchronize(), ['synchronize']),
        # and what does not wait
        (lambda x: torch.ones(3).pin_memory().to(x.device, non_blocking=True), []),
        (lambda x: torch.empty(3, pin_memory=True).copy_(x, non_blocking=True), []),
        (lambda x: x.new_full((2,), 1.0) * torch.zeros(2, device=x.device), []),
        (lambda x: x.masked_fill(x > 1, 0.0), []),
        (lambda x: torch.ones(3).tolist() + [float(torch.ones(()))], []),
    ],
)
def test_waits_are_counted(cuda, ask, want):
    x = torch.arange(3.0).to('cuda:0')
    kinds(cuda)
    ask(x)
    assert kinds(cuda) == want


def test_a_wait_is_named_by_its_line(cuda):
    torch.ones(1, device='cuda:0').item()
    line = test_a_wait_is_named_by_its_line.__code__.co_firstlineno + 1
    assert cuda.syncs[Sync('item', f'test_pretend_device.py:{line}')] == 1


def test_a_graph_computes_nothing_when_captured_and_again_at_each_replay(cuda):
    x, total = torch.ones(2, device='cuda:1'), torch.zeros(2, device='cuda:1')
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.Stream('cuda:1')):
        doubled = x * 2
        total += doubled[1:]
    assert total.tolist() == [0.0, 0.0]
    graph.replay()
    x.fill_(5.0)
    graph.replay()
    assert total.tolist() == [12.0, 12.0] and doubled.tolist() == [10.0, 10.0]
    with pytest.raises(RuntimeError, match='not permitted when stream is capturing'), torch.cuda.graph(graph):
        x.sum().item()


def test_all_is_restored():
    names = [(torch.cuda, name) for name in ('_lazy_init', 'synchronize', 'graph', 'CUDAGraph', 'Stream', 'device')]
    names += [(torch.Tensor, 'pin_memory'), (torch.Tensor, 'data'), (torch, 'inference_mode')]
    before = [getattr(owner, name) for owner, name in names]
    own = set(vars(torch.Tensor))
    with pytest.raises(ZeroDivisionError), pretend_cuda():
        x = torch.ones(1, device='cuda')
        with pytest.raises(RuntimeError, match='already inside'), pretend_cuda():
            pass
        _ = 1 / 0
    assert [getattr(owner, name) for owner, name in names] == before and set(vars(torch.Tensor)) == own
    assert not torch.__future__.get_swap_module_params_on_conversion()
    with pytest.raises((RuntimeError, AssertionError)):
        torch.ones(1, device='cuda')
    with pytest.raises(RuntimeError, match='closed'):
        x + 1
    with torch.inference_mode():
        assert torch.ones(1).is_inference()
    with pretend_cuda() as again:
        assert not again.syncs
