"""The dummy benchmarks: ladders and FLOP worked out by hand, and runs at tiny sizes."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from chatgpt.launch.arguments import run_main
from chatgpt.nn import AutoActor, AutoCritic

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / 'benchmarks'))
import arithmetic_done
import dummy
import ladders

ROOT = Path(__file__).resolve().parents[2]
SHORT = (
    '--prompt_length=12',
    '--max_length=20',
    '--num_episodes=2',
    '--max_timesteps=2',
    '--update_timesteps=2',
    '--max_epochs=3',
)


def on_meta(ladder: str, rung: str, **options):
    with torch.device('meta'):
        return AutoActor(config=ladders.config(ladder, rung), **options)


def gpt_parameters(width: int, layers: int, vocab: int, positions: int) -> int:
    """Embeddings, per block 4 matrices with biases and 2 norms, the last norm; the head is the embedding."""
    block = 12 * width**2 + (3 + 1 + 4 + 1) * width + 4 * width
    return (vocab + positions) * width + layers * block + 2 * width


def opt_parameters(width: int, layers: int, vocab: int, positions: int) -> int:
    """As above; two positions more than the context, and a bias on every matrix."""
    block = 12 * width**2 + (4 + 4 + 1) * width + 4 * width
    return (vocab + positions + 2) * width + layers * block + 2 * width


@pytest.mark.parametrize(
    ('ladder', 'rung', 'millions'),
    [
        ('gpt', 's', 124.44),
        ('gpt', 'xl', 1557.61),
        ('opt', '125m', 125.24),
        ('opt', '1.3b', 1315.76),
        ('tiny', '26m', 26.27),
    ],
)
def test_sizes_of_rungs(ladder, rung, millions):
    """124.44, 1557.61, 125.24 and 1315.76 million are the published models'."""
    width, layers, _ = ladders.FAMILIES[ladder][1][rung]
    expected = {
        'gpt': lambda: gpt_parameters(width, layers, 50257, 1024),
        'opt': lambda: opt_parameters(width, layers, 50272, 2048),
        'tiny': lambda: gpt_parameters(width, layers, 1024, 1024),
    }[ladder]()
    assert sum(p.numel() for p in on_meta(ladder, rung).parameters()) == expected
    assert expected / 1e6 == pytest.approx(millions, abs=0.006)


def test_every_rung_has_a_config():
    assert len(ladders.GPT) == 20 and len(ladders.OPT) == 11  # with `tiny`, which the ancestor's had not
    for ladder, (_, rungs) in ladders.FAMILIES.items():
        for rung, (width, layers, heads) in rungs.items():
            config = ladders.config(ladder, rung)
            assert (config.hidden_size, config.num_hidden_layers, config.num_attention_heads) == (width, layers, heads)
            assert width % heads == 0
    assert ladders.config('gpt', '175b').n_positions == 2048
    assert ladders.config('gpt', 's', positions=4096).n_positions == 4096
    sizes = [12 * layers * width**2 for width, layers, _ in ladders.GPT.values()]
    assert sizes == sorted(sizes)
    with pytest.raises(ValueError, match="the ladder gpt has no '7b'; it has tiny, s"):
        ladders.config('gpt', '7b')
    with pytest.raises(ValueError, match="no ladder 'llama'"):
        ladders.config('llama', 's')


def test_matrices_are_counted_by_hand():
    d, layers, vocab, r = 32, 2, 1024, 4
    blocks = layers * 12 * d * d
    full = arithmetic_done.matrices(AutoActor(config=ladders.config('gpt', 'tiny')))
    assert full == arithmetic_done.Matrices(blocks, 0, blocks, blocks, layers * 4 * d * d, vocab * d, True)
    critic = arithmetic_done.matrices(AutoCritic(config=ladders.config('gpt', 'tiny')))
    assert critic == arithmetic_done.Matrices(blocks, 0, blocks, blocks, layers * 4 * d * d)
    # OPT has six matrices a block, four d x d and two d x 4d; each gets A (r x in) and B (out x r)
    adapters = layers * (4 * 2 * d * r + 2 * 5 * d * r)
    lora = arithmetic_done.matrices(AutoActor(config=ladders.config('opt', 'tiny'), lora_rank=r))
    assert lora == arithmetic_done.Matrices(
        blocks + adapters, adapters, blocks + adapters, adapters, layers * d * r, vocab * d, False
    )
    hydra = arithmetic_done.matrices(AutoActor(config=ladders.config('gpt', 'tiny'), num_layers_unfrozen=1))
    # without the frozen copy of the top block
    assert (hydra.blocks, hydra.through, hydra.trained, hydra.spared) == (blocks, blocks // 2, blocks // 2, 4 * d * d)


def test_flop_of_a_phase_by_hand():
    """N = 1000 in blocks, 300 of them in the last matrices, H = 70; 2 sequences of 3 + 2 tokens, 3 passes."""
    full = arithmetic_done.Matrices(1000, 0, 1000, 1000, 300, 70, True)
    critic = arithmetic_done.Matrices(1000, 0, 1000, 1000, 300)
    size = {'sequences': 2, 'prompt': 3, 'response': 2, 'passes': 3.0}
    four = arithmetic_done.Models(full, critic, full, critic)
    flop = arithmetic_done.phase_flop(four, **size)
    assert flop == {
        'collect': 2 * (2 * 1000 * 4 + 2 * 70 * 2),
        'score': 2 * (3 * 2 * 1000 * 5 + 2 * 70 * 2),
        'learn': 3 * 2 * (2 * 2 * 1000 * 3 * 5 + 2 * 70 * 3 * 2),
    }
    again = arithmetic_done.phase_flop(four, **size, checkpointing=True, head_again=True, actor_scores=True)
    assert again['learn'] == 3 * 2 * (2 * 2 * (1000 * 4 - 300) * 5 + 2 * 70 * 4 * 2)
    assert again['score'] == 2 * (4 * 2 * 1000 * 5 + 2 * 2 * 70 * 2)
    # LoRA, no critic: adapters of 100; the reference is the actor without them
    lora = arithmetic_done.Models(
        arithmetic_done.Matrices(1100, 100, 1100, 100, 30, 70, False), None, None, None, reference_is_actor=True
    )
    flop = arithmetic_done.phase_flop(lora, **size)
    assert flop['collect'] == 2 * (2 * 1000 * 4 + 2 * 70 * 2)
    assert flop['score'] == 2 * (2 * 1000 * 5 + 2 * 70 * 2)
    assert flop['learn'] == 3 * 2 * (2 * (1100 + 1100 + 100) * 5 + 2 * 70 * 2 * 2)


@pytest.mark.parametrize(
    ('ladder', 'changed', 'tolerance'),
    [
        ('gpt', {}, 1e-3),  # what differs are heads with one output
        ('gpt', {'gradient_checkpointing': True}, 1e-3),
        ('opt', {'gradient_checkpointing': True}, 1e-3),
        ('gpt', {'num_layers_unfrozen': 1, 'critic': 'shared'}, 1e-3),
        ('gpt', {'lora_rank': 2, 'critic': 'shared', 'reward': 'function', 'gradient_checkpointing': True}, 1e-3),
        ('opt', {'lora_rank': 4}, 0.06),  # three of twelve d x d, in one of two layers, get no gradient of their input
    ],
    ids=str,
)
def test_flop_are_those_that_torch_counts(monkeypatch, ladder, changed, tolerance):
    from chatgpt.experience import ExperienceMaker
    from chatgpt.rollout import LocalEngine
    from chatgpt.rollout.local import engine as local
    from chatgpt.trainer import PPOTrainer

    counted: dict[str, int] = {}

    def watch(owner, method, part):
        original = getattr(owner, method)

        def watched(*args, **kwargs):
            with FlopCounterMode(display=False) as counter:
                result = original(*args, **kwargs)
            products = counter.get_flop_counts()['Global']
            counted[part] = sum(n for op, n in products.items() if str(op) in ('aten.mm', 'aten.addmm'))
            return result

        monkeypatch.setattr(owner, method, watched)

    class Plain:  # packed weights are multiplied by an operation that torch does not count
        active = staticmethod(nullcontext)

    monkeypatch.setattr(local, 'PackedModules', lambda actor: Plain)
    watch(LocalEngine, 'generate', 'collect')
    watch(ExperienceMaker, 'make', 'score')
    watch(PPOTrainer, 'learn', 'learn')
    settings = dummy.DummyRun(
        num_episodes=1, max_timesteps=1, update_timesteps=1, max_epochs=2, prompt_length=12, max_length=20, **changed
    )
    claimed = dummy.run(settings, ladder, 'tiny')['phases'][0]['flop']
    assert counted['collect'] == claimed['collect']
    assert counted['score'] == pytest.approx(claimed['score'], rel=1e-3)
    assert counted['learn'] == pytest.approx(claimed['learn'], rel=tolerance)


def test_peak_is_a_speed():
    assert 1e8 < arithmetic_done.matmul_peak(torch.device('cpu'), torch.float32) < 1e14


def gpt_script(monkeypatch, *flags: str) -> None:
    """benchmark_gpt_dummy.py, in this process."""
    monkeypatch.setattr(sys, 'argv', ['benchmark_gpt_dummy.py', *flags])
    run_main(dummy.script('gpt', 'doc', shown=dummy.COMMON_FLAGS))


def test_gpt_run(monkeypatch, capsys, tmp_path):
    gpt_script(monkeypatch, '--model=tiny', '--json', str(tmp_path / 'out.json'), *SHORT)
    result = json.loads((tmp_path / 'out.json').read_text())
    assert (
        {'collect', 'score', 'learn', 'total'} == set(result['seconds_per_phase']) == set(result['tflops_per_device'])
    )
    assert set(result['share_of_peak']) == set(result['tflops_per_device'])
    assert [p['samples'] for p in result['phases']] == [16, 16]
    assert [p['new_tokens'] for p in result['phases']] == [16 * 8, 16 * 8]  # nothing ended a response
    assert [p['updates'] for p in result['phases']] == [6, 6]
    assert result['phases_counted'] == 1
    # two layers of width 32: N = 24,576; H = 1,024 x 32; four networks; 16 sequences of 12 + 8 tokens, 3 passes
    n, h = 24576, 32768
    assert result['flop_per_phase']['collect'] == 16 * (2 * n * 19 + 2 * h * 8)
    assert result['flop_per_phase']['score'] == 16 * (3 * 2 * n * 20 + 2 * h * 8)
    assert result['flop_per_phase']['learn'] == 3 * 16 * (2 * 2 * n * 3 * 20 + 2 * h * 3 * 8)
    total = result['seconds_per_phase']['total']
    assert result['samples_per_s'] == pytest.approx(16 / total)
    assert result['tflops_per_device']['total'] == pytest.approx(result['flop_per_phase']['total'] / total / 1e12)
    assert result['parameters']['actor'] == gpt_parameters(32, 2, 1024, 1024)
    assert result['parameters']['critic'] == result['parameters']['actor'] + 33
    assert (
        result['memory']['planned_peak'] > 2**20
    )  # in a process that has run other tests, memory kept from them hides the peak
    shown = capsys.readouterr().out
    assert '| learn |' in shown and 'share of matmul peak' in shown


@pytest.mark.system
def test_opt_lora_run_under_torchrun(tmp_path):
    command = [
        sys.executable,
        '-m',
        'torch.distributed.run',
        '--standalone',
        '--nproc-per-node=2',
        str(ROOT / 'benchmarks' / 'benchmark_opt_lora_dummy.py'),
        '--model=tiny',
        '--lora_rank=4',
        '--strategy=fsdp',
        '--json',
        str(tmp_path / 'out.json'),
        *SHORT,
        '--num_episodes=1',
        '--max_epochs=1',
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / 'out.json').read_text())
    assert result['world_size'] == 2
    assert result['memory']['peak'] > 2**20 and result['memory']['planned_peak'] > 2**19
    assert result['samples_per_s'] == pytest.approx(2 * result['samples_per_s_per_device'])
    assert 'initial model' not in result['parameters']
    assert (
        result['parameters']['trained'] == 2 * 2 * (4 * 2 * 32 * 4 + 2 * 5 * 32 * 4) + 33
    )  # adapters of both, and the value head
    assert done.stdout.count('| learn |') == 1  # the first rank prints


def test_a_strategy_of_processes_without_torchrun(monkeypatch, capsys):
    gpt_script(monkeypatch, '--model=tiny', '--strategy=ddp', *SHORT)
    assert 'gpt tiny, ddp x 1, fp32' in capsys.readouterr().out


@pytest.mark.parametrize(
    ('flags', 'sentence'),
    [
        (['--model=huge'], 'invalid choice'),
        (['--max_length=400'], 'must be above prompt_length=400'),
        (['--num_episode=2'], "unknown argument '--num_episode'; did you mean --num_episodes"),
        (['--strategy=colossalai_gemini', '--precision=fp32'], 'Gemini computes in 16 bits'),
        (['--max_epochs=0'], 'max_epochs=0 must be at least 1'),
    ],
)
def test_mistakes_are_one_line(monkeypatch, capsys, flags, sentence):
    with pytest.raises(SystemExit) as ended:
        gpt_script(monkeypatch, *flags)
    error = capsys.readouterr().err
    assert ended.value.code == 2
    assert sentence in error
    assert len(error.strip().splitlines()) == 1


def test_settings_that_do_not_go_together():
    with pytest.raises(ValueError, match='train_batch_size=3 cannot be split over 2'):
        dummy.DummyRun(train_batch_size=3).check(2)
    with pytest.raises(ValueError, match='choose one'):
        dummy.DummyRun(lora_rank=2, num_layers_unfrozen=1).check(1)


@pytest.mark.parametrize(
    'changed',
    [
        {'critic': 'shared'},
        {'lora_rank': 2, 'critic': 'shared', 'reward': 'function'},
        {'num_layers_unfrozen': 1, 'critic': 'shared'},
        {'gradient_checkpointing': True, 'max_tokens_per_batch': 20, 'lora_rank': 2},
    ],
    ids=str,
)
def test_arrangements(changed):
    settings = dummy.DummyRun(
        num_episodes=1, max_timesteps=1, update_timesteps=1, max_epochs=1, prompt_length=6, max_length=10, **changed
    )
    result = dummy.run(settings, 'gpt', 'tiny')
    assert result['phases'][0]['updates'] == 1
    assert ('critic' in result['parameters']) == (settings.critic == 'own')
    assert ('reward model' in result['parameters']) == (settings.reward == 'model')
    assert result['parameters']['trained'] < result['parameters']['all']
