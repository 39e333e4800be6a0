"""Trains, saves a folder, and resumes from it with the trained value head."""

import sys

import torch
from transformers import AutoTokenizer
from trl import AutoModelForCausalLMWithValueHead, PPOConfig, PPOTrainer

model_name, folder = sys.argv[1:]
tokenizer = AutoTokenizer.from_pretrained(model_name)
config = PPOConfig(batch_size=4, mini_batch_size=4, ppo_epochs=1, learning_rate=1e-3)
queries = [tokenizer.encode(f'say {i} ', return_tensors='pt')[0] for i in range(4)]


def train(model, steps):
    ppo_trainer = PPOTrainer(config, model, None, tokenizer)
    for _ in range(steps):
        responses = ppo_trainer.generate(queries, return_prompt=False, do_sample=True, top_k=0, max_new_tokens=5)
        ppo_trainer.step(queries, responses, [torch.tensor(float(len(r))) for r in responses])
    return ppo_trainer


first = train(
    AutoModelForCausalLMWithValueHead.from_pretrained(
        model_name, v_head_init_strategy='normal', v_head_initializer_range=0.1
    ),
    2,
)
if first.accelerator.is_main_process:
    first.save_pretrained(folder)
first.accelerator.wait_for_everyone()

again = AutoModelForCausalLMWithValueHead.from_pretrained(folder)
saved = first.model.state_dict()
same = {name: torch.equal(saved[name], tensor) for name, tensor in again.state_dict().items()}
second = train(again, 1)
