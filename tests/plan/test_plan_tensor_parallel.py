"""Plans of FSDP2 with tensor parallelism compared with measured memory, and errors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import OPTConfig

from chatgpt.nn import Actor
from chatgpt.plan import Setup, make_plan, models
from chatgpt.plan.advice import changes
from chatgpt.strategies import FSDPStrategy
from chatgpt.strategies.tensor_parallel import check_model, parallelize
from chatgpt.strategies.tensor_ranks import TensorGroup
from chatgpt.testing.fakes import tiny_config
from chatgpt.testing.processes import run_distributed

CONFIG = tiny_config('llama', positions=64, layers=3, heads=4)
NO_PLAN = OPTConfig(
    vocab_size=32,
    hidden_size=32,
    word_embed_proj_dim=32,
    ffn_dim=64,
    num_hidden_layers=1,
    num_attention_heads=4,
    max_position_embeddings=64,
)
PARTS = {'strategy': 'fsdp', 'num_processes': 2, 'strategy_options': {'tensor_parallel': 2}, 'on_cuda': False}


def setup_of(**options: Any) -> Setup:
    return Setup(**({'config': CONFIG, 'max_prompt_tokens': 9, 'max_new_tokens': 15} | PARTS | options))


def new_actor(lora_rank: int) -> Any:
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    return Actor(AutoModelForCausalLM.from_config(CONFIG), lora_rank)


def loss_of(model: Any) -> torch.Tensor:
    out = model(models.batch_of(4, setup_of()), with_entropy=True)
    return out.logprobs.sum() + out.entropy.sum()


def nbytes(tensors: Any) -> int:
    return sum(t.to_local().nbytes if hasattr(t, 'to_local') else t.nbytes for t in tensors)


def held(lora_rank: int) -> dict[str, int]:
    """Returns bytes of this process after a step and another backward, by the planner's names, and of activations."""
    with FSDPStrategy(device='cpu', precision='fp32', tensor_parallel=2) as strategy:
        actor = new_actor(lora_rank)
        optimizer = strategy.make_optimizer([p for p in actor.parameters() if p.requires_grad])
        actor, optimizer = strategy.prepare((actor, optimizer))
        for _ in range(2):
            strategy.backward(loss_of(actor), actor, optimizer)
            gradients = nbytes(p.grad for p in actor.parameters() if p.grad is not None)
            strategy.optimizer_step(optimizer)
        moments = [v for state in optimizer.state.values() for v in state.values() if v.dim()]
        found = {
            'actor weights': nbytes(actor.parameters()),
            'actor gradients': gradients,
            'actor optimizer': nbytes(moments),
        }
        with strategy.full_model(actor) as full:
            found['full copy'] = nbytes(full.parameters())
        alone = new_actor(lora_rank).train()
        group = TensorGroup(dist.group.WORLD, strategy.ranks.index, 2)
        parallelize(alone, group, None, check_model(alone, 2))
        with models.LiveBytes([*alone.parameters(), *alone.buffers()]) as live:
            loss_of(alone).backward()
        return found | {'activations': live.peak}


@pytest.mark.parametrize('lora_rank', [0, 2])
def test_a_plan_is_what_the_fuller_process_holds(lora_rank):
    ranks = run_distributed(held, 2, lora_rank)
    found = {name: max(rank[name] for rank in ranks) for name in ranks[0]}
    plan = make_plan(setup_of(lora_rank=lora_rank, critic='none'))
    for name in ('actor weights', 'actor gradients', 'actor optimizer'):
        assert plan.phases['learn'].device[name] == found[name], name
    planned = models.learning_bytes('actor', CONFIG, setup_of(lora_rank=lora_rank), 4, growing=4.0)
    # a pending reduction keeps its tensor a little longer
    assert planned == pytest.approx(found['activations'], rel=0.03)
    whole = models.learning_bytes('actor', CONFIG, setup_of(lora_rank=lora_rank, strategy_options={}), 4, growing=4.0)
    assert whole > 1.1 * planned  # negative control


def test_a_process_has_half_the_heads_and_half_of_the_matrices():
    alone, half = setup_of(strategy_options={}), setup_of()
    # 4 heads of 8 with 2 of keys and values, 3 layers: 2 x 2 x 8 x 3 elements per token, and half of them
    assert models.cache_elements(CONFIG) == 96 and models.cache_elements(CONFIG, 2) == 48
    whole, part = (models.measure(models.build('initial', CONFIG, setup)) for setup in (alone, half))
    norms = sum(p.numel for p in whole.parameters if 'norm' in p.name)
    assert norms == 7 * 32
    assert part.total == (whole.total - norms) // 2 + norms
    # sequences are split over ranks, and there is one rank
    plans = [make_plan(s) for s in (alone, half)]
    caches = [plan.phases['collect'].device['key/value cache'] for plan in plans]
    assert caches[0] == caches[1] == 4 * 96 * 4 * 23  # 4 rows of 96 numbers, 8 rows of 48; 23 slots


def test_workers_are_sent_whole_weights():
    """On the GPU if they fit, else from host memory."""
    options = {'on_cuda': True, 'precision': 'bf16', 'rollouts_elsewhere': True, 'critic': 'none', 'kl': False}
    whole = 2 * models.measure(models.build('initial', CONFIG, setup_of(strategy_options={}))).total
    roomy, tight, cut_in_two = (
        make_plan(setup_of(**options, **more)).phases['collect']
        for more in (
            {'memory': 2**30, 'strategy_options': {}},
            {'memory': 1, 'strategy_options': {}},
            {'memory': 2**30},
        )
    )
    assert roomy.device['full copy'] == whole and roomy.device['weights on their way'] == 2 * 64 << 20
    assert 'key/value cache' not in roomy.device and roomy.host.get('full copy') is None
    for apart in (tight, cut_in_two):
        assert 'full copy' not in apart.device and 'weights on their way' not in apart.device
        assert apart.host['full copy'] == whole // 2  # one file for both processes
    # the largest tensor in fp32; with parts, two whole ones while they are joined, and the part
    assert tight.device['gathering'] == 4 * 64 * 32 and cut_in_two.device['gathering'] == 4 * 64 * 32 * 2.5


def test_parts_are_among_the_advice_where_the_model_can_be_cut():
    def texts(config: Any, **options: Any) -> list[str]:
        gpus = {'strategy': 'fsdp', 'num_processes': 8, 'gradient_checkpointing': True, 'train_batch_size': 8}
        return [text.rpartition(', ')[2] for text, _ in changes(Setup(config=config, **gpus, **options))]

    llama = texts(CONFIG)
    assert [text for text in llama if text.startswith('tensor_parallel')] == ['tensor_parallel=2']  # 2 heads of keys
    assert llama.index('tensor_parallel=2') < llama.index('strategy=fsdp_cpu')
    cut_already = texts(CONFIG, strategy_options={'tensor_parallel': 2})
    for found in (texts(NO_PLAN), cut_already):
        assert not any(text.startswith('tensor_parallel') for text in found)
    assert not any('fsdp_cpu' in text for text in cut_already)  # it does not support tensor parallelism
