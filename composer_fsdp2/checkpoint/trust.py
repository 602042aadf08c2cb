"""Reading pickles without running them: what a checkpoint may name, and what each name becomes.

A pickle calls whatever it names. torch's own loader of sharded checkpoints unpickles ``.metadata`` and every byte entry
without a limit (pytorch#189308), so a checkpoint could run anything. Here a name that is not in the tables below is
refused, and most of those that are become inert values of our own: ``Named`` for a class or function, ``Built`` for
what it would have made. Only types of plain data (``OrderedDict``, ``timedelta``, NumPy arrays) are really built.

[Note: hostile pickles] A pickle can also set attributes of what it names (BUILD). So a name becomes nothing that could
be changed for the rest of the process: an immutable type of C, or a value of ours that refuses a state. It can ask for
memory without holding data; `_scan` and `_Finisher` see that before it is given. What is left is to make hashing slow
or deep (a dict's key of nested tuples), which hangs or ends the process, as it does with ``torch.load``.
"""

import codecs
import collections
import datetime
import functools
import importlib
import io
import logging
import math
import pickle
import re
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch

from composer_fsdp2.errors import CheckpointError

__all__ = ["Built", "Named", "Storage", "StoredTensor", "UntrustedError", "contains_built", "read_pickle"]

log = logging.getLogger(__name__)

_MAX_DEPTH = 200  # what reads the value afterwards recurses
_MAX_DIMS = 64  # NumPy's limit
# A tensor that repeats its storage (stride 0) may be larger than it, but not without bound: reading it allocates it.
_MAX_EXPANDED_BYTES = 256 << 20


class UntrustedError(CheckpointError):
    """A pickle names what is not on the list; it opens with trust=True."""


class _UnsupportedError(pickle.UnpicklingError):
    """A pickle holds something harmless that this package does not handle."""


def _no_state(self: Any, state: Any) -> NoReturn:
    raise pickle.UnpicklingError(f"a {type(self).__name__} with a state")


@dataclass(frozen=True, slots=True)
class Named:
    """A class or function that a pickle names, and that stays a name."""

    module: str
    name: str
    __setstate__ = _no_state

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


class Built:
    """What a pickle would have built by calling ``kind``: the call, and the state it would have set, as data."""

    kind: Named
    args: tuple[Any, ...] = ()
    state: Any = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.args = args if not kwargs else (*args, kwargs)

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def field(self, name: str, default: Any = None) -> Any:
        """An attribute that the object would have, whether its class kept a ``__dict__`` or ``__slots__``."""
        state = self.state
        if isinstance(state, tuple) and len(state) == 2:  # (__dict__ or None, slots)
            state = {**(state[0] or {}), **(state[1] or {})}
        return state.get(name, default) if isinstance(state, dict) else default

    # A pickled list, dict or set subclass fills itself through these.
    def append(self, value: Any) -> None:
        self.args = (*self.args, value)

    def extend(self, values: Iterable[Any]) -> None:
        self.args = (*self.args, *values)

    def __setitem__(self, key: Any, value: Any) -> None:
        self.args = (*self.args, (key, value))

    def __repr__(self) -> str:
        return f"<{self.kind}>"


@dataclass(frozen=True, slots=True)
class Storage:
    """The bytes behind one or more tensors, by their key in the file that the pickle came from."""

    key: str
    dtype: torch.dtype
    numel: int
    device: str = "cpu"
    data: bytes | None = field(default=None, repr=False)  # where the pickle itself held them, outside of an archive
    __setstate__ = _no_state

    @property
    def num_bytes(self) -> int:
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor as a pickle describes it: a strided view of a storage (offset and strides in elements)."""

    storage: Storage
    dtype: torch.dtype
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    requires_grad: bool = False
    __setstate__ = _no_state

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


# ---------------------------------------------------------------------------------------------------------------------
# What names become


class _Function:
    """A function that a pickle may call. An object, so that no pickle sets attributes on the function."""

    __slots__ = ("_call",)

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call

    def __call__(self, *args: Any) -> Any:
        return self._call(*args)

    __setstate__ = _no_state


def _short(value: Any) -> str:
    """For a message: not of a container, whose text may be endless."""
    return repr(value)[:100] if isinstance(value, str | int | bytes | Named) else f"a {type(value).__name__}"


@_Function
def _tensor(storage: Any, offset: Any, shape: Any, stride: Any, *rest: Any) -> StoredTensor:
    """torch._utils._rebuild_tensor, _v2 and, with a dtype of its own, _v3."""
    dtype = next((value for value in rest if isinstance(value, torch.dtype)), None)
    if not isinstance(storage, Storage):
        raise pickle.UnpicklingError("a tensor without a storage")
    if rest and isinstance(rest[-1], dict) and any(value is True for value in rest[-1].values()):
        # {'conj': True}: the storage holds other values than the tensor.
        raise _UnsupportedError("holds a tensor saved as a conjugated or negated view, which is not supported")
    dtype = dtype or storage.dtype
    shape, stride = tuple(shape), tuple(stride)
    numbers = (offset, *shape, *stride)
    if not all(isinstance(n, int) and 0 <= n < 1 << 63 for n in numbers) or not len(shape) == len(stride) <= _MAX_DIMS:
        raise pickle.UnpicklingError("a tensor whose shape, strides or offset cannot be")
    if dtype != storage.dtype:  # an untyped storage counts bytes
        storage = Storage(storage.key, dtype, storage.num_bytes // dtype.itemsize, storage.device, storage.data)
    said = f"a tensor of shape {shape}, stride {stride}, offset {offset}"
    last = offset + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
    if math.prod(shape) and last >= storage.numel:
        raise pickle.UnpicklingError(f"{said} does not fit its storage of {storage.numel}")
    if math.prod(shape) * dtype.itemsize > max(storage.num_bytes, _MAX_EXPANDED_BYTES):
        raise pickle.UnpicklingError(
            f"{said} repeats a storage of {storage.numel} to more than {_MAX_EXPANDED_BYTES} bytes"
        )
    requires_grad = bool(rest and rest[0] is True)
    return StoredTensor(storage, dtype, offset, shape, stride, requires_grad)


@_Function
def _parameter(data: Any, requires_grad: Any = True, *rest: Any) -> Any:
    return data


@_Function
def _from_type(function: Any, kind: Any, args: Any, state: Any) -> Any:
    """torch._tensor._rebuild_from_type_v2: a tensor without its attributes, or a wrapper."""
    if function not in (_tensor, _parameter, _wrapper_subclass):
        raise pickle.UnpicklingError(f"a tensor rebuilt by {_short(function)}")
    rebuilt = function(*args)
    if isinstance(rebuilt, Built):
        rebuilt.state = state
    return rebuilt


@_Function
def _wrapper_subclass(kind: Any, *args: Any) -> Built:
    """torch._utils._rebuild_wrapper_subclass: a ShardedTensor or DTensor, whose tensors are in its state."""
    if not (isinstance(kind, type) and issubclass(kind, Built)):
        raise pickle.UnpicklingError(f"a tensor of class {_short(kind)}")
    return kind(*args)


@_Function
def _encode(text: Any, encoding: Any = "utf-8", *rest: Any) -> bytes:
    """_codecs.encode: how protocol 2 writes bytes."""
    if not isinstance(text, str) or encoding not in ("latin1", "latin-1", "utf-8"):
        raise pickle.UnpicklingError(f"text encoded as {_short(encoding)}")
    return codecs.encode(text, encoding)


@_Function
def _bytes(value: Any = b"", *rest: Any) -> bytes:
    """bytes and bytearray, without those of a given length: a pickle may not ask for memory."""
    if isinstance(value, str) and rest:
        return _encode(value, *rest)
    if not isinstance(value, bytes | bytearray | list | tuple):
        raise pickle.UnpicklingError(f"bytes of {type(value).__name__}")
    return bytes(value)


@_Function
def _bytearray(value: Any = b"", *rest: Any) -> bytearray:
    return bytearray(_bytes(value, *rest))


@_Function
def _array(kind: Any, shape: Any, typecode: Any) -> Any:
    """numpy.core.multiarray._reconstruct: an empty array, filled by __setstate__."""
    if kind != Named("numpy", "ndarray") or tuple(shape) != (0,):
        raise pickle.UnpicklingError(f"an array of type {_short(kind)}")
    return _Array()


@_Function
def _array_from_buffer(data: Any, dtype: Any, shape: Any, order: Any, *rest: Any) -> Any:
    """numpy.core.numeric._frombuffer, the form of protocol 5."""
    array = _Array()
    array.state = (1, shape, dtype, order == "F", bytes(data) if isinstance(data, bytearray) else data)
    return array


class _Array(Built):
    """A NumPy array between its making and its __setstate__; becomes an array once the whole pickle is read."""

    kind = Named("numpy", "ndarray")

    def value(self) -> Any:
        import numpy

        _, shape, dtype, is_fortran, data = self.state
        if not isinstance(dtype, numpy.dtype) or not isinstance(data, bytes):
            raise pickle.UnpicklingError("a NumPy array that holds no plain numbers")
        flat = numpy.frombuffer(data, dtype=dtype)
        return flat.reshape(shape, order="F" if is_fortran else "C").copy()


@_Function
def _scalar(dtype: Any, data: Any) -> Any:
    """numpy.core.multiarray.scalar."""
    import numpy

    if not isinstance(dtype, _Dtype) or not isinstance(data, bytes):
        raise pickle.UnpicklingError("a NumPy scalar of an object type")
    return numpy.frombuffer(data, dtype=dtype.value())[0]


class _Dtype(Built):
    """numpy.dtype('f8', align, copy) and its __setstate__, which says the byte order."""

    kind = Named("numpy", "dtype")
    code: str | None = None

    def value(self) -> Any:
        import numpy

        code = self.args[0] if self.args else self.code
        order: Any = self.state[1] if isinstance(self.state, tuple) and len(self.state) > 1 else "="
        if not isinstance(code, str) or not code.isalnum() or len(code) > 16 or order not in ("<", ">", "=", "|"):
            raise pickle.UnpicklingError(f"numpy.dtype({_short(code)}) of byte order {_short(order)}")
        dtype = numpy.dtype(code)
        if dtype.kind not in "biufcSU":  # O holds objects; V has fields
            raise pickle.UnpicklingError(f"numpy.dtype({code!r}), which is no plain number or text")
        return dtype.newbyteorder(order)


class _NumpyDtypeClass(_Dtype):
    """numpy.dtypes.UInt32DType() and the like."""


class _Text(str):
    """torch.torch_version.TorchVersion, a str and read as one."""

    def __new__(cls, text: Any = "") -> Any:
        if not isinstance(text, str):
            raise pickle.UnpicklingError(f"a version that is {_short(text)}")
        return text


@_Function
def _counter(counts: Any = ()) -> dict[Any, Any]:
    """collections.Counter, a dict. Not the class, which a pickle could change for everybody."""
    return dict(counts)


@_Function
def _size(sizes: Any = ()) -> tuple[int, ...]:
    """torch.Size."""
    return tuple(sizes)


@_Function
def _device(*said: Any) -> str:
    """torch.device('cuda', 0)."""
    if not all(isinstance(part, str | int) for part in said):
        raise pickle.UnpicklingError("a device that is no name")
    return ":".join(map(str, said))


_TENSOR: dict[str, Any] = {
    "torch._utils._rebuild_tensor": _tensor,
    "torch._utils._rebuild_tensor_v2": _tensor,
    "torch._utils._rebuild_tensor_v3": _tensor,
    "torch._utils._rebuild_parameter": _parameter,
    "torch._utils._rebuild_parameter_with_state": _parameter,
    "torch._utils._rebuild_wrapper_subclass": _wrapper_subclass,
    "torch._tensor._rebuild_from_type_v2": _from_type,
}

_DATA: dict[str, Any] = {
    "collections.OrderedDict": collections.OrderedDict,
    "collections.Counter": _counter,
    "collections.deque": collections.deque,
    "datetime.timedelta": datetime.timedelta,
    "datetime.datetime": datetime.datetime,
    "datetime.timezone": datetime.timezone,
    "_codecs.encode": _encode,
    "builtins.set": set,
    "builtins.frozenset": frozenset,
    "builtins.complex": complex,
    "builtins.slice": slice,
    "builtins.bytes": _bytes,
    "builtins.bytearray": _bytearray,
    "torch.torch_version.TorchVersion": _Text,
    "torch.Size": _size,
    "torch.device": _device,
    "numpy.dtype": _Dtype,
    # NumPy 1's names and NumPy 2's.
    "numpy.core.multiarray._reconstruct": _array,
    "numpy._core.multiarray._reconstruct": _array,
    "numpy.core.multiarray.scalar": _scalar,
    "numpy._core.multiarray.scalar": _scalar,
    "numpy.core.numeric._frombuffer": _array_from_buffer,
    "numpy._core.numeric._frombuffer": _array_from_buffer,
}

# Harmless, and nothing that a checkpoint of ours could hold.
_UNSUPPORTED = {
    "torch._utils._rebuild_sparse_tensor": "a sparse tensor",
    "torch._utils._rebuild_qtensor": "a quantized tensor",
    "torch._utils._rebuild_nested_tensor": "a nested tensor",
    "torch._utils._rebuild_meta_tensor_no_storage": "a tensor on the meta device, which has no values",
    "torch._utils._rebuild_device_tensor_from_numpy": "a tensor of a device that saves through NumPy",
    "torch._utils._rebuild_device_tensor_from_cpu_tensor": "a tensor of a device that saves through the CPU",
    **{f"torch.{name}Storage": "a quantized tensor" for name in ("QInt8", "QUInt8", "QInt32", "QUInt4x2", "QUInt2x4")},
}

_DTYPES = {name: value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}

# Types and functions that a pickle may hold as values; they are not called.
_INERT = {
    "torch.Tensor",
    "torch.nn.parameter.Parameter",
    "torch.storage.UntypedStorage",
    "torch.storage.TypedStorage",
    "numpy.ndarray",
}

# Legacy storage classes: torch.FloatStorage and the like.
_STORAGES = {
    "Double": torch.float64,
    "Float": torch.float32,
    "Half": torch.float16,
    "BFloat16": torch.bfloat16,
    "Long": torch.int64,
    "Int": torch.int32,
    "Short": torch.int16,
    "Char": torch.int8,
    "Byte": torch.uint8,
    "Bool": torch.bool,
    "ComplexDouble": torch.complex128,
    "ComplexFloat": torch.complex64,
    "Untyped": torch.uint8,
}


@dataclass(slots=True)
class _Names:
    """find_class of one pickle: looks a name up, or notes that it is not allowed."""

    inert: frozenset[str]
    trust: bool
    where: str
    refused: list[str] = field(default_factory=list)
    _made: dict[str, Any] = field(default_factory=dict)

    def find(self, module: str, name: str) -> Any:
        module = {"__builtin__": "builtins", "copy_reg": "copyreg"}.get(module, module)
        full = f"{module}.{name}"
        if full not in self._made:
            self._made[full] = self._look_up(module, name, full)
        return self._made[full]

    def _look_up(self, module: str, name: str, full: str) -> Any:
        if full in _TENSOR:
            return _TENSOR[full]
        if full in _DATA:
            return _DATA[full]
        if full == "builtins.getattr":
            return _Function(self._member)
        if full == "torch.storage._load_from_bytes":
            return _Function(self._load_from_bytes)
        if full in _INERT or (module == "torch" and name.removesuffix("Storage") in _STORAGES):
            return Named(module, name)
        if module == "torch" and name in _DTYPES:
            return _DTYPES[name]
        if full in _UNSUPPORTED:
            raise _UnsupportedError(f"holds {_UNSUPPORTED[full]}, which is not supported")
        if module == "numpy.dtypes" and name.endswith("DType"):
            return type(name, (_NumpyDtypeClass,), {"kind": Named(module, name), "code": _numpy_code(name)})
        if full in self.inert:
            return type(name, (Built,), {"kind": Named(module, name)})
        if self.trust:
            log.warning("%s: trusted, so %s is imported and may run", self.where, full)
            return _imported(module, name)
        self.refused.append(full)
        raise pickle.UnpicklingError(full)

    def _member(self, owner: Any, name: Any) -> Any:
        """builtins.getattr: how protocol 2 writes a member of an enum, a name, and a class within a class."""
        if not (isinstance(owner, type) and issubclass(owner, Built)) or not isinstance(name, str):
            raise pickle.UnpicklingError(f"getattr(..., {_short(name)})")
        if f"{owner.kind}.{name}" in self.inert:
            return self.find(owner.kind.module, f"{owner.kind.name}.{name}")
        return Named(str(owner.kind), name)

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
        raise _UnsupportedError(f"names {module}.{name}, which cannot be imported here ({error})") from error


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
            raise pickle.UnpicklingError(f"a persistent id that is no storage: {_short(saved_id)}")
        _, kind, key, location, numel = saved_id
        name = kind.name.removesuffix("Storage") if isinstance(kind, Named) else ""
        dtype = _STORAGES.get(name)
        if dtype is None or not all(isinstance(text, str) for text in (key, location)):
            raise pickle.UnpicklingError(f"a storage of kind {_short(kind)}")
        if not isinstance(numel, int) or numel < 0 or self._storages is None:
            raise pickle.UnpicklingError(f"storage {key} cannot be here")
        storage = Storage(key, dtype, numel, location)
        if (there := self._storages(key)) < storage.num_bytes:
            raise pickle.UnpicklingError(f"storage {key} should have {storage.num_bytes} bytes and has {there}")
        return storage


def _load(file: io.BytesIO, names: _Names, storages: Callable[[str], int] | None) -> Any:
    """The next pickle in a file."""
    _scan(file.getvalue(), file.tell())
    return _Unpickler(file, names, storages).load()


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


def _scan(data: bytes, at: int) -> None:
    """Walk over a pickle's opcodes without carrying them out.

    Python below 3.14 makes a table as long as the highest memo number that a pickle names, so ten bytes could ask for
    32 GiB (CPython issue 115952). No writer numbers more objects than its pickle has bytes. Also refused: extension
    codes, which would name what is imported by a number.
    """
    memo_number = 0
    while True:
        fixed = _FIXED.match(data, at)
        assert fixed is not None  # it matches nothing, too
        opcode, at = data[fixed.end() : fixed.end() + 1], fixed.end() + 1
        if opcode == b".":
            return
        if opcode == b"r":
            memo_number, at = int.from_bytes(data[at : at + 4], "little"), at + 4
        elif opcode in _LENGTH_BYTES:
            width = _LENGTH_BYTES[opcode]
            at += width + int.from_bytes(data[at : at + width], "little")
        elif opcode in _LINES:
            for _ in range(_LINES[opcode]):
                start, at = at, data.find(b"\n", at) + 1 or len(data)
            if opcode == b"p":
                memo_number = int(data[start:at])
        elif opcode and at <= len(data):
            raise pickle.UnpicklingError(f"an opcode {opcode!r}, which no checkpoint has")
        if at >= len(data):
            raise pickle.UnpicklingError("truncated")
        if memo_number > len(data):
            raise pickle.UnpicklingError("a memo number beyond the pickle's length")


def read_pickle(
    data: bytes,
    *,
    where: str,
    trust: bool = False,
    inert: frozenset[str] = frozenset(),
    storages: Callable[[str], int] | None = None,
) -> Any:
    """What a pickle describes: plain data, ``StoredTensor`` for tensors, ``Built`` for the classes in ``inert``.

    Args:
        where: The file (and the entry in it), for messages.
        trust: Import and call whatever else the pickle names, as ``pickle.load`` would; each is named in a warning.
        inert: Full names of further classes that may occur; their objects come back as ``Built``.
        storages: The number of bytes that the file has for a storage key, to check against; raises KeyError.
    Raises:
        CheckpointError: the pickle names something else, or is damaged; nothing of it was run. Names what it named.
    """
    names = _Names(inert, trust, where)
    try:
        value = _load(io.BytesIO(data), names, storages)
        return _Finisher(max_parts=_MAX_PARTS + 32 * len(data)).finish(value)
    except Exception as error:  # a damaged pickle raises anything
        if names.refused:
            raise UntrustedError(
                f"{where}: the pickle names {', '.join(dict.fromkeys(names.refused))}, which could run anything, and "
                "was not read; if you know who wrote it, read it with trust=True (--trust)"
            ) from None
        if isinstance(error, _UnsupportedError):
            raise CheckpointError(f"{where}: {error}") from None
        text = str(error) or type(error).__name__
        raise CheckpointError(f"{where}: damaged pickle ({text})") from error


def contains_built(value: Any) -> bool:
    """Whether some part of a value stands for an object that was not built."""
    if isinstance(value, dict):
        return any(map(contains_built, value)) or any(map(contains_built, value.values()))
    if isinstance(value, list | tuple | set | frozenset | collections.deque):
        return any(map(contains_built, value))
    return isinstance(value, Built)


# Beyond 32 for each byte of the pickle, which may hold one container many times.
_MAX_PARTS = 1_000_000
_LEAVES = frozenset({str, int, float, bool, bytes, type(None), StoredTensor})  # most parts; seen without a call
_CONTAINERS = (dict, list, tuple, set, frozenset, collections.deque, Built)


@dataclass(slots=True)
class _Finisher:
    """Puts NumPy's arrays and dtypes in place of ours, and refuses what would be endless to walk through.

    Containers are changed in place: one may be in several others. A dozen lists, each twice in the next, are small in a
    pickle and 4096 lists to whoever walks through them; so each is walked once here, and its parts are counted.
    """

    max_parts: int
    # By id: the value (kept alive), the new one, the number of its parts, how deep they are nested.
    _done: dict[int, tuple[Any, Any, int, int]] = field(default_factory=dict)
    _depth: int = 0
    # Of the value that is being finished, so far.
    _num_parts: int = 0
    _height: int = 0

    def finish(self, value: Any) -> Any:
        if type(value) in _LEAVES or not isinstance(value, _CONTAINERS):
            return value
        if id(value) not in self._done:
            outer = self._num_parts, self._height
            self._depth += 1
            self._check()
            self._num_parts, self._height = (1 if isinstance(value, Built) else len(value)), 0
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
        if self._num_parts > self.max_parts:
            raise pickle.UnpicklingError("containers that repeat each other without end")

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
            self._finish_hashed(value)
            for key, part in value.items():
                if type(part) not in _LEAVES:
                    value[key] = self.finish(part)
        elif isinstance(value, list | collections.deque):
            for number, part in enumerate(value):
                if type(part) not in _LEAVES:
                    value[number] = self.finish(part)
        elif isinstance(value, _Array):
            version, shape, dtype, is_fortran, data = value.state
            value.state = version, shape, self.finish(dtype), is_fortran, data
            return value.value()
        elif isinstance(value, _Dtype):
            return value.value()
        else:
            value.args, value.state = self.finish(value.args), self.finish(value.state)
        return value

    def _finish_hashed(self, parts: Iterable[Any]) -> None:
        """Keys and members stay as they are; where one is a value of ours, nothing could look it up."""
        for part in parts:
            if type(part) not in _LEAVES and self.finish(part) is not part:
                raise pickle.UnpicklingError("a NumPy value as a key")
