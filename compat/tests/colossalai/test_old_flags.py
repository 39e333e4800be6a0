"""Our scripts accept every flag of ColossalAI's scripts of the same names, and complete a short run."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from chatgpt.launch.config_file import parse_run
from chatgpt.launch.runs import PPORun, RewardRun, SFTRun
from chatgpt.nn import GPTActor
from chatgpt.testing.fakes import char_tokenizer, tiny_config

ROOT = Path(__file__).resolve().parents[3]
STRATEGIES = ('naive', 'ddp', 'colossalai_gemini', 'colossalai_zero2')
BENCHMARK_STRATEGIES = (
    'ddp',
    *(f'colossalai_{kind}{cpu}' for kind in ('gemini', 'zero2', 'zero1') for cpu in ('', '_cpu')),
)
LENGTH = {'num_episodes': 10, 'max_timesteps': 10, 'update_timesteps': 10, 'max_epochs': 5}
BATCHES = {'train_batch_size': 8, 'experience_batch_size': 8}
FLAGS: dict[str, dict[str, Any]] = {
    'train_prompts': {'model': ('gpt2', 'bloom', 'opt'), 'strategy': STRATEGIES, 'pretrain': 'x', 'lora_rank': 4}
    | {'save_path': 'actor_checkpoint_prompts.pt', 'need_optim_ckpt': True, **LENGTH, **BATCHES},
    'train_reward_model': {'model': ('gpt2', 'bloom', 'opt', 'deberta'), 'strategy': STRATEGIES, 'pretrain': 'x'}
    | {'need_optim_ckpt': True, 'dataset': ('Anthropic/hh-rlhf', 'Dahoas/rm-static'), 'save_path': 'rm_ckpt.pt'}
    | {'model_path': 'x', 'max_epochs': 1, 'batch_size': 1, 'max_len': 512, 'lora_rank': 4}
    | {'loss_fn': ('log_sig', 'log_exp')},
    'train_sft': {'model': ('gpt2', 'bloom', 'opt', 'llama'), 'strategy': STRATEGIES, 'pretrain': 'x', 'lora_rank': 4}
    | {'dataset': 'yizhongw/self_instruct', 'save_path': 'sft_ckpt.pth', 'max_epochs': 1, 'batch_size': 4}
    | {'log_interval': 100},
    'train_dummy': {'model': ('gpt2', 'bloom', 'opt'), 'strategy': STRATEGIES, 'pretrain': 'x', 'lora_rank': 4}
    | {'save_path': 'a.pt', 'save_ckpt_path': 'x', 'save_ckpt_interval': 1, **LENGTH, **BATCHES},
    'inference': {'model': ('gpt2', 'bloom', 'opt'), 'model_path': 'x', 'input': 'Question: How are you ? Answer:'}
    | {'pretrain': 'x', 'max_length': 100},
    'benchmark_gpt_dummy': {'model': ('s', '4b', '175b'), 'strategy': BENCHMARK_STRATEGIES, **LENGTH, **BATCHES},
    'benchmark_opt_lora_dummy': {'model': ('125m', '13b'), 'strategy': BENCHMARK_STRATEGIES, **LENGTH, **BATCHES}
    | {'lora_rank': 4, 'cuda_mem_frac': 0.5},
}
RUNS = {'train_prompts': (PPORun, 'prompt_path'), 'train_reward_model': (RewardRun, 'dataset')}
RUNS |= {'train_sft': (SFTRun, 'dataset')}
CALLED_OTHERWISE = {'batch_size': 'train_batch_size'}
OF_INFERENCE = {'model_path': 'weights'}


def each(script: str) -> list[tuple[str, str]]:
    return [
        (flag, str(value))
        for flag, values in FLAGS[script].items()
        for value in (values if isinstance(values, tuple) else (values,))
    ]


@pytest.mark.parametrize('script', RUNS)
def test_every_flag_is_taken_and_means_what_it_says(script):
    cls, positional = RUNS[script]
    for flag, value in each(script):
        run = parse_run(cls, description=None, positional=positional, argv=['data.csv', f'--{flag}', value])
        name = CALLED_OTHERWISE.get(flag, flag)
        assert str(getattr(run, name)) == value, flag


def test_a_part_of_a_data_set_and_a_trial():
    def run(*argv: str) -> RewardRun:
        return parse_run(RewardRun, description=None, positional='dataset', argv=list(argv))

    part = run('--dataset', 'Anthropic/hh-rlhf', '--subset', 'harmless-base')
    assert part.dataset == 'Anthropic/hh-rlhf:harmless-base'
    assert run('--test', 'True', '--batch_size', '8').max_steps == 13  # 100 records in batches of 8
    assert run('--test', 'False').max_steps is None
    for argv, sentence in (
        (['--subset', 'x'], 'subset=x is a folder of a data set: give dataset too'),
        (['--test', 'true', '--max_steps', '3'], 'test and max_steps=3 both say how long to train'),
    ):
        with pytest.raises(ValueError, match=sentence):
            run(*argv)


def test_a_part_of_a_data_set_of_the_hub_is_its_folder(monkeypatch):
    import datasets

    from chatgpt.data import load_preferences

    asked = []

    def load_dataset(name: str, subset: Any = None, **options: Any) -> Any:
        asked.append((name, subset, options.get('data_dir'), options['split']))
        return datasets.Dataset.from_list([{'prompt': 'a', 'chosen': 'b', 'rejected': 'c'}])

    monkeypatch.setattr(datasets, 'load_dataset', load_dataset)
    monkeypatch.setattr('chatgpt.data.reading.check_name', lambda *given: None)
    for name in ('Anthropic/hh-rlhf', 'Anthropic/hh-rlhf:harmless-base', 'Anthropic/hh-rlhf:a/b'):
        load_preferences(name, char_tokenizer())
    folders = [None, 'harmless-base', 'a/b']
    assert asked == [('Anthropic/hh-rlhf', None, folder, 'train') for folder in folders]


def test_deberta_is_a_family_of_reward_models():
    assert RewardRun(model='deberta').validate() is None
    with pytest.raises(ValueError, match="model='deberta' is a family of reward models; it cannot write"):
        SFTRun(model='deberta').validate()


@pytest.mark.parametrize('script', ['train_dummy', 'inference', 'benchmark_gpt_dummy', 'benchmark_opt_lora_dummy'])
def test_every_flag_of_the_scripts_with_a_parser_of_their_own(script, monkeypatch):
    """Runs each script up to the reading of its flags."""
    folder = ROOT / ('benchmarks' if script.startswith('benchmark') else 'examples')
    monkeypatch.syspath_prepend(folder)
    spec = importlib.util.spec_from_file_location(f'flags_of_{script}', folder / f'{script}.py')
    assert spec is not None and spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    seen: dict[str, Any] = {}

    class Read(Exception):
        pass

    from chatgpt.launch.arguments import Parser

    original = Parser.parse_args

    def parse_args(self: Any, *given: Any, **options: Any) -> Any:
        seen.update(vars(original(self, *given, **options)))
        raise Read

    monkeypatch.setattr(Parser, 'parse_args', parse_args)
    for flag, value in each(script):
        seen.clear()
        needed = ['--pretrain', 'x'] if script == 'inference' and flag != 'pretrain' else []
        monkeypatch.setattr(sys, 'argv', [script, *needed, f'--{flag}', value])
        with pytest.raises(Read):
            module.main()
        name = OF_INFERENCE.get(flag, flag) if script == 'inference' else flag
        assert str(seen[name]) == value, flag


# ---------------------------------------------------------------------- one short run of each

SHORT = ['--num_episodes=1', '--max_timesteps=1', '--update_timesteps=1', '--max_epochs=1', '--train_batch_size=4']
SHORT.append('--experience_batch_size=4')


@pytest.mark.system
@pytest.mark.parametrize('script', FLAGS)
def test_a_short_run(script, tmp_path):
    model = tmp_path / 'model'
    GPTActor(config=tiny_config('gpt2', positions=256)).save_pretrained(model, tokenizer=char_tokenizer())
    Path(tmp_path, 'prompts.csv').write_text('act,prompt\nx,tell me\ny,and you\n')
    pairs = [{'prompt': f'q {i}', 'chosen': 'good', 'rejected': 'bad'} for i in range(8)]
    Path(tmp_path, 'pairs').mkdir()
    for part in ('', 'pairs/'):
        Path(tmp_path, f'{part}pairs.json').write_text(json.dumps(pairs))
    alpaca = [{'instruction': f'say {i}', 'input': '', 'output': 'yes'} for i in range(8)]
    Path(tmp_path, 'alpaca.json').write_text(json.dumps(alpaca))
    torch.save(GPTActor(pretrained=model).model.state_dict(), tmp_path / 'actor_checkpoint_prompts.pt')
    pretrain = ['--model=gpt2', f'--pretrain={model}', '--strategy=naive']
    lines = {
        'train_prompts': ['prompts.csv', *pretrain, '--save_path=run', '--need_optim_ckpt=True', '--lora_rank=2']
        + [f'--reward_fn={ROOT / "examples" / "rewards.py"}:short', *SHORT],
        'train_reward_model': [*pretrain, '--dataset=.', '--subset=pairs', '--save_path=run', '--batch_size=4']
        + ['--max_len=64', '--loss_fn=log_exp', '--test=True', '--need_optim_ckpt=True', '--model_path=rm'],
        'train_sft': [*pretrain, '--dataset=alpaca.json', '--save_path=run', '--batch_size=4', '--log_interval=1'],
        'train_dummy': [*pretrain, '--save_path=actor.pt', '--need_optim_ckpt=True', '--save_ckpt_path=saved']
        + ['--save_ckpt_interval=1', *SHORT],
        'inference': [*pretrain[:2], '--model_path=actor_checkpoint_prompts.pt', '--input=how are you']
        + ['--max_length=24'],
        'benchmark_gpt_dummy': ['--model=tiny', '--strategy=ddp', '--prompt_length=8', '--max_length=16', *SHORT],
        'benchmark_opt_lora_dummy': ['--model=tiny', '--lora_rank=2', '--prompt_length=8', '--max_length=16', *SHORT],
    }
    left = {
        'train_prompts': ['run/actor/config.json', 'run/actor_optim.pt', 'run/critic_optim.pt'],
        'train_reward_model': ['rm/config.json', 'run/reward_model_optim.pt'],
        'train_sft': ['run/actor/config.json'],
        'train_dummy': ['actor.pt', 'optim_actor.pt', 'optim_critic.pt', 'saved/step-00000001'],
    }
    folder = ROOT / ('benchmarks' if script.startswith('benchmark') else 'examples')
    env = os.environ | {'OMP_NUM_THREADS': '1', 'HF_HUB_OFFLINE': '1'}
    command = [sys.executable, str(folder / f'{script}.py'), *lines[script]]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    for name in left.get(script, []):
        assert Path(tmp_path, name).exists(), name
    if script == 'inference':
        said, answer = done.stdout.splitlines()[:2]
        assert said == '> how are you' and len(answer) <= 13  # a token per character, 24 with the prompt
