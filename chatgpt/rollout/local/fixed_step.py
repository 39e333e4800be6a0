"""A decode step with a fixed number of rows and slots on tensors at fixed addresses, which a CUDA graph can capture.

A step runs trunk, head, sampling, recording and bookkeeping for `rows` rows; idle rows write to places that are never
read. Rows and slots are rounded to buckets, with one graph per pair, captured at its second use; attention over pages
has one bucket of slots. The first use is a plain call under `HostWatch`: a model that copies numbers from the host, or
waits for the device, gets no graphs. A step may also be compiled by torch, with symbolic rows and slots and with
weights as inputs, so that buckets and phases share the compiled code; on CUDA the compiled step is then captured. If
torch cannot compile a model, its step stays plain.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from chatgpt.nn.trunk import sharding_group
from chatgpt.rollout.local.attention import PAGE, AttentionForm, step_keywords
from chatgpt.rollout.local.masks import MaskForm, Windows
from chatgpt.rollout.local.slot_cache import SlotCache
from chatgpt.rollout.sampling import Draw, SamplingParams, TokenSampler

SMALL_ROWS = 32
"""row buckets are powers of two up to this number, and multiples of it above"""
WARM_UPS = 1
"""plain calls of a bucket before its capture, for initialisation that a capture does not allow"""
COMPILATIONS = 16
"""maximum number of compilations of a step, which stays plain above it: sizes that torch does not treat as symbols are
compiled again for each bucket"""


def row_bucket(live: int, most: int) -> int:
    """Rounds the number of rows up to 1, 2, 4, 8, 16, 32, 64, 96, ..., at most `most`."""
    if live <= SMALL_ROWS:
        return min(1 << (live - 1).bit_length(), most)
    return min(-(-live // SMALL_ROWS) * SMALL_ROWS, most)


def shared_capacity(slots: int, attention: AttentionForm) -> int:
    """Rounds up the slots of a cache, so that other calls can reuse it: to whole pages if attention reads pages, else
    less, because other forms read every slot."""
    step = PAGE if attention == 'varlen' else 64
    return -(-slots // step) * step


def slot_bucket(width: int, capacity: int) -> int:
    """Rounds the number of slots up to 1, 2, 3, 4, 6, 8, 12, 16, ... times 256, at most `capacity`."""
    pages = -(-width // PAGE)
    power = 1 << (pages - 1).bit_length()
    return min((power if 4 * pages > 3 * power else 3 * power // 4) * PAGE, capacity)


@cache
def _side_stream(device: torch.device) -> Any:
    """Returns this process's stream for captures: cuBLAS keeps a workspace for each stream that it has seen."""
    return torch.cuda.Stream(device)


class Tables:
    """Flat tables of draws by sample and position, with an additional place for idle rows."""

    def __init__(self, size: int, device: torch.device, *, draws: bool) -> None:
        ids, edges = torch.zeros(size + 1, dtype=torch.int64, device=device), 0.0 if draws else 1.0
        numbers = (torch.full((size + 1,), value, device=device) for value in (0.0, 0.0, edges))
        self.columns: tuple[Tensor, ...] = ids, *numbers

    def write(self, places: Tensor, draw: Draw) -> None:
        """Writes draws to places, (n,) int64."""
        for column, values in zip(self.columns, draw, strict=True):
            if values is not None:
                column.index_copy_(0, places, values)


_SYNCHRONIZING = frozenset(
    'item _local_scalar_dense is_nonzero nonzero masked_select equal allclose _unique _unique2 unique_dim '
    'unique_consecutive unique_dim_consecutive bincount'.split()
)  # operators that wait for the device
_FROM_VALUES = frozenset(('lift_fresh', 'lift_fresh_copy', 'lift', 'detach_'))
"""the last operators of `torch.tensor`; the copy from the host before them is not dispatched"""


class HostWatch(TorchDispatchMode):
    """Context in which `found` becomes the first operator that copies numbers from the host to `device` or waits for
    the device. A capture allows neither."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.kind = device.type
        self.found: str | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if self.found is None and self._needs_host(func, args, kwargs or {}, result):
            self.found = str(func)
        return result

    def _needs_host(self, func: Any, args: Any, kwargs: Any, result: Any) -> bool:
        given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        made = [t for t in tree_leaves(result) if isinstance(t, Tensor)]
        if not any(t.device.type == self.kind for t in (*given, *made)):
            return False
        name, _, overload = func.name().removeprefix('aten::').partition('.')
        if name in _SYNCHRONIZING or name in _FROM_VALUES:
            return True
        if name == 'where':
            return len(given) == 1
        if name == 'repeat_interleave':
            return overload == 'Tensor' and kwargs.get('output_size') is None
        if name.startswith('index') and any(
            t.dtype == torch.bool for t in tree_leaves(args[1]) if isinstance(t, Tensor)
        ):
            return True
        # a number on the CPU may be an argument beside tensors of the device, but copies between them are not allowed
        copies = name in ('to', '_to_copy', 'copy_', 'cpu', 'cuda')
        return len({t.device.type for t in (*given, *made) if copies or t.dim() > 0}) > 1


def _step_settings(sampling: SamplingParams) -> tuple[Any, ...]:
    """Returns the settings that a step computes with; limits, stop strings and seeds are applied outside of it."""
    may_be_short = sampling.min_new_tokens > 0 and len(sampling.eos_token_ids) > 0
    s = sampling
    return s.do_sample, s.temperature, s.top_k, s.top_p, s.eos_token_ids, may_be_short


class FixedSteps:
    """The decode steps of calls with the same settings and the same cache.

    Args:
        actor: has `trunk` and `head`.
        cache: has all rows and slots that a call needs.
        size: minimum number of places in the tables.
        capture: use CUDA graphs.
        compiled: compile the step with torch.
        windows: the model's attention windows, if sequences exceed one.
    """

    def __init__(
        self,
        actor: Any,
        sampler: TokenSampler,
        cache: SlotCache,
        mask_form: MaskForm,
        attention: AttentionForm,
        size: int,
        device: torch.device,
        *,
        capture: bool,
        compiled: bool,
        windows: Windows | None = None,
    ) -> None:
        self.actor, self.sampler, self.cache = actor, sampler, cache
        self.mask_form, self.attention, self.windows = mask_form, attention, windows
        self.capture, self.compiled, self.capture_failed = capture, compiled, False
        *_, self.no_end_until = self.settings = _step_settings(sampler.sampling)
        # rounded up, because larger tables cost less than a new capture
        self.size, self.device = 1 << (size - 1).bit_length(), device
        draws = sampler.sampling.do_sample
        self.tables = Tables(self.size, device, draws=draws)
        self.uniforms = torch.zeros(self.size + 1, 1, dtype=torch.float64, device=device) if draws else None
        self.graph_bytes = 0
        """memory that captures have reserved"""
        rows = cache.rows
        self.token = torch.zeros(rows, dtype=torch.int64, device=device)
        # one more column, because torch would compile separately for a slice that is the whole tensor
        self.state = torch.zeros(3, rows + 1, dtype=torch.int64, device=device)
        self.increment = torch.zeros(3, rows + 1, dtype=torch.int64, device=device)
        self.ended = torch.zeros(rows, dtype=torch.bool, device=device)
        self.row_index = torch.arange(rows, device=device)
        self._graphs: dict[tuple[int, int], Any] = {}
        self._uses: dict[tuple[int, int], int] = {}
        self._pool: Any = None
        self._step: Any = torch.compile(self._plain_step, dynamic=True) if compiled else self._plain_step

    def fits(self, cache: SlotCache, sampler: TokenSampler, size: int, windows: Windows | None) -> bool:
        """Returns True if another call can use these steps."""
        same = self.cache is cache and len(self.row_index) == cache.rows and self.windows == windows
        return same and size <= self.size and self.settings == _step_settings(sampler.sampling)

    def start_call(self, actor: Any, uniforms: Tensor | None) -> None:
        """Starts a new call. uniforms: (n, 1) float64, or None for greedy decoding."""
        self.actor = actor
        if self.uniforms is not None and uniforms is not None:
            self.uniforms[: len(uniforms)] = uniforms

    def release_actor(self) -> None:
        """Drops the reference to the actor, so that a copy of the policy can be freed."""
        self.actor = None

    def load(self, token: Tensor, state: Tensor, idle_slot: int = 0) -> None:
        """Sets the first rows live. The others are idle and write to `idle_slot` of their cache rows."""
        live = len(token)
        self.token[:live], self.token[live:] = token, 0
        self.state[:, :live], self.state[:, live:] = state, 0
        self.state[0, live:], self.state[1, live:] = self.size, idle_slot
        self.increment.zero_()
        self.increment[:2, :live] = 1

    def run(self, live: int, width: int) -> None:
        """Generates one token for each live row; results are in `token`, `state`, `ended` and the tables.

        width: number of slots of the longest row, including the new token.
        """
        # torch would compile separately for a single row
        least = min(2, self.cache.rows) if self.compiled else 1
        whole = self.cache.capacity  # attention over pages reads only the valid slots
        slots = whole if self.attention == 'varlen' else slot_bucket(width, whole)
        key = row_bucket(max(live, least), self.cache.rows), slots
        graph = self._graphs.get(key)
        if graph is not None:
            graph.replay()
            return
        uses = self._uses[key] = self._uses.get(key, 0) + 1
        if self.capture and uses <= WARM_UPS:
            self._run_watched(key)
        elif self.compiled and (not self.capture or uses <= 2 * WARM_UPS):  # compiled before, not during, a capture
            self._run_compiled(key)
        elif self.capture:
            with torch.cuda.device(self.device):
                self._capture(key)
        else:
            self._step(*key)

    def read_ended(self, live: int) -> Callable[[], list[bool]]:
        """Returns a function that returns which of the first rows ended in this step. On CUDA the copy to the host is
        only queued now, and the function waits for it."""
        if self.device.type != 'cuda':
            ended = self.ended[:live].tolist()
            return lambda: ended
        host, event = torch.empty(live, dtype=torch.bool, pin_memory=True), torch.cuda.Event()
        host.copy_(self.ended[:live], non_blocking=True)
        event.record(torch.cuda.current_stream(self.device))

        def read() -> list[bool]:
            event.synchronize()
            return host.tolist()

        return read

    def _run_compiled(self, key: tuple[int, int]) -> None:
        """Runs a compiled call. If torch cannot compile the model, continues with the plain step."""
        before = self.token.clone(), self.state.clone()
        try:
            with _symbolic_shapes():
                self._step(*key)
        except (torch._dynamo.exc.TorchDynamoException, RuntimeError) as error:
            if isinstance(error, torch.OutOfMemoryError):
                raise
            self.compiled, self._step = False, self._plain_step
            warnings.warn(
                f'LocalEngine: torch cannot compile this model ({_line(error)}); decoding without', stacklevel=2
            )
            self._run_again(before, key)

    def _run_again(self, before: tuple[Tensor, Tensor], key: tuple[int, int]) -> None:
        self.token.copy_(before[0])
        self.state.copy_(before[1])
        self._step(*key)

    def _run_watched(self, key: tuple[int, int]) -> None:
        """Runs a plain call as in a capture and checks that a capture is possible, because a failed one leaves torch's
        allocator in an undefined state."""
        with HostWatch(self.device) as watch, _as_if_capturing():
            self._plain_step(*key)
        self._agree('' if watch.found is None else f'it needs the host: {watch.found}')

    def _agree(self, why_not: str) -> None:
        """Disables graphs if this process cannot have them, or another one that shares the model: all must make the
        same captures. A collective of them."""
        group = sharding_group(self.actor)
        if group is not None and bool(group.max(torch.tensor(float(bool(why_not)), device=self.device))):
            why_not = why_not or 'another process that shares it has none'
            self._graphs.clear()
        if why_not:
            self._disable_graphs(why_not)

    def _disable_graphs(self, why: str) -> None:
        self.capture, self.capture_failed = False, True
        warnings.warn(f'LocalEngine: no CUDA graph of this model ({why}); decoding without', stacklevel=2)

    def _capture(self, key: tuple[int, int]) -> None:
        """Captures the step and runs it. If the capture fails, continues without graphs."""
        graph = torch.cuda.CUDAGraph()
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        before, reserved = (self.token.clone(), self.state.clone()), torch.cuda.memory_reserved(self.device)
        index = self.device.index or 0
        stream, generator = torch.cuda.current_stream(self.device), torch.cuda.default_generators[index]
        fresh = generator.clone_state()
        try:
            # torch's own side stream is on the device of the first graph, so on another device it would record nothing;
            # other threads, such as those that lock pages or watch collectives, may go on
            side = _side_stream(self.device)
            with torch.cuda.graph(graph, pool=self._pool, stream=side, capture_error_mode='thread_local'):
                self._step(*key)
        except RuntimeError as error:
            # A failed capture leaves its side stream current, the generator in capture mode, and (torch before 2.12,
            # where the end of the capture fails too) the allocator in the pool of the missing graph.
            torch.cuda.set_stream(stream)
            generator.graphsafe_set_state(fresh)
            with suppress(RuntimeError):  # already ended in newer versions
                torch._C._cuda_endAllocateToPool(index, self._pool)
            torch.cuda.synchronize(self.device)
            self._run_again(before, key)
            self._agree(_first_cause(error))
            return
        self._graphs[key] = graph
        self.graph_bytes += max(0, torch.cuda.memory_reserved(self.device) - reserved)
        graph.replay()  # a capture only records
        self._agree('')

    def _plain_step(self, rows: int, slots: int) -> None:
        token, state = self.token[:rows], self.state[:, :rows]
        flat, lengths = state[0], state[1]
        self.cache.decode(self.row_index[:rows], lengths, slots, same_length=False)
        keywords = step_keywords(self.attention, lengths, slots, self.mask_form, self.cache.dtype, self.windows)
        hidden = self.actor.trunk(token[:, None], position_ids=lengths[:, None], cache=self.cache, **keywords)
        uniform = None if self.uniforms is None else self.uniforms[flat]
        draw = self.sampler(self.actor.head(hidden[:, -1]), uniform, flat < state[2] if self.no_end_until else None)
        self.tables.write(flat, draw)
        self.ended[:rows] = self.sampler.is_end(draw.token)
        token.copy_(draw.token)
        state.add_(self.increment[:, :rows])


def _first_cause(error: BaseException) -> str:
    """Returns the first line of the original error, which the error of ending the capture hides."""
    while error.__context__ is not None:
        error = error.__context__
    return _line(error)


def _line(error: BaseException) -> str:
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)


@contextmanager
def _symbolic_shapes() -> Iterator[None]:
    """Context for compiled calls: equal sizes are separate symbols, and a warning of torch is hidden."""
    import torch.fx.experimental._config as symbols

    with (
        torch._dynamo.config.patch(recompile_limit=COMPILATIONS),
        symbols.patch(use_duck_shape=False),  # type: ignore[attr-defined]
        warnings.catch_warnings(),
    ):
        warnings.filterwarnings('ignore', message='Dynamo detected a call to a `functools.lru_cache`')
        yield


@contextmanager
def _as_if_capturing() -> Iterator[None]:
    """Context in which torch reports a capture, during which transformers skips what would wait for the device."""
    original = torch.cuda.is_current_stream_capturing
    torch.cuda.is_current_stream_capturing = lambda: True
    try:
        yield
    finally:
        torch.cuda.is_current_stream_capturing = original
