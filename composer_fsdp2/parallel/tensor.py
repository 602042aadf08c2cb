"""Tensor and sequence parallelism: a layer plan of torch's styles, checked on a model before it is modified.

These checks are missing in torch. A path that matches no module is an error, not a warning. A tied weight stays
tied, and all of its modules must shard it alike. A dimension that the ranks cannot divide evenly is an error that
names the module.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatch
from typing import Literal, TypeAlias

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor import parallel as _styles
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, SequenceParallel
from torch.distributed.tensor.placement_types import Placement

from composer_fsdp2._torch.capabilities import needs_even_shards
from composer_fsdp2._torch.private_names import own_parameters, parent_mesh
from composer_fsdp2.config.mesh import EXPERT_AXIS
from composer_fsdp2.config.text import did_you_mean
from composer_fsdp2.config.value import json_text
from composer_fsdp2.errors import PlanError
from composer_fsdp2.parallel.layer_plans import automatic_plan, matching_paths, projection_problems
from composer_fsdp2.parallel.padded_styles import AddedPositions, padded
from composer_fsdp2.sharding.agree import agree
from composer_fsdp2.sharding.decide import refuse_sharded
from composer_fsdp2.sharding.modules import first_paths
from composer_fsdp2.sharding.optimizer import Optimizers, check_optimizers, rebinding, the_optimizer
from composer_fsdp2.sharding.parallelize import parallelize, retie_parameters
from composer_fsdp2.sharding.plan import SplitModule
from composer_fsdp2.sharding.ties import ParameterUse, join, parameter_uses, tie_groups

# The style of each module by its path, or AUTO.
LayerPlan: TypeAlias = Mapping[str, ParallelStyle] | Literal["auto"]

# Placements by the names of a module's own parameters.
_Placements = dict[str, Placement]

_WEIGHT_PLACEMENTS: dict[type[ParallelStyle], dict[type[nn.Module], _Placements]] = {
    ColwiseParallel: {
        nn.Linear: {"weight": Shard(0), "bias": Shard(0)},
        nn.Embedding: {"weight": Shard(1)},
    },
    RowwiseParallel: {
        nn.Linear: {"weight": Shard(1), "bias": Replicate()},
        nn.Embedding: {"weight": Shard(0)},
    },
}
# Styles that redistribute the inputs or outputs of a module. Later versions have one for both.
_ACTIVATION_STYLES = tuple(
    getattr(_styles, name)
    for name in ("PrepareModuleInput", "PrepareModuleOutput", "PrepareModuleInputOutput")
    if hasattr(_styles, name)
)
_NEVER_CALLED = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorPlan:
    """The tensor-parallel modules of a model.

    Args:
        modules: The modules with a style, in the order of the model's modules.
        placements: The placements along the axis of parameters with a style. Other parameters are replicated.
    """

    modules: tuple[SplitModule, ...] = ()
    placements: Mapping[nn.Parameter, Placement] = field(default_factory=dict)


def plan_parallelize(
    model: nn.Module,
    layer_plan: LayerPlan,
    degree: int,
    num_shards: int = 1,
    *,
    excluded_paths: Collection[str] = (),
) -> TensorPlan:
    """Decide what each style of a layer plan does to ``model``, without modifying it.

    Args:
        model: Not yet parallelized or sharded; parameters may be on the meta device.
        layer_plan: The style of each module by its path in the model. A ``*`` stands for the name of any child, as in
            torch's ``parallelize_module``. "auto" means the plan of a known model.
        degree: The tensor-parallel degree.
        num_shards: The number of ranks over which the model will be sharded, if known.
        excluded_paths: Paths that "auto" must leave out, such as expert-parallel modules.
    Raises:
        PlanError: names every path that matches no module, with the most similar one; styles that do not fit their
            module; dimensions that ``degree`` does not divide; and tied weights that are sharded in one module only, or
            differently.

    Call this on all ranks with the same arguments. Does not communicate.
    """
    if isinstance(layer_plan, str):
        automatic = automatic_plan(model, degree, num_shards if needs_even_shards() else 1)
        layer_plan = {path: style for path, style in automatic.items() if path not in excluded_paths}
    problems: list[str] = []
    modules, uses = dict(model.named_modules(remove_duplicate=False)), parameter_uses(model)
    styles = _styles_by_path(modules, layer_plan, problems)
    placements = _placements(modules, uses, styles, degree, problems)
    problems.extend(projection_problems(modules, styles, degree))
    if problems:
        raise PlanError("the layer plan of tensor parallelism does not fit the model:\n" + "\n".join(problems))
    added: AddedPositions = {}
    split = tuple(
        SplitModule(path=path, style=_style_text(style), parallelize=padded(style, added))
        for path, style in styles.items()
    )
    return TensorPlan(modules=split, placements=placements)


def read_parallelized(model: nn.Module) -> tuple[TensorPlan, DeviceMesh | None]:
    """The modules that a script has parallelized with ``parallelize_module``, and their mesh; None if there are none.

    Raises:
        PlanError: parameters are DTensors that tensor parallelism does not make, or of several meshes.
    """
    found = {use: use.parameter for use in parameter_uses(model) if isinstance(use.parameter, DTensor)}
    uses = {use: parameter for use, parameter in found.items() if not is_expert_sharded(parameter)}
    meshes = list(dict.fromkeys(parameter.device_mesh for parameter in uses.values()))
    if not meshes:
        return TensorPlan(), None
    for use, parameter in uses.items():
        if parameter.device_mesh.ndim != 1 or not isinstance(parameter.placements[0], Shard | Replicate):
            raise PlanError(
                f"parameter {use.name} is a DTensor already, {list(parameter.placements)}, which is not what "
                "tensor parallelism over one axis makes; pass the model as it was built, or split along one axis"
            )
    if len(meshes) > 1:
        raise PlanError(
            f"parameters are split along {len(meshes)} different meshes already; give parallelize_module one slice of "
            "one mesh for all of them"
        )
    paths = dict.fromkeys(path for use in uses for path, _ in use.owners)
    modules = tuple(SplitModule(path=path, style="parallelize_module, by the script") for path in paths)
    return TensorPlan(modules=modules, placements={p: p.placements[0] for p in uses.values()}), meshes[0]


def is_expert_sharded(parameter: DTensor) -> bool:
    """Whether a script has sharded the parameter along an expert axis, by LLM Foundry's name of that axis."""
    return parameter.device_mesh.mesh_dim_names == (EXPERT_AXIS,)


def parallelize_model(model: nn.Module, optimizers: Optimizers, layer_plan: LayerPlan, mesh: DeviceMesh) -> None:
    """Parallelize a model in place by a layer plan, without sharding it; ``prepare_fully_shard`` accepts the result.

    Like ``torch.distributed.tensor.parallel.parallelize_module``. In addition tied weights stay tied, unknown paths are
    errors, and the optimizer is rebound with its groups and state.

    Args:
        mesh: The slice of a mesh of all ranks along which to parallelize.
    Raises:
        PlanError: as ``plan_parallelize``; the model is unchanged.

    Called on all ranks.
    """

    def decide() -> TensorPlan:
        refuse_sharded(model)
        check_optimizers(model, optimizers)
        return plan_parallelize(model, layer_plan, mesh.size())

    plan = agree(decide, lambda decided: json_text(decided.modules))
    optimizer = the_optimizer(optimizers)
    rebind = None if optimizer is None else rebinding(model, optimizer)
    modules, ties = dict(model.named_modules(remove_duplicate=False)), tie_groups(model)
    for each in plan.modules:
        assert each.parallelize is not None, "plan_parallelize keeps the style"
        parallelize(modules[each.path], each.parallelize, mesh)
    for names in ties:
        retie_parameters(modules, names)
    if rebind is not None:
        rebind()


def parallelized_along(model: nn.Module, world_size: int) -> DeviceMesh | None:
    """The axis along which a script has parallelized the model, or None.

    It must be the last axis of a mesh with one or two other axes for ``fully_shard``.

    Raises:
        PlanError: it is a different axis; the message describes the required mesh.
    """
    mesh = read_parallelized(model)[1]
    if mesh is not None and (parent_mesh(mesh).ndim not in (2, 3) or not is_last_axis(mesh, world_size)):
        raise PlanError(
            f"the model is split along {mesh}, of {parent_mesh(mesh)}; make one mesh of all ranks with named axes, the "
            'tensor axis last, as init_device_mesh("cuda", (shard, tensor), mesh_dim_names=("shard", "tensor")), and '
            'give parallelize_module its slice mesh["tensor"]'
        )
    return mesh


def is_last_axis(mesh: DeviceMesh, world_size: int) -> bool:
    """Whether the mesh is a slice along the last axis of a mesh of all ranks in order."""
    parent = parent_mesh(mesh)
    names, own = parent.mesh_dim_names or ("",), mesh.mesh_dim_names or ("",)
    return parent.mesh.flatten().tolist() == list(range(world_size)) and names[-1] == own[0]


def _styles_by_path(
    known: Mapping[str, nn.Module], layer_plan: Mapping[str, ParallelStyle], problems: list[str]
) -> dict[str, ParallelStyle]:
    """The style of each module in the plan, by the module's first path, in the order of the model's modules."""
    first_path = first_paths(known)
    chosen: dict[str, tuple[str, ParallelStyle]] = {}
    for pattern, style in layer_plan.items():
        matches = list(dict.fromkeys(first_path[known[path]] for path in matching_paths(known[""], pattern)))
        if not matches:
            problems.append(f"no module {pattern!r}{_nearest(pattern, known)}")
        for path in matches:
            other = chosen.setdefault(path, (pattern, style))
            if other[0] != pattern:
                problems.append(f"two styles for {path!r}, of {other[0]!r} and {pattern!r}; keep one")
    return {path: chosen[path][1] for path in known if path in chosen}


def _nearest(pattern: str, known: Collection[str]) -> str:
    """A suggestion for the end of a message, because a path is often relative to a child of the model."""
    inside = next((path for path in known if fnmatch(path, f"*.{pattern}")), None)
    if inside is not None:
        return f"; did you mean {inside}?"
    first = next((path for path in known if path), "")
    return did_you_mean(pattern, known, f"paths begin at the model that is trained, such as {first!r}")


def _placements(
    modules: Mapping[str, nn.Module],
    uses: Iterable[ParameterUse],
    styles: Mapping[str, ParallelStyle],
    degree: int,
    problems: list[str],
) -> dict[nn.Parameter, Placement]:
    of_modules: dict[nn.Module, _Placements] = {}
    for path, style in styles.items():
        try:
            of_modules[modules[path]] = _placements_of(modules[path], style)
        except PlanError as error:
            problems.append(
                f"{type(style).__name__} on {path or 'the model'!r} ({type(modules[path]).__name__}): {error}"
            )
    found: dict[nn.Parameter, Placement] = {}
    for use in uses:
        placement_of = {join(path, name): of_modules.get(modules[path], {}).get(name) for path, name in use.owners}
        placement, *others = dict.fromkeys(placement_of.values())
        if others:
            texts = [f"{name} {'unsplit' if each is None else repr(each)}" for name, each in placement_of.items()]
            problems.append(
                f"one parameter, tied, would be split in several ways: {', '.join(texts)}. Plan all of its modules, or "
                "none; an embedding RowwiseParallel and a head ColwiseParallel are both Shard(dim=0)"
            )
        elif placement is not None:
            found[use.parameter] = placement
        if not others and isinstance(placement, Shard) and (size := use.parameter.shape[placement.dim]) % degree:
            problems.append(
                f"{use.name} has {size} in dimension {placement.dim}, which tensor_parallel_degree {degree} does not "
                "divide; use a degree that does, or leave the module out of the plan"
            )
    return found


def _placements_of(module: nn.Module, style: ParallelStyle) -> _Placements:
    """The placements that a style gives to a module's own parameters.

    Raises:
        PlanError: the style does not fit; the message names the modules that do.
    """
    own = [name for name, _ in own_parameters(module)]
    for kind, by_class in _WEIGHT_PLACEMENTS.items():
        if isinstance(style, kind):
            fitting = next((each for of_class, each in by_class.items() if isinstance(module, of_class)), None)
            if fitting is None:
                raise PlanError("it splits nn.Linear and nn.Embedding; give the paths of such modules")
            # A parametrization registers its parameters in modules inside of this one.
            if others := [name for name, _ in module.named_parameters() if name not in fitting]:
                raise PlanError(
                    f"beside weight and bias it has {', '.join(others)}, of which the style does not say how it is "
                    "split; leave the module out of the plan"
                )
            return {name: fitting[name] for name in own}
    if isinstance(style, SequenceParallel):
        if next(module.children(), None) is not None:
            raise PlanError("it takes a single layer, such as a norm or a dropout; give the paths of these")
        return dict.fromkeys(own, Replicate())
    if isinstance(style, _ACTIVATION_STYLES):
        if isinstance(module, _NEVER_CALLED):
            raise PlanError("a list of modules is never called; give the paths of the modules in it")
        return {}
    known = [kind.__name__ for kind in (*_WEIGHT_PLACEMENTS, SequenceParallel, *_ACTIVATION_STYLES)]
    raise PlanError(
        f"known are {', '.join(known)}. Split what another style is for with parallelize_module, along a slice of the "
        "mesh of all axes, and pass the model then"
    )


def _style_text(style: ParallelStyle) -> str:
    """A style as its constructor call; the same text on all ranks."""
    settings = {name: repr(value) for name, value in sorted(vars(style).items()) if name != "src_data_rank"}
    arguments = ", ".join(f"{name}={text}" for name, text in settings.items() if " at 0x" not in text)
    return f"{type(style).__name__}({arguments})"
