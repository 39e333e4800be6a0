"""The fixed runs repeat themselves to the bit, and see a change in the fifth digit of a learning rate."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest
import record
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
    """On docs/metrics.md; an evaluation's own numbers have the names that its function gives."""
    page = (Path(__file__).resolve().parents[2] / 'docs' / 'metrics.md').read_text()
    documented = set(re.findall(r'`([a-z_]+(?:/[a-z_0-9]+)+)`', page))
    logged = {key.split()[-1] for key in recorded(name) if key.startswith('phase ')}
    assert len(logged) > 2
    common = ('grad_norm', 'grad_norm_max', 'lr', 'epoch')  # described once, under sft/
    names = {m.replace('/val_', '/') for m in logged if not m.startswith('eval/') and m.split('/')[1] not in common}
    assert names <= documented


def test_a_recording_is_compared_entry_by_entry(capsys):
    ours = {'simpo': recorded('simpo')}
    machine = {'torch': '2'}

    def compared(change, **more):
        before = {'machine': machine, 'runs': {'simpo': dict(ours['simpo'])} | more}
        change(before)
        return record.compare(before, machine, ours, '*'), capsys.readouterr().out

    last = list(ours['simpo'])[-1]
    assert compared(lambda before: None) == (0, 'all 1 runs are the same to the bit\n')
    assert compared(lambda before: before['runs']['simpo'].pop(last))[0] == 0  # only this code measures it
    code, told = compared(lambda before: before['runs']['simpo'].update({last: 'other'}), gone={})
    assert code == 1 and f'first {last}: other against' in told and 'gone differs: only in the recording' in told
    code, told = compared(lambda before: before.update(machine={'torch': '1'}))
    assert code == 1 and 'numbers of two machines are not comparable' in told
