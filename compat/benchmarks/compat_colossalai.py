"""The formulas of ColossalAI's `chatgpt` beside ours, on the same tensors: losses and their gradients, rewards, log-probs.

    git clone https://github.com/hpcaitech/ColossalAI && git -C ColossalAI checkout d32ef94ad
    python compat/benchmarks/compat_colossalai.py --source ColossalAI/applications/ChatGPT
    python compat/benchmarks/compat_colossalai.py            # the committed numbers beside ours
    python compat/benchmarks/compat_colossalai.py speed --source git+https://github.com/hpcaitech/ColossalAI

With --source its files models/loss.py and models/utils.py are executed as they are, and what they give is written to
compat/tests/colossalai/colossalai_numbers.json with the inputs; `make test` compares ours with that. Only these two files:
they need nothing but torch and the name loralib.

Speed: one program on both sides (`peers/compat_colossalai_speed.py`), its `PPOTrainer.fit` under `NaiveStrategy`, updates
in turns, A B A B. The environment of its side is made on first use, with the last transformers under which its generation
keeps the KV cache.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

HERE = Path(__file__).resolve().parent
CORE = HERE.parents[1] / 'benchmarks'
sys.path[:0] = [str(HERE / 'peers'), str(CORE), str(CORE / 'peers')]

from compat_page import arguments, checkout, speed, write  # noqa: E402
from vs_peers import ENVIRONMENTS, own_python  # noqa: E402
from work import Case as Update  # noqa: E402

GOLDEN = HERE.parent / 'tests' / 'colossalai' / 'colossalai_numbers.json'
OURS = 'chatgpt_compat.colossalai.losses'
RESULTS = HERE / 'results' / 'compat_colossalai.json'
COMMIT = 'd32ef94ad'
"""of ColossalAI, the last state that the page was written from"""
ENVIRONMENTS['colossalai'] = ['transformers==4.25.1', 'loralib==0.1.1', 'tqdm==4.67.1', 'safetensors==0.4.5', 'numpy<2']
SPEED = [Update('colossalai', 'ppo', 'fixed', 'fp32', epochs) for epochs in (1, 4)]


def inputs() -> dict[str, Tensor]:
    """3 sequences of up to 5 actions over 7 tokens; masks of 5, 3 and 1."""
    generator = torch.Generator().manual_seed(20230214)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    logits, old_logits, ref_logits = (2 * normal(3, 5, 7) for _ in range(3))
    labels = torch.randint(7, (3, 5), generator=generator)
    return {
        'logits': logits,
        'labels': labels,
        'old_log_probs': old_logits.log_softmax(-1).gather(-1, labels[..., None])[..., 0],
        'ref_log_probs': ref_logits.log_softmax(-1).gather(-1, labels[..., None])[..., 0],
        'mask': torch.arange(5)[None] < torch.tensor([5, 3, 1])[:, None],
        'advantages': normal(3, 1),
        'values': normal(3),
        'old_values': normal(3),
        'reward': normal(3),
        'action_values': normal(3, 5),
        'old_action_values': normal(3, 5),
        'returns': normal(3, 5),
        'chosen': normal(4),
        'rejected': normal(4),
        'far_chosen': torch.tensor([-150.0, 1.0]),
        'far_rejected': torch.tensor([50.0, 0.0]),
    }


Case = Callable[[Any, dict[str, Tensor]], Tensor]


def _log_probs(m: Any, x: dict[str, Tensor]) -> Tensor:
    return m.log_probs_from_logits(x['logits'], x['labels'])


CASES: dict[str, tuple[str, Case]] = {
    'log_probs_from_logits': ('logits', _log_probs),
    'masked_mean': ('logits', lambda m, x: m.masked_mean(_log_probs(m, x), x['mask'])),
    'normalize': ('reward', lambda m, x: m.normalize(x['reward'])),
    'compute_approx_kl': ('logits', lambda m, x: m.compute_approx_kl(_log_probs(m, x), x['ref_log_probs'], x['mask'])),
    'compute_reward': (
        'logits',
        lambda m, x: m.compute_reward(x['reward'], 0.1, _log_probs(m, x), x['ref_log_probs'], x['mask']),
    ),
    'PolicyLoss': (
        'logits',
        lambda m, x: m.PolicyLoss(0.2)(_log_probs(m, x), x['old_log_probs'], x['advantages'], x['mask']),
    ),
    'PolicyLoss without a mask': (
        'logits',
        lambda m, x: m.PolicyLoss(0.2)(_log_probs(m, x), x['old_log_probs'], x['advantages']),
    ),
    'ValueLoss': ('values', lambda m, x: m.ValueLoss(0.4)(x['values'], x['old_values'], x['reward'])),
    'GPTLMLoss': ('logits', lambda m, x: m.GPTLMLoss()(x['logits'], x['labels'])),
    'PPOPtxActorLoss': (
        'logits',
        lambda m, x: m.PPOPtxActorLoss(0.2, 0.5)(
            _log_probs(m, x), x['old_log_probs'], x['advantages'], x['logits'], x['labels'], x['mask']
        ),
    ),
    'LogSigLoss': ('chosen', lambda m, x: m.LogSigLoss()(x['chosen'], x['rejected'])),
    'LogExpLoss': ('chosen', lambda m, x: m.LogExpLoss()(x['chosen'], x['rejected'])),
}
"""name -> the input whose gradient is taken, and the call: the same formula in both"""

DEFECTS: dict[str, tuple[str, Case, str]] = {
    'ValueLoss of actions': (
        'action_values',
        lambda m, x: m.ValueLoss(0.4)(x['action_values'], x['old_action_values'], x['returns'], x['mask']),
        'theirs takes a mask and does not use it: padding is learned',
    ),
    'LogSigLoss far apart': (
        'far_chosen',
        lambda m, x: m.LogSigLoss()(x['far_chosen'], x['far_rejected']),
        'theirs is log(sigmoid(x)), which is log(0) below x = -104',
    ),
    'LogExpLoss far apart': (
        'far_chosen',
        lambda m, x: m.LogExpLoss()(x['far_chosen'], x['far_rejected']),
        'theirs is log(1 + exp(x)), which overflows above x = 89',
    ),
}
"""where a defect of theirs makes another number"""


def package(source: str, work: Path) -> Path:
    """The folder applications/ChatGPT, of a checkout or as it is."""
    inner = 'applications/ChatGPT' if source.startswith('git+') else '.'
    wanted = f'{inner}/chatgpt/models/loss.py'
    return checkout(source, work, wanted, commit=COMMIT, paths=['applications/ChatGPT']) / inner


def peer(source: Path) -> Any:
    """Its two files as one namespace."""
    folder = source / 'chatgpt' / 'models'
    package = ModuleType('colossalai_models')
    package.__path__ = [str(folder)]
    sys.modules['colossalai_models'] = package
    if importlib.util.find_spec('loralib') is None:
        sys.modules['loralib'] = ModuleType('loralib')
    found = ModuleType('peer')
    for part in ('utils', 'loss'):
        found.__dict__.update(vars(importlib.import_module(f'colossalai_models.{part}')))
    return found


def numbers(module: Any, x: dict[str, Tensor]) -> dict[str, dict[str, Any]]:
    """Of each case the value, and the gradient of its sum."""
    found = {}
    for name, (leaf, call, *_) in (CASES | DEFECTS).items():
        given = {key: value.clone() for key, value in x.items()}
        given[leaf].requires_grad_()
        value = call(module, given)
        (gradient,) = torch.autograd.grad(value.sum(), given[leaf])
        found[name] = {'value': value.detach().tolist(), 'gradient': gradient.tolist()}
    return found


def error(ours: Any, theirs: Any) -> float:
    """The largest difference, as a share of the largest number."""
    a, b = torch.tensor(ours, dtype=torch.float64), torch.tensor(theirs, dtype=torch.float64)
    return float((a - b).abs().max() / b.abs().max().clamp_min(1e-12))


def shown(value: Any) -> str:
    return f'{value:.6f}' if isinstance(value, float) else f'{len(value)} numbers'


def main() -> None:
    args = arguments(__doc__, help='the folder applications/ChatGPT of a checkout of ColossalAI, or git+https://...')
    work = args.work_dir
    if args.what == 'speed':
        worker = HERE / 'peers' / 'compat_colossalai_speed.py'
        theirs = ['env', f'COLOSSALAI_SOURCE={package(args.source, work)}', own_python('colossalai', work), worker]
        timed = partial(speed, SPEED, [sys.executable, worker], theirs, work, args.rounds)
        return write('speed', RESULTS, dict, timed)
    if args.source is not None:
        x, source = inputs(), package(args.source, work)
        content = {'inputs': {k: v.tolist() for k, v in x.items()}, 'theirs': numbers(peer(source), x)}
        text = json.dumps(content, indent=None).replace('Infinity', '"inf"').replace('NaN', '"nan"')
        GOLDEN.write_text(text + '\n')
        print(f'written to {GOLDEN}')
    golden = json.loads(GOLDEN.read_text())
    ours = numbers(importlib.import_module(OURS), {k: torch.tensor(v) for k, v in golden['inputs'].items()})
    print('| formula | theirs | ours | largest relative difference: value | gradient |\n|---|---|---|---|---|')
    for name in CASES:
        theirs = golden['theirs'][name]
        errors = [f'{error(ours[name][part], theirs[part]):.0e}' for part in ('value', 'gradient')]
        print(f'| `{name}` | {shown(theirs["value"])} | {shown(ours[name]["value"])} | {errors[0]} | {errors[1]} |')
    print('\n| formula | theirs | ours | why |\n|---|---|---|---|')
    for name, (_, _, why) in DEFECTS.items():
        value = golden['theirs'][name]['value']
        print(
            f'| `{name}` | {value if isinstance(value, str) else shown(value)} | {shown(ours[name]["value"])} | {why} |'
        )


if __name__ == '__main__':
    main()
