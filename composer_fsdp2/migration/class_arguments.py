"""Explain the arguments of FSDP1's class with ``composer-fsdp2 explain``.

They are in scripts, so no file is migrated.
"""

from composer_fsdp2.config.findings import Finding
from composer_fsdp2.config.rows import Row, undecided
from composer_fsdp2.errors import ConfigError
from composer_fsdp2.fsdp1.class_arguments import BY_NODE, CLASS_ARGUMENTS
from composer_fsdp2.fsdp1.keys import KEYS_BY_NAME
from composer_fsdp2.fsdp1.translate import translate
from composer_fsdp2.migration.dialect import Dialect, Reading, Section

_CLASS = "FullyShardedDataParallel"


class FSDPClass(Dialect):
    """The constructor of ``torch.distributed.fsdp.FullyShardedDataParallel``."""

    name = "fsdp"
    title = "FSDP1's class"
    rows = CLASS_ARGUMENTS
    silent = (Section.at((_CLASS,), {_CLASS: {}}),)

    def places(self, row: Row) -> tuple[str, ...]:
        return (f"{_CLASS}.{row.name}",)

    def read(self, section: Section) -> Reading:
        rows = {name: row for name in section.given if (row := self.row_of(name)) is not None}
        return Reading(run=None, findings=tuple(_finding(row, section.given[name]) for name, row in rows.items()))


def _finding(row: Row, value: object) -> Finding:
    """Return the outcome of one argument.

    If the outcome depends on the value, it is that of the ``fsdp_config`` key.
    """
    if row.decide is None or value is None or row.name not in KEYS_BY_NAME:
        return row.usual(row.name, value)
    given = {row.name: value, **({"process_group": BY_NODE} if "HYBRID" in str(value) else {})}
    try:
        findings = translate(given, precision="fp32", device="cpu").findings
    except ConfigError as error:
        return undecided(row.usual(row.name, value), str(error))
    return next(each for each in findings if each.key == row.name)
