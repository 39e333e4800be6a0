"""PPO as in coati 0.3: loaders for `fit`, models moved to bf16, LoRA's manager, weights and optimizer saved."""

import argparse

import torch
import torch.distributed as dist
from coati.dataset import PromptDataset, SupervisedDataset
from coati.models.gpt import GPTRM, GPTActor, GPTCritic
from coati.trainer import PPOTrainer
from coati.trainer.callbacks import SaveCheckpoint
from coati.trainer.strategies import DDPStrategy, GeminiStrategy, LowLevelZeroStrategy, NaiveStrategy
from colossalai.nn.optimizer import HybridAdam
from torch.optim import Adam
from torch.utils.data import DataLoader
from transformers import AutoTokenizer, BloomTokenizerFast


def main(args):
    kinds = {'naive': NaiveStrategy, 'ddp': DDPStrategy, 'gemini': GeminiStrategy, 'zero2': LowLevelZeroStrategy}
    strategy = kinds[args.strategy]()
    with strategy.model_init_context():
        initial_model = GPTActor(pretrained=args.pretrain).to(torch.bfloat16).to(torch.cuda.current_device())
        reward_model = GPTRM(pretrained=args.pretrain).half()
        actor = GPTActor(pretrained=args.pretrain, lora_rank=args.lora_rank).to(torch.bfloat16)
        critic = GPTCritic(pretrained=args.pretrain, use_action_mask=True)
    kind = HybridAdam if args.strategy in ('gemini', 'zero2') else Adam
    actor_optim, critic_optim = kind(actor.parameters(), lr=1e-3), kind(critic.parameters(), lr=1e-3)
    tokenizer = (AutoTokenizer if args.pretrain else BloomTokenizerFast).from_pretrained(args.pretrain)
    tokenizer.padding_side = 'left'
    prompts = DataLoader(PromptDataset(data_path=args.prompts, tokenizer=tokenizer, max_length=12), batch_size=2)
    texts = DataLoader(SupervisedDataset(args.texts, tokenizer, max_length=64), batch_size=1)
    assert not (dist.is_initialized() and dist.get_world_size() > 1)
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
        tokenizer=tokenizer,
        kl_coef=0.1,
        ptx_coef=0.5,
        train_batch_size=2,
        max_length=20,
        use_cache=True,
        do_sample=True,
        top_k=50,
        offload_inference_models=True,
        callbacks=[SaveCheckpoint('saved', 1, strategy, actor, critic, actor_optim, critic_optim)],
    )
    trainer.fit(
        num_episodes=2,
        num_collect_steps=2,
        num_update_steps=3,
        prompt_dataloader=prompts,
        pretrain_dataloader=texts,
        log_dir='logs',
        use_wandb=False,
    )
    if args.lora_rank:
        from coati.models.lora import LORA_MANAGER

        LORA_MANAGER.merge_weights = True
        actor.eval()
    strategy.save_model(actor, 'actor.pt', only_rank0=True)
    strategy.save_pretrained(actor, path='actor', only_rank0=True, tokenizer=tokenizer)
    strategy.save_optimizer(actor_optim, f'optim_{torch.cuda.current_device()}.pt', only_rank0=False)
    print('phases', trainer.phase, 'updates', trainer.num_updates, 'prompts', trainer.prompts[0].ids.tolist())


if __name__ == '__main__':
    parser = argparse.ArgumentParser()
    parser.add_argument('prompts')
    parser.add_argument('texts')
    parser.add_argument('--strategy', default='naive')
    parser.add_argument('--pretrain')
    parser.add_argument('--lora_rank', type=int, default=0)
    main(parser.parse_args())
