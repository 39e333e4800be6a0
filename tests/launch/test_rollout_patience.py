"""A run's rollout actors are waited for as long as its ranks would be, not for ever."""

from __future__ import annotations

import pytest

from chatgpt.launch.rollouts import rollout_engine
from chatgpt.launch.runs import PPORun


def test_an_actor_is_given_up_before_the_other_ranks_give_up_its_own():
    pytest.importorskip('ray')
    with rollout_engine(PPORun(rollout_workers=2, rank_timeout_s=100.0)) as engine:
        assert engine.workers.timeout_s == pytest.approx(80.0)
