"""Call a model's FSDP hooks once, to choose the units and the initialisation functions.

[Note: roots] Composer wraps each direct child of a model and not the model itself, because methods of a ComposerModel
may call a child directly (composer/distributed/dist_strategy.py, 0.32.1). Each direct child is therefore a root unit.
The model is the root only if its children share parameters ([Note: tied parameters] and [Note: one root] in
``sharding/units.py``).
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import nn

from composer_fsdp2.config.choices import Choice, ModelChoices, UnitOverrides
from composer_fsdp2.config.parallel import ExpertBlock, TowerModel
from composer_fsdp2.config.sharding import ShardingConfig
from composer_fsdp2.config.text import and_more
from composer_fsdp2.config.wrap import WrapKind
from composer_fsdp2.errors import ConfigError, PlanError
from composer_fsdp2.fsdp1.checkpointed import choose_checkpointed
from composer_fsdp2.fsdp1.children import hook_of, is_metric, wrapped_children
from composer_fsdp2.fsdp1.module_settings import read_overrides
from composer_fsdp2.sharding.expert_units import expert_blocks, notes_of_hooks, notes_on_siblings, refuse_experts
from composer_fsdp2.sharding.frozen import choose_frozen
from composer_fsdp2.sharding.materialize import Initializers
from composer_fsdp2.sharding.modality_towers import notes_on_towers, notes_on_trained_towers, tower_models
from composer_fsdp2.sharding.modules import has_forward, ignored_modules
from composer_fsdp2.sharding.policies import Policy, read_policy
from composer_fsdp2.sharding.ties import join

_Choose = Callable[[str, nn.Module], Choice | None]  # (path, module) -> its choice


def read_hooks(model: nn.Module, config: ShardingConfig, *, precision: str | None = None) -> ModelChoices:
    """Return the modules that the model's hooks and attributes, or a policy, make units, as in Composer's FSDP1.

    Args:
        model: Any module tree; it is not modified. ``fsdp_wrap_fn`` and ``activation_checkpointing_fn`` of its direct
            children are called with the modules below them. ``_fsdp_wrap`` and ``_activation_checkpointing`` of these
            modules take precedence.
        config: The model's configuration. Unless its ``wrap`` has kind HOOKS, ``fsdp_wrap_fn`` is not called. The dict
            that a hook returns for a module overrides it.
        precision: Composer's precision, for modules whose hook returns ``mixed_precision`` DEFAULT or PURE.
    Raises:
        PlanError: a hook raised, or did not return a bool or a dict; names the module. Or the model has no class that
            the policy names, or no module that ``idle_towers`` names.
        UnsupportedError: the policy makes an expert a unit that not all ranks run.

    Does not communicate.
    """
    roots = wrapped_children(model)
    others = {name: child for name, child in model.named_children() if name not in roots}
    searched = [name for name, child in others.items() if config.shard_below_unwrapped and not is_metric(child)]
    modules = dict(model.named_modules(remove_duplicate=False))
    chosen, notes = _choose_units(model, modules, config, roots, searched, precision)
    blocks = () if config.idle_experts is None else expert_blocks(modules, config.wrap, chosen)
    units, frozen = {*chosen, *roots}, {*choose_frozen(model, config.freeze, config.train_only).names}
    towers: tuple[TowerModel, ...] = ()
    if config.idle_towers is None:
        notes = (*notes, *notes_on_trained_towers(modules, units, frozen))
    else:
        towers = tower_models(modules, units, config.idle_towers, frozen)
    checkpointed, more_notes = choose_checkpointed(model, modules, config, roots)
    return ModelChoices(
        roots=tuple(roots),
        excluded={name: _why_excluded(child) for name, child in others.items()},
        searched=tuple(searched),
        chosen=chosen,
        checkpointed=checkpointed,
        expert_blocks=blocks,
        tower_models=towers,
        notes=(*notes, *_notes_on_unused_keys(config, blocks, towers), *more_notes),
    )


def _why_excluded(child: nn.Module) -> str:
    return "a metric" if is_metric(child) else "_fsdp_wrap is False on it"


# ---------------------------------------------------------------------------------------------------------------------
# Units


def _choose_units(
    model: nn.Module,
    modules: Mapping[str, nn.Module],
    config: ShardingConfig,
    roots: Collection[str],
    searched: Collection[str],
    precision: str | None,
) -> tuple[dict[str, Choice], tuple[str, ...]]:
    """Return the units below the direct children by path, and lines for the report on the policy."""
    ignored = {below for module in ignored_modules(modules, config).values() for below in module.modules()}
    policy = None if config.wrap.kind is WrapKind.HOOKS else read_policy(model, config.wrap, ignored)
    reader = _Reader(
        read=partial(read_overrides, config=config, precision=precision), ignored=frozenset(ignored), policy=policy
    )
    for name, child in model.named_children():
        if name in roots:
            reader.read_below_root(name, child, child)
        elif name in searched:
            reader.read_below_unwrapped(name, child, child)
    if policy is None:
        return reader.choices, tuple(notes_of_hooks(modules, reader.choices)) if config.idle_experts is None else ()
    units = [path for path in reader.policy_choices if path in reader.choices]
    notes = [*policy.unmatched(reader.policy_choices.values()), *_notes_of_hooks(model, modules, reader.contradicting)]
    if config.idle_experts is None:
        refuse_experts(modules, config.wrap, units)
        notes += notes_on_siblings(modules, units)
    if config.idle_towers is None:
        notes += notes_on_towers(modules, config.wrap, units)
    return reader.choices, tuple(notes)


def _notes_on_unused_keys(
    config: ShardingConfig, blocks: Sequence[ExpertBlock], towers: Sequence[TowerModel]
) -> Iterator[str]:
    if config.idle_experts is not None and not blocks:
        yield (
            "idle_experts has no effect, because no expert is a separate unit: every rank gathers a layer's experts "
            "with the layer"
        )
    if config.idle_towers is not None and not towers:
        yield (
            "idle_towers has no effect, because no tower contains a unit: every rank gathers a tower with the unit "
            "around it"
        )


def _notes_of_hooks(model: nn.Module, modules: Mapping[str, nn.Module], contradicting: Sequence[str]) -> Iterator[str]:
    """Note which hooks the policy replaces, and which attributes take precedence over it."""
    contradicting = [path for path in contradicting if next(modules[path].parameters(), None) is not None]
    ignored_fns = [name for name, child in model.named_children() if hook_of(child, "fsdp_wrap_fn") is not None]
    if ignored_fns:
        yield f"wrap_policy is set, so the fsdp_wrap_fn of {and_more(ignored_fns)} is not called"
    if contradicting:
        yield f"_fsdp_wrap on {and_more(contradicting)} takes precedence over wrap_policy"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Reader:
    """Calls the hooks of the direct children.

    A hook is called only with modules that may be units, because it may raise for others.

    Args:
        read: Called with the dict that a hook returned and the module's path; returns the overrides.
        ignored: Modules to skip, from ``ignored_modules``.
        policy: Selects modules instead of the hooks, if it is not None.
        units: Units found so far, including root units. A module shared by two children is not read again for the
            second.
        choices: The chosen units, by path.
        policy_choices: Modules that the policy selects, by path, even if an attribute excludes them.
        contradicting: Paths of modules whose ``_fsdp_wrap`` contradicts the policy.
    """

    read: Callable[[Mapping[str, Any], str], UnitOverrides]
    ignored: frozenset[nn.Module]
    policy: Policy | None = None
    units: set[nn.Module] = field(default_factory=set)
    choices: dict[str, Choice] = field(default_factory=dict)
    policy_choices: dict[str, nn.Module] = field(default_factory=dict)
    contradicting: list[str] = field(default_factory=list)

    def read_below_root(self, path: str, root: nn.Module, child: nn.Module) -> None:
        """Choose the units below the root unit ``root``.

        If ``root`` has no ``forward``, its children are root units in its place.
        """
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
        """Choose the units below a module that is not a unit. The outermost of them are root units."""
        choose = self._chooser(module, child)
        for name, inner in module.named_children():
            inner_path = join(path, name)
            if inner not in self.ignored and self._is_chosen(inner_path, inner, choose):
                self.read_below_root(inner_path, inner, child)
            else:
                self.read_below_unwrapped(inner_path, inner, child)

    def _chooser(self, root: nn.Module, child: nn.Module) -> _Choose:
        """Return the function that decides whether a module below ``root`` is a unit: the policy, else ``child``'s
        hook.
        """
        if self.policy is None:
            return partial(self._by_function, child)
        return partial(self._by_policy, self.policy.below(root))

    def _is_chosen(self, path: str, module: nn.Module, choose: _Choose) -> bool:
        """Whether ``module`` is a unit. Its ``_fsdp_wrap`` takes precedence over the hook and the policy."""
        if hasattr(module, "_fsdp_wrap"):
            choice = Choice(chosen_by="_fsdp_wrap") if module._fsdp_wrap else None
            if self.policy is not None and (choose(path, module) is None) is not (choice is None):
                self.contradicting.append(path)
        else:
            choice = choose(path, module)
        if choice is not None:
            self.choices[path] = choice
        return choice is not None

    def _by_policy(self, chosen: Mapping[nn.Module, str], path: str, module: nn.Module) -> Choice | None:
        if module not in chosen:
            return None
        self.policy_choices[path] = module
        return Choice(chosen_by=chosen[module])

    def _by_function(self, child: nn.Module, path: str, module: nn.Module) -> Choice | None:
        returned = _call_wrap_fn(path, module, child)
        if not returned:  # FSDP1 treats an empty dict as False
            return None
        overrides = self._overrides(dict(returned), path) if isinstance(returned, dict) else UnitOverrides()
        return Choice(chosen_by="fsdp_wrap_fn", overrides=overrides)

    def _overrides(self, given: Mapping[str, Any], path: str) -> UnitOverrides:
        try:
            return self.read(given, path)
        except ConfigError as error:
            return UnitOverrides(given=given, refused=error)


def _call_wrap_fn(path: str, module: nn.Module, child: nn.Module) -> bool | dict[str, Any]:
    """Return the result of the child's ``fsdp_wrap_fn`` for a module; False if the child has no such hook."""
    wrap_fn = hook_of(child, "fsdp_wrap_fn")
    if wrap_fn is None:
        return False
    try:
        returned = wrap_fn(module)
    except Exception as error:
        raise PlanError(
            f"fsdp_wrap_fn raised {type(error).__name__} for module {path!r} ({type(module).__name__}): {error}"
        ) from error
    if not isinstance(returned, bool | dict):
        raise PlanError(
            f"fsdp_wrap_fn returned {returned!r} ({type(returned).__name__}) for module {path!r}; "
            "it must return True, False or a dict of settings for that unit"
        )
    return returned


# ---------------------------------------------------------------------------------------------------------------------
# Values


def initializers(model: nn.Module) -> Initializers:
    """Return a function that maps a module and its path to its initialisation function, or None.

    This is ``param_init_fn`` of the direct child, called with the module, else the module's ``reset_parameters``, as in
    FSDP1.
    """
    children = dict(model.named_children())

    def initializer(module: nn.Module, path: str) -> Callable[[], object] | None:
        child = children.get(path.partition(".")[0])
        hook = hook_of(child, "param_init_fn") if child is not None else None
        return partial(hook, module) if hook is not None else hook_of(module, "reset_parameters")

    return initializer
