"""Learning rates by model size: the default of runs, and the doctor's reference."""

from __future__ import annotations

import math

ANCHOR_LR, ANCHOR_PARAMETERS = 9e-6, 6e9
SHARES = {
    'sft': 1.0,
    'rm': 1.0,
    'critic': 1.0,
    'ilql': 0.2,
    'ppo': 0.2,
    'orpo': 0.5,
    'dpo': 1 / 15,
    'simpo': 1 / 15,
    'kto': 1 / 15,
}
"""factor of the learning rate by the prefix of a method's metrics; a separate critic has that of a reward model"""
ADAPTER_FACTOR = 10.0
BATCHES = {'dpo': 64, 'simpo': 64, 'kto': 64}
"""train batch size of the published rate, for methods whose rate depends on it"""


def recommended_lr(
    parameters: int,
    learning: str,
    trained: int | None = None,
    adapters: bool | None = None,
    batch: int | None = None,
) -> float:
    """Returns a learning rate for AdamW, 9e-6 · (6e9 / N) ** 0.5 times a factor, rounded to one digit and accurate to a
    factor of three. N is the number of trained parameters, with adapters of all parameters.

    Anchor: 9e-6 for a reward model of 6 billion parameters (Ouyang et al. 2022, appendix C). Slope: under Adam the best
    rate of hidden weights falls as 1 / width (Yang et al. 2022, "Tensor Programs V", table 3), and at a given depth the
    width grows as the square root of N. Factors: 1/5 for policies that learn online (arXiv 2403.17031, table of
    hyperparameters), 1/15 for preference losses with batches of 64 (Rafailov et al. 2023, appendix B), 1/2 for ORPO,
    which has no reference (Hong et al. 2024), 10 for adapters of any rank (Schulman 2025, "LoRA Without Regret").
    Preference losses with other batches: the square root of their size (Malladi et al. 2022, "On the SDEs and scaling
    rules for adaptive gradient algorithms").

    Args:
        parameters: number of all parameters.
        learning: key of `SHARES`.
        trained: number of trained parameters; None: all.
        adapters: True if the trained parameters are adapters; None: if they are at most a twentieth of all.
        batch: train batch size of a preference loss; None: 64.
    """
    trained = parameters if trained is None else trained
    if adapters is None:
        adapters = trained * 20 <= parameters
    rate = ANCHOR_LR * math.sqrt(ANCHOR_PARAMETERS / (parameters if adapters else max(trained, 1))) * SHARES[learning]
    if batch and learning in BATCHES:
        rate *= math.sqrt(batch / BATCHES[learning])
    return float(f'{rate * (ADAPTER_FACTOR if adapters else 1.0):.0e}')
