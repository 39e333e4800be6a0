"""Small runs under ColossalAI and Naive, and what they leave, for `test_colossalai`."""

from __future__ import annotations

import math

import torch

from chatgpt.nn import Actor
from chatgpt.strategies import NaiveStrategy
from chatgpt.strategies.checkpoint import CheckpointReader, write_checkpoint
from chatgpt.testing.fakes import tiny_causal_lm
from chatgpt.testing.tiny import tiny_micro_batches, tiny_sequences

LR, STEPS = 1e-3, 4
SMALL = {'min_chunk_size_mb': 0.001, 'search_range_mb': 0.001, 'hidden_dim': 32}
"""chunks of about a thousand elements, so that a tiny model has many"""
ZERO = {
    f'zero{stage} {placement} {kind}': ({'stage': stage, 'precision': 'fp32', 'placement_policy': placement}, kind)
    for stage, placement, kind in (
        (1, 'cpu', 'hybrid'),
        (2, 'cuda', 'hybrid'),
        (2, 'cpu', 'cpuadam'),
        (2, 'auto', 'adamw'),
    )
}
GEMINI = {
    f'gemini {placement} {size}': ({'stage': 3, 'precision': 'bf16', 'placement_policy': placement, **chunks}, 'hybrid')
    for placement in ('cuda', 'cpu', 'auto')
    for size, chunks in (('whole', {}), ('cut', SMALL))
}
FP16 = {'stage': 3, 'precision': 'fp16', **SMALL}


def make_actor(family='gpt2', **kw):
    """Returns an actor with a value head; its output is a named tuple with several tensors."""
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
    """Trains; returns (loss, gradient norm) of every step."""
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


def close(results, wanted, *, loss, norm):
    """Checks the loss and gradient norm of every step, within relative tolerances."""
    assert len(results) == len(wanted) > 0
    for found, want in zip(results, wanted, strict=True):
        assert abs(found[0] - want[0]) <= loss * abs(want[0]) and abs(found[1] - want[1]) <= norm * want[1], (
            results,
            wanted,
        )


def distances(got, want):
    """Returns the largest and the mean distance of two state dicts, in learning rates per step."""
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
    meta, pieces = strategy.optimizer_state(optimizer)
    groups = {'model/': strategy.model_pieces(model), 'optim/': pieces}
    meta = {'optimizer': meta}
    write_checkpoint(folder, groups, meta=meta, rank=strategy.rank, all_gather_object=strategy.all_gather_object)


def load(strategy, folder, model, optimizer):
    reader = CheckpointReader(folder)
    strategy.load_model_pieces(model, reader.sub('model/'))
    strategy.load_optimizer_state(optimizer, reader.meta['optimizer'], reader.sub('optim/'))


def contents(folder):
    """Returns all tensors of a checkpoint."""
    reader = CheckpointReader(folder)
    return {name: reader.read(name, 0, math.prod(reader.shape(name))) for name in sorted(reader.names())}


def same_bits(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a)


def greedy(model):
    """Returns token ids by argmax, from the language model alone."""
    ids = torch.tensor([[5, 9, 11]])
    with torch.no_grad():
        for _ in range(8):
            ids = torch.cat([ids, model.model(input_ids=ids, use_cache=False).logits[:, -1:].argmax(-1)], 1)
    return ids[0].tolist()
