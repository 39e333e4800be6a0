"""LoRA and hydra under FSDP2 on two gloo processes: same results as on one, and the reference stays the initial
model."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from model_cases import IDS
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from chatgpt.nn.hydra import make_hydra, recorded_trunk, reference_branch
from chatgpt.nn.lora import adapter_disabled, convert_to_lora, merged
from chatgpt.testing.fakes import tiny_causal_lm
from chatgpt.testing.processes import run_distributed


class Owner(nn.Module):
    """A module with a forward that returns the loss and, on request, the reference's hidden states from the same
    pass."""

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
    # SGD, because Adam's first steps are signs of gradients, which amplify rounding errors near zero.
    return torch.optim.SGD([p for p in module.parameters() if p.requires_grad], lr=0.5)


def train(module: nn.Module, optimizer: torch.optim.Optimizer, ids: Tensor, kind: str) -> None:
    for _ in range(3):
        logits, _ = module(ids, with_reference=kind == 'hydra')
        loss_of(logits, ids).backward()
        optimizer.step()
        optimizer.zero_grad()


def off(module: nn.Module, kind: str) -> Any:
    return adapter_disabled(module) if kind == 'lora' else reference_branch(module)


def sharded(owner: Owner) -> nn.Module:
    mesh = init_device_mesh('cpu', (dist.get_world_size(),))
    names = set(owner.model._no_split_modules)
    for module in list(owner.modules()):
        if type(module).__name__ in names:
            fully_shard(module, mesh=mesh)
    return fully_shard(owner, mesh=mesh)


def hidden_states(owner: Any, ids: Tensor) -> Tensor:
    """The input of the output head during an ordinary forward."""
    seen: list[Tensor] = []
    handle = owner.model.lm_head.register_forward_pre_hook(lambda _, args: seen.append(args[0].clone()))
    owner(ids)
    handle.remove()
    return seen[0]


def work() -> dict[str, Any]:
    mine, results = IDS[dist.get_rank() :][:1], {}
    for kind in ('lora', 'hydra'):
        module = sharded(Owner(kind))
        # Before any forward, after which FSDP2's root keeps gathered parameters instead of the sharded ones.
        optimizer = optimizer_of(module)
        with torch.no_grad(), off(module, kind):  # the first forward of the sharded module is the reference's
            initial = module(mine)[0].clone()
        train(module, optimizer, mine, kind)
        with torch.no_grad():
            policy = module(mine)[0].clone()
            with off(module, kind):
                reference = module(mine)[0].clone()
                states = hidden_states(module, mine)
            if kind == 'hydra':
                again = torch.equal(module(mine, with_reference=True)[1], states)
            else:
                with merged(module):
                    again = torch.allclose(module(mine)[0], policy, rtol=1e-4, atol=1e-5)
        results[kind] = initial, policy, reference, again
    return results


def test_two_processes_agree_with_one() -> None:
    ranks = run_distributed(work, 2, init_group=True)
    for kind in ('lora', 'hydra'):
        owner = Owner(kind)
        untrained = copy.deepcopy(owner)
        train(owner, optimizer_of(owner), IDS, kind)  # the mean over two rows is the mean of the two ranks' means
        for rank, found in enumerate(ranks):
            initial, policy, reference, again = found[kind]
            mine = IDS[rank : rank + 1]
            with torch.no_grad():
                torch.testing.assert_close(initial, untrained(mine)[0], rtol=1e-5, atol=1e-6)
                torch.testing.assert_close(policy, owner(mine)[0], rtol=1e-4, atol=1e-5)
            assert torch.equal(reference, initial) and again
            assert not torch.allclose(policy, initial, atol=1e-2)
