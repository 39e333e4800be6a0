"""A key/value cache of rows and slots: token t of a sequence is in slot t of its row.

Memory is allocated once, a new token is written into its slot, attention reads a view up to the longest live row, and a
finished row is overwritten by the next sequence. Slots after a row's last token contain old but finite values, which
are masked.

`find_mask_form` checks on a few tokens that a model's cached decode agrees with its plain forward, and in which form it
takes the mask of valid slots: additive (n, 1, 1, K), the cheapest, or boolean (n, K), required by models that derive
positions from it (ALiBi) and by flash kernels.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from chatgpt.nn.trunk import accepts, base_model, beyond_keys_and_values, text_config
from chatgpt.rollout.local.attention import PAGE, AttentionForm, step_keywords
from chatgpt.rollout.local.masks import MaskForm, Windows, windows_of

FORMS: tuple[MaskForm, ...] = ('additive', 'boolean')

PROMPT_LENGTHS = (3, 6, 4)
_NUM_STEPS = 3
_EVERY = slice(None)
CHECKED_PAGE = 1024
"""slots of a row when attention over pages is checked: few rows of long pages are where a kernel divides pages"""


class SlotLayer:
    """The keys (R, H, C, D) and values (R, H, C, D') of a layer, allocated at the first write."""

    is_sliding = False
    is_compileable = False
    is_initialized = True

    def __init__(self) -> None:
        self.keys: Tensor | None = None
        self.values: Tensor | None = None


def _resized(store: Tensor | None, like: Tensor, rows: int, capacity: int) -> Tensor:
    """Returns a tensor of this size with the contents of `store`. `like`: (n, H, P, D), for shape, dtype and device."""
    heads, width = like.shape[1], like.shape[3]
    # zeros, not empty: a masked slot gets weight 0, and 0 * NaN would be NaN
    new = like.new_zeros(rows, heads, capacity, width)
    if store is not None:
        new[: store.shape[0], :, : store.shape[2]] = store
    return new


def indices(numbers: Any, device: torch.device) -> Tensor:
    """Returns int64 numbers on a device, copied without waiting for it."""
    host = torch.tensor(numbers)
    return host.pin_memory().to(device, non_blocking=True) if device.type == 'cuda' else host


class SlotCache(Cache):
    """The cache of a collect phase. Before each forward the caller sets what the forward writes:

    `prefill(rows, source)`: whole prompts, padded on the right, from slot 0.
    `decode(lengths, width)`: one token for each of the first n rows.
    `append(first, stored, counts)`: further tokens of some rows.
    """

    def __init__(self, rows: int, capacity: int) -> None:
        """rows and capacity (slots per row) can be increased by `reserve`. Does not allocate memory yet."""
        super().__init__(layers=[])
        self.layers: list[Any] = []
        self.rows, self.capacity = rows, capacity
        self._past = self._width = self._first = 0
        self._prefill_rows: Tensor | None = None
        self._prefill_source: Tensor | None = None
        self._num_rows = 0
        self._at: Any = None
        self._of: Any = None

    @property
    def nbytes(self) -> int:
        """The allocated memory in bytes."""
        return sum(s.nbytes for layer in self.layers for s in (layer.keys, layer.values) if s is not None)

    @property
    def dtype(self) -> torch.dtype:
        return self.layers[0].keys.dtype

    def reserve(self, rows: int, capacity: int) -> None:
        """Grows the cache to at least this size, with its contents."""
        if rows <= self.rows and capacity <= self.capacity:
            return
        self.rows, self.capacity = max(rows, self.rows), max(capacity, self.capacity)
        for layer in self.layers:
            layer.keys = _resized(layer.keys, layer.keys, self.rows, self.capacity)
            layer.values = _resized(layer.values, layer.values, self.rows, self.capacity)

    def prefill(self, rows: Tensor, source: Tensor | None) -> None:
        """The next forward's row `source[i]`, or i if it is None, is the prompt of cache row `rows[i]`. Both (n,)
        int64."""
        self._past, self._prefill_rows, self._prefill_source = 0, rows, source

    def decode(self, row_index: Tensor, lengths: Tensor, width: int, *, same_length: bool) -> None:
        """The next forward's token i is token number `lengths[i]` of cache row i.

        row_index: (n,) int64, 0 .. n-1. lengths: (n,) int64, number of stored tokens. width: number of slots that
        attention reads, the largest length + 1. same_length: all lengths are width - 1, so a single slice is written.
        """
        self._past, self._width, self._prefill_rows = width - 1, width, None
        self._first, self._num_rows = 0, row_index.shape[0]
        self._at = (slice(self._num_rows), _EVERY, width - 1) if same_length else (row_index, _EVERY, lengths)
        self._of = _EVERY, _EVERY, 0

    def append(self, first: int, stored: list[int], counts: list[int], device: torch.device) -> None:
        """The next forward's row i contains tokens number `stored[i]` .. `stored[i] + counts[i] - 1` of cache row
        `first + i`, padded on the right. Attention reads the slots up to the longest row's end."""
        self._width = max(s + c for s, c in zip(stored, counts, strict=True))
        self._past, self._prefill_rows = self._width - max(counts), None
        self._first, self._num_rows = first, len(counts)
        # padding is not stored: there may be no slot after a row's own tokens
        which = [(i, j, s + j) for i, (s, c) in enumerate(zip(stored, counts, strict=True)) for j in range(c)]
        row, column, slot = torch.tensor(which, device=device).unbind(1)
        self._at, self._of = (first + row, _EVERY, slot), (row, _EVERY, column)

    def move(self, source: list[int], target: list[int], width: int) -> None:
        """Copies the first `width` slots of rows `source` to rows `target`. All are read before any is written, so rows
        can be exchanged."""
        rows: Any = source[0], target[0]
        if len(source) > 1:
            rows = indices([source, target], self.layers[0].keys.device)
        for layer in self.layers:
            for store in (layer.keys, layer.values):
                store[rows[1], :, :width] = store[rows[0], :, :width]

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Called by each attention layer: stores (n, H, P, D) states and returns the keys and values to attend to."""
        layers = self.layers
        while len(layers) <= layer_idx:
            layers.append(SlotLayer())
        layer = layers[layer_idx]
        if layer.keys is None:
            layer.keys = _resized(None, key_states, self.rows, self.capacity)
            layer.values = _resized(None, value_states, self.rows, self.capacity)
        stores = (layer.keys, key_states), (layer.values, value_states)
        if self._prefill_rows is not None:
            source = self._prefill_source
            for store, states in stores:
                store[self._prefill_rows, :, : states.shape[2]] = states if source is None else states[source]
            return key_states, value_states
        for store, states in stores:
            store[self._at] = states[self._of]
        rows = slice(self._first, self._first + self._num_rows)
        return layer.keys[rows, :, : self._width], layer.values[rows, :, : self._width]

    def get_seq_length(self, layer_idx: int = 0, *args: Any) -> int:
        """Returns the number of slots before the tokens of the next forward, for the longest row."""
        return self._past

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """Returns (number of slots that attention reads, offset of the first)."""
        return self._past + query_length, 0

    get_query_offset = get_seq_length

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return self.capacity

    get_max_cache_shape = get_max_length


def bytes_per_slot(actor: Any) -> int:
    """Returns the memory of a token in all layers, measured by a forward of one token."""
    device = next(actor.parameters()).device
    cache, first = SlotCache(1, 1), torch.zeros(1, 1, dtype=torch.int64, device=device)
    cache.prefill(first[0], None)
    actor.trunk(first, position_ids=first, cache=cache)
    return sum(store.nbytes for layer in cache.layers for store in (layer.keys, layer.values) if store is not None)


def _cached_states(
    actor: Any,
    sequences: list[Tensor],
    form: MaskForm,
    attention: AttentionForm = 'plain',
    windows: Windows | None = None,
    slots: int = 0,
) -> list[Tensor]:
    """Returns each sequence's hidden states from the last prompt token on, computed by prefill and by decode over at
    least `slots` slots."""
    cache, last = prefilled_example(actor, sequences, slots)
    prompts = [len(s) - _NUM_STEPS for s in sequences]
    rows, lengths = len(sequences), torch.tensor(prompts, device=sequences[0].device)
    states = [[state] for state in last]
    row_index = torch.arange(rows, device=lengths.device)
    for step in range(_NUM_STEPS):
        width = max(slots, max(prompts) + step + 1)
        token = torch.stack([s[length + step] for s, length in zip(sequences, prompts, strict=True)])
        cache.decode(row_index, lengths, width, same_length=False)
        keywords = step_keywords(attention, lengths, width, form, last.dtype, windows)
        hidden = actor.trunk(token[:, None], position_ids=lengths[:, None], cache=cache, **keywords)
        for i in range(rows):
            states[i].append(hidden[i, 0])
        lengths = lengths + 1
    return [torch.stack(row) for row in states]


def prefilled_example(actor: Any, sequences: list[Tensor], capacity: int = 0) -> tuple[SlotCache, Tensor]:
    """Returns a cache of at least `capacity` slots with the prompts of `plain_example`'s sequences, and the hidden
    states of their last tokens, (n, D)."""
    prompts = [len(s) - _NUM_STEPS for s in sequences]
    device, rows, longest = sequences[0].device, len(sequences), max(prompts)
    cache = SlotCache(rows, max(longest + _NUM_STEPS, capacity))
    input_ids = torch.zeros(rows, longest, dtype=torch.int64, device=device)
    for i, length in enumerate(prompts):
        input_ids[i, :length] = sequences[i][:length]
    cache.prefill(torch.arange(rows, device=device), None)
    positions = torch.arange(longest, device=device).expand(rows, longest)
    hidden = actor.trunk(input_ids, position_ids=positions, cache=cache)
    return cache, torch.stack([hidden[i, length - 1] for i, length in enumerate(prompts)])


def plain_example(actor: Any, lengths: tuple[int, ...] = PROMPT_LENGTHS) -> tuple[list[Tensor], list[Tensor], float]:
    """Returns sequences, the hidden states of each from its last prompt token on in a plain forward, and a tolerance
    for cached ones.

    The tolerance relative to the largest hidden state is 1e-3 in fp32 and 5e-2 in 16 bits; the error of a wrong mask or
    position is far larger. Raises FloatingPointError if the states are not finite.
    """
    config, longest = text_config(actor.model.config), max(lengths) + _NUM_STEPS
    # ids without a pattern, the same on every rank
    ids = torch.arange(len(lengths) * longest, device=next(actor.parameters()).device) * 7919 + 13
    rows = (ids % config.vocab_size).view(-1, longest)
    sequences = [row[: length + _NUM_STEPS] for row, length in zip(rows, lengths, strict=True)]
    plain = []
    for ids, length in zip(sequences, lengths, strict=True):
        positions = torch.arange(len(ids), device=ids.device)[None]
        plain.append(actor.trunk(ids[None], position_ids=positions)[0, length - 1 :].float())
    scale = max(float(p.abs().max()) for p in plain)
    if not math.isfinite(scale):
        raise FloatingPointError(
            'LocalEngine: the hidden states of the policy are not finite; check its weights and precision'
        )
    return sequences, plain, scale * (1e-3 if next(actor.parameters()).dtype == torch.float32 else 5e-2)


def disagreement(cached: Callable[[], list[Tensor]], plain: list[Tensor], tolerance: float) -> str:
    """Returns why the states that `cached` computes differ from the plain ones, or ''."""
    try:
        states = cached()
    except torch.OutOfMemoryError:
        raise
    except (ValueError, TypeError, RuntimeError, LookupError, AttributeError) as error:
        return f'{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ""}'
    difference = max(float((c.float() - p).abs().max()) for c, p in zip(states, plain, strict=True))
    return '' if difference <= tolerance else f'hidden states differ by {difference:.1e}, more than {tolerance:.1e}'


def find_mask_form(actor: Any) -> MaskForm:
    """Returns the first mask form for which cached decode and plain forward agree. Raises ValueError if there is none,
    FloatingPointError if the plain forward is not finite."""
    sequences, plain, tolerance = plain_example(actor)
    found = []
    for form in FORMS:
        why = disagreement(partial(_cached_states, actor, sequences, form), plain, tolerance)
        if not why:
            return form
        found.append(f'{form} mask: {why}')
    name, why = type(actor.model).__name__, _own_cache(actor) or '; '.join(found)
    raise ValueError(
        f"LocalEngine: cached decode of {name} does not agree with its plain forward ({why}); use engine='hf'"
    )


def _own_cache(actor: Any) -> str:
    """Returns why a model cannot decode from a `SlotCache`, if known, or ''."""
    if why := beyond_keys_and_values(actor.model):
        return why
    counts = accepts(base_model(actor.model), 'position_ids')
    return '' if counts else 'it takes no position ids, and counts from the longest row'


def windows_disagree(actor: Any, windows: Windows, *, fixed: bool = False) -> str:
    """Returns why decoding beyond the attention window differs from a plain forward, or ''. fixed: in steps of fixed
    shape."""
    sequences, plain, tolerance = plain_example(actor, windows.example_lengths)
    slots = in_pages(max(map(len, sequences))) if fixed else 0
    cached = partial(_cached_states, actor, sequences, 'additive', windows=windows, slots=slots)
    return disagreement(cached, plain, tolerance)


def fixed_steps_disagree(actor: Any, mask_form: MaskForm) -> str:
    """Returns why steps of fixed shape, which attend over more slots than tokens, differ from a plain forward, or ''.
    The check uses more slots than the window, to detect models that apply their window to slots."""
    windows = windows_of(text_config(actor.model.config))
    sequences, plain, tolerance = plain_example(actor)
    # a window of whole pages has as many slots as the sequences within it
    slots = in_pages(max([size for size in (windows.sizes if windows else ()) if size % PAGE], default=1))
    return disagreement(partial(_cached_states, actor, sequences, mask_form, slots=slots), plain, tolerance)


def in_pages(slots: int) -> int:
    """Rounds up to whole pages."""
    return -(-slots // PAGE) * PAGE


def attention_disagrees(actor: Any, mask_form: MaskForm, attention: AttentionForm) -> str:
    """Returns why decoding with this attention differs from a plain forward, or ''."""
    if mask_form != 'additive':
        return f'the model takes a {mask_form} mask'
    sequences, plain, tolerance = plain_example(actor)
    slots = CHECKED_PAGE if attention == 'varlen' else 0
    cached = partial(_cached_states, actor, sequences, mask_form, attention, slots=slots)
    return disagreement(cached, plain, tolerance)
