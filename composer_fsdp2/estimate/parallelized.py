"""Run a TP-, CP- or EP-parallelized model as rank 0, in one process."""

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

from composer_fsdp2._torch.private_names import own_parameters
from composer_fsdp2.config.parallel import SplitExperts
from composer_fsdp2.estimate._torch.fake import with_values
from composer_fsdp2.estimate._torch.one_rank import one_rank_of
from composer_fsdp2.parallel.expert_exchange import Experts
from composer_fsdp2.parallel.expert_layers import KINDS
from composer_fsdp2.parallel.experts import needed_rows
from composer_fsdp2.parallel.sequences import start_context
from composer_fsdp2.parallel.tiled_mlp import apply_tiling
from composer_fsdp2.sharding.meshes import group_along
from composer_fsdp2.sharding.modules import is_at_or_under
from composer_fsdp2.sharding.parallelize import parallelize, retie_parameters
from composer_fsdp2.sharding.plan import ShardingPlan

Finish = Callable[[], None]


@contextlib.contextmanager
def as_rank_0(model: nn.Module, plan: ShardingPlan) -> Iterator[Finish]:
    """In the block, make ``model`` compute as on rank 0. Collectives do not communicate.

    Args:
        model: A copy of the plan's model, possibly with fewer blocks. It is modified.
        plan: The sharding plan.
    Yields:
        A function to call after checkpointing wrappers are applied ([Note: legal order] in ``parallel/order.py``).
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    tensor = plan.mesh.tensor_degree if plan.split else 1
    experts = [each for each in plan.split_experts if not each.is_split and each.module in modules]
    degree = tensor * math.lcm(plan.config.context_parallel_degree, *(each.degree for each in experts))
    if degree == 1:
        _tile(modules, plan)
        yield lambda: None
        return
    # Rank 0's groups are the same for any world size; in a larger world none of them is the default group.
    with one_rank_of(2 * degree):
        exchanging = tuple(path for path in plan.exchanging if path in modules)
        with with_values():  # meshes are tensors of rank numbers
            mesh = _tensor_mesh(tensor)
            _, connect = start_context(model, replace(plan, exchanging=exchanging))
            _tile(modules, plan)
            _parallelize_layers(modules, plan, mesh)
            groups = [group_along((-1, each.degree, tensor), 1, "experts") for each in experts]

        def finish() -> None:
            connect()
            for each, group in zip(experts, groups, strict=True):
                _exchange_tokens(each, modules[each.module], group)

        yield finish


def without_parallelism(plan: ShardingPlan) -> ShardingPlan:
    """Return the plan without TP, CP, EP and tiled MLPs, so each rank computes its full microbatch."""
    config = replace(plan.config, context_parallel_degree=1, tiled_mlp=None)
    return replace(plan, split=(), split_experts=(), exchanging=(), tiled=(), config=config)


def _tile(modules: Mapping[str, nn.Module], plan: ShardingPlan) -> None:
    tiled, paths = plan.config.tiled_mlp, [path for path in plan.tiled if path in modules]
    if tiled is None:
        return
    apply_tiling(modules[""], paths, tiled.chunks)
    for path in paths:  # in a real run a trial finds these by comparing values
        pieces = vars(modules[path])["forward"]
        pieces.is_token_wise, pieces.num_parts = True, _num_parts(plan, path)


def _num_parts(plan: ShardingPlan, path: str) -> int:
    """Return over how many ranks the sequence dim of a module's output is sharded, from the output layouts of its TP
    styles."""
    inside = [
        getattr(each.parallelize, "style", each.parallelize) for each in plan.split if is_at_or_under(each.path, path)
    ]
    layouts = [layout for style in inside for layout in getattr(style, "output_layouts", ())]
    return plan.mesh.tensor_degree if any(isinstance(each, Shard) and each.dim != -1 for each in layouts) else 1


def _tensor_mesh(degree: int) -> DeviceMesh:
    """Create the tensor-parallel mesh. Must be called before other process groups are created.

    torch caches meshes by ranks and dim names, and finds their groups by a running number, which must be the same in
    each simulated process group. The dim's name therefore differs from those of real meshes.
    """
    return DeviceMesh("cpu", list(range(degree)), mesh_dim_names=("planned",))


def _parallelize_layers(modules: Mapping[str, nn.Module], plan: ShardingPlan, mesh: DeviceMesh) -> None:
    for each in plan.split:
        if each.parallelize is not None and each.path in modules:
            parallelize(modules[each.path], each.parallelize, mesh, source=None)
    for spec in (spec for unit in plan.units for spec in unit.parameters):
        names = tuple(name for name in spec.names if name.rpartition(".")[0] in modules)
        if len(names) > 1 and spec.tensor_placement is not None:
            retie_parameters(modules, names)


def _exchange_tokens(layer: SplitExperts, module: nn.Module, group: dist.ProcessGroup) -> None:
    """Make an MoE layer exchange tokens as on rank 0, and replace its parameters by the rows that rank 0
    all-gathers."""
    kind, experts = KINDS[layer.kind], Experts(num_experts=layer.num_experts, group=group, is_even=True)
    setattr(module, kind.method, partial(kind.compute, module, experts))
    needed = {parameter: rows[0] for parameter, rows in needed_rows(layer, module).items()}
    for inside in module.modules():
        for name, parameter in own_parameters(inside):
            if parameter in needed:
                first, end = needed[parameter]
                part = parameter.detach()[:1].new_empty((end - first, *parameter.shape[1:]))
                setattr(inside, name, nn.Parameter(part, requires_grad=parameter.requires_grad))
