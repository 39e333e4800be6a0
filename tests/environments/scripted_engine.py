"""An engine whose turns are written down."""

from __future__ import annotations

import torch

from chatgpt.types import Sample


class ScriptedEngine:
    """Gives the next turn of each sample index; a turn is (ids, finish_reason)."""

    reproducible = True

    def __init__(self, turns):
        self.turns = {index: list(of) for index, of in turns.items()}
        self.asked = []

    def begin(self, actor):
        pass

    def end(self):
        pass

    def generate(self, prompts, sampling, *, seed, indices, groups=None, offsets=None, limits=None):
        samples = []
        for prompt, index, group, limit in zip(prompts, indices, groups, limits, strict=True):
            ids, reason = self.turns[index].pop(0)
            if len(ids) > limit:
                ids, reason = ids[:limit], 'length'
            self.asked.append((index, prompt.ids.tolist()))
            numbers = torch.full((len(ids),), -0.5)
            samples.append(
                Sample(
                    index=index,
                    group=group,
                    prompt_ids=prompt.ids,
                    response_ids=torch.tensor(ids),
                    response_mask=torch.ones(len(ids), dtype=torch.bool),
                    logprobs=numbers,
                    filtered_logprobs=numbers,
                    edge_distances=numbers.abs(),
                    finish_reason=reason,
                )
            )
        return samples


def scripted(tokenizer, turns, end='<|im_end|>'):
    """An engine for one sample that ends every turn with the end token."""
    return ScriptedEngine({0: [(tokenizer(t + end, add_special_tokens=False)['input_ids'], 'eos') for t in turns]})
