"""Publishing a trained model: its card (`write_card`), and the upload to the Hugging Face Hub (`check_push` before a
run, `push_folder` after it). Imports no torch."""

from typing import TYPE_CHECKING

from chatgpt import on_demand

if TYPE_CHECKING:
    from chatgpt.monitor.publish.card import NUM_SAMPLES, ModelFacts, hub_name, write_card
    from chatgpt.monitor.publish.hub import PushError, check_push, push_folder

__getattr__, __dir__ = on_demand(__name__)

__all__ = ['NUM_SAMPLES', 'ModelFacts', 'PushError', 'check_push', 'hub_name', 'push_folder', 'write_card']
