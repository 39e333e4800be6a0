"""What is recorded of a phase: which sequences, the numbers of their tokens, on one rank as on two; and the folder."""

from __future__ import annotations

import errno
import warnings
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_trainer import FakeTrainer, experience
from phase_log import Log

from chatgpt.monitor.run_folder import rollouts
from chatgpt.monitor.run_folder.rollouts import PER_TOKEN, read_rollouts, recorded_phases
from chatgpt.nn import GPTActor, GPTCritic
from chatgpt.strategies import DDPStrategy, FSDPStrategy, NaiveStrategy
from chatgpt.testing import byte_tokenizer
from chatgpt.testing.fakes import tiny_config
from chatgpt.testing.processes import run_distributed
from chatgpt.trainer import PPOTrainer, SFTTrainer
from chatgpt.trainer.callbacks import Callback, ProgressBar, RolloutRecorder
from chatgpt.trainer.callbacks.rollouts import first_groups
from chatgpt.trainer.losses import collate_experience
from chatgpt.types import Sequence

PROMPTS = [f'a {word}' for word in 'one two three four five six'.split()]


def vowels(prompts: list[str], responses: list[str]) -> list[float]:
    return [float(sum(c in 'aeiou' for c in r)) for r in responses]


def make(strategy: Any, run_dir: Path | None, more: Any = (), kind: str = 'critic', **settings: Any) -> PPOTrainer:
    """A small PPO run on bytes. `kind`: critic, shared trunk, hydra, lora or nlpo."""
    torch.manual_seed(3)
    config = tiny_config('gpt2', vocab_size=259, positions=48)
    options: dict[str, Any] = {'hydra': {'num_layers_unfrozen': 1}, 'lora': {'lora_rank': 2}}.get(kind, {})
    actor = GPTActor(config=deepcopy(config), value_head=True if kind == 'shared' else None, **options)
    initial = None if options else strategy.prepare(deepcopy(GPTActor(config=deepcopy(config))))
    if kind == 'nlpo':
        settings |= {'mask_model': strategy.prepare(deepcopy(actor)), 'nlpo_top_p': 0.9}
    trained = [p for p in actor.parameters() if p.requires_grad]
    actor, optim = strategy.prepare((actor, torch.optim.AdamW(trained, lr=3e-3, eps=1e-5)))
    critic = critic_optim = None
    if kind != 'shared':
        critic = GPTCritic(config=deepcopy(config))
        critic, critic_optim = strategy.prepare((critic, torch.optim.AdamW(critic.parameters(), lr=3e-3, eps=1e-5)))
    given = {'experience_batch_size': 3, 'train_batch_size': 6, 'max_new_tokens': 5, 'num_samples_per_prompt': 2}
    return PPOTrainer(
        strategy,
        actor,
        critic,
        vowels,
        initial,
        optim,
        critic_optim,
        tokenizer=byte_tokenizer(),
        run_dir=run_dir,
        callbacks=[ProgressBar(enabled=False), *more],
        **given | settings,
    )


def fit(trainer: PPOTrainer, phases: int) -> None:
    trainer.fit(PROMPTS, num_episodes=1, max_timesteps=phases, update_timesteps=1)


class Kept(Callback):
    """The experiences of every phase, and the actor as it was before it learned from them."""

    def __init__(self) -> None:
        self.phases: list[list[Any]] = []
        self.actors: list[Any] = []

    def on_make_experience_end(self, trainer: Any, experiences: list[Any]) -> None:
        self.phases.append(experiences)
        self.actors.append(deepcopy(trainer.strategy.unwrap(trainer.actor)))


def entropies_by_hand(actor: Any, e: Any) -> list[float]:
    """−Σ p log p before each action, from the logits of the model below the actor."""
    ids = torch.cat([e.prompt_ids, e.response_ids])[None]
    with torch.no_grad():
        logits = actor.model(ids).logits[0].double()
    found = []
    for at in range(len(e.prompt_ids) - 1, ids.shape[1] - 1):
        p = torch.softmax(logits[at], dim=-1)
        found.append(float(-(p * p.log()).sum()))
    return found


# ---------------------------------------------------------------------- which


def test_the_first_groups_whole_as_long_as_they_fit():
    groups = [0, 0, 0, 1, 1, 1, 2, 2, 2]
    given = [experience(i, [3], [4], 0.0) for i in range(9)]
    for e, group in zip(given, groups, strict=True):
        e.group = group
    given = given[::-1]

    def chosen(num: int) -> list[int]:
        return [e.index for e in first_groups(given, num)]

    assert chosen(9) == chosen(100) == list(range(9))
    assert chosen(8) == chosen(6) == [0, 1, 2, 3, 4, 5]
    assert chosen(5) == chosen(3) == [0, 1, 2]
    assert chosen(2) == [0, 1]  # of a group that is larger, its beginning
    assert first_groups([], 4) == []


# ---------------------------------------------------------------------- numbers


@pytest.mark.parametrize('kind', ['critic', 'shared', 'hydra', 'lora'])
def test_arrays_are_those_of_the_experience_and_entropy_is_the_policys(tmp_path, kind):
    kept = Kept()
    # One train batch and one epoch, so that the policy of the forward is the one that was copied; micro-batches of two
    # or three sequences.
    trainer = make(NaiveStrategy(seed=3), tmp_path, [kept], kind, max_tokens_per_batch=40)
    fit(trainer, 2)
    assert recorded_phases(tmp_path) == [1, 2]
    for phase in (1, 2):
        rows = read_rollouts(tmp_path, [phase])
        assert [r['index'] for r in rows] == [e.index for e in kept.phases[phase - 1]] and len(rows) == 6
        for row, e in zip(rows, kept.phases[phase - 1], strict=True):
            for name in PER_TOKEN:
                assert row[name] == getattr(e, name).tolist(), name
            assert row['entropy'] == pytest.approx(entropies_by_hand(kept.actors[phase - 1], e), rel=1e-5)
            assert (row['phase'], row['group'], row['version']) == (phase, e.group, phase - 1)
            assert (row['token_ids'], row['prompt_ids']) == (e.response_ids.tolist(), e.prompt_ids.tolist())
            assert (row['prompt'], row['response']) == (e.prompt_text, e.response_text)
            assert row['score'] == vowels([], [e.response_text])[0] and row['finish_reason'] == e.finish_reason
            kl = sum(a - b for a, b in zip(row['old_logprobs'], row['ref_logprobs'], strict=True))
            assert row['kl'] == pytest.approx(kl, abs=1e-6)
            assert ''.join(row['prompt_tokens']) == e.prompt_text
            assert len(row['tokens']) == len(row['mask']) == e.num_actions


def test_nlpo_has_the_entropy_of_the_masked_policy(tmp_path):
    trainer = make(NaiveStrategy(seed=3), tmp_path, kind='nlpo')
    fit(trainer, 1)
    plain = make(NaiveStrategy(seed=3), tmp_path / 'plain')
    fit(plain, 1)
    masked, whole = ([x for r in read_rollouts(p) for x in r['entropy']] for p in (tmp_path, tmp_path / 'plain'))
    # Of an untrained policy, nine tenths of the mass are about nine tenths of the tokens.
    assert max(masked) < min(whole)


def test_entropy_is_null_where_nothing_was_learned_from_a_sequence(tmp_path):
    class Unlike(Callback):
        def on_make_experience_end(self, trainer: Any, experiences: list[Any]) -> None:
            for e in experiences[:6]:
                e.response_mask = torch.zeros_like(e.response_mask)

    # The buffer keeps the newest six of twelve.
    trainer = make(NaiveStrategy(seed=3), tmp_path, [Unlike()], experience_batch_size=6, buffer_limit=6)
    fit(trainer, 1)
    rows = read_rollouts(tmp_path)
    assert [r['entropy'] is None for r in rows] == [True] * 6 + [False] * 6
    assert not any(any(r['mask']) for r in rows[:6])


def recorded_on_ranks(strategy: Any, folder: str) -> None:
    trainer = make(strategy, Path(folder), experience_batch_size=4, max_tokens_per_batch=16, max_epochs=2)
    fit(trainer, 2)


def on_ranks(kind: str, folder: str) -> None:
    strategy = {'ddp': DDPStrategy, 'fsdp': FSDPStrategy}[kind](seed=3)
    with strategy:
        recorded_on_ranks(strategy, folder)


@pytest.mark.parametrize('kind', ['ddp', 'fsdp'])
def test_two_ranks_record_what_one_does(tmp_path, kind):
    recorded_on_ranks(NaiveStrategy(seed=3), str(tmp_path / 'one'))
    run_distributed(on_ranks, 2, kind, str(tmp_path / 'two'))
    one, two = read_rollouts(tmp_path / 'one'), read_rollouts(tmp_path / 'two')
    assert len(one) == len(two) == 16
    for a, b in zip(one, two, strict=True):
        assert len(a['entropy']) == len(a['token_ids'])
        for name in a:
            if name in (*PER_TOKEN, 'entropy', 'kl', 'score', 'shaped_score'):
                assert a[name] == pytest.approx(b[name], rel=1e-4, abs=2e-5), name
            else:
                assert a[name] == b[name], name


def test_a_dummy_batch_belongs_to_no_sequence(tmp_path):
    """Sequence 0 has an index like that of a dummy."""
    given = [experience(0, [3], [4, 5], 1.0), experience(1, [3], [6], 2.0)]
    recorder = RolloutRecorder()
    trainer = FakeTrainer([recorder], tmp_path)
    trainer.last_experiences = given
    recorder.on_learn_epoch_start(trainer, 0)
    for records, entropy in (([], [9.0]), ([given[1]], [0.5]), ([], [8.0]), ([given[0]], [0.25, 0.75])):
        batch = collate_experience(records, {})
        recorder.on_policy_output(trainer, batch, SimpleNamespace(entropy=torch.tensor(entropy, requires_grad=True)))
    recorder.on_learn_epoch_end(trainer, 0)
    recorder.on_policy_output(trainer, batch, SimpleNamespace(entropy=torch.tensor([7.0, 7.0])))  # a later epoch
    recorder.on_phase_end(trainer, 1, {})
    assert [r['entropy'] for r in read_rollouts(tmp_path)] == [[0.25, 0.75], [0.5]]


@pytest.mark.parametrize('kind', ['critic', 'shared'])
def test_recording_changes_no_number(tmp_path, kind):
    def run(*given: Any) -> tuple[list[dict[str, float]], torch.Tensor]:
        log = Log()
        trainer = make(NaiveStrategy(seed=3), tmp_path / str(len(given)), [log, *given], kind, max_epochs=2)
        fit(trainer, 3)
        weights = [p.detach().flatten() for m in trainer.models().values() for p in m.parameters()]
        metrics = [{k: v for k, v in m.items() if not k.startswith(('perf/', 'time'))} for m in log.phases]
        return metrics, torch.cat(weights)

    (recorded, weights), (plain, others) = run(), run(RolloutRecorder(num_sequences=0))
    assert recorded_phases(tmp_path / '0') == [1, 2, 3] and recorded_phases(tmp_path / '1') == []
    assert recorded == plain and torch.equal(weights, others)


# ---------------------------------------------------------------------- the folder


def test_a_resume_removes_what_came_after_and_goes_on(tmp_path):
    trainer = make(NaiveStrategy(seed=3), tmp_path)
    fit(trainer, 2)
    checkpoint = trainer.save_checkpoint()
    fit(trainer, 2)
    assert recorded_phases(tmp_path) == [1, 2, 3, 4]
    third = read_rollouts(tmp_path, [3])
    again = make(NaiveStrategy(seed=3), tmp_path)
    again.load_checkpoint(checkpoint)
    again.fit(PROMPTS, num_episodes=1, max_timesteps=3, update_timesteps=1)
    assert recorded_phases(tmp_path) == [1, 2, 3]
    assert read_rollouts(tmp_path, [3]) == third
    fit(make(NaiveStrategy(seed=4), tmp_path), 1)
    assert recorded_phases(tmp_path) == [1]
    assert recorded_phases(tmp_path / 'rollouts.previous') == [1, 2, 3]


def test_who_records(tmp_path):
    def recorders(trainer: Any) -> list[RolloutRecorder]:
        return [c for c in trainer.callbacks if isinstance(c, RolloutRecorder)]

    assert len(recorders(make(NaiveStrategy(), tmp_path))) == 1
    assert recorders(make(NaiveStrategy(), None)) == []
    own = RolloutRecorder(every=5)
    assert recorders(make(NaiveStrategy(), tmp_path, [own])) == [own]
    fit(make(NaiveStrategy(), tmp_path, [RolloutRecorder(num_sequences=0)]), 1)
    actor = GPTActor(config=tiny_config('gpt2', vocab_size=16))
    optim = torch.optim.SGD(actor.parameters(), lr=0.1)
    data = [
        Sequence(
            prompt_ids=torch.tensor([1]), response_ids=torch.tensor([2]), response_mask=torch.ones(1, dtype=torch.bool)
        )
    ]
    SFTTrainer('naive', actor, optim, data, run_dir=tmp_path, callbacks=[RolloutRecorder()]).fit()
    assert not (tmp_path / 'rollouts').exists()


def test_the_folder_is_thinned_out_over_its_limit(tmp_path):
    FakeTrainer([RolloutRecorder(max_phases=4)], tmp_path, num_phases=6).fit([{}] * 6)
    assert recorded_phases(tmp_path) == [1, 4, 5, 6]  # at the fifth phase: 1, 4, 5


def test_a_full_disk_is_a_warning(tmp_path, monkeypatch):
    def full(*_: Any) -> Path:
        raise OSError(errno.ENOSPC, 'No space left on device')

    trainer = FakeTrainer([RolloutRecorder()], tmp_path, num_phases=3)
    trainer.fit([{}])
    with monkeypatch.context() as patched:
        patched.setattr(rollouts, 'write_rollouts', full)
        with pytest.warns(UserWarning, match=r'rollouts: phase 2 could not be recorded \(No space left on device\)'):
            trainer.run_phase({})
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        trainer.run_phase({})
    assert recorded_phases(tmp_path) == [1, 3]


def test_texts_and_columns_that_are_no_utf8_or_json_do_not_end_a_run(tmp_path):
    trainer = FakeTrainer([RolloutRecorder()], tmp_path, num_phases=1)
    odd = {'prompt_text': 'a \ud83d b', 'columns': {'x': {1, 2}, 'y': float('nan'), 'z': torch.tensor([1.5])}}
    trainer.last_experiences = [experience(0, [3], [4], float('nan'), **odd)]
    trainer.fit([{}])
    (row,) = read_rollouts(tmp_path)
    assert row['prompt'] == 'a ? b' and row['columns'] == '{"x": "{1, 2}", "y": null, "z": [1.5]}'


@pytest.mark.parametrize('text', ['\ud83d', None])
def test_a_tokenizer_with_its_own_mind_does_not_end_a_run(tmp_path, text):
    class Odd:
        def decode(self, ids, skip_special_tokens):
            if text is None:
                raise IndexError('no such token')
            return text * len(ids)

    trainer = FakeTrainer([RolloutRecorder()], tmp_path, num_phases=1)
    trainer.tokenizer = Odd()
    with pytest.warns(
        UserWarning, match=r'rollouts: phase 1 could not be recorded \((IndexError|UnicodeEncodeError): '
    ):
        trainer.fit([{}])
    assert recorded_phases(tmp_path) == []
