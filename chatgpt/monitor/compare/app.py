"""ASGI applications: the page on which people compare responses, and that of the recorded sequences of runs. The latter
uses the report's reader (`report/assets/rollouts.js`) and serves its requests."""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from chatgpt.monitor.compare.serving import ASSETS
from chatgpt.monitor.compare.statistics import lines, summarize
from chatgpt.monitor.compare.store import MAX_COMMENT, MAX_NAME, NotAsked, Store
from chatgpt.monitor.report.rollouts import page_row
from chatgpt.monitor.report.runs import names_of
from chatgpt.monitor.run_folder import RunFolder
from chatgpt.monitor.run_folder.rollouts import read_rollouts, recorded_phases

NUM_ROWS = 200
"""number of rows of a request without `limit`"""


def compare_app(store: Store) -> Any:
    """Returns a Starlette application. `/` is the page, `/results` shows the statistics with the names of the models.
    The page posts JSON to `/api/...`; every response is the new state: person, pair, progress."""
    from starlette.responses import JSONResponse
    from starlette.routing import Route

    # Cookies are shared by all ports of a host, and a person's number is only valid for its file.
    cookie = f'chatgpt_person_{store.settings.get("id", "")}'

    async def page(request: Any) -> Any:
        return _page(request, 'compare.html', max_name=MAX_NAME, max_comment=MAX_COMMENT)

    async def results(request: Any) -> Any:
        return _page(request, 'results.html', lines=lines(summarize(store)))

    def person_of(request: Any) -> int | None:
        number = request.cookies.get(cookie, '')
        person = int(number) if number.isascii() and number.isdigit() and len(number) < 19 else 0
        return person if store.name_of(person) is not None else None

    def answer(person: int | None, status: int = 200, error: str | None = None) -> Any:
        state: dict[str, Any] = {'person': None, 'pair': None, 'progress': None, 'error': error}
        if person is not None:
            pair = store.next_pair(person)
            state |= {'person': store.name_of(person), 'pair': pair and vars(pair), 'progress': store.progress(person)}
        return JSONResponse(state, status)

    async def act(request: Any) -> Any:
        """Handles join {name}, next {}, judge {pair, choice, comment}, undo {}. 400: malformed; 401: not joined; 409:
        not possible any more."""
        person, action = person_of(request), request.path_params['action']
        if person is None and action not in ('join', 'next'):
            return answer(None, 401, 'say who you are first')
        try:
            person = _perform(store, person, action, await request.json())
        except NotAsked as error:
            return answer(person, 409, str(error))
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            return JSONResponse({'error': f'this cannot be read: {error}'}, 400)
        response = answer(person)
        if action == 'join':
            response.set_cookie(cookie, str(person), httponly=True, samesite='strict')
        return response

    async def not_saved(request: Any, error: Exception) -> Any:
        return JSONResponse({'error': f'this cannot be saved: {error}'}, 503)

    actions = Route('/api/{action:str}', act, methods=['POST'])
    return _application([Route('/', page), Route('/results', results), actions], {sqlite3.Error: not_saved})


def _perform(store: Store, person: Any, action: str, given: Any) -> int | None:
    """Performs an action of the page and returns the number of the person, who may be new.

    Raises:
        NotAsked: if the action is no longer possible.
        ValueError, KeyError, TypeError: if the request is malformed.
    """
    if action == 'join':
        return store.join(_text(given, 'name'))
    if action == 'judge':
        pair = given['pair']
        if type(pair) is not int or not 0 < pair < 2**63:
            raise ValueError('pair is no number')
        store.judge(person, pair, _text(given, 'choice'), _text(given, 'comment'))
    elif action == 'undo':
        if not store.undo(person):
            raise NotAsked('there is nothing to take back')
    elif action != 'next':
        raise ValueError(f'{action} is no action')
    return person


def _text(given: Any, name: str) -> str:
    value = given[name]
    if not isinstance(value, str):
        raise ValueError(f'{name} is no text')
    value.encode()  # raises for a lone surrogate, which cannot be stored
    return value


def rollouts_app(runs: Sequence[str | Path]) -> Any:
    """Returns a Starlette application. `/` is the page; `/api/runs` returns name and recorded phases of each run;
    `/api/rollouts?run=&phase=&prompt=&text=&min=&max=&offset=&limit=` returns rows of a run. Arguments except `run` are
    optional; see `read_rollouts` for their meaning, and `page_row` for a row.

    Raises:
        ValueError: if a folder has no recorded sequences.
    """
    from starlette.concurrency import run_in_threadpool
    from starlette.responses import JSONResponse
    from starlette.routing import Route

    folders = [Path(run).absolute() for run in runs]
    for folder in folders:
        if not recorded_phases(folder):
            RunFolder(folder)  # raises a more precise error if it is no folder of a run
            raise ValueError(
                f'{folder} has no recorded sequences: give the folder of a run that draws responses (PPO, GRPO, ...), '
                'with rollouts/'
            )

    names = names_of(folders)

    async def page(request: Any) -> Any:
        return _page(request, 'rollouts.html', runs=names)

    async def list_runs(request: Any) -> Any:
        return JSONResponse(
            [{'name': name, 'phases': recorded_phases(folder)} for name, folder in zip(names, folders, strict=True)]
        )

    async def rows(request: Any) -> Any:
        try:
            question = _question(request.query_params)
            folder = folders[_whole(request.query_params, 'run', 0, len(folders) - 1)]
        except ValueError as error:
            return JSONResponse({'error': f'this cannot be read: {error}'}, 400)
        found = await run_in_threadpool(read_rollouts, folder, **question)
        return JSONResponse([page_row(row) for row in found])

    return _application([Route('/', page), Route('/api/runs', list_runs), Route('/api/rollouts', rows)])


def _question(given: Mapping[str, str]) -> dict[str, Any]:
    """Returns the arguments of `read_rollouts`. Raises ValueError for a malformed number."""
    least, most = (float(given[name]) if given.get(name) else None for name in ('min', 'max'))
    return {
        'phases': [_whole(given, 'phase')] if given.get('phase') else None,
        'prompt': given.get('prompt'),
        'text': given.get('text'),
        'score': (least, most),
        'offset': _whole(given, 'offset'),
        'limit': _whole(given, 'limit', NUM_ROWS),
    }


def _whole(given: Mapping[str, str], name: str, default: int = 0, most: float = float('inf')) -> int:
    value = int(given.get(name) or default)
    if not 0 <= value <= most:
        raise ValueError(f'{name}={value} is out of range')
    return value


def _page(request: Any, name: str, **values: Any) -> Any:
    from starlette.templating import Jinja2Templates

    return Jinja2Templates(directory=ASSETS).TemplateResponse(request, name, values)


def _application(routes: list[Any], handlers: Any = None) -> Any:
    """Returns an application that also serves the assets of this package and of the report."""
    from starlette.applications import Starlette
    from starlette.routing import Mount
    from starlette.staticfiles import StaticFiles

    from chatgpt.monitor.report.page import ASSETS as REPORT_ASSETS

    files = [Mount(p, StaticFiles(directory=f)) for p, f in (('/assets', ASSETS), ('/report', REPORT_ASSETS))]
    return Starlette(routes=[*routes, *files], exception_handlers=handlers)
