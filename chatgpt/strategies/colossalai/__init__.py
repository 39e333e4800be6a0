"""ZeRO and Gemini of ColossalAI: the strategy is in `strategy`, the engines of its models in `engines` and `gemini`,
its options in `options`, and the patches to run without CUDA in `cpu`."""

from chatgpt.strategies.colossalai.cpu import bridge
from chatgpt.strategies.colossalai.options import import_colossalai
from chatgpt.strategies.colossalai.strategy import ColossalAIStrategy

__all__ = ['ColossalAIStrategy', 'bridge', 'import_colossalai']
