"""Parts of gpu_check.py that look into a step: its kernels, its memory, the sampler, and a PPO step of a published size.

Kernels are counted by torch's profiler, on a CPU its operators. A decode step is the difference between two calls of
different length, divided by the steps between them, so that the prefill does not count.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any
from unittest.mock import patch

import torch
from arithmetic_done import matmul_peak
from harness import ppo_trainer, random_sequence, wall_seconds
from random_models import random_model
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from chatgpt.batching import collate
from chatgpt.nn import Actor, Critic
from chatgpt.nn.trunk import recompute_activations
from chatgpt.rollout import Call, LocalEngine, SamplingParams, randomness
from chatgpt.rollout.sampling import TokenSampler
from chatgpt.strategies import NaiveStrategy
from chatgpt.types import Prompt

TOP = 30
"""kernels of a table"""
DTYPES = {'fp32': torch.float32, 'bf16': torch.bfloat16}
H100_FLOPS = 989e12
"""dense bf16 of an H100 SXM by its data sheet, by which others divide"""

Counts = dict[str, tuple[int, float]]


def counted(act: Callable[[], Any], device: torch.device) -> Counts:
    """Returns the kernels that `act` runs: {name: (count, µs)}."""
    on_cuda = device.type == 'cuda'
    with profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_cuda else [])]) as found:
        wall_seconds(act, device)
    wanted = DeviceType.CUDA if on_cuda else DeviceType.CPU
    return {
        e.key: (e.count, e.self_device_time_total if on_cuda else e.self_cpu_time_total)
        for e in found.key_averages()
        if e.device_type == wanted
    }


def kernel_table(long: Counts, short: Counts | None = None, steps: int = 1) -> dict[str, Any]:
    """Returns launches and µs of a step, and its `TOP` kernels by time: [name, launches, µs]."""
    rows = []
    for name, (number, spent) in long.items():
        less, less_us = (short or {}).get(name, (0, 0.0))
        if number > less:
            rows.append([name, (number - less) / steps, (spent - less_us) / steps])
    rows.sort(key=lambda row: -row[2])
    return {'launches': sum(r[1] for r in rows), 'us': sum(r[2] for r in rows), 'top': rows[:TOP]}


def drawn_prompts(vocab: int, rows: int, tokens: int) -> list[Prompt]:
    ids = torch.randint(3, vocab, (rows, tokens), generator=torch.Generator().manual_seed(0))
    return [Prompt(ids=row) for row in ids]


def decode_step(note: Any, config: Any, *, batch: int, prompt: int, new: int, precision: str) -> dict[str, Any]:
    """Returns the kernels of a decode step of the local engine, captured where it captures, and of a plain call."""
    model = random_model('AutoModelForCausalLM', config, place=note.device, draw=note.device, dtype=DTYPES[precision])
    actor, prompts, tables = Actor(model.requires_grad_(False)), drawn_prompts(config.vocab_size, batch, prompt), {}
    for name, engine in {'default': LocalEngine(keep=True), 'plain': LocalEngine(fixed_steps=False)}.items():

        def generate(tokens: int, engine: LocalEngine = engine) -> None:
            engine.begin(actor)
            engine.generate(Call.of(prompts, SamplingParams(max_new_tokens=tokens), seed=0, indices=range(batch)))
            engine.end()

        for _ in range(2):
            generate(new)  # compiles and captures
        short, long = (counted(lambda n=n: generate(n), note.device) for n in (new // 2, new))  # type: ignore[misc]
        tables[name] = kernel_table(long, short, new - new // 2)
    return tables


def learning(note: Any, config: Any, *, rows: int, tokens: int, precision: str, recompute: bool) -> dict[str, Any]:
    """Returns seconds, TFLOPS, kernels and memory of a learning micro-batch of `rows` sequences of `tokens` tokens, and
    milliseconds of an optimizer step and of the copy for generating, first and kept.

    FLOP per token: 6 N + 6 · layers · width of attention · tokens, causal attention counted once, as prime-rl counts.
    """
    on_cuda = note.device.type == 'cuda'
    strategy = NaiveStrategy(seed=0, precision=precision, device=note.device)  # type: ignore[arg-type]
    model = random_model('AutoModelForCausalLM', config, place=note.device, draw=note.device)
    if recompute:
        recompute_activations(model)
    generator, number = torch.Generator().manual_seed(0), sum(p.numel() for p in model.parameters())
    actor = Actor(model)
    actor, optimizer = strategy.prepare((actor, strategy.make_optimizer(actor.parameters(), lr=1e-6)))
    actor.train()
    half = tokens // 2
    records = [random_sequence(generator, half, tokens - half, config.vocab_size) for _ in range(rows)]
    batch = collate(records).to(note.device)

    def micro_batch() -> None:
        with strategy.accumulate(actor, last=True):
            with strategy.autocast():
                loss = actor(batch).logprobs.mean()
            strategy.backward(loss, actor, optimizer)

    def step() -> float:
        return wall_seconds(lambda: strategy.optimizer_step(optimizer, 1.0), note.device)

    def copied() -> float:
        def act() -> None:
            with strategy.full_model(actor):
                pass

        return 1e3 * wall_seconds(act, note.device)

    micro_batch()
    step()  # states and kernels exist from here on
    held = torch.cuda.memory_allocated() if on_cuda else 0
    if on_cuda:
        torch.cuda.reset_peak_memory_stats()
    seconds = min(wall_seconds(micro_batch, note.device) for _ in range(3))
    peak = torch.cuda.max_memory_allocated() if on_cuda else 0
    table = kernel_table(counted(micro_batch, note.device))
    heads = getattr(config, 'head_dim', None) or config.hidden_size // config.num_attention_heads
    width = heads * config.num_attention_heads
    flop = rows * tokens * (6 * number + 6 * config.num_hidden_layers * width * tokens)
    step_ms = 1e3 * step()
    strategy.keep_copy(note, True)
    copy_ms = [copied(), copied()]
    strategy.close()
    return {
        'parameters': number,
        'rows': rows,
        'tokens': tokens,
        'recompute': recompute,
        'seconds': seconds,
        'tokens_per_s': rows * tokens / seconds,
        'tflops': flop / seconds / 1e12,
        'share_of_peak': flop / seconds / matmul_peak(note.device, DTYPES[precision]),
        'mfu_of_h100': flop / seconds / H100_FLOPS,
        'held_bytes': held,
        'peak_bytes': peak,
        'step_ms': step_ms,
        'copy_ms': copy_ms,
        'kernels': table,
    }


def sampler(note: Any, *, rows: Sequence[int], vocab: int, repeats: int = 10) -> None:
    """Measures a draw from logits, and its inversion in one level and in two, in ms; `same`: the share of equal
    tokens."""
    dtype = torch.bfloat16 if note.device.type == 'cuda' else torch.float32
    draw = TokenSampler(SamplingParams(max_new_tokens=1), note.device)
    for number in rows:
        generator = torch.Generator(note.device).manual_seed(0)
        logits = (3 * torch.randn(number, vocab, generator=generator, device=note.device)).to(dtype)
        uniform = torch.rand(number, 1, generator=generator, device=note.device, dtype=torch.float64)
        probs = torch.softmax(logits.float(), dim=-1)

        def one_level(probs: Any = probs, uniform: Any = uniform) -> Any:
            with patch.object(randomness, 'COLUMNS', vocab):
                return randomness.inverse_cdf(probs, uniform)[0]

        ways: dict[str, Callable[[], Any]] = {
            'draw': lambda logits=logits, uniform=uniform: draw(logits, uniform),
            'one_level': one_level,
            'two_levels': lambda probs=probs, uniform=uniform: randomness.in_two_levels(probs, uniform)[0],
        }
        found = {f'{name}_ms': _fastest(way, note.device, repeats) for name, way in ways.items()}
        same = float((ways['one_level']() == ways['two_levels']()).double().mean())
        note.write(**{str(number): found | {'same': same}}, vocab=vocab)


def _fastest(act: Callable[[], Any], device: Any, repeats: int) -> float:
    act()
    return min(1e3 * wall_seconds(lambda: [act() for _ in range(repeats)], device) / repeats for _ in range(3))


def ppo_step(
    note: Any,
    config: Any,
    *,
    sequences: int,
    prompt: int,
    new: int,
    batch: int,
    tokens: int,
    precision: str,
    rounds: int,
) -> None:
    """Measures PPO steps with a critic, a reference and a reward function: seconds of collecting and learning of each
    round; the rate is that of the last. One epoch over train batches of `batch` sequences."""
    strategy = NaiveStrategy(seed=0, precision=precision, device=note.device)  # type: ignore[arg-type]

    def made(kind: str) -> Any:
        return random_model(kind, config, place=note.device, draw=note.device)

    policy, reference = Actor(made('AutoModelForCausalLM')), Actor(made('AutoModelForCausalLM'))
    reference.load_state_dict(policy.state_dict())
    trainer = ppo_trainer(
        strategy,
        policy,
        Critic(made('AutoModel')),
        lambda prompts, responses: [float(len(r) % 7) for r in responses],
        reference,
        optimizer=lambda parameters: strategy.make_optimizer(parameters, lr=1e-6),
        experience_batch_size=sequences,
        train_batch_size=batch,
        max_epochs=1,
        max_tokens_per_batch=tokens,
        max_new_tokens=new,
    )
    trainer.set_prompts(drawn_prompts(config.vocab_size, sequences, prompt))
    for _ in range(rounds):
        begun = time.perf_counter()
        trainer.collect(1)
        collected = time.perf_counter()
        trainer.learn()
        if note.device.type == 'cuda':
            torch.cuda.synchronize()
        end = time.perf_counter()
        entry = {'collect_s': collected - begun, 'learn_s': end - collected, 'step_s': end - begun}
        note.write(rounds=[*note.content.get('rounds', ()), entry], step_s=entry['step_s'], sequences=sequences)
    strategy.close()
