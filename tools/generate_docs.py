"""Write the tables that the documents share with the code; ``--check`` only says whether they are current.

``make docs`` runs it. Each table stands between two markers in its file, and comes from the dialects' tables of keys
(Composer's is ``composer_fsdp2/fsdp1/keys.py``, the others are in ``compat/dialects``) by way of ``compat/explain.py``.
"""

import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from composer_fsdp2.compat.dialects.huggingface_keys import Place, Source
from composer_fsdp2.compat.dialects.key_rows import KeyRow
from composer_fsdp2.compat.explain import all_keys, default_text, unsaid, value_text
from composer_fsdp2.findings import Outcome
from composer_fsdp2.fsdp1.keys import KEYS, Origin

ROOT = Path(__file__).resolve().parent.parent


def keys_table(dialect: str, *groups: str) -> Iterator[str]:
    """One row per key: what it meant, what becomes of it. Without groups all of the dialect's."""
    rows = [each.row for each in all_keys(dialect) if each.row.group in groups or not groups]
    reads = any(row.read_by for row in rows)
    elsewhere = ["without composer_fsdp2"] if any(row.elsewhere for row in rows) else []
    read_by = ["read by"] if reads else []
    yield from _table("key", "default", "meant", *read_by, "under FSDP2", "where it goes", *elsewhere)
    for row in rows:
        read_by = [_readers(row)] if reads else []
        plain = [row.elsewhere] if elsewhere else []
        fate = _fate(row.outcome, row.reason, row.hint)
        yield _line(_key(row), default_text(row, quote="`"), _meaning(row), *read_by, fate, row.target, *plain)


def values_table(dialect: str) -> Iterator[str]:
    """The values with another outcome than their key, but those that ask for nothing."""
    yield from _table("key", "value", "under FSDP2", "where it goes")
    for each in all_keys(dialect):
        for fate in each.fates:
            found = fate.finding
            if found.outcome not in (each.row.outcome, Outcome.UNNEEDED):
                readers = f" ({'; '.join(fate.readers)})" if fate.readers != each.row.read_by else ""
                told = _fate(found.outcome, found.reason, found.hint)
                yield _line(f"`{each.row.name}`", f"`{value_text(fate.value)}`{readers}", told, found.target)


def unsaid_table(dialect: str) -> Iterator[str]:
    """What a run of the dialect does that no key says."""
    yield from _table("what", "under FSDP2", "where it goes")
    for finding in unsaid(dialect)[dialect]:
        told = _fate(finding.outcome, finding.reason, finding.hint)
        yield _line(finding.key.removeprefix("(unsaid) "), told, finding.target)


def short_table() -> Iterator[str]:
    """What a reader of the README wants to know: key, outcome, target."""
    yield from _table("key", "outcome", "becomes")
    for key in KEYS:
        if key.origin in (Origin.FSDP1, Origin.FSDP2):
            yield _line(f"`{key.name}`", key.outcome.value, key.target or key.reason)


def _table(*headings: str) -> Iterator[str]:
    yield _line(*headings)
    yield "|" + "---|" * len(headings)


def _line(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _key(row: KeyRow) -> str:
    aliases = f" (also {', '.join(f'`{alias}`' for alias in row.aliases)})" if row.aliases else ""
    return f"`{row.name}`{aliases}"


def _readers(row: KeyRow) -> str:
    return "all" if len(row.read_by) == len(Source) else "; ".join(row.read_by)


def _meaning(row: KeyRow) -> str:
    return row.meaning + (f"; read with `{row.only_with}` only" if row.only_with else "")


def _fate(outcome: Outcome, reason: str, hint: str) -> str:
    return f"**{outcome.value}**" + (f": {reason}" if reason else "") + (f" ({hint})" if hint else "")


TABLES: dict[str, Callable[[], Iterator[str]]] = {
    "README.md:keys": short_table,
    "migration_docs/keys.md:fsdp1": partial(keys_table, "composer", Origin.FSDP1.value),
    "migration_docs/keys.md:fsdp2": partial(keys_table, "composer", Origin.FSDP2.value, Origin.OURS.value),
    "migration_docs/keys.md:legacy": partial(keys_table, "composer", Origin.LEGACY.value),
    "migration_docs/keys.md:composer beside": partial(keys_table, "composer", "beside fsdp_config"),
    "migration_docs/keys.md:composer values": partial(values_table, "composer"),
    "migration_docs/keys.md:composer unsaid": partial(unsaid_table, "composer"),
}
for _place in Place:
    TABLES[f"migration_docs/keys.md:huggingface {_place.value}"] = partial(keys_table, "huggingface", _place.value)
for _dialect in ("huggingface", "roll", "torchtitan"):
    if _dialect != "huggingface":
        TABLES[f"migration_docs/keys.md:{_dialect}"] = partial(keys_table, _dialect)
    TABLES[f"migration_docs/keys.md:{_dialect} values"] = partial(values_table, _dialect)
    TABLES[f"migration_docs/keys.md:{_dialect} unsaid"] = partial(unsaid_table, _dialect)


def main(arguments: list[str]) -> int:
    stale = []
    for target, table in TABLES.items():
        name, _, marker = target.partition(":")
        path = ROOT / name
        text = path.read_text()
        new = with_table(text, marker, "\n".join(table()))
        if new != text:
            stale.append(target)
            if "--check" not in arguments:
                path.write_text(new)
    for target in stale:
        print(f"{target}: {'out of date; run make docs' if '--check' in arguments else 'written'}")
    return 1 if stale and "--check" in arguments else 0


def with_table(text: str, marker: str, table: str) -> str:
    """``text`` with the part between the two comments of ``marker`` replaced."""
    begin, end = f"<!-- begin {marker} -->\n", f"<!-- end {marker} -->"
    if text.count(begin) != 1 or text.count(end) != 1:
        raise SystemExit(f"expected one {begin.strip()} and one {end}")
    before, _, rest = text.partition(begin)
    return before + begin + table + "\n" + end + rest.partition(end)[2]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
