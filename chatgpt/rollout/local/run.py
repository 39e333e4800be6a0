"""A call of the local engine: prompts are prefilled into cache rows, which are decoded together until all have ended.

Live sequences are in rows 0 .. n-1 of the batch. A finished one is replaced at once by the last live row, and waiting
prompts enter free rows. Position t of sample i is drawn with the uniform number of (seed, i, t), so the batch can
change a token only by rounding. Work per token is done on tensors; Python handles single rows only when one ends.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from chatgpt.batching import cut_by_tokens
from chatgpt.nn.trunk import row_limit, sharding_group
from chatgpt.rollout.call import Call
from chatgpt.rollout.engine import changing_shapes
from chatgpt.rollout.local.append import append
from chatgpt.rollout.local.attention import AttentionForm, step_keywords
from chatgpt.rollout.local.fixed_step import FixedSteps, Tables, row_bucket, shared_capacity
from chatgpt.rollout.local.slot_cache import indices
from chatgpt.rollout.randomness import sample_keys, uniforms
from chatgpt.rollout.sampling import TokenSampler
from chatgpt.types import FinishReason, Sample

_MIN_SHARED_PREFIX = 16
"""shortest shared prefix, in tokens, that is computed separately from the prompts"""


class LocalRun:
    """The state of a call, from the first prompt that enters to the last response that ends.

    Draws are stored in a flat (samples x max_new) table. `state` (3, n) int64, on the device, holds for each live row
    the table position of its next token, the number of tokens in its cache row, and the first table position at which
    it may end. On the host, each live row has a sample number, an `offset` and a `deadline`; the latter two are
    relative to the step count, so that steps do not change them.
    """

    def __init__(self, engine: Any, call: Call, limits: list[int], *, num_rows: int = 0, spare_slots: int = 0) -> None:
        """engine: the `LocalEngine`. num_rows: rows of the cache, by default the engine's `max_batch_size`.
        spare_slots: additional slots per row in steps of fixed shape."""
        self.engine, self.actor, self.call, self.limits = engine, engine._actor, call, limits
        self.prompts, self.sampling, self.indices = call.prompts, call.sampling, call.indices
        prompts, sampling = call.prompts, call.sampling
        self.device = next(self.actor.parameters()).device
        self.sampler = TokenSampler(sampling, self.device)
        self.max_new = max(limits)
        self.uniforms = self._uniforms() if sampling.do_sample else None
        self.queue = deque(range(len(prompts)))
        # the last token of a sequence is never an input, so it needs no slot
        self.max_width = max(len(p.ids) + limit - 1 for p, limit in zip(prompts, limits, strict=True))
        self.windows = engine.windows_beyond(self.max_width + 1)
        self.attention: AttentionForm = 'plain' if self.windows is not None else engine.attention_form
        wanted = min(num_rows or engine.max_batch_size, len(prompts))
        # streamed blocks have no fixed addresses, and only NCCL's sums over processes can be captured
        streams = any(getattr(module, 'is_streamed', False) for module in self.actor.modules())
        group = sharding_group(self.actor)
        no_graph = streams or (group is not None and not group.capturable)
        fixed = engine.wants_fixed(self.device) and not (engine.fixed_steps == 'auto' and no_graph)
        rows, capacity = self._sizes(wanted, fixed, spare_slots)
        self.max_rows = min(wanted, rows)
        self.min_refill = max(1, engine.min_refill * self.max_rows // engine.max_batch_size)
        self.cache = engine.cache(rows, capacity)
        self.fixed: FixedSteps | None = None
        size = len(prompts) * self.max_new
        if fixed:
            settings: Any = {'capture': not no_graph, 'windows': self.windows}
            self.fixed = engine.fixed(self.cache, self.sampler, self.uniforms, size, **settings)
        self.tables = self.fixed.tables if self.fixed else Tables(size, self.device, draws=sampling.do_sample)
        self.prompt_ids = [tuple(p.ids.tolist()) for p in prompts]
        self.prefix = self._shared_prefix()
        self.fixed_loaded = False
        self.idle_slot = 0  # slot in which idle rows of a fixed shape write
        self.unread: deque[tuple[Callable[[], list[bool]], list[int], int]] = deque()
        """of steps of fixed shape: a function that returns which rows ended, the samples of the rows, the step"""
        # live rows
        self.row_sample: list[int] = []
        self.row_offset: list[int] = []  # offset + step = number of stored tokens after the step
        self.row_deadline: list[int] = []  # step of the last token allowed
        self.state = torch.zeros(3, 0, dtype=torch.int64, device=self.device)
        self.increment = torch.tensor([[1], [1], [0]], device=self.device)
        self.token = torch.zeros(0, dtype=torch.int64, device=self.device)
        self.all_rows = torch.arange(self.max_rows, device=self.device)
        self.row_index = self.all_rows[:0]
        self.step = 0
        self.next_deadline = 0
        self.longest_offset = self.shortest_offset = 0
        self.free_to_end_from = 0  # step from which every live row may end
        # results
        self.began = [0] * len(prompts)  # number of tokens between the prompt and the current turn
        self.num_tokens = [0] * len(prompts)
        self.reasons: list[FinishReason] = ['length'] * len(prompts)
        self.ids: list[list[int]] = [[] for _ in prompts]  # kept only for `sampling.stop`

    def _uniforms(self) -> Tensor:
        """Returns one number for each entry of the table, (samples x max_new, 1) float64."""
        keys = sample_keys(self.call.seed, torch.tensor(self.indices, dtype=torch.int64, device=self.device))
        first = torch.tensor(self.call.offsets, dtype=torch.int64, device=self.device)
        positions = first[:, None] + torch.arange(self.max_new, device=self.device)
        return uniforms(keys[:, None], positions).view(-1, 1)

    def _shared_prefix(self) -> tuple[int, ...]:
        """Returns the longest common prefix of all prompts, without the last token of the shortest, or () if computing
        it once saves little or is not possible."""
        prompts = set(self.prompt_ids)
        first, last = min(prompts), max(prompts)  # their common prefix is that of all
        shortest = min(map(len, prompts)) - 1
        length = next((i for i, pair in enumerate(zip(first, last, strict=False)) if pair[0] != pair[1]), shortest)
        prefix = first[: min(length, shortest)]
        worth = len(prompts) > 1 and len(prefix) >= _MIN_SHARED_PREFIX and self.windows is None
        return prefix if worth and self.engine.append_form() == 'together' else ()

    def _sizes(self, wanted: int, fixed: bool, spare_slots: int) -> tuple[int, int]:
        """Returns the rows and slots of the cache for `wanted` rows."""
        longest_prompt = max(len(p.ids) for p in self.prompts)
        if fixed or self.attention == 'varlen':  # rounded sizes, which other calls can reuse
            needed = max(longest_prompt, self.max_width + spare_slots)
            capacity = shared_capacity(needed, self.attention)
            capacity = max(needed, min(capacity, row_limit(self.actor.model.config) or capacity))
            return self.engine.rows_that_fit(row_bucket(wanted, 2 * wanted), capacity), capacity
        capacity = max(longest_prompt, min(shared_capacity(longest_prompt + 64, 'plain'), self.max_width))
        return self.engine.rows_that_fit(wanted, self.max_width), capacity

    def loop(self) -> None:
        while self.queue or self.row_sample:
            free = self.max_rows - len(self.row_sample)
            if self.queue and (not self.row_sample or free >= min(self.min_refill, len(self.queue))):
                self.settle()
                self.admit(self.max_rows - len(self.row_sample))
            else:
                self.decode()

    def admit(self, free: int) -> None:
        """Prefills the next waiting prompts into free rows and samples their first tokens."""
        self.enter(self.prefilled([self.queue.popleft() for _ in range(min(free, len(self.queue)))]))

    def prefilled(self, samples: list[int]) -> Iterator[tuple[list[int], Tensor]]:
        """Yields samples in the order of their rows, with their prompts' last logits. Equal prompts and the prefix that
        all prompts share are computed once."""
        samples_by_ids: dict[tuple[int, ...], list[int]] = {}
        for sample in samples:
            samples_by_ids.setdefault(self.prompt_ids[sample], []).append(sample)
        distinct, prefix = list(samples_by_ids), self.prefix
        lengths = [len(ids) - len(prefix) for ids in distinct]
        for chunk in cut_by_tokens(lengths, self.engine.max_prefill_tokens):
            prompts, rows = [distinct[c] for c in chunk], [samples_by_ids[distinct[c]] for c in chunk]
            if prefix:
                ordered = [own[0] for own in rows] + [sample for own in rows for sample in own[1:]]
                yield ordered, self.prefill_after_prefix(prompts, [len(own) for own in rows])
            else:
                yield [sample for own in rows for sample in own], self.prefill(prompts, [len(own) for own in rows])

    def prefill_after_prefix(self, distinct: list[tuple[int, ...]], copies: list[int]) -> Tensor:
        """As `prefill`, with the prefix copied from a live row, or computed once. The rows contain the first copies of
        all prompts, then the further copies in the order of the prompts."""
        first, num_rows, start = len(self.row_sample), sum(copies), len(self.prefix)
        rows = list(range(first, first + num_rows))
        if first:
            self.cache.move([0] * num_rows, rows, start)
        else:
            self.run_prompts([self.prefix], [num_rows])
        new = [list(ids[start:]) for ids in distinct]
        with changing_shapes(self.device):
            hidden = append(self.actor, self.cache, 'together', self.engine._mask_form, first, [start] * len(new), new)
        logits = self.actor.head(hidden)
        source = [i for i, count in enumerate(copies) for _ in range(count - 1)]
        if not source:
            return logits
        self.cache.move([first + i for i in source], rows[len(distinct) :], max(map(len, distinct)))
        return torch.cat([logits, logits[source]])

    def enter(self, filled: Iterable[tuple[list[int], Tensor]]) -> None:
        """Makes newly filled rows live and samples their first tokens."""
        before = len(self.row_sample)
        tokens, states, ended = [self.token], [self.state], [False] * before
        for samples, logits in filled:
            first = [s * self.max_new + self.began[s] for s in samples]
            stored = [len(self.prompts[s].ids) + self.began[s] for s in samples]
            may_end = [place + self.sampling.min_new_tokens for place in first]
            places = torch.tensor([first, stored, may_end], device=self.device)
            self.free_to_end_from = self.step + self.sampling.min_new_tokens
            token, flags = self.emit(logits, places)
            tokens.append(token)
            states.append(places + torch.tensor([[1], [0], [0]], device=self.device))
            ended += flags if flags is not None else [False] * len(samples)
            for s, length in zip(samples, stored, strict=True):
                self.row_sample.append(s)
                self.row_offset.append(length - self.step)
                self.row_deadline.append(self.step + self.limits[s] - 1)
        self.token, self.state = torch.cat(tokens), torch.cat(states, dim=1)
        self.rows_changed()
        self.retire(ended, first_new=before)

    def prefill(self, distinct: list[tuple[int, ...]], copies: list[int]) -> Tensor:
        """Runs prompts through the model and stores each in the next `copies[i]` cache rows. Returns their last logits,
        (rows, V)."""
        hidden = self.run_prompts(distinct, copies)
        last = torch.tensor([len(ids) - 1 for ids in distinct], device=self.device)
        logits = self.actor.head(hidden[torch.arange(len(distinct), device=self.device), last])
        if sum(copies) == len(distinct):
            return logits
        return logits[torch.repeat_interleave(torch.tensor(copies, device=self.device))]

    def run_prompts(self, distinct: list[tuple[int, ...]], copies: list[int]) -> Tensor:
        """As `prefill`, but returns the hidden states, (len(distinct), longest prompt, D)."""
        first, num_rows = len(self.row_sample), sum(copies)
        width = max(map(len, distinct))
        # padded with each prompt's first token, which a causal model ignores, so no padding id is needed
        input_ids = torch.tensor([ids + ids[:1] * (width - len(ids)) for ids in distinct], device=self.device)
        source = None
        if num_rows > len(distinct):
            source = torch.repeat_interleave(torch.tensor(copies, device=self.device))
        self.cache.prefill(torch.arange(first, first + num_rows, device=self.device), source)
        positions = torch.arange(width, device=self.device).expand(len(distinct), width)
        with changing_shapes(self.device):
            return self.actor.trunk(input_ids, position_ids=positions, cache=self.cache)

    def decode(self) -> None:
        """Generates one token for each live row."""
        self.step += 1
        width = self.longest_offset + self.step
        if self.fixed is not None:
            self.decode_fixed(self.fixed, width)
            return
        if width > self.cache.capacity:
            self.cache.reserve(self.max_rows, min(self.max_width, max(width, 2 * self.cache.capacity)))
        lengths = self.state[1]
        same_length = self.longest_offset == self.shortest_offset
        if self.attention == 'varlen':
            same_length, width = False, self.cache.capacity
        keywords: dict[str, Any] = {'attention_mask': None}
        if self.windows is not None or not same_length:
            form, dtype = self.engine._mask_form, self.cache.dtype
            keywords = step_keywords(self.attention, lengths, width, form, dtype, self.windows)
        self.cache.decode(self.row_index, lengths, width, same_length=same_length)
        with changing_shapes(self.device):
            hidden = self.actor.trunk(self.token[:, None], position_ids=lengths[:, None], cache=self.cache, **keywords)
        self.token, flags = self.emit(self.actor.head(hidden[:, -1]), self.state)
        self.state = self.state + self.increment
        self.retire(flags)

    def decode_fixed(self, steps: FixedSteps, width: int) -> None:
        """As `decode`, by a step of fixed shape. On CUDA the end tokens of a step are read after the next one has been
        queued, so that the device need not wait for the host; a row that has ended then decodes one token more, which
        is not counted."""
        live = len(self.row_sample)
        if not self.fixed_loaded:
            steps.load(self.token, self.state, self.idle_slot)
            self.fixed_loaded = True
        with changing_shapes(self.device):
            steps.run(live, width)
        self.token, self.state = steps.token[:live], steps.state[:, :live]
        if not self.sampling.eos_token_ids:
            self.retire(None)
            return
        self.unread.append((steps.read_ended(live), self.row_sample, self.step))
        # a token more than the deadline would be stored in the place of another sample
        late = self.device.type == 'cuda' and self.sampling.stop is None and self.step < self.next_deadline
        self.settle(int(late))

    def settle(self, num_unread: int = 0) -> None:
        """Retires the rows that have ended in steps of fixed shape, but for the newest `num_unread` steps."""
        while len(self.unread) > num_unread:
            read, samples, step = self.unread.popleft()
            ended = {sample for sample, flag in zip(samples, read(), strict=True) if flag}
            self.retire([sample in ended for sample in self.row_sample], step=step)

    def emit(self, logits: Tensor, state: Tensor) -> tuple[Tensor, list[bool] | None]:
        """Samples and records one token per row. Returns tokens (n,) and which are end tokens, None without end
        tokens."""
        flat = state[0]
        uniform = None if self.uniforms is None else self.uniforms[flat]
        can_end = len(self.sampling.eos_token_ids) > 0
        no_end_mask = flat < state[2] if can_end and self.step < self.free_to_end_from else None
        draw = self.sampler(logits, uniform, no_end_mask)
        self.tables.write(flat, draw)
        return draw.token, self.sampler.is_end(draw.token).tolist() if can_end else None

    def retire(self, ended: list[bool] | None, first_new: int = 0, step: int | None = None) -> None:
        """Removes finished rows.

        ended: True for rows with an end token as the token of `step`, by default the newest. first_new: the first row
        with a new token.
        """
        step = self.step if step is None else step
        stopped = self.check_stop(ended, first_new) if self.sampling.stop is not None else None
        if step < self.next_deadline and stopped is None and (ended is None or True not in ended):
            return
        survivors = []
        for row, sample in enumerate(self.row_sample):
            if ended is not None and ended[row]:
                self.reasons[sample] = 'eos'
            elif stopped is not None and stopped[row]:
                self.reasons[sample] = 'stop'
            elif self.row_deadline[row] > step:
                survivors.append(row)
                continue
            self.num_tokens[sample] = self.limits[sample] - (self.row_deadline[row] - step)
        if len(survivors) < len(self.row_sample):
            self.compact(survivors)

    def check_stop(self, ended: list[bool] | None, first_new: int) -> list[bool]:
        assert self.sampling.stop is not None
        stopped = [False] * len(self.row_sample)
        for row, token in enumerate(self.token.tolist()):
            if row < first_new:
                continue
            ids = self.ids[self.row_sample[row]]
            ids.append(token)
            if not (ended is not None and ended[row]) and len(ids) >= self.sampling.min_new_tokens:
                stopped[row] = bool(self.sampling.stop(ids))
        return stopped

    def compact(self, survivors: list[int]) -> None:
        """Moves the last surviving rows into the rows that became free."""
        num_live = len(survivors)
        order, holes = list(range(num_live)), sorted(set(range(num_live)) - set(survivors))
        movers = [row for row in survivors if row >= num_live]
        for hole, mover in zip(holes, movers, strict=True):
            order[hole] = mover
        self.row_sample = [self.row_sample[row] for row in order]
        self.row_offset = [self.row_offset[row] for row in order]
        self.row_deadline = [self.row_deadline[row] for row in order]
        index: Any = slice(num_live)
        if holes:
            self.fill(holes, movers)
            index = indices(order, self.device)
        self.state, self.token = self.state[:, index], self.token[index]
        self.rows_changed()

    def fill(self, holes: list[int], movers: list[int]) -> None:
        """Moves the cache rows `movers` to `holes`."""
        self.cache.move(movers, holes, max(self.row_offset[hole] for hole in holes) + self.step)

    def rows_changed(self) -> None:
        self.fixed_loaded = False
        self.row_index = self.all_rows[: len(self.row_sample)]
        self.next_deadline = min(self.row_deadline, default=0)
        self.longest_offset = max(self.row_offset, default=0)
        self.shortest_offset = min(self.row_offset, default=0)

    def samples(self) -> list[Sample]:
        """Returns the samples in the order of the prompts."""
        shape = len(self.prompts), self.max_new
        tokens, *numbers = (column[: shape[0] * shape[1]].view(shape).cpu() for column in self.tables.columns)
        logprobs, filtered, edges = numbers
        self.call.check_finite(logprobs, filtered, self.num_tokens)
        return self.call.samples((tokens, logprobs, filtered, edges), self.num_tokens, self.reasons)
