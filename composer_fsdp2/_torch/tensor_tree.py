"""Find and change the tensors in nested values, in the containers that pytree or FSDP1 traverses."""

import copy
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import SUPPORTED_NODES


def tensors_in(value: Any) -> list[Tensor]:
    """All tensors in a nested value, in order.

    pytree traverses the classes that are registered with it (transformers' outputs and caches among them), but no
    subclasses of these. FSDP1 (``_apply_to_tensors`` in torch/distributed/utils.py) traversed every dataclass, dict,
    tuple, list and set, including subclasses. Other mappings (transformers' BatchEncoding) are traversed as well, if
    all of their values can be read.
    """
    return [leaf for leaf in _leaves(value) if isinstance(leaf, Tensor)]


def map_tensors(value: Any, change: Callable[[Any], Any], *, kind: type = Tensor, opens_registered: bool = True) -> Any:
    """The same nested value with ``change`` applied to each tensor. Unchanged containers are the same objects.

    Args:
        kind: The class of the objects to change; ``torch.Tensor`` by default.
        opens_registered: Whether to traverse classes that FSDP1 did not.
    """
    if isinstance(value, kind):
        return change(value)
    container = _as_container(value)
    if container is None or (container.is_registered and not opens_registered):
        return value
    parts = [map_tensors(part, change, kind=kind, opens_registered=opens_registered) for part in container.parts]
    return value if _are_same(parts, container.parts) else container.rebuild(parts)


@dataclasses.dataclass(frozen=True, slots=True)
class _Container:
    """The contents of a container.

    Args:
        rebuild: Creates a container of the same class from other parts.
        keys: The keys of the parts, for ``get`` and ``set``.
        set: Assigns a part by its key; None if the container is immutable.
        is_registered: Whether the class is registered with pytree, or is a mapping other than a dict. FSDP1 did not
            traverse these.
    """

    parts: Sequence[Any]
    rebuild: Callable[[Sequence[Any]], Any]
    keys: Sequence[Any] = ()
    get: Callable[[Any], Any] | None = None
    set: Callable[[Any, Any], None] | None = None
    is_registered: bool = False


def _as_container(value: Any) -> _Container | None:
    """Describe ``value`` as a container; None if it is not one."""
    if isinstance(value, Tensor):
        return None
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value) if hasattr(value, field.name)]
        parts = [getattr(value, name) for name in names]
        is_frozen = type(value).__dataclass_params__.frozen  # type: ignore[attr-defined]
        assign = None if is_frozen else partial(setattr, value)
        return _Container(parts, partial(_with_fields, value, names), names, partial(getattr, value), assign)
    if isinstance(value, dict):
        keys = list(value)
        rebuild = partial(_with_items, value, keys)
        return _Container(list(value.values()), rebuild, keys, value.get, value.__setitem__)
    if isinstance(value, tuple):  # including PackedSequence
        return _Container(value, value._make if hasattr(value, "_make") else type(value))
    if isinstance(value, set):
        return _Container(list(value), type(value), list(value), *_replacing(value))
    if isinstance(value, frozenset):
        return _Container(list(value), type(value))
    if isinstance(value, list):
        return _Container(list(value), type(value), range(len(value)), partial(_item, value), value.__setitem__)
    # Not tree_flatten: a reference cycle would keep its is_leaf, and the value with it, alive until garbage collection.
    node = SUPPORTED_NODES.get(type(value))
    if node is None:
        if not isinstance(value, Mapping):
            return None
        try:
            items = dict(value.items())  # such as transformers' BatchEncoding
        except Exception:  # OmegaConf's mapping with a missing value
            return None
        return _Container(list(items.values()), partial(_with_items, value, list(items)), is_registered=True)
    parts, context = node.flatten_fn(value)
    return _Container(parts, lambda parts: node.unflatten_fn(parts, context), is_registered=True)


def _item(value: list[Any], number: int) -> Any:
    return value[number] if number < len(value) else None


def _replacing(value: set[Any]) -> tuple[Callable[[Any], Any], Callable[[Any, Any], None]]:
    """``get`` and ``set`` for a Python set. The keys are its current members."""
    present: dict[Any, Any] = {}

    def get(key: Any) -> Any:
        member = present.get(key, key)
        return member if member in value else None

    def put(key: Any, member: Any) -> None:
        value.discard(present.get(key, key))
        value.add(member)
        present[key] = member

    return get, put


def _leaves(value: Any) -> Iterator[Any]:
    container = _as_container(value)
    if container is None:
        yield value
        return
    for part in container.parts:
        yield from _leaves(part)


def _are_same(values: Sequence[Any], others: Sequence[Any]) -> bool:
    return all(value is other for value, other in zip(values, others, strict=True))


def _with_fields(value: Any, names: Iterable[str], parts: Iterable[Any]) -> Any:
    """A copy that does not run ``__post_init__`` again. ``dataclasses.replace`` rejects fields with ``init=False``."""
    copied = copy.copy(value)
    for name, part in zip(names, parts, strict=True):
        try:
            setattr(copied, name, part)
        except dataclasses.FrozenInstanceError:
            object.__setattr__(copied, name, part)
    return copied


def _with_items(value: Any, keys: Iterable[Any], parts: Iterable[Any]) -> Any:
    """A mapping of the same class; a dict if the mapping is immutable."""
    items = dict(zip(keys, parts, strict=True))
    try:
        copied = copy.copy(value)
        for key, part in items.items():
            copied[key] = part
    except TypeError:
        return items
    return copied


# A replaced part of a mutable container: (container, key, part before, new part).
Replaced = tuple[_Container, Any, Any, Any]


def replace_in_place(value: Any, change: Callable[[Tensor], Tensor], replaced: list[Replaced]) -> Any:
    """As ``map_tensors``, but change mutable containers in place, so the caller sees what a module adds to them.

    A class that only pytree knows (a KV cache) is traversed by its attributes. If its tensors are not in attributes, it
    is not changed.
    """
    if isinstance(value, Tensor):
        return change(value)
    container = _as_container(value)
    if container is None:
        return value
    if container.is_registered:
        attributes = getattr(value, "__dict__", None)
        if not isinstance(attributes, dict):
            return value
        container = _as_container(attributes)
        assert container is not None
    parts = [replace_in_place(part, change, replaced) for part in container.parts]
    if _are_same(parts, container.parts):
        return value
    if container.set is None:
        return container.rebuild(parts)
    for key, part, new in zip(container.keys, container.parts, parts, strict=True):
        if new is not part:
            container.set(key, new)
            replaced.append((container, key, part, new))
    return value


def hidden_gradient(value: Any) -> str | None:
    """Find a tensor that requires grad and that ``tensors_in`` does not find, in the attributes of objects.

    Searches three levels deep. Does not search closures and generators.

    Returns:
        The attribute as ``Class.attribute``; None if there is none.
    """
    return next((where for leaf in _leaves(value) if (where := _hidden_in(leaf, 3, set()))), None)


def _hidden_in(value: Any, depth: int, seen: set[int]) -> str | None:
    if depth == 0 or id(value) in seen or isinstance(value, Tensor | nn.Module | type):
        return None
    seen.add(id(value))
    for name, attribute in _attributes(value):
        for leaf in _leaves(attribute):
            if isinstance(leaf, Tensor) and leaf.requires_grad and not isinstance(leaf, nn.Parameter):
                return f"{type(value).__qualname__}.{name}"
            if where := _hidden_in(leaf, depth - 1, seen):
                return where
    return None


def _attributes(value: Any) -> Iterator[tuple[str, Any]]:
    """The entries of an object's ``__dict__`` and ``__slots__``."""
    attributes = getattr(value, "__dict__", None)
    if isinstance(attributes, dict):
        yield from attributes.items()
    for kind in type(value).__mro__:
        slots = vars(kind).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if not name.startswith("__") and hasattr(value, name):
                yield name, getattr(value, name)


def cast_floats(value: Any, dtype: torch.dtype) -> Any:
    """The same nested value with floating point tensors cast to ``dtype``, in the containers that FSDP1 traversed."""
    return map_tensors(value, lambda each: each.to(dtype) if each.is_floating_point() else each, opens_registered=False)
