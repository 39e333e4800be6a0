"""The statistics of TRL's classic `step` under its own keys: what our metrics do not hold is measured beside them.

docs/coming_from/trl.md says for each key whether it is the same number, converted, or left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from chatgpt.trainer import PPOConfig
from chatgpt.types import Batch, Experience


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


def token_statistics(config: PPOConfig, recorder: Recorder, out: Any, batch: Batch) -> dict[str, Tensor]:
    """What TRL averages over tokens, (N,) each, named so that 'ppo/' + name is TRL's key. `out`: of the actor."""
    columns = batch.columns
    old, advantages, returns = columns['old_logprobs'], columns['advantages'], columns['returns']
    shift = out.logprobs - old
    ratio = shift.exp()
    recorder.ratios.append(ratio[batch.action_mask].cpu())
    plain, clipped = -advantages * ratio, -advantages * ratio.clamp(1 - config.eps_clip, 1 + config.eps_clip)
    clip = float('inf') if config.value_clip is None else config.value_clip
    near = torch.clamp(out.values, columns['values'] - clip, columns['values'] + clip)
    error, near_error = (out.values - returns).square(), (near - returns).square()
    return {
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


def statistics(
    experiences: SequenceOf[Experience], metrics: Mapping[str, float], recorder: Recorder, value_coef: float
) -> dict[str, Any]:
    """TRL's statistics of a step but for its times: numbers as floats, the rest as numpy arrays.

    Args:
        experiences: of the step, all processes together.
        metrics: of the step, with those of `token_statistics`, whose names have two slashes.
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
    found |= {name: value for name, value in metrics.items() if name.startswith('ppo/') and name.count('/') == 2}
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
