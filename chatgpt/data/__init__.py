"""Text to records: prompts for PPO; demonstrations, preferences and labelled text for the other trainers.

    bytes ──reading──▶ Record ──shapes──▶ PromptExample · Demonstration · Preference · Labelled ──tokenize──▶ ids

`loading` and `prompts` do all steps in one call.
"""

from typing import TYPE_CHECKING

from chatgpt import on_demand

if TYPE_CHECKING:
    from chatgpt.data.examples import BadRecord as BadRecord
    from chatgpt.data.examples import Demonstration as Demonstration
    from chatgpt.data.examples import Instruction as Instruction
    from chatgpt.data.examples import Labelled as Labelled
    from chatgpt.data.examples import Message as Message
    from chatgpt.data.examples import Preference as Preference
    from chatgpt.data.examples import PromptExample as PromptExample
    from chatgpt.data.formats import note_model as note_model
    from chatgpt.data.loading import Loaded as Loaded
    from chatgpt.data.loading import load_demonstrations as load_demonstrations
    from chatgpt.data.loading import load_examples as load_examples
    from chatgpt.data.loading import load_labelled as load_labelled
    from chatgpt.data.loading import load_preferences as load_preferences
    from chatgpt.data.loading import split_examples as split_examples
    from chatgpt.data.prompts import PromptOrder as PromptOrder
    from chatgpt.data.prompts import PromptSet as PromptSet
    from chatgpt.data.prompts import as_prompts as as_prompts
    from chatgpt.data.prompts import load_prompts as load_prompts
    from chatgpt.data.tokenize import TokenizedLabelled as TokenizedLabelled
    from chatgpt.data.tokenize import TokenizedPreference as TokenizedPreference
    from chatgpt.data.tokenize import TokenizerOptions as TokenizerOptions
    from chatgpt.data.tokenize import check_tokenizer as check_tokenizer
    from chatgpt.data.tokenize import pack as pack
    from chatgpt.data.tokenize import tokenize_demonstration as tokenize_demonstration
    from chatgpt.data.tokenize import tokenize_labelled as tokenize_labelled
    from chatgpt.data.tokenize import tokenize_preference as tokenize_preference
    from chatgpt.data.tokenize import tokenize_prompt as tokenize_prompt

__getattr__, __dir__ = on_demand(__name__)
