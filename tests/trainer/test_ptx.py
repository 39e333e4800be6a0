"""PPO-ptx: where PPO itself has nothing to say, one step moves the actor along ptx_coef · the mean next-token loss, and
nothing else."""

from __future__ import annotations

from copy import deepcopy

import torch

from chatgpt.batching import cut_by_tokens
from chatgpt.nn import GPTActor
from chatgpt.strategies import NaiveStrategy
from chatgpt.testing.fakes import tiny_config
from chatgpt.trainer import PPOTrainer
from chatgpt.trainer.callbacks import ProgressBar
from chatgpt.types import Sequence

VOCAB, COEF, BUDGET = 16, 0.5, 12
Gradient = dict[str, torch.Tensor]


def texts() -> list[Sequence]:
    """Of several lengths; of every one a token does not count."""
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
    """coef · gradient of the sum over `groups` of each one's mean next-token loss, token by token in float64."""
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
    """Relative, over all parameters."""
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
