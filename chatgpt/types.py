"""The records that travel between packages.

A sequence travels alone and unpadded: 1-D tensors, prompt and response apart. `Batch` is the only padded thing;
`chatgpt.batching.collate` makes it just before a model's forward. Shape letters: B sequences, S tokens of a padded row,
P prompt tokens, A actions (response tokens) of one sequence, N actions of a whole batch. Imports torch only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

import torch
from torch import Tensor

FinishReason = Literal['eos', 'stop', 'length']
EpisodeEnd = Literal['terminated', 'truncated', 'turns', 'tokens', 'error', 'timeout', 'invalid']
EVAL_INDEX = 1 << 40
"""sample numbers of evaluations begin here, apart from those of the training"""


@dataclass(kw_only=True, slots=True)
class Prompt:
    """One prompt, tokenized."""

    ids: Tensor
    """(P,) int64, P >= 1"""
    text: str = ''
    columns: dict[str, Any] = field(default_factory=dict)
    """the other columns of the data row, handed to reward functions by name"""
    messages: list[dict[str, Any]] | None = None
    """its turns {'role': ..., 'content': ...}, where it is a conversation"""

    @property
    def last_turn(self) -> str:
        """The content of a conversation's last turn, which tables show in place of the text; else ''."""
        return str(self.messages[-1].get('content') or '') if self.messages else ''


@dataclass(kw_only=True, slots=True)
class Sequence:
    """Prompt and response tokens with a mask: what a model needs to score or to learn from."""

    prompt_ids: Tensor
    """(P,) int64, P >= 1"""
    response_ids: Tensor
    """(A,) int64, A >= 1; ends with the end token when the model ended it"""
    response_mask: Tensor
    """(A,) bool, True = counts (a token of the model's own; tool output and the like are False)"""

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_ids) + len(self.response_ids)

    @property
    def num_actions(self) -> int:
        return len(self.response_ids)


@dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
    """One turn of the policy in an episode."""

    start: int
    stop: int
    """response tokens [start, stop) are the policy's; start < stop"""
    rewards: dict[str, float] = field(default_factory=dict)
    """that the environment gave for it, by name; 'reward' where it gives one number"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Episode:
    """What an environment made of a sample: its response holds several turns, with observations between them, which
    `response_mask` leaves out."""

    turns: tuple[Turn, ...]
    end: EpisodeEnd
    """terminated, truncated: said by the environment. turns: as many as allowed. tokens: no room for the observation
    and a token more. error, timeout, invalid: the environment raised, took too long, or answered nonsense"""
    message: str = ''
    """of a failure, one line"""
    success: bool | None = None
    step_s: float = 0.0
    """that the environment took, all its steps together"""

    @property
    def failed(self) -> bool:
        """By the environment's fault."""
        return self.end in ('error', 'timeout', 'invalid')


@dataclass(kw_only=True, slots=True)
class Sample(Sequence):
    """One generated response."""

    index: int
    """run-wide sample number: it and the seed decide every draw"""
    group: int
    """number of the prompt draw; samples of one draw share it (GRPO, RLOO)"""
    logprobs: Tensor
    """(A,) fp32, behaviour log-probs: temperature-scaled, unfiltered"""
    filtered_logprobs: Tensor
    """(A,) fp32, the same after top-k / top-p renormalisation"""
    edge_distances: Tensor
    """(A,) fp32, distance of the uniform draw to the nearest edge of its token's cumulative interval; 1 where nothing
    was drawn"""
    finish_reason: FinishReason
    temperature: float = 1.0
    version: int = 0
    """number of learning phases the generating policy had behind it"""
    prompt_text: str = ''
    last_turn: str = ''
    """of the prompt, where it is a conversation"""
    response_text: str = ''
    columns: dict[str, Any] = field(default_factory=dict)
    episode: Episode | None = None
    """of an environment; None where the response is one answer"""

    @property
    def called(self) -> str:
        """How error messages call it: its number and its prompt."""
        of_evaluation, number = divmod(self.index, EVAL_INDEX)
        name = f'eval prompt {number}, counted from 0' if of_evaluation else f'sample {number}'
        text = self.prompt_text if len(self.prompt_text) <= 60 else f'{self.prompt_text[:25]}…{self.prompt_text[-35:]}'
        return f'{name} ({text!r})' if text else name

    @property
    def ended(self) -> bool:
        """The response ended by an end token or a stop string, not by running out of room."""
        return self.finish_reason != 'length'

    @property
    def failed(self) -> bool:
        """Its environment did."""
        return self.episode is not None and self.episode.failed

    @property
    def left_out(self) -> bool:
        """Its environment failed and no token of it counts, so its score stands in no baseline and no statistics."""
        return self.failed and not bool(self.response_mask.any())


@dataclass(kw_only=True, slots=True)
class Experience(Sample):
    """A sample with everything learning needs. All per-token tensors are (A,) fp32."""

    score: float
    """one per sequence, as the scorer gave it"""
    old_logprobs: Tensor
    """log-probs that the ratio is taken against: the decode's, or recomputed in the scoring pass"""
    ref_logprobs: Tensor
    """of the initial model; equal to old_logprobs where there is none"""
    values: Tensor
    """V at the state before each action; zeros without a critic"""
    kl: Tensor
    """per-token KL estimate that the reward used"""
    rewards: Tensor
    """-beta * kl, with the score added once at the last action that counts"""
    advantages: Tensor
    returns: Tensor
    shaped_score: float = 0.0
    """what the score came to in the rewards, after scaling, clipping, penalties and whitening"""
    token_scores: Tensor | None = None
    """dense scores from the scorer, when it gave one per token"""
    weighted_scores: tuple[tuple[float, float], ...] = ()
    """(weight, score) of each reward, when the scorer is a weighted list; `score` is their sum"""


def tensors_to(record: Any, device: torch.device | str) -> Any:
    """A copy of a record with every tensor field on `device`."""
    return _with_tensors(record, lambda tensor: tensor.to(device))


def _with_tensors(record: Any, change: Callable[[Tensor], Tensor]) -> Any:
    values = {f.name: value for f in fields(record) if isinstance(value := getattr(record, f.name), Tensor)}
    return replace(record, **{name: change(value) for name, value in values.items()})


@dataclass(kw_only=True, slots=True)
class PackedGroup:
    """Neighbouring sequences of similar length, whose attention is computed together, padded to `width`."""

    start: int
    stop: int
    """the group's tokens are those from `start` up to `stop` of the packed row"""
    rows: int
    width: int
    index: Tensor | None
    """(stop - start,) int64: where each token stands in the group's (rows * width); None where all are `width` long"""


@dataclass(kw_only=True, slots=True)
class Packing:
    """How the real tokens of a padded (B, S) batch stand in one row of T tokens, sequence after sequence."""

    token_index: Tensor
    """(T,) int64 into the flattened (B*S)"""
    cu_seqlens: Tensor
    """(B + 1,) int32: where each sequence begins, and T"""
    max_length: int
    groups: tuple[PackedGroup, ...]

    def to(self, device: torch.device | str) -> Packing:
        return self.changed(lambda tensor: tensor.to(device))

    def changed(self, change: Callable[[Tensor], Tensor]) -> Packing:
        """With `change` of every tensor."""
        return replace(_with_tensors(self, change), groups=tuple(_with_tensors(g, change) for g in self.groups))


@dataclass(kw_only=True, slots=True)
class Batch:
    """Several sequences as a model wants them: padded on the right. Built by `chatgpt.batching.collate`.

    Two sequences, prompts of 2 and 1 tokens, responses of 1 and 2::

        input_ids    [[p p r], [p r r]]   action_index [1, 3, 4]   (flat index of the state that predicts each action)
        action_rows  [0, 1, 1]            last_index   [2, 5]
    """

    input_ids: Tensor
    """(B, S) int64"""
    position_ids: Tensor
    """(B, S) int64, 0 .. S-1 in every row"""
    attention_mask: Tensor
    """(B, S) bool, True = real token; needed only by models that look ahead"""
    action_index: Tensor
    """(N,) int64 into the flattened (B*S) hidden states: the state just before each action"""
    action_ids: Tensor
    """(N,) int64"""
    action_mask: Tensor
    """(N,) bool, True = counts"""
    action_rows: Tensor
    """(N,) int64, the row each action belongs to"""
    last_index: Tensor
    """(B,) int64 into (B*S): the last real token of each row"""
    sequence_mask: Tensor
    """(B,) bool, True = a real sequence; False in a dummy batch"""
    packing: Packing | None = None
    """how to run it without its padding, for models that can; the indices above hold either way"""
    columns: dict[str, Tensor] = field(default_factory=dict)
    """what a loss needs beside tokens, by name: (N,) per action, (B,) per sequence, or (P,) per pair; 0 in a dummy
    batch"""
    totals: dict[str, float] = field(default_factory=dict)
    """sums over the whole train batch, all ranks and micro-batches together, which a loss divides by"""

    @property
    def num_sequences(self) -> int:
        return self.input_ids.shape[0]

    @property
    def num_actions(self) -> int:
        return self.action_ids.shape[0]

    def to(self, device: torch.device | str, *, pin_memory: bool = False) -> Batch:
        """A copy on `device`; with `pin_memory`, from page-locked copies of what is in host memory, which a CUDA device
        takes without making the host wait."""

        def moved(tensor: Tensor) -> Tensor:
            if pin_memory and tensor.device.type == 'cpu':
                return tensor.pin_memory().to(device, non_blocking=True)
            return tensor.to(device)

        return self.changed(moved)

    def changed(self, change: Callable[[Tensor], Tensor]) -> Batch:
        """With `change` of every tensor, packing and columns included."""
        packing = None if self.packing is None else self.packing.changed(change)
        columns = {name: change(column) for name, column in self.columns.items()}
        return replace(_with_tensors(self, change), packing=packing, columns=columns)
