"""Frozen models offloaded to host memory: when their weights are on the device, and that no number changes."""

from __future__ import annotations

from contextlib import contextmanager
from copy import deepcopy

import pytest
import torch
from torch.optim import AdamW

from chatgpt.nn import Actor, Critic, RewardModel
from chatgpt.strategies import FSDPStrategy, NaiveStrategy
from chatgpt.strategies.copies import OffloadedWeights
from chatgpt.testing import tiny_causal_lm
from chatgpt.testing.processes import run_distributed
from chatgpt.trainer import PPOTrainer


class FakeDevice(OffloadedWeights):
    """Offloaded weights with clones in place of device memory."""

    def on_device(self, copy):
        return copy.clone()


def test_weights_come_and_go():
    module = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3)).requires_grad_(False)
    before = {k: v.clone() for k, v in module.state_dict().items()}
    parameters = list(module.parameters())
    idle = FakeDevice(module, torch.device('cpu'))
    on_host = [t.data_ptr() for t in module.state_dict().values()]
    with idle:
        assert not set(on_host) & {t.data_ptr() for t in module.state_dict().values()}
        assert all(a is b for a, b in zip(module.parameters(), parameters, strict=True))
        assert all(torch.equal(before[k], v) for k, v in module.state_dict().items())
    assert [t.data_ptr() for t in module.state_dict().values()] == on_host
    assert all(torch.equal(before[k], v) for k, v in module.state_dict().items())


class Poisoned(NaiveStrategy):
    """A strategy in which offloaded models hold NaN, and which records when models are on the device."""

    def __init__(self) -> None:
        super().__init__(seed=1)
        self.events: list[tuple[str, str]] = []
        self.names: dict[int, str] = {}

    def offload(self, model):
        class Away(FakeDevice):
            def __exit__(self, *_):
                for tensor in self.tensors:
                    tensor.data = torch.full_like(tensor, float('nan'))

        self.names[id(model)] = 'initial' if isinstance(model, Actor) else 'reward'
        module = self.unwrap(model)
        self._offloaded_models.setdefault(id(module), Away(module, torch.device('cpu')))

    @contextmanager
    def onload(self, model):
        name = self.names.get(id(model), 'other')
        with super().onload(model):
            self.events.append(('come', name))
            yield
            self.events.append(('leave', name))
        assert name == 'other' or all(p.isnan().all() for p in self.unwrap(model).parameters())

    def optimizer_step(self, optimizer, max_norm=None):
        self.events.append(('step', ''))
        return super().optimizer_step(optimizer, max_norm)


def run(strategy, offload):
    torch.manual_seed(0)
    actor, critic = Actor(tiny_causal_lm('gpt2')), Critic(tiny_causal_lm('gpt2'))
    initial, reward = deepcopy(actor), RewardModel(tiny_causal_lm('llama'))
    (actor, actor_optim), (critic, critic_optim), reward, initial = strategy.prepare(
        (actor, AdamW(actor.parameters(), lr=1e-2)), (critic, AdamW(critic.parameters(), lr=1e-2)), reward, initial
    )
    trainer = PPOTrainer(
        strategy,
        actor,
        critic,
        [(0.5, reward), (1.0, lambda prompts, responses: [0.0] * len(prompts))],
        initial,
        actor_optim,
        critic_optim,
        experience_batch_size=2,
        train_batch_size=2,
        max_new_tokens=3,
        offload=offload,
    )
    trainer.fit([torch.tensor([5, 6, 7]), torch.tensor([9, 4])], max_timesteps=2, update_timesteps=1)
    return {k: v.clone() for k, v in actor.state_dict().items()}


def test_reward_and_initial_model_are_there_only_while_scoring_and_no_number_changes():
    strategy = Poisoned()
    one, other = run(strategy, 'idle'), run(NaiveStrategy(seed=1), 'none')
    assert all(torch.equal(one[k], other[k]) for k in one)
    assert set(strategy.names.values()) == {'initial', 'reward'}
    scoring = [('come', 'reward'), ('leave', 'reward'), ('come', 'initial'), ('leave', 'initial')]
    assert strategy.events == [*scoring, ('step', ''), ('step', '')] * 2


def refusal() -> None:
    message = 'with cpu_offload=True frozen models wait in host memory already; leave one of them out'
    with FSDPStrategy(cpu_offload=True) as strategy, pytest.raises(ValueError, match=message):
        strategy.offload(strategy.prepare(torch.nn.Linear(2, 2)))


def test_a_strategy_that_places_weights_itself_refuses():
    run_distributed(refusal, 1)


def test_a_trained_model_is_refused():
    strategy, model = NaiveStrategy(), torch.nn.Linear(2, 2)
    strategy.prepare((model, AdamW(model.parameters())))
    with pytest.raises(ValueError, match='offload: this model is trained, and only frozen weights can wait'):
        strategy.offload(model)
    strategy.offload(strategy.prepare(deepcopy(model)))


@pytest.mark.gpu
def test_on_cuda_the_memory_is_free_while_idle():
    strategy = NaiveStrategy()
    model = strategy.prepare(torch.nn.Linear(1024, 1024))
    held = torch.cuda.memory_allocated()
    strategy.offload(model)
    assert held - torch.cuda.memory_allocated() >= 4 * 1024 * 1024
    with strategy.onload(model):
        assert model.weight.is_cuda and torch.cuda.memory_allocated() >= held
    assert not model.weight.is_cuda


def shards_on_cuda() -> None:
    with FSDPStrategy() as strategy:
        model = strategy.prepare(torch.nn.Linear(64, 64))
        strategy.offload(model)
        assert not model.weight.is_cuda
        with strategy.onload(model):
            assert model.weight.is_cuda and torch.isfinite(model(torch.ones(1, 64, device='cuda'))).all()
        assert not model.weight.is_cuda


@pytest.mark.gpu
def test_shards_on_cuda_come_and_go():
    run_distributed(shards_on_cuda, 1)
