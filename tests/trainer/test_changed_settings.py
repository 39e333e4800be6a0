"""Resumes under other settings: each change is reported, and the latest one holds. Global generators, which a user's
reward may read, continue from their state on every rank."""

from __future__ import annotations

import json
import random
import warnings
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from ppo_on_ids import fit, make
from stop_after import StopAfter
from tiny_runs import PROMPTS, ppo, sequence, sft, vowels, weights

from chatgpt.launch.config_file import parse_run, write_resolved
from chatgpt.launch.runs import SFTRun
from chatgpt.rollout import HFEngine
from chatgpt.strategies import DDPStrategy, NaiveStrategy
from chatgpt.testing.processes import run_distributed
from chatgpt.trainer.checkpointing import differences
from chatgpt.trainer.schedule import describe_groups


def consonants(prompts: list[str], responses: list[str]) -> list[float]:
    return [float(sum(c not in 'aeiou' for c in r)) for r in responses]


@pytest.fixture(scope='module')
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp('changed')
    trainer = ppo(run_dir=folder / 'run')
    trainer.fit(PROMPTS, 1, 1, 1)
    assert json.loads((folder / 'run' / 'run.json').read_text())['strategy']['precision'] == 'fp32'
    return trainer.save_checkpoint(folder / 'checkpoint')


def resumed(path: Path, decay: float | None = None, **changes: Any) -> tuple[Any, list[str]]:
    trainer = ppo(**changes)
    for group in trainer.actor_optim.param_groups if decay else []:
        group['weight_decay'] = decay
    trainer.load_checkpoint(path)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter('always')
        trainer.fit(PROMPTS, 1, 2, 1)
    return trainer, [str(w.message) for w in caught if 'changed settings' in str(w.message)]


def test_auto_that_selects_another_precision_is_named(saved, monkeypatch):
    assert resumed(saved)[1] == []  # an unchanged resume says nothing
    monkeypatch.setattr(
        'chatgpt.strategies.precision.resolve_precision', lambda precision, device, **_: {'auto': 'bf16'}[precision]
    )  # as on a GPU
    _, (text,) = resumed(saved, strategy=NaiveStrategy(seed=3, device='cpu'))
    assert "precision 'fp32' → 'bf16'" in text


def test_another_optimizer_and_another_reward_are_named_and_used(saved):
    trainer, (text,) = resumed(saved, lr=5e-4, decay=0.5)
    group = trainer.actor_optim.param_groups[0]
    assert 'optimizers.actor.lr 0.001 → 0.0005' in text and group['lr'] == 5e-4
    assert 'optimizers.actor.weight_decay 0.01 → 0.5' in text and group['weight_decay'] == 0.5
    _, (text,) = resumed(saved, reward=consonants)
    assert "reward 'vowels, source " in text and "→ 'consonants, source " in text


def test_another_coefficient_of_the_kl_is_used(saved):
    trainer, (text,) = resumed(saved, kl_coef=0.5)
    assert 'config.kl_coef 0.1 → 0.5' in text and trainer.log.phases[-1]['rollout/kl_coef'] == 0.5
    trainer, (text,) = resumed(saved, kl_coef=0.0)
    assert trainer.log.phases[-1]['rollout/kl_coef'] == 0.0
    trainer, (text,) = resumed(saved, kl_target=3.0)
    assert 'config.kl_target None → 3.0' in text and trainer.log.phases[-1]['rollout/kl_coef'] == 0.1


def test_other_stop_strings_and_another_reference_are_named(saved):
    _, (text,) = resumed(saved, stop_strings=['zz'])
    assert "stop_strings [] → ['zz']" in text
    trainer = ppo()
    reference = trainer.strategy.unwrap(trainer.maker.reference.initial_model)
    reference.model.config.name_or_path = 'another'
    assert trainer.fingerprint()['initial_model'] == 'another'


def test_groups_of_an_optimizer_are_told_apart_where_they_differ():
    first, second = (torch.nn.Parameter(torch.zeros(2)) for _ in range(2))
    optimizer = torch.optim.AdamW([{'params': [first]}, {'params': [second], 'weight_decay': 0.0}], weight_decay=0.1)
    alike, apart = (describe_groups(optimizer, rates) for rates in ((1e-5, 1e-5), (1e-5, 6e-4)))
    assert alike['lr'] == 1e-5 and alike['weight_decay'] == [0.1, 0.0]
    assert list(differences(alike, apart)) == ['lr 1e-05 → [1e-05, 0.0006]']


def test_generation_settings_that_are_mappings_are_in_a_checkpoint(tmp_path):
    path = tmp_path / 'checkpoint'
    ppo(engine=HFEngine(), sequence_bias={(5,): -10.0}).save_checkpoint(path)
    ppo(engine=HFEngine(), sequence_bias={(5,): -10.0}).load_checkpoint(path)


def test_a_reward_of_the_same_name_and_other_code_is_another(saved):
    def other(prompts: list[str], responses: list[str]) -> list[float]:
        return [1.0 + x for x in vowels(prompts, responses)]

    other.__qualname__ = 'vowels'
    (text,) = resumed(saved, reward=other)[1]
    assert text.count("'vowels, source ") == 2


def start(folder: Path, *flags: str) -> SFTRun:
    run = parse_run(SFTRun, description='', positional='dataset', argv=['--save_path', str(folder), *flags])
    write_resolved(run, run.save_path)
    checkpoint = folder / 'checkpoints' / 'step-00000001'
    checkpoint.mkdir(parents=True, exist_ok=True)
    (checkpoint / 'manifest.json').touch()
    return run


def test_the_latest_value_of_a_flag_holds_in_later_resumes(tmp_path, capsys):
    start(tmp_path, '--lr', '1e-4', '--max_epochs', '3')
    assert 'settings' not in capsys.readouterr().out
    run = start(tmp_path, '--resume', 'auto', '--lr', '2e-4', '--weight_decay', '0.1')
    assert (run.lr, run.max_epochs, run.weight_decay) == (2e-4, 3, 0.1)
    shown = capsys.readouterr().out
    assert 'settings changed in this resume: lr 0.0001 → 0.0002, weight_decay → 0.1\n' in shown
    assert 'settings kept from the run so far: max_epochs 3\n' in shown
    run = start(tmp_path, '--resume', 'auto')
    assert (run.lr, run.max_epochs, run.weight_decay, run.seed) == (2e-4, 3, 0.1, SFTRun().seed)
    assert 'settings kept from the run so far: lr 0.0002, max_epochs 3, weight_decay 0.1\n' in capsys.readouterr().out
    (tmp_path / 'given.yaml').rename(tmp_path / 'said.yaml')  # its former name
    run = start(tmp_path / 'other', '--resume', str(tmp_path / 'checkpoints' / 'step-00000001'), '--max_epochs', '4')
    assert (run.lr, run.max_epochs, run.save_path) == (2e-4, 4, str(tmp_path / 'other'))


def test_the_layout_is_not_resumed(tmp_path, monkeypatch):
    monkeypatch.setenv('WORLD_SIZE', '4')
    start(tmp_path, '--strategy', 'ddp', '--num_training_workers', '4', '--lr', '1e-4')
    monkeypatch.delenv('WORLD_SIZE')
    run = start(tmp_path, '--resume', 'auto')
    assert (run.strategy, run.lr) == ('naive', 1e-4)


def test_a_run_from_the_beginning_inherits_no_settings(tmp_path):
    start(tmp_path, '--lr', '1e-4')
    assert start(tmp_path, '--max_epochs', '3').lr is None
    (tmp_path / 'checkpoints' / 'step-00000001' / 'manifest.json').unlink()
    resumed = parse_run(SFTRun, description='', argv=['--save_path', str(tmp_path), '--resume', 'auto'])
    assert resumed.max_epochs == SFTRun().max_epochs


def seed_all(seed: int) -> None:
    random.seed(seed)
    numpy.random.seed(seed)
    torch.manual_seed(seed)


def draws() -> list[float]:
    """`gauss` and `normal` generate pairs and keep the second for the next call, which is part of the state."""
    ours = [random.random(), random.gauss(0, 1)]
    return [*ours, float(numpy.random.rand()), float(numpy.random.normal()), float(torch.rand(()))]


class Noisy(torch.nn.Module):
    """A reward that depends only on the global generators; records its values."""

    def __init__(self) -> None:
        super().__init__()
        self.given: list[list[float]] = []

    def forward(self, batch: Any) -> torch.Tensor:
        self.given.append([sum(draws()) for _ in range(batch.num_sequences)])
        return torch.tensor(self.given[-1])


def phases(source: Path | None = None, target: Path | None = None) -> tuple[list[list[float]], torch.Tensor]:
    reward = Noisy()
    trainer = make(reward=reward, callbacks=[StopAfter(2)] if target else [])
    seed_all(99 if source else 7)
    if source is not None:
        trainer.load_checkpoint(source)
    fit(trainer, 4)
    if target is not None:
        trainer.save_checkpoint(target)
    return reward.given, weights(trainer)


def test_a_reward_that_reads_python_and_numpy_generators_resumes_to_the_bit(tmp_path):
    straight, whole = phases()
    first, _ = phases(target=tmp_path / 'half')
    rest, end = phases(source=tmp_path / 'half')
    assert 0 < len(first) < len(straight) and first + rest == straight
    assert torch.equal(end, whole)


def test_numpy_generators_of_other_kinds(tmp_path):
    trainer = make()
    before = numpy.random.get_bit_generator()
    numpy.random.set_bit_generator(numpy.random.PCG64(3))
    try:
        trainer.save_checkpoint(tmp_path / 'saved')
        want = draws()
        trainer.load_checkpoint(tmp_path / 'saved')
        assert draws() == want
    finally:
        numpy.random.set_bit_generator(before)


def each_rank_its_own(folder: str) -> tuple[list[float], list[float]]:
    with DDPStrategy(device='cpu') as strategy:
        trainer = sft(strategy=strategy)
        seed_all(strategy.rank)
        draws()
        trainer.save_checkpoint(folder)
        want = draws()
        seed_all(50)
        trainer.load_checkpoint(folder)
        return want, draws()


def test_each_rank_keeps_its_own_generators(tmp_path):
    (want0, got0), (want1, got1) = run_distributed(each_rank_its_own, 2, str(tmp_path / 'saved'))
    assert (got0, got1) == (want0, want1)
    assert all(a != b for a, b in zip(want0, want1, strict=True))


def test_other_records_are_named_in_a_resume(tmp_path):
    sft(run_dir=tmp_path, max_steps=4).fit()
    same = sft(run_dir=tmp_path, max_steps=4)
    same.load_checkpoint('auto')
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        same.fit()
    other = sft([sequence([3], [5, 2])] * 16, run_dir=tmp_path, max_steps=4)
    other.load_checkpoint('auto')
    with pytest.warns(UserWarning, match='changed settings: records'):
        other.fit()
