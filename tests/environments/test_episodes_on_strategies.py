"""One process, two ranks with whole or sharded weights, blocks that are streamed: the same episodes; and a checkpoint
goes on under another layout with the episodes that follow."""

from __future__ import annotations

import hashlib
import random
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from chatgpt.environments import Environment, EnvironmentSettings
from chatgpt.nn import Actor, Critic, GPTActor, GPTCritic
from chatgpt.rollout import LocalEngine
from chatgpt.rollout.episodes import EpisodeEngine
from chatgpt.strategies import DDPStrategy, FSDPStrategy, NaiveStrategy
from chatgpt.testing import byte_tokenizer, tiny_causal_lm, tiny_config
from chatgpt.testing.processes import run_distributed
from chatgpt.trainer import PPOTrainer, RFTTrainer
from chatgpt.trainer.callbacks import Callback, ProgressBar
from chatgpt.trainer.prompt_evaluation import PromptEvaluation
from chatgpt.types import Prompt

TOKENIZER = byte_tokenizer()
ENDS = [TOKENIZER.eos_token_id, *range(2, len(TOKENIZER), 3)]
SETTINGS = EnvironmentSettings(max_turns=4, max_turn_tokens=5)
PHASES = 3


class Bargain(Environment):
    def reset(self, seed: int, **columns: Any) -> str:
        self.random, self.turns = random.Random(seed), 0
        return f'price {self.random.randint(1, 99)}? '

    def step(self, response: str) -> Any:
        self.turns += 1
        over = self.random.random() < 0.3
        return ' no; and now?' * self.random.randint(0, 2), len(response) / 4, over, False, {'success': over}


class Log(ProgressBar):
    def __init__(self) -> None:
        super().__init__(enabled=False)
        self.phases: list[list[dict[str, Any]]] = []

    def on_make_experience_end(self, trainer: Any, experiences: list[Any]) -> None:
        self.phases.append(
            [
                {
                    'index': e.index,
                    'group': e.group,
                    'tokens': e.prompt_ids.tolist() + e.response_ids.tolist(),
                    'mask': e.response_mask.tolist(),
                    'turns': e.episode.turns,
                    'end': e.episode.end,
                    'success': e.episode.success,
                    'score': e.score,
                    'text': e.response_text,
                    'logprobs': e.logprobs.tolist(),
                    'values': e.values.tolist(),
                }
                for e in experiences
            ]
        )


class StopAfter(Callback):
    def __init__(self, phase: int) -> None:
        self.phase = phase

    def on_phase_end(self, trainer: Any, step: int, metrics: dict[str, float]) -> None:
        if step == self.phase:
            trainer.request_stop()


def run(strategy: Any, *, source: Path | None = None, target: Path | None = None) -> list[list[dict[str, Any]]]:
    """The phases of a run; with `target` it stops after two and saves."""
    with strategy:
        config = tiny_config('gpt2', vocab_size=len(TOKENIZER))
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            actor, critic = GPTActor(config=config), GPTCritic(config=config)
        optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-3, eps=1e-5) for m in (actor, critic)]
        (actor, a), (critic, c) = strategy.prepare((actor, optimizers[0]), (critic, optimizers[1]))
        log = Log()
        trainer = PPOTrainer(
            *(strategy, actor, critic, None, None, a, c),
            environment=Bargain,
            environment_settings=SETTINGS,
            experience_batch_size=4,
            num_samples_per_prompt=2,
            train_batch_size=8,
            kl_coef=0.0,
            max_new_tokens=70,
            eos_token_id=ENDS,
            tokenizer=TOKENIZER,
            callbacks=[log, *([StopAfter(2)] if target else [])],
        )
        if source is not None:
            trainer.load_checkpoint(source)
        trainer.fit(max_timesteps=PHASES, update_timesteps=1)
        if target is not None:
            trainer.save_checkpoint(target)
        return log.phases


def on_two_ranks(folder: str) -> dict[str, Any]:
    at = Path(folder)
    return {
        'ddp': run(DDPStrategy(seed=3, device='cpu'), target=at / 'ddp'),
        'fsdp': run(FSDPStrategy(seed=3, device='cpu', stream_blocks=False)),
        'streamed': run(FSDPStrategy(seed=3, device='cpu', stream_blocks=True)),
        'naive, then fsdp': run(FSDPStrategy(seed=3, device='cpu'), source=at / 'naive'),
    }


def same(found: list[list[dict[str, Any]]], wanted: list[list[dict[str, Any]]]) -> None:
    assert len(found) == len(wanted)
    for phase, want in zip(found, wanted, strict=True):
        assert [e['index'] for e in phase] == [e['index'] for e in want]
        for e, w in zip(phase, want, strict=True):
            for name in e.keys() - {'logprobs', 'values', 'score'}:
                assert e[name] == w[name], name
            for name in ('logprobs', 'values', 'score'):
                assert e[name] == pytest.approx(w[name], abs=1e-4), name


def test_every_strategy_and_number_of_ranks_has_the_same_episodes(tmp_path):
    whole = run(NaiveStrategy(seed=3, device='cpu'))
    assert {e['end'] for phase in whole for e in phase} >= {'terminated', 'turns'}
    assert any(not all(e['mask']) for e in whole[0]) and len({len(e['turns']) for e in whole[0]}) > 1
    for phase in whole:
        groups: dict[int, set[str]] = {}
        for e in phase:
            groups.setdefault(e['group'], set()).add(TOKENIZER.decode(e['tokens'][: e['tokens'].index(ord('?'))]))
        assert len(groups) == 4 and all(len(tasks) == 1 for tasks in groups.values())
    run(NaiveStrategy(seed=3, device='cpu'), target=tmp_path / 'naive')
    ranks = run_distributed(on_two_ranks, 2, str(tmp_path))
    for rank in ranks:
        same(rank['ddp'], whole[:2])
        same(rank['fsdp'], whole)
        same(rank['streamed'], whole)
        same(rank['naive, then fsdp'], whole[2:])
    same(run(NaiveStrategy(seed=3, device='cpu'), source=tmp_path / 'ddp'), whole[2:])


def on_zero() -> list[list[dict[str, Any]]]:
    from chatgpt.strategies import ColossalAIStrategy

    return run(ColossalAIStrategy(2, 'fp32', seed=3))


@pytest.mark.system
def test_zero_has_the_same_episodes():
    pytest.importorskip('colossalai')
    whole = run(NaiveStrategy(seed=3, device='cpu'))
    for phases in run_distributed(on_zero, 2):
        same(phases, whole)


# ---------------------------------------------------------------------- others that hold an engine


def engine() -> EpisodeEngine:
    return EpisodeEngine(LocalEngine(), Bargain, TOKENIZER, SETTINGS)


def actor() -> GPTActor:
    torch.manual_seed(1)
    return GPTActor(config=tiny_config('gpt2', vocab_size=len(TOKENIZER)))


def prompts(num: int = 3) -> list[Prompt]:
    return [Prompt(ids=torch.tensor(list(f'{i}: '.encode()))) for i in range(num)]


def rewards(samples: list[Any]) -> list[float]:
    return [sum(sum(t.rewards.values()) for t in s.episode.turns) for s in samples]


def test_rejection_sampling_learns_the_turns_of_good_episodes_alone():
    class Returns:
        def score(self, samples: list[Any], strategy: Any) -> list[float]:
            return rewards(samples)

    learned: list[Any] = []
    with NaiveStrategy(seed=3, device='cpu') as strategy:
        policy = actor()
        model, optimizer = strategy.prepare((policy, torch.optim.AdamW(policy.parameters(), lr=1e-3)))
        trainer = RFTTrainer(
            *(strategy, model, optimizer),
            prompts(),
            Returns(),
            engine=engine(),
            tokenizer=TOKENIZER,
            num_rounds=1,
            num_samples_per_prompt=4,
            train_batch_size=2,
            max_new_tokens=70,
            eos_token_id=ENDS,
        )
        kept = trainer._kept
        trainer._kept = lambda number: learned.extend(kept(number)) or learned
        trainer.fit()
    assert 3 <= len(learned) < 12
    assert any(not s.response_mask.all() for s in learned)
    for s in learned:
        text = TOKENIZER.decode(s.response_ids[~s.response_mask])
        assert text == ' no; and now?' * text.count('?'), 'what is not learned are the observations'


def test_an_evaluation_plays_the_same_episodes_each_time():
    class View:
        scorer, phase, run_dir, tokenizer = None, 0, None, TOKENIZER

        def __init__(self, strategy: Any) -> None:
            self.strategy, self.actor = strategy, strategy.prepare(actor())

        def models(self) -> dict[str, Any]:
            return {'actor': self.actor}

    class Returns:
        def score(self, samples: list[Any], strategy: Any) -> list[float]:
            return rewards(samples)

    with NaiveStrategy(seed=3, device='cpu') as strategy:
        evaluation = PromptEvaluation(
            prompts(5),
            TOKENIZER,
            Returns(),
            engine=engine(),
            do_sample=True,
            max_new_tokens=70,
            eos_token_id=ENDS,
            num_rows=0,
        )
        view = View(strategy)
        first, second = evaluation(view), evaluation(view)
    assert first == second and first['score_mean'] > 0
    assert first['length_mean'] > 5


def test_by_hand_there_is_no_environment():
    with NaiveStrategy(seed=3, device='cpu') as strategy:
        policy = actor()
        model, optimizer = strategy.prepare((policy, torch.optim.AdamW(policy.parameters(), lr=1e-3)))
        trainer = PPOTrainer(
            *(strategy, model, None, None, None, optimizer),
            environment=Bargain,
            tokenizer=TOKENIZER,
            advantage_estimator='reinforce++',
            kl_coef=0.0,
        )
        for call in (partial(trainer.generate, ['a']), partial(trainer.step, ['a'], [torch.tensor([5])], [1.0])):
            with pytest.raises(ValueError, match='acts in fit only: .* response_masks'):
                call()


# ---------------------------------------------------------------------- reproducible='exact'


class Answers(Environment):
    """Says a number and what it heard; three turns."""

    def reset(self, seed: int, **columns: Any) -> str:
        self.turn = 0
        return f'n{random.Random(seed).randint(0, 99)}:'

    def step(self, response: str) -> Any:
        self.turn += 1
        done = self.turn == 3
        return f'<{len(response)}>', float(sum(map(ord, response)) % 7), done, False, {}


def weights_after(kind: str, seed: int = 1) -> str:
    """SHA-256 of actor and critic after three phases."""
    strategy: Any = {'naive': NaiveStrategy, 'ddp': DDPStrategy}[kind](
        seed=seed, device='cpu', reproducible='exact', atoms=4
    )
    tokenizer = byte_tokenizer()
    size = {'vocab_size': len(tokenizer), 'n_positions': 128}
    models = Actor(tiny_causal_lm('gpt2', **size)), Critic(tiny_causal_lm('gpt2', seed=1, **size))
    (actor, actor_optim), (critic, critic_optim) = strategy.prepare(
        *((m, torch.optim.AdamW(m.parameters(), lr=1e-3)) for m in models)
    )
    trainer = PPOTrainer(
        *(strategy, actor, critic, None, None, actor_optim, critic_optim),
        tokenizer=tokenizer,
        environment=Answers,
        environment_settings=EnvironmentSettings(max_turn_tokens=6),
        gae_over='turn',
        experience_batch_size=8,
        train_batch_size=8,
        kl_coef=0.0,
        max_new_tokens=40,
    )
    trainer.fit(max_timesteps=3, update_timesteps=1)
    assert trainer.collector.engine.environment['name'].endswith('Answers')
    digest = hashlib.sha256()
    for model in models:
        for name, tensor in sorted(model.state_dict().items()):
            digest.update(name.encode() + tensor.numpy().tobytes())
    return digest.hexdigest()


def test_one_hash_on_one_rank_and_two():
    (alone,) = run_distributed(weights_after, 1, 'naive')  # a process as fresh as the others
    assert run_distributed(weights_after, 2, 'ddp') == [alone, alone]
    assert run_distributed(weights_after, 1, 'naive', 2) != [alone]
