"""Text to records: prompts for PPO; demonstrations, preferences and labelled text for the other trainers.

    bytes ──reading──▶ Record ──shapes──▶ PromptExample · Demonstration · Preference · Labelled ──tokenize──▶ ids

`loading` and `prompts` walk the whole way in one call; `embedded` is a world with known truth that needs no files.
"""

from chatgpt.dataset.examples import BadRecord, Demonstration, Instruction, Labelled, Message, Preference, PromptExample
from chatgpt.dataset.loading import (
    Loaded,
    load_demonstrations,
    load_examples,
    load_labelled,
    load_preferences,
    split_examples,
)
from chatgpt.dataset.prompts import PromptOrder, PromptSet, load_prompts
from chatgpt.dataset.tokenize import (
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
    'check_tokenizer',
    'load_demonstrations',
    'load_examples',
    'load_labelled',
    'load_preferences',
    'load_prompts',
    'pack',
    'split_examples',
    'tokenize_demonstration',
    'tokenize_labelled',
    'tokenize_preference',
    'tokenize_prompt',
]
