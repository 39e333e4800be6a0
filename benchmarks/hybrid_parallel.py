"""What of ColossalAI's HybridParallelPlugin runs with the packages installed here: each family tiny, on two gloo
processes, split by tensor, by pipeline and by sequence, against the same model on one process.

    python benchmarks/hybrid_parallel.py --page docs/results/hybrid_parallel.md

A cell trains one AdamW step in fp32 and compares logits before and after. On a CPU the plugin needs the strategy's
bridge (`chatgpt.trainer.strategies.colossalai.cpu`), an accelerator whose `get_rng_state` takes a device, as a GPU's
does, and a `Tensor.cuda` that moves nothing; nothing else is put right. Left out: several ways at once, fp16 and bf16, a GPU.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import re
import tempfile
import traceback
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from chatgpt.testing.processes import free_port, torchrun_environment
from chatgpt.trainer.strategies.colossalai.cpu import bridge

VOCAB, TOKENS = 64, 12
_NAMED = {'hidden_size': 32, 'num_hidden_layers': 2, 'num_attention_heads': 4, 'max_position_embeddings': 64}
_ROTARY = _NAMED | {'num_key_value_heads': 2, 'intermediate_size': 48}
_GPT = {'n_embd': 32, 'n_layer': 2, 'n_head': 4}
FAMILIES: dict[str, dict[str, Any]] = {
    'gpt2': _GPT | {'n_positions': 64, 'attn_pdrop': 0.0, 'embd_pdrop': 0.0, 'resid_pdrop': 0.0},
    'gptj': _GPT | {'n_positions': 64, 'rotary_dim': 4},
    'opt': _NAMED | {'ffn_dim': 48, 'word_embed_proj_dim': 32, 'dropout': 0.0},
    'bloom': {'hidden_size': 32, 'n_layer': 2, 'n_head': 4},
    'falcon': {'hidden_size': 32, 'num_hidden_layers': 2, 'num_attention_heads': 4},
    'llama': _ROTARY,
    'mistral': _ROTARY,
    'qwen2': _ROTARY,
    'qwen3': _ROTARY | {'head_dim': 8},
    'mixtral': _ROTARY | {'num_local_experts': 2},
    'cohere': _ROTARY,
}
WAYS: dict[str, dict[str, Any]] = {
    'tensor': {'tp_size': 2, 'pp_size': 1},
    'pipeline': {'tp_size': 1, 'pp_size': 2, 'num_microbatches': 2},
    'sequence': {
        'tp_size': 2,
        'pp_size': 1,
        'enable_sequence_parallelism': True,
        'sequence_parallelism_mode': 'split_gather',
    },
}
AGREES = 1e-5
TIMEOUT_S = 60.0


def model_of(family: str) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(family, vocab_size=VOCAB, **FAMILIES[family])
    config._attn_implementation, config.pad_token_id, config.use_cache = 'eager', None, False
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config)


def of_a_rank(rank: int, family: str, way: str, port: int, out: str) -> None:
    """Try one cell and write what was found; the process ends here."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    os.dup2(2, 1)
    os.environ.update(torchrun_environment(rank, 2, port))
    dist.init_process_group('gloo', rank=rank, world_size=2, timeout=timedelta(seconds=TIMEOUT_S / 2))
    found: dict[str, Any] = {}
    try:
        tried(family, way, rank, found)
    except BaseException as error:
        text = re.sub(r' \(/.*', '', next(iter(str(error).splitlines()), ''))
        found |= {'error': f'{type(error).__name__}: {text}', 'at': place(error)}
    Path(f'{out}.{rank}').write_text(json.dumps(found))
    os._exit(0)


def place(error: BaseException) -> str:
    """The last line of ColossalAI's that the error came through."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if 'site-packages/colossalai' in f.filename]
    if not frames:
        return 'chatgpt or transformers'
    return f'{frames[-1].filename.split("site-packages/")[-1]}:{frames[-1].lineno}'


def tried(family: str, way: str, rank: int, found: dict[str, Any]) -> None:
    from colossalai.booster import Booster
    from colossalai.booster.plugin import HybridParallelPlugin

    alone, model = model_of(family), model_of(family)
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, VOCAB, (2, TOKENS), generator=generator)
    weights = torch.randn(2, TOKENS, VOCAB, generator=generator)
    inputs = {'input_ids': ids, 'attention_mask': torch.ones_like(ids)}
    plugin = HybridParallelPlugin(
        precision='fp32', zero_stage=0, parallel_output=False, make_vocab_size_divisible_by=1, **WAYS[way]
    )
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (alone, model)]
    total = sum(p.numel() for p in alone.parameters())
    booster = Booster(plugin=plugin)
    wrapped, boosted, criterion, *_ = booster.boost(model, optimizers[1], lambda out, _: (out.logits * weights).sum())
    found['share'] = sum(p.numel() for p in wrapped.parameters()) / total
    lengths: list[int] = []
    for module in wrapped.modules():
        if 'norm' in type(module).__name__.lower() and not list(module.children()):
            module.register_forward_pre_hook(lambda _, args: lengths.append(args[0].shape[1]))
    if way == 'pipeline':
        booster.execute_pipeline(iter([inputs]), wrapped, criterion, boosted, return_loss=True)
        boosted.step()
        found['runs'] = True
        return

    def part(logits: Tensor, of: Tensor) -> Tensor:
        """Of a whole tensor what this process's logits are: all of it, or its part of the vocabulary."""
        return of if logits.shape[-1] == VOCAB else of[..., rank * VOCAB // 2 : (rank + 1) * VOCAB // 2]

    for step in ('before', 'after'):
        ours, theirs = wrapped(**inputs).logits, alone(**inputs).logits
        found['gathers'] = ours.shape[-1] == VOCAB
        found[step] = float((ours - part(ours, theirs)).abs().max())
        booster.backward((ours * part(ours, weights)).sum(), boosted)
        (theirs * weights).sum().backward()
        boosted.step()
        optimizers[0].step()
    found['splits'] = min(lengths, default=TOKENS) < TOKENS
    with tempfile.TemporaryDirectory() as folder:
        booster.save_model(wrapped, folder, shard=True)
        dist.barrier()
    found['runs'] = True


def cell(family: str, way: str, folder: str) -> list[dict[str, Any]]:
    """What each of the two processes found; empty where one did not end."""
    out, port = f'{folder}/{family}-{way}', free_port()
    context = multiprocessing.get_context('fork')  # ColossalAI's import takes longer than a cell
    ranks = [context.Process(target=of_a_rank, args=(rank, family, way, port, out)) for rank in range(2)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(TIMEOUT_S)
        if process.is_alive():
            process.kill()
            process.join()
    return [json.loads(f.read_text()) if (f := Path(f'{out}.{rank}')).is_file() else {} for rank in range(2)]


def verdict(way: str, ranks: list[dict[str, Any]]) -> str:
    """One cell in words."""
    failed = [r for r in ranks if 'error' in r]
    if failed:
        return '; '.join(dict.fromkeys(f'`{r["error"][:150]}` at {r["at"]}' for r in failed))
    if not all(ranks):
        return f'a process did not end within {TIMEOUT_S:.0f} s'
    if way == 'pipeline':
        return 'runs'
    first = ranks[0]
    if way == 'tensor' and first['share'] > 0.9:
        return f'cuts nothing, and does not say so: each process holds {first["share"]:.0%} of the weights'
    if way == 'sequence' and not first['splits']:
        return 'splits nothing, and does not say so: norms see whole sequences'
    off = max(r[step] for r in ranks for step in ('before', 'after'))
    if off > AGREES:
        return f'**wrong: logits off by {off:.2g}**'
    more = '' if first['gathers'] else ', logits stay in parts (its own loss then fails)'
    return f'agrees to {off:.0e}, each process holds {first["share"]:.0%}{more}'


def page(found: dict[str, dict[str, list[dict[str, Any]]]]) -> str:
    import colossalai
    import transformers

    lines = [
        "# ColossalAI's tensor, pipeline and sequence parallelism",
        '',
        '`python benchmarks/hybrid_parallel.py --page docs/results/hybrid_parallel.md`',
        '',
        f'HybridParallelPlugin of ColossalAI {colossalai.__version__} with torch {torch.__version__.split("+")[0]} and '
        f'transformers {transformers.__version__}, which are newer than those it was written for, on two gloo processes '
        'of a CPU: models of two layers, one AdamW step in fp32, logits before and after against one process. The '
        'plugin stands as it is installed, but for what the bridge puts right for a CPU, `get_rng_state` and `Tensor.cuda`. '
        'Errors of both processes where they differ. **Nothing of it ran on a GPU.**',
        '',
        '| family | tensor | sequence (`split_gather`) | pipeline |',
        '|---|---|---|---|',
    ]
    for family, cells in found.items():
        row = [verdict(way, cells[way]) for way in ('tensor', 'sequence', 'pipeline')]
        lines.append(f'| {family} | ' + ' | '.join(text.replace('|', '\\|') for text in row) + ' |')
    lines += [
        '',
        '`is_hccl_available` is no name of torch itself, whatever the device, so no later stage of a pipeline '
        'receives anything with these versions.',
    ]
    return '\n'.join(lines) + '\n'


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--families', nargs='*', default=list(FAMILIES), choices=FAMILIES)
    parser.add_argument('--page', type=Path, help='write the page here')
    args = parser.parse_args()
    warnings.simplefilter('ignore')
    torch.set_num_threads(1)
    bridge()
    from colossalai.accelerator import get_accelerator

    accelerator: Any = type(get_accelerator())
    accelerator.get_rng_state = lambda self, device=None: torch.get_rng_state()
    accelerator.set_rng_state = lambda self, state, device=None: torch.set_rng_state(state)
    if not torch.cuda.is_available():
        torch.Tensor.cuda = lambda self, *_, **__: self  # type: ignore[method-assign]
    import colossalai.booster.plugin  # noqa: F401

    found: dict[str, dict[str, list[dict[str, Any]]]] = {}
    with tempfile.TemporaryDirectory(prefix='hybrid-') as folder:
        for family in args.families:
            found[family] = {}
            for way in WAYS:
                found[family][way] = cell(family, way, folder)
                print(f'{family:8} {way:9} {verdict(way, found[family][way])}', flush=True)
    if args.page:
        args.page.write_text(page(found))


if __name__ == '__main__':
    main()
