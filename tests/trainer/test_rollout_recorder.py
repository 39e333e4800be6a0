"""Recorded sequences of a phase: their choice, the numbers and texts of their tokens, on one rank as on two; and the
folder."""

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
from tiny_runs import fit, ppo, sft, vowels, weights

from chatgpt.launch import demo_world
from chatgpt.monitor.run_folder import rollouts
from chatgpt.monitor.run_folder.rollouts import PER_TOKEN, read_rollouts, recorded_phases
from chatgpt.strategies import DDPStrategy, FSDPStrategy
from chatgpt.testing import byte_tokenizer, char_tokenizer
from chatgpt.testing.fakes import tiny_config
from chatgpt.testing.processes import run_distributed
from chatgpt.trainer.callbacks import Callback, RolloutRecorder
from chatgpt.trainer.callbacks.rollouts import first_groups
from chatgpt.trainer.callbacks.token_texts import token_texts
from chatgpt.trainer.losses import collate_experience


def make(run_dir: Path | None, strategy: Any = None, **settings: Any) -> Any:
    config = tiny_config('gpt2', vocab_size=259, positions=48)
    given = {'experience_batch_size': 3, 'train_batch_size': 6, 'max_new_tokens': 5, 'num_samples_per_prompt': 2}
    given |= {'lr': 3e-3, 'critic': not settings.get('value_head')}
    return ppo(strategy, config=config, tokenizer=byte_tokenizer(), run_dir=run_dir, **given | settings)


class Kept(Callback):
    """Records the actor before it learns in each phase."""

    def __init__(self) -> None:
        self.actors: list[Any] = []

    def on_make_experience_end(self, trainer: Any, experiences: list[Any]) -> None:
        self.actors.append(deepcopy(trainer.strategy.unwrap(trainer.actor)))


def entropies_by_hand(actor: Any, e: Any) -> list[float]:
    """Returns −Σ p log p before each action, from the logits of the wrapped model."""
    ids = torch.cat([e.prompt_ids, e.response_ids])[None]
    with torch.no_grad():
        p = actor.model(ids).logits[0, len(e.prompt_ids) - 1 : -1].double().softmax(dim=-1)
    return (-(p * p.log()).sum(dim=-1)).tolist()


def test_the_first_groups_whole_as_long_as_they_fit():
    given = [experience(i, [3], [4], 0.0) for i in range(9)]
    for e in given:
        e.group = e.index // 3
    # the beginning of a larger group
    for num, count in ((100, 9), (9, 9), (8, 6), (6, 6), (5, 3), (3, 3), (2, 2)):
        assert [e.index for e in first_groups(given[::-1], num)] == list(range(count))
    assert first_groups([], 4) == []


@pytest.mark.parametrize('kind', [{}, {'value_head': True}, {'num_layers_unfrozen': 1}, {'lora_rank': 2}], ids=str)
def test_arrays_are_those_of_the_experience_and_entropy_is_the_policys(tmp_path, kind):
    kept = Kept()
    # One train batch and one epoch, so that the forward uses the copied policy; micro-batches of two or three
    # sequences.
    trainer = fit(make(tmp_path, callbacks=[kept], max_tokens_per_batch=40, **kind), 2)
    assert recorded_phases(tmp_path) == [1, 2]
    for phase, (experiences, actor) in enumerate(zip(trainer.log.experiences, kept.actors, strict=True), start=1):
        rows = read_rollouts(tmp_path, [phase])
        assert [r['index'] for r in rows] == [e.index for e in experiences] and len(rows) == 6
        for row, e in zip(rows, experiences, strict=True):
            for name in PER_TOKEN:
                assert row[name] == getattr(e, name).tolist(), name
            assert row['entropy'] == pytest.approx(entropies_by_hand(actor, e), rel=1e-5)
            assert (row['phase'], row['group'], row['version']) == (phase, e.group, phase - 1)
            assert (row['token_ids'], row['prompt_ids']) == (e.response_ids.tolist(), e.prompt_ids.tolist())
            assert (row['prompt'], row['response']) == (e.prompt_text, e.response_text)
            assert row['score'] == vowels([], [e.response_text])[0] and row['finish_reason'] == e.finish_reason
            kl = sum(a - b for a, b in zip(row['old_logprobs'], row['ref_logprobs'], strict=True))
            assert row['kl'] == pytest.approx(kl, abs=1e-6)
            assert ''.join(row['prompt_tokens']) == e.prompt_text
            assert len(row['tokens']) == len(row['mask']) == e.num_actions


def test_entropy_is_null_where_nothing_was_learned_from_a_sequence(tmp_path):
    class Unlike(Callback):
        def on_make_experience_end(self, trainer: Any, experiences: list[Any]) -> None:
            for e in experiences[:6]:
                e.response_mask = torch.zeros_like(e.response_mask)

    # The buffer keeps the newest six of twelve.
    fit(make(tmp_path, callbacks=[Unlike()], experience_batch_size=6, buffer_limit=6), 1)
    rows = read_rollouts(tmp_path)
    assert [r['entropy'] is None for r in rows] == [True] * 6 + [False] * 6
    assert not any(any(r['mask']) for r in rows[:6])


def test_entropy_is_there_if_the_critic_learns_apart(tmp_path):
    fit(make(tmp_path, critic_epochs=1), 1)
    assert all(len(row['entropy']) == len(row['token_ids']) for row in read_rollouts(tmp_path))


def recorded(folder: Path, strategy: Any = None) -> None:
    fit(make(folder, strategy, experience_batch_size=4, max_tokens_per_batch=16, max_epochs=2), 1)


def on_ranks(folder: str) -> None:
    for kind in (DDPStrategy, FSDPStrategy):
        with kind(seed=3) as strategy:
            recorded(Path(folder, kind.__name__), strategy)


def test_two_ranks_record_what_one_does(tmp_path):
    recorded(tmp_path / 'one')
    run_distributed(on_ranks, 2, str(tmp_path), init_group=True)
    one = read_rollouts(tmp_path / 'one')
    assert len(one) == 8
    for kind in ('DDPStrategy', 'FSDPStrategy'):
        for a, b in zip(one, read_rollouts(tmp_path / kind), strict=True):
            assert len(a['entropy']) == len(a['token_ids'])
            for name in a:
                if name in (*PER_TOKEN, 'entropy', 'kl', 'score', 'shaped_score'):
                    assert a[name] == pytest.approx(b[name], rel=1e-4, abs=2e-5), name
                else:
                    assert a[name] == b[name], name


def test_a_dummy_batch_belongs_to_no_sequence(tmp_path):
    """Sequence 0 has the index of a dummy."""
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


def test_recording_changes_no_number(tmp_path):
    runs = [
        fit(make(tmp_path / name, value_head=True, max_epochs=2, callbacks=callbacks), 2)
        for name, callbacks in (('yes', []), ('no', [RolloutRecorder(num_sequences=0)]))
    ]
    assert recorded_phases(tmp_path / 'yes') == [1, 2] and recorded_phases(tmp_path / 'no') == []
    assert runs[0].log.phases == runs[1].log.phases and torch.equal(weights(runs[0]), weights(runs[1]))


def test_a_resume_removes_later_phases_and_continues(tmp_path):
    trainer = fit(make(tmp_path), 1)
    checkpoint = trainer.save_checkpoint()
    fit(trainer, 2)
    assert recorded_phases(tmp_path) == [1, 2, 3]
    second = read_rollouts(tmp_path, [2])
    again = make(tmp_path)
    again.load_checkpoint(checkpoint)
    fit(again, 2)
    assert recorded_phases(tmp_path) == [1, 2]
    assert read_rollouts(tmp_path, [2]) == second
    fit(make(tmp_path), 1)
    assert recorded_phases(tmp_path) == [1]
    assert recorded_phases(tmp_path / 'rollouts.previous') == [1, 2]


def test_default_recorder(tmp_path):
    own = RolloutRecorder(every=5)
    for trainer, expected in ((make(None), 0), (make(tmp_path), 1), (make(tmp_path, callbacks=[own]), 1)):
        found = [c for c in trainer.callbacks if isinstance(c, RolloutRecorder)]
        assert len(found) == expected
    assert found == [own]
    sft(run_dir=tmp_path, callbacks=[RolloutRecorder()], max_steps=1).fit()
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
def test_a_tokenizer_that_fails_does_not_end_a_run(tmp_path, text):
    class Odd:
        def decode(self, ids, skip_special_tokens):
            if text is None:
                raise IndexError('no such token')
            return text * len(ids)

    trainer = FakeTrainer([RolloutRecorder()], tmp_path, num_phases=1)
    trainer.tokenizer = Odd()
    with pytest.warns(UserWarning, match=r'rollouts: phase 1 could not be recorded \((IndexError|UnicodeEncodeErr)'):
        trainer.fit([{}])
    assert recorded_phases(tmp_path) == []


MODELS = Path(__file__).resolve().parents[2].parent / 'shared' / 'models'
TEXT = 'A café,\n 😀 مر!'


def shared(name: str) -> Any:
    from transformers import AutoTokenizer

    if not (MODELS / name).is_dir():
        pytest.skip(f'needs ../shared/models/{name}')
    return AutoTokenizer.from_pretrained(MODELS / name)


def test_gpt2():
    tokenizer = shared('gpt2_tokenizer')
    ids = [*tokenizer(TEXT)['input_ids'], 50256]
    pieces = token_texts(tokenizer, ids)
    assert pieces == ['A', ' café', ',', '\n', ' ', '😀', ' م', 'ر', '!', '<|endoftext|>']
    assert ''.join(pieces) == TEXT + '<|endoftext|>'
    assert [tokenizer.decode([i]) for i in ids[4:6]] == [' �', '�']  # neither is a character


def test_sentencepiece():
    tokenizer = shared('stories260K')
    ids = tokenizer(TEXT)['input_ids']
    pieces = token_texts(tokenizer, ids)
    assert ''.join(pieces) == '<s> ' + TEXT
    assert pieces[:7] == ['<s>', ' ', 'A', ' c', 'a', 'f', 'é']
    start = pieces.index('😀')
    assert pieces[start - 3 : start] == ['', '', ''] and pieces[start - 4] == ' '
    assert token_texts(tokenizer, tokenizer('it ran')['input_ids'][1:])[0] == ' it'  # after a prompt it stands apart


def test_bytes():
    tokenizer = byte_tokenizer()
    pieces = token_texts(tokenizer, [*'é😀a'.encode(), tokenizer.eos_token_id])
    assert pieces == ['', 'é', '', '', '', '😀', 'a', tokenizer.eos_token]
    # Bytes that are no UTF-8: half a character before a letter, and at the end.
    assert token_texts(tokenizer, [0xC3, 0x61, 0xF0, 0x9F]) == ['', '�a', '', '�']


def test_tokenizers_with_rules_of_their_own():
    words = demo_world.demo_tokenizer()
    ids = words('the cat sat .')['input_ids']
    assert ''.join(token_texts(words, ids)) == words.decode(ids)
    letters = char_tokenizer()
    assert token_texts(letters, letters('ab a')['input_ids']) == ['a', 'b', ' ', 'a']


def test_word_pieces():
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    inner = Tokenizer(models.WordPiece({'[UNK]': 0, 'walk': 1, '##ed': 2, 'home': 3}, unk_token='[UNK]'))
    inner.decoder = decoders.WordPiece()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, unk_token='[UNK]')
    assert token_texts(tokenizer, [1, 2, 3, 0]) == ['walk', 'ed', ' home', ' [UNK]']
    assert token_texts(tokenizer, [3, 1]) == ['home', ' walk']


def test_characters_of_several_tokens_under_a_tokenizer_that_only_decodes():
    tokenizer = SimpleNamespace(decode=lambda ids, skip_special_tokens: bytes(ids).decode('utf-8', 'replace'))
    assert token_texts(tokenizer, [*'a😀éb'.encode()]) == ['a', '', '', '', '😀', '', 'é', 'b']
    assert token_texts(tokenizer, [0x61, 0xF0]) == ['a', '�']


def test_without_a_tokenizer_or_tokens():
    assert token_texts(None, [5, 17]) == ['5', ' 17']
    assert token_texts(byte_tokenizer(), []) == token_texts(demo_world.demo_tokenizer(), []) == []
