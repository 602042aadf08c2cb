"""A model's own hooks, called once: which modules are to be units, with which settings, and which are recomputed.

[Note: roots] Composer wrapped every direct child of the model, never the model itself, so that methods of the
ComposerModel may call into its children freely (composer/distributed/dist_strategy.py, 0.32.1). A direct child is
therefore a root of its own; the model becomes the root only when its children share something ([Note: tied parameters]
and [Note: one root] in ``sharding/units.py``).
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import combinations
from typing import Any

from torch import nn

from composer_fsdp2._torch.private_names import ActivationWrapper
from composer_fsdp2.config.choices import Choice, ModelChoices, UnitOverrides
from composer_fsdp2.config.findings import Outcome
from composer_fsdp2.config.mesh import MeshSpec
from composer_fsdp2.config.sharding import (
    MixedPrecision,
    Prefetch,
    ShardingConfig,
    check_reshard_degree,
)
from composer_fsdp2.config.text import and_more, did_you_mean
from composer_fsdp2.config.wrap import WrapKind
from composer_fsdp2.errors import ConfigError, PlanError, UnknownKeyError, UnsupportedError
from composer_fsdp2.fsdp1.classes import classes_named
from composer_fsdp2.fsdp1.experts import notes_of_siblings, refuse_experts
from composer_fsdp2.fsdp1.keys import BACKWARD_POST_REASON, KEYS_OF_MODULES, UNREAD_DTYPE_REASON
from composer_fsdp2.fsdp1.parsing import (
    UNREAD_DTYPE_KEY,
    BackwardPrefetch,
    GivenPrecision,
    ShardingStrategy,
    check_same_reshard,
    mesh_of,
    mesh_of_groups,
    mixed_precision_of,
    without_shards,
)
from composer_fsdp2.fsdp1.policies import Policy, read_policy
from composer_fsdp2.fsdp1.towers import notes_of_towers
from composer_fsdp2.sharding.materialize import Initializers
from composer_fsdp2.sharding.modules import has_forward, ignored_modules, outside_compilation
from composer_fsdp2.sharding.ties import join

CheckFn = Callable[[nn.Module], Any]
_Choose = Callable[[str, nn.Module], Choice | None]  # what is said of the module at a path


def read_hooks(model: nn.Module, config: ShardingConfig, *, precision: str | None = None) -> ModelChoices:
    """What ``model``'s hooks and attributes, or a policy, choose; reads them as Composer's FSDP1 did, changes nothing.

    Args:
        model: Any module tree. The ``fsdp_wrap_fn`` and ``activation_checkpointing_fn`` of its direct children are
            called with the modules below them, in which ``_fsdp_wrap`` and ``_activation_checkpointing`` take
            precedence.
        config: The model's, whose ``wrap`` may be asked instead of ``fsdp_wrap_fn``; what a module's own settings do
            not name stays.
        precision: Composer's, for settings that say DEFAULT or PURE.
    Raises:
        PlanError: a hook raised, or returned something else than a bool or a dict; names the module. The policy names
            a class that the model has not.
        UnsupportedError: the policy makes an expert a unit.

    Does not communicate.
    """
    roots = wrapped_children(model)
    others = {name: child for name, child in model.named_children() if name not in roots}
    searched = [name for name, child in others.items() if config.shard_below_unwrapped and not _is_metric(child)]
    chosen, notes = _choose_units(model, config, searched, precision)
    checkpointed, more_notes = _choose_recomputed(model, config)
    return ModelChoices(
        roots=tuple(roots),
        excluded={name: _why_excluded(child) for name, child in others.items()},
        searched=tuple(searched),
        chosen=chosen,
        checkpointed=checkpointed,
        notes=(*notes, *more_notes),
    )


def _why_excluded(child: nn.Module) -> str:
    return "a metric" if _is_metric(child) else "_fsdp_wrap is False on it"


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


# ---------------------------------------------------------------------------------------------------------------------
# Units


def _choose_units(
    model: nn.Module, config: ShardingConfig, searched: Collection[str], precision: str | None
) -> tuple[dict[str, Choice], tuple[str, ...]]:
    """The modules below direct children that are to be units, by path, and what the report says of a policy."""
    ignored = {below for module in ignored_modules(model, config).values() for below in module.modules()}
    policy = None if config.wrap.kind is WrapKind.HOOKS else read_policy(model, config.wrap, ignored)
    reader = _Reader(
        read=partial(read_overrides, config=config, precision=precision), ignored=frozenset(ignored), policy=policy
    )
    roots = wrapped_children(model)
    for name, child in model.named_children():
        if name in roots:
            reader.read_below_root(name, child, child)
        elif name in searched:
            reader.read_below_unwrapped(name, child, child)
    if policy is None:
        return reader.choices, ()
    units = [path for path in reader.meant if path in reader.choices]
    refuse_experts(model, config.wrap, units)
    notes = (
        *policy.in_vain(reader.meant.values()),
        *_notes_of_hooks(model, reader.against_policy),
        *notes_of_siblings(model, units),
        *notes_of_towers(model, config.wrap, units),
    )
    return reader.choices, notes


def _notes_of_hooks(model: nn.Module, against: Sequence[str]) -> Iterator[str]:
    """What the model's own words are to a policy: not asked, or ahead of it."""
    modules = dict(model.named_modules(remove_duplicate=False))
    against = [path for path in against if next(modules[path].parameters(), None) is not None]
    unasked = [name for name, child in model.named_children() if _hook(child, "fsdp_wrap_fn") is not None]
    if unasked:
        yield f"wrap_policy is given, so the fsdp_wrap_fn of {and_more(unasked)} is not asked"
    if against:
        yield f"_fsdp_wrap on {and_more(against)} takes precedence over wrap_policy"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Reader:
    """Asks the hooks of direct children about the modules that may become units, and about no others: a function may
    fail for those.

    Args:
        read: From a module's own settings and its path to what they change.
        ignored: Modules that are passed over.
        policy: Asked instead of the functions, if there is one.
        units: Those that are units by now, roots among them; another child's function is not asked about them.
        choices: By path.
        meant: What the policy chose, by path, whatever an attribute says.
        against_policy: The paths of those whose attribute says otherwise than the policy.
    """

    read: Callable[[Mapping[str, Any], str], UnitOverrides]
    ignored: frozenset[nn.Module]
    policy: Policy | None = None
    units: set[nn.Module] = field(default_factory=set)
    choices: dict[str, Choice] = field(default_factory=dict)
    meant: dict[str, nn.Module] = field(default_factory=dict)
    against_policy: list[str] = field(default_factory=list)

    def read_below_root(self, path: str, root: nn.Module, child: nn.Module) -> None:
        """Read the modules below a root; of a container the members are roots."""
        if root in self.units or root in self.ignored:
            return
        if not has_forward(root):
            for name, member in root.named_children():
                self.read_below_root(join(path, name), member, child)
            return
        self.units.add(root)
        choose = self._chooser(root, child)
        for inner_path, inner in root.named_modules(prefix=path):
            if inner in self.units or inner in self.ignored:
                continue
            if self._is_chosen(inner_path, inner, choose) and has_forward(inner):
                self.units.add(inner)

    def read_below_unwrapped(self, path: str, module: nn.Module, child: nn.Module) -> None:
        """Read the modules below one that is no unit: the outermost chosen ones are roots."""
        choose = self._chooser(module, child)
        for name, inner in module.named_children():
            inner_path = join(path, name)
            if inner not in self.ignored and self._is_chosen(inner_path, inner, choose):
                self.read_below_root(inner_path, inner, child)
            else:
                self.read_below_unwrapped(inner_path, inner, child)

    def _chooser(self, root: nn.Module, child: nn.Module) -> _Choose:
        """Who says which modules below ``root`` are units: the policy, else the child's function."""
        if self.policy is None:
            return partial(self._by_function, child)
        return partial(self._by_policy, self.policy.below(root))

    def _is_chosen(self, path: str, module: nn.Module, choose: _Choose) -> bool:
        """Whether ``module`` is to be a unit. The attribute takes precedence over function and policy."""
        if hasattr(module, "_fsdp_wrap"):
            choice = Choice(chosen_by="_fsdp_wrap") if module._fsdp_wrap else None
            if self.policy is not None and (choose(path, module) is None) is not (choice is None):
                self.against_policy.append(path)
        else:
            choice = choose(path, module)
        if choice is not None:
            self.choices[path] = choice
        return choice is not None

    def _by_policy(self, chosen: Mapping[nn.Module, str], path: str, module: nn.Module) -> Choice | None:
        if module not in chosen:
            return None
        self.meant[path] = module
        return Choice(chosen_by=chosen[module])

    def _by_function(self, child: nn.Module, path: str, module: nn.Module) -> Choice | None:
        answer = _answer(path, module, child)
        if not answer:  # an empty dict was False to FSDP1
            return None
        overrides = self._overrides(dict(answer), path) if isinstance(answer, dict) else UnitOverrides()
        return Choice(chosen_by="fsdp_wrap_fn", overrides=overrides)

    def _overrides(self, given: Mapping[str, Any], path: str) -> UnitOverrides:
        try:
            return self.read(given, path)
        except ConfigError as error:
            return UnitOverrides(given=given, refused=error)


def _answer(path: str, module: nn.Module, child: nn.Module) -> bool | dict[str, Any]:
    """What the child's function says of a module."""
    wrap_fn = _hook(child, "fsdp_wrap_fn")
    if wrap_fn is None:
        return False
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
    return answer


# ---------------------------------------------------------------------------------------------------------------------
# One module's settings

# Under Composer a process_group of the model took precedence over its mesh; of one module neither does.
_MESH_KEYS = ("process_group", "device_mesh", "mesh")


def read_overrides(
    given: Mapping[str, Any], path: str, *, config: ShardingConfig, precision: str | None = None
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
        if key not in KEYS_OF_MODULES:
            way_out = did_you_mean(key, KEYS_OF_MODULES, f"known: {', '.join(KEYS_OF_MODULES)}")
            raise UnknownKeyError(f"unknown key {key!r} in the wrap settings of module {path!r}{way_out}", keys=(key,))
        if KEYS_OF_MODULES[key].of_modules is Outcome.UNSUPPORTED:
            raise UnsupportedError(
                f"{key} for one module ({path!r}) is not supported yet; set it for the whole model, or leave it out",
                keys=(key,),
            )
    try:
        for first, second in _synonyms(given):
            raise ConfigError(f"{first} and {second} are both given; keep one", keys=(first, second))
        values = {key: KEYS_OF_MODULES[key].parse(value) for key, value in _taken(given)}
        mesh, reshard = _unit_mesh(given, values, config.mesh), _unit_reshard(values)
        check_reshard_degree(config.reshard_after_forward if reshard is None else reshard, mesh or config.mesh)
        return UnitOverrides(
            mesh=mesh,
            reshard_after_forward=reshard,
            mixed_precision=_unit_precision(values, config.mixed_precision, precision),
            cpu_offload=values.get("cpu_offload", values.get("offload_policy")),
            prefetch=_unit_prefetch(values, config.prefetch),
            given=given,
            notes=tuple(_notes(given, values)),
        )
    except ConfigError as error:
        raise type(error)(f"wrap settings of module {path!r}: {error}", keys=error.keys) from error


def _synonyms(given: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Two keys that say one thing."""
    yield from ((other, key) for key in given for other in KEYS_OF_MODULES[key].instead_of if other in given)
    yield from combinations([key for key in _MESH_KEYS if key in given], 2)


def _taken(given: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """What has an effect; torch's FSDP1 took None for no prefetch."""
    for key, value in given.items():
        if KEYS_OF_MODULES[key].of_modules is not Outcome.UNNEEDED:
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
        return without_shards(spec or of_model)
    if strategy is not None and strategy.is_hybrid and not (spec or of_model).has_replicas:
        raise ConfigError(
            f"sharding_strategy {strategy.value} needs replicas, and the mesh has none: set "
            "data_parallel_replicate_degree, or a pair of process groups for this module",
            keys=("sharding_strategy",),
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
    values: Mapping[str, Any], of_model: MixedPrecision, precision: str | None
) -> MixedPrecision | None:
    """How a root's inputs are cast stays the model's; what mp_policy does not know of, the model's, too."""
    casts = of_model.cast_root_inputs
    if (policy := values.get("mp_policy")) is not None:
        return replace(policy, cast_root_inputs=casts, buffer_dtype=of_model.buffer_dtype, gradients=of_model.gradients)
    given: GivenPrecision | MixedPrecision | None = values.get("mixed_precision")
    if given is None:
        return None
    if precision is None and isinstance(given, GivenPrecision) and given.word != "FULL":
        text = f"mixed_precision {given.word} stands for dtypes of the precision; say which: precision=..."
        raise ConfigError(text, keys=("mixed_precision",))
    return replace(mixed_precision_of(given, precision or "fp32"), cast_root_inputs=casts)


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
    rows = (KEYS_OF_MODULES[key] for key in given)
    yield from (f"{row.name} is not needed: {row.reason}" for row in rows if row.of_modules is Outcome.UNNEEDED)
    if isinstance(given.get("mixed_precision"), Mapping) and UNREAD_DTYPE_KEY in given["mixed_precision"]:
        yield f"mixed_precision.{UNREAD_DTYPE_KEY} is not needed: {UNREAD_DTYPE_REASON}"
    if values.get("backward_prefetch") is BackwardPrefetch.BACKWARD_POST:
        yield f"backward_prefetch BACKWARD_POST is BACKWARD_PRE here: {BACKWARD_POST_REASON}"


# ---------------------------------------------------------------------------------------------------------------------
# Activations


def _choose_recomputed(model: nn.Module, config: ShardingConfig) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The paths of what is recomputed or offloaded, and what the report says of the classes that choose it."""
    if not config.activation_checkpointing.enabled:
        return (), ()
    names = config.activation_checkpointing.classes
    if names is None:
        return tuple(select_checkpointed(model, below_unwrapped=config.shard_below_unwrapped)), ()
    types = classes_named(model, names, key=_POLICY, otherwise=config.wrap.classes)
    paths = select_checkpointed(
        model,
        lambda module: isinstance(module, types) and has_forward(module),
        below_unwrapped=config.shard_below_unwrapped,
    )
    return tuple(paths), tuple(_notes_of_policy(model, types, paths))


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


_POLICY = "activation_checkpointing_policy"


def _notes_of_policy(model: nn.Module, types: Sequence[type[nn.Module]], checkpointed: Sequence[str]) -> Iterator[str]:
    """Whom the configuration keeps from choosing, and what it chose in vain."""
    unasked = [name for name, child in wrapped_children(model).items() if _hook(child, "activation_checkpointing_fn")]
    if unasked:
        yield f"{_POLICY} takes the place of the activation_checkpointing_fn of {and_more(unasked)}, which is not asked"
    modules = dict(model.named_modules(remove_duplicate=False))
    # A compiled module is wrapped from outside.
    chosen = [module for path in checkpointed for module in (modules[path], *modules[path].children())]
    for cls in types:
        if not any(isinstance(module, cls) for module in chosen):
            yield (
                f"{_POLICY} names {cls.__name__}, and none is chosen: each lies in a part that FSDP1 left out, has "
                "_activation_checkpointing = False or no forward to run again, or is wrapped already"
            )


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
