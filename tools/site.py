"""Hooks of mkdocs.yml: pages outside migration_docs, and links, anchors and fences as GitHub reads them.

mkdocs calls the functions ``on_*``. The source of every page stays as it is on GitHub; a page outside of
migration_docs is at ``project/PATH`` in the site.
"""

from __future__ import annotations

import os
import posixpath
import re
import shlex
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
DOCS = "migration_docs"
# Pages outside of migration_docs, by their path in the repository.
PROJECT_PAGES = (
    "README.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    "benchmarks/README.md",
    "benchmarks/clients.md",
    "tests/fsdp/upstream.md",
    "yamls/README.md",
)
# Lines of 120 characters fit, names of keys stay on one line, and texts of errors wrap.
CSS = """
.md-grid { max-width: 80rem }
.md-typeset td:first-child code { word-break: normal; overflow-wrap: normal }
.error pre > code { white-space: pre-wrap }
"""
FENCED = re.compile(r"^( *)(`{3,}).*?^\1\2$", flags=re.MULTILINE | re.DOTALL)
FENCE = re.compile(r"^( *`{3,})(\S+) (.+)$", flags=re.MULTILINE)
LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")


# --- hooks


def on_config(config: MkDocsConfig) -> None:
    """Name anchors as GitHub does."""
    config.mdx_configs.setdefault("toc", {})["slugify"] = anchors.next


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages outside of migration_docs, the files that pages link to, and a style sheet."""
    from mkdocs.structure.files import File

    linked = {target for page in repository_pages() for target in linked_files(page)}
    for path in sorted({*PROJECT_PAGES, *linked}):
        if not path.startswith(f"{DOCS}/"):
            files.append(File.generated(config, site_path(path), abs_src_path=str(ROOT / path)))
    files.append(File.generated(config, "site.css", content=CSS))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Rewrite links and fences of one page; called right before it is rendered."""
    anchors.restart()
    return titled_fences(site_links(markdown, repository_path(page.file.src_uri)))


# --- paths: in the repository, and in the site


def repository_pages() -> list[str]:
    return [*PROJECT_PAGES, *(path.relative_to(ROOT).as_posix() for path in sorted((ROOT / DOCS).glob("*.md")))]


def site_path(path: str) -> str:
    return path.removeprefix(f"{DOCS}/") if path.startswith(f"{DOCS}/") else f"project/{path}"


def repository_path(path: str) -> str:
    return path.removeprefix("project/") if path.startswith("project/") else f"{DOCS}/{path}"


# --- links


def linked_files(page: str) -> Iterator[str]:
    """Files other than pages that a page links to."""
    for _, _, link in LINK.findall(FENCED.sub("", (ROOT / page).read_text())):
        target = target_of(page, link)
        if target and (ROOT / target).is_file() and not target.endswith(".md"):
            yield target


def target_of(page: str, link: str) -> str | None:
    """Path in the repository of a relative link to another file."""
    name = link.partition("#")[0]
    return posixpath.normpath(posixpath.join(posixpath.dirname(page), name)) if name and "://" not in name else None


def site_links(markdown: str, page: str) -> str:
    """Relative links of a page's text, from its place in the site; a link to a folder is text."""

    def rewritten(match: re.Match[str]) -> str:
        image, text, link = match.groups()
        target = target_of(page, link)
        if target is None or link.startswith("mailto:"):
            return match[0]
        if (ROOT / target).is_dir():
            return text
        relative = os.path.relpath(site_path(target), posixpath.dirname(site_path(page)) or ".")
        _, hash_mark, anchor = link.partition("#")
        return f"{image}[{text}]({relative}{hash_mark}{anchor})"

    return outside_fences(markdown, lambda text: LINK.sub(rewritten, text))


def outside_fences(markdown: str, change: Callable[[str], str]) -> str:
    """The text with ``change`` applied to all but fenced blocks."""
    parts, end = [], 0
    for fenced in FENCED.finditer(markdown):
        parts += [change(markdown[end : fenced.start()]), fenced[0]]
        end = fenced.end()
    return "".join([*parts, change(markdown[end:])])


# --- fences


def titled_fences(markdown: str) -> str:
    """The info strings of executed blocks as titles: ``python file=net.py`` is a block with the title net.py."""
    return FENCE.sub(lambda match: match[1] + info_of(match[2], match[3]), markdown)


def info_of(language: str, options: str) -> str:
    found = dict(word.partition("=")[::2] for word in shlex.split(options))
    if "file" in found:
        return f'{language} title="{found["file"]}"'
    if "migrated" in found:
        return f'{language} title="composer-fsdp2 migrate {found["migrated"]}"'
    return f" {{ .{language} .error }}" if "error" in found else language


# --- anchors


class Anchors:
    """GitHub's anchors of one page's headings: a second heading of a name ends in -1."""

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        self.found: Counter[str] = Counter()

    def next(self, heading: str, separator: str) -> str:
        slug = re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", separator)
        self.found[slug] += 1
        return slug if self.found[slug] == 1 else f"{slug}{separator}{self.found[slug] - 1}"


anchors = Anchors()
