"""Dynamic sampling: the groups it replaces, its limit, stopping and resuming."""

from __future__ import annotations

import weakref
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from tiny_runs import PROMPTS, SMALL, assemble, fit, ppo

from chatgpt.nn import GPTActor
from chatgpt.strategies import FSDPStrategy, fsdp
from chatgpt.testing.fakes import tiny_config
from chatgpt.testing.processes import run_distributed
from chatgpt.trainer.callbacks import Callback, SaveCheckpoint
from chatgpt.trainer.selection import NothingToLearn

DYNAMIC: dict[str, Any] = {'advantage_estimator': 'grpo', 'num_samples_per_prompt': 4, 'kl_coef': 0.0}


class Rare:
    """Scores that differ within a group only for every third prompt."""

    def score(self, samples: list[Any], strategy: Any) -> list[float]:
        return [float(s.index % 4) if s.group % 3 == 0 else 1.0 for s in samples]


def make(rounds: int, reward: Any = None, **settings: Any) -> Any:
    return ppo(reward=reward or Rare(), dynamic_sampling_rounds=rounds, train_batch_size=8, **DYNAMIC | settings)


@pytest.fixture(scope='module')
def whole(tmp_path_factory: pytest.TempPathFactory) -> Any:
    saver = SaveCheckpoint(interval=1, keep_last=9)
    return fit(make(4, run_dir=tmp_path_factory.mktemp('whole'), callbacks=[saver]), 3)


def test_groups_of_equal_scores_are_replaced(whole):
    assert len(fit(make(0), 1).log.experiences[0]) == 16
    for experiences in whole.log.experiences:
        assert len(experiences) == 16 and all(e.group % 3 == 0 for e in experiences)
    assert whole.log.phases[0]['rollout/dynamic_rounds'] >= 1
    assert whole.log.phases[0]['rollout/informative_share'] == pytest.approx(1 / 3, abs=0.15)
    assert whole.timestep == 3
    assert len({e.index for x in whole.log.experiences for e in x}) == 48  # no sample twice


def test_it_gives_up():
    with pytest.warns(UserWarning, match='dynamic sampling gave up after 1 rounds with . of 4 groups'):
        fit(make(1), 1)
    with pytest.raises(NothingToLearn, match='after 2 further rounds all 12 groups have equal scores'):
        fit(make(2, lambda p, r: [1.0] * len(p)), 1)


def check_resumes(whole: Any, folder: Any, done: int) -> None:
    rest = make(4)
    rest.set_prompts(PROMPTS)
    assert rest.load_checkpoint(folder / 'checkpoints' / f'step-{done:08d}')
    assert fit(rest, 3).log.phases == whole.log.phases[done:]


def test_it_resumes_to_the_bit(whole):
    check_resumes(whole, whole.run_dir, 1)


def test_a_stop_between_rounds_drops_the_phase(whole, tmp_path):
    """A phase of fewer groups is not learned; the resumed run equals the undisturbed one."""

    class Stops(Rare):
        calls = 0

        def score(self, samples: list[Any], strategy: Any) -> list[float]:
            self.calls += 1
            if self.calls == 5:
                stopped.request_stop()
            return super().score(samples, strategy)

    stopped = make(4, Stops(), run_dir=tmp_path, callbacks=[SaveCheckpoint(interval=1, keep_last=9)])
    assert whole.log.phases[0]['rollout/dynamic_rounds'] >= 2  # so call 5 is between the rounds of the second phase
    fit(stopped, 3)
    done = len(stopped.log.phases)
    assert 0 < done < 3 and stopped.log.phases == whole.log.phases[:done]
    check_resumes(whole, tmp_path, done)


class CopyCounter(Callback):
    """Records at the end of each collect phase: gathered tensors, and copies and their weights that are still alive."""

    def __init__(self, strategy: Any, whole: list[int]) -> None:
        self.whole, self.copies = whole, list[weakref.ref[Any]]()
        self.phases: list[tuple[int, int, int]] = []
        original = strategy.full_model

        @contextmanager
        def full_model(*args: Any, **kwargs: Any) -> Any:
            with original(*args, **kwargs) as full:
                self.copies += [weakref.ref(t) for t in (full, *full.parameters())]
                yield full

        strategy.full_model = full_model

    def on_make_experience_start(self, trainer: Any) -> None:
        self.whole.clear()
        self.copies.clear()

    def on_make_experience_end(self, trainer: Any, experiences: Any) -> None:
        alive = sum(ref() is not None for ref in self.copies)
        self.phases.append((len(self.whole), len(self.copies), alive))


def under_fsdp() -> list[tuple[list[tuple[int, int, int]], int]]:
    found, original = [], fsdp.whole_tensor
    for precision in ('fp32', 'bf16'):
        with FSDPStrategy(device='cpu', precision=precision) as strategy:
            whole = list[int]()
            fsdp.whole_tensor = lambda *args, whole=whole: whole.append(1) or original(*args)  # type: ignore[func-returns-value]
            try:
                torch.manual_seed(0)
                watch, actor = CopyCounter(strategy, whole), GPTActor(config=tiny_config('gpt2', **SMALL))
                settings = {'advantage_estimator': 'reinforce++', 'kl_coef': 0.0, 'callbacks': [watch]}
                trainer = assemble(strategy, actor, None, Rare(), **settings)
                trainer.fit([torch.tensor([3, 4 + i]) for i in range(8)], 1, 6, 3)
            finally:
                fsdp.whole_tensor = original
            found.append((watch.phases, len(list(GPTActor(config=tiny_config('gpt2', **SMALL)).parameters()))))
    return found


def test_weights_are_gathered_once_for_three_timesteps_and_freed():
    for found in run_distributed(under_fsdp, 2, init_group=True):
        for phases, parameters in found:
            assert phases == [(parameters, parameters + 1, 0)] * 2
