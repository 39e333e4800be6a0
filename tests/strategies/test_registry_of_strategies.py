"""Strategies of third parties: registered or named `file.py:Class`, planned by their memory model, or their own
`Ranks`."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest
import torch

from chatgpt.plan import Setup, make_plan
from chatgpt.strategies import Strategy
from chatgpt.strategies.precision import resolve_precision
from chatgpt.strategies.ranks import OneProcess, Ranks
from chatgpt.strategies.registry import STRATEGIES, StrategyEntry, strategy_by_name
from chatgpt.testing.fakes import tiny_causal_lm, tiny_config

FILE = """
from chatgpt.strategies import NaiveStrategy
from chatgpt.strategies.memory import Memory, MemoryModel


class FrozenOnHost(MemoryModel):
    places_frozen = True

    def frozen(self, name, size, run):
        memory = Memory()
        memory.add(f'{name} weights', 4 * size.total, host=True)
        return memory


class Mine(NaiveStrategy):
    def __init__(self, seed=42, precision='fp32', factor=1):
        super().__init__(seed, precision, device='cpu')
        self.factor = factor

    @classmethod
    def memory_model(cls, **options):
        return FrozenOnHost(bucket_bytes=1000 * options.get('factor', 1))


class NotMadeByName(NaiveStrategy):
    def __init__(self, seed):
        super().__init__(seed)


something = 3
"""


@pytest.fixture(autouse=True)
def registered():
    """Restores the registry after a test."""
    before = dict(STRATEGIES)
    yield
    STRATEGIES.clear()
    STRATEGIES.update(before)


@pytest.fixture
def file(tmp_path) -> str:
    path = tmp_path / 'third_partys.py'
    path.write_text(FILE)
    return str(path)


def test_a_class_in_a_file_is_a_strategy(file):
    with strategy_by_name(f'{file}:Mine', seed=7) as strategy:
        assert type(strategy).__name__ == 'Mine' and strategy.seed == 7
        assert type(strategy) is STRATEGIES.find(f'{file}:Mine').load()  # executed once
    for name, message in (
        ('something', 'is a int, no StrategyEntry'),
        ('Nothing', "has no 'Nothing'"),
        ('NotMadeByName', 'its constructor must take seed and precision'),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            strategy_by_name(f'{file}:{name}')


def test_an_entry_in_a_file_has_options_without_a_flag(tmp_path):
    path = tmp_path / 'two_machines.py'
    path.write_text(
        'from chatgpt.strategies.registry import StrategyEntry\n'
        "hsdp = StrategyEntry('chatgpt.strategies.fsdp:FSDPStrategy', {'replicas': 2, 'reduce_dtype': 'bf16'})\n"
    )
    memory = Setup(config=None, strategy=f'{path}:hsdp', num_processes=4).memory_model
    assert (memory.replicas, memory.tensor_parallel, memory.whole_gradients_gib) == (2, 1, 4.0)
    assert STRATEGIES.find(f'{path}:hsdp').options['reduce_dtype'] == 'bf16'


def test_it_is_known_by_name_everywhere(file, capsys):
    from chatgpt.launch.arguments import Parser, add_strategy
    from chatgpt.plan.__main__ import parser

    STRATEGIES['mine'] = StrategyEntry(f'{file}:Mine', {'factor': 3})
    with strategy_by_name('mine', precision='bf16') as strategy:
        assert (strategy.factor, strategy.numerics.dtype) == (3, torch.bfloat16)
    flags = Parser()
    add_strategy(flags)
    for text in ('mine', f'{file}:Mine'):
        assert flags.parse_args(['--strategy', text]).strategy == text
        assert parser().parse_args(['config.json', '--strategy', text]).strategy == text
    for given in (['--strategy', 'mina'], ['--help']):
        with pytest.raises(SystemExit):
            flags.parse_args(given)
    printed = capsys.readouterr()
    assert "strategy='mina' is not known; choose one of naive, ddp" in printed.err
    assert ',mine}|module:name' in ' '.join(printed.out.split())


def test_one_process_and_16_bits_are_the_entrys(file, monkeypatch):
    from chatgpt.rules import check
    from chatgpt.strategies.rules import PRECISION_RULES

    STRATEGIES['mine'] = StrategyEntry(f'{file}:Mine', one_process=True, only_16_bits=True)
    with pytest.raises(ValueError, match='--strategy mine computes in 16 bits, and --precision is fp32'):
        check(SimpleNamespace(strategy='mine', precision='fp32'), PRECISION_RULES)
    check(SimpleNamespace(strategy='mine', precision='bf16'), PRECISION_RULES)
    with pytest.raises(ValueError, match='--strategy mine computes in 16 bits'):
        Setup(config=None, strategy='mine', precision='fp32')
    assert Setup(config=None, strategy='mine', on_cuda=False).precision == 'bf16'
    assert resolve_precision('auto', torch.device('cpu'), only_16_bits=True) == 'bf16'
    with pytest.raises(ValueError, match="strategy='mine' is one process, not 2; use one of ddp, fsdp"):
        Setup(config=None, strategy='mine', precision='bf16', num_processes=2)
    monkeypatch.setenv('WORLD_SIZE', '2')
    with pytest.raises(ValueError, match='strategy mine is one process; under torchrun use one of ddp, fsdp'):
        strategy_by_name('mine', precision='bf16')


def test_it_is_planned_by_what_it_says(file):
    STRATEGIES['mine'] = StrategyEntry(f'{file}:Mine', {'factor': 3})
    config = tiny_config('gpt2')
    mine, naive = (make_plan(Setup(config=config, strategy=name, precision='fp32')) for name in ('mine', 'naive'))
    weights = 4 * sum(p.numel() for p in tiny_causal_lm('gpt2').parameters())
    assert mine.phases['collect'].host['initial model weights'] == weights
    assert sum(naive.phases['collect'].device.values()) - sum(mine.phases['collect'].device.values()) == weights
    assert 'initial model weights' not in mine.phases['collect'].device
    assert Setup(config=config, strategy='mine').memory_model.bucket_bytes == 3000
    own = Setup(config=config, strategy='mine', strategy_options={'factor': 1})  # overrides the entry's
    assert own.memory_model.bucket_bytes == 1000


def test_the_strategys_own_names_are_those_of_its_ranks():
    class Second(OneProcess):
        rank, world_size, local_rank = 1, 3, 1
        left = False

        def broadcast_object(self, obj, src=0):
            return ('ValueError', 'no room') if src == 0 else obj

        def leave(self):
            self.left = True

    strategy = Strategy(ranks=Second('cpu'))
    assert (strategy.rank, strategy.world_size, strategy.local_rank, strategy.is_rank_0) == (1, 3, 1, False)
    assert strategy.device == torch.device('cpu') and strategy.all_gather_object('x') == ['x']
    with pytest.raises(ValueError, match='no room'):
        strategy.run_on_rank0(lambda: None)
    assert not strategy.fails_together('here')
    strategy.close()
    assert strategy.ranks.left


class FormerContract(Ranks, Strategy):
    """A strategy of the former contract, which needs `Ranks` as an additional base."""

    rank, world_size, local_rank, device = 1, 2, 1, torch.device('cpu')

    def all_reduce(self, tensor, op='sum'):
        return 2 * tensor

    def all_gather_object(self, obj):
        return ['of rank 0', obj]

    def broadcast_object(self, obj, src=0):
        return ('', 'of rank 0') if src == 0 else obj


def test_a_strategy_may_be_its_own_ranks():
    with FormerContract(seed=1) as strategy:
        assert strategy.ranks is strategy and not strategy.is_rank_0
        assert strategy.run_on_rank0(lambda: pytest.fail('only rank 0 runs it')) == 'of rank 0'
        assert isinstance(strategy.prepare(torch.nn.Linear(2, 2)), torch.nn.Linear)
        for owner in (strategy, Strategy(ranks=OneProcess('cpu'))):
            with pytest.raises(AttributeError, match='has no attribute .nothing.'):
                _ = owner.nothing


def test_without_ranks_it_is_refused():
    class Silent(Strategy):
        rank = 1

    message = r'Silent does not say which processes it runs on: .* write class Silent\(Ranks, Strategy\)'
    with pytest.raises(ValueError, match=message):
        Silent()
