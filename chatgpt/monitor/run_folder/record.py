"""run.json: what a run is, with what settings it was started, on what and when, and how it ended.

It is replaced as a whole, at every start and at the end; its numbers are in metrics.jsonl.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from chatgpt.monitor.run_folder.lines import SURROGATES, json_safe

FORMAT = 1
FILENAME = 'run.json'
Status = Literal['running', 'ended', 'stopped', 'failed']


@dataclass(kw_only=True)
class Start:
    """One start of the run: the first, or a resume."""

    at: str
    """UTC, ISO 8601"""
    phase: int
    """learning phases done before it"""
    command: list[str]
    """the command line; what looks like a secret is left out"""
    git: dict[str, Any] | None = None
    """commit, and whether tracked files differ from it, of the folder that the command was given in"""
    versions: dict[str, str] = field(default_factory=dict)
    machine: dict[str, Any] = field(default_factory=dict)
    """system, processor, cores, memory_gib, gpus"""


@dataclass(kw_only=True)
class RunRecord:
    """What run.json holds. None is unknown."""

    method: str
    """name in `METHODS` where there is one, else of the trainer's class"""
    trainer: str
    settings: dict[str, Any] = field(default_factory=dict)
    defaults: dict[str, Any] = field(default_factory=dict)
    """of the same settings, when nothing is given"""
    generation: dict[str, Any] = field(default_factory=dict)
    """max_new_tokens, temperature, ...; empty where nothing generates"""
    strategy: dict[str, Any] = field(default_factory=dict)
    """name, world_size, precision, device, seed"""
    models: dict[str, dict[str, Any]] = field(default_factory=dict)
    """of each trained model kind, source, parameters, trained"""
    optimizers: dict[str, Any] = field(default_factory=dict)
    reward: Any = None
    """what scores, as a checkpoint describes it"""
    data: dict[str, Any] = field(default_factory=dict)
    """prompts and how many of them are distinct; or records and eval_records"""
    plan: dict[str, Any] | None = None
    """peak_gib, and phases {name: GiB}: memory of a rank, as planned"""
    num_phases: int | None = None
    starts: list[Start] = field(default_factory=list)
    status: Status = 'running'
    """also of a run that was killed"""
    phase: int = 0
    error: str | None = None
    ended: str | None = None

    def changed_settings(self) -> dict[str, tuple[Any, Any]]:
        """{name: (value, default)} of the settings that differ from their defaults."""
        return {
            name: (value, self.defaults[name])
            for name, value in self.settings.items()
            if name in self.defaults and value != self.defaults[name]
        }

    def write(self, folder: str | os.PathLike[str]) -> None:
        """Replace the folder's run.json at once.

        Raises:
            OSError: it could not be written; the one before is untouched.
        """
        path = Path(folder, FILENAME)
        path.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps(json_safe({'format': FORMAT, **asdict(self)}), indent=1, ensure_ascii=False, allow_nan=False)
        write_text_atomically(path, text + '\n')

    @classmethod
    def read(cls, folder: str | os.PathLike[str]) -> RunRecord | None:
        """That of a folder; None where there is none.

        Raises:
            ValueError: it is no such file, or of a newer format.
        """
        path = Path(folder, FILENAME)
        if not path.is_file():
            return None
        try:
            content = json.loads(path.read_text(encoding='utf-8'))
        except ValueError as error:
            raise ValueError(f'{path} is not JSON: {error}') from None
        if not isinstance(content, Mapping) or not isinstance(content.get('format'), int):
            raise ValueError(f'{path} is not the record of a run')
        if content['format'] > FORMAT:
            raise ValueError(f'{path} has format {content["format"]}; this version reads up to {FORMAT}')
        try:
            starts = [Start(**_known(Start, start)) for start in content.get('starts', [])]
            return cls(**{**_known(cls, content), 'starts': starts})
        except (TypeError, AttributeError) as error:
            raise ValueError(f'{path} is not the record of a run: {error}') from None


def _known(kind: type, content: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that this version knows."""
    names = {f.name for f in fields(kind)}
    return {name: value for name, value in content.items() if name in names}


def write_text_atomically(path: Path, text: str) -> None:
    """The whole text or nothing, durable.

    Raises:
        OSError: it could not be written; what was there is untouched.
    """
    temporary = path.with_name(f'.{path.name}.tmp-{os.getpid()}')
    try:
        with open(temporary, 'w', encoding='utf-8', errors=SURROGATES) as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
