"""The allow-list: every name that a checkpoint's pickle may contain, and its stand-in.

See [Note: hostile pickles] in ``trust.py`` for the restrictions on these tables.
"""

import codecs
import collections
import contextvars
import datetime
import math
import pickle
from collections.abc import Callable
from typing import Any

import torch

from composer_fsdp2.checkpoint.budget import Budget
from composer_fsdp2.checkpoint.pickles.stand_ins import (
    FixedClass,
    GlobalName,
    InertObject,
    Storage,
    StoredTensor,
    UnsupportedPickleError,
    no_state,
    short,
)

_MAX_DIMS = 64  # NumPy's limit
_OBJECTS_OF_A_CALL = 64  # besides its arguments, which it copies: a short pickle may call it repeatedly
_SIZED = (str, bytes, bytearray, list, tuple, dict, set, frozenset, collections.deque)

# The budget of the current pickle.
budget: contextvars.ContextVar[Budget] = contextvars.ContextVar("budget")


class Function:
    """A function that a pickle may call, with a limited budget. It is an object whose attributes no pickle can set."""

    __slots__ = ("_call",)

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call

    def __call__(self, *args: Any) -> Any:
        num_objects = _OBJECTS_OF_A_CALL + 2 * sum(len(arg) for arg in args if isinstance(arg, _SIZED))
        budget.get().spend("calls in the pickle", num_objects=num_objects)
        return self._call(*args)

    __setstate__ = no_state


@Function
def _tensor(storage: Any, offset: Any, shape: Any, stride: Any, *rest: Any) -> StoredTensor:
    """torch._utils._rebuild_tensor, _v2 and, with a dtype, _v3."""
    dtype = next((value for value in rest if isinstance(value, torch.dtype)), None)
    if not isinstance(storage, Storage):
        raise pickle.UnpicklingError("a tensor without a storage")
    if rest and isinstance(rest[-1], dict) and any(value is True for value in rest[-1].values()):
        # {'conj': True}: the values of the storage are not those of the tensor.
        raise UnsupportedPickleError("holds a tensor saved as a conjugated or negated view, which is not supported")
    dtype = dtype or storage.dtype
    shape, stride = tuple(shape), tuple(stride)
    numbers = (offset, *shape, *stride)
    if not all(isinstance(n, int) and 0 <= n < 1 << 63 for n in numbers) or not len(shape) == len(stride) <= _MAX_DIMS:
        raise pickle.UnpicklingError("a tensor whose shape, strides or offset cannot be")
    if dtype != storage.dtype:  # an untyped storage counts bytes
        storage = Storage(storage.key, dtype, storage.num_bytes // dtype.itemsize, storage.device, storage.data)
    described = f"a tensor of shape {shape}, stride {stride}, offset {offset}"
    last = offset + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
    if math.prod(shape) and last >= storage.numel:
        raise pickle.UnpicklingError(f"{described} does not fit its storage of {storage.numel}")
    # A tensor that repeats its storage (stride 0) may be larger, and reading allocates it.
    num_bytes = math.prod(shape) * dtype.itemsize
    Budget.of(budget.get().where).spend(described, num_bytes=max(0, num_bytes - storage.num_bytes))
    requires_grad = bool(rest and rest[0] is True)
    return StoredTensor(storage, dtype, offset, shape, stride, requires_grad)


@Function
def _parameter(data: Any, requires_grad: Any = True, *rest: Any) -> Any:
    """Replaces torch._utils._rebuild_parameter. Returns the tensor: a callback's nn.Parameter is read as a Tensor."""
    return data


@Function
def _from_type(function: Any, kind: Any, args: Any, state: Any) -> Any:
    """Replaces torch._tensor._rebuild_from_type_v2: a tensor without its attributes, or a wrapper."""
    if function not in (_tensor, _parameter, _wrapper_subclass):
        raise pickle.UnpicklingError(f"a tensor rebuilt by {short(function)}")
    rebuilt = function(*args)
    if isinstance(rebuilt, InertObject):
        rebuilt.state = state
    return rebuilt


@Function
def _wrapper_subclass(kind: Any, *args: Any) -> InertObject:
    """Replaces torch._utils._rebuild_wrapper_subclass: a ShardedTensor or DTensor, whose state contains its tensors."""
    if not (isinstance(kind, type) and issubclass(kind, InertObject)):
        raise pickle.UnpicklingError(f"a tensor of class {short(kind)}")
    return kind(*args)


@Function
def _encode(text: Any, encoding: Any = "utf-8", *rest: Any) -> bytes:
    """_codecs.encode: how protocol 2 writes bytes."""
    if not isinstance(text, str) or encoding not in ("latin1", "latin-1", "utf-8"):
        raise pickle.UnpicklingError(f"text encoded as {short(encoding)}")
    return codecs.encode(text, encoding)


@Function
def _bytes(value: Any = b"", *rest: Any) -> bytes:
    """Replaces bytes and bytearray. Rejects a length as the argument, because a pickle must not allocate memory."""
    if isinstance(value, str) and rest:
        return _encode(value, *rest)
    if not isinstance(value, bytes | bytearray | list | tuple):
        raise pickle.UnpicklingError(f"bytes of {type(value).__name__}")
    return bytes(value)


@Function
def _bytearray(value: Any = b"", *rest: Any) -> bytearray:
    return bytearray(_bytes(value, *rest))


@Function
def _array(kind: Any, shape: Any, typecode: Any) -> Any:
    """numpy.core.multiarray._reconstruct: an empty array, filled by __setstate__."""
    if kind != GlobalName("numpy", "ndarray") or tuple(shape) != (0,):
        raise pickle.UnpicklingError(f"an array of type {short(kind)}")
    return Array()


@Function
def _array_from_buffer(data: Any, dtype: Any, shape: Any, order: Any, *rest: Any) -> Any:
    """numpy.core.numeric._frombuffer, the form of protocol 5."""
    array = Array()
    array.state = (1, shape, dtype, order == "F", bytes(data) if isinstance(data, bytearray) else data)
    return array


class Array(InertObject):
    """A NumPy array before its ``__setstate__``. It is converted to an array after the pickle is read."""

    kind = GlobalName("numpy", "ndarray")

    def value(self) -> Any:
        import numpy

        _, shape, dtype, is_fortran, data = self.state
        if not isinstance(dtype, numpy.dtype) or not isinstance(data, bytes):
            raise pickle.UnpicklingError("a NumPy array that holds no plain numbers")
        flat = numpy.frombuffer(data, dtype=dtype)
        return flat.reshape(shape, order="F" if is_fortran else "C").copy()


@Function
def _scalar(dtype: Any, data: Any) -> Any:
    """numpy.core.multiarray.scalar."""
    import numpy

    kind = dtype.value() if isinstance(dtype, Dtype) else None
    if kind is None or not isinstance(data, bytes):
        raise pickle.UnpicklingError("a NumPy scalar that holds no plain number")
    return numpy.frombuffer(data, dtype=kind)[0]


class Dtype(InertObject):
    """Replaces numpy.dtype('f8', align, copy). Its ``__setstate__`` gets the byte order, and the unit of datetimes."""

    kind = GlobalName("numpy", "dtype")
    code: str | None = None

    def value(self) -> Any:
        import numpy

        code = self.args[0] if self.args else self.code
        order: Any = self.state[1] if isinstance(self.state, tuple) and len(self.state) > 1 else "="
        if not isinstance(code, str) or not code.isalnum() or len(code) > 16 or order not in ("<", ">", "=", "|"):
            raise pickle.UnpicklingError(f"numpy.dtype({short(code)}) of byte order {short(order)}")
        dtype = numpy.dtype(code)
        if dtype.kind not in "biufcSUmM":
            what = "objects" if dtype.kind == "O" else "fields or raw bytes"
            raise UnsupportedPickleError(f"holds a NumPy value of {what} ({dtype}), which is not supported")
        if dtype.kind in "mM" and isinstance(self.state, tuple) and len(self.state) == 9:
            dtype = numpy.dtype(f"{dtype.kind}8{_unit(self.state[8])}")
        return dtype.newbyteorder(order)


def _unit(state: Any) -> str:
    """The unit as [25s], from the last part of the state of a datetime64's or timedelta64's dtype."""
    _, (unit, count, divisor, _) = state
    if unit not in _UNITS or not isinstance(count, int) or divisor != 1:
        raise pickle.UnpicklingError(f"a NumPy time in units of {short(count)} {short(unit)}")
    return "" if unit == b"generic" else f"[{count}{unit.decode()}]"


_UNITS = (b"generic", b"Y", b"M", b"W", b"D", b"h", b"m", b"s", b"ms", b"us", b"ns", b"ps", b"fs", b"as")


class NumpyDtypeClass(Dtype):
    """numpy.dtypes.UInt32DType() and the like."""


class _Text(str, metaclass=FixedClass):
    """Replaces torch.torch_version.TorchVersion, a str. A class, because the opcode NEWOBJ accepts nothing else."""

    def __new__(cls, text: Any = "") -> Any:
        if not isinstance(text, str):
            raise pickle.UnpicklingError(f"a version that is {short(text)}")
        return text


class Range(InertObject):
    """A placeholder for a range, until ``Finisher`` creates it. A pickle could copy a real range into a long list."""

    kind = GlobalName("builtins", "range")

    def value(self) -> range:
        return range(*self.args)


@Function
def _counter(counts: Any = ()) -> collections.Counter[Any]:
    return collections.Counter(dict(counts))  # a list of pairs, which Counter would count instead


# Not the classes themselves, because their calls would not be counted in the budget.
@Function
def _default_dict(factory: Any = None, items: Any = ()) -> collections.defaultdict[Any, Any]:
    factory = real_class(factory)
    if isinstance(factory, GlobalName | Function | FixedClass):  # any other factory is a builtin type or trusted
        raise UnsupportedPickleError(f"holds a defaultdict of {short(factory)}, which is not supported")
    return collections.defaultdict(factory, items)


_ordered_dict = Function(collections.OrderedDict)
_deque = Function(collections.deque)
_set = Function(set)
_frozenset = Function(frozenset)
_size = Function(torch.Size)


@Function
def _device(*args: Any) -> torch.device:
    """torch.device('cuda', 0)."""
    if not all(isinstance(part, str | int) for part in args):
        raise pickle.UnpicklingError("a device that is not a name")
    try:
        return torch.device(*args)
    except RuntimeError as error:  # of another build of torch
        raise UnsupportedPickleError(f"holds a device that this torch does not have ({error})") from None


# Classes that a pickle may contain as values or as a defaultdict's factory. During unpickling their stand-ins (the
# keys) replace them, which refuse calls or count them; ``Finisher`` restores the classes.
_BUILTINS = {GlobalName("builtins", kind.__name__): kind for kind in (bool, dict, float, int, list, str, tuple)}
_CLASSES: dict[Any, type] = {
    **_BUILTINS,
    Range: range,
    _set: set,
    _frozenset: frozenset,
    _bytes: bytes,
    _bytearray: bytearray,
    _counter: collections.Counter,
    _default_dict: collections.defaultdict,
    _ordered_dict: collections.OrderedDict,
    _deque: collections.deque,
    _size: torch.Size,
    _device: torch.device,
}


def real_class(value: Any) -> Any:
    """The class that a stand-in replaces. Other values are returned unchanged."""
    return _CLASSES.get(value, value) if isinstance(value, GlobalName | Function | type) else value


TENSOR: dict[str, Any] = {
    "torch._utils._rebuild_tensor": _tensor,
    "torch._utils._rebuild_tensor_v2": _tensor,
    "torch._utils._rebuild_tensor_v3": _tensor,
    "torch._utils._rebuild_parameter": _parameter,
    "torch._utils._rebuild_parameter_with_state": _parameter,
    "torch._utils._rebuild_wrapper_subclass": _wrapper_subclass,
    "torch._tensor._rebuild_from_type_v2": _from_type,
}

DATA: dict[str, Any] = {
    "collections.OrderedDict": _ordered_dict,
    "collections.Counter": _counter,
    "collections.defaultdict": _default_dict,
    "collections.deque": _deque,
    "datetime.timedelta": datetime.timedelta,
    "datetime.datetime": datetime.datetime,
    "datetime.timezone": datetime.timezone,
    "_codecs.encode": _encode,
    "builtins.set": _set,
    "builtins.frozenset": _frozenset,
    "builtins.complex": complex,
    "builtins.slice": slice,
    "builtins.range": Range,
    "builtins.bytes": _bytes,
    "builtins.bytearray": _bytearray,
    "torch.torch_version.TorchVersion": _Text,
    "torch.Size": _size,
    "torch.device": _device,
    "numpy.dtype": Dtype,
    # NumPy 1's names and NumPy 2's.
    "numpy.core.multiarray._reconstruct": _array,
    "numpy._core.multiarray._reconstruct": _array,
    "numpy.core.multiarray.scalar": _scalar,
    "numpy._core.multiarray.scalar": _scalar,
    "numpy.core.numeric._frombuffer": _array_from_buffer,
    "numpy._core.numeric._frombuffer": _array_from_buffer,
}

# Harmless names that our own checkpoints do not contain.
UNSUPPORTED = {
    "torch._utils._rebuild_sparse_tensor": "a sparse tensor",
    "torch._utils._rebuild_qtensor": "a quantized tensor",
    "torch._utils._rebuild_nested_tensor": "a nested tensor",
    "torch._utils._rebuild_meta_tensor_no_storage": "a tensor on the meta device, which has no values",
    "torch._utils._rebuild_device_tensor_from_numpy": "a tensor of a device that saves through NumPy",
    "torch._utils._rebuild_device_tensor_from_cpu_tensor": "a tensor of a device that saves through the CPU",
    **{f"torch.{name}Storage": "a quantized tensor" for name in ("QInt8", "QUInt8", "QInt32", "QUInt4x2", "QUInt2x4")},
}

DTYPES = {name: value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}

# Types and functions that a pickle may contain as values; they are not called.
INERT = {
    *map(str, _BUILTINS),
    "torch.Tensor",
    "torch.nn.parameter.Parameter",
    "torch.storage.UntypedStorage",
    "torch.storage.TypedStorage",
    "numpy.ndarray",
}

# Legacy storage classes: torch.FloatStorage and the like.
STORAGES = {
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
