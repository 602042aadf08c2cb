"""``composer-fsdp2 explain KEY|--all``: what a key did under FSDP1 and is under FSDP2, in every dialect."""

import json
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

import typer

from composer_fsdp2.config.findings import Finding
from composer_fsdp2.migration import explain as explaining
from composer_fsdp2.migration.dialects import DIALECTS
from composer_fsdp2.migration.explain import Explanation

if TYPE_CHECKING:
    from rich.table import Table

_NAMES = " or ".join(", ".join(DIALECTS).rsplit(", ", 1))


def explain(
    context: typer.Context,
    key: str = typer.Argument(
        None, metavar="KEY", help="As it stands in a file: KEY, PATH.KEY, or KEY=VALUE for what becomes of a value."
    ),
    everything: bool = typer.Option(False, "--all", help="Every key of every dialect."),
    dialect: str = typer.Option(None, "--dialect", help=f"Only this dialect: {_NAMES}."),
    as_json: bool = typer.Option(False, "--json", help="Print JSON."),
) -> None:
    """Print what a key of a configuration did under FSDP1, and what it is under FSDP2.

    Exit code: 0, or 2 if no dialect knows the key.
    """
    if (key is None) != everything:
        raise typer.BadParameter("give a KEY, or --all")
    context.obj.append(partial(_explain, key, dialect, as_json=as_json))


def _explain(key: str | None, dialect: str | None, *, as_json: bool) -> None:
    if dialect is not None and dialect not in DIALECTS:
        _refuse(f"there is no dialect {dialect}; choose one of {', '.join(DIALECTS)}")
    found = explaining.all_keys(dialect) if key is None else explaining.explain(key, dialect=dialect)
    implicit = explaining.implicit_settings(dialect) if key is None else {}
    if not found:
        assert key is not None
        _refuse(_unknown(key, dialect))
    if as_json:
        told = {name: [finding.to_json() for finding in findings] for name, findings in implicit.items()}
        print(json.dumps({"keys": [each.to_json() for each in found], "implicit": told}, indent=2, default=str))
    elif key is not None:
        print("\n\n".join(map(str, found)))
    else:
        _show_all(found, implicit)


def _refuse(message: str) -> None:
    print(f"composer-fsdp2: {message}", file=sys.stderr)
    sys.exit(2)


def _unknown(key: str, dialect: str | None) -> str:
    whose = "no dialect" if dialect is None else f"{dialect} does not"
    lines = [f"{whose} know{'s' if dialect is None else ''} {key}"]
    others = dict.fromkeys(each.dialect.name for each in explaining.explain(key)) if dialect else {}
    if others:
        lines.append(f"  known to: {', '.join(others)}")
    near = explaining.nearest(key, dialect=dialect)
    lines += [f"  near it in {name}: {', '.join(names)}" for name, names in near.items()]
    return "\n".join(lines if others or near else [*lines, "  --all lists every key"])


# ---------------------------------------------------------------------------------------------------------------------
# All keys


def _show_all(found: Sequence[Explanation], implicit: dict[str, list[Finding]]) -> None:
    """Tables to a terminal; elsewhere the same blocks as for one key, for pipes."""
    from rich.console import Console  # here and not above: one key needs none of it

    console = Console()
    names = dict.fromkeys(each.dialect.name for each in found)
    for name in names:
        rows = [each for each in found if each.dialect.name == name]
        if console.is_terminal:
            console.print(_table(name, rows), *_implicit_lines(implicit.get(name, [])), sep="\n", markup=False)
        else:
            print("\n\n".join(map(str, rows)), *_implicit_lines(implicit.get(name, [])), sep="\n", end="\n\n")


def _table(name: str, rows: Sequence[Explanation]) -> "Table":
    from rich.table import Table
    from rich.text import Text

    table = Table(title=name, title_justify="left", show_lines=False)
    for heading, ratio in (("key", 3), ("default", 2), ("meant", 4), ("FSDP2", 5)):
        table.add_column(heading, ratio=ratio, overflow="fold")
    for each in rows:
        row = each.row
        fate = f"{row.outcome.value}: {row.target or row.reason}"
        table.add_row(*(Text(text) for text in (row.name, each.default_text(), row.meaning, fate)))
    return table


def _implicit_lines(findings: Sequence[Finding]) -> Iterator[str]:
    if findings:
        yield "what is implicit:"
    for finding in findings:
        hint = f" ({finding.hint})" if finding.hint else ""
        yield f"  {finding.key}: {finding.outcome.value}: {finding.reason}{hint}"
