"""The command `critic`: a critic from the recorded responses of runs, and the runs that start from it."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from chatgpt.functional.ppo import explained_variance
from chatgpt.launch import recipes
from chatgpt.launch.cli.init import config_text, example
from chatgpt.launch.config_file import parse_run
from chatgpt.launch.inputs import read_inputs
from chatgpt.launch.planning import setup_of
from chatgpt.launch.runs import CriticRun, PPORun
from chatgpt.monitor.report import what_improved
from chatgpt.monitor.run_folder import RunFolder
from chatgpt.monitor.run_folder.rollouts import read_rollouts, write_rollouts
from chatgpt.nn import AutoRM, Critic
from chatgpt.plan import make_plan
from chatgpt.testing.processes import run_distributed
from chatgpt.testing.tiny import tiny_sequences
from chatgpt.trainer import returned
from chatgpt.trainer.objectives.config import CriticConfig
from chatgpt.trainer.objectives.critic import CriticObjective
from chatgpt.types import Sequence

REWARD = """def begins(prompts, responses):
    return [1.0 if p[0] == 'a' else -1.0 for p in prompts]
"""


def ppo(folder: Path, base: Path, **settings: Any) -> PPORun:
    """Returns a run of two phases with 16 prompts of two kinds, twice each; the kind is the reward."""
    lines = [{'prompt': f'{"ab"[i % 2]} {"cdefghij"[i // 2]}'} for i in range(16)]
    (folder.parent / 'prompts.jsonl').write_text(''.join(json.dumps(line) + '\n' for line in lines))
    (folder.parent / 'reward.py').write_text(REWARD)
    given = {'pretrain': base, 'reward_fn': f'{folder.parent}/reward.py:begins', 'kl_coef': 0.0, 'lr': 1e-4}
    given |= {
        'experience_batch_size': 16,
        'train_batch_size': 8,
        'max_new_tokens': 4,
        'num_episodes': 1,
        'max_epochs': 1,
    }
    given |= {'save_path': folder, 'max_timesteps': 2, 'update_timesteps': 1} | settings
    argv = [str(folder.parent / 'prompts.jsonl'), *(f'--{name}={value}' for name, value in given.items())]
    return parse_run(PPORun, description='', positional='prompt_path', argv=argv, method='ppo')


def critic(*folders: Path, **settings: Any) -> CriticRun:
    given = {'lr': 0.01, 'max_epochs': 6, 'log_interval': 3, 'validation_percentage': 25} | settings
    argv = [*map(str, folders), *(f'--{name}={value}' for name, value in given.items())]
    return parse_run(CriticRun, description='', positional='rollouts', argv=argv, method='critic')


def ready(run: Any) -> Any:
    run.fill_defaults()
    run.validate()
    return run


@pytest.fixture(scope='module')
def played(tmp_path_factory: pytest.TempPathFactory, tiny_folder: Path) -> Path:
    """Returns the folder of a run of PPO with two recorded phases."""
    folder = tmp_path_factory.mktemp('runs') / 'ppo'
    recipes.execute(ready(ppo(folder, tiny_folder)))
    return folder


def test_values_of_new_prompts_are_learned_saved_and_begun_from(played, tiny_folder, tmp_path, capsys):
    trainer = recipes.execute(ready(critic(played, save_path=tmp_path / 'critic')))
    shown = capsys.readouterr().out
    assert '24 responses to 12 prompts to learn from, 8 to 4 other prompts to evaluate on' in shown
    lines = [json.loads(line) for line in (tmp_path / 'critic/eval.jsonl').read_text().splitlines()]
    assert [line['step'] for line in lines] == [0, 6]
    before, after = (line['eval/explained_variance'] for line in lines)
    assert before < 0.1 and after > 0.5, 'the kind of a prompt tells its reward'
    assert f'eval/explained_variance {after:z.4g}' in shown and '--critic_from' in shown
    assert what_improved(RunFolder(tmp_path / 'critic')).startswith('explained variance ')
    assert 'Explained variance' in (tmp_path / 'critic/report.html').read_text()
    saved = tmp_path / 'critic/critic'
    assert 'a value model' in (saved / 'README.md').read_text()
    later = ppo(tmp_path / 'next', tiny_folder, critic_from=saved, critic_lr=0.0, max_timesteps=1)
    start = recipes.execute(ready(later)).critic
    for name, tensor in trainer.strategy.unwrap(trainer.model).state_dict().items():
        torch.testing.assert_close(start.state_dict()[name], tensor, rtol=0, atol=0)
    (row,) = [json.loads(line) for line in (tmp_path / 'next/metrics.jsonl').read_text().splitlines()]
    assert row['ppo/explained_variance'] > 0.5


def test_returns_are_those_of_the_recorded_rewards_by_hand():
    ids, mask = torch.tensor([5, 6, 7, 8]), torch.tensor([True, False, True, True])
    one = Sequence(prompt_ids=torch.tensor([3]), response_ids=ids, response_mask=mask)
    (record,) = returned([one], [torch.tensor([1.0, math.nan, 2.0, 4.0])], gamma=0.5)
    assert record.returns.tolist() == [1.0 + 0.5 * 4.0, 0.0, 2.0 + 0.5 * 4.0, 4.0]


@pytest.mark.parametrize('source', ['rewards', 'score'])
def test_prompts_of_all_folders_are_split_and_their_returns_read(played, tiny_folder, tmp_path, source):
    rows = read_rollouts(played, [1])
    for row in rows:  # the same prompts in a second run, with another reward
        row |= {'rewards': [0.25] * len(row['mask']), 'shaped_score': 3.0}
    rows[0] |= {'mask': [False] * len(rows[0]['mask'])}
    write_rollouts(tmp_path / 'second/rollouts', 1, rows)
    run = critic(played, tmp_path / 'second', returns_from=source, seed=3)
    inputs = read_inputs(run)
    train, held = ({tuple(r.prompt_ids.tolist()) for r in part} for part in (inputs.train, inputs.validation))
    assert len(train) == 12 and len(held) == 4 and not train & held
    assert len(inputs.train) + len(inputs.validation) == 16 + 16 + 15
    begins = [float(r.returns[0]) for r in (*inputs.train, *inputs.validation) if r.num_actions == 4]
    kinds = {-1.0, 1.0, 3.0 if source == 'score' else 4 * 0.25}
    assert set(begins) == kinds
    other = read_inputs(critic(played, tmp_path / 'second', seed=4))
    assert {tuple(r.prompt_ids.tolist()) for r in other.validation} != held


def test_explained_variance_of_means_is_that_of_all_tokens():
    objective = CriticObjective(CriticConfig())
    generator = torch.Generator().manual_seed(0)
    values, returns = (torch.randn(50, generator=generator).double() for _ in range(2))
    error = values - returns
    means = {'return_mean': returns, 'error_mean': error}
    means |= {'return_square_mean': returns**2, 'error_square_mean': error**2}
    found = objective.derived({name: float(x.mean()) for name, x in means.items()})['explained_variance']
    want = explained_variance(values, returns, torch.ones(50, dtype=torch.bool))
    assert found == pytest.approx(float(want))
    constant = {'return_mean': 0.1, 'return_square_mean': 0.1**2, 'error_mean': 0.0, 'error_square_mean': 1.0}
    assert objective.derived(constant) == {'explained_variance': 0.0}


BINS = {'critic_loss': 'categorical', 'critic_loss_settings': '{bins: 7, low: -2, high: 2}'}


@pytest.mark.parametrize(('strategy', 'loss'), [('ddp', {}), ('fsdp', BINS)])
def test_two_ranks_learn_the_critic_of_one(played, tmp_path, strategy, loss):
    """Takes half a minute: two processes import torch."""
    recipes.execute(ready(critic(played, save_path=tmp_path / 'one', **loss)))
    run_distributed(of_ranks, 2, str(played), str(tmp_path / 'two'), strategy, loss)
    want, found = (load_file(tmp_path / name / 'critic/value_head.safetensors') for name in ('one', 'two'))
    for name, tensor in want.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-3, atol=1e-4)
    one, two = (json.loads((tmp_path / name / 'eval.jsonl').read_text().splitlines()[-1]) for name in ('one', 'two'))
    assert two == pytest.approx(one, rel=1e-3) and one['eval/explained_variance'] > 0.3


def of_ranks(played: str, folder: str, strategy: str, loss: dict[str, Any]) -> None:
    run = critic(Path(played), save_path=folder, strategy=strategy, **loss)
    run.fill_defaults()
    run.validate(int(os.environ['WORLD_SIZE']))
    recipes.execute(run)


def test_a_run_that_stops_goes_on_to_the_bit(played, tmp_path):
    steps = {'checkpoint_interval': 1, 'keep_last': 9}
    recipes.execute(ready(critic(played, save_path=tmp_path / 'whole', max_steps=9, **steps)))
    recipes.execute(ready(critic(played, save_path=tmp_path / 'parts', max_steps=6, **steps)))
    recipes.execute(ready(critic(played, save_path=tmp_path / 'parts', max_steps=9, resume='auto', **steps)))
    whole, parts = (load_file(tmp_path / name / 'critic/model.safetensors') for name in ('whole', 'parts'))
    assert all(torch.equal(whole[name], tensor) for name, tensor in parts.items())


def test_lora_and_a_reward_model_begin_a_critic(played, tiny_folder, tmp_path):
    recipes.execute(ready(critic(played, save_path=tmp_path / 'lora', lora_rank=2, max_epochs=1)))
    assert Critic.from_pretrained(tmp_path / 'lora/critic').value_head.weight.abs().max() > 0
    scorer = AutoRM(pretrained=tiny_folder)
    scorer.save_pretrained(tmp_path / 'scorer')
    (tmp_path / 'scorer/tokenizer.json').write_bytes((tiny_folder / 'tokenizer.json').read_bytes())
    (tmp_path / 'scorer/tokenizer_config.json').write_bytes((tiny_folder / 'tokenizer_config.json').read_bytes())
    run = critic(played, save_path=tmp_path / 'b', pretrain=tmp_path / 'scorer', lr=0.0, max_epochs=1)
    head = recipes.execute(ready(run)).model.value_head
    torch.testing.assert_close(head.weight, scorer.value_head.weight, rtol=0, atol=0)


# ---------------------------------------------------------------------- what is refused


def refused(*folders: Path, **settings: Any) -> str:
    with pytest.raises(ValueError) as caught:
        read_inputs(critic(*folders, **settings))
    assert '\n' not in str(caught.value)
    return str(caught.value)


def rewritten(played: Path, folder: Path, change: Callable[[dict[str, Any]], Any]) -> Path:
    rows = read_rollouts(played, [1])
    for row in rows:
        row |= change(row)
    write_rollouts(folder / 'rollouts', 1, rows)
    return folder


def test_folders_without_responses_are_refused(played, tiny_folder, tmp_path):
    assert 'give folders of runs, as in critic outputs/ppo' in refused()
    assert 'there is no such folder' in refused(tmp_path / 'none')
    (tmp_path / 'sft').mkdir()
    assert 'no recorded responses (rollouts/phase-*.parquet)' in refused(played, tmp_path / 'sft')
    empty = rewritten(played, tmp_path / 'empty', lambda row: {'mask': [False] * len(row['mask'])})
    assert 'have no token that counts' in refused(played, empty)
    assert 'does not say which model its policy was: give --pretrain' in refused(empty)
    write_rollouts(tmp_path / 'nothing/rollouts', 1, [])
    assert 'have no token that counts' in refused(tmp_path / 'nothing', pretrain=tiny_folder)
    row = read_rollouts(played, [1])[0]
    same = {name: row[name] for name in ('prompt_ids', 'prompt_tokens')}
    first = rewritten(played, tmp_path / 'first', lambda row: same)
    assert 'are to one prompt' in refused(first, pretrain=tiny_folder)


def test_other_tokens_rewards_and_heads_are_refused(played, tiny_folder, tmp_path):
    other = rewritten(played, tmp_path / 'other', lambda row: {'prompt_tokens': ['Ġ', *row['prompt_tokens'][1:]]})
    assert 'was recorded with another tokenizer: token ' in refused(played, other)
    large = rewritten(played, tmp_path / 'large', lambda row: {'prompt_ids': [10**6, *row['prompt_ids'][1:]]})
    assert 'another tokenizer: token 1000000 is ' in refused(large, pretrain=tiny_folder)
    infinite = rewritten(played, tmp_path / 'inf', lambda row: {'rewards': [math.inf] * len(row['mask'])})
    assert 'a reward of sample 0, phase 1, is not a finite number' in refused(infinite, pretrain=tiny_folder)
    assert 'give --validation_percentage' in refused(played, validation_file='x.jsonl')
    saved = played / 'critic'
    assert "has a head for critic_loss='mse' or 'huber'" in refused(played, pretrain=saved, critic_loss='categorical')


# ---------------------------------------------------------------------- settings


def test_a_plan_has_the_critic_alone(played):
    plan = make_plan(setup_of(read_inputs(critic(played))))
    assert {name for memory in plan.phases.values() for name in memory.device} >= {'critic weights', 'critic optimizer'}
    assert not any('actor' in name for memory in plan.phases.values() for name in memory.device)


def test_init_writes_a_config_that_names_a_run(tmp_path):
    files, own = example('critic')
    assert files == {}
    (tmp_path / 'critic.yaml').write_text(config_text('critic', own, 'chatgpt-rlhf critic --config_file critic.yaml'))
    argv = ['--config_file', str(tmp_path / 'critic.yaml')]
    run = parse_run(CriticRun, description='', positional='rollouts', argv=argv, method='critic')
    assert run.rollouts == ['outputs/ppo'] and run.save_path == 'outputs/critic'


def test_records_of_another_kind_are_refused():
    with pytest.raises(ValueError, match='record 0 is a Sequence among Returneds'):
        CriticObjective(CriticConfig()).records(tiny_sequences(1))
