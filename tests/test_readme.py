"""The first screen of the README, and the links between the pages."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

from composer_fsdp2.cli.main import app

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
PAGES = [
    README,
    *(ROOT / name for name in ("CONTRIBUTING.md", "CHANGELOG.md", "benchmarks/README.md", "yamls/README.md")),
]
PAGES += sorted((ROOT / "migration_docs").glob("*.md"))


def prose(page: Path) -> str:
    """A page without its fenced blocks."""
    return re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)


def anchors(page: Path) -> set[str]:
    """GitHub's anchors for the headings of a page."""
    found: list[str] = []
    for title in re.findall(r"^#+ (.+)$", prose(page), flags=re.MULTILINE):
        slug = re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")
        count = sum(re.sub(r"-\d+$", "", known) == slug for known in found)
        found.append(f"{slug}-{count}" if count else slug)
    return set(found)


def broken_links(page: Path) -> Iterator[str]:
    for link in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if "://" in link:
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            yield f"{page.relative_to(ROOT)}: {link}"


def test_every_link_leads_somewhere():
    """Every link from the README or a page leads to an existing file and heading."""
    assert [broken for page in PAGES for broken in broken_links(page)] == []


def test_every_page_is_in_the_index():
    index = (ROOT / "migration_docs/README.md").read_text()
    names = {page.name for page in (ROOT / "migration_docs").glob("*.md")} - {"README.md"}
    assert {name for name in names if f"]({name})" not in index} == set()


def test_the_readme_is_short():
    """Install, the one-line change, proof and limits appear before a reader has scrolled twice."""
    lines = README.read_text().split("\n")
    assert len(lines) <= 150
    headings = [line for line in lines if line.startswith("## ")]
    assert headings[:4] == ["## Install", "## Change one line", "## What stays the same", "## Limits"]


def commands() -> list[list[str]]:
    """The arguments of every ``composer-fsdp2`` command in the README, except those that launch training."""
    found = re.findall(r"composer-fsdp2 ([a-z][^`\n#]*)", README.read_text())
    return [shlex.split(words) for words in found]


def test_every_command_of_the_readme_exists():
    """Every verb and option in the README exists."""
    assert len(commands()) >= 6
    for words in commands():
        command: Any = typer.main.get_command(app)
        while hasattr(command, "get_command"):  # a group
            named = command.get_command(typer.Context(command), words[0])
            assert named is not None, words
            command, words = named, words[1:]
        options = {name for parameter in command.params for name in parameter.opts}
        assert {word for word in words if word.startswith("-")} <= options, words


def rows(text: str, start: str) -> list[list[str]]:
    table = text[text.index(start) :].split("\n\n")[0].split("\n")[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table]


def test_the_lines_of_parity_are_those_of_its_page():
    """The README's summary equals the worst measured row."""
    measured = rows((ROOT / "migration_docs/parity.md").read_text(), "| reference | ranks |")
    told = rows(README.read_text(), "| reference | runs |")
    of_class = [row for row in measured if row[0] == "FSDP1's class"]
    groups = [
        [row for row in measured if row[0] == "FSDP1" and "float64" in row[2]],
        [row for row in measured if row[0] == "FSDP1" and "float64" not in row[2]],
        [row for row in of_class if "float64" in row[2]],
        [row for row in of_class if "fp32" in row[2] or "mixed" in row[2]],
        [row for row in measured if row[0] == "one process"],
    ]
    own_row = [row for row in of_class if "NO_SHARD" in row[2]]  # FSDP1 rounds differently: see the page
    assert sum(map(len, [*groups, own_row])) == len(measured) and len(own_row) == 1
    for (_, runs, *worst, equal), group in zip(told, groups, strict=True):
        assert int(runs) == sum(int(row[3]) for row in group)
        assert [float(value) for value in worst] == [max(float(row[column]) for row in group) for column in (4, 5, 6)]
        assert equal == f"{sum(int(row[7].split(' of ')[0]) for row in group)} of {runs}"
