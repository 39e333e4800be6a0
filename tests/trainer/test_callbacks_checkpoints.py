"""The callback that saves checkpoints: when, what it keeps and refuses; and the state of callbacks in checkpoints."""

from __future__ import annotations

import json
import math
import threading
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_trainer import FakeTrainer
from ppo_on_ids import fit, make
from tiny_runs import PROMPTS, ppo, sft

from chatgpt.launch.recipes import make_callbacks
from chatgpt.launch.runs import SFTRun
from chatgpt.nn import GPTActor
from chatgpt.strategies import DDPStrategy, NaiveStrategy
from chatgpt.strategies.checkpoint import CheckpointWriter, Piece, TensorReader, list_checkpoints
from chatgpt.strategies.checkpoint.folder import score_of
from chatgpt.testing.fakes import tiny_config
from chatgpt.testing.processes import run_distributed
from chatgpt.trainer import SFTTrainer
from chatgpt.trainer import callbacks as cb
from chatgpt.trainer.callbacks import Callback, SaveCheckpoint
from chatgpt.types import Sequence


def saved(root: Path) -> list[int]:
    return [int(p.name.removeprefix('step-')) for p in list_checkpoints(root)]


def test_checkpoints_fall_at_the_interval_and_at_the_end(tmp_path):
    FakeTrainer([cb.SaveCheckpoint(interval=2)], tmp_path).fit([{}] * 5)
    assert saved(tmp_path / 'checkpoints') == [2, 4, 5]
    FakeTrainer([cb.SaveCheckpoint(tmp_path / 'elsewhere', interval=9)]).fit([{}])
    assert saved(tmp_path / 'elsewhere') == [1]
    FakeTrainer([cb.SaveCheckpoint(interval=None, keep_last=2)], tmp_path / 'none').fit([{}] * 3)
    assert not (tmp_path / 'none' / 'checkpoints').exists()
    keeper = make_callbacks(SFTRun(checkpoint_interval=0, keep_last=3), SimpleNamespace(by_name=True))[0]
    assert (keeper.interval, keeper.keep_last) == (None, 3)


def test_a_checkpoint_of_another_place_does_not_count(tmp_path):
    slow = cb.SaveCheckpoint(tmp_path / 'slow', interval=3)
    FakeTrainer([cb.SaveCheckpoint(interval=1), slow], tmp_path).fit([{}] * 8)
    assert saved(tmp_path / 'slow') == [3, 6, 8]


def test_a_phase_is_not_saved_twice(tmp_path):
    trainer = FakeTrainer([cb.SaveCheckpoint(interval=9)], tmp_path)
    trainer.callbacks.on_fit_start(trainer)
    trainer.run_phase({})
    trainer.save_checkpoint(tmp_path / 'checkpoints' / 'step-00000001')  # as an interrupted run does
    times = (tmp_path / 'checkpoints' / 'step-00000001' / 'manifest.json').stat().st_mtime_ns
    trainer.callbacks.on_fit_end(trainer)
    assert (tmp_path / 'checkpoints' / 'step-00000001' / 'manifest.json').stat().st_mtime_ns == times
    FakeTrainer([cb.SaveCheckpoint()], tmp_path / 'empty').fit([])
    assert saved(tmp_path / 'empty' / 'checkpoints') == []


@pytest.mark.parametrize('interval', [1, 9, None])
def test_checkpoints_saved_after_a_signal_count_among_those_to_keep(tmp_path, interval):
    for step in (1, 2, 3):
        trainer = FakeTrainer([cb.SaveCheckpoint(interval=interval, keep_last=2)], tmp_path)
        trainer.phase = step - 1
        trainer.callbacks.on_fit_start(trainer)
        trainer.run_phase({})
        trainer.save_checkpoint(tmp_path / 'checkpoints' / f'step-{step:08d}')
        trainer.callbacks.on_fit_end(trainer)
    assert saved(tmp_path / 'checkpoints') == [2, 3]


def test_a_run_resumed_from_an_earlier_phase_keeps_its_own_and_later_checkpoints(tmp_path):
    FakeTrainer([cb.SaveCheckpoint(interval=2)], tmp_path).fit([{}] * 8)
    back = FakeTrainer([cb.SaveCheckpoint(keep_last=2)], tmp_path)
    back.load_checkpoint(tmp_path / 'checkpoints' / 'step-00000002')
    back.fit([{}] * 3)
    assert saved(tmp_path / 'checkpoints') == [4, 5, 6, 8]


SCORES = [{'rollout/score_mean': s} for s in (5.0, 9.0, 1.0, 2.0, 3.0)]


@pytest.mark.parametrize(
    ('settings', 'kept'),
    [
        ({'keep_last': 2}, [4, 5]),
        ({'keep_last': 2, 'keep_best': 1}, [2, 4, 5]),
        ({'keep_last': 2, 'keep_best': 1, 'mode': 'min'}, [3, 4, 5]),
        ({'keep_last': 1, 'keep_best': 2}, [1, 2, 5]),
        ({}, [1, 2, 3, 4, 5]),
    ],
)
def test_the_last_and_the_best_are_kept(tmp_path, settings, kept):
    FakeTrainer([cb.SaveCheckpoint(**settings)], tmp_path).fit(SCORES)
    assert saved(tmp_path / 'checkpoints') == kept


def test_an_unknown_metric_is_named_with_its_neighbours_and_an_evaluation_may_be_missing(tmp_path):
    with pytest.raises(ValueError, match="no metric 'rollout/score_man'.*rollout/score_mean"):
        FakeTrainer([cb.SaveCheckpoint(keep_last=1, keep_best=1, metric='rollout/score_man')], tmp_path).fit(SCORES)
    keeper = cb.SaveCheckpoint(keep_last=1, keep_best=1, metric='eval/win')
    FakeTrainer([keeper], tmp_path / 'b').fit([{}, {'eval/win': 0.5}, {}])
    assert saved(tmp_path / 'b' / 'checkpoints') == [2, 3]
    keeper = cb.SaveCheckpoint(keep_last=1, keep_best=1, metric='eval/win')
    FakeTrainer([keeper], tmp_path / 'c').fit([{'eval/win': win} for win in (0.5, math.nan, 0.9, 0.1)])
    assert saved(tmp_path / 'c' / 'checkpoints') == [3, 4]


def test_a_folder_of_its_own_is_that_of_all_checkpoints(tmp_path):
    own = [cb.SaveCheckpoint(tmp_path / 'ck')]
    trainer = ppo(run_dir=tmp_path / 'run', callbacks=own)
    trainer.fit(PROMPTS, 1, 2, 1)
    assert saved(tmp_path / 'ck') == [1, 2] and not (tmp_path / 'run' / 'checkpoints').exists()
    again = ppo(run_dir=tmp_path / 'run', callbacks=[cb.SaveCheckpoint(tmp_path / 'ck')])
    assert again.load_checkpoint('auto') and again.phase == 2
    assert again.save_checkpoint() == tmp_path / 'ck' / 'step-00000002'
    two = ppo(run_dir=tmp_path / 'run', callbacks=[cb.SaveCheckpoint(), cb.SaveCheckpoint(tmp_path / 'ck')])
    assert two.checkpoint_dir == tmp_path / 'run' / 'checkpoints'


def test_checkpoints_after_that_of_a_resume_are_set_aside(tmp_path):
    ppo(run_dir=tmp_path, callbacks=[cb.SaveCheckpoint()]).fit(PROMPTS, 1, 4, 1)
    root = tmp_path / 'checkpoints'
    again = ppo(run_dir=tmp_path, callbacks=[cb.SaveCheckpoint(interval=9)])
    again.load_checkpoint(root / 'step-00000001')
    assert saved(root) == [1, 2, 3, 4]  # until it learns
    again.fit(PROMPTS, 1, 2, 1)
    assert saved(root) == [1, 2] and (root / 'step-00000004.previous' / 'manifest.json').is_file()
    last = ppo(run_dir=tmp_path)
    assert last.load_checkpoint('auto') and last.phase == 2


def test_a_failed_save_leaves_the_run_and_the_last_checkpoint(tmp_path):
    trainer = FakeTrainer([cb.SaveCheckpoint(keep_last=1)], tmp_path)
    trainer.callbacks.on_fit_start(trainer)
    trainer.run_phase({})
    trainer.disk_full = True
    with pytest.warns(UserWarning, match='phase 2 was not saved, the run goes on: .*No space left'):
        trainer.run_phase({})
    assert saved(tmp_path / 'checkpoints') == [1]
    trainer.disk_full = False
    trainer.callbacks.on_fit_end(trainer)
    assert saved(tmp_path / 'checkpoints') == [2]


@pytest.fixture
def held(monkeypatch):
    """Holds the thread that writes a checkpoint until the event is set."""
    event, work = threading.Event(), CheckpointWriter._work

    def waits(self):
        event.wait()
        work(self)

    monkeypatch.setattr(CheckpointWriter, '_work', waits)
    return event


class Watch(Callback):
    """Notes the finished checkpoints at the end of each phase, and calls `then[phase]`."""

    order = 200

    def __init__(self, root, then):
        self.root, self.then, self.seen = root, then, []

    def on_phase_end(self, trainer, step, metrics):
        self.seen.append(saved(self.root))
        self.then.get(step, lambda: None)()


def background_run(folder, then, resume=None, strategy=None):
    strategy = strategy or NaiveStrategy(seed=1, device='cpu')
    torch.manual_seed(0)
    model = GPTActor(config=tiny_config('gpt2', hidden=16, positions=16))
    watch = Watch(folder / 'checkpoints', then)
    callbacks = [SaveCheckpoint(interval=2, background=True), watch, cb.ProgressBar(enabled=False)]
    ids, mask = torch.arange(3, 7), torch.ones(4, dtype=torch.bool)
    records = [Sequence(prompt_ids=ids[:1], response_ids=ids + i, response_mask=mask) for i in range(10)]
    trainer = SFTTrainer(
        strategy,
        *strategy.prepare((model, strategy.make_optimizer(model.parameters(), lr=0.1))),
        records,
        run_dir=folder,
        callbacks=callbacks,
        train_batch_size=2,
        max_epochs=1,
        log_interval=1,
    )
    if resume is not None:
        trainer.load_checkpoint(resume)
    trainer.fit()
    return watch.seen, torch.cat([p.detach().flatten() for p in model.parameters()])


def test_a_checkpoint_is_written_while_the_run_goes_on(tmp_path, held):
    seen, weights = background_run(tmp_path / 'a', {3: held.set, 4: lambda: None})
    # phase 2 is held until phase 3 has ended, and complete before phase 4 is written; the end of the run waits
    assert seen[:3] == [[], [], []] and seen[3] == [2]
    assert saved(tmp_path / 'a' / 'checkpoints') == [2, 4, 5]
    # it holds the weights of its own phase, although training went on before they were written
    _, resumed = background_run(tmp_path / 'b', {}, resume=tmp_path / 'a' / 'checkpoints' / 'step-00000002')
    assert torch.equal(resumed, weights)


def on_two_ranks(folder):
    with DDPStrategy(seed=1, device='cpu') as strategy:
        _, weights = background_run(folder, {}, strategy=strategy)
        _, resumed = background_run(folder / 'again', {}, folder / 'checkpoints' / 'step-00000004', strategy)
        return saved(folder / 'checkpoints'), torch.equal(weights, resumed)


def test_two_ranks_write_their_parts_in_the_background(tmp_path):
    assert run_distributed(on_two_ranks, 2, tmp_path) == [([2, 4, 5], True)] * 2


def test_what_ends_a_run_leaves_the_former_checkpoint(tmp_path, held):
    def fail():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        background_run(tmp_path, {2: held.set, 4: fail})
    root = tmp_path / 'checkpoints'
    assert saved(root) == [2] and [p.name for p in root.iterdir()] == ['step-00000002']


def test_an_error_of_the_writer_is_raised_at_the_end_of_a_later_phase(tmp_path, monkeypatch):
    write = CheckpointWriter._write

    def full(self, name, data):
        if self.folder.name == 'step-00000002':
            raise OSError(28, 'No space left on device')
        write(self, name, data)

    monkeypatch.setattr(CheckpointWriter, '_write', full)
    with pytest.warns(UserWarning, match='an earlier checkpoint was not written, the run goes on: .*No space left'):
        background_run(tmp_path, {})
    assert saved(tmp_path / 'checkpoints') == [4, 5]


def test_bad_checkpoint_settings_are_refused():
    for arguments, message in (
        ({'interval': 0}, 'interval=0'),
        ({'keep_last': 0}, 'keep_last=0'),
        ({'keep_best': -1}, 'keep_best=-1'),
        ({'keep_best': 2}, 'give keep_last as well'),
        ({'mode': 'best'}, "mode='best'"),
    ):
        with pytest.raises(ValueError, match=message):
            cb.SaveCheckpoint(**arguments)
    with pytest.raises(ValueError, match='nowhere to write'):
        FakeTrainer([cb.SaveCheckpoint()]).fit([])


class Keeper(Callback):
    def __init__(self, group: str, value: float) -> None:
        self.group, self.data = group, torch.tensor([value, value + 1])

    def checkpoint_pieces(self, trainer: Any) -> dict[str, list[Piece]]:
        return {self.group: [Piece('kept', (2,), 0, 2, self.data)]}

    def load_checkpoint_pieces(self, trainer: Any, name: str, reader: TensorReader) -> bool:
        assert name == self.group
        self.data = reader.read('kept', 0, 2).clone()
        return True


class OtherKeeper(Keeper):
    pass


@pytest.mark.parametrize('group', ['statistics', 'actor', 'actor_optim', 'rng', 'a/b', 'x_ema', 'wx@yz'])
def test_a_group_of_any_name_loads_again(tmp_path, group):
    path = sft(callbacks=[Keeper(group, 3.0), OtherKeeper(group, 7.0)]).save_checkpoint(tmp_path / 'saved')
    one, other = Keeper(group, 0.0), OtherKeeper(group, 0.0)
    resumed = sft(callbacks=[other, one])
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        resumed.load_checkpoint(path)
    assert (one.data.tolist(), other.data.tolist()) == ([3.0, 4.0], [7.0, 8.0])


def test_the_checkpoint_records_the_owners_and_a_run_without_one_names_it(tmp_path):
    path = sft(callbacks=[Keeper('statistics', 3.0)]).save_checkpoint(tmp_path / 'saved')
    owners = json.loads((path / 'manifest.json').read_text())['meta']['owners']
    assert owners == {'actor': 'models', 'actor_optim': 'optimizers', 'statistics': 'Keeper.0', 'rng': 'rng'}
    text = 'statistics is of a callback that this run does not have, Keeper; it is left out'
    with pytest.warns(UserWarning, match=text):
        sft().load_checkpoint(path)


def test_a_checkpoint_that_is_written_again_keeps_its_score(tmp_path):
    """As after a signal while the next phase is collected, also in a resumed run."""
    keeper = cb.SaveCheckpoint(keep_last=1, keep_best=1)
    trainer = fit(make(run_dir=tmp_path, callbacks=[keeper]), 2)
    step = tmp_path / 'checkpoints' / 'step-00000002'
    score = score_of(step)
    assert score == trainer.log.phases[-1]['rollout/score_mean']
    assert score_of(trainer.save_checkpoint()) == score
    again = make(run_dir=tmp_path)
    again.load_checkpoint('auto')
    assert score_of(again.save_checkpoint()) == score


def test_a_metric_of_another_phase_may_be_missing_and_one_of_another_method_is_an_error(tmp_path):
    phases = [{'ppo/value_loss': 1.0}, {'ppo/value_loss': 1.0, 'ppo/approx_kl': 0.5}, {'ppo/value_loss': 1.0}]
    keeper = cb.SaveCheckpoint(keep_last=1, keep_best=1, metric='ppo/approx_kl')  # not in the critic's warm-up
    FakeTrainer([keeper], tmp_path).fit(phases)
    assert saved(tmp_path / 'checkpoints') == [2, 3]
    with pytest.raises(ValueError, match="no metric 'sft/loss' in this run"):
        FakeTrainer([cb.EarlyStopping('sft/loss', above=1.0)], tmp_path / 'b').fit(phases)


def test_a_checkpoint_of_a_name_of_ones_own_is_not_taken_for_that_of_the_phase(tmp_path):
    class Own(Callback):
        def on_phase_end(self, trainer: Any, step: int, metrics: Any) -> None:
            trainer.save_checkpoint(trainer.checkpoint_dir / 'mine')

    fit(make(run_dir=tmp_path, callbacks=[cb.SaveCheckpoint(interval=5), Own()]), 2)
    assert sorted(p.name for p in (tmp_path / 'checkpoints').iterdir()) == ['mine', 'step-00000002']


def test_a_background_write_that_fails_in_the_last_phase_is_made_up(tmp_path, monkeypatch):
    own, calls = CheckpointWriter._work, []

    def fails_second(self: Any) -> None:
        calls.append(self)
        if len(calls) == 2:
            raise OSError(28, 'No space left on device')
        own(self)

    monkeypatch.setattr(CheckpointWriter, '_work', fails_second)
    fit(make(run_dir=tmp_path, callbacks=[cb.SaveCheckpoint(background=True)]), 3)
    assert saved(tmp_path / 'checkpoints') == [1, 3]
