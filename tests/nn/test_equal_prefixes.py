"""Tokens after equal prefixes are computed once: same results, fewer tokens through the model."""

from __future__ import annotations

import pytest
import torch
from model_cases import OTHERS, gradients, model_of
from torch import Tensor

import chatgpt.batching as batching
from chatgpt.batching import collate
from chatgpt.nn import Actor, Critic, RewardModel
from chatgpt.nn.packing import _packing_for as packing_for
from chatgpt.nn.packing import flat_hidden
from chatgpt.nn.trunk import base_model
from chatgpt.testing import tiny_causal_lm
from chatgpt.types import Sequence


def sequence(prompt: list[int], response: list[int]) -> Sequence:
    return Sequence(
        prompt_ids=torch.tensor(prompt),
        response_ids=torch.tensor(response),
        response_mask=torch.ones(len(response), dtype=torch.bool),
    )


SYSTEM = [7, 3, 9, 4] * 5
ONE, TWO = [*SYSTEM, 11, 12], [*SYSTEM, 13]
ALIKE = [
    sequence(ONE, [21, 22, 23]),
    sequence(TWO, [24]),
    sequence([5, 6], [25, 26]),
    sequence(ONE, [21, 27]),
    sequence(TWO, [24]),
]
# the third has a beginning of its own; the fourth repeats 23 tokens of the first, the fifth the whole second
COMPUTED = (25) + (2) + (4) + (1) + (0)


def test_indices_by_hand(monkeypatch):
    monkeypatch.setattr(batching, 'MIN_PREFIX', 2)
    rows = [sequence([1, 2, 3], [4]), sequence([1, 2], [5]), sequence([1], [6]), sequence([1, 2, 3], [7])]
    packing = collate(rows).packing
    assert packing is not None and packing.computed_index is not None and packing.state_index is not None
    # a first token alone is too short a prefix to share; [1, 2] and [1, 2, 3] are shared
    tokens = torch.cat([torch.cat((r.prompt_ids, r.response_ids)) for r in rows])
    assert tokens[packing.computed_index][packing.state_index].tolist() == tokens.tolist()
    a, b, c, d = packing.state_index.split([4, 3, 2, 4])
    assert a[:2].tolist() == b[:2].tolist() == d[:2].tolist() and a[2] == d[2] and a[3] != d[3]
    assert not set(c.tolist()) & set(a.tolist()) and len(packing.computed_index) == 3 + 1 + 1 + 2 + 1


@pytest.mark.parametrize('name', ['gpt2', 'opt', 'llama', *OTHERS])
def test_results_and_gradients_are_those_of_the_padded_forward(name):
    actor = Actor(model_of(name)).eval()
    shared, padded = collate(ALIKE), collate(ALIKE, pack=False)
    assert shared.packing is not None and shared.packing.computed_index is not None
    assert len(shared.packing.computed_index) == COMPUTED
    one, other = actor(shared, with_entropy=True), actor(padded, with_entropy=True)
    assert torch.allclose(one.logprobs, other.logprobs, atol=1e-5)
    assert torch.allclose(one.entropy, other.entropy, atol=1e-5)
    weights = torch.linspace(-1, 1, len(one.logprobs))
    a, b = gradients(actor, (one.logprobs * weights).sum()), gradients(actor, (actor(padded).logprobs * weights).sum())
    assert float((a - b).norm() / b.norm()) < 1e-5
    for module in (Critic(actor.model).eval(), RewardModel(actor.model).eval()):
        assert torch.allclose(module(shared), module(padded), atol=1e-5)


def widths(actor: Actor, batch: object) -> list[int]:
    """Returns the number of tokens that reach the first block's MLP."""
    seen: list[int] = []

    def note(_: object, inputs: tuple[Tensor, ...]) -> None:
        seen.append(inputs[0].shape[-2])

    handle = next(m for n, m in actor.named_modules() if n.endswith('mlp')).register_forward_pre_hook(note)
    actor(batch)
    handle.remove()
    return seen


def test_only_computed_tokens_go_through_the_model():
    actor = Actor(model_of('llama')).eval()
    assert widths(actor, collate(ALIKE)) == [COMPUTED]


def test_dropout_computes_every_token():
    actor = Actor(model_of('gpt2')).train()
    drops = [m for m in actor.modules() if isinstance(m, torch.nn.Dropout)]
    for rate, tokens in ((0.0, COMPUTED), (0.25, sum(s.num_tokens for s in ALIKE))):
        for module in drops:
            module.p = rate
        assert drops and widths(actor, collate(ALIKE)) == [tokens]


@pytest.mark.parametrize(('name', 'rate'), [('opt', 'dropout'), ('llama', 'attention_dropout')])
def test_dropout_of_a_rate_in_an_attribute_computes_every_token(name, rate):
    model = base_model(Actor(model_of(name)).model)
    batch = collate(ALIKE)
    blocks = [m for m in model.modules() if hasattr(m, rate)]
    assert blocks
    for training, value, all_tokens in ((True, 0.0, False), (True, 0.25, True), (False, 0.25, False)):
        model.train(training)
        for module in blocks:
            if isinstance(getattr(module, rate), float):
                setattr(module, rate, value)
        packing = packing_for(model, batch)
        assert (packing.state_index is None) == all_tokens


def test_a_wrong_state_gives_other_results():
    model = base_model(Actor(tiny_causal_lm('llama')).eval().model)
    batch = collate(ALIKE)
    right = flat_hidden(model, batch)
    assert batch.packing is not None and batch.packing.state_index is not None
    batch.packing.state_index[-1] = batch.packing.state_index[0]
    assert not torch.allclose(flat_hidden(model, batch), right, atol=1e-2)


def test_rows_of_one_length_and_the_whole_of_a_sequence():
    rows = [sequence(SYSTEM, [1, 2]), sequence(SYSTEM, [3, 4]), sequence(SYSTEM, [3, 4])]
    batch = collate(rows)
    assert batch.packing is not None and batch.packing.computed_index is not None
    assert len(batch.packing.computed_index) == 20 + 2 + 2
    actor = Actor(model_of('llama')).eval()
    assert torch.allclose(actor(batch).logprobs, actor(collate(rows, pack=False)).logprobs, atol=1e-5)


def test_little_in_common_is_not_shared():
    short = [sequence(SYSTEM[:15], [1, 2]), sequence(SYSTEM[:15], [3])]
    assert collate([*short, sequence([2], [9])]).packing.computed_index is None
    long = [sequence([*SYSTEM, *range(300)], [1]), sequence([*SYSTEM, *range(1, 200)], [3])]
    assert collate(long).packing.computed_index is None
