"""Episodes with a failed environment are not trained on or get a penalty; a phase with no other episodes ends the
run."""

from __future__ import annotations

import warnings

import pytest
import torch
from episode_runs import make
from small_environments import NEVER, Fails

from chatgpt.environments import EnvironmentSettings
from chatgpt.trainer.experience.shaping import ScoreShaper
from chatgpt.trainer.metrics import environment_metrics, group_metrics, rollout_metrics
from chatgpt.trainer.rft import select
from chatgpt.trainer.selection import EpisodesFailed
from chatgpt.types import Episode, Sample


@pytest.fixture(autouse=True)
def _counts_begin_anew():
    NEVER.clear()
    Fails.count, Fails.faults = 0, {}
    yield
    NEVER.set()


def play(faults, **config):
    """Collects one timestep with one group of four, with returns 2, 3, 4, 5 without faults."""
    Fails.faults = faults
    limit = 3.0 if 'timeout' in faults.values() else 600
    settings = EnvironmentSettings(max_turn_tokens=3, num_workers=1, step_timeout_s=limit)
    defaults = {'advantage_estimator': 'dr_grpo', 'experience_batch_size': 1, 'num_samples_per_prompt': 4}
    trainer = make(None, Fails, settings=settings, **(defaults | config))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter('always')
        trainer.fit(max_timesteps=1, update_timesteps=1)
    return trainer.last_experiences, [str(w.message) for w in caught if 'failed' in str(w.message)]


def advantages(experiences):
    """Returns the advantage of each episode, which is the same for all of its tokens."""
    found = []
    for e in experiences:
        own = e.advantages[e.response_mask]
        assert not e.advantages[~e.response_mask].any()
        found.append(own[0].item() if len(own) else None)
        assert not len(own) or (own == own[0]).all()
    return found


@pytest.mark.parametrize('fault', ['error', 'timeout', 'invalid', 'reset'])
def test_a_failed_episode_is_left_out_of_loss_and_baseline(fault):
    experiences, warned = play({})
    assert advantages(experiences) == [-1.5, -0.5, 0.5, 1.5] and not warned  # 2 3 4 5, mean 3.5
    Fails.count = 0
    experiences, warned = play({1: fault})
    assert advantages(experiences) == [None, -1.0, 0.0, 1.0], 'the mean of 3 4 5; with the failed one it would be less'
    assert experiences[0].episode.end == ('error' if fault == 'reset' else fault)
    (line,) = warned
    assert line.startswith(f'1 of 4 episodes of phase 1 failed (1 {experiences[0].episode.end}); ')
    turns = experiences[0].episode.turns
    assert len(turns) == (0 if fault == 'reset' else 2)


def test_few_are_left():
    experiences, _ = play({1: 'error', 3: 'error'}, advantage_estimator='rloo')
    assert advantages(experiences) == [None, -2.0, None, 2.0]  # returns 3 and 5: each is the other's baseline
    for name in ('dr_grpo', 'rloo'):
        Fails.count = 0
        experiences, _ = play({1: 'error', 2: 'error', 3: 'error'}, advantage_estimator=name)
        assert advantages(experiences) == [None, None, None, 0.0]  # the only one of its group


def test_a_failed_episode_pays_at_its_last_token():
    experiences, _ = play({4: 'error'}, environment_failures='penalise', failure_reward=-3.0, overlong_filter=True)
    assert advantages(experiences) == [0.25, 1.25, 2.25, -3.75]  # 2 3 4 and 1 − 3, mean 1.75
    e = experiences[3]
    first, second = e.episode.turns
    expected = torch.zeros(e.num_actions)
    expected[first.stop - 1], expected[second.stop - 1] = 1.0, -3.0
    assert torch.equal(e.rewards, expected)
    # The default is −1; an episode that failed before its first turn has no token for it, and is left out.
    Fails.count = 0
    experiences, _ = play({1: 'reset', 4: 'error'}, environment_failures='penalise')
    first, *others = advantages(experiences)
    assert first is None and others == pytest.approx([3 - 7 / 3, 4 - 7 / 3, 0 - 7 / 3])


def test_scores_of_a_phase_leave_out_what_is_left_out():
    experiences, _ = play({4: 'error'})
    metrics = rollout_metrics(experiences, 0.0)
    assert metrics['rollout/score_mean'] == 3.0 and metrics['rollout/score_min'] == 2.0, 'of 2 3 4'
    assert group_metrics(experiences) == {'rollout/equal_groups_share': 0.0}
    for e in experiences[:3]:
        e.score = 2.0
    assert group_metrics(experiences) == {'rollout/equal_groups_share': 1.0}, 'the failed one is no difference'
    metrics = environment_metrics(experiences)
    assert metrics['environment/failed_share'] == metrics['environment/end_error_share'] == 0.25


def test_all_failing_ends_the_run():
    with pytest.raises(
        EpisodesFailed,
        match=r'^all 4 episodes of phase 1 failed \(3 error, 1 invalid\); the first: Fails: raised RuntimeError: the ',
    ):
        play({1: 'error', 2: 'error', 3: 'invalid', 4: 'error'})


def test_dynamic_sampling_does_not_count_a_failure_as_a_difference():
    """A group with equal scores, apart from a failed one, is replaced by another."""

    class Same(Fails):
        def step(self, response):
            observation, reward, done, *rest = super().step(response)
            alike = Fails.count <= 4
            return observation, 1.0 if alike else reward, done, *rest

    Fails.faults = {2: 'error'}
    settings = EnvironmentSettings(max_turn_tokens=3, num_workers=1)
    sizes = {'experience_batch_size': 1, 'num_samples_per_prompt': 4, 'dynamic_sampling_rounds': 2}
    trainer = make(None, Same, settings=settings, advantage_estimator='dr_grpo', **sizes)
    with pytest.warns(UserWarning, match='failed'):
        trainer.fit(max_timesteps=1, update_timesteps=1)
    assert [e.index for e in trainer.last_experiences] == [4, 5, 6, 7]
    assert trainer.selection.metrics['rollout/dynamic_rounds'] == 1.0


def sample(end, counts=True):
    ids, zeros = torch.tensor([5, 6]), torch.zeros(2)
    numbers = {'logprobs': zeros, 'filtered_logprobs': zeros, 'edge_distances': zeros + 1}
    made = {'prompt_ids': ids, 'response_ids': ids, 'response_mask': torch.tensor([counts, counts])}
    return Sample(index=0, group=0, finish_reason='length', episode=Episode(turns=(), end=end), **made, **numbers)


def test_statistics_of_scores_leave_out_what_is_left_out():
    shaper = ScoreShaper('running')
    shaper([1.0, 100.0, 3.0], [sample('turns'), sample('error', counts=False), sample('turns')])
    assert shaper.moments.count == 2 and shaper.moments.mean == 2.0
    shaper([1.0, 5.0], [sample('turns'), sample('error')])
    assert shaper.moments.count == 4, 'one that pays counts'


def test_rejection_sampling_keeps_no_failure():
    samples = [sample(end) for end in ('error', 'turns', 'terminated')]
    for i, s in enumerate(samples):
        s.response_ids = torch.tensor([i, i])
    assert select(samples, [9.0, 1.0, 2.0], 1.0) == [2]
    assert select(samples[:2], [9.0, 1.0], 1.0) == [], 'one is left, which is compared with none'


def test_a_failure_pays_its_own_reward_and_not_that_of_a_missing_end():
    shaper = ScoreShaper(missing_eos_score=-9.0, failure_reward=-2.0)
    assert shaper([1.0, 1.0], [sample('turns'), sample('timeout')]) == [-9.0, -1.0]
    dense, once = shaper.of_tokens(torch.tensor([0.5, 0.0]), sample('timeout'))
    assert dense.tolist() == [0.5, 0.0] and once == -2.0
