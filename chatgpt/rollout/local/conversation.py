"""Sequences of several turns in a slot cache: what they hold stays there while an environment thinks.

A sequence whose turn has ended leaves the live rows and keeps its cache row; it stands at the end of the queue. When
enough rows are free, the first of the queue enter: prompts by a prefill, sequences that come back by the tokens that
were appended to them. The rows that they need behind the live ones are exchanged with those that stand there. Every
such choice is made on token counts and the order of the queue, and what an environment answers is asked for when its
sequence enters, not before: how long it thinks cannot be seen in a sample.

Tokens between two turns are appended to what the row holds (`chatgpt.rollout.local.append`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from chatgpt.batching import cut_by_tokens
from chatgpt.rollout.call import Call
from chatgpt.rollout.engine import Turns, changing_shapes
from chatgpt.rollout.local.append import AppendForm, append
from chatgpt.rollout.local.fixed_step import Tables
from chatgpt.rollout.local.run import LocalRun


class Conversation(LocalRun):
    """One call of `LocalEngine.converse`.

    Args:
        engine: the `LocalEngine`.
        rooms: the most tokens after each prompt; what was drawn lies in a flat (samples x largest room) table, where
            the places of observations stay empty.
    """

    def __init__(self, engine: Any, call: Call, rooms: list[int], turns: Turns) -> None:
        super().__init__(engine, call, rooms, most_rows=2 * engine.max_batch_size, spare_slots=1)
        self.turns = turns
        # appended tokens have no mask of a window
        self.append_form: AppendForm = 'again' if self.windows is not None else engine.append_form()
        self.most_live = min(engine.max_batch_size, self.max_rows)
        self.min_refill = max(1, engine.min_refill * self.most_live // engine.max_batch_size)
        self.limits = list(rooms)  # of the turn that is drawn now
        self.idle_slot = self.max_width  # behind all that a sequence stores
        size, draws = len(rooms) * self.max_new, self.uniforms is not None
        self.tables = Tables(size, self.device, draws=draws) if self.fixed is None else self.fixed.tables
        self.transcripts: list[list[int]] = [p.ids.tolist() for p in call.prompts]
        self.stored = [0] * len(rooms)  # of a parked sequence: its tokens that are in the cache
        self.parked: set[int] = set()  # sequences with a cache row whose turn has ended
        self.held: list[int | None] = [None] * self.max_rows  # whose each cache row is; those of live rows come first

    # ------------------------------------------------------------------ who enters

    def loop(self) -> None:
        while self.queue or self.row_sample:
            free = self.most_live - len(self.row_sample)
            if self.queue and (not self.row_sample or free >= self.min_refill):
                self.admit(free)
            else:
                self.decode()

    def admit(self, free: int) -> None:
        """Let the first of the queue enter; those whose episode is over give their cache rows back."""
        fresh: list[int] = []
        back: list[int] = []
        while len(fresh) + len(back) < free and (sample := self._first_in_queue(len(fresh))) is not None:
            if sample not in self.parked:
                fresh.append(sample)
                continue
            with torch.inference_mode(False):
                ids = self.turns.next(sample)
            if ids is not None:
                self.transcripts[sample] += ids.tolist()
                back.append(sample)
            else:
                self.parked.remove(sample)
                self.held[self.held.index(sample)] = None
        for sample in (*fresh, *back):
            self.began[sample] = len(self.transcripts[sample]) - len(self.prompts[sample].ids)
            self.limits[sample] = self.turns.limit(sample)
            self.ids[sample] = []
        if fresh:
            self._make_room(fresh)
            self.enter(self.prefilled(fresh))
        if back:
            chunks = self._cut(back)
            self._make_room([sample for chunk in chunks for sample in chunk])
            self.parked.difference_update(back)
            self.enter(self._appended(chunks))

    def _first_in_queue(self, promised: int) -> int | None:
        """Takes the first of the queue for which there is a cache row beside the `promised` ones."""
        room = self.held.count(None) > promised
        for place, sample in enumerate(self.queue):
            if room or sample in self.parked:
                del self.queue[place]
                return sample
        return None

    def _make_room(self, entering: list[int]) -> None:
        """Give those who enter the rows behind the live ones, in this order, and whose rows these were others."""
        stop = len(self.row_sample) + len(entering)
        wanted = [*self.row_sample, *entering, *(None if s in entering else s for s in self.held[stop:])]
        for displaced in self.held[len(self.row_sample) : stop]:
            if displaced is not None and displaced not in entering:
                wanted[wanted.index(None)] = displaced
        at = {s: row for row, s in enumerate(self.held) if s is not None}
        moves = [(at[s], row, self.stored[s]) for row, s in enumerate(wanted) if s in self.parked and at[s] != row]
        if moves:
            sources, targets, lengths = map(list, zip(*moves, strict=True))
            self.cache.move(sources, targets, max(lengths))
        self.held = wanted

    # ------------------------------------------------------------------ who comes back

    def _cut(self, back: list[int]) -> list[list[int]]:
        """Those who come back by forwards of at most `max_prefill_tokens` padded tokens."""
        known = (lambda s: 0) if self.append_form == 'again' else (lambda s: self.stored[s])
        lengths = [len(self.transcripts[s]) - known(s) for s in back]
        return [[back[i] for i in chunk] for chunk in cut_by_tokens(lengths, self.engine.max_prefill_tokens)]

    def _appended(self, chunks: list[list[int]]) -> Iterator[tuple[list[int], Tensor]]:
        """Samples in the order of their rows, with the logits of their transcripts' last tokens."""
        longest = max(len(self.transcripts[s]) for chunk in chunks for s in chunk)
        if longest > self.cache.capacity:
            self.cache.reserve(self.max_rows, min(self.max_width, max(longest, 2 * self.cache.capacity)))
        for samples in chunks:
            if self.append_form == 'again':
                yield samples, self.prefill([tuple(self.transcripts[s]) for s in samples], [1] * len(samples))
                continue
            stored = [self.stored[s] for s in samples]
            new = [self.transcripts[s][start:] for s, start in zip(samples, stored, strict=True)]
            with changing_shapes(self.device):
                hidden = append(
                    self.actor, self.cache, self.append_form, self.engine._mask_form, len(self.row_sample), stored, new
                )
            yield samples, self.actor.head(hidden)

    # ------------------------------------------------------------------ who leaves

    def emit(self, logits: Tensor, state: Tensor) -> tuple[Tensor, list[bool] | None]:
        result = super().emit(logits, state)
        place, draw = self.records.pop()
        self.tables.write(place, draw)
        return result

    def compact(self, survivors: list[int]) -> None:
        """The rows that do not survive have ended a turn."""
        staying = {self.row_sample[row] for row in survivors}
        self._park([sample for sample in self.row_sample if sample not in staying])
        super().compact(survivors)

    def fill(self, holes: list[int], movers: list[int]) -> None:
        for hole, mover in zip(holes, movers, strict=True):
            self.held[hole], self.held[mover] = self.held[mover], self.held[hole]
        self.cache.move([*movers, *holes], [*holes, *movers], self.longest_offset + self.step)

    def rows_changed(self) -> None:
        super().rows_changed()
        self.held[: len(self.row_sample)] = self.row_sample

    def _park(self, samples: list[int]) -> None:
        """Hand their turns over, and queue them for the next."""
        counts = [self.num_tokens[s] for s in samples]
        # so that the samples are ordinary tensors that autograd may save
        with torch.inference_mode(False):
            firsts = [s * self.max_new + self.began[s] for s in samples]
            places = torch.cat([torch.arange(a, a + n) for a, n in zip(firsts, counts, strict=True)]).to(self.device)
            columns = [column[places].cpu().split(counts) for column in self.tables.columns()]
            for sample, ids, logprobs, filtered, edges in zip(samples, *columns, strict=True):
                bad = (~(torch.isfinite(filtered) & torch.isfinite(logprobs))).nonzero()
                if len(bad):
                    raise self.not_finite(sample, self.began[sample] + int(bad[0]))
                self.transcripts[sample] += ids.tolist()
                self.stored[sample] = len(self.transcripts[sample]) - 1  # the last token was not fed back yet
                self.parked.add(sample)
                self.queue.append(sample)
                turn = (ids.clone(), logprobs.clone(), filtered.clone(), edges.clone(), self.reasons[sample])
                self.turns.ended(sample, self.call.sample(sample, *turn))
