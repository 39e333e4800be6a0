"""run.json: settings, models, data, starts and end of a run.

The file is replaced atomically, at every start and at the end.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from chatgpt.monitor.run_folder.lines import SURROGATES, json_safe

FORMAT = 1
FILENAME = 'run.json'
Status = Literal['running', 'ended', 'stopped', 'failed']
SECRET = re.compile(r'(token|keys?|secret|passw(or)?d|credentials?|auth|bearer)\b', re.IGNORECASE)
"""names of what is not written down"""
SECRET_VALUE = re.compile(r'\bhf_\w{20,}|(?<=://)[^/@\s]+(?=@)')
"""a token of the hub; user and password in an address"""
_VALUE = r'\[[^\]]*\]|\{[^}]*\}|"(?:[^"\\]|\\.)*"|\'(?:[^\'\\]|\\.)*\'|[^,}]+'
SECRET_ITEM = re.compile(rf'(["\']?\w*{SECRET.pattern}["\']?\s*:\s*)({_VALUE})', re.IGNORECASE)
"""of a dictionary in YAML or JSON"""


def without_secrets(value: Any) -> Any:
    """Returns a text, or a value with texts at any depth, with what looks like a secret replaced by ***."""
    if isinstance(value, Mapping):
        return {k: '***' if SECRET.search(str(k)) else without_secrets(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [without_secrets(v) for v in value]
    if not isinstance(value, str):
        return value
    shown = SECRET_VALUE.sub('***', value)
    return SECRET_ITEM.sub(r'\1***', shown) if '{' in shown else shown


@dataclass(kw_only=True)
class Start:
    """A start of the run: the first, or a resume."""

    at: str
    """UTC, ISO 8601"""
    phase: int
    """number of learning phases before it"""
    command: list[str]
    """the command line, without values that look like secrets"""
    git: dict[str, Any] | None = None
    """commit of the working directory, and dirty: True if tracked files differ from it"""
    versions: dict[str, str] = field(default_factory=dict)
    machine: dict[str, Any] = field(default_factory=dict)
    """system, processor, cores, memory_gib, gpus, unused_card"""


@dataclass(kw_only=True)
class RunRecord:
    """The content of run.json. None: unknown."""

    method: str
    """name in `METHODS`, else the name of the trainer's class"""
    trainer: str
    settings: dict[str, Any] = field(default_factory=dict)
    defaults: dict[str, Any] = field(default_factory=dict)
    """default values of the settings"""
    generation: dict[str, Any] = field(default_factory=dict)
    """max_new_tokens, temperature, ...; empty if the run does not generate"""
    strategy: dict[str, Any] = field(default_factory=dict)
    """name, world_size, precision, device, seed"""
    models: dict[str, dict[str, Any]] = field(default_factory=dict)
    """kind, source, parameters and trained (numbers) of each trained model"""
    optimizers: dict[str, Any] = field(default_factory=dict)
    reward: Any = None
    """the reward, as a checkpoint describes it"""
    data: dict[str, Any] = field(default_factory=dict)
    """numbers of prompts and distinct ones, or of records and eval_records"""
    plan: dict[str, Any] | None = None
    """planned memory of a rank: peak_gib, and phases {name: GiB}"""
    num_phases: int | None = None
    starts: list[Start] = field(default_factory=list)
    status: Status = 'running'
    """'running' also if the run was killed"""
    phase: int = 0
    error: str | None = None
    ended: str | None = None

    def changed_settings(self) -> dict[str, tuple[Any, Any]]:
        """Returns {name: (value, default)} of the settings that differ from their defaults."""
        return {
            name: (value, self.defaults[name])
            for name, value in self.settings.items()
            if name in self.defaults and value != self.defaults[name]
        }

    def write(self, folder: str | os.PathLike[str]) -> None:
        """Replaces the folder's run.json atomically.

        Raises:
            OSError: if it could not be written; the old file is unchanged.
        """
        path = Path(folder, FILENAME)
        path.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps(json_safe({'format': FORMAT, **asdict(self)}), indent=1, ensure_ascii=False, allow_nan=False)
        write_text_atomically(path, text + '\n')

    @classmethod
    def read(cls, folder: str | os.PathLike[str]) -> RunRecord | None:
        """Reads the run.json of a folder; None if there is none.

        Raises:
            ValueError: if it is malformed, or has a newer format.
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
    """Returns the fields that this version has."""
    names = {f.name for f in fields(kind)}
    return {name: value for name, value in content.items() if name in names}


def write_text_atomically(path: Path, text: str) -> None:
    """Writes a text to a temporary file, syncs it and renames it.

    Raises:
        OSError: if it could not be written; the old file is unchanged.
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
