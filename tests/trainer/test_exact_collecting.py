"""`reproducible='exact'` while collecting: the engine's batches enter neither tokens nor numbers, and what would let
them in is refused."""

from __future__ import annotations

import math
from copy import deepcopy
from typing import Any

import pytest
import torch
from phase_log import Log

from chatgpt.nn import Actor, Critic, RewardModel
from chatgpt.rollout import HFEngine, LocalEngine
from chatgpt.strategies import DDPStrategy, FSDPStrategy, NaiveStrategy
from chatgpt.testing import tiny_causal_lm
from chatgpt.testing.fakes import char_tokenizer, tiny_config
from chatgpt.testing.processes import run_distributed
from chatgpt.trainer import PPOTrainer, RFTTrainer
from chatgpt.trainer.prompt_evaluation import PromptEvaluation


class Uneven(Actor):
    """Generates with an error in its logits that depends on the shape of the batch."""

    def head(self, hidden):
        logits = super().head(hidden)
        generator = torch.Generator().manual_seed(math.prod(hidden.shape[:-1]))
        return logits + 5e-3 * (2 * torch.rand(logits.shape[-1], generator=generator) - 1)


class Perf(Log):
    """Also keeps what was drawn again."""

    def __init__(self) -> None:
        super().__init__()
        self.draws: list[tuple[float, float]] = []

    def on_phase_end(self, trainer: Any, step: int, metrics: dict[str, float]) -> None:
        super().on_phase_end(trainer, step, metrics)
        self.draws.append((metrics.get('perf/redrawn_draws', -1.0), metrics.get('perf/changed_draws', -1.0)))


def prompts() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, 64, (1 + i % 4,), generator=generator) for i in range(8)]


def trainer_of(
    rows: int = 256, exact: bool = True, precision: Any = 'fp32', strategy: Any = None, **settings: Any
) -> PPOTrainer:
    from transformers import AutoModel

    strategy = strategy or NaiveStrategy(seed=0, precision=precision, **({'reproducible': 'exact'} if exact else {}))
    config = tiny_config('gpt2', positions=48)
    actor = Uneven(tiny_causal_lm('gpt2', positions=48))
    critic, reward = Critic(AutoModel.from_config(config)), RewardModel(AutoModel.from_config(config))
    (actor, optim), (critic, critic_optim), reward, initial = strategy.prepare(
        (actor, torch.optim.AdamW(actor.parameters(), lr=1e-3)),
        (critic, torch.optim.AdamW(critic.parameters(), lr=1e-3)),
        reward,
        deepcopy(actor),
    )
    settings = {'engine': LocalEngine(max_batch_size=rows), 'callbacks': [Perf()]} | settings
    settings = {'experience_batch_size': 8, 'train_batch_size': 8, 'max_new_tokens': 16} | settings
    try:
        return PPOTrainer(strategy, actor, critic, reward, initial, optim, critic_optim, eos_token_id=2, **settings)
    except ValueError:
        strategy.close()
        raise


def trained(**settings: Any) -> tuple[PPOTrainer, Perf]:
    trainer = trainer_of(**settings)
    trainer.fit(prompts(), num_episodes=1, max_timesteps=2, update_timesteps=1)
    trainer.strategy.close()
    return trainer, next(c for c in trainer.callbacks if isinstance(c, Perf))


def weights(trainer: PPOTrainer) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for m in trainer.models().values() for p in m.parameters()])


@pytest.mark.parametrize('precision', ['fp32', 'bf16'])
def test_rows_of_the_engine_do_not_enter_a_run(precision):
    one, other = (trained(rows=rows, precision=precision) for rows in (256, 3))
    assert torch.equal(weights(one[0]), weights(other[0])) and one[1].phases == other[1].phases
    draws = one[1].draws + other[1].draws
    assert len(draws) == 4 and all(redrawn > changed for redrawn, changed in draws) and sum(c for _, c in draws) > 0
    # those of an ordinary run do, through tokens and through the decode's log-probs
    ordinary = [trained(rows=rows, precision=precision, exact=False) for rows in (256, 3)]
    assert not torch.equal(weights(ordinary[0][0]), weights(ordinary[1][0]))
    assert ordinary[0][1].draws == [(-1.0, -1.0)] * 2


def streaming() -> tuple[dict[str, torch.Tensor], list[dict[str, float]]]:
    """Of two processes, whose policy generates block by block: weights, on rank 0, and metrics."""
    with FSDPStrategy(seed=0, device='cpu', reproducible='exact', stream_blocks=True) as strategy:
        trainer = trainer_of(strategy=strategy)
        trainer.fit(prompts(), num_episodes=1, max_timesteps=2, update_timesteps=1)
        actor = {name: tensor.clone() for name, tensor in strategy.full_state_dict(trainer.actor).items()}
        return actor, next(c for c in trainer.callbacks if isinstance(c, Perf)).phases


def alone() -> tuple[dict[str, torch.Tensor], list[dict[str, float]]]:
    one, perf = trained()
    return {name: p.detach().clone() for name, p in one.actor.named_parameters()}, perf.phases


def test_blocks_that_are_streamed():
    ((weights_alone, phases_alone),) = run_distributed(alone, 1)
    (actor, phases), (_, others) = run_distributed(streaming, 2)
    assert phases == others == phases_alone
    assert actor and all(torch.equal(actor[name], tensor) for name, tensor in weights_alone.items())


def test_rft_and_evaluation_draw_exactly():
    def kept(rows: int) -> tuple[list[list[int]], dict[str, float], tuple[float, float]]:
        strategy = NaiveStrategy(seed=0, reproducible='exact')
        actor = Uneven(tiny_causal_lm('gpt2', positions=48))
        actor, optim = strategy.prepare((actor, torch.optim.AdamW(actor.parameters(), lr=1e-3)))
        perf = Perf()
        trainer = RFTTrainer(
            strategy,
            actor,
            optim,
            ['ab', 'c', 'd e', 'f'],
            lambda prompts, responses: [float(sum(map(ord, r)) % 97) for r in responses],
            tokenizer=char_tokenizer(),
            engine=LocalEngine(max_batch_size=rows),
            callbacks=[perf],
            max_new_tokens=16,
            num_rounds=1,
            train_batch_size=8,
        )
        trainer.fit()
        evaluation = PromptEvaluation(
            ['ab', 'c', 'd e'], engine=LocalEngine(max_batch_size=rows), max_new_tokens=16, do_sample=True
        )
        found = evaluation(trainer)
        strategy.close()
        return [s.response_ids.tolist() for s in trainer.train_data], found, perf.draws[0]

    one, other = kept(256), kept(2)
    assert one[:2] == other[:2]
    assert one[2][0] > 0 and one[2][1] + other[2][1] > 0


def judged(kind: str) -> tuple[dict[str, float], dict[str, float], list[list[int]]]:
    """What a reward model says of three eval prompts, and of the nine samples of a round of RFT: neither number divides
    over two ranks."""
    from transformers import AutoModel

    with {'naive': NaiveStrategy, 'ddp': DDPStrategy}[kind](seed=0, device='cpu', reproducible='exact') as strategy:
        trainer = trainer_of(strategy=strategy)
        found = PromptEvaluation(prompts()[:3], max_new_tokens=16)(trainer)
        actor = Uneven(tiny_causal_lm('gpt2', positions=48))
        reward = RewardModel(AutoModel.from_config(tiny_config('gpt2', positions=48)))
        (actor, optim), reward = strategy.prepare((actor, torch.optim.AdamW(actor.parameters(), lr=1e-3)), reward)
        perf = Perf()
        settings = {'max_new_tokens': 16, 'num_rounds': 1, 'num_samples_per_prompt': 3, 'train_batch_size': 8}
        rft = RFTTrainer(strategy, actor, optim, prompts()[:3], reward, callbacks=[perf], **settings)
        rft.fit()
        return found, perf.phases[0], [s.response_ids.tolist() for s in rft.train_data]


def test_what_models_judge_together_does_not_follow_from_the_ranks():
    (want,) = run_distributed(judged, 1, 'naive')
    assert want[0]['score_mean'] != 0 and 0 < len(want[2]) < 9
    assert run_distributed(judged, 2, 'ddp') == [want] * 2


@pytest.mark.parametrize(
    ('settings', 'message'),
    [
        ({'engine': HFEngine()}, "draws again what rounding could change.*HFEngine.*use engine='local'"),
        ({'tis_cap': 2.0}, r'tis_cap=2.0 reads the log-probs of the decode.*leave tis_cap out'),
    ],
)
def test_what_reads_the_decode_is_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        trainer_of(**settings)
    trainer_of().strategy.close()
