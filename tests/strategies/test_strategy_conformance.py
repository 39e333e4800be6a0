"""Our strategies and that of docs/strategies/your_own.md pass the conformance suite; faulty ones do not."""

from __future__ import annotations

import re
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from scripts_on_ranks import run_script

from chatgpt.strategies import FSDPStrategy, NaiveStrategy
from chatgpt.strategies.ddp import DDPStrategy
from chatgpt.testing.conformance import BF16, FP32, Bench, ConformanceError, all_checks, run_conformance
from chatgpt.testing.processes import environment, free_port, run_distributed, torchrun_environment


@pytest.mark.parametrize('name', list(all_checks()))
def test_naive(name, tmp_path):
    all_checks()[name](Bench(make_strategy=lambda: NaiveStrategy(device='cpu'), folder=tmp_path))


@pytest.mark.parametrize('precision', ['bf16', 'fp16'])
def test_naive_in_16_bits(precision, tmp_path):
    results = run_conformance(lambda: NaiveStrategy(precision=precision, device='cpu'), tolerance=BF16, folder=tmp_path)
    assert set(results.values()) == {'passed'} and set(results) == set(all_checks())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason='no CUDA device')
@pytest.mark.parametrize('precision', ['fp32', 'bf16', 'fp16'])
def test_on_cuda(precision, tmp_path):
    tolerance = FP32 if precision == 'fp32' else BF16
    results = run_conformance(
        lambda: NaiveStrategy(precision=precision), tolerance=tolerance, folder=tmp_path / 'naive'
    )
    assert NaiveStrategy().device.type == 'cuda' and set(results.values()) == {'passed'}
    with environment(**torchrun_environment(0, 1, free_port())), DDPStrategy() as group:
        assert group.device == torch.device('cuda', 0)
        results = run_conformance(
            lambda: DDPStrategy(precision=precision), tolerance=tolerance, folder=tmp_path / 'ddp'
        )
        assert set(results.values()) == {'passed'}


def test_naive_in_bf16_is_not_naive_in_fp32(tmp_path):
    bench = Bench(
        make_strategy=lambda: NaiveStrategy(precision='bf16', device='cpu'),
        folder=tmp_path,
        make_reference=lambda strategy: NaiveStrategy(device='cpu'),
    )
    with pytest.raises(ConformanceError, match='against Naive'):
        all_checks()['equals_naive'](bench)


class WithoutWhole(NaiveStrategy):
    @contextmanager
    def full_model(self, *given, **more):
        raise ValueError('no whole models')
        yield


def test_what_a_strategy_refuses_is_reported(tmp_path):
    found = run_conformance(lambda: WithoutWhole(device='cpu'), checks=['full_model'], folder=tmp_path)
    assert found == {'full_model': 'refused: no whole models'}


def test_unknown_check():
    with pytest.raises(ValueError, match='unknown checks spelling; there are collectives'):
        run_conformance(lambda: NaiveStrategy(device='cpu'), checks=['spelling'])


class ForgetsToReduce(DDPStrategy):
    def _reduce_gradients(self, pair):
        return


class Averages(DDPStrategy):
    def backward(self, loss, model, optimizer):
        super().backward(loss / self.world_size, model, optimizer)


class ForgetsBuckets(DDPStrategy):
    """A strategy that sums the first bucket and takes this rank's share of the others."""

    def _reduce_gradients(self, pair):
        super()._reduce_gradients(pair)
        for parameter in pair.parameters()[1:]:
            parameter.grad /= self.world_size


class LocalClipping(DDPStrategy):
    def _gradient_norm(self, parameters):
        return super()._gradient_norm(parameters[:3])


class WritesEverythingTwice(DDPStrategy):
    def model_pieces(self, model):
        from chatgpt.strategies.checkpoint import pieces_of

        return pieces_of(dict(self.unwrap(model).named_parameters()))


class LosesTheMoments(DDPStrategy):
    def _load_optimizer_pieces(self, optimizer, reader):
        self._pair(optimizer).optimizer.state.clear()


class FlatPrepare(DDPStrategy):
    def prepare(self, *items):
        out = super().prepare(*items)
        if not isinstance(out, tuple):
            return out
        return tuple(x for item in out for x in (item if isinstance(item, list) else [item]))


class LeavesEvalMode(DDPStrategy):
    def full_model(self, model, *args, **kw):
        model.eval()
        return super().full_model(model, *args, **kw)


class KeepsGradients(DDPStrategy):
    def discard_gradients(self, optimizer):
        pass


class StepsOnInfinity(DDPStrategy):
    def optimizer_step(self, optimizer, max_norm=None):
        pair = self._pair(optimizer)
        self._reduce_gradients(pair)
        norm = self._gradient_norm([p for _, p in pair.named_parameters() if p.grad is not None])
        pair.optimizer.step()
        self.discard_gradients(optimizer)
        return norm


class StepsEveryModel(DDPStrategy):
    def optimizer_step(self, optimizer, max_norm=None):
        for pair in self._pairs.values():
            if pair is not self._pair(optimizer):
                for _, parameter in pair.named_parameters():
                    parameter.grad = torch.zeros_like(parameter)
                pair.optimizer.step()
        return super().optimizer_step(optimizer, max_norm)


FAULTS = {
    ForgetsToReduce: ['equals_naive', 'unequal'],
    Averages: ['equals_naive', 'clipping'],
    ForgetsBuckets: ['equals_naive'],
    LocalClipping: ['clipping'],
    WritesEverythingTwice: ['pieces'],
    LosesTheMoments: ['optimizer_save_load', 'pieces'],
    FlatPrepare: ['prepare'],
    LeavesEvalMode: ['full_model'],
    KeepsGradients: ['discard'],
    StepsOnInfinity: ['non_finite'],
    StepsEveryModel: ['waiting'],
}


def _ddp_fsdp_and_faults():
    torch.set_num_threads(1)
    found = {}
    suites = ((DDPStrategy, 'fp32', FP32), (DDPStrategy, 'bf16', BF16), (FSDPStrategy, 'fp32', FP32))
    for kind, precision, tolerance in suites:
        found[f'{kind.__name__} {precision}'] = run_conformance(
            lambda k=kind, p=precision: k(precision=p, device='cpu'), tolerance=tolerance
        )
    found['small buckets'] = run_conformance(
        lambda: DDPStrategy(device='cpu', bucket_bytes=64), checks=['equals_naive', 'unequal']
    )
    for strategy, check in ((s, check) for s, checks in FAULTS.items() for check in checks):
        try:
            run_conformance(lambda s=strategy: s(device='cpu'), checks=[check])
            found[strategy.__name__, check] = 'not noticed'
        except Exception as error:
            found[strategy.__name__, check] = f'{type(error).__name__}: {error}'
    return found


def test_ddp_and_fsdp_on_two_processes_and_planted_faults():
    """Each rank is a new interpreter, with its own order of sets."""
    for found in run_distributed(_ddp_fsdp_and_faults, 2, init_group=True, fresh=True):
        for key in ('DDPStrategy fp32', 'DDPStrategy bf16', 'FSDPStrategy fp32'):
            assert found[key] == dict.fromkeys(all_checks(), 'passed'), key
        assert set(found['small buckets'].values()) == {'passed'}
        noticed = {key: text for key, text in found.items() if isinstance(key, tuple)}
        assert noticed.keys() == {(strategy.__name__, check) for strategy in FAULTS for check in FAULTS[strategy]}
        for key, text in noticed.items():
            assert text.startswith(('ConformanceError', 'CheckpointError')), (key, text)


# ---------------------------------------------------------------- the strategy of docs/strategies/your_own.md


ROOT = Path(__file__).parents[2]


def shown_files() -> dict[str, str]:
    """The Python blocks of the page by the file name in their first line."""
    page = (ROOT / 'docs' / 'strategies' / 'your_own.md').read_text()
    blocks = re.findall(r'```python\n(# (\S+\.py).*?)```', page, re.DOTALL)
    return {name: code for code, name in blocks}


def run_on_two(folder: Path, files: dict[str, str]) -> list[tuple[int, str]]:
    """Returns exit code and output of check_my_strategy.py on each of two processes."""
    for name, code in files.items():
        (folder / name).write_text(code)
    return run_script(['check_my_strategy.py'], folder=folder)


@pytest.mark.system
def test_the_strategy_of_the_docs_passes_every_check(tmp_path):
    assert len(shown_files()['my_strategy.py'].splitlines()) <= 40
    results = run_on_two(tmp_path, shown_files())
    assert [code for code, _ in results] == [0, 0], results
    assert str(dict.fromkeys(all_checks(), 'passed')) in results[0][1]


@pytest.mark.system
def test_a_wrong_one_does_not(tmp_path):
    files = shown_files()
    right, wrong = 'self.all_reduce(gradient)', "self.all_reduce(gradient, 'mean')"
    assert right in files['my_strategy.py']
    files['my_strategy.py'] = files['my_strategy.py'].replace(right, wrong)
    files['check_my_strategy.py'] = files['check_my_strategy.py'].replace('seed=1)', "seed=1), checks=['equals_naive']")
    results = run_on_two(tmp_path, files)
    assert all(code != 0 for code, _ in results)
    message = 'equals_naive, rank 0: failed: against Naive: gradient norm of step 0'
    assert all(message in text for _, text in results), results
