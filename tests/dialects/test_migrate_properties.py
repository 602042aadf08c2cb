"""What holds for every file, of whichever dialect: bytes, keys, second runs, and the way there and back."""

from __future__ import annotations

import dataclasses
import re

import pytest
import yaml
from hypothesis import assume, event, given
from hypothesis import strategies as st
from support.examples import examples

from composer_fsdp2.compat.dialects import DIALECTS, Section
from composer_fsdp2.compat.migration.migrate import Migration, migrate_text
from composer_fsdp2.compat.migration.targets import TARGETS
from composer_fsdp2.config import ShardingConfig
from tests.dialects.documents import EVERY, File, composer_files, merging_files, with_windows_lines

ANY_FILE = st.sampled_from(sorted(EVERY)).flatmap(EVERY.__getitem__)
ANY_TARGET = st.sampled_from(sorted(TARGETS))


def migrated(file: File, to: str) -> Migration:
    return migrate_text(file.text, f"run{file.suffix}", to=to)


@examples(100)
@given(ANY_FILE, ANY_TARGET)
def test_outside_of_the_section_not_a_byte_changes(file: File, to: str) -> None:
    """A user's comments, quotes and blank lines elsewhere would be lost, and every diff would have to be read."""
    result = migrated(file, to)
    if not result.is_new_file:
        assert result.after.startswith(file.before)
        assert result.after.endswith(file.after)
        assert result.after.count("\r\n") in (0, result.after.count("\n"))


@examples(100)
@given(ANY_FILE, ANY_TARGET)
def test_every_key_has_one_finding(file: File, to: str) -> None:
    """A key without a finding was dropped in silence; one with two could be reported as good and bad."""
    result = migrated(file, to)
    told = [finding.key for section in result.sections for finding in section.findings]
    for key in file.keys:
        short = key if key in told else key.partition(".")[2]
        assert told.count(short) == 1, (key, told)


@examples(100)
@given(ANY_FILE, ANY_TARGET)
def test_comments_of_the_section_stay(file: File, to: str) -> None:
    """What a user wrote about a setting is worth more than the setting."""
    result = migrated(file, to)
    if not result.is_new_file:
        inside = result.after[len(file.before) : len(result.after) - len(file.after)]
        found = re.findall(r"# (?:c\d+|here)(?!\d)", inside)
        assert sorted(found) == sorted(file.comments)


@examples(100)
@given(ANY_FILE, ANY_TARGET)
def test_a_second_run_changes_nothing(file: File, to: str) -> None:
    """A user who runs it in a hook would get another file each time."""
    once = migrated(file, to)
    if once.after == once.before and not once.is_new_file:
        return
    name = f"run{once.suffix}"
    assert migrate_text(once.after, name, to=to).after == once.after


@examples(100)
@given(ANY_FILE, ANY_TARGET)
def test_the_new_text_is_a_file_of_its_format(file: File, to: str) -> None:
    """The training script would not even start."""
    result = migrated(file, to)
    if result.suffix != ".toml":
        assert isinstance(yaml.safe_load(result.after), dict)


def config_in(text: str, suffix: str) -> ShardingConfig | None:
    """What the first section of a Composer file asks for."""
    dialect = DIALECTS["composer"]
    values = yaml.safe_load(text)
    path = dialect.sections(values)[0]
    at = values
    for key in path:
        at = at[key]
    run = dialect.read(Section(path=path, said=at, around=values)).run
    return run and run.config


@examples(100)
@given(st.one_of(composer_files(), merging_files(), composer_files().map(with_windows_lines)))
def test_a_composer_file_asks_for_the_same_before_and_after(file: File) -> None:
    """The migrated run would shard, cast or prefetch otherwise than the run that it came from."""
    result = migrated(file, "composer")
    assert config_in(result.after, ".yaml") == config_in(file.text, ".yaml")


# Which part of a ShardingConfig a finding of a target is about. Without one it has to be the same after the way back.
PARTS = {
    "mesh": ["mesh"],
    "reshard_after_forward": ["reshard_after_forward"],
    "precision": ["mixed_precision", "precision"],
    "autocast": ["precision"],
    "mixed_precision": ["mixed_precision", "cast_root_inputs"],
    "casting of inputs": ["mixed_precision.cast_forward_inputs", "cast_root_inputs"],
    "buffers": ["buffer_dtype"],
    "buffer_dtype": ["buffer_dtype"],
    "activation checkpointing": ["activation_checkpointing"],
    "activation offloading": ["activation_checkpointing"],
    "activation_checkpointing": ["activation_checkpointing"],
    "prefetch": ["prefetch"],
    "gradient_sync": ["accumulation"],
    "reshard_after_backward": ["accumulation"],
    "accumulation": ["accumulation"],
    "collective_guard": ["collective_guard"],
    "sync_module_states": ["sync_module_states"],
    "keep_low_precision_grads": ["keep_low_precision_grads"],
    "verbose": ["verbose"],
    "strict": ["strict"],
}


def parts_of(config: ShardingConfig) -> dict[str, object]:
    """Its fields, the policy's apart from each other."""
    fields = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    policy = fields.pop("mixed_precision")
    if not config.activation_checkpointing.checkpoint:  # how it would be done decides nothing
        fields["activation_checkpointing"] = config.activation_checkpointing.cpu_offload
    if config.mesh.replicate == 1:  # one replica is none
        fields["mesh"] = dataclasses.replace(config.mesh, replicate=None)
    return fields | {
        f"mixed_precision.{field.name}": getattr(policy, field.name) for field in dataclasses.fields(policy)
    }


@pytest.mark.parametrize("to", ["roll", "torchtitan", "accelerate"])
@examples(100)
@given(file=composer_files(sane=True))
def test_there_and_back(to: str, file: File) -> None:
    """What a target cannot say, and no finding names, was lost without a word."""
    before = config_in(file.text, ".yaml")
    there = migrated(file, to)
    if before is None:
        return
    told = [finding for section in there.sections for finding in section.findings if finding.key.startswith("(")]
    names = {finding.key.strip("()").split(".")[0] for finding in told}
    excused = tuple(part for name in names for part in PARTS.get(name, ()))
    assume("mesh" not in excused)  # the way back would be another run altogether
    back = config_in(migrate_text(there.after, f"run{there.suffix}", to="composer").after, ".yaml")
    assert back is not None
    same = {name: value for name, value in parts_of(before).items() if not name.startswith(excused)}
    assert {name: value for name, value in parts_of(back).items() if name in same} == same
    event(f"{len(same)} parts compared")
