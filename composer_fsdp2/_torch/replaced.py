"""Temporarily replace an attribute of another package's object."""

import contextlib
from collections.abc import Iterator
from typing import Any

_ABSENT = object()


@contextlib.contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Set an attribute of a module, class or instance, and restore it at the end of the block.

    Raises:
        AttributeError: the object has no such attribute.
    """
    getattr(owner, name)
    before = vars(owner).get(name, _ABSENT)  # the raw descriptor of a class attribute, e.g. a staticmethod
    setattr(owner, name, value)
    try:
        yield
    finally:
        if before is _ABSENT:
            delattr(owner, name)
        else:
            setattr(owner, name, before)
