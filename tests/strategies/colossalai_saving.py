"""Checks of weights and states that leave `ColossalAIStrategy`. All ranks run them; each gets a folder and returns what
it found."""

from __future__ import annotations

import torch
from colossalai_runs import (
    GEMINI,
    ZERO,
    batches_of,
    contents,
    greedy,
    load,
    make_actor,
    optimizer_of,
    pair_of,
    same_bits,
    train,
    weights_of,
    write,
)
from transformers import NemotronConfig

from chatgpt.strategies import NaiveStrategy
from chatgpt.strategies.checkpoint import CheckpointReader
from chatgpt.strategies.colossalai import ColossalAIStrategy
from chatgpt.strategies.copies import cast_copy
from chatgpt.testing.fakes import tiny_config
from chatgpt.testing.tiny import tiny_micro_batches, tiny_sequences


def check_layouts(folder):
    """zero2 (2 ranks, fp32) → gemini (2 ranks, bf16, cut) → zero1 → naive: every tensor keeps its bits."""
    with ColossalAIStrategy(2, 'fp32') as strategy:
        model, optimizer = pair_of(strategy)
        train(strategy, model, optimizer, steps=2)
        optimizer.param_groups[0]['lr'] = 7e-4
        write(strategy, folder / 'zero2', model, optimizer)
    for name, (options, kind) in {
        'gemini': GEMINI['gemini cpu cut'],
        'whole': GEMINI['gemini cuda whole'],
        'zero1': ZERO['zero1 cpu hybrid'],
    }.items():
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
        'naive': in_naive,
        'steps': steps,
        'lr': lr,
        'num': len(stored),
    }


def check_bits_of_resume(folder, options, kind):
    """Saved after two steps and loaded into a new strategy: the next steps give the same bits, states and loss scale
    included."""
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
    return (
        straight == resumed,
        same_bits(contents(folder / 'straight'), contents(folder / 'resumed')),
        meta[0] == meta[1],
    )


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


def check_packing_is_settled(folder):
    """Nemotron does not hand on the packing, which shows only with weights: it runs padded then, trained and frozen,
    with the numbers of one that was built whole. GPT-2 goes on packing."""
    from chatgpt.nn import AutoActor
    from chatgpt.nn.packing import packs
    from chatgpt.nn.trunk import base_model

    sizes = {'vocab_size': 64, 'hidden_size': 32, 'intermediate_size': 64, 'num_hidden_layers': 2}
    heads = {'num_attention_heads': 4, 'num_key_value_heads': 2, 'max_position_embeddings': 64}
    found = []
    for config in (NemotronConfig(**sizes, **heads), tiny_config('gpt2', vocab_size=64)):
        numbers, packed = [], []
        for shard_init in (False, True):
            with ColossalAIStrategy(**{**GEMINI['gemini cuda cut'][0], 'shard_init': shard_init}) as strategy:
                with strategy.model_init_context():
                    torch.manual_seed(3)
                    models = [AutoActor(config=config), AutoActor(config=config)]
                (actor, _), frozen = strategy.prepare((models[0], optimizer_of('hybrid', models[0])), models[1])
                batch, weights = batches_of(strategy, 0)[0]
                with torch.no_grad():
                    numbers.append([actor(batch).logprobs, frozen(batch).logprobs])
                packed.append([packs(base_model(m.model)) for m in models])
        close = all(torch.allclose(a, b, atol=2e-2) for a, b in zip(*numbers, strict=True))
        found.append((packed, close))
    return found


def check_shard_init(folder):
    """Built on the meta device and filled in `prepare`: the weights that a model built whole has, trained and
    frozen."""
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
    return (
        [e[0] for e in ends],
        same_bits(ends[0][1], ends[1][1]),
        ends[0][2] == ends[1][2],
        same_bits(ends[0][3], ends[1][3]),
    )
