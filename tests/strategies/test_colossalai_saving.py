"""`ColossalAIStrategy` on the real ColossalAI: between layouts, resumed, whole weights and files.

All checks on two processes ran in one job (`conftest.py`); each test looks at one outcome.
"""

from __future__ import annotations

import pytest
from colossalai_job import check_one_process, outcome
from colossalai_runs import STEPS, make_actor
from optional_packages import needs_colossalai

from chatgpt.testing.processes import run_distributed

pytestmark = [pytest.mark.system, needs_colossalai]


def test_pieces_move_between_layouts(colossalai_checks):
    facts = outcome(colossalai_checks, 'layouts')
    assert facts == {
        'gemini': True,
        'whole': True,
        'zero1': True,
        'naive': True,
        'steps': {2.0},
        'lr': 7e-4,
        'num': facts['num'],
    }
    model = make_actor()
    assert facts['num'] == 4 * len(list(model.parameters())), 'a weight, two moments and a step for every parameter'


@pytest.mark.parametrize('name', ['zero2 bf16', 'gemini bf16', 'gemini fp16'])
def test_resume_to_the_bit(colossalai_checks, name):
    assert outcome(colossalai_checks, f'resume, {name}') == (True, True, True)


@pytest.mark.parametrize('name', ['zero gpt2', 'zero lora', 'gemini llama', 'gemini lora'])
def test_full_model(colossalai_checks, name):
    facts = outcome(colossalai_checks, f'full model, {name}')
    assert facts['trained'] == facts['frozen'] == ([], True, True)
    assert facts['restored'] and facts['moved']
    if 'lora' not in name:  # there the copy has its adapters folded in
        assert facts['scored']


@pytest.mark.parametrize('name', ['zero2', 'gemini'])
def test_whole_files(colossalai_checks, name):
    same, refusal = outcome(colossalai_checks, f'files, {name}')
    assert same == [True, True]
    assert 'only_rank0=False' in refusal


def test_packing_is_looked_at_when_the_weights_are_there(colossalai_checks):
    no, yes = [False, False], [True, True]
    assert outcome(colossalai_checks, 'packing is settled') == [([no, no], True), ([yes, yes], True)]


def test_shard_init(colossalai_checks):
    assert outcome(colossalai_checks, 'shard_init') == ([False, True], True, True, True)


def test_one_process_takes_over_from_two(colossalai_checks, colossalai_folder):
    outcome(colossalai_checks, 'layouts')
    facts = run_distributed(check_one_process, 1, colossalai_folder)[0]
    assert facts['zero2'][0] and facts['gemini'][0]
    results, want, (largest, _) = facts['zero2'][1:]
    # one step was made, and `distances` divides by STEPS
    assert results[0][0] == pytest.approx(want[0][0], rel=1e-5) and largest <= 0.05 / STEPS
    results, want, (_, mean) = facts['gemini'][1:]
    assert results[0][0] == pytest.approx(want[0][0], rel=2**-8) and mean <= 0.032
    assert max(facts['adam'].values()) < 1e-6
