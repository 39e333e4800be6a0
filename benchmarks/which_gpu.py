"""Plans which card trains which model by PPO with a critic on one trunk in 4 bits, and measures the planner's error.

    python benchmarks/which_gpu.py --page

The table needs no card: `chatgpt.plan` counts bytes. A cell is the longest sequence, half prompt and half response,
that fits. Models have the shapes of published ones and no weights. The measurement runs each phase of a smaller model
in its own process and compares its resident memory above the start with the plan.
"""

from __future__ import annotations

import argparse
import gc
import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import harness
import torch
import transformers
from transformers import LlamaConfig

from chatgpt.nn.shared import SharedTrunk
from chatgpt.plan import Setup, make_plan, show_bytes
from chatgpt.strategies import NaiveStrategy
from chatgpt.types import Prompt

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
"""hidden size and layers of the measured models"""
MEASURED_VOCAB, MEASURED_ROWS, MEASURED_PROMPT, MEASURED_NEW = 8192, 4, 112, 16


def config_of(name: str) -> Any:
    kind, sizes = SHAPES[name]
    return getattr(transformers, kind)(**(QWEN | sizes))


def setup_of(config: Any, tokens: int, **options: Any) -> Setup:
    """Returns a run of one process: LoRA rank 16, micro-batch 1, train batch 8. Half of a sequence is prompt."""
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
    return Setup(process=0, config=config, max_tokens_per_batch=tokens, **(common | options))


def planned(plan: Any) -> dict[str, int]:
    """Returns the planned bytes of the device by phase."""
    return {phase: sum(memory.device.values()) for phase, memory in plan.phases.items()}


def plan_shape(name: str) -> dict[str, Any]:
    """Returns peaks by length, the phases at 1024 tokens, and the bytes that 4 bits save on the trunk.

    Lengths go from the longest down to the first that fits the smallest card without 4 bits; shorter ones fit
    everywhere.
    """
    config = config_of(name)
    plan = make_plan(setup_of(config, SHOWN))
    phases = planned(plan)
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
    """Returns True if 5 % of the card stay free."""
    return size <= card * harness.GIB * 0.95


def longest(peaks: dict[int, int], more: int, card: int) -> str:
    """Returns the longest length with a peak plus `more` bytes that leaves 5 % of the card free."""
    fitting = [tokens for tokens, peak in peaks.items() if fits(peak + more, card)]
    return f'{max(fitting)}' if fitting else '-'


# ---------------------------------------------------------------------- measurement


def measured_config(hidden: int, layers: int) -> Any:
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


def trunk_phases(
    trunk: SharedTrunk,
    strategy: Any,
    config: Any,
    end_of: Callable[[str], None],
    rows: int,
    prompt: int,
    new: int,
    *,
    phases: int = 1,
    rank: int = 16,
) -> None:
    """Runs PPO of four models on one trunk with random prompts and micro-batch 1; calls `end_of` after load, collect,
    score and learn."""
    actor, critic, reward_model = trunk.actor(rank), trunk.critic(rank), trunk.reward_model(rank)
    trainer = harness.ppo_trainer(
        strategy,
        actor,
        critic,
        reward_model,
        optimizer=partial(strategy.make_optimizer, lr=1e-4),
        experience_batch_size=rows,
        train_batch_size=rows,
        max_epochs=1,
        max_tokens_per_batch=prompt + new,
        max_new_tokens=new,
    )
    make = trainer.maker.make

    def scored(*args: Any, **kwargs: Any) -> Any:
        end_of('collect')
        return make(*args, **kwargs)

    trainer.maker.make = scored
    end_of('load')
    drawn = torch.randint(3, config.vocab_size, (rows, prompt), generator=torch.Generator().manual_seed(0))
    trainer.set_prompts([Prompt(ids=row) for row in drawn])
    for _ in range(phases):
        trainer.collect(1)
        end_of('score')
        trainer.learn()
        end_of('learn')


def phase_peaks(config: Any) -> dict[str, int]:
    """Returns the peak resident memory of each phase above the start, in its second run. Weights are new and made block
    by block, as weights of a folder are read."""
    peaks: dict[str, int] = {}

    def begin() -> None:
        gc.collect()
        harness.forget_peak()

    def end_of(phase: str) -> None:
        peaks[phase] = harness.process_memory()['VmHWM'] - start
        begin()

    begin()
    start = harness.process_memory()['VmRSS']
    trunk = SharedTrunk.from_pretrained(None, config=config, quantize='nf4', checkpoint=True)  # type: ignore[arg-type]
    strategy, sizes = NaiveStrategy(seed=0, device='cpu'), (MEASURED_ROWS, MEASURED_PROMPT, MEASURED_NEW)
    trunk_phases(trunk, strategy, config, end_of, *sizes, phases=2)
    return peaks


def compare(size: str) -> dict[str, Any]:
    measured = harness.child(__file__, '--child', size, **harness.RETURNS)
    rows = {'experience_batch_size': MEASURED_ROWS, 'train_batch_size': MEASURED_ROWS}
    lengths = {'max_prompt_tokens': MEASURED_PROMPT, 'max_new_tokens': MEASURED_NEW}
    options: dict[str, Any] = {'precision': 'fp32', 'on_cuda': False} | rows | lengths
    setup = setup_of(measured_config(*MEASURED[size]), MEASURED_PROMPT + MEASURED_NEW, **options)
    return {'measured': measured, 'planned': planned(make_plan(setup))}


# ---------------------------------------------------------------------- tables


def longest_table(shapes: dict[str, Any], quantized: bool) -> str:
    rows = []
    for name, row in shapes.items():
        more = 0 if quantized else row['unquantized']
        peaks = {int(k): v for k, v in row['peaks'].items()}
        rows.append([name, *(longest(peaks, more, card) for card in CARDS)])
    return harness.markdown(['model', *(f'{card} GiB' for card in CARDS)], rows)


def phases_table(shapes: dict[str, Any]) -> str:
    rows = ([n, *(show_bytes(v) for v in (row['trunk'], *row['phases'].values()))] for n, row in shapes.items())
    return harness.markdown('model | trunk | load | collect | score | learn', rows)


def measured_table(measured: dict[str, Any]) -> str:
    rows = []
    for size, row in measured.items():
        for phase, plan in row['planned'].items():
            real = row['measured'][phase]
            where = ', '.join(map(str, MEASURED[size]))
            rows.append([where, phase, show_bytes(real), show_bytes(plan), f'{plan / real:.2f}'])
    return harness.markdown('width, layers | phase | measured | planned | planned / measured', rows)


def main() -> None:
    parser = harness.script_parser(__doc__, 'which_gpu.md')
    parser.add_argument(
        '--json', type=Path, default=harness.RESULTS / 'which_gpu.json', help='file of numbers; those in it are kept'
    )
    parser.add_argument('--child', choices=MEASURED, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        hidden, layers = MEASURED[args.child]
        phase_peaks(measured_config(hidden, 2))  # excludes imports and the matrix library's buffers
        print(json.dumps(phase_peaks(measured_config(hidden, layers))))
        return
    results = harness.Results(args.json)
    measured = {size: results.measure(f'measured {size}', lambda s=size: compare(s)) for size in MEASURED}
    shapes = {name: results.measure(name, lambda n=name: plan_shape(n)) for name in SHAPES}
    if args.page:
        longest = {'nf4': longest_table(shapes, True), 'bf16': longest_table(shapes, False)}
        harness.write_page('which_gpu.md', **longest, phases=phases_table(shapes), measured=measured_table(measured))


if __name__ == '__main__':
    main()
