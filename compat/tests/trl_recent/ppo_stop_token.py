"""PPO with a stop token by its id and a penalty for responses without the end token; k3, a rule as reward."""

import sys

from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl.experimental.ppo import PPOConfig, PPOTrainer

folder, output = sys.argv[1:]
tokenizer = AutoTokenizer.from_pretrained(folder)
dataset = Dataset.from_dict({'prompt': ['one day a cat', 'one day a dog', 'one day a fish', 'one day a frog'] * 4})
dataset = dataset.map(lambda row: {'input_ids': tokenizer(row['prompt'])['input_ids']}, remove_columns=['prompt'])
seen = []


def reward(prompts, responses, **_):
    seen.extend(responses)
    return [0.25 for _ in responses]


config = PPOConfig(
    output_dir=output,
    per_device_train_batch_size=8,
    total_episodes=16,
    num_ppo_epochs=1,
    response_length=6,
    stop_token_id=tokenizer.convert_tokens_to_ids('.'),
    missing_eos_penalty=1.0,
    kl_estimator='k3',
    temperature=1.0,
    learning_rate=1e-3,
    lr_scheduler_type='constant',
    save_strategy='no',
    report_to='none',
    seed=1,
)
trainer = PPOTrainer(
    config,
    tokenizer,
    AutoModelForCausalLM.from_pretrained(folder),
    AutoModelForCausalLM.from_pretrained(folder),
    reward,
    dataset,
)
trainer.train()
