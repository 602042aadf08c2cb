"""ROLL: ``strategy_args.strategy_config`` of each worker whose ``strategy_name`` is fsdp2_train or fsdp2_infer.

ROLL trains with FSDP2 already, so nothing is translated here but words. Meanings and defaults: ROLL of 2026-08
(``fsdp2_strategy.py``, ``fsdp_utils.py``, ``model_args.py``); its own guide lacks several of the keys, and is wrong
about wrap_embeddings, about casting and about the versions of torch that an unsaid reshard_after_forward needs.
"""

import ast
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

from composer_fsdp2.compat.dialects.base import (
    Expression,
    Frame,
    MappingEdit,
    Path,
    Reading,
    Run,
    Section,
    Wrap,
    WrapKind,
)
from composer_fsdp2.compat.dialects.roll_keys import (
    BY_NAME,
    DTYPES,
    NO_GRADIENTS,
    PRECISIONS,
    ROWS,
    STRATEGIES,
    UNKNOWN,
    UNSAID,
    UNSAID_TRAINING,
)
from composer_fsdp2.compat.dialects.roll_words import express, word
from composer_fsdp2.compat.dialects.rows import Row, as_it_is, deciding, default_hint, finding_of, unknown_key
from composer_fsdp2.config import Accumulation, ActivationCheckpointing, GradientSync, MeshSpec, ShardingConfig
from composer_fsdp2.findings import Finding, Outcome

__all__ = ["RollDialect"]


class RollDialect:
    """See the module."""

    name = "roll"

    def sections(self, values: Mapping[str, Any]) -> list[Path]:
        return list(_sections(values, ()))

    def read(self, section: Section) -> Reading:
        worker = _Worker.of(section)
        findings = (*_findings(worker), *_unsaid(worker))
        parts = deciding({row.name: row.part for row in ROWS if row.name in worker.said}, findings)
        is_bad = any(_problem(worker, row) for row in ROWS)
        return Reading(run=None if is_bad else _run(worker), findings=findings, parts=parts)

    def express(self, run: Run) -> Expression:
        """As a ``strategy_config``; what ROLL says in model_args is a finding, since that lies outside of it."""
        return express(run)

    def rewrite(self, section: Section, reading: Reading) -> list[MappingEdit]:
        """Nothing: ROLL's words are FSDP2's."""
        return []

    def own_findings(self, reading: Reading) -> tuple[Finding, ...]:
        """Nothing becomes something else, since ROLL's words are FSDP2's."""
        return tuple(as_it_is(reading.findings, "ROLL", UNKNOWN))

    def frame(self, section: Section) -> Frame:
        """The worker's ``strategy_args`` goes as a whole."""
        has_name = "strategy_args" in section.path
        entry = section.path[: section.path.index("strategy_args") + 1] if has_name else section.path
        return Frame(entry=entry, inner=section.path)


def _sections(values: Any, path: Path) -> Iterator[Path]:
    if isinstance(values, list):
        for number, each in enumerate(values):
            yield from _sections(each, (*path, number))
    if not isinstance(values, Mapping):
        return
    for key, value in values.items():
        if key == "strategy_args" and isinstance(value, Mapping) and value.get("strategy_name") in STRATEGIES:
            has_config = isinstance(value.get("strategy_config"), Mapping)
            yield (*path, key, "strategy_config") if has_config else (*path, key)
        else:
            yield from _sections(value, (*path, key))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Worker:
    """What one worker's part of the file says, by the names of the table.

    Args:
        num_ranks: None if device_mapping does not tell.
        top: The whole file, for what holds for all workers.
    """

    said: Mapping[str, Any]
    num_ranks: int | None
    top: Mapping[str, Any]

    @classmethod
    def of(cls, section: Section) -> "_Worker":
        path = section.path[: section.path.index("strategy_args")] if "strategy_args" in section.path else ()
        around: Any = section.around
        for key in path:
            around = around[key]
        around = around if "strategy_args" in section.path else {}
        said = dict(_flat(section.said, ("wrap_policy",)))
        if section.path[-1:] == ("strategy_args",):  # there is no strategy_config, or it is null
            said = {"strategy_name": section.said["strategy_name"]}
        elif (strategy := around.get("strategy_args")) is not None:
            said = {"strategy_name": strategy.get("strategy_name")} | said
        model = around.get("model_args")
        for name, value in model.items() if isinstance(model, Mapping) else ():
            if f"model_args.{name}" in BY_NAME:
                said[f"model_args.{name}"] = value
        if "device_mapping" in around:
            said["device_mapping"] = around["device_mapping"]
        return cls(said=said, num_ranks=_count(around.get("device_mapping")), top=section.around)

    def __getitem__(self, name: str) -> Any:
        return self.said.get(name, BY_NAME[name].default)

    @property
    def is_training(self) -> bool:
        return bool(self["strategy_name"] != "fsdp2_infer")

    @property
    def wraps_experts(self) -> bool:
        return self["apply_expert_patch"] is True or self["ep_size"] != 1

    def is_on(self, name: str) -> bool:
        row = BY_NAME[name]
        return not row.is_neutral(self[name])


def _flat(said: Mapping[str, Any], nested: Sequence[str]) -> Iterator[tuple[str, Any]]:
    for key, value in said.items():
        if key in nested and isinstance(value, Mapping) and value:
            yield from ((f"{key}.{name}", each) for name, each in value.items())
        else:
            yield str(key), value


def _count(devices: Any) -> int | None:
    """How many devices: ROLL evaluates the string; here lists, ranges and their sums are understood."""
    if isinstance(devices, str):
        try:
            return len(_listed(ast.parse(devices.strip(), mode="eval").body))
        except (SyntaxError, ValueError, TypeError, MemoryError):
            return None
    return len(devices) if isinstance(devices, list) else None


def _listed(node: ast.expr) -> Sequence[Any]:
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and not node.keywords:
        if node.func.id == "list" and len(node.args) == 1:
            return _listed(node.args[0])
        if node.func.id == "range":
            return range(*(ast.literal_eval(argument) for argument in node.args))
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return [*_listed(node.left), *_listed(node.right)]
    value = ast.literal_eval(node)
    if not isinstance(value, list | tuple):
        raise ValueError("no list")
    return value


# ---------------------------------------------------------------------------------------------------------------------
# Findings


def _problem(worker: _Worker, row: Row) -> str:
    """What stands in the way of reading a key; "" if nothing does."""
    value, ranks = worker[row.name], worker.num_ranks
    if row.only_with and not worker.is_on(row.only_with):
        return ""
    if row.name in worker.said and not row.takes.fits(value):
        return f"this key takes {row.takes.text}"
    if row.name == "fsdp_size" and ranks is not None and 1 < value < ranks and ranks % value:
        return f"the {ranks} ranks of device_mapping are no multiple of it; use {_divisors(ranks)}"
    if row.name == "reshard_after_forward" and type(value) is int:
        size = worker["fsdp_size"]
        shards = size if isinstance(size, int) and 1 < size < (ranks or size + 1) else ranks
        if shards is not None and shards % value:
            return f"it does not divide the {shards} ranks that a parameter is sharded over; use {_divisors(shards)}"
    return ""


def _divisors(number: int) -> str:
    return " or ".join(str(each) for each in range(1, number + 1) if number % each == 0)


def _findings(worker: _Worker) -> Iterator[Finding]:
    for key, value in worker.said.items():
        row = BY_NAME.get(key)
        if row is None:
            yield unknown_key(key, value, BY_NAME, UNKNOWN)
        elif problem := _problem(worker, row):
            hint = default_hint(row)
            yield Finding(key=key, value=value, outcome=Outcome.NEEDS_DECISION, target="", reason=problem, hint=hint)
        else:
            yield _fate(worker, row, key)


def _fate(worker: _Worker, row: Row, key: str) -> Finding:
    """Of a key with a value that it takes, said or not."""
    if not worker.is_training and row.name in _FOR_GRADIENTS:
        return Finding(key=key, value=worker[row.name], outcome=Outcome.UNNEEDED, target="", reason=NO_GRADIENTS)
    is_read = not row.only_with or worker.is_on(row.only_with)
    finding = finding_of(row, key, worker[row.name], is_read=is_read)
    return _DECIDED[row.name](worker, finding) if row.name in _DECIDED else finding


_FOR_GRADIENTS = {
    "reduce_dtype",
    "enable_mix_precision",
    "reduce_scatter_during_grad_accumulation",
    "fused_optimizer",
    "model_args.disable_gradient_checkpointing",
    "model_args.gradient_checkpointing_use_reentrant",
    "model_args.freeze_module_prefix",
}

# Keys whose default asks for something, so that a file without them says something all the same.
_TELLING_DEFAULTS = (
    "fsdp_size",
    "param_dtype",
    "reduce_dtype",
    "reshard_after_forward",
    "async_save_ckpt",
    "model_args.disable_gradient_checkpointing",
    "wrap_policy.wrap_embeddings",
)


def _unsaid(worker: _Worker) -> Iterator[Finding]:
    for name in _TELLING_DEFAULTS:
        if name not in worker.said and (worker.is_training or name not in _FOR_GRADIENTS):
            yield _fate(worker, BY_NAME[name], f"(unsaid) {name}")
    for key, outcome, reason, hint in (*(UNSAID_TRAINING if worker.is_training else ()), *UNSAID):
        yield Finding(key=key, value="", outcome=outcome, target="", reason=reason, hint=hint)


def _fsdp_size(worker: _Worker, finding: Finding) -> Finding:
    size, ranks = worker["fsdp_size"], worker.num_ranks
    if size <= 1 or (ranks is not None and size >= ranks):
        of_all = f"all {ranks} ranks" if ranks is not None else "all ranks"
        return replace(finding, target="1-D mesh", reason=f"1 or less, or all ranks and more, is: over {of_all}")
    if ranks is not None:
        return replace(
            finding,
            target=f"mesh of {ranks // size} replicas x {size} shards",
            reason=f"{ranks} ranks make {ranks // size} groups, each with all parameters",
        )
    return replace(
        finding,
        outcome=Outcome.APPROXIMATE,
        target=f"mesh of replicas x {size} shards",
        reason="device_mapping does not say how many ranks there are; with this many or fewer ROLL makes no replicas",
        hint=f"with more than {size} ranks nothing is to be done, else set it to 1",
    )


def _reduce_dtype(worker: _Worker, finding: Finding) -> Finding:
    return replace(finding, value=worker.said.get("reduce_dtype") or word(_reduced_in(worker)))


def _reshard(worker: _Worker, finding: Finding) -> Finding:
    if worker["reshard_after_forward"] is None:
        reason = "torch's own choice: freed in all units but the root"
        hint = "torch 2.7 takes no null here, so that ROLL fails with it: say true"
        return replace(finding, reason=reason, hint=hint)
    return finding


def _offload(worker: _Worker, finding: Finding) -> Finding:
    value = worker["offload_policy"]
    if isinstance(value, str) and value.lower() in ("false", "no", "off", "none", "0"):
        return replace(
            finding,
            outcome=Outcome.NEEDS_DECISION,
            target="",
            reason="ROLL takes any text for true, so this run was offloaded",
            hint="as trained: true; as written: false",
        )
    if not value:
        return replace(finding, outcome=Outcome.UNNEEDED, target="", reason="nothing is offloaded")
    return finding


def _embeddings(worker: _Worker, finding: Finding) -> Finding:
    if worker["wrap_policy.wrap_embeddings"]:
        return finding
    return replace(
        finding,
        outcome=Outcome.APPROXIMATE,
        reason="against its guide, ROLL still makes each embedding a unit that is not tied to the output",
        hint="wrap embeddings as well for the same gathers; the numbers do not depend on it",
    )


def _experts(worker: _Worker, finding: Finding) -> Finding:
    if worker.wraps_experts:
        return finding
    return replace(
        finding,
        outcome=Outcome.NEEDS_DECISION,
        target="",
        reason="ROLL wraps experts with apply_expert_patch or ep_size only, so here it did not",
        hint="as trained: remove it; as written, each expert a unit of its own, ranks hang that use different experts",
    )


def _mix(worker: _Worker, finding: Finding) -> Finding:
    if worker.said.get("reduce_dtype") is None:
        return finding
    return replace(finding, outcome=Outcome.UNNEEDED, target="", reason="reduce_dtype is said, and goes before it")


def _async_save(worker: _Worker, finding: Finding) -> Finding:
    if worker.is_training and not worker["async_save_ckpt"]:
        return replace(finding, target="", reason="training waits until a checkpoint is written")
    return (
        finding
        if worker.is_training
        else replace(finding, outcome=Outcome.UNNEEDED, target="", reason="nothing is saved")
    )


def _ulysses(worker: _Worker, finding: Finding) -> Finding:
    size, shards = worker["model_args.ulysses_size"], worker["fsdp_size"]
    if isinstance(size, int) and isinstance(shards, int) and shards < size:
        return replace(finding, reason=f"{finding.reason}; ROLL itself fails with it, as fsdp_size {shards} is smaller")
    return finding


def _checkpointing(worker: _Worker, finding: Finding) -> Finding:
    if worker["model_args.disable_gradient_checkpointing"]:
        return replace(finding, outcome=Outcome.UNNEEDED, target="", reason="activations are kept")
    return replace(finding, reason="on unless it is disabled: each layer's activations are recomputed in backward")


def _devices(worker: _Worker, finding: Finding) -> Finding:
    if worker.num_ranks is None:
        return replace(
            finding,
            outcome=Outcome.APPROXIMATE,
            reason="it does not say how many devices there are without being run",
            hint="write it as a list or as list(range(FROM, TO))",
        )
    return replace(finding, reason=f"{worker.num_ranks} ranks")


_DECIDED = {
    "fsdp_size": _fsdp_size,
    "reduce_dtype": _reduce_dtype,
    "enable_mix_precision": _mix,
    "reshard_after_forward": _reshard,
    "offload_policy": _offload,
    "wrap_policy.wrap_embeddings": _embeddings,
    "wrap_policy.moe_experts": _experts,
    "async_save_ckpt": _async_save,
    "model_args.ulysses_size": _ulysses,
    "model_args.disable_gradient_checkpointing": _checkpointing,
    "device_mapping": _devices,
}


# ---------------------------------------------------------------------------------------------------------------------
# The run


def _run(worker: _Worker) -> Run:
    param_dtype = _dtype(worker["param_dtype"], torch.bfloat16)
    reshard = worker["reshard_after_forward"]
    sync = worker["reduce_scatter_during_grad_accumulation"] or not worker.is_training
    return Run(
        config=ShardingConfig(
            mesh=_mesh(worker),
            reshard_after_forward=True if reshard is None else reshard,
            mixed_precision=MixedPrecisionPolicy(
                param_dtype=param_dtype,
                reduce_dtype=_reduced_in(worker),
                cast_forward_inputs=False,
            ),
            cast_root_inputs=False,
            cpu_offload=bool(worker["offload_policy"]),
            activation_checkpointing=_recomputing(worker),
            accumulation=Accumulation(gradient_sync=GradientSync.EVERY if sync else GradientSync.LAST),
            sync_module_states=True,
            precision=PRECISIONS.get(param_dtype, "fp32"),
        ),
        wrap=_wrap(worker),
        state_dict_type="sharded",
        extras=_extras(worker),
    )


def _dtype(name: str | None, default: torch.dtype) -> torch.dtype:
    return default if name is None else DTYPES[name.lower()]


def _reduced_in(worker: _Worker) -> torch.dtype:
    default = torch.float32 if worker["enable_mix_precision"] else torch.bfloat16
    return _dtype(worker.said.get("reduce_dtype"), default)


def _mesh(worker: _Worker) -> MeshSpec:
    size, ranks = worker["fsdp_size"], worker.num_ranks
    if size <= 1 or (ranks is not None and size >= ranks):
        return MeshSpec()
    return MeshSpec(shard=size, replicate=-1)


def _recomputing(worker: _Worker) -> ActivationCheckpointing:
    reentrant = worker["model_args.gradient_checkpointing_use_reentrant"]
    if not worker.is_training or worker["model_args.disable_gradient_checkpointing"]:
        return ActivationCheckpointing()
    is_moe = worker.wraps_experts or worker["wrap_policy.moe_experts"] is not None
    return ActivationCheckpointing(checkpoint=True, reentrant=is_moe if reentrant is None else reentrant)


def _wrap(worker: _Worker) -> Wrap:
    classes = _names(worker["wrap_policy.transformer_layer_cls_to_wrap"])
    others: list[tuple[str, Any]] = []
    if worker["wrap_policy.wrap_embeddings"]:
        others.append(("embeddings", True))
    if worker["wrap_policy.wrap_lm_output"]:
        others.append(("output", True))
    if worker.wraps_experts and (experts := _names(worker["wrap_policy.moe_experts"])):
        others.append(("experts", experts))
    return Wrap(kind=WrapKind.CLASSES, classes=classes, others=tuple(others))


def _names(said: str | list[str] | None) -> tuple[str, ...]:
    return () if said is None else (said,) if isinstance(said, str) else tuple(said)


def _extras(worker: _Worker) -> dict[str, Any]:
    extras: dict[str, Any] = {"async_save": worker["async_save_ckpt"]} if worker.is_training else {}
    for key, name in _EXTRAS.items():
        if worker.is_on(key):
            extras[name] = worker[key]
    if worker.is_on("apply_tiled_mlp"):
        extras["tiled_mlp"] = worker["tiled_num_shards"]
    if "max_grad_norm" in worker.top and worker.is_training:
        extras["max_grad_norm"] = worker.top["max_grad_norm"]
    return extras


_EXTRAS = {
    "apply_expert_patch": "expert_patch",
    "ep_size": "expert_parallel",
    "save_only_model": "save_only_model",
    "model_args.ulysses_size": "context_parallel",
    "model_args.freeze_module_prefix": "freeze",
}
