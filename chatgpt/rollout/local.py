"""The local engine: prefill and decode with a slot cache in this process, on the policy's own modules.

What lives for a collect phase is here: the actor, the cache and the steps of fixed shape; a single call is a `LocalRun`.

Left out: beam search, penalties and other GenerationConfig extras, and models whose decode is more than full attention
over a key/value cache: those go through `chatgpt.rollout.hf`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from chatgpt.rollout.call import Call, InProcessEngine
from chatgpt.rollout.check import attention_window, find_mask_form
from chatgpt.rollout.cpu_speed import PackedModules
from chatgpt.rollout.fixed_step import FixedSteps
from chatgpt.rollout.local_run import LocalRun
from chatgpt.rollout.sampling import TokenSampler
from chatgpt.rollout.slot_cache import SlotCache
from chatgpt.types import Sample

if TYPE_CHECKING:
    from chatgpt.nn import Actor


def check_local(config: Any, call: Call) -> list[int]:
    """What a `LocalEngine` checks before any work, with the text model's config. Returns the most new tokens of each prompt."""
    if call.sampling.extra:
        names = ', '.join(f'{k}={v!r}' for k, v in call.sampling.extra.items())
        raise ValueError(f"LocalEngine cannot do {names}; leave it out or use engine='hf'")
    limits = call.limits(config)
    window = attention_window(config)
    longest = max((len(p.ids) + limit for p, limit in zip(call.prompts, limits, strict=True)), default=0)
    if window is not None and longest > window:
        raise ValueError(
            f"LocalEngine: sequences of up to {longest} tokens exceed the model's attention window of {window}; use engine='hf'"
        )
    return limits


class LocalEngine(InProcessEngine):
    """Generates with the actor's own `trunk` and `head`. Draws are reproducible.

    max_batch_size: most sequences decoded at once; further prompts wait. max_prefill_tokens: padded size of one prefill
    forward. refill_fraction: waiting prompts enter when this share of the rows is free. fixed_steps: decode at fixed shapes, on CUDA
    as captured graphs (`chatgpt.rollout.fixed_step`); 'auto' does so on CUDA, where launching kernels costs more than idle rows.

    >>> engine = LocalEngine()                                                                    # doctest: +SKIP
    >>> engine.begin(actor)                                                                       # doctest: +SKIP
    >>> samples = engine.generate(prompts, SamplingParams(max_new_tokens=48), seed=1, indices=range(len(prompts)))  # doctest: +SKIP
    >>> engine.end()                                                                              # doctest: +SKIP
    """

    reproducible = True

    def __init__(
        self, *, max_batch_size: int = 256, max_prefill_tokens: int = 16384, refill_fraction: float = 0.125,
        fixed_steps: bool | Literal['auto'] = 'auto',
    ) -> None:  # fmt: skip
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
        self._checked: Any = None
        self._fixed: tuple[Any, FixedSteps] | None = None

    def begin(self, actor: Actor) -> None:
        """Take the actor, dropout off. The first time with a model, checks its cached decode against its plain forward.

        Raises ValueError where they disagree.
        """
        if self._actor is not None:
            self.end()
        self.hold(actor)
        # a 16-bit policy is a new copy in every phase: what matters is the architecture
        parameter, config = next(actor.parameters()), actor.model.config
        kind = (type(actor.model), config._attn_implementation, parameter.dtype, parameter.device, str(config.to_dict()))
        if self._checked == kind:
            return
        try:
            with torch.inference_mode():
                self._mask_form = find_mask_form(actor)
        except Exception:
            self.end()
            raise
        self._checked = kind

    def check(self, config: Any, call: Call) -> list[int]:
        return check_local(config, call)

    def answer(self, call: Call, limits: list[int]) -> list[Sample]:
        """Raises FloatingPointError, naming sample and position, for non-finite logits."""
        try:
            self._packed = self._packed or PackedModules(self._actor)
            with self._packed.active(), torch.inference_mode():
                run = LocalRun(self, call, limits)
                run.loop()
            # outside of inference mode, so that the samples are ordinary tensors that autograd may save
            return run.samples()
        except BaseException:
            self._cache = self._fixed = None  # it may hold non-finite states, which a mask cannot hide
            raise

    def end(self) -> None:
        """Give the actor back with the training flags it came with, and free the cache."""
        super().end()
        self._cache = self._packed = self._fixed = None

    def cache(self, rows: int, capacity: int) -> SlotCache:
        """This phase's cache, grown to at least this size."""
        if self._cache is None:
            self._cache = SlotCache(rows, capacity)
        self._cache.reserve(rows, capacity)
        return self._cache

    def fixed(self, cache: SlotCache, sampler: TokenSampler, uniforms: Tensor | None, size: int, *, capture: bool) -> FixedSteps:
        """This phase's steps of fixed shape; those of an earlier call where they fit, with their graphs."""
        key = (cache.rows, cache.capacity, size, sampler.sampling)
        if self._fixed is None or self._fixed[0] != key:
            device, sampling = sampler.end_ids.device, sampler.sampling
            steps = FixedSteps(
                self._actor, sampler, cache, self._mask_form, uniforms, size, device, capture=capture and device.type == 'cuda',
                no_end_until=sampling.min_new_tokens > 0 and len(sampling.eos_token_ids) > 0,
            )  # fmt: skip
            self._fixed = key, steps
        self._fixed[1].renew(uniforms)
        return self._fixed[1]
