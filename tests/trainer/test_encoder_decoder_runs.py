"""Every method on a tiny T5 or BART: the first ratio is 1 and the first KL 0, two phases run, and the files are whole.

The shapes are trlX's: review prefixes with a reward on what follows, and "TL;DR" prompts with SFT before PPO.
"""

from __future__ import annotations

import math
from copy import deepcopy
from typing import Any

import pytest
import torch
from phase_log import Log

from chatgpt.batching import collate
from chatgpt.data import load_demonstrations, load_labelled, load_preferences
from chatgpt.data.formats import note_model
from chatgpt.launch.methods import METHODS
from chatgpt.nn import Actor, Critic, ILQLModel, RewardModel
from chatgpt.nn.loading import trunk_of
from chatgpt.rollout import BestOfN, Call, HFEngine, LocalEngine, SamplingParams, stream_tokens
from chatgpt.strategies import NaiveStrategy
from chatgpt.testing import encoder_decoder_tokenizer, tiny_causal_lm
from chatgpt.trainer import ILQLTrainer, PPOTrainer, RFTTrainer, SFTTrainer
from chatgpt.trainer.callbacks import Callback
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


def vowels(prompts: list[str], responses: list[str]) -> list[float]:
    return [float(sum(c in 'aeiou' for c in r)) for r in responses]


def trained(strategy: Any, model: Any, lr: float = 1e-3) -> tuple[Any, Any]:
    parameters = [p for p in model.parameters() if p.requires_grad]
    return strategy.prepare((model, torch.optim.AdamW(parameters, lr=lr, eps=1e-5)))


def online(
    family: str,
    actor: Actor,
    *,
    critic: bool,
    reference: bool,
    reward: Any = vowels,
    callbacks: Any = (),
    **settings: Any,
) -> Any:
    """Two phases of PPOTrainer on review prefixes; what each phase logged."""
    strategy, log = NaiveStrategy(seed=3), Log()
    initial = strategy.prepare(Actor(deepcopy(actor.model))) if reference else None
    value = trained(strategy, Critic(trunk_of(tiny_causal_lm(family)))) if critic else (None, None)
    model, optimizer = trained(strategy, actor)
    sizes = {'experience_batch_size': 6, 'train_batch_size': 12, 'max_epochs': 2, 'max_new_tokens': 6}
    trainer = PPOTrainer(
        strategy,
        model,
        value[0],
        reward,
        initial,
        optimizer,
        value[1],
        tokenizer=encoder_decoder_tokenizer(family),  # texts become ids in the trainer
        callbacks=[log, *callbacks],
        **(sizes | settings),
    )
    trainer.fit(REVIEWS, 1, 2, 1)
    return trainer, log.phases


def check_first(phases: list[dict[str, float]], *, has_reference: bool = True) -> None:
    assert len(phases) == 2
    assert phases[0]['ppo/first_ratio_error'] < 1e-5 and phases[1]['ppo/first_ratio_error'] < 1e-5
    assert abs(phases[0]['rollout/kl_mean']) < 1e-5 * 6
    assert phases[0]['rollout/rescore_error'] < 1e-5 if 'rollout/rescore_error' in phases[0] else True
    if has_reference:
        assert abs(phases[1]['rollout/kl_mean']) > 1e-6  # the policy has moved away from what it is compared with
    assert all(math.isfinite(value) for phase in phases for value in phase.values())


def label_loss(model: Any, prompt_ids: torch.Tensor, response_ids: torch.Tensor) -> float:
    """Mean −log π of a response's tokens, as transformers computes it from labels."""
    with torch.no_grad():
        return model(input_ids=prompt_ids[None], labels=response_ids[None]).loss.item()


@pytest.mark.parametrize('family', ['t5', 'flan-t5', 'bart'])
def test_ppo_with_a_critic_of_its_own_on_review_prefixes(family):
    trainer, phases = online(family, Actor(tiny_causal_lm(family)), critic=True, reference=True)
    check_first(phases)
    assert isinstance(trainer.engine, HFEngine)
    experience = trainer.last_experiences[0]
    assert experience.prompt_ids[-1] == 2 and experience.prompt_text in REVIEWS
    assert experience.num_actions <= 6 and experience.values.abs().sum() > 0
    # the same log-probs as transformers' own loss over labels gives
    loss = label_loss(trainer.maker.reference.initial_model.model, experience.prompt_ids, experience.response_ids)
    assert -experience.ref_logprobs.mean().item() == pytest.approx(loss, rel=1e-4)


class FirstExperiences(Callback):
    """Of the first phase."""

    def on_make_experience_end(self, trainer: Any, experiences: list[Any]) -> None:
        self.found = getattr(self, 'found', experiences)


ONLINE = ('dapo', 'dr_grpo', 'gspo', 'cispo', 'rloo', 'reinforce++', 'reinforce++_baseline', 'a2c')


@pytest.mark.parametrize('family', ['t5', 'bart'])
@pytest.mark.parametrize('method', ONLINE)
def test_every_online_method(method, family):
    settings = dict(METHODS[method].settings)
    if 'num_samples_per_prompt' in settings:
        settings['num_samples_per_prompt'] = 2
    compares, first, start = settings.get('kl_coef', 0.1) > 0, FirstExperiences(), tiny_causal_lm(family)
    actor = Actor(deepcopy(start))
    _, phases = online(
        family, actor, critic=method == 'a2c', reference=compares, callbacks=[first], **settings | {'max_epochs': 1}
    )
    check_first(phases, has_reference=compares)
    for experience in first.found:
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
    _, phases = online('t5', Actor(tiny_causal_lm('t5')), critic=True, reference=True, reward=model)
    check_first(phases)


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
    SFTTrainer(
        strategy,
        actor,
        optimizer,
        data,
        max_epochs=2,
        train_batch_size=4,
        log_interval=1,
        callbacks=[log],
        tokenizer=tokenizer,
    ).fit()
    assert log.phases[0]['sft/loss'] == pytest.approx(wanted.item(), rel=1e-5)
    assert log.phases[1]['sft/loss'] < log.phases[0]['sft/loss']


def test_sft_then_ppo_on_summaries():
    tokenizer, strategy = tokenizer_of('flan-t5'), NaiveStrategy(seed=1)
    data, _ = load_demonstrations(SUMMARIES, tokenizer)
    actor, optimizer = trained(strategy, Actor(tiny_causal_lm('flan-t5'), value_head=True), lr=5e-3)
    SFTTrainer(strategy, actor, optimizer, data, max_epochs=60, train_batch_size=4, log_interval=100).fit()
    samples = HFEngine()
    samples.begin(actor)
    prompts = [Prompt(ids=s.prompt_ids) for s in data]
    sampling = SamplingParams(max_new_tokens=8, do_sample=False, eos_token_ids=(2,))
    said = samples.generate(Call.of(prompts, sampling, seed=0, indices=range(4)))
    samples.end()
    assert [s.response_ids.tolist() for s in said] == [s.response_ids.tolist() for s in data]  # it has learned them
    _, phases = online('flan-t5', actor, critic=False, reference=True)
    check_first(phases)
    streamed = list(stream_tokens(actor, prompts[0].ids, sampling, seed=0))
    samples.begin(actor)
    assert streamed == samples.generate(Call.of(prompts[:1], sampling, seed=0, indices=[0]))[0].response_ids.tolist()
    drawn = SamplingParams(max_new_tokens=8, eos_token_ids=(2,))
    streamed = list(stream_tokens(actor, prompts[0].ids, drawn, seed=7, index=3))
    assert streamed == samples.generate(Call.of(prompts[:1], drawn, seed=7, indices=[3]))[0].response_ids.tolist()


@pytest.mark.parametrize('family', ['t5', 'bart'])
def test_ilql_and_what_it_decodes(family):
    tokenizer, strategy, log = tokenizer_of(family), NaiveStrategy(seed=1), Log()
    rows = [r | {'reward': float(len(r['response']))} for r in SUMMARIES]
    data, _ = load_labelled(rows, tokenizer)
    model, optimizer = trained(strategy, ILQLModel(tiny_causal_lm(family)))
    trainer = ILQLTrainer(
        strategy,
        model,
        optimizer,
        data,
        max_epochs=2,
        train_batch_size=4,
        log_interval=1,
        callbacks=[log],
        tokenizer=tokenizer,
    )
    trainer.fit()
    assert [phase for phase in log.phases if not math.isfinite(phase['ilql/loss'])] == []
    evaluation = PromptEvaluation([r['prompt'] for r in SUMMARIES], tokenizer, vowels, max_new_tokens=4, num_rows=0)
    found = BetaEvaluation(evaluation, betas=(0.0, 100.0))(trainer)
    assert set(found) >= {'score_mean@beta=0', 'score_mean@beta=100'}
    engine, prompt = HFEngine(), Prompt(ids=data[0].sequence.prompt_ids)
    greedy = SamplingParams(max_new_tokens=1, do_sample=False)
    with model.decoding(100.0):
        engine.begin(model)
        (sample,) = engine.generate(Call.of([prompt], greedy, seed=0, indices=[0]))
        engine.end()
        batch = collate([sample])
        states = Actor.forward(model, batch, with_logits=True)  # head and Q heads at the state before the first token
        best = int(states.logits[0].argmax())
    assert sample.response_ids.tolist() == [best]


def log_sigmoid(z: float) -> float:
    return -math.log1p(math.exp(-z))


@pytest.mark.parametrize('family', ['t5', 'bart'])
@pytest.mark.parametrize('method', ['dpo', 'kto', 'orpo', 'simpo'])
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
    METHODS[method].part('trainer')(
        strategy,
        model,
        optimizer,
        pairs,
        initial_model=strategy.prepare(Actor(reference)) if method in ('dpo', 'kto') else None,
        train_batch_size=len(wanted),
        max_epochs=2,
        log_interval=1,
        shuffle=False,
        callbacks=[log],
        tokenizer=tokenizer_of(family),
    ).fit()
    first, second = (phase[f'{method}/loss'] for phase in log.phases)
    assert first == pytest.approx(sum(wanted) / len(wanted), rel=1e-4) and second < first


def test_rft_and_best_of_n():
    strategy, rft = NaiveStrategy(seed=1), Log()
    model, optimizer = trained(strategy, Actor(tiny_causal_lm('t5')))
    RFTTrainer(
        strategy,
        model,
        optimizer,
        REVIEWS,
        vowels,
        num_rounds=2,
        num_samples_per_prompt=4,
        start_quantile=0.5,
        train_batch_size=8,
        max_new_tokens=5,
        callbacks=[rft],
        tokenizer=encoder_decoder_tokenizer('t5'),
    ).fit()
    assert len(rft.phases) == 2 and all(phase['sft/loss'] > 0 for phase in rft.phases)

    engine = HFEngine()
    engine.begin(model)
    counted = lambda samples: [float((s.response_ids == 6).sum()) for s in samples]  # noqa: E731
    sampling = SamplingParams(max_new_tokens=6, eos_token_ids=(2,))
    prompt = Prompt(ids=torch.tensor([6, 7, 8, 2]))
    ((best,),) = BestOfN(engine, counted, sample_size=8)([prompt], sampling, seed=0)
    drawn = engine.generate(Call.of([prompt] * 8, sampling, seed=0, indices=range(8)))
    assert best.score == max(counted(drawn))


def test_prompts_without_the_end_token_are_pointed_out():
    tokenizer = tokenizer_of('t5')
    bare, _ = load_demonstrations(SUMMARIES, encoder_decoder_tokenizer('t5'))  # nobody said what it is for
    strategy = NaiveStrategy(seed=1)
    model, optimizer = trained(strategy, Actor(tiny_causal_lm('t5')))
    with pytest.warns(UserWarning, match="the first prompt does not end with '<eos>'"):
        SFTTrainer(strategy, model, optimizer, bare, tokenizer=tokenizer)


def test_what_an_encoder_decoder_cannot_do_is_said():
    strategy, actor = NaiveStrategy(seed=1), Actor(tiny_causal_lm('t5'), value_head=True)
    model, optimizer = trained(strategy, actor)
    common: dict[str, Any] = {'tokenizer': tokenizer_of('t5'), 'kl_coef': 0.0, 'max_new_tokens': 4}
    with pytest.raises(ValueError, match='the turns of an environment are written by causal language models'):
        PPOTrainer(strategy, model, None, None, None, optimizer, environment='games:countdown', **common)
    with pytest.raises(ValueError, match='T5ForConditionalGeneration is an encoder-decoder'):
        LocalEngine().begin(actor)
