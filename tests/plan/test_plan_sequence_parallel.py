"""Plans of FSDP2 with sequence parallelism: activations beside those of a process with whole rows, what is exchanged,
and 128k tokens of a model of 7B on 8 cards."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import MistralConfig

from chatgpt.plan import Setup, make_plan, models
from chatgpt.testing.fakes import tiny_config

CONFIG = tiny_config('llama', positions=4096, layers=3, heads=4)
SEVEN_B = MistralConfig(
    vocab_size=32768,
    hidden_size=4096,
    intermediate_size=14336,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    max_position_embeddings=1 << 17,
    sliding_window=None,
)


def setup_of(parts: int, config: Any = CONFIG, **options: Any) -> Setup:
    given = {'strategy': 'fsdp', 'num_processes': 4, 'strategy_options': {'sequence_parallel': parts}}
    return Setup(**(given | {'config': config, 'max_prompt_tokens': 1000, 'max_new_tokens': 1048} | options))


def test_activations_are_cut():
    sizes = {n: models.learning_bytes('actor', CONFIG, setup_of(n), 1, growing=0) for n in (1, 2, 4)}
    # in whole rows attention needs no copies; beyond these a process has half, and a quarter
    assert 0.4 < sizes[2] / sizes[1] < 0.75 and sizes[4] / sizes[2] < 0.7


def test_sequences_are_split_over_ranks_and_responses_over_processes():
    alone, together = (make_plan(setup_of(n, train_batch_size=8)) for n in (1, 4))
    assert (alone.setup.ranks, together.setup.ranks) == (4, 1)
    for name in ('actor weights', 'actor optimizer', 'actor gradients'):
        assert alone.phases['learn'].device[name] == together.phases['learn'].device[name]
    caches = [plan.phases['collect'].device['key/value cache'] for plan in (alone, together)]
    assert caches[0] == caches[1] > 0  # two responses on each of four processes
    assert '(1 x 4 sequence parallel)' in together.verdict()
    with pytest.raises(ValueError, match='sequence_parallel=3: 4 processes cannot be grouped'):
        setup_of(3)


@pytest.mark.parametrize(('parts', 'keys', 'passes'), [(2, 2, 2), (4, 4, 3)])
def test_exchanged_bytes(parts, keys, passes):
    """4 heads of queries and 2 of keys and values of 8 numbers each, in 3 layers, and states of 32 numbers, in bf16."""
    part = 2048 // parts
    numbers = 0
    for _ in range(3 * passes):  # queries, keys, values and outputs; all but the own share leave
        numbers += part * 8 * (4 + keys + keys + 4) * (parts - 1) // parts
    numbers += part * 32 * (parts - 1) * 2  # to each other process, and back
    setup = setup_of(parts, gradient_checkpointing=passes == 3)
    assert models.exchanged_bytes(CONFIG, setup) == 2 * numbers


def test_128k_tokens_of_a_7b_fit_8_cards():
    options = {'num_processes': 8, 'memory': 80 << 30, 'gradient_checkpointing': True, 'max_new_tokens': 130048}
    options |= {'max_prompt_tokens': 1024, 'max_tokens_per_batch': 1 << 17, 'task': 'sft'}
    plan = make_plan(setup_of(8, SEVEN_B, **options))
    # the numbers of docs/strategies/sequence_parallel.md
    assert plan.fits and plan.peak == pytest.approx(22.3 * 2**30, rel=0.05)
    assert plan.phases['learn'].device['activations'] == pytest.approx(8.39 * 2**30, rel=0.05)
    assert 'it sends 28.0 GiB per learned sequence' in plan.verdict()
