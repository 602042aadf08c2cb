"""From an FSDP1 configuration to a ``ShardingConfig``: pure, total, and with a finding for every key that was said."""

import importlib.util
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch.distributed.device_mesh import DeviceMesh

from composer_fsdp2.config import (
    Accumulation,
    ActivationCheckpointing,
    BackwardPrefetch,
    GradientSync,
    MeshSpec,
    Prefetch,
    ShardingConfig,
    ShardingStrategy,
    check_reshard_degree,
)
from composer_fsdp2.errors import ComposerFSDP2Error, ConfigError, UnsupportedError
from composer_fsdp2.findings import ASKS_FOR_NOTHING, OFF, Finding, Outcome, format_findings
from composer_fsdp2.fsdp1.keys import KEYS_BY_NAME, nearest_key
from composer_fsdp2.fsdp1.legacy import LegacyConfig
from composer_fsdp2.fsdp1.values import (
    BACKWARD_POST_REASON,
    UNREAD_DTYPE_KEY,
    UNREAD_DTYPE_REASON,
    Precision,
    check_kind,
    check_same_reshard,
    mesh_of,
    mesh_of_process_group,
    parse_backward_prefetch,
    parse_device_type,
    parse_ignored_modules,
    parse_mixed_precision,
    parse_mp_policy,
    parse_offload,
    parse_precision,
    parse_strategy,
    short_repr,
)

__all__ = ["Translation", "translate"]

STATE_DICT_TYPES = (None, "full", "sharded")


@dataclass(frozen=True, slots=True, kw_only=True)
class Translation:
    """The FSDP2 configuration (None if something stands in the way) and what became of each key that was said."""

    config: ShardingConfig | None
    findings: tuple[Finding, ...]

    def explain(self) -> str:
        """The report that a user reads."""
        head = "fsdp_config -> fully_shard" if self.config else "fsdp_config -> fully_shard: not possible as it stands"
        lines = [head, format_findings(self.findings)]
        if self.config is not None:
            config = self.config
            policy = config.mixed_precision
            lines.append(
                f"  mesh: {config.mesh}; reshard_after_forward: {config.reshard_after_forward}; "
                f"param dtype: {policy.param_dtype or 'as they are'}, reduced in: "
                f"{policy.reduce_dtype or policy.param_dtype or 'as they are'}"
            )
        return "\n".join(lines)

    def __str__(self) -> str:
        return self.explain()

    def to_json(self) -> dict[str, object]:
        return {"possible": self.config is not None, "findings": [finding.to_json() for finding in self.findings]}

    @property
    def blocking(self) -> tuple[Finding, ...]:
        return tuple(finding for finding in self.findings if finding.outcome.blocks)


def translate(
    fsdp_config: object,
    *,
    precision: object = None,
    device: object = None,
    world_size: int | None = None,
    strict: bool = True,
) -> Translation:
    """What an FSDP1 (or FSDP2, or mixed) configuration asks of ``fully_shard``.

    Args:
        fsdp_config: A mapping, or an object with the attributes of Composer's FSDPConfig or FSDP2Config.
        precision: Composer's Precision or its string; None is Composer's default for the device.
        device: Composer's Device, a torch.device or a string; None is the mesh's, or CUDA where there is one.
        world_size: Number of ranks; None leaves a degree of -1 open.
        strict: Whether what cannot be carried over gives no configuration (True) or only a finding. The key
            ``strict`` in the configuration itself goes first.
    Raises:
        ConfigError: unknown keys, wrong types, values that contradict each other; all of them in one message.

    It reads its arguments only (and LOCAL_WORLD_SIZE, for a process_group by nodes), and does not communicate.
    """
    legacy = LegacyConfig.read(fsdp_config)
    _refuse_bad_keys(legacy)
    if world_size is not None and (type(world_size) is not int or world_size < 1):
        raise ConfigError(f"world_size is {short_repr(world_size)}; give the number of ranks, or None")
    if device is None and isinstance(legacy.mesh, DeviceMesh):
        device = legacy.mesh.device_type
    problems = _Problems()
    precision_name = problems.catch(parse_precision, precision, device)
    device_type = problems.catch(parse_device_type, device)
    mesh = problems.catch(_mesh, legacy, device_type or "cpu", world_size)
    reshard = problems.catch(_reshard_after_forward, legacy)
    policy = problems.catch(_mixed_precision, legacy, precision_name or "fp32")
    offload = problems.catch(_cpu_offload, legacy)
    prefetch = problems.catch(_prefetch, legacy)
    accumulation = problems.catch(_accumulation, legacy)
    guard = problems.catch(_collective_guard, legacy)
    ignored = problems.catch(parse_ignored_modules, legacy["ignored_modules"])
    checkpointing = problems.catch(_activation_checkpointing, legacy, precision_name)
    problems.catch(_state_dict_type, legacy)
    problems.catch(_contradictions, legacy)
    if mesh is not None and reshard is not None:
        problems.catch(check_reshard_degree, reshard, mesh)
    problems.raise_all()

    findings = tuple(_findings(legacy, precision_name, mesh, policy))
    is_strict = legacy.said.get("strict", strict)
    if is_strict and any(finding.outcome.blocks for finding in findings):
        return Translation(config=None, findings=findings)
    config = ShardingConfig(
        mesh=mesh,
        reshard_after_forward=reshard,
        mixed_precision=policy.policy,
        cast_root_inputs=policy.cast_root_inputs,
        buffer_dtype=policy.buffer_dtype,
        cpu_offload=offload,
        activation_checkpointing=checkpointing,
        prefetch=prefetch,
        accumulation=accumulation,
        collective_guard=guard,
        sync_module_states=_sync_module_states(legacy),
        ignored_modules=ignored,
        shard_below_unwrapped=legacy.is_fsdp2,
        keep_low_precision_grads=policy.keep_low_precision_grads or legacy["keep_low_precision_grads"],
        strict=is_strict,
        precision=precision_name,
        verbose=legacy["verbose"],
    )
    return Translation(config=config, findings=findings)


class _Problems:
    """Collects what is wrong, so that one error names all of it."""

    def __init__(self) -> None:
        self.errors: list[ComposerFSDP2Error] = []

    def catch(self, read: Callable[..., Any], *args: Any) -> Any:
        try:
            return read(*args)
        except ConfigError as error:
            self.errors.append(error)
            return None

    def raise_all(self) -> None:
        if len(self.errors) == 1:
            raise self.errors[0]
        if self.errors:
            raise ConfigError("\n".join(dict.fromkeys(str(error) for error in self.errors)))


def _refuse_bad_keys(legacy: LegacyConfig) -> None:
    problems = []
    for name, value in legacy.said.items():
        if name not in KEYS_BY_NAME:
            near = nearest_key(name)
            way_out = f"did you mean {near}?" if near else "no version of Composer knew it; remove it"
            problems.append(f"unknown key fsdp_config.{name}; {way_out}")
            continue
        try:
            check_kind(name, value, KEYS_BY_NAME[name].kind)
        except ConfigError as error:
            problems.append(str(error))
    if problems:
        raise ConfigError("\n".join(problems))


def _mesh(legacy: LegacyConfig, device_type: str, world_size: int | None) -> MeshSpec:
    strategy = parse_strategy(legacy["sharding_strategy"])
    if legacy["process_group"] is not None:  # Composer then ignored the mesh (dist_strategy.py)
        spec = mesh_of_process_group(legacy["process_group"], strategy, device_type)
    elif legacy.mesh is not None:
        spec = mesh_of(legacy.mesh, device_type, "device_mesh")
    else:
        spec = MeshSpec(
            shard=legacy["data_parallel_shard_degree"],
            replicate=legacy["data_parallel_replicate_degree"],
            device_type=device_type,
        )
    if world_size is not None:
        spec = spec.resolve(world_size)
    if strategy is not ShardingStrategy.NO_SHARD:
        return spec
    if not spec.is_grouped and spec.replicate is not None and spec.shard != 1 and (spec.is_resolved or spec.shard > 1):
        raise ConfigError(
            "sharding_strategy NO_SHARD contradicts data_parallel_replicate_degree "
            f"{spec.replicate} with data_parallel_shard_degree {spec.shard} (FSDP1 averaged gradients over the first "
            "of the two axes only, and the replicas drifted apart); leave the degrees out"
        )
    return spec.without_shards()


def _reshard_after_forward(legacy: LegacyConfig) -> bool | int:
    strategy = parse_strategy(legacy["sharding_strategy"])
    if "reshard_after_forward" not in legacy.said:
        of_class: bool | int | None = legacy.defaults.get("reshard_after_forward")
        return strategy.reshards_after_forward if of_class is None or "sharding_strategy" in legacy.said else of_class
    value: bool | int = legacy["reshard_after_forward"]
    if "sharding_strategy" in legacy.said:
        check_same_reshard(strategy.reshards_after_forward, value)
    return value


def _mixed_precision(legacy: LegacyConfig, precision: str) -> Precision:
    if "mp_policy" in legacy.said and legacy["mp_policy"] is not None:
        return parse_mixed_precision(parse_mp_policy(legacy["mp_policy"]), precision)
    return parse_mixed_precision(legacy["mixed_precision"], precision)


def _cpu_offload(legacy: LegacyConfig) -> bool:
    if legacy.said.get("offload_policy") is not None:
        return parse_offload("offload_policy", legacy["offload_policy"])
    return parse_offload("cpu_offload", legacy["cpu_offload"])


def _prefetch(legacy: LegacyConfig) -> Prefetch:
    for name in ("backward_prefetch_limit", "forward_prefetch_limit"):
        if legacy[name] < 1:
            raise ConfigError(f"{name} is {legacy[name]}; give 1 or more")
    backward: int | None = legacy["backward_prefetch_limit"]
    if parse_backward_prefetch(legacy["backward_prefetch"]) is BackwardPrefetch.NONE:
        backward = 0
    elif backward == 1:
        backward = None  # FSDP2's own: one ahead, in the order that forward ran in
    return Prefetch(forward=legacy["forward_prefetch_limit"] if legacy["forward_prefetch"] else None, backward=backward)


def _accumulation(legacy: LegacyConfig) -> Accumulation:
    said = legacy["gradient_sync"]
    modes = [mode.value for mode in GradientSync]
    if said not in modes:
        raise ConfigError(f"gradient_sync is {said!r}; it is one of {', '.join(modes)}")
    return Accumulation(gradient_sync=GradientSync(said), reshard_after_backward=legacy["reshard_after_backward"])


def _collective_guard(legacy: LegacyConfig) -> float | None:
    seconds = legacy["collective_guard"]
    if seconds is not None and not 0 < seconds < math.inf:
        raise ConfigError(f"collective_guard is {seconds}; give a number of seconds above 0, or null")
    return None if seconds is None else float(seconds)


def _activation_checkpointing(legacy: LegacyConfig, precision: str) -> ActivationCheckpointing:
    checkpointing = ActivationCheckpointing(
        checkpoint=legacy["activation_checkpointing"],
        cpu_offload=legacy["activation_cpu_offload"],
        reentrant=legacy["activation_checkpointing_reentrant"],
        transformer_engine=legacy["te_checkpoint_wrapper"] and precision == "amp_fp8",
    )
    if checkpointing.transformer_engine and checkpointing.enabled:
        if checkpointing.reentrant:
            raise ConfigError(
                "te_checkpoint_wrapper needs activation_checkpointing_reentrant: false (Transformer Engine's "
                "checkpointing works with the non-reentrant implementation only, as under FSDP1)"
            )
        if importlib.util.find_spec("transformer_engine") is None:
            raise ConfigError(
                "te_checkpoint_wrapper under precision amp_fp8 needs Transformer Engine, which is not installed: "
                "install transformer-engine, or set te_checkpoint_wrapper to false"
            )
    return checkpointing


def _sync_module_states(legacy: LegacyConfig) -> bool | None:
    """Rank 0 alone reads a monolithic checkpoint, so the others need what it read."""
    if "sync_module_states" not in legacy.said and legacy["load_monolith_rank0_only"]:
        return True
    value: bool | None = legacy["sync_module_states"]
    return value


def _state_dict_type(legacy: LegacyConfig) -> None:
    value = legacy["state_dict_type"]
    if value == "local":
        raise UnsupportedError(
            "state_dict_type 'local' is gone from Composer (since 0.19) and torch; use 'sharded', which every world "
            "size can load, or 'full'"
        )
    if value not in STATE_DICT_TYPES:
        raise ConfigError(f"state_dict_type is {value!r}; it is 'full' or 'sharded'")


# Two words for one thing; said together they would have to agree, and only one can be meant.
_SYNONYMS = (
    ("mixed_precision", "mp_policy"),
    ("cpu_offload", "offload_policy"),
    ("data_parallel_shard_degree", "device_mesh"),
    ("data_parallel_replicate_degree", "device_mesh"),
)


def _contradictions(legacy: LegacyConfig) -> None:
    problems = [
        f"fsdp_config.{first} and fsdp_config.{second} are two ways to say one thing; keep one"
        for first, second in _SYNONYMS
        if legacy.said.get(first) is not None and legacy.said.get(second) is not None
    ]
    if legacy["activation_cpu_offload"] and not legacy["use_orig_params"]:
        # Composer's State refuses it as well (composer/core/state.py); kept, so that both paths say the same.
        problems.append("activation_cpu_offload: true contradicts use_orig_params: false; leave use_orig_params out")
    if problems:
        raise ConfigError("\n".join(problems))


def _findings(legacy: LegacyConfig, precision: str, mesh: MeshSpec, mixed_precision: Precision) -> Iterator[Finding]:
    """One finding per key that was said: the table's row, unless the value has another fate."""
    exceptions = {
        "sharding_strategy": lambda: _strategy_finding(legacy, mesh),
        "backward_prefetch": lambda: _backward_prefetch_finding(legacy),
        "backward_prefetch_limit": lambda: _same_as_fsdp2(legacy, "backward_prefetch_limit", 1),
        "forward_prefetch": lambda: _same_as_fsdp2(legacy, "forward_prefetch", False),
        "forward_prefetch_limit": lambda: _same_as_fsdp2(legacy, "forward_prefetch_limit", 1),
        "keep_low_precision_grads": lambda: _low_precision_grads_finding(legacy, mixed_precision),
        "ignored_modules": lambda: None if legacy["ignored_modules"] else _neutral_finding(legacy, "ignored_modules"),
        "process_group": lambda: _neutral_finding(legacy, "process_group") if legacy["process_group"] is None else None,
        "data_parallel_shard_degree": lambda: _degree_finding(legacy, "data_parallel_shard_degree"),
        "data_parallel_replicate_degree": lambda: _degree_finding(legacy, "data_parallel_replicate_degree"),
        "collective_guard": lambda: (
            _neutral_finding(legacy, "collective_guard") if legacy["collective_guard"] is None else None
        ),
        "fsdp1_metric_names": lambda: _metric_names_finding(legacy),
        "gradient_sync": lambda: _gradient_sync_finding(legacy, mesh),
        "te_checkpoint_wrapper": lambda: _te_checkpoint_finding(legacy, precision),
        "te_shard_fp8_weight": lambda: _te_weight_finding(legacy, precision),
    }
    for name in legacy.said:
        special = exceptions.get(name, lambda: None)()
        yield special or _finding(legacy, name)
    if mixed_precision.keep_low_precision_grads and "keep_low_precision_grads" not in legacy.said:
        yield _low_precision_grads_finding(legacy, mixed_precision)
    if isinstance(legacy["mixed_precision"], Mapping) and UNREAD_DTYPE_KEY in legacy["mixed_precision"]:
        yield Finding(
            key=f"mixed_precision.{UNREAD_DTYPE_KEY}",
            value=legacy["mixed_precision"][UNREAD_DTYPE_KEY],
            outcome=Outcome.UNNEEDED,
            target="",
            reason=UNREAD_DTYPE_REASON,
            where=f"$.fsdp_config.mixed_precision.{UNREAD_DTYPE_KEY}",
        )


def _finding(legacy: LegacyConfig, name: str, **changes: Any) -> Finding:
    row = KEYS_BY_NAME[name]
    is_off = row.default is False and legacy[name] is False
    fields: dict[str, Any] = {
        "key": name,
        "value": legacy[name],
        "outcome": row.outcome,
        "target": "" if is_off else row.target,
        "reason": OFF if is_off else row.reason,
        "where": f"$.fsdp_config.{name}",
    }
    return Finding(**(fields | changes))


def _same_as_fsdp2(legacy: LegacyConfig, name: str, neutral: object) -> Finding | None:
    return _neutral_finding(legacy, name) if legacy[name] == neutral else None


def _neutral_finding(legacy: LegacyConfig, name: str) -> Finding:
    return _finding(legacy, name, outcome=Outcome.EXACT, target="", reason=ASKS_FOR_NOTHING)


def _low_precision_grads_finding(legacy: LegacyConfig, mixed_precision: Precision) -> Finding:
    """A MixedPrecision object carries the key as well, and was what FSDP1 read whatever stood beside it."""
    name = "keep_low_precision_grads"
    asked = mixed_precision.keep_low_precision_grads or legacy[name]
    return _finding(legacy, name, value=True) if asked else _neutral_finding(legacy, name)


def _strategy_finding(legacy: LegacyConfig, mesh: MeshSpec) -> Finding:
    strategy = parse_strategy(legacy["sharding_strategy"])
    if strategy is ShardingStrategy.NO_SHARD:
        return _finding(
            legacy,
            "sharding_strategy",
            target="2-D mesh with one rank on its shard axis",
            reason="every rank keeps whole parameters, gradients are averaged by one all-reduce",
        )
    reshard = f"reshard_after_forward={legacy.said.get('reshard_after_forward', strategy.reshards_after_forward)}"
    if strategy.is_hybrid and mesh.replicate is None:
        return _finding(
            legacy,
            "sharding_strategy",
            outcome=Outcome.APPROXIMATE,
            target=f"{reshard} on a 1-D mesh",
            reason="without a replicate degree Composer itself trained this as "
            + ("FULL_SHARD" if strategy.reshards_after_forward else "SHARD_GRAD_OP"),
            hint="set data_parallel_replicate_degree for replicas",
        )
    return _finding(
        legacy,
        "sharding_strategy",
        target=f"{reshard} on a {'2-D' if mesh.replicate is not None else '1-D'} mesh",
        reason="parameters are " + ("freed" if strategy.reshards_after_forward else "kept") + " after forward",
    )


def _backward_prefetch_finding(legacy: LegacyConfig) -> Finding:
    said = parse_backward_prefetch(legacy["backward_prefetch"])
    if said is BackwardPrefetch.BACKWARD_POST:
        target, reason = "FSDP2's own prefetch (as BACKWARD_PRE)", BACKWARD_POST_REASON
        hint = "NONE has the lower peak"
        return _finding(legacy, "backward_prefetch", target=target, reason=reason, hint=hint)
    if said is BackwardPrefetch.NONE:
        target, reason = "set_modules_to_backward_prefetch", "each unit names itself, so that nothing is gathered ahead"
    else:
        target, reason = "FSDP2's own prefetch", "FSDP2 gathers the next unit before a unit's gradients by itself"
    return _finding(legacy, "backward_prefetch", outcome=Outcome.EXACT, target=target, reason=reason)


def _degree_finding(legacy: LegacyConfig, name: str) -> Finding | None:
    if legacy["process_group"] is None or legacy[name] == KEYS_BY_NAME[name].default:
        return None
    return _finding(
        legacy,
        name,
        outcome=Outcome.UNNEEDED,
        target="",
        reason="process_group goes before the degrees, as it did in Composer",
        hint="leave one of the two out",
    )


def _gradient_sync_finding(legacy: LegacyConfig, mesh: MeshSpec) -> Finding | None:
    said = legacy["gradient_sync"]
    if said == GradientSync.EVERY.value:
        return _finding(legacy, "gradient_sync", target="", reason="as under FSDP1 in Composer")
    if said == GradientSync.DEFER_REPLICA.value and mesh.replicate is None:
        return _finding(
            legacy,
            "gradient_sync",
            outcome=Outcome.UNNEEDED,
            target="",
            reason="this mesh has no replicas, so there is nothing to defer",
            hint="set data_parallel_replicate_degree, or say last",
        )
    return None


def _metric_names_finding(legacy: LegacyConfig) -> Finding | None:
    if legacy["use_orig_params"] or not legacy["fsdp1_metric_names"]:
        return None
    return _finding(
        legacy,
        "fsdp1_metric_names",
        outcome=Outcome.APPROXIMATE,
        reason="with use_orig_params: false FSDP1 logged one _flat_param for each unit; here each parameter has a name",
    )


def _te_checkpoint_finding(legacy: LegacyConfig, precision: str) -> Finding | None:
    if not legacy["te_checkpoint_wrapper"] or precision != "amp_fp8":
        return None
    return _finding(
        legacy,
        "te_checkpoint_wrapper",
        outcome=Outcome.EXACT,
        target="transformer_engine.pytorch.distributed.checkpoint, applied before fully_shard",
        reason="the same wrapper inside the unit; it does nothing without activation_checkpointing",
    )


def _te_weight_finding(legacy: LegacyConfig, precision: str) -> Finding | None:
    if not legacy["te_shard_fp8_weight"] or precision != "amp_fp8":
        return None
    return _finding(
        legacy,
        "te_shard_fp8_weight",
        outcome=Outcome.UNSUPPORTED,
        reason="Transformer Engine's prepare_te_modules_for_fsdp knows FSDP1's wrapper only",
        hint="set it to false: fully_shard gathers these weights in param_dtype",
    )
