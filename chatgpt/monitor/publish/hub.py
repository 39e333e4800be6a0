"""Uploads to the Hugging Face Hub: a check of the permission before a run, and the upload after it.

Both use huggingface_hub, with HF_TOKEN, HF_ENDPOINT, HF_HUB_OFFLINE and `hf auth login`.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import Any
from urllib.parse import quote

from chatgpt.monitor.publish.card import CARD, is_ours, set_name

TIMEOUT_S = 10.0
"""time limit of a request"""
REPLACED = ['*.safetensors', '*.safetensors.index.json', 'pytorch_model*', 'adapter_config.json', 'adapter_model.bin']
"""files of an earlier upload that are removed: loading would take them for parts of this model"""


class PushError(RuntimeError):
    """A model could not be uploaded. The message names its folder and the command that uploads it."""


def check_push(repo_id: str, *, token: str | None = None) -> str:
    """Checks with one request that the model may be uploaded, and returns `account/name`. Creates nothing.

    Raises:
        ValueError: if `repo_id` is no name of a repository, the hub is offline or does not answer, or there is no
            token, a wrong one, or one without permission to write; says what to do.
    """
    from huggingface_hub import constants, get_token
    from huggingface_hub.utils import validate_repo_id

    def refused(why: str) -> ValueError:
        return ValueError(f'push_to_hub={repo_id!r}: {why}')

    try:
        validate_repo_id(repo_id)
    except ValueError:
        raise refused('this is no name of a repository: give NAME, or ACCOUNT/NAME') from None
    if constants.HF_HUB_OFFLINE:
        raise refused('HF_HUB_OFFLINE is set, so nothing can be uploaded; unset it, or leave push_to_hub out')
    token, hub = token or get_token(), constants.ENDPOINT
    if token is None:
        raise refused('you are not logged in to the hub; run `hf auth login`, or set HF_TOKEN to one that may write')
    try:
        answer = _get(f'{hub}/api/whoami-v2', token)
        account = answer.json() if answer.status_code == 200 else None
    except Exception as error:  # the HTTP library, and so its errors, depend on the version
        raise refused(f'no answer from {hub} ({_line(error)}); check the network, or leave push_to_hub out') from None
    if answer.status_code in (401, 403):
        raise refused(f'{hub} does not know this token; run `hf auth login` again, or set HF_TOKEN to a valid one')
    if not isinstance(account, Mapping):
        raise refused(f'{hub} answers {answer.status_code} when asked who you are; check HF_ENDPOINT, or try later')
    full = repo_id if '/' in repo_id else f'{account.get("name")}/{repo_id}'
    if fault := _fault(account, full):
        raise refused(f'{fault} (https://huggingface.co/settings/tokens)')
    return full


def _fault(account: Mapping[str, Any], repo_id: str) -> str | None:
    """Returns why the account may not upload; None if it may, or the hub does not say."""
    owner, name = repo_id.partition('/')[0], account.get('name')
    roles = {name: None} | {org.get('name'): org.get('roleInOrg') for org in account.get('orgs') or ()}
    if owner not in roles:
        return f'{owner!r} is not the account of this token, which may write to {", ".join(map(str, roles))}'
    if roles[owner] == 'read':
        return f'you may only read in the organisation {owner!r}; ask for the right to write, or give {name}/NAME'
    token = (account.get('auth') or {}).get('accessToken') or {}
    scopes = (token.get('fineGrained') or {}).get('scoped') or ()
    allowed = {scope['entity'].get('name') for scope in scopes if 'repo.write' in scope.get('permissions', ())}
    if token.get('role') == 'read' or (token.get('role') == 'fineGrained' and not allowed & {owner, repo_id}):
        return f'this token may not write to {repo_id}; set HF_TOKEN to one that may'
    return None


def push_folder(
    folder: str | Path,
    repo_id: str,
    *,
    private: bool | None = None,
    commit_message: str | None = None,
    token: str | None = None,
    revision: str | None = None,
) -> str:
    """Uploads all files of a model's folder to a repository, which is created if absent, and returns its address.

    A README.md of the repository without our marker is not changed.

    Args:
        private: for a new repository; None: public, or the organisation's default.
        revision: a branch, created if absent, or refs/pr/N.

    Raises:
        PushError: if the hub cannot be reached, or refuses; says how to upload the folder later.
    """
    from huggingface_hub import HfApi

    api = HfApi(token=token)
    try:
        repo = api.create_repo(repo_id, private=private, exist_ok=True)
        if revision is not None and not revision.startswith('refs/'):
            api.create_branch(repo.repo_id, branch=revision, exist_ok=True)
        set_name(folder, repo.repo_id)
        branch = quote(revision or 'main', safe='')
        there = _get(f'{api.endpoint}/{repo.repo_id}/resolve/{branch}/{CARD}', token)
        is_theirs = there.status_code == 200 and bool(there.text.strip()) and not is_ours(there.text)
        names = api.list_repo_files(repo.repo_id, revision=revision)
        old = [name for name in names if '/' not in name and any(fnmatch(name, p) for p in REPLACED)]
        api.upload_folder(
            repo_id=repo.repo_id,
            folder_path=folder,
            commit_message=commit_message or 'Upload a model trained with chatgpt-rlhf',
            revision=revision,
            ignore_patterns=[CARD] if is_theirs else None,
            delete_patterns=old or None,
        )
    except Exception as error:  # the HTTP library, and so its errors, depend on the version
        words = ['hf', 'upload', repo_id, str(folder), '.', *(['--private'] if private else [])]
        later = shlex.join([*words, *(['--revision', revision] if revision else [])])
        message = f'the model could not be uploaded to {repo_id} ({_line(error)})'
        raise PushError(f'{message}; it is in {folder}, and this uploads it later: {later}') from error
    return str(repo)


def _get(address: str, token: str | None) -> Any:
    from huggingface_hub.utils import build_hf_headers, get_session

    return get_session().get(address, headers=build_hf_headers(token=token), timeout=TIMEOUT_S)


def _line(error: BaseException) -> str:
    """Returns the message of an error, or of the cause of a RuntimeError, on one line and without the token."""
    while error.__cause__ is not None and type(error) is RuntimeError:
        error = error.__cause__
    return re.sub(r"(?<=Bearer )[^']+", '***', ' '.join(str(error).split())) or type(error).__name__
