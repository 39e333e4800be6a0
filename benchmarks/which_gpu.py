"""Which card trains which model by PPO with a critic on one trunk in 4 bits: a table by the planner, and how far the
planner is off where it can be measured.

    python benchmarks/which_gpu.py --page docs/results/which_gpu.md

The table needs no card: `chatgpt.plan` counts bytes. A cell is the longest sequence, half prompt and half response, that
fits. Models have the shapes of published ones and no weights. The measurement runs each phase of a smaller model in a
process of its own and compares its resident memory above the start with the plan.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from chatgpt.plan import Setup, make_plan
from chatgpt.plan.setup import show_bytes

RESULTS = Path(__file__).resolve().parent / 'results'
GIB = 2**30
CARDS = (8, 12, 16, 24, 48, 80)
LENGTHS, SHOWN = (512, 1024, 2048, 4096, 8192, 16384, 32768), 1024
QWEN = {'max_position_embeddings': 32768}
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    '0.5B': ('Qwen2Config', {'hidden_size': 896, 'intermediate_size': 4864, 'num_hidden_layers': 24,
             'num_attention_heads': 14, 'num_key_value_heads': 2, 'vocab_size': 151936, 'tie_word_embeddings': True}),
    '1.5B': ('Qwen2Config', {'hidden_size': 1536, 'intermediate_size': 8960, 'num_hidden_layers': 28,
             'num_attention_heads': 12, 'num_key_value_heads': 2, 'vocab_size': 151936, 'tie_word_embeddings': True}),
    '3B': ('Qwen2Config', {'hidden_size': 2048, 'intermediate_size': 11008, 'num_hidden_layers': 36,
           'num_attention_heads': 16, 'num_key_value_heads': 2, 'vocab_size': 151936, 'tie_word_embeddings': True}),
    '7B': ('Qwen2Config', {'hidden_size': 3584, 'intermediate_size': 18944, 'num_hidden_layers': 28,
           'num_attention_heads': 28, 'num_key_value_heads': 4, 'vocab_size': 152064, 'tie_word_embeddings': False}),
    '8B': ('LlamaConfig', {'hidden_size': 4096, 'intermediate_size': 14336, 'num_hidden_layers': 32,
           'num_attention_heads': 32, 'num_key_value_heads': 8, 'vocab_size': 128256, 'tie_word_embeddings': False}),
    '13B': ('LlamaConfig', {'hidden_size': 5120, 'intermediate_size': 13824, 'num_hidden_layers': 40,
            'num_attention_heads': 40, 'num_key_value_heads': 40, 'vocab_size': 32000, 'tie_word_embeddings': False}),
}  # fmt: skip
"""shapes of Qwen2.5 0.5B to 7B, Llama 3.1 8B, Llama 2 13B"""
MEASURED = {'small': (512, 8), 'medium': (768, 12), 'large': (1024, 16)}
"""hidden size and layers of the models that are measured"""
MEASURED_VOCAB, MEASURED_ROWS, MEASURED_PROMPT, MEASURED_NEW = 8192, 4, 112, 16


def config_of(name: str) -> Any:
    import transformers

    kind, sizes = SHAPES[name]
    return getattr(transformers, kind)(**(QWEN | sizes))


def setup_of(config: Any, tokens: int, **options: Any) -> Setup:
    """A run of one process: rank 16, one sequence in a forward, eight in a batch. Half of a sequence is prompt."""
    common: dict[str, Any] = {
        'reward_config': config,
        'precision': 'bf16',
        'shared_trunk': True,
        'quantize': 'nf4',
        'lora_rank': 16,
        'gradient_checkpointing': True,
        'train_batch_size': 8,
        'experience_batch_size': 8,
        'max_prompt_tokens': tokens // 2,
        'max_new_tokens': tokens // 2,
    }
    return Setup(config=config, max_tokens_per_batch=tokens, **(common | options))


def plan_shape(name: str) -> dict[str, Any]:
    """Peaks by length, the phases at 1024 tokens, and what the trunk takes less for being in 4 bits. From the longest
    sequence down to the first that the smallest card has room for without 4 bits: shorter ones fit everywhere."""
    config = config_of(name)
    plan = make_plan(setup_of(config, SHOWN))
    phases = {phase: sum(memory.device.values()) for phase, memory in plan.phases.items()}
    trunk, spare = (plan.phases['learn'].device[part] for part in ('trunk', 'one dense weight'))
    plain = make_plan(replace(plan.setup, quantize='none', task='sft')).phases['load'].device['trunk']
    peaks, unquantized = {SHOWN: plan.peak}, plain - trunk - spare
    for tokens in reversed(LENGTHS):
        if tokens not in peaks:
            peaks[tokens] = make_plan(setup_of(config, tokens)).peak
        print(name, tokens, show_bytes(peaks[tokens]), flush=True)
        if fits(peaks[tokens] + max(unquantized, 0), min(CARDS)):
            break
    return {'peaks': peaks, 'phases': phases, 'trunk': trunk, 'unquantized': unquantized}


def fits(size: int, card: int) -> bool:
    """Whether 5 % of the card stay free."""
    return size <= card * GIB * 0.95


def longest(peaks: dict[int, int], more: int, card: int) -> str:
    """The longest length whose peak, and `more` bytes, leave 5 % of the card free."""
    fitting = [tokens for tokens, peak in peaks.items() if fits(peak + more, card)]
    return f'{max(fitting)}' if fitting else '-'


# ---------------------------------------------------------------------- measurement


def measured_config(hidden: int, layers: int) -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(
        hidden_size=hidden,
        intermediate_size=hidden * 4,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=8,
        vocab_size=MEASURED_VOCAB,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
    )


def phase_peaks(config: Any) -> dict[str, int]:
    """Most resident memory of loading and of each phase of a run, above what there was before any model; of the second
    phase. New weights, which are made block by block as those of a folder are read."""
    import torch
    from arithmetic_done import process_memory

    from chatgpt.nn.shared import SharedTrunk
    from chatgpt.trainer import PPOTrainer
    from chatgpt.trainer.callbacks import Callback
    from chatgpt.trainer.strategies import NaiveStrategy
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

    trunk = SharedTrunk.from_pretrained(None, config=config, quantize='nf4', checkpoint=True)  # type: ignore[arg-type]
    actor, critic, reward_model = trunk.actor(16), trunk.critic(16), trunk.reward_model(16)
    strategy = NaiveStrategy(seed=0, device='cpu')

    class Phases(Callback):
        def on_make_experience_start(self, trainer: Any) -> None:
            begin()

        def on_learn_epoch_start(self, trainer: Any, epoch: int) -> None:
            end_of('score')

        def on_phase_end(self, trainer: Any, phase: int, metrics: dict[str, float]) -> None:
            end_of('learn')

    def trained(m: Any) -> Any:
        return m, torch.optim.AdamW([p for p in m.parameters() if p.requires_grad], lr=1e-4)

    (actor, actor_optim), (critic, critic_optim), reward_model = strategy.prepare(
        trained(actor), trained(critic), reward_model
    )
    end_of('load')
    trainer = PPOTrainer(
        strategy,
        actor,
        critic,
        reward_model,
        None,
        actor_optim,
        critic_optim,
        callbacks=[Phases()],
        experience_batch_size=MEASURED_ROWS,
        train_batch_size=MEASURED_ROWS,
        max_tokens_per_batch=MEASURED_PROMPT + MEASURED_NEW,
        max_epochs=1,
        max_new_tokens=MEASURED_NEW,
    )
    make = trainer.maker.make

    def scored(*args: Any, **kwargs: Any) -> Any:
        end_of('collect')
        return make(*args, **kwargs)

    trainer.maker.make = scored  # type: ignore[method-assign]
    generator = torch.Generator().manual_seed(0)
    prompts = [
        Prompt(ids=torch.randint(3, MEASURED_VOCAB, (MEASURED_PROMPT,), generator=generator))
        for _ in range(MEASURED_ROWS)
    ]
    trainer.fit(prompts, max_timesteps=2, update_timesteps=1)
    return peaks


def compare(size: str) -> dict[str, Any]:
    command = [sys.executable, __file__, '--child', size]
    # what is freed goes back to the system, so that resident memory is what is in use
    returns = {'MALLOC_TRIM_THRESHOLD_': '0', 'MALLOC_MMAP_THRESHOLD_': '65536', 'MALLOC_ARENA_MAX': '1'}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=os.environ | returns)
    measured = json.loads(done.stdout.splitlines()[-1])
    options: dict[str, Any] = {'precision': 'fp32', 'on_cuda': False}
    options |= {'max_prompt_tokens': MEASURED_PROMPT, 'max_new_tokens': MEASURED_NEW}
    options |= {'experience_batch_size': MEASURED_ROWS, 'train_batch_size': MEASURED_ROWS}
    plan = make_plan(setup_of(measured_config(*MEASURED[size]), MEASURED_PROMPT + MEASURED_NEW, **options))
    planned = {phase: sum(memory.device.values()) for phase, memory in plan.phases.items()}
    print(size, {k: (show_bytes(measured[k]), show_bytes(v)) for k, v in planned.items()}, flush=True)
    return {'measured': measured, 'planned': planned}


# ---------------------------------------------------------------------- page


def page(shapes: dict[str, Any], measured: dict[str, Any]) -> str:
    lines = [
        '# Which card for which model',
        '',
        '`python benchmarks/which_gpu.py --page docs/results/which_gpu.md`',
        '',
        'PPO with a critic, a reward model and a reference, all adapters of rank 16 on one frozen trunk (`--shared_trunk '
        'true --lora_rank 16 --precision bf16 --gradient_checkpointing true`), eight sequences in a batch, one in a '
        'forward. A cell is the longest sequence, half prompt and half response, whose plan leaves 5 % of the card free. '
        '**By the planner: nothing of this was run on a GPU.**',
        '',
        '## With `--quantize nf4`',
        '',
    ]
    missing = [name for name in SHAPES if name not in shapes] + [f'measured {m}' for m in MEASURED if m not in measured]
    if missing:
        lines[-2:-2] = [f'Not done yet: {", ".join(missing)}; the command goes on where it stopped.', '']

    def table(quantized: bool) -> list[str]:
        rows = ['| model | ' + ' | '.join(f'{c} GiB' for c in CARDS) + ' |', '|---' * (len(CARDS) + 1) + '|']
        for name, row in shapes.items():
            more = 0 if quantized else row['unquantized']
            peaks = {int(k): v for k, v in row['peaks'].items()}
            rows.append(f'| {name} | ' + ' | '.join(longest(peaks, more, c) for c in CARDS) + ' |')
        return rows

    lines += [*table(True), '', '## With the trunk in bf16', '', *table(False), '']
    lines += [
        '## Memory of each phase, 512 + 512 tokens, nf4',
        '',
        '| model | trunk | load | collect | score | learn |',
        '|---|---|---|---|---|---|',
    ]
    for name, row in shapes.items():
        cells = [row['trunk'], *row['phases'].values()]
        lines.append(f'| {name} | ' + ' | '.join(show_bytes(v) for v in cells) + ' |')
    lines += [
        '',
        '## Planned and measured',
        '',
        'Models of new weights in fp32 with nf4 blocks on a CPU, '
        f'{MEASURED_ROWS} sequences of {MEASURED_PROMPT} + {MEASURED_NEW} tokens: most resident memory above the start, of the second phase. What a '
        'run of two such layers leaves behind (imports, buffers of the matrix library) was there at the start.',
        '',
        '| width, layers | phase | measured | planned | planned / measured |',
        '|---|---|---|---|---|',
    ]
    for size, row in measured.items():
        for phase, plan in row['planned'].items():
            real = row['measured'][phase]
            hidden, layers = MEASURED[size]
            lines.append(
                f'| {hidden}, {layers} | {phase} | {show_bytes(real)} | {show_bytes(plan)} | {plan / real:.2f} |'
            )
    return '\n'.join(lines) + '\n'


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--page', type=Path, help='write the page here')
    parser.add_argument(
        '--json', type=Path, default=RESULTS / 'which_gpu.json', help='numbers, taken up again if there'
    )
    parser.add_argument('--shapes', nargs='*', default=list(SHAPES), choices=SHAPES)
    parser.add_argument('--sizes', nargs='*', default=list(MEASURED), choices=MEASURED)
    parser.add_argument('--child', choices=MEASURED, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        hidden, layers = MEASURED[args.child]
        phase_peaks(measured_config(hidden, 2))  # imports and the matrix library's buffers are not the model's
        print(json.dumps(phase_peaks(measured_config(hidden, layers))))
        return
    numbers = json.loads(args.json.read_text()) if args.json.is_file() else {'shapes': {}, 'measured': {}}
    for kind, names, make in (('measured', args.sizes, compare), ('shapes', args.shapes, plan_shape)):
        for name in names:
            if name not in numbers[kind]:
                numbers[kind][name] = make(name)
                args.json.write_text(json.dumps(numbers, indent=1))
    if args.page:
        ordered = [
            {n: numbers[kind][n] for n in names if n in numbers[kind]}
            for kind, names in (('shapes', SHAPES), ('measured', MEASURED))
        ]
        args.page.write_text(page(*ordered))


if __name__ == '__main__':
    main()
