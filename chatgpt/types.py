"""The records that packages exchange.

A sequence is one record of unpadded 1-D tensors, with prompt and response separate. Only `Batch` is padded;
`chatgpt.batching.collate` builds it just before a model's forward. Shape letters: B sequences, S tokens of a padded
row, P prompt tokens, A actions (response tokens) of one sequence, N actions of a whole batch. Imports torch only.
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
"""the first sample index of evaluations; training uses the indices below it"""


@dataclass(kw_only=True, slots=True)
class Prompt:
    """One prompt, tokenized."""

    ids: Tensor
    """(P,) int64, P >= 1"""
    text: str = ''
    columns: dict[str, Any] = field(default_factory=dict)
    """the other columns of the data row, passed to reward functions by name"""
    messages: list[dict[str, Any]] | None = None
    """the turns {'role': ..., 'content': ...} of a conversation; else None"""

    @property
    def last_turn(self) -> str:
        """The content of a conversation's last turn, which tables show instead of the text; else ''."""
        return str(self.messages[-1].get('content') or '') if self.messages else ''


@dataclass(kw_only=True, slots=True)
class Sequence:
    """Prompt and response tokens with a mask: the input of scoring and of learning."""

    prompt_ids: Tensor
    """(P,) int64, P >= 1"""
    response_ids: Tensor
    """(A,) int64, A >= 1; includes the end token if the model generated it"""
    response_mask: Tensor
    """(A,) bool, True = counts (the model generated the token; tool output and the like are False)"""

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
    """the policy generated the response tokens [start, stop); start < stop"""
    rewards: dict[str, float] = field(default_factory=dict)
    """the environment's rewards for the turn, by name; 'reward' if it returns one number"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Episode:
    """The course of a sample in an environment: its response holds several turns, with observations between them, at
    which `response_mask` is False."""

    turns: tuple[Turn, ...]
    end: EpisodeEnd
    """terminated, truncated: as the environment reported. turns: the limit of turns. tokens: the token limit leaves no
    space for the observation and one more token. error, timeout, invalid: the environment raised, took too long, or
    returned something invalid"""
    message: str = ''
    """one line about a failure"""
    success: bool | None = None
    step_s: float = 0.0
    """seconds in all of the environment's steps together"""

    @property
    def failed(self) -> bool:
        """True if the environment raised, took too long or returned something invalid."""
        return self.end in ('error', 'timeout', 'invalid')


@dataclass(kw_only=True, slots=True)
class Sample(Sequence):
    """One generated response."""

    index: int
    """run-wide sample number; with the seed it determines every random draw"""
    group: int
    """number of the prompt draw; all samples of the draw share it (GRPO, RLOO)"""
    logprobs: Tensor
    """(A,) fp32, behaviour log-probs: temperature-scaled, unfiltered"""
    filtered_logprobs: Tensor
    """(A,) fp32, the same after top-k / top-p renormalisation"""
    edge_distances: Tensor
    """(A,) fp32, distance of the uniform draw to the nearest edge of its token's cumulative interval; 1 where no token
    was sampled"""
    finish_reason: FinishReason
    temperature: float = 1.0
    version: int = 0
    """number of learning phases before the generation, of its first token"""
    versions: Tensor | None = None
    """(A,) int64, the same for each token, where an engine took up new weights during the response; None: all tokens
    are of `version`"""
    prompt_text: str = ''
    last_turn: str = ''
    """`Prompt.last_turn`"""
    response_text: str = ''
    columns: dict[str, Any] = field(default_factory=dict)
    episode: Episode | None = None
    """None without an environment"""

    @property
    def token_versions(self) -> Tensor:
        """The version of each token, (A,) int64."""
        return torch.full_like(self.response_ids, self.version) if self.versions is None else self.versions

    @property
    def called(self) -> str:
        """Its name in error messages: sample number, prompt or last turn, and response."""
        of_evaluation, number = divmod(self.index, EVAL_INDEX)
        name = f'eval prompt {number}, counted from 0' if of_evaluation else f'sample {number}'
        texts = [self.last_turn or self.prompt_text, self.response_text]
        shown = [repr(text if len(text) <= 60 else f'{text[:25]}…{text[-35:]}') for text in texts if text]
        return f'{name} ({" → ".join(shown)})' if shown else name

    @property
    def ended(self) -> bool:
        """True if an end token or a stop string ended the response, not a length limit."""
        return self.finish_reason != 'length'

    @property
    def failed(self) -> bool:
        """True if its environment failed."""
        return self.episode is not None and self.episode.failed

    @property
    def left_out(self) -> bool:
        """True if its environment failed and no token counts: no baseline and no statistics use its score."""
        return self.failed and not bool(self.response_mask.any())


@dataclass(kw_only=True, slots=True)
class Experience(Sample):
    """A sample with everything that learning needs. All per-token tensors are (A,) fp32."""

    score: float
    """one per sequence, as the scorer returned it"""
    old_logprobs: Tensor
    """denominator of the ratio: log-probs of the generation, or recomputed by the scoring pass"""
    ref_logprobs: Tensor
    """of the initial model; equal to old_logprobs without one"""
    values: Tensor
    """V of the state before each action; zeros without a critic"""
    kl: Tensor
    """per-token KL estimate in the rewards"""
    rewards: Tensor
    """-beta * kl, with the score added once at the last action that counts"""
    advantages: Tensor
    returns: Tensor
    shaped_score: float = 0.0
    """the score in the rewards, after scaling, clipping, penalties and whitening"""
    token_scores: Tensor | None = None
    """dense scores, if the scorer returns one per token"""
    weighted_scores: tuple[tuple[float, float], ...] = ()
    """(weight, score) of each reward, if the scorer is a weighted list; `score` is their sum"""
    rank: int = 0
    """the rank that holds its tensors (`chatgpt.nn.records`)"""


def tensors_to(record: Any, device: torch.device | str) -> Any:
    """Returns a copy of a record with every tensor field on `device`, except those that another rank holds."""
    return with_tensors(record, lambda tensor: tensor if tensor.is_meta else tensor.to(device))


def with_tensors(record: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Returns a copy of a record with `change` applied to every tensor field."""
    values = {f.name: value for f in fields(record) if isinstance(value := getattr(record, f.name), Tensor)}
    return replace(record, **{name: change(value) for name, value in values.items()})


@dataclass(kw_only=True, slots=True)
class PackedGroup:
    """Neighbouring sequences of similar length. Their attention is computed together, padded to `width`."""

    start: int
    stop: int
    """the group's tokens are [start, stop) of the packed row"""
    rows: int
    width: int
    index: Tensor | None
    """(stop - start,) int64: position of each token in the group's (rows * width); None if all sequences are `width`
    long"""


@dataclass(kw_only=True, slots=True)
class Packing:
    """Positions of the real tokens of a padded (B, S) batch in one row of T tokens, sequence after sequence.

    In a causal model, tokens after equal prefixes have equal states. Where sequences begin alike, a model computes
    U < T states and attention alone handles all T tokens.
    """

    token_index: Tensor
    """(T,) int64 into the flattened (B*S)"""
    cu_seqlens: Tensor
    """(B + 1,) int32: start of each sequence, then T"""
    max_length: int
    groups: tuple[PackedGroup, ...]
    computed_index: Tensor | None = None
    """(U,) int64 into T: the tokens that are computed; None: all of them"""
    state_index: Tensor | None = None
    """(T,) int64 into U: the state of each token; None with `computed_index`"""
    group: Any = None
    """the processes that hold equal parts of the computed tokens (`chatgpt.strategies.sequence_parallel`); None: one"""

    def to(self, device: torch.device | str) -> Packing:
        return self.changed(lambda tensor: tensor.to(device))

    def changed(self, change: Callable[[Tensor], Tensor]) -> Packing:
        """Returns a copy with `change` applied to every tensor."""
        return replace(with_tensors(self, change), groups=tuple(with_tensors(g, change) for g in self.groups))


@dataclass(kw_only=True, slots=True)
class Batch:
    """The input of a model: sequences padded on the right. Built by `chatgpt.batching.collate`.

    Two sequences, prompts of 2 and 1 tokens, responses of 1 and 2::

        input_ids    [[p p r], [p r r]]   action_index [1, 3, 4]   (flat index of the state that predicts each action)
        action_rows  [0, 1, 1]            last_index   [2, 5]
    """

    input_ids: Tensor
    """(B, S) int64"""
    position_ids: Tensor
    """(B, S) int64, 0 .. S-1 in every row"""
    attention_mask: Tensor
    """(B, S) bool, True = real token; only models with bidirectional attention need it"""
    action_index: Tensor
    """(N,) int64 into the flattened (B*S) hidden states: the state that predicts each action"""
    action_ids: Tensor
    """(N,) int64"""
    action_mask: Tensor
    """(N,) bool, True = counts"""
    action_rows: Tensor
    """(N,) int64, the row of each action"""
    last_index: Tensor
    """(B,) int64 into (B*S): the last real token of each row"""
    sequence_mask: Tensor
    """(B,) bool, True = a real sequence; False in a dummy batch"""
    packing: Packing | None = None
    """for models that run without padding; the indices above hold either way"""
    columns: dict[str, Tensor] = field(default_factory=dict)
    """further inputs of a loss, by name: (N,) per action, (B,) per sequence, or (P,) per pair; 0 in a dummy batch"""
    totals: dict[str, float] = field(default_factory=dict)
    """normalizers of a loss: sums over the train batch, all ranks and micro-batches together"""

    @property
    def num_sequences(self) -> int:
        return self.input_ids.shape[0]

    @property
    def num_actions(self) -> int:
        return self.action_ids.shape[0]

    def to(self, device: torch.device | str, *, pin_memory: bool = False) -> Batch:
        """Returns a copy on `device`; with `pin_memory` host tensors are page-locked first, so that the copy to a CUDA
        device does not block."""

        def moved(tensor: Tensor) -> Tensor:
            if pin_memory and tensor.device.type == 'cpu':
                return tensor.pin_memory().to(device, non_blocking=True)
            return tensor.to(device)

        return self.changed(moved)

    def changed(self, change: Callable[[Tensor], Tensor]) -> Batch:
        """Returns a copy with `change` applied to every tensor, packing and columns included."""
        packing = None if self.packing is None else self.packing.changed(change)
        columns = {name: change(column) for name, column in self.columns.items()}
        return replace(with_tensors(self, change), packing=packing, columns=columns)
