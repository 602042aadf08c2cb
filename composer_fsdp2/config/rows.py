"""Rows of a system's table of keys: what a key means and takes, and what becomes of it under FSDP2.

Reading, documentation and tests walk these tables; a new key is a new row in one of them.
"""

import enum
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
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


class Aspect(enum.Enum):
    """What of a run a key decides; a target's key for it goes where the old key stood."""

    MESH = "mesh"
    RESHARD = "reshard_after_forward"
    PRECISION = "mixed_precision"
    OFFLOAD = "cpu_offload"
    CHECKPOINTING = "activation_checkpointing"
    BACKWARD_PREFETCH = "prefetch in backward"
    FORWARD_PREFETCH = "prefetch in forward"
    GRADIENT_SYNC = "gradient_sync"
    SYNC = "sync_module_states"
    WRAP = "wrap"
    FREEZE = "freeze"
    CONTEXT = "context parallelism"
    TILING = "tiled MLP"
    EXPERTS = "idle experts"
    STATE_DICT = "state_dict_type"
    ASYNC_SAVE = "async_save"
    OTHER = "other"  # each its own: no key of a dialect stands for another's


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One key of a system: what it means there, and its usual outcome. A value can have another; ``decide`` says it.

    Args:
        name: With dots, from where the system reads it.
        default: What the system takes if the file does not say it.
        defaults: The same, by who reads the file, where readers differ.
        takes: How a value is parsed.
        outcome: Of a value that asks for something.
        neutral: Values that ask for nothing.
        decide: Where the value decides the outcome: from the usual finding, and what the system's reader knows of the
            whole section, to the finding that holds.
        aspect: What of a run the key decides.
        detail_of: The aspect whose key it stands by, as a detail of it; alone it decides none.
        tells_default: Whether a file without it asks for something all the same, by its default.
        only_with: The key without which the system does not read this one.
        aliases: Other names of the key, such as those of earlier releases.
        nested: Keys of its value, where that may be a mapping.
        instead_of: Keys that say the same in other words; one only can be given.
        of_modules: What becomes of the key in the settings of a single module; None where it is not known there.
        group: Which part of the system's table it belongs to.
        read_by: Who reads it, if not everyone; for all others it is a word without effect.
        checked_by: Who stops at a bad value, and does nothing with a good one.
        instead: By a reader that passes over it, what does the same there.
        capability: What of a run the key asks a target for, by its name in ``migration/capabilities.py``; what the
            target makes of it is told of the key.
        elsewhere: What the system's own FSDP2 does with it.
        sets: The field of a ``ShardingConfig`` that holds the parsed value, with dots, if one does.
        rewrite: From the row, the value and the whole section to the entries of the system's own FSDP2 words that come
            in its place; None keeps it as it is.
    """

    name: str
    meaning: str = ""
    default: Any = None
    defaults: Mapping[Any, Any] = field(default_factory=dict)
    takes: Takes = ANY
    outcome: Outcome
    target: str = ""
    reason: str = ""
    hint: str = ""
    neutral: tuple[Any, ...] = ()
    decide: Callable[[Finding, Any], Finding] | None = None
    aspect: Aspect = Aspect.OTHER
    detail_of: Aspect = Aspect.OTHER
    tells_default: bool = False
    only_with: str = ""
    aliases: tuple[str, ...] = ()
    nested: tuple[str, ...] = ()
    instead_of: tuple[str, ...] = ()
    of_modules: Outcome | None = None
    group: str = ""
    read_by: Collection[Any] = ()
    checked_by: Collection[Any] = ()
    instead: Mapping[Any, str] = field(default_factory=dict)
    capability: str = ""
    elsewhere: str = ""
    sets: str = ""
    rewrite: Callable[["Row", Any, Mapping[str, Any]], list[tuple[str, Any]]] | None = None

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


def finding_of(row: Row, key: str, value: Any, *, is_read: bool = True) -> Finding:
    """What usually becomes of ``row`` with this value.

    Args:
        key: As the report names it.
        is_read: Whether the key in ``row.only_with`` is on.
    """
    usual = row.usual(key, value)
    if not row.takes.fits(value):
        hint = "remove it" if row.default is None else f"its default is {row.default!r}"
        reason = f"this key takes {row.takes.text}"
        return undecided(usual, reason, hint)
    if row.only_with and not is_read:
        return idle(usual, f"it is read only together with {row.only_with}, which is off")
    return idle(usual) if row.is_neutral(value) else usual


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
