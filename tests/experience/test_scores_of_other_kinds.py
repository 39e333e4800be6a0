"""A reward model of another kind than the policy, decoder or encoder-decoder, gets texts with the special tokens of its
own training data, by hand: a to d are 6 to 9, begin 1, end 2."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from experience_samples import sample
from torch import nn

from chatgpt.data.formats import is_for_encoder_decoder, note_model
from chatgpt.launch.inputs import reward_model_inputs
from chatgpt.strategies import NaiveStrategy
from chatgpt.testing import char_tokenizer, encoder_decoder_tokenizer, tiny_config
from chatgpt.trainer.experience.scorers import RewardModelScorer


class Rows(nn.Module):
    """Keeps the rows that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[list[int], int]] = []

    def forward(self, batch: Any) -> torch.Tensor:
        for row in range(batch.num_sequences):
            actions = int((batch.action_rows == row).sum())
            self.seen.append((batch.input_ids[row][batch.attention_mask[row]].tolist(), actions))
        return torch.zeros(batch.num_sequences)


@pytest.mark.parametrize(
    ('family', 'prompt', 'response', 'ended', 'options', 'row', 'actions'),
    [
        ('t5', 'ab', 'cd', True, {}, [6, 7, 2, 8, 9, 2], 3),
        ('t5', 'ab', 'cd', False, {}, [6, 7, 2, 8, 9], 2),
        ('bart', 'ab', 'cd', True, {}, [1, 6, 7, 2, 1, 8, 9, 2], 4),
        ('t5', 'abcd', 'a', True, {'max_length': 3}, [8, 9, 2, 6, 2], 2),
        ('t5', 'ab', '', False, {}, [6, 7, 2, 2], 1),
    ],
)
def test_rows_of_an_encoder_decoder(family, prompt, response, ended, options, row, actions):
    given = sample(prompt_text=prompt, response_text=response, ended=ended)
    tokenizer, model = encoder_decoder_tokenizer(family), Rows()
    note_model(tokenizer, tiny_config(family))
    RewardModelScorer(model, tokenizer=tokenizer, **options).score([given], NaiveStrategy())
    assert model.seen == [(row, actions)]


def test_a_folder_of_the_other_kind_brings_a_tokenizer_of_its_own(tmp_path: Path):
    for family in ('t5', 'bart', 'gpt2'):
        tiny_config(family, positions=32).save_pretrained(tmp_path / family)
    char_tokenizer().save_pretrained(tmp_path / 'gpt2')
    policy = encoder_decoder_tokenizer('bart')
    note_model(policy, tiny_config('bart'))
    # the same kind and vocabulary: ids go over as they are, 31 on each side
    assert reward_model_inputs(str(tmp_path / 'bart'), policy) == (None, 31)
    own, context = reward_model_inputs(str(tmp_path / 'gpt2'), policy)
    assert own is not None and own is not policy and not is_for_encoder_decoder(own) and context == 32
    decoder = char_tokenizer()
    own, context = reward_model_inputs(str(tmp_path / 't5'), decoder)  # which has no tokenizer beside it
    assert is_for_encoder_decoder(own) and not is_for_encoder_decoder(decoder) and context is None
