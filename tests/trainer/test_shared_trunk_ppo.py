"""PPO with a critic, a reward model and a reference on one frozen trunk."""

from __future__ import annotations

import weakref
from copy import deepcopy

import pytest
import torch
from cuda_on_cpu import pretend_cuda

from chatgpt.batching import collate
from chatgpt.nn import Actor, Critic, RewardModel, shared
from chatgpt.nn.heads import critic_head
from chatgpt.nn.peft_format import export_peft
from chatgpt.nn.shared import SharedTrunk
from chatgpt.strategies import DDPStrategy, FSDPStrategy, NaiveStrategy
from chatgpt.strategies.checkpoint.layout import CheckpointMismatch
from chatgpt.testing import tiny_causal_lm
from chatgpt.testing.processes import run_distributed
from chatgpt.testing.tiny import tiny_sequences
from chatgpt.trainer import PPOTrainer
from chatgpt.trainer.callbacks import Callback
from chatgpt.types import Prompt


def model():
    return tiny_causal_lm('llama', hidden_size=64)


def roles(kind, quantize=None, dtype=torch.float32):
    """Actor, critic and reward model with equal adapters; on one trunk, or each with a base of its own."""
    head = critic_head(64)
    with torch.no_grad():
        head.weight.copy_(torch.linspace(-0.3, 0.3, 64))
    torch.manual_seed(3)
    if kind == 'separate':
        return (Actor(model(), 4), Critic(model(), deepcopy(head), 4), RewardModel(model(), deepcopy(head), 4))
    trunk = SharedTrunk(model(), quantize=quantize, dtype=dtype)
    return (
        trunk.actor(4),
        trunk.critic(4, value_head=deepcopy(head)),
        trunk.reward_model(4, value_head=deepcopy(head)),
    )


def train(strategy, made, phases=3, run_dir=None):
    rows = []

    class Keep(Callback):
        def on_phase_end(self, trainer, phase, metrics):
            rows.append({k: v for k, v in metrics.items() if not k.startswith('perf/')})

    actor, critic, reward_model = made
    (actor, actor_optim), (critic, critic_optim), reward_model = strategy.prepare(
        *((m, torch.optim.AdamW([p for p in m.parameters() if p.requires_grad], lr=1e-2)) for m in (actor, critic)),
        reward_model,
    )
    trainer = PPOTrainer(
        strategy,
        actor,
        critic,
        reward_model,
        None,
        actor_optim,
        critic_optim,
        callbacks=[Keep()],
        experience_batch_size=4,
        train_batch_size=4,
        kl_coef=0.1,
        max_new_tokens=6,
        run_dir=run_dir,
    )
    prompts = [Prompt(ids=torch.tensor([i + 3, 2 * i + 1])) for i in range(8)]
    trainer.fit(prompts, max_timesteps=phases, update_timesteps=1)
    return trainer, rows


def test_one_trunk_learns_what_four_models_learn():
    _, separate = train(NaiveStrategy(seed=1), roles('separate'))
    trainer, shared = train(NaiveStrategy(seed=1), roles('shared'))
    assert len(shared) == 3
    for a, b in zip(separate, shared, strict=True):
        assert a.keys() == b.keys()
        for name, value in a.items():
            assert b[name] == pytest.approx(value, rel=2e-4, abs=2e-5), name
    assert shared[-1]['rollout/kl_mean'] != 0, 'the reference is the actor without its adapter'


@pytest.mark.parametrize(('precision', 'dtype'), [('fp32', torch.float32), ('bf16', torch.bfloat16)])
def test_nf4_trains_and_the_base_stays(precision, dtype):
    made = roles('shared', 'nf4', dtype)
    before = {n: b.clone() for n, b in made[0].named_buffers()}
    trainer, rows = train(NaiveStrategy(seed=1, precision=precision), made)
    assert all(torch.equal(before[n], b) for n, b in made[0].named_buffers())
    assert rows[0]['ppo/actor_grad_norm'] > 0 and rows[0]['ppo/critic_grad_norm'] > 0
    assert abs(rows[0]['ppo/first_ratio_error' if 'ppo/first_ratio_error' in rows[0] else 'ppo/ratio_mean']) < 1.1
    assert all(p.dtype == torch.float32 for n, p in made[0].named_parameters() if 'lora' in n)


def test_a_checkpoint_holds_adapters_and_heads(tmp_path):
    strategy = NaiveStrategy(seed=1)
    trainer, _ = train(strategy, roles('shared', 'nf4'))
    strategy.save_model(trainer.actor, tmp_path / 'actor.pt')
    saved = torch.load(tmp_path / 'actor.pt', weights_only=True)
    assert saved and all('lora_' in name for name in saved)
    other = roles('shared', 'nf4')[0]
    NaiveStrategy(seed=2).load_model(other, tmp_path / 'actor.pt')
    batch = collate(tiny_sequences(4))
    assert torch.equal(other(batch).logprobs, trainer.actor(batch).logprobs)
    with pytest.raises(CheckpointMismatch):
        NaiveStrategy(seed=2).load_model(SharedTrunk(model()).actor(2), tmp_path / 'actor.pt')


@pytest.mark.parametrize('family', ['gpt2', 'llama'])
def test_exports(family, tmp_path):
    base = tiny_causal_lm(family, hidden_size=64)
    trunk = SharedTrunk(deepcopy(base), quantize='nf4')
    actor = trunk.actor(4)
    with torch.no_grad():
        for name, parameter in actor.named_parameters():
            if 'lora_B' in name:
                parameter.normal_(std=0.05)
    batch = collate(tiny_sequences(4))
    actor.save_pretrained(tmp_path / 'merged')
    torch.testing.assert_close(
        Actor.from_pretrained(tmp_path / 'merged')(batch).logprobs, actor(batch).logprobs, rtol=1e-4, atol=1e-5
    )
    export_peft(actor, tmp_path / 'adapter', base_model='base')
    again = trunk.actor(adapter=tmp_path / 'adapter')
    assert torch.equal(again(batch).logprobs, actor(batch).logprobs)


def test_a_folder_is_quantized_block_by_block(tmp_path):
    Actor(model()).save_pretrained(tmp_path)
    whole = SharedTrunk(model(), quantize='nf4').actor(4)
    streamed = SharedTrunk.from_pretrained(tmp_path, quantize='nf4').actor(4)
    batch = collate(tiny_sequences(4))
    assert torch.equal(whole(batch).logprobs, streamed(batch).logprobs)


def test_of_a_folder_one_block_is_dense_at_a_time(tmp_path, monkeypatch):
    """Also where blocks are packed on another device: there it is one weight, for what is packed stays behind."""
    Actor(tiny_causal_lm('llama', num_hidden_layers=4, hidden_size=64)).save_pretrained(tmp_path)
    dense, alive, own = [], [], shared.quantize_blocks

    def noted(block, *args):
        alive.append(sum(weight() is not None for weight in dense))
        layers = [m for m in block.modules() if isinstance(m, torch.nn.Linear)]
        dense.extend(weakref.ref(m.weight) for m in layers)
        own(block, *args)
        assert all(m.weight.device.type == 'cpu' for m in layers)

    monkeypatch.setattr(shared, 'quantize_blocks', noted)
    with pretend_cuda():
        SharedTrunk.from_pretrained(tmp_path, quantize='nf4', device='cuda:0')
    assert alive == [0, 0, 0, 0] and len(dense) == 4 * 7


def _ranks(out):
    strategy = DDPStrategy(seed=1)
    _, rows = train(strategy, roles('shared', 'nf4'))
    with pytest.raises(ValueError, match='shards weights'):
        FSDPStrategy(seed=1).prepare(roles('shared')[0])
    if strategy.is_rank_0:
        torch.save(rows, out)


def test_two_ranks(tmp_path):
    run_distributed(_ranks, 2, str(tmp_path / 'rows.pt'))
    _, alone = train(NaiveStrategy(seed=1), roles('shared', 'nf4'))
    rows = torch.load(tmp_path / 'rows.pt')
    for a, b in zip(alone, rows, strict=True):
        for name, value in a.items():
            assert b[name] == pytest.approx(value, rel=1e-3, abs=1e-4), name
