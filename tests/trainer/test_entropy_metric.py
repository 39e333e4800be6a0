"""PPO's entropy where its coefficient is 0: the same metric and the same gradient to the bit, without a graph."""

from __future__ import annotations

import copy

import pytest
import torch

from chatgpt.nn import GPTActor
from chatgpt.nn.nlpo import masked_output
from chatgpt.strategies import NaiveStrategy
from chatgpt.testing.fakes import tiny_config
from chatgpt.trainer import PPOConfig
from chatgpt.trainer.losses import ActorLoss, collate_experience, experience_totals
from chatgpt.trainer.policy import policy_for
from chatgpt.types import Experience


def experience(index: int) -> Experience:
    generator = torch.Generator().manual_seed(index)
    n = 3 + index

    def rand() -> torch.Tensor:
        return torch.randn(n, generator=generator)

    old = -2.5 + 0.1 * rand()
    return Experience(
        index=index,
        group=index,
        prompt_ids=torch.tensor([3, 4]),
        response_ids=torch.randint(3, 16, (n,), generator=generator),
        response_mask=torch.ones(n, dtype=torch.bool),
        score=0.0,
        logprobs=old,
        filtered_logprobs=old,
        edge_distances=torch.ones(n),
        finish_reason='eos',
        old_logprobs=old,
        ref_logprobs=old,
        values=rand(),
        kl=rand(),
        rewards=rand(),
        advantages=rand(),
        returns=rand(),
    )


def gradients(actor, config, forward=None):
    """Metrics and gradients of a batch, with the policy that the trainer makes or another forward."""
    policy = policy_for(NaiveStrategy(device='cpu'), actor, config, 0.9, None, None)
    records = [experience(i) for i in range(4)]
    batch = collate_experience(records, experience_totals(records, config, 8))
    outputs = []

    def watched(model, given):
        outputs.append((forward or policy.forward)(model, given))
        return outputs[-1]

    actor.zero_grad()
    total, metrics = ActorLoss(config, watched)(actor, batch)
    total.backward()
    return (
        outputs[0].entropy,
        float(total.detach()),
        metrics['entropy'],
        {n: p.grad.clone() for n, p in actor.named_parameters()},
    )


def test_a_coefficient_of_0_needs_no_graph_and_changes_no_bit():
    torch.manual_seed(0)
    actor = GPTActor(config=tiny_config('gpt2', vocab_size=16)).eval()
    entropy, total, metric, grads = gradients(actor, PPOConfig())
    with_graph = gradients(actor, PPOConfig(), lambda m, b: m(b, temperature=0.9, with_entropy=True))
    assert not entropy.requires_grad and with_graph[0].requires_grad
    assert torch.equal(entropy, with_graph[0]) and total == with_graph[1]
    assert float(metric.total) == float(with_graph[2].total.detach()) > 0
    for name, grad in grads.items():
        assert torch.equal(grad, with_graph[3][name]), name


def test_a_bonus_is_learned_from():
    torch.manual_seed(0)
    actor = GPTActor(config=tiny_config('gpt2', vocab_size=16)).eval()
    entropy, _, _, grads = gradients(actor, PPOConfig(entropy_coef=0.1))
    assert entropy.requires_grad
    none = gradients(actor, PPOConfig())[3]
    assert any(not torch.allclose(grads[name], none[name]) for name in grads)


@pytest.mark.parametrize('with_entropy', [True, 'detached'])
def test_nlpos_masked_policy(with_entropy):
    actor = GPTActor(config=tiny_config('gpt2', vocab_size=16)).eval()
    records = [experience(i) for i in range(2)]
    batch = collate_experience(records, experience_totals(records, PPOConfig(), 8))
    options = {'top_p': 0.9, 'temperature': 0.9}
    out = masked_output(actor, copy.deepcopy(actor), batch, **options, with_entropy=with_entropy)
    assert out.entropy.requires_grad is (with_entropy is True) and out.logprobs.requires_grad
    want = masked_output(actor, copy.deepcopy(actor), batch, **options).entropy
    assert torch.equal(out.entropy, want)
