"""TOML texts are edited only where necessary."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.examples import examples

from composer_fsdp2.errors import ConfigError
from composer_fsdp2.migration.documents.edits import apply_edits
from composer_fsdp2.migration.documents.toml import TomlDocument, toml_text
from composer_fsdp2.migration.migrate import migrate_text
from composer_fsdp2.migration.paths import Path, has_path, value_at

TEXT = """\
# A debug run
title = "Llama 3"   # not a key of ours

[training]
seq_len = 2048  # tokens
mixed_precision_param = 'bfloat16'
notes = '''
[parallelism]
data_parallel_shard_degree = 99
'''
  enable_cpu_offload=false

[ parallelism ]   # degrees
data_parallel_shard_degree = -1     # all
"tensor_parallel_degree" = 1

[[datasets]]
name = "c4" # [training]
[datasets.options]
seed = [ 1, # one
  2, ]
[[datasets]]
name = "pile"

[float8]
# empty
"""


def test_values_and_lines():
    """Reports name the line of a key, also after strings and arrays over several lines."""
    document = TomlDocument(TEXT, "run.toml")
    assert document.values == tomllib.loads(TEXT)
    for path, line in {
        (): 1,
        ("title",): 2,
        ("training",): 4,
        ("training", "seq_len"): 5,
        ("training", "enable_cpu_offload"): 11,
        ("parallelism",): 13,
        ("parallelism", "data_parallel_shard_degree"): 14,
        ("parallelism", "tensor_parallel_degree"): 15,
        ("datasets",): 17,
        ("datasets", 0, "name"): 17,
        ("datasets", 0, "options", "seed"): 17,
        ("datasets", 0, "options", "seed", 1): 17,
        ("datasets", 1, "name"): 17,
        ("float8",): 25,
    }.items():
        assert document.line_of(path) == line, path
    with pytest.raises(KeyError):
        document.line_of(("parallelism", "pipeline_parallel_degree"))


def with_tables(text: str, tables: Mapping[Path, Mapping[str, Any]]) -> str:
    """The text with these values: changed in place, added at a table's end, removed if None."""
    document = TomlDocument(text, "run.toml")
    edits = []
    for path, values in tables.items():
        present = value_at(document.values, path) if has_path(document.values, path) else {}
        changed = {
            key: value
            for key, value in values.items()
            if type(present.get(key)) is not type(value) or present.get(key) != value
        }
        replacements = {
            key: [] if value is None else [(key, value)] for key, value in changed.items() if key in present
        }
        additions = [(key, value) for key, value in changed.items() if key not in present and value is not None]
        if replacements or additions:
            edits += document.edit_mapping(path, replacements, additions)
    return document.edited(edits)


IN_TRAINING, IN_PARALLELISM = ("training",), ("parallelism",)
SHORT, DOTTED = "[a]\nx = 1\ny = 2 # two\n", "training.seq_len = 1\ntraining . dtype = 'float32'"
ADDED = TEXT.replace("  enable_cpu_offload=false\n", "  enable_cpu_offload=false\n  max_norm = 1.0\n")
ADDED = ADDED.replace("[float8]\n", "[float8]\nemulate = true\n")
WITHOUT = TEXT.replace("seq_len = 2048  # tokens", "# tokens").replace('"tensor_parallel_degree" = 1\n', "")
EDITS: dict[str, tuple[str, dict[tuple[str | int, ...], dict[str, object]], str]] = {
    "comments, order, quoting and spaces survive a change of one value": (
        TEXT,
        {IN_PARALLELISM: {"data_parallel_shard_degree": 8}},
        TEXT.replace("data_parallel_shard_degree = -1     #", "data_parallel_shard_degree = 8     #"),
    ),
    "a value that is there keeps its bytes, whatever way it is written in": (
        TEXT,
        {IN_TRAINING: {"mixed_precision_param": "bfloat16", "enable_cpu_offload": False}},
        TEXT,
    ),
    "what a user noted beside a key stays when the key goes": (
        TEXT,
        {IN_TRAINING: {"seq_len": None}, IN_PARALLELISM: {"tensor_parallel_degree": None}},
        WITHOUT,
    ),
    "new keys come to their table's end, indented as its last one; new tables to the file's": (
        TEXT,
        {
            IN_TRAINING: {"max_norm": 1.0},
            ("float8",): {"emulate": True},
            ("compile",): {"enable": True, "components": ["model", "loss"]},
        },
        ADDED + '\n[compile]\nenable = true\ncomponents = ["model", "loss"]\n',
    ),
    "the last key goes and another comes": (SHORT, {("a",): {"y": None, "z": 3}}, "[a]\nx = 1\nz = 3 # two\n"),
    "TorchTitan takes keys without a header, too": (
        DOTTED,
        {IN_TRAINING: {"dtype": "bfloat16", "steps": 5}},
        'training.seq_len = 1\ntraining . dtype = "bfloat16"\ntraining . steps = 5',
    ),
    "a file without a last line end": (
        DOTTED,
        {("compile",): {"enable": True}},
        DOTTED + "\n\n[compile]\nenable = true\n",
    ),
    "a file from Windows keeps its line ends, on new lines as well": (
        "[a]\r\nx = 1\r\ny = 2 # c\r\n",
        {("a",): {"x": None, "z": 3}},
        "[a]\r\ny = 2 # c\r\nz = 3\r\n",
    ),
}


@pytest.mark.parametrize("case", EDITS)
def test_only_what_was_meant_is_edited(case: str):
    """Otherwise a user's file would be reformatted, or lose its comments."""
    before, tables, after = EDITS[case]
    assert with_tables(before, tables) == after


def test_one_key_becomes_two():
    """Both are in the old key's place."""
    assert apply_edits(SHORT, TomlDocument(SHORT).edit_mapping(("a",), {"x": [("v", 0), ("w", 1)]})) == (
        "[a]\nv = 0\nw = 1\ny = 2 # two\n"
    )


def test_places_of_what_is_part_of_a_value():
    """Otherwise the report has no line for it; # and = inside strings and keys start no comment or value."""
    text = '"a=#" . \'b.c\' = { d = [ # =\n"""\n#]=""", 1 ] } # e\nf = 1'
    document = TomlDocument(text, "run.toml")
    assert document.values == {"a=#": {"b.c": {"d": ["#]=", 1]}}, "f": 1}
    assert document.line_of(("a=#", "b.c", "d", 1)) == 1 and document.line_of(("f",)) == 4
    edits = document.edit_mapping(("a=#",), {"b.c": [("g", 2)]})
    assert document.edited(edits) == '"a=#" . g = 2 # e\nf = 1'


def test_a_long_list_is_read_once(monkeypatch: pytest.MonkeyPatch):
    """A list of thousands of lines took minutes, because its end was searched for after each line."""
    read, loads = [], tomllib.loads
    monkeypatch.setattr(tomllib, "loads", lambda text: read.append(text) or loads(text))
    text = "a = [\n" + "  'b', # c\n" * 99 + "]\nd = 1\n"
    assert TomlDocument(text).line_of(("d",)) == 102
    assert sum(map(len, read)) < 6 * len(text)


def test_an_interpolation_of_a_key_that_went_is_found():
    """Composer resolves interpolations in any format, and the run would fail at the first broken one."""
    text = '[x]\na = "${fsdp_config.verbose}"\n\n[fsdp_config]\nverbose = true\nlimit_all_gathers = true\n'
    found = migrate_text(text.replace(".verbose", ".limit_all_gathers"), "run.toml")
    assert [finding.reason for finding in found.blocking] == ["line 2 refers to a key that is not there any more"]
    assert not migrate_text(text, "run.toml").blocking


def test_tables_in_braces_are_refused_with_their_place():
    """A file that cannot be edited raises, instead of being edited partly."""
    with pytest.raises(ConfigError, match=r"run\.toml:2:2: training .*\[training\]"):
        with_tables("\n training = { seq_len = 1 }", {("training",): {"seq_len": 2}})
    with pytest.raises(ConfigError, match=r"run\.toml:1:1: training"):
        with_tables("training = {}", {("training",): {"seq_len": 2}})


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("[a]\nx = \n", "run.toml:2:5"),
        ("x = 1\nx = 2\n", "run.toml:2:6"),
        ("[a\n", "run.toml:1:3"),
        ('x = """', "run.toml:1:8"),
    ],
)
def test_what_is_no_toml_is_named_with_its_place(text: str, place: str):
    """A user gets file, line and column instead of a traceback."""
    with pytest.raises(ConfigError) as raised:
        TomlDocument(text, "run.toml")
    assert str(raised.value).startswith(f"{place}: ")


KEYS = st.text("abc-_.\"' é", min_size=1, max_size=4)
SCALARS = st.booleans() | st.integers(-(10**6), 10**6) | st.floats(allow_nan=False) | st.text(max_size=8)
VALUES = st.recursive(
    SCALARS, lambda each: st.lists(each, max_size=3) | st.dictionaries(KEYS, each, max_size=3), max_leaves=6
)


@examples(100)
@given(VALUES)
def test_values_are_written_as_they_are_read(value: Any):
    """TorchTitan reads back the value that was written."""
    assert tomllib.loads(f"key = {toml_text(value)}") == {"key": value}


LAYOUTS = st.sampled_from(["{key} = {value}\n", "  {key}={value} # é\n", "\n# a\n{key}\t=   {value}\t\r\n"])


@st.composite
def documents(draw: st.DrawFn) -> tuple[str, dict[str, dict[str, Any]]]:
    """A text with tables, and their contents."""
    tables = draw(st.dictionaries(KEYS, st.dictionaries(KEYS, VALUES, max_size=4), min_size=1, max_size=3))
    text = draw(st.sampled_from(["", "# top\n", "\n\n"]))
    for name, entries in tables.items():
        text += f"[{toml_key(name)}]" + draw(st.sampled_from(["\n", " # [x]\n", "\r\n"]))
        for key, value in entries.items():
            text += draw(LAYOUTS).format(key=toml_key(key), value=toml_text(value))
    return text, tables


def toml_key(key: str) -> str:
    return toml_text({key: 1}).removeprefix("{ ").removesuffix(" = 1 }")


@examples(60)
@given(documents(), st.data())
def test_only_what_is_asked_for_changes(document: tuple[str, dict[str, dict[str, Any]]], data: st.DataObject):
    """In any document, one key is changed, added or removed; all other values and all comments stay."""
    text, tables = document
    name = data.draw(st.sampled_from(list(tables)))
    key = data.draw(st.sampled_from(list(tables[name])) | KEYS if tables[name] else KEYS)
    value = data.draw(st.none() | VALUES)
    after = with_tables(text, {(name,): {key: value}})
    expected = {each: dict(entries) for each, entries in tables.items()}
    if value is None:
        expected[name].pop(key, None)
    else:
        expected[name][key] = value
    assert tomllib.loads(after) == expected
    assert after.count("# ") >= text.count("# ")
    assert with_tables(after, {(name,): {key: value}}) == after
