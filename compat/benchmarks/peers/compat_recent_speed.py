"""Worker: `PPOTrainer.train()` of `chatgpt_compat.trl` doing the work of `trl_ppo.py`."""

from __future__ import annotations

import tempfile

from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, TrainerCallback
from work import ADAMW, EOS, KL_COEF, NEW_TOKENS, SEQUENCES, ServeUpdates, begin, prompt_ids, tokenizer, versions

from chatgpt_compat.trl import PPOConfig, PPOTrainer

case, line = begin()


def count() -> tuple[int, int]:
    experiences = trainer.inner.last_experiences
    return sum(e.num_actions for e in experiences), len(experiences)


class Serve(ServeUpdates, TrainerCallback):
    pass


with tempfile.TemporaryDirectory() as folder:
    trainer = PPOTrainer(
        PPOConfig(
            output_dir=folder,
            per_device_train_batch_size=SEQUENCES,
            num_ppo_epochs=case.epochs,
            response_length=NEW_TOKENS,
            temperature=1.0,
            stop_token_id=EOS if case.lengths == 'eos' else None,
            total_episodes=10**6 * SEQUENCES,
            kl_coef=KL_COEF,
            learning_rate=ADAMW['lr'],
            lr_scheduler_type='constant',
            num_sample_generations=0,
            bf16=case.precision == 'bf16',
            report_to='none',
            save_strategy='no',
            disable_tqdm=True,
            seed=0,
        ),
        processing_class=tokenizer(),
        model=AutoModelForCausalLM.from_pretrained(case.model, dtype='float32'),
        ref_model=AutoModelForCausalLM.from_pretrained(case.model, dtype='float32'),
        reward_model=AutoModelForSequenceClassification.from_pretrained(case.model, num_labels=1, dtype='float32'),
        value_model=AutoModelForSequenceClassification.from_pretrained(case.model, num_labels=1, dtype='float32'),
        train_dataset=Dataset.from_dict({'input_ids': prompt_ids(SEQUENCES).tolist()}),
        callbacks=[Serve(line, count)],
    )
    line.ready(**versions('transformers'), networks=4)
    if line.wait():
        trainer.train()
