"""The pages on which people compare answers, as an ASGI application."""

from __future__ import annotations

import sqlite3
from typing import Any

from chatgpt.monitor.compare.server import ASSETS, asset_routes
from chatgpt.monitor.compare.statistics import lines, summarize
from chatgpt.monitor.compare.store import MAX_COMMENT, MAX_NAME, NotAsked, Store


def compare_app(store: Store) -> Any:
    """A Starlette application. `/` is the page, `/results` says what came out and which model is which; the page posts
    JSON to `/api/...`, and every answer is the state after it: person, pair, progress."""
    from starlette.applications import Starlette
    from starlette.responses import JSONResponse
    from starlette.routing import Route
    from starlette.templating import Jinja2Templates

    templates = Jinja2Templates(directory=ASSETS)
    # Cookies do not know ports, and a number means another person in another file.
    cookie = f'chatgpt_person_{store.settings.get("id", "")}'

    async def page(request: Any) -> Any:
        limits = {'max_name': MAX_NAME, 'max_comment': MAX_COMMENT}
        return templates.TemplateResponse(request, 'compare.html', limits)

    async def results(request: Any) -> Any:
        return templates.TemplateResponse(request, 'results.html', {'lines': lines(summarize(store))})

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
        """join {name}, next {}, judge {pair, choice, comment}, undo {}: 400 for what is no such thing, 401 before
        somebody has joined, 409 where it cannot be so any more."""
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
    return Starlette(
        routes=[Route('/', page), Route('/results', results), actions, *asset_routes()],
        exception_handlers={sqlite3.Error: not_saved},
    )


def _perform(store: Store, person: Any, action: str, given: Any) -> int | None:
    """Do what the page asks for; the person, who may be new.

    Raises:
        NotAsked: it cannot be so any more.
        ValueError, KeyError, TypeError: it is no such thing.
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
    value.encode()  # half of a surrogate pair is no text either, and cannot be stored
    return value
