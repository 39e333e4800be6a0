"""Compares the transfer of weights to rollout workers with a raw broadcast of as many bytes.

    python benchmarks/weight_transfer.py [--size small] [--repeats 5] [--page]

All processes are Ray actors on this machine, with one thread each. Time runs from the trainer's first access to a
weight until every worker has them in its model. Methods take turns, and a ratio is taken within a round, since other
load changes every number.
"""

from __future__ import annotations

import os
import statistics
import time
from typing import Any

import torch
import torch.distributed as dist
from harness import alternate, markdown, ratios, script_parser, where, write_page
from transformers import AutoModelForCausalLM, GPT2Config

from chatgpt.nn import Actor
from chatgpt.rollout.cluster import import_ray
from chatgpt.rollout.handshake import Handshake
from chatgpt.rollout.ray_workers import _Actor as RolloutActor
from chatgpt.rollout.wire import ModelSpec, fill_buckets, plan_buckets, policy_tensors
from chatgpt.testing.processes import free_port

SIZES: dict[str, dict[str, int]] = {  # the shapes of GPT-2
    'tiny': {'n_embd': 64, 'n_layer': 2, 'n_head': 2, 'vocab_size': 512},
    'small': {'n_embd': 768, 'n_layer': 12, 'n_head': 12, 'vocab_size': 50257},
}
BUCKETS_MIB = (1, 16, 64, 256)


def make_model(size: str) -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(GPT2Config(n_positions=1024, **SIZES[size])).eval()


class Trainer:
    """The sender: holds the weights and joins a broadcast group."""

    def __init__(self, size: str) -> None:
        torch.set_num_threads(1)
        self.ray, self.model, self.version = import_ray('this benchmark'), make_model(size), 0
        self.flat = torch.zeros(0)

    def describe(self) -> tuple[ModelSpec, int]:
        tensors = policy_tensors(Actor(self.model).model)
        return ModelSpec.of(self.model), sum(t.numel() * t.element_size() for t in tensors.values())

    def buckets(self, workers: list[Any], bucket_bytes: int) -> float:
        """Sends the weights in buckets, as `RemoteEngine.begin` does."""
        start = time.perf_counter()
        tensors, self.version = policy_tensors(self.model), self.version + 1
        handshake = Handshake.of(Actor(self.model), 'RemoteEngine')
        manifest = plan_buckets(tensors, version=self.version, handshake=handshake, bucket_bytes=bucket_bytes)
        handles = [self.ray.put(bucket.numpy()) for bucket in fill_buckets(manifest, tensors)]
        self.ray.get([w.call.remote('take_weights', manifest, handles) for w in workers])
        return time.perf_counter() - start

    def dictionary(self, workers: list[Any]) -> float:
        """Sends a state dict through Ray's object store."""
        start = time.perf_counter()
        handle = self.ray.put(dict(policy_tensors(self.model)))
        self.ray.get([w.take_dictionary.remote([handle]) for w in workers])
        return time.perf_counter() - start

    def join(self, rank: int, world_size: int, port: int) -> None:
        os.environ.update(MASTER_ADDR='127.0.0.1', MASTER_PORT=str(port))
        dist.init_process_group('gloo', rank=rank, world_size=world_size)

    def broadcast(self, num_bytes: int) -> float:
        """Broadcasts a flat, preallocated buffer by gloo; no weight is read or written."""
        if self.flat.numel() * 4 != num_bytes:
            self.flat = torch.zeros(num_bytes // 4)
        dist.barrier()
        start = time.perf_counter()
        dist.broadcast(self.flat, 0)
        dist.barrier()
        return time.perf_counter() - start

    def leave(self) -> None:
        dist.destroy_process_group()

    def copy(self, num_bytes: int) -> float:
        """Copies as many bytes in memory."""
        a, b = torch.zeros(num_bytes // 4), torch.zeros(num_bytes // 4)
        b.copy_(a)
        start = time.perf_counter()
        b.copy_(a)
        return time.perf_counter() - start


class Worker(RolloutActor):
    """A rollout actor that can also receive a state dict and join a broadcast group."""

    join, leave, broadcast = Trainer.join, Trainer.leave, Trainer.broadcast
    flat = torch.zeros(0)

    def take_dictionary(self, handles: list[Any]) -> None:
        tensors = self.ray.get(handles[0])
        named = dict(self.worker._model.named_parameters())
        with torch.no_grad():
            for name, tensor in tensors.items():
                named[name].copy_(tensor)


def measure(size: str, num_workers: int, repeats: int) -> tuple[int, dict[str, list[float]]]:
    """Returns the bytes of the weights, and the seconds of each method by round."""
    ray = import_ray('this benchmark')
    trainer = ray.remote(Trainer).options(num_cpus=1).remote(size)
    spec, num_bytes = ray.get(trainer.describe.remote())
    workers = [ray.remote(Worker).options(num_cpus=1).remote(spec, {}, 1, 'cpu') for _ in range(num_workers)]
    group, port = [trainer, *workers], free_port()
    ray.get([actor.join.remote(rank, len(group), port) for rank, actor in enumerate(group)])
    ways: dict[str, Any] = {'broadcast': lambda: max(ray.get([actor.broadcast.remote(num_bytes) for actor in group]))}
    for mib in BUCKETS_MIB:
        ways[f'buckets of {mib} MiB'] = lambda mib=mib: ray.get(trainer.buckets.remote(workers, mib << 20))
    ways['dict of tensors'] = lambda: ray.get(trainer.dictionary.remote(workers))
    ways['copy in memory'] = lambda: ray.get(trainer.copy.remote(num_bytes))
    seconds = alternate({name: lambda _, w=way: w() for name, way in ways.items()}, repeats)  # builds models first
    ray.get([actor.leave.remote() for actor in group])
    for actor in group:
        ray.kill(actor)
    return num_bytes, seconds


def table(num_bytes: int, seconds: dict[str, list[float]]) -> str:
    rows = []
    for name, times in seconds.items():
        rates = sorted(num_bytes / 1e6 / t for t in times)
        ratio = statistics.median(ratios(seconds['broadcast'], times))
        span = f'{rates[0]:,.0f} to {rates[-1]:,.0f}'
        rows.append([name, f'{statistics.median(rates):,.0f}', span, f'{ratio:.2f}'])
    return markdown('way | MB/s, median | range | speed against the broadcast', rows)


def main() -> None:
    parser = script_parser(__doc__, 'weight_transfer.md')
    parser.add_argument('--size', choices=SIZES, default='small')
    parser.add_argument('--workers', type=int, nargs='+', default=[1, 2])
    parser.add_argument('--repeats', type=int, default=5)
    args = parser.parse_args()
    ray = import_ray('this benchmark')
    options = {'include_dashboard': False, 'log_to_driver': False, 'logging_level': 'error'}
    ray.init('local', num_cpus=1 + max(args.workers), object_store_memory=3 << 30, **options)
    parts = [f'{args.repeats} rounds, {where()}, ray {ray.__version__}.']
    try:
        for number in args.workers:
            num_bytes, seconds = measure(args.size, number, args.repeats)
            parts += [
                f'To {number} worker{"s" * (number > 1)}, {num_bytes / 1e6:,.0f} MB of fp32:',
                table(num_bytes, seconds),
            ]
            print(parts[-1], flush=True)
    finally:
        ray.shutdown()
    if args.page:
        write_page('weight_transfer.md', measured='\n\n'.join(parts))


if __name__ == '__main__':
    main()
