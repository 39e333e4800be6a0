"""Programs in the style of TRL 0.4 to 0.11, run unchanged with `trl` served by this library."""

from __future__ import annotations

import math
import runpy
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from trl_page import KEYS

from chatgpt.nn import Actor
from chatgpt.testing.fakes import char_tokenizer, tiny_causal_lm, tiny_config
from chatgpt_compat.modules import serving

PROGRAMS = Path(__file__).parent / 'trl_classic'
TOLD = {name for name, text in KEYS.items() if not text.startswith('left out')}


@pytest.fixture(scope='module')
def policy(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp('trl') / 'policy'
    tiny_causal_lm('gpt2', layers=2).save_pretrained(folder)
    char_tokenizer().save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope='module')
def classifier(tmp_path_factory: pytest.TempPathFactory) -> str:
    from transformers import AutoModelForSequenceClassification

    folder = tmp_path_factory.mktemp('trl') / 'classifier'
    config = tiny_config('gpt2')
    config.num_labels = 2
    with torch.random.fork_rng():
        torch.manual_seed(1)
        AutoModelForSequenceClassification.from_config(config).save_pretrained(folder)
    char_tokenizer().save_pretrained(folder)
    return str(folder)


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Returns a function that runs a program with arguments and returns its globals."""

    def program(name: str, *arguments: str) -> dict[str, Any]:
        monkeypatch.setattr(sys, 'argv', [name, *arguments])
        with warnings.catch_warnings(record=True) as caught, serving():
            warnings.simplefilter('always')
            found = runpy.run_path(str(PROGRAMS / f'{name}.py'))
        return found | {'warned': [str(w.message) for w in caught]}

    return program


def check(stats: dict[str, Any]) -> None:
    assert set(stats) == TOLD
    assert all(np.isfinite(value).all() for value in stats.values())


def test_sentiment(run: Any, policy: str, classifier: str) -> None:
    found = run('sentiment', '--model_name', policy, '--classifier', classifier)
    assert len(found['all_stats']) == 2  # 16 rows, batches of 8
    for stats in found['all_stats']:
        check(stats)
    assert found['all_stats'][0]['objective/kl'] == 0.0
    assert found['all_stats'][1]['objective/kl'] != 0.0
    assert all(asked == got for asked, got in found['lengths'])  # eos_token_id=-1: none ends early
    assert len({asked for asked, _ in found['lengths']}) > 1
    # the statistics of the last step, from the script's own variables
    last, rewards = found['all_stats'][-1], torch.stack(found['rewards'])
    assert last['ppo/mean_scores'] == pytest.approx(float(rewards.mean()), rel=1e-5)
    assert last['ppo/std_scores'] == pytest.approx(float(rewards.std()), rel=1e-5)
    lengths = [len(q) for q in found['query_tensors']]
    assert last['tokens/queries_dist'].tolist() == lengths
    assert last['tokens/queries_len_mean'] == pytest.approx(sum(lengths) / 8)


def test_lora(run: Any, policy: str, tmp_path: Path) -> None:
    found = run('lora', policy, f'{tmp_path}/')
    model = found['model']
    assert model.is_peft_model and found['ppo_trainer'].ref_model is None
    assert any('load_in_8bit' in text for text in found['warned'])
    assert any('device_map' in text for text in found['warned'])
    assert any('optimize_device_cache' in text or 'optimize_cuda_cache' in text for text in found['warned'])
    # r (in + out) of c_attn (32 -> 96), which peft adapts in GPT-2 by default, in two blocks; and the head
    assert found['num_trained'] == 2 * 4 * (32 + 96) + 33
    assert torch.equal(found['base_weight'], model.pretrained_model.transformer.h[0].attn.c_attn.weight)
    for stats in found['all_stats']:
        check(stats)
    assert found['all_stats'][0]['objective/kl'] == 0.0 and found['all_stats'][1]['objective/kl'] != 0.0
    limits = found['stats']['tokens/responses_dist'].reshape(2, 4)  # one length per four queries
    assert (limits == limits[:, :1]).all() and limits.min() >= 3 and limits.max() < 9
    # the folder holds adapter and head
    from chatgpt_compat.trl import AutoModelForCausalLMWithValueHead

    again = AutoModelForCausalLMWithValueHead.from_pretrained(str(tmp_path / 'step_1'))
    ids = found['question_tensors'][0][None]
    with torch.no_grad():
        mine, read = model.eval()(ids), again.eval()(ids)
    torch.testing.assert_close(read[0], mine[0])
    torch.testing.assert_close(read[2], mine[2])


def test_rule_reward_is_learned(run: Any, policy: str) -> None:
    found = run('rule_reward', policy)
    rewards = found['mean_rewards']
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.5
    check(found['stats'])


def test_reward_model(run: Any, policy: str, classifier: str) -> None:
    found = run(
        'reward_model',
        *('--model_name', policy, '--reward_model', f'sentiment-analysis:{classifier}', '--batch_size', '4'),
        *('--mini_batch_size', '2', '--ppo_epochs', '2', '--learning_rate', '1e-3'),
    )
    assert found['columns'] == [['input_ids', 'query']] * 4  # no model takes the column 'extra'
    check(found['stats'])
    assert found['stats']['ppo/learning_rate'] == 1e-3
    assert found['response_tensors'][0].dim() == 1
    with pytest.raises(ValueError, match='encoder-decoder'):
        run('reward_model', '--model_name', policy, '--use_seq2seq', 'True')


def test_response_masks(run: Any, policy: str) -> None:
    found = run('response_masks', policy)
    stats, tool = found['stats'], found['tool']
    check(stats)
    assert stats['ppo/policy/advantages'].shape == stats['ppo/policy/ratio'].shape == (4 * 10,)  # 5 + 5 of the model
    assert stats['tokens/responses_dist'].tolist() == [10.0 + len(tool)] * 4
    rewards = [e.rewards for e in found['ppo_trainer'].inner.last_experiences]
    for i, reward in enumerate(rewards):  # KL is 0 in the first step
        assert reward.tolist() == [0.0] * (len(reward) - 1) + [float(i)]


def test_shared_layers(run: Any, policy: str) -> None:
    found = run('shared_layers', policy)
    model, ref = found['model'], found['ref_model']
    assert (
        model.pretrained_model.dtype == torch.float32
        and found['ppo_trainer'].inner.strategy.numerics.dtype == torch.bfloat16
    )
    shared = {name for name, p in model.named_parameters() if p is ref.get_parameter(name)}
    assert shared and all('.h.1.' not in name for name in shared)
    assert any('.h.0.' in name for name in shared) and any('wte' in name for name in shared)
    assert found['moved'].isdisjoint(shared) and any('.h.1.' in name for name in found['moved'])
    assert [s['ppo/learning_rate'] for s in found['all_stats']] == pytest.approx([1e-3, 5e-4, 2.5e-4])
    assert found['all_stats'][0]['objective/kl'] == pytest.approx(0.0, abs=1e-3)


def test_early_stopping_and_ratio_threshold(run: Any, policy: str) -> None:
    found = run('early_stopping', policy)
    assert found['near'] < found['far']
    assert found['kept'] < found['far']
    # 6 epochs of 4 mini-batches without early stopping
    assert len(found['free']['ppo/policy/ratio']) == 6 * 8 * 6
    assert len(found['stopped']['ppo/policy/ratio']) < 6 * 8 * 6


def test_resume(run: Any, policy: str, tmp_path: Path) -> None:
    found = run('resume', policy, str(tmp_path / 'saved'))
    assert all(found['same'].values()) and {'v_head.summary.bias', 'lm_head.weight'} <= set(found['same'])
    actor = Actor.from_pretrained(tmp_path / 'saved')
    assert torch.equal(actor.value_head.weight, found['first'].model.v_head.summary.weight)  # type: ignore[union-attr]
    head = found['second'].model.v_head.summary.weight
    assert not torch.equal(head, found['first'].model.v_head.summary.weight)


def test_dataloader(run: Any, policy: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip('tensorboard')
    found = run('dataloader', policy, str(tmp_path))
    assert len(found['all_stats']) == math.ceil(24 / 4)
    for stats in found['all_stats']:
        check(stats)
        assert abs(stats['ppo/mean_scores']) <= 2.0
    first = found['seen'][:8]
    assert len(set(first)) == 8  # without replacement in a pass; its last two rows are dropped
    assert found['gathered'].shape == (4,)
    assert len(capsys.readouterr().out.split()) >= 12
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / 'dataloader'))
    events.Reload()
    logged = [e.value for e in events.Scalars('objective/kl')]
    assert logged == pytest.approx([s['objective/kl'] for s in found['all_stats']], abs=1e-6)
    assert {'env/reward_mean', 'ppo/loss/total'} <= set(events.Tags()['scalars'])


def test_first_steps(run: Any, policy: str) -> None:
    found = run('first_steps', policy)
    check(found['train_stats'])
    assert found['response_tensor'].shape == (1, 20)
    assert not torch.equal(found['before'], found['model'].v_head.summary.weight)
    assert found['train_stats']['ppo/mean_scores'] == 1.0 and found['train_stats']['ppo/std_scores'] == 0.0


def test_mixed_eras(run: Any, policy: str) -> None:
    found = run('mixed_eras', policy)
    config, ours = found['training_args'], found['trainer'].inner.config
    assert config.batch_size == 4 and config.mini_batch_size == 2 and config.ppo_epochs == 2
    assert (ours.kl_coef, ours.kl_target, ours.kl_kind, ours.eps_clip) == (0.1, None, 'abs', 0.1)
    assert ours.train_batch_size == 4 and ours.max_epochs == 2
    assert any('missing_eos_penalty' in text for text in found['warned'])
    assert found['trainer'].inner.strategy.numerics.dtype == torch.bfloat16
    check(found['stats'])
