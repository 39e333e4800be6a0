"""A loop of the classic era with some names of the second era in its config."""

import sys

import torch
from transformers import AutoTokenizer
from trl import AutoModelForCausalLMWithValueHead, PPOConfig, PPOTrainer

training_args = PPOConfig(
    learning_rate=1e-3,
    per_device_train_batch_size=2,
    gradient_accumulation_steps=2,
    num_ppo_epochs=2,
    kl_coef=0.1,
    adap_kl_ctrl=False,
    cliprange=0.1,
    kl_penalty='abs',
    report_to='none',
    missing_eos_penalty=1.0,
)
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
model = AutoModelForCausalLMWithValueHead.from_pretrained(sys.argv[1], torch_dtype=torch.bfloat16)
trainer = PPOTrainer(config=training_args, model=model, ref_model=None, tokenizer=tokenizer)
queries = [tokenizer.encode(f'{i} is ', return_tensors='pt')[0] for i in range(training_args.batch_size)]
responses = trainer.generate(queries, return_prompt=False, num_beams=2, max_new_tokens=4)
stats = trainer.step(queries, responses, [torch.tensor(1.0 * i) for i in range(len(queries))])
