"""A T5 learns by PPO to write what its encoder reads: from a policy that writes one letter of four at random, whatever
the prompt, to one that repeats the prompt's letter."""

from __future__ import annotations

import random
from copy import deepcopy

import torch

from chatgpt.data import load_demonstrations
from chatgpt.data.formats import note_model
from chatgpt.nn import Actor
from chatgpt.strategies import NaiveStrategy
from chatgpt.testing import encoder_decoder_tokenizer, tiny_causal_lm
from chatgpt.trainer import PPOTrainer, SFTTrainer
from chatgpt.trainer.prompt_evaluation import PromptEvaluation

LETTERS = 'abcd'
SEED = 2
"""of seeds 0, 1 and 2 the last score is 0.83, 0.84 and 0.92, and the first 0.09, 0.20 and 0.22"""


def repeats(prompts: list[str], responses: list[str]) -> list[float]:
    return [float(response == prompt) for prompt, response in zip(prompts, responses, strict=True)]


def optimizer_of(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=3e-3)


def test_ppo_teaches_a_t5_to_repeat_its_prompt():
    draw = random.Random(SEED)
    tokenizer, model = encoder_decoder_tokenizer('t5'), tiny_causal_lm('t5', seed=SEED)
    note_model(tokenizer, model.config)
    rows = [{'prompt': letter, 'response': draw.choice(LETTERS)} for letter in LETTERS for _ in range(16)]
    torch.manual_seed(SEED)
    strategy = NaiveStrategy(seed=SEED)
    actor, optimizer = strategy.prepare((policy := Actor(model, value_head=True), optimizer_of(policy)))
    sft = {'train_batch_size': 16, 'max_epochs': 15, 'log_interval': 1000, 'tokenizer': tokenizer}
    SFTTrainer(strategy, actor, optimizer, load_demonstrations(rows, tokenizer)[0], **sft).fit()

    strategy = NaiveStrategy(seed=SEED)
    initial = strategy.prepare(Actor(deepcopy(model)))
    actor, optimizer = strategy.prepare((actor, optimizer_of(actor)))
    trainer = PPOTrainer(
        strategy,
        actor,
        None,
        repeats,
        initial,
        optimizer,
        tokenizer=tokenizer,
        max_new_tokens=3,
        experience_batch_size=64,
        train_batch_size=32,
        max_epochs=2,
        kl_coef=0.01,
    )
    drawn = {'do_sample': True, 'max_new_tokens': 3, 'num_rows': 0}
    evaluation = PromptEvaluation(list(LETTERS) * 16, tokenizer, repeats, **drawn)
    before = evaluation(trainer)['score_mean']
    trainer.fit(list(LETTERS), 1, 12, 1)
    after = evaluation(trainer)['score_mean']
    assert before < 0.4, 'it writes letters at random'
    assert after > 0.65
