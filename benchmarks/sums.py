"""A task: sums of two numbers of two digits, continued as text by a model that has seen few answers.

The prompt is `57 + 86 = ` after the model's first token; the response is the sum and the end token.
"""

from __future__ import annotations

import random
from functools import partial
from typing import Any

import harness
import torch
from transformers import AutoTokenizer

from chatgpt.nn import AutoActor
from chatgpt.strategies import NaiveStrategy
from chatgpt.trainer import SFTTrainer
from chatgpt.types import Prompt, Sequence

NEW_TOKENS = 5
HELD_OUT, DEMONSTRATIONS = 400, 150


def questions(pretrain: str) -> tuple[list[Prompt], list[Prompt], list[Prompt]]:
    """Returns held-out prompts, those of SFT, and all others; the column `answer` is the sum."""
    words = AutoTokenizer.from_pretrained(pretrain)
    pairs = [(a, b) for a in range(10, 100) for b in range(10, 100)]
    random.Random(0).shuffle(pairs)
    prompts = []
    for a, b in pairs:
        text = f'{words.bos_token}{a} + {b} = '
        ids = words(text, add_special_tokens=False)['input_ids']
        prompts.append(Prompt(ids=torch.tensor(ids), text=text, columns={'answer': a + b}))
    cut = HELD_OUT + DEMONSTRATIONS
    return prompts[:HELD_OUT], prompts[HELD_OUT:cut], prompts[cut:]


def right(prompts: list[str], responses: list[str], answer: list[int]) -> list[float]:
    return [float(response == str(a)) for response, a in zip(responses, answer, strict=True)]


def taught(pretrain: str, precision: str) -> Any:
    """Returns the model after one epoch of SFT, the same for every run."""
    torch.manual_seed(0)
    actor, words = AutoActor(pretrained=pretrain), AutoTokenizer.from_pretrained(pretrain)
    records = []
    for prompt in questions(pretrain)[1]:
        ids = words.encode(str(prompt.columns['answer']), add_special_tokens=False) + [words.eos_token_id]
        response = {'response_ids': torch.tensor(ids), 'response_mask': torch.ones(len(ids)) > 0}
        records.append(Sequence(prompt_ids=prompt.ids, **response))
    with NaiveStrategy(seed=0, precision=precision, device='cpu') as strategy:
        adam = partial(torch.optim.AdamW, lr=5e-5)
        how = {'optimizer': adam, 'train_batch_size': 8, 'max_epochs': 1}
        harness.offline_trainer(SFTTrainer, strategy, actor, records, **how).fit()
    return actor.model
