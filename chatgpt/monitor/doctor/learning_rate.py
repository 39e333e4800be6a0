"""A learning rate to begin with, from the number of parameters.

    lr(N) = 9e-6 · (6e9 / N) ** 0.5

Anchor: 9e-6 for a reward model of 6 billion parameters (Ouyang et al. 2022, appendix C). Slope: under Adam the best
rate of hidden weights goes as 1 / width (Yang et al. 2022, "Tensor Programs V", table 3), and at a given depth the
width goes as the square root of N. For 260 thousand parameters it gives 1.4e-3, where this package's benchmarks were
tuned to 1e-3.

Policies that are learned online take a fifth of it (3e-6 for 1 billion in arXiv 2403.17031, table of hyperparameters;
3e-4 for 0.2 million in examples/demo.py), preference losses a fifteenth (1e-6 for 2.8 billion in Rafailov et al. 2023,
appendix B; 1e-4 for 0.2 million in benchmarks/preference.py). Adapters take ten times as much as whole weights
(Schulman 2025, "LoRA Without Regret"). It is a place to begin, good to a factor of three.
"""

from __future__ import annotations

import math

ANCHOR_LR, ANCHOR_PARAMETERS = 9e-6, 6e9
SHARES = {'sft': 1.0, 'rm': 1.0, 'ilql': 0.2, 'ppo': 0.2, 'dpo': 1 / 15, 'orpo': 1 / 15, 'simpo': 1 / 15, 'kto': 1 / 15}
"""by the first part of the metrics' names"""
ADAPTER_FACTOR = 10.0


def recommended_lr(parameters: int, learning: str, trained: int | None = None) -> float:
    """To begin with, rounded to one digit.

    Args:
        parameters: of the whole model.
        learning: 'sft', 'rm', 'ppo', 'dpo', ...
        trained: those of them that are trained; a twentieth or fewer count as adapters.
    """
    rate = ANCHOR_LR * math.sqrt(ANCHOR_PARAMETERS / parameters) * SHARES[learning]
    if trained is not None and trained * 20 <= parameters:
        rate *= ADAPTER_FACTOR
    return float(f'{rate:.0e}')
