"""Compares our adapted layers with PEFT's (bits, names, models, seconds, memory) for docs/results/peft_layers.md."""

from __future__ import annotations

import copy
import json
import sys
from statistics import median
from typing import Any

import torch
from harness import alternate, child, cpu_seconds, gpt2, markdown, process_memory, write_page
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from chatgpt.nn.lora import convert_to_lora
from chatgpt.nn.quantized import quantize_blocks
from chatgpt.testing import tiny_causal_lm

WAYS = ('ours', 'PEFT')
SMALL: dict[str, dict[str, int]] = {
    'mamba': {'hidden_size': 32, 'num_hidden_layers': 2},
    'mixtral': {'hidden_size': 32, 'num_hidden_layers': 2, 'num_attention_heads': 8, 'intermediate_size': 16},
}
KINDS = {'meta': 'Llama on the meta device', 'trunk': 'Llama, two trees over one base', 'nf4': 'Llama, our 4 bits'}
KINDS |= {'mamba': 'Mamba, default targets', 'mixtral': 'Mixtral, default targets'}


def adapt(model: Any, way: str, targets: Any = None, rank: int = 2) -> Any:
    if way == 'ours':
        convert_to_lora(model, rank, targets=targets)
        return model
    import peft

    config = peft.LoraConfig(r=rank, lora_alpha=rank, target_modules=targets or 'all-linear', task_type='CAUSAL_LM')
    return peft.get_peft_model(model, config).base_model.model


def factors(model: Any) -> dict[str, list[Tensor]]:
    """Returns A and B by layer name."""
    pairs = {n: (m.lora_A, m.lora_B) for n, m in model.named_modules() if hasattr(m, 'lora_A')}
    return {n: [p if isinstance(p, Tensor) else p['default'].weight for p in both] for n, both in pairs.items()}


def of_a_family(family: str) -> dict[str, list[str]]:
    """Returns rows about a tiny model, adapted both ways with the same weights."""
    base = tiny_causal_lm(family)
    ours, theirs = (adapt(copy.deepcopy(base), way) for way in WAYS)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, (a, b) in factors(ours).items():
            b.copy_(torch.randn(b.shape, generator=generator))
            for mine, other in zip((a, b), factors(theirs)[name], strict=True):
                other.copy_(mine)
    outputs = [model(torch.arange(3, 20)[None]).logits for model in (ours, theirs)]
    for output in outputs:
        output.square().mean().backward()
    pairs = zip(factors(ours).values(), factors(theirs).values(), strict=True)
    equal = torch.equal(*outputs) and all(torch.equal(p[1].grad, q[1].grad) for p, q in pairs)
    changed, renamed = [], []
    for model in (ours, theirs):
        layers = [model.get_submodule(name) for name in factors(model)]
        before = torch.cat([layer.weight.detach().flatten() for layer in layers])
        for layer in layers:
            layer.merge()
            layer.unmerge()
        after = torch.cat([layer.weight.detach().flatten() for layer in layers])
        changed.append(f'{(before != after).float().mean():.0%}')
        renamed.append(f'{len(base.state_dict().keys() - model.state_dict().keys())} of {len(base.state_dict())}')
    return {
        f'{family}: logits and gradients': ['equal to the bit' if equal else 'differ'] * 2,
        f'{family}: weights with other bits after folding and unfolding': changed,
        f'{family}: tensors of the base under another name': renamed,
    }


def adapted(kind: str, way: str) -> str:
    """Returns the adapted layers, or the refusal."""
    targets = ['q_proj'] if kind == 'nf4' else None  # PEFT says why it adapts none of these
    with torch.device('meta' if kind == 'meta' else 'cpu'):
        config = AutoConfig.for_model(kind, vocab_size=64, **SMALL[kind]) if kind in SMALL else None
        model = AutoModelForCausalLM.from_config(config) if config else tiny_causal_lm('llama', hidden=64)
        if kind == 'nf4':
            quantize_blocks(model)
        if kind == 'trunk':  # like the roles of a `SharedTrunk`: a second module tree over the same tensors
            adapt(copy.deepcopy(model, {id(p): p for p in model.parameters()}), way, targets)
        try:
            return f'{len(factors(adapt(model, way, targets)))} layers'
        except ValueError as error:
            return f'refused: {str(error).partition(". ")[0]}'


def steps(way: str) -> dict[str, float]:
    """Returns the median CPU seconds of a step, and peak resident memory."""
    model = adapt(AutoModelForCausalLM.from_config(gpt2()), way, rank=8).train()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    ids = torch.randint(0, 512, (8, 64))

    def step() -> None:
        optimizer.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()

    return {'s': median([cpu_seconds(step) for _ in range(12)][2:]), 'MiB': process_memory()['VmHWM'] / 2**20}


def main() -> None:
    if sys.argv[1:]:
        return print(json.dumps(steps(sys.argv[1])))
    rows = of_a_family('gpt2') | of_a_family('llama')
    rows |= {title: [adapted(kind, way) for way in WAYS] for kind, title in KINDS.items()}
    found = alternate({way: lambda _, way=way: child(__file__, way) for way in WAYS}, rounds=5)
    for key, what in (('s', 'CPU seconds of a step'), ('MiB', 'peak of resident memory, MiB')):
        rows[f'GPT-2 of 3.3 million, rank 8: {what}'] = [f'{median(m[key] for m in found[way]):.3g}' for way in WAYS]
    table = markdown(['', *WAYS], [[name, *cells] for name, cells in rows.items()])
    write_page('peft_layers.md', PEFT_LAYERS=table)


if __name__ == '__main__':
    main()
