"""Worker: the cases of `compat_recent_work.py` with TRL 1.12.0, as JSON. Arguments: folder of the models, file."""

from __future__ import annotations

import json
import sys
import tempfile
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import transformers
import trl
from compat_recent_work import LEARNERS, PAD, PPO, PROMPTS, run_learner, run_ppo
from transformers import TrainerCallback
from trl import DPOConfig, DPOTrainer, RewardConfig, RewardTrainer, SFTConfig, SFTTrainer
from trl.experimental.ppo import PPOConfig, PPOTrainer, ppo_trainer


def watch(trainer: Any, answers: dict[tuple[int, ...], list[int]]) -> tuple[Any, list[Any]]:
    """Answer with given responses, and keep what `train` has computed when it whitens the advantages."""
    seen: dict[str, Any] = {}
    whiten = ppo_trainer.masked_whiten

    def batch_generation(model: Any, queries: Any, size: int, pad: int, config: Any) -> tuple[Any, Any]:
        length = trainer.args.response_length
        rows = [answers[tuple(q.tolist())] for q in queries]
        padded = torch.tensor([row + [PAD] * (length - len(row)) for row in rows])
        whole = torch.cat([queries, padded], dim=1)
        with torch.no_grad():
            logits = ppo_trainer.forward(model, whole, pad).logits[:, queries.shape[1] - 1 : -1]
        return whole, logits / (trainer.args.temperature + 1e-7)

    def masked_whiten(values: Any, mask: Any, shift_mean: bool = True) -> Any:
        whitened = whiten(values, mask, shift_mean)
        if shift_mean:
            seen.update(sys._getframe(1).f_locals, whitened=whitened)
        return whitened

    ppo_trainer.batch_generation, ppo_trainer.masked_whiten = batch_generation, masked_whiten

    def made() -> dict[str, list[list[float]]]:
        order = [[tuple(q.tolist()) for q in seen['queries']].index(tuple(p)) for p in PROMPTS]
        kept = ~seen['padding_mask']

        def rows(matrix: Any) -> list[list[float]]:
            return [matrix[i][kept[i]].tolist() for i in order]

        return {
            'scores': [[seen['scores'][i].item()] for i in order],
            'kl': rows(seen['kl']),
            'rewards': rows(seen['rewards']),
            'values': rows(seen['values']),
            'returns': rows(seen['returns']),
            'advantages': rows(seen['whitened']),
        }

    # Else every micro-batch of the last batch of a pass over the data is an optimizer step of its own.
    trainer.accelerator.gradient_state.plugin_kwargs['sync_with_dataloader'] = False
    return made, [trainer.optimizer.optimizer]


class BeforeStep(TrainerCallback):
    def __init__(self, call: Any) -> None:
        self.call = call

    def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
        self.call()


def main() -> None:
    folder, out = sys.argv[1:]
    torch.set_num_threads(1)
    folders = {name: f'{folder}/{name}' for name in ('policy', 'reference', 'reward', 'value')}
    names = SimpleNamespace(
        **{
            config.__name__: partial(config, use_cpu=True) for config in (PPOConfig, DPOConfig, SFTConfig, RewardConfig)
        },
        PPOTrainer=PPOTrainer,
        DPOTrainer=DPOTrainer,
        SFTTrainer=SFTTrainer,
        RewardTrainer=RewardTrainer,
        first_step=lambda trainer, call: trainer.add_callback(BeforeStep(call)),
    )
    with tempfile.TemporaryDirectory() as run:
        ppo = {name: run_ppo(names, watch, name, folders, run) for name in PPO}
        learners = {name: run_learner(names, name, folders, run) for name in LEARNERS}
    versions = {'trl': trl.__version__, 'torch': torch.__version__, 'transformers': transformers.__version__}
    with open(out, 'w') as file:
        json.dump({'versions': versions, 'ppo': ppo, 'learners': learners}, file)
        file.write('\n')


if __name__ == '__main__':
    main()
