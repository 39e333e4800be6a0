"""A reward model: the whole classifier, then adapters; evaluated, saved, and read again by transformers."""

import sys

from datasets import load_dataset
from peft import LoraConfig
from transformers import AutoModelForSequenceClassification, AutoTokenizer
from trl import RewardConfig, RewardTrainer

folder, data, output = sys.argv[1:]
tokenizer = AutoTokenizer.from_pretrained(folder)
dataset = load_dataset(data)


def classifier():
    model = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1)
    model.config.pad_token_id = tokenizer.pad_token_id
    return model


def train(name, **more):
    trainer = RewardTrainer(
        model=classifier(),
        processing_class=tokenizer,
        args=RewardConfig(
            output_dir=f'{output}/{name}',
            per_device_train_batch_size=8,
            num_train_epochs=4,
            learning_rate=3e-3,
            logging_steps=2,
            eval_strategy='epoch',
            center_rewards_coefficient=0.01,
            save_strategy='no',
            max_length=64,
        ),
        train_dataset=dataset['train'],
        eval_dataset=dataset['test'],
        **more,
    )
    trainer.train()
    trainer.save_model(f'{output}/{name}')
    metrics = trainer.evaluate()
    trainer.log_metrics('eval', metrics)
    trainer.save_metrics('eval', metrics)
    return trainer


full = train('full')
adapted = train(
    'adapted', peft_config=LoraConfig(r=4, task_type='SEQ_CLS', target_modules='all-linear', modules_to_save=['score'])
)
