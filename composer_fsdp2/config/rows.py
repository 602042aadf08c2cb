"""The row type of the tables of keys: one row has a key's meaning, accepted values, and outcome under FSDP2.

Each system (Composer, Hugging Face, ...) has one table. Parsers, documentation and tests iterate over it.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from composer_fsdp2.config.findings import Finding, Outcome
from composer_fsdp2.config.text import nearest
from composer_fsdp2.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Takes:
    """The accepted values of a key: a description, a parser, and the list of values if it is short.

    Args:
        parse: Called with a value and the reader (which system reads it); returns the parsed value. Raises ConfigError
            with a message that begins with the value.
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
    """Accepted values that have the same meaning for every reader."""
    return Takes(text, lambda value, reader: parse(value), choices)


def takes_if(text: str, fits: Callable[[Any], bool], choices: tuple[Any, ...] = ()) -> Takes:
    """Values for which ``fits`` is true; they are not converted."""

    def parse(value: Any) -> Any:
        if not fits(value):
            raise ConfigError(f"{value!r} ({type(value).__name__}); it takes {text}")
        return value

    return takes_by(text, parse, choices)


def one_of(*values: Any) -> Takes:
    """Only these values; True is not equal to 1."""
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
    """One key of a system: its meaning, and its default outcome under FSDP2.

    Args:
        name: The dotted path within the section that the system reads.
        meaning: The meaning in its system.
        takes: The accepted values.
        default: The value that the system uses if a file does not set the key.
        neutral: Values that have no effect.
        aliases: Other names, such as those of earlier releases.
        nested: The keys allowed in the value, if it may be a mapping.
        only_with: A condition (``key``, or ``key = value or value``); if it is false, the system ignores this key.
        group: The heading of the table under which documentation lists the row.
        fields: Fields of a run that the key sets, as dotted names or prefixes, the most important first.
        outcome: The default outcome of a value with an effect, with ``target``, ``reason`` and ``hint``.
        decide: Called with the default finding and the system's effective configuration; returns the finding for a
            value.
        elsewhere: How the FSDP2 mode of the system itself treats the key.
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
        """Return the parsed value.

        Args:
            place: A prefix of the key's name in the error message, such as the section.
        Raises:
            ConfigError: the value is not accepted; names key and value.
        """
        try:
            return self.takes.parse(value, reader)
        except ConfigError as error:
            raise type(error)(f"{place}{self.name} is {error}", keys=(self.name,)) from error

    def usual(self, key: str, value: Any) -> Finding:
        """The finding of a value with an effect."""
        return Finding(
            key=key, value=value, outcome=self.outcome, target=self.target, reason=self.reason, hint=self.hint
        )


def idle(finding: Finding, reason: str = "this value has no effect") -> Finding:
    """The finding of a value without effect."""
    return replace(finding, outcome=Outcome.UNNEEDED, target="", reason=reason, hint="", asks=False)


def undecided(finding: Finding, reason: str, hint: str = "") -> Finding:
    """Return the finding for a value whose replacement only the user can choose."""
    return replace(finding, outcome=Outcome.NEEDS_DECISION, target="", reason=reason, hint=hint)


def unknown_key(key: str, value: Any, known: Iterable[str], reason: str, hint: str = "remove it") -> Finding:
    """Return the finding for an unknown key.

    It needs a decision if a known key has a similar name; otherwise it has no effect.
    """
    near = nearest(key, known)
    usual = Finding(key=key, value=value, outcome=Outcome.NEEDS_DECISION, reason=reason, known=False)
    return replace(usual, hint=f"did you mean {near}?") if near else replace(idle(usual, reason), hint=hint)
