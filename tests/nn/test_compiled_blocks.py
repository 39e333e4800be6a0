"""`compile_blocks`: same results as eager, one graph for all layers, no new graph for another shape, names, copies,
caches.

Graphs are traced and run with the backend 'eager', which takes a second; the test marked slow compiles inductor's C++.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch._dynamo
from model_cases import sequences
from torch import nn
from torch._dynamo.utils import counters

from chatgpt.batching import collate
from chatgpt.nn import Actor, Critic, compiled
from chatgpt.nn.compiled import compile_blocks, is_compiled, not_compiled
from chatgpt.rollout import Call, LocalEngine, SamplingParams
from chatgpt.strategies import FSDPStrategy, NaiveStrategy
from chatgpt.testing import tiny_causal_lm
from chatgpt.testing.processes import run_distributed
from chatgpt.types import Prompt


def forget_graphs() -> None:
    torch._dynamo.reset()
    counters.clear()
    compiled._compiled.clear()


@pytest.fixture(autouse=True)
def fresh_graphs():
    forget_graphs()
    yield
    forget_graphs()


def batch_of(*lengths: tuple[int, int]) -> Any:
    return collate(sequences(lengths, seed=sum(p + 7 * a for p, a in lengths)))


SHAPES = [((3, 4), (2, 7), (6, 1)), ((3, 4), (2, 7), (6, 2), (3, 3)), ((2, 3), (8, 8), (9, 1), (1, 1))]


def learn(model: nn.Module, batch: Any) -> list[torch.Tensor]:
    model.zero_grad()
    out = model(batch)
    numbers = getattr(out, 'logprobs', out)
    (numbers * torch.linspace(-1, 1, len(numbers))).sum().backward()
    return [numbers.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def score(model: nn.Module, batch: Any) -> torch.Tensor:
    with torch.no_grad():
        out = model(batch)
    return getattr(out, 'logprobs', out)


def graphs() -> int:
    return counters['stats'].get('unique_graphs', 0)


KINDS = {
    'llama with lora': lambda: Actor(tiny_causal_lm('llama', layers=1), lora_rank=2),
    'critic of opt, which has its MLP in the block': lambda: Critic(tiny_causal_lm('opt', layers=1).base_model),
}


@pytest.mark.parametrize(('kind', 'checkpointed'), list(zip(KINDS, (True, False), strict=True)))
def test_numbers_are_the_plain_ones_and_graphs_do_not_follow_the_shapes(kind, checkpointed):
    model = KINDS[kind]().train()
    if checkpointed:
        model.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={'use_reentrant': False})
    twin, names = copy.deepcopy(model), list(model.state_dict())
    assert compile_blocks(model, backend='eager') > 0 and is_compiled(model) and not is_compiled(twin)
    assert list(model.state_dict()) == names
    seen = []
    for shape in SHAPES:
        batch = batch_of(*shape)
        for ours, plain in zip(learn(model, batch), learn(twin, batch), strict=True):
            torch.testing.assert_close(ours, plain, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(score(model, batch), score(twin, batch), rtol=1e-4, atol=1e-5)
        seen.append(graphs())
    assert seen[0] > 0 and len(set(seen)) == 1  # the first batch made them all


def test_layers_share_their_graphs():
    def graphs_of(layers):
        forget_graphs()
        model = Actor(tiny_causal_lm('llama', layers=layers))
        number = compile_blocks(model, backend='eager')
        score(model, batch_of((3, 4), (2, 7)))
        return number, graphs()

    (few_parts, few), (many_parts, many) = graphs_of(1), graphs_of(2)
    assert (few_parts, many_parts) == (4, 2 * 4)  # two norms, attention, MLP
    assert few == many > 0


def test_a_copy_has_parts_of_its_own_and_a_second_call_changes_nothing():
    model = Actor(tiny_causal_lm('gpt2', layers=1))
    assert compile_blocks(model, backend='eager') == 2 and compile_blocks(model, backend='eager') == 0
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.mul_(0.5)
    batch = batch_of((3, 4), (2, 7))
    assert is_compiled(twin)
    for module in twin.modules():
        assert 'forward' not in vars(module) or module.forward.__self__ is module
    halved = Actor(tiny_causal_lm('gpt2', layers=1))
    halved.load_state_dict(twin.state_dict())
    torch.testing.assert_close(score(twin, batch), score(halved, batch), rtol=1e-4, atol=1e-5)
    assert not torch.allclose(score(twin, batch), score(model, batch), atol=1e-3)


def test_generating_runs_no_graph():
    model = Actor(tiny_causal_lm('gpt2', layers=1)).eval()
    compile_blocks(model, backend='eager')
    engine, sampling = LocalEngine(), SamplingParams(max_new_tokens=6, eos_token_ids=(1,))
    engine.begin(model)
    engine.generate(Call.of([Prompt(ids=torch.tensor([4, 5, 6]))], sampling, seed=0, indices=[0]))
    engine.end()
    assert graphs() == 0
    with not_compiled():
        score(model, batch_of((3, 4), (2, 7)))
    assert graphs() == 0
    score(model, batch_of((3, 4), (2, 7)))
    assert graphs() > 0


@torch.no_grad()
def test_hydra_records_its_blocks():
    model = Actor(tiny_causal_lm('llama', layers=2), num_layers_unfrozen=1).eval()
    twin = copy.deepcopy(model)
    compile_blocks(model, backend='eager')
    batch = batch_of((3, 4), (2, 7))
    ours, plain = model(batch, with_reference=True), twin(batch, with_reference=True)
    torch.testing.assert_close(ours.reference.logprobs, plain.reference.logprobs, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(ours.logprobs, plain.logprobs, rtol=1e-4, atol=1e-5)


def test_errors_of_what_cannot_be_compiled(monkeypatch):
    with pytest.raises(ValueError, match='Linear has no transformer blocks'):
        compile_blocks(nn.Linear(2, 2), backend='eager')
    monkeypatch.setattr(compiled.shutil, 'which', lambda name: None)
    with pytest.raises(ValueError, match=r'needs a C\+\+ compiler'):
        compile_blocks(Actor(tiny_causal_lm('gpt2')))


def under_fsdp() -> Any:
    """Returns losses of steps, eager and compiled before and after `prepare`, and the number of graphs after each."""
    found = []
    for compiled_when in ('never', 'before', 'after'):
        strategy = FSDPStrategy(seed=0)
        model = Actor(tiny_causal_lm('gpt2', layers=1)).train()
        if compiled_when == 'before':
            compile_blocks(model, backend='eager')
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        model, optimizer = strategy.prepare((model, optimizer))
        if compiled_when == 'after':
            forget_graphs()
            compile_blocks(strategy.unwrap(model), backend='eager')
        losses, seen = [], []
        for shape in SHAPES[: 1 if compiled_when == 'after' else 2]:
            with strategy.accumulate(model, last=True), strategy.autocast():
                loss = -model(batch_of(*shape)).logprobs.mean() / 2
            strategy.backward(loss, model, optimizer)
            strategy.optimizer_step(optimizer)
            losses.append(float(loss))
            seen.append(graphs())
        names = list(strategy.full_state_dict(model) or [])
        strategy.close()
        found.append((losses, seen, names))
    return found


def test_under_fsdp():
    """On one rank, with modules wrapped as on many, because tracing takes most of the time."""
    ((plain, before, after),) = run_distributed(under_fsdp, 1, init_group=True)
    assert plain[1] == [0, 0] and before[1][0] == before[1][1] > 0 and after[1][0] > 0
    for ours in (before, after):
        assert ours[0] == pytest.approx(plain[0][: len(ours[0])], rel=1e-4) and ours[2] == plain[2]


def test_an_exact_strategy_refuses_compiled_blocks():
    model = Actor(tiny_causal_lm('llama'))
    compile_blocks(model, backend='eager')
    strategy = NaiveStrategy(device='cpu', reproducible='exact')
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for items in ((model,), ((model, optimizer),)):
        with pytest.raises(ValueError, match='compiled graphs of Actor do not repeat'):
            strategy.prepare(*items)
    strategy.close()


@pytest.mark.slow
def test_inductors_code_gives_the_plain_numbers():
    model = Actor(tiny_causal_lm('llama')).train()
    twin, batch = copy.deepcopy(model), batch_of(*SHAPES[0])
    compile_blocks(model)
    for ours, plain in zip(learn(model, batch), learn(twin, batch), strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-4, atol=1e-5)
