"""TorchTitan's dialect: what a TOML file asks for, and a run in its words."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from composer_fsdp2.config.findings import Finding
from composer_fsdp2.config.rows import Row
from composer_fsdp2.config.sharding import LOW_PRECISION
from composer_fsdp2.migration.dialect import (
    Dialect,
    Expression,
    Question,
    Reading,
    Section,
    Setting,
    deciding,
)
from composer_fsdp2.migration.dialects.torchtitan.toml_file import TABLES, File, at
from composer_fsdp2.migration.dialects.torchtitan.toml_findings import findings_of, is_bad
from composer_fsdp2.migration.dialects.torchtitan.toml_keys import BY_NAME, NAMES, ROWS
from composer_fsdp2.migration.dialects.torchtitan.toml_run import PARALLELISMS, run_of
from composer_fsdp2.migration.dialects.torchtitan.torchtitan_lacks import LACKS, shards_of
from composer_fsdp2.migration.dialects.torchtitan.torchtitan_patch import patch_steps
from composer_fsdp2.migration.patch import Patch, PatchStep
from composer_fsdp2.migration.paths import Path, merged, nested
from composer_fsdp2.migration.run import RunConfig

OWN_WORDS = (
    "model.flavor",
    "training.mixed_precision_param",
    "training.mixed_precision_reduce",
    "training.local_batch_size",
    "activation_checkpoint.mode",
    *(name for name in NAMES if name.startswith("parallelism.")),
)


class TorchTitanDialect(Dialect):
    """A TOML file; a setting's key is its table and its name."""

    name = target = "torchtitan"
    title = "TorchTitan up to v0.2.2"
    rows = tuple(replace(row, group=row.name.rpartition(".")[0]) for row in ROWS)
    lacks = LACKS
    suffix = ".toml"
    has_own_models = keeps_files = True
    words = ("parallelism", "activation_checkpoint", "mixed_precision_", "local_batch_size", "flavor")
    silent = (Section.at(("parallelism",), {"parallelism": {}}),)

    def find(self, path: Path, values: Mapping[str, Any], parent: Mapping[str, Any]) -> Path | None:
        """One for the whole file: [parallelism], or else the first of the tables that there is."""
        if path or all(at(values, name) is None for name in OWN_WORDS):
            return None  # ``training`` and ``checkpoint`` alone are common names
        return next(((name,) for name in TABLES if isinstance(values.get(name), Mapping)), None)

    def read(self, section: Section) -> Reading:
        file = File.of(section, NAMES)
        findings = tuple(findings_of(file))
        return Reading(
            run=None if any(is_bad(file, row) for row in ROWS) or file.given.keys() & {*TABLES} else run_of(file),
            findings=findings,
            aspects=deciding({file.short(key): row.aspect for key, row in file.rows()}, findings),
            rows={row.name: row for row in ROWS} | {file.short(key): row for key, row in file.rows()},
            details=file,
        )

    def own_findings(self, reading: Reading) -> tuple[Finding, ...]:
        """As before; of a name of an earlier release, what the last one that reads such a file calls it."""
        file: File = reading.details
        new = {file.short(key): row.name for key, row in file.rows() if key != row.name}
        return tuple(
            replace(each, hint=f"v0.2.2, the last release that reads TOML, calls it {new[each.key]}")
            if each.key in new and not each.outcome.blocks
            else each
            for each in super().own_findings(reading)
        )

    def express(self, run: RunConfig) -> Expression:
        """With a number of replicas where the number of ranks tells it: TorchTitan leaves the shards open only."""
        mesh = run.config.mesh
        is_open = not mesh.is_grouped and mesh.replicate_degree == -1
        return super().express(run.with_degrees() if is_open else run)

    def settings(self, run: RunConfig) -> Iterator[Setting]:
        config, recomputes = run.config, run.config.activation_checkpointing.checkpoint
        selective = run.selective_checkpointing if recomputes else None
        mesh, parallel = config.mesh, {kind: getattr(run, kind) for kind in ("context_parallel", *PARALLELISMS)}
        shards, has_degrees = shards_of(run), not mesh.is_grouped and mesh.replicate_degree != -1
        freed = "default" if run.pipeline_parallel == 1 else "always"
        is_low = config.mixed_precision.param_dtype in LOW_PRECISION
        for key, value, is_needed in (
            ("parallelism.data_parallel_replicate_degree", mesh.replicate_degree, has_degrees),
            ("parallelism.data_parallel_shard_degree", shards, has_degrees and shards),
            ("parallelism.fsdp_reshard_after_forward", freed if config.reshard_after_forward else "never", True),
            *((f"parallelism.{kind}_degree", degree, degree != 1) for kind, degree in parallel.items()),
            ("compile.enable", True, run.compile),
            ("training.mixed_precision_param", "bfloat16" if is_low else "float32", True),
            ("training.mixed_precision_reduce", "float32", True),
            ("training.dtype", run.stored_dtype, run.stored_dtype == "bfloat16"),
            ("training.enable_cpu_offload", config.cpu_offload, True),
            ("training.max_norm", run.max_grad_norm, run.max_grad_norm is not None),
            ("activation_checkpoint.mode", "selective" if selective else "full" if recomputes else "none", True),
            ("activation_checkpoint.selective_ac_option", str(selective), selective),
            ("checkpoint.enable", True, run.async_save),
            ("checkpoint.async_mode", "async", run.async_save),
        ):
            if is_needed:
                yield Setting(aspect=BY_NAME[key].aspect, key=key, value=value)

    def patch_steps(self, patch: Patch, section: Section, reading: Reading) -> Iterator[PatchStep]:
        yield from patch_steps(patch, File.of(section, NAMES))

    def defaults(self, row: Row) -> Mapping[str, Any]:
        """TOML has no null: a default of None decides nothing."""
        return {} if row.default is None else {"": row.default}

    def questions(self, row: Row, value: Any) -> Iterator[Question]:
        values: dict[str, Any] = {"parallelism": {}}
        for name, each in {**self.switched_on(row), row.name: value}.items():
            values = merged(values, nested(name, each))
        yield Question(section=Section.at(("parallelism",), values), key=row.name.removeprefix("parallelism."))
