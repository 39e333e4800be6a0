"""PEFT's adapter format: peft loads our files and we load peft's, with equal logits, also for mixtures of experts and
state-space models, or with an error."""

from __future__ import annotations

import copy
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from model_cases import SIZES, disturb, logits
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM

from chatgpt.nn import AutoActor, AutoCritic, initial_tensors, load_config, load_tokenizer
from chatgpt.nn.lora import convert_to_lora, has_lora, lora_layers, lora_state_dict
from chatgpt.nn.peft_format import CONFIG_FILE, WEIGHTS_FILE, check_export, export_peft, import_peft
from chatgpt.testing.fakes import byte_tokenizer, tiny_causal_lm

pytestmark = pytest.mark.filterwarnings('ignore:LoRA. adapters stand beside')


@pytest.fixture(scope='module')
def peft() -> Any:
    try:
        import peft
    except Exception as error:  # an incompatible transformers fails in many ways
        pytest.skip(f'peft cannot be imported: {type(error).__name__}: {error}')
    return peft


def adapted(base: nn.Module, **kw: Any) -> nn.Module:
    model = copy.deepcopy(base)
    convert_to_lora(model, 2, **{'alpha': 6, **kw})
    disturb(model)
    return model


def config_of(folder: Path, **changes: Any) -> dict[str, Any]:
    """Returns an adapter's settings, after writing `changes` into its folder."""
    config = json.loads((folder / CONFIG_FILE).read_text()) | changes
    if changes:
        (folder / CONFIG_FILE).write_text(json.dumps(config))
    return config


# c_proj exists twice in a block, and c_attn in h.0 too
SOME = [r'transformer\.h\.1\.attn\.c_attn', 'c_fc']


@pytest.mark.parametrize(
    ('family', 'given'),
    [('gpt2', {'bias': 'all'}), ('gpt2', {'targets': SOME}), ('llama', {}), ('llama', {'bias': 'lora_only'})],
)
def test_peft_loads_what_we_write(peft: Any, family: str, given: dict[str, Any], tmp_path: Path) -> None:
    base = tiny_causal_lm(family, hidden=16)
    model = adapted(base, **given)
    export_peft(model, tmp_path)
    theirs = peft.PeftModel.from_pretrained(copy.deepcopy(base), tmp_path)
    torch.testing.assert_close(logits(theirs), logits(model), rtol=1e-5, atol=1e-6)
    assert not torch.allclose(logits(theirs), logits(base), atol=1e-3)
    found = {n.removeprefix('base_model.model.') for n, m in theirs.named_modules() if hasattr(m, 'lora_A')}
    assert found == set(lora_layers(model)) and (len(found) == 3) == ('targets' in given)
    assert config_of(tmp_path)['fan_in_fan_out'] == (family == 'gpt2')
    config_of(tmp_path, lora_alpha=2)  # negative control: another scaling
    wrong = peft.PeftModel.from_pretrained(copy.deepcopy(base), tmp_path)
    assert not torch.allclose(logits(wrong), logits(model), atol=1e-3)


@pytest.mark.parametrize(
    ('family', 'targets', 'rslora'),
    [('gpt2', ['c_attn', 'c_fc'], False), ('llama', ['q_proj', 'v_proj'], True), ('llama', 'all-linear', False)],
)
def test_we_load_what_peft_writes(peft: Any, family: str, targets: Any, rslora: bool, tmp_path: Path) -> None:
    base = tiny_causal_lm(family, hidden=16)
    saves_biases = tuple(map(int, peft.__version__.split('.')[:2])) >= (0, 21)  # earlier versions omit a layer's bias
    settings = {'r': 4, 'lora_alpha': 12, 'use_rslora': rslora, 'bias': 'lora_only' if saves_biases else 'none'}
    form = {'target_modules': targets, 'task_type': 'CAUSAL_LM', 'fan_in_fan_out': family == 'gpt2'}
    theirs = peft.get_peft_model(copy.deepcopy(base), peft.LoraConfig(**settings, **form)).eval()
    disturb(theirs)
    theirs.save_pretrained(tmp_path)
    model = copy.deepcopy(base)
    import_peft(model, tmp_path)
    torch.testing.assert_close(logits(model), logits(theirs), rtol=1e-5, atol=1e-6)
    assert not torch.allclose(logits(model), logits(base), atol=1e-3)
    assert {n for n, p in model.named_parameters() if p.requires_grad} == set(lora_state_dict(model))


def test_round_trip_through_a_wrapper_keeps_the_bits(tmp_path: Path) -> None:
    class Wrapper(nn.Module):
        def __init__(self, model: nn.Module) -> None:
            super().__init__()
            self.model, self.value_head = model, nn.Linear(16, 1)

    base, folder = tiny_causal_lm('llama', hidden=16), tmp_path / 'new' / 'folder'
    model = Wrapper(adapted(base, dropout=0.25))
    export_peft(model, folder, base_model='some/base')
    expected = {'r': 2, 'lora_alpha': 6, 'lora_dropout': 0.25, 'bias': 'none', 'task_type': 'CAUSAL_LM'}
    assert config_of(folder).items() >= (expected | {'base_model_name_or_path': 'some/base'}).items()
    assert all(n.startswith('base_model.model.model.layers.') for n in load_file(folder / WEIGHTS_FILE))
    other = Wrapper(copy.deepcopy(base))
    for _ in range(2):  # the second time into existing adapters
        import_peft(other, folder)
        assert torch.equal(logits(other.model), logits(model.model))


def test_mistakes_are_refused(tmp_path: Path) -> None:
    base, folder = tiny_causal_lm('gpt2', hidden=16), tmp_path / 'adapter'
    (tmp_path / 'file').write_text('')
    for act, model, where, message in (
        (export_peft, base, tmp_path, 'no adapters'),
        (export_peft, adapted(base), tmp_path / 'file', 'is a file'),
        (import_peft, base, tmp_path, CONFIG_FILE),
    ):
        with pytest.raises(ValueError, match=message):
            act(model, where)
    export_peft(adapted(base), folder)
    written = config_of(folder)
    for change, message in (
        ({'peft_type': 'IA3'}, 'only LORA'),
        ({'rank_pattern': {'c_fc': 4}}, 'rank_pattern'),
        ({'modules_to_save': ['lm_head']}, 'modules_to_save'),
        ({'init_lora_weights': 'pissa'}, "init_lora_weights='pissa' changes the base too"),
        ({'init_lora_weights': 'olora'}, "init_lora_weights='olora' changes the base too"),
        ({'r': None}, 'positive integer'),
    ):
        config_of(folder, **written | change)
        with pytest.raises(ValueError, match=message):
            import_peft(base, folder)
        config_of(folder, **written | {'rank_pattern': {}, 'modules_to_save': None, 'init_lora_weights': 'gaussian'})
    with pytest.raises(ValueError, match='does not have'):
        import_peft(tiny_causal_lm('llama', hidden=16), folder)
    with pytest.raises(ValueError, match='scaling 3'):
        import_peft(adapted(base, alpha=2), folder)
    tensors = load_file(folder / WEIGHTS_FILE)
    first = next(n for n in tensors if 'lora_B' in n)
    save_file({**tensors, first: tensors[first][:-1].contiguous()}, folder / WEIGHTS_FILE)
    with pytest.raises(ValueError, match='lora_B is'):
        import_peft(base, folder)
    save_file({n: t for n, t in tensors.items() if n != first}, folder / WEIGHTS_FILE)
    for model in (base, adapted(base)):
        with pytest.raises(ValueError, match='holds no tensor for .*lora_B'):
            import_peft(model, folder)
    assert not has_lora(base)


def test_an_adapter_that_would_leave_a_trained_weight_out_is_not_written(tmp_path: Path) -> None:
    model = adapted(tiny_causal_lm('gpt2', hidden=16))
    model.transformer.ln_f.bias.requires_grad_(True)
    for write in (lambda: check_export(model), lambda: export_peft(model, tmp_path / 'adapter')):
        with pytest.raises(ValueError, match='export_peft: transformer.ln_f.bias is trained beside the adapters, and'):
            write()
    assert not (tmp_path / 'adapter').exists()
    model.transformer.ln_f.bias.requires_grad_(False)
    export_peft(model, tmp_path / 'adapter')


def adapter_folder(tmp_path: Path, family: str, **kw: Any) -> tuple[Path, nn.Module, nn.Module]:
    """Returns an adapter's folder, its base, and the base with the adapter."""
    base = tiny_causal_lm(family, hidden=16)
    base.save_pretrained(tmp_path / 'base')
    byte_tokenizer().save_pretrained(tmp_path / 'base')
    model = adapted(base, **kw)
    export_peft(model, tmp_path / 'adapter', base_model=str(tmp_path / 'base'))
    return tmp_path / 'adapter', base, model


@pytest.mark.parametrize(
    ('family', 'mode'), [('gpt2', 'lora_only'), ('llama', 'none'), ('opt', 'lora_only'), ('bloom', 'none')]
)
def test_an_adapters_folder_loads_as_its_base_with_the_adapter_folded_in(
    family: str, mode: str, tmp_path: Path
) -> None:
    folder, base, model = adapter_folder(tmp_path, family, bias=mode)
    merged = AutoActor(pretrained=folder).eval()
    torch.testing.assert_close(logits(merged.model), logits(model), rtol=1e-4, atol=2e-5)  # W + BA is rounded
    assert not torch.allclose(logits(merged.model), logits(base), atol=1e-3)
    assert not has_lora(merged) and all(p.requires_grad for p in merged.parameters())
    assert load_config(folder).hidden_size == 16 and load_tokenizer(folder)('ab')['input_ids'] == [97, 98]
    merged.save_pretrained(tmp_path / 'whole')  # an ordinary model
    assert torch.equal(logits(AutoActor(pretrained=tmp_path / 'whole').model), logits(merged.model))
    trunk = AutoCritic(pretrained=folder).model.state_dict()
    assert all(torch.equal(trunk[name], t) for name, t in merged.model.base_model.state_dict().items())
    for cls in (AutoActor, AutoCritic):
        want = {f'model.{n}': t for n, t in cls(pretrained=folder).model.state_dict().items()}
        with torch.device('meta'):
            meta = cls(pretrained=folder)
        assert all(torch.equal(tensor, want[n]) for n, tensor in initial_tensors(meta) if n in want)


def test_the_weight_of_an_adapted_layer_by_hand(tmp_path: Path) -> None:
    folder, base, _ = adapter_folder(tmp_path, 'gpt2')
    tensors = load_file(folder / WEIGHTS_FILE)
    name = 'transformer.h.0.attn.c_attn'
    a, b = (tensors[f'base_model.model.{name}.lora_{x}.weight'].double() for x in 'AB')
    before, got = base.state_dict()[f'{name}.weight'], AutoActor(pretrained=folder).model.state_dict()[f'{name}.weight']
    want = before.double()
    for i in range(16):
        for o in range(48):  # Conv1D keeps W as (in, out); alpha / r = 6 / 2
            want[i, o] += 3 * sum(b[o, r] * a[r, i] for r in range(2))
    torch.testing.assert_close(got.double(), want, rtol=1e-6, atol=1e-6)
    assert not torch.allclose(got.double(), 2 * before.double() - want, atol=1e-3)  # the sign


def test_adapters_that_cannot_be_folded_in_are_refused(tmp_path: Path) -> None:
    folder, _, model = adapter_folder(tmp_path, 'llama')
    tensors, config = load_file(folder / WEIGHTS_FILE), config_of(folder)

    def refused(match: str, **changes: Any) -> None:
        config_of(folder, **config | changes)
        for device in ('cpu', 'meta'):
            with pytest.raises(ValueError, match=match) as error, torch.device(device):
                dict(initial_tensors(AutoActor(pretrained=folder)))
            assert '\n' not in str(error.value)

    def write(leave_out: Any) -> None:
        save_file({n: t.clone() for n, t in tensors.items() if not leave_out(n)}, folder / WEIGHTS_FILE)

    refused('names no base_model_name_or_path', base_model_name_or_path=None)
    refused('there is no such folder', base_model_name_or_path=str(tmp_path / 'gone'))
    refused('use_dora=True is not plain LoRA', use_dora=True)
    config['use_dora'] = False
    tiny_causal_lm('llama', hidden=32).save_pretrained(tmp_path / 'other')
    refused("is for a tensor .*; is this the adapter's base", base_model_name_or_path=str(tmp_path / 'other'))
    tiny_causal_lm('opt', hidden=16).save_pretrained(tmp_path / 'opt')
    refused('it adapts .* which OPTForCausalLM does not have', base_model_name_or_path=str(tmp_path / 'opt'))
    for part, other in (('lora_B', 'lora_A'), ('lora_A', 'lora_B')):
        name = next(n for n in tensors if part in n)
        write(lambda n, name=name: n == name)
        refused(rf'it holds no tensor for \S+\.{part}, which \S+\.{other} needs')
    write(lambda n: '.1.' in n)
    # as peft writes it
    targets = ['q_proj', 'k_proj', 'v_proj', 'o_proj', 'gate_proj', 'up_proj', 'down_proj']
    refused(r'it holds no tensors for \S+\.1\.\S+ \(and \d+ more\), which target_modules of', target_modules=targets)
    (folder / WEIGHTS_FILE).write_bytes(b'')
    refused(f'{WEIGHTS_FILE}: a damaged safetensors file')
    (folder / WEIGHTS_FILE).unlink()
    torch.save(tensors, folder / 'adapter_model.bin')
    torch.testing.assert_close(logits(AutoActor(pretrained=folder).eval().model), logits(model), rtol=1e-4, atol=2e-5)
    torch.save({'lora_A': os.system}, folder / 'adapter_model.bin')
    refused('adapter_model.bin: it holds more than tensors')


SMALL = SIZES | {'num_attention_heads': 2, 'num_key_value_heads': 2, 'use_cache': False}
EXPERTS = {'moe_intermediate_size': 16, 'num_experts_per_tok': 2, 'first_k_dense_replace': 1, 'n_routed_experts': 4}
LATENT = {'q_lora_rank': 16, 'kv_lora_rank': 16, 'qk_nope_head_dim': 16, 'qk_rope_head_dim': 16, 'v_head_dim': 16}
MIXED = {'num_experts': 4, 'num_experts_per_tok': 2, 'moe_intermediate_size': 16, 'shared_expert_intermediate_size': 16}
GROUPS = {'n_group': 1, 'topk_group': 1}
SPACE = {'vocab_size': 64, 'hidden_size': 32, 'state_size': 4, 'num_hidden_layers': 2, 'use_cache': False}
CONFIGS: dict[str, dict[str, Any]] = {
    'deepseek_v3': {**SMALL, **EXPERTS, **LATENT, **GROUPS},
    'glm4_moe': {**SMALL, **EXPERTS, **GROUPS},
    'hunyuan_v1_moe': {**SMALL, 'num_experts': 4, 'moe_topk': 2, 'moe_intermediate_size': 16, 'head_dim': 16},
    'qwen2_moe': {**SMALL, **MIXED},
    'laguna': {**SMALL, **MIXED, 'head_dim': 16},
    'mamba': SPACE,
    'mamba2': {**SPACE, 'num_heads': 4, 'head_dim': 16, 'n_groups': 1, 'chunk_size': 8},
    'falcon_h1': {**SMALL, 'mamba_d_ssm': 32, 'mamba_d_state': 4, 'mamba_n_heads': 2, 'mamba_d_head': 16},
}


def model_of(kind: str) -> Any:
    if kind not in transformers.models.auto.configuration_auto.CONFIG_MAPPING_NAMES:
        pytest.skip(f'this transformers has no {kind}')
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(kind, **CONFIGS[kind])).eval()


@pytest.mark.parametrize('kind', CONFIGS)
def test_peft_computes_what_we_compute(peft: Any, kind: str, tmp_path: Path) -> None:
    base = model_of(kind)
    model = copy.deepcopy(base)
    convert_to_lora(model, 2, alpha=6, dropout=0.1)
    model.eval()
    disturb(model)
    export_peft(model, tmp_path)
    want = logits(model)
    theirs = peft.PeftModel.from_pretrained(copy.deepcopy(base), tmp_path).eval()
    torch.testing.assert_close(logits(theirs), want, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(logits(base), want, atol=1e-3)
    found = {n.removeprefix('base_model.model.') for n, m in theirs.named_modules() if hasattr(m, 'lora_A')}
    assert found == set(lora_layers(model))
    ours = copy.deepcopy(base)
    import_peft(ours, tmp_path)
    assert torch.equal(logits(ours.eval()), want)
    base.save_pretrained(tmp_path / 'base')
    config = json.loads((tmp_path / CONFIG_FILE).read_text())
    (tmp_path / CONFIG_FILE).write_text(json.dumps(config | {'base_model_name_or_path': str(tmp_path / 'base')}))
    torch.testing.assert_close(logits(AutoActor(tmp_path).eval().model), want, rtol=1e-4, atol=1e-5)


def test_layers_named_like_fused_experts_are_written_as_parameters(tmp_path: Path) -> None:
    model = model_of('deepseek_v3')
    convert_to_lora(model, 2, dropout=0.25)
    export_peft(model, tmp_path)
    config = json.loads((tmp_path / CONFIG_FILE).read_text())
    layers = {n for n in lora_layers(model) if '.mlp.' in n}
    assert layers and set(config['target_parameters']) == {f'{n}.weight' for n in layers}
    assert not {'gate_proj', 'up_proj', 'down_proj'} & {n.rpartition('.')[2] for n in config['target_modules']}
    assert config['lora_dropout'] == 0.0  # peft has no dropout for parameters
    (tmp_path / CONFIG_FILE).write_text(json.dumps(config | {'target_parameters': ['mlp.experts.gate_up_proj']}))
    with pytest.raises(ValueError, match='target_parameters=.*is not plain LoRA'):
        import_peft(model_of('deepseek_v3'), tmp_path)


def test_names_that_transformers_changes_are_written_as_in_its_folders(tmp_path: Path) -> None:
    model = model_of('laguna')
    convert_to_lora(model, 2)
    export_peft(model, tmp_path)
    stored = {n.removeprefix('base_model.model.').partition('.lora_')[0] for n in load_file(tmp_path / WEIGHTS_FILE)}
    assert any('.shared_expert.' in n for n in stored) and not any('.shared_experts.' in n for n in stored)
    assert any('.shared_experts.' in n for n in lora_layers(model))


@pytest.mark.parametrize(('kind', 'layer'), [('mamba', 'dt_proj'), ('mamba', 'out_proj'), ('mamba2', 'out_proj')])
def test_layers_whose_weight_is_read_without_calling_them(kind: str, layer: str) -> None:
    model = model_of(kind)
    with pytest.raises(ValueError, match=rf'multiplies by the weight of {layer} without calling .*leave it out'):
        convert_to_lora(model, 1, targets=[layer])
    convert_to_lora(model, 1)
    assert layer not in {n.rpartition('.')[2] for n in lora_layers(model)}


def test_what_peft_refuses_is_refused_by_name(tmp_path: Path) -> None:
    """An attention layer with the name of Mamba's `out_proj`, which peft does not distinguish."""
    model = model_of('falcon_h1')
    layer = model.model.layers[0].feed_forward
    layer.out_proj = nn.Linear(32, 32)
    convert_to_lora(model, 1, targets=['feed_forward.out_proj'])
    for write in (lambda: check_export(model), lambda: export_peft(model, tmp_path / 'adapter')):
        with pytest.raises(ValueError, match='peft refuses an adapter on .*out_proj in a model of type falcon_h1'):
            write()
    assert not (tmp_path / 'adapter').exists()
