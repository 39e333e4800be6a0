"""PPO with adapters and without a reference model; it saves the adapter."""

import sys

from datasets import Dataset
from peft import AutoPeftModelForCausalLM, LoraConfig
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer
from trl import PPOConfig, PPOTrainer

folder, rewards, output = sys.argv[1:]
tokenizer = AutoTokenizer.from_pretrained(folder)
dataset = Dataset.from_dict({'input_ids': [tokenizer('one day a cat')['input_ids']] * 8})
trainer = PPOTrainer(
    args=PPOConfig(
        output_dir=output,
        per_device_train_batch_size=8,
        total_episodes=16,
        response_length=4,
        learning_rate=1e-2,
        save_strategy='no',
    ),
    processing_class=tokenizer,
    model=AutoModelForCausalLM.from_pretrained(folder),
    ref_model=None,
    reward_model=AutoModelForSequenceClassification.from_pretrained(rewards, num_labels=1),
    value_model=AutoModelForSequenceClassification.from_pretrained(rewards, num_labels=1),
    train_dataset=dataset,
    peft_config=LoraConfig(r=4, lora_alpha=8, lora_dropout=0.0, target_modules=['c_attn'], task_type='CAUSAL_LM'),
)
trainer.train()
trainer.save_model(output)
reloaded = AutoPeftModelForCausalLM.from_pretrained(output)
