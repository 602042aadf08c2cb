"""Identity autograd functions, and callbacks at points of a backward."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import TensorWeakRef

from composer_fsdp2._torch.tensor_tree import Replaced, map_tensors, replace_in_place, tensors_in

_autograd: Any = torch.autograd

_Pair = tuple[TensorWeakRef, TensorWeakRef]


class IdentityHook:
    """Passes a module's inputs that require grad through an identity autograd function.

    The module receives different tensors that share memory with the caller's. ``restore`` puts the caller's tensors
    back into its containers and into the module's output.

    Args:
        hook: Called in each backward, once the gradients of all these tensors are computed.
        is_writable: Whether the module may write to its inputs in place. Requires a call of ``restore`` afterwards.
    """

    def __init__(self, hook: Callable[[], None], *, is_writable: bool = True) -> None:
        self._hook = hook
        self._is_writable = is_writable
        # (tensor, its identity). Weak references, because an error may end the forward.
        self._sources: list[_Pair] = []
        self._views: list[_Pair] = []
        self._replaced: list[Replaced] = []

    def apply(self, value: Any) -> Any:
        """Replace the tensors in ``value`` by their identities and return it. Modifies mutable containers in place."""
        tensors = [each for each in tensors_in(value) if each.requires_grad] if torch.is_grad_enabled() else []
        if not tensors:
            return value
        tensors = list({id(each): each for each in tensors}.values())
        source_of = _sources(tensors)
        sources = list({id(each): each for each in source_of}.values())
        identities = dict(zip(map(id, sources), _Identity.apply(self._hook, self._is_writable, *sources), strict=True))
        self._sources = [(TensorWeakRef(each), TensorWeakRef(identities[id(each)])) for each in sources]
        views = {
            id(each): each._view_func(identities[id(source)])  # type: ignore[attr-defined]
            for each, source in zip(tensors, source_of, strict=True)
            if each is not source
        }
        self._views = [(TensorWeakRef(each), TensorWeakRef(views[id(each)])) for each in tensors if id(each) in views]
        identities |= views
        return replace_in_place(value, lambda each: identities.get(id(each), each), self._replaced)

    def restore(self, output: Any) -> tuple[Any, set[int]]:
        """Put the caller's tensors back into its containers, and into the module's output.

        If the module wrote to an identity in place, the caller's tensor takes over the resulting autograd graph: the
        two share memory, and without the identity the module would have written to the caller's tensor.

        Returns:
            The output, and the ids of the inputs that were not written to.
        """
        own: dict[int, Tensor] = {}
        unwritten: set[int] = set()
        # Resolve the weak references before the containers change: nothing else may reference the entries of a cache.
        sources, views = _alive(self._sources), _alive(self._views)
        for container, key, part, new in self._replaced:
            if container.get is not None and container.set is not None and container.get(key) is new:
                container.set(key, part)
        self._replaced = []
        for tensor, identity in sources:
            own[id(identity)] = tensor
            if getattr(identity.grad_fn, "hook", None) == self._hook:
                unwritten.add(id(tensor))
                continue
            # Only the graph changes, so values that were saved for backward remain valid.
            with _autograd._unsafe_preserve_version_counter(tensor):
                _WriteInPlace.apply(tensor, identity)
        for tensor, identity in views:
            own[id(identity)] = tensor
            unwritten |= {id(tensor)} if id(tensor._base) in unwritten else set()
        return replace_in_place(output, lambda each: own.get(id(each), each), []), unwritten


def _sources(tensors: Sequence[Tensor]) -> list[Tensor]:
    """For each tensor, the tensor to pass through the identity: itself, or the base if several views share it.

    A write to one view must be visible in the others.
    """
    # An active torch function mode, such as that of ``run_idle_experts``, would see ``_base`` as an operator.
    with torch._C.DisableTorchFunction():
        bases = [each if each._base is None else each._base for each in tensors]
    counts = Counter(map(id, bases))
    return [base if counts[id(base)] > 1 else each for each, base in zip(tensors, bases, strict=True)]


def _alive(pairs: Iterable[_Pair]) -> list[tuple[Tensor, Tensor]]:
    found = [(one(), other()) for one, other in pairs]
    return [(one, other) for one, other in found if one is not None and other is not None]


def call_after_grads(value: Any, hook: Callable[[], None]) -> Any:
    """Return ``value``, a nested value, with its tensors passed through an identity autograd function.

    ``hook`` is called in each backward, once the gradients of all these tensors are computed.
    """
    tensors = [each for each in tensors_in(value) if each.requires_grad] if torch.is_grad_enabled() else []
    if not tensors:
        return value
    outputs = iter(_Identity.apply(hook, True, *tensors))
    return map_tensors(value, lambda each: next(outputs) if each.requires_grad else each)


def call_after_backward(hook: Callable[[], None]) -> None:
    """Run ``hook`` at the end of the current backward."""
    engine: Any = torch.autograd.Variable._execution_engine
    engine.queue_callback(hook)


class _Identity(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hook: Callable[[], None], is_writable: bool, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.hook = hook
        # Returning the inputs would make views of them, and a module cannot write to those in place.
        return tuple(tensor.detach() for tensor in tensors) if is_writable else tensors

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        ctx.hook()
        return (None, None, *gradients)


class _WriteInPlace(torch.autograd.Function):
    """``tensor`` replaces ``written``, with which it shares memory, in the autograd graph."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, written: Tensor) -> Tensor:
        ctx.mark_dirty(tensor)
        ctx.is_view = tensor._base is not None
        return tensor

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor]:
        # None would mean the gradient of the whole base.
        return torch.zeros_like(gradient) if ctx.is_view else None, gradient
