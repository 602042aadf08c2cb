"""The one place that knows torch's private API and what differs between its versions.

Differences are found by probes, not by comparing versions.
"""

# First: it looks for the private names that the others import.
from composer_fsdp2._torch.api import KNOWN_VERSIONS, require_known_torch
from composer_fsdp2._torch.backward import (
    average_after_backward,
    keeps_what_copies_read,
    repair_unit_backward,
)
from composer_fsdp2._torch.collectives import (
    InFlight,
    all_gather_single,
    reduce_scatter_single,
    watch_collectives,
)
from composer_fsdp2._torch.groups import new_gloo_group, process_groups_of
from composer_fsdp2._torch.parts import (
    by_kind,
    lion_,
    local_tensor,
    local_tensors,
    multiply_each_,
    norm_of_each,
    with_local_tensor,
)
from composer_fsdp2._torch.private_names import (
    ActivationWrapper,
    BatchNorm,
    CheckpointImpl,
    checkpoint_wrapper,
    default_store,
    has_custom_load_state_dict,
    is_compiled,
    keep_class_name,
    local_box,
    offload_wrapper,
    own_buffers,
    own_parameters,
    pending_reduction,
    rebuild_tensor,
    rebuild_untyped_tensor,
    storage_class,
    storage_info,
    transformer_engine_checkpoint_wrapper,
)
from composer_fsdp2._torch.repairs import REPAIRS, Repair, repair_cpu_collectives
from composer_fsdp2._torch.reset import reset_after_error
from composer_fsdp2._torch.scaler import ShardedGradScaler
from composer_fsdp2._torch.unit_parameters import (
    UnitParameter,
    distinct_units,
    has_unreduced_gradients,
    is_in_pass,
    is_inside_unit,
    parameters_of_unit,
    show_instead_of_shards,
)

__all__ = [
    "KNOWN_VERSIONS",
    "REPAIRS",
    "ActivationWrapper",
    "BatchNorm",
    "CheckpointImpl",
    "InFlight",
    "Repair",
    "ShardedGradScaler",
    "UnitParameter",
    "all_gather_single",
    "average_after_backward",
    "by_kind",
    "checkpoint_wrapper",
    "default_store",
    "distinct_units",
    "has_custom_load_state_dict",
    "has_unreduced_gradients",
    "is_compiled",
    "is_in_pass",
    "is_inside_unit",
    "keep_class_name",
    "keeps_what_copies_read",
    "lion_",
    "local_box",
    "local_tensor",
    "local_tensors",
    "multiply_each_",
    "new_gloo_group",
    "norm_of_each",
    "offload_wrapper",
    "own_buffers",
    "own_parameters",
    "parameters_of_unit",
    "pending_reduction",
    "process_groups_of",
    "rebuild_tensor",
    "rebuild_untyped_tensor",
    "reduce_scatter_single",
    "repair_cpu_collectives",
    "repair_unit_backward",
    "require_known_torch",
    "reset_after_error",
    "show_instead_of_shards",
    "storage_class",
    "storage_info",
    "transformer_engine_checkpoint_wrapper",
    "watch_collectives",
    "with_local_tensor",
]
