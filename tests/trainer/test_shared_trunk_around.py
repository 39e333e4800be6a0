"""What is around PPO on a shared trunk: the same numbers as with models of their own, and learning in 4 bits."""

from __future__ import annotations

import pytest
import torch
from cuda_on_cpu import pretend_cuda

from chatgpt.batching import collate
from chatgpt.nn import Actor, Critic, RewardModel
from chatgpt.nn.heads import critic_head
from chatgpt.nn.shared import SharedTrunk
from chatgpt.rollout import BestOfN, HFEngine, LocalEngine, SamplingParams
from chatgpt.rollout.wire import policy_tensors
from chatgpt.strategies import NaiveStrategy
from chatgpt.testing import tiny_causal_lm
from chatgpt.testing.tiny import tiny_sequences
from chatgpt.trainer import PPOTrainer, RFTTrainer
from chatgpt.trainer.callbacks import EMA, Callback
from chatgpt.types import Prompt

PROMPTS = [Prompt(ids=torch.tensor([i + 3, 2 * i + 1])) for i in range(8)]


class Odd:
    """Scores each odd token of a response with 1."""

    def score(self, samples, strategy):
        return [(s.response_ids % 2).float() for s in samples]


def base(checkpointing=False):
    model = tiny_causal_lm('llama', hidden_size=64)
    if checkpointing:
        model.gradient_checkpointing_enable({'use_reentrant': False})
    return model


def head():
    made = critic_head(64)
    with torch.no_grad():
        made.weight.copy_(torch.linspace(-0.3, 0.3, 64))
    return made


def roles(kind, checkpointing=False, **options):
    """Actor, critic, reward model and initial model with equal adapters, on one trunk or on bases of their own."""
    torch.manual_seed(3)
    if kind == 'separate':
        made = [base(checkpointing) for _ in range(3)]
        return Actor(made[0], 4), Critic(made[1], head(), 4), RewardModel(made[2], head(), 4), Actor(base())
    trunk = SharedTrunk(base(checkpointing), **options)
    return trunk.actor(4), trunk.critic(4, value_head=head()), trunk.reward_model(4, value_head=head()), None


def optimizer(model, lr):
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=lr)


def trained(made, phases=3, lr=1e-2, reward=None, callbacks=(), fit=True, **options):
    """The trainer after its phases, and the metrics of each."""
    rows = []

    class Keep(Callback):
        def on_phase_end(self, trainer, phase, metrics):
            rows.append({k: v for k, v in metrics.items() if not k.startswith('perf/')})

    actor, critic, reward_model, initial = made
    strategy = NaiveStrategy(seed=1)
    (actor, actor_optim), (critic, critic_optim), reward_model, initial = strategy.prepare(
        (actor, optimizer(actor, lr)), (critic, optimizer(critic, lr)), reward_model, initial
    )
    settings = {'experience_batch_size': 4, 'train_batch_size': 4, 'kl_coef': 0.1, 'max_new_tokens': 6} | options
    trainer = PPOTrainer(
        strategy,
        actor,
        critic,
        reward or reward_model,
        initial,
        actor_optim,
        critic_optim,
        callbacks=[Keep(), *callbacks],
        **settings,
    )
    if fit:
        trainer.fit(PROMPTS, max_timesteps=phases, update_timesteps=1)
    return trainer, rows


@pytest.mark.parametrize(
    'options',
    [
        {'checkpointing': True},
        {'max_tokens_per_batch': 16},
        {'packing': False},
        {'checkpointing': True, 'max_tokens_per_batch': 16, 'packing': False},
        {'engine': HFEngine},
        {'advantage_estimator': 'a2c', 'policy_loss': 'reinforce'},
    ],
    ids=lambda o: ', '.join(o),
)
def test_one_trunk_learns_what_four_models_learn(options):
    options = dict(options)
    checkpointing = options.pop('checkpointing', False)
    engine = options.pop('engine', LocalEngine)
    both = [trained(roles(kind, checkpointing), engine=engine(), **options)[1] for kind in ('separate', 'shared')]
    assert len(both[0]) == 3
    for a, b in zip(*both, strict=True):
        assert a.keys() == b.keys()
        for name, value in a.items():
            assert b[name] == pytest.approx(value, rel=2e-4, abs=2e-5), name
    assert both[1][-1]['rollout/kl_mean'] != 0


def test_the_average_of_the_weights():
    averages = []
    for kind in ('separate', 'shared'):
        ema = EMA(0.5)
        trainer, _ = trained(roles(kind), callbacks=[ema])
        (pieces,) = ema.checkpoint_pieces(trainer).values()
        averages.append({p.name: p.data for p in pieces})
    separate, shared = averages
    assert shared.keys() == {n for n in separate if 'lora_' in n}, 'nothing of the base is averaged'
    for name, value in shared.items():
        torch.testing.assert_close(value, separate[name], rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize('quantize', [None, 'nf4'])
def test_the_export_and_the_best_of_several(quantize, tmp_path):
    """The written folder speaks and chooses as the trained roles did."""
    trainer, _ = trained(roles('shared', quantize=quantize), run_dir=tmp_path / 'run')
    trainer.save_pretrained(tmp_path / 'actor')
    actor, reward_model = trainer.actor, trainer.scorer.model
    reward_model.save_pretrained(tmp_path / 'reward_model')
    written = Actor.from_pretrained(tmp_path / 'actor'), RewardModel.from_pretrained(tmp_path / 'reward_model')
    batch = collate(tiny_sequences(4))
    torch.testing.assert_close(written[0](batch).logprobs, actor(batch).logprobs, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(written[1](batch), reward_model(batch), rtol=1e-4, atol=1e-5)
    chosen = []
    for policy, judge in ((actor, reward_model), written):
        engine = LocalEngine()
        engine.begin(policy.eval())
        best = BestOfN(engine, lambda sequences, judge=judge: judge(collate(sequences)).tolist(), sample_size=3)
        found = best(PROMPTS[:3], SamplingParams(max_new_tokens=5), seed=2)
        chosen.append([candidates[0].sample.response_ids.tolist() for candidates in found])
        engine.end()
    assert chosen[0] == chosen[1]


def test_rejection_sampling():
    found = []
    for kind in ('separate', 'shared'):
        actor, strategy = roles(kind)[0], NaiveStrategy(seed=1)
        actor, optim = strategy.prepare((actor, optimizer(actor, 1e-2)))
        RFTTrainer(strategy, actor, optim, PROMPTS, Odd(), max_new_tokens=5, train_batch_size=4).fit()
        found.append(actor(collate(tiny_sequences(4))).logprobs.detach())
    torch.testing.assert_close(*found, rtol=1e-3, atol=1e-4)


def test_a_trunk_in_4_bits_learns():
    """Of six tokens about three are odd at first; ten phases of 32 responses, each token its own advantage."""
    model = base()
    with torch.no_grad():
        model.lm_head.weight.mul_(20)  # a head of new weights says nearly the same of every state
    trunk = SharedTrunk(model, quantize='nf4')
    made = trunk.actor(4), trunk.critic(4), trunk.reward_model(4), None
    options = {'experience_batch_size': 32, 'train_batch_size': 16, 'max_epochs': 2, 'gamma': 0.0, 'lam': 0.0}
    _, rows = trained(made, phases=10, reward=Odd(), lr=5e-3, kl_coef=0.01, **options)
    scores = [row['rollout/score_mean'] for row in rows]
    assert 2 < scores[0] < 4 and sum(scores[-3:]) / 3 > 4.5, scores


# ---------------------------------------------------------------------- what is not done


def test_an_engine_with_weights_of_its_own_is_refused():
    with pytest.raises(ValueError, match='which those of a SharedTrunk cannot be'):
        policy_tensors(SharedTrunk(base()).actor(4).model)
    assert policy_tensors(base())


def test_the_base_is_not_moved_to_the_host_with_one_of_its_roles():
    trunk = SharedTrunk(base())
    reward_model = trunk.reward_model(4)
    with pretend_cuda():
        strategy = NaiveStrategy(seed=1, device='cuda:0')
        (actor, _), reward_model = strategy.prepare((role := trunk.actor(4), optimizer(role, 1e-2)), reward_model)
        with pytest.raises(ValueError, match='offload moves weights to host memory, and this RewardModel shares them'):
            strategy.offload(reward_model)
        assert all(p.device.type == 'cuda' for p in actor.parameters())


def test_an_export_leaves_the_device_alone(tmp_path):
    """Dense weights of all layers at once may be more than the device holds: they wait on the host."""
    from chatgpt.nn.lora import merged_state_dict

    trunk = SharedTrunk(base())
    with pretend_cuda():
        actor = NaiveStrategy(seed=1, device='cuda:0').prepare(trunk.actor(4))
        folded = {n.rpartition('.')[0] for n, _ in actor.model.named_parameters() if n.endswith('lora_A')}
        state = merged_state_dict(actor.model)
        assert folded and all(state[f'{n}.weight'].device.type == 'cpu' for n in folded)
