"""Findings of the doctor, and the registry of checks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Literal, NamedTuple, get_args

from chatgpt.monitor.doctor.history import History

Level = Literal['error', 'warning', 'note']
LEVELS: tuple[str, ...] = get_args(Level)
"""worst first: an error makes the result wrong or worthless, a warning wastes it, a note may be intended"""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """A fault, or a possible fault, of a run."""

    key: str
    step: int
    """learning phase in which it was first seen"""
    level: Level
    title: str
    evidence: str
    """the numbers"""
    cause: str
    """the likeliest cause"""
    change: str
    """what to change, and by how much"""

    @property
    def more(self) -> str:
        """The command that explains the finding."""
        return f'chatgpt-rlhf doctor --explain {self.key}'

    def line(self) -> str:
        """Returns the finding as one line, as a run prints it."""
        return (
            f'doctor, phase {self.step}: {self.level}: {self.title}: {self.evidence}. Likely cause: {self.cause}. '
            f'Change: {self.change} ({self.more})'
        )

    def text(self) -> str:
        """Returns the finding as five lines, as the command prints it."""
        parts = {'seen': self.evidence, 'cause': self.cause, 'change': self.change, 'more': self.more}
        head = f'{self.level}, from phase {self.step}: {self.title}'
        return '\n'.join([head, *(f'  {name:8}{text}' for name, text in parts.items())])

    def row(self) -> dict[str, Any]:
        """Returns a line of findings.jsonl, without its `step`."""
        fields = asdict(self)
        return {'finding': fields.pop('key')} | {name: value for name, value in fields.items() if name != 'step'}


class Seen(NamedTuple):
    """The result of a check: numbers, likely cause, change; title and level if they differ from the check's."""

    evidence: str
    cause: str
    change: str
    title: str = ''
    level: Level | None = None


class Check(NamedTuple):
    """A check. `unless`: findings after which this one is not reported, since they have the same cause."""

    level: Level
    title: str
    unless: tuple[str, ...]
    look: Callable[[History], Seen | None]


CHECKS: dict[str, Check] = {}
"""checks by the key of their finding, in the order in which they run"""


def check(key: str, level: Level, title: str, *, unless: tuple[str, ...] = ()) -> Any:
    """Registers a function as the check of a key."""

    def register(look: Callable[[History], Seen | None]) -> Callable[[History], Seen | None]:
        CHECKS[key] = Check(level, title, unless, look)
        return look

    return register
