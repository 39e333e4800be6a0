"""The way to the Hugging Face Hub: may this account upload there, asked before a run; and the upload after it.

Both go through huggingface_hub, so that HF_TOKEN, HF_ENDPOINT, HF_HUB_OFFLINE and `hf auth login` mean what they mean
there. Left out: who calls this on which rank.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

from chatgpt.publish.card import CARD, is_ours, set_name

TIMEOUT_S = 10.0
"""for the one question before a run"""
INSTEAD = 'or leave push_to_hub out and upload the folder later with `hf upload`'


class PushError(RuntimeError):
    """A model could not be uploaded. It is on disk; says where, and the command that uploads it."""


def check_push(repo_id: str, *, token: str | None = None) -> str:
    """Find out in one call whether the model may be uploaded; nothing is made there. The full name, `account/name`.

    Raises:
        ValueError: no name of a repository, offline, not logged in, a token that is wrong or may not write there, no
            answer; one line that says what to do.
    """
    from huggingface_hub import constants, get_token
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    asked = f'push_to_hub={repo_id!r}'
    try:
        if not isinstance(repo_id, str):
            raise HFValidationError
        validate_repo_id(repo_id)
    except HFValidationError:
        raise ValueError(
            f'{asked} is no name of a repository: give NAME, or ACCOUNT/NAME, of letters, digits, "-", "_" and "."'
        ) from None
    if constants.HF_HUB_OFFLINE:
        raise ValueError(f'{asked}: HF_HUB_OFFLINE is set, so nothing can be uploaded; unset it, {INSTEAD}')
    token = token or get_token()
    if token is None:
        raise ValueError(
            f'{asked}: you are not logged in to the hub; run `hf auth login`, or set HF_TOKEN to a token with the '
            'right to write (https://huggingface.co/settings/tokens)'
        )
    account = _account(asked, token)
    name = str(account.get('name') or '')
    full = repo_id if '/' in repo_id else f'{name}/{repo_id}'
    if fault := _fault(account, full.partition('/')[0], full):
        raise ValueError(f'{asked}: {fault}')
    return full


def _account(asked: str, token: str) -> Mapping[str, Any]:
    """What the hub says of the token's account, its organisations and the token's rights."""
    from huggingface_hub import constants
    from huggingface_hub.utils import build_hf_headers, get_session

    try:
        answer = get_session().get(
            f'{constants.ENDPOINT}/api/whoami-v2', headers=build_hf_headers(token=token), timeout=TIMEOUT_S
        )
    except Exception as error:  # of its HTTP library, which changes from version to version
        raise ValueError(
            f'{asked}: no answer from {constants.ENDPOINT} ({_line(error)}); check the network, {INSTEAD}'
        ) from None
    if answer.status_code in (401, 403):
        raise ValueError(
            f'{asked}: {constants.ENDPOINT} does not know this token; run `hf auth login` again, or set HF_TOKEN to a '
            'token that is still valid (it wins over a login)'
        )
    if answer.status_code != 200:
        raise ValueError(
            f'{asked}: {constants.ENDPOINT} answers {answer.status_code} when asked who you are; try again in a few '
            f'minutes, {INSTEAD}'
        )
    try:
        account = answer.json()
    except ValueError:
        account = None
    if not isinstance(account, Mapping):
        raise ValueError(f'{asked}: {constants.ENDPOINT} does not answer as a hub does; check HF_ENDPOINT')
    return account


def _fault(account: Mapping[str, Any], owner: str, repo_id: str) -> str | None:
    """Why this account may not upload there; None where it may, or where the hub does not say."""
    name = account.get('name')
    orgs = {o.get('name'): o.get('roleInOrg') for o in account.get('orgs') or () if isinstance(o, Mapping)}
    if owner != name and owner not in orgs:
        others = f' or of its organisations {", ".join(map(str, orgs))}' if orgs else ''
        return (
            f'{owner!r} is not the account of this token, {name!r}{others}; give one of these, or log in as {owner!r}'
        )
    if orgs.get(owner) == 'read' and owner != name:
        return f'you may only read in the organisation {owner!r}; ask for the right to write, or give {name}/NAME'
    auth = account.get('auth')
    token = (auth or {}).get('accessToken') if isinstance(auth, Mapping) else None
    if not isinstance(token, Mapping):
        return None
    if token.get('role') == 'read':
        return (
            'this token may only read; make one that may write at https://huggingface.co/settings/tokens, and set '
            'HF_TOKEN to it or run `hf auth login` again'
        )
    rights = token.get('fineGrained')
    if token.get('role') != 'fineGrained' or not isinstance(rights, Mapping):
        return None
    for scope in rights.get('scoped') or ():
        entity, permissions = scope.get('entity') or {}, scope.get('permissions') or ()
        if 'repo.write' in permissions and entity.get('name') in (owner, repo_id):
            return None
    return (
        f'this fine-grained token may not write to {repo_id}; give it "Write access to contents of all repos" of '
        f'{owner!r} at https://huggingface.co/settings/tokens'
    )


def push_folder(
    folder: str | Path,
    repo_id: str,
    *,
    private: bool | None = None,
    commit_message: str | None = None,
    token: str | None = None,
    revision: str | None = None,
) -> str:
    """Upload a model's folder, all of its files, to a model repository, which is made if absent; its address.

    A README.md there that this library has not written stays as it is.

    Args:
        private: only for a repository that is made; None is public, or what the organisation has set.
        revision: a branch, made if absent, or refs/pr/N.

    Raises:
        PushError: the hub cannot be reached, or refuses; says how to upload the folder later.
    """
    from huggingface_hub import HfApi

    folder = Path(folder)
    api = HfApi(token=token)
    try:
        repo = api.create_repo(repo_id, private=private, exist_ok=True)
        if revision is not None and not revision.startswith('refs/'):
            api.create_branch(repo.repo_id, branch=revision, exist_ok=True)
        set_name(folder, repo.repo_id)
        api.upload_folder(
            repo_id=repo.repo_id,
            folder_path=folder,
            commit_message=commit_message or 'Upload a model trained with chatgpt-rlhf',
            revision=revision,
            ignore_patterns=[CARD] if _has_another_card(api, repo.repo_id, revision) else None,
        )
    except Exception as error:  # of its HTTP library, which changes from version to version
        raise PushError(
            f'the model could not be uploaded to {repo_id} ({_line(error)}); it is in {folder}, and this uploads it '
            f'later: {later(folder, repo_id, private=private, revision=revision)}'
        ) from error
    return str(repo)


def later(folder: Path, repo_id: str, *, private: bool | None = None, revision: str | None = None) -> str:
    """The command that uploads a folder."""
    words = ['hf', 'upload', repo_id, str(folder), '.']
    return shlex.join([*words, *(['--private'] if private else []), *(['--revision', revision] if revision else [])])


def _has_another_card(api: Any, repo_id: str, revision: str | None) -> bool:
    """Whether the repository has a README.md that somebody else has written."""
    from huggingface_hub.utils import build_hf_headers, get_session

    address = f'{api.endpoint}/{repo_id}/resolve/{quote(revision or "main", safe="")}/{CARD}'
    answer = get_session().get(address, headers=build_hf_headers(token=api.token), timeout=TIMEOUT_S)
    return answer.status_code == 200 and bool(answer.text.strip()) and not is_ours(answer.text)


def _line(error: BaseException) -> str:
    """What happened, on one line and without the token; of an error that only says where, what caused it."""
    while error.__cause__ is not None and type(error) is RuntimeError:
        error = error.__cause__
    return re.sub(r"(?<=Bearer )[^']+", '***', ' '.join(str(error).split())) or type(error).__name__
