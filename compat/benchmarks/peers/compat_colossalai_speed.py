"""Worker of `compat_colossalai.py speed`: one program for both sides, `PPOTrainer.fit` under `NaiveStrategy` on the work
of `work.py`.

With COLOSSALAI_SOURCE in the environment `chatgpt` is ColossalAI's, else it is the library with the names of
`chatgpt_compat.colossalai`. An update is an episode of one timestep: draw 32 sequences, score them, learn from them.

ColossalAI's package imports the library `colossalai` and pandas, of which PPO under `NaiveStrategy` uses nothing: empty
modules take their places.
It asks CUDA for its current device, also where there is none: the answer here is the CPU.
"""

from __future__ import annotations

import importlib
import os
import sys
import types
from copy import deepcopy
from importlib.machinery import ModuleSpec
from typing import Any

import torch
from work import ADAMW, KL_COEF, NEW_TOKENS, PAD, PROMPT_TOKENS, SEQUENCES, begin, prompt_ids, versions

source = os.environ.get('COLOSSALAI_SOURCE')
UNUSED = (
    'pandas',
    'colossalai',
    'colossalai.logging',
    'colossalai.nn',
    'colossalai.nn.optimizer',
    'colossalai.nn.parallel',
    'colossalai.nn.parallel.utils',
    'colossalai.tensor',
    'colossalai.utils',
    'colossalai.utils.model',
    'colossalai.utils.model.colo_init_context',
)


class _Anything(types.ModuleType):
    """An empty module: every name can be imported from it."""

    __path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith('__'):
            raise AttributeError(name)
        return type(name, (), {})


class _Device(str):
    """A device whose number is 0, as `f'cuda:{...}'` asks, and to which tensors can be moved."""

    def __format__(self, spec: str) -> str:
        return '0'


def stand_ins() -> None:
    for name in UNUSED:
        sys.modules[name] = made = _Anything(name)
        made.__spec__ = ModuleSpec(name, None)  # torch asks where pandas is
    torch.cuda.current_device = lambda: _Device('cpu')  # type: ignore[assignment,return-value]


def side(theirs: str, ours: str) -> Any:
    return importlib.import_module(f'chatgpt.{theirs}' if source else ours)


case, line = begin()
if source:
    stand_ins()
    sys.path.insert(0, source)
models = side('models.gpt', 'chatgpt_compat.colossalai.models')
heads = side('models.gpt', 'chatgpt.nn')
RewardModel = side('models.base', 'chatgpt.nn').RewardModel
NaiveStrategy = side('trainer.strategies', 'chatgpt_compat.colossalai.strategies').NaiveStrategy
PPOTrainer = side('trainer', 'chatgpt_compat.colossalai.trainers').PPOTrainer
Callback = side('trainer.callbacks', 'chatgpt_compat.colossalai.trainers').Callback


class Serve(Callback):  # type: ignore[misc]
    """From the start of an episode to that of the next, whatever a side does in between."""

    def on_episode_start(self, episode: int) -> None:
        if episode > 0:
            line.done(SEQUENCES * NEW_TOKENS, SEQUENCES)
        if not line.wait():
            os._exit(0)


def tokenize(samples: list[Any]) -> dict[str, Any]:
    ids = torch.stack(samples)
    return {'input_ids': ids, 'attention_mask': torch.ones_like(ids)}


strategy = NaiveStrategy()
actor, critic = models.GPTActor(pretrained=case.model), heads.GPTCritic(pretrained=case.model)
initial = deepcopy(actor)
reward_head = deepcopy(critic.value_head)
torch.nn.init.normal_(reward_head.weight, std=0.1)  # with the critic's own head every advantage would be 0
reward_model = RewardModel(deepcopy(critic.model), reward_head)
pairs = [(model, torch.optim.AdamW(model.parameters(), **ADAMW)) for model in (actor, critic)]
(actor, actor_optim), (critic, critic_optim), reward_model, initial = strategy.prepare(*pairs, reward_model, initial)
trainer = PPOTrainer(
    strategy,
    actor,
    critic,
    reward_model,
    initial,
    actor_optim,
    critic_optim,
    kl_coef=KL_COEF,
    max_epochs=case.epochs,
    train_batch_size=SEQUENCES,
    experience_batch_size=SEQUENCES,
    tokenizer=tokenize,
    dataloader_pin_memory=False,
    max_length=PROMPT_TOKENS + NEW_TOKENS,
    do_sample=True,
    temperature=1.0,
    pad_token_id=PAD,
    callbacks=[Serve()],
)
line.ready(**versions('loralib'), chatgpt="ColossalAI's" if source else 'ours', networks=4)
trainer.fit(prompt_ids(SEQUENCES), num_episodes=10**6, max_timesteps=1, update_timesteps=1)
