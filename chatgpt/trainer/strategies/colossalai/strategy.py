"""`ColossalAIStrategy`: ZeRO stages 1 and 2 (LowLevelZero) and 3 (Gemini) of ColossalAI, with offload, on CUDA and on
the CPU.

| what | stage 1, 2 | stage 3 |
|---|---|---|
| precision | fp32, bf16, fp16 | bf16, fp16 |
| a trained model | 16-bit weights whole on each rank; masters, states (stage 2: gradients) sharded | all sharded |
| a frozen model | whole, in the compute dtype | sharded over ranks, in the compute dtype |
| placement 'cuda' | all on the device | all on the device |
| placement 'cpu' | masters and states in host memory | all in host memory, one chunk at a time on the device |
| placement 'auto' | 'cpu' where masters and states exceed half of the free device memory | Gemini decides as it runs |
| optimizers | element-wise ones of torch or ColossalAI | HybridAdam, CPUAdam, FusedAdam |
| tensor parallelism | `parts`, with placement 'cuda' | no |

colossalai is imported when a strategy is built. Left out: pipelines, and ColossalAI's own checkpoint files.
"""

from __future__ import annotations

import copy
import inspect
import itertools
import math
import os
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from chatgpt.checkpoint.layout import Piece, TensorReader
from chatgpt.trainer.strategies import states
from chatgpt.trainer.strategies.colossalai.cpu import bridge
from chatgpt.trainer.strategies.colossalai.engines import Engine, TrainedEngine, ZeroEngine, wire
from chatgpt.trainer.strategies.colossalai.gemini import GeminiEngine, GeminiFrozen
from chatgpt.trainer.strategies.colossalai.memory import GeminiMemory, ZeroMemory
from chatgpt.trainer.strategies.colossalai.options import (
    FP16_ONLY,
    Placement,
    check_kernels,
    check_options,
    import_colossalai,
)
from chatgpt.trainer.strategies.colossalai.parts import WHOLE, Parts, cut_model
from chatgpt.trainer.strategies.colossalai.states import (
    UpstreamScaler,
    buffers_of,
    load_model_pieces,
    load_optimizer_pieces,
    model_pieces,
    optimizer_pieces,
)
from chatgpt.trainer.strategies.exact import Reproducible, exact_norm
from chatgpt.trainer.strategies.memory import MemoryModel, atoms_of
from chatgpt.trainer.strategies.offload import Offloaded
from chatgpt.trainer.strategies.precision import Precision, merge_for_good, resolve_precision
from chatgpt.trainer.strategies.processes import ProcessGroupStrategy
from chatgpt.trainer.strategies.ranks import check_world_size
from chatgpt.trainer.strategies.streaming import (
    StreamBlocks,
    mapped_copy,
    mapped_floats,
    set_buffers,
    streamed,
    streams,
)
from chatgpt.trainer.strategies.tensor_parallel import check_model
from chatgpt.trainer.strategies.tensor_ranks import TensorRanks


class ColossalAIStrategy(ProcessGroupStrategy):
    """ZeRO and Gemini. Launch with torchrun, or inside a process group that is already there.

    Args:
        stage: 1, 2 (LowLevelZero) or 3 (Gemini).
        precision: of forward and backward; masters and optimizer states are fp32. 'auto' is bf16 in stage 3.
        shard_init: stage 3: `model_init_context` builds on the meta device, and `prepare` fills shard after shard.
        placement_policy: 'cuda', 'cpu' (offload) or 'auto'; see the table above.
        pin_memory: host memory of chunks is pinned (stage 3, CUDA).
        force_outputs_fp32: floating outputs of a forward are cast to fp32.
        search_range_mb, hidden_dim, min_chunk_size_mb: Gemini's search for a chunk size, in 2^20 elements; a model
            smaller than `min_chunk_size_mb` is kept whole on every rank.
        gpu_margin_mem_ratio: stage 3 with 'auto': share of the free device memory given to masters and states.
        reduce_bucket_size: stage 1, 2: elements per reduction.
        overlap_communication: reduce gradients while the backward runs.
        initial_scale .. max_scale: dynamic loss scaling in fp16.
        max_norm: clips in every step that is not given a max_norm of its own; 0 does not.
        norm_type: 2, the only one there is.
        stream_blocks: stage 3: as in `FSDPStrategy`.
        tensor_parallel: stage 1, 2: neighbouring processes that hold each block's matrices together and are one rank,
            as in `FSDPStrategy`; masters and states of their parts are sharded over the ranks.

    Raises:
        ValueError: an option that this stage, precision or placement cannot honour.
        ImportError: colossalai is not installed; says how to install it.
    """

    sharded: ClassVar[bool] = True
    keeps_narrow: ClassVar[bool] = False  # upstream casts whole modules
    fuses: ClassVar[bool] = False  # upstream steps masters of its own, maybe in host memory
    weights_in_place: ClassVar[bool] = False

    def __init__(
        self,
        stage: int = 3,
        precision: Precision = 'auto',
        seed: int = 42,
        shard_init: bool = False,
        placement_policy: Placement = 'cuda',
        pin_memory: bool = True,
        force_outputs_fp32: bool = False,
        search_range_mb: float = 32,
        hidden_dim: int | None = None,
        min_chunk_size_mb: float = 32,
        gpu_margin_mem_ratio: float = 0.0,
        reduce_bucket_size: int = 12 * 1024**2,
        overlap_communication: bool = True,
        initial_scale: float = 2**16,
        growth_factor: float = 2,
        backoff_factor: float = 0.5,
        growth_interval: int = 1000,
        hysteresis: int = 2,
        min_scale: float = 1,
        max_scale: float = 2**32,
        max_norm: float = 0.0,
        norm_type: float = 2.0,
        *,
        stream_blocks: StreamBlocks = 'auto',
        tensor_parallel: int = 1,
        device: str | torch.device | None = None,
        timeout_s: float = 1800.0,
        deterministic: bool = False,
        reproducible: Reproducible = None,
        atoms: int = 8,
    ) -> None:
        if stage == 3:  # which has no fp32 on any device
            precision = resolve_precision(precision, torch.device('cpu'), only_16_bits=True)
        given = dict(locals())
        signature = inspect.signature(ColossalAIStrategy).parameters
        self.options = {name: given[name] for name in signature}
        check_options(self.options, {name: parameter.default for name, parameter in signature.items()})
        if device is not None and torch.device(device).type == 'cpu' and torch.cuda.is_available():
            raise ValueError(
                f'device={device!r}: ColossalAI takes a GPU where there is one; hide it with CUDA_VISIBLE_DEVICES='
            )
        if tensor_parallel != 1 and 'WORLD_SIZE' in os.environ:  # before anything is joined
            check_world_size(int(os.environ['WORLD_SIZE']), tensor_parallel)
        check_kernels(stage)
        import_colossalai()
        self.ranks_below, self.only_16_bits = stage == 2, stage == 3
        super().__init__(
            seed,
            precision,
            device=device,
            timeout_s=timeout_s,
            deterministic=deterministic,
            reproducible=reproducible,
            atoms=atoms,
        )
        if tensor_parallel != 1:
            self.ranks: Any = TensorRanks(self.ranks, tensor_parallel)
        bridge()
        self.stage, self.placement_policy, self.max_norm = stage, placement_policy, max_norm
        self.supports_unused = stage < 3
        self.stream_blocks = stream_blocks
        self._engines: dict[int, Engine] = {}
        """by id of the module the user built"""

    @classmethod
    def memory_model(
        cls,
        stage: int = 3,
        placement_policy: Placement = 'cuda',
        reduce_bucket_size: int = 12 * 1024**2,
        search_range_mb: float = 32,
        hidden_dim: int | None = None,
        min_chunk_size_mb: float = 32,
        tensor_parallel: int = 1,
        **options: Any,
    ) -> MemoryModel:
        offloads = placement_policy == 'cpu'
        if stage == 3:
            return GeminiMemory(
                offloads, search_range=search_range_mb, interval=hidden_dim or 1024, min_chunk=min_chunk_size_mb
            )
        return ZeroMemory(
            offloads,
            stage=stage,
            atoms=atoms_of(options),
            bucket=reduce_bucket_size,
            tensor_parallel=tensor_parallel,
        )

    # ------------------------------------------------------------------ models

    def model_init_context(self) -> AbstractContextManager[Any]:
        return torch.device('meta') if self.options['shard_init'] else nullcontext()

    def make_optimizer(
        self,
        parameters: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> Optimizer:
        """AdamW as this stage takes it: HybridAdam under Gemini, torch's otherwise."""
        if self.stage < 3:
            return super().make_optimizer(parameters, lr, betas, eps, weight_decay)
        from colossalai.nn.optimizer import HybridAdam

        return HybridAdam(parameters, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)

    def setup_pair(self, model: nn.Module, optimizer: Optimizer, names: list[list[str]]) -> tuple[nn.Module, Optimizer]:
        if id(model) in self._prepared:
            raise ValueError(
                'prepare: ColossalAI trains a model with one optimizer; use parameter groups for different settings'
            )
        self._check_optimizer(optimizer)
        if self.stage == 3:
            self.keep_blocks(model)
        return self._boost(model, optimizer, names)

    def _prepare_pair(self, model: nn.Module, optimizer: Optimizer) -> None:
        super()._prepare_pair(model, optimizer)
        pair = self.trained(optimizer)
        if pair.scaler is not None:
            pair.scaler = UpstreamScaler(self._engine(optimizer).scaler)

    def offloaded(self, module: nn.Module) -> Offloaded | None:
        if self.stage == 3:
            raise ValueError(
                "offload='idle': Gemini places frozen weights itself; use placement_policy='cpu' or 'auto'"
            )
        return super().offloaded(module)

    def setup_model(self, model: nn.Module, trained: bool) -> nn.Module:
        return self._boost(model, None)[0]

    def _boost(
        self, model: nn.Module, optimizer: Optimizer | None, names: list[list[str]] | None = None
    ) -> tuple[nn.Module, Any]:
        """Wrap a module, with its optimizer when it is trained, and put the exact weights and buffers in.

        The optimizer that comes back is the user's own, stepped through upstream's, so that a learning-rate schedule
        can hold it.
        """
        from colossalai.booster import Booster

        states.refuse_shared(model, f'{type(self).__name__} shards weights')
        cut = isinstance(self.ranks, TensorRanks)
        plan = check_model(model, self.ranks.tensor_parallel) if cut else {}
        fresh = any(p.is_meta for p in model.parameters())
        if fresh:
            tensors: Iterable[tuple[str, Tensor]] = _on_demand(model, optimizer)
        else:
            self.take_weights_of_rank_0(model)
        parts = cut_model(model, optimizer, names or [], plan, self.ranks) if cut else WHOLE
        if fresh:
            tensors = parts.taken(tensors)
        else:
            tensors = [(name, parameter.data) for name, parameter in model.named_parameters()]
        buffers = [
            (m, key, buffer.detach())
            for m in model.modules()
            for key, buffer in m._buffers.items()
            if buffer is not None
        ]
        frozen_by_gemini = optimizer is None and self.stage == 3
        if frozen_by_gemini:
            model.requires_grad_(True)  # Gemini cuts only what requires a gradient over ranks
        plugin = self._plugin(model, parts, trained=optimizer is not None)
        wrapped, boosted, *_ = Booster(plugin=plugin).boost(model, optimizer)
        if frozen_by_gemini:
            model.requires_grad_(False)
        for (
            module,
            key,
            buffer,
        ) in buffers:  # upstream rounds them; rotary frequencies and the like lose their meaning in 16 bits
            module._buffers[key] = buffer.to(self.device)
        engine: Engine
        if self.stage == 3:
            engine = (GeminiFrozen if optimizer is None else GeminiEngine)(wrapped, boosted, self.device)
        else:
            engine = (Engine if optimizer is None else ZeroEngine)(wrapped, boosted, self.device, parts)
        engine.fill(tensors, fresh)
        self._engines[id(model)] = engine
        wire(wrapped, engine, self.options['force_outputs_fp32'])
        if fresh:
            from chatgpt.nn.packing import settle

            settle(model, self.device, forward=wrapped, release=engine.release)
        return wrapped, None if boosted is None else boosted.optim

    def _plugin(self, model: nn.Module, parts: Parts, trained: bool) -> Any:
        from colossalai.booster.plugin import GeminiPlugin, LowLevelZeroPlugin

        options, cuda = self.options, self.device.type == 'cuda'
        # Exact in bf16 is what the other strategies compute under autocast, from weights in fp32.
        precision = self.precision if self.exact is None else 'fp32'
        common = {name: options[name] for name in FP16_ONLY} | {'precision': precision}
        if self.stage < 3:
            plugin = LowLevelZeroPlugin(
                stage=self.stage,
                cpu_offload=self._offloads(model) if trained else False,
                overlap_communication=options['overlap_communication'],
                **common,
            )
            plugin.zero_optim_kwargs |= {
                'reduce_bucket_size': options['reduce_bucket_size'],
                'dp_process_group': parts.data,
            }
            return plugin
        offload = 1.0 if self.placement_policy == 'cpu' else 0.0
        plugin = GeminiPlugin(
            # Without masters there is nothing for 'auto' to learn from: a frozen model has no training iteration.
            placement_policy='auto' if self.placement_policy == 'auto' and trained else 'static',
            offload_optim_frac=offload,
            offload_param_frac=offload,
            master_weights=trained,
            pin_memory=options['pin_memory'] and cuda,
            enable_async_reduce=self._reduces_in_background,
            search_range_m=options['search_range_mb'],
            hidden_dim=options['hidden_dim'],
            min_chunk_size_m=options['min_chunk_size_mb'],
            gpu_margin_mem_ratio=options['gpu_margin_mem_ratio'],
            **common,
        )
        # It has no groups of its own to destroy at its end, but would collect garbage, which takes a second.
        plugin.pg_mesh.destroy_mesh_process_groups = lambda: None
        return plugin

    @property
    def _reduces_in_background(self) -> bool:
        """Under Gemini. It wants pinned chunks, and with offload upstream ran only without it."""
        wanted = self.options['overlap_communication'] and self.options['pin_memory']
        return wanted and self.placement_policy == 'cuda' and self.device.type == 'cuda'

    def _offloads(self, model: nn.Module) -> bool:
        """Whether masters and states of a trained model go to host memory; the same answer on every rank."""
        if self.placement_policy != 'auto' or self.device.type != 'cuda':
            return self.placement_policy == 'cpu'
        num_trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
        needed = 16 * num_trained / self.world_size  # master, gradient and two moments in fp32
        tight = torch.tensor(float(needed > torch.cuda.mem_get_info(self.device)[0] / 2))
        return bool(self.all_reduce(tight, 'max'))

    def _check_optimizer(self, optimizer: Optimizer) -> None:
        if optimizer.state:
            raise ValueError(
                f'prepare: this {type(optimizer).__name__} has already stepped; prepare a new optimizer, then load its '
                'state'
            )
        if self.stage < 3:
            return
        from colossalai.nn.optimizer import CPUAdam, FusedAdam, HybridAdam

        kind = type(optimizer)
        if kind not in (HybridAdam, CPUAdam, FusedAdam):
            raise ValueError(
                f'prepare: Gemini (stage=3) cannot step a {kind.__module__}.{kind.__name__}; '
                'use HybridAdam of colossalai.nn.optimizer, or strategy.make_optimizer(parameters, lr)'
            )
        if kind is FusedAdam and self.placement_policy != 'cuda':
            raise ValueError(
                f'prepare: FusedAdam cannot step under placement_policy={self.placement_policy!r}; use HybridAdam'
            )
        on_gpu = self.placement_policy == 'cuda' and self.device.type == 'cuda'
        if kind is CPUAdam and on_gpu and self.uses_loss_scaling:
            raise ValueError(
                "prepare: CPUAdam cannot unscale fp16 gradients on a GPU; use HybridAdam, or placement_policy='cpu'"
            )

    def _engine(self, optimizer: Optimizer) -> TrainedEngine:
        engine = self._engines[id(self.trained(optimizer).user_model)]
        assert isinstance(engine, TrainedEngine)
        return engine

    @contextmanager
    def full_model(
        self, model: nn.Module, dtype: torch.dtype | None = None, *, on_disk: str | os.PathLike[str] | None = None
    ) -> Iterator[nn.Module]:
        """As in the base. Stages 1 and 2 without LoRA lend the module itself; otherwise a copy is gathered and freed
        after. Under tensor parallelism of this process's parts; or with `whole_copies` of all, in host memory."""
        from chatgpt.nn import lora
        from chatgpt.nn.dropout import in_eval_mode

        module, dtype = self.unwrap(model), dtype or self.full_dtype
        engine = self._engines.get(id(module))
        if engine is None:
            with super().full_model(model, dtype) as full:
                yield full
            return
        has_lora = lora.has_lora(module)
        skeleton, apart = engine.parts.skeleton, engine.parts.group is not None and self.whole_copies
        too_large = self.stage == 3 and streams(self, self.stream_blocks, module, dtype)
        if on_disk is not None or apart or too_large:
            whole = _whole(engine, torch.float32 if has_lora else dtype)
            full, mapped = mapped_copy(self, skeleton or module, whole, dtype, on_disk)
            set_buffers(full, module)
            streams_blocks = on_disk is None and not apart and not self.only_reads
            with streamed(full, mapped, self.device) if streams_blocks else nullcontext():
                yield full.to('cpu') if apart else full
            return
        if self.stage < 3 and dtype == (self._dtype if self.exact is None else torch.float32) and not has_lora:
            with in_eval_mode(module):
                yield module
            return
        # Adapters are folded in fp32 and the sum is rounded once, as Naive does.
        copied = self._gathered_copy(module, engine, torch.float32 if has_lora else dtype).eval()
        merge_for_good(copied)
        for parameter in copied.parameters():
            if parameter.is_floating_point():
                parameter.data = parameter.data.to(dtype)
        yield copied

    def _gathered_copy(self, module: nn.Module, engine: Engine, dtype: torch.dtype) -> nn.Module:
        """A plain copy of the module the user built, with whole weights. Parameters are never copied, only received."""
        plain: dict[str, nn.Parameter] = {}
        memo: dict[int, Any] = {}
        for name, parameter in module.named_parameters():
            kind = dtype if parameter.is_floating_point() else parameter.dtype
            plain[name] = nn.Parameter(
                torch.empty(parameter.shape, dtype=kind, device=self.device), requires_grad=False
            )
            memo[id(parameter)] = plain[name]
        copied = copy.deepcopy(module, memo)
        for name, tensor in engine.gather(dtype):
            plain[name].data.copy_(tensor)
        return copied

    # ------------------------------------------------------------------ one optimizer step

    @contextmanager
    def accumulate(self, model: nn.Module, last: bool) -> Iterator[None]:
        engine = self._engines.get(id(self.unwrap(model)))
        if not isinstance(engine, TrainedEngine):
            yield
            return
        engine.sync = last
        try:
            yield
        finally:
            engine.sync = True

    def backward(self, loss: Tensor, model: nn.Module, optimizer: Optimizer) -> None:
        engine = self._engine(optimizer)
        if self.exact is None:
            engine.backward(loss * self.world_size)  # upstream takes the mean over ranks
        else:
            assert isinstance(engine, ZeroEngine)
            engine.accumulate(loss)

    def end_atom(self, optimizer: Optimizer) -> None:
        pair = self.trained(optimizer)
        if pair.tree is None:
            return
        parameters = self._engine(optimizer).trained()
        if self.ranks_below:
            shards = self._summed_shards(optimizer)
            pair.tree.add([shards.get(id(p)) for p in parameters])
            return
        pair.tree.add([p.grad for p in parameters])
        for parameter in parameters:
            parameter.grad = None

    def _summed_shards(self, optimizer: Optimizer) -> dict[int, Tensor]:
        engine = self._engine(optimizer)
        assert isinstance(engine, ZeroEngine)
        return engine.summed_shards(self.fill_gradients([*engine.trained()]), self.options['reduce_bucket_size'])

    def _exact_step(self, optimizer: Optimizer, max_norm: float | None) -> float:
        engine, tree = self._engine(optimizer), self.trained(optimizer).tree
        assert isinstance(engine, ZeroEngine) and tree is not None and self.exact is not None
        total = tree.finish(self.exact.atoms // self.world_size)
        if self.ranks_below:
            shards = {id(p): g for p, g in zip(engine.trained(), total, strict=True) if g is not None}
        else:
            for parameter, gradient in zip(engine.trained(), total, strict=True):
                parameter.grad = gradient
            shards = self._summed_shards(optimizer)
        norm = exact_norm(shards.values(), self.device, self.all_reduce)
        if math.isfinite(norm):
            if max_norm is not None:
                factor = min(1.0, max_norm / (norm + 1e-6))
                for shard in shards.values():
                    shard.mul_(factor)
            engine.set_shards(shards)
            engine.step(norm, None)
        else:
            engine.overflow()
        return norm

    def optimizer_step(self, optimizer: Optimizer, max_norm: float | None = None) -> float:
        if max_norm is not None and not max_norm > 0:
            raise ValueError(f'max_norm={max_norm} must be positive; None turns clipping off')
        if self.exact is not None:
            return self._exact_step(optimizer, max_norm or self.max_norm or None)
        engine = self._engine(optimizer)
        norm = engine.norm()
        if math.isfinite(norm):
            engine.step(norm, max_norm or self.max_norm or None)
        else:
            engine.overflow()
        return norm

    def discard_gradients(self, optimizer: Optimizer) -> None:
        if (tree := self.trained(optimizer).tree) is not None:
            tree.clear()
        self._engine(optimizer).discard()

    # ------------------------------------------------------------------ weights and optimizer states

    def full_state_dict(self, model: nn.Module, folder: str | os.PathLike[str] | None = None) -> dict[str, Tensor]:
        module = self.unwrap(model)
        if id(module) not in self._engines:
            return super().full_state_dict(model, folder)
        engine = self._engines[id(module)]
        tensors, aliases = states.named_tensors(engine.parts.skeleton or module)
        full = mapped_floats(tensors, folder) if self.is_rank_0 else {}
        for name, tensor in _whole(engine, torch.float32):
            if self.is_rank_0:
                full[name].copy_(tensor)
        if not self.is_rank_0:
            return {}
        for name, buffer in buffers_of(module).items():
            full[name].copy_(buffer)
        return {name: full[aliases.get(name, name)] for name in (*tensors, *aliases)}

    def model_pieces(self, model: nn.Module) -> Iterable[Piece]:
        module = self.unwrap(model)
        if id(module) not in self._engines:
            return super().model_pieces(model)
        return itertools.chain(model_pieces(self._engines[id(module)]), self._dealt(buffers_of(module)))

    def load_model_pieces(self, model: nn.Module, reader: TensorReader, strict: bool = True) -> None:
        module = self.unwrap(model)
        if id(module) not in self._engines:
            super().load_model_pieces(model, reader, strict)
        else:
            load_model_pieces(self._engines[id(module)], reader, strict)

    def optimizer_pieces(self, optimizer: Optimizer) -> Iterable[Piece]:
        return optimizer_pieces(self._engine(optimizer))

    def load_optimizer_pieces(self, optimizer: Optimizer, reader: TensorReader) -> None:
        load_optimizer_pieces(
            self._engine(optimizer), {n for names in self.trained(optimizer).names for n in names}, reader
        )

    def close(self) -> None:
        self._engines.clear()
        super().close()


def _whole(engine: Engine, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Every parameter whole, also where a few processes hold it in parts. A collective."""
    return ((name, engine.parts.joined(name, tensor)) for name, tensor in engine.gather(dtype))


def _on_demand(model: nn.Module, optimizer: Optimizer | None) -> Iterator[tuple[str, Tensor]]:
    """Turn a model on the meta device into one whose tensors take no memory yet; its first weights, one after
    another."""
    from chatgpt.nn.sources import initial_tensors

    tensors = initial_tensors(model)
    made: dict[int, Any] = {}
    for module in model.modules():
        for key, parameter in module._parameters.items():
            if parameter is not None:
                if id(parameter) not in made:
                    empty = torch.zeros(1, dtype=parameter.dtype).expand(parameter.shape)
                    made[id(parameter)] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
                module._parameters[key] = made[id(parameter)]
        for key, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                module._buffers[key] = torch.empty_like(buffer, device='cpu')
    for group in optimizer.param_groups if optimizer is not None else ():
        group['params'] = [made[id(p)] for p in group['params']]
    return tensors
