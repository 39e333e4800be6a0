from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory, WeightTransferTrainerFactory

__all__ = ['ParamMeta', 'WeightSource', 'WeightTransferEngineFactory', 'WeightTransferTrainerFactory']
