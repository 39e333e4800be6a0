"""Worker: the work of a case in this library."""

from __future__ import annotations

import sys
from copy import deepcopy
from functools import partial
from pathlib import Path

import torch
from work import ADAMW, EOS, GROUP, KL_COEF, PAD, Case, begin, tokenizer, versions

sys.path.append(str(Path(__file__).resolve().parent.parent))
from harness import ppo_trainer

MAX_TOKENS = {'cpu': 512, 'cuda': 16384}
"""padded tokens of a micro-batch; the split of an optimizer step changes no result"""


def make_trainer(case: Case):
    from chatgpt.nn import GPTActor, GPTCritic, RewardModel
    from chatgpt.strategies import NaiveStrategy

    strategy = NaiveStrategy(seed=0, precision=case.precision.split()[0], device=case.device)
    shared, groups = case.peer == 'trl_classic', case.method != 'ppo'
    actor = GPTActor(pretrained=case.model, value_head=True if shared else None)
    initial = deepcopy(actor) if case.kl else None
    critic = None if shared or groups else GPTCritic(pretrained=case.model)
    if groups:
        score = lambda prompts, responses: [float(len(text) % 7) for text in responses]  # noqa: E731
    elif shared:
        score = lambda prompts, responses: [0.0] * len(prompts)  # noqa: E731
    else:
        score = RewardModel(deepcopy(critic.model))
    method = {}
    if groups:
        method = {'advantage_estimator': case.method, 'num_samples_per_prompt': GROUP}
    if case.method == 'grpo':
        method['kl_in'] = 'loss'
    trainer = ppo_trainer(
        strategy,
        actor,
        critic,
        score,
        initial,
        optimizer=partial(torch.optim.AdamW, **ADAMW),
        tokenizer=tokenizer() if groups else None,
        experience_batch_size=case.num_prompts,
        train_batch_size=case.sequences,
        max_epochs=case.epochs,
        max_new_tokens=case.new_tokens,
        kl_coef=KL_COEF if case.kl else 0.0,
        max_tokens_per_batch=MAX_TOKENS[case.device],
        max_grad_norm=1.0 if groups else None,
        eos_token_id=EOS if case.lengths == 'eos' else None,
        pad_token_id=PAD,
        **method,
    )
    trainer.set_prompts(list(case.prompts()))
    return trainer


def main() -> None:
    case, line = begin()
    trainer = make_trainer(case)
    networks = sum(m is not None for m in (trainer.actor, trainer.critic, trainer.maker.reference.initial_model))
    line.ready(**versions(), networks=networks + (case.peer == 'trl_ppo'))
    while line.wait():
        trainer.collect(1)
        experiences = trainer.last_experiences
        tokens = sum(e.num_actions for e in experiences)
        metrics = trainer.learn()
        line.done(tokens, len(experiences))
        parts = {k: round(v, 3) for k, v in metrics.items() if k.startswith('perf/') and k.endswith('_cpu_s')}
        print(parts, file=sys.stderr)


if __name__ == '__main__':
    main()
