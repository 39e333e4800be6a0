"""PPO with a separate value model, mini-batches, gradient accumulation and a callback that ends the run."""

import sys

from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer, TrainerCallback
from trl import PPOConfig, PPOTrainer

folder, rewards, output = sys.argv[1:]
tokenizer = AutoTokenizer.from_pretrained(folder)
prompts = ['one day a cat', 'one day a dog', 'one day a fish', 'one day a frog went']
dataset = Dataset.from_dict({'input_ids': [tokenizer(p)['input_ids'] for p in prompts * 8]})


class StopAfterTwo(TrainerCallback):
    def __init__(self):
        self.logged = []

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.logged.append(logs['objective/scores'])

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 2:
            control.should_training_stop = True


watch = StopAfterTwo()
value_model = AutoModelForSequenceClassification.from_pretrained(rewards, num_labels=1)
head_before = value_model.score.weight.detach().clone()
trainer = PPOTrainer(
    args=PPOConfig(
        output_dir=output,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=4,
        num_mini_batches=2,
        num_ppo_epochs=2,
        total_episodes=32,
        response_length=5,
        learning_rate=1e-3,
        vf_coef=0.5,
        max_grad_norm=0.3,
        kl_coef=0.1,
        warmup_steps=1,
        save_strategy='no',
    ),
    processing_class=tokenizer,
    model=AutoModelForCausalLM.from_pretrained(folder),
    ref_model=AutoModelForCausalLM.from_pretrained(folder),
    reward_model=AutoModelForSequenceClassification.from_pretrained(rewards, num_labels=1),
    value_model=value_model,
    train_dataset=dataset,
    callbacks=[watch],
)
trainer.train()
