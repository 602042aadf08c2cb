"""Edits of a text by positions, which leave every other character as it is."""

from collections.abc import Iterable
from dataclasses import dataclass

__all__ = ["Edit", "apply_edits"]


@dataclass(frozen=True, slots=True, order=True)
class Edit:
    """Put ``text`` in the place of the characters from ``start`` up to ``end``."""

    start: int
    end: int
    text: str


def apply_edits(text: str, edits: Iterable[Edit]) -> str:
    """The text with all edits made.

    Raises:
        ValueError: two of them overlap.
    """
    pieces, position = [], 0
    for edit in sorted(edits):
        if edit.start < position:
            raise ValueError(f"edits overlap at character {edit.start}")
        pieces += [text[position : edit.start], edit.text]
        position = edit.end
    return "".join([*pieces, text[position:]])
