"""`reproducible='exact'` while collecting: the engine's batches have no effect on tokens and numbers, and settings that
would give them one are refused."""

from __future__ import annotations

import math
from copy import deepcopy
from typing import Any

import pytest
import torch
from tiny_runs import Log, assemble, trained, weights
from transformers import AutoModel

from chatgpt.nn import Actor, Critic, RewardModel
from chatgpt.rollout import HFEngine, LocalEngine
from chatgpt.strategies import DDPStrategy, FSDPStrategy, NaiveStrategy
from chatgpt.testing import tiny_causal_lm
from chatgpt.testing.fakes import char_tokenizer, tiny_config
from chatgpt.testing.processes import run_distributed
from chatgpt.trainer import RFTTrainer
from chatgpt.trainer.callbacks import Callback
from chatgpt.trainer.prompt_evaluation import PromptEvaluation


class Uneven(Actor):
    """An actor that generates with an error in its logits that depends on the shape of the batch."""

    def head(self, hidden):
        logits = super().head(hidden)
        generator = torch.Generator().manual_seed(math.prod(hidden.shape[:-1]))
        return logits + 5e-3 * (2 * torch.rand(logits.shape[-1], generator=generator) - 1)


class Draws(Callback):
    """Records the number of repeated draws in each phase, and of those that changed."""

    def __init__(self) -> None:
        self.phases: list[tuple[float, float]] = []

    def on_phase_end(self, trainer: Any, step: int, metrics: dict[str, float]) -> None:
        self.phases.append((metrics.get('perf/redrawn_draws', -1.0), metrics.get('perf/changed_draws', -1.0)))


def prompts() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, 64, (1 + i % 4,), generator=generator) for i in range(8)]


def uneven() -> Actor:
    return Uneven(tiny_causal_lm('gpt2', positions=48))


def reward_model() -> RewardModel:
    return RewardModel(AutoModel.from_config(tiny_config('gpt2', positions=48)))


SIZES = {'experience_batch_size': 8, 'train_batch_size': 8, 'max_new_tokens': 12}


def trainer_of(strategy: Any, rows: int = 256, **settings: Any) -> Any:
    actor, critic = uneven(), Critic(AutoModel.from_config(tiny_config('gpt2', positions=48)))
    settings = {'engine': LocalEngine(max_batch_size=rows), 'eos_token_id': 2} | SIZES | settings
    return assemble(strategy, actor, critic, reward_model(), deepcopy(actor), **settings)


def exact(kind: Any = NaiveStrategy, **options: Any) -> Any:
    return kind(seed=0, device='cpu', reproducible='exact', **options)


def run(strategy: Any, rows: int = 256) -> tuple[Any, list[tuple[float, float]]]:
    draws = Draws()
    with strategy:
        trainer = trainer_of(strategy, rows, callbacks=[draws])
        trainer.fit(prompts(), num_episodes=1, max_timesteps=2, update_timesteps=1)
    return trainer, draws.phases


@pytest.mark.parametrize('precision', ['fp32', 'bf16'])
def test_rows_of_the_engine_have_no_effect(precision):
    (one, first), (other, second) = (run(exact(precision=precision), rows) for rows in (256, 3))
    assert torch.equal(weights(one), weights(other)) and one.log.phases == other.log.phases
    draws = first + second
    assert len(draws) == 4 and all(redrawn > changed for redrawn, changed in draws) and sum(c for _, c in draws) > 0
    # in an ordinary run they have an effect, on tokens and on the decode's log-probs
    plain = [run(NaiveStrategy(seed=0, precision=precision), rows) for rows in (256, 3)]
    assert not torch.equal(*(weights(trainer) for trainer, _ in plain))
    assert plain[0][1] == [(-1.0, -1.0)] * 2


def collected(kind: Any, **options: Any) -> tuple[dict[str, torch.Tensor], list[dict[str, float]]]:
    """Returns weights, on rank 0, and metrics."""
    with exact(kind, **options) as strategy:
        trainer = trainer_of(strategy)
        trainer.fit(prompts(), num_episodes=1, max_timesteps=2, update_timesteps=1)
        return {n: t.clone() for n, t in strategy.full_state_dict(trainer.actor).items()}, trainer.log.phases


def scores_of(kind: Any) -> tuple[dict[str, float], dict[str, float], list[list[int]]]:
    """Returns scores of a reward model for three eval prompts, and for the nine samples of a round of RFT: neither
    number is a multiple of two ranks."""
    with exact(kind) as strategy:
        found = PromptEvaluation(prompts()[:3], max_new_tokens=12)(trainer_of(strategy))
        (actor, optim), log = trained(strategy, uneven()), Log()
        settings = {'max_new_tokens': 12, 'num_rounds': 1, 'num_samples_per_prompt': 3, 'train_batch_size': 8}
        rft = RFTTrainer(
            strategy, actor, optim, prompts()[:3], strategy.prepare(reward_model()), callbacks=[log], **settings
        )
        rft.fit()
        return found, log.phases[0], [s.response_ids.tolist() for s in rft.train_data]


def on_one_process() -> tuple[Any, Any]:
    return collected(NaiveStrategy), scores_of(NaiveStrategy)


def on_two_processes() -> tuple[Any, Any]:
    """Also with a policy that generates block by block."""
    return collected(FSDPStrategy, stream_blocks=True), scores_of(DDPStrategy)


def test_ranks_and_streamed_blocks_have_no_effect():
    (((weights_alone, phases_alone), want),) = run_distributed(on_one_process, 1)
    ((actor, phases), one), ((_, others), other) = run_distributed(on_two_processes, 2, init_group=True)
    assert phases == others == phases_alone
    assert actor and all(torch.equal(actor[name], tensor) for name, tensor in weights_alone.items())
    assert want[0]['score_mean'] != 0 and 0 < len(want[2]) < 9
    assert one == other == want


def test_rft_and_evaluation_draw_exactly():
    def kept(rows: int) -> tuple[list[list[int]], dict[str, float], tuple[float, float]]:
        def reward(prompts: list[str], responses: list[str]) -> list[float]:
            return [float(sum(map(ord, r)) % 97) for r in responses]

        draws, engine, texts = Draws(), LocalEngine(max_batch_size=rows), ['ab', 'c', 'd e', 'f']
        with exact() as strategy:
            actor, optim = trained(strategy, uneven())
            settings = {'tokenizer': char_tokenizer(), 'engine': engine, 'callbacks': [Log(), draws]}
            settings |= {'max_new_tokens': 16, 'num_rounds': 1, 'train_batch_size': 8}
            trainer = RFTTrainer(strategy, actor, optim, texts, reward, **settings)
            trainer.fit()
            evaluation = PromptEvaluation(
                texts, engine=LocalEngine(max_batch_size=rows), max_new_tokens=16, do_sample=True
            )
            return [s.response_ids.tolist() for s in trainer.train_data], evaluation(trainer), draws.phases[0]

    one, other = kept(256), kept(2)
    assert one[:2] == other[:2]
    assert one[2][0] > 0 and one[2][1] + other[2][1] > 0


def test_settings_that_read_the_decode_are_refused():
    for settings, message in (
        ({'engine': HFEngine()}, "draws again what rounding could change.*HFEngine.*use engine='local'"),
        ({'tis_cap': 2.0}, r'tis_cap=2.0 reads the log-probs of the decode.*leave tis_cap out'),
    ):
        with exact() as strategy, pytest.raises(ValueError, match=message):
            trainer_of(strategy, **settings)
