"""Formulas of a peer and of this library on the same random numbers, in the peer's environment.

    PYTHONPATH=. PEER/bin/python benchmarks/peers/peer_formulas.py verl|openrlhf|trl_now

Prints one JSON object: the peer's version, and rows of [formula, the peer's function, largest difference]. A policy loss is
compared with its gradient. Float64, 6 responses of up to 9 tokens in 3 groups; two have a tool's output inside.
"""

from __future__ import annotations

import importlib.machinery
import importlib.metadata
import inspect
import json
import logging
import sys
import textwrap
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from chatgpt.functional import advantages as ours
from chatgpt.functional import losses, ppo
from chatgpt.functional.masking import whiten

B, T = 6, 9
Case = tuple[str, str, Callable[[], Any], Callable[[], Any]]
"""formula, the peer's function, ours, theirs"""


class Numbers:
    """The inputs, (B, T) each: padded rows for a peer, and flat for this library with `flat`."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(3)

        def rand(scale: float = 1.0, *shape: int) -> Tensor:
            return scale * torch.randn(*(shape or (B, T)), generator=generator, dtype=torch.float64)

        self.mask = torch.arange(T) < torch.tensor([9, 4, 6, 1, 8, 7])[:, None]
        self.mask[0, 2:4] = self.mask[4, 5] = False
        self.rows = torch.arange(B)[:, None].expand(B, T).reshape(-1)
        self.old = -1.5 + rand(0.5)
        self.new, self.engine, self.ref = (self.old + rand(0.4) for _ in range(3))
        self.per_token, self.values, self.old_values, self.rewards = (rand() * self.mask for _ in range(4))
        self.scores, self.groups = rand(1.0, B), torch.tensor([0, 1, 0, 1, 2, 2])
        self.adv = rand(1.0, B)[:, None].expand(B, T) * self.mask
        self.totals = torch.zeros(B, T, dtype=torch.float64)
        for i in range(B):
            self.totals[i, self.mask[i].nonzero()[-1]] = self.scores[i]

    def lists(self, x: Tensor) -> list[Tensor]:
        return list(x)

    @property
    def where(self) -> tuple[Tensor, Tensor, int]:
        return self.mask.reshape(-1), self.rows, B

    def loss(self, fn: Callable[..., Tensor], mode: str, *args: Tensor) -> Callable[[], tuple[Tensor, Tensor]]:
        """Returns our loss of a batch, and its gradient: `fn` of flat log-probs, then `aggregate`."""

        def both() -> tuple[Tensor, Tensor]:
            new = self.new.clone().requires_grad_()
            per_token = fn(new.reshape(-1), *(x.reshape(-1) for x in args))
            count = ppo.aggregation_count(*self.where, mode, T)
            total = ppo.aggregate(per_token, *self.where, mode, count)
            return total, torch.autograd.grad(total, new)[0]

        return both

    def of_peer(self, fn: Callable[[Tensor], Tensor]) -> Callable[[], tuple[Tensor, Tensor]]:
        def both() -> tuple[Tensor, Tensor]:
            new = self.new.clone().requires_grad_()
            total = fn(new)
            return total, torch.autograd.grad(total, new)[0]

        return both

    def spread(self, per_response: Tensor) -> Tensor:
        return per_response[:, None] * self.mask

    def weights(self, correction: str, low: float, high: float) -> Tensor:
        flat = (self.old.reshape(-1), self.engine.reshape(-1))
        return losses.importance_weights(*flat, *self.where, correction, low=low, high=high).view(B, T)

    def weighted(self, correction: str, low: float, high: float) -> Callable[..., Tensor]:
        def fn(new: Tensor, old: Tensor, adv: Tensor) -> Tensor:
            return ppo.clipped_policy_loss(new, old, adv) * self.weights(correction, low, high).reshape(-1)

        return fn


def gspo(n: Numbers, fn: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda new, old, adv: fn(new, old, adv, *n.where, eps_low=0.2, eps_high=0.28)


def gae(n: Numbers, part: int, whitened: bool = False) -> Tensor:
    made = ppo.gae(*map(n.lists, (n.rewards, n.values, n.mask)), gamma=0.99, lam=0.9)[part]
    stacked = torch.stack(made)
    return whiten(stacked, n.mask) if whitened else stacked


# ---------------------------------------------------------------------- verl


def verl(n: Numbers) -> list[Case]:
    from verl.trainer.config import AlgoConfig
    from verl.trainer.ppo import core_algos as algos
    from verl.trainer.ppo import rollout_corr_helper as helper
    from verl.workers.config import ActorConfig

    mask, index = n.mask.double(), np.array(n.groups.tolist(), dtype=object)
    advantages: dict[str, tuple[Callable[[], Tensor], str, dict[str, Any]]] = {
        'GRPO': (lambda: n.spread(ours.grpo(n.scores, n.groups, eps=1e-6)), 'grpo_outcome', {'index': index}),
        'Dr. GRPO': (
            lambda: n.spread(ours.dr_grpo(n.scores, n.groups)),
            'grpo_outcome',
            {'index': index, 'norm_adv_by_std_in_grpo': False},
        ),
        'RLOO': (lambda: n.spread(ours.rloo(n.scores, n.groups)), 'rloo_outcome', {'index': index}),
        'REINFORCE++': (
            lambda: whiten(torch.stack(ours.reinforce_pp(list(n.totals), list(n.mask))[0]), n.mask),
            'reinforce_plus_plus_outcome',
            {'config': AlgoConfig(gamma=1.0)},
        ),
        'REINFORCE++ with baseline': (
            lambda: whiten(torch.stack(ours.reinforce_pp_baseline(n.scores, n.groups, list(n.mask))[0]), n.mask),
            'reinforce_plus_plus_baseline_outcome',
            {'index': index},
        ),
    }
    cases: list[Case] = [
        (
            name,
            f'compute_{of}_advantage',
            mine,
            lambda of=of, more=more: (
                getattr(algos, f'compute_{of}_advantage')(token_level_rewards=n.totals, response_mask=mask, **more)[0]
                * mask
            ),
        )
        for name, (mine, of, more) in advantages.items()
    ]
    for part, name in enumerate(('GAE, whitened', 'returns of GAE')):
        cases.append(
            (
                name,
                'compute_gae_advantage_return',
                lambda p=part: gae(n, p, not p),
                lambda p=part: algos.compute_gae_advantage_return(n.rewards, n.values, mask, 0.99, 0.9)[p] * mask,
            )
        )

    def loss(kind: str, mode: str = 'token-mean', weights: Any = None, **clip: float) -> Callable[[], Any]:
        config = ActorConfig(strategy='fsdp', rollout_n=1, use_dynamic_bsz=True, **{'clip_ratio_c': 1e9} | clip)
        fn = algos.get_policy_loss_fn(kind)
        given = {'response_mask': mask, 'loss_agg_mode': mode, 'config': config, 'rollout_is_weights': weights}
        return n.of_peer(lambda new: fn(old_log_prob=n.old, log_prob=new, advantages=n.per_token, **given)[0])

    def own(mode: str = 'token', **clip: float) -> Callable[[], Any]:
        return n.loss(lambda *x: ppo.clipped_policy_loss(*x, **clip), mode, n.old, n.per_token)

    vanilla = 'compute_policy_loss_vanilla'
    for mode, theirs in (
        ('token', 'token-mean'),
        ('sequence', 'seq-mean-token-mean'),
        ('sequence_sum', 'seq-mean-token-sum-norm'),
    ):
        cases.append((f'PPO, mean over {mode}', vanilla, own(mode), loss('vanilla', theirs)))
    cases += [
        ('clip-higher', vanilla, own(eps_high=0.28), loss('vanilla', clip_ratio_high=0.28)),
        ('dual clip', vanilla, own(dual_clip=1.5), loss('vanilla', clip_ratio_c=1.5)),
        (
            'GSPO-token',
            'compute_policy_loss_gspo',
            n.loss(gspo(n, losses.gspo_token_policy_loss), 'sequence', n.old, n.per_token),
            loss('gspo', 'seq-mean-token-mean', clip_ratio_high=0.28),
        ),
        (
            'CISPO with both bounds',
            'compute_policy_loss_cispo',
            n.loss(lambda *x: losses.cispo_policy_loss(*x, eps_high=0.28, eps_low=0.2), 'token', n.old, n.per_token),
            loss('cispo', clip_ratio_high=0.28),
        ),
        (
            'value loss, clipped',
            'compute_value_loss',
            lambda: ppo.clipped_value_loss(n.values, n.old_values, n.rewards, 0.4)[n.mask].mean(),
            lambda: algos.compute_value_loss(n.values, n.rewards, n.old_values, mask, 0.4)[0],
        ),
    ]
    for kind in ('k1', 'k2', 'k3', 'abs'):
        cases.append(
            (
                f'KL, {kind}',
                'kl_penalty',
                lambda k=kind: ppo.kl_penalty(n.new, n.ref, k),
                lambda k=kind: algos.kl_penalty(n.new, n.ref, k),
            )
        )
    cases.append(
        (
            'KL of the engine, k3',
            'compute_offpolicy_metrics',
            lambda: ppo.kl_penalty(n.engine, n.old, 'k3')[n.mask].mean(),
            lambda: torch.tensor(helper.compute_offpolicy_metrics(n.old, n.engine, mask)['k3_kl']),
        )
    )
    ratio = n.old - n.engine
    for level, low, high, option in (('token', 0.7, 1.3, 'token_k1'), ('sequence', 0.3, 2.5, 'seq_sum_k1')):
        for kind, spec, floor in (('truncate', high, 0.0), ('mask', f'{low}_{high}', low)):
            cases.append(
                (
                    f'{level}_{kind}',
                    'compute_rollout_correction_weights',
                    lambda c=f'{level}_{kind}', b=(floor, high): n.weights(c, *b) * mask,
                    lambda v=level, t=spec: helper.compute_rollout_correction_weights(ratio, mask, v, t)[0] * mask,
                )
            )
        # its bounds are of -log r: a ratio between a and b is 1/b to 1/a there
        cases.append(
            (
                f'{level}_mask, what is kept',
                'compute_rollout_rejection_mask',
                lambda c=f'{level}_mask', b=(low, high): (n.weights(c, *b) > 0) * mask,
                lambda o=option, t=f'{1 / high}_{1 / low}': helper.compute_rollout_rejection_mask(ratio, mask, o, t)[0],
            )
        )
    weights = helper.compute_rollout_correction_weights(ratio, mask, 'token', 1.3)[0]
    cases.append(
        (
            'PPO with token_truncate (decoupled)',
            vanilla,
            n.loss(n.weighted('token_truncate', 0.0, 1.3), 'token', n.old, n.per_token),
            loss('vanilla', weights=weights),
        )
    )
    return cases


# ---------------------------------------------------------------------- OpenRLHF


def openrlhf(n: Numbers) -> list[Case]:
    """Only the files of its formulas are loaded: the packages import DeepSpeed and Ray."""
    sys.modules['deepspeed'] = types.ModuleType('deepspeed')
    root = Path(importlib.metadata.distribution('openrlhf').locate_file('openrlhf'))
    for name in ('openrlhf', 'openrlhf.models'):
        package = types.ModuleType(name)
        package.__path__ = [str(root.joinpath(*name.split('.')[1:]))]
        package.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
        sys.modules[name] = package
    from openrlhf.models.loss import PolicyLoss, ValueLoss
    from openrlhf.models.utils import compute_approx_kl

    mask = n.mask.double()
    source = (root / 'trainer' / 'ppo_utils' / 'experience_maker.py').read_text()
    start = source.index('    @torch.no_grad()\n    def get_advantages_and_returns')
    scope: dict[str, Any] = {'torch': torch, 'Tuple': tuple}
    exec(textwrap.dedent(source[start:]), scope)  # its methods alone
    tail = torch.arange(T) < n.mask.sum(1)[:, None]  # it has no tokens that do not count inside a response

    def loss(**settings: Any) -> Callable[[], Any]:
        fn = PolicyLoss(**settings)
        given = {'action_mask': mask, 'rollout_log_probs': n.engine}
        return n.of_peer(lambda new: fn(new, n.old, n.adv, **given)[0])

    def own(fn: Callable[..., Tensor], mode: str = 'token') -> Callable[[], Any]:
        return n.loss(fn, mode, n.old, n.adv)

    clip = ppo.clipped_policy_loss
    cases: list[Case] = [
        ('PPO, mean over token', 'PolicyLoss', own(clip), loss()),
        ('PPO, mean over sequence', 'PolicyLoss', own(clip, 'sequence'), loss(token_level_loss=False)),
        ('clip-higher', 'PolicyLoss', own(lambda *x: clip(*x, eps_high=0.28)), loss(clip_eps_high=0.28)),
        ('dual clip', 'PolicyLoss', own(lambda *x: clip(*x, dual_clip=1.5)), loss(dual_clip=1.5)),
        (
            'GSPO',
            'PolicyLoss',
            own(gspo(n, losses.gspo_policy_loss), 'sequence'),
            loss(policy_loss_type='gspo', clip_eps_high=0.28),
        ),
        (
            'PPO with token_mask (IcePop)',
            'PolicyLoss',
            own(n.weighted('token_mask', 0.7, 1.3)),
            loss(is_correction_level='token', is_correction_threshold=[0.7, 1.3]),
        ),
        (
            'PPO with token_truncate',
            'PolicyLoss',
            own(n.weighted('token_truncate', 0.7, 1.3)),
            loss(is_correction_level='token', is_correction_mode='clip', is_correction_threshold=[0.7, 1.3]),
        ),
        (
            'value loss, clipped',
            'ValueLoss',
            lambda: ppo.clipped_value_loss(n.values, n.old_values, n.rewards, 0.4)[n.mask].mean(),
            lambda: ValueLoss(0.4)(n.values, n.old_values, n.rewards, mask),
        ),
        (
            'returns of REINFORCE',
            'get_cumulative_returns',
            lambda: torch.stack(ours.monte_carlo_returns(list(n.rewards * tail), list(tail))),
            lambda: scope['get_cumulative_returns'](None, n.rewards, tail, 1.0) * tail,
        ),
    ]
    for part, name in enumerate(('GAE', 'returns of GAE')):
        cases.append(
            (
                name,
                'get_advantages_and_returns',
                lambda p=part: torch.stack(
                    ppo.gae(*map(list, (n.rewards * tail, n.values * tail, tail)), gamma=0.99, lam=0.9)[p]
                ),
                lambda p=part: (
                    scope['get_advantages_and_returns'](None, n.values, n.rewards, tail, 0.99, 0.9)[p] * tail
                ),
            )
        )
    for kind in ('k1', 'k2', 'k3'):
        cases.append(
            (
                f'KL, {kind}',
                'compute_approx_kl',
                lambda k=kind: ppo.kl_penalty(n.new, n.ref, k),
                lambda k=kind: compute_approx_kl(n.new.float(), n.ref.float(), kl_estimator=k).double(),
            )
        )
    return cases


# ---------------------------------------------------------------------- TRL


def trl_now(n: Numbers) -> list[Case]:
    from trl import GRPOTrainer
    from trl.trainer import grpo_trainer

    mask = n.mask.double()

    def loss(kind: str, **changes: Any) -> Callable[[], Any]:
        """Calls `_compute_loss` on an object that has what it reads of a trainer."""
        inputs = {'prompt_ids': torch.zeros(B, 1, dtype=torch.long), 'prompt_mask': torch.ones(B, 1)}
        inputs |= {'completion_ids': torch.zeros(B, T, dtype=torch.long), 'completion_mask': mask}
        inputs |= {'advantages': n.adv, 'old_per_token_logps': n.old, 'ref_per_token_logps': n.ref}
        inputs |= {'num_items_in_batch': mask.sum(), 'importance_sampling_ratio': changes.pop('ratio', None)}
        args = types.SimpleNamespace(
            delta=None, steps_per_generation=1, use_bias_correction_kl=changes.pop('unbiased', False)
        )
        weighs = inputs['importance_sampling_ratio'] is not None
        given = {
            'loss_type': kind, 'epsilon_low': 0.2, 'epsilon_high': 0.2, 'beta': 0.0, 'importance_sampling_level': 'token',
            'aux_loss_enabled': False, 'top_entropy_quantile': 1.0, 'off_policy_mask_threshold': None, 'use_vllm': weighs,
            'vllm_importance_sampling_correction': weighs, 'current_gradient_accumulation_steps': 1, 'args': args,
            'max_completion_length': T, '_entropy_bonus_enabled': False,
            'accelerator': Alone(), 'model': types.SimpleNamespace(training=True),
        }  # fmt: skip

        def both(new: Tensor) -> Tensor:
            me = Forgiving(**given | changes)
            me._get_per_token_logps_and_entropies = lambda *a, **k: (new, torch.zeros(B, T), None)
            return GRPOTrainer._compute_loss(me, None, inputs)

        return n.of_peer(both)

    def own(fn: Callable[..., Tensor], mode: str, kl: Callable[..., Tensor] | None = None) -> Callable[[], Any]:
        def total(new: Tensor, old: Tensor, adv: Tensor) -> Tensor:
            return fn(new, old, adv) + (kl(new, old) if kl else 0.0)

        return n.loss(total, mode, n.old, n.adv)

    def k3(new: Tensor, old: Tensor) -> Tensor:
        return 0.3 * ppo.kl_penalty(new, n.ref.reshape(-1), 'k3')

    def unbiased(new: Tensor, old: Tensor) -> Tensor:
        return losses.importance_weighted(k3(new, old), new, old)

    clip = ppo.clipped_policy_loss
    cases: list[Case] = [
        ('GRPO', '_compute_loss', own(clip, 'sequence'), loss('grpo')),
        (
            'DAPO, clip-higher',
            '_compute_loss',
            own(lambda *x: clip(*x, eps_high=0.28), 'token'),
            loss('dapo', epsilon_high=0.28),
        ),
        ('Dr. GRPO', '_compute_loss', own(clip, 'sequence_sum'), loss('dr_grpo')),
        (
            'CISPO',
            '_compute_loss',
            own(lambda *x: losses.cispo_policy_loss(*x, eps_high=0.28), 'token'),
            loss('cispo', epsilon_high=1.28),
        ),
        (
            'GSPO',
            '_compute_loss',
            own(gspo(n, losses.gspo_policy_loss), 'sequence'),
            loss('grpo', importance_sampling_level='sequence', epsilon_high=0.28),
        ),
        ('GRPO, KL k3 in the loss', '_compute_loss', own(clip, 'sequence', k3), loss('grpo', beta=0.3)),
        (
            'GRPO, KL with importance',
            '_compute_loss',
            own(clip, 'sequence', unbiased),
            loss('grpo', beta=0.3, unbiased=True),
        ),
    ]
    # The corrections stand inside a long method: that part of its source is run.
    source = textwrap.dedent(inspect.getsource(GRPOTrainer._generate_and_score_completions))
    start = source.rindex('\n', 0, source.index('per_token_logps_diff = (old_per_token_logps')) + 1
    part = textwrap.dedent(source[start : source.index('# Compute the per-token log probabilities for the ref')])

    def theirs(mode: str, low: float | None, high: float) -> Tensor:
        settings = {'mode': mode, 'clip_min': low, 'clip_max': high}
        me = types.SimpleNamespace(**{f'vllm_importance_sampling_{k}': v for k, v in settings.items()})
        scope = {'self': me, 'mask': mask}
        scope |= {'old_per_token_logps': n.old, 'sampling_per_token_logps': n.engine}
        exec(part, vars(grpo_trainer) | scope, scope)
        return scope['vllm_importance_sampling_ratio'].expand(B, T) * mask

    for level in ('token', 'sequence'):
        for kind in ('truncate', 'mask'):
            for low in (None, 0.7 if level == 'token' else 0.3):
                name = f'{level}_{kind}'
                cases.append(
                    (
                        f'{name}, {"both bounds" if low else "an upper bound"}',
                        '_generate_and_score_completions',
                        lambda c=name, b=low or 0.0: n.weights(c, b, 1.3) * mask,
                        lambda c=name, b=low: theirs(c, b, 1.3),
                    )
                )
    cases.append(
        (
            'GRPO with sequence_mask',
            '_compute_loss',
            own(n.weighted('sequence_mask', 0.0, 3.0), 'sequence'),
            loss('grpo', ratio=theirs('sequence_mask', None, 3.0)),
        )
    )
    return cases


class Alone:
    """Accelerate on one process: `gather`, `reduce` and the like return what they are given."""

    num_processes = 1

    def __getattr__(self, name: str) -> Any:
        return lambda x, **kw: x


class Forgiving(types.SimpleNamespace):
    """An object whose other attributes take any call, for what a method only logs."""

    def __getattr__(self, name: str) -> Any:
        from unittest.mock import MagicMock

        return MagicMock()


PEERS = {'verl': (verl, 'verl'), 'openrlhf': (openrlhf, 'openrlhf'), 'trl_now': (trl_now, 'trl')}


def difference(mine: Any, theirs: Any) -> float:
    pairs = zip(mine, theirs, strict=True) if isinstance(mine, tuple) else [(mine, theirs)]
    return max(float((a.detach().double() - b.detach().double()).abs().max()) for a, b in pairs)


def main() -> None:
    logging.disable(logging.WARNING)
    make, package = PEERS[sys.argv[1]]
    rows = []
    for name, of, mine, theirs in make(Numbers()):
        rows.append([name, of, difference(mine(), theirs())])
    print(json.dumps({'version': importlib.metadata.version(package), 'rows': rows}))


if __name__ == '__main__':
    main()
