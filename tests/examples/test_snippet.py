"""Public names stay: a script of the first users runs unchanged, with a local folder in place of the hub's gpt2."""

from __future__ import annotations

from pathlib import Path

import pytest

from chatgpt.testing.processes import run_distributed

SNIPPET = """
from copy import deepcopy

import torch

from chatgpt.nn import BLOOMActor, BLOOMCritic, GPTActor, GPTCritic, OPTActor, OPTCritic, RewardModel
from chatgpt.trainer import PPOTrainer, SFTTrainer
from chatgpt.strategies import ColossalAIStrategy, DDPStrategy, NaiveStrategy

strategy = STRATEGY
with strategy.model_init_context():
    actor = GPTActor(pretrained=GPT2); critic = GPTCritic(config=CONFIG)
    initial_model = deepcopy(actor)
    reward_model = RewardModel(deepcopy(critic.model), deepcopy(critic.value_head))
actor_optim = torch.optim.AdamW(actor.parameters(), lr=1e-4)
critic_optim = torch.optim.AdamW(critic.parameters(), lr=1e-4)
(actor, actor_optim), (critic, critic_optim), reward_model, initial_model = strategy.prepare(
    (actor, actor_optim), (critic, critic_optim), reward_model, initial_model)
strategy.save_model(actor, FOLDER + '/before.pt', only_rank0=True)
strategy.load_model(actor, FOLDER + '/before.pt', strict=False)
trainer = PPOTrainer(strategy, actor, critic, reward_model, initial_model, actor_optim, critic_optim,
                     kl_coef=0.1, train_batch_size=8, buffer_limit=0, buffer_cpu_offload=True, eps_clip=0.2,
                     value_clip=0.4, experience_batch_size=8, max_epochs=1, tokenizer=None,
                     sample_replay_buffer=False, dataloader_pin_memory=True, callbacks=[], max_length=24, top_k=10)
prompts = [torch.tensor([3, 4, 5 + i]) for i in range(8)]
trainer.fit(prompts, num_episodes=1, max_timesteps=2, update_timesteps=1)
strategy.save_model(actor, FOLDER + '/actor.pt', only_rank0=True)
strategy.save_optimizer(actor_optim, FOLDER + '/actor_optim.pt', only_rank0=False)
strategy.load_optimizer(actor_optim, FOLDER + '/actor_optim.pt')
"""


def run_snippet(strategy: str, folder: str) -> int:
    from chatgpt.nn import GPTActor
    from chatgpt.testing.fakes import tiny_config

    names = {'GPT2': f'{folder}/gpt2', 'CONFIG': tiny_config('gpt2'), 'FOLDER': folder}
    if not Path(folder, 'gpt2').exists():
        GPTActor(config=tiny_config('gpt2')).save_pretrained(Path(folder, 'gpt2'))
    exec(SNIPPET.replace('STRATEGY', strategy), names)
    trainer = names['trainer']
    names['strategy'].close()
    return trainer.phase


@pytest.mark.parametrize(('strategy', 'world_size'), [('NaiveStrategy()', 1), ('DDPStrategy()', 2)])
def test_runs_as_written(strategy, world_size, tmp_path):
    import torch

    if world_size == 1:
        assert run_snippet(strategy, str(tmp_path)) == 2
    else:
        run_snippet('NaiveStrategy()', str(tmp_path))  # writes the model's folder before two processes load it
        assert run_distributed(run_snippet, world_size, strategy, str(tmp_path)) == [2, 2]
    weights = torch.load(tmp_path / 'actor.pt', weights_only=True)
    assert all(t.dtype == torch.float32 for t in weights.values())
    assert (tmp_path / 'actor_optim.pt').exists()
