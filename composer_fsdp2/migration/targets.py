"""What a configuration can be migrated to, and a file that holds a section of it only."""

from collections.abc import Mapping
from typing import Any

from composer_fsdp2.migration.dialect import Dialect
from composer_fsdp2.migration.dialects import DIALECTS

# By the word that ``--to`` takes.
TARGETS: dict[str, Dialect] = {dialect.target: dialect for dialect in DIALECTS.values()}


def file_text(target: Dialect, values: Mapping[str, Any], source: str) -> str:
    """The values in a file of the target.

    Args:
        source: The name of the file that asked for it.
    """
    from composer_fsdp2.migration.documents import format_of  # here and not above: --help needs the names only

    head = f"# What {source} asks for, in the words of {target.target}; written by composer-fsdp2 migrate."
    return "\n".join((head, *format_of(target.suffix).lines(values))) + "\n"
