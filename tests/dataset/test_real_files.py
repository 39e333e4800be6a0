"""Published files with their irregularities; skipped in a checkout without them."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from chatgpt.data import load_examples
from chatgpt.data.examples import Demonstration, Labelled, Preference, PromptExample
from chatgpt.data.reading import BadRecordError

SHARED = Path(__file__).resolve().parents[3] / 'shared' / 'data'
FILES = {
    'awesome_chatgpt_prompts.csv': (PromptExample, 152),
    'gsm8k_train.jsonl': (Demonstration, 7473),
    'llamafactory_alpaca_en_demo.json': (Demonstration, 999),
    'llamafactory_dpo_en_demo.json': (Preference, 300),
    'llamafactory_kto_en_demo.json': (Labelled, 300),
    'llm_on_ray_sample_finetune_data.jsonl': (Demonstration, 100),
    'llm_on_ray_sample_ppo_data.jsonl': (Preference, 100),
    'llm_on_ray_sample_rm_data.jsonl': (Preference, 100),  # not one object per line
    'movie_reviews.jsonl': (Labelled, 9062),
    'story_prompts.jsonl': (PromptExample, 731),
    'tinystories_val_slice.txt': (Demonstration, 4302),
    'torchtune_stack_exchange_paired_tiny.json': (Preference, 25),
}
pytestmark = pytest.mark.skipif(not SHARED.is_dir(), reason=f'needs {SHARED}')


@pytest.mark.parametrize('name', FILES)
def test_every_row_is_read(name):
    kind, number = FILES[name]
    found = load_examples(SHARED / name)
    assert Counter(type(e) for e in found) == {kind: number}
    assert found[0].where.startswith(str(SHARED / name))


def test_their_contents():
    pair = load_examples(SHARED / 'llm_on_ray_sample_rm_data.jsonl', max_examples=1)[0]
    assert pair.prompt.startswith('\n\nHuman: Can you describe') and pair.prompt.endswith('\n\nAssistant:')
    assert pair.responses[1] == ' Yes, you can spray it directly onto the cloth.'
    labelled = load_examples(SHARED / 'llamafactory_kto_en_demo.json')
    assert sum(e.label is True for e in labelled) == 150 == sum(e.label is False for e in labelled)
    talks = load_examples(SHARED / 'llamafactory_dpo_en_demo.json')
    assert sum(e.prompt[0].role == 'system' for e in talks) == 80 and all(e.prompt[-1].role == 'user' for e in talks)
    reviews = load_examples(SHARED / 'movie_reviews.jsonl', max_examples=2)
    assert [e.label for e in reviews] == [1, 0] and reviews[1].response.startswith('director chris eyre')


def test_an_empty_answer_is_named_and_skipped_on_request():
    with pytest.raises(BadRecordError, match='line 87: answer 1 of 2 is empty'):
        load_examples(SHARED / 'hh_harmless_half.jsonl')
    assert len(load_examples(SHARED / 'hh_harmless_half.jsonl', skip_bad_records=True)) == 1152
