"""Checkpoints of the command line do not hold frozen weights that a resume loads from where they came from."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from byte_runs import SETTINGS, SIZES, byte_tokenizer, lengths

from chatgpt.nn import AutoActor
from chatgpt.strategies import ColossalAIStrategy, FSDPStrategy, NaiveStrategy
from chatgpt.strategies.checkpoint import CheckpointError, CheckpointReader
from chatgpt.testing import tiny_causal_lm
from chatgpt.testing.processes import run_distributed
from chatgpt.trainer import PPOTrainer

PHASES = {'max_timesteps': 1, 'update_timesteps': 1}
BASE = 'actor/model.transformer.wte.weight'


@pytest.fixture
def base(tmp_path) -> Path:
    torch.manual_seed(0)
    tiny_causal_lm('gpt2', **SIZES | {'vocab_size': 260}).save_pretrained(tmp_path / 'base')
    return tmp_path / 'base'


def trainer_of(base: Path, run_dir: Path | None, strategy: Any = None, **options: Any) -> PPOTrainer:
    strategy = strategy or NaiveStrategy(seed=3)
    with strategy.model_init_context():
        actor = AutoActor(pretrained=str(base), **(options or {'lora_rank': 2}))
    trained = [p for p in actor.parameters() if p.requires_grad]
    actor, optimizer = strategy.prepare((actor, strategy.make_optimizer(trained, 0.01)))
    models = (actor, None, lengths, None, optimizer)
    trainer = PPOTrainer(strategy, *models, tokenizer=byte_tokenizer(), run_dir=run_dir, **SETTINGS)
    trainer.left_out = {}  # as on the command line
    return trainer


def learn(trainer: PPOTrainer, episodes: int) -> PPOTrainer:
    trainer.fit(['a', 'b', 'c'], num_episodes=episodes, **PHASES)
    return trainer


def weights(trainer: PPOTrainer) -> dict[str, torch.Tensor]:
    return trainer.strategy.full_state_dict(trainer.actor)


def names_in(checkpoint: Path) -> set[str]:
    return CheckpointReader(checkpoint).names()


@pytest.mark.parametrize('options', [{'lora_rank': 2}, {'num_layers_unfrozen': 1}], ids=str)
def test_a_resume_loads_frozen_weights_from_the_base(tmp_path, base, options):
    whole = learn(trainer_of(base, None, **options), 3)
    first = learn(trainer_of(base, None, **options), 2)
    first.save_checkpoint(tmp_path / 'saved')
    trained = {f'actor/{name}' for name, p in first.actor.named_parameters() if p.requires_grad}
    held = {name for name in names_in(tmp_path / 'saved') if name.startswith('actor/') and 'ref_branch' not in name}
    assert held == trained and BASE not in held
    again = trainer_of(base, None, **options)
    assert again.load_checkpoint(tmp_path / 'saved')
    learn(again, 3)
    assert all(torch.equal(value, weights(again)[name]) for name, value in weights(whole).items())
    again.save_checkpoint(tmp_path / 'later')
    assert names_in(tmp_path / 'later') == names_in(tmp_path / 'saved')


def test_a_trainer_made_in_python_writes_all_weights(tmp_path, base):
    trainer = trainer_of(base, None)
    trainer.left_out = None
    learn(trainer, 1).save_checkpoint(tmp_path / 'whole')
    assert BASE in names_in(tmp_path / 'whole')
    learn(trainer_of(base, None), 1).save_checkpoint(tmp_path / 'part')
    trainer.load_checkpoint(tmp_path / 'part')
    trainer.save_checkpoint(tmp_path / 'whole again')
    assert names_in(tmp_path / 'whole again') == names_in(tmp_path / 'whole')


def test_a_folded_adapter_is_in_the_checkpoint(tmp_path, base):
    from chatgpt.nn.peft_format import export_peft

    export_peft(trainer_of(base, None).actor, tmp_path / 'adapter', base_model=str(base))
    trainer = trainer_of(tmp_path / 'adapter', None)
    trainer.save_checkpoint(tmp_path / 'saved')
    assert BASE in names_in(tmp_path / 'saved')


def test_another_base_is_refused(tmp_path, base):
    learn(trainer_of(base, None), 1).save_checkpoint(tmp_path / 'saved')
    model = tiny_causal_lm('gpt2', **SIZES | {'vocab_size': 260})
    model.load_state_dict(trainer_of(base, None, lora_rank=0).actor.model.state_dict())
    with torch.no_grad():
        model.transformer.ln_f.bias[3] += 1e-6
    model.save_pretrained(base)
    with pytest.raises(CheckpointError, match=r'\(1 of \d+ tensors differ, first model.transformer.ln_f.bias'):
        trainer_of(base, None).load_checkpoint(tmp_path / 'saved')


def test_weights_that_were_trained_before_stay_in_the_checkpoint(tmp_path, base):
    learn(trainer_of(base, None, lora_rank=0), 1).save_checkpoint(tmp_path / 'all')  # all weights are trained
    assert BASE in names_in(tmp_path / 'all')
    frozen = trainer_of(base, None, lora_rank=0)
    frozen.load_checkpoint(tmp_path / 'all')
    frozen.actor.model.transformer.wte.weight.requires_grad_(False)
    frozen.save_checkpoint(tmp_path / 'frozen')
    assert names_in(tmp_path / 'frozen') == names_in(tmp_path / 'all')
    thawed = learn(trainer_of(base, None), 1)
    thawed.save_checkpoint(tmp_path / 'adapters')
    assert BASE not in names_in(tmp_path / 'adapters')
    thawed.actor.model.transformer.wte.weight.requires_grad_(True)
    thawed.save_checkpoint(tmp_path / 'thawed')
    assert BASE in names_in(tmp_path / 'thawed')


def move(base: Path, folder: Path) -> None:
    """Saves under FSDP2, tensor parallelism and ZeRO, and loads under the other and without."""
    made: dict[str, Any] = {
        'fsdp': lambda: FSDPStrategy(seed=3, device='cpu'),
        'tensors': lambda: FSDPStrategy(seed=3, device='cpu', tensor_parallel=2),
        'bf16': lambda: FSDPStrategy(seed=3, device='cpu', precision='bf16', meta_init=True),
    }
    if importlib.util.find_spec('colossalai') is not None:
        made['zero'] = lambda: ColossalAIStrategy(seed=3, stage=2, precision='fp32')
    kept = {}
    for name, make in made.items():
        with make() as strategy:
            trainer = trainer_of(base, None, strategy)
            learn(trainer, 1).save_checkpoint(folder / name)
            kept[name] = weights(trainer)
            assert BASE not in names_in(folder / name)
    for name, make in made.items():
        with make() as strategy:
            for source in made:
                trainer = trainer_of(base, None, strategy)
                trainer.load_checkpoint(folder / source)
                found = weights(trainer)
                assert all(torch.equal(found[key], value) for key, value in kept[source].items()), (name, source)


@pytest.mark.system
def test_between_strategies(tmp_path, base):
    run_distributed(move, 2, base, tmp_path)
    for source in ('fsdp', 'bf16'):
        trainer_of(base, None).load_checkpoint(tmp_path / source)
