"""The page of seventy_b.py."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

INTRO = """\
# 70 billion parameters on cards of 80 GiB

`python benchmarks/seventy_b.py --page docs/results/seventy_b.md`

**By the planner. Nothing of this ran on a GPU, and no weights of 70 billion parameters were loaded.** The model has the shape of Llama 3 70B (80 layers,
width 8192, 64 heads with 8 of keys and values, 128256 tokens; a config, no download). Machines have eight GPUs of 80 GiB, of which 5 % are kept free, and
2 TiB of host memory. All compute in bf16 with gradient checkpointing, {sequences} sequences in a phase and in a train batch, one in a forward of a rank, half of a
sequence prompt and half response. PPO has a critic, a reward model and a reference, GRPO a reference and a function that rewards, in groups of eight; with LoRA (rank 16)
the reference is the actor without its adapters. "TP 8" is `--tensor_parallel 8`, "idle" `--offload idle`, "cpu_offload" `--strategy fsdp_cpu`, "streamed" its
generation block by block (`stream_blocks`, which is automatic where the copy does not fit).

FSDP2 keeps shards in fp32, frozen models too: 263 GiB for each model, and 1052 GiB for one that learns with all its weights, before anything is computed. So:

- **Eight GPUs do not train PPO with all weights**, in no layout: four models, two of which learn, are 2.6 TiB. Sixteen do, with all of it in the memory of two hosts.
- **PPO with LoRA** is three models, 98 GiB on each of eight GPUs: in host memory there, and on the devices of sixteen.
- **GRPO with LoRA** is one model, and the one that eight GPUs train and generate with on their own, with TP 8.
- **GRPO with all weights** needs host memory, or sixteen GPUs with TP 8 whose reference waits in it, for short sequences.
- Tensor parallelism takes little from weights and states, which FSDP2 cuts as finely. It takes the copy that generates (132 GiB to 16.5 GiB), gathered blocks, and whole ranks' worth of activations.
"""
COMMANDS = """\
## Where the responses come from

*Here*: each rank generates with a copy of its own in bf16, 132 GiB whole, so never on one of these cards; of it 1/8 on each with TP 8. cpu_offload streams it
from host memory, two blocks at a time, so every token of a batch moves 132 GiB over the bus: it fits, and it is slow. *Elsewhere*: vLLM on Ray, on other GPUs, with a
model cut over four of them (33 GiB of weights on each; vLLM's own cache takes the rest of `memory_share`).

| machine | GPUs | hold |
|---|---|---|
| node0 | 0 to 7 | training: one rank of eight processes (`--tensor_parallel 8`), or two of four |
| node0 | host | whole weights in bf16 in one file that all processes map (TMPDIR), and their copy in Ray's object store |
| node1 | 0 to 3, 4 to 7 | two vLLM workers, four GPUs each |

The strategy gathers tensor by tensor, data ranks and parts, folds adapters in, and writes into that file: no GPU holds more than one whole tensor (the
embedding, 3.9 GiB in fp32, twice while its parts are joined). From there weights go to the workers as buckets through Ray's object store (`weight_transfer='store'`);
NCCL from rank 0's GPU, which smaller models take, needs the whole copy there. So point TMPDIR at a file system with 132 GiB for each version, such as `/dev/shm`,
and give Ray as much for `max_staleness` + 1 versions. What was tested: two gloo processes of one rank, tiny models, vLLM's stand-in
(tests/rollout/test_weights_from_host.py); not vLLM itself.

## Commands

GRPO with LoRA on eight GPUs, responses here:

    torchrun --nproc_per_node 8 examples/train_prompts.py prompts.csv --pretrain meta-llama/Meta-Llama-3-70B-Instruct --reward_fn my_rewards.py:score \\
        --strategy fsdp --tensor_parallel 8 --advantage_estimator grpo --num_samples_per_prompt 8 --lora_rank 16 --gradient_checkpointing true \\
        --experience_batch_size 16 --train_batch_size 128 --max_tokens_per_batch 2048 --max_new_tokens 1024

The same on two machines, node1 generating:

    ray start --head --port=6379 --num-gpus 0                       # node0
    ray start --address=node0:6379 --num-gpus 8                     # node1
    TMPDIR=/dev/shm RAY_ADDRESS=auto torchrun --nproc_per_node 8 examples/train_prompts.py prompts.csv --pretrain meta-llama/Meta-Llama-3-70B-Instruct \\
        --reward_fn my_rewards.py:score --strategy fsdp --tensor_parallel 8 --advantage_estimator grpo --num_samples_per_prompt 8 --lora_rank 16 \\
        --gradient_checkpointing true --experience_batch_size 16 --train_batch_size 128 --max_tokens_per_batch 2048 --max_new_tokens 1024 \\
        --engine vllm --rollout_workers 2 --rollout_resources '{GPU: 4}' --max_staleness 1 --tis_cap 2

All weights, in the host memory of two machines (with `--strategy fsdp --tensor_parallel 8 --offload idle` on their devices, for sequences of 2048 tokens):

    python -m chatgpt.launch --num_nodes 2 --num_workers 16 --rdzv_endpoint node0:29400 --run_id seventy examples/train_prompts.py prompts.csv \\
        --pretrain meta-llama/Meta-Llama-3-70B-Instruct --reward_fn my_rewards.py:score --strategy fsdp_cpu --advantage_estimator grpo \\
        --num_samples_per_prompt 8 --gradient_checkpointing true --experience_batch_size 16 --train_batch_size 128 --max_tokens_per_batch 2048 \\
        --max_new_tokens 1024 --save_path /shared/outputs/seventy

One plan of these tables:

    python -m chatgpt.plan meta-llama/Meta-Llama-3-70B-Instruct --strategy fsdp --tensor_parallel 8 --num_processes 16 --processes_per_machine 8 \\
        --memory 80GiB --host_memory 2TiB --gradient_checkpointing --critic none --lora_rank 16 --max_tokens_per_batch 2048 --max_prompt_tokens 1024 \\
        --max_new_tokens 1024 --experience_batch_size 16 --num_samples_per_prompt 8 --train_batch_size 128

How near the planner is to memory that was measured, on a CPU: [capacity.md](capacity.md), [tensor_parallel.md](tensor_parallel.md).
"""


def page(
    numbers: dict[str, Any],
    gpus: Sequence[int],
    methods: Sequence[str],
    layouts: Sequence[str],
    tokens: int,
    sequences: int,
    show: Callable[[float], str],
) -> str:
    parts = [INTRO.format(sequences=sequences)]
    for count in gpus:
        parts.append(f'## {count} GPUs: what fits\n')
        rows = [
            '| method | longest sequence, responses here | longest sequence, responses elsewhere |',
            '|---|---|---|',
        ]
        for method in methods:
            cells = []
            for where in ('here', 'elsewhere'):
                known = ((layout, numbers.get(f'{count}, {method}, {layout}') or {}) for layout in layouts)
                fitting = [f'{layout}: {found[where]["longest"]}' for layout, found in known if _fits(found, where)]
                cells.append('; '.join(fitting) or 'nothing')
            rows.append(f'| {method} | ' + ' | '.join(cells) + ' |')
        parts.append('\n'.join(rows) + '\n')
    parts.append(
        f'"32768" is the longest that was tried. "Elsewhere" counts the {" or ".join(map(str, gpus))} GPUs that train; those of vLLM come on top.\n'
    )
    for count in gpus:
        parts.append(f'## {count} GPUs: memory of the fullest GPU in each phase, {tokens} tokens\n')
        rows = [
            '| method | layout | load | collect, here | collect, elsewhere | score | learn | host, one machine |',
            '|---' * 8 + '|',
        ]
        for method in methods:
            for layout in layouts:
                found = numbers.get(f'{count}, {method}, {layout}')
                if found:
                    rows.append(f'| {method} | {layout} | ' + ' | '.join(_cells(found, show)) + ' |')
        parts.append('\n'.join(rows) + '\n')
    parts.append(
        'Bold is more than 76 GiB, or than 2 TiB of host memory. A dash: not asked, because the other phases do not fit.\n'
    )
    parts.append(COMMANDS)
    return '\n'.join(parts)


def _fits(found: dict[str, Any], where: str) -> bool:
    return where in found and found[where]['longest'] is not None


def _cells(found: dict[str, Any], show: Callable[[float], str]) -> list[str]:
    one = found.get('here') or found['elsewhere']
    phases = {name: one['phases'].get(name) for name in ('load', 'score', 'learn')}
    collects = [found[where]['phases']['collect'] if where in found else None for where in ('here', 'elsewhere')]
    sizes = [phases['load'], *collects, phases['score'], phases['learn']]
    cells = ['-' if size is None else _marked(size, 76 * 2**30, show) for size in sizes]
    host = max(found[where]['host'] for where in found)
    return [*cells, _marked(host, 2 * 2**40, show) if host >= 2**30 else '-']


def _marked(size: float, limit: float, show: Callable[[float], str]) -> str:
    return f'**{show(size)}**' if size > limit else show(size)
