"""Worker: PPO with four networks in TRL 1.12, the last version that has it (trl.experimental.ppo), fp32.

TRL's reward is a model over ids: a module decodes them, scores the texts, and puts the score into the single dimension
of its hidden states.
"""

from __future__ import annotations

import tempfile
from types import SimpleNamespace

import torch
from datasets import Dataset
from lesson import BETAS, EPOCHS, EPS, QUIET, Run, watcher
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification
from trl.experimental.ppo import PPOConfig, PPOTrainer

run = Run()
lesson = run.lesson
policy = AutoModelForCausalLM.from_pretrained(lesson.start, dtype='float32')
reference = AutoModelForCausalLM.from_pretrained(lesson.start, dtype='float32')
value = AutoModelForSequenceClassification.from_pretrained(lesson.start, num_labels=1, dtype='float32')
end = run.tokenizer.eos_token_id
prompts = {text: run.ids(text) for text in run.texts}
by_ids = {tuple(ids): text for text, ids in prompts.items()}


class Scorer(torch.nn.Module):
    """The trunk of the reward: ids, shape (B, T), to scores, shape (B, T, 1)."""

    def forward(self, input_ids, attention_mask, **_):
        scores = []
        for ids, mask in zip(input_ids.tolist(), attention_mask.tolist(), strict=True):
            kept = [i for i, m in zip(ids, mask, strict=True) if m]
            cut = next(n for n in range(1, len(kept) + 1) if tuple(kept[:n]) in by_ids)
            scores += run.reward([by_ids[tuple(kept[:cut])]], [run.text_of(kept[cut:])])
        states = torch.tensor(scores)[:, None, None].expand(*input_ids.shape, 1)
        return SimpleNamespace(hidden_states=[states])


class Reward(torch.nn.Module):
    base_model_prefix = 'scorer'

    def __init__(self):
        super().__init__()
        self.scorer, self.score = Scorer(), torch.nn.Identity()


groups = [*policy.parameters(), *value.parameters()]
optimizer = torch.optim.AdamW(groups, lr=lesson.lr, betas=BETAS, eps=EPS, weight_decay=0.0, fused=True)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
with tempfile.TemporaryDirectory() as folder:
    trainer = PPOTrainer(
        PPOConfig(
            output_dir=folder,
            per_device_train_batch_size=lesson.train_batch,
            gradient_accumulation_steps=lesson.responses // lesson.train_batch,
            num_mini_batches=lesson.responses // lesson.train_batch,
            num_ppo_epochs=EPOCHS,
            local_rollout_forward_batch_size=lesson.responses,
            response_length=lesson.new_tokens,
            temperature=1.0,
            stop_token_id=end,
            total_episodes=10**6 * lesson.responses,
            kl_coef=lesson.kl_coef,
            num_sample_generations=0,
            seed=lesson.seed,
            **QUIET,
        ),
        processing_class=run.tokenizer,
        model=policy,
        ref_model=reference,
        reward_model=Reward(),
        value_model=value,
        train_dataset=Dataset.from_dict({'input_ids': list(prompts.values())}),
        optimizers=(optimizer, scheduler),
        callbacks=[watcher(run, 1, policy)],
    )
    trainer.accelerator.gradient_accumulation_steps = 1  # else it makes one step of all train batches of an epoch
    run.begin(policy)
    trainer.train()
