"""The local engine: prefill and decode with a slot cache in this process, on the policy's own modules.

`LocalEngine` holds what lives for a collect phase: the actor, the cache and the steps of fixed shape. `LocalRun` is one
call: prompts are prefilled into cache rows, and rows are decoded together until each has ended. Live sequences stand in
rows 0 .. n-1 of the batch. A finished one leaves at once (the last live row takes its place), and waiting prompts take
the free rows. Position t of sample i is drawn with the uniform number of (seed, i, t), so none of this can change a
draw; only the rounding of sums of another shape can change a token. All per-token work is on tensors; Python looks at
single rows only when one ends.

Left out: beam search, penalties and other GenerationConfig extras, and models whose decode is more than full attention
over a key/value cache: those go through `chatgpt.rollout.hf`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from chatgpt.batching import cut_by_tokens
from chatgpt.rollout.engine import Call, InProcessEngine, Turns, changing_shapes
from chatgpt.rollout.local.append import AppendForm, find_append_form
from chatgpt.rollout.local.cpu_speed import PackedModules
from chatgpt.rollout.local.fixed_step import FixedSteps
from chatgpt.rollout.local.slot_cache import SlotCache, attention_window, bytes_per_slot, decode_mask, find_mask_form
from chatgpt.rollout.randomness import sample_keys, uniforms
from chatgpt.rollout.sampling import Draw, SamplingParams, TokenSampler
from chatgpt.types import FinishReason, Prompt, Sample

if TYPE_CHECKING:
    from chatgpt.nn import Actor

_CAPACITY_STEP = 64
CACHE_SHARE = 0.6
"""of a GPU's free memory that the cache may take: activations of a prefill, logits and graphs need the rest"""


def check_local(config: Any, call: Call) -> list[int]:
    """What a `LocalEngine` checks before any work, with the text model's config. Returns the most new tokens of each
    prompt."""
    if call.sampling.extra:
        names = ', '.join(f'{k}={v!r}' for k, v in call.sampling.extra.items())
        raise ValueError(f"LocalEngine cannot do {names}; leave it out or use engine='hf'")
    limits = call.limits(config)
    window = attention_window(config)
    longest = max((len(p.ids) + limit for p, limit in zip(call.prompts, limits, strict=True)), default=0)
    if window is not None and longest > window:
        raise ValueError(
            f"LocalEngine: sequences of up to {longest} tokens exceed the model's attention window of {window}; use "
            "engine='hf'"
        )
    return limits


class LocalEngine(InProcessEngine):
    """Generates with the actor's own `trunk` and `head`. Draws are reproducible.

    max_batch_size: most sequences decoded at once; further prompts wait. On a GPU fewer, if the cache of so many would
    take more than 60 % of its free memory. max_prefill_tokens: padded size of one prefill
    forward. refill_fraction: waiting prompts enter when this share of the rows is free. fixed_steps: decode at fixed
    shapes, on CUDA as captured graphs (`chatgpt.rollout.local.fixed_step`); 'auto' does so on CUDA, where launching
    kernels costs more than idle rows.

    >>> engine = LocalEngine()                                                                    # doctest: +SKIP
    >>> engine.begin(actor)                                                                       # doctest: +SKIP
    >>> sampling = SamplingParams(max_new_tokens=48)                                              # doctest: +SKIP
    >>> samples = engine.generate(prompts, sampling, seed=1, indices=range(len(prompts)))         # doctest: +SKIP
    >>> engine.end()                                                                              # doctest: +SKIP
    """

    reproducible = True

    def __init__(
        self,
        *,
        max_batch_size: int = 256,
        max_prefill_tokens: int = 16384,
        refill_fraction: float = 0.125,
        fixed_steps: bool | Literal['auto'] = 'auto',
    ) -> None:
        super().__init__()
        if max_batch_size < 1 or max_prefill_tokens < 1 or not 0 <= refill_fraction <= 1:
            raise ValueError(
                f'LocalEngine: max_batch_size={max_batch_size}, max_prefill_tokens={max_prefill_tokens}, '
                f'refill_fraction={refill_fraction}; give two positive integers and a share between 0 and 1'
            )
        self.max_batch_size = max_batch_size
        self.max_prefill_tokens = max_prefill_tokens
        self.min_refill = max(1, int(max_batch_size * refill_fraction))
        if fixed_steps not in (True, False, 'auto'):
            raise ValueError(f"LocalEngine: fixed_steps={fixed_steps!r} is not one of True, False, 'auto'")
        self.fixed_steps = fixed_steps
        self._cache: SlotCache | None = None
        self._packed: PackedModules | None = None
        self._mask_form: Any = None
        self._append_form: AppendForm | None = None
        self._checked: Any = None
        self._fixed: tuple[Any, FixedSteps] | None = None
        self._can_capture = True
        """False once a model of the kind `_checked` could not be captured"""

    def begin(self, actor: Actor) -> None:
        """Take the actor, dropout off. The first time with a model, checks its cached decode against its plain forward.

        Raises ValueError where they disagree.
        """
        if self._actor is not None:
            self.end()
        self.hold(actor)
        # a 16-bit policy is a new copy in every phase: what matters is the architecture
        parameter, config = next(actor.parameters()), actor.model.config
        kind = (
            type(actor.model),
            config._attn_implementation,
            parameter.dtype,
            parameter.device,
            str(config.to_dict()),
        )
        if self._checked == kind:
            return
        try:
            with torch.inference_mode():
                self._mask_form = find_mask_form(actor)
        except Exception:
            self.end()
            raise
        self._checked, self._can_capture, self._append_form = kind, True, None

    def check(self, config: Any, call: Call) -> list[int]:
        return check_local(config, call)

    def answer(self, call: Call, limits: list[int]) -> list[Sample]:
        """Raises FloatingPointError, naming sample and position, for non-finite logits."""
        with self._cache_at_risk():
            with self._computing():
                run = LocalRun(self, call, limits)
                run.loop()
            # outside of inference mode, so that the samples are ordinary tensors that autograd may save
            return run.samples()

    def converse(
        self,
        prompts: Sequence[Prompt],
        sampling: SamplingParams,
        *,
        seed: int,
        indices: Sequence[int],
        groups: Sequence[int] | None = None,
        turns: Turns,
    ) -> None:
        """Draw all turns of these sequences, whose keys and values stay in the cache while `turns` says what follows.

        `sampling`'s `max_new_tokens` and `max_length` bound all that stands after a prompt; end tokens, `stop` and
        `min_new_tokens` are those of a turn. Which sequences are computed together follows from token counts and
        order. Up to twice `max_batch_size` sequences are in the cache, of which at most `max_batch_size` are decoded
        at once; one whose turn has ended stands at the end of the queue, and is waited for when `refill_fraction` of
        the rows is free and it is its turn.

        Raises what `generate` raises.
        """
        from chatgpt.rollout.local.conversation import Conversation

        call, rooms = self.checked(prompts, sampling, seed, indices, groups)
        if prompts:
            with self._cache_at_risk(), self._computing():
                if self._append_form is None:
                    self._append_form = find_append_form(self._actor, self._mask_form)
                Conversation(self, call, rooms, turns, self._append_form).loop()

    @contextmanager
    def _computing(self) -> Iterator[None]:
        self._packed = self._packed or PackedModules(self._actor)
        with self._packed.active(), torch.inference_mode():
            yield

    @contextmanager
    def _cache_at_risk(self) -> Iterator[None]:
        """After a failure there is no cache: it may hold non-finite states, which a mask cannot hide."""
        try:
            yield
        except BaseException:
            self._note_capture()
            self._cache = self._fixed = None
            raise

    def end(self) -> None:
        """Give the actor back with the training flags it came with, and free the cache."""
        super().end()
        self._note_capture()
        self._cache = self._packed = self._fixed = None

    def captures(self, device: torch.device) -> bool:
        """Whether steps of fixed shape become CUDA graphs."""
        return device.type == 'cuda' and self._can_capture

    def _note_capture(self) -> None:
        """Steps that gave up their graphs speak for the next ones."""
        self._can_capture = self._can_capture and not (self._fixed is not None and self._fixed[1].gave_up)

    def cache(self, rows: int, capacity: int) -> SlotCache:
        """This phase's cache, grown to at least this size."""
        if self._cache is None:
            self._cache = SlotCache(rows, capacity)
        self._cache.reserve(rows, capacity)
        return self._cache

    def rows_that_fit(self, rows: int, capacity: int) -> int:
        """How many of `rows` rows of `capacity` slots this phase's cache may have, by `free_bytes`; at least one."""
        if self._cache is not None and rows <= self._cache.rows and capacity <= self._cache.capacity:
            return rows
        device = next(self._actor.parameters()).device
        free = self.free_bytes(device)
        if free is None:
            return rows
        held = sum(s.nbytes for layer in self._cache.layers for s in (layer.keys, layer.values)) if self._cache else 0
        per_row = bytes_per_slot(self._actor) * capacity
        return max(1, min(rows, int(CACHE_SHARE * (free + held) / max(per_row, 1))))

    def free_bytes(self, device: torch.device) -> int | None:
        """Memory that the cache could have: the device's, and what torch keeps for later. None: no bound (a CPU)."""
        if device.type != 'cuda':
            return None
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + kept

    def fixed(
        self, cache: SlotCache, sampler: TokenSampler, uniforms: Tensor | None, size: int, *, capture: bool
    ) -> FixedSteps:
        """This phase's steps of fixed shape; those of an earlier call where they fit, with their graphs."""
        key = (cache.rows, cache.capacity, size, sampler.sampling)
        if self._fixed is None or self._fixed[0] != key:
            self._note_capture()
            device, sampling = sampler.end_ids.device, sampler.sampling
            steps = FixedSteps(
                self._actor,
                sampler,
                cache,
                self._mask_form,
                uniforms,
                size,
                device,
                capture=capture and self.captures(device),
                no_end_until=sampling.min_new_tokens > 0 and len(sampling.eos_token_ids) > 0,
            )
            self._fixed = key, steps
        self._fixed[1].renew(uniforms)
        return self._fixed[1]


class LocalRun:
    """The rows of one call, from the first prompt that enters to the last response that ends.

    What was drawn lies in a flat (samples x max_new) table. `state` (3, n) int64, on the device, holds for each live
    row: the table position of its next token, the tokens in its cache row, and the first table position at which it may
    end. On the host, each live row has its sample number, an `offset` and a `deadline`; both are relative to the step
    count, so that no step has to touch them.
    """

    def __init__(
        self, engine: LocalEngine, call: Call, limits: list[int], *, most_rows: int = 0, spare_slots: int = 0
    ) -> None:
        """most_rows: of the cache, instead of the engine's `max_batch_size`. spare_slots: of each row, where steps have
        a fixed shape."""
        self.engine, self.actor, self.call, self.limits = engine, engine._actor, call, limits
        self.prompts, self.sampling, self.indices = call.prompts, call.sampling, call.indices
        prompts, sampling = call.prompts, call.sampling
        self.device = next(self.actor.parameters()).device
        self.sampler = TokenSampler(sampling, self.device)
        self.max_new = max(limits)
        self.uniforms: Tensor | None = None
        if sampling.do_sample:
            keys = sample_keys(call.seed, torch.tensor(self.indices, dtype=torch.int64, device=self.device))
            first = torch.tensor(call.offsets, dtype=torch.int64, device=self.device)
            positions = first[:, None] + torch.arange(self.max_new, device=self.device)
            self.uniforms = uniforms(keys[:, None], positions).view(-1, 1)
        self.queue = deque(range(len(prompts)))
        # the last token of a sequence is never fed back, so it needs no slot
        self.max_width = max(len(p.ids) + limit - 1 for p, limit in zip(prompts, limits, strict=True))
        wanted = min(most_rows or engine.max_batch_size, len(prompts))
        self.max_rows = engine.rows_that_fit(wanted, self.max_width)
        self.min_refill = max(1, engine.min_refill * self.max_rows // wanted)
        longest_prompt = max(len(p.ids) for p in prompts)
        at_first = -(-(longest_prompt + _CAPACITY_STEP) // _CAPACITY_STEP) * _CAPACITY_STEP
        # Blocks that are streamed come and go: their addresses hold for no graph.
        streams = any(getattr(module, 'is_streamed', False) for module in self.actor.modules())
        fixed = (self.device.type == 'cuda' and not streams) if engine.fixed_steps == 'auto' else engine.fixed_steps
        capacity = max(longest_prompt, self.max_width + spare_slots if fixed else min(at_first, self.max_width))
        self.cache = engine.cache(self.max_rows, capacity)
        self.fixed: FixedSteps | None = None
        if fixed:
            self.fixed = engine.fixed(
                self.cache, self.sampler, self.uniforms, len(prompts) * self.max_new, capture=not streams
            )
        self.fixed_loaded = False
        self.idle_slot = 0  # into which idle rows of a fixed shape write
        # live rows
        self.row_sample: list[int] = []
        self.row_offset: list[int] = []  # offset + step = tokens stored once the step's token is in
        self.row_deadline: list[int] = []  # the step whose token is the last one allowed
        self.state = torch.zeros(3, 0, dtype=torch.int64, device=self.device)
        self.increment = torch.tensor([[1], [1], [0]], device=self.device)
        self.token = torch.zeros(0, dtype=torch.int64, device=self.device)
        self.all_rows = torch.arange(self.max_rows, device=self.device)
        self.row_index = self.all_rows[:0]
        self.step = 0
        self.next_deadline = 0
        self.longest_offset = self.shortest_offset = 0
        self.free_to_end_from = 0  # step from which no live row is too short to end
        # results
        self.records: list[tuple[Tensor, Draw]] = []
        self.began = [0] * len(prompts)  # tokens after the prompt where the response begins that is drawn now
        self.num_tokens = [0] * len(prompts)
        self.reasons: list[FinishReason] = ['length'] * len(prompts)
        self.ids: list[list[int]] = [[] for _ in prompts]  # kept only for `sampling.stop`

    def loop(self) -> None:
        while self.queue or self.row_sample:
            free = self.max_rows - len(self.row_sample)
            if self.queue and (not self.row_sample or free >= min(self.min_refill, len(self.queue))):
                self.admit(free)
            else:
                self.decode()

    def admit(self, free: int) -> None:
        """Prefill the next waiting prompts into free rows and draw their first tokens."""
        self.enter(self.prefilled([self.queue.popleft() for _ in range(min(free, len(self.queue)))]))

    def prefilled(self, samples: list[int]) -> Iterator[tuple[list[int], Tensor]]:
        """Samples in the order of the rows that they got, with their prompts' last logits. Equal prompts are computed
        once."""
        takers: dict[tuple[int, ...], list[int]] = {}
        for sample in samples:
            takers.setdefault(tuple(self.prompts[sample].ids.tolist()), []).append(sample)
        distinct = list(takers)
        for chunk in cut_by_tokens([len(ids) for ids in distinct], self.engine.max_prefill_tokens):
            logits = self.prefill([distinct[c] for c in chunk], [len(takers[distinct[c]]) for c in chunk])
            yield [sample for c in chunk for sample in takers[distinct[c]]], logits

    def enter(self, filled: Iterable[tuple[list[int], Tensor]]) -> None:
        """Make rows live that have just been filled, and draw their first tokens."""
        before = len(self.row_sample)
        tokens, states, ended = [self.token], [self.state], [False] * before
        for samples, logits in filled:
            first = [s * self.max_new + self.began[s] for s in samples]
            stored = [len(self.prompts[s].ids) + self.began[s] for s in samples]
            places = torch.tensor(
                [first, stored, [place + self.sampling.min_new_tokens for place in first]], device=self.device
            )
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
        """Prompts through the model into the next cache rows, each `copies[i]` times. Returns their last logits, (rows,
        V)."""
        first, num_rows = len(self.row_sample), sum(copies)
        width = max(map(len, distinct))
        # filled up with each prompt's own first token: a causal model never looks ahead, and no padding id is needed
        input_ids = torch.tensor([ids + ids[:1] * (width - len(ids)) for ids in distinct], device=self.device)
        source = None
        if num_rows > len(distinct):
            source = torch.repeat_interleave(torch.tensor(copies, device=self.device))
        self.cache.prefill(torch.arange(first, first + num_rows, device=self.device), source)
        positions = torch.arange(width, device=self.device).expand(len(distinct), width)
        with changing_shapes(self.device):
            hidden = self.actor.trunk(input_ids, position_ids=positions, past_key_values=self.cache)
        last = torch.tensor([len(ids) - 1 for ids in distinct], device=self.device)
        logits = self.actor.head(hidden[torch.arange(len(distinct), device=self.device), last])
        return logits if source is None else logits[source]

    def decode(self) -> None:
        """One token for every live row."""
        self.step += 1
        width = self.longest_offset + self.step
        if self.fixed is not None:
            self.retire(self.decode_fixed(self.fixed, width))
            return
        if width > self.cache.capacity:
            self.cache.reserve(self.max_rows, min(self.max_width, max(width, 2 * self.cache.capacity)))
        lengths = self.state[1]
        same_length = self.longest_offset == self.shortest_offset
        mask = None if same_length else decode_mask(lengths, width, self.engine._mask_form, self.mask_dtype)
        self.cache.decode(self.row_index, lengths, width, same_length=same_length)
        with changing_shapes(self.device):
            hidden = self.actor.trunk(
                self.token[:, None], position_ids=lengths[:, None], attention_mask=mask, past_key_values=self.cache
            )
        self.token, flags = self.emit(self.actor.head(hidden[:, -1]), self.state)
        self.state = self.state + self.increment
        self.retire(flags)

    def decode_fixed(self, steps: FixedSteps, width: int) -> list[bool] | None:
        """The same by a step of fixed shape. Returns which rows ended."""
        live = len(self.row_sample)
        if not self.fixed_loaded:
            steps.load(self.token, self.state, self.idle_slot)
            self.fixed_loaded = True
        steps.run(live, width)
        self.token, self.state = steps.token[:live], steps.state[:, :live]
        return steps.ended[:live].tolist() if len(self.sampling.eos_token_ids) > 0 else None

    @property
    def mask_dtype(self) -> torch.dtype:
        return self.cache.layers[0].keys.dtype

    def emit(self, logits: Tensor, state: Tensor) -> tuple[Tensor, list[bool] | None]:
        """Draw and record one token per row. Returns tokens (n,) and which of them are end tokens, None where none can
        be."""
        flat = state[0]
        uniform = None if self.uniforms is None else self.uniforms[flat]
        can_end = len(self.sampling.eos_token_ids) > 0
        no_end_mask = flat < state[2] if can_end and self.step < self.free_to_end_from else None
        draw = self.sampler(logits, uniform, no_end_mask)
        self.records.append((flat, draw))
        return draw.token, self.sampler.is_end(draw.token).tolist() if can_end else None

    def retire(self, ended: list[bool] | None, first_new: int = 0) -> None:
        """Take out the rows that are done. `ended`: rows whose newest token is an end token.

        first_new: rows before it got no token since the last call.
        """
        stopped = self.ask_stop(ended, first_new) if self.sampling.stop is not None else None
        if self.step < self.next_deadline and stopped is None and (ended is None or True not in ended):
            return
        survivors = []
        for row, sample in enumerate(self.row_sample):
            if ended is not None and ended[row]:
                self.reasons[sample] = 'eos'
            elif stopped is not None and stopped[row]:
                self.reasons[sample] = 'stop'
            elif self.row_deadline[row] > self.step:
                survivors.append(row)
                continue
            self.num_tokens[sample] = self.limits[sample] - (self.row_deadline[row] - self.step)
        if len(survivors) < len(self.row_sample):
            self.compact(survivors)

    def ask_stop(self, ended: list[bool] | None, first_new: int) -> list[bool]:
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
        """Close the gaps: the last surviving rows move into the rows that became free."""
        num_live = len(survivors)
        order, holes = list(range(num_live)), sorted(set(range(num_live)) - set(survivors))
        movers = [row for row in survivors if row >= num_live]
        for hole, mover in zip(holes, movers, strict=True):
            order[hole] = mover
        self.row_sample = [self.row_sample[row] for row in order]
        self.row_offset = [self.row_offset[row] for row in order]
        self.row_deadline = [self.row_deadline[row] for row in order]
        if num_live:
            if holes:
                self.fill(holes, movers)
                index = torch.tensor(order, device=self.device)
                self.state, self.token = self.state[:, index], self.token[index]
            else:
                self.state, self.token = self.state[:, :num_live], self.token[:num_live]
        else:
            self.state, self.token = self.state[:, :0], self.token[:0]
        self.rows_changed()

    def fill(self, holes: list[int], movers: list[int]) -> None:
        """What the cache holds in rows `movers` is now that of rows `holes`."""
        self.cache.move(movers, holes, max(self.row_offset[hole] for hole in holes) + self.step)

    def rows_changed(self) -> None:
        self.fixed_loaded = False
        self.row_index = self.all_rows[: len(self.row_sample)]
        self.next_deadline = min(self.row_deadline, default=0)
        self.longest_offset = max(self.row_offset, default=0)
        self.shortest_offset = min(self.row_offset, default=0)

    def not_finite(self, sample: int, position: int) -> FloatingPointError:
        return FloatingPointError(
            f'LocalEngine: the logits of sample {self.indices[sample]} are not finite at response position '
            f"{position}; check the policy's weights and precision"
        )

    def samples(self) -> list[Sample]:
        """The finished samples, in the order of the prompts."""
        flat = torch.cat([flat for flat, _ in self.records])
        shape = (len(self.prompts), self.max_new)

        def table(name: str, dtype: torch.dtype) -> Tensor:
            # a new tensor on the CPU: slices of it are cut out with clone, so that a sample does not hold all others in
            # memory
            values = torch.zeros(shape[0] * shape[1], dtype=dtype, device=self.device)
            if self.fixed is not None:
                values.copy_(getattr(self.fixed.tables, name)[:-1])
            values[flat] = torch.cat([getattr(draw, name) for _, draw in self.records])
            return values.view(shape).cpu()

        tokens = table('token', torch.int64)
        logprobs, filtered = table('logprob', torch.float32), table('filtered_logprob', torch.float32)
        edges = torch.ones(shape) if self.uniforms is None else table('edge_distance', torch.float32)
        bad = (~(torch.isfinite(filtered) & torch.isfinite(logprobs))).nonzero()
        if len(bad):
            raise self.not_finite(*bad[0].tolist())
        return [
            self.call.sample(
                i,
                tokens[i, :length].clone(),
                logprobs[i, :length].clone(),
                filtered[i, :length].clone(),
                edges[i, :length].clone(),
                self.reasons[i],
            )
            for i, length in enumerate(self.num_tokens)
        ]
