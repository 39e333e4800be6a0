"""Draws that do not depend on what was generated beside them: a `LocalEngine` whose tokens are those that one canonical
computation of each sequence alone would have drawn.

That computation of a position is a forward of the sequence alone, without a cache: one row, filled up to the next power
of two (at least `BLOCK`, at most the model's positions), and the head over the aligned block of `BLOCK` positions. Its
shapes follow from the position alone, and a causal model's rows do not depend on what stands after them, which `begin`
tests to the bit. Every draw whose recorded edge distance is within a bound (`edge_bound`) is drawn again from it; where
the token differs, the rest of the response is generated again from there. So the result is the canonical one at every
position, and the bound may differ between layouts. Greedy decoding records no edge: all of it is read again.
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
"""positions whose logits are computed together"""
PROBES = 2
SAFETY = 16.0
FLOOR_UNITS = 64.0


def edge_bound(d: float, *, filtered: bool = False) -> float:
    """How far from an edge a draw may lie and come out differently, where no log-prob differs by more than d.

    Split the tokens that a filter kept into those up to an edge, of mass A, and the others, of mass B. Each sum changes
    by a factor within [exp(-d), exp(d)], so the logit of F = A / (A + B) moves by at most 2d, and F by at most
    sigmoid(d) - sigmoid(-d) = tanh(d / 2). A filter keeps the same tokens where the one kept last and the first one
    left out cannot change places: two that do were within a factor exp(2d) of each other, the smaller with at most half
    the mass, so their gap was at most (exp(2d) - 1) / 2, which is also more than a mass at `top_p` can move.
    """
    return math.expm1(2 * d) / 2 if filtered else math.tanh(d / 2)


class Change(NamedTuple):
    """The first position of a response at which the canonical draw is another."""

    position: int
    draw: Draw
    """of one row"""


class ExactDraws(EngineAround):
    """A `LocalEngine` with canonical draws: the same samples in any batch, on any number of ranks, in any order.

    Their tokens and finish reasons are canonical. `logprobs`, `filtered_logprobs` and `edge_distances` are still those
    of whoever drew the token: right up to rounding, and nothing to learn from where bits count.

    `redrawn` counts draws that were drawn again, `changed` those that came out as another token; both say how the
    engine batched, and differ between layouts.

    Raises:
        ValueError: an engine that is no `LocalEngine`.

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
        # Nobody draws again while a turn is under way, and recorded log-probs are of the batches that engines made.
        self.abilities = Abilities(copies_weights=False, reproducible=True, runs_actor=True, exact_logprobs=False)
        self.redrawn = self.changed = 0
        self._actor: Any = None
        self._positions: int | None = None
        self._seen = self._cleared_with = 0.0
        self._checked: Any = None

    def with_draws_of(self, wrap: Callable[[RolloutEngine], RolloutEngine]) -> RolloutEngine:
        """This one: its draws are canonical already."""
        return self

    def begin(self, actor: Actor) -> None:
        """Take the policy's weights for one collect phase.

        Raises:
            ValueError: what `LocalEngine.begin` raises, and a model whose logits depend on later tokens to the bit.
        """
        super().begin(actor)
        self._actor, config = actor, text_config(actor.model.config)
        self._positions = position_limit(config)
        self._seen = self._cleared_with = 0.0
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
        """Give the weights back."""
        super().end()
        self._actor = None

    def counts(self) -> dict[str, int]:
        """Draws that were drawn again, and those of them that came out as another token."""
        counts = {'redrawn_draws': self.redrawn, 'changed_draws': self.changed}
        self.redrawn = self.changed = 0
        return counts

    def generate(self, call: Call) -> list[Sample]:
        """See `RolloutEngine.generate`.

        Raises:
            ValueError: what `LocalEngine.generate` raises.
            RuntimeError: log-probs differ by more than earlier draws were cleared with.
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
        """Tokens of the forward in which a prefix of `length` is computed."""
        width = max(BLOCK, 1 << (length - 1).bit_length())
        return width if self._positions is None else min(width, self._positions)

    def _hidden(self, ids: Tensor, width: int) -> Tensor:
        """(width, D) of the first `width` tokens of one sequence, (S,) int64, filled up with its first."""
        device = next(self._actor.parameters()).device
        row = torch.cat([ids[:width], ids[:1].expand(max(width - len(ids), 0))])[None].to(device)
        positions = torch.arange(width, device=device)[None]
        with changing_shapes(device):
            return self._actor.trunk(row, position_ids=positions)[0]

    def _block(self, sample: Sample, position: int, hidden: dict[int, Tensor] | None = None) -> Tensor:
        """(at most BLOCK, V) logits of the aligned block that holds the prediction of response token `position`.
        `hidden` keeps forwards of this very sequence by their width."""
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

    def _d(self) -> float:
        """What is assumed, not proven: `SAFETY` times the largest difference seen since `begin`, and at least
        `FLOOR_UNITS` units in the last place, for the rounding of probabilities. The first `PROBES` responses of each
        call are computed both ways to see it, beside all that are drawn again; a later one above it raises."""
        return max(SAFETY * self._seen, FLOOR_UNITS * torch.finfo(next(self._actor.parameters()).dtype).eps)

    def _bound(self, sampling: SamplingParams) -> float:
        """Edge distance up to which draws are drawn again."""
        self._cleared_with = max(self._cleared_with, self._d())
        return edge_bound(self._cleared_with, filtered=sampling.top_k > 0 or sampling.top_p < 1.0)

    def _compare(self, sample: Sample, position: int, logits: Tensor) -> None:
        """Note how much the recorded log-probs in a block of canonical logits differ from it."""
        before = len(sample.prompt_ids) - 1
        first = (before + position) // BLOCK * BLOCK
        start, stop = max(first, before), min(first + len(logits), before + sample.num_actions)
        scaled = logits[start - first : stop - first].float() / sample.temperature
        ids = sample.response_ids[start - before : stop - before].to(logits.device)
        canonical = torch.log_softmax(scaled, dim=-1).gather(1, ids[:, None])[:, 0].cpu()
        difference = float((canonical - sample.logprobs[start - before : stop - before]).abs().max())
        if self._cleared_with and difference > self._cleared_with:
            raise RuntimeError(
                f'exact draws: a log-prob of sample {sample.index} differs by {difference:.1e} between two shapes of '
                f'its computation, and draws were cleared with at most {self._cleared_with:.1e}: this model rounds too '
                "unevenly for reproducible='exact'"
            )
        self._seen = max(self._seen, difference)

    # ------------------------------------------------------------------ drawing again

    def _first_change(self, call: Call, i: int, sample: Sample, start: int, bound: float) -> Change | None:
        """Where, from response position `start` on, the canonical draw is another token."""
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
        """The draw of one position from its (1, V) logits."""
        sampling, device, uniform = call.sampling, logits.device, None
        if sampling.do_sample:
            key = sample_keys(call.seed, torch.tensor([call.indices[i]], dtype=torch.int64, device=device))
            at = torch.tensor([[call.offsets[i] + position]], dtype=torch.int64, device=device)
            uniform = uniforms(key[:, None], at)
        barred = sampling.eos_token_ids and position < sampling.min_new_tokens
        return sampler(logits, uniform, torch.ones(1, dtype=torch.bool, device=device) if barred else None)

    def _continue(self, call: Call, samples: list[Sample], changes: dict[int, Change]) -> dict[int, int]:
        """Put the canonical draws into the samples, and generate what comes after them. Returns, of each sample with
        something new in it, the first new position."""
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
            limits = [call.room(i) for i in members]
            room = [limit - samples[i].num_actions for i, limit in zip(members, limits, strict=True)]
            # One call for all: some may come out longer than they may be, and are cut; a stop is asked of the whole
            # response, which an engine that begins in its middle does not see.
            of_rest = replace(
                sampling,
                max_new_tokens=max(room),
                max_length=max(len(call.prompts[i].ids) + limit for i, limit in zip(members, limits, strict=True)),
                min_new_tokens=min(barred, max(room)),
                stop=None,
            )
            asked = Call.of(
                [Prompt(ids=torch.cat([samples[i].prompt_ids, samples[i].response_ids])) for i in members],
                of_rest,
                seed=call.seed,
                indices=[call.indices[i] for i in members],
                offsets=[call.offsets[i] + samples[i].num_actions for i in members],
            )
            further = self.engine.generate(asked)
            for i, limit, more in zip(members, limits, further, strict=True):
                samples[i] = self._joined(sampling, samples[i], more, limit)
        return {i: changes[i].position + 1 for members in rest.values() for i in members}

    @staticmethod
    def _ending(sampling: SamplingParams, ids: list[int], limit: int) -> FinishReason | None:
        """How a response ends with its newest token; None where it goes on."""
        if ids[-1] in sampling.eos_token_ids:
            return 'eos'
        if sampling.stop is not None and len(ids) >= sampling.min_new_tokens and sampling.stop(ids):
            return 'stop'
        return 'length' if len(ids) >= limit else None

    def _joined(self, sampling: SamplingParams, sample: Sample, more: Sample, limit: int) -> Sample:
        """`sample` with what was generated after it, up to its end."""
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
    """The sample up to `position`, where it has this draw."""
    parts = {'response_ids': draw.token, 'logprobs': draw.logprob, 'filtered_logprobs': draw.filtered_logprob}
    parts['edge_distances'] = torch.ones(1) if draw.edge_distance is None else draw.edge_distance
    joined: dict[str, Any] = {
        name: torch.cat([getattr(sample, name)[:position], new.cpu()]) for name, new in parts.items()
    }
    return replace(sample, **joined, response_mask=sample.response_mask[: position + 1])
