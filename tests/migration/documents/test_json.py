"""Pairs of texts before and after an edit: bytes outside the edit do not change, and JSON remains JSON."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from support.examples import examples

from composer_fsdp2.errors import ConfigError
from composer_fsdp2.migration.documents import open_document
from composer_fsdp2.migration.documents.json import JsonDocument
from composer_fsdp2.migration.migrate import migrate_text

Entries = list[tuple[str, Any]]


PAIRS: list[tuple[str, dict[str, Entries], Entries, str]] = [
    # Over lines: new entries replace the old ones, with the same indentation.
    (
        '{\n    "a": 1e-5,\n    "b": {\n        "c": "x",\n        "d": [1,  2]\n    }\n}\n',
        {"c": [("e", True), ("f", None)]},
        [],
        '{\n    "a": 1e-5,\n    "b": {\n        "e": true,\n        "f": null,\n        "d": [1,  2]\n    }\n}\n',
    ),
    # The last entries are removed, with the comma before them.
    ('{"b": {"c": 1, "d": 2, "e": 3}}', {"d": [], "e": []}, [], '{"b": {"c": 1}}'),
    ('{"b": {"c": 1, "d": 2, "e": 3}}', {"c": [], "e": []}, [("f", 4)], '{"b": {"d": 2, "f": 4}}'),
    ('{"b":{"c":1,"d":2}}', {"c": [("x", [1, 2])], "d": []}, [("f", 4)], '{"b":{"x":[1,2],"f":4}}'),
    ('{"b": {"c": 1}}', {"c": []}, [], '{"b": {}}'),
    ('{\n\t"b": {}\n}', {}, [("c", {"d": 1})], '{\n\t"b": {\n\t\t"c": {\n\t\t\t"d": 1\n\t\t}\n\t}\n}'),
    ('{\r\n  "b": {\r\n    "c": 1\r\n  }\r\n}\r\n', {}, [("d", "ü")],
     '{\r\n  "b": {\r\n    "c": 1,\r\n    "d": "\\u00fc"\r\n  }\r\n}\r\n'),
    ('{\r\n  "b": {\r\n    "c": 1\r\n  }\r\n}', {}, [("d", {"e": 2})],
     '{\r\n  "b": {\r\n    "c": 1,\r\n    "d": {\r\n      "e": 2\r\n    }\r\n  }\r\n}'),
    # A mixed layout: remaining entries are unchanged, new ones follow the file's first layout, over lines.
    (
        '{\n  "a": [1, 2],\n  "b": {\n     "c" :1,   "d": [3,\n 4],\n\n     "e": 5\n  }\n}',
        {"e": [("f", [6, {"g": 7}])]},
        [("h", {})],
        '{\n  "a": [1, 2],\n  "b": {\n     "c" :1,   "d": [3,\n 4],\n\n     '
        '"f": [\n      6,\n      {\n        "g": 7\n      }\n    ],\n     "h": {}\n  }\n}',
    ),
    ('{"b": {"c": "#", "d": 1}}', {"c": [], "d": []}, [], '{"b": {}}'),
    ('\ufeff{"é": 0, "b": {"c": 1}}', {"c": [("d", "ü")]}, [], '\ufeff{"é": 0, "b": {"d": "ü"}}'),
]  # fmt: skip


def test_pairs():
    """Otherwise a user's file would be reformatted, or turn into invalid JSON."""
    for before, replacements, additions, after in PAIRS:
        document = JsonDocument(before)
        assert document.edited(document.edit_mapping(("b",), replacements, additions)) == after
        json.loads(after.removeprefix("\ufeff"))


def test_what_is_no_json_is_placed():
    """Without a position, users of a long file would have to search for the error, or get a traceback."""
    for text, place in (('{"a": 1,\n}', "run.json:2:1"), ("", "run.json:1:1"), ('{"a": \x00}', "run.json:1:7")):
        with pytest.raises(ConfigError) as error:
            open_document(text, "run.json")
        assert str(error.value).startswith(place)


def test_places_and_keys_that_stand_twice():
    """A finding names the line of its key; of two equal keys only the user knows the intended one."""
    document = JsonDocument('{"a": [\n{"b": 1,\n"c": 2,\n"b": 3}]}', "run.json")
    assert document.line_of(("a", 0, "c")) == 3 and document.line_of(("a", 0, "b")) == 4
    assert document.duplicate(("a", 0)) == "run.json:4:1: b stands in line 2, too"
    assert document.duplicate(("a", 0), "b") and not document.duplicate(("a", 0), "c")
    assert document.duplicate(()) == ""


LAYOUTS = [
    {"indent": 2},
    {"indent": 4, "ensure_ascii": False},
    {"indent": "\t", "separators": (",", " : ")},
    {"indent": 0},
    {},
    {"separators": (",", ":")},
]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_file_of_json_dumps_is_edited_as_json_dumps_would(layout: dict[str, Any]):
    """Otherwise the diff of a tool's file would contain unedited lines, or lines that the tool would format
    differently."""
    before = {"é": 1e-05, "b": {"c": [1, {"d": 2}], "e": {}, "f": "x"}, "g": [{"h": [3]}, []]}
    text = json.dumps(before, **layout)
    document = JsonDocument(text)
    new = ("n", {"o": [4, [5]], "p": {"q": "ü"}})
    edits = document.edit_mapping(("b",), {"c": [new], "f": []}, [("r", [6])])
    edits += document.edit_mapping(("b", "e"), {}, [("s", 7)])
    edits += document.edit_mapping(("g", 0), {"h": []}, [("t", None)])
    after = {"é": 1e-05, "b": {"n": new[1], "e": {"s": 7}, "r": [6]}, "g": [{"t": None}, []]}
    assert document.edited(edits) == json.dumps(after, **layout)


KEYS = st.text(max_size=4)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=8,
)


@examples(60)
@given(st.data(), st.dictionaries(KEYS, VALUES, max_size=4), st.sampled_from([None, 1, 4, "\t"]), st.booleans())
def test_the_new_text_says_what_was_meant(data: st.DataObject, values: dict[str, Any], indent: Any, ascii: bool):
    """Otherwise a run would start with other values, or fail."""
    text = json.dumps({"before": [1], "b": values, "after": {}}, indent=indent, ensure_ascii=ascii)
    entries = st.lists(st.tuples(KEYS, VALUES), max_size=2, unique_by=lambda each: each[0])
    replacements = {key: data.draw(entries) for key in values if data.draw(st.booleans())}
    additions = data.draw(entries)
    kept = {key: value for key, value in values.items() if key not in replacements}
    new = [each for into in replacements.values() for each in into] + additions
    assume(len({key for key, _ in new} | kept.keys()) == len(new) + len(kept))
    document = JsonDocument(text)
    after = json.loads(document.edited(document.edit_mapping(("b",), replacements, additions)))
    assert after == {"before": [1], "b": kept | dict(new), "after": {}}


TRAINER = """\
{
  "output_dir": "out",
  "lr": 1e-5,
  "bf16": true,
  "fsdp": "full_shard auto_wrap",
  "fsdp_config": {
    "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"],
    "limit_all_gathers": true
  }
}
"""


def test_json_in_json_out():
    """Hugging Face's parser reads JSON; a migrated file with YAML in it would not load."""
    own = migrate_text(TRAINER, "args.json", to="accelerate")
    assert own.suffix == ".json" and own.exit_code == 0
    assert json.loads(own.after)["fsdp_config"]["transformer_layer_cls_to_wrap"] == ["LlamaDecoderLayer"]
    other = migrate_text(TRAINER, "args.json", to="composer")
    values = json.loads(other.after)
    assert other.suffix == ".json" and '\n  "lr": 1e-5,\n' in other.after
    assert values["fsdp_config"]["reshard_after_forward"] is True and "fsdp" not in values
    composer = migrate_text('{"fsdp_config": {"sharding_strategy": "SHARD_GRAD_OP"}}', "run.JSON")
    assert composer.after == '{"fsdp_config": {"reshard_after_forward": false}}'


def test_what_refers_into_an_interpolation_is_found():
    """Files with an interpolation as a section, and another key that refers into it, used to end in a traceback."""
    section = '"b": {"limit_all_gathers": true}, "a": {"fsdp_config": "${b}"}'
    found = migrate_text(f'{{{section}, "c": "${{a.fsdp_config.limit_all_gathers}}"}}', "run.json")
    assert [finding.key for finding in found.blocking] == ["interpolation"]
