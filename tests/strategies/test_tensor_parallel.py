"""Tensor parallelism on gloo: the conformance suite, models of many families against one process, refused models."""

from __future__ import annotations

import itertools
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, T5Config, T5ForConditionalGeneration

from chatgpt.batching import collate
from chatgpt.functional.fused_logprobs import VocabularyPart, fused_logprobs
from chatgpt.launch.arguments import make_strategy
from chatgpt.nn import Actor, RewardModel
from chatgpt.nn.head_kernels import head_logprobs
from chatgpt.nn.peft_format import export_peft
from chatgpt.rollout import Call, HFEngine, LocalEngine, SamplingParams
from chatgpt.strategies import FSDPStrategy, NaiveStrategy
from chatgpt.strategies.checkpoint.layout import DictReader
from chatgpt.strategies.ranks import check_world_size
from chatgpt.strategies.registry import strategy_by_name
from chatgpt.strategies.tensor_parallel import Cut, CutReader, check_model
from chatgpt.strategies.tensor_ranks import TensorGroup, part_of
from chatgpt.testing.conformance import BF16, FP32, all_checks, run_conformance
from chatgpt.testing.fakes import tiny_causal_lm
from chatgpt.testing.processes import environment, run_distributed
from chatgpt.testing.tiny import tiny_sequences
from chatgpt.types import Prompt

COMMON = {
    'vocab_size': 67,  # odd: the second process has fewer rows
    'hidden_size': 32,
    'intermediate_size': 64,
    'num_hidden_layers': 2,
    'num_attention_heads': 4,
    'num_key_value_heads': 2,
    'max_position_embeddings': 64,
    'initializer_range': 0.1,
    'pad_token_id': 0,
    'bos_token_id': 1,
    'eos_token_id': 2,
}
NO_DROPOUT = {'attn_pdrop': 0.0, 'embd_pdrop': 0.0, 'resid_pdrop': 0.0}
FAMILIES: dict[str, dict[str, Any]] = {
    'llama': {},
    'qwen2': {'tie_word_embeddings': True},
    'qwen3': {'head_dim': 16},
    'mistral': {'head_dim': 8},
    'gemma2': {'head_dim': 8, 'tie_word_embeddings': True},
    'gemma3_text': {'head_dim': 8},
    'phi': {},
    'phi3': {},
    'cohere': {},
    'glm': {'head_dim': 8},
    'olmo2': {},
    'starcoder2': {},
    'gpt_neox': {},
    # transformers has no plan for it
    'gpt2': {'n_embd': 32, 'n_layer': 2, 'n_head': 4, 'n_positions': 64, **NO_DROPOUT},
}


def model(family: str, **kw: Any) -> Any:
    torch.manual_seed(1)
    return AutoModelForCausalLM.from_config(
        AutoConfig.for_model(family, **{**COMMON, **FAMILIES.get(family, {}), **kw})
    )


# ---------------------------------------------------------------- the strategy


def conform(folder: str) -> list[dict[str, str]]:
    """Runs all checks in fp32, and in bf16 those that depend on the dtype."""
    return [
        run_conformance(
            lambda p=precision: FSDPStrategy(precision=p, tensor_parallel=2, device='cpu'),
            tolerance=tolerance,
            checks=checks,
            folder=f'{folder}/{precision}',
        )
        for precision, tolerance, checks in (
            ('fp32', FP32, None),
            ('bf16', BF16, ['equals_naive', 'clipping', 'pieces', 'full_model']),
        )
    ]


@pytest.mark.parametrize('world_size', [2, pytest.param(4, marks=pytest.mark.slow)])
def test_conformance(world_size, tmp_path):
    for precision in ('fp32', 'bf16'):
        (tmp_path / precision).mkdir()
    for fp32, bf16 in run_distributed(conform, world_size, str(tmp_path)):
        assert set(fp32) == set(all_checks())
        assert {*fp32.values(), *bf16.values()} == {'passed'}, (fp32, bf16)


# ---------------------------------------------------------------- families


def step(strategy: Any, actor: Any) -> dict[str, Any]:
    """Returns loss, gradient norm and gradients (from the weights before and after a step of SGD) of one batch, the
    difference of the padded forward, bytes of the full model, and a few tokens of both engines."""
    optimizer = torch.optim.SGD([p for p in actor.parameters() if p.requires_grad], lr=1.0)
    actor, optimizer = strategy.prepare((actor, optimizer))
    before = {n: t.clone() for n, t in strategy.full_state_dict(actor).items()}
    sequences = tiny_sequences(6)
    own = sequences[strategy.rank :: strategy.world_size]
    batch = collate(own)
    tokens = []
    with strategy.full_model(actor) as full:
        for engine in (LocalEngine(), HFEngine(max_batch_size=2)):
            engine.begin(full)
            prompts = [Prompt(ids=s.prompt_ids) for s in sequences[:3]]
            samples = engine.generate(Call.of(prompts, SamplingParams(max_new_tokens=6), seed=3, indices=[0, 1, 2]))
            engine.end()
            tokens.append([s.response_ids.tolist() for s in samples])
        size = sum(p.numel() * p.element_size() for p in full.parameters())
    out = actor(batch, temperature=0.9, with_entropy=True)
    with torch.no_grad():
        padded = actor(collate(own, pack=False), temperature=0.9).logprobs
    loss = -(out.logprobs * batch.action_mask).sum() + 0.1 * out.entropy.sum()
    if out.values is not None:
        loss = loss + out.values.square().sum()
    strategy.backward(loss, actor, optimizer)
    norm = strategy.optimizer_step(optimizer)
    after = strategy.full_state_dict(actor)
    return {
        'loss': float(strategy.all_reduce(loss.detach())),
        'norm': norm,
        'gradients': {n: before[n] - after[n] for n in before},
        'tokens': tokens,
        'bytes': size,
        'padded': float((padded - out.logprobs.detach())[batch.action_mask].abs().max()),
    }


def families(names: list[str], lora: bool, options: dict[str, Any]) -> list[dict[str, Any]]:
    with FSDPStrategy(precision='fp32', tensor_parallel=2, device='cpu', **options) as strategy:
        return [step(strategy, made(name, lora=lora)) for name in names]


def made(family: str, lora: bool = False) -> Actor:
    actor = Actor(model(family), lora_rank=3 if lora else 0, value_head=nn.Linear(32, 1))
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in actor.named_parameters():
            if 'lora_B' in name or 'value_head' in name:  # these start at zero, or at random
                parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
    return actor


def check_families(names: list[str], world_size: int, lora: bool = False, **options: Any) -> None:
    ranks = run_distributed(families, world_size, names, lora, options)
    for number, name in enumerate(names):
        with NaiveStrategy(precision='fp32', device='cpu') as strategy:
            want = step(strategy, made(name, lora=lora))
        got = ranks[0][number]
        assert got['loss'] == pytest.approx(want['loss'], rel=1e-5), name
        assert got['norm'] == pytest.approx(want['norm'], rel=1e-5), name
        for key, gradient in want['gradients'].items():
            scale = max(float(gradient.abs().max()), 1e-2)  # the gradient of a key's bias is 0 up to rounding
            assert float((got['gradients'][key] - gradient).abs().max()) < 2e-5 * scale, (name, key)
        for rank in ranks:
            assert rank[number]['padded'] < 1e-5  # the padding-free forward, if the family has one, and the padded one
            assert rank[number]['tokens'] == want['tokens'], name
            assert rank[number]['bytes'] < 0.6 * want['bytes'], name  # norms, positions and the value head are whole


QUICK = ['llama', 'qwen2', 'qwen3', 'gemma2', 'olmo2', 'phi', 'gpt_neox', 'gpt2']
"""tied and untied heads, query norms, a soft cap, biases, fused queries and keys in both orders, gathered parts,
counted heads"""


@pytest.mark.parametrize('names', [QUICK, pytest.param(sorted(set(FAMILIES) - set(QUICK)), marks=pytest.mark.slow)])
def test_families_compute_what_one_process_computes(names):
    check_families(names, 2)


def generate_six(engine: Any, full: Any) -> list[list[int]]:
    engine.begin(full)
    prompts = [Prompt(ids=torch.tensor([5, 3 + i])) for i in range(6)]
    samples = engine.generate(Call.of(prompts, SamplingParams(max_new_tokens=6), seed=3, indices=range(6)))
    engine.end()
    return [s.response_ids.tolist() for s in samples]


def memory_differs() -> list[Any]:
    """Returns the rows per batch and the tokens of the local engine, where processes have different free memory."""

    class Tight(LocalEngine):
        rows: list[int] = []

        def free_bytes(self, device: torch.device) -> int:
            return 1 << (30 if strategy.is_rank_0 else 10)

        def rows_that_fit(self, rows: int, capacity: int) -> int:
            self.rows.append(super().rows_that_fit(rows, capacity))
            return self.rows[-1]

    with make_strategy('fsdp', seed=1, precision='fp32', tensor_parallel=2) as strategy:
        assert (strategy.rank, strategy.world_size, strategy.meta_init) == (0, 1, True)
        assert strategy.is_rank_0 == (strategy.processes.rank == 0)
        actor = strategy.prepare(Actor(model('llama')))
        engine = Tight()
        with strategy.full_model(actor) as full:
            tokens = generate_six(engine, full)
        adapted, judge = strategy.prepare(Actor(model('llama'), lora_rank=2), RewardModel(model('llama')))
        for role, save in ((actor, 'save'), (adapted, 'save'), (adapted, 'export'), (judge, 'save')):
            with strategy.full_model(role) as full, pytest.raises(ValueError, match='has parts of the weights'):
                full.save_pretrained('nowhere') if save == 'save' else export_peft(full, 'nowhere')
        strategy.barrier()
        return [engine.rows, tokens]


def test_processes_with_other_room_decode_the_same_rows():
    first, second = run_distributed(memory_differs, 2)
    assert first == second and max(first[0]) < 6
    assert first[1] == generate_six(LocalEngine(), Actor(model('llama')))


def test_two_ranks_of_two_processes_that_recompute_activations():
    check_families(['llama'], 4, activation_checkpointing=True)


def test_adapters():
    check_families(['llama', 'starcoder2', 'gpt2'], 2, lora=True)


# ---------------------------------------------------------------- refused models and settings


def test_models_that_cannot_be_cut():
    sizes = {'d_model': 8, 'd_kv': 4, 'd_ff': 16, 'num_layers': 1, 'num_heads': 2, 'decoder_start_token_id': 0}
    for made, processes, message in (
        (Actor(model('biogpt')), 2, 'BioGptForCausalLM has no plan'),
        (Actor(tiny_causal_lm('gpt2')), 4, 'GPT2LMHeadModel has 2 heads in .*c_attn.* one of 1, 2'),
        (Actor(model('llama')), 4, 'LlamaForCausalLM has 2 heads in .*k_proj.* one of 1, 2'),
        (Actor(model('llama', intermediate_size=63)), 2, 'does not divide the output width 63 of .*mlp'),
        (Actor(model('mixtral', num_local_experts=2)), 2, "MixtralForCausalLM .* the style '.*mixtures of experts"),
        (T5ForConditionalGeneration(T5Config(vocab_size=16, **sizes)), 2, 'is an encoder-decoder'),
        (Actor(model('llama'), num_layers_unfrozen=1), 2, 'frozen top blocks'),
        (Actor(model('apertus')), 2, 'does not say what becomes of .*act_fn'),
    ):
        with pytest.raises(ValueError, match=message):
            check_model(made, processes)


def test_settings_that_do_not_go_together():
    given: dict[str, Any] = {'cpu_offload': True, 'stream_blocks': True, 'reproducible': 'exact'}
    for name, value in given.items():
        with pytest.raises(ValueError, match=f'tensor_parallel=2 does not go with {name}'):
            FSDPStrategy(tensor_parallel=2, device='cpu', **{name: value})
    with environment(WORLD_SIZE='3'), pytest.raises(ValueError, match='3 processes cannot be grouped .* 2 or 4'):
        FSDPStrategy(tensor_parallel=2, device='cpu')
    with pytest.raises(ValueError, match='NaiveStrategy takes no such option; use strategy fsdp'):
        strategy_by_name('naive', tensor_parallel=2)
    with pytest.raises(ValueError, match='whole number of at least 1'):
        check_world_size(4, 0)


# ---------------------------------------------------------------- parts of tensors


class FakeGroup:
    """A group seen by process `index`, which gathers the same range of the others' flat parts."""

    def __init__(self, parts: list[Tensor], index: int) -> None:
        self.parts, self.index, self.size = [p.reshape(-1) for p in parts], index, len(parts)

    def joined(self, x: Tensor, width: int, dim: int = -1) -> Tensor:
        own = self.parts[self.index]
        at = next(i for i in range(len(own)) if own[i] == x.reshape(-1)[0])  # all numbers differ
        assert torch.equal(own[at : at + x.numel()], x.reshape(-1))
        return torch.cat([p[at : at + x.numel()].view(x.shape) for p in self.parts], dim)


@pytest.mark.parametrize(
    ('shape', 'dim', 'blocks', 'local'),
    [
        ((5, 4), 0, 1, [(3, 4), (2, 4)]),
        ((5, 4), 1, 1, [(5, 2), (5, 2)]),
        ((5, 12), 1, 3, [(5, 6), (5, 6)]),  # GPT-2's queries, keys and values
        ((12,), 0, 3, [(6,), (6,)]),
        ((12, 2), 0, 3, [(6, 2), (6, 2)]),
    ],
)
@pytest.mark.parametrize('ranks', [1, 2, 3])
def test_pieces_of_parts_cover_the_tensor_and_read_back(shape, dim, blocks, local, ranks):
    whole = torch.arange(float(math.prod(shape))).view(shape)
    cuts = [Cut(shape, dim, index, 2, blocks) for index in range(2)]
    parts = [cut.take(whole).contiguous() for cut in cuts]
    assert [tuple(p.shape) for p in parts] == [cut.local_shape for cut in cuts] == local
    if blocks == 3:  # the first half of the queries, of the keys and of the values
        width = shape[dim] // 3
        columns = [b * width + i for b in range(3) for i in range(width // 2)]
        assert torch.equal(parts[0], whole.index_select(dim, torch.tensor(columns)))
    written = torch.full((whole.numel(),), -1.0)
    for index, (cut, part) in enumerate(zip(cuts, parts, strict=True)):
        group: Any = FakeGroup(parts, index)
        share = -(-part.numel() // ranks)
        for start in range(0, part.numel(), share):  # in the middle of a row too
            stop = min(start + share, part.numel())
            for piece in cut.pieces('w', start, stop, part.view(-1)[start:stop], group):
                assert piece.shape == shape and (written[piece.start : piece.stop] == -1).all()
                written[piece.start : piece.stop] = piece.data
        reader = CutReader(DictReader({'w': whole, 'w/step': torch.tensor(3.0), 'w/slot': whole + 1}), {'w': cut})
        assert reader.shape('w') == tuple(part.shape) and reader.shape('w/step') == ()
        for start, stop in ((0, part.numel()), (1, 3), (3, 6)):
            assert reader.read('w', start, stop).tolist() == part.view(-1)[start:stop].tolist()
            assert reader.read('w/slot', start, stop).tolist() == (part + 1).view(-1)[start:stop].tolist()
    assert torch.equal(written, whole.view(-1))


def test_parts_are_those_of_chunk():
    for width in (1, 2, 7, 8):
        for size in (1, 2, 3, 4):
            chunks = [len(c) for c in torch.arange(width).chunk(size)]
            chunks += [0] * (size - len(chunks))
            assert [b - a for a, b in (part_of(width, i, size) for i in range(size))] == chunks


# ---------------------------------------------------------------- log-probs


def vocabulary_parallel(seed: int, dtype: torch.dtype, with_entropy: Any, block: int) -> tuple[list[Tensor], ...]:
    """Returns log-probs, entropy and gradients from parts of 13 tokens, and from the whole by a plain softmax."""
    group = TensorGroup(dist.group.WORLD, dist.get_rank(), dist.get_world_size())
    generator = torch.Generator().manual_seed(seed)
    states = torch.randn(6, 5, generator=generator, dtype=dtype, requires_grad=True)
    weight = (3 * torch.randn(13, 5, generator=generator, dtype=dtype)).requires_grad_()
    bias = torch.randn(13, generator=generator, dtype=dtype, requires_grad=True)
    ids = torch.tensor([0, 12, 6, 7, 3, 9])
    pull = torch.randn(2, 6, generator=generator, dtype=dtype)
    start, stop = group.bounds(13)
    own, own_bias = (t.detach()[start:stop].clone().requires_grad_() for t in (weight, bias))
    got, entropy = fused_logprobs(
        states,
        own,
        own_bias,
        ids,
        part=VocabularyPart(group, start, 13),
        temperature=0.7,
        with_entropy=with_entropy,
        block_size=block,
    )
    loss = (got * pull[0]).sum() + ((entropy * pull[1]).sum() if with_entropy is True else 0.0)
    gradients = torch.autograd.grad(loss, [states, own, own_bias])
    logp = (((states @ weight.T) + bias) / 0.7).log_softmax(-1)
    want, want_entropy = logp.gather(1, ids[:, None])[:, 0], -(logp.exp() * logp).sum(1)
    loss = (want * pull[0]).sum() + ((want_entropy * pull[1]).sum() if with_entropy is True else 0.0)
    wanted = torch.autograd.grad(loss, [states, weight, bias])
    wanted = (wanted[0], wanted[1][start:stop], wanted[2][start:stop])
    found, right = [got, *gradients], [want, *wanted]
    if with_entropy:
        assert entropy is not None and entropy.requires_grad == (with_entropy is True)
        found.append(entropy)
        right.append(want_entropy)
    return [t.detach() for t in found], [t.detach() for t in right]


def all_cases() -> list[Any]:
    every = itertools.product((torch.float64, torch.float32), (False, True, 'detached'), (2, 100))
    return [(dtype, vocabulary_parallel(3, dtype, with_entropy, block)) for dtype, with_entropy, block in every]


def test_log_probs_of_parts_of_the_vocabulary():
    first, second = run_distributed(all_cases, 2, init_group=True)
    for dtype, (found, right) in [*first, *second]:
        for a, b in zip(found, right, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-12 if dtype is torch.float64 else 2e-5)
    for (_, (found, _)), (_, (others, _)) in zip(first, second, strict=True):
        assert torch.equal(found[0], others[0]) and torch.equal(found[1], others[1])  # the same bits on both


def test_an_actor_takes_them_and_never_makes_whole_logits(monkeypatch):
    called: list[Any] = []

    def parts(*args: Any, **_: Any) -> Any:
        called.append(args)
        return args[0], None

    monkeypatch.setattr('chatgpt.nn.head_kernels.fused_logprobs', parts)
    layer = nn.Linear(4, 3)
    layer.vocabulary = SimpleNamespace()  # type: ignore[assignment]

    def head(states: Tensor) -> Tensor:
        raise AssertionError('whole logits')

    states = torch.zeros(2, 4)
    for kernel in ('auto', 'plain', 'fused'):
        head_logprobs(states, head, layer, torch.zeros(2, dtype=torch.int64), kernel=kernel, vocab_size=6)
    assert len(called) == 3
