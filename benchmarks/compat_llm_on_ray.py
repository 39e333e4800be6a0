"""llm-on-ray's reward loss beside ours, on the same scores.

    git clone https://github.com/intel/llm-on-ray && git -C llm-on-ray checkout 94080a4
    python benchmarks/compat_llm_on_ray.py --source llm-on-ray
    python benchmarks/compat_llm_on_ray.py            # the committed numbers beside ours

With --source the method `RMTrainer.compute_loss` of its file llm_on_ray/common/trainer/rm_trainer.py is executed alone, as
it is, and what it gives is written to tests/compat/llm_on_ray/llm_on_ray_numbers.json with the inputs.
"""

from __future__ import annotations

import argparse
import ast
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from chatgpt.functional.losses import pairwise_log_sigmoid_loss

GOLDEN = Path(__file__).resolve().parents[1] / 'tests' / 'compat' / 'llm_on_ray' / 'llm_on_ray_numbers.json'
FILE = 'llm_on_ray/common/trainer/rm_trainer.py'


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
    if not path.is_file():
        raise SystemExit(f'error: {path} is not there; --source is a checkout of llm-on-ray')
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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--source', type=Path, help='a checkout of llm-on-ray')
    args = parser.parse_args()
    if args.source is not None:
        content = {
            name: {'inputs': {k: v.tolist() for k, v in x.items()}, 'theirs': theirs(args.source, x)}
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
