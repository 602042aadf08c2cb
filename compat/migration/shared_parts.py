"""What else in a file depends on the text of a section: aliases of its anchor, and interpolations that refer to it."""

import copy
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from ruamel.yaml.nodes import Node, ScalarNode

from composer_fsdp2.compat.migration.changes import Change
from composer_fsdp2.compat.migration.interpolation import references
from composer_fsdp2.compat.migration.toml_edit import TomlDocument
from composer_fsdp2.compat.migration.yaml_document import Document, is_mapping
from composer_fsdp2.compat.migration.yaml_edit import stands_here
from composer_fsdp2.errors import ConfigError
from composer_fsdp2.findings import Finding, Outcome

__all__ = ["shared_findings", "with_shared"]

Path = tuple[str | int, ...]


def with_shared(document: Document | TomlDocument, path: Path, sections: Sequence[Path], change: Change) -> Change:
    """A section's change, if the section may be written somewhere else: another section's change does for it, or it is
    written out in its place, with a finding.
    """
    if isinstance(document, TomlDocument) or not change.edits:
        return change
    node = document.node(path)
    if is_mapping(node) and stands_here(document, path):
        return change
    if _stands_for(document, path, sections) is not None:
        return replace(change, edits=(), gone=(), come=())
    finding = Finding(
        key="(alias)",
        value="",
        outcome=Outcome.UNNEEDED,
        target="the section itself",
        reason=f"the section was {_name(node)}, and is written out here; what it stood for stays as it was",
        hint="remove that, if nothing else uses it",
    )
    return replace(change, findings=(*change.findings, finding))


def _name(node: Node) -> str:
    return node.value if isinstance(node, ScalarNode) else f"an alias of what begins in line {node.start_mark.line + 1}"


def _stands_for(document: Document, path: Path, sections: Sequence[Path]) -> Path | None:
    """The other section that the value at ``path`` is only an alias of, or an interpolation; None if it is none."""
    node = document.node(path)
    if isinstance(node, ScalarNode):
        referred = [each for each, _ in references(node.value)]
        return next((each for each in referred if each in sections), None)
    return next(
        (each for each in sections if each != path and stands_here(document, each) and document.node(each) is node),
        None,
    )


def shared_findings(
    document: Document | TomlDocument, after: str, sections: Sequence[Path], changes: Sequence[Change]
) -> list[Finding]:
    """Findings for what stands outside of the sections and would mean something else with the new text."""
    if isinstance(document, TomlDocument):
        return []
    return [*_dangling(document, changes), *_changed(document, after, sections, changes)]


def _dangling(document: Document, changes: Sequence[Change]) -> Iterator[Finding]:
    gone = {path for change in changes for path in change.gone}
    for path, line in references(document.text):
        lost = next((each for each in gone if path[: len(each)] == each), None)
        if lost is not None and not _is_within(line, document, lost):
            yield Finding(
                key="(interpolation)",
                value="${" + ".".join(map(str, path)) + "}",
                outcome=Outcome.NEEDS_DECISION,
                target="",
                reason=f"line {line} refers to a key that is not there any more",
                hint="write the value there",
            )


def _is_within(line: int, document: Document, path: Path) -> bool:
    """Whether the reference is itself part of what goes."""
    try:
        node = document.node(path)
    except KeyError:  # what goes was itself an interpolation's
        return False
    return bool(document.line_of(path) <= line <= node.end_mark.line + 1)


def _changed(document: Document, after: str, sections: Sequence[Path], changes: Sequence[Change]) -> Iterator[Finding]:
    """An anchor within a section is what its aliases elsewhere stand for."""
    if not document.has_aliases or after == document.original:
        return
    own = [*sections, *(path for change in changes for path in (*change.gone, *change.come))]
    try:
        new = Document(after, document.name).values
        is_same = _without(document.values, own) == _without(new, own)
    except ConfigError:
        is_same = False
    if not is_same:
        yield Finding(
            key="(anchor)",
            value="",
            outcome=Outcome.NEEDS_DECISION,
            target="",
            reason="another part of the file is an alias of something in this section, and would change with it",
            hint="write out what the alias stands for",
        )


def _without(values: Any, paths: Sequence[Path]) -> Any:
    rest = copy.deepcopy(values)
    for path in paths:
        at = rest
        for key in path[:-1]:
            at = at[key] if _has(at, key) else None
        if path and _has(at, path[-1]) and isinstance(at, dict):
            del at[path[-1]]
    return rest


def _has(values: Any, key: str | int) -> bool:
    if isinstance(values, list):
        return isinstance(key, int) and key < len(values)
    return isinstance(values, dict) and key in values
