"""Read pickles without executing them: check their names against the allow-list, and use stand-ins for objects.

A pickle can call any function that it names. torch's own loader of sharded checkpoints unpickles ``.metadata`` and
every bytes entry without restrictions (pytorch#189308), so a checkpoint could execute any code. Here a name that is not
in the tables of ``allowed.py`` is rejected, and most of those in the tables get inert stand-ins: ``GlobalName`` for a
class or function, ``InertObject`` for the object that a call would create. Only types of plain data (``OrderedDict``,
``timedelta``, NumPy arrays) are created. In the finished value a class such as ``int`` is the class itself again.

[Note: hostile pickles] A pickle can also set attributes of the objects that it names (BUILD). No stand-in may therefore
be modifiable for the rest of the process: each is an immutable type in C, a class of ours that is fixed
(``FixedClass``), or a value of ours that rejects a state. A pickle can take memory and time without any data; ``scan``,
``Function`` and ``Finisher`` spend a ``Budget`` first. It can still make hashing slow or deep (a dict key of nested
tuples), which hangs or crashes the process, as it does with ``torch.load``.
"""

import collections
import functools
import importlib
import io
import logging
import pickle
import re
import sys
from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from composer_fsdp2.checkpoint.budget import Budget, OverBudgetError
from composer_fsdp2.checkpoint.pickles.allowed import (
    DATA,
    DTYPES,
    INERT,
    STORAGES,
    TENSOR,
    UNSUPPORTED,
    Array,
    Dtype,
    Function,
    NumpyDtypeClass,
    Range,
    budget,
    real_class,
)
from composer_fsdp2.checkpoint.pickles.stand_ins import (
    GlobalName,
    InertObject,
    Storage,
    StoredTensor,
    UnsupportedPickleError,
    short,
)
from composer_fsdp2.errors import CheckpointError

# The size of the object that an opcode creates: a single byte may create a set of 216 bytes.
_OBJECT_BYTES = {
    b"]": 72, b"}": 80, b"\x8f": 232, b"l": 72, b"d": 250, b"t": 64, b"\x85": 64, b"\x86": 72, b"\x87": 80,
    b"\x91": 232,
    b"N": 8, b"\x88": 8, b"\x89": 8, b")": 8, b"(": 8, b"2": 8,
}  # fmt: skip
_MAX_NUMBER_BYTES = 1024  # Python writes no number of more than 4,300 digits
_TEXT_BYTES = 192  # a text, bytes or number with a length, without its content; and an iteration of the loop below

# Opcodes by what follows them (pickletools): nothing or a fixed number of bytes; a length; lines of text.
_FIXED = re.compile(
    rb"(?:[(012NQRabd}elos\])tu\x81\x85-\x89\x8f-\x94]|[Khq\x80].|M..|[Jj]....|[G\x95].{8})*+", re.DOTALL
)
_LENGTH_BYTES = {
    **dict.fromkeys((b"U", b"C", b"\x8c", b"\x8a"), 1),
    **dict.fromkeys((b"T", b"B", b"X", b"\x8b"), 4),
    **dict.fromkeys((b"\x8e", b"\x8d", b"\x96"), 8),
}
_LINES = {**dict.fromkeys((b"I", b"F", b"L", b"S", b"V", b"P", b"g", b"p"), 1), b"c": 2, b"i": 2}


def scan(data: bytes, at: int, budget: Budget) -> None:
    """Check a pickle's opcodes without executing them.

    Rejects a memo number above the number of bytes of the pickle, which no writer needs: Python below 3.14 allocates a
    table up to the largest memo number, so ten bytes could allocate 32 GiB (CPython issue 115952). Also rejects a
    pickle whose many small objects would take too much memory, and extension codes, which import by a number.
    """
    memo_number = 0
    while True:
        fixed = _FIXED.match(data, at)
        assert fixed is not None  # it also matches the empty string
        budget.spend("its many objects", num_bytes=_TEXT_BYTES + _bytes_of_objects(fixed.group()))
        opcode, at = data[fixed.end() : fixed.end() + 1], fixed.end() + 1
        if opcode == b".":
            return
        if opcode == b"r":
            memo_number, at = int.from_bytes(data[at : at + 4], "little"), at + 4
        elif opcode in _LENGTH_BYTES:
            width = _LENGTH_BYTES[opcode]
            length = int.from_bytes(data[at : at + width], "little")
            if opcode == b"\x8b" and length > _MAX_NUMBER_BYTES:
                raise UnsupportedPickleError(f"holds a number of {length} bytes, which is not supported")
            at += width + length
        elif opcode in _LINES:
            for _ in range(_LINES[opcode]):
                start, at = at, data.find(b"\n", at) + 1 or len(data)
            if opcode == b"p":
                memo_number = int(data[start:at])
        elif opcode and at <= len(data):
            raise pickle.UnpicklingError(f"an unsupported opcode {opcode!r}")
        if at >= len(data):
            raise pickle.UnpicklingError("truncated")
        if memo_number > len(data):
            raise pickle.UnpicklingError("a memo number beyond the pickle's length")


def _bytes_of_objects(opcodes: bytes) -> int:
    """An upper bound of the memory of the objects that these opcodes create. Operands are counted as opcodes."""
    if len(opcodes) < 16:  # between two texts; most are short and create few objects
        return 32 * len(opcodes)
    return sum(num_bytes * opcodes.count(opcode) for opcode, num_bytes in _OBJECT_BYTES.items())


_MAX_DEPTH = 200  # readers of the value recurse
_LEAVES = frozenset({str, int, float, bool, bytes, type(None), StoredTensor})  # most parts; checked without a call
_CONTAINERS = (dict, list, tuple, set, frozenset, collections.deque, InertObject)


@dataclass(slots=True)
class Finisher:
    """Replaces stand-ins by NumPy arrays and dtypes, ranges and classes. Rejects values that take too long to traverse.

    Containers are modified in place, because one may be in several others. A dozen lists, each twice in the next, are
    small in a pickle, but 4096 lists for a reader that traverses them. Each is therefore traversed once here, and its
    parts are counted.
    """

    budget: Budget
    # By id: the value (to keep it alive), its replacement, the number of its parts, and their depth.
    _done: dict[int, tuple[Any, Any, int, int]] = field(default_factory=dict)
    _depth: int = 0
    # So far, in the current value.
    _num_parts: int = 0
    _height: int = 0

    def finish(self, value: Any) -> Any:
        if type(value) in _LEAVES or not isinstance(value, _CONTAINERS):
            return real_class(value)
        if id(value) not in self._done:
            outer = self._num_parts, self._height
            self._depth += 1
            self._check()
            self._num_parts, self._height = (1 if isinstance(value, InertObject) else len(value)), 0
            new = self._finish_parts(value)
            self._depth -= 1
            self._done[id(value)] = value, new, self._num_parts, self._height + 1
            self._num_parts, self._height = outer
        _, new, num_parts, height = self._done[id(value)]
        self._num_parts += num_parts
        self._height = max(self._height, height)
        self._check()
        return new

    def _check(self) -> None:
        if self._depth + self._height > _MAX_DEPTH:
            raise pickle.UnpicklingError(f"containers nested deeper than {_MAX_DEPTH}, or within themselves")
        if self._num_parts > self.budget.num_objects:
            self.budget.spend("containers in the pickle", num_objects=self._num_parts)

    def _finish_parts(self, value: Any) -> Any:
        if isinstance(value, tuple):
            if all(type(part) in _LEAVES for part in value):
                return value
            finished = tuple(map(self.finish, value))
            is_same = all(new is old for new, old in zip(finished, value, strict=True))
            return value if is_same else finished
        if isinstance(value, set | frozenset):
            self._finish_hashed(value)
        elif isinstance(value, dict):
            # A pickle may set attributes of an OrderedDict, such as `items`, which would be called instead.
            getattr(value, "__dict__", {}).clear()
            self._finish_hashed(value)
            for key, part in value.items():
                if type(part) not in _LEAVES:
                    value[key] = self.finish(part)
        elif isinstance(value, list | collections.deque):
            for number, part in enumerate(value):
                if type(part) not in _LEAVES:
                    value[number] = self.finish(part)
        elif isinstance(value, Array):
            return self._finish_array(value)
        elif isinstance(value, Dtype):
            return value.value()
        elif isinstance(value, Range):
            return self._finish_range(value)
        else:
            value.args, value.state = self.finish(value.args), self.finish(value.state)
        return value

    def _finish_array(self, array: Array) -> Any:
        if not isinstance(array.state, tuple) or len(array.state) != 5:
            raise pickle.UnpicklingError("a NumPy array without its values")
        version, shape, dtype, is_fortran, data = array.state
        array.state = version, shape, self.finish(dtype), is_fortran, data
        if isinstance(data, bytes):
            self.budget.spend("arrays in the pickle", num_bytes=len(data))
        return array.value()

    def _finish_range(self, value: Range) -> range:
        """Create a range. It counts as as many parts as it has numbers, because a reader may copy it into a list."""
        numbers = value.value()
        self._num_parts += len(numbers[: 1 + int(self.budget.num_objects)])
        return numbers

    def _finish_hashed(self, parts: Iterable[Any]) -> None:
        """Check the keys of a dict and the members of a set. Raises for a stand-in, which could not be replaced."""
        for part in parts:
            if type(part) not in _LEAVES and self.finish(part) is not part:
                raise UnsupportedPickleError("holds a NumPy value, a range or a class as a key, which is not supported")


log = logging.getLogger(__name__)

# A pickle may refer to one container many times.
_OBJECTS_PER_BYTE = 32


# Protocols 0 to 2 use Python 2's names of these modules and their contents: __builtin__.long is int.
_PYTHON_2_MODULES = ("__builtin__", "copy_reg", "exceptions")


class UntrustedError(CheckpointError):
    """A pickle contains a name that is not on the allow-list. ``trust=True`` allows it."""


@dataclass(slots=True)
class _Names:
    """``find_class`` of one pickle: looks a name up in the allow-list, and records names that are not in it."""

    inert: frozenset[str]
    trust: bool
    where: str
    refused: list[str] = field(default_factory=list)
    _made: dict[str, Any] = field(default_factory=dict)

    def find(self, module: str, name: str) -> Any:
        if module in _PYTHON_2_MODULES:
            module, name = NAME_MAPPING.get((module, name), (IMPORT_MAPPING.get(module, module), name))
        full = f"{module}.{name}"
        if full not in self._made:
            self._made[full] = self._look_up(module, name, full)
        return self._made[full]

    def _look_up(self, module: str, name: str, full: str) -> Any:
        if full in TENSOR:
            return TENSOR[full]
        if full in DATA:
            return DATA[full]
        if full == "builtins.getattr":
            return Function(self._member)
        if full == "torch.storage._load_from_bytes":
            return Function(self._load_from_bytes)
        if full in INERT or (module == "torch" and name.removesuffix("Storage") in STORAGES):
            return GlobalName(module, name)
        if module == "torch" and name in DTYPES:
            return DTYPES[name]
        if full in UNSUPPORTED:
            raise UnsupportedPickleError(f"holds {UNSUPPORTED[full]}, which is not supported")
        if module == "numpy.dtypes" and name.endswith("DType"):
            return type(name, (NumpyDtypeClass,), {"kind": GlobalName(module, name), "code": _numpy_code(name)})
        if full in self.inert:
            return type(name, (InertObject,), {"kind": GlobalName(module, name)})
        if self.trust:
            log.warning("%s: trusted, so %s is imported and may run", self.where, full)
            return _imported(module, name)
        self.refused.append(full)
        raise pickle.UnpicklingError(full)

    def _member(self, owner: Any, name: Any) -> Any:
        """Replaces builtins.getattr, by which protocol 2 pickles members of enums, names, and nested classes."""
        if not (isinstance(owner, type) and issubclass(owner, InertObject)) or not isinstance(name, str):
            raise pickle.UnpicklingError(f"getattr(..., {short(name)})")
        if f"{owner.kind}.{name}" in self.inert:
            return self.find(owner.kind.module, f"{owner.kind.name}.{name}")
        return GlobalName(str(owner.kind), name)

    def _load_from_bytes(self, payload: Any) -> Storage:
        """Replaces torch.storage._load_from_bytes: a storage within a plain pickle, as torch.save wrote it until 1.6.

        The format is pickles of a magic number, a version, the writer's integer sizes, the storage and the keys; then
        the number of elements and the elements.
        """
        if not isinstance(payload, bytes):
            raise pickle.UnpicklingError("a storage from something else than bytes")
        file = io.BytesIO(payload)
        values = [_load(file, self, lambda key: sys.maxsize) for _ in range(5)]
        storage = values[3]
        if not isinstance(storage, Storage) or values[2].get("little_endian") is not True:
            raise pickle.UnpicklingError("a storage that torch does not write, or of a big-endian machine")
        numel, data = int.from_bytes(file.read(8), "little"), file.read()
        if numel != storage.numel or len(data) != storage.num_bytes:
            raise pickle.UnpicklingError(f"a storage of {storage.numel} elements holds {len(data)} bytes")
        return Storage(storage.key, storage.dtype, storage.numel, storage.device, data)


def _imported(module: str, name: str) -> Any:
    try:
        return functools.reduce(getattr, name.split("."), importlib.import_module(module))
    except (ImportError, AttributeError) as error:
        raise UnsupportedPickleError(f"names {module}.{name}, which cannot be imported here ({error})") from error


def _numpy_code(name: str) -> str:
    """UInt32DType → uint32."""
    return name.removesuffix("DType").lower()


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, names: _Names, storages: Callable[[str], int] | None) -> None:
        super().__init__(file, encoding="utf-8")
        self._names = names
        self._storages = storages

    def find_class(self, module: str, name: str) -> Any:
        return self._names.find(module, name)

    def persistent_load(self, saved_id: Any) -> Storage:
        """Create a ``Storage`` for ('storage', class, key, location, numel), as torch.save writes it.

        torch until 1.6 appended a view, which must be None.
        """
        if isinstance(saved_id, tuple) and len(saved_id) == 6 and saved_id[5] is None:
            saved_id = saved_id[:5]
        if not (isinstance(saved_id, tuple) and len(saved_id) == 5 and saved_id[0] == "storage"):
            raise pickle.UnpicklingError(f"a persistent id that is not a storage: {short(saved_id)}")
        _, kind, key, location, numel = saved_id
        name = kind.name.removesuffix("Storage") if isinstance(kind, GlobalName) else ""
        dtype = STORAGES.get(name)
        if dtype is None or not all(isinstance(text, str) for text in (key, location)):
            raise pickle.UnpicklingError(f"a storage of kind {short(kind)}")
        if not isinstance(numel, int) or numel < 0 or self._storages is None:
            raise pickle.UnpicklingError(f"storage {key} cannot be here")
        storage = Storage(key, dtype, numel, location)
        if (there := self._storages(key)) < storage.num_bytes:
            raise pickle.UnpicklingError(f"storage {key} should have {storage.num_bytes} bytes and has {there}")
        return storage


def _load(file: io.BytesIO, names: _Names, storages: Callable[[str], int] | None) -> Any:
    """The next pickle in a file."""
    scan(file.getvalue(), file.tell(), budget.get())
    return _Unpickler(file, names, storages).load()


def read_pickle(
    data: bytes,
    *,
    where: str,
    trust: bool = False,
    inert: frozenset[str] = frozenset(),
    storages: Callable[[str], int] | None = None,
    disk_bytes: int = 0,
) -> Any:
    """Read a pickle as data: plain values, ``StoredTensor`` for tensors, ``InertObject`` for the classes in ``inert``.

    Args:
        where: The file (and the entry in it), for messages.
        trust: Import and call all other names in the pickle, as ``pickle.load`` would; a warning lists them.
        inert: Full names of further classes that are allowed; their objects are returned as ``InertObject``.
        storages: Returns the number of bytes that the file has for a storage key, to check against; raises KeyError.
        disk_bytes: The number of bytes on disk that the pickle describes, for its ``Budget``.
    Raises:
        CheckpointError: the pickle contains a name that is not allowed, or is damaged. Lists these names. Nothing in
            the pickle was executed.
    """
    names = _Names(inert, trust, where)
    token = budget.set(Budget.of(where, disk_bytes + len(data), more_objects=_OBJECTS_PER_BYTE * len(data)))
    try:
        value = _load(io.BytesIO(data), names, storages)
        return Finisher(budget.get()).finish(value)
    except OverBudgetError:
        raise
    except Exception as error:  # a damaged pickle may raise any exception
        if names.refused:
            raise UntrustedError(
                f"{where}: the pickle names {', '.join(dict.fromkeys(names.refused))}, which could run anything, and "
                "was not read; if you know who wrote it, read it with trust=True (--trust; trust_checkpoint: true in "
                "an fsdp_config)"
            ) from None
        if isinstance(error, UnsupportedPickleError):
            raise CheckpointError(f"{where}: {error}") from None
        text = str(error) or type(error).__name__
        raise CheckpointError(f"{where}: damaged pickle ({text})") from error
    finally:
        budget.reset(token)
