"""The dialect of TorchTitan: read a TOML file into a run, and write a run as a TOML file."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from composer_fsdp2.config.findings import Finding, Outcome
from composer_fsdp2.config.rows import Row, idle, unknown_key
from composer_fsdp2.config.text import nearest_names
from composer_fsdp2.migration.dialect import Dialect, Reading, Section, implicit
from composer_fsdp2.migration.dialects.torchtitan.keys import LIMITS, NAMES, ROWS, units_of
from composer_fsdp2.migration.effective import Effective
from composer_fsdp2.migration.lens import Loss
from composer_fsdp2.migration.paths import Path, find_at, has_path, value_at
from composer_fsdp2.migration.run import RunConfig

_TABLES = ("parallelism", "training", "activation_checkpoint", "checkpoint", "compile")
# Keys of the five tables that concern neither sharding nor memory, in any release up to v0.2.2.
_OTHERS = frozenset(
    f"{table}.{name}"
    for table, names in {
        "training": "dataset dataset_path seq_len gc_freq gc_debug "
        "seed deterministic debug_moe_force_load_balance dataloader warmup_steps",
        "checkpoint": "folder interval interval_type initial_load_path initial_load_in_hf "
        "initial_load_in_hf_quantized load_step exclude_from_loading enable_first_step_checkpoint load_only "
        "create_seed_checkpoint enable_ft_dataloader_checkpoints",
    }.items()
    for name in names.split()
)
# Every file has one of these keys; the names ``training`` and ``checkpoint`` alone are too common.
_OWN_KEYS = (
    "model.flavor",
    "training.mixed_precision_param",
    "training.mixed_precision_reduce",
    "training.local_batch_size",
    "activation_checkpoint.mode",
    *(name for name in NAMES if name.startswith("parallelism.")),
)
_EXTENSIONS = ("job.custom_config_module", "experimental.custom_args_module")
_UNKNOWN = (
    "no release of TorchTitan from v0.1.0 to v0.2.2 knows this key: v0.1.0 passes over it, the others refuse such a "
    "file"
)
# Fields of a file's run that no key sets.
_FIXED = {
    "mixed_precision.cast_forward_inputs": True,
    "state_dict_type": "sharded",
}
# fmt: off
_IMPLICIT = (
    implicit("autocast", Outcome.APPROXIMATE,
        "TorchTitan's FSDP casts parameters and the inputs of units, and uses no torch.autocast",
        "precision: fp32 in Composer leaves casting to FSDP2; amp_bf16 casts by operator as well"),
    implicit("scale of the loss", Outcome.APPROXIMATE,
        "v0.2.2 sums the loss over tokens and divides by those of the whole batch; here, as in earlier releases, it is "
        "averaged over ranks and microbatches",
        "accumulate_train_batch_on_tokens weighs microbatches by their tokens"),
    implicit("state dict", Outcome.APPROXIMATE,
        "TorchTitan's checkpoints are sharded, in the format of torch.distributed.checkpoint",
        "state_dict_type: sharded"),
)
# fmt: on


class TorchTitanDialect(Dialect):
    """A TOML file; a setting's key is ``table.name``."""

    name = target = "torchtitan"
    title = "TorchTitan up to v0.2.2"
    rows = tuple(replace(row, group=row.name.rpartition(".")[0]) for row in ROWS)
    limits = LIMITS
    suffix = ".toml"
    closed_degree = "replicate_degree"  # only the number of shards may be open
    has_own_models = keeps_files = True
    key_prefixes = ("parallelism", "activation_checkpoint", "mixed_precision_", "local_batch_size", "flavor")
    silent = (Section.at(("parallelism",), {"parallelism": {}}),)

    def find(self, path: Path, values: Mapping[str, Any], parent: Mapping[str, Any]) -> Path | None:
        """Return the path of the file's only section: [parallelism], or else its first table in ``_TABLES``."""
        if path or all(find_at(values, name.split(".")) is None for name in _OWN_KEYS):
            return None
        return next(((name,) for name in _TABLES if isinstance(values.get(name), Mapping)), None)

    def read(self, section: Section) -> Reading:
        file = effective(section)
        wrap, description = units_of(section.around)
        units = implicit(
            "units",
            Outcome.APPROXIMATE,
            f"TorchTitan's units stand in its code: {description}; the numbers do not depend on which modules are "
            "units",
        )
        findings = file.findings(
            lambda key, value: _unknown_key_finding(section, key, value), lambda key: _report_name(section, key)
        )
        rows = {_report_name(section, key): row for key, row in NAMES.items() if key in file.given}
        return Reading(
            run=RunConfig.of_fields({**file.fields(), **_FIXED, "wrap": wrap}) if file.is_valid else None,
            findings=(*findings, units, *_IMPLICIT),
            rows=rows | {row.name: row for row in ROWS},
        )

    def own_findings(self, reading: Reading, lost: Sequence[Loss]) -> tuple[Finding, ...]:
        """As ``Dialect.own_findings``.

        A key of an earlier release gets its name in v0.2.2 (the last release with TOML) as hint.
        """
        new = {key: row.name for key, row in reading.rows.items() if key not in (row.name, row.name.split(".", 1)[-1])}
        return tuple(
            replace(each, hint=f"v0.2.2, the last release that reads TOML, calls it {new[each.key]}")
            if each.key in new and not each.outcome.blocks
            else each
            for each in super().own_findings(reading, lost)
        )

    def path_of(self, section: Section, key: str) -> Path:
        return tuple(key.split(".")) if "." in key else (*section.path, key)

    def defaults(self, row: Row) -> Mapping[str, Any]:
        """Return the default, or nothing for None: TOML has no null."""
        return {} if row.default is None else {"": row.default}


def effective(section: Section) -> Effective:
    """Return the keys of the section, and known or misspelt keys of other tables.

    Further keys do not affect sharding.
    """
    own, around = section.place, section.around
    given = {f"{own}.{key}": value for key, value in section.given.items()}
    for name in NAMES:
        if name not in given and has_path(around, name.split(".")):
            given[name] = value_at(around, name.split("."))
    for table in _TABLES:
        others = around.get(table, {})
        if not isinstance(others, Mapping):
            given[table] = others
            continue
        for name in (f"{table}.{key}" for key in others if table != own):
            if name not in given and name not in _OTHERS and nearest_names(name, NAMES, 1, likeness=0.85):
                given[name] = others[name.removeprefix(f"{table}.")]
    return Effective(given=given, rows=NAMES, around=around, mappings=_TABLES)


def _report_name(section: Section, name: str) -> str:
    """Return the name of a key for the report, without the section's table."""
    return name.removeprefix(f"{section.place}.")


def _unknown_key_finding(section: Section, key: str, value: Any) -> Finding:
    """Return the finding of a key without a row."""
    table, _, name = key.rpartition(".")
    known = [each.rpartition(".")[2] for each in (*NAMES, *_OTHERS) if each.rpartition(".")[0] == table]
    extension = next((found for each in _EXTENSIONS if (found := find_at(section.around, each.split(".")))), None)
    hint = f"{extension}, which the file names, may know it" if extension else "remove it"
    finding = replace(unknown_key(name, value, known, _UNKNOWN, hint), key=_report_name(section, key))
    reason = "it has to do with neither sharding nor memory"
    return replace(idle(finding, reason), known=True) if key in _OTHERS else finding
