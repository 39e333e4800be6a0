from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, ClassVar

import torch

from vllm.distributed.weight_transfer.base import TrainerInitInfo, TrainerWeightTransferEngine


@dataclass
class IPCTrainerInitInfo(TrainerInitInfo):
    backend: ClassVar[str] = 'ipc'
    packed: bool = False


@dataclass
class IPCWeightTransferUpdateInfo:
    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]
    ipc_handles: Any = None


class IPCWeightTransferEngine:
    def __init__(self, model: Any) -> None:
        self.model = model

    def init_transfer_engine(self, init_info: Any) -> None:
        assert init_info == {'packed': False}

    def receive_weights(self, update_info: Any) -> None:
        info = IPCWeightTransferUpdateInfo(**update_info)
        tensors = [torch.from_numpy(handle['here'][0]) for handle in info.ipc_handles]
        self.model.load_weights(zip(info.names, tensors, strict=True))


class IPCTrainerWeightTransferEngine(TrainerWeightTransferEngine):
    def __init__(self, client: Any, source: Any) -> None:
        self.client, self.source = client, source

    @classmethod
    def trainer_init(cls, init_info: Any, *, client: Any, source: Any = None) -> Any:
        assert len(source.owned_names(init_info.rank)) == len(source.metadata)
        client.init_weight_transfer_engine({'packed': init_info.packed})
        return cls(client, source)

    def send_weights(self) -> None:
        self.client.start_weight_update()
        named = list(self.source.iter_full())
        info = IPCWeightTransferUpdateInfo(
            [n for n, _ in named],
            [str(t.dtype).split('.')[-1] for _, t in named],
            [list(t.shape) for _, t in named],
            [{'here': (t.numpy(),)} for _, t in named],
        )
        self.client.update_weights(asdict(info))
        self.client.finish_weight_update()
