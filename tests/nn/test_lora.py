"""LoRA: the formula, conversion, exact merging and unmerging, switches, state dicts, errors."""

from __future__ import annotations

import copy
import pickle
from itertools import product

import loralib
import pytest
import torch
from model_cases import SIZES, disturb, logits, model_of, same
from torch import Tensor, nn
from transformers import FalconConfig, Qwen2MoeConfig
from transformers.pytorch_utils import Conv1D

from chatgpt.nn import lora
from chatgpt.testing.fakes import FAMILIES, tiny_causal_lm


def adapted(family: str = 'gpt2', rank: int = 2, **kw: object) -> nn.Module:
    model = tiny_causal_lm(family, hidden=16)
    lora.convert_to_lora(model, rank, **kw)  # type: ignore[arg-type]
    disturb(model)
    return model


def bits(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


class Toy(nn.Module):
    """One block with a Linear and a Conv1D, as in Llama and GPT-2."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(3, 4), Conv1D(5, 4))])
        self.to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks[0](x)


@pytest.mark.parametrize('index', [0, 1])
def test_layer_computes_the_formula(index: int) -> None:
    toy = Toy()
    lora.convert_to_lora(toy, 2, alpha=6)
    disturb(toy)
    layer = toy.blocks[0][index]
    x = torch.randn(2, layer.in_features, dtype=torch.float64)

    def by_hand(scaling: float) -> Tensor:
        out = layer.bias.detach().repeat(2, 1)
        for row, o, i in product(range(2), range(layer.out_features), range(layer.in_features)):
            low_rank = sum(layer.lora_B[o, r].item() * layer.lora_A[r, i].item() for r in range(2))
            weight = layer.weight[i, o] if index == 1 else layer.weight[o, i]
            out[row, o] += (weight.item() + scaling * low_rank) * x[row, i].item()
        return out

    torch.testing.assert_close(layer(x), by_hand(6 / 2), rtol=1e-12, atol=1e-12)
    assert not torch.allclose(layer(x), by_hand(-6 / 2), atol=1e-3)
    assert not torch.allclose(layer(x), by_hand(6), atol=1e-3)


@pytest.mark.parametrize('family', FAMILIES)
def test_conversion_adapts_all_linear_layers_of_blocks_and_changes_no_output(family: str) -> None:
    model = tiny_causal_lm(family, hidden=16)
    linear = {n for n, m in model.named_modules() if isinstance(m, (nn.Linear, Conv1D))}
    before, names, parameters = logits(model), list(model.state_dict()), dict(model.named_parameters())
    lora.convert_to_lora(model, 2)
    assert set(lora.lora_layers(model)) == linear - {'lm_head'} and len(linear) > 8
    assert torch.equal(logits(model), before)
    assert [n for n in model.state_dict() if 'lora_' not in n] == names
    assert all(p is parameters[n] for n, p in model.named_parameters() if 'lora_' not in n)
    assert all(isinstance(layer, loralib.LoRALayer) for layer in lora.lora_layers(model).values())
    disturb(model)
    assert not torch.allclose(logits(model), before, atol=1e-3)


@pytest.mark.parametrize(
    ('targets', 'count'),
    [('c_attn', 2), ('*.attn.*', 4), (r'transformer\.h\.1\..*', 4), ('transformer.h.0.mlp.c_fc', 1)]
    + [(['c_fc', 'c_attn'], 4), ('lm_head', 1), (('c_attn', '*.c_attn'), 2)],
)
def test_target_patterns(targets: object, count: int) -> None:
    model = tiny_causal_lm('gpt2', hidden=16, tie_word_embeddings=False)
    lora.convert_to_lora(model, 2, targets=targets)  # type: ignore[arg-type]
    assert len(lora.lora_layers(model)) == count


def test_bias_modes_decide_what_is_trained() -> None:
    adapters = {f'{n}.{ab}' for n in lora.lora_layers(adapted()) for ab in ('lora_A', 'lora_B')}
    for mode, extra in (
        ('none', lambda name: False),
        ('all', lambda name: name.endswith('.bias')),
        ('lora_only', lambda name: name.endswith('.bias') and '.ln_' not in name),
    ):
        model = tiny_causal_lm('gpt2', hidden=16)
        value_head = nn.Linear(16, 1)
        lora.convert_to_lora(model, 2, bias=mode)  # type: ignore[arg-type]
        trained = {n for n, p in model.named_parameters() if p.requires_grad}
        assert trained == adapters | {n for n, _ in model.named_parameters() if extra(n)}
        assert set(lora.lora_state_dict(model)) == trained
        assert all(p.requires_grad for p in value_head.parameters())


@pytest.mark.parametrize(
    ('kw', 'message'),
    [
        ({'rank': 0}, 'positive integer'),
        ({'rank': True}, 'positive integer'),
        ({'rank': 17}, 'at most 16'),
        ({'rank': 2, 'alpha': 0}, 'alpha'),
        ({'rank': 2, 'dropout': 1.0}, r'\[0, 1\)'),
        ({'rank': 2, 'bias': 'some'}, 'lora_only'),
        ({'rank': 2, 'targets': 'q_proj'}, "'q_proj' matches no linear layer"),
        ({'rank': 2, 'targets': ['c_attn', '*.attn']}, r"'\*.attn' matches no linear layer"),
        ({'rank': 2, 'targets': []}, 'empty list'),
        ({'rank': 2, 'targets': 'lm_head'}, 'of GPT2LMHeadModel shares its weight with transformer.wte'),
    ],
)
def test_mistakes_are_refused_before_anything_changes(kw: dict, message: str) -> None:
    model = tiny_causal_lm('gpt2', hidden=16)
    with pytest.raises(ValueError, match=message):
        lora.convert_to_lora(model, **kw)
    assert not lora.has_lora(model)
    assert all(p.requires_grad for p in model.parameters())


def test_second_conversion_and_missing_adapters_are_refused() -> None:
    with pytest.raises(ValueError, match='already has adapters'):
        lora.convert_to_lora(adapted(), 2)
    plain = tiny_causal_lm('gpt2', hidden=16)
    for use in (lora.merge_lora, lora.unmerge_lora, lora.lora_state_dict, lora.merged_state_dict):
        with pytest.raises(ValueError, match='no adapters'):
            use(plain)
    with pytest.raises(ValueError, match='no transformer blocks'):
        lora.convert_to_lora(nn.Sequential(nn.Linear(4, 4)), 2)


def test_dropout_works_on_the_adapter_path_and_only_in_training() -> None:
    toy = Toy(torch.float32)
    lora.convert_to_lora(toy, 2, dropout=0.5)
    x = torch.randn(64, 3)
    assert torch.equal(toy.train()(x), toy.eval()(x))  # B is zero: the base path has no dropout
    disturb(toy)
    assert torch.equal(toy(x), toy(x))
    toy.train()
    assert not torch.equal(toy(x), toy(x))
    with lora.adapter_disabled(toy):
        assert torch.equal(toy(x), toy(x))


def test_deepcopy_and_pickle_are_independent_copies() -> None:
    model = adapted()
    before, own = logits(model), bits(model)
    for duplicate in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(logits(duplicate), before)
        disturb(duplicate)
        assert torch.equal(logits(model), before) and not torch.equal(logits(duplicate), before)
    lora.merge_lora(model)
    duplicate = copy.deepcopy(model)
    lora.unmerge_lora(duplicate)
    assert same(bits(duplicate), own) and not same(bits(model), own)


@pytest.mark.parametrize(
    ('family', 'dtype'), [('gpt2', torch.float32), ('llama', torch.bfloat16), ('gpt2', torch.float16)]
)
def test_unmerge_restores_the_saved_bits(family: str, dtype: torch.dtype) -> None:
    model = adapted(family).to(dtype)
    before = bits(model)
    lora.merge_lora(model)
    lora.merge_lora(model.train())
    folded = bits(model)
    name, layer = next(iter(lora.lora_layers(model).items()))
    assert layer.merged
    base, a, b = (before[f'{name}.{x}'].double() for x in ('weight', 'lora_A', 'lora_B'))
    expected = base + ((b @ a).T if family == 'gpt2' else b @ a)
    tolerance = {torch.float32: 1e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}[dtype]
    torch.testing.assert_close(folded[f'{name}.weight'].double(), expected, rtol=tolerance, atol=tolerance / 100)
    # Subtracting the adapter again does not restore the weight exactly.
    delta = (expected - base).to(dtype)
    assert not torch.equal(folded[f'{name}.weight'] - delta, before[f'{name}.weight'])
    lora.unmerge_lora(model)
    lora.unmerge_lora(model.eval())
    assert same(bits(model), before)


def test_merged_forward_agrees_and_leaves_no_trace() -> None:
    model = adapted(alpha=8)
    plain, before = logits(model), bits(model)
    fresh, state = tiny_causal_lm('gpt2', seed=1, hidden=16), lora.merged_state_dict(model)
    assert list(state) == list(fresh.state_dict())
    fresh.load_state_dict(state)
    with lora.merged(model):
        for one in (model, fresh):
            torch.testing.assert_close(logits(one), plain, rtol=1e-4, atol=1e-5)
        with lora.merged(model):
            assert same(lora.merged_state_dict(model), state)
        assert all(layer.merged for layer in lora.lora_layers(model).values())
    assert torch.equal(logits(model), plain)
    assert same(bits(model), before)
    with pytest.raises(KeyError), lora.merged(model):
        raise KeyError
    assert same(bits(model), before)


def test_state_dict_of_a_folded_model_holds_the_base_weights() -> None:
    model = adapted()
    before = {n: t.clone() for n, t in model.state_dict().items()}
    with lora.merged(model):
        assert same(dict(model.state_dict()), before)
        with pytest.raises(RuntimeError, match='unmerge_lora'):
            model.load_state_dict(before)
        with pytest.raises(ValueError, match='unmerge_lora'):
            lora.load_lora_state_dict(model, lora.lora_state_dict(model))
    model.load_state_dict(before)


@pytest.mark.parametrize('family', FAMILIES)
def test_adapter_off_is_the_initial_model(family: str) -> None:
    initial = tiny_causal_lm(family, hidden=16)
    model = copy.deepcopy(initial)
    lora.convert_to_lora(model, 2)
    disturb(model)
    policy, was = logits(model), logits(initial)
    assert not torch.allclose(policy, was, atol=1e-3)
    with lora.adapter_disabled(model):
        with lora.adapter_disabled(model):
            assert torch.equal(logits(model), was)
        assert torch.equal(logits(model), was)
        with pytest.raises(ValueError, match='adapter_disabled'):
            lora.merge_lora(model)
    assert torch.equal(logits(model), policy)
    with lora.merged(model):
        folded = logits(model)
        with lora.adapter_disabled(model):
            assert torch.equal(logits(model), was)
        assert torch.equal(logits(model), folded)
    with pytest.raises(KeyError), lora.adapter_disabled(model):
        raise KeyError
    assert torch.equal(logits(model), policy)


@pytest.mark.parametrize('mode', ['none', 'all', 'lora_only'])
def test_adapter_state_round_trip(mode: str) -> None:
    model = adapted(bias=mode)
    if mode != 'none':
        with pytest.raises(ValueError, match='biases are trained'), lora.adapter_disabled(model):
            pass
    fresh = tiny_causal_lm('gpt2', hidden=16)
    lora.convert_to_lora(fresh, 2, bias=mode)  # type: ignore[arg-type]
    lora.load_lora_state_dict(fresh, lora.lora_state_dict(model))
    assert torch.equal(logits(fresh), logits(model))


def test_adapter_state_errors_name_the_keys() -> None:
    model = adapted()
    state = dict(lora.lora_state_dict(model))
    first = next(iter(state))
    before = bits(model)
    with pytest.raises(ValueError, match=f'missing {first}; unexpected stray'):
        lora.load_lora_state_dict(model, {**{n: t for n, t in state.items() if n != first}, 'stray': torch.zeros(1)})
    with pytest.raises(ValueError, match=f'{first} is'):
        lora.load_lora_state_dict(model, {**{n: t + 1 for n, t in state.items()}, first: torch.zeros(3, 16)})
    assert same(bits(model), before)


def test_a_mixtures_routers_have_no_adapter_and_its_experts_share_is_warned_about() -> None:
    experts = {'moe_intermediate_size': 16, 'shared_expert_intermediate_size': 16, 'num_experts_per_tok': 2}
    model = model_of(Qwen2MoeConfig(**SIZES, **experts, num_key_value_heads=2, num_experts=4))
    blocks = {n: p.numel() for n, p in model.named_parameters() if '.layers.' in n and p.dim() > 1}
    with pytest.warns(UserWarning, match=r'adapters stand beside (\d+)% of the weights of the blocks') as warned:
        lora.convert_to_lora(model, 4)
    layers = lora.lora_layers(model)
    assert len(layers) == 2 * (4 + 3), 'attention and the shared expert'
    assert not any(name.endswith(('gate', 'shared_expert_gate')) for name in layers)
    reached = sum(blocks[f'{name}.weight'] for name in layers)
    assert f'beside {reached / sum(blocks.values()):.0%} of' in str(warned[0].message)
    assert 'experts.gate_up_proj' in str(warned[0].message)


def test_a_subclass_that_computes_the_same_is_a_linear_layer() -> None:
    model = model_of(FalconConfig(**SIZES, alibi=False))
    want = logits(model)
    lora.convert_to_lora(model, 4)
    assert len(lora.lora_layers(model)) == 2 * 4
    assert torch.allclose(logits(model), want, atol=1e-6)
    disturb(model)
    changed = logits(model)
    with lora.merged(model):
        assert torch.allclose(logits(model), changed, atol=1e-5)
