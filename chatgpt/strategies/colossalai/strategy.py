"""`ColossalAIStrategy`: ZeRO stages 1 and 2 (LowLevelZero) and 3 (Gemini) of ColossalAI, with offload, on CUDA and CPU.

| what | stage 1, 2 | stage 3 |
|---|---|---|
| precision | fp32, bf16, fp16 | bf16, fp16 |
| a trained model | 16-bit weights whole on each rank; masters, states (stage 2: gradients) sharded | all sharded |
| a frozen model | whole, in the compute dtype | sharded over ranks, in the compute dtype |
| placement 'cuda' | all on the device | all on the device |
| placement 'cpu' | masters and states in host memory | all in host memory, one chunk at a time on the device |
| placement 'auto' | 'cpu' if masters and states exceed half of the free device memory | Gemini decides as it runs |
| optimizers | elementwise ones of torch or ColossalAI | HybridAdam, CPUAdam, FusedAdam |

colossalai is imported when a strategy is built.
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from chatgpt.strategies import states
from chatgpt.strategies.base import Abilities
from chatgpt.strategies.checkpoint.layout import Piece, TensorReader
from chatgpt.strategies.colossalai.cpu import bridge
from chatgpt.strategies.colossalai.engines import Engine, TrainedEngine, UpstreamScaler, ZeroEngine, register_hooks
from chatgpt.strategies.colossalai.gemini import GeminiEngine, GeminiFrozen
from chatgpt.strategies.colossalai.memory import GeminiMemory, ZeroMemory
from chatgpt.strategies.colossalai.options import Options, Placement, check_kernels, import_colossalai
from chatgpt.strategies.copies import fold_adapters
from chatgpt.strategies.memory import MemoryModel, of_numerics
from chatgpt.strategies.pairs import Trained, check_max_norm
from chatgpt.strategies.precision import Precision
from chatgpt.strategies.processes import ProcessGroupStrategy
from chatgpt.strategies.streaming import StreamBlocks, gathered_state, streams, whole_copy, with_parameters
from chatgpt.strategies.sums import exact_norm


class ColossalAIStrategy(ProcessGroupStrategy):
    """ZeRO and Gemini. Launch with torchrun, or use it inside an existing process group.

    Args:
        stage: 1, 2 (LowLevelZero) or 3 (Gemini).
        precision: dtype of forward and backward; masters and optimizer states are fp32. 'auto' is bf16 in stage 3.
        shard_init: stage 3: build models in `model_init_context` on the meta device, and fill them shard by shard.
        placement_policy: 'cuda', 'cpu' (offload) or 'auto'; see the table above.
        stream_blocks: stage 3: see `FSDPStrategy`.
        options: further fields of `Options`, under upstream's names, and of `Numerics`.

    Raises:
        ValueError: for an option that this stage, precision or placement does not support.
        ImportError: if colossalai is not installed.
    """

    _keeps_narrow: ClassVar[bool] = False  # upstream casts whole modules
    _fuses: ClassVar[bool] = False  # upstream steps its own masters, which may be in host memory
    abilities = Abilities(sharded=True, weights_in_place=False)

    def __init__(
        self,
        stage: int = 3,
        precision: Precision = 'auto',
        seed: int = 42,
        shard_init: bool = False,
        placement_policy: Placement = 'cuda',
        *,
        stream_blocks: StreamBlocks = 'auto',
        device: str | torch.device | None = None,
        timeout_s: float = 1800.0,
        **options: Any,
    ) -> None:
        numerics = {name: options.pop(name) for name in ('deterministic', 'reproducible', 'atoms') if name in options}
        self.settings = Options(
            stage=stage,
            precision=precision,
            shard_init=shard_init,
            placement_policy=placement_policy,
            stream_blocks=stream_blocks,
            **options,
        )
        self.settings.check()
        if numerics.get('reproducible') is not None and (stage == 3 or precision == 'fp16'):
            gemini = 'Gemini (stage=3) keeps gradients in 16 bits'
            what = gemini if stage == 3 else "precision='fp16' is scaled by upstream"
            raise ValueError(
                f"reproducible='exact': {what}, which no other strategy repeats; use stage=1 or 2 in fp32 or bf16, or "
                'FSDPStrategy'
            )
        if device is not None and torch.device(device).type == 'cpu' and torch.cuda.is_available():
            raise ValueError(
                f'device={device!r}: ColossalAI takes a GPU where there is one; hide it with CUDA_VISIBLE_DEVICES='
            )
        check_kernels(stage)
        import_colossalai()
        self._reduces_each_round, self._only_16_bits = stage == 2, stage == 3
        self.abilities = Abilities(sharded=True, weights_in_place=False, unused=stage < 3)
        super().__init__(seed, precision, device=device, timeout_s=timeout_s, **numerics)
        bridge()
        self.stage, self.placement_policy, self.stream_blocks = stage, placement_policy, stream_blocks
        self._engines: dict[int, Engine] = {}
        """by id of the module that the user built"""

    @classmethod
    def memory_model(cls, **options: Any) -> MemoryModel:
        given = Options(**{name: value for name, value in options.items() if name in Options.__dataclass_fields__})
        offloads, interval = given.placement_policy == 'cpu', given.hidden_dim or 1024
        if given.stage == 3:
            search, least = given.search_range_mb, given.min_chunk_size_mb
            return GeminiMemory(offloads, search_range=search, interval=interval, min_chunk=least)
        return ZeroMemory(offloads, stage=given.stage, bucket=given.reduce_bucket_size, **of_numerics(options))

    # ------------------------------------------------------------------ models

    def model_init_context(self) -> AbstractContextManager[Any]:
        return torch.device('meta') if self.settings.shard_init else nullcontext()

    def make_optimizer(
        self,
        parameters: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> Optimizer:
        """Returns the AdamW of this stage: HybridAdam under Gemini, otherwise torch's."""
        if self.stage < 3:
            return super().make_optimizer(parameters, lr, betas, eps, weight_decay)
        from colossalai.nn.optimizer import HybridAdam

        return HybridAdam(parameters, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)

    def _setup_pair(
        self, model: nn.Module, optimizer: Optimizer, names: list[list[str]]
    ) -> tuple[nn.Module, Optimizer]:
        if id(model) in self._prepared:
            raise ValueError(
                'prepare: ColossalAI trains a model with one optimizer; use parameter groups for different settings'
            )
        self._check_optimizer(optimizer)
        if self.stage == 3:
            self.disable_layer_drop(model)
        return self._boost(model, optimizer)

    def _prepare_pair(self, model: nn.Module, optimizer: Optimizer) -> None:
        super()._prepare_pair(model, optimizer)
        pair = self._pair(optimizer)
        if pair.scaler is not None:
            pair.scaler = UpstreamScaler(self._engine(optimizer).scaler)

    def _offloaded(self, module: nn.Module) -> AbstractContextManager[None] | None:
        if self.stage == 3:
            raise ValueError(
                "offload='idle': Gemini places frozen weights itself; use placement_policy='cpu' or 'auto'"
            )
        return super()._offloaded(module)

    def _setup_model(self, model: nn.Module, trained: bool) -> nn.Module:
        return self._boost(model, None)[0]

    def _boost(self, model: nn.Module, optimizer: Optimizer | None) -> tuple[nn.Module, Any]:
        """Wraps a module, and its optimizer if it is trained, and sets exact weights and buffers.

        Returns the user's optimizer, which upstream's steps, so that learning-rate schedules keep working.
        """
        from colossalai.booster import Booster

        states.refuse_shared(model, f'{type(self).__name__} shards weights')
        fresh = any(p.is_meta for p in model.parameters())
        if fresh:
            tensors: Iterable[tuple[str, Tensor]] = _initial_values(model, optimizer)
        else:
            self.broadcast_weights(model)
            tensors = [(name, parameter.data) for name, parameter in model.named_parameters()]
        found = ((m, key, buffer) for m in model.modules() for key, buffer in m._buffers.items())
        buffers = [(m, key, buffer.detach()) for m, key, buffer in found if buffer is not None]
        frozen_by_gemini = optimizer is None and self.stage == 3
        if frozen_by_gemini:
            model.requires_grad_(True)  # Gemini shards only parameters that require a gradient
        plugin = self._plugin(model, trained=optimizer is not None)
        wrapped, boosted, *_ = Booster(plugin=plugin).boost(model, optimizer)
        if frozen_by_gemini:
            model.requires_grad_(False)
        # upstream rounds buffers, but rotary frequencies and others need fp32
        for module, key, buffer in buffers:
            module._buffers[key] = buffer.to(self.device)
        frozen, trained = (GeminiFrozen, GeminiEngine) if self.stage == 3 else (Engine, ZeroEngine)
        engine: Engine = (frozen if optimizer is None else trained)(wrapped, boosted, self.device)
        engine.fill(tensors, fresh)
        self._engines[id(model)] = engine
        register_hooks(wrapped, engine, self.settings.force_outputs_fp32)
        if fresh:
            from chatgpt.nn.packing import check_loaded_packing

            check_loaded_packing(model, self.device, forward=wrapped, release=engine.release)
        return wrapped, None if boosted is None else boosted.optim

    def _plugin(self, model: nn.Module, trained: bool) -> Any:
        from colossalai.booster.plugin import GeminiPlugin, LowLevelZeroPlugin

        settings, cuda = self.settings, self.device.type == 'cuda'
        # An exact run in bf16 uses autocast with fp32 weights, as under the other strategies.
        precision = 'fp32' if self.sums.exact else self.numerics.precision
        common = settings.loss_scaling() | {'precision': precision}
        if self.stage < 3:
            plugin = LowLevelZeroPlugin(
                stage=self.stage,
                cpu_offload=self._offloads(model) if trained else False,
                overlap_communication=settings.overlap_communication,
                **common,
            )
            plugin.zero_optim_kwargs['reduce_bucket_size'] = settings.reduce_bucket_size
            return plugin
        offload = 1.0 if self.placement_policy == 'cpu' else 0.0
        plugin = GeminiPlugin(
            # 'auto' needs a training iteration, which a frozen model does not have.
            placement_policy='auto' if self.placement_policy == 'auto' and trained else 'static',
            offload_optim_frac=offload,
            offload_param_frac=offload,
            master_weights=trained,
            pin_memory=settings.pin_memory and cuda,
            enable_async_reduce=self._reduces_in_background,
            search_range_m=settings.search_range_mb,
            hidden_dim=settings.hidden_dim,
            min_chunk_size_m=settings.min_chunk_size_mb,
            gpu_margin_mem_ratio=settings.gpu_margin_mem_ratio,
            **common,
        )
        # There are no groups to destroy, and the garbage collection in it takes a second.
        plugin.pg_mesh.destroy_mesh_process_groups = lambda: None
        return plugin

    @property
    def _reduces_in_background(self) -> bool:
        """True if Gemini reduces gradients asynchronously, which needs pinned chunks and no offload."""
        wanted = self.settings.overlap_communication and self.settings.pin_memory
        return wanted and self.placement_policy == 'cuda' and self.device.type == 'cuda'

    def _offloads(self, model: nn.Module) -> bool:
        """Returns True if masters and states of a trained model are in host memory; the same on every rank."""
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
        if kind is CPUAdam and on_gpu and self.numerics.scales_loss:
            raise ValueError(
                "prepare: CPUAdam cannot unscale fp16 gradients on a GPU; use HybridAdam, or placement_policy='cpu'"
            )

    def _engine(self, optimizer: Optimizer) -> TrainedEngine:
        engine = self._engines[id(self._pair(optimizer).user_model)]
        assert isinstance(engine, TrainedEngine)
        return engine

    @contextmanager
    def full_model(
        self,
        model: nn.Module,
        dtype: torch.dtype | None = None,
        *,
        whole: bool = False,
        read_only: bool = False,
        folded: bool = True,
        on_disk: str | os.PathLike[str] | None = None,
    ) -> Iterator[nn.Module]:
        """See `Strategy.full_model`. Stages 1 and 2 without LoRA yield the module itself, otherwise a gathered copy."""
        from chatgpt.nn import lora
        from chatgpt.nn.trunk import in_eval_mode

        if not folded:
            raise ValueError(f'{type(self).__name__} shards weights, and adapters cannot stay apart from them')
        module, dtype = self.unwrap(model), dtype or self.numerics.full_dtype
        engine = self._engines.get(id(module))
        if engine is None:
            with super().full_model(model, dtype) as full:
                yield full
            return
        has_lora = lora.has_lora(module)
        exact = torch.float32 if has_lora else dtype  # adapters are folded in fp32 and rounded once
        if on_disk is not None or (self.stage == 3 and streams(self, self.stream_blocks, module, dtype)):
            computes = on_disk is None and not read_only
            with whole_copy(self, module, module, engine.gather(exact), dtype, on_disk, computes=computes) as full:
                yield full
            return
        working = torch.float32 if self.sums.exact else self.numerics.dtype
        if self.stage < 3 and dtype == working and not has_lora:
            with in_eval_mode(module):
                yield module
            return
        ours = dict(module.named_parameters())
        copied = with_parameters(module, {id(ours[n]): t.to(self.device, copy=True) for n, t in engine.gather(exact)})
        fold_adapters(copied.eval())
        for parameter in copied.parameters():
            if parameter.is_floating_point():
                parameter.data = parameter.data.to(dtype)
        yield copied

    # ------------------------------------------------------------------ one optimizer step

    @contextmanager
    def accumulate(self, model: nn.Module, last: bool) -> Iterator[None]:
        engine = self._engines.get(id(self.unwrap(model)))
        if not isinstance(engine, TrainedEngine):
            yield
            return
        engine.sync = last
        try:
            with super().accumulate(model, last):
                yield
        finally:
            engine.sync = True

    def backward(self, loss: Tensor, model: nn.Module, optimizer: Optimizer) -> None:
        engine = self._engine(optimizer)
        if self.sums.exact:
            assert isinstance(engine, ZeroEngine)
            self._pair(optimizer).ran_backward = True
            engine.accumulate(loss)
        else:
            engine.backward(loss * self.world_size)  # upstream averages over ranks

    def _end_round(self, pair: Trained) -> None:
        assert pair.tree is not None
        parameters = self._engine(pair.optimizer).trained()
        if self._reduces_each_round:
            shards = self._summed_shards(pair.optimizer)
            pair.tree.add([shards.get(id(p)) for p in parameters])
        else:
            pair.tree.add_gradients([*parameters])

    def _summed_shards(self, optimizer: Optimizer) -> dict[int, Tensor]:
        engine = self._engine(optimizer)
        assert isinstance(engine, ZeroEngine)
        return engine.summed_shards(self.fill_gradients([*engine.trained()]), self.settings.reduce_bucket_size)

    def _exact_step(self, optimizer: Optimizer, max_norm: float | None) -> float:
        engine, tree = self._engine(optimizer), self._pair(optimizer).tree
        assert isinstance(engine, ZeroEngine) and tree is not None
        if self._reduces_each_round:
            total = zip(engine.trained(), tree.finish(), strict=True)
            shards = {id(p): g for p, g in total if g is not None}
        else:
            tree.set_gradients([*engine.trained()])
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
        check_max_norm(max_norm)
        max_norm = max_norm or self.settings.max_norm or None
        if self.sums.exact:
            return self._exact_step(optimizer, max_norm)
        engine = self._engine(optimizer)
        norm = engine.norm()
        if math.isfinite(norm):
            engine.step(norm, max_norm)
        else:
            engine.overflow()
        return norm

    def discard_gradients(self, optimizer: Optimizer) -> None:
        pair = self._pair(optimizer)
        pair.ran_backward = False
        if pair.tree is not None:
            pair.tree.clear()
        self._engine(optimizer).discard()

    # ------------------------------------------------------------------ weights and optimizer states

    def full_state_dict(self, model: nn.Module, folder: str | os.PathLike[str] | None = None) -> dict[str, Tensor]:
        module = self.unwrap(model)
        if id(module) not in self._engines:
            return super().full_state_dict(model, folder)
        engine = self._engines[id(module)]
        whole = itertools.chain(engine.gather(torch.float32), engine.buffers().items())
        return gathered_state(self, *states.named_tensors(module), whole, folder)

    def model_pieces(self, model: nn.Module) -> Iterable[Piece]:
        engine = self._engines.get(id(self.unwrap(model)))
        if engine is None:
            return super().model_pieces(model)
        return itertools.chain(engine.pieces(), self._own_pieces(engine.buffers()))

    def load_model_pieces(self, model: nn.Module, reader: TensorReader, strict: bool = True) -> None:
        engine = self._engines.get(id(self.unwrap(model)))
        if engine is None:
            super().load_model_pieces(model, reader, strict)
        else:
            engine.load_pieces(reader, strict)

    def _optimizer_pieces(self, optimizer: Optimizer) -> Iterable[Piece]:
        return self._engine(optimizer).state_pieces()

    def _load_optimizer_pieces(self, optimizer: Optimizer, reader: TensorReader) -> None:
        members = {name for names in self._pair(optimizer).names for name in names}
        self._engine(optimizer).load_state(members, reader)

    def close(self) -> None:
        self._engines.clear()
        super().close()


def _initial_values(model: nn.Module, optimizer: Optimizer | None) -> Iterator[tuple[str, Tensor]]:
    """Replaces meta tensors by expanded ones that take no memory; returns the initial weights, one at a time."""
    from chatgpt.nn.weights import initial_tensors

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
