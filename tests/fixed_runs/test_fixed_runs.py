"""The fixed runs repeat themselves to the bit, and see a change in the fifth digit of a learning rate."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest
import runs

FEW = ['shared_trunk', 'sft_resumed', 'kto']
LOGGED = 'dynamic_sampling rft nlpo hydra ptx dpo orpo simpo ilql reward_model sft_evaluated'.split()


@cache
def recorded(name: str) -> runs.Record:
    return runs.record_run(name)


@pytest.mark.parametrize('name', FEW)
def test_a_run_repeats_itself_and_a_perturbation_is_seen(name):
    assert runs.first_difference(recorded(name), runs.record_run(name)) is None
    found = runs.first_difference(recorded(name), runs.record_run(name, lr_scale=1.0001))  # the negative control
    assert found is not None and ' against ' in found


@pytest.mark.parametrize('name', [*FEW[::2], 'nlpo', 'hydra', 'ptx', 'dpo', 'reward_model'])
def test_a_run_learns_something(name):
    """Weights that stand still, or metrics that are all 0, would agree with everything."""
    found = recorded(name)
    norms = [float.fromhex(value) for key, value in found.items() if key.endswith('grad_norm')]
    assert len(norms) >= 2 and all(norm > 1e-3 for norm in norms)
    losses = {value for key, value in found.items() if key.endswith('loss')}
    assert len(losses) >= 2


@pytest.mark.parametrize('name', [*FEW, *LOGGED])
def test_every_metric_of_a_run_has_its_formula(name):
    """On a page of metrics; an evaluation's own numbers have the names that its function gives."""
    pages = (Path(__file__).resolve().parents[2] / 'docs').glob('metrics*.md')
    documented = {m for page in pages for m in re.findall(r'`([a-z_]+(?:/[a-z_0-9]+)+)`', page.read_text())}
    logged = {key.split()[-1] for key in recorded(name) if key.startswith('phase ')}
    assert len(logged) > 2
    common = ('grad_norm', 'grad_norm_max', 'lr', 'epoch')  # described once, under sft/
    names = {m.replace('/val_', '/') for m in logged if not m.startswith('eval/') and m.split('/')[1] not in common}
    assert names <= documented


def test_the_first_difference_is_named_with_both_values():
    assert runs.first_difference({'x': '0x1.8p+0'}, {'x': '0x1.0p+0'}) == 'x: 0x1.8p+0 (1.5) against 0x1.0p+0 (1.0)'
    assert runs.first_difference({}, {'sha256 w': 'zz'}) == 'sha256 w: nothing against zz'
