"""``${...}`` as OmegaConf reads it, in the files of those systems that read by OmegaConf."""

from __future__ import annotations

from typing import Any

import pytest
import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from composer_fsdp2.config.findings import Outcome
from composer_fsdp2.migration.interpolated import has_interpolation
from composer_fsdp2.migration.interpolation import resolve
from composer_fsdp2.migration.migrate import migrate_text

# Read by OmegaConf itself, too, which is the measure.
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
    """A run would be translated with another value than it trains with."""
    values = yaml.safe_load(WHOLE)
    # A resolver may look at all of the file; without one only those parts are held that a text refers to.
    without_resolvers = {key: value for key, value in values.items() if key not in ("decoded", "given", "selected")}
    by_resolver_alone = {"plain": {"name": 3}, "selected": "${oc.select:plain.name,z}"}
    for each in (values, without_resolvers, by_resolver_alone):
        assert resolve(each).values == OmegaConf.to_container(OmegaConf.create(each), resolve=True)


def test_what_cannot_be_resolved_stays_and_hides_nothing():
    """One interpolation that is not for this machine would take all others of the file with it."""
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


def test_only_systems_that_read_by_omegaconf_interpolate():
    """Hugging Face would get ``${...}`` as it stands, and a report of what it stands for would be of another run."""
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
