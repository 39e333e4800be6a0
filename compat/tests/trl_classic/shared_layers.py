"""Half of the blocks shared with the reference, a model in 16 bits, a given optimizer and schedule."""

import sys

import torch
from torch.optim import Adam
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import AutoModelForCausalLMWithValueHead, PPOConfig, PPOTrainer, create_reference_model
from trl.core import LengthSampler

config = PPOConfig(
    model_name=sys.argv[1],
    learning_rate=1e-3,
    ppo_epochs=2,
    mini_batch_size=4,
    batch_size=8,
    gradient_accumulation_steps=1,
)
tokenizer = AutoTokenizer.from_pretrained(config.model_name)
model = AutoModelForCausalLM.from_pretrained(config.model_name, torch_dtype=torch.bfloat16)
model = AutoModelForCausalLMWithValueHead.from_pretrained(model)
ref_model = create_reference_model(model, num_shared_layers=1)
optimizer = Adam(filter(lambda p: p.requires_grad, model.parameters()), lr=config.learning_rate)
lr_scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.5)
ppo_trainer = PPOTrainer(
    config, model, ref_model=ref_model, tokenizer=tokenizer, optimizer=optimizer, lr_scheduler=lr_scheduler
)
before = {name: p.detach().clone() for name, p in model.named_parameters()}
lengths = LengthSampler(3, 7)
queries = [tokenizer.encode(f'line {i}: ', return_tensors='pt').squeeze(0) for i in range(8)]
all_stats = []
for _ in range(3):
    responses = []
    for query in queries:
        response = ppo_trainer.generate(query, do_sample=True, top_k=0, max_new_tokens=lengths(), return_prompt=False)
        responses.append(response.squeeze(0))
    rewards = [torch.tensor(-float((r == 5).sum()) + 0.1 * len(r)) for r in responses]
    all_stats.append(ppo_trainer.step(queries, responses, rewards))
moved = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
