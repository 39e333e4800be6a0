"""Reward and metric functions called as trlX calls them: `samples`, `prompts`, `outputs`, `tokenizer` and the prompts'
metadata by name. Left out: what a score becomes (`chatgpt.experience`)."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch

from chatgpt.compat.trlx.settings import takes
from chatgpt.experience.scorers import FunctionScorer
from chatgpt.types import Sample

OLD_NAMES = {'queries': 'prompts', 'responses': 'outputs'}


def call(function: Callable[..., Any], given: Mapping[str, Any]) -> Any:
    """`function` with what it takes of `given`. A first argument of a name of its own gets the samples, as in 2022."""
    names = takes(function)
    if names is None:
        first = _first_argument(function)
        if first is not None and first not in given:
            return function(given['samples'], **{k: v for k, v in given.items() if k != 'samples'})
        return function(**given)
    known = dict(given) | {old: given[new] for old, new in OLD_NAMES.items() if old not in given}
    first = _first_argument(function)
    start = [] if first is None or first in known else [given['samples']]
    return function(*start, **{name: known[name] for name in names if name in known})


def _first_argument(function: Callable[..., Any]) -> str | None:
    """The name of the first argument that has no default."""
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return None
    first = parameters[0] if parameters else None
    plain = first is not None and first.kind in (first.POSITIONAL_ONLY, first.POSITIONAL_OR_KEYWORD)
    return first.name if first is not None and plain and first.default is first.empty else None


class OnRank0:
    """A reward function that only rank 0 has, as in scripts whose other ranks say `reward_fn = True`; described alike
    on every rank."""

    __slots__ = ('fn',)  # no attribute that a description of the reward could see

    def __init__(self, fn: Any) -> None:
        self.fn = fn

    def __call__(self, **given: Any) -> Any:
        return call(self.fn, given)


class RewardFunction(FunctionScorer):
    """A reward function of trlX's.

    Args:
        fn: `fn(samples, prompts, outputs, tokenizer, **metadata)`, of which it takes what it names → one number for
            each sample, or one for each token of its output. Lists shorter than the response end in zeros; what stands
            beyond it falls on the last token.
        clip: scores are clipped to ± this, each token's alone.
        divisor: and divided by this.
        with_end: outputs of responses that ended end with the end token's text, as trlX's rollouts do and its
            evaluation does not.
        separator: between prompt and output in `samples`.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        tokenizer: Any,
        *,
        clip: float | None = None,
        divisor: float = 1.0,
        with_end: bool = True,
        separator: str = '',
    ) -> None:
        super().__init__(fn)
        self.separator = separator
        self.tokenizer, self.clip, self.divisor, self.with_end = tokenizer, clip, divisor, with_end

    def _call(self, samples: list[Sample]) -> list[Any]:
        outputs = [self._output(sample) for sample in samples]
        prompts = [sample.prompt_text for sample in samples]
        columns = {
            key: [s.columns.get(key) for s in samples] for key in sorted({k for s in samples for k in s.columns})
        }
        given = columns | {
            'samples': [p + self.separator + o for p, o in zip(prompts, outputs, strict=True)],
            'prompts': prompts,
            'outputs': outputs,
            'tokenizer': self.tokenizer,
        }
        values = call(self.fn, given)
        if not isinstance(values, (list, tuple)) and not hasattr(values, 'tolist'):
            return values
        listed = values.tolist() if hasattr(values, 'tolist') else list(values)
        if len(listed) != len(samples):
            return listed  # the scorer says what is wrong with it
        return [self._score(value, sample) for value, sample in zip(listed, samples, strict=True)]

    def _output(self, sample: Sample) -> str:
        text = sample.response_text.rstrip() if sample.finish_reason == 'stop' else sample.response_text
        end = self.tokenizer.eos_token
        return text + end if self.with_end and sample.ended and end is not None else text

    def _score(self, value: Any, sample: Sample) -> Any:
        if hasattr(value, 'tolist'):
            value = value.tolist()
        if not isinstance(value, (int, float, list, tuple)) or isinstance(value, bool):
            return value
        scores = torch.as_tensor(value, dtype=torch.float64).flatten()
        if self.clip is not None:
            scores = scores.clamp(-self.clip, self.clip)
        scores = scores / self.divisor
        if scores.numel() == 1:
            return float(scores[0])
        dense = torch.zeros(sample.num_actions, dtype=torch.float64)
        size = min(len(dense), len(scores))
        dense[:size] = scores[:size]
        dense[-1] += scores[size:].sum()
        return dense.tolist()


def metric_function(metric_fn: Callable[..., Any] | None, separator: str = '') -> Callable[..., Any] | None:
    """A metric function of trlX's in this library's convention: a number stands for every sample. Lists of texts, which
    scripts show in trlX's tables, are left out. `separator` stands between prompt and output in `samples`."""
    if metric_fn is None:
        return None

    def metrics(**given: Any) -> dict[str, Any]:
        given['samples'] = [p + separator + o for p, o in zip(given['prompts'], given['outputs'], strict=True)]
        found = call(metric_fn, given)
        count = len(given['samples'])
        listed = {name: value.tolist() if hasattr(value, 'tolist') else value for name, value in found.items()}
        lists = {name: v if isinstance(v, (list, tuple)) else [float(v)] * count for name, v in listed.items()}
        return {name: v for name, v in lists.items() if not any(isinstance(x, str) for x in v)}

    return metrics
