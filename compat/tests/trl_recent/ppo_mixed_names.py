"""A partly migrated script: the newer trainer with names of the older config."""

import sys

from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer
from trl import PPOConfig, PPOTrainer, create_reference_model

folder, rewards, output = sys.argv[1:]
config = PPOConfig(
    output_dir=output,
    batch_size=8,
    mini_batch_size=4,
    ppo_epochs=3,
    init_kl_coef=0.3,
    num_ppo_epochs=3,
    cliprange=0.1,
    target_kl=0.2,
    response_length=4,
    total_episodes=8,
    save_strategy='no',
)
config.learning_rate = 2e-4
tokenizer = AutoTokenizer.from_pretrained(folder)
model = AutoModelForCausalLM.from_pretrained(folder)
trainer = PPOTrainer(
    config=config,
    tokenizer=tokenizer,
    policy=model,
    ref_policy=create_reference_model(model),
    reward_model=AutoModelForSequenceClassification.from_pretrained(rewards, num_labels=1),
    value_model=AutoModelForSequenceClassification.from_pretrained(rewards, num_labels=1),
    train_dataset=Dataset.from_dict({'input_ids': [tokenizer('one day a cat')['input_ids']] * 8}),
)
trainer.train()
