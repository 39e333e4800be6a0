"""What both sides of `compat_trlx.py` compute: weights, prompts, responses and cases that are the same numbers in every
environment.

Imports torch and transformers, of whatever age; nothing of trlX or of this library.
"""

from __future__ import annotations

import math
import string
import zlib
from typing import Any

import torch

PAD, BOS, EOS = 0, 1, 2
CHARACTERS = ' ' + string.ascii_lowercase + string.digits + '.,!?:+'
VOCAB = 64
PPO_METHOD = {
    'name': 'PPOConfig',
    'num_rollouts': 4,
    'chunk_size': 4,
    'ppo_epochs': 1,
    'init_kl_coef': 0.3,
    'target': None,
    'horizon': 10000,
    'gamma': 0.97,
    'lam': 0.9,
    'cliprange': 0.2,
    'cliprange_value': 0.05,
    'vf_coef': 0.7,
    'scale_reward': None,
    'ref_mean': None,
    'ref_std': None,
    'cliprange_reward': 2.0,
    'gen_kwargs': {'max_new_tokens': 8, 'do_sample': True},
}
ILQL_METHOD = {
    'name': 'ilqlconfig',
    'tau': 0.8,
    'gamma': 0.95,
    'cql_scale': 0.1,
    'awac_scale': 0.9,
    'alpha': 0.1,
    'beta': 0.4,
    'steps_for_target_q_sync': 5,
    'two_qs': True,
    'gen_kwargs': {'max_new_tokens': 8},
}
PROMPTS = ['who is it?', 'a b', 'what now, then?', '1 + 1:']
EQUAL = [' yes it', ' nobody', ' we go!', ' it is.']
"""responses of seven tokens"""
UNEQUAL = [' yes', ' nobody at', ' we', ' it is']
OLD_SHIFT = 0.05
"""between the weights that collected and those that learn, so that ratios are not 1"""
CASES: dict[str, dict[str, Any]] = {
    'ppo': {'kind': 'ppo', 'responses': EQUAL},
    'ppo, dense rewards': {'kind': 'ppo', 'responses': EQUAL, 'dense': True},
    'ppo, hydra': {'kind': 'ppo', 'responses': EQUAL, 'unfrozen': 1},
    'ppo, unequal lengths, running': {
        'kind': 'ppo',
        'responses': UNEQUAL,
        'method': {'scale_reward': 'running', 'chunk_size': 2},
    },
    'ilql': {'kind': 'ilql'},
    'ilql, one q head': {'kind': 'ilql', 'method': {'two_qs': False, 'beta': 0}},
    'sft': {'kind': 'sft'},
}
SAMPLES = [['a:', ' red one'], ['say it', ' no', ' and then?', ' yes'], ['b:', ' blue'], ['go', ' there now']]
RETURNS = [1.0, -0.5, 3.0, 0.25]
TEXTS = ['a red stone.', 'on the hill!']
"""of equal length"""


def score(samples: list[str]) -> list[float]:
    """One number per text; the third of the four is clipped."""
    return [0.15 * len(text) - 1.5 for text in samples]


def dense_scores(outputs: list[str], tokenizer: Any) -> list[list[float]]:
    """One number per token of each output."""
    return [
        [0.1 * (i + 1) * math.cos(i + row) for i in range(len(tokenizer(text).input_ids))]
        for row, text in enumerate(outputs)
    ]


def make_tokenizer(folder: str) -> Any:
    """One token a character, written to a folder."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokens = ['<pad>', '<bos>', '<eos>', '<unk>', *CHARACTERS]
    inner = Tokenizer(models.WordLevel(vocab={token: i for i, token in enumerate(tokens)}, unk_token='<unk>'))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex('.'), 'isolated')
    inner.decoder = decoders.Fuse()
    names = {'pad_token': '<pad>', 'bos_token': '<bos>', 'eos_token': '<eos>', 'unk_token': '<unk>'}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, clean_up_tokenization_spaces=False, **names)
    tokenizer.save_pretrained(folder)
    return tokenizer


def make_model(salt: float) -> Any:
    """A GPT-2 of two small blocks with weights of a formula."""
    from transformers import GPT2Config, GPT2LMHeadModel

    drop = {'resid_pdrop': 0.0, 'embd_pdrop': 0.0, 'attn_pdrop': 0.0}
    ids = {'pad_token_id': PAD, 'bos_token_id': BOS, 'eos_token_id': EOS}
    config = GPT2Config(
        vocab_size=VOCAB,
        n_embd=32,
        n_layer=2,
        n_head=2,
        n_positions=64,
        architectures=['GPT2LMHeadModel'],
        **drop,
        **ids,
    )
    model = GPT2LMHeadModel(config).eval()
    fill(model, salt)
    return model


def fill(module: Any, salt: float, prefix: str = '') -> None:
    """Weights by name and `salt`: around 1 for norms, around 0 for the rest."""
    with torch.no_grad():
        for name, p in module.named_parameters():
            p.copy_(_wave(prefix + name, p, salt) + (1.0 if 'ln_' in name and name.endswith('weight') else 0.0))


def shift(module: Any, amount: float) -> None:
    """Move what both sides train a little, by name: trlX's hydra trains the position embeddings below its frozen trunk."""
    with torch.no_grad():
        frozen = any(not p.requires_grad for p in module.parameters())
        for name, p in module.named_parameters():
            if p.requires_grad and not (frozen and 'wpe' in name):
                p.add_(_wave(plain(name), p, 1.7) * amount)


def _wave(name: str, like: Any, salt: float) -> Any:
    seed = zlib.crc32(plain(name).encode()) % 1000
    steps = torch.arange(like.numel(), dtype=torch.float64)
    return (0.15 * torch.sin(steps * (0.37 + seed / 997) + seed + salt)).reshape(like.shape).to(like.dtype)


def plain(name: str) -> str:
    """A parameter's name without what either side puts around it."""
    for there, here in (('base_model.', ''), ('ilql_heads.', ''), ('value_head.', 'v_head.')):
        name = name.replace(there, here)
    return name.removeprefix('model.')


def gradients(module: Any) -> dict[str, list[float]]:
    """Of every parameter with a gradient: its norm, and its product with a wave, which tells the entries apart."""
    found = {}
    for name, p in module.named_parameters():
        if p.grad is not None:
            g = p.grad.double().flatten()
            wave = torch.cos(torch.arange(g.numel(), dtype=torch.float64))
            found[plain(name)] = [float(g.norm()), float(g @ wave), float(wave.norm())]
    return found
