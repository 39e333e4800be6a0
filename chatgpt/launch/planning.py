"""`--plan` of a run, the plan in its run.json, and the advice at the end of an out-of-memory error."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from chatgpt.launch.arguments import world_size_from_env
from chatgpt.launch.beside import takes_reward_model
from chatgpt.launch.inputs import Inputs, sequences_of
from chatgpt.launch.runs import NO_PLAN, CriticRun, PPORun, RewardRun, SFTRun
from chatgpt.nn.loading import load_config
from chatgpt.plan import Setup, make_plan
from chatgpt.plan.advice import advice, explain_out_of_memory
from chatgpt.rules import is_changed
from chatgpt.strategies.precision import resolve_precision
from chatgpt.strategies.registry import STRATEGIES, STRATEGY_OPTIONS

OUT_OF_CPU_MEMORY = ("can't allocate memory", 'Cannot allocate memory')
"""messages of torch's CPU allocator, which raises a plain RuntimeError"""


def this_machine() -> dict[str, Any]:
    """Returns the memory of the first device and of the host, or the container's limit, as keywords of `Setup`."""
    on_cuda = torch.cuda.is_available()
    host = os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') if hasattr(os, 'sysconf') else None
    for name in ('memory.max', 'memory/memory.limit_in_bytes'):
        limit = Path('/sys/fs/cgroup', name)
        text = limit.read_text().strip() if limit.is_file() else ''
        if text.isdigit() and host is not None:
            host = min(host, int(text))
    memory = int(torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory) if on_cuda else None
    return {'on_cuda': on_cuda, 'memory': memory, 'host_memory': host}


def setup_of(inputs: Inputs) -> Setup:
    """Returns the planner's input for a run. Prompts and examples count with the length of the longest in the data,
    episodes with the longest first observation plus `max_new_tokens`."""
    run = inputs.run
    device = torch.device('cuda' if torch.cuda.is_available() else 'cpu')
    others = {
        'config': inputs.config,
        'num_processes': world_size_from_env(),
        'precision': resolve_precision(run.precision, device, only_16_bits=STRATEGIES.find(run.strategy).only_16_bits),
        'shared_trunk': run.on_trunk,
        'strategy_options': {name: getattr(run, name) for name in STRATEGY_OPTIONS if is_changed(run, name)},
        **this_machine(),
    }
    if isinstance(run, (SFTRun, RewardRun, CriticRun)):
        records, response = [], 1
        for record in map(sequences_of, inputs.train):
            records.append([torch.cat((s.prompt_ids, s.response_ids)) for s in record])
            # a run computes once what the answers to a prompt have in common
            common = shared_tokens(records[-1]) if len(record) > 1 else len(record[0].prompt_ids)
            response = max(response, *(len(ids) - common for ids in records[-1]))
        every = [ids for own in records for ids in own]
        others |= {'max_prompt_tokens': max(max(map(len, every)) - response, 1), 'max_new_tokens': response}
        others['shared_prompt_tokens'] = shared_tokens(every)
        others['sequences_per_record'] = max(map(len, records))
        return Setup.of(run, task='sft' if isinstance(run, SFTRun) else run.trained, **others)
    if not isinstance(run, PPORun):
        raise ValueError(NO_PLAN)
    reward = load_config(run.reward_model, trust_remote_code=run.trust_remote_code) if run.reward_model else None
    prompts = [inputs.train[i].ids for i in range(len(inputs.train or ()))]
    return Setup.of(
        run,
        reward_config=reward,
        critic_config=inputs.critic_config or (reward if takes_reward_model(run, inputs.reward_tokenizer) else None),
        critic=run.critic if run.estimator.needs_values else 'none',
        kl=run.kl_coef > 0 or run.reference_in_actor,
        own_reference=not run.reference_in_actor,
        rollouts_elsewhere=run.rollout_workers > 0,
        max_prompt_tokens=max([inputs.longest_opening, *map(len, prompts)]),
        shared_prompt_tokens=shared_tokens(prompts),
        max_new_tokens=run.max_new_tokens or 64,
        **others,
    )


def shared_tokens(sequences: Iterable[torch.Tensor]) -> int:
    """Returns the number of tokens with which all sequences begin."""
    common: torch.Tensor | None = None
    for ids in sequences:
        common = ids if common is None else common[: len(ids)]
        same = common == ids[: len(common)]
        common = common if bool(same.all()) else common[: int(same.int().argmin())]
    return 0 if common is None else len(common)


def show_plan(inputs: Inputs) -> None:
    """Prints the plan on rank 0 and exits, with code 0 if the run fits and 1 if it does not."""
    if os.environ.get('RANK', '0') != '0':
        raise SystemExit(0)
    setup = setup_of(inputs)
    plan = make_plan(setup)
    print(f'{plan.table()}\n\n{plan.verdict()}', flush=True)
    if not plan.fits:
        print(advice(setup), flush=True)
    raise SystemExit(0 if plan.fits else 1)


def planned(inputs: Inputs) -> dict[str, Any] | None:
    """Returns the planned memory of a rank, in GiB; None if there is no plan for such a run."""
    try:
        plan = make_plan(setup_of(inputs))
    except Exception:  # a run works without a plan
        return None
    places = ('device',) if plan.setup.on_cuda else ('device', 'host')  # a CPU holds both in one memory
    phases = {
        name: sum(sum(getattr(memory, place).values()) for place in places) / 2**30
        for name, memory in plan.phases.items()
    }
    return {'peak_gib': max(phases.values()), 'phases': phases}


def is_out_of_memory(error: BaseException) -> bool:
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or (
        isinstance(error, RuntimeError) and any(text in str(error) for text in OUT_OF_CPU_MEMORY)
    )


@contextmanager
def memory_advice(inputs: Inputs) -> Iterator[None]:
    """Adds to an out-of-memory error inside how much the run needs and the cheapest change that makes it fit."""
    try:
        yield
    except BaseException as error:
        if not getattr(error, '__notes__', None) and is_out_of_memory(error):
            try:
                setup: Setup | None = setup_of(inputs)
            except Exception:  # an error of the planner must not replace the out-of-memory error
                setup = None
            error.add_note(explain_out_of_memory(setup, error))
        raise
