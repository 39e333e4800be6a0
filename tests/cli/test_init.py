"""init: the config explains every common option, and the printed command runs."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest
import yaml
from command_line import call

from chatgpt.launch.arguments import field_docs
from chatgpt.launch.config_file import parse_run
from chatgpt.launch.methods import METHODS
from chatgpt.launch.runs import run_class

ROOT = Path(__file__).resolve().parents[2]
OF_THE_EXAMPLE = {
    *('pretrain', 'dataset', 'validation_percentage', 'prompt_path', 'reward_fn', 'num_episodes', 'max_timesteps'),
    *('update_timesteps', 'experience_batch_size', 'max_new_tokens', 'num_samples_per_prompt', 'rollouts'),
}


@pytest.mark.parametrize('name', METHODS)
def test_the_config_has_every_common_option_with_its_default_and_meaning(monkeypatch, capsys, tmp_path, name):
    monkeypatch.chdir(tmp_path)
    assert call(monkeypatch, 'init', name) == 0
    text = Path(f'{name}.yaml').read_text()
    content, cls = yaml.safe_load(text), run_class(name)
    wanted = {n for names in cls.common.values() for n in names} | set(METHODS[name].settings)
    assert set(content) == wanted
    comments = ' '.join(line.removeprefix('# ') for line in text.splitlines() if line.startswith('# '))
    docs = field_docs(cls)
    for setting in content:
        assert docs.get(setting, '') in comments
    plain = parse_run(cls, description='', argv=[], method=name)
    read = parse_run(cls, description='', argv=['--config_file', f'{name}.yaml'], method=name)
    different = {f.name for f in fields(cls) if getattr(plain, f.name) != getattr(read, f.name)}
    assert different <= OF_THE_EXAMPLE
    if name == 'critic':  # it starts from the model of the run that it names
        assert different == {'rollouts'} and read.pretrain is None
    else:
        assert {'pretrain'} < different and (read.pretrain, read.base) == ('embedded', None)


def test_nothing_is_overwritten(monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / 'new').mkdir()
    (tmp_path / 'new' / 'rewards.py').write_text('mine')
    assert call(monkeypatch, 'init', 'ppo', '--to', 'new') == 2
    assert capsys.readouterr().err == (
        'error: new/rewards.py is there already: give another folder with --to, or remove it\n'
    )
    assert [p.name for p in (tmp_path / 'new').iterdir()] == ['rewards.py']
    (tmp_path / 'file').touch()
    assert call(monkeypatch, 'init', 'ppo', '--to', 'file/x') == 2
    assert capsys.readouterr().err.startswith('error: cannot write to file/x: ')


def test_a_method_of_a_file_is_named_from_the_folder_of_its_config(monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / 'mine.py').write_text('from chatgpt.launch.methods import METHODS\nsame = METHODS["sft"]\n')
    assert call(monkeypatch, 'init', 'mine.py:same', '--to', 'new') == 0
    assert ' ../mine.py:same --config_file same.yaml' in capsys.readouterr().out
    assert call(monkeypatch, 'init', 'ppo') == call(monkeypatch, 'init', 'grpo') == 0  # their rewards.py is the same


SHORT = {
    'ppo': ['--num_episodes=1', '--experience_batch_size=4', '--max_epochs=1'],
    **dict.fromkeys(('reward-model', 'kto', 'ilql'), ['--max_steps=1']),
}
LEFT = {'ppo': 'actor', 'reward-model': 'reward_model'}


@pytest.mark.parametrize('name', SHORT)
def test_what_is_written_runs(monkeypatch, capsys, tmp_path, name):
    """With fewer steps than the printed command, and without training the embedded model first."""
    from chatgpt.launch import demo_world, recipes
    from chatgpt.nn import GPTActor

    def untaught(folder, seed):
        GPTActor(config=demo_world.demo_config()).save_pretrained(folder, tokenizer=demo_world.demo_tokenizer())

    monkeypatch.setattr(recipes, 'write_demo_model', untaught)
    monkeypatch.chdir(tmp_path)
    assert call(monkeypatch, 'init', name, '--to', 'here') == 0
    *_, printed = capsys.readouterr().out.splitlines()
    assert printed == f'    cd here && chatgpt-rlhf {name} --config_file {name}.yaml'
    monkeypatch.chdir(tmp_path / 'here')
    assert call(monkeypatch, *printed.split()[4:], *SHORT[name]) == 0
    assert ('pretrain: embedded: a small GPT-2 learns' in capsys.readouterr().out) == (name == 'ppo')
    folder = Path('outputs', name)
    assert (folder / LEFT.get(name, 'actor') / 'model.safetensors').is_file()
    if name == 'ilql':
        assert (folder / 'actor' / 'ilql_heads.safetensors').is_file()
