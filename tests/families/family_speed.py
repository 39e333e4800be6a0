"""How fast the local engine is beside `model.generate`, on equal work: a model type 256 wide, on one thread.

    python tests/families/family_checks.py --json found.json --speed llama xglm

Both draw the same number of tokens for the same prompts, turn by turn, and CPU seconds are compared pair by pair, so
that a machine that is busy with something else slows both. There are as many pairs as it takes to tell which of the two
is faster.
"""

from __future__ import annotations

import math
import statistics
import time
from typing import Any

import torch
from family_configs import VOCAB, family_config
from transformers import AutoModelForCausalLM, GenerationConfig

from chatgpt.nn import Actor
from chatgpt.rollout import Call, LocalEngine, SamplingParams
from chatgpt.types import Prompt

WIDTH, ROWS, PROMPT, NEW = 256, 16, 16, 48
LEAST_PAIRS, MOST_PAIRS = 9, 45
MOST = 200_000_000
"""parameters: a type whose other sizes do not shrink with the width is not measured"""


def speed(model_type: str) -> float:
    """CPU seconds of `model.generate` divided by those of the local engine: the median of the pairs.

    Raises ValueError where the engine refuses the model, and what transformers raises where it is not a model so wide.
    """
    torch.manual_seed(0)
    config = family_config(model_type, width=WIDTH)
    with torch.device('meta'):
        size = sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())
    if size > MOST:
        raise ValueError(f'{size} parameters at a width of {WIDTH}')
    model = AutoModelForCausalLM.from_config(config).eval()
    ids = torch.randint(3, VOCAB, (ROWS, PROMPT), generator=torch.Generator().manual_seed(1))
    prompts, sampling = [Prompt(ids=row) for row in ids], SamplingParams(max_new_tokens=NEW, eos_token_ids=())
    model.generation_config = GenerationConfig()
    how = GenerationConfig(max_new_tokens=NEW, do_sample=True, top_k=0, pad_token_id=0, eos_token_id=None)
    engine = LocalEngine()
    engine.begin(Actor(model))

    def ours() -> Any:
        return engine.generate(Call.of(prompts, sampling, seed=1, indices=range(ROWS)))

    def theirs() -> Any:
        return model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=how)

    assert theirs().shape[1] == PROMPT + NEW and all(s.num_actions == NEW for s in ours())  # and both are warm
    found: list[float] = []
    while len(found) < LEAST_PAIRS or (len(found) < MOST_PAIRS and not differs_from_one(found)):
        seconds = []
        for generate in (theirs, ours):
            before = time.process_time()
            generate()
            seconds.append(time.process_time() - before)
        found.append(seconds[0] / seconds[1])
    engine.end()
    return statistics.median(found)


def differs_from_one(ratios: list[float]) -> bool:
    """Whether those above 1 are further from half of all than two standard deviations of as many throws of a coin."""
    return abs(sum(ratio > 1 for ratio in ratios) - len(ratios) / 2) > math.sqrt(len(ratios))
