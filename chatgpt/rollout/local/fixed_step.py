"""One decode step at a fixed number of rows and slots, on tensors that stay where they are: what a CUDA graph can hold.

A step runs trunk, head, draw, record and bookkeeping for `rows` rows; idle ones write where nobody reads. Rows and
slots come in buckets, one graph for each pair, captured at its second use. The first use is an ordinary call that is
watched: a model that makes tensors from numbers of the host, or waits for the device, gets no graphs. A step may also
be compiled by torch: rows and slots are symbols then, and weights are inputs, so buckets and phases share what was
compiled; on CUDA the compiled step is captured in its turn. A model that torch cannot compile decodes without.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from chatgpt.rollout.local.attention import PAGE, AttentionForm, step_keywords
from chatgpt.rollout.local.masks import MaskForm, Windows, decode_mask, window_masks
from chatgpt.rollout.local.slot_cache import SlotCache
from chatgpt.rollout.sampling import Draw, SamplingParams, TokenSampler

SLOTS = 256
"""widths are multiples of this, as pages of attention are"""
SMALL_ROWS = 32
"""up to here row buckets are powers of two, above multiples of this"""
WARM_UPS = 1
"""ordinary calls of a bucket before its capture, in which libraries set up what a capture may not"""
COMPILATIONS = 16
"""of one step, at most: what torch does not take for a symbol is compiled anew for every bucket; then it stays plain"""


def row_bucket(live: int, most: int) -> int:
    """1, 2, 4, 8, 16, 32, 64, 96, ... rows, at most `most`."""
    if live <= SMALL_ROWS:
        return min(1 << (live - 1).bit_length(), most)
    return min(-(-live // SMALL_ROWS) * SMALL_ROWS, most)


def shared_capacity(slots: int, attention: AttentionForm) -> int:
    """So many slots or a few more: what a cache has whose sizes other calls are to find again, in whole pages where
    attention reads pages. Other forms read every slot, so there it is fewer."""
    step = PAGE if attention == 'varlen' else 64
    return -(-slots // step) * step


def slot_bucket(width: int, capacity: int) -> int:
    """256, 512, ... slots, at most `capacity`."""
    return min(-(-width // SLOTS) * SLOTS, capacity)


class Tables:
    """What was drawn, by sample and position, flat; one more place takes what idle rows draw."""

    def __init__(self, size: int, device: torch.device, *, draws: bool) -> None:
        self.token = torch.zeros(size + 1, dtype=torch.int64, device=device)
        self.logprob = torch.zeros(size + 1, device=device)
        self.filtered_logprob = torch.zeros(size + 1, device=device)
        self.edge_distance = torch.full((size + 1,), 0.0 if draws else 1.0, device=device)

    def columns(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.token, self.logprob, self.filtered_logprob, self.edge_distance

    def write(self, places: Tensor, draw: Draw) -> None:
        """places: (n,) int64."""
        self.token.index_copy_(0, places, draw.token)
        self.logprob.index_copy_(0, places, draw.logprob)
        self.filtered_logprob.index_copy_(0, places, draw.filtered_logprob)
        if draw.edge_distance is not None:
            self.edge_distance.index_copy_(0, places, draw.edge_distance)


_WAIT = frozenset(
    'item _local_scalar_dense is_nonzero nonzero masked_select equal allclose _unique _unique2 unique_dim '
    'unique_consecutive unique_dim_consecutive bincount'.split()
)  # operators that wait for numbers of the device
_FROM_VALUES = frozenset(('lift_fresh', 'lift_fresh_copy', 'lift', 'detach_'))
"""what `torch.tensor` ends with: the copy from the host before it is not seen"""


class HostWatch(TorchDispatchMode):
    """Inside, `found` becomes the first operator that takes numbers from the host to `device`, or waits for numbers of
    the device: a capture allows neither."""

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
        if name in _WAIT or name in _FROM_VALUES:
            return True
        if name == 'where':
            return len(given) == 1
        if name == 'repeat_interleave':
            return overload == 'Tensor' and kwargs.get('output_size') is None
        if name.startswith('index') and any(
            t.dtype == torch.bool for t in tree_leaves(args[1]) if isinstance(t, Tensor)
        ):
            return True
        # A number of the CPU may stand among tensors of the device, but nothing may be copied from one to the other.
        copies = name in ('to', '_to_copy', 'copy_', 'cpu', 'cuda')
        return len({t.device.type for t in (*given, *made) if copies or t.dim() > 0}) > 1


def _in_the_step(sampling: SamplingParams) -> tuple[Any, ...]:
    """The settings that a step computes with. Limits, stop strings and seeds are asked for outside."""
    may_be_short = sampling.min_new_tokens > 0 and len(sampling.eos_token_ids) > 0
    s = sampling
    return s.do_sample, s.temperature, s.top_k, s.top_p, s.eos_token_ids, may_be_short


class FixedSteps:
    """The steps of `generate` calls that have the same settings and the same cache.

    Args:
        actor: has `trunk` and `head`.
        cache: has all rows and slots that a call will need.
        size: places in the tables that a call needs; there are at least as many.
        capture: use CUDA graphs.
        compiled: let torch compile the step.
        windows: of the model, in calls whose sequences are longer.
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
        self.capture, self.compiled, self.gave_up = capture, compiled, False
        *_, self.no_end_until = self.settings = _in_the_step(sampler.sampling)
        # a little more is nothing beside a new capture
        self.size, self.device = 1 << (size - 1).bit_length(), device
        draws = sampler.sampling.do_sample
        self.tables = Tables(self.size, device, draws=draws)
        self.uniforms = torch.zeros(self.size + 1, 1, dtype=torch.float64, device=device) if draws else None
        self.graph_bytes = 0
        """that the captures have taken"""
        rows = cache.rows
        self.token = torch.zeros(rows, dtype=torch.int64, device=device)
        # a column more, so that no slice of it is the whole, which torch would compile for itself
        self.state = torch.zeros(3, rows + 1, dtype=torch.int64, device=device)
        self.increment = torch.zeros(3, rows + 1, dtype=torch.int64, device=device)
        self.ended = torch.zeros(rows, dtype=torch.bool, device=device)
        self.row_index = torch.arange(rows, device=device)
        self._graphs: dict[tuple[int, int], Any] = {}
        self._uses: dict[tuple[int, int], int] = {}
        self._pool: Any = None
        self._side_stream: Any = None
        self._step: Any = torch.compile(self._plain_step, dynamic=True) if compiled else self._plain_step

    def fits(self, cache: SlotCache, sampler: TokenSampler, size: int, windows: Windows | None) -> bool:
        """Whether another call may take these steps."""
        same = self.cache is cache and len(self.row_index) == cache.rows and self.windows == windows
        return same and size <= self.size and self.settings == _in_the_step(sampler.sampling)

    def renew(self, actor: Any, uniforms: Tensor | None) -> None:
        """Begin another call, with other draws: (n, 1) float64, or None for greedy decoding."""
        self.actor = actor
        if self.uniforms is not None and uniforms is not None:
            self.uniforms[: len(uniforms)] = uniforms

    def let_go(self) -> None:
        """Hold no actor until the next call: a copy of the policy that others free."""
        self.actor = None

    def load(self, token: Tensor, state: Tensor, idle_slot: int = 0) -> None:
        """Set the live rows: the first ones. The others idle, and write into `idle_slot` of their cache rows."""
        live = len(token)
        self.token[:live], self.token[live:] = token, 0
        self.state[:, :live], self.state[:, live:] = state, 0
        self.state[0, live:], self.state[1, live:] = self.size, idle_slot
        self.increment.zero_()
        self.increment[:2, :live] = 1

    def run(self, live: int, width: int) -> None:
        """One token for every live row; results are in `token`, `state`, `ended` and the tables.

        width: slots that attention must see: the longest row's, with the new token.
        """
        # torch compiles a step of one row for itself
        least = min(2, self.cache.rows) if self.compiled else 1
        rows, slots = row_bucket(max(live, least), self.cache.rows), slot_bucket(width, self.cache.capacity)
        key = rows, slots
        graph = self._graphs.get(key)
        if graph is not None:
            graph.replay()
            return
        uses = self._uses[key] = self._uses.get(key, 0) + 1
        if self.capture and uses <= WARM_UPS:
            self._watched(key)
        elif self.compiled and (not self.capture or uses <= 2 * WARM_UPS):  # compiling is nothing that a capture may do
            self._compiled(key)
        elif self.capture:
            with torch.cuda.device(self.device):
                self._capture(key)
        else:
            self._step(rows, slots)

    def _compiled(self, key: tuple[int, int]) -> None:
        """A compiled call. A model that torch cannot compile goes on without."""
        before = self.token.clone(), self.state.clone()
        try:
            with _as_symbols():
                self._step(*key)
        except (torch._dynamo.exc.TorchDynamoException, RuntimeError) as error:
            if isinstance(error, torch.OutOfMemoryError):
                raise
            self.compiled, self._step = False, self._plain_step
            warnings.warn(
                f'LocalEngine: torch cannot compile this model ({_line(error)}); decoding without', stacklevel=2
            )
            self.token.copy_(before[0])
            self.state.copy_(before[1])
            self._step(*key)

    def _watched(self, key: tuple[int, int]) -> None:
        """An ordinary call, as a capture would see it, that finds out whether one is possible: a capture that breaks
        off leaves torch's allocator in its middle."""
        with HostWatch(self.device) as watch, _as_if_capturing():
            self._plain_step(*key)
        if watch.found is not None:
            self._without_graphs(f'it needs the host: {watch.found}')

    def _without_graphs(self, why: str) -> None:
        self.capture, self.gave_up = False, True
        warnings.warn(f'LocalEngine: no CUDA graph of this model ({why}); decoding without', stacklevel=2)

    def _capture(self, key: tuple[int, int]) -> None:
        """Record the step and run it. A model that cannot be captured goes on without graphs."""
        graph = torch.cuda.CUDAGraph()
        self._side_stream = self._side_stream or torch.cuda.Stream(self.device)
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        before, reserved = (self.token.clone(), self.state.clone()), torch.cuda.memory_reserved(self.device)
        index = self.device.index or 0
        stream, generator = torch.cuda.current_stream(self.device), torch.cuda.default_generators[index]
        fresh = generator.clone_state()
        try:
            # torch's own side stream is on the device of the first graph: elsewhere nothing would be recorded.
            with torch.cuda.graph(graph, pool=self._pool, stream=self._side_stream):
                self._step(*key)
        except RuntimeError as error:
            # A capture that was broken off leaves its side stream current, the generator in capture mode, and (torch
            # before 2.12, where the end of the capture fails too) the allocator serving a graph that there is not.
            torch.cuda.set_stream(stream)
            generator.graphsafe_set_state(fresh)
            with suppress(RuntimeError):  # it has ended, as it should
                torch._C._cuda_endAllocateToPool(index, self._pool)
            torch.cuda.synchronize(self.device)
            self._without_graphs(_first_cause(error))
            self.token.copy_(before[0])
            self.state.copy_(before[1])
            self._step(*key)
            return
        self._graphs[key] = graph
        self.graph_bytes += max(0, torch.cuda.memory_reserved(self.device) - reserved)
        graph.replay()  # capturing computes nothing

    def _plain_step(self, rows: int, slots: int) -> None:
        token, state = self.token[:rows], self.state[:, :rows]
        flat, lengths = state[0], state[1]
        self.cache.decode(self.row_index[:rows], lengths, slots, same_length=False)
        dtype = self.cache.layers[0].keys.dtype
        mask: Callable[[], Any] = partial(decode_mask, lengths, slots, self.mask_form, dtype)
        if self.windows is not None:
            mask = partial(window_masks, lengths, slots, self.windows, dtype)
        hidden = self.actor.trunk(
            token[:, None],
            position_ids=lengths[:, None],
            past_key_values=self.cache,
            **step_keywords(self.attention, mask, lengths),
        )
        uniform = None if self.uniforms is None else self.uniforms[flat]
        draw = self.sampler(self.actor.head(hidden[:, -1]), uniform, flat < state[2] if self.no_end_until else None)
        self.tables.write(flat, draw)
        self.ended[:rows] = self.sampler.is_end(draw.token)
        token.copy_(draw.token)
        state.add_(self.increment[:, :rows])


def _first_cause(error: BaseException) -> str:
    """In a line: the error of ending a capture hides the one that broke it off."""
    while error.__context__ is not None:
        error = error.__context__
    return _line(error)


def _line(error: BaseException) -> str:
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)


@contextmanager
def _as_symbols() -> Iterator[None]:
    """Around compiled calls: sizes that happen to be equal are not taken for one, and torch's remarks are not ours."""
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
    """torch says that a capture is underway: transformers leaves out there what would wait for the device."""
    asked = torch.cuda.is_current_stream_capturing
    torch.cuda.is_current_stream_capturing = lambda: True
    try:
        yield
    finally:
        torch.cuda.is_current_stream_capturing = asked
