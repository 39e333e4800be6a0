"""One vLLM over two training processes, with half of the model in each."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from policies import GREEDY, OPTIONS, WARM, off, prompts, update

from chatgpt.nn import Actor
from chatgpt.rollout import Call, LocalEngine, NeighboursEngine, VLLMEngine
from chatgpt.strategies import DDPStrategy
from chatgpt.testing import tiny_causal_lm
from chatgpt.testing.processes import run_distributed
from chatgpt.trainer.collect import Collector

pytest.importorskip('vllm', reason='vLLM has an environment of its own: make test-vllm')


def model_with_four_heads() -> Any:
    return tiny_causal_lm('llama', hidden=128, heads=4, initializer_range=0.2)


def generate_on_rank(folder: str) -> list[dict[str, Any]]:
    os.environ['VLLM_LOGGING_LEVEL'] = 'ERROR'
    found = []
    with DDPStrategy(seed=3, device='cpu') as strategy:
        vllm = VLLMEngine(folder, tensor_parallel_size=2, **OPTIONS)
        engine = NeighboursEngine(strategy, vllm, 2)
        actor = strategy.prepare(Actor(model_with_four_heads()))
        model = strategy.unwrap(actor).model
        mine = slice(0, 3) if strategy.rank == 0 else slice(3, 5)
        own, indices = prompts()[mine], range(5)[mine]
        for version in range(2):
            collector = [
                Collector(strategy, engine, sampling, policy=partial(strategy.full_model, actor))
                for sampling in (GREEDY, WARM)
            ]
            greedy, drawn = (each.generate(own, indices=indices) for each in collector)
            local = LocalEngine()
            local.begin(strategy.unwrap(actor))
            expected = local.generate(Call.of(own, GREEDY, seed=3, indices=indices))
            local.end()
            found.append(
                {
                    'greedy': [s.response_ids.tolist() for s in greedy],
                    'expected': [s.response_ids.tolist() for s in expected],
                    'drawn': [(s.index, s.prompt_text) for s in drawn],
                    'off': max(off(drawn, model), off(greedy, model)),
                    'difference': vllm.difference,
                    'heads': vllm.llm.apply_model(heads_of)[0],
                }
            )
            update(model, version)
    return found


def heads_of(model: Any) -> list[int]:
    return [module.num_heads for module in model.modules() if hasattr(module, 'total_num_heads')]


def test_each_rank_gets_its_own_samples_of_the_policy_after_every_update(tmp_path: Path):
    model = model_with_four_heads()
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(tmp_path)
    ranks = run_distributed(generate_on_rank, 2, str(tmp_path), fresh=True)
    for rank, indices in enumerate(([0, 1, 2], [3, 4])):
        for found in ranks[rank]:
            assert found['greedy'] == found['expected'] and found['off'] < 1e-4 and found['difference'] < 1e-4
            assert found['drawn'] == [(i, prompts()[i].text) for i in indices]
            assert found['heads'] and set(found['heads']) == {2}  # of four: each process has half of them
    assert ranks[0][0]['greedy'] != ranks[0][1]['greedy']
