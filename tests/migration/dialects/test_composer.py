"""Composer's and LLM Foundry's sections; their own functions are the reference for their decisions."""

from __future__ import annotations

import copy
import inspect
import warnings
from typing import Any

import pytest
import yaml
from support.runs import run_with

from composer_fsdp2 import translate
from composer_fsdp2.config.findings import Outcome
from composer_fsdp2.fsdp1.keys import KEYS, KeyGroup
from composer_fsdp2.migration.dialects import DIALECTS
from composer_fsdp2.migration.migrate import migrate_text
from composer_fsdp2.migration.run import Wrap, WrapKind
from composer_fsdp2.migration.targets import TARGETS
from tests.migration.file_cases import (
    APPROXIMATE,
    EXACT,
    NEEDS_DECISION,
    NO_RUN,
    UNNEEDED,
    UNSUPPORTED,
    Case,
    each_case,
    finding,
    read_first,
)

COMPOSER = DIALECTS["composer"]


# --- finding sections


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
    """Another system's section would be read as Composer's, or a Composer section be missed."""
    assert [".".join(map(str, path)) for path in COMPOSER.sections(yaml.safe_load(text))] == places


# --- changes by LLM Foundry

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
    """A run migrated to another system would lose LLM Foundry's changes: rank 0's values, or the dtypes."""
    from llmfoundry.utils.config_utils import process_init_device  # Here, so collecting stays fast.

    changed = copy.deepcopy(section)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        process_init_device(copy.deepcopy(model), changed)
    if isinstance(changed.get("mixed_precision"), dict):
        changed["mixed_precision"].pop("keep_low_precision_grads", None)  # Composer does not read it there
    reading = read_first(yaml.safe_dump({"model": model, "precision": "amp_bf16", "fsdp_config": section}))
    assert reading.run is not None
    assert reading.run.config == translate(changed, precision="amp_bf16", device="cpu").config


def test_the_keys_that_plain_composer_reads():
    """The report on whether plain Composer, without composer_fsdp2, reads a key is right."""
    from composer.utils.parallelism import FSDP2Config

    read_there = set(FSDP2Config.settable_attrs())
    for key in KEYS:
        if key.group in (KeyGroup.FSDP1, KeyGroup.FSDP2) and key.name not in (
            "device_mesh",
            "mp_policy",
            "offload_policy",
        ):
            assert ("ignores it" not in COMPOSER.elsewhere(key.name)) == (key.name in read_there), key.name


def test_arguments_of_earlier_trainers_are_gone():
    """The report calls each of them removed; a Composer release that accepts one again would make that wrong."""
    from composer import Trainer

    taken = inspect.signature(Trainer).parameters
    assert not {"fsdp_config", "fsdp_auto_wrap", "grad_accum", "deepspeed_config"} & set(taken)
    assert "parallelism_config" in taken
    assert finding(read_first("trainer: {fsdp_config: {verbose: true}}"), "(implicit) parallelism_config")


# --- single keys

TENSOR = [
    ("tp_config: {strategy: ffn, tensor_parallel_degree: 2}\nfsdp_config: {}", APPROXIMATE, 2),
    ("tp_config: {strategy: mine, tensor_parallel_degree: 4}\nfsdp_config: {}", EXACT, 4),
    ("parallelism_config: {tp: {tensor_parallel_degree: 2}, fsdp: {}}", EXACT, 2),
    ("parallelism_config: {tp: {tensor_parallel_degree: 1}, fsdp: {}}", UNNEEDED, 1),
    ("tp_config: {tensor_parallel_degree: two}\nfsdp_config: {}", NEEDS_DECISION, 1),
    ("tp_config: 2\nfsdp_config: {}", NEEDS_DECISION, 1),
]
EARLIER = [
    ("fsdp_auto_wrap: false", NEEDS_DECISION, "prepare_fully_shard"),
    ("fsdp_auto_wrap: true", UNNEEDED, ""),
    ("grad_accum: 4", NEEDS_DECISION, "device_train_microbatch_size"),
    ("deepspeed_config: {zero_optimization: {stage: 3}}", UNSUPPORTED, "FULL_SHARD"),
    ("precision: bf16", NEEDS_DECISION, "amp_bf16"),
]
IMPLICIT = ["backward_prefetch", "casting of inputs and buffers", "state_dict_type", "wrapping", "clipping by value"]


def clipped(kind: str, threshold: object) -> str:
    clipping = f"{{clipping_type: {kind}, clipping_threshold: {threshold}}}"
    return f"algorithms: {{gradient_clipping: {clipping}}}\nfsdp_config: {{}}\n"


UNKNOWN_NORM = clipped("norm", "'${oc.env:NOBODY_SETS_THIS}'")
CASES = {
    "LLM Foundry sets what is not in the file": Case(
        file="model: {name: m, init_device: mixed}\nfsdp_config: {mixed_precision: PURE}",
        to=None,
        told={"(implicit) sync_module_states": (None, "sync_module_states: true")},
    ),
    "and dtypes": Case(
        file="model: {name: m, master_weights_dtype: bf16}\nfsdp_config: {mixed_precision: PURE}",
        to=None,
        told={"mixed_precision": (None, "master_weights_dtype")},
    ),
    **{
        f"layers of Transformer Engine never reenter: {reentrant}": Case(
            file={
                "model": {"name": "mpt_causal_lm", "fc_type": "te"},
                "fsdp_config": {"activation_checkpointing": True, "activation_checkpointing_reentrant": reentrant},
            },
            to=None,
            run={"config.activation_checkpointing.reentrant": False},
        )
        for reentrant in (True, False)
    },
    "without composer_fsdp2 the migrated file would lose replicas": Case(
        file="fsdp_config: {data_parallel_replicate_degree: 2, data_parallel_shard_degree: 4, state_dict_type: full}",
        told={
            "data_parallel_replicate_degree": (None, "without replicas"),
            "state_dict_type": (None, "its own default is sharded"),
        },
    ),
    "FSDPConfig took a misspelt key in silence, and the run was FULL_SHARD": Case(
        file="fsdp_config: {sharding_stratgy: SHARD_GRAD_OP}",
        to=None,
        run=NO_RUN,
        told={"sharding_stratgy": (NEEDS_DECISION, "sharding_strategy")},
    ),
    "of two faults the user would find one, and then the other": Case(
        file="fsdp_config: {sharding_strategy: FULL, mixed_precision: HALF, verbose: true}",
        to=None,
        run=NO_RUN,
        told={"verbose": (None,)},
        blocking=["sharding_strategy", "mixed_precision"],
    ),
    "which of two keys that contradict each other holds, only the user knows": Case(
        file="fsdp_config: {sharding_strategy: FULL_SHARD, reshard_after_forward: false, verbose: false}",
        to=None,
        run=NO_RUN,
        told={"reshard_after_forward": (None,), "verbose": (None,)},
        blocking=["sharding_strategy"],
    ),
    **{
        f"PURE is of the precision: {text!r}": Case(
            file=f"{text}fsdp_config: {{mixed_precision: PURE}}",
            to=None,
            run={"config.mixed_precision.param_dtype": dtype},
        )
        # Without a precision, Composer used its default for a GPU.
        for text, dtype in (("precision: amp_fp16\n", "float16"), ("", "bfloat16"), ("precision: fp32\n", "float32"))
    },
    "dtypes would be guessed of a precision that is none": Case(
        file="precision: fp64\nfsdp_config: {mixed_precision: PURE}",
        to=None,
        run=NO_RUN,
        told={"precision": (NEEDS_DECISION,)},
    ),
    **{
        f"layers are split as before: {text}": Case(
            file=text,
            to=None,
            run={"tensor_parallel": degree},
            told={"tp_config" if "tp_config" in text else "tp": (outcome,)},
        )
        for text, outcome, degree in TENSOR
    },
    **{
        f"Composer 0.32.1 ends with a TypeError: {text}": Case(
            file=f"{text}\nfsdp_config: {{verbose: true}}", to=None, told={text.partition(":")[0]: (outcome, hint)}
        )
        for text, outcome, hint in EARLIER
    },
    "FSDP2 differs by itself where no key is": Case(
        file=clipped("value", 1).replace("{}", "{verbose: true}"),
        to=None,
        told={f"(implicit) {name}": (None,) for name in IMPLICIT},
    ),
    "other systems clip by a key of theirs": Case(file=clipped("norm", 0.5), to="torchtitan", has=("max_norm = 0.5",)),
    **{
        f"a threshold that is no norm is a decision: {threshold} to {to}": Case(
            file=clipped("norm", threshold),
            to=to,
            told={"algorithms.gradient_clipping.clipping_threshold": (NEEDS_DECISION, "positive number")},
            after="file",
        )
        for threshold in ("{a: null}", "-1", "0", "null", "'1'", ".nan")
        for to in sorted(TARGETS)
    },
    "a variable's name was written as a norm": Case(file=UNKNOWN_NORM, blocking=[]),
    "a right key is not blamed for another": Case(
        file={
            "fsdp_config": {
                "activation_checkpointing": True,
                "activation_checkpointing_policy": "auto",
                "wrap_policy": {"transformer_layer_cls_to_wrap": ["X"], "min_num_params": 5},
            }
        },
        to=None,
        blocking=["wrap_policy"],
    ),
}


@each_case(CASES)
def test_what_becomes_of(case: Case):
    """A Composer file's keys, and those beside its section, are read with the run's meaning."""
    case.check()


@pytest.mark.parametrize("clipping", ["value", "adaptive"])
@pytest.mark.parametrize("to", ["roll", "torchtitan", "accelerate", "axolotl"])
def test_gradients_clipped_by_value_are_not_left_unclipped(to: str, clipping: str):
    """It used to be reported as off: the run trained without clipping, or with a norm of 1."""
    assert migrate_text(clipped(clipping, 0.5)).exit_code == 0
    migration = migrate_text(clipped(clipping, 0.5), to=to)
    assert [str(each.value) for each in migration.blocking if "clipping" in each.key] == [f"{clipping} 0.5"]
    assert not [each for each in migration.sections[0].findings if each.value == "off"]


def test_a_norm_that_is_known_where_it_runs_is_not_written():
    """Otherwise other systems' files would contain a variable's name as a norm."""
    migration = migrate_text(UNKNOWN_NORM, to="torchtitan")
    assert migration.exit_code == 1 and "max_norm" not in migration.after


# --- Composer as target

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
    """Units from another system's file need the key, since Composer defines them in code; without it the model is one
    unit."""
    for wrap, expected in WRITTEN:
        expression = COMPOSER.express(run_with(wrap))
        assert expression.findings == ()
        assert {each.key: each.value for each in expression.settings}.get("wrap_policy") == expected


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
    """A setting outside fsdp_config has a finding with the next step, or with the reason why there is none."""
    (found,) = COMPOSER.express(run_with(**{name: value})).findings
    assert found.reason and (found.hint or found.target or found.outcome in (Outcome.UNSUPPORTED, Outcome.UNNEEDED))
