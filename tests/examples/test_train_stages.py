"""train_sft.py, train_reward_model.py and train_prompts.py, one after another on files, as their users run them."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from example_script import script

from chatgpt.launch import demo_world
from chatgpt.testing.processes import free_port

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope='module')
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files for the three stages, and a model folder."""
    from chatgpt.nn import GPTActor

    folder = tmp_path_factory.mktemp('data')
    for name, rows in (
        ('sft', [{'instruction': r['prompt'], 'output': r['response']} for r in demo_world.demo_corpus(24)]),
        ('pairs', demo_world.demo_preferences(24)),
        (
            'labels',
            [
                {'text': r['response'], 'label': 'pos' if i % 2 else 'neg'}
                for i, r in enumerate(demo_world.demo_corpus(24))
            ],
        ),
        ('prompts', demo_world.demo_prompts(8)),
    ):
        (folder / f'{name}.jsonl').write_text('\n'.join(json.dumps(row) for row in rows) + '\n')
    GPTActor(config=demo_world.demo_config()).save_pretrained(folder / 'base', tokenizer=demo_world.demo_tokenizer())
    return folder


def metrics(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / 'metrics.jsonl').read_text().splitlines()]


def test_three_stages(monkeypatch, capsys, data, tmp_path):
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    quick = ['--log_interval=1', '--train_batch_size=8', '--max_epochs=1', '--lr=1e-3', '--validation_percentage=25']
    base = ['--pretrain', str(data / 'base')]
    script('train_sft', monkeypatch, str(data / 'sft.jsonl'), *base, '--save_path', str(tmp_path / 'sft'), *quick)
    assert '18 examples to learn from, 6 to evaluate on' in capsys.readouterr().out
    assert 'sft/val_perplexity' in metrics(tmp_path / 'sft')[-1]
    actor = tmp_path / 'sft' / 'actor'
    assert AutoModelForCausalLM.from_pretrained(actor)
    script(
        'train_reward_model',
        monkeypatch,
        str(data / 'pairs.jsonl'),
        '--pretrain',
        str(actor),
        '--save_path',
        str(tmp_path / 'rm'),
        '--loss_fn=log_exp',
        '--max_len=48',
        *quick,
    )
    assert 'rm/val_accuracy' in metrics(tmp_path / 'rm')[-1]
    assert AutoModelForSequenceClassification.from_pretrained(tmp_path / 'rm' / 'reward_model')
    config = {
        'General': {
            'model_name': str(actor),
            'rm_pretrain': str(tmp_path / 'rm' / 'reward_model'),
            'output_dir': str(tmp_path / 'ppo'),
        },
        'Dataset': {'train_file': str(data / 'prompts.jsonl'), 'validation_split_percentage': 25},
        'Training': {
            'experience_batch_size': 3,
            'train_batch_size': 3,
            'epochs': 2,
            'learning_rate': 1e-4,
            'max_new_tokens': 6,
            'max_epochs': 1,
            'eval_interval': 2,
        },
    }
    (tmp_path / 'ppo.json').write_text(json.dumps(config))
    script('train_prompts', monkeypatch, '--config_file', str(tmp_path / 'ppo.json'))
    seen = metrics(tmp_path / 'ppo')
    assert len(seen) == 4  # two passes over six prompts, three at a time
    assert [step for step, row in enumerate(seen, 1) if 'eval/score_mean' in row] == [2, 4]
    rows = [json.loads(line) for line in (tmp_path / 'ppo' / 'samples.jsonl').read_text().splitlines()]
    assert rows
    assert (tmp_path / 'ppo' / 'config.yaml').is_file()
    assert AutoModelForCausalLM.from_pretrained(tmp_path / 'ppo' / 'actor')


def test_every_prompt_is_visited(monkeypatch, data, tmp_path):
    """The seed system used the first prompt only."""
    seen = tmp_path / 'seen.txt'
    note = f'open({str(seen)!r}, "a").write("\\n".join(prompts) + "\\n")'
    (tmp_path / 'note.py').write_text(f'def score(prompts, responses):\n    {note}\n    return [0.0] * len(prompts)\n')
    reward = ['--reward_fn', f'{tmp_path}/note.py:score']
    script(
        'train_prompts',
        monkeypatch,
        str(data / 'prompts.jsonl'),
        '--pretrain',
        str(data / 'base'),
        *reward,
        '--save_path',
        str(tmp_path / 'run'),
        'epochs=1',
        '--experience_batch_size=2',
        '--train_batch_size=2',
        '--max_new_tokens=3',
    )
    assert sorted(set(seen.read_text().split('\n')) - {''}) == sorted(
        {row['prompt'] for row in demo_world.demo_prompts(8)}
    )


def test_labelled_text_and_adapters(monkeypatch, data, tmp_path):
    base = ['--pretrain', str(data / 'base')]
    script(
        'train_reward_model',
        monkeypatch,
        str(data / 'labels.jsonl'),
        *base,
        '--save_path',
        str(tmp_path / 'rm'),
        '--lora_rank=2',
        '--lora_alpha=8',
        '--lora_target_modules=c_attn',
        '--max_steps=2',
        '--log_interval=1',
    )
    assert 0 <= metrics(tmp_path / 'rm')[-1]['rm/accuracy'] <= 1
    script(
        'train_sft',
        monkeypatch,
        str(data / 'sft.jsonl'),
        '--pretrain',
        str(data / 'base'),
        '--save_path',
        str(tmp_path / 'sft'),
        '--lora_rank=2',
        '--lora_dropout=0.1',
        '--max_steps=2',
        '--log_interval=1',
    )
    assert len(metrics(tmp_path / 'sft')) == 2


def test_hydra_from_the_command_line(monkeypatch, data, tmp_path):
    (tmp_path / 'r.py').write_text('def score(prompts, responses):\n    return [float(len(r)) for r in responses]\n')
    reward = ['--reward_fn', f'{tmp_path}/r.py:score']
    script(
        'train_prompts',
        monkeypatch,
        str(data / 'prompts.jsonl'),
        '--pretrain',
        str(data / 'base'),
        *reward,
        '--save_path',
        str(tmp_path / 'run'),
        'training_iteration=1',
        '--experience_batch_size=2',
        '--train_batch_size=2',
        '--max_new_tokens=3',
        '--num_layers_unfrozen=1',
    )
    assert metrics(tmp_path / 'run')[-1]['ppo/num_updates'] > 0


def test_without_arguments(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(demo_world, 'NUM_STORIES', 32)
    monkeypatch.setattr(demo_world, 'NUM_EXAMPLES', 40)
    monkeypatch.chdir(tmp_path)
    for name, kind in (('train_sft', 'actor'), ('train_reward_model', 'reward_model')):
        script(name, monkeypatch, '--log_interval=2', '--max_steps=4')
        assert (tmp_path / 'outputs' / name / kind / 'config.json').is_file()
    assert capsys.readouterr().out.count('examples to learn from') == 2


def test_a_trained_model_is_not_replaced(monkeypatch, capsys, data, tmp_path):
    flags = [
        str(data / 'sft.jsonl'),
        '--pretrain',
        str(data / 'base'),
        '--save_path',
        str(tmp_path),
        '--max_steps=1',
        '--log_interval=1',
        '--checkpoint_minutes=0',
    ]
    script('train_sft', monkeypatch, *flags)
    before = (tmp_path / 'actor' / 'model.safetensors').stat().st_mtime_ns
    capsys.readouterr()
    with pytest.raises(SystemExit):
        script('train_sft', monkeypatch, *flags)
    error = capsys.readouterr().err
    assert (
        f'{tmp_path} holds the trained model of an earlier run, actor/, and no checkpoints to go on from: choose '
        'another' in error
    )
    assert (tmp_path / 'actor' / 'model.safetensors').stat().st_mtime_ns == before
    shutil.rmtree(tmp_path / 'actor')
    script('train_sft', monkeypatch, *flags)
    assert (
        f'{tmp_path} holds an earlier run without checkpoints: its lines are kept in *.previous.jsonl'
        in capsys.readouterr().out
    )
    assert len(metrics(tmp_path)) == 1 and (tmp_path / 'metrics.previous.jsonl').is_file()


def test_a_run_is_resumed(monkeypatch, data, tmp_path):
    flags = [str(data / 'sft.jsonl'), '--pretrain', str(data / 'base'), '--log_interval=1', '--train_batch_size=8']
    script('train_sft', monkeypatch, *flags, '--save_path', str(tmp_path / 'whole'), '--max_epochs=2')
    half = ['--save_path', str(tmp_path / 'half'), '--checkpoint_interval=1']
    script('train_sft', monkeypatch, *flags, *half, '--max_epochs=1')
    with pytest.raises(SystemExit):  # without --resume the folder is taken
        script('train_sft', monkeypatch, *flags, *half, '--max_epochs=2')
    script('train_sft', monkeypatch, *flags, *half, '--max_epochs=2', '--resume=auto')
    a, b = (
        [{k: v for k, v in row.items() if k.startswith('sft/')} for row in metrics(tmp_path / n)]
        for n in ('whole', 'half')
    )
    assert a[3:] == b[3:]


@pytest.mark.parametrize(
    ('name', 'flags', 'sentence'),
    [
        ('train_sft', ['data.jsonl'], 'data of your own needs a model: give --pretrain'),
        (
            'train_sft',
            ['{sft}', '--pretrain={base}', '--early_stopping_patience=2'],
            'early_stopping_patience needs eval data',
        ),
        ('train_reward_model', ['{prompts}', '--pretrain={base}'], 'prompts.jsonl, line 1'),
        ('train_reward_model', ['{pairs}', '--pretrain={base}', '--loss_fn=mse'], "'mse' is none of: log_sig, log_exp"),
        ('train_reward_model', ['--learning_rates=1'], "unknown argument '--learning_rates'"),
        ('train_sft', ['nowhere.jsonl', '--pretrain={base}'], 'nowhere.jsonl'),
        ('train_sft', ['{sft}', '--pretrain={base}', '--max_len=65'], '64 tokens; give at most 64, or leave it out'),
        (
            'train_reward_model',
            ['{pairs}', '--pretrain={base}', '--max_len=512'],
            'max_len=512 is beyond the context of',
        ),
    ],
)
def test_mistakes(monkeypatch, capsys, data, tmp_path, name, flags, sentence):
    places = {
        'pairs': data / 'pairs.jsonl',
        'sft': data / 'sft.jsonl',
        'prompts': data / 'prompts.jsonl',
        'base': data / 'base',
    }
    with pytest.raises(SystemExit) as stop:
        script(name, monkeypatch, *(f.format(**places) for f in flags), '--save_path', str(tmp_path / 'run'))
    assert stop.value.code == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1, lines
    assert sentence in lines[0]
    assert not (tmp_path / 'run').exists()


@pytest.mark.system
@pytest.mark.parametrize('name', ['train_sft', 'train_reward_model'])
def test_under_torchrun(data, tmp_path, name):
    source = data / ('sft.jsonl' if name == 'train_sft' else 'pairs.jsonl')
    command = [
        sys.executable,
        '-m',
        'torch.distributed.run',
        '--nproc-per-node=2',
        f'--master-port={free_port()}',
        str(ROOT / 'examples' / f'{name}.py'),
        str(source),
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
    assert len(metrics(tmp_path)) == 2
