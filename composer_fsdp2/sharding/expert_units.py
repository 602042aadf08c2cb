"""Detect experts of MoE layers that would be FSDP units of their own, and reject them or warn.

[Note: experts] A rank skips an expert if no token is routed to it, unless the model runs every expert on every rank. If
the expert is an FSDP unit, only some ranks call its all-gather. The other ranks are in the all-gather of another expert
of equal size, and the two are matched: gradients are wrong, and no error is raised. An expert that belongs to the unit
of its layer is all-gathered by all ranks. ``idle_experts`` also avoids the mismatch: every rank runs every expert
([Note: idle experts] in ``parallel/idle_experts.py``).
"""

import re
from collections.abc import Iterable, Iterator, Mapping

from torch import nn

from composer_fsdp2.config.parallel import ExpertBlock
from composer_fsdp2.config.text import and_more
from composer_fsdp2.config.wrap import Wrap
from composer_fsdp2.errors import UnsupportedError
from composer_fsdp2.sharding.modules import ancestors_or_self, has_forward

_RUNS_EVERY_EXPERT = "runs_every_expert"
# Containers whose parent calls their children one by one.
_LISTS = (nn.ModuleList, nn.ModuleDict)
_NUMBERED = re.compile(r".*experts?_?\d+")  # expert_0 in Switch Transformers
_WRONG = "gather another one instead and train on wrong gradients, without an error"


def refuse_experts(modules: Mapping[str, nn.Module], wrap: Wrap, units: Iterable[str]) -> None:
    """Raise if a unit is an expert ([Note: experts]), unless a parent module sets ``runs_every_expert``.

    Args:
        modules: All modules of the model; a shared module is listed under each of its paths.
        units: Paths of the units chosen by the policy.
    Raises:
        UnsupportedError: names the first such units, and alternatives.
    """
    skipped = [path for path in units if _is_expert(path, modules, wrap) and not _all_run(path, modules)]
    if skipped:
        kind = type(modules[skipped[0]]).__name__
        raise UnsupportedError(
            f"wrap_policy makes experts separate units: {and_more(skipped)} ({kind}); a rank without tokens for an "
            f"expert would {_WRONG}. Set idle_experts: in_order, with which every rank runs each expert, on "
            "no rows where it has no token; or leave them in the unit of their layer, which is exact too: no "
            "moe_experts, the layers' classes, or a larger min_num_params. Where the model runs every expert on every "
            f"rank, set {_RUNS_EVERY_EXPERT} = True on the module that contains them",
            keys=("wrap_policy",),
        )


def notes_on_siblings(modules: Mapping[str, nn.Module], units: Iterable[str]) -> Iterator[str]:
    """Yield a warning about units that may be experts by another name: modules of one class in a list inside a
    layer."""
    found = [path for path in units if _is_one_of_several(path, modules) and not _all_run(path, modules)]
    if found:
        yield (
            f"wrap_policy makes units of {and_more(found)} ({type(modules[found[0]]).__name__}), one of several of a "
            "class in a list inside a layer: a rank that passes over one, as over an expert without tokens, would "
            f"{_WRONG}. Unless every rank runs all of them, set idle_experts: in_order, or choose the layers' classes, "
            f"or a larger min_num_params; if it does, {_RUNS_EVERY_EXPERT} = True on the module that contains them "
            "silences this note"
        )


def notes_of_hooks(modules: Mapping[str, nn.Module], units: Iterable[str]) -> Iterator[str]:
    """Yield a warning about experts that the model's hooks make units.

    It is not an error: the model may run all of them.
    """
    found = [path for path in units if _is_expert(path, modules, Wrap()) and not _all_run(path, modules)]
    if found:
        yield (
            f"the model's hooks make experts separate units: {and_more(found)} "
            f"({type(modules[found[0]]).__name__}); a rank that passes over an expert without tokens would {_WRONG}. "
            "Unless every rank runs all of them, set idle_experts: in_order; if it does, "
            f"{_RUNS_EVERY_EXPERT} = True on the module that contains them silences this note"
        )


def experts_by_name(model: nn.Module) -> Iterator[nn.Module]:
    """The modules whose name, or whose list's name, contains "expert"."""
    modules = dict(model.named_modules(remove_duplicate=False))
    yield from (module for path, module in modules.items() if path and _has_expert_name(path, modules))


def expert_blocks(modules: Mapping[str, nn.Module], wrap: Wrap, units: Iterable[str]) -> tuple[ExpertBlock, ...]:
    """Return the modules that call experts, for experts that are units or contain units.

    Args:
        modules: All modules of the model; a shared module is listed under each of its paths.
        units: Paths of all units, chosen by hooks or by a policy.
    """
    found = {expert for path in units for expert in _enclosing_experts(path, modules, wrap)}
    blocks: dict[str, list[str]] = {}
    for path in modules:
        if path in found:
            blocks.setdefault(_caller(path, modules), []).append(path)
    return tuple(ExpertBlock(block=block, experts=tuple(experts)) for block, experts in blocks.items())


def _enclosing_experts(path: str, modules: Mapping[str, nn.Module], wrap: Wrap) -> Iterator[str]:
    """Yield the expert that contains a unit or is the unit; for nested experts, also the inner ones."""
    above = [each for each in ancestors_or_self(path)[-2::-1] if not _all_run(each, modules)]
    experts = [each for each in above if _is_named_expert(each, modules, wrap)]
    yield from experts[:1] or [each for each in above if _is_sibling(each, modules)][:1]
    yield from (each for each in experts[1:] if _has_expert_name(each, modules))


def _caller(expert: str, modules: Mapping[str, nn.Module]) -> str:
    """Return the path of the module that calls an expert: its nearest parent with a ``forward``, except
    ``nn.Sequential``.
    """
    above = ancestors_or_self(expert)[1:]
    callers = (each for each in above if has_forward(modules[each]) and not isinstance(modules[each], nn.Sequential))
    return next(callers, "")


def _is_expert(path: str, modules: Mapping[str, nn.Module], wrap: Wrap) -> bool:
    """Whether a module is an expert or inside one, judged by its class, its name or the name of its list."""
    return any(_is_named_expert(each, modules, wrap) for each in ancestors_or_self(path)[:-1])


def _is_named_expert(path: str, modules: Mapping[str, nn.Module], wrap: Wrap) -> bool:
    is_shared = "shared" in path.rpartition(".")[2].casefold()  # runs on every rank, before or after the routed experts
    return (type(modules[path]).__name__ in wrap.experts and not is_shared) or _has_expert_name(path, modules)


def _has_expert_name(path: str, modules: Mapping[str, nn.Module]) -> bool:
    """Whether a path is that of an expert: ``expert_0`` anywhere, or a member of ``experts`` or of a list inside it.

    Shared experts do not match, because all ranks run them. A module with the weights of all experts does not match
    either.
    """
    *_, list_name, holder, name = ("", "", *path.casefold().split("."))
    if _NUMBERED.fullmatch(name):
        return "shared" not in name
    is_member = name.isdecimal() or _is_in_list(path, modules)  # also in nn.Sequential
    return is_member and any("expert" in each and "shared" not in each for each in (holder, _plural(list_name)))


def _plural(name: str) -> str:
    """Return the name if it ends with ``experts``, else "": ``expert_model.layers`` contains layers, not experts."""
    return name if name.endswith("experts") else ""


def _is_in_list(path: str, modules: Mapping[str, nn.Module]) -> bool:
    holder = modules[path.rpartition(".")[0]]
    return isinstance(holder, _LISTS) and not (isinstance(holder, nn.ModuleDict) and has_forward(holder))


def _is_one_of_several(path: str, modules: Mapping[str, nn.Module]) -> bool:
    """Whether the module, or a parent, is in a list inside a layer and has siblings of its class there.

    The list of the model's layers is ignored, because every layer runs.
    """
    return any(_is_sibling(each, modules) for each in ancestors_or_self(path)[:-1])


def _is_sibling(path: str, modules: Mapping[str, nn.Module]) -> bool:
    is_one_of_several = _is_in_list(path, modules) and _has_siblings(path, modules)
    return is_one_of_several and any(_is_layer(outer, modules) for outer in ancestors_or_self(path)[1:-1])


def _is_layer(path: str, modules: Mapping[str, nn.Module]) -> bool:
    """Whether a module is one of several in a list.

    In an ``nn.ModuleDict``, its name must also end with a digit, because the dict may contain the parts of a whole
    model.
    """
    holder, name = modules[path.rpartition(".")[0]], path.rpartition(".")[2]
    if isinstance(holder, nn.ModuleDict):
        return _is_in_list(path, modules) and name[-1:].isdecimal() and _has_siblings(path, modules)
    return isinstance(holder, nn.ModuleList) or (isinstance(holder, nn.Sequential) and _has_siblings(path, modules))


def _has_siblings(path: str, modules: Mapping[str, nn.Module]) -> bool:
    members = modules[path.rpartition(".")[0]].children()
    return sum(type(member) is type(modules[path]) for member in members) > 1


def _all_run(path: str, modules: Mapping[str, nn.Module]) -> bool:
    above = ancestors_or_self(path)[1:]
    return any(getattr(modules[each], _RUNS_EVERY_EXPERT, False) is True for each in above)
