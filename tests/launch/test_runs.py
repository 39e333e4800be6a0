"""Runs of a command: NLPO's mask model, eval data equal to the training data, a written adapter, and ranks that fail or
hang while loading."""

from __future__ import annotations

import json
import os
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from scripts_on_ranks import run_source
from transformers import AutoModelForCausalLM

from chatgpt.launch import recipes
from chatgpt.launch.config_file import parse_run
from chatgpt.launch.inputs import Inputs, read_inputs
from chatgpt.launch.methods import METHODS
from chatgpt.launch.recipes import finish as save
from chatgpt.launch.recipes import make_trainer
from chatgpt.launch.runs import PPORun, Run, SFTRun, run_class
from chatgpt.nn import GPTActor
from chatgpt.nn.lora import lora_layers
from chatgpt.nn.peft_format import import_peft
from chatgpt.strategies.checkpoint import CheckpointReader, latest
from chatgpt.strategies.registry import strategy_by_name
from chatgpt.testing.fakes import char_tokenizer, tiny_config
from chatgpt.testing.processes import run_distributed
from chatgpt.trainer.config import PPOConfig
from chatgpt.types import Sequence


def test_a_run_of_three_phases(tmp_path, model_folder, monkeypatch):
    """The mask model is a copy of the initial actor, and is updated to the actor every second phase."""
    trainers = []
    built = recipes.make_trainer
    monkeypatch.setattr(recipes, 'make_trainer', lambda *given: trainers.append(built(*given)) or trainers[-1])
    settings = {'nlpo_top_p': 0.9, 'nlpo_update_interval': 2, 'experience_batch_size': 4, 'train_batch_size': 4}
    settings |= {'max_new_tokens': 4, 'lr': 1e-3}
    (tmp_path / 'prompts.jsonl').write_text('{"prompt": "one day"}\n{"prompt": "a fox"}\n' * 4)
    (tmp_path / 'reward.py').write_text('def length(prompts, responses):\n    return [*map(len, responses)]\n')
    words = [f'--{name}={value}' for name, value in settings.items()]
    places = [f'--pretrain={model_folder}', f'--reward_fn={tmp_path}/reward.py:length', f'--save_path={tmp_path}/a']
    length = ['--num_episodes=1', '--max_timesteps=3', '--update_timesteps=1']
    argv = [str(tmp_path / 'prompts.jsonl'), *places, *words, *length]
    recipes.execute(parse_run(PPORun, description='', positional='prompt_path', argv=argv))
    trainer = trainers[-1]
    rows = [json.loads(line) for line in Path(tmp_path, 'a', 'metrics.jsonl').read_text().splitlines()]
    assert len(rows) == 3 and all(row['ppo/first_ratio_error'] < 1e-4 for row in rows)
    models = [m for m in trainer.models().values() if m is not trainer.critic]
    actor, mask = (torch.cat([p.detach().flatten() for p in m.parameters()]) for m in models)
    assert not any(p.requires_grad for p in trainer.policy.mask_model.parameters())
    assert 0 < float((actor - mask).abs().max()) < 1e-1  # one phase of learning apart


def written(path: Path, first: int, count: int, **columns: str) -> str:
    rows = ({'prompt': f'a {i}'} | columns for i in range(first, first + count))
    path.write_text(''.join(json.dumps(row) + '\n' for row in rows))
    return str(path)


def test_cut_prompts_are_counted_among_those_that_are_trained_on(tmp_path):
    GPTActor(config=tiny_config('gpt2', positions=48)).save_pretrained(tmp_path / 'model', tokenizer=char_tokenizer())
    (tmp_path / 'reward.py').write_text('def none(prompts, responses):\n    return [0.0] * len(prompts)\n')
    settings: dict[str, Any] = {'max_prompt_tokens': 3, 'max_new_tokens': 4, 'validation_percentage': 50.0}
    settings['reward_fn'] = f'{tmp_path}/reward.py:none'
    path = written(tmp_path / 'prompts.jsonl', 0, 12)  # two of them have four characters
    run = PPORun(pretrain=str(tmp_path / 'model'), prompt_path=path, **settings)
    train = read_inputs(run).train
    long = [f'a {i}' for i in range(12) if len(f'a {i}') > 3]
    assert train.facts()['cut'] == sum(prompt.text in long for prompt in train) and len(train) == 6


@pytest.mark.parametrize(
    ('cls', 'columns'), [(SFTRun, {'completion': 'b'}), (run_class('dpo'), {'chosen': 'b', 'rejected': 'c'})]
)
def test_eval_records_that_are_trained_on_are_reported(tmp_path, cls, columns, recwarn):
    GPTActor(config=tiny_config('gpt2', positions=48)).save_pretrained(tmp_path / 'model', tokenizer=char_tokenizer())
    train = written(tmp_path / 'train.jsonl', 0, 6, **columns)

    def reads(validation: str) -> Run:
        run = cls(pretrain=str(tmp_path / 'model'), dataset=train, validation_file=validation, train_batch_size=2)
        return read_inputs(run).validation

    copy = written(tmp_path / 'copy.jsonl', 0, 6, **columns)
    with pytest.raises(ValueError, match='copy.jsonl holds the records of the training data: give others'):
        reads(copy)
    with pytest.warns(UserWarning, match='2 of 3 eval records are in the training data too'):
        reads(written(tmp_path / 'some.jsonl', 4, 3, **columns))
    recwarn.clear()
    assert len(reads(written(tmp_path / 'other.jsonl', 6, 3, **columns))) == 3
    assert not [w for w in recwarn if 'eval records' in str(w.message)]


def test_commands_have_the_defaults_of_their_config_classes():
    differ = {}
    for name in METHODS:
        run = run_class(name)
        for own in fields(run.config_class):
            used = run.__dataclass_fields__.get(own.name)
            if used is not None and (used.default, used.default_factory) != (own.default, own.default_factory):
                differ.setdefault(own.name, set()).add((used.default, own.default))
    assert differ == {'max_epochs': {(PPORun.max_epochs, PPOConfig.max_epochs)}}


def finish(name: str, base: str, folder: str) -> None:
    run = SFTRun(pretrain=base, save_path=folder, lora_rank=2, save_adapter=True, strategy=name)
    run.fill_defaults()
    run.validate(int(os.environ.get('WORLD_SIZE', '1')))
    with strategy_by_name(name) as strategy:
        sequence = Sequence(
            prompt_ids=torch.tensor([2]), response_ids=torch.tensor([3]), response_mask=torch.tensor([True])
        )
        inputs = Inputs(run=run, settings=run.config(), tokenizer=None, train=[sequence], model=base)
        trainer = make_trainer(inputs, strategy)
        with torch.no_grad():  # as if trained: B is no longer zero
            for layer in lora_layers(strategy.unwrap(trainer.models()['actor'])).values():
                layer.lora_B.add_(0.125)
        save(run, trainer)


def test_save_dtype_is_that_of_every_file_of_a_run(model_folder: Path, tmp_path):
    (tmp_path / 'prompts.txt').write_text('a b\n')
    (tmp_path / 'reward.py').write_text('def score(prompts, responses):\n    return [1.0 for _ in responses]\n')
    run = PPORun(pretrain=str(model_folder), prompt_path=str(tmp_path / 'prompts.txt'), save_path=str(tmp_path / 'run'))
    run.reward_fn, run.save_dtype = f'{tmp_path}/reward.py:score', 'bf16'
    run.ema_decay, run.max_new_tokens, run.experience_batch_size, run.train_batch_size = 0.5, 2, 2, 2
    run.num_episodes, run.max_timesteps, run.update_timesteps = 1, 1, 1
    run.fill_defaults()
    recipes.execute(run)
    for name in ('actor', 'critic', 'actor_ema'):
        tensors = load_file(tmp_path / 'run' / name / 'model.safetensors')
        assert {t.dtype for t in tensors.values()} == {torch.bfloat16}, name


def test_checkpoints_of_adapters_leave_the_base_out(model_folder: Path, tmp_path):
    (tmp_path / 'prompts.txt').write_text('a b\n')
    (tmp_path / 'reward.py').write_text('def score(prompts, responses):\n    return [1.0 for _ in responses]\n')

    def execute(phases: int, **more: object) -> Any:
        run = PPORun(pretrain=str(model_folder), prompt_path=str(tmp_path / 'prompts.txt'), lora_rank=2, **more)
        run.save_path, run.reward_fn = str(tmp_path / 'run'), f'{tmp_path}/reward.py:score'
        run.checkpoint_interval, run.max_new_tokens, run.experience_batch_size, run.train_batch_size = 1, 2, 2, 2
        run.num_episodes, run.max_timesteps, run.update_timesteps = 1, phases, 1
        run.fill_defaults()
        return recipes.execute(run)

    execute(1)
    held = CheckpointReader(latest(tmp_path / 'run' / 'checkpoints')).names()
    own = {name for name in held if name.startswith(('actor/', 'critic/'))}
    assert own and all('lora_' in name or 'value_head' in name for name in own)
    execute(2, resume='auto')


def test_the_buffer_of_dapo_is_a_fifth_of_the_response():
    for given, buffer in (('--max_new_tokens=40', 8), ('--seed=0', 13), ('--overlong_buffer=5', 5)):
        run = parse_run(run_class('dapo'), description='', argv=['--pretrain=gpt2', given], method='dapo')
        run.fill_defaults()
        assert run.overlong_buffer == buffer
    ppo = PPORun(pretrain='gpt2')
    ppo.fill_defaults()
    assert ppo.overlong_buffer is None


@pytest.mark.parametrize(
    ('options', 'said'), [({}, True), ({'save_adapter': True}, False), ({'save_dtype': 'fp32'}, False)]
)
def test_adapters_that_are_rounded_are_reported(model_folder: Path, tmp_path, capsys, options, said):
    AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.bfloat16).save_pretrained(tmp_path / 'base')
    run = SFTRun(pretrain=str(tmp_path / 'base'), save_path=str(tmp_path / 'run'), lora_rank=2, **options)
    run.fill_defaults()
    with strategy_by_name('naive') as strategy:
        record = Sequence(prompt_ids=torch.tensor([2]), response_ids=torch.tensor([3]), response_mask=torch.ones(1) > 0)
        inputs = Inputs(run=run, settings=run.config(), tokenizer=None, train=[record], model=run.pretrain)
        trainer = make_trainer(inputs, strategy)
        for parameter in trainer.models()['actor'].parameters():  # as a GPU holds the base
            parameter.data = parameter.data if parameter.requires_grad else parameter.data.bfloat16()
        save(run, trainer)
    assert ('its adapters are rounded' in capsys.readouterr().out) == said
    tensors = load_file(tmp_path / 'run' / 'actor' / 'model.safetensors')
    assert {t.dtype for t in tensors.values()} == {torch.float32 if 'save_dtype' in options else torch.bfloat16}


def test_base_and_adapter_are_the_trained_model(model_folder: Path, tmp_path):
    run_distributed(finish, 2, 'fsdp', str(model_folder), str(tmp_path))
    whole = AutoModelForCausalLM.from_pretrained(tmp_path / 'actor')
    ids = torch.tensor([[2, 3, 5, 7]])
    ours = AutoModelForCausalLM.from_pretrained(model_folder)
    plain = ours(ids).logits
    import_peft(ours, tmp_path / 'adapter')
    torch.testing.assert_close(ours.eval()(ids).logits, whole(ids).logits, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(plain, whole(ids).logits, atol=1e-3)
    peft = pytest.importorskip('peft')
    theirs = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model_folder), tmp_path / 'adapter')
    torch.testing.assert_close(theirs.eval()(ids).logits, whole(ids).logits, rtol=1e-4, atol=1e-5)


SCRIPT = """
import time, torch
from types import SimpleNamespace
from chatgpt.launch.arguments import strategy_of
run = SimpleNamespace(strategy='ddp', seed=1, precision='fp32', trust_remote_code=False, rank_timeout_s=20.0)
with strategy_of(run) as strategy:
    strategy.barrier()
    late = time.monotonic()
    if strategy.rank == 1:
        {what}
    strategy.prepare(torch.nn.Linear(3, 3))
"""


# Rank 1 hangs; rank 0's clock runs ten times as fast.
HANGS = 'time.sleep(3600)\n    strategy.ranks.status.clock = lambda: 10 * time.monotonic() - 9 * late'


def test_a_rank_that_fails_while_it_loads():
    results = run_source(SCRIPT.format(what="raise OSError('a torn file')"))
    assert [code for code, _ in results] == [1, 1]
    assert 'stopped, because rank 1 failed: OSError: a torn file' in results[0][1]


def test_a_rank_that_hangs_while_it_loads():
    results = run_source(SCRIPT.format(what=HANGS))
    assert [code for code, _ in results] == [1, 1]
    for _, text in results:
        assert 'no progress for 18 s (before the run): rank 1 is in ' in text and 'Waiting: 0.' in text
