"""Hydra: exact reference, trained parameters, exchange and recorded trunk, copies, state dicts, errors."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers
from model_cases import IDS, SIZES, same
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from chatgpt.nn import Actor
from chatgpt.nn.hydra import check_hydra, check_loaded_hydra, has_hydra, make_hydra, recorded_trunk, reference_branch
from chatgpt.nn.lora import convert_to_lora
from chatgpt.testing.fakes import tiny_causal_lm

LAYERS = 3
SMALL = SIZES | {'hidden_size': 16, 'num_hidden_layers': LAYERS, 'num_attention_heads': 2}
NEOX_LIKE = SMALL | {'initializer_range': 0.1}
GPT_LIKE = {'vocab_size': 64, 'n_embd': 16, 'n_layer': LAYERS, 'n_head': 2, 'n_positions': 32, 'initializer_range': 0.1}


def causal_lm(family: str, **kw: Any) -> Any:
    """Returns a random causal LM with three blocks, for each supported structure."""
    if family in ('gpt2', 'opt', 'bloom', 'llama'):
        return tiny_causal_lm(family, hidden=16, layers=LAYERS, **kw)
    post_norm = {'ffn_dim': 24, 'word_embed_proj_dim': 8, 'do_layer_norm_before': False, 'init_std': 0.1}
    config = {
        'gptj': lambda: transformers.GPTJConfig(rotary_dim=4, bos_token_id=1, eos_token_id=2, **GPT_LIKE),
        'gpt_neox': lambda: transformers.GPTNeoXConfig(**NEOX_LIKE),
        'gemma2': lambda: transformers.Gemma2Config(num_key_value_heads=1, head_dim=8, **NEOX_LIKE),
        'opt_post_norm': lambda: transformers.OPTConfig(**SMALL, **post_norm),
    }[family]()
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config).eval()


BUILDS = ('gpt2', 'gptj', 'gpt_neox', 'opt', 'opt_post_norm', 'bloom', 'llama', 'gemma2')


class Owner(nn.Module):
    """A model and a separate value head, as in an actor."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.value_head = nn.Linear(16, 1)

    def forward(self, ids: Tensor) -> Tensor:
        return self.model(input_ids=ids, use_cache=False).logits


def hydra(family: str = 'llama', k: int = 2) -> Owner:
    torch.manual_seed(0)
    owner = Owner(causal_lm(family))
    make_hydra(owner, k)
    return owner


def train(owner: nn.Module, steps: int = 3) -> None:
    optimizer = torch.optim.AdamW([p for p in owner.parameters() if p.requires_grad], lr=1e-2, weight_decay=0.1)
    owner.train()
    for _ in range(steps):
        labels = IDS.roll(1, 0)
        nn.functional.cross_entropy(owner(IDS).flatten(0, 1), labels.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
    owner.eval()


def evaluate(owner: nn.Module) -> Tensor:
    with torch.no_grad():
        return owner(IDS)


def bits(module: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}


@pytest.mark.parametrize('family', BUILDS)
def test_the_reference_stays_the_initial_model_and_comes_with_the_policys_pass(family: str) -> None:
    initial = causal_lm(family)
    owner = Owner(copy.deepcopy(initial))
    make_hydra(owner, 2)
    if family == 'llama':
        owner.model.gradient_checkpointing_enable({'use_reentrant': False})
    with torch.no_grad():
        expected = initial(input_ids=IDS, use_cache=False).logits
    assert torch.equal(evaluate(owner), expected)
    frozen = bits(owner.ref_branch)
    train(owner)
    base, bottom_calls = owner.model.base_model, []
    with torch.no_grad(), reference_branch(owner):
        assert torch.equal(evaluate(owner), expected)
        with reference_branch(owner):
            assert torch.equal(evaluate(owner), expected)
        states = base(input_ids=IDS, use_cache=False)[0]
    assert not torch.allclose(evaluate(owner), expected, atol=1e-2)
    assert same(bits(owner.ref_branch), frozen)
    owner.ref_branch._blocks[0][0].register_forward_hook(lambda *_: bottom_calls.append(1))
    with torch.no_grad(), recorded_trunk(owner) as trunk:
        policy = base(input_ids=IDS, use_cache=False)[0]
    assert torch.equal(owner.ref_branch(trunk), states)
    assert not torch.allclose(policy, states, atol=1e-3)
    assert len(bottom_calls) == 1


@pytest.mark.parametrize(
    ('family', 'tied', 'expected'),
    [
        ('gpt2', True, ('h.1.', 'h.2.', 'ln_f.')),
        ('opt', True, ('layers.1.', 'layers.2.', 'decoder.final_layer_norm.')),
        ('gptj', False, ('h.1.', 'h.2.', 'ln_f.', 'lm_head.')),
        ('llama', False, ('layers.1.', 'layers.2.', 'model.norm.', 'lm_head.')),
    ],
)
def test_gradient_only_above_the_trunk_and_memory_is_model_plus_top(
    family: str, tied: bool, expected: tuple[str, ...]
) -> None:
    plain = causal_lm(family)
    owner = hydra(family)
    evaluate(owner)
    owner(IDS).sum().backward()
    with_gradient = {n for n, p in owner.model.named_parameters() if p.grad is not None}
    top = {n for n, _ in plain.named_parameters() if any(part in n for part in expected)}
    assert with_gradient == {n for n, p in owner.model.named_parameters() if p.requires_grad} == top
    assert not any(p.requires_grad for p in owner.ref_branch.parameters())
    assert all(p.requires_grad for p in owner.value_head.parameters())
    assert (owner.ref_branch.head is None) == tied
    copied = sum(p.numel() for n, p in plain.named_parameters() if n in top)
    total = sum(p.numel() for p in plain.parameters())
    assert sum(p.numel() for p in owner.parameters()) == total + copied + 17
    assert len({p.data_ptr() for p in owner.parameters()}) == len(list(owner.parameters()))


def test_mistakes_are_refused_and_leave_the_model_alone() -> None:
    for k, message in ((0, 'give -1'), (-2, 'give -1'), (True, 'give -1'), (1.5, 'give -1'), (4, 'has 3 blocks')):
        owner = Owner(causal_lm('gpt2'))
        with pytest.raises(ValueError, match=message):
            make_hydra(owner, k)  # type: ignore[arg-type]
        assert not has_hydra(owner) and all(p.requires_grad for p in owner.parameters())
    make_hydra(owner, -1)
    assert not has_hydra(owner) and all(p.requires_grad for p in owner.parameters())
    with pytest.raises(ValueError, match='0 reference branches'), reference_branch(owner):
        pass
    with pytest.raises(ValueError, match='no transformers model'):
        make_hydra(nn.Linear(2, 2), 1)
    with pytest.raises(ValueError, match='already has a reference branch'):
        make_hydra(hydra(), 1)
    lora = causal_lm('gpt2')
    convert_to_lora(lora, 2)
    with pytest.raises(ValueError, match='not both'):
        make_hydra(Owner(lora), 1)
    with pytest.raises(ValueError, match='not both'):
        convert_to_lora(hydra(), 2)


class _IgnoresItsTree(transformers.LlamaForCausalLM):
    """Runs blocks from a separate list, so that exchanged modules are not used."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if not hasattr(self, 'own_list'):
            object.__setattr__(self, 'own_list', list(self.model.layers))
        kept = dict(self.model.layers._modules)
        self.model.layers._modules.update({str(i): block for i, block in enumerate(self.own_list)})
        try:
            return super().forward(*args, **kwargs)
        finally:
            self.model.layers._modules.update(kept)


def _changing(change: Any) -> Any:
    """Returns a Llama that applies `change(logits, number of the call)`."""

    class Changing(transformers.LlamaForCausalLM):
        calls = 0

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            output = super().forward(*args, **kwargs)
            self.calls += 1
            output.logits = change(output.logits, self.calls)
            return output

    return Changing


def _never_again(logits: Tensor, calls: int) -> Tensor:
    return logits.index_fill(0, torch.tensor([0]), torch.nan) if calls == 2 else logits


@pytest.mark.parametrize(
    ('build', 'message'),
    [
        (_IgnoresItsTree, 'from its module tree'),
        (_changing(lambda logits, calls: logits + 1e-3 * calls), 'differ by'),
        (_changing(_never_again), 'differ by nan'),
    ],
)
def test_a_model_that_does_not_agree_is_refused(build: Any, message: str) -> None:
    owner = Owner(build(causal_lm('llama').config))
    flags = [p.requires_grad for p in owner.parameters()]
    with pytest.raises(ValueError, match=message):
        make_hydra(owner, 2)
    assert not has_hydra(owner)
    assert [p.requires_grad for p in owner.parameters()] == flags


def test_rounding_is_no_reason_to_refuse() -> None:
    """Kernels may round differently for weights at another address."""
    larger = _changing(lambda x, calls: x if calls % 2 else torch.nextafter(x, torch.tensor(torch.inf)))
    owner = Owner(larger(causal_lm('llama').config))
    make_hydra(owner, 2)
    assert has_hydra(owner) and owner.model.calls >= 2


class _ReadsTheBlockBelow(LlamaDecoderLayer):
    """Blocks pass a result to the next one in a keyword, in addition to the hidden state."""

    def forward(self, hidden: Tensor, *args: Any, box: dict[int, Tensor], **kwargs: Any) -> Tensor:
        index = self.self_attn.layer_idx
        out = super().forward(hidden + 0.1 * box.get(index - 1, 0.0), *args, **kwargs)
        box.setdefault(index, out)
        return out


def test_blocks_that_hand_on_the_policys_states_are_refused() -> None:
    """The recorded keyword is the policy's: right before training, and wrong after it."""
    model = causal_lm('llama')
    for layer in model.model.layers:
        layer.__class__ = _ReadsTheBlockBelow
    model.model.register_forward_pre_hook(lambda _, args, kw: (args, kw | {'box': {}}), with_kwargs=True)
    owner = Owner(model)
    with pytest.raises(ValueError, match='does more above its blocks than a norm'):
        make_hydra(owner, 2)
    make_hydra(owner, 1)  # a single copied block passes nothing on


def test_an_actor_whose_weights_come_later_is_checked_by_its_own_forward() -> None:
    actor = Actor(causal_lm('llama'), num_layers_unfrozen=2)
    before = bits(actor)
    check_loaded_hydra(actor, torch.device('cpu'))
    assert same(bits(actor), before)
    check_loaded_hydra(Actor(causal_lm('gpt2')), torch.device('cpu'))
    actor.ref_branch.blocks[0].mlp.up_proj.weight.data.mul_(1.5)
    with pytest.raises(ValueError, match='is not what its policy was'):
        check_loaded_hydra(actor, torch.device('cpu'))


@pytest.mark.parametrize('break_it', ['other_norm', 'deaf'])
def test_a_reference_from_the_policys_pass_that_is_another_is_found_later(break_it: str) -> None:
    """Negative controls of the check after loading."""
    actor = Actor(causal_lm('llama'), num_layers_unfrozen=1)
    if break_it == 'other_norm':
        actor.ref_branch.norm, actor.ref_branch._slots = None, actor.ref_branch._slots[:1]
    else:
        actor.ref_branch.exchange = lambda: None
    with pytest.raises(ValueError, match='is not what its policy was'):
        check_loaded_hydra(actor, torch.device('cpu'))


def test_the_check_fails_after_training_and_keeps_modes() -> None:
    owner = hydra()
    owner.train()
    owner.value_head.eval()
    modes = [m.training for m in owner.modules()]
    check_hydra(owner)
    assert [m.training for m in owner.modules()] == modes
    assert not any(m.training for m in owner.ref_branch.modules())
    train(owner, steps=1)
    with pytest.raises(ValueError, match='differ by'):
        check_hydra(owner)


def test_deepcopy_is_independent() -> None:
    owner = hydra()
    reference = evaluate(owner)
    train(owner)
    policy = evaluate(owner)
    with reference_branch(owner):
        assert torch.equal(evaluate(copy.deepcopy(owner)), reference)
    duplicate = copy.deepcopy(owner)
    train(duplicate)
    assert torch.equal(evaluate(owner), policy) and not torch.equal(evaluate(duplicate), policy)
    with reference_branch(duplicate):
        assert torch.equal(evaluate(duplicate), reference)
        assert torch.equal(evaluate(owner), policy)


def test_state_dict_round_trip() -> None:
    owner = hydra()
    reference = evaluate(owner)
    train(owner)
    policy = evaluate(owner)
    torch.manual_seed(7)
    other = Owner(transformers.AutoModelForCausalLM.from_config(causal_lm('llama').config).eval())
    make_hydra(other, 2)
    assert not torch.allclose(evaluate(other), policy, atol=1e-3)
    other.load_state_dict(owner.state_dict(), strict=True)
    assert torch.equal(evaluate(other), policy)
    with reference_branch(other):
        assert torch.equal(evaluate(other), reference)
    # The model's own state dict is that of a model without hydra.
    assert set(owner.model.state_dict()) == set(causal_lm('llama').state_dict())


def test_saving_and_loading_inside_the_context_is_refused() -> None:
    owner = hydra()
    state = bits(owner)
    with reference_branch(owner):
        with pytest.raises(RuntimeError, match='leave the context first'):
            owner.state_dict()
        with pytest.raises(RuntimeError, match='leave the context first'):
            owner.load_state_dict(state)
    with pytest.raises(KeyError), reference_branch(owner):
        raise KeyError
    assert same(bits(owner), state)


def test_recorded_trunk_needs_a_forward_without_cache() -> None:
    owner = hydra()
    with pytest.raises(ValueError, match='use_cache=False'), recorded_trunk(owner):
        owner.model(input_ids=IDS, use_cache=True)
    with recorded_trunk(owner) as trunk:
        pass
    with pytest.raises(ValueError, match='0 of 2'):
        owner.ref_branch(trunk)
    assert not any(block._forward_pre_hooks for block in owner.model.model.layers)
