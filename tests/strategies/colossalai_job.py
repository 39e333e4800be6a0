"""All checks of `ColossalAIStrategy` in one job, since colossalai takes seconds to import."""

from __future__ import annotations

import traceback
import warnings
from functools import partial
from pathlib import Path

import colossalai_learning as learning
import colossalai_saving as saving
import pytest
import torch
from colossalai_runs import FP16, GEMINI, ZERO, contents, distances, load, pair_of, same_bits, train, weights_of, write

from chatgpt.strategies import NaiveStrategy
from chatgpt.strategies.colossalai import ColossalAIStrategy

TWO = {
    **{f'agreement, {name}': (learning.check_agreement, *config) for name, config in {**ZERO, **GEMINI}.items()},
    'clipped, zero1 cpu hybrid': (learning.check_agreement, *ZERO['zero1 cpu hybrid'], None, 0.3),
    'clipped, gemini cpu cut': (learning.check_agreement, *GEMINI['gemini cpu cut'], None, 0.3),
    **{
        f'micro-batches, {name}': (learning.check_agreement, *ZERO[name], 12)
        for name in ('zero1 cuda adamw', 'zero2 cpu cpuadam')
    },
    'gemini is zero': (learning.check_gemini_is_zero,),
    **{
        f'accumulation, {name}': (learning.check_accumulation, GEMINI[name][0])
        for name in ('gemini cuda whole', 'gemini cpu cut')
    },
    'accumulation, forgetful': (learning.check_accumulation, GEMINI['gemini cuda cut'][0], True),
    'order of calls': (learning.check_order_of_calls,),
    'outputs': (learning.check_outputs,),
    'unequal rows': (learning.check_unequal_rows,),
    'families': (learning.check_families,),
    'layer drop': (learning.check_layer_drop,),
    'layouts': (saving.check_layouts,),
    'resume, zero2 bf16': (
        saving.check_bits_of_resume,
        {'stage': 2, 'precision': 'bf16', 'placement_policy': 'cpu'},
        'cpuadam',
    ),
    'resume, gemini bf16': (saving.check_bits_of_resume, *GEMINI['gemini cuda cut']),
    'resume, gemini fp16': (
        saving.check_bits_of_resume,
        {**FP16, 'placement_policy': 'cpu', 'initial_scale': 2.0**10},
        'hybrid',
    ),
    'full model, zero gpt2': (saving.check_full_model, {'stage': 1, 'precision': 'bf16'}, 'adamw', 'gpt2'),
    'full model, zero lora': (
        partial(saving.check_full_model, lora_rank=2),
        {'stage': 2, 'precision': 'bf16'},
        'adamw',
        'llama',
    ),
    'full model, gemini llama': (saving.check_full_model, *GEMINI['gemini cpu cut'], 'llama'),
    'full model, gemini lora': (partial(saving.check_full_model, lora_rank=2), *GEMINI['gemini cuda cut'], 'gpt2'),
    'files, zero2': (saving.check_whole_files, {'stage': 2, 'precision': 'bf16'}, 'adamw'),
    'files, gemini': (saving.check_whole_files, *GEMINI['gemini cuda cut']),
    'loss scale, zero': (learning.check_loss_scale, {'stage': 2, 'precision': 'fp16'}),
    'loss scale, gemini': (learning.check_loss_scale, FP16),
    'growth, zero': (learning.check_growth, {'stage': 1, 'precision': 'fp16'}, None),
    'growth, zero2': (learning.check_growth, {'stage': 2, 'precision': 'fp16'}, 0.3),
    'shard_init': (saving.check_shard_init,),
    'packing is settled': (saving.check_packing_is_settled,),
    'refusals': (learning.check_refusals,),
    'conformance, zero2': (learning.check_conformance, *ZERO['zero2 cuda hybrid']),
    'conformance, gemini': (learning.check_conformance, *GEMINI['gemini cuda cut']),
}


def run_all(root, names):
    """{check: its facts, or a traceback} on every rank."""
    warnings.filterwarnings('ignore')
    outcomes = {}
    with ColossalAIStrategy(1, 'fp32'):
        for number, name in enumerate(names):
            check, *args = TWO[name]
            folder = Path(root) / str(number)
            folder.mkdir(exist_ok=True)
            try:
                outcomes[name] = check(folder, *args)
            except Exception:
                outcomes[name] = traceback.format_exc()
    return outcomes


def check_one_process(root):
    """What two processes wrote, loaded by one: bits, and one more step against Naive."""
    warnings.filterwarnings('ignore')
    facts = {}
    with ColossalAIStrategy(1, 'fp32') as holder:
        folder = Path(root) / str(list(TWO).index('layouts'))
        stored = contents(folder / 'gemini')
        naive = NaiveStrategy(device='cpu')
        want, want_optimizer = pair_of(naive)
        load(naive, folder / 'gemini', want, want_optimizer)
        want_results = train(naive, want, want_optimizer, steps=1, first=2)
        for name, (options, kind) in {'zero2': ZERO['zero2 cpu cpuadam'], 'gemini': GEMINI['gemini cpu cut']}.items():
            with ColossalAIStrategy(**options) as strategy:
                model, optimizer = pair_of(strategy, kind)
                load(strategy, folder / 'gemini', model, optimizer)
                again = folder / f'one-{name}'
                write(strategy, again, model, optimizer)
                results = train(strategy, model, optimizer, steps=1, first=2)
                distance = distances(weights_of(strategy, model), want.state_dict())
                facts[name] = (same_bits(contents(again), stored), results, want_results, distance)
        facts['adam'] = check_hybrid_adam()
        assert holder.world_size == 1
    return facts


def check_hybrid_adam():
    """HybridAdam and CPUAdam on the bridge against torch's AdamW."""
    from colossalai.nn.optimizer import CPUAdam, HybridAdam

    far = {}
    for kind in (HybridAdam, CPUAdam):
        torch.manual_seed(0)
        a = torch.nn.Parameter(torch.randn(50))
        b = torch.nn.Parameter(a.detach().clone())
        ours, theirs = kind([a], lr=1e-2, weight_decay=0.1), torch.optim.AdamW([b], lr=1e-2, weight_decay=0.1)
        for _ in range(5):
            a.grad = torch.randn(50)
            b.grad = a.grad.clone()
            ours.step()
            theirs.step()
        far[kind.__name__] = float((a - b).abs().max())
    return far


def outcome(ranks, name):
    """What rank 0 found; a traceback on any rank fails the test."""
    for rank, facts in enumerate(ranks):
        if isinstance(facts[name], str):
            pytest.fail(f'rank {rank}:\n{facts[name]}')
    return ranks[0][name]
