"""The padding-free forward and the joined hydra pass under every strategy that shards or wraps: the numbers of the
plain way."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from optional_packages import needs_colossalai

from chatgpt import strategies
from chatgpt.batching import collate
from chatgpt.nn import GPTActor
from chatgpt.testing.fakes import tiny_config
from chatgpt.testing.processes import run_distributed
from chatgpt.types import Sequence

LENGTHS = [(9, 12), (3, 7), (5, 5), (4, 2), (2, 2), (6, 1)]


def compare(kind: str, options: dict[str, Any], with_hydra: bool) -> dict[str, float]:
    """Largest difference of log-probs and gradients, packed against padded and joined against separate, on this
    rank."""
    with getattr(strategies, kind)(seed=3, **options) as strategy:
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
            if with_hydra:
                both = actor(packed, with_reference=True)
                with strategy.unwrap(actor).reference():
                    apart = actor(packed).logprobs
                off['reference'] = float((both.reference.logprobs - apart).abs().max())
                off['policy'] = float((both.logprobs - one).abs().max())
                assert (both.logprobs - both.reference.logprobs).abs().max() > 0, 'the policy has not moved'
    return off


@pytest.mark.parametrize(
    ('kind', 'options', 'with_hydra'),
    [
        ('DDPStrategy', {}, True),
        ('DDPStrategy', {}, False),
        ('FSDPStrategy', {}, True),
        ('FSDPStrategy', {'precision': 'bf16', 'meta_init': True, 'activation_checkpointing': True}, True),
        pytest.param('ColossalAIStrategy', {'stage': 2, 'precision': 'fp32'}, True, marks=needs_colossalai),
        pytest.param('ColossalAIStrategy', {'stage': 3, 'precision': 'bf16'}, True, marks=needs_colossalai),
    ],
)
def test_fast_paths_give_the_numbers_of_the_plain_ones(kind, options, with_hydra):
    tolerance = 1e-5 if options.get('precision', 'fp32') == 'fp32' else 5e-2
    for off in run_distributed(compare, 2, kind, options, with_hydra):
        assert all(by <= tolerance for by in off.values()), off
