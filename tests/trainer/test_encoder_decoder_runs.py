"""Every method on a tiny T5 or BART: the first ratio is 1 and the first KL 0, two phases run, and the losses are those
of log-probs by transformers."""

from __future__ import annotations

import math
from copy import deepcopy
from typing import Any

import pytest
import torch
from tiny_runs import Log, assemble, trained, vowels

from chatgpt.batching import collate
from chatgpt.data import load_demonstrations, load_labelled, load_preferences
from chatgpt.data.formats import note_model
from chatgpt.launch.methods import METHODS
from chatgpt.nn import Actor, Critic, ILQLModel, RewardModel
from chatgpt.nn.loading import trunk_of
from chatgpt.rollout import Call, HFEngine, LocalEngine, SamplingParams
from chatgpt.strategies import NaiveStrategy
from chatgpt.testing import encoder_decoder_tokenizer, tiny_causal_lm
from chatgpt.trainer import SFTTrainer
from chatgpt.trainer.objectives.ilql import BetaEvaluation
from chatgpt.trainer.prompt_evaluation import PromptEvaluation
from chatgpt.types import Prompt

REVIEWS = ['this film is', 'i saw it and', 'what a', 'the actors were', 'no one', 'at first i']
SUMMARIES = [
    {'prompt': f'summarize: {text} tl;dr:', 'response': text.split()[0]}
    for text in ('the cat sat', 'a dog ran', 'rain fell all day', 'we ate cake')
]


def tokenizer_of(family: str) -> Any:
    tokenizer = encoder_decoder_tokenizer(family)
    note_model(tokenizer, tiny_causal_lm(family).config)
    return tokenizer


def online(family: str, actor: Any, *, critic: bool, reference: bool, reward: Any = vowels, **settings: Any) -> Any:
    """Returns a trainer after two phases on review prefixes; the trainer tokenizes them."""
    initial = Actor(deepcopy(actor.model)) if reference else None
    judge = Critic(trunk_of(tiny_causal_lm(family))) if critic else None
    sizes = {'experience_batch_size': 6, 'train_batch_size': 12, 'tokenizer': encoder_decoder_tokenizer(family)}
    trainer = assemble(NaiveStrategy(seed=3), actor, judge, reward, initial, **sizes | settings)
    trainer.fit(REVIEWS, 1, 2, 1)
    first, second = trainer.log.phases
    assert first['ppo/first_ratio_error'] < 1e-5 and second['ppo/first_ratio_error'] < 1e-5
    assert first.get('rollout/rescore_error', 0.0) < 1e-5
    if reference:
        assert abs(first['rollout/kl_mean']) < 1e-5 * 6
        assert abs(second['rollout/kl_mean']) > 1e-6  # the policy differs from the reference
    assert all(math.isfinite(value) for phase in trainer.log.phases for value in phase.values())
    return trainer


def label_loss(model: Any, prompt_ids: torch.Tensor, response_ids: torch.Tensor) -> float:
    """Mean −log π of a response's tokens, computed by transformers from labels."""
    with torch.no_grad():
        return model(input_ids=prompt_ids[None], labels=response_ids[None]).loss.item()


ONLINE = {'ppo': 'bart', 'dapo': 't5', 'dr_grpo': 'bart', 'gspo': 't5', 'cispo': 'bart', 'rloo': 't5'}
ONLINE |= {'reinforce++': 'bart', 'reinforce++_baseline': 't5', 'a2c': 'flan-t5'}


@pytest.mark.parametrize('method', ONLINE)
def test_every_online_method(method):
    family, settings = ONLINE[method], dict(METHODS[method].settings)
    if 'num_samples_per_prompt' in settings:
        settings['num_samples_per_prompt'] = 2
    compares, start = settings.get('kl_coef', 0.1) > 0, tiny_causal_lm(family)
    actor = Actor(deepcopy(start))
    trainer = online(family, actor, critic=method in ('ppo', 'a2c'), reference=compares, **settings | {'max_epochs': 1})
    for experience in trainer.log.experiences[0]:
        assert experience.prompt_ids[-1] == 2 and experience.prompt_text in REVIEWS
        mean = -label_loss(start, experience.prompt_ids, experience.response_ids)
        assert experience.logprobs.mean().item() == pytest.approx(mean, rel=1e-4)
        if compares:
            torch.testing.assert_close(experience.ref_logprobs, experience.logprobs, rtol=1e-4, atol=1e-5)
    assert any(not torch.equal(p, q) for p, q in zip(actor.model.parameters(), start.parameters(), strict=True))


def offline(method: str, family: str, data: Any, model: Any, **settings: Any) -> tuple[Any, list[float]]:
    """Returns the trainer after two steps, and its losses."""
    strategy, log, tokenizer = NaiveStrategy(seed=1), Log(), tokenizer_of(family)
    if settings.pop('compares', False):
        settings['initial_model'] = strategy.prepare(deepcopy(model))
    model, optimizer = trained(strategy, model, lr=1e-2)
    sizes = {'max_epochs': 2, 'train_batch_size': 2 * len(SUMMARIES), 'log_interval': 1, 'shuffle': False}
    given = sizes | {'callbacks': [log], 'tokenizer': tokenizer} | settings
    trainer = METHODS[method].part('trainer')(strategy, model, optimizer, data, **given)
    trainer.fit()
    (name,) = {name for name in log.phases[0] if name.endswith('/loss')}
    return trainer, [phase[name] for phase in log.phases]


@pytest.mark.parametrize('family', ['t5', 'bart'])
def test_sft_has_the_loss_of_transformers(family):
    tokenizer, model = tokenizer_of(family), tiny_causal_lm(family, seed=5)
    data, _ = load_demonstrations(SUMMARIES, tokenizer)
    given = tokenizer([r['prompt'] for r in SUMMARIES], padding=True, return_tensors='pt')
    labels = tokenizer(text_target=[r['response'] for r in SUMMARIES], padding=True, return_tensors='pt')['input_ids']
    labels = labels.masked_fill(labels == tokenizer.pad_token_id, -100)
    with torch.no_grad():
        wanted = model(input_ids=given['input_ids'], attention_mask=given['attention_mask'], labels=labels).loss
    _, (first, second) = offline('sft', family, data, Actor(model))
    assert first == pytest.approx(wanted.item(), rel=1e-5) and second < first


PAIRS = [{'prompt': r['prompt'], 'chosen': r['response'], 'rejected': 'x yz'} for r in SUMMARIES]


def log_sigmoid(z: float) -> float:
    return -math.log1p(math.exp(-z))


def test_dpo_is_the_formula_over_transformers_own_log_probs():
    pairs, _ = load_preferences(PAIRS, tokenizer_of('t5'))
    model = tiny_causal_lm('t5')
    reference = tiny_causal_lm('t5', seed=1)

    def ratio(prompt_ids: torch.Tensor, response_ids: torch.Tensor) -> float:
        policy, other = (label_loss(m, prompt_ids, response_ids) for m in (model, reference))
        return (other - policy) * len(response_ids)

    wanted = []
    for pair in pairs:
        chosen, rejected = (ratio(pair.prompt_ids, response) for response in pair.responses)
        wanted.append(-log_sigmoid(0.1 * (chosen - rejected)))
    initial = NaiveStrategy(seed=1).prepare(Actor(reference))
    _, (first, second) = offline('dpo', 't5', pairs, Actor(deepcopy(model)), initial_model=initial)
    assert first == pytest.approx(sum(wanted) / len(wanted), rel=1e-4) and second < first


@pytest.mark.parametrize(
    ('method', 'family'), [('kto', 'bart'), ('orpo', 't5'), ('simpo', 'bart'), ('reward-model', 't5')]
)
def test_other_methods_of_preferences(method, family):
    pairs, _ = load_preferences(PAIRS, tokenizer_of(family))
    model = tiny_causal_lm(family)
    if method == 'reward-model':
        trainer, (first, second) = offline(method, family, pairs, RewardModel(trunk_of(model)))
        online(family, Actor(tiny_causal_lm(family)), critic=True, reference=True, reward=trainer.model)
    else:
        _, (first, second) = offline(method, family, pairs, Actor(model), compares=method == 'kto')
    assert second < first


def test_ilql_and_its_decoding():
    tokenizer = tokenizer_of('t5')
    data, _ = load_labelled([r | {'reward': float(len(r['response']))} for r in SUMMARIES], tokenizer)
    trainer, losses = offline('ilql', 't5', data, ILQLModel(tiny_causal_lm('t5')))
    assert all(math.isfinite(loss) for loss in losses)
    evaluation = PromptEvaluation([r['prompt'] for r in SUMMARIES], tokenizer, vowels, max_new_tokens=4, num_rows=0)
    found = BetaEvaluation(evaluation, betas=(0.0, 100.0))(trainer)
    assert set(found) >= {'score_mean@beta=0', 'score_mean@beta=100'}
    model, engine, prompt = trainer.model, HFEngine(), Prompt(ids=data[0].sequence.prompt_ids)
    greedy = SamplingParams(max_new_tokens=1, do_sample=False)
    with model.decoding(100.0):
        engine.begin(model)
        (sample,) = engine.generate(Call.of([prompt], greedy, seed=0, indices=[0]))
        engine.end()
        # head and Q heads at the state before the first token
        best = int(Actor.forward(model, collate([sample]), with_logits=True).logits[0].argmax())
    assert sample.response_ids.tolist() == [best]


def test_prompts_without_the_end_token_are_pointed_out():
    bare, _ = load_demonstrations(SUMMARIES, encoder_decoder_tokenizer('t5'))  # not marked as an encoder-decoder's
    strategy = NaiveStrategy(seed=1)
    model, optimizer = trained(strategy, Actor(tiny_causal_lm('t5')))
    with pytest.warns(UserWarning, match="the first prompt does not end with '<eos>'"):
        SFTTrainer(strategy, model, optimizer, bare, tokenizer=tokenizer_of('t5'))


def test_unsupported_settings_of_an_encoder_decoder_are_refused():
    actor = Actor(tiny_causal_lm('t5'), value_head=True)
    settings = {'tokenizer': tokenizer_of('t5'), 'kl_coef': 0.0, 'environment': 'games:countdown'}
    with pytest.raises(ValueError, match='the turns of an environment are written by causal language models'):
        assemble(NaiveStrategy(seed=1), actor, **settings)
    with pytest.raises(ValueError, match='T5ForConditionalGeneration is an encoder-decoder'):
        LocalEngine().begin(actor)
