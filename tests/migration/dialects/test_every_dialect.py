"""Properties of every dialect: one finding a key, and a run that is expressed exactly is read back unchanged."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.examples import examples
from support.runs import run_with

from composer_fsdp2.config.findings import Outcome
from composer_fsdp2.config.mesh import GroupRule, MeshSpec, RankGroups
from composer_fsdp2.config.parallel import BroadcastBatch
from composer_fsdp2.config.sharding import (
    Accumulation,
    ActivationCheckpointing,
    GradientDtype,
    GradientSync,
    Prefetch,
)
from composer_fsdp2.migration.dialect import Expression, Section
from composer_fsdp2.migration.dialects import DIALECTS
from composer_fsdp2.migration.run import RunConfig, Wrap, WrapKind

# --- keys

SCALARS = st.none() | st.booleans() | st.integers(-3, 20) | st.floats(0, 2) | st.text(max_size=4)
VALUES = SCALARS | st.lists(SCALARS, max_size=2) | st.sampled_from(["default", "full", "selective", "op", "async"])
UNKNOWN = st.text(st.characters(blacklist_characters=".", blacklist_categories=["Cs"]), min_size=1, max_size=6)
WRAP_KEYS = ("transformer_layer_cls_to_wrap", "wrap_embeddings", "wrap_lm_output", "moe_experts", "experts")
# By dialect: its keys, the prefix of its section, and keys that are always in the section.
KEYS: dict[str, tuple[list[str], str, dict[str, Any]]] = {
    "roll": (
        [
            *(row.name for row in DIALECTS["roll"].rows if row.name not in ("strategy_name", "wrap_policy")),
            *(f"wrap_policy.{name}" for name in WRAP_KEYS),
        ],
        "actor_train.strategy_args.strategy_config.",
        {"actor_train.strategy_args.strategy_name": "fsdp2_train"},
    ),
    "torchtitan": (
        [row.name for row in DIALECTS["torchtitan"].rows if row.name.count(".") == 1],
        "parallelism.",
        {"parallelism.data_parallel_shard_degree": 2},
    ),
}
OUTSIDE = ("model_args.", "training_args.", "device_mapping", "max_grad_norm")  # of ROLL's section


@pytest.mark.parametrize("dialect", KEYS)
@examples(60)
@given(data=st.data())
def test_every_key_has_one_finding(dialect: str, data: st.DataObject):
    """No key of any file is lost and none raises. Reading returns a run, or a finding with the reason."""
    names, section, always = KEYS[dialect]
    known = [name for name in names if not name.startswith(OUTSIDE)]
    written = data.draw(st.dictionaries(st.sampled_from(known) | UNKNOWN, VALUES))
    values: dict[str, Any] = {}
    for name, value in [*written.items(), *always.items()]:
        is_whole = name in always or (dialect == "torchtitan" and "." in name)
        *tables, key = (name if is_whole else section + name).split(".")
        at = values
        for table in tables:
            at = at.setdefault(table, {})
        at[key] = value
    (path,) = DIALECTS[dialect].sections(values)
    reading = DIALECTS[dialect].read(Section.at(path, values))
    keys = [each.name for each in reading.findings]
    assert len(keys) == len(set(keys))
    assert {name.removeprefix("parallelism.") for name in written} <= set(keys)
    assert reading.run is not None or any(each.outcome is Outcome.NEEDS_DECISION for each in reading.findings)


# --- writing and reading back

NUM_RANKS = 24
DTYPE = st.sampled_from([None, "bfloat16", "float16", "float32"])
MESHES = [MeshSpec(), *(MeshSpec.of_degrees(shard=shard, replicate=2) for shard in (12, -1))]
MESHES += [MeshSpec.of_degrees(shard=24), MeshSpec.of_degrees(shard=8, replicate=-1)]
OF_COMPOSER = [MeshSpec.of_degrees(shard=1, replicate=-1)]
OF_COMPOSER += [
    MeshSpec.of_groups(RankGroups(rule=rule, number=2)) for rule in (GroupRule.CONSECUTIVE, GroupRule.STRIDED)
]
LAYERS, BLOCKS = (Wrap(kind=WrapKind.CLASSES, classes=(name,)) for name in ("Layer", "TransformerBlock"))
WRAPS = [
    Wrap(),
    Wrap(kind=WrapKind.ROOT),
    Wrap(kind=WrapKind.CLASSES),
    Wrap(kind=WrapKind.CLASSES, classes=("Block", "Other")),
    Wrap(kind=WrapKind.SIZE, min_num_params=1000),
    Wrap(kind=WrapKind.CLASSES, classes=("Layer",), embeddings=True, output=True),
]
CHECKPOINTING = st.builds(
    ActivationCheckpointing,
    checkpoint=st.booleans(),
    classes=st.sampled_from([None, (), ("Layer",), ("TransformerBlock",)]),
    reentrant=st.booleans(),
    cpu_offload=st.booleans(),
)
ACCUMULATION = st.builds(
    Accumulation, gradient_sync=st.sampled_from(GradientSync), reshard_after_backward=st.booleans()
)
PREFETCH = st.builds(Prefetch, forward=st.sampled_from([None, 1, 3]), backward=st.sampled_from([None, 0, 2]))
# Values that at least one system supports.
ANY: dict[str, st.SearchStrategy[Any]] = {
    "mesh": st.sampled_from(MESHES),
    "reshard_after_forward": st.sampled_from([True, False, 2, 4]),
    "param_dtype": DTYPE,
    "reduce_dtype": DTYPE,
    "cast_forward_inputs": st.booleans(),
    "cast_root_inputs": st.booleans(),
    "buffer_dtype": st.sampled_from([None, None, "bfloat16"]),
    "gradients": st.sampled_from(GradientDtype),
    "cpu_offload": st.booleans(),
    "activation_checkpointing": CHECKPOINTING,
    "prefetch": PREFETCH,
    "accumulation": ACCUMULATION,
    "collective_guard": st.sampled_from([None, None, 5.0]),
    "sync_module_states": st.sampled_from([True, False, None]),
    "precision": st.sampled_from(["fp32", "amp_bf16", "amp_fp16"]),
    "state_dict_type": st.sampled_from(["full", "sharded"]),
    "async_save": st.booleans(),
    "max_grad_norm": st.sampled_from([None, 1.0]),
}
# Values of accelerate and ROLL, all of them for runs in bfloat16.
IN_BF16 = {"param_dtype": st.just("bfloat16"), "precision": st.just("amp_bf16")}
SAVED = {"state_dict_type": st.just("sharded"), "max_grad_norm": st.just(1.0)}
OF_RESHARDING = {"reshard_after_forward": st.booleans(), "cpu_offload": st.booleans()}
# The values that each dialect supports. With them, most examples have no unsupported value to excuse a difference.
EXACT: dict[str, dict[str, st.SearchStrategy[Any]]] = {
    "composer": {
        **{name: values for name, values in ANY.items() if not name.startswith("cast_") and name != "max_grad_norm"},
        "wrap": st.sampled_from(WRAPS),
        "mesh": st.sampled_from([*MESHES, *OF_COMPOSER]),
        "freeze": st.sampled_from([(), ("model.embed", "model.vision.patch")]),
        "check_data": st.sampled_from([None, True, False]),
        "broadcast_batch": st.sampled_from([None, *BroadcastBatch]),
        "sync_module_states": st.booleans(),
        "verbose": st.booleans(),
        "reshard_after_forward": st.sampled_from([True, False, 1]),
        "gradients": st.sampled_from([GradientDtype.AS_REDUCED, GradientDtype.OF_PARAMETER]),
        "activation_checkpointing": CHECKPOINTING.filter(lambda each: each.checkpoint or each.classes is None).filter(
            lambda each: each.checkpoint or each.reentrant
        ),
    },
    "huggingface": IN_BF16
    | OF_RESHARDING
    | {
        "wrap": st.just(LAYERS),
        "reduce_dtype": st.just("bfloat16"),
        "output_dtype": st.just("bfloat16"),
        "cast_forward_inputs": st.just(True),
        "stored_dtype": st.just("float32"),
    },
    "roll": IN_BF16
    | SAVED
    | {
        "wrap": st.just(replace(LAYERS, embeddings=True)),
        "mesh": st.sampled_from([mesh for mesh in MESHES if mesh.shape != (2, -1)]),
        "reshard_after_forward": st.sampled_from([True, False, 2, 4]),
        "reduce_dtype": st.just("float32"),
        "stored_dtype": st.just("float32"),
        "cast_root_inputs": st.just(False),
        "cpu_offload": st.booleans(),
        "activation_checkpointing": st.just(ActivationCheckpointing(checkpoint=True, classes=(), reentrant=False)),
        "accumulation": st.sampled_from([Accumulation(), Accumulation(gradient_sync=GradientSync.LAST)]),
        "sync_module_states": st.just(True),
        "async_save": st.booleans(),
    },
    "torchtitan": SAVED
    | OF_RESHARDING
    | {
        "wrap": st.just(replace(BLOCKS, embeddings=True, output=True)),
        "mesh": st.sampled_from([mesh for mesh in MESHES if mesh.replicate_degree != -1]),
        "param_dtype": st.sampled_from(["bfloat16", "float32"]),
        "reduce_dtype": st.just("float32"),
        "cast_forward_inputs": st.just(True),
        "activation_checkpointing": st.sampled_from(
            [
                ActivationCheckpointing(reentrant=False),
                ActivationCheckpointing(checkpoint=True, classes=("TransformerBlock",), reentrant=False),
            ]
        ),
        "stored_dtype": st.sampled_from(["float32", "bfloat16"]),
    },
}


def file_of(name: str, expression: Expression) -> dict[str, Any]:
    """The values of a file with this expression, with the number of ranks where the dialect has a key for it."""
    values = DIALECTS[name].file_values(expression)
    return {"worker": {**values, "device_mapping": list(range(NUM_RANKS))}} if name == "roll" else values


def comparable(run: RunConfig) -> RunConfig:
    """Without differences that have no effect: options of checkpointing that is off, degrees that the number of ranks
    sets."""
    config = run.config
    if not config.activation_checkpointing.checkpoint:
        offload = config.activation_checkpointing.cpu_offload
        config = replace(config, activation_checkpointing=ActivationCheckpointing(cpu_offload=offload))
    if config.mixed_precision.cast_forward_inputs:  # a root is also a unit
        config = replace(config, mixed_precision=replace(config.mixed_precision, cast_root_inputs=True))
    return replace(run, num_ranks=NUM_RANKS, config=replace(config, mesh=config.mesh.resolve(NUM_RANKS)))


@pytest.mark.parametrize("name", EXACT)
@examples(60)
@given(data=st.data(), has_words=st.booleans())
def test_what_is_expressed_exactly_is_read_back(name: str, data: st.DataObject, has_words: bool):
    """A setting lost without a finding would change the user's run without a line in the report."""
    # Composer has no key for the casting of inputs.
    fields = EXACT[name] if has_words or name == "composer" else ANY | {"wrap": EXACT[name]["wrap"]}
    run = data.draw(st.builds(run_with, **fields))
    expression = DIALECTS[name].express(run)
    is_exact = all(each.outcome is Outcome.EXACT for each in expression.findings)
    assert is_exact or not has_words, "all that the system has a word for is expressed without a finding"
    if is_exact:
        values = file_of(name, expression)
        (path,) = DIALECTS[name].sections(values)
        reading = DIALECTS[name].read(Section.at(path, values))
        assert reading.run is not None and not [each for each in reading.findings if each.outcome.blocks]
        again, asked = comparable(reading.run), comparable(run)
        of_run = ("state_dict_type",) if name == "huggingface" else ("precision", "state_dict_type", "async_save")
        assert again.config == asked.config
        assert [getattr(again, each) for each in of_run] == [getattr(asked, each) for each in of_run]


# --- unsupported values

STRIDED = MeshSpec.of_groups(RankGroups(rule=GroupRule.STRIDED, number=2))
CONSECUTIVE = MeshSpec.of_groups(RankGroups(rule=GroupRule.CONSECUTIVE, number=4))
RECOMPUTED = ActivationCheckpointing(checkpoint=True, classes=(), reentrant=False)
OF_SIZE = Wrap(kind=WrapKind.SIZE, min_num_params=1000)
LATE = Accumulation(gradient_sync=GradientSync.LAST)
UNSUPPORTED, NEEDS_DECISION, APPROXIMATE = Outcome.UNSUPPORTED, Outcome.NEEDS_DECISION, Outcome.APPROXIMATE
LACKS: list[tuple[str, dict[str, Any], str, Outcome | None, str]] = [
    ("huggingface", {"wrap": OF_SIZE}, "(units)", UNSUPPORTED, ""),
    ("huggingface", {"wrap": LAYERS, "context_parallel_degree": 2}, "(context parallelism)", NEEDS_DECISION, "cp_size"),
    ("huggingface", {"prefetch": Prefetch(forward=1)}, "(prefetch in forward)", APPROXIMATE, ""),
    (
        "huggingface",
        {"param_dtype": "bfloat16", "reduce_dtype": "float32", "precision": "amp_bf16"},
        "(reduce_dtype)",
        UNSUPPORTED,
        "",
    ),
    (
        "huggingface",
        {"wrap": Wrap(kind=WrapKind.CLASSES), "activation_checkpointing": RECOMPUTED},
        "(activation_checkpointing)",
        APPROXIMATE,
        "dropout",
    ),
    ("composer", {"wrap": replace(LAYERS, experts=("Expert",))}, "(expert units)", APPROXIMATE, "experts"),
    # NO_SHARD would silently become full sharding, since fsdp_size 1 means all ranks to ROLL.
    ("roll", {"mesh": MeshSpec.of_degrees(shard=1, replicate=-1)}, "(mesh)", UNSUPPORTED, ""),
    ("roll", {"mesh": MeshSpec.of_degrees(shard=-1, replicate=2)}, "(mesh)", NEEDS_DECISION, ""),
    ("roll", {"mesh": CONSECUTIVE}, "(mesh)", UNSUPPORTED, ""),
    ("roll", {}, "(units)", None, ""),
    ("roll", {"wrap": OF_SIZE}, "(units)", None, ""),
    ("roll", {"buffer_dtype": "bfloat16"}, "(buffer_dtype)", None, ""),
    ("roll", {"prefetch": Prefetch(forward=2)}, "(prefetch in forward)", None, ""),
    ("roll", {"collective_guard": 9.0}, "(collective_guard)", None, ""),
    ("roll", {"accumulation": Accumulation(reshard_after_backward=False)}, "(reshard_after_backward)", None, ""),
    (
        "roll",
        {"activation_checkpointing": ActivationCheckpointing(cpu_offload=True)},
        "(activation offloading)",
        None,
        "",
    ),
    ("roll", {"context_parallel_degree": 2}, "(context parallelism)", None, ""),
    ("roll", {"tensor_parallel": 2}, "(tensor parallelism)", None, ""),
    ("roll", {"max_grad_norm": 0.5}, "(gradient clipping)", None, ""),
    ("torchtitan", {"reshard_after_forward": 4}, "(reshard_after_forward)", UNSUPPORTED, ""),
    ("torchtitan", {"mesh": MeshSpec.of_degrees(shard=4, replicate=-1)}, "(mesh)", NEEDS_DECISION, ""),
    ("torchtitan", {"mesh": MeshSpec.of_degrees(shard=1, replicate=4)}, "(mesh)", APPROXIMATE, ""),
    ("torchtitan", {"mesh": STRIDED}, "(mesh)", UNSUPPORTED, ""),
    ("torchtitan", {"param_dtype": "float16"}, "(param_dtype)", NEEDS_DECISION, ""),
    ("torchtitan", {"precision": "amp_bf16"}, "(autocast)", APPROXIMATE, ""),
    ("torchtitan", {"prefetch": Prefetch(backward=0)}, "(prefetch in backward)", APPROXIMATE, ""),
    ("torchtitan", {"accumulation": LATE}, "(gradient_sync)", APPROXIMATE, ""),
    ("torchtitan", {"freeze": ("vision",)}, "(frozen parameters)", UNSUPPORTED, ""),
    ("torchtitan", {"tiled_chunks": 4}, "(tiled MLP)", UNSUPPORTED, ""),
    ("torchtitan", {}, "(gradient clipping)", APPROXIMATE, ""),
]


@pytest.mark.parametrize(("dialect", "fields", "name", "outcome", "word"), LACKS)
def test_what_a_system_has_no_word_for_is_a_finding(
    dialect: str, fields: dict[str, Any], name: str, outcome: Outcome | None, word: str
):
    """A setting that the target does not support is reported, never dropped silently."""
    found = [each for each in DIALECTS[dialect].express(run_with(**fields)).findings if each.name == name]
    assert found and outcome in (None, *(each.outcome for each in found)), found
    assert any(each.reason and word in f"{each.reason} {each.hint}" for each in found)
