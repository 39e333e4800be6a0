"""`VLLMEngine(adapters=True)`: adapters go to vLLM alone, and the base once."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from policies import GREEDY, OPTIONS, WARM, off, prompts

from chatgpt.nn import Actor
from chatgpt.rollout import VLLMEngine
from chatgpt.strategies import NaiveStrategy
from chatgpt.trainer.collect import Collector

pytest.importorskip('vllm', reason='vLLM has an environment of its own: make test-vllm')


def change(actor: Any, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in actor.named_parameters():
            if 'lora_B' in name:
                p.copy_(0.3 * torch.randn(p.shape, generator=generator))


@pytest.mark.parametrize('rank', [2, 16])
def test_tokens_are_the_policys_after_every_update_of_its_adapters(llama, tmp_path, rank, monkeypatch):
    model = llama(seed=1)
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(tmp_path)
    engine, calls = VLLMEngine(tmp_path, adapters=True, **OPTIONS), []
    with NaiveStrategy(device='cpu') as strategy:
        actor = strategy.prepare(Actor(model, lora_rank=rank))
        collector = Collector(strategy, engine, WARM, policy=partial(strategy.full_model, actor))
        seen = []
        for version in range(3):
            change(actor, version)
            greedy = collector.generate(prompts(), indices=range(5), sampling=GREEDY)
            drawn = collector.generate(prompts(), indices=range(5))
            monkeypatch.setattr(engine.llm, 'collective_rpc', calls.append)  # the base is not sent again
            with strategy.full_model(actor) as full:
                assert off(greedy + drawn, full.model) < 1e-4 and engine.difference < 1e-4
            seen.append([s.response_ids.tolist() for s in greedy])
        with torch.no_grad():
            actor.model.lm_head.weight.add_(torch.randn(actor.model.lm_head.weight.shape))
        monkeypatch.undo()
        with pytest.raises(RuntimeError, match='weights'):  # the base changed, and vLLM has the former one
            collector.generate(prompts(), indices=range(5))
    assert seen[0] != seen[1] != seen[2] and not calls


def test_a_policy_without_adapters_is_refused(llama, tmp_path):
    model = llama()
    with NaiveStrategy(device='cpu') as strategy:
        engine = VLLMEngine(tmp_path, adapters=True, **OPTIONS)
        collector = Collector(
            strategy, engine, WARM, policy=partial(strategy.full_model, strategy.prepare(Actor(model)))
        )
        with pytest.raises(ValueError, match='needs LoRA adapters of rank 1 to 512'):
            collector.generate(prompts(), indices=range(5))
