"""DeepSpeed's own JSON file: referenced by a file of accelerate's or axolotl's, and alone."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.commands import run_here

from composer_fsdp2.config.findings import Finding, Origin, Outcome
from composer_fsdp2.migration.dialects.huggingface.deepspeed_file import with_settings
from composer_fsdp2.migration.documents import open_document
from composer_fsdp2.migration.files import Destination, FileResult, migrate_files, sources_of
from composer_fsdp2.migration.migrate import ForeignSystemError, Migration, migrate_text
from composer_fsdp2.preflight.run_file import RunFile
from tests.migration.file_cases import APPROXIMATE, EXACT, NEEDS_DECISION, UNNEEDED, read_first

# In the forms used by the examples of transformers, axolotl and DeepSpeed.
ZERO3: dict[str, Any] = {
    "fp16": {"enabled": "auto", "loss_scale": 0, "loss_scale_window": 1000, "initial_scale_power": 16},
    "bf16": {"enabled": True},
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "offload_param": {"device": "cpu"},
        "overlap_comm": True,
        "sub_group_size": 1e9,
        "reduce_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
        "stage3_gather_16bit_weights_on_model_save": True,
    },
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "steps_per_print": 2000,
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "wall_clock_breakdown": False,
}
ZERO2: dict[str, Any] = {
    "zero_optimization": {"stage": 2, "allgather_partitions": True, "round_robin_gradients": True},
    "fp16": {"enabled": True, "loss_scale": 0},
    "gradient_clipping": 0.5,
    "gradient_accumulation_steps": 4,
}
ACCELERATE = """\
compute_environment: LOCAL_MACHINE
deepspeed_config:
  deepspeed_config_file: zero.json
distributed_type: DEEPSPEED
num_machines: 1
num_processes: 8
"""
AXOLOTL = """\
base_model: some/model
micro_batch_size: 1
val_set_size: 0.1
gradient_accumulation_steps: 4
bf16: auto
deepspeed: zero.json  # three stages
"""
NAMING = {"accelerate": ACCELERATE, "axolotl": AXOLOTL}


def text_of(values: Mapping[str, Any]) -> str:
    return json.dumps(values, indent=2)


def reader_of(values: Mapping[str, Any]) -> Callable[[str], str | None]:
    return {"zero.json": text_of(values)}.get


def migrated(file: str, values: Mapping[str, Any], to: str = "composer") -> Migration:
    return migrate_text(file, "run.yaml", to=to, read=reader_of(values))


def told(migration: Migration) -> dict[str, Finding]:
    (section,) = migration.sections
    found = {each.name: each for each in section.findings}
    assert len(found) == len(section.findings)  # each key once
    return found


def without(values: Mapping[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in values.items() if key not in keys}


def leaves(values: Mapping[str, Any], above: str = "") -> Iterator[str]:
    for key, value in values.items():
        if isinstance(value, dict):
            yield from leaves(value, f"{above}{key}.")
        else:
            yield above + key


# --- compared with accelerate


def of_accelerate(
    folder: Path, monkeypatch: pytest.MonkeyPatch, file: str, values: Mapping[str, Any]
) -> dict[str, Any]:
    """The settings after accelerate's launcher, plugin and ``Accelerator.prepare``, and DeepSpeed's defaults."""
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils import DeepSpeedPlugin
    from accelerate.utils.launch import prepare_deepspeed_cmd_env

    for name in [name for name in os.environ if name.startswith("ACCELERATE_")]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(folder)
    Path("zero.json").write_text(text_of(values))
    Path("run.yaml").write_text(file)
    arguments, defaults, has_precision = _validate_launch_command(
        launch_command_parser().parse_args(["--config_file", "run.yaml", "script.py"])
    )
    fields = [*defaults.deepspeed_config, *(["mixed_precision"] if has_precision else [])]
    arguments.deepspeed_fields_from_accelerate_config = ",".join(fields)
    _, environment = prepare_deepspeed_cmd_env(arguments)
    for name, value in environment.items():
        if name.startswith("ACCELERATE_"):
            monkeypatch.setenv(name, value)
    plugin = DeepSpeedPlugin()
    plugin.set_mixed_precision(environment["ACCELERATE_MIXED_PRECISION"])
    filled = {"gradient_clipping": 1.0, "zero_optimization.stage3_gather_16bit_weights_on_model_save": False}
    for name, value in filled.items():
        plugin.fill_match(name, must_match=False, **{name: value})
    zero = plugin.deepspeed_config["zero_optimization"]
    devices = {name: (zero.get(f"offload_{name}") or {}).get("device", "none") for name in ("optimizer", "param")}
    enabled = [name for name in ("bf16", "fp16") if plugin.deepspeed_config[name]["enabled"]]
    steps = plugin.deepspeed_config["gradient_accumulation_steps"]
    return {
        "zero_stage": zero.get("stage", 0),
        "offload_optimizer_device": devices["optimizer"],
        "offload_param_device": devices["param"],
        "zero3_save_16bit_model": zero.get("stage3_gather_16bit_weights_on_model_save", False),
        "gradient_clipping": plugin.deepspeed_config.get("gradient_clipping", 0) or None,
        "gradient_accumulation_steps": 1 if steps == "auto" else steps,
        "mixed_precision": (enabled or ["no"])[0],
    }


AUTO = {"bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto"}}
READ: dict[str, dict[str, Any]] = {
    "zero 3": ZERO3,
    "zero 2": ZERO2,
    "no stage": {"zero_optimization": {}},
    "auto": {"zero_optimization": {"stage": "auto", "offload_optimizer": {"device": "auto"}}, **AUTO},
    "one device": {"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}, "gradient_clipping": 0.0},
    "saves as it is": {"zero_optimization": {"stage": 3, "stage3_gather_16bit_weights_on_model_save": "auto"}},
}


@pytest.mark.parametrize("values", READ.values(), ids=READ.keys())
def test_it_is_read_as_accelerate_reads_it(
    values: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """accelerate's own file defaults to stage 2 and a norm of 1; DeepSpeed's JSON has other defaults for stage, norm
    and dtype."""
    found = with_settings(open_document(ACCELERATE), reader_of(values), to="composer", allow_unreferenced=True)
    assert found is not None
    settings = read_first(found.text).details.settings
    meant = of_accelerate(tmp_path, monkeypatch, ACCELERATE, values)
    assert {key: settings[key] for key in meant} == meant


@pytest.mark.parametrize("key", ["zero_stage: 2", "gradient_clipping: 1.0", "offload_param_device: none"])
def test_what_accelerate_refuses_beside_it_is_a_decision(
    key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that never started would be migrated with exit code 0, using either of two values."""
    beside = ACCELERATE.replace("zero.json\n", f"zero.json\n  {key}\n")
    for text in (beside, f"{ACCELERATE}mixed_precision: 'no'\n"):
        with pytest.raises(ValueError, match="will be ignored"):
            of_accelerate(tmp_path, monkeypatch, text, ZERO3)
        migration = migrated(text, ZERO3)
        assert [each.key for each in migration.blocking] == ["deepspeed_config.deepspeed_config_file"]
        of_json = read_first(migration.after).run
        assert of_json is not None and of_json.config.cpu_offload and of_json.precision == "amp_bf16"
        assert of_json.max_grad_norm == 1.0


# --- the migrated file


def test_accelerates_file_says_what_the_other_one_said() -> None:
    """Otherwise users had to copy the settings by hand."""
    migration = migrated(ACCELERATE, ZERO3, to="accelerate")
    assert migration.before == ACCELERATE and migration.exit_code == 0
    values = yaml.safe_load(migration.after)
    assert (values["distributed_type"], values["mixed_precision"], values["num_processes"]) == ("FSDP", "bf16", 8)
    assert "deepspeed_config" not in values and values["fsdp_config"]["fsdp_offload_params"] is True
    assert values["fsdp_config"]["fsdp_state_dict_type"] == "FULL_STATE_DICT"
    found = told(migration)
    stage, ranks = found["zero_optimization.stage"], found["deepspeed_config.deepspeed_config_file"]
    line = text_of(ZERO3).split('"stage"')[0].count("\n") + 1
    assert (stage.value, stage.where) == (3, f"zero.json:{line}") and ranks.where == "run.yaml:3"
    assert found["distributed_type"].where == "run.yaml:4"  # as in the user's own file


def test_in_a_json_of_accelerates_it_is_read_as_well() -> None:
    text = text_of(yaml.safe_load(ACCELERATE))
    migration = migrate_text(text, "run.json", to="accelerate", read=reader_of(ZERO3))
    assert json.loads(migration.after)["fsdp_config"]["fsdp_offload_params"] is True


def test_a_file_that_says_nothing_to_migrate_stays_as_it_is() -> None:
    """--force would write DeepSpeed's settings into the file that references it."""
    values = {"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": "disk"}}}
    migration = migrated(ACCELERATE, values)
    assert migration.after == ACCELERATE and not migration.is_changed
    assert [each.key for each in migration.blocking] == ["zero_optimization.offload_param.device"]
    assert "disk" in migration.blocking[0].reason


def test_axolotls_section_takes_the_place_of_deepspeed() -> None:
    """axolotl's file used to be refused."""
    migration = migrated(AXOLOTL, ZERO3, to="axolotl")
    dtype = "dtype of stored parameters"  # axolotl's own, in every file
    assert [each.key for each in migration.blocking] == [dtype]
    values = yaml.safe_load(migration.after)
    assert {**values, "fsdp_config": {}} == {
        **without(yaml.safe_load(AXOLOTL), "deepspeed"),
        "fsdp_version": 2,
        "fsdp_config": {},
        "accelerator_config": {"gradient_accumulation_kwargs": {"sync_each_batch": True}},
    }
    assert values["fsdp_config"] == {
        "state_dict_type": "FULL_STATE_DICT",
        "cpu_ram_efficient_loading": True,
        "reshard_after_forward": True,
        "offload_params": True,
        "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
    }
    assert told(migration)["deepspeed"].where == "run.yaml:6"


@pytest.mark.parametrize("name", NAMING)
@pytest.mark.parametrize(("stage", "reshards"), [(3, True), (2, False), (1, False)])
def test_the_run_is_that_of_the_stage_whoever_names_it(name: str, stage: int, reshards: bool) -> None:
    """axolotl's run would keep gradients unsharded between microbatches, or prefetch nothing, like FSDP1 there."""
    values = {**ZERO3, "zero_optimization": {**ZERO3["zero_optimization"], "stage": stage, "offload_param": {}}}
    run = read_first(migrated(NAMING[name], values).after).run
    of_accelerates = read_first(migrated(ACCELERATE, values).after).run
    assert run is not None and of_accelerates is not None
    assert run.config.reshard_after_forward is reshards and run.config.cpu_offload
    for each in ("prefetch", "sync_module_states", "mixed_precision", "wrap", "mesh"):
        assert getattr(run.config, each) == getattr(of_accelerates.config, each), each
    assert (run.precision, run.state_dict_type) == (of_accelerates.precision, of_accelerates.state_dict_type)
    assert run.config.accumulation.gradient_sync.value == ("last" if (name, stage) == ("axolotl", 1) else "every")


def test_a_trainer_clips_where_the_json_does() -> None:
    """max_grad_norm, 1 by default, has no effect under DeepSpeed, whose own key the JSON lacks."""
    for file in (AXOLOTL, f"{AXOLOTL}max_grad_norm: 0.3\n"):
        clips = read_first(migrated(file, ZERO3).after).run
        none = migrated(file, without(ZERO3, "gradient_clipping"))
        run = read_first(none.after).run
        assert clips is not None and clips.max_grad_norm == (0.3 if "0.3" in file else 1.0)
        assert run is not None and run.max_grad_norm is None
        assert told(none)["(implicit) gradient clipping"].outcome is EXACT
    kept = yaml.safe_load(
        migrated(f"{AXOLOTL}max_grad_norm: 0.3\n", without(ZERO3, "gradient_clipping"), "axolotl").after
    )
    assert kept["max_grad_norm"] == 0


def test_axolotl_may_have_the_settings_in_its_own_file() -> None:
    text = AXOLOTL.replace("zero.json  # three stages", json.dumps(ZERO3))
    migration = migrate_text(text, "run.yaml", to="composer")
    run = read_first(migration.after).run
    assert run is not None and run.config.cpu_offload
    assert told(migration)["zero_optimization.stage"].where == "run.yaml:6"


# --- findings

DECIDED: dict[str, tuple[Any, Outcome]] = {
    "scheduler": ({"type": "WarmupLR", "params": {"warmup_num_steps": "auto"}}, NEEDS_DECISION),
    "optimizer": ({"type": "AdamW", "params": {"lr": 3e-5, "betas": "auto"}}, NEEDS_DECISION),
    "tensor_parallel": ({"autotp_size": 2}, NEEDS_DECISION),
    "compile": ({"disable": False, "backend": "inductor"}, NEEDS_DECISION),
    "zero_optimization.mics_shard_size": (8, NEEDS_DECISION),
    "zero_optimization.zero_quantized_gradients": (True, NEEDS_DECISION),
    "zero_optimization.zero_quantized_weights": (False, UNNEEDED),
    "zero_optimization.stage3_max_live_parameters": (1e9, UNNEEDED),
    "zero_optimization.max_reuse_distance": (1e9, UNNEEDED),
    "activation_checkpointing": ({"partition_activations": False, "cpu_checkpointing": False}, UNNEEDED),
    "curriculum_learning": ({"enabled": True}, NEEDS_DECISION),
    "tensorboard": ({"enabled": True, "output_path": "x"}, NEEDS_DECISION),
    "wandb": ({"enabled": False, "project": "x"}, UNNEEDED),
    "communication_data_type": ("fp32", NEEDS_DECISION),
    "my_own": (1, NEEDS_DECISION),
}


@pytest.mark.parametrize("name", [*NAMING, "alone"])
def test_every_key_of_it_is_told(name: str) -> None:
    """A schedule made by DeepSpeed, or a quantized gradient, would be lost silently."""
    values = {**ZERO3, "zero_optimization": dict(ZERO3["zero_optimization"])}
    for key, (value, _) in DECIDED.items():
        inner = key.removeprefix("zero_optimization.")
        (values["zero_optimization"] if inner != key else values)[inner] = value
    found = told(
        migrate_text(text_of(values), "zero.json", to="composer") if name == "alone" else migrated(NAMING[name], values)
    )
    assert {key: found[key].outcome for key in DECIDED} == {key: outcome for key, (_, outcome) in DECIDED.items()}
    keys = {key for key in leaves(without(values, *DECIDED)) if key not in DECIDED and key.split(".")[0] not in DECIDED}
    assert keys - found.keys() == set()
    of_json = [each for each in found.values() if each.where.startswith("zero.json:") and each.origin is Origin.KEY]
    assert len(of_json) == len(keys) + len(DECIDED)
    assert all(each.hint for each in of_json if each.outcome.blocks)


def test_numbers_of_the_script_are_not_asked_for() -> None:
    """The optimizer of transformers' examples, with numbers that a Trainer fills in, and a batch size that must
    agree."""
    values = {**ZERO3, "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto"}}}
    values |= {"train_micro_batch_size_per_gpu": 2}
    found = told(migrated(ACCELERATE, values))
    assert found["optimizer"].outcome is APPROXIMATE and "DummyOptim" in found["optimizer"].hint
    assert found["train_micro_batch_size_per_gpu"].outcome is APPROXIMATE
    assert found["train_batch_size"].outcome is UNNEEDED
    assert told(migrated(AXOLOTL, values))["train_micro_batch_size_per_gpu"].outcome is UNNEEDED
    assert migrated(ACCELERATE, values).exit_code == migrated(AXOLOTL, values).exit_code == 0


def test_a_dtype_that_the_script_decides_is_asked_for_once() -> None:
    """A bfloat16 run whose dtype is in no file would continue in float32; under accelerate the script sets it again."""
    values = ZERO3 | AUTO
    migration = migrated(ACCELERATE, values)
    assert [each.key for each in migration.blocking] == ["bf16.enabled"]
    of_one = migrated(ACCELERATE, {**values, "bf16": {"enabled": False}})
    assert [each.key for each in of_one.blocking] == ["fp16.enabled"]
    kept = migrated(ACCELERATE, values, to="accelerate")
    assert kept.exit_code == 0 and "mixed_precision" not in yaml.safe_load(kept.after)
    assert migrated(AXOLOTL, values).exit_code == 0  # where the file itself sets it
    scaled = told(migrated(ACCELERATE, ZERO2))
    assert scaled["fp16.loss_scale"].outcome is APPROXIMATE and "GradScaler" in scaled["fp16.loss_scale"].reason
    assert told(migrated(ACCELERATE, ZERO3))["fp16.loss_scale_window"].outcome is UNNEEDED


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ({"offload_optimizer": {"device": "cpu"}}, {"cpu_offload": True}),
        ({"offload_param": {"device": "cpu"}}, {"cpu_offload_param": True}),
        (
            {"stage3_gather_16bit_weights_on_model_save": True},
            {"stage3_gather_fp16_weights_on_model_save": True},
        ),
        ({"stage3_gather_16bit_weights_on_model_save": True}, {"gather_16bit_weights_on_model_save": True}),
    ],
)
def test_keys_of_earlier_releases_ask_for_the_same(old: dict[str, Any], new: dict[str, Any]) -> None:
    one, other = (migrated(ACCELERATE, {"zero_optimization": {"stage": 3, **each}}) for each in (old, new))
    assert one.after == other.after and one.exit_code == other.exit_code == 0


# --- alone, and on disk


def test_by_itself_it_becomes_a_new_file() -> None:
    """It ended with exit code 2. Overwriting it would leave a file that DeepSpeed cannot read."""
    migration = migrate_text(text_of(ZERO3), "ds/zero.json", to="composer")
    assert migration.exit_code == 0 and migration.is_new_file and migration.suffix == ".yaml"
    named = read_first(migrated(ACCELERATE.replace("num_processes: 8\n", ""), ZERO3).after).run
    alone = read_first(migration.after).run
    assert named is not None and alone is not None and alone.config == named.config
    assert alone.precision == named.precision and migration.before == text_of(ZERO3)
    assert {*told(migration)}.isdisjoint({"distributed_type", "mixed_precision", "(the rest of the file)"})
    for to in ("accelerate", "axolotl", "torchtitan", "roll"):
        assert migrate_text(text_of(ZERO3), "zero.json", to=to).is_new_file, to


def results_of(*paths: Path, output: Path | None = None) -> dict[str, FileResult]:
    found = migrate_files(sources_of(paths), Destination(output=output))
    return {Path(each.path).name: each for each in found}


def test_on_the_disk_it_is_found_as_accelerate_finds_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With two files of one name, the wrong one would be read. Without the first, the one beside the file is used."""
    (tmp_path / "below").mkdir()
    for name, text in NAMING.items():
        (tmp_path / f"below/{name}.yaml").write_text(text)
    (tmp_path / "below/zero.json").write_text(text_of(ZERO2))
    monkeypatch.chdir(tmp_path)

    def stages() -> set[Any]:
        found = results_of(*(tmp_path / f"below/{name}.yaml" for name in NAMING)).values()
        return {told(each.migration)["zero_optimization.stage"].value for each in found if each.migration}

    assert stages() == {2}
    (tmp_path / "zero.json").write_text(text_of(ZERO3))
    assert stages() == {3}


def test_one_that_is_not_there_is_left_to_the_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, text in NAMING.items():
        Path(f"{name}.yaml").write_text(text.replace("zero.json", "none.json"))
    found = results_of(*(Path(f"{name}.yaml") for name in NAMING))
    assert {name: each.exit_code for name, each in found.items()} == {"accelerate.yaml": 1, "axolotl.yaml": 2}
    assert "its deepspeed names" in found["axolotl.yaml"].error
    with pytest.raises(ForeignSystemError, match="axolotl with DeepSpeed"):
        migrate_text(AXOLOTL)  # text without a path reads no other file


@pytest.mark.parametrize(
    ("text", "message"),
    [("{\n 'a': 1}", "zero.json:2:2"), ("[1]", "zero.json:1:1"), ('{"fp16": {}}', "accelerate refuses it without")],
)
def test_a_broken_one_is_named(text: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error would point to a line of the referencing file."""
    monkeypatch.chdir(tmp_path)
    Path("zero.json").write_text(text)
    Path("run.yaml").write_text(ACCELERATE)
    (result,) = results_of(Path("run.yaml")).values()
    assert result.exit_code == 2 and message in result.error and "\n" not in result.error


def test_in_a_folder_it_belongs_to_the_file_that_names_it(tmp_path: Path) -> None:
    """--write would fail at each JSON of a folder, since it cannot be rewritten in place."""
    (tmp_path / "zero.json").write_text(text_of(ZERO3))
    (tmp_path / "run.yaml").write_text(ACCELERATE)
    found = results_of(tmp_path)
    assert found["run.yaml"].exit_code == 0 and found["run.yaml"].migration is not None
    assert found["zero.json"].is_foreign and "of DeepSpeed" in found["zero.json"].error
    of_one = run_here(tmp_path, "migrate", tmp_path / "zero.json", "-o", tmp_path / "new.yaml")
    assert of_one.code == 0 and "reshard_after_forward: true" in (tmp_path / "new.yaml").read_text()
    in_place = run_here(tmp_path, "migrate", tmp_path / "zero.json", "--write")
    assert in_place.code == 2 and (tmp_path / "zero.json").read_text() == text_of(ZERO3)


def test_plan_reads_it_as_well(tmp_path: Path) -> None:
    """The run could be migrated, but not planned."""
    (tmp_path / "zero.json").write_text(text_of(ZERO3 | {"scheduler": {"type": "WarmupLR"}}))
    (tmp_path / "run.yaml").write_text(ACCELERATE)
    file = RunFile.read(tmp_path / "run.yaml")
    assert file.values["deepspeed_config"]["zero_stage"] == 3 and file.values["mixed_precision"] == "bf16"
    ranks = Finding(key="num_processes", value=8, outcome=APPROXIMATE, reason="")
    placed, *others = file.placed([ranks])
    assert placed.where == f"{tmp_path / 'run.yaml'}:6" and [each.key for each in others if each.outcome.blocks] == [
        "scheduler"
    ]
