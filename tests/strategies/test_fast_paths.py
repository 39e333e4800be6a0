"""The padding-free forward, the joined hydra pass and streamed blocks, under DDP and FSDP. For ColossalAI's strategies
see test_colossalai.py."""

from __future__ import annotations

from functools import partial

import torch.distributed as dist
from sharded_checks import fast_paths_are_plain, streamed_tokens_are_plain

from chatgpt.strategies import DDPStrategy, FSDPStrategy
from chatgpt.testing.processes import run_distributed


def fast_paths() -> int:
    late = {'precision': 'bf16', 'meta_init': True, 'activation_checkpointing': True}
    for make, tolerance, hydra in (
        (DDPStrategy, 1e-5, True),
        (DDPStrategy, 1e-5, False),
        (FSDPStrategy, 1e-5, True),
        (partial(FSDPStrategy, **late), 5e-2, True),
    ):
        fast_paths_are_plain(partial(make, seed=3, device='cpu'), tolerance, hydra)
    return dist.get_rank()


def streamed() -> int:
    for family, precision in (('gpt2', 'fp32'), ('llama', 'bf16'), ('lora', 'fp32'), ('lora', 'bf16')):
        make = partial(FSDPStrategy, precision=precision, device='cpu', stream_blocks=True)
        streamed_tokens_are_plain(make, family)
    return dist.get_rank()


def test_fast_paths_give_the_numbers_of_the_plain_ones():
    assert run_distributed(fast_paths, 2, init_group=True) == [0, 1]


def test_streamed_blocks_give_the_tokens_of_whole_weights():
    assert run_distributed(streamed, 2, init_group=True) == [0, 1]
