"""`chatgpt.train`: each route on a tiny model, both conventions of functions, and what is refused before anything is loaded."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import chatgpt
from chatgpt.nn import GPTActor, ILQLModel
from chatgpt.quickstart import as_reward
from chatgpt.testing.fakes import char_tokenizer, tiny_config
from chatgpt.trainer import DPOTrainer, ILQLTrainer, PPOTrainer, SFTTrainer
from chatgpt.trainer.callbacks import ProgressBar

QUIET = {'callbacks': [ProgressBar(enabled=False)]}
PPO = {'num_timesteps': 2, 'experience_batch_size': 4, 'train_batch_size': 4, 'max_new_tokens': 4}


@pytest.fixture(scope='module')
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp('model')
    GPTActor(config=tiny_config('gpt2', positions=48)).save_pretrained(folder, tokenizer=char_tokenizer())
    return folder


def metrics(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / 'metrics.jsonl').read_text().splitlines()]


def test_a_reward_function_means_ppo(folder, tmp_path):
    seen = []

    def reward(samples, prompts, outputs, place):
        seen.append((samples, prompts, outputs, place))
        return [float(len(o)) for o in outputs]

    def metric(samples, prompts, outputs, **columns):
        return {'length': [len(o) for o in outputs], 'place': [p == 'x' for p in columns['place']]}

    prompts = [{'prompt': f'a{i}', 'place': 'x'} for i in range(4)]
    trainer = chatgpt.train(
        str(folder), reward_fn=reward, prompts=prompts, eval_prompts=prompts[:2], metric_fn=metric, run_dir=tmp_path, eval_interval=1,
        lr=1e-3, **PPO, **QUIET,
    )  # fmt: skip
    assert isinstance(trainer, PPOTrainer)
    assert trainer.timestep == 2
    samples, said, outputs, place = seen[0]
    assert [a + b for a, b in zip(said, outputs, strict=True)] == samples
    assert set(place) == {'x'}
    last = metrics(tmp_path)[-1]
    assert last['eval/metrics/place'] == 1.0
    assert last['eval/metrics/length'] == last['eval/score_mean']
    assert (tmp_path / 'eval_samples.jsonl').is_file()
    trainer.save_pretrained(tmp_path / 'out')


def test_the_same_with_adapters_and_without_a_critic(folder):
    trainer = chatgpt.train(
        folder, reward_fn=lambda prompts, responses: [1.0 * len(r) for r in responses], prompts=['a', 'b'], lora_rank=2,
        config={'method.advantage_estimator': 'rloo', 'num_samples_per_prompt': 2}, stop_sequences=['z'], **PPO, **QUIET,
    )  # fmt: skip
    assert trainer.critic is None
    assert trainer.maker.initial_model is None
    assert trainer.stop_strings is not None


def test_samples_with_rewards_mean_ilql(folder, tmp_path):
    trainer = chatgpt.train(
        str(folder), samples=[('a', 'bc'), ('a', 'bd')] * 4, rewards=[1.0, 0.0] * 4, eval_prompts=['a'], run_dir=tmp_path, eval_interval=1,
        metric_fn=lambda samples, **_: {'length': [len(s) for s in samples]}, max_epochs=1, train_batch_size=4, max_new_tokens=3, **QUIET,
    )  # fmt: skip
    assert isinstance(trainer, ILQLTrainer)
    assert isinstance(trainer.model, ILQLModel)
    assert 'eval/metrics/length@beta=100' in metrics(tmp_path)[-1]


@pytest.mark.parametrize('samples', [['ab', 'cd'] * 4, [('a', 'b'), ('c', 'd')] * 4, [{'instruction': 'a', 'output': 'b'}] * 8])
def test_samples_alone_mean_sft(folder, samples):
    trainer = chatgpt.train(folder, samples=samples, max_epochs=1, lr=1e-3, **QUIET)
    assert isinstance(trainer, SFTTrainer)
    assert trainer.num_updates == 2


def test_preferences_mean_dpo(folder, tmp_path):
    (tmp_path / 'c.yaml').write_text('beta: 0.5\nloss_type: hinge\nlr: 1e-4\n')
    pairs = [{'prompt': 'a', 'chosen': 'bc', 'rejected': 'd'}] * 8
    trainer = chatgpt.train(folder, preferences=pairs, config=tmp_path / 'c.yaml', max_epochs=1, **QUIET)
    assert isinstance(trainer, DPOTrainer)
    assert (trainer.config.beta, trainer.config.loss_type) == (0.5, 'hinge')
    assert trainer.optim.param_groups[0]['lr'] == 1e-4


def test_a_model_in_memory_needs_a_tokenizer(folder):
    from transformers import AutoModelForCausalLM, GPT2LMHeadModel

    assert chatgpt.train(AutoModelForCausalLM.from_pretrained(folder), samples=['ab'] * 4, max_epochs=1, **QUIET).num_updates == 1
    fresh = GPT2LMHeadModel(tiny_config('gpt2', positions=48))
    with pytest.raises(ValueError, match='give tokenizer='):
        chatgpt.train(fresh, samples=['ab'])
    assert chatgpt.train(fresh, samples=['ab'] * 4, tokenizer=char_tokenizer(), max_epochs=1, **QUIET).num_updates == 1


@pytest.mark.parametrize(('given', 'sentence'), [
    ({}, 'give one of reward_fn .* got none of them'),
    ({'reward_fn': len, 'samples': ['a']}, 'got reward_fn and samples'),
    ({'reward_fn': len}, 'a reward_fn needs prompts'),
    ({'rewards': [1.0], 'preferences': []}, 'rewards belong to samples'),
    ({'samples': ['a'], 'prompts': ['b']}, 'prompts go with reward_fn'),
    ({'samples': ['a'], 'rewards': [1.0, 2.0]}, '1 samples but 2 rewards'),
    ({'samples': ['a'], 'max_epoch': 3}, "'max_epoch' is not a setting of sft; did you mean max_epochs"),
    ({'samples': ['a'], 'metric_fn': len, 'tokenizer': object()}, 'give eval_prompts too'),
    ({'samples': ['a'], 'config': 'nowhere.yaml'}, 'there is no such file'),
])  # fmt: skip
def test_mistakes_before_anything_is_loaded(given, sentence):
    with pytest.raises(ValueError, match=sentence):
        chatgpt.train('no/such-model', **given)


def test_both_conventions():
    assert as_reward(lambda prompts, responses: responses)(['a'], ['b']) == ['b']
    assert as_reward(lambda samples, **kw: samples)(['a'], ['b']) == ['ab']
    assert as_reward(None) is None
    assert as_reward(torch.nn.Linear(1, 1)).weight.shape == (1, 1)
