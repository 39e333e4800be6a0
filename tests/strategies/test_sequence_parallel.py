"""Sequence parallelism on gloo: checks of the conformance suite, models of several families against one process,
refused models and settings."""

from __future__ import annotations

import re
from contextlib import nullcontext
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from chatgpt.batching import collate
from chatgpt.nn import Actor, Critic, RewardModel, actor, packing
from chatgpt.strategies import FSDPStrategy, NaiveStrategy, sequence_parallel
from chatgpt.strategies.registry import strategy_by_name
from chatgpt.strategies.sequence_parallel import SequenceGroup, check_sequences, copies_of_keys
from chatgpt.testing.conformance import BF16, FP32, run_conformance
from chatgpt.testing.processes import environment, run_distributed
from chatgpt.testing.tiny import tiny_sequences
from chatgpt.trainer import SFTTrainer
from chatgpt.types import Sequence

COMMON = {
    'vocab_size': 67,
    'hidden_size': 32,
    'intermediate_size': 64,
    'num_hidden_layers': 2,
    'num_attention_heads': 4,
    'num_key_value_heads': 2,  # of four processes two have the same
    'max_position_embeddings': 64,
    'initializer_range': 0.1,
    'pad_token_id': 0,
    'bos_token_id': 1,
    'eos_token_id': 2,
}
NO_DROPOUT = {'attn_pdrop': 0.0, 'embd_pdrop': 0.0, 'resid_pdrop': 0.0}
FAMILIES: dict[str, dict[str, Any]] = {
    'qwen3': {'head_dim': 16, 'tie_word_embeddings': True},
    'gpt_neox': {},
    'gpt2': {'n_embd': 32, 'n_layer': 2, 'n_head': 4, 'n_positions': 64, **NO_DROPOUT},
}
LLAMA_MODELS = ['actor', 'critic', 'reward', 'lora', 'hydra']


def language_model(family: str, **kw: Any) -> Any:
    torch.manual_seed(1)
    return AutoModelForCausalLM.from_config(
        AutoConfig.for_model(family, **{**COMMON, **FAMILIES.get(family, {}), **kw})
    )


def made(name: str) -> Any:
    model = language_model('llama' if name in LLAMA_MODELS else name)
    if name in ('critic', 'reward'):
        found: Any = (Critic if name == 'critic' else RewardModel)(model, nn.Linear(32, 1))
    else:
        unfrozen = 1 if name == 'hydra' else None
        found = Actor(model, 3 if name == 'lora' else 0, value_head=nn.Linear(32, 1), num_layers_unfrozen=unfrozen)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for key, parameter in found.named_parameters():
            if 'lora_B' in key or 'value_head' in key:  # these start at zero, or at random
                parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
    return found


def alike() -> list[Sequence]:
    """Returns three responses to one prompt of 20 tokens, whose states are computed once."""
    prompt = torch.arange(3, 23)
    responses = [torch.tensor(ids) for ids in ([5, 9, 2], [8, 2], [30, 31, 32, 2])]
    return [
        Sequence(prompt_ids=prompt, response_ids=ids, response_mask=torch.ones(len(ids), dtype=torch.bool))
        for ids in responses
    ]


def step(strategy: Any, model: Any) -> dict[str, Any]:
    """Returns losses, outputs, the gradient norm and gradients (from weights before and after a step of SGD) of four
    micro-batches: sequences of many lengths, a single one of odd length, equal prefixes, and a dummy batch."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1.0)
    model, optimizer = strategy.prepare((model, optimizer))
    before = {n: t.clone() for n, t in strategy.full_state_dict(model).items()}
    hydra = isinstance(model, Actor) and hasattr(model, 'ref_branch')
    numbers, loss_sum = [], torch.zeros(())
    batches = [tiny_sequences(6), tiny_sequences(1, seed=3), alike(), []]
    for number, records in enumerate(batches):
        own = records[strategy.rank :: strategy.world_size]
        batch = collate(own)
        with strategy.accumulate(model, last=number == len(batches) - 1):
            if isinstance(model, Actor):
                out = model(batch, temperature=0.9, with_entropy=True, with_reference=hydra)
                parts = [out.logprobs, out.entropy, out.values] + ([out.reference.logprobs] if hydra else [])
                loss = -(out.logprobs * batch.action_mask).sum() + 0.1 * out.entropy.sum() + out.values.square().sum()
            else:
                parts = [model(batch)]
                loss = parts[0].square().sum()
            loss = loss * bool(own)
            strategy.backward(loss, model, optimizer)
        loss_sum += loss.detach()
        numbers.append([part.detach() for part in parts])
    norm = strategy.optimizer_step(optimizer)
    after = strategy.full_state_dict(model)
    gradients = {n: before[n] - after[n] for n in before}
    return {'loss': float(strategy.all_reduce(loss_sum)), 'norm': norm, 'gradients': gradients, 'numbers': numbers}


def steps(names: list[str], options: dict[str, Any]) -> list[dict[str, Any]]:
    with FSDPStrategy(precision='fp32', device='cpu', **options) as strategy:
        return [step(strategy, made(name)) for name in names]


def check_step(got: dict[str, Any], want: dict[str, Any], name: str) -> None:
    assert got['loss'] == pytest.approx(want['loss'], rel=1e-5), name
    assert got['norm'] == pytest.approx(want['norm'], rel=1e-5), name
    for key, gradient in want['gradients'].items():
        scale = max(float(gradient.abs().max()), 1e-2)  # the gradient of a key's bias is 0 up to rounding
        assert float((got['gradients'][key] - gradient).abs().max()) < 2e-5 * scale, (name, key)


@pytest.mark.parametrize(
    ('names', 'world_size', 'options'),
    [
        (LLAMA_MODELS + list(FAMILIES), 2, {'sequence_parallel': 2}),
        (LLAMA_MODELS, 4, {'sequence_parallel': 4, 'activation_checkpointing': True}),
        (['actor'], 4, {'sequence_parallel': 2, 'replicas': 2}),
        (['actor'], 2, {'sequence_parallel': 2, 'cpu_offload': True}),
    ],
)
def test_models_compute_what_one_process_computes(names, world_size, options):
    ranks = run_distributed(steps, world_size, names, options)
    whole = world_size == options['sequence_parallel']  # each process has all sequences
    for number, name in enumerate(names):
        with NaiveStrategy(precision='fp32', device='cpu') as strategy:
            want = step(strategy, made(name))
        got = ranks[0][number]
        check_step(got, want, name)
        for rank in ranks if whole else ():
            for a, b in zip(rank[number]['numbers'], want['numbers'], strict=True):
                for x, y in zip(a, b, strict=True):
                    assert torch.allclose(x, y, rtol=1e-5, atol=2e-5), name
            for a, b in zip(rank[number]['numbers'], got['numbers'], strict=True):  # to the bit within a rank
                assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True)), name


def faults() -> dict[str, Any]:
    """Returns contexts with a fault each; the first has none."""
    group, gather, heads = SequenceGroup, sequence_parallel._Gather.backward, SequenceGroup.to_heads
    exchanged, run_trunk, head_outputs = group.exchanged, packing.run_trunk, actor.head_outputs

    def heads_of_others(self: Any, *given: Any) -> Any:
        query, key, value = heads(self, *given)
        return query.roll(1, 1), key, value

    def values_of_neighbours(self: Any, *given: Any) -> Any:
        query, key, value = heads(self, *given)
        return query, key, value.roll(1, 2)

    def from_zero(*given: Any, position_ids: Any, **more: Any) -> Any:
        return run_trunk(*given, position_ids=position_ids - position_ids[:, :1], **more)

    def ids_of_first(model: Any, batch: Any) -> Any:
        own = packing.own_actions(model, batch)
        return replace(own, action_ids=batch.action_ids[: len(own.action_ids)])

    def counted_twice(*given: Any) -> Any:
        values, logits = head_outputs(*given)
        return 2 * values - values.detach(), logits

    return {
        'none': nullcontext(),
        'parts in the order of other processes': patch.object(group, 'exchanged', lambda *x: exchanged(*x).flip(0)),
        'heads in another order': patch.object(group, 'to_heads', heads_of_others),
        'values of the token before, over the borders of sequences': patch.object(
            group, 'to_heads', values_of_neighbours
        ),
        'gradients of gathered states are a mean': patch.object(
            sequence_parallel._Gather, 'backward', staticmethod(lambda *x: (gather(*x)[0] / 2, None))
        ),
        'positions begin at 0 in every part': patch.object(packing, 'run_trunk', from_zero),
        'actions of the first part': patch.object(actor, 'own_actions', ids_of_first),
        'gradient of the value head counts twice': patch.object(actor, 'head_outputs', counted_twice),
    }


def planted() -> dict[str, Any]:
    found = {}
    for name, fault in faults().items():
        with fault, FSDPStrategy(precision='fp32', sequence_parallel=2, device='cpu') as strategy:
            found[name] = step(strategy, made('actor'))
    return found


def test_planted_faults_are_found():
    """The comparison of the test above fails for each of them."""
    with NaiveStrategy(precision='fp32', device='cpu') as strategy:
        want = step(strategy, made('actor'))
    found = run_distributed(planted, 2)[0]
    check_step(found.pop('none'), want, 'none')
    assert len(found) == 7
    for name, got in found.items():
        with pytest.raises(AssertionError, match=re.escape(name)):  # it is in every message
            check_step(got, want, name)


class LogProbs(Actor):
    """An actor with the interface of the suite's model."""

    def __init__(self) -> None:
        with torch.random.fork_rng(devices=[]):
            super().__init__(language_model('llama'))

    def forward(self, batch: Any) -> Any:  # type: ignore[override]
        return super().forward(batch).logprobs


def conform(folder: str) -> list[dict[str, str]]:
    return [
        run_conformance(
            lambda p=precision: FSDPStrategy(precision=p, sequence_parallel=2, device='cpu'),
            tolerance=tolerance,
            checks=['equals_naive', 'clipping', 'pieces', 'full_model'],
            folder=f'{folder}/{precision}',
            make_model=LogProbs,
        )
        for precision, tolerance in (('fp32', FP32), ('bf16', BF16))
    ]


def test_conformance(tmp_path):
    for precision in ('fp32', 'bf16'):
        (tmp_path / precision).mkdir()
    for results in run_distributed(conform, 2, str(tmp_path)):
        assert [set(found.values()) for found in results] == [{'passed'}] * 2, results


# ---------------------------------------------------------------- refused models and settings


def test_heads_that_cannot_be_dealt():
    assert [copies_of_keys(8, 4, size) for size in (1, 2, 4, 8)] == [1, 1, 1, 2]
    with pytest.raises(ValueError, match='sequence_parallel=3: 4 heads of queries and 2 .* choose one of 1, 2, 4'):
        check_sequences(made('actor'), 3)
    with pytest.raises(ValueError, match='choose one of 1, 2, 3, 6, 12'):  # 4 processes would halve a head of keys
        copies_of_keys(12, 6, 4)


def test_models_whose_rows_cannot_be_cut():
    windows = Actor(language_model('mistral', sliding_window=8))
    for model, message in (
        (Actor(language_model('bloom', n_head=4)), 'sequence_parallel: BloomForCausalLM does not run without padding'),
        (nn.Linear(2, 2), 'sequence_parallel: Linear does not run without padding'),
        (windows, 'sequence_parallel: MistralForCausalLM has sliding windows'),
    ):
        with pytest.raises(ValueError, match=message):
            check_sequences(model, 2)


def drops() -> str:
    with FSDPStrategy(precision='fp32', sequence_parallel=2, device='cpu') as strategy:
        model = Actor(language_model('gpt2', resid_pdrop=0.1))
        model, _ = strategy.prepare((model, torch.optim.SGD(model.parameters())))
        with pytest.raises(ValueError) as error:
            model.train()(collate(tiny_sequences(2)))
        return str(error.value)


def trains_with(dropout: float) -> str:
    """Returns the error of a trainer that is made with an actor in eval mode, '' if there is none."""
    with FSDPStrategy(precision='fp32', sequence_parallel=2, device='cpu') as strategy:
        model = Actor(language_model('gpt2', attn_pdrop=dropout)).eval()
        pair = strategy.prepare((model, torch.optim.SGD(model.parameters())))
        try:
            SFTTrainer(strategy, *pair, tiny_sequences(2), train_batch_size=2)
        except ValueError as error:
            return str(error)
        return ''


def test_dropout_is_refused():
    """By a trainer that learns with it before the first forward."""
    refused = 'sequence_parallel: gpt2 learns with dropout'
    assert run_distributed(drops, 2)[0].startswith(refused)
    assert run_distributed(trains_with, 2, 0.1)[0].startswith(refused)
    assert run_distributed(trains_with, 2, 0.0) == ['', '']


def test_settings_that_do_not_go_together():
    with pytest.raises(ValueError, match='tensor_parallel=2 does not go with sequence_parallel'):
        FSDPStrategy(tensor_parallel=2, sequence_parallel=2, device='cpu')
    with pytest.raises(ValueError, match='sequence_parallel=2 does not go with reproducible'):
        FSDPStrategy(sequence_parallel=2, reproducible='exact', device='cpu')
    with environment(WORLD_SIZE='3'), pytest.raises(ValueError, match='sequence_parallel=2: 3 processes .* 2 or 4'):
        FSDPStrategy(sequence_parallel=2, device='cpu')
    with pytest.raises(ValueError, match='NaiveStrategy takes no such option; use strategy fsdp'):
        strategy_by_name('naive', sequence_parallel=2)
