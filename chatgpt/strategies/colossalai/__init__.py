"""ZeRO and Gemini of ColossalAI: `strategy` is the plug, `engines` and `gemini` hold one model each and its
checkpoints, `options` the options, `cpu` the bridge that runs it all without CUDA."""

from chatgpt.strategies.colossalai.cpu import bridge
from chatgpt.strategies.colossalai.options import import_colossalai
from chatgpt.strategies.colossalai.strategy import ColossalAIStrategy

__all__ = ['ColossalAIStrategy', 'bridge', 'import_colossalai']
