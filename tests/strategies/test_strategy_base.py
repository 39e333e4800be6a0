"""The base class of strategies, on one process: prepare, clipping by hand, loss scaling, LoRA, files, names of
states."""

from __future__ import annotations

import copy
import math
import os
import re
from collections import namedtuple

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from chatgpt.nn.lora import convert_to_lora, has_lora, lora_layers, merged_state_dict
from chatgpt.strategies import FSDPStrategy, NaiveStrategy, Strategy
from chatgpt.strategies.checkpoint import CheckpointError, CheckpointMismatch, DictReader, write_checkpoint
from chatgpt.strategies.precision import LossScaler
from chatgpt.testing.tiny import TinyPolicy


@pytest.fixture
def strategy():
    with NaiveStrategy(device='cpu') as naive:
        yield naive


def pair(strategy: Strategy, **settings):
    model = TinyPolicy(seed=1)
    return strategy.prepare((model, torch.optim.AdamW(model.parameters(), lr=0.1, **settings)))


def take_step(strategy, model, optimizer, factor=1.0):
    loss = sum((p * factor).square().sum() for p in model.parameters())
    strategy.backward(loss, model, optimizer)
    return strategy.optimizer_step(optimizer)


# --- prepare


def test_named_tuples_lists_and_pairs_keep_their_kind(strategy):
    Models = namedtuple('Models', ['actor', 'others'])
    actor, frozen = nn.Linear(2, 2), nn.Linear(2, 2)
    optimizer = torch.optim.SGD(actor.parameters(), lr=1.0)
    out = strategy.prepare(Models([actor, optimizer], ({}.get, None)), frozen)
    assert type(out[0]) is Models and type(out[0].actor) is list and out[0].actor == [actor, optimizer]
    assert out[0].others[1] is None and callable(out[0].others[0]) and out[1] is frozen
    assert strategy.prepare() == ()


def test_a_trained_model_given_bare_too_stays_trained(strategy):
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    bare, (trained, _) = strategy.prepare(model, (model, optimizer))
    assert bare is trained and all(p.requires_grad for p in model.parameters()) and model.training
    assert strategy.prepare((model, optimizer)) == (model, optimizer)


def test_what_cannot_be_prepared(strategy):
    frozen = nn.Linear(1, 1)
    for item in (3, 'actor.pt', {'model': nn.Linear(1, 1)}):
        with pytest.raises(ValueError, match=f'cannot prepare a {type(item).__name__}'):
            strategy.prepare(frozen, [item])
        assert frozen.weight.requires_grad  # nothing has changed
    with pytest.raises(ValueError, match=r'2 parameter\(s\) in group 0 of SGD do not belong to the Linear'):
        strategy.prepare((nn.Linear(1, 1), torch.optim.SGD(nn.Linear(1, 1).parameters())))
    one, two = nn.Linear(1, 1), nn.Linear(1, 1)
    optimizer = torch.optim.SGD(one.parameters())
    strategy.prepare((one, optimizer))
    with pytest.raises(ValueError, match='already paired with another model'):
        strategy.prepare((two, optimizer))


@pytest.mark.parametrize(
    ('kind', 'given', 'message'),
    [
        (FSDPStrategy, {'cpu_ofload': True}, "FSDPStrategy has no option 'cpu_ofload'; did you mean cpu_offload?"),
        (NaiveStrategy, {'precison': 'fp32'}, "NaiveStrategy has no option 'precison'; did you mean precision?"),
        (NaiveStrategy, {'determinstic': True}, "NaiveStrategy has no option 'determinstic'; did you mean determin"),
    ],
)
def test_an_unknown_option_names_the_strategy_and_the_nearest_one(kind, given, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        kind(**given)


def test_seed_and_precision():
    values = []
    for seed in (7, 7, 8):
        with NaiveStrategy(seed=seed, device='cpu'):
            values.append(torch.rand(1).item())
    assert values[0] == values[1] != values[2]
    with pytest.raises(ValueError, match="precision='fp8' is not one of 'auto', 'fp32', 'bf16', 'fp16'"):
        NaiveStrategy(precision='fp8')
    with pytest.raises(ValueError, match="op='product'"):
        NaiveStrategy(device='cpu').all_reduce(torch.ones(1), op='product')


# --- one step


def test_clipping_by_hand(strategy):
    model = nn.Linear(2, 1, bias=False)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[1.0, 1.0]]))
    model, optimizer = strategy.prepare((model, torch.optim.SGD(model.parameters(), lr=1.0)))
    strategy.backward(model(torch.tensor([[3.0, 4.0]])).sum(), model, optimizer)
    assert strategy.optimizer_step(optimizer, max_norm=2.5) == 5.0
    # gradient (3, 4) of norm 5 is halved
    torch.testing.assert_close(model.weight.detach(), torch.tensor([[1 - 1.5, 1 - 2.0]]), atol=1e-6, rtol=0)
    strategy.backward(model(torch.tensor([[3.0, 4.0]])).sum(), model, optimizer)
    assert strategy.optimizer_step(optimizer, max_norm=10) == 5.0  # below the limit, so not clipped
    torch.testing.assert_close(model.weight.detach(), torch.tensor([[-0.5 - 3.0, -1.0 - 4.0]]), atol=1e-6, rtol=0)
    assert strategy.optimizer_step(optimizer) == 0.0  # the gradients were cleared


def test_loss_scaler_by_hand():
    scaler = LossScaler(8.0, growth_interval=3)
    gradients = [torch.tensor([16.0, -8.0])]
    scaler.unscale(gradients)
    assert gradients[0].tolist() == [2.0, -1.0]
    seen = []
    for finite in (True, True, False, True, True, True, True):
        scaler.update(finite)
        seen.append((scaler.scale, scaler.num_finite))
    assert seen == [(8, 1), (8, 2), (4, 0), (4, 1), (4, 2), (8, 0), (8, 1)]
    other = LossScaler()
    other.from_json(scaler.to_json())
    assert (other.scale, other.num_finite) == (8, 1)


def test_fp16_skips_and_recovers_and_its_scale_is_saved(tmp_path):
    with NaiveStrategy(precision='fp16', device='cpu') as strategy:
        assert strategy.numerics.scales_loss
        model = nn.Linear(4, 1, bias=False)
        start = model.weight.detach().clone()
        model, optimizer = strategy.prepare((model, torch.optim.SGD(model.parameters(), lr=1e-4)))
        norms = []
        for _ in range(8):
            with strategy.autocast():
                loss = model(torch.full((1, 4), 10.0)).sum()  # gradients of 10: 10 * 65536 overflows fp16
            strategy.backward(loss, model, optimizer)
            norms.append(strategy.optimizer_step(optimizer))
            if not math.isfinite(norms[-1]):
                assert torch.equal(model.weight, start)
        assert not math.isfinite(norms[0]) and norms[-1] == pytest.approx(20.0)
        assert not torch.equal(model.weight, start)
        scale = strategy._pair(optimizer).scaler.scale
        assert scale < 65536
        strategy.save_optimizer(optimizer, tmp_path / 'o.pt')
        again = nn.Linear(4, 1, bias=False)
        again, again_optimizer = strategy.prepare((again, torch.optim.SGD(again.parameters(), lr=1.0)))
        strategy.load_optimizer(again_optimizer, tmp_path / 'o.pt')
        assert strategy._pair(again_optimizer).scaler.scale == scale


# --- full weights


@pytest.mark.parametrize('precision', ['fp32', 'bf16'])
def test_full_model_merges_lora_and_restores_bits(precision, with_16_bits):
    with NaiveStrategy(precision=precision, device='cpu') as strategy:
        model = TinyPolicy()
        convert_to_lora(model, 2)
        with torch.no_grad():
            for layer in lora_layers(model).values():
                layer.lora_B.normal_()
        model, _ = strategy.prepare((model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])))
        model.blocks[0].eval()
        before = {n: t.clone() for n, t in model.state_dict().items()}
        folded = {n: t.clone() for n, t in merged_state_dict(model).items()}
        name = 'blocks.0.up.weight'
        assert not torch.equal(before[name], folded[name])
        with pytest.raises(KeyError), strategy.full_model(model) as full:
            assert (full is model) == (precision == 'fp32')
            assert torch.equal(full.get_parameter(name), folded[name].to(strategy.numerics.dtype))
            assert full.temperature.dtype is torch.float32 and not full.training
            assert full.head.weight is full.embed.weight
            if precision == 'bf16':  # folding the copy again must not add the adapter twice
                assert torch.equal(merged_state_dict(full)[name], folded[name].bfloat16())
            raise KeyError  # changes are restored after an exception too
        assert {n: torch.equal(t, before[n]) for n, t in model.state_dict().items()} == dict.fromkeys(before, True)
        assert model.training and not model.blocks[0].training and has_lora(model)


# --- files


def test_a_malicious_pickle_runs_nothing(strategy, tmp_path):
    trap = tmp_path / 'sprung'

    class Malicious:
        def __reduce__(self):
            return (os.mkdir, (str(trap),))

    model, optimizer = pair(strategy)
    malicious = Malicious()
    torch.save({'meta': {}, 'state': {'x': malicious}, 'embed.weight': malicious}, tmp_path / 'evil.pt')
    for load, thing in ((strategy.load_model, model), (strategy.load_optimizer, optimizer)):
        with pytest.raises(CheckpointError, match='evil.pt: a pickle that holds more than tensors.*save_file'):
            load(thing, tmp_path / 'evil.pt')
        assert not trap.exists()
    torch.load(tmp_path / 'evil.pt', weights_only=False)  # the trap works
    assert trap.exists()


def test_model_files_are_plain(strategy, tmp_path):
    model, _ = pair(strategy)
    strategy.save_model(model, tmp_path / 'new' / 'model.pt')
    state = torch.load(tmp_path / 'new' / 'model.pt', weights_only=True)
    assert state.keys() == model.state_dict().keys()
    TinyPolicy(seed=5).load_state_dict(state)
    strategy.save_model(model, tmp_path / 'model.safetensors')
    plain = load_file(tmp_path / 'model.safetensors')
    assert set(state) - set(plain) == {'head.weight'}  # tied: stored once
    other = TinyPolicy(seed=5)
    strategy.load_model(other, tmp_path / 'model.safetensors')
    assert torch.equal(other.head.weight, model.embed.weight)
    assert sorted(p.name for p in tmp_path.iterdir()) == ['model.safetensors', 'new']  # no temporary files


def test_a_tensor_without_elements_is_not_missing_in_a_folder(strategy, tmp_path):
    model, other = (nn.Linear(2, 2) for _ in 'ab')
    for module in (model, other):
        module.register_buffer('nothing', torch.zeros(0, 3))
    write_checkpoint(tmp_path / 'model', {'': strategy.model_pieces(model)}, meta={'kind': 'model'})
    assert not torch.equal(other.weight, model.weight)
    strategy.load_model(other, tmp_path / 'model')
    assert torch.equal(other.weight, model.weight) and other.nothing.shape == (0, 3)


def test_damaged_files_are_refused_by_name(strategy, tmp_path):
    model, _ = pair(strategy)
    for path in (tmp_path / 'model.pt', tmp_path / 'model.safetensors'):
        strategy.save_model(model, path)
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
        with pytest.raises(CheckpointError, match=path.name):
            strategy.load_model(model, path)


def test_a_failed_write_leaves_the_old_file(strategy, tmp_path, monkeypatch):
    model, optimizer = pair(strategy)
    for save, path in ((strategy.save_model, tmp_path / 'm.pt'), (strategy.save_optimizer, tmp_path / 'o.pt')):
        thing = model if path.name == 'm.pt' else optimizer
        save(thing, path)
        old = path.read_bytes()
        take_step(strategy, model, optimizer)
        with monkeypatch.context() as patch:
            patch.setattr(os, 'fsync', lambda _: (_ for _ in ()).throw(OSError(28, 'No space left on device')))
            with pytest.raises(CheckpointError, match='No space left on device'):
                save(thing, path)
        assert path.read_bytes() == old
        save(thing, path)
        assert path.read_bytes() != old
    assert len(list(tmp_path.iterdir())) == 2


# --- optimizer states


def test_optimizer_states_are_found_by_name_whatever_the_order(strategy, tmp_path):
    model, optimizer = pair(strategy)
    take_step(strategy, model, optimizer, 2.0)
    strategy.save_optimizer(optimizer, tmp_path / 'o.pt')
    content = torch.load(tmp_path / 'o.pt', weights_only=True)
    assert set(content['state']) == {
        f'{n}/{s}' for n, _ in model.named_parameters() for s in ('exp_avg', 'exp_avg_sq', 'step')
    }
    other = TinyPolicy(seed=1)
    reordered = list(reversed(list(other.parameters())))
    other, other_optimizer = strategy.prepare((other, torch.optim.AdamW(reordered, lr=9.0)))
    strategy.load_optimizer(other_optimizer, tmp_path / 'o.pt')
    assert other_optimizer.param_groups[0]['lr'] == 0.1 and other_optimizer.param_groups[0]['betas'] == (0.9, 0.999)
    mine, theirs = dict(model.named_parameters()), dict(other.named_parameters())
    for name in mine:
        for slot in ('exp_avg', 'exp_avg_sq', 'step'):
            assert torch.equal(optimizer.state[mine[name]][slot], other_optimizer.state[theirs[name]][slot])


def test_what_a_checkpoint_lacks_and_has_too_much_is_named(strategy):
    model, _ = pair(strategy)
    state = {n: t for n, t in model.state_dict().items() if n not in ('norm.weight', 'norm.bias')}
    state |= {'extra': torch.zeros(1), 'blocks.1.up.bias': torch.zeros(3)}
    with pytest.raises(CheckpointMismatch) as caught:
        strategy.load_model_pieces(model, DictReader(state))
    assert str(caught.value) == (
        'the checkpoint does not fit: missing norm.weight, norm.bias; unexpected extra; '
        'wrong shape blocks.1.up.bias: checkpoint (3,), model (14,)'
    )
    del state['blocks.1.up.bias']
    with pytest.warns(UserWarning, match=r'loaded 13 of 16 tensors: missing .*blocks.1.up.bias.*unexpected extra'):
        strategy.load_model_pieces(model, DictReader(state), strict=False)


def test_groups_are_matched_by_their_parameters(strategy, tmp_path):
    def grouped(first, second, swap=False):
        model = TinyPolicy()
        decayed = [p for p in model.parameters() if p.dim() > 1]
        rest = [p for p in model.parameters() if p.dim() <= 1]
        groups = [{'params': decayed, 'weight_decay': first}, {'params': rest, 'weight_decay': second}]
        return strategy.prepare((model, torch.optim.AdamW(groups[::-1] if swap else groups)))

    _, optimizer = grouped(0.25, 0.0)
    strategy.save_optimizer(optimizer, tmp_path / 'o.pt')
    _, swapped = grouped(9.0, 9.0, swap=True)
    strategy.load_optimizer(swapped, tmp_path / 'o.pt')
    assert [g['weight_decay'] for g in swapped.param_groups] == [0.0, 0.25]
    _, one_group = pair(strategy)
    with pytest.raises(CheckpointMismatch, match='parameters of group 0 are spread over'):
        strategy.load_optimizer(one_group, tmp_path / 'o.pt')


def test_optimizer_of_another_model_is_refused(strategy, tmp_path):
    model, optimizer = pair(strategy)
    take_step(strategy, model, optimizer)
    strategy.save_optimizer(optimizer, tmp_path / 'o.pt')
    small = TinyPolicy(num_blocks=1)
    small, small_optimizer = strategy.prepare((small, torch.optim.AdamW(small.parameters())))
    with pytest.raises(CheckpointMismatch, match=r'unexpected blocks.1.down.bias'):
        strategy.load_optimizer(small_optimizer, tmp_path / 'o.pt')
    strategy.save_model(model, tmp_path / 'm.pt')
    with pytest.raises(CheckpointMismatch, match='m.pt: expected a saved optimizer'):
        strategy.load_optimizer(optimizer, tmp_path / 'm.pt')


def test_other_optimizers_states(strategy, tmp_path):
    for make in (
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        lambda p: torch.optim.Adafactor(p, lr=0.1),
        lambda p: torch.optim.AdamW(p, lr=0.1, amsgrad=True),
    ):
        model = TinyPolicy()
        model, optimizer = strategy.prepare((model, make(model.parameters())))
        for _ in range(2):
            take_step(strategy, model, optimizer)
        strategy.save_optimizer(optimizer, tmp_path / 'o.pt')
        other = copy.deepcopy(model)
        other, other_optimizer = strategy.prepare((other, make(other.parameters())))
        strategy.load_optimizer(other_optimizer, tmp_path / 'o.pt')
        take_step(strategy, model, optimizer)
        take_step(strategy, other, other_optimizer)
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


def test_a_strided_parameter_loads(strategy):
    model = nn.Linear(2, 3, bias=False)
    model.weight = nn.Parameter(torch.zeros(2, 3).t())
    wanted = torch.arange(6.0).view(3, 2)
    strategy.load_model_pieces(model, DictReader({'weight': wanted}))
    assert torch.equal(model.weight, wanted)
    assert next(iter(strategy.model_pieces(model))).data.tolist() == [0, 1, 2, 3, 4, 5]
