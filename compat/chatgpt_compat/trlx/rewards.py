"""Reward and metric functions of trlX's scripts, called with `samples`, `prompts`, `outputs`, `tokenizer` and the
prompts' metadata by name. `chatgpt.data.rewards.calling` calls them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch

from chatgpt.data.rewards import call
from chatgpt.trainer.experience import FunctionScorer
from chatgpt.types import Sample

NAMES = ('samples', 'prompts', 'outputs', 'responses', 'queries', 'completions', 'tokenizer')


def by_names(function: Callable[..., Any], columns: Collection[str]) -> Callable[..., Any]:
    """Wraps `function` for the current names: as in 2022, `queries` gets the prompts, and a first argument with any
    other name gets the samples."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return function
    parameters = list(signature.parameters.values())
    first = parameters[0] if parameters else None
    names = {'prompts': 'queries'} if 'queries' in signature.parameters else {}
    is_odd = (
        first is not None
        and first.kind in (first.POSITIONAL_ONLY, first.POSITIONAL_OR_KEYWORD)
        and first.default is first.empty
        and first.name not in (*NAMES, *columns)
    )
    if not is_odd and not names:
        return function
    today = {theirs: name for name, theirs in names.items()} | ({first.name: 'samples'} if is_odd and first else {})

    def called(**given: Any) -> Any:
        start = [given.pop('samples')] if is_odd else []
        return function(*start, **{names.get(name, name): value for name, value in given.items()})

    renamed = [p.replace(name=today.get(p.name, p.name)) for p in parameters]
    called.__signature__ = signature.replace(parameters=renamed)  # type: ignore[attr-defined]  # `call` reads it
    return called


class OnRank0:
    """A reward function that only rank 0 has, as in scripts with `reward_fn = True` on the other ranks; its description
    is the same on every rank."""

    __slots__ = ('fn',)  # without `__dict__`, which a description of the reward would read

    def __init__(self, fn: Any) -> None:
        self.fn = fn

    def __call__(self, samples: Any, prompts: Any, outputs: Any, **columns: Any) -> Any:
        return call(by_names(self.fn, columns), prompts, outputs, columns)


class RewardFunction(FunctionScorer):
    """A reward function of trlX, which returns one number per sample, or one per token of its output. Lists shorter
    than the response are padded with zeros; numbers beyond the response are added to the last token's.

    Args:
        clip: each number is clipped to [−clip, clip], then divided by `divisor`.
        with_end: add the end token's text to outputs that ended, as trlX does in rollouts but not in evaluations.
        separator: text between prompt and output in `samples`.
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

    def check_columns(self, columns: Collection[str]) -> None:
        """Does nothing: functions get the columns that they name."""

    def _call(self, samples: list[Sample]) -> list[Any]:
        names = sorted({name for sample in samples for name in sample.columns})
        columns: dict[str, Any] = {name: [sample.columns.get(name) for sample in samples] for name in names}
        columns['tokenizer'] = self.tokenizer
        prompts, outputs = [sample.prompt_text for sample in samples], [self._output(sample) for sample in samples]
        fn = by_names(getattr(self.fn, 'fn', self.fn), columns)
        values = call(fn, prompts, outputs, columns, separator=self.separator)
        values = values.tolist() if hasattr(values, 'tolist') else values
        if not isinstance(values, (list, tuple)) or len(values) != len(samples):
            return values  # type: ignore[return-value]  # the scorer raises the error
        return [self._score(value, sample) for value, sample in zip(values, samples, strict=True)]

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
    """Converts a metric function of trlX to this library's convention: a number is repeated for every sample. Lists of
    texts, meant for trlX's tables, are dropped. `separator` is the text between prompt and output in `samples`."""
    if metric_fn is None:
        return None

    def metrics(prompts: Any, outputs: Any, **columns: Any) -> dict[str, Any]:
        columns.pop('samples', None)
        found: Mapping[str, Any] = call(by_names(metric_fn, columns), prompts, outputs, columns, separator=separator)
        listed = {name: value.tolist() if hasattr(value, 'tolist') else value for name, value in found.items()}
        lists = {name: v if isinstance(v, (list, tuple)) else [float(v)] * len(prompts) for name, v in listed.items()}
        return {name: v for name, v in lists.items() if not any(isinstance(x, str) for x in v)}

    return metrics
