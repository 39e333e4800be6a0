"""A run that an exception ends: what is kept, what is said of it, and what goes on from it afterwards."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from killed_runs import metrics
from ppo_on_ids import CountGood, make, prompts, weights
from scripts_on_ranks import run_script
from sft_runs import make as make_sft

from chatgpt.strategies.checkpoint import CheckpointError, CheckpointReader
from chatgpt.trainer import NonFiniteError, checkpointing
from chatgpt.trainer.callbacks import Callback, Evaluator, ProgressBar, SaveCheckpoint
from chatgpt.trainer.saving import SaveError

PHASES = 4


class Broken(RuntimeError):
    pass


class BreaksIn(CountGood):
    """A reward model that raises in the n-th phase: when it scores a batch for the n-th time. Scoring again, one
    response alone, does not count."""

    def __init__(self, call: int) -> None:
        super().__init__()
        self.left = call

    def forward(self, batch: Any) -> torch.Tensor:
        self.left -= batch.num_sequences > 1
        if self.left == 0:
            raise Broken('no answer')
        return super().forward(batch)


class RaiseAt(ProgressBar):
    """Raises before (or after) train batch number `batch` of phase `phase`, both counted from 0."""

    def __init__(self, phase: int, batch: int, after: bool = False) -> None:
        super().__init__(enabled=False)
        self.phase, self.left, self.after = phase, batch, after

    def _count(self, trainer: Any) -> None:
        if trainer.phase == self.phase:
            self.left -= 1
            if self.left < 0:
                raise Broken('in a batch')

    def on_learn_batch_start(self, trainer: Any) -> None:
        if not self.after:
            self._count(trainer)

    def on_learn_batch_end(self, trainer: Any, metrics: dict[str, float]) -> None:
        if self.after:
            self._count(trainer)


def fit(trainer: Any) -> Any:
    trainer.fit(prompts(), num_episodes=1, max_timesteps=PHASES, update_timesteps=1)
    return trainer


def saved(folder: Path) -> list[str]:
    return sorted(p.name for p in (folder / 'checkpoints').iterdir()) if (folder / 'checkpoints').is_dir() else []


def test_a_reward_that_raises_in_phase_three_loses_nothing(tmp_path, capsys):
    straight = fit(make(run_dir=tmp_path / 'straight'))
    with pytest.raises(Broken):
        fit(make(run_dir=tmp_path / 'broken', reward=BreaksIn(3)))
    assert saved(tmp_path / 'broken') == ['step-00000002']
    path = tmp_path / 'broken' / 'checkpoints' / 'step-00000002'
    told = (
        f'the run failed in phase 3; the state after phase 2 is kept in {path}: continue with --resume auto or '
        f'--resume {path}\n'
    )
    assert told in capsys.readouterr().err
    again = make(run_dir=tmp_path / 'broken')
    assert again.load_checkpoint('auto')
    assert (again.phase, again.timestep, again.collector.draws.samples_drawn) == (2, 2, 32)
    fit(again)
    assert torch.equal(weights(straight), weights(again))
    assert metrics(tmp_path / 'broken') == metrics(tmp_path / 'straight')


def test_a_loss_that_is_not_finite_keeps_the_phase_before(tmp_path, capsys):
    class Poison(ProgressBar):
        def on_make_experience_end(self, trainer, experiences):
            if trainer.phase == 1:
                experiences[0].advantages.fill_(float('nan'))

    with pytest.raises(NonFiniteError) as caught:
        fit(make(run_dir=tmp_path, callbacks=[Poison(enabled=False)], whiten_advantages=False))
    assert 'checkpoint' not in str(caught.value) and 'The weights are those before this step' in str(caught.value)
    steps = saved(tmp_path)
    assert len(steps) == 1
    assert f'kept in {tmp_path / "checkpoints" / steps[0]}' in capsys.readouterr().err


def test_a_policy_without_finite_numbers_is_not_recommended(tmp_path, capsys):
    class NotFinite(BreaksIn):
        def forward(self, batch: Any) -> torch.Tensor:
            self.left -= batch.num_sequences > 1
            if self.left == 0:
                raise FloatingPointError('the logits of sample 3 are not finite')
            return CountGood.forward(self, batch)

    for name, callbacks, instead in (
        ('one', [], 'the beginning, for there is no earlier checkpoint'),
        ('two', [SaveCheckpoint(interval=1)], str(tmp_path / 'two' / 'checkpoints' / 'step-00000001')),
    ):
        with pytest.raises(FloatingPointError):
            fit(make(run_dir=tmp_path / name, reward=NotFinite(3), callbacks=[*callbacks, ProgressBar(enabled=False)]))
        told = capsys.readouterr().err
        assert f'does not give finite numbers any more: go on from {instead}, with a lower learning rate' in told
        assert '--resume' not in told


def test_an_exception_before_the_first_step_of_a_phase_is_one_between_phases(tmp_path):
    straight = fit(make(run_dir=tmp_path / 'straight'))
    with pytest.raises(Broken):
        fit(make(run_dir=tmp_path / 'broken', callbacks=[RaiseAt(1, 0)]))
    assert saved(tmp_path / 'broken') == ['step-00000001']
    again = make(run_dir=tmp_path / 'broken')
    again.load_checkpoint('auto')
    assert torch.equal(weights(straight), weights(fit(again)))


def test_learning_that_is_cut_short_keeps_its_weights_apart_from_whole_phases(tmp_path, capsys):
    trainer = make(run_dir=tmp_path, callbacks=[RaiseAt(2, 2), SaveCheckpoint(interval=1, keep_last=1)])
    with pytest.raises(Broken):
        fit(trainer)
    cut, whole = (tmp_path / 'checkpoints' / name for name in ('cut-short', 'step-00000002'))
    assert saved(tmp_path) == [cut.name, whole.name]
    told = capsys.readouterr().err
    assert (
        f'the run failed in phase 3; the weights after its last optimizer step are kept in {cut}: continue with '
        f'--resume {cut}' in told
    )
    assert f'the last whole phase is in {whole}, which --resume auto or --resume {whole} takes' in told
    again = make(run_dir=tmp_path)
    again.load_checkpoint(cut)
    assert torch.equal(weights(again), weights(trainer))
    assert (again.phase, again.timestep) == (2, 2)  # the phase is collected anew
    exact = make()
    exact.load_checkpoint(tmp_path)
    assert not torch.equal(weights(exact), weights(trainer)) and exact.phase == 2
    assert fit(again).phase == PHASES
    assert 'cut-short' not in saved(tmp_path)  # passed by now


def test_where_no_whole_phase_was_saved_auto_takes_the_one_cut_short(tmp_path):
    trainer = make(run_dir=tmp_path, callbacks=[RaiseAt(0, 1)])
    with pytest.raises(Broken):
        fit(trainer)
    assert saved(tmp_path) == ['cut-short']
    again = make(run_dir=tmp_path)
    assert again.load_checkpoint('auto') and torch.equal(weights(again), weights(trainer))


def test_half_a_step_is_not_saved(tmp_path, capsys, monkeypatch):
    trainer = make(run_dir=tmp_path)

    def breaks(*args: Any, **kwargs: Any) -> None:
        raise Broken('out of memory')

    monkeypatch.setattr(trainer.actor_optim, 'step', breaks)
    with pytest.raises(Broken):
        fit(trainer)
    told = capsys.readouterr().err
    assert (
        'nothing was saved, because some weights had moved and others not; there is no checkpoint of this run\n' in told
    )
    assert saved(tmp_path) == []


def test_a_disk_that_is_full_is_said_and_no_checkpoint_is_made_up(tmp_path, capsys, monkeypatch):
    def full(*args: Any, **kwargs: Any) -> None:
        raise CheckpointError('no space left on device')

    monkeypatch.setattr(checkpointing, 'save_checkpoint', full)
    with pytest.raises(Broken):
        fit(make(run_dir=tmp_path, reward=BreaksIn(2)))
    told = 'nothing could be saved (CheckpointError: no space left on device); there is no checkpoint of this run\n'
    assert f'the run failed in phase 2; {told}' in capsys.readouterr().err


def test_a_run_that_has_learned_nothing_keeps_and_says_nothing(tmp_path, capsys):
    with pytest.raises(Broken):
        fit(make(run_dir=tmp_path, reward=BreaksIn(1)))
    assert saved(tmp_path) == [] and 'the run failed' not in capsys.readouterr().err


def test_a_failure_right_after_a_checkpoint_names_it_and_writes_none(tmp_path, capsys):
    with pytest.raises(Broken):
        fit(
            make(
                run_dir=tmp_path, reward=BreaksIn(3), callbacks=[SaveCheckpoint(interval=2), ProgressBar(enabled=False)]
            )
        )
    assert saved(tmp_path) == ['step-00000002']
    again = make(run_dir=tmp_path, reward=BreaksIn(1))
    again.load_checkpoint('auto')
    capsys.readouterr()
    before = (tmp_path / 'checkpoints' / 'step-00000002' / 'manifest.json').stat().st_mtime_ns
    with pytest.raises(Broken):
        fit(again)
    assert (tmp_path / 'checkpoints' / 'step-00000002' / 'manifest.json').stat().st_mtime_ns == before
    assert 'the state after phase 2 is kept in' in capsys.readouterr().err


def test_an_evaluation_that_raises_after_the_last_phase_leaves_the_trained_state(tmp_path):
    def evaluate(trainer: Any) -> dict[str, float]:
        raise Broken('no score')

    with pytest.raises(Broken):
        fit(make(run_dir=tmp_path, callbacks=[Evaluator(evaluate, 100, before=False), ProgressBar(enabled=False)]))
    assert saved(tmp_path) == [f'step-{PHASES:08d}']


@pytest.mark.parametrize(('batch', 'after'), [(0, True), (1, False), (2, True)])
def test_supervised_training_goes_on_from_its_last_step_to_the_same_bits(tmp_path, batch, after):
    """Four batches an epoch, two epochs; phases of three batches, the second of which is cut short."""

    def sft(name: str, *callbacks: Callback) -> Any:
        trainer = make_sft(callbacks=callbacks, run_dir=tmp_path / name)
        trainer.config.log_interval = 3
        return trainer

    straight = sft('straight')
    straight.fit()
    broken = sft('broken', RaiseAt(1, batch, after))
    with pytest.raises(Broken):
        broken.fit()
    assert saved(tmp_path / 'broken') == [
        'step-00000001' if batch < 2 else 'step-00000002'
    ]  # of the third batch only the report lacked
    again = sft('broken')
    again.load_checkpoint('auto')
    assert again.batches_done == broken.batches_done == 3 + batch + after
    again.fit()
    for a, b in zip(straight.model.parameters(), again.model.parameters(), strict=True):
        assert torch.equal(a, b)
    assert (again.batches_done, again.num_updates, again.phase) == (8, 8, 3)
    ours, theirs = ([json.loads(x) for x in (tmp_path / n / 'metrics.jsonl').open()] for n in ('broken', 'straight'))
    assert (ours[0]['sft/loss'], ours[-1]['sft/loss']) == (theirs[0]['sft/loss'], theirs[-1]['sft/loss'])
    assert [m['step'] for m in ours] == (
        [1, 2, 3] if batch < 2 else [1, 3]
    )  # the one cut short lacks its first batches, or all


def test_a_run_with_a_folder_saves_by_the_clock_and_at_the_end(tmp_path, monkeypatch):
    now = [0.0]
    monkeypatch.setattr('chatgpt.trainer.callbacks.checkpoint.time.monotonic', lambda: now[0])

    class Slow(ProgressBar):
        seen: list[list[str]] = []

        def on_phase_end(self, trainer, step, metrics):
            self.seen.append(saved(tmp_path))
            now[0] += 8 * 60

    trainer = make(run_dir=tmp_path, callbacks=[Slow(enabled=False)])
    fit(trainer)
    assert Slow.seen == [
        [],
        [],
        ['step-00000002'],
        ['step-00000002'],
    ]  # after 16 minutes, then after 32, which is the end
    assert saved(tmp_path) == ['step-00000002', 'step-00000004']
    assert make().callbacks is not None and not any(isinstance(c, SaveCheckpoint) for c in make().callbacks)


# ---------------------------------------------------------------- the trained model cannot be written


@pytest.fixture
def in_the_way(tmp_path):
    """A file where a folder should be."""
    path = tmp_path / 'file'
    path.touch()
    return path / 'model'


def test_a_model_that_cannot_be_written_is_in_the_checkpoint_of_the_end(tmp_path, in_the_way):
    trainer = fit(make(run_dir=tmp_path / 'run'))
    end = tmp_path / 'run' / 'checkpoints' / f'step-{PHASES:08d}'
    with pytest.raises(
        SaveError,
        match=rf'{in_the_way}: the trained model could not be written .*weights are in the checkpoint {end}: ',
    ):
        trainer.save_pretrained(in_the_way)
    again = make(run_dir=tmp_path / 'run')
    again.load_checkpoint(end)
    fit(again).save_pretrained(tmp_path / 'model')
    assert torch.equal(weights(again), weights(trainer)) and (tmp_path / 'model' / 'config.json').is_file()


@pytest.mark.parametrize('with_folder', [True, False])
def test_without_a_checkpoint_the_model_is_written_elsewhere(tmp_path, in_the_way, monkeypatch, with_folder):
    from transformers import AutoModelForCausalLM

    monkeypatch.setattr('tempfile.tempdir', str(tmp_path))
    trainer = make(
        run_dir=tmp_path / 'run' if with_folder else None, callbacks=[SaveCheckpoint(tmp_path / 'c', interval=None)]
    )
    fit(trainer)
    with pytest.raises(SaveError, match='it was written to .*rescued-model instead') as caught:
        trainer.save_pretrained(in_the_way)
    folder = Path(str(caught.value).partition('written to ')[2].removesuffix(' instead'))
    assert (folder.parent == tmp_path / 'run') == with_folder
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    assert torch.equal(loaded.get_input_embeddings().weight, trainer.actor.model.get_input_embeddings().weight)


def test_a_model_that_can_be_written_nowhere_is_said_to_be_lost(tmp_path, in_the_way, monkeypatch):
    trainer = fit(make())
    monkeypatch.setattr('tempfile.mkdtemp', lambda prefix: str(in_the_way))
    with pytest.raises(SaveError, match='and nowhere else: .*The weights are lost with this process'):
        trainer.save_pretrained(in_the_way)


RANKS = """
import sys, torch
from chatgpt.testing.fakes import char_tokenizer, tiny_config
from chatgpt.nn import GPTActor, GPTCritic
from chatgpt.trainer import PPOTrainer
from chatgpt.trainer import strategies as s
from chatgpt.trainer.callbacks import ProgressBar
from copy import deepcopy

kind, how, folder = sys.argv[1:]
calls = []

def reward(prompts, responses):
    calls.append(1)
    if how == 'reward' and len(calls) == 3:
        raise RuntimeError('no answer')
    return [float(len(r)) for r in responses]

class Alone(ProgressBar):
    def on_learn_batch_start(self, trainer):
        if how == 'alone' and trainer.phase == 2 and trainer.strategy.rank == 1:
            raise RuntimeError('only here')

with getattr(s, kind)(seed=3, device='cpu') as strategy:
    config = tiny_config('gpt2', positions=48)
    with strategy.model_init_context():
        actor, critic = GPTActor(config=config), GPTCritic(config=config)
        initial = deepcopy(actor)
    (actor, a), (critic, c), initial = strategy.prepare(
        (actor, torch.optim.AdamW(actor.parameters())), (critic, torch.optim.AdamW(critic.parameters())), initial)
    trainer = PPOTrainer(strategy, actor, critic, reward, initial, a, c, tokenizer=char_tokenizer(), run_dir=folder,
                         experience_batch_size=4, train_batch_size=4, max_new_tokens=4,
                         callbacks=[Alone(enabled=False)])
    trainer.fit(['a one', 'a two', 'a three', 'a four'], 1, 4, 1)
"""


@pytest.mark.parametrize('kind', ['DDPStrategy', 'FSDPStrategy'])
def test_ranks_that_fail_together_save(tmp_path, kind):
    script = tmp_path / 'script.py'
    script.write_text(RANKS)
    failed = run_script([str(script), kind, 'reward', str(tmp_path / 'run')])
    assert all(code != 0 for code, _ in failed)
    path = tmp_path / 'run' / 'checkpoints' / 'step-00000002'
    assert f'the run failed in phase 3; the state after phase 2 is kept in {path}' in failed[0][1]
    assert saved(tmp_path / 'run') == ['step-00000002']
    assert CheckpointReader(path).meta['phase'] == 2  # whole: every rank has written its part


def test_a_rank_that_fails_alone_says_what_stands(tmp_path):
    script = tmp_path / 'script.py'
    script.write_text(RANKS)
    alone = run_script([str(script), 'DDPStrategy', 'alone', str(tmp_path / 'alone')])
    assert all(code != 0 for code, _ in alone)
    told = (
        'saving takes all ranks, and they did not all fail here with rank 1: nothing was saved; there is no checkpoint '
        'of this run'
    )
    assert f'the run failed in phase 3; {told}' in alone[1][1]
    assert 'only here' in alone[0][1]
    assert saved(tmp_path / 'alone') == []
