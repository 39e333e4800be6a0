"""Precision 'auto', TF32, fused AdamW, weights stored in 16 bits, and CPUs without instructions for 16 bits."""

from __future__ import annotations

import copy
import math
import warnings

import pytest
import torch
from cuda_on_cpu import pretend_cuda
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, M2M100Config, XGLMConfig
from transformers.modeling_layers import GradientCheckpointingLayer

from chatgpt.batching import collate
from chatgpt.launch.arguments import make_strategy
from chatgpt.launch.runs import SFTRun
from chatgpt.nn import Actor, AutoActor, AutoRM, Critic, RewardModel, lora
from chatgpt.plan import Setup
from chatgpt.rollout import LocalEngine
from chatgpt.strategies import DDPStrategy, NaiveStrategy
from chatgpt.strategies.copies import cast_copy
from chatgpt.strategies.precision import WideProducts, emulates
from chatgpt.testing import FAMILIES, tiny_causal_lm, tiny_config
from chatgpt.testing.processes import run_distributed
from chatgpt.testing.tiny import tiny_sequences
from chatgpt.trainer import PPOTrainer

CPU = torch.device('cpu')
M2M_SIZES = {'layers': 1, 'attention_heads': 4, 'ffn_dim': 48}


def batch():
    return collate(tiny_sequences(6))


def shifted(module: nn.Module) -> nn.Module:
    """Adds noise, so that weights are not exact in bf16 and adapters are not zero."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.02 * torch.randn(parameter.shape, generator=generator))
    return module


# --- auto


def test_auto_is_fp32_on_every_cpu_and_the_default(without_16_bits):
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        assert NaiveStrategy(device='cpu').numerics.dtype is torch.float32
        assert make_strategy('naive', seed=1, precision='auto').numerics.precision == 'fp32'
    assert SFTRun().precision == 'auto'
    assert Setup(config=None, on_cuda=False).precision == 'fp32' and Setup(config=None).precision == 'bf16'


def test_auto_is_bf16_on_a_gpu_that_has_it(monkeypatch):
    with pretend_cuda():
        assert NaiveStrategy(device='cuda:0').numerics.precision == 'bf16'
        monkeypatch.setattr(torch.cuda, 'is_bf16_supported', lambda including_emulation=True: including_emulation)
        assert NaiveStrategy(device='cuda:0').numerics.precision == 'fp32'  # it could only emulate bf16
        assert NaiveStrategy(device='cuda:0', precision='bf16').numerics.precision == 'bf16'


def _rank_with_mixed_gpus():
    torch.distributed.init_process_group('gloo')  # strategies use an existing group
    rank = torch.distributed.get_rank()
    with pretend_cuda(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, 'set_device', lambda device: None)
        patch.setattr(torch.cuda, 'get_device_name', lambda device: f'Card {rank}')
        patch.setattr(torch.cuda, 'is_bf16_supported', lambda including_emulation=True: rank == 0)
        with pytest.raises(
            ValueError, match=r"precision='auto' is bf16 on rank 0 \(Card 0\), fp32 on rank 1 \(Card 1\)"
        ):
            DDPStrategy(device='cuda:0')
        assert DDPStrategy(device='cuda:0', precision='fp32').numerics.precision == 'fp32'
        patch.setattr(torch.cuda, 'is_bf16_supported', lambda including_emulation=True: True)
        assert DDPStrategy(device='cuda:0').numerics.precision == 'bf16'
    torch.distributed.destroy_process_group()


def test_ranks_that_would_compute_in_different_precisions_are_refused():
    run_distributed(_rank_with_mixed_gpus, 2)


class Narrow(NaiveStrategy):
    _only_16_bits = True


def test_16_bits_on_a_cpu_without_instructions_for_them_are_a_warning(without_16_bits):
    assert emulates(CPU, torch.bfloat16) and emulates(CPU, torch.float16) and not emulates(CPU, torch.float32)
    for precision in ('bf16', 'fp16'):
        message = f"precision='{precision}': this CPU has no .* learning imitates in fp32, .*Give precision='fp32'$"
        with pytest.warns(UserWarning, match=message):
            NaiveStrategy(device='cpu', precision=precision).close()
    with pytest.warns(UserWarning, match=r"which this strategy has not: take another with precision='fp32'$"):
        with Narrow(device='cpu') as strategy:
            assert strategy.numerics.precision == 'bf16'


def test_tf32_is_for_forward_and_backward_in_bf16_on_cuda():
    def setting(**options) -> set[str]:
        found, before = set(), torch.get_float32_matmul_precision()
        with NaiveStrategy(**({'device': 'cuda:0'} | options)) as strategy:
            model = nn.Linear(2, 1)
            model, optimizer = strategy.prepare((model, torch.optim.SGD(model.parameters(), lr=0.1)))
            with strategy._products():  # without autocast, which the simulated device does not have
                found.add(torch.get_float32_matmul_precision())
                loss = model(torch.ones(1, 2, device=strategy.device)).sum()
            loss.register_hook(lambda _: found.add(torch.get_float32_matmul_precision()))
            assert torch.get_float32_matmul_precision() == before
            strategy.backward(loss, model, optimizer)
            assert torch.get_float32_matmul_precision() == before
        return found

    with pretend_cuda():
        assert setting() == setting(precision='bf16') == {'high'}
        for exact in ({'precision': 'fp32'}, {'device': 'cpu'}, {'deterministic': True}, {'reproducible': 'exact'}):
            assert setting(**exact) == {'highest'}
        torch.set_float32_matmul_precision('medium')  # set by the user
        try:
            assert setting() == {'medium'}
        finally:
            torch.set_float32_matmul_precision('highest')


# --- fused AdamW


def test_states_move_between_fused_and_plain(tmp_path):
    """Two steps with one, saving, and two steps with the other give the numbers of four steps, up to rounding."""

    def learned(device: str, load: bool, steps: int = 2) -> torch.Tensor:
        torch.manual_seed(0)
        model = nn.Linear(4, 2)
        with NaiveStrategy(device=device, precision='fp32') as strategy:
            made = strategy.make_optimizer(model.parameters(), lr=0.1, weight_decay=0.1)
            model, optimizer = strategy.prepare((model, made))
            if load:
                strategy.load_model(model, tmp_path / 'model.pt')
                strategy.load_optimizer(optimizer, tmp_path / 'optim.pt')
                assert bool(optimizer.param_groups[0]['fused']) is (device == 'cuda:0')
                assert {str(s['step'].device) for s in optimizer.state.values()} == {device}
            for _ in range(steps):
                loss = (model(torch.linspace(-1, 1, 12).reshape(3, 4).to(strategy.device)) ** 2).sum()
                strategy.backward(loss, model, optimizer)
                strategy.optimizer_step(optimizer)
            strategy.save_model(model, tmp_path / 'model.pt')
            strategy.save_optimizer(optimizer, tmp_path / 'optim.pt')
            return strategy.full_state_dict(model)['weight'].clone()

    with pretend_cuda():
        ends = [learned('cpu', load=False, steps=4)]
        for first, second in (('cuda:0', 'cpu'), ('cpu', 'cuda:0')):
            learned(first, load=False)
            ends.append(learned(second, load=True))
        exact = NaiveStrategy(device='cuda:0', reproducible='exact')
        with exact:
            assert exact.make_optimizer(nn.Linear(4, 2).parameters()).param_groups[0]['fused'] is None
    assert all(torch.allclose(end, ends[0], rtol=1e-5, atol=1e-6) for end in ends)


# --- weights stored in 16 bits


@pytest.mark.parametrize('family', FAMILIES)
def test_a_frozen_model_kept_in_fp16_has_the_bits_of_autocast(family, with_16_bits):
    actor, scorer = shifted(Actor(tiny_causal_lm(family))), shifted(RewardModel(tiny_causal_lm(family)))
    with NaiveStrategy(precision='fp16', device='cpu') as strategy:
        for model in (actor.eval(), scorer.eval()):
            with torch.no_grad(), strategy.autocast():
                want = model(batch())
            before = {n: p.detach().clone() for n, p in model.named_parameters()}
            frozen = strategy.prepare(model)
            with torch.no_grad(), strategy.autocast():
                got = frozen(batch())
            if isinstance(want, tuple):
                want, got = want.logprobs, got.logprobs
            assert torch.equal(got, want)
            kept = {n for n, p in frozen.named_parameters() if p.dtype is strategy.numerics.dtype}
            assert kept and all(before[n].dim() == 2 for n in kept)
            assert not any('emb' in n or 'wte' in n or 'wpe' in n or 'norm' in n or 'head' in n for n in kept)
            assert torch.equal(frozen(batch())[0] if isinstance(frozen, Actor) else frozen(batch()), want)  # by a hook


def in_bf16(module: nn.Module) -> nn.Module:
    """Rounds fp32 weights to bf16, as if loaded from a bf16 folder."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(parameter.bfloat16().float())
    return module


def adapted(exact_in_bf16: bool) -> Actor:
    model = shifted(tiny_causal_lm('llama'))
    actor = Actor(in_bf16(model) if exact_in_bf16 else model, 2)
    with torch.no_grad():
        for layer in lora.lora_layers(actor).values():
            layer.lora_B.copy_(torch.linspace(-0.01, 0.01, layer.lora_B.numel()).view_as(layer.lora_B))
    return actor


def trained_under(strategy: NaiveStrategy, actor: Actor):
    optimizer = strategy.make_optimizer([p for p in actor.parameters() if p.requires_grad], lr=1e-2)
    return strategy.prepare((actor, optimizer))


@pytest.mark.parametrize('exact_in_bf16', [True, False])
def test_the_weights_under_adapters_are_kept_in_bf16_where_that_loses_nothing(exact_in_bf16, with_16_bits, tmp_path):
    plain = adapted(exact_in_bf16)
    with torch.no_grad():
        merged = {n: layer.folded_weight() for n, layer in lora.lora_layers(plain).items()}
    with NaiveStrategy(precision='bf16', device='cpu') as strategy:
        with torch.no_grad(), strategy.autocast():
            want = plain.eval()(batch()).logprobs
        actor, optimizer = trained_under(strategy, copy.deepcopy(plain))
        layers = lora.lora_layers(actor)
        assert {layer.weight.dtype for layer in layers.values()} == {torch.bfloat16 if exact_in_bf16 else torch.float32}
        assert {layer.lora_A.dtype for layer in layers.values()} == {torch.float32}
        with torch.no_grad(), strategy.autocast():
            assert torch.equal(actor(batch()).logprobs, want)
        # saved weights are exact and fp32
        pieces = {p.name: p.data for p in strategy.model_pieces(actor)}
        assert all(torch.equal(pieces[n], p.detach().reshape(-1)) for n, p in plain.named_parameters())
        assert {d.dtype for d in pieces.values() if d.is_floating_point()} == {torch.float32}
        with strategy.full_model(actor, dtype=torch.float32) as full:
            assert all(torch.equal(full.get_submodule(n).weight, w) for n, w in merged.items())
            full.save_pretrained(tmp_path / 'merged')
        again = AutoActor.from_pretrained(tmp_path / 'merged')
        assert all(torch.equal(again.get_submodule(n).weight, w) for n, w in merged.items())
        assert {layer.weight.dtype for layer in layers.values()} == {torch.bfloat16 if exact_in_bf16 else torch.float32}
        # weights for generation are folded in fp32 and rounded once
        with strategy.full_model(actor) as full:
            assert all(torch.equal(full.get_submodule(n).weight, w.bfloat16()) for n, w in merged.items())
        # a step equals that of fp32 weights under autocast
        other = copy.deepcopy(plain)
        other_optimizer = strategy.make_optimizer([p for p in other.parameters() if p.requires_grad], lr=1e-2)
        for model in (actor, other):
            with strategy.autocast():
                loss = -model.train()(batch()).logprobs.mean()
            loss.backward()
        other_optimizer.step()
        strategy.optimizer_step(optimizer)
        learned = dict(actor.named_parameters())
        assert all(torch.equal(learned[n], p) for n, p in other.named_parameters() if p.requires_grad)


class Casts(TorchDispatchMode):
    """A mode that records the shapes of matrices that are cast from fp32 to bf16."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[tuple[int, ...]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and args[0].dtype is torch.float32 and out.dtype is torch.bfloat16:
            self.shapes.append(tuple(args[0].shape))
        return out


@pytest.mark.parametrize('family', FAMILIES)
def test_models_are_stored_in_bf16_and_a_policy_has_the_bits_of_its_reference(family, with_16_bits):
    """So the first KL is 0. States between blocks are bf16, heads fp32, and no micro-batch casts a weight."""
    torch.manual_seed(0)
    policy = shifted(Actor(tiny_causal_lm(family), value_head=True))
    weights = {tuple(p.shape) for p in policy.model.parameters() if p.dim() == 2}
    states = set()
    with NaiveStrategy(precision='bf16', device='cpu') as strategy:
        reference = strategy.prepare(copy.deepcopy(policy))
        actor, _ = trained_under(strategy, policy)
        for model in (reference, actor):
            assert {p.dtype for p in model.model.parameters()} == {torch.bfloat16}
            assert {p.dtype for p in model.value_head.parameters()} == {torch.float32}
        for block in (m for m in actor.modules() if isinstance(m, GradientCheckpointingLayer)):
            block.register_forward_hook(lambda _, args, out: states.add((args[0].dtype, _first(out).dtype)))
        with strategy.autocast(), Casts() as casts:
            got = actor.eval()(batch())
        with torch.no_grad(), strategy.autocast():
            want = reference(batch())
    assert torch.equal(got.logprobs, want.logprobs) and torch.equal(got.values, want.values)
    assert states == {(torch.bfloat16, torch.bfloat16)}
    assert not weights.intersection(casts.shapes) and all(shape[::-1] not in weights for shape in casts.shapes)


def _first(out):
    return out[0] if isinstance(out, tuple) else out


def test_masters_learn_from_gradients_that_are_summed_in_fp32(with_16_bits, tmp_path):
    """Against a loop that sums the gradients of a bf16 model and steps an fp32 copy. Saved weights are the masters."""
    torch.manual_seed(0)
    policy = shifted(Actor(tiny_causal_lm('llama')))
    batches = [collate(tiny_sequences(3, seed=seed)) for seed in range(3)]
    masters = {n: p.detach().clone() for n, p in policy.named_parameters()}
    before = {n: p.clone() for n, p in masters.items()}
    slow = copy.deepcopy(policy)
    for parameter in slow.parameters():
        parameter.data = parameter.data.bfloat16()
    tensors = {n: nn.Parameter(t) for n, t in masters.items()}
    plain, arrived = torch.optim.AdamW(tensors.values(), lr=1e-4, weight_decay=0.0), []
    with NaiveStrategy(precision='bf16', device='cpu') as strategy:
        optimizer = strategy.make_optimizer(policy.parameters(), lr=1e-4)
        actor, optimizer = strategy.prepare((policy, optimizer))
        master = optimizer.param_groups[0]['params'][0]
        master.register_post_accumulate_grad_hook(lambda p: arrived.append(p.grad.dtype))  # as a reduction over ranks
        for _ in range(2):
            for each in batches:
                with strategy.accumulate(actor, last=each is batches[-1]):
                    with strategy.autocast():
                        loss = -actor(each).logprobs.mean()
                    strategy.backward(loss, actor, optimizer)
                with strategy.autocast():
                    loss = -slow(each).logprobs.mean()
                loss.backward()
                for name, parameter in slow.named_parameters():
                    gradient = parameter.grad.float()
                    tensors[name].grad = gradient if tensors[name].grad is None else tensors[name].grad + gradient
                    parameter.grad = None
            norm = math.sqrt(sum(float(p.grad.square().sum()) for p in tensors.values()))
            assert strategy.optimizer_step(optimizer) == pytest.approx(norm, rel=1e-5)
            plain.step()
            plain.zero_grad()
            with torch.no_grad():
                for name, parameter in slow.named_parameters():
                    parameter.copy_(tensors[name])
        assert arrived == [torch.float32] * 6
        learned = dict(actor.named_parameters())
        assert all(torch.equal(learned[n], p) and p.dtype is torch.bfloat16 for n, p in slow.named_parameters())
        saved = strategy.full_state_dict(actor)
        assert all(torch.equal(saved[n], p) for n, p in tensors.items())
        below = [(learned[n] == before[n].bfloat16()) & (saved[n] != before[n]) for n in before]
        assert any(bool(moved.any()) for moved in below)  # steps below bf16's spacing are kept
        pieces = {p.name: p.data for p in strategy.model_pieces(actor)}
        assert all(torch.equal(pieces[n], p.detach().reshape(-1)) for n, p in tensors.items())
        with strategy.full_model(actor, torch.float32) as full:
            assert all(torch.equal(p, tensors[n]) for n, p in full.named_parameters())
        strategy.save_optimizer(optimizer, tmp_path / 'optimizer.pt')
        torch.save(before, tmp_path / 'before.pt')
        strategy.load_model(actor, tmp_path / 'before.pt')
        strategy.load_optimizer(optimizer, tmp_path / 'optimizer.pt')
        assert all(torch.equal(t, before[n]) for n, t in strategy.full_state_dict(actor).items() if n in before)
        assert all(torch.equal(p, before[n].bfloat16()) for n, p in actor.named_parameters())
        assert {s['exp_avg'].dtype for s in optimizer.state.values()} == {torch.float32}
    assert all(torch.equal(p, before[n]) for n, p in policy.named_parameters())  # fp32 again


def test_a_copy_for_generation_runs_without_autocast(with_16_bits):
    torch.manual_seed(0)
    with NaiveStrategy(precision='bf16', device='cpu') as strategy:
        actor, _ = trained_under(strategy, Actor(tiny_causal_lm('llama')))
        with strategy.full_model(actor) as full:
            assert not any(m._forward_pre_hooks or m._forward_hooks for m in full.modules())
            full.model.lm_head.register_forward_hook(lambda *_: seen.append(torch.is_autocast_enabled('cpu')))
            seen: list[bool] = []
            with torch.no_grad():
                full(batch())
                actor(batch())
    assert seen == [False] and not torch.is_autocast_enabled('cpu')


def test_a_model_of_which_a_part_learns_keeps_its_weights(with_16_bits):
    """A hydra, and a policy of which one layer learns: what does not learn is saved exactly, from fp32."""
    torch.manual_seed(0)
    with NaiveStrategy(precision='bf16', device='cpu') as strategy:
        hydra = shifted(Actor(tiny_causal_lm('gpt2', layers=2), num_layers_unfrozen=1))
        trained_under(strategy, hydra)
        assert {p.dtype for p in hydra.parameters()} == {torch.float32}


def test_weights_that_bf16_cannot_hold_are_loaded_whole(with_16_bits, tmp_path):
    other = adapted(exact_in_bf16=False)
    torch.save(other.state_dict(), tmp_path / 'other.pt')
    with NaiveStrategy(precision='bf16', device='cpu') as strategy:
        actor, _ = trained_under(strategy, adapted(exact_in_bf16=True))
        strategy.load_model(actor, tmp_path / 'other.pt')
        weights = actor.state_dict()
        assert all(torch.equal(weights[n].float(), t) for n, t in other.state_dict().items())


def test_weights_reach_the_device_in_the_dtype_that_they_are_kept_in(with_16_bits):
    dtypes = []

    class Noting(NaiveStrategy):
        def _setup_model(self, model, trained):
            dtypes.append({p.dtype for n, p in model.named_parameters() if '.self_attn.' in n and 'lora' not in n})
            return super()._setup_model(model, trained)

    with Noting(precision='bf16', device='cpu') as strategy:
        strategy.prepare(shifted(Actor(tiny_causal_lm('llama'))))
        trained_under(strategy, adapted(exact_in_bf16=True))
    assert dtypes == [{torch.bfloat16}] * 2


# --- adapters folded into a copy


class Bytes(TorchDispatchMode):
    """A mode that records the peak bytes of tensors that operations inside have created."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: dict[int, tuple[torch.multiprocessing.reductions.StorageWeakRef, int]] = {}
        self.peak = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor):
            storage = out.untyped_storage()
            reference = torch.multiprocessing.reductions.StorageWeakRef(storage)
            self.storages[reference.cdata] = (reference, storage.nbytes())
            self.storages = {k: v for k, v in self.storages.items() if not v[0].expired()}
            self.peak = max(self.peak, sum(size for _, size in self.storages.values()))
        return out


def test_a_copy_for_generation_needs_no_second_set_of_weights_in_fp32():
    actor = adapted(exact_in_bf16=False)
    layers = lora.lora_layers(actor).values()
    whole = sum(layer.weight.numel() for layer in layers)
    largest = max(layer.weight.numel() for layer in layers)
    before = {n: p.detach().clone() for n, p in actor.named_parameters()}
    own = sum(p.numel() for p in actor.parameters())
    with Bytes() as counted:
        copied = cast_copy(actor, torch.bfloat16)
    # the copy, and product, sum and temporaries of one layer; a second set of fp32 weights would add 4 * whole
    assert counted.peak - 2 * own <= 16 * largest < 4 * whole
    assert all(torch.equal(p, before[n]) for n, p in actor.named_parameters())
    folded = {n: layer.folded_weight().bfloat16() for n, layer in lora.lora_layers(actor).items()}
    assert all(torch.equal(copied.get_submodule(n).weight, w) for n, w in folded.items())


def test_what_stays_in_fp32_in_a_copy_is_what_transformers_keeps_in_it(tmp_path):
    """XGLM's and M2M-100's sinusoids are added to states, so they take the dtype; rotary frequencies lose their meaning
    in it, and gates that a model class names stay."""
    sizes = {'vocab_size': 64, 'd_model': 32, 'ffn_dim': 48, 'num_layers': 1, 'attention_heads': 4}
    torch.manual_seed(0)
    xglm = Actor(AutoModelForCausalLM.from_config(XGLMConfig(**sizes, max_position_embeddings=64)).eval())
    sides = {f'{side}_{name}': n for side in ('encoder', 'decoder') for name, n in M2M_SIZES.items()}
    m2m_config = M2M100Config(vocab_size=64, d_model=32, max_position_embeddings=64, **sides, decoder_start_token_id=2)
    m2m = Actor(AutoModelForSeq2SeqLM.from_config(m2m_config).eval())
    llama = Actor(tiny_causal_lm('llama'))
    llama.model._keep_in_fp32_modules_strict = {'mlp.gate_proj'}
    for actor in (xglm, m2m, llama):
        actor.model.save_pretrained(tmp_path)
        theirs = type(actor.model).from_pretrained(tmp_path, dtype=torch.bfloat16)
        ours = cast_copy(actor, torch.bfloat16)
        want = {f'model.{name}': t.dtype for name, t in (*theirs.named_parameters(), *theirs.named_buffers())}
        if actor is llama:
            want |= {name: torch.float32 for name in want if 'mlp.gate_proj' in name}
        assert {name: t.dtype for name, t in (*ours.named_parameters(), *ours.named_buffers())} == want
        assert len(set(want.values())) == 1 + (actor is llama)
    batch = collate(tiny_sequences())
    with torch.no_grad():
        for actor in (xglm, m2m):
            found = cast_copy(actor, torch.bfloat16)(batch).logprobs.float()
            assert torch.allclose(found, actor(batch).logprobs, atol=0.1)
    sines = 'encoder.embed_positions.weights'
    assert torch.equal(
        cast_copy(m2m, torch.bfloat16).model.model.get_buffer(sines), m2m.model.model.get_buffer(sines).bfloat16()
    )


def test_an_adapter_that_is_switched_off_is_not_folded_in():
    actor = adapted(exact_in_bf16=False)
    with actor.adapter_disabled(), pytest.raises(ValueError, match='the adapter is switched off'):
        cast_copy(actor, torch.bfloat16)


# --- a CPU without instructions for 16 bits


@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16])
def test_products_there_are_of_rounded_numbers_and_rounded_once(dtype):
    """Compares forward and backward with exact sums of the rounded numbers."""
    generator = torch.Generator().manual_seed(0)
    a, w, g = (torch.randn(s, generator=generator).to(dtype) for s in ((5, 33), (7, 33), (5, 7)))
    seen = []

    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append((func, args[0].dtype if args and isinstance(args[0], torch.Tensor) else None))
            return func(*args, **(kwargs or {}))

    x, weight = a.clone().requires_grad_(), w.clone().requires_grad_()
    with Seen(), WideProducts():
        y = nn.functional.linear(x, weight)
        y.backward(g)
    wants = {'y': (y, a.double() @ w.double().T), 'x': (x.grad, g.double() @ w.double())}
    for got, want in (*wants.values(), (weight.grad, g.double().T @ a.double())):
        assert got.dtype is dtype and float((got.double() - want.to(dtype).double()).abs().max()) <= float(
            torch.finfo(dtype).eps * want.abs().max()
        )
    products = {dtype for func, dtype in seen if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm)}
    assert products == {torch.float32}


def test_there_learning_is_in_bf16_and_generation_and_scores_are_in_fp32(without_16_bits):
    """Scores and values have the bits of fp32; the first KL is 0 and the first ratio 1, since both sides are computed
    in the same way."""

    class Dtypes(LocalEngine):
        def begin(self, actor):
            assert next(actor.parameters()).dtype is torch.float32
            super().begin(actor)

    torch.manual_seed(0)
    scorer, policy, values = (kind(tiny_causal_lm('gpt2')) for kind in (RewardModel, Actor, Critic))
    prompts, scores = [torch.tensor([3 + i, 5, 7]) for i in range(4)], {}
    for precision in ('fp32', 'bf16'):
        with warnings.catch_warnings(), NaiveStrategy(seed=1, precision='fp32', device='cpu') as fp32:
            warnings.simplefilter('ignore')
            strategy = fp32 if precision == 'fp32' else NaiveStrategy(seed=1, precision='bf16', device='cpu')
            models = copy.deepcopy((policy, values))
            (actor, optim), (critic, critic_optim) = (
                strategy.prepare((m, strategy.make_optimizer(m.parameters(), lr=1e-3))) for m in models
            )
            trainer = PPOTrainer(
                strategy,
                actor,
                critic,
                strategy.prepare(copy.deepcopy(scorer)),
                strategy.prepare(copy.deepcopy(policy)),
                optim,
                critic_optim,
                engine=Dtypes(),
                experience_batch_size=4,
                train_batch_size=4,
                max_new_tokens=6,
                min_new_tokens=6,
                max_epochs=1,
            )
            trainer.set_prompts(prompts)
            trainer.collect(1)
            scores[precision] = [
                (e.score, e.response_ids.tolist(), e.values.tolist()) for e in trainer.last_experiences
            ]
            assert {p.dtype for p in trainer.maker.reference.initial_model.parameters()} == {torch.float32}
            kl = max(float(e.kl.abs().max()) for e in trainer.last_experiences)
            metrics = trainer.learn()
            assert strategy.numerics.dtype is (torch.float32 if precision == 'fp32' else torch.bfloat16)
            assert kl < 1e-6 and metrics['ppo/first_ratio_error'] < 1e-6
            assert math.isfinite(metrics['ppo/actor_grad_norm'])
    assert scores['bf16'] == scores['fp32']


def test_a_narrow_model_is_what_it_was_after_the_strategy(with_16_bits):
    """Closing the strategy removes hooks and restores dtypes; before, calls of the transformers model work."""
    torch.manual_seed(0)
    model = AutoRM(config=tiny_config('llama')).eval()
    batch = collate(tiny_sequences())
    with NaiveStrategy(precision='bf16', device='cpu') as strategy:
        strategy.prepare(model)
        assert any(p.dtype == torch.bfloat16 for p in model.parameters())
        with torch.no_grad():
            assert model.model(input_ids=batch.input_ids).last_hidden_state.isfinite().all()
            with strategy.full_model(model, torch.float32) as full:
                wide = full(batch)
                assert {p.dtype for p in full.parameters()} == {torch.float32}
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert not model._forward_pre_hooks and not model.model._forward_pre_hooks
    with torch.no_grad():
        assert torch.equal(model(batch), wide), 'fp32, of the rounded weights'


def test_the_copy_that_generates_does_not_autocast(with_16_bits):
    """With adapters on a bf16 folder the trained model enters autocast by hooks; the copy of one dtype must not."""
    torch.manual_seed(0)
    actor = AutoActor(config=tiny_config('llama'), lora_rank=2)
    with torch.no_grad():
        for parameter in actor.parameters():
            parameter.copy_(parameter.bfloat16())
    seen = []
    with NaiveStrategy(precision='bf16', device='cpu') as strategy:
        optimizer = torch.optim.AdamW([p for p in actor.parameters() if p.requires_grad])
        actor, optimizer = strategy.prepare((actor, optimizer))
        with strategy.full_model(actor) as full, torch.no_grad():
            for model in (actor, full):
                model.model.model.norm.register_forward_hook(lambda *_: seen.append(torch.is_autocast_enabled('cpu')))
                model(collate(tiny_sequences()))
            assert {p.dtype for p in full.parameters()} == {torch.bfloat16}
    assert seen == [True, False]


def test_a_trunk_that_learns_elsewhere_is_not_rounded():
    torch.manual_seed(0)
    actor = AutoActor(config=tiny_config('llama'))
    reward_model = RewardModel(actor.model.model)
    for parameter in actor.model.model.parameters():
        parameter.requires_grad_(False)
    before = {n: p.clone() for n, p in actor.named_parameters()}
    with NaiveStrategy(precision='bf16', device='cpu') as strategy:
        optimizer = torch.optim.SGD([p for p in actor.parameters() if p.requires_grad], lr=0.1)
        strategy.prepare((actor, optimizer), reward_model)
        assert all(torch.equal(before[n], p.float()) for n, p in actor.named_parameters())
