"""Translate an FSDP1 configuration to a ``ShardingConfig``, with a finding for each key. Does not communicate."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from composer_fsdp2.config.findings import Finding, Outcome, format_findings
from composer_fsdp2.config.mesh import MeshSpec
from composer_fsdp2.config.rows import idle
from composer_fsdp2.config.sharding import (
    ActivationCheckpointing,
    GradientDtype,
    MixedPrecision,
    Prefetch,
    ShardingConfig,
    check_expert_degree,
    check_reshard_degree,
    check_split_experts,
    check_split_sequences,
)
from composer_fsdp2.config.text import did_you_mean, short
from composer_fsdp2.config.value import Value, with_field
from composer_fsdp2.errors import ConfigError
from composer_fsdp2.fsdp1.keys import FSDP2_READER, KEYS, KEYS_BY_NAME, UNREAD_DTYPE_REASON, Context, Key
from composer_fsdp2.fsdp1.parsing import (
    UNREAD_DTYPE_KEY,
    BackwardPrefetch,
    ShardingStrategy,
    check_same_reshard,
    mesh_of,
    mesh_of_groups,
    mixed_precision_of,
    parse_device_type,
    parse_precision,
    without_shards,
)
from composer_fsdp2.fsdp1.read import UserConfig

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Translation(Value):
    """The result of ``translate``: the FSDP2 configuration, and the outcome of each key.

    Args:
        config: Valid only if ``blocking`` is empty.
        precision: Composer's precision, from which the dtypes of DEFAULT and PURE follow.
        verbose: Whether the user wants the report in the log.

    Example:
        >>> translation = translate({"sharding_strategy": "SHARD_GRAD_OP"}, device="cpu")
        >>> translation.config.reshard_after_forward, translation.blocking
        (False, ())
    """

    config: ShardingConfig
    findings: tuple[Finding, ...]
    precision: str = "fp32"
    verbose: bool = False

    def explain(self) -> str:
        """The report for users."""
        head = f"fsdp_config -> fully_shard{': not possible as it stands' if self.blocking else ''}"
        config, precision = self.config, self.config.mixed_precision
        result = (
            f"  mesh: {config.mesh}; reshard_after_forward: {config.reshard_after_forward}; "
            f"param dtype: {precision.param_dtype or 'as they are'}, reduced in: "
            f"{precision.reduce_dtype or precision.param_dtype or 'as they are'}"
        )
        return "\n".join([head, format_findings(self.findings), *([] if self.blocking else [result])])

    def __str__(self) -> str:
        return self.explain()

    def to_json(self) -> dict[str, Any]:
        return {"possible": not self.blocking, **Value.to_json(self)}

    @property
    def blocking(self) -> tuple[Finding, ...]:
        return tuple(finding for finding in self.findings if finding.outcome.blocks)


def translate(
    fsdp_config: object,
    *,
    precision: object = None,
    device: object = None,
    world_size: int | None = None,
    tensor_parallel_degree: int = 1,
) -> Translation:
    """Translate a configuration with keys of FSDP1, FSDP2 or both.

    Args:
        fsdp_config: A mapping, or an object with the attributes of Composer's FSDPConfig or FSDP2Config.
        precision: Composer's Precision or its string; None: Composer's default for the device.
        device: Composer's Device, a torch.device or a string; None: the mesh's, or CUDA if available.
        world_size: The number of ranks. With None, a degree of -1 remains -1.
        tensor_parallel_degree: The number of consecutive ranks over which layers are TP-sharded, from Composer's
            ``TPConfig``.
    Raises:
        ConfigError: unknown keys, wrong types and contradictory values, all in one message.

    Does not modify its arguments or communicate. A process_group by nodes is not resolved here, because ranks per node
    are known only under a launcher. Imports torch only if ``device`` is None or a torch object.

    Example:
        >>> translation = translate({"mixed_precision": "PURE"}, precision="amp_bf16", device="cpu")
        >>> translation.config.mixed_precision.param_dtype
        'bfloat16'
    """
    given = UserConfig.read(fsdp_config)
    if world_size is not None and (type(world_size) is not int or world_size < 1):
        raise ConfigError(f"world_size is {short(world_size)}; give the number of ranks, or None")
    context, reshard, checkpointing = _read(given, precision, device, (world_size, tensor_parallel_degree))
    return Translation(
        config=_config(given, context, reshard, checkpointing),
        findings=tuple(_findings(context)),
        precision=context.precision,
        verbose=context.values["verbose"],
    )


def _read(
    given: UserConfig, precision: object, device: object, ranks: tuple[int | None, int]
) -> tuple[Context, bool | int, ActivationCheckpointing]:
    """Parse all keys and check their combinations. All errors are raised as one ConfigError.

    Args:
        ranks: The world size (None if unknown) and the tensor parallel degree.
    """
    problems = _Problems()
    values = _Values(given, problems)
    of_mesh = getattr(given.mesh, "device_type", None)
    device_type = problems.catch(parse_device_type, of_mesh if device is None else device) or "cpu"
    name = problems.catch(parse_precision, precision, device_type) or "fp32"
    problems.catch(_contradictions, given, values)
    mesh = problems.catch(_mesh, given, values, device_type, *ranks)
    reshard = problems.catch(_reshard_after_forward, given, values)
    checkpointing = problems.catch(_activation_checkpointing, values, name)
    if mesh is not None and reshard is not None:
        problems.catch(check_reshard_degree, reshard, mesh)
        problems.catch(_check_parallel_degrees, values, mesh)
    problems.raise_all()
    assert mesh is not None and reshard is not None and checkpointing is not None
    mixed_precision = _mixed_precision(given, values, name)
    context = Context(values=values, given=given.given, precision=name, mesh=mesh, mixed_precision=mixed_precision)
    return context, reshard, checkpointing


def _config(
    given: UserConfig, context: Context, reshard: bool | int, checkpointing: ActivationCheckpointing
) -> ShardingConfig:
    values = context.values
    config = ShardingConfig(
        mesh=context.mesh,
        reshard_after_forward=reshard,
        mixed_precision=context.mixed_precision,
        cpu_offload=values[_key_in_effect(given, "offload_policy", "cpu_offload")],
        activation_checkpointing=checkpointing,
        prefetch=_prefetch(values),
        sync_module_states=_sync_module_states(given, values),
        shard_below_unwrapped=given.is_fsdp2,
    )
    return _with_fields(config, values)


class _Problems:
    """Collects errors, to raise them as one."""

    def __init__(self) -> None:
        self.errors: list[ConfigError] = []

    def catch(self, read: Callable[..., T], *args: Any) -> T | None:
        try:
            return read(*args)
        except ConfigError as error:
            self.errors.append(error)
            return None

    def raise_all(self) -> None:
        distinct = {str(error): error for error in self.errors}
        if len(distinct) == 1:
            raise self.errors[0]
        if distinct:
            keys = tuple(dict.fromkeys(key for error in self.errors for key in error.keys))
            raise ConfigError("\n".join(distinct), keys=keys)


class _Values(Mapping[str, Any]):
    """The parsed values of all keys, including defaults. Reading a key with an invalid value raises its error again."""

    def __init__(self, given: UserConfig, problems: _Problems) -> None:
        for name in given.given:
            problems.catch(_known, name)
        self._given, self._found, self._errors = given, dict[str, Any](), dict[str, ConfigError]()
        for row in KEYS:
            try:
                self._found[row.name] = self._value(row)
            except ConfigError as error:
                problems.errors.append(error)
                self._errors[row.name] = error

    def _value(self, row: Key) -> Any:
        value = self._given[row.name]
        if value is None and self._is_unset(row) and not row.takes.fits(None):
            return None
        return row.parse(value, "fsdp_config.")

    def _is_unset(self, row: Key) -> bool:
        """Whether the key is unset rather than set to None: None is its default in FSDP2Config, or a synonym is set."""
        others = (other.name for other in KEYS if row.name in other.instead_of)
        given = self._given.given
        is_own_default = row.name not in given and row.defaults.get(FSDP2_READER, row.default) is None
        return is_own_default or any(given.get(name) is not None for name in others)

    def __getitem__(self, name: str) -> Any:
        if name in self._errors:
            raise self._errors[name]
        return self._found[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._found)

    def __len__(self) -> int:
        return len(self._found)


def _known(name: str) -> None:
    if name not in KEYS_BY_NAME:
        way_out = did_you_mean(name, KEYS_BY_NAME, "no version of Composer knew it; remove it")
        raise ConfigError(f"unknown key fsdp_config.{name}{way_out}", keys=(name,))


def _with_fields(config: ShardingConfig, values: Mapping[str, Any]) -> ShardingConfig:
    """Set the fields that a single key determines."""
    for row in KEYS:
        if row.sets:
            (field,) = row.fields
            config = with_field(config, field, values[row.name])
    return config


# ---------------------------------------------------------------------------------------------------------------------
# Settings that depend on several keys


def _mesh(
    given: UserConfig, values: Mapping[str, Any], device_type: str, world_size: int | None, tensor_degree: int
) -> MeshSpec:
    is_implied = "reshard_after_forward" in given.given and "sharding_strategy" not in given.given
    strategy = None if is_implied else values["sharding_strategy"]  # FSDP2 has no strategy: a pair of groups is hybrid
    if tensor_degree > 1:
        _refuse_beside_tensor_axis(values)
    if values["process_group"] is not None:  # Composer then ignores the mesh (dist_strategy.py)
        spec = mesh_of_groups(values["process_group"], strategy, device_type)
    elif given.mesh is not None:
        spec = mesh_of(given.mesh, device_type, "fsdp_config.device_mesh", tensor_degree)
    else:
        degrees = (values["data_parallel_shard_degree"], values["data_parallel_replicate_degree"])
        spec = MeshSpec.of_degrees(*degrees, tensor=tensor_degree, device_type=device_type)
    if world_size is not None and not any(each.rule.on_machine for each in spec.groups):
        spec = spec.resolve(world_size)
    if strategy is not ShardingStrategy.NO_SHARD:
        return spec
    shard = spec.shard_degree
    if not spec.is_grouped and spec.has_replicas and shard != 1:
        raise ConfigError(
            "sharding_strategy NO_SHARD contradicts data_parallel_replicate_degree "
            f"{spec.replicate_degree} with data_parallel_shard_degree {shard} (FSDP1 averaged gradients over the first "
            "of the two axes only, and the replicas drifted apart); leave the degrees out",
            keys=("sharding_strategy", "data_parallel_replicate_degree", "data_parallel_shard_degree"),
        )
    return without_shards(spec)


def _check_parallel_degrees(values: Mapping[str, Any], mesh: MeshSpec) -> None:
    """Check context and expert parallel degrees against the model's mesh; ``parallel/`` checks the meshes of units."""
    if values["context_parallel_degree"] > 1:
        check_split_sequences(mesh)
    if values["expert_parallel_degree"] > 1:
        check_split_experts(mesh)
        check_expert_degree(values["expert_parallel_degree"], mesh)


def _refuse_beside_tensor_axis(values: Mapping[str, Any]) -> None:
    """Reject settings that FSDP2 or Composer does not support together with tensor parallelism."""
    given = {
        "process_group": values["process_group"] is not None,
        "sharding_strategy": values["sharding_strategy"] is ShardingStrategy.NO_SHARD,
        "load_monolith_rank0_only": values["load_monolith_rank0_only"],
        "reshard_after_forward": type(values["reshard_after_forward"]) is int,
    }
    problems = [_BESIDE_TENSOR_AXIS[key] for key, is_given in given.items() if is_given]
    if problems:
        keys = tuple(key for key, is_given in given.items() if is_given)
        raise ConfigError("\n".join(problems), keys=keys)


_BESIDE_TENSOR_AXIS = {
    "process_group": "process_group with tensor parallelism: groups are no slice of the mesh that splits layers; use "
    "data_parallel_shard_degree and data_parallel_replicate_degree",
    "sharding_strategy": "sharding_strategy NO_SHARD with tensor parallelism: fully_shard must shard what is split; "
    "use SHARD_GRAD_OP, which keeps parameters gathered",
    "load_monolith_rank0_only": "load_monolith_rank0_only is not compatible with tensor parallelism (TP); leave it "
    "out: every rank reads its own part of such a checkpoint",
    "reshard_after_forward": "an integer for reshard_after_forward with tensor parallelism: fully_shard cannot reshard "
    "to a smaller mesh there; use true or false",
}


def _reshard_after_forward(given: UserConfig, values: Mapping[str, Any]) -> bool | int:
    strategy: ShardingStrategy = values["sharding_strategy"]
    if "reshard_after_forward" not in given.given:
        is_of_class = "reshard_after_forward" in given.defaults and "sharding_strategy" not in given.given
        return values["reshard_after_forward"] if is_of_class else strategy.reshards_after_forward
    value: bool | int = values["reshard_after_forward"]
    if "sharding_strategy" in given.given:
        check_same_reshard(strategy.reshards_after_forward, value)
    return value


def _key_in_effect(given: UserConfig, policy: str, key: str) -> str:
    """Return the name of the key that applies: FSDP2's ``policy`` if the user set it, else FSDP1's ``key``."""
    return policy if given.given.get(policy) is not None else key


def _mixed_precision(given: UserConfig, values: Mapping[str, Any], precision: str) -> MixedPrecision:
    found = mixed_precision_of(values[_key_in_effect(given, "mp_policy", "mixed_precision")], precision)
    return replace(found, gradients=GradientDtype.AS_REDUCED) if values["keep_low_precision_grads"] else found


def _prefetch(values: Mapping[str, Any]) -> Prefetch:
    backward: int | None = values["backward_prefetch_limit"]
    if values["backward_prefetch"] is BackwardPrefetch.NONE:
        backward = 0
    elif backward == 1:
        backward = None  # FSDP2's default: one unit, in reverse forward order
    return Prefetch(forward=values["forward_prefetch_limit"] if values["forward_prefetch"] else None, backward=backward)


def _activation_checkpointing(values: Mapping[str, Any], precision: str) -> ActivationCheckpointing:
    """Activation checkpointing, with Transformer Engine's implementation if requested."""
    is_te = values["te_checkpoint_wrapper"] and precision == "amp_fp8"
    is_on = values["activation_checkpointing"] or values["activation_cpu_offload"]
    if is_te and is_on and values["activation_checkpointing_reentrant"]:
        raise ConfigError(
            "te_checkpoint_wrapper needs activation_checkpointing_reentrant: false (Transformer Engine's "
            "checkpointing works with the non-reentrant implementation only, as under FSDP1)",
            keys=("te_checkpoint_wrapper", "activation_checkpointing_reentrant"),
        )
    return ActivationCheckpointing(transformer_engine=is_te)


def _sync_module_states(given: UserConfig, values: Mapping[str, Any]) -> bool | None:
    """Return ``sync_module_states``; True by default with ``load_monolith_rank0_only``, because only rank 0 reads the
    checkpoint.
    """
    if "sync_module_states" not in given.given and values["load_monolith_rank0_only"]:
        return True
    value: bool | None = values["sync_module_states"]
    return value


def _contradictions(given: UserConfig, values: Mapping[str, Any]) -> None:
    problems = _Problems()
    for row in KEYS:
        for other in row.instead_of:
            problems.catch(_synonyms, given, (other, row.name))
    problems.catch(_offloaded_activations, values)
    problems.catch(_policy_without_checkpointing, values)
    problems.raise_all()


def _synonyms(given: UserConfig, pair: tuple[str, str]) -> None:
    """Reject two keys with the same meaning."""
    if all(given.given.get(name) is not None for name in pair):
        first, second = pair
        raise ConfigError(f"fsdp_config.{first} and fsdp_config.{second} have the same meaning; keep one", keys=pair)


def _offloaded_activations(values: Mapping[str, Any]) -> None:
    # Composer's State rejects this, too (composer/core/state.py); repeated here for the same message in both cases.
    if values["activation_cpu_offload"] and not values["use_orig_params"]:
        raise ConfigError(
            "activation_cpu_offload: true contradicts use_orig_params: false; leave use_orig_params out",
            keys=("activation_cpu_offload", "use_orig_params"),
        )


def _policy_without_checkpointing(values: Mapping[str, Any]) -> None:
    is_on = values["activation_checkpointing"] or values["activation_cpu_offload"]
    if values["activation_checkpointing_policy"] is not None and not is_on:
        raise ConfigError(
            "fsdp_config.activation_checkpointing_policy selects modules to recompute, but activation_checkpointing "
            "is false; set activation_checkpointing: true, or leave the policy out",
            keys=("activation_checkpointing_policy", "activation_checkpointing"),
        )


# ---------------------------------------------------------------------------------------------------------------------
# Findings


def _findings(context: Context) -> Iterator[Finding]:
    """Yield one finding for each key that the user set, and for each option that FSDP1 read from inside another key's
    value.
    """
    for name in context.given:
        yield _finding(KEYS_BY_NAME[name], context)
    grads = "keep_low_precision_grads"
    if context.mixed_precision.gradients is not GradientDtype.OF_PARAMETER and grads not in context.given:
        yield _finding(KEYS_BY_NAME[grads], context)
    dtypes = context.given.get("mixed_precision")
    if isinstance(dtypes, Mapping) and UNREAD_DTYPE_KEY in dtypes:
        yield Finding(
            key=f"mixed_precision.{UNREAD_DTYPE_KEY}",
            value=dtypes[UNREAD_DTYPE_KEY],
            outcome=Outcome.UNNEEDED,
            reason=UNREAD_DTYPE_REASON,
            where=f"$.fsdp_config.mixed_precision.{UNREAD_DTYPE_KEY}",
        )


def _finding(row: Key, context: Context) -> Finding:
    value = context.given.get(row.name, row.default)
    usual = replace(row.usual(row.name, value), where=f"$.fsdp_config.{row.name}")
    if row.is_neutral(value):
        return replace(idle(usual), outcome=Outcome.EXACT)
    if row.default is False and value is False:
        usual = replace(usual, target="", reason="off, as by default", asks=False)
    return usual if row.decide is None else row.decide(usual, context)
