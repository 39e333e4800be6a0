"""The choices of PPOTrainer: every loss against a slow loop in float64, dynamic sampling, long responses, what is refused."""

from __future__ import annotations

import math
from copy import deepcopy
from typing import Any

import pytest
import torch

from chatgpt.nn import GPTActor, GPTCritic
from chatgpt.rollout import HFEngine, LocalEngine
from chatgpt.testing.fakes import char_tokenizer, tiny_config
from chatgpt.testing.processes import run_distributed
from chatgpt.trainer import PPOConfig, PPOTrainer
from chatgpt.trainer.callbacks import ProgressBar, SaveCheckpoint
from chatgpt.trainer.learning import BatchStats
from chatgpt.trainer.ppo import collate_or_filler
from chatgpt.trainer.ppo_collect import NothingToLearn
from chatgpt.trainer.ppo_loss import PPOLoss
from chatgpt.trainer.ppo_metrics import rollout_metrics
from chatgpt.trainer.strategies import DDPStrategy, NaiveStrategy
from chatgpt.types import Experience

MAX_NEW = 7


def experience(index: int, generator: torch.Generator) -> Experience:
    n = 2 + index % 4

    def rand() -> torch.Tensor:
        return torch.randn(n, generator=generator)

    old = -3.2 + 0.2 * rand()
    mask = torch.ones(n, dtype=torch.bool)
    mask[0] = index % 3 != 1  # a token of another's turn
    ids = torch.randint(3, 16, (n,), generator=generator)
    return Experience(
        index=index, group=index // 2, prompt_ids=torch.tensor([3, 4 + index]), response_ids=ids, response_mask=mask, score=0.0,
        logprobs=old + 0.5 * rand(), filtered_logprobs=old, edge_distances=torch.ones(n), finish_reason='eos', old_logprobs=old,
        ref_logprobs=old + 0.3 * rand(), values=rand(), kl=rand(), rewards=rand(), advantages=rand(), returns=rand(),
    )  # fmt: skip


def by_hand(
    records: list[Experience], logprobs: list[list[float]], entropies: list[list[float]], c: PPOConfig, kl_coef: float
) -> float:
    """The loss of a train batch, token by token."""
    mode, total, bonus, tokens, sequences = c.aggregation, 0.0, 0.0, 0, 0
    high = c.eps_clip if c.eps_clip_high is None else c.eps_clip_high
    for r, logp, entropy in zip(records, logprobs, entropies, strict=True):
        counted = [t for t in range(len(logp)) if r.response_mask[t]]
        if not counted:
            continue
        old, adv, ref, engine = (x.double().tolist() for x in (r.old_logprobs, r.advantages, r.ref_logprobs, r.logprobs))
        mean_ratio = math.exp(sum(logp[t] - old[t] for t in counted) / len(counted))
        of_sequence = 0.0
        for t in counted:
            ratio = mean_ratio if c.policy_loss == 'gspo' else math.exp(logp[t] - old[t])
            if c.policy_loss == 'reinforce':
                loss = -adv[t] * logp[t]
            else:
                clipped = min(max(ratio, 1 - c.eps_clip), 1 + high)
                loss = max(-adv[t] * ratio, -adv[t] * clipped)
                if c.dual_clip is not None and adv[t] < 0:
                    loss = min(loss, -c.dual_clip * adv[t])
            if c.tis_cap is not None:
                loss *= min(math.exp(old[t] - engine[t]), c.tis_cap)
            if c.kl_in == 'loss':
                d = logp[t] - ref[t]
                loss += kl_coef * {'k1': d, 'k2': d * d / 2, 'k3': math.exp(-d) + d - 1}[c.kl_loss_kind]
            of_sequence += loss
            bonus += entropy[t]
        tokens, sequences = tokens + len(counted), sequences + 1
        total += of_sequence / len(counted) if mode == 'sequence' else of_sequence
    total /= {'token': tokens, 'sequence': sequences, 'sequence_sum': sequences * MAX_NEW}[mode]
    return total - c.entropy_coef * bonus / tokens


CHOICES = [
    {}, {'eps_clip_high': 0.28}, {'dual_clip': 1.5}, {'loss_aggregation': 'sequence'}, {'loss_aggregation': 'sequence_sum'},
    {'policy_loss': 'gspo', 'eps_clip': 0.01, 'eps_clip_high': 0.02}, {'policy_loss': 'reinforce'}, {'tis_cap': 1.2},
    {'kl_in': 'loss'}, {'kl_in': 'loss', 'kl_loss_kind': 'k1'}, {'kl_in': 'loss', 'kl_loss_kind': 'k2', 'loss_aggregation': 'sequence'},
    {'entropy_coef': 0.3, 'loss_aggregation': 'sequence', 'tis_cap': 0.9, 'kl_in': 'loss', 'dual_clip': 2.0},
]  # fmt: skip


@pytest.mark.parametrize('choices', CHOICES, ids=lambda c: ','.join(map(str, c.values())) or 'default')
def test_the_loss_by_hand(choices):
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    records = [experience(i, generator) for i in range(6)]
    actor = GPTActor(config=tiny_config('gpt2', vocab_size=16, positions=32)).eval()
    config = PPOConfig(**({'eps_clip': 0.1} | choices))
    config.validate(1)
    loss = PPOLoss(actor, None, config, 1.0, MAX_NEW)
    loss.kl_coef = 0.7
    loss.begin(records)
    with torch.no_grad():
        outs = [actor(collate_or_filler([r]), with_entropy=True) for r in records]
    logprobs, entropies = [o.logprobs.double().tolist() for o in outs], [o.entropy.double().tolist() for o in outs]
    want = by_hand(records, logprobs, entropies, config, 0.7)
    for cut in ([6], [2, 1, 3], [1] * 6):  # the cut into micro-batches does not enter
        total, start = 0.0, 0
        for size in cut:
            part = records[start : start + size]
            total += loss.actor(collate_or_filler(part), part, BatchStats()).item()
            start += size
        assert total == pytest.approx(want, rel=2e-4, abs=1e-6)
    filler = loss.actor(collate_or_filler([]), [], BatchStats())
    assert filler.item() == 0.0
    others = [other for other in CHOICES if other != choices]
    wrong = [by_hand(records, logprobs, entropies, PPOConfig(**({'eps_clip': 0.1} | o)), 0.7) for o in others]
    assert sum(abs(w - want) > 1e-5 for w in wrong) >= len(wrong) - 1  # the twin: other choices are other numbers


@pytest.mark.parametrize(('estimator', 'loss', 'want'), [
    ('gae', 'ppo', 'token'), ('grpo', 'ppo', 'sequence'), ('dr_grpo', 'ppo', 'sequence_sum'), ('rloo', 'ppo', 'token'),
    ('reinforce++', 'ppo', 'token'), ('grpo', 'gspo', 'sequence'),
])  # fmt: skip
def test_each_papers_aggregation(estimator, loss, want):
    assert PPOConfig(advantage_estimator=estimator, policy_loss=loss, num_samples_per_prompt=2).aggregation == want


# ---------------------------------------------------------------------- whole runs


class Log(ProgressBar):
    def __init__(self) -> None:
        super().__init__(enabled=False)
        self.phases: list[dict[str, float]] = []
        self.experiences: list[list[Experience]] = []

    def on_make_experience_end(self, trainer: Any, experiences: list[Experience]) -> None:
        self.experiences.append(experiences)

    def on_phase_end(self, trainer: Any, step: int, metrics: dict[str, float]) -> None:
        self.phases.append({k: v for k, v in metrics.items() if not k.startswith('perf/')})


def vowels(prompts: list[str], responses: list[str]) -> list[float]:
    return [float(sum(c in 'aeiou' for c in r)) for r in responses]


def make(strategy: Any = None, reward: Any = vowels, more: Any = (), engine: Any = None, lr: float = 1e-3, **kw: Any) -> Any:
    strategy = strategy or NaiveStrategy(seed=3, device='cpu')
    torch.manual_seed(3)
    config = tiny_config('gpt2', positions=48)
    actor, initial = GPTActor(config=config), None
    initial = deepcopy(actor)
    critic = GPTCritic(config=config) if kw.get('advantage_estimator', 'gae') in ('gae', 'a2c') else None
    actor, optim = strategy.prepare((actor, torch.optim.AdamW(actor.parameters(), lr=lr, eps=1e-5)))
    critic_optim = None
    if critic is not None:
        critic, critic_optim = strategy.prepare((critic, torch.optim.AdamW(critic.parameters(), lr=1e-3, eps=1e-5)))
    log = Log()
    settings = {'experience_batch_size': 4, 'train_batch_size': 8, 'max_new_tokens': 8} | kw
    trainer = PPOTrainer(strategy, actor, critic, reward, strategy.prepare(initial), optim, critic_optim, tokenizer=char_tokenizer(),
                         callbacks=[log, *more], engine=engine, **settings)  # fmt: skip
    trainer.log = log
    return trainer


PROMPTS = [f'a {word}' for word in 'one two three four five six'.split()]
METHODS = {
    'grpo': {'advantage_estimator': 'grpo', 'num_samples_per_prompt': 4, 'kl_in': 'loss', 'kl_coef': 0.04},
    'dapo': {'advantage_estimator': 'grpo', 'num_samples_per_prompt': 4, 'eps_clip_high': 0.28, 'loss_aggregation': 'token', 'kl_coef': 0.0,
             'dynamic_sampling_rounds': 2, 'overlong_buffer': 3},
    'gspo': {'advantage_estimator': 'grpo', 'num_samples_per_prompt': 4, 'policy_loss': 'gspo', 'eps_clip': 3e-4, 'eps_clip_high': 4e-4},
    'dr_grpo': {'advantage_estimator': 'dr_grpo', 'num_samples_per_prompt': 4, 'kl_coef': 0.0},
    'rloo': {'advantage_estimator': 'rloo', 'num_samples_per_prompt': 4},
    'reinforce++': {'advantage_estimator': 'reinforce++'},
    'reinforce++_baseline': {'advantage_estimator': 'reinforce++_baseline', 'num_samples_per_prompt': 4},
    'a2c': {'advantage_estimator': 'a2c', 'policy_loss': 'reinforce'},
}  # fmt: skip


@pytest.mark.parametrize('name', METHODS)
def test_every_method_learns(name):
    trainer = make(lr=1e-2, **({'max_epochs': 2} | METHODS[name]))
    trainer.fit(PROMPTS, num_episodes=1, max_timesteps=14, update_timesteps=1)
    scores = [p['rollout/score_mean'] for p in trainer.log.phases]
    assert sum(scores[-3:]) / 3 > scores[0] + 0.5, scores
    assert trainer.critic is None or name == 'a2c'


def test_ranks_do_not_enter():
    settings = METHODS['dapo'] | {'kl_in': 'loss', 'kl_coef': 0.05, 'max_tokens_per_batch': 64}
    alone = make(**settings)
    alone.fit(PROMPTS, 1, 2, 1)
    for phases in run_distributed(two_ranks, 2, settings):
        for got, want in zip(phases, alone.log.phases, strict=True):
            assert got.keys() == want.keys()
            assert all(got[k] == pytest.approx(want[k], rel=2e-3, abs=2e-5) for k in want), [(k, got[k], want[k]) for k in want]


def two_ranks(settings: dict[str, Any]) -> list[dict[str, float]]:
    with DDPStrategy(seed=3, device='cpu') as strategy:
        trainer = make(strategy, **settings)
        trainer.fit(PROMPTS, 1, 2, 1)
        return trainer.log.phases


class Rare:
    """Scores differ within a group only for every third prompt that is drawn."""

    def score(self, samples: list[Any], strategy: Any) -> list[float]:
        return [float(s.index % 4) if s.group % 3 == 0 else 1.0 for s in samples]


DYNAMIC = {'advantage_estimator': 'grpo', 'num_samples_per_prompt': 4, 'kl_coef': 0.0}


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


def test_long_responses_cost_and_may_be_left_out():
    trainer = make(overlong_buffer=4, kl_coef=0.0)
    trainer.fit(PROMPTS, 1, 1, 1)
    for e in trainer.log.experiences[0]:
        want = e.score - min(max((e.num_actions - 4) / 4, 0.0), 1.0)
        assert float(e.rewards.sum()) == pytest.approx(want, abs=1e-6)
    filtered = make(overlong_filter=True)
    filtered.fit(PROMPTS, 1, 1, 1)
    cut = [not e.ended for e in filtered.log.experiences[0]]
    assert 0 < sum(cut)
    assert [not bool(e.response_mask.any()) for e in filtered.log.experiences[0]] == cut
    assert filtered.log.phases[0]['rollout/filtered_share'] == sum(cut) / len(cut)


def test_when_every_response_was_too_long_nothing_is_learned():
    trainer = make(overlong_filter=True, max_new_tokens=1, eos_token_id=[])
    before = [p.clone() for p in trainer.actor.parameters()]
    trainer.fit(PROMPTS, 1, 1, 1)
    phase = trainer.log.phases[0]
    assert phase['rollout/filtered_share'] == 1.0
    assert phase['ppo/skipped_batches'] == 1.0
    assert all(math.isfinite(v) for v in phase.values()), phase
    assert all(map(torch.equal, before, trainer.actor.parameters()))  # not even by weight decay


def test_filtered_responses_do_not_thin_the_kl():
    generator = torch.Generator().manual_seed(2)
    records = [experience(i, generator) for i in range(4)]
    alone = rollout_metrics(records[:2], 0.1)['rollout/kl_mean']
    for r in records[2:]:
        r.response_mask = torch.zeros_like(r.response_mask)
    assert rollout_metrics(records, 0.1)['rollout/kl_mean'] == alone
    by_hand = [
        sum(float(r.old_logprobs[t] - r.ref_logprobs[t]) for t in range(r.num_actions) if r.response_mask[t]) for r in records[:2]
    ]
    assert alone == pytest.approx(sum(by_hand) / 2, abs=1e-6)
    assert alone != pytest.approx(sum(by_hand) / 4, abs=1e-6)


def test_gspo_measures_the_ratio_that_it_clips():
    generator = torch.Generator().manual_seed(1)
    records = [experience(i, generator) for i in range(6)]
    actor = GPTActor(config=tiny_config('gpt2', vocab_size=16, positions=32)).eval()
    found = {}
    for name in ('gspo', 'ppo'):
        config = PPOConfig(policy_loss=name, eps_clip=0.1, loss_aggregation='sequence')
        loss, stats = PPOLoss(actor, None, config, 1.0, MAX_NEW), BatchStats()
        loss.begin(records)
        loss.actor(collate_or_filler(records), records, stats)
        found[name] = stats.reduced(NaiveStrategy(device='cpu'))
    ratios = []
    for r in records:
        with torch.no_grad():
            diff = (actor(collate_or_filler([r])).logprobs - r.old_logprobs).double()[r.response_mask].tolist()
        ratios += [math.exp(sum(diff) / len(diff))] * len(diff)
    want = {'ratio_mean': sum(ratios) / len(ratios), 'ratio_max': max(ratios), 'ratio_min': min(ratios),
            'clip_fraction': sum(abs(x - 1) > 0.1 for x in ratios) / len(ratios)}  # fmt: skip
    for key, value in want.items():
        assert found['gspo'][key] == pytest.approx(value, rel=1e-4)
    assert found['ppo']['ratio_max'] != pytest.approx(want['ratio_max'], rel=1e-3)


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


QUERIES = [torch.tensor([3, 4])] * 2 + [torch.tensor([5])] * 2
RESPONSES = [torch.tensor([5, 6, 7])] * 4


def test_step_compares_responses_that_follow_one_another():
    trainer = make(advantage_estimator='dr_grpo', num_samples_per_prompt=2, kl_coef=0.0)
    trainer.step(QUERIES, RESPONSES, [0.0, 1.0, 5.0, 9.0])
    assert [e.advantages[0].item() for e in trainer.last_experiences] == [-0.5, 0.5, -2.0, 2.0]
    assert len({e.index for e in trainer.last_experiences}) == 4
    with pytest.raises(ValueError, match='queries 0 to 1 are one group of dr_grpo and must be equal; query 1 is not'):
        trainer.step(QUERIES[::2] * 2, RESPONSES, [0.0] * 4)
    with pytest.raises(ValueError, match='3 responses do not divide'):
        trainer.step(QUERIES[:3], RESPONSES[:3], [0.0] * 3)


@pytest.mark.parametrize(('settings', 'sentence'), [
    ({'tis_cap': 2.0}, 'which step is not given'), (DYNAMIC | {'dynamic_sampling_rounds': 1}, 'draws further prompts'),
])  # fmt: skip
def test_step_refuses_what_only_fit_can_do(settings, sentence):
    trainer = make(**settings)
    with pytest.raises(ValueError, match=sentence):
        trainer.step(QUERIES, RESPONSES, [0.0] * 4)
    assert trainer.phase == 0


def test_step_leaves_out_long_responses_too():
    trainer = make(overlong_filter=True)
    end = trainer.sampling.eos_token_ids[0]
    stats = trainer.step(QUERIES, [torch.tensor([5, end])] + RESPONSES[1:], [1.0] * 4)
    assert stats['rollout/filtered_share'] == 0.75


class Off(LocalEngine):
    """An engine whose log-probs are not those of the trainer."""

    def generate(self, *args: Any, **kw: Any) -> Any:
        samples = super().generate(*args, **kw)
        for s in samples:
            s.logprobs = s.logprobs - 0.5
        return samples


def test_truncated_importance_sampling_weighs_another_engine():
    trainer = make(engine=Off(), tis_cap=1.3)
    trainer.fit(PROMPTS, 1, 1, 1)
    assert trainer.log.phases[0]['ppo/tis_weight'] == pytest.approx(1.3)  # exp(0.5) is cut
    same = make(tis_cap=1.3)
    same.fit(PROMPTS, 1, 1, 1)
    assert same.log.phases[0]['ppo/tis_weight'] == pytest.approx(1.0, abs=1e-4)


def test_a_kl_in_the_loss_is_not_in_the_reward():
    trainer = make(kl_in='loss', kl_coef=0.5)
    trainer.fit(PROMPTS, 1, 3, 1)
    for experiences in trainer.log.experiences:
        assert all(float(e.rewards.sum()) == pytest.approx(e.score, abs=1e-5) for e in experiences)
    assert trainer.log.phases[-1]['ppo/kl_loss'] > 0
    assert trainer.log.phases[-1]['rollout/non_score_reward_mean'] == 0.0
    near, far = make(kl_in='loss', kl_coef=5.0, lr=1e-2), make(kl_coef=0.0, lr=1e-2)
    near.fit(PROMPTS, 1, 10, 1)
    far.fit(PROMPTS, 1, 10, 1)
    assert near.log.phases[-1]['rollout/kl_mean'] < 0.7 * far.log.phases[-1]['rollout/kl_mean']


@pytest.mark.parametrize(('settings', 'sentence'), [
    ({'policy_loss': 'gspo', 'loss_aggregation': 'token'}, "policy_loss='gspo' has one ratio per sequence"),
    ({'policy_loss': 'reinforce', 'dual_clip': 3.0}, "policy_loss='reinforce' has no ratio to clip"),
    ({'policy_loss': 'trpo'}, "policy_loss='trpo' is not known; choose one of"),
    ({'loss_aggregation': 'mean'}, "loss_aggregation='mean' is not known"),
    ({'kl_in': 'loss', 'kl_kind': 'full'}, 'set kl_loss_kind'),
    ({'dynamic_sampling_rounds': 2}, "advantage_estimator='gae' has none"),
    ({'dual_clip': 0.5}, 'dual_clip=0.5 must be above 1'),
    ({'overlong_filter': True, 'missing_eos_score': -1.0}, 'missing_eos_score would do nothing'),
    ({'overlong_buffer': 9}, 'overlong_buffer=9 is a part of max_new_tokens=8'),
    ({'loss_aggregation': 'sequence_sum', 'max_length': 20, 'max_new_tokens': None}, 'divides by max_new_tokens'),
    ({'tis_cap': 0.0}, 'tis_cap=0.0 must be positive'),
    ({'tis_cap': 2.0, 'recompute_logprobs': False}, 'recompute_logprobs=False does not fit it'),
])  # fmt: skip
def test_what_does_not_go_together(settings, sentence):
    with pytest.raises(ValueError, match=sentence):
        make(**settings)


# ---------------------------------------------------------------------- NLPO


def nlpo(strategy: Any = None, more: Any = (), **kw: Any) -> Any:
    strategy = strategy or NaiveStrategy(seed=3, device='cpu')
    torch.manual_seed(3)
    actor = GPTActor(config=tiny_config('gpt2', positions=48))
    with torch.no_grad():
        actor.model.lm_head.weight.mul_(12.0)  # so that the set of likely tokens is small
    mask, initial = deepcopy(actor), deepcopy(actor)
    actor, optim = strategy.prepare((actor, torch.optim.AdamW(actor.parameters(), lr=1e-3, eps=1e-5)))
    log = Log()
    sizes = {'experience_batch_size': 4, 'train_batch_size': 4, 'max_new_tokens': 6}
    settings = sizes | {'advantage_estimator': 'reinforce++', 'nlpo_top_p': 0.6}
    trainer = PPOTrainer(strategy, actor, None, vowels, strategy.prepare(initial), optim, tokenizer=char_tokenizer(),
                         callbacks=[log, *more], mask_model=strategy.prepare(mask), **(settings | kw))  # fmt: skip
    trainer.log = log
    return trainer


def test_nlpo_is_not_driven_by_hand():
    with pytest.raises(ValueError, match='generate and step do not know: use fit'):
        nlpo().generate(QUERIES)
    with pytest.raises(ValueError, match='generate and step do not know: use fit'):
        nlpo().step(QUERIES, RESPONSES, [0.0] * 4)


def mask_by_hand(logits: torch.Tensor, top_p: float) -> list[int]:
    probs = logits.double().softmax(-1).tolist()
    kept, mass = [], 0.0
    for token in sorted(range(len(probs)), key=lambda v: -probs[v]):
        kept.append(token)
        mass += probs[token]
        if mass >= top_p:
            break
    return kept


def test_nlpo_samples_and_learns_the_masked_policy():
    trainer = nlpo(nlpo_update_interval=100, max_epochs=1)
    policy, mask = (trainer.strategy.unwrap(m).model for m in (trainer.actor, trainer.mask_model))
    trainer.fit(PROMPTS, 1, 1, 1)
    assert trainer.log.phases[0]['ppo/first_ratio_error'] < 1e-4  # what was drawn is what is learned
    before = nlpo()
    weights = trainer.strategy.unwrap(before.actor).model
    inside = 0
    for e in trainer.log.experiences[0]:
        ids = torch.cat([e.prompt_ids, e.response_ids])
        with torch.no_grad():
            logits, masks = weights(ids[None]).logits[0].double(), mask(ids[None]).logits[0]
        for t, token in enumerate(e.response_ids.tolist()):
            at = len(e.prompt_ids) - 1 + t
            kept = mask_by_hand(masks[at], 0.6)
            assert token in kept
            want = float(logits[at, token] - logits[at, kept].logsumexp(-1))
            assert float(e.old_logprobs[t]) == pytest.approx(want, abs=1e-4)
            inside += len(kept)
    assert inside < 0.5 * len(trainer.tokenizer) * sum(e.num_actions for e in trainer.log.experiences[0])
    assert not all(torch.equal(a, b) for a, b in zip(policy.parameters(), mask.parameters(), strict=True))


def test_nlpo_takes_over_every_so_many_phases():
    trainer = nlpo(nlpo_update_interval=2)
    first = [p.clone() for p in trainer.mask_model.parameters()]
    same = []

    class Watch(ProgressBar):
        def on_phase_end(self, trainer: Any, step: int, metrics: Any) -> None:
            now = list(trainer.mask_model.parameters())
            same.append((all(map(torch.equal, now, first)), all(map(torch.equal, now, trainer.actor.parameters()))))

    trainer.callbacks.callbacks.append(Watch(enabled=False))
    trainer.fit(PROMPTS, 1, 3, 1)
    assert same == [(True, False), (False, True), (False, False)]


def test_nlpo_resumes_to_the_bit(tmp_path):
    whole = nlpo(run_dir=tmp_path, more=[SaveCheckpoint(interval=1, keep_last=9)], nlpo_update_interval=2)
    whole.fit(PROMPTS, 1, 4, 1)
    rest = nlpo(nlpo_update_interval=2)
    rest.set_prompts(PROMPTS)
    assert rest.load_checkpoint(tmp_path / 'checkpoints' / 'step-00000001')
    rest.fit(PROMPTS, 1, 4, 1)
    assert rest.log.phases == whole.log.phases[1:]


def test_nlpo_with_everything_likely_is_the_plain_policy():
    masked, plain = nlpo(nlpo_top_p=1.0), None
    masked.fit(PROMPTS, 1, 2, 1)
    plain = nlpo(nlpo_top_p=1.0, nlpo_update_interval=7)
    plain.fit(PROMPTS, 1, 2, 1)
    for a, b in zip(masked.log.phases, plain.log.phases, strict=True):  # whatever the mask policy is
        assert all(a[k] == pytest.approx(b[k], rel=1e-4, abs=1e-5) for k in b)


def two_nlpo() -> list[dict[str, float]]:
    with DDPStrategy(seed=3, device='cpu') as strategy:
        trainer = nlpo(strategy)
        trainer.fit(PROMPTS, 1, 2, 1)
        return trainer.log.phases


def test_nlpo_on_two_ranks():
    alone = nlpo()
    alone.fit(PROMPTS, 1, 2, 1)
    for phases in run_distributed(two_nlpo, 2):
        for got, want in zip(phases, alone.log.phases, strict=True):
            assert all(got[k] == pytest.approx(want[k], rel=2e-3, abs=2e-5) for k in want)


@pytest.mark.parametrize(('settings', 'sentence'), [
    ({'nlpo_top_p': None}, 'NLPO needs both'), ({'nlpo_top_p': 1.5}, r'nlpo_top_p=1.5 must lie in \(0, 1\]'),
    ({'recompute_logprobs': True}, 'leave recompute_logprobs out'),
    ({'strategy': NaiveStrategy(precision='bf16', device='cpu')}, 'use precision=fp32'),
    ({'engine': HFEngine()}, 'HFEngine would ignore the mask'), ({'tis_cap': 2.0}, 'leave tis_cap out'),
])  # fmt: skip
def test_what_nlpo_needs(settings, sentence):
    with pytest.raises(ValueError, match=sentence):
        nlpo(**settings)
