"""`FSDPStrategy`: parameters, gradients and optimizer states sharded over processes by torch's own `fully_shard`
(FSDP2).

Every transformer block is gathered for its forward and backward and then freed; other parameters belong to the root
module. Modules are sharded in place, so all of their methods can be called, and optimizers get the sharded parameters.
With `tensor_parallel` the mesh has two dimensions: each block's matrices are split over the processes of a group, and
`fully_shard` shards the parts over ranks. With `replicas` it has two as well: weights are sharded within each group of
neighbouring ranks, and the groups, usually machines, hold the same shards (HSDP). With `sequence_parallel` weights are
sharded over all processes.
"""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from chatgpt.strategies import states
from chatgpt.strategies.base import Abilities
from chatgpt.strategies.checkpoint.layout import Piece, TensorReader
from chatgpt.strategies.copies import (
    OffloadedShards,
    fold_adapters,
    narrow,
    narrow_states,
)
from chatgpt.strategies.machine import all_cores
from chatgpt.strategies.memory import Layout, Memory, MemoryModel, ModelSize, ParameterSize, gathered_copy, of_numerics
from chatgpt.strategies.pairs import Trained
from chatgpt.strategies.precision import Precision
from chatgpt.strategies.processes import ProcessGroupStrategy, ReduceDtype, check_reduce_dtype
from chatgpt.strategies.ranks import check_world_size
from chatgpt.strategies.sequence_parallel import SequenceRanks, check_sequences
from chatgpt.strategies.shards import (
    NarrowReduceScatter,
    TreeReduceScatter,
    drop_whole_gradients,
    fill,
    shard_range,
    whole_tensor,
)
from chatgpt.strategies.streaming import (
    StreamBlocks,
    check_stream_blocks,
    gathered_state,
    on_meta,
    set_buffers,
    streams,
    transformer_blocks,
    whole_copy,
    with_parameters,
)
from chatgpt.strategies.sums import exact_norm, local_part
from chatgpt.strategies.tensor_parallel import CutReader, Parts, check_model, parallelize, sum_over_group
from chatgpt.strategies.tensor_ranks import TensorRanks

WHOLE_GRADIENTS_GIB = 4.0
"""default of `whole_gradients_gib`: those of adapters of any model, and of a model of 1B parameters"""


class FSDPStrategy(ProcessGroupStrategy):
    """Fully sharded data parallelism. Launch with torchrun.

    Args:
        tensor_parallel: number of neighbouring processes that split each block's matrices and form one rank
            (`chatgpt.strategies.tensor_parallel`). Needs a model with a plan for it in transformers. Generation splits
            the weights in the same way.
        sequence_parallel: number of neighbouring processes that compute each packed row together, a part of its tokens
            each, and form one rank (`chatgpt.strategies.sequence_parallel`). For learning, scoring and values; the
            responses of a rank are dealt to its processes.
        precision: dtype in which blocks are gathered and computed; shards of frozen matrices of blocks are stored in it
            (`Strategy._narrowable`). Other shards, gradients and optimizer states stay fp32.
        replicas: number of groups of ranks that hold the same shards.
        reduce_dtype: dtype in which gradients are summed over the ranks that shard a model. Sums over micro-batches and
            over replicas are fp32.
        whole_gradients_gib: a model with trained weights of at most this many GiB in fp32 keeps whole gradients between
            micro-batches and reduces them once per optimizer step; a larger one reduces them in every micro-batch. An
            exact run reduces once per round.
        cpu_offload: keep shards and optimizer states in host memory, and run the optimizer there.
        activation_checkpointing: recompute activations in the backward pass, in models that support it.
        meta_init: build models inside `model_init_context` on the meta device; `prepare` fills their shards from the
            files or seeds that `chatgpt.nn` models record, one block at a time, so that no rank ever holds a whole
            model. ValueError for a module without such a record.
        stream_blocks: generate with blocks that are copied to the device one at a time from host memory (a file that
            all ranks of a machine map) instead of a full copy on the device; 'auto' does so on a GPU with too little
            free memory for one.
    """

    abilities = Abilities(sharded=True)
    _keeps_narrow: ClassVar[bool] = False  # weights are gathered in the compute dtype, without autocast
    _reduces_each_round = True

    def __init__(
        self,
        seed: int = 42,
        precision: Precision = 'auto',
        *,
        tensor_parallel: int = 1,
        sequence_parallel: int = 1,
        replicas: int = 1,
        reduce_dtype: ReduceDtype = 'fp32',
        whole_gradients_gib: float = WHOLE_GRADIENTS_GIB,
        cpu_offload: bool = False,
        activation_checkpointing: bool = False,
        meta_init: bool = False,
        stream_blocks: StreamBlocks = 'auto',
        device: str | torch.device | None = None,
        timeout_s: float = 1800.0,
        **numerics: Any,
    ) -> None:
        check_stream_blocks(stream_blocks)
        check_reduce_dtype(reduce_dtype, numerics)
        exact = numerics.get('reproducible') is not None
        given = {'cpu_offload': cpu_offload, 'stream_blocks': stream_blocks is True, 'reproducible': exact}
        given |= {'replicas': replicas != 1, 'sequence_parallel': sequence_parallel != 1}
        apart = {'reproducible': exact}
        refused = {'tensor_parallel': given, 'replicas': apart, 'sequence_parallel': apart}
        for option, parts in zip(refused, (tensor_parallel, replicas, sequence_parallel), strict=True):
            if parts == 1:
                continue
            for name in (name for name, value in refused[option].items() if value):
                raise ValueError(f'{option}={parts} does not go with {name}: leave one of them out')
            if 'WORLD_SIZE' in os.environ:  # before joining the process group
                check_world_size(int(os.environ['WORLD_SIZE']), parts, option)
        super().__init__(seed, precision, device=device, timeout_s=timeout_s, **numerics)
        self.stream_blocks, self.reduce_dtype, self.replicas = stream_blocks, reduce_dtype, replicas
        self.whole_gradients_gib = whole_gradients_gib
        self.cpu_offload = cpu_offload
        self.activation_checkpointing = activation_checkpointing
        self.meta_init = meta_init
        # The forwards of `chatgpt.nn` return views, and nothing modifies them in place.
        warnings.filterwarnings('ignore', message=r'FSDP2-wrapped module \(.*\) returned a view tensor')
        self._tensor: TensorRanks | None = None
        """`ranks`, under tensor parallelism"""
        if tensor_parallel == 1:
            shape = (replicas, check_world_size(self.world_size, replicas, 'replicas'))
            names = ('replicate', 'shard')
            self._mesh = init_device_mesh(
                self.device.type, shape[replicas == 1 :], mesh_dim_names=names[replicas == 1 :]
            )
            if sequence_parallel != 1:
                check_world_size(shape[1], sequence_parallel, 'sequence_parallel')  # a group is within a replica
                self.ranks: Any = SequenceRanks(self.ranks, sequence_parallel)
        else:
            self.ranks = self._tensor = TensorRanks(self.ranks, tensor_parallel)
            self._mesh = self._tensor.mesh['data']
        self.sums = self.numerics.sums(self.ranks, ranks_below=self._reduces_each_round)
        # An exact run in 16 bits uses autocast with fp32 weights, as under the other strategies.
        self._policy = MixedPrecisionPolicy(
            param_dtype=None if self.numerics.precision == 'fp32' or self.sums.exact else self.numerics.dtype,
            reduce_dtype=torch.float32,
            cast_forward_inputs=False,
        )
        self._sharded: dict[int, _Sharded] = {}
        """by id of a sharded module"""

    @classmethod
    def memory_model(cls, cpu_offload: bool = False, **options: Any) -> MemoryModel:
        own = {name: options[name] for name in FSDPMemory.options if name in options}
        return FSDPMemory(offloads=cpu_offload, **own, **of_numerics(options))

    # ------------------------------------------------------------------ models

    def model_init_context(self) -> AbstractContextManager[Any]:
        return torch.device('meta') if self.meta_init else nullcontext()

    def _offloaded(self, module: nn.Module) -> AbstractContextManager[None] | None:
        if self.cpu_offload:
            raise ValueError(
                "offload='idle': with cpu_offload=True frozen models wait in host memory already; leave one of them out"
            )
        return OffloadedShards(module, self.device) if self.device.type != 'cpu' else None

    def _setup_model(self, model: nn.Module, trained: bool) -> nn.Module:
        states.refuse_shared(model, f'{type(self).__name__} shards weights')
        plan = check_model(model, self._tensor.tensor_parallel) if self._tensor is not None else {}
        group = self.ranks.group if isinstance(self.ranks, SequenceRanks) else None
        if group is not None:
            check_sequences(model, group.size)
        if trained:
            self.disable_layer_drop(model)
        if self.activation_checkpointing and trained:
            _checkpoint_activations(model)
        skeleton = on_meta(model)
        sharded = self._sharded[id(model)] = _Sharded(skeleton, skeleton)
        stream = _initial_tensors(model)
        if stream is None:
            self.broadcast_weights(model)
            model.to(torch.device('cpu') if self.cpu_offload else self.device)
            for owner in model.modules():  # buffers are read on the device, so they are never offloaded
                for name, buffer in list(owner._buffers.items()):
                    if buffer is not None:
                        owner._buffers[name] = buffer.to(self.device)
        if self._tensor is not None:
            sharded.parts = parallelize(model, self._tensor.group, self._tensor.mesh['tensor'], plan)
            sharded.own_skeleton = on_meta(model)
        offload = CPUOffloadPolicy(pin_memory=self.device.type == 'cuda') if self.cpu_offload else OffloadPolicy()
        for block in transformer_blocks(model):
            fully_shard(block, mesh=self._mesh, mp_policy=self._policy, offload_policy=offload)
        fully_shard(model, mesh=self._mesh, mp_policy=self._policy, offload_policy=offload)
        whole_gradients = 4 * sum(p.numel() for p in model.parameters() if p.requires_grad)
        sharded.waits = self.sums.exact or whole_gradients <= self.whole_gradients_gib * 2**30
        reduce_scatter = TreeReduceScatter if self.sums.exact else NarrowReduceScatter
        if self.sums.exact or self.reduce_dtype != 'fp32':
            for module in model.modules():
                if isinstance(module, FSDPModule):
                    module.set_custom_reduce_scatter(reduce_scatter())
        if stream is not None:
            self._materialise(model, stream)
        if self._policy.param_dtype is not None:
            narrow_states(model, self._policy.param_dtype)
        if stream is not None:
            from chatgpt.nn.hydra import check_loaded_hydra
            from chatgpt.nn.packing import check_loaded_packing

            check_loaded_packing(model, self.device, in_fp32=self._policy.param_dtype is None)
            check_loaded_hydra(model, self.device)
        if group is not None:
            check_sequences(model, group.size).sequence_group = group  # type: ignore[assignment]
        for name, cut in sharded.parts.cuts.items():
            parameter: Any = model.get_parameter(name)
            parameter.whole_shape = cut.shape
        return model

    def _keep_narrow(self, module: nn.Module, optimizer: Optimizer | None = None) -> None:
        narrow(self._narrowable(module, optimizer), self.numerics.dtype)

    def _parts_of(self, module: nn.Module) -> Parts:
        return self._sharded[id(module)].parts if id(module) in self._sharded else Parts()

    @torch.no_grad()
    def _materialise(self, model: nn.Module, stream: Iterator[tuple[str, Tensor]]) -> None:
        """Fills a sharded meta module: every rank reads all tensors and keeps its part of each."""
        model.to_empty(device='cpu' if self.cpu_offload else self.device)
        parameters = dict(model.named_parameters(remove_duplicate=False))
        parts = self._parts_of(model)
        filled: set[int] = set()
        for name, tensor in stream:
            if name not in parameters:
                owner_name, _, buffer_name = name.rpartition('.')
                model.get_submodule(owner_name)._buffers[buffer_name] = tensor.to(self.device, copy=True)
                continue
            target = parameters[name]
            filled.add(id(target))
            tensor = parts.take(name, tensor)
            start, stop = shard_range(target) if isinstance(target, DTensor) else (0, target.numel())
            local_part(target).view(-1).copy_(tensor.reshape(-1)[start:stop])
        missing = [name for name, parameter in parameters.items() if id(parameter) not in filled]
        if missing:
            raise ValueError(
                f'{type(model).__name__}: nothing says what these parameters start as: {", ".join(missing[:5])}'
            )

    def _setup_optimizer(self, optimizer: Optimizer, model: nn.Module, names: list[list[str]]) -> Optimizer:
        if optimizer.state:
            raise ValueError(
                f'{type(self).__name__} shards parameters, and this {type(optimizer).__name__} already has states of '
                'whole ones; prepare it before its first step, then load_optimizer'
            )
        parameters = dict(model.named_parameters())
        for group, group_names in zip(optimizer.param_groups, names, strict=True):
            group['params'] = [parameters[name] for name in group_names]
        return optimizer

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
        """Yields a plain copy with full weights, gathered one tensor at a time in `dtype`, LoRA merged.

        The copy is on the device; with `stream_blocks` its blocks are copied there one at a time, or with `read_only`
        it is in host memory that the processes of a machine share; with `on_disk` it is in a mapped file in that
        folder, for saving. Under tensor parallelism it holds this process's part of the weights; with `whole` all of
        them, in host memory.
        """
        if not folded:
            raise ValueError(f'{type(self).__name__} shards weights, and adapters cannot stay apart from them')
        from chatgpt.nn.packing import reshard

        module, dtype = self.unwrap(model), dtype or self.numerics.full_dtype
        reshard(module)  # a forward without gradients leaves its outermost part in the compute dtype
        parts = self._parts_of(module)
        too_large = on_disk is None and self._tensor is None and streams(self, self.stream_blocks, module, dtype)
        apart = on_disk is None and (self._tensor is not None and whole or too_large and read_only)
        if on_disk is not None or too_large or apart:
            skeleton, values = self._sharded[id(module)].skeleton, self._whole(module.named_parameters(), parts)
            computes = too_large and not apart
            with whole_copy(self, module, skeleton, values, dtype, on_disk, computes=computes) as full:
                yield full
            return
        with self._kept_copy.reused(module, dtype) as kept:
            folded_before = kept.copied is not None
            kept.copied = self._gathered(module, dtype, kept.copied).eval()
            fold_adapters(kept.copied, in_place=folded_before)
            yield kept.copied

    def _whole(self, tensors: Iterable[tuple[str, Tensor]], parts: Parts) -> Iterator[tuple[str, Tensor]]:
        """Yields the full tensors in fp32, one at a time. Collective: exhaust it on every rank."""
        for name, tensor in tensors:
            full = whole_tensor(tensor.detach(), self.device)
            yield name, parts.join(name, full.float() if full.is_floating_point() else full)

    @torch.no_grad()
    def _gathered(self, module: nn.Module, dtype: torch.dtype, into: nn.Module | None = None) -> nn.Module:
        if into is not None:
            whole = dict(into.named_parameters())
            for name, parameter in module.named_parameters():
                whole[name].copy_(whole_tensor(parameter.detach(), self.device))
            for buffer, own in zip(into.buffers(), module.buffers(), strict=True):
                buffer.copy_(own)
            return into
        skeleton, shards = self._sharded[id(module)].own_skeleton, dict(module.named_parameters())
        weights = {
            id(parameter): whole_tensor(shards[name].detach(), self.device).to(self.device, dtype)
            for name, parameter in skeleton.named_parameters()
        }
        full = with_parameters(skeleton, weights)
        set_buffers(full, module)
        return full.to(self.device)

    # ------------------------------------------------------------------ one optimizer step

    def autocast(self, *, scoring: bool = False) -> AbstractContextManager[Any]:
        """Does not cast outside of an exact run: FSDP gathers weights in the compute dtype."""
        return super().autocast(scoring=scoring) if self.sums.exact else self._products()

    @contextmanager
    def accumulate(self, model: nn.Module, last: bool) -> Iterator[None]:
        """Returns the context of a micro-batch. Where whole gradients are kept, only the last one of a step, or of a
        round of an exact run, sums them over ranks."""
        module: Any = self.unwrap(model)
        sharded = self._sharded.get(id(module))
        waits = sharded is not None and sharded.waits and not last
        if sharded is not None:
            sharded.waiting = waits
        if waits:
            module.set_requires_gradient_sync(False)
        try:
            with super().accumulate(model, last):
                yield
        finally:
            if waits:
                module.set_requires_gradient_sync(True)

    def backward(self, loss: Tensor, model: nn.Module, optimizer: Optimizer) -> None:
        # FSDP averages over ranks, but losses are shares of a sum. `TreeReduceScatter` sums.
        super().backward(loss if self.sums.exact else loss * self.world_size, model, optimizer)

    def discard_gradients(self, optimizer: Optimizer) -> None:
        super().discard_gradients(optimizer)
        module = self._pair(optimizer).user_model
        if self._sharded[id(module)].waiting:
            drop_whole_gradients(module)

    def _step(self, optimizer: Optimizer) -> None:
        with all_cores() if self.cpu_offload else nullcontext():
            optimizer.step()

    @torch.no_grad()
    def _reduce_gradients(self, pair: Trained) -> None:
        """Sums over the tensor group the gradients that each of its processes has for its own heads only."""
        if self._tensor is not None:
            partial = self._parts_of(pair.user_model).partial
            gradients = (local_part(p.grad) for n, p in pair.named_parameters() if n in partial and p.grad is not None)
            sum_over_group(gradients, self._tensor.group)

    @property
    def _has_own_shards(self) -> bool:
        """False if another process counts and writes the same shards: of another replica, or in a tensor group."""
        first_replica = self.replicas == 1 or self.rank < self.world_size // self.replicas
        return first_replica and (self._tensor is None or self._tensor.leads)

    def _gradient_norm(self, parameters: list[Tensor]) -> float:
        if self.sums.exact:
            shards = [local_part(p.grad) for p in parameters if p.grad is not None]
            return exact_norm(shards, self.device, self.all_reduce)
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for parameter in parameters:
            local = local_part(parameter.grad) if parameter.grad is not None else None
            counts = self._has_own_shards or hasattr(parameter, 'whole_shape')
            if counts and local is not None and local.numel():
                total += torch.linalg.vector_norm(local.detach(), dtype=torch.float64).square().to(self.device)
        return math.sqrt(float(self.processes.all_reduce(total)))

    # ------------------------------------------------------------------ weights and optimizer states

    def full_state_dict(self, model: nn.Module, folder: str | os.PathLike[str] | None = None) -> dict[str, Tensor]:
        module = self.unwrap(model)
        tensors, aliases = states.named_tensors(module)
        skeleton = self._sharded[id(module)].skeleton if id(module) in self._sharded else module
        whole = self._whole(tensors.items(), self._parts_of(module))
        return gathered_state(self, states.named_tensors(skeleton)[0], aliases, whole, folder)

    def fails_together(self, state: str) -> bool:
        # An exception inside a forward leaves a block's weights gathered in the compute dtype, unfit for a checkpoint.
        # A forward that ended leaves those of the outermost part, which can be resharded.
        for pair in self._pairs.values():
            if isinstance(pair.user_model, FSDPModule):
                pair.user_model.reshard()
        owned = {id(p) for pair in self._pairs.values() for p in pair.user_model.parameters()}
        sharded = all(id(p) in owned for pair in self._pairs.values() for p in pair.parameters())
        return self.ranks.fails_together(f'{state}, {sharded}') and sharded

    def model_pieces(self, model: nn.Module) -> Iterable[Piece]:
        module = self.unwrap(model)
        return self._shards(states.named_tensors(module)[0], self._parts_of(module))

    def _optimizer_pieces(self, optimizer: Optimizer) -> Iterable[Piece]:
        pair = self._pair(optimizer)
        slots = states.slots_of(pair.optimizer, pair.named_parameters())
        return self._shards(slots, self._parts_of(pair.user_model), slots=True)

    def _shards(self, tensors: dict[str, Tensor], parts: Parts, *, slots: bool = False) -> Iterator[Piece]:
        """Yields this process's range of every sharded tensor, and on the first process the replicated ones. With
        `slots` the names are those of optimizer states."""
        for name, tensor in tensors.items():
            if isinstance(tensor, DTensor):
                start, stop = shard_range(tensor)
                local = tensor.to_local().detach().reshape(-1)
                local = local.float() if self._is_narrow(tensor) else local
                cut = parts.cuts.get(name.rpartition('/')[0] if slots else name)
                if cut is not None and parts.group is not None:
                    yield from cut.pieces(name, start, stop, local, parts.group)
                elif stop > start and self._has_own_shards:
                    yield Piece(name, tuple(tensor.shape), start, stop, local)
            elif self.is_rank_0 and tensor.numel():
                yield Piece.whole(name, tensor)

    @torch.no_grad()
    def load_model_pieces(self, model: nn.Module, reader: TensorReader, strict: bool = True) -> None:
        from chatgpt.nn.lora import has_lora

        module = self.unwrap(model)
        tensors, aliases = states.named_tensors(module)
        reader = CutReader(reader, self._parts_of(module).cuts)
        shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        kept = has_lora(module) or any(pair.user_model is module for pair in self._pairs.values())
        for name, stored in states.match_names(shapes, aliases, reader, strict=strict).items():
            fill(reader, stored, tensors[name], exactly=kept and self._is_narrow(tensors[name]))

    def _is_narrow(self, tensor: Tensor) -> bool:
        """Returns True for a frozen weight that is stored in the compute dtype."""
        return isinstance(tensor, DTensor) and tensor.dtype is self._policy.param_dtype and not tensor.requires_grad

    @torch.no_grad()
    def _load_optimizer_pieces(self, optimizer: Optimizer, reader: TensorReader) -> None:
        pair = self._pair(optimizer)
        reader = CutReader(reader, self._parts_of(pair.user_model).cuts)
        states.load_slots(pair.optimizer, dict(pair.named_parameters()), reader, fill=fill)

    def close(self) -> None:
        self._sharded.clear()
        super().close()


@dataclass
class _Sharded:
    """The record of a module that is sharded in place."""

    skeleton: nn.Module
    """a copy with meta parameters, from which full copies are made"""
    own_skeleton: nn.Module
    """a copy with meta parameters of this process's part under tensor parallelism"""
    parts: Parts = field(default_factory=Parts)
    waits: bool = False
    """True: whole gradients are kept until the last micro-batch"""
    waiting: bool = False
    """there may be whole gradients: the latest micro-batch was not the last"""


@dataclass(frozen=True)
class FSDPMemory(MemoryModel):
    """Memory of sharded fp32 weights, gradients and states; blocks are gathered in the compute dtype, in which frozen
    matrices are stored."""

    tensor_parallel: int = 1
    """number of processes that split each block's weights"""
    replicas: int = 1
    whole_gradients_gib: float = WHOLE_GRADIENTS_GIB

    options: ClassVar[tuple[str, ...]] = ('tensor_parallel', 'replicas', 'whole_gradients_gib')
    """arguments of the strategy with the same names"""
    whole: ClassVar[bool] = False
    streams: ClassVar[bool] = True

    def ranks(self, run: Layout) -> int:
        """Returns the number of ranks that share a `ModelSize`, which is one process's part of a model."""
        return run.num_processes // self.tensor_parallel // self.replicas

    def _sharded(self, size: ModelSize, run: Layout, *, trained_only: bool = False) -> int:
        """Returns the elements of rank 0's dim-0 shards."""
        return self._elements([p for p in size.parameters if p.trained or not trained_only], run)

    def _elements(self, parameters: Iterable[ParameterSize], run: Layout) -> int:
        shapes = [p.shape for p in parameters]
        return sum(math.ceil(s[0] / self.ranks(run)) * math.prod(s[1:]) if s else 1 for s in shapes)

    def trained(self, name: str, size: ModelSize, run: Layout) -> Memory:
        trained = self._sharded(size, run, trained_only=True)
        return self._trained(name, run, self._stored(size, run), trained, size.num_trained)

    def frozen(self, name: str, size: ModelSize, run: Layout) -> Memory:
        return Memory().add(f'{name} weights', 4 * self._stored(size, run), host=self.offloads)

    def _stored(self, size: ModelSize, run: Layout) -> float:
        """Returns the fp32 elements of rank 0's shards."""
        narrow = self._elements([p for p in size.parameters if p.narrow], run) if self.keeps_narrow else 0
        return self._sharded(size, run) - narrow * (1 - run.itemsize / 4)

    def sums(self, name: str, size: ModelSize, run: Layout) -> Memory:
        memory = Memory()
        if 4 * size.trained <= self.whole_gradients_gib * 2**30 and not self.atoms and self.ranks(run) > 1:
            memory.add(f'{name} sums of gradients', 4 * size.trained)
        return memory

    def gathered(self, size: ModelSize, run: Layout, *, backward: bool) -> int:
        trained = [p for p in size.parameters if p.trained and p.block is not None]
        reduced = 4 * max(ModelSize(tuple(trained)).blocks(), default=0)  # a block's whole gradients in fp32
        # one process gathers nothing ahead: each block is freed before the next is gathered
        whole = size.two_blocks if self.ranks(run) > 1 else size.outside + max(size.blocks(), default=0)
        return (4 if self.autocasts else run.itemsize) * whole + (reduced if backward else 0)

    def kept_gathered(self, size: ModelSize, run: Layout) -> int:
        # parameters outside the blocks belong to the root, which only a backward reshards
        return (4 if self.autocasts else run.itemsize) * size.outside

    def growing(self, size: ModelSize, run: Layout, *, again: bool) -> float:
        return super().growing(size, run, again=again) / self.ranks(run)

    def step(self, size: ModelSize, run: Layout) -> int:
        norm = 8 * math.ceil(size.largest_trained / self.ranks(run))  # a shard in fp64, for the gradient norm
        if self.offloads:
            return 0
        return max(norm, 4 * self._sharded(size, run, trained_only=True) if self.has_temporary(run) else 0)

    def full_copy(self, size: ModelSize, run: Layout) -> Memory:
        itemsize = self.full_itemsize(run)
        if self.ranks(run) == 1 and itemsize == 4 and not run.stream_blocks:  # the only shards are the weights
            return Memory().add('full copy', itemsize * size.adapted)
        return gathered_copy(size, run, itemsize)


def _initial_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]] | None:
    """Returns the initial tensors of a model on the meta device; None for a model that is not."""
    if not any(t.is_meta for t in (*model.parameters(), *model.buffers())):
        return None
    from chatgpt.nn.weights import initial_tensors

    return initial_tensors(model)


def _checkpoint_activations(model: nn.Module) -> None:
    from chatgpt.nn.trunk import recompute_activations

    module: Any
    for module in model.modules():
        if getattr(module, 'supports_gradient_checkpointing', False):
            recompute_activations(module)
            return
    raise ValueError(
        f'activation_checkpointing: {type(model).__name__} has no model that can recompute its activations'
    )
