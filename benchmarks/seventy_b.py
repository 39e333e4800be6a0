"""Llama 3 70B on eight and sixteen GPUs of 80 GiB, by the planner: which method fits under which strategy, with what
peak in each phase, and the longest sequence. Nothing is loaded and nothing is run.

    python benchmarks/seventy_b.py --page docs/results/seventy_b.md

The numbers are kept (--json) and taken up again. Left out: speed.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import seventy_b_page

from chatgpt.plan import Setup, make_plan, models, show_bytes

RESULTS = Path(__file__).resolve().parent / 'results'
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
"""of Llama 3 70B: 70.6 billion parameters"""
DEVICE, HOST = 80 * 2**30, 2 * 2**40
GPUS = (8, 16)
SEQUENCES = 128
"""of a phase and of a train batch"""
METHODS: dict[str, dict[str, Any]] = {
    'PPO, all weights': {'critic': 'own', 'frozen': True},
    'PPO, LoRA': {'critic': 'own', 'lora_rank': 16, 'frozen': True},
    'GRPO, all weights': {'critic': 'none', 'num_samples_per_prompt': 8},
    'GRPO, LoRA': {'critic': 'none', 'num_samples_per_prompt': 8, 'lora_rank': 16},
}
"""'frozen': there is a reward model of the same shape; without, rewards are a function"""
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
    """None for a layout that changes nothing, or does not exist, there."""
    from transformers import LlamaConfig

    config, options, where = LlamaConfig(**SHAPE), dict(METHODS[method]), dict(LAYOUTS[layout])
    parts, frozen = where.pop('tensor_parallel', 1), options.pop('frozen', False)
    if 'offload' in where and not (frozen or not options.get('lora_rank')):
        return None  # no model waits
    if elsewhere and where.pop('stream_blocks', False):
        return None  # nothing is generated here
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
        max_tokens_per_batch=tokens,
        max_prompt_tokens=tokens // 2,
        max_new_tokens=tokens // 2,
        rollouts_elsewhere=elsewhere,
        **options,
        **where,
    )


def row(method: str, layout: str, gpus: int) -> dict[str, Any] | None:
    """Peaks at SHOWN tokens with rollouts here and elsewhere, and the longest length of each that fits."""
    found: dict[str, Any] = {}
    for name in ('here', 'elsewhere'):
        setup = setup_of(method, layout, gpus, SHOWN, name == 'elsewhere')
        if setup is None:
            continue
        if found and found['here']['longest'] is None and found['here']['others'] > DEVICE * 0.95:
            continue  # it is not the responses that do not fit
        plan = make_plan(setup)
        phases = {phase: sum(memory.device.values()) for phase, memory in plan.phases.items()}
        longest = longest_of(setup) if plan.fits else None
        found[name] = {
            'phases': phases,
            'others': max(size for phase, size in phases.items() if phase != 'collect'),
            'host': plan.host_peak,
            'limit': plan.limit,
            'longest': longest,
        }
        print(gpus, method, layout, name, plan.verdict(), longest, flush=True)
    return found or None


def longest_of(setup: Setup) -> int:
    """The greatest of LENGTHS that fits; the first does."""
    low, high = 0, len(LENGTHS) - 1
    while low < high:
        middle = (low + high + 1) // 2
        tokens = LENGTHS[middle]
        sizes = {'max_prompt_tokens': tokens // 2, 'max_new_tokens': tokens // 2, 'max_tokens_per_batch': tokens}
        low, high = (middle, high) if make_plan(replace(setup, **sizes)).fits else (low, middle - 1)
    return LENGTHS[low]


def remember_traces() -> None:
    """Let plans share what does not differ between them: all are of one shape, in one precision."""

    def key(value: Any) -> Any:
        if not isinstance(value, Setup):
            return value if isinstance(value, (str, int, float)) else None
        lengths = (value.max_prompt_tokens, value.max_new_tokens)
        return value.tensor_parallel, value.lora_rank, value.critic, value.task, *lengths

    def remembered(function: Any) -> Any:
        known: dict[Any, Any] = {}

        def wrapped(*args: Any, **options: Any) -> Any:
            if function.__name__ == 'build' and len(args) > 3 and args[3] is not None:
                return function(*args, **options)  # a trace changes what it is given
            asked = (*map(key, args), *options.items())
            if asked not in known:
                known[asked] = function(*args, **options)
            return known[asked]

        return wrapped

    for name in ('build', 'learning_bytes', 'scoring_bytes', 'prefill_bytes', 'cache_elements'):
        setattr(models, name, remembered(getattr(models, name)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        '--json', type=Path, default=RESULTS / 'seventy_b.json', help='numbers, taken up again if there'
    )
    parser.add_argument('--page', type=Path, help='write the page here')
    args = parser.parse_args()
    remember_traces()
    numbers = json.loads(args.json.read_text()) if args.json.is_file() else {}
    for gpus in GPUS:
        for method in METHODS:
            for layout in LAYOUTS:
                key = f'{gpus}, {method}, {layout}'
                if key not in numbers:
                    numbers[key] = row(method, layout, gpus)
                    args.json.write_text(json.dumps(numbers, indent=1))
    if args.page:
        args.page.write_text(
            seventy_b_page.page(numbers, GPUS, list(METHODS), list(LAYOUTS), SHOWN, SEQUENCES, show_bytes)
        )


if __name__ == '__main__':
    main()
