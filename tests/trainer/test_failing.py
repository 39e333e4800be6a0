"""Runs that end with an exception: the checkpoint, the message, and the resume."""

from __future__ import annotations

import json
import random
import signal
from pathlib import Path
from typing import Any

import ppo_on_ids
import pytest
import tiny_runs
import torch
from killed_runs import metrics
from ppo_on_ids import CountGood, fit, make
from scripts_on_ranks import run_source
from tiny_runs import weights

from chatgpt.strategies.checkpoint import CheckpointError, CheckpointReader, claim_folder
from chatgpt.strategies.checkpoint.folder import score_of
from chatgpt.trainer import NonFiniteError, checkpointing
from chatgpt.trainer.callbacks import Callback, Evaluator, SaveCheckpoint
from chatgpt.trainer.saving import SaveError

PHASES = 4


class Broken(RuntimeError):
    pass


class BreaksIn(CountGood):
    """A reward model that raises in the n-th phase, when it scores a batch for the n-th time. Scoring a single response
    again does not count."""

    def __init__(self, call: int, error: type[Exception] = Broken) -> None:
        super().__init__()
        self.left, self.error = call, error

    def forward(self, batch: Any) -> torch.Tensor:
        self.left -= batch.num_sequences > 1
        if self.left == 0:
            raise self.error('no answer')
        return super().forward(batch)


class RaiseAt(Callback):
    """Raises before (or after) train batch number `batch` of phase `phase`, both counted from 0."""

    def __init__(self, phase: int, batch: int, after: bool = False) -> None:
        self.phase, self.left = phase, batch
        setattr(self, 'on_learn_batch_end' if after else 'on_learn_batch_start', self._count)

    def _count(self, trainer: Any, *_: Any) -> None:
        if trainer.phase == self.phase:
            self.left -= 1
            if self.left < 0:
                raise Broken('in a batch')


class Signalled(Callback):
    def on_fit_start(self, trainer: Any) -> None:
        signal.raise_signal(signal.SIGTERM)


def broken(error: type[Exception] = Broken, **settings: Any) -> Any:
    trainer = make(**settings)
    with pytest.raises(error):
        fit(trainer, PHASES)
    return trainer


def resumed(source: Any, **settings: Any) -> Any:
    trainer = make(**settings)
    assert trainer.load_checkpoint(source)
    return trainer


def saved(folder: Path) -> list[str]:
    return sorted(p.name for p in (folder / 'checkpoints').iterdir()) if (folder / 'checkpoints').is_dir() else []


@pytest.fixture(scope='module')
def straight(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return fit(make(run_dir=tmp_path_factory.mktemp('straight')), PHASES)


@pytest.mark.parametrize('how', ['in its reward', 'before its first step'])
def test_a_run_that_fails_in_phase_three_loses_nothing(straight, tmp_path, capsys, how):
    broken(run_dir=tmp_path, **({'reward': BreaksIn(3)} if 'reward' in how else {'callbacks': [RaiseAt(2, 0)]}))
    assert saved(tmp_path) == ['step-00000002']
    path = tmp_path / 'checkpoints' / 'step-00000002'
    text = f'the run failed in phase 3; the state after phase 2 is kept in {path}: continue with --resume auto or '
    assert f'{text}--resume {path}\n' in capsys.readouterr().err
    again = resumed('auto', run_dir=tmp_path)
    assert (again.phase, again.timestep, again.collector.draws.samples_drawn) == (2, 2, 32)
    assert torch.equal(weights(straight), weights(fit(again, PHASES)))
    assert metrics(tmp_path) == metrics(straight.run_dir)


def test_a_loss_that_is_not_finite_keeps_the_phase_before(tmp_path, capsys):
    class Poison(Callback):
        def on_make_experience_end(self, trainer, experiences):
            if trainer.phase == 1:
                experiences[0].advantages.fill_(float('nan'))

    broken(NonFiniteError, run_dir=tmp_path, callbacks=[Poison()], whiten_advantages=False)
    (step,) = saved(tmp_path)
    assert f'kept in {tmp_path / "checkpoints" / step}' in capsys.readouterr().err


@pytest.mark.parametrize('earlier', [False, True])
def test_a_policy_without_finite_logits_is_not_recommended(tmp_path, capsys, earlier):
    callbacks = [SaveCheckpoint(interval=1)] if earlier else []
    broken(FloatingPointError, run_dir=tmp_path, reward=BreaksIn(3, FloatingPointError), callbacks=callbacks)
    text, first = capsys.readouterr().err, tmp_path / 'checkpoints' / 'step-00000001'
    instead = first if earlier else 'the beginning, for there is no earlier checkpoint'
    assert f'does not give finite numbers any more: go on from {instead}, with a lower learning rate' in text
    assert '--resume' not in text


def test_weights_of_an_interrupted_phase_are_saved_apart_from_whole_phases(tmp_path, capsys):
    folder = tmp_path / 'later'
    trainer = broken(run_dir=folder, callbacks=[RaiseAt(2, 2), SaveCheckpoint(interval=1, keep_last=1)])
    cut, whole = (folder / 'checkpoints' / name for name in ('cut-short', 'step-00000002'))
    assert saved(folder) == [cut.name, whole.name]
    text = capsys.readouterr().err
    assert f'the weights after its last optimizer step are kept in {cut}: continue with --resume {cut}' in text
    assert f'the last whole phase is in {whole}, which --resume auto or --resume {whole} takes' in text
    again, exact = resumed(cut, run_dir=folder), resumed(folder)
    assert torch.equal(weights(again), weights(trainer))
    assert (again.phase, again.timestep) == (2, 2)  # the phase is collected again
    assert not torch.equal(weights(exact), weights(trainer)) and exact.phase == 2
    assert fit(again, PHASES).phase == PHASES
    assert 'cut-short' not in saved(folder)  # older than the newest checkpoint
    # without a whole phase, auto takes the cut-short one
    first = broken(run_dir=tmp_path / 'at once', callbacks=[RaiseAt(0, 1)])
    assert saved(tmp_path / 'at once') == ['cut-short']
    assert torch.equal(weights(resumed('auto', run_dir=tmp_path / 'at once')), weights(first))


def test_a_checkpoint_in_the_background_is_finished_though_a_later_step_failed(tmp_path, capsys, monkeypatch):
    class Breaks(Callback):
        def on_phase_end(self, trainer: Any, step: int, metrics: Any) -> None:
            if step == 2:
                monkeypatch.setattr(torch.optim.AdamW, 'step', breaks)

    def breaks(*args: Any, **kwargs: Any) -> None:
        raise Broken('out of memory')

    class Slow(SaveCheckpoint):
        def _finish(self, trainer: Any, wait: bool) -> None:
            if wait:
                super()._finish(trainer, wait)

    broken(run_dir=tmp_path, callbacks=[Slow(interval=2, background=True), Breaks()])
    assert saved(tmp_path) == ['step-00000002']
    assert 'some weights had moved and others not; the newest checkpoint is' in capsys.readouterr().err


def test_half_a_step_and_a_run_that_has_learned_nothing_are_not_saved(tmp_path, capsys, monkeypatch):
    broken(run_dir=tmp_path, reward=BreaksIn(1))
    assert saved(tmp_path) == [] and 'the run failed' not in capsys.readouterr().err

    def breaks(*args: Any, **kwargs: Any) -> None:
        raise Broken('out of memory')

    monkeypatch.setattr(torch.optim.AdamW, 'step', breaks)
    broken(run_dir=tmp_path)
    text = 'nothing was saved, because some weights had moved and others not; there is no checkpoint of this run\n'
    assert text in capsys.readouterr().err and saved(tmp_path) == []


def test_a_full_disk_is_reported_and_no_checkpoint_is_claimed(tmp_path, capsys, monkeypatch):
    def full(*args: Any, **kwargs: Any) -> None:
        raise CheckpointError('no space left on device')

    monkeypatch.setattr(checkpointing, 'begin_checkpoint', full)
    broken(run_dir=tmp_path, reward=BreaksIn(2))
    text = 'nothing could be saved (CheckpointError: no space left on device); there is no checkpoint of this run\n'
    assert f'the run failed in phase 2; {text}' in capsys.readouterr().err


def test_a_failure_right_after_a_checkpoint_names_it_and_writes_none(tmp_path, capsys):
    broken(run_dir=tmp_path, reward=BreaksIn(3), callbacks=[SaveCheckpoint(interval=2)])
    assert saved(tmp_path) == ['step-00000002']
    again = resumed('auto', run_dir=tmp_path, reward=BreaksIn(1))
    capsys.readouterr()
    manifest = tmp_path / 'checkpoints' / 'step-00000002' / 'manifest.json'
    before = manifest.stat().st_mtime_ns
    with pytest.raises(Broken):
        fit(again, PHASES)
    assert manifest.stat().st_mtime_ns == before
    assert 'the state after phase 2 is kept in' in capsys.readouterr().err


def test_an_evaluation_that_raises_after_the_last_phase_leaves_the_trained_state(tmp_path):
    def evaluate(trainer: Any) -> dict[str, float]:
        raise Broken('no score')

    broken(run_dir=tmp_path, callbacks=[Evaluator(evaluate, 100, before=False)])
    assert saved(tmp_path) == [f'step-{PHASES:08d}']


@pytest.mark.parametrize(('batch', 'after'), [(0, True), (1, False), (2, True)])
def test_supervised_training_resumes_from_its_last_step_to_the_same_bits(tmp_path, batch, after):
    """Four batches an epoch, two epochs; phases of three batches, the second of which is interrupted."""

    def sft(name: str, *callbacks: Callback) -> Any:
        return tiny_runs.sft(callbacks=callbacks, run_dir=tmp_path / name, log_interval=3)

    straight, broken, again = sft('straight'), sft('broken', RaiseAt(1, batch, after)), sft('broken')
    straight.fit()
    with pytest.raises(Broken):
        broken.fit()
    # after the third batch only the report was missing
    assert saved(tmp_path / 'broken') == ['step-00000001' if batch < 2 else 'step-00000002']
    again.load_checkpoint('auto')
    assert again.batches_done == broken.batches_done == 3 + batch + after
    again.fit()
    assert torch.equal(weights(straight), weights(again))
    assert (again.batches_done, again.num_updates, again.phase) == (8, 8, 3)
    ours, theirs = ([json.loads(x) for x in (tmp_path / n / 'metrics.jsonl').open()] for n in ('broken', 'straight'))
    assert (ours[0]['sft/loss'], ours[-1]['sft/loss']) == (theirs[0]['sft/loss'], theirs[-1]['sft/loss'])
    # the interrupted phase lacks its first batches, or all
    assert [m['step'] for m in ours] == ([1, 2, 3] if batch < 2 else [1, 3])


def test_a_run_with_a_folder_saves_at_intervals_and_at_the_end(tmp_path, monkeypatch):
    now, seen = [0.0], []
    monkeypatch.setattr('chatgpt.trainer.callbacks.checkpoint.time.monotonic', lambda: now[0])

    class Slow(Callback):
        def on_phase_end(self, trainer, step, metrics):
            seen.append(saved(tmp_path))
            now[0] += 8 * 60

    fit(make(run_dir=tmp_path, callbacks=[Slow()]), PHASES)
    # after 16 minutes, then after 32, at the end
    assert seen == [[], [], ['step-00000002'], ['step-00000002']]
    assert saved(tmp_path) == ['step-00000002', 'step-00000004']
    assert not any(isinstance(c, SaveCheckpoint) for c in make().callbacks)


@pytest.fixture
def in_the_way(tmp_path):
    """A file at the path of a folder."""
    path = tmp_path / 'file'
    path.touch()
    return path / 'model'


def test_a_model_that_cannot_be_written_is_in_the_last_checkpoint(tmp_path, in_the_way):
    trainer = fit(make(run_dir=tmp_path / 'run'), 1)
    end = tmp_path / 'run' / 'checkpoints' / 'step-00000001'
    text = rf'{in_the_way}: the trained model could not be written .*weights are in the checkpoint {end}: '
    with pytest.raises(SaveError, match=text):
        trainer.save_pretrained(in_the_way)
    again = resumed(end, run_dir=tmp_path / 'run')
    fit(again, 1).save_pretrained(tmp_path / 'model')
    assert torch.equal(weights(again), weights(trainer)) and (tmp_path / 'model' / 'config.json').is_file()


@pytest.mark.parametrize('with_folder', [True, False])
def test_without_a_checkpoint_the_model_is_written_elsewhere(tmp_path, in_the_way, monkeypatch, with_folder):
    from transformers import AutoModelForCausalLM

    monkeypatch.setattr('tempfile.tempdir', str(tmp_path))
    folder = {'run_dir': tmp_path / 'run'} if with_folder else {}
    trainer = fit(make(**folder, callbacks=[SaveCheckpoint(tmp_path / 'c', interval=None)]), 1)
    with pytest.raises(SaveError, match='it was written to .*rescued-model instead') as caught:
        trainer.save_pretrained(in_the_way)
    written = Path(str(caught.value).partition('written to ')[2].removesuffix(' instead'))
    assert (written.parent == tmp_path / 'run') == with_folder
    loaded = AutoModelForCausalLM.from_pretrained(written)
    assert torch.equal(loaded.get_input_embeddings().weight, trainer.actor.model.get_input_embeddings().weight)


def test_a_model_that_cannot_be_written_anywhere_is_reported_as_lost(in_the_way, monkeypatch):
    monkeypatch.setattr('tempfile.mkdtemp', lambda prefix: str(in_the_way))
    with pytest.raises(SaveError, match='and nowhere else: .*The weights are lost with this process'):
        make().save_pretrained(in_the_way)


def test_part_of_a_model_is_removed(tmp_path, monkeypatch):
    def full(self, folder, state_dict):
        Path(folder).mkdir(exist_ok=True)
        Path(folder, 'config.json').write_text('{}')
        raise OSError(28, 'No space left on device')

    trainer, elsewhere = make(), tmp_path / 'elsewhere'
    monkeypatch.setattr(type(trainer.actor.model), 'save_pretrained', full)
    monkeypatch.setattr('tempfile.mkdtemp', lambda prefix: str(elsewhere))
    elsewhere.mkdir()
    (tmp_path / 'old').mkdir()
    for name, left in (('new', False), ('old', True)):
        with pytest.raises(SaveError, match='No space left.* and nowhere else'):
            trainer.save_pretrained(tmp_path / name)
        assert (tmp_path / name).exists() == left and not list(elsewhere.iterdir())


RANKS = """
from tiny_runs import ppo
from chatgpt.strategies import DDPStrategy, FSDPStrategy
from chatgpt.trainer.callbacks import Callback

calls = []

def reward(prompts, responses):
    calls.append(1)
    if '{how}' == 'reward' and len(calls) == 3:
        raise RuntimeError('no answer')
    return [float(len(r)) for r in responses]

class Alone(Callback):
    def on_learn_batch_start(self, trainer):
        if '{how}' == 'alone' and trainer.phase == 2 and trainer.strategy.rank == 1:
            raise RuntimeError('only here')

with {kind}(seed=3, device='cpu') as strategy:
    trainer = ppo(strategy, reward, run_dir='{folder}', max_new_tokens=4, callbacks=[Alone()])
    trainer.fit(['a one', 'a two', 'a three', 'a four'], 1, 4, 1)
"""


@pytest.mark.parametrize('kind', ['DDPStrategy', 'FSDPStrategy'])
def test_ranks_that_fail_together_save(tmp_path, kind):
    failed = run_source(RANKS.format(kind=kind, how='reward', folder=tmp_path))
    assert all(code != 0 for code, _ in failed)
    path = tmp_path / 'checkpoints' / 'step-00000002'
    assert f'the run failed in phase 3; the state after phase 2 is kept in {path}' in failed[0][1]
    assert saved(tmp_path) == ['step-00000002']
    assert CheckpointReader(path).meta['phase'] == 2  # whole: every rank has written its part


STOPPED = """
import os, signal, time
from chatgpt.strategies import DDPStrategy
from chatgpt.trainer.callbacks import Callback
from tiny_runs import ppo, vowels

class Evicted(Callback):
    order = 2000

    def on_phase_end(self, trainer, step, metrics):
        if trainer.strategy.rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)

    def on_fit_end(self, trainer):
        if trainer.strategy.is_rank_0:
            time.sleep(4)  # such as a tracker that sends its last lines
            open('{folder}/done', 'w').close()

with DDPStrategy(seed=3, device='cpu') as strategy, strategy.failure_guard():
    trainer = ppo(strategy, vowels, run_dir='{folder}', max_new_tokens=4, callbacks=[Evicted()])
    trainer.fit(['a one', 'a two', 'a three', 'a four'], 1, 4, 1)
"""


def test_a_stop_waits_for_what_rank_0_still_does(tmp_path):
    stopped = run_source(STOPPED.format(folder=tmp_path))
    assert [code for code, _ in stopped] == [143, 143], stopped
    assert (tmp_path / 'done').is_file()


def test_a_rank_that_fails_alone_names_the_newest_checkpoint(tmp_path):
    alone = run_source(RANKS.format(kind='DDPStrategy', how='alone', folder=tmp_path))
    assert all(code != 0 for code, _ in alone)
    text = (
        'saving takes all ranks, and they did not all fail here with rank 1: nothing was saved; there is no checkpoint '
        'of this run'
    )
    assert f'the run failed in phase 3; {text}' in alone[1][1]
    assert 'only here' in alone[0][1]
    assert saved(tmp_path) == []


def test_a_second_fit_after_an_exception_learns_from_its_own_samples_alone():
    """Gradients of the interrupted batch and the experience of the interrupted phase are dropped."""
    seen = []

    class Sizes(Callback):
        def on_make_experience_end(self, trainer: Any, experiences: Any) -> None:
            seen.append(len(trainer.buffer))

        def on_learn_batch_start(self, trainer: Any) -> None:
            grads = [p.grad for m in trainer.models().values() for p in m.parameters()]
            assert all(g is None for g in grads)

    trainer = make(callbacks=[Sizes()])
    own = trainer.strategy.backward
    calls = []

    def fails_once(*given: Any) -> None:
        own(*given)
        calls.append(given)
        if len(calls) == 3:
            raise Broken('in a micro-batch')

    trainer.strategy.backward = fails_once
    with pytest.raises(Broken):
        fit(trainer, 1)
    fit(trainer, 1)
    assert len(seen) == 2 and seen[0] == seen[1]


def test_a_reward_with_a_generator_of_its_own_repeats_its_draws(tmp_path):
    """The failed phase is collected again, with the random numbers that it had."""

    class Lucky(CountGood):
        fails = 0

        def forward(self, batch: Any) -> torch.Tensor:
            scores = super().forward(batch)
            scores = scores + torch.tensor([random.random() for _ in range(len(scores))])
            Lucky.fails -= batch.num_sequences > 1
            if Lucky.fails == 0:
                raise Broken('after its draws')
            return scores

    straight = fit(make(run_dir=tmp_path / 'straight', reward=Lucky()), PHASES)
    Lucky.fails = 3
    broken(run_dir=tmp_path / 'broken', reward=Lucky())
    again = fit(resumed('auto', run_dir=tmp_path / 'broken', reward=Lucky()), PHASES)
    assert torch.equal(weights(straight), weights(again))


def test_the_best_checkpoint_is_not_replaced_by_a_later_state_of_its_phase(tmp_path, capsys):
    """Offline, where a failed run is saved from its last step: phase 1 has a score, and may be the best."""

    def sft(name: str, *callbacks: Callback) -> Any:
        keeper = SaveCheckpoint(interval=1, keep_last=1, keep_best=1, metric='sft/loss', mode='min')
        return tiny_runs.sft(callbacks=[keeper, *callbacks], run_dir=tmp_path / name, log_interval=3)

    straight, broken, again = sft('straight'), sft('broken', RaiseAt(1, 2)), sft('broken')
    straight.fit()
    with pytest.raises(Broken):
        broken.fit()
    assert saved(tmp_path / 'broken') == ['cut-short', 'step-00000001']
    cut, best = (tmp_path / 'broken' / 'checkpoints' / name for name in ('cut-short', 'step-00000001'))
    assert score_of(best) == pytest.approx(-straight.log.phases[0]['sft/loss'])
    text = capsys.readouterr().err
    assert f'kept in {cut}: continue with --resume {cut}; the last whole phase is in {best}' in text
    assert score_of(cut) is None  # the weights are others
    signalled = sft('broken', Signalled())
    signalled.load_checkpoint(cut)
    with pytest.raises(SystemExit):
        signalled.fit()  # ends before its first phase
    assert saved(tmp_path / 'broken') == ['cut-short', 'step-00000001'] and score_of(best) is not None
    assert again.load_checkpoint(cut) and again.batches_done == 5
    again.fit()
    assert torch.equal(weights(straight), weights(again))


def test_an_evaluation_is_not_lost_where_a_phase_failed_after_its_epoch_ended(tmp_path):
    def sft(name: str, *callbacks: Callback) -> Any:
        data = [tiny_runs.sequence([3 + i % 5], [4 + i % 7, 2]) for i in range(16)]
        return tiny_runs.sft(data, data[:4], callbacks=callbacks, run_dir=tmp_path / name, log_interval=3)

    straight, broken, again = sft('straight'), sft('broken', RaiseAt(1, 1, after=True)), sft('broken')
    straight.fit()
    with pytest.raises(Broken):
        broken.fit()  # after batch 5; epochs have four, phases three
    assert again.load_checkpoint('auto') and again.batches_done == 5
    again.fit()
    for name in ('sft/val_loss', 'sft/val_perplexity'):
        assert again.log.phases[0][name] == straight.log.phases[1][name]


def test_a_caller_who_goes_on_after_an_exception_does_not_learn_the_same_samples_again():
    trainer = make(callbacks=[RaiseAt(0, 0)])
    trainer.set_prompts(ppo_on_ids.prompts())
    trainer.collect(1)
    with pytest.raises(Broken):
        trainer.learn()
    assert len(trainer.buffer) == 0


def test_a_fit_after_one_that_found_its_folder_locked_has_the_same_end(tmp_path):
    fit(make(run_dir=tmp_path), 2)
    again = resumed('auto', run_dir=tmp_path)
    with claim_folder(tmp_path), pytest.raises(CheckpointError, match='is writing here'):
        fit(again, PHASES)
    assert fit(again, PHASES).phase == PHASES
