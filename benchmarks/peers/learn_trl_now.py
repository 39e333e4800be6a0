"""Worker: GRPO in current TRL, fp32, with the paper's loss ('grpo')."""

from __future__ import annotations

import tempfile

from datasets import Dataset
from lesson import BETAS, EPOCHS, EPS, GROUP, QUIET, Run, watcher
from transformers import AutoModelForCausalLM
from trl import GRPOConfig, GRPOTrainer

run = Run()
lesson = run.lesson
model = AutoModelForCausalLM.from_pretrained(lesson.start, dtype='float32')


def score(prompts, completion_ids, **_):
    return run.reward(prompts, [run.text_of(ids) for ids in completion_ids])


with tempfile.TemporaryDirectory() as folder:
    config = GRPOConfig(
        output_dir=folder,
        per_device_train_batch_size=lesson.train_batch,
        gradient_accumulation_steps=1,
        steps_per_generation=lesson.responses // lesson.train_batch,
        num_generations=GROUP,
        num_iterations=EPOCHS,
        max_completion_length=lesson.new_tokens,
        temperature=1.0,
        beta=lesson.kl_coef,
        loss_type='grpo',
        max_steps=10**6,
        learning_rate=lesson.lr,
        adam_beta1=BETAS[0],
        adam_beta2=BETAS[1],
        adam_epsilon=EPS,
        lr_scheduler_type='constant',
        optim='adamw_torch_fused',
        weight_decay=0.0,
        seed=lesson.seed,
        **QUIET,
    )
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=score,
        args=config,
        processing_class=run.tokenizer,
        train_dataset=Dataset.from_dict({'prompt': run.texts}),
        callbacks=[watcher(run, lesson.responses // lesson.train_batch * EPOCHS)],
    )
    run.begin(model)
    trainer.train()
