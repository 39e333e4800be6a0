"""Plans Llama 3 70B on eight and sixteen GPUs of 80 GiB: the methods that fit under each strategy, the peak of each
phase and the longest sequence. No model is loaded.

    python benchmarks/seventy_b.py --page

Numbers in the file of --json are not planned again. Speed is not planned.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

from harness import RESULTS, Results, markdown, script_parser, write_page
from transformers import LlamaConfig
from which_gpu import planned

from chatgpt.plan import Setup, make_plan, show_bytes

SHAPE = {
    'hidden_size': 8192,
    'intermediate_size': 28672,
    'num_hidden_layers': 80,
    'num_attention_heads': 64,
    'num_key_value_heads': 8,
    'vocab_size': 128256,
    'max_position_embeddings': 131072,
    'tie_word_embeddings': False,
}
"""Llama 3 70B: 70.6 billion parameters"""
DEVICE, HOST = 80 * 2**30, 2 * 2**40
GPUS = (8, 16)
SEQUENCES = 128
"""sequences of a phase and of a train batch"""
METHODS: dict[str, dict[str, Any]] = {
    'PPO, all weights': {'critic': 'own', 'frozen': True},
    'PPO, LoRA': {'critic': 'own', 'lora_rank': 16, 'frozen': True},
    'GRPO, all weights': {'critic': 'none', 'num_samples_per_prompt': 8},
    'GRPO, LoRA': {'critic': 'none', 'num_samples_per_prompt': 8, 'lora_rank': 16},
}
"""'frozen': with a reward model of the same shape; otherwise the reward is a function"""
LAYOUTS: dict[str, dict[str, Any]] = {
    'FSDP2': {},
    'FSDP2 + TP 2': {'tensor_parallel': 2},
    'FSDP2 + TP 4': {'tensor_parallel': 4},
    'FSDP2 + TP 8': {'tensor_parallel': 8},
    'FSDP2 + TP 8, idle': {'tensor_parallel': 8, 'offload': 'idle'},
    'FSDP2, cpu_offload': {'strategy': 'fsdp_cpu'},
    'FSDP2, cpu_offload, streamed': {'strategy': 'fsdp_cpu', 'stream_blocks': True},
}
SHOWN, LENGTHS = 2048, (2048, 4096, 8192, 16384, 32768)


def setup_of(method: str, layout: str, gpus: int, tokens: int, elsewhere: bool) -> Setup | None:
    """Returns None for a layout that changes nothing or does not exist for the method."""
    config, options, where = LlamaConfig(**SHAPE), dict(METHODS[method]), dict(LAYOUTS[layout])
    parts, frozen = where.pop('tensor_parallel', 1), options.pop('frozen', False)
    if 'offload' in where and not (frozen or not options.get('lora_rank')):
        return None  # no model is idle
    if elsewhere and where.pop('stream_blocks', False):
        return None  # the method generates nothing
    return Setup(
        config=config,
        reward_config=config if frozen else None,
        strategy=where.pop('strategy', 'fsdp'),
        strategy_options={'tensor_parallel': parts} if parts > 1 else {},
        num_processes=gpus,
        processes_per_machine=8,
        precision='bf16',
        gradient_checkpointing=True,
        memory=DEVICE,
        host_memory=HOST,
        train_batch_size=SEQUENCES,
        experience_batch_size=SEQUENCES // options.get('num_samples_per_prompt', 1),
        update_timesteps=1,
        max_tokens_per_batch=tokens,
        max_prompt_tokens=tokens // 2,
        max_new_tokens=tokens // 2,
        rollouts_elsewhere=elsewhere,
        **options,
        **where,
    )


def row(method: str, layout: str, gpus: int) -> dict[str, Any] | None:
    """Returns the peaks at SHOWN tokens with rollouts here and elsewhere, and the longest length of each that fits."""
    found: dict[str, Any] = {}
    for name in ('here', 'elsewhere'):
        setup = setup_of(method, layout, gpus, SHOWN, name == 'elsewhere')
        if setup is None:
            continue
        if found and found['here']['longest'] is None and found['here']['others'] > DEVICE * 0.95:
            continue  # responses are not what does not fit
        plan = make_plan(setup)
        phases = planned(plan)
        longest = longest_of(setup) if plan.fits else None
        found[name] = {
            'phases': phases,
            'others': max(size for phase, size in phases.items() if phase != 'collect'),
            'host': plan.host_peak,
            'limit': plan.limit,
            'longest': longest,
        }
    return found or None


def longest_of(setup: Setup) -> int:
    """Returns the greatest of LENGTHS that fits; the first always does."""
    low, high = 0, len(LENGTHS) - 1
    while low < high:
        middle = (low + high + 1) // 2
        tokens = LENGTHS[middle]
        sizes = {'max_prompt_tokens': tokens // 2, 'max_new_tokens': tokens // 2, 'max_tokens_per_batch': tokens}
        low, high = (middle, high) if make_plan(replace(setup, **sizes)).fits else (low, middle - 1)
    return LENGTHS[low]


def fits_table(numbers: dict[str, Any], gpus: int) -> str:
    rows = []
    for method in METHODS:
        cells = []
        for where in ('here', 'elsewhere'):
            known = ((layout, (numbers.get(f'{gpus}, {method}, {layout}') or {}).get(where)) for layout in LAYOUTS)
            fitting = [f'{layout}: {found["longest"]}' for layout, found in known if found and found['longest']]
            cells.append('; '.join(fitting) or 'nothing')
        rows.append([method, *cells])
    return markdown('method | longest sequence, responses here | longest sequence, responses elsewhere', rows)


def memory_table(numbers: dict[str, Any], gpus: int) -> str:
    """Returns the table of layouts that fit, with rollouts here or elsewhere."""

    def marked(size: float | None, limit: float = 0.95 * DEVICE) -> str:
        if size is None:
            return '-'
        return f'**{show_bytes(size)}**' if size > limit else show_bytes(size)

    rows = []
    for method, layout in product(METHODS, LAYOUTS):
        found = numbers.get(f'{gpus}, {method}, {layout}')
        if found and any(plan['longest'] for plan in found.values()):
            one = (found.get('here') or found['elsewhere'])['phases']
            collects = [
                found[where]['phases']['collect'] if where in found else None for where in ('here', 'elsewhere')
            ]
            cells = [marked(size) for size in (one.get('load'), *collects, one.get('score'), one.get('learn'))]
            host = max(found[where]['host'] for where in found)
            rows.append([method, layout, *cells, marked(host if host >= 2**30 else None, HOST)])
    return markdown(
        'method | layout | load | collect, here | collect, elsewhere | score | learn | host, one machine', rows
    )


def main() -> None:
    parser = script_parser(__doc__, 'seventy_b.md')
    parser.add_argument(
        '--json', type=Path, default=RESULTS / 'seventy_b.json', help='file of numbers; those in it are kept'
    )
    args = parser.parse_args()
    results = Results(args.json)
    for gpus, method, layout in product(GPUS, METHODS, LAYOUTS):
        results.measure(f'{gpus}, {method}, {layout}', lambda asked=(method, layout, gpus): row(*asked))
    if args.page:
        tables = {f'fits {gpus}': fits_table(results, gpus) for gpus in GPUS}
        write_page('seventy_b.md', **tables, **{f'memory {gpus}': memory_table(results, gpus) for gpus in GPUS})


if __name__ == '__main__':
    main()
