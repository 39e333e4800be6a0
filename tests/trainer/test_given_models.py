"""Arguments of trainers and `chatgpt.train`: models in memory, whose reference is not read again from their folder; a
strategy by name, which prepares them; and a strategy without a required ability."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
from tiny_runs import Log, assemble, sequence, vowels, weights
from transformers import AutoModelForCausalLM

import chatgpt
from chatgpt.data import load_demonstrations, load_preferences
from chatgpt.launch import demo_world
from chatgpt.nn import GPTRM, GPTActor, GPTCritic, ILQLModel
from chatgpt.strategies import ColossalAIStrategy, DDPStrategy, FSDPStrategy, NaiveStrategy
from chatgpt.strategies.base import Abilities
from chatgpt.testing import tiny_causal_lm
from chatgpt.testing.fakes import char_tokenizer, tiny_config
from chatgpt.testing.processes import run_distributed
from chatgpt.trainer import DPOTrainer, ILQLTrainer, PPOConfig, PPOTrainer, RewardModelTrainer, SFTTrainer, rewarded
from chatgpt.trainer.nlpo import NLPOPolicy

PROMPTS = ['a', 'b', 'c', 'd']
PHASE = {'experience_batch_size': 4, 'train_batch_size': 4, 'max_new_tokens': 4}


def changed(model: Any) -> Any:
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.5 * torch.randn(p.shape, generator=generator))
    return model


@pytest.mark.parametrize('read_again', [False, True])
def test_ppo_starts_at_no_divergence_from_an_actor_changed_in_memory(tiny_folder, read_again):
    actor = changed(GPTActor(pretrained=str(tiny_folder)))
    initial = GPTActor(pretrained=str(tiny_folder)) if read_again else deepcopy(actor)  # the negative control
    critic = GPTCritic(config=tiny_config('gpt2', positions=48))
    trainer = assemble(NaiveStrategy(seed=3), actor, critic, vowels, initial, tokenizer=char_tokenizer(), **PHASE)
    trainer.fit(PROMPTS, num_episodes=1, max_timesteps=1, update_timesteps=1)
    kl = trainer.log.phases[0]['rollout/kl_mean']
    assert abs(kl) > 0.1 if read_again else kl == pytest.approx(0.0, abs=1e-4)


@pytest.mark.parametrize('method', ['gae', 'grpo', 'dpo', 'dpo with its batch'])
def test_train_starts_at_no_divergence_from_a_model_changed_in_memory(tiny_folder, tmp_path, method):
    model, log = changed(AutoModelForCausalLM.from_pretrained(tiny_folder)), Log()
    assert model.config.name_or_path == str(tiny_folder)  # so the folder could be read again
    pairs = [{'prompt': 'a', 'chosen': 'bc', 'rejected': 'd'}, {'prompt': 'b', 'chosen': 'c', 'rejected': 'de'}]
    if 'dpo' in method:
        names = ('dpo/reward_chosen', 'dpo/reward_rejected')
        given = {'preferences': pairs, 'max_epochs': 1, 'train_batch_size': 2, 'log_interval': 1}
        given['precompute_ref_logprobs'] = method == 'dpo'
    else:
        names = ('rollout/kl_mean', 'rollout/kl_k3_mean')
        given = {'reward_fn': vowels, 'prompts': PROMPTS, 'num_timesteps': 1, 'num_samples_per_prompt': 2, **PHASE}
        given['advantage_estimator'] = method
    chatgpt.train(model, run_dir=tmp_path, callbacks=[log], **given)
    for name in names:
        assert log.phases[0][name] == pytest.approx(0.0, abs=1e-4)


QUICK: dict[str, Any] = {'train_batch_size': 2, 'max_steps': 1}


def pair(model: torch.nn.Module) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def sft(strategy: Any) -> SFTTrainer:
    torch.manual_seed(0)
    records = load_demonstrations(demo_world.demo_corpus(4), demo_world.demo_tokenizer())[0]
    model, optim = pair(GPTActor(config=demo_world.demo_config()))
    if not isinstance(strategy, str):
        model, optim = strategy.prepare((model, optim))
    trainer = SFTTrainer(strategy, model, optim, records, **QUICK)
    trainer.fit()
    return trainer


def test_every_kind_of_trainer():
    by_name, by_hand = sft('naive'), sft(NaiveStrategy())  # same as a given strategy
    assert isinstance(by_name.strategy, NaiveStrategy) and torch.equal(weights(by_name), weights(by_hand))
    config, tokenizer = demo_world.demo_config(), demo_world.demo_tokenizer()
    actor, critic, rm = GPTActor(config=config), GPTCritic(config=config), GPTRM(config=config)
    optims = pair(actor)[1], pair(critic)[1]
    sizes = {'max_new_tokens': 2, 'experience_batch_size': 2, 'train_batch_size': 2, 'tokenizer': tokenizer}
    ppo = PPOTrainer('naive', actor, critic, rm, deepcopy(actor), *optims, **sizes)
    ppo.fit([row['prompt'] for row in demo_world.demo_prompts(2)], 1, 1, 1)
    assert ppo.num_updates == 1 and not any(p.requires_grad for p in rm.parameters())
    records = load_preferences(demo_world.demo_preferences(4), tokenizer)[0]
    dpo = DPOTrainer('naive', *pair(GPTActor(config=config)), records, initial_model=GPTActor(config=config), **QUICK)
    dpo.fit()
    reward = RewardModelTrainer('naive', *pair(GPTRM(config=config)), records, **QUICK)
    reward.fit()
    assert dpo.num_updates == reward.num_updates == 1


def test_chatgpt_train_of_given_models(model_folder):
    texts = [row['response'] for row in demo_world.demo_corpus(4)]
    trainer = chatgpt.train(str(model_folder), samples=texts, strategy='naive', **QUICK)
    assert trainer.num_updates == 1
    with pytest.raises(ValueError, match="strategy='dpp' is not known; choose one of naive, ddp, .*; did you mean ddp"):
        chatgpt.train(str(model_folder), samples=texts, strategy='dpp', **QUICK)


def two_ranks() -> tuple[int, int]:
    trainer = sft('ddp')
    return trainer.strategy.world_size, trainer.num_updates


def test_ddp_on_two_processes():
    assert run_distributed(two_ranks, 2) == [(2, 1), (2, 1)]


class Hidden(NaiveStrategy):
    """A third party's strategy that does not keep its masters in place."""

    abilities = Abilities(weights_in_place=False)


def ilql(strategy: Any) -> None:
    net = ILQLModel(tiny_causal_lm('gpt2'))
    net, optim = strategy.prepare((net, torch.optim.AdamW([p for p in net.parameters() if p.requires_grad])))
    ILQLTrainer(strategy, net, optim, rewarded([sequence([3], [4, 5])], [1.0]))


def nlpo(strategy: Any) -> None:
    actor, mask = (GPTActor(config=tiny_config('gpt2')) for _ in range(2))
    NLPOPolicy(strategy, actor, PPOConfig(nlpo_top_p=0.9), 1.0, mask, None)


def test_a_strategy_that_moves_its_masters_is_refused():
    for method, reason in ((ilql, 'masters hide the target heads'), (nlpo, 'cannot be copied between models')):
        sentence = f'{method.__name__.upper()} does not run under Hidden, whose .*{reason}; use ddp or fsdp'
        with pytest.raises(ValueError, match=sentence):
            method(Hidden())
        method(NaiveStrategy())
    kinds = (NaiveStrategy, DDPStrategy, FSDPStrategy, ColossalAIStrategy)
    assert [kind.abilities.weights_in_place for kind in kinds] == [True, True, True, False]
