"""Properties of every file in every dialect: bytes, keys, second runs, and migrating there and back."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import tomllib
from typing import Any
from unittest import mock

import pytest
import yaml
from hypothesis import assume, event, given
from hypothesis import strategies as st
from support.examples import examples

from composer_fsdp2.config.findings import Finding, Origin, Outcome
from composer_fsdp2.config.mesh import MeshSpec
from composer_fsdp2.errors import ConfigError
from composer_fsdp2.migration.dialects import DIALECTS
from composer_fsdp2.migration.lens import decides
from composer_fsdp2.migration.migrate import Migration, find_sections, may_configure, migrate_text
from composer_fsdp2.migration.run import RunConfig, changed
from composer_fsdp2.migration.targets import TARGETS
from tests.migration.file_cases import asked_at, read_first
from tests.migration.generated import ANY_FILE, EVERY, File, composer_files, merging_files, with_windows_lines

ANY_TARGET = st.sampled_from(sorted(TARGETS))


def migrated(file: File, to: str) -> Migration:
    return migrate_text(file.text, f"run{file.suffix}", to=to)


@examples(120)
@given(ANY_FILE, ANY_TARGET)
def test_any_file_for_any_target(file: File, to: str) -> None:
    """The rest of the file is unchanged, no key or comment is silently lost, and a second run changes nothing."""
    assert may_configure(file.text.encode()), "in a folder the file would be passed over in silence"
    result = migrated(file, to)
    check_what_is_told(file, to, result)
    check_format(file, result)
    if not result.is_new_file:
        check_surroundings(file, to, result)
    if result.is_changed or result.is_new_file:
        assert migrate_text(result.after, f"run{result.suffix}", to=to).after == result.after


@examples(30)
@given(EVERY["axolotl"])
def test_beside_axolotls_section_comes_its_version_alone(file: File) -> None:
    """Exactly one line is written outside a section; a second one, or one elsewhere, is an error."""
    check_surroundings(file, "axolotl", migrated(file, "axolotl"))


@pytest.mark.parametrize("system", ["roll", "torchtitan"])
@examples(30)
@given(st.data())
def test_what_trains_on_fsdp2_stays_as_it_is(system: str, data: st.DataObject) -> None:
    file = data.draw(EVERY[system])
    assert migrated(file, system).after == file.text


def check_surroundings(file: File, to: str, result: Migration) -> None:
    """A user's comment on a setting must survive, and outside the section no byte changes."""
    after = result.after
    if {section.dialect for section in result.sections} == {to} == {"axolotl"}:
        # Its version key is beside the section: before base_model, the first key of every such file here, unless the
        # migration removes a key of FSDP1's, such as fsdp.
        after = re.sub(r"^fsdp_version: 2\n(?=base_model:)", "", after, count=1, flags=re.MULTILINE)
    if to == "composer":  # batch sizes are migrated in place
        after = after.replace("device_train_microbatch_size: 1\n", "micro_batch_size: 1\n")
    assert after.startswith(file.before) and result.after.endswith(file.after)
    assert result.after.count("\r\n") in (0, result.after.count("\n"))
    inside = result.after[len(file.before) : len(result.after) - len(file.after)]
    assert sorted(re.findall(r"# (?:c\d+|here)(?!\d)", inside)) == sorted(file.comments)


def check_what_is_told(file: File, to: str, result: Migration) -> None:
    """A key has one finding with its reason. Losses in the target are reported with their own reason, never with
    'please report the file as a fault'."""
    found = [finding for section in result.sections for finding in section.findings]
    told = [finding.key for finding in found if finding.origin is Origin.KEY]
    for key in file.keys:
        assert told.count(key if key in told else key.partition(".")[2]) == 1, (key, told)
    assert all(finding.reason for finding in found if finding.outcome is not Outcome.EXACT)
    assert not [each for each in found if each.origin is Origin.WRITING and each.outcome.blocks]
    for report, (dialect, section) in zip(
        result.sections, find_sections(file.text, f"run{file.suffix}")[1], strict=True
    ):
        run = None if dialect.name == TARGETS[to].name else dialect.read(section).run
        reasons = {(each.outcome, each.reason) for each in report.findings}
        if run is not None and not any("cannot be resolved" in reason for _, reason in reasons):
            lacks = {(each.outcome, each.reason) for each in TARGETS[to].express(run).findings}
            assert lacks <= reasons, lacks - reasons


def check_format(file: File, result: Migration) -> None:
    """Otherwise the training script would not start."""
    if file.text.startswith("{") and not result.is_new_file:  # also in a file with a YAML suffix
        assert isinstance(json.loads(result.after), dict)
    # PyYAML's parser does not accept a tab as a space, not even in JSON, so it could not read the original, either.
    if result.suffix == ".yaml" and ("\n\t" not in file.text or result.is_new_file):
        assert isinstance(yaml.safe_load(result.after), dict)
    if result.suffix == ".toml":
        assert tomllib.loads(result.after)


# ---------------------------------------------------------------------------------------------------------------------
# Exact means equal: checked with the runtime's own parser


@examples(60)
@given(st.one_of(composer_files(), merging_files(), composer_files().map(with_windows_lines)))
def test_a_composer_file_asks_for_the_same_before_and_after(file: File) -> None:
    """Otherwise the migrated run would shard, cast or prefetch differently from the original. Or, after `exact` with
    exit code 0, it would refuse its own configuration at its start."""
    result = migrated(file, "composer")
    assert read_first(result.after).run == read_first(file.text).run
    if result.exit_code:
        return
    with mock.patch.dict(os.environ, LOCAL_WORLD_SIZE="2"):
        asked = {ranks: asked_at(result.after, ranks) for ranks in (2, 4, 8, 16)}
        assert any(asked.values()), "no number of ranks can train it"
        before = {ranks: asked_at(file.text, ranks) for ranks in asked}
    assert asked == before


@examples(30)
@given(st.one_of(composer_files(), merging_files()), st.sampled_from(sorted(TARGETS)))
def test_no_machine_decides_what_becomes_of_a_file(file: File, to: str) -> None:
    """A laptop, a CI job and the node must get the same result for a file."""
    on_laptop = migrated(file, to)
    with (
        mock.patch.dict(os.environ, LOCAL_WORLD_SIZE="8", WORLD_SIZE="16"),
        mock.patch("importlib.util.find_spec", return_value=object()),
    ):
        assert migrated(file, to) == on_laptop


COMPOSER_FILE = """\
precision: amp_bf16
algorithms: {gradient_clipping: {clipping_type: norm, clipping_threshold: 0.5}}
fsdp_config:
  sharding_strategy: _HYBRID_SHARD_ZERO2
  data_parallel_shard_degree: 4
  data_parallel_replicate_degree: 2
  mixed_precision: PURE
  activation_checkpointing: true
  activation_checkpointing_reentrant: false
  activation_checkpointing_policy: [LlamaDecoderLayer]
  cpu_offload: true
  state_dict_type: sharded
  sync_module_states: true
  context_parallel_degree: 2
  wrap_policy: {transformer_layer_cls_to_wrap: [LlamaDecoderLayer]}
  async_save: true
  tiled_mlp: {classes: [LlamaMLP], chunks: 8}
  backward_prefetch: NONE
  gradient_sync: last
"""
AXOLOTL_FILE = """\
base_model: m
micro_batch_size: 1
datasets: []
bf16: true
gradient_accumulation_steps: 2
gradient_checkpointing: true
dp_shard_size: 4
dp_replicate_size: 2
context_parallel_size: 2
fsdp: [shard_grad_op, auto_wrap, offload]
fsdp_config: {fsdp_transformer_layer_cls_to_wrap: LlamaDecoderLayer, fsdp_state_dict_type: SHARDED_STATE_DICT}
"""


@pytest.mark.parametrize("to", sorted(TARGETS))
def test_a_setting_that_is_not_written_is_told(to: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A writer that omits a setting would change training under `exact`. The test omits each setting in turn."""
    text = AXOLOTL_FILE if to == "composer" else COMPOSER_FILE  # a file is never rewritten in its own dialect
    kind = type(TARGETS[to])
    usual = kind.express
    clean = migrate_text(text, "run.yaml", to=to)
    assert not [each for each in clean.sections[0].findings if "please report" in each.hint]
    parts = [
        (each.key, name)
        for each in usual(TARGETS[to], read_first(text).run).settings
        for name in (each.value if isinstance(each.value, dict) else [None])
    ]
    told = []
    for key, name in parts:

        def express(self: Any, run: RunConfig, key: str = key, name: str | None = name) -> Any:
            whole = usual(self, run)
            kept = [
                each if name is None else dataclasses.replace(each, value=without(each.value, name))
                for each in whole.settings
                if each.key == key and name is not None
            ]
            others = [each for each in whole.settings if each.key != key]
            return dataclasses.replace(whole, settings=(*others, *kept))

        monkeypatch.setattr(kind, "express", express)
        spoilt = migrate_text(text, "run.yaml", to=to)
        runs = [read_first(each.after, f"run{each.suffix}").run for each in (clean, spoilt)]
        if None not in runs and changed(*runs).keys() <= {"num_ranks"}:
            continue  # the same value without it, on as many ranks
        is_open = any(each.target == key for each in clean.blocking)  # which already stops the user
        new = [each for each in spoilt.sections[0].findings if each not in clean.sections[0].findings]
        assert is_open or [each for each in new if each.outcome is not Outcome.EXACT], (key, name)
        told.append(key)
    assert len(told) > 4, told


def without(values: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in values.items() if key != name}


# The part of a run that a target's finding is about. Without a finding, the part must be equal after the way back.
PARTS = {
    "mesh": ["mesh"],
    "number of ranks": ["mesh"],
    "units": ["wrap."],
    "further units": ["wrap.others"],
    "recomputed modules": ["recomputed modules"],
    "frozen parameters": ["freeze"],
    "reshard_after_forward": ["reshard_after_forward"],
    "param_dtype": ["mixed_precision.param_dtype", "precision"],
    "reduce_dtype": ["mixed_precision.reduce_dtype"],
    "gradient clipping": ["max_grad_norm"],
    "clipping by value": ["max_grad_norm", "other_clipping"],
    "products in fp8": ["precision"],
    "autocast": ["precision"],
    "mixed_precision": ["mixed_precision"],
    "mixed_precision.param_dtype": ["mixed_precision.param_dtype"],
    "mixed_precision.reduce_dtype": ["mixed_precision.reduce_dtype"],
    "mixed_precision.cast_forward_inputs": ["mixed_precision.cast", "mixed_precision.output_dtype"],
    "casting of inputs": ["mixed_precision.cast"],
    "casting of the root's inputs": ["mixed_precision.cast"],
    "buffer_dtype": ["mixed_precision.buffer_dtype"],
    "keep_low_precision_grads": ["mixed_precision.gradients"],
    "activation_checkpointing": ["activation_checkpointing"],
    "reentrant checkpointing": ["activation_checkpointing"],
    "activation offloading": ["activation_checkpointing"],
    "prefetch in forward": ["prefetch"],
    "prefetch in backward": ["prefetch"],
    "gradient_sync": ["accumulation"],
    "reshard_after_backward": ["accumulation"],
    "collective_guard": ["collective_guard"],
    "idle experts": ["idle_experts"],
    "split experts": ["expert_parallel_degree"],
    "idle towers": ["idle_towers"],
    "context parallelism": ["context_parallel_degree"],
    "tiled MLP": ["tiled_mlp"],
    "classes of tiled MLPs": ["tiled_mlp"],
    "check_data": ["check_data"],
    "broadcast_batch": ["broadcast_batch"],
    "sync_module_states": ["sync_module_states"],
    "verbose": ["verbose"],
}
# Fields with another name among the parts.
OF_FIELDS = {"activation_checkpointing.classes": ["recomputed modules"]}
# Units that a system always makes: ROLL the embeddings if untied, TorchTitan embeddings and head.
ALWAYS_UNITS = {"roll": {"embeddings"}, "torchtitan": {"embeddings", "output"}}
# Attributes of the run itself, besides its configuration.
OF_RUN = ("precision", "verbose", "max_grad_norm", "other_clipping")


def parts_of(run: RunConfig) -> dict[str, Any]:
    """Its comparable fields, with each field of mixed precision separate."""
    config = run.config
    fields = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    policy = fields.pop("mixed_precision")
    wrap = fields.pop("wrap")
    fields |= {"wrap.layers": (wrap.kind, wrap.classes, wrap.min_num_params), "wrap.others": {*wrap.others}}
    for name in ("activation_checkpointing", "prefetch", "accumulation"):
        value = fields.pop(name)
        fields |= {f"{name}.{field.name}": getattr(value, field.name) for field in dataclasses.fields(value)}
    fields["recomputed modules"] = fields.pop("activation_checkpointing.classes")
    if not config.activation_checkpointing.checkpoint:  # without checkpointing, its options have no effect
        del fields["activation_checkpointing.reentrant"], fields["activation_checkpointing.transformer_engine"]
    if config.mesh.has_replicas and config.mesh.replicate_degree == 1:  # one replica means none
        fields["mesh"] = MeshSpec.of_degrees(config.mesh.shard_degree)
    fields |= {f"mixed_precision.{field.name}": getattr(policy, field.name) for field in dataclasses.fields(policy)}
    return fields | {name: getattr(run, name) for name in OF_RUN}


def parts_of_key(finding: Finding) -> list[str]:
    """The parts that a Composer key sets, if its finding reports a loss in the target."""
    if finding.origin is not Origin.KEY or finding.outcome is Outcome.EXACT:
        return []
    if finding.key == "freeze" and not finding.outcome.blocks:  # other parameters would be trained
        return []
    if finding.key == "wrap_policy":
        return ["wrap.others"] if "no word for" in finding.reason else ["wrap."]
    row = DIALECTS["composer"].row_of(finding.key)
    how = ["activation_checkpointing."]  # whether to checkpoint is reported together with how
    told_with = dict.fromkeys((f"activation_checkpointing.{name}" for name in ("checkpoint", "cpu_offload")), how)
    return [
        part for name in (() if row is None else decides(row)) for part in (OF_FIELDS | told_with).get(name, [name])
    ]


def parts_at(run: RunConfig, num_ranks: int) -> dict[str, Any]:
    """The parts on so many ranks; without a mesh if it does not fit them."""
    parts = parts_of(run)
    mesh = parts.pop("mesh").data_parallel
    try:
        mesh = mesh.resolve(num_ranks)
    except ConfigError:
        return parts
    return parts | {"mesh": mesh.groups or (mesh.shard_degree, mesh.replicate_degree)}


@examples(150)
@given(ANY_FILE, ANY_TARGET)
def test_exact_is_equal_when_it_is_read_again(file: File, to: str) -> None:
    """`exact` for a run that differs would be a lie. Three numbers of ranks, since an open degree can hide a difference
    at one."""
    target = TARGETS[to]
    with mock.patch.dict(os.environ, LOCAL_WORLD_SIZE="8"):
        result = migrated(file, to)
        found = find_sections(file.text, f"run{file.suffix}")[1]
        reading = found[0][0].read(found[0][1])
        is_written = result.is_changed or result.is_new_file or found[0][0] is target
        assume(reading.run is not None and len(found) == 1 and is_written)
        (_, section), *_ = find_sections(result.after, f"run{result.suffix}", dialect=target.name)[1]
        again = target.read(section).run
        assume(again is not None)
        exact = [each for each in result.sections[0].findings if each.outcome is Outcome.EXACT and each.asks]
        keys = [each.key for each in exact if each.origin is Origin.KEY and each.key in reading.rows]
        for num_ranks in (8, 24, 64):
            before, after = parts_at(reading.run, num_ranks), parts_at(again, num_ranks)
            for key in keys:
                names = [part for name in decides(reading.rows[key]) for part in OF_FIELDS.get(name, [name])]
                for part in (part for part in before if part.startswith(tuple(names)) and part in after):
                    is_more = part == "wrap.others" and before[part] <= after[part]  # units that change no number
                    assert is_more or before[part] == after[part], (key, part, num_ranks)
        event(f"{len(keys)} exact keys to {to}")


@pytest.mark.parametrize("to", ["roll", "torchtitan", "accelerate", "axolotl"])
@examples(30)
@given(file=composer_files(sane=True))
def test_there_and_back(to: str, file: File) -> None:
    """Otherwise a setting that the target does not support, without a finding, is silently lost."""
    before = read_first(file.text).run
    there = migrated(file, to)
    if before is None:
        return
    found = [finding for section in there.sections for finding in section.findings]
    told = [finding for finding in found if finding.origin is not Origin.KEY]
    names = {finding.key if finding.key in PARTS else finding.key.split(".")[0] for finding in told}
    excused = tuple(part for name in names for part in PARTS.get(name, ()))
    excused += tuple(part for finding in found for part in parts_of_key(finding))
    if before.config.activation_checkpointing.classes is None:  # no system can name the modules that hooks checkpoint
        excused += ("recomputed modules",)
    assume("mesh" not in excused)  # the way back would be an entirely different run
    back = read_first(migrate_text(there.after, f"run{there.suffix}", to="composer").after).run
    assert back is not None
    asked = parts_of(before)
    if there.is_changed:
        asked["wrap.others"] |= ALWAYS_UNITS.get(to, set())
    same = {name: value for name, value in asked.items() if not name.startswith(excused)}
    assert {name: value for name, value in parts_of(back).items() if name in same} == same
    event(f"{len(same)} parts compared")
