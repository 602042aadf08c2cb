"""The base class of the frozen value types, and their conversion to JSON."""

import enum
import json
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass, replace
from functools import cache
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

T = TypeVar("T")


class Value:
    """A frozen dataclass that is written as JSON field by field, each under its own name.

    A field with ``metadata={"json": False}`` is left out; with a function there, what that makes of it is written.
    """

    __slots__ = ()

    def to_json(self) -> dict[str, Any]:
        values: dict[str, Any] = plain(self)
        return values


def with_field(value: T, name: str, new: Any) -> T:
    """The dataclass with another value of one field; of a nested field by its dotted name."""
    first, _, rest = name.partition(".")
    inner = with_field(getattr(value, first), rest, new) if rest else new
    return replace(value, **{first: inner})  # type: ignore[type-var]


def plain(value: object) -> Any:
    """The value as JSON types; anything else as its text."""
    return json.loads(json_text(value))


def json_text(value: object) -> str:
    """The value as one line of JSON."""
    return json.dumps(value, default=_simpler)


def from_json(kind: type[T], text: str | bytes) -> T:
    """The value of this type whose ``json_text`` this is: dataclasses, enums, tuples of them, and JSON's own types."""
    value: T = _typed(kind, json.loads(text))
    return value


def _typed(kind: Any, value: Any) -> Any:
    if isinstance(kind, type) and is_dataclass(kind):
        types = get_type_hints(kind)
        return kind(**{name: _typed(types[name], each) for name, each in value.items()})
    if get_origin(kind) is tuple:
        return tuple(_typed(get_args(kind)[0], each) for each in value)
    return kind(value) if isinstance(kind, enum.EnumMeta) else value


def _simpler(value: object) -> object:
    """One level of what JSON has no word for."""
    if isinstance(value, Value):
        names, forms = _forms(type(value))  # type: ignore[arg-type]
        each = {name: getattr(value, name) for name in names}
        return {**each, **{name: form(each[name]) for name, form in forms.items()}} if forms else each
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, Mapping):
        return {str(key): each for key, each in value.items()}
    if isinstance(value, set | frozenset):
        return sorted(map(plain, value))
    return str(value)  # also of what can be walked through, such as a module


@cache
def _forms(cls: type) -> tuple[list[str], dict[str, Callable[[Any], object]]]:
    """The fields that are written, and what is written of some of them in their place."""
    forms = {field.name: field.metadata.get("json") for field in fields(cls)}
    written = {name: form for name, form in forms.items() if form is not False}
    return list(written), {name: form for name, form in written.items() if form is not None}
