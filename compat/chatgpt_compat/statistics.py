"""Metrics under other systems' names, and measures that this library's metrics do not contain.

docs/coming_from lists which keys are equal, converted or missing. trlX logs every optimizer step; here a number is the
mean over the train batches of a learning phase.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from chatgpt.trainer import PPOConfig
from chatgpt.trainer.metrics import Mean
from chatgpt.types import Batch, Experience

Metrics = Mapping[str, float]
Formula = str | Callable[[Metrics, Any], float]
"""the name of a metric, or a function of a phase's metrics and the trainer's config"""


def named(table: Mapping[str, Formula], metrics: Metrics, config: Any) -> dict[str, float]:
    """Returns the numbers of a table, without rows that need a missing metric."""
    found = {}
    for name, formula in table.items():
        try:
            found[name] = metrics[formula] if isinstance(formula, str) else formula(metrics, config)
        except (KeyError, ZeroDivisionError):
            continue
    return found


# ---------------------------------------------------------------------- further measures of a forward


@dataclass(frozen=True)
class Measured:
    """The loss `loss(model, batch)` times `factor`, with metrics: the means over the tokens that count of
    `measure(output of the model, batch)`, a dict of (N,) tensors."""

    loss: Any
    measure: Callable[[Any, Batch], dict[str, Tensor]]
    factor: float = 1.0

    def __call__(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Any]:
        seen: list[Any] = []
        hook = model.register_forward_hook(lambda module, given, output: seen.append(output))
        try:
            total, metrics = self.loss(model, batch)
        finally:
            hook.remove()
        with torch.no_grad():
            mask, tokens = batch.action_mask, self.measure(seen[-1], batch)
            means = {name: Mean(torch.where(mask, x, 0.0).sum(), mask.sum()) for name, x in tokens.items()}
        return total if self.factor == 1.0 else self.factor * total, {**metrics, **means}


def of_policy(config: PPOConfig, logprobs: Tensor, batch: Batch) -> dict[str, Tensor]:
    """Returns what TRL averages over tokens of the policy, (N,) each; 'ppo/' + name is the classic key."""
    advantages, shift = batch.columns['advantages'], logprobs - batch.columns['old_logprobs']
    ratio = shift.exp()
    plain, clipped = -advantages * ratio, -advantages * ratio.clamp(1 - config.eps_clip, 1 + config.eps_clip)
    return {
        'loss/policy': torch.maximum(plain, clipped),
        'policy/approxkl': 0.5 * shift.square(),
        'policy/policykl': -shift,
        'policy/clipfrac': (clipped > plain).float(),
        'policy/advantages_mean': advantages,
    }


def of_values(config: PPOConfig, values: Tensor, batch: Batch) -> dict[str, Tensor]:
    """Returns the quantities of the values that TRL averages over tokens, as `of_policy`."""
    old, returns = batch.columns['values'], batch.columns['returns']
    clip = float('inf') if config.value_clip is None else config.value_clip
    error = (values - returns).square()
    near_error = (torch.clamp(values, old - clip, old + clip) - returns).square()
    return {
        'loss/value': 0.5 * torch.maximum(error, near_error),
        'returns/mean': returns,
        'val/vpred': values,
        'val/error': error,
        'val/clipfrac': (near_error > error).float(),
        'val/mean': old,
    }


# ---------------------------------------------------------------------- TRL 0.12 to 1.12, trlX

TRL: dict[str, Formula] = {
    'objective/kl': lambda m, c: m.get('rollout/kl_k3_mean' if c.kl_kind == 'k3' else 'rollout/kl_mean', 0.0),
    'objective/non_score_reward': 'rollout/non_score_reward_mean',
    'objective/rlhf_reward': lambda m, c: m['rollout/non_score_reward_mean'] + m['rollout/score_mean'],
    'objective/scores': 'rollout/score_mean',
    'policy/approxkl_avg': 'ppo/policy/approxkl',
    'policy/clipfrac_avg': 'ppo/policy/clipfrac',
    'loss/policy_avg': 'ppo/policy_loss',
    'loss/value_avg': 'ppo/value_loss',
    'val/clipfrac_avg': 'ppo/val/clipfrac',
    'policy/entropy_avg': 'ppo/entropy',
    'val/ratio': 'ppo/ratio_mean',
    'lr': 'ppo/lr',
}
"""TRL's key of an update of `PPOTrainer.train` → formula, without the keys that count samples"""


def _root_of_kl(m: Metrics, per: float = 1.0) -> float:
    return math.sqrt(max(m.get('rollout/kl_k3_mean', 0.0) / per, 0.0))


def _first(*names: str) -> Callable[[Metrics, Any], float]:
    return lambda m, c: m[next((name for name in names if name in m), names[0])]


TRLX: dict[str, Formula] = {
    'losses/total_loss': lambda m, c: m['ppo/policy_loss'] + c.value_coef * m['ppo/value_loss'],
    'losses/policy_loss': 'ppo/policy_loss',
    'losses/value_loss': 'ppo/value_loss',
    'values/mean': _first('ilql/value_mean', 'ppo/value_mean'),
    'values/clipfrac': 'ppo/value_clip_fraction',
    'returns/mean': 'ppo/return_mean',
    'returns/std': lambda m, c: math.sqrt(m['ppo/return_var']),
    'policy/approx_kl': 'ppo/approx_kl_k3',
    'policy/clipfrac': 'ppo/clip_fraction',
    'ratio': 'ppo/ratio_mean',
    'rollout_scores/mean': 'rollout/score_mean',
    'rollout_scores/std': 'rollout/score_std',
    'policy/sqrt_kl': lambda m, c: _root_of_kl(m),
    'policy/kl_per_token': lambda m, c: _root_of_kl(m, m['rollout/response_len_mean']),
    'kl_ctl_value': 'rollout/kl_coef',
    'time/rollout_generate': 'perf/collect_s',
    'time/rollout_score': 'perf/score_s',
    'losses/loss': 'ilql/loss',
    'losses/loss_q': 'ilql/td_loss',
    'losses/loss_v': 'ilql/value_loss',
    'losses/loss_cql': lambda m, c: m['ilql/cql_loss'] / c.cql_scale,
    'losses/loss_awac': lambda m, c: m['ilql/awac_loss'] / c.awac_scale,
    'loss': 'sft/loss',
    'learning_rate_group_0': _first('ppo/lr', 'ilql/lr', 'sft/lr'),
}
"""trlX's key of a learning phase → formula"""
EVALUATED = {'eval/score_mean': 'reward/mean', 'eval/metrics/': 'metrics/'}
"""our key of an evaluation, or its prefix → trlX's; a suffix such as `@beta=1` is kept"""


def evaluated(metrics: Metrics) -> dict[str, float]:
    """Returns `reward/mean` and `metrics/<name>` of an evaluation's metrics."""
    return {
        theirs + name.removeprefix(ours): value
        for name, value in metrics.items()
        for ours, theirs in EVALUATED.items()
        if name.startswith(ours) and not name.endswith('_best')
    }


# ---------------------------------------------------------------------- TRL 0.4 to 0.11


@dataclass
class Recorder:
    """The measures of one `step` in its mini-batches, in addition to the trainer's metrics."""

    ratios: list[Tensor] = field(default_factory=list)
    advantages: list[Tensor] = field(default_factory=list)
    return_vars: list[float] = field(default_factory=list)
    value_vars: list[float] = field(default_factory=list)

    def note(self, records: SequenceOf[Experience]) -> None:
        """Records a mini-batch before it is learned."""
        mask = torch.cat([r.response_mask for r in records])
        self.advantages.append(torch.cat([r.advantages for r in records])[mask])
        self.return_vars.append(_var(torch.cat([r.returns for r in records])[mask]))
        self.value_vars.append(_var(torch.cat([r.values for r in records])[mask]))

    def measure(self, config: PPOConfig, out: Any, batch: Batch) -> dict[str, Tensor]:
        """Returns the measures of each token. `out`: the output of an actor with a value head."""
        self.ratios.append((out.logprobs - batch.columns['old_logprobs']).exp()[batch.action_mask].cpu())
        both = of_policy(config, out.logprobs, batch) | of_values(config, out.values, batch)
        return both | {'policy/entropy': out.entropy}


def of_step(
    experiences: SequenceOf[Experience], metrics: Metrics, recorder: Recorder, value_coef: float
) -> dict[str, Any]:
    """Returns TRL's statistics of a step without its times: numbers as floats, the rest as numpy arrays.

    Args:
        experiences: those of the step on all processes.
        metrics: those of the step, with the ones of `Recorder.measure`, named with two slashes.
        value_coef: vf_coef.
    """
    kl_coef = metrics['rollout/kl_coef']
    kls = torch.stack([(e.kl * e.response_mask).sum() for e in experiences])
    entropies = torch.stack([-(e.old_logprobs * e.response_mask).sum() for e in experiences])
    counted = max(sum(int(e.response_mask.sum()) for e in experiences), 1)
    scores = torch.tensor([e.shaped_score for e in experiences])
    found: dict[str, Any] = {
        'objective/kl': float(kls.mean()),
        'objective/kl_dist': kls.numpy(),
        'objective/logprobs': pad_sequence([e.old_logprobs for e in experiences], batch_first=True).numpy(),
        'objective/ref_logprobs': pad_sequence([e.ref_logprobs for e in experiences], batch_first=True).numpy(),
        'objective/kl_coef': kl_coef,
        'objective/entropy': float(entropies.mean()),
        'ppo/mean_non_score_reward': 0.0 - kl_coef * float(kls.sum()) / counted,
        'ppo/mean_scores': float(scores.mean()),
        'ppo/std_scores': std(scores),
    }
    lengths = {'queries': [len(e.prompt_ids) for e in experiences], 'responses': [e.num_actions for e in experiences]}
    for name, counts in lengths.items():
        values = torch.tensor(counts, dtype=torch.float32)
        found[f'tokens/{name}_len_mean'], found[f'tokens/{name}_len_std'] = float(values.mean()), std(values)
        found[f'tokens/{name}_dist'] = values.numpy()
    found |= {name: value for name, value in metrics.items() if name.startswith('ppo/') and name.count('/') == 2}
    found['ppo/loss/total'] = metrics['ppo/loss/policy'] + value_coef * metrics['ppo/loss/value']
    found['ppo/policy/advantages'] = torch.cat(recorder.advantages).numpy()
    found['ppo/policy/ratio'] = torch.cat(recorder.ratios).numpy()
    found['ppo/returns/var'] = var = float(np.mean(recorder.return_vars))
    found['ppo/val/var'] = float(np.mean(recorder.value_vars))
    found['ppo/val/var_explained'] = 1 - found['ppo/val/error'] / var if var else 0.0
    return found


def std(values: Tensor) -> float:
    """Returns the standard deviation; 0 for a single value."""
    return float(values.std()) if len(values) > 1 else 0.0


def _var(values: Tensor) -> float:
    return float(values.double().var()) if len(values) > 1 else 0.0
