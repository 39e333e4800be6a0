"""llm-on-ray's reward loss beside ours, on the same scores; CPU seconds of reward-model training side by side.

    git clone https://github.com/intel/llm-on-ray && git -C llm-on-ray checkout 94080a4
    python compat/benchmarks/compat_llm_on_ray.py --source llm-on-ray
    python compat/benchmarks/compat_llm_on_ray.py            # the committed numbers beside ours
    python compat/benchmarks/compat_llm_on_ray.py speed --source git+https://github.com/intel/llm-on-ray

With --source the method `RMTrainer.compute_loss` of its file llm_on_ray/common/trainer/rm_trainer.py is executed alone, as
it is, and what it gives is written to compat/tests/llm_on_ray/llm_on_ray_numbers.json with the inputs.

Speed: the reward trainers of both (`peers/compat_llm_on_ray_speed.py`) on the same model and pairs, updates in turns,
A B A B. The environment of its side is made on first use, with the transformers of its own pyproject.toml.
"""

from __future__ import annotations

import ast
import json
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from chatgpt.functional.losses import pairwise_log_sigmoid_loss

HERE = Path(__file__).resolve().parent
CORE = HERE.parents[1] / 'benchmarks'
sys.path[:0] = [str(HERE / 'peers'), str(CORE), str(CORE / 'peers')]

from compat_page import arguments, checkout, speed, write  # noqa: E402
from vs_peers import ENVIRONMENTS, own_python  # noqa: E402
from work import Case  # noqa: E402

GOLDEN = HERE.parent / 'tests' / 'llm_on_ray' / 'llm_on_ray_numbers.json'
FILE = 'llm_on_ray/common/trainer/rm_trainer.py'
RESULTS = HERE / 'results' / 'compat_llm_on_ray.json'
COMMIT = '94080a4'
ENVIRONMENTS['llm_on_ray'] = [
    'transformers==4.38.1',
    'accelerate==0.27.2',
    'datasets==2.18.0',
    'pyarrow==16.1.0',
    'tensorboard==2.16.2',
    'numpy<2',
]


def inputs() -> dict[str, dict[str, Tensor]]:
    """Two pairs of answers of five tokens, with a score at each token: as (B, S, 1), chosen and rejected."""
    generator = torch.Generator().manual_seed(7)
    chosen = torch.tensor([[5, 6, 7, 8, 9], [4, 4, 4, 4, 4]])
    last, several = chosen.clone(), chosen.clone()
    last[:, 4] += 1
    several[:, 2:] += 1
    scores = {name: torch.randn(2, 5, 1, generator=generator) for name in ('chosen_scores', 'rejected_scores')}
    return {
        'they differ in the last token': {'chosen': chosen, 'rejected': last, **scores},
        'they differ in three tokens': {'chosen': chosen, 'rejected': several, **scores},
    }


def theirs(source: Path, x: dict[str, Tensor]) -> dict[str, Any]:
    path = source / FILE
    method = next(
        n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.FunctionDef) and n.name == 'compute_loss'
    )
    names: dict[str, Any] = {'torch': torch}
    exec(compile(ast.Module([method], []), str(path), 'exec'), names)
    scores = torch.stack([x['chosen_scores'], x['rejected_scores']], dim=1)[..., 0].unsqueeze(-1).requires_grad_()

    class Model:
        device = torch.device('cpu')

        def __call__(self, *ids: Tensor) -> Tensor:
            return scores

    batch = {f'{k}_{part}': v for k in ('chosen', 'rejected') for part, v in _parts(x[k]).items()}
    loss = names['compute_loss'](SimpleNamespace(model=Model()), batch)
    (gradient,) = torch.autograd.grad(loss, scores)
    return {'loss': float(loss.detach()), 'gradient': gradient[:, 0, :, 0].tolist()}


def _parts(ids: Tensor) -> dict[str, Tensor]:
    return {'input_ids': ids, 'attention_mask': torch.ones_like(ids)}


def ours(x: dict[str, Tensor]) -> dict[str, Any]:
    """The scores at the last token, as `chatgpt.nn.RewardModel` reads them; the gradient at each token of the chosen."""
    scores = x['chosen_scores'].clone().requires_grad_()
    loss = pairwise_log_sigmoid_loss(scores[:, -1, 0], x['rejected_scores'][:, -1, 0]).mean()
    (gradient,) = torch.autograd.grad(loss, scores)
    return {'loss': float(loss.detach()), 'gradient': gradient[..., 0].tolist()}


def main() -> None:
    args = arguments(__doc__, help='a checkout of llm-on-ray, or git+https://...')
    work = args.work_dir
    if args.source is not None:
        source = checkout(args.source, work, FILE, commit=COMMIT, paths=['llm_on_ray'])
    if args.what == 'speed':
        worker = HERE / 'peers' / 'compat_llm_on_ray_speed.py'
        peer = ['env', f'LLM_ON_RAY_SOURCE={source}', own_python('llm_on_ray', work), worker]
        cases = [Case('llm_on_ray', 'reward model', 'fixed', 'fp32')]
        return write('speed', RESULTS, dict, partial(speed, cases, [sys.executable, worker], peer, work, args.rounds))
    if args.source is not None:
        content = {
            name: {'inputs': {k: v.tolist() for k, v in x.items()}, 'theirs': theirs(source, x)}
            for name, x in inputs().items()
        }
        GOLDEN.write_text(json.dumps(content) + '\n')
        print(f'written to {GOLDEN}')
    print('| two answers | their loss | ours |\n|---|---|---|')
    for name, case in json.loads(GOLDEN.read_text()).items():
        found = ours({k: torch.tensor(v) for k, v in case['inputs'].items()})
        print(f'| {name} | {case["theirs"]["loss"]:.6f} | {found["loss"]:.6f} |')


if __name__ == '__main__':
    main()
