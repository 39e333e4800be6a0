"""Config files: every key of llm-on-ray is supported or refused, three formats, overrides, no code in a file is run."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from chatgpt.launch.config_file import parse_run, read_file, to_yaml, write_resolved
from chatgpt.launch.runs import PPORun, RewardRun, SFTRun, run_class
from chatgpt.strategies.registry import STRATEGIES
from chatgpt.trainer.algorithms import ESTIMATORS

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = ROOT / 'examples' / 'configs'
DATASET = {'train_file': 'a.jsonl', 'validation_file': None, 'validation_split_percentage': 5}
LEARNING = {'optimizer': 'AdamW', 'batch_size': 2, 'epochs': 3, 'learning_rate': 1e-5, 'lr_scheduler': 'linear'}
STEPS = {'weight_decay': 0.1, 'gradient_accumulation_steps': 4, 'seed': 7, 'max_train_steps': 100}
REWARD = {
    'General': {'base_model': 'opt', 'output_dir': 'logs', 'checkpoint_dir': 'model'},
    'Dataset': DATASET | {'preprocessing_num_workers': 1},
    'Training': LEARNING | STEPS | {'num_training_workers': 1, 'resources_per_worker': {'CPU': 2}},
}
PPO = {
    'General': {'model_name': 'gpt2', 'model_pretrain': None, 'rm_name': 'gpt2', 'rm_pretrain': 'rm'},
    'Dataset': {'train_file': 'p.jsonl', 'validation_file': 'v.jsonl'},
    'Training': {
        'experience_batch_size': 2,
        'epochs': 3,
        'learning_rate': 2e-5,
        'kl_coeff': 0.2,
        'num_training_workers': 1,
    },
}


def run(cls, *argv: str, positional: str | None = 'dataset'):
    if cls is PPORun:
        positional = 'prompt_path'
    return parse_run(cls, description='', positional=positional, argv=list(argv))


def file(tmp_path: Path, content, ending: str = 'json') -> str:
    path = tmp_path / f'config.{ending}'
    path.write_text(content if isinstance(content, str) else json.dumps(content) if ending == 'json' else repr(content))
    return str(path)


@pytest.mark.parametrize('ending', ['json', 'conf'])
def test_every_key_of_a_reward_config(tmp_path, ending):
    r = run(RewardRun, '--config_file', file(tmp_path, REWARD, ending))
    r.validate(1)
    expected = {'pretrain': 'opt', 'save_path': 'logs', 'model_path': 'model', 'dataset': 'a.jsonl', 'max_epochs': 3}
    expected |= {'validation_file': None, 'validation_percentage': 5.0, 'optimizer': 'adamw', 'lr': 1e-5}
    expected |= {'lr_schedule': 'linear', 'weight_decay': 0.1, 'seed': 7, 'max_steps': 100}
    assert {name: getattr(r, name) for name in expected} == expected
    assert (r.train_batch_size, r.max_tokens_per_batch) == (8, 2 * r.max_tokens)  # 2 records in each of 4 forwards


def test_every_key_of_a_ppo_config(tmp_path):
    r = run(PPORun, '--config_file', file(tmp_path, PPO))
    assert (r.pretrain, r.reward_model, r.prompt_path, r.validation_file) == ('gpt2', 'rm', 'p.jsonl', 'v.jsonl')
    assert (r.experience_batch_size, r.lr, r.kl_coef) == (2, 2e-5, 0.2)
    assert (r.num_episodes, r.max_timesteps, r.update_timesteps) == (3, None, 1)  # passes over the prompts
    assert r.max_epochs == 5  # passes over the buffer
    trained = {**PPO, 'General': {**PPO['General'], 'model_pretrain': 'sft'}}
    assert run(PPORun, '--config_file', file(tmp_path, trained)).pretrain == 'sft'


def test_of_two_keys_for_one_model_trained_weights_win_and_null_means_the_name(tmp_path):
    """The values decide, not presence or order; words override the file."""
    name, weights, field = 'rm_name', 'rm_pretrain', 'reward_model'

    def found(general: dict[str, str | None], *words: str) -> str | None:
        return getattr(run(PPORun, '--config_file', file(tmp_path, {'General': general}), *words), field)

    for given, expected in (((None, None), None), (('x', None), 'x'), ((None, 'a'), 'a'), (('x', 'a'), 'a')):
        items = list(zip((name, weights), given, strict=True))
        assert found(dict(items)) == found(dict(reversed(items))) == expected
    assert (found({name: 'x'}), found({weights: 'a'}), found({field: 'own', weights: None})) == ('x', 'a', 'own')
    with pytest.raises(ValueError, match=f'both set {field}; give one'):
        found({field: 'own', name: 'x'})
    both: dict[str, str | None] = {name: 'x', weights: 'a'}
    for word, expected in ((f'General.{weights}=b', 'b'), (f'General.{name}=y', 'y'), (f'General.{weights}=null', 'x')):
        assert found(both, word) == expected
    assert found({weights: 'a'}, f'{weights}=null') is None


def test_the_number_of_workers(tmp_path, monkeypatch, capsys):
    argv = ['--config_file', file(tmp_path, {**REWARD, 'Training': {'num_training_workers': 2, 'batch_size': 2}})]
    with pytest.raises(
        ValueError, match=r'num_training_workers=2, but 1 process was started; launch with: torchrun --nproc-per-node=2'
    ):
        run(RewardRun, *argv)
    with pytest.raises(SystemExit):
        run(RewardRun, *argv, '--print_config')  # also on another machine than the run's
    monkeypatch.setenv('WORLD_SIZE', '2')
    assert run(RewardRun, *argv).train_batch_size == 4
    assert run(RewardRun, *argv, '--tensor_parallel=2').train_batch_size == 2  # one rank of two processes


def test_a_resume_computes_sizes_from_earlier_settings(tmp_path, monkeypatch):
    monkeypatch.setenv('WORLD_SIZE', '2')
    training = {'batch_size': 2, 'gradient_accumulation_steps': 2}
    argv = ['--config_file', file(tmp_path, {**REWARD, 'Training': training}), f'--save_path={tmp_path}']
    first = run(RewardRun, *argv, '--tensor_parallel=2', '--max_len=32')
    assert (first.train_batch_size, first.max_tokens_per_batch) == (4, 2 * first.max_tokens)
    write_resolved(first, tmp_path)
    again = run(RewardRun, *argv, f'--resume={tmp_path}')
    assert (again.tensor_parallel, again.train_batch_size) == (2, 4)
    assert (again.max_len, again.max_tokens_per_batch) == (32, first.max_tokens_per_batch)
    other = run(RewardRun, *argv, f'--resume={tmp_path}', '--tensor_parallel=1')
    assert other.train_batch_size == 8  # the last value that was given
    argv = ['--test=true', f'--save_path={tmp_path}/trial']
    write_resolved(run(RewardRun, *argv, '--train_batch_size=25'), tmp_path / 'trial')
    again = run(RewardRun, *argv, f'--resume={tmp_path}/trial')
    assert (again.train_batch_size, again.max_steps) == (25, 4)


YAML = """
General: {pretrain: gpt2}
Training:
  lr: 1e-5
  max_steps: None
  weight_decay: 1E-2
  shuffle: false
"""


def test_yaml_numbers_and_null_are_what_they_look_like_and_what_wins(tmp_path):
    path = file(tmp_path, YAML, 'yaml')
    assert read_file(path)['Training'] == {'lr': 1e-5, 'max_steps': None, 'weight_decay': 0.01, 'shuffle': False}
    r = run(SFTRun, '--config_file', path)
    assert (r.lr, r.max_steps, r.weight_decay, r.shuffle) == (1e-5, None, 0.01, False)
    # flags override words, and words the file
    assert run(SFTRun, '--config_file', path, 'Training.learning_rate=3e-4').lr == 3e-4
    assert run(SFTRun, '--config_file', path, 'lr=3e-4', '--lr', '7').lr == 7.0
    both = run(SFTRun, *'data.jsonl max_epochs=5 --tensorboard --lora_target_modules q --lora_target_modules v'.split())
    assert (both.dataset, both.max_epochs, both.tensorboard) == ('data.jsonl', 5, True)
    assert both.lora_target_modules == ['q', 'v']
    for word in ('-1e-3', '-0.001'):
        assert run(PPORun, '--entropy_coef', word, '--missing_eos_score', '-1').entropy_coef == -1e-3


@pytest.mark.parametrize(
    ('content', 'ending', 'sentence'),
    [
        (
            {'Training': {'learning_rat': 1}},
            'json',
            r'Training.learning_rat is not a setting of this run; did you mean l',
        ),
        ({'lr': 1, 'Training': {'learning_rate': 2}}, 'json', r'lr and Training.learning_rate both set lr; give one'),
        ({'Training': {'learning_rate': 'fast'}}, 'json', r"Training.learning_rate: 'fast' is no number"),
        ('[1, 2]', 'json', r'it holds a list, not names with values'),
        ('{"a": ', 'json', r'config.json: '),
        ('lr: 1e-4\nseed: 3\nlr: 1e-5\n', 'yaml', 'lr is given twice, on line 1 and on line 3'),
        ('{"lr": 1,\n "lr": 2}', 'conf', 'lr is given twice, on line 1 and on line 2'),
        ('{"lr": 1, "lr": 2}', 'json', 'lr is given twice'),
        ('save_path:\n', 'yaml', 'save_path: an empty value is not expected here; leave the line out'),
        ('lr=1', 'toml', r"the ending '.toml' is not known"),
    ],
)
def test_mistakes(tmp_path, content, ending, sentence):
    with pytest.raises(ValueError, match=sentence):
        run(RewardRun, '--config_file', file(tmp_path, content, ending))


@pytest.mark.parametrize(
    ('cls', 'content', 'named'),
    [
        (PPORun, {'dataset': 'a.jsonl', 'pack_examples': True}, 'those of sft: use that command'),
        (PPORun, {'prompt_path': 'a.jsonl', 'kl_cof': 0.1}, 'did you mean kl_coef'),
        (PPORun, {'pack_examples': True}, r'this run(\?|$|; did)'),
    ],
)
def test_a_file_of_another_method_names_its_command(tmp_path, cls, content, named):
    with pytest.raises(ValueError, match=named):
        run(cls, '--config_file', file(tmp_path, content))


@pytest.mark.parametrize('content', ['__import__("os").mkdir("executed")', '{"a": open("executed", "w")}'])
def test_a_file_is_never_evaluated_and_makes_no_objects(tmp_path, monkeypatch, content):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match='a .conf file is one Python literal'):
        run(RewardRun, '--config_file', file(tmp_path, content, 'conf'))
    assert not (tmp_path / 'executed').exists()
    with pytest.raises(ValueError, match='could not determine a constructor'):
        run(RewardRun, '--config_file', file(tmp_path, 'lr: !!python/object/apply:os.getcwd []', 'yaml'))


@pytest.mark.parametrize(
    ('argv', 'sentence'),
    [
        (['--preprocessing_num_workers=4'], 'preprocessing_num_workers=4 cannot be honoured'),
        (['--batch_siz=2'], 'did you mean --batch_size'),
        (['--batch_size=2', '--train_batch_size=4'], 'batch_size=2 and train_batch_size=4 both say how large a batch'),
        (['--max_epochs=2', '--epochs', '3'], '--max_epochs and --epochs both set max_epochs; give one'),
        (['--optimizer=adafactor'], "'adafactor' is none of: adamw, adamw8bit, paged_adamw8bit, sgd"),
        (['--resources_per_worker={TPU: 1}'], "'TPU' is not known; there are CPU and GPU"),
    ],
)
def test_what_cannot_be_honoured(argv, sentence, capsys):
    with pytest.raises((ValueError, SystemExit)) as stop:
        run(RewardRun, *argv).validate(1)
    assert sentence in str(stop.value) + capsys.readouterr().err


@pytest.mark.parametrize('cls', [PPORun, SFTRun])
def test_the_resolved_config_reads_back_as_the_same_run(tmp_path, cls, capsys):
    original = run(cls, '--lr', '3e-7', '--lora_rank=2', '--lora_target_modules=q_proj', '--resume=auto')
    with pytest.raises(SystemExit) as stop:
        run(cls, '--lr', '3e-7', '--lora_rank=2', '--lora_target_modules=q_proj', '--resume=auto', '--print_config')
    assert stop.value.code == 0
    path = file(tmp_path, capsys.readouterr().out, 'yaml')
    assert run(cls, '--config_file', path) == original
    write_resolved(original, tmp_path / 'out')
    assert (tmp_path / 'out' / 'config.yaml').read_text() == to_yaml(original)


@pytest.mark.parametrize(('name', 'cls'), [('ppo.yaml', PPORun), ('reward.conf', RewardRun), ('sft.yaml', SFTRun)])
def test_the_examples_are_good(name, cls):
    r = run(cls, '--config_file', str(CONFIGS / name))
    r.validate(1)
    assert r.pretrain == 'gpt2'
    assert (ROOT / (r.prompt_path if cls is PPORun else r.dataset)).is_file()


def test_help_names_the_value_of_every_flag_and_the_tables_also_what_was_added_from_outside(capsys, monkeypatch):
    monkeypatch.setitem(ESTIMATORS, 'mine', ESTIMATORS['gae'])
    for cls in (PPORun, SFTRun, run_class('dpo')):
        with pytest.raises(SystemExit):
            run(cls, '--help-all')
        text = capsys.readouterr().out
        words = ' '.join(text.split())
        for shown in ('--lr X ', '--optimizer {adamw,adamw8bit,paged_adamw8bit,sgd}', '--tensorboard true|false'):
            assert shown in words
        assert '--strategy {' + ','.join(STRATEGIES) + '}|module:name ' in words and 'fsdp_cpu' in words
        flags = re.findall(r'^ +--(\w+)(?:   |$)', text, re.MULTILINE)
        assert flags == ['print_config']  # the only one without a value
        assert ('reinforce++_baseline,mine}|module:name' in words) == (cls is PPORun)
        assert ('--policy_loss {ppo,gspo,gspo_token,cispo,reinforce}|module:name' in words) == (cls is PPORun)
