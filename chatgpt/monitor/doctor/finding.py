"""A finding of the doctor, and the checks that make one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, NamedTuple, get_args

from chatgpt.monitor.doctor.history import History

Level = Literal['error', 'warning', 'note']
LEVELS: tuple[str, ...] = get_args(Level)
"""worst first: an error makes the run's result wrong or worthless, a warning wastes it, a note may be intended"""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """Something that is wrong with a run, or may be."""

    key: str
    step: int
    """learning phase in which it was first seen"""
    level: Level
    title: str
    evidence: str
    """the numbers"""
    cause: str
    """the likeliest"""
    change: str
    """what to change, and by how much"""

    @property
    def more(self) -> str:
        """The command that explains it."""
        return f'chatgpt-rlhf doctor --explain {self.key}'

    def line(self) -> str:
        """All of it on one line, as a run says it."""
        return (
            f'doctor, phase {self.step}: {self.level}: {self.title}: {self.evidence}. Likely cause: {self.cause}. '
            f'Change: {self.change} ({self.more})'
        )

    def text(self) -> str:
        """All of it on five lines, as the command prints it."""
        parts = {'seen': self.evidence, 'cause': self.cause, 'change': self.change, 'more': self.more}
        head = f'{self.level}, from phase {self.step}: {self.title}'
        return '\n'.join([head, *(f'  {name:8}{text}' for name, text in parts.items())])

    def row(self) -> dict[str, Any]:
        """A line of findings.jsonl, but for its `step`."""
        fields = asdict(self)
        return {'finding': fields.pop('key')} | {name: value for name, value in fields.items() if name != 'step'}

    @classmethod
    def of_row(cls, row: Mapping[str, Any]) -> Finding:
        """The finding of a line of findings.jsonl. Raises KeyError for a line that lacks a part."""
        names = ('step', 'level', 'title', 'evidence', 'cause', 'change')
        return cls(key=row['finding'], **{name: row[name] for name in names})


class Seen(NamedTuple):
    """What a check has found: the numbers, the likely cause, what to change; and where they differ from the check's
    own, title and level."""

    evidence: str
    cause: str
    change: str
    title: str = ''
    level: Level | None = None


class Check(NamedTuple):
    """`unless`: findings after which this one is not reported, since they are the same thing from another side."""

    level: Level
    title: str
    unless: tuple[str, ...]
    look: Callable[[History], Seen | None]


CHECKS: dict[str, Check] = {}
"""by the key of what they find, in the order in which they are asked"""


def check(key: str, level: Level, title: str, *, unless: tuple[str, ...] = ()) -> Any:
    """Registers a function as the check of a key."""

    def register(look: Callable[[History], Seen | None]) -> Callable[[History], Seen | None]:
        CHECKS[key] = Check(level, title, unless, look)
        return look

    return register
