"""Conformance checks of saving: weights and optimizer states in files, folders and pieces; full weights to generate."""

from __future__ import annotations

import math
import warnings
from contextlib import ExitStack
from pathlib import Path

import torch
from torch import Tensor, nn

from chatgpt.strategies.base import Strategy
from chatgpt.strategies.checkpoint import CheckpointReader, DictReader, write_checkpoint
from chatgpt.strategies.checkpoint.layout import RenamedReader
from chatgpt.testing.conformance_bench import Bench, Check, Refused, expect, identical, raises


def check_save_load(bench: Bench) -> None:
    """Weights saved {before, after} prepare and loaded {before, after} prepare have the same bits."""
    start = {n: t.detach().clone() for n, t in bench.make_model().state_dict().items()}
    for saved_after in (False, True):
        for loaded_after in (False, True):
            saved, loaded = ('after' if after else 'before' for after in (saved_after, loaded_after))
            what = f'saved {saved}, loaded {loaded} prepare'
            with bench.make_strategy() as strategy:
                path = bench.path('.pt')
                model: nn.Module = bench.make_model()
                if saved_after:
                    model, _ = strategy.prepare((model, bench.optimizer(strategy, model.parameters())))
                strategy.save_model(model, path, only_rank0=True)
                strategy.barrier()
                identical(torch.load(path, weights_only=True), start, f'{what}: the file, read by plain torch,')
                model = bench.make_model()
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter.add_(1.0)
                if not loaded_after:
                    strategy.load_model(model, path)
                model, _ = strategy.prepare((model, bench.optimizer(strategy, model.parameters())))
                if loaded_after:
                    strategy.load_model(model, path)
                identical(bench.weights(strategy, model), start, what)


def check_sharded_save(bench: Bench) -> None:
    """`only_rank0=False` saves the same weights, for trained and frozen models."""
    with bench.make_strategy() as strategy:
        model, optimizer = bench.pair(strategy)
        bench.train(strategy, model, optimizer, steps=1)
        weights = bench.weights(strategy, model)
        path = bench.path()
        strategy.save_model(model, path, only_rank0=False)
        other, _ = bench.pair(strategy)
        strategy.load_model(other, path)
        identical(bench.weights(strategy, other), weights, 'saved with only_rank0=False and loaded')
        frozen = strategy.prepare(bench.make_model())
        strategy.load_model(frozen, path)
        identical(bench.weights(strategy, frozen), weights, 'the same, loaded into a frozen model')


def check_wrong_files(bench: Bench) -> None:
    """A wrong file is an error with the first wrong keys. `strict=False` warns, but is an error for wrong shapes and
    for files with nothing in common."""
    errors = (ValueError, RuntimeError)
    with bench.make_strategy() as strategy:
        model, _ = bench.pair(strategy)
        weights = bench.weights(strategy, model)
        name = next(n for n in weights if n.endswith('up.weight'))

        def save(tensors: dict[str, Tensor]) -> Path:
            path = bench.path('.pt')
            strategy.run_on_rank0(lambda: torch.save(tensors, path))
            return path

        stranger = {'stranger': torch.zeros(1)}
        lacking = save({n: t for n, t in weights.items() if n != name})
        with raises(errors, name, 'load_model of a file that lacks a tensor'):
            strategy.load_model(model, lacking)
        with raises(errors, 'stranger', 'load_model of a file with a tensor too many'):
            strategy.load_model(model, save(weights | stranger))
        wrong = save(weights | {name: torch.zeros(1, 2)})
        for strict in (True, False):
            with raises(errors, name, f'load_model of a wrong shape, strict={strict}'):
                strategy.load_model(model, wrong, strict=strict)
        with raises(errors, 'stranger', 'load_model(strict=False) of a file with nothing in common'):
            strategy.load_model(model, save(stranger), strict=False)
        identical(bench.weights(strategy, model), weights, 'a model after files that did not fit')
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter('always')
            strategy.load_model(model, lacking, strict=False)
        warned = any(name in str(w.message) for w in caught)
        expect(warned, 'load_model(strict=False) does not warn with the missing name')
        with raises(FileNotFoundError, 'nowhere', 'load_model of a path that is not there'):
            strategy.load_model(model, bench.folder / 'nowhere.pt')


def check_optimizer_save_load(bench: Bench) -> None:
    """Training resumes with the same bits from a model file and an optimizer file."""
    with bench.make_strategy() as strategy:
        model, optimizer = bench.pair(strategy)
        bench.train(strategy, model, optimizer, steps=2)
        optimizer.param_groups[0]['lr'] = 3e-3
        model_path, optimizer_path = bench.path('.pt'), bench.path()
        strategy.save_model(model, model_path)
        strategy.save_optimizer(optimizer, optimizer_path, only_rank0=False)
        strategy.barrier()
        straight = bench.train(strategy, model, optimizer, steps=2, first=2)
        weights = bench.weights(strategy, model)
        if strategy.abilities.sharded:
            with raises(ValueError, 'only_rank0=False', 'save_optimizer(only_rank0=True) under a sharded strategy'):
                strategy.save_optimizer(optimizer, bench.path(), only_rank0=True)
    with bench.make_strategy() as strategy:
        model, optimizer = bench.pair(strategy)
        strategy.load_model(model, model_path)
        strategy.load_optimizer(optimizer, optimizer_path)
        expect(optimizer.param_groups[0]['lr'] == 3e-3, 'load_optimizer did not restore the learning rate')
        resumed = bench.train(strategy, model, optimizer, steps=2, first=2)
        expect(resumed == straight, f'resumed: losses and norms {resumed}, straight: {straight}')
        identical(bench.weights(strategy, model), weights, 'resumed from model and optimizer files')


def check_wrong_optimizer_state(bench: Bench) -> None:
    """A wrong optimizer state is an error with the name of the wrong tensor, and does not change the optimizer."""

    def trained(refuses: bool) -> dict[str, Tensor]:
        with bench.make_strategy() as strategy:
            model, optimizer = bench.pair(strategy)
            bench.train(strategy, model, optimizer, steps=2)
            if refuses:
                folder = bench.path()
                _write(strategy, folder, model, optimizer)
                reader = CheckpointReader(folder).sub('optim/')
                shapes = {name: reader.shape(name) for name in reader.names()}
                stored = {name: reader.read(name, 0, math.prod(shape)).reshape(shape) for name, shape in shapes.items()}
                name = max(name for name, shape in shapes.items() if shape)
                wrong = DictReader(stored | {name: torch.ones(1, 2, 3)})
                with raises((ValueError, RuntimeError), name, 'load_optimizer_state of a wrong shape'):
                    strategy.load_optimizer_state(optimizer, strategy.optimizer_state(optimizer)[0], wrong)
            bench.train(strategy, model, optimizer, steps=1, first=2)
            return bench.weights(strategy, model)

    identical(trained(True), trained(False), 'weights after a refused optimizer state')


def _write(strategy: Strategy, folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    meta, pieces = strategy.optimizer_state(optimizer)
    groups = {'model/': strategy.model_pieces(model), 'optim/': pieces}
    rank, gather = strategy.processes.rank, strategy.processes.all_gather_object
    write_checkpoint(folder, groups, meta={'optimizer': meta}, rank=rank, all_gather_object=gather)


def _load(strategy: Strategy, folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    reader = CheckpointReader(folder)
    strategy.load_model_pieces(model, reader.sub('model/'))
    strategy.load_optimizer_state(optimizer, reader.meta['optimizer'], reader.sub('optim/'))


def check_pieces(bench: Bench) -> None:
    """Pieces cover weights and states once, by the names of the user's module; training resumes with the same bits."""
    with bench.make_strategy() as strategy:
        model, optimizer = bench.pair(strategy)
        bench.train(strategy, model, optimizer, steps=2)
        folder = bench.path()
        _write(strategy, folder, model, optimizer)
        reader = CheckpointReader(folder)  # raises for gaps or overlaps of pieces
        weights = bench.weights(strategy, model)
        names = {n for n, _ in bench.make_model().named_parameters()}
        stored = reader.sub('model/').names()
        expect(names <= stored <= set(weights), f'names of pieces: {sorted(stored ^ names)[:5]}')
        for name in stored:
            shape = reader.shape(f'model/{name}')
            whole = reader.read(f'model/{name}', 0, weights[name].numel()).reshape(shape)
            expect(torch.equal(whole, weights[name]), f'pieces of {name} differ from the saved weights')
        straight = bench.train(strategy, model, optimizer, steps=2, first=2)
        end = bench.weights(strategy, model)
        some = sorted(stored)[::2]
        part = RenamedReader(reader, {name: f'model/{name}' for name in some})
        part.left_out = frozenset(stored - set(some))
        strategy.load_model_pieces(model, part)
        mixed = {name: weights[name] if name in some else end[name] for name in stored}
        found = {name: tensor for name, tensor in bench.weights(strategy, model).items() if name in stored}
        identical(found, mixed, 'with names left out')
        model, optimizer = bench.pair(strategy)
        _load(strategy, folder, model, optimizer)
        resumed = bench.train(strategy, model, optimizer, steps=2, first=2)
        expect(resumed == straight, 'pieces: resumed losses and norms differ')
        identical(bench.weights(strategy, model), end, 'resumed from pieces')


def check_pieces_to_naive(bench: Bench) -> None:
    """Naive resumes from pieces of the strategy, and the strategy from pieces of Naive."""
    with bench.make_strategy() as strategy, bench.make_reference(strategy) as naive:
        there, back = bench.path(), bench.path()
        model, optimizer = bench.pair(strategy)
        bench.train(strategy, model, optimizer, steps=2)
        _write(strategy, there, model, optimizer)
        want, want_optimizer = bench.pair(naive)
        _load(naive, there, want, want_optimizer)
        identical({n: t.cpu() for n, t in want.state_dict().items()}, bench.weights(strategy, model), 'loaded by Naive')
        want_results = bench.train(naive, want, want_optimizer, steps=1, first=2)
        bench.compare_results(bench.train(strategy, model, optimizer, steps=1, first=2), want_results, 'Naive goes on')
        bench.compare(bench.weights(strategy, model), want.state_dict(), 1, 'Naive goes on')
        strategy.run_on_rank0(lambda: _write(naive, back, want, want_optimizer))
        model, optimizer = bench.pair(strategy)
        _load(strategy, back, model, optimizer)
        want_results = bench.train(naive, want, want_optimizer, steps=1, first=3)
        bench.compare_results(bench.train(strategy, model, optimizer, steps=1, first=3), want_results, 'from Naive')
        bench.compare(bench.weights(strategy, model), want.state_dict(), 1, 'from Naive')


def check_full_model(bench: Bench) -> None:
    """`full_model` yields whole weights, or without `whole=True` a model with the same outputs, in eval mode. It
    restores training flags and bits."""
    with bench.make_strategy() as strategy:
        model, optimizer = bench.pair(strategy)
        bench.train(strategy, model, optimizer, steps=1)
        weights = bench.weights(strategy, model)
        strategy.unwrap(model).train()
        computed = []
        for whole in (True, False):
            with ExitStack() as held:
                try:
                    full = held.enter_context(strategy.full_model(model, whole=whole))
                except ValueError as error:
                    raise Refused(str(error)) from None
                expect(not any(m.training for m in full.modules()), 'full_model: not in eval mode')
                for name, parameter in full.named_parameters():
                    dtype, wanted = parameter.dtype, strategy.numerics.full_dtype
                    expect(dtype == wanted, f'full_model: {name} is {dtype}, not {wanted}')
                    same = not whole or torch.equal(parameter.detach().cpu(), weights[name].to(dtype))
                    expect(same, f'full_model: {name} has other values')
                batch, _ = bench.batch(strategy)
                with torch.no_grad(), strategy.autocast():
                    computed.append(full(batch))
                expect(bool(torch.isfinite(computed[-1]).all()), 'full_model: the model does not compute')
        far = float((computed[0] - computed[1]).abs().max())
        expect(far <= bench.tolerance.loss * 10, f'full_model: log-probs of a copy that is not whole are {far:.3g} off')
        trains = all(m.training for m in strategy.unwrap(model).modules())
        expect(trains, 'full_model: training flags were not restored')
        identical(bench.weights(strategy, model), weights, 'weights after full_model')


ORDER: list[Check] = [check_save_load, check_sharded_save, check_wrong_files, check_optimizer_save_load]
ORDER += [check_wrong_optimizer_state, check_pieces, check_pieces_to_naive, check_full_model]
CHECKS: dict[str, Check] = {check.__name__.removeprefix('check_'): check for check in ORDER}
