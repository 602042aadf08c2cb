"""Stand-ins for classes and functions that a pickle names: inert values that store the arguments and run nothing."""

import collections
import math
import pickle
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch


class UnsupportedPickleError(pickle.UnpicklingError):
    """A pickle contains a value that is harmless but not supported by this package."""


class FixedClass(type):
    """A metaclass whose classes a pickle cannot modify. The opcode BUILD could otherwise set their attributes."""

    def __setattr__(cls, name: str, value: Any) -> NoReturn:
        raise pickle.UnpicklingError(f"sets {name} of a class")

    def __delattr__(cls, name: str) -> NoReturn:
        raise pickle.UnpicklingError(f"deletes {name} of a class")


def no_state(self: Any, state: Any) -> NoReturn:
    raise pickle.UnpicklingError(f"a {type(self).__name__} with a state")


@dataclass(frozen=True, slots=True)
class GlobalName:
    """A class or function that a pickle names. It is neither imported nor called."""

    module: str
    name: str
    __setstate__ = no_state

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


class InertObject(metaclass=FixedClass):
    """The arguments and the state of an object that a pickle would create by calling ``kind``, as data."""

    kind: GlobalName
    state: Any = None

    def __new__(cls, *args: Any, **kwargs: Any) -> "InertObject":
        built = super().__new__(cls)
        built._args = []  # NEWOBJ does not initialise
        return built

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._args: list[Any] = list(args if not kwargs else (*args, kwargs))

    @property
    def args(self) -> tuple[Any, ...]:
        """The arguments of the call, followed by the items that the pickle appended."""
        return tuple(self._args)

    @args.setter
    def args(self, args: Iterable[Any]) -> None:
        self._args = list(args)

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def field(self, name: str, default: Any = None) -> Any:
        """An attribute of the object that would be created, for classes with a ``__dict__`` or with ``__slots__``."""
        state = self.state
        if isinstance(state, tuple) and len(state) == 2:  # (__dict__ or None, slots)
            state = {**(state[0] or {}), **(state[1] or {})}
        return state.get(name, default) if isinstance(state, dict) else default

    # A pickled list, dict or set subclass fills itself through these.
    def append(self, value: Any) -> None:
        self._args.append(value)

    def extend(self, values: Iterable[Any]) -> None:
        self._args.extend(values)

    def __setitem__(self, key: Any, value: Any) -> None:
        self._args.append((key, value))

    def __repr__(self) -> str:
        return f"<{self.kind}>"


@dataclass(frozen=True, slots=True)
class Storage:
    """The bytes of one or more tensors, by their key in the file of the pickle."""

    key: str
    dtype: torch.dtype
    numel: int
    device: str = "cpu"
    data: bytes | None = field(default=None, repr=False)  # if the pickle itself contains them, outside of an archive
    __setstate__ = no_state

    @property
    def num_bytes(self) -> int:
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor as a pickle describes it: a strided view of a storage. Offset and strides are in elements."""

    storage: Storage
    dtype: torch.dtype
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    requires_grad: bool = False
    __setstate__ = no_state

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def contains_inert(value: Any) -> bool:
    """Whether a nested value contains an ``InertObject``."""
    if isinstance(value, dict):
        return any(map(contains_inert, value)) or any(map(contains_inert, value.values()))
    if isinstance(value, list | tuple | set | frozenset | collections.deque):
        return any(map(contains_inert, value))
    return isinstance(value, InertObject)


def short(value: Any) -> str:
    """Format a value for a message. Containers are shown by type only, because their text has no maximum length."""
    if isinstance(value, GlobalName):
        return str(value)[:100]
    return repr(value)[:100] if isinstance(value, str | int | bytes) else f"a {type(value).__name__}"
