"""Plans of runs on a shared trunk: what is counted, what is advised, what cannot be."""

from __future__ import annotations

from dataclasses import replace

import pytest
from transformers import LlamaConfig

from chatgpt.plan import Setup, make_plan, models
from chatgpt.plan.advice import changes, cheapest_change

WIDTH, INNER, LAYERS, VOCAB, ROWS, PROMPT, NEW, RANK = 64, 256, 2, 512, 4, 32, 32, 8
CONFIG = LlamaConfig(
    hidden_size=WIDTH,
    intermediate_size=INNER,
    num_hidden_layers=LAYERS,
    num_attention_heads=4,
    num_key_value_heads=4,
    vocab_size=VOCAB,
    tie_word_embeddings=True,
)
COMMON = {
    'config': CONFIG,
    'reward_config': CONFIG,
    'lora_rank': RANK,
    'max_prompt_tokens': PROMPT,
    'max_new_tokens': NEW,
    'experience_batch_size': ROWS,
    'train_batch_size': ROWS,
    'max_tokens_per_batch': PROMPT + NEW,
}
SHARED = COMMON | {'shared_trunk': True, 'quantize': 'nf4'}
PER_BLOCK = 4 * WIDTH * WIDTH + 3 * WIDTH * INNER
ADAPTERS = LAYERS * RANK * (4 * 2 * WIDTH + 3 * (WIDTH + INNER))


def test_what_is_held_is_counted_by_hand(monkeypatch):
    monkeypatch.setattr(models, 'LEAST_PACKED', VOCAB * WIDTH)
    plan = make_plan(Setup(**SHARED, on_cuda=False))
    load, collect, learn = (plan.phases[name].device for name in ('load', 'collect', 'learn'))
    outside = VOCAB * WIDTH + (2 * LAYERS + 1) * WIDTH  # tied embedding, norms
    packed = LAYERS * PER_BLOCK
    assert load['trunk'] == pytest.approx(4 * outside + packed / 2 + packed / 64 + 4 * packed / (64 * 256), abs=2)
    for role, head in (('actor', 0), ('critic', WIDTH + 1), ('reward model', WIDTH + 1)):
        assert load[f'{role} weights'] == 4 * (ADAPTERS + head)
    # as the largest block is read, while its largest weight is packed; the roles come later
    on_roles, block = 3 * 4 * ADAPTERS + 2 * 4 * (WIDTH + 1), PER_BLOCK + 2 * WIDTH
    assert load['one dense block'] == max(4 * block + 9.5 * WIDTH * INNER - on_roles, 0) > 0
    alone = SHARED | {'lora_rank': 1, 'critic': 'none', 'reward_config': None}
    on_cuda = make_plan(Setup(**alone, on_cuda=True)).phases['load'].device
    assert on_cuda['one dense weight'] == (4 + 2) * WIDTH * INNER - 4 * ADAPTERS / RANK > 0  # weights come one by one
    assert 'one dense block' not in collect and 'one dense block' not in on_cuda
    assert collect['one dense weight'] == 4 * WIDTH * INNER * (1 + 2 / 64)  # and its scales, twice
    assert collect['packed weights'] == 4 * VOCAB * WIDTH  # the output head alone: adapters are not folded in
    assert collect['key/value cache'] == 4 * 2 * LAYERS * WIDTH * ROWS * (PROMPT + NEW - 1)
    assert learn['actor gradients'] == 4 * ADAPTERS and 'initial model' not in ''.join(learn)


def test_prompts_that_enter_together_are_counted():
    """Their activations grow with the rows: at least the inner states of the MLP, all of them in one forward."""
    few, many = (
        make_plan(Setup(**SHARED | {'experience_batch_size': rows}, on_cuda=False))
        .phases['collect']
        .device['activations']
        for rows in (ROWS, 4 * ROWS)
    )
    assert few >= 3 * 4 * ROWS * PROMPT * INNER
    assert many == pytest.approx(4 * few, rel=0.05)


def test_advice_for_a_shared_trunk_stays_on_it():
    setup = Setup(
        **COMMON | {'max_tokens_per_batch': None}, shared_trunk=True, on_cuda=True, precision='bf16', margin=0.0
    )
    listed = dict(changes(setup))
    assert all(changed.shared_trunk and changed.strategy == 'naive' for changed in listed.values())
    assert any('quantize=nf4' in text for text in listed) and any('adamw8bit' in text for text in listed)
    assert not any('offload' in text or 'critic' in text or 'strategy' in text for text in listed)
    small = next(changed for text, changed in listed.items() if text.endswith('quantize=nf4'))
    found = cheapest_change(replace(setup, memory=make_plan(small).peak))
    assert found is not None and found[0].endswith('quantize=nf4') and found[1].fits


def test_a_trunk_is_advised_where_separate_models_do_not_fit():
    setup = Setup(**COMMON | {'lora_rank': 0}, on_cuda=True, precision='bf16', margin=0.0, host_memory=1000)
    text, changed = next((t, c) for t, c in changes(setup) if 'shared_trunk' in t)
    assert 'lora_rank=16, shared_trunk, quantize=nf4 and a reward model that is an adapter' in text
    assert changed.shared_trunk and changed.quantize == 'nf4' and changed.lora_rank == 16
    assert make_plan(changed).peak < make_plan(setup).peak
    sft = Setup(config=CONFIG, task='sft', on_cuda=True, precision='bf16')
    assert any('lora_rank=16, quantize=nf4' in text and 'trunk' not in text for text, _ in changes(sft))
