"""examples/train_prompts.py from the command line: the files of a run, in one process and in several."""

from __future__ import annotations

import json
import os
import random
import signal
from pathlib import Path

import pytest
import torch
from example_script import QUICK, fails, metrics_of, run, start
from limits import until
from safetensors.torch import load_file

from chatgpt.launch import demo_world


def test_without_arguments_a_model_of_its_own_learns_stories_first(monkeypatch, tmp_path, capsys):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    monkeypatch.setattr(demo_world, 'NUM_STORIES', 64)
    monkeypatch.chdir(tmp_path)
    run(monkeypatch, *'--num_episodes=1 --max_timesteps=1 --update_timesteps=1 --max_epochs=1 --tensorboard'.split())
    shown = capsys.readouterr()
    assert 'learns to write stories first' in shown.out
    assert 'samples of phase 1' in shown.out
    assert shown.err == ''  # no progress bars of libraries, no warnings
    folder = tmp_path / 'outputs' / 'train_prompts'
    line = metrics_of(folder)[0]
    assert {'step', 'rollout/score_mean', 'ppo/approx_kl', 'perf/collect_s', 'perf/learn_s'} <= line.keys()
    assert line['ppo/first_ratio_error'] < 1e-4
    record = json.loads((folder / 'run.json').read_text())
    settings = record['settings']
    assert (settings['lr'], settings['max_new_tokens'], record['models']['actor']['kind']) == (3e-4, 32, 'gpt2')
    assert (record['strategy']['world_size'], record['status']) == (1, 'ended')
    assert len((folder / 'samples.jsonl').read_text().splitlines()) == 4
    assert list((folder / 'tensorboard').iterdir())
    model, tokenizer = (c.from_pretrained(folder / 'actor') for c in (AutoModelForCausalLM, AutoTokenizer))
    ids = tokenizer('one day a small fox', return_tensors='pt')['input_ids']
    assert model.generate(ids, max_new_tokens=4, do_sample=False).shape[1] <= ids.shape[1] + 4


def test_the_embedded_model_does_not_disturb_the_draws_around_it(tmp_path, monkeypatch):
    monkeypatch.setattr(demo_world, 'NUM_STORIES', 32)

    def written(seed: int) -> bytes:
        demo_world.write_demo_model(tmp_path / 'model', seed=seed)
        return (tmp_path / 'model' / 'model.safetensors').read_bytes()

    torch.manual_seed(5), random.seed(5)
    expected = torch.rand(1).item(), random.random()
    torch.manual_seed(5), random.seed(5)
    first = written(1)
    assert (torch.rand(1).item(), random.random()) == expected
    assert first == written(1) != written(2)


@pytest.mark.parametrize('flags', ['--engine=hf --lora_rank=2 --need_optim_ckpt', '--precision=bf16'])
def test_options_run(monkeypatch, tmp_path, model_folder, flags):
    run(monkeypatch, *QUICK, *f'--max_timesteps=1 --pretrain {model_folder} --save_path {tmp_path} {flags}'.split())
    weights, start = load_file(tmp_path / 'actor' / 'model.safetensors'), load_file(model_folder / 'model.safetensors')
    assert weights.keys() == start.keys()  # adapters are merged
    assert all(tensor.dtype == torch.float32 for tensor in weights.values())
    assert (tmp_path / 'critic_optim.pt').exists() == ('--need_optim_ckpt' in flags)


def test_ema_and_ptx(monkeypatch, tmp_path, model_folder):
    (tmp_path / 'text.txt').write_text('one day a fox went to the hill . it felt glad .\n\nit found a cake .\n')
    flags = f'--pretrain {model_folder} --ema_decay=0.9 --lora_rank=2 --lr=0.1 --save_path {tmp_path}/run'.split()
    flags += ['--ptx_data', f'{tmp_path}/text.txt', '--ptx_coef=0.5']
    run(monkeypatch, *flags, *QUICK, '--max_timesteps=1')
    assert metrics_of(tmp_path / 'run')[0]['ppo/ptx_loss'] > 1.0  # untrained: about the log of the vocabulary size
    folders = (model_folder, tmp_path / 'run' / 'actor_ema', tmp_path / 'run' / 'actor')
    start, average, end = (load_file(folder / 'model.safetensors') for folder in folders)
    moved = [n for n in start if (end[n] - start[n]).norm() > 0]
    assert moved
    assert all((average[n] - start[n]).norm() < (end[n] - start[n]).norm() for n in moved)
    assert any((average[n] - start[n]).norm() > 0 for n in moved)


def left(folder: Path) -> tuple[list[dict[str, float]], bytes]:
    """Returns the metrics without times, and the weights."""
    lines = [{k: v for k, v in line.items() if 'perf/' not in k} for line in metrics_of(folder)]
    return lines, (folder / 'actor' / 'model.safetensors').read_bytes()


@pytest.mark.system
def test_rollout_workers_on_ray_are_the_same_run(monkeypatch, tmp_path, model_folder):
    ray = pytest.importorskip('ray')
    before = set(os.environ)
    (tmp_path / 'reward.py').write_text(
        'import signal\ndef score(prompts, responses):\n'
        '    assert "StopSignals" in repr(signal.getsignal(signal.SIGTERM))  # Ray has its own, which would not save\n'
        '    return [float(len(r)) for r in responses]\n'
    )
    own = f'--pretrain {model_folder} --reward_fn {tmp_path}/reward.py:score --stop_string=. --lr=1e-3'.split()
    flags = [*own, *QUICK, '--max_timesteps=4', '--update_timesteps=2']
    run(monkeypatch, *flags, '--save_path', str(tmp_path / 'here'))
    run(monkeypatch, *flags, '--rollout_workers=1', '--save_path', str(tmp_path / 'there'))
    assert not ray.is_initialized()  # Ray shuts down with the run
    for variable in set(os.environ) - before:
        del os.environ[variable]
    here, there = left(tmp_path / 'here'), left(tmp_path / 'there')
    assert here == there and len(here[0]) == 2


def test_resume_auto_continues_where_the_run_stopped(monkeypatch, capsys, tmp_path, model_folder):
    common = ['--pretrain', str(model_folder), *QUICK, '--lr=1e-3', '--checkpoint_interval=1', '--lora_rank=2']
    run(monkeypatch, *common, '--max_timesteps=3', '--save_path', str(tmp_path / 'whole'))
    stopped = [*common, '--save_path', str(tmp_path / 'stopped')]
    run(monkeypatch, *stopped, '--max_timesteps=1')
    capsys.readouterr()
    assert 'stopped holds a complete run: give the model in it as --pretrain' in fails(monkeypatch, capsys, *stopped)
    run(monkeypatch, *stopped, '--max_timesteps=3', '--resume', 'auto')
    whole, resumed = left(tmp_path / 'whole'), left(tmp_path / 'stopped')
    assert whole == resumed and [line['step'] for line in resumed[0]] == [1, 2, 3]
    with pytest.warns(UserWarning, match=r'changed settings: config.kl_coef 0.1 → 0.2'):
        run(monkeypatch, *stopped, '--max_timesteps=4', '--resume', 'auto', '--kl_coef=0.2')


@pytest.mark.system
def test_torchrun_ddp_is_the_same_run(monkeypatch, tmp_path, model_folder):
    process = start(tmp_path / 'two', model_folder, '--strategy=ddp', '--need_optim_ckpt', ranks=2)
    run(monkeypatch, *QUICK, '--pretrain', str(model_folder), '--save_path', str(tmp_path / 'one'))
    output, _ = process.communicate()
    assert process.returncode == 0, output
    assert 'warning' not in output.lower()
    assert output.count('actor written to') == 1
    assert (tmp_path / 'two' / 'actor_optim.pt').exists()
    samples = [(tmp_path / name / 'samples.jsonl').read_text().splitlines() for name in ('one', 'two')]
    assert [json.loads(line)['response'] for line in samples[0]] == [
        json.loads(line)['response'] for line in samples[1]
    ]
    one, two = metrics_of(tmp_path / 'one'), metrics_of(tmp_path / 'two')
    for name in ('rollout/score_mean', 'rollout/kl_mean', 'ppo/value_loss', 'ppo/actor_grad_norm'):
        assert [line[name] for line in two] == pytest.approx([line[name] for line in one], rel=1e-3, abs=1e-6)


@pytest.mark.system
def test_torchrun_ends_all_ranks_with_the_message_of_the_first(tmp_path, model_folder):
    (tmp_path / 'bad.py').write_text("def score(prompts, responses):\n    raise KeyError('x')\n")
    process = start(
        tmp_path / 'run', model_folder, '--strategy=ddp', '--reward_fn', f'{tmp_path / "bad.py"}:score', ranks=2
    )
    output, _ = process.communicate()
    assert process.returncode != 0
    ours = output.split('torch/distributed/elastic')[0]  # torchrun's own report follows
    assert "error: reward function score raised KeyError: 'x'" in ours
    assert 'Traceback' not in ours


@pytest.mark.system
def test_a_signal_saves_and_leaves(tmp_path, model_folder):
    process = start(tmp_path, model_folder, '--max_timesteps=100000')
    metrics = tmp_path / 'metrics.jsonl'
    until(lambda: process.poll() is not None or (metrics.is_file() and metrics.read_text().count('\n') >= 2))
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate()
    assert process.returncode == 143, output
    assert 'continue with --resume auto' in output
    assert 'Traceback' not in output
    steps = metrics.read_text().count('\n')
    saved = sorted((tmp_path / 'checkpoints').glob('step-*'))
    assert saved[-1].name == f'step-{steps:08d}'
