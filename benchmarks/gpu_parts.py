"""The parts of gpu_check.py, and the process that runs them one after another, so that torch is imported once.

A part is a function of a `Note`, which holds the device and records numbers. The process prints {"ready": {...}} and
answers each line of JSON, {"function", "options", "out", "seconds"}, with {"status": "passed" | "left out" | "failed",
"reason", "held"}. Numbers go to `out`, other output to stderr. Weights are random and drawn on the device.
"""

from __future__ import annotations

import gc
import json
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import capacity as sweeps
import decode as decoding
import dummy
import gpu_steps
import ladders
import logprobs
import torch
import vs_peers
import which_gpu
from arithmetic_done import matmul_peak
from harness import GIB, ROOT, generate, machine, script_parser, wall_seconds, write_json
from random_models import empty_model, fill, random_model
from transformers import Qwen2Config, Qwen3Config
from work import Case, Line

from chatgpt.nn import Actor
from chatgpt.nn.compiled import has_compiler
from chatgpt.nn.quantized import quantize_blocks
from chatgpt.nn.shared import SharedTrunk
from chatgpt.nn.trunk import recompute_activations
from chatgpt.plan import make_plan, show_bytes
from chatgpt.rollout import Call, LocalEngine, SamplingParams
from chatgpt.strategies import NaiveStrategy
from chatgpt.types import Prompt

HERE = ROOT / 'benchmarks'
HOPELESS = 1.1
"""rungs planned at more than this many times a cap are not tried"""
SPARE = GIB
"""bytes of a card reserved for memory outside torch's allocator"""


class LeftOut(Exception):
    """Raised by a part that the machine cannot hold or has no package for."""


class Note:
    """The device of a part, and the file of its numbers."""

    def __init__(self, device: Any, out: Path, seconds: float) -> None:
        self.device, self.out = device, out
        self._end = time.monotonic() + seconds
        self.content: dict[str, Any] = {}

    def left(self) -> float:
        """Returns the seconds left before the part is stopped."""
        return self._end - time.monotonic()

    def write(self, **entries: Any) -> None:
        """Adds entries and writes the file."""
        self.content |= entries
        write_json(self.out, self.content)

    @property
    def card(self) -> int | None:
        """Returns the bytes of the device; None on a CPU."""
        on_cuda = self.device.type == 'cuda'
        return torch.cuda.get_device_properties(self.device).total_memory if on_cuda else None


def config_of(model: str, positions: int) -> Any:
    """Returns the config of `gpt2` (124 million), a `qwen2` of 0.5, 1.5 or 7 billion, `qwen3-0.6b` or a tiny model."""
    if model == 'gpt2':
        return ladders.config('gpt', 's', positions)
    if model == 'tiny-gpt2':
        return ladders.config('gpt', 'tiny', positions)
    if model == 'tiny-qwen2':
        small = {'hidden_size': 64, 'intermediate_size': 128, 'num_hidden_layers': 2, 'num_attention_heads': 4}
        return Qwen2Config(**small, num_key_value_heads=2, vocab_size=256, max_position_embeddings=positions)
    if model == 'qwen3-0.6b':
        sizes = {'hidden_size': 1024, 'intermediate_size': 3072, 'num_hidden_layers': 28, 'num_attention_heads': 16}
        more = {'num_key_value_heads': 8, 'head_dim': 128, 'vocab_size': 151936, 'tie_word_embeddings': True}
        return Qwen3Config(**sizes, **more, max_position_embeddings=max(positions, 32768))
    return which_gpu.config_of(model.removeprefix('qwen2-').upper())


# ---------------------------------------------------------------------- the device


def device(note: Note) -> None:
    """Measures the speed of matrix products and copies."""
    on_cuda = note.device.type == 'cuda'
    note.write(cuda=torch.version.cuda, tf32=torch.backends.cuda.matmul.allow_tf32, matmul_tflops={})
    for dtype in (torch.bfloat16, torch.float32, *((torch.float16,) if on_cuda else ())):
        note.content['matmul_tflops'][str(dtype).removeprefix('torch.')] = matmul_peak(note.device, dtype) / 1e12
        note.write()
    size = GIB if on_cuda and (note.card or 0) > 4 * GIB else 2**26
    host, there = torch.ones(size // 4), torch.empty(size // 4, device=note.device)
    if on_cuda:
        host = host.pin_memory()
    copied = torch.empty_like(there)

    def rate(act: Callable[[], Any]) -> float:
        return max(size / wall_seconds(act, note.device) / 1e9 for _ in range(3))

    note.write(
        host_to_device_gb_per_s=rate(lambda: there.copy_(host)),
        device_copy_gb_per_s=2 * rate(lambda: copied.copy_(there)),
    )


def tests(note: Note, *, workers: int, files: Sequence[str] = ()) -> None:
    """Runs the tests marked `gpu`, by gpu_tests.py."""
    chosen = ['--files', *files] if files else []
    code = subprocess.call([sys.executable, HERE / 'gpu_tests.py', note.out, f'--workers={workers}', *chosen])
    note.content = json.loads(note.out.read_text()) if note.out.exists() else {}
    if code or (note.card and not note.content['passed']):
        raise RuntimeError(f'exit code {code}' if code else 'no marked test ran on the device')


# ---------------------------------------------------------------------- generating


def decode(note: Note, *, model: str, batch: int, prompt: int, new: int, precision: str = 'bf16') -> None:
    """Measures new tokens per second of the local engine, `begin` included, and of `model.generate` on the same
    modules, with and without cuDNN's attention. No response ends early."""
    config = config_of(model, prompt + new)
    dtype = {'fp32': torch.float32, 'bf16': torch.bfloat16}[precision]
    policy = random_model('AutoModelForCausalLM', config, place=note.device, draw=note.device, dtype=dtype)
    policy.generation_config.eos_token_id = None
    parameters = sum(p.numel() for p in policy.parameters())
    note.write(model=model, parameters=parameters, precision=precision, batch=batch, prompt=prompt, new=new)
    prompts = torch.randint(3, config.vocab_size, (batch, prompt), generator=torch.Generator().manual_seed(0))
    _local_engine(note, policy, prompts, new)
    if note.device.type == 'cuda':
        torch.cuda.empty_cache()
    _generate(note, policy, prompts.to(note.device), new)


def _rate(tokens: int, duration: float) -> dict[str, float]:
    return {'tokens_per_s': tokens / duration, 'seconds': duration}


def _local_engine(note: Note, policy: Any, ids: Any, new: int, rounds: int = 5) -> None:
    """Measures a first phase, with the check of the model and graph capture, and later ones. The rate is the median
    from the third on: an engine keeps its graphs from the second, when it knows the memory that learning leaves."""
    prompts, engine, actor = [Prompt(ids=row) for row in ids], LocalEngine(), Actor(policy)
    tokens, sampling, took = len(ids) * new, SamplingParams(max_new_tokens=new), {'begin_s': 0.0}

    def phase(number: int) -> None:
        start = time.perf_counter()
        engine.begin(actor)
        took['begin_s'] = time.perf_counter() - start
        first = number * len(ids)
        samples = engine.generate(Call.of(prompts, sampling, seed=0, indices=range(first, first + len(ids))))
        engine.end()
        if sum(s.num_actions for s in samples) != tokens:
            raise RuntimeError(f'other than {tokens} tokens came')

    spent: list[float] = []
    for number in range(rounds):
        spent.append(wall_seconds(lambda n=number: phase(n), note.device))  # type: ignore[misc]
        note.write(first_phase=_rate(tokens, spent[0]), phases_s=spent)
        note.write(engine=_rate(tokens, statistics.median(spent[2:] or spent[-1:])) | took | {'rounds': len(spent)})
        if spent[-1] > note.left() / 4:  # `model.generate` needs more
            break


def _generate(note: Note, policy: Any, ids: Any, new: int) -> None:
    """Measures `model.generate`, first for a few tokens, so that there is a number if time runs out."""

    def rate(tokens: int) -> dict[str, float]:
        def act() -> None:
            found = generate(policy, ids, tokens)
            if found.shape != (len(ids), ids.shape[1] + tokens):
                raise RuntimeError(f'model.generate gave {tuple(found.shape)}')

        return _rate(len(ids) * tokens, wall_seconds(act, note.device))

    few, found = max(1, new // 8), {}
    kinds = {'with cuDNN': True, 'without cuDNN': False} if note.device.type == 'cuda' else {'without cuDNN': False}
    for tokens in (few, new):
        for name, enabled in kinds.items():
            with decoding.cudnn_attention(enabled):
                if tokens == few:
                    rate(2)  # warm-up
                if tokens == new and found[name]['seconds'] * new / few > note.left():
                    found[name]['reason'] = f'there was no time for {new} tokens'
                else:
                    found[name] = rate(tokens) | {'new': tokens}
            times = {n: note.content['engine']['tokens_per_s'] / f['tokens_per_s'] for n, f in found.items()}
            note.write(generate=found, times=times)


def decode_vllm(note: Note, *, models: Sequence[str], batch: int, prompt: int, new: int) -> None:
    """Measures new tokens per second of vLLM with dummy weights."""
    from vllm import LLM, SamplingParams

    sampling = SamplingParams(temperature=1.0, max_tokens=new, ignore_eos=True, detokenize=False)
    for model in models:
        config = config_of(model, prompt + new)
        drawn = torch.randint(3, config.vocab_size, (batch, prompt), generator=torch.Generator().manual_seed(0))
        given = [{'prompt_token_ids': row} for row in drawn.tolist()]
        with tempfile.TemporaryDirectory() as folder:
            config.architectures = ['Qwen2ForCausalLM' if 'qwen2' in model else 'GPT2LMHeadModel']
            config.save_pretrained(folder)
            start = time.perf_counter()
            llm = LLM(
                folder,
                load_format='dummy',
                skip_tokenizer_init=True,
                dtype='bfloat16',
                max_model_len=prompt + new,
                gpu_memory_utilization=0.5,
            )
            note.write(**{model: {'start_s': time.perf_counter() - start}})
        llm.generate(given, sampling, use_tqdm=False)
        duration = wall_seconds(lambda llm=llm, given=given: llm.generate(given, sampling, use_tqdm=False), note.device)  # type: ignore[misc]
        note.content[model] |= {'tokens_per_s': batch * new / duration, 'seconds': duration}
        note.write()
        del llm


def decode_ways(note: Note, *, model: str, **settings: Any) -> None:
    """Compares the engine's attention kernels and decoding modes, by `decode.py`."""
    config = config_of(model, settings['prompt'] + settings['new'])
    note.write(model=model, **decoding.measure_decode(str(note.device), config=config, left_s=note.left, **settings))


# ---------------------------------------------------------------------- inside a step


def kernels(note: Note, *, model: str, batch: int = 0, prompt: int = 64, new: int = 64, **sizes: Any) -> None:
    """Counts the kernels of a learning micro-batch and, with a `batch`, of a decode step, by gpu_steps.py."""
    config, settings = (
        config_of(model, max(prompt + new, sizes['tokens'])),
        {'precision': 'bf16', 'recompute': False} | sizes,
    )
    note.write(model=model, learn=gpu_steps.learning(note, config, **settings))
    if batch:
        sizes = {'batch': batch, 'prompt': prompt, 'new': new, 'precision': settings['precision']}
        note.write(decode=gpu_steps.decode_step(note, config, **sizes))


def sampler(note: Note, **settings: Any) -> None:
    """Measures a draw of the sampler, by gpu_steps.py."""
    gpu_steps.sampler(note, **settings)


def step(note: Note, *, model: str, precision: str = 'bf16', **sizes: Any) -> None:
    """Measures PPO steps, by gpu_steps.py."""
    note.write(model=model)
    gpu_steps.ppo_step(note, config_of(model, sizes['prompt'] + sizes['new']), precision=precision, **sizes)


# ---------------------------------------------------------------------- learning


def head(note: Note, *, sizes: Sequence[tuple[int, int]], vocab: int) -> None:
    """Measures log-probs through a large output layer by every kernel, by `logprobs.py`."""
    note.write(**logprobs.compare(note.device.type, sizes, vocab))


def blocks(note: Note, **settings: Any) -> None:
    """Compares compiled and plain transformer blocks, by `logprobs.py`."""
    if not has_compiler():
        raise LeftOut('torch.compile needs a C++ compiler (g++ or clang++, or CXX)')
    note.write(**logprobs.compare_blocks(note.device.type, **settings))


# ---------------------------------------------------------------------- PPO


def ppo(note: Note, *, rungs: Sequence[str], ladder: str = 'gpt', **settings: Any) -> None:
    """Runs dummy.py on the first rung that fits this card by the plan: seconds, FLOP and share of the matrix product's
    speed for collect, score and learn; measured and planned peak memory."""
    s, on_cuda, too_large = dummy.DummyRun(**settings), note.device.type == 'cuda', {}
    for rung in rungs:
        peak = dummy.plan_for(s, ladders.config(ladder, rung, s.max_length), 1, on_cuda).peak
        if note.card is None or peak + SPARE <= note.card:
            break
        too_large[rung] = peak
    else:
        needs = ', '.join(f'{rung} needs {show_bytes(peak)}' for rung, peak in too_large.items())
        raise LeftOut(f'the card has {show_bytes(note.card or 0)}, and by the plan {needs}')
    note.write(rung=rung, too_large_by_plan=too_large)
    note.write(**dummy.run(s, ladder, rung, report=lambda phases: note.write(phases=phases)))


# ---------------------------------------------------------------------- memory


@contextmanager
def capped(note: Note, memory: int) -> Iterator[None]:
    """Limits torch's allocator to this many bytes and reports them as the device's memory; no cap on a CPU."""
    if note.card is None:
        yield
        return
    if memory > note.card:
        raise LeftOut(f'the cap of {memory / GIB:g} GiB is more than the card has')
    kept = torch.cuda.mem_get_info
    sweeps.cap_allocator(memory, note.device)
    try:
        yield
    finally:
        torch.cuda.mem_get_info = kept
        torch.cuda.set_per_process_memory_fraction(1.0, note.device)


def trunk(
    note: Note,
    *,
    model: str,
    memory: int,
    prompt: int,
    new: int,
    sequences: int = 8,
    precision: str = 'bf16',
    lora_rank: int = 16,
) -> None:
    """Runs a phase of PPO with actor, critic, reward model and reference on one 4-bit trunk, under a cap: measured and
    planned peaks of load, collect, score and learn. Weights are made and quantized block by block on the device."""
    config = config_of(model, prompt + new)
    options = {'precision': precision, 'on_cuda': note.device.type == 'cuda', 'lora_rank': lora_rank}
    sizes = {'train_batch_size': sequences, 'experience_batch_size': sequences}
    plan = make_plan(which_gpu.setup_of(config, prompt + new, **options, **sizes))
    planned = which_gpu.planned(plan)
    note.write(
        model=model, cap=memory, prompt=prompt, new=new, sequences=sequences, planned=planned, planned_peak=plan.peak
    )
    peaks: dict[str, int] = {}
    begun = time.perf_counter()

    def end_of(phase: str) -> None:
        nonlocal begun
        now = time.perf_counter()
        if note.device.type == 'cuda':
            peaks[phase] = max(peaks.get(phase, 0), torch.cuda.max_memory_allocated(note.device))
            torch.cuda.reset_peak_memory_stats(note.device)
        spent = note.content.setdefault('seconds', {})
        spent[phase] = spent.get(phase, 0.0) + now - begun
        begun = time.perf_counter()
        ratios = {p: planned[p] / size for p, size in peaks.items() if p in planned and size}
        note.write(peaks=peaks, planned_over_measured=ratios, peak=max(peaks.values(), default=None))

    with capped(note, memory):
        if note.device.type == 'cuda':
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(note.device)
        try:
            strategy = NaiveStrategy(seed=0, precision=precision, device=note.device)  # type: ignore[arg-type]
            dtype = strategy.numerics.dtype
            shared = SharedTrunk(quantized_model(config, dtype, note.device), dtype=dtype)
            recompute_activations(shared.model)
            which_gpu.trunk_phases(shared, strategy, config, end_of, sequences, prompt, new, rank=lora_rank)
        except torch.OutOfMemoryError:
            note.write(
                out_of_memory_after=list(note.content.get('seconds', ())), allocated_then=torch.cuda.memory_allocated()
            )
            raise


def quantized_model(config: Any, dtype: Any, place: Any) -> Any:
    """Returns a causal LM of random weights with 4-bit blocks; at most one block is dense at a time."""
    model = empty_model('AutoModelForCausalLM', config, dtype)
    for number, block in enumerate(model.model.layers):
        fill(block, model, place, place)
        quantize_blocks(block, str(number), dtype)
    fill(model, model, place, place)
    return model.eval()


def capacity(
    note: Note,
    *,
    caps: Sequence[int],
    options: Sequence[str],
    ladder: str = 'gpt',
    batch_size: int = 8,
    prompt_length: int = 400,
    max_length: int = 512,
) -> None:
    """Finds the largest rung of a ladder that trains under each cap, from the planned one on, in this process."""
    base = sweeps.one_phase('auto', batch_size, prompt_length, max_length)
    rows: list[dict[str, Any]] = []
    note.write(ladder=ladder, settings=vars(base), rows=rows)

    class Sweep(sweeps.Sweep):
        def measure(self, settings: Any, rung: str) -> dict[str, Any]:
            try:
                with capped(note, self.cap.memory):
                    result = dummy.run(settings, self.ladder, rung, ready=lambda strategy: None)
            except LeftOut:
                raise
            except Exception as error:
                outcome: dict[str, Any] = sweeps.outcome_of(error, on_cuda)
                error.__traceback__ = None  # the traceback keeps the models alive
                gc.collect()
                return outcome
            kept = {'parameters': result['parameters'], 'seconds': result['wall_s']}
            return {'trained': True, 'limit': None, 'peak': result['memory']['peak'], **kept}

    on_cuda = note.device.type == 'cuda'
    longest = 0.0
    for memory, option in product(caps, options):
        row: dict[str, Any] = {'cap': memory, 'strategy': 'naive', 'option': option, 'tried': {}}
        rows.append(row)
        begun = time.perf_counter()
        try:
            if longest > note.left():
                raise LeftOut('no time was left')
            found = Sweep(base, ladder, sweeps.Cap(memory, None, on_cuda, HOPELESS, note.left())).row('naive', option)
            row |= vars(found) | {'disagreements': found.disagreements()}
        except LeftOut as reason:
            row['left_out'] = str(reason)
        note.write()
        longest = max(longest, time.perf_counter() - begun)


# ---------------------------------------------------------------------- other systems


def peer(
    note: Note,
    *,
    peer: str,
    wheels: str,
    lengths: Sequence[str],
    precision: str,
    rung: str,
    sequences: int,
    prompt: int,
    new: int,
    rounds: int = 2,
) -> None:
    """Alternates a PPO update of TRL, installed from --wheels, and of this library on the same work."""
    width, layers, heads = ladders.GPT[rung]
    vocab = ladders.TINY_VOCAB if rung == 'tiny' else ladders.GPT_VOCAB
    with tempfile.TemporaryDirectory(prefix='gpu-check-peer-') as folder:
        work = Path(folder)
        site = vs_peers.site_of(peer, Path(wheels), work, note.left())
        note.write(rung=rung, sequences=sequences, prompt=prompt, new=new, precision=precision, cases={})
        took = 0.0
        for kind in lengths:
            if took > note.left():
                note.write(no_time_for=kind)
                break
            begun = time.perf_counter()
            sizes = {'sequences': sequences, 'prompt_tokens': prompt, 'new_tokens': new, 'vocab': vocab}
            case = Case(peer, 'ppo', kind, precision, device=note.device.type, **sizes)
            model = vs_peers.save_model(work, kind, layers=layers, width=width, heads=heads, like=case)
            if note.device.type == 'cuda':
                torch.cuda.empty_cache()  # the two sides run in other processes
            sides = [[sys.executable, str(HERE / 'peers' / name)] for name in ('ours.py', f'{peer}.py')]

            def report(rounds: Any, kind: str = kind) -> None:
                note.content['cases'][kind] = vs_peers.summary(rounds)
                note.write()

            case = replace(case, model=model)
            logs = note.out.parent / f'{peer}-{kind}'
            found = vs_peers.compare(case, *sides, rounds=rounds, logs=logs, site=site, report=report)
            note.write(about=found['about'])
            took = time.perf_counter() - begun


PARTS = (
    device, tests, decode, decode_ways, decode_vllm, kernels, sampler, step, head, blocks, ppo, trunk, capacity, peer
)  # fmt: skip
FUNCTIONS: dict[str, Callable[..., None]] = {part.__name__: part for part in PARTS}  # type: ignore[attr-defined]


# ---------------------------------------------------------------------- the process


@contextmanager
def watched(note: Note) -> Iterator[None]:
    """Records in `watched` what a part falls back to in silence: warnings, the forms of attention of local engines, and
    captures of CUDA graphs with their milliseconds, and how many were given up."""
    seen: dict[str, Any] = {'warnings': [], 'attention': [], 'captures': 0, 'given_up': 0, 'capture_ms': 0.0}
    end, graph = LocalEngine.end, torch.cuda.graph

    def ended(engine: Any) -> None:
        if engine.attention_form not in seen['attention']:
            seen['attention'].append(engine.attention_form)
        end(engine)

    @contextmanager
    def captured(*args: Any, **settings: Any) -> Iterator[None]:
        begun, what = time.perf_counter(), 'given_up'
        try:
            with graph(*args, **settings):
                yield
            what = 'captures'
        finally:
            seen[what] += 1
            seen['capture_ms'] += 1e3 * (time.perf_counter() - begun)

    with (
        patch.object(LocalEngine, 'end', ended),
        patch.object(torch.cuda, 'graph', captured),
        warnings.catch_warnings(record=True) as caught,
    ):
        warnings.simplefilter('default')
        try:
            yield
        finally:
            seen['warnings'] = sorted(
                {f'{w.category.__name__}: {" ".join(str(w.message).split())}'[:300] for w in caught}
            )
            print(*seen['warnings'], sep='\n', file=sys.stderr)
            note.write(watched=seen)


def do(task: dict[str, Any], place: Any) -> dict[str, Any]:
    """Runs one part and frees its memory."""
    note = Note(place, Path(task['out']), task['seconds'])
    try:
        with watched(note):
            FUNCTIONS[task['function']](note, **task['options'])
        answer: dict[str, Any] = {'status': 'passed'}
    except LeftOut as reason:
        answer = {'status': 'left out', 'reason': str(reason)}
    except Exception as error:
        traceback.print_exc()
        lacks = isinstance(error, ImportError) and 'nvcc' in str(error)  # ColossalAI compiles an optimizer
        answer = {
            'status': 'left out' if lacks else 'failed',
            'reason': f'{type(error).__name__}: {" ".join(str(error).split())}'[:300],
        }
    gc.collect()
    answer['held'] = 0
    if place.type == 'cuda':
        torch.cuda.empty_cache()
        answer['held'] = torch.cuda.memory_allocated(place)
    return answer


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument('--device', choices=('cuda', 'cpu'), required=True)
    args = parser.parse_args()
    line = Line()
    import chatgpt.trainer  # noqa: F401

    if args.device == 'cuda' and not torch.cuda.is_available():
        line.send({'ready': None})
        return
    place = torch.device('cuda:0' if args.device == 'cuda' else 'cpu')
    line.ready(**machine(place))
    for task in sys.stdin:
        line.send(do(json.loads(task), place))


if __name__ == '__main__':
    main()
