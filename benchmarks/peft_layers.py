"""Our adapted layers and PEFT's: bits, names, models, seconds and memory, as a table of docs/algorithms/ppo.md.

python benchmarks/peft_layers.py
"""

from __future__ import annotations

import copy
import json
import sys
from statistics import median
from typing import Any

import torch
from harness import ROOT, alternate, child, cpu_seconds, gpt2, markdown, process_memory, write_page
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from chatgpt.nn.lora import convert_to_lora, merge_lora, unmerge_lora
from chatgpt.nn.quantized import quantize_blocks
from chatgpt.testing import tiny_causal_lm

WAYS = ('ours', 'PEFT')
TARGETS = {
    'gpt2': ['c_attn', 'c_proj', 'c_fc'],
    'llama': ['q_proj', 'k_proj', 'v_proj', 'o_proj', 'gate_proj', 'up_proj', 'down_proj'],
}
MAMBA = {'vocab_size': 64, 'hidden_size': 32, 'state_size': 4, 'num_hidden_layers': 2}


def adapt(model: Any, way: str, targets: Any = None, rank: int = 2) -> Any:
    if way == 'ours':
        convert_to_lora(model, rank, targets=targets)
        return model
    import peft

    config = peft.LoraConfig(r=rank, lora_alpha=rank, target_modules=targets or 'all-linear', task_type='CAUSAL_LM')
    return peft.get_peft_model(model, config).base_model.model


def factors(model: Any) -> dict[str, list[Tensor]]:
    """A and B by the name of their layer."""
    pairs = {n: (m.lora_A, m.lora_B) for n, m in model.named_modules() if hasattr(m, 'lora_A')}
    return {n: [p if isinstance(p, Tensor) else p['default'].weight for p in both] for n, both in pairs.items()}


def of_a_family(family: str, dtype: torch.dtype) -> dict[str, list[str]]:
    """Of a tiny model adapted in both ways with the same numbers: are logits and gradients equal to the bit, how many
    weights have other bits after folding and unfolding, how many tensors of the base have another name."""
    base = tiny_causal_lm(family).to(dtype)
    ours, theirs = (adapt(copy.deepcopy(base), way, TARGETS[family]) for way in WAYS)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, (a, b) in factors(ours).items():
            b.copy_(torch.randn(b.shape, generator=generator))
            for mine, other in zip((a, b), factors(theirs)[name], strict=True):
                other.copy_(mine)
    outputs = [model(torch.arange(3, 20)[None]).logits for model in (ours, theirs)]
    for output in outputs:
        output.float().square().mean().backward()
    pairs = zip(factors(ours).values(), factors(theirs).values(), strict=True)
    equal = torch.equal(*outputs) and all(torch.equal(p[1].grad.to(dtype), q[1].grad) for p, q in pairs)
    changed, renamed = [], []
    for model in (ours, theirs):
        layers = [model.get_submodule(name) for name in factors(model)]
        before = [layer.weight.detach().clone() for layer in layers]
        for fold in ('merge', 'unmerge'):
            for layer in layers:
                getattr(layer, fold)()
        others = sum(int((layer.weight != old).sum()) for layer, old in zip(layers, before, strict=True))
        changed.append(f'{others / sum(old.numel() for old in before):.0%}')
        renamed.append(f'{len(base.state_dict().keys() - model.state_dict().keys())} of {len(base.state_dict())}')
    name = f'{family}, {str(dtype).removeprefix("torch.")}'
    return {
        f'{name}: logits and gradients': ['equal to the bit' if equal else 'differ'] * 2,
        f'{name}: weights with other bits after folding and unfolding': changed,
        f'{name}: tensors of the base under another name': renamed,
    }


def adapted(kind: str, way: str) -> str:
    """Layers that are adapted, or the refusal."""
    with torch.device('meta' if kind == 'meta' else 'cpu'):
        if kind == 'mamba':
            model, targets = AutoModelForCausalLM.from_config(AutoConfig.for_model('mamba', **MAMBA)), None
        else:
            model, targets = tiny_causal_lm('llama', hidden=64), TARGETS['llama']
            if kind == 'nf4':
                quantize_blocks(model)
        try:
            return f'{len(factors(adapt(model, way, targets)))} layers'
        except ValueError as error:
            return f'refused: {str(error).partition(". ")[0]}'


def steps(way: str) -> dict[str, float]:
    """Median CPU seconds of a step, and the most that was resident."""
    model = adapt(AutoModelForCausalLM.from_config(gpt2()), way, rank=8).train()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    ids = torch.randint(0, 512, (8, 64))

    def step() -> None:
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return {'s': median([cpu_seconds(step) for _ in range(12)][2:]), 'MiB': process_memory()['VmHWM'] / 2**20}


def main() -> None:
    if sys.argv[1:]:
        return print(json.dumps(steps(sys.argv[1])))
    rows: dict[str, list[str]] = {}
    for family in TARGETS:
        for dtype in (torch.float32, torch.bfloat16):
            rows |= of_a_family(family, dtype)
    kinds = {
        'meta': 'Llama on the meta device',
        'nf4': 'Llama, blocks in our 4 bits',
        'mamba': 'Mamba, default targets',
    }
    rows |= {title: [adapted(kind, way) for way in WAYS] for kind, title in kinds.items()}
    found = alternate({way: lambda _, way=way: child(__file__, way) for way in WAYS}, rounds=5)
    for key, what in (('s', 'CPU seconds of a step'), ('MiB', 'peak of resident memory, MiB')):
        rows[f'GPT-2 of 3.3 million, rank 8: {what}'] = [f'{median(m[key] for m in found[way]):.3g}' for way in WAYS]
    table = markdown(['', *WAYS], [[name, *cells] for name, cells in rows.items()])
    write_page(ROOT / 'docs' / 'algorithms' / 'ppo.md', PEFT_LAYERS=table)


if __name__ == '__main__':
    main()
