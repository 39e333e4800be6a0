"""A trainer that counts phases and calls the hooks of its callbacks."""

from __future__ import annotations

import json
import types
from pathlib import Path

import torch

from chatgpt.strategies.checkpoint import CheckpointError
from chatgpt.trainer import callbacks as cb
from chatgpt.types import Experience


def experience(
    index: int, prompt: list[int], response: list[int], score: float = 0.0, gap: float = 0.5, **more
) -> Experience:
    """Returns a record with the per-token KL `gap` to the initial model."""
    n = len(response)
    zeros, ones = torch.zeros(n), torch.ones(n, dtype=torch.bool)
    given = {'index': index, 'group': index, 'score': score, 'finish_reason': 'eos', 'response_mask': ones}
    given |= {
        'prompt_ids': torch.tensor(prompt),
        'response_ids': torch.tensor(response),
        'edge_distances': ones.float(),
    }
    given |= dict.fromkeys(('logprobs', 'filtered_logprobs', 'old_logprobs', 'values'), zeros)
    given |= dict.fromkeys(('rewards', 'advantages', 'returns'), zeros)
    return Experience(**given | {'ref_logprobs': zeros - gap, 'kl': zeros + gap} | more)


class FakeTrainer:
    """A trainer that counts phases and calls hooks as a real one does; its checkpoints are folders with a manifest."""

    def __init__(self, callbacks, run_dir=None, *, rank=0, num_phases=4, dtype=torch.float32, **config):
        processes = types.SimpleNamespace(world_size=1)
        names = {'rank': rank, 'is_rank_0': rank == 0, 'world_size': 1, 'processes': processes}
        self.strategy = types.SimpleNamespace(**names, dtype=dtype, device=torch.device('cpu'))
        self.config = types.SimpleNamespace(**config, to_dict=lambda: dict(config))
        self.callbacks = cb.CallbackList(callbacks)
        self.run_dir = Path(run_dir) if run_dir is not None else None
        self.num_phases = num_phases
        self.total_updates = None
        self.phase = 0
        self.tokenizer = None
        self.last_experiences = [experience(7, [3, 4], [5, 6, 1], 2.0, prompt_text='a b', response_text='c\nd')]
        self.stop = False
        self.disk_full = False

    @property
    def checkpoint_dir(self):
        return self.run_dir / 'checkpoints' if self.run_dir is not None else None

    def request_stop(self):
        self.stop = True

    def finish_saving(self, *, wait=True):
        pass

    def save_checkpoint(self, path=None, *, score=None, background=False):
        if self.disk_full:
            raise CheckpointError(f'{path}: could not be written (No space left on device)')
        path.mkdir(parents=True, exist_ok=True)
        state = {'phase': self.phase, 'callbacks': self.callbacks.state_dict()}
        (path / 'state.json').write_text(json.dumps(state))
        (path / 'manifest.json').write_text(json.dumps({'meta': {'score': score}}))
        self.callbacks.on_checkpoint(self, path)
        return path

    def load_checkpoint(self, path):
        state = json.loads((path / 'state.json').read_text())
        self.phase = state['phase']
        self.callbacks.load_state_dict(state['callbacks'])
        self.callbacks.on_resume(self, path)

    def run_phase(self, metrics, batches=1):
        self.callbacks.on_make_experience_start(self)
        self.callbacks.on_make_experience_end(self, self.last_experiences)
        self.callbacks.on_learn_epoch_start(self, 0)
        for _ in range(batches):
            self.callbacks.on_learn_batch_start(self)
            self.callbacks.on_learn_batch_end(self, {'policy_loss': 0.0, 'value_loss': 0.0})
        self.callbacks.on_learn_epoch_end(self, 0)
        self.phase += 1
        self.callbacks.on_phase_end(self, self.phase, metrics)

    def fit(self, phases, batches=1):
        self.callbacks.on_fit_start(self)
        for metrics in phases:
            if self.stop:
                break
            self.run_phase(metrics, batches)
        self.callbacks.on_fit_end(self)
