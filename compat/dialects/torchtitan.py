"""TorchTitan up to v0.2.2: the tables of its TOML that shard, cast, recompute, save and compile.

Later releases have no TOML but a registry in Python. Meanings and defaults: v0.2.2 (``job_config.py``, the models'
``parallelize.py``); names of earlier releases are aliases. TorchTitan trains with FSDP2 already.
"""

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

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
from composer_fsdp2.compat.dialects.rows import Row, as_it_is, deciding, finding_of, unknown_key
from composer_fsdp2.compat.dialects.torchtitan_keys import BY_NAME, DTYPES, EXTRAS, NAMES, ROWS, TABLES, UNKNOWN, UNSAID
from composer_fsdp2.compat.dialects.torchtitan_words import express
from composer_fsdp2.config import ActivationCheckpointing, MeshSpec, ShardingConfig
from composer_fsdp2.findings import Finding, Outcome

__all__ = ["TorchTitanDialect", "tables_of"]


class TorchTitanDialect:
    """See the module."""

    name = "torchtitan"

    def sections(self, values: Mapping[str, Any]) -> list[Path]:
        """One for the whole file: [parallelism], or else the first of the tables that there is."""
        present = [name for name in TABLES if isinstance(values.get(name), Mapping)]
        return [(present[0],)] if present and _is_torchtitan(values) else []

    def read(self, section: Section) -> Reading:
        file = _File.of(section)
        findings = (*_findings(file), *_unsaid(file))
        return Reading(
            run=None if any(_is_bad(file, row) for row in ROWS) else _run(file),
            findings=findings,
            parts=deciding({file.short(key): row.part for key, row in file.rows()}, findings),
        )

    def express(self, run: Run) -> Expression:
        """As tables of TOML; an entry's key is its table and its name (``tables_of`` parts them)."""
        return express(run)

    def rewrite(self, section: Section, reading: Reading) -> list[MappingEdit]:
        """Names of earlier releases become those of v0.2.2; nothing else, for TorchTitan's words are FSDP2's."""
        file = _File.of(section)
        gone: dict[str, dict[str, list[tuple[str, Any]]]] = {}
        come: dict[str, list[tuple[str, Any]]] = {}
        said = {key for key, _ in file.rows()}
        for key, row in file.rows():
            if key == row.name:
                continue
            old, _, old_name = key.rpartition(".")
            new, _, new_name = row.name.rpartition(".")
            is_first = row.name not in said
            said.add(row.name)
            gone.setdefault(old, {})[old_name] = [(new_name, file.said[key])] if is_first and old == new else []
            if is_first and old != new:
                come.setdefault(new, []).append((new_name, file.said[key]))
        return [
            MappingEdit(path=tuple(table.split(".")), replacements=gone.get(table, {}), additions=come.get(table, ()))
            for table in dict.fromkeys((*gone, *come))
        ]

    def own_findings(self, reading: Reading) -> tuple[Finding, ...]:
        """Nothing becomes something else, since TorchTitan's words are FSDP2's."""
        return tuple(as_it_is(reading.findings, "TorchTitan", UNKNOWN))

    def frame(self, section: Section) -> Frame:
        """Its table; another system's section is written to a file of its own."""
        return Frame(entry=section.path, inner=section.path)


def tables_of(expression: Expression) -> dict[Path, dict[str, Any]]:
    """For ``toml_edit.edit_tables``."""
    tables: dict[Path, dict[str, Any]] = {}
    for entry in expression.entries:
        table, _, name = entry.key.rpartition(".")
        tables.setdefault(tuple(table.split(".")), {})[name] = entry.value
    return tables


def _is_torchtitan(values: Mapping[str, Any]) -> bool:
    """By keys that no other system has; ``training`` and ``checkpoint`` alone are common names."""
    return any(_at(values, name) is not None for name in _OWN_WORDS)


_OWN_WORDS = (
    "model.flavor",
    "training.mixed_precision_param",
    "training.mixed_precision_reduce",
    "training.local_batch_size",
    "activation_checkpoint.mode",
    *(name for name in NAMES if name.startswith("parallelism.")),
)


def _at(values: Any, name: str) -> Any:
    for part in name.split("."):
        values = values.get(part) if isinstance(values, Mapping) else None
    return values


@dataclass(frozen=True, slots=True, kw_only=True)
class _File:
    """What a file says, by table and name.

    Args:
        own: The table that is the section; its keys are named without it in the report.
    """

    said: Mapping[str, Any]
    own: str

    @classmethod
    def of(cls, section: Section) -> "_File":
        own = ".".join(map(str, section.path))
        values = dict(section.around)
        said = {f"{own}.{key}": value for key, value in section.said.items()}
        for name in NAMES:
            table = name.rpartition(".")[0]
            if (
                table != own
                and isinstance(_at(values, table), Mapping)
                and name.rpartition(".")[2] in _at(values, table)
            ):
                said[name] = _at(values, name)
        for table in TABLES:  # misspelt keys of the other tables; their many other keys are none of ours
            others = values.get(table)
            for key, value in others.items() if table != own and isinstance(others, Mapping) else ():
                name = f"{table}.{key}"
                if name not in said and name not in _OTHERS and _near(name):
                    said[name] = value
        return cls(said=said, own=own)

    def __getitem__(self, name: str) -> Any:
        row = BY_NAME[name]
        return next((self.said[each] for each in (name, *row.aliases) if each in self.said), row.default)

    def rows(self) -> Iterator[tuple[str, Row]]:
        yield from ((key, NAMES[key]) for key in self.said if key in NAMES)

    def is_on(self, condition: str) -> bool:
        name, _, value = condition.partition(" = ")
        return self[name] == value if value else not BY_NAME[name].is_neutral(self[name])

    def short(self, name: str) -> str:
        return name.removeprefix(f"{self.own}.")


# Keys of the five tables that have to do with neither sharding nor memory, in any release up to v0.2.2.
_OTHERS = frozenset(
    f"{table}.{name}"
    for table, names in {
        "training": "dataset dataset_path local_batch_size global_batch_size batch_size seq_len steps gc_freq gc_debug "
        "seed deterministic debug_moe_force_load_balance dataloader warmup_steps",
        "checkpoint": "folder interval interval_type initial_load_path initial_load_model_only initial_load_in_hf "
        "initial_load_in_hf_quantized load_step exclude_from_loading enable_first_step_checkpoint load_only "
        "create_seed_checkpoint enable_ft_dataloader_checkpoints model_weights_only",
    }.items()
    for name in names.split()
)


def _near(name: str) -> list[str]:
    return difflib.get_close_matches(name, list(NAMES), n=1, cutoff=0.85)


# ---------------------------------------------------------------------------------------------------------------------
# Findings


def _is_bad(file: _File, row: Row) -> bool:
    is_said = any(name in file.said for name in (row.name, *row.aliases))
    is_read = not row.only_with or file.is_on(row.only_with)
    return is_said and is_read and not row.takes.fits(file[row.name])


def _findings(file: _File) -> Iterator[Finding]:
    for key, value in file.said.items():
        row = NAMES.get(key)
        if row is None:
            yield _foreign(file, key, value)
            continue
        if key != row.name and row.name in file.said:
            reason = f"{row.name} says it, too, and goes first"
            yield Finding(key=file.short(key), value=value, outcome=Outcome.UNNEEDED, target="", reason=reason)
            continue
        yield _fate(file, row, file.short(key), value)


def _foreign(file: _File, key: str, value: Any) -> Finding:
    if key in _OTHERS:
        reason = "it has to do with neither sharding nor memory"
        return Finding(key=file.short(key), value=value, outcome=Outcome.UNNEEDED, target="", reason=reason)
    table, _, name = key.rpartition(".")
    known = [each.rpartition(".")[2] for each in BY_NAME if each.rpartition(".")[0] == table]
    return replace(unknown_key(name, value, known, UNKNOWN), key=file.short(key))


def _fate(file: _File, row: Row, key: str, value: Any) -> Finding:
    is_read = not row.only_with or file.is_on(row.only_with)
    finding = finding_of(row, key, value, is_read=is_read)
    if is_read and row.takes.fits(value) and row.name in _DECIDED:
        return _DECIDED[row.name](file, finding)
    return finding


# Keys whose default asks for something, so that a file without them says something all the same.
_TELLING_DEFAULTS = (
    "parallelism.data_parallel_shard_degree",
    "parallelism.fsdp_reshard_after_forward",
    "training.mixed_precision_param",
    "training.mixed_precision_reduce",
    "training.max_norm",
    "activation_checkpoint.mode",
    "activation_checkpoint.selective_ac_option",
)


def _unsaid(file: _File) -> Iterator[Finding]:
    said = {row.name for _, row in file.rows()}
    for name in _TELLING_DEFAULTS:
        row = BY_NAME[name]
        if name not in said and (not row.only_with or file.is_on(row.only_with)):
            yield _fate(file, row, f"(unsaid) {name}", row.default)
    for key, outcome, reason, hint in UNSAID:
        yield Finding(key=key, value="", outcome=outcome, target="", reason=reason, hint=hint)


def _shard_degree(file: _File, finding: Finding) -> Finding:
    if finding.value != 1:
        return finding
    return replace(
        finding,
        outcome=Outcome.APPROXIMATE,
        reason="without shards TorchTitan uses DDP, and torch.autocast for mixed precision; here FSDP2 replicates "
        "whole parameters and casts them",
        hint="leave it: the numbers differ by what is cast",
    )


def _reshard(file: _File, finding: Finding) -> Finding:
    if finding.value == "default" and file.is_on("parallelism.pipeline_parallel_degree"):
        return replace(finding, target="reshard_after_forward: false", reason="not freed, as there is a pipeline")
    if finding.value == "always":
        return replace(
            finding,
            outcome=Outcome.APPROXIMATE,
            reason="all units but the last norm and the output, which stay in the root and gathered here",
        )
    return finding


def _mode(file: _File, finding: Finding) -> Finding:
    if finding.value == "none":
        return replace(finding, outcome=Outcome.UNNEEDED, target="", reason="activations are kept")
    if finding.value == "memory_budget":
        return replace(
            finding,
            outcome=Outcome.NEEDS_DECISION,
            target="",
            reason="the compiler chooses what is recomputed, which needs torch.compile",
            hint="full recomputes more and needs less memory, none the other way round; the numbers stay the same",
        )
    if finding.value == "selective" and file["activation_checkpoint.selective_ac_option"] != "1":
        return replace(
            finding,
            outcome=Outcome.APPROXIMATE,
            reason="all blocks are recomputed instead of some: less memory, more computation, the same numbers",
            hint="the model's activation_checkpointing_fn may choose every n-th block",
        )
    return finding


def _option(file: _File, finding: Finding) -> Finding:
    return replace(finding, outcome=Outcome.EXACT, reason="all blocks") if finding.value == "1" else finding


def _async_mode(file: _File, finding: Finding) -> Finding:
    if finding.value == "async_with_pinned_mem":
        return replace(
            finding, outcome=Outcome.APPROXIMATE, reason="written in the background, without a process of its own"
        )
    return finding


_DECIDED = {
    "parallelism.data_parallel_shard_degree": _shard_degree,
    "parallelism.fsdp_reshard_after_forward": _reshard,
    "activation_checkpoint.mode": _mode,
    "activation_checkpoint.selective_ac_option": _option,
    "checkpoint.async_mode": _async_mode,
}


# ---------------------------------------------------------------------------------------------------------------------
# The run


def _run(file: _File) -> Run:
    reshard = file["parallelism.fsdp_reshard_after_forward"]
    mode = file["activation_checkpoint.mode"]
    has_pipeline = file.is_on("parallelism.pipeline_parallel_degree")
    replicas = file["parallelism.data_parallel_replicate_degree"]
    shards = file["parallelism.data_parallel_shard_degree"]
    return Run(
        config=ShardingConfig(
            # DDP is what TorchTitan does with replicas of one rank each.
            mesh=MeshSpec(shard=shards, replicate=replicas if replicas > 1 else None),
            reshard_after_forward=reshard == "always" or (reshard == "default" and not has_pipeline),
            mixed_precision=MixedPrecisionPolicy(
                param_dtype=DTYPES[file["training.mixed_precision_param"]],
                reduce_dtype=DTYPES[file["training.mixed_precision_reduce"]],
                cast_forward_inputs=True,
            ),
            cpu_offload=file["training.enable_cpu_offload"],
            activation_checkpointing=_recomputing(mode),
        ),
        wrap=Wrap(
            kind=WrapKind.CLASSES, classes=("TransformerBlock",), others=(("embeddings", True), ("output", True))
        ),
        state_dict_type="sharded",
        extras=_extras(file),
    )


def _recomputing(mode: str) -> ActivationCheckpointing:
    return (
        ActivationCheckpointing(checkpoint=True, reentrant=False)
        if mode in ("selective", "full")
        else ActivationCheckpointing()
    )


def _extras(file: _File) -> dict[str, Any]:
    extras = {name: file[key] for key, name in EXTRAS.items() if file.is_on(key)}
    extras["max_grad_norm"] = file["training.max_norm"]
    extras["async_save"] = file.is_on("checkpoint.enable") and file.is_on("checkpoint.async_mode")
    option = file["activation_checkpoint.selective_ac_option"]
    if file["activation_checkpoint.mode"] == "selective" and option != "1":
        extras["selective_checkpointing"] = option
    return extras
