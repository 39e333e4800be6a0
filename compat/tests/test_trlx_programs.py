"""Whole trlX programs on a tiny model, checked by their files and final variables."""

from __future__ import annotations

import importlib
import json
import runpy
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from chatgpt.nn import GPTActor, ILQLModel
from chatgpt.testing.fakes import char_tokenizer, tiny_config
from chatgpt.testing.processes import run_distributed
from chatgpt.trainer import ILQLTrainer, PPOTrainer, SFTTrainer
from chatgpt_compat.modules import serving
from chatgpt_compat.trlx.pipeline import tokenize_dialogue

PROGRAMS = Path(__file__).parent / 'trlx_programs'


@pytest.fixture
def trlx() -> Iterator[Any]:
    """The package `trlx`, imported by its name as under the runner."""
    with serving():
        yield importlib.import_module('trlx')


@pytest.fixture
def run(trlx: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Any]]:
    """Returns a function that runs a program in an empty directory and returns its globals; dicts become JSON."""

    def run_program(name: str, *args: Any) -> dict[str, Any]:
        monkeypatch.chdir(tmp_path)
        monkeypatch.syspath_prepend(str(PROGRAMS))
        texts = [json.dumps(arg) if isinstance(arg, dict) else str(arg) for arg in args]
        monkeypatch.setattr(sys, 'argv', [f'{name}.py', *texts])
        return runpy.run_path(str(PROGRAMS / f'{name}.py'), run_name='__main__')

    return run_program


@pytest.fixture(scope='session')
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a GPT-2 with three small blocks and a tokenizer of characters."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp('model')
    GPTActor(config=tiny_config('gpt2', layers=3, positions=64)).save_pretrained(folder, tokenizer=char_tokenizer())
    return folder


@pytest.fixture(scope='session')
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a classifier with two labels over the same characters."""
    from transformers import GPT2ForSequenceClassification

    torch.manual_seed(1)
    folder = tmp_path_factory.mktemp('classifier')
    labels = {'id2label': {0: 'NEGATIVE', 1: 'POSITIVE'}, 'label2id': {'NEGATIVE': 0, 'POSITIVE': 1}, 'num_labels': 2}
    GPT2ForSequenceClassification(tiny_config('gpt2', **labels)).save_pretrained(folder)
    char_tokenizer().save_pretrained(folder)
    return folder


def small(folder: Path, **more: Any) -> dict[str, Any]:
    """Returns settings by dotted names for a small run."""
    return {
        'model.model_path': str(folder),
        'tokenizer.tokenizer_path': str(folder),
        'train.tracker': None,
        'train.seq_length': 48,
        'train.batch_size': 4,
        'train.total_steps': 4,
        'train.eval_interval': 2,
    } | more


PPO = {'method.num_rollouts': 8, 'method.chunk_size': 4, 'method.ppo_epochs': 1, 'method.gen_kwargs.max_new_tokens': 6}


def lines(folder: Path, name: str = 'metrics.jsonl') -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


def changed(before: Any, after: Any, part: str) -> list[bool]:
    """Returns for each parameter with `part` in its name whether it differs."""
    theirs = dict(before.named_parameters())
    return [not torch.equal(p, theirs[n]) for n, p in after.named_parameters() if part in n]


def test_sentiments_by_ppo_with_hydra(run, folder, classifier, tmp_path):
    found = run('ppo_sentiments', {'config': small(folder) | PPO, 'classifier': str(classifier)})['trainer']
    assert isinstance(found.trainer, PPOTrainer)
    assert found.iter_count == 4
    before = AutoModelForCausalLM.from_pretrained(folder)
    after = AutoModelForCausalLM.from_pretrained(tmp_path / 'ckpts/checkpoint_4/hf_model')
    assert AutoTokenizer.from_pretrained(tmp_path / 'ckpts/checkpoint_4/hf_model').get_vocab()
    assert not any(changed(before, after, 'h.0.')) and not any(changed(before, after, 'wte'))
    assert all(changed(before, after, 'h.1.')) and all(changed(before, after, 'h.2.'))
    assert (tmp_path / 'ckpts/best_checkpoint/hf_model/config.json').is_file()
    evaluations = lines(tmp_path / 'ckpts', 'eval.jsonl')
    assert [line['step'] for line in evaluations] == [0, 1, 2]  # before the first phase and after each of two steps
    scores = [line['eval/score_mean'] for line in evaluations]
    assert all(0 < score < 1 for score in scores)
    assert found.evaluate()['reward/mean'] == pytest.approx(scores[-1], rel=1e-6)
    last = lines(tmp_path / 'ckpts')[-1]
    assert last['reward/mean'] == scores[-1]
    assert last['losses/total_loss'] == pytest.approx(last['losses/policy_loss'] + last['losses/value_loss'])
    assert last['learning_rate_group_0'] == 3e-5
    assert len(found.store) == 8


def test_rewards_per_token(run, folder):
    found = run('ppo_dense_sentiments', {'config': small(folder) | PPO})['trainer']
    for e in found.store:
        by_hand = torch.zeros(e.num_actions)
        length = len(char_tokenizer()(e.response_text).input_ids) + e.ended
        by_hand[length // 2] += 0.25
        by_hand[length - 1] += 1.0
        torch.testing.assert_close(e.token_scores, by_hand)
        assert float(e.rewards.sum()) == pytest.approx(1.25 - 0.001 * float(e.kl.sum()), abs=1e-5)


def test_adapters(run, folder, tmp_path):
    with pytest.warns(UserWarning, match='num_layers_unfrozen=2 is ignored'):
        found = run('ppo_sentiments_peft', {'config': small(folder) | PPO | {'optimizer.kwargs.lr': 1e-2}})['trainer']
    trained = {name for name, p in found.actor.named_parameters() if p.requires_grad}
    assert trained and all('lora' in name or 'value_head' in name for name in trained)
    assert found.trainer.maker.reference.initial_model is None
    before = AutoModelForCausalLM.from_pretrained(folder)
    after = AutoModelForCausalLM.from_pretrained(tmp_path / 'ckpts/checkpoint_4/hf_model')
    assert any(changed(before, after, 'c_attn.weight')) and not any(changed(before, after, 'wte'))


def test_metadata_stop_sequences_and_a_decaying_rate(run, folder, tmp_path):
    config = {'model.model_path': str(folder), 'tokenizer.tokenizer_path': str(folder), 'train.tracker': None}
    program = run('ppo_hh', {'config': config})
    samples, prompts, originals, others = program['CALLS'][-1]
    place = {
        f'human: {q} assistant:': f' answer {i}'
        for i, q in enumerate(['how are you?', 'what is the time?', 'where is the station?', 'who wrote it?'])
    }
    assert [place[p] for p in prompts] == list(originals)
    assert set(others) == {'outputs', 'tokenizer'}
    stopped = [e for e in program['trainer'].store if e.finish_reason == 'stop']
    assert all('e' not in e.response_text for e in program['trainer'].store)
    assert stopped, 'no response met a stop sequence: the test shows nothing'
    rates = [line['learning_rate_group_0'] for line in lines(tmp_path / 'checkpoints/ppo_hh')]
    # steps 0 1 | 2 3 of a cosine from 1e-3 to 1e-4 over 4 steps
    factors = [0.1 + 0.9 * (1 + c) / 2 for c in (1.0, 0.5**0.5, 0.0, -(0.5**0.5))]
    assert rates == pytest.approx([1e-3 * (factors[0] + factors[1]) / 2, 1e-3 * (factors[2] + factors[3]) / 2])


def test_ppo_from_a_config_learns_the_walks(run, folder, tmp_path):
    config = {'tokenizer.tokenizer_path': str(folder), 'train.tracker': None}
    found = run('ppo_randomwalks', {'config': config})['trainer']
    assert found.iter_count == 40  # 20 epochs of 2 passes over one batch
    rewards = [line['rollout_scores/mean'] for line in lines(tmp_path / 'ckpts')]
    assert rewards[-1] > 0.7 > 0.2 > rewards[0]
    assert 'metrics/optimality' in found.evaluate()
    assert [line['kl_ctl_value'] for line in lines(tmp_path / 'ckpts')] == [0.0] * 20


def test_ilql_learns_the_walks_and_sweeps_beta(run, folder, tmp_path):
    found = run('ilql_randomwalks', {'config': {'tokenizer.tokenizer_path': str(folder), 'train.tracker': None}})[
        'trainer'
    ]
    assert isinstance(found.trainer, ILQLTrainer)
    last = lines(tmp_path / 'ckpts')[-1]
    assert {f'metrics/optimality@beta={b}' for b in (0, 1, 100)} <= set(last)
    assert last['losses/loss'] < lines(tmp_path / 'ckpts')[0]['losses/loss']
    before, *_, after = lines(tmp_path / 'ckpts', 'eval.jsonl')
    optimality = [[row[f'eval/metrics/optimality@beta={b}'] for b in (0, 1, 100)] for row in (before, after)]
    assert sum(optimality[1]) > sum(optimality[0]) + 0.3
    record = found.data[0]
    assert record.prompt_ids.tolist() == [char_tokenizer().get_vocab()['b']]
    assert record.response_ids[-1] == 2  # the end token
    heads = ILQLModel.from_pretrained(tmp_path / 'ckpts/checkpoint_80/hf_model')
    assert len(heads.q_heads) == 2


def test_sentiments_by_ilql(run, folder, classifier, tmp_path):
    config = small(folder) | {'method.gen_kwargs.max_new_tokens': 5}
    found = run('ilql_sentiments', {'config': config, 'classifier': str(classifier)})['trainer']
    assert found.iter_count == 4
    assert 0 < lines(tmp_path / 'ckpts')[-1]['metrics/sentiments'] < 1
    standardised = sorted({round(float(r.rewards.sum()), 5) for r in found.trainer.train_data})
    assert standardised == pytest.approx([-0.9128709, 0.9128709], abs=1e-5)  # ±½ / √(6 · ¼ / 5)


@pytest.mark.parametrize('dialogues', [False, True])
def test_sft(run, folder, tmp_path, dialogues):
    config = small(folder) | {'method.gen_kwargs.max_new_tokens': 5, 'optimizer.kwargs.lr': 1e-2}
    found = run('sft_sentiments', {'config': config | {'scheduler.kwargs.eta_min': 1e-2}, 'dialogues': dialogues})
    trainer = found['trainer']
    assert isinstance(trainer.trainer, SFTTrainer)
    rows = lines(tmp_path / 'ckpts')
    assert rows[-1]['loss'] < rows[0]['loss']
    assert 'metrics/length' in rows[-1]
    vocabulary = char_tokenizer().get_vocab()
    if dialogues:
        talk = trainer.data[1]
        assert char_tokenizer().decode(talk.prompt_ids) == 'say a'
        assert talk.response_ids.tolist() == [*(vocabulary[c] for c in ' a and b? b'), 2]
        assert talk.response_mask.tolist() == [True] * 2 + [False] * 7 + [True] * 3
    else:
        assert trainer.data[0].prompt_ids.tolist() == [vocabulary['a']]
        assert trainer.data[0].response_ids.tolist() == [vocabulary[c] for c in ' fine film']
    AutoModelForCausalLM.from_pretrained(tmp_path / 'reviews-sft')


def test_the_readme(run, folder, tmp_path):
    found = run('hello', {'folder': str(folder)})
    prompt = char_tokenizer()('who rules?').input_ids
    assert found['answer'][0, : len(prompt)].tolist() == prompt
    assert len(prompt) < found['answer'].shape[1] <= len(prompt) + 6
    assert found['own'].shape == (1, len(prompt) + 3)
    assert [e.prompt_ids.tolist() for e in found['trainer'].store] == [
        [1]
    ] * 4  # the begin token, since there are no prompts
    assert (tmp_path / 'output/model.safetensors').is_file()


FLAT_PPO = """
model:
  model_path: "lvwerra/gpt2-imdb"
  tokenizer_path: "{folder}"
  model_type: "AcceleratePPOModel"
  num_layers_unfrozen: 2
train:
  seq_length: 48
  epochs: 1000
  total_steps: 4
  batch_size: 4
  lr_ramp_steps: 2
  lr_decay_steps: 79000
  weight_decay: 1e-6
  learning_rate_init: 1e-3
  learning_rate_target: 1e-3
  opt_betas: [0.9, 0.95]
  input_size: 6
  checkpoint_interval: 10000
  eval_interval: 16
  tracker: null
  pipeline: "{pipeline}"
  orchestrator: "{orchestrator}"
method:
  name: 'ppoconfig'
  num_rollouts: 4
  chunk_size: 4
  ppo_epochs: 1
  init_kl_coef: 0.2
  target: 6
  horizon: 10000
  gamma: 1
  lam: 0.95
  cliprange: 0.2
  cliprange_value: 0.2
  vf_coef: 2.3
  gen_kwargs:
    max_length: 44
    min_length: 44
    top_k: 0.0
    top_p: 1.0
    do_sample: True
"""


def test_a_flat_config_of_2022(run, folder, tmp_path):
    text = FLAT_PPO.format(folder=folder, pipeline='PPOPipeline', orchestrator='PPOOrchestrator')
    (tmp_path / 'ppo_config.yml').write_text(text.replace('input_size: 6', 'input_size: 60'))
    found = run('architext', folder)['trainer']
    assert {e.num_tokens for e in found.store} == {44}  # min_length = max_length excludes the end token
    group = found.opt.param_groups[0]
    assert (group['betas'], group['weight_decay'], group['eps']) == ((0.9, 0.95), 1e-6, 1e-8)
    rates = [line['learning_rate_group_0'] for line in lines(tmp_path / 'ckpts')]
    assert rates == pytest.approx([5e-4, 1e-3, 1e-3, 1e-3])
    assert found.trainer.config.kl_target == 6 and found.trainer.config.value_coef == 2.3


def test_a_dataset_of_ratings(run, folder, tmp_path):
    config = small(folder) | {'method.gen_kwargs.max_new_tokens': 5}
    found = run('simulacra', {'config': config})['trainer']
    assert found.data[0].prompt_ids.tolist() == [1]
    assert [float(r.rewards.sum()) for r in found.data] == [7, 2, 9, 4]


def test_trainers_by_hand_and_a_resume(run, folder, tmp_path):
    config = small(folder) | PPO | {'train.checkpoint_interval': 2}
    found = run('by_hand', {'config': config})
    assert 'reward/mean' in found['results']
    names = {p.name for p in (tmp_path / 'ckpts').iterdir()}
    assert {'checkpoint_2', 'checkpoint_4', 'best_checkpoint'} <= names
    assert found['first_run'] == 4 and found['resumed'].iter_count == 8
    assert found['resumed'].trainer.timestep == 8
    assert [line['step'] for line in lines(tmp_path / 'second')] == [3, 4]


def test_rollouts_as_files_and_a_sweep_of_temperatures(trlx, folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / 'rollouts').mkdir()
    from chatgpt_compat.trlx.config import default_ppo_config

    config = default_ppo_config().update(
        default_ppo_config(),
        small(folder, **{'train.rollout_logging_dir': 'rollouts', 'method.scale_reward': 'ref', 'method.ref_std': 2.0})
        | PPO
        | {'method.gen_kwargs.temperature': [0.5, 1.0], 'method.cliprange_reward': 3},
    )
    with pytest.warns(UserWarning, match='temperature=.* is a sweep of the evaluation'):
        found = trlx.train(reward_fn=lambda samples, **_: [100.0] * len(samples), prompts=['a', 'b'], config=config)
    assert set(found.evaluate()) == {'reward/mean@temperature=0.5', 'reward/mean@temperature=1.0'}
    assert found.evaluate()['reward/mean@temperature=0.5'] == 100.0  # evaluations neither clip nor scale
    assert {e.score for e in found.store} == {1.5}  # clipped to 3, divided by 2
    files = sorted(next((tmp_path / 'rollouts').iterdir()).glob('epoch-*.json'))
    rows = json.loads(files[-1].read_text())
    assert len(files) == 2 and len(rows) == 8
    assert rows[0]['response_tensor'] == found.store[0].response_ids.tolist()


def on_a_rank(folder: str, out: str) -> dict[str, Any]:
    """Runs PPO with a reward that only rank 0 has, as in ppo_hh.py of trlX."""
    import os

    from chatgpt_compat import trlx
    from chatgpt_compat.trlx.config import TRLConfig, default_ppo_config

    names = small(Path(folder), **{'train.checkpoint_dir': out, 'train.batch_size': 2, 'method.num_rollouts': 4})
    names |= {'method.chunk_size': 2, 'method.ppo_epochs': 1, 'method.gen_kwargs.max_new_tokens': 6}
    count = (lambda samples, **_: [s.count('a') for s in samples]) if os.environ.get('RANK', '0') == '0' else True
    config = TRLConfig.update(default_ppo_config(), names)
    found = trlx.train(reward_fn=count, prompts=['abc', 'de', 'fgh', 'ij'], config=config)
    return {
        'strategy': type(found.strategy).__name__,
        'batch': found.trainer.config.train_batch_size,
        'steps': found.iter_count,
        'main': found.accelerator.is_main_process,
        'weights': {n: float(p.double().sum()) for n, p in found.actor.named_parameters() if 'h.2.' in n},
    }


def test_two_processes(folder, tmp_path):
    first, second = run_distributed(on_a_rank, 2, str(folder), str(tmp_path / 'out'))
    assert (first['strategy'], first['batch'], first['steps'], first['main']) == ('DDPStrategy', 4, 4, True)
    assert first['weights'] == second['weights'] and not second['main']
    assert {'checkpoint_4', 'best_checkpoint', 'metrics.jsonl'} <= {p.name for p in (tmp_path / 'out').iterdir()}


@pytest.mark.parametrize('tracker', ['tensorboard', 'wandb'])
def test_trackers_log_trlx_s_names(trlx, folder, tmp_path, monkeypatch, tracker):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv('WANDB_MODE', 'offline')
    monkeypatch.setenv('WANDB_SILENT', 'true')
    from chatgpt_compat.trlx.config import TRLConfig, default_ppo_config

    seen: dict[str, float] = {}
    if tracker == 'tensorboard':
        module = pytest.importorskip('torch.utils.tensorboard', reason='tensorboard is not installed')
        monkeypatch.setattr(
            module.SummaryWriter, 'add_scalar', lambda self, name, value, step=None, **_: seen.update({name: value})
        )
    else:
        module = pytest.importorskip('wandb', reason='wandb is not installed')
        run = type(
            'Run', (), {'id': 'x', 'log': lambda self, row, step: seen.update(row), 'finish': lambda *a, **k: None}
        )
        monkeypatch.setattr(module, 'init', lambda **given: seen.update(project=given['project']) or run())
    config = TRLConfig.update(default_ppo_config(), small(folder) | PPO | {'train.tracker': tracker})
    trlx.train(reward_fn=lambda samples, **_: [1.0] * len(samples), prompts=['a', 'b'], config=config)
    assert {'reward/mean', 'losses/total_loss', 'policy/sqrt_kl', 'learning_rate_group_0'} <= set(seen)
    assert seen['reward/mean'] == 1.0
    assert seen.get('project', 'trlx') == 'trlx'


def test_a_truncated_dialogue_begins_with_a_prompt():
    tokenizer = char_tokenizer()
    tokenizer.truncation_side = 'left'
    cut = tokenize_dialogue(['abc', 'de'], tokenizer, max_length=3)
    vocabulary = tokenizer.get_vocab()
    assert [*cut.prompt_ids.tolist(), *cut.response_ids.tolist()] == [1, vocabulary['e'], 2]
    with pytest.raises(ValueError, match='an even number'):
        tokenize_dialogue(['a', 'b', 'c'], tokenizer)
    tokenizer.truncation_side = 'right'
    with pytest.raises(ValueError, match='no output within max_length=3'):
        tokenize_dialogue(['abc', 'de'], tokenizer, max_length=3)


def test_supported_settings_give_no_warning(run, folder):
    """A config with supported settings only gives no warning."""
    with warnings.catch_warnings():
        warnings.filterwarnings('error', message='trlx:')
        run('ppo_dense_sentiments', {'config': small(folder) | PPO})
