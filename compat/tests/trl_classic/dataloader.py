"""A torch dataset, several passes over its dataloader up to config.steps, statistics gathered and printed."""

import sys

import torch
from torch.utils.data import Dataset
from transformers import AutoTokenizer
from trl import AutoModelForCausalLMWithValueHead, PPOConfig, PPOTrainer


class Prompts(Dataset):
    def __init__(self, tokenizer, texts):
        self.rows = [{'query': t, 'input_ids': tokenizer.encode(t, return_tensors='pt')[0]} for t in texts]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return self.rows[i]


model_name, logging_dir = sys.argv[1:]
config = PPOConfig(
    steps=24,
    batch_size=4,
    mini_batch_size=4,
    ppo_epochs=1,
    learning_rate=1e-3,
    use_score_scaling=True,
    use_score_norm=True,
    score_clip=2.0,
    whiten_rewards=True,
    log_with='tensorboard',
    project_kwargs={'logging_dir': logging_dir},
    tracker_project_name='dataloader',
)
tokenizer = AutoTokenizer.from_pretrained(model_name)
model = AutoModelForCausalLMWithValueHead.from_pretrained(model_name)
dataset = Prompts(tokenizer, [f'number {i}: ' for i in range(10)])
ppo_trainer = PPOTrainer(
    config,
    model,
    tokenizer=tokenizer,
    dataset=dataset,
    data_collator=lambda rows: {key: [row[key] for row in rows] for key in rows[0]},
)
seen, all_stats = [], []
while len(all_stats) < config.total_ppo_epochs:
    for batch in ppo_trainer.dataloader:
        if len(all_stats) == config.total_ppo_epochs:
            break
        seen += batch['query']
        queries = [q.to(ppo_trainer.current_device) for q in batch['input_ids']]
        responses = ppo_trainer.generate(
            queries, batch_size=2, return_prompt=False, do_sample=True, top_k=0, max_new_tokens=6
        )
        batch['response'] = [tokenizer.decode(r) for r in responses]
        rewards = [torch.tensor([text.count('1') + 0.1 * len(text)]) for text in batch['response']]
        stats = ppo_trainer.step(queries, responses, rewards)
        ppo_trainer.log_stats(stats, batch, rewards)
        ppo_trainer.accelerator.print(stats['objective/kl'], stats['ppo/mean_scores'])
        gathered = ppo_trainer.accelerator.gather(torch.stack(rewards).flatten())
        all_stats.append(stats)
ppo_trainer.accelerator.end_training()
