"""FSDP2 on gloo: when gradients are reduced and in which dtype, replicas of shards (HSDP), shards of frozen weights,
and threads of an offloaded step."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from chatgpt.batching import collate
from chatgpt.nn import Actor, AutoActor
from chatgpt.strategies import FSDPStrategy
from chatgpt.strategies.checkpoint import CheckpointMismatch
from chatgpt.testing import tiny_causal_lm
from chatgpt.testing.conformance import FP32, all_checks, run_conformance
from chatgpt.testing.processes import run_distributed
from chatgpt.types import Sequence


class Paths(nn.Module):
    """A module that uses `a` or `b` in a forward."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = (nn.Parameter(torch.ones(4)) for _ in 'ab')

    def forward(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return (getattr(self, name) * x).sum()


class Reductions(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.namespace == 'c10d' and 'reduce_scatter' in func.__name__
        return func(*args, **(kwargs or {}))


def step(
    uses: list[tuple[str, float]], options: dict[str, Any]
) -> tuple[int, float, dict[str, list[float]], list[Any]]:
    """Returns the numbers of reductions, the gradient norm and the weights after a step of SGD over micro-batches of
    (parameter, gradient of every element), and the pieces of this rank."""
    with FSDPStrategy(device='cpu', precision='fp32', **options) as strategy:
        model = Paths()
        model, optimizer = strategy.prepare((model, torch.optim.SGD(model.parameters(), lr=1.0)))
        with Reductions() as found:
            for number, (name, x) in enumerate(uses):
                with strategy.accumulate(model, last=number == len(uses) - 1):
                    strategy.backward(model(name, torch.full((4,), x * (strategy.rank + 1))), model, optimizer)
        norm = strategy.optimizer_step(optimizer)
        pieces = [(p.name, p.start, p.stop) for p in strategy.model_pieces(model)]
        return found.count, norm, {n: t.tolist() for n, t in strategy.full_state_dict(model).items()}, pieces


@pytest.mark.parametrize(('options', 'reductions'), [({}, 1), ({'whole_gradients_gib': 0.0}, 3)])
def test_gradients_are_reduced_in_the_last_micro_batch(options, reductions):
    found = run_distributed(step, 2, [('a', 1.0), ('b', 2.0), ('a', 8.0)], options)
    for count, norm, _, _ in found:
        assert count == reductions
        assert norm == pytest.approx((4 * 27**2 + 4 * 6**2) ** 0.5)  # a: (1 + 8) (1 + 2), b: 2 (1 + 2)
    assert found[0][2] == {'a': [1 - 27.0] * 4, 'b': [1 - 6.0] * 4}


@pytest.mark.parametrize(('dtype', 'a', 'b'), [('fp32', 2.0**-6, 2.0**-9), ('bf16', 2.0**-6, 0.0)])
def test_bf16_rounds_the_sums_of_ranks_and_not_those_of_micro_batches(dtype, a, b):
    # bf16 keeps 3 (1 + 2^-6) and rounds 1 + 2^-8 and 1 + 2^-9 to 1
    uses = [('a', 1.0), *[('a', 2.0**-8)] * 4, ('b', 1.0), ('b', 2.0**-9)]
    found = run_distributed(step, 2, uses, {'reduce_dtype': dtype})
    assert found[0][2]['a'] == [1 - 3 * (1 + a)] * 4
    assert found[0][2]['b'] == [1 - 3 * (1 + b)] * 4


def discarded() -> list[Any]:
    with FSDPStrategy(device='cpu', precision='fp32') as strategy:
        model = Paths()
        model, optimizer = strategy.prepare((model, torch.optim.SGD(model.parameters(), lr=1.0)))
        for x, last in ((100.0, False), (1.0, True)):
            with strategy.accumulate(model, last=last):
                strategy.backward(model('a', torch.full((4,), x)), model, optimizer)
            if not last:
                strategy.discard_gradients(optimizer)
        strategy.optimizer_step(optimizer)
        return [t.tolist() for t in strategy.full_state_dict(model).values()][:1]


def test_gradients_that_wait_can_be_discarded():
    assert run_distributed(discarded, 2)[0] == [[-1.0] * 4]


# ---------------------------------------------------------------- replicas


def test_two_groups_hold_the_same_shards():
    found = run_distributed(step, 4, [('a', 1.0), ('b', 2.0)], {'replicas': 2})
    for _, norm, _, _ in found:
        assert norm == pytest.approx((4 * 10**2 + 4 * 20**2) ** 0.5)  # 1 + 2 + 3 + 4 = 10 for a, twice that for b
    assert found[0][2] == {'a': [-9.0] * 4, 'b': [-19.0] * 4}
    assert [pieces for *_, pieces in found] == [[('a', 0, 2), ('b', 0, 2)], [('a', 2, 4), ('b', 2, 4)], [], []]


def conform(folder: str) -> dict[str, str]:
    return run_conformance(
        lambda: FSDPStrategy(device='cpu', precision='fp32', replicas=2), tolerance=FP32, folder=folder
    )


def test_replicas_conform(tmp_path):
    for results in run_distributed(conform, 2, str(tmp_path)):
        assert set(results) == set(all_checks())
        assert set(results.values()) == {'passed'}, results


@pytest.mark.parametrize(
    ('options', 'message'),
    [
        ({'replicas': 3}, 'replicas=3: 4 processes cannot be grouped'),
        ({'replicas': 2, 'reproducible': 'exact'}, 'replicas=2 does not go with reproducible'),
        ({'replicas': 2, 'tensor_parallel': 2}, 'tensor_parallel=2 does not go with replicas'),
        ({'reduce_dtype': 'fp16'}, "reduce_dtype='fp16' must be 'fp32' or 'bf16'"),
        ({'reduce_dtype': 'bf16', 'reproducible': 'exact'}, "leave reduce_dtype='bf16' out"),
    ],
)
def test_settings_are_refused_before_joining(options, message, monkeypatch):
    monkeypatch.setenv('WORLD_SIZE', '4')
    with pytest.raises(ValueError, match=message):
        FSDPStrategy(**options)


# ---------------------------------------------------------------- frozen weights


IDS = torch.arange(3, 9)
ANSWER = [Sequence(prompt_ids=IDS[:2], response_ids=IDS, response_mask=torch.ones(6, dtype=torch.bool))]


def lora_actor() -> Actor:
    """Returns an actor with weights in bf16 as of a folder, except one."""
    actor = Actor(tiny_causal_lm('gpt2'), lora_rank=2)
    with torch.no_grad():
        for name, parameter in actor.named_parameters():
            parameter.copy_(parameter.bfloat16() if 'h.1.mlp.c_fc' not in name else parameter + 1e-5)
    return actor


def frozen_shards(folder: str, narrow: bool) -> tuple[list[float], dict[str, str], bool]:
    """Returns log-probs of a frozen model, dtypes of the shards of a model with adapters, and whether it is saved
    exactly."""
    kept: Callable[..., Any] = FSDPStrategy._keep_narrow
    FSDPStrategy._keep_narrow = kept if narrow else lambda *_: None  # type: ignore[method-assign]
    try:
        with FSDPStrategy(device='cpu', precision='bf16') as strategy:
            frozen = strategy.prepare(Actor(tiny_causal_lm('gpt2')))
            matrices = {p.dtype for name, p in frozen.named_parameters() if '.h.' in name and p.dim() == 2}
            assert matrices == {torch.bfloat16 if narrow else torch.float32}
            with torch.no_grad(), strategy.autocast():
                logprobs = frozen(collate(ANSWER)).logprobs.tolist()
            actor = lora_actor()
            whole = {name: t.clone() for name, t in actor.state_dict().items()}
            optimizer = torch.optim.AdamW([p for p in actor.parameters() if p.requires_grad])
            actor, optimizer = strategy.prepare((actor, optimizer))
            dtypes = {name: str(p.dtype) for name, p in actor.named_parameters()}
            strategy.save_model(actor, Path(folder) / 'model', only_rank0=False)
            state = strategy.full_state_dict(actor)
            exact = all(torch.equal(state[n], whole[n].float()) for n in state)
            strategy.load_model(actor, Path(folder) / 'model')
            odd = {n: t + 1e-5 if t.is_floating_point() else t for n, t in whole.items()}
            torch.save(odd, Path(folder) / f'odd{strategy.rank}.pt')
            if narrow:
                with pytest.raises(CheckpointMismatch, match='which would round that of the checkpoint'):
                    strategy.load_model(actor, Path(folder) / f'odd{strategy.rank}.pt')
            with strategy.accumulate(actor, last=True):
                strategy.backward(actor(collate(ANSWER)).logprobs.sum(), actor, optimizer)
            assert strategy.optimizer_step(optimizer) > 0
            folded = []
            for on_disk in (None, folder):
                with strategy.full_model(actor, torch.float32, on_disk=on_disk) as full:
                    folded.append({n: p.clone() for n, p in full.named_parameters() if n.endswith('.weight')})
            assert all(torch.equal(folded[1][n], weight) for n, weight in folded[0].items()) or strategy.rank
        return logprobs, dtypes, exact
    finally:
        FSDPStrategy._keep_narrow = kept  # type: ignore[method-assign]


def test_frozen_weights_are_stored_in_the_compute_dtype(tmp_path, with_16_bits):
    found = {narrow: run_distributed(frozen_shards, 2, str(tmp_path), narrow)[0] for narrow in (True, False)}
    assert found[True][0] == found[False][0]  # gathering rounded them before
    dtypes = found[True][1]
    bf16 = {name for name, dtype in dtypes.items() if dtype == 'torch.bfloat16'}
    layers = {f'{part}.weight' for part in ('attn.c_attn', 'attn.c_proj', 'mlp.c_fc', 'mlp.c_proj')}
    assert bf16 == {name for name in dtypes if name.partition('.h.')[2][2:] in layers and 'h.1.mlp.c_fc' not in name}
    assert found[True][2]


def shards_of_a_folder(folder: str) -> set[str]:
    with FSDPStrategy(device='cpu', precision='bf16', meta_init=True) as strategy:
        with strategy.model_init_context():
            actor = AutoActor(pretrained=folder, lora_rank=2)
        optimizer = torch.optim.AdamW([p for p in actor.parameters() if p.requires_grad])
        actor, _ = strategy.prepare((actor, optimizer))
        return {str(p.dtype) for name, p in actor.named_parameters() if name.endswith('c_fc.weight')}


def test_a_model_that_is_filled_shard_by_shard_keeps_the_dtype_of_its_folder(tmp_path, with_16_bits):
    for dtype in (torch.bfloat16, torch.float32):
        tiny_causal_lm('gpt2').to(dtype).save_pretrained(tmp_path / str(dtype))
        assert run_distributed(shards_of_a_folder, 2, str(tmp_path / str(dtype))) == [{str(dtype)}] * 2


# ---------------------------------------------------------------- threads


class Counting(torch.optim.SGD):
    threads = 0

    def step(self, closure: Any = None) -> Any:
        self.threads = torch.get_num_threads()
        return super().step(closure)


def threads(cpu_offload: bool) -> tuple[int, int]:
    """Returns the number of threads inside and after an optimizer step."""
    os.sched_getaffinity = lambda pid: set(range(10))  # type: ignore[assignment,attr-defined]
    torch.set_num_threads(1)
    with FSDPStrategy(device='cpu', cpu_offload=cpu_offload) as strategy:
        model = Paths()
        model, optimizer = strategy.prepare((model, Counting(model.parameters(), lr=1.0)))
        with strategy.accumulate(model, last=True):
            strategy.backward(model('a', torch.ones(4)), model, optimizer)
        strategy.optimizer_step(optimizer)
        return optimizer.threads, torch.get_num_threads()


def test_an_offloaded_step_takes_the_cores_of_the_machine():
    assert run_distributed(threads, 2, True) == [(5, 1)] * 2  # ten cores, two processes
    assert run_distributed(threads, 2, False) == [(1, 1)] * 2
