"""Composer's and LLM Foundry's sections; where these two decide something, they are asked themselves."""

from __future__ import annotations

import copy
import inspect
import warnings
from typing import Any

import pytest
import yaml
from support.runs import run_with

from composer_fsdp2 import translate
from composer_fsdp2.config.findings import Finding, Origin, Outcome
from composer_fsdp2.fsdp1.keys import KEYS, KeyGroup
from composer_fsdp2.migration.dialect import Reading, Section
from composer_fsdp2.migration.dialects import DIALECTS
from composer_fsdp2.migration.migrate import migrate_text
from composer_fsdp2.migration.run import Wrap, WrapKind
from composer_fsdp2.migration.targets import TARGETS

COMPOSER = DIALECTS["composer"]


def read(text: str) -> Reading:
    values = yaml.safe_load(text)
    (path,) = COMPOSER.sections(values)
    at = values
    for key in path:
        at = at[key]
    return COMPOSER.read(Section(path=path, given=at, around=values))


def finding(reading: Reading, key: str) -> Finding:
    (found,) = [each for each in reading.findings if each.name == key]
    return found


# --- where sections are


@pytest.mark.parametrize(
    ("text", "places"),
    [
        ("fsdp_config: {}", ["fsdp_config"]),
        ("parameters: {fsdp_config: {verbose: true}}", ["parameters.fsdp_config"]),
        ("parallelism_config: {fsdp: {verbose: true}}", ["parallelism_config.fsdp"]),
        ("runs: [{fsdp_config: {}}, {x: 1}, {fsdp_config: {}}]", ["runs.0.fsdp_config", "runs.2.fsdp_config"]),
        ("fsdp_config:", []),
        ("fsdp_config: {fsdp_sharding_strategy: FULL_SHARD}", []),
        ("distributed_type: FSDP\nfsdp_config: {}", []),
        ("fsdp: full_shard\nfsdp_config: {backward_prefetch: x}", []),
        ("fsdp: {sharding_strategy: FULL_SHARD}", []),
    ],
)
def test_sections(text: str, places: list[str]):
    """Another system's section would be read as Composer's, or one that is Composer's be left behind."""
    assert [".".join(map(str, path)) for path in COMPOSER.sections(yaml.safe_load(text))] == places


# --- what LLM Foundry makes of it

SECTIONS: list[dict[str, Any]] = [
    {"sharding_strategy": "FULL_SHARD", "mixed_precision": "PURE"},
    {"sync_module_states": False, "load_monolith_rank0_only": False},
    {"sync_module_states": True},
    {"mixed_precision": {"param_dtype": "bf16", "reduce_dtype": "fp32", "buffer_dtype": "bf16"}},
    {"activation_checkpointing": True, "activation_checkpointing_reentrant": False},
]
MODELS: list[dict[str, Any]] = [
    {"name": "mpt_causal_lm", "init_device": "meta"},
    {"name": "mpt_causal_lm", "init_device": "mixed"},
    {"name": "mpt_causal_lm", "master_weights_dtype": "bf16"},
    {"name": "mpt_causal_lm", "master_weights_dtype": "fp32", "init_device": "cpu"},
    {"name": "hf_causal_lm", "init_device": "mixed", "master_weights_dtype": "float16"},
]


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("section", SECTIONS)
def test_a_section_is_read_as_llm_foundry_changes_it(section: dict[str, Any], model: dict[str, Any]):
    """A run that goes to another system would lose what LLM Foundry added: rank 0's values, or the dtypes."""
    from llmfoundry.utils.config_utils import process_init_device  # Here, so that collecting tests stays cheap.

    changed = copy.deepcopy(section)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        process_init_device(copy.deepcopy(model), changed)
    if isinstance(changed.get("mixed_precision"), dict):
        changed["mixed_precision"].pop("keep_low_precision_grads", None)  # which Composer does not read there
    reading = read(yaml.safe_dump({"model": model, "precision": "amp_bf16", "fsdp_config": section}))
    assert reading.run is not None
    assert reading.run.config == translate(changed, precision="amp_bf16", device="cpu").config


def test_what_llm_foundry_sets_is_said():
    """A value that is not in the file decides about the run, and the report has to have it."""
    reading = read("model: {name: m, init_device: mixed}\nfsdp_config: {mixed_precision: PURE}")
    assert finding(reading, "(implicit) sync_module_states").target == "sync_module_states: true"
    reading = read("model: {name: m, master_weights_dtype: bf16}\nfsdp_config: {mixed_precision: PURE}")
    assert "master_weights_dtype" in finding(reading, "mixed_precision").reason


@pytest.mark.parametrize(("reentrant", "expected"), [(True, False), (False, False)])
def test_transformer_engine_layers_never_reenter(reentrant: bool, expected: bool):
    """LLM Foundry's validate_config changes the key for te layers, which break with reentrant checkpointing."""
    text = {
        "model": {"name": "mpt_causal_lm", "fc_type": "te"},
        "fsdp_config": {"activation_checkpointing": True, "activation_checkpointing_reentrant": reentrant},
    }
    run = read(yaml.safe_dump(text)).run
    assert run is not None and run.config.activation_checkpointing.reentrant is expected


# --- plain Composer


def test_the_keys_that_plain_composer_reads():
    """The report says of a key that Composer without composer_fsdp2 reads it, or does not."""
    from composer.utils.parallelism import FSDP2Config

    read_there = set(FSDP2Config.settable_attrs())
    for key in KEYS:
        if key.group in (KeyGroup.FSDP1, KeyGroup.FSDP2) and key.name not in (
            "device_mesh",
            "mp_policy",
            "offload_policy",
        ):
            assert ("ignores it" not in COMPOSER.elsewhere(key.name)) == (key.name in read_there), key.name


def test_the_report_says_what_plain_composer_does():
    """A user who trains the migrated file without composer_fsdp2 would lose replicas and not know."""
    text = "fsdp_config: {data_parallel_replicate_degree: 2, data_parallel_shard_degree: 4, state_dict_type: full}"
    found = {each.key: each for each in migrate_text(text).sections[0].findings if each.origin is Origin.KEY}
    assert "without replicas" in found["data_parallel_replicate_degree"].hint
    assert "its own default is sharded" in found["state_dict_type"].hint


# --- keys and values


def test_a_misspelt_key_is_a_decision():
    """FSDPConfig took it in silence, and the run was FULL_SHARD."""
    reading = read("fsdp_config: {sharding_stratgy: SHARD_GRAD_OP}")
    found = finding(reading, "sharding_stratgy")
    assert found.outcome is Outcome.NEEDS_DECISION and "sharding_strategy" in found.hint
    assert reading.run is None


def test_each_bad_value_is_named_at_its_key():
    """Of two faults in a long section the user would find one, and then the other."""
    reading = read("fsdp_config: {sharding_strategy: FULL, mixed_precision: HALF, verbose: true}")
    assert finding(reading, "sharding_strategy").outcome is Outcome.NEEDS_DECISION
    assert finding(reading, "mixed_precision").outcome is Outcome.NEEDS_DECISION
    assert not finding(reading, "verbose").outcome.blocks
    assert reading.run is None


def test_keys_that_contradict_each_other_are_a_decision():
    """Which of them holds, only the user knows; all others are still reported."""
    reading = read("fsdp_config: {sharding_strategy: FULL_SHARD, reshard_after_forward: false, verbose: false}")
    blocking = [each.key for each in reading.findings if each.outcome.blocks]
    assert blocking and set(blocking) <= {"sharding_strategy", "reshard_after_forward"}
    assert {each.key for each in reading.findings} >= {"sharding_strategy", "reshard_after_forward", "verbose"}


def test_precision_decides_about_dtypes():
    """PURE under amp_fp16 is float16; a file without precision was trained in Composer's default for a GPU."""
    for text, dtype in (
        ("precision: amp_fp16\n", "float16"),
        ("", "bfloat16"),
        ("precision: fp32\n", "float32"),
    ):
        run = read(f"{text}fsdp_config: {{mixed_precision: PURE}}").run
        assert run is not None and run.config.mixed_precision.param_dtype == dtype


def test_a_precision_that_is_none_is_a_decision():
    """The dtypes of the new run would be guessed."""
    reading = read("precision: fp64\nfsdp_config: {mixed_precision: PURE}")
    assert finding(reading, "precision").outcome is Outcome.NEEDS_DECISION and reading.run is None


@pytest.mark.parametrize(
    ("text", "outcome", "degree"),
    [
        ("tp_config: {strategy: ffn, tensor_parallel_degree: 2}\nfsdp_config: {}", Outcome.APPROXIMATE, 2),
        ("tp_config: {strategy: mine, tensor_parallel_degree: 4}\nfsdp_config: {}", Outcome.EXACT, 4),
        ("parallelism_config: {tp: {tensor_parallel_degree: 2}, fsdp: {}}", Outcome.EXACT, 2),
        ("parallelism_config: {tp: {tensor_parallel_degree: 1}, fsdp: {}}", Outcome.UNNEEDED, 1),
        ("tp_config: {tensor_parallel_degree: two}\nfsdp_config: {}", Outcome.NEEDS_DECISION, 1),
        ("tp_config: 2\nfsdp_config: {}", Outcome.NEEDS_DECISION, 1),
    ],
)
def test_tensor_parallelism_beside_it_is_read(text: str, outcome: Outcome, degree: int):
    """Layers are split as before; a run that FSDP1 trained on other numbers is told of."""
    reading = read(text)
    (found,) = [each for each in reading.findings if each.key in ("tp", "tp_config")]
    assert found.outcome is outcome and found.reason
    assert reading.run is not None and reading.run.tensor_parallel == degree


@pytest.mark.parametrize(
    ("text", "outcome", "hint"),
    [
        ("fsdp_auto_wrap: false", Outcome.NEEDS_DECISION, "prepare_fully_shard"),
        ("fsdp_auto_wrap: true", Outcome.UNNEEDED, ""),
        ("grad_accum: 4", Outcome.NEEDS_DECISION, "device_train_microbatch_size"),
        ("deepspeed_config: {zero_optimization: {stage: 3}}", Outcome.UNSUPPORTED, "FULL_SHARD"),
        ("precision: bf16", Outcome.NEEDS_DECISION, "amp_bf16"),
    ],
)
def test_arguments_of_earlier_trainers(text: str, outcome: Outcome, hint: str):
    """Composer 0.32.1 ends with a TypeError that says nothing about what to do instead."""
    found = finding(read(f"{text}\nfsdp_config: {{verbose: true}}"), text.partition(":")[0])
    assert found.outcome is outcome and hint in found.hint


def test_arguments_of_earlier_trainers_are_gone():
    """The report says so of each; a Composer that takes one again would make it wrong."""
    from composer import Trainer

    taken = inspect.signature(Trainer).parameters
    assert not {"fsdp_config", "fsdp_auto_wrap", "grad_accum", "deepspeed_config"} & set(taken)
    assert "parallelism_config" in taken
    assert finding(read("trainer: {fsdp_config: {verbose: true}}"), "(implicit) parallelism_config")


IMPLICIT = ["backward_prefetch", "casting of inputs and buffers", "state_dict_type", "wrapping", "clipping by value"]


@pytest.mark.parametrize("name", IMPLICIT)
def test_what_no_key_says_is_reported(name: str):
    """FSDP2 differs there by itself, and nobody would look for a key that is not in the file."""
    text = (
        "algorithms: {gradient_clipping: {clipping_type: value, clipping_threshold: 1}}\nfsdp_config: {verbose: true}"
    )
    assert finding(read(text), f"(implicit) {name}").reason


def test_the_threshold_of_clipping_goes_with_the_run():
    """Other systems clip by a key of theirs; without it they do not clip, or clip at 1."""
    text = "algorithms: {gradient_clipping: {clipping_type: norm, clipping_threshold: 0.5}}\nfsdp_config: {}\n"
    assert "max_norm = 0.5" in migrate_text(text, to="torchtitan").after


@pytest.mark.parametrize("clipping", ["value, clipping_threshold: 0.5", "adaptive, clipping_threshold: 0.5"])
@pytest.mark.parametrize("to", ["roll", "torchtitan", "accelerate", "axolotl"])
def test_gradients_clipped_by_value_are_not_left_unclipped(to: str, clipping: str):
    """It was reported as off: the run trained without clipping, or to a norm of 1."""
    text = f"algorithms: {{gradient_clipping: {{clipping_type: {clipping}}}}}\nfsdp_config: {{}}\n"
    assert migrate_text(text).exit_code == 0
    told = [each for each in migrate_text(text, to=to).blocking if "clipping" in each.key]
    assert [str(each.value) for each in told] == [clipping.replace(", clipping_threshold:", "")]
    assert not [each for each in migrate_text(text, to=to).sections[0].findings if each.value == "off"]


@pytest.mark.parametrize("threshold", ["{a: null}", "-1", "0", "null", "'1'", ".nan"])
@pytest.mark.parametrize("to", sorted(TARGETS))
def test_a_threshold_that_is_no_norm_is_a_decision(to: str, threshold: str):
    """TorchTitan's file got a negative norm, which turns gradients round; a mapping was a fault of the command."""
    clipping = f"{{clipping_type: norm, clipping_threshold: {threshold}}}"
    migration = migrate_text(f"algorithms: {{gradient_clipping: {clipping}}}\nfsdp_config: {{}}\n", to=to)
    (found,) = [each for each in migration.blocking if "clipping" in each.key]
    assert "positive number" in found.reason and migration.after == migration.before


def test_a_threshold_that_is_known_where_it_runs_stays():
    """A variable's name was written as a norm."""
    clipping = "{clipping_type: norm, clipping_threshold: '${oc.env:NOBODY_SETS_THIS}'}"
    text = f"algorithms: {{gradient_clipping: {clipping}}}\nfsdp_config: {{}}\n"
    assert migrate_text(text).exit_code == 0
    migration = migrate_text(text, to="torchtitan")
    assert migration.exit_code == 1 and "max_norm" not in migration.after


# --- as a target

WRITTEN = (
    (Wrap(), None),
    (Wrap(kind=WrapKind.CLASSES, classes=("A", "B")), {"transformer_layer_cls_to_wrap": ["A", "B"]}),
    (Wrap(kind=WrapKind.CLASSES), {"transformer_layer_cls_to_wrap": "auto"}),
    (Wrap(kind=WrapKind.SIZE, min_num_params=10**8), {"min_num_params": 10**8}),
    (Wrap(kind=WrapKind.ROOT), {"transformer_layer_cls_to_wrap": []}),
    (
        Wrap(kind=WrapKind.CLASSES, classes=("A",), embeddings=True, output=True),
        {"transformer_layer_cls_to_wrap": ["A"], "wrap_embeddings": True, "wrap_lm_output": True},
    ),
)


def test_units_stand_in_the_section():
    """What other systems say in a file Composer keeps in code: without the key the model would be one unit."""
    for wrap, expected in WRITTEN:
        expression = COMPOSER.express(run_with(wrap))
        assert expression.findings == ()
        assert {each.key: each.value for each in expression.settings}.get("wrap_policy") == expected


def test_experts_stay_in_their_layers_unit():
    """An expert that is a unit, where ranks skip idle ones, trains on wrong gradients: it is told, and not written."""
    wrap = Wrap(kind=WrapKind.CLASSES, classes=("A",), experts=("Expert",))
    (found,) = COMPOSER.express(run_with(wrap)).findings
    assert found.outcome is Outcome.APPROXIMATE and "experts" in found.reason
    (policy,) = [each.value for each in COMPOSER.express(run_with(wrap)).settings if each.key == "wrap_policy"]
    assert policy == {"transformer_layer_cls_to_wrap": ["A"]}


BESIDE_SHARDING = {
    "tensor_parallel": 2,
    "pipeline_parallel": 2,
    "expert_parallel": 2,
    "tiled_chunks": 4,
    "max_grad_norm": 0.5,
    "save_only_model": True,
    "selective_checkpointing": "op",
    "compile": True,
}


@pytest.mark.parametrize(("name", "value"), BESIDE_SHARDING.items())
def test_nothing_beside_sharding_is_lost_in_silence(name: str, value: Any):
    """What belongs to the run and to no fsdp_config is a finding that names what to do, or that it cannot be done."""
    (found,) = COMPOSER.express(run_with(**{name: value})).findings
    assert found.reason and (found.hint or found.target or found.outcome in (Outcome.UNSUPPORTED, Outcome.UNNEEDED))


def test_a_right_key_is_not_blamed_for_another():
    """Beside a wrong wrap_policy the other policy was said to stand beside `activation_checkpointing: false`."""
    section = {
        "activation_checkpointing": True,
        "activation_checkpointing_policy": "auto",
        "wrap_policy": {"transformer_layer_cls_to_wrap": ["X"], "min_num_params": 5},
    }
    reading = DIALECTS["composer"].read(Section.at(("fsdp_config",), {"fsdp_config": section}))
    assert [each.key for each in reading.findings if each.outcome.blocks] == ["wrap_policy"]
