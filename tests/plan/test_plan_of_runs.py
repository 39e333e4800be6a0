"""Plans of real runs: `--plan` of the scripts, and the advice at the end of an out-of-memory error."""

from __future__ import annotations

import sys
from copy import deepcopy
from pathlib import Path

import pytest
import torch
from torch.optim import AdamW

from chatgpt.nn import Actor, Critic, RewardModel
from chatgpt.plan import Setup, make_plan
from chatgpt.plan.of_run import is_out_of_memory, note_on_memory, this_machine
from chatgpt.testing import byte_tokenizer, tiny_causal_lm, tiny_config
from chatgpt.trainer import PPOTrainer, SFTTrainer
from chatgpt.trainer.callbacks.memory import setup_of
from chatgpt.trainer.strategies import NaiveStrategy
from chatgpt.types import Sequence

EXAMPLES = Path(__file__).resolve().parents[2] / 'examples'


@pytest.fixture
def no_weights(tmp_path):
    """A model folder with a config and a tokenizer, and no weights: whoever loads some fails."""
    folder = tmp_path / 'model'
    tokenizer = byte_tokenizer()
    config = tiny_config('gpt2')
    config.vocab_size = len(tokenizer)
    config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def run_script(monkeypatch, capsys, name: str, *flags: str) -> tuple[int, str]:
    import runpy

    monkeypatch.setattr(sys, 'argv', [name, *flags])
    with pytest.raises(SystemExit) as stop:
        runpy.run_path(str(EXAMPLES / name), run_name='__main__')
    out = capsys.readouterr()
    return int(stop.value.code or 0), out.out + out.err


def test_train_prompts_plans_without_weights(monkeypatch, capsys, tmp_path, no_weights):
    (tmp_path / 'prompts.csv').write_text('prompt\nhello\n')
    (tmp_path / 'reward.py').write_text('def score(prompts, responses):\n    return [0.0] * len(prompts)\n')
    code, out = run_script(
        monkeypatch,
        capsys,
        'train_prompts.py',
        str(tmp_path / 'prompts.csv'),
        '--pretrain',
        str(no_weights),
        '--reward_fn',
        f'{tmp_path / "reward.py"}:score',
        '--plan',
        '--max_new_tokens',
        '8',
        '--save_path',
        str(tmp_path / 'run'),
    )
    assert code == 0, out
    for word in ('load', 'collect', 'score', 'learn', 'actor weights', 'critic optimizer', 'it fits'):
        assert word in out
    assert not (tmp_path / 'run').exists()


@pytest.mark.parametrize(
    ('name', 'rows', 'model'),
    [
        ('train_sft.py', '{"prompt": "a", "completion": "b"}\n', 'actor'),
        ('train_reward_model.py', '{"prompt": "a", "chosen": "b", "rejected": "c"}\n', 'reward model'),
    ],
)
def test_the_other_scripts_plan_one_model(monkeypatch, capsys, tmp_path, no_weights, name, rows, model):
    (tmp_path / 'data.jsonl').write_text(rows * 4)
    flags = [
        str(tmp_path / 'data.jsonl'),
        '--pretrain',
        str(no_weights),
        '--plan',
        '--save_path',
        str(tmp_path / 'run'),
    ]
    code, out = run_script(monkeypatch, capsys, name, *flags)
    assert code == 0, out
    assert f'{model} weights' in out and f'{model} optimizer' in out and 'collect' not in out


def test_a_run_that_does_not_fit_is_told_what_would(monkeypatch, capsys, tmp_path, no_weights):
    import chatgpt.plan.of_run as of_run

    small = this_machine() | {'on_cuda': True, 'memory': 600 * 2**10}
    monkeypatch.setattr(of_run, 'this_machine', lambda: small)
    (tmp_path / 'data.jsonl').write_text('{"prompt": "a", "completion": "b"}\n' * 40)
    flags = [str(tmp_path / 'data.jsonl'), '--pretrain', str(no_weights), '--plan', '--train_batch_size', '32']
    code, out = run_script(monkeypatch, capsys, 'train_sft.py', *flags)
    assert code == 1, out
    assert 'it does not fit, device memory is too small' in out
    assert 'fits with' in out or 'no single change' in out


def test_weights_and_optimizer_of_one_model_are_counted_by_hand():
    config = tiny_config('gpt2')
    plan = make_plan(
        Setup(config=config, task='sft', on_cuda=False, train_batch_size=2, max_prompt_tokens=1, max_new_tokens=7)
    )
    number = sum(p.numel() for p in tiny_causal_lm('gpt2').parameters())
    assert list(plan.phases) == ['load', 'learn']
    assert plan.phases['load'].device == {'actor weights': 4 * number}
    learn = plan.phases['learn'].device
    assert (learn['actor weights'], learn['actor optimizer'], learn['actor gradients']) == (
        4 * number,
        8 * number,
        4 * number,
    )
    more = make_plan(
        Setup(config=config, task='sft', on_cuda=False, train_batch_size=4, max_prompt_tokens=1, max_new_tokens=7)
    )
    assert more.phases['learn'].device['activations'] > 1.5 * learn['activations'] > 0


def test_idle_models_are_on_the_device_one_at_a_time_by_hand():
    config, reward = tiny_config('gpt2'), tiny_config('llama')
    plans = {
        o: make_plan(Setup(config=config, precision='fp32', reward_config=reward, offload=o)) for o in ('none', 'idle')
    }
    initial = 4 * sum(p.numel() for p in tiny_causal_lm('gpt2').parameters())
    scorer = 4 * sum(p.numel() for p in RewardModel(tiny_causal_lm('llama')).parameters())
    saved = {
        phase: sum(plans['none'].phases[phase].device.values()) - sum(plans['idle'].phases[phase].device.values())
        for phase in ('load', 'collect', 'score', 'learn')
    }
    assert saved == {'load': 0, 'collect': initial + scorer, 'score': min(initial, scorer), 'learn': initial + scorer}
    assert plans['idle'].phases['learn'].host['initial model weights'] == initial


def ppo_trainer(strategy, **kwargs):
    actor, critic = Actor(tiny_causal_lm('gpt2')), Critic(tiny_causal_lm('gpt2'))
    initial, reward = deepcopy(actor), RewardModel(tiny_causal_lm('llama'))
    (actor, actor_optim), (critic, critic_optim), reward, initial = strategy.prepare(
        (actor, AdamW(actor.parameters())), (critic, AdamW(critic.parameters())), reward, initial
    )
    return PPOTrainer(
        strategy,
        actor,
        critic,
        reward,
        initial,
        actor_optim,
        critic_optim,
        experience_batch_size=2,
        train_batch_size=2,
        max_new_tokens=3,
        **kwargs,
    )


def test_a_trainer_knows_its_plan():
    with NaiveStrategy() as strategy:
        trainer = ppo_trainer(strategy)
        trainer.set_prompts([torch.tensor([5, 6, 7]), torch.tensor([5])])
        setup = setup_of(trainer)
    assert setup.config.model_type == 'gpt2' and setup.reward_config.model_type == 'llama'
    assert (setup.max_prompt_tokens, setup.max_new_tokens, setup.train_batch_size) == (3, 3, 2)
    assert (setup.optimizer, setup.update_timesteps) == ('adamw', 1)
    assert (setup.strategy, setup.precision, setup.critic, setup.kl, setup.lora_rank) == (
        'naive',
        'fp32',
        'own',
        True,
        0,
    )


def test_the_plan_is_of_the_run_as_it_was_asked_for():
    """SGD, and max_length in place of max_new_tokens: 12 tokens in all, 3 of them the longest prompt's."""
    with NaiveStrategy() as strategy:
        actor = Actor(tiny_causal_lm('gpt2'))
        actor.logprob_kernel = 'fused'
        actor, optim = strategy.prepare((actor, torch.optim.SGD(actor.parameters(), lr=0.1)))
        trainer = PPOTrainer(
            strategy,
            actor,
            None,
            lambda prompts, responses: [0.0] * len(prompts),
            None,
            optim,
            kl_coef=0.0,
            max_length=12,
            advantage_estimator='reinforce++',
            experience_batch_size=2,
            train_batch_size=2,
        )
        trainer.fit([torch.tensor([5, 6, 7]), torch.tensor([5])], max_timesteps=2, update_timesteps=2)
        setup = setup_of(trainer)
    assert (setup.optimizer, setup.update_timesteps, setup.max_prompt_tokens, setup.max_new_tokens) == ('sgd', 2, 3, 9)
    assert not setup.kl and (setup.critic, setup.logprob_kernel) == ('none', 'fused')


OUT_OF_MEMORY = [
    torch.OutOfMemoryError('CUDA out of memory'),
    RuntimeError("DefaultCPUAllocator: can't allocate memory"),
]


@pytest.mark.parametrize('error', OUT_OF_MEMORY)
def test_running_out_of_memory_ends_with_the_advice(error):
    with NaiveStrategy() as strategy:
        trainer = ppo_trainer(strategy)

        def no_room(*args, **kwargs):
            raise error

        trainer.learn_phase = no_room
        with pytest.raises(type(error)) as raised:
            trainer.fit([torch.tensor([5, 6, 7])] * 2, max_timesteps=1, update_timesteps=1)
    (note,) = raised.value.__notes__
    assert note.startswith('naive on 1 process needs') and 'To go on: ' in note


def test_sft_ends_with_it_too_and_other_errors_do_not():
    ids = torch.tensor([5, 6])
    data = [Sequence(prompt_ids=ids, response_ids=ids, response_mask=torch.ones(2, dtype=torch.bool))] * 2
    with NaiveStrategy() as strategy:
        actor = Actor(tiny_causal_lm('gpt2'))
        actor, optim = strategy.prepare((actor, AdamW(actor.parameters())))
        for error, notes in ((MemoryError(), 1), (RuntimeError('something else'), 0)):
            trainer = SFTTrainer(strategy, actor, optim, data, train_batch_size=2)

            def fails(*args, error=error):
                raise error

            trainer.objective.loss = fails
            with pytest.raises(type(error)) as raised:
                trainer.fit()
            assert len(getattr(raised.value, '__notes__', [])) == notes


def test_advice_never_hides_the_error():
    error = MemoryError('full')

    def broken():
        raise KeyError('nothing known')

    note_on_memory(error, broken)
    assert error.__notes__ == [
        'python -m chatgpt.plan tells what a run needs and the cheapest change that makes it fit'
    ]
    assert not is_out_of_memory(ValueError('full'))
