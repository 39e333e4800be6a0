"""Log-probs by every kernel against the plain path, and compiled blocks against plain ones, on a CUDA device. Run by
`make gpu-check`."""

from __future__ import annotations

import copy
from importlib.util import find_spec

import pytest
import torch
from torch import nn

from chatgpt.batching import collate
from chatgpt.functional.logprobs import chunked_logprobs
from chatgpt.nn import Actor
from chatgpt.nn.compiled import compile_blocks
from chatgpt.nn.head_kernels import head_logprobs
from chatgpt.testing import tiny_causal_lm
from chatgpt.types import Sequence

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason='needs a CUDA device')]
N, WIDTH, VOCAB = 3000, 128, 32_003
LIGER = pytest.param('liger', marks=pytest.mark.skipif(find_spec('liger_kernel') is None, reason='needs liger-kernel'))


@pytest.mark.parametrize('kernel', ['auto', 'fused', LIGER])
@pytest.mark.parametrize('trained', [True, False])
@pytest.mark.parametrize('precision', ['fp32', 'bf16'])
def test_kernels_give_the_plain_numbers(kernel, trained, precision):
    torch.manual_seed(0)
    head = nn.Linear(WIDTH, VOCAB, bias=False, device='cuda').requires_grad_(trained)
    hidden = torch.randn(N, WIDTH, device='cuda', requires_grad=True)
    ids, weights = torch.randint(VOCAB, (N,), device='cuda'), torch.linspace(-1, 1, N, device='cuda')

    def run(compute):
        hidden.grad = head.weight.grad = None
        with torch.autocast('cuda', dtype=torch.bfloat16, enabled=precision == 'bf16'):
            logprobs, entropy = compute(hidden, head, ids, temperature=0.5, with_entropy='detached')
        (logprobs * weights).sum().backward()
        return logprobs, entropy, hidden.grad, head.weight.grad if trained else torch.zeros(1, device='cuda')

    def by_kernel(states, layer, *args, **options):
        return head_logprobs(states, layer, layer, *args, kernel=kernel, vocab_size=VOCAB, **options)

    plain = run(lambda *args, **options: chunked_logprobs(*args, chunk_size=500, **options))
    for ours, theirs in zip(run(by_kernel), plain, strict=True):
        tolerance = 2e-2 if precision == 'bf16' else 1e-4
        assert (ours - theirs).abs().max() <= tolerance * theirs.abs().max().clamp_min(1e-6)


def test_compiled_blocks_give_the_plain_numbers():
    generator = torch.Generator().manual_seed(0)
    records = [
        Sequence(
            prompt_ids=torch.randint(3, 60, (4,), generator=generator),
            response_ids=torch.randint(3, 60, (n,), generator=generator),
            response_mask=torch.ones(n, dtype=torch.bool),
        )
        for n in (3, 9, 6)
    ]
    plain = Actor(tiny_causal_lm('llama')).cuda()
    compiled = copy.deepcopy(plain)
    compile_blocks(compiled)
    batch = collate(records).to(torch.device('cuda'))
    found = []
    for model in (plain, compiled):
        out = model(batch).logprobs
        out.sum().backward()
        found.append([out.detach(), *(p.grad for p in model.parameters())])
    for ours, theirs in zip(found[1], found[0], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)
