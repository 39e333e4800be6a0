"""A small encoder."""

from __future__ import annotations

from transformers import DebertaV2Config


def deberta_config(**kw):
    sizes = {
        'hidden_size': 16,
        'num_hidden_layers': 2,
        'num_attention_heads': 2,
        'intermediate_size': 32,
        'initializer_range': 0.3,
    }
    kinds = {
        'relative_attention': True,
        'pos_att_type': ['p2c', 'c2p'],
        'type_vocab_size': 0,
        'position_buckets': 8,
        'share_att_key': True,
    }
    drops = {'hidden_dropout_prob': 0.0, 'attention_probs_dropout_prob': 0.0}
    return DebertaV2Config(vocab_size=64, max_position_embeddings=64, pad_token_id=0, **sizes, **kinds, **drops, **kw)
