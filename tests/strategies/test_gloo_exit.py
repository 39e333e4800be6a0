"""A process that ends while gloo's threads still hold tensors of finished collectives ends well."""

from __future__ import annotations

import pytest
from scripts_on_ranks import run_script

pytestmark = pytest.mark.system

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


def test_a_group_that_is_never_left():
    assert run_script(['-c', JOIN + WORK]) == [(0, 'well\n')] * 2


def test_a_group_that_was_left_and_that_torch_keeps():
    wrapped = 'model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 3))\n'
    assert run_script(['-c', JOIN + wrapped + WORK + 'strategy.close()\n']) == [(0, 'well\n')] * 2


@pytest.mark.parametrize('error', ['KeyError("no shelf")', 'SystemExit(3)'])
def test_the_exit_code_is_the_scripts(error):
    results = run_script(['-c', JOIN + WORK + f'raise {error}\n'])
    assert [code for code, _ in results] == [3 if 'Exit' in error else 1] * 2
