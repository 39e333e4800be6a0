"""Scripts for TRL 0.12 to 1.12, run unchanged with `trl` served by this library."""

from __future__ import annotations

import json
import runpy
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from chatgpt.launch import demo_world
from chatgpt.nn import GPTActor
from chatgpt_compat.modules import serving

pytest.importorskip('datasets', reason='the scripts load their data with the package datasets')

PROGRAMS = Path(__file__).parent / 'trl_recent'
PPO_KEYS = {
    'eps',
    'objective/kl',
    'objective/entropy',
    'objective/non_score_reward',
    'objective/rlhf_reward',
    'objective/scores',
    'policy/approxkl_avg',
    'policy/clipfrac_avg',
    'loss/policy_avg',
    'loss/value_avg',
    'val/clipfrac_avg',
    'policy/entropy_avg',
    'val/ratio',
    'val/ratio_var',
    'val/num_eos_tokens',
    'lr',
    'episode',
    'epoch',
    'step',
}
"""keys that TRL 1.12 logs for each update"""


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, 'HF_DATASETS_CACHE', tmp_path / 'datasets')
    datasets.disable_progress_bars()


@pytest.fixture(scope='module')
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the demo's untrained policy, with the same weights in every run."""
    folder = tmp_path_factory.mktemp('model')
    torch.manual_seed(0)
    GPTActor(config=demo_world.demo_config()).save_pretrained(folder, tokenizer=demo_world.demo_tokenizer())
    return folder


@pytest.fixture
def reward_folder(model_folder: Path, tmp_path: Path) -> Path:
    """The folder of a sequence classifier with one label on the policy's trunk."""
    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_pretrained(model_folder, num_labels=1)
    model.config.pad_token_id = AutoTokenizer.from_pretrained(model_folder).pad_token_id
    model.save_pretrained(tmp_path / 'reward')
    return tmp_path / 'reward'


def rows_in(folder: Path, **splits: list[dict[str, Any]]) -> Path:
    """Writes a folder for `load_dataset`."""
    folder.mkdir()
    for split, rows in splits.items():
        Path(folder, f'{split}.jsonl').write_text(''.join(json.dumps(row) + '\n' for row in rows))
    return folder


def run_program(monkeypatch: pytest.MonkeyPatch, name: str, *arguments: Any) -> dict[str, Any]:
    """Runs a program and returns its globals."""
    torch.manual_seed(0)
    monkeypatch.setattr(sys, 'argv', [name, *map(str, arguments)])
    with serving():
        return runpy.run_path(str(PROGRAMS / name), run_name='__main__')


def test_ppo_of_four_folders_with_end_token_and_penalty(monkeypatch, model_folder, reward_folder, tmp_path):
    data = rows_in(tmp_path / 'prompts', train=demo_world.demo_prompts(20))
    found = run_program(
        monkeypatch, 'ppo_reward_folder.py',
        '--dataset_name', data, '--output_dir', tmp_path / 'out', '--model_name_or_path', model_folder,
        '--sft_model_path', model_folder, '--reward_model_path', reward_folder, '--learning_rate', '1e-3',
        '--per_device_train_batch_size', '4', '--gradient_accumulation_steps', '2', '--total_episodes', '16',
        '--response_length', '6', '--missing_eos_penalty', '1.0', '--stop_token', 'eos', '--eval_strategy', 'steps',
        '--local_rollout_forward_batch_size', '64', '--num_sample_generations', '0', '--save_strategy', 'no',
    )  # fmt: skip
    trainer, history = found['trainer'], found['trainer'].state.log_history
    assert [set(line) for line in history] == [PPO_KEYS] * 2
    assert [line['episode'] for line in history] == [8, 16]
    assert [line['step'] for line in history] == [1, 2]
    assert abs(history[0]['objective/kl']) < 1e-5  # the policy is the reference
    for line in history:
        assert line['objective/rlhf_reward'] == pytest.approx(
            line['objective/non_score_reward'] + line['objective/scores']
        )
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / 'out')
    start = AutoModelForCausalLM.from_pretrained(model_folder)
    ids = torch.tensor([[4, 5, 6]])
    assert torch.allclose(saved(ids).logits, trainer.policy_model.eval()(ids).logits, atol=1e-6)
    assert (saved(ids).logits - start(ids).logits).abs().max() > 1e-3
    assert torch.allclose(trainer.ref_model(ids).logits, start(ids).logits, atol=1e-6)
    rows = found['completions']
    assert [set(row) for row in rows] == [{'query', 'model response', 'score'}] * 4
    assert trainer.model.policy is trainer.policy_model and trainer.accelerator.is_main_process


def test_a_stop_token_ends_responses_and_the_penalty_is_subtracted(monkeypatch, model_folder, tmp_path):
    found = run_program(monkeypatch, 'ppo_stop_token.py', model_folder, tmp_path / 'out')
    trainer, tokenizer = found['trainer'], found['tokenizer']
    stop, end = tokenizer.convert_tokens_to_ids('.'), tokenizer.eos_token_id
    experiences = trainer.inner.last_experiences
    assert len(found['seen']) == 16 and len(experiences) == 8
    for e in experiences:
        ids = e.response_ids.tolist()
        assert stop not in ids[:-1]  # nothing follows it
        assert len(ids) == 6 or ids[-1] == stop
        assert e.score == (0.25 if end in ids else -0.75)
    assert trainer.state.log_history[-1]['objective/scores'] == pytest.approx(
        sum(e.score for e in experiences) / len(experiences)
    )
    kl = sum(
        float((e.ref_logprobs - e.old_logprobs).exp().sub(1).sub(e.ref_logprobs - e.old_logprobs).sum())
        for e in experiences
    )
    assert trainer.state.log_history[-1]['objective/kl'] == pytest.approx(kl / 8, rel=1e-4)
    assert trainer.state.log_history[-1]['objective/kl'] > 0


def test_a_value_model_of_its_own_and_a_callback(monkeypatch, model_folder, reward_folder, tmp_path):
    found = run_program(monkeypatch, 'ppo_value_model.py', model_folder, reward_folder, tmp_path / 'out')
    trainer = found['trainer']
    assert trainer.args.batch_size == 8 and trainer.args.mini_batch_size == 4 and trainer.args.num_total_batches == 4
    assert trainer.state.global_step == 2  # the callback ended a run of four
    assert found['watch'].logged == [line['objective/scores'] for line in trainer.state.log_history]
    assert trainer.value_model is found['value_model']
    assert (found['value_model'].score.weight - found['head_before']).abs().max() > 0
    lines = [json.loads(line) for line in (tmp_path / 'out' / 'metrics.jsonl').read_text().splitlines()]
    assert [line['objective/kl'] for line in lines] == [line['objective/kl'] for line in trainer.state.log_history]
    assert lines[0]['ppo/num_updates'] == 4  # two mini-batches, two epochs


def test_adapters_are_trained_and_saved_as_peft_reads_them(monkeypatch, model_folder, reward_folder, tmp_path):
    found = run_program(monkeypatch, 'ppo_peft.py', model_folder, reward_folder, tmp_path / 'out')
    trainer = found['trainer']
    assert trainer.is_peft_model and trainer.ref_model is None
    assert (tmp_path / 'out' / 'adapter_model.safetensors').is_file()
    ids = torch.tensor([[4, 5, 6]])
    reloaded, trained = found['reloaded'].eval()(ids).logits, trainer.policy_model.eval()(ids).logits
    assert torch.allclose(reloaded, trained, atol=1e-5)
    base = AutoModelForCausalLM.from_pretrained(model_folder)(ids).logits
    assert (reloaded - base).abs().max() > 1e-3


def test_completions_follow_the_reward(monkeypatch, model_folder, reward_folder, tmp_path):
    found = run_program(monkeypatch, 'generate_completions.py', model_folder, reward_folder, tmp_path / 'out')
    before, after = found['before'], found['after']
    assert len(before) == len(after) == 3 and len(found['few']) == 2
    for row in after:
        words = f'{row["query"]} {row["model response"]}'.split()
        assert row['score'] == pytest.approx(words.count('fox') / len(words), rel=1e-5)
    history = found['trainer'].state.log_history
    assert history[-1]['objective/scores'] > history[0]['objective/scores']


def test_names_of_both_eras_in_one_config(monkeypatch, model_folder, reward_folder, tmp_path):
    with pytest.warns(UserWarning, match='target_kl=0.2'):
        found = run_program(monkeypatch, 'ppo_mixed_names.py', model_folder, reward_folder, tmp_path / 'out')
    config = found['trainer'].inner.config
    assert (config.experience_batch_size, config.train_batch_size, config.max_epochs) == (8, 4, 3)
    assert (config.kl_coef, config.eps_clip, config.kl_target) == (0.3, 0.1, None)
    assert found['trainer'].optimizer.param_groups[0]['lr'] <= 2e-4
    assert found['trainer'].state.log_history[0]['lr'] == pytest.approx(2e-4 * (6 + 5 + 4 + 3 + 2 + 1) / 6 / 6)


@pytest.mark.parametrize('adapters', [False, True])
def test_dpo_prefers_what_was_chosen(monkeypatch, model_folder, tmp_path, adapters):
    rows = [
        {'prompt': [{'role': 'user', 'content': r['prompt']}]}
        | {side: [{'role': 'assistant', 'content': r[side]}] for side in ('chosen', 'rejected')}
        for r in demo_world.demo_preferences(24)
    ]
    data = rows_in(tmp_path / 'pairs', train=rows[:16], test=rows[16:])
    settings = tmp_path / 'dpo.yaml'
    settings.write_text('learning_rate: 3.0e-3\nbeta: 0.3\nper_device_train_batch_size: 4\nlogging_steps: 2\n')
    found = run_program(
        monkeypatch, 'dpo.py', '--config', settings,
        '--dataset_name', data, '--model_name_or_path', model_folder, '--output_dir', tmp_path / 'out',
        '--num_train_epochs', '3', '--eval_strategy', 'steps', '--eval_steps', '6', '--save_strategy', 'no',
        *(('--use_peft', '--lora_r', '4', '--lora_dropout', '0.0') if adapters else ()),
    )  # fmt: skip
    trainer, result = found['trainer'], found['result']
    logs = [line for line in trainer.state.log_history if 'loss' in line]
    assert [line['step'] for line in logs] == [2, 4, 6, 8, 10, 12]
    assert set(logs[0]) == {
        'loss', 'rewards/chosen', 'rewards/rejected', 'rewards/accuracies', 'rewards/margins', 'logps/chosen',
        'logps/rejected', 'grad_norm', 'learning_rate', 'epoch', 'step',
    }  # fmt: skip
    assert logs[-1]['loss'] < 0.69 and logs[-1]['rewards/margins'] > 0
    assert result.global_step == 12 and result.training_loss == pytest.approx(sum(x['loss'] for x in logs) / 6)
    assert [line['step'] for line in trainer.state.log_history if 'eval_loss' in line] == [6, 12, 12]
    saved = json.loads((tmp_path / 'out' / 'eval_results.json').read_text())
    assert saved['eval_loss'] == found['metrics']['eval_loss']
    assert (tmp_path / 'out' / 'adapter_config.json').is_file() == adapters


def test_sft_four_ways(monkeypatch, model_folder, tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter('error', UserWarning)
        found = run_program(monkeypatch, 'sft.py', model_folder, tmp_path / 'out')
    for name in ('packed', 'completions', 'chat', 'written'):
        losses = [line['loss'] for line in found[name].state.log_history if 'loss' in line]
        assert len(losses) == 3 and losses[-1] < losses[0], name
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    (record, *_) = found['completions'].inner.train_data
    assert tokenizer.decode(record.response_ids[record.response_mask], skip_special_tokens=True).split() == (
        'went to the hill .'.split()
    )
    assert all(len(r.prompt_ids) + len(r.response_ids) <= 16 for r in found['packed'].inner.train_data)
    (dialogue, *_) = found['chat'].inner.train_data
    assert bool(dialogue.response_mask.all())  # every token counts without assistant_only_loss
    evaluated = [line for line in found['chat'].state.log_history if 'eval_same_loss' in line]
    assert [line['step'] for line in evaluated] == [2]
    (text, *_) = found['written'].inner.train_data
    assert tokenizer.decode(text.response_ids, skip_special_tokens=True).split()[-5:] == 'went to the hill .'.split()


def test_a_reward_model_learns_and_transformers_reads_it(monkeypatch, model_folder, tmp_path):
    rows = demo_world.demo_preferences(40)
    data = rows_in(tmp_path / 'pairs', train=rows[:32], test=rows[32:])
    found = run_program(monkeypatch, 'reward_modeling.py', model_folder, data, tmp_path / 'out')
    for name in ('full', 'adapted'):
        trainer = found[name]
        evaluated = [line for line in trainer.state.log_history if 'eval_accuracy' in line]
        assert [line['step'] for line in evaluated] == [4, 8, 12, 16, 16]
        losses = [line['loss'] for line in trainer.state.log_history if 'loss' in line]
        assert len(losses) == 8 and sum(losses[-3:]) < 0.95 * sum(losses[:3])
        model = AutoModelForSequenceClassification.from_pretrained(tmp_path / 'out' / name).eval()
        pair = trainer.inner.objective.records(trainer.records(rows[32:33]))[0]
        scores = [model(torch.cat([s.prompt_ids, s.response_ids])[None]).logits.item() for s in pair.sequences()]
        expected = trainer.inner.evaluate([pair])
        assert scores[0] - scores[1] == pytest.approx(expected['margin'], abs=1e-5)
