"""Parts of a model that a batch may not enter: the towers of transformers' models of text and something else.

A unit in such a part is gathered by the ranks that have an image, or a sound, in their batch. The others stand at the
next unit meanwhile: gloo aborts the process, NCCL waits. With ``idle_towers`` they run the part on an example
(``parallel/idle_towers.py``).
"""

from collections.abc import Iterator, Mapping, Sequence

from torch import nn

from composer_fsdp2.config.parallel import TowerModel
from composer_fsdp2.config.text import and_more, did_you_mean
from composer_fsdp2.config.wrap import Wrap, WrapKind
from composer_fsdp2.errors import PlanError
from composer_fsdp2.fsdp1.policies import given_by, input_embeddings, output_embeddings
from composer_fsdp2.sharding.modules import ancestors_or_self, first_paths, has_forward, is_at_or_under
from composer_fsdp2.sharding.ties import join


def notes_of_towers(modules: Mapping[str, nn.Module], wrap: Wrap, units: Sequence[str]) -> Iterator[str]:
    """What units in such parts may lead to, and what to choose instead.

    Args:
        modules: Those of the model, by every path.
        units: The paths of what the policy chose.
    """
    found = towers(modules)
    inside = {tower: [path for path in units if is_at_or_under(path, tower)] for tower in found}
    elsewhere = [modules[path] for path in units if not any(is_at_or_under(path, tower) for tower in found)]
    for tower, paths in inside.items():
        if paths:
            yield (
                f"wrap_policy makes units in {tower} ({type(modules[tower]).__name__}), which a batch without anything "
                f"for it does not enter: {and_more(paths)}. Unless every batch of every rank enters it, ranks wait for "
                "each other without end, or abort; set idle_towers: auto, with which a rank without anything for it "
                "runs it on an example; or leave it in the unit around it, which is right for any batch, too: "
                f"{_instead(modules[''], wrap, elsewhere)}"
            )


def tower_models(
    modules: Mapping[str, nn.Module], units: Sequence[str], given: Sequence[str]
) -> tuple[TowerModel, ...]:
    """The modules around towers in which units lie, and what else in there is gathered beside them.

    Args:
        modules: Those of the model, by every path.
        units: The paths of all that will be units, by whomever they are chosen.
        given: The paths of towers; empty for what transformers' models have beside their text model, and for what lies
            between the two (projectors), which such a batch passes over as well.
    Raises:
        PlanError: one of those given is no part of the model, cannot be called, or lies in another.
    """
    _refuse_towers(modules, given)
    found = [path for path in given or towers(modules) if _has_unit(path, units)]
    callers = dict.fromkeys(_caller(path, modules) for path in found)
    return tuple(_tower_model(caller, modules, units, found, with_siblings=not given) for caller in callers)


def _tower_model(
    caller: str, modules: Mapping[str, nn.Module], units: Sequence[str], found: Sequence[str], *, with_siblings: bool
) -> TowerModel:
    outer = modules[caller]
    parts = [path for path in _called_parts(caller, outer) if _has_unit(path, units)]
    ends = [*input_embeddings(outer), *output_embeddings(outer)]
    beside = [path for path in parts if with_siblings and not any(end in ends for end in modules[path].modules())]
    own = [path for path in parts if path in found or path in beside]
    # Called directly by a model that holds them deeper down.
    embeddings = [path for path in units if modules[path] in ends and is_at_or_under(path, caller)]
    others = dict.fromkeys(path for path in (*parts, *embeddings) if path not in own)
    return TowerModel(model=caller, towers=tuple(own), sync_points=tuple(others))


def _called_parts(path: str, module: nn.Module) -> Iterator[str]:
    """What a module calls: its children, or of one that cannot be called, such as a list, what that holds."""
    for name, child in module.named_children():
        inner = join(path, name)
        if has_forward(child):
            yield inner
        else:
            yield from _called_parts(inner, child)


def _caller(path: str, modules: Mapping[str, nn.Module]) -> str:
    return next((each for each in ancestors_or_self(path)[1:] if has_forward(modules[each])), "")


def _has_unit(path: str, units: Sequence[str]) -> bool:
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


def towers(modules: Mapping[str, nn.Module]) -> list[str]:
    """The paths of what transformers' models hold beside their text model, with a configuration of its own.

    A model whose main input is text takes its other inputs where there are any; one that embeds or writes the text is
    not optional.
    """
    outer_ones = first_paths(modules).items()
    return list(dict.fromkeys(path for outer, path in outer_ones for path in _towers_of(outer, path)))


def _towers_of(model: nn.Module, path: str) -> Iterator[str]:
    types = _types_of_parts(model)
    ends = _ends_of(model) if types else set()
    parts: list[str] = []
    for inner_path, inner in model.named_modules(prefix=path) if ends else ():
        is_part = type(getattr(inner, "config", None)) in types
        if is_part and not any(is_at_or_under(inner_path, other) for other in parts):
            parts.append(inner_path)
            if ends.isdisjoint(inner.modules()):
                yield inner_path


def _types_of_parts(module: nn.Module) -> set[type]:
    """The classes of the configurations that a model's own one is made of."""
    config = getattr(module, "config", None)
    if getattr(module, "main_input_name", None) != "input_ids":
        return set()
    parts = [getattr(config, name, None) for name in getattr(config, "sub_configs", None) or ()]
    return {type(part) for part in parts if hasattr(part, "sub_configs")} - {type(config)}


def _ends_of(model: nn.Module) -> set[nn.Module]:
    """Its input embeddings and its head; empty where it has none to give, as one that compares texts with images."""
    try:
        ends = [given_by(model, getter) for getter in ("get_input_embeddings", "get_output_embeddings")]
    except PlanError:  # nobody asked for them
        return set()
    return {end for end in ends if end is not None} if ends[0] is not None else set()


def _instead(model: nn.Module, wrap: Wrap, elsewhere: Sequence[nn.Module]) -> str:
    ends = {*input_embeddings(model), *output_embeddings(model)}
    names = dict.fromkeys(type(module).__name__ for module in elsewhere if module not in ends)
    if wrap.kind is WrapKind.CLASSES and names:
        return f"transformer_layer_cls_to_wrap: [{', '.join(names)}]"
    return "the classes of the other layers in transformer_layer_cls_to_wrap"
