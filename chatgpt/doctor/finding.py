"""What the doctor says: one finding, from what was seen to what to change."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

Level = Literal['error', 'warning', 'note']
LEVELS: tuple[str, ...] = get_args(Level)
"""worst first: an error makes the run's result wrong or worthless, a warning wastes it, a note may be what is wanted"""
PAGE = 'docs/doctor.md'


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that is wrong with a run, or may be."""

    key: str
    """also the anchor of its section in docs/doctor.md"""
    step: int
    """learning phase in which it was first seen"""
    level: Level
    title: str
    """what, in a few words"""
    evidence: str
    """the numbers"""
    cause: str
    """the likeliest"""
    change: str
    """what to change, and by how much"""

    @property
    def link(self) -> str:
        return f'{PAGE}#{self.key}'

    def line(self) -> str:
        """All of it on one line, as a run says it."""
        return (
            f'doctor, phase {self.step}: {self.level}: {self.title}: {self.evidence}. Likely cause: {self.cause}. '
            f'Change: {self.change} ({self.link})'
        )

    def text(self) -> str:
        """All of it on five lines, as the command prints it."""
        return '\n'.join(
            [
                f'{self.level}, from phase {self.step}: {self.title}',
                f'  seen    {self.evidence}',
                f'  cause   {self.cause}',
                f'  change  {self.change}',
                f'  more    {self.link}',
            ]
        )

    def row(self) -> dict[str, Any]:
        """A line of findings.jsonl, but for its `step`."""
        fields = asdict(self)
        return {'finding': fields.pop('key')} | {name: value for name, value in fields.items() if name != 'step'}

    @classmethod
    def of_row(cls, row: Mapping[str, Any]) -> Finding:
        """The finding of a line of findings.jsonl.

        Raises:
            KeyError: the line lacks a part.
        """
        names = ('step', 'level', 'title', 'evidence', 'cause', 'change')
        return cls(key=row['finding'], **{name: row[name] for name in names})
