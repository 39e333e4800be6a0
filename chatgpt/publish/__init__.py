"""A trained model for others: the card beside its weights, and the way to the Hugging Face Hub. No torch.

`write_card` writes README.md and the picture in it, `check_push` finds out before a run whether its model may be
uploaded, `push_folder` uploads it.
"""

from chatgpt.publish.card import NUM_SAMPLES, write_card
from chatgpt.publish.facts import ModelFacts
from chatgpt.publish.hub import PushError, check_push, push_folder
from chatgpt.publish.text import hub_name

__all__ = ['NUM_SAMPLES', 'ModelFacts', 'PushError', 'check_push', 'hub_name', 'push_folder', 'write_card']
