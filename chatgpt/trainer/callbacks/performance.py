"""Throughput and TFLOPS of an online trainer, from the arithmetic that is actually done.

A forward of a token through N parameters takes 2N FLOP (a multiplication and an addition each), and the backward as
much again for the gradient of the activations and for that of the weights (Kaplan et al. 2020, section 2.1; Narayanan
et al. 2021, section 5.1, for recomputation). With P prompt and A response tokens per sequence, E passes and N_a, N_c,
N_i, N_r parameters of actor, critic, initial and reward model:

    collect  Σ 2 N_a (P + A − 1)              KV cache: every token but the last goes through once
    score    Σ 2 (N_c + N_i + N_r [+ N_a]) (P + A)     the actor only if log-probs are recomputed
    learn    E Σ (2 + 2 + 2 (1 − frozen)) (N_a + N_c) (P + A), and + 2 (N_a + N_c) with gradient checkpointing; a critic
             with passes of its own has its own E

The figures are a lower bound: they do not include attention scores (which grow with the length, not with N), the
optimizer, padding, and a reward that is a function. Embedding tables take a lookup instead of 2N: count them only if
they are also the head.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as SequenceOf
from typing import Any, ClassVar

from torch import nn

from chatgpt.trainer.callbacks.base import Callback, TrainerView, say
from chatgpt.types import Experience

PARTS = ('collect', 'score', 'learn')


def num_parameters(module: nn.Module) -> int:
    """Returns the number of parameters of a module, shared ones once. Call it before `prepare`: a sharded module holds
    only its part."""
    return sum(p.numel() for p in module.parameters())


class PerformanceEvaluator(Callback):
    """Adds `perf/collect_tflops`, `perf/score_tflops`, `perf/learn_tflops`, `perf/total_tflops` (per device) and
    `perf/samples_per_s` to each phase's metrics, and prints their averages at the end.

    Args:
        actor_num_params, critic_num_params, initial_model_num_params, reward_model_num_params: see `num_parameters`; 0
            for models that the run does not have (a critic on the actor's trunk, a reward that is a function).
        enable_grad_checkpoint: activations are recomputed in the backward pass.
        ignore_phases: number of first phases excluded from the averages (warm-up).
        frozen_share: share of actor and critic weights without a gradient (LoRA: close to 1).
    """

    order: ClassVar[int] = -10

    def __init__(
        self,
        actor_num_params: int,
        critic_num_params: int,
        initial_model_num_params: int,
        reward_model_num_params: int,
        enable_grad_checkpoint: bool = False,
        ignore_phases: int = 0,
        *,
        frozen_share: float = 0.0,
    ) -> None:
        if not 0.0 <= frozen_share <= 1.0:
            raise ValueError(f'frozen_share={frozen_share} must lie in [0, 1]')
        self.actor_num_params = actor_num_params
        self.critic_num_params = critic_num_params
        self.initial_model_num_params = initial_model_num_params
        self.reward_model_num_params = reward_model_num_params
        self.enable_grad_checkpoint = enable_grad_checkpoint
        self.ignore_phases = ignore_phases
        self.frozen_share = frozen_share
        self._batches = {'policy_loss': 0, 'value_loss': 0}
        self._phases = 0
        self._flop = dict.fromkeys(PARTS, 0.0)
        self._seconds = dict.fromkeys(PARTS, 0.0)
        self._samples = 0

    def on_learn_batch_end(self, trainer: TrainerView, metrics: dict[str, float]) -> None:
        for loss in self._batches:
            self._batches[loss] += loss in metrics

    def on_phase_end(self, trainer: TrainerView, step: int, metrics: dict[str, float]) -> None:
        experiences, batches = trainer.last_experiences, self._batches
        self._batches = dict.fromkeys(batches, 0)
        if not experiences:
            return
        settings = getattr(getattr(trainer, 'maker', None), 'settings', None)
        recomputes = bool(getattr(settings, 'recompute_logprobs', False))
        config = trainer.config
        size = getattr(config, 'train_batch_size', 0)
        apart = getattr(config, 'critic_train_batch_size', None) or size
        passes = _passes(config, len(experiences), batches['policy_loss'], size)
        of_critic = _passes(config, len(experiences), batches['value_loss'], apart)
        flop = self.phase_flop(experiences, passes=passes, critic_passes=of_critic, recompute_logprobs=recomputes)
        seconds = {part: metrics.get(f'perf/{part}_s', 0.0) for part in PARTS}
        world = trainer.strategy.processes.world_size
        for part in PARTS:
            if seconds[part] > 0:
                metrics[f'perf/{part}_tflops'] = flop[part] / seconds[part] / world / 1e12
        total = sum(seconds.values())
        if total > 0:
            metrics['perf/total_tflops'] = sum(flop.values()) / total / world / 1e12
            metrics['perf/samples_per_s'] = len(experiences) / total
        self._phases += 1
        if self._phases > self.ignore_phases:
            self._samples += len(experiences)
            for part in PARTS:
                self._flop[part] += flop[part]
                self._seconds[part] += seconds[part]

    def phase_flop(
        self,
        experiences: SequenceOf[Experience],
        *,
        passes: float,
        critic_passes: float | None = None,
        recompute_logprobs: bool = False,
    ) -> dict[str, float]:
        """Returns the FLOP of each part of a phase, all ranks together, by the formulas of this module."""
        tokens = sum(e.num_tokens for e in experiences)
        scoring = self.critic_num_params + self.initial_model_num_params + self.reward_model_num_params
        if recompute_logprobs:
            scoring += self.actor_num_params
        of_critic = passes if critic_passes is None else critic_passes
        learned = passes * self.actor_num_params + of_critic * self.critic_num_params
        factor = 4 + 2 * (1 - self.frozen_share) + (2 if self.enable_grad_checkpoint else 0)
        return {
            'collect': 2.0 * self.actor_num_params * (tokens - len(experiences)),
            'score': 2.0 * scoring * tokens,
            'learn': factor * learned * tokens,
        }

    def on_fit_end(self, trainer: TrainerView) -> None:
        total = sum(self._seconds.values())
        if total <= 0 or not trainer.strategy.is_rank_0:
            return
        world = trainer.strategy.processes.world_size
        parts = ', '.join(
            f'{part} {self._flop[part] / self._seconds[part] / world / 1e12:.4g}'
            for part in PARTS
            if self._seconds[part] > 0
        )
        whole = sum(self._flop.values()) / total / world / 1e12
        say(f'performance: {self._samples / total:.4g} samples/s, {whole:.4g} TFLOPS per device ({parts})')


def _passes(config: Any, collected: int, batches: int, size: int) -> float:
    """Returns the mean number of passes over a collected sequence, from the train batches of `size` that were run."""
    if not size:
        return 0.0
    held = min(collected, getattr(config, 'buffer_limit', 0) or collected)
    # Each epoch takes one full batch instead of passing over all.
    whole_batches = getattr(config, 'sample_replay_buffer', False)
    per_pass = max(held / size, 1.0) if whole_batches else math.ceil(held / size)
    return batches / per_pass * held / collected
