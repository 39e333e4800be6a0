"""examples/train_prompts.py as its users run it: what a run leaves behind, and one line for every mistake."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from chatgpt.checkpoint import claim_folder
from chatgpt.dataset import embedded
from chatgpt.launch.arguments import run_main
from chatgpt.nn import GPTActor, RewardModel

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / 'examples' / 'train_prompts.py'
QUICK = [
    '--num_episodes=1', '--max_timesteps=2', '--update_timesteps=1', '--experience_batch_size=4', '--train_batch_size=4', '--max_epochs=1',
    '--max_new_tokens=4', '--sample_interval=1',
]  # fmt: skip


@pytest.fixture(scope='module')
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp('model')
    GPTActor(config=embedded.demo_config()).save_pretrained(folder, tokenizer=embedded.demo_tokenizer())
    return folder


@pytest.fixture(scope='module')
def prompt_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp('data') / 'prompts.jsonl'
    path.write_text('\n'.join(json.dumps(row) for row in embedded.demo_prompts(8)) + '\n')
    return path


def run(monkeypatch: pytest.MonkeyPatch, *flags: str) -> None:
    """The script's main with these flags, in this process."""
    spec = importlib.util.spec_from_file_location('train_prompts', SCRIPT)
    assert spec is not None and spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(sys, 'argv', [str(SCRIPT), *flags])
    run_main(module.main)


def fails(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *flags: str) -> str:
    """The one line that a wrong command line ends with."""
    with pytest.raises(SystemExit) as stop:
        run(monkeypatch, *flags)
    assert stop.value.code == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    return error


def test_a_run_leaves_metrics_settings_samples_and_a_model_that_transformers_loads(monkeypatch, tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    run(monkeypatch, *QUICK, '--save_path', str(tmp_path), '--tensorboard')
    lines = [json.loads(line) for line in (tmp_path / 'metrics.jsonl').read_text().splitlines()]
    assert [line['step'] for line in lines] == [1, 2]
    assert {'rollout/score_mean', 'ppo/approx_kl', 'perf/collect_s', 'perf/learn_s'} <= lines[0].keys()
    assert json.loads((tmp_path / 'settings.json').read_text())['max_new_tokens'] == 4
    assert (tmp_path / 'samples.jsonl').read_text().count('\n') >= 2
    model, tokenizer = AutoModelForCausalLM.from_pretrained(tmp_path / 'actor'), AutoTokenizer.from_pretrained(tmp_path / 'actor')
    assert model.config.vocab_size == len(tokenizer)


@pytest.mark.parametrize(
    'flags',
    [['--engine=hf'], ['--lora_rank=2'], ['--precision=bf16'], ['--num_samples_per_prompt=2', '--advantage_estimator=rloo']],
)
def test_options_run(monkeypatch, tmp_path, flags):
    run(monkeypatch, *QUICK, '--max_timesteps=1', '--save_path', str(tmp_path), *flags)
    assert (tmp_path / 'actor' / 'model.safetensors').is_file()


def test_own_prompts_model_and_reward_model(monkeypatch, tmp_path, model_folder, prompt_file):
    from transformers import GPT2Model

    torch.manual_seed(0)
    reward = RewardModel(GPT2Model(embedded.demo_config()))
    reward.calibrate(0.5)
    reward.save_pretrained(tmp_path / 'rm', tokenizer=embedded.demo_tokenizer())
    run(
        monkeypatch,
        str(prompt_file),
        '--pretrain',
        str(model_folder),
        '--reward_model',
        str(tmp_path / 'rm'),
        *QUICK,
        '--save_path',
        str(tmp_path / 'run'),
    )
    assert (tmp_path / 'run' / 'metrics.jsonl').read_text().count('\n') == 2


def test_resume_auto_goes_on_where_the_run_stopped(monkeypatch, tmp_path):
    common = [*QUICK, '--save_path', str(tmp_path), '--checkpoint_interval=1']
    run(monkeypatch, *common, '--max_timesteps=2')
    run(monkeypatch, *common, '--max_timesteps=4', '--resume', 'auto')
    lines = [json.loads(line) for line in (tmp_path / 'metrics.jsonl').read_text().splitlines()]
    assert [line['step'] for line in lines] == [1, 2, 3, 4]


# ---------------------------------------------------------------------- one line for every mistake, before any weight


@pytest.fixture
def no_weights(monkeypatch):
    """Fails when a weight is loaded or made."""
    from chatgpt.launch.build import PPOInputs

    def build_models(self):
        raise AssertionError('weights were touched before the mistake was found')

    monkeypatch.setattr(PPOInputs, 'build_models', build_models)


REWARD = ['--reward_fn', f'{ROOT / "examples" / "rewards.py"}:joy']


@pytest.mark.usefixtures('no_weights')
@pytest.mark.parametrize(
    ('flags', 'message'),
    [
        (['--kl_kind=k9'], "kl_kind='k9'|argument --kl_kind"),
        (['--train_batch_size=0'], 'train_batch_size=0 must be positive'),
        (['{prompts}', '--pretrain={model}'], 'give --reward_model FOLDER or --reward_fn module:function'),
        (['{prompts}', *REWARD], 'give --pretrain NAME_OR_FOLDER'),
        (['/no/such/file.csv', '--pretrain={model}', *REWARD], r'/no/such/file\.csv'),
        (['{prompts}', '--pretrain=/no/such/model', *REWARD], '/no/such/model'),
        (['{prompts}', '--pretrain={model}', '--reward_fn=nowhere:joy'], "No module named 'nowhere'"),
        (['{prompts}', '--pretrain={model}', '--reward_fn', f'{ROOT / "examples" / "rewards.py"}:jox'], "has no function 'jox'"),
        (['{nocolumn}', '--pretrain={model}', *REWARD], r'prompt.*(act|text)'),
        (['{empty}', '--pretrain={model}', *REWARD], r'line 2.*empty|empty.*line 2'),
        (['{prompts}', '--pretrain={model}', '--max_new_tokens=60', *REWARD], 'passes the context of 64'),
    ],
)
def test_mistakes(monkeypatch, capsys, tmp_path, model_folder, prompt_file, flags, message):
    import re

    (tmp_path / 'nocolumn.csv').write_text('act,text\nx,y\n')
    (tmp_path / 'empty.jsonl').write_text('{"prompt": "one day"}\n{"prompt": ""}\n')
    names = {
        'prompts': prompt_file,
        'model': model_folder,
        'nocolumn': tmp_path / 'nocolumn.csv',
        'empty': tmp_path / 'empty.jsonl',
    }
    error = fails(monkeypatch, capsys, '--save_path', str(tmp_path / 'run'), *[f.format(**names) for f in flags])
    assert 'error: ' in error
    assert re.search(message, error), error


@pytest.mark.usefixtures('no_weights')
def test_a_batch_that_cannot_be_cut_over_the_ranks(monkeypatch, capsys, tmp_path):
    monkeypatch.setenv('WORLD_SIZE', '3')
    error = fails(monkeypatch, capsys, '--strategy=ddp', '--save_path', str(tmp_path))
    assert 'experience_batch_size=8 cannot be cut over 3 ranks; use a multiple of 3, such as 6 or 9' in error


@pytest.mark.usefixtures('no_weights')
def test_a_tokenizer_that_does_not_match(monkeypatch, capsys, tmp_path, model_folder, prompt_file):
    from chatgpt.testing.fakes import byte_tokenizer

    byte_tokenizer().save_pretrained(tmp_path / 'bytes')
    error = fails(
        monkeypatch, capsys, str(prompt_file), '--pretrain', str(model_folder), '--tokenizer', str(tmp_path / 'bytes'), *REWARD
    )
    assert 'does not match the model' in error


@pytest.mark.usefixtures('no_weights')
def test_a_folder_that_cannot_be_written_or_that_another_run_holds(monkeypatch, capsys, tmp_path):
    (tmp_path / 'file').write_text('')
    assert 'error: ' in fails(monkeypatch, capsys, *QUICK, '--save_path', str(tmp_path / 'file' / 'run'))
    with claim_folder(tmp_path / 'held'):
        error = fails(monkeypatch, capsys, *QUICK, '--save_path', str(tmp_path / 'held'))
    assert f'process {os.getpid()}' in error


@pytest.mark.parametrize(
    ('body', 'message'),
    [
        ("raise KeyError('x')", "raised KeyError: 'x'"),
        ('import time; time.sleep(30)', 'did not return within 0.3 s'),
        ('return [1.0]', 'returned 1 scores for 4 responses'),
        ("return [float('nan')] * len(responses)", 'returned nan for sample 0'),
    ],
)
def test_a_reward_function_that_misbehaves(monkeypatch, capsys, tmp_path, body, message):
    (tmp_path / 'bad.py').write_text(f'def score(prompts, responses):\n    {body}\n')
    flags = [*QUICK, '--save_path', str(tmp_path / 'run'), '--reward_fn', f'{tmp_path / "bad.py"}:score', '--score_timeout_s=0.3']
    assert message in fails(monkeypatch, capsys, *flags)


# ---------------------------------------------------------------------- processes


def start(folder: Path, *flags: str, launcher: tuple[str, ...] = ()) -> subprocess.Popen[str]:
    env = os.environ | {'PYTHONPATH': str(ROOT), 'OMP_NUM_THREADS': '1', 'PYTHONUNBUFFERED': '1'}
    command = [sys.executable, *launcher, str(SCRIPT), *QUICK, '--save_path', str(folder), *flags]
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def test_torchrun_ddp(tmp_path):
    process = start(tmp_path, '--strategy=ddp', launcher=('-m', 'torch.distributed.run', '--standalone', '--nproc_per_node', '2'))
    output, _ = process.communicate(timeout=110)
    assert process.returncode == 0, output
    assert (tmp_path / 'actor' / 'config.json').is_file()
    assert (tmp_path / 'metrics.jsonl').read_text().count('\n') == 2


@pytest.mark.parametrize(('signum', 'code'), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_saves_and_leaves(tmp_path, signum, code):
    process = start(tmp_path, '--max_timesteps=100000')
    deadline = time.monotonic() + 60
    metrics = tmp_path / 'metrics.jsonl'
    while time.monotonic() < deadline and not (metrics.is_file() and metrics.read_text().count('\n') >= 2):
        time.sleep(0.05)
    process.send_signal(signum)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == code, output
    assert 'continue with --resume auto' in output
    assert 'Traceback' not in output
    steps = metrics.read_text().count('\n')
    saved = sorted((tmp_path / 'checkpoints').glob('step-*'))
    assert saved[-1].name == f'step-{steps:08d}'
