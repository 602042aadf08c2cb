"""Reading pickles without running them: what a checkpoint may name, and what each name becomes.

A pickle calls whatever it names. torch's own loader of sharded checkpoints unpickles ``.metadata`` and every byte entry
without a limit (pytorch#189308), so a checkpoint could run anything. Here a name that is not in the tables of
``allowed.py`` is refused, and most of those that are become inert values of our own: ``GlobalName`` for a class or
function, ``InertObject`` for what it would have made. Only types of plain data (``OrderedDict``, ``timedelta``, NumPy
arrays) are really built, and a class such as ``int`` is itself again in the finished value.

[Note: hostile pickles] A pickle can also set attributes of what it names (BUILD). So a name becomes nothing that could
be changed for the rest of the process: an immutable type of C, a class of ours that is fixed (``FixedClass``), or a
value of ours that refuses a state. It can ask for memory and time without holding data; ``scan``, ``Function``
and ``Finisher`` spend a ``Budget`` before that. What is left is to make hashing slow
or deep (a dict's key of nested tuples), which hangs or ends the process, as it does with ``torch.load``.
"""

import functools
import importlib
import io
import logging
import pickle
import sys
from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING
from collections.abc import Callable
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
    Function,
    NumpyDtypeClass,
    budget,
)
from composer_fsdp2.checkpoint.pickles.finishing import Finisher
from composer_fsdp2.checkpoint.pickles.opcodes import scan
from composer_fsdp2.checkpoint.pickles.stand_ins import (
    GlobalName,
    InertObject,
    Storage,
    UnsupportedPickleError,
    short,
)
from composer_fsdp2.errors import CheckpointError

log = logging.getLogger(__name__)

# A pickle may hold one container many times.
_OBJECTS_PER_BYTE = 32


# Protocols 0 to 2 use Python 2's names of these modules and their contents: __builtin__.long is int.
_PYTHON_2_MODULES = ("__builtin__", "copy_reg", "exceptions")


class UntrustedError(CheckpointError):
    """A pickle names what is not on the list; it opens with trust=True."""


@dataclass(slots=True)
class _Names:
    """find_class of one pickle: looks a name up, or notes that it is not allowed."""

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
        """builtins.getattr: how protocol 2 writes a member of an enum, a name, and a class within a class."""
        if not (isinstance(owner, type) and issubclass(owner, InertObject)) or not isinstance(name, str):
            raise pickle.UnpicklingError(f"getattr(..., {short(name)})")
        if f"{owner.kind}.{name}" in self.inert:
            return self.find(owner.kind.module, f"{owner.kind.name}.{name}")
        return GlobalName(str(owner.kind), name)

    def _load_from_bytes(self, payload: Any) -> Storage:
        """torch.storage._load_from_bytes: a storage within a plain pickle, in the form that torch.save had until 1.6.

        Pickles of a magic number, a version, the writer's word sizes, the storage and the keys; then the number of
        elements and the elements.
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
        """('storage', class, key, location, numel), as torch.save writes it; until 1.6 with a view, since unused."""
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
    """What a pickle describes: plain data, ``StoredTensor`` for tensors, ``InertObject`` for the classes in ``inert``.

    Args:
        where: The file (and the entry in it), for messages.
        trust: Import and call whatever else the pickle names, as ``pickle.load`` would; each is named in a warning.
        inert: Full names of further classes that may occur; their objects come back as ``InertObject``.
        storages: The number of bytes that the file has for a storage key, to check against; raises KeyError.
        disk_bytes: Of what the pickle describes, for its ``Budget``.
    Raises:
        CheckpointError: the pickle names something else, or is damaged; nothing of it was run. Names what it named.
    """
    names = _Names(inert, trust, where)
    token = budget.set(Budget.of(where, disk_bytes + len(data), more_objects=_OBJECTS_PER_BYTE * len(data)))
    try:
        value = _load(io.BytesIO(data), names, storages)
        return Finisher(budget.get()).finish(value)
    except OverBudgetError:
        raise
    except Exception as error:  # a damaged pickle raises anything
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
