"""`--plan` of a run, the plan in its run.json, and the advice at the end of an out-of-memory error."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from chatgpt.launch.arguments import world_size_from_env
from chatgpt.launch.inputs import Inputs
from chatgpt.launch.runs import NO_PLAN, PPORun, RewardRun, SFTRun
from chatgpt.nn.loading import load_config
from chatgpt.plan import Setup, make_plan, of_run
from chatgpt.plan.advice import advice
from chatgpt.rules import is_changed
from chatgpt.strategies.precision import resolve_precision
from chatgpt.strategies.registry import STRATEGIES, STRATEGY_OPTIONS


def setup_of(inputs: Inputs) -> Setup:
    """The plan's view of a run. Prompts count with their longest, examples with the greatest length,
    episodes with the longest first observation that was seen and all the room that they have."""
    run = inputs.run
    device = torch.device('cuda' if torch.cuda.is_available() else 'cpu')
    common = {
        'config': inputs.config,
        'strategy': run.strategy,
        'num_processes': world_size_from_env(),
        'precision': resolve_precision(run.precision, device, only_16_bits=STRATEGIES.find(run.strategy).only_16_bits),
        'lora_rank': run.lora_rank,
        'shared_trunk': run.on_trunk,
        'quantize': run.quantize,
        'gradient_checkpointing': run.gradient_checkpointing,
        'logprob_kernel': run.logprob_kernel,
        'optimizer': run.optimizer,
        'max_tokens_per_batch': run.max_tokens_per_batch,
        'strategy_options': {name: getattr(run, name) for name in STRATEGY_OPTIONS if is_changed(run, name)},
        **of_run.this_machine(),
    }
    if isinstance(run, (SFTRun, RewardRun)):
        return Setup(
            task='reward_model' if isinstance(run, RewardRun) else 'sft',
            train_batch_size=run.train_batch_size,
            max_prompt_tokens=1,
            max_new_tokens=max(run.max_tokens - 1, 1),
            **common,
        )
    if not isinstance(run, PPORun):
        raise ValueError(NO_PLAN)
    reward = load_config(run.reward_model, trust_remote_code=run.trust_remote_code) if run.reward_model else None
    return Setup(
        reward_config=reward,
        critic=run.critic if run.estimator.needs_values else 'none',
        num_layers_unfrozen=run.num_layers_unfrozen,
        own_reference=not run.reference_in_actor,
        experience_batch_size=run.experience_batch_size,
        num_samples_per_prompt=run.num_samples_per_prompt,
        offload=run.offload,
        rollouts_elsewhere=run.rollout_workers > 0,
        update_timesteps=run.update_timesteps,
        train_batch_size=run.train_batch_size,
        max_prompt_tokens=max(
            [inputs.longest_opening, *(len(inputs.train[i].ids) for i in range(len(inputs.train or ())))]
        ),
        max_new_tokens=run.max_new_tokens or 64,
        **common,
    )


def show_plan(inputs: Inputs) -> None:
    """Print the plan on rank 0 and stop: exit code 0 where the run fits, 1 where it does not."""
    if os.environ.get('RANK', '0') != '0':
        raise SystemExit(0)
    setup = setup_of(inputs)
    plan = make_plan(setup)
    print(f'{plan.table()}\n\n{plan.verdict()}', flush=True)
    if not plan.fits:
        print(advice(setup), flush=True)
    raise SystemExit(0 if plan.fits else 1)


def planned(inputs: Inputs) -> dict[str, Any] | None:
    """Memory of a rank by plan; None where there is no plan for such a run."""
    try:
        plan = make_plan(setup_of(inputs))
    except Exception:  # a run must not end for want of a plan
        return None
    places = ('device',) if plan.setup.on_cuda else ('device', 'host')  # a CPU has one memory for both
    phases = {
        name: sum(sum(getattr(memory, place).values()) for place in places) / 2**30
        for name, memory in plan.phases.items()
    }
    return {'peak_gib': max(phases.values()), 'phases': phases}


@contextmanager
def memory_advice(inputs: Inputs) -> Iterator[None]:
    """An out-of-memory error inside ends with what the run needs and the cheapest change that makes it fit."""
    try:
        yield
    except BaseException as error:
        if not getattr(error, '__notes__', None):
            of_run.note_on_memory(error, lambda: setup_of(inputs))
        raise
