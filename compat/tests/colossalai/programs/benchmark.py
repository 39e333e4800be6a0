"""A benchmark of OPT with adapters that counts parameters and prints throughput."""

import argparse
from copy import deepcopy

import torch
import torch.distributed as dist
from chatgpt.models.base import RewardModel
from chatgpt.models.opt import OPTActor, OPTCritic
from torch.optim import Adam
from transformers.models.opt.configuration_opt import OPTConfig

from chatgpt.trainer import PPOTrainer
from chatgpt.trainer.callbacks import PerformanceEvaluator
from chatgpt.trainer.strategies import ColossalAIStrategy, DDPStrategy, NaiveStrategy, Strategy


def get_model_numel(model, strategy: Strategy):
    numel = sum(p.numel() for p in model.parameters())
    if isinstance(strategy, ColossalAIStrategy) and strategy.stage == 3 and strategy.shard_init:
        numel *= dist.get_world_size()
    return numel


def preprocess_batch(samples):
    input_ids = torch.stack(samples)
    return {'input_ids': input_ids, 'attention_mask': torch.ones_like(input_ids, dtype=torch.long)}


def main(args):
    strategy = DDPStrategy() if args.strategy == 'ddp' else NaiveStrategy()
    torch.cuda.set_per_process_memory_fraction(args.cuda_mem_frac)
    config = OPTConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=2, ffn_dim=64, num_attention_heads=2, word_embed_proj_dim=32,
        max_position_embeddings=64, dropout=0.0, pad_token_id=1, bos_token_id=2, eos_token_id=2,
    )  # fmt: skip
    with strategy.model_init_context():
        actor = OPTActor(config=config, lora_rank=args.lora_rank).cuda()
        critic = OPTCritic(config=config, lora_rank=args.lora_rank).cuda()
        initial_model = deepcopy(actor).cuda()
        reward_model = RewardModel(deepcopy(critic.model), deepcopy(critic.value_head)).cuda()
    numels = [get_model_numel(m, strategy) for m in (actor, critic, initial_model, reward_model)]
    evaluator = PerformanceEvaluator(*numels, enable_grad_checkpoint=False, ignore_episodes=1)
    actor_optim = Adam(actor.parameters(), lr=5e-6)
    critic_optim = Adam(critic.parameters(), lr=5e-6)
    (actor, actor_optim), (critic, critic_optim), reward_model, initial_model = strategy.prepare(
        (actor, actor_optim), (critic, critic_optim), reward_model, initial_model
    )
    trainer = PPOTrainer(
        strategy, actor, critic, reward_model, initial_model, actor_optim, critic_optim,
        max_epochs=args.max_epochs, train_batch_size=args.train_batch_size,
        experience_batch_size=args.experience_batch_size, tokenizer=preprocess_batch, max_length=32, do_sample=True,
        temperature=1.0, top_k=50, pad_token_id=1, eos_token_id=2, use_cache=True, callbacks=[evaluator],
    )  # fmt: skip
    random_prompts = torch.randint(64, (32, 16), device=torch.cuda.current_device())
    trainer.fit(
        random_prompts,
        num_episodes=args.num_episodes,
        max_timesteps=args.max_timesteps,
        update_timesteps=args.update_timesteps,
    )
    print(f'Peak CUDA mem: {torch.cuda.max_memory_allocated() / 1024**3:.2f} GB')
    if strategy.is_rank_0:
        print('sizes', numels)


if __name__ == '__main__':
    parser = argparse.ArgumentParser()
    parser.add_argument('--strategy', choices=['naive', 'ddp'], default='naive')
    parser.add_argument('--num_episodes', type=int, default=3)
    parser.add_argument('--max_timesteps', type=int, default=8)
    parser.add_argument('--update_timesteps', type=int, default=8)
    parser.add_argument('--max_epochs', type=int, default=3)
    parser.add_argument('--train_batch_size', type=int, default=8)
    parser.add_argument('--experience_batch_size', type=int, default=8)
    parser.add_argument('--lora_rank', type=int, default=4)
    parser.add_argument('--cuda_mem_frac', type=float, default=1.0)
    main(parser.parse_args())
