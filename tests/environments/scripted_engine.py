"""An engine with scripted turns, and the episodes of any engine."""

from __future__ import annotations

import torch

from chatgpt.rollout import Abilities, Call, RolloutEngine, SamplingParams
from chatgpt.rollout.episodes import EpisodeEngine
from chatgpt.types import Prompt


class ScriptedEngine(RolloutEngine):
    """Returns the next scripted turn of each sample index; a turn is (ids, finish_reason)."""

    abilities = Abilities(copies_weights=False, reproducible=True)

    def __init__(self, turns):
        self.turns = {index: list(of) for index, of in turns.items()}
        self.prompts = []

    def begin(self, actor):
        pass

    def end(self):
        pass

    def generate(self, call):
        samples = []
        for i, (prompt, index, limit) in enumerate(zip(call.prompts, call.indices, call.limits, strict=True)):
            ids, reason = self.turns[index].pop(0)
            if len(ids) > limit:
                ids, reason = ids[:limit], 'length'
            self.prompts.append((index, prompt.ids.tolist()))
            numbers = torch.full((len(ids),), -0.5)
            samples.append(call.sample(i, torch.tensor(ids), numbers, numbers, numbers.abs(), reason))
        return samples


def scripted(tokenizer, turns, end='<|im_end|>'):
    """Returns an engine for one sample, with the end token after every turn."""
    return ScriptedEngine({0: [(tokenizer(t + end, add_special_tokens=False)['input_ids'], 'eos') for t in turns]})


NOTHING = Prompt(ids=torch.zeros(0, dtype=torch.int64))


def played(
    engine,
    environment,
    tokenizer,
    *,
    actor=None,
    prompts=(NOTHING,),
    settings=None,
    stop=None,
    transcript=None,
    **given,
):
    """Returns the episodes of one call. `given`: seed, indices and groups of the call, and fields of
    `SamplingParams`."""
    call = {'seed': 0, 'indices': range(len(prompts))}
    call |= {name: given.pop(name) for name in ('seed', 'indices', 'groups') if name in given}
    sampling = SamplingParams(**({'max_new_tokens': 500} | given), stop=stop)
    episodes = EpisodeEngine(engine, environment, tokenizer, settings, stop_strings=stop)
    try:
        if actor is not None:
            episodes.begin(actor)
        return episodes.generate(Call.of(list(prompts), sampling, **call))
    finally:
        if actor is not None:
            episodes.end()
        episodes.close()
