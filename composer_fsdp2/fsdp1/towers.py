"""Parts of a model that a batch may not enter: the towers of transformers' models of text and something else.

A unit in such a part is gathered by the ranks that have an image, or a sound, in their batch. The others stand at the
next unit meanwhile: gloo aborts the process, NCCL waits.
"""

from collections.abc import Iterator, Sequence

from torch import nn

from composer_fsdp2.config.text import and_more
from composer_fsdp2.config.wrap import Wrap, WrapKind
from composer_fsdp2.errors import PlanError
from composer_fsdp2.fsdp1.policies import given_by, input_embeddings, output_embeddings
from composer_fsdp2.sharding.modules import is_at_or_under


def notes_of_towers(model: nn.Module, wrap: Wrap, units: Sequence[str]) -> Iterator[str]:
    """What units in such parts may lead to, and what to choose instead.

    Args:
        units: The paths of what the policy chose.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    found = towers(model)
    inside = {tower: [path for path in units if is_at_or_under(path, tower)] for tower in found}
    elsewhere = [modules[path] for path in units if not any(is_at_or_under(path, tower) for tower in found)]
    for tower, paths in inside.items():
        if paths:
            yield (
                f"wrap_policy makes units in {tower} ({type(modules[tower]).__name__}), which a batch without anything "
                f"for it does not enter: {and_more(paths)}. Unless every batch of every rank enters it, ranks wait for "
                "each other without end, or abort; leave it in the unit around it, which is right for any batch: "
                f"{_instead(model, wrap, elsewhere)}"
            )


def towers(model: nn.Module) -> list[str]:
    """The paths of what transformers' models hold beside their text model, with a configuration of its own.

    A model whose main input is text takes its other inputs where there are any; one that embeds or writes the text is
    not optional.
    """
    return list(dict.fromkeys(path for path, outer in model.named_modules() for path in _towers_of(outer, path)))


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
