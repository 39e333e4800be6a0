"""Two turns with a tool between them; its output is in the response, and the mask excludes it from the loss."""

import sys

import torch
from transformers import AutoTokenizer
from trl import AutoModelForCausalLMWithValueHead, PPOConfig, PPOTrainer, create_reference_model

model_name = sys.argv[1]
tokenizer = AutoTokenizer.from_pretrained(model_name)
model = AutoModelForCausalLMWithValueHead.from_pretrained(model_name)
model_ref = create_reference_model(model)
ppo_config = PPOConfig(batch_size=4, mini_batch_size=4, ppo_epochs=1, learning_rate=1e-3, seed=1)
ppo_trainer = PPOTrainer(ppo_config, model, model_ref, tokenizer)

generation_kwargs = {'do_sample': True, 'top_k': 0, 'top_p': 1.0, 'max_new_tokens': 5, 'eos_token_id': -1}
tool = tokenizer.encode(' tool says 4. ', return_tensors='pt')[0]
query_tensors = [tokenizer.encode(f'2 + {i} = ', return_tensors='pt')[0] for i in range(4)]
first = ppo_trainer.generate(query_tensors, return_prompt=False, **generation_kwargs)
contexts = [torch.cat([q, r, tool]) for q, r in zip(query_tensors, first, strict=True)]
second = ppo_trainer.generate(contexts, return_prompt=False, **generation_kwargs)
response_tensors = [torch.cat([a, tool, b]) for a, b in zip(first, second, strict=True)]
masks = [
    torch.cat([torch.ones_like(a), torch.zeros_like(tool), torch.ones_like(b)])
    for a, b in zip(first, second, strict=True)
]
scores = [torch.tensor(float(i)) for i in range(4)]
stats = ppo_trainer.step(query_tensors, response_tensors, scores, response_masks=masks)
