"""Pairs of texts before and after an edit: bytes outside the edit do not change."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from support.examples import examples

from composer_fsdp2.errors import ConfigError
from composer_fsdp2.migration.documents import open_document
from composer_fsdp2.migration.documents.edits import Edit, apply_edits
from composer_fsdp2.migration.documents.yaml import YamlDocument, flow_text
from composer_fsdp2.migration.migrate import migrate_text

ROOT = Path(__file__).resolve().parents[3]
Entries = list[tuple[str, Any]]


PAIRS = [
    pytest.param(
        "a: 1\nb:\n  c: 'x'   # why\n  d: 2\n",
        {"c": [("e", True)]},
        [],
        "a: 1\nb:\n  e: true   # why\n  d: 2\n",
        id="a value in place, with the comment behind it",
    ),
    pytest.param(
        "b:\n  c: 1  # why\n  d: 2\n",
        {"c": []},
        [],
        "b:\n  # why\n  d: 2\n",
        id="a comment outlives its key",
    ),
    pytest.param(
        "b:\n  c:\n    - 1\n    - 2\n  # between\n\n  d: 2\n",
        {"c": []},
        [],
        "b:\n  # between\n\n  d: 2\n",
        id="a list goes, and what follows stays",
    ),
    pytest.param("b:\n  c: 1\n", {"c": []}, [], "b:\n  {}\n", id="nothing is left"),
    pytest.param(
        "b:\n  c:\n    - 1  # one\n    # two\n    - 2\n  d: 2\n",
        {"c": []},
        [],
        "b:\n  # one\n  # two\n  d: 2\n",
        id="comments in a list that goes",
    ),
    pytest.param(
        "b:\n  c: 'x'  # why\n  d: 2\n",
        {"c": [("c", "x"), ("e", 1)]},
        [],
        "b:\n  c: 'x'\n  e: 1  # why\n  d: 2\n",
        id="an entry that is still there as it was written",
    ),
    pytest.param("b: {c: 'x', d: 2}\n", {"c": [("c", "x"), ("e", 1)]}, [], "b: {c: 'x', e: 1, d: 2}\n", id="and there"),
    pytest.param(
        "b:\n  c: 1 # x\n\n# end",
        {},
        [("d", {"e": 1, "f": [1, 2]}), ("g", "yes")],
        'b:\n  c: 1 # x\n  d:\n    e: 1\n    f: [1, 2]\n  g: "yes"\n\n# end',
        id="new entries at the end",
    ),
    pytest.param("b: {c: 1, 'd': 2}\n", {"c": []}, [("e", None)], "b: {'d': 2, e: null}\n", id="on one line"),
    pytest.param("b: { c: 1,  d: 2 , e: 3 }\n", {"c": []}, [], "b: { d: 2 , e: 3 }\n", id="in spaces of the user's"),
    pytest.param("b: {c: '#', d: 2,}\n", {"c": [], "d": []}, [], "b: {}\n", id="nothing is left on one line"),
    pytest.param(
        "b: { # zero\n  c: 1, # one\n  d: 2 # two\n}\n",
        {"c": [], "d": []},
        [],
        "b: { # zero\n   # one\n   # two\n}\n",
        id="nothing is left between braces but comments",
    ),
    pytest.param(
        "b:\n  c: 1\n  d: 2  # two\n",
        {"d": [("e", 3)]},
        [("f", 4)],
        "b:\n  c: 1\n  e: 3  # two\n  f: 4\n",
        id="a comment stays beside its key, whatever comes behind",
    ),
    pytest.param("b: {}  # none\n", {}, [("e", 1)], "b: {e: 1}  # none\n", id="an empty mapping"),
    pytest.param(
        "b: {\n  c: 1,  # one\n  d: 2,\n  e: 3  # three\n}\n",
        {"c": [], "e": [("f", 4), ("g", 5)]},
        [],
        "b: {\n    # one\n  d: 2,\n  f: 4, g: 5  # three\n}\n",
        id="over several lines between braces, with comments",
    ),
    pytest.param(
        "b:\n  c: |\n    text\n    more\n  d: >-\n    folded\n\nz: 1\n",
        {"c": [("e", 1)], "d": [("f", 2)]},
        [],
        "b:\n  e: 1\n  f: 2\n\nz: 1\n",
        id="texts of several lines",
    ),
    pytest.param("b:\n  c:\n  d: 2\n", {"c": [("e", 1)]}, [], "b:\n  e: 1\n  d: 2\n", id="a key without a value"),
    pytest.param('b:\n  "c d": 1\n', {"c d": [("e", 1)]}, [], "b:\n  e: 1\n", id="a quoted key"),
    pytest.param(
        "b:\r\n  c: 1 # x\r\n  d: 2\r\n",
        {"c": [("e", 1), ("f", 2)]},
        [],
        "b:\r\n  e: 1\r\n  f: 2 # x\r\n  d: 2\r\n",
        id="carriage returns",
    ),
    pytest.param(
        "b:\r\n  c: 1 # x\r\n", {}, [("d", 2)], "b:\r\n  c: 1 # x\r\n  d: 2\r\n", id="carriage returns, and a new entry"
    ),
    pytest.param("\ufeffb:\n  c: 1\n", {"c": [("e", 1)]}, [], "\ufeffb:\n  e: 1\n", id="a byte order mark"),
    pytest.param(
        "x: &x\n  c: 1\n  d: 2\nb:\n  <<: *x\n  e: 3\n",
        {"c": [("f", 1)]},
        [],
        "x: &x\n  c: 1\n  d: 2\nb:\n  f: 1\n  d: 2\n  e: 3\n",
        id="what a merge brings is written out",
    ),
    pytest.param(
        "x: &x\n  c: 1\n  d: 2\nb:\n  <<: *x\n  c: 3\n",
        {"c": [("f", 1)]},
        [],
        "x: &x\n  c: 1\n  d: 2\nb:\n  d: 2\n  f: 1\n",
        id="what a merge brings is written out where it would bring back what goes",
    ),
    pytest.param(
        "x: &x\n  c: 1\nb:\n  <<: *x\n  e: 3\n",
        {"e": []},
        [],
        "x: &x\n  c: 1\nb:\n  <<: *x\n",
        id="a merge stays where it may",
    ),
    pytest.param(
        "x: &x {c: 1, d: 2}\nb: *x  # as x\n",
        {"c": [("f", 1)]},
        [],
        "x: &x {c: 1, d: 2}\nb:\n  f: 1\n  d: 2  # as x\n",
        id="an alias is written out, the anchor stays",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("before", "replacements", "additions", "after"), PAIRS)
def test_pair(before: str, replacements: dict[str, Entries], additions: Entries, after: str):
    """Otherwise a user's file would be rewritten without need, or turn into invalid YAML."""
    document = YamlDocument(before)
    assert document.edited(document.edit_mapping(("b",), replacements, additions)) == after
    yaml.safe_load(after)


def test_items_of_lists():
    """The right run in a list of runs is edited, not the first one."""
    text = "runs:\n- fsdp: {a: 1}\n- name: x\n  fsdp:\n    a: 1 # here\n"
    document = YamlDocument(text)
    edits = document.edit_mapping(("runs", 1, "fsdp"), {"a": [("b", 2)]})
    assert document.edited(edits) == "runs:\n- fsdp: {a: 1}\n- name: x\n  fsdp:\n    b: 2 # here\n"


def test_overlapping_edits_are_refused():
    """Two edits at one place would write garbage."""
    with pytest.raises(ValueError, match="overlap"):
        apply_edits("abc", [Edit(0, 2, "x"), Edit(1, 3, "y")])


@pytest.mark.parametrize("end", ["\n", ""])
def test_lines_behind_a_removed_last_line_take_its_place(end: str):
    """``plan --suggest`` of an axolotl file lost its best proposal to "edits overlap"."""
    text = f"a: 1\nb:\n  c: 2\n  d: 3{end}"
    added, removed = Edit(len(text) - len(end), len(text) - len(end), "\ne: 4"), Edit(15, len(text), "")
    assert apply_edits(text, [added, removed]) == f"a: 1\nb:\n  c: 2\ne: 4{end}"


def test_unknown_keys_are_refused():
    """An edit of a missing key was meant for another place."""
    with pytest.raises(KeyError, match="has no z"):
        YamlDocument("b:\n  c: 1\n").edit_mapping(("b",), {"z": []}, [])


BAD = [
    ("a: [1\nb: 2", "run.yaml:2:2"),
    ("a: 1\n---\nb: 2\n", "run.yaml:3:1"),
    ("- 1\n", "run.yaml:1:1"),
    ("", "run.yaml:1:1"),
    ("a:\n\t- 1\n", "run.yaml:2:1"),
    ("a: 1\nb: \x00\n", "run.yaml:2:4"),
    ("a: 1\n? [x, y]\n: 2\n", "run.yaml:2:3"),
    ("a: &a [*a]\n", "run.yaml:1:"),
    ("a: *nobody\n", "run.yaml:1:4"),
    ("a: 1\nb: 2024-13-01\n", "run.yaml:2:4"),
    ("a: =\n", "run.yaml:1:4"),
]


@pytest.mark.parametrize(("text", "place"), BAD)
def test_what_is_no_configuration_is_placed(text: str, place: str):
    """Without a position, users of a long file would have to search for the error, or get a traceback."""
    with pytest.raises(ConfigError) as error:
        migrate_text(text, "run.yaml")
    assert str(error.value).startswith(place)


def test_a_key_said_twice_is_placed():
    """PyYAML silently takes the last of two; only the user knows the intended one."""
    document = YamlDocument("b:\n  c: 1\n  d: 2\n  c: 3\n", "run.yaml")
    assert document.duplicate(("b",)) == "run.yaml:4:3: c stands in line 2, too"


def test_where_a_mapping_is_written():
    """An alias's text is at another place."""
    document = YamlDocument("x: &x\n  c: 1\nb: *x\nm:\n  <<: {n: {p: 1}}\n")
    assert not document.written_as(("x",)) and document.written_as(("b",)) == "an alias of what begins in line 1"
    assert document.line_of(("x", "c")) == 2


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@examples(60)
@given(VALUES)
def test_flow_text_is_read_back(value: Any):
    """A string such as yes, 1e3 or "- x" must not be read back as another value."""
    text = f"a: {flow_text(value)}\n"
    assert yaml.safe_load(text)["a"] == value
    assert YamlDocument(text).values["a"] == value


YAMLS = st.dictionaries(st.text(st.characters(codec="utf-8", categories=["L", "N", "P", "Z"])), VALUES, max_size=4)


@examples(60)
@given(YAMLS, st.sampled_from([None, True, False]), st.booleans())
def test_values_are_those_of_pyyaml(values: dict[str, Any], flow: bool | None, unicode: bool):
    """The systems read files with PyYAML, so its values are the reference."""
    text = yaml.safe_dump(values, default_flow_style=flow, allow_unicode=unicode)
    assert YamlDocument(text).values == yaml.safe_load(text)


@pytest.mark.parametrize(
    "text", ["a: yes\nb: 1e8\nc: 0o7\nd: 012\ne: 1_000\nf: 1:30\ng: 2024-01-02\nh: ~\ni: .inf\nj: 0x1F\n"]
)
def test_values_of_yaml_1_1(text: str):
    """In YAML 1.2 yes is a string and 012 is twelve; the systems read YAML 1.1."""
    assert YamlDocument(text).values == yaml.safe_load(text)


def test_values_of_merges():
    """A section must be read with its own values. Of several merged mappings the first takes precedence, as in YAML,
    and the section's own keys over all."""
    document = YamlDocument("a: &a {x: 1, y: 1}\nb: &b {<<: *a, y: 2, z: 2}\nc: {x: 0, <<: [*a, *b], w: 4}\n")
    assert document.values["c"] == {"x": 0, "y": 1, "z": 2, "w": 4} and document.values["b"] == {"x": 1, "y": 2, "z": 2}
    assert document.line_of(("c", "y")) == 1 and document.line_of(("c", "z")) == 2
    for bad in ("a: {<<: 1}", "a: {<<: [1]}"):
        with pytest.raises(ConfigError, match=r":1:5: << takes a mapping"):
            YamlDocument(bad)


def test_json_in_yaml():
    """The file is valid in both formats, but PyYAML reads 1e-5 as a string, as the system that loads the file does."""
    document = open_document('{"lr": 1e-5, "b": {"c": 1}}', "run.yaml")
    assert document.values == {"lr": "1e-5", "b": {"c": 1}}
    after = document.edited(document.edit_mapping(("b",), {}, [("d", "x")]))
    assert after == '{"lr": 1e-5, "b": {"c": 1, "d": "x"}}'


WITHOUT_LIBYAML = """
import sys
sys.modules["yaml.cyaml"] = sys.modules["yaml._yaml"] = None
import yaml
from composer_fsdp2.migration.migrate import migrate_text
assert not yaml.__with_libyaml__
for text in sys.stdin.read().split("\\0"):
    print(migrate_text(text, "run.yaml").after, end="\\0")
"""


def test_a_pyyaml_without_libyaml_gives_the_same():
    """With PyYAML built from source, without libyaml, edits must be at the same places."""
    files = sorted((ROOT / "yamls").rglob("*.yaml"))[:8]
    texts = ["a: 1\n? b\n: {c: &d [1, 'x'], e: *d}\nfsdp_config: {verbose: true, limit_all_gathers: true}\n"]
    for file in files:
        with contextlib.suppress(ConfigError):
            migrate_text(file.read_text(), "run.yaml")
            texts.append(file.read_text())
    command = [sys.executable, "-c", WITHOUT_LIBYAML]
    done = subprocess.run(command, input="\0".join(texts), text=True, capture_output=True, check=True, cwd=ROOT)
    assert done.stdout.split("\0")[:-1] == [migrate_text(text, "run.yaml").after for text in texts]
    assert len(texts) > 3
