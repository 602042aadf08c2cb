"""Apply a ``wrap_policy``: select modules by class, role (embeddings, output head, experts) or size.

Selection by size follows FSDP1's ``size_based_auto_wrap_policy`` (``torch/distributed/fsdp/wrap.py``).
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

from torch import nn

from composer_fsdp2.config.wrap import AUTO_EXPERTS, Wrap, WrapKind
from composer_fsdp2.errors import PlanError
from composer_fsdp2.sharding.classes import classes_named
from composer_fsdp2.sharding.expert_units import experts_by_name

# Attribute names of a language model's input embeddings and output head, in Llama-like models and in TorchTitan.
_EMBEDDINGS, _OUTPUTS = ("embed_tokens", "tok_embeddings"), ("lm_head", "output")


class Policy(Protocol):
    """A ``Wrap``, applied to a model."""

    def below(self, root: nn.Module) -> Mapping[nn.Module, str]:
        """Return the selected modules and the reason for each.

        Includes at least the selected modules below ``root``.
        """

    def unmatched(self, chosen: Collection[nn.Module]) -> Iterator[str]:
        """Yield a line for the report for each setting that selects no module in ``chosen``, the modules that can be
        units.
        """


def read_policy(model: nn.Module, wrap: Wrap, ignored: Iterable[nn.Module] = ()) -> Policy:
    """Return the policy for ``wrap``, whose kind must not be HOOKS. ``model`` is not modified.

    Raises:
        PlanError: no module is of a class in ``wrap``; the message lists the model's classes.
    """
    if wrap.kind is WrapKind.SIZE:
        return _BySize(min_num_params=wrap.min_num_params, ignored=frozenset(ignored))
    reasons: dict[nn.Module, str] = {}
    requested: dict[str, set[nn.Module]] = {}
    for setting, name, modules in (*_requested_embeddings(model, wrap), *_requested_classes(model, wrap)):
        reasons |= dict.fromkeys(modules, f"wrap_policy: {name}")
        requested.setdefault(setting, set()).update(modules)
    return _ByKind(reasons=reasons, requested=requested)


# ---------------------------------------------------------------------------------------------------------------------
# By class and by role


@dataclass(frozen=True, slots=True, kw_only=True)
class _ByKind:
    """A policy by class and role.

    Args:
        reasons: Selected module -> the reason for the plan's report.
        requested: Key of the policy -> the modules that it selects.
    """

    reasons: Mapping[nn.Module, str]
    requested: Mapping[str, Collection[nn.Module]]

    def below(self, root: nn.Module) -> Mapping[nn.Module, str]:
        return self.reasons

    def unmatched(self, chosen: Collection[nn.Module]) -> Iterator[str]:
        for setting, modules in self.requested.items():
            if not modules:
                yield f"wrap_policy.{setting}, and the model has no such module, so it makes no unit"
            elif set(modules).isdisjoint(chosen):
                yield (
                    f"wrap_policy.{setting}, which makes no unit: each such module is ignored, is in a part that "
                    "FSDP1 excludes, or is a direct child of the model, which is a unit anyway, or the model itself"
                )


_Requested = tuple[str, str, list[nn.Module]]  # (setting of the policy, its name in a unit's reason, modules)


def _requested_embeddings(model: nn.Module, wrap: Wrap) -> Iterator[_Requested]:
    if wrap.embeddings:
        yield "wrap_embeddings is true", "wrap_embeddings", list(input_embeddings(model))
    if wrap.output:
        yield "wrap_lm_output is true", "wrap_lm_output", list(output_embeddings(model))


def _requested_classes(model: nn.Module, wrap: Wrap) -> Iterator[_Requested]:
    if wrap.experts == AUTO_EXPERTS:
        yield "moe_experts is auto", "moe_experts", list(experts_by_name(model))
    requested = {
        "transformer_layer_cls_to_wrap": (wrap.kind is WrapKind.CLASSES, wrap.classes),
        "moe_experts": (wrap.experts not in ((), AUTO_EXPERTS), wrap.experts),
    }
    for key, (is_given, names) in requested.items():
        for cls in classes_named(model, names, key=f"fsdp_config.wrap_policy.{key}") if is_given else ():
            found = [module for module in model.modules() if isinstance(module, cls)]
            yield f"{key} names {cls.__name__}", cls.__name__, found


def input_embeddings(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the input embeddings of the models in ``model``, from their getter, else found by the usual attribute
    names.
    """
    yield from _embeddings_of(model, "get_input_embeddings", _EMBEDDINGS)


def output_embeddings(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the output heads of the models in ``model``, from their getter, else found by the usual attribute names."""
    yield from _embeddings_of(model, "get_output_embeddings", _OUTPUTS)


def _embeddings_of(module: nn.Module, getter: str, names: tuple[str, ...]) -> Iterator[nn.Module]:
    """Yield the embeddings of the outermost models. Nested models, such as a vision tower, are not searched."""
    found = call_getter(module, getter) or next(
        (end for name in names if isinstance(end := getattr(module, name, None), nn.Module) and _is_model(module)), None
    )
    if found is not None:
        yield found
        return
    for child in module.children():
        yield from _embeddings_of(child, getter, names)


def _is_model(module: nn.Module) -> bool:
    """Whether the module is a model: it has embeddings or ``lm_head``.

    ``output`` is not enough, because blocks may have it.
    """
    return any(hasattr(module, name) for name in (*_EMBEDDINGS, "lm_head"))


def call_getter(module: nn.Module, getter: str) -> nn.Module | None:
    """Call a model's getter, such as transformers' ``get_input_embeddings``; None if the model does not have the
    method.

    Raises:
        PlanError: the getter raised; names it.
    """
    give: Callable[[], object] | None = getattr(module, getter, None)
    if not callable(give):
        return None
    try:
        end = give()
    except NotImplementedError:  # transformers raises it if the model has none
        return None
    except Exception as error:
        raise PlanError(f"{getter} of {type(module).__name__} raised {type(error).__name__}: {error}") from error
    return end if isinstance(end, nn.Module) else None


# ---------------------------------------------------------------------------------------------------------------------
# By size

_NOT_SEARCHED, _NEVER_UNITS = (nn.MultiheadAttention,), (nn.ModuleList, nn.ModuleDict)


@dataclass(frozen=True, slots=True, kw_only=True)
class _BySize:
    min_num_params: int
    ignored: frozenset[nn.Module]

    def below(self, root: nn.Module) -> Mapping[nn.Module, str]:
        reason = f"wrap_policy: {self.min_num_params:,} parameters or more"
        return dict.fromkeys(_large_modules(root, self.min_num_params, self.ignored), reason)

    def unmatched(self, chosen: Collection[nn.Module]) -> Iterator[str]:
        if not chosen:
            yield (
                f"wrap_policy.min_num_params is {self.min_num_params:,}, which makes no unit: no module below a direct "
                "child of the model has so many parameters, containers aside; give a smaller number"
            )


def _large_modules(root: nn.Module, min_num_params: int, ignored: frozenset[nn.Module]) -> list[nn.Module]:
    """Return the modules below ``root`` with at least ``min_num_params`` elements, not counting those in returned
    submodules.
    """
    ignored_parameters = {parameter for module in ignored for parameter in module.parameters(recurse=False)}
    chosen: list[nn.Module] = []

    def numel_in_units(module: nn.Module) -> int:
        """Return the number of elements in units at or below ``module``.

        A shared parameter is counted at each place.
        """
        numel = sum(parameter.numel() for parameter in module.parameters() if parameter not in ignored_parameters)
        if numel < min_num_params or isinstance(module, _NOT_SEARCHED):
            return 0
        in_units = sum(numel_in_units(child) for child in module.children() if child not in ignored)
        if module is root or isinstance(module, _NEVER_UNITS) or numel - in_units < min_num_params:
            return in_units
        chosen.append(module)
        return numel

    numel_in_units(root)
    return chosen
