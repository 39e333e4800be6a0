"""Plans of real runs: `--plan` of the scripts, a shared trunk by hand, and the advice of an out-of-memory error."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig

from chatgpt.launch import planning
from chatgpt.nn import RewardModel, load_config
from chatgpt.plan import Setup, make_plan, models
from chatgpt.plan.advice import changes, cheapest_change
from chatgpt.plan.setup import PROCESS_BYTES
from chatgpt.testing import byte_tokenizer, tiny_causal_lm, tiny_config

EXAMPLES = Path(__file__).resolve().parents[2] / 'examples'


@pytest.fixture
def no_weights(tmp_path):
    """Returns a model folder with a config and a tokenizer but no weights, so that loading weights fails."""
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


def test_examples_count_as_long_as_the_longest_of_the_data(tmp_path, no_weights):
    from chatgpt.launch.inputs import read_inputs
    from chatgpt.launch.runs import RewardRun, SFTRun

    (tmp_path / 'data.jsonl').write_text(''.join(f'{{"prompt": "aa", "completion": "{"b" * n}"}}\n' for n in (1, 9, 3)))
    (tmp_path / 'pairs.jsonl').write_text('{"prompt": "aaa", "chosen": "b", "rejected": "cccc"}\n' * 2)
    for cls, name in ((SFTRun, 'data'), (RewardRun, 'pairs')):
        run = cls(dataset=str(tmp_path / f'{name}.jsonl'), pretrain=str(no_weights), save_path=str(tmp_path / 'run'))
        run.fill_defaults()
        inputs = read_inputs(run)
        records = [record.sequences() if name == 'pairs' else [record] for record in inputs.train]
        sequences = [sequence for record in records for sequence in record]
        setup = planning.setup_of(inputs)
        assert setup.max_new_tokens == max(len(s.response_ids) for s in sequences) < 16
        total = setup.max_prompt_tokens + setup.max_new_tokens
        assert total == max(len(s.prompt_ids) + len(s.response_ids) for s in sequences)

    # what both answers begin with counts as the prompt
    pair = '{"prompt": "aaa", "chosen": "ddddddb", "rejected": "ddddddcccc"}\n'
    (tmp_path / 'pairs.jsonl').write_text(pair * 2)
    again = planning.setup_of(read_inputs(run))
    assert again.max_new_tokens == setup.max_new_tokens and again.max_prompt_tokens == setup.max_prompt_tokens + 6


def test_of_packed_texts_nothing_is_cut(tmp_path, no_weights):
    from chatgpt.launch.inputs import read_inputs
    from chatgpt.launch.runs import SFTRun

    (tmp_path / 'texts.jsonl').write_text(f'{{"text": "{"a" * 100}"}}\n{{"text": "{"b" * 7}"}}\n')
    (tmp_path / 'eval.jsonl').write_text(f'{{"text": "{"c" * 100}"}}\n')
    files = {'dataset': str(tmp_path / 'texts.jsonl'), 'validation_file': str(tmp_path / 'eval.jsonl')}
    run = SFTRun(pretrain=str(no_weights), max_len=16, pack_examples=True, **files)
    run.fill_defaults()
    inputs = read_inputs(run)
    assert sum(int(s.response_mask.sum()) for s in inputs.train) >= 100 + 1 + 7
    assert all(s.num_tokens <= 16 for s in [*inputs.train, *inputs.validation])


def test_answers_of_a_record_count_and_common_tokens_are_found(tmp_path, no_weights):
    from chatgpt.launch.inputs import read_inputs
    from chatgpt.launch.runs import RewardRun

    rows = (f'{{"prompt": "aaa", "responses": {json.dumps(["b" * i for i in range(1, n)])}}}\n' for n in (3, 6))
    (tmp_path / 'ranked.jsonl').write_text(''.join(rows))
    run = RewardRun(pretrain=str(no_weights), dataset=str(tmp_path / 'ranked.jsonl'), train_batch_size=2)
    setup = planning.setup_of(read_inputs(run))
    assert setup.sequences_per_record == 5 and setup.shared_prompt_tokens == 4
    assert setup.max_prompt_tokens + setup.max_new_tokens == 3 + 5 + 1
    pair = replace(setup, sequences_per_record=0)
    assert (setup.record_size, pair.record_size) == (5, 2)
    assert (
        make_plan(setup).phases['learn'].device['activations'] > make_plan(pair).phases['learn'].device['activations']
    )
    tensors = [torch.tensor(ids) for ids in ([1, 2, 3, 4], [1, 2, 5], [1, 2, 3])]
    assert [planning.shared_tokens(tensors[:n]) for n in range(4)] == [0, 4, 2, 2]
    assert planning.shared_tokens([*tensors, torch.tensor([], dtype=torch.int64)]) == 0


def test_a_run_that_does_not_fit_gets_advice(monkeypatch, capsys, tmp_path, no_weights):
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
    for phase in ('load', 'learn'):  # without a GPU the process itself counts too
        assert more.phases[phase].device['process'] == PROCESS_BYTES
    assert more.host_peak + more.peak > PROCESS_BYTES
    on_a_gpu = make_plan(Setup(config=config, train_batch_size=4, **sizes | {'on_cuda': True}))
    assert 'process' not in on_a_gpu.phases['learn'].device


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


WIDTH, INNER, LAYERS, VOCAB, ROWS, PROMPT, NEW, RANK = 64, 256, 2, 512, 4, 32, 32, 8
SIZES = {'hidden_size': WIDTH, 'intermediate_size': INNER, 'num_hidden_layers': LAYERS, 'vocab_size': VOCAB}
CONFIG = LlamaConfig(num_attention_heads=4, num_key_value_heads=4, tie_word_embeddings=True, **SIZES)
COMMON: dict[str, Any] = {'config': CONFIG, 'reward_config': CONFIG, 'lora_rank': RANK, 'max_new_tokens': NEW}
COMMON |= {'max_prompt_tokens': PROMPT, 'experience_batch_size': ROWS, 'train_batch_size': ROWS}
COMMON['max_tokens_per_batch'] = PROMPT + NEW
SHARED = COMMON | {'shared_trunk': True, 'quantize': 'nf4'}
PER_BLOCK = 4 * WIDTH * WIDTH + 3 * WIDTH * INNER
ADAPTERS = LAYERS * RANK * (4 * 2 * WIDTH + 3 * (WIDTH + INNER))


def test_what_is_held_is_counted_by_hand(monkeypatch):
    monkeypatch.setattr(models, 'LEAST_PACKED', VOCAB * WIDTH)
    plan = make_plan(Setup(**SHARED, on_cuda=False))
    load, collect, learn = (plan.phases[name].device for name in ('load', 'collect', 'learn'))
    outside = VOCAB * WIDTH + (2 * LAYERS + 1) * WIDTH  # tied embedding, norms
    packed = LAYERS * PER_BLOCK
    assert load['trunk'] == pytest.approx(4 * outside + packed / 2 + packed / 64 + 4 * packed / (64 * 256), abs=2)
    for role, head in (('actor', 0), ('critic', WIDTH + 1), ('reward model', WIDTH + 1)):
        assert load[f'{role} weights'] == 4 * (ADAPTERS + head)
    # the largest block is read while its largest weight is quantized; the roles are made later
    on_roles, block = 3 * 4 * ADAPTERS + 2 * 4 * (WIDTH + 1), PER_BLOCK + 2 * WIDTH
    assert load['one dense block'] == max(4 * block + 9.5 * WIDTH * INNER - on_roles, 0) > 0
    alone = SHARED | {'lora_rank': 1, 'critic': 'none', 'reward_config': None}
    on_cuda = make_plan(Setup(**alone, on_cuda=True)).phases['load'].device
    assert on_cuda['one dense weight'] == (4 + 2) * WIDTH * INNER - 4 * ADAPTERS / RANK > 0  # one weight at a time
    assert 'one dense block' not in collect and 'one dense block' not in on_cuda
    assert collect['one dense weight'] == 4 * WIDTH * INNER * (1 + 2 / 64)  # and its scales, twice
    assert collect['packed weights'] == 4 * VOCAB * WIDTH  # only the output head: adapters are not merged
    assert collect['key/value cache'] == 4 * 2 * LAYERS * WIDTH * ROWS * (PROMPT + NEW - 1)
    assert learn['actor gradients'] == 4 * ADAPTERS and 'initial model' not in ''.join(learn)


def test_parts_of_a_trunk_are_gathered_to_generate():
    options = {'strategy': 'ddp', 'num_processes': 4, 'on_cuda': True}
    whole, parts = (
        make_plan(Setup(**SHARED, **options, strategy_options={'shard_trunk': sharded})).phases
        for sharded in (False, True)
    )
    elsewhere = LAYERS * PER_BLOCK / 2 * 3 / 4
    for phase in ('collect', 'score', 'learn'):
        assert whole[phase].device['trunk'] - parts[phase].device['trunk'] == elsewhere
        dense = [plan[phase].device['one dense weight'] for plan in (whole, parts)]
        assert dense[1] - dense[0] == WIDTH * INNER / 2
    assert parts['collect'].device['gathered trunk'] == elsewhere
    assert parts['load'].device['trunk'] == whole['load'].device['trunk']


def test_advice_for_a_shared_trunk_stays_on_it():
    setup = Setup(
        **COMMON | {'max_tokens_per_batch': None}, shared_trunk=True, on_cuda=True, precision='bf16', margin=0.0
    )
    listed = dict(changes(setup))
    assert all(changed.shared_trunk and changed.strategy == 'naive' for changed in listed.values())
    assert any('quantize=nf4' in text for text in listed) and any('adamw8bit' in text for text in listed)
    assert not any('offload' in text or 'critic' in text or 'strategy' in text for text in listed)
    small = next(changed for text, changed in listed.items() if text.endswith('quantize=nf4'))
    found = cheapest_change(replace(setup, memory=make_plan(small).peak))
    assert found is not None and found[0].endswith('quantize=nf4') and found[1].fits


def test_a_critic_that_starts_from_the_reward_model_is_planned_as_large(tmp_path, no_weights):
    from chatgpt.launch.inputs import read_inputs
    from chatgpt.launch.planning import setup_of
    from chatgpt.launch.runs import PPORun

    (tmp_path / 'prompts.jsonl').write_text('{"prompt": "aa"}\n' * 4)
    large = load_config(no_weights)
    large.n_embd, large.n_layer = 64, 3
    large.architectures = ['GPT2ForSequenceClassification']
    large.num_labels = 1
    large.save_pretrained(tmp_path / 'rm')
    found = {}
    for start in ('reward_model', 'actor'):
        run = PPORun(
            prompt_path=str(tmp_path / 'prompts.jsonl'),
            pretrain=str(no_weights),
            reward_model=str(tmp_path / 'rm'),
            critic_from=start,
            save_path=str(tmp_path / 'run'),
        )
        run.fill_defaults()
        found[start] = make_plan(setup_of(read_inputs(run))).phases['learn'].device['critic weights']
    assert found['reward_model'] > 3 * found['actor']
