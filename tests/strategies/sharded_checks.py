"""Checks for all strategies that shard or wrap models; every rank runs them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from chatgpt.batching import collate
from chatgpt.nn import Actor, GPTActor
from chatgpt.rollout import Call, LocalEngine, SamplingParams
from chatgpt.strategies import NaiveStrategy
from chatgpt.testing.fakes import tiny_config
from chatgpt.types import Prompt, Sequence

LENGTHS = [(9, 12), (3, 7), (5, 5), (4, 2), (2, 2), (6, 1)]


def fast_paths_are_plain(make: Callable[[], Any], tolerance: float, hydra: bool = True) -> None:
    """Compares the padding-free forward with the padded one, and the joined hydra pass with two passes."""
    with make() as strategy:
        with strategy.model_init_context():
            actor = GPTActor(config=tiny_config('gpt2', positions=48), num_layers_unfrozen=1 if hydra else None)
        optimizer = strategy.make_optimizer([p for p in actor.parameters() if p.requires_grad], lr=1e-2)
        actor, optimizer = strategy.prepare((actor, optimizer))
        g = torch.Generator().manual_seed(strategy.rank)
        items = [
            Sequence(
                prompt_ids=torch.randint(3, 60, (p,), generator=g),
                response_ids=torch.randint(3, 60, (a,), generator=g),
                response_mask=torch.ones(a, dtype=torch.bool),
            )
            for p, a in LENGTHS
        ]
        packed, padded = (collate(items, pack=p).to(strategy.device) for p in (True, False))
        norms = []
        for batch, lr in ((packed, 0.0), (padded, 1e-2)):
            for group in optimizer.param_groups:
                group['lr'] = lr
            with strategy.accumulate(actor, last=True):
                with strategy.autocast():
                    loss = -actor(batch).logprobs.float().sum() / 50
                strategy.backward(loss, actor, optimizer)
            norms.append(strategy.optimizer_step(optimizer))
        with torch.no_grad(), strategy.autocast():
            one, other = actor(packed).logprobs, actor(padded).logprobs
            off = {'logprobs': float((one - other).abs().max()), 'norm': abs(norms[0] / norms[1] - 1)}
            if hydra:
                both = actor(packed, with_reference=True)
                with strategy.unwrap(actor).reference():
                    apart = actor(packed).logprobs
                off['reference'] = float((both.reference.logprobs - apart).abs().max())
                off['policy'] = float((both.logprobs - one).abs().max())
                assert (both.logprobs - both.reference.logprobs).abs().max() > 0, 'the policy has not moved'
    assert all(by <= tolerance for by in off.values()), off


def actor_with(family: str, layers: int = 5) -> Actor:
    """Returns an actor, 'gpt2', 'llama' or 'lora'. With an odd number of blocks the first and last share a buffer."""
    torch.manual_seed(0)
    config = tiny_config('llama' if family == 'llama' else 'gpt2', positions=32, layers=layers)
    model = Actor(AutoModelForCausalLM.from_config(config), lora_rank=2 if family == 'lora' else 0)
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            torch.manual_seed(number)
            parameter.add_(0.05 * torch.randn(parameter.shape))  # LoRA's B starts at zero, so folding changes nothing
    return model


def generated(engine: Any, full: Any, rank: int) -> list[list[int]]:
    """Returns generated token ids; prompts differ by rank, so ranks take different numbers of steps."""
    prompts = [Prompt(ids=torch.arange(1, 3 + i + rank)) for i in range(1 + 3 * rank)]
    sampling = SamplingParams(max_new_tokens=4 + 6 * rank, eos_token_ids=(5,))
    engine.begin(full)
    samples = engine.generate(Call.of(prompts, sampling, seed=1, indices=range(len(prompts))))
    engine.end()
    return [s.response_ids.tolist() for s in samples]


def streamed_tokens_are_plain(make: Callable[[], Any], family: str) -> None:
    """Checks that streamed blocks generate the tokens of whole weights and do not change them. The device holds two of
    five blocks and the parameters outside of blocks."""
    with make() as strategy:
        model = strategy.prepare(actor_with(family))
        before = {n: t.clone() for n, t in strategy.full_state_dict(model).items()}
        with strategy.full_model(model) as full:
            tokens = generated(LocalEngine(), full, strategy.rank)
            storages = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in full.parameters()}
            assert sum(storages.values()) < 0.75 * sum(p.numel() * p.element_size() for p in full.parameters())
        after = strategy.full_state_dict(model)
        assert all(torch.equal(before[n], after[n]) for n in before)
        naive = NaiveStrategy(precision=strategy.numerics.precision, device='cpu')
        with naive.full_model(naive.prepare(actor_with(family))) as full:
            assert tokens == generated(LocalEngine(), full, strategy.rank)
        lengths = strategy.all_gather_object(max(map(len, tokens)))
        assert lengths[0] < lengths[-1], 'the ranks took equally many steps'
