"""PPO on random prompts as in February 2023: models that no strategy has prepared, functions for the cache, and a copy
of the critic as the reward model."""

import argparse
from copy import deepcopy

import torch
from chatgpt.nn.generation_utils import gpt_prepare_inputs_fn, update_model_kwargs_fn
from torch.optim import Adam
from transformers import AutoTokenizer

from chatgpt.nn import GPTActor, GPTCritic, RewardModel
from chatgpt.trainer import PPOTrainer
from chatgpt.trainer.strategies import DDPStrategy, NaiveStrategy


def preprocess_batch(samples):
    input_ids = torch.stack(samples)
    return {'input_ids': input_ids, 'attention_mask': torch.ones_like(input_ids, dtype=torch.long)}


def main(args):
    strategy = NaiveStrategy() if args.strategy == 'naive' else DDPStrategy()
    with strategy.model_init_context():
        actor = GPTActor(pretrained=args.pretrain).cuda()
        critic = GPTCritic(pretrained=args.pretrain).cuda()
        initial_model = deepcopy(actor).cuda()
        reward_model = RewardModel(deepcopy(critic.model), deepcopy(critic.value_head)).cuda()
    actor_optim = Adam(actor.parameters(), lr=5e-4)
    critic_optim = Adam(critic.parameters(), lr=5e-4)
    tokenizer = AutoTokenizer.from_pretrained(args.pretrain)
    trainer = PPOTrainer(
        strategy,
        actor,
        critic,
        reward_model,
        initial_model,
        actor_optim,
        critic_optim,
        max_epochs=args.max_epochs,
        train_batch_size=args.train_batch_size,
        tokenizer=preprocess_batch,
        max_length=24,
        do_sample=True,
        temperature=1.0,
        top_k=50,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        prepare_inputs_fn=gpt_prepare_inputs_fn,
        update_model_kwargs_fn=update_model_kwargs_fn,
    )
    random_prompts = torch.randint(len(tokenizer), (20, 8), device=torch.cuda.current_device())
    trainer.fit(
        random_prompts,
        num_episodes=args.num_episodes,
        max_timesteps=args.max_timesteps,
        update_timesteps=args.update_timesteps,
    )
    strategy.save_model(actor, args.save_path, only_rank0=True)
    strategy.save_optimizer(actor_optim, 'actor_optim_%d.pt' % (torch.cuda.current_device()), only_rank0=False)
    print('phases', trainer.phase, 'updates', trainer.num_updates)


if __name__ == '__main__':
    parser = argparse.ArgumentParser()
    parser.add_argument('--strategy', choices=['naive', 'ddp'], default='naive')
    parser.add_argument('--pretrain', type=str, default=None)
    parser.add_argument('--save_path', type=str, default='actor.pt')
    parser.add_argument('--num_episodes', type=int, default=50)
    parser.add_argument('--max_timesteps', type=int, default=10)
    parser.add_argument('--update_timesteps', type=int, default=10)
    parser.add_argument('--max_epochs', type=int, default=5)
    parser.add_argument('--train_batch_size', type=int, default=8)
    main(parser.parse_args())
