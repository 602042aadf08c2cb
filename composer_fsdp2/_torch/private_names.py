"""Private torch names, and helpers for facts that torch's public API does not expose."""

import functools
import importlib
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import device_mesh as _device_mesh
from torch.distributed._shard import sharded_tensor as _sharded_tensor
from torch.distributed._state_dict_utils import _all_gather_sharded_tensor
from torch.distributed.algorithms._checkpoint import checkpoint_wrapper as _wrappers
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp import FullyShardedDataParallel as _FSDP1
from torch.distributed.fsdp._fully_shard._fully_shard import cls_to_fsdp_cls
from torch.distributed.tensor import DTensor, Partial
from torch.distributed.tensor import _random as random_of_dtensors
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode

ActivationWrapper, CheckpointImpl = _wrappers.ActivationWrapper, _wrappers.CheckpointImpl
checkpoint_wrapper, offload_wrapper = _wrappers.checkpoint_wrapper, _wrappers.offload_wrapper
ShardedTensor = _sharded_tensor.ShardedTensor  # type: ignore[attr-defined]
gather_sharded_tensor: Any = _all_gather_sharded_tensor  # the full tensor of a ShardedTensor, on all ranks
# FSDP1's own class, even after ``install_fsdp`` has replaced it.
FSDP1Wrapper = _FSDP1
# The base class of all batch norms, which FSDP1 excluded from mixed precision.
BatchNorm = nn.modules.batchnorm._BatchNorm
# The functions by which torch.save rebuilds a tensor.
rebuild_tensor = torch._utils._rebuild_tensor_v2
rebuild_untyped_tensor = torch._utils._rebuild_tensor_v3


def is_compiled(module: nn.Module) -> bool:
    """Whether ``torch.compile(module)`` returned this module. ``module.compile()`` does not change the module's class.

    Does not import the compiler, which takes a second. If it was never imported, no module is compiled.
    """
    compiler: Any = sys.modules.get("torch._dynamo.eval_frame")
    return compiler is not None and isinstance(module, compiler.OptimizedModule)


def is_in_backward() -> bool:
    """Whether autograd runs a backward in this thread, as during the recomputation of a forward."""
    return torch._C._current_graph_task_id() != -1


F = TypeVar("F", bound=Callable[..., Any])


def untraced(function: F) -> F:
    """Exclude the function from torch.compile; calling it causes a graph break.

    For hooks that communicate, or whose work depends on the batch. ``torch.compiler.disable`` would import the compiler
    immediately.
    """
    disable: Any = torch._disable_dynamo  # type: ignore[attr-defined]
    disabled: F = disable(function)
    return disabled


# The attributes under which FSDP1's class, activation checkpointing and torch.compile register the wrapped module.
FSDP_WRAPPED = "_fsdp_wrapped_module"
_WRAPPED = (FSDP_WRAPPED, "_checkpoint_wrapped_module", "_orig_mod")


def without_wrappers(path: str) -> str:
    """The path without the wrappers of FSDP1, activation checkpointing and torch.compile."""
    return ".".join(name for name in path.split(".") if name not in _WRAPPED)


def own_parameters(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """The parameters that the module itself registers, under each of their names.

    Equals ``named_parameters(recurse=False, remove_duplicate=False)``, but faster for modules without parameters, which
    are the majority. Setup reads every module several times.
    """
    registered = module._parameters
    return [(name, parameter) for name, parameter in registered.items() if parameter is not None] if registered else []


def own_buffers(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """The buffers that the module itself registers, under each of their names; see ``own_parameters``."""
    registered = module._buffers
    return [(name, buffer) for name, buffer in registered.items() if buffer is not None] if registered else []


def has_hooks(parameter: nn.Parameter) -> bool:
    """Whether ``register_hook`` or ``register_post_accumulate_grad_hook`` has registered a hook on the parameter."""
    return bool(parameter._backward_hooks or parameter._post_accumulate_grad_hooks)


def local_box(tensor: DTensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The (offsets, sizes) of this rank's shard within the full tensor, in elements."""
    sizes, offsets = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple(offsets), tuple(sizes)


def pending_reduction(placement: Any) -> tuple[str, float] | None:
    """The reduction of a DTensor's local values that is still pending along one axis of its mesh.

    Returns:
        None if no reduction is pending: the values are replicated or sharded along this axis. ``("norm", p)`` if they
        are p-norms of shards (torch's ``_NormPartial``, which for p = inf is a maximum). Otherwise ``(op, 1.0)`` with
        torch's name of the reduction, such as ``sum``, ``avg`` or ``max``.
    """
    if not isinstance(placement, Partial):
        return None
    power = getattr(placement, "norm_type", None)
    if power is not None and placement.reduce_op == "sum":
        return "norm", float(power)
    return placement.reduce_op, 1.0


def storage_class(dtype: torch.dtype) -> tuple[type, bool]:
    """The class that ``torch.save`` records for a tensor's storage, and whether that class implies the dtype.

    If it does, use ``rebuild_tensor``; otherwise ``rebuild_untyped_tensor`` takes the dtype as an additional argument.
    """
    name = torch.storage._dtype_to_storage_type_map().get(dtype)
    return (torch.storage.UntypedStorage, False) if name is None else (getattr(torch, name), True)


def storage_info(file_name: str, offset: int, num_bytes: int) -> Any:
    """The location of an entry in a checkpoint folder, as its ``.metadata`` stores it."""
    from torch.distributed.checkpoint.filesystem import _StorageInfo  # slow to import, and needed for writing only

    return _StorageInfo(file_name, offset, num_bytes)


def default_store() -> Any:
    """The store of the default process group. Keys get a prefix of this package."""
    c10d: Any = dist.distributed_c10d
    return c10d.PrefixStore("composer_fsdp2", c10d._get_default_store())


def has_custom_load_state_dict(optimizer: torch.optim.Optimizer) -> bool:
    """Whether ``optimizer.load_state_dict`` runs code other than torch's: an override, or hooks."""
    cls, base = type(optimizer), torch.optim.Optimizer
    is_overridden = "load_state_dict" in vars(optimizer) or cls.load_state_dict is not base.load_state_dict
    # torch's own optimizers override ``__setstate__``, to read the state of older versions.
    set_state = getattr(cls.__setstate__, "__module__", "")
    hooks = (optimizer._optimizer_load_state_dict_pre_hooks, optimizer._optimizer_load_state_dict_post_hooks)
    return is_overridden or not set_state.startswith("torch.") or any(hooks)


def custom_loading(model: nn.Module) -> dict[str, str]:
    """The functions besides torch's own that ``model.load_state_dict`` would run, by module path."""
    found = {path: list(_loading_code(module)) for path, module in model.named_modules()}
    own = vars(model).get("load_state_dict", type(model).load_state_dict)
    if getattr(own, "__func__", own) is not nn.Module.load_state_dict:  # torch calls it on the root module only
        found[""].insert(0, own)
    return {
        path: ", ".join(getattr(code, "__qualname__", type(code).__qualname__) for code in codes)
        for path, codes in found.items()
        if codes
    }


_KNOWN_LOADING_CODE = ("torch.nn.modules.", "torch.distributed.", "composer_fsdp2.sharding.full_values")


def _loading_code(module: nn.Module) -> Iterator[Any]:
    """The loading functions of a module that are not torch's."""
    pre_hooks = (getattr(hook, "hook", hook) for hook in module._load_state_dict_pre_hooks.values())
    for code in (module._load_from_state_dict, *pre_hooks, *module._load_state_dict_post_hooks.values()):
        function = getattr(code, "func", code)  # of a functools.partial
        # Sharding and checkpoint wrappers register hooks too, and BatchNorm reads files of torch 0.4.
        if not getattr(function, "__module__", "").startswith(_KNOWN_LOADING_CODE):
            yield function


def versions_in(state: Mapping[str, Any]) -> Any:
    """The versions of the modules in a state dict, which their loading code reads; None for a plain dict."""
    return getattr(state, "_metadata", None)


def state_dict_of(entries: Mapping[str, Any], versions: Any) -> OrderedDict[str, Any]:
    """A state dict as ``state_dict()`` returns it."""
    state = OrderedDict(entries)
    if versions is not None:
        state._metadata = versions  # type: ignore[attr-defined]
    return state


def keep_class_name(module: nn.Module) -> None:
    """Restore the original name of the class that ``fully_shard`` assigned to ``module``.

    Hugging Face writes the class name into ``architectures``, Composer writes it into checkpoint metadata, and user
    code reads ``type(m).__name__``. ``fully_shard`` creates one class per original class, so this changes each class
    once.
    """
    cls = type(module)
    if cls in cls_to_fsdp_cls or not issubclass(cls, FSDPModule):
        return  # also for a class that is a unit itself
    original = cls.__mro__[2]  # 0 is the class of fully_shard, 1 is FSDPModule
    for attribute in ("__name__", "__qualname__", "__module__"):
        setattr(cls, attribute, getattr(original, attribute))


def transformer_engine_checkpoint_wrapper(seed: int) -> Callable[[nn.Module], nn.Module]:
    """A wrapper that recomputes with Transformer Engine's checkpoint, as Composer configured it under amp_fp8.

    All modules share one RNG tracker (composer/distributed/dist_strategy.py, 0.32.1).

    Raises:
        ImportError: Transformer Engine is not installed.
    """
    te: Any = importlib.import_module("transformer_engine.pytorch")
    tracker = te.distributed.CudaRNGStatesTracker()
    tracker.add("fsdp-rng", seed)
    return functools.partial(
        checkpoint_wrapper,
        context_fn=te.distributed.get_activation_recompute_contexts,
        checkpoint_fn=te.distributed.checkpoint,
        use_reentrant=False,
        get_rng_state_tracker=lambda: tracker,
    )


def dtensor_random_states() -> dict[str, torch.Tensor]:
    """The RNG states that DTensors use on a GPU in addition to torch's generator, as for TP-sharded dropout.

    The states themselves, not copies. Empty in torch 2.13, and in torch 2.7 before their first use.
    """
    states: dict[str, torch.Tensor] = getattr(random_of_dtensors._rng_tracker, "rng_states", {})
    return states


def parent_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """The mesh of which ``mesh`` is a slice (``parent["tp"]``), or ``mesh`` itself.

    torch 2.7 stores it in a registry, later versions in the mesh.
    """
    ask: Any = getattr(mesh, "_get_root_mesh", None)
    parent: DeviceMesh = ask() if ask is not None else _device_mesh._mesh_resources.get_root_mesh(mesh)
    return parent
