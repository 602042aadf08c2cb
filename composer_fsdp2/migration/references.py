"""Verify a new text, and handle values elsewhere in a file that depend on a section: aliases and interpolations."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from composer_fsdp2.config.findings import Finding, Origin, Outcome
from composer_fsdp2.errors import ConfigError
from composer_fsdp2.migration.changes import Change
from composer_fsdp2.migration.dialect import Section
from composer_fsdp2.migration.documents import Document, differences, nearest_line, open_document
from composer_fsdp2.migration.documents.edits import reference_root, references_in
from composer_fsdp2.migration.interpolated import interpolations
from composer_fsdp2.migration.paths import Path, has_path, value_at, with_entries


def with_shared(document: Document, path: Path, sections: Sequence[Path], change: Change) -> Change:
    """Return the change of a section that may be an alias of, or an interpolation with, another section.

    If the other section is changed too, this one needs no edit. Otherwise the section is copied in place, with a
    finding.
    """
    written_as = document.written_as(path) if change.edits else ""
    if not written_as:
        return change
    if document.stands_for(path, sections):
        value_edits = change.value_edits if document.has_aliases else ()
        return replace(change, edits=(), value_edits=value_edits, removed_paths=(), written_paths=())
    finding = Finding(
        key="alias",
        value="",
        outcome=Outcome.UNNEEDED,
        target="the section itself",
        reason=f"the section was {written_as}, and is written out here; what it stood for stays as it was",
        hint="remove that, if nothing else uses it",
        origin=Origin.WRITING,
    )
    return replace(change, findings_for=lambda lost: (*change.findings_for(lost), finding))


def read_again(
    document: Document, after: str, suffix: str, sections: Sequence[Section], changes: Sequence[Change]
) -> tuple[Document, tuple[Finding, ...]]:
    """Parse and verify the new text.

    Return the document, and findings for entries outside the sections whose values change.

    Raises:
        ConfigError: the text does not have the intended values, and must not be written; names file and line.
    """
    try:
        again = open_document(after, document.name, suffix)
    except ConfigError as error:
        raise _wrong_text_error(document, (), sections[0]) from error
    # Not every reader refuses a file with duplicate keys.
    for path in (edit.path for change in changes for edit in change.value_edits):
        if has_path(again.values, path) and (duplicate := again.duplicate(path)) and not document.duplicate(path):
            raise ConfigError(f"{duplicate} (of the new text); rename or remove the key that was there")
    changed = list(differences(_intended_values(document, sections, changes), again.values))
    own_paths = [
        *(() if change.text is not None else section.path for section, change in zip(sections, changes, strict=True)),
        *(path for change in changes for path in (*change.removed_paths, *change.written_paths)),
    ]
    unexpected = next(
        (path for path in changed if not document.has_aliases or any(path[: len(o)] == o for o in own_paths)), None
    )
    if unexpected is not None:
        raise _wrong_text_error(document, unexpected, sections[0])
    return again, tuple(_shared_findings(document, changes, changes_elsewhere=bool(changed)))


def _intended_values(document: Document, sections: Sequence[Section], changes: Sequence[Change]) -> Any:
    """Return the intended values of the new text."""
    values = document.values
    for section, change in zip(sections, changes, strict=True):
        if change.text is not None:
            return change.values
        # An interpolation, to be written out.
        if change.value_edits and isinstance(value_at(values, section.path), str):
            *above, key = section.path
            values = with_entries(values, tuple(above), {str(key): [(str(key), section.given)]})
        for edit in change.value_edits:
            values = with_entries(values, edit.path, edit.replacements, edit.additions)
    return values


def _shared_findings(document: Document, changes: Sequence[Change], *, changes_elsewhere: bool) -> Iterator[Finding]:
    removed = [path for change in changes for path in change.removed_paths]

    def is_removed(path: Path) -> bool:
        return any(path[: len(each)] == each for each in removed)

    template = Finding(key="", value="", outcome=Outcome.NEEDS_DECISION, reason="", origin=Origin.WRITING)
    root = reference_root(document.values)
    for text, path in interpolations(document.values, ()):
        for other in references_in(text, root) if document.is_written_at(path) and not is_removed(path) else ():
            if is_removed(other):
                yield replace(
                    template,
                    key="interpolation",
                    value="${" + ".".join(map(str, other[len(root) :])) + "}",
                    reason=f"line {nearest_line(document, path)} refers to a key that is not there any more",
                    hint="write the value there",
                )
    if changes_elsewhere:
        yield replace(
            template,
            key="anchor",
            reason="another part of the file is an alias of something in this section, and would change with it",
            hint="write out what the alias stands for",
        )


def _wrong_text_error(document: Document, path: Path, section: Section) -> ConfigError:
    """Return the error for a new text that does not have the intended values."""
    next_step = (
        "write out what stands in the file as an alias of something in the section"
        if document.has_aliases
        else "write the section in lines of key: value, and please report the file as a fault of composer-fsdp2's"
    )
    return ConfigError(
        f"{document.name}:{document.line_of(section.path)}:1: the new text would not say what it should at "
        f"{'.'.join(map(str, path)) or 'its top'}, so nothing was written; {next_step}"
    )
