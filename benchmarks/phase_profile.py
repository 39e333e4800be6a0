"""Profiles one phase of PPO on a real model: shares of time by kind of operation, in collecting and in learning.

    python benchmarks/phase_profile.py FOLDER PROMPTS      # prompts of additions.py --digits 3, a model after SFT on them
    python benchmarks/phase_profile.py --page

The phase is that of `learning_vs_trl.py` (64 responses of up to 16 tokens, train batches of 32, two epochs, value head
on the policy's trunk, reference model, fp32, one thread); it is the second of its run. Collecting includes scoring by
the policy, the value head and the reference. Times are self times of torch's profiler, which slows the phase down.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import harness
import torch
from torch.profiler import ProfilerActivity, profile

from chatgpt.nn import AutoActor
from chatgpt.strategies import NaiveStrategy
from chatgpt.types import Prompt

KINDS = {
    'matrix products': r'mm$|matmul|linear|gemm|mkldnn|onednn',
    'attention': r'attention',
    'softmax, log-probs and sampling': r'softmax|logsumexp|cumsum|sort|topk|argmax|searchsorted|exp|gather',
    'optimizer': r'adam|_foreach',
    'copies and indexing': r'copy|index|cat$|clone|fill|zero|scatter|select|empty|to$|contiguous',
}
"""kind -> pattern in an operation's name; the first that fits counts"""
REST = 'elementwise and others'


def kind_of(name: str) -> str:
    return next((kind for kind, pattern in KINDS.items() if re.search(pattern, name.lower())), REST)


def profiled(part: Callable[[], Any]) -> dict[str, float]:
    """Returns self CPU seconds by kind of operation."""
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        part()
    found: Counter[str] = Counter()
    for event in profiler.key_averages():
        found[kind_of(event.key)] += event.self_cpu_time_total / 1e6
    return dict(found)


def measure(folder: str, prompts: Path) -> dict[str, Any]:
    from transformers import AutoTokenizer

    torch.set_num_threads(1)
    words = AutoTokenizer.from_pretrained(folder)
    given = []
    for row in map(json.loads, prompts.read_text().splitlines()):
        ids = words.apply_chat_template(row['prompt'], add_generation_prompt=True, return_dict=False)
        given.append(Prompt(ids=torch.tensor(ids)))
    with NaiveStrategy(seed=0, device='cpu') as strategy:
        actor = AutoActor(pretrained=folder, value_head=True)
        trainer = harness.ppo_trainer(
            strategy,
            actor,
            None,
            lambda prompts, responses: [float(len(response) % 7) for response in responses],
            deepcopy(actor),
            optimizer=partial(torch.optim.AdamW, lr=1e-5, fused=True),
            tokenizer=words,
            experience_batch_size=64,
            train_batch_size=32,
            max_epochs=2,
            max_new_tokens=16,
            kl_coef=0.05,
        )
        trainer.set_prompts(given)
        trainer.collect(1)
        trainer.learn()
        return {'collecting': profiled(lambda: trainer.collect(1)), 'learning': profiled(trainer.learn)}


def table(found: dict[str, dict[str, float]]) -> str:
    shares = {part: {kind: s / sum(times.values()) for kind, s in times.items()} for part, times in found.items()}
    rows = [[kind, *(f'{part.get(kind, 0.0):.0%}' for part in shares.values())] for kind in (*KINDS, REST)]
    return harness.markdown(['operations', *found], rows)


def main() -> None:
    parser = harness.script_parser(__doc__, page='learning_vs_trl.md')
    parser.add_argument('folder', nargs='?')
    parser.add_argument('prompts', nargs='?', type=Path)
    args = parser.parse_args()
    results = harness.Results('phase_profile.json')
    if not args.page:
        if args.prompts is None:
            parser.error('give a model and its prompts')
        results.measure('additions', lambda: measure(args.folder, args.prompts))
    harness.write_page('learning_vs_trl.md', profile=table(results['additions']))


if __name__ == '__main__':
    main()
