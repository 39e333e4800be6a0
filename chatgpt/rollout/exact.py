"""Batch-invariant sampling: a `LocalEngine` with tokens that equal those of a canonical computation of each sequence.

The canonical computation of a position is a forward of its sequence alone, without a cache: one row, filled up to the
next power of two (at least `BLOCK`, at most the model's positions), with the head over the aligned block of `BLOCK`
positions. Its shapes depend on the position only, and in a causal model a row does not depend on later ones, which
`begin` tests to the bit. A draw is repeated from it if its recorded edge distance is within a bound (`edge_bound`); if
the token changes, the rest of the response is generated again. The result is canonical at every position, even if the
bound differs between layouts. Greedy decoding records no edge distances, so all its tokens are recomputed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from chatgpt.nn.trunk import position_limit, text_config
from chatgpt.rollout.call import Call
from chatgpt.rollout.engine import Abilities, EngineAround, RolloutEngine, changing_shapes
from chatgpt.rollout.randomness import sample_keys, uniforms
from chatgpt.rollout.sampling import Draw, SamplingParams, TokenSampler
from chatgpt.types import FinishReason, Prompt, Sample

if TYPE_CHECKING:
    from chatgpt.nn import Actor

BLOCK = 32
"""number of positions in a block of logits"""
PROBES = 2
SAFETY = 16.0
FLOOR_UNITS = 64.0


def edge_bound(d: float, *, filtered: bool = False) -> float:
    """Returns the largest edge distance at which a draw can change if no log-prob changes by more than d.

    Split the tokens that a filter keeps at an edge into masses A below and B above it. Each mass changes by a factor
    within [exp(-d), exp(d)], so the logit of F = A / (A + B) moves by at most 2d, and F by at most
    sigmoid(d) - sigmoid(-d) = tanh(d / 2). A filter keeps the same tokens unless the last one kept and the first one
    removed change places: two such tokens are within a factor exp(2d) of each other, the smaller with at most half the
    mass, so their gap is at most (exp(2d) - 1) / 2, which is also more than a mass at `top_p` can move.
    """
    return math.expm1(2 * d) / 2 if filtered else math.tanh(d / 2)


class Change(NamedTuple):
    """The first position of a response at which the canonical token differs."""

    position: int
    draw: Draw
    """the canonical draw, one row"""


class ExactDraws(EngineAround):
    """A `LocalEngine` with canonical draws: the same samples in any batch, in any order and on any number of ranks.

    Tokens and finish reasons are canonical. `logprobs`, `filtered_logprobs` and `edge_distances` come from the batch in
    which the token was sampled, so they are exact only up to rounding.

    `redrawn` counts draws that were repeated, `changed` those that gave another token; both depend on the batches, and
    differ between layouts.

    Raises:
        ValueError: the engine is not a `LocalEngine`.

    >>> engine = ExactDraws(LocalEngine())                                                        # doctest: +SKIP
    """

    def __init__(self, engine: RolloutEngine) -> None:
        if not (engine.abilities.runs_actor and engine.abilities.reproducible):
            raise ValueError(
                f"reproducible='exact' draws again what rounding could change, which only LocalEngine can have done: "
                f"{type(engine).__name__} computes elsewhere or otherwise; use engine='local' without rollout workers, "
                'which decodes no encoder-decoders'
            )
        super().__init__(engine)
        # Draws cannot be repeated while turns are in progress, and log-probs are those of the engine's batches.
        self.abilities = Abilities(copies_weights=False, reproducible=True, runs_actor=True, exact_logprobs=False)
        self.redrawn = self.changed = 0
        self._actor: Any = None
        self._positions: int | None = None
        self._largest_seen = self._assumed = 0.0
        self._checked: Any = None

    def with_draws_of(self, wrap: Callable[[RolloutEngine], RolloutEngine]) -> RolloutEngine:
        """Returns this engine, because its draws are canonical already."""
        return self

    def begin(self, actor: Actor) -> None:
        """Starts a collect phase.

        Raises:
            ValueError: as `LocalEngine.begin`, or if later tokens change any bit of the model's logits.
        """
        super().begin(actor)
        self._actor, config = actor, text_config(actor.model.config)
        self._positions = position_limit(config)
        self._largest_seen = self._assumed = 0.0
        parameter = next(actor.parameters())
        kind = (type(actor.model), parameter.dtype, parameter.device, str(actor.model.config.to_dict()))
        if kind != self._checked:
            try:
                self._check_causal(config.vocab_size)
            except ValueError:
                self.end()
                raise
            self._checked = kind

    def end(self) -> None:
        """Ends the collect phase."""
        super().end()
        self._actor = None

    def counts(self) -> dict[str, int]:
        """Returns the numbers of repeated and of changed draws since the last call."""
        counts = {'redrawn_draws': self.redrawn, 'changed_draws': self.changed}
        self.redrawn = self.changed = 0
        return counts

    def generate(self, call: Call) -> list[Sample]:
        """See `RolloutEngine.generate`.

        Raises:
            ValueError: as `LocalEngine.generate`.
            RuntimeError: a log-prob differs by more than the bound of earlier draws assumed.
        """
        samples, sampling = self.engine.generate(call), call.sampling
        with torch.inference_mode():
            for i in range(min(PROBES, len(samples))):
                middle = samples[i].num_actions // 2
                self._compare(samples[i], middle, self._block(samples[i], middle))
        starts = dict.fromkeys(range(len(samples)), 0)
        while starts:
            bound = self._bound(sampling) if sampling.do_sample else math.inf
            with torch.inference_mode():
                found = {i: self._first_change(call, i, samples[i], start, bound) for i, start in starts.items()}
            changes = {i: change for i, change in found.items() if change is not None}
            self.changed += len(changes)
            starts = self._continue(call, samples, changes)
        return samples

    # ------------------------------------------------------------------ the canonical computation

    def _width(self, length: int) -> int:
        """Returns the number of tokens of the canonical forward for a prefix of `length` tokens."""
        width = max(BLOCK, 1 << (length - 1).bit_length())
        return width if self._positions is None else min(width, self._positions)

    def _hidden(self, ids: Tensor, width: int) -> Tensor:
        """Returns (width, D) states of the first `width` of (S,) int64 ids, filled up with the first id."""
        device = next(self._actor.parameters()).device
        row = torch.cat([ids[:width], ids[:1].expand(max(width - len(ids), 0))])[None].to(device)
        positions = torch.arange(width, device=device)[None]
        with changing_shapes(device):
            return self._actor.trunk(row, position_ids=positions)[0]

    def _block(self, sample: Sample, position: int, hidden: dict[int, Tensor] | None = None) -> Tensor:
        """Returns (at most BLOCK, V) logits of the aligned block that predicts response token `position`. `hidden`
        caches the forwards of this sequence by width."""
        at = len(sample.prompt_ids) + position - 1
        width, hidden = self._width(at + 1), {} if hidden is None else hidden
        if width not in hidden:
            hidden[width] = self._hidden(torch.cat([sample.prompt_ids, sample.response_ids]), width)
        first = at // BLOCK * BLOCK
        return self._actor.head(hidden[width][first : first + BLOCK])

    def _check_causal(self, vocab_size: int) -> None:
        width, half = self._width(BLOCK), self._width(BLOCK) // 2
        ids = torch.arange(width) * 7 % vocab_size
        with torch.inference_mode():
            one, other = self._hidden(ids, width), self._hidden(torch.cat([ids[:half], ids[:half] * 0]), width)
        if not torch.equal(one[:half], other[:half]):
            raise ValueError(
                f'{type(self._actor.model).__name__}: later tokens change the last bits of a forward, so '
                "reproducible='exact' cannot draw from it"
            )

    # ------------------------------------------------------------------ the bound

    def _max_difference(self) -> float:
        """Returns the assumed bound of differences between log-probs: `SAFETY` times the largest one observed since
        `begin`, at least `FLOOR_UNITS` units in the last place. It is measured on the first `PROBES` responses of each
        call and on all repeated draws; a later difference above it raises."""
        return max(SAFETY * self._largest_seen, FLOOR_UNITS * torch.finfo(next(self._actor.parameters()).dtype).eps)

    def _bound(self, sampling: SamplingParams) -> float:
        """Returns the edge distance up to which draws are repeated."""
        self._assumed = max(self._assumed, self._max_difference())
        return edge_bound(self._assumed, filtered=sampling.top_k > 0 or sampling.top_p < 1.0)

    def _compare(self, sample: Sample, position: int, logits: Tensor) -> None:
        """Updates the largest difference with the recorded log-probs in a block of canonical logits."""
        before = len(sample.prompt_ids) - 1
        first = (before + position) // BLOCK * BLOCK
        start, stop = max(first, before), min(first + len(logits), before + sample.num_actions)
        scaled = logits[start - first : stop - first].float() / sample.temperature
        ids = sample.response_ids[start - before : stop - before].to(logits.device)
        canonical = torch.log_softmax(scaled, dim=-1).gather(1, ids[:, None])[:, 0].cpu()
        difference = float((canonical - sample.logprobs[start - before : stop - before]).abs().max())
        if self._assumed and difference > self._assumed:
            raise RuntimeError(
                f'exact draws: a log-prob of sample {sample.index} differs by {difference:.1e} between two shapes of '
                f'its computation, and draws were cleared with at most {self._assumed:.1e}: this model rounds too '
                "unevenly for reproducible='exact'"
            )
        self._largest_seen = max(self._largest_seen, difference)

    # ------------------------------------------------------------------ drawing again

    def _first_change(self, call: Call, i: int, sample: Sample, start: int, bound: float) -> Change | None:
        """Returns the first change at or after response position `start`, or None."""
        near = sample.edge_distances[start:] <= bound
        sampler: TokenSampler | None = None
        hidden: dict[int, Tensor] = {}
        block, logits = -1, torch.empty(0)
        for position in (near.nonzero()[:, 0] + start).tolist():
            at = len(sample.prompt_ids) + position - 1
            if at // BLOCK != block:
                block, logits = at // BLOCK, self._block(sample, position, hidden)
                self._compare(sample, position, logits)
            sampler = sampler or TokenSampler(call.sampling, logits.device)
            draw = self._draw(call, i, position, logits[at % BLOCK][None], sampler)
            self.redrawn += 1
            if int(draw.token) != int(sample.response_ids[position]):
                return Change(position, draw)
        return None

    def _draw(self, call: Call, i: int, position: int, logits: Tensor, sampler: TokenSampler) -> Draw:
        """Draws the token of one position from its (1, V) logits."""
        sampling, device, uniform = call.sampling, logits.device, None
        if sampling.do_sample:
            key = sample_keys(call.seed, torch.tensor([call.indices[i]], dtype=torch.int64, device=device))
            at = torch.tensor([[call.offsets[i] + position]], dtype=torch.int64, device=device)
            uniform = uniforms(key[:, None], at)
        barred = sampling.eos_token_ids and position < sampling.min_new_tokens
        return sampler(logits, uniform, torch.ones(1, dtype=torch.bool, device=device) if barred else None)

    def _continue(self, call: Call, samples: list[Sample], changes: dict[int, Change]) -> dict[int, int]:
        """Puts the changes into the samples and generates what follows them. Returns the first new position of each
        sample that was continued."""
        sampling = call.sampling
        rest: dict[int, list[int]] = {}
        for i, (position, draw) in changes.items():
            samples[i] = _cut(samples[i], position, draw)
            reason = self._ending(sampling, samples[i].response_ids.tolist(), call.room(i))
            if reason is not None:
                samples[i].finish_reason = reason
            else:
                rest.setdefault(max(sampling.min_new_tokens - position - 1, 0), []).append(i)
        for barred, members in rest.items():
            room = [call.room(i) - samples[i].num_actions for i in members]
            # One call for all. Responses are cut afterwards by `stop`, which needs the whole response and not only the
            # part that the engine generates here.
            of_rest = replace(
                sampling, max_new_tokens=max(room), max_length=None, min_new_tokens=min(barred, max(room)), stop=None
            )
            rest_call = Call.of(
                [Prompt(ids=torch.cat([samples[i].prompt_ids, samples[i].response_ids])) for i in members],
                of_rest,
                seed=call.seed,
                indices=[call.indices[i] for i in members],
                offsets=[call.offsets[i] + samples[i].num_actions for i in members],
                limits=room,
            )
            further = self.engine.generate(rest_call)
            for i, more in zip(members, further, strict=True):
                samples[i] = self._joined(sampling, samples[i], more, call.room(i))
        return {i: changes[i].position + 1 for members in rest.values() for i in members}

    @staticmethod
    def _ending(sampling: SamplingParams, ids: list[int], limit: int) -> FinishReason | None:
        """Returns the reason why a response ends at its last token, or None if it continues."""
        if ids[-1] in sampling.eos_token_ids:
            return 'eos'
        if sampling.stop is not None and len(ids) >= sampling.min_new_tokens and sampling.stop(ids):
            return 'stop'
        return 'length' if len(ids) >= limit else None

    def _joined(self, sampling: SamplingParams, sample: Sample, more: Sample, limit: int) -> Sample:
        """Appends a continuation to `sample`, up to its end."""
        ids = sample.response_ids.tolist()
        reason: FinishReason | None = None
        for token in more.response_ids.tolist():
            ids.append(token)
            reason = self._ending(sampling, ids, limit)
            if reason is not None:
                break
        assert reason is not None, 'a continuation ended before its response'
        count = len(ids) - sample.num_actions
        joined: dict[str, Any] = {
            name: torch.cat([getattr(sample, name), getattr(more, name)[:count]])
            for name in ('response_ids', 'response_mask', 'logprobs', 'filtered_logprobs', 'edge_distances')
        }
        return replace(sample, **joined, finish_reason=reason)


def _cut(sample: Sample, position: int, draw: Draw) -> Sample:
    """Returns the sample up to `position`, with this draw as its last token."""
    parts = {'response_ids': draw.token, 'logprobs': draw.logprob, 'filtered_logprobs': draw.filtered_logprob}
    parts['edge_distances'] = torch.ones(1) if draw.edge_distance is None else draw.edge_distance
    joined: dict[str, Any] = {
        name: torch.cat([getattr(sample, name)[:position], new.cpu()]) for name, new in parts.items()
    }
    return replace(sample, **joined, response_mask=sample.response_mask[: position + 1])
