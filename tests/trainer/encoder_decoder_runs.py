"""Small runs of encoder-decoders on token ids."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from tiny_runs import SMALL, ppo, sequence, sft

from chatgpt.testing.fakes import tiny_config
from chatgpt.trainer import strategies

VOCAB, GOOD = 16, (5, 6, 7, 8)


def prompts(num: int = 7) -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(1)
    return [torch.randint(3, VOCAB, (1 + i % 4,), generator=g) for i in range(num)]


class Scorer:
    """The share of good tokens, of ids alone, each rank its own."""

    def score(self, samples: Any, strategy: Any) -> list[float]:
        return [sum(int(t) in GOOD for t in s.response_ids) / s.num_actions for s in samples]


ROLES: dict[str, dict[str, Any]] = {
    'own': {},  # critic and initial model of their own
    'hydra': {'num_layers_unfrozen': 1, 'value_head': True},  # values and reference from the actor
    'lora': {'lora_rank': 2},
}


def make(family: str = 't5', roles: str = 'own', strategy: Any = None, **settings: Any) -> Any:
    sizes = {'experience_batch_size': 8, 'train_batch_size': 8, 'max_epochs': 2, 'max_tokens_per_batch': 48}
    given = sizes | {'kl_coef': 0.01, 'eos_token_id': 2, 'pad_token_id': 0, 'tokenizer': None} | settings
    return ppo(strategy, Scorer(), config=tiny_config(family, **SMALL), **ROLES[roles] | given)


def made(kind: str, **options: Any) -> Any:
    return getattr(strategies, kind)(seed=3, device='cpu', **options)


def trained(kind: str, options: dict[str, Any], family: str, roles: str, phases: int = 2) -> dict[str, Any]:
    """What came of a run, on this rank."""
    with made(kind, **options) as strategy:
        trainer = make(family, roles, strategy)
        trainer.fit(prompts(), 1, phases, 1)
        weights = {n: strategy.full_state_dict(m) for n, m in trainer.models().items()}
    return {'metrics': trainer.log.phases, 'samples': trainer.log.samples(), 'weights': weights}


def several(jobs: list[tuple[str, dict[str, Any], str, str]]) -> list[dict[str, Any]]:
    return [trained(*job) for job in jobs]


def exact_hashes(kinds: list[str]) -> list[str]:
    """Of the weights after a few steps of SFT under `reproducible='exact'`."""
    g = torch.Generator().manual_seed(1)
    lengths = [(1 + i % 5, 1 + i % 7) for i in range(12)]
    data = [sequence(*(torch.randint(3, VOCAB, (n,), generator=g).tolist() for n in both)) for both in lengths]
    found = []
    for kind in kinds:
        with made(kind, reproducible='exact') as strategy:
            config = tiny_config('bart', **SMALL, layers=3)
            trainer = sft(data, strategy=strategy, config=config, train_batch_size=8, max_epochs=1, lr=3e-3)
            trainer.fit()
            weights = strategy.full_state_dict(trainer.model)
            content = b''.join(weights[name].numpy().tobytes() for name in sorted(weights))
            found.append(hashlib.sha256(content).hexdigest())
    return found


def m2m_losses(precisions: list[str]) -> list[list[float]]:
    """Of two steps of SFT under FSDP, of an M2M-100 that adds sines to its states and leaves every second block out."""
    from transformers import M2M100Config

    sizes = {'d_model': 16, 'vocab_size': VOCAB, 'max_position_embeddings': 32, 'dropout': 0.0}
    drops = {'attention_dropout': 0.0, 'activation_dropout': 0.0}
    for side in ('encoder', 'decoder'):
        sizes |= {f'{side}_layers': 3, f'{side}_ffn_dim': 32, f'{side}_attention_heads': 2, f'{side}_layerdrop': 0.5}
    data = [sequence([3 + k % 13 for k in range(2 + i)], list(range(3, 4 + i))) for i in range(8)]
    found = []
    for precision in precisions:
        with made('FSDPStrategy', precision=precision) as strategy:
            config = M2M100Config(**sizes, **drops, pad_token_id=1, decoder_start_token_id=2)
            trainer = sft(data, strategy=strategy, config=config, train_batch_size=8, lr=1e-3)
            trainer.fit()
            found.append([phase['sft/loss'] for phase in trainer.log.phases])
    return found
