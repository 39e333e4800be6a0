"""The checkpoint of a run that ends with an exception: written wherever the weights are whole, and named on stderr.

Weights change only inside optimizer steps. There are four cases:

- No optimizer step since the last phase: the counters return to that phase. The checkpoint equals that of an
  undisturbed run, except for samples that were generated ahead.
- Steps since then, offline training: the same, from the last finished step, which the counters identify. Where the
  phase has a scored checkpoint, which may be the best, it is `checkpoints/cut-short`.
- Steps since then, within a phase of collected experience: the counters return to that phase, the weights stay, and the
  checkpoint is `checkpoints/cut-short`. A resume collects the phase again with these weights; `--resume auto` prefers
  the newest whole phase.
- The exception came from inside a step, or the ranks differ: nothing is written.

On several ranks saving is a collective, done only where all ranks fail at the same place (`Strategy.fails_together`).
"""

from __future__ import annotations

import sys
from contextlib import suppress
from pathlib import Path

from chatgpt.strategies.checkpoint import CUT_SHORT, CheckpointError, latest, list_checkpoints, step_folder
from chatgpt.strategies.checkpoint.folder import score_of
from chatgpt.trainer.callbacks.base import TrainerView
from chatgpt.trainer.run_control import RankMismatchError
from chatgpt.trainer.step import Steps


def save_after_failure(trainer: TrainerView, steps: Steps, error: BaseException) -> None:
    """Writes a checkpoint if possible, and prints the newest one. Never raises."""
    root = trainer.checkpoint_dir
    if not isinstance(error, (Exception, SystemExit)):
        return
    failed = f'the run failed in phase {trainer.phase + 1}'
    if root is None:
        if steps.done and trainer.strategy.is_rank_0:
            print(f'{failed}; it has no run_dir, so there is no checkpoint of it', file=sys.stderr, flush=True)
        return
    try:
        text = _keep(trainer, steps, root, error)
    except Exception as second:
        text = f'nothing could be saved ({type(second).__name__}: {second}); {_standing(root)}'
    if text:
        print(f'{failed}; {text}', file=sys.stderr, flush=True)


def _keep(trainer: TrainerView, steps: Steps, root: Path, error: BaseException) -> str:
    if trainer.phase == 0 and steps.done == 0 and not steps.within:
        return ''  # nothing has been learned
    if not trainer.strategy.fails_together(f'phase {trainer.phase}, {steps.done} steps'):
        text = (
            f'saving takes all ranks, and they did not all fail here with rank {trainer.strategy.rank}: nothing was '
            'saved'
        )
        return f'{text}; {_standing(root)}'
    with suppress(CheckpointError):
        trainer.finish_saving()
    if steps.within or isinstance(error, RankMismatchError):
        why = 'the ranks differ' if isinstance(error, RankMismatchError) else 'some weights had moved and others not'
        return f'nothing was saved, because {why}; {_standing(root)}'
    exact = trainer.put_back()
    path = trainer.strategy.run_on_rank0(trainer.standing_checkpoint)
    of_phase = step_folder(root, trainer.phase)
    is_taken = path is None and trainer.strategy.run_on_rank0(lambda: score_of(of_phase) is not None)
    if path is None:
        path = trainer.save_checkpoint(of_phase if exact and not is_taken else root / CUT_SHORT)
    if not trainer.strategy.is_rank_0:
        return ''  # rank 0 prints it
    if isinstance(error, FloatingPointError):  # from the policy, so a resume would fail in the same way
        earlier = [folder for folder in list_checkpoints(root) if folder != path]
        instead = f'{earlier[-1]}' if earlier else 'the beginning, for there is no earlier checkpoint'
        return f'its policy does not give finite numbers any more: go on from {instead}, with a lower learning rate'
    if exact and not is_taken:
        return f'the state after phase {trainer.phase} is kept in {path}: continue with {resume_flags(path)}'
    whole = latest(root)
    rest = (
        f'; the last whole phase is in {whole}, which {resume_flags(whole)} takes' if whole not in (None, path) else ''
    )
    again = '' if exact else ', which collects it anew'
    return f'the weights after its last optimizer step are kept in {path}: continue with --resume {path}{again}{rest}'


def resume_flags(path: Path) -> str:
    """Returns the flags that resume from a checkpoint. The folder may hold a newer one of another run."""
    return f'--resume auto or --resume {path}' if latest(path.parent) == path else f'--resume {path}'


def _standing(root: Path) -> str:
    newest = latest(root)
    return (
        f'the newest checkpoint is {newest}: continue with {resume_flags(newest)}'
        if newest
        else 'there is no checkpoint of this run'
    )
