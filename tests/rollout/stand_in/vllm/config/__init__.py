from vllm.config.weight_transfer import WeightTransferConfig

__all__ = ['WeightTransferConfig']
