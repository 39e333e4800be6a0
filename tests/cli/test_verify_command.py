"""`verify RUN RUN`: comparisons, output and exit code."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from command_line import call

from chatgpt.monitor.run_folder.rollouts import PER_TOKEN, write_rollouts
from chatgpt.strategies.checkpoint import pieces_of, write_checkpoint


def folder(path: Path, phases: int = 3, saved: tuple[int, ...] = (1, 2, 3), **changes: Any) -> Path:
    """Writes a run. `changes`: {'metrics' | 'tokens' | 'values' | 'samples' | 'weights' | 'kl' | 'callbacks': phase}:
    what differs from that phase on."""

    def other(what: str, phase: int) -> bool:
        return what in changes and phase >= changes[what]

    path.mkdir(parents=True)
    rows = []
    for phase in range(1, phases + 1):
        loss = 0.25 * phase + 2.0**-40 * other('metrics', phase)
        rows.append({'step': phase, 'ppo/loss': loss, 'ppo/kl': None, 'perf/total_s': len(str(path)) * 0.1})
        ids = [6, 7, 8 + other('tokens', phase)]
        per_token = {name: np.array([0.5, -1.0, 0.0], dtype=np.float32) for name in PER_TOKEN}
        if other('values', phase):
            per_token['values'] = np.array([0.5, -1.0, -0.0], dtype=np.float32)
        samples = (104, 109) if other('samples', phase) else (4, 9)
        write_rollouts(path / 'rollouts', phase, [row(phase, index, ids, per_token) for index in samples])
    (path / 'metrics.jsonl').write_text(''.join(json.dumps(r) + '\n' for r in rows))
    for phase in saved:
        weight = torch.full((2, 3), float(phase))
        weight[1, 0] += other('weights', phase)
        state = {
            'samples_drawn': 8 * phase,
            'kl_controller': {'coef': 0.1 + other('kl', phase)},
            'callbacks': {'Watch.0': other('callbacks', phase)},
        }
        write_checkpoint(
            path / 'checkpoints' / f'step-{phase:08d}',
            {'actor/': pieces_of({'weight': weight, 'bias': torch.ones(1)})},
            meta={'owners': {'actor': 'models'}},
            state={'trainer': state},
        )
    return path


def row(phase: int, index: int, ids: list[int], per_token: dict[str, Any]) -> dict[str, Any]:
    numbers = {'score': 1.0, 'shaped_score': 0.25, 'kl': 0.125, 'version': phase - 1, 'group': index}
    texts = {'prompt': 'A', 'response': 'B', 'finish_reason': 'eos', 'columns': '{}'}
    lists = {'prompt_ids': [4], 'token_ids': ids, 'prompt_tokens': ['A'], 'tokens': ['B'] * 3, 'mask': [True] * 3}
    return {
        'phase': phase, 'index': index, **numbers, **texts, **lists, **per_token, 'entropy': None, 'weighted_scores': []
    }  # fmt: skip


def verify(monkeypatch, capsys, one: Path, other: Path) -> tuple[int, str]:
    code = call(monkeypatch, 'verify', str(one), str(other))
    captured = capsys.readouterr()
    return code, captured.out + captured.err


def test_the_same(tmp_path, monkeypatch, capsys):
    a, b = folder(tmp_path / 'a'), folder(tmp_path / 'another')
    code, out = verify(monkeypatch, capsys, a, b)
    assert code == 0
    hashes = re.findall(r'3 phases, weights after phase 3 have SHA-256 ([0-9a-f]{64})\n', out)
    assert len(hashes) == 2 and len(set(hashes)) == 1
    assert out.endswith(
        'the same: 3 phases of rollouts, 3 phases of metrics, 3 phases of weights, 3 phases of state compared\n'
    )


def test_half_finished_and_saved_at_other_phases(tmp_path, monkeypatch, capsys):
    a, b = folder(tmp_path / 'a', saved=(2, 3)), folder(tmp_path / 'b', phases=2, saved=(2,))
    with open(b / 'metrics.jsonl', 'a') as file:
        file.write('{"step": 3, "ppo/lo')  # an incomplete line
    code, out = verify(monkeypatch, capsys, a, b)
    assert code == 0 and f'{b}: 2 phases, weights after phase 2 have' in out
    assert out.endswith(
        'the same: 2 phases of rollouts, 2 phases of metrics, 1 phase of weights, 1 phase of state compared\n'
    )
    c = folder(tmp_path / 'c', saved=())
    code, out = verify(monkeypatch, capsys, a, c)
    assert code == 0 and f'{c}: 3 phases, no checkpoint\n' in out and '0 phases of weights' in out


def test_the_first_differences(tmp_path, monkeypatch, capsys):
    a = folder(tmp_path / 'a')
    code, out = verify(monkeypatch, capsys, a, folder(tmp_path / 'b', tokens=2, metrics=2, weights=3))
    assert code == 1
    assert out.endswith(
        'and they differ in\n'
        '  phase 2, rollouts: token_ids[2] of sample 4 is 8 and 9, and 1 other sequence of this phase\n'
        '  phase 2, metrics: ppo/loss is 0.5 and 0.5000000000009095\n'
        '  phase 3, weights: actor/weight[1, 0] is 3.0 and 4.0\n'
    )
    code, out = verify(monkeypatch, capsys, a, folder(tmp_path / 'c', values=1))
    assert code == 1 and 'phase 1, rollouts: values[2] of sample 4 is 0.0 and -0.0' in out and 'weights:' not in out
    code, out = verify(monkeypatch, capsys, a, folder(tmp_path / 'd', samples=3))
    assert code == 1 and '  phase 3, rollouts: the first sample is 4 and 104, and no sample is in both\n' in out


def test_state_of_the_trainer_counts_and_that_of_callbacks_does_not(tmp_path, monkeypatch, capsys):
    a = folder(tmp_path / 'a')
    code, out = verify(monkeypatch, capsys, a, folder(tmp_path / 'b', kl=2))
    assert code == 1 and out.endswith('they differ in\n  phase 2, state: kl_controller.coef is 0.1 and 1.1\n')
    assert verify(monkeypatch, capsys, a, folder(tmp_path / 'c', callbacks=1))[0] == 0


def test_what_cannot_be_compared_is_one_line(tmp_path, monkeypatch, capsys):
    a = folder(tmp_path / 'a')
    code, out = verify(monkeypatch, capsys, a, tmp_path / 'nothing')
    assert code == 2 and out.endswith(f'{tmp_path / "nothing"}: there is no such folder\n') and out.count('\n') == 1
    torn = folder(tmp_path / 'torn')
    part = next((torn / 'rollouts').glob('*2.parquet'))
    part.write_bytes(part.read_bytes()[:100])
    with pytest.warns(UserWarning, match='parquet'):
        code, out = verify(monkeypatch, capsys, a, torn)
    assert code == 2 and f'{torn}: the recorded rollouts of phase 2 cannot be read' in out
    empty = tmp_path / 'empty'
    empty.mkdir()
    (empty / 'metrics.jsonl').write_text('')
    code, out = verify(monkeypatch, capsys, a, empty)
    assert code == 2 and 'have no phase in common' in out
    (a / 'checkpoints' / 'step-00000002' / 'manifest.json').write_text('{')
    code, out = verify(monkeypatch, capsys, a, folder(tmp_path / 'b'))
    assert code == 2 and 'step-00000002' in out
    assert call(monkeypatch, 'verify', str(a)) == 2
