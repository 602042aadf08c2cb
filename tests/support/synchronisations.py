"""Host-device synchronizations of a GPU run, detected on the CPU: ``with Synchronisations() as found: ...``.

On the CPU no tensor crosses devices, so this emulates device placement. On a GPU the model is on the device; tensors
made without a device argument, and those made from Python numbers, are on the host. Two operations then synchronize
(``torch.cuda.set_sync_debug_mode`` finds the same on a GPU):

- reading a tensor's value: ``item``, ``tolist``, ``bool``, ``cpu``; or a result whose size is such a value, as of
  ``nonzero``, ``bincount``, ``unique``, an index of booleans, ``repeat_interleave`` without ``output_size``
- copying a host tensor to the device: ``to``, ``copy_``, ``torch.tensor(numbers, device=...)``

Host tensors can be read without synchronizing, which this does not detect: compare with a run that does the same.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakTensorKeyDictionary

_FROM_NUMBERS = (torch.tensor, torch.as_tensor)
_MAKING = (*_FROM_NUMBERS, torch.zeros, torch.ones, torch.full, torch.empty, torch.arange, torch.eye, torch.linspace)
# These read the CPU's memory without an operator visible to the dispatcher.
_READING = (torch.Tensor.tolist, torch.Tensor.cpu, torch.Tensor.numpy)
_MOVING = (torch.Tensor.to, torch.Tensor.cuda)
_BACKWARDS = (torch.Tensor.backward, torch.autograd.backward)
_aten = torch.ops.aten
_READING_OPERATORS = (
    *(_aten._local_scalar_dense, _aten.equal, _aten.nonzero, _aten.bincount, _aten.masked_select),
    *(_aten._unique, _aten._unique2, _aten.unique_dim, _aten.unique_consecutive),
)
_INDEXING = (_aten.index, _aten.index_put, _aten.index_put_, _aten._index_put_impl_)


@dataclass(frozen=True, slots=True)
class Synchronisation:
    """One synchronization.

    Args:
        kind: ``read`` or ``sent``.
        file: The innermost caller's file outside torch.
        place: That file and line, and the function.
    """

    kind: str
    file: str
    place: str

    def __str__(self) -> str:
        return f"{self.kind} at {self.place}"


class Synchronisations(contextlib.ExitStack):
    """A context manager that collects them, including backward's: on the CPU it runs in the calling thread."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[Synchronisation] = []

    def __enter__(self) -> Synchronisations:
        for mode in (_Calls(self._note), _Operators(self._note)):
            self.enter_context(mode)
        return self

    def of_packages(self, *names: str) -> list[str]:
        """Places in the packages' own code."""
        folders = tuple(f"{folder}/" for name in names for folder in sys.modules[name].__path__)
        return [str(each) for each in self.found if each.file.startswith(folders)]

    def _note(self, kind: str) -> None:
        frame = sys._getframe(1)
        while frame.f_back is not None and _is_machinery(frame.f_code.co_filename):
            frame = frame.f_back
        code = frame.f_code
        self.found.append(
            Synchronisation(kind, code.co_filename, f"{code.co_filename}:{frame.f_lineno} {code.co_name}")
        )


def _is_machinery(file: str) -> bool:
    return file in (__file__, contextlib.__file__) or file.startswith((f"{torch.__path__[0]}/", "<"))


class _Calls(TorchFunctionMode):
    """Calls from Python."""

    def __init__(self, note: Callable[[str], None]) -> None:
        super().__init__()
        self._note = note
        self._on_host = WeakTensorKeyDictionary()

    def __torch_function__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _BACKWARDS:
            # torch leaves a mode while a call that the mode intercepts runs: enter it again where the engine runs.
            with mock.patch("torch.autograd._engine_run_backward", self._within(torch.autograd._engine_run_backward)):
                return func(*args, **kwargs)
        if func in _READING:
            self._note("read")
        elif func in _MOVING:
            if args[0] in self._on_host and _names_device((*args[1:], *kwargs.values())):
                self._note("sent")
        elif func is torch.Tensor.copy_ and args[0] not in self._on_host and args[1] in self._on_host:
            self._note("sent")
        result = func(*args, **kwargs)
        if func in _MAKING and not (func is torch.as_tensor and isinstance(args[0], torch.Tensor)):
            if kwargs.get("device") is None:
                self._on_host[result] = True
            elif func in _FROM_NUMBERS:
                self._note("sent")
        return result

    def _within(self, run: Callable[..., Any]) -> Callable[..., Any]:
        def run_within(*args: Any, **kwargs: Any) -> Any:
            with self:
                return run(*args, **kwargs)

        return run_within


def _names_device(values: Iterable[Any]) -> bool:
    return any(isinstance(value, str | torch.device | torch.Tensor) for value in values)


class _Operators(TorchDispatchMode):
    """Calls that reach the dispatcher, from C++ too."""

    def __init__(self, note: Callable[[str], None]) -> None:
        super().__init__()
        self._note = note

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(issubclass(each, DTensor) for each in types):
            return NotImplemented  # Its own dispatch comes first; operators called inside are intercepted here.
        if _reads(func, args, kwargs or {}):
            self._note("read")
        return func(*args, **(kwargs or {}))


def _reads(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    operator = func.overloadpacket
    if operator is _aten.repeat_interleave:  # with a tensor of numbers, of which other overloads are made
        return kwargs.get("output_size") is None
    if operator in _INDEXING:
        return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])
    return operator in _READING_OPERATORS
