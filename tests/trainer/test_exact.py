"""`reproducible='exact'`: one SHA-256 of weights, optimizer states and metrics, whatever strategy and number of
processes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from exact_runs import ALL, BF16, FP32, Case, build, controls, flip_one_bit, leg, made, run, runs, several
from optional_packages import needs_colossalai

from chatgpt.strategies.colossalai import ColossalAIStrategy
from chatgpt.strategies.sums import check_elementwise
from chatgpt.testing.processes import run_distributed

TWO = ['ddp', 'fsdp']


def check(want: dict[Case, Any], got: list[dict[str, dict[Case, Any]]]) -> None:
    for rank in got:
        for layout, found in rank.items():
            for case, (digest, phases) in want.items():
                assert found[case][0] == digest, (layout, case)
                assert found[case][1] == phases, (layout, case)


@pytest.mark.parametrize('cases', [FP32[:3], FP32[3:], BF16], ids=['offline', 'online', 'bf16'])
def test_one_hash_on_two_processes(cases):
    want = run_distributed(runs, 1, 'naive', cases)[0]  # a process as fresh as the others
    assert len({digest for digest, _ in want.values()}) == len(cases)
    check(want, run_distributed(several, 2, TWO, cases))


@pytest.mark.slow
@pytest.mark.parametrize('ranks', [2, 4])
def test_one_hash_of_everything(ranks):
    check(run_distributed(runs, 1, 'naive', ALL)[0], run_distributed(several, ranks, TWO, ALL))


@pytest.mark.slow
@needs_colossalai
def test_one_hash_under_zero():
    cases = [*FP32, *BF16, ('ptx', 'gpt2', 'fp32'), ('hydra', 'llama', 'bf16')]
    check(run_distributed(runs, 1, 'naive', cases)[0], run_distributed(several, 2, ['zero1', 'zero2'], cases))


@pytest.mark.parametrize(
    ('options', 'message'),
    [
        ({'stage': 3, 'precision': 'bf16'}, r'Gemini \(stage=3\) keeps gradients in 16 bits'),
        ({'stage': 1, 'precision': 'fp16'}, "precision='fp16' is scaled by upstream"),
    ],
)
def test_gemini_and_its_fp16_are_refused(options, message):
    with pytest.raises(
        ValueError, match=f"reproducible='exact': {message}, which no other strategy repeats; use stage"
    ):
        ColossalAIStrategy(**options, reproducible='exact')


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason='needs a CUDA device')
def test_one_hash_on_a_gpu():
    """Twice the same, and under DDP and FSDP2, which one GPU can try on one process only."""
    cases = [('sft', 'gpt2', 'fp32'), ('ppo', 'llama', 'fp32'), ('ppo', 'gpt2', 'bf16')]
    want = runs('naive', cases, device='cuda')
    check(want, [{'naive': runs('naive', cases, device='cuda')}])
    check(want, run_distributed(several, 1, TWO, cases, 'cuda'))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason='needs a CUDA device')
@pytest.mark.parametrize('options', [{}, {'fused': True}, {'foreach': False}])
def test_an_optimizer_on_a_gpu_steps_parts_as_the_whole(options):
    check_elementwise(
        torch.optim.AdamW([torch.nn.Parameter(torch.ones(3, device='cuda'))], weight_decay=0.1, **options)
    )


def alone() -> list[str]:
    """Hashes of one process: as it is, without `exact`, with other atoms, with one bit flipped."""
    found = []
    for options, before in (({}, None), ({'reproducible': None}, None), ({'atoms': 4}, None), ({}, flip_one_bit)):
        with made('naive', **options) as strategy:
            found.append(run(strategy, 'sft', **({'before': before} if before else {}))[0])
    return found


def test_what_changes_the_hash():
    """One flipped bit of one gradient, another seed; and without `exact` the layout."""
    want, ordinary, other_atoms, flipped = run_distributed(alone, 1)[0]
    found = run_distributed(controls, 2)[0]
    assert found['same'] == want
    assert found['ordinary'] != ordinary
    hashes = {want, ordinary, other_atoms, flipped, found['flipped'], found['seed'], found['ordinary']}
    assert len(hashes) == 7


@pytest.mark.parametrize('kind', ['sft', 'ppo'])
def test_a_run_that_moves_between_layouts(tmp_path, kind):
    """Naive, then FSDP2 on two processes, then DDP on two; against Naive all the way."""
    at = [str(tmp_path / str(i)) for i in range(6)]
    run_distributed(leg, 1, 'naive', kind, False, None, at[0])
    run_distributed(leg, 1, 'naive', kind, False, at[0], at[1])
    (want,) = run_distributed(leg, 1, 'naive', kind, True, at[1], at[2])
    run_distributed(leg, 2, 'fsdp', kind, False, at[0], at[3])
    assert run_distributed(leg, 2, 'ddp', kind, True, at[3], at[4]) == [want] * 2


def test_an_atom_above_the_budget_is_refused_before_any_work():
    with made('naive') as strategy:
        trainer = build(strategy, 'sft', max_tokens_per_batch=20)
        with pytest.raises(ValueError, match=r'one of the 8 atoms of a train batch of 12 has \d rows of up to \d+ tok'):
            trainer.fit()
        assert trainer.num_updates == 0
