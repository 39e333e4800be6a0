"""PPOTrainer's losses and their metrics against slow loops in float64; PPO-ptx: with advantages of 0, one step moves
the actor along ptx_coef · the gradient of the mean next-token loss."""

from __future__ import annotations

import copy
import math
from copy import deepcopy
from typing import Any

import pytest
import torch
from fake_trainer import experience

from chatgpt.batching import collate, cut_by_tokens
from chatgpt.nn import GPTActor
from chatgpt.nn.nlpo import masked_output
from chatgpt.strategies import NaiveStrategy
from chatgpt.testing.fakes import tiny_config
from chatgpt.trainer import PPOConfig, PPOTrainer
from chatgpt.trainer.callbacks import ProgressBar
from chatgpt.trainer.losses import ActorLoss, SharedLoss, ValueLoss, collate_experience, experience_totals
from chatgpt.trainer.metrics import BatchStats, rollout_metrics
from chatgpt.trainer.policy import Policy, policy_for
from chatgpt.types import Episode, Experience, Sequence

MAX_NEW = 7


def actor_loss(actor, config, kl_coef=0.0):
    strategy = NaiveStrategy(device='cpu')
    return ActorLoss(config, Policy(strategy, actor, temperature=1.0).forward, kl_coef)


@pytest.fixture
def actor() -> GPTActor:
    torch.manual_seed(3)
    return GPTActor(config=tiny_config('gpt2', vocab_size=16, positions=32)).eval()


def experiences(count: int = 6, seed: int = 1) -> list[Experience]:
    generator = torch.Generator().manual_seed(seed)
    return [record(i, generator) for i in range(count)]


def record(index: int, generator: torch.Generator) -> Experience:
    n = 2 + index % 4

    def rand() -> torch.Tensor:
        return torch.randn(n, generator=generator)

    old = -3.2 + 0.2 * rand()
    mask = torch.ones(n, dtype=torch.bool)
    mask[0] = index % 3 != 1  # a token of another speaker
    ids = torch.randint(3, 16, (n,), generator=generator).tolist()
    numbers = {'old_logprobs': old, 'logprobs': old + 0.5 * rand(), 'ref_logprobs': old + 0.3 * rand()}
    numbers |= {name: rand() for name in ('values', 'kl', 'rewards', 'advantages', 'returns')}
    numbers = {name: torch.where(mask, x, math.nan) for name, x in numbers.items()}  # no loss may read these
    successes = {4: True, 5: False}  # of an environment; it decides, and not the score
    numbers['episode'] = Episode(turns=(), end='terminated', success=successes.get(index)) if index > 2 else None
    score = [0.0, 1.0, 0.99, 2.0, 0.0, 1.0][index % 6]
    return experience(index, [3, 4 + index], ids, score, group=index // 2, response_mask=mask, **numbers)


def by_hand(
    records: list[Experience], logprobs: list[list[float]], entropies: list[list[float]], c: PPOConfig, kl_coef: float
) -> float:
    """Returns the loss of a train batch, token by token."""
    mode, total, bonus, tokens, sequences = c.aggregation, 0.0, 0.0, 0, 0
    high = c.eps_clip if c.eps_clip_high is None else c.eps_clip_high
    for r, logp, entropy in zip(records, logprobs, entropies, strict=True):
        counted = [t for t in range(len(logp)) if r.response_mask[t]]
        if not counted:
            continue
        old, adv, ref, engine = (
            x.double().tolist() for x in (r.old_logprobs, r.advantages, r.ref_logprobs, r.logprobs)
        )
        mean_ratio = math.exp(sum(logp[t] - old[t] for t in counted) / len(counted))
        of_sequence = 0.0
        for t in counted:
            ratio = mean_ratio if c.policy_loss in ('gspo', 'gspo_token') else math.exp(logp[t] - old[t])
            if c.policy_loss == 'reinforce':
                loss = -adv[t] * logp[t]
            elif c.policy_loss == 'cispo':
                loss = -adv[t] * max(min(ratio, 1 + high), 1 - c.of_loss.eps_low) * logp[t]
            else:
                clipped = min(max(ratio, 1 - c.eps_clip), 1 + high)
                loss = max(-adv[t] * ratio, -adv[t] * clipped)
                if c.dual_clip is not None and adv[t] < 0:
                    loss = min(loss, -c.dual_clip * adv[t])
            if c.tis_cap is not None:
                over = counted if c.off_policy.startswith('sequence') else [t]
                weight = math.exp(sum(old[k] - engine[k] for k in over))
                if c.off_policy.endswith('mask'):
                    loss *= weight if c.tis_floor <= weight <= c.tis_cap else 0.0
                else:
                    loss *= min(max(weight, c.tis_floor), c.tis_cap)
            if c.kl_in == 'loss':
                d = logp[t] - ref[t]
                weight = math.exp(logp[t] - old[t]) if c.kl_importance else 1.0
                loss += weight * kl_coef * {'k1': d, 'k2': d * d / 2, 'k3': math.exp(-d) + d - 1}[c.kl_loss_kind]
            of_sequence += loss
            bonus += entropy[t]
        tokens, sequences = tokens + len(counted), sequences + 1
        total += of_sequence / len(counted) if mode == 'sequence' else of_sequence
    total /= {'token': tokens, 'sequence': sequences, 'sequence_sum': sequences * MAX_NEW}[mode]
    right = [-logprobs[i][t] for i in CORRECT for t in range(len(logprobs[i])) if records[i].response_mask[t]]
    return total - c.entropy_coef * bonus / tokens + c.positive_coef * sum(right) / len(right)


CORRECT = (1, 3, 4)
"""positions of `experiences` with success or a score of at least 1"""


CHOICES = [
    {},
    {'eps_clip_high': 0.28},
    {'dual_clip': 1.5},
    {'loss_aggregation': 'sequence'},
    {'loss_aggregation': 'sequence_sum'},
    {'policy_loss': 'gspo', 'eps_clip': 0.01, 'eps_clip_high': 0.02},
    {'policy_loss': 'reinforce'},
    {'tis_cap': 1.2},
    {'tis_cap': 1.4, 'tis_floor': 0.8, 'off_policy': 'token_mask'},
    {'tis_cap': 1.3, 'off_policy': 'sequence_truncate'},
    {'tis_cap': 3.0, 'tis_floor': 0.6, 'off_policy': 'sequence_mask', 'loss_aggregation': 'sequence'},
    {'policy_loss': 'gspo_token', 'eps_clip': 0.02, 'tis_cap': 1.1, 'tis_floor': 0.7},
    {'policy_loss': 'cispo'},
    {'policy_loss': 'cispo', 'loss_settings': {'eps_low': 0.05}},
    {'policy_loss': 'cispo', 'eps_clip_high': 0.02, 'loss_aggregation': 'sequence', 'tis_cap': 0.9},
    {'kl_in': 'loss'},
    {'kl_in': 'loss', 'kl_importance': True},
    {'kl_in': 'loss', 'kl_loss_kind': 'k1'},
    {'kl_in': 'loss', 'kl_loss_kind': 'k2', 'loss_aggregation': 'sequence'},
    {'positive_coef': 0.5},
    {'positive_coef': 0.1, 'loss_aggregation': 'sequence', 'entropy_coef': 0.2},
    {'entropy_coef': 0.3, 'loss_aggregation': 'sequence', 'tis_cap': 0.9, 'kl_in': 'loss', 'dual_clip': 2.0},
]


def clipped(choices: dict[str, Any]) -> dict[str, Any]:
    return choices if choices.get('policy_loss') == 'reinforce' else {'eps_clip': 0.1} | choices


@pytest.mark.parametrize('choices', CHOICES, ids=lambda c: ','.join(map(str, c.values())) or 'default')
def test_the_loss_by_hand(choices, actor):
    records = experiences()
    config = PPOConfig(**clipped(choices))
    config.validate(1)
    loss = actor_loss(actor, config, kl_coef=0.7)
    totals = experience_totals(records, config, MAX_NEW)
    with torch.no_grad():
        outs = [actor(collate([r]), with_entropy=True) for r in records]
    logprobs, entropies = [o.logprobs.double().tolist() for o in outs], [o.entropy.double().tolist() for o in outs]
    want = by_hand(records, logprobs, entropies, config, 0.7)
    for cut in ([6], [2, 1, 3]):  # micro-batches have no effect
        total, start = 0.0, 0
        for size in cut:
            part = records[start : start + size]
            share = loss(actor, collate_experience(part, totals))[0]
            share.backward()
            total, start = total + share.item(), start + size
        assert total == pytest.approx(want, rel=2e-4, abs=1e-6)
    assert all(torch.isfinite(p.grad).all() for p in actor.parameters())
    dummy, _ = loss(actor, collate_experience([], totals))
    assert dummy.item() == 0.0
    # negative control: other settings give other losses
    others = [PPOConfig(**clipped(other)) for other in CHOICES if other != choices]
    wrong = [by_hand(records, logprobs, entropies, other, 0.7) for other in others]
    assert sum(abs(w - want) > 1e-5 for w in wrong) >= len(wrong) - 1


def test_the_value_loss_by_hand():
    records, config = experiences(), PPOConfig(value_clip=0.2)
    predicted = torch.cat([torch.linspace(-1, 1, r.num_actions) for r in records]).requires_grad_()
    batch = collate_experience(records, experience_totals(records, config, MAX_NEW))
    loss, metrics = ValueLoss(config).of(predicted, batch)
    loss.backward()
    assert torch.isfinite(predicted.grad).all()
    squares, far = [], []
    for r in records:
        for t, v in enumerate(torch.linspace(-1, 1, r.num_actions).tolist()):
            if r.response_mask[t]:
                old, target = float(r.values[t]), float(r.returns[t])
                clipped = min(max(v, old - 0.2), old + 0.2)
                squares.append(max((v - target) ** 2, (clipped - target) ** 2))
                far.append(abs(v - old) > 0.2)
    assert loss.item() == pytest.approx(0.5 * sum(squares) / len(squares), rel=1e-5)
    seen = metrics['value_clip_fraction']
    assert 0 < sum(far) < len(far) and float(seen.total / seen.weight) == pytest.approx(sum(far) / len(far))


def test_the_loss_of_a_shared_trunk_is_the_policys_and_its_share_of_the_values(actor):
    actor.value_head = torch.nn.Linear(32, 1)
    records, config = experiences(), PPOConfig(value_coef=0.3)
    batch = collate_experience(records, experience_totals(records, config, MAX_NEW))
    policy, value = actor_loss(actor, config), ValueLoss(config)
    total, metrics = SharedLoss(policy, value)(actor, batch)
    apart = policy(actor, batch), value.of(actor(batch).values, batch)
    assert total.item() == pytest.approx(apart[0][0].item() + 0.3 * apart[1][0].item(), rel=1e-5)
    assert metrics.keys() == apart[0][1].keys() | apart[1][1].keys()


def test_each_papers_aggregation():
    for estimator, loss, want in (
        ('gae', 'ppo', 'token'),
        ('grpo', 'ppo', 'sequence'),
        ('dr_grpo', 'ppo', 'sequence_sum'),
        ('rloo', 'ppo', 'token'),
        ('reinforce++', 'ppo', 'token'),
        ('grpo', 'gspo', 'sequence'),
        ('grpo', 'cispo', 'token'),
        ('gdpo', 'ppo', 'sequence'),
    ):
        config = PPOConfig(advantage_estimator=estimator, policy_loss=loss, num_samples_per_prompt=2)
        assert config.aggregation == want


def test_filtered_responses_do_not_lower_the_kl():
    records = experiences(4, seed=2)
    alone = rollout_metrics(records[:2], 0.1)['rollout/kl_mean']
    for r in records[2:]:
        r.response_mask = torch.zeros_like(r.response_mask)
    assert rollout_metrics(records, 0.1)['rollout/kl_mean'] == alone
    total = sum(float((r.old_logprobs - r.ref_logprobs)[r.response_mask].sum()) for r in records[:2])
    assert alone == pytest.approx(total / 2, abs=1e-6)
    assert alone != pytest.approx(total / 4, abs=1e-6)


def test_clip_fractions_of_cispo_and_gspo(actor):
    """CISPO counts a weight as clipped only above; GSPO uses the ratio of the sequence."""
    records, found = experiences(), {}
    for name in ('cispo', 'ppo', 'gspo'):
        config, stats = PPOConfig(policy_loss=name, eps_clip=0.1), BatchStats()
        batch = collate_experience(records, experience_totals(records, config, MAX_NEW))
        stats.add(actor_loss(actor, config)(actor, batch)[1])
        found[name] = stats.reduced(NaiveStrategy(device='cpu'))
    with torch.no_grad():
        diffs = [(actor(collate([r])).logprobs - r.old_logprobs).double()[r.response_mask] for r in records]
    ratios = torch.cat(diffs).exp()
    clipped = {name: metrics['clip_fraction'] for name, metrics in found.items()}
    assert clipped['cispo'] == pytest.approx(float((ratios > 1.1).double().mean()))
    assert clipped['ppo'] == pytest.approx(float(((ratios > 1.1) | (ratios < 0.9)).double().mean())) != clipped['cispo']
    whole = torch.cat([diff.mean().exp().expand(len(diff)) for diff in diffs])
    want = {'ratio_mean': whole.mean(), 'ratio_max': whole.max(), 'ratio_min': whole.min()}
    want['clip_fraction'] = ((whole - 1).abs() > 0.1).double().mean()
    for key, value in want.items():
        assert found['gspo'][key] == pytest.approx(float(value), rel=1e-4)
    assert found['ppo']['ratio_max'] != pytest.approx(float(want['ratio_max']), rel=1e-3)


def learned(actor, config, forward=None):
    """Returns entropy, loss, its metric and gradients, with the trainer's policy or another forward."""
    policy = policy_for(NaiveStrategy(device='cpu'), actor, config, 0.9, None, None)
    records, outputs = experiences(4), []

    def watched(model, given):
        outputs.append((forward or policy.forward)(model, given))
        return outputs[-1]

    actor.zero_grad()
    total, metrics = ActorLoss(config, watched)(
        actor, collate_experience(records, experience_totals(records, config, 8))
    )
    total.backward()
    gradients = torch.cat([p.grad.flatten() for p in actor.parameters()])
    return outputs[0].entropy, float(total.detach()), metrics['entropy'].total, gradients


def test_entropy_needs_no_graph_where_its_coefficient_is_0_and_changes_no_bit(actor):
    entropy, total, metric, grads = learned(actor, PPOConfig())
    graph = learned(actor, PPOConfig(), lambda m, b: m(b, temperature=0.9, with_entropy=True))
    assert not entropy.requires_grad and graph[0].requires_grad
    assert torch.equal(entropy, graph[0]) and total == graph[1]
    assert float(metric) == float(graph[2].detach()) > 0
    assert torch.equal(grads, graph[3])
    bonus = learned(actor, PPOConfig(entropy_coef=0.1))
    assert bonus[0].requires_grad and not torch.allclose(bonus[3], grads)


def test_entropy_of_nlpos_masked_policy(actor):
    records = experiences(2)
    batch = collate_experience(records, experience_totals(records, PPOConfig(), 8))
    options = {'top_p': 0.9, 'temperature': 0.9}
    want = masked_output(actor, copy.deepcopy(actor), batch, **options).entropy
    for with_entropy in (True, 'detached'):
        out = masked_output(actor, copy.deepcopy(actor), batch, **options, with_entropy=with_entropy)
        assert out.entropy.requires_grad is (with_entropy is True) and out.logprobs.requires_grad
        assert torch.equal(out.entropy, want)


VOCAB, COEF, BUDGET = 16, 0.5, 12
Gradient = dict[str, torch.Tensor]


def texts() -> list[Sequence]:
    generator = torch.Generator().manual_seed(3)
    found = []
    for length in (2, 3, 5, 8, 9, 4):
        ids = torch.randint(3, VOCAB, (length + 1,), generator=generator)
        mask = torch.ones(length, dtype=torch.bool)
        mask[length // 2] = False
        found.append(Sequence(prompt_ids=ids[:1], response_ids=ids[1:], response_mask=mask))
    return found


def stepped(coef: float) -> tuple[torch.nn.Module, Gradient, list[Sequence]]:
    """The actor before one SGD step of length 1 on groups of equal scores, what it moved by (negated), and the text it
    saw."""
    torch.manual_seed(0)
    strategy = NaiveStrategy(seed=0)
    actor = GPTActor(config=tiny_config('gpt2', vocab_size=VOCAB, hidden=16, positions=32))
    before = deepcopy(actor)
    model, optimizer = strategy.prepare((actor, torch.optim.SGD(actor.parameters(), lr=1.0)))
    sizes = {'train_batch_size': 6, 'experience_batch_size': 6, 'max_epochs': 1, 'max_new_tokens': 4}
    sizes |= {'max_tokens_per_batch': BUDGET, 'max_grad_norm': None, 'kl_coef': 0.0, 'eos_token_id': 2}
    ptx = {'ptx_coef': coef, 'pretrain_data': texts() if coef else None, 'callbacks': [ProgressBar(enabled=False)]}
    groups = {'advantage_estimator': 'rloo', 'num_samples_per_prompt': 2}
    trainer = PPOTrainer(strategy, model, None, None, deepcopy(before), optimizer, **groups, **sizes, **ptx)
    seen = list(trainer.work((texts() * 6)[:6], [])[1].records) if coef else []
    generator = torch.Generator().manual_seed(5)
    queries = [q for q in torch.randint(3, VOCAB, (3, 2), generator=generator) for _ in range(2)]
    responses = list(torch.randint(3, VOCAB, (6, 3), generator=generator))
    trainer.step(queries, responses, torch.ones(6))
    after = dict(actor.named_parameters())
    return before, {n: (p - after[n]).detach().double() for n, p in before.named_parameters()}, seen


def gradient_of(actor: torch.nn.Module, groups: list[list[Sequence]], coef: float) -> Gradient:
    """Returns coef · the gradient of the sum over `groups` of their mean next-token losses, token by token in
    float64."""
    actor = deepcopy(actor).double()
    total = torch.zeros((), dtype=torch.float64)
    for group in groups:
        losses = []
        for text in group:
            ids = torch.cat([text.prompt_ids, text.response_ids])
            for t, counts in enumerate(text.response_mask.tolist()):
                if counts:
                    position = len(text.prompt_ids) + t
                    logits = actor.model(input_ids=ids[None, :position]).logits[0, -1]
                    losses.append(logits.exp().sum().log() - logits[ids[position]])
        total = total + coef * sum(losses) / len(losses)
    total.backward()
    return {n: p.grad for n, p in actor.named_parameters() if p.grad is not None}


def distance(one: Gradient, other: Gradient) -> float:
    """Returns the relative distance over all parameters."""
    difference = sum(((one[n] - other[n]) ** 2).sum() for n in one)
    return float((difference / sum((g**2).sum() for g in other.values())) ** 0.5)


def test_the_step_is_the_gradient_of_the_mean_next_token_loss():
    before, moved, seen = stepped(COEF)
    assert distance(moved, gradient_of(before, [seen], COEF)) < 1e-5
    cuts = cut_by_tokens([s.num_tokens for s in seen], BUDGET)
    assert len(cuts) > 1
    assert distance(moved, gradient_of(before, [seen], 2 * COEF)) > 0.4
    own = gradient_of(before, [[seen[i] for i in cut] for cut in cuts], COEF)
    assert distance(moved, own) > 0.1  # each micro-batch with a divisor of its own
    _, nothing, _ = stepped(0.0)
    assert all(float(change.abs().max()) < 1e-6 for change in nothing.values())
