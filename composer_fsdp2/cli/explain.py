"""``composer-fsdp2 explain KEY|VALUE|--all``: print the effect of a key or value under FSDP1 and FSDP2."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from composer_fsdp2.cli.options import Command, schema_option
from composer_fsdp2.cli.printing import print_json, print_report, refuse
from composer_fsdp2.config.findings import Finding
from composer_fsdp2.config.text import printable
from composer_fsdp2.migration import explain as explaining
from composer_fsdp2.migration.explain import EXPLAINED, Answer, Explanation

if TYPE_CHECKING:
    from rich.table import Table


@dataclass(frozen=True, slots=True, kw_only=True)
class Explain(Command):
    """Print the effect of a configuration's key or value under FSDP1, and its counterpart under FSDP2.

    Exit code: 0, or 2 if no dialect has it.
    """

    query: Annotated[
        str | None,
        typer.Argument(
            metavar="KEY|VALUE",
            autocompletion=explaining.names_with_prefix,
            help="As in a file: KEY, PATH.KEY, a VALUE such as HYBRID_SHARD, or KEY=VALUE.",
        ),
    ] = None
    everything: Annotated[bool, typer.Option("--all", help="Every key of every dialect.")] = False
    dialect: Annotated[
        str | None,
        typer.Option(
            "--dialect",
            help=f"Only this dialect: {' or '.join(', '.join(EXPLAINED).rsplit(', ', 1))}.",
            autocompletion=lambda: EXPLAINED,
        ),
    ] = None
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False
    json_schema: Annotated[bool, schema_option("composer_fsdp2.migration.explain")] = False

    def __post_init__(self) -> None:
        if (self.query is None) != self.everything:
            raise typer.BadParameter("give a KEY or a VALUE, or --all")

    def __call__(self) -> None:
        answer = _answer(self.query, self.dialect)
        if self.as_json:
            print_json(answer.to_json())
        elif self.query is not None:
            for number, key in enumerate(answer.keys):
                print_report(f"\n{key}" if number else str(key))
        else:
            _show_all(answer.keys, answer.implicit)
        print(end="", flush=True)  # raises BrokenPipeError here if the reader has ended
        if answer.error:
            refuse(answer.error)


def _answer(query: str | None, dialect: str | None) -> Answer:
    if dialect is not None and dialect not in EXPLAINED:
        return Answer(error=f"unknown dialect {printable(dialect)}; choose one of {', '.join(EXPLAINED)}")
    if query is None:
        return Answer(keys=explaining.all_keys(dialect), implicit=explaining.implicit_settings(dialect))
    found = explaining.explain(query, dialect=dialect)
    if found:
        return Answer(keys=found)
    near = explaining.nearest(query, dialect=dialect)
    return Answer(near=near, error=_unknown(query, dialect, near))


def _unknown(query: str, dialect: str | None, near: dict[str, list[str]]) -> str:
    subject = "no dialect has" if dialect is None else f"{dialect} does not have"
    lines = [f"{subject} {printable(query) or 'a key without a name'}"]
    others = dict.fromkeys(each.dialect.name for each in explaining.explain(query)) if dialect else {}
    if others:
        lines.append(f"  found in: {', '.join(others)}")
    lines += [f"  similar in {name}: {', '.join(names)}" for name, names in near.items()]
    return "\n".join(lines if others or near else [*lines, "  --all lists every key"])


# ---------------------------------------------------------------------------------------------------------------------
# All keys


def _show_all(found: Sequence[Explanation], implicit: Mapping[str, Sequence[Finding]]) -> None:
    """Print tables to a terminal, and one block per key to a pipe."""
    from rich.console import Console  # imported here: one key does not need it

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
        yield "without a key:"
    for finding in findings:
        hint = f" ({finding.hint})" if finding.hint else ""
        yield f"  {finding.key}: {finding.outcome.value}: {finding.reason}{hint}"
