"""Checkpoint folders: tensors are read back in any ranges; damaged, partial and malicious folders are refused by
name."""

from __future__ import annotations

import json
import os
import random
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from safetensors import safe_open

from chatgpt.strategies.checkpoint import (
    CheckpointError,
    CheckpointReader,
    CheckpointWriter,
    Piece,
    pieces_of,
    write_checkpoint,
)
from chatgpt.strategies.checkpoint.layout import coverage_fault, with_checksum

TENSORS = {
    'weight': torch.arange(35, dtype=torch.float32).view(5, 7),
    'half': torch.arange(12, dtype=torch.bfloat16).view(2, 2, 3),
    'step': torch.tensor(3.0),
    'mask': torch.tensor([True, False, True]),
    'ids': torch.arange(100, 140),
}


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / 'step-00000004'
    write_checkpoint(path, {'actor/': pieces_of(TENSORS)}, meta={'step': 4}, state={'kl': 0.1})
    return path


def edit(folder, change):
    """Changes the manifest and writes it back with a correct checksum."""
    manifest = json.loads((folder / 'manifest.json').read_text())
    change(manifest)
    (folder / 'manifest.json').write_text(json.dumps(with_checksum(manifest)))


# --- reading


def test_whole_tensors_meta_and_state(folder):
    with CheckpointReader(folder) as reader:
        actor = reader.sub('actor/')
        assert actor.names() == set(TENSORS) and reader.names() == {f'actor/{n}' for n in TENSORS}
        for name, tensor in TENSORS.items():
            assert actor.shape(name) == tuple(tensor.shape) and reader.dtype(f'actor/{name}') == tensor.dtype
            assert torch.equal(actor.read(name, 0, tensor.numel()).view(tensor.shape), tensor)
        assert reader.json() == {'kl': 0.1} and reader.meta == {'step': 4}


@pytest.mark.parametrize('max_file_bytes', [1, 16, 50, 1 << 20])
def test_any_range_of_any_cut(tmp_path, max_file_bytes):
    """Pieces are cut anywhere, in any order, in files of any size; every range reads the same."""
    values = torch.arange(23, dtype=torch.float32)
    cuts = [0, 1, 5, 6, 14, 23]
    pieces = [Piece('x', (23,), a, b, values[a:b]) for a, b in zip(cuts, cuts[1:], strict=False)]
    random.Random(0).shuffle(pieces)
    write_checkpoint(tmp_path / 'c', {'': pieces}, max_file_bytes=max_file_bytes)
    reader = CheckpointReader(tmp_path / 'c')
    for start in range(24):
        for stop in range(start, 24):
            assert reader.read('x', start, stop).tolist() == list(range(start, stop))
    with pytest.raises(ValueError, match=r'\[3, 24\) is not within the 23 elements'):
        reader.read('x', 3, 24)
    for name, entry in reader.manifest.files.items():
        with safe_open(tmp_path / 'c' / name, 'pt') as file:
            data = sum(len(file.get_tensor(key)) * 4 for key in file.keys())
        assert data <= max(max_file_bytes, 4) and entry.bytes == (tmp_path / 'c' / name).stat().st_size


def test_unknown_names(folder):
    reader = CheckpointReader(folder)
    with pytest.raises(CheckpointError, match="no tensor 'critic/weight'"):
        reader.read('critic/weight', 0, 1)
    with pytest.raises(CheckpointError, match="no file 'other.json'"):
        reader.json('other.json')
    with pytest.raises(FileNotFoundError, match='nothing-here'):
        CheckpointReader(folder / 'nothing-here')


# --- damage


@pytest.mark.parametrize('which', ['*.safetensors', 'state.json'])
def test_a_damaged_file_is_refused_by_name(folder, which):
    path = next(folder.glob(which))
    data = path.read_bytes()
    middle = len(data) // 2
    for damaged in (data[:middle] + bytes([data[middle] ^ 4]) + data[middle + 1 :], data[:-1], data + b' ', None):
        path.unlink() if damaged is None else path.write_bytes(damaged)
        with pytest.raises(CheckpointError, match=path.name):
            CheckpointReader(folder)


def test_ranks_can_share_the_verification(tmp_path):
    write_checkpoint(tmp_path / 'c', {'': pieces_of(TENSORS)}, max_file_bytes=64)
    names = sorted(p.name for p in (tmp_path / 'c').glob('*.safetensors'))
    assert len(names) >= 3
    path = tmp_path / 'c' / names[1]
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    CheckpointReader(tmp_path / 'c', verify=False).verify(0, 2)
    with pytest.raises(CheckpointError, match=names[1]):
        CheckpointReader(tmp_path / 'c', verify=False).verify(1, 2)


def test_no_manifest_and_broken_manifests(folder):
    text = (folder / 'manifest.json').read_text()
    for broken, message in (
        (text[: len(text) // 2], 'manifest.json: damaged'),
        ('[]', 'format version None'),
        (text.replace('"format": 1', '"format": 99'), 'format version 99, this library reads version 1'),
        (text.replace('"files"', '"filez"'), 'malformed manifest'),
        (text.replace('"float32"', '"float31"'), "unknown dtype 'float31'"),
    ):
        (folder / 'manifest.json').write_text(broken)
        with pytest.raises(CheckpointError, match=message):
            CheckpointReader(folder)
    (folder / 'manifest.json').unlink()
    with pytest.raises(CheckpointError, match='no manifest.json'):
        CheckpointReader(folder)


def test_every_flipped_bit_of_a_manifest_is_seen(folder):
    whole = (folder / 'manifest.json').read_bytes()
    content = json.loads(whole)
    for place in range(len(whole)):
        damaged = whole[:place] + bytes([whole[place] ^ 0x10]) + whole[place + 1 :]
        (folder / 'manifest.json').write_bytes(damaged)
        try:
            same = json.loads(damaged) == content  # one white space replaced by another
        except ValueError:
            same = False
        if not same:
            with pytest.raises(CheckpointError, match='manifest.json'):
                CheckpointReader(folder)


def test_manifests_that_do_not_cover_each_tensor_once(folder):
    whole = (folder / 'manifest.json').read_text()
    for change, message in (
        (lambda p: p['pieces'].clear(), r'lacks elements \[0, 35\)'),
        (lambda p: p['pieces'][0].update(file='other'), "'other', which is not among the files"),
        (lambda p: p.update(shape=[-5, -7]), 'negative size'),
    ):
        (folder / 'manifest.json').write_text(whole)
        edit(folder, lambda m, change=change: change(m['tensors']['actor/weight']))
        with pytest.raises(CheckpointError, match=message):
            CheckpointReader(folder)


def test_coverage_by_hand():
    assert coverage_fault([(0, 3), (3, 5)], 5) is None and coverage_fault([(3, 5), (0, 3)], 5) is None
    assert coverage_fault([], 0) is None and coverage_fault([(0, 1)], 1) is None
    assert coverage_fault([(0, 3), (2, 5)], 5) == 'holds elements [2, 3) twice'
    assert coverage_fault([(0, 5), (1, 2)], 5) == 'holds elements [1, 2) twice'
    assert coverage_fault([(0, 2), (2, 2), (2, 5)], 5) == 'has an empty piece [2, 2)'
    assert coverage_fault([(0, 4)], 5) == 'lacks elements [4, 5)' and coverage_fault([(1, 5)], 5)[:5] == 'lacks'
    assert coverage_fault([(0, 6)], 5) == 'has elements past its end (6 > 5)'


@pytest.mark.parametrize(
    'name', ['../secret', '/etc/passwd', 'a/../../secret', '..', '', 'a//b', './a', 'a\\b', 'a\0b']
)
def test_paths_out_of_the_folder_are_refused(folder, name):
    (folder.parent / 'secret').write_bytes(b'12345678')

    def change(manifest):
        manifest['files'][name] = {'bytes': 8, 'crc32': 0}

    edit(folder, change)
    with pytest.raises(CheckpointError, match='leaves the checkpoint folder'):
        CheckpointReader(folder)


def test_links_out_of_the_folder_are_refused(folder):
    path = next(folder.glob('*.safetensors'))
    path.rename(folder.parent / 'elsewhere')
    path.symlink_to(folder.parent / 'elsewhere')
    with pytest.raises(CheckpointError, match='leads out of the checkpoint folder'):
        CheckpointReader(folder)
    path.unlink()
    (folder.parent / 'elsewhere').rename(folder / 'inside')
    path.symlink_to('inside')
    CheckpointReader(folder)


def test_a_file_that_does_not_hold_what_the_manifest_says(folder):
    edit(folder, lambda m: m['tensors']['actor/weight'].update(dtype='float64'))
    with pytest.raises(CheckpointError, match="'actor/weight' is torch.float32 in its file and torch.float64 in the"):
        CheckpointReader(folder).read('actor/weight', 0, 3)


# --- writing


def on_two_ranks(act):
    """Calls act(rank, all_gather_object) in a thread per rank; returns their exceptions, or None."""
    box, barrier = [None, None], threading.Barrier(2)

    def run(rank):
        def all_gather_object(obj):
            box[rank] = obj
            barrier.wait()
            seen = list(box)
            barrier.wait()
            return seen

        try:
            act(rank, all_gather_object)
        except Exception as error:
            return error

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(run, range(2)))


def halves(rank):
    """Returns the pieces of a rank: rank 0 has the first 18 of 35 elements, rank 1 the rest and the step."""
    flat = TENSORS['weight'].view(-1)
    cut = [(0, 18), (18, 35)][rank]
    yield Piece('weight', (5, 7), *cut, flat[slice(*cut)])
    if rank == 1:
        yield Piece('step', (), 0, 1, TENSORS['step'].view(1))


def test_two_ranks_write_one_checkpoint(tmp_path):
    def act(rank, gather):
        state = {'rank': rank}
        write_checkpoint(tmp_path / 'c', {'a/': halves(rank)}, state=state, rank=rank, all_gather_object=gather)

    assert on_two_ranks(act) == [None, None]
    reader = CheckpointReader(tmp_path / 'c')
    assert reader.json() == {'rank': 0}
    assert {p.file[:12] for p in reader.manifest.tensors['a/weight'].pieces} == {'a-rank00000-', 'a-rank00001-'}
    assert torch.equal(reader.read('a/weight', 0, 35).view(5, 7), TENSORS['weight'])
    assert reader.read('a/weight', 16, 20).tolist() == [16, 17, 18, 19]


def test_ranks_that_do_not_fit_together(tmp_path):
    def x(size: int, start: int, stop: int, *shape: int) -> list[Piece]:
        return [Piece('x', (size,), start, stop, torch.zeros(shape or (stop - start,)))]

    faults = {
        r"tensor 'x' of shape \(4,\) lacks elements \[2, 4\)": (x(4, 0, 2), []),
        r'holds elements \[0, 4\) twice': (x(4, 0, 4), x(4, 0, 4)),
        "disagree about the shape or dtype of 'x'": (x(4, 0, 2), x(5, 1, 3)),
        'has data of shape': (x(4, 0, 4, 2, 2), x(4, 0, 4, 2, 2)),
    }
    for message, pieces in faults.items():
        errors = on_two_ranks(
            lambda r, g, p=pieces: write_checkpoint(tmp_path / 'c', {'': p[r]}, rank=r, all_gather_object=g)
        )
        for error in errors:
            with pytest.raises(CheckpointError, match=message):
                raise error
        assert list(tmp_path.iterdir()) == []


def test_a_full_disk_at_any_write_leaves_the_old_checkpoint(tmp_path, monkeypatch):
    """The n-th fsync of rank 1, or of rank 0, fails: every rank raises the reason, and only the old checkpoint is
    left."""
    folder = tmp_path / 'c'
    write_checkpoint(folder, {'': pieces_of({'old': torch.ones(1)})})
    real = os.fsync
    failures = 0
    for failing in range(20):
        count = iter(range(1000))

        def fsync(handle, count=count, failing=failing):
            if next(count) == failing:
                raise OSError(28, 'No space left on device')
            real(handle)

        monkeypatch.setattr(os, 'fsync', fsync)
        drained = []

        def act(rank, gather, drained=drained):
            def pieces():
                yield from halves(rank)
                drained.append(rank)

            write_checkpoint(folder, {'a/': pieces()}, state={}, rank=rank, all_gather_object=gather, max_file_bytes=16)

        errors = on_two_ranks(act)
        monkeypatch.setattr(os, 'fsync', real)
        assert sorted(drained) == [0, 1]  # a rank that failed continues, so that the others do not wait for it
        if errors == [None, None]:
            break
        failures += 1
        for error in errors:
            with pytest.raises(CheckpointError, match='rank [01]: .*No space left on device.*there is untouched'):
                raise error
        if CheckpointReader(folder).names() != {'old'}:  # only the fsync of the parent folder comes after the rename
            assert CheckpointReader(folder).names() == {'a/weight', 'a/step'}
            break
        assert [p.name for p in tmp_path.iterdir()] == ['c']
    assert failures >= 8
    assert CheckpointReader(folder).names() == {'a/weight', 'a/step'}


def test_an_iterator_that_raises_and_an_interruption_leave_nothing(tmp_path):
    def pieces():
        yield Piece('x', (2,), 0, 2, torch.zeros(2))
        raise RuntimeError('lost a shard')

    with pytest.raises(CheckpointError, match='lost a shard'):
        write_checkpoint(tmp_path / 'c', {'': pieces()})
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(KeyboardInterrupt), CheckpointWriter(tmp_path / 'c') as writer:
        writer.add('', pieces_of(TENSORS))
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == []


def test_a_failure_names_only_existing_checkpoints(tmp_path):
    def fails(folder):
        with pytest.raises(CheckpointError) as error:
            write_checkpoint(folder, {'': iter([Piece('x', (3,), 0, 3, torch.zeros(2))])})
        return str(error.value)

    def write(folder):
        write_checkpoint(folder, {'': iter([Piece('x', (2,), 0, 2, torch.zeros(2))])}, state={})

    assert 'untouched' not in fails(tmp_path / 'step-00000002')
    write(tmp_path / 'step-00000001')
    assert fails(tmp_path / 'step-00000002').endswith('; earlier checkpoints beside it are untouched')
    write(tmp_path / 'step-00000002')
    assert fails(tmp_path / 'step-00000002').endswith('; the earlier checkpoint there is untouched')


def test_other_peoples_folders_are_not_replaced(tmp_path):
    (tmp_path / 'photos').mkdir()
    (tmp_path / 'photos' / 'cat.jpg').write_bytes(b'meow')
    with pytest.raises(CheckpointError, match='the folder holds other files'):
        write_checkpoint(tmp_path / 'photos', {'': pieces_of(TENSORS)})
    assert (tmp_path / 'photos' / 'cat.jpg').read_bytes() == b'meow'
    (tmp_path / 'empty').mkdir()
    write_checkpoint(tmp_path / 'empty', {'': pieces_of(TENSORS)})
    with pytest.raises(CheckpointError, match='leaves the checkpoint folder'):
        with CheckpointWriter(tmp_path / 'c') as writer:
            writer.add_json('../state.json', {})


def test_written_bytes_do_not_follow_later_changes(tmp_path):
    tensor = torch.zeros(4)
    with CheckpointWriter(tmp_path / 'c') as writer:
        writer.add('', pieces_of({'x': tensor}))
        tensor.fill_(9)
        writer.commit()
    assert CheckpointReader(tmp_path / 'c').read('x', 0, 4).tolist() == [0, 0, 0, 0]
