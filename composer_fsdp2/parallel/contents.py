"""What a batch holds, whatever its structure, as text that is equal on ranks that have the same one."""

import dataclasses
import hashlib
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch


class Part(NamedTuple):
    """One value of a batch: its place, its type and shape, and a hash of its content where that is long."""

    path: str
    kind: str
    content: str


def parts_of(batch: Any, name: str = "batch") -> list[Part]:
    """All values of a batch in one order, also of mappings and sets whose order differs between processes.

    Tensors are compared by their bytes, so that NaN is equal to itself; the device they lie on is no part of it. Waits
    for the device of tensors that lie on one. Does not communicate.
    """
    return list(_parts(batch, name, ()))


def digest_of(parts: list[Part]) -> bytes:
    """16 bytes."""
    text = "\n".join("\t".join(part) for part in parts)
    return hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=16).digest()


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor's elements: 1-D, uint8, on the CPU.

    Raises:
        RuntimeError, NotImplementedError, TypeError: its elements do not lie side by side (sparse, quantized).
    """
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_meta:
        raise NotImplementedError(f"a tensor of layout {tensor.layout}")
    dense = tensor.detach().as_subclass(torch.Tensor).resolve_conj().resolve_neg().cpu().contiguous()
    return dense.reshape(-1).view(torch.uint8)


_PLAIN = frozenset((int, float, complex, bool, str, type(None)))


def _parts(value: Any, path: str, above: tuple[int, ...]) -> Iterator[Part]:
    """``above``: the ids of what contains the value, to end where it contains itself."""
    if type(value) in _PLAIN:
        yield Part(path, type(value).__name__, _short(repr(value)))
    elif isinstance(value, bytes | bytearray):
        yield Part(path, f"{len(value)} bytes", _hash(memoryview(value)))
    elif isinstance(value, torch.Tensor):
        yield from _of_tensor(value, path, above)
    elif id(value) in above:
        yield Part(path, "one of those that it is in", str(above.index(id(value))))
    else:
        inside = partial(_parts, above=(*above, id(value)))
        yield Part(path, _type_name(value), "")
        yield from _inside(value, path, inside)


def _inside(value: Any, path: str, inside: Any) -> Iterator[Part]:
    if isinstance(value, Mapping):
        for key, each in sorted(value.items(), key=lambda item: repr(item[0])):
            yield from inside(each, f"{path}[{key!r}]")
    elif isinstance(value, list | tuple) and all(type(each) in _PLAIN for each in value):
        yield Part(path, f"{len(value)} values", _short(repr(list(value))))
    elif isinstance(value, list | tuple):
        for number, each in enumerate(value):
            yield from inside(each, f"{path}[{number}]")
    elif isinstance(value, set | frozenset):
        yield Part(path, f"{len(value)} values", _hash("\n".join(sorted(str(list(inside(v, ""))) for v in value))))
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from inside(getattr(value, field.name, None), f"{path}.{field.name}")
    elif isinstance(value, type) or (callable(value) and hasattr(value, "__qualname__")):
        yield Part(path, value.__module__, value.__qualname__)
    else:
        yield from _as_pickled(value, path, inside)


def _as_pickled(value: Any, path: str, inside: Any) -> Iterator[Part]:
    """What a pickle would hold; a pickle itself would hold sets in an order that differs between processes."""
    try:
        reduced = value.__reduce_ex__(2)
    except Exception:  # the type may raise what it likes; then its type is all that is compared
        return
    if isinstance(reduced, str):
        yield Part(path, "global", reduced)
        return
    for name, part in zip(("made by", "from", "state", "items", "entries"), reduced, strict=False):
        yield from inside(list(part) if name in ("items", "entries") and part is not None else part, f"{path} ({name})")


def _of_tensor(tensor: torch.Tensor, path: str, above: tuple[int, ...]) -> Iterator[Part]:
    kind = f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
    try:
        raw = bytes_of(tensor)
    except (RuntimeError, NotImplementedError, TypeError):
        yield Part(path, kind, str(tensor.layout))
        if tensor.layout is not torch.strided and not tensor.is_meta:  # its indices and values
            yield from _as_pickled(tensor, path, partial(_parts, above=(*above, id(tensor))))
    else:
        yield Part(path, kind, _hash(raw.numpy().data))


def _type_name(value: Any) -> str:
    kind = type(value)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


_SHORT = 200


def _short(text: str) -> str:
    return text.replace("\n", "\\n") if len(text) <= _SHORT else _hash(text)


def _hash(content: str | memoryview) -> str:
    raw = content.encode(errors="surrogatepass") if isinstance(content, str) else content
    return hashlib.blake2b(raw, digest_size=16).hexdigest()
