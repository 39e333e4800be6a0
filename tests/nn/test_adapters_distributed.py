"""LoRA and hydra under DDP and FSDP2 on two gloo processes: same numbers as on one, and the reference stays the initial
model."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from model_cases import IDS
from torch import Tensor, nn

from chatgpt.nn.hydra import make_hydra, recorded_trunk, reference_branch
from chatgpt.nn.lora import adapter_disabled, convert_to_lora, merged
from chatgpt.testing.fakes import tiny_causal_lm
from chatgpt.testing.processes import run_distributed

STEPS = 3


class Owner(nn.Module):
    """Its forward gives the loss and, when asked, the reference's hidden states from the same pass."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.model = tiny_causal_lm('gpt2' if kind == 'lora' else 'llama', hidden=16, layers=3)
        if kind == 'lora':
            torch.manual_seed(0)
            convert_to_lora(self.model, 2, alpha=8)
        else:
            make_hydra(self, 2)

    def forward(self, ids: Tensor, with_reference: bool = False) -> tuple[Tensor, Tensor | None]:
        if not with_reference:
            return self.model(input_ids=ids, use_cache=False).logits, None
        with recorded_trunk(self) as trunk:
            logits = self.model(input_ids=ids, use_cache=False).logits
        return logits, self.ref_branch(trunk)


def loss_of(logits: Tensor, ids: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), ids.roll(1, 1).flatten())


def optimizer_of(module: nn.Module) -> torch.optim.Optimizer:
    # SGD, because Adam's first steps are signs, which amplify the last bit of a gradient near zero.
    return torch.optim.SGD([p for p in module.parameters() if p.requires_grad], lr=0.5)


def train(module: nn.Module, optimizer: torch.optim.Optimizer, ids: Tensor, kind: str) -> None:
    for _ in range(STEPS):
        logits, _ = module(ids, with_reference=kind == 'hydra')
        loss_of(logits, ids).backward()
        optimizer.step()
        optimizer.zero_grad()


def off(module: nn.Module, kind: str) -> Any:
    return adapter_disabled(module) if kind == 'lora' else reference_branch(module)


def wrap(owner: Owner, strategy: str) -> nn.Module:
    if strategy == 'ddp':
        return nn.parallel.DistributedDataParallel(owner)
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh('cpu', (dist.get_world_size(),))
    names = set(owner.model._no_split_modules)
    for module in list(owner.modules()):
        if type(module).__name__ in names:
            fully_shard(module, mesh=mesh)
    return fully_shard(owner, mesh=mesh)


def work() -> dict[str, Any]:
    rank = dist.get_rank()
    results = {}
    for kind in ('lora', 'hydra'):
        for strategy in ('ddp', 'fsdp'):
            module = wrap(Owner(kind), strategy)
            # Before any forward: FSDP2's root keeps gathered parameters after one, and those are not what is stepped.
            optimizer = optimizer_of(module)
            mine = IDS[rank : rank + 1]
            with torch.no_grad(), off(module, kind):  # a sharded module whose very first forward is the reference's
                initial = module(mine)[0].clone()
            train(module, optimizer, mine, kind)
            with torch.no_grad():
                policy = module(mine)[0].clone()
                with off(module, kind):
                    reference = module(mine)[0].clone()
                from_trunk = head_free = None
                if kind == 'hydra':
                    from_trunk = module(mine, with_reference=True)[1].clone()
                    with off(module, kind):
                        head_free = hidden_states(module, mine)
                folded = None
                if kind == 'lora':
                    with merged(module):
                        folded = module(mine)[0].clone()
            results[f'{kind}/{strategy}'] = (initial, policy, reference, from_trunk, head_free, folded)
            dist.barrier()
    return results


def hidden_states(module: nn.Module, ids: Tensor) -> Tensor:
    """The input of the output head during an ordinary forward."""
    owner = module.module if isinstance(module, nn.parallel.DistributedDataParallel) else module
    seen: list[Tensor] = []
    handle = owner.model.lm_head.register_forward_pre_hook(lambda _, args: seen.append(args[0].clone()))
    module(ids)
    handle.remove()
    return seen[0]


@pytest.fixture(scope='module')
def results() -> list[dict[str, Any]]:
    return run_distributed(work, 2, init_group=True)


@pytest.mark.parametrize('strategy', ['ddp', 'fsdp'])
@pytest.mark.parametrize('kind', ['lora', 'hydra'])
def test_two_processes_agree_with_one(results: list[dict[str, Any]], kind: str, strategy: str) -> None:
    owner = Owner(kind)
    untrained = copy.deepcopy(owner)
    train(owner, optimizer_of(owner), IDS, kind)  # the mean over two rows is the mean of the two ranks' means
    for rank in range(2):
        initial, policy, reference, from_trunk, head_free, folded = results[rank][f'{kind}/{strategy}']
        mine = IDS[rank : rank + 1]
        with torch.no_grad():
            torch.testing.assert_close(initial, untrained(mine)[0], rtol=1e-5, atol=1e-6)
            torch.testing.assert_close(policy, owner(mine)[0], rtol=1e-4, atol=1e-5)
        assert torch.equal(reference, initial)
        assert not torch.allclose(policy, initial, atol=1e-2)
        if kind == 'hydra':
            assert torch.equal(from_trunk, head_free)
        if kind == 'lora':
            torch.testing.assert_close(folded, policy, rtol=1e-4, atol=1e-5)
