"""examples/train_preference.py as its users run it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from example_script import script

from chatgpt.launch import demo_world
from chatgpt.launch.config_file import parse_run
from chatgpt.launch.runs import run_class
from chatgpt.testing.processes import free_port

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope='module')
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from chatgpt.nn import GPTActor

    folder = tmp_path_factory.mktemp('preference_data')
    labels = [
        {'text': r['prompt'] + r['response'], 'label': 'pos' if i % 2 else 'neg'}
        for i, r in enumerate(demo_world.demo_corpus(16))
    ]
    rewards = [{'prompt': r['prompt'], 'response': r['response'], 'reward': 0.73} for r in demo_world.demo_corpus(4)]
    stories = demo_world.demo_corpus(4)
    ranked = [
        {'prompt': r['prompt'], 'responses': [r['chosen'], r['rejected'], f'{r["rejected"]} {r["rejected"]}']}
        for r in demo_world.demo_preferences(6)
    ]
    tables = (
        ('pairs', demo_world.demo_preferences(24)),
        ('ranked', ranked),
        ('labels', labels),
        ('rewards', rewards),
        ('stories', stories),
    )
    for name, rows in tables:
        (folder / f'{name}.jsonl').write_text('\n'.join(json.dumps(row) for row in rows) + '\n')
    torch.manual_seed(0)
    GPTActor(config=demo_world.demo_config()).save_pretrained(folder / 'base', tokenizer=demo_world.demo_tokenizer())
    return folder


def metrics(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / 'metrics.jsonl').read_text().splitlines()]


@pytest.mark.parametrize(
    ('method', 'flags'),
    [
        ('dpo', ['--loss=ipo', '--precompute_ref_logprobs=false']),
        ('kto', ['--desirable_weight=1.3']),
        ('orpo', ['--weight=0.5']),
        ('simpo', ['--gamma=0.5']),
        ('dpo', ['--lora_rank=2', '--beta=0.5']),
    ],
)
def test_each_method_learns_from_a_file(monkeypatch, capsys, data, tmp_path, method, flags):
    from transformers import AutoModelForCausalLM

    out = tmp_path / 'run'
    script(
        'train_preference',
        monkeypatch,
        str(data / 'pairs.jsonl'),
        '--pretrain',
        str(data / 'base'),
        f'--method={method}',
        *flags,
        '--lr=3e-3',
        '--train_batch_size=6',
        '--max_epochs=4',
        '--log_interval=3',
        '--validation_percentage=25',
        '--save_path',
        str(out),
    )
    assert '18 examples to learn from, 6 to evaluate on' in capsys.readouterr().out
    first, last = metrics(out)[0], metrics(out)[-1]
    assert last[f'{method}/loss'] < first[f'{method}/loss']
    assert f'{method}/val_loss' in last
    trained = AutoModelForCausalLM.from_pretrained(out / 'actor').state_dict()
    base = AutoModelForCausalLM.from_pretrained(data / 'base').state_dict()
    assert any(not torch.equal(trained[name], base[name]) for name in base)


@pytest.mark.parametrize('method', ['dpo', 'kto'])
def test_three_ranked_answers(monkeypatch, data, tmp_path, method):
    script(
        'train_preference',
        monkeypatch,
        str(data / 'ranked.jsonl'),
        '--pretrain',
        str(data / 'base'),
        f'--method={method}',
        '--max_steps=2',
        '--log_interval=1',
        '--save_path',
        str(tmp_path / 'run'),
    )
    want = 0.6931 if method == 'dpo' else 0.5  # the policy is the reference
    assert metrics(tmp_path / 'run')[0][f'{method}/loss'] == pytest.approx(want, abs=0.01)


def test_kto_takes_labelled_answers(monkeypatch, data, tmp_path):
    script(
        'train_preference',
        monkeypatch,
        str(data / 'labels.jsonl'),
        '--pretrain',
        str(data / 'base'),
        '--method=kto',
        '--max_steps=2',
        '--log_interval=1',
        '--positive_label=pos',
        '--save_path',
        str(tmp_path / 'run'),
    )
    assert len(metrics(tmp_path / 'run')) == 2
    assert metrics(tmp_path / 'run')[0]['kto/loss'] == pytest.approx(
        0.5, abs=0.01
    )  # 1 − σ(0): the policy is the reference


def test_without_arguments(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(demo_world, 'NUM_STORIES', 32)
    monkeypatch.setattr(demo_world, 'NUM_EXAMPLES', 40)
    monkeypatch.chdir(tmp_path)
    script('train_preference', monkeypatch, '--log_interval=1', '--max_steps=2')
    assert '38 examples to learn from, 2 to evaluate on' in capsys.readouterr().out
    assert (tmp_path / 'outputs' / 'train_preference' / 'actor' / 'config.json').is_file()
    assert metrics(tmp_path / 'outputs' / 'train_preference')[0]['dpo/loss'] == pytest.approx(
        0.6931, abs=1e-4
    )  # log 2: nothing moved yet


@pytest.mark.parametrize(
    ('method', 'flags', 'expected'),
    [
        ('dpo', [], {'loss_type': 'sigmoid', 'beta': 0.1}),
        ('dpo', ['--loss=robust', '--label_smoothing=0.2'], {'loss_type': 'robust', 'label_smoothing': 0.2}),
        (
            'kto',
            ['beta=0.3', '--train_batch_size=16'],
            {'beta': 0.3, 'train_batch_size': 16, 'precompute_ref_logprobs': True},
        ),
        ('simpo', [], {'beta': 2.0, 'gamma': 1.0}),
        ('orpo', ['--weight=1'], {'weight': 1.0}),
    ],
)
def test_settings_reach_the_method(method, flags, expected):
    run = parse_run(run_class(method), description=None, positional='dataset', argv=flags)
    run.validate(1)
    config = run.config()
    assert {name: getattr(config, name) for name in expected} == expected


@pytest.mark.parametrize(
    ('flags', 'sentence'),
    [
        (['{pairs}', '--method=ppo'], "method='ppo' learns from no preferences; choose dpo, kto, orpo or simpo"),
        (['{pairs}', '--method=orpo', '--beta=1'], "unknown argument '--beta'"),
        (['{pairs}', '--label_smoothing=0.2'], 'label_smoothing=0.2 belongs to the losses cdpo and robust'),
        (['{pairs}', '--loss=cdpo', '--label_smoothing=0.5'], 'label_smoothing=0.5 must lie in [0, 0.5)'),
        (['{pairs}', '--method=kto', '--train_batch_size=1'], 'use 2 or more'),
        (['{pairs}', '--beta=0'], 'beta=0.0 must be positive'),
        (
            ['{rewards}', '--method=kto'],
            'rewards.jsonl: KTO needs the columns prompt, response and label (or text and label), where label is '
            'true or false, 1 or 0, good or bad, or a name with --positive_label NAME; or prompt, chosen and '
            'rejected. Found the columns prompt, response, reward, and 0.73 where a label is needed',
        ),
        (
            ['{labels}', '--method=kto', '--positive_label=other'],
            'KTO needs good and bad answers, and there are 0 good',
        ),
        (['{stories}', '--method=kto'], 'Found the columns prompt, response, and no label'),
        (['{labels}'], 'dpo learns from pairs, and these are labelled answers; use kto'),
    ],
)
def test_mistakes(monkeypatch, capsys, data, tmp_path, flags, sentence):
    places = {name: data / f'{name}.jsonl' for name in ('pairs', 'labels', 'rewards', 'stories')}
    with pytest.raises(SystemExit) as stop:
        script(
            'train_preference',
            monkeypatch,
            *(f.format(**places) for f in flags),
            '--pretrain',
            str(data / 'base'),
            '--save_path',
            str(tmp_path / 'run'),
        )
    assert stop.value.code == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1, lines
    assert sentence in lines[0]
    assert not (tmp_path / 'run').exists()


@pytest.mark.system
def test_under_torchrun(data, tmp_path):
    command = [
        sys.executable,
        '-m',
        'torch.distributed.run',
        '--nproc-per-node=2',
        f'--master-port={free_port()}',
        str(ROOT / 'examples' / 'train_preference.py'),
        str(data / 'pairs.jsonl'),
        '--pretrain',
        str(data / 'base'),
        '--strategy=fsdp',
        '--max_steps=2',
        '--log_interval=1',
        '--save_path',
        str(tmp_path),
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert [row['dpo/loss'] for row in metrics(tmp_path)][0] == pytest.approx(0.6931, abs=1e-4)
