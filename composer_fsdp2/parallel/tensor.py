"""Tensor and sequence parallelism: a layer plan in torch's words, planned on a model that nothing has touched yet.

What torch leaves to its user is decided and checked here: a path that matches nothing is an error and no warning; a
weight that is tied stays tied, and both of its sides are split alike; a dimension that the ranks cannot divide evenly
is refused, with the module that has it.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatch

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor import parallel as _styles
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, SequenceParallel
from torch.distributed.tensor.placement_types import Placement

from composer_fsdp2._torch.private_names import own_parameters, parent_mesh
from composer_fsdp2.config.mesh import EXPERT_AXIS
from composer_fsdp2.config.text import did_you_mean
from composer_fsdp2.config.value import json_text
from composer_fsdp2.errors import PlanError
from composer_fsdp2.sharding.agree import agree
from composer_fsdp2.sharding.decide import refuse_sharded
from composer_fsdp2.sharding.modules import first_paths
from composer_fsdp2.sharding.optimizer import Optimizers, check_optimizers, rebinding, the_optimizer
from composer_fsdp2.sharding.parallelize import parallelize, tie_again
from composer_fsdp2.sharding.plan import SplitModule
from composer_fsdp2.sharding.ties import ParameterUse, join, parameter_uses, tie_groups

# Of a module's own parameters by name.
_Placements = dict[str, Placement]

_OF_WEIGHTS: dict[type[ParallelStyle], dict[type[nn.Module], _Placements]] = {
    ColwiseParallel: {
        nn.Linear: {"weight": Shard(0), "bias": Shard(0)},
        nn.Embedding: {"weight": Shard(1)},
    },
    RowwiseParallel: {
        nn.Linear: {"weight": Shard(1), "bias": Replicate()},
        nn.Embedding: {"weight": Shard(0)},
    },
}
# Styles that lay out what goes into a module or comes out of it. Later versions have one for both.
_OF_ACTIVATIONS = tuple(
    getattr(_styles, name)
    for name in ("PrepareModuleInput", "PrepareModuleOutput", "PrepareModuleInputOutput")
    if hasattr(_styles, name)
)
_NEVER_CALLED = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorPlan:
    """How a model is split along a tensor axis.

    Args:
        modules: Those with a style, in the order of the model's modules.
        placements: Along the axis, of the parameters that are laid out along it; the others are the same on each rank.
    """

    modules: tuple[SplitModule, ...] = ()
    placements: Mapping[nn.Parameter, Placement] = field(default_factory=dict)


def plan_parallelize(model: nn.Module, layer_plan: Mapping[str, ParallelStyle], degree: int) -> TensorPlan:
    """Decide what each style of a layer plan does to ``model``, without touching it.

    Args:
        model: Not split or sharded yet; parameters may be on the meta device.
        layer_plan: By the path of a module in the model, its style. A ``*`` stands for any child's name, as in
            torch's ``parallelize_module``.
        degree: Over how many ranks.
    Raises:
        PlanError: names every path that matches nothing, with the nearest one; styles that do not fit their module;
            dimensions that ``degree`` does not divide; and ties of which one side alone is split, or both differently.

    Every rank must call this with the same arguments; it does not communicate.
    """
    problems: list[str] = []
    modules, uses = dict(model.named_modules(remove_duplicate=False)), parameter_uses(model)
    styles = _styles_by_path(modules, layer_plan, problems)
    placements = _placements(modules, uses, styles, problems)
    problems.extend(_problems_of_shapes(uses, placements, degree))
    problems.extend(_problems_of_heads(modules, styles, degree))
    if problems:
        raise PlanError("the layer plan of tensor parallelism does not fit the model:\n" + "\n".join(problems))
    split = tuple(SplitModule(path=path, style=_text_of(style), parallelize=style) for path, style in styles.items())
    return TensorPlan(modules=split, placements=placements)


def read_parallelized(model: nn.Module) -> tuple[TensorPlan, DeviceMesh | None]:
    """What a script has split already with ``parallelize_module``, and along which mesh; None if nothing.

    Raises:
        PlanError: parameters are DTensors of another kind than tensor parallelism makes, or of several meshes.
    """
    if not any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        return TensorPlan(), None
    uses = {use: use.parameter for use in parameter_uses(model) if isinstance(use.parameter, DTensor)}
    uses = {use: parameter for use, parameter in uses.items() if not is_of_experts(parameter)}
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
    paths = {path: None for use in uses for path, _ in use.owners}
    modules = tuple(SplitModule(path=path, style="parallelize_module, by the script") for path in paths)
    return TensorPlan(modules=modules, placements={p: p.placements[0] for p in uses.values()}), meshes[0]


def is_of_experts(parameter: DTensor) -> bool:
    """Whether a script has split it along an axis of experts, which it calls as LLM Foundry does."""
    return parameter.device_mesh.mesh_dim_names == (EXPERT_AXIS,)


def parallelize_model(
    model: nn.Module, optimizers: Optimizers, layer_plan: Mapping[str, ParallelStyle], mesh: DeviceMesh
) -> None:
    """Split a model in place as a layer plan says, without sharding it; ``prepare_fully_shard`` takes it as it is then.

    What ``torch.distributed.tensor.parallel.parallelize_module`` does, with ties kept, unknown paths refused, and an
    optimizer that follows with its groups and state.

    Args:
        mesh: The slice of a mesh of all ranks along which to split.
    Raises:
        PlanError: as ``plan_parallelize``; nothing has been changed then.

    Called on all ranks.
    """

    def decide() -> TensorPlan:
        refuse_sharded(model)
        check_optimizers(model, optimizers)
        return plan_parallelize(model, layer_plan, mesh.size())

    plan = agree(decide, lambda decided: json_text(decided.modules))
    optimizer = the_optimizer(optimizers)
    follow = None if optimizer is None else rebinding(model, optimizer)
    modules, ties = dict(model.named_modules(remove_duplicate=False)), tie_groups(model)
    for each in plan.modules:
        assert each.parallelize is not None, "plan_parallelize keeps the style"
        parallelize(modules[each.path], each.parallelize, mesh)
    for names in ties:
        tie_again(modules, names)
    if follow is not None:
        follow()


def parallelized_along(model: nn.Module, world_size: int) -> DeviceMesh | None:
    """The axis along which a script has split the model, if it has: the last of a mesh that leaves ``fully_shard`` one
    axis, or two.

    Raises:
        PlanError: it is another one; says which mesh to make.
    """
    mesh = read_parallelized(model)[1]
    if mesh is None:
        return None
    parent = parent_mesh(mesh)
    names, own = parent.mesh_dim_names or ("",), mesh.mesh_dim_names or ("",)
    holds_all = parent.mesh.flatten().tolist() == list(range(world_size))
    if parent.ndim not in (2, 3) or not holds_all or names[-1] != own[0]:
        raise PlanError(
            f"the model is split along {mesh}, of {parent}; make one mesh of all ranks with named axes, the tensor "
            'axis last, as init_device_mesh("cuda", (shard, tensor), mesh_dim_names=("shard", "tensor")), and give '
            'parallelize_module its slice mesh["tensor"]'
        )
    return mesh


def _styles_by_path(
    known: Mapping[str, nn.Module], layer_plan: Mapping[str, ParallelStyle], problems: list[str]
) -> dict[str, ParallelStyle]:
    """Each module that the plan names, by its first path, in the model's order."""
    first_path = first_paths(known)
    chosen: dict[str, tuple[str, ParallelStyle]] = {}
    for pattern, style in layer_plan.items():
        matches = list(dict.fromkeys(first_path[module] for module in _matching(known[""], pattern)))
        if not matches:
            problems.append(f"no module {pattern!r}{_nearest(pattern, known)}")
        for path in matches:
            other = chosen.setdefault(path, (pattern, style))
            if other[0] != pattern:
                problems.append(f"two styles for {path!r}, of {other[0]!r} and {pattern!r}; keep one")
    return {path: chosen[path][1] for path in known if path in chosen}


def _nearest(pattern: str, known: Collection[str]) -> str:
    """As the end of a message: often a path was written as of the model's child."""
    inside = next((path for path in known if fnmatch(path, f"*.{pattern}")), None)
    if inside is not None:
        return f"; did you mean {inside}?"
    first = next((path for path in known if path), "")
    return did_you_mean(pattern, known, f"paths begin at the model that is trained, such as {first!r}")


def _matching(model: nn.Module, pattern: str) -> list[nn.Module]:
    found = [model]
    for part in pattern.split(".") if pattern else ():
        found = [child for module in found for name, child in module.named_children() if fnmatch(name, part)]
    return found


def _placements(
    modules: Mapping[str, nn.Module],
    uses: Iterable[ParameterUse],
    styles: Mapping[str, ParallelStyle],
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
        sides = {join(path, name): of_modules.get(modules[path], {}).get(name) for path, name in use.owners}
        distinct = list(dict.fromkeys(sides.values()))
        if len(distinct) > 1:
            problems.append(_problem_of_tie(sides))
        elif distinct[0] is not None:
            found[use.parameter] = distinct[0]
    return found


def _placements_of(module: nn.Module, style: ParallelStyle) -> _Placements:
    """What a style makes of a module's own parameters.

    Raises:
        PlanError: it does not fit; the message says what does.
    """
    own = [name for name, _ in own_parameters(module)]
    for kind, by_class in _OF_WEIGHTS.items():
        if isinstance(style, kind):
            fitting = next((each for of_class, each in by_class.items() if isinstance(module, of_class)), None)
            if fitting is None:
                raise PlanError("it splits nn.Linear and nn.Embedding; give the paths of such modules")
            # A parametrization keeps its own in modules inside of this one.
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
    if isinstance(style, _OF_ACTIVATIONS):
        if isinstance(module, _NEVER_CALLED):
            raise PlanError("a list of modules is never called; give the paths of the modules in it")
        return {}
    known = [kind.__name__ for kind in (*_OF_WEIGHTS, SequenceParallel, *_OF_ACTIVATIONS)]
    raise PlanError(
        f"known are {', '.join(known)}. Split what another style is for with parallelize_module, along a slice of the "
        "mesh of all axes, and pass the model then"
    )


def _problem_of_tie(sides: Mapping[str, Placement | None]) -> str:
    told = {name: "unsplit" if placement is None else repr(placement) for name, placement in sides.items()}
    return (
        f"one parameter, tied, would be split in several ways: {', '.join(map(' '.join, told.items()))}. Plan all of "
        "its modules, or none; an embedding RowwiseParallel and a head ColwiseParallel are both Shard(dim=0)"
    )


def _problems_of_shapes(
    uses: Iterable[ParameterUse], placements: Mapping[nn.Parameter, Placement], degree: int
) -> Iterator[str]:
    for use in uses:
        placement = placements.get(use.parameter)
        if isinstance(placement, Shard) and (size := use.parameter.shape[placement.dim]) % degree:
            yield (
                f"{use.name} has {size} in dimension {placement.dim}, which tensor_parallel_degree {degree} does not "
                "divide; use a degree that does, or leave the module out of the plan"
            )


def _problems_of_heads(
    modules: Mapping[str, nn.Module], styles: Mapping[str, ParallelStyle], degree: int
) -> Iterator[str]:
    """An attention whose projections are split computes with whole heads on each rank."""
    for path, style in styles.items():
        module, above = modules[path], modules[path.rpartition(".")[0]]
        head_dim = getattr(above, "head_dim", None)
        if isinstance(style, ColwiseParallel) and isinstance(module, nn.Linear) and isinstance(head_dim, int):
            heads, rest = divmod(module.out_features, head_dim)
            if not rest and heads % degree:
                yield (
                    f"{path} has {heads} heads of {head_dim}, which tensor_parallel_degree {degree} does not divide; "
                    "use a degree that does, or leave the attention's projections out of the plan"
                )


def _text_of(style: ParallelStyle) -> str:
    """A style in torch's words, alike on all ranks."""
    settings = {name: repr(value) for name, value in sorted(vars(style).items()) if name != "src_data_rank"}
    told = ", ".join(f"{name}={text}" for name, text in settings.items() if " at 0x" not in text)
    return f"{type(style).__name__}({told})"
