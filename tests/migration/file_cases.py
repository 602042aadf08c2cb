"""Findings of a file, as rows of a table: ``from tests.migration.file_cases import Case, each_case``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

import pytest
import yaml

from composer_fsdp2.config.findings import Finding, Outcome
from composer_fsdp2.config.sharding import ShardingConfig
from composer_fsdp2.errors import ConfigError
from composer_fsdp2.fsdp1.keys import KEYS_BY_NAME
from composer_fsdp2.fsdp1.translate import translate
from composer_fsdp2.migration.dialect import Expression, Reading, Section
from composer_fsdp2.migration.dialects import DIALECTS
from composer_fsdp2.migration.migrate import SectionReport, find_sections, migrate_text
from composer_fsdp2.migration.paths import Path, merged, nested

EXACT, APPROXIMATE, UNNEEDED = Outcome.EXACT, Outcome.APPROXIMATE, Outcome.UNNEEDED
UNSUPPORTED, NEEDS_DECISION = Outcome.UNSUPPORTED, Outcome.NEEDS_DECISION
NO_RUN: Mapping[str, Any] = {"": None}


@dataclass(frozen=True, kw_only=True)
class Case:
    """A file and the expected result of its migration.

    Args:
        file: Its text, or its values.
        to: The target; None: the file is only read by its own dialect.
        told: By key, the outcome (None: any) and strings from the finding's reason, hint or target.
        became: By key, the target in the report.
        untold: Keys without a finding.
        run: Attributes of the run in its first section; ``NO_RUN``: no run.
        blocking: Keys that the user must decide, in all sections of the new file; None: not checked.
        says: Values in the new file; ``...``: any value, None: no such key.
        has: Strings in the new file.
        after: Its complete text; ``file``: unchanged, because nothing needs to change.
        keeps: Attributes of the run that the new file preserves.
        has_way_out: Whether each finding that needs a decision has a hint.
    """

    file: str | Mapping[str, Any]
    name: str = "run.yaml"
    to: str | None = "composer"
    told: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    became: Mapping[str, str] = field(default_factory=dict)
    untold: tuple[str, ...] = ()
    run: Mapping[str, Any] = field(default_factory=dict)
    blocking: list[str] | None = None
    says: Mapping[str, Any] = field(default_factory=dict)
    has: tuple[str, ...] = ()
    after: str | None = None
    keeps: tuple[str, ...] = ()
    has_way_out: bool = False

    def check(self) -> None:
        text = self.file if isinstance(self.file, str) else yaml.safe_dump(dict(self.file), sort_keys=False)
        reading = read_first(text, self.name)
        for path, value in self.run.items():
            assert (attrgetter(path)(reading.run) if path else reading.run) == value, path
        findings: tuple[Finding, ...] = tuple(reading.findings)
        if self.to is not None:
            migration = migrate_text(text, self.name, to=self.to)
            findings = migration.sections[0].findings
            for path, value in self.says.items():
                assert value_at_path(yaml.safe_load(migration.after), path) == value, (path, migration.after)
            assert [each for each in self.has if each not in migration.after] == [], migration.after
            if self.after is not None:
                assert migration.after == (text if self.after == "file" else self.after), migration.diff()
                again = migrate_text(migration.after, f"run{migration.suffix}", to=self.to)
                assert again.after == migration.after, again.diff()
            if self.keeps:
                kept = attrgetter(*(f"run.{path}" for path in self.keeps))
                assert kept(read_first(migration.after, f"run{migration.suffix}")) == kept(reading)
        for key, (outcome, *words) in self.told.items():
            found = [each for each in findings if key in (each.name, each.key)]
            assert len(found) == 1 and outcome in (None, found[0].outcome), (key, found)
            assert found[0].reason, key
            prose = f"{found[0].reason} {found[0].hint} {found[0].target}"
            assert [word for word in words if word not in prose] == [], (key, prose)
        assert {each.key: each.target for each in findings if each.key in self.became} == self.became
        assert not [each for each in findings if {each.name, each.key} & {*self.untold}]
        if self.blocking is not None:
            left = [each for each in findings if each.outcome.blocks] if self.to is None else migration.blocking
            assert [each.key for each in left] == self.blocking
            assert all(each.reason and (each.hint or not self.has_way_out) for each in left), left


def read_first(text: str, name: str = "run.yaml") -> Reading:
    """The first section of a file, read by its own dialect."""
    (dialect, section), *_ = find_sections(text, name)[1]
    return dialect.read(section)


def asked_of_runtime(text: str, num_ranks: int) -> ShardingConfig | None:
    """The runtime's configuration for the first section of a Composer file on so many ranks."""
    values = yaml.safe_load(text)
    section = Section.at(DIALECTS["composer"].sections(values)[0], values)
    known = {key: value for key, value in section.given.items() if key in KEYS_BY_NAME and "${" not in str(value)}
    if values.get("model", {}).get("init_device") == "mixed":  # like LLM Foundry
        known |= {"load_monolith_rank0_only": True, "sync_module_states": True}
    return translate(
        known,
        precision=values.get("precision", "amp_bf16"),
        device="cpu",
        world_size=num_ranks,
        tensor_parallel_degree=2 if "tp_config" in values else 1,
    ).config


# An error that names no key is about the number of ranks.
MESH_KEYS = {
    "data_parallel_shard_degree",
    "data_parallel_replicate_degree",
    "tensor_parallel_degree",
    "expert_parallel_degree",
    "process_group",
    "reshard_after_forward",
}


def asked_at(text: str, num_ranks: int) -> ShardingConfig | None:
    """The runtime's configuration for a Composer file on so many ranks; None if the mesh does not fit them.

    Raises:
        ConfigError: the runtime refuses the section for another reason.
    """
    try:
        return asked_of_runtime(text, num_ranks)
    except ConfigError as error:
        if error.keys and {*error.keys} <= MESH_KEYS:
            return None
        raise


def value_at_path(values: Any, path: str) -> Any:
    for key in path.split("."):
        values = values.get(key) if isinstance(values, Mapping) else None
    return values


def each_case(cases: Mapping[str, Case]) -> Any:
    """Parametrizes a test by ``case``; the names describe what a user would lose."""
    return pytest.mark.parametrize("case", cases.values(), ids=cases.keys())


def finding(said: Reading | SectionReport, key: str) -> Finding:
    (found,) = [each for each in said.findings if each.name == key]
    return found


def settings_of(expression: Expression) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for setting in expression.settings:
        values = merged(values, nested(setting.key, setting.value))
    return values


def tables_of(expression: Expression) -> dict[Path, dict[str, Any]]:
    tables: dict[Path, dict[str, Any]] = {}
    for setting in expression.settings:
        table, _, name = setting.key.rpartition(".")
        tables.setdefault(tuple(table.split(".")), {})[name] = setting.value
    return tables
