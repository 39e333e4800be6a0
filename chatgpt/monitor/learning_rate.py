"""A learning rate for a model's size: the default of runs, and what the doctor compares a run's rate with."""

from __future__ import annotations

import math

ANCHOR_LR, ANCHOR_PARAMETERS = 9e-6, 6e9
SHARES = {
    'sft': 1.0,
    'rm': 1.0,
    'ilql': 0.2,
    'ppo': 0.2,
    'orpo': 0.5,
    'dpo': 1 / 15,
    'simpo': 1 / 15,
    'kto': 1 / 15,
}
"""by the first part of the metrics' names; a critic of its own has that of a reward model"""
ADAPTER_FACTOR = 10.0


def recommended_lr(parameters: int, learning: str, trained: int | None = None, adapters: bool | None = None) -> float:
    """Returns a learning rate for AdamW, rounded to one digit and good to a factor of three: 9e-6 · (6e9 / N) ** 0.5,
    with N the trained parameters, or those of the whole model under adapters.

    Anchor: 9e-6 for a reward model of 6 billion parameters (Ouyang et al. 2022, appendix C). Slope: under Adam the best
    rate of hidden weights falls as 1 / width (Yang et al. 2022, "Tensor Programs V", table 3), and at a given depth the
    width grows as the square root of N. Policies that learn online take a fifth of it (arXiv 2403.17031, table of
    hyperparameters), preference losses a fifteenth (Rafailov et al. 2023, appendix B), ORPO half of it, for it has no
    reference (Hong et al. 2024), adapters of any rank ten times as much (Schulman 2025, "LoRA Without
    Regret").

    Args:
        parameters: of the whole model.
        learning: a key of `SHARES`.
        trained: those that are trained; None: all.
        adapters: True if these are adapters; None: if they are a twentieth of the model or fewer.
    """
    trained = parameters if trained is None else trained
    if adapters is None:
        adapters = trained * 20 <= parameters
    rate = ANCHOR_LR * math.sqrt(ANCHOR_PARAMETERS / (parameters if adapters else max(trained, 1))) * SHARES[learning]
    return float(f'{rate * (ADAPTER_FACTOR if adapters else 1.0):.0e}')
