"""The private torch names that this package uses, and one error that lists those that the installed torch lacks.

``tests/_torch/test_torch_api.py`` parses the package's code and fails for a name that is not listed here. Names that
exist in some versions only, and that we probe for, are not requirements.
"""

import functools
import importlib
from collections.abc import Iterable, Iterator
from types import FunctionType

import torch

from composer_fsdp2.config.text import and_more
from composer_fsdp2.errors import IncompatibleVersionError

# The range of versions on which `make test` or `make test-newest` passed.
KNOWN_VERSIONS = "2.7 to 2.15"

_FULLY_SHARD = "torch.distributed.fsdp._fully_shard"

# Names that the modules of this package import, or look up in a module, at import time.
_IN_MODULES: dict[str, tuple[str, ...]] = {
    f"{_FULLY_SHARD}._fsdp_common": ("TrainingState",),
    f"{_FULLY_SHARD}._fsdp_collectives": (
        "AllGatherResult",
        "_get_gradient_divide_factors",
        "_get_param_all_gather_inputs",
        "dist",
    ),
    f"{_FULLY_SHARD}._fsdp_param_group": (
        "AllReduceState",
        "FSDPParamGroup",
        "foreach_all_gather",
        "foreach_all_gather_copy_out",
        "foreach_reduce",
    ),
    f"{_FULLY_SHARD}._fsdp_param": ("FSDPParam",),
    f"{_FULLY_SHARD}._fsdp_state": ("FSDPState", "FSDPStateContext"),
    f"{_FULLY_SHARD}._fsdp_init": ("_get_post_forward_mesh_info",),
    f"{_FULLY_SHARD}._fully_shard": ("cls_to_fsdp_cls",),
    "torch.distributed.fsdp._wrap_utils": ("_auto_wrap",),
    "torch.distributed.algorithms._checkpoint.checkpoint_wrapper": (
        "ActivationWrapper",
        "CheckpointImpl",
        "checkpoint_wrapper",
        "offload_wrapper",
    ),
    "torch.distributed.fsdp.sharded_grad_scaler": ("ShardedGradScaler",),
    "torch.distributed._shard.sharded_tensor": ("ShardedTensor",),
    "torch.distributed._state_dict_utils": ("_all_gather_sharded_tensor",),
    "torch.distributed._functional_collectives": ("AsyncCollectiveTensor", "all_reduce"),
    "torch.distributed.tensor._dtensor_spec": ("DTensorSpec",),
    "torch.distributed.tensor._sharding_prop": ("ShardingPropagator",),
    "torch.distributed.tensor._random": ("_rng_tracker",),
    "torch.distributed.tensor.placement_types": ("_StridedShard", "shard_dim_alltoall"),
    "torch.distributed.tensor._utils": ("compute_local_shape_and_global_offset",),
    "torch._C._distributed_c10d": ("AllreduceOptions", "HashStore", "ProcessGroupGloo", "ReduceOp"),
    "torch.distributed.distributed_c10d": (
        "PrefixStore",
        "_World",
        "_get_default_store",
        "_resolve_process_group",
        "_unregister_process_group",
        "_world",
    ),
    "torch.nn.modules.batchnorm": ("_BatchNorm",),
    "torch.storage": ("_dtype_to_storage_type_map",),
    "torch._C": (
        "_DisableAutocast",
        "_are_functorch_transforms_active",
        "_current_graph_task_id",
        "_dispatch_has_kernel_for_dispatch_key",
    ),
    "torch.ops.aten": (
        "_to_copy",
        "_local_scalar_dense",
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_flash_attention_for_cpu_backward",
    ),
    "torch._subclasses.fake_tensor": ("FakeTensorMode",),
    "torch.utils._python_dispatch": ("TorchDispatchMode", "_disable_current_modes"),
    "torch.autograd": ("_unsafe_preserve_version_counter",),
    "torch.utils.hooks": ("unserializable_hook",),
    "torch.utils._pytree": ("SUPPORTED_NODES",),
    "torch.utils._foreach_utils": ("_group_tensors_by_device_and_dtype",),
    "torch._utils": ("_rebuild_tensor_v2", "_rebuild_tensor_v3"),
    "torch": (
        "_disable_dynamo",
        "_foreach_add_",
        "_foreach_copy_",
        "_foreach_lerp",
        "_foreach_lerp_",
        "_foreach_mul_",
        "_foreach_norm",
        "_foreach_sign_",
    ),
}

# Attributes that are read from the states, groups and parameters of a sharded model, by class. Some are set by methods
# only.
# fmt: off
_IN_CLASSES: dict[tuple[str, str], tuple[str, ...]] = {
    (f"{_FULLY_SHARD}._fsdp_state", "FSDPState"): ("_comm_ctx", "_device_handle", "_is_root", "_modules",
        "_modules_to_run_forward", "_mp_policy", "_pre_backward", "_register_pre_backward_hook",
        "_root_post_backward_final_callback", "_root_pre_forward", "_state_ctx", "_training_state"),
    ("torch.storage", "UntypedStorage"): ("_cdata",),
    ("torch.distributed.tensor._sharding_prop", "ShardingPropagator"): ("_propagate_tensor_meta_non_cached",),
    ("torch._ops", "OpOverload"): ("_schema",),
    ("torch.library", "Library"): ("_destroy",),
    ("torch.autograd.variable", "Variable"): ("_execution_engine",),
    (f"{_FULLY_SHARD}._fsdp_state", "FSDPStateContext"): ("all_states", "is_last_backward", "iter_forward_root",
        "post_backward_final_callback_queued"),
    (f"{_FULLY_SHARD}._fsdp_param_group", "FSDPParamGroup"): ("_all_gather_result", "_module_fqn",
        "_partial_reduce_output", "_post_reduce_event", "_register_post_backward_hook", "_to_sharded", "_to_unsharded",
        "_training_state", "all_reduce_grads", "device", "finalize_backward",
        "fsdp_params", "is_sharded", "is_unsharded", "lazy_init", "mesh_info", "post_backward", "post_forward",
        "pre_forward", "reduce_grads", "reshard", "unshard"),
    (f"{_FULLY_SHARD}._fsdp_param", "FSDPParam"): ("_init_sharded_param", "_module_info",
        "_orig_size", "all_gather_outputs", "alloc_all_gather_outputs", "init_all_gather_outputs",
        "padded_sharded_param_size", "reduce_dtype", "_setattr_on_modules", "_unsharded_param", "free_unsharded_param",
        "grad_offload_event", "offload_to_cpu", "pin_memory", "reset_sharded_param", "sharded_param", "to_unsharded"),
    ("torch.distributed.fsdp", "FSDPModule"): ("_get_fsdp_state",),
    ("torch.distributed.tensor", "DTensor"): ("_local_tensor", "_spec"),
    ("torch.amp.grad_scaler", "GradScaler"): ("_unscale_grads_",),
    ("torch.optim", "Optimizer"): ("_optimizer_load_state_dict_post_hooks", "_optimizer_load_state_dict_pre_hooks"),
    ("torch.nn", "Module"): ("_buffers", "_load_from_state_dict", "_load_state_dict_post_hooks",
        "_load_state_dict_pre_hooks", "_metadata", "_parameters"),
    ("torch", "Tensor"): ("_backward_hooks", "_base", "_post_accumulate_grad_hooks", "_version", "_view_func"),
    ("torch", "ScriptObject"): ("_type",),
}
# fmt: on


def missing_names() -> list[str]:
    """The required names that the installed torch lacks, as ``module.name`` or ``Class.name``."""
    return [*_missing_in_modules(), *_missing_in_classes()]


@functools.cache
def require_known_torch() -> None:
    """Raise if the installed torch lacks a private name that sharding needs.

    Raises:
        IncompatibleVersionError: names the missing attributes and the supported versions.

    Called before a model is sharded. Does not communicate; all ranks with the same torch get the same result.
    """
    _raise_for(missing_names())


def _missing_in_modules() -> Iterator[str]:
    for path, names in _IN_MODULES.items():
        try:
            module = module_at(path)
        except ImportError:
            yield path
        else:
            yield from (f"{path}.{name}" for name in names if not hasattr(module, name))


def module_at(path: str) -> object:
    """Import a module by its path. The namespace of aten operators is no module, and is returned without an import."""
    return torch.ops.aten if path == "torch.ops.aten" else importlib.import_module(path)


def _missing_in_classes() -> Iterator[str]:
    for (path, name), attributes in _IN_CLASSES.items():
        try:
            cls = getattr(importlib.import_module(path), name)
        except (ImportError, AttributeError):
            yield f"{path}.{name}"
        else:
            known = _names_known_to(cls)
            yield from (f"{name}.{attribute}" for attribute in attributes if attribute not in known)


def _names_known_to(cls: type) -> set[str]:
    """The attributes of a class, and every name that its methods read or set."""
    known: set[str] = set()
    for each in cls.__mro__:
        known.update(vars(each), vars(each).get("__annotations__", ()))
        for value in vars(each).values():
            if isinstance(function := getattr(value, "fget", value), FunctionType):
                known.update(function.__code__.co_names)
    return known


def _raise_for(missing: Iterable[str]) -> None:
    if names := list(missing):
        raise IncompatibleVersionError(
            f"torch {torch.__version__} has no {and_more(names, 8)}: private names that composer_fsdp2 needs, "
            f"and that a new version may change. It knows torch {KNOWN_VERSIONS}; install one of these, or a newer "
            "composer_fsdp2"
        )


# Before the other modules' imports, which would fail one at a time and with torch's message.
_raise_for(_missing_in_modules())
