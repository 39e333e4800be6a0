"""The phases of a run and the peak memory of each: load, collect, score, learn; only load and learn without
collecting."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from chatgpt.nn.sweep import SWEEP_TOKENS
from chatgpt.plan import models
from chatgpt.plan.setup import Setup, read_config, show_bytes
from chatgpt.strategies.memory import Memory, ModelSize, ParameterSize
from chatgpt.strategies.streaming import FREE_SHARE

SAMPLING_COPIES = 4
"""live fp32 tensors of (rows, V) while a token is sampled: logits, log-probs, and two of filtering"""
_NAMES = {'initial': 'initial model', 'reward': 'reward model'}
_KINDS = {name: kind for kind, name in _NAMES.items()}
TRAINED = {'ppo': 'actor', 'sft': 'actor', 'reward_model': 'reward', 'critic': 'critic'}
"""task -> the kind of its first trained model"""
NF4_BYTES = (4 + 8 / 64 + 32 / (64 * 256)) / 8
"""per weight in 4 bits, with its share of the scales, and of the scales of scales (`chatgpt.nn.quantized`)"""
NF4_SCALES = 2 * 4 / 64
"""bytes per weight while it is dequantized: its share of the scales in fp32, before and after their mean is added"""
NF4_PACKING = 9.5
"""bytes per weight while bitsandbytes quantizes on a CPU: the scaled weight, indices of the 16 values in int32 and in
uint8, and half of these shifted"""
PACKED_BYTES = 2 << 30
"""the local engine packs a model's weights for the CPU up to this size"""
_KEPT = ('full copy', 'key/value cache')
"""entries of collecting that the local engine keeps for the next phase: the policy's copy and the cache"""
RECORD_BYTES = 49
"""per token of a response: its id (int64), the mask, and ten numbers in fp32"""
BUCKETS_BYTES = 2 * 64 << 20
"""two buckets of weights that are sent to rollout workers (`RemoteEngine(bucket_bytes=...)`)"""
PREFILL_TOKENS = 16384
"""most tokens of one forward over prompts (`chatgpt.rollout.local`)"""


@dataclass(frozen=True)
class Plan:
    """Bytes on the rank with the most, by phase."""

    setup: Setup
    phases: dict[str, Memory]

    @cached_property
    def peak(self) -> int:
        """The device bytes of the phase with the most, without the margin."""
        return max(sum(m.device.values()) for m in self.phases.values())

    @cached_property
    def peak_phase(self) -> str:
        return max(self.phases, key=lambda name: sum(self.phases[name].device.values()))

    @cached_property
    def host_peak(self) -> int:
        """The host bytes of one machine."""
        per_rank = max(sum(m.host.values()) for m in self.phases.values())
        return per_rank * self.setup.on_machine

    @cached_property
    def exchanged(self) -> int:
        """The bytes that a process sends to the others of its rank for each sequence that a model learns from, under
        sequence parallelism."""
        return models.exchanged_bytes(read_config(self.setup.config), self.setup)

    @property
    def limit(self) -> str | None:
        """The exceeded limit: 'device memory', 'host memory' or None."""
        s = self.setup
        device, host = (self.peak, self.host_peak) if s.on_cuda else (0, self.host_peak + self.peak * s.on_machine)
        if s.on_cuda and s.memory is not None and device > s.memory * (1 - s.margin):
            return 'device memory'
        if s.host_memory is not None and host > s.host_memory:
            return 'host memory'
        return None

    @property
    def fits(self) -> bool:
        return self.limit is None

    def host_of(self, name: str) -> int:
        return max(m.host.get(name, 0) for m in self.phases.values())

    def table(self) -> str:
        """Returns a table with a row per entry and a column per phase; entries in host memory are marked."""
        names = list(dict.fromkeys(n for m in self.phases.values() for n in m.device))
        hosted = [n for n in dict.fromkeys(n for m in self.phases.values() for n in m.host) if self.host_of(n) >= 2**20]
        rows = [['', *self.phases]]
        rows += [[n, *(show_bytes(m.device.get(n, 0)) for m in self.phases.values())] for n in names]
        rows.append(['device, one rank', *(show_bytes(sum(m.device.values())) for m in self.phases.values())])
        rows += [[f'{n} (host)', *(show_bytes(m.host.get(n, 0)) for m in self.phases.values())] for n in hosted]
        if hosted:
            rows.append(['host, one rank', *(show_bytes(sum(m.host.values())) for m in self.phases.values())])
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        lines = [
            '  '.join([row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True))])
            for row in rows
        ]
        return '\n'.join(line.rstrip() for line in lines)

    def verdict(self) -> str:
        """Returns one line: the memory needed, the memory available, and whether the run fits."""
        s = self.setup
        of_rank = {'tensor parallel': s.tensor_parallel, 'sequence parallel': s.sequence_parallel}
        together = ''.join(f' ({s.ranks} x {parts} {name})' for name, parts in of_rank.items() if parts > 1)
        need = (
            f'{s.strategy} on {s.num_processes} process{"es" * (s.num_processes > 1)}{together} needs '
            f'{show_bytes(self.peak)} per device'
        )
        need += f' (at its peak, {self.peak_phase})'
        need += f' and {show_bytes(self.host_peak)} of host memory per machine' if self.host_peak >= 2**20 else ''
        if s.sequence_parallel > 1:
            need += f'; it sends {show_bytes(self.exchanged)} per learned sequence to the others of its rank'
        have = (
            [f'{show_bytes(s.memory)} per device, of which {s.margin:.0%} are kept free']
            if s.memory is not None and s.on_cuda
            else []
        )
        have += [f'{show_bytes(s.host_memory)} of host memory'] if s.host_memory is not None else []
        if not have:
            return need
        return f'{need}. There is {" and ".join(have)}: ' + (
            'it fits' if self.fits else f'it does not fit, {self.limit} is too small'
        )


@torch.random.fork_rng(devices=[])
def make_plan(setup: Setup) -> Plan:
    """Plans a run. Reads configs; loads no weights, uses no device and does not change the global generators, because a
    running run may call it on one process."""
    try:
        plan = _plan(setup)
    except (ValueError, MemoryError):
        raise
    except Exception as error:  # a model's own, where its layers read numbers that a plan does not compute
        reason = ' '.join(str(error).split())[:200]
        raise ValueError(f'no plan for these models: {type(error).__name__}: {reason}') from error
    if setup.on_cuda or not setup.process:
        return plan
    return Plan(setup, {name: Memory({'process': setup.process}) + held for name, held in plan.phases.items()})


def _plan(setup: Setup) -> Plan:
    """Returns the plan, without the process's own memory."""
    config, reward_config = read_config(setup.config), read_config(setup.reward_config)
    if setup.shared_trunk:
        return _plan_of_shared_trunk(setup, config, reward_config is not None)
    if setup.task != 'ppo':
        return _plan_of_one_model(setup, config)
    actor = models.measure(models.build('actor', config, setup))
    trained = {'actor': (actor, config)}
    if setup.critic == 'own':
        of_critic = read_config(setup.critic_config) or config
        trained['critic'] = (models.measure(models.build('critic', of_critic, setup)), of_critic)
    frozen = {}
    if setup.has_initial_model:
        frozen['initial model'] = (models.measure(models.build('initial', config, setup)), config)
    if reward_config is not None:
        frozen['reward model'] = (models.measure(models.build('reward', reward_config, setup)), reward_config)
    load = Memory()
    static = Memory()
    for name, (size, _) in trained.items():
        whole = setup.memory_model.trained(name, size, setup)
        static += _without(whole, 'gradients')
        load += _without(_without(whole, 'gradients'), 'optimizer')
    for name, (size, _) in frozen.items():
        load += setup.memory_model.frozen(name, size, setup)
    if setup.offload == 'idle' and setup.on_cuda and frozen:
        waiting = [setup.memory_model.frozen(name, size, setup) for name, (size, _) in frozen.items()]
        scoring = static + max(waiting, key=lambda m: sum(m.device.values()))  # one model at a time is on the device
        for memory in waiting:
            for name, size_of_weights in memory.device.items():  # the copy in host memory is permanent
                static.add(name, size_of_weights, host=True)
                scoring.add(name, size_of_weights, host=True)
    else:
        for name, (size, _) in frozen.items():
            static += setup.memory_model.frozen(name, size, setup)
        scoring = static
    after_scoring = Memory()
    for size, _ in frozen.values():
        after_scoring.add('gathered weights', setup.memory_model.kept_gathered(size, setup))
    learning = static + after_scoring
    if setup.num_phases == 1:
        static, scoring, after_scoring = _without(static, 'optimizer'), _without(scoring, 'optimizer'), Memory()
    phases = {
        'load': load,
        'collect': _sending(setup, config, static + after_scoring)
        if setup.rollouts_elsewhere
        else static + after_scoring + _collect(setup, config, actor),
        'score': scoring + _score(setup, trained, frozen),
        'learn': learning + _learn_apart(setup, trained),
    }
    return Plan(setup, _with_kept(setup, phases))


def _plan_of_one_model(setup: Setup, config: Any) -> Plan:
    """SFT, a reward model, or a critic."""
    kind = TRAINED[setup.task]
    trained = {_NAMES.get(kind, kind): (models.measure(models.build(kind, config, setup)), config)}
    load = Memory()
    for name, (size, _) in trained.items():
        load += _without(setup.memory_model.trained(name, size, setup), 'gradients')
    return Plan(setup, {'load': _without(load, 'optimizer'), 'learn': load + _learn(setup, trained)})


def _plan_of_shared_trunk(setup: Setup, config: Any, with_reward: bool) -> Plan:
    """Plans one frozen base, and adapters and head of each model."""
    kinds = [TRAINED[setup.task]]
    if setup.task == 'ppo':
        kinds += ['critic'] * (setup.critic == 'own')
    sizes = {kind: models.measure(models.build(kind, config, setup)) for kind in [*kinds, *['reward'] * with_reward]}
    base = [p for p in sizes[kinds[0]].parameters if not p.trained]
    trunk = Memory()
    packed = [p for p in base if setup.quantize == 'nf4' and p.block is not None and len(p.shape) == 2]
    trunk.add('trunk', setup.itemsize * sum(p.numel for p in base if p not in packed))
    trunk.add('trunk', NF4_BYTES * sum(p.numel for p in packed))
    roles = {kind: ModelSize(tuple(p for p in size.parameters if p.trained)) for kind, size in sizes.items()}
    trained = {_NAMES.get(kind, kind): (roles[kind], config) for kind in kinds}
    frozen = {'reward model': (roles['reward'], config)} if with_reward and setup.task == 'ppo' else {}
    load, static = Memory() + trunk, Memory() + trunk
    elsewhere = 0.5 * sum(p.numel for p in packed) * (1 - 1 / setup.ranks) if setup.memory_model.shards_trunk else 0.0
    static.add('trunk', -elsewhere)  # it is loaded whole
    for name, (size, _) in trained.items():
        whole = _without(setup.memory_model.trained(name, size, setup), 'gradients')
        static += whole
        load += _without(whole, 'optimizer')
    for name, (size, _) in frozen.items():
        static += setup.memory_model.frozen(name, size, setup)
        load += setup.memory_model.frozen(name, size, setup)
    largest = max((p.numel for p in packed), default=0)
    dense, name = (4 + setup.itemsize) * largest, 'one dense weight'  # in the dtypes of reading and of quantizing
    if not setup.on_cuda and (packed or setup.itemsize < 4):  # reading and quantizing share memory, in whole blocks
        block = max(sum(p.numel for p in base if p.block == number) for number in {p.block for p in base} - {None})
        packing = NF4_PACKING + (4 + setup.itemsize if setup.itemsize < 4 else 0)
        dense, name = int(4 * block + packing * largest), 'one dense block'
    load.add(name, max(dense - (sum(load.device.values()) - sum(trunk.device.values())), 0))  # the roles are made later
    gathered = 0.5 if elsewhere else 0.0
    static.add('one dense weight', (setup.itemsize + NF4_SCALES + gathered) * largest)  # during a product
    collecting = static + Memory({'gathered trunk': math.ceil(elsewhere)} if elsewhere else {})
    if setup.task != 'ppo':
        return Plan(setup, {'load': load, 'learn': static + _learn(setup, trained)})
    phases = {
        'load': load,
        'collect': collecting + _collect(setup, config, roles['actor'], [p for p in base if p.block is None]),
        'score': static + _score(setup, trained, frozen),
        'learn': static + _learn_apart(setup, trained),
    }
    return Plan(setup, _with_kept(setup, phases))


def _without(memory: Memory, ending: str) -> Memory:
    return Memory(
        {n: s for n, s in memory.device.items() if not n.endswith(ending)},
        {n: s for n, s in memory.host.items() if not n.endswith(ending)},
    )


def rows_per_forward(setup: Setup, num_sequences: int) -> int:
    """Returns the number of sequences of one micro-batch on one rank."""
    share = -(-num_sequences // setup.memory_model.shares(setup.ranks))
    if setup.max_tokens_per_batch is None:
        return share
    return max(1, min(share, setup.max_tokens_per_batch // (setup.max_prompt_tokens + setup.max_new_tokens)))


def _collect(setup: Setup, config: Any, actor: ModelSize, multiplied: Sequence[ParameterSize] | None = None) -> Memory:
    """Returns the memory of collecting. multiplied: the weights that the engine may pack; None for those of the actor's
    blocks."""
    memory, itemsize = setup.memory_model.full_copy(actor, setup), setup.memory_model.full_itemsize(setup)
    if not setup.on_cuda and itemsize == 4 and not setup.stream_blocks:
        wide = [p.numel for p in multiplied or () if len(p.shape) == 2 and p.numel >= models.LEAST_PACKED]
        packed = 4 * (actor.packable if multiplied is None else sum(wide))
        memory.add('packed weights', packed if packed <= PACKED_BYTES else 0)
    share = -(-setup.experience_batch_size // setup.ranks) * setup.num_samples_per_prompt
    rows = min(-(-share // setup.sequence_parallel), setup.max_rows)
    capacity = setup.max_prompt_tokens + setup.max_new_tokens - 1  # the last token is not fed back
    if setup.on_cuda:  # sizes are rounded so that calls share graphs: `chatgpt.rollout.local.fixed_step`
        capacity = -(-capacity // 256) * 256
        rows = -(-rows // 32) * 32 if rows > 32 else 1 << (rows - 1).bit_length()
    memory.add('key/value cache', itemsize * models.cache_elements(config, setup.tensor_parallel) * rows * capacity)
    memory.add('sampling', 4 * SAMPLING_COPIES * rows * models.vocab_size(config))
    entering = max(1, min(rows, PREFILL_TOKENS // setup.max_prompt_tokens))
    memory.add('activations', models.prefill_bytes(config, setup, entering))
    later = sum(memory.device.get(name, 0) for name in ('packed weights', 'key/value cache', 'sampling', 'activations'))
    memory.add('gathering', max(setup.memory_model.gathering(actor, setup) - later, 0))
    return memory


def _sending(setup: Setup, config: Any, held: Memory) -> Memory:
    """Returns `held` plus the memory of collecting with remote workers: whole weights, on the device if they fit, but
    with tensor parallelism in host memory; and the buckets that are sent to the workers."""
    apart = ('tensor_parallel', 'sequence_parallel')
    options = {name: value for name, value in setup.strategy_options.items() if name not in apart}
    alone = replace(setup, strategy_options=options, num_processes=setup.ranks)
    size = models.measure(models.build('actor', config, alone))
    whole, strategy = alone.memory_model.full_itemsize(alone) * size.total, alone.memory_model
    free = None if setup.memory is None else setup.memory - sum(held.device.values())
    memory = Memory()
    too_large = setup.on_cuda and strategy.streams and free is not None and whole > FREE_SHARE * free
    if too_large or setup.tensor_parallel > 1:
        # one whole tensor at a time in fp32, and with tensor parallelism also its parts
        copies = 1 if setup.tensor_parallel == 1 else 2 + 1 / setup.tensor_parallel
        memory.add('gathering', 4 * max(p.numel for p in size.parameters) * copies)
        memory.add('full copy', whole / setup.on_machine, host=True)
        memory.add('weights on their way', BUCKETS_BYTES, host=True)
    else:
        memory = strategy.full_copy(size, setup)
        memory.add('weights on their way', BUCKETS_BYTES)
    return held + memory


def _records(setup: Setup, num_sequences: int) -> int:
    """Returns the bytes of a rank's share of records, with responses of full length."""
    each = 8 * setup.max_prompt_tokens + RECORD_BYTES * setup.max_new_tokens
    return -(-num_sequences // setup.ranks) * each


def _with_kept(setup: Setup, phases: dict[str, Memory]) -> dict[str, Memory]:
    """Adds the records of the phase, in host memory, and those that a rank receives for a train batch; and to scoring
    and learning what the local engine keeps for the next phase, if `setup.keep`."""
    sequences = setup.update_timesteps * setup.experience_batch_size * setup.num_samples_per_prompt
    for name in ('collect', 'score', 'learn'):
        phases[name].add('records', _records(setup, sequences), host=setup.on_cuda)
    if setup.ranks > 1:
        phases['learn'].add('records', _records(setup, setup.train_batch_size), host=setup.on_cuda)
    kept = sum(phases['collect'].device.get(name, 0) for name in _KEPT) if setup.keep else 0
    for name in ('score', 'learn'):
        phases[name] = phases[name] + Memory({'kept for generating': kept} if kept else {})
    return phases


def _score(setup: Setup, trained: dict[str, Any], frozen: dict[str, Any]) -> Memory:
    """Returns the memory of scoring: models score one after another, so the one with the most counts."""
    memory = Memory()
    rows = rows_per_forward(setup, setup.experience_batch_size * setup.num_samples_per_prompt)
    work: list[tuple[int, int]] = []
    scoring = [
        (n, m)
        for n, m in (*trained.items(), *frozen.items())
        if n != 'actor' or setup.kl and not setup.has_initial_model
    ]
    for name, (size, config) in scoring:
        kind, at_once = _KINDS.get(name, name), rows
        if name == 'reward model' and setup.max_tokens_per_batch is None:
            at_once = max(1, min(rows, SWEEP_TOKENS // (setup.max_prompt_tokens + setup.max_new_tokens)))
        activations = models.scoring_bytes(kind, config, setup, at_once)
        work.append((activations, setup.memory_model.gathered(size, setup, backward=False)))
    if work:
        activations, whole = max(work, key=sum)
        memory.add('activations', activations)
        memory.add('gathered weights', whole)
    return memory


def _learn_apart(setup: Setup, trained: dict[str, Any]) -> Memory:
    """Returns the memory of learning, where a critic learns apart the larger of the actor's and the critic's."""
    if not setup.critic_apart or 'critic' not in trained:
        return _learn(setup, trained)
    actor = {name: part for name, part in trained.items() if name != 'critic'}
    of_critic = replace(setup, train_batch_size=setup.critic_train_batch_size or setup.train_batch_size)
    found = [_learn(setup, actor), _learn(of_critic, {'critic': trained['critic']})]
    return max(found, key=lambda memory: sum(memory.device.values()))


def _learn(setup: Setup, trained: dict[str, Any]) -> Memory:
    """Returns the memory of learning: actor, then critic, for each micro-batch; then their steps. Gradients are kept
    until the steps."""
    memory = Memory()
    sequences = setup.train_batch_size * setup.record_size
    rows = rows_per_forward(setup, sequences)
    again = rows * setup.ranks < sequences
    strategy = setup.memory_model
    kept: list[int] = []
    for name, (size, _) in trained.items():
        whole = strategy.trained(name, size, setup)
        gradients = Memory(
            *({n: b for n, b in p.items() if n.endswith('gradients')} for p in (whole.device, whole.host))
        )
        if again:
            gradients += strategy.sums(name, size, setup)
        memory += gradients
        kept.append(sum(gradients.device.values()))
    # The gradients present at each moment: in the first micro-batch those of later models do not exist yet, and they
    # grow as activations are freed; in a step those of the models that have stepped are gone.
    work: list[tuple[int, int]] = []
    reductions: list[int] = []
    steps: list[int] = []
    for i, (name, (size, config)) in enumerate(trained.items()):
        grow = strategy.growing(size, setup, again=again)
        peak = models.learning_bytes(_KINDS.get(name, name), config, setup, rows, growing=grow)
        gathered = strategy.gathered(size, setup, backward=True)
        work.append((max(peak - (0 if again else sum(kept[i:])), 0), gathered))
        reductions.append(strategy.reduction(size, setup, again=again) - (0 if again else sum(kept[i + 1 :])))
        steps.append(strategy.step(size, setup) - sum(kept[:i]))
    activations, whole_weights = max(work, key=sum)
    memory.add('activations', activations)
    memory.add('gathered weights', whole_weights)
    done = activations + whole_weights  # all that follows is after the activations are freed
    memory.add('reduction of gradients', max(max(reductions) - done, 0))
    done = max(done, *reductions)
    memory.add('optimizer step', max(max(steps) - done, 0))
    return memory
