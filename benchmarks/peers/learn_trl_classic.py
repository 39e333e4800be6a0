"""Worker: classic PPO in TRL 0.11.4: a value head on the policy's trunk, and the loop of its examples."""

from __future__ import annotations

import random

import torch
from lesson import BETAS, EPOCHS, EPS, Run, config_of
from trl import AutoModelForCausalLMWithValueHead, PPOConfig, PPOTrainer

run = Run()
lesson = run.lesson
config = config_of(lesson.start)


def load():
    return AutoModelForCausalLMWithValueHead.from_pretrained(
        lesson.start, config=config, torch_dtype=torch.float32, summary_dropout_prob=0.0
    )


model = load()
trainer = PPOTrainer(
    PPOConfig(
        batch_size=lesson.responses,
        mini_batch_size=lesson.train_batch,
        gradient_accumulation_steps=1,
        ppo_epochs=EPOCHS,
        init_kl_coef=lesson.kl_coef,
        adap_kl_ctrl=False,
        learning_rate=lesson.lr,
        seed=lesson.seed,
        accelerator_kwargs={'cpu': True},
    ),
    model,
    load(),
    run.tokenizer,
    optimizer=torch.optim.AdamW(model.parameters(), lr=lesson.lr, betas=BETAS, eps=EPS, weight_decay=0.0, fused=True),
)
end = run.tokenizer.eos_token_id
sampling = {'max_new_tokens': lesson.new_tokens, 'min_length': -1, 'do_sample': True, 'top_k': 0, 'top_p': 1.0}
order = random.Random(lesson.seed)
run.begin(model.pretrained_model)
while True:
    texts = order.sample(run.texts, lesson.responses)
    queries = [torch.tensor(run.ids(text)) for text in texts]
    ends = {'eos_token_id': end, 'pad_token_id': end}
    responses = trainer.generate(queries, batch_size=lesson.responses, return_prompt=False, **sampling, **ends)
    scores = run.reward(texts, [run.text_of(ids) for ids in responses])
    trainer.step(queries, responses, [torch.tensor(score) for score in scores])
    if not run.after_update(model.pretrained_model):
        break
