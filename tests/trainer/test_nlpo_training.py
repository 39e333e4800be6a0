"""NLPO in whole runs: the masked policy by hand, its updates, resuming, ranks, refusals."""

from __future__ import annotations

from copy import deepcopy
from functools import partial
from typing import Any

import pytest
import torch
from tiny_runs import PROMPTS, assemble, check_resume, close, fit, ppo, vowels

from chatgpt.nn import AutoActor
from chatgpt.nn.heads import CategoricalHead
from chatgpt.rollout import HFEngine
from chatgpt.strategies import NaiveStrategy
from chatgpt.testing import tiny_causal_lm
from chatgpt.testing.fakes import char_tokenizer, tiny_config
from chatgpt.trainer.callbacks import Callback


def nlpo(strategy: Any = None, **settings: Any) -> Any:
    """Returns a trainer with a scaled head, so that few tokens are likely."""
    given = {'advantage_estimator': 'reinforce++', 'nlpo_top_p': 0.6, 'head_scale': 12.0}
    return ppo(strategy, **given | settings)


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
    fit(trainer, 1)
    assert trainer.log.phases[0]['ppo/first_ratio_error'] < 1e-4  # the policy is the same in sampling and learning
    before = nlpo().actor.model
    inside = 0
    for e in trainer.log.experiences[0]:
        ids = torch.cat([e.prompt_ids, e.response_ids])
        with torch.no_grad():
            logits, masks = before(ids[None]).logits[0].double(), mask(ids[None]).logits[0]
        for t, token in enumerate(e.response_ids.tolist()):
            at = len(e.prompt_ids) - 1 + t
            kept = mask_by_hand(masks[at], 0.6)
            assert token in kept
            want = float(logits[at, token] - logits[at, kept].logsumexp(-1))
            assert float(e.old_logprobs[t]) == pytest.approx(want, abs=1e-4)
            inside += len(kept)
    assert inside < 0.5 * len(trainer.tokenizer) * sum(e.num_actions for e in trainer.log.experiences[0])
    assert not all(torch.equal(a, b) for a, b in zip(policy.parameters(), mask.parameters(), strict=True))


def test_the_mask_policy_is_updated_at_intervals_and_after_a_resume(tmp_path):
    same = []

    class Watch(Callback):
        def on_phase_end(self, trainer: Any, step: int, metrics: Any) -> None:
            now = list(trainer.policy.mask_model.parameters())
            same.append((all(map(torch.equal, now, first)), all(map(torch.equal, now, trainer.actor.parameters()))))

    def make(callbacks: Any = (), **settings: Any) -> Any:
        trainer = nlpo(nlpo_update_interval=2, callbacks=[*callbacks, Watch()], **settings)
        trainer.set_prompts(PROMPTS)
        first[:] = [p.clone() for p in trainer.policy.mask_model.parameters()]
        return trainer

    first: list[Any] = []
    check_resume(make, tmp_path, 1, partial(fit, phases=4))
    assert same[:4] == [(True, False), (False, True), (False, False), (False, True)]


def test_a_resume_of_a_run_that_leaves_frozen_weights_out(tmp_path):
    """The mask policy is without an optimizer and still changes, so a checkpoint holds it."""
    tiny_causal_lm('gpt2').save_pretrained(tmp_path / 'base')

    def make(**settings: Any) -> Any:
        actor = AutoActor(tmp_path / 'base')
        strategy = NaiveStrategy(seed=3, device='cpu')
        given = {'advantage_estimator': 'reinforce++', 'nlpo_top_p': 0.6, 'nlpo_update_interval': 2}
        mask = strategy.prepare(deepcopy(actor))
        trainer = assemble(
            strategy,
            actor,
            None,
            vowels,
            deepcopy(actor),
            tokenizer=char_tokenizer(),
            mask_model=mask,
            **given | settings,
        )
        trainer.left_out = {}
        return trainer

    check_resume(make, tmp_path / 'run', 3, partial(fit, phases=4))


def test_a_shared_critic_of_bins():
    bins = {'bins': 5, 'low': -1.0, 'high': 1.0}
    trainer = nlpo(
        advantage_estimator='gae',
        value_head=CategoricalHead(tiny_config('gpt2').n_embd, **bins),
        critic_loss='categorical',
        critic_loss_settings=bins,
    )
    assert fit(trainer, 1).log.phases[0]['ppo/value_loss'] > 0


def test_a_mask_of_all_tokens_has_no_effect():
    often, seldom = (fit(nlpo(nlpo_top_p=1.0, nlpo_update_interval=every), 2) for every in (1, 7))
    close(often.log.phases, seldom.log.phases)


def test_unsupported_settings_of_nlpo_are_refused():
    for settings, sentence in (
        (
            {'nlpo_top_p': None, 'mask_model': nlpo().actor},
            'is of a policy that is made of two models: give nlpo_top_p',
        ),
        ({'nlpo_top_p': 1.5}, r'nlpo_top_p=1.5 must lie in \(0, 1\]'),
        ({'strategy': NaiveStrategy(precision='bf16', device='cpu')}, 'use precision=fp32'),
        ({'engine': HFEngine()}, 'HFEngine would ignore the mask'),
    ):
        with pytest.raises(ValueError, match=sentence):
            nlpo(**settings)
    with pytest.raises(ValueError, match='generate and step do not know: use fit'):
        nlpo().generate([torch.tensor([3, 4])])
