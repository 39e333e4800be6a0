"""PPO on prompts of a csv file as in March 2023: pandas, a tokenize function that pads and moves to the device,
checkpoints by episode, HybridAdam imported for every strategy."""

import argparse
from copy import deepcopy

import pandas as pd
import torch
from chatgpt.models.base import RewardModel
from chatgpt.models.gpt import GPTActor, GPTCritic
from colossalai.nn.optimizer import HybridAdam
from torch.optim import Adam
from transformers import AutoTokenizer

from chatgpt.trainer import PPOTrainer
from chatgpt.trainer.strategies import ColossalAIStrategy, DDPStrategy, NaiveStrategy


def main(args):
    if args.strategy == 'naive':
        strategy = NaiveStrategy()
    elif args.strategy == 'ddp':
        strategy = DDPStrategy()
    else:
        strategy = ColossalAIStrategy(stage=2, placement_policy='cuda')
    with strategy.model_init_context():
        actor = GPTActor(pretrained=args.pretrain, lora_rank=args.lora_rank).to(torch.cuda.current_device())
        critic = GPTCritic(pretrained=args.pretrain, lora_rank=args.lora_rank).to(torch.cuda.current_device())
        initial_model = deepcopy(actor)
        reward_model = RewardModel(deepcopy(critic.model), deepcopy(critic.value_head)).to(torch.cuda.current_device())
    adam = HybridAdam if args.strategy.startswith('colossalai') else Adam
    actor_optim = adam(actor.parameters(), lr=1e-3)
    critic_optim = adam(critic.parameters(), lr=1e-3)
    tokenizer = AutoTokenizer.from_pretrained(args.pretrain)
    tokenizer.padding_side = 'left'
    dataset = pd.read_csv(args.prompt_path)['prompt']

    def tokenize_fn(texts):
        batch = tokenizer(texts, return_tensors='pt', max_length=32, padding='max_length', truncation=True)
        return {k: v.cuda() for k, v in batch.items()}

    (actor, actor_optim), (critic, critic_optim), reward_model, initial_model = strategy.prepare(
        (actor, actor_optim), (critic, critic_optim), reward_model, initial_model
    )
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
        experience_batch_size=args.experience_batch_size,
        tokenizer=tokenize_fn,
        max_length=48,
        do_sample=True,
        temperature=1.0,
        top_k=50,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    trainer.fit(
        dataset,
        num_episodes=args.num_episodes,
        max_timesteps=args.max_timesteps,
        update_timesteps=args.update_timesteps,
    )
    strategy.save_model(actor, args.save_path, only_rank0=True)
    if args.need_optim_ckpt:
        strategy.save_optimizer(actor_optim, 'optim_%d.pt' % (torch.cuda.current_device()), only_rank0=False)
    first = tokenizer(dataset[0])['input_ids']
    assert trainer.prompts[0].ids.tolist() == first, 'padding travels with no prompt'


if __name__ == '__main__':
    parser = argparse.ArgumentParser()
    parser.add_argument('prompt_path')
    parser.add_argument('--strategy', choices=['naive', 'ddp', 'colossalai_zero2'], default='naive')
    parser.add_argument('--pretrain', type=str, default=None)
    parser.add_argument('--save_path', type=str, default='actor_checkpoint_prompts.pt')
    parser.add_argument('--need_optim_ckpt', type=bool, default=False)
    parser.add_argument('--num_episodes', type=int, default=10)
    parser.add_argument('--max_timesteps', type=int, default=10)
    parser.add_argument('--update_timesteps', type=int, default=10)
    parser.add_argument('--max_epochs', type=int, default=5)
    parser.add_argument('--train_batch_size', type=int, default=8)
    parser.add_argument('--experience_batch_size', type=int, default=8)
    parser.add_argument('--lora_rank', type=int, default=0)
    main(parser.parse_args())
