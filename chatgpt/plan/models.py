"""Models without memory: counts the modules of a run on the meta device, and runs them on fake tensors to measure
activations.

The trace counts the bytes of every storage from its creation by an operation until it is freed, so saved activations,
chunked heads and recomputation are those of the real code. Two small depths are traced; memory is linear in the number
of layers.
"""

from __future__ import annotations

import copy
import dataclasses
import math
import weakref
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as SequenceOf
from contextlib import contextmanager, suppress
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from chatgpt.batching import collate
from chatgpt.functional import logprobs
from chatgpt.nn.trunk import (
    beyond_keys_and_values,
    cache_keyword,
    dropout_off,
    recompute_activations,
    text_config,
    width_of,
)
from chatgpt.plan.setup import Setup
from chatgpt.strategies.copies import matmul_weights, narrow, stored_weights
from chatgpt.strategies.memory import ModelSize, ParameterSize
from chatgpt.strategies.sequence_parallel import SequenceGroup, check_sequences, copies_of_keys
from chatgpt.strategies.streaming import transformer_blocks
from chatgpt.strategies.tensor_parallel import check_model, parallelize
from chatgpt.strategies.tensor_ranks import TensorGroup
from chatgpt.types import Batch, Sequence

LEAST_PACKED = 1 << 17
"""the local engine packs an `nn.Linear`'s weight for a CPU from this number of elements on, and every `Conv1D`'s
(`chatgpt.rollout.local.cpu_speed`)"""
TRACED = (2, 4)
"""traced depths; each further layer adds the mean difference between these two"""


def build(kind: str, config: Any, setup: Setup, layers: int | None = None) -> nn.Module:
    """Builds an actor, critic, reward model or initial model on the meta device as in a run, in fp32. With tensor
    parallelism one process's part of it."""
    model: Any = _build(kind, copy.deepcopy(config), setup, layers)
    keep_part(model, setup.tensor_parallel)
    if setup.sequence_parallel > 1:
        trunk: Any = check_sequences(model, setup.sequence_parallel)
        trunk.sequence_group = FirstOfSequence(None, 0, setup.sequence_parallel)
    if setup.logprob_kernel != 'auto' and hasattr(model, 'logprob_kernel'):
        # Triton's kernels cannot be traced; like the fused one, liger's do not hold the logits of all rows.
        model.logprob_kernel = 'plain' if setup.logprob_kernel == 'plain' else 'fused'
    model.folder_dtype = getattr(text_config(config), 'dtype', None)
    return model


def _build(kind: str, config: Any, setup: Setup, layers: int | None) -> nn.Module:
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModel, AutoModelForCausalLM

    from chatgpt.nn import Actor, Critic, RewardModel

    if layers is not None:
        _set_layers(config, layers)
    # the blocks that are named may not be among the few of a trace
    adapters = {'targets': setup.lora_target_modules if layers is None else None}
    with torch.device('meta'):
        auto = AutoModelForCausalLM if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING else AutoModel
        model = auto.from_config(config, dtype=torch.float32)
        learns = setup.shared_trunk or kind in ('actor', 'critic') or setup.task == 'reward_model'
        if setup.gradient_checkpointing and learns:
            recompute_activations(model)
        if setup.shared_trunk:
            return _role(kind, model, setup, adapters)
        if kind == 'actor':
            unfrozen = setup.num_layers_unfrozen if setup.num_layers_unfrozen > 0 else None
            if unfrozen is not None and layers is not None:
                unfrozen = min(unfrozen, layers)
            shares = setup.critic == 'shared' and setup.task == 'ppo'
            head = (_bins_head(config, setup) or True) if shares else None
            return Actor(model, setup.lora_rank, value_head=head, num_layers_unfrozen=unfrozen, lora_options=adapters)
        if kind == 'critic':
            return Critic(model, _bins_head(config, setup), setup.lora_rank, lora_options=adapters)
        if kind == 'reward':
            if setup.task != 'reward_model':
                return RewardModel(model).requires_grad_(False)
            return RewardModel(model, lora_rank=setup.lora_rank, lora_options=adapters)
        return Actor(model).requires_grad_(False)


def _role(kind: str, model: Any, setup: Setup, adapters: Any) -> nn.Module:
    """Builds a model on a shared trunk with its base in the compute dtype; `make_plan` accounts for 4 bits."""
    from chatgpt.nn.shared import SharedTrunk

    trunk = SharedTrunk(model, dtype=torch.float32 if setup.precision == 'fp32' else torch.bfloat16)
    if kind in ('actor', 'initial'):
        return trunk.actor(setup.lora_rank, lora_options=adapters)
    if kind == 'critic':
        return trunk.critic(setup.lora_rank, value_head=_bins_head(model.config, setup), lora_options=adapters)
    return trunk.reward_model(setup.lora_rank, lora_options=adapters)


def _bins_head(config: Any, setup: Setup) -> Any:
    """Returns a head of the critic's bins; None if the critic has one output."""
    from chatgpt.nn import CategoricalHead

    return CategoricalHead(width_of(config), **setup.critic_support) if setup.critic_support else None  # type: ignore[arg-type]


def kept_in_16_bits(model: Any) -> list[nn.Parameter]:
    """Returns the parameters that a run in 16 bits keeps in 16 bits: of a model that is frozen, or learns whole with
    fp32 masters, all of the transformers model in it; under adapters those that only matrix products read, if the
    model's folder is in 16 bits."""
    stored, frozen = stored_weights(model), not any(p.requires_grad for p in model.parameters())
    if stored and (frozen or all(p.requires_grad for p in stored)):
        return stored
    if not frozen and getattr(model, 'folder_dtype', None) not in (torch.bfloat16, torch.float16):
        return []
    return [p for p in matmul_weights(model) if not p.requires_grad]


def num_layers(config: Any) -> int:
    return int(text_config(config).num_hidden_layers)


def vocab_size(config: Any) -> int:
    return int(text_config(config).vocab_size)


def _set_layers(config: Any, layers: int) -> None:
    text = text_config(config)
    text.num_hidden_layers = layers
    kinds = getattr(text, 'layer_types', None)
    if kinds:
        with suppress(AttributeError):  # where it follows from the depth
            text.layer_types = list(kinds)[:layers]


def measure(model: nn.Module) -> ModelSize:
    """Counts a module's parameters."""
    from transformers.pytorch_utils import Conv1D

    from chatgpt.nn import lora

    block_of = {id(p): i for i, block in enumerate(transformer_blocks(model)) for p in block.parameters()}
    kept = {id(p) for p in kept_in_16_bits(model)}
    parameters = tuple(
        ParameterSize(n, tuple(p.shape), p.requires_grad, block_of.get(id(p)), id(p) in kept)
        for n, p in model.named_parameters()
    )
    adapted = [layer for layer in lora.lora_layers(model).values() if not layer.shares_base]
    plain = (nn.Linear, Conv1D, lora.LoRALinear, lora.LoRAConv1D)
    multiplied: list[Any] = [m for m in model.modules() if type(m) in plain]
    packable = sum(m.weight.numel() for m in multiplied if isinstance(m, Conv1D) or m.weight.numel() >= LEAST_PACKED)
    return ModelSize(parameters, sum(layer.weight.numel() for layer in adapted), packable)


# ---------------------------------------------------------------------- parts of layers


@dataclasses.dataclass(frozen=True, eq=False)
class FirstOfGroup(TensorGroup):
    """The first process of a group without the others: its results are wrong, but their memory is right."""

    def sum(self, x: Tensor, op: Any = None) -> Tensor:
        return x.detach().clone(memory_format=torch.contiguous_format)

    def joined(self, x: Tensor, width: int, dim: int = -1) -> Tensor:
        own = x.detach().contiguous()
        return torch.cat([torch.empty_like(own) for _ in range(self.size)], dim).narrow(dim, 0, width)


class FirstOfSequence(FirstOfGroup, SequenceGroup):
    """The same of a group whose processes share sequences."""

    def exchanged(self, blocks: Tensor) -> Tensor:
        return torch.empty_like(blocks)


def exchanged_bytes(config: Any, setup: Setup) -> int:
    """Returns the bytes that a process sends to the others of its rank while one trained model learns from one sequence
    of full length: in each layer queries, keys, values and outputs, in each forward and backward, and the last hidden
    states once in both."""
    text, size = text_config(config), setup.sequence_parallel
    heads = text.num_attention_heads
    keys = getattr(text, 'num_key_value_heads', None) or heads
    width = getattr(text, 'head_dim', None) or text.hidden_size // heads
    part = -(-(setup.max_prompt_tokens + setup.max_new_tokens) // size)
    passes = 3 if setup.gradient_checkpointing else 2
    in_layer = 2 * (heads + keys * copies_of_keys(heads, keys, size)) * width * (size - 1) // size
    states = 2 * width_of(config) * (size - 1)
    return setup.itemsize * part * (num_layers(config) * passes * in_layer + states)


def keep_part(module: nn.Module, tensor_parallel: int) -> None:
    """Reduces `module`, on the meta device, to the part of the first process of a rank. Raises ValueError for a model
    without support for tensor parallelism of that size.
    """
    if tensor_parallel > 1:
        parallelize(module, FirstOfGroup(None, 0, tensor_parallel), None, check_model(module, tensor_parallel))


def can_be_cut(module: nn.Module, tensor_parallel: int) -> bool:
    try:
        check_model(module, tensor_parallel)
    except ValueError:
        return False
    return True


# ---------------------------------------------------------------------- traces


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of live storages that operations in this mode have created, and the peak of each part of the
    time: parts follow one another, and `part` names the present one."""

    def __init__(self, already_there: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self.live, self.part = 0, 'start'
        self.peaks: dict[str, int] = {}
        self._seen: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()
        for tensor in already_there:  # not counted if an operation returns a view of them
            self._seen[tensor.untyped_storage()] = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                if storage not in self._seen:
                    self._seen[storage] = True
                    size = storage.nbytes()
                    self.live += size
                    self.peaks[self.part] = max(self.peaks.get(self.part, 0), self.live)
                    weakref.finalize(storage, self._freed, size)
        return out

    @property
    def peak(self) -> int:
        return max(self.peaks.values(), default=0)

    def divide(self, blocks: SequenceOf[nn.Module]) -> None:
        """Lets a backward pass be in the part 'middle' between the gradients of the last block and those of the first,
        and in 'end' from there on."""

        def begin(part: str) -> Callable[[Tensor], None]:
            return lambda parameter: setattr(self, 'part', part)

        for number, part in {len(blocks) - 2: 'middle', 0: 'end'}.items():
            for parameter in blocks[number].parameters():
                if parameter.requires_grad:
                    parameter.register_post_accumulate_grad_hook(begin(part))

    def _freed(self, size: int) -> None:
        self.live -= size


class _KeepsLayers:
    """A `layerdrop` that drops no layer without comparing it with a random number, which a fake tensor does not
    allow."""

    def __gt__(self, other: Any) -> bool:
        return False


@contextmanager
def faked(model: nn.Module) -> Iterator[Any]:
    """Inside this context a meta module has fake CPU tensors, which propagate shapes without computing.

    Two checks of values in transformers are replaced: it detects several sequences in one row by their positions, and
    makes a mask if it cannot read these; the rows of `batch_of` hold one sequence each, without a mask in a run. OPT of
    transformers 5.17 makes a mask of ones and checks whether all of it is ones. Experts are multiplied one by one:
    torch's grouped product takes other dtypes without data than with it.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode
    from transformers import masking_utils
    from transformers.integrations import moe

    made: dict[int, Any] = {}
    one_per_row = mock.patch.object(masking_utils, 'find_packed_sequence_indices', lambda position_ids: None)
    all_real = mock.patch.object(masking_utils, 'fast_all', lambda mask: True, create=True)
    one_by_one = mock.patch.object(moe, '_can_use_grouped_mm', lambda *args, **kwargs: False, create=True)
    with one_per_row, all_real, one_by_one, FakeTensorMode(allow_non_fake_inputs=True) as mode:
        owner: Any
        for owner in model.modules():
            if hasattr(owner, 'layerdrop'):
                owner.layerdrop = _KeepsLayers()  # type: ignore[assignment]
            for key, parameter in owner._parameters.items():
                if parameter is not None:
                    if id(parameter) not in made:
                        empty = torch.empty(parameter.shape, dtype=parameter.dtype)
                        made[id(parameter)] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
                    owner._parameters[key] = made[id(parameter)]
            for key, buffer in owner._buffers.items():
                if buffer is not None:
                    owner._buffers[key] = torch.empty(buffer.shape, dtype=buffer.dtype)
        yield mode


def batch_of(rows: int, setup: Setup) -> Batch:
    """Returns a batch of rows of the full length, which begin with the same tokens as the run's prompts do; two rows of
    a reward model are a pair with one prompt. On a CPU the last of several rows is a token shorter, for attention pads
    sequences of different lengths there."""
    sequences = []
    for row in range(rows):
        shorter = not setup.on_cuda and 0 < row == rows - 1
        num_new = max(setup.max_new_tokens - shorter, 1)
        ids = torch.full((setup.max_prompt_tokens + num_new,), row + 1)
        ids[: setup.max_prompt_tokens] = row // setup.record_size + 1
        ids[: min(setup.shared_prompt_tokens, setup.max_prompt_tokens)] = 0
        prompt, response = ids.split([setup.max_prompt_tokens, num_new])
        mask = torch.ones(num_new, dtype=torch.bool)
        sequences.append(Sequence(prompt_ids=prompt, response_ids=response, response_mask=mask))
    return collate(sequences)


def traced(
    make: Callable[[int | None], nn.Module],
    config: Any,
    run: Callable[[nn.Module, Any], None],
    depth: int | None = None,
) -> int:
    """Returns the peak of live bytes of `run(model, fake mode)`, extrapolated to `depth`; None: the model's.

    Activations are largest when a backward pass begins, and gradients when it ends. Either peak grows linearly with the
    depth, but not the larger of the two, so they are extrapolated apart.
    """
    depth = num_layers(config) if depth is None else depth

    def peaks(layers: int) -> dict[str, int]:
        model = make(layers)
        with faked(model) as mode, LiveBytes([*model.parameters(), *model.buffers()]) as live:
            if layers > 1:
                live.divide(transformer_blocks(model))
            run(model, mode)
        return live.peaks

    low, high = TRACED
    if depth <= high:
        return max(peaks(depth).values())
    first, second = peaks(low), peaks(high)
    return max(b + (b - first[part]) * (depth - high) // (high - low) for part, b in second.items() if part in first)


def autocast(setup: Setup) -> Any:
    """Returns the strategy's autocast; without effect for one that gathers weights in 16 bits."""
    dtype = torch.bfloat16 if setup.precision != 'fp32' else torch.float32
    return torch.autocast('cpu', dtype=dtype, enabled=setup.precision != 'fp32' and setup.memory_model.autocasts)


def cast(model: Any, setup: Setup) -> nn.Module:
    """Casts parameters to the dtype in which a sharded strategy holds or gathers them, and chooses the kernel of
    log-probs that can read them."""
    if setup.entry.only_16_bits and hasattr(model, 'logprob_kernel'):
        model.logprob_kernel = 'plain'  # Gemini's weights are tensor subclasses: see `head_kernels.linear_weights`
    if setup.precision != 'fp32' and not setup.memory_model.autocasts:
        model.to(torch.bfloat16)
    elif setup.precision != 'fp32' and setup.memory_model.keeps_narrow:
        narrow(kept_in_16_bits(model), torch.bfloat16)
    out: nn.Module = model
    return out


def planned_device(setup: Setup) -> Any:
    """Inside this context log-probs are computed as on the planned device, although the fake tensors are on a CPU: with
    its chunk size, or by blocks of the vocabulary."""
    kind = 'cuda' if setup.on_cuda else 'cpu'
    return mock.patch.object(logprobs, 'kind_of_device', lambda x: kind)


def learning_bytes(kind: str, config: Any, setup: Setup, rows: int, *, growing: float) -> int:
    """Returns the peak of forward and backward of one micro-batch.

    growing: bytes per element that a completed gradient keeps, so that gradients grow as activations are freed. 0 if it
    is added to an existing one, or replaces weights.
    """
    batch = batch_of(rows, setup)

    def run(model: nn.Module, mode: Any) -> None:
        given = batch.changed(mode.from_tensor)
        kept: list[Tensor] = []

        def free_grad(parameter: Tensor) -> None:
            gradient, parameter.grad = parameter.grad, None
            if not setup.memory_model.whole:
                del gradient  # else it is added to its master's before it is freed
            kept.append(torch.empty(math.ceil(growing * parameter.numel()), dtype=torch.uint8))

        for parameter in model.parameters():
            if parameter.requires_grad and growing != parameter.element_size():
                parameter.register_post_accumulate_grad_hook(free_grad)
        with autocast(setup), planned_device(setup):
            if kind in ('critic', 'reward'):
                loss = model(given).sum()
            else:
                out = model(given, with_entropy='detached' if setup.task == 'ppo' else False)
                loss = out.logprobs.sum() + sum(x.sum() for x in (out.entropy, out.values) if x is not None)
        loss.backward()

    depth = num_layers(config)
    if kind == 'actor' and setup.num_layers_unfrozen > 0:
        depth = min(depth, setup.num_layers_unfrozen)  # no activations of the frozen blocks below are kept

    def make(layers: int | None) -> nn.Module:
        model = cast(build(kind, config, setup, layers), setup).train()
        if setup.task == 'ppo':
            dropout_off(model)
        return model

    return traced(make, config, run, depth)


def scoring_bytes(kind: str, config: Any, setup: Setup, rows: int) -> int:
    """Returns the peak of a forward without gradients."""
    batch = batch_of(rows, setup)

    def run(model: nn.Module, mode: Any) -> None:
        with torch.no_grad(), autocast(setup), planned_device(setup):
            model(batch.changed(mode.from_tensor))

    return traced(lambda layers: cast(build(kind, config, setup, layers), setup).eval(), config, run)


def prefill_bytes(config: Any, setup: Setup, rows: int) -> int:
    """Returns the peak of a forward over prompts before sampling, without keys and values."""
    ids = torch.zeros(rows, setup.max_prompt_tokens, dtype=torch.int64)
    positions = torch.arange(setup.max_prompt_tokens).expand(rows, -1)

    def run(model: Any, mode: Any) -> None:
        with torch.no_grad():
            model.trunk(mode.from_tensor(ids), position_ids=mode.from_tensor(positions))

    def make(layers: int | None) -> nn.Module:
        model = build('initial', config, setup, layers).eval()
        return model if setup.precision == 'fp32' else model.to(torch.bfloat16)

    return traced(make, config, run)


def cache_elements(config: Any, tensor_parallel: int = 1) -> int:
    """Returns the number of elements in the key/value cache of one process per token."""
    from transformers import AutoModelForCausalLM
    from transformers.cache_utils import DynamicCache

    def probe(layers: int) -> int:
        small = copy.deepcopy(config)
        _set_layers(small, layers)
        text_config(small).pad_token_id = None  # with one, some models read the tokens' values
        with torch.device('meta'):
            model = AutoModelForCausalLM.from_config(small).eval()
            if why := beyond_keys_and_values(model):
                raise ValueError(f'no plan of generation with a {config.model_type}: {why}')
            keep_part(model, tensor_parallel)
        cache: Any = DynamicCache()
        with faked(model), torch.no_grad():
            model(torch.zeros(1, 1, dtype=torch.int64), **{cache_keyword(model): cache, 'use_cache': True})
        return sum(layer.keys.numel() + layer.values.numel() for layer in cache.layers)

    return probe(min(num_layers(config), 2)) * num_layers(config) // min(num_layers(config), 2)
