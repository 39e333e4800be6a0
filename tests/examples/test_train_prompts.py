"""examples/train_prompts.py as its users run it: what a run leaves behind, and one line for every mistake."""

from __future__ import annotations

import csv
import importlib.util
import json
import os
import re
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
SHARED = ROOT.parent / 'shared'
QUICK = [
    '--num_episodes=1', '--max_timesteps=2', '--update_timesteps=1', '--experience_batch_size=4', '--train_batch_size=4', '--max_epochs=1',
    '--max_new_tokens=4', '--sample_interval=1',
]  # fmt: skip
REWARD = ['--reward_fn', f'{ROOT / "examples" / "rewards.py"}:joy']


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
    """The one line that a wrong command line ends with; nothing else may be on stderr."""
    with pytest.raises(SystemExit) as stop:
        run(monkeypatch, *flags)
    assert stop.value.code == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1, lines
    assert lines[0].startswith('error: ')
    return lines[0]


def metrics_of(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / 'metrics.jsonl').read_text().splitlines()]


def test_without_arguments_a_model_of_its_own_learns_stories_first(monkeypatch, tmp_path, capsys):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from chatgpt.launch import build

    monkeypatch.setattr(build, 'NUM_STORIES', 64)
    monkeypatch.chdir(tmp_path)
    short = ['--num_episodes=1', '--max_timesteps=1', '--update_timesteps=1', '--max_epochs=1']
    run(monkeypatch, *short, '--tensorboard')
    shown = capsys.readouterr()
    assert 'learns to write stories first' in shown.out
    assert 'samples of phase 1' in shown.out
    assert shown.err == ''  # no bars of libraries, no warnings
    folder = tmp_path / 'outputs' / 'train_prompts'
    line = metrics_of(folder)[0]
    assert {'step', 'rollout/score_mean', 'ppo/approx_kl', 'perf/collect_s', 'perf/score_s', 'perf/learn_s'} <= line.keys()
    assert line['ppo/first_ratio_error'] < 1e-4
    settings = json.loads((folder / 'settings.json').read_text())
    assert (settings['lr'], settings['max_new_tokens'], settings['model'], settings['world_size']) == (3e-4, 32, 'gpt2', 1)
    assert len((folder / 'samples.jsonl').read_text().splitlines()) == 4
    assert list((folder / 'tensorboard').iterdir())
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder / 'actor'), AutoTokenizer.from_pretrained(folder / 'actor')
    ids = tokenizer('one day a small fox', return_tensors='pt')['input_ids']
    assert model.generate(ids, max_new_tokens=4, do_sample=False).shape[1] <= ids.shape[1] + 4


def test_the_embedded_model_does_not_disturb_the_draws_around_it(tmp_path, monkeypatch):
    import random

    from chatgpt.launch import build

    monkeypatch.setattr(build, 'NUM_STORIES', 32)
    torch.manual_seed(5)
    random.seed(5)
    expected = torch.rand(1).item(), random.random()
    torch.manual_seed(5)
    random.seed(5)
    build.write_embedded_model(tmp_path / 'a', seed=1)
    assert (torch.rand(1).item(), random.random()) == expected
    build.write_embedded_model(tmp_path / 'b', seed=1)
    assert (tmp_path / 'a' / 'model.safetensors').read_bytes() == (tmp_path / 'b' / 'model.safetensors').read_bytes()
    build.write_embedded_model(tmp_path / 'b', seed=2)
    assert (tmp_path / 'a' / 'model.safetensors').read_bytes() != (tmp_path / 'b' / 'model.safetensors').read_bytes()


@pytest.mark.parametrize(
    'flags',
    [
        ['--engine=hf'],
        ['--lora_rank=2', '--need_optim_ckpt'],
        ['--precision=bf16'],
        ['--num_samples_per_prompt=2', '--advantage_estimator=rloo', '--lr=1e-3'],
    ],
    ids=['hf', 'lora', 'bf16', 'rloo'],
)
def test_options_run(monkeypatch, tmp_path, model_folder, flags):
    from safetensors.torch import load_file

    run(monkeypatch, *QUICK, '--max_timesteps=1', '--pretrain', str(model_folder), '--save_path', str(tmp_path), *flags)
    weights, start = load_file(tmp_path / 'actor' / 'model.safetensors'), load_file(model_folder / 'model.safetensors')
    assert weights.keys() == start.keys()  # adapters are folded in
    assert all(tensor.dtype == torch.float32 for tensor in weights.values())
    assert ('ppo/value_loss' in metrics_of(tmp_path)[0]) == ('--advantage_estimator=rloo' not in flags)  # which needs no critic
    assert (tmp_path / 'critic_optim.pt').exists() == ('--need_optim_ckpt' in flags)


@pytest.mark.parametrize('kind', ['csv', 'json', 'jsonl', 'parquet'])
def test_prompts_of_every_kind_are_the_same_run(monkeypatch, tmp_path, model_folder, prompt_file, kind):
    rows = embedded.demo_prompts(8)
    path = prompt_file if kind == 'jsonl' else tmp_path / f'prompts.{kind}'
    if kind == 'csv':
        with path.open('w', newline='') as file:
            writer = csv.DictWriter(file, ['prompt'])
            writer.writeheader()
            writer.writerows(rows)
    elif kind == 'json':
        path.write_text(json.dumps(rows))
    elif kind == 'parquet':
        pyarrow = pytest.importorskip('pyarrow')
        pytest.importorskip('pyarrow.parquet').write_table(pyarrow.Table.from_pylist(rows), path)
    run(monkeypatch, str(path), '--pretrain', str(model_folder), *REWARD, *QUICK, '--max_timesteps=1', '--save_path', str(tmp_path / 'run'))
    seen = [json.loads(line)['prompt'] for line in (tmp_path / 'run' / 'samples.jsonl').read_text().splitlines()]
    assert len(seen) == 4
    assert set(seen) <= {row['prompt'] for row in rows}


def test_own_prompts_model_and_reward_model(monkeypatch, tmp_path, model_folder, prompt_file):
    from transformers import GPT2Model

    torch.manual_seed(0)
    reward = RewardModel(GPT2Model(embedded.demo_config()))
    reward.calibrate(0.5)
    reward.save_pretrained(tmp_path / 'rm', tokenizer=embedded.demo_tokenizer())
    flags = [str(prompt_file), '--pretrain', str(model_folder), '--reward_model', str(tmp_path / 'rm'), *QUICK]
    run(monkeypatch, *flags, '--save_path', str(tmp_path / 'run'))
    lines = metrics_of(tmp_path / 'run')
    assert len(lines) == 2
    assert all(line['rollout/score_std'] > 0 for line in lines)


def test_a_reward_model_with_another_tokenizer_and_a_shorter_context(monkeypatch, tmp_path, model_folder, prompt_file):
    from transformers import GPT2Config, GPT2Model

    from chatgpt.testing.fakes import byte_tokenizer

    tokenizer = byte_tokenizer()
    config = GPT2Config(vocab_size=len(tokenizer), n_positions=24, n_embd=16, n_layer=1, n_head=2)  # prompts alone have more bytes
    RewardModel(GPT2Model(config)).save_pretrained(tmp_path / 'rm', tokenizer=tokenizer)
    flags = [str(prompt_file), '--pretrain', str(model_folder), '--reward_model', str(tmp_path / 'rm'), *QUICK]
    run(monkeypatch, *flags, '--max_timesteps=1', '--save_path', str(tmp_path / 'run'))
    assert metrics_of(tmp_path / 'run')[0]['rollout/score_std'] > 0


def test_ptx(monkeypatch, tmp_path, model_folder):
    (tmp_path / 'text.txt').write_text('one day a fox went to the hill . it felt glad .\n\nit found a cake .\n')
    flags = ['--pretrain', str(model_folder), '--ptx_data', str(tmp_path / 'text.txt'), '--ptx_coef=0.5', *QUICK, '--max_timesteps=1']
    run(monkeypatch, *flags, '--save_path', str(tmp_path / 'run'))
    assert metrics_of(tmp_path / 'run')[0]['ppo/ptx_loss'] > 1.0  # an untrained model: about log of the vocabulary


def test_ema(monkeypatch, tmp_path, model_folder):
    from safetensors.torch import load_file

    flags = ['--pretrain', str(model_folder), '--ema_decay=0.9', '--lora_rank=2', '--lr=0.1', *QUICK, '--max_timesteps=1']
    run(monkeypatch, *flags, '--save_path', str(tmp_path / 'run'))
    folders = (model_folder, tmp_path / 'run' / 'actor_ema', tmp_path / 'run' / 'actor')
    start, average, end = (load_file(folder / 'model.safetensors') for folder in folders)
    moved = [n for n in start if (end[n] - start[n]).norm() > 0]
    assert moved
    assert all((average[n] - start[n]).norm() < (end[n] - start[n]).norm() for n in moved)
    assert any((average[n] - start[n]).norm() > 0 for n in moved)


def test_a_real_model_on_real_prompts(monkeypatch, tmp_path):
    model, data = SHARED / 'models' / 'stories260K', SHARED / 'data' / 'story_prompts.jsonl'
    if not (model.is_dir() and data.is_file()):
        pytest.skip(f'needs {model} and {data}')
    flags = [str(data), '--pretrain', str(model), *REWARD, *QUICK, '--max_new_tokens=8']
    run(monkeypatch, *flags, '--save_path', str(tmp_path))
    assert json.loads((tmp_path / 'settings.json').read_text())['model'] == 'llama'
    assert all(line['ppo/first_ratio_error'] < 1e-4 for line in metrics_of(tmp_path))


def test_rollout_workers_on_ray_are_the_same_run(monkeypatch, tmp_path, model_folder):
    ray = pytest.importorskip('ray')
    before = set(os.environ)
    (tmp_path / 'reward.py').write_text(
        'import signal\ndef score(prompts, responses):\n'
        '    assert "StopSignals" in repr(signal.getsignal(signal.SIGTERM))  # Ray has its own, which would not save\n'
        '    return [float(len(r)) for r in responses]\n'
    )
    flags = ['--pretrain', str(model_folder), *QUICK, '--max_timesteps=4', '--update_timesteps=2', '--lr=1e-3', '--stop_string=.',
             '--reward_fn', f'{tmp_path / "reward.py"}:score']  # fmt: skip
    run(monkeypatch, *flags, '--save_path', str(tmp_path / 'here'))
    run(monkeypatch, *flags, '--rollout_workers=1', '--save_path', str(tmp_path / 'there'))
    assert not ray.is_initialized()  # it ended with the run
    for variable in set(os.environ) - before:
        del os.environ[variable]
    here, there = (
        [{k: v for k, v in line.items() if 'perf/' not in k} for line in metrics_of(tmp_path / name)] for name in ('here', 'there')
    )
    assert here == there and len(here) == 2
    ends = [(tmp_path / name / 'actor' / 'model.safetensors').read_bytes() for name in ('here', 'there')]
    assert ends[0] == ends[1]


@pytest.mark.parametrize('lora', [[], ['--lora_rank=2']], ids=['full', 'lora'])
def test_resume_auto_goes_on_where_the_run_stopped(monkeypatch, capsys, tmp_path, model_folder, lora):
    common = ['--pretrain', str(model_folder), *QUICK, '--lr=1e-3', '--checkpoint_interval=1', *lora]
    run(monkeypatch, *common, '--max_timesteps=3', '--save_path', str(tmp_path / 'whole'))
    stopped = [*common, '--save_path', str(tmp_path / 'stopped')]
    run(monkeypatch, *stopped, '--max_timesteps=1')
    capsys.readouterr()
    assert 'holds checkpoints of an earlier run, up to step-00000001' in fails(monkeypatch, capsys, *stopped)
    run(monkeypatch, *stopped, '--max_timesteps=3', '--resume', 'auto')
    whole, resumed = metrics_of(tmp_path / 'whole'), metrics_of(tmp_path / 'stopped')
    assert [line['step'] for line in resumed] == [1, 2, 3]
    for one, other in zip(whole, resumed, strict=True):
        assert {k: v for k, v in one.items() if 'perf/' not in k} == {k: v for k, v in other.items() if 'perf/' not in k}
    ends = [(tmp_path / name / 'actor' / 'model.safetensors').read_bytes() for name in ('whole', 'stopped')]
    assert ends[0] == ends[1]


def test_a_resume_under_changed_settings_says_so_in_one_line(monkeypatch, capsys, tmp_path, model_folder):
    flags = ['--pretrain', str(model_folder), *QUICK, '--save_path', str(tmp_path), '--checkpoint_interval=1']
    run(monkeypatch, *flags, '--max_timesteps=1')
    capsys.readouterr()
    with pytest.warns(UserWarning, match=r'changed settings: config.kl_coef 0.1 → 0.2'):
        run(monkeypatch, *flags, '--resume', 'auto', '--kl_coef=0.2')


# ---------------------------------------------------------------------- one line for every mistake, before any weight


@pytest.fixture
def no_weights(monkeypatch):
    """Fails when a weight is loaded or made."""
    from chatgpt.launch.build import PPOInputs

    def build_models(self):
        raise AssertionError('weights were touched before the mistake was found')

    monkeypatch.setattr(PPOInputs, 'build_models', build_models)


@pytest.mark.usefixtures('no_weights')
@pytest.mark.parametrize(
    ('flags', 'message'),
    [
        (['--kl_coeff', '0.1'], "unknown argument '--kl_coeff'; did you mean --kl_coef"),
        (['--kl_kind=k9'], "argument --kl_kind: 'k9' is none of: k1, k2, k3, abs, full"),
        (['--train_batch_size=0'], 'train_batch_size=0 must be positive'),
        (['--num_episodes=0'], 'num_episodes=0 must be at least 1'),
        (['--sample_interval=0'], 'sample_interval=0 must be at least 1'),
        (['--lr=-1'], 'lr=-1.0 must not be negative'),
        (['--temperature=0'], 'temperature=0.0; give a number above 0'),
        (['--top_p=1.5'], 'top_p=1.5; give a number above 0 and at most 1'),
        (['--advantage_estimator=rloo'], 'set num_samples_per_prompt to 2 or more'),
        (['--ptx_coef=0.5'], '--ptx_data FILE'),
        (['--max_staleness=1', '--rollout_workers=2'], 'which tis_cap weighs: give it'),
        (['--max_staleness=1', '--tis_cap=2'], 'max_staleness=1 is about rollout workers, and there are none: give --rollout_workers'),
        (['--rollout_workers=2', '--engine=hf'], '--engine hf does not fit --rollout_workers'),
        (['--rollout_workers=-1'], 'rollout_workers=-1 must not be negative'),
        (['--rollout_workers=2', '--rollout_resources={CPU: -1}'], 'CPU=-1'),
        (['--resume=/no/such/checkpoint'], '--resume /no/such/checkpoint: there is no such folder'),
        (['{prompts}', '--pretrain={model}'], 'give --reward_model FOLDER or --reward_fn module:function'),
        (['{prompts}', *REWARD], 'give --pretrain NAME_OR_FOLDER'),
        (['{prompts}', '--pretrain={model}', *REWARD, '--reward_model={model}'], 'give --reward_model or --reward_fn, not both'),
        (['/no/such/file.csv', '--pretrain={model}', *REWARD], '/no/such/file.csv: no such file'),
        (['{prompts}', '--pretrain=/no/such/model', *REWARD], "'/no/such/model': there is no such folder"),
        (['{prompts}', '--pretrain={model}', '--reward_model=/no/such/rm'], "'/no/such/rm': there is no such folder"),
        (['{prompts}', '--pretrain={model}', '--model=opt', *REWARD], "--model opt: the model is of the family 'gpt2'"),
        (['{prompts}', '--pretrain={model}', '--reward_fn=nowhere:joy'], "No module named 'nowhere'"),
        (['{prompts}', '--pretrain={model}', '--reward_fn=joy'], 'write module:function or path/to/file.py:function'),
        (['{prompts}', '--pretrain={model}', '--reward_fn={broken}:joy'], 'importing it raised ZeroDivisionError: division by zero'),
        (['{prompts}', '--pretrain={model}', '--reward_fn={narrow}:joy'], 'it is called as joy(prompts, responses)'),
        (['{prompts}', '--pretrain={model}', '--reward_fn', REWARD[1].replace('joy', 'jox')], "has no function 'jox'"),
        (['{nocolumn}', '--pretrain={model}', *REWARD], "no column 'prompt' for the prompt; the columns are 'act', 'words'"),
        (['{empty}', '--pretrain={model}', *REWARD], 'empty.jsonl, line 2: the prompt is empty'),
        (['{prompts}', '--pretrain={model}', '--max_new_tokens=60', *REWARD], 'passes the context of 64'),
        (['{long}', '--pretrain={model}', *REWARD], 'prompt 1 has 70 tokens; with max_new_tokens=4 it passes the context of 64'),
    ],
    ids=lambda value: value.split(':')[0][:40] if isinstance(value, str) else '',
)
def test_mistakes(monkeypatch, capsys, tmp_path, model_folder, prompt_file, flags, message):
    (tmp_path / 'nocolumn.csv').write_text('act,words\nx,y\n')
    (tmp_path / 'empty.jsonl').write_text('{"prompt": "one day"}\n{"prompt": ""}\n')
    (tmp_path / 'long.jsonl').write_text(json.dumps({'prompt': 'one day'}) + '\n' + json.dumps({'prompt': 'fox ' * 70}) + '\n')
    (tmp_path / 'broken.py').write_text('1 / 0\n')
    (tmp_path / 'narrow.py').write_text('def joy(texts):\n    return [0.0] * len(texts)\n')
    names = {name: tmp_path / file for name, file in (
        ('nocolumn', 'nocolumn.csv'), ('empty', 'empty.jsonl'), ('long', 'long.jsonl'), ('broken', 'broken.py'), ('narrow', 'narrow.py'),
    )}  # fmt: skip
    names |= {'prompts': prompt_file, 'model': model_folder}
    filled = [re.sub(r'\{(\w+)\}', lambda match: str(names[match[1]]), flag) for flag in flags]
    error = fails(monkeypatch, capsys, *QUICK, '--save_path', str(tmp_path / 'run'), *filled)
    assert message in error
    assert not (tmp_path / 'run').exists()  # it left nothing behind


@pytest.mark.usefixtures('no_weights')
def test_a_batch_that_cannot_be_cut_over_the_ranks(monkeypatch, capsys, tmp_path):
    monkeypatch.setenv('WORLD_SIZE', '3')
    error = fails(monkeypatch, capsys, '--strategy=ddp', '--save_path', str(tmp_path))
    assert 'experience_batch_size=8 cannot be cut over 3 ranks; use a multiple of 3, such as 6 or 9' in error
    error = fails(monkeypatch, capsys, '--strategy=ddp', '--experience_batch_size=9', '--save_path', str(tmp_path))
    assert 'train_batch_size=8 cannot be cut over 3 ranks' in error


@pytest.mark.usefixtures('no_weights')
def test_a_tokenizer_that_does_not_match(monkeypatch, capsys, tmp_path, model_folder, prompt_file):
    from transformers import GPT2Config, GPT2Model

    from chatgpt.testing.fakes import byte_tokenizer

    byte_tokenizer().save_pretrained(tmp_path / 'bytes')
    common = [str(prompt_file), '--pretrain', str(model_folder), *QUICK, '--save_path', str(tmp_path / 'run')]
    error = fails(monkeypatch, capsys, *common, '--tokenizer', str(tmp_path / 'bytes'), *REWARD)
    assert 'does not match the model' in error
    small = GPT2Config(vocab_size=16, n_positions=64, n_embd=16, n_layer=1, n_head=2)
    RewardModel(GPT2Model(small)).save_pretrained(tmp_path / 'rm')
    error = fails(monkeypatch, capsys, *common, '--reward_model', str(tmp_path / 'rm'))
    assert 'knows 16 tokens, fewer than the tokenizer of the policy' in error


@pytest.mark.usefixtures('no_weights')
def test_a_folder_that_cannot_be_written_or_that_another_run_holds(monkeypatch, capsys, tmp_path):
    (tmp_path / 'file').write_text('')
    error = fails(monkeypatch, capsys, *QUICK, '--save_path', str(tmp_path / 'file' / 'run'))
    assert f'cannot write to {tmp_path / "file" / "run"}: Not a directory' in error
    with claim_folder(tmp_path / 'held'):
        error = fails(monkeypatch, capsys, *QUICK, '--save_path', str(tmp_path / 'held'))
    assert f'process {os.getpid()}' in error
    assert 'is writing here; wait for it to end or choose another folder' in error


@pytest.mark.parametrize(
    ('body', 'message'),
    [
        ("raise KeyError('x')", "raised KeyError: 'x'"),
        ('import time; time.sleep(30)', 'did not return within 0.3 s'),
        ('return [1.0]', 'returned 1 scores for 4 responses'),
        ("return [float('nan')] * len(responses)", 'returned nan for sample 0'),
    ],
)
def test_a_reward_function_that_misbehaves(monkeypatch, capsys, tmp_path, model_folder, body, message):
    (tmp_path / 'bad.py').write_text(f'def score(prompts, responses):\n    {body}\n')
    flags = [*QUICK, '--pretrain', str(model_folder), '--save_path', str(tmp_path / 'run'), '--score_timeout_s=0.3']
    assert message in fails(monkeypatch, capsys, *flags, '--reward_fn', f'{tmp_path / "bad.py"}:score')


def test_weights_that_are_not_finite_end_the_run_and_leave_the_checkpoint_whole(monkeypatch, capsys, tmp_path, model_folder):
    from chatgpt.checkpoint import CheckpointReader, list_checkpoints
    from chatgpt.trainer.ppo_loss import PPOLoss

    whole, calls = PPOLoss.actor, []

    def broken_in_phase_2(self, batch, records, stats):
        calls.append(None)
        return whole(self, batch, records, stats) * (float('nan') if len(calls) == 2 else 1.0)

    monkeypatch.setattr(PPOLoss, 'actor', broken_in_phase_2)
    flags = [*QUICK, '--pretrain', str(model_folder), '--save_path', str(tmp_path), '--checkpoint_interval=1']
    error = fails(monkeypatch, capsys, *flags)
    assert 'the loss is not finite in phase 2, epoch 1, train batch 1; samples in it: 4, 5, 6, 7' in error
    (checkpoint,) = list_checkpoints(tmp_path / 'checkpoints')
    CheckpointReader(checkpoint)  # reads and verifies every file
    assert checkpoint.name == 'step-00000001'


def test_a_damaged_checkpoint_is_one_line(monkeypatch, capsys, tmp_path, model_folder):
    flags = [*QUICK, '--pretrain', str(model_folder), '--save_path', str(tmp_path), '--checkpoint_interval=1', '--max_timesteps=1']
    run(monkeypatch, *flags)
    capsys.readouterr()
    part = next((tmp_path / 'checkpoints' / 'step-00000001').glob('actor-*.safetensors'))
    part.write_bytes(part.read_bytes()[:-1])
    error = fails(monkeypatch, capsys, *flags, '--resume=auto')
    assert part.name in error and '--resume' not in error


# ---------------------------------------------------------------------- processes


def start(folder: Path, model: Path, *flags: str, ranks: int = 1) -> subprocess.Popen[str]:
    env = os.environ | {'PYTHONPATH': str(ROOT), 'OMP_NUM_THREADS': '1', 'PYTHONUNBUFFERED': '1'}
    launcher = ['-m', 'torch.distributed.run', '--standalone', '--nproc_per_node', str(ranks)] if ranks > 1 else []
    command = [sys.executable, *launcher, str(SCRIPT), *QUICK, '--pretrain', str(model), '--save_path', str(folder), *flags]
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def test_torchrun_ddp_is_the_same_run(monkeypatch, tmp_path, model_folder):
    process = start(tmp_path / 'two', model_folder, '--strategy=ddp', '--need_optim_ckpt', ranks=2)
    run(monkeypatch, *QUICK, '--pretrain', str(model_folder), '--save_path', str(tmp_path / 'one'))
    output, _ = process.communicate(timeout=110)
    assert process.returncode == 0, output
    assert 'warning' not in output.lower()
    assert output.count('actor written to') == 1
    assert (tmp_path / 'two' / 'actor_optim.pt').exists()
    samples = [(tmp_path / name / 'samples.jsonl').read_text().splitlines() for name in ('one', 'two')]
    assert [json.loads(line)['response'] for line in samples[0]] == [json.loads(line)['response'] for line in samples[1]]
    one, two = metrics_of(tmp_path / 'one'), metrics_of(tmp_path / 'two')
    for name in ('rollout/score_mean', 'rollout/kl_mean', 'ppo/value_loss', 'ppo/actor_grad_norm'):
        assert [line[name] for line in two] == pytest.approx([line[name] for line in one], rel=1e-3, abs=1e-6)


def test_torchrun_ends_all_ranks_with_the_first_ones_line(tmp_path, model_folder):
    (tmp_path / 'bad.py').write_text("def score(prompts, responses):\n    raise KeyError('x')\n")
    process = start(tmp_path / 'run', model_folder, '--strategy=ddp', '--reward_fn', f'{tmp_path / "bad.py"}:score', ranks=2)
    output, _ = process.communicate(timeout=110)
    assert process.returncode != 0
    ours = output.split('torch/distributed/elastic')[0]  # what torchrun itself has to say comes after
    assert "error: reward function score raised KeyError: 'x'" in ours
    assert 'Traceback' not in ours


@pytest.mark.parametrize(('signum', 'code'), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_saves_and_leaves(tmp_path, model_folder, signum, code):
    process = start(tmp_path, model_folder, '--max_timesteps=100000')
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
