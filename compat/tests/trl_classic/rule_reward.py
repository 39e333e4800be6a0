"""A rule as reward without a dataset: the number of letters 'a'."""

import sys

import torch
from transformers import AutoTokenizer
from trl import AutoModelForCausalLMWithValueHead, PPOConfig, PPOTrainer

model_name = sys.argv[1]
tokenizer = AutoTokenizer.from_pretrained(model_name)
model = AutoModelForCausalLMWithValueHead.from_pretrained(model_name)
ppo_config = PPOConfig(
    model_name=model_name,
    learning_rate=3e-3,
    batch_size=16,
    mini_batch_size=16,
    ppo_epochs=4,
    init_kl_coef=0.02,
    target=6.0,
    max_grad_norm=1.0,
    vf_coef=1.0,
)
ppo_trainer = PPOTrainer(model=model, config=ppo_config, tokenizer=tokenizer)


def reward_function(response):
    return torch.tensor(response.count('a') / 4)


prompts = ['say a: ', 'more: ', 'the letter is ', 'go on '] * 4
query_tensors = [tokenizer.encode(p, return_tensors='pt')[0] for p in prompts]
generation_kwargs = {'max_new_tokens': 8, 'do_sample': True, 'top_k': 0, 'top_p': 1.0, 'eos_token_id': -1}
mean_rewards = []
for _ in range(25):
    responses = ppo_trainer.generate(query_tensors, return_prompt=False, **generation_kwargs)
    texts = [tokenizer.decode(r) for r in responses]
    rewards = [reward_function(text) for text in texts]
    stats = ppo_trainer.step(query_tensors, responses, rewards)
    mean_rewards.append(sum(r.item() for r in rewards) / len(rewards))
