"""`reproducible='exact'`: atoms, sums in a fixed order, a norm independent of the order, elementwise optimizers.
`deterministic=True`: the settings of torch, and two runs of a model with attention."""

from __future__ import annotations

import functools
import math
import operator
import os
import random
from contextlib import nullcontext
from fractions import Fraction

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim import AdamW

from chatgpt.batching import cut_by_tokens, micro_batches
from chatgpt.launch.arguments import strategy_of
from chatgpt.launch.runs import SFTRun
from chatgpt.strategies import DDPStrategy, NaiveStrategy
from chatgpt.strategies.memory import Layout, MemoryModel, ModelSize, ParameterSize
from chatgpt.strategies.ranks import OneProcess
from chatgpt.strategies.registry import STRATEGIES, StrategyEntry, strategy_by_name
from chatgpt.strategies.sums import (
    ExactSums,
    Sums,
    TreeSum,
    check_elementwise,
    exact_norm,
    rounded_sum,
    tree_all_reduce,
)
from chatgpt.testing import tiny_causal_lm
from chatgpt.testing.processes import run_distributed
from chatgpt.trainer.metrics import BatchStats, Highest, Mean

# ---------------------------------------------------------------------- atoms


class Rank(OneProcess):
    """Rank `rank` of `world_size` without other processes, to test how batches are split."""

    def __init__(self, rank: int, world_size: int) -> None:
        super().__init__('cpu')
        self.rank, self.world_size = rank, world_size


def on_all(ranks: int, *args, **kw) -> list[ExactSums]:
    return [ExactSums(Rank(rank, ranks), *args, **kw) for rank in range(ranks)]


@pytest.mark.parametrize('below', [False, True])
@pytest.mark.parametrize('ranks', [1, 2, 4, 8])
def test_every_atom_is_of_one_rank(ranks, below):
    owned = [[number for number, _ in sums.rounds([5] * 9, None)] for sums in on_all(ranks, ranks_below=below)]
    assert sorted(atom for share in owned for atom in share) == list(range(8))
    assert {len(share) for share in owned} == {8 // ranks}
    assert owned[0] == (list(range(0, 8, ranks)) if below else list(range(8 // ranks)))


@pytest.mark.parametrize('below', [False, True])
@pytest.mark.parametrize('count', [1, 5, 8, 21])
def test_a_train_batch_is_cut_alike_for_any_ranks(count, below):
    lengths = [3 + (7 * i) % 11 for i in range(count)]
    whole = on_all(1)[0].rounds(lengths, None)
    assert len(whole) == 8 and sorted(i for _, (atom,) in whole for i in atom) == list(range(count))
    for ranks in (2, 4, 8):
        rounds = [round for sums in on_all(ranks, ranks_below=below) for round in sums.rounds(lengths, None)]
        assert sorted(rounds) == whole
    assert Sums(Rank(1, 2)).rounds(lengths, 30) == [(1, micro_batches(lengths, 2, 30)[1])]


@pytest.mark.parametrize('count', [2, 4, 8, 12, 20, 24, 40])
def test_a_timestep_is_cut_alike_for_any_ranks(count):
    """Each rank splits its own samples, without those of others."""
    whole = on_all(1)[0].parts(count)
    assert [i for atom in whole for i in atom] == list(range(count))
    for ranks in (n for n in (2, 4, 8) if count % n == 0):
        share = count // ranks
        of_all = [[r * share + i for i in atom] for r, sums in enumerate(on_all(ranks)) for atom in sums.parts(share)]
        assert of_all == whole
        assert [i for sums in on_all(ranks) for i in sums.own_range(count)] == list(range(-(-count // 8) * 8))
    with pytest.raises(ValueError, match='ranks have between 1 and 2 samples; give each the same number'):
        on_all(1)[0].check_counts(1, 2)
    Sums(Rank(0, 2)).check_counts(1, 2)


def test_a_sweep_runs_the_same_forwards_for_any_ranks():
    lengths = [2 + (5 * i) % 13 for i in range(37)]

    def forwards(of_all: list[Sums]) -> list[tuple[int, ...]]:
        cuts = [sums.share(lengths, 30) for sums in of_all]
        assert len({len(of_rank) for of_rank in cuts}) == 1
        return sorted(tuple(cut) for of_rank in cuts for cut in of_rank if cut)

    assert forwards(on_all(1)) == forwards(on_all(2)) == forwards(on_all(4)) == forwards(on_all(8))
    atoms = [atom for _, (atom,) in on_all(1)[0].rounds(lengths, None)]
    assert any(len(cut_by_tokens([lengths[i] for i in atom], 30)) > 1 for atom in atoms)
    assert forwards([Sums(Rank(0, 1))]) != forwards([Sums(Rank(0, 2)), Sums(Rank(1, 2))])  # negative control


def test_layouts_that_do_not_fit_are_refused():
    for atoms, ranks, message in (
        (6, 1, 'atoms=6 must be a power of two'),
        (0, 1, 'atoms=0 must be a power of two'),
        (8, 3, '8 atoms cannot be dealt to 3 processes; start 1 or 2 or 4 or 8 of them'),
        (4, 8, '4 atoms cannot be dealt to 8 processes; start 1 or 2 or 4 of them'),
    ):
        with pytest.raises(ValueError, match=message):
            ExactSums(Rank(0, ranks), atoms)
    with pytest.raises(ValueError, match='8 atoms cannot be dealt to 3 processes'):
        SFTRun(reproducible='exact', train_batch_size=12).validate(world_size=3)
    SFTRun(train_batch_size=12).validate(world_size=3)


def test_an_atom_is_never_split():
    sums = ExactSums(Rank(0, 1), 4)
    with pytest.raises(ValueError, match='of the 4 atoms of a train batch of 12 has 3 rows of up to 9 tokens, 27 '):
        sums.rounds([9] * 12, 26)
    assert [len(atom) for _, (atom,) in sums.rounds([9] * 12, 27)] == [3] * 4


# ---------------------------------------------------------------------- sums


def single(number: float) -> float:
    return float(torch.tensor(number, dtype=torch.float32))


def plus(a: float, b: float) -> float:
    return single(a + b)


def by_hand(x: list[float]) -> float:
    """Returns ((1 + 2) + (3 + 4)) + ((5 + 6) + (7 + 8)), each sum rounded to fp32."""
    return plus(plus(plus(x[0], x[1]), plus(x[2], x[3])), plus(plus(x[4], x[5]), plus(x[6], x[7])))


UNEVEN = [single(x) for x in (1e8, 3.3, -1e8, 0.7, 1234.567, 1e-3, -1234.5, 5.5)]


def test_a_tree_of_sums():
    tree = TreeSum(8)
    for x in UNEVEN:
        tree.add([torch.tensor([x])])
    (total,) = tree.finish()
    assert float(total) == by_hand(UNEVEN)
    in_turn = 0.0
    for x in UNEVEN:
        in_turn = plus(in_turn, x)
    assert in_turn != by_hand(UNEVEN)  # negative control: the result depends on the order
    assert tree.count == 0


def test_what_has_no_gradient_counts_as_zero():
    """Three parameters: one used by two atoms, one by none, and one with the gradient -0 in a single atom."""
    tree, used = TreeSum(8), {1: 2.0, 6: 3.0}
    for i in range(8):
        tree.add([torch.tensor([used[i]]) if i in used else None, None, torch.tensor([-0.0]) if i == 3 else None])
    first, second, third = tree.finish()
    assert float(first) == 5.0 and second is None
    assert math.copysign(1.0, float(third)) == 1.0


def test_a_step_needs_every_atom():
    with NaiveStrategy(device='cpu', reproducible='exact') as strategy:
        model, optimizer = strategy.prepare((m := nn.Linear(2, 1), torch.optim.AdamW(m.parameters())))
        for _ in range(3):
            with strategy.accumulate(model, last=True):
                strategy.backward(model(torch.ones(1, 2)).sum(), model, optimizer)
        with pytest.raises(RuntimeError, match='needs the gradients of 8 atoms on this rank, and has those of 3'):
            strategy.optimizer_step(optimizer)


def reduced(numbers: list[float]) -> list[float]:
    import torch.distributed as dist

    return tree_all_reduce(torch.tensor([numbers[dist.get_rank()]] * 7)).tolist()


def test_ranks_are_added_in_the_same_tree():
    four = UNEVEN[:4]
    want = plus(plus(four[0], four[1]), plus(four[2], four[3]))
    assert want != plus(plus(plus(four[0], four[1]), four[2]), four[3])
    assert run_distributed(reduced, 4, four, init_group=True) == [[want] * 7] * 4


# ---------------------------------------------------------------------- the norm


def gradients() -> torch.Tensor:
    """Returns gradients over 80 powers of two, including fp32's smallest numbers."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(5000, generator=generator) * 2.0 ** torch.randint(-60, 20, (5000,), generator=generator)


def test_the_norm_is_right():
    wide = gradients().tolist() + [1e-45]
    want = math.sqrt(sum(Fraction(x) ** 2 for x in wide))
    assert exact_norm([torch.tensor(wide)], torch.device('cpu')) == pytest.approx(want, rel=1e-14)
    assert exact_norm([torch.tensor([3e-39, 4e-39])], torch.device('cpu')) == pytest.approx(5e-39, rel=1e-5)
    assert exact_norm([torch.full((3,), 2e38)], torch.device('cpu')) == pytest.approx(2e38 * math.sqrt(3), rel=1e-6)
    assert exact_norm([], torch.device('cpu')) == exact_norm([torch.zeros(3)], torch.device('cpu')) == 0.0
    for bad in (math.inf, -math.inf, math.nan):
        assert not math.isfinite(exact_norm([torch.ones(4), torch.tensor([1.0, bad])], torch.device('cpu')))


def one_by_one(numbers: list[float]) -> float:
    """Returns the sum, rounded at each step; `sum` rounds less often from Python 3.12 on."""
    return functools.reduce(operator.add, numbers)


def test_no_sharding_shows_in_the_norm():
    whole, draw = gradients(), random.Random(0)
    norms, plain = set(), set()
    for _ in range(20):
        order = torch.randperm(len(whole), generator=torch.Generator().manual_seed(draw.randrange(1 << 30)))
        parts = list(whole[order].split(draw.randrange(1, 900)))
        norms.add(exact_norm(parts, torch.device('cpu')))
        plain.add(math.sqrt(one_by_one([float(p.square().sum(dtype=torch.float64)) for p in parts])))
    assert len(norms) == 1
    assert len(plain) > 1  # negative control: sums in fp64 depend on the order


def test_metrics_are_rounded_once():
    numbers = [1e16, 1.0, -1e16, 1e-3]
    assert rounded_sum(numbers) == rounded_sum(numbers[::-1]) == 1.001
    assert one_by_one(numbers) != 1.001
    assert rounded_sum([1.0, math.inf]) == math.inf and math.isnan(rounded_sum([math.inf, -math.inf]))
    stats = BatchStats()
    for x in numbers:
        stats.add({'m': Mean(torch.tensor(x, dtype=torch.float64), 2.0), 'h': Highest(torch.tensor(x))})
    with NaiveStrategy(device='cpu', reproducible='exact') as strategy:
        assert stats.reduced(strategy) == {'m': 1.001 / 8, 'h': single(1e16)}


# ---------------------------------------------------------------------- optimizers


class Normalised(torch.optim.SGD):
    """An optimizer with steps of length 1, so that every element depends on all."""

    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group['params']:
                parameter.data.sub_(parameter.grad / parameter.grad.norm())


@pytest.mark.parametrize(
    ('make', 'refused'),
    [
        (lambda p: torch.optim.AdamW(p, foreach=True), ''),
        (lambda p: torch.optim.Adam(p, amsgrad=True), ''),
        (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), ''),
        (lambda p: torch.optim.AdamW(p, fused=True), 'with fused=True: leave that out; AdamW and SGD of torch are'),
        (lambda p: Normalised(p, lr=0.1), 'Normalised steps a part of a tensor otherwise than within the whole; '),
    ],
)
def test_optimizers_are_tried(make, refused):
    parameter = nn.Parameter(torch.ones(3))
    optimizer = make([parameter])
    with pytest.raises(ValueError, match=refused) if refused else nullcontext():
        check_elementwise(optimizer)
    assert torch.equal(parameter, torch.ones(3)) and not optimizer.state


@pytest.mark.parametrize('offset', [0, 1, 5])
def test_odd_shards_step_as_the_whole(offset):
    """Tries all lengths up to two vectors, and some that end within one, in unaligned memory."""
    torch.manual_seed(0)
    size = 3000
    start, *steps = (torch.randn(size) * 10.0 ** torch.randint(-6, 3, (size,)) for _ in range(4))

    def stepped(part: slice) -> torch.Tensor:
        parameter = nn.Parameter(start.clone()[part])  # a view, which may be unaligned
        optimizer = torch.optim.AdamW([parameter], lr=1e-3, weight_decay=0.1)
        for gradient in steps:
            parameter.grad = gradient[part] * 0.37  # clipped
            optimizer.step()
        slots = optimizer.state[parameter]
        return torch.stack([parameter.detach(), slots['exp_avg'], slots['exp_avg_sq'], parameter.detach().bfloat16()])

    whole = stepped(slice(None))
    for length in [*range(1, 35), 67, 127, 1023, 2051]:
        part = slice(offset, offset + length)
        assert torch.equal(stepped(part), whole[:, part]), length


def test_weights_begin_where_memory_does():
    """Weights from files may be unaligned, unlike those that FSDP gathers, which may change the kernel of a BLAS."""
    layer = nn.Linear(5, 3)
    memory = torch.randn(16)
    layer.weight.data = memory[1:].view(3, 5)
    want = layer.weight.clone()
    with NaiveStrategy(device='cpu', reproducible='exact') as strategy:
        layer, _ = strategy.prepare((layer, torch.optim.AdamW(layer.parameters())))
    assert layer.weight.data_ptr() % 64 == 0 and torch.equal(layer.weight, want)


# ---------------------------------------------------------------------- the option


def test_a_second_optimizer_of_a_model_gets_its_own_gradients():
    """It does not get those of an optimizer that was prepared with the model before."""
    with NaiveStrategy(reproducible='exact', atoms=2) as strategy:
        model = nn.Linear(2, 1, bias=False)
        _, other = strategy.prepare((model, torch.optim.SGD(model.parameters(), lr=1.0)))
        _, optimizer = strategy.prepare((model, torch.optim.SGD(model.parameters(), lr=1.0)))
        strategy.backward(model(torch.ones(2)).sum(), model, other)  # its round does not end
        strategy.discard_gradients(other)
        before = model.weight.detach().clone()
        for row in ((1.0, 0.0), (2.0, 3.0)):
            with strategy.accumulate(model, last=True):
                strategy.backward(model(torch.tensor(row)).sum(), model, optimizer)
        assert strategy.optimizer_step(optimizer) == pytest.approx(math.sqrt(18))
        assert torch.equal(model.weight, before - torch.tensor([[3.0, 3.0]]))


def test_by_name_and_from_a_setting():
    with strategy_by_name('naive', reproducible='exact', atoms=4) as strategy:
        assert strategy.sums.atoms == 4
        assert torch.are_deterministic_algorithms_enabled()
    with strategy_of(SFTRun(reproducible='exact')) as strategy:
        assert strategy.sums.atoms == 8
    with strategy_of(SFTRun()) as strategy:
        assert not strategy.sums.exact and not torch.are_deterministic_algorithms_enabled()
    with pytest.raises(ValueError, match="reproducible='yes' is not one of 'exact', None"):
        NaiveStrategy(device='cpu', reproducible='yes')


def test_the_planner_knows_the_sums_that_wait():
    size = ModelSize((ParameterSize('w', (10, 10), True, 0),))
    for processes, waiting in ((1, 3), (2, 2), (8, 0)):
        memory = MemoryModel(atoms=8).trained('actor', size, Layout(num_processes=processes))
        assert memory.device.get('actor waiting gradients', 0) == 400 * waiting
    assert 'actor waiting gradients' not in MemoryModel().trained('actor', size, Layout()).device


# ---------------------------------------------------------------- `deterministic=True`


def state() -> tuple[bool, ...]:
    return (
        torch.are_deterministic_algorithms_enabled(),
        torch.backends.cudnn.deterministic,
        torch.backends.cuda.cudnn_sdp_enabled(),
        torch.backends.cuda.mem_efficient_sdp_enabled(),
        torch.backends.cuda.flash_sdp_enabled(),
        torch.backends.cuda.math_sdp_enabled(),
    )


USUAL, CHOSEN = (False, False, True, True, True, True), (True, True, False, False, True, True)


def trained() -> list[torch.Tensor]:
    """Returns the parameters after three steps of a GPT-2 with torch's attention and dropout."""
    with NaiveStrategy(seed=3, device='cpu', deterministic=True) as strategy:
        assert state() == CHOSEN
        model = tiny_causal_lm('gpt2')
        assert model.config._attn_implementation == 'sdpa'
        model.train()
        model, optimizer = strategy.prepare((model, AdamW(model.parameters(), lr=1e-2)))
        ids = torch.arange(3, 27).view(2, 12)
        for _ in range(3):
            logits = model(ids).logits[:, :-1]
            strategy.backward(cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()), model, optimizer)
            strategy.optimizer_step(optimizer)
        return [p.detach().clone() for p in model.parameters()]


def test_two_runs_are_equal_and_torch_is_as_before(monkeypatch):
    monkeypatch.delenv('CUBLAS_WORKSPACE_CONFIG', raising=False)
    assert state() == USUAL
    one = trained()
    assert state() == USUAL
    assert all(torch.equal(a, b) for a, b in zip(one, trained(), strict=True))
    assert any(not torch.equal(a, b) for a, b in zip(one, tiny_causal_lm('gpt2').parameters(), strict=True))


def test_deterministic_by_name_and_from_a_setting_and_the_users_own_workspace_stays(monkeypatch):
    monkeypatch.setenv('CUBLAS_WORKSPACE_CONFIG', ':16:8')
    with strategy_by_name('naive', deterministic=True):
        assert state() == CHOSEN
        assert os.environ['CUBLAS_WORKSPACE_CONFIG'] == ':16:8'
    with strategy_of(SFTRun(deterministic=True)):
        assert state() == CHOSEN
    with strategy_of(SFTRun()):
        assert state() == USUAL


def test_a_strategy_that_knows_nothing_of_it_is_named(monkeypatch):
    class Old(DDPStrategy):
        def __init__(self, seed=42, precision='fp32') -> None:
            super().__init__(seed, precision)

    monkeypatch.setitem(STRATEGIES, 'old', StrategyEntry(Old))
    with pytest.raises(ValueError, match='deterministic: Old takes no such option; leave it out'):
        strategy_by_name('old', deterministic=True)
