"""Reward models and critics: positions of score and values, initialisation of heads, and folders that transformers
loads."""

from __future__ import annotations

import json
import math
from copy import deepcopy
from typing import Any

import pytest
import torch
import transformers
from model_cases import SIZES, close, deberta_config, model_of, sequences
from torch import nn

from chatgpt.batching import collate
from chatgpt.nn import (
    GPTRM,
    Critic,
    DebertaCritic,
    DebertaRM,
    GPTCritic,
    LlamaRM,
    OPTCritic,
    RewardModel,
    critic_head,
    mlp_head,
    reward_head,
)
from chatgpt.nn.heads import CategoricalHead, centred_head, in_fp32, load_head, save_head
from chatgpt.nn.loading import load_config
from chatgpt.nn.lora import lora_layers
from chatgpt.nn.reward_model import is_scorer
from chatgpt.testing import FAMILIES, char_tokenizer, tiny_causal_lm, tiny_config

LENGTHS = ((1, 1), (3, 2), (2, 7))


def whole(s):
    return torch.cat([s.prompt_ids, s.response_ids])[None]


def slow_scores(model, seqs, position=-1):
    scores = []
    weight, bias = model.value_head.weight.detach()[0].double(), float(model.value_head.bias.detach())
    for s in seqs:
        with torch.no_grad():
            state = model.model(whole(s)).last_hidden_state[0, position].double()
        scores.append(float(state @ weight) + bias)
    return torch.tensor(scores)


@pytest.mark.parametrize('family', FAMILIES)
def test_the_score_is_read_at_the_last_real_token(family):
    model, seqs = RewardModel(tiny_causal_lm(family).base_model).eval(), sequences()
    scores = model(collate(seqs))
    assert scores.shape == (3,) and scores.dtype == torch.float32
    assert close(scores, slow_scores(model, seqs))
    assert not close(scores, slow_scores(model, seqs, position=-2), 1e-2)
    wide = collate([*seqs, *sequences([(30, 20)], seed=1)], pad_id=9)
    assert close(model(wide)[:3], scores), 'padding changed a score'
    for s in seqs:  # a response may end in the padding token
        s.response_ids[-1] = 0
    assert close(model(collate(seqs, pad_id=0)), slow_scores(model, seqs))


def test_calibration_makes_the_reference_mean_zero_and_travels_with_the_weights():
    model, seqs = RewardModel(tiny_causal_lm('llama')), sequences()
    before = model(collate(seqs)).detach()
    model.calibrate(float(before.mean()))
    assert float(model(collate(seqs)).mean()) == pytest.approx(0.0, abs=1e-5)
    model.calibrate(2.0)
    assert close(model(collate(seqs)), before - before.mean() - 2.0)
    other = RewardModel(tiny_causal_lm('llama'))
    other.load_state_dict(model.state_dict())
    assert float(other.score_bias) == float(model.score_bias) != 0.0 and model.score_bias.dtype == torch.float32


@pytest.mark.parametrize('family', FAMILIES)
def test_transformers_loads_the_folder_and_gives_the_scores_up_to_the_bias(family, tmp_path):
    model, seqs = RewardModel(tiny_causal_lm(family)).eval(), sequences()
    nn.init.constant_(model.value_head.bias, 0.5)
    model.calibrate(2.0)
    scores = model(collate(seqs)).detach()
    model.save_pretrained(tmp_path, char_tokenizer())
    theirs = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path).eval()
    bias = json.loads((tmp_path / 'config.json').read_text())['score_bias']
    assert bias == pytest.approx(1.5)
    batch = collate(seqs, pad_id=0)
    logits = theirs(batch.input_ids, attention_mask=batch.attention_mask.long()).logits
    assert logits.shape == (3, 1)
    assert close(logits[:, 0] - bias, scores)
    assert not close(logits[:, 0], scores, 1e-1)
    again = RewardModel.from_pretrained(tmp_path).eval()
    assert close(again(collate(seqs)), scores) and float(again.score_bias) == pytest.approx(1.5)


def test_the_named_class_takes_the_head_over_and_checks_the_family(tmp_path):
    model = RewardModel(tiny_causal_lm('gpt2')).eval()
    model.calibrate(-3.0)
    model.save_pretrained(tmp_path, char_tokenizer())
    batch = collate(sequences())
    for again in (GPTRM(pretrained=tmp_path), GPTRM.from_pretrained(tmp_path)):
        assert type(again) is GPTRM and close(again.eval()(batch), model(batch))
    with pytest.raises(ValueError, match="LlamaRM takes models of the family 'llama'.*'gpt2'; use AutoRM"):
        LlamaRM(pretrained=tmp_path)


def test_given_weights_are_the_ones_saved_and_adapters_are_folded_in(tmp_path):
    model, other = (RewardModel(tiny_causal_lm('gpt2', seed=seed)).eval() for seed in (0, 1))
    other.calibrate(1.0)
    model.save_pretrained(tmp_path / 'given', char_tokenizer(), state_dict=other.state_dict())
    adapted = RewardModel(tiny_causal_lm('gpt2'), lora_rank=2).eval()
    for layer in lora_layers(adapted).values():
        nn.init.normal_(layer.lora_B, std=0.1)
    adapted.save_pretrained(tmp_path / 'folded', char_tokenizer())
    batch = collate(sequences())
    for want, folder in ((other, 'given'), (adapted, 'folded')):
        assert close(RewardModel.from_pretrained(tmp_path / folder).eval()(batch), want(batch), 1e-4)


@pytest.mark.parametrize('head', [mlp_head(32), None])
def test_what_transformers_has_no_class_for_still_survives_a_folder(head, tmp_path):
    model = RewardModel(model_of(transformers.CohereConfig(**SIZES, num_key_value_heads=1)), head).eval()
    for parameter in model.value_head.parameters():
        nn.init.normal_(parameter)
    model.calibrate(0.25)
    model.save_pretrained(tmp_path)
    assert (tmp_path / 'value_head.safetensors').is_file()
    again = RewardModel.from_pretrained(tmp_path).eval()
    assert close(again(collate(sequences())), model(collate(sequences())))


def test_padding_ids_that_transformers_cannot_use_are_warned_about(tmp_path):
    with pytest.warns(UserWarning, match='no padding id known'):
        RewardModel(tiny_causal_lm('gpt2', pad_token_id=None)).save_pretrained(tmp_path / 'a')
    with pytest.warns(UserWarning, match='the padding id 2 is an end token too'):
        RewardModel(tiny_causal_lm('gpt2', pad_token_id=2)).save_pretrained(tmp_path / 'b')
    assert RewardModel.from_pretrained(tmp_path / 'a')(collate(sequences())).shape == (3,)


@pytest.mark.parametrize('labels', [1, 2])
@pytest.mark.parametrize('family', FAMILIES)
def test_a_causal_classifier_of_one_label_or_two(family, labels, tmp_path):
    torch.manual_seed(0)
    classifier = transformers.AutoModelForSequenceClassification.from_config(
        tiny_config(family, num_labels=labels)
    ).eval()
    classifier.save_pretrained(tmp_path)
    model, seqs = RewardModel.from_pretrained(tmp_path).eval(), sequences()
    logits = torch.cat([classifier(whole(s)).logits for s in seqs])
    want = logits[:, 0] if labels == 1 else logits[:, 1] - logits[:, 0]
    assert close(model(collate(seqs)), want) and model.value_head is not None
    assert labels == 1 or not close(model(collate(seqs)), -want, 1e-2)
    # a given classifier is shared, and trained too
    built = RewardModel.from_classifier(classifier).eval()
    assert close(built(collate(seqs)), want) and built.model is classifier.base_model
    assert (built.value_head is classifier.score) == (labels == 1)
    built.calibrate(0.5)
    assert close(Critic.from_reward_model(built).value_head.bias, torch.tensor([-0.5])), 'its head had no bias'
    with pytest.raises(ValueError, match='it must be a sequence classifier'):
        RewardModel.from_classifier(classifier.base_model)


SMALL = SIZES | {'hidden_size': 16, 'num_attention_heads': 2, 'intermediate_size': 16, 'initializer_range': 0.5}


@pytest.mark.parametrize('labels', [1, 2])
@pytest.mark.parametrize(
    ('cls', 'config'),
    [
        (transformers.BertForSequenceClassification, transformers.BertConfig(**SMALL)),
        (
            transformers.DistilBertForSequenceClassification,
            transformers.DistilBertConfig(vocab_size=64, dim=16, n_layers=1, n_heads=2, hidden_dim=16),
        ),
    ],
)
def test_an_encoder_scores_as_its_own_classifier_does(cls, config, labels, tmp_path):
    torch.manual_seed(0)
    config = deepcopy(config)
    config.num_labels = labels
    classifier = cls(config).eval()
    classifier.save_pretrained(tmp_path)
    model, seqs = RewardModel.from_pretrained(tmp_path).eval(), sequences()
    logits = torch.cat([classifier(whole(s)).logits for s in seqs])
    want = logits[:, 0] if labels == 1 else logits[:, 1] - logits[:, 0]
    assert close(model(collate(seqs)), want)
    model.calibrate(0.5)
    model.save_pretrained(tmp_path / 'again')
    assert close(RewardModel.from_pretrained(tmp_path / 'again').eval()(collate(seqs)), want - 0.5)


def test_a_deberta_classifier_and_a_new_deberta_reward_model(tmp_path):
    torch.manual_seed(0)
    classifier = transformers.DebertaV2ForSequenceClassification(deberta_config(num_labels=1)).eval()
    classifier.save_pretrained(tmp_path)
    seqs = sequences()
    want = torch.cat([classifier(whole(s)).logits for s in seqs])[:, 0]
    assert close(DebertaRM.from_pretrained(tmp_path).eval()(collate(seqs)), want)
    model = DebertaRM(config=deberta_config()).eval()
    alone = torch.cat([model(collate([s])) for s in seqs])
    assert close(model(collate(seqs)), alone), 'padding changed a score'
    assert close(alone, slow_scores(model, seqs, position=0))
    changed = deepcopy(seqs)
    changed[2].response_ids[-1] = 61
    assert not close(model(collate(changed))[2:], alone[2:], 1e-4), 'an encoder sees the end from its first token'


def test_a_whole_classifier_with_lora_trains_its_head():
    torch.manual_seed(0)
    classifier = transformers.BertForSequenceClassification(transformers.BertConfig(**SMALL, num_labels=1))
    model = RewardModel(classifier, lora_rank=2)
    trained = {n for n, p in model.named_parameters() if p.requires_grad}
    assert {'model.classifier.weight', 'model.classifier.bias'} < trained
    assert not any('embeddings' in n for n in trained) and any('lora_A' in n for n in trained)
    with pytest.raises(ValueError, match='whole classifier without a value head'):
        Critic.from_reward_model(model)


def test_folders_without_a_usable_head_are_refused(tmp_path):
    tiny_causal_lm('gpt2').save_pretrained(tmp_path / 'lm')
    with pytest.raises(ValueError, match=r'GPT2Model without a trained score head; for a new head use AutoRM'):
        RewardModel.from_pretrained(tmp_path / 'lm')
    assert GPTRM(pretrained=tmp_path / 'lm')(collate(sequences())).shape == (3,)
    three = transformers.AutoModelForSequenceClassification.from_config(tiny_config('gpt2', num_labels=3))
    three.save_pretrained(tmp_path / 'three')
    with pytest.raises(ValueError, match='has 3 labels; a reward model has 1, or 2'):
        RewardModel.from_pretrained(tmp_path / 'three')


def slow_values(critic, seqs, shift=0):
    values = []
    for s in seqs:
        with torch.no_grad():
            states = critic.model(torch.cat([s.prompt_ids, s.response_ids])[None]).last_hidden_state[0].double()
        head = deepcopy(critic.value_head).double()
        for i in range(len(s.response_ids)):
            values.append(head(states[len(s.prompt_ids) - 1 + i + shift])[0])
    return torch.stack(values).detach()


@pytest.mark.parametrize('family', FAMILIES)
def test_values_are_read_before_each_action_whatever_the_padding(family):
    critic, seqs = Critic(tiny_causal_lm(family).base_model, reward_head(32)).eval(), sequences()
    values = critic(collate(seqs))
    assert values.shape == (10,) and values.dtype == torch.float32
    assert close(values, slow_values(critic, seqs))
    assert not close(values, slow_values(critic, seqs, shift=1), 1e-2)
    wide = collate([*seqs, *sequences([(30, 20)], seed=1)], pad_id=9)
    assert close(critic(wide)[:10], values)


def test_a_causal_lm_gives_its_trunk():
    model = tiny_causal_lm('gpt2')
    critic = Critic(model)
    assert critic.model is model.transformer
    assert not any('lm_head' in n for n in critic.state_dict())


def test_opt_with_a_projection_has_the_projected_width():
    critic = OPTCritic(
        config=transformers.OPTConfig(**SIZES, word_embed_proj_dim=16, ffn_dim=32, do_layer_norm_before=False)
    )
    assert critic.value_head.in_features == 16
    assert critic(collate(sequences())).shape == (10,)


def test_how_heads_start():
    torch.manual_seed(0)
    width = 4096
    reward = reward_head(width)
    assert float(reward.weight.detach().std()) == pytest.approx(1 / math.sqrt(width + 1), rel=0.05)
    assert abs(float(reward.weight.detach().mean())) < 4 / width and float(reward.bias.detach()) == 0.0
    states = torch.randn(50, width)
    assert float(in_fp32(reward, states).detach().std()) == pytest.approx(1.0, rel=0.4)
    for head in (critic_head(width), mlp_head(width)):
        values = in_fp32(head, states).detach()
        assert 0 < float(values.abs().max()) < 0.02


def test_a_head_is_untrained_until_a_step_or_a_file(tmp_path):
    for made in (lambda: critic_head(8), lambda: CategoricalHead(8, 3, 0.0, 1.0)):
        head: Any = made()
        assert head.is_untrained and deepcopy(head).is_untrained and head.to(torch.bfloat16).is_untrained
        with torch.device('meta'):
            assert made().is_untrained
            save_head(head, head.state_dict(), tmp_path)
            assert not load_head(tmp_path).is_untrained
        assert not load_head(tmp_path).is_untrained
        head.weight.data[0, 0] += 1.0
        assert not head.is_untrained


@pytest.mark.parametrize(
    'head', [critic_head(16), mlp_head(16), nn.Sequential(nn.Linear(16, 4), nn.Tanh(), nn.Linear(4, 1))]
)
def test_a_head_cast_to_bf16_still_multiplies_in_fp32(head):
    head = head.to(torch.bfloat16)
    for parameter in head.parameters():
        nn.init.normal_(parameter)
    states = torch.randn(20, 16).to(torch.bfloat16)
    exact = deepcopy(head).double()(states.double())[:, 0]
    got = in_fp32(head, states)
    assert got.dtype == torch.float32 and close(got, exact, 1e-4)
    assert not close(head(states)[:, 0], exact, 1e-3)


def test_a_deberta_critic_sees_no_later_token():
    torch.manual_seed(0)
    critic = DebertaCritic(config=deberta_config()).eval()
    nn.init.normal_(critic.value_head.weight)
    seqs = sequences([(2, 6), (3, 1)])
    values = critic(collate(seqs))
    changed = deepcopy(seqs)
    changed[0].response_ids[3] = 60  # the state after action 3 is the first that may depend on it
    after = critic(collate(changed))
    assert close(after[:4], values[:4]) and not close(after[4:6], values[4:6], 1e-3)
    assert close(critic(collate(seqs[1:])), values[6:]), 'padding changed a value'
    with torch.no_grad():
        both_ways = critic.model(torch.cat([seqs[0].prompt_ids, seqs[0].response_ids])[None]).last_hidden_state[0]
    assert not close(in_fp32(critic.value_head, both_ways)[1:7], values[:6], 1e-3), 'uncut attention gives other values'


def test_encoders_that_cannot_be_cut_are_refused():
    with pytest.raises(ValueError, match='must not look ahead, and BertModel does'):
        Critic(transformers.BertModel(transformers.BertConfig(**SIZES)))
    with pytest.raises(ValueError, match='must not look ahead'):
        DebertaCritic(config=deberta_config(conv_kernel_size=3))
    with pytest.raises(ValueError, match='a Linear given; it must be a transformers PreTrainedModel'):
        Critic(nn.Linear(2, 2))


@pytest.mark.parametrize('head', [critic_head, mlp_head])
def test_a_critic_survives_a_folder(head, tmp_path):
    critic, batch = Critic(tiny_causal_lm('llama'), head(32), lora_rank=2).eval(), collate(sequences())
    for tensor in (*critic.value_head.parameters(), *(layer.lora_B for layer in lora_layers(critic).values())):
        nn.init.normal_(tensor)
    critic.save_pretrained(tmp_path)
    again = Critic.from_pretrained(tmp_path).eval()
    assert close(again(batch), critic(batch), 1e-4) and not lora_layers(again)
    with pytest.raises(ValueError, match="family 'gpt2'.*'llama'; use AutoCritic"):
        GPTCritic.from_pretrained(tmp_path)


def test_a_head_without_bias_survives_a_folder(tmp_path):
    """GPT-2's classifier has none, nor has the critic that starts from it."""
    config = transformers.GPT2Config(vocab_size=64, n_positions=32, n_embd=16, n_layer=1, n_head=2, num_labels=1)
    reward_model = RewardModel.from_classifier(transformers.GPT2ForSequenceClassification(config))
    critic = Critic.from_reward_model(reward_model).eval()
    critic.save_pretrained(tmp_path)
    again, batch = Critic.from_pretrained(tmp_path).eval(), collate(sequences())
    assert torch.equal(again(batch), critic(batch)) and not again.value_head.bias.any()
    reward_model.calibrate(0.5)
    found = centred_head(reward_model.state_dict())
    assert torch.equal(found['weight'], reward_model.value_head.weight) and found['bias'].tolist() == [-0.5]


def test_a_critic_from_a_reward_model_values_the_end_at_its_score():
    reward_model = RewardModel(tiny_causal_lm('gpt2'))
    reward_model.calibrate(0.75)
    critic = Critic.from_reward_model(reward_model)
    one = sequences([(3, 4)])
    longer = deepcopy(one)
    longer[0].response_ids = torch.cat([longer[0].response_ids, torch.tensor([2])])
    longer[0].response_mask = torch.ones(5, dtype=torch.bool)
    assert close(critic(collate(longer))[-1:], reward_model(collate(one)))
    with torch.no_grad():
        critic.value_head.weight.zero_()
    assert float(reward_model.value_head.weight.detach().abs().sum()) > 0, 'the two share their head'


def test_the_folder_of_a_critic_that_started_from_a_reward_model_is_that_of_a_critic(tmp_path):
    """Its head has the shift of the scores, which must not be subtracted again."""
    scorer = RewardModel(tiny_causal_lm('gpt2'), mlp_head(32))
    scorer.calibrate(0.75)
    scorer.save_pretrained(tmp_path / 'scorer')
    critic = Critic.from_reward_model(RewardModel.from_pretrained(tmp_path / 'scorer')).eval()
    critic.save_pretrained(tmp_path / 'critic')
    assert [is_scorer(f, load_config(f)) for f in (tmp_path / 'scorer', tmp_path / 'critic')] == [True, False]
    batch = collate(sequences([(3, 4)]))
    assert torch.equal(Critic.from_pretrained(tmp_path / 'critic').eval()(batch), critic(batch))
