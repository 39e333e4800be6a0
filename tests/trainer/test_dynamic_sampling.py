"""Dynamic sampling: what it replaces, when it gives up, stops and resumes."""

from __future__ import annotations

from typing import Any

import pytest
from online_runs import DYNAMIC, PROMPTS, make

from chatgpt.trainer.callbacks import SaveCheckpoint
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
