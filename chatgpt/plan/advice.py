"""Finds the cheapest change that makes a run fit, and writes the advice of an out-of-memory error."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from chatgpt.plan import models
from chatgpt.plan.phases import Plan, make_plan
from chatgpt.plan.setup import Setup, read_config, show_bytes
from chatgpt.strategies.registry import FRUGAL, SHARDED, STRATEGY_OPTIONS


def changes(setup: Setup) -> Iterator[tuple[str, Setup]]:
    """Yields changes, those that cost least time or change least first; later ones of a kind include the earlier
    ones."""
    tokens = setup.max_prompt_tokens + setup.max_new_tokens
    collected = setup.experience_batch_size * setup.num_samples_per_prompt if setup.task == 'ppo' else 0
    share = max(setup.train_batch_size * setup.record_size, collected) // setup.ranks
    for rows in (4, 2, 1):
        if rows < share and (setup.max_tokens_per_batch is None or rows * tokens < setup.max_tokens_per_batch):
            yield f'max_tokens_per_batch={rows * tokens}', replace(setup, max_tokens_per_batch=rows * tokens)
    small = replace(setup, max_tokens_per_batch=tokens) if share > 1 else setup
    first = f'max_tokens_per_batch={tokens}, ' if share > 1 else ''
    if setup.precision == 'fp32' and setup.on_cuda:
        small, first = replace(small, precision='bf16'), f'{first}precision=bf16, '
        yield first.rstrip(', '), small
    frozen = (
        setup.task == 'ppo' and not setup.shared_trunk and (setup.has_initial_model or setup.reward_config is not None)
    )
    if setup.on_cuda and frozen and setup.offload == 'none' and not setup.memory_model.places_frozen:
        yield f'{first}offload=idle', replace(small, offload='idle')
    if not setup.gradient_checkpointing:
        small, first = replace(small, gradient_checkpointing=True), f'{first}gradient_checkpointing, '
        yield first.rstrip(', '), small
    if setup.shared_trunk:
        if setup.quantize == 'none':
            small, first = replace(small, quantize='nf4'), f'{first}quantize=nf4, '
            yield first.rstrip(', '), small
        if setup.optimizer == 'adamw':
            yield f'{first}optimizer=adamw8bit', replace(small, optimizer='adamw8bit')
        return
    on_trunk = list(_on_trunk(small, first))
    if setup.memory_model.whole and setup.num_processes > 1:
        small, first = with_strategy(small, SHARDED), f'{first}strategy={SHARDED}, '
        yield first.rstrip(', '), small
    for parts in _parts(small):
        cut = replace(small, strategy_options={**small.strategy_options, 'tensor_parallel': parts})
        yield f'{first}tensor_parallel={parts}', cut
    if setup.on_cuda and not small.memory_model.offloads and setup.tensor_parallel == 1:
        offloaded = with_strategy(small, small.entry.offloaded or FRUGAL)
        yield f'{first}strategy={offloaded.strategy}', offloaded
        if offloaded.memory_model.streams and setup.task == 'ppo':
            yield f'{first}strategy={offloaded.strategy}, stream_blocks', replace(offloaded, stream_blocks=True)
    if setup.critic == 'own' and setup.task == 'ppo':
        yield f'{first}critic=shared', replace(small, critic='shared')
    if not setup.lora_rank and setup.num_layers_unfrozen < 1:
        yield f'{first}lora_rank=16', replace(small, lora_rank=16)
        if setup.task == 'ppo' and setup.critic == 'own':
            yield f'{first}lora_rank=16, critic=shared', replace(small, lora_rank=16, critic='shared')
    yield from on_trunk
    if not setup.lora_rank and setup.num_layers_unfrozen < 1 and setup.task == 'ppo':
        if setup.on_cuda and not small.memory_model.offloads and setup.tensor_parallel == 1:
            critic = 'shared' if setup.critic == 'own' else setup.critic
            least = replace(with_strategy(small, FRUGAL), lora_rank=16, critic=critic, stream_blocks=True)
            yield f'{first}lora_rank=16, critic={critic}, strategy={FRUGAL}, stream_blocks', least


def _parts(setup: Setup) -> list[int]:
    """Returns the possible sizes of tensor parallelism on one machine; none if it is used already."""
    takes = setup.entry.takes_tensor_parallel
    cuts = setup.memory_model.can_be_cut and not setup.stream_blocks
    if not (setup.on_cuda and takes and setup.tensor_parallel == 1 and cuts) or setup.num_layers_unfrozen > 0:
        return []
    model = models.build('actor', read_config(setup.config), setup, layers=1)
    sizes = (n for n in (2, 4, 8) if n <= setup.on_machine and setup.num_processes % n == 0)
    return [n for n in sizes if models.can_be_cut(model, n)]


def _on_trunk(setup: Setup, first: str) -> Iterator[tuple[str, Setup]]:
    """Yields the same models as adapters on one frozen base in 4 bits, if that is possible."""
    if not setup.memory_model.whole or setup.num_layers_unfrozen > 0 or setup.critic == 'shared':
        return
    rank = '' if setup.lora_rank else 'lora_rank=16, '
    trunk = 'shared_trunk, ' if setup.task == 'ppo' else ''
    note = (
        ' and a reward model that is an adapter on the same base' if setup.task == 'ppo' and setup.reward_config else ''
    )
    changed = replace(
        setup, shared_trunk=True, quantize='nf4', lora_rank=setup.lora_rank or 16, own_reference=None, offload='none'
    )
    yield f'{first}{rank}{trunk}quantize=nf4{note}', changed


def with_strategy(setup: Setup, name: str) -> Setup:
    kept = {k: v for k, v in setup.strategy_options.items() if k in STRATEGY_OPTIONS}
    optimizer = 'adamw' if setup.optimizer.endswith('8bit') else setup.optimizer  # 8 bits need whole weights
    return replace(setup, strategy=name, strategy_options=kept, optimizer=optimizer)


def cheapest_change(setup: Setup) -> tuple[str, Plan] | None:
    """Returns the first change that makes the run fit, with its plan; None if none does."""
    candidates = changes(setup)
    while True:
        try:
            text, changed = next(candidates)
            plan = make_plan(changed)
        except StopIteration:
            return None
        except ValueError:  # the model does not support the change; the generator ends if settings exclude each other
            continue
        if plan.fits:
            return text, plan


def advice(setup: Setup) -> str:
    """Returns one line: what to change."""
    found = cheapest_change(setup)
    if found is None:
        return (
            'no single change of those known here makes it fit; take a smaller model, more processes (fsdp), or a '
            'larger device'
        )
    text, plan = found
    host = f', {show_bytes(plan.host_peak)} of host memory' if plan.host_peak >= 2**20 else ''
    return f'it fits with {text}: {show_bytes(plan.peak)} per device{host}'


def explain_out_of_memory(setup: Setup | None, error: Any) -> str:
    """Returns the end of an out-of-memory error's message."""
    if setup is None:
        return 'python -m chatgpt.plan tells what a run needs and the cheapest change that makes it fit'
    try:
        plan = make_plan(setup)
        return f'{plan.verdict()}. To go on: {advice(setup)}'
    except Exception as problem:
        # a failure here must not hide the error itself
        return f'no advice could be worked out ({type(problem).__name__}: {problem}); try python -m chatgpt.plan'
