"""Text to records: prompts for PPO; demonstrations, preferences and labelled text for the other trainers.

    bytes ──reading──▶ Record ──shapes──▶ PromptExample · Demonstration · Preference · Labelled ──tokenize──▶ ids

`loading` and `prompts` do all steps in one call.
"""

from typing import TYPE_CHECKING

from chatgpt import on_demand

if TYPE_CHECKING:
    from chatgpt.data.examples import (
        BadRecord,
        Demonstration,
        Instruction,
        Labelled,
        Message,
        Preference,
        PromptExample,
    )
    from chatgpt.data.formats import note_model
    from chatgpt.data.loading import (
        Loaded,
        load_demonstrations,
        load_examples,
        load_labelled,
        load_preferences,
        split_examples,
    )
    from chatgpt.data.prompts import PromptOrder, PromptSet, as_prompts, load_prompts
    from chatgpt.data.tokenize import (
        TokenizedLabelled,
        TokenizedPreference,
        TokenizerOptions,
        check_tokenizer,
        pack,
        tokenize_demonstration,
        tokenize_labelled,
        tokenize_preference,
        tokenize_prompt,
    )

__getattr__, __dir__ = on_demand(__name__)

__all__ = [
    'BadRecord',
    'Demonstration',
    'Instruction',
    'Labelled',
    'Loaded',
    'Message',
    'Preference',
    'PromptExample',
    'PromptOrder',
    'PromptSet',
    'TokenizedLabelled',
    'TokenizedPreference',
    'TokenizerOptions',
    'as_prompts',
    'check_tokenizer',
    'load_demonstrations',
    'load_examples',
    'load_labelled',
    'load_preferences',
    'load_prompts',
    'note_model',
    'pack',
    'split_examples',
    'tokenize_demonstration',
    'tokenize_labelled',
    'tokenize_preference',
    'tokenize_prompt',
]
