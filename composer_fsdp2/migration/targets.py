"""The target systems of a migration, and the text of a file that contains only a target's section."""

from collections.abc import Mapping
from typing import Any

from composer_fsdp2.migration.dialect import Dialect
from composer_fsdp2.migration.dialects import DIALECTS

# Keyed by the values of ``--to``.
TARGETS: dict[str, Dialect] = {dialect.target: dialect for dialect in DIALECTS.values()}


def file_text(target: Dialect, values: Mapping[str, Any], source: str) -> str:
    """Return the text of a new file of the target system with these values.

    Args:
        source: The name of the source file, for the comment in the first line.
    """
    from composer_fsdp2.migration.documents import format_of  # imported here: --help needs the names only

    head = f"# {source} in keys of {target.target}, written by composer-fsdp2 migrate."
    return "\n".join((head, *format_of(target.suffix).lines(values))) + "\n"
