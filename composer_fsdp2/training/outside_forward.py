"""Parameters that a script uses outside of their unit's forward: in a loss, a penalty or a metric.

Such parameters are DTensors, and torch raises for operators on a mix of DTensors and plain tensors. For the sum of a
loss and a penalty it raises in the backward only.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from traceback import extract_tb
from types import FrameType, TracebackType
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Partial
from torch.overrides import TorchFunctionMode

from composer_fsdp2._torch.private_names import own_parameters
from composer_fsdp2._torch.tensor_tree import map_tensors, tensors_in
from composer_fsdp2.config.text import and_more
from composer_fsdp2.sharding.modules import ancestors_or_self
from composer_fsdp2.sharding.ties import join


class FullTensorMode(TorchFunctionMode):
    """Within the block, operators on DTensors run on full tensors, so that they may be mixed with plain tensors.

    Each rank computes its own loss from a full tensor, so its gradient is averaged over the ranks of its mesh, as
    ``fully_shard`` averages those of a forward. The results equal those of one process. The sum of an elementwise
    penalty stays sharded, also over all parameters; one number is all-reduced at the end. Operators that write to a
    DTensor are not changed.

    An operator on a full tensor costs one collective, and another one in backward. All ranks must run the same
    operators.
    """

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        options, name = dict(kwargs or {}), getattr(func, "__name__", "")
        if name in _NO_OPERATORS or not any(isinstance(each, DTensor) for each in tensors_in((args, options))):
            return func(*args, **options)
        num_written = int(_writes(name))
        if (num_written and isinstance(args[0], DTensor)) or _stays_sharded(name, args, options):
            return func(*args, **options)
        rest, options = full_tensors((tuple(args[num_written:]), options))
        return func(*args[:num_written], *rest, **options)


# Attributes, metadata and hooks.
_NO_OPERATORS = {
    "__get__", "__len__", "__hash__", "__repr__", "__format__", "__deepcopy__", "__reduce_ex__", "size", "dim", "numel",
    "nelement", "ndimension", "element_size", "stride", "storage_offset", "is_floating_point", "is_complex", "type",
    "is_contiguous", "get_device", "data_ptr", "untyped_storage", "backward", "grad", "retain_grad", "register_hook",
    "register_post_accumulate_grad_hook",
}  # fmt: skip


def _writes(name: str) -> bool:
    """Whether an operator modifies its first argument: ``add_``, ``+=``, ``x[0] = y``, ``x.grad = y``."""
    if name.startswith("__"):
        return name in ("__set__", "__setitem__", *_IN_PLACE)
    return name.endswith("_")


_IN_PLACE = [f"__i{name}__" for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor")]


def _stays_sharded(name: str, args: Sequence[Any], options: Mapping[str, Any]) -> bool:
    """Whether an operator can run on the shards: it does not communicate, and is exact in torch 2.7 and later."""
    operands = [*args, *options.values()]
    shards = [each for each in operands if isinstance(each, DTensor)]
    others = [each for each in operands if not isinstance(each, DTensor)]
    if not all(isinstance(each, bool | int | float | torch.dtype) for each in others):
        return False
    if not any(placement.is_partial() for each in shards for placement in each.placements):
        return name.strip("_") in _ELEMENTWISE or (name == "sum" and len(operands) == 1)
    if name.strip("_") in ("add", "radd"):
        return all(each == 0 for each in others)  # a nonzero number would be added on each rank
    return name.strip("_") in ("mul", "rmul", "div", "truediv") and len(shards) == 1 and shards[0] is args[0]


_ELEMENTWISE = {"pow", "square", "abs", "neg", "mul", "rmul", "float", "double", "to", "clone", "detach"}


def full_tensors(value: Any) -> Any:
    """The same nested value with full tensors for DTensors; averages their gradients. Called on all ranks."""
    return map_tensors(value, _full_tensor, kind=DTensor)


def _full_tensor(tensor: DTensor) -> torch.Tensor:
    mesh = tensor.device_mesh
    on_mesh: Any = tensor.to(mesh.device_type)  # NCCL does not support CPU tensors, such as offloaded parameters
    full_tensor: torch.Tensor = on_mesh.full_tensor()
    if full_tensor.requires_grad:
        full_tensor.register_hook(partial(_average_gradient, mesh))
    return full_tensor


def _average_gradient(mesh: DeviceMesh, gradient: torch.Tensor) -> torch.Tensor:
    """The mean over the ranks of the mesh. Ranks that share a batch, along a tensor axis, have equal gradients."""
    return DTensor.from_local(gradient, mesh, [Partial()] * mesh.ndim).full_tensor() / mesh.size()


def explain_mixed(model: nn.Module, error: RuntimeError) -> None:
    """Add a note to torch's error about mixed tensors: the parameter, the line that used it, and an alternative.

    Other errors are not changed. Does not communicate.
    """
    if _MIXED in str(error):
        error.add_note(f"composer_fsdp2: {_where_mixed(model, error)}. {_IN_FULL}")


_MIXED = "got mixed torch.Tensor and DTensor"  # no specific class; torch 2.13 raises it outside of Python


def _where_mixed(model: nn.Module, error: BaseException) -> str:
    used = list(_methods_in(model, error.__traceback__))
    path, names = next(((path, names) for path, _, module in reversed(used) if (names := _shards_of(module))), ("", []))
    if names:
        what = f"{and_more([join(path, name) for name in names], 3)} {'is' if len(names) == 1 else 'are'} sharded"
        inside, method = next(((at, method) for at, method, _ in used if at and method not in _HOOKED), ("", ""))
        if inside:
            return (
                f"{what} within {inside}.{method}(), which gathers nothing. After sharding, call "
                f'torch.distributed.fsdp.register_fsdp_forward_method(model.{inside}, "{method}"), or move its code '
                f"into the forward of {inside}"
            )
        around = ancestors_or_self(path)
        unit = next((at for at in around if isinstance(model.get_submodule(at), FSDPModule)), "") or "the model"
        return f"{what} outside of the forward of its unit, {unit}. Move the code into that forward"
    if any(frame.f_globals.get("__name__", "").startswith("torch.autograd") for frame in _frames(error.__traceback__)):
        return (
            "the forward added up a loss and a penalty of sharded parameters, which the backward cannot take apart. "
            "Return the penalty from forward as a value of its own, or compute it in the loss of the ComposerModel"
        )
    return (
        f"a sharded parameter was used outside of a forward of its unit ({_last_line(error)}). Use it in the loss of "
        "the ComposerModel, or in the forward of the module that holds it"
    )


# Methods that run with the hooks of fully_shard, or are entered through a module call.
_HOOKED = ("forward", "eval_forward", "generate", "_call_impl", "_wrapped_call_impl", "wrapped_method", "__call__")
_IN_FULL = (
    "Or write parameter.full_tensor(), where every rank computes the same of it: a penalty, whose sum over all "
    "parameters is cheaper in full, penalty.full_tensor(); or summon_full_params, where no gradient is needed"
)


def _methods_in(model: nn.Module, traceback: TracebackType | None) -> Iterator[tuple[str, str, nn.Module]]:
    """The methods of submodules in a traceback, outermost first. Each is a path, the method's name and the module."""
    paths = {id(module): path for path, module in model.named_modules()}
    for frame in _frames(traceback):
        owner = frame.f_locals.get("self")
        if isinstance(owner, nn.Module) and id(owner) in paths:
            yield paths[id(owner)], frame.f_code.co_name, owner


def _frames(traceback: TracebackType | None) -> Iterator[FrameType]:
    while traceback is not None:
        yield traceback.tb_frame
        traceback = traceback.tb_next


def _last_line(error: BaseException) -> str:
    """The last line of the traceback outside of torch."""
    lines = extract_tb(error.__traceback__)
    line = next((line for line in reversed(lines) if "/torch/" not in line.filename), lines[-1])
    return f"{line.filename}:{line.lineno}, in {line.name}"


def _shards_of(module: nn.Module) -> list[str]:
    return [name for name, parameter in own_parameters(module) if isinstance(parameter, DTensor)]
