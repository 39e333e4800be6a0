"""A last step that learns from next to nothing is named."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from chatgpt.launch.recipes import short_step
from chatgpt.launch.runs import PPORun, SFTRun


@pytest.mark.parametrize(
    ('count', 'size', 'rest'),
    [
        (25, 8, 1),
        (26, 8, 2),
        (27, 8, None),
        (24, 8, None),
        (5, 4, 1),
        (3, 2, None),
        (1, 8, None),
        (7, 8, None),
        (9, 1, None),
    ],
)
def test_records(count, size, rest):
    text = short_step(SFTRun(train_batch_size=size), SimpleNamespace(train_data=[0] * count))
    if rest is None:
        assert text is None
    else:
        assert text == (
            f'{count} records in batches of train_batch_size={size}: the last step of each pass learns from {rest} '
            f'alone, and counts as much as one of {size}'
        )


def test_samples_of_ppo():
    run = PPORun(update_timesteps=3, experience_batch_size=3, train_batch_size=8)
    assert '9 samples of a learning phase in batches of train_batch_size=8' in (short_step(run, None) or '')
    run.buffer_limit = 8
    assert short_step(run, None) is None
    assert short_step(PPORun(), None) is None  # the defaults
