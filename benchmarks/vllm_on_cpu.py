"""Tokens per CPU second of vLLM, `LocalEngine` and transformers' `generate` on a chat model, and the cost of the check
after a transfer of weights to vLLM.

    .venv-vllm/bin/python benchmarks/vllm_on_cpu.py --model HuggingFaceTB/SmolLM2-135M-Instruct --page

In fp32, with one thread, sampled at temperature 1: additions with responses of 32 tokens each ('fixed'), and sentences
of at most 96 tokens ('varying'); 16 and 64 rows. Times are CPU seconds of all threads and ended children. Rounds
alternate the three after a warm-up round; a cell has the median. "products" is the share of LocalEngine's time spent in
matrix products, at the number of rows of each step.
"""

from __future__ import annotations

import os
import random
import statistics
import tempfile
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import vllm

os.environ.setdefault('OMP_NUM_THREADS', '1')
os.environ.setdefault('VLLM_LOGGING_LEVEL', 'ERROR')

import torch
from harness import alternate, generate, least_median_greatest, markdown, ratios, script_parser, where, write_page
from transformers import AutoModelForCausalLM, AutoTokenizer

from chatgpt.nn import Actor
from chatgpt.rollout import Call, LocalEngine, SamplingParams, VLLMEngine
from chatgpt.rollout.handshake import Handshake
from chatgpt.rollout.hf import padded
from chatgpt.rollout.local.cpu_speed import PackedModules
from chatgpt.types import Prompt


def cpu_s() -> float:
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def timed(work: Any) -> tuple[float, Any]:
    start = cpu_s()
    found = work()
    return cpu_s() - start, found


NOUNS = (
    'cat dog horse house river tree bridge train boat ship road garden kitchen window door chair table lamp book pen '
    'letter song piano violin drum school teacher doctor farmer baker king queen castle forest desert island beach '
    'mountain valley storm cloud star moon planet rocket robot clock watch mirror bottle cup plate knife spoon apple '
    'bread cheese egg soup cake candle rope bell'
).split()
NEW_TOKENS = {'fixed': 32, 'varying': 96}


def questions(tokenizer: Any, lengths: str, rows: int) -> list[Prompt]:
    """Returns chats with a question each."""
    numbers = random.Random(0)
    asked = [f'Write one short sentence about a {noun}.' for noun in NOUNS[:rows]]
    if lengths == 'fixed':
        asked = [f'What is {numbers.randint(100, 999)} + {numbers.randint(100, 999)}?' for _ in range(rows)]
    chats = [[{'role': 'user', 'content': text}] for text in asked]
    options = {'add_generation_prompt': True, 'return_dict': False}
    return [Prompt(ids=torch.tensor(tokenizer.apply_chat_template(chat, **options))) for chat in chats]


def rate(model: Any, prompts: list[Prompt], sampling: SamplingParams, seed: int) -> float:
    """Returns the tokens per CPU second of `generate`, without those after an end token."""
    end = sampling.eos_token_ids
    ids, mask = padded([p.ids for p in prompts], 0, on_left=True)
    settings = {'min_new_tokens': 0 if end else sampling.max_new_tokens, 'eos_token_id': list(end) or None}
    torch.manual_seed(seed)
    seconds, found = timed(lambda: generate(model, ids, sampling.max_new_tokens, mask=mask, **settings))
    new = found[:, ids.shape[1] :]
    ended = torch.isin(new, torch.tensor(end)).cumsum(1) if end else torch.zeros_like(new)
    counted = (ended == 0).sum() + (ended[:, -1] > 0).sum()
    return float(counted) / seconds


def products_s(actor: Actor, rows: int) -> float:
    """Returns the CPU seconds of a step's matrix products for `rows` rows, with the engine's packed weights."""
    packed = PackedModules(actor)
    states = {m: torch.randn(rows, m.in_features) for m in actor.modules() if type(m) is torch.nn.Linear}

    def step() -> None:
        for module, state in states.items():
            module(state)

    with packed.active(), torch.inference_mode():
        step()
        return statistics.median(timed(step)[0] for _ in range(5))


def measure(name: str, rounds: int) -> tuple[list[list[object]], dict[str, float]]:
    """Returns rows of the table, and the seconds of the check."""
    tokenizer = AutoTokenizer.from_pretrained(name)
    model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32).eval()
    actor = Actor(model.requires_grad_(False))
    folder = tempfile.TemporaryDirectory()
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder.name)
    options = {'dtype': 'float32', 'enforce_eager': True, 'max_model_len': 256}
    vllm_engine = VLLMEngine(folder.name, kv_cache_memory_bytes=1 << 30, **options)
    local = LocalEngine()
    table: list[list[object]] = []
    for lengths, rows in product(NEW_TOKENS, (16, 64)):
        prompts = questions(tokenizer, lengths, rows)
        end = () if lengths == 'fixed' else (tokenizer.eos_token_id,)
        sampling = SamplingParams(max_new_tokens=NEW_TOKENS[lengths], eos_token_ids=end)
        steps: list[tuple[float, list[int]]] = []

        def drawn(
            engine: Any, seed: int, prompts: Any = prompts, sampling: Any = sampling, steps: Any = steps
        ) -> float:
            engine.begin(actor)
            engine.check_weights()
            call = Call.of(prompts, sampling, seed=seed, indices=range(len(prompts)))
            seconds, samples = timed(lambda: engine.generate(call))
            engine.end()
            if engine is local:
                steps.append((seconds, [s.num_actions for s in samples]))
            return sum(s.num_actions for s in samples) / seconds

        ways: dict[str, Any] = {
            'vLLM': partial(drawn, vllm_engine),
            'local': partial(drawn, local),
            'generate': partial(rate, model, prompts, sampling),
        }
        rates = alternate(ways, rounds)
        seconds, counts = steps[-1]
        bare = sum(products_s(actor, sum(n > i for n in counts)) for i in range(max(counts)))
        cells = [f'{statistics.median(rates[way]):.0f}' for way in ways]
        table.append([lengths, rows, f'{statistics.mean(counts):.0f}', *cells])
        table[-1] += [least_median_greatest(ratios(rates['local'], rates[way])) for way in ('generate', 'vLLM')]
        table[-1].append(f'{bare / seconds:.2f}')
        print(table[-1], flush=True)
    checks = []
    for _ in range(5):
        of_actor, _ = timed(lambda: Handshake.of(actor, 'vLLM'))
        begun, _ = timed(lambda: vllm_engine.begin(actor))
        of_engine, _ = timed(vllm_engine.check_weights)
        vllm_engine.end()
        checks.append((of_actor, of_engine, begun - of_actor))
    found = dict(zip(('actor', 'engine', 'transfer'), map(statistics.median, zip(*checks, strict=True)), strict=True))
    return table, found | {'difference': vllm_engine.difference}


def main() -> None:
    parser = script_parser(__doc__, 'vllm.md')
    parser.add_argument('--model', default='HuggingFaceTB/SmolLM2-135M-Instruct', help='folder or hub name')
    parser.add_argument('--rounds', type=int, default=3)
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows, check = measure(args.model, args.rounds)
    head = ['lengths', 'rows', 'mean length', 'vLLM', 'LocalEngine', 'generate']
    head += ['local / generate: least median greatest', 'local / vLLM', 'products']
    note = (
        f'{Path(args.model).name}, tokens per CPU second; vLLM {vllm.__version__}, {where()}. Check of the weights: '
        f'{check["actor"]:.3f} (actor) + {check["engine"]:.3f} (engine) CPU seconds, handing them over '
        f'{check["transfer"]:.2f}. Log-probs of engine and actor differed by {check["difference"]:.1e}.'
    )
    measured = f'{markdown(head, rows)}\n\n{note}'
    print(measured)
    if args.page:
        write_page('vllm.md', measured=measured)


if __name__ == '__main__':
    main()
