"""The base of all trainers: a strategy, models and optimizers, counters, callbacks, and a run that can stop and resume.

A trainer alternates collect and learn; one with nothing to collect only learns. Metrics are logged, checkpoints written
and signals handled between learning phases.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as SequenceOf
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn
from torch.optim import Optimizer

from chatgpt.data.formats import note_model
from chatgpt.monitor.publish import NUM_SAMPLES
from chatgpt.strategies.base import Strategy
from chatgpt.strategies.checkpoint import CUT_SHORT, CheckpointError, claim_folder
from chatgpt.strategies.checkpoint.layout import MANIFEST
from chatgpt.trainer import checkpointing
from chatgpt.trainer.callbacks import Callback, CallbackList, SaveCheckpoint
from chatgpt.trainer.callbacks.defaults import with_defaults
from chatgpt.trainer.failure import resume_flags, save_after_failure
from chatgpt.trainer.fits import check_router_loss
from chatgpt.trainer.run_control import MAY_DIFFER, PhaseClock, StopSignals, agreed, check_ranks
from chatgpt.trainer.saving import push_trained, save_trained
from chatgpt.trainer.schedule import LearningRate, describe_groups
from chatgpt.trainer.settings import LearningSettings
from chatgpt.trainer.step import Steps
from chatgpt.types import Experience


def config_of(strategy: Strategy, model: nn.Module) -> Any:
    """Returns the transformers config of a prepared model, or None if it has none."""
    return getattr(getattr(strategy.unwrap(model), 'model', None), 'config', None)


class Trainer:
    """Base of all trainers.

    Args:
        strategy: has already prepared the models and optimizers.
        config: settings, checked here against the world size.
        models: the trained models by name, as prepared.
        optimizers: their optimizers, by the name of the model.
        callbacks: see `chatgpt.trainer.callbacks`; the default ones (`with_defaults`) are added unless given.
        tokenizer: only for texts; None if all data are token ids.
        run_dir: run folder (metrics.jsonl, samples, checkpoints), locked by one run at a time. None writes nothing.
    """

    scorer: Any = None
    """scores responses; None in a trainer without scores"""
    collector: Any = None
    """generates responses; None in a trainer that does not generate"""
    lengthened_by: ClassVar[str] = 'its length'
    """settings that make a run longer, for messages"""

    def __init__(
        self,
        strategy: Strategy,
        config: LearningSettings,
        models: Mapping[str, nn.Module],
        optimizers: Mapping[str, Optimizer],
        *,
        callbacks: SequenceOf[Callback] = (),
        tokenizer: Any = None,
        run_dir: str | Path | None = None,
    ) -> None:
        config.validate(strategy.world_size)
        self.strategy = strategy
        self.config = config
        self._models, self._optimizers = dict(models), dict(optimizers)
        for model in models.values():
            check_router_loss(config_of(strategy, model))
        self.tokenizer = tokenizer
        note_model(tokenizer, config_of(strategy, next(iter(models.values()))))
        self.run_dir = Path(run_dir).absolute() if run_dir is not None else None
        self.phase = 0
        """finished learning phases"""
        self.num_updates = 0
        """finished optimizer steps, without skipped ones"""
        self.num_phases: int | None = None
        self.fit_updates = 0
        """value of `num_updates` when the current `fit` began"""
        self.total_updates: int | None = None
        self.last_experiences: list[Experience] = []
        self.resumed_from: Path | None = None
        self._resume_unreported = False
        self.saved_fingerprint: dict[str, Any] | None = None
        """settings and data of the checkpoint that was loaded"""
        self.phase_score: float | None = None
        """the score of the present phase's checkpoint, for keeping the best; higher is better"""
        self.left_out: dict[str, dict[str, int]] | None = None
        """by model, checksums of the weights that its checkpoints do not hold; None: they hold all. {} is set by a run
        that builds its models from names alone, as its resume does again"""
        self.steps = Steps()
        self._clean: tuple[dict[str, Any], int, dict[str, torch.Tensor]] | None = None
        """state and finished steps at the end of the last phase of this `fit`"""
        self._standing: tuple[Path, int, int] | None = None
        """the checkpoint last written or loaded, with its phase and finished steps"""
        self._saving: checkpointing.Saving | None = None
        self.clock = PhaseClock(strategy.device)
        self._signals = StopSignals()
        self._stop_requested = False
        self.is_resuming = False
        """a checkpoint was loaded and `fit` has not continued from it yet"""
        self.callbacks = CallbackList(with_defaults(callbacks, self.run_dir))
        self._schedules = {
            name: LearningRate(
                optimizer,
                config.lr_schedule,
                config.warmup_steps,
                end_factor=config.lr_end_factor,
                decay_steps=config.lr_decay_steps,
            )
            for name, optimizer in optimizers.items()
        }
        for name, schedule in self._schedules.items():
            self.warn(schedule.out_of_range(name))

    def models(self) -> Mapping[str, nn.Module]:
        """Returns the trained models by name, as prepared."""
        return self._models

    def optimizers(self) -> Mapping[str, Optimizer]:
        """Returns the optimizers by the name of their model."""
        return self._optimizers

    # ------------------------------------------------------------------ state

    def state_dict(self) -> dict[str, Any]:
        """Returns the counters and controllers that a resume needs, as JSON. Subclasses extend it."""
        return {
            'phase': self.phase,
            'num_updates': self.num_updates,
            'fit_updates': self.fit_updates,
            'callbacks': self.callbacks.state_dict(),
        }

    def checkpoint_state(self) -> dict[str, Any]:
        """Returns `state_dict` and the entries that only a checkpoint needs. A collective."""
        return self.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.phase = int(state['phase'])
        self.num_updates = int(state['num_updates'])
        self.fit_updates = int(state['fit_updates'])
        self.callbacks.load_state_dict(state['callbacks'])
        self.is_resuming = True

    def fingerprint(self) -> dict[str, Any]:
        """Returns settings and data of this run; a resume reports which of them changed."""
        rates = {name: schedule.base for name, schedule in self._schedules.items()}
        optimizers = {name: describe_groups(optimizer, rates[name]) for name, optimizer in self.optimizers().items()}
        return {
            'config': self.config.to_dict(),
            'seed': self.strategy.seed,
            **self.strategy.numerics.facts(),
            'optimizers': optimizers,
        }

    def facts(self) -> dict[str, Any]:
        """Returns the fields of `RunRecord` that depend on the method, at least `method` and `data`."""
        return {'method': type(self).__name__, 'data': {}}

    def check_ranks(self, where: str) -> None:
        """Raises on every rank if settings or counters differ between ranks; see `chatgpt.trainer.run_control`. A
        collective."""
        self.strategy.note_progress(f'{where} of phase {self.phase + 1}')
        state = {k: v for k, v in (self.fingerprint() | self.state_dict()).items() if k not in MAY_DIFFER}
        check_ranks(self.strategy, state, f'{where} of phase {self.phase + 1}')

    # ------------------------------------------------------------------ checkpoints

    @property
    def checkpoint_dir(self) -> Path | None:
        """The folder of the checkpoints: the `path` of `SaveCheckpoint` if it has one, else in the run's folder."""
        paths = [c.path for c in self.callbacks if isinstance(c, SaveCheckpoint)]
        if paths and None not in paths:
            return paths[0]
        return self.run_dir / 'checkpoints' if self.run_dir is not None else None

    def save_checkpoint(
        self, path: str | Path | None = None, *, score: float | None = None, background: bool = False
    ) -> Path:
        """Writes everything that a resume needs, atomically. Call it on every rank, between phases.

        Args:
            path: folder to write; None means `step-<phase>` in `checkpoint_dir`.
            score: stored with the checkpoint for keeping the best ones; higher is better. None: `phase_score`.
            background: return after a copy to host memory. A thread writes it, and `finish_saving`, or the next
                checkpoint, completes it; until then it does not exist.

        Raises:
            CheckpointError: the checkpoint could not be written; earlier checkpoints are untouched.
        """
        try:
            self.finish_saving()
        except CheckpointError as error:
            self.warn(f'an earlier checkpoint was not written: {error}')
        self._saving = checkpointing.begin_checkpoint(
            self, path, steps=self.steps.done, score=score, background=background
        )
        path = self._saving.path
        if not background:
            self.finish_saving()
        return path

    def finish_saving(self, *, wait: bool = True) -> None:
        """Completes the checkpoint that is written in the background, if there is one. Collective.

        Args:
            wait: False: only if all ranks have written it.

        Raises:
            CheckpointError: it could not be written; earlier checkpoints are untouched.
        """
        saving = self._saving
        if saving is None or not (wait or not agreed(not saving.writer.written, self.strategy)):
            return
        self._saving = None
        saving.commit(self)
        self._standing = saving.path, saving.phase, saving.steps
        self.callbacks.on_checkpoint(self, saving.path)

    def load_checkpoint(self, path: str | Path) -> bool:
        """Loads a checkpoint folder, written under any strategy and world size, to continue from it.

        Args:
            path: a step folder, a folder of step folders (the newest complete one is loaded), or 'auto' for the newest
                of this run (returns False if there is none yet).

        Raises:
            CheckpointError: the checkpoint is partial, damaged, or of other models; names the file or the first keys.
        """
        self.finish_saving()
        found = checkpointing.load_checkpoint(self, path)
        if found is None:
            return False
        self.resumed_from, self.saved_fingerprint = found
        self._standing = self.resumed_from, self.phase, self.steps.done
        self._resume_unreported = True
        self.callbacks.on_resume(self, self.resumed_from)
        return True

    def standing_checkpoint(self) -> Path | None:
        """Returns the checkpoint on disk that equals the present state of the trainer, or None."""
        if self._standing is None or self._standing[1:] != (self.phase, self.steps.done):
            return None
        return self._standing[0] if (self._standing[0] / MANIFEST).is_file() else None

    def put_back(self) -> bool:
        """Restores the counters of the end of the last phase, and the generators; returns False if an optimizer has
        stepped since then."""
        if self._clean is None:
            return True
        state, steps, generators = self._clean
        self.load_state_dict(state)
        self.is_resuming = False
        if self.steps.done != steps:
            self.phase_score = None  # of other weights
            return False
        checkpointing.set_generator_states(generators)
        return True

    def save_pretrained(
        self,
        path: str | Path,
        *,
        model: str | None = None,
        card_samples: int = NUM_SAMPLES,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Writes a trained model as a Hugging Face folder, with the tokenizer if there is one, and a model card
        (README.md) made from `run_dir` or this trainer.

        Adapters are merged. A README.md that this library did not write is kept. Call it on every rank.

        Args:
            model: its name in `models()`, such as 'critic'; None: the first, the actor.
            card_samples: number of generated texts that the card shows.
            dtype: of the weights in the files; None: fp32, and for adapters on weights in 16 or 4 bits that of the
                folder the model was loaded from.

        Raises:
            SaveError: the model could not be written; names where its weights are instead.
        """
        save_trained(self, path, model=model, card_samples=card_samples, dtype=dtype)

    def push_to_hub(
        self,
        repo_id: str,
        *,
        private: bool | None = None,
        commit_message: str | None = None,
        token: str | None = None,
        revision: str | None = None,
        card_samples: int = NUM_SAMPLES,
        dtype: torch.dtype | None = None,
    ) -> str:
        """Uploads what `save_pretrained` writes to a model repository of the Hugging Face Hub, which is created if
        absent, and returns its address. Call it on every rank.

        Args:
            repo_id: 'NAME', or 'ACCOUNT/NAME'.
            private: visibility of a new repository; None: public, or the default of the organisation.
            commit_message: None: a default message.
            token: None: the token of HF_TOKEN or of `hf auth login`.
            revision: a branch, which is created if absent, or refs/pr/N; None: main.
            card_samples: number of generated texts that the card shows.
            dtype: as in `save_pretrained`.

        Raises:
            ValueError: not logged in, no permission to write there, offline, no answer; before anything is written.
            PushError: the upload failed; names the folder of the model and the command that uploads it later.
        """
        return push_trained(
            self.strategy,
            lambda folder: self.save_pretrained(folder, card_samples=card_samples, dtype=dtype),
            repo_id,
            near=self.run_dir,
            private=private,
            commit_message=commit_message,
            token=token,
            revision=revision,
        )

    # ------------------------------------------------------------------ the run

    def request_stop(self) -> None:
        """Stops the run at the end of the current phase, or at once while it is still collecting."""
        self._stop_requested = True

    def stop_agreed(self) -> bool:
        """Returns True if any rank wants to stop. A collective: every rank calls it at the same points."""
        return agreed(self._stop_requested or self._signals.received is not None, self.strategy)

    @contextmanager
    def running(self, num_phases: int | None) -> Iterator[None]:
        """Context of the loop of `fit`: locks the run folder, handles signals, calls callbacks, and ends all ranks when
        one fails."""
        self.num_phases = num_phases
        self._stop_requested = False
        checkpointing.report_changes(self)
        self._report_resume(num_phases)
        with self.strategy.failure_guard(), self._claimed(), self._signals:
            self.is_resuming = False  # not before the folder is locked, for `fit` may be called again
            if self.resumed_from is not None:
                self.strategy.run_on_rank0(partial(checkpointing.set_later_aside, self))
            try:
                self.check_ranks('at the start')
                self._note_clean()
                self.callbacks.on_fit_start(self)
                yield
                stopped = self._signals.agree(self.strategy)
                if stopped and self.checkpoint_dir is not None:
                    standing = self.strategy.run_on_rank0(self.standing_checkpoint)
                    # that of an interrupted phase stays: under the name of a phase it could replace the best one
                    is_cut = standing is not None and standing.name == CUT_SHORT
                    path = standing if standing is not None and is_cut else self.save_checkpoint()
                    if self.strategy.is_rank_0:
                        print(f'stopped after phase {self.phase}; continue with {resume_flags(path)}', flush=True)
                self.callbacks.on_fit_end(self)
                self.finish_saving()
                if stopped:  # it ends the other ranks below, and rank 0 may still be writing
                    self.strategy.barrier()
            except BaseException as error:
                save_after_failure(self, self.steps, error)
                self.callbacks.on_exception(self, error)
                raise
            finally:
                if self._saving is not None:
                    self._saving.writer.abandon()
                    self._saving = None
                if self.collector is not None:
                    self.collector.free()
        self._signals.raise_received()

    def _report_resume(self, num_phases: int | None) -> None:
        """Prints, on rank 0 and once after `load_checkpoint`, that the run resumes."""
        if self._resume_unreported and self.strategy.is_rank_0:
            is_over = num_phases is not None and num_phases <= self.phase
            text = (
                f'this run is finished, {self.resumed_from} is its end, and nothing is left to learn: to go on, raise '
                f'{self.lengthened_by}'
                if is_over
                else f'going on from {self.resumed_from}'
            )
            print(text, flush=True)
        self._resume_unreported = False

    def warn(self, text: str | None) -> None:
        """Warns on rank 0 unless `text` is empty or None."""
        if text and self.strategy.is_rank_0:
            warnings.warn(text, stacklevel=3)

    @contextmanager
    def _claimed(self) -> Iterator[None]:
        """Locks the run folder, and that of the checkpoints, on rank 0."""
        with ExitStack() as held:

            def claim() -> None:
                for folder in {self.run_dir, checkpointing.locked_folder(self)}:
                    if folder is not None:
                        held.enter_context(claim_folder(folder))

            self.strategy.run_on_rank0(claim)
            yield

    def expect_updates(self, count: int) -> None:
        """Sets the end of a `fit` of `count` optimizer steps, which begins or resumes now."""
        if not self.is_resuming:
            self.fit_updates = self.num_updates
        self.total_updates = self.fit_updates + count
        if self.config.warmup_steps > self.total_updates:
            self.warn(
                f'warmup_steps={self.config.warmup_steps} is more than the {self.total_updates} optimizer steps of '
                'this run: the learning rate does not reach its value'
            )

    def set_learning_rates(self, names: SequenceOf[str] | None = None) -> dict[str, float]:
        """Applies the schedules for the next optimizer step; returns the learning rate of each model, or of those that
        are named."""
        chosen = self._schedules if names is None else {name: self._schedules[name] for name in names}
        return {name: s.set(self.num_updates, self.total_updates) for name, s in chosen.items()}

    def count_update(self, stepped: bool) -> None:
        """Counts a train batch; `stepped` says whether the optimizers have stepped."""
        self.num_updates += stepped

    def take_learning_rates(self) -> None:
        """Makes the present learning rates of the optimizers the base of the schedules."""
        for schedule in self._schedules.values():
            schedule.take_base()

    def end_phase(self, metrics: dict[str, float]) -> None:
        """Counts the phase and logs its metrics."""
        self.phase += 1
        self.phase_score = None
        self.check_ranks('before the start')
        self._note_clean()
        self.callbacks.on_phase_end(self, self.phase, metrics)
        self._note_clean()
        self.clock.reset()

    def _note_clean(self) -> None:
        again = {} if self.collector is None else self.collector.before_in_flight()
        self._clean = deepcopy(self.state_dict() | again), self.steps.done, checkpointing.generator_states()
