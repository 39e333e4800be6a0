"""Uploads of a folder to a local hub, and errors before and during them."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from fake_hub import FINE, NARROW, READ, WRITE, use

from chatgpt.monitor.publish import PushError, check_push, push_folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    place = tmp_path / 'my model'
    (place / 'sub').mkdir(parents=True)
    (place / 'model.safetensors').write_bytes(bytes(range(256)) * 700)
    (place / 'config.json').write_text('{"a": 1}\n')
    (place / 'empty.txt').write_text('')
    (place / 'sub' / 'vocab.txt').write_text('ä\nb\n')
    (place / 'README.md').write_text(
        '---\ntags: []\n---\n\n<!-- Written by chatgpt-rlhf. -->\n\nname = "someone\'s model"\n'
    )
    return place


def content(place: Path) -> dict[str, bytes]:
    return {str(p.relative_to(place)): p.read_bytes() for p in place.rglob('*') if p.is_file()}


def test_the_files_of_the_folder_arrive(hub, folder):
    assert push_folder(folder, 'words', commit_message='the first') == f'{hub.address}/me/words'
    assert hub.files('me/words') == content(folder)
    assert b"name = 'me/words'" in hub.files('me/words')['README.md']
    assert hub.repos['me/words']['messages'] == ['the first'] and not hub.repos['me/words']['private']
    assert any(path.startswith('PUT /lfs/') for path in hub.asked)
    (folder / 'config.json').write_text('{"a": 2}\n')
    hub.files('me/words')['value_head.safetensors'] = b'of an earlier model, which loading would attach to this one'
    hub.files('me/words')['critic/model.safetensors'] = b'of another model'
    push_folder(folder, 'me/words')  # the repository exists now
    assert hub.files('me/words') == content(folder) | {'critic/model.safetensors': b'of another model'}


def test_a_card_of_the_user_is_kept(hub, folder):
    hub.add_repo('me/words')
    hub.files('me/words')['README.md'] = b'# mine\n'
    push_folder(folder, 'me/words')
    assert hub.files('me/words') == content(folder) | {'README.md': b'# mine\n'}
    hub.files('me/words')['README.md'] = b'<!-- Written by chatgpt-rlhf. an older one -->'
    push_folder(folder, 'me/words')
    assert hub.files('me/words') == content(folder)


def test_a_process_with_variables_only(hub, folder):
    """HF_ENDPOINT and HF_TOKEN; no torch is needed."""
    variables = {'HF_ENDPOINT': hub.address, 'HF_HUB_DISABLE_XET': '1', 'HF_HUB_OFFLINE': '0', 'HF_HOME': str(folder)}
    code = 'import sys; from chatgpt.monitor.publish import push_folder; print(push_folder(sys.argv[1], "words")); '
    command = [sys.executable, '-c', code + 'assert "torch" not in sys.modules', str(folder / 'sub')]
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(command, cwd=root, env=os.environ | variables, capture_output=True, text=True)
    assert done.stdout == f'{hub.address}/me/words\n', done.stderr
    assert hub.files('me/words') == content(folder / 'sub')


# ---------------------------------------------------------------- before a run


def test_permission_to_write(hub, monkeypatch):
    assert check_push('words') == 'me/words' and check_push('team/words') == 'team/words'
    assert check_push('words', token=FINE) == 'me/words' and check_push('me/other', token=NARROW) == 'me/other'
    assert hub.asked == ['GET /api/whoami-v2'] * 4 and hub.repos == {}  # no repository is made


@pytest.mark.parametrize(
    ('repo_id', 'token', 'message'),
    [
        ('a/b/c', WRITE, r"^push_to_hub='a/b/c': this is no name of a repository"),
        ('words', 'hf_wrong', 'does not know this token'),
        ('words', READ, 'this token may not write to me/words'),
        ('team/words', FINE, 'this token may not write to team/words'),
        ('you/words', WRITE, "'you' is not the account of this token"),
        ('library/words', WRITE, "you may only read in the organisation 'library'"),
    ],
)
def test_what_is_refused_before_a_run(hub, repo_id, token, message):
    with pytest.raises(ValueError, match=message) as caught:
        check_push(repo_id, token=token)
    assert '\n' not in str(caught.value)


def test_a_run_without_login_network_or_hub(hub, monkeypatch, tmp_path):
    hub.refuses['/api/whoami-v2'] = 429
    with pytest.raises(ValueError, match='answers 429 when asked who you are'):
        check_push('words')
    monkeypatch.delenv('HF_TOKEN')
    with pytest.raises(ValueError, match='you are not logged in to the hub; run `hf auth login`'):
        check_push('words')
    with socket.socket() as free:
        free.bind(('127.0.0.1', 0))
        use(f'http://127.0.0.1:{free.getsockname()[1]}', monkeypatch, tmp_path)
        with pytest.raises(ValueError, match=r'no answer from http://127.0.0.1:\d+ \(.+\); check the network'):
            check_push('words')


def test_a_token_that_no_header_can_hold_is_not_shown(hub, folder):
    token = 'hf_private\nprivate'
    for upload in (lambda: check_push('me/words', token=token), lambda: push_folder(folder, 'me/words', token=token)):
        with pytest.raises((ValueError, PushError), match=r'Bearer \*\*\*') as caught:
            upload()
        assert 'private' not in str(caught.value)


def test_a_hub_that_is_silent(monkeypatch, tmp_path):
    """It accepts connections and never responds."""
    from chatgpt.monitor.publish import hub as module

    with socket.create_server(('127.0.0.1', 0)) as silent:
        use(f'http://127.0.0.1:{silent.getsockname()[1]}', monkeypatch, tmp_path)
        monkeypatch.setattr(module, 'TIMEOUT_S', 0.3)
        with pytest.raises(ValueError, match='no answer from'):
            check_push('words')


# ---------------------------------------------------------------- after it


IN_WORDS = '/api/models/me/words'


@pytest.mark.parametrize('where', ['/api/repos/create', '/lfs/', f'{IN_WORDS}/commit'])
def test_a_hub_that_dies_in_the_middle(hub, folder, where):
    before = content(folder)
    hub.dies_at = where
    with pytest.raises(PushError) as caught:
        push_folder(folder, 'me/words', private=True, revision='second')
    text = str(caught.value)
    assert text.startswith('the model could not be uploaded to me/words (') and '\n' not in text
    assert text.endswith(f"this uploads it later: hf upload me/words '{folder}' . --private --revision second")
    assert {k: v for k, v in content(folder).items() if k != 'README.md'} == {
        k: v for k, v in before.items() if k != 'README.md'
    }
    assert all(not files for repo in hub.repos.values() for files in repo['revisions'].values())  # no partial model
