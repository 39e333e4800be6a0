"""`deterministic=True`: what of torch it sets, and two runs of a model with attention. What it changes on a GPU has not
run on one."""

from __future__ import annotations

import os

import pytest
import torch
from torch.nn.functional import cross_entropy
from torch.optim import AdamW

from chatgpt.launch.arguments import strategy_of
from chatgpt.launch.runs import SFTRun
from chatgpt.strategies import DDPStrategy, NaiveStrategy
from chatgpt.strategies.registry import STRATEGIES, StrategyEntry, strategy_by_name
from chatgpt.testing import tiny_causal_lm


def state() -> tuple[bool, ...]:
    return (
        torch.are_deterministic_algorithms_enabled(),
        torch.backends.cudnn.deterministic,
        torch.backends.cuda.cudnn_sdp_enabled(),
        torch.backends.cuda.mem_efficient_sdp_enabled(),
        torch.backends.cuda.flash_sdp_enabled(),
        torch.backends.cuda.math_sdp_enabled(),
    )


USUAL, CHOSEN = (False, False, True, True, True, True), (True, True, False, False, True, True)


def trained() -> list[torch.Tensor]:
    """Three steps of a GPT-2 with torch's attention and dropout."""
    with NaiveStrategy(seed=3, device='cpu', deterministic=True) as strategy:
        assert state() == CHOSEN
        model = tiny_causal_lm('gpt2')
        assert model.config._attn_implementation == 'sdpa'
        model.train()
        model, optimizer = strategy.prepare((model, AdamW(model.parameters(), lr=1e-2)))
        ids = torch.arange(3, 27).view(2, 12)
        for _ in range(3):
            logits = model(ids).logits[:, :-1]
            strategy.backward(cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()), model, optimizer)
            strategy.optimizer_step(optimizer)
        return [p.detach().clone() for p in model.parameters()]


def test_two_runs_are_equal_and_torch_is_as_before(monkeypatch):
    monkeypatch.delenv('CUBLAS_WORKSPACE_CONFIG', raising=False)
    assert state() == USUAL
    one = trained()
    assert state() == USUAL
    assert all(torch.equal(a, b) for a, b in zip(one, trained(), strict=True))
    assert any(not torch.equal(a, b) for a, b in zip(one, tiny_causal_lm('gpt2').parameters(), strict=True))


def test_by_name_and_from_a_setting_and_the_users_own_workspace_stays(monkeypatch):
    monkeypatch.setenv('CUBLAS_WORKSPACE_CONFIG', ':16:8')
    with strategy_by_name('naive', deterministic=True):
        assert state() == CHOSEN
        assert os.environ['CUBLAS_WORKSPACE_CONFIG'] == ':16:8'
    with strategy_of(SFTRun(deterministic=True)):
        assert state() == CHOSEN
    with strategy_of(SFTRun()):
        assert state() == USUAL


def test_a_strategy_that_knows_nothing_of_it_is_named(monkeypatch):
    class Old(DDPStrategy):
        def __init__(self, seed=42, precision='fp32') -> None:
            super().__init__(seed, precision)

    monkeypatch.setitem(STRATEGIES, 'old', StrategyEntry(Old))
    with pytest.raises(ValueError, match='deterministic: Old takes no such option; leave it out'):
        strategy_by_name('old', deterministic=True)
