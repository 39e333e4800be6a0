"""Short runs of every method on recorded data, under `reproducible='exact'`, and what is left of them as one string."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import torch
from tiny_runs import Log, preference, sequence, trained
from torch import Tensor

from chatgpt.data import TokenizedPreference
from chatgpt.nn import GPTActor, GPTCritic, RewardModel
from chatgpt.nn.heads import critic_head
from chatgpt.strategies import DDPStrategy, FSDPStrategy, NaiveStrategy
from chatgpt.testing.fakes import tiny_config
from chatgpt.trainer import DPOTrainer, PPOTrainer, RewardModelTrainer, SFTTrainer
from chatgpt.types import Sequence

VOCAB = 37
SIZES: dict[str, Any] = {'vocab_size': VOCAB, 'hidden': 20, 'positions': 48}
"""no tensor divides evenly over 8 ranks, and few over 4"""
STRATEGIES: dict[str, Any] = {'naive': NaiveStrategy, 'ddp': DDPStrategy, 'fsdp': FSDPStrategy}
OFFLINE = ('sft', 'reward', 'dpo')
ONLINE = ('ppo', 'shared', 'lora', 'hydra', 'grpo', 'ptx')


def ids(generator: torch.Generator, length: int) -> Tensor:
    return torch.randint(3, VOCAB, (length,), generator=generator)


def sequences(count: int = 20, seed: int = 0) -> list[Sequence]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 19, (count,), generator=generator).tolist()
    return [
        Sequence(
            prompt_ids=ids(generator, 1 + i % 5), response_ids=ids(generator, n), response_mask=torch.arange(n) % 4 != 1
        )
        for i, n in enumerate(lengths)
    ]


def pairs() -> list[TokenizedPreference]:
    generator = torch.Generator().manual_seed(1)
    found = []
    for i in range(20):
        answers = [ids(generator, 1 + (3 * i + j) % 11) for j in range(2)]
        masks = [torch.ones_like(answer, dtype=torch.bool) for answer in answers]
        found.append(TokenizedPreference(prompt_ids=ids(generator, 1 + i % 4), responses=answers, response_masks=masks))
    return found


def optimizer(strategy: Any, module: Any) -> Any:
    return strategy.make_optimizer([p for p in module.parameters() if p.requires_grad], lr=3e-3, weight_decay=0.1)


def offline(strategy: Any, kind: str, family: str, **settings: Any) -> Any:
    config = tiny_config(family, **SIZES, **({'dropout': 0.1} if kind == 'sft' else {}))
    torch.manual_seed(7)
    if kind == 'reward':
        from transformers import AutoModel

        model, data, make = RewardModel(AutoModel.from_config(config)), pairs(), RewardModelTrainer
    else:
        model = GPTActor(config=config) if family == 'gpt2' else actor_of(config)
        data, make = (sequences(), SFTTrainer) if kind == 'sft' else (pairs(), DPOTrainer)
    further = {'initial_model': strategy.prepare(deepcopy(model))} if kind == 'dpo' else {}
    model, optim = strategy.prepare((model, optimizer(strategy, model)))
    settings = {'train_batch_size': 12, 'max_epochs': 2, 'log_interval': 1, 'max_grad_norm': 0.5} | settings
    return make(strategy, model, optim, data, data[:7], callbacks=[Log()], **further, **settings)


def actor_of(config: Any, **kw: Any) -> Any:
    from transformers import AutoModelForCausalLM

    from chatgpt.nn import Actor

    return Actor(AutoModelForCausalLM.from_config(config), **kw)


def online(strategy: Any, kind: str, family: str, **settings: Any) -> Any:
    config = tiny_config(family, **SIZES)
    torch.manual_seed(7)
    actor = actor_of(
        config, lora_rank=3 if kind == 'lora' else 0, **({'num_layers_unfrozen': 1} if kind == 'hydra' else {})
    )
    initial = None if kind in ('lora', 'hydra') else strategy.prepare(deepcopy(actor))
    if kind in ('shared', 'hydra'):
        actor.value_head = critic_head(SIZES['hidden'])
    critic, critic_optim = None, None
    if kind in ('ppo', 'lora', 'ptx'):
        critic = GPTCritic(config=tiny_config('gpt2', **SIZES))
        critic, critic_optim = strategy.prepare((critic, optimizer(strategy, critic)))
    actor, optim = strategy.prepare((actor, optimizer(strategy, actor)))
    if kind == 'grpo':
        settings = {'advantage_estimator': 'grpo', 'num_samples_per_prompt': 4, 'kl_in': 'loss'} | settings
    if kind == 'ptx':
        settings = {'ptx_coef': 0.7, 'pretrain_data': sequences(9, seed=5)} | settings
    settings = {
        'train_batch_size': 12,
        'max_epochs': 2,
        'max_new_tokens': 20,
        'kl_coef': 0.1,
        'whiten_rewards': kind == 'ppo',
        'score_scaling': 'running',
        'max_grad_norm': 0.5,
        'entropy_coef': 0.01,
    } | settings
    return PPOTrainer(
        strategy, actor, critic, None, initial, optim, critic_optim, callbacks=[Log()], eos_token_id=2, **settings
    )


def recorded(kind: str, phase: int) -> tuple[list[Tensor], list[Tensor], list[float]]:
    """Queries, responses and scores of one phase, of all ranks together."""
    found, same = sequences(16, seed=10 + phase), 4 if kind == 'grpo' else 1
    queries = [found[i // same * same].prompt_ids for i in range(16)]
    return queries, [s.response_ids for s in found], [float((7 * i + phase) % 5) - 1.3 for i in range(16)]


def learn(trainer: Any, kind: str, phases: int = 2) -> None:
    if kind in OFFLINE:
        trainer.fit()
        return
    strategy = trainer.strategy
    for _ in range(phases):
        queries, responses, scores = recorded(kind, trainer.phase)
        share = 16 // strategy.world_size
        mine = slice(strategy.rank * share, (strategy.rank + 1) * share)
        trainer.step(queries[mine], responses[mine], scores[mine])


def build(strategy: Any, kind: str, family: str = 'gpt2', **settings: Any) -> Any:
    return (offline if kind in OFFLINE else online)(strategy, kind, family, **settings)


def digest(trainer: Any) -> str:
    """SHA-256 over weights and optimizer states, on every rank."""
    strategy, models = trainer.strategy, trainer.models()
    pieces = [
        (name, piece.name, piece.start, piece.data.tolist())
        for name, model in models.items()
        for piece in strategy.model_pieces(model)
    ] + [
        (f'{name}_optim', piece.name, piece.start, piece.data.tolist())
        for name, optim in trainer.optimizers().items()
        for piece in strategy.optimizer_state(optim)[1]
    ]
    whole: dict[tuple[str, str], list[float]] = {}
    for name, tensor, _, data in sorted(p for rank in strategy.all_gather_object(pieces) for p in rank):
        whole.setdefault((name, tensor), []).extend(data)
    return hashlib.sha256(repr(sorted(whole.items())).encode()).hexdigest()


def run(
    strategy: Any, kind: str, family: str = 'gpt2', before: Callable[[Any], None] | None = None, **settings: Any
) -> tuple[str, list[dict[str, float]]]:
    """What is left of a run: one string, and the metrics of its phases."""
    trainer = build(strategy, kind, family, **settings)
    if before is not None:
        before(trainer)
    learn(trainer, kind)
    return digest(trainer), next(c for c in trainer.callbacks if isinstance(c, Log)).phases


Case = tuple[str, str, str]
"""kind, family, precision"""
FP32: list[Case] = [
    ('sft', 'gpt2', 'fp32'),
    ('reward', 'gpt2', 'fp32'),
    ('dpo', 'gpt2', 'fp32'),
    ('ppo', 'gpt2', 'fp32'),
    ('grpo', 'llama', 'fp32'),
    ('lora', 'gpt2', 'fp32'),
]
BF16: list[Case] = [('ppo', 'gpt2', 'bf16'), ('shared', 'llama', 'bf16'), ('sft', 'llama', 'bf16')]
ALL: list[Case] = [
    (kind, family, precision)
    for kind in (*OFFLINE, *ONLINE)
    for family in ('gpt2', 'llama')
    for precision in ('fp32', 'bf16')
]


def made(layout: str, precision: str = 'fp32', **options: Any) -> Any:
    options = {'seed': 3, 'device': 'cpu', 'reproducible': 'exact'} | options
    if layout.startswith('zero'):
        from chatgpt.strategies.colossalai import ColossalAIStrategy

        return ColossalAIStrategy(stage=int(layout[4:]), precision=precision, **options)
    return STRATEGIES[layout](precision=precision, **options)


def runs(layout: str, cases: list[Case], **options: Any) -> dict[Case, Any]:
    """What is left of every case under a strategy of that name."""
    found = {}
    for kind, family, precision in cases:
        with made(layout, precision, **options) as strategy:
            found[kind, family, precision] = run(strategy, kind, family)
    return found


def several(layouts: list[str], cases: list[Case], device: str = 'cpu') -> dict[str, dict[Case, Any]]:
    return {layout: runs(layout, cases, device=device) for layout in layouts}


def flip_one_bit(trainer: Any) -> None:
    """A low bit of one element of one gradient, once, on the last rank. The very last one can be lost where the sum
    over ranks is rounded."""
    strategy, backward, done = trainer.strategy, trainer.strategy.backward, []

    def flipping(loss: Tensor, model: Any, optim: Any) -> None:
        backward(loss, model, optim)
        if not done and strategy.rank == strategy.world_size - 1:
            gradient = max(
                (p.grad for _, p in strategy._pair(optim).named_parameters() if p.grad is not None),
                key=lambda g: float(g.abs().max()),
            )
            flat = gradient.view(-1)
            at = int(flat.abs().argmax())
            flat.view(torch.int32)[at] ^= 8
            done.append(at)

    strategy.backward = flipping


def controls() -> dict[str, str]:
    """DDP on several ranks: as it is, with a flipped bit, with another seed, without `exact`."""
    hashes = {}
    for name, options in {'same': {}, 'flipped': {}, 'seed': {'seed': 4}, 'ordinary': {'reproducible': None}}.items():
        with made('ddp', **options) as strategy:
            hashes[name] = run(strategy, 'sft', before=flip_one_bit if name == 'flipped' else None)[0]
    return hashes


def leg(layout: str, kind: str, last: bool, source: str | None, target: str) -> str:
    """A third of a run, from one checkpoint to the next: two steps of SFT's six, or one phase of PPO's three."""
    with made(layout) as strategy:
        settings = {'max_epochs': 3} if kind in OFFLINE else {}
        trainer = build(strategy, kind, **settings)
        if source is not None:
            trainer.load_checkpoint(source)
        if kind in OFFLINE:
            trainer.config.max_steps = None if last else trainer.batches_done + 2
        learn(trainer, kind, phases=1)
        trainer.save_checkpoint(target)
        return digest(trainer)
