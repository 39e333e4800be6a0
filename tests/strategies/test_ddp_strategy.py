"""DDP: joining and leaving process groups, sums of gradients by hand, shared writing, exit of the processes."""

from __future__ import annotations

import re
import sys
import time

import pytest
import torch
import torch.distributed as dist
from scripts_on_ranks import run_script
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from chatgpt.batching import collate
from chatgpt.nn import Actor
from chatgpt.strategies.ddp import DDPStrategy
from chatgpt.testing import tiny_causal_lm
from chatgpt.testing.processes import environment, free_port, run_distributed, torchrun_environment
from chatgpt.types import Sequence


def test_without_torchrun(monkeypatch):
    for name in ('RANK', 'WORLD_SIZE', 'MASTER_ADDR', 'MASTER_PORT'):
        monkeypatch.delenv(name, raising=False)
    for arguments, program in (
        (['-u', '-m', 'package', 'run', 'a b.py', '-x'], "-m package run 'a b.py' ..."),
        (['-c', 'import chatgpt'], 'script.py'),
    ):
        monkeypatch.setattr(sys, 'orig_argv', ['python', *arguments])
        with pytest.raises(ValueError, match=rf'MASTER_PORT is not set; launch with: torchrun .*{re.escape(program)}'):
            DDPStrategy()


def test_wrong_settings_are_refused_before_joining():
    for wrong in ({'timeout_s': 0}, {'bucket_bytes': 0}, {'precision': 'int4'}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            DDPStrategy(**wrong)
        assert not dist.is_initialized()


def test_own_group_is_left_and_a_given_one_is_not():
    with environment(**torchrun_environment(0, 1, free_port())):
        with DDPStrategy(device='cpu') as strategy:
            assert (strategy.rank, strategy.world_size, strategy.local_rank, strategy.is_rank_0) == (0, 1, 0, True)
            assert dist.is_initialized()
            with DDPStrategy(device='cpu') as guest:
                assert guest.world_size == 1
            assert dist.is_initialized()
        assert not dist.is_initialized()


def _again():
    found = []
    for _ in range(2):
        with DDPStrategy(device='cpu') as strategy:
            nn.parallel.DistributedDataParallel(nn.Linear(2, 2))  # makes torch keep the group and its store
            found.append(strategy.all_gather_object(strategy.rank))
            first = strategy.is_rank_0
        time.sleep(0.5 if first else 0.0)  # so that the other rank finds the old group's keys
    return found


def test_a_group_is_left_and_another_joined():
    assert run_distributed(_again, 2) == [[[0, 1]] * 2] * 2


class TwoPaths(nn.Module):
    """A module that uses `a` or `b` in a forward, and never `c`."""

    def __init__(self) -> None:
        super().__init__()
        for name in 'abc':
            setattr(self, name, nn.Parameter(torch.tensor([1.0, 1.0])))

    def forward(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return (getattr(self, name) * x).sum()


def _several():
    found = {}
    with DDPStrategy(seed=3, device='cpu') as strategy:
        rank = strategy.rank
        # rank 0 uses a then a, rank 1 uses a then b; gradients are summed over ranks and micro-batches
        model = TwoPaths()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0, weight_decay=0.5)
        model, optimizer = strategy.prepare((model, optimizer))
        uses = [[('a', [1.0, 2.0]), ('a', [10.0, 20.0])], [('a', [100.0, 200.0]), ('b', [7.0, 8.0])]][rank]
        for number, (name, x) in enumerate(uses):
            with strategy.accumulate(model, last=number == 1):
                strategy.backward(model(name, torch.tensor(x)), model, optimizer)
        found['norm'] = strategy.optimizer_step(optimizer)
        found['weights'] = {n: p.tolist() for n, p in model.named_parameters()}
        # weights that differ between ranks become rank 0's
        odd = nn.Linear(2, 2)
        odd.register_buffer('flags', torch.tensor([rank == 0, True, rank == 1]))
        odd.register_buffer('count', torch.tensor(40 + rank))
        odd.register_buffer('nothing', torch.zeros(0))
        with torch.no_grad():
            odd.weight.fill_(float(rank + 5))
        odd = strategy.prepare(odd)
        found['start'] = [odd.weight.tolist(), odd.flags.tolist(), odd.count.item()]
        # all ranks write pieces, together each tensor once
        big = strategy.prepare(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)))
        found['pieces'] = [(p.name, p.start, p.stop) for p in strategy.model_pieces(big)]
        # an exception on rank 0 is raised with its class and message on all ranks
        for error in (FileNotFoundError('gone'), type('Odd', (Exception,), {})('odd one')):
            with pytest.raises(Exception) as caught:
                strategy.run_on_rank0(lambda e=error: _raise(e))
            found.setdefault('errors', []).append((caught.typename, str(caught.value)))
        found['local'] = torch.rand(1).item()
    return found


def _raise(error: Exception) -> None:
    raise error


def test_two_processes():
    results = run_distributed(_several, 2)
    for found in results:
        # sum for a: 1 + 10 + 100 = 111, 2 + 20 + 200 = 222; for b: 7, 8; c has no gradient and so no weight decay
        assert found['norm'] == pytest.approx((111**2 + 222**2 + 49 + 64) ** 0.5, rel=1e-6)
        assert found['weights'] == {'a': [1 - 111.5, 1 - 222.5], 'b': [1 - 7.5, 1 - 8.5], 'c': [1.0, 1.0]}
        assert found['start'] == [[[5.0, 5.0], [5.0, 5.0]], [True, True, False], 40]
    assert results[0]['local'] == results[1]['local']
    own = [found['pieces'] for found in results]
    assert all(len(pieces) == 2 for pieces in own)
    assert sorted(own[0] + own[1]) == [('0.bias', 0, 8), ('0.weight', 0, 64), ('1.bias', 0, 8), ('1.weight', 0, 64)]
    assert results[0]['errors'] == [('FileNotFoundError', 'gone'), ('Odd', 'odd one')]
    assert results[1]['errors'] == [('FileNotFoundError', 'gone'), ('RuntimeError', 'rank 0: Odd: odd one')]


# ---------------------------------------------------------------- sums that begin in the backward


class AllReduces(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func.namespace == 'c10d' and 'allreduce' in func.__name__
        return func(*args, **(kwargs or {}))


def _begun(reduce_dtype):
    """Returns the numbers of sums that each of two micro-batches began, and the weights after the step."""
    with DDPStrategy(device='cpu', bucket_bytes=8, reduce_dtype=reduce_dtype) as strategy:
        model = TwoPaths()
        model, optimizer = strategy.prepare((model, torch.optim.SGD(model.parameters(), lr=1.0)))
        begun = []
        for x, last in ((1.0, False), (2.0**-8 if strategy.rank else 0.0, True)):
            with strategy.accumulate(model, last=last), AllReduces() as found:
                loss = sum(model(name, torch.tensor([x, 1.0])) for name in 'abc')
                strategy.backward(loss, model, optimizer)
                begun.append(found.count)
        strategy.optimizer_step(optimizer)
        return begun, [p.tolist() for p in model.parameters()]


@pytest.mark.parametrize(('dtype', 'small'), [('fp32', 2.0**-8), ('bf16', 0.0)])
def test_the_last_backward_sums_each_bucket_once_it_is_complete(dtype, small):
    for begun, weights in run_distributed(_begun, 2, dtype):
        assert begun == [0, 3]  # each parameter is a bucket
        assert weights == [[1 - (2 + small), 1 - 4.0]] * 3  # bf16 rounds 2 + 2^-8 to 2


def _begun_in_bf16():
    """Returns the number of sums that the last backward began, the dtype of the weights, and the weights."""
    with DDPStrategy(device='cpu', precision='bf16', bucket_bytes=1 << 12) as strategy:
        actor = Actor(tiny_causal_lm('llama'))
        actor, optimizer = strategy.prepare((actor, torch.optim.SGD(actor.parameters(), lr=1.0)))
        ids = torch.tensor([5, 6, 7, 8 + strategy.rank])
        batch = collate([Sequence(prompt_ids=ids[:2], response_ids=ids[2:], response_mask=torch.ones(2).bool())])
        with strategy.accumulate(actor, last=True), AllReduces() as found:
            strategy.backward(actor(batch).logprobs.sum(), actor, optimizer)
            begun = found.count
        strategy.optimizer_step(optimizer)
        weights = list(actor.model.model.layers.parameters())
        return begun, str(weights[0].dtype), [float(w.float().sum()) for w in weights]


def test_the_gradients_of_weights_in_16_bits_are_sent_in_the_backward(with_16_bits):
    first, second = run_distributed(_begun_in_bf16, 2)
    assert first == second and first[0] > 3 and first[1] == 'torch.bfloat16'


def _late():
    """Returns the weights after steps in which the last micro-batch has two backwards, one of another optimizer, and in
    which gradients are dropped after they were sent."""
    with DDPStrategy(device='cpu', bucket_bytes=8) as strategy:
        model = TwoPaths()
        optimizers = [torch.optim.SGD([getattr(model, name)], lr=1.0) for name in 'ab']
        (model, first), (_, second) = strategy.prepare(*((model, optimizer) for optimizer in optimizers))
        x = torch.tensor([1.0, 2.0])
        for optimizer, names in ((first, 'ab'), (second, 'ab'), (first, 'a')):
            with strategy.accumulate(model, last=True):
                names = names if strategy.rank else names[0]
                strategy.backward(sum(model(name, x) for name in names), model, optimizer)
        strategy.optimizer_step(first)
        strategy.optimizer_step(second)
        with strategy.accumulate(model, last=True):
            strategy.backward(model('a', 100 * x), model, first)
        strategy.discard_gradients(first)
        with strategy.accumulate(model, last=True):
            strategy.backward(model('a', 8 * x), model, first)
        strategy.optimizer_step(first)
        return model.a.tolist(), model.b.tolist()


def test_gradients_after_their_bucket_was_sent_are_summed_too():
    # a: 3 backwards on two ranks, then 8 on two; b: 2 backwards on rank 1
    assert run_distributed(_late, 2) == [([1 - 6 - 16.0, 1 - 12 - 32.0], [1 - 2.0, 1 - 4.0])] * 2


# ---------------------------------------------------------------- exit while gloo's threads hold tensors


JOIN = """
import torch, torch.distributed as dist
from chatgpt.strategies.ddp import DDPStrategy
strategy = DDPStrategy(device='cpu')
"""
WORK = """
strategy.barrier()
for _ in range(300):  # so many that the threads are at it when the script ends
    dist.all_reduce(torch.ones(3000), async_op=True)
print('well')
"""


WRAPPED = 'model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 3))'  # makes torch keep the group


@pytest.mark.system
@pytest.mark.parametrize(
    ('before', 'last', 'code'),
    [
        ('', '', 0),
        (WRAPPED, 'strategy.close()', 0),
        ('', 'raise KeyError("no shelf")', 1),
        ('', 'raise SystemExit(3)', 3),
    ],
)
def test_the_exit_code_is_the_scripts(before, last, code):
    results = run_script(['-c', JOIN + before + WORK + last])
    assert [found for found, _ in results] == [code] * 2, results
