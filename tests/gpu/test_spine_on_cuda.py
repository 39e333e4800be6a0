"""PPO on a CUDA device: it learns in fp32 and bf16, samples the same tokens as on a CPU, and kernels and compiled
blocks agree with the plain path. Run by `make gpu-check`."""

from __future__ import annotations

from copy import deepcopy
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import nn

from chatgpt.batching import collate
from chatgpt.functional.logprobs import chunked_logprobs
from chatgpt.nn import Actor, GPTActor, GPTCritic
from chatgpt.nn.compiled import compile_blocks
from chatgpt.nn.head_kernels import head_logprobs
from chatgpt.rollout import Call, LocalEngine, SamplingParams
from chatgpt.strategies import NaiveStrategy
from chatgpt.testing import tiny_causal_lm
from chatgpt.testing.fakes import tiny_config
from chatgpt.trainer import PPOTrainer
from chatgpt.trainer.callbacks import ProgressBar
from chatgpt.types import Prompt, Sequence

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason='needs a CUDA device')]
GOOD = 7


class ShareOfGood(torch.nn.Module):
    def forward(self, batch: Any) -> torch.Tensor:
        hits = ((batch.action_ids == GOOD) & batch.action_mask).float()
        zeros = torch.zeros(batch.num_sequences, device=hits.device)
        return zeros.index_add(0, batch.action_rows, hits) / zeros.index_add(
            0, batch.action_rows, batch.action_mask.float()
        ).clamp(min=1)


class Log(ProgressBar):
    def __init__(self) -> None:
        super().__init__(enabled=False)
        self.scores: list[float] = []
        self.samples: list[list[int]] = []
        self.ratio_errors: list[float] = []

    def on_make_experience_end(self, trainer: Any, experiences: list[Any]) -> None:
        self.samples += [e.response_ids.tolist() for e in experiences]

    def on_phase_end(self, trainer: Any, step: int, metrics: dict[str, float]) -> None:
        self.scores.append(metrics['rollout/score_mean'])
        self.ratio_errors.append(metrics['ppo/first_ratio_error'])


def run(device: str, precision: str, phases: int) -> Log:
    strategy = NaiveStrategy(seed=0, precision=precision, device=device)
    config = tiny_config('gpt2', vocab_size=16, hidden=16, positions=32)
    actor, critic = GPTActor(config=config), GPTCritic(config=config)
    initial = deepcopy(actor)
    (actor, actor_optim), (critic, critic_optim), reward, initial = strategy.prepare(
        (actor, torch.optim.AdamW(actor.parameters(), lr=3e-3, eps=1e-5)),
        (critic, torch.optim.AdamW(critic.parameters(), lr=3e-3, eps=1e-5)),
        ShareOfGood(),
        initial,
    )
    log = Log()
    trainer = PPOTrainer(
        strategy,
        actor,
        critic,
        reward,
        initial,
        actor_optim,
        critic_optim,
        callbacks=[log],
        experience_batch_size=16,
        train_batch_size=16,
        max_epochs=4,
        kl_coef=0.01,
        max_new_tokens=6,
        eos_token_id=2,
    )
    generator = torch.Generator().manual_seed(1)
    trainer.fit([torch.randint(3, 16, (1 + i % 4,), generator=generator) for i in range(16)], 1, phases, 1)
    return log


@pytest.mark.parametrize('precision', ['fp32', 'bf16'])
def test_learns(precision):
    log = run('cuda', precision, 20)
    assert log.scores[0] < 0.25
    assert log.scores[-1] > 0.7
    assert max(log.ratio_errors) < (1e-3 if precision == 'fp32' else 0.5)


def test_the_first_rollout_draws_the_same_tokens_as_the_cpu():
    assert run('cuda', 'fp32', 1).samples == run('cpu', 'fp32', 1).samples


class Turns:
    """Episodes of three turns of at most four tokens, with observations of 0 to 4 tokens."""

    def __init__(self) -> None:
        self.turns: list[list[list[int]]] = [[] for _ in range(9)]

    def limit(self, i: int) -> int:
        return 4

    def ended(self, i: int, turn: Any) -> None:
        self.turns[i].append(turn.response_ids.tolist())

    def next(self, i: int) -> torch.Tensor | None:
        number = len(self.turns[i])
        return None if number == 3 else torch.arange(3, 3 + (i + number) % 5)


@pytest.mark.parametrize('fixed_steps', [False, True])
def test_turns_draw_the_same_tokens_as_on_the_cpu(fixed_steps):
    def drawn(device: str) -> list[list[list[int]]]:
        torch.manual_seed(0)
        actor = GPTActor(config=tiny_config('gpt2', vocab_size=16, hidden=16, positions=64)).to(device)
        engine, turns = LocalEngine(max_batch_size=4, fixed_steps=fixed_steps), Turns()
        engine.begin(actor)
        prompts = [Prompt(ids=torch.arange(2, 4 + i)) for i in range(9)]
        engine.converse(Call.of(prompts, SamplingParams(max_new_tokens=40), seed=1, indices=range(9)), turns)
        engine.end()
        return turns.turns

    assert drawn('cuda') == drawn('cpu')


# ---------------------------------------------------------------- kernels

N, WIDTH, VOCAB = 3000, 128, 32_003
LIGER = pytest.param('liger', marks=pytest.mark.skipif(find_spec('liger_kernel') is None, reason='needs liger-kernel'))


@pytest.mark.parametrize('kernel', ['auto', 'fused', LIGER])
@pytest.mark.parametrize('trained', [True, False])
@pytest.mark.parametrize('precision', ['fp32', 'bf16'])
def test_kernels_give_the_plain_numbers(kernel, trained, precision):
    torch.manual_seed(0)
    head = nn.Linear(WIDTH, VOCAB, bias=False, device='cuda').requires_grad_(trained)
    hidden = torch.randn(N, WIDTH, device='cuda', requires_grad=True)
    ids, weights = torch.randint(VOCAB, (N,), device='cuda'), torch.linspace(-1, 1, N, device='cuda')

    def run(compute):
        hidden.grad = head.weight.grad = None
        with torch.autocast('cuda', dtype=torch.bfloat16, enabled=precision == 'bf16'):
            logprobs, entropy = compute(hidden, head, ids, temperature=0.5, with_entropy='detached')
        (logprobs * weights).sum().backward()
        return logprobs, entropy, hidden.grad, head.weight.grad if trained else torch.zeros(1, device='cuda')

    def by_kernel(states, layer, *args, **options):
        return head_logprobs(states, layer, layer, *args, kernel=kernel, vocab_size=VOCAB, **options)

    plain = run(lambda *args, **options: chunked_logprobs(*args, chunk_size=500, **options))
    for ours, theirs in zip(run(by_kernel), plain, strict=True):
        tolerance = 2e-2 if precision == 'bf16' else 1e-4
        assert (ours - theirs).abs().max() <= tolerance * theirs.abs().max().clamp_min(1e-6)


def test_compiled_blocks_give_the_plain_numbers():
    generator = torch.Generator().manual_seed(0)
    records = [
        Sequence(
            prompt_ids=torch.randint(3, 60, (4,), generator=generator),
            response_ids=torch.randint(3, 60, (n,), generator=generator),
            response_mask=torch.ones(n, dtype=torch.bool),
        )
        for n in (3, 9, 6)
    ]
    plain = Actor(tiny_causal_lm('llama')).cuda()
    compiled = deepcopy(plain)
    compile_blocks(compiled)
    batch = collate(records).to(torch.device('cuda'))
    found = []
    for model in (plain, compiled):
        out = model(batch).logprobs
        out.sum().backward()
        found.append([out.detach(), *(p.grad for p in model.parameters())])
    for ours, theirs in zip(found[1], found[0], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)
