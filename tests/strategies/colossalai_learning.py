"""Checks of learning under `ColossalAIStrategy`. All ranks run them; each gets a folder and returns what it found."""

from __future__ import annotations

import warnings
from functools import partial

import torch
from colossalai_runs import (
    GEMINI,
    SMALL,
    batches_of,
    distances,
    loss_of,
    make_actor,
    naive_run,
    optimizer_of,
    pair_of,
    same_bits,
    train,
    weights_of,
)

from chatgpt.nn import Actor
from chatgpt.strategies import NaiveStrategy
from chatgpt.strategies.colossalai import ColossalAIStrategy
from chatgpt.testing import tiny_causal_lm


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
    """Gemini against ZeRO-2 in bf16: the same module in the same dtype, so no tolerance for bf16 arithmetic is
    needed."""
    out = []
    for options in ({'stage': 2, 'precision': 'bf16'}, GEMINI['gemini cuda cut'][0]):
        with ColossalAIStrategy(**options) as strategy:
            model, optimizer = pair_of(strategy, 'hybrid')
            out.append((train(strategy, model, optimizer), weights_of(strategy, model)))
    return {'zero': out[0][0], 'gemini': out[1][0], 'distance': distances(out[1][1], out[0][1])}


def check_accumulation(folder, options, forgetful=False):
    """Micro-batches and one batch; `forgetful`: without setting gradients aside, a negative control that must
    disagree."""
    out = []
    for max_tokens in (None, 12):
        with ColossalAIStrategy(**options) as strategy:
            model, optimizer = pair_of(strategy, 'hybrid')
            if forgetful:
                strategy._engine(optimizer)._set_aside = lambda: None
            out.append(train(strategy, model, optimizer, max_tokens=max_tokens))
    return {'one': out[0], 'many': out[1], 'num': len(batches_of(NaiveStrategy(device='cpu'), 0, 12))}


def check_order_of_calls(folder):
    """Gemini: forwards without gradients anywhere, two forwards before two backwards, a forward whose backward never
    comes."""
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
    """Outputs are plain tensors in the module's own kind of tuple; in-place operations on them work; fp32 on
    request."""
    facts = {}
    for stage in (2, 3):
        with ColossalAIStrategy(
            stage, 'bf16', force_outputs_fp32=stage == 3, **(SMALL if stage == 3 else {})
        ) as strategy:
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
    """Log-probs in chunks of rows, recomputed in the backward: ranks run unequally many operations, and nobody waits
    for ever."""
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
    """First losses of LoRA, hydra and the other families under Gemini against ZeRO-2 in bf16; references stay where
    they are."""
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


def check_layer_drop(folder):
    """{stage: (the model's layerdrop after `prepare`, what was warned of it and in which files)}."""
    facts = {}
    for stage in (1, 2, 3):
        with ColossalAIStrategy(stage, 'bf16', **(SMALL if stage == 3 else {})) as strategy:
            actor = Actor(tiny_causal_lm('opt', layerdrop=0.5))
            optimizer = optimizer_of('hybrid', actor)
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter('always')
                strategy.prepare((actor, optimizer))
            said = [(str(w.message), w.filename) for w in caught if 'layerdrop' in str(w.message)]
            facts[stage] = (actor.model.model.decoder.layerdrop, said)
    return facts


def check_loss_scale(folder, options):
    """fp16: an overflow moves nothing and halves the scale, once the hysteresis is used up."""
    with ColossalAIStrategy(**options, initial_scale=2.0**40, max_scale=2.0**40, hysteresis=2) as strategy:
        model, optimizer = pair_of(strategy, 'hybrid')
        before = weights_of(strategy, model)
        norms, scales = [], []
        for step in range(3):
            norms.append(train(strategy, model, optimizer, steps=1, first=step)[0][1])
            scales.append(strategy.optimizer_state(optimizer)[0]['scaler']['scale'])
        unmoved = same_bits(weights_of(strategy, model), before)
        strategy._pair(optimizer).scaler.from_json({'scale': 512.0, 'num_finite': 3})
        after = train(strategy, model, optimizer, steps=1)[0]
        moved = not same_bits(weights_of(strategy, model), before)
        return norms, scales, unmoved, moved, after, strategy.optimizer_state(optimizer)[0]['scaler']


def check_growth(folder, options, max_norm):
    """fp16: weights after a step of SGD in which the loss scale grows, and after one in which it does not."""
    after = []
    for interval in (1000, 1):
        with ColossalAIStrategy(**options, initial_scale=64.0, growth_interval=interval) as strategy:
            model = make_actor()
            model, optimizer = strategy.prepare((model, torch.optim.SGD(model.parameters(), lr=1.0)))
            assert not isinstance(strategy.model_pieces(model), (list, tuple)), 'all pieces would be in memory at once'
            norm = train(strategy, model, optimizer, steps=1, max_norm=max_norm)[0][1]
            after.append((norm, strategy.optimizer_state(optimizer)[0]['scaler']['scale'], weights_of(strategy, model)))
    return after


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
