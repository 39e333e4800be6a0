from __future__ import annotations

from typing import Any


class WeightTransferEngineFactory:
    @classmethod
    def create_engine(cls, config: Any, vllm_config: Any, device: Any, model: Any) -> Any:
        from vllm.distributed.weight_transfer.ipc_engine import IPCWeightTransferEngine
        from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine

        engines = {'nccl': NCCLWeightTransferEngine, 'ipc': IPCWeightTransferEngine}
        return engines[config.backend](model)


class WeightTransferTrainerFactory:
    @classmethod
    def trainer_init(cls, init_info: Any, *, client: Any, source: Any = None) -> Any:
        from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerWeightTransferEngine
        from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerWeightTransferEngine

        engines = {'nccl': NCCLTrainerWeightTransferEngine, 'ipc': IPCTrainerWeightTransferEngine}
        return engines[init_info.backend].trainer_init(init_info, client=client, source=source)
