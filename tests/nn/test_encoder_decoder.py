"""Encoder-decoders as actor, critic, reward model and ILQL model, compared with transformers' own forward of each
sequence."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import model_cases
import pytest
import torch
import transformers
from torch import Tensor

from chatgpt.batching import collate
from chatgpt.nn import Actor, AutoActor, AutoCritic, AutoRM, Critic, ILQLModel, RewardModel, initial_tensors
from chatgpt.nn.compiled import compile_blocks
from chatgpt.nn.lora import convert_to_lora, lora_layers, merged
from chatgpt.nn.peft_format import export_peft
from chatgpt.nn.shared import SharedTrunk
from chatgpt.nn.trunk import dropout_off
from chatgpt.testing import ENCODER_DECODERS, tiny_causal_lm, tiny_config
from chatgpt.types import Sequence

START = {'t5': 0, 'flan-t5': 0, 'bart': 2, 'marian': 0}
LENGTHS = [(5, 6), (3, 7), (9, 2), (1, 3)]
TYPES = {'t5': 'T5', 'flan-t5': 'T5', 'bart': 'Bart', 'marian': 'Marian'}

every = pytest.mark.parametrize('family', ENCODER_DECODERS)


def sequences() -> list[Sequence]:
    return model_cases.sequences(LENGTHS, seed=1)


def perturbed(family: str, seed: int = 3) -> Any:
    """Returns a model with biases, norms and position biases changed from their initial values."""
    model = tiny_causal_lm(family, positions=32)
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=g))
    return model


@torch.no_grad()
def reference_output(model: Any, family: str, sequence: Sequence) -> tuple[Tensor, Tensor]:
    """Returns transformers' logits (A + 1, V) and the decoder's last states (A + 1, D) of one sequence."""
    begun = torch.cat([torch.tensor([START[family]]), sequence.response_ids])[None]
    out = model(input_ids=sequence.prompt_ids[None], decoder_input_ids=begun, output_hidden_states=True)
    return out.logits[0], out.decoder_hidden_states[-1][0]


@every
@torch.no_grad()
def test_logprobs_are_the_models_own_loss_of_each_sequence_alone(family):
    model = perturbed(family)
    actor = Actor(copy.deepcopy(model)).eval()
    got = actor(collate(sequences(), pad_id=7)).logprobs.split([a for _, a in LENGTHS])
    for sequence, logprobs in zip(sequences(), got, strict=True):
        loss = model(input_ids=sequence.prompt_ids[None], labels=sequence.response_ids[None]).loss
        assert float(-logprobs.mean()) == pytest.approx(float(loss), abs=1e-5)
        want = (
            reference_output(model, family, sequence)[0][:-1]
            .log_softmax(-1)
            .gather(1, sequence.response_ids[:, None])[:, 0]
        )
        torch.testing.assert_close(logprobs, want, atol=1e-5, rtol=1e-5)


@every
@torch.no_grad()
def test_values_and_scores_are_read_from_the_decoder(family):
    model = perturbed(family)
    critic, reward_model = Critic(copy.deepcopy(model)).eval(), RewardModel(copy.deepcopy(model)).eval()
    values, scores = critic(collate(sequences())), reward_model(collate(sequences()))
    states = [reference_output(model, family, s)[1] for s in sequences()]
    want = torch.cat([critic.value_head(x[:-1])[:, 0] for x in states])
    torch.testing.assert_close(values, want, atol=1e-6, rtol=1e-4)
    want = torch.stack([reward_model.value_head(x[-1])[0] for x in states])
    torch.testing.assert_close(scores, want, atol=1e-5, rtol=1e-4)
    shared = Actor(copy.deepcopy(model), value_head=critic.value_head).eval()
    torch.testing.assert_close(shared(collate(sequences())).values, values)


@every
def test_a_trunk_has_every_weight_but_the_heads(family):
    model = tiny_causal_lm(family, positions=32)
    critic = Critic(model)
    assert type(critic.model).__name__ == f'{TYPES[family]}Model'
    critic.train()(collate(sequences())).sum().backward()
    idle = [n for n, p in critic.model.named_parameters() if p.requires_grad and p.grad is None]
    assert idle == []
    of_model = {id(p) for n, p in model.named_parameters() if n != 'lm_head.weight'}
    assert {id(p) for p in critic.model.parameters()} == of_model


@pytest.mark.parametrize('family', ['flan-t5', 'bart'])
def test_a_dummy_batch_and_gradient_checkpointing(family):
    gradients = []
    for checkpoint in (False, True):
        torch.manual_seed(0)
        actor = AutoActor(config=tiny_config(family, positions=32, dropout=0.3), checkpoint=checkpoint).train()
        dropout_off(actor)
        loss = actor(collate(sequences())).logprobs.sum() + 0 * actor(collate([])).logprobs.sum()
        loss.backward()
        gradients.append(torch.cat([p.grad.flatten() for p in actor.parameters()]))
    torch.testing.assert_close(gradients[1], gradients[0], atol=1e-4, rtol=1e-4)


def test_the_parts_of_t5s_blocks_are_compiled():
    actor = Actor(tiny_causal_lm('t5'))
    assert compile_blocks(actor, backend='eager') == 2 * 2 + 2 * 3  # self-attention and MLP, and cross-attention
    assert 'forward' in vars(actor.model.decoder.block[0].layer[1])


@pytest.mark.parametrize('family', ['flan-t5', 'bart'])
@torch.no_grad()
def test_adapters_change_nothing_when_new_and_fold_in(family):
    actor = Actor(perturbed(family)).eval()
    batch = collate(sequences())
    before = actor(batch).logprobs
    convert_to_lora(actor.model, 2)
    ends = {name.rpartition('.')[2] for name in lora_layers(actor.model)}
    bart, flan = {'q_proj', 'k_proj', 'v_proj', 'out_proj', 'fc1', 'fc2'}, {'q', 'k', 'v', 'o', 'wi_0', 'wi_1', 'wo'}
    assert ends == (bart if family == 'bart' else flan)
    assert all(any(side in name for name in lora_layers(actor.model)) for side in ('encoder', 'decoder'))
    assert torch.equal(actor(batch).logprobs, before)
    g = torch.Generator().manual_seed(5)
    for layer in lora_layers(actor.model).values():
        layer.lora_B.copy_(torch.randn(layer.lora_B.shape, generator=g) * 0.05)
    beside = actor(batch).logprobs
    assert (beside - before).abs().max() > 1e-3
    with merged(actor.model):
        torch.testing.assert_close(actor(batch).logprobs, beside, atol=1e-4, rtol=1e-4)
    with actor.reference():
        assert torch.equal(actor(batch).logprobs, before)


@torch.no_grad()
def test_exported_adapters_are_pefts(tmp_path):
    peft = pytest.importorskip('peft')
    model = perturbed('flan-t5')
    model.save_pretrained(tmp_path / 'base')
    actor = AutoActor(tmp_path / 'base', lora_rank=2).eval()
    g = torch.Generator().manual_seed(5)
    for layer in lora_layers(actor.model).values():
        layer.lora_B.copy_(torch.randn(layer.lora_B.shape, generator=g) * 0.05)
    export_peft(actor, tmp_path / 'adapter')
    assert json.loads((tmp_path / 'adapter' / 'adapter_config.json').read_text())['task_type'] == 'SEQ_2_SEQ_LM'
    theirs = peft.PeftModel.from_pretrained(model, tmp_path / 'adapter').eval()
    one = sequences()[0]
    want = theirs(input_ids=one.prompt_ids[None], labels=one.response_ids[None]).loss
    assert float(-actor(collate([one])).logprobs.mean()) == pytest.approx(float(want), abs=1e-5)
    again = AutoActor(tmp_path / 'adapter').eval()
    torch.testing.assert_close(again(collate([one])).logprobs, actor(collate([one])).logprobs, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(('family', 'layers'), [('t5', 1), ('t5', 2), ('flan-t5', 2), ('bart', 1), ('marian', 2)])
def test_the_reference_stays_the_model_as_it_was(family, layers):
    model = perturbed(family)
    actor = Actor(copy.deepcopy(model), num_layers_unfrozen=layers).train()
    dropout_off(actor)
    batch = collate(sequences())
    out = actor(batch, with_reference=True)
    before = out.logprobs.detach()
    torch.testing.assert_close(before, Actor(model).eval()(batch).logprobs, atol=1e-4, rtol=1e-5)
    assert torch.equal(out.reference.logprobs, before)
    out.logprobs.sum().backward()
    trained = [n for n, p in actor.named_parameters() if p.grad is not None]
    assert not [n for n in trained if 'encoder.' in n or 'shared' in n or 'embed' in n or 'relative' in n]
    torch.optim.SGD([p for p in actor.parameters() if p.grad is not None], lr=0.02).step()
    out = actor(batch, with_reference=True)
    assert (out.logprobs - before).abs().max() > 1e-3
    assert torch.equal(out.reference.logprobs, before)
    with actor.reference():
        assert torch.equal(actor(batch).logprobs, before)


def test_a_head_tied_to_the_decoders_embeddings_alone_is_no_head_of_its_own():
    sizes = model_cases.SIZES | {'num_key_value_heads': 2, 'head_dim': 8}
    sides = {side: transformers.T5GemmaModuleConfig(**sizes) for side in ('encoder', 'decoder')}
    torch.manual_seed(0)
    model = transformers.AutoModelForSeq2SeqLM.from_config(transformers.T5GemmaConfig(**sides, vocab_size=64))
    actor = Actor(model, num_layers_unfrozen=1)
    assert not any(p.requires_grad for n, p in actor.named_parameters() if 'embed' in n or 'lm_head' in n)


@pytest.mark.parametrize('family', ['t5', 'bart'])
@torch.no_grad()
def test_ilql_reads_the_decoders_states(family):
    torch.manual_seed(0)
    model = perturbed(family)
    ilql = ILQLModel(copy.deepcopy(model)).eval()
    out = ilql(collate(sequences()))
    states = torch.cat([reference_output(model, family, s)[1][:-1] for s in sequences()])
    ids = torch.cat([s.response_ids for s in sequences()])[:, None]
    torch.testing.assert_close(out.values, ilql.v_head(states)[:, 0], atol=1e-5, rtol=1e-4)
    for q, head in zip(out.qs, ilql.q_heads, strict=True):
        torch.testing.assert_close(q, head(states).gather(1, ids)[:, 0], atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(out.logprobs, Actor(model)(collate(sequences())).logprobs)


@pytest.mark.parametrize('family', ['t5', 'bart', 'marian'])
@torch.no_grad()
def test_folders_round_trip(family, tmp_path):
    model, batch = perturbed(family), collate(sequences())
    model.save_pretrained(tmp_path / 'theirs')
    actor = AutoActor(tmp_path / 'theirs').eval()
    actor.save_pretrained(tmp_path / 'ours')
    again = transformers.AutoModelForSeq2SeqLM.from_pretrained(tmp_path / 'ours').eval()
    found = again.state_dict()
    assert all(torch.equal(found[name], tensor) for name, tensor in model.state_dict().items())
    for sequence in sequences():  # the alignment of tensors changes the last bits of a matrix product
        torch.testing.assert_close(
            reference_output(again, family, sequence)[0], reference_output(model, family, sequence)[0]
        )
    critic, reward_model = AutoCritic(tmp_path / 'theirs').eval(), AutoRM(tmp_path / 'theirs').eval()
    reward_model.calibrate(0.25)
    for made, name in ((critic, 'critic'), (reward_model, 'rm')):
        made.save_pretrained(tmp_path / name)
        loaded = type(made).from_pretrained(tmp_path / name).eval()
        torch.testing.assert_close(loaded(batch), made(batch))
    base = transformers.AutoModel.from_pretrained(tmp_path / 'critic')
    assert type(base).__name__ == f'{TYPES[family]}Model'


@pytest.mark.parametrize('family', ['flan-t5', 'bart'])
def test_weights_loaded_after_the_meta_device_are_the_folders(family, tmp_path):
    perturbed(family).save_pretrained(tmp_path)
    for kind in (AutoActor, AutoCritic, AutoRM):
        torch.manual_seed(4)
        now = kind(tmp_path)
        torch.manual_seed(4)
        with torch.device('meta'):
            later = kind(tmp_path)
        got = dict(initial_tensors(later))
        for name, tensor in [*now.named_parameters(), *now.named_buffers()]:
            assert torch.equal(got[name], tensor), name


@pytest.mark.parametrize('make', [AutoActor, AutoCritic, AutoRM])
def test_others_are_refused_by_name(make):
    for config in (transformers.WhisperConfig(), transformers.ProphetNetConfig()):
        with pytest.raises(ValueError, match=rf'is an encoder-decoder \({config.model_type}\) that does not read'):
            make(config=config)
    for config in (tiny_config('t5', decoder_start_token_id=None), transformers.MBartConfig(vocab_size=64)):
        with pytest.raises(ValueError, match=f'this {config.model_type} names no decoder_start_token_id'):
            make(config=config)


def test_a_classifier_over_one_is_refused(tmp_path: Path):
    classifier = transformers.BartForSequenceClassification(tiny_config('bart', num_labels=1))
    classifier.save_pretrained(tmp_path / 'classifier')
    for load, given in ((RewardModel.from_pretrained, tmp_path / 'classifier'), (RewardModel, classifier)):
        with pytest.raises(ValueError, match='is a classifier over an encoder-decoder'):
            load(given)
    tiny_causal_lm('t5').save_pretrained(tmp_path)
    with pytest.raises(ValueError, match='SharedTrunk takes causal language models, and T5'):
        SharedTrunk.from_pretrained(tmp_path)
