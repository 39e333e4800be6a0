"""The quick start of the classic documentation: one query, one response, one step."""

import sys

import torch
from transformers import AutoTokenizer
from trl import AutoModelForCausalLMWithValueHead, PPOConfig, PPOTrainer, create_reference_model
from trl.core import respond_to_batch

model = AutoModelForCausalLMWithValueHead.from_pretrained(sys.argv[1])
model_ref = create_reference_model(model)
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
before = model.v_head.summary.weight.detach().clone()

ppo_config = PPOConfig(batch_size=1, mini_batch_size=1)
query_txt = 'this morning i went to the '
query_tensor = tokenizer.encode(query_txt, return_tensors='pt')
response_tensor = respond_to_batch(model, query_tensor)
ppo_trainer = PPOTrainer(ppo_config, model, model_ref, tokenizer)
reward = [torch.tensor(1.0)]
train_stats = ppo_trainer.step([query_tensor[0]], [response_tensor[0]], reward)
