"""A tiny random config for each model type of transformers that has a causal language model."""

from __future__ import annotations

from typing import Any

from transformers import AutoConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

VOCAB, POSITIONS = 64, 128
SIZES: dict[str, Any] = {
    **dict.fromkeys(('vocab_size', 'vocab_size_per_layer_input'), VOCAB),
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
MLA = {'qk_rope_head_dim': 4, 'qk_nope_head_dim': 4, 'head_dim': 4}
"""of multi-head latent attention, where head_dim is the rotary part"""
OWN: dict[str, dict[str, Any]] = {
    'axk1': MLA,
    'axk2': {'qk_rope_head_dim': 8, 'qk_nope_head_dim': 8},
    'bamba': {'attn_layer_indices': [1]},
    'deepseek_v3': MLA,
    'deepseek_v32': {'qk_rope_head_dim': 8, 'qk_nope_head_dim': 8},
    'falcon_h1': {'mamba_d_ssm': 64},
    'glm4_moe_lite': {'qk_rope_head_dim': 8, 'qk_nope_head_dim': 8},
    'glm_moe_dsa': {'qk_rope_head_dim': 8, 'qk_nope_head_dim': 8},
    'gpt_neo': {'attention_types': [[['global', 'local'], 1]], 'window_size': 32},
    'longcat_flash': MLA,
    'mamba2': {'num_heads': 4, 'head_dim': 16, 'n_groups': 1, 'state_size': 8, 'chunk_size': 8},
    'recurrent_gemma': {'block_types': ['recurrent', 'attention'], 'attention_window_size': 32, 'head_dim': 8},
    'reformer': {'is_decoder': True},
    'xlnet': {'d_inner': 48},
    'youtu': MLA,
    'zaya': {'num_experts_per_tok': 1},
}
"""what else a type needs to be small and whole"""
BIG = 5_000_000
"""parameters from which on a type is left out: its config has sizes of other names"""


def model_types() -> list[str]:
    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def family_config(model_type: str) -> Any:
    """Two layers, 32 wide. Raises what the config's class raises where that is not a model."""
    usual = AutoConfig.for_model(model_type)
    sizes = {name: value for name, value in SIZES.items() if _has(usual, name)} | OWN.get(model_type, {})
    kinds = getattr(usual, 'layer_types', None)
    if kinds and _has(usual, 'layer_types'):
        sizes['layer_types'] = [kinds[0], kinds[-1]]
    config = type(usual)(**sizes)
    text = config.get_text_config()
    if text is not config:
        for name, value in SIZES.items():
            if _has(text, name):
                setattr(text, name, value)
        if getattr(text, 'layer_types', None):
            text.layer_types = [text.layer_types[0], text.layer_types[-1]]
    return config


def _has(config: Any, name: str) -> bool:
    """Whether it can be set."""
    known = getattr(type(config), name, None)
    if isinstance(known, property) and known.fset is None or name in ('layer_types',) and _derived(config):
        return False
    try:
        return hasattr(config, name)
    except Exception:  # sizes that differ by layer have no value of their own
        return False


def _derived(config: Any) -> bool:
    """Whether layers' kinds follow from other sizes."""
    return isinstance(getattr(type(config), 'layers_block_type', None), property)
