"""torch's tensor-parallel styles for dimensions of any length, such as the sequence between TP-sharded layers.

[Note: padded sequences] torch's styles take and return local tensors, and assume that these have equal sizes on all
ranks. If the degree does not divide the length, the ranks send buffers of different sizes, which aborts or hangs. The
input of a module that divides a dimension is therefore padded with zeros, and the padding is removed from the output of
a module that gathers it. Norms and dropouts between the two also process the padding; its outputs are not used, and its
gradients are zero.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
)
from torch.distributed.tensor.placement_types import Placement
from torch.nn import functional as F

# The number of padding positions by (dimension, padded length). Shared by the styles of a model.
AddedPositions = dict[tuple[int, int], int]
# The layouts before and after, by the position or name of a tensor.
_Changes = Mapping[int | str, tuple[Placement | None, Placement | None]]
_Change = Callable[[torch.Tensor, Placement | None, Placement | None], torch.Tensor]


class PaddedStyle(ParallelStyle):
    """A style that pads tensors if the degree does not divide them ([Note: padded sequences]).

    Args:
        style: torch's style.
        added: The padding of the model's tensors.
    """

    def __init__(self, style: ParallelStyle, added: AddedPositions) -> None:
        super().__init__()
        self.style, self.added = style, added

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        # An embedding's output has one dimension more than its input.
        degree, num_more = device_mesh.size(), int(isinstance(module, nn.Embedding))
        of_inputs, of_outputs = _changes(self.style)
        is_layer = isinstance(self.style, ColwiseParallel | RowwiseParallel)

        def pad(tensor: torch.Tensor, before: Placement | None, after: Placement | None) -> torch.Tensor:
            dim = _newly_sharded_dim(before, after, tensor.ndim + num_more)
            # A DTensor knows its full shape, and is divided unevenly as it is.
            if dim is None or isinstance(tensor, DTensor):
                return tensor
            missing = -tensor.shape[dim] % degree
            self.added[dim, tensor.shape[dim] + missing] = missing
            return F.pad(tensor, (*[0, 0] * (tensor.ndim - 1 - dim), 0, missing)) if missing else tensor

        def strip(tensor: torch.Tensor, before: Placement | None, after: Placement | None) -> torch.Tensor:
            dim = _newly_sharded_dim(after, before, tensor.ndim)
            if dim is None:
                return tensor
            num_added = self.added.get((dim, tensor.shape[dim]), 0)
            return tensor.narrow(dim, 0, tensor.shape[dim] - num_added) if num_added else tensor

        _on_inputs(module, pad, of_inputs)
        _on_outputs(module, pad, of_outputs)
        self.style.src_data_rank = self.src_data_rank
        self.style._apply(module, device_mesh)
        _on_inputs(module, strip, {} if is_layer else of_inputs)
        _on_outputs(module, strip, of_inputs if is_layer else of_outputs)
        return module


def padded(style: ParallelStyle, added: AddedPositions) -> ParallelStyle:
    """Return a ``PaddedStyle`` if ``style`` divides or gathers a dimension other than the last; else ``style``."""
    layouts = [layout for changes in _changes(style) for change in changes.values() for layout in change]
    # The last dimension needs no padding: the plan has checked the widths of the layers.
    return PaddedStyle(style, added) if any(isinstance(each, Shard) and each.dim != -1 for each in layouts) else style


def _changes(style: ParallelStyle) -> tuple[_Changes, _Changes]:
    """The layout changes of a module's inputs and outputs. A TP-sharded layer has one, from input to output."""
    if isinstance(style, ColwiseParallel | RowwiseParallel):
        return {0: (style.input_layouts[0], style.output_layouts[0])}, {}
    of_inputs = getattr(style, "prepare_module_input", style)  # of torch 2.13's style for both
    of_outputs = getattr(style, "prepare_module_output", style)
    inputs: dict[int | str, tuple[Placement | None, Placement | None]] = {}
    outputs = dict(inputs)
    if isinstance(of_inputs, PrepareModuleInput):
        desired = of_inputs.desired_input_kwarg_layouts
        inputs |= enumerate(zip(of_inputs.input_layouts or (), of_inputs.desired_input_layouts or (), strict=True))
        inputs |= {name: (layout, desired.get(name)) for name, layout in of_inputs.input_kwarg_layouts.items()}
    if isinstance(of_outputs, PrepareModuleOutput):
        outputs |= enumerate(zip(of_outputs.output_layouts, of_outputs.desired_output_layouts, strict=True))
    return inputs, outputs


def _newly_sharded_dim(before: Placement | None, after: Placement | None, num_dims: int) -> int | None:
    """The dimension that the second layout divides and the first does not; None for the last dimension (features)."""
    old, new = (layout.dim % num_dims if isinstance(layout, Shard) else None for layout in (before, after))
    return None if new in (old, num_dims - 1) else new


def _on_inputs(module: nn.Module, change: _Change, changes: _Changes) -> None:
    def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        new = tuple(_changed(change, changes, number, each) for number, each in enumerate(args))
        return new, {name: _changed(change, changes, name, each) for name, each in kwargs.items()}

    if changes:
        module.register_forward_pre_hook(hook, with_kwargs=True)


def _on_outputs(module: nn.Module, change: _Change, changes: _Changes) -> None:
    def hook(_: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        if not isinstance(output, tuple):
            return _changed(change, changes, 0, output)
        return tuple(_changed(change, changes, number, each) for number, each in enumerate(output))

    if changes:
        module.register_forward_hook(hook)


def _changed(change: _Change, changes: _Changes, key: int | str, value: Any) -> Any:
    return change(value, *changes[key]) if key in changes and isinstance(value, torch.Tensor) else value
