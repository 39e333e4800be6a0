"""Small PPO runs of encoder-decoders on token ids."""

from __future__ import annotations

import hashlib
from copy import deepcopy
from typing import Any

import torch

VOCAB, GOOD = 16, (5, 6, 7, 8)


def prompts(num: int = 7) -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(1)
    return [torch.randint(3, VOCAB, (1 + i % 4,), generator=g) for i in range(num)]


def share_of_good(samples: Any) -> list[float]:
    return [sum(int(t) in GOOD for t in s.response_ids) / s.num_actions for s in samples]


class Scorer:
    """Of ids alone, each rank its own."""

    def score(self, samples: Any, strategy: Any) -> list[float]:
        return share_of_good(samples)


def make(
    family: str = 't5',
    kind: str = 'NaiveStrategy',
    options: dict[str, Any] | None = None,
    *,
    roles: str = 'own',
    lr: float = 3e-3,
    more: Any = (),
    **kw: Any,
) -> Any:
    """roles: 'own', critic and initial model of their own; 'hydra', values and reference from the actor; 'lora'."""
    from chatgpt.nn import AutoActor, AutoCritic
    from chatgpt.testing.fakes import tiny_config
    from chatgpt.trainer import PPOTrainer
    from chatgpt.trainer import strategies as s
    from chatgpt.trainer.callbacks import ProgressBar

    strategy: Any = getattr(s, kind)(seed=3, device='cpu', **(options or {}))
    config = tiny_config(family, vocab_size=VOCAB, hidden=16, positions=32)
    own = {'hydra': {'num_layers_unfrozen': 1, 'value_head': True}, 'lora': {'lora_rank': 2}}.get(roles, {})
    with strategy.model_init_context():
        actor = AutoActor(config=config, **own)
        critic = None if roles == 'hydra' else AutoCritic(config=config)
        initial = deepcopy(actor) if roles == 'own' else None

    def optim(module: Any) -> Any:
        return torch.optim.AdamW([p for p in module.parameters() if p.requires_grad], lr=lr, eps=1e-5)

    (actor, actor_optim), initial = strategy.prepare((actor, optim(actor)), initial)
    critic_optim = None
    if critic is not None:
        critic, critic_optim = strategy.prepare((critic, optim(critic)))
    settings: dict[str, Any] = {
        'experience_batch_size': 8,
        'train_batch_size': 8,
        'max_epochs': 2,
        'max_tokens_per_batch': 48,
        'kl_coef': 0.01,
        'max_new_tokens': 6,
        'eos_token_id': 2,
        'pad_token_id': 0,
    } | kw
    return PPOTrainer(
        strategy,
        actor,
        critic,
        Scorer(),
        initial,
        actor_optim,
        critic_optim,
        callbacks=[ProgressBar(enabled=False), *more],
        **settings,
    )


def exact_hash(kind: str, family: str) -> str:
    """Of the weights after a few steps of SFT under `reproducible='exact'`."""
    from chatgpt.nn import AutoActor
    from chatgpt.testing.fakes import tiny_config
    from chatgpt.trainer import SFTTrainer
    from chatgpt.trainer import strategies as s
    from chatgpt.trainer.callbacks import ProgressBar
    from chatgpt.types import Sequence

    g = torch.Generator().manual_seed(1)
    data = [
        Sequence(
            prompt_ids=torch.randint(3, VOCAB, (1 + i % 5,), generator=g),
            response_ids=torch.randint(3, VOCAB, (1 + i % 7,), generator=g),
            response_mask=torch.ones(1 + i % 7, dtype=torch.bool),
        )
        for i in range(12)
    ]
    with getattr(s, kind)(seed=3, device='cpu', reproducible='exact') as strategy:
        with strategy.model_init_context():
            actor = AutoActor(config=tiny_config(family, vocab_size=VOCAB, hidden=16, positions=32, layers=3))
        actor, optim = strategy.prepare((actor, strategy.make_optimizer(actor.parameters(), lr=3e-3)))
        quiet = ProgressBar(enabled=False)
        SFTTrainer(strategy, actor, optim, data, callbacks=[quiet], train_batch_size=8, max_epochs=1).fit()
        weights = strategy.full_state_dict(actor)
    return hashlib.sha256(b''.join(weights[name].numpy().tobytes() for name in sorted(weights))).hexdigest()


def m2m_losses(kind: str, precision: str) -> list[float]:
    """Of two steps of SFT, of an M2M-100 that adds sines to its states and leaves every second block out."""
    import transformers
    from phase_log import Log

    from chatgpt.nn import AutoActor
    from chatgpt.trainer import SFTTrainer
    from chatgpt.trainer import strategies as s
    from chatgpt.types import Sequence

    sizes = {'d_model': 16, 'vocab_size': VOCAB, 'max_position_embeddings': 32, 'dropout': 0.0}
    drops = {'attention_dropout': 0.0, 'activation_dropout': 0.0}
    for side in ('encoder', 'decoder'):
        sizes |= {f'{side}_layers': 3, f'{side}_ffn_dim': 32, f'{side}_attention_heads': 2, f'{side}_layerdrop': 0.5}
    config = transformers.M2M100Config(**sizes, **drops, pad_token_id=1, decoder_start_token_id=2)
    data = [
        Sequence(
            prompt_ids=torch.arange(3, 5 + i) % VOCAB,
            response_ids=torch.arange(3, 4 + i),
            response_mask=torch.ones(1 + i, dtype=torch.bool),
        )
        for i in range(8)
    ]
    log = Log()
    with getattr(s, kind)(seed=3, device='cpu', precision=precision) as strategy:
        with strategy.model_init_context():
            actor = AutoActor(config=config)
        actor, optim = strategy.prepare((actor, strategy.make_optimizer(actor.parameters(), lr=1e-3)))
        settings = {'train_batch_size': 8, 'max_epochs': 2, 'log_interval': 1}
        SFTTrainer(strategy, actor, optim, data, callbacks=[log], **settings).fit()
    return [phase['sft/loss'] for phase in log.phases]


def train(kind: str, options: dict[str, Any], family: str, roles: str, phases: int = 2) -> dict[str, Any]:
    """What came of a run, on this rank."""
    from phase_log import Log

    class Samples(Log):
        def __init__(self) -> None:
            super().__init__()
            self.samples: list[Any] = []

        def on_make_experience_end(self, trainer: Any, experiences: list[Any]) -> None:
            self.samples += [(e.index, e.response_ids.tolist(), e.score) for e in experiences]

    log = Samples()
    trainer = make(family, kind, options, roles=roles, lr=1e-3, more=[log])
    with trainer.strategy:
        trainer.fit(prompts(), 1, phases, 1)
        weights = {n: trainer.strategy.full_state_dict(m) for n, m in trainer.models().items()}
    return {'metrics': log.phases, 'samples': log.samples, 'weights': weights}
