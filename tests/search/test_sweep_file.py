"""A sweep's file: spaces, defaults, and mistakes, which are found before any trial."""

from __future__ import annotations

import pytest

from chatgpt.launch.arguments import run_main
from chatgpt.launch.search import __main__ as command_line
from chatgpt.launch.search.settings import read_sweep, space_of
from chatgpt.launch.search.study import points
from chatgpt.launch.search.sweep import share

pytest.importorskip('optuna', reason='sweeps need optuna: make dev')
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution


@pytest.mark.parametrize(
    ('given', 'whole', 'space'),
    [
        ([1, 2], False, CategoricalDistribution((1, 2))),
        ({'min': 0, 'max': 1}, False, FloatDistribution(0.0, 1.0)),
        ({'min': 1, 'max': 8}, True, IntDistribution(1, 8)),
        ({'min': 1e-5, 'max': 1e-3, 'log': True}, False, FloatDistribution(1e-5, 1e-3, log=True)),
        ({'strategy': 'loguniform', 'values': [1e-5, 1e-3]}, False, FloatDistribution(1e-5, 1e-3, log=True)),
        ({'strategy': 'quniform', 'values': [0, 1, 0.25]}, False, FloatDistribution(0.0, 1.0, step=0.25)),
        ({'strategy': 'randint', 'values': [2, 9]}, False, IntDistribution(2, 8)),  # numpy's: without the upper end
        ({'min': 8, 'max': 64, 'step': 8}, True, IntDistribution(8, 64, step=8)),
    ],
)
def test_spaces(given, whole, space):
    assert space_of(given, whole=whole) == space


@pytest.mark.parametrize(
    ('given', 'message'),
    [
        (3, '3 is one value, which does not vary'),
        ([[1, 2]], 'each a single value'),
        ({'minimum': 1, 'max': 2}, 'did you mean min'),
        ({'min': 1}, 'a range needs min and max'),
        ({'min': 'x', 'max': 1}, "min='x' is no number"),
        ({'min': 0.5, 'max': 2, 'strategy': 'int'}, 'whole numbers are needed'),
        ({'values': [1, 2], 'strategy': 'logunifrom'}, 'did you mean loguniform'),
        ({'values': [1, 2], 'strategy': 'quniform'}, 'quniform needs a step'),
        ({'values': [1, 2], 'min': 1}, 'choice takes values, a list of at least one'),
    ],
)
def test_mistakes_in_a_space(given, message):
    with pytest.raises(ValueError, match=message):
        space_of(given, whole=False)


def test_points_of_a_grid_which_may_be_cut(write_sweep):
    assert points(IntDistribution(8, 64, step=8)) == [8, 16, 24, 32, 40, 48, 56, 64]
    assert points(FloatDistribution(0.0, 0.3, step=0.1)) == pytest.approx([0, 0.1, 0.2, 0.3])
    parameters = {'lr': [1e-3, 1e-2], 'lr_schedule': ['constant', 'cosine'], 'train_batch_size': [4, 8]}
    assert [
        read_sweep(write_sweep(sampler='grid', trials=trials, parameters=parameters)).trials for trials in (None, 3, 99)
    ] == [8, 3, 8]


def test_a_file(write_sweep):
    sweep = read_sweep(
        write_sweep(
            config={'Training': {'num_train_epochs': 2}, 'train_batch_size': 4},
            parameters={'learning_rate': [1e-3, 1e-2], 'Training': {'warmup_steps': {'min': 0, 'max': 10}}},
            trials=None,
            direction='max',
            pruner={'name': 'median', 'n_startup_trials': 2},
        )
    )
    assert sweep.parameters == {'lr': CategoricalDistribution((1e-3, 1e-2)), 'warmup_steps': IntDistribution(0, 10)}
    assert (sweep.trials, sweep.seed, sweep.direction, sweep.sampler) == (20, 42, 'maximize', ('tpe', {}))
    assert sweep.pruner == ('median', {'n_startup_trials': 2})


@pytest.mark.parametrize(
    ('changes', 'message'),
    [
        ({'paramaters': {}}, "'paramaters' is no key of a sweep; did you mean parameters"),
        ({'metric': None}, 'metric is missing'),
        ({'direction': 'up'}, "direction='up' is not known; choose one of maximize, max, minimize, min"),
        ({'method': 'stf'}, "method='stf' is not known; choose one of sft, reward-model, .*; did you mean sft"),
        ({'trials': 0}, 'trials=0 must be a whole number, at least 1'),
        ({'parameters': {}}, 'parameters holds the settings that vary'),
        ({'parameters': {'lrr': [1, 2]}}, 'parameters: lrr is not a setting of this run; did you mean lr'),
        ({'parameters': {'lr': [1, 2], 'learning_rate': [1, 2]}}, 'parameters: learning_rate is there twice'),
        ({'parameters': {'save_path': ['a', 'b']}}, 'parameters: save_path is not for a sweep to vary'),
        ({'parameters': {'lr': {'min': 1}}}, 'parameters: lr: .*a range needs min and max'),
        ({'parameters': {'lr': {'min': -1, 'max': 1}}}, r'a trial with lr=-1.0 cannot run: lr=-1.0 must not be neg'),
        ({'parameters': {'train_batch_size': [4, 'x']}}, "a trial with train_batch_size='x' cannot run"),
        ({'config': {'lrr': 1}}, 'config: lrr is not a setting of this run; did you mean lr'),
        ({'config': {'model_path': 'x'}}, 'config: model_path is of one run, and trials are many'),
        ({'config': {'num_training_workers': 2}}, 'num_training_workers=2, but 1 process was started'),
        ({'launch': {'workers': 2}}, "launch: 'workers' is not known; .*did you mean"),
        ({'sampler': 'grid'}, 'sampler grid tries every value'),
        ({'sampler': ['tpe']}, r"sampler=\['tpe'\] is not known"),
        ({'direction': ['minimize']}, r"direction=\['minimize'\] is not known"),
        ({'save_path': 5}, 'save_path=5 is no path'),
        ({'sampler': {'name': 'tpe', 'seed': 5}}, "sampler tpe: .* multiple values for keyword argument 'seed'"),
    ],
)
def test_mistakes_in_a_file(write_sweep, changes, message):
    with pytest.raises(ValueError, match=message):
        read_sweep(write_sweep(**changes))


def test_the_command_says_a_mistake_in_one_line_and_tries_nothing(write_sweep, tmp_path, capsys):
    path = write_sweep(sampler={'name': 'tpe', 'n_startup': 3})
    message = "sampler tpe: TPESampler.__init__() got an unexpected keyword argument 'n_startup'"
    with pytest.raises(SystemExit) as end:
        run_main(lambda: command_line.main([str(path)]))
    said = capsys.readouterr()
    assert end.value.code == 2 and said.out == '' and said.err.count('\n') == 1
    assert said.err.startswith('error: ') and message in said.err
    assert not list(tmp_path.glob('sweep/trial-*'))


def test_devices_are_shared_out():
    shares = ([], [[], []]), (['0'], [['0'], ['0']]), (['0', '1'], [['0'], ['1']]), (['0', '1'], [['0'], ['1'], ['0']])
    for devices, wanted in (*shares, (['2', '3', '5'], [['2', '5'], ['3']])):
        assert [share(devices, slot, len(wanted)) for slot in range(len(wanted))] == wanted
