"""Reading pickles without running them: what a checkpoint may name, and what each name becomes.

A pickle calls whatever it names. torch's own loader of sharded checkpoints unpickles ``.metadata`` and every byte entry
without a limit (pytorch#189308), so a checkpoint could run anything. Here a name that is not in the tables below is
refused, and most of those that are become inert values of our own: ``Named`` for a class or function, ``Built`` for
what it would have made. Only types of plain data (``OrderedDict``, ``timedelta``, NumPy arrays) are really built.
"""

import codecs
import collections
import datetime
import io
import logging
import math
import pickle
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch

from composer_fsdp2.errors import CheckpointError

__all__ = ["Built", "Named", "Storage", "StoredTensor", "contains_built", "read_pickle"]

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Named:
    """A class or function that a pickle names, and that stays a name."""

    module: str
    name: str

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

    def __setstate__(self, state: Any) -> NoReturn:
        raise pickle.UnpicklingError("a function with a state")


@_Function
def _tensor(storage: Any, offset: Any, shape: Any, stride: Any, *rest: Any) -> StoredTensor:
    """torch._utils._rebuild_tensor, _v2 and, with a dtype of its own, _v3."""
    dtype = next((value for value in rest if isinstance(value, torch.dtype)), None)
    if not isinstance(storage, Storage):
        raise pickle.UnpicklingError("a tensor without a storage")
    dtype = dtype or storage.dtype
    shape, stride = tuple(shape), tuple(stride)
    numbers = (offset, *shape, *stride)
    if len(shape) != len(stride) or not all(isinstance(n, int) and n >= 0 for n in numbers):
        raise pickle.UnpicklingError(f"a tensor of shape {shape}, stride {stride}, offset {offset}")
    if dtype != storage.dtype:  # an untyped storage counts bytes
        storage = Storage(storage.key, dtype, storage.num_bytes // dtype.itemsize, storage.device)
    last = offset + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
    if math.prod(shape) and last >= storage.numel:
        raise pickle.UnpicklingError(
            f"a tensor of shape {shape}, stride {stride}, offset {offset} does not fit its storage of {storage.numel}"
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
        raise pickle.UnpicklingError(f"a tensor rebuilt by {function}")
    rebuilt = function(*args)
    if isinstance(rebuilt, Built):
        rebuilt.state = state
    return rebuilt


@_Function
def _wrapper_subclass(kind: Any, *args: Any) -> Built:
    """torch._utils._rebuild_wrapper_subclass: a ShardedTensor or DTensor, whose tensors are in its state."""
    if not (isinstance(kind, type) and issubclass(kind, Built)):
        raise pickle.UnpicklingError(f"a tensor of class {kind}")
    return kind(*args)


@_Function
def _getattr(owner: Any, name: Any) -> Named:
    """builtins.getattr: how protocol 2 writes a member of an enum. A name, whatever the owner."""
    if not (isinstance(owner, type) and issubclass(owner, Built)) or not isinstance(name, str):
        raise pickle.UnpicklingError(f"getattr(..., {name!r})")
    return Named(str(owner.kind), name)


@_Function
def _encode(text: Any, encoding: Any = "utf-8", *rest: Any) -> bytes:
    """_codecs.encode: how protocol 2 writes bytes."""
    if not isinstance(text, str) or encoding not in ("latin1", "latin-1", "utf-8"):
        raise pickle.UnpicklingError(f"text encoded as {encoding!r}")
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
        raise pickle.UnpicklingError(f"an array of type {kind}")
    return _Array()


class _Array(Built):
    """A NumPy array between its making and its __setstate__; becomes an array once the whole pickle is read."""

    kind = Named("numpy", "ndarray")

    def value(self) -> Any:
        import numpy

        _, shape, dtype, is_fortran, data = self.state
        if not isinstance(dtype, numpy.dtype) or dtype.hasobject or not isinstance(data, bytes):
            raise pickle.UnpicklingError(f"an array of {dtype}")
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
        if not isinstance(code, str) or len(code) > 8 or "O" in code or "V" in code:
            raise pickle.UnpicklingError(f"numpy.dtype({code!r})")
        order: Any = self.state[1] if isinstance(self.state, tuple) and len(self.state) > 1 else "="
        if order not in ("<", ">", "=", "|"):
            raise pickle.UnpicklingError(f"a NumPy byte order {order!r}")
        return numpy.dtype(code).newbyteorder(order)


class _NumpyDtypeClass(_Dtype):
    """numpy.dtypes.UInt32DType() and the like."""


class _Text(str):
    """torch.torch_version.TorchVersion, a str; becomes one once the whole pickle is read."""

    def __setstate__(self, state: Any) -> NoReturn:
        raise pickle.UnpicklingError("a text with a state")


@_Function
def _size(sizes: Any = ()) -> tuple[int, ...]:
    """torch.Size."""
    return tuple(sizes)


@_Function
def _device(*said: Any) -> str:
    """torch.device('cuda', 0)."""
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
    "builtins.getattr": _getattr,
    "torch.torch_version.TorchVersion": _Text,
    "torch.Size": _size,
    "torch.device": _device,
    "numpy.dtype": _Dtype,
    # NumPy 1's names and NumPy 2's.
    "numpy.core.multiarray._reconstruct": _array,
    "numpy._core.multiarray._reconstruct": _array,
    "numpy.core.multiarray.scalar": _scalar,
    "numpy._core.multiarray.scalar": _scalar,
}

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
        if full in _INERT or (module == "torch" and name.removesuffix("Storage") in _STORAGES):
            return Named(module, name)
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if module == "numpy.dtypes" and name.endswith("DType"):
            return type(name, (_NumpyDtypeClass,), {"kind": Named(module, name), "code": _numpy_code(name)})
        if full in self.inert:
            return type(name, (Built,), {"kind": Named(module, name)})
        if self.trust:
            log.warning("%s: trusted, so %s is imported and may run", self.where, full)
            return pickle._Unpickler(io.BytesIO()).find_class(module, name)
        self.refused.append(full)
        raise pickle.UnpicklingError(full)


def _numpy_code(name: str) -> str:
    """UInt32DType → uint32."""
    return name.removesuffix("DType").lower()


class _Unpickler(pickle.Unpickler):
    def __init__(self, data: bytes, names: _Names, storages: Callable[[str], int] | None) -> None:
        super().__init__(io.BytesIO(data), encoding="utf-8")
        self._names = names
        self._storages = storages

    def find_class(self, module: str, name: str) -> Any:
        return self._names.find(module, name)

    def persistent_load(self, saved_id: Any) -> Storage:
        """('storage', class, key, location, numel), as torch.save writes it."""
        if not (isinstance(saved_id, tuple) and len(saved_id) == 5 and saved_id[0] == "storage"):
            raise pickle.UnpicklingError(f"a persistent id that is no storage: {saved_id!r}")
        _, kind, key, location, numel = saved_id
        name = kind.name.removesuffix("Storage") if isinstance(kind, Named) else ""
        dtype = _STORAGES.get(name)
        if dtype is None or not isinstance(key, str) or not isinstance(numel, int) or numel < 0:
            raise pickle.UnpicklingError(f"a storage of kind {kind}")
        storage = Storage(key, dtype, numel, str(location))
        if self._storages is not None and (there := self._storages(key)) < storage.num_bytes:
            raise pickle.UnpicklingError(f"storage {key} should have {storage.num_bytes} bytes and has {there}")
        return storage


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
        value = _Unpickler(data, names, storages).load()
        return _finish(value)
    except Exception as error:  # a damaged pickle raises anything
        if names.refused:
            raise CheckpointError(
                f"{where}: the pickle names {', '.join(dict.fromkeys(names.refused))}, which could run anything, and "
                "was not read; if you know who wrote it, read it with trust=True (--trust)"
            ) from None
        text = str(error) or type(error).__name__
        raise CheckpointError(f"{where}: damaged pickle ({text})") from error


def contains_built(value: Any) -> bool:
    """Whether some part of a value stands for an object that was not built."""
    if isinstance(value, dict):
        return any(map(contains_built, value.values()))
    if isinstance(value, list | tuple):
        return any(map(contains_built, value))
    return isinstance(value, Built)


def _finish(value: Any) -> Any:
    """Arrays and dtypes as NumPy's own; other values as they are. Containers are changed in place: they may recur."""
    return _Finisher().finish(value)


class _Finisher:
    def __init__(self) -> None:
        self._seen: dict[int, Any] = {}

    def finish(self, value: Any) -> Any:
        if isinstance(value, _Array):
            if id(value) not in self._seen:
                version, shape, dtype, is_fortran, data = value.state
                value.state = (version, shape, self.finish(dtype), is_fortran, data)
                self._seen[id(value)] = value.value()
            return self._seen[id(value)]
        if isinstance(value, _Dtype):
            return value.value()
        if isinstance(value, _Text):
            return str(value)
        if isinstance(value, tuple):
            finished = [self.finish(part) for part in value]
            is_same = all(new is old for new, old in zip(finished, value, strict=True))
            return value if is_same else tuple(finished)
        if isinstance(value, dict | list | collections.deque):
            if id(value) in self._seen:
                return value
            self._seen[id(value)] = value
            items = value.items() if isinstance(value, dict) else enumerate(value)
            for key, part in list(items):
                if (new := self.finish(part)) is not part:
                    value[key] = new
        elif isinstance(value, Built):
            if id(value) not in self._seen:
                self._seen[id(value)] = value
                value.args, value.state = self.finish(value.args), self.finish(value.state)
        return value
