"""The stand-in for vLLM, on which the tests of the engines run, takes nothing that vLLM does not: names, parameters and
fields, against the facts that `vllm_contract.py` read from the sources of every supported version."""

from __future__ import annotations

import inspect
import json
import re
from pathlib import Path
from typing import Any

import pytest
from vllm_contract import facts

from chatgpt.rollout import vllm_remote
from chatgpt.rollout.vllm import VLLM

HERE = Path(__file__).parent
BY_VERSION: dict[str, Any] = json.loads((HERE / 'vllm_contract.json').read_text())
INSIDES = {'LLM': ['fields'], 'Worker': ['fields', '__init__', 'reload_weights']}
"""what is the stand-in's own"""
NEWER = {'0.32.0': {('WeightSource', name) for name in ('owned_names', 'implements_iter_full', 'iter_full')}}
"""what an older version does not ask for"""

every_version = pytest.mark.parametrize('version', sorted(BY_VERSION))


@every_version
def test_the_stand_in_takes_nothing_that_vllm_does_not(version):
    known, stand_in = BY_VERSION[version], facts(HERE / 'stand_in')
    assert {'LLM', 'EngineArgs', 'SamplingParams', 'CompletionOutput', 'NCCLTrainerInitInfo', 'Worker'} <= set(
        stand_in['objects']
    )
    for name, own in stand_in['objects'].items():
        theirs, skipped = known['objects'][name], INSIDES.get(name, [])
        assert 'fields' in skipped or set(own['fields']) <= set(theirs['fields']), name
        for method, ours in own['methods'].items():
            if method in skipped or (name, method) in NEWER.get(version, ()):
                continue
            real = theirs['methods'][method]
            assert [p for p in real['parameters'] if p in ours['parameters']] == ours['parameters'], (name, method)
            assert set(real['required']) <= set(ours['parameters']), (name, method)
            assert ours['by_position'] <= real['by_position'], (name, method)
    for path, names in stand_in['exports'].items():
        assert set(names) <= set(known['exports'][path])


@every_version
def test_our_client_is_the_one_that_senders_ask(version):
    for name, theirs in BY_VERSION[version]['objects']['VLLMWeightSyncClient']['methods'].items():
        assert list(inspect.signature(getattr(vllm_remote._Link, name)).parameters)[1:] == theirs['parameters'], name


@every_version
def test_strings_that_choose_are_among_the_choices(version):
    """Which the stand-in does not look at."""
    text = ' '.join((HERE.parents[1] / 'chatgpt/rollout' / f'{n}.py').read_text() for n in ('vllm', 'vllm_remote'))
    for choice, values in {
        'logprobs_mode': ['processed_logprobs'],
        'distributed_executor_backend': ['external_launcher', 'ray', 'uni'],
        'backend': ['nccl', 'ipc'],
        'sleep_tags': ['weights', 'kv_cache'],
        'environment': ['VLLM_ENABLE_V1_MULTIPROCESSING'],
    }.items():
        assert all(f"'{value}'" in text for value in values)
        assert set(values) <= set(BY_VERSION[version]['choices'][choice]), choice


@every_version
def test_vllm_goes_about_it_as_we_count_on(version):
    orders = {what: step['order'] for what, step in BY_VERSION[version]['steps'].items()}
    orders.setdefault(
        'ranks of a group', ['data_parallel_index', 'world_size', 'rank']
    )  # no function of its own in 0.32
    assert orders == {
        # one answer of ours covers the three, so nothing may be sent before start or read after finish
        'sending by NCCL': ['start_weight_update', 'update_weights', 'finish_weight_update'],
        'sending by IPC': ['start_weight_update', '_send', 'finish_weight_update'],
        # a dead worker's group ends without its consent
        'a sender that is given up': ['destroy'],
        'a group that is given up': ['ncclCommAbort'],
        # so ranks of a worker that has a group of its own are 1, 2, ...
        'ranks of a group': ['data_parallel_index', 'world_size', 'rank'],
        'whole tensors in place': ['initialize_layerwise_reload', 'load_weights', 'finalize_layerwise_reload'],
        'an update without a sender': ['initialize_layerwise_reload'],
        'the group of GPUs around an actor': ['get_current_placement_group', 'bundle_specs'],
    }


def test_versions_are_those_that_were_read():
    low, high = re.fullmatch(r'vllm>=(\d+\.\d+),<(\d+\.\d+)', VLLM).groups()  # type: ignore[union-attr]
    minors = [int(known.split('.')[1]) for known in sorted(BY_VERSION)]
    assert (low, high) == (f'0.{minors[0]}', f'0.{minors[-1] + 1}') and minors == list(range(minors[0], minors[-1] + 1))
