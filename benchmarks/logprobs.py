"""Compares the kernels for log-probs through a large output layer: seconds, peak memory, difference from the plain
path.

    python benchmarks/logprobs.py [--device cpu]
    python benchmarks/logprobs.py --blocks            # transformer blocks compiled, against plain

Forward and backward of a loss with one weight per token, and the entropy as a metric. On a CPU each case runs in its
own process with one thread, and its memory is the rise of resident memory above states and weight; on CUDA it is the
allocator's. `compare(device)` and `compare_blocks(device)` return the numbers as dicts.
"""

from __future__ import annotations

import gc
import json
from collections.abc import Callable
from copy import deepcopy
from importlib.util import find_spec
from itertools import product
from typing import Any

import torch
from harness import child, cpu_seconds, forget_peak, process_memory, random_sequence, script_parser, timed, wall_seconds
from torch import Tensor, nn
from transformers import LlamaConfig

from chatgpt.batching import collate
from chatgpt.functional.fused_logprobs import fused_logprobs
from chatgpt.functional.logprobs import chunked_logprobs
from chatgpt.nn import LlamaActor
from chatgpt.nn.compiled import compile_blocks
from chatgpt.nn.head_kernels import liger_logprobs

VOCAB = 151_936
"""vocabulary of Qwen 2"""
SIZES = {'cpu': ((896, 2048), (2048, 1024)), 'cuda': ((896, 8192), (2048, 8192))}
"""(width, tokens)"""
CASES = (
    ('plain, entropy with gradient', 'plain', True, True),
    ('plain', 'plain', True, 'detached'),
    ('fused', 'fused', True, 'detached'),
    ('liger', 'liger', True, 'detached'),
    ('plain, frozen head', 'plain', False, 'detached'),
    ('fused, frozen head', 'fused', False, 'detached'),
    ('liger, frozen head', 'liger', False, 'detached'),
)
"""name, kernel, trained head, entropy"""


def kernels() -> dict[str, Callable[..., Any]]:
    """Returns functions by name: (states, head, ids, with_entropy) → log-probs and entropy."""
    found: dict[str, Callable[..., Any]] = {
        'plain': lambda x, head, ids, e: chunked_logprobs(x, head, ids, with_entropy=e),
        'fused': lambda x, head, ids, e: fused_logprobs(x, head.weight, head.bias, ids, with_entropy=e),
    }
    if find_spec('liger_kernel') is not None:
        found['liger'] = lambda x, head, ids, e: liger_logprobs(x, head.weight, head.bias, ids, with_entropy=e)
    return found


def inputs(device: str, width: int, tokens: int, vocab: int, dtype: torch.dtype) -> tuple[Tensor, nn.Linear, Tensor]:
    generator = torch.Generator().manual_seed(0)
    head = nn.Linear(width, vocab, bias=False, device=device, dtype=dtype)
    with torch.no_grad():
        head.weight.copy_(torch.randn(vocab, width, generator=generator) * width**-0.5)
    states = torch.randn(tokens, width, generator=generator).to(device, dtype).requires_grad_()
    return states, head, torch.randint(vocab, (tokens,), generator=generator).to(device)


def once(kernel: Callable[..., Any], states: Tensor, head: nn.Linear, ids: Tensor, entropy: Any) -> Tensor:
    """Runs forward and backward; returns the log-probs."""
    weights = torch.linspace(-1, 1, len(ids), device=states.device)
    logprobs, found = kernel(states, head, ids, entropy)
    loss = (logprobs * weights).sum()
    if entropy is True:
        loss = loss - 0.0 * found.sum()
    loss.backward()
    return logprobs.detach()


def one_case(device: str, name: str, width: int, tokens: int, vocab: int = VOCAB) -> dict[str, Any]:
    """Measures seconds and bytes of a case in this process."""
    _, kernel, trained, entropy = next(c for c in CASES if c[0] == name)
    dtype = torch.float32 if device == 'cpu' else torch.bfloat16
    states, head, ids = inputs(device, width, tokens, vocab, dtype)
    head.requires_grad_(trained)
    run = kernels()[kernel]
    if device == 'cpu':
        forget_peak()  # creating the weight has a higher peak
        before = process_memory()['VmRSS']
        seconds = cpu_seconds(lambda: once(run, states, head, ids, entropy))
        peak = process_memory()['VmHWM'] - before
    else:
        seconds, peak = _on_cuda(lambda: once(run, states, head, ids, entropy), [states, head.weight])
    return {'case': name, 'width': width, 'tokens': tokens, 'seconds': round(seconds, 4), 'bytes': peak}


def _on_cuda(act: Callable[[], Any], leaves: list[Tensor], repeats: int = 3) -> tuple[float, int]:
    act()  # warm-up: kernels are compiled and selected
    times, peak = [], 0
    for _ in range(repeats):
        for leaf in leaves:
            leaf.grad = None
        gc.collect()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        times.append(wall_seconds(act, 'cuda'))
        peak = max(peak, torch.cuda.max_memory_allocated() - before)
    return min(times), peak


def compare(device: str, sizes: Any = None, vocab: int = VOCAB, apart: bool = False) -> dict[str, Any]:
    """Measures every kernel that runs here: seconds, bytes and largest difference from the plain path.

    apart: run each case in its own process.

    Returns:
        {'cases': [{case, width, tokens, seconds, bytes}], 'differences': {kernel: {logprobs, entropy, states' gradient,
        weight's gradient}}}; differences are relative to the largest value of the plain path, in fp32.
    """
    there = kernels()
    if device == 'cpu':
        there.pop('liger', None)
    cases = []
    for (width, tokens), (name, kernel, *_) in product(sizes or SIZES[device], CASES):
        if kernel in there:
            if apart:
                cases.append(child(__file__, '--case', name, str(width), str(tokens)))
                print(json.dumps(cases[-1]), flush=True)
            else:
                cases.append(one_case(device, name, width, tokens, vocab))
    return {'cases': cases, 'differences': {k: differences(device, k) for k in there if k != 'plain'}}


def differences(device: str, kernel: str, vocab: int = 5003) -> dict[str, float]:
    states, head, ids = inputs(device, 64, 700, vocab, torch.float32)
    found = []
    for name in ('plain', kernel):
        states.grad = head.weight.grad = None
        logprobs = once(kernels()[name], states, head, ids, 'detached')
        with torch.no_grad():
            entropy = kernels()[name](states, head, ids, 'detached')[1]
        found.append((logprobs, entropy, states.grad, head.weight.grad))
    names = ('logprobs', 'entropy', 'states gradient', 'weight gradient')
    return {
        name: float((a - b).abs().max() / a.abs().max())
        for name, a, b in zip(names, *found, strict=True)  # type: ignore[misc]
    }


def compare_blocks(
    device: str = 'cuda', *, layers: int = 4, width: int = 512, repeats: int = 5, backend: str = 'inductor'
) -> dict[str, Any]:
    """Measures a llama's forward and backward with compiled and plain blocks: seconds, seconds of the first call, and
    the relative difference of log-probs."""
    generator = torch.Generator().manual_seed(0)

    def batch(seed: int) -> Any:
        generator.manual_seed(seed)
        lengths = torch.randint(30, 90, (16,), generator=generator).tolist()
        records = [random_sequence(generator, 16, length, 500) for length in lengths]
        return collate(records).to(torch.device(device))

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512, hidden_size=width, intermediate_size=3 * width, num_hidden_layers=layers, num_attention_heads=8
    )
    plain = LlamaActor(config=config).to(device)
    compiled = deepcopy(plain)
    compile_blocks(compiled, backend=backend)
    batches = [batch(seed) for seed in range(repeats + 1)]

    def learned(model: Any, given: Any) -> Tensor:
        with torch.autocast(device, dtype=torch.bfloat16, enabled=device != 'cpu'):
            logprobs = model(given).logprobs
        logprobs.sum().backward()
        if device != 'cpu':
            torch.cuda.synchronize()
        return logprobs.detach()

    def seconds(model: Any, given: Any) -> tuple[float, Tensor]:
        logprobs, spent = timed(lambda: learned(model, given))
        return spent['cpu_s' if device == 'cpu' else 'wall_s'], logprobs

    first = timed(lambda: learned(compiled, batches[0]))[1]['wall_s']
    learned(plain, batches[0])
    pairs = [(seconds(plain, b), seconds(compiled, b)) for b in batches[1:]]
    return {
        'first_call_s': round(first, 2),
        'plain_s': min(a[0] for a, _ in pairs),
        'compiled_s': min(b[0] for _, b in pairs),
        'difference': max(float((a[1] - b[1]).abs().max() / a[1].abs().max()) for a, b in pairs),
    }


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument('--device', choices=('cpu', 'cuda'), default='cpu')
    parser.add_argument('--blocks', action='store_true', help='measure compiled blocks, not kernels of the head')
    parser.add_argument('--case', nargs=3, metavar=('NAME', 'WIDTH', 'TOKENS'), help='measure one case in this process')
    args = parser.parse_args()
    if args.device == 'cpu':
        torch.set_num_threads(1)
    result: Any
    if args.case:
        result = one_case(args.device, args.case[0], int(args.case[1]), int(args.case[2]))
    elif args.blocks:
        result = compare_blocks(args.device)
    else:
        result = compare(args.device, apart=args.device == 'cpu')
    print(json.dumps(result))


if __name__ == '__main__':
    main()
