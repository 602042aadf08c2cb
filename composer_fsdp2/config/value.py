"""The base class of the frozen value types, and their conversion to JSON."""

import enum
import json
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass, replace
from functools import cache
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

T = TypeVar("T")


class Value:
    """Base class of frozen dataclasses that convert to JSON, one entry per field.

    A field with ``metadata={"json": False}`` is omitted. With ``metadata={"json": function}``, the function converts
    the field's value.
    """

    __slots__ = ()

    def to_json(self) -> dict[str, Any]:
        values: dict[str, Any] = plain(self)
        return values


def with_field(value: T, name: str, new: Any) -> T:
    """Return a copy of ``value`` with one field changed. ``name`` may be dotted, for a field of a nested value."""
    first, _, rest = name.partition(".")
    inner = with_field(getattr(value, first), rest, new) if rest else new
    return replace(value, **{first: inner})  # type: ignore[type-var]


def plain(value: object) -> Any:
    """Convert to JSON types; other types are converted by ``str``."""
    return json.loads(json_text(value))


def json_text(value: object) -> str:
    """The value as one line of JSON."""
    return json.dumps(value, default=_simpler)


def from_json(kind: type[T], text: str | bytes) -> T:
    """Parse ``text``, written by ``json_text``, to the dataclass ``kind``.

    Fields may be dataclasses, enums, tuples and JSON types.
    """
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
    """Convert one level of a type that JSON does not support."""
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
    return str(value)  # also for iterables, such as modules


@cache
def _forms(cls: type) -> tuple[list[str], dict[str, Callable[[Any], object]]]:
    """Return the names of the fields in JSON, and the conversion function of each field that has one."""
    forms = {field.name: field.metadata.get("json") for field in fields(cls)}
    written = {name: form for name, form in forms.items() if form is not False}
    return list(written), {name: form for name, form in written.items() if form is not None}
