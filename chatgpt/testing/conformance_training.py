"""Conformance checks of preparing and training: nesting, frozen modules, equality with Naive, steps, clipping."""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.optim import Optimizer

from chatgpt.strategies.base import Strategy
from chatgpt.testing.conformance_bench import (
    LR,
    Bench,
    Check,
    Refused,
    close,
    expect,
    identical,
    raises,
)
from chatgpt.testing.tiny import tiny_loss, tiny_micro_batches, tiny_sequences


def check_prepare(bench: Bench) -> None:
    """`prepare` keeps order and nesting, returns a single item bare, and prepares a module given twice once."""

    def reward(prompts: list[str]) -> list[float]:
        return [0.0 for _ in prompts]

    with bench.make_strategy() as strategy:
        with strategy.model_init_context():
            a, b, c = bench.make_model(), bench.make_model(), bench.make_model()
        a_optim, b_optim = bench.optimizer(strategy, a.parameters()), bench.optimizer(strategy, b.parameters())
        out = strategy.prepare((a, a_optim), [c, [(b, b_optim)]], None, reward, c)
        expect(isinstance(out, tuple) and len(out) == 5, f'prepare: five items came back as {type(out).__name__}')
        (a2, _), nested, none, same_reward, c_again = out
        nests = isinstance(nested, list) and isinstance(nested[1], list) and len(nested[1][0]) == 2
        expect(nests, 'prepare: nesting was lost')
        expect(none is None and same_reward is reward, 'prepare: None and functions must pass through untouched')
        expect(nested[0] is c_again, 'prepare: a module given twice must be prepared once')
        for got, built in ((a2, a), (nested[1][0][0], b), (nested[0], c)):
            expect(strategy.unwrap(got) is built, 'unwrap: not the module the user built, or out of order')
        bare = strategy.prepare(bench.make_model())
        expect(isinstance(bare, nn.Module), 'prepare: a single item must come back bare')
        with raises(ValueError, 'model', 'prepare of an optimizer alone'):
            strategy.prepare(b_optim)
        with raises(ValueError, 'prepare', 'optimizer_step of an optimizer that was not prepared'):
            strategy.optimizer_step(bench.optimizer(strategy, bench.make_model().parameters()))


def check_frozen(bench: Bench) -> None:
    """A bare module is frozen, in eval mode, has the same outputs, and does not change when others are trained."""
    with bench.make_strategy() as strategy, bench.make_reference(strategy) as naive:
        with strategy.model_init_context():
            frozen = bench.make_model()
        frozen.train()
        frozen = strategy.prepare(frozen)
        plain = naive.prepare(bench.make_model())
        expect(not any(m.training for m in frozen.modules()), 'prepare: a bare module must be in eval mode')
        expect(not any(p.requires_grad for p in frozen.parameters()), 'prepare: a bare module must be frozen')
        batch = tiny_micro_batches(tiny_sequences())[0][0].to(strategy.device)
        with torch.no_grad(), strategy.autocast():
            got, want = frozen(batch).float(), plain(batch).float()
        distance = float((got - want).abs().max() / want.abs().max())
        message = f'a frozen module gives other numbers than before: {distance:.3g} relative'
        expect(distance <= bench.tolerance.loss, message)
        before = bench.weights(strategy, frozen)
        model, optimizer = bench.pair(strategy)
        bench.train(strategy, model, optimizer, steps=1)
        identical(bench.weights(strategy, frozen), before, 'a frozen module after training another')


def check_equals_naive(bench: Bench) -> None:
    """Three steps on the data of all ranks give the losses, norms and weights of one process with all data."""
    with bench.make_strategy() as strategy, bench.make_reference(strategy) as naive:
        model, optimizer = bench.pair(strategy)
        results = bench.train(strategy, model, optimizer)
        want, want_optimizer = bench.pair(naive)
        start = {n: t.clone() for n, t in want.state_dict().items()}
        bench.compare_results(results, bench.train(naive, want, want_optimizer), 'against Naive')
        reference = want.state_dict()
        bench.compare(bench.weights(strategy, model), reference, 3, 'against Naive')
        moved = max(float((reference[n] - start[n]).abs().max()) for n in start)
        expect(moved > LR, f'Naive moved by {moved:.3g} only, so agreeing with it would mean nothing')


def check_determinism(bench: Bench) -> None:
    """Two runs with the same seed end with the same bits."""
    ends = []
    for _ in range(2):
        with bench.make_strategy() as strategy:
            model, optimizer = bench.pair(strategy)
            results = bench.train(strategy, model, optimizer, max_norm=0.5)
            ends.append((results, bench.weights(strategy, model)))
    expect(ends[0][0] == ends[1][0], f'two equal runs report {ends[0][0]} and {ends[1][0]}')
    identical(ends[0][1], ends[1][1], 'two equal runs')


def _require_accumulation(bench: Bench) -> None:
    """Raises `Refused` for a strategy without accumulation, which must raise ValueError."""
    with bench.make_strategy() as strategy:
        if strategy.abilities.accumulation:
            return
        model, _ = bench.pair(strategy)
        try:
            with strategy.accumulate(model, last=False):
                pass
        except ValueError as error:
            raise Refused(str(error)) from None
        expect(False, 'abilities.accumulation is False, but accumulate(last=False) raises no ValueError')


def check_accumulation(bench: Bench) -> None:
    """Many micro-batches give the same step as one batch."""
    _require_accumulation(bench)
    ends = []
    for max_tokens in (None, 12):
        with bench.make_strategy() as strategy:
            model, optimizer = bench.pair(strategy)
            results = bench.train(strategy, model, optimizer, max_tokens=max_tokens)
            ends.append((results, bench.weights(strategy, model)))
            num = len(tiny_micro_batches(tiny_sequences(), strategy.rank, strategy.world_size, max_tokens))
    expect(num > 1, 'the batch was not cut')
    bench.compare_results(ends[1][0], ends[0][0], 'micro-batches against one batch')
    bench.compare(ends[1][1], ends[0][1], 3, 'micro-batches against one batch')


def check_unequal(bench: Bench) -> None:
    """With fewer sequences than ranks can share equally, dummy batches of weight 0 change nothing."""
    with bench.make_strategy() as strategy, bench.make_reference(strategy) as naive:
        data = tiny_sequences(2 * strategy.world_size - 1 if strategy.world_size > 1 else 1, seed=9)
        max_tokens = 1 if strategy.abilities.accumulation else None  # one sequence per micro-batch
        if not strategy.abilities.accumulation:
            data = data[:1]  # the other ranks have a dummy batch alone
        model, optimizer = bench.pair(strategy)
        want, want_optimizer = bench.pair(naive)
        got_results = bench.train(strategy, model, optimizer, steps=2, max_tokens=max_tokens, sequences=data)
        want_results = bench.train(naive, want, want_optimizer, steps=2, sequences=data)
        bench.compare_results(got_results, want_results, 'unequal micro-batches')
        bench.compare(bench.weights(strategy, model), want.state_dict(), 2, 'unequal micro-batches')


def check_clipping(bench: Bench) -> None:
    """`optimizer_step` returns the exact global norm before clipping, and clips as Naive does."""
    with bench.make_strategy() as strategy, bench.make_reference(strategy) as naive:
        plain = bench.make_model().to(strategy.device)
        batch, weights = tiny_micro_batches(tiny_sequences(seed=0))[0]
        with strategy.autocast():
            tiny_loss(plain(batch.to(strategy.device)), weights.to(strategy.device)).backward()
        exact = math.sqrt(sum(float(p.grad.double().square().sum()) for p in plain.parameters() if p.grad is not None))
        model, optimizer = bench.pair(strategy)
        results = bench.train(strategy, model, optimizer, max_norm=exact / 50)
        close(results[0][1], exact, bench.tolerance.norm, 'the norm before clipping')
        want, want_optimizer = bench.pair(naive)
        bench.compare_results(results, bench.train(naive, want, want_optimizer, max_norm=exact / 50), 'clipped')
        clipped = bench.weights(strategy, model)
        bench.compare(clipped, want.state_dict(), 3, 'clipped')
        with raises(ValueError, 'max_norm', 'max_norm=0'):
            strategy.optimizer_step(optimizer, 0.0)
        free, free_optimizer = bench.pair(strategy)
        bench.train(strategy, free, free_optimizer)
        unclipped = bench.weights(strategy, free)
        expect(any(not torch.equal(clipped[n], unclipped[n]) for n in clipped), 'max_norm has no effect')


def check_non_finite(bench: Bench) -> None:
    """An infinite gradient on one rank is reported on all, does not change weights, nor the following steps."""
    with bench.make_strategy() as strategy:
        model, optimizer = bench.pair(strategy)
        before = bench.weights(strategy, model)
        batch, weights = bench.batch(strategy)
        poison = math.inf if strategy.rank == strategy.world_size - 1 else 1.0
        with strategy.accumulate(model, last=True):
            with strategy.autocast():
                loss = tiny_loss(model(batch), weights) * poison
            strategy.backward(loss, model, optimizer)
        norm = strategy.optimizer_step(optimizer, 1.0)
        expect(not math.isfinite(norm), f'the norm of an infinite gradient is reported as {norm}')
        identical(bench.weights(strategy, model), before, 'after a non-finite norm')
        after = bench.train(strategy, model, optimizer)
        clean_model, clean_optimizer = bench.pair(strategy)
        bench.compare_results(after, bench.train(strategy, clean_model, clean_optimizer), 'after a skipped step')
        bench.compare(bench.weights(strategy, model), bench.weights(strategy, clean_model), 3, 'after a skipped step')


def check_discard(bench: Bench) -> None:
    """Discarded gradients do not change the following steps."""
    with bench.make_strategy() as strategy:
        model, optimizer = bench.pair(strategy)
        batch, weights = bench.batch(strategy, seed=5)
        with strategy.accumulate(model, last=True), strategy.autocast():
            strategy.backward(tiny_loss(model(batch), weights), model, optimizer)
        strategy.discard_gradients(optimizer)
        after = bench.train(strategy, model, optimizer, steps=2)
        clean_model, clean_optimizer = bench.pair(strategy)
        expect(after == bench.train(strategy, clean_model, clean_optimizer, steps=2), 'discarded gradients came back')
        identical(bench.weights(strategy, model), bench.weights(strategy, clean_model), 'after discarded gradients')


def check_partly_frozen(bench: Bench) -> None:
    """Parameters without a gradient (as with LoRA) do not change, the others train as under Naive."""
    with bench.make_strategy() as strategy, bench.make_reference(strategy) as naive:
        pairs = []
        for owner in (strategy, naive):
            with owner.model_init_context():
                model = bench.make_model()
            some = next(iter(model.children()))
            some.requires_grad_(False)
            optimizer = bench.optimizer(owner, (p for p in model.parameters() if p.requires_grad))
            pairs.append(owner.prepare((model, optimizer)))
        (model, optimizer), (want, want_optimizer) = pairs
        before = bench.weights(strategy, model)
        results = bench.train(strategy, model, optimizer)
        bench.compare_results(results, bench.train(naive, want, want_optimizer), 'partly frozen')
        got = bench.weights(strategy, model)
        bench.compare(got, want.state_dict(), 3, 'partly frozen')
        still = [n for n, p in want.named_parameters() if not p.requires_grad]
        identical({n: got[n] for n in still}, {n: before[n] for n in still}, 'frozen parameters of a trained model')


def check_waiting(bench: Bench) -> None:
    """While one model learns, another one keeps its weights and its optimizer's states, and then trains as if it had
    been alone (a critic learns before the actor does)."""
    with bench.make_strategy() as strategy:
        (model, optimizer), (other, other_optimizer) = bench.pair(strategy), bench.pair(strategy)
        first = bench.train(strategy, model, optimizer, steps=1)
        before = bench.weights(strategy, model), _states(strategy, optimizer)
        bench.train(strategy, other, other_optimizer, steps=2)
        identical(bench.weights(strategy, model), before[0], 'a model that waits')
        identical(_states(strategy, optimizer), before[1], 'the optimizer of a model that waits')
        alone, alone_optimizer = bench.pair(strategy)
        expect(first == bench.train(strategy, alone, alone_optimizer, steps=1), 'two equal models learn differently')
        again = bench.train(strategy, model, optimizer, steps=2)
        expect(
            again == bench.train(strategy, alone, alone_optimizer, steps=2), 'a model that waited learns differently'
        )
        identical(bench.weights(strategy, model), bench.weights(strategy, alone), 'a model that waited')


def _states(strategy: Strategy, optimizer: Optimizer) -> dict[str, torch.Tensor]:
    """Returns copies of this rank's pieces of an optimizer's states, by name and start."""
    _, pieces = strategy.optimizer_state(optimizer)
    return {f'{piece.name} {piece.start}': piece.data.detach().clone() for piece in pieces}


def check_collectives(bench: Bench) -> None:
    """Collectives of tensors and objects work, and an exception on rank 0 reaches all ranks."""
    with bench.make_strategy() as strategy:
        ranks = list(range(strategy.world_size))
        mine = torch.tensor([1.0, float(strategy.rank)], device=strategy.device)
        want = {'sum': sum(ranks), 'mean': sum(ranks) / len(ranks), 'max': max(ranks), 'min': 0}
        for op, value in want.items():
            expect(float(strategy.all_reduce(mine, op)[1]) == value, f'all_reduce {op!r} of ranks is not {value}')
        expect(mine.tolist() == [1.0, float(strategy.rank)], 'all_reduce changed its argument')
        gathered = strategy.all_gather_object({'rank': strategy.rank})
        expect(gathered == [{'rank': r} for r in ranks], 'all_gather_object: wrong order')
        last = strategy.world_size - 1
        expect(strategy.broadcast_object(strategy.rank, src=last) == last, 'broadcast_object: not the value of src')
        expect(strategy.run_on_rank0(lambda: strategy.rank) == 0, 'run_on_rank0 ran elsewhere')

        def fail() -> None:
            raise ValueError('spilled milk')

        with raises(ValueError, 'spilled milk', 'run_on_rank0 of a function that raises'):
            strategy.run_on_rank0(fail)
        strategy.barrier()


ORDER: list[Check] = [
    check_collectives,
    check_prepare,
    check_frozen,
    check_equals_naive,
    check_determinism,
    check_accumulation,
]
ORDER += [check_unequal, check_clipping, check_non_finite, check_discard, check_partly_frozen, check_waiting]
CHECKS: dict[str, Check] = {check.__name__.removeprefix('check_'): check for check in ORDER}
