"""Publishing a trained model: its card (`write_card`), and the upload to the Hugging Face Hub (`check_push` before a
run, `push_folder` after it). Imports no torch."""

from typing import TYPE_CHECKING

from chatgpt import on_demand

if TYPE_CHECKING:
    from chatgpt.monitor.publish.card import NUM_SAMPLES as NUM_SAMPLES
    from chatgpt.monitor.publish.card import ModelFacts as ModelFacts
    from chatgpt.monitor.publish.card import hub_name as hub_name
    from chatgpt.monitor.publish.card import write_card as write_card
    from chatgpt.monitor.publish.hub import PushError as PushError
    from chatgpt.monitor.publish.hub import check_push as check_push
    from chatgpt.monitor.publish.hub import push_folder as push_folder

__getattr__, __dir__ = on_demand(__name__)
