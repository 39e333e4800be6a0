"""Dynamic sampling: what it replaces, when it gives up, stops and resumes."""

from __future__ import annotations

import weakref
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from online_runs import DYNAMIC, PROMPTS, make

from chatgpt.nn import GPTActor
from chatgpt.strategies import FSDPStrategy, NaiveStrategy, fsdp
from chatgpt.testing.fakes import tiny_config
from chatgpt.testing.processes import run_distributed
from chatgpt.trainer import PPOTrainer
from chatgpt.trainer.callbacks import ProgressBar, SaveCheckpoint
from chatgpt.trainer.selection import NothingToLearn


class Rare:
    """Scores differ within a group only for every third prompt that is drawn."""

    def score(self, samples: list[Any], strategy: Any) -> list[float]:
        return [float(s.index % 4) if s.group % 3 == 0 else 1.0 for s in samples]


def test_dynamic_sampling_replaces_groups_that_teach_nothing():
    plain = make(reward=Rare(), **DYNAMIC)
    plain.fit(PROMPTS, 1, 1, 1)
    assert len(plain.log.experiences[0]) == 16
    trainer = make(reward=Rare(), dynamic_sampling_rounds=4, **DYNAMIC)
    trainer.fit(PROMPTS, 1, 2, 1)
    for experiences in trainer.log.experiences:
        assert len(experiences) == 16
        assert all(e.group % 3 == 0 for e in experiences)
    assert trainer.log.phases[0]['rollout/dynamic_rounds'] >= 1
    assert trainer.log.phases[0]['rollout/informative_share'] == pytest.approx(1 / 3, abs=0.15)
    assert trainer.timestep == 2
    assert len({e.index for x in trainer.log.experiences for e in x}) == 32  # no sample twice


def test_dynamic_sampling_gives_up():
    with pytest.warns(UserWarning, match='dynamic sampling gave up after 1 rounds with . of 4 groups'):
        make(reward=Rare(), dynamic_sampling_rounds=1, **DYNAMIC).fit(PROMPTS, 1, 1, 1)
    nothing = make(reward=lambda p, r: [1.0] * len(p), dynamic_sampling_rounds=2, **DYNAMIC)
    with pytest.raises(NothingToLearn, match='after 2 further rounds all 12 groups have equal scores'):
        nothing.fit(PROMPTS, 1, 1, 1)


def test_dynamic_sampling_resumes_to_the_bit(tmp_path):
    settings = DYNAMIC | {'reward': Rare(), 'dynamic_sampling_rounds': 3}
    whole = make(run_dir=tmp_path, more=[SaveCheckpoint(interval=1, keep_last=9)], **settings)
    whole.fit(PROMPTS, 1, 4, 1)
    rest = make(**settings)
    rest.set_prompts(PROMPTS)
    assert rest.load_checkpoint(tmp_path / 'checkpoints' / 'step-00000002')
    rest.fit(PROMPTS, 1, 4, 1)
    assert rest.log.phases == whole.log.phases[2:]


def test_a_stop_between_rounds_drops_the_phase(tmp_path):
    """A phase of fewer groups is not learned from: the resumed run is the undisturbed one."""
    settings = DYNAMIC | {'dynamic_sampling_rounds': 3}
    whole = make(reward=Rare(), **settings)
    whole.fit(PROMPTS, 1, 3, 1)

    class Stops(Rare):
        calls = 0

        def score(self, samples: list[Any], strategy: Any) -> list[float]:
            self.calls += 1
            if self.calls == 5:
                stopped.request_stop()
            return super().score(samples, strategy)

    stopped = make(reward=Stops(), run_dir=tmp_path, more=[SaveCheckpoint(interval=1, keep_last=9)], **settings)
    assert whole.log.phases[0]['rollout/dynamic_rounds'] >= 2  # so call 5 lies between the rounds of the second phase
    stopped.fit(PROMPTS, 1, 3, 1)
    done = len(stopped.log.phases)
    assert 0 < done < 3
    assert stopped.log.phases == whole.log.phases[:done]
    rest = make(reward=Rare(), **settings)
    rest.set_prompts(PROMPTS)
    assert rest.load_checkpoint(tmp_path / 'checkpoints' / f'step-{done:08d}')
    rest.fit(PROMPTS, 1, 3, 1)
    assert rest.log.phases == whole.log.phases[done:]


# ---------------------------------------------------------------------- gathers


class Watch(ProgressBar):
    """At the end of each collect phase: entries of `full_model`, tensors made whole, copies and weights of theirs still
    alive."""

    def __init__(self, strategy: Any, whole: list[int]) -> None:
        super().__init__(enabled=False)
        self.entries, self.whole, self.copies = 0, whole, list[weakref.ref[Any]]()
        self.phases: list[dict[str, int]] = []
        original = strategy.full_model

        @contextmanager
        def full_model(*args: Any, **kwargs: Any) -> Any:
            self.entries += 1
            with original(*args, **kwargs) as full:
                if full is not strategy.unwrap(args[0]):
                    self.copies += [weakref.ref(t) for t in (full, *full.parameters())]
                yield full

        strategy.full_model = full_model

    def on_make_experience_start(self, trainer: Any) -> None:
        self.entries = 0
        self.whole.clear()
        self.copies.clear()

    def on_make_experience_end(self, trainer: Any, experiences: Any) -> None:
        alive = sum(ref() is not None for ref in self.copies)
        self.phases.append(
            {'entries': self.entries, 'whole': len(self.whole), 'copies': len(self.copies), 'alive': alive}
        )


def watched(strategy: Any, reward: Any, timesteps: int, whole: list[int] | None = None, **settings: Any) -> Watch:
    """Two phases of `timesteps` timesteps each. `whole` grows by one for every tensor that is made whole."""
    torch.manual_seed(0)
    actor = GPTActor(config=tiny_config('gpt2', vocab_size=16, positions=32))
    actor, optim = strategy.prepare((actor, torch.optim.AdamW(actor.parameters(), lr=1e-3)))
    watch = Watch(strategy, [] if whole is None else whole)
    sizes: dict[str, Any] = {'experience_batch_size': 4, 'train_batch_size': 4, 'max_new_tokens': 4, 'kl_coef': 0.0}
    trainer = PPOTrainer(strategy, actor, None, reward, None, optim, callbacks=[watch], **sizes | settings)
    prompts = [torch.tensor([3, 4 + i]) for i in range(8)]
    trainer.fit(prompts, num_episodes=1, max_timesteps=2 * timesteps, update_timesteps=timesteps)
    return watch


class Index:
    """Scores differ within a group only for every third prompt that is drawn."""

    def score(self, samples: list[Any], strategy: Any) -> list[float]:
        return [float(s.index % 4) if s.group % 3 == 0 else 1.0 for s in samples]


class Distinct:
    def score(self, samples: list[Any], strategy: Any) -> list[float]:
        return [float(s.index % 4) for s in samples]


REINFORCE = {'advantage_estimator': 'reinforce++'}


def under_fsdp(precision: str) -> tuple[list[dict[str, int]], int]:
    with FSDPStrategy(device='cpu', precision=precision) as strategy:
        original, whole = fsdp._full, list[int]()
        fsdp._full = lambda *args: whole.append(1) or original(*args)  # type: ignore[func-returns-value]
        try:
            watch = watched(strategy, Distinct(), 3, whole, **REINFORCE)
        finally:
            fsdp._full = original
        return watch.phases, len(list(GPTActor(config=tiny_config('gpt2', vocab_size=16, positions=32)).parameters()))


@pytest.mark.parametrize('precision', ['fp32', 'bf16'])
def test_once_for_three_timesteps_and_freed(precision):
    for phases, parameters in run_distributed(under_fsdp, 2, precision):
        assert phases == [{'entries': 1, 'whole': parameters, 'copies': parameters + 1, 'alive': 0}] * 2


def test_each_further_round_of_dynamic_sampling_is_a_gather_of_its_own():
    grpo = {'advantage_estimator': 'grpo', 'num_samples_per_prompt': 4, 'dynamic_sampling_rounds': 4}
    plain = watched(NaiveStrategy(device='cpu'), Index(), 1, **grpo | {'dynamic_sampling_rounds': 0})
    assert [phase['entries'] for phase in plain.phases] == [1, 1]
    several = watched(NaiveStrategy(device='cpu'), Index(), 1, **grpo)
    assert all(phase['entries'] > 1 for phase in several.phases)
