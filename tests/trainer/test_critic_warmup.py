"""A critic that learns apart: passes of its own, and a warm-up in which the actor waits."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
from layouts import SMALL_CHUNKS
from tiny_runs import check_resume, fit, outcome, ppo

from chatgpt.batching import collate
from chatgpt.nn.records import is_here
from chatgpt.strategies import ColossalAIStrategy, DDPStrategy, FSDPStrategy, NaiveStrategy
from chatgpt.testing.fakes import tiny_config
from chatgpt.testing.processes import run_distributed
from chatgpt.trainer import PPOConfig
from chatgpt.trainer.callbacks import SaveCheckpoint
from chatgpt.trainer.critic import pieces_of, read_targets
from chatgpt.trainer.schedule import FitPlan

WARM = {'critic_warmup_phases': 2, 'critic_epochs': 3, 'critic_train_batch_size': 2}
KINDS: dict[str, dict[str, Any]] = {
    'separate': WARM,
    'lora': WARM | {'lora_rank': 2},
    'hydra': WARM | {'num_layers_unfrozen': 1},
    'shared': {'critic_warmup_phases': 2, 'value_head': True},
    'shared lora': {'critic_warmup_phases': 2, 'value_head': True, 'lora_rank': 2},
    'shared hydra': {'critic_warmup_phases': 2, 'value_head': True, 'num_layers_unfrozen': 1},
}


def state(trainer: Any, name: str = 'actor') -> dict[str, torch.Tensor]:
    """Returns copies of a model's weights and of its optimizer's states."""
    found = {n: t.clone() for n, t in trainer.strategy.full_state_dict(trainer.models()[name]).items()}
    if name in trainer.optimizers():
        _, pieces = trainer.strategy.optimizer_state(trainer.optimizers()[name])
        found |= {f'optimizer {p.name} {p.start}': p.data.clone() for p in pieces}
    return found


def differing(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> set[str]:
    return {n for n in a.keys() | b.keys() if n not in a or n not in b or not torch.equal(a[n], b[n])}


# ---------------------------------------------------------------------- the warm-up


@pytest.mark.parametrize('kind', KINDS)
def test_the_actor_waits_and_then_learns(kind):
    trainer = ppo(max_epochs=2, **KINDS[kind])
    shared = 'shared' in kind
    before, critic = state(trainer), None if shared else state(trainer, 'critic')
    fit(trainer, 2)
    changed = differing(before, state(trainer))
    if shared:
        assert changed and all('value_head' in name for name in changed)
    else:
        assert not changed and differing(critic, state(trainer, 'critic'))
    first, second = trainer.log.phases
    assert first['ppo/critic_warmup'] == 1 and 'ppo/policy_loss' not in first and 'ppo/lr' not in first
    assert first['ppo/num_updates'] == second['ppo/num_updates'] == trainer.num_updates == 0
    assert [first['rollout/kl_mean'], second['rollout/kl_mean']] == pytest.approx([0, 0], abs=1e-5)
    # four rollouts in batches of two, three passes; then eight. With a shared trunk batches of four, two passes.
    assert first['ppo/num_critic_updates'] == (2 if shared else 6)
    assert second['ppo/num_critic_updates'] == (6 if shared else 18)
    fit(trainer, 1)
    last = trainer.log.phases[-1]
    assert last['ppo/critic_warmup'] == 0 and last['ppo/num_updates'] == 2 and 'ppo/policy_loss' in last
    assert last['ppo/num_critic_updates'] == (6 if shared else 24), 'the kept rollouts are dropped'
    assert any('value_head' not in name for name in differing(before, state(trainer)))
    assert not trainer.course.kept


def test_the_critic_learns_whole_returns_of_all_phases_so_far_without_a_clip():
    """Compares the second phase with a loop over the rollouts of both: AdamW on ½ (V − R)², one batch a pass."""
    settings = {'critic_warmup_phases': 3, 'critic_epochs': 2, 'critic_train_batch_size': 100, 'value_clip': 1e-3}
    trainer = ppo(lam=0.3, gamma=0.9, kl_coef=0.5, lr=3e-3, **settings)
    fit(trainer, 1)
    mine, theirs = deepcopy(trainer.critic), trainer.critic
    optimizer = torch.optim.AdamW(mine.parameters(), lr=3e-3, eps=1e-5, weight_decay=0.01)
    optimizer.load_state_dict(deepcopy(trainer.critic_optim.state_dict()))
    fit(trainer, 1)
    rollouts = [e for phase in trainer.log.experiences for e in phase]
    assert len(rollouts) == 8
    targets = []
    for e in rollouts:
        returns, rest = [], 0.0
        for reward in reversed(e.rewards.tolist()):
            rest = reward + 0.9 * rest
            returns.append(rest)
        targets += reversed(returns)
        assert e.returns.tolist() == pytest.approx(targets[-len(returns) :], abs=1e-6)
    batch = collate(rollouts)
    for _ in range(2):
        loss = (0.5 * (mine(batch) - torch.tensor(targets)).square()).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(mine.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    for ours, wanted in zip(theirs.parameters(), mine.parameters(), strict=True):
        torch.testing.assert_close(ours, wanted, rtol=1e-4, atol=2e-5)


def test_an_adaptive_kl_coefficient_waits_too():
    trainer = fit(ppo(kl_target=1.0, kl_coef=0.2, critic_warmup_phases=2), 2)
    assert trainer.kl_controller.value == 0.2
    assert fit(trainer, 1).kl_controller.value < 0.2


# ---------------------------------------------------------------------- resumes


@pytest.mark.parametrize('kind', KINDS)
def test_a_resume_in_the_warm_up_continues_to_the_bit(tmp_path, kind):
    settings = KINDS[kind] | {'critic_warmup_phases': 3, 'lr_schedule': 'linear', 'warmup_steps': 2}
    run = check_resume(lambda **more: ppo(**settings | more), tmp_path, 2, lambda trainer: fit(trainer, 4))
    assert run.log.phases[3]['ppo/num_updates'] > 0


def resumed(strategy: Any, folder: Any, kind: str, **more: Any) -> dict[str, Any]:
    """Runs three phases, two of them the warm-up, and again from a checkpoint after the first; returns the outcome."""
    whole, rest = ppo(strategy, **KINDS[kind], **more), ppo(strategy, **KINDS[kind], **more)
    before = state(whole)
    fit(whole, 1).save_checkpoint(folder)
    fit(whole, 1)
    assert all('value_head' in name for name in differing(before, state(whole)))
    fit(whole, 1)
    assert rest.load_checkpoint(folder)
    fit(rest, 3)
    assert rest.log.phases == whole.log.phases[1:]
    for name in whole.models():
        assert not differing(state(whole, name), state(rest, name)), name
    return outcome(strategy, whole)


def on_ranks(cls: Any, folder: Any, kind: str, options: dict[str, Any], family: str = 'gpt2') -> dict[str, Any]:
    with cls(seed=3, device='cpu', **options) as strategy:
        return resumed(strategy, folder, kind, config=tiny_config(family, heads=4, positions=48))


@pytest.mark.parametrize('cls', [DDPStrategy, FSDPStrategy])
@pytest.mark.parametrize('kind', ['separate', 'shared', 'shared hydra'])
def test_two_ranks_warm_up_as_one_does_and_resume(cls, kind, tmp_path):
    with NaiveStrategy(seed=3, device='cpu') as strategy:
        want = resumed(strategy, tmp_path / 'one', kind, config=tiny_config('gpt2', heads=4, positions=48))
    got, _ = run_distributed(on_ranks, 2, cls, tmp_path / 'two', kind, {})
    assert got['samples'] == want['samples']
    for a, b in zip(got['metrics'], want['metrics'], strict=True):
        assert a == {name: pytest.approx(value, rel=1e-3, abs=1e-4) for name, value in b.items()}
    for model, tensors in want['weights'].items():
        for name, tensor in tensors.items():
            assert float((tensor - got['weights'][model][name]).abs().max()) < 2e-3, name


@pytest.mark.parametrize(('cls', 'kind'), [(DDPStrategy, 'separate'), (FSDPStrategy, 'shared')])
def test_an_exact_run_has_the_same_bits_on_two_ranks(cls, kind, tmp_path):
    numerics = {'reproducible': 'exact', 'precision': 'fp32'}
    with NaiveStrategy(seed=3, device='cpu', **numerics) as strategy:
        want = resumed(strategy, tmp_path / 'one', kind, config=tiny_config('gpt2', heads=4, positions=48))
    got, _ = run_distributed(on_ranks, 2, cls, tmp_path / 'two', kind, numerics)
    assert got['metrics'] == want['metrics']
    assert all(not differing(want['weights'][model], got['weights'][model]) for model in want['weights'])


@pytest.mark.system
@pytest.mark.parametrize(
    ('cls', 'kind', 'options'),
    [
        (ColossalAIStrategy, 'separate', {'stage': 2, 'precision': 'fp32'}),
        (ColossalAIStrategy, 'shared', {'stage': 2, 'precision': 'fp32'}),
        (ColossalAIStrategy, 'separate', {'stage': 3, 'precision': 'bf16'} | SMALL_CHUNKS),
        (FSDPStrategy, 'separate', {'tensor_parallel': 2, 'precision': 'fp32'}),
        (FSDPStrategy, 'shared', {'tensor_parallel': 2, 'precision': 'fp32'}),
    ],
    ids=['zero2', 'zero2 shared', 'gemini', 'tensor parallel', 'tensor parallel shared'],
)
def test_other_strategies_wait_and_resume(cls, kind, options, tmp_path):
    family = 'llama' if 'tensor_parallel' in options else 'gpt2'
    first, *_ = run_distributed(on_ranks, 2, cls, tmp_path / 'two', kind, options, family)
    assert first['metrics'][2]['ppo/num_updates'] > 0


class Rank:
    def __init__(self, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size


class Pieces:
    """A reader of pieces, each element of which is written once."""

    def __init__(self, pieces: list[Any]) -> None:
        self.found: dict[str, Any] = {}
        for piece in sorted(pieces, key=lambda p: p.start):
            before = self.found.get(piece.name, piece.data[:0])
            assert piece.start == len(before) and piece.stop == piece.start + len(piece.data)
            self.found[piece.name] = torch.cat([before, piece.data])
            self.found.setdefault(f'shape of {piece.name}', piece.shape)
            assert self.found[f'shape of {piece.name}'] == piece.shape

    def shape(self, name: str) -> tuple[int, ...]:
        assert self.found[name].shape == self.found[f'shape of {name}']
        return tuple(self.found[name].shape)

    def read(self, name: str, start: int, stop: int) -> Any:
        return self.found[name][start:stop]


def test_rollouts_survive_a_checkpoint_to_the_bit():
    trainer = fit(ppo(critic_warmup_phases=2), 1)
    kept = trainer.course.kept
    assert len(kept) == 4
    for ours in kept:  # as on three ranks: each writes its own
        ours.rank = ours.index % 3
    pieces = [piece for rank in range(3) for piece in pieces_of(kept, Rank(rank, 3))]
    whole = Pieces(pieces)
    for world_size in (1, 2):
        for rank in range(world_size):
            again = read_targets(whole, Rank(rank, world_size))
            assert [is_here(t) for t in again] == [i * world_size // 4 == rank for i in range(4)]
            for a, b in zip(kept, again, strict=True):
                assert a.index == b.index and torch.equal(a.response_mask, b.response_mask)
                for name in ('prompt_ids', 'response_ids', 'values', 'returns'):
                    mine, read = getattr(a, name), getattr(b, name)
                    assert mine.dtype == read.dtype and mine.shape == read.shape
                    assert not is_here(b) or torch.equal(mine, read), name


def test_a_resume_takes_up_passes_of_its_own(tmp_path):
    """Before the change of settings the critic has learned from the actor's train batches."""
    fit(ppo(run_dir=tmp_path, callbacks=[SaveCheckpoint(interval=1)]), 2)
    trainer = ppo(critic_epochs=3)
    assert trainer.load_checkpoint(tmp_path / 'checkpoints' / 'step-00000002')
    with pytest.warns(UserWarning, match='config.critic_epochs None → 3'):
        fit(trainer, 3)
    assert trainer.log.phases[-1]['ppo/num_critic_updates'] == 2 + 3


# ---------------------------------------------------------------------- passes of its own


def test_passes_apart_of_equal_size_learn_what_passes_together_learn():
    together = fit(ppo(max_epochs=2, train_batch_size=2), 3)
    apart = fit(ppo(max_epochs=2, train_batch_size=2, critic_epochs=2), 3)
    for name in ('actor', 'critic'):
        assert not differing(state(together, name), state(apart, name))
    more = fit(ppo(max_epochs=2, train_batch_size=2, critic_epochs=4), 3)
    assert not differing(state(together), state(fit(ppo(max_epochs=2, train_batch_size=2, critic_epochs=2), 3)))
    assert differing(state(together, 'critic'), state(more, 'critic'))


def test_learning_rates_follow_the_steps_of_each_model():
    """Linear decay over 4 steps of the actor (one of each of the last four phases) and over the critic's own."""
    settings = {'critic_warmup_phases': 2, 'critic_epochs': 1, 'critic_train_batch_size': 2, 'lr_schedule': 'linear'}
    phases = fit(ppo(lr=1.0e-3, **settings), 6).log.phases
    assert [p.get('ppo/lr') for p in phases] == [None, None, *(pytest.approx(1e-3 * k / 4) for k in (4, 3, 2, 1))]
    steps = [2, 4, 2, 2, 2, 2]  # batches of two out of four rollouts, in the second phase out of eight
    done = [sum(steps[:i]) for i in range(6)]
    rates = [sum(1e-3 * (1 - (d + k) / 14) for k in range(n)) / n for d, n in zip(done, steps, strict=True)]
    assert [p['ppo/critic_lr'] for p in phases] == pytest.approx(rates)


def test_a_plan_counts_the_steps_of_a_warm_up():
    plan = FitPlan(5, 1)
    config = PPOConfig(max_epochs=3, critic_warmup_phases=2, critic_epochs=5, critic_train_batch_size=4)
    assert plan.num_updates(config) == 3 * 3 and plan.num_updates(config, first_phase=1) == 4 * 3
    assert plan.num_critic_updates(config) == 5 * (2 + 4 + 2 + 2 + 2)
    assert plan.num_critic_updates(config, first_phase=2) == 5 * 5 * 2
    assert [w for w in FitPlan(2, 1).warnings(config) if w and 'the actor does not learn' in w]
    assert not [w for w in FitPlan(2, 1).warnings(config, 2) if w]


def test_what_a_value_head_on_the_actor_has_not():
    for name in ('critic_epochs', 'critic_train_batch_size'):
        with pytest.raises(ValueError, match=f'{name}=2 is of a critic with an optimizer of its own'):
            ppo(value_head=True, **{name: 2})
    with pytest.raises(
        ValueError, match="critic_loss='categorical' does not fit the critic, which has a head with one"
    ):
        ppo(critic_loss='categorical')
