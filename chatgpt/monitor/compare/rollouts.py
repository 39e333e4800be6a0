"""The page that reads all recorded sequences of runs, as an ASGI application. The reader itself is the report's
(`report/assets/rollouts.js`); here are its questions and their answers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from chatgpt.monitor.compare.server import ASSETS, asset_routes
from chatgpt.monitor.report.rollouts import page_row
from chatgpt.monitor.run_folder import RunFolder
from chatgpt.monitor.run_folder.rollouts import read_rollouts, recorded_phases

NUM_ROWS = 200
"""of an answer to a question without `limit`"""


def rollouts_app(runs: Sequence[str | Path]) -> Any:
    """A Starlette application. `/` is the page; `/api/runs` gives name and recorded phases of each run; `/api/rollouts`
    gives rows of one, ?run=&phase=&prompt=&text=&min=&max=&offset=&limit=, of which all but `run` may be left
    out: see `read_rollouts` for what they mean, and `page_row` for a row.

    Raises:
        ValueError: a folder without recorded sequences.
    """
    from starlette.applications import Starlette
    from starlette.concurrency import run_in_threadpool
    from starlette.responses import JSONResponse
    from starlette.routing import Route
    from starlette.templating import Jinja2Templates

    folders = list(map(Path, runs))
    for folder in folders:
        if not recorded_phases(folder):
            RunFolder(folder)  # says what is wrong with one that is no run's
            raise ValueError(
                f'{folder} has no recorded sequences: give the folder of a run that draws responses (PPO, GRPO, ...), '
                'with rollouts/'
            )
    templates = Jinja2Templates(directory=ASSETS)

    async def page(request: Any) -> Any:
        return templates.TemplateResponse(request, 'rollouts.html', {'runs': list(map(_name, folders))})

    async def told(request: Any) -> Any:
        return JSONResponse([{'name': _name(folder), 'phases': recorded_phases(folder)} for folder in folders])

    async def rows(request: Any) -> Any:
        try:
            folder, asked = _question(request.query_params, folders)
        except ValueError as error:
            return JSONResponse({'error': f'this cannot be read: {error}'}, 400)
        found = await run_in_threadpool(read_rollouts, folder, **asked)
        return JSONResponse([page_row(row) for row in found])

    routes = [Route('/', page), Route('/api/runs', told), Route('/api/rollouts', rows)]
    return Starlette(routes=[*routes, *asset_routes()])


def _name(folder: Path) -> str:
    return folder.absolute().name


def _question(given: Any, folders: Sequence[Path]) -> tuple[Path, dict[str, Any]]:
    """The run and the arguments of `read_rollouts`. Raises ValueError for what is no number, or no run."""

    def whole(name: str, default: int, most: int | None = None) -> int:
        value = int(given[name]) if given.get(name) else default
        if value < 0 or (most is not None and value > most):
            raise ValueError(f'{name}={value} is out of range')
        return value

    def number(name: str) -> float | None:
        return float(given[name]) if given.get(name) else None

    asked: dict[str, Any] = {'phases': [whole('phase', 0)] if given.get('phase') else None}
    asked |= {name: given.get(name) or None for name in ('prompt', 'text')}
    asked |= {'score': (number('min'), number('max')), 'offset': whole('offset', 0)}
    folder = folders[whole('run', 0, len(folders) - 1)]
    return folder, asked | {'limit': whole('limit', NUM_ROWS)}
