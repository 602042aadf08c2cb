"""Hugging Face's dialect against transformers and accelerate themselves, and against its own promises."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import assume, event, given
from hypothesis import strategies as st
from support.examples import IS_THOROUGH, examples
from support.runs import run_with

from composer_fsdp2.config.findings import Finding, Origin, Outcome
from composer_fsdp2.config.mesh import MeshSpec
from composer_fsdp2.config.parallel import IdleExperts
from composer_fsdp2.config.sharding import (
    Accumulation,
    ActivationCheckpointing,
    GradientSync,
    MixedPrecision,
    Prefetch,
    ShardingConfig,
)
from composer_fsdp2.migration.dialect import Expression, Reading, Section
from composer_fsdp2.migration.dialects.composer import ComposerDialect
from composer_fsdp2.migration.dialects.huggingface import HuggingFaceDialect
from composer_fsdp2.migration.dialects.huggingface.readers import Reader
from composer_fsdp2.migration.files import Destination, migrate_files, sources_of
from composer_fsdp2.migration.migrate import migrate_text
from composer_fsdp2.migration.run import RunConfig, Wrap, WrapKind
from tests.migration.huggingface_oracle import ask

NUM_SECTIONS = 600 if IS_THOROUGH else 200  # of each system, at random
DIALECT = HuggingFaceDialect()
Written = dict[str, Any]


def read(written: Written) -> Reading:
    return DIALECT.read(Section(path=(), given=written, around=written))


def run_of(written: Written) -> RunConfig:
    run = read(written).run
    assert run is not None
    return run


def finding(written: Written, key: str) -> Finding:
    (found,) = [each for each in read(written).findings if each.name == key]
    return found


def accelerate_file(**settings: Any) -> Written:
    return {
        "distributed_type": "FSDP",
        "num_processes": 8,
        "fsdp_config": {f"fsdp_{name}": value for name, value in settings.items()},
    }


def migrated(written: Written) -> Written:
    text = yaml.safe_dump(written, sort_keys=False)
    return yaml.safe_load(migrate_text(text, to="accelerate", dialect="huggingface").after)


# ---------------------------------------------------------------------------------------------------------------------
# Against the systems themselves


def as_the_oracle_says(run: RunConfig, *, is_fsdp2: bool) -> dict[str, Any]:
    """A run in the words of accelerate's plugin, each from what the run would do."""
    config, policy = run.config, run.config.mixed_precision
    if config.mesh.shard_degree == 1:
        strategy = "NO_SHARD"
    elif config.mesh.has_replicas:
        strategy = "HYBRID_SHARD" if config.reshard_after_forward else "_HYBRID_SHARD_ZERO2"
    else:
        strategy = "FULL_SHARD" if config.reshard_after_forward else "SHARD_GRAD_OP"
    return {
        "version": 2 if is_fsdp2 else 1,
        "strategy": None if is_fsdp2 else strategy,
        "reshard": config.reshard_after_forward if is_fsdp2 else None,
        "offload": config.cpu_offload,
        "wrap": run.wrap.kind.name,
        "classes": list(run.wrap.classes),
        "min_num_params": run.wrap.min_num_params,
        "is_prefetched": config.prefetch.backward is None,
        "forward_prefetch": config.prefetch.forward == 1,
        "state_dict_type": f"{run.state_dict_type.upper()}_STATE_DICT",
        "sync": config.sync_module_states,
        "dtypes": [
            str(policy.param_dtype),
            str(policy.reduce_dtype),
            str(policy.buffer_dtype),
            str(policy.output_dtype),
        ],
        "casts": policy.cast_forward_inputs if policy.param_dtype else None,
    }


def check(written: Written, answer: dict[str, Any]) -> None:
    """The reading is the oracle's, and where there is none the oracle's run did not come far."""
    reading = read(written)
    if reading.run is None:
        assert [each for each in reading.findings if each.outcome is Outcome.NEEDS_DECISION], written
        assert "error" in answer or breaks_later(answer), (written, answer)
        return
    assert "error" not in answer, (written, answer, reading.run)
    told = dict(answer)
    if is_on_one_node(written) and "HYBRID" in (told["strategy"] or ""):  # the shards of one node, replicated once
        told["strategy"] = "SHARD_GRAD_OP" if "ZERO2" in told["strategy"] else "FULL_SHARD"
    checkpointing = told.pop("activation_checkpointing")
    if not written.get("gradient_checkpointing"):
        assert checkpointing == reading.run.config.activation_checkpointing.checkpoint, written
    prefetch = told.pop("backward_prefetch")
    told["is_prefetched"] = told["version"] == 2 or prefetch is not None
    told["classes"] = list(dict.fromkeys(told["classes"]))
    assert told == as_the_oracle_says(reading.run, is_fsdp2=told["version"] == 2), written


def is_on_one_node(written: Written) -> bool:
    return "distributed_type" in written and written.get("num_machines", 1) == 1


def breaks_later(answer: dict[str, Any]) -> bool:
    """What starts, and then cannot be carried over: names that no class has, flat shards, nodes of unknown size."""
    has_bad_names = any(set("[] '") & set(name) for name in answer["classes"])
    is_hybrid = "HYBRID" in (answer["strategy"] or "")
    return has_bad_names or answer["state_dict_type"] == "LOCAL_STATE_DICT" or is_hybrid


WORDS: list[Any] = [
    "full_shard",
    "full_shard auto_wrap",
    "shard_grad_op auto_wrap offload",
    "no_shard",
    "hybrid_shard auto_wrap",
    "auto_wrap",
    "offload",
    "offload auto_wrap",
    "FULL_SHARD",
    "full_shard,auto_wrap",
    "full_shard shard_grad_op",
    True,
    False,
    "",
    ["full_shard", "auto_wrap"],
    ["SHARD_GRAD_OP"],
    ["full_shrad", "AUTO_WRAP"],
    ["shard_grad_op", "offload"],
]
VALUES: dict[str, list[Any]] = {
    "transformer_layer_cls_to_wrap": ["Block", "Block,Other", "Block, Other", ["Block"], ["Block", "Other"]],
    "min_num_params": [0, 1000, "1e8", 1e8],
    "backward_prefetch": ["backward_pre", "BACKWARD_POST", "NO_PREFETCH", "sometimes", None],
    "forward_prefetch": [True, False, "true", "false", None],
    "sync_module_states": [True, False, "true", "false", "no"],
    "cpu_ram_efficient_loading": [True, False, "true", "False", "off"],
    "use_orig_params": [True, False, "false"],
    "activation_checkpointing": [True, False, "true", "false", 0, None],
    "limit_all_gathers": [True, False, "false"],
    "state_dict_type": [
        "FULL_STATE_DICT",
        "SHARDED_STATE_DICT",
        "LOCAL_STATE_DICT",
        "sharded_state_dict",
        "full",
        None,
    ],
    "offload_params": [True, False, "false", "yes"],
    "auto_wrap_policy": ["TRANSFORMER_BASED_WRAP", "transformer_based_wrap", "SIZE_BASED_WRAP", "NO_WRAP", "ALL", None],
    "sharding_strategy": ["FULL_SHARD", "shard_grad_op", "NO_SHARD", "HYBRID_SHARD", 1, 2, 3, 4, 5, 6, "FULL", None],
    "made_up": [1],
}


def random_trainer(rng: random.Random) -> Written:
    written: Written = {"fsdp": rng.choice(WORDS)}
    if rng.random() < 0.8:
        names = rng.sample(sorted(VALUES), k=rng.randint(0, 5))
        written["fsdp_config"] = {
            name if rng.random() < 0.7 else f"fsdp_{name}": rng.choice(VALUES[name]) for name in names
        }
    for name, values in (
        ("bf16", [True, False]),
        ("gradient_checkpointing", [True, False]),
        ("fsdp_transformer_layer_cls_to_wrap", ["Layer"]),
        ("fsdp_min_num_params", [0, 10]),
    ):
        if rng.random() < 0.2:
            written[name] = rng.choice(values)
    return written


def random_accelerate(rng: random.Random) -> Written:
    names = rng.sample(sorted(VALUES), k=rng.randint(0, 6))
    written: Written = {
        "distributed_type": "FSDP",
        "num_processes": 8,
        "fsdp_config": {name if rng.random() < 0.2 else f"fsdp_{name}": rng.choice(VALUES[name]) for name in names},
    }
    if rng.random() < 0.4:
        written["fsdp_config"]["fsdp_version"] = rng.choice([1, 2, 2])
    if rng.random() < 0.3:
        written["fsdp_config"]["fsdp_reshard_after_forward"] = rng.choice([True, False, "FULL_SHARD", 2])
    if rng.random() < 0.5:
        written["num_machines"] = 2
    if rng.random() < 0.6:
        written["mixed_precision"] = rng.choice(["no", "bf16", "fp16", False])
    return written


@pytest.fixture(scope="module")
def answered() -> list[tuple[str, Written, dict[str, Any]]]:
    """Sections at random, alike in every run, with the oracle's answers."""
    rng = random.Random(6)
    cases = [("trainer", random_trainer(rng)) for _ in range(NUM_SECTIONS)]
    cases += [("accelerate", random_accelerate(rng)) for _ in range(NUM_SECTIONS)]
    return [(*case, answer) for case, answer in zip(cases, ask(cases), strict=True)]


@pytest.mark.parametrize("system", ["trainer", "accelerate"])
def test_a_reading_is_what_the_system_did(system: str, answered: list[tuple[str, Written, dict[str, Any]]]) -> None:
    """A user would migrate what the file says, and lose what the run was."""
    of_system = [(written, answer) for each, written, answer in answered if each == system]
    for written, answer in of_system:
        check(written, answer)
    read_well = [written for written, answer in of_system if read(written).run is not None]
    assert len(of_system) / 5 < len(read_well) < len(of_system) * 4 / 5


def test_a_migrated_file_starts_and_shards_alike(answered: list[tuple[str, Written, dict[str, Any]]]) -> None:
    """A user would get a file that accelerate refuses, or that trains something else."""
    before = [written for system, written, _ in answered if system == "accelerate" and read(written).run is not None]
    # parallelism_config came with accelerate 1.10; the one that is asked here refuses the file.
    pairs = [(written, migrated(written)) for written in before]
    pairs = [(written, new) for written, new in pairs if "parallelism_config" not in new]
    answers = ask([("accelerate", new) for _, new in pairs])
    assert len(pairs) > NUM_SECTIONS / 6
    for (written, new), answer in zip(pairs, answers, strict=True):
        old, run = run_of(written), run_of(new)
        if old.config.mesh.shard_degree == 1:
            assert new == written  # FSDP2 has no form for it: the file stays as it is
            continue
        assert answer["version"] == 2, (written, answer)
        check(new, answer)
        assert run.wrap == old.wrap, written
        assert run.state_dict_type == old.state_dict_type
        assert run.config.reshard_after_forward == old.config.reshard_after_forward
        assert run.config.cpu_offload == old.config.cpu_offload
        assert run.config.mixed_precision.param_dtype == old.config.mixed_precision.param_dtype


def test_a_run_in_accelerates_words_starts_and_shards_alike(
    answered: list[tuple[str, Written, dict[str, Any]]],
) -> None:
    """A user would get a file that accelerate refuses, or that trains something else."""
    before = [run for _, written, _ in answered if (run := read(written).run) is not None]
    pairs = [(run, DIALECT.express(run)) for run in before]
    pairs = [(run, new) for run, new in pairs if not any(each.outcome.blocks for each in new.findings)]
    pairs = [(run, new) for run, new in pairs if "parallelism_config" not in settings_of(new)]
    files = [{"num_processes": 8, **settings_of(new)} for _, new in pairs]
    assert len(files) > NUM_SECTIONS / 6
    for (run, _), file, answer in zip(pairs, files, ask([("accelerate", file) for file in files]), strict=True):
        check(file, answer)
        assert answer["reshard"] == run.config.reshard_after_forward
        assert answer["offload"] == run.config.cpu_offload
        assert answer["sync"] == run.config.sync_module_states
        assert (answer["wrap"], answer["classes"]) == (run.wrap.kind.name, list(run.wrap.classes))
        assert answer["state_dict_type"] == f"{run.state_dict_type.upper()}_STATE_DICT"
        assert answer["dtypes"][:2] == 2 * [str(run.config.mixed_precision.param_dtype)]


# ---------------------------------------------------------------------------------------------------------------------
# Its own promises, on the same sections


def leaves(written: Written) -> set[str]:
    """The keys that are FSDP's own."""
    keys: set[str] = set()
    for name, value in written.items():
        if name in ("fsdp_config", "parallelism_config") and value:
            keys |= {f"{name}.{key}" for key in value}
        elif name.startswith(("fsdp", "distributed_type", "mixed_precision", "bf16", "fp16", "gradient_checkpointing")):
            keys.add(name)
    return keys


@examples(50)
@given(st.randoms(use_true_random=False), st.booleans())
def test_every_key_has_one_finding_and_a_second_run_changes_nothing(rng: random.Random, is_trainer: bool) -> None:
    """A key would be dropped in silence, or a folder in CI would never come to rest."""
    written = (random_trainer if is_trainer else random_accelerate)(rng)
    others = {"learning_rate": 0.1, "seed": 17} if is_trainer else {"machine_rank": 3, "debug": False}
    written |= others
    assume(DIALECT.sections(written))
    reading = read(written)
    keys = [each.key for each in reading.findings if each.origin is Origin.KEY]
    event("has a run" if reading.run else "has none")
    assert sorted(keys) == sorted(leaves(written))
    assert all(each.reason for each in reading.findings)
    once = migrated(written)
    assert migrated(once) == once
    assert {name: once[name] for name in others} == others
    if reading.run is None:
        assert once == written


ALL_IN_BF16 = MixedPrecision(
    param_dtype="bfloat16", reduce_dtype="bfloat16", output_dtype="bfloat16", cast_forward_inputs=True
)
dtypes = st.sampled_from([None, "bfloat16", "float16"])
configs = st.builds(
    ShardingConfig,
    mesh=st.sampled_from(
        [
            MeshSpec(),
            MeshSpec.of_degrees(shard=8),
            MeshSpec.of_degrees(shard=4, replicate=2),
            MeshSpec.of_degrees(shard=4, replicate=-1),
            MeshSpec.of_degrees(shard=4, replicate=1),
        ]
    ),
    reshard_after_forward=st.sampled_from([True, False, 2]),
    mixed_precision=st.one_of(
        st.builds(
            MixedPrecision,
            param_dtype=dtypes,
            reduce_dtype=dtypes,
            output_dtype=dtypes,
            buffer_dtype=st.sampled_from([None, None, "bfloat16"]),
            cast_forward_inputs=st.booleans(),
            cast_root_inputs=st.sampled_from([True, True, False]),
        ),
        st.just(ALL_IN_BF16),
        st.just(MixedPrecision()),
    ),
    cpu_offload=st.booleans(),
    activation_checkpointing=st.sampled_from(
        [
            ActivationCheckpointing(),
            ActivationCheckpointing(checkpoint=True, reentrant=False),
            ActivationCheckpointing(reentrant=False),
            ActivationCheckpointing(cpu_offload=True),
        ]
    ),
    prefetch=st.builds(Prefetch, forward=st.sampled_from([None, 1]), backward=st.sampled_from([None, None, 0, 2])),
    accumulation=st.sampled_from([Accumulation(), Accumulation(), Accumulation(gradient_sync=GradientSync.LAST)]),
    collective_guard=st.sampled_from([None, None, 5.0]),
    sync_module_states=st.sampled_from([True, False, None]),
)
exact_configs = st.builds(
    ShardingConfig,
    mesh=st.sampled_from([MeshSpec(), MeshSpec.of_degrees(shard=8), MeshSpec.of_degrees(shard=4, replicate=2)]),
    reshard_after_forward=st.booleans(),
    mixed_precision=st.just(ALL_IN_BF16),
    cpu_offload=st.booleans(),
    sync_module_states=st.booleans(),
)
wraps = st.sampled_from(
    [
        Wrap(kind=WrapKind.ROOT),
        Wrap(kind=WrapKind.CLASSES),
        Wrap(kind=WrapKind.CLASSES, classes=("Block", "Other")),
        Wrap(kind=WrapKind.SIZE, min_num_params=1000),
        Wrap(kind=WrapKind.HOOKS),
    ]
)


def run_that_wraps(config: ShardingConfig, wrap: Wrap, **fields: Any) -> RunConfig:
    """What is recomputed is what is wrapped, as accelerate has it."""
    checkpointing = config.activation_checkpointing
    if checkpointing.checkpoint:
        checkpointing = replace(checkpointing, classes=wrap.classes)
    return RunConfig(config=replace(config, wrap=wrap, activation_checkpointing=checkpointing), **fields)


runs = st.builds(
    run_that_wraps,
    config=st.one_of(configs, exact_configs, st.just(ShardingConfig(mesh=MeshSpec().without_shards()))),
    wrap=wraps,
    precision=st.sampled_from(["fp32", "amp_bf16", "amp_bf16", "amp_fp16"]),
    state_dict_type=st.sampled_from(["full", "sharded"]),
    strict=st.sampled_from([True, True, False]),
    num_ranks=st.sampled_from([None, 8]),
)


def is_exact(expression: Expression) -> bool:
    return all(each.outcome is Outcome.EXACT for each in expression.findings)


def settings_of(expression: Expression) -> Written:
    return {entry.key: entry.value for entry in expression.settings}


@examples(60)
@given(runs)
def test_what_is_expressed_without_a_loss_reads_back_the_same(run: RunConfig) -> None:
    """A loss without a finding: the user's run would differ, and no report say so."""
    expression = DIALECT.express(run)
    reading = read(settings_of(expression))
    if not is_exact(expression):
        return
    assert reading.run is not None
    assert reading.run.config == run.config
    assert (reading.run.wrap, reading.run.state_dict_type) == (run.wrap, run.state_dict_type)
    assert not [each for each in reading.findings if each.outcome.blocks]


def test_a_plain_run_is_expressed_exactly() -> None:
    """The property above would hold of a target that calls everything a loss."""
    wrap = Wrap(kind=WrapKind.CLASSES, classes=("Block",))
    config = ShardingConfig(mixed_precision=ALL_IN_BF16, wrap=wrap)
    run = RunConfig(config=config, precision="amp_bf16", stored_dtype="float32")
    assert is_exact(DIALECT.express(run))


# ---------------------------------------------------------------------------------------------------------------------
# One by one: a distillation of a Qwen3 MoE, as a well-known guide has it

DISTILLATION = """\
# Distil the compressed model.
training:
  fsdp: full_shard  # as much as possible
  fsdp_config:
    fsdp_transformer_layer_cls_to_wrap: [Qwen3MoeDecoderLayer]
    fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
    fsdp_backward_prefetch: backward_pre
    fsdp_forward_prefetch: false
    fsdp_state_dict_type: FULL_STATE_DICT
    fsdp_offload_params: false

  bf16: true
  gradient_checkpointing: true
  gradient_accumulation_steps: 8
  learning_rate: 5e-5
"""


def test_the_distillation_trained_as_one_unit() -> None:
    """The prefixed keys of the guide were never read: the whole model was gathered at once, and nobody said so."""
    written = yaml.safe_load(DISTILLATION)["training"]
    run = run_of(written)
    assert run.wrap == Wrap(kind=WrapKind.ROOT)
    assert run.config.prefetch == Prefetch(backward=0)
    assert run.config.accumulation.gradient_sync is GradientSync.LAST
    outcomes = {each.key: each.outcome for each in read(written).findings}
    inert = ("transformer_layer_cls_to_wrap", "auto_wrap_policy", "backward_prefetch")
    assert {outcomes[f"fsdp_config.fsdp_{name}"] for name in inert} == {Outcome.NEEDS_DECISION}
    held = ("forward_prefetch", "state_dict_type", "offload_params")
    assert {outcomes[f"fsdp_config.fsdp_{name}"] for name in held} == {Outcome.UNNEEDED}
    decision = finding(written, "fsdp_config.fsdp_auto_wrap_policy")
    assert "as trained" in decision.hint and "as written" in decision.hint and "auto_wrap in fsdp" in decision.hint
    assert "learning_rate" not in outcomes


def test_the_distillation_as_it_was_trained() -> None:
    """Transformers 5 takes the prefix off, and would bring keys to life that the run never knew."""
    new = migrate_text(DISTILLATION, to="accelerate").after
    assert (
        new
        == """\
# Distil the compressed model.
training:
  fsdp: full_shard  # as much as possible
  fsdp_config:
    version: 2
    reshard_after_forward: true
    state_dict_type: FULL_STATE_DICT
    auto_wrap_policy: NO_WRAP

  bf16: true
  gradient_checkpointing: true
  gradient_accumulation_steps: 8
  learning_rate: 5e-5
"""
    )
    assert migrate_text(new, to="accelerate").after == new


def test_the_distillation_as_it_was_meant() -> None:
    """Decided by the user: read, each layer a unit, and nothing left to decide."""
    written = {
        "fsdp": "full_shard auto_wrap",
        "fsdp_config": {"transformer_layer_cls_to_wrap": ["Qwen3MoeDecoderLayer"], "backward_prefetch": "backward_pre"},
        "bf16": True,
    }
    reading = read(written)
    assert reading.run is not None
    assert reading.run.wrap == Wrap(kind=WrapKind.CLASSES, classes=("Qwen3MoeDecoderLayer",))
    assert reading.run.config.prefetch == Prefetch()
    assert not [each for each in reading.findings if each.outcome.blocks]


# ---------------------------------------------------------------------------------------------------------------------
# Where sections are


@pytest.mark.parametrize(
    ("values", "paths"),
    [
        ({"fsdp": "full_shard"}, [()]),
        ({"a": {"training": {"fsdp": True}}}, [("a", "training")]),
        ({"stages": [{"fsdp": ["full_shard"]}, {"fsdp": "no_shard"}]}, [("stages", 0), ("stages", 1)]),
        ({"distributed_type": "FSDP", "fsdp_config": {"sharding_strategy": 1}}, [()]),
        ({"args": {"fsdp_config": {"fsdp_min_num_params": 1}}}, [("args",)]),
        ({"fsdp": "", "fsdp_config": None}, []),
        ({"fsdp": False}, []),
        ({"distributed_type": "MULTI_GPU", "fsdp_config": {}}, []),
        ({"fsdp_config": {"sharding_strategy": "FULL_SHARD"}}, []),
        ({"parallelism_config": {"fsdp": {"sharding_strategy": "FULL_SHARD"}}}, []),
    ],
)
def test_sections_are_told_from_composers(values: Written, paths: list[tuple[str | int, ...]]) -> None:
    """A section read in the wrong system's words would be called unknown keys, or not found."""
    assert DIALECT.sections(values) == paths
    if paths:
        assert ComposerDialect().sections(values) == []


# ---------------------------------------------------------------------------------------------------------------------
# Values that other converters get wrong


@pytest.mark.parametrize("number", ["1e8", 1e8])
def test_a_number_with_an_exponent_is_named_in_full(number: object) -> None:
    """Such a run never started; the user needs the number that does."""
    trainer = {"fsdp": "full_shard auto_wrap", "fsdp_config": {"min_num_params": number}}
    file = accelerate_file(auto_wrap_policy="SIZE_BASED_WRAP", min_num_params=number)
    for written, key in ((trainer, "fsdp_config.min_num_params"), (file, "fsdp_config.fsdp_min_num_params")):
        assert read(written).run is None
        assert finding(written, key).outcome is Outcome.NEEDS_DECISION
        assert "100000000" in finding(written, key).reason


def test_wrapping_by_size_is_read_and_not_expressed() -> None:
    """Under FSDP2 accelerate breaks on it: better to hear that before the launch."""
    run = run_of({"fsdp": "full_shard auto_wrap", "fsdp_config": {"min_num_params": 1000}})
    assert run.wrap == Wrap(kind=WrapKind.SIZE, min_num_params=1000)
    (lost,) = [each for each in DIALECT.express(run).findings if each.name == "(units)"]
    assert lost.outcome is Outcome.UNSUPPORTED
    file = accelerate_file(version=2, auto_wrap_policy="SIZE_BASED_WRAP", min_num_params=1000)
    assert finding(file, "fsdp_config.fsdp_auto_wrap_policy").outcome is Outcome.UNSUPPORTED


@pytest.mark.parametrize("value", ["LOCAL_STATE_DICT", "local_state_dict", 2])
@pytest.mark.parametrize("version", [1, 2])
def test_flat_shards_are_a_decision(value: object, version: int) -> None:
    """FSDP2 refuses LOCAL_STATE_DICT at the launch."""
    written = accelerate_file(version=version, state_dict_type=value)
    assert read(written).run is None
    found = finding(written, "fsdp_config.fsdp_state_dict_type")
    assert found.outcome is Outcome.NEEDS_DECISION
    assert "SHARDED_STATE_DICT" in found.reason and "FULL_STATE_DICT" in found.reason


def test_a_trainers_state_dict_type_was_never_read() -> None:
    """Checkpoints were full ones, whatever the arguments say."""
    written = {"fsdp": "full_shard", "fsdp_config": {"state_dict_type": "SHARDED_STATE_DICT"}}
    assert run_of(written).state_dict_type == "full"
    found = finding(written, "fsdp_config.state_dict_type")
    assert found.outcome is Outcome.NEEDS_DECISION
    assert "FSDP_STATE_DICT_TYPE" in found.hint


@pytest.mark.parametrize("strategy", ["NO_SHARD", "no_shard", 3, "3"])
def test_no_shard_stays_whole(strategy: object) -> None:
    """accelerate's own converter makes it a sharded run, with other memory and traffic."""
    written = accelerate_file(sharding_strategy=strategy)
    run = run_of(written)
    assert run.config.mesh == MeshSpec.of_degrees(replicate=-1, shard=1)
    (lost,) = [each for each in DIALECT.express(run).findings if each.name == "(mesh)"]
    assert lost.outcome is Outcome.UNSUPPORTED
    assert "MULTI_GPU" in lost.hint
    assert DIALECT.rewrite(Section(path=(), given=written, around=written), read(written)) == []


@pytest.mark.parametrize(("strategy", "reshards"), [("HYBRID_SHARD", True), (4, True), (5, False)])
def test_hybrids_keep_their_replicas(strategy: object, reshards: bool) -> None:
    """accelerate's own converter drops the replicas: every all-gather would cross the nodes."""
    written = accelerate_file(sharding_strategy=strategy) | {"num_processes": 16, "num_machines": 2}
    run = run_of(written)
    assert run.config.mesh == MeshSpec.of_degrees(shard=8, replicate=-1)
    assert run.config.reshard_after_forward is reshards
    degrees = {"dp_replicate_size": 2, "dp_shard_size": 8, "tp_size": 1, "cp_size": 1}
    expected = {f"parallelism_config_{name}": degree for name, degree in degrees.items()}
    assert settings_of(DIALECT.express(run))["parallelism_config"] == expected
    new = migrated(written)
    assert new["parallelism_config"] == expected
    assert run_of(new).config.mesh == MeshSpec.of_degrees(shard=8, replicate=2)


def test_replicas_in_accelerates_words_are_a_decision_until_the_file_says_them() -> None:
    """The run's accelerate may be one that refuses the whole file: exit code 0 would let it fail at the launch."""
    written = accelerate_file(sharding_strategy="HYBRID_SHARD") | {"num_processes": 16, "num_machines": 2}
    migration = migrate_text(yaml.safe_dump(written), to="accelerate")
    (found,) = [each for each in migration.sections[0].findings if each.name == "(mesh)"]
    assert migration.exit_code == 1
    assert found.outcome is Outcome.NEEDS_DECISION
    assert "1.10" in found.hint and "all ranks" in found.hint
    (answer,) = ask([("accelerate", yaml.safe_load(migration.after))])
    assert "parallelism_config" in answer["error"]  # of the release here

    again = migrate_text(migration.after, to="accelerate")
    assert again.exit_code == 0 and not again.is_changed
    by_hand = written | {"parallelism_config": {"dp_replicate_size": 2, "dp_shard_size": 8}}
    decided = migrate_text(yaml.safe_dump(by_hand), to="accelerate")
    assert decided.exit_code == 0
    assert yaml.safe_load(decided.after)["parallelism_config"] == by_hand["parallelism_config"]


@pytest.mark.parametrize("mesh", [MeshSpec(), MeshSpec.of_degrees(shard=8), MeshSpec.of_degrees(shard=-1, replicate=1)])
@pytest.mark.parametrize("num_ranks", [None, 8])
def test_all_ranks_need_no_word_that_a_release_refuses(mesh: MeshSpec, num_ranks: int | None) -> None:
    """A plain run would get a file that accelerate 1.8.1 does not start with."""
    run = run_with(Wrap(kind=WrapKind.CLASSES), mesh=mesh, num_ranks=num_ranks)
    expression = DIALECT.express(run)
    assert "parallelism_config" not in settings_of(expression)
    assert not [each for each in expression.findings if each.name == "(mesh)" and each.outcome.blocks]


def test_other_axes_are_a_decision() -> None:
    """Left out, sequences would be whole on every rank: the run would not fit, and the report said that it does."""
    run = run_with(Wrap(kind=WrapKind.CLASSES), context_parallel_degree=2)
    (found,) = [each for each in DIALECT.express(run).findings if each.name == "(mesh)"]
    assert found.outcome is Outcome.NEEDS_DECISION
    assert "cp_size" in found.hint


def test_a_trainers_hybrid_needs_the_size_of_a_node() -> None:
    """FSDP1 counted the GPUs at run time; FSDP2 wants the number, and a guess would cost the replicas."""
    written: Written = {"training": {"fsdp": "hybrid_shard auto_wrap", "bf16": True}}
    assert read(written["training"]).run is None
    assert "dp_shard_size" in finding(written["training"], "fsdp").reason
    written["training"]["parallelism_config"] = {"dp_shard_size": 8, "dp_replicate_size": 2}
    assert run_of(written["training"]).config.mesh == MeshSpec.of_degrees(shard=8, replicate=2)
    new = migrated(written)["training"]
    assert new["fsdp"] == "full_shard auto_wrap"
    assert run_of(new).config.mesh == MeshSpec.of_degrees(shard=8, replicate=2)


def test_forward_prefetch_is_kept_in_the_run_and_named_as_a_loss() -> None:
    """accelerate's FSDP2 has none; its plugin even refuses it."""
    run = run_of(accelerate_file(forward_prefetch=True))
    assert run.config.prefetch.forward == 1
    (lost,) = [each for each in DIALECT.express(run).findings if each.name == "(prefetch in forward)"]
    assert lost.outcome is Outcome.APPROXIMATE


def test_classes_without_auto_wrap_are_a_decision() -> None:
    """Wrapping as the file says would change memory; wrapping as trained is one unit. The user must choose."""
    trainer = {"fsdp": "full_shard", "fsdp_config": {"transformer_layer_cls_to_wrap": ["Block"]}}
    assert run_of(trainer).wrap == Wrap(kind=WrapKind.ROOT)
    found = finding(trainer, "fsdp_config.transformer_layer_cls_to_wrap")
    assert found.outcome is Outcome.NEEDS_DECISION and "auto_wrap in fsdp" in found.hint
    file = accelerate_file(transformer_layer_cls_to_wrap="Block")
    assert finding(file, "fsdp_config.fsdp_transformer_layer_cls_to_wrap").outcome is Outcome.NEEDS_DECISION
    decided = accelerate_file(transformer_layer_cls_to_wrap="Block", auto_wrap_policy="NO_WRAP")
    assert finding(decided, "fsdp_config.fsdp_transformer_layer_cls_to_wrap").outcome is Outcome.UNNEEDED


def test_settings_in_another_file_are_a_decision() -> None:
    """They would be taken for the defaults."""
    written = {"fsdp": "full_shard auto_wrap", "fsdp_config": "fsdp.json"}
    assert read(written).run is None
    assert finding(written, "fsdp_config").outcome is Outcome.NEEDS_DECISION
    assert migrated(written) == written


def test_a_trainers_own_file_claims_nothing_about_words_that_stand_elsewhere() -> None:
    """'The whole model was one unit', of a run whose command line said auto_wrap."""
    written = {"transformer_layer_cls_to_wrap": ["Block"], "backward_prefetch": "backward_pre"}
    classes = finding(written, "transformer_layer_cls_to_wrap")
    assert classes.outcome is Outcome.NEEDS_DECISION and "not known here" in classes.reason
    told = [f"{each.reason} {each.target}" for each in read(written).findings]
    assert not any("no wrapping was asked for" in each or "one unit" in each for each in told)
    assert run_of(written | {"fsdp": "full_shard auto_wrap"}).wrap == Wrap(kind=WrapKind.CLASSES, classes=("Block",))


def test_a_trainers_own_file_for_fsdp2_is_recognized(tmp_path: Path) -> None:
    """In a folder it was passed over, and by its name refused as a file without a section."""
    for number, prefix in enumerate(("", "fsdp_")):
        written = {f"{prefix}version": 2, f"{prefix}reshard_after_forward": False}
        assert run_of(written).config.reshard_after_forward is False
        (tmp_path / f"{number}.json").write_text(json.dumps(written))
    results = list(migrate_files(sources_of([tmp_path]), Destination()))
    assert [(each.is_skipped, each.exit_code) for each in results] == [(False, 0)] * 2
    assert DIALECT.sections({"version": 2, "services": {}}) == []


def test_an_unknown_key_gets_the_nearest_known_one() -> None:
    """A misspelt key trains with the default, and nobody notices."""
    assert (
        "fsdp_sharding_strategy"
        in finding(accelerate_file(sharding_stratgy="NO_SHARD"), "fsdp_config.fsdp_sharding_stratgy").hint
    )
    trainer = {"fsdp": "full_shrad auto_wrap"}
    assert read(trainer).run is None
    assert "full_shard" in finding(trainer, "fsdp").reason
    precision = accelerate_file() | {"mixed_precision": "nope"}
    assert finding(precision, "mixed_precision").reason.endswith("did you mean no?")


def test_gradients_are_reduced_in_the_low_dtype() -> None:
    """Expressed as Composer's default they would be reduced in fp32: other traffic, other numbers."""
    for run in (run_of({"fsdp": "full_shard", "bf16": True}), run_of(accelerate_file() | {"mixed_precision": "bf16"})):
        assert run.config.mixed_precision.param_dtype == "bfloat16"
        assert run.config.mixed_precision.reduce_dtype == "bfloat16"
        assert run.config.mixed_precision.buffer_dtype == "bfloat16"
        assert run.precision == "amp_bf16"
    fp32_reduction = run_with(
        Wrap(kind=WrapKind.CLASSES), param_dtype="bfloat16", reduce_dtype="float32", precision="amp_bf16"
    )
    lost = DIALECT.express(fp32_reduction).findings
    assert [each.outcome for each in lost if each.name == "(mixed_precision.reduce_dtype)"] == [Outcome.UNSUPPORTED]


def test_a_file_for_fsdp2_is_left_alone() -> None:
    """Words of FSDP1 in it are without effect, and said to be."""
    written = accelerate_file(
        version=2, reshard_after_forward=False, sharding_strategy="SHARD_GRAD_OP", use_orig_params=False
    )
    assert run_of(written).config.reshard_after_forward is False
    assert run_of(written).state_dict_type == "sharded"
    assert finding(written, "fsdp_config.fsdp_sharding_strategy").outcome is Outcome.UNNEEDED
    assert finding(written, "fsdp_config.fsdp_use_orig_params").outcome is Outcome.UNNEEDED
    assert migrated(written) == written
    written["fsdp_config"]["fsdp_sharding_strategy"] = "HYBRID_SHARD"
    replicas = finding(written, "fsdp_config.fsdp_sharding_strategy")
    assert replicas.outcome is Outcome.NEEDS_DECISION and "parallelism_config" in replicas.hint


def test_arguments_of_old_move_into_fsdp_config() -> None:
    """Transformers 5 knows them no more, and would stop."""
    written = {"fsdp": "full_shard auto_wrap", "fsdp_transformer_layer_cls_to_wrap": "Block", "seed": 1}
    assert run_of(written).wrap == Wrap(kind=WrapKind.CLASSES, classes=("Block",))
    new = migrated(written)
    assert "fsdp_transformer_layer_cls_to_wrap" not in new
    assert run_of(new).wrap == run_of(written).wrap


def test_both_ways_to_recompute_differ_in_what_they_keep() -> None:
    """Recomputing without the random numbers of forward changes dropout; accelerate's FSDP2 does so."""
    run = run_of({"fsdp": "full_shard auto_wrap", "fsdp_config": {"activation_checkpointing": True}})
    assert run.config.activation_checkpointing == ActivationCheckpointing(checkpoint=True, classes=(), reentrant=False)
    of_model = run_of({"fsdp": "full_shard auto_wrap", "gradient_checkpointing": True})
    assert of_model.config.activation_checkpointing == ActivationCheckpointing(checkpoint=True, classes=())
    (found,) = [each for each in DIALECT.express(run).findings if each.name == "(activation_checkpointing)"]
    assert found.outcome is Outcome.APPROXIMATE
    assert "dropout" in found.reason


def test_what_was_recomputed_by_size_is_told() -> None:
    """accelerate recomputed the modules that its size rule chose; no file of Composer's says so."""
    settings = {"fsdp_auto_wrap_policy": "SIZE_BASED_WRAP", "fsdp_min_num_params": 1000}
    file = {"distributed_type": "FSDP", "fsdp_config": settings | {"fsdp_activation_checkpointing": True}}
    (section,) = migrate_text(yaml.safe_dump(file), to="composer").sections
    (found,) = [each for each in section.findings if each.key == "fsdp_config.fsdp_activation_checkpointing"]
    assert found.outcome is Outcome.APPROXIMATE and "by size" in found.reason


@pytest.mark.parametrize("words", ["full_shard", "full_shard auto_wrap"])
def test_recomputing_under_composer_needs_no_hook_of_the_model(words: str) -> None:
    """Without the model's hook Composer recomputes nothing: a run that fitted runs out of memory, with no word why."""
    text = yaml.safe_dump({"fsdp": words, "gradient_checkpointing": True})
    migration = migrate_text(text, to="composer")
    written = yaml.safe_load(migration.after)["fsdp_config"]
    assert written["activation_checkpointing"] is True
    assert written["activation_checkpointing_policy"] == "auto"
    assert migration.exit_code == 0

    without = yaml.safe_load(migrate_text(yaml.safe_dump({"fsdp": words}), to="composer").after)["fsdp_config"]
    assert "activation_checkpointing_policy" not in without


def test_comments_and_order_of_a_file_are_kept() -> None:
    """accelerate's own converter sorts the file and drops every comment."""
    text = """\
compute_environment: LOCAL_MACHINE
distributed_type: FSDP   # sharded
fsdp_config:
  fsdp_sharding_strategy: SHARD_GRAD_OP # ZeRO 2
  fsdp_backward_prefetch: NO_PREFETCH
  # the layers
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_state_dict_type: 'SHARDED_STATE_DICT'
num_processes: 8
mixed_precision: "no"
"""
    assert (
        migrate_text(text, to="accelerate").after
        == """\
compute_environment: LOCAL_MACHINE
distributed_type: FSDP   # sharded
fsdp_config:
  fsdp_version: 2
  fsdp_reshard_after_forward: false # ZeRO 2
  # the layers
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_state_dict_type: 'SHARDED_STATE_DICT'
num_processes: 8
mixed_precision: "no"
"""
    )


# ---------------------------------------------------------------------------------------------------------------------
# Beside the section


@pytest.mark.parametrize(("written", "norm"), [({}, 1.0), ({"max_grad_norm": 0.3}, 0.3)])
def test_a_trainer_clips_by_default(written: Written, norm: float) -> None:
    """A Trainer clips to 1 where nothing is said: without it the migrated run's steps would be larger."""
    assert run_of({"fsdp": "full_shard", **written}).max_grad_norm == norm


@pytest.mark.parametrize("norm", [0, 0.0, None, -1])
def test_no_clipping_is_not_clipping_to_nothing(norm: object) -> None:
    """The report would tell the user to clip to a norm of 0, with which nothing trains."""
    text = yaml.safe_dump({"fsdp": "full_shard", "max_grad_norm": norm})
    assert "(gradient clipping)" not in [each.name for each in migrate_text(text).sections[0].findings]


BESIDE_SHARDING: dict[str, Any] = {
    "max_grad_norm": 1.0,
    "async_save": True,
    "save_only_model": True,
    "selective_checkpointing": "2",
    "compile": True,
    "freeze": ("vision",),
    "tiled_chunks": 4,
    "idle_experts": IdleExperts.IN_ORDER,
    "pipeline_parallel": 2,
    "expert_parallel": 2,
    "context_parallel_degree": 2,
    "tensor_parallel": 2,
}


@pytest.mark.parametrize("name", BESIDE_SHARDING)
def test_what_accelerates_file_cannot_say_is_a_finding(name: str) -> None:
    """A ROLL or TorchTitan run would lose its clipping or its frozen tower on the way to accelerate, unsaid."""
    wrap = Wrap(kind=WrapKind.CLASSES)
    run = run_with(wrap, **{name: BESIDE_SHARDING[name]})
    more = set(DIALECT.express(run).findings) - set(DIALECT.express(run_with(wrap)).findings)
    assert [each.outcome for each in more] != []
    assert all(each.outcome is not Outcome.EXACT for each in more)
    decisions = (
        "freeze",
        "tiled_chunks",
        "idle_experts",
        "context_parallel_degree",
        *(each for each in BESIDE_SHARDING if each.endswith("_parallel")),
    )
    assert any(each.outcome.blocks for each in more) == (name in decisions)


def test_a_trainers_file_says_which_release_its_new_words_are_for() -> None:
    """Under transformers 4.51.3 it trains with FSDP1 as before, and nobody had said so."""
    (section,) = migrate_text(yaml.safe_dump({"fsdp": "full_shard auto_wrap"}), to="accelerate").sections
    (found,) = [each for each in section.findings if each.name == "(version)"]
    assert found.outcome is Outcome.APPROXIMATE
    assert "4.51.3" in found.reason and "fsdp_version: 2" in found.hint
    new = migrate_text(yaml.safe_dump({"fsdp": "full_shard auto_wrap"}), to="accelerate").after
    again = [each.name for each in migrate_text(new, to="accelerate").sections[0].findings]
    assert "(version)" not in again and "fsdp_config.version" in again


# ---------------------------------------------------------------------------------------------------------------------
# What a report says that a key became


def test_keys_that_ask_for_nothing_become_nothing() -> None:
    """The report would say that use_orig_params became gradient_sync, and fp16: false a precision of bfloat16."""
    written = {
        "fsdp": "full_shard auto_wrap",
        "bf16": True,
        "fp16": False,
        "gradient_accumulation_steps": 4,
        "fsdp_config": {
            "use_orig_params": True,
            "limit_all_gathers": True,
            "forward_prefetch": False,
            "cpu_ram_efficient_loading": False,
            "fsdp_offload_params": True,
        },
    }
    (section,) = migrate_text(yaml.safe_dump(written), to="composer").sections
    became = {each.key: each.target for each in section.findings}
    assert {key: became[key] for key in became if key.startswith("fsdp_config.") or key == "fp16"} == {
        "fp16": "",
        **{f"fsdp_config.{name}": "" for name in written["fsdp_config"]},
    }
    assert became["bf16"] == "precision: amp_bf16, mixed_precision: PURE"


def test_each_prefetch_becomes_its_own_word() -> None:
    """The report would say of forward_prefetch that it became backward_prefetch."""
    text = yaml.safe_dump(
        {"fsdp": "full_shard", "fsdp_config": {"forward_prefetch": True, "backward_prefetch": "NO_PREFETCH"}}
    )
    became = {each.key: each.target for each in migrate_text(text, to="composer").sections[0].findings}
    assert became["fsdp_config.forward_prefetch"] == "forward_prefetch: true"
    assert became["fsdp_config.backward_prefetch"] == "backward_prefetch: NONE"


# ---------------------------------------------------------------------------------------------------------------------
# Switches in quotes

SWITCHES = sorted(
    row.name
    for row in DIALECT.rows
    if row.takes.choices == (True, False) and row.takes.fits("true", Reader.TRAINER_FSDP1) and "xla" not in row.name
)
LOADING = ("cpu_ram_efficient_loading", "sync_module_states")


@pytest.mark.parametrize("name", SWITCHES)
@pytest.mark.parametrize("text", ["true", "false", "False", "on", "off", "0"])
@pytest.mark.parametrize("system", ["trainer", "accelerate", "accelerate, FSDP2"])
def test_a_switch_in_quotes_gets_the_finding_of_what_it_did(system: str, name: str, text: str) -> None:
    """The report would say that units are asked for ahead, and the run that was read ask for none."""

    def with_value(value: object) -> Written:
        if system == "trainer":
            return {"fsdp": "full_shard auto_wrap", "fsdp_config": {name: value}}
        version = {"fsdp_version": 2} if "2" in system else {}
        file = accelerate_file(auto_wrap_policy="TRANSFORMER_BASED_WRAP")
        return file | {"fsdp_config": file["fsdp_config"] | version | {f"fsdp_{name}": value}}

    key = f"fsdp_config.{name if system == 'trainer' else f'fsdp_{name}'}"
    meant = text in ("true", "on")
    written, plain = finding(with_value(text), key), finding(with_value(meant), key)
    is_taken_for_true = (read(with_value(text)).run, meant) == (read(with_value(True)).run, False)
    if read(with_value(text)).run == read(with_value(meant)).run:
        assert (written.outcome, written.target, written.reason) == (plain.outcome, plain.target, plain.reason)
    elif name in LOADING:
        assert not written.outcome.blocks or "in quotes" in written.reason or plain.outcome.blocks
    else:
        assert is_taken_for_true and written.outcome is Outcome.NEEDS_DECISION
        assert "as trained: true" in written.hint and "as written: false" in written.hint


def test_xla_in_quotes_was_on() -> None:
    """The run was torch_xla's, whose sharding is another; read as off it would be called the same as FSDP2."""
    written = {"fsdp": "full_shard", "fsdp_config": {"xla": "false"}}
    assert read(written).run is None
    assert finding(written, "fsdp_config.xla").outcome is Outcome.NEEDS_DECISION
    assert not finding({"fsdp": "full_shard", "fsdp_config": {"xla": False}}, "fsdp_config.xla").outcome.blocks


def test_a_forward_prefetch_that_is_off_asks_for_nothing() -> None:
    """Both said: a report in which a key is on and the run that it is for is not."""
    off = finding({"fsdp": "full_shard", "fsdp_config": {"forward_prefetch": "false"}}, "fsdp_config.forward_prefetch")
    assert "off" in off.reason and not off.target
    assert "off" in finding({"fsdp": "full_shard", "bf16": False}, "bf16").reason


def test_words_that_are_a_number_are_refused() -> None:
    """The Trainer takes a string, a list or a flag; anything else it fails on, and so is not read as off."""
    written = {"fsdp": 3}
    assert read(written).run is None
    assert finding(written, "fsdp").outcome.blocks


def test_the_launchers_numbers_and_its_empty_values() -> None:
    """``accelerate launch`` takes a prefetch by its number in an enumeration, and no precision as none."""

    def prefetching(value: object) -> tuple[Outcome, str]:
        written = finding(accelerate_file(backward_prefetch=value), "fsdp_config.fsdp_backward_prefetch")
        return written.outcome, written.reason

    assert prefetching(1) == prefetching("BACKWARD_PRE") != prefetching(2) == prefetching("BACKWARD_POST")
    plain = accelerate_file()
    assert run_of(plain | {"mixed_precision": None}) == run_of(plain | {"mixed_precision": "no"})


def test_values_of_rank_0_go_out_where_the_launcher_corrects_the_file() -> None:
    """In quotes the launcher's check passes, and its plugin sends the values all the same."""
    written = accelerate_file(sync_module_states="false", cpu_ram_efficient_loading=True)
    assert run_of(written).config.sync_module_states is True
    assert "set it to true" in finding(written, "fsdp_config.fsdp_sync_module_states").reason
    refused = accelerate_file(sync_module_states=False, cpu_ram_efficient_loading="false")
    assert read(refused).run is None
    assert "in quotes" in finding(refused, "fsdp_config.fsdp_sync_module_states").reason


# ---------------------------------------------------------------------------------------------------------------------
# A Trainer's arguments for FSDP2 (transformers 5 is not here to be asked)


def test_a_trainer_of_transformers_5_reads_prefixes_and_words_of_its_own() -> None:
    """Taken for FSDP1's, half of the keys would be called without effect."""
    written = {
        "fsdp": True,
        "fsdp_config": {
            "fsdp_version": 2,
            "fsdp_reshard_after_forward": False,
            "cpu_offload": True,
            "transformer_layer_cls_to_wrap": ["Block"],
        },
    }
    run = run_of(written)
    assert run.config.reshard_after_forward is False
    assert run.config.cpu_offload
    assert run.wrap == Wrap(kind=WrapKind.CLASSES, classes=("Block",))
    assert run.config.prefetch == Prefetch()
    assert finding(written, "fsdp_config.fsdp_version").outcome is Outcome.APPROXIMATE
    assert "4.51.3" in finding(written, "fsdp_config.fsdp_version").reason
    assert migrated(written) == written


def test_a_strategy_of_fsdp1_beside_version_2_is_a_decision() -> None:
    """Transformers 5 stops at it."""
    written = {"fsdp": "hybrid_shard", "fsdp_config": {"version": 2}}
    assert read(written).run is None
    assert finding(written, "fsdp").outcome is Outcome.NEEDS_DECISION


# ---------------------------------------------------------------------------------------------------------------------
# What turns FSDP off


@pytest.mark.parametrize(
    "written",
    [
        {"fsdp": "", "fsdp_config": {"min_num_params": 1}},
        {"fsdp_config": {"fsdp_min_num_params": 1}},
        {"distributed_type": "MULTI_GPU", "fsdp_config": {"fsdp_sharding_strategy": 1}},
    ],
)
def test_settings_without_fsdp_are_a_decision(written: Written) -> None:
    """The run was not sharded at all; a migrated one would be."""
    assert DIALECT.sections(written) == [()]
    reading = read(written)
    assert reading.run is None
    assert [each for each in reading.findings if "as trained" in each.reason and "as written" in each.reason]


def test_fp8_goes_by_bfloat16() -> None:
    """FSDP knows no fp8; the run's own library for it must be looked at."""
    written = accelerate_file() | {"mixed_precision": "fp8"}
    assert run_of(written).config.mixed_precision.param_dtype == "bfloat16"
    assert run_of(written).precision == "amp_fp8"
    assert finding(written, "mixed_precision").outcome is Outcome.APPROXIMATE


def test_the_table_has_a_reason_for_every_key_and_a_default_for_every_reader() -> None:
    """The documentation is made from it: an empty cell would be one there."""
    names = [DIALECT.places(row)[0] for row in DIALECT.rows]
    assert len(names) == len(set(names))
    for row in DIALECT.rows:
        assert row.meaning
        assert row.outcome.blocks or row.reason or row.target, row.name
        has_all = set(row.read_by) <= row.defaults.keys()
        assert not row.defaults or has_all or row.name == "sharding_strategy", row.name


def test_of_a_key_said_twice_the_last_holds() -> None:
    """With and without its prefix it is one key to accelerate: the earlier word is lost in silence."""
    written = accelerate_file(sharding_strategy="SHARD_GRAD_OP")
    written["fsdp_config"] = {"sharding_strategy": "FULL_SHARD", **written["fsdp_config"]}
    assert run_of(written).config.reshard_after_forward is False
    lost = finding(written, "fsdp_config.sharding_strategy")
    assert lost.outcome is Outcome.NEEDS_DECISION
    assert "fsdp_config.fsdp_sharding_strategy says it again" in lost.reason
    assert migrated(written)["fsdp_config"] == {
        "fsdp_version": 2,
        "fsdp_reshard_after_forward": False,
        "fsdp_state_dict_type": "FULL_STATE_DICT",
    }
