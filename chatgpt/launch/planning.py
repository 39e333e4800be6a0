"""`--plan` of the example scripts, and the advice at the end of an out-of-memory error while models are loaded.

After loading the trainer gives that advice itself.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from chatgpt.launch.arguments import world_size_from_env
from chatgpt.launch.runs import DataRun, PPORun, Run

if TYPE_CHECKING:
    from chatgpt.plan import Setup


def _common(run: Run) -> dict[str, Any]:
    from chatgpt.plan.of_run import this_machine

    return {
        'strategy': run.strategy,
        'num_processes': world_size_from_env(),
        'precision': run.precision,
        'lora_rank': run.lora_rank,
        'gradient_checkpointing': run.gradient_checkpointing,
        'optimizer': run.optimizer,
        'max_tokens_per_batch': run.max_tokens_per_batch,
        **this_machine(),
    }


def setup_of_ppo(run: PPORun, inputs: Any) -> Setup:
    """The plan's view of a PPO run: `inputs` is what `build_ppo_inputs` gave. Prompts count with their longest."""
    from chatgpt.nn.loading import load_config
    from chatgpt.plan import Setup

    reward = load_config(run.reward_model, trust_remote_code=run.trust_remote_code) if run.reward_model else None
    return Setup(
        config=inputs.model_config,
        reward_config=reward,
        critic=run.critic if run.estimator.needs_values else 'none',
        num_layers_unfrozen=run.num_layers_unfrozen,
        kl=run.kl_coef > 0,
        experience_batch_size=run.experience_batch_size,
        num_samples_per_prompt=run.num_samples_per_prompt,
        offload=run.offload,
        update_timesteps=run.update_timesteps,
        train_batch_size=run.train_batch_size,
        max_prompt_tokens=max(len(inputs.prompts[i].ids) for i in range(len(inputs.prompts))),
        max_new_tokens=run.max_new_tokens or 64,
        **_common(run),
    )


def setup_of_data(run: DataRun, config: Any, task: Any) -> Setup:
    """The plan's view of SFT or of a reward model's training, every example of the greatest length."""
    from chatgpt.plan import Setup

    return Setup(
        config=config, task=task, train_batch_size=run.train_batch_size, max_prompt_tokens=1, max_new_tokens=max(run.max_tokens - 1, 1),
        **_common(run),
    )  # fmt: skip


def show_plan(make_setup: Callable[[], Setup]) -> None:
    """Print the plan on rank 0 and stop: exit code 0 where the run fits, 1 where it does not."""
    from chatgpt.plan import make_plan
    from chatgpt.plan.advice import advice

    if os.environ.get('RANK', '0') != '0':
        raise SystemExit(0)
    setup = make_setup()
    plan = make_plan(setup)
    print(f'{plan.table()}\n\n{plan.verdict()}', flush=True)
    if not plan.fits:
        print(advice(setup), flush=True)
    raise SystemExit(0 if plan.fits else 1)


@contextmanager
def memory_advice(make_setup: Callable[[], Setup]) -> Iterator[None]:
    """An out-of-memory error inside ends with what the run needs and the cheapest change that makes it fit."""
    from chatgpt.plan.of_run import note_on_memory

    try:
        yield
    except BaseException as error:
        if not getattr(error, '__notes__', None):
            note_on_memory(error, make_setup)
        raise

