"""TRL's classic trainer on two processes, which equal one process with twice the batch_size."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from chatgpt.testing.fakes import char_tokenizer, tiny_causal_lm
from chatgpt.testing.processes import run_distributed
from chatgpt_compat.trl import AutoModelForCausalLMWithValueHead, PPOConfig, PPOTrainer

QUERIES = [[5, 9, 12], [8, 3], [21, 14, 6, 11], [4, 17, 30]]
RESPONSES = [[13, 25, 9, 6], [19, 22, 31, 7, 7, 12], [10, 3], [28, 16, 23, 5]]
SCORES = [1.0, -2.0, 0.5, 3.0]


def train(world_size: int) -> dict[str, Any]:
    """Takes two steps of SGD on this process's share of the batch."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = AutoModelForCausalLMWithValueHead.from_pretrained(tiny_causal_lm('gpt2'))
    config = PPOConfig(
        batch_size=4 // world_size,
        mini_batch_size=4 // world_size,
        ppo_epochs=2,
        init_kl_coef=0.3,
        target=0.5,
        horizon=20,
    )
    dataset = [{'query': str(i)} for i in range(9)]
    trainer = PPOTrainer(
        config,
        model,
        tiny_causal_lm('gpt2', seed=4),
        char_tokenizer(),
        dataset=dataset,
        data_collator=lambda rows: [row['query'] for row in rows],
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
    )
    accelerator = trainer.accelerator
    rank = accelerator.process_index
    share = slice(rank * config.batch_size, (rank + 1) * config.batch_size)
    for _ in range(2):
        stats = trainer.step(
            [torch.tensor(q) for q in QUERIES[share]],
            [torch.tensor(r) for r in RESPONSES[share]],
            [torch.tensor(s) for s in SCORES[share]],
        )
    with accelerator.main_process_first():
        pass
    mine = torch.tensor([float(rank)])
    responses = trainer.generate(
        [torch.tensor(q) for q in QUERIES[share]], return_prompt=False, do_sample=True, top_k=0, max_new_tokens=5
    )
    return {
        'weights': {name: tensor.tolist() for name, tensor in model.v_head.state_dict().items()}
        | {'ln_f': model.pretrained_model.transformer.ln_f.weight.tolist()},
        'stats': {k: v for k, v in stats.items() if isinstance(v, float) and not k.startswith('time/')},
        'kl_coef': trainer.kl_ctl.value,
        'batches': list(trainer.dataloader),
        'gathered': accelerator.gather(mine).tolist(),
        'sum': float(accelerator.reduce(mine + 1)),
        'main': accelerator.is_main_process,
        'sizes': (config.world_size, config.global_batch_size, trainer.is_distributed),
        'responses': [r.tolist() for r in responses],
    }


def test_two_processes_are_one_run() -> None:
    first, second = run_distributed(train, 2, 2)
    alone = train(1)
    assert first['weights'] == second['weights'] and first['stats'] == second['stats']
    for name, tensor in alone['weights'].items():
        torch.testing.assert_close(torch.tensor(first['weights'][name]), torch.tensor(tensor), rtol=1e-4, atol=1e-6)
    assert first['stats'] == pytest.approx(alone['stats'], rel=1e-4, abs=1e-6)
    assert first['kl_coef'] == second['kl_coef'] == pytest.approx(alone['kl_coef'])
    assert first['responses'] + second['responses'] == alone['responses']
    assert (first['gathered'], first['sum']) == ([0.0, 1.0], 3.0)
    assert first['main'] and not second['main']
    assert first['sizes'] == (2, 4, True) and alone['sizes'] == (1, 4, False)
    seen = [query for side in (first, second) for batch in side['batches'] for query in batch]
    assert len(seen) == len(set(seen)) == 8  # each row goes to one process; the last one is dropped
