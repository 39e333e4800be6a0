"""PPO with a critic, a reward model and a reference on one frozen trunk: the same numbers as with separate models,
learning in 4 bits, and saved files."""

from __future__ import annotations

import weakref
from copy import deepcopy

import pytest
import torch
from cuda_on_cpu import pretend_cuda
from safetensors.torch import load_file
from tiny_runs import assemble, close, trained

from chatgpt.batching import collate
from chatgpt.nn import Actor, Critic, RewardModel, shared
from chatgpt.nn.heads import critic_head
from chatgpt.nn.lora import merged_state_dict
from chatgpt.nn.shared import SharedTrunk
from chatgpt.rollout import HFEngine
from chatgpt.rollout.wire import merged, policy_tensors
from chatgpt.strategies import DDPStrategy, FSDPStrategy, NaiveStrategy
from chatgpt.strategies.checkpoint.layout import CheckpointMismatch
from chatgpt.testing import tiny_causal_lm
from chatgpt.testing.processes import run_distributed
from chatgpt.testing.tiny import tiny_sequences
from chatgpt.trainer.callbacks import EMA
from chatgpt.types import Prompt

PROMPTS = [Prompt(ids=torch.tensor([i + 3, 2 * i + 1])) for i in range(8)]


def model(checkpointing=False):
    made = tiny_causal_lm('llama', hidden_size=64)
    if checkpointing:
        made.gradient_checkpointing_enable({'use_reentrant': False})
    return made


def head():
    made = critic_head(64)
    with torch.no_grad():
        made.weight.copy_(torch.linspace(-0.3, 0.3, 64))
    return made


def roles(kind='shared', checkpointing=False, **options):
    """Returns actor, critic, reward model and initial model with equal adapters, on one trunk or on separate bases."""
    torch.manual_seed(3)
    if kind == 'separate':
        made = [model(checkpointing) for _ in range(3)]
        return Actor(made[0], 4), Critic(made[1], head(), 4), RewardModel(made[2], head(), 4), Actor(model())
    trunk = SharedTrunk(model(checkpointing), **options)
    return trunk.actor(4), trunk.critic(4, value_head=head()), trunk.reward_model(4, value_head=head()), None


def run(made, strategy=None, phases=2, **settings):
    actor, critic, reward_model, initial = made
    strategy = strategy or NaiveStrategy(seed=1)
    trainer = assemble(strategy, actor, critic, reward_model, initial, lr=1e-2, **{'kl_coef': 0.1} | settings)
    trainer.fit(PROMPTS, max_timesteps=phases, update_timesteps=1)
    return trainer


@pytest.mark.parametrize(
    'options',
    [
        {},
        {'checkpointing': True, 'max_tokens_per_batch': 16, 'packing': False},
        {'engine': HFEngine, 'advantage_estimator': 'a2c', 'policy_loss': 'reinforce'},
    ],
    ids=lambda o: ', '.join(o) or 'plain',
)
def test_one_trunk_learns_what_four_models_learn(options):
    options = dict(options)
    checkpointing, engine = options.pop('checkpointing', False), options.pop('engine', None)
    found = []
    for kind in ('separate', 'shared'):
        ema = EMA(0.5)
        settings = options | ({'engine': engine()} if engine else {})
        trainer = run(roles(kind, checkpointing), callbacks=[ema], **settings)
        (pieces,) = ema.checkpoint_pieces(trainer).values()
        found.append((trainer.log.phases, {p.name: p.data for p in pieces}))
    (separate, theirs), (shared, ours) = found
    close(shared, separate, rel=2e-4, abs=2e-5)
    assert shared[-1]['rollout/kl_mean'] != 0, 'the reference is the actor without its adapter'
    assert ours.keys() == {n for n in theirs if 'lora_' in n}, 'nothing of the base is averaged'
    for name, value in ours.items():
        torch.testing.assert_close(value, theirs[name], rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(('precision', 'dtype'), [('fp32', torch.float32), ('bf16', torch.bfloat16)])
def test_nf4_trains_and_the_base_stays(precision, dtype):
    made = roles(quantize='nf4', dtype=dtype)
    before = {n: b.clone() for n, b in made[0].named_buffers()}
    first = run(made, NaiveStrategy(seed=1, precision=precision)).log.phases[0]
    assert all(torch.equal(before[n], b) for n, b in made[0].named_buffers())
    assert first['ppo/actor_grad_norm'] > 0 and first['ppo/critic_grad_norm'] > 0
    assert first['ppo/first_ratio_error'] < 0.1
    assert all(p.dtype == torch.float32 for n, p in made[0].named_parameters() if 'lora' in n)


def on_ranks():
    strategy = DDPStrategy(seed=1)
    phases = run(roles(quantize='nf4'), strategy).log.phases
    with pytest.raises(ValueError, match='shards weights'):
        FSDPStrategy(seed=1).prepare(roles()[0])
    return phases


def on_ranks_with_parts(folder):
    with DDPStrategy(seed=1, device='cpu', shard_trunk=True) as strategy:
        made = roles(quantize='nf4', checkpointing=True)
        whole = {n: b.numel() for n, b in made[0].named_buffers() if n.endswith('.packed')}
        trainer = run(made, strategy, max_tokens_per_batch=16)
        parts = [{n: b.numel() for n, b in m.named_buffers() if n.endswith('.packed')} for m in made[:3]]
        with strategy.full_model(made[0]) as full:
            assert {n: b.numel() for n, b in full.named_buffers() if n.endswith('.packed')} == whole
        trainer.save_pretrained(folder)
        return trainer.log.phases, whole, parts


def test_two_ranks(tmp_path):
    trainer = run(roles(quantize='nf4'))
    alone = trainer.log.phases
    for phases in run_distributed(on_ranks, 2):
        close(phases, alone, rel=1e-3, abs=1e-4)
    for phases, whole, parts in run_distributed(on_ranks_with_parts, 2, tmp_path):
        close(phases, alone, rel=1e-3, abs=1e-4)
        assert len(whole) == 14 and all(sorted(p.values()) == sorted(n // 2 for n in whole.values()) for p in parts)
    saved = load_file(tmp_path / 'model.safetensors')
    trainer.save_pretrained(tmp_path / 'alone')
    for name, weight in load_file(tmp_path / 'alone' / 'model.safetensors').items():
        torch.testing.assert_close(saved[name], weight, rtol=1e-3, atol=1e-4)


def test_a_checkpoint_holds_adapters_and_heads_and_the_export_is_what_was_trained(tmp_path):
    trainer = run(roles(quantize='nf4'), phases=1)
    batch = collate(tiny_sequences(4))
    trainer.strategy.save_model(trainer.actor, tmp_path / 'actor.pt')
    saved = torch.load(tmp_path / 'actor.pt', weights_only=True)
    assert saved and all('lora_' in name for name in saved)
    other = roles(quantize='nf4')[0]
    NaiveStrategy(seed=2).load_model(other, tmp_path / 'actor.pt')
    assert torch.equal(other(batch).logprobs, trainer.actor(batch).logprobs)
    with pytest.raises(CheckpointMismatch):
        NaiveStrategy(seed=2).load_model(SharedTrunk(model()).actor(2), tmp_path / 'actor.pt')
    trainer.save_pretrained(tmp_path / 'actor')
    judge = trainer.scorer.model
    judge.save_pretrained(tmp_path / 'reward_model')
    written = Actor.from_pretrained(tmp_path / 'actor'), RewardModel.from_pretrained(tmp_path / 'reward_model')
    torch.testing.assert_close(written[0](batch).logprobs, trainer.actor(batch).logprobs, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(written[1](batch), judge(batch), rtol=1e-4, atol=1e-5)


def test_a_folder_is_quantized_block_by_block_one_dense_at_a_time(tmp_path, monkeypatch):
    """Also if blocks are packed on another device: only one dense weight is there at a time, since packed weights stay
    behind."""
    base = tiny_causal_lm('llama', num_hidden_layers=4, hidden_size=64)
    Actor(deepcopy(base)).save_pretrained(tmp_path)
    batch = collate(tiny_sequences(4))
    whole, streamed = SharedTrunk(base, quantize='nf4'), SharedTrunk.from_pretrained(tmp_path, quantize='nf4')
    assert torch.equal(whole.actor(4)(batch).logprobs, streamed.actor(4)(batch).logprobs)
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


def test_an_engine_with_weights_of_its_own_is_refused():
    with pytest.raises(ValueError, match='which those of a SharedTrunk cannot be'):
        with merged(SharedTrunk(model()).actor(4).model):
            policy_tensors(SharedTrunk(model()).actor(4).model)
    assert policy_tensors(model())


def test_the_base_is_not_moved_to_the_host_and_an_export_leaves_the_device_alone():
    """Dense weights of all layers at once may exceed the device's memory, so they stay on the host."""
    trunk = SharedTrunk(model())
    reward_model = trunk.reward_model(4)
    with pretend_cuda():
        strategy = NaiveStrategy(seed=1, device='cuda:0')
        (actor, _), reward_model = trained(strategy, trunk.actor(4)), strategy.prepare(reward_model)
        with pytest.raises(ValueError, match='offload moves weights to host memory, and this RewardModel shares them'):
            strategy.offload(reward_model)
        assert all(p.device.type == 'cuda' for p in actor.parameters())
        folded = {n.rpartition('.')[0] for n, _ in actor.model.named_parameters() if n.endswith('lora_A')}
        state = merged_state_dict(actor.model)
        assert folded and all(state[f'{n}.weight'].device.type == 'cpu' for n in folded)
