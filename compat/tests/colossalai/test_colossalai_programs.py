"""Programs in the style of ColossalAI's `chatgpt` under `chatgpt_compat run`, checked by their files and output."""

from __future__ import annotations

import ast
import importlib.util
import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from chatgpt.batching import collate
from chatgpt.nn import GPTRM, GPTActor
from chatgpt.strategies import FSDPStrategy, NaiveStrategy
from chatgpt.testing.fakes import char_tokenizer
from chatgpt.testing.processes import free_port, run_distributed
from chatgpt.testing.tiny import tiny_sequences
from chatgpt_compat import modules
from chatgpt_compat.check import findings, read_script, uses

ROOT = Path(__file__).resolve().parents[3]
PROGRAMS = Path(__file__).parent / 'programs'
SHORT = ['--num_episodes=2', '--max_timesteps=2', '--update_timesteps=2', '--max_epochs=2']


def preferences(path: Path) -> Path:
    """Writes preferences for eight prompts; good responses contain a marker."""
    rows = [{'prompt': f'q {i}: ', 'chosen': f'good {i}', 'rejected': f'bad {i}'} for i in range(8)]
    path.write_text(''.join(json.dumps(row) + '\n' for row in rows))
    return path


def last_scores(folder: Path, checkpoint: Path, texts: list[str], lora_rank: int = 0) -> list[float]:
    """Returns the scores at the last token by a forward of transformers' trunk and the head."""
    model = GPTRM(pretrained=folder, lora_rank=lora_rank)
    model.load_state_dict(torch.load(checkpoint, weights_only=True))
    model.eval()
    scores = []
    for text in texts:
        ids = torch.tensor([char_tokenizer()(text)['input_ids']])
        with torch.no_grad():
            scores.append(float(model.value_head(model.model(ids).last_hidden_state[0, -1])))
    return scores


def test_every_program_is_served():
    """The checker finds every name of every program served."""
    for path in PROGRAMS.glob('*.py'):
        wrong = [str(f) for f in findings(uses(read_script(path))) if not f.served]
        assert not wrong, f'{path.name}: {wrong}'


def test_dummy_of_february(program, gpt2, tmp_path):
    out = program('february_dummy', '--pretrain', gpt2, '--train_batch_size=8', *SHORT)
    # 2 episodes of 2 timesteps of 8 prompts, learned every 2 timesteps: 2 phases of 2 epochs of 16 / 8 batches
    assert out.splitlines()[-1] == 'phases 2 updates 8'
    weights = torch.load(tmp_path / 'actor.pt', weights_only=True)
    model = GPTActor(pretrained=gpt2)
    before = {name: tensor.clone() for name, tensor in model.model.state_dict().items()}
    assert set(weights) == set(before)  # names of the bare model
    assert any(not torch.equal(weights[name], before[name]) for name in before)
    assert (tmp_path / 'actor_optim_0.pt').exists()


def test_prompts_of_march(program, gpt2, tmp_path):
    words = ['tell me', 'what is a cat', 'sing, please, a long song', 'go on']
    prompts = tmp_path / 'prompts.csv'
    prompts.write_text('act,prompt\n' + ''.join(f'x,"{word}"\n' for word in words))
    program('march_prompts', prompts, '--pretrain', gpt2, '--experience_batch_size=4', '--need_optim_ckpt=True', *SHORT)
    assert (tmp_path / 'optim_0.pt').exists()
    end = torch.load(tmp_path / 'actor_checkpoint_prompts.pt', weights_only=True)
    start = GPTActor(pretrained=gpt2).model.state_dict()
    assert any(not torch.equal(start[name], end[name]) for name in end)


def test_the_old_file_of_an_actor_is_read_by_the_library_too(program, gpt2, tmp_path):
    program('february_dummy', '--pretrain', gpt2, *SHORT)
    strategy = NaiveStrategy()
    actor = strategy.prepare(GPTActor(pretrained=gpt2))
    strategy.load_model(actor, tmp_path / 'actor.pt')
    weights = torch.load(tmp_path / 'actor.pt', weights_only=True)
    loaded = strategy.unwrap(actor).model.state_dict()
    assert all(torch.equal(loaded[name], weights[name]) for name in weights)


@pytest.mark.parametrize('flags', [['--loss_fn=log_sig'], ['--loss_fn=log_exp', '--dataset=Anthropic/hh-rlhf']])
def test_reward_model_of_march(program, gpt2, tmp_path, flags):
    rows = preferences(tmp_path / 'rows.jsonl')
    with pytest.warns(UserWarning, match='valid_dataset is not read: eval_dataset is evaluated'):
        out = program(
            'march_reward_model', rows, '--pretrain', gpt2, '--batch_size=4', '--max_epochs=20', '--max_len=64', *flags
        )
    assert out.splitlines()[-1].startswith('items 8 ids 1 phases')
    start, end = '' if 'hh-rlhf' in flags[-1] else 'q 3: ', char_tokenizer().eos_token
    good, bad = last_scores(gpt2, tmp_path / 'rm_ckpt.pt', [f'{start}good 3{end}', f'{start}bad 3{end}'])
    assert good > bad + 0.5


def test_reward_model_of_february_with_adapters(program, gpt2, tmp_path):
    rows = preferences(tmp_path / 'rows.jsonl')
    assert program('february_reward_model', gpt2, rows).splitlines()[-1] == 'epochs 6 loss LogSigLoss'
    good, bad = last_scores(gpt2, tmp_path / 'rm_checkpoint.pt', ['q 3: good 3', 'q 3: bad 3'], lora_rank=4)
    assert good > bad


@pytest.fixture
def alpaca(tmp_path: Path) -> Path:
    path = tmp_path / 'alpaca.json'
    rows = [{'instruction': f'say {w}', 'input': '', 'output': w} for w in ('one', 'two', 'red', 'cat')]
    rows.append({'instruction': 'repeat', 'input': 'me', 'output': 'me'})
    path.write_text(json.dumps(rows))
    return path


@pytest.mark.parametrize('installed', [True, False], ids=['colossalai', 'no colossalai'])
def test_sft_of_march(program, gpt2, tmp_path, alpaca, monkeypatch, installed):
    if installed and importlib.util.find_spec('colossalai') is None:
        pytest.skip('colossalai is not installed: pip install -r requirements-colossalai.txt')
    if not installed:
        for name in [m for m in sys.modules if m.split('.')[0] == 'colossalai']:
            monkeypatch.delitem(sys.modules, name)
        found = modules.installed
        monkeypatch.setattr(modules, 'installed', lambda n, p=None: None if n.startswith('colossalai') else found(n, p))
    out = program('march_sft', '--pretrain', gpt2, '--max_epochs=30', '--batch_size=5', '--log_interval=10')
    assert out.splitlines()[-1] == "batch ['attention_mask', 'input_ids', 'labels'] True updates 30"
    # after 30 steps on five instructions the learned responses are likely
    model = GPTActor(pretrained=gpt2).model
    model.load_state_dict(torch.load(tmp_path / 'sft_ckpt.pth', weights_only=True))
    tokenizer = char_tokenizer()
    text = (
        'Below is an instruction that describes a task. Write a response that appropriately completes the request.'
        '\n\n### Instruction:\nsay red\n\n### Response:'
    )
    prompt, answer = (tokenizer(t)['input_ids'] for t in (text, 'red'))
    with torch.no_grad():
        logprobs = model(torch.tensor([prompt + answer])).logits[0].log_softmax(-1)
    learned = [float(logprobs[len(prompt) - 1 + i, token]) for i, token in enumerate(answer)]
    assert min(learned) > -2.0  # chance is log(1 / 64) = -4.2


def greedy(folder: Path, ids: list[int], max_length: int) -> list[int]:
    """Generates token by token without a cache up to the end token."""
    model = GPTActor(pretrained=folder).model.eval()
    while len(ids) < max_length:
        with torch.no_grad():
            ids = [*ids, int(model(torch.tensor([ids])).logits[0, -1].argmax())]
        if ids[-1] == 2:
            break
    return ids


def test_inference(program, gpt2, tmp_path):
    torch.save(GPTActor(pretrained=gpt2).model.state_dict(), tmp_path / 'actor.pt')
    out = program(
        'inference',
        '--pretrain',
        gpt2,
        '--model_path',
        tmp_path / 'actor.pt',
        '--input',
        'how are you',
        '--max_length=24',
    )
    ids, masks, text = out.splitlines()[-3:]
    prompt = char_tokenizer()('how are you')['input_ids']
    expected = greedy(gpt2, prompt, 24)
    assert ast.literal_eval(ids) == expected
    attention, action = (ast.literal_eval(part) for part in re.findall(r'\[.*?\]', masks))
    assert attention == [int(token != 0) for token in expected] and action == [True] * (len(expected) - len(prompt))
    assert ast.literal_eval(text) == [char_tokenizer().decode(expected, skip_special_tokens=True)]


def test_benchmark(program):
    out = program('benchmark', '--num_episodes=2', '--max_timesteps=1', '--update_timesteps=1', '--max_epochs=1')
    assert re.search(r'performance: \S+ samples/s, \S+ TFLOPS per device', out)
    assert 'Peak CUDA mem: 0.00 GB' in out
    sizes = ast.literal_eval(out.splitlines()[-1].removeprefix('sizes '))
    # embeddings 64 and 66 positions x 32, two layers, a final norm; adapters of rank 4 on the six linear layers of each
    layer = 4 * (32 * 32 + 32) + 2 * 32 * 64 + 64 + 32 + 4 * 32
    adapters = 2 * (4 * 4 * (32 + 32) + 2 * 4 * (32 + 64))
    assert sizes[0] == (64 + 66) * 32 + 2 * layer + 2 * 32 + adapters
    assert sizes[1] == sizes[0] + 33 and sizes[2] == sizes[0]


def test_a_custom_callback_and_positional_settings(program, gpt2):
    settings, diary = program('own_callback', gpt2).splitlines()[-2:]
    assert settings == '0.05 4 0.1 0.3 4 2'
    phase = ['made 4', 'epoch 0', 'batch', 'epoch 1', 'batch']
    assert ast.literal_eval(diary) == ['fit', 'episode 0', *phase, 'ended 0', 'episode 1', *phase, 'ended 1', 'end']


def test_a_custom_loop(program):
    """The test computes all numbers by a loop over floats."""
    numbers, grads = program('own_loop').splitlines()[-2:]
    reward_0, reward_1, policy, value, mixed = ast.literal_eval(numbers)
    kl = math.exp(0.1) - 1 - 0.1
    rewards = [1.0 - 0.2 * kl, -1.0 - 0.2 * kl]
    assert [reward_0, reward_1] == pytest.approx(rewards, abs=2e-6)
    errors = [(v - r) ** 2 for v, r in zip((0.3, 0.1), rewards, strict=True)]
    assert value == pytest.approx(sum(errors) / 2, rel=1e-5)
    difference = [rewards[0] - 0.3, rewards[1] - 0.1]
    mean = sum(difference) / 2
    std = math.sqrt(sum((d - mean) ** 2 for d in difference) / 2)
    advantages = [(d - mean) / std for d in difference]
    assert policy == pytest.approx(-sum(advantages) / 2, abs=1e-6)
    torch.manual_seed(0)
    logits, ids = torch.randn(2, 5, 7).double(), [[1, 2, 3, 4, 5], [6, 5, 4, 3, 2]]
    nll = [-float(logits[b, t].log_softmax(0)[ids[b][t + 1]]) for b in range(2) for t in range(4)]
    assert mixed == pytest.approx(policy + 0.5 * sum(nll) / 8, rel=1e-5)
    has_gradient, values = grads.split(' ', 1)
    assert has_gradient == 'True'  # that of the value loss is 2 (v - r) / 2
    assert ast.literal_eval(values) == pytest.approx(
        [v - r for v, r in zip((0.3, 0.1), rewards, strict=True)], rel=1e-5
    )


def torchrun(program: str, folder: Path, *arguments: str, processes: int = 1) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, '-m', 'torch.distributed.run', f'--nproc-per-node={processes}']
    command += [f'--master-port={free_port()}', '-m', 'chatgpt_compat', 'run', str(PROGRAMS / f'{program}.py')]
    env = os.environ | {'OMP_NUM_THREADS': '1', 'HF_HUB_OFFLINE': '1'}
    return subprocess.run([*command, *arguments], cwd=folder, env=env, capture_output=True, text=True)


@pytest.mark.system
def test_under_torchrun_on_two_processes(gpt2, tmp_path):
    done = torchrun('february_dummy', tmp_path, '--strategy=ddp', f'--pretrain={gpt2}', *SHORT, processes=2)
    assert done.returncode == 0, done.stderr
    # the output of two processes may be interleaved
    printed = re.sub(r'phase \d/\d .*\n', '', done.stdout)
    assert sorted(''.join(printed.split())) == sorted('phases2updates8' * 2)
    assert done.stderr.count('chatgpt_compat: ') == 1  # only one process reports


def one_step(model: str, folder: str) -> None:
    """Writes checkpoints of an actor after one step; the optimizer's is a folder, as for every sharded strategy."""
    with FSDPStrategy() as strategy:
        actor = GPTActor(pretrained=model)
        actor, optimizer = strategy.prepare((actor, torch.optim.AdamW(actor.parameters(), lr=1e-3)))
        strategy.backward(-actor(collate(tiny_sequences(2))).logprobs.sum(), actor, optimizer)
        strategy.optimizer_step(optimizer)
        strategy.save_optimizer(optimizer, Path(folder, 'actor_optim_checkpoint.pt'))
        tensors = strategy.full_state_dict(actor, folder)
        bare = {name.removeprefix('model.'): tensor.clone() for name, tensor in tensors.items()}
        torch.save(bare, Path(folder, 'actor_checkpoint.pt'))


@pytest.mark.system
@pytest.mark.skipif(importlib.util.find_spec('colossalai') is None, reason='colossalai is not installed')
def test_the_usage_section_of_its_page(gpt2, tmp_path):
    """It uses Gemini in fp16, HybridAdam, a critic of GPT-2's size and existing checkpoints."""
    (tmp_path / 'gpt2').symlink_to(gpt2)
    run_distributed(one_step, 1, str(gpt2), str(tmp_path))
    before = torch.load(tmp_path / 'actor_checkpoint.pt', weights_only=True)
    done = torchrun('page_usage', tmp_path)
    assert done.returncode == 0, done.stderr
    assert 'colossalai.nn.optimizer.HybridAdam' in done.stderr
    after = torch.load(tmp_path / 'actor_checkpoint.pt', weights_only=True)
    assert set(after) == set(before) and all(t.dtype == torch.float32 for t in after.values())
    change = max(float((after[name] - before[name]).abs().max()) for name in before)
    assert 0 < change < 1e-2  # a step of a loaded optimizer at 5e-6, after rounding to 16 bits
    assert (tmp_path / 'actor_optim_checkpoint.pt').is_dir()  # a folder with the states of all ranks


HYBRID_ADAM = """
import torch
from colossalai.nn.optimizer import HybridAdam
from chatgpt.trainer.strategies import NaiveStrategy
torch.manual_seed(0)
weights, ours = (torch.nn.Linear(3, 1) for _ in range(2))
ours.load_state_dict(weights.state_dict())
strategy = NaiveStrategy()
theirs = HybridAdam(weights.parameters(), lr=0.1)
for model, optimizer in (weights, theirs), (ours, torch.optim.AdamW(ours.parameters(), lr=0.1, weight_decay=0)):
    model, optimizer = strategy.prepare((model, optimizer))
    for _ in range(3):
        strategy.backward(model(torch.ones(2, 3)).pow(2).mean(), model, optimizer)
        strategy.optimizer_step(optimizer)
        optimizer.zero_grad()
print('apart', float((weights.weight - ours.weight).abs().max()))
"""


@pytest.mark.system
@pytest.mark.skipif(torch.cuda.is_available(), reason='about machines without a GPU')
@pytest.mark.skipif(importlib.util.find_spec('colossalai') is None, reason='colossalai is not installed')
def test_its_own_hybrid_adam_runs_beside_a_naive_strategy_without_a_gpu(tmp_path):
    path = tmp_path / 'script.py'
    path.write_text(HYBRID_ADAM)
    argv = [sys.executable, '-m', 'chatgpt_compat', 'run', str(path)]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout.split()[-1]) < 1e-5
