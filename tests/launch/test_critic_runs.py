"""The critic of a run: where it starts from, what is refused, and the folder that it is written to."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModel

from chatgpt.batching import collate
from chatgpt.launch import recipes
from chatgpt.launch.config_file import parse_run
from chatgpt.launch.inputs import Inputs
from chatgpt.launch.models import build_critic
from chatgpt.launch.runs import PPORun
from chatgpt.nn import AutoActor, AutoCritic, AutoRM, CategoricalHead, Critic, RewardModel, load_config, load_tokenizer
from chatgpt.strategies import FSDPStrategy
from chatgpt.testing.fakes import byte_tokenizer, char_tokenizer, tiny_config
from chatgpt.testing.processes import run_distributed
from chatgpt.testing.tiny import tiny_sequences

BATCH = collate(tiny_sequences(4))
BINS = {'bins': 7, 'low': -1.0, 'high': 2.0}


@pytest.fixture
def run(tmp_path, tiny_folder, monkeypatch) -> Any:
    """Returns a function that executes a run of two phases with these settings, and returns its trainer."""
    (tmp_path / 'prompts.jsonl').write_text('{"prompt": "one day"}\n{"prompt": "a fox"}\n' * 2)
    (tmp_path / 'reward.py').write_text('def length(prompts, responses):\n    return [len(r) / 9 for r in responses]\n')
    built, trainers = recipes.make_trainer, []
    monkeypatch.setattr(recipes, 'make_trainer', lambda *given: trainers.append(built(*given)) or trainers[-1])

    def execute(name: str = 'a', **settings: Any) -> Any:
        settings = {'pretrain': tiny_folder, 'reward_fn': f'{tmp_path}/reward.py:length', 'lr': 1e-3} | settings
        settings |= {'experience_batch_size': 4, 'train_batch_size': 4, 'max_new_tokens': 4, 'num_episodes': 1}
        settings |= {'save_path': tmp_path / name, 'max_timesteps': 2, 'update_timesteps': 1}
        argv = [str(tmp_path / 'prompts.jsonl'), *(f'--{key}={value}' for key, value in settings.items())]
        recipes.execute(parse_run(PPORun, description='', positional='prompt_path', argv=argv))
        return trainers[-1]

    return execute


def values(critic: Any) -> torch.Tensor:
    with torch.no_grad():
        return critic(BATCH)


def test_a_critic_is_written_with_its_head_and_a_later_run_starts_from_it(run, tmp_path):
    critic = run(critic_lr=0.01).critic
    folder = tmp_path / 'a' / 'critic'
    saved = Critic.from_pretrained(folder)
    torch.testing.assert_close(values(saved), values(critic), rtol=0, atol=0)
    assert values(saved).abs().max() > 0.05, 'it has learned something'
    assert (
        char_tokenizer().get_vocab() == load_tokenizer(folder).get_vocab()
        and AutoModel.from_pretrained(folder).config.n_layer == 2
    )
    card = (folder / 'README.md').read_text()
    assert 'a value model' in card and '--critic_from' in card and 'from chatgpt.nn import Critic' in card
    assert 'nats per response' not in card and 'a language model' in (tmp_path / 'a/actor/README.md').read_text()
    again = run('b', critic_lr=0.0, critic_from=folder).critic
    torch.testing.assert_close(values(again), values(saved), rtol=0, atol=0)
    # by default a new head has ten times the rate of the rest, a learned one has the same
    for name, more, times in (('c', {'critic_from': folder}, 1), ('d', {}, 10)):
        rest, head = run(name, **more).critic_optim.param_groups
        assert head['lr'] == pytest.approx(times * rest['lr']) and len(head['params']) == 2


def test_a_resume_may_change_the_rate_of_a_new_critic(run):
    run(checkpoint_interval=1)
    again = run(checkpoint_interval=1, resume='auto', critic_lr=2e-5)
    assert again._schedules['critic'].base == [2e-5, 2e-5]


def test_a_smaller_model_and_a_reward_model_start_a_critic(run, tmp_path):
    small = AutoCritic(config=tiny_config('gpt2', positions=32, hidden=16, layers=1))
    small.model.save_pretrained(tmp_path / 'small')
    trainer = run(critic_lr=0.01, critic_from=tmp_path / 'small')
    saved = Critic.from_pretrained(tmp_path / 'a' / 'critic')
    assert saved.model.config.n_layer == 1 and saved.value_head.weight.shape == (1, 16)
    torch.testing.assert_close(values(saved), values(trainer.critic), rtol=0, atol=0)
    scorer = RewardModel(small.model)
    scorer.calibrate(0.75)
    scorer.save_pretrained(tmp_path / 'scorer', tokenizer=char_tokenizer())
    critic = run('b', critic_lr=0.0, critic_from=tmp_path / 'scorer').critic
    with torch.no_grad():
        last = [v[-1] for v in values(critic).split(BATCH.action_rows.bincount().tolist())]
    assert critic.value_head.weight.shape == (1, 16) and torch.stack(last).std() > 1e-3
    torch.testing.assert_close(critic.value_head.weight, scorer.value_head.weight, rtol=0, atol=0)
    torch.testing.assert_close(critic.value_head.bias, torch.tensor([-0.75]), rtol=0, atol=1e-6)
    bins = run('c', critic_from=tmp_path / 'scorer', critic_loss='categorical').critic
    assert bins.value_head.support == {'bins': 101, 'low': -10.0, 'high': 10.0}, 'a score says nothing of bins'


def test_a_critic_from_the_reward_model_recomputes_activations_too(run, tmp_path, tiny_folder):
    scorer = RewardModel(AutoCritic(pretrained=tiny_folder).model)
    scorer.save_pretrained(tmp_path / 'scorer', tokenizer=char_tokenizer())
    trainer = run(reward_fn='', reward_model=tmp_path / 'scorer', gradient_checkpointing=True)
    assert trainer.actor.model.is_gradient_checkpointing and trainer.critic.model.is_gradient_checkpointing


def on_meta(folders: dict[str, dict[str, Any]]) -> list[list[float]]:
    """Builds critics on the meta device, as a sharded strategy does, and returns their values."""
    found = []
    with FSDPStrategy(seed=1, device='cpu', meta_init=True) as strategy:
        for folder, settings in folders.items():
            run = PPORun(pretrain='gpt2', critic_from=folder, **settings)
            inputs = Inputs(run=run, settings=run.config(), tokenizer=None, critic_config=load_config(folder))
            with strategy.model_init_context():
                critic = build_critic(inputs, folder, inputs.critic_config)
                assert all(p.is_meta for p in critic.parameters())
            critic, _ = strategy.prepare((critic, strategy.make_optimizer(critic.parameters())))
            found.append(values(critic).tolist())
    return found


def test_a_critic_is_read_shard_by_shard(tmp_path):
    """A critic with bins, and a reward model with a mean to subtract: the same values as read whole."""
    torch.manual_seed(0)
    config = tiny_config('gpt2', vocab_size=16, positions=32)
    bins, scorer = (
        AutoCritic(config=config, value_head=CategoricalHead(32, **BINS)),
        RewardModel(AutoCritic(config=config).model),
    )
    with torch.no_grad():
        bins.value_head.weight.mul_(1e3)
    scorer.calibrate(0.75)
    for name, model in (('bins', bins), ('scorer', scorer)):
        model.save_pretrained(tmp_path / name)
    want = [values(bins).tolist(), values(Critic.from_reward_model(scorer)).tolist()]
    loss = {'critic_loss': 'categorical', 'critic_loss_settings': BINS}
    folders = {str(tmp_path / 'bins'): loss, str(tmp_path / 'scorer'): {}}
    for got in run_distributed(on_meta, 2, folders):
        assert got == [pytest.approx(each, rel=1e-4, abs=1e-5) for each in want]


def test_a_categorical_critic_is_written_with_its_bins_and_learns(run, tmp_path):
    loss = {'critic_loss': 'categorical', 'critic_loss_settings': '{bins: 7, low: -1, high: 2}', 'kl_coef': 0}
    trainer = run(critic_lr=0.05, max_epochs=20, **loss)
    saved = Critic.from_pretrained(tmp_path / 'a' / 'critic')
    assert isinstance(saved.value_head, CategoricalHead) and saved.value_head.support == BINS
    torch.testing.assert_close(values(saved), values(trainer.critic), rtol=0, atol=0)
    with torch.no_grad():
        got, logits = saved(BATCH, with_logits=True)
    by_hand = (logits.double().softmax(-1) * torch.tensor([-1 + 3 / 7 * (i + 0.5) for i in range(7)])).sum(-1)
    assert got.tolist() == pytest.approx(by_hand.tolist(), rel=1e-5)
    with pytest.raises(ValueError, match=r"has a head for critic_loss='categorical'.*'low': -1.0.*and this run"):
        run('b', critic_from=tmp_path / 'a' / 'critic')
    with pytest.raises(ValueError, match="critic_loss='categorical' with {'bins': 101"):
        run('b', critic_from=tmp_path / 'a' / 'critic', critic_loss='categorical')
    again = run('b', critic_lr=0.0, critic_from=tmp_path / 'a' / 'critic', **loss).critic
    torch.testing.assert_close(values(again), values(saved), rtol=0, atol=0)


def test_a_value_head_on_the_actor_starts_the_next_one(run, tmp_path):
    first = run(critic='shared', value_coef=1.0, lr=0.01)
    assert not (tmp_path / 'a' / 'critic').exists(), 'the head is in the folder of the actor'
    head = load_file(tmp_path / 'a' / 'actor' / 'value_head.safetensors')
    assert torch.equal(head['weight'], first.actor.value_head.weight)
    again = run('b', critic='shared', pretrain=tmp_path / 'a' / 'actor', critic_from=tmp_path / 'a' / 'actor', lr=0.0)
    assert torch.equal(again.actor.value_head.weight, first.actor.value_head.weight)
    own = run('c', critic_from=tmp_path / 'a' / 'actor', critic_lr=0.0).critic
    torch.testing.assert_close(values(own), first.actor(BATCH).values.detach(), rtol=0, atol=0)


def test_adapters_are_folded_into_the_critic_and_written_alone(run, tmp_path, tiny_folder):
    trainer = run(lora_rank=2, save_adapter=True, critic_lr=0.02)
    folded = Critic.from_pretrained(tmp_path / 'a' / 'critic')
    torch.testing.assert_close(values(folded), values(trainer.critic), rtol=1e-5, atol=1e-6)
    alone = run(
        'b', shared_trunk=True, lora_rank=2, critic_lr=0.0, critic_from=tmp_path / 'a' / 'critic_adapter'
    ).critic
    torch.testing.assert_close(values(alone), values(trainer.critic), rtol=1e-5, atol=1e-6)
    with pytest.raises(ValueError, match='shared_trunk takes a critic that is an adapter with its head'):
        run('c', shared_trunk=True, lora_rank=2, critic_from=tmp_path / 'a' / 'critic')


def test_the_adapter_of_a_critic_names_the_reward_model_that_it_began_with(run, tmp_path):
    model = AutoRM(config=tiny_config('gpt2', positions=48))
    torch.nn.init.normal_(model.value_head.weight)
    model.save_pretrained(tmp_path / 'rm', tokenizer=char_tokenizer())
    trainer = run(reward_fn=None, reward_model=tmp_path / 'rm', lora_rank=2, save_adapter=True, critic_lr=0.02)
    found = Critic.from_pretrained(tmp_path / 'a' / 'critic_adapter')
    torch.testing.assert_close(values(found), values(trainer.critic), rtol=1e-5, atol=1e-6)


def test_what_does_not_fit_is_refused_in_one_line_before_any_weight_is_read(run, tmp_path, monkeypatch):
    monkeypatch.setattr(recipes, 'make_trainer', None)
    AutoActor(config=tiny_config('gpt2', positions=48)).save_pretrained(tmp_path / 'bytes', tokenizer=byte_tokenizer())
    AutoCritic(config=tiny_config('gpt2', positions=8)).model.save_pretrained(tmp_path / 'short')
    AutoCritic(config=tiny_config('gpt2', vocab_size=5)).model.save_pretrained(tmp_path / 'few')
    AutoCritic(config=tiny_config('gpt2')).save_pretrained(tmp_path / 'z' / 'critic', tokenizer=char_tokenizer())
    AutoCritic(config=tiny_config('gpt2', hidden=16)).save_pretrained(tmp_path / 'narrow')
    (tmp_path / 'long.txt').write_text('a' * 46)
    for settings, message in (
        (
            {'validation_file': str(tmp_path / 'long.txt'), 'max_prompt_tokens': 46},
            'eval prompt 0 has 46 tokens; with max_new_tokens=.* it passes the context of 48',
        ),
        ({'critic_from': tmp_path / 'bytes'}, 'has another tokenizer than the policy'),
        ({'critic_from': tmp_path / 'few'}, 'the critic .*few knows 5 tokens'),
        ({'critic_from': tmp_path / 'short'}, 'the context of the critic .*short of 8'),
        (
            {'critic_from': tmp_path / 'nothing'},
            'critic_from is reward_model, actor, a folder or a hub name: .*no such folder',
        ),
        ({'critic': 'shared', 'critic_from': tmp_path / 'short'}, r'short has no value_head.safetensors'),
        ({'critic': 'shared', 'critic_from': tmp_path / 'narrow'}, r'for states of width 32'),
        ({'name': 'z', 'critic_from': tmp_path / 'z' / 'critic'}, 'would replace --critic_from'),
    ):
        with pytest.raises(ValueError, match=message) as error:
            run(**settings)
        assert '\n' not in str(error.value)
