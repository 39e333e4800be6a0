"""Planted faults for `doctor.py`: tiny runs of a second or two, each with one fault.

`FAULTS` maps each finding of the doctor to the run with the fault and the same run without it.
"""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from harness import offline_trainer, ppo_trainer, random_sequence
from torch import nn
from torch.optim import AdamW

from chatgpt.data import TokenizedPreference, load_preferences, load_prompts
from chatgpt.launch import demo_world
from chatgpt.nn import AutoRM, GPTActor, GPTCritic
from chatgpt.rollout import LocalEngine
from chatgpt.strategies import DDPStrategy, NaiveStrategy
from chatgpt.testing import char_tokenizer, tiny_config
from chatgpt.testing.processes import run_distributed
from chatgpt.trainer import DPOTrainer, RewardModelTrainer, SFTTrainer
from chatgpt.trainer.callbacks import Callback, Evaluator
from chatgpt.types import Sequence

VOCAB, END, GOOD = 16, 2, 7


class Fault(NamedTuple):
    planted: Callable[[Path], Any]
    """runs the fault in a folder"""
    without: Callable[[Path], Any]
    """the same run without the fault, which must not have the finding"""
    about: str


# ---------------------------------------------------------------------- rewards: modules that need no text


class ResponseReward(nn.Module):
    """A reward model that returns `score(ids)` of each response, shape (B,)."""

    def __init__(self, score: Callable[[torch.Tensor], float]) -> None:
        super().__init__()
        self.score, self.num_calls = score, 0

    def forward(self, batch: Any) -> torch.Tensor:
        self.num_calls += 1
        of_row = [batch.action_ids[batch.action_rows == row] for row in range(batch.num_sequences)]
        return torch.tensor([self.score(ids) if len(ids) else 0.0 for ids in of_row])


def good_share(ids: torch.Tensor) -> float:
    return float((ids == GOOD).float().mean())


def begins_low(ids: torch.Tensor) -> float:
    """Returns a score that the first token tells, so a critic can know it at all later ones."""
    return float(ids[0] < 9)


def spread(ids: torch.Tensor) -> float:
    """Returns a score that differs between responses and that nothing can be learned from."""
    return float((ids.double() * torch.arange(1, len(ids) + 1)).sum().sin())


class BatchSizeReward(ResponseReward):
    """A reward that depends on the number of responses in the batch."""

    def forward(self, batch: Any) -> torch.Tensor:
        return super().forward(batch) + 0.01 * batch.num_sequences


def outlier(ids: torch.Tensor) -> float:
    """Returns a score that is 1000 higher if the response begins with a certain token."""
    return spread(ids) + 1000.0 * float(ids[0] == GOOD)


class Bursts(ResponseReward):
    """A reward that is multiplied by 1000 in every second phase from the thirteenth on."""

    def forward(self, batch: Any) -> torch.Tensor:
        scores = super().forward(batch)
        return scores * (1000.0 if self.num_calls > 16 and self.num_calls % 2 else 1.0)


# ---------------------------------------------------------------------- runs


def prompts() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, VOCAB, (1 + i % 4,), generator=generator) for i in range(32)]


def online(
    folder: Path,
    *,
    phases: int = 14,
    score: Callable[[torch.Tensor], float] = good_share,
    reward: Any = None,
    lr: float = 1e-3,
    critic_lr: float = 3e-3,
    shared: bool = False,
    engine: Any = None,
    given: Any = None,
    vocab: int = VOCAB,
    callbacks: Any = (),
    ddp: bool = False,
    quiet: bool = True,
    sharp: float = 1.0,
    **settings: Any,
) -> None:
    """Trains a policy of 7,000 parameters with PPO on token ids; the score is the share of one token in a response.

    sharp: multiplies the embedding, which is also the head: 1 gives a nearly uniform policy, 60 a peaked one.
    """
    config = tiny_config('gpt2', vocab_size=vocab, hidden=16, positions=64)
    with (DDPStrategy if ddp else NaiveStrategy)(seed=0) as ranks, warnings.catch_warnings():
        warnings.simplefilter('ignore' if quiet else 'always')
        actor = GPTActor(config=config, value_head=True if shared else None)
        actor.model.get_input_embeddings().weight.data *= sharp
        values = None if shared or settings.get('advantage_estimator') == 'grpo' else GPTCritic(config=config)
        own = {'experience_batch_size': 16, 'train_batch_size': 8, 'max_epochs': 2, 'kl_coef': 0.05}
        trainer = ppo_trainer(
            ranks,
            actor,
            values,
            reward or ResponseReward(score),
            deepcopy(actor),
            optimizer=partial(AdamW, lr=lr, eps=1e-5),
            critic_optimizer=partial(AdamW, lr=critic_lr, eps=1e-5),
            callbacks=callbacks,
            engine=engine,
            run_dir=folder,
            **own | {'max_new_tokens': 6, 'eos_token_id': END} | settings,
        )
        trainer.fit(given if given is not None else prompts(), 1, phases, 1)


def preferences(folder: Path, lr: float) -> None:
    """Trains DPO, after SFT, on answers of four tokens that differ in one."""
    generator = torch.Generator().manual_seed(3)
    prompts = torch.randint(3, VOCAB, (240, 3), generator=generator)
    other = (prompts[:, 2] - 2 + torch.randint(0, 11, (240,), generator=generator)) % (VOCAB - 3) + 3
    pairs, right = [], []
    for prompt, token in zip(prompts, other, strict=True):
        mask = torch.ones(4, dtype=torch.bool)
        answers = [torch.tensor([*prompt[:2], last, END]) for last in (prompt[2], token)]
        pairs.append(TokenizedPreference(prompt_ids=prompt, responses=answers, response_masks=[mask, mask]))
        right.append(Sequence(prompt_ids=prompt, response_ids=answers[0], response_mask=mask))
    with NaiveStrategy(seed=0, device='cpu') as strategy:
        actor = GPTActor(config=tiny_config('gpt2', vocab_size=VOCAB, hidden=32, positions=32))
        first = {'train_batch_size': 16, 'max_epochs': 8}
        offline_trainer(SFTTrainer, strategy, actor, right, optimizer=partial(AdamW, lr=3e-3), **first).fit()
        settings = {'train_batch_size': 8, 'max_epochs': 2, 'log_interval': 4, 'run_dir': folder}
        settings['initial_model'] = strategy.prepare(deepcopy(strategy.unwrap(actor)))
        offline_trainer(DPOTrainer, strategy, actor, pairs, optimizer=partial(AdamW, lr=lr), **settings).fit()


def memorised(folder: Path, eval_same: bool = False) -> None:
    """Trains SFT on random tokens, which can only be memorised."""
    generator = torch.Generator().manual_seed(3)
    train, others = ([random_sequence(generator, 1, 11, VOCAB) for _ in range(num)] for num in (8, 32))
    settings = {'train_batch_size': 8, 'max_epochs': 24, 'log_interval': 1, 'run_dir': folder}
    with NaiveStrategy(seed=0, device='cpu') as strategy:
        actor = GPTActor(config=tiny_config('gpt2', vocab_size=VOCAB, hidden=32, positions=32))
        data, adam = (train, train if eval_same else others), partial(AdamW, lr=3e-3)
        offline_trainer(SFTTrainer, strategy, actor, *data, optimizer=adam, **settings).fit()


def reward_model(folder: Path, lr: float) -> None:
    """Trains the demo's reward model, a quarter of a million parameters, from new weights."""
    tokenizer = demo_world.demo_tokenizer()
    pairs, _ = load_preferences(demo_world.demo_preferences(480, seed=0), tokenizer)
    with NaiveStrategy(seed=0, device='cpu') as strategy:
        model = AutoRM(config=demo_world.demo_config())
        settings = {'train_batch_size': 32, 'max_epochs': 2, 'log_interval': 3, 'run_dir': folder}
        offline_trainer(RewardModelTrainer, strategy, model, pairs, optimizer=partial(AdamW, lr=lr), **settings).fit()


def text_prompts(room: int | None) -> Any:
    return load_prompts(
        [f'tell me of the number {i} and of its friends' for i in range(24)], char_tokenizer(), max_prompt_tokens=room
    )


class OtherPolicy(LocalEngine):
    """An engine that returns log-probs of stale weights."""

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        samples = super().generate(*args, **kwargs)
        for sample in samples:
            sample.logprobs = sample.logprobs - 0.1
        return samples


class SlowOn1(LocalEngine):
    """An engine that is slower on rank 1."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank = rank

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        samples = super().generate(*args, **kwargs)
        if self.rank == 1:
            time.sleep(0.2 + 2 * (time.perf_counter() - start))
        return samples


def as_rank(folder: str, slow: bool) -> None:
    """Runs one of two ranks under DDP."""
    rank = int(os.environ['RANK'])
    online(Path(folder), phases=6, ddp=True, engine=SlowOn1(rank) if slow else None)


def on_two_ranks(folder: Path, slow: bool) -> None:
    run_distributed(as_rank, 2, str(folder), slow)


class Sleeps(Callback):
    """A slow callback of the user."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def on_phase_end(self, trainer: Any, step: int, metrics: dict[str, float]) -> None:
        time.sleep(self.seconds)


def evaluating(value: Callable[[float], float]) -> list[Any]:
    """Returns an evaluation that maps the share of the good token to a score."""

    def evaluate(trainer: Any) -> dict[str, float]:
        shares = [good_share(e.response_ids) for e in trainer.last_experiences] or [0.0]
        return {'true_score': sum(map(value, shares)) / len(shares)}

    return [Evaluator(evaluate, 2, before=False)]


def run(**settings: Any) -> Callable[[Path], None]:
    return lambda folder: online(folder, **settings)


def short(target: float) -> Callable[[torch.Tensor], float]:
    return lambda ids: -abs(len(ids) - target) / 10


GROUPS: dict[str, Any] = {'advantage_estimator': 'grpo', 'num_samples_per_prompt': 4, 'experience_batch_size': 16}
FAST: dict[str, Any] = {'lr': 1e-2, 'kl_coef': 0.0, 'phases': 20}
BLIND: dict[str, Any] = {'score': spread, 'value_clip': None, 'lr': 1e-5}
FIRST: dict[str, Any] = {'score': begins_low, 'experience_batch_size': 32, 'critic_epochs': 2}
AT_ONCE: dict[str, Any] = {'sharp': 60.0, 'phases': 3}
plain = run()

FAULTS: dict[str, Fault] = {
    'nothing-moves': Fault(run(lr=1e-9), plain, 'lr 1e-9'),
    'nothing-moves (reward model)': Fault(partial(reward_model, lr=1e-5), partial(reward_model, lr=1e-3), 'lr 1e-5'),
    'chosen-unlikely': Fault(partial(preferences, lr=1e-2), partial(preferences, lr=1e-3), 'lr 1e-2'),
    'kl-runs-away': Fault(run(**FAST), plain, 'kl_coef 0, lr 1e-2'),
    'kl-runs-away (at once)': Fault(run(lr=10.0, **AT_ONCE), run(**AT_ONCE), 'lr 10'),
    'kl-coef-at-limit': Fault(
        run(kl_target=50.0, phases=26, lr=6e-4), run(kl_target=1.0, phases=26, kl_horizon=200, lr=6e-4), 'kl_target 50'
    ),
    'clip-fraction-high': Fault(run(lr=3e-2), plain, 'lr 3e-2'),
    'clip-fraction-zero': Fault(run(lr=6e-5, phases=16), plain, 'lr 6e-5'),
    'ratio-not-one': Fault(run(engine=OtherPolicy()), plain, "an engine's log-probs 0.1 off"),
    'entropy-collapses': Fault(run(entropy_coef=-1.0, score=spread, lr=3e-3, phases=22), plain, 'entropy_coef -1'),
    'value-loss-dominates': Fault(
        run(shared=True, score=lambda ids: 50 + 50 * good_share(ids)), run(shared=True), 'scores about 50, shared trunk'
    ),
    'explained-variance-low': Fault(run(critic_lr=0.3, phases=24), run(phases=24), 'critic_lr 0.3'),
    'critic-worse-than-constant': Fault(
        run(max_epochs=20, **BLIND), run(max_epochs=2, **BLIND), '20 passes over scores that no text tells'
    ),
    'critic-warmup-short': Fault(
        run(critic_warmup_phases=6, phases=14, **FIRST),
        run(critic_warmup_phases=12, phases=19, **FIRST),
        'a warm-up of 6 phases',
    ),
    'over-optimisation': Fault(
        run(callbacks=evaluating(lambda share: share * (0.4 - share)), lr=3e-3, phases=20, kl_coef=0.0),
        run(callbacks=evaluating(lambda share: share), lr=3e-3, phases=20, kl_coef=0.0),
        'what is wanted falls above a share of 0.2',
    ),
    'score-saturates': Fault(
        run(score=lambda ids: float((ids == GOOD).any()), **FAST), plain, 'one good token is enough'
    ),
    'scores-equal': Fault(run(score=lambda ids: 1.0), plain, 'a constant reward'),
    'groups-without-signal': Fault(
        run(score=lambda ids: float((ids == GOOD).sum() > 1), **GROUPS), run(**GROUPS), 'a reward hardly ever given'
    ),
    'reward-outliers': Fault(run(score=outlier), run(score=spread), '1000 more for one token'),
    'reward-model-disagrees': Fault(run(reward=BatchSizeReward(good_share), phases=2), run(phases=2), 'sees its batch'),
    'repetition-within': Fault(run(max_new_tokens=32, **FAST), run(max_new_tokens=32), 'pays for one token only'),
    'repetition-across': Fault(run(max_new_tokens=32, **FAST), run(max_new_tokens=32), 'pays for one token only'),
    'ends-at-once': Fault(run(score=short(1), lr=1e-2, phases=24, kl_coef=0.0), plain, 'pays for saying nothing'),
    'never-ends': Fault(
        run(eos_token_id=[], missing_eos_score=-1.0, max_new_tokens=20),
        run(missing_eos_score=-1.0, max_new_tokens=20),
        'no end token',
    ),
    'length-limit': Fault(
        run(score=lambda ids: len(ids) / 10, max_new_tokens=32, **FAST), run(max_new_tokens=32), 'pays for length'
    ),
    'length-drifts': Fault(run(score=short(4), max_new_tokens=40, **FAST), run(max_new_tokens=40), 'pays for brevity'),
    'few-prompts': Fault(run(given=prompts()[:1], phases=2), run(phases=2), 'one prompt'),
    'duplicate-prompts': Fault(run(given=prompts() * 3, phases=2), run(phases=2), 'a file joined thrice'),
    'cut-prompts': Fault(
        lambda folder: online(folder, given=text_prompts(24), vocab=64, phases=2),
        lambda folder: online(folder, given=text_prompts(None), vocab=64, phases=2),
        'max_prompt_tokens 24 of 43',
    ),
    'schedule-ends-early': Fault(
        run(lr_schedule='linear', lr_decay_steps=12), run(lr_schedule='linear'), 'lr_decay_steps 12 of 56'
    ),
    'grad-norm-spikes': Fault(run(reward=Bursts(good_share), phases=20), run(phases=20), 'scores x 1000 now and then'),
    'eval-loss-rises': Fault(memorised, partial(memorised, eval_same=True), '8 random texts, 24 epochs'),
    'slow-rank': Fault(partial(on_two_ranks, slow=True), partial(on_two_ranks, slow=False), 'rank 1 of 2 sleeps'),
    'time-elsewhere': Fault(run(callbacks=[Sleeps(1.5)], phases=6), run(phases=6), 'a callback that sleeps'),
}
"""faults by the key of the finding; words in brackets distinguish runs with the same key"""


def key_of(name: str) -> str:
    return name.split(' ')[0]
