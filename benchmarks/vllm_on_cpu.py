"""Tokens per CPU second of vLLM, `LocalEngine` and transformers' `generate` on the same model and prompts, and the cost of
the check that follows a transfer of weights to vLLM.

    .venv-vllm/bin/python benchmarks/vllm_on_cpu.py --model HuggingFaceTB/SmolLM2-135M-Instruct --page

In fp32, with one thread, sampled at temperature 1, every response of the same length. Times are CPU seconds of all
threads and ended children. Rounds alternate vLLM, local, generate, after one that is not counted; a row has the median.
Without --model, a Llama of 134 million parameters with random weights.
"""

from __future__ import annotations

import os
import statistics
import tempfile
from pathlib import Path
from typing import Any

import vllm

os.environ.setdefault('OMP_NUM_THREADS', '1')
os.environ.setdefault('VLLM_LOGGING_LEVEL', 'ERROR')

import torch
from harness import alternate, generate, markdown, script_parser, where, write_page
from transformers import AutoModelForCausalLM, LlamaConfig

from chatgpt.nn import Actor
from chatgpt.rollout import Call, LocalEngine, SamplingParams, VLLMEngine
from chatgpt.rollout.handshake import Handshake
from chatgpt.types import Prompt


def cpu_s() -> float:
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def timed(work: Any) -> tuple[float, Any]:
    start = cpu_s()
    found = work()
    return cpu_s() - start, found


def model_of(name: str | None) -> Any:
    if name is not None:
        return AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32).eval()
    torch.manual_seed(0)
    sizes = {'hidden_size': 576, 'intermediate_size': 1536, 'num_hidden_layers': 30, 'num_attention_heads': 9}
    config = LlamaConfig(**sizes, num_key_value_heads=3, vocab_size=49152, tie_word_embeddings=True)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


def measure(model: Any, *, batch: int, prompt: int, new: int, rounds: int) -> dict[str, Any]:
    """By way: tokens per CPU second and CPU seconds; and of the check."""
    actor = Actor(model.requires_grad_(False))
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(17, model.config.vocab_size, (batch, prompt), generator=generator)
    sampling = SamplingParams(max_new_tokens=new)
    folder = tempfile.TemporaryDirectory()
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder.name)
    options = {'dtype': 'float32', 'enforce_eager': True, 'max_model_len': 2 * (prompt + new)}
    engines = {'vLLM': VLLMEngine(folder.name, kv_cache_memory_bytes=1 << 30, **options), 'LocalEngine': LocalEngine()}

    def generated(engine: Any, seed: int) -> float:
        engine.begin(actor)
        engine.check_weights()
        prompts = [Prompt(ids=row) for row in ids]
        seconds, samples = timed(lambda: engine.generate(Call.of(prompts, sampling, seed=seed, indices=range(batch))))
        engine.end()
        assert sum(s.num_actions for s in samples) == batch * new
        return seconds

    def plain(seed: int) -> float:
        torch.manual_seed(seed)
        return timed(lambda: generate(model, ids, new, min_new_tokens=new))[0]

    ways = {name: lambda seed, e=engine: generated(e, seed) for name, engine in engines.items()} | {'generate': plain}
    times = alternate(ways, rounds)
    vllm, checks = engines['vLLM'], []
    for _ in range(5):
        of_actor, _ = timed(lambda: Handshake.of(actor, 'vLLM'))
        begun, _ = timed(lambda: vllm.begin(actor))
        of_engine, _ = timed(vllm.check_weights)
        vllm.end()
        checks.append((of_actor, of_engine, begun - of_actor))
    of_actor, of_engine, transfer = (statistics.median(part) for part in zip(*checks, strict=True))
    seconds = {name: statistics.median(found) for name, found in times.items()}
    return {
        'seconds': seconds,
        'tokens_per_s': {name: batch * new / s for name, s in seconds.items()},
        'actor': of_actor,
        'engine': of_engine,
        'transfer': transfer,
        'difference': vllm.difference,
    }


def main() -> None:
    parser = script_parser(__doc__, 'vllm.md')
    parser.add_argument('--model', help='folder or hub name')
    for name, default in (('batch', 32), ('prompt', 16), ('new', 48), ('rounds', 3)):
        parser.add_argument(f'--{name}', type=int, default=default)
    args = parser.parse_args()
    torch.set_num_threads(1)
    model = model_of(args.model)
    sizes = {name: getattr(args, name) for name in ('batch', 'prompt', 'new', 'rounds')}
    found = measure(model, **sizes)
    rows = ([n, f'{found["tokens_per_s"][n]:.0f}', f'{s:.1f}'] for n, s in found['seconds'].items())
    check, whole = found['actor'] + found['engine'], 64 * 128
    millions = sum(p.numel() for p in model.parameters()) / 1e6
    about = (
        f'{Path(args.model).name if args.model else "new weights"}, {millions:.0f} million parameters, '
        + ', '.join(f'{name} {value}' for name, value in sizes.items())
    )
    said = (
        f'{about}; vLLM {vllm.__version__}, {where()}. Check of the weights: {found["actor"]:.3f} (actor) + {found["engine"]:.3f} '
        f'(engine) CPU seconds, handing them over {found["transfer"]:.2f}; of the generating of this one batch '
        f'{check / found["seconds"]["vLLM"]:.1%}, of {whole:,} tokens {check * found["tokens_per_s"]["vLLM"] / whole:.2%}. '
        f'Log-probs of engine and actor differed by {found["difference"]:.1e}.'
    )
    measured = markdown(' | tokens per CPU second | CPU seconds'.split(' | '), rows) + '\n\n' + said
    print(measured)
    if args.page:
        write_page('vllm.md', measured=measured)


if __name__ == '__main__':
    main()
