"""Runs llm-on-ray's configs and data unchanged through `python -m chatgpt reward-model`, `ppo` and `sft`, and checks
the files that they write."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from chatgpt.launch import demo_world
from chatgpt.launch.config_file import parse_run
from chatgpt.launch.methods import METHODS
from chatgpt.launch.recipes import execute
from chatgpt.launch.runs import RewardRun, run_class
from chatgpt.nn import GPTActor, RewardModel

ROOT = Path(__file__).resolve().parents[3]
METHOD_OF = {'reward': 'reward-model', 'ppo': 'ppo', 'sft': 'sft'}
SCRIPTS = {'reward': 'examples/train_reward_model.py', 'ppo': 'examples/train_prompts.py'}


def longer() -> Any:
    """Returns the embedded model's config with enough positions for a response of 64 tokens."""
    config = demo_world.demo_config()
    config.n_positions = 128
    return config


@pytest.fixture(scope='module')
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a base model under the name in the configs."""
    folder = tmp_path_factory.mktemp('hub') / 'EleutherAI' / 'gpt2'
    GPTActor(config=longer()).save_pretrained(folder, tokenizer=demo_world.demo_tokenizer())
    return folder


@pytest.fixture
def here(tmp_path: Path, base: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory in which `EleutherAI/gpt2` is found."""
    (tmp_path / 'EleutherAI').symlink_to(base.parent)
    monkeypatch.chdir(tmp_path)
    before = torch.get_num_threads()
    yield tmp_path
    torch.set_num_threads(before)


def conf(path: Path, text: str) -> str:
    """Writes a config in one of its formats; `.conf` is a Python literal with comments and commas."""
    path.write_text(text)
    return str(path)


def run(kind: str, config: str) -> Any:
    name = METHOD_OF[kind]
    positional = METHODS.find(name).positional
    argv = ['--config_file', config]
    found = parse_run(run_class(name), description=None, positional=positional, argv=argv, method=name)
    execute(found)
    return found


def metrics(folder: Path | str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(folder, 'metrics.jsonl').read_text().splitlines()]


def pairs(path: Path, count: int, name: str = 'instruction', *, pretty: bool = False, seed: int = 0) -> None:
    """Writes preferences of the embedded world, one per line or pretty-printed one after another, as in its sample."""
    rows = [
        {name: row['prompt'], 'chosen': row['chosen'], 'rejected': row['rejected']}
        for row in demo_world.demo_preferences(count, seed)
    ]
    path.write_text(''.join(json.dumps(row, indent=4 if pretty else None) + '\n' for row in rows))


def prompts(path: Path, count: int) -> None:
    path.write_text(''.join(json.dumps(row) + '\n' for row in demo_world.demo_prompts(count)))


REWARD_CONF = """{
    "General": {
        "base_model": "EleutherAI/gpt2",
        "output_dir": "log",
        "checkpoint_dir": "model"
    },
    "Dataset": {
        "train_file": "rm_data.jsonl",
        "validation_file": None,
        "validation_split_percentage": 25,
    },
    "Training": {
        "optimizer": "AdamW",
        "batch_size": 2,
        "epochs": 3,
        "learning_rate": 1e-3,
        "lr_scheduler": "linear",
        "weight_decay": 0.0,
        "num_training_workers": 1,
        "resources_per_worker": {"CPU": 1},
    },
}
"""


def test_reward_conf_with_instructions(here):
    pairs(here / 'rm_data.jsonl', 16)
    run('reward', conf(here / 'reward.conf', REWARD_CONF))
    # 12 of the 16 records are learned in batches of two in three passes; the other four are evaluated after each pass
    rows = metrics('log')
    assert len(rows) == 2 and all('rm/val_loss' in row for row in rows)  # 18 steps, logged every ten
    model = transformers.AutoModelForSequenceClassification.from_pretrained('model')
    assert model.config.num_labels == 1
    head = RewardModel.from_pretrained('model').value_head
    assert float(head.weight.abs().sum()) > 0


def test_reward_yaml_with_prompts_back_to_back(here):
    """The trained model is saved with its trained head: it prefers the chosen responses."""
    pairs(here / 'sample.jsonl', 8, 'prompt', pretty=True)
    run(
        'reward',
        conf(
            here / 'reward.yaml',
            """
General:
  base_model: EleutherAI/gpt2
  output_dir: output/rm
  checkpoint_dir: checkpoint/rm
Dataset:
  train_file: sample.jsonl
  validation_file: null
  validation_split_percentage: 0
Training:
  optimizer: AdamW
  batch_size: 2
  epochs: 12
  learning_rate: 3.0e-03
  lr_scheduler: linear
  weight_decay: 0.0
  num_training_workers: 1
  resources_per_worker:
    CPU: 1
""",
        ),
    )
    model = transformers.AutoModelForSequenceClassification.from_pretrained('checkpoint/rm').eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained('checkpoint/rm')
    right = 0
    for row in demo_world.demo_preferences(8):
        scores = []
        for answer in ('chosen', 'rejected'):
            ids = [*tokenizer(row['prompt'])['input_ids'], *tokenizer(row[answer])['input_ids'], tokenizer.eos_token_id]
            with torch.no_grad():
                scores.append(float(model(torch.tensor([ids])).logits))
        right += scores[0] > scores[1]
    assert right >= 7


def test_a_validation_file_and_a_number_of_steps(here):
    pairs(here / 'train.jsonl', 8)
    pairs(here / 'held_out.jsonl', 4, seed=1)
    config = {
        'General': {'base_model': 'EleutherAI/gpt2', 'output_dir': 'log', 'checkpoint_dir': 'model'},
        'Dataset': {'train_file': 'train.jsonl', 'validation_file': 'held_out.jsonl'},
        'Training': {'batch_size': 2, 'epochs': 3, 'max_train_steps': 5, 'learning_rate': 1e-4, 'seed': 7},
    }
    r = run('reward', conf(here / 'reward.json', json.dumps(config)))
    assert r.seed == 7
    assert metrics('log')[-1]['step'] >= 1 and Path('model/model.safetensors').exists()
    with pytest.raises(ValueError, match='is the training data'):
        config['Dataset']['validation_file'] = 'train.jsonl'
        run('reward', conf(here / 'again.json', json.dumps(config)))


def test_accumulation_is_one_step_of_the_optimizer(here):
    """4 accumulated batches of 2 give the same weights as a batch of 8."""
    pairs(here / 'rm_data.jsonl', 16)
    ends = []
    for name, batch, steps in (('one', 8, 1), ('four', 2, 4)):
        text = REWARD_CONF.replace('"batch_size": 2', f'"batch_size": {batch}, "gradient_accumulation_steps": {steps}')
        text = text.replace('"log"', f'"log_{name}"').replace('"model"', f'"{name}"').replace('25', '0')
        run('reward', conf(here / f'{name}.conf', text))
        ends.append(RewardModel.from_pretrained(name).state_dict())
    for name, tensor in ends[0].items():
        torch.testing.assert_close(tensor, ends[1][name], rtol=1e-4, atol=1e-5)


@pytest.fixture
def reward_model(here: Path) -> None:
    """Trains a reward model into `rm`."""
    pairs(here / 'rm_data.jsonl', 8)
    text = REWARD_CONF.replace('"epochs": 3', '"epochs": 1').replace('"model"', '"rm"').replace('"log"', '"rm_log"')
    run('reward', conf(here / 'rm.conf', text))


def ppo_conf(training: str, **general: str) -> str:
    names = {'model_name': '"EleutherAI/gpt2"', 'model_pretrain': 'None', 'rm_name': '"EleutherAI/gpt2"'}
    names |= {'rm_pretrain': '"rm"'} | general
    lines = ',\n'.join(f'        "{name}": {value}' for name, value in names.items())
    return (
        f'{{\n    "General": {{\n{lines}\n    }},\n'
        '    "Dataset": {"train_file": "ppo.jsonl", "validation_file": None,\n'
        f'        "validation_split_percentage": 0}},\n    "Training": {{"optimizer": "AdamW", {training}}},\n}}\n'
    )


def sampled_prompts(folder: str) -> list[str]:
    return [json.loads(line)['prompt'] for line in Path(folder, 'samples.jsonl').read_text().splitlines()]


def test_ppo_conf_by_epochs_visits_every_prompt(here, reward_model):
    """llm-on-ray uses only the first prompt."""
    prompts(here / 'ppo.jsonl', 6)
    training = '"experience_batch_size": 2, "epochs": 2, "learning_rate": 1e-5, "kl_coeff": 0.2'
    r = run('ppo', conf(here / 'ppo.conf', ppo_conf(training)))
    rows = metrics(r.save_path)
    assert len(rows) == 6  # two passes over six prompts in batches of two
    record = json.loads(Path(r.save_path, 'run.json').read_text())
    settings = record['settings']
    assert (record['data']['prompts'], settings['kl_coef'], settings['lr'], settings['optimizer']) == (
        6,
        0.2,
        1e-5,
        'adamw',
    )
    first = rows[0]
    assert first['rollout/kl_mean'] == pytest.approx(0.0, abs=1e-5)  # of a policy and itself; not 0 in llm-on-ray
    tokenizer = transformers.AutoTokenizer.from_pretrained(Path(r.save_path, 'actor'))
    model = transformers.AutoModelForCausalLM.from_pretrained(Path(r.save_path, 'actor'))
    assert model.config.vocab_size >= len(tokenizer)


def test_the_reward_models_head_goes_into_ppo(here, reward_model):
    """llm-on-ray does not read `rm_pretrain`, so its head is random. Here a head of zeros gives equal scores."""
    model = RewardModel.from_pretrained('rm')
    with torch.no_grad():
        model.value_head.weight.zero_()
    model.score_bias.fill_(-2.5)
    model.save_pretrained('flat', tokenizer=demo_world.demo_tokenizer())
    prompts(here / 'ppo.jsonl', 4)
    training = '"experience_batch_size": 4, "training_iteration": 1, "learning_rate": 1e-5, "kl_coeff": 0.2'
    r = run('ppo', conf(here / 'ppo.conf', ppo_conf(training, rm_pretrain='"flat"')))
    row = metrics(r.save_path)[0]
    assert row['rollout/score_mean'] == pytest.approx(2.5, abs=1e-5)


def test_trained_weights_take_the_place_of_the_name(here, reward_model):
    """`model_pretrain` is the policy that learns, and its own reference."""
    sft = GPTActor(config=longer())
    sft.save_pretrained('sft', tokenizer=demo_world.demo_tokenizer())
    prompts(here / 'ppo.jsonl', 4)
    training = '"experience_batch_size": 4, "training_iteration": 1, "learning_rate": 0, "kl_coeff": 0.2'
    r = run('ppo', conf(here / 'ppo.conf', ppo_conf(training, model_pretrain='"sft"')))
    end = transformers.AutoModelForCausalLM.from_pretrained(Path(r.save_path, 'actor')).state_dict()
    start = transformers.AutoModelForCausalLM.from_pretrained('sft').state_dict()
    assert all(torch.equal(end[name], start[name]) for name in start)


def test_finetuning_data_with_a_context(here):
    """Rows have instruction, context and response, as its fine-tuning data."""
    rows = [{'instruction': 'tell', 'context': '', 'response': row['response']} for row in demo_world.demo_corpus(8)]
    rows[0]['context'] = 'once'
    Path('sft.jsonl').write_text(''.join(json.dumps(row) + '\n' for row in rows))
    r = run(
        'sft',
        conf(
            here / 'sft.yaml',
            """
General: {base_model: EleutherAI/gpt2, output_dir: log, checkpoint_dir: sft}
Dataset: {train_file: sft.jsonl, validation_file: null, validation_split_percentage: 0}
Training: {optimizer: AdamW, batch_size: 2, epochs: 5, learning_rate: 3.0e-3, lr_scheduler: linear}
""",
        ),
    )
    losses = [row['sft/loss'] for row in metrics(r.save_path)]
    assert losses[-1] < losses[0]
    assert transformers.AutoModelForCausalLM.from_pretrained('sft').config.model_type == 'gpt2'


def test_more_cores_than_there_are(here):
    """Its defaults request 32 and 56 cores."""
    cores = len(os.sched_getaffinity(0))
    for cpus in (1, 56):
        path = conf(here / 'reward.conf', REWARD_CONF.replace('{"CPU": 1}', f'{{"CPU": {cpus}}}'))
        parse_run(RewardRun, description=None, positional='dataset', argv=['--config_file', path])
        assert torch.get_num_threads() == min(cpus, cores)


@pytest.mark.parametrize(
    ('old', 'new', 'sentence'),
    [
        ('"weight_decay"', '"weigth_decay"', 'weigth_decay is not a setting of this run; did you mean weight_decay'),
        ('"AdamW"', '"Adafactor"', "'Adafactor' is none of: adamw, adamw8bit, paged_adamw8bit, sgd"),
        ('"num_training_workers": 1', '"num_training_workers": 2', 'num_training_workers=2, but 1 process was started'),
        ('{"CPU": 1}', '{"TPU": 1}', "'TPU' is not known; there are CPU and GPU"),
        ('25,', '25, "preprocessing_num_workers": 8,', 'preprocessing_num_workers=8 cannot be honoured'),
        ('1e-3', '__import__("os").getpid()', 'a .conf file is one Python literal'),
    ],
)
def test_unsupported_settings_are_errors(here, old, new, sentence):
    with pytest.raises(ValueError, match=sentence.replace('(', r'\(')):
        run('reward', conf(here / 'reward.conf', REWARD_CONF.replace(old, new)))


@pytest.mark.system
def test_the_command(here):
    """Runs `python -m chatgpt` with one worker."""
    pairs(here / 'rm_data.jsonl', 8)
    prompts(here / 'ppo.jsonl', 4)
    conf(here / 'reward.conf', REWARD_CONF.replace('"model"', '"rm"'))
    training = '"experience_batch_size": 2, "epochs": 1, "learning_rate": 1e-5, "kl_coeff": 0.2'
    conf(here / 'ppo.conf', ppo_conf(training))
    env = os.environ | {'OMP_NUM_THREADS': '1', 'HF_HUB_OFFLINE': '1'}
    for kind in ('reward', 'ppo'):
        command = [sys.executable, '-m', 'chatgpt', METHOD_OF[kind], '--config_file', f'{kind}.conf']
        done = subprocess.run(command, env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
    assert Path('rm/config.json').exists() and len(metrics('outputs/ppo')) == 2


@pytest.mark.system
def test_two_workers_really_work(here):
    """Runs both commands as in docs/launch.md; two processes share each step."""
    pairs(here / 'rm_data.jsonl', 8)
    prompts(here / 'ppo.jsonl', 4)
    conf(
        here / 'reward.conf',
        REWARD_CONF.replace('"num_training_workers": 1', '"num_training_workers": 2').replace('"model"', '"rm"'),
    )
    training = (
        '"experience_batch_size": 2, "epochs": 1, "learning_rate": 1e-5, "kl_coeff": 0.2, "num_training_workers": 2'
    )
    conf(here / 'ppo.conf', ppo_conf(training))
    env = os.environ | {'OMP_NUM_THREADS': '1', 'HF_HUB_OFFLINE': '1'}
    for kind, more in (('reward', []), ('ppo', ['--save_path=ppo'])):
        command = [sys.executable, '-m', 'chatgpt.launch', str(ROOT / SCRIPTS[kind]), '--config_file', f'{kind}.conf']
        done = subprocess.run([*command, '--strategy=ddp', *more], env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(Path('ppo/run.json').read_text())['strategy']['world_size'] == 2
    assert len(metrics('ppo')) == 2  # four prompts in batches of two, one on each worker
