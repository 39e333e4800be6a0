"""Configs of single families with which a result depends on more than the sequence."""

from __future__ import annotations

import pytest
import torch
from family_checks import Family, local, plain_logits, same, sequences
from family_configs import family_config
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from chatgpt.batching import collate
from chatgpt.nn import Actor, AutoActor, AutoCritic, AutoRM, RewardModel, initial_tensors
from chatgpt.rollout import Call, HFEngine, LocalEngine, SamplingParams
from chatgpt.types import Prompt


def lm(model_type, **settings):
    torch.manual_seed(0)
    config = family_config(model_type)
    return AutoModelForCausalLM.from_config(type(config)(**(config.to_dict() | settings))).eval()


def plain_logprobs(model):
    found = zip(sequences(), plain_logits(model), strict=True)
    return torch.cat([torch.log_softmax(of, -1).gather(1, s.response_ids[:, None])[:, 0] for s, of in found])


def greedy(engine, actor, prompts, tokens):
    """Returns samples, after checking their tokens against transformers' generation of each alone."""
    engine.begin(actor)
    sampling = SamplingParams(max_new_tokens=tokens, do_sample=False)
    samples = engine.generate(Call.of(prompts, sampling, seed=1, indices=range(len(prompts))))
    engine.end()
    for prompt, sample in zip(prompts, samples, strict=True):
        alone = actor.model.generate(prompt.ids[None], max_new_tokens=tokens, do_sample=False, eos_token_id=None)
        assert torch.equal(sample.response_ids, alone[0, len(prompt.ids) :])
    return samples


def filled(module):
    """Gives a module of the meta device its initial weights."""
    tensors = dict(initial_tensors(module))
    module.to_empty(device='cpu')
    own = dict([*module.named_parameters(), *module.named_buffers()])
    with torch.no_grad():
        for name, tensor in tensors.items():
            own[name].copy_(tensor)
    module.model.tie_weights()
    return module.eval()


# ---------------------------------------------------------------------- windows by slot


def neo():
    return lm('gpt_neo', attention_types=[[['global', 'local'], 1]], window_size=12)


def test_fixed_steps_of_a_model_with_a_window_by_slot_are_refused(tmp_path):
    """GPT-Neo's window ends at the last slot, and fixed steps have more slots than tokens."""
    actor = Actor(neo()).eval()
    with pytest.raises(ValueError, match='fixed_steps=True cannot be had: .*GPTNeoForCausalLM.*fixed_steps=False'):
        LocalEngine(fixed_steps=True).begin(actor)
    assert local(Family('gpt_neo', tmp_path)) == 'up to the window'


def test_without_a_request_for_fixed_steps_such_a_model_decodes_without_them(monkeypatch):
    """As on CUDA, where 'auto' uses fixed steps."""
    engine, wants = LocalEngine(), LocalEngine.wants_fixed
    monkeypatch.setattr(LocalEngine, 'wants_fixed', lambda self, device: wants(self, torch.device('cuda')))
    greedy(engine, Actor(neo()).eval(), [Prompt(ids=torch.tensor([7])), Prompt(ids=torch.tensor([9, 4, 5]))], 8)


# ---------------------------------------------------------------------- positions in a row


TUNED = {'attn_temperature_tuning': True, 'attn_scale': 0.5, 'layer_types': None, 'max_position_embeddings': 512}


@torch.no_grad()
@pytest.mark.parametrize('no_rope', [[0, 0], [0, 1]])
def test_the_temperature_of_layers_without_rope_ignores_padding_and_other_sequences(no_rope, tmp_path):
    """Llama 4 scales a query by its index in the row and not by its position id."""
    model = lm('llama4_text', **TUNED, floor_scale=8, no_rope_layers=no_rope)
    model.save_pretrained(tmp_path)
    want, batch = plain_logprobs(model), collate(sequences())
    with torch.device('meta'):
        later = AutoActor(tmp_path)
    same(filled(later)(batch).logprobs, want)
    actor = AutoActor(tmp_path).eval()
    same(actor(batch).logprobs, want)
    prompts = [Prompt(ids=s.prompt_ids) for s in sequences()]
    samples = greedy(HFEngine(), actor, prompts, 12)
    same(torch.cat([s.logprobs for s in samples]), actor(collate(samples)).logprobs)


@torch.no_grad()
@pytest.mark.parametrize('fixed', [False, True])
def test_the_local_engine_accepts_them_up_to_the_first_step_of_the_temperature(fixed):
    model = lm('llama4_text', **TUNED, floor_scale=300, no_rope_layers=[0, 1])
    actor, engine = Actor(model).eval(), LocalEngine(fixed_steps=fixed)
    ids = torch.randint(3, 60, (270,), generator=torch.Generator().manual_seed(2))
    engine.begin(actor)
    prompts, sampling = [Prompt(ids=ids), Prompt(ids=ids[:20])], SamplingParams(max_new_tokens=12)
    samples = engine.generate(Call.of(prompts, sampling, seed=3, indices=range(2)))
    same(torch.cat([s.logprobs for s in samples]), actor(collate(samples)).logprobs)
    with pytest.raises(ValueError, match="299, beyond which .*Llama4ForCausalLM.*; use engine='hf'"):
        engine.generate(Call.of(prompts, SamplingParams(max_new_tokens=40), seed=3, indices=range(2)))
    engine.end()


@torch.no_grad()
@pytest.mark.parametrize('inside', [True, False])
def test_dynamic_rope_beyond_the_original_length_is_refused_by_name(inside):
    """Its frequencies depend on the longest sequence of a batch."""
    rope = {'rope_type': 'dynamic', 'factor': 2.0, 'rope_theta': 10000.0}
    model = lm('llama', rope_parameters=rope, max_position_embeddings=40 if inside else 39)
    if inside:
        same(Actor(model).eval()(collate(sequences())).logprobs, plain_logprobs(model))
        return
    with pytest.raises(ValueError, match='40 tokens is past 39 tokens.* of llama .dynamic'):
        Actor(model).eval()(collate(sequences()))
    engine = HFEngine()
    engine.begin(Actor(model).eval())
    with pytest.raises(ValueError, match='of llama .dynamic'):
        engine.generate(
            Call.of([Prompt(ids=torch.tensor([3]))], SamplingParams(max_new_tokens=39), seed=1, indices=[0])
        )


# ---------------------------------------------------------------------- weights loaded later


@pytest.mark.parametrize('of', [AutoCritic, AutoRM])
def test_a_decoder_of_bert_has_no_pooler_and_the_same_head_from_the_meta_device(of, tmp_path):
    lm('bert', is_decoder=True).save_pretrained(tmp_path)
    torch.manual_seed(3)
    here = of(tmp_path)
    torch.manual_seed(3)
    with torch.device('meta'):
        later = of(tmp_path)
    found = dict(initial_tensors(later))
    assert found and not any('pooler' in name for name in found)
    for name, tensor in here.named_parameters():
        assert torch.equal(found[name], tensor), name


# ---------------------------------------------------------------------- texts and images


@torch.no_grad()
def test_a_reward_model_of_texts_and_images_is_saved_with_the_text_parts_padding_id(tmp_path):
    lm('gemma3').save_pretrained(tmp_path / 'lm')
    model = AutoRM(tmp_path / 'lm').eval()
    model.save_pretrained(tmp_path / 'rm')
    batch = collate(sequences())
    same(RewardModel.from_pretrained(tmp_path / 'rm').eval()(batch), model(batch))
    theirs = AutoModelForSequenceClassification.from_pretrained(tmp_path / 'rm').eval()
    alone = [theirs(input_ids=torch.cat([s.prompt_ids, s.response_ids])[None]).logits[0] for s in sequences()]
    same(torch.cat(alone), model(batch))
