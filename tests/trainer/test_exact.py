"""`reproducible='exact'`: the same SHA-256 of weights, optimizer states and metrics under any strategy and number of
processes."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from optional_packages import needs_colossalai
from tiny_runs import assemble, offline, preference
from torch import Tensor
from transformers import AutoModel

from chatgpt.data import TokenizedPreference
from chatgpt.nn import AutoActor, GPTCritic, RewardModel
from chatgpt.nn.heads import critic_head
from chatgpt.strategies import DDPStrategy, FSDPStrategy, NaiveStrategy
from chatgpt.strategies.colossalai import ColossalAIStrategy
from chatgpt.strategies.sums import check_elementwise
from chatgpt.testing.fakes import tiny_config
from chatgpt.testing.processes import run_distributed
from chatgpt.trainer import DPOTrainer, RewardModelTrainer, SFTTrainer
from chatgpt.types import Sequence

VOCAB = 37
SIZES: dict[str, Any] = {'vocab_size': VOCAB, 'hidden': 20, 'positions': 48}
"""no tensor divides evenly over 8 ranks, and few over 4"""
STRATEGIES: dict[str, Any] = {'naive': NaiveStrategy, 'ddp': DDPStrategy, 'fsdp': FSDPStrategy}
OFFLINE = ('sft', 'reward', 'dpo')
ONLINE = ('ppo', 'shared', 'lora', 'hydra', 'grpo', 'ptx')


def ids(generator: torch.Generator, length: int) -> Tensor:
    return torch.randint(3, VOCAB, (length,), generator=generator)


def sequences(count: int = 20, seed: int = 0) -> list[Sequence]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 19, (count,), generator=generator).tolist()
    return [
        Sequence(
            prompt_ids=ids(generator, 1 + i % 5), response_ids=ids(generator, n), response_mask=torch.arange(n) % 4 != 1
        )
        for i, n in enumerate(lengths)
    ]


def pairs() -> list[TokenizedPreference]:
    g = torch.Generator().manual_seed(1)
    lengths = [(1 + i % 4, 1 + 3 * i % 11, 1 + (3 * i + 1) % 11) for i in range(20)]
    return [preference(*(ids(g, n).tolist() for n in each)) for each in lengths]


def build_offline(strategy: Any, kind: str, family: str, **settings: Any) -> Any:
    config = tiny_config(family, **SIZES, **({'dropout': 0.1} if kind == 'sft' else {}))
    torch.manual_seed(7)
    model = RewardModel(AutoModel.from_config(config)) if kind == 'reward' else AutoActor(config=config)
    data: Any = sequences() if kind == 'sft' else pairs()
    if kind == 'dpo':
        settings['initial_model'] = strategy.prepare(deepcopy(model))
    cls = {'sft': SFTTrainer, 'reward': RewardModelTrainer, 'dpo': DPOTrainer}[kind]
    settings = {'train_batch_size': 12, 'max_epochs': 2, 'max_grad_norm': 0.5} | settings
    return offline(cls, strategy, model, data, data[:7], **settings)


def build_online(strategy: Any, kind: str, family: str, **settings: Any) -> Any:
    config = tiny_config(family, **SIZES)
    torch.manual_seed(7)
    actor = AutoActor(config=config, **{'lora': {'lora_rank': 3}, 'hydra': {'num_layers_unfrozen': 1}}.get(kind, {}))
    initial = None if kind in ('lora', 'hydra') else deepcopy(actor)
    if kind in ('shared', 'hydra'):
        actor.value_head = critic_head(SIZES['hidden'])
    critic = GPTCritic(config=tiny_config('gpt2', **SIZES)) if kind in ('ppo', 'lora', 'ptx') else None
    if kind == 'grpo':
        settings = {'advantage_estimator': 'grpo', 'num_samples_per_prompt': 4, 'kl_in': 'loss'} | settings
    if kind == 'ptx':
        settings = {'ptx_coef': 0.7, 'pretrain_data': sequences(9, seed=5)} | settings
    sizes = {'train_batch_size': 12, 'max_epochs': 2, 'max_new_tokens': 20, 'eos_token_id': 2, 'lr': 3e-3}
    sizes |= {'score_scaling': 'running', 'whiten_rewards': kind == 'ppo'}
    settings = sizes | {'kl_coef': 0.1, 'max_grad_norm': 0.5, 'entropy_coef': 0.01} | settings
    return assemble(strategy, actor, critic, None, initial, **settings)


def recorded(kind: str, phase: int) -> tuple[list[Tensor], list[Tensor], list[float]]:
    found, same = sequences(16, seed=10 + phase), 4 if kind == 'grpo' else 1
    queries = [found[i // same * same].prompt_ids for i in range(16)]
    return queries, [s.response_ids for s in found], [float((7 * i + phase) % 5) - 1.3 for i in range(16)]


def learn(trainer: Any, kind: str, phases: int = 2) -> None:
    if kind in OFFLINE:
        trainer.fit()
        return
    strategy = trainer.strategy
    for _ in range(phases):
        queries, responses, scores = recorded(kind, trainer.phase)
        share = 16 // strategy.world_size
        mine = slice(strategy.rank * share, (strategy.rank + 1) * share)
        trainer.step(queries[mine], responses[mine], scores[mine])


def build(strategy: Any, kind: str, family: str = 'gpt2', **settings: Any) -> Any:
    return (build_offline if kind in OFFLINE else build_online)(strategy, kind, family, **settings)


def digest(trainer: Any) -> str:
    """Returns the SHA-256 of weights and optimizer states, on every rank."""
    strategy, models = trainer.strategy, trainer.models()
    found = {name: strategy.model_pieces(model) for name, model in models.items()}
    found |= {f'{name}_optim': strategy.optimizer_state(o)[1] for name, o in trainer.optimizers().items()}
    pieces = [(name, p.name, p.start, p.data.tolist()) for name, pieces in found.items() for p in pieces]
    whole: dict[tuple[str, str], list[float]] = {}
    for name, tensor, _, data in sorted(p for rank in strategy.all_gather_object(pieces) for p in rank):
        whole.setdefault((name, tensor), []).extend(data)
    return hashlib.sha256(repr(sorted(whole.items())).encode()).hexdigest()


def run(
    strategy: Any, kind: str, family: str = 'gpt2', before: Callable[[Any], None] | None = None, **settings: Any
) -> tuple[str, list[dict[str, float]]]:
    trainer = build(strategy, kind, family, **settings)
    if before is not None:
        before(trainer)
    learn(trainer, kind)
    return digest(trainer), trainer.log.phases


Case = tuple[str, str, str]
"""kind, family, precision"""
FP32: list[Case] = [(kind, 'gpt2', 'fp32') for kind in ('sft', 'reward', 'dpo', 'ppo', 'lora')]
FP32.append(('grpo', 'llama', 'fp32'))
BF16: list[Case] = [('ppo', 'gpt2', 'bf16'), ('shared', 'llama', 'bf16'), ('sft', 'llama', 'bf16')]
ALL: list[Case] = [
    (kind, family, precision)
    for kind in (*OFFLINE, *ONLINE)
    for family in ('gpt2', 'llama')
    for precision in ('fp32', 'bf16')
]


def make_strategy(layout: str, precision: str = 'fp32', **options: Any) -> Any:
    options = {'seed': 3, 'device': 'cpu', 'reproducible': 'exact'} | options
    if layout.startswith('zero'):
        from chatgpt.strategies.colossalai import ColossalAIStrategy

        return ColossalAIStrategy(stage=int(layout[4:]), precision=precision, **options)
    return STRATEGIES[layout](precision=precision, **options)


def runs(layout: str, cases: list[Case], **options: Any) -> dict[Case, Any]:
    """Returns the results of every case under a strategy of that name."""
    found = {}
    for kind, family, precision in cases:
        with make_strategy(layout, precision, **options) as strategy:
            found[kind, family, precision] = run(strategy, kind, family)
    return found


def run_layouts(layouts: list[str], cases: list[Case], device: str = 'cpu') -> dict[str, dict[Case, Any]]:
    return {layout: runs(layout, cases, device=device) for layout in layouts}


def flip_one_bit(trainer: Any) -> None:
    """Flips a low bit of one element of one gradient, once, on the last rank. The lowest bit could be lost when the sum
    over ranks is rounded."""
    strategy, backward, done = trainer.strategy, trainer.strategy.backward, []

    def flipping(loss: Tensor, model: Any, optim: Any) -> None:
        backward(loss, model, optim)
        if not done and strategy.rank == strategy.world_size - 1:
            gradient = max(
                (p.grad for _, p in strategy._pair(optim).named_parameters() if p.grad is not None),
                key=lambda g: float(g.abs().max()),
            )
            flat = gradient.view(-1)
            at = int(flat.abs().argmax())
            flat.view(torch.int32)[at] ^= 8
            done.append(at)

    strategy.backward = flipping


VARIANTS: dict[str, dict[str, Any]] = {'same': {}, 'flipped': {}, 'ordinary': {'reproducible': None}}


def variants(layout: str, further: dict[str, dict[str, Any]]) -> dict[str, str]:
    """Returns hashes under a layout: unchanged, with a flipped bit, without `exact`, and with further settings."""
    hashes = {}
    for name, options in {**VARIANTS, **further}.items():
        with make_strategy(layout, **options) as strategy:
            hashes[name] = run(strategy, 'sft', before=flip_one_bit if name == 'flipped' else None)[0]
    return hashes


def legs(layouts: list[str], kind: str, sources: list[str | None], targets: list[str]) -> list[str]:
    """Runs the last thirds of a run, from one checkpoint to the next: two of SFT's six steps, or one of PPO's three
    phases. Returns the hash of each."""
    found = []
    for i, (layout, source, target) in enumerate(zip(layouts, sources, targets, strict=True)):
        with make_strategy(layout) as strategy:
            settings = {'max_epochs': 3} if kind in OFFLINE else {}
            trainer = build(strategy, kind, **settings)
            if source is not None:
                trainer.load_checkpoint(source)
            if kind in OFFLINE:
                trainer.config.max_steps = None if i == len(layouts) - 1 else trainer.batches_done + 2
            learn(trainer, kind, phases=1)
            trainer.save_checkpoint(target)
            found.append(digest(trainer))
    return found


TWO = ['ddp', 'fsdp']


def check(want: dict[Case, Any], got: list[dict[str, dict[Case, Any]]]) -> None:
    for rank in got:
        for layout, found in rank.items():
            for case, (digest, phases) in want.items():
                assert found[case][0] == digest, (layout, case)
                assert found[case][1] == phases, (layout, case)


def test_one_hash_on_two_processes():
    cases = [*FP32, *BF16]
    want = run_distributed(runs, 1, 'naive', cases)[0]  # a new process, like the others
    assert len({digest for digest, _ in want.values()}) == len(cases)
    check(want, run_distributed(run_layouts, 2, TWO, cases, init_group=True))


@pytest.mark.slow
@pytest.mark.parametrize('ranks', [2, 4])
def test_one_hash_of_everything(ranks):
    check(run_distributed(runs, 1, 'naive', ALL)[0], run_distributed(run_layouts, ranks, TWO, ALL))


@pytest.mark.slow
@needs_colossalai
def test_one_hash_under_zero():
    cases = [*FP32, *BF16, ('ptx', 'gpt2', 'fp32'), ('hydra', 'llama', 'bf16')]
    check(run_distributed(runs, 1, 'naive', cases)[0], run_distributed(run_layouts, 2, ['zero1', 'zero2'], cases))


def test_gemini_and_its_fp16_are_refused():
    for options, message in (
        ({'stage': 3, 'precision': 'bf16'}, r'Gemini \(stage=3\) keeps gradients in 16 bits'),
        ({'stage': 1, 'precision': 'fp16'}, "precision='fp16' is scaled by upstream"),
    ):
        text = f"reproducible='exact': {message}, which no other strategy repeats; use stage"
        with pytest.raises(ValueError, match=text):
            ColossalAIStrategy(**options, reproducible='exact')


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason='needs a CUDA device')
def test_one_hash_on_a_gpu():
    """Two runs are the same, also under DDP and FSDP2, each on one process of a single GPU."""
    cases = [('sft', 'gpt2', 'fp32'), ('ppo', 'llama', 'fp32'), ('ppo', 'gpt2', 'bf16')]
    want = runs('naive', cases, device='cuda')
    check(want, [{'naive': runs('naive', cases, device='cuda')}])
    check(want, run_distributed(run_layouts, 1, TWO, cases, 'cuda'))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason='needs a CUDA device')
@pytest.mark.parametrize('options', [{}, {'fused': True}, {'foreach': False}])
def test_an_optimizer_on_a_gpu_steps_parts_as_the_whole(options):
    check_elementwise(
        torch.optim.AdamW([torch.nn.Parameter(torch.ones(3, device='cuda'))], weight_decay=0.1, **options)
    )


def test_what_changes_the_hash():
    """One flipped bit of one gradient, another seed, other atoms; and the layout without `exact`."""
    (one,) = run_distributed(variants, 1, 'naive', {'atoms': {'atoms': 4}})
    two = run_distributed(variants, 2, 'ddp', {'seed': {'seed': 4}})[0]
    assert one.pop('same') == two['same']
    assert len({*one.values(), *two.values()}) == len(one) + len(two) == 7


@pytest.mark.parametrize('kind', ['sft', 'ppo'])
def test_a_run_that_moves_between_layouts(tmp_path, kind):
    """Naive, then FSDP2 on two processes, then DDP on two; compared with Naive throughout."""
    at = [str(tmp_path / str(i)) for i in range(6)]
    (hashes,) = run_distributed(legs, 1, ['naive'] * 3, kind, [None, *at[:2]], at[:3])
    moved = run_distributed(legs, 2, ['fsdp', 'ddp'], kind, [at[0], at[3]], at[3:5], init_group=True)
    assert [rank[-1] for rank in moved] == [hashes[-1]] * 2


def test_an_atom_above_the_budget_is_refused_before_any_work():
    with make_strategy('naive') as strategy:
        trainer = build(strategy, 'sft', max_tokens_per_batch=20)
        with pytest.raises(ValueError, match=r'one of the 8 atoms of a train batch of 12 has \d rows of up to \d+ tok'):
            trainer.fit()
        assert trainer.num_updates == 0
