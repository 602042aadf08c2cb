"""``${...}`` as OmegaConf reads it, in the files of systems that use OmegaConf."""

from __future__ import annotations

import json
import os
from typing import Any
from unittest import mock

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from support.examples import examples

from composer_fsdp2.config.findings import Outcome
from composer_fsdp2.errors import ConfigError
from composer_fsdp2.migration.dialects import DIALECTS
from composer_fsdp2.migration.interpolated import has_interpolation
from composer_fsdp2.migration.interpolation import resolve
from composer_fsdp2.migration.migrate import Migration, migrate_text
from composer_fsdp2.migration.paths import merged, nested
from composer_fsdp2.migration.targets import TARGETS

# OmegaConf itself reads these, too, as the reference.
WHOLE = """\
top: {name: x, number: 3, nested: {deep: [1, {b: "${top.name}"}]}}
absolute: ${top.number}
text: run-${top.name}-${top.number}
list: ${top.nested.deep}
item: ${top.nested.deep.0}
other: ${top.nested.deep[1].b}
mapping: ${top}
chain: ${mapping.nested}
in_it: {a: 1, b: "${.a}", c: {d: "${..a}"}}
by_name: ${top.${which}}
which: number
decoded: "${oc.decode:'{p: 1, q: [2]}'}"
given: ${oc.env:NOBODY_SETS_THIS,default}
selected: ${oc.select:top.name,z}
escaped: \\${top.name}
"""


def test_values_are_those_of_omegaconf():
    """Otherwise a run would be translated with a value other than the one it trains with."""
    values = yaml.safe_load(WHOLE)
    # A custom resolver may read the whole file; without one, only the parts that the text refers to are loaded.
    without_resolvers = {key: value for key, value in values.items() if key not in ("decoded", "given", "selected")}
    by_resolver_alone = {"plain": {"name": 3}, "selected": "${oc.select:plain.name,z}"}
    for each in (values, without_resolvers, by_resolver_alone):
        assert resolve(each).values == OmegaConf.to_container(OmegaConf.create(each), resolve=True)


def test_what_cannot_be_resolved_stays_and_hides_nothing():
    """One interpolation that cannot be resolved on this machine would disable all others of the file."""
    broken: dict[Any, Any] = {
        "good": "${run}",
        "run": "x",
        "unset": "${oc.env:NOBODY_SETS_THIS}",
        "workflow": "${{ matrix.os }}",
        "open": "${",
        "unterminated": "${run",
        "nobody": "${a.b.c}",
        "circle": "${circle}",
        "round": {"about": "${round}"},
        "missing": "???",
        "mandatory": "${missing}",
        "unknown": "${ours:1}",
        None: "${run}",
    }
    with pytest.raises(OmegaConfBaseException):
        OmegaConf.create(broken)
    unresolved = {"unset", "workflow", "open", "unterminated", "nobody", "circle", "round", "mandatory", "unknown"}
    found = resolve(broken).values
    assert {key for key, value in found.items() if has_interpolation(value)} == unresolved
    assert {key: found[key] for key in unresolved - {"round"}} == {key: broken[key] for key in unresolved - {"round"}}
    assert found["good"] == found[None] == "x"


RUN_FILE = """\
name: a-run
image: an/image
command: composer train/train.py /mnt/config/parameters.yaml
parameters:
  variables: {strategy: SHARD_GRAD_OP}
  model: {name: mpt_causal_lm}
  fsdp_config:
    sharding_strategy: ${variables.strategy}
    mixed_precision: PURE
  noted: ${fsdp_config.sharding_strategy}
"""


def test_references_of_a_run_file_start_at_its_parameters():
    """MCLI mounts them as a separate file; relative to the run file's top none of its references could be resolved."""
    values = yaml.safe_load(RUN_FILE)
    read = OmegaConf.to_container(OmegaConf.create(values["parameters"]), resolve=True)
    assert resolve(values).values == {**values, "parameters": read}
    migration = migrate_text(RUN_FILE)
    assert [(each.key, each.value) for each in migration.blocking] == [
        ("interpolation", "${fsdp_config.sharding_strategy}")
    ]
    other = migrate_text(RUN_FILE.replace("  noted: ${fsdp_config.sharding_strategy}\n", ""))
    assert not other.blocking and "    reshard_after_forward: false\n" in other.after


def test_only_systems_that_read_by_omegaconf_interpolate():
    """Hugging Face reads ``${...}`` literally, so resolving it would report another run."""
    text = "fsdp: full_shard\nfsdp_config: {transformer_layer_cls_to_wrap: '${layer}', version: 2}\nlayer: A\n"
    found = {each.key: each for each in migrate_text(text, to="accelerate").sections[0].findings}
    assert found["fsdp_config.transformer_layer_cls_to_wrap"].value == "${layer}"
    text = "fsdp: ${how}\nhow: full_shard\n"
    (section,) = migrate_text(text, to="accelerate").sections
    assert "environment" not in "".join(each.reason for each in section.findings)
    args = "{strategy_name: fsdp2_train, strategy_config: {param_dtype: '${dtype}'}}"
    roll = f"dtype: fp16\nworker:\n  strategy_args: {args}\n"
    found = {each.key: each for each in migrate_text(roll, to="composer").sections[0].findings}
    assert found["param_dtype"].value == "fp16" and found["param_dtype"].outcome is Outcome.EXACT
    assert "${dtype}" not in migrate_text(roll, to="composer").after


# ---------------------------------------------------------------------------------------------------------------------
# Values of environment variables

# Values that depend on an environment variable; `other` is a part of each file.
OTHER = {"by_way": "${oc.env:SECRET}", "mapping": {"param_dtype": "${oc.env:SECRET}"}}
WAYS: list[Any] = [
    "${oc.env:SECRET}",
    "${ oc.env : SECRET }",
    "pre-${oc.env:SECRET}",
    "${oc.env:NOBODY_SETS_THIS,${oc.env:SECRET}}",
    ["${oc.env:SECRET}"],
    {"transformer_layer_cls_to_wrap": ["${oc.env:SECRET}"]},
    "${other.by_way}",
    "${other.mapping}",
    "${oc.select:other.by_way}",
    "${oc.decode:${oc.env:MAPPING}}",
    "${oc.decode:${oc.env:NUMBER}}",
]
NUMBER = "73190465"
SECRETS = st.text("jqxzJQXZ", min_size=8, max_size=40)  # in no report by chance
# Characters that messages escape.
ENDS = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=40)


def told(migration: Migration) -> str:
    sections = json.dumps([each.to_json() for each in migration.sections], ensure_ascii=False)
    return f"{migration}{sections}{''.join(map(str, migration.blocking))}"


@st.composite
def files_by_environment(draw: st.DrawFn) -> tuple[str, dict[str, Any]]:
    """The name of a dialect, and a file in it with such values at some of its keys."""
    dialect = draw(st.sampled_from([DIALECTS["composer"], DIALECTS["roll"]]))
    values = dict(dialect.silent[0].around)
    for row in draw(st.lists(st.sampled_from(dialect.rows), min_size=1, max_size=4, unique_by=lambda row: row.name)):
        value = draw(st.sampled_from(WAYS)) if draw(st.integers(0, 3)) else row.default
        values = merged(values, nested(dialect.places(row)[0], value))
    return dialect.name, values | {"other": OTHER}


@examples(150)
@given(files_by_environment(), st.sampled_from(sorted(TARGETS)), SECRETS, ENDS)
def test_no_report_has_a_value_of_the_environment(
    file: tuple[str, dict[str, Any]], to: str, secret: str, end: str
) -> None:
    """Reports are pasted into pull requests, so they must not contain the variable's value. Outcomes must equal those
    of a file with the literal value."""
    dialect, values = file
    environment = {
        "SECRET": secret + end,
        "NUMBER": NUMBER,
        "MAPPING": f"{{param_dtype: {secret[:8]}, made_up: [{NUMBER}]}}",
    }
    with mock.patch.dict(os.environ, environment):
        try:
            migration = migrate_text(
                yaml.safe_dump(values, allow_unicode=True, sort_keys=False), to=to, dialect=dialect
            )
        except ConfigError as error:
            report = str(error)
        else:
            report = told(migration)
            held = OmegaConf.to_container(OmegaConf.create(values), resolve=True)
            written = migrate_text(yaml.safe_dump(held, allow_unicode=True, sort_keys=False), to=to, dialect=dialect)
            assert outcomes(migration) == outcomes(written)
            if migration.is_new_file:
                assert migration.after == written.after
    assert not [part for part in (secret[:8], secret[-8:], NUMBER) if part.lower() in report.lower()], report


def outcomes(migration: Migration) -> list[tuple[str, Outcome]]:
    """Outcomes by key. A finding that is approximate only because its variable is no longer read counts as exact."""
    return [
        (each.key, Outcome.EXACT if each.hint.endswith("the variable is read no more") else each.outcome)
        for section in migration.sections
        for each in section.findings
    ]


@pytest.mark.parametrize("variable", ["list(range(0,16))", "[0, 1]"])
def test_a_value_that_decides_others_is_told_by_its_key(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker's ranks are text, like a secret; the report on the other keys must equal that without a variable."""
    monkeypatch.setenv("DEVICES", variable)
    text = "w:\n  strategy_args: {strategy_name: fsdp2_train, strategy_config: {fsdp_size: 8, save_only_model: true}}\n"
    migration = migrate_text(f"{text}  device_mapping: ${{oc.env:DEVICES}}\n", to="composer")
    assert variable not in told(migration)
    found = {each.key: each for each in migration.sections[0].findings}
    assert found["device_mapping"].value == "${oc.env:DEVICES}"
    assert outcomes(migration) == outcomes(migrate_text(f"{text}  device_mapping: {variable!r}\n", to="composer"))


@pytest.mark.parametrize("section", ["${oc.env:SECRET}", "a: ${oc.env:SECRET}"])
def test_a_section_that_a_variable_holds_is_refused_without_it(section: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Errors are printed as well, and this one used to quote the value."""
    monkeypatch.setenv("SECRET", "hunter2-Of-Nobody")
    with pytest.raises(ConfigError) as refused:
        migrate_text(f"fsdp_config: '{section}'\n")
    assert "${oc.env:SECRET}" in str(refused.value) and "hunter2" not in str(refused.value)


def test_the_resolver_of_the_environment_is_omegaconfs_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A script that imports this package can still read its own files with OmegaConf."""
    monkeypatch.setenv("SECRET", "x")
    assert resolve({"a": "${oc.env:SECRET}"}).values == {"a": "x"}
    assert OmegaConf.create({"a": "${oc.env:SECRET}"}).a == "x"
