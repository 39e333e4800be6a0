"""Refusals before the first step: records that a model cannot read, a router loss in the model's config, and shared
models or optimizers."""

from __future__ import annotations

from contextlib import nullcontext
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_runs import sequence, trained, vowels
from transformers import AutoModelForCausalLM, LEDConfig, MixtralConfig, RobertaConfig, RobertaModel

from chatgpt.launch.inputs import read_inputs
from chatgpt.launch.runs import SFTRun
from chatgpt.nn import GPTRM, Actor, AutoActor, GPTActor, GPTCritic, RewardModel
from chatgpt.nn.trunk import position_limit
from chatgpt.strategies import NaiveStrategy
from chatgpt.testing import byte_tokenizer
from chatgpt.testing.fakes import tiny_config
from chatgpt.trainer import DPOTrainer, PPOTrainer, RewardModelTrainer, SFTTrainer
from chatgpt.trainer.fits import check_records
from chatgpt.trainer.objectives.pairs import Pair

CONFIG = tiny_config('gpt2', vocab_size=16, hidden=16, positions=8)
GOOD = sequence([3], [4, 5])
BAD = {
    'token id 16, outside of the model': sequence([3, 16], [4]),
    'token id -1, outside of the model': sequence([3], [-1, 5]),
    r"has 9 tokens, more than the model's 8 positions \(gpt2\); cut it \(max_length=8": sequence([3] * 4, [4] * 5),
}


def trainer(kind: str, data: list[Any], eval_data: list[Any] | None = None) -> Any:
    strategy = NaiveStrategy(seed=5)
    model, optim = trained(strategy, GPTActor(config=CONFIG, lora_rank=2 if kind == 'dpo' else 0))
    if kind == 'sft':
        return SFTTrainer(strategy, model, optim, data, eval_data)
    pairs = [None if of is None else [Pair(chosen=GOOD, rejected=s) for s in of] for of in (data, eval_data)]
    return DPOTrainer(strategy, model, optim, *pairs)


@pytest.mark.parametrize('kind', ['sft', 'dpo'])
def test_a_record_that_the_model_cannot_read_is_named(kind):
    for message, bad in BAD.items():
        with pytest.raises(ValueError, match=message) as found:
            trainer(kind, [GOOD, GOOD, bad, GOOD])
        assert 'Trainer: train_data[2] has' in str(found.value) and '\n' not in str(found.value)
        with pytest.raises(ValueError, match=r'Trainer: eval_data\[1\] has'):
            trainer(kind, [GOOD], [GOOD, bad])
    if kind == 'sft':  # records at the limits are accepted
        trainer('sft', [GOOD, sequence([15] * 4, [0] * 4), sequence([], [3])])


def test_prompt_and_response_of_an_encoder_decoder_have_separate_positions():
    actor = GPTActor(config=deepcopy(CONFIG))
    long = sequence([3] * 8, [4] * 7)
    with pytest.raises(ValueError, match='has 15 tokens'):
        check_records('data', [[long]], actor)
    actor.model.config.is_encoder_decoder = True
    check_records('data', [[long]], actor)
    # the start token is at the ninth position
    with pytest.raises(ValueError, match=r'has 9 tokens on one side, the start token included.*max_length=7'):
        check_records('data', [[sequence([3], [4] * 8)]], actor)
    for encoder, decoder in ((40, 300), (300, 40)):  # the smaller of two limits counts
        config = LEDConfig(max_encoder_position_embeddings=encoder, max_decoder_position_embeddings=decoder)
        assert position_limit(config) == 40


def test_positions_that_begin_after_the_padding_token():
    config = RobertaConfig(
        vocab_size=16,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        max_position_embeddings=18,
    )
    model = RobertaModel(config)
    limit = position_limit(config)
    model(torch.full((1, limit), 5))
    with pytest.raises((IndexError, RuntimeError), match='out of'):
        model(torch.full((1, limit + 1), 5))


@pytest.mark.parametrize('role', ['critic', 'initial_model', 'reward_model'])
def test_a_model_with_fewer_positions_than_the_policys_responses_is_named(role):
    strategy = NaiveStrategy(seed=5)
    wide, narrow = (tiny_config('gpt2', vocab_size=16, hidden=16, positions=n) for n in (32, 4))
    config = {name: narrow if name == role else wide for name in ('critic', 'initial_model', 'reward_model')}
    actor, optim = trained(strategy, GPTActor(config=wide))
    critic, critic_optim = trained(strategy, GPTCritic(config=config['critic']))
    initial, reward = strategy.prepare(GPTActor(config=config['initial_model']), GPTRM(config=config['reward_model']))
    trainer = PPOTrainer(
        strategy,
        actor,
        critic,
        reward,
        initial,
        optim,
        critic_optim,
        max_new_tokens=6,
        pad_token_id=0,
        eos_token_id=None,
        experience_batch_size=1,
        train_batch_size=1,
    )
    with pytest.raises(ValueError, match=rf"^{role}: sample\[0\] has 8 tokens, more than the model's 4 positions"):
        trainer.fit([torch.tensor([3, 4])], num_episodes=1, max_timesteps=1, update_timesteps=1)


REFUSED = r'mixtral has output_router_logits=True, .*router_aux_loss_coef=0.25. is not added here; set'


def test_a_router_loss_is_refused_before_weights_are_read(tmp_path: Path):
    sizes = {'vocab_size': 300, 'hidden_size': 16, 'intermediate_size': 16, 'num_hidden_layers': 1, 'pad_token_id': 0}
    sizes |= {'num_attention_heads': 2, 'num_key_value_heads': 1, 'num_local_experts': 2, 'max_position_embeddings': 32}
    for asked in (False, True):
        config = MixtralConfig(**sizes, output_router_logits=asked, router_aux_loss_coef=0.25)
        strategy = NaiveStrategy(seed=5)
        actor, optim = trained(strategy, AutoActor(config=config))
        with pytest.raises(ValueError, match=REFUSED) if asked else nullcontext():
            SFTTrainer(strategy, actor, optim, [GOOD] * 4, train_batch_size=2, max_epochs=1).fit()
    config.save_pretrained(tmp_path)  # no weights
    byte_tokenizer().save_pretrained(tmp_path)
    data = tmp_path / 'data.jsonl'
    data.write_text('{"prompt": "a", "completion": "b"}\n')
    with pytest.raises(ValueError, match=REFUSED):
        read_inputs(SFTRun(dataset=str(data), pretrain=str(tmp_path), save_path=str(tmp_path / 'run')))


@pytest.mark.parametrize('kind', ['copy', 'none', 'itself', 'same weights', 'reward', 'optimizer'])
def test_shared_models_and_optimizers_are_refused(kind):
    """Accepts a copy, or None with LoRA; refuses the actor itself, before or after `prepare`, for which the KL would
    always be 0."""
    strategy = NaiveStrategy(seed=5)
    actor: Any = GPTActor(config=CONFIG, lora_rank=2 if kind == 'none' else 0)
    critic: Any = GPTCritic(config=CONFIG)
    references = {'none': None, 'itself': actor, 'same weights': Actor(actor.model)}
    reward = RewardModel(critic.model) if kind == 'reward' else GPTRM(config=CONFIG)
    initial = references[kind] if kind in references else deepcopy(actor)
    optimizers = [torch.optim.AdamW(model.parameters()) for model in (actor, critic)]
    (actor, first), (critic, second), reward, initial = strategy.prepare(
        (actor, optimizers[0]), (critic, optimizers[1]), reward, initial
    )
    expected = {
        'itself': 'initial_model shares its weights with the actor',
        'same weights': 'initial_model shares its weights with the actor',
        'reward': 'reward_model shares its weights with the critic',
        'optimizer': 'actor and critic have the same optimizer',
    }
    optims = first, first if kind == 'optimizer' else second
    with pytest.raises(ValueError, match=expected[kind]) if kind in expected else nullcontext():
        PPOTrainer(strategy, actor, critic, reward, initial, *optims, max_new_tokens=4)
    with pytest.raises(ValueError, match='initial_model shares its weights'):
        DPOTrainer(strategy, actor, first, [Pair(chosen=GOOD, rejected=GOOD)], initial_model=actor)


def actor() -> Any:
    return GPTActor(config=tiny_config('gpt2'))


def critic() -> Any:
    return GPTCritic(config=tiny_config('gpt2'))


def bare() -> Any:
    return AutoModelForCausalLM.from_config(tiny_config('gpt2'))


def frozen() -> Any:
    return actor().requires_grad_(False)


def sgd(model: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


@pytest.mark.parametrize(
    ('models', 'message'),
    [
        ({'actor': bare}, r'actor is a GPT2LMHeadModel of transformers; wrap it as Actor\(actor\)'),
        ({'critic': bare}, r'critic is a GPT2LMHeadModel of transformers; wrap it as Critic\(critic\)'),
        ({'initial_model': bare}, r'initial_model is a GPT2LMHeadModel of transformers'),
        ({'actor': critic, 'critic': actor}, 'actor is a GPTCritic, and Actor is needed; look at the order'),
        ({'initial_model': critic}, 'initial_model is a GPTCritic'),
        ({'actor': frozen}, 'no parameter of the actor requires a gradient'),
    ],
)
def test_ppo(models, message):
    kinds = {'actor': actor, 'critic': critic, 'initial_model': actor} | models
    first, second, initial = (kind() for kind in kinds.values())
    with pytest.raises(ValueError, match=f'^PPOTrainer: {message}'):
        PPOTrainer('naive', first, second, vowels, initial, sgd(first), sgd(second), max_new_tokens=2)


@pytest.mark.parametrize(
    ('trainer', 'model', 'message'),
    [
        (SFTTrainer, bare, 'model is a GPT2LMHeadModel of transformers'),
        (SFTTrainer, critic, 'actor is a GPTCritic, and Actor is needed'),
        (SFTTrainer, frozen, 'no parameter of the model requires a gradient'),
        (RewardModelTrainer, actor, 'reward_model is a GPTActor, and RewardModel is needed'),
        (RewardModelTrainer, lambda: RewardModel(critic().model).requires_grad_(False), 'no parameter of the model'),
    ],
)
def test_trainers_that_only_learn(trainer, model, message):
    made = model()
    with pytest.raises(ValueError, match=f'^{trainer.__name__}: {message}'):
        trainer('naive', made, sgd(made), [GOOD])
