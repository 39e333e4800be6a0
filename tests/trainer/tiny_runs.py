"""Trainers of tiny models, a callback that keeps what they report, and comparisons of two runs."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch

from chatgpt.data import TokenizedPreference
from chatgpt.nn import AutoActor, AutoCritic
from chatgpt.strategies import NaiveStrategy
from chatgpt.testing.fakes import char_tokenizer, tiny_config
from chatgpt.trainer import PPOTrainer, SFTTrainer
from chatgpt.trainer.callbacks import Callback, ProgressBar
from chatgpt.types import Experience, Sequence

PROMPTS = [f'a {word}' for word in 'one two three four five six'.split()]
SMALL: dict[str, Any] = {'vocab_size': 16, 'hidden': 16, 'positions': 32}


class Log(ProgressBar):
    """Keeps the metrics of every phase, but for the seconds, and its experiences."""

    def __init__(self) -> None:
        super().__init__(enabled=False)
        self.phases: list[dict[str, float]] = []
        self.experiences: list[list[Experience]] = []

    def on_make_experience_end(self, trainer: Any, experiences: list[Experience]) -> None:
        self.experiences.append(experiences)

    def on_phase_end(self, trainer: Any, step: int, metrics: dict[str, float]) -> None:
        self.phases.append({k: v for k, v in metrics.items() if not k.startswith('perf/')})

    def samples(self) -> list[Any]:
        return [(e.index, e.response_ids.tolist(), e.score) for phase in self.experiences for e in phase]


class StopAfter(Callback):
    """Asks for a stop at the end of a phase, after a checkpoint."""

    def __init__(self, phase: int, save: bool = False) -> None:
        self.phase, self.save = phase, save

    def on_phase_end(self, trainer: Any, step: int, metrics: dict[str, float]) -> None:
        if step == self.phase:
            if self.save:
                trainer.save_checkpoint()
            trainer.request_stop()


def sequence(prompt: list[int], response: list[int], mask: list[int] | None = None) -> Sequence:
    flags = torch.tensor(mask or [1] * len(response), dtype=torch.bool)
    ids = torch.tensor(prompt, dtype=torch.int64), torch.tensor(response, dtype=torch.int64)
    return Sequence(prompt_ids=ids[0], response_ids=ids[1], response_mask=flags)


def preference(
    prompt: list[int], *responses: list[int], scores: tuple[float, ...] | None = None
) -> TokenizedPreference:
    tensors = [torch.tensor(r) for r in responses]
    masks = [torch.ones_like(t, dtype=torch.bool) for t in tensors]
    return TokenizedPreference(prompt_ids=torch.tensor(prompt), responses=tensors, response_masks=masks, scores=scores)


def vowels(prompts: list[str], responses: list[str]) -> list[float]:
    return [float(sum(c in 'aeiou' for c in r)) for r in responses]


def trained(strategy: Any, model: Any, lr: float = 1e-3, eps: float = 1e-5) -> tuple[Any, Any]:
    """Prepared, with its optimizer."""
    if model is None:
        return None, None
    parameters = [p for p in model.parameters() if p.requires_grad]
    return strategy.prepare((model, strategy.make_optimizer(parameters, lr=lr, eps=eps, weight_decay=0.01)))


def assemble(
    strategy: Any,
    actor: Any,
    critic: Any = None,
    reward: Any = None,
    initial: Any = None,
    *,
    lr: float = 1e-3,
    callbacks: Any = (),
    **settings: Any,
) -> Any:
    """A PPOTrainer of these models, whose `log` keeps its phases."""
    (actor, actor_optim), (critic, critic_optim) = (trained(strategy, m, lr) for m in (actor, critic))
    if isinstance(reward, torch.nn.Module):
        reward = strategy.prepare(reward)
    if initial is not None:
        initial = strategy.prepare(initial)
    log = Log()
    settings = {'experience_batch_size': 4, 'train_batch_size': 4, 'max_new_tokens': 6} | settings
    models = (strategy, actor, critic, reward, initial, actor_optim, critic_optim)
    trainer = PPOTrainer(*models, callbacks=[log, *callbacks], **settings)
    trainer.log = log
    return trainer


def ppo(
    strategy: Any = None,
    reward: Any = vowels,
    *,
    seed: int = 3,
    config: Any = None,
    critic: bool | None = None,
    lora_rank: int = 0,
    num_layers_unfrozen: int | None = None,
    value_head: bool = False,
    head_scale: float = 1.0,
    **settings: Any,
) -> Any:
    """A PPOTrainer of GPT-2 on texts; with an adapter or a frozen trunk the actor is its own reference. A critic where
    the estimator needs one."""
    strategy = strategy or NaiveStrategy(seed=seed, device='cpu')
    torch.manual_seed(seed)
    config = config or tiny_config('gpt2', positions=48)
    if critic is None:
        critic = not value_head and settings.get('advantage_estimator', 'gae') in ('gae', 'a2c')
    own = {'num_layers_unfrozen': num_layers_unfrozen} if num_layers_unfrozen else {}
    with strategy.model_init_context():
        actor = AutoActor(config=config, lora_rank=lora_rank, value_head=True if value_head else None, **own)
        if head_scale != 1.0:
            with torch.no_grad():
                actor.model.lm_head.weight.mul_(head_scale)
        initial = None if lora_rank or own else deepcopy(actor)
        judge = AutoCritic(config=config) if critic else None
    if settings.get('nlpo_top_p') is not None and 'mask_model' not in settings:
        settings['mask_model'] = strategy.prepare(deepcopy(actor))
    return assemble(strategy, actor, judge, reward, initial, **{'tokenizer': char_tokenizer()} | settings)


def sft(
    data: list[Sequence] | None = None,
    eval_data: list[Sequence] | None = None,
    *,
    strategy: Any = None,
    seed: int = 5,
    config: Any = None,
    dropout: float = 0.0,
    lr: float = 1e-2,
    callbacks: Any = (),
    **settings: Any,
) -> Any:
    strategy = strategy or NaiveStrategy(seed=seed, device='cpu')
    torch.manual_seed(seed)
    model, optim = trained(
        strategy, AutoActor(config=config or tiny_config('gpt2', **SMALL, dropout=dropout)), lr, eps=1e-4
    )
    data = [sequence([3 + i % 5], [4 + i % 7, 2]) for i in range(16)] if data is None else data
    log = Log()
    settings = {'train_batch_size': 4, 'max_epochs': 2, 'log_interval': 1} | settings
    trainer: Any = SFTTrainer(strategy, model, optim, data, eval_data, callbacks=[log, *callbacks], **settings)
    trainer.log = log
    return trainer


def weights(trainer: Any) -> torch.Tensor:
    """Of a run whose every process holds them whole."""
    return torch.cat([p.detach().flatten() for m in trainer.models().values() for p in m.parameters()])


def close(got: list[dict[str, float]], want: list[dict[str, float]], rel: float = 1e-4, abs: float = 1e-5) -> None:
    """The same metrics in every phase, up to rounding."""
    for a, b in zip(got, want, strict=True):
        assert a == {name: pytest.approx(value, rel=rel, abs=abs) for name, value in b.items()}


def near(got: dict[str, Any], want: dict[str, Any], atol: float) -> None:
    """The same weights of every model, by name."""
    for model, tensors in want.items():
        for name, tensor in tensors.items():
            assert float((tensor - got[model][name]).abs().max()) < atol, (model, name)
