"""Regenerate the tables of the pages and the migrated runs in ``yamls/``. ``--check`` compares and writes nothing.

``make docs`` runs it. Each table is between two markers in its file. It is made by ``migration/explain.py`` from the
dialects' tables of keys (``composer_fsdp2/fsdp1/keys.py`` for Composer, ``migration/dialects`` for the others), or from
the rows that a test measures (``tests/support/trainer_parts.py``). ``tools/rooms.py`` makes the drawing in
CONTRIBUTING.md. The right-hand file of each pair in ``yamls/`` is the output of ``composer-fsdp2 migrate --force`` for
the left-hand file, byte for byte.
"""

import sys
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path

from composer_fsdp2.config.findings import Outcome
from composer_fsdp2.fsdp1.keys import KeyGroup
from composer_fsdp2.migration.dialects import DIALECTS
from composer_fsdp2.migration.explain import Explanation, all_keys, implicit_settings, value_text
from composer_fsdp2.migration.migrate import migrate_text

ROOT = Path(__file__).resolve().parent.parent
sys.path += [str(ROOT / "tests"), str(ROOT / "tools")]

from rooms import drawing  # noqa: E402
from support import trainer_parts  # type: ignore[import-not-found]  # noqa: E402


def keys_table(dialect: str, *groups: str) -> Iterator[str]:
    """One row per key: its meaning and its outcome. Without ``groups``, all keys of the dialect."""
    found = [each for each in all_keys(dialect) if each.row.group in groups or not groups]
    reads = any(each.read_by for each in found)
    elsewhere = ["without composer_fsdp2"] if any(each.row.elsewhere for each in found) else []
    yield from _table(
        "key", "default", "meaning", *(["read by"] if reads else []), "under FSDP2", "FSDP2 target", *elsewhere
    )
    for each in found:
        row = each.row
        read_by = [_readers(each)] if reads else []
        plain = [row.elsewhere] if elsewhere else []
        value_outcome = _outcome_text(row.outcome, row.reason, row.hint)
        yield _line(
            _key(each), each.default_text(quote="`"), _meaning(each), *read_by, value_outcome, row.target, *plain
        )


def values_table(dialect: str) -> Iterator[str]:
    """The values whose outcome differs from their key's, except ``UNNEEDED`` ones."""
    yield from _table("key", "value", "under FSDP2", "FSDP2 target")
    for each in all_keys(dialect):
        for value_outcome in each.value_outcomes:
            found = value_outcome.finding
            if found.outcome not in (each.row.outcome, Outcome.UNNEEDED):
                readers = f" ({'; '.join(value_outcome.readers)})" if value_outcome.readers != each.read_by else ""
                outcome_text = _outcome_text(found.outcome, found.reason, found.hint)
                yield _line(
                    f"`{each.row.name}`", f"`{value_text(value_outcome.value)}`{readers}", outcome_text, found.target
                )


def implicit_table(dialect: str) -> Iterator[str]:
    """The settings of a dialect's runs that have no key."""
    yield from _table("what", "under FSDP2", "FSDP2 target")
    for finding in implicit_settings(dialect)[dialect]:
        yield _line(finding.key, _outcome_text(finding.outcome, finding.reason, finding.hint), finding.target)


def parts_table(rows: Iterable[trainer_parts.Row]) -> Iterator[str]:
    """One row for each algorithm, callback or optimizer: FSDP1's result and ours."""
    yield from _table("class", "tried on", "under FSDP1", "with composer_fsdp2", "what to know")
    for row in rows:
        theirs = row.fsdp1 if row.fsdp1 in ("trains", "hangs") else f"raises: {row.fsdp1}"
        yield _line(
            row.title, _tried(row), theirs if row.is_run or row.fsdp1 != "trains" else "", _outcome(row), row.why
        )


def _tried(row: trainer_parts.Row) -> str:
    return row.model or (f"`{row.test}`" if row.test else "")


def _outcome(row: trainer_parts.Row) -> str:
    if row.test:
        return "as FSDP1, compared there"
    beside = "" if row.beside is trainer_parts.Beside.FSDP1 else f" as {row.beside.value}"
    return f"**{row.ours.value}**{beside}"


def _table(*headings: str) -> Iterator[str]:
    yield _line(*headings)
    yield "|" + "---|" * len(headings)


def _line(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _key(each: Explanation) -> str:
    aliases = each.dialect.aliases(each.row)
    return f"`{each.row.name}`" + (f" (also {', '.join(f'`{alias}`' for alias in aliases)})" if aliases else "")


def _readers(each: Explanation) -> str:
    return "all" if set(each.read_by) == set(each.dialect.readers) else "; ".join(each.read_by)


def _meaning(each: Explanation) -> str:
    row = each.row
    return row.meaning + (f"; read with `{row.only_with}` only" if row.only_with else "")


def _outcome_text(outcome: Outcome, reason: str, hint: str) -> str:
    return f"**{outcome.value}**" + (f": {reason}" if reason else "") + (f" ({hint})" if hint else "")


TABLES: dict[str, Callable[[], Iterator[str]]] = {
    "migration_docs/keys.md:fsdp1": partial(keys_table, "composer", KeyGroup.FSDP1),
    "migration_docs/keys.md:fsdp2": partial(keys_table, "composer", KeyGroup.FSDP2, KeyGroup.OURS),
    "migration_docs/keys.md:legacy": partial(keys_table, "composer", KeyGroup.LEGACY),
    "migration_docs/keys.md:composer beside": partial(keys_table, "composer", "beside fsdp_config"),
    "migration_docs/keys.md:composer values": partial(values_table, "composer"),
    "migration_docs/keys.md:composer implicit": partial(implicit_table, "composer"),
}
TABLES["CONTRIBUTING.md:rooms"] = drawing
TABLES["migration_docs/fsdp-class.md:fsdp"] = partial(keys_table, "fsdp")
for _group in dict.fromkeys(row.group for row in DIALECTS["huggingface"].rows):
    TABLES[f"migration_docs/keys.md:huggingface {_group}"] = partial(keys_table, "huggingface", _group)
for _dialect in ("huggingface", "axolotl", "roll", "torchtitan"):
    if _dialect != "huggingface":
        TABLES[f"migration_docs/keys.md:{_dialect}"] = partial(keys_table, _dialect)
    TABLES[f"migration_docs/keys.md:{_dialect} values"] = partial(values_table, _dialect)
    TABLES[f"migration_docs/keys.md:{_dialect} implicit"] = partial(implicit_table, _dialect)
for _name in ("algorithms", "callbacks", "foundry", "optimizers"):
    TABLES[f"migration_docs/algorithms.md:{_name}"] = partial(parts_table, getattr(trainer_parts, _name.upper()))


# The suffixes of a pair in yamls/: the original file, and the output of migrate.
SIDES = {"-fsdp1.yaml": "-fsdp2.yaml", "-roll.yaml": "-composer.yaml", "-torchtitan.toml": "-composer.yaml"}


def migrated_runs() -> Iterator[tuple[str, bytes]]:
    """Yield the path and the content of each right-hand file."""
    for left in sorted((ROOT / "yamls").glob("*/*")):
        for end, right in SIDES.items():
            if left.name.endswith(end):
                text = migrate_text(left.read_bytes().decode(), left.name, to="composer").after
                yield f"yamls/{left.parent.name}/{left.name.removesuffix(end)}{right}", text.encode()


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
    for name, content in migrated_runs():
        path = ROOT / name
        if not path.exists() or path.read_bytes() != content:
            stale.append(name)
            if "--check" not in arguments:
                path.write_bytes(content)
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
