"""TRL's models with a value head: loading, saving, and errors and warnings for unsupported arguments."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from chatgpt.nn import Actor
from chatgpt.testing.fakes import tiny_causal_lm
from chatgpt_compat.trl.models import (
    AutoModelForCausalLMWithValueHead,
    AutoModelForSeq2SeqLMWithValueHead,
    create_reference_model,
    read_head,
)

IDS = torch.tensor([[5, 9, 12, 7], [8, 3, 30, 4]])
WEIGHT, BIAS = 'v_head.summary.weight', 'v_head.summary.bias'


@pytest.fixture(scope='module')
def base(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp('models') / 'base'
    tiny_causal_lm('gpt2').save_pretrained(folder)
    return str(folder)


def head(seed: int = 3) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {WEIGHT: torch.randn((1, 32), generator=generator), BIAS: torch.tensor([0.25])}


def test_forward_is_the_model_and_the_head_on_its_last_state(base: str) -> None:
    model = AutoModelForCausalLMWithValueHead.from_pretrained(base).eval()
    logits, loss, values = model(IDS, labels=IDS)
    out = model.pretrained_model(IDS, labels=IDS, output_hidden_states=True)
    torch.testing.assert_close(logits, out.logits)
    torch.testing.assert_close(loss, out.loss)
    weight, bias = model.v_head.summary.weight, model.v_head.summary.bias
    slow = [[float(state @ weight[0] + bias) for state in row] for row in out.hidden_states[-1]]
    torch.testing.assert_close(values, torch.tensor(slow))
    assert len(model(IDS, return_past_key_values=True)) == 4
    assert model.generate(IDS, max_new_tokens=2, do_sample=False, pad_token_id=0).shape == (2, 6)


@pytest.mark.parametrize('family', ['gpt2', 'opt', 'bloom', 'llama'])
def test_values_are_those_of_the_actor_that_is_trained(family: str) -> None:
    from chatgpt.batching import collate
    from chatgpt.types import Sequence

    model = AutoModelForCausalLMWithValueHead.from_pretrained(tiny_causal_lm(family)).eval()
    logits, _, values = model(IDS)
    actor = Actor(model.pretrained_model, value_head=model.v_head).eval()
    rows = [
        Sequence(prompt_ids=row[:1], response_ids=row[1:], response_mask=torch.ones(3, dtype=torch.bool)) for row in IDS
    ]
    out = actor(collate(rows))
    torch.testing.assert_close(out.values, values[:, :-1].flatten(), rtol=1e-5, atol=1e-6)
    expected = logits.log_softmax(-1)[:, :-1].gather(2, IDS[:, 1:, None]).flatten()
    torch.testing.assert_close(out.logprobs, expected, rtol=1e-5, atol=1e-6)


def test_saved_folders_are_read_by_trl_and_the_library(base: str, tmp_path: Path) -> None:
    model = AutoModelForCausalLMWithValueHead.from_pretrained(base)
    model.load_state_dict(head(), strict=False)
    model.save_pretrained(tmp_path)
    written = load_file(tmp_path / 'model.safetensors')
    assert torch.equal(written[WEIGHT], head()[WEIGHT]) and torch.equal(written[BIAS], head()[BIAS])
    assert 'transformer.h.0.ln_1.weight' in written  # without a prefix, so that transformers reads it, too
    actor: Any = Actor.from_pretrained(tmp_path)
    assert torch.equal(actor.value_head.weight, head()[WEIGHT])
    again = AutoModelForCausalLMWithValueHead.from_pretrained(tmp_path)
    for name, tensor in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name


def test_heads_are_read_from_every_file_that_trl_wrote(base: str, tmp_path: Path) -> None:
    weights = tiny_causal_lm('gpt2').state_dict()
    weights.pop('lm_head.weight')  # tied
    kinds = {}
    for kind in ('safetensors', 'sharded', 'pickled', 'sharded pickled', 'ours', 'none'):
        folder = tmp_path / kind
        tiny_causal_lm('gpt2').config.save_pretrained(folder)
        kinds[kind] = folder
    save_file(weights | head(1), kinds['safetensors'] / 'model.safetensors', metadata={'format': 'pt'})
    shards = {'1.safetensors': dict(list(weights.items())[:9]), '2.safetensors': dict(list(weights.items())[9:])}
    shards['2.safetensors'] |= head(2)
    for name, shard in shards.items():
        save_file(shard, kinds['sharded'] / f'model-{name}', metadata={'format': 'pt'})
    places = {tensor: f'model-{name}' for name, shard in shards.items() for tensor in shard}
    index = {'metadata': {}, 'weight_map': places}
    (kinds['sharded'] / 'model.safetensors.index.json').write_text(json.dumps(index))
    torch.save(weights | head(3), kinds['pickled'] / 'pytorch_model.bin')
    for name, shard in shards.items():
        torch.save(shard, kinds['sharded pickled'] / f'pytorch_model-{name[0]}.bin')
    places = {tensor: f'pytorch_model-{name[0]}.bin' for name, shard in shards.items() for tensor in shard}
    index = {'metadata': {}, 'weight_map': places}
    (kinds['sharded pickled'] / 'pytorch_model.bin.index.json').write_text(json.dumps(index))
    Actor(tiny_causal_lm('gpt2'), value_head=True).save_pretrained(kinds['ours'])
    tiny_causal_lm('gpt2').save_pretrained(kinds['none'])
    seeds = {'safetensors': 1, 'sharded': 2, 'pickled': 3, 'sharded pickled': 2}
    original = tiny_causal_lm('gpt2')
    with torch.no_grad():
        expected = original(IDS).logits
    for kind, folder in kinds.items():
        model = AutoModelForCausalLMWithValueHead.from_pretrained(str(folder)).eval()
        torch.testing.assert_close(model(IDS)[0], expected)
        if kind in seeds:
            assert torch.equal(model.v_head.summary.weight, head(seeds[kind])[WEIGHT]), kind
    assert read_head(str(kinds['none'])) is None
    ours: Any = Actor.from_pretrained(kinds['ours'])
    read = AutoModelForCausalLMWithValueHead.from_pretrained(str(kinds['ours']))
    assert torch.equal(read.v_head.summary.weight, ours.value_head.weight)


class Evil:
    def __reduce__(self) -> Any:
        return (Path.touch, (Path('ran-a-pickle'),))


def test_a_pickle_that_is_more_than_tensors_is_refused(
    base: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    tiny_causal_lm('gpt2').save_pretrained('folder')
    torch.save({WEIGHT: Evil()}, 'folder/pytorch_model.bin')
    with pytest.raises(ValueError, match='nothing else is unpickled'):
        AutoModelForCausalLMWithValueHead.from_pretrained('folder')
    Path('folder/model.safetensors').unlink()
    with pytest.raises(Exception, match='(?i)weights.only|unpickl|safetensors'):
        AutoModelForCausalLMWithValueHead.from_pretrained('folder')
    assert not Path('ran-a-pickle').exists()


def test_head_options(base: str) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLMWithValueHead.from_pretrained(
        base, summary_dropout_prob=0.3, v_head_init_strategy='normal', v_head_initializer_range=4.0
    )
    assert model.v_head.dropout.p == 0.3
    assert float(model.v_head.summary.bias) == 0.0
    assert 2.5 < float(model.v_head.summary.weight.std()) < 5.5
    plain = AutoModelForCausalLMWithValueHead.from_pretrained(base, summary_dropout_prob=0.0)
    assert not isinstance(plain.v_head.dropout, torch.nn.Dropout)
    assert float(plain.v_head.summary.weight.abs().max()) <= 32**-0.5  # as nn.Linear initialises
    with pytest.raises(ValueError, match="'normal'"):
        AutoModelForCausalLMWithValueHead.from_pretrained(base, v_head_init_strategy='other')


@pytest.mark.parametrize('name', ['device_map', 'load_in_8bit', 'load_in_4bit', 'quantization_config', 'max_memory'])
def test_arguments_without_effect_give_a_warning(base: str, name: str) -> None:
    with pytest.warns(UserWarning, match=name):
        AutoModelForCausalLMWithValueHead.from_pretrained(base, **{name: 'auto'})


def test_harmless_arguments_give_no_warning(base: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter('error', UserWarning)
        options = {'device_map': None, 'load_in_8bit': False, 'low_cpu_mem_usage': True, 'torch_dtype': 'auto'}
        AutoModelForCausalLMWithValueHead.from_pretrained(base, **options)


def test_mistakes(base: str) -> None:
    with pytest.raises(ValueError, match='output_loading_info'):
        AutoModelForCausalLMWithValueHead.from_pretrained(base, output_loading_info=True)
    with pytest.raises(ValueError, match='reward_adapter: never_there has no adapter_model.safetensors'):
        AutoModelForCausalLMWithValueHead.from_pretrained(base, reward_adapter='never_there')
    with pytest.raises(ValueError, match='compute_reward_score needs reward_adapter='):
        AutoModelForCausalLMWithValueHead.from_pretrained(base).compute_reward_score(torch.ones(1, 2, dtype=torch.long))
    with pytest.raises(ValueError, match='a list given'):
        AutoModelForCausalLMWithValueHead.from_pretrained([])
    with pytest.raises(ValueError, match='is no encoder-decoder: use AutoModelForCausalLMWithValueHead'):
        AutoModelForSeq2SeqLMWithValueHead.from_pretrained(base)
    with pytest.raises(ValueError, match='is an encoder-decoder: use AutoModelForSeq2SeqLMWithValueHead'):
        AutoModelForCausalLMWithValueHead(tiny_causal_lm('t5'))
    with pytest.raises(ValueError, match='no language-model head'):
        AutoModelForCausalLMWithValueHead(tiny_causal_lm('gpt2').transformer)


@pytest.mark.parametrize('dtype', [torch.bfloat16, 'float16'])
def test_16_bits_are_the_precision_of_the_trainer(base: str, dtype: Any) -> None:
    model = AutoModelForCausalLMWithValueHead.from_pretrained(base, torch_dtype=dtype)
    assert model.pretrained_model.dtype == torch.float32
    assert model.precision == ('bf16' if dtype == torch.bfloat16 else 'fp16')
    half = AutoModelForCausalLMWithValueHead(tiny_causal_lm('gpt2').bfloat16())
    assert half.precision == 'bf16' and half.pretrained_model.dtype == torch.float32


# ---------------------------------------------------------------- adapters


def test_adapters_of_peft_and_ours_are_the_same(tmp_path: Path, base: str) -> None:
    peft = pytest.importorskip('peft')
    config = peft.LoraConfig(r=4, lora_alpha=12, target_modules=['c_attn', 'c_proj'], fan_in_fan_out=True)
    torch.manual_seed(0)
    theirs = peft.get_peft_model(tiny_causal_lm('gpt2'), config)
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            if 'lora_B' in name:
                parameter.normal_(std=0.1)
        expected = theirs(IDS).logits.clone()
    model = AutoModelForCausalLMWithValueHead.from_pretrained(theirs).eval()
    assert model.is_peft_model
    torch.testing.assert_close(model(IDS)[0], expected, rtol=1e-5, atol=1e-5)
    model.pretrained_model.config._name_or_path = base
    model.pretrained_model.name_or_path = base
    model.save_pretrained(tmp_path)
    assert set(model.state_dict()) == {WEIGHT, BIAS}
    read = peft.PeftModel.from_pretrained(tiny_causal_lm('gpt2'), tmp_path)  # read by peft
    with torch.no_grad():
        torch.testing.assert_close(read(IDS).logits, expected, rtol=1e-5, atol=1e-5)
    state = torch.load(tmp_path / 'pytorch_model.bin', weights_only=True)  # where TRL looks for the head
    assert torch.equal(state[WEIGHT], model.v_head.summary.weight)
    again = AutoModelForCausalLMWithValueHead.from_pretrained(str(tmp_path)).eval()
    torch.testing.assert_close(again(IDS)[2], model(IDS)[2], rtol=1e-5, atol=1e-6)


def test_the_numbers_of_peft_config(base: str) -> None:
    peft = pytest.importorskip('peft')
    model = AutoModelForCausalLMWithValueHead.from_pretrained(
        base, peft_config=peft.LoraConfig(r=4, lora_alpha=16, lora_dropout=0.1, use_rslora=True)
    )
    layer = model.pretrained_model.transformer.h[0].attn.c_attn
    assert layer.scaling == pytest.approx(16 / 2)  # alpha / sqrt(r)
    assert layer.lora_dropout.p == 0.1
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert {WEIGHT, BIAS} <= trained and all('lora_' in name for name in trained - {WEIGHT, BIAS})
    with pytest.raises(ValueError, match='use_dora'):
        AutoModelForCausalLMWithValueHead.from_pretrained(base, peft_config=peft.LoraConfig(use_dora=True))
    with pytest.raises(ValueError, match='PREFIX_TUNING'):
        AutoModelForCausalLMWithValueHead.from_pretrained(base, peft_config=peft.PrefixTuningConfig())


# ---------------------------------------------------------------- the reference


@pytest.mark.parametrize('family', ['gpt2', 'opt', 'bloom', 'llama'])
def test_reference_shares_the_first_blocks(family: str) -> None:
    model = AutoModelForCausalLMWithValueHead.from_pretrained(tiny_causal_lm(family, layers=3))
    reference = create_reference_model(model, num_shared_layers=2)
    assert not reference.training and not any(p.requires_grad for p in reference.parameters())
    for (name, mine), (_, other) in zip(model.named_parameters(), reference.named_parameters(), strict=True):
        shared = mine is other
        assert shared != mine.requires_grad, name
        if '.0.' in name or '.1.' in name:
            assert shared, name
        if '.2.' in name or 'v_head' in name:
            assert not shared, name


def test_reference_as_a_copy_and_by_pattern() -> None:
    model = AutoModelForCausalLMWithValueHead.from_pretrained(tiny_causal_lm('gpt2', layers=3))
    reference = create_reference_model(model)
    assert all(p is not q for p, q in zip(model.parameters(), reference.parameters(), strict=True))
    assert all(p.requires_grad for p in model.parameters())
    reference = create_reference_model(model, num_shared_layers=1, pattern='transformer.h.{layer}')
    assert (
        model.pretrained_model.transformer.h[0].ln_1.weight is reference.pretrained_model.transformer.h[0].ln_1.weight
    )
    assert model.pretrained_model.transformer.h[1].ln_1.weight.requires_grad
    with pytest.raises(ValueError, match='no parameter'):
        create_reference_model(model, num_shared_layers=7)
    with pytest.raises(ValueError, match='layers.1'):
        create_reference_model(model, num_shared_layers=1, pattern='layers.{layer}')
    plain = create_reference_model(tiny_causal_lm('gpt2'))  # without a head, as in DPO scripts
    assert not any(p.requires_grad for p in plain.parameters())


def test_scores_of_a_reward_adapter(base: str, tmp_path: Path) -> None:
    """They equal those of PEFT's model; the adapter is neither trained nor saved."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForSequenceClassification

    torch.manual_seed(0)
    classifier = AutoModelForSequenceClassification.from_pretrained(base, num_labels=2)
    adapter = get_peft_model(classifier, LoraConfig(r=2, task_type='SEQ_CLS', init_lora_weights=False))
    adapter.save_pretrained(tmp_path / 'rm')
    plain = AutoModelForCausalLMWithValueHead.from_pretrained(base)
    model = AutoModelForCausalLMWithValueHead.from_pretrained(base, reward_adapter=str(tmp_path / 'rm'))
    ids = torch.tensor([[3, 4, 5, 6], [7, 8, 9, 10]])
    scores = model.compute_reward_score(input_ids=ids, attention_mask=torch.ones_like(ids))
    adapter.eval()
    with torch.no_grad():
        hidden = adapter.base_model.model.transformer(ids).last_hidden_state
        expected = adapter.base_model.model.score(hidden)
    torch.testing.assert_close(scores, expected, atol=1e-5, rtol=1e-5)
    assert model.state_dict().keys() == plain.state_dict().keys()
    assert len(list(model.parameters())) == len(list(plain.parameters()))
