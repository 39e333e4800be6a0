"""Worker: PPO with a value head on the policy's trunk, or GRPO, in this library."""

from __future__ import annotations

import sys
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from lesson import BETAS, EPOCHS, EPS, GROUP, Run

sys.path.append(str(Path(__file__).resolve().parent.parent))
from harness import ppo_trainer

from chatgpt.monitor.learning_rate import recommended_lr
from chatgpt.nn import AutoActor
from chatgpt.strategies import NaiveStrategy
from chatgpt.types import Prompt


def main() -> None:
    run = Run()
    lesson = run.lesson
    grouped = lesson.side == 'ours_grpo'
    actor = AutoActor(pretrained=lesson.start, value_head=None if grouped else True)
    # as in `chatgpt-rlhf ppo --critic shared`
    head_lr = recommended_lr(sum(p.numel() for p in actor.parameters()), 'rm', adapters=True)
    if lesson.side == 'ours_one_rate':
        head_lr = lesson.lr
    method: dict[str, Any] = {'max_grad_norm': None} if lesson.side == 'ours_unclipped' else {}
    method |= {'advantage_estimator': 'grpo', 'num_samples_per_prompt': GROUP, 'kl_in': 'loss'} if grouped else {}
    trainer = ppo_trainer(
        NaiveStrategy(seed=lesson.seed),
        actor,
        None,
        run.reward,
        deepcopy(actor) if lesson.kl_coef else None,
        optimizer=lambda learned: torch.optim.AdamW(
            learned if grouped else actor.parameter_groups(head_lr),
            lr=lesson.lr,
            betas=BETAS,
            eps=EPS,
            weight_decay=0.0,
            fused=True,
        ),
        tokenizer=run.tokenizer,
        experience_batch_size=lesson.responses // (GROUP if grouped else 1),
        train_batch_size=lesson.train_batch,
        max_epochs=EPOCHS,
        max_new_tokens=lesson.new_tokens,
        kl_coef=lesson.kl_coef,
        **method,
    )
    trainer.set_prompts([Prompt(ids=torch.tensor(run.ids(text)), text=text) for text in run.texts])
    run.begin(trainer.actor.model)
    while True:
        trainer.collect(1)
        trainer.learn()
        if not run.after_update(trainer.actor.model):
            return


if __name__ == '__main__':
    main()
