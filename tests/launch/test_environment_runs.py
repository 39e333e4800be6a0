"""Runs in an environment: by name on the command line and from config files, resumed, evaluated."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from transformers import GPT2Config

from chatgpt.launch.demo_world import game_config, game_tokenizer
from chatgpt.launch.inputs import read_inputs
from chatgpt.launch.recipes import execute
from chatgpt.launch.runs import PPORun
from chatgpt.nn import GPTActor

TINY = {'num_episodes': 1, 'max_timesteps': 2, 'update_timesteps': 1, 'experience_batch_size': 4}
TINY |= {'train_batch_size': 4, 'max_epochs': 1, 'max_new_tokens': 48}
GAME, OTHER = {'environment': 'games:countdown'}, {'environment': 'own.py:Echo', 'pretrain': '{folder}'}
GDPO = {'environment': 'games:countdown', 'advantage_estimator': 'gdpo', 'num_samples_per_prompt': 2, 'kl_coef': 0.0}
OWN = """
from chatgpt.environments import ENVIRONMENTS, Environment

class Echo(Environment):
    def __init__(self, turns=2, fails=False):
        self.turns, self.fails = turns, fails

    def reset(self, seed, **columns):
        if self.fails:
            raise RuntimeError('no such place')
        self.done = 0
        return f'say {columns.get("word", seed % 7)}\\n'

    def step(self, response):
        self.done += 1
        over = self.done == self.turns
        return '\\nagain\\n', {'length': len(response), 'there': 1.0}, over, False, {'success': over}
"""


@pytest.fixture(scope='module')
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp('model')
    config = GPT2Config(**(game_config().to_dict() | {'n_embd': 16, 'n_layer': 1, 'n_head': 2, 'n_positions': 128}))
    GPTActor(config=config).save_pretrained(folder, tokenizer=game_tokenizer())
    return folder


@pytest.fixture
def own(tmp_path, monkeypatch):
    (tmp_path / 'own.py').write_text(OWN)
    monkeypatch.chdir(tmp_path)
    return 'own.py:Echo'


def run_of(**settings) -> PPORun:
    run = PPORun(**(TINY | settings))
    run.given = {}
    return run


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


# ---------------------------------------------------------------------- settings


@pytest.mark.parametrize(
    ('settings', 'complaint'),
    [
        ({'environment': 'games:countdwn'}, 'is not known; .*did you mean games:countdown'),
        (GAME | {'environment_options': {'number': 3}}, "no option 'number'; did you mean numbers"),
        (GAME | {'environment_options': {'numbers': 9}}, 'numbers=9 must be a whole number from 2 to 6'),
        ({'environment': 'own.py:Ehco', 'pretrain': '{folder}'}, 'did you mean Echo'),
        (OTHER | {'environment_options': {'fails': True}}, 'raised RuntimeError: no such place'),
        (GAME | {'max_new_tokens': 510}, r'takes up to \d+ \+ 510 tokens, past the context of 512'),
        ({'environment': 'games:countdown', 'reward_fn': 'builtins:print'}, 'say how they add up by reward_weights'),
        ({'environment': 'games:countdown', 'max_timesteps': None}, 'tasks of an environment have no end'),
        (GDPO, 'takes a list of rewards'),
    ],
)
def test_mistakes_are_one_line_before_any_weight(settings, complaint, own, folder, tmp_path):
    settings = {k: str(folder) if v == '{folder}' else v for k, v in settings.items()}
    with pytest.raises(ValueError, match=complaint) as error:
        read_inputs(run_of(save_path=str(tmp_path / 'run'), **settings))
    assert '\n' not in str(error.value)


# ---------------------------------------------------------------------- a run


def test_a_run_evaluates_on_other_tasks_and_a_resume_prints_changes(folder, tmp_path, capsys, own):
    common = {'environment': 'games:countdown', 'pretrain': str(folder), 'save_path': str(tmp_path / 'run')}
    common |= {'eval_episodes': 3, 'eval_interval': 1, 'max_turn_tokens': 6, 'checkpoint_interval': 1}
    run = run_of(**common)
    execute(run)
    out = capsys.readouterr().out
    assert '--environment games:countdown' in out.splitlines()[-1] and 'python -m chatgpt evaluate' in out
    last = lines(tmp_path / 'run' / 'metrics.jsonl')[-1]
    assert {'eval/success_share', 'eval/num_turns_mean', 'eval/failed_share', 'eval/score_mean'} <= last.keys()
    assert 0 < last['eval/num_turns_mean'] <= 16 and 'environment/success_share' in last
    trained = {row['prompt'] for row in lines(tmp_path / 'run' / 'samples.jsonl')}
    evaluated = {row['prompt'] for row in lines(tmp_path / 'run' / 'eval_samples.jsonl')}
    assert len(evaluated) == 3 and not trained & evaluated, 'of these seeds'
    with pytest.warns(
        UserWarning, match=r"environment\.name .*Countdown' → .*TicTacToe'.*environment.options.first None → 'policy'"
    ):
        other = {'environment': 'games:tictactoe', 'environment_options': {'first': 'policy'}}
        execute(run_of(**common | other | {'resume': 'auto', 'num_episodes': 2}))
    assert len(lines(tmp_path / 'run' / 'metrics.jsonl')) == 4


def test_a_custom_environment_with_data_and_named_rewards(folder, tmp_path, own):
    (tmp_path / 'prompts.jsonl').write_text(
        ''.join(json.dumps({'prompt': f'p{i}:', 'word': f'w{i}'}) + '\n' for i in range(4))
    )
    given = {'environment': own, 'environment_options': {'turns': 3}, 'environment_workers': 'processes'}
    given |= {'prompt_path': str(tmp_path / 'prompts.jsonl'), 'reward_weights': {'there': 2.0, 'length': 0.0}}
    execute(run_of(**given, pretrain=str(folder), save_path=str(tmp_path / 'run'), max_turn_tokens=4))
    for row in lines(tmp_path / 'run' / 'samples.jsonl'):
        assert re.fullmatch(r'p(\d):say w\1\n', row['prompt']) and row['score'] == 2.0 * 3
