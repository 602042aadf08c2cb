"""A finding for each key of a file, and for what TorchTitan does without being told."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from composer_fsdp2.config.findings import Finding, Origin, Outcome
from composer_fsdp2.config.rows import Row, finding_of, idle, unknown_key
from composer_fsdp2.migration.dialect import implicit
from composer_fsdp2.migration.dialects.torchtitan.model_units import OWN_UNITS, USUAL_UNITS
from composer_fsdp2.migration.dialects.torchtitan.toml_file import OTHERS, TABLES, File
from composer_fsdp2.migration.dialects.torchtitan.toml_keys import NAMES, ROWS

_UNKNOWN = (
    "no release of TorchTitan from v0.1.0 to v0.2.2 knows this key: v0.1.0 passes over it, the others refuse such a "
    "file"
)
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


def is_bad(file: File, row: Row) -> bool:
    is_given = any(name in file.given for name in (row.name, *row.aliases))
    return is_given and file.is_read(row) and not row.takes.fits(file[row.name])


def findings_of(file: File) -> Iterator[Finding]:
    for key, value in file.given.items():
        row = NAMES.get(key)
        if key in TABLES:
            usual = Finding(
                key=key, value=value, outcome=Outcome.NEEDS_DECISION, reason="it is a table of TorchTitan's"
            )
            yield replace(usual, hint="write its keys below it, or remove it")
        elif row is None:
            yield _foreign(file, key, value)
        elif key != row.name and row.name in file.given:
            yield idle(row.usual(file.short(key), value), f"{row.name} says it, too, and takes precedence")
        else:
            yield _finding(file, row, file.short(key), value)
    given = {row.name for _, row in file.rows()}
    for row in ROWS:
        if row.tells_default and row.name not in given and file.is_read(row):
            yield replace(_finding(file, row, row.name, row.default), origin=Origin.IMPLICIT)
    yield _units(file)
    yield from _IMPLICIT


def _units(file: File) -> Finding:
    own = OWN_UNITS.get(file.model)
    return implicit(
        "units",
        Outcome.APPROXIMATE,
        f"TorchTitan's units stand in its code: {USUAL_UNITS if own is None else own.told}; the numbers do not depend "
        "on which modules are units",
    )


def _foreign(file: File, key: str, value: Any) -> Finding:
    table, _, name = key.rpartition(".")
    known = [each.rpartition(".")[2] for each in (*NAMES, *OTHERS) if each.rpartition(".")[0] == table]
    hint = f"{file.extension}, which the file names, may know it" if file.extension else "remove it"
    finding = replace(unknown_key(name, value, known, _UNKNOWN, hint), key=file.short(key))
    reason = "it has to do with neither sharding nor memory"
    return replace(idle(finding, reason), known=True) if key in OTHERS else finding


def _finding(file: File, row: Row, key: str, value: Any) -> Finding:
    is_read = file.is_read(row)
    finding = finding_of(row, key, value, is_read=is_read)
    decides = row.decide is not None and is_read and row.takes.fits(value)
    return row.decide(finding, file) if decides else finding  # type: ignore[misc]
