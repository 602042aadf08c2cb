"""Write the tables that the documents share with the code; ``--check`` only says whether they are current.

``make docs`` runs it. Each table stands between two markers in its file, and comes from
``composer_fsdp2/fsdp1/keys.py``.
"""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from composer_fsdp2.fsdp1.keys import KEYS, Key, Origin

ROOT = Path(__file__).resolve().parent.parent


def keys_table(*origins: Origin) -> Iterator[str]:
    """One row per key: what it meant, what becomes of it."""
    yield "| key | default | meant | under FSDP2 | where it goes |"
    yield "|---|---|---|---|---|"
    for key in KEYS:
        if key.origin in origins:
            fate = f"**{key.outcome.value}**: {key.reason}"
            yield f"| `{key.name}` | `{_default(key)}` | {key.meaning} | {fate} | {key.target} |"


def short_table() -> Iterator[str]:
    """What a reader of the README wants to know: key, outcome, target."""
    yield "| key | outcome | becomes |"
    yield "|---|---|---|"
    for key in KEYS:
        if key.origin in (Origin.FSDP1, Origin.FSDP2):
            yield f"| `{key.name}` | {key.outcome.value} | {key.target or key.reason} |"


def _default(key: Key) -> str:
    return {None: "null", True: "true", False: "false"}.get(key.default, str(key.default))


TABLES: dict[str, Callable[[], Iterator[str]]] = {
    "README.md:keys": short_table,
    "migration_docs/keys.md:fsdp1": lambda: keys_table(Origin.FSDP1),
    "migration_docs/keys.md:fsdp2": lambda: keys_table(Origin.FSDP2, Origin.OURS),
    "migration_docs/keys.md:legacy": lambda: keys_table(Origin.LEGACY),
}


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
