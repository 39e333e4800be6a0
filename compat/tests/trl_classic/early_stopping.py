"""A learning rate that is far too high, with early stopping by KL and skipped batches of high ratio."""

import sys

import torch
from transformers import AutoTokenizer
from trl import AutoModelForCausalLMWithValueHead, PPOConfig, PPOTrainer, set_seed


def train(**brakes):
    set_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
    model = AutoModelForCausalLMWithValueHead.from_pretrained(sys.argv[1])
    config = PPOConfig(batch_size=8, mini_batch_size=2, ppo_epochs=6, learning_rate=3e-2, **brakes)
    ppo_trainer = PPOTrainer(config, model, None, tokenizer)
    queries = [tokenizer.encode(f'{i} and ', return_tensors='pt')[0] for i in range(8)]
    responses = ppo_trainer.generate(
        queries, return_prompt=False, do_sample=True, top_k=0, max_new_tokens=6, eos_token_id=-1
    )
    stats = ppo_trainer.step(queries, responses, [torch.tensor(float(i % 3)) for i in range(8)])
    return stats, sum(
        float((p - q).abs().sum()) for p, q in zip(model.parameters(), ppo_trainer.ref_model.parameters(), strict=True)
    )


free, far = train(ratio_threshold=1e9)
stopped, near = train(ratio_threshold=1e9, early_stopping=True, target_kl=0.05)
guarded, kept = train(ratio_threshold=1.0)
