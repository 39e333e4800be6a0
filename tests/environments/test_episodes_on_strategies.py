"""The same episodes on one process, two ranks with whole or sharded weights, and with streamed blocks; a checkpoint
resumes on another layout with the next episodes."""

from __future__ import annotations

import hashlib
import random
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from episode_runs import Log, make, same_to_rounding
from stop_after import StopAfter

from chatgpt.environments import Environment, EnvironmentSettings
from chatgpt.nn import GPTActor
from chatgpt.rollout import LocalEngine
from chatgpt.rollout.episodes import EpisodeEngine
from chatgpt.strategies import DDPStrategy, FSDPStrategy, NaiveStrategy
from chatgpt.testing import byte_tokenizer, tiny_config
from chatgpt.testing.processes import run_distributed
from chatgpt.trainer import RFTTrainer
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


def run(strategy: Any, *, source: Path | None = None, target: Path | None = None) -> list[list[dict[str, Any]]]:
    """Returns the phases of a run; with `target` it stops after two and saves."""
    sizes = {'experience_batch_size': 4, 'train_batch_size': 8, 'max_new_tokens': 70, 'eos_token_id': ENDS}
    with strategy:
        callbacks = [log := Log(), *([StopAfter(2)] if target else [])]
        trainer = make(None, Bargain, settings=SETTINGS, callbacks=callbacks, strategy=strategy, **sizes)
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
        'streamed': run(FSDPStrategy(seed=3, device='cpu', stream_blocks=True)),
        'naive, then fsdp': run(FSDPStrategy(seed=3, device='cpu', stream_blocks=False), source=at / 'naive'),
    }


def test_every_strategy_and_number_of_ranks_has_the_same_episodes(tmp_path):
    whole = run(NaiveStrategy(seed=3, device='cpu'))
    assert {e['end'] for phase in whole for e in phase} >= {'terminated', 'turns'}
    assert any(not all(e['response_mask']) for e in whole[0]) and len({len(e['turns']) for e in whole[0]}) > 1
    for phase in whole:
        tasks = {(e['group'], e['prompt_text']) for e in phase}
        assert len(tasks) == len({e['group'] for e in phase}) == 4 and all('price' in task for _, task in tasks)
    run(NaiveStrategy(seed=3, device='cpu'), target=tmp_path / 'naive')
    for rank in run_distributed(on_two_ranks, 2, str(tmp_path)):
        same_to_rounding(rank['ddp'], whole[:2])
        same_to_rounding(rank['streamed'], whole)
        same_to_rounding(rank['naive, then fsdp'], whole[2:])
    same_to_rounding(run(NaiveStrategy(seed=3, device='cpu'), source=tmp_path / 'ddp'), whole[2:])


def on_zero() -> list[list[dict[str, Any]]]:
    from chatgpt.strategies import ColossalAIStrategy

    return run(ColossalAIStrategy(2, 'fp32', seed=3))


@pytest.mark.system
def test_zero_has_the_same_episodes():
    pytest.importorskip('colossalai')
    whole = run(NaiveStrategy(seed=3, device='cpu'))
    for phases in run_distributed(on_zero, 2):
        same_to_rounding(phases, whole)


GENERATES = {'tokenizer': TOKENIZER, 'max_new_tokens': 70, 'eos_token_id': ENDS}


def engine() -> EpisodeEngine:
    return EpisodeEngine(LocalEngine(), Bargain, TOKENIZER, SETTINGS)


def actor() -> GPTActor:
    torch.manual_seed(1)
    return GPTActor(config=tiny_config('gpt2', vocab_size=len(TOKENIZER)))


def prompts(num: int) -> list[Prompt]:
    return [Prompt(ids=torch.tensor(list(f'{i}: '.encode()))) for i in range(num)]


class Returns:
    def score(self, samples: list[Any], strategy: Any) -> list[float]:
        return [sum(sum(t.rewards.values()) for t in s.episode.turns) for s in samples]


def test_rejection_sampling_learns_the_turns_of_good_episodes_alone():
    learned: list[Any] = []
    sizes = {'num_rounds': 1, 'num_samples_per_prompt': 4, 'train_batch_size': 2}
    with NaiveStrategy(seed=3, device='cpu') as strategy:
        policy = actor()
        model, optimizer = strategy.prepare((policy, torch.optim.AdamW(policy.parameters(), lr=1e-3)))
        given = (strategy, model, optimizer, prompts(3), Returns())
        trainer = RFTTrainer(*given, engine=engine(), **GENERATES, **sizes)
        kept = trainer.chosen
        trainer.chosen = lambda number: learned.extend(kept(number)) or learned
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

    with NaiveStrategy(seed=3, device='cpu') as strategy:
        rest = {k: v for k, v in GENERATES.items() if k != 'tokenizer'}
        evaluation = PromptEvaluation(
            prompts(5), TOKENIZER, Returns(), engine=engine(), do_sample=True, num_rows=0, **rest
        )
        view = View(strategy)
        first, second = evaluation(view), evaluation(view)
    assert first == second and first['score_mean'] > 0 and first['length_mean'] > 5


def test_by_hand_there_is_no_environment():
    trainer = make(None, Bargain)
    for call in (partial(trainer.generate, ['a']), partial(trainer.step, ['a'], [torch.tensor([5])], [1.0])):
        with pytest.raises(ValueError, match='acts in fit only: .* response_masks'):
            call()


def weights_after(kind: Any, *seeds: int) -> list[str]:
    return [weights_of_seed(kind, seed) for seed in seeds]


def weights_of_seed(kind: Any, seed: int) -> str:
    """Returns the SHA-256 of actor and critic after two phases."""
    strategy = kind(seed=seed, device='cpu', reproducible='exact', atoms=4)
    sizes = {'experience_batch_size': 8, 'num_samples_per_prompt': 1, 'train_batch_size': 8, 'gae_over': 'turn'}
    trainer = make(None, settings=EnvironmentSettings(max_turn_tokens=6), strategy=strategy, **sizes)
    trainer.fit(max_timesteps=2, update_timesteps=1)
    assert trainer.collector.engine.environment['name'].endswith('Letters')
    digest = hashlib.sha256()
    for model in trainer.models().values():
        for name, tensor in sorted(strategy.unwrap(model).state_dict().items()):
            digest.update(name.encode() + tensor.numpy().tobytes())
    return digest.hexdigest()


def test_one_hash_on_one_rank_and_two():
    ((alone, other),) = run_distributed(weights_after, 1, NaiveStrategy, 1, 2)  # a new process like the others
    assert run_distributed(weights_after, 2, DDPStrategy, 1) == [[alone], [alone]]
    assert other != alone
