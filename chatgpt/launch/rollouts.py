"""The rollout workers of a PPO run. See `chatgpt.rollout.ray_workers` for their actors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from chatgpt.launch.runs import PPORun, Run
from chatgpt.rollout import NeighboursEngine, SharedEngine, VLLMEngine
from chatgpt.rollout.shared import RankProcesses
from chatgpt.rollout.vllm import check_sampling

PATIENCE = 0.8
"""share of `rank_timeout_s` in which an actor must answer: less than the 0.9 after which waiting ranks end, since these
cannot name the actor"""


def _engine(args: PPORun) -> Any:
    """Returns an engine that is not started."""
    from chatgpt.rollout import RemoteEngine, VLLMRemoteEngine
    from chatgpt.rollout.ray_workers import RayWorkers

    kind: Any = RemoteEngine
    resources = args.rollout_resources
    if args.engine == 'vllm':
        kind, resources = VLLMRemoteEngine, {'GPU': 1, **(resources or {})}
    workers = RayWorkers(args.rollout_workers, resources=resources, timeout_s=PATIENCE * args.rank_timeout_s)
    return kind(workers, chunk_size=args.rollout_chunk_size, slice_tokens=args.rollout_slice_tokens)


def check_rollout_args(args: PPORun) -> None:
    """Raises ValueError for settings that vLLM or rollout workers do not support, without starting them."""
    if args.engine == 'vllm':
        sampling = {name: getattr(args, name) for name in ('top_k', 'top_p', 'min_new_tokens')}
        check_sampling(SimpleNamespace(**sampling, stop=args.stop_string or None, extra={}))
    if args.rollout_workers:
        _engine(args)  # raises the errors of its constructor; starts nothing


@contextmanager
def rollout_engine(args: Run, strategy: Any = None) -> Iterator[Any]:
    """Yields the engine of the run's workers, or of neighbouring ranks, None without either; workers end with the
    context. Workers with vLLM are shared by all ranks, others by the processes of one rank."""
    if isinstance(args, PPORun) and args.vllm_tensor_parallel > 1:
        parts, start = args.vllm_tensor_parallel, args.base or Path(args.save_path, 'initial')  # `recipes.start_of`
        yield NeighboursEngine(strategy, VLLMEngine(start, tensor_parallel_size=parts), parts)
        return
    if not isinstance(args, PPORun) or not args.rollout_workers:
        yield None
        return
    with _engine(args) as engine:
        if strategy is None or strategy.processes.world_size == 1:
            yield engine
        elif args.engine == 'vllm':
            yield SharedEngine(strategy, engine)
        elif strategy.processes.world_size != strategy.world_size:
            yield SharedEngine(RankProcesses(strategy.ranks), engine)
        else:
            yield engine
