"""Build a ``ShardingPlan`` from a model, a configuration and the choices of its hooks, before anything is modified."""

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import replace

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor.placement_types import Placement
from torch.nn.parallel import DistributedDataParallel

from composer_fsdp2._torch.private_names import FSDP1Wrapper, has_hooks
from composer_fsdp2.config.choices import ModelChoices
from composer_fsdp2.config.sharding import (
    LOW_PRECISION,
    ActivationCheckpointing,
    GradientDtype,
    MixedPrecision,
    Prefetch,
    ShardingConfig,
)
from composer_fsdp2.config.text import and_more
from composer_fsdp2.errors import PlanError, UnsupportedError
from composer_fsdp2.sharding.activations import caching_modules
from composer_fsdp2.sharding.dtypes import dtype_name
from composer_fsdp2.sharding.frozen import choose_frozen
from composer_fsdp2.sharding.modules import ancestors_or_self, ignored_modules
from composer_fsdp2.sharding.plan import ParameterSpec, ShardingPlan, ShardUnit, SplitModule, units_by_root
from composer_fsdp2.sharding.select import Selection, main_dtype, select_units
from composer_fsdp2.sharding.ties import ParameterUse
from composer_fsdp2.sharding.units import UnitDraft

_SHARDED_BY: dict[type, str] = {
    FSDP1Wrapper: "FSDP1 (FullyShardedDataParallel)",
    FSDPModule: "FSDP2 (fully_shard)",
    DistributedDataParallel: "DistributedDataParallel",
}


def decide_sharding(
    model: nn.Module,
    config: ShardingConfig,
    choices: ModelChoices,
    *,
    split: tuple[SplitModule, ...] = (),
    placements: Mapping[nn.Parameter, Placement] | None = None,
) -> ShardingPlan:
    """Choose the FSDP units of ``model`` without modifying it.

    Units are ordered bottom-up, the order in which ``fully_shard`` must run. Modules that share a parameter belong to
    one unit, because only one group can all-gather it ([Note: tied parameters] in ``units.py``).

    Args:
        model: Any module tree that is not sharded (``refuse_sharded``); parameters may be on the meta device.
        config: The configuration of the whole model.
        choices: The choices of the model's hooks, or of the policy in ``config``.
        split: The TP-sharded modules.
        placements: The placements of their parameters along the tensor axis.
    Raises:
        PlanError: a parameter cannot be sharded, no parameter is left to shard, or ``freeze`` matches no parameter or
            all.
        ConfigError: the settings of a unit's module are invalid.

    Call this on all ranks with the same model. Does not communicate, and needs no process group.
    """
    ignored = ignored_modules(dict(model.named_modules(remove_duplicate=False)), config)
    low_precision = _has_low_precision(config.mixed_precision)
    selection = select_units(model, choices, low_precision=low_precision, ignored_modules=ignored.values())
    plan = plan_selected(model, config, choices, selection, split=split, placements=placements)
    if not any(unit.parameters for unit in plan.units):
        raise PlanError(
            f"nothing to shard: {type(model).__name__} has no direct child with parameters that may be wrapped; FSDP1 "
            "wrapped the children of the model it was given, so pass the module that contains yours"
        )
    return plan


def plan_selected(
    model: nn.Module,
    config: ShardingConfig,
    choices: ModelChoices,
    selection: Selection,
    *,
    split: tuple[SplitModule, ...] = (),
    placements: Mapping[nn.Parameter, Placement] | None = None,
) -> ShardingPlan:
    """The plan of selected units. Arguments and errors are those of ``decide_sharding``.

    Does not communicate.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    ignored, frozen = ignored_modules(modules, config), choose_frozen(model, config.freeze, config.train_only)
    configs = _own_configs(selection.units, config)
    units = tuple(
        _shard_unit(unit, [selection.uses[i] for i in members], own, placements or {}, set(frozen.names))
        for unit, members, own in zip(selection.units, selection.members, configs, strict=True)
    )
    if problems := [problem for unit in units for problem in _replication_problems(unit)]:
        raise PlanError("\n".join(problems))
    recomputation = _decide_checkpointing(config.activation_checkpointing, choices, has_frozen=bool(frozen.names))
    caching = caching_modules(modules, choices.checkpointed if recomputation.checkpoint else ())
    notes = (
        *choices.notes,
        *frozen.notes,
        *selection.notes,
        *_notes_of_settings(selection.units),
        *_notes_of_parameters(units, selection.uses),
        *_notes_of_groups(units),
        *_notes_of_recomputation(config.activation_checkpointing, recomputation, caching),
        *_notes_of_batches(config),
    )
    return ShardingPlan(
        config=replace(config, ignored_modules=tuple(ignored), activation_checkpointing=recomputation),
        units=_with_prefetch(modules, units, [own.prefetch for own in configs]),
        tie_groups=tuple(use.names for use in selection.uses if len(use.owners) > 1),
        ignored=tuple(name for use in selection.ignored for name in use.names),
        left_out=selection.left_out,
        checkpointed=choices.checkpointed,
        caching=caching,
        frozen=frozen.names,
        split=split,
        expert_blocks=choices.expert_blocks,
        tower_models=choices.tower_models,
        notes=notes,
    )


def refuse_sharded(model: nn.Module) -> None:
    """Raise if a module is already wrapped or sharded.

    Raises:
        PlanError: names the module and how it was sharded.
    """
    for path, module in model.named_modules():
        if isinstance(module, tuple(_SHARDED_BY)):
            name = next(name for kind, name in _SHARDED_BY.items() if isinstance(module, kind))
            where = f"module {path!r}" if path else "the model"
            raise PlanError(f"{where} is sharded already, by {name}; pass the model as it was built")


def _has_low_precision(precision: MixedPrecision) -> bool:
    return not LOW_PRECISION.isdisjoint((precision.param_dtype, precision.reduce_dtype, precision.buffer_dtype))


def _own_configs(units: Sequence[UnitDraft], config: ShardingConfig) -> list[ShardingConfig]:
    """The configuration of each unit: the model's, overridden by the unit's own settings."""
    own = {unit: _overridden(config, unit) for unit in units}
    at_path = {path: own[unit] for unit in units if not unit.full_precision for path in unit.paths}
    for unit in units:
        if unit.full_precision:
            # FSDP1 ran batch norms in fp32 regardless of their settings, and cast their outputs to the dtype of the
            # surrounding modules (torch's MixedPrecision, _module_classes_to_ignore).
            around = next((at_path[path] for path in ancestors_or_self(unit.paths[0]) if path in at_path), config)
            full = MixedPrecision(
                param_dtype="float32",
                output_dtype=around.mixed_precision.param_dtype,
                cast_forward_inputs=True,
                cast_root_inputs=config.mixed_precision.cast_root_inputs,
            )
            own[unit] = replace(own[unit], mixed_precision=full)
    return [own[unit] for unit in units]


def _overridden(config: ShardingConfig, unit: UnitDraft) -> ShardingConfig:
    overrides = unit.overrides
    if overrides.refused is not None:
        raise overrides.refused
    changes = {
        name: value
        for name in ("mesh", "reshard_after_forward", "mixed_precision", "cpu_offload", "prefetch")
        if (value := getattr(overrides, name)) is not None
    }
    return replace(config, **changes) if changes else config


def _shard_unit(
    unit: UnitDraft,
    uses: list[ParameterUse],
    config: ShardingConfig,
    placements: Mapping[nn.Parameter, Placement],
    frozen: Set[str],
) -> ShardUnit:
    """``config`` is the unit's own configuration."""
    precision = config.mixed_precision
    if unit.is_root:
        precision = replace(precision, cast_forward_inputs=precision.cast_root_inputs)
    elif unit.of_other_dtype:
        # Inputs have the dtype of the surrounding modules, which differs from this module's dtype.
        precision = replace(precision, cast_forward_inputs=precision.param_dtype is not None)
    dtype = main_dtype(uses)
    # torch shards a parameter without elements, and fails on its gradient.
    is_sharded = {use: use.parameter.dim() > 0 < use.parameter.numel() and use.parameter.dtype == dtype for use in uses}
    return ShardUnit(
        modules=unit.paths,
        parameters=tuple(_parameter_spec(use, placements, frozen) for use in uses if is_sharded[use]),
        replicated=tuple(_parameter_spec(use, placements, frozen) for use in uses if not is_sharded[use]),
        mesh=config.mesh,
        is_root=unit.is_root,
        # Backward needs a root's parameters again immediately. FSDP1 did not reshard them, nor does torch 2.7; later
        # versions reshard a root only if requested.
        reshard_after_forward=False if unit.is_root else config.reshard_after_forward,
        mixed_precision=precision,
        cpu_offload=config.cpu_offload,
        reason=unit.reason,
    )


def _parameter_spec(use: ParameterUse, placements: Mapping[nn.Parameter, Placement], frozen: Set[str]) -> ParameterSpec:
    return ParameterSpec(
        names=use.names,
        shape=tuple(use.parameter.shape),
        dtype=dtype_name(use.parameter.dtype),
        tensor_placement=placements.get(use.parameter),
        is_trained=use.parameter.requires_grad and use.name not in frozen,
    )


def _notes_of_settings(units: Sequence[UnitDraft]) -> Iterator[str]:
    """Merge identical notes and list their modules."""
    modules: dict[str, list[str]] = {}
    for unit in units:
        for note in unit.overrides.notes:
            modules.setdefault(note, []).append(unit.paths[0])
    for note, paths in modules.items():
        yield f"in the settings of {and_more(paths)}: {note}"


def _notes_of_groups(units: Iterable[ShardUnit]) -> Iterator[str]:
    modules: dict[str, list[str]] = {}
    for unit in units:
        if unit.mesh.is_grouped and (not unit.mesh.has_replicas or unit.mesh.shard_degree == 1):
            modules.setdefault(" x ".join(map(str, unit.mesh.groups)), []).append(unit.name or "the model")
    for groups, names in modules.items():
        yield (
            f"{and_more(names)} on groups of ranks ({groups}): gradients are averaged within a group only, so that "
            "the parameters of different groups drift apart, as they did under FSDP1"
        )


def _decide_checkpointing(
    given: ActivationCheckpointing, choices: ModelChoices, *, has_frozen: bool
) -> ActivationCheckpointing:
    """Disable reentrant checkpointing if the inputs of a recomputed module may not require grad.

    Reentrant checkpointing computes gradients only if an input requires grad. The inputs of the first layer after
    frozen embeddings do not. Nor do the inputs of an Embedding or of the whole model, which a policy may select (a
    model's own hooks do not). Parameters in such modules would not be trained, without an error.
    """
    is_at_risk = has_frozen or given.classes is not None
    is_reentrant = bool(choices.checkpointed) and given.checkpoint and given.reentrant
    return replace(given, reentrant=False) if is_at_risk and is_reentrant else given


def _notes_of_recomputation(
    given: ActivationCheckpointing, decided: ActivationCheckpointing, caching: Sequence[str]
) -> Iterator[str]:
    if given != decided:
        yield (
            "activation_checkpointing_reentrant is off beside freeze and activation_checkpointing_policy: the "
            "reentrant form gives no gradients to modules whose inputs have none, as embeddings and what follows "
            "frozen ones"
        )
    if caching:
        models = [path or "the model" for path in caching]
        yield (
            f"use_cache is off in training for {and_more(models)}: a layer that is recomputed would add to the cache "
            "twice, and its gradients be wrong; generate() caches as before"
        )


def _notes_of_batches(config: ShardingConfig) -> Iterator[str]:
    how = config.broadcast_batch
    given = {"check_data": config.check_data, "broadcast_batch": None if how is None else how.value}
    keys = [f"{key} {str(value).lower()}" for key, value in given.items() if value]
    if keys and config.data_block_size == 1:
        yield f"{' and '.join(keys)}: no ranks share a batch (no tensor or context axis is above 1); nothing to do"


def _notes_of_parameters(units: Sequence[ShardUnit], uses: Sequence[ParameterUse]) -> Iterator[str]:
    """Notes about parameters that are handled differently."""
    parameters = {use.names: use.parameter for use in uses}
    unsharded = [spec.name for unit in units for spec in unit.replicated if spec.shape and spec.numel]
    if unsharded:
        yield (
            f"{and_more(unsharded)} of another dtype than the rest of the module that holds them: unsharded on every "
            "rank"
        )
    copied = [spec.name for unit in units for spec in unit.parameters if not parameters[spec.names].is_contiguous()]
    if copied:
        yield f"{and_more(copied)} not contiguous: fully_shard takes no other layout, so contiguous copies are sharded"
    hooked = [spec.name for unit in units for spec in unit.parameters if has_hooks(parameters[spec.names])]
    if hooked:
        yield (
            f"{and_more(hooked, 3)}: hooks of a parameter do not run once it is sharded (FSDP1 ran none either); call "
            "register_post_accumulate_grad_hook on the sharded parameter, after sharding, for the averaged gradient"
        )


def refuse_cast_gradients(model: nn.Module, plan: ShardingPlan) -> None:
    """Raise if ``keep_low_precision_grads`` is set, but gradients would be cast to the dtype of their parameter.

    Raises:
        UnsupportedError: names the parameters.
    """
    asked = [unit for unit in plan.units if unit.mixed_precision.gradients is GradientDtype.AS_REDUCED]
    parameters = dict(model.named_parameters(remove_duplicate=False)) if asked else {}
    trained = {name: each for name, each in parameters.items() if each.requires_grad and name not in plan.frozen}
    key = "keep_low_precision_grads"
    if cast := [text for unit in asked for text in _casts_of(unit, trained)]:
        raise UnsupportedError(
            f"{key}: {and_more(cast)}; fully_shard gives gradients the parameter's own dtype: cast the model to the "
            "dtype that gradients are reduced in, or leave the key out",
            keys=(key,),
        )


def _replication_problems(unit: ShardUnit) -> Iterator[str]:
    """Replicated parameters in another dtype than the unit computes in. A unit can cast only sharded parameters."""
    dtype = unit.mixed_precision.param_dtype
    for spec in unit.replicated:
        if spec.shape and spec.numel and unit.parameters and dtype not in (None, spec.dtype):
            yield (
                f"parameter {spec.name} is {spec.dtype}, others of the module that holds it "
                f"{unit.parameters[0].dtype}, and mixed_precision computes in {dtype}: give it a module of its own, or "
                "the dtype of the others"
            )


def _casts_of(unit: ShardUnit, trained: Mapping[str, nn.Parameter]) -> Iterator[str]:
    policy = unit.mixed_precision
    for spec in unit.parameters:
        reduced = policy.reduce_dtype or policy.param_dtype or spec.dtype
        if spec.name in trained and reduced != spec.dtype:
            yield f"{spec.name} is {spec.dtype} and its gradient is reduced in {reduced}"


def _with_prefetch(
    modules: Mapping[str, nn.Module], units: tuple[ShardUnit, ...], asked: Sequence[Prefetch]
) -> tuple[ShardUnit, ...]:
    """The units with their explicit prefetch lists: the next units of the same root, in execution order.

    Execution order is estimated from registration order. A unit is all-gathered at the start of its forward, so
    forward prefetch uses pre-order. Its backward starts where its forward ended, so backward prefetch uses reversed
    bottom-up order.
    """
    if all(prefetch == Prefetch() for prefetch in asked):
        return units
    registration = {path: i for i, path in enumerate(modules)}
    prefetch = dict(zip((unit.name for unit in units), asked, strict=True))
    forward: dict[str, tuple[str, ...]] = {}
    backward: dict[str, tuple[str, ...]] = {}
    for below in units_by_root(units).values():
        names = [unit.name for unit in below]
        in_forward = sorted(names, key=registration.__getitem__)
        forward |= _next_names(in_forward, {name: prefetch[name].forward for name in names})
        following = _next_names(names[::-1], {name: prefetch[name].backward for name in names})
        # A unit that names itself replaces FSDP2's default prefetch by none, as it is already unsharded.
        backward |= {name: prefetched or (name,) for name, prefetched in following.items()}
    return tuple(
        replace(unit, forward_prefetch=forward.get(unit.name, ()), backward_prefetch=backward.get(unit.name))
        for unit in units
    )


def _next_names(names: list[str], counts: Mapping[str, int | None]) -> dict[str, tuple[str, ...]]:
    """For each name with a count, that number of following names."""
    return {
        name: tuple(names[i + 1 : i + 1 + count]) for i, name in enumerate(names) if (count := counts[name]) is not None
    }
