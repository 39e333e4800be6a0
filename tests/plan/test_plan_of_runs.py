"""Plans of real runs: `--plan` of the scripts, and the advice at the end of an out-of-memory error."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from chatgpt.launch import planning
from chatgpt.nn import RewardModel
from chatgpt.plan import Setup, make_plan, models
from chatgpt.plan.setup import PROCESS_BYTES
from chatgpt.testing import byte_tokenizer, tiny_causal_lm, tiny_config

EXAMPLES = Path(__file__).resolve().parents[2] / 'examples'


@pytest.fixture
def no_weights(tmp_path):
    """A model folder with a config and a tokenizer, and no weights: whoever loads some fails."""
    folder = tmp_path / 'model'
    tokenizer = byte_tokenizer()
    config = tiny_config('gpt2')
    config.vocab_size = len(tokenizer)
    config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def run_script(monkeypatch, capsys, name: str, *flags: str) -> tuple[int, str]:
    import runpy

    monkeypatch.setattr(sys, 'argv', [name, *flags])
    with pytest.raises(SystemExit) as stop:
        runpy.run_path(str(EXAMPLES / name), run_name='__main__')
    out = capsys.readouterr()
    return int(stop.value.code or 0), out.out + out.err


def test_a_script_plans_one_model(monkeypatch, capsys, tmp_path, no_weights):
    (tmp_path / 'data.jsonl').write_text('{"prompt": "a", "chosen": "b", "rejected": "c"}\n' * 4)
    flags = f'{tmp_path}/data.jsonl --pretrain {no_weights} --plan --save_path {tmp_path}/run'.split()
    code, out = run_script(monkeypatch, capsys, 'train_reward_model.py', *flags)
    assert code == 0, out
    assert 'reward model weights' in out and 'reward model optimizer' in out and 'collect' not in out


def test_a_run_that_does_not_fit_is_told_what_would(monkeypatch, capsys, tmp_path, no_weights):
    small = planning.this_machine() | {'on_cuda': True, 'memory': 600 * 2**10}
    monkeypatch.setattr(planning, 'this_machine', lambda: small)
    (tmp_path / 'data.jsonl').write_text('{"prompt": "a", "completion": "b"}\n' * 40)
    flags = [str(tmp_path / 'data.jsonl'), '--pretrain', str(no_weights), '--plan', '--train_batch_size', '32']
    code, out = run_script(monkeypatch, capsys, 'train_sft.py', *flags)
    assert code == 1, out
    assert 'it does not fit, device memory is too small' in out
    assert 'fits with' in out or 'no single change' in out


def test_weights_and_optimizer_of_one_model_are_counted_by_hand():
    config = tiny_config('gpt2')
    sizes = {'task': 'sft', 'on_cuda': False, 'max_prompt_tokens': 1, 'max_new_tokens': 7}
    plan = make_plan(Setup(config=config, train_batch_size=2, process=0, **sizes))
    number = sum(p.numel() for p in tiny_causal_lm('gpt2').parameters())
    assert list(plan.phases) == ['load', 'learn']
    assert plan.phases['load'].device == {'actor weights': 4 * number}
    learn = plan.phases['learn'].device
    parts = ('actor weights', 'actor optimizer', 'actor gradients')
    assert [learn[part] for part in parts] == [4 * number, 8 * number, 4 * number]
    more = make_plan(Setup(config=config, train_batch_size=4, **sizes))
    assert more.phases['learn'].device['activations'] > 1.5 * learn['activations'] > 0
    for phase in ('load', 'learn'):  # the process itself counts where devices are host memory
        assert more.phases[phase].device['process'] == PROCESS_BYTES
    assert more.host_peak + more.peak > PROCESS_BYTES
    on_a_gpu = make_plan(Setup(config=config, train_batch_size=4, **sizes | {'on_cuda': True}))
    assert 'process' not in on_a_gpu.phases['learn'].device


@pytest.mark.parametrize(('optimizer', 'least'), [('adamw', 2), ('sgd', 0)])
def test_a_step_on_a_cpu_makes_two_copies_of_the_largest_weight(optimizer, least):
    config = tiny_config('gpt2')
    setup = Setup(config=config, on_cuda=False, optimizer=optimizer)
    size = models.measure(models.build('actor', config, setup))
    largest = max(p.numel() for p in tiny_causal_lm('gpt2').parameters())
    assert setup.memory_model.step(size, setup) == least * 4 * largest


def test_idle_models_are_on_the_device_one_at_a_time_by_hand():
    config, reward = tiny_config('gpt2'), tiny_config('llama')
    plans = {
        o: make_plan(Setup(config=config, precision='fp32', reward_config=reward, offload=o)) for o in ('none', 'idle')
    }
    initial = 4 * sum(p.numel() for p in tiny_causal_lm('gpt2').parameters())
    scorer = 4 * sum(p.numel() for p in RewardModel(tiny_causal_lm('llama')).parameters())
    saved = {
        phase: sum(plans['none'].phases[phase].device.values()) - sum(plans['idle'].phases[phase].device.values())
        for phase in ('load', 'collect', 'score', 'learn')
    }
    assert saved == {'load': 0, 'collect': initial + scorer, 'score': min(initial, scorer), 'learn': initial + scorer}
    assert plans['idle'].phases['learn'].host['initial model weights'] == initial


@pytest.mark.parametrize(
    'error',
    [
        torch.OutOfMemoryError('CUDA out of memory'),
        RuntimeError("DefaultCPUAllocator: can't allocate memory"),
        MemoryError(),
        RuntimeError('something else'),
    ],
)
def test_running_out_of_memory_ends_with_the_advice(error, monkeypatch):
    setup = Setup(config=tiny_config('gpt2'), precision='fp32', strategy='naive')
    monkeypatch.setattr(planning, 'setup_of', lambda inputs: setup)
    inputs: Any = None
    with pytest.raises(type(error)) as raised, planning.memory_advice(inputs):
        raise error
    notes = getattr(raised.value, '__notes__', [])
    assert all(note.startswith('naive on 1 process needs') and 'To go on: ' in note for note in notes)
    assert len(notes) == ('something else' not in str(error))


def test_advice_never_hides_the_error(monkeypatch):
    def broken(inputs):
        raise KeyError('nothing known')

    monkeypatch.setattr(planning, 'setup_of', broken)
    inputs: Any = None
    with pytest.raises(MemoryError) as raised, planning.memory_advice(inputs):
        raise MemoryError('full')
    assert raised.value.__notes__ == [
        'python -m chatgpt.plan tells what a run needs and the cheapest change that makes it fit'
    ]
    assert not planning.is_out_of_memory(ValueError('full'))
