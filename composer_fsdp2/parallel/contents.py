"""The values of a batch as text that does not depend on the process, to compare batches across ranks."""

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch


class BatchValue(NamedTuple):
    """One value of a batch: its path, type, shape, and its text. A long text is replaced by its hash."""

    path: str
    kind: str
    content: str


def batch_values(batch: Any, name: str = "batch") -> list[BatchValue]:
    """List all values of a batch of any structure, in an order that does not depend on the process.

    Tensors are compared by their bytes, so NaN equals itself; their device is ignored. Waits for the device of a tensor
    that is on one. Does not communicate.
    """
    return list(_batch_values(batch, name, ()))


def digest_of(parts: list[BatchValue]) -> bytes:
    """A digest of 16 bytes."""
    return _hashed("\n".join("\t".join(part) for part in parts)).digest()


def bytes_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """The elements as a 1-D uint8 tensor on the CPU; None for sparse, nested, quantized and meta tensors."""
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_quantized or tensor.is_meta:
        return None
    dense = tensor.detach().as_subclass(torch.Tensor).resolve_conj().resolve_neg().cpu().contiguous()
    return dense.reshape(-1).view(torch.uint8)


_PLAIN = frozenset((int, float, complex, bool, str, type(None)))
_SHORT = 200


def _batch_values(value: Any, path: str, parents: tuple[int, ...]) -> Iterator[BatchValue]:
    """List the values at and below ``path``.

    ``parents`` are the ids of the enclosing containers, to stop at a container that contains itself.
    """
    raw = bytes_of(value) if isinstance(value, torch.Tensor) else None
    if raw is not None:
        kind = f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
        yield BatchValue(path, kind, _hashed(raw.numpy().data).hexdigest())
    elif type(value) in _PLAIN:
        text = repr(value)
        yield BatchValue(path, type(value).__name__, text if len(text) <= _SHORT else _hashed(text).hexdigest())
    elif isinstance(value, bytes | bytearray):
        yield BatchValue(path, f"{len(value)} bytes", _hashed(memoryview(value)).hexdigest())
    elif isinstance(value, type) or (callable(value) and hasattr(value, "__qualname__")):
        yield BatchValue(path, value.__module__, value.__qualname__)
    elif id(value) in parents:
        yield BatchValue(path, "a container of itself", str(parents.index(id(value))))
    else:
        yield BatchValue(path, f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins."), "")
        for step, each in _members(value):
            yield from _batch_values(each, path + step, (*parents, id(value)))


def _members(value: Any) -> list[tuple[str, Any]]:
    """The members of a container with their paths in it. The members of any other object are those that it pickles.

    The bytes of a pickle are not comparable: they list a set in an order that depends on the process.
    """
    if isinstance(value, Mapping):
        return [(f"[{key!r}]", value[key]) for key in sorted(value, key=repr)]
    if isinstance(value, list | tuple):
        return [(f"[{number}]", each) for number, each in enumerate(value)]
    if isinstance(value, set | frozenset):
        return [(" (members)", each) for each in sorted(str(batch_values(each)) for each in value)]
    try:
        reduced = value.__reduce_ex__(2)
    except Exception:  # of any type; then only the class is compared
        return []
    if isinstance(reduced, str):
        return [(" (global)", reduced)]
    made_by, of, *rest = reduced
    names = ("state", "items", "entries")  # the latter two are iterators
    inside = [
        (f" ({name})", list(each) if isinstance(each, Iterator) else each)
        for name, each in zip(names, rest, strict=False)
    ]
    return [(" (made by)", made_by), (" (from)", of), *inside]


def _hashed(content: str | memoryview) -> Any:
    raw = content.encode(errors="surrogatepass") if isinstance(content, str) else content
    return hashlib.blake2b(raw, digest_size=16)
