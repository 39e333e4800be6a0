"""A small local Hugging Face Hub: accounts, repositories, and files uploaded by commit or LFS.

It answers huggingface_hub's requests to identify a user, create a repository and upload a folder, and keeps the bytes.
"""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest

WRITE, READ, FINE, NARROW = 'hf_write', 'hf_read', 'hf_fine', 'hf_narrow'
"""tokens of the account 'me'; FINE may write to 'me', NARROW only to 'me/other'"""
_SCOPES = {
    FINE: [{'entity': {'type': 'user', 'name': 'me'}, 'permissions': ['repo.content.read', 'repo.write']}],
    NARROW: [{'entity': {'type': 'model', 'name': 'me/other'}, 'permissions': ['repo.write']}],
}
_ROLES = {WRITE: 'write', READ: 'read', FINE: 'fineGrained', NARROW: 'fineGrained'}


class Hub:
    """The content of the server, and the requests that it received.

    Args:
        large: suffixes of files that are uploaded by LFS and not in a commit.
    """

    def __init__(self, large: tuple[str, ...] = ('.safetensors', '.png')) -> None:
        self.large = large
        self.repos: dict[str, dict[str, Any]] = {}
        """repositories by name: private, and the files of each revision"""
        self.objects: dict[str, bytes] = {}
        """LFS objects by SHA-256"""
        self.asked: list[str] = []
        self.dies_at: str | None = None
        """prefix of a path; after a request for it the server never responds again, like one that goes down"""
        self.refuses: dict[str, int] = {}
        """prefix of a path -> status of its error"""
        self.address = ''

    def files(self, repo: str, revision: str = 'main') -> dict[str, bytes]:
        return self.repos[repo]['revisions'][revision]

    def add_repo(self, name: str, private: bool = False) -> None:
        self.repos[name] = {'private': private, 'revisions': {'main': {}}, 'messages': []}


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = 'HTTP/1.1'

    def log_message(self, *_: Any) -> None:
        """Logs nothing."""

    def handle_one(self) -> None:
        hub, path = self.hub, unquote(urlsplit(self.path).path)
        if path != '/api/agent-harnesses':  # huggingface_hub requests it occasionally
            hub.asked.append(f'{self.command} {path}')
        length = int(self.headers.get('Content-Length') or 0)
        body = self.rfile.read(length) if 'chunked' not in self.headers.get('Transfer-Encoding', '') else self._chunks()
        if hub.dies_at is not None and path.startswith(hub.dies_at):
            self.close_connection = True
            self.server.dead = True  # type: ignore[attr-defined]
        if getattr(self.server, 'dead', False):
            self.close_connection = True
            return
        for beginning, status in hub.refuses.items():
            if path.startswith(beginning):
                return self._answer({'error': 'refused'}, status)
        token = (self.headers.get('Authorization') or '').removeprefix('Bearer ')
        if path.startswith('/lfs/'):  # signed addresses need no token
            hub.objects[path.removeprefix('/lfs/')] = body
            return self._answer({})
        if token not in _ROLES:
            return self._answer({'error': 'Invalid username or password.'}, 401)
        self._route(path, token, body)

    do_GET = do_POST = do_PUT = do_HEAD = handle_one

    def _chunks(self) -> bytes:
        parts = []
        while size := int(self.rfile.readline().strip() or b'0', 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b''.join(parts)

    def _route(self, path: str, token: str, body: bytes) -> None:
        hub, words = self.hub, path.strip('/').split('/')
        if path == '/api/whoami-v2':
            return self._answer(_account(token))
        if path == '/api/validate-yaml':
            faults = _faults(json.loads(body)['content'])
            return self._answer({'errors': faults, 'warnings': []}, 400 if faults else 200)
        if path == '/api/repos/create':
            return self._create(json.loads(body), token)
        if path.endswith('.git/info/lfs/objects/batch'):
            return self._batch(json.loads(body))
        if path.startswith('/verify/'):
            return self._answer({}, 200 if words[1] in hub.objects else 404)
        if path.startswith('/api/models/') and len(words) >= 6:
            repo, what, revision = '/'.join(words[2:4]), words[4], '/'.join(words[5:])
            if repo not in hub.repos:
                return self._answer({'error': 'Repository not found'}, 404, {'X-Error-Code': 'RepoNotFound'})
            if what == 'revision':
                there = revision in hub.repos[repo]['revisions']
                more = {} if there else {'X-Error-Code': 'RevisionNotFound'}
                return self._answer({'id': repo, 'error': 'no such revision'}, 200 if there else 404, more)
            if what == 'branch':
                hub.repos[repo]['revisions'].setdefault(revision, dict(hub.files(repo)))
                return self._answer({})
            if what == 'tree':
                found = hub.repos[repo]['revisions'].get(revision, {})
                kinds = {'type': 'file', 'oid': '0' * 40}
                return self._answer([{'path': path, 'size': len(data), **kinds} for path, data in found.items()])
            if token == READ:
                return self._answer({'error': 'You do not have the right to write'}, 403)
            if what == 'preupload':
                return self._preupload(json.loads(body))
            if what == 'commit':
                return self._commit(repo, revision, body)
        if len(words) >= 5 and words[2] == 'resolve':
            files = hub.repos.get('/'.join(words[:2]), {'revisions': {}})['revisions'].get('/'.join(words[3:-1]), {})
            return self._send(files[words[-1]]) if words[-1] in files else self._answer({'error': 'not found'}, 404)
        self._answer({'error': f'{self.command} {path} is not spoken here'}, 404)

    def _create(self, asked: dict[str, Any], token: str) -> None:
        name = f'{asked.get("organization") or "me"}/{asked["name"]}'
        if token == READ or name.partition('/')[0] not in ('me', 'team'):
            return self._answer({'error': f'You do not have the right to create under {name}'}, 403)
        address = {'url': f'{self.hub.address}/{name}'}
        if name in self.hub.repos:
            return self._answer(address, 409)
        self.hub.add_repo(name, asked.get('visibility') == 'private' or bool(asked.get('private')))
        self._answer(address)

    def _preupload(self, asked: dict[str, Any]) -> None:
        common = {'shouldIgnore': False, 'oid': None}
        modes = {f['path']: 'lfs' if f['path'].endswith(self.hub.large) else 'regular' for f in asked['files']}
        files = [{'path': path, 'uploadMode': mode, **common} for path, mode in modes.items()]
        self._answer({'files': files})

    def _batch(self, asked: dict[str, Any]) -> None:
        def actions(oid: str) -> dict[str, Any]:
            return {
                word: {'href': f'{self.hub.address}/{place}/{oid}', 'header': {}}
                for word, place in (('upload', 'lfs'), ('verify', 'verify'))
            }

        objects = [{**o, 'actions': actions(o['oid'])} for o in asked['objects']]
        self._answer({'transfer': 'basic', 'objects': objects})

    def _commit(self, repo: str, revision: str, body: bytes) -> None:
        changed: dict[str, bytes] = {}
        removed: list[str] = []
        for line in body.splitlines():
            entry = json.loads(line)
            value = entry['value']
            if entry['key'] == 'header':
                self.hub.repos[repo]['messages'].append(value['summary'])
            elif entry['key'] == 'file':
                changed[value['path']] = base64.b64decode(value['content'])
            elif entry['key'] == 'deletedFile':
                removed.append(value['path'])
            elif entry['key'] == 'lfsFile':
                data = self.hub.objects.get(value['oid'])
                if data is None or hashlib.sha256(data).hexdigest() != value['oid'] or len(data) != value['size']:
                    return self._answer({'error': f'{value["path"]} has not arrived whole'}, 400)
                changed[value['path']] = data
        files = self.hub.repos[repo]['revisions'][revision]
        for path in removed:
            del files[path]
        files.update(changed)
        oid = hashlib.sha1(body).hexdigest()
        self._answer({'commitUrl': f'{self.hub.address}/{repo}/commit/{oid}', 'commitOid': oid, 'success': True})

    def _answer(self, content: Any, status: int = 200, headers: dict[str, str] | None = None) -> None:
        more = headers or {}
        if status >= 400:
            more |= {'X-Error-Message': content.get('error', 'refused')}
        self._send(json.dumps(content).encode(), status, {'Content-Type': 'application/json'} | more)

    def _send(self, data: bytes, status: int = 200, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in ({'Content-Length': str(len(data))} | (headers or {})).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != 'HEAD':
            self.wfile.write(data)


def _faults(card: str) -> list[dict[str, str]]:
    """Returns the hub's errors about the required part of a card's front matter."""
    import yaml

    try:
        data = yaml.safe_load(card.split('---')[1]) if card.startswith('---') else {}
    except yaml.YAMLError as error:
        return [{'message': str(error)}]
    results = [r for model in data.get('model-index') or () for r in model['results']]
    whole = all(r['task'].get('type') and r['dataset'].get('type') and r['dataset'].get('name') for r in results)
    whole = whole and all(m.get('type') and isinstance(m.get('value'), float) for r in results for m in r['metrics'])
    return [] if whole else [{'message': '"model-index" lacks a type, a name or a value'}]


def _account(token: str) -> dict[str, Any]:
    rights: dict[str, Any] = {'displayName': 'a token', 'role': _ROLES[token]}
    if token in _SCOPES:
        rights['fineGrained'] = {'canReadGatedRepos': False, 'global': [], 'scoped': _SCOPES[token]}
    orgs = [{'name': 'team', 'roleInOrg': 'write'}, {'name': 'library', 'roleInOrg': 'read'}]
    return {'type': 'user', 'name': 'me', 'orgs': orgs, 'auth': {'type': 'access_token', 'accessToken': rights}}


@contextmanager
def serving(hub: Hub | None = None) -> Iterator[Hub]:
    """Yields a running hub with its `address`."""
    hub = hub or Hub()
    server = ThreadingHTTPServer(('127.0.0.1', 0), type('Handler', (_Handler,), {'hub': hub}))
    server.daemon_threads = True
    hub.address = f'http://127.0.0.1:{server.server_address[1]}'
    thread = threading.Thread(target=server.serve_forever, kwargs={'poll_interval': 0.02}, name='fake hub')
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def use(address: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, token: str | None = WRITE) -> None:
    """Points huggingface_hub to this address and token only, without xet and without pauses between retries."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, 'ENDPOINT', address)
    monkeypatch.setattr(constants, 'HF_HUB_OFFLINE', False)
    monkeypatch.setattr(constants, 'HF_HUB_DISABLE_XET', True)
    monkeypatch.setattr(constants, 'HF_TOKEN_PATH', str(tmp_path / 'no-token'))
    monkeypatch.setattr('huggingface_hub.utils._http.time.sleep', lambda seconds: None)
    monkeypatch.delenv('HUGGING_FACE_HUB_TOKEN', raising=False)
    if token is None:
        monkeypatch.delenv('HF_TOKEN', raising=False)
    else:
        monkeypatch.setenv('HF_TOKEN', token)
