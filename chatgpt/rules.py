"""Settings that do not go together, as rows of tables: a condition, and the sentence for the user.

A row reads an object that has the settings it names, whatever the class: a config of a trainer, a run of the command, a
setup of the planner. The tables stand in `strategies.rules`, `trainer.rules` and `launch.rules`. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import MISSING, dataclass, fields
from typing import Any


@dataclass(frozen=True)
class Rule:
    """Settings that exclude each other.

    Args:
        condition: true of settings that break the rule.
        sentence: a format string over the settings `s`, such as 'tis_cap={s.tis_cap}: ...', or a function that makes
            the sentence out of them.
    """

    condition: Callable[[Any], Any]
    sentence: str | Callable[[Any], str]

    def broken_by(self, settings: Any) -> str | None:
        """The sentence where `settings` break the rule."""
        if not self.condition(settings):
            return None
        return self.sentence.format(s=settings) if isinstance(self.sentence, str) else self.sentence(settings)


def check(settings: Any, rules: Iterable[Rule]) -> None:
    """Raises ValueError with the sentence of the first rule that `settings` break."""
    for rule in rules:
        if (sentence := rule.broken_by(settings)) is not None:
            raise ValueError(sentence)


def is_changed(settings: Any, name: str) -> bool:
    """Whether a dataclass has this setting, and with another value than its default."""
    field = next((f for f in fields(settings) if f.name == name), None)
    if field is None:
        return False
    default = field.default_factory() if field.default_factory is not MISSING else field.default
    return bool(getattr(settings, name) != default)


def changed(names: Iterable[str], among: Callable[[Any], Any], sentence: str) -> list[Rule]:
    """A rule for each setting of `names`: where `among` holds, it has its default. `sentence` may name it as
    {name}, with its value as {value!r}."""

    def rule(name: str) -> Rule:
        def told(s: Any) -> str:
            return sentence.format(s=s, name=name, value=getattr(s, name))

        return Rule(lambda s: among(s) and is_changed(s, name), told)

    return [rule(name) for name in names]
