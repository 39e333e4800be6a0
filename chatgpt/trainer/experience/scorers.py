"""Scorers of responses: a reward model, a Python function, a `transformers` pipeline, or a weighted list of them.

A scorer returns, for each sample, a float (one score for the sequence) or a 1-D tensor (dense: one per response token).
A *model* scorer runs on every rank over that rank's own samples. A *function* scorer runs once, on rank 0, over the
whole batch of a timestep, so a function that compares responses or calls a service gets them all, whatever the number
of processes.
"""

from __future__ import annotations

import functools
import inspect
import math
import re
import threading
import tokenize
import zlib
from collections.abc import Callable, Collection, Iterable, Mapping
from collections.abc import Sequence as SequenceOf
from typing import Any, Protocol, cast, runtime_checkable

import torch
from torch import Tensor, nn

from chatgpt.batching import collate
from chatgpt.data.rewards.calling import call, check_call, describe_error, made, one_each, place_of
from chatgpt.data.tokenize import tokenize_again
from chatgpt.nn.layouts import longest_side
from chatgpt.nn.records import fetched, lengths_only
from chatgpt.nn.sweep import SWEEP_TOKENS, Communicator, cuts_of_own, gathered, read_back, sweep
from chatgpt.types import Experience, Prompt, Sample, Sequence

Score = float | Tensor


@runtime_checkable
class Scorer(Protocol):
    def score(self, samples: list[Sample], strategy: Communicator) -> list[Score]:
        """Returns the scores of this rank's `samples`, in their order. A collective; ranks may have different numbers
        of samples."""
        ...


class RewardFunctionError(RuntimeError):
    """A reward function raised, timed out, or returned something other than one finite score per response."""


class RewardValueError(RewardFunctionError):
    """A reward function returned something that is not a list of scores; repeating the call would not help."""


class RewardModelScorer:
    """Scores with a `RewardModel` (any module that maps a `Batch` to (B,) scores).

    Args:
        model: the prepared reward model.
        tokenizer: the reward model's tokenizer if it differs from the policy's. Then prompt and response texts are
            joined and tokenized again, by the rules of its training data (`chatgpt.data.tokenize`): no special token
            but a begin token if the tokenizer adds one, and the end token of a response that ended.
            `formats.note_model` marks the tokenizer of an encoder-decoder.
        max_tokens_per_batch: padded tokens of one forward; None: 16384.
        max_length: longest sequence of the reward model; longer ones are cut on the left. None: its positions. Only
            with `tokenizer`.
        packing: compute without padding if the model supports it.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        tokenizer: Any = None,
        max_tokens_per_batch: int | None = None,
        max_length: int | None = None,
        packing: bool = True,
    ) -> None:
        self.packing = packing
        self.model = model
        self.tokenizer = tokenizer
        self.max_tokens_per_batch = max_tokens_per_batch
        config = getattr(getattr(model, 'model', None), 'config', None)
        self.max_length = longest_side(config) if max_length is None and config is not None else max_length

    @torch.no_grad()
    def score(self, samples: list[Sample], strategy: Communicator) -> list[Score]:
        sequences: list[Sequence] = list(samples)
        if self.tokenizer is not None:
            sequences = [
                tokenize_again(s.prompt_text, s.response_text, s.ended, self.tokenizer, self.max_length)
                for s in samples
            ]
        scores: list[Score] = [math.nan] * len(sequences)

        limit = self.max_tokens_per_batch or SWEEP_TOKENS
        cuts = cuts_of_own(strategy, [s.num_tokens for s in sequences], limit)
        with strategy.onload(self.model):
            done = [
                *sweep(strategy, cuts, lambda at: collate([sequences[i] for i in at], pack=self.packing), self.model)
            ]
            for (positions, _), found in zip(done, read_back([out for _, out in done]), strict=True):
                for i, value in zip(positions, found.tolist(), strict=False):
                    scores[i] = value
        for i, value in enumerate(scores):
            if not math.isfinite(cast(float, value)):
                raise RewardFunctionError(f'the reward model gave {value} for {samples[i].called}')
        return scores


def with_reward_model(scorer: Scorer | None) -> list[RewardModelScorer]:
    """Returns the `RewardModelScorer`s in a scorer of this module."""
    if isinstance(scorer, RewardModelScorer):
        return [scorer]
    if isinstance(scorer, WeightedScorer):
        return [found for _, inner in scorer.weighted for found in with_reward_model(inner)]
    return []


def columns_of(prompts: Iterable[Prompt]) -> set[str]:
    """Returns the columns that reward functions get with these prompts."""
    return {name for prompt in prompts for name in prompt.columns}


def check_columns(scorer: Scorer | None, prompts: Iterable[Prompt]) -> None:
    """Raises ValueError for a function in a scorer that needs a column missing in all prompts."""
    if isinstance(scorer, WeightedScorer):
        for _, inner in scorer.weighted:
            check_columns(inner, prompts)
    elif isinstance(scorer, FunctionScorer):
        scorer.check_columns(columns_of(prompts))


def described(scorer: Scorer | None) -> Any:
    """Returns a scorer as JSON, for detecting a resume with another: name and checksum of a function, source folder of
    a reward model."""
    if isinstance(scorer, WeightedScorer):
        return [[weight, described(inner)] for weight, inner in scorer.weighted]
    name, detail = type(scorer).__name__, str(getattr(scorer, 'description', ''))
    if isinstance(scorer, RewardModelScorer):
        detail = str(getattr(getattr(getattr(scorer.model, 'model', None), 'config', None), 'name_or_path', ''))
    elif isinstance(scorer, FunctionScorer):
        name, detail = scorer.name, f'source {scorer.checksum}' if scorer.checksum else ''
    return f'{name}, {detail}' if detail else name


def call_on(fn: Callable[..., Any], samples: SequenceOf[Sample]) -> Any:
    """Calls a function of texts on samples; a column that some of them lack is None there."""
    names = sorted({name for s in samples for name in s.columns})
    columns = {name: [s.columns.get(name) for s in samples] for name in names}
    return call(fn, [s.prompt_text for s in samples], [s.response_text for s in samples], columns)


class FunctionScorer:
    """Scores with a Python function that gets the whole batch of a timestep once, on rank 0.

    Args:
        fn: `fn(prompts, responses, **columns) -> list`, one number per response or one list of numbers per response
            (one per response token); a coroutine function is awaited, all calls in one event loop. `columns` are the
            other columns of the prompts' data rows as keyword lists. Arguments are passed by name, also in TRL's and
            trlX's conventions: `chatgpt.data.rewards.calling`.
        timeout_s: seconds after which the run stops with an error. None waits without a limit.
    """

    def __init__(self, fn: Callable[..., Any], *, timeout_s: float | None = None) -> None:
        self.fn = fn
        self.timeout_s = timeout_s
        self.name = getattr(fn, '__qualname__', None) or type(fn).__name__
        self.checksum = checksum(fn)

    def check_columns(self, columns: Collection[str]) -> None:
        """Raises ValueError for a function that cannot be called on prompts with these columns."""
        check_call(self.fn, columns, f'reward function {self.name}')

    def _call(self, samples: list[Sample]) -> list[Any]:
        return call_with_timeout(lambda: call_on(self.fn, samples), self.timeout_s, f'reward function {self.name}')

    def _checked(self, samples: list[Sample]) -> list[Score]:
        source = f'reward function {self.name}'
        try:
            values = self._call(samples)
        except RewardFunctionError:
            raise
        except (Exception, SystemExit) as error:  # an exit in the function would end this rank alone
            raise RewardFunctionError(f'{source} raised {describe_error(error)}') from error
        try:
            values = one_each(values, len(samples), source, RewardValueError)
            return [as_score(value, sample, source) for value, sample in zip(values, samples, strict=True)]
        except RewardFunctionError as error:
            raise type(error)(f'{error}; it is defined {place_of(self.fn)}') from None

    def score(self, samples: list[Sample], strategy: Communicator) -> list[Score]:
        # texts and columns alone: a function does not read ids and log-probs
        everyone = gathered(strategy, [lengths_only(s) for s in samples], lambda s: s.index)
        scores: list[Score] = strategy.run_on_rank0(lambda: self._checked(everyone))
        by_index = {s.index: score for s, score in zip(everyone, scores, strict=True)}
        return [by_index[s.index] for s in samples]


class PipelineScorer:
    """Scores with a `transformers` text-classification pipeline, each rank its own samples.

    Args:
        pipeline: called with a list of texts (prompt + response).
        label: the label to score, for example 'POSITIVE'. Optional if the classifier has one label.
    """

    def __init__(self, pipeline: Callable[..., Any], *, label: str | None = None, batch_size: int = 8) -> None:
        self.pipeline = pipeline
        self.label = label
        self.batch_size = batch_size
        labels = list(getattr(getattr(getattr(pipeline, 'model', None), 'config', None), 'id2label', {}).values())
        if label is None and len(labels) > 1:
            raise ValueError(
                f'the pipeline has labels {labels}; say whose score counts, for example PipelineScorer(pipe, '
                f'label={labels[-1]!r})'
            )
        if label is not None and labels and label not in labels:
            raise ValueError(f'the pipeline has no label {label!r}; it has {labels}')

    def score(self, samples: list[Sample], strategy: Communicator) -> list[Score]:
        texts = [s.prompt_text + s.response_text for s in samples]
        rows: list[Any] = []
        for part in strategy.sums.parts(len(samples)):
            rows += self.pipeline([texts[i] for i in part], top_k=None, batch_size=self.batch_size)
        scores: list[Score] = []
        for sample, row in zip(samples, rows, strict=True):
            found = {entry['label']: entry['score'] for entry in ([row] if isinstance(row, Mapping) else row)}
            value = next(iter(found.values())) if self.label is None else found[self.label]
            scores.append(as_score(value, sample, 'pipeline'))
        return scores


class WeightedScorer:
    """Weighted sum of scorers. Of a mix of dense and sequence scores, the sequence part is added at the last action
    that counts."""

    def __init__(self, weighted: SequenceOf[tuple[float, Scorer]]) -> None:
        if not weighted:
            raise ValueError('a list of rewards needs at least one (weight, reward) pair')
        self.weighted = list(weighted)

    def score(self, samples: list[Sample], strategy: Communicator) -> list[Score]:
        return [combine(parts, sample) for parts, sample in zip(self.apart(samples, strategy), samples, strict=True)]

    def apart(self, samples: list[Sample], strategy: Communicator) -> list[list[tuple[float, Score]]]:
        """Returns (weight, score) of each scorer, per sample."""
        columns = [(weight, scorer.score(samples, strategy)) for weight, scorer in self.weighted]
        return [[(weight, scores[i]) for weight, scores in columns] for i in range(len(samples))]


def scored(scorer: Scorer | None, samples: list[Sample], strategy: Communicator) -> list[tuple[Sample, Score | None]]:
    """Returns the samples of all ranks with their scores, ordered by index; `samples` are this rank's, any number of
    them. A collective.

    If the strategy's `sums` distribute samples, the batches of a model must not depend on which rank generated a
    sample: samples are redistributed in order, and copies of the last one fill the parts.
    """
    if scorer is None or isinstance(scorer, FunctionScorer) or not strategy.sums.exact:
        scores = [None] * len(samples) if scorer is None else [*scorer.score(samples, strategy)]
        return gathered(strategy, list(zip(samples, scores, strict=True)), lambda pair: pair[0].index)
    everyone = gathered(strategy, samples, lambda s: s.index)
    dealt = strategy.sums.own_range(len(everyone))
    own = [everyone[min(i, len(everyone) - 1)] for i in dealt] if everyone else []
    found = list(zip(dealt, scorer.score(own, strategy), strict=False)) if own else []
    numbered = gathered(strategy, found, lambda pair: pair[0])
    return [(sample, score) for sample, (_, score) in zip(everyone, numbered, strict=False)]


def combine(parts: SequenceOf[tuple[float, Score]], sample: Sequence) -> Score:
    """Returns the weighted sum of the scores of a sample."""
    single = sum(weight * value for weight, value in parts if not isinstance(value, Tensor))
    dense = [weight * value for weight, value in parts if isinstance(value, Tensor)]
    if not dense:
        return float(single)
    total = torch.stack(dense).sum(0)
    counted = sample.response_mask.nonzero()
    if len(counted):
        total[counted[-1, 0]] += single
    return total


def sequence_score(score: Score, sample: Sequence) -> float:
    """Returns the score of a whole response: for dense scores their sum over the tokens that count."""
    return float(torch.where(sample.response_mask, score, 0.0).sum()) if isinstance(score, Tensor) else float(score)


def as_score(value: Any, sample: Sample, source: str) -> Score:
    """Returns a float or an (A,) tensor made from a scorer's result. Raises RewardFunctionError, with the sample's
    name, if it is not finite or has the wrong length."""
    if hasattr(value, 'tolist'):  # tensors; numpy scalars and arrays
        value = value.tolist()
    if isinstance(value, (list, tuple)):
        dense = torch.tensor([_number(v, sample, source) for v in value])
        if len(dense) != sample.num_actions:
            raise RewardValueError(
                f'{source} returned {len(dense)} token scores for {sample.called}, whose response has '
                f'{sample.num_actions} tokens'
            )
        if not torch.isfinite(dense).all():
            raise RewardFunctionError(f'{source} returned a score that is not finite for {sample.called}')
        return dense
    number = _number(value, sample, source)
    if not math.isfinite(number):
        raise RewardFunctionError(f'{source} returned {number} for {sample.called}; scores must be finite')
    return number


def _number(value: Any, sample: Sample, source: str) -> float:
    """Converts to float. Refuses a text, even of digits: it is more often an answer than its score."""
    try:
        if not isinstance(value, (str, bytes)):
            return float(value)
    except (TypeError, ValueError):
        pass
    raise RewardValueError(f'{source} returned {value!r} for {sample.called}; return a number')


def call_with_timeout(fn: Callable[[], Any], timeout_s: float | None, what: str) -> Any:
    """Returns `fn()`; raises RewardFunctionError after `timeout_s`. The call runs in a daemon thread, so that a hung
    one does not keep the process alive."""
    if timeout_s is None:
        return fn()
    outcome: dict[str, Any] = {}

    def target() -> None:
        try:
            outcome['value'] = fn()
        except BaseException as error:  # raised again in the caller's thread
            outcome['error'] = error

    thread = threading.Thread(target=target, daemon=True, name=what)
    thread.start()
    thread.join(timeout_s)
    if thread.is_alive():
        raise RewardFunctionError(f'{what} did not return within {timeout_s:g} s')
    if 'error' in outcome:
        raise outcome['error']
    return outcome['value']


def as_scorer(
    reward: Any,
    *,
    max_tokens_per_batch: int | None = None,
    timeout_s: float | None = None,
    reward_tokenizer: Any = None,
    packing: bool = True,
) -> Scorer | None:
    """Makes a `Scorer` from a module, a pipeline, a function, a scorer, or a list of (weight, one of these).

    A class is instantiated without arguments. None stays None: every batch then has scores of its own.
    """
    if reward is None:
        return None
    reward = made(reward)
    if isinstance(reward, nn.Module):
        return RewardModelScorer(
            reward, tokenizer=reward_tokenizer, max_tokens_per_batch=max_tokens_per_batch, packing=packing
        )
    if isinstance(reward, Scorer):
        return reward
    if isinstance(reward, (list, tuple)):
        pairs = []
        for item in reward:
            if not (isinstance(item, (list, tuple)) and len(item) == 2 and isinstance(item[0], (int, float))):
                raise ValueError(f'a list of rewards holds (weight, reward) pairs; got {item!r}')
            inner = as_scorer(
                item[1],
                max_tokens_per_batch=max_tokens_per_batch,
                timeout_s=timeout_s,
                reward_tokenizer=reward_tokenizer,
                packing=packing,
            )
            if inner is None:
                raise ValueError('a list of rewards holds (weight, reward) pairs; got None as a reward')
            pairs.append((float(item[0]), inner))
        return WeightedScorer(pairs)
    if hasattr(reward, 'task') and hasattr(reward, 'model') and callable(reward):
        return PipelineScorer(reward)
    if callable(reward):
        return FunctionScorer(reward, timeout_s=timeout_s)
    raise ValueError(
        'reward_model must be a RewardModel, a function fn(prompts, responses, **columns), a pipeline, a Scorer, or a '
        f'list of (weight, reward) pairs; got {type(reward).__name__}'
    )


def checksum(function: Any) -> str:
    """Returns a checksum of the function's source and readable state; '' if there is neither."""
    values: dict[str, Any] = {}
    while isinstance(function, functools.partial):
        values |= {'args': function.args, **function.keywords}
        function = function.func
    if inspect.isfunction(function):
        values |= inspect.getclosurevars(function).nonlocals
        thing: Any = function
    else:
        owner = getattr(function, '__self__', function)
        values |= getattr(owner, '__dict__', {})
        thing = owner if isinstance(owner, type) else type(owner)
    parts = [_source(thing), *(f'{name}={text}' for name, value in sorted(values.items()) if (text := _plain(value)))]
    text = '\n'.join(parts)
    return f'{zlib.crc32(text.encode()):08x}' if text else ''


def _source(thing: Any) -> str:
    """Returns the source of a function or class; its name if there is no source."""
    try:
        return inspect.getsource(thing)
    except (OSError, TypeError, SyntaxError, tokenize.TokenError):  # no source, or a file without it
        return str(getattr(thing, '__qualname__', ''))


def _plain(value: Any) -> str:
    """Returns a text that identifies the value; '' for values with a memory address as text."""
    if value is None or isinstance(value, (str, bytes, bool, int, float)):
        return repr(value)
    if isinstance(value, re.Pattern):
        return f'{value.pattern!r}, {value.flags}'
    if isinstance(value, (list, tuple)):
        return str([_plain(v) for v in value])
    if isinstance(value, (set, frozenset)):
        return str(sorted(map(_plain, value)))
    if isinstance(value, Mapping):
        return str(sorted((str(k), _plain(v)) for k, v in value.items()))
    return _source(value) if inspect.isfunction(value) or isinstance(value, type) else ''


NUM_RESCORED = 4
"""responses; each takes a forward of one sequence, little compared with a phase"""
RESCORE_EVERY = 50
"""learning phases"""


def rescored_metrics(
    scorer: Scorer | None, experiences: SequenceOf[Experience], strategy: Communicator, phase: int
) -> dict[str, float]:
    """Returns `rollout/rescore_error`, every `RESCORE_EVERY` phases, if a reward model scores."""
    if not isinstance(scorer, RewardModelScorer) or phase % RESCORE_EVERY:
        return {}
    return {'rollout/rescore_error': rescored(scorer, experiences, strategy)}


def rescored(scorer: RewardModelScorer, experiences: SequenceOf[Experience], strategy: Communicator) -> float:
    """Returns the greatest difference between the scores of a few responses and their scores when computed alone.

    The same list on every rank; a collective, like scoring. Restores torch's generators, also if the reward model has
    dropout.
    """
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices=devices):
        chosen = fetched(strategy, experiences[:NUM_RESCORED])
        again = [scorer.score([e], strategy)[0] for e in chosen]
    return max(abs(float(new) - e.score) for new, e in zip(again, chosen, strict=True))
