"""The local engine: prefill and decode with a slot cache in this process, with the policy's own modules.

The engine holds the state of a collect phase: the actor, the cache and the steps of fixed shape. A call is a `LocalRun`
(`chatgpt.rollout.local.run`), or a `Conversation` with several turns (`chatgpt.rollout.local.conversation`).

On a GPU, cache and steps are kept for the next phase if their size and a twentieth of the GPU's memory are free after
learning, so nothing is kept from the first phase. A captured graph reads weights at fixed addresses, so steps are
reused only for the same actor with its tensors at the same addresses. For beam search, penalties, and models with other
states than keys and values, see `chatgpt.rollout.hf`.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from chatgpt.nn.fused_adapters import fused_adapters
from chatgpt.nn.layouts import check_causal
from chatgpt.nn.trunk import addresses, plain_settings, row_limit, sharding_group, text_config
from chatgpt.rollout.call import Call
from chatgpt.rollout.engine import Abilities, CheckedEngine, Turns
from chatgpt.rollout.local.append import AppendForm, find_append_form
from chatgpt.rollout.local.attention import FORMS, AttentionForm, find_attention, way_of
from chatgpt.rollout.local.conversation import Conversation
from chatgpt.rollout.local.cpu_speed import PackedModules
from chatgpt.rollout.local.fixed_step import FixedSteps
from chatgpt.rollout.local.masks import Windows, windows_of
from chatgpt.rollout.local.run import LocalRun
from chatgpt.rollout.local.slot_cache import (
    SlotCache,
    attention_disagrees,
    bytes_per_slot,
    find_mask_form,
    fixed_steps_disagree,
    windows_disagree,
)
from chatgpt.rollout.sampling import TokenSampler
from chatgpt.types import Sample

if TYPE_CHECKING:
    from chatgpt.nn import Actor

CACHE_SHARE = 0.6
"""fraction of a GPU's free memory for the cache; activations of a prefill, logits and graphs need the rest"""
SPARE_SHARE = 0.05
"""fraction of a GPU's memory that must be free after learning in addition to what is kept for the next phase"""


def check_local(config: Any, call: Call) -> list[int]:
    """Checks a call of a `LocalEngine` against the text model's config, and returns the maximum number of new tokens
    per prompt."""
    if call.sampling.extra:
        names = ', '.join(f'{k}={v!r}' for k, v in call.sampling.extra.items())
        raise ValueError(f"LocalEngine cannot do {names}; leave it out or use engine='hf'")
    return call.checked(config)


class LocalEngine(CheckedEngine):
    """Generates with the actor's own `trunk` and `head`. Draws are reproducible.

    Args:
        max_batch_size: maximum number of sequences decoded at once; on a GPU fewer, if their cache would take more than
            60 % of the free memory.
        max_prefill_tokens: maximum number of tokens of a prefill forward, with padding.
        refill_fraction: waiting prompts enter when this fraction of the rows is free.
        fixed_steps: decode in fixed shapes, on CUDA as captured graphs; 'auto' on CUDA only; 'compiled' with
            torch.compile.
        attention: of decode steps, 'plain' or 'varlen'; 'auto' is that of `WAYS` in `chatgpt.rollout.local.attention`.
        keep: keep cache and steps for the next phase; 'auto' if a GPU has memory left for them.
    """

    abilities = Abilities(copies_weights=False, reproducible=True, runs_actor=True, plays_turns=True)

    def __init__(
        self,
        *,
        max_batch_size: int = 256,
        max_prefill_tokens: int = 16384,
        refill_fraction: float = 0.125,
        fixed_steps: bool | Literal['auto', 'compiled'] = 'auto',
        attention: AttentionForm | Literal['auto', 'grouped'] = 'auto',
        keep: bool | Literal['auto'] = 'auto',
    ) -> None:
        if max_batch_size < 1 or max_prefill_tokens < 1 or not 0 <= refill_fraction <= 1:
            raise ValueError(
                f'LocalEngine: max_batch_size={max_batch_size}, max_prefill_tokens={max_prefill_tokens}, '
                f'refill_fraction={refill_fraction}; give two positive integers and a share between 0 and 1'
            )
        for name, value, known in (
            ('fixed_steps', fixed_steps, (True, False, 'auto', 'compiled')),
            ('attention', attention, ('auto', *FORMS, 'grouped')),
            ('keep', keep, (True, False, 'auto')),
        ):
            if value not in known:
                raise ValueError(f'LocalEngine: {name}={value!r} is not one of {", ".join(map(repr, known))}')
        self.max_batch_size, self.max_prefill_tokens = max_batch_size, max_prefill_tokens
        self.min_refill = max(1, int(max_batch_size * refill_fraction))
        self.fixed_steps, self.keep = fixed_steps, keep
        self.attention = 'plain' if attention == 'grouped' else attention  # another name of it
        self.keeping = False
        """True if cache and steps of this phase are kept for the next"""
        self.attention_form: AttentionForm = 'plain'
        """for the current policy"""
        self._cache: SlotCache | None = None
        self._packed: PackedModules | None = None
        self._mask_form: Any = None
        self._append_form: AppendForm | None = None
        self._window_error: str | None = None
        """why decoding beyond the attention window is wrong, '' if it is correct, None if not checked yet"""
        self._checked: Any = None
        self._steps: list[FixedSteps] = []  # those of the newest samplings first
        self._kept_for: tuple[Any, Any] | None = None
        """the actor that the steps were made for, and its properties that must be unchanged for their reuse"""
        self._held_bytes: int | None = None  # memory held at the end of the latest phase
        self._steps_agree = True  # False if decoding over more slots than tokens differs from the plain forward
        self._can_capture = True  # False if the capture of a model of the kind `_checked` has failed

    def hold(self, actor: Actor) -> None:
        """Keeps the actor, with dropout off. A new model's cached decode is first compared with its plain forward.

        Raises ValueError if they disagree, and for an encoder-decoder.
        """
        check_causal(actor.model, 'LocalEngine decodes', "use engine='hf'")
        super().hold(actor)
        # compares architectures, because a 16-bit policy is a new copy in every phase
        model, parameter = actor.model, next(actor.parameters())
        settings = model.config._attn_implementation, str(model.config.to_dict())
        kind = type(model), parameter.dtype, parameter.device, *settings
        if self._checked != kind:
            self.release()
            try:
                self._find_forms(actor)
            except Exception:
                self.end()
                raise
            self._checked, self._can_capture, self._append_form, self._window_error = kind, True, None, None
        self._keep_steps_of(actor)
        self.keeping = bool(self._min_over_processes(self._may_keep(parameter.device)))

    def _find_forms(self, actor: Actor) -> None:
        with torch.inference_mode():
            self._mask_form = find_mask_form(actor)
            self._steps_agree = True
            if self.wants_fixed(next(actor.parameters()).device):
                why = fixed_steps_disagree(actor, self._mask_form)
                if why and self.fixed_steps != 'auto':
                    raise ValueError(
                        f'LocalEngine: fixed_steps={self.fixed_steps!r} cannot be had: decode of '
                        f'{type(actor.model).__name__} over more slots than tokens does not agree with its plain '
                        f'forward ({why}); use fixed_steps=False'
                    )
                self._steps_agree = not why
            disagrees = partial(attention_disagrees, actor, self._mask_form)
            self.attention_form = find_attention(self.attention, actor, disagrees)

    def wants_fixed(self, device: torch.device) -> bool:
        """Returns True if steps of fixed shape are enabled and the model decodes correctly in them."""
        wanted = way_of(device).fixed if self.fixed_steps == 'auto' else bool(self.fixed_steps)
        return wanted and self._steps_agree

    def _keep_steps_of(self, actor: Actor) -> None:
        """Drops kept steps unless they were made for this actor."""
        kept, self._kept_for = self._kept_for, None
        if kept is None or kept[0]() is not actor or kept[1] != (addresses(actor), plain_settings(actor)):
            self._steps = []

    def _may_keep(self, device: torch.device) -> bool:
        if self.keep != 'auto':
            return self.keep
        if device.type != 'cuda' or self._held_bytes is None:
            return False
        free, total = torch.cuda.mem_get_info(device)
        held = self._held_bytes if self.keeping else 0
        return free + held >= self._held_bytes + SPARE_SHARE * total

    def _bytes_held(self) -> int:
        """Returns the memory of cache and graphs, and of the actor if it is a copy for generation."""
        parameters = list(self._actor.parameters())
        copied = 0 if any(p.requires_grad for p in parameters) else sum(p.nbytes for p in parameters)
        return copied + (self._cache.nbytes if self._cache else 0) + sum(steps.graph_bytes for steps in self._steps)

    def check(self, config: Any, call: Call) -> list[int]:
        """See `check_local`. The first time that sequences exceed the model's attention window, decoding beyond it is
        compared with the plain forward. Raises ValueError if they disagree, and for sequences beyond `row_limit`."""
        limits = check_local(config, call)
        longest = max((len(p.ids) + limit for p, limit in zip(call.prompts, limits, strict=True)), default=0)
        most = row_limit(config)
        if most is not None and longest > most:
            raise ValueError(
                f'LocalEngine: sequences of up to {longest} tokens exceed {most}, beyond which the attention '
                f'temperature of {type(self._actor.model).__name__} follows from the longest sequence that is decoded '
                "(attn_temperature_tuning); use engine='hf'"
            )
        windows = self.windows_beyond(longest)
        if windows is not None:
            if self._window_error is None:
                fixed = self.wants_fixed(next(self._actor.parameters()).device)
                with torch.inference_mode():
                    self._window_error = windows_disagree(self._actor, windows, fixed=fixed)
            if self._window_error:
                raise ValueError(
                    f"LocalEngine: sequences of up to {longest} tokens exceed the model's attention window of "
                    f'{windows.sizes[0]}, beyond which its decode does not agree ({self._window_error}); use '
                    "engine='hf'"
                )
        return limits

    def windows_beyond(self, length: int) -> Windows | None:
        """Returns the model's attention windows if sequences of `length` tokens exceed one of them, else None."""
        windows = windows_of(text_config(self._actor.model.config))
        return windows if windows is not None and length > windows.sizes[0] else None

    def answer(self, call: Call, limits: list[int]) -> list[Sample]:
        """Generates a call. Raises FloatingPointError for logits that are not finite, with sample and position."""
        with self._discard_cache_on_error():
            with self._faster(), torch.inference_mode():
                run = LocalRun(self, call, limits)
                run.loop()
            # outside of inference mode, so that autograd may save the samples' tensors
            return run.samples()

    def converse(self, call: Call, turns: Turns) -> None:
        """See `RolloutEngine.converse` and `Conversation`. The cache holds up to twice `max_batch_size` sequences, of
        which at most `max_batch_size` are decoded at once. Raises the errors of `generate`."""
        rooms = self.checked(call)
        if call.prompts:
            with self._discard_cache_on_error(), self._faster(), torch.inference_mode():
                Conversation(self, call, rooms, turns).loop()

    def append_form(self) -> AppendForm:
        """Returns the form of `append` for sequences within the model's attention window."""
        if self._append_form is None:
            self._append_form = find_append_form(self._actor, self._mask_form)
        return self._append_form

    def _faster(self) -> AbstractContextManager[None]:
        """Returns a context in which the actor's linear layers run in fewer or faster kernels."""
        if self.fixed_steps == 'compiled':  # torch packs the weights itself
            return nullcontext()
        if next(self._actor.parameters()).device.type == 'cuda':
            return fused_adapters(self._actor)
        self._packed = self._packed or PackedModules(self._actor)
        return self._packed.active()

    @contextmanager
    def _discard_cache_on_error(self) -> Iterator[None]:
        """Context that drops the cache after an error: it may contain non-finite states, which a mask cannot hide."""
        try:
            yield
        except BaseException:
            self.release()
            raise

    def end(self) -> None:
        """Releases the actor, restores training flags, and frees the cache or keeps it for the next phase."""
        actor = self._actor
        if actor is not None:
            self._held_bytes = self._bytes_held()
        super().end()
        self._packed = None
        if not self.keeping:
            self.release()
            return
        self._record_capture_failure()
        if self._steps and actor is not None:
            self._kept_for = weakref.ref(actor), (addresses(actor), plain_settings(actor))
            for steps in self._steps:
                steps.release_actor()

    def release(self) -> None:
        """Frees cache and steps."""
        self._record_capture_failure()
        self._cache = self._kept_for = None
        self._steps = []

    @property
    def _fixed(self) -> FixedSteps | None:
        """The steps of the latest call, or None."""
        return self._steps[0] if self._steps else None

    def captures(self, device: torch.device) -> bool:
        """Returns True if steps of fixed shape are captured as CUDA graphs."""
        return device.type == 'cuda' and self._can_capture

    def _record_capture_failure(self) -> None:
        """Remembers a failed capture, so that later steps do not try again."""
        self._can_capture = self._can_capture and not any(steps.capture_failed for steps in self._steps)

    def cache(self, rows: int, capacity: int) -> SlotCache:
        """Returns a cache of at least this size for a new call."""
        cache = self._cache
        if cache is None or rows > cache.rows or capacity > cache.capacity:
            wider = rows, capacity
            if cache is not None:
                both = max(rows, cache.rows), max(capacity, cache.capacity)
                if self.rows_that_fit(*both) == both[0]:
                    wider = both
            self._cache, self._steps = None, []  # freed before the new one is allocated
            self._cache = cache = SlotCache(*wider)
        return cache

    def rows_that_fit(self, rows: int, capacity: int) -> int:
        """Returns how many of `rows` rows with `capacity` slots fit into `free_bytes`, at least 1."""
        cache, device = self._cache, next(self._actor.parameters()).device
        if cache is None or rows > cache.rows or capacity > cache.capacity:
            free = self.free_bytes(device)
            if free is not None:
                room = CACHE_SHARE * (free + (cache.nbytes if cache else 0))
                rows = max(1, min(rows, int(room / max(bytes_per_slot(self._actor) * capacity, 1))))
        return self._min_over_processes(rows)

    def _min_over_processes(self, number: int) -> int:
        """Returns the minimum over the processes that share a tensor-parallel model and must run the same forwards."""
        if (group := sharding_group(self._actor)) is None:
            return number
        device = next(self._actor.parameters()).device
        return -int(group.max(torch.tensor(-number, device=device)))

    def free_bytes(self, device: torch.device) -> int | None:
        """Returns the memory available for the cache, free on the device or cached by torch; None on a CPU."""
        if device.type != 'cuda':
            return None
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + kept

    def fixed(
        self,
        cache: SlotCache,
        sampler: TokenSampler,
        uniforms: Tensor | None,
        size: int,
        *,
        capture: bool,
        windows: Windows | None = None,
    ) -> FixedSteps:
        """Returns steps of fixed shape; those of an earlier call, with their graphs, if they fit. The steps of two
        samplings are kept, such as those of a run and of its evaluation."""
        steps = next((s for s in self._steps if s.fits(cache, sampler, size, windows)), None)
        if steps is None:
            self._record_capture_failure()
            device = sampler.end_ids.device
            steps = FixedSteps(
                self._actor,
                sampler,
                cache,
                self._mask_form,
                'plain' if windows is not None else self.attention_form,
                size,
                device,
                capture=capture and self.captures(device),
                compiled=self.fixed_steps == 'compiled',
                windows=windows,
            )
        self._steps = [steps, *(s for s in self._steps if s is not steps)][:2]
        steps.start_call(self._actor, uniforms)
        return steps
