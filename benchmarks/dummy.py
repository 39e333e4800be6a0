"""PPO on random prompts with models of new weights, for both `benchmark_*_dummy.py` scripts and for capacity.py.

A run makes actor, critic, initial model and reward model of one rung of a ladder, trains, and returns a dictionary of
numbers: throughput, TFLOPS (FLOP counted by arithmetic_done.py), their share of the device's matrix product measured in
the same run, seconds of each part of a phase, peak memory, and the planned memory. Batch sizes are global; figures "per
device" are divided by the number of processes.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import ladders
from arithmetic_done import PARTS, MemoryMeter, Models, matmul_peak, matrices, phase_flop
from harness import machine, markdown, ppo_trainer, write_json
from random_models import random_model

from chatgpt.launch.arguments import Parser, add_settings, make_strategy, world_size_from_env
from chatgpt.nn.trunk import recompute_activations
from chatgpt.strategies.registry import STRATEGIES, strategy_flag
from chatgpt.trainer.callbacks import Callback


@dataclass(kw_only=True)
class DummyRun:
    """Flags of the benchmarks, with the defaults of ColossalAI's ChatGPT benchmarks."""

    strategy: str = 'naive'
    """strategy that prepares and shards the models"""
    precision: Literal['auto', 'fp32', 'bf16', 'fp16'] = 'auto'
    """compute dtype; auto is bf16 on CUDA and under Gemini, fp32 on a CPU"""
    num_episodes: int = 3
    max_timesteps: int = 8
    """timesteps per episode, each of experience_batch_size prompts"""
    update_timesteps: int = 8
    """timesteps before a learning phase"""
    max_epochs: int = 3
    """epochs over the experience of a phase"""
    train_batch_size: int = 8
    experience_batch_size: int = 8
    max_tokens_per_batch: int | None = None
    """tokens of a forward on a process; none: its share of a batch"""
    prompt_length: int = 400
    """number of random tokens"""
    max_length: int = 512
    """tokens of prompt and response; every sequence has this length, since there is no end token"""
    lora_rank: int = 0
    """rank of the adapters; 0 trains all weights"""
    num_layers_unfrozen: int = -1
    """hydra: number of trained top blocks; -1 trains all weights"""
    critic: Literal['own', 'shared'] = 'own'
    """a network of the actor's size, or a value head on the actor's trunk"""
    reward: Literal['model', 'function'] = 'model'
    """a network of the actor's size, or a function of negligible cost"""
    gradient_checkpointing: bool = False
    cuda_mem_frac: float = 1.0
    """share of a GPU's memory that a process may use"""
    ignore_phases: int = 1
    """learning phases for warm-up, not in the averages if there are more"""
    seed: int = 42

    def check(self, world_size: int) -> None:
        """Raises ValueError for settings that do not go together."""
        for name in ('num_episodes', 'max_timesteps', 'update_timesteps', 'max_epochs', 'prompt_length'):
            if getattr(self, name) < 1:
                raise ValueError(f'{name}={getattr(self, name)} must be at least 1')
        if self.max_length <= self.prompt_length:
            raise ValueError(
                f'max_length={self.max_length} is prompt and response: it must be above '
                f'prompt_length={self.prompt_length}'
            )
        for name in ('train_batch_size', 'experience_batch_size'):
            if getattr(self, name) < 1 or getattr(self, name) % world_size:
                raise ValueError(
                    f'{name}={getattr(self, name)} cannot be split over {world_size} processes; give a multiple'
                )
        if not 0 < self.cuda_mem_frac <= 1:
            raise ValueError(f'cuda_mem_frac={self.cuda_mem_frac} is a share: give a number above 0 and at most 1')
        if self.lora_rank and self.num_layers_unfrozen > 0:
            raise ValueError(
                'lora_rank and num_layers_unfrozen are two ways to share the trunk with the reference; choose one'
            )
        if self.precision == 'fp32' and self.is_gemini:
            raise ValueError("Gemini computes in 16 bits; use precision='bf16' or 'fp16'")

    @property
    def is_gemini(self) -> bool:
        return STRATEGIES.find(self.strategy).only_16_bits

    def compute(self, on_cuda: bool) -> str:
        """Returns the precision, with `auto` resolved."""
        chosen = 'bf16' if on_cuda or self.is_gemini else 'fp32'
        return chosen if self.precision == 'auto' else self.precision

    @property
    def response_length(self) -> int:
        return self.max_length - self.prompt_length

    @property
    def num_phases(self) -> int:
        return -(-self.num_episodes * self.max_timesteps // self.update_timesteps)


class Recorder(Callback):
    """Times and counts of every phase. report: called with all phases so far after each."""

    def __init__(self, report: Callable[[list[dict[str, Any]]], None] | None = None) -> None:
        self.report = report
        self.phases: list[dict[str, Any]] = []
        self._batches = 0

    def on_learn_batch_end(self, trainer: Any, metrics: dict[str, float]) -> None:
        self._batches += 1

    def on_phase_end(self, trainer: Any, step: int, metrics: dict[str, float]) -> None:
        collected = trainer.last_experiences
        per_pass = -(-len(collected) // trainer.config.train_batch_size)
        self.phases.append(
            {
                'samples': len(collected),
                'new_tokens': sum(e.num_actions for e in collected),
                'tokens': sum(e.num_tokens for e in collected),
                'passes': self._batches / per_pass,
                'updates': self._batches,
                'seconds': {part: metrics.get(f'perf/{part}_s', 0.0) for part in PARTS},
            }
        )
        self._batches = 0
        if self.report is not None:
            self.report(self.phases)


class RandomScores:
    """A random reward, N(0, 1) by sample index."""

    def score(self, samples: list[Any], strategy: Any) -> list[float]:
        import torch

        return [float(torch.randn((), generator=torch.Generator().manual_seed(s.index))) for s in samples]


# ---------------------------------------------------------------------- models


def build(
    settings: DummyRun, ladder: str, config: Any, where: tuple[Any, Any] | None = None
) -> tuple[Any, Any, Any, Any]:
    """Returns actor, critic, reward (a model or a function) and initial model; call it in the strategy's init context.

    where: the devices of the weights and of their random generator; None: the library's default, the CPU.
    """
    from chatgpt import nn

    s, family = settings, ladders.FAMILIES[ladder][0]
    hydra = s.num_layers_unfrozen if s.num_layers_unfrozen > 0 else None
    head = True if s.critic == 'shared' else None

    def make(kind: str, checkpoint: bool, **options: Any) -> Any:
        if where is None:
            return getattr(nn, f'{family}{kind}')(config=config, checkpoint=checkpoint, **options)
        auto = 'AutoModelForCausalLM' if kind == 'Actor' else 'AutoModel'
        model = random_model(auto, config, place=where[0], draw=where[1])
        if checkpoint:
            recompute_activations(model)
        return {'Actor': nn.Actor, 'Critic': nn.Critic, 'RM': nn.RewardModel}[kind](model, **options)

    checkpoint, lora = s.gradient_checkpointing, {'lora_rank': s.lora_rank}
    actor = make('Actor', checkpoint, **lora, value_head=head, num_layers_unfrozen=hydra)
    critic = None if s.critic == 'shared' else make('Critic', checkpoint, **lora)
    reward: Any = RandomScores()
    if s.reward == 'model':
        if critic is not None and not s.lora_rank:
            reward = nn.RewardModel(deepcopy(critic.model), deepcopy(critic.value_head))
        else:
            reward = make('RM', False)
    if s.lora_rank or hydra:
        return actor, critic, reward, None
    return actor, critic, reward, deepcopy(actor)


def count(actor: Any, critic: Any, reward: Any, initial: Any) -> tuple[Models, dict[str, int]]:
    """Returns the matrices for the FLOP, and the number of parameters by network."""
    networks = {'actor': actor, 'critic': critic, 'initial model': initial, 'reward model': reward}
    networks = {n: m for n, m in networks.items() if hasattr(m, 'parameters')}
    size = {n: sum(p.numel() for p in m.parameters()) for n, m in networks.items()}
    trained = sum(p.numel() for m in (actor, critic) if m is not None for p in m.parameters() if p.requires_grad)
    counted = [
        matrices(networks[n]) if n in networks else None for n in ('actor', 'critic', 'initial model', 'reward model')
    ]
    assert counted[0] is not None
    copies = actor.ref_branch.blocks.parameters() if hasattr(actor, 'ref_branch') else ()
    branch = sum(p.numel() for p in copies if p.dim() == 2)
    models = Models(*counted, reference_is_actor=initial is None, reference_branch=branch)
    return models, size | {'all': sum(size.values()), 'trained': trained}


def plan_for(settings: DummyRun, config: Any, world_size: int, on_cuda: bool, *, stream_blocks: bool = False) -> Any:
    """Returns the plan of this run, without limits; a hydra's value head is negligible."""
    from chatgpt.plan import Setup, make_plan

    s, hydra = settings, settings.num_layers_unfrozen > 0
    return make_plan(
        Setup(
            process=0,
            config=config,
            reward_config=config if s.reward == 'model' else None,
            strategy=s.strategy,
            num_processes=world_size,
            precision=s.compute(on_cuda),
            on_cuda=on_cuda,
            critic='none' if hydra and s.critic == 'shared' else s.critic,
            lora_rank=s.lora_rank,
            num_layers_unfrozen=s.num_layers_unfrozen,
            gradient_checkpointing=s.gradient_checkpointing,
            experience_batch_size=s.experience_batch_size,
            update_timesteps=s.update_timesteps,
            num_phases=s.num_phases,
            train_batch_size=s.train_batch_size,
            max_tokens_per_batch=s.max_tokens_per_batch,
            max_prompt_tokens=s.prompt_length,
            max_new_tokens=s.response_length,
            stream_blocks=stream_blocks,
        )
    )


# ---------------------------------------------------------------------- the run


def run(
    settings: DummyRun,
    ladder: str,
    rung: str,
    *,
    ready: Callable[[Any], None] | None = None,
    report: Callable[[list[dict[str, Any]]], None] | None = None,
) -> dict[str, Any]:
    """Trains and returns the numbers on every rank, with the largest memory and seconds over ranks.

    ready: called with the strategy when the process is set up and before any model exists. report: called with the
    measurements of all phases so far after each.

    Raises:
        ValueError: settings that do not go together.
    """
    import torch

    from chatgpt.launch.inputs import quiet_transformers

    settings.check(world_size_from_env())
    quiet_transformers()
    on_cuda = torch.cuda.is_available()
    if settings.cuda_mem_frac < 1 and not on_cuda:
        raise ValueError(f'cuda_mem_frac={settings.cuda_mem_frac} is of a GPU, and there is none here; leave it out')
    precision = settings.compute(on_cuda)
    config = ladders.config(ladder, rung, settings.max_length)
    with (
        _group_of_one(settings.strategy),
        make_strategy(settings.strategy, seed=settings.seed, precision=precision) as strategy,
    ):
        if settings.cuda_mem_frac < 1:
            torch.cuda.set_per_process_memory_fraction(settings.cuda_mem_frac, strategy.device)
        peak = matmul_peak(strategy.device, strategy.numerics.dtype)
        _warm_up(settings, ladder, strategy)
        if ready is not None:
            ready(strategy)
        meter, where = MemoryMeter(strategy.device), places(settings, strategy, capped=ready is not None)
        with strategy.failure_guard():
            started = time.perf_counter()
            phases, models, size, head_again = _train(
                settings, ladder, config, strategy, where=where, meter=meter, report=report
            )
            wall = time.perf_counter() - started
        memory = {k: max(m[k] for m in strategy.all_gather_object(meter.read())) for k in meter.read()}
        everyone = strategy.all_gather_object([p['seconds'] for p in phases])
        peak = sum(strategy.all_gather_object(peak)) / strategy.world_size
        for number, phase in enumerate(phases):
            phase['seconds'] = {part: max(rank[number][part] for rank in everyone) for part in PARTS}
            phase['flop'] = phase_flop(
                models,
                sequences=phase['samples'],
                prompt=settings.prompt_length,
                response=settings.response_length,
                passes=phase['passes'],
                actor_scores=precision != 'fp32' or settings.critic == 'shared',
                checkpointing=settings.gradient_checkpointing,
                head_again=head_again,
            )
        plan = plan_for(settings, config, strategy.world_size, strategy.device.type == 'cuda')
        return {
            'model': rung,
            'ladder': ladder,
            'world_size': strategy.world_size,
            'settings': asdict(settings) | {'precision': precision},
            'parameters': size,
            'phases': phases,
            'wall_s': wall,
            **averages(phases, settings.ignore_phases, strategy.world_size, peak),
            'memory': memory
            | planned(
                plan, memory['peak'], strategy.device.type == 'cuda', loads=where is None or where[0] != where[1]
            ),
            'machine': machine(strategy.device),
        }


def places(settings: DummyRun, strategy: Any, *, capped: bool) -> tuple[Any, Any] | None:
    """Returns the devices of the weights and of their random generator; None: the library's default, the CPU."""
    import torch

    if strategy.device.type == 'cpu' or strategy.world_size > 1:
        return None
    # under a cap, and with a strategy that moves models itself, they are built on the host as in any run
    direct = not capped and settings.strategy in ('naive', 'ddp')
    return strategy.device if direct else torch.device('cpu'), strategy.device


def _group_of_one(name: str) -> AbstractContextManager[None]:
    """Sets the environment of a distributed strategy of one process, for a run without a launcher."""
    from chatgpt.testing.processes import environment, free_port, torchrun_environment

    if STRATEGIES.find(name).one_process or 'RANK' in os.environ:
        return nullcontext()
    return environment(**torchrun_environment(0, 1, free_port()))


def _warm_up(settings: DummyRun, ladder: str, strategy: Any) -> None:
    """Runs a phase of the smallest model, so that what loads or compiles at first use is not counted."""
    import torch

    one_phase: dict[str, Any] = {'num_episodes': 1, 'max_timesteps': 1, 'update_timesteps': 1, 'max_epochs': 1}
    short = replace(settings, **one_phase, prompt_length=4, max_length=8, lora_rank=min(settings.lora_rank, 2))
    if settings.max_tokens_per_batch is not None:
        short = replace(short, max_tokens_per_batch=short.max_length)
    if settings.num_layers_unfrozen > 0:
        short = replace(short, num_layers_unfrozen=1)
    with torch.random.fork_rng(devices=[]):
        _train(short, ladder, ladders.config('opt' if ladder == 'opt' else 'gpt', 'tiny'), strategy)


def _train(
    s: DummyRun,
    ladder: str,
    config: Any,
    strategy: Any,
    *,
    where: tuple[Any, Any] | None = None,
    meter: MemoryMeter | None = None,
    report: Callable[[list[dict[str, Any]]], None] | None = None,
) -> tuple[list[dict[str, Any]], Models, dict[str, int], bool]:
    import torch

    from chatgpt.functional.logprobs import CHUNK_ELEMENTS_ACCELERATOR, CHUNK_ELEMENTS_CPU

    with strategy.model_init_context() if where is None else nullcontext():
        networks = build(s, ladder, config, where)
    if where is not None and meter is not None:
        meter.restart_device()
    models, size = count(*networks)
    recorder = Recorder(report)
    trainer = ppo_trainer(
        strategy,
        *networks,
        optimizer=partial(strategy.make_optimizer, lr=5e-6, eps=1e-5),
        callbacks=[recorder],
        experience_batch_size=s.experience_batch_size,
        train_batch_size=s.train_batch_size,
        max_epochs=s.max_epochs,
        max_tokens_per_batch=s.max_tokens_per_batch,
        max_length=s.max_length,
        do_sample=True,
        temperature=1.0,
        top_k=50,
    )
    if where is not None and where[0] == where[1] and meter is not None:
        meter.restart_device()  # excludes the peak of drawing whole models on the device
    count_of_prompts = s.num_episodes * s.max_timesteps * s.experience_batch_size
    generator = torch.Generator().manual_seed(s.seed)
    prompts = list(torch.randint(config.vocab_size, (count_of_prompts, s.prompt_length), generator=generator))
    trainer.fit(prompts, s.num_episodes, s.max_timesteps, s.update_timesteps)
    rows = s.train_batch_size // strategy.world_size
    if s.max_tokens_per_batch is not None:
        rows = max(1, min(rows, s.max_tokens_per_batch // s.max_length))
    bound = CHUNK_ELEMENTS_ACCELERATOR if strategy.device.type == 'cuda' else CHUNK_ELEMENTS_CPU
    return recorder.phases, models, size, rows * s.response_length > bound // config.vocab_size


# ---------------------------------------------------------------------- numbers


def averages(phases: list[dict[str, Any]], ignore_phases: int, world_size: int, peak: float) -> dict[str, Any]:
    """Returns rates over the phases after the first `ignore_phases`, or over all if there are no others."""
    counted = phases[ignore_phases:] or phases
    seconds = {part: sum(p['seconds'][part] for p in counted) for part in PARTS}
    flop = {part: sum(p['flop'][part] for p in counted) for part in PARTS}
    seconds['total'], flop['total'] = sum(seconds.values()), sum(flop.values())
    rate = {part: flop[part] / max(seconds[part], 1e-9) / world_size for part in seconds}
    samples = sum(p['samples'] for p in counted)
    return {
        'phases_counted': len(counted),
        'seconds_per_phase': {part: s / len(counted) for part, s in seconds.items()},
        'flop_per_phase': {part: f / len(counted) for part, f in flop.items()},
        'samples_per_s': samples / seconds['total'],
        'samples_per_s_per_device': samples / seconds['total'] / world_size,
        'new_tokens_per_s': sum(p['new_tokens'] for p in counted) / seconds['total'],
        'tflops_per_device': {part: r / 1e12 for part, r in rate.items()},
        'matmul_peak_tflops': peak / 1e12,
        'share_of_peak': {part: r / peak for part, r in rate.items()},
    }


def phase_sizes(plan: Any, on_cuda: bool) -> dict[str, int]:
    """Returns the planned bytes by phase; on a CPU host and device memory are the same."""
    sizes = {}
    for name, memory in plan.phases.items():
        sizes[name] = sum(memory.device.values()) + (0 if on_cuda else sum(memory.host.values()))
    return sizes


def planned(plan: Any, measured: int, on_cuda: bool, *, loads: bool = True) -> dict[str, Any]:
    """Returns the planned peak and its error, planned / measured - 1. loads: the measurement includes loading."""
    sizes = {name: size for name, size in phase_sizes(plan, on_cuda).items() if loads or name != 'load'}
    phase = max(sizes, key=sizes.__getitem__)
    error = sizes[phase] / measured - 1 if measured > 0 else None
    peak = {'planned_peak': sizes[phase], 'planned_host': plan.host_peak, 'planned_phase': phase}
    return peak | {'planner_error': error}


def table(result: dict[str, Any]) -> str:
    """Formats the result."""
    from chatgpt.plan import show_bytes

    r, m = result, result['memory']
    size = ', '.join(f'{name} {n / 1e6:.4g} M' for name, n in r['parameters'].items())
    rows = []
    for part in (*PARTS, 'total'):
        seconds, tflop = r['seconds_per_phase'][part], r['flop_per_phase'][part] / 1e12
        rates = f'{r["tflops_per_device"][part]:.4g}', f'{r["share_of_peak"][part]:.1%}'
        rows.append([part, f'{seconds:.3f}', f'{tflop:.4g}', *rates])
    error = f' ({m["planner_error"]:+.0%})' if m['planner_error'] is not None else ''
    return f"""\
{r['ladder']} {r['model']}, {r['settings']['strategy']} x {r['world_size']}, {r['settings']['precision']}, {r['machine']['device']} ({r['machine']['device_type']})
parameters: {size}

{markdown('part | s / phase | TFLOP / phase | TFLOPS per device | share of matmul peak', rows)}

samples/s {r['samples_per_s']:.4g} ({r['samples_per_s_per_device']:.4g} per device), new tokens/s {r['new_tokens_per_s']:.4g}, over {r['phases_counted']} of {len(r['phases'])} phases
matmul peak, measured here: {r['matmul_peak_tflops']:.4g} TFLOPS per device
peak memory: {show_bytes(m['peak'])}, planned {show_bytes(m['planned_peak'])}{error}; host {show_bytes(m['host_peak'])}"""


# ---------------------------------------------------------------------- the scripts


def script(ladder: str, doc: str | None, *, hidden: Sequence[str]) -> Callable[[], None]:
    """Returns the main function of a benchmark script on a ladder. hidden: settings without a flag."""
    models = list(ladders.FAMILIES[ladder][1])

    def main() -> None:
        parser = Parser(description=doc)
        parser.add_argument(
            '--model', choices=models, default=next(m for m in models if m != 'tiny'), help='rung of the ladder'
        )
        parser.add_argument('--json', type=Path, metavar='FILE', help='also write the numbers to this file')
        parser.add_argument(
            '--strategy', type=strategy_flag, default='naive', help='strategy that prepares and shards the models'
        )
        add_settings(parser, DummyRun, skip=[*hidden, 'strategy'])
        args = parser.parse_args()
        given = {f.name: getattr(args, f.name) for f in fields(DummyRun) if hasattr(args, f.name)}
        result = run(DummyRun(**given), ladder, args.model)
        if os.environ.get('RANK', '0') != '0':
            return
        print(table(result))
        if args.json:
            write_json(args.json, result)

    return main
