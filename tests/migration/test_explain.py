"""``composer-fsdp2 explain`` and the generated pages: every key, by each of its names, from the tables of the parser.

The keys of Composer, transformers and accelerate are read from the installed packages. ROLL and TorchTitan are not
installed, so the test reads files written after their guides.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import inspect
import json
import re
import shutil
import tomllib
from collections.abc import Callable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from support.commands import run_here
from support.examples import examples

from composer_fsdp2.config.findings import Origin, Outcome
from composer_fsdp2.migration.dialect import Section
from composer_fsdp2.migration.dialects import DIALECTS
from composer_fsdp2.migration.explain import SCHEMA, Explanation, all_keys, explain, implicit_settings, nearest
from tools import generate_docs

ROOT = Path(__file__).resolve().parents[2]


def dialects_of(key: str) -> set[str]:
    return {each.dialect.name for each in explain(key)}


def one(key: str, dialect: str) -> Explanation:
    [found] = explain(key, dialect=dialect)
    return found


# ---------------------------------------------------------------------------------------------------------------------
# Names


@pytest.mark.parametrize(
    ("asked", "dialects"),
    [
        ("sharding_strategy", {"axolotl", "composer", "fsdp", "huggingface"}),
        ("FullyShardedDataParallel.sharding_strategy", {"fsdp"}),
        ("auto_wrap_policy", {"axolotl", "fsdp", "huggingface"}),
        ("param_init_fn", {"fsdp"}),
        ("fsdp_config.sharding_strategy", {"axolotl", "composer", "huggingface"}),
        ("trainer.parallelism_config.fsdp.sharding_strategy", {"composer"}),
        ("parallelism_config.fsdp2.reshard_after_forward", {"composer"}),
        ("fsdp_sharding_strategy", {"axolotl", "huggingface"}),
        ("training.fsdp_config.fsdp_sharding_strategy", {"axolotl", "huggingface"}),
        ("--fsdp-sharding-strategy", {"axolotl", "huggingface"}),
        ("FSDP_SHARDING_STRATEGY", {"axolotl", "huggingface"}),
        ("fsdp_config.cpu_offload", {"composer", "huggingface"}),
        ("parallelism_config.dp_replicate_size", {"huggingface"}),
        ("fsdp_config.mixed_precision", {"composer"}),
        ("mixed_precision", {"composer", "fsdp", "huggingface"}),
        ("trainer.fsdp_config.mixed_precision.param_dtype", {"composer"}),
        ("trainer.parallelism_config.fsdp.mixed_precision.param_dtype", {"composer"}),
        ("param_dtype", {"composer", "fsdp", "roll"}),
        ("training_arguments.bf16:", {"axolotl", "huggingface"}),
        ("data_parallel_shard_degree", {"composer", "torchtitan"}),
        ("parallelism.data_parallel_shard_degree", {"torchtitan"}),
        ("training.data_parallel_degree", {"torchtitan"}),
        ("--parallelism.tensor_parallel_degree", {"torchtitan"}),
        ("actor_train.strategy_args.strategy_config.fsdp_size", {"roll"}),
        ("wrap_policy.wrap_embeddings", {"roll", "composer"}),
        ("wrap_embeddings", {"roll", "composer"}),
        ("actor_train.model_args.ulysses_size", {"roll"}),
        ("reshard_after_forward", {"axolotl", "composer", "huggingface", "roll"}),
        ("load_fsdp_monolith_rank0_only", {"composer"}),
        ("deepspeed_config", {"composer"}),
        ("trainer.parallelism_config.tp", {"composer"}),
        ("parallelism_config.tp.layer_plan", {"composer"}),
        ("tp_config.strategy", {"composer"}),
    ],
)
def test_a_key_is_found_as_the_user_has_it(asked: str, dialects: set[str]):
    """A user pastes a key from a file or a command line, with its path or prefix, and sees it in every dialect that has
    it."""
    assert dialects_of(asked) == dialects


def test_an_old_name_leads_to_the_key_of_today():
    """Users of an early release find the current name of a key."""
    assert one("training.data_parallel_degree", "torchtitan").row.name == "parallelism.data_parallel_shard_degree"
    assert one("cpu_offload", "huggingface").row.name == "offload_params"
    assert one("fsdp_min_num_params", "huggingface").row.name == "min_num_params"


@pytest.mark.parametrize(
    ("asked", "dialect", "near"),
    [
        ("sharding_stratgy", "composer", "fsdp_config.sharding_strategy"),
        ("fsdp_config.fsdp_sharding_stratgy", "huggingface", "fsdp_config.sharding_strategy"),
        ("wrap_polcy.wrap_embedings", "roll", "strategy_args.strategy_config.wrap_policy.wrap_embeddings"),
        ("parallelism.tensor_parallel_dgree", "torchtitan", "parallelism.tensor_parallel_degree"),
        ("HYBRID_SHRD", "composer", "fsdp_config.sharding_strategy=HYBRID_SHARD"),
        ("selectve", "torchtitan", "activation_checkpoint.mode=selective"),
    ],
)
def test_a_misspelt_word_finds_its_neighbours(asked: str, dialect: str, near: str):
    """A misspelt key, which used to train as FULL_SHARD, is answered with the closest valid key of each dialect. A
    misspelt value is answered as ``KEY=VALUE``, which `explain` accepts."""
    assert explain(asked) == []
    assert nearest(asked)[dialect][0] == near


def test_names_are_unique_within_a_dialect():
    """A key's full path matches exactly one key of a dialect."""
    for each in all_keys():
        found = explain(each.places[0], dialect=each.dialect.name)
        assert [other.row.name for other in found if not other.queried_value] == [each.row.name]


# ---------------------------------------------------------------------------------------------------------------------
# Outcomes of values


def test_no_shard_is_told_by_each_dialect():
    """NO_SHARD replicates full parameters; `explain` must not report FULL_SHARD's outcome for it."""
    for dialect in ("composer", "huggingface"):
        told = {str(each.value): each.finding for each in one("sharding_strategy", dialect).value_outcomes}
        assert set(told) >= {"FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD"}
        assert "2-D mesh with one rank on its shard axis" in told["NO_SHARD"].target
        assert "reshard_after_forward=False" in told["SHARD_GRAD_OP"].target


@pytest.mark.parametrize(
    ("asked", "dialect", "reader", "outcome"),
    [
        ("sharding_strategy=HYBRID_SHARD", "composer", "", Outcome.APPROXIMATE),
        # Copied from a file.
        ("sharding_strategy: HYBRID_SHARD", "composer", "", Outcome.APPROXIMATE),
        ("  sharding_strategy = HYBRID_SHARD ", "composer", "", Outcome.APPROXIMATE),
        ("state_dict_type=local", "composer", "", Outcome.NEEDS_DECISION),
        ("state_dict_type=sharded", "composer", "", Outcome.EXACT),
        ("mixed_precision.reduce_dtype=bf16", "composer", "", Outcome.EXACT),
        ("mixed_precision.reduce_dtype=bfloat61", "composer", "", Outcome.NEEDS_DECISION),
        ("fsdp_state_dict_type=LOCAL_STATE_DICT", "huggingface", "accelerate 1.8.1, FSDP1", Outcome.NEEDS_DECISION),
        # A string to YAML 1.1, on which both break.
        ("fsdp_min_num_params=1e8", "huggingface", "accelerate 1.8.1, FSDP1", Outcome.NEEDS_DECISION),
        ("fsdp_min_num_params=1e8", "huggingface", "transformers 4.51.3", Outcome.NEEDS_DECISION),
        ("fsdp_min_num_params=100000000", "huggingface", "accelerate 1.8.1, FSDP1", Outcome.EXACT),
        ("fsdp_auto_wrap_policy=SIZE_BASED_WRAP", "huggingface", "accelerate 1.8.1, FSDP1", Outcome.EXACT),
        ("fsdp_auto_wrap_policy=SIZE_BASED_WRAP", "huggingface", "accelerate 1.8.1, FSDP2", Outcome.UNSUPPORTED),
        ("fsdp=full_shard, auto_wrap", "huggingface", "transformers 4.51.3", Outcome.NEEDS_DECISION),
        ("parallelism_config.tp_size=1", "huggingface", "", Outcome.UNNEEDED),
        ("ep_size=1", "roll", "", Outcome.UNNEEDED),
        ("ep_size=2", "roll", "", Outcome.APPROXIMATE),
        ("offload_policy=maybe", "roll", "", Outcome.EXACT),
        ("tiled_num_shards=8", "roll", "", Outcome.APPROXIMATE),
        ("checkpoint.async_mode=async_with_pinned_mem", "torchtitan", "", Outcome.APPROXIMATE),
        ("parallelism.data_parallel_shard_degree=1", "torchtitan", "", Outcome.APPROXIMATE),
        ("activation_checkpoint.selective_ac_option=1", "torchtitan", "", Outcome.NEEDS_DECISION),
    ],
)
def test_a_value_has_its_own_fate(asked: str, dialect: str, reader: str, outcome: Outcome):
    """``KEY=VALUE`` reports the outcome of the user's own value, parsed as migrate parses it."""
    (found,) = [each.finding for each in one(asked, dialect).value_outcomes if not reader or reader in each.readers]
    assert found.outcome is outcome


VALUES_ASKED: list[tuple[str, set[tuple[str, str]]]] = [
    (
        "HYBRID_SHARD",
        {
            ("composer", "sharding_strategy"),
            ("fsdp", "sharding_strategy"),
            ("huggingface", "fsdp"),
            ("huggingface", "sharding_strategy"),
        },
    ),
    (
        "_HYBRID_SHARD_ZERO2",
        {("composer", "sharding_strategy"), ("fsdp", "sharding_strategy"), ("huggingface", "sharding_strategy")},
    ),
    ("FULL_STATE_DICT", {("huggingface", "state_dict_type")}),
    ("LOCAL_STATE_DICT", {("huggingface", "state_dict_type")}),
    ("TRANSFORMER_BASED_WRAP", {("huggingface", "auto_wrap_policy")}),
    (
        "BACKWARD_PRE",
        {("composer", "backward_prefetch"), ("fsdp", "backward_prefetch"), ("huggingface", "backward_prefetch")},
    ),
    ("selective", {("torchtitan", "activation_checkpoint.mode")}),
    ("PURE", {("composer", "mixed_precision")}),
    ("set8", {("composer", "process_group")}),
    ("defer_replica", {("composer", "gradient_sync")}),
    ("fsdp2_train", {("roll", "strategy_name")}),
    ("async_with_pinned_mem", {("torchtitan", "checkpoint.async_mode")}),
    ("'selective',", {("torchtitan", "activation_checkpoint.mode")}),  # as it was copied
    ("true", set()),  # half of all keys take it
    ("", set()),
    ("8", set()),
]


def test_auto_is_a_word_of_the_keys_that_choose_modules():
    """Files written by migrate contain ``auto``; it is not the name of a class."""
    by_key = {each.row.name: each.value_outcomes for each in explain("auto", dialect="composer")}
    assert set(by_key) == {"activation_checkpointing_policy", "idle_towers", "wrap_policy"}
    assert {each.finding.outcome for outcomes in by_key.values() for each in outcomes} == {Outcome.EXACT}


def test_a_value_finds_the_keys_that_take_it():
    """Users who know only a value, such as HYBRID_SHARD from a log, find its key and its outcome."""
    for asked, keys in VALUES_ASKED:
        found = explain(asked)
        told = {(each.dialect.name, each.row.name) for each in found}
        of_axolotl = {key for dialect, key in told if dialect == "axolotl"}  # axolotl uses Hugging Face's
        assert told - {("axolotl", key) for key in of_axolotl} == keys, asked
        assert of_axolotl - {"final_state_dict_type"} == {key for dialect, key in keys if dialect == "huggingface"}, (
            asked
        )
        assert all(each.queried_value and each.value_outcomes for each in found), asked


def test_every_value_of_the_tables_is_found():
    """`explain` knows every value in the tables, with the same outcome as for KEY=VALUE."""
    for each in all_keys():
        for value in each.row.takes.choices:
            if not isinstance(value, str) or value in ("true", "false"):
                continue
            name = each.dialect.name
            found = [other for other in explain(value, dialect=name) if other.queried_value and other.row is each.row]
            assert [str(each.value) for each in found[0].value_outcomes if each.value != value] == [], (
                each.places[0],
                value,
            )
            if value != "no":  # false to YAML, if it is not quoted
                [same] = explain(f"{each.places[0]}={value}", dialect=name)
                assert found[0].value_outcomes == same.value_outcomes, (each.places[0], value)


def test_a_value_has_the_case_of_its_system():
    """A value in another case is shown in the case that the system accepts, ready to copy."""
    assert [each.queried_value for each in explain("SELECTIVE")] == ["selective"]
    assert {each.dialect.name: each.queried_value for each in explain("Full_Shard") if each.row.name != "fsdp"} == {
        "composer": "Full_Shard",  # any case
        "huggingface": "Full_Shard",
        "axolotl": "Full_Shard",
        "fsdp": "Full_Shard",
    }
    assert {each.queried_value for each in explain("full_shard") if each.row.name == "fsdp"} == {"full_shard"}
    assert {each.queried_value for each in explain("FULL_SHARD") if each.row.name == "fsdp"} == {"full_shard"}


def test_a_word_that_is_a_key_and_a_value_is_told_as_both():
    """The user may have meant either, so both are shown."""
    found = explain("memory_budget")
    assert [(each.row.name, each.queried_value) for each in found] == [
        ("activation_checkpoint.memory_budget", ""),
        ("activation_checkpoint.mode", "memory_budget"),
    ]
    [parts] = explain("bf16", dialect="composer")
    assert [each.value for each in parts.value_outcomes][:2] == [{"param_dtype": "bf16"}, {"reduce_dtype": "bf16"}]


def test_who_reads_a_key_is_told():
    """transformers or accelerate reads half of Hugging Face's keys, not both. Users of the other one see its
    equivalent."""
    strategy = one("fsdp_sharding_strategy", "huggingface")
    assert strategy.read_by == ("accelerate 1.8.1, FSDP1",)
    assert "fsdp" in strategy.dialect.instead(strategy.row)["transformers 4.51.3"]
    assert all(each.readers == ("accelerate 1.8.1, FSDP1",) for each in strategy.value_outcomes)
    assert one("limit_all_gathers", "huggingface").read_by == ("transformers 4.51.3",)
    assert one("limit_all_gathers", "axolotl").read_by == ("axolotl, FSDP1",)


def test_a_word_that_stands_beside_another_is_a_value():
    """``offload`` is valid in `fsdp: full_shard offload`, so `explain offload` must find it."""
    (found,) = explain("offload", dialect="huggingface")
    assert found.queried_value == "offload" and "full_shard offload" in found.value_outcomes[0].finding.reason


# Values that a user might type, not those of the dialects' tables.
VALUES = st.sampled_from(
    [
        "",
        "1",
        "-1",
        "2.5",
        "1e8",
        "true",
        "no",
        "null",
        "~",
        "[]",
        "[1, 2]",
        "{}",
        "{a: 1}",
        "FULL_SHARD",
        "self",
        "'",
        "a: b: c",
    ]
)


@examples(100)
@given(st.sampled_from([each.places[0] for each in all_keys()]), VALUES)
def test_any_value_of_any_key_has_an_answer(place: str, value: str):
    """`explain` never ends in a traceback, whatever the value, also with --json."""
    for each in explain(f"{place}={value}"):
        assert each.value_outcomes or each.row.group == "beside fsdp_config"  # an empty one sets nothing
        assert str(each)
        json.dumps(each.to_json(), default=str)


# ---------------------------------------------------------------------------------------------------------------------
# Nothing is missing

ROLLS_FILE = """
max_grad_norm: 0.5
actor_train:
  model_args:
    {disable_gradient_checkpointing: false, dtype: bf16, ulysses_size: 2, freeze_module_prefix: vision,
     lora_target: all}
  strategy_args:
    strategy_name: fsdp2_train
    strategy_config:
      {fsdp_size: 8, param_dtype: bf16, reduce_dtype: float32, reshard_after_forward: true, offload_policy: false,
       wrap_policy: {transformer_layer_cls_to_wrap: [Qwen3MoeDecoderLayer], wrap_embeddings: true, wrap_lm_output: true,
                     moe_experts: [Qwen3MoeMLP]},
       apply_expert_patch: true, apply_tiled_mlp: true, tiled_num_shards: 4, model_type: qwen3_moe,
       async_save_ckpt: true, ep_size: 2, efsdp_size: 2, moe_use_grouped_mm: true,
       reduce_scatter_during_grad_accumulation: false, save_only_model: true}
  device_mapping: list(range(0,16))
"""
TORCHTITANS_FILE = """
[model]
flavor = "8B"
[training]
max_norm = 1.0
enable_cpu_offload = true
mixed_precision_param = "bfloat16"
mixed_precision_reduce = "float32"
compile = true
[parallelism]
data_parallel_replicate_degree = 2
data_parallel_shard_degree = -1
fsdp_reshard_after_forward = "always"
tensor_parallel_degree = 2
enable_async_tensor_parallel = true
disable_loss_parallel = true
pipeline_parallel_degree = 2
pipeline_parallel_schedule = "1F1B"
context_parallel_degree = 2
expert_parallel_degree = 2
enable_compiled_autograd = true
[checkpoint]
enable_checkpoint = true
async_mode = "async"
last_save_model_only = true
export_dtype = "float32"
[activation_checkpoint]
mode = "selective"
selective_ac_option = "op"
[float8]
enable_fsdp_float8_all_gather = true
"""


def fields_of(name: str) -> dict[str, Any]:
    """The defaults of a Composer class. Composer is imported here, because an import at the top would slow down
    collection."""
    config_class = getattr(importlib.import_module("composer.utils.parallelism"), name)
    return {field.name: field.default for field in dataclasses.fields(config_class) if field.name[0] != "_"}


def launcher_keys() -> set[str]:
    """The FSDP options of the installed ``accelerate launch``."""
    from accelerate.commands.launch import launch_command_parser

    options = launch_command_parser()._option_string_actions
    return {option.removeprefix("--") for option in options if option.startswith("--fsdp_")}


def documented_trainer_keys() -> set[str]:
    """The keys of ``fsdp_config`` that the installed TrainingArguments describes."""
    from transformers import TrainingArguments

    description = TrainingArguments.__doc__ or ""
    fsdp = description[description.index("fsdp_config (") : description.index("deepspeed (")]
    return set(re.findall(r"^\s+- (\w+) \(", fsdp, flags=re.MULTILINE))


# A file with all keys for each system, from the system's own lists where it is installed. Built inside the test,
# because importing the systems would add seconds to every collection.
FILES: list[tuple[str, Callable[[], Mapping[str, Any]]]] = [
    (
        "composer",
        lambda: {"fsdp_config": {k: v for k, v in fields_of("FSDPConfig").items() if k != "activation_cpu_offload"}},
    ),
    ("composer", lambda: {"fsdp_config": {"reshard_after_forward": True, "activation_cpu_offload": True}}),
    (
        "composer",
        lambda: {"fsdp_config": {"verbose": True}, "tp_config": {"tensor_parallel_degree": 2}, "fsdp_auto_wrap": 1},
    ),
    (
        "composer",
        lambda: {"fsdp_config": {"mixed_precision": {"param_dtype": "bf16", "keep_low_precision_grads": True}}},
    ),
    (
        "huggingface",
        lambda: {"distributed_type": "FSDP", "fsdp_config": dict.fromkeys(sorted(launcher_keys()), True)},
    ),
    (
        "huggingface",
        lambda: {"fsdp": "full_shard", "fsdp_config": dict.fromkeys(sorted(documented_trainer_keys()), True)},
    ),
    ("roll", lambda: yaml.safe_load(ROLLS_FILE)),
    ("torchtitan", lambda: tomllib.loads(TORCHTITANS_FILE)),
]


@pytest.mark.parametrize(
    ("dialect", "values_of"), FILES, ids=[f"{dialect}-values{number}" for number, (dialect, _) in enumerate(FILES)]
)
def test_every_key_with_a_finding_is_explained(dialect: str, values_of: Callable[[], Mapping[str, Any]]):
    """Each key that migrate reports can be looked up by the name in the report."""
    values = values_of()
    [path] = DIALECTS[dialect].sections(values)
    section = Section.at(path, values)
    keys = [finding.key for finding in DIALECTS[dialect].read(section).findings if finding.origin is Origin.KEY]
    assert len(keys) >= len(section.given)
    assert [key for key in keys if dialect not in dialects_of(key)] == []


def test_what_the_installed_systems_know_is_in_the_tables():
    """`explain` never reports "no dialect knows it" for a key that a user may have written."""
    assert len(launcher_keys()) > 10 and len(documented_trainer_keys()) > 5
    asked = [("composer", f"fsdp_config.{key}") for key in {*fields_of("FSDPConfig"), *fields_of("FSDP2Config")}]
    asked += [("huggingface", key) for key in launcher_keys()]
    asked += [("huggingface", f"fsdp_config.{key}") for key in documented_trainer_keys()]
    assert [(dialect, key) for dialect, key in asked if dialect not in dialects_of(key)] == []


# Keys of releases that are not installed, with the release that the table names.
OLDER = {"backward_prefetch_policy": "accelerate up to 0.34"}
NEWER = {
    "accelerate 1.10": {"dp_replicate_size", "dp_shard_size", "tp_size", "cp_size", "cp_backend", "cp_comm_strategy"},
    "accelerate 1.12": {
        "seq_parallel_communication_data_type",
        "sp_size",
        "sp_backend",
        "sp_seq_length",
        "sp_seq_length_is_variable",
        "sp_attn_implementation",
    },
}


def test_the_arguments_of_fsdp1s_class_are_those_of_torch():
    """An argument of the installed torch that nothing explains, or one with another default."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    signature = inspect.signature(FullyShardedDataParallel.__init__).parameters
    theirs = {name: each.default for name, each in signature.items() if name not in ("self", "module")}
    rows = {each.row.name: each.row for each in all_keys("fsdp")}
    assert list(rows) == list(theirs)
    assert {name: getattr(value, "name", value) for name, value in theirs.items()} == {
        name: row.default for name, row in rows.items()
    }


def test_every_row_of_hugging_face_exists_in_what_is_installed():
    """`explain` lists no key that never existed, and names the release of a key that only another release has."""
    modules = [
        "transformers.training_args",
        "transformers.trainer",
        "accelerate.commands.launch",
        "accelerate.commands.config.config_args",
        "accelerate.utils.dataclasses",
        "accelerate.utils.launch",
    ]
    sources = [importlib.util.find_spec(name).origin for name in modules]
    known = {word for source in sources for word in re.findall(r"[-\w]+", Path(source).read_text())}
    newer = set().union(*NEWER.values())
    for row in DIALECTS["huggingface"].rows:
        names = {row.name, f"fsdp_{row.name}", f"--fsdp_{row.name}"}
        if row.name in newer:
            assert one(row.name, "huggingface").read_by[0] in NEWER
        elif row.name in OLDER:
            assert OLDER[row.name] in row.meaning
        else:
            assert names & known, row.name
    assert importlib.util.find_spec("accelerate.parallelism_config") is None, "it is installed now: mend the table"
    installed = metadata.version("transformers"), metadata.version("accelerate")
    assert installed == ("4.51.3", "1.8.1"), "the readers' names say these"


# ---------------------------------------------------------------------------------------------------------------------
# Differences without a key


def test_what_no_key_says_is_told():
    """Users who read only the tables still find the differences without a key: casting, accumulation, units."""
    told = {dialect: {finding.key for finding in found} for dialect, found in implicit_settings().items()}
    assert told["composer"] >= {"casting of inputs and buffers", "wrapping", "clipping by value"}
    assert told["huggingface"] >= {"casting of inputs and buffers", "gradient_sync", "wrapping"}
    assert told["roll"] >= {"casting of inputs", "sharded dimension", "state dict"}
    assert len(told["torchtitan"]) > 2
    for dialect, names in told.items():
        assert not names & {row.name for row in DIALECTS[dialect].rows}


# ---------------------------------------------------------------------------------------------------------------------
# The command


def test_a_key_is_printed_for_each_dialect(tmp_path: Path):
    """Meaning, default, outcome, target, reason and the outcomes of values are all printed."""
    ended = run_here(tmp_path, "explain", "fsdp_config.sharding_strategy")
    assert (ended.code, ended.err) == (0, "")
    words = " ".join(ended.out.split())
    for dialect in ("composer", "huggingface"):
        strategy = one("fsdp_config.sharding_strategy", dialect)
        row = strategy.row
        assert f"{dialect}: {strategy.places[0]}" in ended.out
        for text in ("FULL_SHARD", row.meaning, row.outcome.value, row.target, row.reason):
            assert text in words
    assert "value NO_SHARD: exact, 2-D mesh with one rank on its shard axis" in words


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["shardin_strategy"], "similar in composer: fsdp_config.sharding_strategy"),
        (["shardin_strategy"], "similar in huggingface: fsdp_config.sharding_strategy"),
        (["sharding_strategy", "--dialect", "roll"], "found in: composer, huggingface"),
        (["zzzzzz"], "--all lists every key"),
        ([], "--all"),
        (["sharding_strategy", "--all"], "--all"),
        (["sharding_strategy", "--dialect", "deepspeed"], "deepspeed"),
    ],
)
def test_a_call_without_an_answer_is_an_error(arguments: list[str], said: str, tmp_path: Path):
    """An unknown key ends with exit code 2 and the closest keys by dialect, without partial output or a traceback."""
    ended = run_here(tmp_path, "explain", *arguments)
    assert (ended.code, ended.out) == (2, "")
    assert said in " ".join(ended.err.split()) and "Traceback" not in ended.err


def test_json_is_the_same_in_data(tmp_path: Path):
    """A tool can read the answer as JSON that matches its schema, also when nothing was found."""
    schema = json.loads(run_here(tmp_path, "explain", "--json-schema").out)
    assert schema == json.loads(SCHEMA.read_text())
    validator = jsonschema.Draft202012Validator(schema)
    validator.check_schema(validator.schema)

    def told_of(*arguments: str) -> tuple[int, Any]:
        ended = run_here(tmp_path, "explain", *arguments, "--json")
        told = json.loads(ended.out)
        validator.validate(told)
        assert told["version"] == 1
        return ended.code, told

    code, told = told_of("--all")
    assert code == 0
    assert [(key["dialect"], key["key"]) for key in told["keys"]] == [(e.dialect.name, e.row.name) for e in all_keys()]
    assert set(told["implicit"]) == set(implicit_settings())
    [strategy] = [key for key in told["keys"] if (key["dialect"], key["key"]) == ("composer", "sharding_strategy")]
    assert strategy["default"] == {"": "FULL_SHARD"} and strategy["outcome"] == "exact"
    assert {value["value"] for value in strategy["values"]} >= {"NO_SHARD", "HYBRID_SHARD"}
    code, told = told_of("memory_budget")
    assert code == 0 and [key["asked_as"] for key in told["keys"]] == ["key", "value"]
    code, told = told_of("HYBRID_SHRD")
    assert code == 2 and "no dialect has HYBRID_SHRD" in told["error"] and told["keys"] == []
    assert "fsdp_config.sharding_strategy=HYBRID_SHARD" in told["near"]["composer"]
    code, told = told_of("zzzzzz")
    assert code == 2 and told["near"] == {}
    code, told = told_of("sharding_strategy", "--dialect", "nobodys")
    assert code == 2 and "unknown dialect nobodys" in told["error"]


@pytest.mark.parametrize("terminal", [False, True], ids=["pipe", "terminal"])
def test_all_keys_are_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, terminal: bool):
    """All keys of a dialect are a table on a terminal, and plain text without a frame in a pipe."""
    if terminal:
        monkeypatch.setenv("FORCE_COLOR", "1")
        monkeypatch.setenv("COLUMNS", "200")
    out = run_here(tmp_path, "explain", "--all", "--dialect", "roll").out
    assert ("│" in out) is terminal
    assert "without a key:" in out and "composer: " not in out
    letters = re.sub(r"[\s│]|\x1b\[[0-9;]*m", "", out)
    missing = [row.name for row in DIALECTS["roll"].rows if row.name not in letters]
    assert [name for name in missing if not terminal or len(name) < 20] == []  # long names are folded over lines


# ---------------------------------------------------------------------------------------------------------------------
# The generated pages


def test_what_is_generated_is_current():
    """The pages describe the current tables, and the migrated files in yamls/ match migrate's output. `make docs`
    writes both."""
    assert generate_docs.main(["--check"]) == 0


def test_what_changed_is_written_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """A changed row changes its page, and a changed file in yamls/ its migrated counterpart."""
    monkeypatch.setattr(generate_docs, "ROOT", tmp_path)
    for name in ("migration_docs", "yamls/t5", "yamls/torchtitan"):
        shutil.copytree(ROOT / name, tmp_path / name)
    shutil.copy(ROOT / "CONTRIBUTING.md", tmp_path)
    words = []
    for name, dialect in DIALECTS.items():
        row, *others = dialect.rows
        changes = {field: f"changed {field} of {name}" for field in ("meaning", "reason", "target")}
        monkeypatch.setattr(dialect, "rows", (dataclasses.replace(row, **changes), *others))
        words += changes.values()
    assert generate_docs.main(["--check"]) == 1
    assert generate_docs.main([]) == 0
    page = (tmp_path / "migration_docs/keys.md").read_text()
    assert [word for word in words if word not in page] == []
    monkeypatch.undo()
    monkeypatch.setattr(generate_docs, "ROOT", tmp_path)
    pairs = ("yamls/t5/t5-base-fsdp2.yaml", "yamls/torchtitan/llama3-8b-composer.yaml")
    for name in pairs:
        (tmp_path / name).write_text("a: 1\n")
    assert generate_docs.main([]) == 0
    assert [name for name in pairs if (tmp_path / name).read_bytes() != (ROOT / name).read_bytes()] == []
    (tmp_path / pairs[0]).write_text("a: 1\n")
    assert generate_docs.main(["--check"]) == 1
