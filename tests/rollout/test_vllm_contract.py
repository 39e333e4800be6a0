"""What this package calls in vLLM is there: names, parameters and fields, found by parsing our own sources, against the
facts that `vllm_contract.py` read from vLLM's. The stand-in for vLLM is held to the same facts."""

from __future__ import annotations

import ast
import json
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from vllm_contract import facts, signature

from chatgpt.rollout.vllm import VLLM

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
BY_VERSION: dict[str, Any] = json.loads((HERE / 'vllm_contract.json').read_text())
NEWEST = max(BY_VERSION)
FACTS = BY_VERSION[NEWEST]
"""those of the version that a test is about"""
SOURCES = {
    name: (ROOT / 'chatgpt/rollout' / name).read_text() for name in ('vllm.py', 'vllm_worker.py', 'vllm_remote.py')
}
SOURCES['decode_vllm'] = next(
    ast.unparse(node)
    for node in ast.parse((ROOT / 'benchmarks/gpu_parts.py').read_text()).body
    if isinstance(node, ast.FunctionDef) and node.name == 'decode_vllm'
)

WHAT_IS = {
    'llm': 'LLM', 'self.llm': 'LLM', 'self._llm': 'LLM', 'answer': 'RequestOutput', 'output': 'CompletionOutput',
    'step[token]': 'Logprob', 'worker': 'Worker', 'model': 'Model', 'self.sender': 'TrainerWeightTransferEngine',
    'self.link.sender': 'TrainerWeightTransferEngine', 'self._factory': 'WeightTransferTrainerFactory',
    'current_platform': 'Platform',
}  # fmt: skip
"""what our sources call a thing → what it is of vLLM's"""
OURS = {('vllm.py', 'model'), ('vllm_remote.py', 'worker'), ('vllm_remote.py', 'model'), ('vllm_remote.py', 'answer')}
"""where it is not"""
PAYLOADS = {'init_weight_transfer_engine': 'WeightTransferInitRequest', 'update_weights': 'WeightTransferUpdateRequest'}


def uses(name: str, text: str) -> Iterator[tuple[str, str]]:
    """(use, what is wrong with it or '') of a source file."""
    tree = ast.parse(text)
    imported: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or '').split('.')[0] == 'vllm':
            for alias in node.names:
                imported[alias.name] = node.module or ''
                yield (
                    f'from {node.module} import {alias.name}',
                    '' if _exported(node.module or '', alias.name) else 'no such name',
                )
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and _is(name, node.value):
            facts_of = FACTS['objects'][_is(name, node.value)]
            known = node.attr in facts_of['fields'] or node.attr in facts_of['methods']
            written = isinstance(node.ctx, ast.Store)
            yield ast.unparse(node), '' if known else f'no such name to {"write" if written else "read"}'
        if isinstance(node, ast.Call):
            yield from _call(name, node, imported)
        if isinstance(node, ast.Dict) and 'model' in (
            keys := [k.value for k in node.keys if isinstance(k, ast.Constant)]
        ):
            yield f'LLM({", ".join(keys)})', _unknown(keys, _of_llm())
        if isinstance(node, ast.Dict) and ast.unparse(node).startswith("{'prompt_token_ids'"):
            yield ast.unparse(node), _unknown(['prompt_token_ids'], FACTS['objects']['TokensPrompt']['fields'])
        if isinstance(node, ast.ClassDef) and node.name == 'Tensors':  # vLLM's WeightSource, for all versions
            ours = [ast.unparse(t) for n in node.body if isinstance(n, ast.Assign) for t in n.targets]
            theirs = {name for each in BY_VERSION.values() for name in each['objects']['WeightSource']['methods']}
            yield f'class {node.name}: {ours}', _unknown(ours, theirs | {'__iter__'})


def _of_llm() -> set[str]:
    """What vLLM's LLM may be given."""
    return {
        *FACTS['objects']['EngineArgs']['fields'],
        *FACTS['objects']['LLM']['methods']['__init__']['parameters'],
    }


def _is(name: str, node: ast.AST) -> str:
    text = ast.unparse(node)
    return '' if (name, text) in OURS else WHAT_IS.get(text, '')


def _exported(module: str, what: str) -> bool:
    path = module.replace('.', '/')
    if f'{path}/__init__.py' in FACTS['exports']:
        return what in FACTS['exports'][f'{path}/__init__.py']
    return f'{path}.py' in FACTS['objects'].get(what, {'files': []})['files']


def _unknown(names: Any, known: Any) -> str:
    return ', '.join(f'no {n}' for n in names if n not in known)


def _call(name: str, node: ast.Call, imported: dict[str, str]) -> Iterator[tuple[str, str]]:
    function, given = node.func, list(node.args)
    if (
        ast.unparse(function) == 'self._asked'
        and given
        and isinstance(given[0], ast.Attribute)
        and _is(name, given[0].value)
    ):
        function, given = given[0], given[1:]  # our wrapper around a call
    keywords = [k.arg for k in node.keywords if k.arg]
    text = ast.unparse(node)
    if text.startswith('import_vllm().') and isinstance(function, ast.Attribute):
        what = FACTS['objects'][function.attr]
        if keywords:  # and not **settings, whose dict is looked at by itself
            yield text, _unknown(keywords, what['fields'])
        yield text, '' if function.attr in FACTS['exports']['vllm/__init__.py'] else 'not exported'
    elif isinstance(function, ast.Name) and function.id == 'LLM' and 'LLM' in imported:
        yield (
            text,
            _unknown(keywords, _of_llm())
            or _misfit(given, keywords, FACTS['objects']['LLM']['methods']['__init__'], node),
        )
    elif (
        isinstance(function, ast.Name) and function.id in imported and 'fields' in FACTS['objects'].get(function.id, {})
    ):
        what = FACTS['objects'][function.id]
        known = what['fields']
        missing = [f for f in what['required_fields'] if f not in keywords] if not given else []
        yield text, _unknown(keywords, known) or ', '.join(f'{m} is missing' for m in missing)
    elif isinstance(function, ast.Attribute):
        owner = _is(name, function.value) or (
            ast.unparse(function.value) if ast.unparse(function.value) in imported else ''
        )
        if owner not in FACTS['objects'] or function.attr not in FACTS['objects'][owner]['methods']:
            return
        yield text, _misfit(given, keywords, FACTS['objects'][owner]['methods'][function.attr], node)
        first = given[0] if given else None
        if function.attr == 'collective_rpc' and isinstance(first, ast.Constant):
            asked = next((k.value for k in node.keywords if k.arg == 'kwargs'), ast.Dict([], []))
            assert isinstance(asked, ast.Dict)
            keys = [ast.literal_eval(k) for k in asked.keys if k is not None]
            known = FACTS['objects']['Worker']['methods'].get(first.value)
            taken = FACTS['objects']['ModelRunner']['methods'].get(first.value, known)  # which a worker hands on to
            yield f'{first.value}({keys})', 'no such method' if known is None else _unknown(keys, taken['parameters'])
        if function.attr in PAYLOADS and owner == 'LLM' and isinstance(first, ast.Dict):
            keys = [ast.literal_eval(k) for k in first.keys if k is not None]
            yield f'{function.attr}({keys})', _unknown(keys, FACTS['objects'][PAYLOADS[function.attr]]['fields'])


def _misfit(given: list[ast.expr], keywords: list[str], of: dict[str, Any], node: ast.Call) -> str:
    if any(k.arg is None for k in node.keywords) or any(isinstance(a, ast.Starred) for a in given):
        return ''
    named = of['parameters'][: len(given)]
    wrong = _unknown([] if of['any_keyword'] else keywords, of['parameters'])
    many = 'too many by position' if len(given) > of['by_position'] else ''
    missing = ', '.join(f'{r} is missing' for r in of['required'] if r not in (*named, *keywords))
    return wrong or many or missing


@pytest.fixture(params=sorted(BY_VERSION))
def version(request, monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], 'FACTS', BY_VERSION[request.param])
    return request.param


def test_every_use_of_vllm_in_our_sources_is_in_its_sources(version):
    found = {name: list(uses(name, text)) for name, text in SOURCES.items()}
    wrong = [f'{name}: {use}: {why}' for name, pairs in found.items() for use, why in pairs if why]
    assert not wrong, '\n'.join(wrong)
    everything = ' '.join(use for pairs in found.values() for use, _ in pairs)
    for known in (
        'generate(given, asked, use_tqdm=False)', 'answer.outputs', 'output.token_ids', 'output.logprobs',
        'step[token].logprob', 'wake_up(tags=[part])', 'sleep(level=2)', "reload_weights(['weights_iterator'])",
        "init_weight_transfer_engine(['init_info'])", "update_weights(['update_info'])", 'check_health([])',
        'llm.apply_model', 'worker.weight_transfer_engine', 'worker.vllm_config', 'worker.device', 'worker.get_model',
        'model.load_weights(iter(named))', 'create_engine(config=', 'WeightTransferConfig(backend=backend)',
        'trainer_init(info, client=', 'sender.send_weights()', 'sender.shutdown()',
        'NCCLTrainerInitInfo(rank=0', 'IPCTrainerInitInfo(rank=0', 'ParamMeta(name',
        "class Tensors: ['metadata', ", 'current_platform.is_sleep_mode_available',
        'SamplingParams(temperature=', 'LLM(model, load_format',
        "{'prompt_token_ids'", "LLM(folder, load_format='dummy'", 'llm.generate(given, sampling, use_tqdm=False)',
    ):  # fmt: skip
        assert known in everything, f'{known} is not seen any more'


@pytest.mark.parametrize(
    ('name', 'right', 'wrong', 'why'),
    [
        ('vllm.py', 'use_tqdm=False', 'progress=False', 'no progress'),
        ('vllm.py', "'weights_iterator'", "'weights'", 'no weights'),
        ('vllm.py', "'logprobs_mode':", "'logprob_mode':", 'no logprob_mode'),
        ('vllm.py', 'ignore_eos=True', 'ignore_end=True', 'no ignore_end'),
        ('vllm.py', 'output.token_ids', 'output.tokens', 'no such name'),
        ('vllm_worker.py', 'worker.get_model()', 'worker.the_model()', 'no such name'),
        ('vllm_worker.py', 'vllm_config=worker', 'config_of=worker', 'no config_of'),
        ('vllm_remote.py', 'master_port=', 'port=', 'no port'),
        ('vllm_remote.py', 'world_size=1 + self.num_gpus,', '', 'world_size is missing'),
        ('vllm_remote.py', 'import ParamMeta,', 'import WeightMeta,', 'no such name'),
        ('vllm_remote.py', 'iter_full = __iter__', 'iterate = __iter__', 'no iterate'),
        ('decode_vllm', 'max_model_len=', 'max_length=', 'no max_length'),
        ('decode_vllm', 'ignore_eos=', 'ignore_end=', 'no ignore_end'),
        ('decode_vllm', 'llm.generate(', 'llm.answer(', 'no such name'),
    ],
)
def test_a_wrong_use_would_be_noticed(name, right, wrong, why):
    assert right in SOURCES[name]
    assert any(why in found for _, found in uses(name, SOURCES[name].replace(right, wrong)))


def test_strings_that_choose_are_among_the_choices():
    text = ' '.join(SOURCES.values())
    for value, choice in (
        ('processed_logprobs', 'logprobs_mode'),
        ('external_launcher', 'distributed_executor_backend'),
        ('ray', 'distributed_executor_backend'),
        ('uni', 'distributed_executor_backend'),
        ('nccl', 'backend'),
        ('ipc', 'backend'),
        ('weights', 'sleep_tags'),
        ('kv_cache', 'sleep_tags'),
        ('VLLM_ENABLE_V1_MULTIPROCESSING', 'environment'),
    ):
        assert f"'{value}'" in text and value in FACTS['choices'][choice], value


def test_our_client_is_the_one_that_senders_ask():
    tree = ast.parse(SOURCES['vllm_remote.py'])
    client = next(n for n in ast.walk(tree) if isinstance(n, ast.ClassDef) and n.name == '_Link')
    ours = {n.name: signature(n) for n in client.body if isinstance(n, ast.FunctionDef)}
    for name, theirs in FACTS['objects']['VLLMWeightSyncClient']['methods'].items():
        assert ours[name] == theirs, name


def test_vllm_goes_about_it_as_we_count_on(version):
    orders = {what: step['order'] for what, step in FACTS['steps'].items()}
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


def test_the_stand_in_takes_nothing_that_vllm_does_not():
    stand_in = facts(HERE / 'stand_in')
    assert {'LLM', 'EngineArgs', 'SamplingParams', 'CompletionOutput', 'NCCLTrainerInitInfo', 'Worker'} <= set(
        stand_in['objects']
    )
    for name, own in stand_in['objects'].items():
        theirs = FACTS['objects'][name]
        if name not in ('LLM', 'Worker'):  # which have insides of their own
            assert set(own['fields']) <= set(theirs['fields']), name
        for method, ours in own['methods'].items():
            if name == 'Worker' and method in ('__init__', 'reload_weights'):
                continue  # ours is made otherwise, and hands nothing on
            real = theirs['methods'][method]
            assert [p for p in real['parameters'] if p in ours['parameters']] == ours['parameters'], (name, method)
            assert set(real['required']) <= set(ours['parameters']), (name, method)
            assert ours['by_position'] <= real['by_position'], (name, method)
    for path, names in stand_in['exports'].items():
        assert set(names) <= set(FACTS['exports'][path])


def test_versions_are_those_that_were_read():
    low, high = re.fullmatch(r'vllm>=(\d+\.\d+),<(\d+\.\d+)', VLLM).groups()  # type: ignore[union-attr]
    minors = [int(known.split('.')[1]) for known in sorted(BY_VERSION)]
    assert (low, high) == (f'0.{minors[0]}', f'0.{minors[-1] + 1}') and minors == list(range(minors[0], minors[-1] + 1))
    assert f"'vllm': ['{VLLM}']" in (ROOT / 'setup.py').read_text()
    page = (ROOT / 'docs/rollout.md').read_text()
    assert VLLM in page and all(known in page for known in BY_VERSION)


@pytest.mark.skipif('VLLM_SOURCES' not in os.environ, reason='VLLM_SOURCES names no wheel of vLLM, nor a folder of one')
def test_the_facts_are_those_of_the_wheel():
    found = facts(Path(os.environ['VLLM_SOURCES']))
    assert found == BY_VERSION[found['version']]
