"""Example reward functions of prompts and responses: `--reward_fn examples/rewards.py:joy`."""

from __future__ import annotations

import re

JOY = {'happy', 'joy', 'fun', 'glad', 'smile', 'smiled', 'laugh', 'laughed', 'love', 'loved'}


def joy(prompts: list[str], responses: list[str]) -> list[float]:
    """Returns the number of words of joy in each response."""
    return [float(sum(word in JOY for word in re.findall('[a-z]+', response.lower()))) for response in responses]


def short(prompts: list[str], responses: list[str]) -> list[float]:
    """Returns 1 for an empty response, 0.01 less per character."""
    return [1.0 - 0.01 * len(response) for response in responses]
