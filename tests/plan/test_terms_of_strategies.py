"""Single terms of a plan compared with real tensors: chunks, sums and buckets of ColossalAI, roots of FSDP, packed
weights, chunks of log-probs."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from unittest import mock

import pytest
import torch
from optional_packages import needs_colossalai

from chatgpt.batching import collate
from chatgpt.functional import logprobs
from chatgpt.nn import Actor, head_kernels
from chatgpt.plan import Setup, models
from chatgpt.strategies.colossalai.memory import GeminiMemory, chunk_size
from chatgpt.strategies.fsdp import FSDPMemory
from chatgpt.strategies.memory import Layout, Memory, MemoryModel, ModelSize, ParameterSize
from chatgpt.testing.fakes import tiny_config
from chatgpt.testing.processes import run_distributed
from chatgpt.testing.tiny import tiny_sequences
from chatgpt.trainer import strategies as s

CONFIG = tiny_config('gpt2', positions=64, layers=3)
BUCKET = 20_000
VARIANTS = {'full': {}, 'lora': {'lora_rank': 2}, 'hydra': {'num_layers_unfrozen': 1}}
SMALL_CHUNKS = {'min_chunk_size_mb': 0.02, 'search_range_mb': 0.02, 'hidden_dim': 32}


def nbytes(tensors) -> int:
    """Returns bytes of distinct storages."""
    return sum(t.untyped_storage().nbytes() for t in {t.untyped_storage().data_ptr(): t for t in tensors}.values())


@contextmanager
def taken_kernels():
    """Yields the list of kernels that compute log-probs inside this context."""
    names = []
    with ExitStack() as patches:
        for name in ('chunked_logprobs', 'fused_logprobs'):
            own = getattr(head_kernels, name)
            noted = lambda *a, _own=own, _name=name, **k: names.append(_name) or _own(*a, **k)  # noqa: E731
            patches.enter_context(mock.patch.object(head_kernels, name, noted))
        yield names


def new_actor(variant: str) -> Actor:
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    return Actor(AutoModelForCausalLM.from_config(CONFIG), **VARIANTS[variant])


def loss_of(strategy, actor):
    with strategy.autocast():
        return actor(collate(tiny_sequences(seed=0)[:2])).logprobs.float().sum() / 100


# ---------------------------------------------------------------------- Gemini


def held_by_gemini(variant: str, options: dict) -> dict[str, int]:
    """Returns bytes of this rank's tensors after two micro-batches, a step and two more, by the planner's names."""
    with s.ColossalAIStrategy(stage=3, precision='bf16', **options) as strategy:
        actor = new_actor(variant)
        optimizer = strategy.make_optimizer([p for p in actor.parameters() if p.requires_grad])
        (actor, optimizer), frozen = strategy.prepare((actor, optimizer), new_actor('full'))
        for number in range(5):
            strategy.backward(loss_of(strategy, actor), actor, optimizer)
            if number == 1:
                strategy.optimizer_step(optimizer)
        with torch.no_grad():
            actor(collate(tiny_sequences(seed=0)[:2]))  # stores the last gradients
        engine, its = (strategy._engines[id(strategy.unwrap(m))] for m in (actor, frozen))
        masters = [chunk.paired_chunk.payload for chunk in engine.chunks]
        moments = [v for state in optimizer.state.values() for v in state.values() if torch.is_tensor(v) and v.dim()]
        return {
            'actor weights': nbytes([c.payload for c in engine.chunks] + [p.data for p in engine.untrained()]),
            'actor masters': nbytes(masters),
            'actor optimizer': sum(t.nbytes for t in moments),
            'actor sums of gradients': nbytes(engine.sums),
            'actor exact values': nbytes(engine._kept.values()),
            'initial model weights': nbytes(
                c.payload for c in {its.model.chunk_manager.get_chunk(p) for p in its.module.parameters()}
            ),
            'initial model exact values': nbytes(its._kept.values()),
        }


GEMINI = [('lora', {}), ('full', SMALL_CHUNKS), ('hydra', SMALL_CHUNKS)]


def held_by_geminis() -> list[dict[str, int]]:
    return [held_by_gemini(*case) for case in GEMINI]


@needs_colossalai
def test_chunks_of_gemini_are_exact():
    ranks = run_distributed(held_by_geminis, 2)
    for number, (variant, options) in enumerate(GEMINI):
        setup = Setup(
            config=CONFIG,
            strategy='colossalai_gemini',
            strategy_options={'stage': 3, **options},
            num_processes=2,
            precision='bf16',
            **VARIANTS[variant],
        )
        size = models.measure(models.build('actor', CONFIG, setup))
        trained = setup.memory_model.trained('actor', size, setup)
        frozen = setup.memory_model.frozen(
            'initial model', models.measure(models.build('initial', CONFIG, setup)), setup
        )
        planned = {**trained.device, **trained.host, **frozen.device, **frozen.host}
        planned |= setup.memory_model.sums('actor', size, setup).device
        most = {name: max(held[number][name] for held in ranks) for name in ranks[0][number]}
        assert {name: planned.get(name, 0) for name in most} == pytest.approx(most, rel=0.002), (variant, options)
        chunks = setup.memory_model.chunks(size, setup)
        assert (chunks.gathered > 0) is bool(options)
        if options and variant == 'full':  # several chunks, half of them on this rank
            assert chunks.largest < chunks.elements < 0.8 * size.trained


def test_a_chunk_size_by_hand():
    """Parameters of 30, 30 and 40: chunks of 40 leave 10 + 10 + 0 empty, of 50: 20 + 20 + 10, of 60: 0 + 20. A chunk is
    at least 35, in steps of 10, and divides by the ranks."""
    assert chunk_size((30, 30, 40), 35, 10, 10, 1) == 40
    assert chunk_size((30, 30, 40), 35, 20, 10, 1) == 40  # equal waste: the first
    assert chunk_size((30, 30, 40), 45, 20, 10, 1) == 60
    assert chunk_size((30, 30, 40), 35, 10, 10, 3) == 42


def test_a_model_below_the_smallest_chunk_is_whole_and_never_offloaded():
    setup = Setup(config=CONFIG, strategy='colossalai_gemini_cpu', num_processes=4, precision='bf16')
    size = models.measure(models.build('actor', CONFIG, setup))
    whole = setup.memory_model.trained('actor', size, setup)
    assert (whole.device['actor masters'], whole.host) == (4 * size.total, {})
    cut = GeminiMemory(True, min_chunk=0.01, search_range=0.01, interval=32).trained('actor', size, setup)
    assert 'actor masters' not in cut.device and cut.host['actor masters'] < 0.5 * 4 * size.total


# ---------------------------------------------------------------------- ZeRO


def made_by_zero(stage: int, precision: str) -> dict[str, list[int]]:
    """Returns the peak bytes that ColossalAI's reductions and its step add."""
    with s.ColossalAIStrategy(
        stage=stage, precision=precision, placement_policy='cuda', reduce_bucket_size=BUCKET
    ) as strategy:
        actor = new_actor('full')
        optimizer = strategy.make_optimizer(actor.parameters())
        actor, optimizer = strategy.prepare((actor, optimizer))
        strategy.backward(loss_of(strategy, actor), actor, optimizer)
        strategy.optimizer_step(optimizer)  # allocates the moments
        upstream = strategy._engine(optimizer).optimizer
        made: dict[str, list[int]] = {'reduction': [], 'step': []}

        def watched(name, function):
            def call(*args, **kwargs):
                with models.LiveBytes(known) as live:
                    result = function(*args, **kwargs)
                made[name].append(live.peak)
                return result

            return call

        for number in range(2):
            loss = loss_of(strategy, actor)
            known = [*strategy.unwrap(actor).parameters()]
            if number:
                upstream._run_reduction = watched('reduction', upstream._run_reduction)
            strategy.backward(loss, actor, optimizer)
        shards = [g for store in upstream.pg_to_grad_store.values() for g in store.get_working_grads_by_group_id(0)]
        states = [v for state in optimizer.state.values() for v in state.values()]
        known = [*strategy.unwrap(actor).parameters(), *upstream.working_to_master_param.values(), *shards, *states]
        engine = strategy._engine(optimizer)
        watched('step', engine.step)(engine.norm(), 1.0)
        return made


ZERO = [(2, 'fp32'), (2, 'bf16'), (1, 'fp32')]


def made_by_zeros() -> list[dict[str, list[int]]]:
    return [made_by_zero(*case) for case in ZERO]


@needs_colossalai
def test_buckets_of_zero():
    """A reduction allocates what the plan counts, except earlier storages of autograd and a few parameters (buckets are
    not quite full); so does a step, except gloo's copy, which Python does not see."""
    ranks = run_distributed(made_by_zeros, 2)
    for (stage, precision), made in zip(ZERO, ranks[0], strict=True):
        setup = Setup(
            config=CONFIG,
            strategy=f'colossalai_zero{stage}',
            strategy_options={'stage': stage, 'placement_policy': 'cuda', 'reduce_bucket_size': BUCKET},
            num_processes=2,
            precision=precision,
            on_cuda=False,
        )
        size = models.measure(models.build('actor', CONFIG, setup))
        assert size.trained > 2 * BUCKET > 4 * size.largest_trained
        itemsize = setup.itemsize
        in_bucket = setup.memory_model.reduction(size, setup, again=True) - itemsize * BUCKET
        slack = 4 * itemsize * size.largest_trained
        if stage == 2:
            seen = itemsize * BUCKET  # counted storages of autograd, if an operation returns a view of them
            assert in_bucket - slack <= max(made['reduction']) <= in_bucket + seen + slack
        step = setup.memory_model.step(size, setup) - 2 * itemsize * min(size.trained // 2, BUCKET)
        seen = 4 * size.trained  # gradients and masters, as above
        assert step - 2 * slack <= max(made['step']) <= step + seen + 2 * slack, (stage, precision)


@pytest.mark.parametrize(('stage', 'parts'), [(1, 1), (2, 4)])
def test_what_zero_holds_by_hand(stage, parts):
    """In bf16, on four ranks: weights are whole, masters and AdamW's states sharded, gradients sharded only by stage
    2."""
    options = {'stage': stage, 'placement_policy': 'cuda'}
    setup = Setup(
        config=CONFIG, strategy=f'colossalai_zero{stage}', strategy_options=options, num_processes=4, precision='bf16'
    )
    size = models.measure(models.build('actor', CONFIG, setup))
    share = sum(-(-p.numel // 4) for p in size.parameters)
    assert setup.memory_model.trained('actor', size, setup).device == {
        'actor weights': 2 * size.total,
        'actor masters': 4 * share,
        'actor gradients': 2 * (size.total if parts == 1 else share),
        'actor optimizer': 8 * share,
    }


# ---------------------------------------------------------------------- FSDP


def test_two_of_three_blocks_are_gathered_beside_what_is_outside():
    size = models.measure(models.build('actor', CONFIG, Setup(config=CONFIG)))
    per_block = 12 * 32**2 + 13 * 32  # GPT-2 of width 32
    assert size.two_blocks == size.total - per_block


def test_shards_by_dtype_and_replicas_and_the_sums_of_several_micro_batches():
    parameters = (ParameterSize('t', (8, 4), True, 0), ParameterSize('f', (16, 4), False, 0, narrow=True))
    size = ModelSize((*parameters, ParameterSize('n', (4,), False, 0)))
    run = Layout(num_processes=8, precision='bf16', optimizer='sgd')
    memory = FSDPMemory(replicas=2)  # four ranks share the model: 8, 16 and 1 elements
    assert memory.frozen('model', size, run).device == {'model weights': 4 * 8 + 2 * 16 + 4 * 1}
    assert memory.trained('model', size, run).device == {'model weights': 68, 'model gradients': 4 * 8}
    assert memory.sums('model', size, run).device == {'model sums of gradients': 4 * 32}
    assert FSDPMemory(whole_gradients_gib=0.0).sums('model', size, run).device == {}
    assert FSDPMemory(atoms=8).frozen('model', size, run).device == {'model weights': 4 * (4 + 8 + 1)}


def kept_by_fsdp() -> tuple[int, int]:
    """Returns bytes of whole weights that a frozen model keeps after a forward, in total and in its blocks."""
    with s.FSDPStrategy(device='cpu') as strategy:
        frozen = strategy.prepare(new_actor('full').requires_grad_(False))
        with torch.no_grad():
            frozen(collate(tiny_sequences(seed=0)[:2]))
        module = strategy.unwrap(frozen)
        outside, inside = [], []
        for owner in module.modules():
            group = getattr(owner, '_get_fsdp_state', lambda: None)()
            if group is not None and group._fsdp_param_group is not None:
                outputs = [t for p in group._fsdp_param_group.fsdp_params for t in p.all_gather_outputs]
                (outside if owner is module else inside).extend(outputs)
        return nbytes(outside), nbytes(inside)


def test_a_frozen_root_stays_gathered():
    outside, inside = run_distributed(kept_by_fsdp, 2, init_group=True)[0]
    setup = Setup(config=CONFIG, strategy='fsdp', num_processes=2, precision='fp32')
    size = models.measure(models.build('initial', CONFIG, setup))
    assert (setup.memory_model.kept_gathered(size, setup), inside) == (outside, 0)


# ---------------------------------------------------------------------- every strategy


@pytest.mark.parametrize(('variant', 'least', 'head'), [('full', 64 * 32, 64 * 32), ('lora', 64 * 32 + 1, 0)])
def test_packed_weights_are_those_of_the_engine(monkeypatch, variant, least, head):
    from chatgpt.rollout.local import cpu_speed
    from chatgpt.rollout.local.cpu_speed import PackedModules

    assert models.LEAST_PACKED == cpu_speed.LEAST_PACKED
    for module in (models, cpu_speed):
        monkeypatch.setattr(module, 'LEAST_PACKED', least)
    setup = Setup(config=CONFIG, **VARIANTS[variant])
    packed = PackedModules(new_actor(variant)).modules
    packable = models.measure(models.build('actor', CONFIG, setup)).packable
    assert packable == sum(m.weight.numel() for m in packed) == 3 * (32 * 96 + 32 * 32 + 2 * 32 * 128) + head


@pytest.mark.parametrize(
    ('on_cuda', 'bound', 'strategy'),
    [(False, 1000, 'naive'), (True, 1000, 'naive'), (True, 100_000, 'naive'), (True, 1000, 'colossalai_gemini')],
)
def test_log_probs_come_as_on_the_planned_device(monkeypatch, on_cuda, bound, strategy):
    """4 rows of 15 tokens are many chunks on a CPU. With a bound of 1,000 elements a GPU reads the output layer by
    blocks, unless it is Gemini's; with 100,000 there is one chunk, which keeps its logits."""
    monkeypatch.setattr(logprobs, 'CHUNK_ELEMENTS_CPU', 1000)
    monkeypatch.setattr(logprobs, 'CHUNK_ELEMENTS_ACCELERATOR', bound)
    blocks = on_cuda and bound == 1000 and strategy == 'naive'
    setup = Setup(
        config=CONFIG, precision='bf16', strategy=strategy, on_cuda=on_cuda, max_prompt_tokens=9, max_new_tokens=15
    )
    with taken_kernels() as taken:
        planned = models.learning_bytes('actor', CONFIG, setup, 4, growing=0.0)
    assert set(taken) == {'fused_logprobs' if blocks else 'chunked_logprobs'}
    real, batch = models.cast(new_actor('full'), setup).train(), models.batch_of(4, setup)
    real.logprob_kernel = 'fused' if blocks else 'plain'
    if on_cuda:
        monkeypatch.setattr(logprobs, 'CHUNK_ELEMENTS_CPU', bound)  # the real pass is on a CPU
    with models.LiveBytes([*real.parameters(), *real.buffers()]) as live:
        for parameter in real.parameters():
            parameter.register_post_accumulate_grad_hook(lambda p: setattr(p, 'grad', None))
        with models.autocast(setup):
            real(batch, with_entropy='detached').logprobs.sum().backward()
    assert planned == pytest.approx(live.peak, rel=0.01)


@pytest.mark.parametrize(('kernel', 'taken_one'), [('plain', 'chunked'), ('fused', 'fused'), ('liger', 'fused')])
@pytest.mark.parametrize('on_cuda', [False, True])
def test_a_requested_kernel_is_planned(monkeypatch, kernel, taken_one, on_cuda):
    """4 rows of 15 tokens need several chunks of 1,000 elements, so that kernels differ."""
    monkeypatch.setattr(logprobs, 'CHUNK_ELEMENTS_CPU', 1000)
    monkeypatch.setattr(logprobs, 'CHUNK_ELEMENTS_ACCELERATOR', 1000)
    lengths = {'max_prompt_tokens': 9, 'max_new_tokens': 15}
    setup = Setup(config=CONFIG, precision='fp32', on_cuda=on_cuda, logprob_kernel=kernel, **lengths)
    for actor in ('actor', 'initial'):
        with taken_kernels() as taken:
            models.scoring_bytes(actor, CONFIG, setup, 4)
        assert set(taken) == {f'{taken_one}_logprobs'}


def test_gradients_grow_as_a_strategy_keeps_them():
    """Dropped, as shards of four ranks, whole: the more is kept, the higher the peak, by no more than what is kept."""
    setup = Setup(config=CONFIG, precision='fp32', max_prompt_tokens=2, max_new_tokens=2)
    number = models.measure(models.build('actor', CONFIG, setup)).trained
    dropped, shards, whole = (
        models.learning_bytes('actor', CONFIG, setup, 1, growing=growing) for growing in (0.0, 1.0, 4.0)
    )
    assert dropped < shards < whole
    assert shards <= dropped + number and whole <= dropped + 4 * number


def test_a_memory_model_by_hand():
    """Two parameters of 6 and 10 numbers, the first trained, each fp32; Adam has two moments, and a step count on the
    host."""
    size = ModelSize((ParameterSize('a', (2, 3), True, 0), ParameterSize('b', (5, 2), False, None)))
    memory = MemoryModel().trained('x', size, Layout())
    assert memory == Memory({'x weights': 64, 'x gradients': 24, 'x optimizer': 48}, {'x optimizer': 4})
    assert MemoryModel().trained('x', size, Layout(optimizer='sgd')) == Memory({'x weights': 64, 'x gradients': 24})
    sharded = s.FSDPStrategy.memory_model(cpu_offload=False).trained('x', size, Layout(num_processes=3))
    assert sharded == Memory({'x weights': 4 * (3 + 4), 'x gradients': 12, 'x optimizer': 24}, {'x optimizer': 4})
