"""What FSDP2 and tensor parallelism take of each process's memory, planned and measured, phase by phase.

    python benchmarks/tensor_parallel.py --page docs/results/tensor_parallel.md

PPO with four whole models on two and four gloo processes of a CPU, cut over data ranks, over tensor ranks, and over
both. Measured is resident memory above the start, on the process that has most, of the second phase; the plan is
`chatgpt.plan`'s of the same settings. Left out: a GPU, and speed, which gloo on one machine says nothing about.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

from chatgpt.plan import Setup, make_plan, show_bytes

SIZES = {'small': (384, 6), 'medium': (640, 8)}
"""hidden size and layers"""
FIRST = (64, 2)
"""of a run before that, in the same processes: imports and the matrix library's buffers are not the model's"""
LAYOUTS = {'2 x 1': (2, 1), '1 x 2': (2, 2), '4 x 1': (4, 1), '2 x 2': (4, 2), '1 x 4': (4, 4)}
"""data ranks x processes of each: (processes, tensor_parallel)"""
ROWS, PROMPT, NEW, VOCAB, HEADS = 8, 112, 16, 8192, 8
PHASES = ('collect', 'score', 'learn')


def config_of(size: str) -> Any:
    from transformers import LlamaConfig

    hidden, layers = SIZES.get(size, FIRST)
    return LlamaConfig(
        hidden_size=hidden,
        intermediate_size=hidden * 3,
        num_hidden_layers=layers,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS // 2,
        vocab_size=VOCAB,
        max_position_embeddings=256,
        tie_word_embeddings=False,
    )


def settings(tensor_parallel: int) -> dict[str, Any]:
    return {
        'strategy': 'fsdp',
        'precision': 'fp32',
        'on_cuda': False,
        'gradient_checkpointing': True,
        'strategy_options': {'tensor_parallel': tensor_parallel} if tensor_parallel > 1 else {},
        'experience_batch_size': ROWS,
        'train_batch_size': ROWS,
        'max_tokens_per_batch': PROMPT + NEW,
        'max_prompt_tokens': PROMPT,
        'max_new_tokens': NEW,
    }


def of_a_rank(sizes: list[str], tensor_parallel: int) -> dict[str, int]:
    """Peaks of the last of these sizes, by phase; what the first leaves behind does not count."""
    from chatgpt.trainer.strategies import FSDPStrategy

    peaks: dict[str, int] = {}
    with FSDPStrategy(
        seed=0, device='cpu', precision='fp32', tensor_parallel=tensor_parallel, meta_init=True
    ) as strategy:
        for size in sizes:
            peaks = phase_peaks(strategy, size)
    return peaks


def phase_peaks(strategy: Any, size: str) -> dict[str, int]:
    import torch
    from arithmetic_done import process_memory

    from chatgpt.nn import AutoActor, AutoCritic, AutoRM
    from chatgpt.trainer import PPOTrainer
    from chatgpt.trainer.callbacks import Callback
    from chatgpt.types import Prompt

    def begin() -> None:
        gc.collect()
        Path('/proc/self/clear_refs').write_text('5')  # the highest number from here on

    peaks: dict[str, int] = {}
    begin()
    start = process_memory()['VmRSS']

    def end_of(phase: str) -> None:
        peaks[phase] = process_memory()['VmHWM'] - start
        begin()

    with strategy.model_init_context():
        config = config_of(size)
        actor, critic = AutoActor(config=config), AutoCritic(config=config)
        initial, reward = AutoActor(config=config), AutoRM(config=config)
    for model in (actor, critic):
        model.model.gradient_checkpointing_enable({'use_reentrant': False})
    pairs = [(m, strategy.make_optimizer(m.parameters(), lr=1e-4)) for m in (actor, critic)]
    (actor, actor_optim), (critic, critic_optim), initial, reward = strategy.prepare(
        *pairs, initial.requires_grad_(False), reward.requires_grad_(False)
    )

    class Phases(Callback):
        def on_make_experience_start(self, trainer: Any) -> None:
            end_of('load')

        def on_learn_epoch_start(self, trainer: Any, epoch: int) -> None:
            end_of('score')

        def on_phase_end(self, trainer: Any, phase: int, metrics: dict[str, float]) -> None:
            end_of('learn')

    trainer = PPOTrainer(
        strategy,
        actor,
        critic,
        reward,
        initial,
        actor_optim,
        critic_optim,
        callbacks=[Phases()],
        experience_batch_size=ROWS,
        train_batch_size=ROWS,
        max_tokens_per_batch=PROMPT + NEW,
        max_epochs=1,
        max_new_tokens=NEW,
    )
    make = trainer.maker.make

    def scored(*args: Any, **kwargs: Any) -> Any:
        end_of('collect')
        return make(*args, **kwargs)

    trainer.maker.make = scored  # type: ignore[method-assign]
    generator = torch.Generator().manual_seed(0)
    prompts = [Prompt(ids=torch.randint(3, VOCAB, (PROMPT,), generator=generator)) for _ in range(ROWS)]
    trainer.fit(prompts, max_timesteps=2, update_timesteps=1)
    return peaks


def compare(size: str, layout: str) -> dict[str, dict[str, int]]:
    processes, tensor_parallel = LAYOUTS[layout]
    # what is freed goes back to the system, so that resident memory is what is in use
    returns = {'MALLOC_TRIM_THRESHOLD_': '0', 'MALLOC_MMAP_THRESHOLD_': '65536', 'MALLOC_ARENA_MAX': '1'}
    command = [sys.executable, __file__, '--child', size, '--layouts', layout]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=os.environ | returns)
    ranks = json.loads(done.stdout.splitlines()[-1])
    plan = make_plan(
        Setup(
            config=config_of(size), reward_config=config_of(size), num_processes=processes, **settings(tensor_parallel)
        )
    )
    measured = {phase: max(rank[phase] for rank in ranks) for phase in PHASES}
    planned = {phase: sum(plan.phases[phase].device.values()) for phase in PHASES}
    print(size, layout, {p: (show_bytes(measured[p]), show_bytes(planned[p])) for p in PHASES}, flush=True)
    return {'measured': measured, 'planned': planned}


def page(found: dict[str, dict[str, Any]], flags: str) -> str:
    lines = [
        '# Memory of tensor parallelism',
        '',
        f'`python benchmarks/tensor_parallel.py{flags}`',
        '',
        '**Measured on a CPU with gloo, not on a GPU.** PPO with a critic, a reference and a reward model, all whole '
        f'Llama-shaped models of new weights in fp32 with gradient checkpointing, {ROWS} sequences of {PROMPT} + {NEW} '
        'tokens, one in a forward. "2 x 1" are two data ranks (FSDP2 alone), "1 x 2" one of two processes '
        '(`tensor_parallel=2`). Measured: most resident memory above the start, on the process that has most, of the '
        'second phase. Planned: `chatgpt.plan`. What a smaller run leaves behind was there at the start.',
        '',
        '| width, layers | ranks x parts | '
        + ' | '.join(f'{p}: measured, planned | ratio' for p in (*PHASES, 'peak of all'))
        + ' |',
        '|---' * (4 + 2 * len(PHASES)) + '|',
    ]
    for size, layouts in found.items():
        hidden, layers = SIZES[size]
        for layout, row in layouts.items():
            cells = []
            pairs = [(row['measured'][phase], row['planned'][phase]) for phase in PHASES]
            for real, plan in (*pairs, tuple(map(max, zip(*pairs, strict=True)))):
                cells += [f'{show_bytes(real)}, {show_bytes(plan)}', f'{plan / real:.2f}']
            lines.append(f'| {hidden}, {layers} | {layout} | ' + ' | '.join(cells) + ' |')
    return '\n'.join(lines) + '\n'


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--sizes', nargs='*', default=list(SIZES), choices=SIZES)
    parser.add_argument('--layouts', nargs='*', default=list(LAYOUTS), choices=LAYOUTS)
    parser.add_argument('--page', type=Path, help='write the page here')
    parser.add_argument('--child', choices=SIZES, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        from chatgpt.testing.processes import run_distributed

        processes, tensor_parallel = LAYOUTS[args.layouts[0]]
        ranks = run_distributed(of_a_rank, processes, ['first', args.child], tensor_parallel, fresh=True, timeout_s=900)
        print(json.dumps(ranks))
        return
    found = {size: {layout: compare(size, layout) for layout in args.layouts} for size in args.sizes}
    if args.page:
        given = sys.argv[1:]
        args.page.write_text(page(found, ''.join(f' {shlex.quote(flag)}' for flag in given)))


if __name__ == '__main__':
    main()
