"""Completions of the policy before and after PPO, with a reward module in TRL's protocol of backbone and score."""

import sys
from types import SimpleNamespace

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer
from trl import PPOConfig, PPOTrainer

folder, rewards, output = sys.argv[1:]
tokenizer = AutoTokenizer.from_pretrained(folder)
wanted = tokenizer.convert_tokens_to_ids('fox')


class LikesFoxes(torch.nn.Module):
    """A reward module with the share of foxes up to each token as its score."""

    base_model_prefix = 'body'

    def __init__(self):
        super().__init__()
        self.__dict__['body'] = self

    def forward(self, input_ids, attention_mask, **_):
        count = ((input_ids == wanted) & attention_mask.bool()).cumsum(1)
        return SimpleNamespace(hidden_states=[(count / attention_mask.cumsum(1).clamp(min=1))[..., None]])

    def score(self, states):
        return states


def rows(prompts):
    return Dataset.from_list([{'input_ids': tokenizer(p)['input_ids']} for p in prompts])


trainer = PPOTrainer(
    args=PPOConfig(
        output_dir=output,
        per_device_train_batch_size=16,
        per_device_eval_batch_size=2,
        total_episodes=48,
        num_ppo_epochs=4,
        response_length=6,
        temperature=1.0,
        learning_rate=3e-3,
        kl_coef=0.0,
        num_sample_generations=1,
        save_strategy='no',
        seed=3,
    ),
    processing_class=tokenizer,
    model=AutoModelForCausalLM.from_pretrained(folder),
    ref_model=None,
    reward_model=LikesFoxes(),
    value_model=AutoModelForSequenceClassification.from_pretrained(rewards, num_labels=1),
    train_dataset=rows(['one day a', 'one day the', 'a big', 'the small'] * 4),
    eval_dataset=rows(['one day a', 'the big', 'a fox']),
)
before = trainer.generate_completions()
few = trainer.generate_completions(sampling=True)
trainer.train()
after = trainer.generate_completions()
