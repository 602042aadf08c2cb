"""The tensors in nested values; autograd nodes that compute nothing; and calls when a backward ends."""

import copy
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

_autograd: Any = torch.autograd
_Rebuild = Callable[[Sequence[Any]], Any]


def tensors_in(value: Any) -> list[Tensor]:
    """All tensors in a nested value, in order: in the containers that pytree or FSDP1 walks.

    pytree knows the classes that are registered with it (transformers' outputs and caches among them), and no class
    below them. FSDP1 (``_apply_to_tensors`` in torch/distributed/utils.py) opened every dataclass, dict, tuple, list
    and set, of whatever class.
    """
    return list(_tensors(value))


def _tensors(value: Any) -> Iterator[Tensor]:
    for leaf in _leaves(value):
        if isinstance(leaf, Tensor):
            yield leaf


def _leaves(value: Any) -> Iterator[Any]:
    for leaf in tree_flatten(value)[0]:
        parts, rebuild = _opened(leaf)
        if rebuild is None:
            yield leaf
        else:
            yield from _leaves(list(parts))


def with_tensors(value: Any, change: Callable[[Any], Any], *, kind: type = Tensor) -> Any:
    """The same nested value with each tensor changed; a container in which none changes is the same object.

    Args:
        kind: Another class to change the objects of.
    """
    leaves, form = tree_flatten(value)
    changed = [_changed(leaf, change, kind) for leaf in leaves]
    return value if _are_same(changed, leaves) else tree_unflatten(changed, form)


def _changed(leaf: Any, change: Callable[[Any], Any], kind: type) -> Any:
    if isinstance(leaf, kind):
        return change(leaf)
    parts, rebuild = _opened(leaf)
    changed = [with_tensors(part, change, kind=kind) for part in parts]
    return leaf if rebuild is None or _are_same(changed, parts) else rebuild(changed)


def _are_same(values: Sequence[Any], others: Sequence[Any]) -> bool:
    return all(value is other for value, other in zip(values, others, strict=True))


def _opened(leaf: Any) -> tuple[Sequence[Any], _Rebuild | None]:
    """The parts of a leaf of pytree, and a function that makes another one of other parts; none of a true leaf."""
    if dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
        names = [field.name for field in dataclasses.fields(leaf) if hasattr(leaf, field.name)]
        return [getattr(leaf, name) for name in names], partial(_with_fields, leaf, names)
    if isinstance(leaf, dict):
        return list(leaf.values()), partial(_with_items, leaf, list(leaf))
    if isinstance(leaf, tuple) and hasattr(leaf, "_make"):  # PackedSequence among them
        return leaf, leaf._make
    if isinstance(leaf, list | tuple | set | frozenset):
        return list(leaf), type(leaf)
    return (), None


def _with_fields(value: Any, names: Iterable[str], parts: Iterable[Any]) -> Any:
    """A copy, without running ``__post_init__`` again; ``dataclasses.replace`` refuses fields with ``init=False``."""
    copied = copy.copy(value)
    for name, part in zip(names, parts, strict=True):
        try:
            setattr(copied, name, part)
        except dataclasses.FrozenInstanceError:
            object.__setattr__(copied, name, part)
    return copied


def _with_items(value: dict[Any, Any], keys: Iterable[Any], parts: Iterable[Any]) -> Any:
    copied = copy.copy(value)
    for key, part in zip(keys, parts, strict=True):
        copied[key] = part
    return copied


def hidden_gradient(value: Any) -> str | None:
    """Where in a value a tensor that requires grad is, of those that ``tensors_in`` does not find: class and attribute.

    Looks at the attributes of objects, some levels deep, not at closures and generators.
    """
    return next((where for leaf in _leaves(value) if (where := _hidden_in(leaf, 3, set()))), None)


def _hidden_in(value: Any, depth: int, seen: set[int]) -> str | None:
    attributes = getattr(value, "__dict__", None)
    if (
        depth == 0
        or id(value) in seen
        or not isinstance(attributes, dict)
        or isinstance(value, Tensor | nn.Module | type)
    ):
        return None
    seen.add(id(value))
    for name, attribute in attributes.items():
        for leaf in _leaves(attribute):
            if isinstance(leaf, Tensor) and leaf.requires_grad and not isinstance(leaf, nn.Parameter):
                return f"{type(value).__qualname__}.{name}"
            if where := _hidden_in(leaf, depth - 1, seen):
                return where
    return None


def cast_floats(value: Any, dtype: torch.dtype) -> Any:
    """The same nested value, its floating point tensors in ``dtype``."""
    return with_tensors(value, lambda each: each.to(dtype) if each.is_floating_point() else each)


class Passage:
    """Passes tensors that require grad through a node of autograd's graph.

    Args:
        then: Called in each backward, where the gradients of all these tensors are there.
        is_writable: Whether the passed tensors may be written to in place, if ``adopt_written`` is called afterwards.
    """

    def __init__(self, then: Callable[[], None], *, is_writable: bool = True) -> None:
        self._then = then
        self._is_writable = is_writable
        self._pairs: list[tuple[ref[Tensor], ref[Tensor]]] = []  # weak: an error may end the forward that uses them

    def through(self, value: Any) -> Any:
        """The same nested value, of passed tensors."""
        tensors = [each for each in tensors_in(value) if each.requires_grad] if torch.is_grad_enabled() else []
        if not tensors:
            return value
        passed = _Pass.apply(self._then, self._is_writable, *tensors)
        self._pairs = [(ref(one), ref(other)) for one, other in zip(tensors, passed, strict=True)]
        outputs = iter(passed)
        return with_tensors(value, lambda each: next(outputs) if each.requires_grad else each)

    def adopt_written(self) -> None:
        """Make tensors whose passed ones were written to in place part of the graph that this made.

        Their memory is one. Without the node, they would have been written to themselves, and all that uses them
        afterwards would get its gradient through the operator that wrote.
        """
        for tensor, passed in ((one(), other()) for one, other in self._pairs):
            if tensor is not None and passed is not None and getattr(passed.grad_fn, "then", None) != self._then:
                # It is written to in the graph alone: values that were saved for backward are valid.
                with _autograd._unsafe_preserve_version_counter(tensor):
                    _Adopt.apply(tensor, passed)


def after_gradients_of(value: Any, then: Callable[[], None]) -> Any:
    """The same nested value; ``then`` is called where the gradients of all its tensors are there."""
    return Passage(then).through(value)


def after_backward(then: Callable[[], None]) -> None:
    """Call ``then`` where the backward that is running ends."""
    engine: Any = torch.autograd.Variable._execution_engine
    engine.queue_callback(then)


class _Pass(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, then: Callable[[], None], is_writable: bool, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.then = then
        # The tensors themselves would become views, to which a module cannot write.
        return tuple(tensor.detach() for tensor in tensors) if is_writable else tensors

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        ctx.then()
        return (None, None, *gradients)


class _Adopt(torch.autograd.Function):
    """``tensor`` takes the place of ``written``, which has the same memory, in autograd's graph."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, written: Tensor) -> Tensor:
        ctx.mark_dirty(tensor)
        return tensor

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor]:
        return None, gradient
