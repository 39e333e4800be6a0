"""Tests of `TextEnvironment`: outputs of tools, and the mask of an episode."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from chatgpt_compat.trl.environment import TextEnvironment, TextHistory


class Characters:
    """A tokenizer with one id per character."""

    pad_token_id, eos_token = 0, chr(1)

    def __call__(self, text: str, return_tensors: str | None = None) -> dict[str, Any]:
        ids = [ord(letter) for letter in text]
        return {'input_ids': ids if return_tensors is None else torch.tensor([ids])}

    def decode(self, ids: torch.Tensor) -> str:
        return ''.join(map(chr, ids.tolist()))

    def batch_decode(self, rows: torch.Tensor) -> list[str]:
        return [self.decode(row) for row in rows]


class ScriptedModel:
    """A model that generates the given texts in turn, one for each row of a batch."""

    device = 'cpu'

    def __init__(self, tokenizer: Any, *texts: str) -> None:
        self.tokenizer, self.texts, self.prompts = tokenizer, list(texts), list[str]()

    def generate(self, input_ids: Any, attention_mask: Any, stopping_criteria: Any, **_: Any) -> torch.Tensor:
        rows = []
        for ids, mask in zip(input_ids, attention_mask, strict=True):
            self.prompts.append(self.tokenizer.decode(ids[mask.bool()]))
            rows.append(self.tokenizer(self.texts.pop(0))['input_ids'])
        longest = max(map(len, rows))
        grown = input_ids
        for step in range(longest):
            column = [row[step] if step < len(row) else self.tokenizer('z')['input_ids'][0] for row in rows]
            grown = torch.cat([grown, torch.tensor(column)[:, None]], dim=1)
            if all(criterion(grown, None) for criterion in stopping_criteria):
                break
        return grown


class Add:
    def __call__(self, text: str) -> str:
        left, right = text.split('+')
        return str(int(left) + int(right))


def rewards(texts: list[str], answers: list[str]) -> list[torch.Tensor]:
    return [torch.tensor(float(answer in text)) for text, answer in zip(texts, answers, strict=True)]


def environment(*texts: str, **options: Any) -> TextEnvironment:
    tokenizer = Characters()
    model: Any = SimpleNamespace(pretrained_model=SimpleNamespace(device='cpu'))
    model.generate = ScriptedModel(tokenizer, *texts).generate
    return TextEnvironment(model, tokenizer, {'Add': Add()}, rewards, 'Sum. ', **options)


def test_a_tool_is_called_and_only_generated_tokens_count():
    env = environment('<request><Add>1+2<call>', 'is 3<submit>')
    queries, responses, masks, scores, histories = env.run(['1+2?'], answers=['3'])
    decode = env.tokenizer.decode
    assert decode(queries[0]) == 'Sum. 1+2?'
    assert decode(responses[0]) == '<request><Add>1+2<call>3<response>is 3<submit>'
    assert decode(responses[0][masks[0].bool()]) == '<request><Add>1+2<call>is 3<submit>'
    assert scores == [torch.tensor(1.0)] and histories[0].completed and not histories[0].truncated


def test_tokens_after_a_stop_are_dropped():
    env = environment('4<submit>', 'a longer answer, 5<submit>')
    _, responses, masks, scores, _ = env.run(['a', 'bcd'], answers=['4', '4'])
    assert [env.tokenizer.decode(r) for r in responses] == ['4<submit>', 'a longer answer, 5<submit>']
    assert all(mask.all() for mask in masks) and [float(s) for s in scores] == [1.0, 0.0]


@pytest.mark.parametrize(
    'call, answer',
    [
        ('<request><Sub>1<call>', 'Unknown tool Sub.'),
        ('<request><Add>x<call>', 'Tool error: not enough values'),
        ('<request>none<call>', 'Unknown tool call: <request>none<call>'),
    ],
)
def test_failed_calls_get_a_response(call, answer):
    env = environment(call, '<submit>')
    *_, histories = env.run(['q'], answers=[''])
    assert answer in histories[0].text


def test_ends():
    *_, histories = environment('no call').run(['q'], answers=[''])
    assert histories[0].completed and histories[0].text.endswith('no call')
    calls = ['<request><Add>1+1<call>'] * 2
    *_, histories = environment(*calls, max_turns=2).run(['q'], answers=[''])
    assert histories[0].text.count('2<response>') == 2
    *_, histories = environment(*calls, max_length=5).run(['q'], answers=[''])
    assert histories[0].truncated
    *_, histories = environment(*calls, max_turns=1, max_tool_reponse=4).run(['q'], answers=[''])
    assert histories[0].text.endswith('2<response>')


def test_a_segment_must_not_be_empty():
    with pytest.raises(ValueError, match='must have text and tokens'):
        TextHistory('', torch.tensor([1]))
