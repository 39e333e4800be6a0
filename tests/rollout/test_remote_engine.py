"""RemoteEngine with workers in this process: the same samples as a LocalEngine to the bit, also after deaths of
workers, and exact transfer of weights, also of streamed ones."""

from __future__ import annotations

import pickle
import warnings
import weakref
from typing import Any

import pytest
import torch
from in_process_workers import InProcessWorkers
from remote_calls import SAMPLING, actor_of, assert_same, call_of, generated, local, perturb, prompts
from spawned_workers import SpawnedWorkers

from chatgpt.nn import Actor, GPTActor
from chatgpt.nn.ilql import ILQLModel
from chatgpt.nn.nlpo import MaskedPolicy
from chatgpt.rollout import (
    RemoteEngine,
    SamplingParams,
    WeightsLost,
    compare_samples,
    connection,
    remote,
    wire,
)
from chatgpt.rollout.handshake import Handshake
from chatgpt.rollout.wire import ModelSpec, fill_buckets, fitted, plan_buckets, policy_tensors, write_bucket
from chatgpt.rollout.worker import RolloutWorker
from chatgpt.testing.fakes import FAMILIES, tiny_causal_lm, tiny_config
from chatgpt.types import Prompt


@pytest.mark.parametrize('family', FAMILIES)
def test_samples_are_those_of_the_local_engine_to_the_bit_and_follow_the_weights(family):
    actor = actor_of(family)
    with RemoteEngine(InProcessWorkers(), bucket_bytes=4096) as engine:
        first = generated(engine, actor, prompts(), groups=[i // 2 for i in range(12)])
        assert_same(first, local(actor, prompts(), groups=[i // 2 for i in range(12)]))
        perturb(actor)
        second = generated(engine, actor, prompts())
        assert_same(second, local(actor, prompts()))
    assert [s.response_ids.tolist() for s in first] != [
        s.response_ids.tolist() for s in second
    ]  # negative control: the weights matter
    assert {s.version for s in first} == {1} and {s.version for s in second} == {2}


def test_adapters_a_hydra_branch_and_bf16_reach_the_workers(with_16_bits):
    from chatgpt.strategies import NaiveStrategy

    config = tiny_config('gpt2')
    lora, hydra = {'lora_rank': 2}, {'num_layers_unfrozen': 1}
    for kwargs, precision in ((lora, 'fp32'), (hydra, 'fp32'), (lora, 'bf16')):
        torch.manual_seed(0)
        strategy = NaiveStrategy(precision=precision, device='cpu')
        actor = GPTActor(config=config, value_head=True, **kwargs)
        optimizer = torch.optim.SGD([p for p in actor.parameters() if p.requires_grad], lr=1.0)
        actor, _ = strategy.prepare((actor, optimizer))
        perturb(actor)
        with strategy.full_model(actor) as full, RemoteEngine(InProcessWorkers()) as engine:
            here = local(full, prompts())
            assert_same(generated(engine, full, prompts()), here)
            assert {t.dtype for t in policy_tensors(full.model).values()} == {strategy.numerics.dtype}
        if 'lora_rank' in kwargs and precision == 'fp32':  # outside of full_model the engine merges adapters itself
            with RemoteEngine(InProcessWorkers()) as engine:
                assert_same(generated(engine, actor, prompts()), here)
            assert not any(layer.merged for layer in actor.modules() if hasattr(layer, 'merged'))


def test_whole_requests_on_any_number_of_workers_are_the_same_bits():
    actor, parts = actor_of(), [prompts()[:5], prompts()[5:8], prompts()[8:]]
    want = [local(actor, part) for part in parts]
    for num_workers in (1, 2, 3):
        pool = InProcessWorkers(num_workers)
        with RemoteEngine(pool) as engine:
            engine.begin(actor)
            tickets = [engine.submit(call_of(part)) for part in parts]
            engine.end()
            for ticket, expected in reversed(list(zip(tickets, want, strict=True))):  # taken in any order
                assert_same(engine.take(ticket), expected)
        assert len({worker for worker, _ in pool.answered}) == num_workers


def test_chunks_decide_the_bits_and_not_the_workers_and_tokens_are_the_local_ones():
    actor = actor_of()
    runs = []
    for num_workers in (1, 3):
        with RemoteEngine(InProcessWorkers(num_workers), chunk_size=5) as engine:
            runs.append(generated(engine, actor, prompts()))
    assert_same(*runs)
    assert_same(runs[0][:5], local(actor, prompts()[:5]))  # a chunk is computed like a call of a local engine
    here = local(actor, prompts())
    assert compare_samples(runs[0], here).explained
    for a, b in zip(runs[0], here, strict=True):
        assert torch.allclose(a.logprobs, b.logprobs, atol=1e-5)


def test_a_request_under_way_keeps_its_weights_while_newer_ones_are_sent():
    actor = actor_of()
    old = local(actor, prompts())
    with RemoteEngine(InProcessWorkers(), chunk_size=4) as engine:
        engine.begin(actor)
        ticket = engine.submit(call_of(prompts()))
        engine.end()
        perturb(actor)
        new = generated(engine, actor, prompts())  # taken before the older request
        samples = engine.take(ticket)
        assert compare_samples(samples, old).equal and not compare_samples(new, old).equal
        assert {s.version for s in samples} == {1} and {s.version for s in new} == {2}
        with pytest.raises(ValueError, match='taken already'):
            engine.take(ticket)


def test_what_is_cancelled_is_never_generated():
    pool = InProcessWorkers()
    with RemoteEngine(pool) as engine:
        engine.begin(actor_of())
        first, second = (engine.submit(call_of(prompts(), first=i)) for i in (0, 100))
        engine.cancel(first)
        assert [s.index for s in engine.take(second)] == list(range(100, 112))
        assert generated(engine, actor_of(), []) == []
    assert [indices[0] for _, indices in pool.answered] == [100]


# ---------------------------------------------------------------------- deaths


def test_requests_of_a_dead_worker_are_answered_by_another_and_every_prompt_counted_once():
    actor = actor_of()
    pool = InProcessWorkers(2)
    with RemoteEngine(pool, chunk_size=2) as engine:
        want = generated(engine, actor, prompts())
        pool.answered.clear()
        pool.die_on = {6: 1}
        engine.begin(actor)
        ticket = engine.submit(call_of(prompts()))
        engine.end()
        perturb(actor)  # the weights that are asked for are in the other worker alone
        message = 'rollout worker 1 died .of sample 6.; another generates its 4 prompts again, from sample 6'
        with pytest.warns(UserWarning, match=message):
            got = engine.take(ticket)
        assert_same(got, want)
        assert sorted(i for _, indices in pool.answered for i in indices) == list(range(12))
        assert engine.num_replaced == 1 and engine.num_able == 1
        assert compare_samples(generated(engine, actor, prompts()), local(actor, prompts())).explained
        assert engine.num_able == 2 and {worker for worker, _ in pool.answered[-6:]} == {0, 1}


def test_where_all_workers_have_died_the_weights_are_lost_until_the_next_begin():
    actor, pool = actor_of(), InProcessWorkers(2)
    with RemoteEngine(pool, chunk_size=6) as engine:
        engine.begin(actor)
        tickets = [engine.submit(call_of(prompts(), first=first)) for first in (0, 12)]
        pool.kill(0), pool.kill(1)
        message = 'all rollout workers with weights 1 died before they had generated samples 0 to 5; begin again'
        with pytest.warns(UserWarning, match='died'), pytest.raises(WeightsLost, match=message):
            engine.take(tickets[0])
        for ticket in (tickets[1], engine.submit(call_of(prompts()))):
            with pytest.raises(WeightsLost):
                engine.take(ticket)
        assert compare_samples(generated(engine, actor, prompts()), local(actor, prompts())).explained


def test_a_death_between_two_phases_is_noticed_when_the_next_begins():
    actor, pool = actor_of(), InProcessWorkers(2)
    with RemoteEngine(pool, chunk_size=6) as engine:
        engine.begin(actor)
        ticket = engine.submit(call_of(prompts()))
        engine.end()
        pool.kill(0)
        with pytest.warns(UserWarning, match='worker 0 died'):
            engine.begin(actor)
        assert engine.num_replaced == 1
        assert [s.index for s in engine.take(ticket)] == list(range(12))


def test_a_worker_that_dies_of_the_same_prompts_for_ever_ends_the_run_by_name():
    pool = InProcessWorkers()
    pool.die_on = {3: 99}
    with RemoteEngine(pool, max_restarts=2) as engine, pytest.warns(UserWarning, match='died'):
        for _ in range(2):
            with pytest.raises(WeightsLost):
                generated(engine, actor_of(), prompts())
        with pytest.raises(RuntimeError, match='died 3 times in a row on samples 0 to 11'):
            generated(engine, actor_of(), prompts())


CALLS = [('start_loading', None), ('fetch_bucket', 0), ('fetch_bucket', 1), ('finish_loading', None)]


@pytest.mark.parametrize('num_workers', [1, 2])
@pytest.mark.parametrize(('method', 'number'), CALLS)
def test_a_worker_that_dies_in_the_middle_of_a_transfer_is_replaced_and_gets_the_weights(num_workers, method, number):
    actor, pool = actor_of(), InProcessWorkers(num_workers)
    with RemoteEngine(pool, bucket_bytes=16384, max_restarts=1, chunk_size=6) as engine:
        generated(engine, actor, prompts())
        perturb(actor)
        worker = num_workers - 1
        pool.die_at = {(worker, method, number): True}
        with pytest.warns(UserWarning, match=f'worker {worker} died .in {method}.; a new one takes its place'):
            engine.begin(actor)
        assert engine.num_able == num_workers and engine.num_replaced == 1
        assert compare_samples(engine.generate(call_of(prompts())), local(actor, prompts())).explained
        assert engine.num_able == num_workers, 'the new worker generates'


def test_a_worker_that_dies_whenever_it_is_given_weights_ends_the_run():
    class Weak(InProcessWorkers):
        def replace(self, worker: int) -> None:
            super().replace(worker)
            self.die_at = {(worker, 'start_loading', None): True}

    pool = Weak(2)
    pool.die_at = {(1, 'start_loading', None): True}
    with RemoteEngine(pool, max_restarts=1) as engine, pytest.warns(UserWarning, match='died'):
        with pytest.raises(RuntimeError, match='worker 1 died 2 times in a row while it was given weights'):
            engine.begin(actor_of())


@pytest.mark.parametrize('weight_transfer', ['store', 'tcp'])
def test_two_buckets_exist_beside_the_trainers_model_and_one_beside_a_workers(monkeypatch, weight_transfer):
    """Every bucket has the memory of `bucket_buffer`, or is a copy in the store."""
    size = 4096
    sent, received = Buffers(monkeypatch, wire), Buffers(monkeypatch, connection)
    actor, pool = actor_of(), InProcessWorkers(2)
    with RemoteEngine(pool, bucket_bytes=size, weight_transfer=weight_transfer) as engine:
        for _ in range(2):
            engine.begin(actor)
            live = (sent.live_bytes, received.live_bytes, pool.live_bytes)
            assert live == (0, 0, 0), 'nothing is kept after a version has been sent'
            engine.submit(call_of(prompts()))
            engine.end()
            perturb(actor)
    weights = sum(p.numel() * p.element_size() for p in actor.parameters())
    assert weights > 10 * size
    if weight_transfer == 'store':
        assert (sent.most_live_bytes, received.most_live_bytes) == (size, 0)
        assert pool.most_live_bytes == size and pool.num_puts > 20
    else:  # workers receive one after another
        assert (sent.most_live_bytes, received.most_live_bytes) == (size, size) and pool.num_puts == 0


class Buffers:
    """Counts the bytes of the buckets of a module that exist."""

    def __init__(self, monkeypatch: Any, module: Any) -> None:
        self.live_bytes = self.most_live_bytes = 0
        make = module.bucket_buffer

        def counted(num_bytes: int, **options: Any) -> torch.Tensor:
            buffer = make(num_bytes, **options)
            self.live_bytes += num_bytes
            self.most_live_bytes = max(self.most_live_bytes, self.live_bytes)
            weakref.finalize(buffer, self._free, num_bytes)
            return buffer

        monkeypatch.setattr(module, 'bucket_buffer', counted)

    def _free(self, num_bytes: int) -> None:
        self.live_bytes -= num_bytes


def test_what_a_worker_raises_is_raised_here_and_the_engine_goes_on():
    actor = actor_of()
    with torch.no_grad():
        actor.model.transformer.ln_f.weight[0] = float('nan')
    with RemoteEngine(InProcessWorkers()) as engine:
        with pytest.raises((FloatingPointError, ValueError), match='not finite|last hidden state'):
            generated(engine, actor, prompts())
        healthy = actor_of()
        assert_same(generated(engine, healthy, prompts()), local(healthy, prompts()))


# ---------------------------------------------------------------------- weights


NO_HANDSHAKE = Handshake(engine='', prompt_ids=(), tokens=(), logprobs=(), dtype=torch.float32)


@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize('bucket_bytes', [8, 1000, 1 << 20])
def test_weights_arrive_as_they_left(dtype, bucket_bytes):
    model = tiny_causal_lm('gpt2', hidden=8, layers=1, vocab_size=16, positions=8)  # its head is tied to its embeddings
    assert model.lm_head.weight is model.transformer.wte.weight
    with torch.no_grad():
        for p in model.parameters():
            p.data = p.to(dtype) if p.dim() > 1 else p.data  # two dtypes side by side
        model.transformer.wte.weight.view(-1)[:3] = torch.tensor([float('nan'), float('inf'), -0.0], dtype=dtype)
    tensors = policy_tensors(model)
    manifest = plan_buckets(tensors, version=3, handshake=NO_HANDSHAKE, bucket_bytes=bucket_bytes)
    spec = pickle.loads(pickle.dumps(ModelSpec.of(model)))
    other = spec.build()
    held = [bucket.clone() for bucket in fill_buckets(manifest, tensors)]
    assert all(bucket.dtype == torch.uint8 and bucket.dim() == 1 and len(bucket) <= bucket_bytes for bucket in held)
    named = fitted(manifest, other)
    for number, bucket in enumerate(held):
        write_bucket(manifest, number, bucket, named)
    whole = sum(p.numel() * p.element_size() for p in model.parameters())  # tied tensors once
    assert [len(bucket) for bucket in held] == [manifest.bucket_bytes(i) for i in range(len(manifest.buckets))]
    assert sum(len(bucket) for bucket in held) == whole
    assert other.lm_head.weight is other.transformer.wte.weight
    mine, theirs = dict(model.named_parameters()), dict(other.named_parameters())
    assert mine.keys() == theirs.keys()
    for name, p in mine.items():
        assert p.dtype == theirs[name].dtype
        assert torch.equal(p.contiguous().view(torch.uint8), theirs[name].view(torch.uint8)), name


def test_pieces_fill_buckets_without_gaps():
    tensors = {'a': torch.zeros(2, 3), 'b': torch.zeros(4), 'c': torch.zeros(3).bfloat16(), 'empty': torch.zeros(0)}
    manifest = plan_buckets(tensors, version=1, handshake=NO_HANDSHAKE, bucket_bytes=32)
    got = [[tuple(p) for p in pieces] for pieces in manifest.buckets]
    assert got == [[('a', 0, 6), ('b', 0, 2)], [('b', 2, 4)], [('c', 0, 3)]]


def test_a_weight_that_does_not_fit_is_named():
    model, other = tiny_causal_lm('gpt2'), tiny_causal_lm('gpt2', hidden=16)
    tensors = policy_tensors(model)
    with pytest.raises(ValueError, match='wte.weight is .64, 32., here .64, 16.'):
        fitted(plan_buckets(tensors, version=1, handshake=NO_HANDSHAKE), other)
    tensors.pop('transformer.ln_f.bias')
    manifest = plan_buckets(tensors | {'x': torch.zeros(1)}, version=1, handshake=NO_HANDSHAKE)
    with pytest.raises(ValueError, match="missing .'transformer.ln_f.bias'., unknown .'x'."):
        fitted(manifest, model)
    with torch.device('meta'):
        hollow = GPTActor(config=tiny_config('gpt2'))
    with pytest.raises(ValueError, match='full_model'), RemoteEngine(InProcessWorkers()) as engine:
        engine.begin(hollow)


def test_a_worker_that_refuses_a_version_ends_the_connections_of_the_ranks():
    model, other = tiny_causal_lm('gpt2'), tiny_causal_lm('gpt2', hidden=16)
    worker = RolloutWorker(ModelSpec.of(model), {})
    addresses = {0: worker.listen()}
    ranks = [connection.connect(addresses, rank)[0] for rank in range(2)]
    with pytest.raises(ValueError, match='wte.weight'):
        worker.receive(plan_buckets(policy_tensors(other), version=1, handshake=NO_HANDSHAKE), len(ranks))
    for rank in ranks:
        rank.settimeout(10.0)
        with pytest.raises(ConnectionResetError):
            rank.recv(1)
        rank.close()


# ---------------------------------------------------------------------- refusals


def test_a_policy_that_changes_the_logits_is_refused_by_name():
    ilql = ILQLModel(tiny_causal_lm('gpt2'))
    with RemoteEngine(InProcessWorkers()) as engine:
        with pytest.raises(ValueError, match="MaskedPolicy changes the model's logits"):
            engine.begin(MaskedPolicy(actor_of(), actor_of(), 0.9, 1.0))
        with ilql.decoding(1.0), pytest.raises(ValueError, match="ILQLModel changes the model's logits"):
            engine.begin(ilql)
        assert_same(generated(engine, ilql, prompts()), local(ilql, prompts()))  # without decoding it is a plain policy

    class Sharper(Actor):
        def head(self, hidden: torch.Tensor) -> torch.Tensor:
            return 2 * super().head(hidden)

    with pytest.raises(ValueError, match='Sharper changes'):
        RemoteEngine(InProcessWorkers()).begin(Sharper(tiny_causal_lm('gpt2')))


def test_the_callers_mistakes_are_found_before_any_work():
    pool = InProcessWorkers()
    engine = RemoteEngine(pool)
    with pytest.raises(ValueError, match='call begin'):
        engine.generate(call_of(prompts()))
    engine.begin(actor_of())
    for given, sampling, message in (
        (prompts(), SamplingParams(max_new_tokens=500), "past the model's 128 positions"),
        ([Prompt(ids=torch.tensor([], dtype=torch.int64))], SAMPLING, 'prompt 0 is empty'),
        (prompts(), SamplingParams(max_new_tokens=2, extra={'num_beams': 4}), 'num_beams=4'),
    ):
        with pytest.raises(ValueError, match=message):
            engine.submit(call_of(given, sampling))
    assert pool.most_queued == 0
    with pytest.raises(ValueError, match='of another configuration'):
        engine.begin(Actor(tiny_causal_lm('gpt2', hidden=16)))
    engine.close()
    engine.close()
    assert pool.closed
    with pytest.raises(ValueError, match='closed'):
        engine.begin(actor_of())
    for name, value in (('chunk_size', 0), ('bucket_bytes', 1), ('max_restarts', -1)):
        with pytest.raises(ValueError, match=name):
            RemoteEngine(InProcessWorkers(), **{name: value})
    with pytest.raises(ValueError, match='max_batch_size'):
        RemoteEngine(InProcessWorkers(), engine_options={'max_batch_size': 0})


def test_idle_workers_are_reported_once():
    def idle_warnings(num_workers: int, chunk_size: int | None) -> list[str]:
        with RemoteEngine(InProcessWorkers(num_workers), chunk_size=chunk_size) as engine:
            with warnings.catch_warnings(record=True) as seen:
                warnings.simplefilter('always')
                for _ in range(6):
                    generated(engine, actor_of(), prompts(3))
        return [str(w.message) for w in seen]

    (message,) = idle_warnings(3, 2)
    assert 'only 2 of 3 rollout workers had something to do' in message
    assert idle_warnings(3, 1) == idle_warnings(1, None) == []


def unreachable(*_: Any) -> Any:
    raise OSError('no route to host')


def test_where_no_connection_can_be_made_weights_go_through_the_store(monkeypatch):
    actor, workers = actor_of(), InProcessWorkers(2)
    workers.beside = True
    with RemoteEngine(workers) as engine:
        assert_same(generated(engine, actor, prompts()), local(actor, prompts()))
        assert engine.ways == ['tcp'] * 2
        perturb(actor)
        monkeypatch.setattr(remote, 'connect', unreachable)
        with pytest.warns(UserWarning, match='rank 0 cannot connect to rollout workers .no route.*through the store'):
            assert_same(generated(engine, actor, prompts()), local(actor, prompts()))
        assert engine.ways == ['store'] * 2


@pytest.mark.system
def test_a_process_that_is_killed_while_it_receives_is_replaced_and_the_others_go_on(monkeypatch):
    """Killed before, between and after its buckets, eight times."""
    actor, workers, fill, kills = actor_of(), SpawnedWorkers(2, spawn=True), remote.fill_buckets, []

    def killing(*given: Any) -> Any:
        for number, bucket in enumerate(fill(*given)):
            if number == at and not kills:
                kills.append(number)
                (process,) = workers._workers[at % 2][0]._processes.values()
                process.kill()
                process.join()
            yield bucket

    with RemoteEngine(workers, bucket_bytes=4096) as engine:
        engine.begin(actor)
        monkeypatch.setattr(remote, 'fill_buckets', killing)
        for replaced, at in enumerate((0, 1, 2, 3, 10, 11, 20, 21), start=1):
            kills.clear()
            perturb(actor)
            with pytest.warns(UserWarning, match='died .its process ended.; a new one takes its place'):
                engine.begin(actor)
            assert engine.num_replaced == replaced and engine.num_able == 2 and kills == [at]
            tickets = [engine.submit(call_of(prompts())) for _ in range(2)]
            for ticket in tickets:
                assert_same(engine.take(ticket), local(actor, prompts()))


# ---------------------------------------------------------------- full weights that do not fit on the device
