"""FSDP2 on gloo: the conformance suite with CPU offload and in bf16, activation checkpointing, full copies.

NCCL, which takes no CPU tensors, is simulated for shards in host memory: in a dispatch mode 'cuda' tensors are marked
host memory, and collectives of unmarked tensors raise NCCL's error.
"""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers.models.gpt2.modeling_gpt2 import GPT2MLP

from chatgpt.batching import collate
from chatgpt.nn import Actor, GPTActor
from chatgpt.rollout.local.cpu_speed import PackedModules
from chatgpt.strategies import FSDPStrategy, states
from chatgpt.strategies.tensor_parallel import Parts
from chatgpt.testing import tiny_causal_lm
from chatgpt.testing.conformance import BF16, FP32, all_checks, run_conformance
from chatgpt.testing.fakes import tiny_config
from chatgpt.testing.processes import run_distributed
from chatgpt.trainer.nlpo import NLPOPolicy
from chatgpt.types import Sequence

IDS = torch.arange(3, 9)
ANSWER = [Sequence(prompt_ids=IDS[:2], response_ids=IDS, response_mask=torch.ones(6, dtype=torch.bool))]


def conform(folder: str, precision: str, cpu_offload: bool) -> dict[str, str]:
    tolerance = FP32 if precision == 'fp32' else BF16
    return run_conformance(
        lambda: FSDPStrategy(precision=precision, cpu_offload=cpu_offload, device='cpu'),
        tolerance=tolerance,
        folder=folder,
    )


@pytest.mark.parametrize(('precision', 'cpu_offload'), [('fp32', True), ('bf16', False)])
def test_conformance(precision, cpu_offload, tmp_path):
    for results in run_distributed(conform, 2, str(tmp_path), precision, cpu_offload):
        assert set(results) == set(all_checks())
        assert set(results.values()) == {'passed'}, results


def block_forwards() -> dict[bool, tuple[int, float]]:
    """Returns {activation_checkpointing: (number of MLP forwards in one forward and backward, gradient norm)}."""
    calls, original = list[int](), GPT2MLP.forward

    def counted(self: Any, *args: Any) -> Any:
        calls.append(1)
        return original(self, *args)

    GPT2MLP.forward = counted  # type: ignore[method-assign]
    batch = collate(ANSWER)
    results = {}
    try:
        for recompute in (False, True):
            with FSDPStrategy(device='cpu', activation_checkpointing=recompute) as strategy:
                actor = GPTActor(config=tiny_config('gpt2', layers=3))
                actor, optimizer = strategy.prepare((actor, torch.optim.AdamW(actor.parameters())))
                calls.clear()
                with strategy.accumulate(actor, last=True):
                    strategy.backward(actor(batch).logprobs.sum(), actor, optimizer)
                results[recompute] = len(calls), strategy.optimizer_step(optimizer)
    finally:
        GPT2MLP.forward = original  # type: ignore[method-assign]
    return results


def test_each_block_computes_twice():
    for results in run_distributed(block_forwards, 2):
        (plain_calls, plain_norm), (calls, norm) = results[False], results[True]
        assert (plain_calls, calls) == (3, 6)
        assert norm == pytest.approx(plain_norm, rel=1e-5)


def before_within_after() -> tuple[bool, int, int]:
    """Returns True if making a full copy does not change the shards, and the numbers of modules that the local engine
    runs packed and that it could."""
    with FSDPStrategy(device='cpu', activation_checkpointing=True) as strategy:
        strategy.prepare(torch.nn.Sequential(torch.nn.Linear(4, 4)))  # frozen
        model = torch.nn.Sequential(torch.nn.Linear(4, 4))
        with pytest.raises(ValueError, match='Sequential has no model that can recompute its activations'):
            strategy.prepare((model, torch.optim.AdamW(model.parameters())))
    with FSDPStrategy(device='cpu', precision='fp32') as strategy:
        actor = Actor(tiny_causal_lm('gpt2'), lora_rank=2)
        with torch.no_grad():
            for name, parameter in actor.named_parameters():
                if 'lora_B' in name:
                    parameter.fill_(0.5)
        optimizer = torch.optim.AdamW([p for p in actor.parameters() if p.requires_grad])
        actor, optimizer = strategy.prepare((actor, optimizer))

        shards = {n: p.to_local().detach() for n, p in strategy.unwrap(actor).named_parameters()}
        before = {n: t.clone() for n, t in shards.items()}

        def unchanged() -> bool:
            return all(torch.equal(before[n], t) for n, t in shards.items())

        with strategy.full_model(actor) as full:
            packed = PackedModules(full)
            within = unchanged()
            with packed.active(), torch.no_grad():
                replaced = sum('forward' in vars(module) for module in packed.modules)
        return within and unchanged(), replaced, len(packed.modules)


def test_a_model_that_cannot_recompute_is_refused_and_generating_moves_no_adapter():
    ((stands, replaced, packable),) = run_distributed(before_within_after, 1, init_group=True)
    assert stands
    assert replaced == packable > 4  # layers with folded adapters decode like plain ones


# ---------------------------------------------------------------- the outermost part, which a forward leaves gathered


def prepared(strategy: FSDPStrategy) -> tuple[Any, Any]:
    actor = Actor(tiny_causal_lm('gpt2'))
    return strategy.prepare((actor, torch.optim.SGD(actor.parameters(), lr=1e-2)))


@torch.no_grad()
def score(strategy: FSDPStrategy, model: nn.Module) -> None:
    with strategy.autocast():
        model(collate(ANSWER))


def copied_and_failed() -> tuple[bool, bool, bool]:
    """Returns True if a copy in fp32 has the weights of the shards, True if they are wider than bf16, and what
    `fails_together` says."""
    with FSDPStrategy(device='cpu', precision='bf16') as strategy:
        actor, _ = prepared(strategy)
        want = {n: t.clone() for n, t in strategy.full_state_dict(actor).items()}
        score(strategy, actor)
        with strategy.full_model(actor, torch.float32) as full:
            found = {n: t.clone() for n, t in full.state_dict().items()}
        equal = found.keys() == want.keys() and all(torch.equal(found[n], want[n]) for n in want)
        outermost = found['model.transformer.wte.weight']
        wide = not torch.equal(outermost, outermost.bfloat16().float())
        score(strategy, actor)
        return equal, wide, strategy.fails_together('here')


def test_a_copy_after_a_forward_without_gradients_has_the_weights_of_the_shards():
    assert run_distributed(copied_and_failed, 1, init_group=True) == [(True, True, True)]


def mask_after_a_phase() -> list[str]:
    """Returns names of the weights that NLPO's mask model does not take over after both models have scored."""
    with FSDPStrategy(device='cpu', precision='fp32') as strategy:
        (actor, optimizer), mask = prepared(strategy), strategy.prepare(Actor(tiny_causal_lm('gpt2')))
        config = SimpleNamespace(nlpo_top_p=0.9, nlpo_update_interval=1)
        policy = NLPOPolicy(strategy, actor, config, 1.0, mask, None)
        with strategy.accumulate(actor, last=True):
            strategy.backward(actor(collate(ANSWER)).logprobs.sum(), actor, optimizer)
        strategy.optimizer_step(optimizer)
        score(strategy, actor)
        score(strategy, mask)
        policy.end_phase(1)
        strategy.unwrap(mask).reshard()
        want, found = strategy.full_state_dict(actor), strategy.full_state_dict(mask)
        return [n for n in want if not torch.equal(want[n], found[n])]


def test_the_mask_model_of_nlpo_takes_over_the_outermost_weights_too():
    assert run_distributed(mask_after_a_phase, 1, init_group=True) == [[]]


# ---------------------------------------------------------------- shards in host memory, with NCCL simulated


class OnlyDeviceCollectives(TorchDispatchMode):
    """A mode in which ranks of gloo behave as ranks of NCCL: marked storages are on the device, others on the CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.marked: dict[int, Any] = {}
        self.largest = 0
        """elements of the largest floating tensor in a collective; objects travel as bytes"""

    def mark(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        self.marked[storage._cdata] = storage  # kept alive, so that its address is not reused

    def is_marked(self, tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self.marked

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented
        kwargs = dict(kwargs or {})
        tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        if func.namespace in ('c10d', '_c10d_functional') and tensors:
            if not all(self.is_marked(t) for t in tensors):
                raise RuntimeError('No backend type associated with device type cpu')
            self.largest = max(self.largest, *(t.numel() * t.is_floating_point() for t in tensors))
        device = kwargs.get('device')
        to_device = device is not None and torch.device(device).type == 'cuda'
        if to_device:
            kwargs['device'] = torch.device('cpu')
        result = func(*args, **kwargs)
        on_device = to_device or (device is None and bool(tensors) and self.is_marked(tensors[0]))
        for t in tree_leaves(result):
            if isinstance(t, torch.Tensor) and on_device:
                if to_device and t.untyped_storage()._cdata in {a.untyped_storage()._cdata for a in tensors}:
                    continue
                self.mark(t)
        return result


class Odd(nn.Module):
    """A module with odd numbers of rows, fewer rows than ranks, and several dimensions."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one = nn.Parameter(torch.randn(1, 3))
        self.odd = nn.Parameter(torch.randn(5, 3, 2))
        self.flat = nn.Parameter(torch.randn(7))
        self.register_buffer('scale', torch.randn(2))


def gathered(folder: str, chunk: int) -> tuple[dict[str, list[Any]], int]:
    torch.cuda._lazy_init = lambda: None  # type: ignore[assignment]
    states.CHUNK = chunk
    with FSDPStrategy(device='cpu', cpu_offload=True, stream_blocks=False) as strategy:
        model = strategy.prepare(Odd())
        strategy.ranks.device = torch.device('cuda', 0)
        out: dict[str, list[Any]] = {}
        try:
            with OnlyDeviceCollectives() as mode:
                with pytest.raises(RuntimeError, match='No backend type'):  # negative control
                    model.odd.full_tensor()
                out['file'] = [(n, t.tolist()) for n, t in strategy.full_state_dict(model).items()]
                full = strategy._gathered(model, torch.float32)
                out['copy'] = [(n, t.tolist()) for n, t in full.named_parameters()]
                out['device'] = [mode.is_marked(t.data) for t in full.parameters()]
                out['mapped'] = [(n, t.tolist()) for n, t in strategy._whole(model.named_parameters(), Parts())]
        finally:
            strategy.ranks.device = torch.device('cpu')
        (Path(folder) / f'{strategy.rank}').touch()
        return out, mode.largest


@pytest.mark.parametrize('chunk', [1 << 24, 4])
def test_shards_in_host_memory_are_gathered_through_the_device(tmp_path, chunk):
    whole = Odd()
    parameters = [(n, t.tolist()) for n, t in whole.named_parameters()]
    for rank, (out, largest) in enumerate(run_distributed(gathered, 2, str(tmp_path), chunk)):
        assert out['file'] == ([(n, t.tolist()) for n, t in whole.state_dict().items()] if rank == 0 else [])
        assert out['copy'] == out['mapped'] == parameters
        assert all(out['device'])
        most = max(math.prod(p.shape[1:]) * -(-p.shape[0] // 2) * 2 for p in whole.parameters())
        assert largest == min(chunk, most)
