"""Compares the local engine's decoding modes on the same model, prompts and random numbers: plain calls, steps of fixed
shape (CUDA graphs on a GPU), attention over pages, and compiled steps.

    python benchmarks/decode.py
    python benchmarks/decode.py --layers 12 --width 768 --heads 12 --vocab 50257 --rounds 2 --json out.json
    python benchmarks/decode.py --device cuda --precision bf16 --shape qwen2-1.5b --batch 64 --prompt 64 --new 512

One thread, random weights, fixed lengths. Rounds alternate A B C A B C; a ratio is taken within a round, against plain
calls. Times are CPU seconds on a CPU and wall seconds on a GPU. `first_s` is the first phase, with `begin`, compilation
and capture; `phase_s` a later one from `begin` to `end`, with an engine that keeps its state. Log-probs differ by
rounding only: `max_logprob_difference` is the largest difference up to the first token that differs.

Other programs call `measure_decode(device)`.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from harness import alternate, gpt2, least_median_greatest, markdown, ratios, script_parser, write_json, write_page
from transformers import AutoModelForCausalLM, Qwen2Config
from which_gpu import SHAPES

from chatgpt.nn import Actor
from chatgpt.rollout import Call, LocalEngine, SamplingParams
from chatgpt.types import Prompt, Sample

PRECISIONS = {'fp32': torch.float32, 'bf16': torch.bfloat16}
WAYS: dict[str, dict[str, Any]] = {
    'plain': {'fixed_steps': False, 'attention': 'plain'},
    'fixed': {'fixed_steps': True, 'attention': 'plain'},
    'varlen': {'fixed_steps': True, 'attention': 'varlen'},
    'compiled': {'fixed_steps': 'compiled'},
}
SIZES = ('layers', 'width', 'heads', 'vocab')
ON_A_CPU = ('plain', 'fixed', 'compiled')


def config_of(shape: str, **sizes: int) -> Any:
    none = dict.fromkeys(('bos_token_id', 'eos_token_id', 'pad_token_id'))
    if shape == 'gpt2':
        return gpt2(**{'vocab': 50257, 'layers': 12, 'width': 768, 'heads': 12, 'positions': 1024} | sizes | none)
    names = {
        'layers': 'num_hidden_layers',
        'width': 'hidden_size',
        'heads': 'num_attention_heads',
        'vocab': 'vocab_size',
    }
    changed = {names[name]: size for name, size in sizes.items()}
    return Qwen2Config(**SHAPES['1.5B'][1] | changed | none, max_position_embeddings=4096)


def difference(found: list[Sample], want: list[Sample]) -> tuple[float, float]:
    """Returns the largest log-prob difference up to the first token that differs, and the share of tokens before it."""
    largest, same, total = 0.0, 0, 0
    for a, b in zip(found, want, strict=True):
        other = (a.response_ids != b.response_ids).nonzero().flatten().tolist()
        end = other[0] if other else len(a.response_ids)
        if end:
            largest = max(largest, float((a.logprobs[:end] - b.logprobs[:end]).abs().max()))
        same, total = same + end, total + len(a.response_ids)
    return largest, same / total


def compilations() -> int:
    from torch._dynamo.utils import counters

    return int(counters['stats'].get('unique_graphs', 0))


def measure_decode(
    device: str,
    *,
    config: Any = None,
    precision: str = 'fp32',
    batch: int = 64,
    prompt: int = 64,
    new: int = 128,
    rounds: int = 3,
    ways: Sequence[str] | None = None,
    left_s: Callable[[], float] = lambda: float('inf'),
) -> dict[str, Any]:
    """Returns for each mode: tokens per second, seconds of the first and of a later phase, ratio to plain calls.

    An unsupported mode has the reason under `not`. left_s: returns the seconds left of the caller's budget; no mode starts with less than a minute.
    """
    on_cuda = torch.device(device).type == 'cuda'
    config = config_of('gpt2') if config is None else config
    torch.manual_seed(0)
    with torch.device(device):
        model: Any = AutoModelForCausalLM.from_config(config, dtype=PRECISIONS[precision]).eval()
    actor = Actor(model.requires_grad_(False))
    ids = torch.randint(2, config.vocab_size, (batch, prompt), generator=torch.Generator().manual_seed(1))
    prompts = [Prompt(ids=row[: prompt - i % 8]) for i, row in enumerate(ids)]  # lengths vary, as in real prompts
    sampling = SamplingParams(max_new_tokens=new, min_new_tokens=new)
    clock = time.perf_counter if on_cuda else time.process_time

    def phase(engine: LocalEngine, seed: int) -> tuple[float, float, list[Sample]]:
        begin = clock()
        engine.begin(actor)
        start = clock()
        samples = engine.generate(Call.of(prompts, sampling, seed=seed, indices=range(batch)))
        end = clock()  # the samples are on the CPU, so the device has finished
        engine.end()
        return clock() - begin, end - start, samples

    found: dict[str, dict[str, Any]] = {}
    engines: dict[str, LocalEngine] = {}
    want: list[Sample] = []
    names = ways or (tuple(WAYS) if on_cuda else ON_A_CPU)
    for name in names:
        if engines and left_s() < 60:
            found[name] = {'not': 'no time left'}
            continue
        before, engine = compilations(), LocalEngine(**WAYS[name], keep=True)
        try:
            first_s, _, samples = phase(engine, 0)
        except (ValueError, RuntimeError) as error:
            found[name] = {'not': str(error).splitlines()[0]}
            continue
        want = want or samples
        largest, same = difference(samples, want)
        engines[name] = engine
        found[name] = {
            'first_s': first_s,
            'attention': engine.attention_form,
            'compilations': compilations() - before,
            'max_logprob_difference': largest,
            'share_of_tokens_before_another': same,
        }

    def later(name: str) -> Callable[[int], tuple[float, float]]:
        def once(number: int) -> tuple[float, float]:
            before = compilations()
            whole, generating, _ = phase(engines[name], 1 + number)
            found[name]['compilations_later'] = found[name].get('compilations_later', 0) + compilations() - before
            return whole, generating

        return once

    # a rate counts from the third phase on, when graphs are captured and caches filled
    times = alternate({name: later(name) for name in engines}, rounds, warmup=1 if on_cuda else 0)
    for name, pairs in times.items():
        generating = [g for _, g in pairs]
        found[name] |= {
            'tokens_per_s': batch * new / statistics.median(generating),
            'generate_s': statistics.median(generating),
            'phase_s': statistics.median(whole for whole, _ in pairs),
            'ratio': ratios(generating, [g for _, g in times['plain']]) if 'plain' in times else None,
        }
    return {
        'device': torch.cuda.get_device_name() if on_cuda else 'cpu',
        'clock': 'wall' if on_cuda else 'cpu',
        'shape': {'batch': batch, 'prompt': prompt, 'new': new, 'precision': precision},
        'parameters': sum(p.numel() for p in model.parameters()),
        'ways': found,
    }


@contextmanager
def cudnn_attention(on: bool) -> Iterator[None]:
    """Enables or disables cuDNN's attention in torch."""
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(on)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)


def table(result: dict[str, Any]) -> str:
    rows = []
    for name, way in result['ways'].items():
        if 'not' in way:
            rows.append([name, way['not'], '', '', '', ''])
            continue
        ratio = least_median_greatest(way['ratio']) if way['ratio'] else ''
        graphs = f'{way["compilations"]} + {way["compilations_later"]}'
        speed = f'{way["tokens_per_s"]:.0f}', ratio, f'{way["first_s"]:.1f}'
        rows.append([name, *speed, graphs, f'{way["max_logprob_difference"]:.0e}'])
    unit = 'CPU s' if result['clock'] == 'cpu' else 's'
    head = f'way | new tokens / {unit} | x plain: least median greatest | first s | graphs | log-prob'
    return markdown(head, rows)


def main() -> None:
    parser = script_parser(__doc__, 'speed.md')
    parser.add_argument('--shape', choices=['gpt2', 'qwen2-1.5b'], default='gpt2')
    for name in SIZES:
        parser.add_argument(f'--{name}', type=int, help="replaces the shape's value")
    for name, default in (('batch', 32), ('prompt', 16), ('new', 48), ('rounds', 5)):
        parser.add_argument(f'--{name}', type=int, default=default)
    parser.add_argument('--device', default='cpu')
    parser.add_argument('--precision', choices=PRECISIONS, default='fp32')
    parser.add_argument('--ways', nargs='+', choices=WAYS)
    parser.add_argument('--json', type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    sizes = {name: getattr(args, name) for name in SIZES if getattr(args, name) is not None}
    how = {name: getattr(args, name) for name in ('precision', 'batch', 'prompt', 'new', 'rounds', 'ways')}
    result = measure_decode(args.device, config=config_of(args.shape, **sizes), **how)
    print(table(result))
    if args.json:
        write_json(args.json, result)
    if args.page:
        write_page('speed.md', decode=table(result))


if __name__ == '__main__':
    main()
