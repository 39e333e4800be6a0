"""Every check on metrics with and without a planted fault: findings and their phases; runs log the metrics of the
checks."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / 'benchmarks'))
from doctor_faults import (
    FAULTS,
    GROUPS,
    BatchSizeReward,
    good_share,
    key_of,
    memorised,
    online,
    preferences,
    reward_model,
)

from chatgpt.monitor.doctor import CHECKS, Diagnosis, Finding, diagnose, recommended_lr
from chatgpt.monitor.doctor.diagnosis import explanations
from chatgpt.monitor.run_folder.reading import RunFolder
from chatgpt.monitor.run_folder.record import RunRecord, Start

MODEL = {'actor': {'kind': 'gpt2', 'parameters': 260_000, 'trained': 260_000}}
RATIOS: dict[str, Any] = {'ppo/ratio_max': 1.5, 'ppo/ratio_min': 0.6, 'ppo/first_ratio_error': 1e-6}
RATIOS |= {'ppo/first_approx_kl': 1e-8, 'ppo/approx_kl_k3': 0.004, 'ppo/clip_fraction': 0.1}
SCORES: dict[str, Any] = {'rollout/score_mean': lambda i: 0.3 + 0.01 * i, 'rollout/score_std': 0.4}
SCORES |= {'rollout/score_min': -1.0, 'rollout/score_max': 2.0, 'rollout/score_mad': 0.3}
TEXTS = {'rollout/response_len_mean': 40.0, 'rollout/ended_share': 0.9, 'rollout/entropy': 2.0, 'ppo/entropy': 2.0}
TEXTS |= {'rollout/repetition_within': 0.02, 'rollout/repetition_across': 0.2}
VALUES = {'ppo/policy_loss': 0.0, 'ppo/value_loss': 0.2, 'ppo/explained_variance': 0.4, 'ppo/return_var': 0.5}
NORMS = {'ppo/actor_grad_norm': 1.0, 'ppo/actor_grad_norm_max': 2.0}
NORMS |= {'ppo/critic_grad_norm': 1.0, 'ppo/critic_grad_norm_max': 2.0, 'ppo/lr': 3e-4, 'ppo/critic_lr': 1e-3}
TIMES = {'perf/collect_s': 6.0, 'perf/score_s': 1.0, 'perf/learn_s': 3.0, 'perf/total_s': 10.0, 'perf/other_s': 0.5}
KL: dict[str, Any] = dict.fromkeys(('rollout/kl_mean', 'rollout/kl_k3_mean'), lambda i: min(0.5 * i, 5.0))
HEALTHY = SCORES | KL | {'rollout/kl_coef': 0.1} | TEXTS | RATIOS | VALUES | NORMS | TIMES
HEALTHY |= {'ppo/num_updates': lambda i: 8.0 * i}
RM: dict[str, Any] = {'rm/loss': lambda i: 0.7 - 0.01 * i, 'rm/accuracy': lambda i: 0.5 + 0.02 * i, 'rm/lr': 1e-3}
DPO: dict[str, Any] = {'dpo/loss': lambda i: 0.7 - 0.01 * i, 'dpo/accuracy': lambda i: 0.5 + 0.02 * i, 'dpo/lr': 3e-4}
DPO |= {'dpo/reward_chosen': 0.01, 'dpo/logp_chosen': -1.0, 'dpo/grad_norm': 1.0}
SFT: dict[str, Any] = {'sft/loss': lambda i: 2.0 - 0.05 * i, 'sft/lr': 1e-3, 'sft/grad_norm': 1.0}


def record(**changes: Any) -> RunRecord:
    given: dict[str, Any] = {
        'method': 'ppo',
        'trainer': 'PPOTrainer',
        'settings': {'kl_coef': 0.1, 'max_epochs': 4, 'max_grad_norm': 1.0, 'value_coef': 0.1},
        'generation': {'max_new_tokens': 64, 'min_new_tokens': 0},
        'strategy': {'precision': 'fp32', 'world_size': 1},
        'models': MODEL,
        'data': {'prompts': 500, 'distinct': 480, 'cut': 3},
        'num_phases': 40,
        'reward': 'joy, source 1234',
    }
    given['settings'] = given['settings'] | changes.pop('settings', {})
    return RunRecord(**given | changes)


def metrics(phases: int, numbers: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns the rows of phases 1, 2, ...; a metric of None is left out."""
    rows = []
    for i in range(1, phases + 1):
        values = {name: value(i) if callable(value) else value for name, value in numbers.items()}
        rows.append({'step': i, **{name: value for name, value in values.items() if value is not None}})
    return rows


def found(phases: int, numbers: dict[str, Any], **about: Any) -> list[Finding]:
    diagnosis = Diagnosis(record(**about))
    return [finding for row in metrics(phases, numbers) for finding in diagnosis.see(row)]


class Case(NamedTuple):
    """Metrics with and without the fault, as changes of the healthy run's, and the phase of the finding."""

    planted: dict[str, Any]
    without: dict[str, Any] = {}
    step: int = 1
    phases: int = 24
    about: dict[str, Any] = {}
    about_without: dict[str, Any] = {}
    base: dict[str, Any] = HEALTHY


def after(phase: int, value: float, otherwise: float) -> Any:
    return lambda i: value if i >= phase else otherwise


def named(prefix: str) -> Any:
    """Returns a function that makes metrics: named('rollout')(kl_mean=1.0) is {'rollout/kl_mean': 1.0}."""
    return lambda **values: {f'{prefix}/{name}': value for name, value in values.items()}


environment, evals, perf, ppo, rm, rollout, sft = map(named, 'environment eval perf ppo rm rollout sft'.split())
STILL = {'rollout/kl_mean': 0.0, 'rollout/kl_k3_mean': 1e-5, 'ppo/ratio_max': 1.0001, 'ppo/ratio_min': 0.9999}
NO_KL, NO_CRITIC = dict.fromkeys(KL), {'ppo/value_loss': None}
SHARED = {'ppo/critic_lr': None, 'ppo/critic_grad_norm': None, 'ppo/critic_grad_norm_max': None}
# Medians of five, so that a step at phase p shows at p + 2.
CASES: dict[str, Case] = {
    'nothing-moves': Case(STILL, {**STILL, 'ppo/ratio_max': 1.1}, step=10),
    'nothing-moves, without a KL and with the clip range of GSPO': Case(
        NO_KL | ppo(ratio_max=1.000001, ratio_min=0.999999),
        NO_KL | ppo(ratio_max=1.002, ratio_min=0.998),
        step=10,
        about={'settings': {'kl_coef': 0.0, 'eps_clip': 3e-4}},
    ),
    'nothing-moves, a reward model with the default lr': Case(
        rm(loss=0.69, accuracy=0.51, lr=1e-5), rm(lr=1e-5), step=8, base=RM
    ),
    'nothing-moves, SFT': Case(sft(loss=2.0, lr=1e-7), sft(lr=1e-7), step=8, base=SFT),
    'nothing-moves, SFT with warm-up': Case(
        sft(loss=2.0, lr=1e-7), sft(lr=1e-7), step=8, base=SFT, about={'settings': {'warmup_steps': 3}}
    ),
    'nothing-moves, labels without signal': Case(
        rm(loss=0.69, accuracy=0.5), rm(accuracy=lambda i: 0.5 + 0.005 * i), step=22, base=RM, about={'num_phases': 24}
    ),
    'kl-runs-away': Case(  # e^(i/4) nats in 40 tokens: above 40 from phase 15, the median of five two phases later
        rollout(kl_mean=lambda i: 2.718 ** (i / 4)), rollout(kl_mean=lambda i: 1.5 * i), step=17
    ),
    'kl-runs-away, at once': Case(  # 60 nats in 6 tokens after the first updates; one token of 1 % has -ln .01 = 4.6
        rollout(kl_mean=lambda i: 60.0 if i > 1 else 0.0, response_len_mean=6.0),
        rollout(kl_mean=lambda i: 4.6 if i > 1 else 0.0, response_len_mean=1.0),
        step=2,
        phases=3,
    ),
    'kl-runs-away, and the score is lost': Case(  # 3.3 nats per token; a score that falls from .44 to 0, spread .5
        rollout(
            kl_mean=lambda i: 62.0 if i > 1 else 0.0,
            response_len_mean=18.7,
            score_std=0.5,
            score_mean=lambda i: 0.0 if i > 1 else 0.44,
        ),
        rollout(
            kl_mean=lambda i: 62.0 if i > 1 else 0.0,
            response_len_mean=18.7,
            score_std=0.5,
            score_mean=lambda i: 0.3 if i > 1 else 0.44,
        ),
        step=2,
        phases=3,
    ),  # fmt: skip
    'kl-runs-away, from its target': Case(
        rollout(kl_mean=lambda i: float(i)), rollout(kl_mean=5.0), step=12, about={'settings': {'kl_target': 3.0}}
    ),
    'kl-coef-at-limit': Case(
        rollout(kl_mean=7.0, kl_coef=lambda i: 0.1 * 1.01**i),
        rollout(kl_mean=lambda i: 7.0 - i / 8, kl_coef=lambda i: 0.1 * 1.01**i),
        step=20,
        about={'settings': {'kl_target': 3.0}},
    ),
    'clip-fraction-high': Case(ppo(clip_fraction=0.5), ppo(clip_fraction=0.3), step=5),
    'clip-fraction-zero': Case(
        ppo(clip_fraction=0.0, ratio_max=1.01, ratio_min=0.985), ppo(clip_fraction=0.0, ratio_max=1.15), step=10
    ),
    'ratio-not-one': Case(ppo(first_ratio_error=after(3, 1e-2, 1e-6)), ppo(first_ratio_error=3e-4), step=3),
    'ratio-not-one, in bf16': Case(
        ppo(first_approx_kl=0.2),
        ppo(first_ratio_error=0.3, first_approx_kl=0.01),
        about={'strategy': {'precision': 'bf16'}},
    ),
    'entropy-collapses': Case(
        {'ppo/entropy': after(6, 0.1, 2.0), 'rollout/score_mean': 0.3}, ppo(entropy=after(6, 0.3, 2.0)), step=8
    ),
    'chosen-unlikely': Case(
        {'dpo/reward_chosen': after(4, -0.7, 0.0), 'dpo/logp_chosen': after(4, -8.3, -1.3)},
        {'dpo/reward_chosen': after(4, -0.7, 0.0), 'dpo/logp_chosen': after(4, -87.0, -80.0)},  # of a long answer
        step=6,
        base=DPO,
    ),
    'value-loss-dominates': Case(
        {**SHARED, 'ppo/value_loss': 50.0, 'ppo/actor_grad_norm': 9.0, 'ppo/actor_grad_norm_max': 9.0},
        ppo(value_loss=50.0, actor_grad_norm=9.0),  # a separate critic
        step=5,
    ),
    'value-loss-dominates, not clipped': Case(
        {**SHARED, 'ppo/value_loss': 50.0, 'ppo/actor_grad_norm': 9.0, 'ppo/actor_grad_norm_max': 9.0},
        {**SHARED, 'ppo/value_loss': 50.0, 'ppo/actor_grad_norm': 9.0, 'ppo/actor_grad_norm_max': 9.0},
        step=5,
        about_without={'settings': {'max_grad_norm': None}},
    ),
    'explained-variance-low': Case(
        ppo(explained_variance=-0.05), ppo(explained_variance=after(12, 0.1, -0.5)), step=20
    ),
    'critic-worse-than-constant': Case(
        ppo(explained_variance=-0.3, policy_loss=after(4, 0.0, None)),  # three phases of warm-up do not count
        ppo(explained_variance=lambda i: -30.0 / i**2),  # comes up from far below
        step=13,
    ),
    'critic-worse-than-constant, now and then': Case(
        ppo(explained_variance=-0.3), ppo(explained_variance=lambda i: -0.3 if i % 5 else 0.01), step=10
    ),
    'critic-warmup-short': Case(
        ppo(explained_variance=lambda i: min(0.09 * i - 0.2, 0.6), policy_loss=after(3, 0.0, None)),
        ppo(explained_variance=lambda i: min(0.09 * i + 0.1, 0.6), policy_loss=after(3, 0.0, None)),  # 0.37 at phase 3
        step=9,
        about={'settings': {'critic_warmup_phases': 2}},
        about_without={'settings': {'critic_warmup_phases': 2}},
    ),
    'critic-warmup-short, no warm-up': Case(
        ppo(explained_variance=lambda i: 0.06 * i, policy_loss=after(3, 0.0, None)),
        ppo(explained_variance=lambda i: 0.06 * i),
        step=10,
        about={'settings': {'critic_warmup_phases': 2}},
        about_without={'settings': {'critic_warmup_phases': 0}},
    ),
    'critic-warmup-short, late': Case(
        ppo(explained_variance=lambda i: 0.06 * i, policy_loss=after(3, 0.0, None)),
        ppo(explained_variance=lambda i: 0.1 + 0.4 * (i > 20), policy_loss=after(2, 0.0, None)),
        step=10,
        phases=30,
        about={'settings': {'critic_warmup_phases': 2}},
        about_without={'settings': {'critic_warmup_phases': 1}},
    ),
    'over-optimisation': Case(
        {'eval/truth_mean': lambda i: (1.0 - abs(i - 12) / 12) if i % 4 == 0 else None, 'rollout/score_std': 0.2},
        {'eval/truth_mean': lambda i: i / 24 if i % 4 == 0 else None, 'rollout/score_std': 0.2},
        step=20,
    ),
    'over-optimisation, of the success in an environment': Case(
        {'eval/success_share': lambda i: (1.0 - abs(i - 12) / 12) if i % 4 == 0 else None, 'rollout/score_std': 0.2},
        {'eval/metrics/window': lambda i: (1.0 - abs(i - 12) / 12) if i % 4 == 0 else None, 'rollout/score_std': 0.2},
        step=20,
    ),
    'over-optimisation, lower is better': Case(
        {
            'eval/cost': lambda i: abs(i - 12) / 12 if i % 4 == 0 else None,
            'eval/cost_best': lambda i: max(12 - i, 0) / 12 if i % 4 == 0 else None,
            'rollout/score_std': 0.2,
        },
        evals(cost=lambda i: abs(i - 12) / 12 if i % 4 == 0 else None),  # no known direction
        step=20,
    ),
    'score-saturates': Case(
        rollout(score_std=after(6, 0.01, 0.4), score_max=1.0), rollout(score_std=after(6, 0.1, 0.4)), step=8
    ),
    'scores-equal': Case(
        rollout(score_min=1.0, score_max=1.0, score_std=0.0),
        rollout(score_min=1.0, score_max=lambda i: 1.0 + (i % 3 == 0)),
        step=3,
        about={'settings': {'experience_batch_size': 64}},
    ),
    'scores-equal, several timesteps a phase': Case(
        rollout(score_min=0.0, score_max=0.0, score_std=0.0),
        rollout(score_min=0.0, score_max=lambda i: 1.0 - (i % 3 == 0)),
        step=3,
        about={'settings': {'experience_batch_size': 8, 'update_timesteps': 10}},
    ),
    'scores-equal, of few responses': Case(  # one of 104 differs
        rollout(score_min=1.0, score_max=1.0, score_std=0.0),
        rollout(score_min=1.0, score_max=lambda i: 1.0 + (i % 13 == 0)),
        step=13,
    ),
    'groups-without-signal': Case(
        rollout(equal_groups_share=0.8, score_mean=0.1) | NO_CRITIC,
        rollout(equal_groups_share=0.8, score_mean=1.9) | NO_CRITIC,  # equal because all are right
        step=5,
    ),
    'groups-without-signal, but the baseline is a critic': Case(
        rollout(equal_groups_share=0.8, score_mean=0.1) | NO_CRITIC, rollout(equal_groups_share=0.8, score_mean=0.1), 5
    ),
    'reward-outliers': Case(
        rollout(score_max=lambda i: 50.0 if i in (4, 9) else 2.0, score_std=lambda i: 9.0 if i in (4, 9) else 0.4),
        rollout(score_max=lambda i: 50.0 if i == 4 else 2.0, score_std=lambda i: 9.0 if i == 4 else 0.4),
        step=9,
    ),
    'reward-model-disagrees': Case(rollout(rescore_error=0.05), rollout(rescore_error=1e-6)),
    'repetition-within': Case(
        rollout(repetition_within=after(6, 0.2, 0.02)), rollout(repetition_within=after(6, 0.1, 0.02)), step=8
    ),
    'repetition-across': Case(
        rollout(repetition_across=after(6, 0.6, 0.2)), rollout(repetition_across=after(6, 0.4, 0.2)), step=8
    ),
    'ends-at-once': Case(rollout(response_len_mean=1.0, ended_share=1.0), rollout(response_len_mean=3.0), step=3),
    'never-ends': Case(rollout(ended_share=after(6, 0.0, 0.9)), rollout(ended_share=after(6, 0.01, 0.9)), step=10),
    'never-ends, from the start': Case(
        rollout(ended_share=0.0),
        step=5,
        about={'generation': {'max_new_tokens': 256}},
        about_without={'generation': {'max_new_tokens': 256, 'min_new_tokens': 256}},
    ),
    'length-limit': Case(rollout(ended_share=after(6, 0.2, 0.9)), rollout(ended_share=after(6, 0.6, 0.9)), step=8),
    'length-drifts': Case(
        rollout(response_len_mean=after(6, 120.0, 40.0)), rollout(response_len_mean=after(6, 90.0, 40.0)), step=8
    ),
    'few-prompts': Case(  # 8 draws a phase of 4 prompts
        {},
        step=2,
        about={'data': {'prompts': 4, 'distinct': 4, 'cut': 0}},
        about_without={'data': {'prompts': 20, 'distinct': 20}},
    ),
    'duplicate-prompts': Case({}, about={'data': {'prompts': 500, 'distinct': 200, 'cut': 0}}),
    'cut-prompts': Case({}, about={'data': {'prompts': 500, 'distinct': 500, 'cut': 90}}),
    'schedule-ends-early, but a resume made the run longer': Case(
        ppo(lr=lambda i: 3e-4 * max(1 - i / 10, 0)),
        step=11,
        about_without={'starts': [Start(at='', phase=0, command=[]), Start(at='', phase=24, command=[])]},
    ),
    'schedule-ends-early': Case(
        ppo(lr=lambda i: 3e-4 * max(1 - i / 10, 0)),
        ppo(lr=lambda i: 3e-4 * (1 - i / 40)),
        step=11,
        about={'settings': {'lr_decay_steps': 80}},
    ),
    'grad-norm-spikes': Case(
        ppo(actor_grad_norm_max=lambda i: 30.0 if i in (12, 15, 18) else 2.0),
        ppo(actor_grad_norm_max=lambda i: 30.0 if i in (12, 18) else 2.0),
        step=18,
    ),
    'grad-norm-spikes, once': Case(
        ppo(critic_grad_norm_max=lambda i: 5000.0 if i == 14 else 2.0),
        ppo(critic_grad_norm_max=lambda i: 500.0 if i == 14 else 2.0),
        step=14,
    ),
    'eval-loss-rises': Case(
        sft(val_loss=lambda i: {5: 1.9, 10: 1.7, 15: 1.8, 20: 1.9}.get(i)),
        sft(val_loss=lambda i: {5: 1.9, 10: 1.7, 15: 1.72, 20: 1.9}.get(i)),
        step=20,
        base=SFT,
    ),
    'slow-rank': Case(
        perf(slowest_rank=1.0, slowest_rank_s=9.0, other_ranks_s=5.0),
        perf(slowest_rank=lambda i: float(i % 2), slowest_rank_s=9.0, other_ranks_s=5.0),
        step=5,
    ),
    'time-elsewhere': Case(perf(other_s=15.0), perf(other_s=5.0), step=5),
    'time-elsewhere, a slow reward function': Case(
        perf(score_s=8.0),
        step=5,
        about={'reward': 'ask_a_service, source 99'},
        about_without={'reward': 'RewardModelScorer, outputs/rm'},
    ),
}


EPISODES: dict[str, Any] = HEALTHY | {  # 3 turns of 2 tokens, 14 of observations; half of them out of turns
    'rollout/response_len_mean': 20.0,
    'environment/observation_share': 0.7,
    'environment/num_turns_mean': 3.0,
    'environment/success_share': lambda i: 0.2 + 0.01 * i,
    'environment/end_terminated_share': 0.5,
    'environment/end_turns_share': 0.5,
    'environment/end_tokens_share': 0.0,
    'rollout/ended_share': 0.5,
    'rollout/kl_mean': lambda i: min(0.1 * i, 1.0),
    'rollout/kl_k3_mean': lambda i: min(0.1 * i, 1.0),
}
CASES |= {
    'length-limit, of episodes': Case(
        environment(end_tokens_share=after(6, 0.8, 0.0)),
        {'environment/end_turns_share': after(6, 0.8, 0.5), 'rollout/ended_share': after(6, 0.2, 0.5)},
        step=8,
        base=EPISODES,
    ),
    'length-limit, of all episodes': Case(
        environment(end_tokens_share=after(6, 1.0, 0.1)),
        environment(end_tokens_share=after(6, 0.4, 0.1)),
        step=8,
        base=EPISODES,
    ),
    'length-drifts, of turns': Case(
        {'rollout/response_len_mean': after(6, 40.0, 20.0), 'environment/observation_share': after(6, 0.4, 0.7)},
        # Half as many turns of the same length, as with a better policy.
        {'rollout/response_len_mean': after(6, 60.0, 20.0), 'environment/num_turns_mean': after(6, 9.0, 3.0)},
        step=8,
        base=EPISODES,
    ),
    'kl-runs-away, in few tokens of its own': Case(  # e^(i/4) nats in 6 tokens of 20
        rollout(kl_mean=lambda i: 2.718 ** (i / 4)), rollout(kl_mean=lambda i: 0.2 * i), step=10, base=EPISODES
    ),
}


def test_episodes_are_not_taken_for_responses_that_went_wrong():
    """Turns of one token, no end tokens, mostly exhausted turns, one prompt: no faults in an environment."""
    about = {'data': {'prompts': 4, 'distinct': 1, 'cut': 0}, 'generation': {'max_new_tokens': 256}}
    assert found(30, EPISODES, **about) == []
    short = {'rollout/response_len_mean': 2.0, 'environment/num_turns_mean': 2.0, 'environment/observation_share': 0.0}
    for more in (
        short | {'rollout/ended_share': 1.0},
        {'rollout/ended_share': 0.0, 'environment/end_turns_share': 1.0},
        {'rollout/repetition_across': after(6, 0.9, 0.2)},  # all respond 'up' where up is right
    ):
        assert found(30, EPISODES | more, **about) == []
        # Negative control: without an environment the same numbers are findings.
        answers = {k: v for k, v in (EPISODES | more).items() if not k.startswith('environment/')}
        if 'rollout/repetition_across' not in more:
            assert found(30, answers, **about)


def test_every_check_has_a_case_and_a_section_with_what_why_and_what_to_change():
    assert {name.split(',')[0] for name in CASES} == set(CHECKS) == set(explanations())
    for text in explanations().values():
        assert all(f'\n{word}: ' in f'\n{text}' for word in ('Seen', 'Why', 'Change', 'Source'))
    listed = (Path(__file__).resolve().parents[2] / 'docs' / 'doctor.md').read_text()
    assert [key for key in CHECKS if key not in listed] == []


@pytest.mark.parametrize('base', [HEALTHY, RM, DPO, SFT], ids=['PPO', 'reward model', 'DPO', 'SFT'])
def test_a_healthy_run_has_no_finding(base):
    assert found(30, base) == []


@pytest.mark.parametrize('name', CASES)
def test_a_planted_fault_is_found_when_it_begins_and_not_without_it(name):
    case, key = CASES[name], name.split(',')[0]
    findings = found(case.phases, case.base | case.planted, **case.about)
    assert [(f.key, f.step) for f in findings if f.key == key] == [(key, case.step)]
    (finding,) = [f for f in findings if f.key == key]
    assert finding.level in ('error', 'warning', 'note')
    assert any(c.isdigit() for c in finding.evidence)  # evidence has numbers
    assert finding.title and finding.cause and finding.change and finding.more.endswith(f'--explain {key}')
    assert '\n' not in finding.line() and 'nan' not in finding.line()
    without = found(
        case.phases,
        case.base | case.without,
        **(case.about_without or case.about if case.without else case.about_without),
    )
    assert key not in [f.key for f in without]


def test_advice_has_the_numbers_of_the_run():
    (finding,) = found(24, RM | {'rm/loss': 0.69, 'rm/accuracy': 0.51, 'rm/lr': 1e-5})
    # 9e-6 * sqrt(6e9 / 260e3) = 1.37e-3
    assert 'lr 1e-05, 260,000 parameters' in finding.evidence and 'raise lr to 1e-03 (1e+02 times' in finding.change
    spikes = ppo(critic_grad_norm_max=lambda i: 5000.0 if i == 14 else 2.0, critic_lr=9e-6, lr=1e-6)
    (finding,) = [f for f in found(15, HEALTHY | spikes, settings={'max_grad_norm': 1.0}) if 'spikes' in f.key]
    assert finding.change.startswith('critic_lr from 9e-06 to 5e-06')
    (finding,) = [f for f in found(24, HEALTHY | {'rollout/kl_mean': lambda i: 2.718 ** (i / 4)}) if 'kl' in f.key]
    assert 'multiply kl_coef by 4 (from 0.1 to 0.4)' in finding.change


def test_advice_is_what_the_settings_allow():
    def advice(key: str, **settings: Any) -> str:
        case = CASES[key]
        (finding,) = [f for f in found(case.phases, HEALTHY | case.planted, settings=settings) if f.key == key]
        return finding.change

    far = CASES['reward-outliers'].planted | rollout(score_mean=50.0, score_min=49.0)
    (finding,) = [f for f in found(24, HEALTHY | far | rollout(score_max=lambda i: 99.0)) if f.key == 'reward-outliers']
    assert finding.change.startswith("score_scaling='norm', score_clip=0.25: five robust standard deviations, in units")
    assert advice('reward-outliers').startswith('score_clip=2.2: five robust')
    assert advice('reward-outliers', advantage_estimator='gdpo') == 'bound each of the rewards in its function'
    assert advice('length-limit').endswith(
        'missing_eos_score one standard deviation below the mean score, or overlong_filter=True'
    )
    assert 'overlong_filter=True' not in advice('length-limit', missing_eos_score=-1.0)
    assert 'overlong_filter=False and missing_eos_score' in advice('length-limit', overlong_filter=True)
    assert 'missing_eos_score' not in advice('never-ends', advantage_estimator='gdpo')
    assert 'eps_clip_high' in advice('entropy-collapses')
    assert 'eps_clip' not in advice('entropy-collapses', policy_loss='reinforce')
    assert 'kl_target' in advice('over-optimisation') and 'kl_target' not in advice('over-optimisation', kl_coef=0.0)


def test_rounding_of_16_bits_is_no_disagreement():
    scores = rollout(score_min=29.2, score_max=30.9, score_std=0.3, score_mean=30.0, rescore_error=0.125)
    for precision, count in (('bf16', 0), ('fp32', 1)):
        findings = found(1, HEALTHY | scores, strategy={'precision': precision, 'world_size': 1})
        assert [f.key for f in findings].count('reward-model-disagrees') == count


@pytest.mark.parametrize('noise', [1, 2, 3])
def test_noise_is_no_finding(noise):
    """Every healthy number varies at random by 30 %, over six hundred phases."""
    import random

    rng = random.Random(noise)
    steady = {n: v for n, v in HEALTHY.items() if not callable(v) and 'ratio' not in n and n != 'rollout/ended_share'}
    noisy = {n: (lambda i, v=v: v * rng.uniform(0.7, 1.3)) for n, v in steady.items() if v}
    assert [f.key for f in found(600, HEALTHY | noisy, num_phases=600)] == []


def test_values_that_are_not_numbers_are_ignored():
    rows = metrics(30, HEALTHY)
    for row in rows[::2]:
        row |= {'ppo/entropy': None, 'rollout/kl_mean': float('nan'), 'ppo/explained_variance': float('-inf')}
    diagnosis = Diagnosis(record())
    assert [f for row in rows for f in diagnosis.see(row)] == []
    assert Diagnosis(None).see({'step': 1}) == []


def test_a_fault_has_one_finding():
    numbers = HEALTHY | STILL | {'ppo/clip_fraction': 0.0}
    assert [f.key for f in found(24, numbers)] == ['nothing-moves']
    numbers = HEALTHY | {'rollout/score_min': 0.0, 'rollout/score_max': 0.0, 'rollout/score_std': 0.0}
    about = {'settings': {'experience_batch_size': 64}}
    assert [f.key for f in found(24, numbers | {'rollout/equal_groups_share': 1.0}, **about)] == ['scores-equal']


def test_the_rule_for_learning_rates_goes_through_the_published_points():
    """Ouyang et al. 2022: 9e-6 for 6 billion; arXiv 2403.17031: 3e-6 for PPO with 1 billion; Rafailov et al. 2023: 1e-6
    for DPO with 2.8 billion."""
    assert recommended_lr(6 * 10**9, 'rm') == 9e-6
    assert 3e-6 / 2 < recommended_lr(10**9, 'ppo') < 3e-6 * 2
    assert 1e-6 / 2 < recommended_lr(28 * 10**8, 'dpo') < 1e-6 * 2
    assert recommended_lr(6 * 10**9, 'rm', trained=10**7) == pytest.approx(9e-5)
    assert recommended_lr(4 * 6 * 10**9, 'sft') == pytest.approx(4.5e-6, abs=0.6e-6)


# ---------------------------------------------------------------------- runs


def test_the_trainers_log_what_the_checks_look_at(tmp_path):
    """A check of a metric that is not logged could never find a fault."""
    online(tmp_path / 'ppo', phases=2, reward=BatchSizeReward(good_share))
    online(tmp_path / 'grpo', phases=1, **GROUPS)
    reward_model(tmp_path / 'rm', 1e-3)
    memorised(tmp_path / 'sft')
    preferences(tmp_path / 'dpo', 1e-3)
    logged = {kind: set().union(*RunFolder(tmp_path / kind).metrics) for kind in ('ppo', 'grpo', 'rm', 'dpo', 'sft')}
    assert HEALTHY.keys() | {'rollout/rescore_error'} <= logged['ppo']
    assert 'rollout/equal_groups_share' in logged['grpo']
    assert RM.keys() <= logged['rm'] and DPO.keys() <= logged['dpo'] and SFT.keys() | {'sft/val_loss'} <= logged['sft']


SHORT = (
    'chosen-unlikely',
    'reward-model-disagrees',
    'few-prompts',
    'duplicate-prompts',
    'cut-prompts',
    'kl-runs-away (at once)',
)


@pytest.mark.parametrize('name', SHORT)
def test_a_run_with_a_fault_is_diagnosed_during_and_after_it_and_one_without_is_not(name, tmp_path):
    for number, make in enumerate((FAULTS[name].planted, FAULTS[name].without)):
        make(tmp_path / str(number))
        run = RunFolder(tmp_path / str(number))
        found = [(f.key, f.step) for f in diagnose(run)]
        assert found == [(row['finding'], row['step']) for row in run.findings]
        assert (key_of(name) in dict(found)) == (number == 0)


@pytest.mark.parametrize(
    ('groups', 'change'),
    [
        ({'lr': 1e-5}, 'critic_lr from 1e-05 to 0.0006'),
        ({'lr': [1e-5, 6e-4]}, 'critic_lr from 0.0006 to 0.002'),
    ],
)
def test_a_value_head_with_the_rate_of_the_policy_is_told_the_rule(groups, change):
    smollm2 = {'models': {'actor': {'parameters': 134_515_585}}, 'optimizers': {'actor': groups}}
    findings = found(24, HEALTHY | SHARED | {'ppo/lr': 1e-5, 'ppo/explained_variance': -0.05}, **smollm2)
    (finding,) = (f for f in findings if f.key == 'explained-variance-low')
    assert change in finding.change


def test_a_warm_up_of_a_value_head_is_not_of_a_critic_of_its_own():
    smollm2 = {'models': {'actor': {'parameters': 134_515_585}}, 'optimizers': {'actor': {'lr': 1e-5}}}
    numbers = {'ppo/lr': 1e-5, 'ppo/critic_lr': lambda i: 1e-5 if i < 4 else None, 'ppo/explained_variance': -0.3}
    findings = found(24, HEALTHY | SHARED | numbers | {'ppo/policy_loss': after(4, 0.0, None)}, **smollm2)
    assert ['critic_lr from 1e-05 to 0.0006' in f.change for f in findings if f.key.startswith('critic')] == [True]
