"""A callback with ColossalAI's hooks, and positional settings of the trainer."""

import sys
from copy import deepcopy

import torch
from torch.optim import Adam

from chatgpt.nn import GPTActor, GPTCritic, RewardModel
from chatgpt.trainer import PPOTrainer
from chatgpt.trainer.callbacks import Callback
from chatgpt.trainer.strategies import NaiveStrategy


class Diary(Callback):
    def __init__(self):
        self.pages = []

    def on_fit_start(self):
        super().on_fit_start()
        self.pages.append('fit')

    def on_episode_start(self, episode):
        self.pages.append(f'episode {episode}')

    def on_episode_end(self, episode):
        self.pages.append(f'ended {episode}')

    def on_make_experience_end(self, experience):
        self.pages.append(f'made {len(experience)}')

    def on_learn_epoch_start(self, epoch):
        self.pages.append(f'epoch {epoch}')

    def on_learn_batch_end(self, metrics, experience):
        self.pages.append('batch' if 'policy_loss' in metrics or metrics else 'nothing')

    def on_fit_end(self):
        self.pages.append('end')


strategy = NaiveStrategy()
actor, critic = GPTActor(pretrained=sys.argv[1]), GPTCritic(pretrained=sys.argv[1])
initial_model = deepcopy(actor)
reward_model = RewardModel(deepcopy(critic.model), deepcopy(critic.value_head))
optims = Adam(actor.parameters(), lr=1e-4), Adam(critic.parameters(), lr=1e-4)
diary = Diary()
trainer = PPOTrainer(
    strategy, actor, critic, reward_model, initial_model, *optims,
    0.05, 4, 0, True, 0.1, 0.3, 4, 2, None, False, True, [diary], max_length=16,
)  # fmt: skip
trainer.fit([torch.tensor([3, 4, 5, 6 + i]) for i in range(8)], num_episodes=2, max_timesteps=1, update_timesteps=1)
c = trainer.config
print(c.kl_coef, c.train_batch_size, c.eps_clip, c.value_clip, c.experience_batch_size, c.max_epochs)
print(diary.pages)
