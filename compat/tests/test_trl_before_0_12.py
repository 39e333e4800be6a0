"""TRL's programs before 0.12: which tokens texts, prompts and tokenized pairs become, and arguments of a trainer."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from transformers import AutoTokenizer, GPT2ForSequenceClassification

from chatgpt.launch import demo_world
from chatgpt.nn import GPTActor
from chatgpt_compat.trl import pairs, sft

TEXTS = [{'text': 'one day a cat'}, {'text': 'went to the hill'}]
PAIRS = [{'prompt': 'one day', 'chosen': ' a cat', 'rejected': ' went'}] * 2


@pytest.fixture(scope='module')
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a small policy with its tokenizer."""
    path = tmp_path_factory.mktemp('model')
    torch.manual_seed(0)
    GPTActor(config=demo_world.demo_config()).save_pretrained(path, tokenizer=demo_world.demo_tokenizer())
    return path


@pytest.fixture
def tokenizer(folder):
    return AutoTokenizer.from_pretrained(folder)


@pytest.fixture
def plain_arguments(tmp_path):
    """Arguments of transformers, which have no field of TRL's."""
    return transformers.TrainingArguments(str(tmp_path), max_steps=1, save_strategy='no', report_to=[])


def ids_of(record):
    return torch.cat([record.prompt_ids, record.response_ids]).tolist()


def test_a_text_has_no_end_token_unless_texts_are_packed(folder, tokenizer, plain_arguments):
    one, two = (tokenizer(row['text'])['input_ids'] for row in TEXTS)
    end = tokenizer.eos_token_id
    before = sft.SFTTrainer(str(folder), plain_arguments, train_dataset=TEXTS, tokenizer=tokenizer)
    assert [ids_of(record) for record in before.records(TEXTS)] == [one, two]
    later = sft.SFTTrainer(str(folder), plain_arguments, train_dataset=TEXTS, processing_class=tokenizer)
    assert [ids_of(record) for record in later.records(TEXTS)] == [[*one, end], [*two, end]]
    packed = sft.SFTTrainer(
        str(folder), plain_arguments, train_dataset=TEXTS, tokenizer=tokenizer, packing=True, max_seq_length=3
    )
    stream = [*one, end, *two, end]
    assert len(stream) == 10
    assert [ids_of(record) for record in packed.records(TEXTS)] == [stream[:3], stream[3:6], stream[6:9]]
    assert all(record.response_mask.all() for record in packed.records(TEXTS))
    with pytest.raises(ValueError, match='all texts have 10 tokens, fewer than 11'):
        sft.SFTTrainer(
            str(folder), plain_arguments, train_dataset=TEXTS, tokenizer=tokenizer, packing=True, max_seq_length=11
        )


def test_arguments_of_the_trainer_hold_beside_those_of_transformers(folder, tokenizer, plain_arguments):
    trainer = pairs.DPOTrainer(
        str(folder), None, plain_arguments, train_dataset=PAIRS, tokenizer=tokenizer, beta=0.7, max_length=9
    )
    assert (trainer.args.beta, trainer.args.max_length, trainer.inner.config.beta) == (0.7, 9, 0.7)


def test_a_prompt_of_dpo_begins_with_the_begin_token(folder, tokenizer, tmp_path):
    tokenizer.bos_token_id, start = 5, tokenizer('one day')['input_ids']
    args = pairs.DPOConfig(str(tmp_path), max_steps=1, save_strategy='no')
    before = pairs.DPOTrainer(str(folder), None, args, train_dataset=PAIRS, tokenizer=tokenizer)
    assert [pair.prompt_ids.tolist() for pair in before.records(PAIRS)] == [[5, *start]] * 2
    tokenizer.bos_token_id = start[0]  # it has one already
    assert [pair.prompt_ids.tolist() for pair in before.records(PAIRS)] == [start] * 2


def test_tokenized_pairs_of_a_reward_model_are_taken_as_they_are(tokenizer, tmp_path):
    rows = [
        {
            'chosen': 'a text', 'rejected': 'another', 'margin': 0.5,
            'input_ids_chosen': [4, 5, 6], 'input_ids_rejected': [4, 7],
            'attention_mask_chosen': [1, 1, 1], 'attention_mask_rejected': [1, 1],
        }
    ] * 2  # fmt: skip
    model = GPT2ForSequenceClassification(demo_world.demo_config()).eval()
    model.config.num_labels, model.config.pad_token_id = 1, 0
    model.score = torch.nn.Linear(model.config.n_embd, 1, bias=False)
    args = pairs.RewardConfig(str(tmp_path), max_steps=1, save_strategy='no')
    trainer = pairs.RewardTrainer(model, args, train_dataset=rows, tokenizer=tokenizer)
    (pair, _) = trainer.records(rows)
    assert (pair.prompt_ids.tolist(), [r.tolist() for r in pair.responses]) == ([4], [[5, 6], [7]])
    assert pair.scores == (0.5, 0.0)
    assert trainer.train().global_step == 1
    with pytest.raises(ValueError, match='must begin with the same token'):
        pairs.pair_of(torch.tensor([3, 4]), torch.tensor([4, 5]))
