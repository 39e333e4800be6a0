"""`Actor.logprob_kernel`: the choice of kernel, errors, and equal results of all kernels.

Triton's kernels run in tests/gpu; here the recorded results in `liger_golden.json` replace them.
"""

from __future__ import annotations

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import model_cases
import pytest
import torch
from cuda_on_cpu import pretend_cuda
from model_cases import SIZES, model_of
from record_liger import CASES, numbers
from torch import nn
from transformers import Gemma2Config, PhiConfig

from chatgpt.batching import collate
from chatgpt.functional import logprobs as plain_module
from chatgpt.functional.fused_logprobs import fused_logprobs
from chatgpt.functional.logprobs import chunked_logprobs
from chatgpt.nn import Actor, head_kernels
from chatgpt.nn.head_kernels import linear_weights
from chatgpt.strategies import FSDPStrategy, NaiveStrategy
from chatgpt.testing import tiny_causal_lm
from chatgpt.testing.processes import run_distributed

GOLDEN = Path(__file__).with_name('liger_golden.json')


def sequences():
    return model_cases.sequences([(2 + i, 3 + i) for i in range(6)])


@pytest.fixture
def small_chunks(monkeypatch):
    """Sets a bound that the tiny vocabulary exceeds: four rows, or 128 columns."""
    monkeypatch.setattr(plain_module, 'CHUNK_ELEMENTS_CPU', 256)
    monkeypatch.setattr(plain_module, 'CHUNK_ELEMENTS_ACCELERATOR', 256)


@pytest.fixture
def taken(monkeypatch):
    """Returns the list of kernels that have run."""
    names = []
    for name in ('chunked_logprobs', 'fused_logprobs'):
        own = getattr(head_kernels, name)
        monkeypatch.setattr(
            head_kernels, name, lambda *a, _own=own, _name=name, **k: names.append(_name) or _own(*a, **k)
        )
    return names


def run(actor, batch, with_entropy='detached'):
    actor.zero_grad()
    out = actor(batch, temperature=0.7, with_entropy=with_entropy)
    weights = torch.linspace(-1, 1, len(out.logprobs), device=out.logprobs.device)
    loss = (out.logprobs * weights).sum() + (out.entropy.sum() if with_entropy is True else 0.0)
    loss.backward()
    return [out.logprobs.detach(), out.entropy.detach(), *(p.grad for p in actor.parameters() if p.grad is not None)]


@pytest.mark.parametrize(
    ('family', 'lora_rank', 'with_entropy'),
    [('gpt2', 0, 'detached'), ('llama', 2, True), ('phi', 0, True), ('phi', 2, 'detached')],
)
def test_an_actor_learns_the_same_by_blocks(family, lora_rank, with_entropy, small_chunks, taken):
    model = model_of(PhiConfig(**SIZES) if family == 'phi' else family)  # Phi has an untied head with a bias
    torch.manual_seed(0)
    actor, batch = Actor(model, lora_rank=lora_rank).eval(), collate(sequences())
    want = [x.clone() for x in run(actor, batch, with_entropy)]
    assert taken == ['chunked_logprobs']  # the default, on a CPU
    actor.logprob_kernel = 'fused'
    found = run(actor, batch, with_entropy)
    assert taken == ['chunked_logprobs', 'fused_logprobs']
    assert len(found) == len(want) > 4
    for ours, plain in zip(found, want, strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-4, atol=1e-5)
    assert deepcopy(actor).logprob_kernel == 'fused'


def test_what_one_chunk_holds_is_plain(taken):
    actor = Actor(tiny_causal_lm('gpt2'))
    actor.logprob_kernel = 'fused'
    run(actor, collate(sequences()))
    assert taken == ['chunked_logprobs']


def test_auto_takes_blocks_on_an_accelerator_and_waits_for_nothing(small_chunks, taken):
    actor, batch = Actor(tiny_causal_lm('gpt2')).eval(), collate(sequences())
    want = [x.clone() for x in run(actor, batch)]
    with pretend_cuda() as cuda:
        strategy = NaiveStrategy(device='cuda:0', precision='fp32')
        there = Actor(tiny_causal_lm('gpt2'))
        there, _ = strategy.prepare((there, torch.optim.SGD(there.parameters(), lr=0.1)))
        there.eval()
        moved = batch.to(strategy.device)
        cuda.syncs.clear()
        found = run(there, moved)
        assert not cuda.syncs
        found = [x.cpu() for x in found]
    assert taken == ['chunked_logprobs', 'fused_logprobs']
    for ours, plain in zip(found, want, strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-4, atol=1e-5)


def test_what_does_not_fit_is_refused_by_name(monkeypatch, small_chunks):
    actor = Actor(tiny_causal_lm('gpt2'))
    with pytest.raises(ValueError, match=r"logprob_kernel='fusd' is not one of auto, plain, fused, liger"):
        actor.logprob_kernel = 'fusd'
    capped = Actor(model_of(Gemma2Config(**SIZES, num_key_value_heads=1, head_dim=16, final_logit_softcapping=5.0)))
    with pytest.raises(ValueError, match='logits of Gemma2ForCausalLM are more than its output layer'):
        capped.logprob_kernel = 'fused'
    assert capped.logprob_kernel == 'auto'

    Adapted = type('Adapted', (nn.Linear,), {})
    actor.model.lm_head.__class__ = Adapted
    with pytest.raises(ValueError, match='is a Adapted .* choose .plain'):
        actor.logprob_kernel = 'fused'
    actor.model.lm_head.__class__ = nn.Linear
    actor.logprob_kernel = 'fused'
    actor.model.lm_head.__class__ = Adapted  # changed after the check, as a strategy may
    with pytest.raises(ValueError, match='cannot read the weight of this output layer under this strategy'):
        run(actor, collate(sequences()))
    monkeypatch.setattr(head_kernels, 'find_spec', lambda name: None)
    with pytest.raises(ValueError, match=r"pip install 'chatgpt-rlhf\[liger\]'"):
        actor.logprob_kernel = 'liger'
    monkeypatch.setattr(head_kernels, 'find_spec', lambda name: True)
    monkeypatch.delenv('TRITON_INTERPRET', raising=False)
    monkeypatch.setattr(torch.cuda, 'is_available', lambda: False)
    with pytest.raises(ValueError, match='there is no GPU here'):
        actor.logprob_kernel = 'liger'


def test_heads_that_can_be_read():
    head = nn.Linear(4, 9)
    assert linear_weights(head) == (head.weight, head.bias)
    assert linear_weights(nn.Linear(4, 9, bias=False))[1] is None
    assert linear_weights(None) is None and linear_weights(nn.Embedding(9, 4)) is None
    handle = head.register_forward_hook(lambda *a: None)
    assert linear_weights(head) is None  # only its own call runs the hook
    handle.remove()
    sharded = type('Sharded', (torch.Tensor,), {})
    head.weight = nn.Parameter(head.weight.detach().as_subclass(sharded))
    assert linear_weights(head) is None


def under_fsdp() -> dict[str, Any]:
    plain_module.CHUNK_ELEMENTS_CPU = 256
    records, found = sequences(), {}
    for kernel in ('plain', 'fused'):
        strategy = FSDPStrategy(seed=0)
        torch.manual_seed(0)
        actor = Actor(tiny_causal_lm('llama')).eval()
        actor.logprob_kernel = kernel  # type: ignore[assignment]
        optimizer = torch.optim.SGD(actor.parameters(), lr=0.1)
        model, optimizer = strategy.prepare((actor, optimizer))
        losses = []
        for _ in range(2):
            mine = collate(records[strategy.rank :: 2])
            with strategy.accumulate(model, last=True), strategy.autocast():
                out = model(mine, with_entropy='detached')
                loss = -out.logprobs.sum() / 30
            strategy.backward(loss, model, optimizer)
            strategy.optimizer_step(optimizer)
            losses.append(float(strategy.all_reduce(loss.detach(), 'sum')))
        state = strategy.full_state_dict(model)
        found[kernel] = (losses, {k: v.clone() for k, v in state.items()} if state else {})
        strategy.close()
    return found


def test_blocks_of_a_sharded_head_are_the_plain_path():
    for found in run_distributed(under_fsdp, 2, init_group=True):
        (plain_losses, plain_state), (losses, state) = found['plain'], found['fused']
        assert losses == pytest.approx(plain_losses, rel=1e-5) and losses[1] != pytest.approx(losses[0], rel=1e-3)
        assert plain_state.keys() == state.keys()
        for key, value in plain_state.items():
            torch.testing.assert_close(state[key], value, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(('temperature', 'bias', 'trained'), CASES)
def test_ours_agree_with_ligers_recorded_numbers(temperature, bias, trained):
    recorded = json.loads(GOLDEN.read_text())['cases'][f'{temperature} {bias} {trained}']

    def fused(hidden, head, ids, **options):
        return fused_logprobs(hidden, head.weight, head.bias, ids, block_size=7, **options)

    for compute in (chunked_logprobs, fused):
        found = numbers(compute, temperature, bias, trained)
        assert len(found) == len(recorded)
        for ours, theirs in zip(found, recorded, strict=True):
            assert ours == pytest.approx(theirs, rel=1e-4, abs=2e-6)
