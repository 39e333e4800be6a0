"""`ColossalAIStrategy` on the real ColossalAI, on CPU with gloo: against Naive, between layouts, and where it refuses.

colossalai takes seconds to import, so all checks on two processes run in one job, and those on one process in another; each
test looks at one outcome. Every check is collective: all ranks run it.
"""

from __future__ import annotations

import importlib.util
import math
import subprocess
import sys
import tempfile
import traceback
import types
import warnings
from functools import partial
from pathlib import Path

import pytest
import torch

from chatgpt.checkpoint import CheckpointReader, write_checkpoint
from chatgpt.testing.fakes import tiny_causal_lm, tiny_config
from chatgpt.testing.processes import run_distributed
from chatgpt.testing.tiny import tiny_micro_batches, tiny_sequences
from chatgpt.trainer.strategies import NaiveStrategy
from chatgpt.trainer.strategies.colossalai import ColossalAIStrategy
from chatgpt.trainer.strategies.colossalai_cpu import _TorchCPUAdam
from chatgpt.trainer.strategies.colossalai_engines import rank_range
from chatgpt.trainer.strategies.colossalai_states import UpstreamScaler
from chatgpt.trainer.strategies.precision import cast_copy

needs_colossalai = pytest.mark.skipif(
    importlib.util.find_spec('colossalai') is None, reason='colossalai is not installed; see requirements-colossalai.txt'
)
pytestmark = pytest.mark.timeout(600)  # the first test waits for the whole job on two processes
LR, STEPS = 1e-3, 4
SMALL = {'min_chunk_size_mb': 0.001, 'search_range_mb': 0.001, 'hidden_dim': 32}
"""chunks of about a thousand elements, so that a tiny model is cut into many"""
ZERO = {
    f'zero{stage} {placement} {optimizer}': ({'stage': stage, 'precision': 'fp32', 'placement_policy': placement}, optimizer)
    for stage, placement, optimizer in (
        (1, 'cuda', 'adamw'), (1, 'cpu', 'hybrid'), (2, 'cuda', 'hybrid'), (2, 'cpu', 'cpuadam'), (2, 'auto', 'adamw'),
    )
}  # fmt: skip
GEMINI = {
    f'gemini {placement} {size}': ({'stage': 3, 'precision': 'bf16', 'placement_policy': placement, **chunks}, 'hybrid')
    for placement in ('cuda', 'cpu', 'auto')
    for size, chunks in (('whole', {}), ('cut', SMALL))
}
FP16 = {'stage': 3, 'precision': 'fp16', **SMALL}


# --- helpers --------------------------------------------------------------------------------------------------------


def make_actor(family='gpt2', **kw):
    """An actor with a value head, so that its output is a named tuple with more than one tensor."""
    from chatgpt.nn import Actor

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        return Actor(tiny_causal_lm(family, vocab_size=64), value_head=True, **kw)


def optimizer_of(kind, model):
    parameters = [p for p in model.parameters() if p.requires_grad]
    if kind == 'adamw':
        return torch.optim.AdamW(parameters, lr=LR, eps=1e-5, weight_decay=0.01)
    from colossalai.nn.optimizer import CPUAdam, HybridAdam

    return {'hybrid': HybridAdam, 'cpuadam': CPUAdam}[kind](parameters, lr=LR, eps=1e-5, weight_decay=0.01)


def pair_of(strategy, kind='adamw', model=None):
    model = make_actor() if model is None else model
    return strategy.prepare((model, optimizer_of(kind, model)))


def batches_of(strategy, step, max_tokens=None):
    return tiny_micro_batches(tiny_sequences(seed=step), strategy.rank, strategy.world_size, max_tokens)


def loss_of(model, batch, weights):
    out = model(batch)
    return -(out.logprobs * weights).sum() + 0.1 * ((out.values - 1) ** 2 * weights).sum()


def train(strategy, model, optimizer, *, steps=STEPS, first=0, max_tokens=None, max_norm=None):
    """(loss, gradient norm) of every step."""
    results = []
    for step in range(first, first + steps):
        total = torch.zeros(())
        micro_batches = batches_of(strategy, step, max_tokens)
        for number, (batch, weights) in enumerate(micro_batches):
            with strategy.accumulate(model, last=number == len(micro_batches) - 1):
                with strategy.autocast():
                    loss = loss_of(model, batch, weights)
                strategy.backward(loss, model, optimizer)
            total += loss.detach()
        results.append((float(strategy.all_reduce(total)), strategy.optimizer_step(optimizer, max_norm)))
    return results


def distances(got, want):
    """Largest and mean distance of two state dicts, in learning rates per step."""
    assert got.keys() == want.keys()
    all_of = torch.cat([(got[n].double() - want[n].double()).abs().reshape(-1) for n in want])
    return float(all_of.max()) / (LR * STEPS), float(all_of.mean()) / (LR * STEPS)


def weights_of(strategy, model):
    return strategy.broadcast_object(strategy.full_state_dict(model))


def naive_run(precision, **kw):
    strategy = NaiveStrategy(precision=precision, device='cpu')
    model, optimizer = pair_of(strategy)
    return train(strategy, model, optimizer, **kw), {n: t.clone() for n, t in model.state_dict().items()}


def write(strategy, folder, model, optimizer):
    groups = {'model/': strategy.model_pieces(model), 'optim/': strategy.optimizer_pieces(optimizer)}
    meta = {'optimizer': strategy.optimizer_meta(optimizer)}
    write_checkpoint(folder, groups, meta=meta, rank=strategy.rank, all_gather_object=strategy.all_gather_object)


def load(strategy, folder, model, optimizer):
    reader = CheckpointReader(folder)
    strategy.load_model_pieces(model, reader.sub('model/'))
    strategy.load_optimizer_meta(optimizer, reader.meta['optimizer'])
    strategy.load_optimizer_pieces(optimizer, reader.sub('optim/'))


def contents(folder):
    """Every tensor of a checkpoint, whole."""
    reader = CheckpointReader(folder)
    return {name: reader.read(name, 0, math.prod(reader.shape(name))) for name in sorted(reader.names())}


def same_bits(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a)


def greedy(model, length=8):
    """Token ids by argmax, through the language model alone."""
    ids = torch.tensor([[5, 9, 11]])
    with torch.no_grad():
        for _ in range(length):
            ids = torch.cat([ids, model.model(input_ids=ids, use_cache=False).logits[:, -1:].argmax(-1)], 1)
    return ids[0].tolist()


# --- checks on two processes ----------------------------------------------------------------------------------------


def check_agreement(folder, options, kind, max_tokens=None, max_norm=None):
    """Results of a run here and of Naive in the same precision."""
    with ColossalAIStrategy(**options) as strategy:
        model, optimizer = pair_of(strategy, kind)
        results = train(strategy, model, optimizer, max_tokens=max_tokens, max_norm=max_norm)
        chunks = len(getattr(strategy._engine(optimizer), 'chunks', []))
        got = weights_of(strategy, model)
    want_results, want = naive_run(options['precision'], max_norm=max_norm)
    return {'results': results, 'want': want_results, 'distance': distances(got, want), 'chunks': chunks}


def check_gemini_is_zero(folder):
    """Gemini against ZeRO-2 in bf16: the same module in the same dtype, so no tolerance for bf16 arithmetic is needed."""
    out = []
    for options in ({'stage': 2, 'precision': 'bf16'}, GEMINI['gemini cuda cut'][0]):
        with ColossalAIStrategy(**options) as strategy:
            model, optimizer = pair_of(strategy, 'hybrid')
            out.append((train(strategy, model, optimizer), weights_of(strategy, model)))
    return {'zero': out[0][0], 'gemini': out[1][0], 'distance': distances(out[1][1], out[0][1])}


def check_accumulation(folder, options, forgetful=False):
    """Micro-batches and one batch; `forgetful`: without setting gradients aside, as a twin that must disagree."""
    out = []
    for max_tokens in (None, 12):
        with ColossalAIStrategy(**options) as strategy:
            model, optimizer = pair_of(strategy, 'hybrid')
            if forgetful:
                strategy._engine(optimizer)._set_aside = lambda: None
            out.append(train(strategy, model, optimizer, max_tokens=max_tokens))
    return {'one': out[0], 'many': out[1], 'num': len(batches_of(NaiveStrategy(device='cpu'), 0, 12))}


def check_order_of_calls(folder):
    """Gemini: forwards without gradients anywhere, two forwards before two backwards, a forward whose backward never comes."""
    ends = []
    for disturbed in (False, True):
        with ColossalAIStrategy(**GEMINI['gemini auto cut'][0]) as strategy:
            model, optimizer = pair_of(strategy, 'hybrid')
            (a, wa), (b, wb) = batches_of(strategy, 0)[0], batches_of(strategy, 1)[0]
            for _ in range(2):
                if disturbed:
                    with torch.no_grad():
                        scored = model(a)
                    assert torch.isfinite(scored.logprobs).all()
                    first, second = loss_of(model, a, wa), loss_of(model, b, wb)
                    strategy.backward(first, model, optimizer)
                    strategy.backward(second, model, optimizer)
                    with torch.no_grad():
                        model(b)
                    loss_of(model, a, wa)
                else:
                    for batch, weights in ((a, wa), (b, wb)):
                        strategy.backward(loss_of(model, batch, weights), model, optimizer)
                norm = strategy.optimizer_step(optimizer)
            ends.append((norm, weights_of(strategy, model)))
    return ends[0][0] == ends[1][0], same_bits(ends[0][1], ends[1][1])


def check_outputs(folder):
    """Outputs are plain tensors in the module's own kind of tuple; in-place operations on them work; fp32 on request."""
    facts = {}
    for stage in (2, 3):
        with ColossalAIStrategy(stage, 'bf16', force_outputs_fp32=stage == 3, **(SMALL if stage == 3 else {})) as strategy:
            model, _ = pair_of(strategy, 'hybrid')
            out = model(batches_of(strategy, 0)[0][0], with_logits=True)
            values = out.values.detach().clone()
            before = values.clone()
            values.add_(1.0)
            kinds = {type(t).__name__ for t in out if t is not None}
            facts[stage] = (type(out).__name__, kinds, torch.equal(values, before + 1), str(out.logits.dtype))
            model.eval()
            facts[stage] += (not any(m.training for m in strategy.unwrap(model).modules()),)
    return facts


def check_unequal_rows(folder):
    """Log-probs in chunks of rows, recomputed in the backward: ranks run unequally many operations, and nobody waits for ever."""
    import chatgpt.functional.logprobs as logprobs

    out, before = [], logprobs.CHUNK_ELEMENTS_CPU
    for elements in (before, 64 * 3):
        logprobs.CHUNK_ELEMENTS_CPU = elements
        try:
            with ColossalAIStrategy(**GEMINI['gemini cuda cut'][0]) as strategy:
                model = make_actor()
                model.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={'use_reentrant': False})
                model.train()
                model, optimizer = pair_of(strategy, 'hybrid', model)
                out.append(train(strategy, model, optimizer, max_tokens=30))
                rows = strategy.all_gather_object(sum(batch.num_actions for batch, _ in batches_of(strategy, 0, 30)))
        finally:
            logprobs.CHUNK_ELEMENTS_CPU = before
    return {'whole': out[0], 'chunks': out[1], 'rows': rows}


def check_families(folder):
    """First losses of LoRA, hydra and the other families under Gemini against ZeRO-2 in bf16; references stay where they are."""
    facts = {}
    for what in ('lora', 'hydra', 'opt', 'bloom', 'llama'):
        kw = {'hydra': {'num_layers_unfrozen': 1}, 'lora': {'lora_rank': 2}}.get(what, {})
        losses = []
        for options in ({'stage': 2, 'precision': 'bf16'}, GEMINI['gemini cpu cut'][0]):
            with ColossalAIStrategy(**options) as strategy:
                model, optimizer = pair_of(strategy, 'hybrid', make_actor('gpt2' if kw else what, **kw))
                references = []
                for _ in range(2 if kw else 0):
                    with torch.no_grad(), strategy.unwrap(model).reference():
                        references.append(model(batches_of(strategy, 0)[0][0]).logprobs)
                    losses.append([loss for loss, _ in train(strategy, model, optimizer, steps=2)])
                if kw:
                    assert torch.equal(*references), f'the reference of {what} moved'
                else:
                    losses.append([loss for loss, _ in train(strategy, model, optimizer, steps=3)])
        facts[what] = losses
    return facts


def check_layouts(folder):
    """zero2 (2 ranks, fp32) → gemini (2 ranks, bf16, cut) → zero1 → naive: every tensor keeps its bits."""
    with ColossalAIStrategy(2, 'fp32') as strategy:
        model, optimizer = pair_of(strategy)
        train(strategy, model, optimizer, steps=2)
        optimizer.param_groups[0]['lr'] = 7e-4
        write(strategy, folder / 'zero2', model, optimizer)
    for name, (options, kind) in {
        'gemini': GEMINI['gemini cpu cut'], 'whole': GEMINI['gemini cuda whole'], 'zero1': ZERO['zero1 cpu hybrid'],
    }.items():  # fmt: skip
        with ColossalAIStrategy(**options) as strategy:
            model, optimizer = pair_of(strategy, kind)
            load(strategy, folder / 'zero2', model, optimizer)
            write(strategy, folder / name, model, optimizer)
            lr = optimizer.param_groups[0]['lr']
    stored = contents(folder / 'zero2')
    naive = NaiveStrategy(device='cpu')
    model, optimizer = pair_of(naive)
    load(naive, folder / 'gemini', model, optimizer)
    in_naive = all(torch.equal(stored[f'model/{n}'], p.detach().reshape(-1)) for n, p in model.named_parameters())
    steps = {float(s['step']) for s in optimizer.state.values()}
    return {
        **{name: same_bits(contents(folder / name), stored) for name in ('gemini', 'whole', 'zero1')},
        'naive': in_naive, 'steps': steps, 'lr': lr, 'num': len(stored),
    }  # fmt: skip


def check_bits_of_resume(folder, options, kind):
    """Saved after two steps and loaded into a new strategy: the next steps give the same bits, states and loss scale included."""
    with ColossalAIStrategy(**options) as strategy:
        model, optimizer = pair_of(strategy, kind)
        train(strategy, model, optimizer, steps=2, max_tokens=12)
        write(strategy, folder / 'half', model, optimizer)
        straight = train(strategy, model, optimizer, steps=2, first=2, max_norm=0.5)
        write(strategy, folder / 'straight', model, optimizer)
    with ColossalAIStrategy(**options) as strategy:
        model, optimizer = pair_of(strategy, kind)
        train(strategy, model, optimizer, steps=1)  # must leave no trace
        load(strategy, folder / 'half', model, optimizer)
        resumed = train(strategy, model, optimizer, steps=2, first=2, max_norm=0.5)
        write(strategy, folder / 'resumed', model, optimizer)
    meta = [CheckpointReader(folder / name).meta['optimizer'] for name in ('straight', 'resumed')]
    return straight == resumed, same_bits(contents(folder / 'straight'), contents(folder / 'resumed')), meta[0] == meta[1]


def check_full_model(folder, options, kind, family, **kw):
    """Whole weights for generation: the bits, the buffers and the tokens that Naive's copy has, adapters folded in."""

    def changed():
        model = make_actor(family, **kw)
        with torch.no_grad():
            for number, parameter in enumerate(model.parameters()):
                torch.manual_seed(number)
                parameter.add_(0.1 * torch.randn(parameter.shape))  # LoRA's B starts at zero, which would fold nothing
        return model

    naive = NaiveStrategy(precision='bf16', device='cpu')
    with naive.full_model(naive.prepare(changed())) as full:
        want, want_tokens = {n: t.clone() for n, t in full.named_parameters()}, greedy(full)
        want_buffers = {n: t.clone() for n, t in full.named_buffers()}
    with ColossalAIStrategy(**options) as strategy:
        model, optimizer = pair_of(strategy, kind, changed())
        frozen = strategy.prepare(changed())
        before = weights_of(strategy, model)
        facts = {}
        for name, prepared in (('trained', model), ('frozen', frozen)):
            with strategy.full_model(prepared) as full:
                got = dict(full.named_parameters())
                same = {n for n in want if torch.equal(got[n], want[n])} | {n for n in want if 'lora_B' in n}
                buffers = same_bits(dict(full.named_buffers()), want_buffers)
                facts[name] = (sorted(set(want) - same), buffers, greedy(full) == want_tokens)
        facts['restored'] = same_bits(weights_of(strategy, model), before)
        plain = cast_copy(changed(), torch.bfloat16)
        batch = tiny_micro_batches(tiny_sequences())[0][0]
        with torch.no_grad(), strategy.autocast():
            facts['scored'] = torch.equal(frozen(batch).logprobs, plain(batch).logprobs)
        train(strategy, model, optimizer, steps=1)
        facts['moved'] = not same_bits(weights_of(strategy, model), before)
    return facts


def check_whole_files(folder, options, kind):
    """`save_model` gives the fp32 bits to plain torch, tied names included; a frozen model too."""
    model = make_actor()
    start = {n: t.clone() for n, t in model.state_dict().items()}
    with ColossalAIStrategy(**options) as strategy:
        model, optimizer = pair_of(strategy, kind, model)
        frozen = strategy.prepare(make_actor())
        strategy.save_model(model, folder / 'actor.pt')
        strategy.save_model(frozen, folder / 'frozen.pt')
        refusal = ''
        try:
            strategy.save_optimizer(optimizer, folder / 'optim.pt', only_rank0=True)
        except ValueError as error:
            refusal = str(error)
        files = [torch.load(folder / name, weights_only=True) for name in ('actor.pt', 'frozen.pt')]
    return [same_bits(file, start) for file in files], refusal


def check_loss_scale(folder, options):
    """fp16: an overflow moves nothing and halves the scale, once the hysteresis is used up."""
    with ColossalAIStrategy(**options, initial_scale=2.0**40, max_scale=2.0**40, hysteresis=2) as strategy:
        model, optimizer = pair_of(strategy, 'hybrid')
        before = weights_of(strategy, model)
        norms, scales = [], []
        for step in range(3):
            norms.append(train(strategy, model, optimizer, steps=1, first=step)[0][1])
            scales.append(strategy.optimizer_meta(optimizer)['scaler']['scale'])
        unmoved = same_bits(weights_of(strategy, model), before)
        meta = {**strategy.optimizer_meta(optimizer), 'scaler': {'scale': 512.0, 'num_finite': 3}}
        strategy.load_optimizer_meta(optimizer, meta)
        after = train(strategy, model, optimizer, steps=1)[0]
        moved = not same_bits(weights_of(strategy, model), before)
        return norms, scales, unmoved, moved, after, strategy.optimizer_meta(optimizer)['scaler']


def check_shard_init(folder):
    """Built on the meta device and filled in `prepare`: the weights that a model built whole has, trained and frozen."""
    from chatgpt.nn import GPTActor

    ends = []
    for options in (GEMINI['gemini cuda cut'][0], {**GEMINI['gemini cuda cut'][0], 'shard_init': True}):
        with ColossalAIStrategy(**options) as strategy:
            with strategy.model_init_context():
                torch.manual_seed(3)
                actor = GPTActor(config=tiny_config('gpt2', vocab_size=64))
                torch.manual_seed(4)
                initial = GPTActor(config=tiny_config('gpt2', vocab_size=64))
            was_meta = all(p.is_meta for p in actor.parameters())
            (actor, optimizer), initial = strategy.prepare((actor, optimizer_of('hybrid', actor)), initial)
            start = weights_of(strategy, actor) | {f'initial.{n}': t for n, t in weights_of(strategy, initial).items()}
            batch, weights = batches_of(strategy, 0)[0]
            strategy.backward(-(actor(batch).logprobs * weights).sum(), actor, optimizer)
            norm = strategy.optimizer_step(optimizer)
            ends.append((was_meta, start, norm, weights_of(strategy, actor)))
    return [e[0] for e in ends], same_bits(ends[0][1], ends[1][1]), ends[0][2] == ends[1][2], same_bits(ends[0][3], ends[1][3])


def check_refusals(folder):
    """What `prepare` and loading refuse, in their words."""
    said = {}

    def attempt(name, fn):
        try:
            fn()
            said[name] = 'nothing was refused'
        except ValueError as error:
            said[name] = str(error)

    with ColossalAIStrategy(**GEMINI['gemini cuda cut'][0]) as strategy:
        attempt('adamw', lambda: pair_of(strategy, 'adamw'))
        made = strategy.make_optimizer(make_actor().parameters(), 1e-3)
        said['made'] = type(made).__name__
        model = make_actor()
        used = optimizer_of('hybrid', model)
        loss_of(model, *batches_of(strategy, 0)[0]).backward()
        used.step()
        attempt('used', lambda: strategy.prepare((model, used)))
        model, optimizer = pair_of(strategy, 'hybrid')
        attempt('second', lambda: strategy.prepare((model, optimizer_of('hybrid', strategy.unwrap(model)))))
        attempt('max_norm', lambda: strategy.optimizer_step(optimizer, -1.0))
    naive = NaiveStrategy(device='cpu')
    model = make_actor()
    model, optimizer = naive.prepare((model, torch.optim.AdamW(model.parameters(), amsgrad=True)))
    train(naive, model, optimizer, steps=1)
    naive.save_optimizer(optimizer, folder / f'amsgrad{torch.distributed.get_rank()}.pt')
    with ColossalAIStrategy(2, 'fp32') as strategy:
        model, optimizer = pair_of(strategy, 'hybrid')
        attempt('amsgrad', lambda: strategy.load_optimizer(optimizer, folder / f'amsgrad{strategy.rank}.pt'))
        said['made 2'] = type(strategy.make_optimizer(make_actor().parameters(), 1e-3)).__name__
    return said


def check_conformance(folder, options, kind):
    """The whole suite."""
    from chatgpt.testing.conformance import BF16, FP32, Bench, all_checks, run_check

    def make_optimizer(parameters):
        holder = torch.nn.ParameterList(parameters)
        optimizer = optimizer_of(kind, holder)
        optimizer.param_groups[0]['lr'] = 1e-2
        return optimizer

    outcomes = {}
    for number, (name, check) in enumerate(all_checks().items()):
        own = folder / str(number)
        own.mkdir(exist_ok=True)
        bench = Bench(
            make_strategy=partial(ColossalAIStrategy, **options),
            folder=own,
            tolerance=FP32 if options['precision'] == 'fp32' else BF16,
            make_optimizer=make_optimizer,
        )
        outcomes[name] = run_check(check, bench)
    return outcomes


TWO = {
    **{f'agreement, {name}': (check_agreement, *config) for name, config in {**ZERO, **GEMINI}.items()},
    'clipped, zero1 cpu hybrid': (check_agreement, *ZERO['zero1 cpu hybrid'], None, 0.3),
    'clipped, gemini cpu cut': (check_agreement, *GEMINI['gemini cpu cut'], None, 0.3),
    **{f'micro-batches, {name}': (check_agreement, *ZERO[name], 12) for name in ('zero1 cuda adamw', 'zero2 cpu cpuadam')},
    'gemini is zero': (check_gemini_is_zero,),
    **{f'accumulation, {name}': (check_accumulation, GEMINI[name][0]) for name in ('gemini cuda whole', 'gemini cpu cut')},
    'accumulation, forgetful': (check_accumulation, GEMINI['gemini cuda cut'][0], True),
    'order of calls': (check_order_of_calls,),
    'outputs': (check_outputs,),
    'unequal rows': (check_unequal_rows,),
    'families': (check_families,),
    'layouts': (check_layouts,),
    'resume, zero2 bf16': (check_bits_of_resume, {'stage': 2, 'precision': 'bf16', 'placement_policy': 'cpu'}, 'cpuadam'),
    'resume, gemini bf16': (check_bits_of_resume, *GEMINI['gemini cuda cut']),
    'resume, gemini fp16': (check_bits_of_resume, {**FP16, 'placement_policy': 'cpu', 'initial_scale': 2.0**10}, 'hybrid'),
    'full model, zero gpt2': (check_full_model, {'stage': 1, 'precision': 'bf16'}, 'adamw', 'gpt2'),
    'full model, zero lora': (partial(check_full_model, lora_rank=2), {'stage': 2, 'precision': 'bf16'}, 'adamw', 'llama'),
    'full model, gemini llama': (check_full_model, *GEMINI['gemini cpu cut'], 'llama'),
    'full model, gemini lora': (partial(check_full_model, lora_rank=2), *GEMINI['gemini cuda cut'], 'gpt2'),
    'files, zero2': (check_whole_files, {'stage': 2, 'precision': 'bf16'}, 'adamw'),
    'files, gemini': (check_whole_files, *GEMINI['gemini cuda cut']),
    'loss scale, zero': (check_loss_scale, {'stage': 2, 'precision': 'fp16'}),
    'loss scale, gemini': (check_loss_scale, FP16),
    'shard_init': (check_shard_init,),
    'refusals': (check_refusals,),
    'conformance, zero2': (check_conformance, *ZERO['zero2 cuda hybrid']),
    'conformance, gemini': (check_conformance, *GEMINI['gemini cuda cut']),
}


def run_all(root, names):
    """{check: its facts, or a traceback} on every rank."""
    warnings.filterwarnings('ignore')
    outcomes = {}
    with ColossalAIStrategy(1, 'fp32', timeout_s=60.0):
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


@pytest.fixture(scope='module')
def folder():
    with tempfile.TemporaryDirectory(prefix='colossalai-') as path:
        yield path


@pytest.fixture(scope='module')
def two(folder):
    return run_distributed(run_all, 2, folder, list(TWO), timeout_s=400)


def outcome(two, name):
    for rank, facts in enumerate(two):
        if isinstance(facts[name], str):
            pytest.fail(f'rank {rank}:\n{facts[name]}')
    return two[0][name]


# --- tests on two processes -----------------------------------------------------------------------------------------

PAIRWISE = ('agreement', 'clipped', 'micro-batches')


@needs_colossalai
@pytest.mark.parametrize('name', [n for n in TWO if n.startswith(PAIRWISE) and 'zero' in n])
def test_zero_agrees_with_naive_in_fp32(two, name):
    facts = outcome(two, name)
    for (loss, norm), (want_loss, want_norm) in zip(facts['results'], facts['want'], strict=True):
        assert loss == pytest.approx(want_loss, rel=1e-5)
        assert norm == pytest.approx(want_norm, rel=1e-4)
    assert facts['distance'][0] <= 0.05


@needs_colossalai
@pytest.mark.parametrize('name', [n for n in TWO if n.startswith(PAIRWISE) and 'gemini' in n])
def test_gemini_agrees_with_naive_in_bf16(two, name):
    """Tolerances. A bf16 number is off by up to u = 2^-9 of itself. Naive keeps residual streams in fp32 (autocast), Gemini not.

    Loss: with two blocks a state is rounded 2 + 2 + 1 times more under Gemini, each time with a random sign, so a logit differs
    by about sqrt(5) u of itself. Logits and the loss are of one size (4), and the mean over some 40 tokens makes it smaller:
    2u = 2^-8 covers it. Norm: a gradient passes the same roundings backwards, once more per matrix: 8u = 2^-6.
    Weights: Adam moves a weight by at most about lr a step whatever the size of its gradient g. Where |g| is below its error
    (8u of the typical gradient) the sign is open, and the two may be 2 lr apart; that is 8u = 1.6 % of the weights if gradients
    were uniform, so the mean is 2 * 1.6 % = 0.032 lr per step.
    """
    facts = outcome(two, name)
    for (loss, norm), (want_loss, want_norm) in zip(facts['results'], facts['want'], strict=True):
        assert loss == pytest.approx(want_loss, rel=2**-8)
        assert norm == pytest.approx(want_norm, rel=2**-6)
    assert facts['distance'][0] <= 2.0 and facts['distance'][1] <= 0.032
    assert facts['chunks'] == 1 if 'whole' in name else facts['chunks'] > 4


@needs_colossalai
def test_tolerance_for_gemini_tells_wrong_from_right(two):
    """The twin: clipped against unclipped, and one step's data against the next one's, lie outside of the tolerances."""
    clipped, free = outcome(two, 'clipped, gemini cpu cut')['results'], outcome(two, 'agreement, gemini cpu cut')['results']
    assert all(abs(a - b) > 2**-8 * b for (a, _), (b, _) in zip(free[1:], free[:-1], strict=True))
    wrong = NaiveStrategy(precision='bf16', device='cpu')
    model, optimizer = pair_of(wrong)
    optimizer.param_groups[0]['lr'] = -LR
    train(wrong, model, optimizer)
    assert distances(model.state_dict(), naive_run('bf16')[1])[1] > 0.032
    assert clipped != free


@needs_colossalai
def test_gemini_is_zero_in_bf16(two):
    """The same module in the same dtype on the same data: what is left is the order of fp32 operations in two Adam kernels."""
    facts = outcome(two, 'gemini is zero')
    for (loss, norm), (want_loss, want_norm) in zip(facts['gemini'], facts['zero'], strict=True):
        assert loss == pytest.approx(want_loss, rel=1e-4)
        assert norm == pytest.approx(want_norm, rel=1e-3)
    assert facts['distance'][0] <= 0.05


@needs_colossalai
@pytest.mark.parametrize('name', ['gemini cuda whole', 'gemini cpu cut'])
def test_gemini_accumulates(two, name):
    facts = outcome(two, f'accumulation, {name}')
    assert facts['num'] > 3
    for (loss, norm), (want_loss, want_norm) in zip(facts['many'], facts['one'], strict=True):
        assert loss == pytest.approx(want_loss, rel=2**-11)
        assert norm == pytest.approx(want_norm, rel=2**-8)


@needs_colossalai
def test_gemini_without_setting_gradients_aside_is_wrong(two):
    facts = outcome(two, 'accumulation, forgetful')
    assert facts['many'][0][1] < 0.5 * facts['one'][0][1]
    assert abs(facts['many'][1][0] - facts['one'][1][0]) > 2**-8 * facts['one'][1][0]


@needs_colossalai
def test_gemini_in_any_order_of_calls(two):
    assert outcome(two, 'order of calls') == (True, True)


@needs_colossalai
def test_outputs_are_plain(two):
    facts = outcome(two, 'outputs')
    assert facts[2] == ('PolicyOutput', {'Tensor'}, True, 'torch.bfloat16', True)
    assert facts[3] == ('PolicyOutput', {'Tensor'}, True, 'torch.float32', True)


@needs_colossalai
def test_ranks_with_unequally_many_rows(two):
    facts = outcome(two, 'unequal rows')
    assert len(set(facts['rows'])) == 2, 'the ranks must differ'
    for (loss, norm), (want_loss, want_norm) in zip(facts['chunks'], facts['whole'], strict=True):
        assert loss == pytest.approx(want_loss, rel=2**-11)
        assert norm == pytest.approx(want_norm, rel=2**-8)


@needs_colossalai
def test_families_and_references(two):
    for what, losses in outcome(two, 'families').items():
        half = len(losses) // 2
        for got, want in zip(losses[half:], losses[:half], strict=True):
            assert got == pytest.approx(want, rel=1e-4), what


@needs_colossalai
def test_pieces_move_between_layouts(two):
    facts = outcome(two, 'layouts')
    assert facts == {'gemini': True, 'whole': True, 'zero1': True, 'naive': True, 'steps': {2.0}, 'lr': 7e-4, 'num': facts['num']}
    model = make_actor()
    assert facts['num'] == 4 * len(list(model.parameters())), 'a weight, two moments and a step for every parameter'


@needs_colossalai
@pytest.mark.parametrize('name', ['zero2 bf16', 'gemini bf16', 'gemini fp16'])
def test_resume_to_the_bit(two, name):
    assert outcome(two, f'resume, {name}') == (True, True, True)


@needs_colossalai
@pytest.mark.parametrize('name', ['zero gpt2', 'zero lora', 'gemini llama', 'gemini lora'])
def test_full_model(two, name):
    facts = outcome(two, f'full model, {name}')
    assert facts['trained'] == facts['frozen'] == ([], True, True)
    assert facts['restored'] and facts['moved']
    if 'lora' not in name:  # there the copy has its adapters folded in
        assert facts['scored']


@needs_colossalai
@pytest.mark.parametrize('name', ['zero2', 'gemini'])
def test_whole_files(two, name):
    same, refusal = outcome(two, f'files, {name}')
    assert same == [True, True]
    assert 'only_rank0=False' in refusal


@needs_colossalai
@pytest.mark.parametrize('name', ['zero', 'gemini'])
def test_loss_scale(two, name):
    norms, scales, unmoved, moved, (loss, norm), scaler = outcome(two, f'loss scale, {name}')
    assert not any(math.isfinite(n) for n in norms) and unmoved
    assert scales == [2.0**40, 2.0**39, 2.0**38]
    assert math.isfinite(norm) and moved
    assert scaler == {'scale': 512.0, 'num_finite': 4, 'num_overflows': 0}


@needs_colossalai
def test_shard_init(two):
    assert outcome(two, 'shard_init') == ([False, True], True, True, True)


@needs_colossalai
def test_refusals(two):
    said = outcome(two, 'refusals')
    assert 'HybridAdam' in said['adamw'] and 'torch.optim.adamw.AdamW' in said['adamw']
    assert (said['made'], said['made 2']) == ('HybridAdam', 'AdamW')
    assert 'already stepped' in said['used']
    assert 'one optimizer' in said['second']
    assert 'max_norm=-1.0' in said['max_norm']
    assert 'max_exp_avg_sq' in said['amsgrad']


@needs_colossalai
@pytest.mark.parametrize('name', ['zero2', 'gemini'])
def test_conformance(two, name):
    outcomes = outcome(two, f'conformance, {name}')
    assert set(outcomes.values()) == {'passed'}, outcomes


@needs_colossalai
def test_one_process_takes_over_from_two(two, folder):
    outcome(two, 'layouts')
    facts = run_distributed(check_one_process, 1, folder, timeout_s=200)[0]
    assert facts['zero2'][0] and facts['gemini'][0]
    results, want, (largest, _) = facts['zero2'][1:]
    # one step was made, and `distances` divides by STEPS
    assert results[0][0] == pytest.approx(want[0][0], rel=1e-5) and largest <= 0.05 / STEPS
    results, want, (_, mean) = facts['gemini'][1:]
    assert results[0][0] == pytest.approx(want[0][0], rel=2**-8) and mean <= 0.032
    assert max(facts['adam'].values()) < 1e-6


# --- tests without ColossalAI ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ('options', 'text'),
    [
        ({'stage': 4}, 'stage=4 is not one of 1, 2, 3'),
        ({'precision': 'fp32'}, "precision='fp32' under stage=3 is not one of 'bf16', 'fp16'"),
        ({'stage': 1, 'precision': 'tf32'}, "precision='tf32' under stage=1"),
        ({'placement_policy': 'const'}, "placement_policy='const' is not one of 'cuda', 'cpu', 'auto'"),
        ({'norm_type': 1.0}, 'norm_type=1.0 is not one of 2'),
        ({'stage': 2, 'shard_init': True}, 'shard_init=True is an option of Gemini'),
        ({'stage': 1, 'hidden_dim': 64}, 'hidden_dim=64 is an option of Gemini'),
        ({'stage': 1, 'search_range_mb': 1}, 'search_range_mb=1 is an option of Gemini'),
        ({'stage': 1, 'min_chunk_size_mb': 1}, 'min_chunk_size_mb=1 is an option of Gemini'),
        ({'reduce_bucket_size': 1024}, 'reduce_bucket_size=1024 is an option of stages 1 and 2'),
        ({'gpu_margin_mem_ratio': 0.5}, "gpu_margin_mem_ratio=0.5 needs placement_policy='auto', not 'cuda'"),
        ({'gpu_margin_mem_ratio': 1.5, 'placement_policy': 'auto'}, 'gpu_margin_mem_ratio=1.5 must lie between 0 and 1'),
        ({'precision': 'bf16', 'initial_scale': 8}, "initial_scale=8 scales the loss under precision='fp16', not 'bf16'"),
        ({'max_norm': -1.0}, 'max_norm=-1.0 must not be negative'),
    ],
)
def test_options_that_cannot_be_honoured(options, text):
    with pytest.raises(ValueError) as caught:
        ColossalAIStrategy(**options)
    assert text in str(caught.value) and '\n' not in str(caught.value)


def test_not_installed(monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, 'find_spec', lambda name, *args: None if name == 'colossalai' else find(name, *args))
    with pytest.raises(ImportError, match='not installed; run: pip install .*--no-deps -r requirements-colossalai.txt'):
        ColossalAIStrategy()


def test_nothing_is_imported_before_a_strategy_is_built():
    code = 'import sys; from chatgpt.trainer.strategies import ColossalAIStrategy; sys.exit("colossalai" in sys.modules)'
    assert subprocess.run([sys.executable, '-c', code], timeout=60).returncode == 0


def test_bridge_refuses_an_unknown_version(monkeypatch):
    from chatgpt.trainer.strategies import colossalai_cpu

    monkeypatch.setattr(torch.cuda, 'is_available', lambda: False)
    monkeypatch.setitem(sys.modules, 'colossalai', types.SimpleNamespace(__version__='0.6.1'))
    monkeypatch.setattr(colossalai_cpu, '_bridged', False)
    with pytest.raises(RuntimeError, match=r'written for colossalai 0\.5\.0 and found 0\.6\.1'):
        colossalai_cpu.bridge()


def test_bridge_leaves_cuda_alone(monkeypatch):
    from chatgpt.trainer.strategies import colossalai_cpu

    monkeypatch.setattr(torch.cuda, 'is_available', lambda: True)
    monkeypatch.setitem(sys.modules, 'colossalai', types.SimpleNamespace(__version__='0.6.1'))
    monkeypatch.setattr(colossalai_cpu, '_bridged', False)
    assert colossalai_cpu.bridge() is False and colossalai_cpu._bridged is False


@pytest.mark.parametrize(('adamw', 'div_scale'), [(True, -1.0), (False, -1.0), (True, 8.0)])
def test_cpu_adam_is_adam(adamw, div_scale):
    """Against the formulas in float64, number by number."""
    lr, beta1, beta2, eps, decay = 1e-2, 0.9, 0.99, 1e-8, 0.1
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(5, generator=generator)
    want = [(float(w), 0.0, 0.0) for w in weights]
    first, second = torch.zeros(5), torch.zeros(5)
    kernel = _TorchCPUAdam(lr, beta1, beta2, eps, decay, adamw)
    for step in range(1, 4):
        gradients = torch.randn(5, generator=generator)
        kernel.step(step, lr, beta1, beta2, eps, decay, True, weights, gradients, first, second, div_scale)
        for i, (w, m, v) in enumerate(want):
            g = float(gradients[i]) / (div_scale if div_scale > 0 else 1.0)
            if adamw:
                w -= lr * decay * w
            else:
                g += decay * w
            m, v = beta1 * m + (1 - beta1) * g, beta2 * v + (1 - beta2) * g * g
            w -= lr * (m / (1 - beta1**step)) / (math.sqrt(v / (1 - beta2**step)) + eps)
            want[i] = (w, m, v)
    assert weights.tolist() == pytest.approx([w for w, _, _ in want], rel=1e-5)
    assert second.tolist() == pytest.approx([v for _, _, v in want], rel=1e-5)


def test_rank_range():
    assert [rank_range(7, r, 2) for r in range(2)] == [(0, 4), (4, 7)]
    assert [rank_range(2, r, 4) for r in range(4)] == [(0, 1), (1, 2), (2, 2), (2, 2)]


def test_loss_scale_moves_between_strategies():
    upstream = types.SimpleNamespace(_scale=torch.tensor([4.0]), _growth_step=5, _hysteresis_step=1)
    upstream.scale = upstream._scale
    scaler = UpstreamScaler(upstream)
    assert scaler.to_json() == {'scale': 4.0, 'num_finite': 5, 'num_overflows': 1}
    scaler.from_json({'scale': 2.0, 'num_finite': 7})  # as Naive writes it
    assert scaler.to_json() == {'scale': 2.0, 'num_finite': 7, 'num_overflows': 0}
