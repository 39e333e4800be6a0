"""Tiny models and tokenizers of Hugging Face classes, built in memory without a network."""

from __future__ import annotations

import string
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerFast

FAMILIES = ('gpt2', 'opt', 'bloom', 'llama')
ENCODER_DECODERS = ('t5', 'flan-t5', 'bart', 'marian')
PAD, BOS, EOS = '<pad>', '<bos>', '<eos>'
CHARACTERS = ' \n' + string.ascii_lowercase + string.digits + '.,!?\'"-+*/=:;()'


def tiny_config(
    family: str = 'gpt2',
    vocab_size: int = 64,
    hidden: int = 32,
    layers: int = 2,
    heads: int = 2,
    positions: int = 128,
    *,
    dropout: float = 0.0,
    **kw: Any,
) -> PreTrainedConfig:
    """Returns a config of a model with a few thousand parameters; `kw` is passed to the config class.

    Pad, begin and end tokens are 0, 1 and 2 unless set in `kw`. Llama has grouped queries if `heads` is even. BLOOM and
    T5 have no position limit. `flan-t5` is T5 with a gated MLP and an untied head. Responses of `ENCODER_DECODERS`
    begin after token 0, BART's after 2. Raises ValueError for an unknown family.
    """
    import transformers

    names = {'hidden_size': hidden, 'num_hidden_layers': layers, 'num_attention_heads': heads}
    usual: dict[str, Any] = {**names, 'max_position_embeddings': positions, 'attention_dropout': dropout}
    short = {'n_layer': layers, 'n_head': heads, 'initializer_range': 0.1}
    gpt2: dict[str, Any] = short | {'n_embd': hidden, 'n_positions': positions}
    t5: dict[str, Any] = {'d_model': hidden, 'd_kv': hidden // heads, 'd_ff': 2 * hidden, 'num_layers': layers}
    t5 |= {'num_heads': heads, 'decoder_start_token_id': 0, 'dropout_rate': dropout}
    bart: dict[str, Any] = {'d_model': hidden, 'max_position_embeddings': positions, 'init_std': 0.1}
    bart |= {'forced_eos_token_id': None, 'dropout': dropout, 'attention_dropout': dropout}
    for side in ('encoder', 'decoder'):
        bart |= {f'{side}_layers': layers, f'{side}_attention_heads': heads, f'{side}_ffn_dim': 2 * hidden}
    opt = {'word_embed_proj_dim': hidden, 'ffn_dim': 4 * hidden, 'init_std': 0.1, 'dropout': dropout}
    key_value_heads = heads // 2 if heads % 2 == 0 else heads
    llama = {'intermediate_size': 2 * hidden, 'num_key_value_heads': key_value_heads, 'initializer_range': 0.1}
    bloom_dropout = dict.fromkeys(('hidden_dropout', 'attention_dropout'), dropout)
    kinds: dict[str, tuple[str, dict[str, Any]]] = {
        'gpt2': ('GPT2', gpt2 | dict.fromkeys(('resid_pdrop', 'embd_pdrop', 'attn_pdrop'), dropout)),
        'opt': ('OPT', usual | opt),
        'bloom': ('Bloom', short | {'hidden_size': hidden} | bloom_dropout),
        'llama': ('Llama', usual | llama),
        't5': ('T5', t5),
        'flan-t5': ('T5', t5 | {'feed_forward_proj': 'gated-gelu', 'tie_word_embeddings': False}),
        'bart': ('Bart', bart | {'decoder_start_token_id': 2}),
        'marian': ('Marian', bart | {'decoder_start_token_id': 0}),
    }
    if family not in kinds:
        raise ValueError(f'tiny_config: unknown family {family!r}; known are {", ".join(kinds)}')
    name, settings = kinds[family]
    common = {'vocab_size': vocab_size, 'pad_token_id': 0, 'bos_token_id': 1, 'eos_token_id': 2}
    return getattr(transformers, f'{name}Config')(**{**common, **settings, **kw})


def tiny_causal_lm(family: str = 'gpt2', seed: int = 0, **kw: Any) -> PreTrainedModel:
    """Returns a causal LM or encoder-decoder with random weights from `seed`, in eval mode; for `kw` see
    `tiny_config`."""
    from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

    config = tiny_config(family, **kw)
    auto = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = auto.from_config(config)
    return model.eval()


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Returns a lossless fast tokenizer of 259 tokens: id b is byte b, then pad 256, begin 257, end 258.

    It adds no special tokens. `AutoTokenizer.from_pretrained` loads it from the folder of `save_pretrained`.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    # Printable Latin-1 bytes are written as themselves, the others as the code points from 256 on, in order.
    visible = {*range(ord('!'), ord('~') + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)}
    hidden = iter(range(256, 512))
    vocab = {chr(byte) if byte in visible else chr(next(hidden)): byte for byte in range(256)}
    vocab |= {PAD: 256, BOS: 257, EOS: 258}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return _fast(tokenizer)


def char_tokenizer() -> PreTrainedTokenizerFast:
    """Returns a fast tokenizer of 57 tokens: pad 0, begin 1, end 2, unknown 3, then `CHARACTERS`."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    vocab = {token: i for i, token in enumerate([PAD, BOS, EOS, '<unk>', *CHARACTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocab=vocab, unk_token='<unk>'))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r'[\s\S]'), 'isolated')
    tokenizer.decoder = decoders.Fuse()
    return _fast(tokenizer, unk_token='<unk>')


def encoder_decoder_tokenizer(family: str = 't5') -> PreTrainedTokenizerFast:
    """Returns a `char_tokenizer` that adds an end token, as T5's, or begin and end tokens, as BART's."""
    from tokenizers import processors

    tokenizer: Any = char_tokenizer()
    begins = family == 'bart'
    if not begins:
        tokenizer.bos_token = None
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=f'{BOS} $A {EOS}' if begins else f'$A {EOS}', special_tokens=[(BOS, 1), (EOS, 2)]
    )
    return tokenizer


def _fast(tokenizer: Any, **kw: Any) -> PreTrainedTokenizerFast:
    from transformers import PreTrainedTokenizerFast

    tokens = {'pad_token': PAD, 'bos_token': BOS, 'eos_token': EOS, 'padding_side': 'right', **kw}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False, **tokens)
