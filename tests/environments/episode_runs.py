"""A small PPO run in an environment, whole or interrupted: `python episode_runs.py RUN_DIR [KILL_AT]`, which resumes if
possible."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from small_environments import Letters

from chatgpt.environments import EnvironmentSettings
from chatgpt.monitor.run_folder.rollouts import read_rollouts
from chatgpt.nn import Actor, Critic
from chatgpt.nn.records import fetched
from chatgpt.strategies import NaiveStrategy
from chatgpt.testing import byte_tokenizer, tiny_causal_lm
from chatgpt.trainer import PPOTrainer
from chatgpt.trainer.callbacks import ProgressBar, SaveCheckpoint


class Log(ProgressBar):
    """Records the episodes of each phase that callbacks get, and their staleness."""

    def __init__(self) -> None:
        super().__init__(enabled=False)
        self.phases: list[list[dict[str, Any]]] = []
        self.ages: list[set[int]] = []

    def on_make_experience_end(self, trainer: Any, experiences: list[Any]) -> None:
        experiences = fetched(trainer.strategy, experiences)
        names = ('index', 'group', 'score', 'prompt_text', 'response_text')
        tensors = ('prompt_ids', 'response_ids', 'response_mask', 'logprobs', 'values')
        self.ages.append({trainer.phase - e.version for e in experiences})
        self.phases.append(
            [
                {name: getattr(e, name) for name in names}
                | {name: getattr(e, name).tolist() for name in tensors}
                | {'turns': e.episode.turns, 'end': e.episode.end, 'success': e.episode.success}
                for e in experiences
            ]
        )


def same_to_rounding(found: list[list[dict[str, Any]]], wanted: list[list[dict[str, Any]]]) -> None:
    """Compares phases of `Log` up to rounding, for runs with other kernels or batches."""
    assert len(found) == len(wanted) > 0
    for phase, want in zip(found, wanted, strict=True):
        assert [e['index'] for e in phase] == [e['index'] for e in want]
        for e, w in zip(phase, want, strict=True):
            for name in e:
                rounded = name in ('logprobs', 'values', 'score')
                assert e[name] == (pytest.approx(w[name], abs=1e-4) if rounded else w[name]), name


def make(
    run_dir: Path | None,
    environment: Any = Letters,
    *,
    settings: Any = None,
    callbacks: Any = (),
    strategy: Any = None,
    **config: Any,
) -> Any:
    tokenizer = byte_tokenizer()
    torch.manual_seed(0)
    size = {'vocab_size': len(tokenizer), 'n_positions': 128}
    actor, critic = Actor(tiny_causal_lm('gpt2', **size)), Critic(tiny_causal_lm('gpt2', **size))
    rest = {'kl_coef': 0.0, 'max_new_tokens': 40}
    needs_critic = config.get('advantage_estimator', 'gae') == 'gae'
    strategy = strategy or NaiveStrategy(seed=3)
    (actor, actor_optim), (critic, critic_optim) = strategy.prepare(
        *((model, torch.optim.AdamW(model.parameters(), lr=1e-2)) for model in (actor, critic))
    )
    return PPOTrainer(
        strategy,
        actor,
        critic if needs_critic else None,
        *(None, None, actor_optim),
        critic_optim if needs_critic else None,
        tokenizer=tokenizer,
        environment=environment,
        environment_settings=settings or EnvironmentSettings(max_turn_tokens=4, num_workers=1),
        run_dir=run_dir,
        callbacks=[*callbacks, *([SaveCheckpoint()] if run_dir is not None else [])],
        **({'experience_batch_size': 2, 'num_samples_per_prompt': 2, 'train_batch_size': 4} | rest | config),
    )


def fit(trainer: Any, phases: int = 3) -> None:
    """Trains; a phase has two timesteps of four episodes of three steps: 24 steps."""
    trainer.fit(max_timesteps=2 * phases, update_timesteps=2)


def left(run_dir: Path) -> dict[str, Any]:
    """Returns a run's metrics without times, its recorded sequences, and the weights in its newest checkpoint."""
    lines = [json.loads(line) for line in (run_dir / 'metrics.jsonl').read_text().splitlines()]
    metrics = [{k: v for k, v in line.items() if not k.startswith('perf/')} for line in lines]
    rollouts = read_rollouts(run_dir)
    newest = max((run_dir / 'checkpoints').glob('step-*'))
    weights = {p.name: p.read_bytes() for p in sorted(newest.rglob('*.safetensors'))}
    assert weights and len(metrics) == 3 and len(rollouts) == 24
    return {'metrics': metrics, 'rollouts': repr(rollouts), 'weights': weights}


if __name__ == '__main__':
    folder = Path(sys.argv[1])
    Letters.at = int(sys.argv[2]) if len(sys.argv) > 2 else None
    Letters.do = staticmethod(lambda: os.kill(os.getpid(), signal.SIGKILL))
    trainer = make(folder)
    trainer.load_checkpoint('auto')
    fit(trainer)
