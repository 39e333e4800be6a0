"""Compact messages between a trainer and its rollout workers: weights in flat buckets, requests, samples.

Weights are sent as a few flat byte buffers of bounded size instead of hundreds of tensors; a `Manifest` describes their
contents. A bucket has a single dtype, a tensor larger than a bucket is cut, and tied tensors are sent once, all without
conversion.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Sequence as SequenceOf
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from chatgpt.nn import lora
from chatgpt.nn.layouts import check_causal
from chatgpt.nn.trunk import sharding_group
from chatgpt.rollout.call import Call
from chatgpt.rollout.handshake import Handshake
from chatgpt.types import Episode, FinishReason, Prompt, Sample

BUCKET_BYTES = 64 << 20
Around = Callable[[Any], Any]
"""wraps a worker's engine"""


class Piece(NamedTuple):
    """Elements [start, stop) of a flattened tensor. The pieces of a bucket are contiguous."""

    name: str
    start: int
    stop: int


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The contents of the buckets of a version of the weights.

    >>> tensors = {'a': torch.zeros(2, 3), 'b': torch.zeros(4)}
    >>> plan_buckets(tensors, version=1, handshake=handshake, bucket_bytes=32).buckets          # doctest: +SKIP
    ((Piece(name='a', start=0, stop=6), Piece(name='b', start=0, stop=2)), (Piece(name='b', start=2, stop=4),))
    """

    version: int
    tensors: Mapping[str, tuple[tuple[int, ...], torch.dtype]]
    """{name: (shape, dtype)}"""
    buckets: tuple[tuple[Piece, ...], ...]
    handshake: Handshake
    """with which a worker checks the weights"""

    def dtype_of(self, number: int) -> torch.dtype:
        """Returns the dtype of a bucket."""
        return self.tensors[self.buckets[number][0].name][1]

    def bucket_bytes(self, number: int) -> int:
        """Returns the size of a bucket."""
        return sum(p.stop - p.start for p in self.buckets[number]) * self.dtype_of(number).itemsize

    @property
    def largest_bucket(self) -> int:
        return max(map(self.bucket_bytes, range(len(self.buckets))), default=0)


def policy_tensors(model: nn.Module, *, every_name: bool = False) -> dict[str, Tensor]:
    """Returns parameters and persistent buffers of a transformers model by name, without adapters, which must be
    merged.

    every_name: includes tied tensors under each of their names, not only the first.

    Raises:
        ValueError: the weights are sharded or streamed, or adapters cannot be merged.
    """
    if any(getattr(module, 'is_streamed', False) for module in model.modules()):
        raise ValueError(
            'an engine of its own needs whole weights, and this strategy streams them block by block: '
            'use stream_blocks=False, or LocalEngine'
        )
    if sharding_group(model) is not None:
        raise ValueError(
            'an engine of its own needs whole weights, and this process has parts of them (tensor_parallel): give '
            'whole=True to strategy.full_model'
        )
    if any(layer.shares_base for layer in lora.lora_layers(model).values()):
        raise ValueError(
            'an engine of its own needs weights with adapters folded in, which those of a SharedTrunk cannot be: '
            'use LocalEngine or HFEngine'
        )
    adapters = {f'{name}.{factor}' for name in lora.lora_layers(model) for factor in ('lora_A', 'lora_B')}
    named = model.named_parameters(remove_duplicate=not every_name)
    tensors: dict[str, Tensor] = {name: p for name, p in named if name not in adapters}
    persistent = {
        f'{prefix}.{name}' if prefix else name
        for prefix, module in model.named_modules()
        for name in module._buffers.keys() - module._non_persistent_buffers_set
    }
    tensors |= {name: b for name, b in model.named_buffers() if name in persistent}
    for name, tensor in tensors.items():
        if tensor.is_meta or hasattr(tensor, 'to_local'):
            raise ValueError(
                f'an engine of its own needs whole weights, and {name} is not here; begin inside '
                'strategy.full_model(actor)'
            )
    return tensors


def checkpoint_tensors(model: Any) -> dict[str, Tensor]:
    """Returns `policy_tensors` with the names and shapes of a checkpoint, for programs that load one: experts, which
    transformers stacks, as separate tensors, and tied tensors under each of their names (see `unique_tensors`)."""
    from transformers.core_model_loading import revert_weight_conversion

    with torch.no_grad():
        every = {name: t.detach() for name, t in policy_tensors(model, every_name=True).items()}
        once = {name: every[name] for name in policy_tensors(model)}
        further = {name: t for name, t in every.items() if name not in once}
        return revert_weight_conversion(model, once) | revert_weight_conversion(model, further)


def unique_tensors(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Removes all but the first name of tied tensors."""
    named: dict[Any, str] = {}
    for name, tensor in tensors.items():
        named.setdefault((tensor.data_ptr(), tensor.shape, tensor.stride()) if tensor.numel() else name, name)
    return {name: tensors[name] for name in named.values()}


def check_policy(actor: Any, engine: str) -> None:
    """Raises ValueError for an actor that changes its model's logits, because an engine with its own model ignores
    that, and for an encoder-decoder."""
    from chatgpt.nn import Actor

    check_causal(getattr(actor, 'model', None), f'{engine} decodes', "use engine='hf'")
    own = any(getattr(type(actor), name, None) is not getattr(Actor, name) for name in ('trunk', 'head'))
    if getattr(actor, 'changes_logits', own):  # a class that overrides `trunk` or `head` may declare that it does not
        raise ValueError(
            f"{engine}: {type(actor).__name__} changes the model's logits, as NLPO's and ILQL's policies do, and this "
            'engine knows the model alone; use LocalEngine'
        )


def plan_buckets(
    tensors: Mapping[str, Tensor], *, version: int, handshake: Handshake, bucket_bytes: int = BUCKET_BYTES
) -> Manifest:
    """Divides tensors into buckets with a single dtype and at most `bucket_bytes`, but at least one element. Empty
    tensors are in no bucket."""
    if bucket_bytes < 1:
        raise ValueError(f'bucket_bytes={bucket_bytes} must be positive')
    buckets: list[tuple[Piece, ...]] = []
    for dtype in dict.fromkeys(t.dtype for t in tensors.values()):
        capacity = max(1, bucket_bytes // dtype.itemsize)
        pieces: list[Piece] = []
        used = 0
        for name, tensor in tensors.items():
            start, size = 0, tensor.numel() if tensor.dtype == dtype else 0
            while start < size:
                stop = min(size, start + capacity - used)
                pieces.append(Piece(name, start, stop))
                used, start = used + stop - start, stop
                if used == capacity:
                    buckets.append(tuple(pieces))
                    pieces, used = [], 0
        if pieces:
            buckets.append(tuple(pieces))
    shapes = {name: (tuple(t.shape), t.dtype) for name, t in tensors.items()}
    return Manifest(version=version, tensors=shapes, buckets=tuple(buckets), handshake=handshake)


def bucket_buffer(num_bytes: int, *, device: torch.device | str = 'cpu', pin_memory: bool = False) -> Tensor:
    """Returns the memory of a bucket, (num_bytes,) uint8."""
    return torch.empty(num_bytes, dtype=torch.uint8, device=device, pin_memory=pin_memory)


@torch.no_grad()
def fill_buckets(
    manifest: Manifest,
    tensors: Mapping[str, Tensor],
    numbers: Iterable[int] | None = None,
    device: torch.device | str = 'cpu',
) -> Iterator[Tensor]:
    """Yields the buckets with these numbers, by default all, (bytes,) uint8 on the device. They share one buffer, so
    each must be copied to be kept."""
    buffer = bucket_buffer(0, device=device)
    for number in range(len(manifest.buckets)) if numbers is None else numbers:
        pieces = manifest.buckets[number]
        parts = [tensors[p.name].detach().reshape(-1)[p.start : p.stop] for p in pieces]
        num_bytes = manifest.bucket_bytes(number)
        if len(buffer) < num_bytes:
            buffer = bucket_buffer(num_bytes, device=device, pin_memory=parts[0].is_cuda and not buffer.is_cuda)
        flat = buffer[:num_bytes].view(manifest.dtype_of(number))
        if parts[0].device == flat.device:
            torch.cat(parts, out=flat)
        else:
            flat.copy_(torch.cat(parts))
        if flat.is_cuda:  # another thread may read it on another stream
            torch.cuda.current_stream(flat.device).synchronize()
        yield buffer[:num_bytes]


def fitted(manifest: Manifest, model: nn.Module) -> dict[str, Tensor]:
    """Gives a model's tensors the manifest's dtypes and returns them by name, for `write_bucket`. Their values are
    arbitrary until all buckets are written.

    Raises:
        ValueError: names or shapes differ from the model's.
    """
    named: dict[str, Tensor] = dict(model.named_parameters(remove_duplicate=False))
    named |= dict(model.named_buffers(remove_duplicate=False))
    _check_names(manifest, model, named)
    for name, (_, dtype) in manifest.tensors.items():
        tensor = named[name]
        if tensor.dtype != dtype or not tensor.is_contiguous():
            tensor.data = torch.empty(tensor.shape, dtype=dtype, device=tensor.device)
    return named


@torch.no_grad()
def write_bucket(manifest: Manifest, number: int, bucket: Tensor, named: Mapping[str, Tensor]) -> None:
    """Writes a bucket, (bytes,) uint8, into contiguous tensors in place."""
    flat, at = bucket.view(manifest.dtype_of(number)), 0
    for piece in manifest.buckets[number]:
        size = piece.stop - piece.start
        named[piece.name].view(-1)[piece.start : piece.stop].copy_(flat[at : at + size])
        at += size


class WholeTensors:
    """Copies of the tensors of buckets, for programs that load whole ones. Holds the one that is not complete."""

    def __init__(self, manifest: Manifest, device: torch.device | str = 'cpu') -> None:
        self.manifest, self.device = manifest, device
        self._begun: dict[str, Tensor] = {}

    def add(self, number: int, bucket: Tensor) -> list[tuple[str, Tensor]]:
        """Returns the tensors that this bucket completes, with their names. Buckets come in their order."""
        pieces = self.manifest.buckets[number]
        for piece in pieces:
            if piece.start == 0:
                shape, dtype = self.manifest.tensors[piece.name]
                self._begun[piece.name] = torch.empty(shape, dtype=dtype, device=self.device)
        write_bucket(self.manifest, number, bucket, self._begun)
        done = [p.name for p in pieces if p.stop == self._begun[p.name].numel()]
        return [(name, self._begun.pop(name)) for name in done]


def _check_names(manifest: Manifest, model: nn.Module, named: Mapping[str, Tensor]) -> None:
    unknown = sorted(set(manifest.tensors) - set(named))
    filled = {id(named[name]) for name in manifest.tensors if name in named}
    missing = sorted(name for name, tensor in policy_tensors(model).items() if id(tensor) not in filled)
    if unknown or missing:
        raise ValueError(
            f'the weights do not fit the {type(model).__name__} of this rollout worker: missing {missing[:3]}, unknown '
            f'{unknown[:3]}'
        )
    for name, (shape, _) in manifest.tensors.items():
        if tuple(named[name].shape) != shape:
            raise ValueError(
                f'the weights do not fit this rollout worker: {name} is {shape}, here {tuple(named[name].shape)}'
            )


def merged(model: nn.Module) -> Any:
    """Context in which adapters are merged into the weights. Does nothing without adapters, in a copy with adapters
    already merged, in which they are off and zero, or for a `SharedTrunk`, which `policy_tensors` refuses."""
    layers = lora.lora_layers(model).values()
    if any(layer.shares_base for layer in layers):
        return nullcontext()
    if all(not layer.adapter_on and not layer.lora_B.any() for layer in layers):
        return nullcontext()
    return lora.merged(model)


# ---------------------------------------------------------------------- models


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """The architecture of a worker's model. The class must be importable in the worker."""

    model_class: type[Any]
    config: Any
    attn_implementation: str | None = None

    @classmethod
    def of(cls, model: Any) -> ModelSpec:
        """Makes the spec of a transformers model."""
        attention = getattr(model.config, '_attn_implementation', None)
        return cls(model_class=type(model), config=copy.deepcopy(model.config), attn_implementation=attention)

    def build(self) -> Any:
        """Builds the model in fp32 and eval mode, with uninitialised weights."""
        from transformers.initialization import no_init_weights

        with no_init_weights():
            model = self.model_class._from_config(
                copy.deepcopy(self.config), dtype=torch.float32, attn_implementation=self.attn_implementation
            )
        model.tie_weights()  # skipped by no_init_weights
        return model.eval().requires_grad_(False)

    def same_as(self, other: ModelSpec) -> bool:
        """Returns True if the weights of one model fit the other."""
        return (
            self.model_class is other.model_class
            and self.attn_implementation == other.attn_implementation
            and _settings(self.config) == _settings(other.config)
        )


def _settings(config: Any) -> dict[str, Any]:
    """Returns the settings of a config except those that describe the model's origin."""
    origin = ('dtype', 'architectures', 'transformers_version', '_name_or_path')
    return {name: value for name, value in config.to_dict().items() if name not in origin}


# ---------------------------------------------------------------------- prompts and samples


@dataclass(frozen=True, kw_only=True)
class Request:
    """A `generate` call, which any worker with these weights can process at any time."""

    version: int
    """version of the weights to generate with"""
    call: Call
    """without its prompts, except for an environment, which needs their columns"""
    prompt_ids: SequenceOf[np.ndarray] = ()

    @classmethod
    def of(cls, version: int, call: Call, *, whole: bool) -> Request:
        if whole:
            prompts = [replace(p, ids=p.ids.cpu()) for p in call.prompts]
            return cls(version=version, call=replace(call, prompts=prompts))
        ids = [p.ids.cpu().numpy() for p in call.prompts]
        return cls(version=version, call=replace(call, prompts=()), prompt_ids=ids)

    def unpacked(self) -> Call:
        """Returns the call with its prompts."""
        if self.call.prompts:
            return self.call
        return replace(self.call, prompts=[Prompt(ids=torch.tensor(ids)) for ids in self.prompt_ids])


@dataclass(frozen=True, kw_only=True)
class PackedSamples:
    """The samples of a request, concatenated into a few arrays."""

    version: int
    """version of the weights that generated them"""
    lengths: np.ndarray
    """(n,) int64, number of response tokens of each sample; N is their sum"""
    ids: np.ndarray
    """(N,) int64"""
    logprobs: np.ndarray
    """(N,) fp32, as the next two"""
    filtered_logprobs: np.ndarray
    edge_distances: np.ndarray
    reasons: list[FinishReason] = field(default_factory=list)
    """(n,)"""
    masks: np.ndarray | None = None
    """(N,) bool, `Sample.response_mask`; None means all True"""
    versions: np.ndarray | None = None
    """(N,) int64, `Sample.versions`; None where no sample has them"""
    episodes: list[PackedEpisode] | None = None
    """(n,), with an environment; None otherwise"""
    difference: float | None = None
    """largest difference of a log-prob in the worker's check of its weights; None if it has not checked them"""


class PackedEpisode(NamedTuple):
    """The fields of a sample that come from its environment."""

    prompt_ids: list[int]
    prompt_text: str
    response_text: str
    episode: Episode
    last_turn: str = ''


def pack_samples(samples: SequenceOf[Sample], version: int, difference: float | None = None) -> PackedSamples:
    """Packs complete responses or episodes."""

    def joined(name: str) -> np.ndarray:
        return torch.cat([getattr(s, name) for s in samples]).numpy()

    mixed = any(s.versions is not None for s in samples)
    episodes = [
        PackedEpisode(s.prompt_ids.tolist(), s.prompt_text, s.response_text, s.episode, s.last_turn)
        for s in samples
        if s.episode is not None
    ]
    return PackedSamples(
        masks=joined('response_mask') if episodes else None,
        versions=joined('token_versions') if mixed else None,
        episodes=episodes or None,
        difference=difference,
        version=version,
        lengths=np.array([len(s.response_ids) for s in samples], dtype=np.int64),
        ids=joined('response_ids'),
        logprobs=joined('logprobs'),
        filtered_logprobs=joined('filtered_logprobs'),
        edge_distances=joined('edge_distances'),
        reasons=[s.finish_reason for s in samples],
    )


def unpack_samples(
    packed: PackedSamples,
    prompts: SequenceOf[Prompt],
    indices: SequenceOf[int],
    groups: SequenceOf[int],
    temperature: float,
) -> list[Sample]:
    """Restores the samples, with separate tensors for each."""
    samples, start = [], 0
    for i, length in enumerate(packed.lengths.tolist()):
        where = slice(start, start + length)
        start += length
        if packed.episodes is None or packed.masks is None:
            mask, of_episode = torch.ones(length, dtype=torch.bool), {}
        else:
            mask, of_episode = torch.tensor(packed.masks[where]), packed.episodes[i]._asdict()
            of_episode['prompt_ids'] = torch.tensor(of_episode['prompt_ids'], dtype=torch.int64)
        prompt = prompts[i]
        of_prompt = {'prompt_ids': prompt.ids.cpu(), 'prompt_text': prompt.text, 'last_turn': prompt.last_turn}
        made: dict[str, Any] = of_prompt | of_episode
        samples.append(
            Sample(
                index=indices[i],
                group=int(groups[i]),
                response_ids=torch.tensor(packed.ids[where]),
                response_mask=mask,
                logprobs=torch.tensor(packed.logprobs[where]),
                filtered_logprobs=torch.tensor(packed.filtered_logprobs[where]),
                edge_distances=torch.tensor(packed.edge_distances[where]),
                finish_reason=packed.reasons[i],
                temperature=temperature,
                version=packed.version,
                versions=None if packed.versions is None else torch.tensor(packed.versions[where]),
                columns=prompts[i].columns,
                **made,
            )
        )
    return samples
