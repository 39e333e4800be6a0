"""The planner compared with measurements on a CPU: bytes of tensors, and of storages that operations create."""

from __future__ import annotations

import importlib.util
import json
import random
from dataclasses import replace

import pytest
import torch
from transformers import AutoModel, DebertaV2Config, GPT2Model, Mamba2Config, MambaConfig, MixtralConfig, OPTConfig

from chatgpt.batching import collate
from chatgpt.nn import Actor, Critic, RewardModel
from chatgpt.plan import Setup, cheapest_change, explain_out_of_memory, make_plan, models, parse_bytes, show_bytes
from chatgpt.plan.__main__ import main
from chatgpt.plan.advice import changes
from chatgpt.plan.setup import read_config
from chatgpt.testing.fakes import tiny_config
from chatgpt.testing.processes import run_distributed
from chatgpt.testing.tiny import tiny_sequences
from chatgpt.trainer import strategies as s
from chatgpt.types import Sequence

CONFIG = tiny_config('gpt2', positions=64, layers=3)
CPU = {'on_cuda': False, 'max_prompt_tokens': 8, 'max_new_tokens': 8}
LAYOUTS = {
    'naive': ('NaiveStrategy', 1),
    'ddp': ('DDPStrategy', 2),
    'fsdp': ('FSDPStrategy', 2),
    'fsdp_cpu': ('FSDPStrategy', 2),
}
VARIANTS = {'full': {}, 'lora': {'lora_rank': 2}, 'hydra_with_values': {'num_layers_unfrozen': 1, 'critic': 'shared'}}


def actor_of(variant: str) -> Actor:
    from transformers import AutoModelForCausalLM

    options = {name: value for name, value in VARIANTS[variant].items() if name != 'critic'}
    head = True if 'critic' in VARIANTS[variant] else None
    return Actor(AutoModelForCausalLM.from_config(CONFIG), value_head=head, **options)


def held(name: str, variant: str, precision: str) -> tuple[int, int, int]:
    """Returns bytes of weights with their masters, gradients and optimizer states of a real model after a step and
    another backward."""
    options = {'cpu_offload': True} if name == 'fsdp_cpu' else {}
    strategy = getattr(s, LAYOUTS[name][0])(device='cpu', precision=precision, **options)
    with strategy:
        actor = actor_of(variant)
        optimizer = torch.optim.AdamW([p for p in actor.parameters() if p.requires_grad])
        actor, optimizer = strategy.prepare((actor, optimizer))
        batch = collate(tiny_sequences(seed=0)[:2])
        for step in range(2):
            with strategy.autocast():
                out = actor(batch)
            values = 0.0 if out.values is None else out.values.sum()
            strategy.backward((out.logprobs.sum() + values) / 100, actor, optimizer)
            if step == 0:
                strategy.optimizer_step(optimizer)

        def size(tensors) -> int:
            whole = {}
            for tensor in tensors:
                local = tensor.to_local() if hasattr(tensor, 'to_local') else tensor
                whole[id(tensor)] = local.numel() * local.element_size()
            return sum(whole.values())

        masters = [p for group in optimizer.param_groups for p in group['params']]
        parameters = [*strategy.unwrap(actor).parameters(), *masters]
        states = [v for state in optimizer.state.values() for v in state.values()]
        return size(parameters), size({id(p): p.grad for p in parameters if p.grad is not None}.values()), size(states)


def held_by_all(names: list[str]) -> dict[tuple[str, str, str], tuple[int, int, int]]:
    found = {(n, v, 'fp32'): held(n, v, 'fp32') for n in names for v in VARIANTS}
    return found | {(n, 'full', 'bf16'): held(n, 'full', 'bf16') for n in names if not n.startswith('fsdp')}


def test_static_parts_are_exact(with_16_bits):
    two = run_distributed(held_by_all, 2, [n for n, (_, w) in LAYOUTS.items() if w == 2], init_group=True)
    measured = {key: [ranks[key] for ranks in two] for key in two[0]} | {
        k: [m] for k, m in held_by_all(['naive']).items()
    }
    assert len(measured) == 14
    for (name, variant, precision), ranks in measured.items():
        options = VARIANTS[variant] | {'precision': precision}
        setup = Setup(config=CONFIG, strategy=name, num_processes=LAYOUTS[name][1], **options)
        memory = setup.memory_model.trained('actor', models.measure(models.build('actor', CONFIG, setup)), setup)
        planned = [
            memory.device.get(f'actor {n}', 0) + memory.host.get(f'actor {n}', 0)
            for n in ('weights', 'gradients', 'optimizer')
        ]
        assert planned == list(map(max, zip(*ranks, strict=True))), (name, variant, precision)


def held_by_zero(stage: int, precision: str, variant: str) -> dict[str, int]:
    """Returns bytes of this rank's tensors under ZeRO after a step, by the planner's names."""
    from chatgpt.batching import collate

    with s.ColossalAIStrategy(stage=stage, precision=precision, placement_policy='cuda') as strategy:
        actor, frozen = actor_of(variant), actor_of('full')
        optimizer = strategy.make_optimizer([p for p in actor.parameters() if p.requires_grad])
        (actor, optimizer), frozen = strategy.prepare((actor, optimizer), frozen)
        strategy.backward(actor(collate(tiny_sequences(seed=0)[:2])).logprobs.float().sum() / 100, actor, optimizer)
        strategy.optimizer_step(optimizer)
        own, its = (strategy._engines[id(strategy.unwrap(m))] for m in (actor, frozen))

        def size(tensors) -> int:
            return sum(t.numel() * t.element_size() for t in {t.data_ptr(): t for t in tensors if t.dim() > 0}.values())

        return {
            'actor weights': size(own.module.parameters()),
            'actor masters': size(own.optimizer.working_to_master_param.values()),
            'actor optimizer': size(
                v for state in optimizer.state.values() for v in state.values() if torch.is_tensor(v)
            ),
            'actor exact values': size(own._kept.values()),
            'initial model weights': size(its.module.parameters()),
            'initial model exact values': size(its._kept.values()),
        }


ZERO = [(1, 'bf16', 'full'), (2, 'bf16', 'lora'), (2, 'fp32', 'full')]


def held_by_zeros() -> list[dict[str, int]]:
    return [held_by_zero(*case) for case in ZERO]


def test_static_parts_of_zero_are_exact():
    if importlib.util.find_spec('colossalai') is None:  # importing it would change this process
        pytest.skip('colossalai is not installed')
    ranks = run_distributed(held_by_zeros, 2)
    for number, (stage, precision, variant) in enumerate(ZERO):
        setup = Setup(
            config=CONFIG, strategy=f'colossalai_zero{stage}', num_processes=2, precision=precision, **VARIANTS[variant]
        )
        trained = setup.memory_model.trained('actor', models.measure(models.build('actor', CONFIG, setup)), setup)
        frozen = setup.memory_model.frozen(
            'initial model', models.measure(models.build('initial', CONFIG, setup)), setup
        )
        planned = {**trained.device, **trained.host, **frozen.device, **frozen.host}
        for name, size in ranks[0][number].items():
            case = (stage, precision, variant, name)
            assert planned.get(name, 0) == pytest.approx(size, rel=0.002), case  # rows are padded to the ranks


@pytest.mark.parametrize(
    ('kind', 'checkpointing', 'precision'),
    [('actor', False, 'bf16'), ('actor', True, 'fp32'), ('critic', False, 'fp32'), ('critic', True, 'bf16')],
)
def test_activations_are_those_of_a_real_pass(kind, checkpointing, precision):
    setup = Setup(
        config=CONFIG, gradient_checkpointing=checkpointing, precision=precision, max_prompt_tokens=9, max_new_tokens=15
    )
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIG)
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={'use_reentrant': False})
    real = models.cast((Actor if kind == 'actor' else Critic)(model), setup).train()
    batch, kept = models.batch_of(4, setup), []
    for parameter in (p for p in real.parameters() if p.dtype is torch.bfloat16):  # the gradient of a master

        def add(p):
            kept.append(p.grad.float())
            p.grad = None

        parameter.register_post_accumulate_grad_hook(add)
    with models.LiveBytes([*real.parameters(), *real.buffers()]) as live:
        with models.autocast(setup):
            out = real(batch) if kind == 'critic' else real(batch, with_entropy='detached')
            loss = out.sum() if kind == 'critic' else out.logprobs.sum() + out.entropy.sum()
        loss.backward()
    planned = models.learning_bytes(kind, CONFIG, setup, 4, growing=4.0)
    assert planned == pytest.approx(live.peak, rel=0.01)
    assert models.learning_bytes(kind, CONFIG, setup, 8, growing=4.0) > 1.2 * planned  # negative control


def test_padding_in_attention_is_planned_on_a_cpu():
    from transformers import AutoModelForCausalLM

    setup = Setup(config=CONFIG, precision='fp32', max_prompt_tokens=22, max_new_tokens=6, on_cuda=False)
    torch.manual_seed(0)
    real = Actor(AutoModelForCausalLM.from_config(CONFIG)).train()
    ones = torch.ones(22, dtype=torch.int64)
    sequences = [
        Sequence(prompt_ids=(row + 1) * ones, response_ids=ones[:n], response_mask=ones[:n].bool())
        for row, n in enumerate((6, 6, 5, 6, 4, 6))
    ]
    with models.LiveBytes([*real.parameters(), *real.buffers()]) as live:
        real(collate(sequences), with_entropy='detached').logprobs.sum().backward()
    planned = models.learning_bytes('actor', CONFIG, setup, 6, growing=4.0)
    assert live.peak <= planned < 1.03 * live.peak
    assert models.learning_bytes('actor', CONFIG, replace(setup, on_cuda=True), 6, growing=4.0) < live.peak


def test_the_prompt_of_a_pair_is_planned_once():
    from transformers import AutoModelForCausalLM

    setup = Setup(config=CONFIG, precision='fp32', max_prompt_tokens=22, max_new_tokens=6, on_cuda=False)
    setup = replace(setup, task='reward_model')
    torch.manual_seed(0)
    real = RewardModel(AutoModelForCausalLM.from_config(CONFIG)).train()
    ones = torch.ones(22, dtype=torch.int64)
    sequences = [
        Sequence(prompt_ids=(row // 2 + 1) * ones, response_ids=(row + 1) * ones[:n], response_mask=ones[:n].bool())
        for row, n in enumerate((6, 5, 6, 6, 4, 6))
    ]
    with models.LiveBytes([*real.parameters(), *real.buffers()]) as live:
        real(collate(sequences)).sum().backward()
    planned = models.learning_bytes('reward', CONFIG, setup, 6, growing=4.0)
    assert planned == pytest.approx(live.peak, rel=0.05)
    alone = models.learning_bytes('critic', CONFIG, replace(setup, task='critic'), 6, growing=4.0)
    assert alone > 1.2 * planned  # a value head instead of a score head, and no pairs


@pytest.mark.parametrize('shared', [0, 20])
def test_a_common_beginning_of_all_prompts_is_planned_once(shared):
    setup = Setup(config=CONFIG, precision='fp32', max_prompt_tokens=22, max_new_tokens=6, shared_prompt_tokens=shared)
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    real = Actor(AutoModelForCausalLM.from_config(CONFIG)).train()
    batch = models.batch_of(6, setup)
    assert (batch.packing is not None) == bool(shared)
    with models.LiveBytes([*real.parameters(), *real.buffers()]) as live:
        real(batch, with_entropy='detached').logprobs.sum().backward()
    planned = models.learning_bytes('actor', CONFIG, setup, 6, growing=4.0)
    assert planned == pytest.approx(live.peak, rel=0.01)
    alone = models.learning_bytes('actor', CONFIG, replace(setup, shared_prompt_tokens=0), 6, growing=4.0)
    assert planned < 0.8 * alone if shared else planned == alone


@pytest.mark.parametrize('unfrozen', [1, 3, 7])
def test_frozen_blocks_keep_no_activations(monkeypatch, unfrozen):
    deep = tiny_config('llama', positions=64, layers=12)
    sizes = {'max_prompt_tokens': 8, 'max_new_tokens': 8, 'on_cuda': False}
    setup = Setup(config=deep, num_layers_unfrozen=unfrozen, critic='shared', **sizes)
    planned = models.learning_bytes('actor', deep, setup, 4, growing=4.0)
    whole = models.build('actor', deep, setup)
    monkeypatch.setattr(models, 'num_layers', lambda config: 12)
    monkeypatch.setattr(models, 'TRACED', (12, 12))
    monkeypatch.setattr(models, 'build', lambda *args: whole)
    assert models.learning_bytes('actor', deep, setup, 4, growing=4.0) == pytest.approx(planned, rel=0.03)


def test_models_that_may_drop_layers_are_planned_with_all_of_them():
    """They draw a random number per layer in training, which a trace cannot compare."""
    sizes = {'hidden_size': 16, 'num_hidden_layers': 2, 'num_attention_heads': 2, 'vocab_size': 40}
    configs = [OPTConfig(**sizes, max_position_embeddings=32, layerdrop=p) for p in (0.0, 0.9)]
    plans = [make_plan(Setup(config=config, max_new_tokens=8, on_cuda=False)) for config in configs]
    assert plans[0].phases == plans[1].phases


@pytest.mark.parametrize(('kind', 'task'), [('actor', 'ppo'), ('critic', 'ppo'), ('actor', 'sft')])
def test_dropout_takes_memory_only_where_it_is_on(kind, task):
    plain, dropping = (
        models.learning_bytes(kind, config, Setup(config=config, task=task, **CPU), 4, growing=4.0)
        for config in (tiny_config('gpt2', positions=64, resid_pdrop=p) for p in (0.0, 0.1))
    )
    assert (dropping > plain) == (task == 'sft') and dropping >= plain


@pytest.mark.parametrize('kind', ['actor', 'reward'])
@pytest.mark.parametrize('growing', [0.0, 4.0])
@pytest.mark.parametrize('vocab_size', [40, 6000])
def test_depth_is_extrapolated(monkeypatch, kind, growing, vocab_size):
    """Also if the gradient of a large embedding exceeds the activations of a shallow model, not of a deep one."""
    deep = tiny_config('llama', positions=64, layers=24, vocab_size=vocab_size)
    sizes = {'max_prompt_tokens': 8, 'max_new_tokens': 8, 'on_cuda': False}
    setup = Setup(config=deep, task='reward_model' if kind == 'reward' else 'ppo', **sizes)
    linear = models.learning_bytes(kind, deep, setup, 4, growing=growing)
    monkeypatch.setattr(models, 'TRACED', (24, 24))
    assert models.learning_bytes(kind, deep, setup, 4, growing=growing) == pytest.approx(linear, rel=0.01)


def test_the_cache_is_the_engines():
    from transformers import AutoModelForCausalLM

    from chatgpt.rollout import Call, LocalEngine, SamplingParams
    from chatgpt.types import Prompt

    config = tiny_config('llama', positions=64)
    actor, engine = Actor(AutoModelForCausalLM.from_config(config)), LocalEngine()
    setup = Setup(config=config, experience_batch_size=5, max_prompt_tokens=10, max_new_tokens=20, on_cuda=False)
    sizes = []
    engine.begin(actor)
    original = engine.cache

    def spy(rows, capacity):
        cache = original(rows, capacity)
        sizes.append(cache)
        return cache

    engine.cache = spy  # type: ignore[method-assign]
    prompts = [Prompt(ids=torch.arange(10))] * 5
    engine.generate(Call.of(prompts, SamplingParams(max_new_tokens=20), seed=0, indices=range(5)))
    real = sum(t.numel() * t.element_size() for layer in sizes[0].layers for t in (layer.keys, layer.values))
    assert make_plan(setup).phases['collect'].device['key/value cache'] == real


def test_memory_kept_by_generating_is_counted_in_learning():
    """On a GPU 5 rows are rounded to 8, and 10 + 20 - 1 slots to 256; in bf16 the copy has 2 bytes per weight."""
    config = tiny_config('gpt2', positions=64)
    sizes = {'experience_batch_size': 5, 'max_prompt_tokens': 10, 'max_new_tokens': 20}
    plain = make_plan(Setup(config=config, precision='bf16', **sizes))
    kept = make_plan(Setup(config=config, precision='bf16', keep=True, **sizes))
    collect = plain.phases['collect'].device
    assert collect['key/value cache'] == 2 * 2 * config.n_layer * config.n_embd * 8 * 256
    for phase in ('score', 'learn'):
        more = kept.phases[phase].device.pop('kept for generating')
        assert more == collect['key/value cache'] + collect['full copy'] > 0
        assert kept.phases[phase] == plain.phases[phase]
    assert kept.phases['collect'] == plain.phases['collect']


def test_phases_add_up_and_limits_decide():
    setup = Setup(config=CONFIG, memory=10**9, host_memory=10**9, on_cuda=True, margin=0.0)
    plan = make_plan(setup)
    assert plan.peak == max(sum(m.device.values()) for m in plan.phases.values())
    assert plan.fits
    exact = replace(setup, memory=plan.peak)
    assert make_plan(exact).fits
    short = make_plan(replace(setup, memory=plan.peak - 1))
    assert (short.fits, short.limit) == (False, 'device memory')
    offloaded = make_plan(replace(setup, strategy='fsdp_cpu', host_memory=1000))
    assert offloaded.limit == 'host memory'
    assert make_plan(replace(setup, margin=0.5, memory=int(1.9 * plan.peak))).fits is False


@pytest.mark.parametrize('precision', ['fp32', 'bf16'])
def test_experts_are_planned(precision):
    config = MixtralConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        max_position_embeddings=64,
    )
    assert make_plan(Setup(config=config, **CPU | {'precision': precision})).peak > 0


STATES = {'vocab_size': 64, 'hidden_size': 32, 'state_size': 4, 'num_hidden_layers': 2}
ENCODER = {'vocab_size': 64, 'hidden_size': 16, 'num_hidden_layers': 2, 'num_attention_heads': 2}


def test_a_model_with_running_states_is_planned_where_it_does_not_generate():
    config = MambaConfig(**STATES)
    setup = Setup(config=config, task='sft', **CPU)
    learn = make_plan(setup).phases['learn'].device
    number = models.measure(models.build('actor', config, setup)).total
    assert learn['actor gradients'] == 4 * number and learn['activations'] > 0
    with pytest.raises(ValueError, match='no plan of generation with a mamba: its layers keep a running') as error:
        make_plan(replace(setup, task='ppo'))
    assert '\n' not in str(error.value)


@pytest.mark.parametrize('task', ['reward_model', 'ppo'])
def test_an_encoder_that_scores_is_planned(task):
    encoder = DebertaV2Config(**ENCODER, intermediate_size=32)
    given = {'config': encoder} if task == 'reward_model' else {'config': CONFIG, 'reward_config': encoder}
    plan = make_plan(Setup(**given, task=task, **CPU))
    phase = plan.phases['learn' if task == 'reward_model' else 'score'].device
    with torch.device('meta'):
        number = sum(p.numel() for p in RewardModel(AutoModel.from_config(encoder)).parameters())
    assert phase['reward model weights'] == 4 * number and phase['activations'] > 0


def test_a_config_of_transformers_with_an_infinite_number_is_read(tmp_path):
    config = Mamba2Config(**STATES, num_heads=4, head_dim=16, n_groups=1)
    config.to_json_file(tmp_path / 'config.json')
    assert '"__float__": "Infinity"' in (tmp_path / 'config.json').read_text()
    assert list(read_config(tmp_path / 'config.json').time_step_limit) == [0.0, float('inf')]


@pytest.mark.parametrize('shared_trunk', [False, True])
def test_adapters_of_the_named_layers_are_counted_by_hand(shared_trunk):
    """GPT-2's c_attn maps 32 numbers to 96, in three blocks."""
    setup = Setup(config=CONFIG, lora_rank=2, lora_target_modules=['c_attn'], shared_trunk=shared_trunk, **CPU)
    for kind, head in (('actor', 0), ('critic', 32 + 1)):
        named, every = (
            models.measure(models.build(kind, CONFIG, given)).trained
            for given in (setup, replace(setup, lora_target_modules=None))
        )
        assert named == 3 * 2 * (32 + 96) + head
        assert every == 3 * 2 * (32 + 96 + 32 + 32 + 2 * (32 + 128)) + head


def test_processes_on_other_machines_do_not_count_for_this_ones_memory():
    setup = Setup(config=CONFIG, task='sft', strategy='ddp', num_processes=4, processes_per_machine=2, **CPU)
    plan = make_plan(setup)
    enough = plan.host_peak + 2 * plan.peak
    for changed, limit in (
        ({'host_memory': enough}, None),
        ({'host_memory': enough - 1}, 'host memory'),
        ({'host_memory': enough, 'processes_per_machine': 4}, 'host memory'),
    ):
        assert replace(plan, setup=replace(setup, **changed)).limit == limit


def test_a_plan_moves_no_generator():
    """One process of a run makes the plan, and must continue with the same random numbers."""
    states = [torch.get_rng_state(), random.getstate()]
    for task in ('ppo', 'sft'):
        assert make_plan(Setup(config=CONFIG, task=task)).peak
        assert torch.equal(torch.get_rng_state(), states[0]) and random.getstate() == states[1]


def test_the_cheapest_change_fits_and_those_before_it_do_not():
    setup = Setup(config=CONFIG, on_cuda=True, margin=0.0)
    needed = make_plan(setup).peak
    setup = replace(setup, memory=int(0.9 * needed))
    found = cheapest_change(setup)
    assert found is not None
    text, plan = found
    assert plan.fits
    for other, changed in changes(setup):
        if other == text:
            break
        assert not make_plan(changed).fits
    assert text in explain_out_of_memory(setup, MemoryError())
    assert 'larger device' in explain_out_of_memory(replace(setup, memory=1000), MemoryError())


def test_states_in_8_bits_are_given_up_with_whole_weights():
    given = {'task': 'sft', 'train_batch_size': 2, 'gradient_checkpointing': True, 'on_cuda': True, 'margin': 0.0}
    setup = Setup(config=CONFIG, strategy='ddp', num_processes=2, optimizer='adamw8bit', **given)
    sharded = make_plan(replace(setup, strategy='fsdp', optimizer='adamw'))
    assert sharded.peak < make_plan(setup).peak
    text, plan = cheapest_change(replace(setup, memory=sharded.peak))
    assert (text, plan.setup.optimizer, plan.peak) == ('strategy=fsdp', 'adamw', sharded.peak)


def test_amounts_of_memory():
    sizes = {'24GiB': 24 * 2**30, '1.5 GB': 1_500_000_000, '24': 24 * 2**30, 7: 7 * 2**30, '2mib': 2**21, '9b': 9}
    assert {text: parse_bytes(text) for text in sizes} == sizes
    for text in ('', 'lots', '-3GiB', '3GiBs', '1e9'):
        with pytest.raises(ValueError, match='write it like 24GiB'):
            parse_bytes(text)
    assert [show_bytes(x) for x in (0, 5, 2**11, 1.5 * 2**30, 2**37)] == ['0', '5 B', '2.00 KiB', '1.50 GiB', '128 GiB']


def test_the_command(tmp_path, capsys):
    path = tmp_path / 'config.json'
    path.write_text(json.dumps(CONFIG.to_dict()))
    assert main([str(path), '--memory', '1GiB']) == 0
    shown = capsys.readouterr().out
    assert 'it fits' in shown and 'actor optimizer' in shown
    assert main([str(path), '--memory', '10KiB', '--json']) == 1
    content = json.loads(capsys.readouterr().out)
    assert content['limit'] == 'device memory' and content['peak'] > 10 * 1024
    assert list(tmp_path.iterdir()) == [path]  # nothing was written
    path.write_text('{}')
    assert main([str(path)]) == 2 and 'not the config.json' in capsys.readouterr().err


def test_a_critic_of_another_size_a_head_of_bins_and_passes_apart():
    """Bytes of weights by hand: four per parameter of the built critic. Apart, learning holds one model's gradients."""
    small = tiny_config('gpt2', positions=64, layers=1, hidden=16)
    setup = Setup(config=CONFIG, critic_config=small, critic_support={'bins': 7, 'low': 0.0, 'high': 1.0}, **CPU)
    with torch.device('meta'):
        trunk = sum(p.numel() for p in Critic(GPT2Model(small)).parameters())
    plan = make_plan(setup)
    assert plan.phases['learn'].device['critic weights'] == 4 * (trunk + 6 * (16 + 1))
    assert make_plan(replace(setup, critic_support={})).phases['learn'].device['critic weights'] == 4 * trunk
    together, apart = (
        make_plan(replace(setup, critic_apart=is_apart)).phases['learn'].device for is_apart in (False, True)
    )
    assert {'actor gradients', 'critic gradients'} <= together.keys()
    assert 'actor gradients' in apart and 'critic gradients' not in apart
    many = make_plan(replace(setup, critic_config=None, critic_apart=True, critic_train_batch_size=64))
    assert 'critic gradients' in many.phases['learn'].device
    assert make_plan(replace(setup, critic='shared')).phases['learn'].device['actor weights'] == (
        make_plan(replace(setup, critic='none')).phases['learn'].device['actor weights'] + 4 * 7 * (32 + 1)
    )
