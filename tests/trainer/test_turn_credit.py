"""Rewards of turns in estimators: named rewards, credit per turn, and methods that compare whole episodes."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from fake_trainer import experience
from tiny_runs import assemble, close

from chatgpt.environments import Environment, EnvironmentSettings
from chatgpt.nn import Actor, Critic
from chatgpt.strategies import DDPStrategy, NaiveStrategy
from chatgpt.testing import byte_tokenizer, tiny_causal_lm
from chatgpt.testing.processes import run_distributed
from chatgpt.trainer.algorithms import ESTIMATORS, Estimator, estimate_advantages
from chatgpt.trainer.config import PPOConfig
from chatgpt.trainer.estimates import turn_numbers
from chatgpt.trainer.experience import EnvironmentScorer, RewardValueError, WeightedScorer
from chatgpt.trainer.experience.environment_scorer import environment_rewards
from chatgpt.trainer.experience.scorers import as_scorer, described
from chatgpt.trainer.metrics import performance_metrics
from chatgpt.types import Episode, Experience, Turn

NAN = math.nan


def episode(index: int, turns: list[tuple[int, dict[str, float]]], *, gap: int = 2) -> Experience:
    """Returns an episode with turns of the given lengths and rewards, and `gap` tokens of observation between; NaN at
    tokens that are not the policy's. Rewards are at the last tokens of turns."""
    mask: list[bool] = []
    found: list[Turn] = []
    rewards: list[float] = []
    for i, (length, given) in enumerate(turns):
        if i:
            mask += [False] * gap
            rewards += [NAN] * gap
        found.append(Turn(start=len(mask), stop=len(mask) + length, rewards=given))
        mask += [True] * length
        rewards += [0.0] * (length - 1) + [sum(given.values())]
    n, own = len(mask), torch.tensor(mask)
    numbers = {'values': torch.where(own, torch.linspace(0.5, 1.5, n) * (1 + index), NAN)}
    numbers |= {'rewards': torch.tensor(rewards), 'response_mask': own}
    whole = {'episode': Episode(turns=tuple(found), end='terminated'), 'group': 0}
    score = sum(sum(given.values()) for _, given in turns)
    return experience(index, [3, 4], [5 + index + t for t in range(n)], score, 0.0, **numbers, **whole)


def estimated(experiences: list[Experience], **settings: Any) -> list[list[float]]:
    config = PPOConfig(**settings)
    config.validate()
    estimate_advantages(experiences, config.estimator, config)
    return [e.advantages.tolist() for e in experiences]


def test_turns_are_those_of_the_episode_or_else_runs_of_tokens_that_count():
    e, touching = episode(0, [(2, {}), (1, {}), (3, {})], gap=1), episode(0, [(2, {}), (3, {})], gap=0)
    assert turn_numbers(e).tolist() == [0, 0, -1, 1, -1, 2, 2, 2]
    assert turn_numbers(touching).tolist() == [0, 0, 1, 1, 1]  # an observation may be empty
    e.episode = touching.episode = None
    assert turn_numbers(e).tolist() == [0, 0, -1, 1, -1, 2, 2, 2]
    assert turn_numbers(touching).tolist() == [0] * 5  # an ordinary response
    e.response_mask = torch.zeros_like(e.response_mask)
    assert turn_numbers(e).tolist() == [-1] * 8


def test_lambda_follows_the_number_of_steps():
    """Steps are turns, or else the policy's own tokens; observations do not make an episode longer."""
    for settings, steps, other in (({'gae_over': 'turn'}, 3, 6), ({}, 6, 3), ({}, 6, 10)):
        e = episode(0, [(2, {'reward': 1.0}), (1, {}), (3, {'reward': 2.0})])
        adaptive = estimated([e], lam_length=0.5, **settings)[0]
        assert adaptive == pytest.approx(estimated([e], lam=1 - 1 / (0.5 * steps), **settings)[0])
        assert adaptive != pytest.approx(estimated([e], lam=1 - 1 / (0.5 * other), **settings)[0])


def test_a_registered_estimator_declares_the_settings_it_follows(monkeypatch):
    of_turns = Estimator(fn=ESTIMATORS['gae'].fn, needs_values=True, follows=('gae_over',))
    monkeypatch.setitem(ESTIMATORS.data, 'of turns', of_turns)
    PPOConfig(advantage_estimator='of turns', gae_over='turn').validate()
    with pytest.raises(ValueError, match='value_lam'):
        PPOConfig(advantage_estimator='of turns', value_lam=1.0).validate()


@pytest.mark.parametrize(
    ('name', 'expected'),
    [
        ('dr_grpo', [2, 0, -1, -1]),
        ('grpo', [x / (math.sqrt(2) + 1e-4) for x in (2, 0, -1, -1)]),  # (4 + 0 + 1 + 1) / 3
        ('rloo', [4 - 4 / 3, 2 - 2, 1 - 7 / 3, 1 - 7 / 3]),
        ('reinforce++_baseline', [2, 0, -1, -1]),
    ],
)
def test_group_methods_compare_sums_of_episodes(name, expected):
    """Episodes of different numbers of turns, with rewards of sum 4, 2, 1 and 1, over the turns or at the end."""
    dense = [[1.0, 3.0], [0.5, 0.5, 1.0], [1.0], [-1.0, 2.0]]
    for parts in (dense, [[0.0] * (len(rewards) - 1) + [sum(rewards)] for rewards in dense]):
        given = [episode(i, [(1 + i, {'reward': r}) for r in rewards]) for i, rewards in enumerate(parts)]
        got = estimated(given, advantage_estimator=name, num_samples_per_prompt=4)
        for e, advantages, number in zip(given, got, expected, strict=True):
            assert advantages == pytest.approx([number if own else 0.0 for own in e.response_mask.tolist()])


def letters(prompts: list[str], responses: list[str]) -> list[float]:
    return [float(len(r)) for r in responses]


def test_named_rewards_are_at_the_last_tokens_of_turns_and_weighted():
    strategy = NaiveStrategy(seed=0)
    e = episode(0, [(2, {'correct': 1.0, 'form': 0.5}), (1, {'form': -0.5}), (2, {'correct': 3.0})])
    e.response_text = 'four'
    weighted = as_scorer(environment_rewards({'form': 2.0, 'correct': 0.5}))
    beside = as_scorer([(2.0, EnvironmentScorer('form')), (0.25, letters)])
    for scorer, expected in (
        (EnvironmentScorer(), [0, 1.5, 0, 0, -0.5, 0, 0, 0, 3]),
        (EnvironmentScorer('form'), [0, 0.5, 0, 0, -0.5, 0, 0, 0, 0]),
        (weighted, [0, 1.5, 0, 0, -1.0, 0, 0, 0, 1.5]),
        (beside, [0, 1, 0, 0, -1, 0, 0, 0, 1]),  # the score of the whole response is at its end
    ):
        (scores,) = scorer.score([e], strategy)
        assert scores.tolist() == expected
    assert isinstance(weighted, WeightedScorer)
    (parts,) = weighted.apart([e], strategy)
    assert [(weight, float(score.sum())) for weight, score in parts] == [(2.0, 0.0), (0.5, 4.0)]
    assert described(weighted) == [[2.0, 'EnvironmentScorer, form'], [0.5, 'EnvironmentScorer, correct']]
    assert described(environment_rewards()) == 'EnvironmentScorer'
    with pytest.raises(RewardValueError, match=r"a reward 'correct', which reward_weights=\['corect'\] does not have"):
        as_scorer(environment_rewards({'corect': 1.0})).score([e], strategy)
    for wrong in ({}, {'a': NAN}, {'a': True}, {'a': '1'}):
        with pytest.raises(ValueError, match='reward_weights'):
            environment_rewards(wrong)
    e.episode = None
    with pytest.raises(ValueError, match='samples of an environment'):
        EnvironmentScorer().score([e], strategy)


class Letters(Environment):
    """Two to three turns; rewards vowels, and short turns. Observations carry no information."""

    def reset(self, seed, **columns):
        self.turn, self.turns = 0, 2 + seed % 2
        return 'say:'

    def step(self, response):
        self.turn += 1
        vowels = float(sum(c in 'aeiou' for c in response))
        rewards = {'vowels': vowels + self.turn, 'short': -float(len(response))}
        return '<ok>', rewards, self.turn == self.turns, False, {'success': vowels > 0}


def trainer(reward: Any = None, strategy: Any = None, **settings: Any) -> Any:
    tokenizer, strategy = byte_tokenizer(), strategy or NaiveStrategy(seed=1)
    torch.manual_seed(0)  # the strategy sets its own seed
    actor, critic, initial = (tiny_causal_lm('gpt2', vocab_size=len(tokenizer), n_positions=64) for _ in range(3))
    judge = Critic(critic) if settings.get('advantage_estimator', 'gae') == 'gae' else None
    defaults = {'environment': Letters, 'environment_settings': EnvironmentSettings(max_turn_tokens=4)}
    defaults |= {'experience_batch_size': 2, 'num_samples_per_prompt': 3, 'train_batch_size': 3, 'max_new_tokens': 40}
    settings = {'tokenizer': tokenizer} | defaults | settings
    return assemble(strategy, Actor(actor), judge, reward, Actor(initial), **settings)


def one_phase(**settings: Any) -> tuple[list[Experience], dict[str, float]]:
    run = trainer(**settings)
    run.fit(max_timesteps=1, update_timesteps=1)
    return run.log.experiences[0], run.log.phases[0]


@pytest.mark.parametrize('kl_kind', ['k1', 'full'])
def test_a_run_with_credit_per_turn_by_a_slow_loop(kl_kind):
    found, metrics = one_phase(gae_over='turn', gamma=0.9, lam=0.7, value_lam=1.0, kl_coef=0.05, kl_kind=kl_kind)
    assert {len(e.episode.turns) for e in found} == {2, 3}
    for e in found:
        paid = {turn.stop - 1: sum(turn.rewards.values()) for turn in e.episode.turns}
        rewards = [
            paid.get(t, 0.0) - 0.05 * e.kl[t].item() if own else 0.0 for t, own in enumerate(e.response_mask.tolist())
        ]
        assert e.rewards.tolist() == pytest.approx(rewards, abs=1e-5)
        following, advantage, target = 0.0, 0.0, 0.0
        for turn in reversed(e.episode.turns):
            total = sum(rewards[turn.start : turn.stop])
            state = e.values[turn.start].item()
            advantage = total + 0.9 * following - state + 0.9 * 0.7 * advantage
            target = total + 0.9 * target
            for t in range(turn.start, turn.stop):
                assert e.advantages[t].item() == pytest.approx(advantage, abs=1e-4)
                assert e.returns[t].item() == pytest.approx(target - sum(rewards[turn.start : t]), abs=1e-4)
            following = state
        assert not e.advantages[~e.response_mask].any() and not e.returns[~e.response_mask].any()
    assert metrics['ppo/first_ratio_error'] < 1e-4


LIMITS = EnvironmentSettings(max_turns=2, max_turn_tokens=4)


def test_metrics_of_episodes_by_hand():
    found, metrics = one_phase(environment_settings=LIMITS)
    episodes = [e.episode for e in found]
    cut = sum(e.end == 'turns' for e in episodes) / 6
    assert 0 < cut < 1
    total = sum(sum(t.rewards.values()) for e in episodes for t in e.turns)
    expected = {'num_turns_mean': 2, 'end_turns_share': cut, 'end_terminated_share': 1 - cut, 'end_error_share': 0}
    expected |= {'failed_share': 0, 'return_mean': total / 6, 'success_share': sum(e.success for e in episodes) / 6}
    for name, value in expected.items():
        assert metrics[f'environment/{name}'] == pytest.approx(value), name
    assert metrics['rollout/ended_share'] == 1 - cut and metrics['rollout/score_mean'] == pytest.approx(total / 6)
    # '<ok>' once, four tokens of every response
    assert metrics['rollout/response_len_mean'] * metrics['environment/observation_share'] == pytest.approx(4)
    seconds = performance_metrics(found, {'perf/total_s': 2.0}, 1)
    assert seconds['perf/environment_step_s'] == pytest.approx(sum(e.step_s for e in episodes) / 12)
    assert seconds['perf/new_tokens_per_s'] == sum(t.stop - t.start for e in episodes for t in e.turns) / 2
    assert all(math.isfinite(value) for name, value in metrics.items() if name.startswith('environment/'))


@pytest.mark.parametrize(
    'settings',
    [
        {'tis_cap': 2.0, 'lam_length': 1.0, 'overlong_filter': True},
        {'advantage_estimator': 'grpo', 'policy_loss': 'gspo', 'kl_in': 'loss'},
        {
            'advantage_estimator': 'reinforce++',
            'policy_loss': 'cispo',
            'token_penalty': 0.1,
            'score_scaling': 'running',
        },
    ],
    ids=lambda settings: next(iter(settings.values())),
)
def test_runs_with_other_settings(settings):
    """The ratio right after the rollout is 1: samples of several turns have the learned log-probs."""
    found, metrics = one_phase(environment_settings=LIMITS, **settings)
    assert metrics['ppo/first_ratio_error'] < 1e-4
    assert all(math.isfinite(value) for value in metrics.values())
    assert metrics.get('ppo/tis_weight', 1.0) == pytest.approx(1, abs=1e-4)
    if 'overlong_filter' in settings:  # episodes that the environment did not end
        assert metrics['rollout/filtered_share'] == metrics['environment/end_turns_share']
        for e in found:
            assert bool(e.response_mask.any()) == (e.episode.end == 'terminated')
            assert e.score == pytest.approx(sum(x for t in e.episode.turns for x in t.rewards.values()))


ON_RANKS: dict[str, Any] = {'gae_over': 'turn', 'lam_length': 1.0, 'value_lam': 1.0, 'num_samples_per_prompt': 1}
ON_RANKS |= {'experience_batch_size': 4, 'train_batch_size': 8, 'reward_weights': {'vowels': 1.0, 'short': 0.1}}


def metrics_of_rank(strategy: Any = None) -> list[dict[str, float]]:
    run = trainer(strategy=strategy, **ON_RANKS)
    run.fit(max_timesteps=2, update_timesteps=2)
    return run.log.phases


def two_ranks() -> list[dict[str, float]]:
    with DDPStrategy(seed=1, device='cpu') as strategy:
        return metrics_of_rank(strategy)


def test_ranks_have_no_effect():
    alone = metrics_of_rank()
    for phases in run_distributed(two_ranks, 2):
        close(phases, alone, rel=2e-3, abs=2e-5)


def test_reward_weights_without_an_environment_are_refused():
    weights = {'vowels': 1.0}
    for settings, message in (
        ({'reward_weights': weights, 'environment': None}, 'reward_weights: there is no environment'),
        ({'reward_weights': weights}, 'needs one weight, by the name reward_fn or reward_model'),
    ):
        with pytest.raises(ValueError, match=message):
            trainer(letters, **settings)
    with pytest.raises(ValueError, match='or reward_weights of an environment'):
        trainer(advantage_estimator='gdpo', kl_coef=0.0)


def test_step_takes_runs_of_tokens_for_turns():
    """A step-wise loop has no episodes; the masks define turns."""
    credit = {'gae_over': 'turn', 'gamma': 1.0, 'lam': 1.0, 'kl_coef': 0.0, 'num_samples_per_prompt': 1}
    run = trainer(letters, environment=None, environment_settings=None, **credit)
    mask = torch.tensor([True, True, False, True])
    queries, responses = [torch.tensor([40, 41])] * 2, [torch.tensor([50, 51, 52, 53])] * 2
    run.step(queries, responses, [2.0, torch.tensor([0.0, 1, 9, 1])], [mask, mask])
    for e, returns in zip(run.last_experiences, ([2, 2, 0, 2], [2, 2, 0, 1]), strict=True):
        assert e.returns.tolist() == pytest.approx(returns, abs=1e-5)
        assert e.advantages[0] == e.advantages[1] != e.advantages[3]
