"""Rules about settings that exclude each other: a condition and an error message.

A rule reads any object that has the settings it names: a config of a trainer, a run of the command, a setup of the
planner. The tables of rules are in `strategies.rules`, `trainer.rules` and `launch.rules`. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import MISSING, dataclass, fields
from typing import Any


@dataclass(frozen=True)
class Rule:
    """Settings that exclude each other.

    Args:
        condition: returns a true value for settings that break the rule.
        sentence: the error message, as a format string over the settings `s`, such as 'tis_cap={s.tis_cap}: ...', or a
            function of the settings.
    """

    condition: Callable[[Any], Any]
    sentence: str | Callable[[Any], str]

    def broken_by(self, settings: Any) -> str | None:
        """Returns the error message if `settings` break the rule, else None."""
        if not self.condition(settings):
            return None
        return self.sentence.format(s=settings) if isinstance(self.sentence, str) else self.sentence(settings)


def check(settings: Any, rules: Iterable[Rule]) -> None:
    """Raises ValueError with the message of the first rule that `settings` break."""
    for rule in rules:
        if (sentence := rule.broken_by(settings)) is not None:
            raise ValueError(sentence)


def is_changed(settings: Any, name: str) -> bool:
    """Returns True if a dataclass has the setting `name` and its value is not the default."""
    field = next((f for f in fields(settings) if f.name == name), None)
    if field is None:
        return False
    default = field.default_factory() if field.default_factory is not MISSING else field.default
    return bool(getattr(settings, name) != default)


def changed(names: Iterable[str], among: Callable[[Any], Any], sentence: str) -> list[Rule]:
    """Returns a rule for each setting of `names`: it must keep its default where `among` is true. `sentence` may
    contain {name} and {value!r}."""

    def rule(name: str) -> Rule:
        def message(s: Any) -> str:
            return sentence.format(s=s, name=name, value=getattr(s, name))

        return Rule(lambda s: among(s) and is_changed(s, name), message)

    return [rule(name) for name in names]
