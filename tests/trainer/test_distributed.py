"""The same run on one process and on two: prompts, samples and scores are equal, losses and weights up to rounding.
Micro-batches are split over the ranks by cost, and padding does not change the losses."""

from __future__ import annotations

from typing import Any

import ppo_on_ids
import torch
from tiny_runs import PROMPTS, check_outcome, close, outcome, ppo

import chatgpt.nn.packing as packing_module
from chatgpt.batching import collate
from chatgpt.nn import GPTActor
from chatgpt.nn.records import is_here
from chatgpt.strategies import DDPStrategy, NaiveStrategy
from chatgpt.testing.fakes import tiny_config
from chatgpt.testing.processes import run_distributed
from chatgpt.trainer import strategies
from chatgpt.trainer.callbacks import Callback
from chatgpt.trainer.run_control import RankMismatchError, check_ranks
from chatgpt.trainer.step import Learner, Work, learn_batch
from chatgpt.types import Sequence

LR, PHASES, EPOCHS = 1e-3, 3, 2
LAYOUTS = [('DDPStrategy', {}), ('FSDPStrategy', {}), ('FSDPStrategy', {'cpu_offload': True, 'meta_init': True})]
SIZES = {'experience_batch_size': 8, 'max_epochs': EPOCHS, 'max_new_tokens': 8, 'max_tokens_per_batch': 48}


class Held(Callback):
    """Notes which records of the buffer this rank holds, in each pass."""

    def __init__(self) -> None:
        self.here: list[list[bool]] = []

    def on_learn_epoch_start(self, trainer: Any, epoch: int) -> None:
        self.here.append([is_here(e) for e in trainer.buffer])


def train(layouts: list[tuple[str, dict[str, Any]]]) -> list[dict[str, Any]]:
    found = []
    for kind, options in layouts:
        calls: list[int] = []

        def reward(prompts: list[str], responses: list[str], calls: list[int] = calls) -> list[float]:
            calls.append(len(prompts))
            return [float(sum(c in 'aeiou0123456789' for c in r)) for r in responses]

        held = Held()
        with getattr(strategies, kind)(seed=3, device='cpu', **options) as strategy:
            settings = {'score_scaling': 'running', 'whiten_rewards': True, 'callbacks': [held]}
            trainer = ppo(strategy, reward, lr=LR, **settings, **SIZES)
            trainer.fit([*PROMPTS, 'a seven'], 1, PHASES, 1)
            found.append(outcome(strategy, trainer, calls=calls, here=held.here))
    return found


def test_two_processes_equal_one():
    (naive,) = train([('NaiveStrategy', {})])
    for first, second in zip(*run_distributed(train, 2, LAYOUTS, init_group=True), strict=True):
        check_outcome(first, naive, atol=0.05 * LR * PHASES * EPOCHS * 2)
        assert (first['samples'], first['metrics']) == (second['samples'], second['metrics'])
        # the reward function is called once for the whole batch of a timestep
        assert (first['calls'], second['calls']) == ([8] * PHASES, [])
        # each rank has the list of all records, and holds those that it scored
        assert first['here'] == [[True] * 4 + [False] * 4] * PHASES * EPOCHS
        assert second['here'] == [[False] * 4 + [True] * 4] * PHASES * EPOCHS


DIFFERENCES = {
    'gamma': ('at the start of phase 1', 'on rank 1 config.gamma is 0.9 instead of 1.0 (as on rank 0)'),
    'prompts': ('at the start of phase 1', 'on rank 1 prompts'),
    'position': ('before the start of phase 2', 'on rank 1 prompts_drawn is 3 instead of 2'),
    'nothing': ('2 phases',),
}


def run_with_differences() -> list[str]:
    """Runs PPO with one difference in rank 1 each time; returns the error messages."""
    return [short_run(difference) for difference in DIFFERENCES]


def short_run(difference: str) -> str:
    with DDPStrategy(device='cpu') as strategy:
        odd = strategy.rank == 1
        sizes = {'experience_batch_size': 2, 'train_batch_size': 2, 'max_new_tokens': 3}
        trainer = ppo(strategy, gamma=0.9 if difference == 'gamma' and odd else 1.0, **sizes)
        if difference == 'position':
            learners = trainer.learners

            def counted() -> object:
                trainer.collector.draws.prompts_drawn += int(odd)
                return learners()

            trainer.learners = counted
        prompts = [torch.tensor([5, 6, 7 + int(difference == 'prompts' and odd)]), torch.tensor([9, 4])]
        try:
            trainer.fit(prompts, max_timesteps=2, update_timesteps=1)
        except RankMismatchError as error:
            return str(error)
        return f'{trainer.phase} phases'


def test_a_rank_that_differs_is_named_on_every_rank():
    first, second = run_distributed(run_with_differences, 2, init_group=True)
    assert first == second
    for message, words in zip(first, DIFFERENCES.values(), strict=True):
        assert all(word in message for word in words), message


def test_one_process_compares_nothing():
    check_ranks(NaiveStrategy(), {'anything': 1}, 'anywhere')


# Split into halves in this order, one rank would have 36 tokens and the other 10.
LENGTHS = [10, 9, 9, 8, 3, 3, 2, 2]


def of_length(length: int) -> Sequence:
    ids = torch.arange(3, 3 + length)
    return Sequence(prompt_ids=ids[:1], response_ids=ids[1:], response_mask=torch.ones(length - 1, dtype=torch.bool))


def learn() -> tuple[list[int], int]:
    """Returns the tokens of the records that this rank learned from, and the number of its micro-batches."""
    seen: list[list[int]] = []

    def loss(model: Any, batch: Any) -> tuple[torch.Tensor, dict[str, Any]]:
        seen.append(batch.attention_mask.sum(1).tolist())
        return -(model(batch).logprobs * batch.action_mask).sum() / sum(LENGTHS), {}

    with DDPStrategy(device='cpu') as strategy:
        actor = GPTActor(config=tiny_config('gpt2'))
        actor, optimizer = strategy.prepare((actor, torch.optim.SGD(actor.parameters(), lr=0.1)))
        work = Work(
            [of_length(n) for n in LENGTHS], [Learner('actor', actor, optimizer, loss)], collate, lambda r: r.num_tokens
        )
        learn_batch(strategy, [work], max_tokens=20)
    return sorted(n for records in seen for n in records), len(seen)


def test_two_processes_share_the_records():
    (first, num_first), (second, num_second) = run_distributed(learn, 2)
    assert sorted(first + second) == sorted(LENGTHS)
    assert (len(first), sum(first)) == (len(second), sum(second)) == (4, 23)
    assert num_first == num_second


# ---------------------------------------------------------------- packed


def test_packed_and_plain_ppo_have_the_same_losses(monkeypatch):
    calls: list[int] = []
    original = packing_module._packed_hidden
    packed, plain = (ppo_on_ids.make(packing=packing) for packing in (True, False))  # support is detected here
    monkeypatch.setattr(packing_module, '_packed_hidden', lambda *args: calls.append(1) or original(*args))
    ppo_on_ids.fit(packed)
    num_packed = len(calls)
    ppo_on_ids.fit(plain)
    # Learning alone: 3 phases of 2 passes over 2 batches, actor and critic; scoring: initial model and critic.
    assert num_packed >= 3 * (2 * 2 * 2 + 2) and len(calls) == num_packed
    assert packed.log.samples() == plain.log.samples()
    assert len({e.num_actions for phase in packed.log.experiences for e in phase}) > 2
    close(packed.log.phases, plain.log.phases, abs=2e-5)
