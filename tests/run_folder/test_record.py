"""run.json and the reading of a run's folder."""

from __future__ import annotations

import json
import sys
from importlib.metadata import version

import pytest
import torch
from byte_runs import byte_trainer as trainer

from chatgpt.monitor.run_folder import JsonLines, RunFolder, RunRecord, read_jsonl
from chatgpt.monitor.run_folder.record import without_secrets
from chatgpt.testing.processes import run_distributed
from chatgpt.trainer import PPOTrainer
from chatgpt.trainer.callbacks import Callback, Doctor, Evaluator, RolloutRecorder, SampleTable, WriteReport
from chatgpt.trainer.callbacks.run_record import command_line, model_facts


def test_a_run_says_what_it_is_and_how_it_ended(tmp_path):
    t = trainer(tmp_path)
    t.fit(['a', 'b', 'a'], max_timesteps=2, update_timesteps=1)
    record = RunFolder(tmp_path).record
    assert (record.method, record.trainer, record.status, record.phase) == ('rloo', 'PPOTrainer', 'ended', 2)
    assert record.data == {'prompts': 3, 'distinct': 2, 'cut': 0, 'skipped': 0}
    strategy = {'name': 'NaiveStrategy', 'world_size': 1, 'precision': 'fp32', 'device': 'cpu', 'seed': 3}
    assert record.strategy == strategy
    assert record.models['actor']['kind'] == 'gpt2'
    assert record.models['actor']['trained'] == sum(p.numel() for p in t.actor.parameters())
    assert record.generation['max_new_tokens'] == 3
    assert record.changed_settings()['num_samples_per_prompt'] == (2, 1)
    assert 'eps_clip' not in record.changed_settings()
    (start,) = record.starts
    assert start.phase == 0 and start.versions['torch'] == version('torch') and start.command == command_line()
    assert start.machine['cores'] >= 1


def test_status_after_a_failure_and_a_stop(tmp_path):
    class Fails(Callback):
        def on_phase_end(self, trainer, step, metrics):
            raise RuntimeError('the reward is gone')

    class Stops(Callback):
        def on_phase_end(self, trainer, step, metrics):
            trainer.request_stop()

    class Quits(Callback):
        def on_phase_end(self, trainer, step, metrics):
            raise KeyboardInterrupt

    with pytest.raises(RuntimeError):
        trainer(tmp_path / 'a', [Fails()]).fit(['a'], max_timesteps=2, update_timesteps=1)
    record = RunRecord.read(tmp_path / 'a')
    assert (record.status, record.error) == ('failed', 'RuntimeError: the reward is gone')
    trainer(tmp_path / 'b', [Stops()]).fit(['a'], max_timesteps=3, update_timesteps=1)
    with pytest.raises(KeyboardInterrupt):
        trainer(tmp_path / 'c', [Quits()]).fit(['a'], max_timesteps=3, update_timesteps=1)
    assert RunRecord.read(tmp_path / 'b').status == RunRecord.read(tmp_path / 'c').status == 'stopped'


def test_a_resume_adds_a_start_and_a_new_run_begins_anew(tmp_path):
    t = trainer(tmp_path)
    t.fit(['a', 'b'], max_timesteps=2, update_timesteps=1)
    t.save_checkpoint()
    again = trainer(tmp_path)
    again.load_checkpoint('auto')
    again.fit(['a', 'b'], max_timesteps=3, update_timesteps=1)
    assert [start.phase for start in RunRecord.read(tmp_path).starts] == [0, 2]
    trainer(tmp_path).fit(['a', 'b'], max_timesteps=1, update_timesteps=1)
    assert [start.phase for start in RunRecord.read(tmp_path).starts] == [0]
    assert len(json.loads((tmp_path / 'run.previous.json').read_text())['starts']) == 2


def test_a_trainer_that_is_driven_by_hand_has_a_record_from_its_first_phase(tmp_path):
    def step(t: PPOTrainer) -> None:
        queries = [torch.tensor([97])] * 2
        t.step(queries, t.generate(queries), [1.0, 2.0])

    trainer(tmp_path).fit(['a'], max_timesteps=1, update_timesteps=1)
    t = trainer(tmp_path)
    step(t)
    record = RunRecord.read(tmp_path)
    assert (record.status, record.data, [start.phase for start in record.starts]) == ('running', {}, [0])
    assert RunRecord.read(tmp_path).generation['max_new_tokens'] == 3
    assert json.loads((tmp_path / 'run.previous.json').read_text())['status'] == 'ended'
    step(t)
    t.save_checkpoint()
    again = trainer(tmp_path)
    again.load_checkpoint('auto')
    step(again)
    assert [start.phase for start in RunRecord.read(tmp_path).starts] == [0, 2]


def test_what_an_earlier_run_has_left_is_not_of_the_next(tmp_path):
    def evaluate(trainer):
        return {'score': 9.0}

    first = [Evaluator(evaluate, interval=1), SampleTable(every=1)]
    trainer(tmp_path, first).fit(['a', 'b'], max_timesteps=2, update_timesteps=1)
    (tmp_path / 'findings.jsonl').write_text('{"step": 1, "finding": "few-prompts"}\n')
    second = [Doctor(enabled=False), RolloutRecorder(num_sequences=0), WriteReport()]
    trainer(tmp_path, second).fit(['a', 'b'], max_timesteps=1, update_timesteps=1)
    run = RunFolder(tmp_path)
    assert (run.eval, run.samples, run.findings, run.rollouts()) == ([], [], [], []) and run.phase == 1
    kept = {path.name for path in tmp_path.glob('*.previous*')}
    files = {'run.json', 'metrics.jsonl', 'eval.jsonl', 'samples.jsonl', 'findings.jsonl', 'report.html'}
    assert kept == {name.replace('.', '.previous.') for name in files} | {'rollouts.previous'}


def test_what_is_no_record_is_refused_by_name(tmp_path):
    for content in ('{"format": 1, "method": ', '[]', '{"format": 1}', '{"format": 1, "starts": [3]}'):
        (tmp_path / 'run.json').write_text(content)
        with pytest.raises(ValueError, match='run.json is not'):
            RunRecord.read(tmp_path)
    t = trainer(tmp_path)
    t.phase = 1  # as if resumed in this folder
    t.fit(['a'], max_timesteps=1, update_timesteps=1)
    assert [start.phase for start in RunRecord.read(tmp_path).starts] == [1]


def test_a_full_disk_does_not_end_the_run(tmp_path, monkeypatch):
    def full(self, folder):
        raise OSError(28, 'No space left on device')

    monkeypatch.setattr(RunRecord, 'write', full)
    with pytest.warns(UserWarning, match='run.json could not be written'):
        trainer(tmp_path).fit(['a'], max_timesteps=1, update_timesteps=1)


def test_secrets_of_a_command_line_are_left_out(monkeypatch):
    given = ['x.py', '--hub_token', 'abc', '--api_key=def', 'Training.password=ghi', '--passwd', 'j']
    given += ['--environment_options', '{"api_key": "m", "turns": 3}', '--environment_options={token: n, turns: 3}']
    given += ['--tokenizer', 'gpt2']
    given += ['--token_penalty=0.1', '--max_new_tokens', '8', '-c', f'login("hf_{"k" * 34}")', 'https://me:l@host/x']
    monkeypatch.setattr(sys, 'orig_argv', given, raising=False)
    shown = ['x.py', '--hub_token', '***', '--api_key=***', 'Training.password=***', '--passwd', '***']
    shown += ['--environment_options', '{"api_key": ***, "turns": 3}', '--environment_options={token: ***, turns: 3}']
    shown += ['--tokenizer', 'gpt2', '--token_penalty=0.1', '--max_new_tokens', '8']
    assert command_line() == [*shown, '-c', 'login("***")', 'https://***@host/x']


def test_what_is_no_run_is_refused_by_name(tmp_path):
    with pytest.raises(ValueError, match='no such folder'):
        RunFolder(tmp_path / 'none')
    (tmp_path / 'one').mkdir()
    (tmp_path / 'one' / 'metrics.jsonl').write_text('')
    with pytest.raises(ValueError, match=r'is not the folder of a run.*these in it are: .*one'):
        RunFolder(tmp_path)
    (tmp_path / 'one' / 'run.json').write_text('[]')
    with pytest.raises(ValueError, match='not the record of a run'):
        RunFolder(tmp_path / 'one').record  # noqa: B018
    (tmp_path / 'one' / 'run.json').write_text('{"format": 99}')
    with pytest.raises(ValueError, match='format 99'):
        RunFolder(tmp_path / 'one').record  # noqa: B018


def test_half_a_surrogate_pair_is_kept(tmp_path):
    """A byte tokenizer may decode an incomplete emoji to one."""
    JsonLines(tmp_path / 'samples.jsonl').append([{'step': 1, 'response': 'a\ud83d b'}])
    assert read_jsonl(tmp_path / 'samples.jsonl') == [{'step': 1, 'response': 'a\ud83d b'}]
    RunRecord(method='a\ud83d', trainer='').write(tmp_path)
    assert RunRecord.read(tmp_path).method == 'a\ud83d'


def test_weights_in_4_bits_count_as_parameters():
    """A scale belongs to 64 parameters. Of the packed ones a process may hold a part."""
    layer = torch.nn.Linear(3, 2)
    layer.register_buffer('packed', torch.zeros(32, 1, dtype=torch.uint8))
    layer.register_buffer('scales', torch.zeros(2))
    facts = model_facts(torch.nn.Sequential(layer))
    assert (facts['parameters'], facts['trained']) == (8 + 128, 8)


def _fill(path: str) -> list[str]:
    import resource
    import signal

    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    lines, found = JsonLines(path), []
    lines.append([{'step': 1}])
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
    for size in (300, 3):
        try:
            lines.append([{'step': 2, 'text': 'x' * size}])
        except OSError as error:
            found.append(str(error.strerror))
    return found


@pytest.mark.skipif(sys.platform == 'win32', reason='limits the size of files')
def test_a_line_that_does_not_fit_on_the_disk_leaves_the_file_as_it_was(tmp_path):
    [failures] = run_distributed(_fill, 1, str(tmp_path / 'a.jsonl'))
    assert len(failures) == 1
    assert read_jsonl(tmp_path / 'a.jsonl') == [{'step': 1}, {'step': 2, 'text': 'xxx'}]


@pytest.mark.parametrize('value', ['["k1", "k2"]', '{"id": "k1", "x": "k2"}', 'k1 k2', '"k1\\"k2"', "'k1, k2'"])
def test_a_secret_of_a_dictionary_is_hidden_whole(value):
    assert without_secrets(f'{{"api_keys": {value}, "turns": 3}}') == '{"api_keys": ***, "turns": 3}'


def test_secrets_are_hidden_at_any_depth_of_a_setting():
    options = {
        'url': 'https://me:pw@example.org',
        'auth': {'user': 'me'},
        'items': [{'api_key': 'k1', 'max_tokens': 5}],
    }
    assert without_secrets({'environment_options': options, 'lr': 0.1}) == {
        'environment_options': {
            'url': 'https://***@example.org',
            'auth': '***',
            'items': [{'api_key': '***', 'max_tokens': 5}],
        },
        'lr': 0.1,
    }


def test_a_config_that_is_no_yaml_is_named(tmp_path):
    (tmp_path / 'metrics.jsonl').write_text('{"step": 1}')
    (tmp_path / 'config.yaml').write_text('a: [')
    with pytest.raises(ValueError, match='config.yaml is not YAML'):
        RunFolder(tmp_path).config  # noqa: B018
    (tmp_path / 'config.yaml').write_text('- a')
    assert RunFolder(tmp_path).config == {}
