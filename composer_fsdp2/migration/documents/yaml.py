"""Edits of a YAML text that preserve every other byte.

A library's dump writes a new text: quotes, widths and blank lines change. This module instead splices the text at the
marks of its nodes. Called by ``migrate``; reads and writes no file.
"""

import bisect
import contextlib
import datetime
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import yaml
from yaml.nodes import MappingNode, Node, ScalarNode

from composer_fsdp2.errors import ConfigError
from composer_fsdp2.migration.documents.edits import (
    Document,
    Edit,
    Entry,
    NewEntry,
    brace_edits,
    comment_behind,
    indent_at,
    line_edits,
    line_end,
    refuse_missing,
    with_references,
    written_out,
)
from composer_fsdp2.migration.documents.json import JsonDocument
from composer_fsdp2.migration.documents.yaml_text import YamlText, is_mapping
from composer_fsdp2.migration.paths import Path, Settings, value_at

# An entry's text in the file, with its quotes and interpolations, by its key and its value's ``flow_text``.
_Same = Mapping[tuple[str, str], str]


# ---------------------------------------------------------------------------------------------------------------------
# Edits of a mapping's entries


def _written_out(
    document: YamlText, path: Path, values: Mapping[str, Any], replacements: Mapping[str, Settings], additions: Settings
) -> list[Edit]:
    """Return edits that write out all entries, in place of an alias or interpolation, or in addition to a merge."""
    here = written_out(document, path, values, replacements, additions)
    parent = document.node(path[:-1])
    is_own = is_mapping(parent) and any(_entries(document.text, parent, here[0]))
    return document.edit_mapping(path[:-1], {here[0]: [here]} if is_own else {}, () if is_own else [here])


def _without_merge(
    entries: Mapping[str, Entry], values: Mapping[str, Any], replacements: Mapping[str, Settings]
) -> dict[str, Settings]:
    """Return the replacements, with one that replaces the merge (``<<``) by all its entries."""
    inherited = [each for each in values.items() if str(each[0]) not in entries]
    own = {key: new for key, new in replacements.items() if key in entries}
    return {**own, "<<": [new for old in inherited for new in replacements.get(old[0], [old])]}


def _stands_here(document: YamlText, path: Path) -> bool:
    """Return whether the value at ``path`` is written there: neither an alias nor from a merge."""
    if not path:
        return True
    node, parent = document.node(path), document.node(path[:-1])
    if not is_mapping(parent):  # an item of a list
        return bool(node.start_mark.index >= parent.start_mark.index) and _stands_here(document, path[:-1])
    entries = _entries(document.text, parent, str(path[-1]))
    is_inside = any(entry.start <= node.start_mark.index <= entry.end for entry in entries)
    return is_inside and _stands_here(document, path[:-1])


def _block_edits(
    document: YamlText,
    entries: Mapping[str, Entry],
    replacements: Mapping[str, Settings],
    additions: Settings,
    same: _Same,
) -> Iterator[Edit]:
    new = {key: _lines_in_place(document, entries[key], into, same) for key, into in replacements.items()}
    added = list(_lines_of(additions, document))
    if new.keys() == entries.keys() and not any(new.values()) and not added:
        added = ["{}"]
    yield from line_edits(document.text, entries, new, added)


def _lines_in_place(document: YamlText, entry: Entry, new: Settings, same: _Same) -> list[str]:
    """Return the comments inside an entry and the lines that replace it; an unchanged entry keeps its text."""
    kept = [same.get((name, flow_text(value))) for name, value in new]
    if document.text[entry.start : entry.end] in kept:
        inner = []
    else:
        inner = [comment for _, comment in _comments(document, entry.start, entry.end)]
    lines = ([text] if text is not None else _lines_of([each], document) for each, text in zip(new, kept, strict=True))
    return [*inner, *(line for each in lines for line in each)]


def _flow_edits(
    document: YamlText,
    node: MappingNode,
    entries: Mapping[str, Entry],
    replacements: Mapping[str, Settings],
    additions: Settings,
    same: _Same,
) -> Iterator[Edit]:
    new = {
        key: ", ".join(same.get((name, flow_text(value)), f"{name}: {flow_text(value)}") for name, value in into)
        for key, into in replacements.items()
    }
    added = ", ".join(f"{name}: {flow_text(value)}" for name, value in additions)
    around = Entry("", document.text.index("{", node.start_mark.index), node.end_mark.index)
    yield from brace_edits(document.text, around, list(entries.values()), new, added, ", ")


def _entries(text: str, node: MappingNode, name: str | None = None) -> Iterator[Entry]:
    """Yield the entries of a mapping, or only those named ``name``: a file may have hundreds of sections."""
    for key, value in node.value:
        if name is not None and str(key.value) != name:
            continue
        yield Entry(str(key.value), _start(text, key), _end(text, key, value))


def _start(text: str, key: Node) -> int:
    """Return the position of a key's first character, or of the question mark before it."""
    start = key.start_mark.index
    before = text[text.rfind("\n", 0, start) + 1 : start].rstrip(" \t")
    return text.rindex("?", 0, start) if before.endswith("?") else start


def _end(text: str, key: Node, value: Node) -> int:
    """Return the position behind the last character of a value."""
    if value.start_mark.index < key.end_mark.index:  # an alias: the node is where its anchor is
        alias = re.compile(r"\s*:\s*\*[^\s,\]}]+").match(text, key.end_mark.index)
        if alias is not None:
            return alias.end()
    return _end_of(text, key.end_mark.index, value)


def _end_of(text: str, start: int, value: Any) -> int:
    if isinstance(value, ScalarNode):
        if value.value == "" and value.style is None:
            return _end_of_empty(text, start)
        if value.style in ("|", ">"):
            return value.start_mark.index + len(text[value.start_mark.index : value.end_mark.index].rstrip())
        return int(value.end_mark.index)
    if value.flow_style:
        return int(value.end_mark.index)
    # A block collection's end mark is behind the comments that follow it.
    if is_mapping(value):
        last_key, last = value.value[-1]
        return _end(text, last_key, last)
    last = value.value[-1]
    if last.start_mark.index < value.start_mark.index:  # an alias as the last item
        aliases = list(re.compile(r"-[ \t]+\*[^\s,\]}]+").finditer(text, value.start_mark.index, value.end_mark.index))
        return aliases[-1].end()
    return _end_of(text, last.start_mark.index, last)


def _end_of_empty(text: str, start: int) -> int:
    """Return the position behind the colon and any anchor or tag of an empty value; a ``?`` key needs no colon."""
    found = re.compile(r"\s*:(?:[ \t]+[&!][^\s,\]}]*)*").match(text, start)
    return found.end() if found else start


# ---------------------------------------------------------------------------------------------------------------------
# A rebuilt entry


def _rebuilt_entry(document: YamlText, path: Path, new: NewEntry) -> Edit:
    """``Document.replace_entry``, in a block mapping."""
    text = document.text
    parent = document.node(path[:-1])
    assert is_mapping(parent)
    entry = next(each for each in _entries(text, parent) if each.key == path[-1])
    node = document.node(path)
    inner = None if new.inner is None else document.node(new.inner)
    pieces = list(_pieces(document, entry, inner, new.replacements))
    step, column = " " * document.indent, indent_at(text, entry.start)
    lines: list[str] = []
    for depth, (name, first) in enumerate(new.heads):
        anchor = _anchor(text, node) if depth == 0 else ""
        lines.append(f"{step * depth}{name}:{anchor}")
        lines += [f"{step * (depth + 1)}{line}" for line in _lines_of(first, document)]
    body = [*pieces, *_lines_of(new.additions, document)]
    lines += [f"{step * len(new.heads)}{line}" for line in body]
    if not any(line and not line.startswith("#") for line in body) and not new.heads[-1][1]:
        lines[-len(body) - 1] += " {}"
    lines += _lines_of(new.beside, document)
    return Edit(
        entry.start,
        line_end(text, entry.end) if comment_behind(text, entry.end) else entry.end,
        f"\n{column}".join(lines),
    )


def _anchor(text: str, node: Any) -> str:
    found = re.compile(r"&\S+").match(text, node.start_mark.index)
    return f" {found.group()}" if found else ""


def _pieces(
    document: YamlText, entry: Entry, inner: Node | None, replacements: Mapping[str, Settings]
) -> Iterator[str]:
    """Yield the comments of an entry and the replacements of the entries of ``inner``, in the order of the text."""
    text = document.text
    found: list[tuple[int, list[str]]] = []
    behind: set[int] = set()  # starts of comments that stay behind an entry
    placed: set[str] = set()
    if is_mapping(inner) and entry.start <= inner.start_mark.index < entry.end:
        for each in _entries(text, inner):
            lines = list(_lines_of(replacements.get(each.key, ()), document))
            placed.add(each.key)
            comment = comment_behind(text, each.end)
            if comment and len(lines) == 1:
                behind.add(text.index(comment, each.end))
                lines = [f"{lines[0]}  {comment}"]
            found.append((each.start, lines))
    for start, comment in _comments(document, entry.start, line_end(text, entry.end)):
        if start not in behind:
            found.append((start, [comment]))
    for _, lines in sorted(found):
        yield from lines
    for key, new in replacements.items():
        if key not in placed:
            yield from _lines_of(new, document)


def _comments(document: YamlText, start: int, end: int) -> Iterator[tuple[int, str]]:
    """Yield the comments between two positions, each as its start and its text."""
    for comment in re.compile(r"(?:(?<=\s)|^)#[^\n]*", re.MULTILINE).finditer(document.text, start, end):
        before = bisect.bisect_right(document.scalars, (comment.start(), len(document.text))) - 1
        if before < 0 or document.scalars[before][1] <= comment.start():
            yield comment.start(), comment.group().rstrip()


# ---------------------------------------------------------------------------------------------------------------------
# Values as text


def _lines_of(entries: Settings, document: YamlText) -> Iterator[str]:
    yield from block_lines(dict(entries), " " * document.indent)


def block_lines(values: Mapping[str, Any], step: str = "  ") -> Iterator[str]:
    """Yield the lines of a mapping, with nested mappings indented and lists on one line."""
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            yield f"{_scalar_text(str(name))}:"
            yield from (f"{step}{line}" for line in block_lines(value, step))
        else:
            yield f"{_scalar_text(str(name))}: {flow_text(value)}"


def flow_text(value: object) -> str:
    """Return a value on one line, in a form that YAML 1.1 and 1.2 read alike."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{flow_text(key)}: {flow_text(each)}" for key, each in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(flow_text, value)) + "]"
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    if isinstance(value, int | float | datetime.date):
        plain: str = yaml.safe_dump(value)  # 1e-06 would be read as a string
        return plain.partition("\n")[0]
    return _scalar_text(str(value))


_PLAIN = re.compile(r"[A-Za-z_./][\w./ -]*")
_WORDS = re.compile(r"(?i)y|n|yes|no|on|off|true|false|null|~|\.nan|\.inf")


def _scalar_text(text: str) -> str:
    if _PLAIN.fullmatch(text) and not _WORDS.fullmatch(text) and text == text.strip():
        return text
    quoted: str = yaml.safe_dump(text, default_style='"', width=2**31, allow_unicode=True)
    return quoted.removesuffix("\n")


# ---------------------------------------------------------------------------------------------------------------------
# The document


def open_yaml(text: str, name: str = "<text>") -> Document:
    """Open a YAML document; a JSON document, edited as JSON, if the text is JSON in a file with a YAML suffix."""
    document = YamlDocument(text, name)
    if text.lstrip("\ufeff \t\r\n").startswith("{"):
        with contextlib.suppress(ConfigError):
            in_json = JsonDocument(text, name)
            in_json.values = document.values  # as PyYAML reads them: 1e-5 is a string
            return in_json
    return document


class YamlDocument(YamlText):
    """A ``Document`` of YAML."""

    takes_entries = True

    def edit_mapping(
        self,
        path: Path,
        replacements: Mapping[str, Settings],
        additions: Settings = (),
        *,
        given: Mapping[str, Any] | None = None,
    ) -> list[Edit]:
        """``Document.edit_mapping``.

        A merge (``<<``) is written out if one of its entries is replaced. A mapping from another place (an alias, an
        interpolation) is written out here, and unchanged there.
        """
        if not replacements and not additions:
            return []
        node = self.node(path)
        values = value_at(self.values, path) if given is None else given
        refuse_missing(path, replacements, values.keys())
        if not (is_mapping(node) and _stands_here(self, path)):
            return _written_out(self, path, values, replacements, additions)
        entries = {entry.key: entry for entry in _entries(self.text, node)}
        if not entries:
            start = self.text.index("{", node.start_mark.index)
            return [Edit(start, node.end_mark.index, flow_text(dict(additions)))]
        if replacements.keys() & self.merged(path).keys():  # also if it has the key itself: the merge would restore it
            merged = self.merged(path)
            replacements = _without_merge(entries, with_references(values, merged), replacements)
        kept = {key: self.text[entry.start : entry.end] for key, entry in entries.items()}
        same = {(key, flow_text(values[key])): text for key, text in kept.items() if key in values}
        if node.flow_style:
            return list(_flow_edits(self, node, entries, replacements, additions, same))
        return list(_block_edits(self, entries, replacements, additions, same))

    def replace_entry(self, path: Path, new: NewEntry, *, given: Mapping[str, Any] | None) -> list[Edit]:
        parent = self.node(path[:-1])
        is_block = is_mapping(parent) and not parent.flow_style
        if is_block and all(_stands_here(self, each) for each in (path, new.inner) if each is not None):
            return [_rebuilt_entry(self, path, new), *self.edit_mapping(path[:-1], new.around)]
        return super().replace_entry(path, new, given=given)

    def stands_for(self, path: Path, others: Sequence[Path]) -> Path | None:
        node = self.node(path)
        if isinstance(node, ScalarNode):
            return super().stands_for(path, others)
        return next(
            (each for each in others if each != path and _stands_here(self, each) and self.node(each) is node), None
        )

    def written_as(self, path: Path) -> str:
        node = self.node(path)
        if is_mapping(node) and _stands_here(self, path):
            return ""
        is_scalar = isinstance(node, ScalarNode)
        return str(node.value) if is_scalar else f"an alias of what begins in line {node.start_mark.line + 1}"
