"""Detect towers: submodules that only some batches use, such as the vision encoder of a multimodal model.

Only ranks whose batch contains an image all-gather the units in a vision encoder. The other ranks all-gather the next
unit, so collectives do not match: gloo aborts the process, NCCL hangs. With ``idle_towers`` the other ranks run the
tower on an example input (``parallel/idle_towers.py``).
"""

from collections.abc import Collection, Iterator, Mapping, Sequence

from torch import nn

from composer_fsdp2._torch.private_names import own_parameters
from composer_fsdp2.config.parallel import TowerModel
from composer_fsdp2.config.text import and_more, did_you_mean
from composer_fsdp2.config.wrap import Wrap, WrapKind
from composer_fsdp2.errors import PlanError
from composer_fsdp2.sharding.modules import ancestors_or_self, first_paths, has_forward, is_at_or_under, is_pretrained
from composer_fsdp2.sharding.policies import call_getter, input_embeddings, output_embeddings
from composer_fsdp2.sharding.ties import join


def notes_on_towers(modules: Mapping[str, nn.Module], wrap: Wrap, units: Sequence[str]) -> Iterator[str]:
    """Yield a warning about units in towers, with alternatives.

    Args:
        modules: All modules of the model; a shared module is listed under each of its paths.
        units: Paths of the units chosen by the policy.
    """
    found = find_towers(modules)
    inside = {tower: [path for path in units if is_at_or_under(path, tower)] for tower in found}
    elsewhere = [modules[path] for path in units if not any(is_at_or_under(path, tower) for tower in found)]
    for tower, paths in inside.items():
        if paths:
            yield (
                f"wrap_policy makes units in {tower} ({type(modules[tower]).__name__}), which a batch without inputs "
                f"for it does not use: {and_more(paths)}. Unless every batch of every rank uses it, ranks hang or "
                "abort; set idle_towers: auto, with which a rank without inputs for it runs it on an example; or "
                "leave it in the unit around it, which is correct for any batch, too: "
                f"{_way_out(modules[''], wrap, elsewhere)}"
            )


def notes_on_trained_towers(
    modules: Mapping[str, nn.Module], units: Collection[str], frozen: Collection[str]
) -> Iterator[str]:
    """Yield a warning about units whose trained parameters are all in towers: without gradients, they are not reduced.

    Args:
        modules: All modules of the model; a shared module is listed under each of its paths.
        units: Paths of all units.
        frozen: Names of parameters that are not trained.
    """
    parts = [
        part
        for caller, found in _group_by_caller(modules, find_towers(modules))
        for part in _optional(caller, modules, found)
    ]
    if alone := _trained_alone(modules, units, parts, frozen):
        yield (
            f"all trained parameters of the unit around {and_more(alone)} are in towers, which a batch without inputs "
            "for them does not use. Unless every batch of every rank uses them, ranks hang or abort; set idle_towers: "
            "auto, or train another parameter of that unit"
        )


def tower_models(
    modules: Mapping[str, nn.Module], units: Collection[str], given: Sequence[str], frozen: Collection[str]
) -> tuple[TowerModel, ...]:
    """Return the modules with towers that only some ranks would all-gather or reduce, and their sync points.

    These towers contain units, or all trained parameters of the enclosing unit, which is not reduced without gradients.

    Args:
        modules: All modules of the model; a shared module is listed under each of its paths.
        units: Paths of all units, chosen by hooks or by a policy.
        given: Paths of towers. Empty selects those of ``find_towers``, and the projectors between them and the text
            model.
        frozen: Names of parameters that are not trained.
    Raises:
        PlanError: a path in ``given`` does not exist, has no ``forward``, or is below another path in ``given``.
    """
    _refuse_towers(modules, given)
    callers = [
        (caller, found if given else _optional(caller, modules, found))
        for caller, found in _group_by_caller(modules, given or find_towers(modules))
    ]
    alone = _trained_alone(modules, units, [part for _, parts in callers for part in parts], frozen)
    models = (
        _tower_model(caller, modules, units, [part for part in parts if part in alone or _has_unit(part, units)])
        for caller, parts in callers
    )
    return tuple(each for each in models if each.towers)


def _group_by_caller(modules: Mapping[str, nn.Module], found: Sequence[str]) -> list[tuple[str, list[str]]]:
    callers: dict[str, list[str]] = {}
    for path in found:
        callers.setdefault(_caller(path, modules), []).append(path)
    return list(callers.items())


def _optional(caller: str, modules: Mapping[str, nn.Module], found: Sequence[str]) -> list[str]:
    """Return the towers in ``found`` and the projectors between them and the text model.

    If ``found`` contains cross-attention layers of the text model, there are no projectors.
    """
    if not {*_layers_for_other_inputs(modules)}.isdisjoint(found):
        return list(found)
    embeddings = _embeddings(modules[caller])
    parts = _called_parts(caller, modules[caller])
    return [path for path in parts if path in found or embeddings.isdisjoint(modules[path].modules())]


def _trained_alone(
    modules: Mapping[str, nn.Module], units: Collection[str], parts: Sequence[str], frozen: Collection[str]
) -> list[str]:
    """The towers that contain all trained parameters of the enclosing unit."""
    trained: dict[str, set[str | None]] = {}  # unit -> towers; None: outside of towers
    for path, module in modules.items():
        if any(p.requires_grad and join(path, name) not in frozen for name, p in own_parameters(module)):
            around = ancestors_or_self(path)
            if unit := next((each for each in around if each in units), ""):
                trained.setdefault(unit, set()).add(next((each for each in around if each in parts), None))
    alone = [(unit, found) for unit, found in trained.items() if None not in found]
    return [part for part in parts if any(part in found and not is_at_or_under(unit, part) for unit, found in alone)]


def _tower_model(
    caller: str, modules: Mapping[str, nn.Module], units: Collection[str], own: Sequence[str]
) -> TowerModel:
    embeddings = _embeddings(modules[caller])
    parts = [path for path in _called_parts(caller, modules[caller]) if _has_unit(path, units)]
    # Called directly by a model that contains them at a deeper level.
    embedding_units = [path for path in units if modules[path] in embeddings and is_at_or_under(path, caller)]
    others = dict.fromkeys(path for path in (*parts, *embedding_units) if path not in own)
    return TowerModel(model=caller, towers=tuple(own), sync_points=tuple(others))


def _embeddings(model: nn.Module) -> set[nn.Module]:
    return {*input_embeddings(model), *output_embeddings(model)}


def _called_parts(path: str, module: nn.Module) -> Iterator[str]:
    """Yield the paths of the submodules that a module calls: children with a ``forward``, and those in containers
    without one.
    """
    for name, child in module.named_children():
        inner = join(path, name)
        if has_forward(child):
            yield inner
        else:
            yield from _called_parts(inner, child)


def _caller(path: str, modules: Mapping[str, nn.Module]) -> str:
    return next((each for each in ancestors_or_self(path)[1:] if has_forward(modules[each])), "")


def _has_unit(path: str, units: Collection[str]) -> bool:
    return any(is_at_or_under(unit, path) for unit in units)


def _refuse_towers(modules: Mapping[str, nn.Module], given: Sequence[str]) -> None:
    for path in given:
        if path not in modules or not path:
            near = did_you_mean(path, (each for each in modules if each), "give the path of a module")
            raise PlanError(f"fsdp_config.idle_towers: {type(modules['']).__name__} has no module {path!r}{near}")
        if not has_forward(modules[path]):
            raise PlanError(
                f"fsdp_config.idle_towers: {path} ({type(modules[path]).__name__}) cannot be called; give the paths of "
                "the modules in it"
            )
        outer = next((each for each in given if each != path and is_at_or_under(path, each)), None)
        if outer is not None:
            raise PlanError(f"fsdp_config.idle_towers: {path} lies in {outer}; give the outer one alone")


def find_towers(modules: Mapping[str, nn.Module]) -> list[str]:
    """Return the paths of towers in transformers models: submodels beside the text model, and the text model's
    cross-attention layers.

    Submodels are detected by their ``config`` attribute. One with the text's embeddings or output head is not a tower,
    because every batch uses it.
    """
    outer_ones = first_paths(modules).items()
    parts = (path for outer, path in outer_ones for path in _towers_of(outer, path))
    return list(dict.fromkeys((*parts, *_layers_for_other_inputs(modules))))


def _layers_for_other_inputs(modules: Mapping[str, nn.Module]) -> Iterator[str]:
    """Mllama's cross-attention layers, which are skipped for text without an image."""
    for path, module in modules.items():
        if isinstance(getattr(module, "layers", None), nn.ModuleList) and is_pretrained(module):
            numbers = getattr(module.config, "cross_attention_layers", None) or ()
            yield from (join(path, f"layers.{number}") for number in numbers)


def _towers_of(model: nn.Module, path: str) -> Iterator[str]:
    types = _types_of_parts(model)
    embeddings = _own_embeddings(model) if types else set()
    parts: list[str] = []
    for inner_path, inner in model.named_modules(prefix=path) if embeddings else ():
        is_part = type(getattr(inner, "config", None)) in types
        if is_part and not any(is_at_or_under(inner_path, other) for other in parts):
            parts.append(inner_path)
            if embeddings.isdisjoint(inner.modules()):
                yield inner_path


def _types_of_parts(module: nn.Module) -> set[type]:
    """The classes of the sub-configurations in a model's configuration."""
    config = getattr(module, "config", None)
    if getattr(module, "main_input_name", None) != "input_ids":
        return set()
    parts = [getattr(config, name, None) for name in getattr(config, "sub_configs", None) or ()]
    return {type(part) for part in parts if hasattr(part, "sub_configs")} - {type(config)}


def _own_embeddings(model: nn.Module) -> set[nn.Module]:
    """Return the input embeddings and the output head of a model.

    Returns an empty set for models without input embeddings, such as models that compare texts with images.
    """
    try:
        embeddings = [call_getter(model, getter) for getter in ("get_input_embeddings", "get_output_embeddings")]
    except PlanError:  # these embeddings were not requested
        return set()
    return {end for end in embeddings if end is not None} if embeddings[0] is not None else set()


def _way_out(model: nn.Module, wrap: Wrap, elsewhere: Sequence[nn.Module]) -> str:
    embeddings = _embeddings(model)
    names = dict.fromkeys(type(module).__name__ for module in elsewhere if module not in embeddings)
    if wrap.kind is WrapKind.CLASSES and names:
        return f"transformer_layer_cls_to_wrap: [{', '.join(names)}]"
    return "the classes of the other layers in transformer_layer_cls_to_wrap"
