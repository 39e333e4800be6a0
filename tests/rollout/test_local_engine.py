"""The local engine against plain forwards and `model.generate`, its invariance to batching, and the size of its cache
when free memory is limited."""

from __future__ import annotations

import random

import pytest
import torch
from engine_calls import Turns, generated, generated_turns, prompts_of, slow_logits, tiny_of

from chatgpt.nn import Actor
from chatgpt.rollout import Call, HFEngine, LocalEngine, SamplingParams, compare_samples
from chatgpt.rollout.local import attention
from chatgpt.rollout.local import run as local_run
from chatgpt.rollout.local.slot_cache import bytes_per_slot
from chatgpt.testing import FAMILIES, tiny_causal_lm
from chatgpt.types import Prompt, Sample


def collect(model, prompts, sampling, *, indices=None, groups=None, seed=11, **engine_settings) -> list[Sample]:
    call = {'indices': range(len(prompts)) if indices is None else indices, 'groups': groups}
    return generated(LocalEngine(**engine_settings), model, sampling, prompts, seed=seed, **call)


@pytest.mark.parametrize(('family', 'max_batch_size'), [*((family, 3) for family in FAMILIES), ('gpt2', 256)])
def test_greedy_agrees_with_generate_token_for_token(family, max_batch_size):
    model = tiny_causal_lm(family, tie_word_embeddings=False)  # random models with tied weights repeat one token
    prompts = prompts_of()
    # a token that occurs in the middle of some responses is the end token
    free = collect(model, prompts, SamplingParams(max_new_tokens=10, do_sample=False))
    end = int(free[0].response_ids[4])
    assert any(end in s.response_ids[1:-1].tolist() for s in free)
    for eos in ((), (end,), (end, int(free[1].response_ids[6]))):
        sampling = SamplingParams(max_new_tokens=10, do_sample=False, eos_token_ids=eos)
        samples = collect(model, prompts, sampling, max_batch_size=max_batch_size)
        for sample, prompt in zip(samples, prompts, strict=True):
            # one row at a time, without padding
            with torch.no_grad():
                want = model.generate(
                    prompt.ids[None],
                    attention_mask=torch.ones_like(prompt.ids[None]),
                    max_new_tokens=10,
                    do_sample=False,
                    eos_token_id=list(eos) or -1,
                    pad_token_id=0,
                )[0, len(prompt.ids) :].tolist()
            assert sample.response_ids.tolist() == want
            assert sample.finish_reason == ('eos' if want[-1] in eos else 'length')


@pytest.mark.parametrize('family', FAMILIES)
def test_logprobs_are_those_of_a_plain_forward(family):
    model = tiny_causal_lm(family)
    end = list(range(2, 14))
    sampling = SamplingParams(max_new_tokens=9, temperature=0.7, top_k=7, min_new_tokens=3, eos_token_ids=tuple(end))
    samples = collect(model, prompts_of(), sampling, max_batch_size=3)
    assert len({s.num_actions for s in samples}) > 1 and any(s.finish_reason == 'eos' for s in samples)
    wrong = 0
    for sample in samples:
        scaled = slow_logits(model, sample) / 0.7
        chosen = sample.response_ids[:, None]
        plain = torch.log_softmax(scaled, -1).gather(1, chosen).squeeze(1)
        torch.testing.assert_close(sample.logprobs.double(), plain, atol=1e-5, rtol=0)
        scaled[:3, end] = -torch.inf
        scaled[scaled < scaled.topk(7, dim=-1).values[:, -1:]] = -torch.inf
        filtered = torch.log_softmax(scaled, -1).gather(1, chosen).squeeze(1)
        torch.testing.assert_close(sample.filtered_logprobs.double(), filtered, atol=1e-5, rtol=0)
        shifted = torch.log_softmax(slow_logits(model, sample), -1).gather(1, chosen).squeeze(1)
        wrong += int((sample.logprobs.double() - shifted).abs().max() > 1e-3)
    assert wrong == len(samples)  # negative control: without the temperature, every sample disagrees


@pytest.mark.parametrize('family', FAMILIES)
def test_samples_do_not_depend_on_batch_order_size_or_company(family):
    model = tiny_causal_lm(family)
    prompts = prompts_of()
    sampling = SamplingParams(max_new_tokens=10, eos_token_ids=tuple(range(2, 9)), temperature=1.2, top_p=0.95)
    whole = collect(model, prompts, sampling)
    assert len({s.num_actions for s in whole}) > 2
    for size in (1, 3):
        report = compare_samples(whole, collect(model, prompts, sampling, max_batch_size=size, max_prefill_tokens=20))
        assert report.explained, str(report)
    order = list(range(len(prompts)))
    random.Random(3).shuffle(order)
    shuffled = collect(model, [prompts[i] for i in order], sampling, indices=order, max_batch_size=4)
    assert [s.index for s in shuffled] == order
    assert compare_samples(whole, shuffled).explained
    part = order[:4]  # a rank's share
    alone = collect(model, [prompts[i] for i in part], sampling, indices=part)
    assert compare_samples([whole[i] for i in part], alone).explained
    # negative controls: another seed and other indices give other samples
    assert not compare_samples(whole, collect(model, prompts, sampling, seed=12)).explained
    wrong = collect(model, [prompts[i] for i in part], sampling, indices=range(50, 54))
    assert any(a.response_ids.tolist() != whole[i].response_ids.tolist() for a, i in zip(wrong, part, strict=True))


def test_equal_prompts_are_prefilled_once_and_drawn_apart():
    model = tiny_causal_lm('llama')
    prompt, other = prompts_of((6, 4))
    prompts = [prompt, other, prompt, prompt, other]
    actor = Actor(model)
    widths = []
    trunk = actor.trunk

    def counting(input_ids, **kwargs):
        widths.append(tuple(input_ids.shape))
        return trunk(input_ids, **kwargs)

    engine = LocalEngine()
    engine.begin(actor)
    actor.trunk = counting
    sampling = SamplingParams(max_new_tokens=6)
    samples = engine.generate(Call.of(prompts, sampling, seed=1, indices=range(5), groups=[0, 1, 0, 0, 1]))
    engine.end()
    assert widths == [(2, 6)] + [(5, 1)] * 5
    assert [s.group for s in samples] == [0, 1, 0, 0, 1]
    assert len({tuple(s.response_ids.tolist()) for s in samples}) == 5
    alone = [collect(model, [p], sampling, indices=[i], seed=1)[0] for i, p in enumerate(prompts)]
    assert compare_samples(samples, alone).explained


@pytest.mark.parametrize('settings', [{}, {'max_batch_size': 3, 'refill_fraction': 0.0}, {'fixed_steps': True}])
@pytest.mark.parametrize('family', FAMILIES)
def test_a_prefix_that_all_prompts_share_is_computed_once(family, settings, monkeypatch):
    model = tiny_causal_lm(family)
    shared = torch.randint(3, 64, (20,), generator=torch.Generator().manual_seed(7))
    endings = prompts_of((3, 6, 1, 4, 2))
    kinds = [Prompt(ids=torch.cat([shared, p.ids])) for p in endings] + [Prompt(ids=shared[:18])]
    prompts = [kinds[i] for i in (0, 1, 0, 2, 5, 3, 1, 0, 4)]
    sampling = SamplingParams(max_new_tokens=9, eos_token_ids=tuple(range(2, 14)))
    actor, widths = Actor(model), []
    trunk = actor.trunk

    def counting(input_ids, **kwargs):
        widths.append(tuple(input_ids.shape))
        return trunk(input_ids, **kwargs)

    engine = LocalEngine(**settings)
    engine.begin(actor)
    actor.trunk = counting
    samples = engine.generate(Call.of(prompts, sampling, seed=1, indices=range(len(prompts))))
    engine.end()
    alone = [collect(model, [p], sampling, indices=[i], seed=1)[0] for i, p in enumerate(prompts)]
    assert compare_samples(samples, alone).explained
    assert len({s.num_actions for s in samples}) > 1
    if family == 'bloom':  # takes a mask of slots, so the prefix is not shared
        return
    prefills = [shape for shape in widths if shape[1] > 1]
    assert prefills.count((1, 17)) == 1 and max(width for _, width in prefills) == 17
    # a prefix needs a minimum length and at least two prompts
    monkeypatch.setattr(local_run, '_MIN_SHARED_PREFIX', 18)
    for few in (prompts, prompts[:1]):
        widths.clear()
        actor.trunk = trunk
        engine.begin(actor)
        actor.trunk = counting
        engine.generate(Call.of(few, sampling, seed=1, indices=range(len(few))))
        engine.end()
        assert max(width for _, width in widths) > 20


def biased(token: int, amount: float, **kw):
    """Returns a GPT-2 with a bias of `amount` on the logit of `token`."""
    model = tiny_causal_lm('gpt2', tie_word_embeddings=False, **kw)
    head = torch.nn.Linear(model.lm_head.in_features, model.lm_head.out_features)
    head.weight.data.copy_(model.lm_head.weight.data)
    head.bias.data.zero_()
    head.bias.data[token] = amount
    model.lm_head = head
    return model


def test_an_empty_response_has_one_action_and_min_new_tokens_bars_every_end_token():
    model = biased(2, 50.0)
    for s in collect(model, prompts_of(), SamplingParams(max_new_tokens=5, eos_token_ids=(2,))):
        assert s.response_ids.tolist() == [2] and s.finish_reason == 'eos' and s.ended
        assert s.logprobs.shape == s.filtered_logprobs.shape == s.edge_distances.shape == s.response_mask.shape == (1,)
    sampling = SamplingParams(max_new_tokens=9, min_new_tokens=4, eos_token_ids=(2, 3))
    for s in collect(model, prompts_of(), sampling, max_batch_size=3):
        assert s.num_actions == 5 and s.response_ids[4] == 2
        assert not set(s.response_ids[:4].tolist()) & {2, 3}
        assert bool((s.logprobs[:4] < -20).all()) and bool((s.filtered_logprobs[:4] > -20).all())


def test_limits_and_end_at_the_limit():
    prompts = prompts_of()
    sampling = SamplingParams(max_length=14, max_new_tokens=8)
    for s, p in zip(collect(tiny_causal_lm('opt'), prompts, sampling), prompts, strict=True):
        assert s.num_actions == min(8, 14 - len(p.ids)) and s.finish_reason == 'length' and not s.ended
    # an end token at the limit is still an end
    sampling = SamplingParams(max_new_tokens=4, min_new_tokens=3, eos_token_ids=(2,))
    assert all(s.finish_reason == 'eos' and s.num_actions == 4 for s in collect(biased(2, 50.0), prompts, sampling))


@pytest.mark.parametrize('max_batch_size', [256, 3])
def test_stop_is_asked_after_every_token_and_its_tokens_stay(max_batch_size):
    model, prompts = tiny_causal_lm('gpt2'), prompts_of()
    free = collect(model, prompts, SamplingParams(max_new_tokens=10))
    pairs = {tuple(s.response_ids[3:5].tolist()) for s in free[:4]}
    asked: list[tuple[int, ...]] = []

    def stop(ids):
        asked.append(tuple(ids))
        return tuple(ids[-2:]) in pairs

    samples = collect(model, prompts, SamplingParams(max_new_tokens=10, stop=stop), max_batch_size=max_batch_size)
    for s, f in zip(samples, free, strict=True):
        ids = f.response_ids.tolist()
        hit = next((t + 1 for t in range(1, 10) if tuple(ids[t - 1 : t + 1]) in pairs), None)
        assert s.response_ids.tolist() == ids[: hit or 10]
        assert s.finish_reason == ('stop' if hit else 'length')
    assert {s.finish_reason for s in samples} >= {'stop'}
    want = {tuple(s.response_ids[: t + 1].tolist()) for s in samples for t in range(s.num_actions)}
    assert set(asked) == want
    later = collect(model, prompts, SamplingParams(max_new_tokens=10, min_new_tokens=9, stop=stop))
    assert all(s.num_actions >= 9 for s in later)


def test_a_cache_that_has_to_grow():
    model = tiny_causal_lm('gpt2', positions=256, layers=1)
    prompts = prompts_of((3, 60, 5))
    sampling = SamplingParams(max_new_tokens=100, do_sample=False)
    samples = collect(model, prompts, sampling, max_batch_size=2)
    for s in samples:
        assert torch.equal(slow_logits(model, s).argmax(-1), s.response_ids)


def test_samples_carry_what_came_with_the_prompts():
    prompt = Prompt(ids=torch.tensor([5, 6]), text='a b', columns={'answer': '12'})
    (s,) = collect(
        tiny_causal_lm(), [prompt], SamplingParams(max_new_tokens=3, temperature=0.5), indices=[70], groups=[9]
    )
    assert (s.index, s.group, s.prompt_text, s.columns, s.temperature) == (70, 9, 'a b', {'answer': '12'}, 0.5)
    assert s.prompt_ids.tolist() == [5, 6] and s.response_mask.tolist() == [True] * 3
    assert s.response_ids.dtype == torch.int64
    assert s.logprobs.dtype == s.filtered_logprobs.dtype == s.edge_distances.dtype == torch.float32
    weight = torch.ones(3, requires_grad=True)
    (weight * s.logprobs).sum().backward()  # an inference tensor would refuse to be saved for backward
    assert collect(tiny_causal_lm(), [], SamplingParams(max_new_tokens=3)) == []
    (s,) = collect(tiny_causal_lm(), prompts_of((3,)), SamplingParams(max_new_tokens=3, do_sample=False))
    assert s.edge_distances.tolist() == [1.0] * 3 and bool((s.logprobs < 0).all())


def test_dropout_is_off_and_training_flags_come_back():
    actor = Actor(tiny_causal_lm('gpt2', dropout=0.5)).train()
    actor.model.transformer.h[0].eval()
    flags = [m.training for m in actor.modules()]
    first, second = (generated(LocalEngine(), actor, SamplingParams(max_new_tokens=6)) for _ in range(2))
    assert compare_samples(first, second).equal
    assert [m.training for m in actor.modules()] == flags
    assert not any('forward' in vars(m) for m in actor.modules())


def test_new_weights_count_in_the_next_call():
    model, sampling = tiny_causal_lm('gpt2'), SamplingParams(max_new_tokens=6, do_sample=False)
    engine = LocalEngine()
    engine.begin(Actor(model))
    before = engine.generate(Call.of(prompts_of(), sampling, seed=1, indices=range(8)))
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.2 * torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel())))
    after = engine.generate(Call.of(prompts_of(), sampling, seed=1, indices=range(8)))
    assert not compare_samples(before, after).equal
    for s in after:
        assert torch.equal(slow_logits(model, s).argmax(-1), s.response_ids)


def test_bfloat16_runs_and_stays_close():
    model = tiny_causal_lm('llama').to(torch.bfloat16)
    for s in collect(model, prompts_of(), SamplingParams(max_new_tokens=6)):
        plain = torch.log_softmax(slow_logits(model, s), -1).gather(1, s.response_ids[:, None]).squeeze(1)
        assert float((s.logprobs.double() - plain).abs().max()) < 0.2


class TestRefusals:
    @pytest.mark.parametrize(
        ('prompts', 'settings', 'message'),
        [
            ([(5,), ()], {'max_new_tokens': 4}, 'prompt 1 is empty'),
            ([(5,), (5, 6, 7)], {'max_length': 3}, 'prompt 1 has 3 tokens and max_length=3 leaves no room'),
            (
                [(5,) * 20],
                {'max_new_tokens': 13},
                "prompt 0 has 20 tokens and may grow by 13, past the model's 32 positions",
            ),
            ([(5, 64)], {'max_new_tokens': 4}, 'prompt 0 holds token ids outside the vocabulary of 64'),
            ([(5,)], {'max_new_tokens': 4, 'eos_token_ids': (64,)}, 'end token 64 is outside the vocabulary'),
            (
                [(5,)],
                {'max_new_tokens': 4, 'extra': {'num_beams': 4}},
                "LocalEngine cannot do num_beams=4; .* engine='hf'",
            ),
        ],
    )
    def test_before_any_work(self, prompts, settings, message):
        model = tiny_causal_lm('gpt2', positions=32)
        rows = [Prompt(ids=torch.tensor(p, dtype=torch.int64)) for p in prompts]
        with pytest.raises(ValueError, match=message):
            collect(model, rows, SamplingParams(**settings))

    def test_a_limit_of_a_prompt(self):
        given = {'seed': 0, 'indices': [0], 'limits': [0]}
        call = Call.of([Prompt(ids=torch.tensor([5]))], SamplingParams(max_new_tokens=4), **given)
        with pytest.raises(ValueError, match=r'limits\[0\]=0 must be at least 1'):
            call.checked(tiny_causal_lm('gpt2').config)

    def test_counts_that_do_not_match_and_settings(self):
        sampling = SamplingParams(max_new_tokens=2)
        for counts, message in (
            ({'indices': range(3)}, '2 prompts but 3 sample indices'),
            ({'groups': [0]}, '2 prompts but 1 groups'),
            ({'offsets': [0, 1, 2]}, '2 prompts but 3 offsets'),
        ):
            with pytest.raises(ValueError, match=message):
                generated(LocalEngine(), tiny_causal_lm(), sampling, prompts_of((1, 2)), **counts)
        with pytest.raises(ValueError, match='begin'):
            LocalEngine().generate(Call.of(prompts_of(), sampling, seed=1, indices=range(8)))
        for name, value in (('max_batch_size', 0), ('fixed_steps', 'often'), ('attention', 'paged'), ('keep', 'often')):
            with pytest.raises(ValueError, match=f'{name}={value!r}'):
                LocalEngine(**{name: value})

    @pytest.mark.parametrize('fixed_steps', [False, True])
    @pytest.mark.parametrize('family', ['Mistral', 'Gemma2', 'Llama4Text'])
    def test_sequences_longer_than_the_attention_window(self, family, fixed_steps):
        """Tokens are those of plain forwards with the window's mask, for rows shorter and longer than the window, one
        that crosses it, and rows of equal length."""
        chunks = {'attention_chunk_size': 16, 'intermediate_size_mlp': 64, 'num_local_experts': 2}
        own = {'Mistral': {}, 'Gemma2': {'head_dim': 16}, 'Llama4Text': {'head_dim': 16} | chunks}[family]
        model = tiny_of(family, **({'sliding_window': 16} if family != 'Llama4Text' else {}), **own)
        engine = LocalEngine(max_batch_size=3, fixed_steps=fixed_steps)
        engine.begin(Actor(model))
        sampling = SamplingParams(max_new_tokens=8, do_sample=False)
        for lengths in ((20, 12, 3, 33), (18, 18), (4,)):  # the last: within the window
            found = engine.generate(Call.of(prompts_of(lengths), sampling, seed=1, indices=range(len(lengths))))
            for s in found:
                assert torch.equal(slow_logits(model, s).argmax(-1), s.response_ids)
        engine.end()

    def test_a_window_that_is_not_followed_is_refused_where_it_would_matter(self, monkeypatch):
        """A mask without the window fails the check, but only for sequences beyond the window."""

        def without(lengths, width, windows, dtype):
            return attention.decode_mask(lengths, width, 'additive', dtype)

        monkeypatch.setattr(attention, 'window_masks', without)
        model = tiny_of('Mistral', sliding_window=16)
        with pytest.raises(ValueError, match="attention window of 16, beyond which its decode.*use engine='hf'"):
            collect(model, prompts_of((12,)), SamplingParams(max_new_tokens=5))
        (s,) = collect(model, prompts_of((12,)), SamplingParams(max_new_tokens=4, do_sample=False))
        assert torch.equal(slow_logits(model, s).argmax(-1), s.response_ids)

    def test_a_model_without_a_plain_key_value_cache_is_refused(self):
        actor = Actor(tiny_of('Mamba', state_size=4)).train()
        with pytest.raises(ValueError, match="MambaForCausalLM does not agree with its plain forward.*use engine='hf'"):
            LocalEngine().begin(actor)
        assert all(m.training for m in actor.modules())  # restored after the error

    def test_non_finite_logits_name_sample_and_position(self):
        model = tiny_causal_lm('gpt2')
        engine = LocalEngine()
        engine.begin(Actor(model))
        position = 9
        with torch.no_grad():
            model.transformer.wpe.weight[position] = torch.nan
        with pytest.raises(FloatingPointError, match=r'sample 41 are not finite at response position 5'):
            engine.generate(Call.of(prompts_of((2, 5)), SamplingParams(max_new_tokens=6), seed=1, indices=[40, 41]))
        with torch.no_grad():
            model.transformer.wpe.weight[position] = 0.0
        # the cache contains no NaN afterwards
        engine.generate(Call.of(prompts_of((2, 5)), SamplingParams(max_new_tokens=8), seed=1, indices=[40, 41]))

    def test_non_finite_weights_are_found_at_begin(self):
        actor = Actor(tiny_causal_lm('gpt2'))
        with torch.no_grad():
            actor.model.transformer.h[0].ln_1.weight.fill_(torch.nan)
        with pytest.raises(FloatingPointError, match='not finite'):
            LocalEngine().begin(actor)


@pytest.mark.gpu
@pytest.mark.parametrize('family', FAMILIES)
def test_cuda_draws_the_same_tokens_as_cpu(family):
    if not torch.cuda.is_available():
        pytest.skip('needs a CUDA device')
    sampling = SamplingParams(max_new_tokens=12, eos_token_ids=(2, 9))
    cpu = collect(tiny_causal_lm(family), prompts_of(), sampling, max_batch_size=3)
    cuda = collect(tiny_causal_lm(family).cuda(), prompts_of(), sampling, max_batch_size=5)
    report = compare_samples(cpu, cuda, tolerance=1e-4)
    assert report.explained and report.num_tokens > 40, str(report)


# ---------------------------------------------------------------------- later turns


def test_the_second_half_draws_with_its_own_positions():
    engine = LocalEngine()
    engine.begin(Actor(tiny_causal_lm('gpt2')))
    prompts = [Prompt(ids=torch.tensor([5, 6, 7])), Prompt(ids=torch.tensor([9, 4]))]
    whole = engine.generate(Call.of(prompts, SamplingParams(max_new_tokens=12), seed=3, indices=[7, 2]))
    cuts = [4, 7]
    later = [Prompt(ids=torch.cat([p.ids, s.response_ids[:n]])) for p, s, n in zip(prompts, whole, cuts, strict=True)]
    ask = {'seed': 3, 'indices': [7, 2]}
    on = engine.generate(Call.of(later, SamplingParams(max_new_tokens=5), offsets=cuts, **ask))
    for sample, rest, n in zip(whole, on, cuts, strict=True):
        assert rest.response_ids.tolist() == sample.response_ids[n : n + 5].tolist()
    # negative control: without the offset the draws start again
    anew = engine.generate(Call.of(later, SamplingParams(max_new_tokens=5), **ask))
    assert any(a.response_ids.tolist() != b.response_ids.tolist() for a, b in zip(anew, on, strict=True))


def test_generators_of_later_turns_are_others():
    actor, prompt = Actor(tiny_causal_lm('gpt2')), [Prompt(ids=torch.tensor([5, 6, 7]))]
    found = []
    for offset in (0, 4, 5, 4):
        (sample,) = generated(HFEngine(), actor, SamplingParams(max_new_tokens=16), prompt, offsets=[offset])
        found.append(sample.response_ids.tolist())
    assert found[0] != found[1] != found[2] and found[1] == found[3]


@pytest.mark.parametrize('fixed_steps', [False, True])
def test_the_reason_of_a_turn_is_not_that_of_the_turn_before(fixed_steps):
    reasons: list[tuple[int, str]] = []

    class Recorded(Turns):
        def ended(self, i, turn):
            super().ended(i, turn)
            assert turn.finish_reason == ('eos' if int(turn.response_ids[-1]) in ends else 'length')
            reasons.append((i, turn.finish_reason))

    prompts, ends = prompts_of(), tuple(range(2, 14))
    sampling = SamplingParams(max_new_tokens=20, eos_token_ids=ends)
    engine = LocalEngine(max_batch_size=3, fixed_steps=fixed_steps)
    engine.begin(Actor(tiny_causal_lm('gpt2')))
    engine.converse(Call.of(prompts, sampling, seed=3, indices=range(len(prompts))), Recorded(len(prompts)))
    engine.end()
    of_each = [[reason for j, reason in reasons if j == i] for i in range(len(prompts))]
    assert all(len(turns) == 3 for turns in of_each)
    assert any('eos' in turns and turns[-1] == 'length' for turns in of_each)


# ---------------------------------------------------------------- rows of the cache when memory is limited

PROMPTS = [Prompt(ids=torch.arange(3, 5 + i % 4)) for i in range(12)]
SAMPLING = SamplingParams(max_new_tokens=7, eos_token_ids=(5, 9, 17))
PER_SLOT = 2 * 2 * 32 * 4  # keys and values, two layers, width 32, fp32
LONGEST = 5 + 7 - 1


class LimitedMemoryEngine(LocalEngine):
    def __init__(self, free: int, **kw) -> None:
        super().__init__(**kw)
        self.free, self.rows = free, []

    def free_bytes(self, device):
        held = self._cache.layers if self._cache else []
        return self.free - sum(layer.keys.nbytes + layer.values.nbytes for layer in held)

    def cache(self, rows, capacity):
        self.rows.append(rows)
        return super().cache(rows, capacity)


def token_ids(engine, calls: int = 1):
    engine.begin(Actor(tiny_causal_lm('gpt2')))
    samples = [engine.generate(Call.of(PROMPTS, SAMPLING, seed=3, indices=range(12))) for _ in range(calls)]
    engine.end()
    return [[s.response_ids.tolist() for s in call] for call in samples]


def test_bytes_by_hand():
    assert bytes_per_slot(Actor(tiny_causal_lm('gpt2'))) == PER_SLOT


@pytest.mark.parametrize('fixed', [False, True])
@pytest.mark.parametrize(('rows', 'most'), [(0, 1), (1, 1), (5, 5), (40, 12)])
def test_rows_are_what_fits_and_tokens_stay(rows, most, fixed):
    """Rows and slots of fixed steps are rounded up if they fit: 12 to 16 and 11 to 64."""
    engine = LimitedMemoryEngine(int(rows * PER_SLOT * (64 if fixed else LONGEST) / 0.6) + 1, fixed_steps=fixed)
    most = 16 if fixed and most == 12 else most
    assert token_ids(engine) == token_ids(LocalEngine())
    assert engine.rows == [most]


def test_a_cache_that_is_there_is_used_again_and_may_become_wider():
    engine = LimitedMemoryEngine(int(5 * PER_SLOT * LONGEST / 0.6) + 1)
    token_ids(engine, calls=2)
    assert engine.rows == [5, 5]


@pytest.mark.parametrize(('fixed', 'slots', 'long'), [(False, 300, 40), (True, 1500, 90)])
def test_a_cache_has_the_most_rows_and_the_most_slots_of_two_calls_only_if_both_fit(fixed, slots, long):
    """Twelve short prompts take 12 * 11 slots, or 16 * 64 in fixed steps; a long one 46, or 128 for each row."""
    sampling, actor = SamplingParams(max_new_tokens=7), Actor(tiny_causal_lm('gpt2'))
    limited = LimitedMemoryEngine(int(slots * PER_SLOT / 0.6) + 1, fixed_steps=fixed)
    for engine in (limited, LimitedMemoryEngine(1 << 30, fixed_steps=fixed)):
        engine.begin(actor)
        sizes = []
        for prompts in (PROMPTS, prompts_of((long,)), PROMPTS):
            samples = engine.generate(Call.of(prompts, sampling, seed=3, indices=range(len(prompts))))
            assert compare_samples(samples, collect(actor.model, prompts, sampling, seed=3)).explained
            cache = engine._cache
            sizes.append((cache.rows, cache.capacity))
            assert cache.nbytes == cache.rows * cache.capacity * PER_SLOT
            assert engine is not limited or cache.rows * cache.capacity <= slots
        assert engine.rows == ([16, 1, 16] if fixed else [12, 1, 12])
        # negative control: with enough memory the second cache has room for both
        assert (sizes[1] == sizes[2]) is (engine is not limited)
        engine.end()


@pytest.mark.parametrize(('refill_fraction', 'least'), [(0.125, 1), (0.5, 2), (0.7, 3)])
def test_prompts_enter_at_the_same_share_of_free_rows_where_memory_limits_them(refill_fraction, least, monkeypatch):
    """The share counts of the five rows that fit, and not of the 256 that may be decoded at once."""
    entered, live = [], []
    admit, decode = local_run.LocalRun.admit, local_run.LocalRun.decode

    def admitting(self, free):
        entered.append(min(free, len(self.queue)))
        admit(self, free)

    def decoding(self):
        if len(self.queue) >= least:
            live.append(len(self.row_sample))
        decode(self)

    monkeypatch.setattr(local_run.LocalRun, 'admit', admitting)
    monkeypatch.setattr(local_run.LocalRun, 'decode', decoding)
    engine = LimitedMemoryEngine(
        int(5 * PER_SLOT * LONGEST / 0.6) + 1, refill_fraction=refill_fraction, fixed_steps=False
    )
    sampling = SamplingParams(max_new_tokens=7, eos_token_ids=tuple(range(2, 14)))
    generated(engine, tiny_causal_lm('gpt2'), sampling, PROMPTS)
    assert engine.rows == [5] and entered[0] == 5 and sum(entered) == 12
    assert min(live) == 5 - least + 1


def test_a_cpu_has_no_bound_and_a_gpu_what_is_free_or_kept_by_torch(monkeypatch):
    for name, value in {'memory_reserved': 700, 'memory_allocated': 300, 'mem_get_info': (1000, 9000)}.items():
        monkeypatch.setattr(torch.cuda, name, lambda device, value=value: value)
    engine = LocalEngine()
    assert engine.free_bytes(torch.device('cpu')) is None
    assert engine.free_bytes(torch.device('cuda', 0)) == 1400


@pytest.mark.parametrize('fixed', [False, True])
@pytest.mark.parametrize(('rows', 'most'), [(0, 1), (3, 3), (40, 8)])
def test_rows_that_are_kept_between_turns_are_what_fits(rows, most, fixed):
    """The cache has twice as many rows as are decoded at once, if they fit."""

    sampling = SamplingParams(max_new_tokens=16, eos_token_ids=(5, 9, 17))
    longest = 64 if fixed else 5 + 16 - 1
    engine = LimitedMemoryEngine(int(rows * PER_SLOT * (longest + 1) / 0.6) + 1, fixed_steps=fixed, max_batch_size=4)
    found, wanted = (
        generated_turns(one, Actor(tiny_causal_lm('gpt2')), PROMPTS, sampling) for one in (engine, LocalEngine())
    )
    assert found == wanted
    assert engine.rows == [most]
