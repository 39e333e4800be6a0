"""Tiny configs for the model types of transformers that have a causal language model."""

from __future__ import annotations

import copy
from typing import Any

from transformers import AutoConfig, PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_FOR_MASKED_LM_MAPPING_NAMES

VOCAB, POSITIONS = 64, 128
SIZES: dict[str, Any] = {
    **dict.fromkeys(('vocab_size', 'vocab_size_per_layer_input', 'pronunciation_vocab_size'), VOCAB),
    **dict.fromkeys(('shape_vocab_size', 'ngram_vocab_size_base', 'unpadded_vocab_size'), VOCAB),
    **dict.fromkeys(('hidden_size', 'd_model', 'n_embd', 'word_embed_proj_dim', 'embedding_size', 'lru_width'), 32),
    **dict.fromkeys(('num_hidden_layers', 'n_layer', 'n_layers', 'num_layers', 'decoder_layers', 'encoder_layers'), 2),
    **dict.fromkeys(('num_attention_heads', 'n_head', 'n_heads', 'num_heads'), 4),
    **dict.fromkeys(('decoder_attention_heads', 'encoder_attention_heads', 'attention_heads'), 4),
    **dict.fromkeys(('num_decoder_attention_heads', 'num_encoder_attention_heads'), 4),
    **dict.fromkeys(('num_decoder_layers', 'num_encoder_layers'), 2),
    **dict.fromkeys(('num_key_value_heads', 'num_global_key_value_heads', 'linear_num_key_heads'), 2),
    **dict.fromkeys(('intermediate_size', 'ffn_dim', 'n_inner', 'decoder_ffn_dim', 'encoder_ffn_dim', 'd_ff'), 48),
    **dict.fromkeys(('max_position_embeddings', 'n_positions', 'n_ctx', 'context_length'), POSITIONS),
    **dict.fromkeys(('head_dim', 'v_head_dim', 'linear_key_head_dim', 'linear_value_head_dim', 'd_head'), 8),
    **dict.fromkeys(('global_head_dim', 'hidden_size_per_layer_input', 'q_lora_rank', 'kv_lora_rank'), 8),
    **dict.fromkeys(('num_experts', 'num_local_experts', 'n_routed_experts', 'moe_num_experts'), 4),
    **dict.fromkeys(('num_experts_per_tok', 'moe_k', 'moe_top_k'), 2),
    **dict.fromkeys(('moe_intermediate_size', 'shared_expert_intermediate_size', 'mamba_d_head'), 16),
    **dict.fromkeys(('qk_rope_head_dim', 'qk_nope_head_dim', 'rotary_dim', 'mamba_d_state', 'state_size'), 4),
    **dict.fromkeys(('mamba_n_heads', 'linear_num_value_heads'), 4),
    **dict.fromkeys(('n_group', 'topk_group', 'n_shared_experts', 'first_k_dense_replace'), 1),
    'attention_hidden_size': 32,
    'sliding_window': 32,
    'initializer_range': 0.1,
    'pad_token_id': 0,
    'bos_token_id': 1,
    'eos_token_id': 2,
}
WIDTHS = tuple(name for name, value in SIZES.items() if 'vocab' not in name and value in (32, 48, 8, 16))
"""sizes that grow with the width"""
MLA = {'qk_rope_head_dim': 4, 'qk_nope_head_dim': 4, 'head_dim': 4, 'num_key_value_heads': 4}
"""sizes of multi-head latent attention, where head_dim is the rotary part"""
OWN: dict[str, dict[str, Any]] = {
    'axk1': MLA,
    'axk2': MLA | {'qk_rope_head_dim': 8, 'qk_nope_head_dim': 8},
    'bamba': {'attn_layer_indices': [1]},
    'bert-generation': {'is_decoder': True},
    'cohere_compass_text': {
        'layer_types': ['sliding_attention', 'full_attention'],
        'rope_parameters': dict.fromkeys(
            ('sliding_attention', 'full_attention'),
            {'rope_type': 'default', 'rope_theta': 10000.0, 'mrope_section': [2, 1, 1]},
        ),
    },
    'dbrx': {
        'attn_config': {'kv_n_heads': 2, 'clip_qkv': 8.0, 'rope_theta': 10000.0},
        'ffn_config': {'ffn_hidden_size': 48, 'moe_num_experts': 4, 'moe_top_k': 2},
        'max_seq_len': POSITIONS,
    },
    'deepseek_v2': MLA,
    'deepseek_v3': MLA,
    'deepseek_v32': MLA | {'qk_rope_head_dim': 8, 'qk_nope_head_dim': 8},
    'dory': {
        'num_hidden_layers': 3,
        'n_input_layers': 1,
        'n_output_layers': 1,
        'layer_types': ['full_attention', 'sliding_attention', 'full_attention'],
    },
    'falcon_h1': {'mamba_d_ssm': 64},
    'glm4_moe_lite': MLA | {'qk_rope_head_dim': 8, 'qk_nope_head_dim': 8},
    'glm_moe_dsa': MLA | {'qk_rope_head_dim': 8, 'qk_nope_head_dim': 8},
    'gemma3n_text': {'num_kv_shared_layers': 0},
    'gpt_neo': {'attention_types': [[['global', 'local'], 1]], 'window_size': 32},
    'granitemoehybrid': {'layer_types': ['linear_attention', 'full_attention'], 'mamba_n_heads': 4},
    'jamba': {'attn_layer_period': 2, 'attn_layer_offset': 1, 'mamba_dt_rank': 4},
    'lfm2': {'layer_types': ['conv', 'full_attention']},
    'lfm2_moe': {'layer_types': ['conv', 'full_attention'], 'num_dense_layers': 1},
    'longcat_flash': MLA,
    'minicpm3': MLA,
    'mamba2': {'num_heads': 4, 'head_dim': 16, 'n_groups': 1, 'state_size': 8, 'chunk_size': 8},
    'nemotron_h': {
        'layers_block_type': ['linear_attention', 'full_attention'],
        'mamba_num_heads': 4,
        'mamba_head_dim': 16,
        'n_groups': 1,
    },
    'recurrent_gemma': {'block_types': ['recurrent', 'attention'], 'attention_window_size': 32, 'head_dim': 8},
    'sarvam_mla': MLA,
    'xlnet': {'d_inner': 48},
    'xmod': {'default_language': 'en_XX'},
    'youtu': MLA,
    'zamba': {
        'num_hidden_layers': 4,
        'layers_block_type': ['linear_attention', 'hybrid', 'linear_attention', 'hybrid'],
        'attention_hidden_size': 64,
        'attention_head_dim': 16,
        'mamba_dt_rank': 4,
    },
    'zamba2': {
        'num_hidden_layers': 4,
        'layers_block_type': ['linear_attention', 'hybrid', 'linear_attention', 'hybrid'],
        'num_mem_blocks': 1,
        'n_mamba_heads': 4,
        'mamba_headdim': 16,
        'attention_hidden_size': 64,
        'attention_head_dim': 16,
        'mamba_ngroups': 1,
        'num_key_value_heads': 4,
    },
    'zaya': {'num_experts_per_tok': 1},
}
"""other settings that a type needs to be small and valid"""
LEFT_OUT = {
    'blt': 'a model of bytes that calls a second model to cut them into patches',
    **dict.fromkeys(
        ('dots3_note', 'dots3_note_text'), 'its layers have sizes of their own, which do not shrink together'
    ),
    **dict.fromkeys(
        ('gemma4', 'gemma4_unified'), 'its config names layers by number; the text model has a row of its own'
    ),
    **dict.fromkeys(('emu3', 'mllama'), 'AutoModelForCausalLM makes it of its text config, and reads no such folder'),
    'gemma3n': 'its picture tower comes from timm; the text model is gemma3n_text',
    **dict.fromkeys(
        ('gemma4_assistant', 'gemma4_unified_assistant'), 'a draft model, which reads the states of another model'
    ),
    **dict.fromkeys(('qwen4_exp', 'qwen4_exp_text'), 'its default config lacks the sizes of its indexer'),
    'reformer': 'its backward pass recomputes, and runs in training mode only',
    'xlstm': 'its running states have another shape than its layers expect at this size',
    'kimi_linear': 'its linear attention takes minutes on a CPU, where it has no kernels',
    **dict.fromkeys(('musicgen', 'musicgen_melody'), 'it writes codes of sound, for the states of a text encoder'),
}
"""types that are not language models on their own, and the reason"""
BIG = 20_000_000
"""number of parameters from which a type is left out, since its config has sizes of other names"""


def model_types() -> list[str]:
    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def family_config(model_type: str, width: int = 32) -> Any:
    """Returns a config of two layers, `width` wide unless the type has sizes of its own here.

    Raises ValueError for a type that is left out, and the config class's error for sizes that it does not accept.
    """
    if model_type in LEFT_OUT:
        raise ValueError(LEFT_OUT[model_type])
    usual = AutoConfig.for_model(model_type)
    all_sizes = SIZES | {name: value * width // 32 for name, value in SIZES.items() if name in WIDTHS}
    own = OWN.get(model_type, {})
    windows = {name: value * width // 32 for name, value in own.items() if name.endswith('window_size')}
    sizes = {name: value for name, value in all_sizes.items() if _has(usual, name)} | own | windows
    kinds = getattr(usual, 'layer_types', None)
    if kinds and 'layers_block_type' not in sizes and _has(usual, 'layer_types'):
        sizes.setdefault('layer_types', _two_of(kinds))
    config = type(usual)(**sizes)
    if model_type in MODEL_FOR_MASKED_LM_MAPPING_NAMES and not config.is_encoder_decoder and _has(config, 'is_decoder'):
        config.is_decoder = True  # by default they attend to later tokens
    _shrink_parts(config, all_sizes)
    return config


def _shrink_parts(config: Any, sizes: dict[str, Any]) -> None:
    """Shrinks the nested configs of the text part and the towers."""
    for part in (value for value in vars(config).values() if isinstance(value, PreTrainedConfig)):
        for name, value in sizes.items():
            if _has(part, name):
                setattr(part, name, value)
        if getattr(part, 'layer_types', None):
            part.layer_types = _two_of(part.layer_types)
        _shrink_parts(part, sizes)


def _two_of(kinds: list[str]) -> list[str]:
    """Returns the kinds of two layers, different if there are two."""
    first, *others = dict.fromkeys(kinds)
    return [first, (others or [first])[0]]


def _has(config: Any, name: str) -> bool:
    """Returns True if the attribute can be set."""
    known = getattr(type(config), name, None)
    if isinstance(known, property) and known.fset is None or name in ('layer_types',) and _derived(config):
        return False
    try:
        setattr(copy.copy(config), name, getattr(config, name))
        return True
    except AttributeError:
        return False
    except Exception:  # sizes that differ by layer have no single value
        return False


def _derived(config: Any) -> bool:
    """Returns True if the kinds of layers follow from other sizes."""
    return isinstance(getattr(type(config), 'layers_block_type', None), property)
