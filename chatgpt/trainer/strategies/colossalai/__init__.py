"""ZeRO and Gemini of ColossalAI: `strategy` is the plug, `engines` and `gemini` hold one model each, `parts` what a
process has of it under tensor parallelism, `states` their checkpoints, `options` what may be chosen, `cpu` the bridge
that runs it all without CUDA."""

from chatgpt.trainer.strategies.colossalai.strategy import ColossalAIStrategy

__all__ = ['ColossalAIStrategy']
