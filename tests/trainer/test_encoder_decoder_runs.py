"""Every method on a tiny T5 or BART: the first ratio is 1 and the first KL 0, two phases run, and the losses are those
of transformers' own log-probs."""

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
from chatgpt.trainer import ILQLTrainer, RFTTrainer, SFTTrainer
from chatgpt.trainer.objectives.ilql import BetaEvaluation
from chatgpt.trainer.objectives.reward_model import RewardModelTrainer
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
    """After two phases on review prefixes; texts become ids in the trainer."""
    initial = Actor(deepcopy(actor.model)) if reference else None
    judge = Critic(trunk_of(tiny_causal_lm(family))) if critic else None
    sizes = {'experience_batch_size': 6, 'train_batch_size': 12, 'tokenizer': encoder_decoder_tokenizer(family)}
    trainer = assemble(NaiveStrategy(seed=3), actor, judge, reward, initial, **sizes | settings)
    trainer.fit(REVIEWS, 1, 2, 1)
    first, second = trainer.log.phases
    assert first['ppo/first_ratio_error'] < 1e-5 and second['ppo/first_ratio_error'] < 1e-5
    assert abs(first['rollout/kl_mean']) < 1e-5 * 6
    assert first.get('rollout/rescore_error', 0.0) < 1e-5
    if reference:
        assert abs(second['rollout/kl_mean']) > 1e-6  # the policy has moved away from what it is compared with
    assert all(math.isfinite(value) for phase in trainer.log.phases for value in phase.values())
    return trainer


def label_loss(model: Any, prompt_ids: torch.Tensor, response_ids: torch.Tensor) -> float:
    """Mean −log π of a response's tokens, as transformers computes it from labels."""
    with torch.no_grad():
        return model(input_ids=prompt_ids[None], labels=response_ids[None]).loss.item()


ONLINE = {'ppo': 'bart', 'dapo': 't5', 'dr_grpo': 'bart', 'gspo': 't5', 'cispo': 'bart', 'rloo': 't5'}
ONLINE |= {'reinforce++': 'bart', 'reinforce++_baseline': 't5', 'a2c': 'flan-t5'}


@pytest.mark.parametrize('method', ONLINE)
def test_every_online_method(method):
    family, settings = ONLINE[method], {} if method == 'ppo' else dict(METHODS[method].settings)
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


def test_reward_model_of_an_encoder_decoder_scores_and_learns():
    rows = [{'prompt': r['prompt'], 'chosen': r['response'], 'rejected': 'x'} for r in SUMMARIES]
    pairs, _ = load_preferences(rows, tokenizer_of('t5'))
    strategy, log = NaiveStrategy(seed=1), Log()
    model, optimizer = trained(strategy, RewardModel(trunk_of(tiny_causal_lm('t5'))), lr=1e-2)
    RewardModelTrainer(strategy, model, optimizer, pairs, max_epochs=8, train_batch_size=4, callbacks=[log]).fit()
    assert log.phases[-1]['rm/accuracy'] == 1.0
    online('t5', Actor(tiny_causal_lm('t5')), critic=True, reference=True, reward=model)


@pytest.mark.parametrize('family', ['t5', 'bart'])
def test_sft_has_the_loss_of_transformers(family):
    tokenizer, model = tokenizer_of(family), tiny_causal_lm(family, seed=5)
    data, _ = load_demonstrations(SUMMARIES, tokenizer)
    given = tokenizer([r['prompt'] for r in SUMMARIES], padding=True, return_tensors='pt')
    labels = tokenizer(text_target=[r['response'] for r in SUMMARIES], padding=True, return_tensors='pt')['input_ids']
    labels = labels.masked_fill(labels == tokenizer.pad_token_id, -100)
    with torch.no_grad():
        wanted = model(input_ids=given['input_ids'], attention_mask=given['attention_mask'], labels=labels).loss
    strategy, log = NaiveStrategy(seed=1), Log()
    actor, optimizer = trained(strategy, Actor(model), lr=1e-2)
    settings = {'max_epochs': 2, 'train_batch_size': 4, 'log_interval': 1, 'callbacks': [log], 'tokenizer': tokenizer}
    SFTTrainer(strategy, actor, optimizer, data, **settings).fit()
    assert log.phases[0]['sft/loss'] == pytest.approx(wanted.item(), rel=1e-5)
    assert log.phases[1]['sft/loss'] < log.phases[0]['sft/loss']


def test_ilql_and_what_it_decodes():
    tokenizer, strategy, log = tokenizer_of('t5'), NaiveStrategy(seed=1), Log()
    data, _ = load_labelled([r | {'reward': float(len(r['response']))} for r in SUMMARIES], tokenizer)
    model, optimizer = trained(strategy, ILQLModel(tiny_causal_lm('t5')))
    settings = {'max_epochs': 2, 'train_batch_size': 4, 'log_interval': 1, 'callbacks': [log], 'tokenizer': tokenizer}
    trainer = ILQLTrainer(strategy, model, optimizer, data, **settings)
    trainer.fit()
    assert all(math.isfinite(phase['ilql/loss']) for phase in log.phases)
    evaluation = PromptEvaluation([r['prompt'] for r in SUMMARIES], tokenizer, vowels, max_new_tokens=4, num_rows=0)
    found = BetaEvaluation(evaluation, betas=(0.0, 100.0))(trainer)
    assert set(found) >= {'score_mean@beta=0', 'score_mean@beta=100'}
    engine, prompt = HFEngine(), Prompt(ids=data[0].sequence.prompt_ids)
    greedy = SamplingParams(max_new_tokens=1, do_sample=False)
    with model.decoding(100.0):
        engine.begin(model)
        (sample,) = engine.generate(Call.of([prompt], greedy, seed=0, indices=[0]))
        engine.end()
        # head and Q heads at the state before the first token
        states = Actor.forward(model, collate([sample]), with_logits=True)
    assert sample.response_ids.tolist() == [int(states.logits[0].argmax())]


def log_sigmoid(z: float) -> float:
    return -math.log1p(math.exp(-z))


@pytest.mark.parametrize(('method', 'family'), [('dpo', 't5'), ('kto', 'bart'), ('orpo', 't5'), ('simpo', 'bart')])
def test_the_loss_of_preferences_is_the_formula_over_transformers_own(method, family):
    rows = [{'prompt': r['prompt'], 'chosen': r['response'], 'rejected': 'x yz'} for r in SUMMARIES]
    pairs, _ = load_preferences(rows, tokenizer_of(family))
    policy, reference = tiny_causal_lm(family), tiny_causal_lm(family, seed=1)

    def logp(model: Any, prompt_ids: torch.Tensor, response_ids: torch.Tensor, *, mean: bool = False) -> float:
        loss = label_loss(model, prompt_ids, response_ids)
        return -loss if mean else -loss * len(response_ids)

    def ratio(prompt_ids: torch.Tensor, response_ids: torch.Tensor) -> float:
        return logp(policy, prompt_ids, response_ids) - logp(reference, prompt_ids, response_ids)

    answers = [(p.prompt_ids, response) for p in pairs for response in p.responses]  # chosen, rejected, chosen, ...
    if method == 'dpo':
        ratios = [ratio(*a) for a in answers]
        wanted = [-log_sigmoid(0.1 * (c - r)) for c, r in zip(ratios[::2], ratios[1::2], strict=True)]
    elif method == 'kto':  # each answer also under the next prompt that is another
        following = [p.prompt_ids for p in pairs[1:] + pairs[:1] for _ in range(2)]
        crossed = [ratio(other, a[1]) for a, other in zip(answers, following, strict=True)]
        z0 = max(0.0, sum(crossed) / len(crossed))
        z = [0.1 * (ratio(*a) - z0) for a in answers]
        wanted = [1 - math.exp(log_sigmoid(x if i % 2 == 0 else -x)) for i, x in enumerate(z)]
    else:
        means = [logp(policy, *a, mean=True) for a in answers]
        odds = [x - math.log1p(-math.exp(x)) for x in means]
        wanted = [
            -means[i] - 0.1 * log_sigmoid(odds[i] - odds[i + 1])
            if method == 'orpo'
            else -log_sigmoid(2.0 * (means[i] - means[i + 1]) - 1.0)
            for i in range(0, len(answers), 2)
        ]
    strategy, log = NaiveStrategy(seed=1), Log()
    model, optimizer = trained(strategy, Actor(deepcopy(policy)), lr=1e-2)
    settings = {'train_batch_size': len(wanted), 'max_epochs': 2, 'log_interval': 1, 'shuffle': False}
    settings |= {'callbacks': [log], 'tokenizer': tokenizer_of(family)}
    if method in ('dpo', 'kto'):
        settings['initial_model'] = strategy.prepare(Actor(reference))
    METHODS[method].part('trainer')(strategy, model, optimizer, pairs, **settings).fit()
    first, second = (phase[f'{method}/loss'] for phase in log.phases)
    assert first == pytest.approx(sum(wanted) / len(wanted), rel=1e-4) and second < first


def test_rft():
    strategy, log = NaiveStrategy(seed=1), Log()
    model, optimizer = trained(strategy, Actor(tiny_causal_lm('t5')))
    sizes = {'num_rounds': 2, 'num_samples_per_prompt': 4, 'train_batch_size': 8, 'max_new_tokens': 5}
    settings = sizes | {'start_quantile': 0.5, 'callbacks': [log], 'tokenizer': encoder_decoder_tokenizer('t5')}
    RFTTrainer(strategy, model, optimizer, REVIEWS, vowels, **settings).fit()
    assert len(log.phases) == 2 and all(phase['sft/loss'] > 0 for phase in log.phases)


def test_prompts_without_the_end_token_are_pointed_out():
    bare, _ = load_demonstrations(SUMMARIES, encoder_decoder_tokenizer('t5'))  # nobody said what it is for
    strategy = NaiveStrategy(seed=1)
    model, optimizer = trained(strategy, Actor(tiny_causal_lm('t5')))
    with pytest.warns(UserWarning, match="the first prompt does not end with '<eos>'"):
        SFTTrainer(strategy, model, optimizer, bare, tokenizer=tokenizer_of('t5'))


def test_what_an_encoder_decoder_cannot_do_is_said():
    actor = Actor(tiny_causal_lm('t5'), value_head=True)
    settings = {'tokenizer': tokenizer_of('t5'), 'kl_coef': 0.0, 'environment': 'games:countdown'}
    with pytest.raises(ValueError, match='the turns of an environment are written by causal language models'):
        assemble(NaiveStrategy(seed=1), actor, **settings)
    with pytest.raises(ValueError, match='T5ForConditionalGeneration is an encoder-decoder'):
        LocalEngine().begin(actor)
