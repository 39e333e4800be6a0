"""Written folders: the dtype of the model's original folder (heads, and tensors that must, stay in fp32), no heads of
an earlier model, and permissions by the umask."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from model_cases import SIZES, sequences
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from chatgpt.batching import collate
from chatgpt.nn import (
    GPTRM,
    Actor,
    AutoActor,
    AutoCritic,
    AutoRM,
    Critic,
    GPTActor,
    GPTCritic,
    ILQLModel,
    RewardModel,
    mlp_head,
)
from chatgpt.nn.loading import trunk_of, write_folder
from chatgpt.nn.lora import convert_to_lora
from chatgpt.nn.peft_format import export_peft
from chatgpt.nn.reward_model import load_scorer
from chatgpt.nn.shared import SharedTrunk
from chatgpt.strategies import NaiveStrategy
from chatgpt.strategies.checkpoint.files import save_tensors
from chatgpt.strategies.checkpoint.writer import write_checkpoint
from chatgpt.strategies.registry import strategy_by_name
from chatgpt.testing import char_tokenizer, tiny_causal_lm, tiny_config
from chatgpt.testing.processes import run_distributed
from chatgpt.trainer.saving import save_pretrained


def folder_in(dtype: torch.dtype, folder: Path, family: str = 'llama', **kw: Any) -> Any:
    model = tiny_causal_lm(family, **kw)
    model.to(dtype).save_pretrained(folder)
    return model


def dtypes(folder: Path) -> set[torch.dtype]:
    return {t.dtype for t in load_file(folder / 'model.safetensors').values()}


def config_dtype(folder: Path) -> str:
    return str(json.loads((folder / 'config.json').read_text())['dtype'])


@torch.no_grad()
def train(model: Any) -> None:
    """A step with results that 16 bits cannot represent exactly."""
    for parameter in model.parameters():
        parameter.mul_(1.0001)


@pytest.mark.parametrize(
    ('cls', 'dtype'),
    [(AutoActor, torch.bfloat16), (AutoActor, torch.float32), (AutoCritic, torch.float16), (AutoRM, torch.bfloat16)],
)
def test_each_model_keeps_the_folders_dtype(cls: Any, dtype: torch.dtype, tmp_path: Path) -> None:
    folder_in(dtype, tmp_path / 'base')
    model = cls(tmp_path / 'base')
    with torch.device('meta'):  # also if the weights are loaded later
        assert cls(tmp_path / 'base').model.weights_source.dtype is dtype
    assert all(p.dtype is torch.float32 for p in model.parameters())
    train(model)
    model.save_pretrained(tmp_path / 'out', char_tokenizer())
    heads = {torch.float32} if cls is AutoRM else set()
    assert dtypes(tmp_path / 'out') == {dtype} | heads
    assert config_dtype(tmp_path / 'out') == str(dtype).removeprefix('torch.')
    got = {n.split('layers.')[-1]: t for n, t in load_file(tmp_path / 'out' / 'model.safetensors').items()}
    want = {n.split('layers.')[-1]: p for n, p in model.model.named_parameters()}
    name = '0.self_attn.q_proj.weight'
    assert torch.equal(got[name], want[name].detach().to(dtype))  # rounded once
    if cls is AutoActor:
        model.save_pretrained(tmp_path / 'half', dtype=torch.float16)
        assert dtypes(tmp_path / 'half') == {torch.float16} and config_dtype(tmp_path / 'half') == 'float16'


def test_heads_of_values_and_scores_are_exact(tmp_path: Path) -> None:
    folder_in(torch.bfloat16, tmp_path / 'base')
    kinds = ((Critic, {}), (RewardModel, {}), (RewardModel, {'value_head': mlp_head(32)}), (ILQLModel, {}))
    for number, (cls, kw) in enumerate(kinds):
        out, after = tmp_path / f'out{number}', tmp_path / f'again{number}'
        model = cls(AutoActor(tmp_path / 'base').model, **kw)
        train(model)
        model.save_pretrained(out, char_tokenizer())
        if cls is RewardModel and not kw:
            classifier = AutoModelForSequenceClassification.from_pretrained(out)
            assert next(classifier.parameters()).dtype is torch.bfloat16
        again = cls.from_pretrained(out)
        for (name, mine), (_, theirs) in zip(model.named_parameters(), again.named_parameters(), strict=True):
            if 'head' in name and 'lm_head' not in name and 'bias' not in name:
                assert torch.equal(mine, theirs), name
        again.save_pretrained(after, char_tokenizer())
        files = [sorted(p.name for p in f.glob('*.safetensors')) for f in (out, after)]
        assert files[0] == files[1]
        for file in files[0]:
            one, two = (load_file(f / file) for f in (out, after))
            assert one.keys() == two.keys() and all(torch.equal(one[n], two[n]) for n in one), file


def test_tied_heads_stay_one_tensor_and_lora_is_folded_in_before_rounding(tmp_path: Path) -> None:
    folder_in(torch.bfloat16, tmp_path / 'base', 'gpt2')
    actor = AutoActor(tmp_path / 'base', lora_rank=2)
    train(actor)
    torch.nn.init.normal_(actor.model.transformer.h[0].attn.c_attn.lora_B)
    actor.save_pretrained(tmp_path / 'out')
    names = load_file(tmp_path / 'out' / 'model.safetensors')
    assert 'lm_head.weight' not in names
    layer = actor.model.transformer.h[0].attn.c_attn
    want = layer.weight + (layer.lora_B @ layer.lora_A).T * layer.scaling
    assert torch.equal(names['transformer.h.0.attn.c_attn.weight'], want.detach().bfloat16())
    size = sum(t.numel() for t in names.values())
    assert (tmp_path / 'out' / 'model.safetensors').stat().st_size < 2 * size + 20_000


def test_what_the_files_say_counts_tensor_by_tensor(tmp_path: Path) -> None:
    folder_in(torch.float32, tmp_path / 'wide')
    config = json.loads((tmp_path / 'wide' / 'config.json').read_text())
    (tmp_path / 'wide' / 'config.json').write_text(json.dumps(config | {'dtype': 'bfloat16'}))
    AutoActor(tmp_path / 'wide').save_pretrained(tmp_path / 'out')
    assert dtypes(tmp_path / 'out') == {torch.float32} and config_dtype(tmp_path / 'out') == 'float32'
    # shared trunks are in 16 bits by choice
    write_folder(SharedTrunk.from_pretrained(tmp_path / 'wide', dtype=torch.bfloat16).model, tmp_path / 'trunk')
    assert torch.bfloat16 in dtypes(tmp_path / 'trunk')
    folder_in(torch.bfloat16, tmp_path / 'base')
    path = tmp_path / 'base' / 'model.safetensors'
    tensors = {n: t.clone() for n, t in load_file(path).items()}
    name = 'model.layers.1.input_layernorm.weight'
    tensors[name] = tensors[name].float() * 1.0001
    save_file(tensors, path, metadata={'format': 'pt'})
    for cls in (AutoActor, AutoCritic):
        cls(tmp_path / 'base').save_pretrained(tmp_path / 'out')
        out = load_file(tmp_path / 'out' / 'model.safetensors')
        kept = {n for n, t in out.items() if t.dtype is torch.float32}
        assert kept == {name if cls is AutoActor else name.removeprefix('model.')}
        assert torch.equal(out[kept.pop()], tensors[name])


def save_prepared(name: str, base: str, out: str) -> None:
    with strategy_by_name(name) as strategy:
        for rank, kind in ((0, ''), (2, '-lora')):
            with strategy.model_init_context():
                actor = AutoActor(base, lora_rank=rank)
            trained = [p for p in actor.parameters() if p.requires_grad]
            actor = strategy.prepare((actor, torch.optim.SGD(trained, lr=0.0)))[0]
            with torch.no_grad():
                for parameter in actor.parameters():
                    if parameter.requires_grad:
                        parameter.mul_(1.001)  # lost in bf16
            save_pretrained(strategy, actor, f'{out}{kind}')
            save_pretrained(strategy, actor, f'{out}{kind}-half', dtype=torch.bfloat16)


@pytest.mark.parametrize('name', ['naive', 'fsdp'])
def test_under_a_strategy(name: str, tmp_path: Path) -> None:
    base = folder_in(torch.bfloat16, tmp_path / 'base')
    if name == 'naive':
        save_prepared(name, str(tmp_path / 'base'), str(tmp_path / 'out'))
    else:
        run_distributed(save_prepared, 2, name, str(tmp_path / 'base'), str(tmp_path / 'out'))
    for kind, change in (('', 1.001), ('-lora', 1.0)):
        for folder, dtype in ((f'out{kind}', torch.float32), (f'out{kind}-half', torch.bfloat16)):
            assert dtypes(tmp_path / folder) == {dtype}
            assert config_dtype(tmp_path / folder) == str(dtype).removeprefix('torch.')
            again = dict(AutoModelForCausalLM.from_pretrained(tmp_path / folder).named_parameters())
            for name, tensor in base.named_parameters():
                want = (tensor.float() * change).to(dtype).float()
                torch.testing.assert_close(again[name].float(), want, rtol=1e-6, atol=0, msg=name)


@pytest.mark.parametrize(('rank', 'dtype'), [(0, torch.float32), (2, torch.bfloat16)])
def test_adapters_on_a_base_in_16_bits_are_written_in_its_dtype(rank: int, dtype: torch.dtype, tmp_path: Path) -> None:
    folder_in(torch.bfloat16, tmp_path / 'base')
    with NaiveStrategy(precision='bf16') as strategy:
        actor = AutoActor(tmp_path / 'base', lora_rank=rank, num_layers_unfrozen=None if rank else 1)
        trained = [p for p in actor.parameters() if p.requires_grad]
        actor = strategy.prepare((actor, torch.optim.SGD(trained, lr=0.0)))[0]
        for parameter in actor.parameters():
            parameter.data = parameter.data if parameter.requires_grad else parameter.data.bfloat16()
        save_pretrained(strategy, actor, tmp_path / 'out')
    assert dtypes(tmp_path / 'out') == {dtype}


def test_experts_of_a_mixture(tmp_path: Path) -> None:
    """Fused in the model, separate in the files."""
    config = transformers.MixtralConfig(**SIZES, num_key_value_heads=2, num_local_experts=4)
    AutoModelForCausalLM.from_config(config).to(torch.bfloat16).save_pretrained(tmp_path / 'base')
    AutoActor(tmp_path / 'base').save_pretrained(tmp_path / 'out')
    one, two = (load_file(tmp_path / f / 'model.safetensors') for f in ('base', 'out'))
    assert one.keys() == two.keys() and all(torch.equal(one[n], two[n]) for n in one)
    assert dtypes(tmp_path / 'out') == {torch.bfloat16}


BATCH = collate(sequences([(2, 3)]))


def earlier_critic(folder, family):
    critic = Critic(trunk_of(tiny_causal_lm(family)))
    nn.init.normal_(critic.value_head.weight)
    critic.save_pretrained(folder)
    assert (folder / 'value_head.safetensors').is_file()
    return critic.eval()


@pytest.mark.parametrize('family', ['gpt2', 't5'])
def test_an_actor_over_a_critic_has_no_values(family, tmp_path):
    earlier_critic(tmp_path, family)
    model = tiny_causal_lm(family, seed=1)
    Actor(model).save_pretrained(tmp_path)
    again = Actor.from_pretrained(tmp_path).eval()
    assert again.value_head is None and again(BATCH).values is None
    torch.testing.assert_close(again(BATCH).logprobs, Actor(model)(BATCH).logprobs)


def test_heads_of_an_earlier_model_are_gone(tmp_path):
    earlier_critic(tmp_path / 'one', 'gpt2')
    ILQLModel(tiny_causal_lm('gpt2', seed=1)).save_pretrained(tmp_path / 'one')
    assert Actor.from_pretrained(tmp_path / 'one').value_head is None
    Actor(tiny_causal_lm('gpt2', seed=2)).save_pretrained(tmp_path / 'one')
    assert len(ILQLModel.from_pretrained(tmp_path / 'one', two_qs=False).q_heads) == 1  # not the earlier two
    tiny_causal_lm('gpt2').save_pretrained(tmp_path / 'base')
    earlier_critic(tmp_path / 'adapter', 'gpt2')
    for name in ('model.safetensors', 'config.json'):  # files that an adapter's folder does not have
        (tmp_path / 'adapter' / name).unlink()
    actor = Actor.from_pretrained(tmp_path / 'base')
    convert_to_lora(actor.model, 2)
    export_peft(actor, tmp_path / 'adapter')
    assert load_scorer(tmp_path / 'adapter').head is None


def test_an_adapter_beside_its_base_leaves_the_base_its_head(tmp_path):
    earlier = earlier_critic(tmp_path, 'gpt2')
    adapted = Critic.from_pretrained(tmp_path)
    convert_to_lora(adapted.model, 2)
    export_peft(adapted, tmp_path)
    assert (tmp_path / 'adapter_model.safetensors').is_file()
    torch.testing.assert_close(Critic.from_pretrained(tmp_path).eval()(BATCH), earlier(BATCH))


def test_a_save_that_transformers_refuses_leaves_the_earlier_critic_whole(tmp_path, monkeypatch):
    earlier = earlier_critic(tmp_path, 'gpt2')
    model = tiny_causal_lm('gpt2', seed=1)

    def refuses(*given: Any, **more: Any) -> None:
        raise ValueError('not valid')

    monkeypatch.setattr(type(model), 'save_pretrained', refuses)
    with pytest.raises(ValueError, match='not valid'):
        Actor(model).save_pretrained(tmp_path)
    torch.testing.assert_close(Critic.from_pretrained(tmp_path).eval()(BATCH), earlier(BATCH))


def test_files_have_the_rights_that_the_umask_leaves(tmp_path):
    config = tiny_config('gpt2')
    strategy, layer = NaiveStrategy(), torch.nn.Linear(3, 2)
    pieces = {'': strategy.model_pieces(strategy.prepare(layer))}
    before = os.umask(0o027)
    try:
        GPTActor(config=config, value_head=True).save_pretrained(tmp_path / 'actor')
        GPTCritic(config=config).save_pretrained(tmp_path / 'critic')
        GPTRM(config=config).save_pretrained(tmp_path / 'rm')
        ILQLModel(GPTActor(config=config).model).save_pretrained(tmp_path / 'ilql')
        export_peft(GPTActor(config=config, lora_rank=2), tmp_path / 'adapter')
        gather = strategy.all_gather_object
        write_checkpoint(tmp_path / 'checkpoint', pieces, meta={'kind': 'model'}, rank=0, all_gather_object=gather)
        save_tensors(layer.state_dict(), tmp_path / 'weights.safetensors')
        save_tensors(layer.state_dict(), tmp_path / 'weights.pt')
    finally:
        os.umask(before)
    found = {str(path): path.stat().st_mode & 0o777 for path in tmp_path.rglob('*') if path.is_file()}
    assert sum(name.endswith('.safetensors') for name in found) >= 9
    assert set(found.values()) == {0o640}, found
