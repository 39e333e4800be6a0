"""Shards as FSDP2 makes them, DTensors sharded in dim 0: whole tensors, ranges and loading of shards, and reductions of
gradients."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from chatgpt.strategies import states
from chatgpt.strategies.checkpoint.layout import CheckpointMismatch, TensorReader
from chatgpt.strategies.sums import tree_reduce_scatter


class TreeReduceScatter(ReduceScatter):
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
        output_tensor.copy_(self.reduced(input_tensor, group, op))

    def reduced(self, whole: Tensor, group: dist.ProcessGroup, op: Any) -> Tensor:
        """Returns this rank's part of the sum of `whole` over the group."""
        return tree_reduce_scatter(whole, group)


class NarrowReduceScatter(TreeReduceScatter):
    """A reduce-scatter of fp32 gradients that sends and sums them in bf16."""

    def reduced(self, whole: Tensor, group: dist.ProcessGroup, op: Any) -> Tensor:
        part = whole.new_empty(whole.numel() // group.size(), dtype=torch.bfloat16)
        # torch 2.13 renames it
        reduce_scatter = getattr(dist, 'reduce_scatter_single', None) or dist.reduce_scatter_tensor
        reduce_scatter(part, whole.bfloat16(), op=op, group=group)
        return part


def drop_whole_gradients(model: Any) -> None:
    """Frees gradients of backwards without a reduction."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            state = module._get_fsdp_state()
            groups = getattr(state, '_fsdp_param_groups', None) or [state._fsdp_param_group]  # one before torch 2.13
            for parameter in (p for group in groups if group is not None for p in group.fsdp_params):
                parameter.unsharded_accumulated_grad = None
                if hasattr(parameter, '_unsharded_param'):
                    parameter._unsharded_param.grad = None


def whole_tensor(tensor: Tensor, device: torch.device) -> Tensor:
    """Returns the full tensor on the device of its shards. Collective if it is sharded.

    Shards in host memory are sent through `device` in pieces of bounded size, since NCCL does not take CPU tensors.
    """
    if not isinstance(tensor, DTensor):
        return tensor
    local = tensor.to_local()
    if local.device.type == device.type:
        return tensor.full_tensor()
    mesh_dim = tensor.device_mesh.ndim - 1  # before it are replicas
    ranks, group = tensor.device_mesh.size(mesh_dim), tensor.device_mesh.get_group(mesh_dim)
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
        dist.all_gather_into_tensor(pieces, piece, group=group)
        for rank, values in enumerate(pieces.split(width)):
            start, end = rank * longest, min((rank + 1) * longest, len(flat))
            target = flat[start + at : max(start + at, min(start + at + width, end))]
            target.copy_(values[: len(target)])
    return whole


def shard_range(tensor: DTensor) -> tuple[int, int]:
    """Returns the flat range [start, stop) of this rank's dim-0 shard."""
    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    row = math.prod(tensor.shape[1:])
    start = offset[0] * row if math.prod(shape) else 0
    return start, start + math.prod(shape)


def fill(reader: TensorReader, stored: str, tensor: Tensor, *, exactly: bool = False) -> None:
    """Fills this rank's part of `tensor`, in chunks of bounded size. CheckpointMismatch if `exactly` and its dtype
    rounds a value."""
    if not isinstance(tensor, DTensor):
        states.copy_from(reader, stored, tensor)
        return
    start, stop = shard_range(tensor)
    local = tensor.to_local().detach().view(-1)
    for at in range(start, stop, states.CHUNK):
        end = min(at + states.CHUNK, stop)
        values = reader.read(stored, at, end)
        if exactly and not torch.equal(values.to(tensor.dtype).to(values.dtype), values):
            raise CheckpointMismatch(
                f'{stored}: a frozen weight of this model is stored in {tensor.dtype}, which would round that of the '
                "checkpoint; load it before `prepare`, or give precision='fp32'"
            )
        local[at - start : end - start].copy_(values)
