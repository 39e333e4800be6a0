"""benchmarks/one_hash.py: a shortened part as it is, and its page from made-up results."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / 'benchmarks'))
import one_hash


@pytest.mark.system
@pytest.mark.timeout(400)
def test_a_part_of_it(tmp_path, capsys):
    common = [f'--results={tmp_path}/results.json', f'--work={tmp_path}/work', '--updates=12']
    part = ['--only=ppo,sft', '--precisions=fp32']
    one_hash.main(['--layouts=naive,fsdp2,seed,bit', *part, *common])
    one_hash.main(['--layouts=killed,ray', '--only=ppo', '--precisions=fp32', *common])
    rows = {(r['method'], r['layout']): r for r in json.loads((tmp_path / 'results.json').read_text())['rows']}
    for method, layout in [('ppo', 'fsdp2'), ('sft', 'fsdp2'), ('ppo', 'killed'), ('ppo', 'ray')]:
        row = rows[method, layout]
        assert row['hash'] == rows[method, 'naive']['hash'] and row['parts'] == [], (method, layout)
        assert row['phases'] == {'rollouts': 3 * (method == 'ppo'), 'metrics': 3, 'weights': 3}
    for method in ('ppo', 'sft'):
        for layout in ('seed', 'bit'):
            assert rows[method, layout]['hash'] != rows[method, 'naive']['hash']
    assert 'phase 3' in rows['sft', 'bit']['parts'][-1]  # the flip is in the eleventh step
    capsys.readouterr()
    one_hash.main(['--layouts=naive', *part, *common])
    assert capsys.readouterr().out == ''  # nothing is run twice


def test_the_page(tmp_path):
    rows = [
        {'method': 'ppo', 'precision': 'fp32', 'layout': layout, 'updates': 20, 'seconds': 1.0, 'hash': digits * 64}
        | {'parts': parts, 'phases': {}}
        for layout, digits, parts in [
            ('naive', 'a', []),
            ('ddp2', 'a', []),
            ('fsdp2', 'b', ['phase 2, weights: actor/w[0] is 1.0 and 2.0']),
            ('seed', 'c', ['phase 1, metrics: ppo/kl is 1.0 and 2.0']),
        ]
    ]
    rows.append({'method': 'ppo', 'precision': 'fp32', 'layout': 'zero1', 'updates': 20, 'refused': 'cannot'})
    rows.append(
        {'method': 'ppo', 'precision': 'fp32', 'cost': 'naive', 'ordinary': [1.0, 2.0, 4.0], 'exact': [1.2, 2.2, 5.2]}
    )
    (tmp_path / 'results.json').write_text(json.dumps({'rows': rows}))
    one_hash.main([f'--page={tmp_path}/page.md', f'--results={tmp_path}/results.json'])
    text = (tmp_path / 'page.md').read_text()
    assert (
        '| ppo | fp32 | `aaaaaaaaaaaaaaaa` | = | not run | `bbbbbbbb` | not run | refused | not run | not run |' in text
    )
    assert '1 of 2 runs are the same as the Naive one; 1 of 1 controls differ.' in text
    assert 'Refused, ZeRO-1, 2: cannot' in text
    assert 'Not the same: ppo, fp32, fsdp2: phase 2, weights: actor/w[0] is 1.0 and 2.0' in text
    assert '| ppo | fp32 | Naive | 2.00 | 2.20 | 1.20 (1.10 to 1.30) |' in text


def test_a_word_that_is_no_part():
    with pytest.raises(ValueError, match="'gpo' is none of ppo, shared trunk, lora, grpo"):
        one_hash.main(['--only=gpo'])
