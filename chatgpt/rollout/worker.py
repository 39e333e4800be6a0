"""A rollout worker: it answers requests one after another with weights that it is sent. Plain Python, without Ray.

`RolloutWorker` has a model of its own, filled from buckets, and a local engine; `chatgpt.rollout.vllm_worker` has vLLM,
and makes the worker that a spec is of.
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
"""from what `RolloutWorkers.put` returned to the (bytes,) uint8 bucket; it may be read-only"""


def as_it_is(bucket: Any) -> Tensor:
    return bucket


class Worker(ABC):
    """Base of workers.

    Args:
        own: the engine that draws.
        around: makes of that engine the one that answers; it is given prompts with their columns.
    """

    def __init__(self, own: Any, fetch: Fetch, around: Around | None) -> None:
        self.fetch = fetch
        self.engine: Any = own if around is None else around(own)
        self.version: int | None = None
        """of the weights in the model; None where they are not whole"""
        self.difference: float | None = None
        """of log-probs, that the check of these weights found"""

    @abstractmethod
    def take_weights(self, manifest: Manifest, buckets: Sequence[Any]) -> None:
        """Fetch and apply a version of the weights, and check them. After a failure there are none."""

    def generate(self, request: Request) -> PackedSamples:
        """The samples of a request, drawn with the weights it names; weights that this worker does not hold yet are
        fetched.

        Raises what its engine raises, ValueError for weights that do not fit the model, and RuntimeError where its
        log-probs are not the actor's.
        """
        if self.version != request.manifest.version:
            self.take_weights(request.manifest, request.buckets)
        samples = self.engine.generate(request.opened())
        return pack_samples(samples, request.manifest.version, self.difference)


class RolloutWorker(Worker):
    """Generates with a `LocalEngine`.

    Args:
        spec: the model to build; its weights come with the requests.
        engine_options: keywords of `LocalEngine`.
        device: where to compute; None takes a CUDA device when there is one.
    """

    def __init__(
        self,
        spec: ModelSpec,
        engine_options: Mapping[str, Any] | None = None,
        *,
        fetch: Fetch = as_it_is,
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
            # only now: an actor looks at its model's outputs, which are arbitrary without weights
            self._actor = Actor(self._model)
        own = Handshake.of(self._actor, type(self).__name__)
        self.difference = manifest.handshake.check(own.best(), own.dtype)
        self.engine.begin(self._actor)
        self.version = manifest.version
