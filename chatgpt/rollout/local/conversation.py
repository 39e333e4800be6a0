"""Generation of several turns in a slot cache, which keeps the keys and values of a sequence between its turns.

After its turn a sequence leaves the live rows, is parked in its cache row and joins the end of the queue. When enough
rows are free, the first of the queue enter: new prompts by a prefill, parked sequences by appending the observation
(`chatgpt.rollout.local.append`). Rows are exchanged so that live sequences occupy the first ones. These choices depend
on token counts and the order of the queue only, and an environment's answer is taken when its sequence enters, so
samples do not depend on how long environments take.
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
from chatgpt.rollout.local.run import LocalRun


class Conversation(LocalRun):
    """A call of `LocalEngine.converse`.

    Args:
        engine: the `LocalEngine`.
        rooms: maximum number of tokens after each prompt. Draws are stored in a flat (samples x largest room) table, in
            which the places of observations stay empty.
    """

    def __init__(self, engine: Any, call: Call, rooms: list[int], turns: Turns) -> None:
        super().__init__(engine, call, rooms, num_rows=2 * engine.max_batch_size, spare_slots=1)
        self.turns = turns
        # appended tokens have no mask of a window
        self.append_form: AppendForm = 'again' if self.windows is not None else engine.append_form()
        self.max_live = min(engine.max_batch_size, self.max_rows)
        self.min_refill = max(1, engine.min_refill * self.max_live // engine.max_batch_size)
        self.limits = list(rooms)  # of the current turn
        self.idle_slot = self.max_width  # after the last token that a sequence can store
        self.transcripts: list[list[int]] = [p.ids.tolist() for p in call.prompts]
        self.stored = [0] * len(rooms)  # number of cached tokens of each parked sequence
        self.parked: set[int] = set()  # sequences with a cache row between two turns
        self.held: list[int | None] = [None] * self.max_rows  # the sequence in each cache row; live ones come first

    # ------------------------------------------------------------------ sequences that enter

    def loop(self) -> None:
        while self.queue or self.row_sample:
            free = self.max_live - len(self.row_sample)
            if self.queue and (not self.row_sample or free >= self.min_refill):
                self.settle()
                self.admit(self.max_live - len(self.row_sample))
            else:
                self.decode()

    def admit(self, free: int) -> None:
        """Lets the first sequences of the queue enter, and frees the cache rows of finished episodes."""
        fresh: list[int] = []
        returning: list[int] = []
        while len(fresh) + len(returning) < free and (sample := self._first_in_queue(len(fresh))) is not None:
            if sample not in self.parked:
                fresh.append(sample)
                continue
            with torch.inference_mode(False):
                ids = self.turns.next(sample)
            if ids is not None:
                self.transcripts[sample] += ids.tolist()
                returning.append(sample)
            else:
                self.parked.remove(sample)
                self.held[self.held.index(sample)] = None
        for sample in (*fresh, *returning):
            self.began[sample] = len(self.transcripts[sample]) - len(self.prompts[sample].ids)
            self.limits[sample] = self.turns.limit(sample)
            self.ids[sample], self.reasons[sample] = [], 'length'  # not those of the turn before
        if fresh:
            self._assign_rows(fresh)
            self.enter(self.prefilled(fresh))
        if returning:
            chunks = self._cut(returning)
            self._assign_rows([sample for chunk in chunks for sample in chunk])
            self.parked.difference_update(returning)
            self.enter(self._appended(chunks))

    def _first_in_queue(self, promised: int) -> int | None:
        """Takes the first sequence from the queue that has a cache row or for which one is free, besides the `promised`
        ones."""
        room = self.held.count(None) > promised
        for place, sample in enumerate(self.queue):
            if room or sample in self.parked:
                del self.queue[place]
                return sample
        return None

    def _assign_rows(self, entering: list[int]) -> None:
        """Moves the entering sequences to the rows after the live ones, in this order, and displaced ones elsewhere."""
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

    # ------------------------------------------------------------------ parked sequences that enter again

    def _cut(self, returning: list[int]) -> list[list[int]]:
        """Divides returning sequences into forwards of at most `max_prefill_tokens` padded tokens."""
        known = (lambda s: 0) if self.append_form == 'again' else (lambda s: self.stored[s])
        lengths = [len(self.transcripts[s]) - known(s) for s in returning]
        return [[returning[i] for i in chunk] for chunk in cut_by_tokens(lengths, self.engine.max_prefill_tokens)]

    def _appended(self, chunks: list[list[int]]) -> Iterator[tuple[list[int], Tensor]]:
        """Yields samples in the order of their rows, with the logits of their transcripts' last tokens."""
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

    # ------------------------------------------------------------------ sequences that leave

    def compact(self, survivors: list[int]) -> None:
        """Parks the sequences of all other rows, because their turns have ended, and moves the survivors together."""
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
        """Passes the finished turns to `turns.ended` and queues the sequences for the next ones."""
        counts = [self.num_tokens[s] for s in samples]
        # outside of inference mode, so that autograd may save the samples' tensors
        with torch.inference_mode(False):
            firsts = [s * self.max_new + self.began[s] for s in samples]
            places = torch.cat([torch.arange(a, a + n) for a, n in zip(firsts, counts, strict=True)]).to(self.device)
            columns = [column[places].cpu().split(counts) for column in self.tables.columns]
            for sample, ids, logprobs, filtered, edges in zip(samples, *columns, strict=True):
                bad = (~(torch.isfinite(filtered) & torch.isfinite(logprobs))).nonzero()
                if len(bad):
                    raise self.call.not_finite(sample, self.began[sample] + int(bad[0]))
                self.transcripts[sample] += ids.tolist()
                self.stored[sample] = len(self.transcripts[sample]) - 1  # the last token has not been an input yet
                self.parked.add(sample)
                self.queue.append(sample)
                turn = (ids.clone(), logprobs.clone(), filtered.clone(), edges.clone(), self.reasons[sample])
                self.turns.ended(sample, self.call.sample(sample, *turn))
