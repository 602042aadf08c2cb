"""An attribute of another package's object, replaced for as long as a block runs."""

import contextlib
from collections.abc import Iterator
from typing import Any

_ABSENT = object()


@contextlib.contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Within the block, an attribute of a module, a class or an instance has this value."""
    getattr(owner, name)  # raises where another version of the package has no such attribute
    before = vars(owner).get(name, _ABSENT)  # of a class what is written there, a staticmethod for one
    setattr(owner, name, value)
    try:
        yield
    finally:
        if before is _ABSENT:
            delattr(owner, name)
        else:
            setattr(owner, name, before)
