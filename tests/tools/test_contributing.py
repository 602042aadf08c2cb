"""CONTRIBUTING.md: its code tour names functions that exist. `generate_docs.py --check` compares its drawing."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_the_code_tour_names_functions_that_exist():
    """A newcomer who follows a row of the tour finds the function in the file that the row names."""
    rows = re.findall(
        r"^\| ((?:`[\w/]+\.py`[, ]*)+)\| ((?:`\w+`[, ]*)+)\|", (ROOT / "CONTRIBUTING.md").read_text(), re.M
    )
    assert len(rows) > 15
    for files, names in rows:
        code = "".join((ROOT / "composer_fsdp2" / file).read_text() for file in re.findall(r"`(.+?)`", files))
        missing = [name for name in re.findall(r"`(.+?)`", names) if not re.search(rf"\b(?:def|class) {name}\b", code)]
        assert missing == [], files
