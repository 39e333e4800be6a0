"""`VLLMEngine` on vLLM: tokens and log-probs are those of the policy after every transfer of weights."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from policies import GREEDY, WARM, off, prompts, update
from torch.optim import AdamW

from chatgpt.environments import Environment, EnvironmentSettings
from chatgpt.nn import Actor, Critic
from chatgpt.rollout import Call, LocalEngine, SamplingParams, VLLMEngine
from chatgpt.rollout.episodes import EpisodeEngine
from chatgpt.strategies import NaiveStrategy
from chatgpt.testing import byte_tokenizer, tiny_causal_lm
from chatgpt.trainer import PPOTrainer
from chatgpt.trainer.callbacks import Callback
from chatgpt.types import Prompt, Sample

pytest.importorskip('vllm', reason='vLLM has an environment of its own: make test-vllm')


def collect(engine: Any, actor: Any, sampling: SamplingParams, given: list[Prompt] | None = None) -> list[Sample]:
    given = given or prompts()
    engine.begin(actor)
    try:
        return engine.generate(Call.of(given, sampling, seed=11, indices=range(len(given))))
    finally:
        engine.end()


@pytest.mark.parametrize('tied', [True, False])
def test_tokens_and_log_probs_are_the_policys_and_so_after_updates(llama, engine_of, tied):
    model = llama(tied)
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
    engine, actor, seen = engine_of(model), Actor(model), []
    for version in range(3):
        mine, theirs = collect(LocalEngine(), actor, GREEDY), collect(engine, actor, GREEDY)
        assert [s.response_ids.tolist() for s in mine] == [s.response_ids.tolist() for s in theirs]
        for a, b in zip(mine, theirs, strict=True):
            torch.testing.assert_close(a.logprobs, b.logprobs, atol=1e-4, rtol=0)
            assert (a.finish_reason, a.index, a.prompt_text) == (b.finish_reason, b.index, b.prompt_text)
        drawn = collect(engine, actor, WARM)
        assert off(drawn, model) < 1e-4 and engine.difference < 1e-4
        seen.append([s.response_ids.tolist() for s in drawn])
        update(model, version)
    assert off(drawn, model) > 0.1  # negative control: weights of another version
    assert seen[0] != seen[1] != seen[2]


@pytest.mark.parametrize('merged', [False, True])
def test_adapters_are_in_the_weights(llama, engine_of, merged):
    """Unmerged adapters, and adapters merged by a strategy."""
    model = llama()
    engine, actor = engine_of(model), Actor(llama(), lora_rank=2)
    with torch.no_grad():
        for name, p in actor.named_parameters():
            if 'lora_B' in name:
                p.normal_(std=0.5, generator=torch.Generator().manual_seed(1))
    with NaiveStrategy(device='cpu') as strategy:
        prepared = strategy.prepare(actor)
        if merged:
            with strategy.full_model(prepared) as full:
                drawn = collect(engine, full, WARM)
        else:
            drawn = collect(engine, actor.eval(), WARM)
        assert off(drawn, actor.model) < 1e-4 and engine.difference < 1e-4
        assert off(drawn, model) > 0.1  # negative control: without them


def test_heads_of_other_families(engine_of):
    model = tiny_causal_lm('gpt2', hidden=64, heads=2)
    engine = engine_of(model)
    assert off(collect(engine, Actor(model), WARM), model) < 1e-4 and engine.difference < 1e-4


@pytest.mark.parametrize('ends', [(), (5,), (2, 5, 9, 11, 17, 23, 40)])
def test_end_tokens(llama, engine_of, ends):
    """Only the requested end tokens, not the config's, end a response, and it includes them."""
    model = llama()
    sampling = SamplingParams(max_new_tokens=12, temperature=2.0, eos_token_ids=ends)
    samples = collect(engine_of(model), Actor(model), sampling, prompts((3,) * 40))
    for s in samples:
        ids = s.response_ids.tolist()
        at = next((i for i, token in enumerate(ids) if token in ends), None)
        assert (len(ids), s.finish_reason) == ((12, 'length') if at is None else (at + 1, 'eos'))
    assert any(s.finish_reason == 'eos' for s in samples) == bool(ends)
    assert ends or any(model.config.eos_token_id in s.response_ids for s in samples)


def test_samples_have_the_models_distribution(llama, engine_of):
    """The first token of 600 samples: chi-squared over the likeliest tokens, below the 99.9 % quantile of 8 degrees of
    freedom."""
    model, number = llama(), 600
    prompt = Prompt(ids=torch.tensor([5, 9, 3]))
    sampling = SamplingParams(max_new_tokens=1, temperature=0.7)
    samples = collect(engine_of(model), Actor(model), sampling, [prompt] * number)
    counts = torch.bincount(torch.cat([s.response_ids for s in samples]), minlength=64).double()
    with torch.no_grad():
        probs = (model(prompt.ids[None]).logits[0, -1].double() / 0.7).softmax(-1)
    cells = probs.argsort(descending=True)[:8]

    def chi_squared(found: torch.Tensor) -> float:
        seen = torch.cat([found[cells], (number - found[cells].sum()).view(1)])
        expected = number * torch.cat([probs[cells], (1 - probs[cells].sum()).view(1)])
        return float(((seen - expected) ** 2 / expected).sum())

    assert chi_squared(counts) < 26.1
    assert chi_squared(counts.flip(0)) > 26.1  # negative control: another distribution is detected


@pytest.mark.parametrize('recompute', [False, 'auto'])
def test_ppo_whose_first_ratio_is_1(llama, engine_of, recompute):
    """Old log-probs are the engine's, or recomputed. The weights change in each of three phases."""
    first: list[float] = []

    class First(Callback):
        def on_phase_end(self, trainer: Any, phase: int, metrics: dict[str, float]) -> None:
            first.append(metrics['ppo/first_ratio_error'])

    model = llama()
    with NaiveStrategy(device='cpu') as strategy:
        actor, critic = Actor(llama()), Critic(llama())
        (actor, a), (critic, c) = strategy.prepare(
            (actor, AdamW(actor.parameters(), lr=1e-2)), (critic, AdamW(critic.parameters(), lr=1e-2))
        )
        trainer = PPOTrainer(
            *(strategy, actor, critic),
            lambda prompts, responses: [float(i % 2) for i in range(len(prompts))],
            *(None, a, c),
            kl_coef=0.0,
            engine=engine_of(model),
            experience_batch_size=4,
            train_batch_size=4,
            max_new_tokens=6,
            recompute_logprobs=recompute,
            callbacks=[First()],
        )
        assert trainer.maker.settings.recompute_logprobs is (recompute == 'auto')
        trainer.fit([torch.tensor([5, 6, 7 + i]) for i in range(12)], 3, 1, 1)
        assert len(first) == 3 and max(first) < 1e-4
        moved = max(
            float((p - q).detach().abs().max()) for p, q in zip(actor.parameters(), model.parameters(), strict=False)
        )
        assert moved > 1e-2


def test_turns_of_episodes_are_those_of_the_local_engine(llama, engine_of, monkeypatch):
    class Counting(Environment):
        def reset(self, seed: int, **columns: Any) -> str:
            self.turns = 0
            return f'n{seed % 10}'

        def step(self, response: str) -> Any:
            self.turns += 1
            return 'x' * (self.turns - 1), 1.0, self.turns == 3, False, {}

    tokenizer = byte_tokenizer()
    model = llama(vocab_size=len(tokenizer))

    def played(engine: Any, do_sample: bool = False) -> list[Any]:
        over = EpisodeEngine(engine, Counting, tokenizer, EnvironmentSettings(max_turn_tokens=5))
        nothing = [Prompt(ids=torch.zeros(0, dtype=torch.int64))] * 3
        samples = collect(over, Actor(model), SamplingParams(max_new_tokens=14, do_sample=do_sample), nothing)
        over.close()
        return [(s.prompt_ids.tolist(), s.response_ids.tolist(), s.episode.turns, s.episode.end) for s in samples]

    engine = engine_of(model)
    assert played(engine) == played(LocalEngine())
    generate, asked = engine.llm.generate, []

    def watched(given: Any, params: Any, **kw: Any) -> Any:
        asked.append([(len(p['prompt_token_ids']), q.max_tokens, q.seed) for p, q in zip(given, params, strict=True)])
        return generate(given, params, **kw)

    monkeypatch.setattr(engine.llm, 'generate', watched)
    assert played(engine, do_sample=True) == played(engine, do_sample=True)
    # by hand, after the check of the weights: n7, 5 tokens, nothing, 5 tokens, x, and 14 - 11 = 3 tokens
    sizes = [[(length, limit) for length, limit, _ in turn] for turn in asked[1:4]]
    assert sizes == [[(2, 5)] * 3, [(7, 5)] * 3, [(13, 3)] * 3]
    assert len({seed for turn in asked[1:4] for *_, seed in turn}) == 9


def test_the_process_keeps_its_random_numbers_and_threads(llama, engine_of):
    model, set_num_threads, num_threads = llama(layers=1), torch.set_num_threads, torch.get_num_threads()
    torch.manual_seed(3)
    state = torch.random.get_rng_state()
    engine_of(model).begin(Actor(model))
    engine_of(model).end()
    assert torch.set_num_threads is set_num_threads and torch.get_num_threads() == num_threads
    assert torch.equal(torch.random.get_rng_state(), state)


# ---------------------------------------------------------------------- the handshake


@contextmanager
def without(engine: VLLMEngine, lost: str) -> Iterator[None]:
    """Withholds tensors with this pattern in their names from the engine."""
    tensors_of = engine.tensors_of
    engine.tensors_of = lambda model: {n: t for n, t in tensors_of(model).items() if not re.search(lost, n)}  # type: ignore[method-assign]
    yield
    del engine.tensors_of  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    'lost', ['lm_head', r'layers\.1\.mlp\.down_proj', r'layers\.0\.self_attn\.q_proj', 'model.norm']
)
def test_an_engine_that_loses_a_tensor_is_refused(llama, engine_of, lost):
    """The error comes before any sampling; the next complete transfer works."""
    model = llama()
    update(model, 0)
    engine, other = engine_of(model), Actor(llama(seed=1))
    collect(engine, other, GREEDY)
    with without(engine, lost), pytest.raises(RuntimeError) as raised:
        collect(engine, Actor(model), GREEDY)
    message = str(raised.value)
    assert message.startswith('VLLMEngine: ') and 'nats, where float32 explains 0.02' in message
    assert 'which tensors arrived' in message and '\n' not in message
    assert off(collect(engine, Actor(model), GREEDY), model) < 1e-4


def test_weights_that_are_not_numbers_leave_no_trace(llama, engine_of, monkeypatch):
    """NaN in slots of the cache that attention masks does not reach later prompts."""
    model = llama()
    engine = engine_of(model)
    tensors_of = engine.tensors_of
    monkeypatch.setattr(engine, 'tensors_of', lambda m: {n: t * float('nan') for n, t in tensors_of(m).items()})
    with pytest.raises(RuntimeError, match='by nan nats'):
        collect(engine, Actor(model), GREEDY)
    monkeypatch.undo()
    assert off(collect(engine, Actor(model), GREEDY), model) < 1e-4


def test_dtypes_explain_a_difference(llama, engine_of):
    model = llama()
    engine = engine_of(model, dtype='bfloat16')
    collect(engine, Actor(model), GREEDY)
    assert 1e-4 < engine.difference < 0.5
    with without(engine, 'layers'), pytest.raises(RuntimeError, match='bfloat16 and float32 explain 0.5'):
        collect(engine, Actor(llama(seed=1)), GREEDY)
    engine.tolerance = 1e-5
    with pytest.raises(RuntimeError, match='explain 1e-05'):
        collect(engine, Actor(model), GREEDY)
