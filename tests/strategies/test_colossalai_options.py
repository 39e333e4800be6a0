"""Parts of `ColossalAIStrategy` that do not need ColossalAI: options, the bridge to the CPU, arithmetic."""

from __future__ import annotations

import importlib.util
import math
import sys
import types

import pytest
import torch

from chatgpt.strategies.colossalai import ColossalAIStrategy
from chatgpt.strategies.colossalai.cpu import _TorchCPUAdam
from chatgpt.strategies.colossalai.engines import UpstreamScaler, rank_range


@pytest.mark.parametrize(
    ('options', 'text'),
    [
        ({'stage': 4}, 'stage=4 is not one of 1, 2, 3'),
        ({'precision': 'fp32'}, "precision='fp32' under stage=3 is not one of 'auto', 'bf16', 'fp16'"),
        ({'placement_policy': 'const'}, "placement_policy='const' is not one of 'cuda', 'cpu', 'auto'"),
        ({'stage': 2, 'shard_init': True}, 'shard_init=True is an option of Gemini'),
        ({'reduce_bucket_size': 1024}, 'reduce_bucket_size=1024 is an option of stages 1 and 2'),
        ({'gpu_margin_mem_ratio': 0.5}, "gpu_margin_mem_ratio=0.5 needs placement_policy='auto', not 'cuda'"),
        ({'gpu_margin_mem_ratio': 1.5, 'placement_policy': 'auto'}, 'ratio=1.5 must lie between 0 and 1'),
        ({'precision': 'bf16', 'initial_scale': 8}, "initial_scale=8 scales the loss under precision='fp16', not"),
        ({'max_norm': -1.0}, 'max_norm=-1.0 must not be negative'),
        ({'stage': 2, 'stream_blocks': True}, 'only stage=3 can stream'),
    ],
)
def test_options_that_cannot_be_honoured(options, text):
    with pytest.raises(ValueError) as caught:
        ColossalAIStrategy(**options)
    assert text in str(caught.value) and '\n' not in str(caught.value)


def test_not_installed(monkeypatch):
    monkeypatch.setattr(importlib.util, 'find_spec', lambda *_: None)
    with pytest.raises(ImportError, match='not installed; run: pip install .*--no-deps -r requirements-colossalai.txt'):
        ColossalAIStrategy()


@pytest.mark.parametrize('home', [None, 'folder'])
def test_a_gpu_without_nvcc_is_named_before_anything_is_joined(home, monkeypatch, tmp_path):
    from torch.utils import cpp_extension

    from chatgpt.strategies.colossalai.options import check_kernels

    home = home and str(tmp_path)
    monkeypatch.setattr(cpp_extension, 'CUDA_HOME', home)
    check_kernels(3)  # on a CPU nothing is compiled
    monkeypatch.setattr(torch.cuda, 'is_available', lambda: True)
    with pytest.raises(ImportError, match=r'compiled by nvcc, and there is none \(CUDA_HOME: .*or use stage=2'):
        ColossalAIStrategy()
    check_kernels(2)
    if home:
        (tmp_path / 'bin').mkdir()
        (tmp_path / 'bin/nvcc').touch(mode=0o755)
        check_kernels(3)


def test_bridge_refuses_an_unknown_version_and_leaves_cuda_alone(monkeypatch):
    from chatgpt.strategies.colossalai import cpu

    monkeypatch.setitem(sys.modules, 'colossalai', types.SimpleNamespace(__version__='0.6.1'))
    monkeypatch.setattr(cpu, '_bridged', False)
    monkeypatch.setattr(torch.cuda, 'is_available', lambda: False)
    with pytest.raises(RuntimeError, match=r'written for colossalai 0\.5\.0 and found 0\.6\.1'):
        cpu.bridge()
    monkeypatch.setattr(torch.cuda, 'is_available', lambda: True)
    assert cpu.bridge() is False and cpu._bridged is False


@pytest.mark.parametrize(('adamw', 'div_scale'), [(True, -1.0), (False, -1.0), (True, 8.0)])
def test_cpu_adam_is_adam(adamw, div_scale):
    """Compares each number with the formulas in float64."""
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
