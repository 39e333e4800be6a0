"""The local engine: prefill and decode with a slot cache in this process, on the policy's own modules.

It holds what lives for a collect phase: the actor, the cache and the steps of fixed shape. One call is a `LocalRun`
(`chatgpt.rollout.local.run`), or a `Conversation` of several turns (`chatgpt.rollout.local.conversation`).

Left out: beam search, penalties and other GenerationConfig extras, and models whose decode is more than full attention
over a key/value cache: those go through `chatgpt.rollout.hf`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from chatgpt.rollout.engine import Call, InProcessEngine, Turns
from chatgpt.rollout.local.append import AppendForm, find_append_form
from chatgpt.rollout.local.conversation import Conversation
from chatgpt.rollout.local.cpu_speed import PackedModules
from chatgpt.rollout.local.fixed_step import FixedSteps
from chatgpt.rollout.local.run import LocalRun
from chatgpt.rollout.local.slot_cache import SlotCache, attention_window, bytes_per_slot, find_mask_form
from chatgpt.rollout.sampling import SamplingParams, TokenSampler
from chatgpt.types import Prompt, Sample

if TYPE_CHECKING:
    from chatgpt.nn import Actor

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
