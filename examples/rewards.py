"""Reward functions to try: `--reward_fn examples/rewards.py:joy`. A reward is any function of prompts and responses."""

from __future__ import annotations

import re

JOY = {'happy', 'joy', 'fun', 'glad', 'smile', 'smiled', 'laugh', 'laughed', 'love', 'loved'}


def joy(prompts: list[str], responses: list[str]) -> list[float]:
    """Words of joy in each response."""
    return [float(sum(word in JOY for word in re.findall('[a-z]+', response.lower()))) for response in responses]


def short(prompts: list[str], responses: list[str]) -> list[float]:
    """1 for an empty response, falling by 0.01 a character."""
    return [1.0 - 0.01 * len(response) for response in responses]
