"""Expert parallelism: the experts of a layer lie on different ranks, and tokens travel to them and back.

[Note: split experts] Ranks along the expert axis split the experts between them, by the first dimension of the weights
that hold them all; ``fully_shard`` shards each part over the other ranks, and everything else over all ranks, each of
which has its own batch. An expert computes the tokens of all ranks along its axis, so its gradient is their sum, while
``fully_shard`` averages over the other ranks alone: it is divided where the weight is used. Clipping, optimizers and
checkpoints then meet the gradients of one process.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import Placement
from torch.func import functional_call

from composer_fsdp2._torch.collectives import launch
from composer_fsdp2._torch.private_names import parent_mesh
from composer_fsdp2.config.choices import Choice, ModelChoices, UnitOverrides
from composer_fsdp2.config.mesh import EXPERT_AXIS, MeshSpec, divisors_text
from composer_fsdp2.config.parallel import SplitExperts
from composer_fsdp2.config.sharding import ShardingConfig, check_split_experts
from composer_fsdp2.config.text import and_more
from composer_fsdp2.errors import PlanError, UnsupportedError
from composer_fsdp2.parallel.tensor import is_of_experts
from composer_fsdp2.sharding.modules import ancestors_or_self
from composer_fsdp2.sharding.plan import ShardingPlan, ShardUnit
from composer_fsdp2.sharding.ties import parameter_uses

_KEY = "expert_parallel_degree"
_NUMBER = "moe_num_experts"
_MESH_KEYS = ("device_mesh", "mesh")
# From a module's own settings and its path to what they change of its unit.
_Read = Callable[[Mapping[str, Any], str], UnitOverrides]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertPlan:
    """What is split by experts.

    Args:
        layers: The modules that are units with a mesh of their own.
        choices: The model's, with these modules among them.
        placements: Of the weights, along the expert axis.
    """

    layers: tuple[SplitExperts, ...]
    choices: ModelChoices
    placements: Mapping[nn.Parameter, Placement]


def plan_experts(model: nn.Module, config: ShardingConfig, choices: ModelChoices, read: _Read) -> ExpertPlan:
    """Decide which weights are split by experts, without touching ``model``.

    Those of every layer whose experts are stacked in one weight, where the degree is above 1; and what a script has
    split already along an axis that it calls ``expert_parallel``, as LLM Foundry does for MegaBlocks.

    Args:
        config: The whole model's.
        choices: What its hooks chose.
        read: How a module's own settings are read.
    Raises:
        UnsupportedError: replicas, or another kind of parallelism, beside split experts.
        PlanError: there are no such layers, the degree does not divide their experts, or a script's meshes do not fit.

    Every rank must call this with the same model; it does not communicate.
    """
    split = _split_by_script(model)
    if config.expert_parallel_degree == 1 and not split:
        return ExpertPlan(layers=(), choices=choices, placements={})
    _refuse_beside(config.mesh, is_split=bool(split))
    degree = _degree(config, split)
    layers = _layers(model, config, choices, split)
    modules = dict(model.named_modules(remove_duplicate=False))
    if problems := [*_problems_of_layers(modules, layers, degree)]:
        raise PlanError("\n".join(problems))
    mesh = MeshSpec.of_experts(degree, tensor=config.mesh.tensor_degree, device_type=config.mesh.device_type)
    mesh = mesh.resolve(config.mesh.size) if config.mesh.is_resolved else mesh
    chosen = dict(choices.chosen)
    layers = tuple(replace(each, is_added=_is_added(choices, each.module)) for each in layers)
    placements: dict[nn.Parameter, Placement] = {}
    for layer in layers:
        module = modules[layer.module]
        own = choices.chosen.get(layer.module, Choice(chosen_by=_KEY))
        chosen[layer.module] = replace(own, overrides=_overrides(layer, own.overrides, mesh, read))
        placements.update(dict.fromkeys(module.parameters(), Shard(0)))
    return ExpertPlan(layers=layers, choices=replace(choices, chosen=chosen), placements=placements)


def with_experts(plan: ShardingPlan, layers: tuple[SplitExperts, ...]) -> ShardingPlan:
    """The plan with these layers; units that were added for them stand before the unit around them, and are drawn with
    it, so that a model on the meta device gets the values that it gets without."""
    added = {each.module for each in layers if each.is_added}
    names = {path for unit in plan.units if unit.name not in added for path in unit.modules}
    inside: dict[str, list[ShardUnit]] = {}
    for unit in plan.units:
        around = next((path for path in ancestors_or_self(unit.name)[1:] if path in names), None)
        if unit.name in added and around is not None:
            inside.setdefault(around, []).append(unit)
    moved = {unit.name for units in inside.values() for unit in units}
    rest = (unit for unit in plan.units if unit.name not in moved)
    units = tuple(each for unit in rest for each in (*_inside(unit, inside), unit))
    return replace(plan, split_experts=layers, units=units)


def _inside(unit: ShardUnit, inside: Mapping[str, list[ShardUnit]]) -> Iterator[ShardUnit]:
    for path in unit.modules:
        yield from inside.get(path, ())


def start_experts(layers: Sequence[SplitExperts], modules: Mapping[str, nn.Module]) -> None:
    """Have tokens travel, in the layers of a sharded model whose experts lie on different ranks.

    The instances get another ``forward``; no class is touched.

    Args:
        modules: By path, as they were before sharding.
    """
    for each in layers:
        if each.num_experts:
            layer = modules[each.module]
            layer.forward = partial(_forward, layer)


# ---------------------------------------------------------------------------------------------------------------------
# Which modules


def _split_by_script(model: nn.Module) -> dict[nn.Parameter, DeviceMesh]:
    """The weights that are split by experts already, with the axis along which they are."""
    split: dict[nn.Parameter, DeviceMesh] = {
        each: each.device_mesh for each in model.parameters() if isinstance(each, DTensor) and is_of_experts(each)
    }
    for parameter, mesh in split.items():
        assert isinstance(parameter, DTensor), "chosen so"
        parent = parent_mesh(mesh)
        is_whole = parent.mesh.flatten().tolist() == list(range(dist.get_world_size()))
        is_last = (parent.mesh_dim_names or ("",))[-1] == EXPERT_AXIS
        if parent.ndim > 2:
            raise UnsupportedError(f"HSDP + MoE is not supported: experts are split along {mesh}, of {parent}")
        if not (is_whole and is_last and parent.ndim == 2) or list(parameter.placements) != [Shard(0)]:
            raise PlanError(
                f"a weight is split by experts already, {list(parameter.placements)} along {mesh}, of {parent}; make "
                'one mesh of all ranks, as init_device_mesh("cuda", (shard, experts), mesh_dim_names=('
                f'"weight_parallel", "{EXPERT_AXIS}")), and split the first dimension along mesh["{EXPERT_AXIS}"]'
            )
    return split


def _refuse_beside(mesh: MeshSpec, *, is_split: bool) -> None:
    apart = (
        "experts that a script split already, beside tensor parallelism, whose consecutive ranks would have different "
        f"ones; leave one of the two out, or pass the experts unsplit and give {_KEY}"
    )
    check_split_experts(mesh, *([apart] if is_split and mesh.tensor_degree > 1 else []))


def _degree(config: ShardingConfig, split: Mapping[nn.Parameter, DeviceMesh]) -> int:
    degrees = {mesh.size() for mesh in split.values()}
    if config.expert_parallel_degree > 1:
        degrees.add(config.expert_parallel_degree)
    degree, *others = sorted(degrees)
    if others:
        raise PlanError(
            f"experts are split over {degree} and over {others[0]} ranks ({_KEY} is {config.expert_parallel_degree}, "
            "other weights are split already); use one degree"
        )
    return degree


def _layers(
    model: nn.Module, config: ShardingConfig, choices: ModelChoices, split: Mapping[nn.Parameter, DeviceMesh]
) -> tuple[SplitExperts, ...]:
    """The layers that exchange tokens by what is written here, and those of a script, which do so themselves."""
    found: dict[str, SplitExperts] = {}
    for path, module in model.named_modules():
        num_experts, is_split = _num_experts(module), any(each in split for each in module.parameters())
        if num_experts and (is_split or config.expert_parallel_degree > 1):
            found[path] = SplitExperts(module=path, num_experts=num_experts, is_split=is_split)
    for use in parameter_uses(model):
        above = ancestors_or_self(use.owners[0][0])
        if use.parameter in split and not any(path in found for path in above):
            path = next((each for each in above if _own_mesh(choices, each) is not None), None)
            if path is None:
                raise PlanError(
                    f"{use.name} is split by experts already, and no module around it has a mesh for the other ranks; "
                    "have fsdp_wrap_fn give {'device_mesh': mesh['weight_parallel']} for the module that holds it"
                )
            found[path] = SplitExperts(module=path, num_experts=0, is_split=True)
    if not found:
        raise PlanError(
            f"{_KEY} {config.expert_parallel_degree}: the model has no layer with all experts in one weight, as LLM "
            "Foundry's torch_dmoe has (experts that are modules of their own cannot be split so); leave the key out, "
            "and give such experts idle_experts: in_order where they are units"
        )
    return tuple(found.values())


def _problems_of_layers(modules: Mapping[str, nn.Module], layers: Sequence[SplitExperts], degree: int) -> Iterator[str]:
    for each in layers:
        module, rest = modules[each.module], each.num_experts % degree
        if rest:
            yield (
                f"{each.module} has {each.num_experts} experts, which {_KEY} {degree} does not divide; use "
                f"{divisors_text(each.num_experts)}"
            )
        own = (
            set(module.get_submodule("mlp").parameters(recurse=False)) if each.num_experts else set(module.parameters())
        )
        others = [
            name
            for name, parameter in module.named_parameters(prefix=each.module)
            if parameter not in own
            or (each.num_experts and (not parameter.dim() or parameter.shape[0] % each.num_experts))
            or isinstance(parameter, DTensor) != each.is_split
        ]
        if others:
            yield (
                f"{and_more(others)}: not split by experts like the other weights of {each.module}, in whose first "
                "dimension they stand one after the other; hold it in another module"
            )


def _num_experts(module: nn.Module) -> int:
    """How many experts a layer as in LLM Foundry's ``torch_dmoe`` has (llmfoundry/models/layers/dmoe.py, 0.22.0); 0 for
    any other module.

    Its ``mlp`` holds all of them and computes rows by the one with a given number; the layer looks for each expert's.
    """
    weights = getattr(module, "mlp", None)
    if not isinstance(weights, nn.Module):
        return 0
    num_experts = getattr(weights, _NUMBER, None)
    is_known = _parameters_of(module) == ("x", "scores", "expert_weights", "top_experts")
    is_known = is_known and _parameters_of(weights) == ("x", "expert_idx")
    return num_experts if is_known and isinstance(num_experts, int) else 0


def _parameters_of(module: nn.Module) -> tuple[str, ...]:
    return tuple(inspect.signature(module.forward).parameters)


def _is_added(choices: ModelChoices, path: str) -> bool:
    return path not in choices.chosen or any(key in choices.chosen[path].overrides.given for key in _MESH_KEYS)


def _own_mesh(choices: ModelChoices, path: str) -> DeviceMesh | None:
    given = choices.chosen[path].overrides.given if path in choices.chosen else {}
    return next((given[key] for key in _MESH_KEYS if isinstance(given.get(key), DeviceMesh)), None)


def _overrides(layer: SplitExperts, given: UnitOverrides, mesh: MeshSpec, read: _Read) -> UnitOverrides:
    """The module's own settings on the mesh of its experts.

    A mesh in them is the rest of the one along which a script split the experts: what LLM Foundry gives.

    Raises:
        PlanError: it is another one.
    """
    settings = {key: value for key, value in given.given.items() if key not in _MESH_KEYS}
    for key in given.given.keys() - settings.keys():
        own = given.given[key]
        if not (layer.is_split and isinstance(own, DeviceMesh) and _is_rest_of(own, mesh.expert_degree)):
            raise PlanError(
                f"{layer.module} has a {key} of its own, {own}, which is not the rest of a mesh along which its "
                "experts are split; leave it out"
            )
    return replace(read(settings, layer.module), mesh=mesh)


def _is_rest_of(mesh: DeviceMesh, degree: int) -> bool:
    """Whether it holds the ranks that have the same experts, where so many in a row split them."""
    ranks = range(dist.get_rank() % degree, dist.get_world_size(), degree)
    return mesh.mesh.flatten().tolist() == list(ranks)


# ---------------------------------------------------------------------------------------------------------------------
# Tokens


def _forward(
    layer: nn.Module, x: torch.Tensor, scores: torch.Tensor, expert_weights: torch.Tensor, top_experts: torch.Tensor
) -> torch.Tensor:
    """What the layer computes of this rank's tokens, by experts of all ranks along the axis.

    Args:
        x: [..., hidden].
        scores: Of the router; not needed.
        expert_weights, top_experts: [tokens, experts of a token].

    Called on all ranks; three exchanges, two more in backward. The host reads the device once.
    """
    experts = layer.get_submodule("mlp")
    weights, group = _local_weights(experts)
    rows, num_choices = x.reshape(-1, x.shape[-1]), top_experts.shape[-1]
    num_experts = dist.get_world_size(group) * _num_local(experts, group)
    chosen = top_experts.flatten()  # [tokens * choices]
    order = chosen.argsort(stable=True)
    tokens = order // num_choices
    # bincount would have the host wait for its largest number.
    counts = chosen.new_zeros(num_experts).scatter_add_(0, chosen, torch.ones_like(chosen))
    route = _Route.agree(counts, group)
    arrived = _Exchange.apply(rows[tokens], route.sent, route.received, group)
    computed = _compute(experts, weights, arrived, route)
    back = _Exchange.apply(computed, route.received, route.sent, group)
    weighted = back * expert_weights.flatten()[order].unsqueeze(-1)
    # Not a view: what changes one in place, after a unit, takes the unit's hook from it.
    out = torch.zeros_like(x, memory_format=torch.contiguous_format)
    out.view(rows.shape).index_add_(0, tokens, weighted.to(out.dtype))
    return out


@dataclass(frozen=True, slots=True)
class _Route:
    """How many rows go where.

    Args:
        sent: From this rank to each along the axis.
        received: On this rank from each.
        computed: By each of this rank's experts.
        counts: [ranks, own experts], of what is received; on the device.
    """

    sent: list[int]
    received: list[int]
    computed: list[int]
    counts: torch.Tensor

    @classmethod
    def agree(cls, chosen: torch.Tensor, group: dist.ProcessGroup) -> "_Route":
        """``chosen``: how many rows each expert of all ranks gets from this one. Waits for the device once."""
        num_ranks = dist.get_world_size(group)
        counts = torch.empty_like(chosen)
        launch(dist.all_to_all_single, counts, chosen, group=group)
        counts = counts.view(num_ranks, -1)
        numbers = torch.cat([chosen.view(num_ranks, -1).sum(1), counts.sum(1), counts.sum(0)]).tolist()
        return cls(numbers[:num_ranks], numbers[num_ranks : 2 * num_ranks], numbers[2 * num_ranks :], counts)


def _compute(
    experts: nn.Module, weights: Mapping[str, torch.Tensor], rows: torch.Tensor, route: _Route
) -> torch.Tensor:
    """Each row by its own of this rank's experts; rows come by the rank that sent them, and then by expert.

    An expert without rows runs on none, so that all ranks' gradients take the same way.
    """
    num_ranks, num_local = route.counts.shape
    numbers = torch.arange(num_local, device=rows.device).repeat(num_ranks)
    order = numbers.repeat_interleave(route.counts.flatten(), output_size=len(rows)).argsort(stable=True)
    parts = rows[order].split(route.computed)
    # It cuts its weights into as many experts as it says it has.
    num_experts = getattr(experts, _NUMBER)
    setattr(experts, _NUMBER, num_local)
    try:
        computed = [functional_call(experts, dict(weights), (part, number)) for number, part in enumerate(parts)]
    finally:
        setattr(experts, _NUMBER, num_experts)
    return torch.cat(computed)[order.argsort()]


def _local_weights(experts: nn.Module) -> tuple[dict[str, torch.Tensor], dist.ProcessGroup]:
    """This rank's part of each weight, whose gradient is the mean over ranks, and the ranks along the axis."""
    weights: dict[str, torch.Tensor] = {}
    group = None
    for name, weight in experts.named_parameters():
        assert isinstance(weight, DTensor), "its unit shows it as it was split"
        group = weight.device_mesh.get_group()
        weights[name] = _DividedGradient.apply(weight.to_local(), weight.device_mesh.size())
    assert group is not None, "a layer without weights is no unit"
    return weights, group


def _num_local(experts: nn.Module, group: dist.ProcessGroup) -> int:
    num_experts: int = getattr(experts, _NUMBER)
    return num_experts // dist.get_world_size(group)


class _Exchange(torch.autograd.Function):
    """Rows to the ranks of a group, so many to each; their gradients take the same way back."""

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup
    ) -> torch.Tensor:
        ctx.back = (received, sent, group)
        return _exchanged(rows, sent, received, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return _exchanged(grad, *ctx.back), None, None, None


def _exchanged(rows: torch.Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> torch.Tensor:
    arrived = rows.new_empty((sum(received), *rows.shape[1:]))
    rows = rows.contiguous()
    launch(dist.all_to_all_single, arrived, rows, received, sent, group=group)
    return arrived


class _DividedGradient(torch.autograd.Function):
    """The same tensor, whose gradient is divided by a number ([Note: split experts])."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, number: int) -> torch.Tensor:
        ctx.number = number
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad / ctx.number, None
