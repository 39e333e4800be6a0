"""NLPO in whole runs: the masked policy by hand, its updates, resuming, ranks, what is refused."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
from online_runs import PROMPTS, QUERIES, RESPONSES, ExperienceLog, vowels

from chatgpt.nn import GPTActor
from chatgpt.rollout import HFEngine
from chatgpt.strategies import DDPStrategy, NaiveStrategy
from chatgpt.testing.fakes import char_tokenizer, tiny_config
from chatgpt.testing.processes import run_distributed
from chatgpt.trainer import PPOTrainer
from chatgpt.trainer.callbacks import ProgressBar, SaveCheckpoint


def nlpo(strategy: Any = None, more: Any = (), **kw: Any) -> Any:
    strategy = strategy or NaiveStrategy(seed=3, device='cpu')
    torch.manual_seed(3)
    actor = GPTActor(config=tiny_config('gpt2', positions=48))
    with torch.no_grad():
        actor.model.lm_head.weight.mul_(12.0)  # so that the set of likely tokens is small
    mask, initial = deepcopy(actor), deepcopy(actor)
    actor, optim = strategy.prepare((actor, torch.optim.AdamW(actor.parameters(), lr=1e-3, eps=1e-5)))
    log = ExperienceLog()
    sizes = {'experience_batch_size': 4, 'train_batch_size': 4, 'max_new_tokens': 6}
    settings = sizes | {'advantage_estimator': 'reinforce++', 'nlpo_top_p': 0.6}
    trainer = PPOTrainer(
        strategy,
        actor,
        None,
        vowels,
        strategy.prepare(initial),
        optim,
        tokenizer=char_tokenizer(),
        callbacks=[log, *more],
        mask_model=strategy.prepare(mask),
        **(settings | kw),
    )
    trainer.log = log
    return trainer


def test_nlpo_is_not_driven_by_hand():
    with pytest.raises(ValueError, match='generate and step do not know: use fit'):
        nlpo().generate(QUERIES)
    with pytest.raises(ValueError, match='generate and step do not know: use fit'):
        nlpo().step(QUERIES, RESPONSES, [0.0] * 4)


def mask_by_hand(logits: torch.Tensor, top_p: float) -> list[int]:
    probs = logits.double().softmax(-1).tolist()
    kept, mass = [], 0.0
    for token in sorted(range(len(probs)), key=lambda v: -probs[v]):
        kept.append(token)
        mass += probs[token]
        if mass >= top_p:
            break
    return kept


def test_nlpo_samples_and_learns_the_masked_policy():
    trainer = nlpo(nlpo_update_interval=100, max_epochs=1)
    policy, mask = (trainer.strategy.unwrap(m).model for m in (trainer.actor, trainer.policy.mask_model))
    trainer.fit(PROMPTS, 1, 1, 1)
    assert trainer.log.phases[0]['ppo/first_ratio_error'] < 1e-4  # what was drawn is what is learned
    before = nlpo()
    weights = trainer.strategy.unwrap(before.actor).model
    inside = 0
    for e in trainer.log.experiences[0]:
        ids = torch.cat([e.prompt_ids, e.response_ids])
        with torch.no_grad():
            logits, masks = weights(ids[None]).logits[0].double(), mask(ids[None]).logits[0]
        for t, token in enumerate(e.response_ids.tolist()):
            at = len(e.prompt_ids) - 1 + t
            kept = mask_by_hand(masks[at], 0.6)
            assert token in kept
            want = float(logits[at, token] - logits[at, kept].logsumexp(-1))
            assert float(e.old_logprobs[t]) == pytest.approx(want, abs=1e-4)
            inside += len(kept)
    assert inside < 0.5 * len(trainer.tokenizer) * sum(e.num_actions for e in trainer.log.experiences[0])
    assert not all(torch.equal(a, b) for a, b in zip(policy.parameters(), mask.parameters(), strict=True))


def test_nlpo_takes_over_every_so_many_phases():
    trainer = nlpo(nlpo_update_interval=2)
    first = [p.clone() for p in trainer.policy.mask_model.parameters()]
    same = []

    class Watch(ProgressBar):
        def on_phase_end(self, trainer: Any, step: int, metrics: Any) -> None:
            now = list(trainer.policy.mask_model.parameters())
            same.append((all(map(torch.equal, now, first)), all(map(torch.equal, now, trainer.actor.parameters()))))

    trainer.callbacks.callbacks.append(Watch(enabled=False))
    trainer.fit(PROMPTS, 1, 3, 1)
    assert same == [(True, False), (False, True), (False, False)]


def test_nlpo_resumes_to_the_bit(tmp_path):
    whole = nlpo(run_dir=tmp_path, more=[SaveCheckpoint(interval=1, keep_last=9)], nlpo_update_interval=2)
    whole.fit(PROMPTS, 1, 4, 1)
    rest = nlpo(nlpo_update_interval=2)
    rest.set_prompts(PROMPTS)
    assert rest.load_checkpoint(tmp_path / 'checkpoints' / 'step-00000001')
    rest.fit(PROMPTS, 1, 4, 1)
    assert rest.log.phases == whole.log.phases[1:]


def test_nlpo_with_everything_likely_is_the_plain_policy():
    masked, plain = nlpo(nlpo_top_p=1.0), None
    masked.fit(PROMPTS, 1, 2, 1)
    plain = nlpo(nlpo_top_p=1.0, nlpo_update_interval=7)
    plain.fit(PROMPTS, 1, 2, 1)
    for a, b in zip(masked.log.phases, plain.log.phases, strict=True):  # whatever the mask policy is
        assert all(a[k] == pytest.approx(b[k], rel=1e-4, abs=1e-5) for k in b)


def two_nlpo() -> list[dict[str, float]]:
    with DDPStrategy(seed=3, device='cpu') as strategy:
        trainer = nlpo(strategy)
        trainer.fit(PROMPTS, 1, 2, 1)
        return trainer.log.phases


def test_nlpo_on_two_ranks():
    alone = nlpo()
    alone.fit(PROMPTS, 1, 2, 1)
    for phases in run_distributed(two_nlpo, 2):
        for got, want in zip(phases, alone.log.phases, strict=True):
            assert all(got[k] == pytest.approx(want[k], rel=2e-3, abs=2e-5) for k in want)


@pytest.mark.parametrize(
    ('settings', 'sentence'),
    [
        ({'nlpo_top_p': None}, 'mask_model is of a policy that is made of two models: give nlpo_top_p'),
        ({'nlpo_top_p': 1.5}, r'nlpo_top_p=1.5 must lie in \(0, 1\]'),
        ({'recompute_logprobs': True}, 'leave recompute_logprobs out'),
        ({'strategy': NaiveStrategy(precision='bf16', device='cpu')}, 'use precision=fp32'),
        ({'engine': HFEngine()}, 'HFEngine would ignore the mask'),
        ({'tis_cap': 2.0}, 'leave tis_cap out'),
    ],
)
def test_what_nlpo_needs(settings, sentence):
    with pytest.raises(ValueError, match=sentence):
        nlpo(**settings)
