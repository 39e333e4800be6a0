"""Rollout workers, which answer requests in order with the weights that they are sent. Independent of Ray.

`RolloutWorker` fills its model from buckets and generates with a local engine; see `chatgpt.rollout.vllm_worker` for
vLLM and for `make_worker`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from chatgpt.rollout.handshake import Handshake
from chatgpt.rollout.local import LocalEngine
from chatgpt.rollout.wire import Around, Manifest, ModelSpec, PackedSamples, Request, apply_buckets, pack_samples

Fetch = Callable[[Any], Tensor]
"""returns the (bytes,) uint8 bucket, possibly read-only, for a handle of `RolloutWorkers.put`"""


def identity(bucket: Any) -> Tensor:
    return bucket


class Worker(ABC):
    """Base of workers.

    Args:
        own: the engine that samples.
        around: wraps this engine and receives whole prompts with columns.
    """

    def __init__(self, own: Any, fetch: Fetch, around: Around | None) -> None:
        self.fetch = fetch
        self.engine: Any = own if around is None else around(own)
        self.version: int | None = None
        """version of the loaded weights; None if there are none or loading failed"""
        self.difference: float | None = None
        """largest difference of a log-prob in the check of these weights"""

    @abstractmethod
    def take_weights(self, manifest: Manifest, buckets: Sequence[Any]) -> None:
        """Fetches, loads and checks a version of the weights. After a failure the worker has no weights."""

    def generate(self, request: Request) -> PackedSamples:
        """Generates the samples of a request, with the request's version of the weights, fetched if necessary.

        Raises the engine's errors, ValueError for weights that do not fit the model, and RuntimeError if log-probs
        differ from the actor's.
        """
        if self.version != request.manifest.version:
            self.take_weights(request.manifest, request.buckets)
        samples = self.engine.generate(request.unpacked())
        return pack_samples(samples, request.manifest.version, self.difference)


class RolloutWorker(Worker):
    """Generates with a `LocalEngine`.

    Args:
        spec: architecture of the model; the weights come with requests.
        engine_options: keyword arguments of `LocalEngine`.
        device: None uses CUDA if available.
    """

    def __init__(
        self,
        spec: ModelSpec,
        engine_options: Mapping[str, Any] | None = None,
        *,
        fetch: Fetch = identity,
        device: str | torch.device | None = None,
        around: Around | None = None,
    ) -> None:
        super().__init__(LocalEngine(**(engine_options or {})), fetch, around)
        self.spec, self.device = spec, torch.device(device or ('cuda' if torch.cuda.is_available() else 'cpu'))
        self._model: Any = None
        self._actor: Any = None

    def take_weights(self, manifest: Manifest, buckets: Sequence[Any]) -> None:
        from chatgpt.nn import Actor

        self.version = self.difference = None
        self.engine.end()
        if self._model is None:
            self._model = self.spec.build().to(self.device)
        apply_buckets(manifest, map(self.fetch, buckets), self._model)
        if self._actor is None:
            # not earlier: an actor checks its model's outputs, which are arbitrary without weights
            self._actor = Actor(self._model)
        own = Handshake.of(self._actor, type(self).__name__)
        self.difference = manifest.handshake.check(own.best(), own.dtype)
        self.engine.begin(self._actor)
        self.version = manifest.version
