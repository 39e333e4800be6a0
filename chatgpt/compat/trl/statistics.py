"""The statistics of TRL's classic `step` under its own keys: what our metrics do not hold is measured beside them.

`KEYS` says for each key whether it is the same number, converted, or left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from chatgpt.trainer.losses import SharedLoss
from chatgpt.trainer.metrics import Mean, Metrics
from chatgpt.types import Batch, Experience

_TOKENS = 'of the response tokens that count; theirs has prompt and padding in it'
KEYS: dict[str, str] = {
    'objective/kl': 'the same',
    'objective/kl_dist': 'the same: (B,) sums per response',
    'objective/logprobs': f'converted: (B, A) {_TOKENS}; 0 after the end',
    'objective/ref_logprobs': f'converted: (B, A) {_TOKENS}; 0 after the end',
    'objective/kl_coef': 'the same',
    'objective/entropy': 'the same: mean over responses of −Σ log π',
    'ppo/mean_non_score_reward': 'the same: mean over tokens of −β KL',
    'ppo/mean_scores': 'the same: of the scaled and clipped scores',
    'ppo/std_scores': 'the same; 0 of a single score, where theirs is NaN',
    'ppo/learning_rate': 'the same',
    'ppo/loss/policy': 'the same; a batch beyond ratio_threshold counts with its loss, theirs with 0',
    'ppo/loss/value': 'the same, see ppo/loss/policy',
    'ppo/loss/total': 'the same, see ppo/loss/policy',
    'ppo/policy/entropy': 'the same',
    'ppo/policy/approxkl': 'the same: ½ (log ρ)²',
    'ppo/policy/policykl': 'the same',
    'ppo/policy/clipfrac': 'the same',
    'ppo/policy/advantages': f'converted: one array {_TOKENS}, of all mini-batches',
    'ppo/policy/advantages_mean': 'the same',
    'ppo/policy/ratio': f'converted: one array {_TOKENS}, of all mini-batches of this process',
    'ppo/returns/mean': 'the same',
    'ppo/returns/var': 'the same',
    'ppo/val/vpred': 'the same',
    'ppo/val/error': 'the same',
    'ppo/val/clipfrac': 'the same',
    'ppo/val/mean': 'the same',
    'ppo/val/var': 'the same',
    'ppo/val/var_explained': 'the same',
    'tokens/queries_len_mean': 'the same',
    'tokens/queries_len_std': 'the same; 0 of a single query',
    'tokens/queries_dist': 'the same',
    'tokens/responses_len_mean': 'the same',
    'tokens/responses_len_std': 'the same; 0 of a single response',
    'tokens/responses_dist': 'the same',
    'time/ppo/forward_pass': 'converted: seconds of the whole scoring, rewards and advantages included',
    'time/ppo/compute_rewards': 'left out: milliseconds, within time/ppo/forward_pass',
    'time/ppo/compute_advantages': 'left out: milliseconds, within time/ppo/forward_pass',
    'time/ppo/optimize_step': 'the same',
    'time/ppo/calc_stats': 'the same',
    'time/ppo/total': 'the same',
}
"""TRL's key: the same number by the same formula, converted, or left out and why"""


@dataclass
class Recorder:
    """What one `step` measures in its mini-batches, beside the metrics of the trainer."""

    ratios: list[Tensor] = field(default_factory=list)
    advantages: list[Tensor] = field(default_factory=list)
    return_vars: list[float] = field(default_factory=list)
    value_vars: list[float] = field(default_factory=list)

    def note(self, records: SequenceOf[Experience]) -> None:
        """A mini-batch about to be learned from."""
        mask = torch.cat([r.response_mask for r in records])
        self.advantages.append(torch.cat([r.advantages for r in records])[mask])
        self.return_vars.append(_var(torch.cat([r.returns for r in records])[mask]))
        self.value_vars.append(_var(torch.cat([r.values for r in records])[mask]))


@dataclass(frozen=True)
class MeasuredLoss:
    """A `SharedLoss` that also gives TRL's means over tokens, named so that 'ppo/' + name is TRL's key."""

    loss: SharedLoss
    recorder: Recorder

    def __call__(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Metrics]:
        seen: list[Any] = []

        def forward(policy: nn.Module, given: Batch) -> Any:
            seen.append(self.loss.actor.forward(policy, given))
            return seen[-1]

        total, metrics = replace(self.loss, actor=replace(self.loss.actor, forward=forward))(model, batch)
        with torch.no_grad():
            return total, {**metrics, **self._means(seen[0], batch)}

    def _means(self, out: Any, batch: Batch) -> dict[str, Mean]:
        c, mask, columns = self.loss.actor.config, batch.action_mask, batch.columns
        old, advantages, returns = columns['old_logprobs'], columns['advantages'], columns['returns']
        shift = out.logprobs - old
        ratio = shift.exp()
        self.recorder.ratios.append(ratio[mask].cpu())
        plain, clipped = -advantages * ratio, -advantages * ratio.clamp(1 - c.eps_clip, 1 + c.eps_clip)
        clip = float('inf') if c.value_clip is None else c.value_clip
        near = torch.clamp(out.values, columns['values'] - clip, columns['values'] + clip)
        error, near_error = (out.values - returns).square(), (near - returns).square()
        tokens = {
            'loss/policy': torch.maximum(plain, clipped),
            'loss/value': 0.5 * torch.maximum(error, near_error),
            'policy/entropy': out.entropy,
            'policy/approxkl': 0.5 * shift.square(),
            'policy/policykl': -shift,
            'policy/clipfrac': (clipped > plain).float(),
            'policy/advantages_mean': advantages,
            'returns/mean': returns,
            'val/vpred': out.values,
            'val/error': error,
            'val/clipfrac': (near_error > error).float(),
            'val/mean': columns['values'],
        }
        count = mask.sum()
        return {name: Mean(torch.where(mask, x, torch.zeros_like(x)).sum(), count) for name, x in tokens.items()}


def statistics(
    experiences: SequenceOf[Experience], metrics: Mapping[str, float], recorder: Recorder, value_coef: float
) -> dict[str, Any]:
    """TRL's statistics of a step but for its times: numbers as floats, the rest as numpy arrays.

    Args:
        experiences: of the step, all processes together.
        metrics: of the step, with those of `MeasuredLoss`.
        value_coef: vf_coef.
    """
    kl_coef = metrics['rollout/kl_coef']
    kls = [(e.kl * e.response_mask).sum() for e in experiences]
    entropies = [-(e.old_logprobs * e.response_mask).sum() for e in experiences]
    counted = max(sum(int(e.response_mask.sum()) for e in experiences), 1)
    scores = torch.tensor([e.shaped_score for e in experiences])
    prompts = torch.tensor([float(len(e.prompt_ids)) for e in experiences])
    responses = torch.tensor([float(e.num_actions) for e in experiences])
    found: dict[str, Any] = {
        'objective/kl': float(torch.stack(kls).mean()),
        'objective/kl_dist': torch.stack(kls).numpy(),
        'objective/logprobs': _padded([e.old_logprobs for e in experiences]),
        'objective/ref_logprobs': _padded([e.ref_logprobs for e in experiences]),
        'objective/kl_coef': kl_coef,
        'objective/entropy': float(torch.stack(entropies).mean()),
        'ppo/mean_non_score_reward': 0.0 - kl_coef * float(torch.stack(kls).sum()) / counted,
        'ppo/mean_scores': float(scores.mean()),
        'ppo/std_scores': _std(scores),
        'tokens/queries_len_mean': float(prompts.mean()),
        'tokens/queries_len_std': _std(prompts),
        'tokens/queries_dist': prompts.numpy(),
        'tokens/responses_len_mean': float(responses.mean()),
        'tokens/responses_len_std': _std(responses),
        'tokens/responses_dist': responses.numpy(),
    }
    found |= {name: metrics[name] for name in KEYS if name in metrics}
    found['ppo/loss/total'] = metrics['ppo/loss/policy'] + value_coef * metrics['ppo/loss/value']
    found['ppo/policy/advantages'] = torch.cat(recorder.advantages).numpy()
    found['ppo/policy/ratio'] = torch.cat(recorder.ratios).numpy()
    found['ppo/returns/var'] = float(np.mean(recorder.return_vars))
    found['ppo/val/var'] = float(np.mean(recorder.value_vars))
    var = found['ppo/returns/var']
    found['ppo/val/var_explained'] = 1 - found['ppo/val/error'] / var if var else 0.0
    return found


def _padded(rows: list[Tensor]) -> np.ndarray:
    return pad_sequence(rows, batch_first=True).numpy()


def _std(values: Tensor) -> float:
    return float(values.std()) if len(values) > 1 else 0.0


def _var(values: Tensor) -> float:
    return float(values.double().var()) if len(values) > 1 else 0.0
