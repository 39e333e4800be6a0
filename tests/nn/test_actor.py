"""The actor's log-probs, entropy, values and logits against slow loops over the model's own logits."""

from __future__ import annotations

import copy
import math

import model_cases
import pytest
import torch
import transformers
from model_cases import SIZES, model_of
from torch import nn
from transformers.activations import NewGELUActivation

from chatgpt.batching import collate
from chatgpt.nn import Actor, AutoActor, GPTActor, critic_head, mlp_head
from chatgpt.nn.trunk import FusedNewGELU, dropout_off, dropout_on
from chatgpt.testing import FAMILIES, byte_tokenizer, tiny_causal_lm

LENGTHS = ((1, 1), (3, 2), (2, 7), (6, 1))


def sequences(lengths=LENGTHS, seed=0, high=60):
    return model_cases.sequences(lengths, seed, high)


def slow_logprobs(model, seqs, temperature=1.0, shift=0):
    """Computes log-probs and entropies token by token, from unpadded forwards in float64. `shift=1` uses the next
    state."""
    model = copy.deepcopy(model).double().eval()
    logprobs, entropies = [], []
    for s in seqs:
        ids = torch.cat([s.prompt_ids, s.response_ids])[None]
        with torch.no_grad():
            logits = model(input_ids=ids).logits[0] / temperature
        for i, token in enumerate(s.response_ids.tolist()):
            row = logits[len(s.prompt_ids) - 1 + i + shift].tolist()
            top = max(row)
            total = math.fsum(math.exp(x - top) for x in row)
            logp = [x - top - math.log(total) for x in row]
            logprobs.append(logp[token])
            entropies.append(-math.fsum(math.exp(x) * x for x in logp))
    return torch.tensor(logprobs, dtype=torch.float64), torch.tensor(entropies, dtype=torch.float64)


def close(a, b, tolerance=2e-5):
    return model_cases.close(a, b, tolerance)


@pytest.mark.parametrize('family', FAMILIES)
def test_logprobs_and_entropy_are_those_of_the_models_own_logits(family):
    model, seqs = tiny_causal_lm(family), sequences()
    out = Actor(model)(collate(seqs), temperature=0.7, with_entropy=True)
    logprobs, entropies = slow_logprobs(model, seqs, 0.7)
    assert out.logprobs.shape == (sum(a for _, a in LENGTHS),) and out.logprobs.dtype == torch.float32
    assert close(out.logprobs, logprobs) and close(out.entropy, entropies)
    assert out.values is None and out.logits is None
    # Negative controls: the wrong temperature, the next state.
    assert not close(out.logprobs, slow_logprobs(model, seqs, 1.0)[0], 1e-2)
    assert not close(out.logprobs, slow_logprobs(model, seqs, 0.7, shift=1)[0], 1e-2)


@pytest.mark.parametrize('family', FAMILIES)
def test_padding_changes_nothing(family):
    actor, seqs = Actor(tiny_causal_lm(family)), sequences()
    alone = torch.cat([actor(collate([s])).logprobs for s in seqs])
    assert close(actor(collate(seqs, pad_id=0)).logprobs, alone, 1e-5)
    wide = collate([*seqs, *sequences([(30, 20)], seed=1)], pad_id=41)
    assert close(actor(wide).logprobs[: len(alone)], alone, 1e-5)


@pytest.mark.parametrize('family', FAMILIES)
def test_left_padding_and_a_cache_give_the_same_states(family):
    actor = Actor(tiny_causal_lm(family))
    row = sequences([(5, 3)])[0]
    ids = torch.cat([row.prompt_ids, row.response_ids])[None]
    plain = actor.trunk(ids, position_ids=torch.arange(8)[None])
    left = torch.cat([torch.zeros(1, 4, dtype=torch.int64), ids], 1)
    mask = torch.tensor([[False] * 4 + [True] * 8])
    positions = (mask.long().cumsum(1) - 1).clamp_min(0)
    padded = actor.trunk(left, position_ids=positions, attention_mask=mask)[:, 4:]
    assert close(padded, plain, 1e-5)
    cache = transformers.DynamicCache(config=actor.config)
    for a, b in ((0, 5), (5, 6), (6, 8)):
        part = actor.trunk(ids[:, a:b], position_ids=torch.arange(a, b)[None], cache=cache)
        assert close(part, plain[:, a:b], 1e-5)
    if family in ('gpt2', 'opt'):  # the others use only distances between positions
        wrong = actor.trunk(left, position_ids=torch.arange(12)[None], attention_mask=mask)[:, 4:]
        assert not close(wrong, plain, 1e-2)


def test_with_logits_gives_the_plain_logits_and_the_same_logprobs():
    actor, batch = Actor(tiny_causal_lm('llama')), collate(sequences())
    full = actor(batch, temperature=0.5, with_entropy=True, with_logits=True)
    lean = actor(batch, temperature=0.5, with_entropy=True)
    assert full.logits.shape == (batch.num_actions, 64)
    own = actor.model(batch.input_ids).logits.flatten(0, 1)[batch.action_index]
    assert close(full.logits, own)
    assert close(full.logprobs, lean.logprobs) and close(full.entropy, lean.entropy)


def capped():
    config = transformers.Gemma2Config(
        **SIZES, num_key_value_heads=1, head_dim=16, final_logit_softcapping=2.0, attn_logit_softcapping=None,
        sliding_window=16, initializer_range=0.3, attn_implementation='eager',
    )  # fmt: skip
    return model_of(config)


def scaled():
    return model_of(transformers.CohereConfig(**SIZES, num_key_value_heads=1, logit_scale=0.25, initializer_range=0.3))


def biased():
    model = model_of(transformers.PhiConfig(**SIZES))
    nn.init.normal_(model.lm_head.bias)
    return model


@pytest.mark.parametrize(('make', 'linear'), [(capped, False), (scaled, False), (biased, True)])
def test_models_whose_head_is_more_than_a_matrix(make, linear, monkeypatch):
    model, seqs = make(), sequences()
    actor = Actor(model)
    assert actor._linear_head is linear
    want, entropies = slow_logprobs(model, seqs, 0.8)
    out = actor(collate(seqs), temperature=0.8, with_entropy=True)
    assert close(out.logprobs, want) and close(out.entropy, entropies)
    monkeypatch.setattr('chatgpt.functional.logprobs.CHUNK_ELEMENTS_CPU', 3 * 64)  # three rows at a time
    assert close(actor(collate(seqs), temperature=0.8).logprobs, want)
    if not linear:
        actor._linear_head = True  # negative control: only the matrix
        assert not close(actor(collate(seqs), temperature=0.8).logprobs, want, 1e-2)


@pytest.mark.parametrize('make', [lambda: tiny_causal_lm('gpt2'), capped])
def test_gradients_reach_every_parameter_and_equal_those_of_whole_logits(make):
    model, batch = make(), collate(sequences())
    Actor(model)(batch).logprobs.sum().backward()
    got = {n: p.grad.clone() for n, p in model.named_parameters()}
    model.zero_grad()
    logits = model(batch.input_ids).logits.flatten(0, 1)[batch.action_index]
    (logits.gather(1, batch.action_ids[:, None])[:, 0] - logits.logsumexp(-1)).sum().backward()
    for name, parameter in model.named_parameters():
        assert torch.allclose(got[name], parameter.grad, atol=1e-4), name
    assert model.get_output_embeddings().weight.grad.abs().sum() > 0


def test_an_actor_leaves_modes_generator_and_names_alone_and_has_one_kernel_of_gelu():
    model = tiny_causal_lm('gpt2', dropout=0.5)
    model.train()
    model.transformer.h[0].eval()
    state, names = torch.get_rng_state(), list(model.state_dict())
    Actor(model)
    assert torch.equal(torch.get_rng_state(), state) and list(model.state_dict()) == names
    assert model.training and not model.transformer.h[0].training and model.transformer.h[1].training
    assert [type(block.mlp.act) for block in model.transformer.h] == [FusedNewGELU] * 2


def test_values_are_read_at_the_state_before_each_action():
    model, seqs, head = tiny_causal_lm('gpt2'), sequences(), mlp_head(32)
    for parameter in head.parameters():
        nn.init.normal_(parameter)
    values = Actor(model, value_head=head)(collate(seqs)).values
    want, late = [], []
    for s in seqs:
        with torch.no_grad():
            states = model.transformer(torch.cat([s.prompt_ids, s.response_ids])[None]).last_hidden_state[0]
            every = head(states)[:, 0].tolist()
        for i in range(len(s.response_ids)):
            want.append(every[len(s.prompt_ids) - 1 + i])
            late.append(every[len(s.prompt_ids) + i])
    assert values.dtype == torch.float32 and close(values, torch.tensor(want))
    assert not close(values, torch.tensor(late), 1e-2)


def test_values_are_fp32_under_autocast():
    actor = Actor(tiny_causal_lm('llama'), value_head=True)
    nn.init.normal_(actor.value_head.weight)
    seen = []
    actor.value_head.register_forward_hook(lambda head, given, out: seen.append(given[0].detach().double()))
    with torch.autocast('cpu', dtype=torch.bfloat16):
        out = actor(collate(sequences()))
        (states,) = seen
        rounded = actor.value_head(states.float())
    assert out.values.dtype == out.logprobs.dtype == torch.float32
    exact = states @ actor.value_head.weight.double().T + actor.value_head.bias.double()
    assert close(out.values, exact[:, 0], 1e-5) and not close(rounded[:, 0], exact[:, 0], 1e-5)


def test_what_is_no_causal_model_is_refused():
    with pytest.raises(ValueError, match='GPT2Model has none'):
        Actor(tiny_causal_lm('gpt2').transformer)
    with pytest.raises(ValueError, match='looks ahead'):
        Actor(transformers.BertLMHeadModel(transformers.BertConfig(**SIZES)))
    assert Actor(transformers.BertLMHeadModel(transformers.BertConfig(**SIZES, is_decoder=True)))
    sizes = {'vocab_size': 32, 'd_model': 16, 'd_kv': 8, 'd_ff': 16, 'num_layers': 1, 'num_heads': 2}
    t5 = transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes))
    with pytest.raises(ValueError, match='names no decoder_start_token_id'):
        Actor(t5)
    with pytest.raises(ValueError, match='it must give one number per state'):
        Actor(tiny_causal_lm('gpt2'), value_head=nn.Linear(32, 2))(collate(sequences()))
    with pytest.raises(ValueError, match='choose one'):
        Actor(tiny_causal_lm('gpt2'), lora_rank=2, num_layers_unfrozen=1)


@pytest.mark.parametrize('family', FAMILIES)
def test_a_saved_actor_loads_in_transformers_and_here(family, tmp_path):
    actor, tokenizer = Actor(tiny_causal_lm(family, vocab_size=259)), byte_tokenizer()
    actor.save_pretrained(tmp_path, tokenizer)
    ids = torch.tensor([[5, 9, 200]])
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    weights = theirs.state_dict()
    assert all(torch.equal(tensor, weights[name]) for name, tensor in actor.model.state_dict().items())
    # GPT-2's GELU has another kernel here (nn/trunk.py)
    torch.testing.assert_close(theirs(ids).logits, actor.model(ids).logits)
    batch = collate(sequences(high=259))
    assert torch.equal(Actor.from_pretrained(tmp_path).eval()(batch).logprobs, actor(batch).logprobs)
    assert transformers.AutoTokenizer.from_pretrained(tmp_path)('a b')['input_ids'] == [97, 32, 98]


@pytest.mark.parametrize('head', [critic_head, mlp_head])
def test_the_value_head_is_saved_beside_the_model(head, tmp_path):
    actor, batch = Actor(tiny_causal_lm('gpt2'), value_head=head(32)), collate(sequences())
    for parameter in actor.value_head.parameters():
        nn.init.normal_(parameter)
    actor.save_pretrained(tmp_path)
    assert (tmp_path / 'value_head.safetensors').is_file()
    assert not list(tmp_path.glob('*.bin'))
    for cls in (Actor, GPTActor):
        again = cls.from_pretrained(tmp_path).eval()
        assert type(again) is cls and torch.equal(again(batch).values, actor(batch).values)


def test_weights_given_by_name_are_the_ones_saved(tmp_path):
    actor = Actor(tiny_causal_lm('gpt2'), value_head=True)
    other = Actor(tiny_causal_lm('gpt2', seed=1), value_head=True)
    actor.save_pretrained(tmp_path, state_dict=other.state_dict())
    batch = collate(sequences())
    again = Actor.from_pretrained(tmp_path).eval()(batch)
    assert torch.equal(again.logprobs, other(batch).logprobs) and torch.equal(again.values, other(batch).values)
    assert not close(again.logprobs, actor(batch).logprobs, 1e-2)


HALF = {'dropout': 0.5, 'activation_dropout': 0.5, 'attention_dropout': 0.5, 'layerdrop': 0.9}
OTHER_NAMES = {'hidden_dropout_prob': 0.5, 'attention_probs_dropout_prob': 0.5}
XGLM = {'vocab_size': 64, 'd_model': 32, 'num_layers': 2, 'attention_heads': 4, 'ffn_dim': 48}


@pytest.mark.parametrize(
    'config',
    [
        transformers.OPTConfig(**SIZES, **HALF, ffn_dim=48, word_embed_proj_dim=32),
        transformers.FalconConfig(**SIZES, hidden_dropout=0.5, attention_dropout=0.5, parallel_attn=False),
        transformers.BioGptConfig(**SIZES, **OTHER_NAMES, layerdrop=0.9, activation_dropout=0.5),
        transformers.XGLMConfig(**XGLM, **HALF, max_position_embeddings=64),
    ],
    ids=lambda config: config.model_type,
)
def test_no_kind_of_dropout_is_left_on_with_gradient_checkpointing(config):
    torch.manual_seed(0)
    plain = AutoActor(config=config).eval()
    torch.manual_seed(0)
    actor = AutoActor(config=config, checkpoint=True).train()
    batch = collate(sequences())
    dropout_off(actor)
    copied = copy.deepcopy(actor)
    for model in (actor, copied):
        assert torch.allclose(model(batch).logprobs, plain(batch).logprobs, atol=1e-5)
        with torch.no_grad():
            assert torch.allclose(model(batch).logprobs, plain(batch).logprobs, atol=1e-5)
    blocks = [m for m in actor.modules() if type(m).__name__.endswith(('DecoderLayer', 'Block'))]
    calls = []
    handles = [next(block.children()).register_forward_hook(lambda *_: calls.append(1)) for block in blocks]
    actor(batch).logprobs.sum().backward()
    for handle in handles:
        handle.remove()
    assert len(blocks) == 2 and len(calls) == 4, 'each block runs again in the backward pass'
    plain(batch).logprobs.sum().backward()
    want = {n: p.grad for n, p in plain.named_parameters()}
    assert all(torch.allclose(want[n], p.grad, atol=1e-4) for n, p in actor.named_parameters() if want[n] is not None)
    dropout_off(actor)
    dropout_on(actor)  # as when another method trains the same model
    assert not torch.allclose(actor(batch).logprobs, plain(batch).logprobs, atol=1e-3)
    fresh = AutoActor(config=config, checkpoint=True).train()
    for part, other in zip(actor.modules(), fresh.modules(), strict=True):
        rates, wanted = ({k: v for k, v in vars(m).items() if isinstance(v, float)} for m in (part, other))
        assert rates == wanted


@pytest.mark.parametrize(('dtype', 'tolerance'), [(torch.float64, 1e-13), (torch.float32, 1e-5)])
def test_function_and_gradient_are_the_plain_ones(dtype, tolerance):
    def run(module, x, grad):
        x = x.clone().requires_grad_()
        y = module(x)
        y.backward(grad)
        return y.detach(), x.grad

    torch.manual_seed(0)
    x, grad = torch.randn(7, 1000, dtype=dtype) * 3, torch.randn(7, 1000, dtype=dtype)
    for ours, plain in zip(run(FusedNewGELU(), x, grad), run(NewGELUActivation(), x, grad), strict=True):
        torch.testing.assert_close(ours, plain, atol=tolerance, rtol=tolerance)
    exact = run(torch.nn.GELU(), x, grad)  # negative control: GELU without the approximation
    assert not torch.allclose(run(FusedNewGELU(), x, grad)[0], exact[0], atol=1e-5)
