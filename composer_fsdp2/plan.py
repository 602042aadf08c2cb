"""The sharding plan as a value: which units, with which parameters, and what is done with them."""

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

from composer_fsdp2.config import Accumulation, ActivationCheckpointing, MeshSpec
from composer_fsdp2.wrap import LeftOut

__all__ = ["ParameterSpec", "ShardUnit", "ShardingPlan", "and_more"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterSpec:
    """One parameter under all of its names (more than one if it is tied), with its full shape."""

    names: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def numel(self) -> int:
        return torch.Size(self.shape).numel()

    def to_json(self) -> dict[str, object]:
        return {"names": list(self.names), "shape": list(self.shape), "dtype": str(self.dtype)}


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardUnit:
    """The arguments of one ``fully_shard`` call, and the parameters that it will hold.

    ``modules`` has one path, or several for a group. ``backward_prefetch`` None leaves the choice to FSDP2; a unit
    that names itself gathers nothing ahead. ``replicated`` are the unit's parameters that cannot be sharded with the
    others, because they are scalars, have no elements or another dtype: whole on every rank, with gradients averaged
    over ``mesh``.
    """

    modules: tuple[str, ...]
    parameters: tuple[ParameterSpec, ...]
    replicated: tuple[ParameterSpec, ...] = ()
    mesh: MeshSpec
    is_root: bool
    reshard_after_forward: bool | int
    mixed_precision: MixedPrecisionPolicy
    cpu_offload: bool
    forward_prefetch: tuple[str, ...] = ()
    backward_prefetch: tuple[str, ...] | None = None
    buffer_dtype: torch.dtype | None = None
    reason: str

    @property
    def name(self) -> str:
        return self.modules[0]

    @property
    def numel(self) -> int:
        return sum(parameter.numel for parameter in self.parameters)

    def to_json(self) -> dict[str, object]:
        policy = self.mixed_precision
        return {
            "modules": list(self.modules),
            "parameters": [parameter.to_json() for parameter in self.parameters],
            "replicated": [parameter.to_json() for parameter in self.replicated],
            "mesh": self.mesh.to_json(),
            "is_root": self.is_root,
            "reshard_after_forward": self.reshard_after_forward,
            "mixed_precision": [
                str(policy.param_dtype),
                str(policy.reduce_dtype),
                str(policy.output_dtype),
                policy.cast_forward_inputs,
            ],
            "cpu_offload": self.cpu_offload,
            "forward_prefetch": list(self.forward_prefetch),
            "backward_prefetch": None if self.backward_prefetch is None else list(self.backward_prefetch),
            "buffer_dtype": None if self.buffer_dtype is None else str(self.buffer_dtype),
            "reason": self.reason,
        }


@dataclass(frozen=True, kw_only=True)
class ShardingPlan:
    """What ``apply_plan`` will do: units bottom-up (the order of the calls), and everything that goes with them."""

    mesh: MeshSpec
    units: tuple[ShardUnit, ...]
    tie_groups: tuple[tuple[str, ...], ...]
    ignored_modules: tuple[str, ...]
    ignored: tuple[str, ...]
    left_out: tuple[LeftOut, ...]
    checkpointed: tuple[str, ...]
    activation_checkpointing: ActivationCheckpointing
    accumulation: Accumulation
    collective_guard: float | None
    sync_module_states: bool | None
    notes: tuple[str, ...]

    @property
    def roots(self) -> tuple[ShardUnit, ...]:
        return tuple(unit for unit in self.units if unit.is_root)

    def to_json(self) -> dict[str, object]:
        return {**self._json_without_units(), "units": [unit.to_json() for unit in self.units]}

    def _json_without_units(self) -> dict[str, object]:
        return {
            "mesh": self.mesh.to_json(),
            "tie_groups": [list(names) for names in self.tie_groups],
            "ignored_modules": list(self.ignored_modules),
            "ignored": list(self.ignored),
            "left_out": [{"names": list(left.names), "reason": left.reason} for left in self.left_out],
            "checkpointed": list(self.checkpointed),
            "activation_checkpointing": {
                "checkpoint": self.activation_checkpointing.checkpoint,
                "cpu_offload": self.activation_checkpointing.cpu_offload,
                "reentrant": self.activation_checkpointing.reentrant,
                "transformer_engine": self.activation_checkpointing.transformer_engine,
                "transformer_engine_seed": self.activation_checkpointing.transformer_engine_seed,
            },
            "accumulation": {
                "gradient_sync": self.accumulation.gradient_sync.value,
                "reshard_after_backward": self.accumulation.reshard_after_backward,
            },
            "collective_guard": self.collective_guard,
            "sync_module_states": self.sync_module_states,
            "notes": list(self.notes),
        }

    @property
    def replicated(self) -> tuple[ParameterSpec, ...]:
        return tuple(spec for unit in self.units for spec in unit.replicated)

    @property
    def unsharded_names(self) -> set[str]:
        """The names of all parameters that stay whole on every rank."""
        names = {name for spec in self.replicated for name in spec.names} | set(self.ignored)
        return names.union(*(left.names for left in self.left_out))

    def resolve(self, world_size: int) -> "ShardingPlan":
        """The plan with every mesh's open degrees filled in.

        Raises:
            ConfigError: a mesh does not fit ``world_size``.
        """
        units = tuple(replace(unit, mesh=unit.mesh.resolve(world_size)) for unit in self.units)
        return replace(self, mesh=self.mesh.resolve(world_size), units=units)

    @cached_property
    def fingerprint(self) -> str:
        """The whole plan as lines of JSON, alike on ranks that will do the same; they compare it before they begin."""
        # Line by line: the objects of a large plan all at once would set off the garbage collector.
        units = "\n".join(json.dumps(unit.to_json()) for unit in self.units)
        return f"{units}\n{json.dumps(self._json_without_units())}"

    @cached_property
    def digest(self) -> str:
        """A hash of the whole plan."""
        return hashlib.sha256(self.fingerprint.encode()).hexdigest()

    def explain(self) -> str:
        """The plan as text: the mesh, one line a unit, ties, what is left out and why."""
        return "\n".join(_explain(self))

    def __str__(self) -> str:
        return self.explain()


_SYNC_WORDS = {
    "every": "each",
    "last": "the last of a batch",
    "defer_replica": "each, over replicas in the last of a batch",
}


def _explain(plan: ShardingPlan) -> Iterator[str]:
    total = sum(unit.numel for unit in plan.units)
    yield f"{len(plan.units)} units, {total:,} parameters on {plan.mesh}"
    for unit in plan.units:
        role = "root" if unit.is_root else f"reshard {unit.reshard_after_forward}"
        offload = ", on the CPU" if unit.cpu_offload else ""
        mesh = f", {unit.mesh}" if unit.mesh != plan.mesh else ""
        name = " + ".join(unit.modules) if unit.name else "(the model)"
        yield f"  {name}: {unit.numel:,} parameters, {role}{offload}{mesh} [{unit.reason}]"
    yield from (f"  tied: {' = '.join(names)}" for names in plan.tie_groups)
    for spec in plan.replicated:
        why = f"{spec.dtype} beside another dtype" if spec.shape else "a scalar"
        why = why if spec.numel else "no elements"
        yield f"  replicated: {spec.name} [{why}]: whole on every rank, gradients averaged"
    if plan.ignored_modules:
        modules = and_more(plan.ignored_modules)
        yield f"  ignored: {modules} ({len(plan.ignored)} parameters): whole on every rank, gradients not averaged"
    for left in plan.left_out:
        yield f"  left out: {and_more(left.names)} [{left.reason}]: whole on every rank, gradients not averaged"
    if plan.checkpointed:
        mode = plan.activation_checkpointing
        kind = " and ".join(
            word
            for word, is_on in (
                ("recomputed" + (" (reentrant)" if mode.reentrant else ""), mode.checkpoint),
                ("offloaded to the CPU", mode.cpu_offload),
            )
            if is_on
        )
        kind += " by Transformer Engine" if mode.checkpoint and mode.transformer_engine else ""
        yield f"  activations {kind}: {len(plan.checkpointed)} modules, first {plan.checkpointed[0]}"
    if plan.accumulation != Accumulation():
        sync, frees = plan.accumulation.gradient_sync.value, plan.accumulation.reshard_after_backward
        kept = "" if frees else ", parameters kept gathered between them"
        yield f"  microbatches: gradients communicated in {_SYNC_WORDS[sync]}{kept}"
    if plan.collective_guard is not None:
        yield f"  guard: ranks compare where they stand before each collective, and wait {plan.collective_guard:g} s"
    yield from (f"  note: {note}" for note in plan.notes)


def and_more(names: Sequence[str]) -> str:
    """``a``, or ``a and 2 more``."""
    return names[0] + (f" and {len(names) - 1} more" if len(names) > 1 else "")
