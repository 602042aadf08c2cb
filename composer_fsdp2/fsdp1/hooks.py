"""A model's own hooks, called once: which modules are to be units, with which settings, and which are recomputed.

[Note: roots] Composer wrapped every direct child of the model, never the model itself, so that methods of the
ComposerModel may call into its children freely (composer/distributed/dist_strategy.py, 0.32.1). A direct child is
therefore a root of its own; the model becomes the root only when its children share something ([Note: tied parameters]
and [Note: one root] in ``sharding/units.py``).
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from torch import nn

from composer_fsdp2._torch import ActivationWrapper
from composer_fsdp2.config.choices import Choice, ModelChoices, UnitOverrides
from composer_fsdp2.config.mesh import MeshSpec
from composer_fsdp2.config.sharding import (
    GradientDtype,
    MixedPrecision,
    Prefetch,
    ShardingConfig,
    check_reshard_degree,
)
from composer_fsdp2.config.text import did_you_mean
from composer_fsdp2.errors import ConfigError, PlanError, UnknownKeyError, UnsupportedError
from composer_fsdp2.fsdp1.keys import BACKWARD_POST_REASON, KEYS_BY_NAME, UNREAD_DTYPE_REASON
from composer_fsdp2.fsdp1.parsing import (
    UNREAD_DTYPE_KEY,
    BackwardPrefetch,
    GivenPrecision,
    ShardingStrategy,
    check_same_reshard,
    mesh_of,
    mesh_of_groups,
    mixed_precision_of,
)
from composer_fsdp2.sharding.materialize import Initializers
from composer_fsdp2.sharding.modules import ignored_modules, outside_compilation
from composer_fsdp2.sharding.ties import join

CheckFn = Callable[[nn.Module], Any]


def read_hooks(
    model: nn.Module, config: ShardingConfig, *, precision: str | None = None, strict: bool = True
) -> ModelChoices:
    """What ``model``'s hooks and attributes choose; reads them as Composer's FSDP1 did, and changes nothing.

    Args:
        model: Any module tree. The ``fsdp_wrap_fn`` and ``activation_checkpointing_fn`` of its direct children are
            called with the modules below them, in which ``_fsdp_wrap`` and ``_activation_checkpointing`` take
            precedence.
        config: The model's; what a module's own settings do not name stays.
        precision: Composer's, for settings that say DEFAULT or PURE.
        strict: Whether gradients that cannot keep a low dtype, where a setting asks for it, are an error.
    Raises:
        PlanError: a hook raised, or returned something else than a bool or a dict; names the module.
        ConfigError: a dict has an unknown key or a wrong value; names the module and the key.

    Does not communicate.
    """
    children = dict(model.named_children())
    roots = wrapped_children(model)
    excluded = {
        name: "a metric" if _is_metric(child) else "_fsdp_wrap is False on it"
        for name, child in children.items()
        if name not in roots
    }
    searched = [name for name in excluded if config.shard_below_unwrapped and not _is_metric(children[name])]
    ignored = {below for module in ignored_modules(model, config).values() for below in module.modules()}
    read = partial(read_overrides, config=config, precision=precision, strict=strict)
    units = {
        path: choice
        for name in (*roots, *searched)
        for path, module in children[name].named_modules(prefix=name)
        if path != name and module not in ignored and (choice := _choice(path, module, children[name], read))
    }
    checkpointed: list[str] = []
    if config.activation_checkpointing.enabled:
        checkpointed = select_checkpointed(model, below_unwrapped=config.shard_below_unwrapped)
    return ModelChoices(
        roots=tuple(roots),
        excluded=excluded,
        searched=tuple(searched),
        units=units,
        checkpointed=tuple(checkpointed),
    )


def _is_metric(module: nn.Module) -> bool:
    """Whether this is a torchmetrics Metric or MetricCollection, which FSDP1 never wrapped."""
    return any(
        cls.__name__ in ("Metric", "MetricCollection") and cls.__module__.split(".")[0] == "torchmetrics"
        for cls in type(module).__mro__
    )


def wrapped_children(model: nn.Module) -> dict[str, nn.Module]:
    """The direct children that FSDP1 wrapped, by name: no metrics, none with ``_fsdp_wrap = False``."""
    return {
        name: child
        for name, child in model.named_children()
        if not _is_metric(child) and getattr(child, "_fsdp_wrap", True)
    }


def _hook(owner: nn.Module, name: str) -> Callable[..., Any] | None:
    """A hook method of ``owner`` such as ``fsdp_wrap_fn``, or None; FSDP1 ignored what cannot be called."""
    hook = getattr(owner, name, None)
    return hook if callable(hook) else None


def _choice(
    path: str, module: nn.Module, child: nn.Module, read: Callable[[Mapping[str, Any], str], UnitOverrides]
) -> Choice | None:
    """Whether ``module`` is to be a unit. The attribute takes precedence over the function."""
    if hasattr(module, "_fsdp_wrap"):
        return Choice(chosen_by="_fsdp_wrap") if module._fsdp_wrap else None
    wrap_fn = _hook(child, "fsdp_wrap_fn")
    if wrap_fn is None:
        return None
    try:
        answer = wrap_fn(module)
    except Exception as error:
        raise PlanError(
            f"fsdp_wrap_fn raised {type(error).__name__} for module {path!r} ({type(module).__name__}): {error}"
        ) from error
    if not isinstance(answer, bool | dict):
        raise PlanError(
            f"fsdp_wrap_fn returned {answer!r} ({type(answer).__name__}) for module {path!r}; "
            "it must return True, False or a dict of settings for that unit"
        )
    if not answer:  # an empty dict was False to FSDP1
        return None
    overrides = read(answer, path) if isinstance(answer, dict) else UnitOverrides()
    return Choice(chosen_by="fsdp_wrap_fn", overrides=overrides)


# ---------------------------------------------------------------------------------------------------------------------
# One module's settings

# What a fsdp_wrap_fn dict may hold beside the keys of an fsdp_config that it shares.
_NOT_NEEDED = ("limit_all_gathers", "use_orig_params")
_NOT_SUPPORTED = ("sync_module_states", "param_init_fn", "device_id", "ignored_modules")
UNIT_KEYS = (
    "sharding_strategy",
    "reshard_after_forward",
    "mixed_precision",
    "mp_policy",
    "backward_prefetch",
    "forward_prefetch",
    "cpu_offload",
    "offload_policy",
    "process_group",
    "device_mesh",
    "mesh",
    *_NOT_NEEDED,
    *_NOT_SUPPORTED,
)
_SYNONYMS = (
    ("mixed_precision", "mp_policy"),
    ("cpu_offload", "offload_policy"),
    ("device_mesh", "mesh"),
    ("process_group", "mesh"),
    ("process_group", "device_mesh"),
)


def read_overrides(
    given: Mapping[str, Any], path: str, *, config: ShardingConfig, precision: str | None = None, strict: bool = True
) -> UnitOverrides:
    """What one module's own settings, in FSDP1's or FSDP2's words, change of the model's configuration for its unit.

    Args:
        given: The dict that the module's wrap function gave.
        path: The module's, for the errors.
    Raises:
        ConfigError: an unknown key, a wrong value or two that contradict each other; names ``path`` and the key.
        UnsupportedError: a key that cannot differ between modules yet.
    """
    for key in given:
        if key not in UNIT_KEYS:
            way_out = did_you_mean(key, UNIT_KEYS, f"known: {', '.join(UNIT_KEYS)}")
            raise UnknownKeyError(f"unknown key {key!r} in the wrap settings of module {path!r}{way_out}", keys=(key,))
        if key in _NOT_SUPPORTED:
            raise UnsupportedError(
                f"{key} for one module ({path!r}) is not supported yet; set it for the whole model, or leave it out",
                keys=(key,),
            )
    try:
        for first, second in _SYNONYMS:
            if first in given and second in given:
                raise ConfigError(f"{first} and {second} are both given; keep one", keys=(first, second))
        values = {key: KEYS_BY_NAME[key].parse(value) for key, value in _spelled(given) if key in KEYS_BY_NAME}
        mesh, reshard = _unit_mesh(given, values, config.mesh), _unit_reshard(values)
        check_reshard_degree(config.reshard_after_forward if reshard is None else reshard, mesh or config.mesh)
        return UnitOverrides(
            mesh=mesh,
            reshard_after_forward=reshard,
            mixed_precision=_unit_precision(values, config.mixed_precision, precision, strict=strict),
            cpu_offload=values.get("cpu_offload", values.get("offload_policy")),
            prefetch=_unit_prefetch(values, config.prefetch),
            given=tuple(given),
            notes=tuple(_notes(given, values)),
        )
    except ConfigError as error:
        raise type(error)(f"wrap settings of module {path!r}: {error}", keys=error.keys) from error


def _spelled(given: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """torch's FSDP1 took None for no prefetch."""
    for key, value in given.items():
        yield key, BackwardPrefetch.NONE if key == "backward_prefetch" and value is None else value


def _unit_mesh(given: Mapping[str, Any], values: Mapping[str, Any], of_model: MeshSpec) -> MeshSpec | None:
    """The unit's own ranks: a process_group or a mesh; each rank for itself under NO_SHARD; None for the model's."""
    strategy: ShardingStrategy | None = values.get("sharding_strategy")
    spec = None
    for key in ("device_mesh", "mesh"):
        if given.get(key) is not None:
            spec = mesh_of(given[key], of_model.device_type, key)
    if values.get("process_group") is not None:
        spec = mesh_of_groups(values["process_group"], strategy, of_model.device_type)
    if spec is not None and of_model.is_resolved and not of_model.is_grouped:
        spec = spec.resolve(of_model.size)
    if strategy is ShardingStrategy.NO_SHARD:
        return (spec or of_model).without_shards()
    if strategy is not None and strategy.is_hybrid and not (spec or of_model).has_replicas:
        raise ConfigError(
            f"sharding_strategy {strategy.value} needs replicas, and the mesh has none: set "
            "data_parallel_replicate_degree, or a pair of process groups for this module"
        )
    return spec


def _unit_reshard(values: Mapping[str, Any]) -> bool | int | None:
    strategy: ShardingStrategy | None = values.get("sharding_strategy")
    of_strategy = None if strategy is None else strategy.reshards_after_forward
    if "reshard_after_forward" not in values:
        return of_strategy
    value: bool | int = values["reshard_after_forward"]
    check_same_reshard(of_strategy, value)
    return value


def _unit_precision(
    values: Mapping[str, Any], of_model: MixedPrecision, precision: str | None, *, strict: bool
) -> MixedPrecision | None:
    """How a root's inputs are cast stays the model's; what mp_policy does not know of, the model's, too."""
    casts = of_model.cast_root_inputs
    if (policy := values.get("mp_policy")) is not None:
        return replace(policy, cast_root_inputs=casts, buffer_dtype=of_model.buffer_dtype, gradients=of_model.gradients)
    given: GivenPrecision | MixedPrecision | None = values.get("mixed_precision")
    if given is None:
        return None
    if precision is None and isinstance(given, GivenPrecision) and given.word != "FULL":
        raise ConfigError(f"mixed_precision {given.word} stands for dtypes of the precision; say which: precision=...")
    own = replace(mixed_precision_of(given, precision or "fp32"), cast_root_inputs=casts)
    if own.gradients is GradientDtype.AS_REDUCED and not strict:
        return replace(own, gradients=GradientDtype.AS_REDUCED_IF_POSSIBLE)
    return own


def _unit_prefetch(values: Mapping[str, Any], of_model: Prefetch) -> Prefetch | None:
    """The unit's own switches; how many units stays the model's, whose limits had no form for one module."""
    forward, backward = of_model.forward, of_model.backward
    if "forward_prefetch" in values:
        forward = (forward or 1) if values["forward_prefetch"] else None
    if "backward_prefetch" in values:
        backward = 0 if values["backward_prefetch"] is BackwardPrefetch.NONE else (backward or None)
    own = Prefetch(forward=forward, backward=backward)
    return None if own == of_model else own


def _notes(given: Mapping[str, Any], values: Mapping[str, Any]) -> Iterator[str]:
    """What a report must say of one module's settings: the keys that FSDP2 does not need, or follows nearly."""
    yield from (f"{key} is not needed: {KEYS_BY_NAME[key].reason}" for key in given if key in _NOT_NEEDED)
    if isinstance(given.get("mixed_precision"), Mapping) and UNREAD_DTYPE_KEY in given["mixed_precision"]:
        yield f"mixed_precision.{UNREAD_DTYPE_KEY} is not needed: {UNREAD_DTYPE_REASON}"
    if values.get("backward_prefetch") is BackwardPrefetch.BACKWARD_POST:
        yield f"backward_prefetch BACKWARD_POST is BACKWARD_PRE here: {BACKWARD_POST_REASON}"


# ---------------------------------------------------------------------------------------------------------------------
# Activations


def select_checkpointed(
    model: nn.Module, check_fn: CheckFn | None = None, *, below_unwrapped: bool = False
) -> list[str]:
    """The paths whose activations the model's hooks want recomputed, children before parents; only reads.

    Args:
        check_fn: Asked instead of the hooks.
        below_unwrapped: Also in direct children with ``_fsdp_wrap = False``, as Composer's FSDP2 did.
    """
    paths: list[str] = []
    modules = dict(model.named_modules(remove_duplicate=False))
    children = {name: child for name, child in model.named_children() if not _is_metric(child)}
    for name, child in (children if below_unwrapped else wrapped_children(model)).items():
        choose = check_fn or _hook(child, "activation_checkpointing_fn")
        found = [path for path, module in _bottom_up(child, name, set()) if _is_checkpointed(path, module, choose)]
        paths.extend(outside_compilation(modules, path)[0] for path in found)
    return list(dict.fromkeys(paths))


def _is_checkpointed(path: str, module: nn.Module, choose: CheckFn | None) -> bool:
    if isinstance(module, ActivationWrapper):
        return False
    if hasattr(module, "_activation_checkpointing"):
        return bool(module._activation_checkpointing)
    if choose is None:
        return False
    try:
        return bool(choose(module))
    except Exception as error:
        raise PlanError(
            f"activation_checkpointing_fn raised {type(error).__name__} for module {path!r} "
            f"({type(module).__name__}): {error}"
        ) from error


def _bottom_up(module: nn.Module, path: str, seen: set[nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    seen.add(module)
    if isinstance(module, ActivationWrapper):
        return  # the user wrapped it: what lies inside is theirs
    for name, child in module.named_children():
        if child not in seen:
            yield from _bottom_up(child, join(path, name), seen)
    yield path, module


# ---------------------------------------------------------------------------------------------------------------------
# Values


def initializers(model: nn.Module) -> Initializers:
    """How FSDP1 would have given a module its values: the direct child's ``param_init_fn``, else ``reset_parameters``.

    Returns:
        From a module and its path to a function that fills it, or None.
    """
    children = dict(model.named_children())

    def initializer(module: nn.Module, path: str) -> Callable[[], object] | None:
        child = children.get(path.partition(".")[0])
        hook = _hook(child, "param_init_fn") if child is not None else None
        return partial(hook, module) if hook is not None else _hook(module, "reset_parameters")

    return initializer
