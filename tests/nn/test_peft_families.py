"""Adapters of mixtures and state-space models, written for peft: the same logits there, or a refusal by name."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from model_cases import SIZES, disturb, logits
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM

from chatgpt.nn import AutoActor
from chatgpt.nn.lora import convert_to_lora, lora_layers
from chatgpt.nn.peft_format import CONFIG_FILE, WEIGHTS_FILE, check_export, export_peft, import_peft

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


@pytest.fixture(scope='module')
def peft() -> Any:
    try:
        import peft
    except Exception as error:  # an incompatible transformers fails in many ways
        pytest.skip(f'peft cannot be imported: {type(error).__name__}: {error}')
    return peft


def model_of(kind: str) -> Any:
    if kind not in transformers.models.auto.configuration_auto.CONFIG_MAPPING_NAMES:
        pytest.skip(f'this transformers has no {kind}')
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(kind, **CONFIGS[kind])).eval()


pytestmark = pytest.mark.filterwarnings('ignore:LoRA. adapters stand beside')


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
    assert config['lora_dropout'] == 0.0  # peft has none for parameters
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
    """Attention of Mamba's name in such a model, which peft does not tell apart."""
    model = model_of('falcon_h1')
    layer = model.model.layers[0].feed_forward
    layer.out_proj = nn.Linear(32, 32)
    convert_to_lora(model, 1, targets=['feed_forward.out_proj'])
    for write in (lambda: check_export(model), lambda: export_peft(model, tmp_path / 'adapter')):
        with pytest.raises(ValueError, match='peft refuses an adapter on .*out_proj in a model of type falcon_h1'):
            write()
    assert not (tmp_path / 'adapter').exists()
