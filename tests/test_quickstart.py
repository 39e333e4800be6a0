"""`chatgpt.train`: each route on a tiny model, both conventions of functions, and what is refused before anything is
loaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import chatgpt
from chatgpt.nn import AutoActor, GPTActor, ILQLModel
from chatgpt.testing.fakes import char_tokenizer, tiny_config
from chatgpt.testing.processes import run_distributed
from chatgpt.trainer import DPOConfig, DPOTrainer, ILQLTrainer, PPOTrainer, SFTConfig, SFTTrainer
from chatgpt.trainer.callbacks import ProgressBar
from chatgpt.trainer.experience import RewardFunctionError

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
        str(folder),
        reward_fn=reward,
        prompts=prompts,
        eval_prompts=prompts[:2],
        metric_fn=metric,
        run_dir=tmp_path,
        eval_interval=1,
        lr=1e-3,
        **PPO,
        **QUIET,
    )
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
        folder,
        reward_fn=lambda prompts, responses: [1.0 * len(r) for r in responses],
        prompts=['a', 'b'],
        lora_rank=2,
        config={'method.advantage_estimator': 'rloo', 'num_samples_per_prompt': 2},
        stop_sequences=['z'],
        **PPO,
        **QUIET,
    )
    assert trainer.critic is None
    assert trainer.maker.reference.initial_model is None
    assert trainer.collector.stop_strings is not None


def test_samples_with_rewards_mean_ilql(folder, tmp_path):
    trainer = chatgpt.train(
        str(folder),
        samples=[('a', 'bc'), ('a', 'bd')] * 4,
        rewards=[1.0, 0.0] * 4,
        eval_prompts=['a'],
        run_dir=tmp_path,
        eval_interval=1,
        metric_fn=lambda samples, **_: {'length': [len(s) for s in samples]},
        max_epochs=1,
        train_batch_size=4,
        max_new_tokens=3,
        **QUIET,
    )
    assert isinstance(trainer, ILQLTrainer)
    assert isinstance(trainer.model, ILQLModel)
    assert 'eval/metrics/length@beta=100' in metrics(tmp_path)[-1]


@pytest.mark.parametrize('samples', [['ab', 'cd'] * 4, [{'instruction': 'a', 'output': 'b'}] * 8])
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


@pytest.mark.parametrize(
    'given',
    [
        {'samples': ['ab', 'cd'] * 2},
        {'samples': ['ab', 'cd'] * 2, 'rewards': [1.0, 0.0] * 2},
        {'preferences': [{'prompt': 'a', 'chosen': 'bc', 'rejected': 'd'}] * 2},
        {'reward_fn': lambda prompts, responses: [1.0] * len(prompts), 'prompts': ['a', 'b', 'c', 'd'], **PPO},
    ],
)
def test_every_route_writes_its_model_with_the_tokenizer(folder, tmp_path, given, capsys):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    trainer = chatgpt.train(folder, save_path=tmp_path / 'model', max_epochs=1, **given, **QUIET)
    place = tmp_path / 'model'
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == f'actor written to {place}; use it: python -m chatgpt generate {place} "your prompt"'
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / 'model')
    bare = next(iter(trainer.models().values()))
    assert torch.equal(loaded.get_input_embeddings().weight, bare.model.get_input_embeddings().weight)
    assert AutoTokenizer.from_pretrained(tmp_path / 'model').get_vocab() == char_tokenizer().get_vocab()
    with pytest.raises(ValueError, match='is there already and would be overwritten; give a new folder'):
        chatgpt.train('no/such-model', save_path=tmp_path / 'model', **given)


def test_texts_are_read_as_on_a_command_line(folder):
    settings = {'lr': '1e-4', 'max_epochs': '2', 'max_length': '3', 'packing': 'false', 'skip_bad_records': 'yes'}
    trainer = chatgpt.train(folder, samples=['abcdef', ''] + ['ab'] * 3, **settings, **QUIET)
    assert trainer.optim.param_groups[0]['lr'] == 1e-4
    assert (trainer.config.max_epochs, trainer.config.packing, len(trainer.train_data)) == (2, False, 4)


def test_a_prompt_that_is_no_text_is_named_before_the_model_is_loaded(tmp_path, folder, monkeypatch):
    monkeypatch.setattr('chatgpt.launch.recipes.make_trainer', None)
    (tmp_path / 'p.jsonl').write_text('{"prompt": "a"}\n{"prompt": [{"role": "user", "content": "b\\ud800"}]}\n')
    with pytest.raises(ValueError, match=r'p.jsonl, line 2: the text of .prompt. holds half of a surrogate pair'):
        chatgpt.train(folder, reward_fn=lambda prompts, responses: [], prompts=tmp_path / 'p.jsonl', **QUIET)
    with pytest.raises(ValueError, match='row 2: the text of .prompt. holds half of a surrogate pair(?!.*skip_bad)'):
        chatgpt.train(folder, reward_fn=lambda prompts, responses: [], prompts=['a', 'b\ud800'], **QUIET)
    with pytest.raises(ValueError, match="needs a column 'answer' beside the prompts; there are none"):
        chatgpt.train(folder, reward_fn=lambda prompts, responses, answer: [], prompts=['a'], **QUIET)


def test_a_model_in_memory_needs_a_tokenizer(folder):
    from transformers import AutoModelForCausalLM, GPT2LMHeadModel

    assert (
        chatgpt.train(
            AutoModelForCausalLM.from_pretrained(folder), samples=['ab'] * 4, max_epochs=1, **QUIET
        ).num_updates
        == 1
    )
    fresh = GPT2LMHeadModel(tiny_config('gpt2', positions=48))
    with pytest.raises(ValueError, match='give tokenizer='):
        chatgpt.train(fresh, samples=['ab'])
    assert chatgpt.train(fresh, samples=['ab'] * 4, tokenizer=char_tokenizer(), max_epochs=1, **QUIET).num_updates == 1


@pytest.mark.parametrize(
    ('given', 'sentence'),
    [
        ({}, 'give one of reward_fn .* got none of them'),
        ({'reward_fn': len, 'samples': ['a']}, 'got reward_fn and samples'),
        ({'reward_fn': len}, 'a reward_fn needs prompts'),
        ({'reward_fn': len, 'promts': ['a']}, "'promts' is not an argument or a setting; did you mean prompts"),
        ({'sample': ['a']}, "'sample' is not an argument or a setting; did you mean samples"),
        ({'reward_fn': len, 'prompts': ['a'], 'tau': 1}, "'tau' is not a setting of ppo; it is one of ilql"),
        ({'rewards': [1.0], 'preferences': []}, 'rewards belong to samples'),
        ({'samples': ['a'], 'prompts': ['b']}, 'prompts go with reward_fn'),
        ({'samples': ['a'], 'rewards': [1.0, 2.0]}, '1 samples but 2 rewards'),
        ({'samples': ['a'], 'max_epoch': 3}, "'max_epoch' is not a setting of sft; did you mean max_epochs"),
        ({'samples': ['a'], 'metric_fn': len}, 'metric_fn measures .* give eval_prompts too'),
        (
            {'samples': ['a'], 'stop_sequences': ['x'], 'max_new_tokens': 3},
            'stop_sequences, max_new_tokens would change nothing',
        ),
        ({'samples': ['a'], 'seed': 2}, "'seed' is a setting of the command; here it is of the strategy"),
        ({'reward_fn': len, 'prompts': ['a'], 'num_episodes': 2}, 'here give num_timesteps'),
        ({'reward_fn': len, 'prompts': ['a'], 'eps_clip': -1.0}, 'eps_clip=-1.0'),
        ({'samples': ['a'], 'lr': '-1e-4'}, 'lr=-0.0001 must not be negative'),
        ({'samples': ['a'], 'lr': 'fast'}, "lr: 'fast' is no number"),
        (
            {'reward_fn': len, 'prompts': ['a'], 'critic_from': 'thin air'},
            "critic_from: 'thin air' is none of: reward_model, actor",
        ),
        (
            {'samples': ['a'], 'config': {'train': {'lr': 1e-3}, 'optimizer.lr': 1e-4}},
            'train.lr and optimizer.lr both set lr; give one',
        ),
        (
            {'samples': ['a'], 'config': SFTConfig(), 'rewards': [1.0]},
            'config is a SFTConfig, .* trains with a ILQLConfig',
        ),
        ({'samples': ['a'], 'config': 'nowhere.yaml'}, 'there is no such file'),
    ],
)
def test_mistakes_before_anything_is_loaded(given, sentence):
    with pytest.raises(ValueError, match=sentence):
        chatgpt.train('no/such-model', **given)


@pytest.mark.parametrize(
    ('critic_from', 'frozen', 'is_scorer'), [('reward_model', True, True), ('actor', False, False)]
)
def test_a_reward_model_scores_the_evaluation_and_is_where_the_critic_starts(
    folder, tmp_path, critic_from, frozen, is_scorer
):
    """V of a whole sequence is its score (arXiv 2403.17031), and a reward model that was frozen before gives a critic
    that learns."""
    from chatgpt.nn import RewardModel

    torch.manual_seed(1)
    reward = RewardModel(GPTActor(config=tiny_config('gpt2', positions=48)).model).requires_grad_(not frozen)
    before = {name: tensor.clone() for name, tensor in reward.state_dict().items() if name.startswith('model.')}
    settings = {'critic_from': critic_from, 'critic_lr': 0.0, 'num_timesteps': 1, 'prompts': ['a', 'b']}
    settings |= {'eval_prompts': ['c'], 'run_dir': tmp_path, 'eval_interval': 1}
    trainer = chatgpt.train(folder, reward_fn=reward, **{**PPO, **settings}, **QUIET)
    assert all(not p.requires_grad for p in reward.parameters()) and 'eval/score_mean' in metrics(tmp_path)[-1]
    critic = trainer.strategy.unwrap(trainer.critic)
    assert all(p.requires_grad for p in critic.parameters())
    same = all(torch.equal(critic.state_dict()[name], tensor) for name, tensor in before.items())
    assert same == is_scorer
    assert torch.equal(critic.value_head.weight, reward.value_head.weight) == is_scorer
    assert all(torch.equal(reward.state_dict()[name], tensor) for name, tensor in before.items())


def test_adapters_of_actor_and_critic_are_apart_for_a_model_in_memory(folder):
    from transformers import AutoModelForCausalLM

    given = AutoModelForCausalLM.from_pretrained(folder)
    trainer = chatgpt.train(
        given, reward_fn=lambda prompts, responses: [1.0] * len(responses), prompts=['a'], lora_rank=2, **PPO, **QUIET
    )
    actor, critic = ({id(p) for p in m.parameters()} for m in trainer.models().values())
    assert trainer.critic is not None and not actor & critic


def test_max_length_of_ppo_counts_prompt_and_response(folder):
    seen = []

    def reward(prompts, responses):
        seen.extend(len(p) + len(r) for p, r in zip(prompts, responses, strict=True))
        return [0.0] * len(responses)

    settings = {**PPO, 'max_new_tokens': None, 'max_length': 6, 'num_timesteps': 1}
    chatgpt.train(folder, reward_fn=reward, prompts=['abcd', 'ab'], **settings, **QUIET)
    assert max(seen) <= 6 and len(seen) == 4


def test_prompts_and_samples_from_files(folder, tmp_path):
    (tmp_path / 'prompts.csv').write_text('prompt,answer\nab,x\ncd,y\n')
    seen = []

    def reward(prompts, responses, answer):
        seen.extend(zip(prompts, answer, strict=True))
        return [0.0] * len(prompts)

    chatgpt.train(folder, reward_fn=reward, prompts=tmp_path / 'prompts.csv', **PPO, **QUIET)
    assert set(seen) == {('ab', 'x'), ('cd', 'y')}
    (tmp_path / 'samples.jsonl').write_text('{"prompt": "a", "completion": "b"}\n{"prompt": "a", "completion": "c"}\n')
    trainer = chatgpt.train(folder, samples=str(tmp_path / 'samples.jsonl'), rewards=[1.0, 0.0], max_epochs=1, **QUIET)
    assert isinstance(trainer, ILQLTrainer)
    with pytest.raises(ValueError, match='2 sequences but 1 rewards'):
        chatgpt.train(folder, samples=str(tmp_path / 'samples.jsonl'), rewards=[1.0], max_epochs=1, **QUIET)


def test_sft_and_dpo_are_evaluated_on_prompts(folder, tmp_path):
    given = {
        'eval_prompts': ['a', 'b'],
        'metric_fn': lambda prompts, responses: {'n': [len(r) for r in responses]},
        'max_new_tokens': 3,
    }
    data = {
        'sft': {'samples': ['ab'] * 4},
        'dpo': {'preferences': [{'prompt': 'a', 'chosen': 'bc', 'rejected': 'd'}] * 4, 'lora_rank': 2},
    }
    for kind, source in data.items():
        chatgpt.train(folder, **source, **given, run_dir=tmp_path / kind, max_epochs=1, **QUIET)
        steps = [json.loads(line) for line in (tmp_path / kind / 'eval.jsonl').read_text().splitlines()]
        assert steps[0]['step'] == 0 and 'eval/metrics/n' in steps[-1] and len(steps) == 2


def test_a_config_object_and_sections(folder):
    pairs = [{'prompt': 'a', 'chosen': 'bc', 'rejected': 'd'}] * 4
    trainer = chatgpt.train(
        folder, preferences=pairs, config=DPOConfig(beta=0.7, max_epochs=1), loss_type='ipo', **QUIET
    )
    assert (trainer.config.beta, trainer.config.loss_type, trainer.config.max_epochs) == (0.7, 'ipo', 1)
    trainer = chatgpt.train(folder, preferences=pairs, config={'method': {'beta': 0.6}, 'train.max_epochs': 1}, **QUIET)
    assert (trainer.config.beta, trainer.config.max_epochs) == (0.6, 1)


def run_on_ranks(folder: str, out: str) -> None:
    from chatgpt.strategies import DDPStrategy

    with DDPStrategy(seed=42, device='cpu') as strategy:
        run(folder, out, strategy)


def run(folder: str, out: str, strategy) -> None:
    chatgpt.train(
        folder,
        reward_fn=lambda samples, **_: [float(len(s)) for s in samples],
        prompts=['a', 'bc', 'd'],
        eval_prompts=['c', 'ab', 'd'],
        strategy=strategy,
        run_dir=out,
        eval_interval=1,
        lr=1e-3,
        critic_lr=1e-3,
        **PPO,
        **QUIET,
    )


def test_two_ranks_report_what_one_does(folder, tmp_path):
    run(str(folder), str(tmp_path / 'one'), None)
    run_distributed(run_on_ranks, 2, str(folder), str(tmp_path / 'two'), init_group=True)
    one, two = metrics(tmp_path / 'one'), metrics(tmp_path / 'two')
    assert len(one) == len(two) == 2
    for name in ('eval/score_mean', 'rollout/score_mean', 'ppo/policy_loss'):
        assert [m[name] for m in two] == pytest.approx([m[name] for m in one], rel=1e-3, abs=1e-5), name


# ---------------------------------------------------------------------- what is lost, and what is said before


def fails_in_phase(number: int) -> Any:
    calls = []

    def reward(prompts: list[str], responses: list[str]) -> list[float]:
        calls.append(0)
        if len(calls) == number:
            raise KeyError('no answer')
        return [float(len(r)) for r in responses]

    return reward


def test_a_run_that_fails_without_a_run_dir_keeps_its_weights_or_says_that_it_has_none(folder, tmp_path, capfd):
    options = PPO | QUIET | {'prompts': ['a', 'bc'], 'num_timesteps': 3, 'lr': 1e-3}
    with pytest.raises(RewardFunctionError):
        chatgpt.train(folder, reward_fn=fails_in_phase(2), save_path=tmp_path / 'model', **options)
    told = capfd.readouterr().err
    assert f'the weights after the last optimizer step are kept in {tmp_path}/model-cut-short' in told
    assert not (tmp_path / 'model').exists()
    kept, start = (AutoActor(pretrained=f).state_dict() for f in (tmp_path / 'model-cut-short', folder))
    assert any(not torch.equal(kept[name], start[name]) for name in start)
    with pytest.raises(RewardFunctionError):
        chatgpt.train(folder, reward_fn=fails_in_phase(2), **options)
    assert 'phase 2; it has no run_dir, so there is no checkpoint of it' in capfd.readouterr().err


def test_the_place_of_the_model_is_tried_before_training(folder, tmp_path):
    (tmp_path / 'file').touch()
    reward = fails_in_phase(1)
    for place, reason in ((tmp_path / 'file' / 'x', 'Not a directory'), (tmp_path / 'file', 'there already')):
        with pytest.raises(ValueError, match=reason):
            chatgpt.train(folder, reward_fn=reward, prompts=['a'], save_path=place)


def test_samples_are_cut_to_the_models_context(folder):
    with pytest.warns(UserWarning, match='1 of 2 records are longer than 48 tokens and were cut'):
        trainer = chatgpt.train(folder, samples=['ab ' * 100, 'a b'], max_epochs=1, **QUIET)
    assert max(r.num_tokens for r in trainer.train_data) == 48
    with pytest.raises(ValueError, match='max_length=100 is beyond the context of the model, 48 tokens; give at most'):
        chatgpt.train(folder, samples=['a', 'b'], max_length=100)


def test_bad_rows_are_left_out_when_that_is_asked_for(folder):
    rows = [{'prompt': 'a', 'chosen': 'b', 'rejected': 'c'}] * 2 + [{'prompt': 'a', 'chosen': 'b'}]
    with pytest.raises(ValueError, match='skip_bad_records=True'):
        chatgpt.train(folder, preferences=rows, max_epochs=1, **QUIET)
    trainer = chatgpt.train(folder, preferences=rows, max_epochs=1, skip_bad_records=True, **QUIET)
    assert len(trainer.train_data) == 2


def test_other_systems_words_are_taken_or_answered(folder):
    trainer = chatgpt.train(folder, samples=['a'] * 2, learning_rate='1e-4', num_train_epochs=2, **QUIET)
    assert (trainer.optim.param_groups[0]['lr'], trainer.config.max_epochs) == (1e-4, 2)
    with pytest.raises(ValueError, match="'output_dir' is not a setting of sft; here it is save_path"):
        chatgpt.train(folder, samples=['a'], output_dir='x')
    with pytest.raises(ValueError, match='learning_rate and lr both set lr; give one'):
        chatgpt.train(folder, samples=['a'], learning_rate=1.0, lr=1.0)
    with pytest.raises(ValueError, match='give the model first.*; here it is model'):
        chatgpt.train(model_name_or_path=folder, samples=['a'])


def test_a_run_goes_on_where_it_stopped_and_two_runs_are_not_mixed(folder, tmp_path):
    def train(steps: int, run_dir: str, **options: Any) -> Any:
        settings = PPO | QUIET | {'num_timesteps': steps, 'lr': 1e-3, 'run_dir': tmp_path / run_dir}
        return chatgpt.train(
            folder, reward_fn=lambda p, r: [float(len(x)) for x in r], prompts=['a', 'bc', 'd'], **settings, **options
        )

    straight = train(3, 'straight')
    train(2, 'parts')
    with pytest.raises(
        ValueError, match="parts' holds checkpoints of an earlier run, up to step-00000002: go on with re"
    ):
        train(3, 'parts')
    with pytest.raises(ValueError, match="resume='auto' looks into run_dir"):
        chatgpt.train(folder, samples=['a'], resume='auto')
    again = train(3, 'parts', resume='auto')
    assert again.phase == straight.phase == 3
    for mine, theirs in zip(again.actor.parameters(), straight.actor.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_settings_of_the_command_reach_the_run(folder):
    """Of optimizers, models, environments and data."""
    given = {'weight_decay': 0.25, 'optimizer': 'sgd', 'critic': 'shared', 'update_timesteps': 2, 'ptx_coef': 0.5}
    given |= {'num_layers_unfrozen': 1, 'ptx_data': ['ab', 'cd'], 'logprob_kernel': 'plain'}
    environment = {'environment': 'games:countdown', 'max_new_tokens': 8, 'num_environment_workers': 3, 'max_turns': 1}
    trainer = chatgpt.train(folder, **PPO | environment | given, **QUIET)
    group = trainer.actor_optim.param_groups[0]
    assert isinstance(trainer.actor_optim, torch.optim.SGD) and group['weight_decay'] == 0.25
    assert trainer.critic is None and trainer.shares_trunk and len(trainer.pretrain_data) == 2
    assert trainer.strategy.unwrap(trainer.actor).logprob_kernel == 'plain'
    assert (trainer.phase, trainer.engine.runner.settings.num_workers) == (1, 3)


def test_a_weighted_list_of_rewards_reaches_the_trainer(folder):
    halves = [(0.5, lambda prompts, responses: [1.0] * len(responses))]
    settings = PPO | {'advantage_estimator': 'gdpo', 'num_samples_per_prompt': 2, 'kl_in': 'loss', 'num_timesteps': 1}
    halves.append((1.0, lambda prompts, responses: [float(len(r)) for r in responses]))
    trainer = chatgpt.train(folder, reward_fn=halves, prompts=['a', 'b'], strategy='naive', **settings, **QUIET)
    scored = [(e.score, 0.5 + len(e.response_text)) for e in trainer.last_experiences]
    assert scored and all(score == pytest.approx(by_hand) for score, by_hand in scored)
