"""`chatgpt.train`: each route on a tiny model, both conventions of functions, and errors before anything is loaded."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2LMHeadModel

import chatgpt
from chatgpt.nn import AutoActor, Critic, GPTActor, ILQLModel, RewardModel
from chatgpt.testing.fakes import char_tokenizer, tiny_config
from chatgpt.trainer import DPOConfig, DPOTrainer, ILQLTrainer, PPOTrainer, SFTConfig, SFTTrainer
from chatgpt.trainer.callbacks import ProgressBar
from chatgpt.trainer.experience import RewardFunctionError

PPO = {
    'num_timesteps': 1,
    'experience_batch_size': 4,
    'train_batch_size': 4,
    'max_new_tokens': 4,
    'prompts': ['a', 'b'],
}
GAME = {'environment': 'games:countdown'}
PAIRS = [{'prompt': 'a', 'chosen': 'bc', 'rejected': 'd'}] * 4


def train(model: Any, **given: Any) -> Any:
    """Trains one epoch without output."""
    online = 'reward_fn' in given or 'environment' in given
    return chatgpt.train(
        model, callbacks=[ProgressBar(enabled=False)], **((PPO if online else {'max_epochs': 1}) | given)
    )


def lengths(prompts: list[str], responses: list[str]) -> list[float]:
    return [float(len(r)) for r in responses]


def metrics(folder: Path, name: str = 'metrics') -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / f'{name}.jsonl').read_text().splitlines()]


# ---------------------------------------------------------------------- routes


def test_a_reward_function_means_ppo(tiny_folder, tmp_path):
    seen = []

    def reward(samples, prompts, outputs, place):
        seen.append((samples, prompts, outputs, place))
        return [float(len(o)) for o in outputs]

    def metric(samples, prompts, outputs, **columns):
        return {'length': [len(o) for o in outputs], 'place': [p == 'x' for p in columns['place']]}

    rows = [{'prompt': f'a{i}', 'place': 'x'} for i in range(4)]
    given = {'prompts': rows, 'eval_prompts': rows[:2], 'metric_fn': metric, 'run_dir': tmp_path, 'eval_interval': 1}
    trainer = train(str(tiny_folder), reward_fn=reward, num_timesteps=2, **given)
    assert isinstance(trainer, PPOTrainer) and trainer.timestep == 2
    samples, prompts, outputs, place = seen[0]
    assert [a + b for a, b in zip(prompts, outputs, strict=True)] == samples and set(place) == {'x'}
    last = metrics(tmp_path)[-1]
    assert last['eval/metrics/place'] == 1.0
    assert last['eval/metrics/length'] == last['eval/score_mean']
    assert (tmp_path / 'eval_samples.jsonl').is_file()


def test_the_same_with_adapters_and_without_a_critic(tiny_folder):
    config = {'method.advantage_estimator': 'rloo', 'num_samples_per_prompt': 2}
    trainer = train(tiny_folder, reward_fn=lengths, lora_rank=2, config=config, stop_sequences=['z'])
    assert trainer.critic is None and trainer.maker.reference.initial_model is None
    assert trainer.collector.stop_strings is not None


def test_samples_with_rewards_mean_ilql(tiny_folder, tmp_path):
    metric = {'metric_fn': lambda samples, **_: {'length': [len(s) for s in samples]}, 'max_new_tokens': 3}
    data = {'samples': [('a', 'bc'), ('a', 'bd')] * 4, 'rewards': [1.0, 0.0] * 4, 'eval_prompts': ['a']}
    trainer = train(str(tiny_folder), **data, **metric, run_dir=tmp_path, eval_interval=1)
    assert isinstance(trainer, ILQLTrainer) and isinstance(trainer.model, ILQLModel)
    assert 'eval/metrics/length@beta=100' in metrics(tmp_path)[-1]


@pytest.mark.parametrize('samples', [['ab', 'cd'] * 4, [{'instruction': 'a', 'output': 'b'}] * 8])
def test_samples_alone_mean_sft_which_is_evaluated_on_prompts(tiny_folder, samples, tmp_path):
    metric = {'metric_fn': lambda prompts, responses: {'n': [len(r) for r in responses]}, 'max_new_tokens': 3}
    trainer = train(tiny_folder, samples=samples, eval_prompts=['a', 'b'], run_dir=tmp_path, **metric)
    assert isinstance(trainer, SFTTrainer) and trainer.num_updates == 2
    first, last = metrics(tmp_path, 'eval')
    assert first['step'] == 0 and 'eval/metrics/n' in last


def test_preferences_mean_dpo_with_settings_of_a_file_an_object_or_sections(tiny_folder, tmp_path):
    (tmp_path / 'c.yaml').write_text('beta: 0.5\nloss_type: hinge\nlr: 1e-4\n')
    trainer = train(tiny_folder, preferences=PAIRS, config=tmp_path / 'c.yaml')
    assert isinstance(trainer, DPOTrainer) and trainer.optim.param_groups[0]['lr'] == 1e-4
    assert (trainer.config.beta, trainer.config.loss_type) == (0.5, 'hinge')
    trainer = train(tiny_folder, preferences=PAIRS, config=DPOConfig(beta=0.7, max_epochs=3), loss_type='ipo')
    assert (trainer.config.beta, trainer.config.loss_type, trainer.config.max_epochs) == (0.7, 'ipo', 1)
    trainer = train(tiny_folder, preferences=PAIRS, config={'method': {'beta': 0.6}})
    assert trainer.config.beta == 0.6


def test_biases_beside_lora_need_a_copy_as_reference(tiny_folder):
    trainer = train(tiny_folder, preferences=PAIRS, lora_rank=2, lora_train_bias='all')
    moved = [n for n, p in trainer.model.named_parameters() if p.requires_grad and n.endswith('.bias')]
    assert moved and trainer.num_updates


@pytest.mark.parametrize(
    'given', [{'samples': ['ab', 'cd'] * 2, 'rewards': [1.0, 0.0] * 2}, {'reward_fn': lengths, 'prompts': ['a', 'b']}]
)
def test_a_route_writes_its_model_with_the_tokenizer(tiny_folder, tmp_path, given, capsys):
    place = tmp_path / 'model'
    trainer = train(tiny_folder, save_path=place, **given)
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == f'actor written to {place}; use it: python -m chatgpt generate {place} "your prompt"'
    written, own = AutoModelForCausalLM.from_pretrained(place), next(iter(trainer.models().values())).model
    assert torch.equal(written.get_input_embeddings().weight, own.get_input_embeddings().weight)
    assert AutoTokenizer.from_pretrained(place).get_vocab() == char_tokenizer().get_vocab()
    with pytest.raises(ValueError, match='is there already and would be overwritten; give a new folder'):
        chatgpt.train('no/such-model', save_path=place, **given)


def test_the_critic_is_written_beside_the_actor_and_a_later_run_starts_from_it(tiny_folder, tmp_path):
    given = {'reward_fn': lengths, 'prompts': ['a', 'b'], 'lr': 1e-3}
    for run_dir, place in ((None, tmp_path / 'actor-critic'), (tmp_path / 'run', tmp_path / 'run' / 'critic')):
        own = train(tiny_folder, save_path=tmp_path / 'actor', run_dir=run_dir, critic_lr=1e-2, **given).critic
        saved = Critic.from_pretrained(place).state_dict()
        assert all(torch.equal(value, own.state_dict()[name]) for name, value in saved.items())
        again = train(tiny_folder, save_path=tmp_path / 'again', critic_lr=0.0, critic_from=place, **given).critic
        assert all(torch.equal(value, again.state_dict()[name]) for name, value in saved.items())
        for folder in ('actor', 'again', 'again-critic'):
            shutil.rmtree(tmp_path / folder)
        if run_dir is None:
            with pytest.raises(ValueError, match='/actor.: .*/actor-critic is there already and would be'):
                chatgpt.train('no/such-model', save_path=tmp_path / 'actor', **given)
    train(tiny_folder, save_path=tmp_path / 'bare', advantage_estimator='rloo', num_samples_per_prompt=2, **given)
    assert (tmp_path / 'bare').is_dir() and not (tmp_path / 'bare-critic').exists()


def test_prompts_and_samples_from_files(tiny_folder, tmp_path):
    (tmp_path / 'prompts.csv').write_text('prompt,answer\nab,x\ncd,y\n')
    seen = []

    def reward(prompts, responses, answer):
        seen.extend(zip(prompts, answer, strict=True))
        return [0.0] * len(prompts)

    train(tiny_folder, reward_fn=reward, prompts=tmp_path / 'prompts.csv')
    assert set(seen) == {('ab', 'x'), ('cd', 'y')}
    samples = tmp_path / 'samples.jsonl'
    samples.write_text('{"prompt": "a", "completion": "b"}\n{"prompt": "a", "completion": "c"}\n')
    assert isinstance(train(tiny_folder, samples=str(samples), rewards=[1.0, 0.0]), ILQLTrainer)
    with pytest.raises(ValueError, match='2 sequences but 1 rewards'):
        train(tiny_folder, samples=str(samples), rewards=[1.0])


# ---------------------------------------------------------------------- settings


def test_texts_are_read_as_on_a_command_line_and_other_systems_words_are_taken(tiny_folder):
    settings = {'learning_rate': '1e-4', 'max_length': '3', 'packing': 'false', 'skip_bad_records': 'yes'}
    trainer = train(tiny_folder, samples=['abcdef', ''] + ['ab'] * 3, max_epochs='2', **settings)
    assert trainer.optim.param_groups[0]['lr'] == 1e-4
    assert (trainer.config.max_epochs, trainer.config.packing, len(trainer.train_data)) == (2, False, 4)
    with pytest.raises(ValueError, match='give the model first.*; here it is model'):
        chatgpt.train(model_name_or_path=tiny_folder, samples=['a'])


def test_settings_of_the_command_reach_the_run(tiny_folder):
    """Settings of optimizers, models, environments and data."""
    given = {'weight_decay': 0.25, 'optimizer': 'sgd', 'lr': 0.1, 'critic': 'shared', 'update_timesteps': 2}
    given |= {
        'ptx_coef': 0.5,
        'num_layers_unfrozen': 1,
        'ptx_data': ['ab', 'cd'],
        'logprob_kernel': 'plain',
        'prompts': None,
    }
    environment = {'environment': 'games:countdown', 'max_new_tokens': 8, 'num_environment_workers': 3, 'max_turns': 1}
    trainer = train(tiny_folder, **environment | given, num_timesteps=2)
    group = trainer.actor_optim.param_groups[0]
    assert isinstance(trainer.actor_optim, torch.optim.SGD) and group['weight_decay'] == 0.25
    assert trainer.critic is None and trainer.shares_trunk and len(trainer.pretrain_data) == 2
    assert trainer.strategy.unwrap(trainer.actor).logprob_kernel == 'plain'
    assert (trainer.phase, trainer.engine.runner.settings.num_workers) == (1, 3)


class Constant:
    """A scorer that is no function."""

    def score(self, samples, strategy):
        return [1.0] * len(samples)


def test_a_weighted_list_of_rewards_reaches_the_trainer(tiny_folder):
    halves = [(0.5, Constant()), (1.0, lengths)]
    settings = {'advantage_estimator': 'gdpo', 'num_samples_per_prompt': 2, 'kl_in': 'loss', 'strategy': 'naive'}
    trainer = train(tiny_folder, reward_fn=halves, **settings)
    scored = [(e.score, 0.5 + len(e.response_text)) for e in trainer.last_experiences]
    assert scored and all(score == pytest.approx(by_hand) for score, by_hand in scored)


@pytest.mark.parametrize(
    ('critic_from', 'frozen', 'is_scorer'), [('reward_model', True, True), ('actor', False, False)]
)
def test_a_reward_model_scores_the_evaluation_and_is_where_the_critic_starts(
    tiny_folder, tmp_path, critic_from, frozen, is_scorer
):
    """The value of a whole sequence is its score (arXiv 2403.17031), and a frozen reward model gives a trainable
    critic."""
    torch.manual_seed(1)
    reward = RewardModel(GPTActor(config=tiny_config('gpt2', positions=48)).model).requires_grad_(not frozen)
    before = {name: tensor.clone() for name, tensor in reward.state_dict().items() if name.startswith('model.')}
    evaluation = {'eval_prompts': ['c'], 'run_dir': tmp_path, 'eval_interval': 1}
    trainer = train(tiny_folder, reward_fn=reward, critic_from=critic_from, critic_lr=0.0, **evaluation)
    assert all(not p.requires_grad for p in reward.parameters()) and 'eval/score_mean' in metrics(tmp_path)[-1]
    critic = trainer.strategy.unwrap(trainer.critic)
    assert all(p.requires_grad for p in critic.parameters())
    assert all(torch.equal(critic.state_dict()[name], tensor) for name, tensor in before.items()) == is_scorer
    assert torch.equal(critic.value_head.weight, reward.value_head.weight) == is_scorer
    assert all(torch.equal(reward.state_dict()[name], tensor) for name, tensor in before.items())


def test_models_in_memory_need_a_tokenizer_and_adapters_of_actor_and_critic_are_apart(tiny_folder):
    given, fresh = AutoModelForCausalLM.from_pretrained(tiny_folder), GPT2LMHeadModel(tiny_config('gpt2', positions=48))
    with pytest.raises(ValueError, match='give tokenizer='):
        chatgpt.train(fresh, samples=['ab'])
    for tokenizer in (char_tokenizer(), tiny_folder):
        assert train(fresh, samples=['ab'] * 4, tokenizer=tokenizer).num_updates == 1
    trainer = train(given, reward_fn=lengths, lora_rank=2)  # the folder has a tokenizer
    actor, critic = ({id(p) for p in m.parameters()} for m in trainer.models().values())
    assert trainer.critic is not None and not actor & critic


# ---------------------------------------------------------------------- errors, failures and resumes


@pytest.mark.parametrize(
    ('given', 'sentence'),
    [
        ({}, 'give one of reward_fn .* got none of them'),
        ({'reward_fn': len, 'samples': ['a']}, 'got reward_fn and samples'),
        ({'reward_fn': len, 'promts': ['a']}, "'promts' is not an argument or a setting; did you mean prompts"),
        ({'reward_fn': len, 'prompts': ['a'], 'tau': 1}, "'tau' is not a setting of ppo; it is one of ilql"),
        ({'samples': ['a'], 'prompts': ['b']}, 'prompts go with reward_fn'),
        ({'samples': ['a'], 'rewards': [1.0, 2.0]}, '1 samples but 2 rewards'),
        ({'samples': ['a'], 'max_epoch': 3}, "'max_epoch' is not a setting of sft; did you mean max_epochs"),
        ({'samples': ['a'], 'metric_fn': len}, 'metric_fn measures .* give eval_prompts too'),
        ({'samples': ['a'], 'stop_sequences': ['x']}, 'stop_sequences would change nothing'),
        ({'samples': ['a'], 'seed': 2}, "'seed' is a setting of the command; here it is of the strategy"),
        ({'reward_fn': len, 'prompts': ['a'], 'num_episodes': 2}, 'here give num_timesteps'),
        ({'samples': ['a'], 'lr': 'fast'}, "lr: 'fast' is no number"),
        ({'reward_fn': len, 'prompts': ['a'], 'critic': 'thin air'}, "critic: 'thin air' is none of: own"),
        (
            {'samples': ['a'], 'config': {'train.lr': 1e-3, 'optimizer.lr': 1e-4}},
            'train.lr and optimizer.lr both set lr',
        ),
        ({'samples': ['a'], 'config': SFTConfig(), 'rewards': [1.0]}, 'config is a SFTConfig, .* trains with a ILQL'),
        ({'samples': ['a'], 'config': 'nowhere.yaml'}, 'there is no such file'),
        ({'reward_fn': len, 'prompts': ['a'], 'max_turns': 3}, 'max_turns=3 is about an environment'),
        (GAME | {'eval_episodes': 2, 'eval_prompts': ['a']}, 'with eval_prompts leave it out'),
        (GAME | {'samples': ['a']}, 'leave samples out'),
        ({'samples': ['a'], 'checkpoint_interval': 2}, 'checkpoint_interval would write to run_dir; give run_dir'),
        ({'reward_fn': len, 'prompts': ['a'], 'ema_decay': 0.9}, 'ema_decay would write to run_dir'),
        ({'samples': ['a'], 'early_stopping_patience': 2}, r'give callbacks=\[StopOnPlateau'),
        (GAME | {'reward_fn': len}, 'say how they add up by reward_weights'),
        (GAME | {'reward_fn': len, 'reward_weights': {'reward': 1.0}}, 'needs one weight, by the name'),
        (GAME | {'reward_weights': {'reward_fn': 1.0}}, 'there is no reward_fn'),
    ],
)
def test_mistakes_before_anything_is_loaded(given, sentence):
    with pytest.raises(ValueError, match=sentence):
        chatgpt.train('no/such-model', **given)


def test_data_that_cannot_be_used_is_named_before_the_model_is_loaded(tmp_path, tiny_folder, monkeypatch):
    monkeypatch.setattr('chatgpt.launch.recipes.make_trainer', None)
    (tmp_path / 'p.jsonl').write_text('{"prompt": "a"}\n{"prompt": [{"role": "user", "content": "b\\ud800"}]}\n')
    for given, message in (
        ({'prompts': tmp_path / 'p.jsonl'}, r'p.jsonl, line 2: the text of .prompt. holds half of a surrogate pair'),
        ({'prompts': ['a', 'b\ud800']}, 'row 2: the text of .prompt. holds half of a surrogate pair(?!.*skip_bad)'),
        ({'reward_fn': lambda prompts, responses, answer: []}, "needs a column 'answer' beside the prompts; there are"),
    ):
        with pytest.raises(ValueError, match=message):
            train(tiny_folder, **{'reward_fn': lengths} | given)
    for given in ({'max_new_tokens': 48}, {'max_new_tokens': None}):  # the default is 64
        with pytest.raises(ValueError, match='prompt 0 has 1 tokens; with max_new_tokens=.* the context of 48'):
            train(tiny_folder, prompts=['a'], reward_fn=lengths, **given)
    with pytest.raises(ValueError, match='eval prompt 1 has 46 tokens; with max_new_tokens=3 it passes the context'):
        train(tiny_folder, samples=['a', 'b'], eval_prompts=['a', 'ab' * 23], max_new_tokens=3)
    with pytest.raises(TypeError, match='not callable'):  # max_length bounds the response too
        train(tiny_folder, prompts=['a'], reward_fn=lengths, max_length=40, max_new_tokens=64)
    with pytest.raises(ValueError, match='max_length=100 is beyond the context of the model, 48 tokens; give at most'):
        train(tiny_folder, samples=['a', 'b'], max_length=100)
    with pytest.raises(ValueError, match='skip_bad_records=True'):
        train(tiny_folder, preferences=[*PAIRS, {'prompt': 'a', 'chosen': 'b'}])


def fails_in_phase_2() -> Any:
    calls = []

    def reward(prompts: list[str], responses: list[str]) -> list[float]:
        calls.append(0)
        if len(calls) == 2:
            raise KeyError('no answer')
        return lengths(prompts, responses)

    return reward


def test_a_run_that_fails_without_a_run_dir_keeps_its_weights_or_says_that_it_has_none(tiny_folder, tmp_path, capfd):
    options = {'num_timesteps': 3, 'lr': 1e-3}
    with pytest.raises(RewardFunctionError):
        train(tiny_folder, reward_fn=fails_in_phase_2(), save_path=tmp_path / 'model', **options)
    message = capfd.readouterr().err
    assert f'the weights after the last optimizer step are kept in {tmp_path}/model-cut-short' in message
    assert not (tmp_path / 'model').exists()
    kept, start = (AutoActor(pretrained=f).state_dict() for f in (tmp_path / 'model-cut-short', tiny_folder))
    assert any(not torch.equal(kept[name], start[name]) for name in start)
    with pytest.raises(RewardFunctionError):
        train(tiny_folder, reward_fn=fails_in_phase_2(), **options)
    assert 'phase 2; it has no run_dir, so there is no checkpoint of it' in capfd.readouterr().err


def test_a_run_resumes_where_it_stopped_and_two_runs_are_not_mixed(tiny_folder, tmp_path):
    def run(steps: int, run_dir: str, **options: Any) -> Any:
        settings = {'prompts': ['a', 'bc', 'd'], 'lr': 1e-3, 'run_dir': tmp_path / run_dir}
        return train(tiny_folder, reward_fn=lengths, num_timesteps=steps, **settings, **options)

    straight = run(3, 'straight')
    run(2, 'parts')
    with pytest.raises(ValueError, match="parts' holds checkpoints of an earlier run, up to step-00000002: go on with"):
        run(3, 'parts')
    with pytest.raises(ValueError, match="resume='auto' looks into run_dir"):
        train(tiny_folder, samples=['a'], resume='auto')
    again = run(3, 'parts', resume='auto')
    assert again.phase == straight.phase == 3
    for mine, theirs in zip(again.actor.parameters(), straight.actor.parameters(), strict=True):
        assert torch.equal(mine, theirs)
