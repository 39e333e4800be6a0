"""`FSDPStrategy`: parameters, gradients and optimizer states sharded over processes by torch's own `fully_shard`
(FSDP2).

Every transformer block is gathered for its forward and backward and then freed; other parameters belong to the root
module. Modules are sharded in place, so all of their methods can be called, and optimizers get the sharded parameters.
With `tensor_parallel` the mesh has two dimensions: each block's matrices are split over the processes of a group, and
`fully_shard` shards the parts over ranks.
"""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.optim import Optimizer

from chatgpt.strategies import states
from chatgpt.strategies.base import Abilities
from chatgpt.strategies.checkpoint.layout import Piece, TensorReader
from chatgpt.strategies.copies import (
    Offloaded,
    OffloadedShards,
    fold_adapters,
    narrow_states,
    readable,
    with_parameters,
)
from chatgpt.strategies.memory import Layout, Memory, MemoryModel, ModelSize, gathered_copy, of_numerics
from chatgpt.strategies.pairs import Trained
from chatgpt.strategies.precision import Precision
from chatgpt.strategies.processes import ProcessGroupStrategy
from chatgpt.strategies.ranks import check_world_size
from chatgpt.strategies.streaming import (
    StreamBlocks,
    check_stream_blocks,
    gathered_state,
    on_meta,
    set_buffers,
    streams,
    transformer_blocks,
    whole_copy,
)
from chatgpt.strategies.sums import Sums, exact_norm, local_part, tree_reduce_scatter
from chatgpt.strategies.tensor_parallel import CutReader, Parts, check_model, parallelize, sum_over_group
from chatgpt.strategies.tensor_ranks import TensorRanks


class FSDPStrategy(ProcessGroupStrategy):
    """Fully sharded data parallelism. Launch with torchrun.

    Args:
        tensor_parallel: number of neighbouring processes that split each block's matrices and form one rank
            (`chatgpt.strategies.tensor_parallel`). Needs a model with a plan for it in transformers. Generation splits
            the weights in the same way.
        precision: dtype in which blocks are gathered and computed; shards, gradients and optimizer states stay fp32.
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
    _keeps_narrow: ClassVar[bool] = False  # shards are fp32 and gathered in the compute dtype
    _reduces_each_round = True

    def __init__(
        self,
        seed: int = 42,
        precision: Precision = 'auto',
        *,
        tensor_parallel: int = 1,
        cpu_offload: bool = False,
        activation_checkpointing: bool = False,
        meta_init: bool = False,
        stream_blocks: StreamBlocks = 'auto',
        device: str | torch.device | None = None,
        timeout_s: float = 1800.0,
        **numerics: Any,
    ) -> None:
        check_stream_blocks(stream_blocks)
        if tensor_parallel != 1:
            given = {'cpu_offload': cpu_offload, 'stream_blocks': stream_blocks is True}
            given['reproducible'] = numerics.get('reproducible') is not None
            for name in (name for name, value in given.items() if value):
                raise ValueError(f'tensor_parallel={tensor_parallel} does not go with {name}: leave one of them out')
            if 'WORLD_SIZE' in os.environ:  # before joining the process group
                check_world_size(int(os.environ['WORLD_SIZE']), tensor_parallel)
        super().__init__(seed, precision, device=device, timeout_s=timeout_s, **numerics)
        self.stream_blocks = stream_blocks
        self.cpu_offload = cpu_offload
        self.activation_checkpointing = activation_checkpointing
        self.meta_init = meta_init
        # The forwards of `chatgpt.nn` return views, and nothing modifies them in place.
        warnings.filterwarnings('ignore', message=r'FSDP2-wrapped module \(.*\) returned a view tensor')
        self._tensor: TensorRanks | None = None
        """`ranks`, under tensor parallelism"""
        if tensor_parallel == 1:
            self._mesh = init_device_mesh(self.device.type, (self.world_size,))
        else:
            self._tensor = TensorRanks(self.ranks, tensor_parallel)
            self.ranks: Any = self._tensor
            self.sums = Sums(self.ranks)
            self._mesh = self._tensor.mesh['data']
        # An exact run in 16 bits uses autocast with fp32 weights, as under the other strategies.
        self._policy = MixedPrecisionPolicy(
            param_dtype=None if self.numerics.precision == 'fp32' or self.sums.exact else self.numerics.dtype,
            reduce_dtype=torch.float32,
            cast_forward_inputs=False,
        )
        self._sharded: dict[int, _Sharded] = {}
        """by id of a sharded module"""

    @classmethod
    def memory_model(cls, cpu_offload: bool = False, tensor_parallel: int = 1, **options: Any) -> MemoryModel:
        return FSDPMemory(offloads=cpu_offload, tensor_parallel=tensor_parallel, **of_numerics(options))

    # ------------------------------------------------------------------ models

    def model_init_context(self) -> AbstractContextManager[Any]:
        return torch.device('meta') if self.meta_init else nullcontext()

    def _offloaded(self, module: nn.Module) -> Offloaded | None:
        if self.cpu_offload:
            raise ValueError(
                "offload='idle': with cpu_offload=True frozen models wait in host memory already; leave one of them out"
            )
        return OffloadedShards(module, self.device) if self.device.type != 'cpu' else None

    def _setup_model(self, model: nn.Module, trained: bool) -> nn.Module:
        states.refuse_shared(model, f'{type(self).__name__} shards weights')
        plan = check_model(model, self._tensor.tensor_parallel) if self._tensor is not None else {}
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
        if self.sums.exact:
            for module in model.modules():
                if isinstance(module, FSDPModule):
                    module.set_custom_reduce_scatter(_TreeReduceScatter())
        if stream is not None:
            self._materialise(model, stream)
        if self._policy.param_dtype is not None:
            narrow_states(model, self._policy.param_dtype)
        if stream is not None:
            from chatgpt.nn.hydra import check_loaded_hydra
            from chatgpt.nn.packing import check_loaded_packing

            check_loaded_packing(model, self.device, in_fp32=self._policy.param_dtype is None)
            check_loaded_hydra(model, self.device)
        for name, cut in sharded.parts.cuts.items():
            parameter: Any = model.get_parameter(name)
            parameter.whole_shape = cut.shape
        return model

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
            start, stop = _range(target) if isinstance(target, DTensor) else (0, target.numel())
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
        on_disk: str | os.PathLike[str] | None = None,
    ) -> Iterator[nn.Module]:
        """Yields a plain copy with full weights, gathered one tensor at a time in `dtype`, LoRA merged.

        The copy is on the device; with `stream_blocks` its blocks are copied there one at a time; with `on_disk` it is
        in a mapped file in that folder, for saving. Under tensor parallelism it holds this process's part of the
        weights; with `whole` all of them, in host memory. With `read_only` weights are gathered as they are read.
        """
        module, dtype = self.unwrap(model), dtype or self.numerics.full_dtype
        parts, skeleton = self._parts_of(module), self._sharded[id(module)].skeleton
        if read_only and on_disk is None:

            def gather(shard: Tensor, name: str) -> Tensor:
                return parts.join(name, _full(shard, self.device))

            yield readable(self, module, skeleton, dtype, gather, _called_as_forward)
            return
        too_large = on_disk is None and self._tensor is None and streams(self, self.stream_blocks, module, dtype)
        if on_disk is not None or too_large or (self._tensor is not None and whole):
            values = self._whole(module.named_parameters(), parts)
            with whole_copy(self, module, skeleton, values, dtype, on_disk, computes=too_large) as full:
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
            yield name, parts.join(name, _full(tensor.detach(), self.device))

    @torch.no_grad()
    def _gathered(self, module: nn.Module, dtype: torch.dtype, into: nn.Module | None = None) -> nn.Module:
        if into is not None:
            whole = dict(into.named_parameters())
            for name, parameter in module.named_parameters():
                whole[name].copy_(_full(parameter.detach(), self.device))
            for buffer, own in zip(into.buffers(), module.buffers(), strict=True):
                buffer.copy_(own)
            return into
        skeleton, shards = self._sharded[id(module)].own_skeleton, dict(module.named_parameters())
        weights = {
            id(parameter): _full(shards[name].detach(), self.device).to(self.device, dtype)
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
        """Returns the context of a micro-batch. An exact run sums the gradients of a round before those of ranks."""
        module: Any = self.unwrap(model)
        waits = self.sums.exact and not last
        if waits:
            module.set_requires_gradient_sync(False)
        try:
            with super().accumulate(model, last):
                yield
        finally:
            if waits:
                module.set_requires_gradient_sync(True)

    def backward(self, loss: Tensor, model: nn.Module, optimizer: Optimizer) -> None:
        # FSDP averages over ranks, but losses are shares of a sum. `_TreeReduceScatter` sums.
        super().backward(loss if self.sums.exact else loss * self.world_size, model, optimizer)

    @torch.no_grad()
    def _reduce_gradients(self, pair: Trained) -> None:
        """Sums over the tensor group the gradients that each of its processes has for its own heads only."""
        if self._tensor is not None:
            partial = self._parts_of(pair.user_model).partial
            gradients = (local_part(p.grad) for n, p in pair.named_parameters() if n in partial and p.grad is not None)
            sum_over_group(gradients, self._tensor.group)

    def _gradient_norm(self, parameters: list[Tensor]) -> float:
        if self.sums.exact:
            shards = [local_part(p.grad) for p in parameters if p.grad is not None]
            return exact_norm(shards, self.device, self.all_reduce)
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for parameter in parameters:
            local = local_part(parameter.grad) if parameter.grad is not None else None
            counts = self.ranks.leads or hasattr(parameter, 'whole_shape')  # count replicas in a tensor group once
            if counts and local is not None and local.numel():
                total += torch.linalg.vector_norm(local.detach(), dtype=torch.float64).square().to(self.device)
        return math.sqrt(float(self.processes.all_reduce(total)))

    def _scale_gradients(self, parameters: list[Tensor], factor: float) -> None:
        for gradient in (p.grad for p in parameters if p.grad is not None and factor != 1.0):
            local_part(gradient).mul_(factor)

    # ------------------------------------------------------------------ weights and optimizer states

    def full_state_dict(self, model: nn.Module, folder: str | os.PathLike[str] | None = None) -> dict[str, Tensor]:
        module = self.unwrap(model)
        tensors, aliases = states.named_tensors(module)
        skeleton = self._sharded[id(module)].skeleton if id(module) in self._sharded else module
        whole = self._whole(tensors.items(), self._parts_of(module))
        return gathered_state(self, states.named_tensors(skeleton)[0], aliases, whole, folder)

    def fails_together(self, state: str) -> bool:
        # An exception inside a forward leaves a block's weights gathered in the compute dtype, unfit for a checkpoint.
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
                start, stop = _range(tensor)
                local = tensor.to_local().detach().reshape(-1)
                cut = parts.cuts.get(name.rpartition('/')[0] if slots else name)
                if cut is not None and parts.group is not None:
                    yield from cut.pieces(name, start, stop, local, parts.group)
                elif stop > start and self.ranks.leads:
                    yield Piece(name, tuple(tensor.shape), start, stop, local)
            elif self.is_rank_0 and tensor.numel():
                yield Piece.whole(name, tensor)

    @torch.no_grad()
    def load_model_pieces(self, model: nn.Module, reader: TensorReader, strict: bool = True) -> None:
        module = self.unwrap(model)
        tensors, aliases = states.named_tensors(module)
        reader = CutReader(reader, self._parts_of(module).cuts)
        shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        for name, stored in states.match_names(shapes, aliases, reader, strict=strict).items():
            _fill(reader, stored, tensors[name])

    @torch.no_grad()
    def _load_optimizer_pieces(self, optimizer: Optimizer, reader: TensorReader) -> None:
        pair = self._pair(optimizer)
        reader = CutReader(reader, self._parts_of(pair.user_model).cuts)
        states.load_slots(pair.optimizer, dict(pair.named_parameters()), reader, fill=_fill)

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


class _TreeReduceScatter(ReduceScatter):
    """A reduce-scatter that sums in the fixed order of `reproducible='exact'`, for any `op`."""

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        output_tensor.copy_(tree_reduce_scatter(input_tensor, group))


@dataclass(frozen=True)
class FSDPMemory(MemoryModel):
    """Memory of sharded fp32 weights, gradients and states; blocks are gathered in the compute dtype."""

    tensor_parallel: int = 1
    """number of processes that split each block's weights"""

    whole: ClassVar[bool] = False
    streams: ClassVar[bool] = True

    def ranks(self, run: Layout) -> int:
        """Returns the number of ranks that share a `ModelSize`, which is one process's part of a model."""
        return run.num_processes // self.tensor_parallel

    def _sharded(self, size: ModelSize, run: Layout, *, trained_only: bool = False) -> int:
        """Returns the elements of rank 0's dim-0 shards."""
        shapes = [p.shape for p in size.parameters if p.trained or not trained_only]
        return sum(math.ceil(s[0] / self.ranks(run)) * math.prod(s[1:]) if s else 1 for s in shapes)

    def trained(self, name: str, size: ModelSize, run: Layout) -> Memory:
        own, trained = self._sharded(size, run), self._sharded(size, run, trained_only=True)
        return self._trained(name, run, own, trained, size.num_trained)

    def frozen(self, name: str, size: ModelSize, run: Layout) -> Memory:
        memory = Memory()
        memory.add(f'{name} weights', 4 * self._sharded(size, run), host=self.offloads)
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
            memory = Memory()
            memory.add('full copy', itemsize * size.adapted)
            return memory
        return gathered_copy(size, run, itemsize)


def _initial_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]] | None:
    """Returns the initial tensors of a model on the meta device; None for a model that is not."""
    if not any(t.is_meta for t in (*model.parameters(), *model.buffers())):
        return None
    from chatgpt.nn.weights import initial_tensors

    return initial_tensors(model)


def _checkpoint_activations(model: nn.Module) -> None:
    module: Any
    for module in model.modules():
        if getattr(module, 'supports_gradient_checkpointing', False) and hasattr(
            module, 'gradient_checkpointing_enable'
        ):
            module.gradient_checkpointing_enable(gradient_checkpointing_kwargs={'use_reentrant': False})
            return
    raise ValueError(
        f'activation_checkpointing: {type(model).__name__} has no model that can recompute its activations'
    )


def _full(tensor: Tensor, device: torch.device) -> Tensor:
    """Returns the full tensor on the device of its shards. Collective if it is sharded.

    Shards in host memory are sent through `device` in pieces of bounded size, since NCCL does not take CPU tensors.
    """
    if not isinstance(tensor, DTensor):
        return tensor
    local = tensor.to_local()
    if local.device.type == device.type:
        return tensor.full_tensor()
    ranks = tensor.device_mesh.size()
    longest = -(-tensor.shape[0] // ranks) * math.prod(tensor.shape[1:])  # the largest shard, as torch.chunk splits
    whole = local.new_empty(tensor.shape)
    mine, flat = local.reshape(-1), whole.view(-1)
    most = max(1, states.CHUNK // ranks)
    for at in range(0, longest, most):
        width = min(most, longest - at)
        piece = torch.zeros(width, dtype=local.dtype, device=device)
        own = mine[at : at + width]
        piece[: len(own)].copy_(own)
        pieces = torch.empty(ranks * width, dtype=local.dtype, device=device)
        dist.all_gather_into_tensor(pieces, piece, group=tensor.device_mesh.get_group())
        for rank, values in enumerate(pieces.split(width)):
            start, end = rank * longest, min((rank + 1) * longest, len(flat))
            target = flat[start + at : max(start + at, min(start + at + width, end))]
            target.copy_(values[: len(target)])
    return whole


def _called_as_forward(function: Callable[[Any], Tensor], module: Any) -> Tensor:
    """Calls a function that computes with a sharded module. FSDP gathers the root's weights before a method that it
    knows as a forward, and until they are freed its parameters are no shards."""
    module.computes = lambda: function(module)
    register_fsdp_forward_method(module, 'computes')
    try:
        with torch.no_grad():
            return module.computes()
    finally:
        del module.computes
        module.reshard()


def _range(tensor: DTensor) -> tuple[int, int]:
    """Returns the flat range [start, stop) of this rank's dim-0 shard."""
    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    row = math.prod(tensor.shape[1:])
    start = offset[0] * row if math.prod(shape) else 0
    return start, start + math.prod(shape)


def _fill(reader: TensorReader, stored: str, tensor: Tensor) -> None:
    """Fills this rank's part of `tensor`, in chunks of bounded size."""
    if not isinstance(tensor, DTensor):
        states.copy_from(reader, stored, tensor)
        return
    start, stop = _range(tensor)
    local = tensor.to_local().detach().view(-1)
    for at in range(start, stop, states.CHUNK):
        end = min(at + states.CHUNK, stop)
        local[at - start : end - start].copy_(reader.read(stored, at, end))
