"""The padding-free forward and the joined hydra pass under every strategy that shards or wraps: the numbers of the
plain way."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch

from chatgpt.testing.processes import run_distributed

LENGTHS = [(9, 12), (3, 7), (5, 5), (4, 2), (2, 2), (6, 1)]


def compare_all(kind: str, options: dict[str, Any]) -> list[dict[str, float]]:
    """With a hydra, and under DDP without one too."""
    both = kind == 'DDPStrategy'
    return [compare(kind, options, with_hydra) for with_hydra in (True, False)[: 1 + both]]


def compare(kind: str, options: dict[str, Any], with_hydra: bool) -> dict[str, float]:
    """Largest difference of log-probs and gradients, packed against padded and joined against separate, on this
    rank."""
    from chatgpt.batching import collate
    from chatgpt.nn import GPTActor
    from chatgpt.testing.fakes import tiny_config
    from chatgpt.trainer import strategies as s
    from chatgpt.types import Sequence

    strategy: Any = getattr(s, kind)(seed=3, **options)
    with strategy:
        with strategy.model_init_context():
            actor = GPTActor(config=tiny_config('gpt2', positions=48), num_layers_unfrozen=1 if with_hydra else None)
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
        norms = {}
        for name, batch in (('packed', packed), ('padded', padded)):
            with strategy.accumulate(actor, last=True):
                with strategy.autocast():
                    loss = -actor(batch).logprobs.float().sum() / 50
                strategy.backward(loss, actor, optimizer)
            norms[name] = (
                strategy.optimizer_step(optimizer) if name == 'padded' else _norm_without_step(strategy, optimizer)
            )
        with torch.no_grad(), strategy.autocast():
            one, other = actor(packed).logprobs, actor(padded).logprobs
            facts = {'logprobs': float((one - other).abs().max()), 'norm': abs(norms['packed'] / norms['padded'] - 1)}
            if with_hydra:
                both = actor(packed, with_reference=True)
                with strategy.unwrap(actor).reference():
                    apart = actor(packed).logprobs
                facts['reference'] = float((both.reference.logprobs - apart).abs().max())
                facts['policy'] = float((both.logprobs - one).abs().max())
                facts['moved'] = float((both.logprobs - both.reference.logprobs).abs().max())
    return facts


def _norm_without_step(strategy: Any, optimizer: Any) -> float:
    """The gradient norm, without a change of the weights."""
    before = [group['lr'] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group['lr'] = 0.0
    norm = strategy.optimizer_step(optimizer)
    for group, lr in zip(optimizer.param_groups, before, strict=True):
        group['lr'] = lr
    return norm


STRATEGIES = [
    ('DDPStrategy', {}),
    ('FSDPStrategy', {}),
    ('FSDPStrategy', {'precision': 'bf16', 'meta_init': True, 'activation_checkpointing': True}),
    ('ColossalAIStrategy', {'stage': 2, 'precision': 'fp32'}),
    ('ColossalAIStrategy', {'stage': 3, 'precision': 'bf16'}),
]


@pytest.mark.parametrize(('kind', 'options'), STRATEGIES)
def test_fast_paths_give_the_numbers_of_the_plain_ones(kind, options):
    if kind == 'ColossalAIStrategy' and importlib.util.find_spec('colossalai') is None:
        pytest.skip('colossalai is not installed')
    tolerance = 1e-5 if options.get('precision', 'fp32') == 'fp32' else 5e-2
    for found in run_distributed(compare_all, 2, kind, options):
        hydra = found[0]
        for facts in found:
            assert facts['logprobs'] <= tolerance and facts['norm'] <= tolerance
        assert hydra['reference'] <= tolerance and hydra['policy'] <= tolerance
        assert hydra['moved'] > 0
