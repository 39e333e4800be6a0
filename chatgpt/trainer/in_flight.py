"""Samples in flight as arrays of a checkpoint, one record for each timestep."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import asdict
from typing import Any

import numpy as np
import torch

from chatgpt.rollout.wire import PackedEpisode, PackedSamples, unpack_samples
from chatgpt.types import Episode, Prompt, Sample, Turn

_ARRAYS = {
    'indices': np.int64,
    'lengths': np.int64,
    'ids': np.int64,
    'logprobs': np.float32,
    'filtered_logprobs': np.float32,
    'edge_distances': np.float32,
    'masks': np.bool_,
    'versions': np.int64,
}


def record_of(packed: PackedSamples) -> dict[str, Any]:
    """Returns samples as arrays, None where there are none, and lists of JSON."""
    episodes = [e._asdict() | {'episode': asdict(e.episode)} for e in packed.episodes or ()]
    arrays = {name: getattr(packed, name, None) for name in _ARRAYS}
    return arrays | {'version': packed.version, 'reasons': list(packed.reasons), 'episodes': episodes}


def joined_records(shares: SequenceOf[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns the records of all ranks as one, with tensors."""
    joined: dict[str, Any] = {n: [x for share in shares for x in share[n]] for n in ('reasons', 'episodes')}
    for name, dtype in _ARRAYS.items():
        if any(share[name] is not None for share in shares):  # without masks all are True, without versions the same
            missing = [True if name == 'masks' else s['version'] for s in shares]
            arrays = [
                np.full(len(s['ids']), m, dtype) if s[name] is None else s[name]
                for s, m in zip(shares, missing, strict=True)
            ]
            joined[name] = torch.from_numpy(np.concatenate(arrays))
            if not len(joined[name]):  # a checkpoint has no empty tensors
                del joined[name]
    return joined


def share_of(record: Mapping[str, Any], start: int, stop: int) -> PackedSamples:
    """Returns samples [start, stop) of a record."""
    before, inside = int(sum(record['lengths'][:start])), int(sum(record['lengths'][start:stop]))
    arrays: dict[str, Any] = {}
    for name in _ARRAYS.keys() - {'indices'}:
        dtype = _ARRAYS[name]
        first, last = (start, stop) if name == 'lengths' else (before, before + inside)
        values = record.get(name, ())  # a tensor, or a list in checkpoints of earlier versions
        part = values[first:last]
        part = part.numpy() if isinstance(part, torch.Tensor) else np.array(part, dtype=dtype)
        arrays[name] = part if len(values) else None
    episodes = [_episode(e) for e in record.get('episodes', ())[start:stop]]
    return PackedSamples(
        version=record['version'],
        reasons=[reason or 'length' for reason in record['reasons'][start:stop]],
        episodes=episodes or None,
        **arrays,
    )


def _episode(record: Mapping[str, Any]) -> PackedEpisode:
    turns = tuple(Turn(**turn) for turn in record['episode']['turns'])
    return PackedEpisode(**(dict(record) | {'episode': Episode(**(record['episode'] | {'turns': turns}))}))


def indices_of(record: Mapping[str, Any]) -> list[int]:
    """Returns the sample numbers of a record; those of a whole timestep in checkpoints of earlier versions."""
    whole = range(record['first_sample'], record['first_sample'] + len(record['lengths']))
    return [int(i) for i in record.get('indices', whole)]


def samples_of(
    record: Mapping[str, Any], start: int, stop: int, prompts: SequenceOf[Prompt], groups: SequenceOf[int]
) -> list[Sample]:
    """Returns samples [start, stop) of a record."""
    packed, indices = share_of(record, start, stop), indices_of(record)[start:stop]
    samples = unpack_samples(packed, prompts, indices, groups, record['temperature'])
    for sample in samples:
        if sample.versions is not None and sample.num_actions:
            sample.version = int(sample.versions[0])
    return samples
