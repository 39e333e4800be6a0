"""Trainers of tiny models, a callback that records their metrics, and comparisons of two runs."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch

from chatgpt.data import TokenizedPreference
from chatgpt.nn import AutoActor, AutoCritic
from chatgpt.nn.records import fetched
from chatgpt.strategies import NaiveStrategy
from chatgpt.testing.fakes import char_tokenizer, tiny_config
from chatgpt.trainer import PPOTrainer, SFTTrainer
from chatgpt.trainer.callbacks import ProgressBar, SaveCheckpoint
from chatgpt.types import Experience, Sequence

PROMPTS = [f'a {word}' for word in 'one two three four five six'.split()]
SMALL: dict[str, Any] = {'vocab_size': 16, 'hidden': 16, 'positions': 32}


class Log(ProgressBar):
    """Records the metrics of every phase, without the seconds, and its experiences, of all ranks."""

    def __init__(self) -> None:
        super().__init__(enabled=False)
        self.phases: list[dict[str, float]] = []
        self.experiences: list[list[Experience]] = []

    def on_make_experience_end(self, trainer: Any, experiences: list[Experience]) -> None:
        self.experiences.append(fetched(trainer.strategy, experiences))

    def on_phase_end(self, trainer: Any, step: int, metrics: dict[str, float]) -> None:
        self.phases.append({k: v for k, v in metrics.items() if not k.startswith('perf/')})

    def samples(self) -> list[Any]:
        return [(e.index, e.response_ids.tolist(), e.score) for phase in self.experiences for e in phase]


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
    """Returns a PPOTrainer of these models, with its phases in `log`."""
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
    value_head: Any = False,
    head_scale: float = 1.0,
    **settings: Any,
) -> Any:
    """Returns a PPOTrainer of GPT-2 on texts; with an adapter or a frozen trunk the actor is its own reference. Has a
    critic if the estimator needs one."""
    strategy = strategy or NaiveStrategy(seed=seed, device='cpu')
    torch.manual_seed(seed)
    config = config or tiny_config('gpt2', positions=48)
    if critic is None:
        critic = not value_head and settings.get('advantage_estimator', 'gae') in ('gae', 'a2c')
    own = {'num_layers_unfrozen': num_layers_unfrozen} if num_layers_unfrozen else {}
    with strategy.model_init_context():
        actor = AutoActor(config=config, lora_rank=lora_rank, value_head=value_head or None, **own)
        if head_scale != 1.0:
            with torch.no_grad():
                actor.model.lm_head.weight.mul_(head_scale)
        initial = None if lora_rank or own else deepcopy(actor)
        judge = AutoCritic(config=config) if critic else None
    if settings.get('nlpo_top_p') is not None and 'mask_model' not in settings:
        settings['mask_model'] = strategy.prepare(deepcopy(actor))
    return assemble(strategy, actor, judge, reward, initial, **{'tokenizer': char_tokenizer()} | settings)


def fit(trainer: Any, phases: int, prompts: Any = PROMPTS) -> Any:
    trainer.fit(prompts, num_episodes=1, max_timesteps=phases, update_timesteps=1)
    return trainer


def offline(
    cls: Any,
    strategy: Any,
    model: Any,
    data: Any,
    eval_data: Any = None,
    *,
    lr: float = 3e-3,
    callbacks: Any = (),
    **settings: Any,
) -> Any:
    """Returns a trainer of that class, with its phases in `log`: batches of four, each a phase."""
    model, optim = trained(strategy, model, lr, eps=1e-4)
    log = Log()
    settings = {'train_batch_size': 4, 'log_interval': 1, 'callbacks': [log, *callbacks]} | settings
    trainer = cls(strategy, model, optim, data, eval_data, **settings)
    trainer.log = log
    return trainer


def sft(
    data: Any = None,
    eval_data: Any = None,
    *,
    strategy: Any = None,
    seed: int = 5,
    config: Any = None,
    dropout: float = 0.0,
    lr: float = 1e-2,
    **settings: Any,
) -> Any:
    strategy = strategy or NaiveStrategy(seed=seed, device='cpu')
    torch.manual_seed(seed)
    model = AutoActor(config=config or tiny_config('gpt2', **SMALL, dropout=dropout))
    data = [sequence([3 + i % 5], [4 + i % 7, 2]) for i in range(16)] if data is None else data
    return offline(SFTTrainer, strategy, model, data, eval_data, lr=lr, **{'max_epochs': 2} | settings)


def check_resume(make: Any, folder: Any, done: int, run: Any = lambda trainer: trainer.fit()) -> Any:
    """Checks that a run resumed from its checkpoint after `done` phases has the bits of the run that wrote it, which is
    returned; `make` takes settings."""
    whole, rest = make(run_dir=folder, callbacks=[SaveCheckpoint(interval=1, keep_last=9)]), make()
    run(whole)
    assert 0 < done < len(whole.log.phases)
    assert rest.load_checkpoint(folder / 'checkpoints' / f'step-{done:08d}')
    run(rest)
    assert rest.log.phases == whole.log.phases[done:]
    for name, model in whole.models().items():
        again = rest.models()[name].state_dict()
        assert all(torch.equal(again[n], tensor) for n, tensor in model.state_dict().items())
    return whole


def weights(trainer: Any) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for m in trainer.models().values() for p in m.parameters()])


def close(got: list[dict[str, float]], want: list[dict[str, float]], rel: float = 1e-4, abs: float = 1e-5) -> None:
    """Checks that every phase has the same metrics, up to rounding."""
    for a, b in zip(got, want, strict=True):
        assert a == {name: pytest.approx(value, rel=rel, abs=abs) for name, value in b.items()}


def near(got: dict[str, Any], want: dict[str, Any], atol: float) -> None:
    for model, tensors in want.items():
        for name, tensor in tensors.items():
            assert float((tensor - got[model][name]).abs().max()) < atol, (model, name)


def outcome(strategy: Any, trainer: Any, **more: Any) -> dict[str, Any]:
    """Returns the results of a PPO run on this rank; whole weights on rank 0."""
    weights = {name: strategy.full_state_dict(model) for name, model in trainer.models().items()}
    return {'metrics': trainer.log.phases, 'samples': trainer.log.samples(), 'weights': weights} | more


def check_outcome(got: dict[str, Any], want: dict[str, Any], atol: float, rel: float = 1e-4, abs: float = 2e-6) -> None:
    """Checks for equal draws and scores, losses up to rounding, and weights within `atol`."""
    assert got['samples'] == want['samples']
    for a, b in zip(got['metrics'], want['metrics'], strict=True):
        assert a.keys() == b.keys()
        losses = ('ppo/policy_loss', 'ppo/value_loss', 'ppo/actor_grad_norm', 'ppo/critic_grad_norm', 'rollout/kl_mean')
        assert b.keys() >= {'ppo/policy_loss', 'ppo/actor_grad_norm', 'rollout/kl_mean'}
        for name in b.keys() & set(losses):
            assert a[name] == pytest.approx(b[name], rel=rel, abs=abs), name
    near(got['weights'], want['weights'], atol)
