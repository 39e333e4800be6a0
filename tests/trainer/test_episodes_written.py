"""Files of a run in an environment: samples.jsonl and its table, recorded rollouts, and their sizes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_runs import assemble

from chatgpt.environments import Environment, EnvironmentSettings
from chatgpt.monitor.report.rollouts import page_row
from chatgpt.monitor.run_folder.rollouts import read_rollouts
from chatgpt.nn import Actor, Critic
from chatgpt.strategies import NaiveStrategy
from chatgpt.testing import byte_tokenizer, tiny_causal_lm
from chatgpt.trainer.callbacks import SampleTable
from chatgpt.trainer.callbacks.samples import format_table, shown_parts


class Twice(Environment):
    def reset(self, seed, **columns):
        self.turns, self.bad = 0, bool(seed % 2)
        return 'begin the task now:'

    def step(self, response):
        self.turns += 1
        if self.bad and self.turns == 2:
            raise RuntimeError('no more')
        return '\n(again)\n', {'a': float(self.turns), 'b': 0.5}, self.turns == 2, False, {'success': self.turns == 2}


@pytest.fixture(scope='module')
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    folder, tokenizer = tmp_path_factory.mktemp('run'), byte_tokenizer()
    torch.manual_seed(0)
    actor, critic = (tiny_causal_lm('gpt2', vocab_size=259, n_positions=128) for _ in range(2))
    settings = {'environment': Twice, 'environment_settings': EnvironmentSettings(max_turn_tokens=3), 'kl_coef': 0.0}
    settings |= {'experience_batch_size': 8, 'train_batch_size': 8, 'max_new_tokens': 60, 'tokenizer': tokenizer}
    table = SampleTable(every=1, num_rows=8)
    strategy = NaiveStrategy(seed=1)
    trainer = assemble(strategy, Actor(actor), Critic(critic), run_dir=folder, callbacks=[table], **settings)
    trainer.fit(max_timesteps=1, update_timesteps=1)
    return trainer, folder


def by_hand(experience: Any) -> list[dict[str, Any]]:
    tokenizer = byte_tokenizer()
    first, second = experience.episode.turns
    ids = experience.response_ids.tolist()

    def text(part):
        return tokenizer.decode(part, skip_special_tokens=True)

    rewards = [{'a': 1.0, 'b': 0.5}, {} if experience.episode.failed else {'a': 2.0, 'b': 0.5}]
    return [
        {'turn': text(ids[: first.stop]), 'rewards': rewards[0]},
        {'observation': '\n(again)\n'},
        {'turn': text(ids[second.start :]), 'rewards': rewards[1]},
    ]


def test_samples_have_the_parts_of_an_episode(run):
    trainer, folder = run
    rows = [json.loads(line) for line in (folder / 'samples.jsonl').read_text().splitlines()]
    assert {row['end'] for row in rows} == {'terminated', 'error'}, 'of these seeds'
    for row, e in zip(rows, trainer.last_experiences, strict=True):
        assert row['index'] == e.index and row['prompt'] == 'begin the task now:'
        assert row['parts'] == by_hand(e)
        if '\ufffd' not in row['response']:  # invalid UTF-8 is invalid in each part
            assert ''.join(part.get('turn', part.get('observation')) for part in row['parts']) == row['response']
        if row['end'] == 'error':
            assert row['message'].startswith('Twice: raised RuntimeError: no more') and row['success'] is False
        else:
            assert 'message' not in row and row['success'] is True and row['score'] == 4.0


def test_the_table_has_observations_in_brackets():
    row = {'score': 1.0, 'end': 'turns', 'prompt': 'p', 'response': 'x\n(again)\ny'}
    row['parts'] = [{'turn': 'x', 'rewards': {}}, {'observation': '\n(again)\n'}, {'turn': 'y', 'rewards': {}}]
    assert format_table([shown_parts(row)], ('end', 'response')).splitlines()[2:] == ['turns  x [(again)] y']
    plain = {'response': 'as it is'}
    assert shown_parts(plain) == plain


def test_recorded_sequences_have_their_turns(run):
    trainer, folder = run
    recorded = {row['index']: row for row in read_rollouts(folder)}
    assert len(recorded) == 8
    for e in trainer.last_experiences:
        row = recorded[e.index]
        saved_episode = json.loads(row['episode'])
        assert saved_episode['turns'] == [
            {'start': t.start, 'stop': t.stop, 'rewards': part['rewards']}
            for t, part in zip(e.episode.turns, [by_hand(e)[0], by_hand(e)[2]], strict=True)
        ]
        assert (saved_episode['end'], saved_episode['success']) == (e.episode.end, not e.episode.failed)
        assert page_row(row)['episode'] == saved_episode
        for turn in saved_episode['turns']:
            assert all(row['mask'][turn['start'] : turn['stop']]) is not e.episode.failed
        between = ''.join(row['tokens'][saved_episode['turns'][0]['stop'] : saved_episode['turns'][1]['start']])
        assert between == '\n(again)\n' and not any(
            row['mask'][saved_episode['turns'][0]['stop'] : saved_episode['turns'][1]['start']]
        )
