"""Rollout workers, which load the weights that they are sent and answer requests, in order. Independent of Ray.

`RolloutWorker` fills its model from buckets and generates with a local engine; see `chatgpt.rollout.vllm_worker` for
vLLM and for `make_worker`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import closing
from typing import Any

import torch
from torch import Tensor

from chatgpt.rollout.connection import Address, Listener
from chatgpt.rollout.handshake import Handshake
from chatgpt.rollout.local import LocalEngine
from chatgpt.rollout.wire import Around, Manifest, ModelSpec, PackedSamples, Request, fitted, pack_samples, write_bucket

Fetch = Callable[[Any], Tensor]
"""returns the (bytes,) uint8 bucket, possibly read-only, for a handle of `RolloutWorkers.put`"""


def identity(bucket: Any) -> Tensor:
    return bucket


class Worker(ABC):
    """Base of workers. A version of the weights is loaded by one call of `receive`, or by `start_loading`, a
    `fetch_bucket` for each bucket in their order, and `finish_loading`. After a failure the worker has no weights.

    Args:
        own: the engine that samples.
        around: wraps this engine and receives whole prompts with columns.
    """

    host = '127.0.0.1'
    """an address of this machine that the ranks which send weights can reach"""

    def __init__(self, own: Any, fetch: Fetch, around: Around | None) -> None:
        self.fetch = fetch
        self.engine: Any = own if around is None else around(own)
        self.version: int | None = None
        """version of the loaded weights; None if there are none or loading failed"""
        self.difference: float | None = None
        """largest difference of a log-prob in the check of these weights"""
        self._manifest: Manifest | None = None  # of the weights that are being loaded
        self._listener: Listener | None = None

    # ------------------------------------------------------------------ weights

    def listen(self) -> Address:
        """Returns where `receive` waits for the ranks."""
        if self._listener is not None:
            self._listener.close()
        self._listener = Listener(self.host)
        return self._listener.address

    def receive(self, manifest: Manifest, num_ranks: int) -> None:
        """Receives a version of the weights from ranks that connect to the address of the latest `listen`, rank r
        buckets r, r + num_ranks, ..."""
        with closing(self._listening()) as listener:  # also ends connections that were not accepted before an error
            self.start_loading(manifest)
            for number, bucket in enumerate(listener.buckets(manifest, num_ranks)):
                self.load(manifest, number, bucket)
        self.finish_loading()

    def _listening(self) -> Listener:
        assert self._listener is not None, 'listen first'
        listener, self._listener = self._listener, None
        return listener

    def start_loading(self, manifest: Manifest) -> None:
        """Gives up the weights that the worker has, for a new version."""
        self.version = self.difference = None
        self._manifest = manifest
        self.engine.end()
        self.start(manifest)

    def fetch_bucket(self, number: int, handle: Any) -> None:
        """Loads a bucket of `RolloutWorkers.put`."""
        assert self._manifest is not None, 'start_loading first'
        self.load(self._manifest, number, self.fetch(handle))

    def finish_loading(self) -> None:
        """Uses the loaded weights. Raises RuntimeError if log-probs differ from the actor's."""
        assert self._manifest is not None, 'start_loading first'
        manifest, self._manifest = self._manifest, None
        self.finish(manifest)
        self.version = manifest.version

    @abstractmethod
    def start(self, manifest: Manifest) -> None:
        """Prepares for the buckets. Raises ValueError for weights that do not fit the model."""

    @abstractmethod
    def load(self, manifest: Manifest, number: int, bucket: Tensor) -> None:
        """Loads a bucket, (bytes,) uint8 on the CPU, which may change afterwards."""

    @abstractmethod
    def finish(self, manifest: Manifest) -> None:
        """Uses the loaded weights, after checking them or before the first sample."""

    # ------------------------------------------------------------------ samples

    def generate(self, request: Request) -> PackedSamples:
        """Generates the samples of a request. Raises the engine's errors, and RuntimeError if the worker has other
        weights."""
        if self.version != request.version:
            raise RuntimeError(
                f'a rollout worker with weights {self.version} was asked for samples of weights {request.version}'
            )
        samples = self.engine.generate(request.unpacked())
        return pack_samples(samples, request.version, self.difference)


class RolloutWorker(Worker):
    """Generates with a `LocalEngine`.

    Args:
        spec: architecture of the model; the weights come later.
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
        self._named: dict[str, Tensor] = {}
        self._actor: Any = None

    def start(self, manifest: Manifest) -> None:
        if self._model is None:
            self._model = self.spec.build().to(self.device)
        self._named = fitted(manifest, self._model)

    def load(self, manifest: Manifest, number: int, bucket: Tensor) -> None:
        write_bucket(manifest, number, bucket, self._named)

    def finish(self, manifest: Manifest) -> None:
        from chatgpt.nn import Actor

        if self._actor is None:
            # not earlier: an actor checks its model's outputs, which are arbitrary without weights
            self._actor = Actor(self._model)
        own = Handshake.of(self._actor, type(self).__name__)
        self.difference = manifest.handshake.check(own.best(), own.dtype)
        self.engine.begin(self._actor)
