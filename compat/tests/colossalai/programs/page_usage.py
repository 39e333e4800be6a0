"""The calls of the usage section of its page in order, with small values for its ellipses."""

from copy import deepcopy

import torch
from colossalai.nn.optimizer import HybridAdam

from chatgpt.nn import GPTActor, GPTCritic, RewardModel
from chatgpt.trainer import PPOTrainer
from chatgpt.trainer.strategies import ColossalAIStrategy

strategy = ColossalAIStrategy()

with strategy.model_init_context():
    actor = GPTActor(pretrained='gpt2')
    critic = GPTCritic()
    initial_model = deepcopy(actor).cuda()
    reward_model = RewardModel(deepcopy(critic.model), deepcopy(critic.value_head)).cuda()

actor_optim = HybridAdam(actor.parameters(), lr=5e-6)
critic_optim = HybridAdam(critic.parameters(), lr=5e-6)

(actor, actor_optim), (critic, critic_optim), reward_model, initial_model = strategy.prepare(
    (actor, actor_optim), (critic, critic_optim), reward_model, initial_model
)

strategy.load_model(actor, 'actor_checkpoint.pt', strict=False)
strategy.load_optimizer(actor_optim, 'actor_optim_checkpoint.pt')

dots = {'max_length': 24, 'train_batch_size': 2, 'experience_batch_size': 2}
trainer = PPOTrainer(
    strategy, actor, critic, reward_model, initial_model, actor_optim, critic_optim, **dots
)  # fmt: skip

dataset = torch.randint(50, (4, 6))
trainer.fit(dataset, num_episodes=1, max_timesteps=1, update_timesteps=1)

strategy.save_model(actor, 'actor_checkpoint.pt', only_rank0=True)
strategy.save_optimizer(actor_optim, 'actor_optim_checkpoint.pt', only_rank0=False)
