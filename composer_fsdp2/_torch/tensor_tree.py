"""Find and change the tensors in nested values, as pytree and FSDP1 walk them."""

import copy
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import SUPPORTED_NODES


def tensors_in(value: Any) -> list[Tensor]:
    """All tensors in a nested value, in order: in the containers that pytree or FSDP1 walks.

    pytree knows the classes that are registered with it (transformers' outputs and caches among them), and no class
    below them. FSDP1 (``_apply_to_tensors`` in torch/distributed/utils.py) opened every dataclass, dict, tuple, list
    and set, of whatever class. Other mappings (transformers' BatchEncoding) are opened as well, if all of their values
    can be read.
    """
    return [leaf for leaf in _leaves(value) if isinstance(leaf, Tensor)]


def map_tensors(value: Any, change: Callable[[Any], Any], *, kind: type = Tensor, opens_registered: bool = True) -> Any:
    """The same nested value with each tensor changed; a container in which none changes is the same object.

    Args:
        kind: Another class to change the objects of.
        opens_registered: Whether to open classes that FSDP1 did not.
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
    """A container's parts.

    Args:
        rebuild: Makes another one of other parts.
        keys: Of the parts, for ``get`` and ``set``.
        set: Puts a part in place, by its key; None where the container is immutable.
        is_registered: Whether FSDP1 did not open the class: pytree knows it, or it is a mapping and no dict.
    """

    parts: Sequence[Any]
    rebuild: Callable[[Sequence[Any]], Any]
    keys: Sequence[Any] = ()
    get: Callable[[Any], Any] | None = None
    set: Callable[[Any, Any], None] | None = None
    is_registered: bool = False


def _as_container(value: Any) -> _Container | None:
    """None for what is no container."""
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
    if isinstance(value, tuple):  # PackedSequence among them
        return _Container(value, value._make if hasattr(value, "_make") else type(value))
    if isinstance(value, set):
        return _Container(list(value), type(value), list(value), *_replacing(value))
    if isinstance(value, frozenset):
        return _Container(list(value), type(value))
    if isinstance(value, list):
        return _Container(list(value), type(value), range(len(value)), partial(_item, value), value.__setitem__)
    # Not tree_flatten, whose is_leaf would be kept, with the value, by a cycle of references until it is collected.
    node = SUPPORTED_NODES.get(type(value))
    if node is None:
        if not isinstance(value, Mapping):
            return None
        try:
            items = dict(value.items())  # transformers' BatchEncoding, for one
        except Exception:  # OmegaConf's, with a value that is missing
            return None
        return _Container(list(items.values()), partial(_with_items, value, list(items)), is_registered=True)
    parts, context = node.flatten_fn(value)
    return _Container(parts, lambda parts: node.unflatten_fn(parts, context), is_registered=True)


def _item(value: list[Any], number: int) -> Any:
    return value[number] if number < len(value) else None


def _replacing(value: set[Any]) -> tuple[Callable[[Any], Any], Callable[[Any, Any], None]]:
    """``get`` and ``set`` of a set, whose keys are the members that it has now."""
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
    """A copy, without running ``__post_init__`` again; ``dataclasses.replace`` refuses fields with ``init=False``."""
    copied = copy.copy(value)
    for name, part in zip(names, parts, strict=True):
        try:
            setattr(copied, name, part)
        except dataclasses.FrozenInstanceError:
            object.__setattr__(copied, name, part)
    return copied


def _with_items(value: Any, keys: Iterable[Any], parts: Iterable[Any]) -> Any:
    """A mapping of the same class; a dict for one that cannot be changed."""
    items = dict(zip(keys, parts, strict=True))
    try:
        copied = copy.copy(value)
        for key, part in items.items():
            copied[key] = part
    except TypeError:
        return items
    return copied


# A part that took another's place in a mutable container: the container, the key, the part before, and the new one.
Replaced = tuple[_Container, Any, Any, Any]


def replace_in_place(value: Any, change: Callable[[Tensor], Tensor], replaced: list[Replaced]) -> Any:
    """``map_tensors``, but mutable containers stay the same objects, so that what a module adds to one is kept.

    A class that pytree alone knows (a KV cache) is opened by its attributes; where its tensors are elsewhere, it stays.
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
    """Where in a value a tensor that requires grad is, of those that ``tensors_in`` does not find: class and attribute.

    Looks at the attributes of objects, some levels deep, not at closures and generators.
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
    """Of an object's ``__dict__`` and ``__slots__``."""
    attributes = getattr(value, "__dict__", None)
    if isinstance(attributes, dict):
        yield from attributes.items()
    for kind in type(value).__mro__:
        slots = vars(kind).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if not name.startswith("__") and hasattr(value, name):
                yield name, getattr(value, name)


def cast_floats(value: Any, dtype: torch.dtype) -> Any:
    """The same nested value, its floating point tensors in ``dtype``, where FSDP1 cast them."""
    return map_tensors(value, lambda each: each.to(dtype) if each.is_floating_point() else each, opens_registered=False)
