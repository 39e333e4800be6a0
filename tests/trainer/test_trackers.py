"""Trackers by name: each real package in its offline mode, the arguments of a run, and no other imports."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import SimpleNamespace

import pytest
from fake_trainer import FakeTrainer, experience

from chatgpt.launch.config_file import parse_run
from chatgpt.launch.recipes import make_callbacks
from chatgpt.launch.runs import PPORun, Run, SFTRun
from chatgpt.trainer.callbacks.trackers import Tracker, Trackio, WandB, tracker_names
from chatgpt.types import Episode, Turn

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = {
    'WANDB_MODE': 'offline',
    'WANDB_PROJECT': 'of-the-test',
    'TRACKIO_PROJECT': 'of-the-test',
    'MLFLOW_EXPERIMENT_NAME': 'of-the-test',
    'MLFLOW_DISABLE_TELEMETRY': 'true',
    'HF_HUB_OFFLINE': '1',
}


DISTRIBUTIONS = {'tensorboard': 'tensorboard', 'trackio': 'trackio', 'mlflow': 'mlflow-skinny', 'wandb': 'wandb'}


def is_installed(name: str) -> bool:
    try:
        version(DISTRIBUTIONS[name])
    except PackageNotFoundError:
        return False
    return True


@pytest.fixture(scope='module')
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Returns the folder of a tracker's runs; all run in one interpreter, and each must load only its own package."""
    folder = tmp_path_factory.mktemp('trackers')
    names = [name for name in DISTRIBUTIONS if is_installed(name)]
    places = {'MLFLOW_TRACKING_URI': f'sqlite:///{folder}/runs.db', 'TRACKIO_DIR': str(folder / 'store')}
    done = subprocess.run(
        [sys.executable, str(ROOT / 'tests' / 'trainer' / 'tracker_runs.py'), str(folder), *names],
        cwd=folder,
        env=os.environ | ENVIRONMENT | places | {'PYTHONPATH': str(ROOT), 'HOME': str(folder)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    loaded = [line.split()[1:] for line in done.stdout.splitlines() if line.startswith('after ')]
    for i, (name, *have) in enumerate(loaded):
        assert (name, sorted(have)) == (names[i], sorted(names[: i + 1]))

    def find(name: str) -> Path:
        if name not in names:
            pytest.skip(f'{DISTRIBUTIONS[name]} is not installed: make dev')
        return folder / name

    return find


def test_tensorboard(folder_of):
    folder = folder_of('tensorboard')
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = {}
    for run in ('mine', 'theirs'):
        events = EventAccumulator(str(folder / run / 'tensorboard'))
        events.Reload()
        found[run] = [(e.step, e.value) for e in events.Scalars('ppo/loss')]
    assert found == {'mine': [(1, 0.5), (2, 0.25)], 'theirs': [(1, 0.75)]}
    assert not any((folder / 'other_rank').iterdir())


def records_of_wandb(path: Path) -> list:
    """Returns the records of a .wandb file: after 7 bytes of its own, LevelDB's log format, of protobuf messages.
    Blocks of 32 KiB hold chunks of a checksum, a length, a type (1 whole, 2 first, 3 middle, 4 last) and the bytes."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, part, found = path.read_bytes(), 7, b'', []
    while at + 7 <= len(data):
        if (room := 32768 - at % 32768) < 7:
            at += room
            continue
        _, length, kind = struct.unpack('<IHB', data[at : at + 7])
        part += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            found.append(Record.FromString(part))
            part = b''
    return found


def test_wandb_offline(folder_of):
    folder = folder_of('wandb')
    found: dict[str, list] = {}
    for path in sorted(folder.glob('*/wandb/offline-run-*/*.wandb')):
        records = {kind: [] for kind in ('run', 'history', 'exit')}
        for record in records_of_wandb(path):
            if (kind := record.WhichOneof('record_type')) in records:
                records[kind].append(getattr(record, kind))
        (run,), (phase,), (end,) = records.values()
        config = {item.key: json.loads(item.value_json) for item in run.config.update if item.key != '_wandb'}
        items = {item.key or '/'.join(item.nested_key): json.loads(item.value_json) for item in phase.item}
        found.setdefault(path.relative_to(folder).parts[0], []).append(
            (run.run_id, run.project, config, items['_step'], items['ppo/loss'], end.exit_code)
        )
    (run_id, *_), _ = found['mine']
    assert sorted(found['mine'], key=lambda run: run[3]) == [
        (run_id, 'of-the-test', {'lr': 0.125}, 1, 0.5, 0),
        (run_id, 'of-the-test', {'lr': 0.125}, 2, 0.25, 0),  # `wandb sync` merges runs of the same id
    ]
    ((other_id, *rest),) = found['theirs']
    assert other_id != run_id and rest == ['of-the-test', {}, 1, 0.75, 1]
    (table,) = folder.glob('mine/wandb/offline-run-*/files/media/table/samples*.json')
    samples = json.loads(table.read_text())
    assert dict(zip(samples['columns'], samples['data'][0], strict=True))['prompt'] == 'a b'
    assert set(found) == {'mine', 'theirs'}


def test_mlflow_in_a_file(folder_of):
    folder = folder_of('mlflow')
    from mlflow import MlflowClient

    client = MlflowClient(f'sqlite:///{folder.parent}/runs.db')
    experiment = client.get_experiment_by_name('of-the-test')
    runs = {run.info.run_name: run for run in client.search_runs([experiment.experiment_id])}
    assert set(runs) == {'mine', 'theirs'}  # named by their folders; the resumed run is the same one
    mine, theirs = runs['mine'], runs['theirs']
    assert mine.data.params == {'lr': '0.125'}
    for metric, values in (('ppo/loss', [(1, 0.5), (2, 0.25)]), ('rollout/score_mean', [(1, 1.0), (2, 2.0)])):
        assert [(m.step, m.value) for m in client.get_metric_history(mine.info.run_id, metric)] == values
    assert theirs.data.metrics == {'ppo/loss': 0.75}
    assert (mine.info.status, theirs.info.status) == ('FINISHED', 'FAILED')
    table = Path(mine.info.artifact_uri, 'samples', 'phase-1.txt').read_text()
    assert table.splitlines()[0].split() == ['score', 'prompt', 'response'] and 'a b' in table  # there is no KL


def test_trackio_in_local_files(folder_of):
    """Without a network, read with sqlite3 alone."""
    import sqlite3

    (file,) = (folder_of('trackio').parent / 'store').glob('of-the-test*.db')
    with sqlite3.connect(file) as store:
        rows = store.execute('select run_name, step, metrics from metrics order by run_name, step').fetchall()
        configs = dict(store.execute('select run_name, config from configs').fetchall())
    found = [(name.rpartition('-')[0], step, json.loads(text)) for name, step, text in rows]
    expected = [('mine', 1, 0.5), ('mine', 2, 0.25), ('theirs', 1, 0.75)]
    assert [(name, step, m['ppo/loss']) for name, step, m in found] == expected
    assert len({name for name, _, _ in rows}) == 2  # the resumed run is the same one
    assert {json.loads(text).get('lr') for name, text in configs.items() if name.startswith('mine-')} == {0.125}
    assert found[0][2]['samples']['_value'][0]['prompt'] == 'a b'


class Kept(Tracker):
    """Keeps what it is given."""

    def start(self, trainer, run_id):
        self.kept = []
        return self.kept, run_id or 'first'

    def log(self, metrics, rows, step):
        self.kept.append((step, metrics['ppo/loss'], [row['prompt'] for row in rows]))

    def finish(self, *, failed):
        self.kept.append(failed)


def test_a_class_of_ones_own_derived_from_tracker_needs_no_package():
    tracker = Kept(samples_every=2)
    FakeTrainer([tracker]).fit([{'ppo/loss': 0.5}, {'ppo/loss': 0.25}, {'ppo/loss': 0.125}])
    assert tracker.kept == [(1, 0.5, ['a b']), (2, 0.25, ['a b']), (3, 0.125, []), False]
    assert tracker.state_dict() == {'run_id': 'first'}


@pytest.mark.parametrize('make', [WandB, Trackio])
def test_a_table_of_episodes_has_one_text_for_the_parts_and_the_columns_of_all_rows(make, monkeypatch):
    monkeypatch.setattr('chatgpt.trainer.callbacks.base.find_spec', lambda name: name)
    monkeypatch.setitem(sys.modules, make.module, SimpleNamespace(Table=SimpleNamespace))
    logged = []
    tracker = make()
    tracker._run = SimpleNamespace(log=lambda values, step: logged.append(values['samples']))
    end = {'turns': (Turn(start=0, stop=1, rewards={'reward': 1.0}), Turn(start=2, stop=3)), 'success': True}
    ends = Episode(end='terminated', **end), Episode(end='error', message='no more', **end)
    trainer = FakeTrainer([tracker])
    trainer.last_experiences = [experience(i, [3], [5, 6, 7], 2.0, episode=e) for i, e in enumerate(ends)]
    tracker.on_phase_end(trainer, 1, {'rollout/kl_mean': 0.0})
    (table,) = logged
    names = ['index', 'prompt', 'response', 'score', 'kl', 'num_tokens', 'ended', 'end', 'success', 'message']
    assert table.columns == names
    rows = [dict(zip(table.columns, row, strict=True)) for row in table.data]
    assert [(row['response'], row['end'], row['message']) for row in rows] == [
        ('5 [6] 7', 'terminated', None),
        ('5 [6] 7', 'error', 'no more'),
    ]
    assert all(value is None or isinstance(value, (str, int, float)) for row in table.data for value in row)


@pytest.mark.parametrize(
    ('argv', 'names'),
    [
        ([], []),
        (['--log_with=none'], []),
        (['--log_with=wandb', '--log_with', 'mlflow, wandb'], ['wandb', 'mlflow']),
        (['--report_to', 'trackio'], ['trackio']),
        (['--tensorboard', '--log_with=tensorboard,wandb'], ['tensorboard', 'wandb']),
        (['log_with=[mlflow, wandb]'], ['mlflow', 'wandb']),
    ],
)
def test_names_on_a_command_line(argv, names):
    for cls in (PPORun, SFTRun):
        assert parse_run(cls, description=None, argv=argv).trackers() == names


def test_a_mistake_in_a_name():
    for given, message in (
        (['comet'], "log_with='comet' is not known; choose one of tensorboard, wandb, trackio, mlflow, or module:name"),
        (['wandbb'], 'did you mean wandb'),
        (['none,wandb'], 'none is no tracker beside others'),
        (['json:dumps'], "'json:dumps' is no class derived from chatgpt.trainer.callbacks.Callback"),
        ([''], "log_with='' is not known"),
    ):
        with pytest.raises(ValueError, match=message):
            tracker_names(given)
    with pytest.raises(ValueError, match='did you mean wandb'):
        Run(log_with=['wandbb']).validate()


def test_a_tracker_of_ones_own(tmp_path):
    (tmp_path / 'my_tracker.py').write_text(
        'from chatgpt.trainer.callbacks import Callback\nclass Mine(Callback):\n    pass\n'
    )
    run = SFTRun(log_with=[f'{tmp_path}/my_tracker.py:Mine,tensorboard'])
    made = [type(c).__name__ for c in make_callbacks(run, SimpleNamespace(by_name=True))]
    assert made == ['SaveCheckpoint', 'RunRecorder', 'Mine', 'TensorBoard']
