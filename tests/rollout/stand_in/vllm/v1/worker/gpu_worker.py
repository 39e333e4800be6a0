from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from vllm.config import WeightTransferConfig
from vllm.distributed.weight_transfer import WeightTransferEngineFactory


class ParallelLMHead:
    pass


class Worker:
    """One rank: of each weight the rows, counted flat, that are its share."""

    def __init__(self, vllm_config: Any, rank: int, llm: Any) -> None:
        self.vllm_config = vllm_config
        self.rank, self.llm = rank, llm
        self.device = torch.device('cpu')
        self.shards: dict[str, torch.Tensor] = {}
        self.updating = False
        config = vllm_config.weight_transfer_config
        self.weight_transfer_engine: Any = None
        if config is not None:
            config = WeightTransferConfig(**config)
            self.weight_transfer_engine = WeightTransferEngineFactory.create_engine(
                config, vllm_config, self.device, self.get_model()
            )

    def get_model(self) -> Worker:
        return self

    def modules(self) -> list[Any]:
        return [ParallelLMHead()]

    def check_health(self) -> None:
        pass

    def apply_model(self, fn: Any) -> Any:
        return fn(self)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        assert self.updating, 'what is made of weights when they are loaded would be missing'
        own, ranks = self.llm.model.state_dict(), self.vllm_config.tensor_parallel_size
        for name, tensor in weights:
            assert tensor.shape == own[name].shape, name
            flat = tensor.reshape(-1)
            size = -(-len(flat) // ranks)
            self.shards[name] = flat[self.rank * size : (self.rank + 1) * size].clone()

    def reload_weights(self, weights_iterator: Any = None) -> None:
        assert 'weights' in self.llm.awake
        self.llm.events.append('load')
        self.updating = True
        self.load_weights(weights_iterator)
        self.updating = False

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self.weight_transfer_engine.init_transfer_engine(init_info)

    def start_weight_update(self) -> None:
        assert self.weight_transfer_engine is not None and not self.updating
        self.updating = True
        if self.rank == 0:
            self.llm.events.append('start')

    def update_weights(self, update_info: Any) -> None:
        assert self.updating
        self.weight_transfer_engine.receive_weights(update_info)

    def finish_weight_update(self) -> None:
        assert self.updating
        self.updating = False
        if self.rank == 0:
            self.llm.events.append('finish')
