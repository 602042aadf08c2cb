"""Expert parallelism: ranks compute different experts of a layer and exchange tokens by all-to-all.

[Note: split experts] Each group of ``expert_parallel_degree`` consecutive ranks of the shard axis divides the
experts of a layer. Parameters are sharded over the whole axis, as without expert parallelism; a rank all-gathers
only the experts that it computes ([Note: gathered parts]). Optimizers, clipping and checkpoints therefore see the
same parameters under the same names, and replicas are averaged as before. LLM Foundry divides MegaBlocks' weights
itself, as DTensors along a mesh axis of experts. ``fully_shard`` shards these over the other ranks of that mesh, and
the layer exchanges tokens itself.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import Placement

from composer_fsdp2._torch.partial_all_gather import Rows, all_gather_rows
from composer_fsdp2._torch.private_names import parent_mesh
from composer_fsdp2.config.choices import Choice, ModelChoices, UnitOverrides
from composer_fsdp2.config.mesh import EXPERT_AXIS, MeshSpec, divisors_text
from composer_fsdp2.config.parallel import SplitExperts
from composer_fsdp2.config.sharding import ShardingConfig, check_split_experts
from composer_fsdp2.config.text import and_more
from composer_fsdp2.errors import PlanError, UnsupportedError
from composer_fsdp2.parallel.expert_exchange import Experts
from composer_fsdp2.parallel.expert_layers import ALL_EXPERTS, KINDS
from composer_fsdp2.parallel.tensor import is_expert_sharded, is_last_axis
from composer_fsdp2.sharding.meshes import group_along
from composer_fsdp2.sharding.modules import ancestors_or_self, at_path, is_at_or_under
from composer_fsdp2.sharding.plan import ShardingPlan, ShardUnit
from composer_fsdp2.sharding.ties import join, parameter_uses

_KEY = "expert_parallel_degree"
_MESH_KEYS = ("device_mesh", "mesh")
_UNIT_FOR_EXPERTS = Choice(chosen_by=_KEY)
# Maps a module's own settings and its path to the overrides of its unit.
_Read = Callable[[Mapping[str, Any], str], UnitOverrides]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertPlan:
    """The expert-parallel layers.

    Args:
        layers: Each of them is a separate unit.
        choices: The choices of the model's hooks, plus these layers as units.
        placements: The placements along the expert axis of weights that a script has already sharded by experts.
    """

    layers: tuple[SplitExperts, ...]
    choices: ModelChoices
    placements: Mapping[nn.Parameter, Placement]


def plan_experts(model: nn.Module, config: ShardingConfig, choices: ModelChoices, read: _Read) -> ExpertPlan:
    """Decide which layers are expert-parallel, without modifying ``model``.

    These are all layers of a known kind if the degree is above 1, and all modules whose weights a script has sharded
    along a mesh axis named ``expert_parallel``, as LLM Foundry does for MegaBlocks.

    Args:
        config: The configuration of the whole model.
        choices: The choices of the model's hooks.
        read: Reads a module's own settings.
    Raises:
        UnsupportedError: groups of ranks with expert parallelism; replicas or tensor parallelism, if a script has
            already sharded the experts.
        PlanError: no such layer, a number of experts that the degree does not divide, or an unsupported mesh.

    Call this on all ranks with the same model. Does not communicate.
    """
    sharded = _sharded_by_script(model, config.mesh)
    degrees = sorted(({config.expert_parallel_degree} - {1}).union(mesh.size() for mesh in sharded.values()))
    if not degrees:
        return ExpertPlan(layers=(), choices=choices, placements={})
    if len(degrees) > 1:
        raise PlanError(
            f"experts are split over {degrees[0]} and over {degrees[1]} ranks ({_KEY} is "
            f"{config.expert_parallel_degree}, other weights are split already); use one degree"
        )
    layers = _layers(model, choices, sharded, degrees[0])
    modules = dict(model.named_modules(remove_duplicate=False))
    chosen, problems = dict(choices.chosen), list[str]()
    for layer in layers:
        own = chosen.setdefault(layer.module, _UNIT_FOR_EXPERTS)
        problems += _layer_problems(modules[layer.module], layer, own.overrides.given)
        if layer.is_split:
            settings = {key: value for key, value in own.overrides.given.items() if key not in _MESH_KEYS}
            mesh = MeshSpec.of_experts(layer.degree, device_type=config.mesh.device_type)
            mesh = mesh.resolve(config.mesh.size) if config.mesh.is_resolved else mesh
            chosen[layer.module] = replace(own, overrides=replace(read(settings, layer.module), mesh=mesh))
    if problems:
        raise PlanError("\n".join(problems))
    choices = replace(choices, chosen=chosen)
    return ExpertPlan(layers=layers, choices=choices, placements=dict.fromkeys(sharded, Shard(0)))


def paths_of_experts(model: nn.Module) -> frozenset[str]:
    """The paths of the expert modules in known layers. With expert parallelism, no layer plan may parallelize them."""
    return frozenset(
        join(path, name)
        for path, module, kind, _ in _known_layers(model)
        for name, _ in module.named_modules()
        if name and KINDS[kind].expert_of(name) is not None
    )


def with_experts(plan: ShardingPlan, layers: tuple[SplitExperts, ...]) -> ShardingPlan:
    """Return ``plan`` with the expert-parallel layers.

    A unit that was added for its experts is placed directly before the enclosing unit, and is initialized with it. A
    model on the meta device then gets the same values as without expert parallelism.
    """
    added = {each.module for each in layers if each.is_added}
    gathered_in_part = {each.module: each for each in layers if not each.is_split}
    numbers = {path: number for number, unit in enumerate(plan.units) for path in unit.modules}

    def position(unit: ShardUnit) -> tuple[int, bool]:
        above = (path for path in ancestors_or_self(unit.name) if path in numbers and path not in added)
        return numbers[next(above, unit.name)], unit.name not in added

    units = sorted(plan.units, key=position)
    for number, unit in enumerate(units):
        if layer := gathered_in_part.get(unit.name):
            specs = (
                spec if _expert_of(layer, spec.name) is None else replace(spec, expert_degree=layer.degree)
                for spec in unit.parameters
            )
            units[number] = replace(unit, parameters=tuple(specs))
    return replace(plan, split_experts=layers, units=tuple(units))


def start_experts(model: nn.Module, plan: ShardingPlan, modules: Mapping[str, nn.Module]) -> list[dist.ProcessGroup]:
    """Make the expert layers of a sharded model exchange tokens, if this package divides their experts.

    Replaces ``forward``, or another method, of instances. Classes are not modified.

    Args:
        plan: The resolved plan of the model.
        modules: The modules by path, from before sharding.
    Returns:
        The process groups along which tokens are exchanged.

    Called on all ranks; creates process groups.
    """
    meshes = {unit.name: unit.mesh for unit in plan.units}
    groups: dict[dist.ProcessGroup, None] = {}
    for each in plan.split_experts:
        if each.is_split:
            continue
        module, unit, mesh = modules[each.module], at_path(model, each.module), meshes[each.module]
        assert isinstance(unit, FSDPModule), "planned as a unit"
        all_gather_rows(unit, each.degree, needed_rows(each, module))
        # Consecutive ranks of the shard axis, which is the last axis or the one before the tensor axis.
        shape = (mesh.replicate_degree, mesh.shard_degree // each.degree, each.degree, mesh.tensor_degree)
        group = group_along(shape, 2, "experts")
        groups[group] = None
        kind, experts = KINDS[each.kind], Experts(num_experts=each.num_experts, group=group)
        setattr(module, kind.method, partial(kind.compute, module, experts))
    return list(groups)


def needed_rows(layer: SplitExperts, module: nn.Module) -> dict[nn.Parameter, Rows]:
    """For each parameter of experts, the rows that each rank of the group all-gathers."""
    needed: dict[nn.Parameter, Rows] = {}
    for name, parameter in module.named_parameters():
        expert, size, ranks = KINDS[layer.kind].expert_of(name), parameter.shape[0], range(layer.degree)
        if expert == ALL_EXPERTS:
            num_rows = size // layer.degree
            needed[parameter] = [(rank * num_rows, (rank + 1) * num_rows) for rank in ranks]
        elif expert is not None:
            owner = expert * layer.degree // layer.num_experts
            needed[parameter] = [(0, size if rank == owner else 0) for rank in ranks]
    return needed


def expert_problems(plan: ShardingPlan) -> Iterator[str]:
    """Messages about expert layers in a plan that are not supported, or would train incorrectly."""
    units = {path: unit for unit in plan.units for path in unit.modules}
    specs = (spec for unit in plan.units for spec in (*unit.parameters, *unit.replicated))
    names = plan.unsharded_names.union(name for spec in specs for name in spec.names)
    for each in plan.split_experts:
        if inside := [split.path for split in plan.split if _expert_of(each, split.path) is not None]:
            yield f"{and_more(inside)}: in the layer plan, and split by experts; take it out of the plan"
        unit = units.get(each.module)
        if unit is None or unit.modules != (each.module,):
            yield (
                f"{each.module}: its experts are to lie on different ranks, and it is no unit of its own, because it "
                "is ignored, left out, or shares its weights; leave expert_parallel_degree out, or make it one"
            )
            continue
        own = {name for spec in unit.parameters for name in spec.names}
        if outside := sorted(name for name in names - own if _expert_of(each, name) is not None):
            yield (
                f"{and_more(outside)}: of the experts of {each.module}, and not sharded with it; let no expert be a "
                "unit, ignored, or of another dtype than the rest of the module"
            )
        yield from _mismatched_expert_problems(each, unit)
        shards = unit.mesh.shard_degree
        if not each.is_split and (unit.mesh.is_grouped or (shards != -1 and shards % each.degree)):
            yield f"{each.module} is sharded over {unit.mesh.text}, which {_KEY} {each.degree} does not divide"


def _mismatched_expert_problems(layer: SplitExperts, unit: ShardUnit) -> Iterator[str]:
    """Yield messages about experts that train different parameters.

    Ranks reduce the gradients of their experts together, so all experts must train the same parameters.
    """
    trained: dict[str, dict[bool, str]] = {}
    for spec in unit.parameters:
        expert = _expert_of(layer, spec.name)
        if expert is not None and len(spec.names) > 1:
            yield f"{' = '.join(spec.names)}: experts that share a weight cannot lie on different ranks; untie it"
        if expert not in (None, ALL_EXPERTS):
            pattern = spec.name.replace(f".{expert}.", ".*.", 1)
            trained.setdefault(pattern, {})[spec.is_trained] = spec.name
    for names in trained.values():
        if len(names) > 1:
            yield (
                f"{names[True]} is trained and {names[False]} is not: experts that lie on different ranks are frozen "
                "alike; freeze the parameter in all experts of the layer, or in none"
            )


def _expert_of(layer: SplitExperts, name: str) -> int | None:
    """Apply ``Kind.expert_of`` to the path of a parameter or module in the model; None outside of the layer."""
    if not is_at_or_under(name, layer.module):
        return None
    return KINDS[layer.kind].expert_of(name.removeprefix(f"{layer.module}.")) if layer.kind else ALL_EXPERTS


# ---------------------------------------------------------------------------------------------------------------------
# Which modules


def _sharded_by_script(model: nn.Module, of_model: MeshSpec) -> dict[nn.Parameter, DeviceMesh]:
    """The weights that a script has already sharded by experts, with the mesh axis."""
    sharded: dict[nn.Parameter, DeviceMesh] = {}
    for parameter in model.parameters():
        if not isinstance(parameter, DTensor) or not is_expert_sharded(parameter):
            continue
        mesh = sharded[parameter] = parameter.device_mesh
        parent, placements = parent_mesh(mesh), list(parameter.placements)
        if parent.ndim > 2:
            raise UnsupportedError(f"HSDP + MoE is not supported: experts are split along {mesh}, of {parent}")
        if not is_last_axis(mesh, dist.get_world_size()) or parent.ndim != 2 or placements != [Shard(0)]:
            raise PlanError(
                f"a weight is split by experts already, {placements} along {mesh}, of {parent}; make one mesh of all "
                'ranks, as init_device_mesh("cuda", (shard, experts), mesh_dim_names=('
                f'"weight_parallel", "{EXPERT_AXIS}")), and split the first dimension along mesh["{EXPERT_AXIS}"]'
            )
    unsupported = {
        "experts that a script split already, beside tensor parallelism, whose consecutive ranks would have different "
        f"ones; leave one of the two out, or pass the experts unsplit and give {_KEY}": of_model.tensor_degree > 1,
        "experts that a script split already, beside replicas; leave data_parallel_replicate_degree, HYBRID_SHARD or "
        f"NO_SHARD out, or pass the experts unsplit and give {_KEY}": of_model.has_replicas,
    }
    if sharded:
        check_split_experts(of_model, *(text for text, is_given in unsupported.items() if is_given))
    return sharded


def _known_layers(model: nn.Module) -> Iterator[tuple[str, nn.Module, str, int]]:
    """The path, the module, the kind and the number of experts of each known layer."""
    for path, module in model.named_modules():
        for kind, known in KINDS.items():
            if number := known.num_experts_of(module):
                yield path, module, kind, number


def _layers(
    model: nn.Module, choices: ModelChoices, sharded: Mapping[nn.Parameter, DeviceMesh], degree: int
) -> tuple[SplitExperts, ...]:
    """The expert-parallel layers: those of known kinds, and modules whose weights a script has sharded by experts."""
    found = {
        path: SplitExperts(
            module=path, kind=kind, num_experts=number, degree=degree, is_added=path not in choices.chosen
        )
        for path, _, kind, number in _known_layers(model)
    }
    with_mesh = {
        path
        for path, choice in choices.chosen.items()
        if any(isinstance(choice.overrides.given.get(key), DeviceMesh) for key in _MESH_KEYS)
    }
    for use in parameter_uses(model):
        above = ancestors_or_self(use.owners[0][0])
        if use.parameter in sharded and not any(path in found for path in above):
            path = next((each for each in above if each in with_mesh), None)
            if path is None:
                raise PlanError(
                    f"{use.name} is split by experts already, and no module around it has a mesh for the other ranks; "
                    "have fsdp_wrap_fn give {'device_mesh': mesh['weight_parallel']} for the module that holds it"
                )
            found[path] = SplitExperts(module=path, degree=degree)
    if not found:
        raise PlanError(
            f"{_KEY} {degree}: the model has no layer of experts that is known. Known are Hugging Face's Mixtral, "
            "Qwen2-MoE, Qwen3-MoE, OLMoE and DeepSeek-V3, mixtures of transformers 5 with all experts in two weights "
            "without biases, and LLM Foundry's torch_dmoe, with the forward of their library; leave the key out"
        )
    return tuple(found.values())


def _layer_problems(module: nn.Module, layer: SplitExperts, settings: Mapping[str, Any]) -> Iterator[str]:
    if layer.num_experts % layer.degree:
        yield (
            f"{layer.module} has {layer.num_experts} experts, which {_KEY} {layer.degree} does not divide; use "
            f"{divisors_text(layer.num_experts)}"
        )
    others: list[str] = []
    for name, parameter in module.named_parameters(prefix=layer.module):
        expert = _expert_of(layer, name)
        holds_all = expert == ALL_EXPERTS and not layer.is_split
        is_cut = not parameter.dim() or (holds_all and parameter.shape[0] % layer.num_experts)
        if expert is not None and (is_cut or isinstance(parameter, DTensor) != layer.is_split):
            others.append(name)
    if others:
        yield (
            f"{and_more(others)}: not split by experts like the other weights of {layer.module}, in whose first "
            "dimension they stand one after the other; hold it in another module, or pass the layer unsplit"
        )
    for key in _MESH_KEYS:
        if key in settings and not (layer.is_split and _has_same_experts(settings[key], layer.degree)):
            yield (
                f"{layer.module} has a {key} of its own, {settings[key]}, which is not the rest of a mesh along which "
                "its experts are split; leave it out"
            )


def _has_same_experts(mesh: Any, degree: int) -> bool:
    """Whether the mesh contains the ranks with the same experts, for groups of ``degree`` consecutive ranks."""
    ranks = range(dist.get_rank() % degree, dist.get_world_size(), degree)
    return isinstance(mesh, DeviceMesh) and mesh.mesh.flatten().tolist() == list(ranks)
