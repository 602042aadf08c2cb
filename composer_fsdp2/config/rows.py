"""Rows of a system's table of keys: what a key means and takes, and what becomes of it under FSDP2.

Reading, documentation and tests walk these tables; a new key is a new row in one of them.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from composer_fsdp2.config.findings import Finding, Outcome
from composer_fsdp2.config.text import nearest
from composer_fsdp2.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Takes:
    """Which values a key takes, in words; how one is parsed; and all of them, if they are few.

    Args:
        parse: From a value as a file or a script has it, and who reads it, to what it means. Raises ConfigError, whose
            message begins with the value.
    """

    text: str
    parse: Callable[[Any, Any], Any]
    choices: tuple[Any, ...] = ()

    def fits(self, value: Any, reader: Any = None) -> bool:
        try:
            self.parse(value, reader)
        except ConfigError:
            return False
        return True


def takes_by(text: str, parse: Callable[[Any], Any], choices: tuple[Any, ...] = ()) -> Takes:
    """Values that mean the same to all who read them."""
    return Takes(text, lambda value, reader: parse(value), choices)


def takes_if(text: str, fits: Callable[[Any], bool], choices: tuple[Any, ...] = ()) -> Takes:
    """Values for which ``fits`` is true, as they are."""

    def parse(value: Any) -> Any:
        if not fits(value):
            raise ConfigError(f"{value!r} ({type(value).__name__}); it takes {text}")
        return value

    return takes_by(text, parse, choices)


def one_of(*values: Any) -> Takes:
    """Exactly these values; True is not 1."""
    text = ", ".join(str(value).lower() if isinstance(value, bool) else str(value) for value in values)
    return takes_if(text, lambda value: _is_among(value, values), values)


def _is_among(value: Any, values: Iterable[Any]) -> bool:
    return any(value == each and type(value) is type(each) for each in values)


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


ANY = takes_if("any value", lambda value: True)
BOOL = takes_if("true or false", lambda value: isinstance(value, bool), choices=(True, False))
INT = takes_if("an integer", _is_int)
POSITIVE_INT = takes_if("an integer from 1 on", lambda value: _is_int(value) and value >= 1)
TEXT = takes_if("a string", lambda value: isinstance(value, str))


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One key of a system: its meaning there, and its usual outcome under FSDP2.

    Args:
        name: With dots, from where the system reads it.
        meaning: In its system.
        takes: How a value is parsed.
        default: The value in effect where a file does not set the key.
        neutral: Values that ask for nothing.
        aliases: Other names, such as those of earlier releases.
        nested: Keys of its value, where that may be a mapping.
        only_with: The key, or ``key = value or value``, without which the system does not read this one.
        group: The part of the system's table that it belongs to.
        fields: The fields of a run that it decides, by dotted names or prefixes of them, the most important first.
        outcome: Of a value that asks for something; with ``target``, ``reason`` and ``hint``.
        decide: From the usual finding, and the system's effective configuration, to the finding of this value.
        elsewhere: What the system's own FSDP2 does with the key.
    """

    name: str
    meaning: str = ""
    takes: Takes = ANY
    default: Any = None
    neutral: tuple[Any, ...] = ()
    aliases: tuple[str, ...] = ()
    nested: tuple[str, ...] = ()
    only_with: str = ""
    group: str = ""
    fields: tuple[str, ...] = ()
    outcome: Outcome
    target: str = ""
    reason: str = ""
    hint: str = ""
    decide: Callable[[Finding, Any], Finding] | None = None
    elsewhere: str = ""

    def is_neutral(self, value: Any) -> bool:
        return _is_among(value, self.neutral)

    def parse(self, value: Any, place: str = "", reader: Any = None) -> Any:
        """What a value means.

        Args:
            place: What stands before the name in a message.
        Raises:
            ConfigError: it takes no such value; names key and value.
        """
        try:
            return self.takes.parse(value, reader)
        except ConfigError as error:
            raise type(error)(f"{place}{self.name} is {error}", keys=(self.name,)) from error

    def usual(self, key: str, value: Any) -> Finding:
        """The finding of a value that asks for something."""
        return Finding(
            key=key, value=value, outcome=self.outcome, target=self.target, reason=self.reason, hint=self.hint
        )


def idle(finding: Finding, reason: str = "this value has no effect") -> Finding:
    """The finding of a value that asks for nothing."""
    return replace(finding, outcome=Outcome.UNNEEDED, target="", reason=reason, hint="", asks=False)


def undecided(finding: Finding, reason: str, hint: str = "") -> Finding:
    """The finding of a value of which only the user knows what it is to become."""
    return replace(finding, outcome=Outcome.NEEDS_DECISION, target="", reason=reason, hint=hint)


def unknown_key(key: str, value: Any, known: Iterable[str], reason: str, hint: str = "remove it") -> Finding:
    """A key that the system does not know: a decision where another was likely meant, else a word without effect."""
    near = nearest(key, known)
    usual = Finding(key=key, value=value, outcome=Outcome.NEEDS_DECISION, reason=reason, known=False)
    return replace(usual, hint=f"did you mean {near}?") if near else replace(idle(usual, reason), hint=hint)
