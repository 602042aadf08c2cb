"""ROLL's words: what its FSDP2 did with them, and the same run in them.

ROLL is not installed here. Expectations come from its sources of 2026-08 (``fsdp2_strategy.py``: mesh, dtypes, what
training and inference do; ``fsdp_utils.py``: which modules become units) and, for the examples, from its FSDP2 guide,
without the guide's errors (wrap_embeddings, the missing expert-parallel keys, torch versions).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from support.examples import examples
from support.runs import run_with

from composer_fsdp2.config.findings import Finding, Outcome
from composer_fsdp2.config.mesh import GroupRule, MeshSpec, RankGroups
from composer_fsdp2.config.parallel import IdleExperts, TiledMLP
from composer_fsdp2.config.rows import Row
from composer_fsdp2.config.sharding import (
    Accumulation,
    ActivationCheckpointing,
    GradientDtype,
    GradientSync,
    MixedPrecision,
    Prefetch,
)
from composer_fsdp2.migration.dialect import Reading, Section
from composer_fsdp2.migration.dialects import DIALECTS
from composer_fsdp2.migration.dialects.roll import RollDialect
from composer_fsdp2.migration.migrate import migrate_text
from composer_fsdp2.migration.run import RunConfig, Wrap, WrapKind

ROLL = RollDialect()
NUM_RANKS = 24

# The guide's training example, shortened, with a second worker and one of another strategy.
FILE = """\
max_grad_norm: 0.5
actor_train:
  model_args:
    disable_gradient_checkpointing: false
    dtype: bf16
  strategy_args:
    strategy_name: fsdp2_train   # trains
    strategy_config:
      fsdp_size: 8
      param_dtype: bf16
      reduce_dtype: float32
      reshard_after_forward: true
      offload_policy: false
  device_mapping: list(range(0,16))
actor_infer:
  strategy_args:
    strategy_name: vllm
    strategy_config: {gpu_memory_utilization: 0.8}
reference:
  strategy_args:
    strategy_name: fsdp2_infer
    strategy_config: ~
  device_mapping: [0, 1, 2, 3]
"""


def read(config: dict[str, Any], *, strategy: str = "fsdp2_train", ranks: int | None = None, **worker: Any) -> Reading:
    """Of a worker with this strategy_config."""
    if ranks is not None:
        worker["device_mapping"] = list(range(ranks))
    strategy_args = {"strategy_name": strategy, "strategy_config": config}
    values = {"actor_train": {"strategy_args": strategy_args, **worker}}
    (path,) = ROLL.sections(values)
    return ROLL.read(Section(path=path, given=config, around=values))


def run_of(config: dict[str, Any], **worker: Any) -> RunConfig:
    run = read(config, **worker).run
    assert run is not None
    return run


def finding(reading: Reading, key: str) -> Finding:
    (found,) = [each for each in reading.findings if each.name == key]
    return found


def outcome(reading: Reading, key: str) -> Outcome:
    return finding(reading, key).outcome


# --- sections


def test_each_fsdp2_worker_is_a_section():
    """A reward model or reference keeps its own settings instead of getting the actor's; vLLM's are left alone."""
    assert ROLL.sections(yaml.safe_load(FILE)) == [
        ("actor_train", "strategy_args", "strategy_config"),
        ("reference", "strategy_args"),  # it has no strategy_config
    ]


def test_workers_in_lists_are_found():
    """RLVR files hold rewards and teachers in lists and deeper mappings."""
    values = {"teachers": [{"strategy_args": {"strategy_name": "fsdp2_infer", "strategy_config": {"fsdp_size": 2}}}]}
    assert ROLL.sections(values) == [("teachers", 0, "strategy_args", "strategy_config")]


def test_files_of_other_systems_have_no_section():
    """A Composer file is not taken for a ROLL file, nor one of ROLL with DeepSpeed or Megatron."""
    assert ROLL.sections({"fsdp_config": {"sharding_strategy": "FULL_SHARD"}}) == []
    assert ROLL.sections({"a": {"strategy_args": {"strategy_name": "megatron_train", "strategy_config": {}}}}) == []


def test_a_file_is_migrated_without_a_change():
    """ROLL's words are FSDP2's already, so its file stays what it is, byte for byte, and is reported."""
    migration = migrate_text(FILE, "run.yaml", to="roll", dialect="roll")
    assert not migration.is_changed and migration.exit_code == 0
    actor, reference = migration.sections
    lines = {each.key: each.where for each in actor.findings}
    assert lines["fsdp_size"] == "run.yaml:9" and lines["offload_policy"] == "run.yaml:13"
    assert lines["strategy_name"] == "run.yaml:7" and lines["device_mapping"] == "run.yaml:14"
    assert lines["model_args.dtype"] == "run.yaml:5"  # beside the section
    assert reference.place == "reference.strategy_args"


# --- mesh


def test_the_guides_meshes():
    """The three meshes that ROLL's guide shows: 16 of 16 ranks, 8 of 16, 4 of 8."""
    assert run_of({"fsdp_size": 16}, ranks=16).config.mesh.resolve(16).shape == (16,)
    assert run_of({"fsdp_size": 8}, ranks=16).config.mesh.resolve(16).shape == (2, 8)
    assert run_of({"fsdp_size": 4}, ranks=8).config.mesh.resolve(8).shape == (2, 4)


@examples(100)
@given(st.integers(-2, 70), st.integers(1, 64))
def test_the_mesh_is_rolls(size: int, ranks: int):
    """A run with replicas stays one, a run over all ranks too, and a division that fails is named with its way out."""
    reading = read({"fsdp_size": size}, ranks=ranks)
    if size <= 1 or size >= ranks:
        expected = (ranks,)
    elif ranks % size == 0:
        expected = (ranks // size, size)
    else:
        assert reading.run is None
        assert str(ranks) in finding(reading, "fsdp_size").reason
        return
    assert reading.run is not None
    assert reading.run.config.mesh.resolve(ranks).shape == expected
    assert outcome(reading, "fsdp_size") is Outcome.EXACT


@pytest.mark.parametrize(
    ("mapping", "ranks"),
    [
        ("list(range(0,16))", 16),
        ("list(range(0, 8)) + list(range(16, 24))", 16),
        ("list(range(0, 16, 2))", 8),
        ("[0, 1, 2, 3]", 4),
        ([0, 1, 2], 3),
        ("list(range(0, ${num_gpus}))", None),
        ("__import__('os').getcwd()", None),
        ("range(", None),
        (None, None),
        (7, None),
    ],
)
def test_device_mapping_says_how_many_ranks(mapping: object, ranks: int | None):
    """Without the number of ranks, fsdp_size does not tell replicas from full sharding; code in it is never run."""
    reading = read({"fsdp_size": 4}, device_mapping=mapping)
    assert outcome(reading, "device_mapping") is (Outcome.APPROXIMATE if ranks is None else Outcome.EXACT)
    if ranks is None:
        assert outcome(reading, "fsdp_size") is Outcome.APPROXIMATE
    elif ranks % 4:
        assert reading.run is not None or ranks > 4
    else:
        assert reading.run is not None and reading.run.config.mesh.resolve(ranks).size == ranks


# --- effective behaviour


def test_defaults_are_rolls():
    """An empty strategy_config trains in bf16 with fp32 reduction, recomputes, broadcasts rank 0 and saves in turn."""
    run = run_of({}, ranks=4)
    config = run.config
    assert config.mixed_precision == MixedPrecision(
        param_dtype="bfloat16", reduce_dtype="float32", cast_root_inputs=False
    )
    assert run.precision == "amp_bf16"  # a step runs under torch.autocast
    assert config.reshard_after_forward is True and not config.cpu_offload
    assert config.activation_checkpointing == ActivationCheckpointing(checkpoint=True, classes=(), reentrant=False)
    assert config.accumulation.gradient_sync is GradientSync.EVERY
    assert config.sync_module_states is True
    assert run.wrap == Wrap(kind=WrapKind.CLASSES, embeddings=True)
    assert run.state_dict_type == "sharded" and run.async_save


@pytest.mark.parametrize(
    ("config", "param_dtype", "reduce_dtype", "precision"),
    [
        ({"param_dtype": "fp16"}, "float16", "float32", "amp_fp16"),
        ({"param_dtype": "BF16", "reduce_dtype": "bfloat16"}, "bfloat16", "bfloat16", "amp_bf16"),
        ({"param_dtype": "float"}, "float32", "float32", "fp32"),
        ({"param_dtype": "half", "reduce_dtype": None}, "float16", "float32", "amp_fp16"),
        ({"enable_mix_precision": False}, "bfloat16", "bfloat16", "amp_bf16"),
        ({"enable_mix_precision": False, "reduce_dtype": "fp32"}, "bfloat16", "float32", "amp_bf16"),
    ],
)
def test_dtypes(config: dict[str, Any], param_dtype: str, reduce_dtype: str, precision: str):
    """Gradients are summed in the dtype that ROLL summed them in, by whichever of its words."""
    run = run_of(config)
    assert run.config.mixed_precision.param_dtype == param_dtype
    assert run.config.mixed_precision.reduce_dtype == reduce_dtype
    assert run.precision == precision


def test_inference_makes_no_gradients():
    """What is about gradients is unneeded for a reference model, and its activations are not recomputed."""
    reading = read(
        {"reduce_dtype": "fp32", "reduce_scatter_during_grad_accumulation": False},
        strategy="fsdp2_infer",
        model_args={"disable_gradient_checkpointing": False},
    )
    for key in (
        "reduce_dtype",
        "reduce_scatter_during_grad_accumulation",
        "model_args.disable_gradient_checkpointing",
    ):
        assert outcome(reading, key) is Outcome.UNNEEDED
    assert reading.run is not None
    assert not reading.run.config.activation_checkpointing.checkpoint
    assert reading.run.config.accumulation.gradient_sync is GradientSync.EVERY


def test_accumulation_without_communication():
    """Gradients that were reduced in the last microbatch only still are, at the same cost in memory."""
    run = run_of({"reduce_scatter_during_grad_accumulation": False})
    assert run.config.accumulation == Accumulation(gradient_sync=GradientSync.LAST)


@pytest.mark.parametrize(
    ("model_args", "config", "expected"),
    [
        ({"disable_gradient_checkpointing": True}, {}, (False, None)),
        ({"gradient_checkpointing_use_reentrant": True}, {}, (True, True)),
        ({}, {"wrap_policy": {"moe_experts": "Qwen3MoeMLP"}, "apply_expert_patch": True}, (True, True)),
        ({"gradient_checkpointing_use_reentrant": False}, {"ep_size": 2}, (True, False)),
    ],
)
def test_recomputing_is_on_unless_disabled(
    model_args: dict[str, Any], config: dict[str, Any], expected: tuple[bool, bool | None]
):
    """Memory stays what it was: ROLL recomputes without being told, and reenters for mixtures of experts."""
    checkpointing = run_of(config, model_args=model_args).config.activation_checkpointing
    assert (checkpointing.checkpoint, checkpointing.reentrant if checkpointing.checkpoint else None) == expected


def test_unsaid_reshard_tells_of_torch_2_7():
    """ROLL gives fully_shard a None where nothing is said, which torch 2.7 refuses, against ROLL's guide."""
    for config, key in (({}, "(implicit) reshard_after_forward"), ({"reshard_after_forward": None},) * 2):
        key = key if isinstance(key, str) else "reshard_after_forward"
        found = finding(read(config), key)
        assert found.outcome is Outcome.EXACT and "2.7" in found.hint
    assert run_of({"reshard_after_forward": False}).config.reshard_after_forward is False
    assert run_of({"reshard_after_forward": 4, "fsdp_size": 8}, ranks=16).config.reshard_after_forward == 4


@pytest.mark.parametrize(("size", "ranks", "group"), [(8, 16, 3), (1, 6, 4), (8, None, 5)])
def test_a_reshard_group_must_divide_the_shards(size: int, ranks: int | None, group: int):
    """torch refuses such a number when training starts; here the file's report does, with those that would do."""
    reading = read({"fsdp_size": size, "reshard_after_forward": group}, ranks=ranks)
    assert reading.run is None
    found = finding(reading, "reshard_after_forward")
    assert found.outcome is Outcome.NEEDS_DECISION and "use 1 or 2" in found.reason


def test_offload_takes_any_text_for_true():
    """`offload_policy: "false"` offloaded the run, which nobody wanted: as trained or as written is the user's call."""
    reading = read({"offload_policy": "false"})
    found = finding(reading, "offload_policy")
    assert found.outcome is Outcome.NEEDS_DECISION
    assert "as trained: true" in found.hint and "as written: false" in found.hint
    assert run_of({"offload_policy": True}).config.cpu_offload
    assert run_of({"offload_policy": {"pin_memory": True}}).config.cpu_offload
    assert not run_of({"offload_policy": None}).config.cpu_offload


# --- units


def test_wrapped_classes():
    """The same modules become units."""
    policy = {"transformer_layer_cls_to_wrap": "LlamaDecoderLayer", "wrap_embeddings": True, "wrap_lm_output": True}
    assert run_of({"wrap_policy": policy}).wrap == Wrap(
        kind=WrapKind.CLASSES,
        classes=("LlamaDecoderLayer",),
        embeddings=True,
        output=True,
    )


def test_experts_are_wrapped_with_the_patch_only():
    """Without the patch ROLL left experts in their layer; a migration that wrapped them would hang."""
    policy = {"wrap_policy": {"moe_experts": ["Qwen3MoeMLP"]}}
    alone = read(policy)
    assert outcome(alone, "wrap_policy.moe_experts") is Outcome.UNNEEDED
    assert alone.run is not None and alone.run.wrap.experts == ()
    patched = read(policy | {"apply_expert_patch": True})
    assert patched.run is not None and patched.run.wrap.experts == ("Qwen3MoeMLP",)
    assert patched.run.config.idle_experts is IdleExperts.IN_ORDER
    assert outcome(patched, "apply_expert_patch") is Outcome.EXACT
    without = read({"apply_expert_patch": True})
    assert without.run is not None and without.run.config.idle_experts is None
    assert outcome(without, "apply_expert_patch") is Outcome.UNNEEDED


def test_embeddings_are_wrapped_against_the_guide():
    """The guide's `wrap_embeddings` (default: false) says that they are not; untied ones are."""
    for config in ({}, {"wrap_policy": {"wrap_embeddings": False}}):
        (found,) = [each for each in read(config).findings if each.key.endswith("wrap_embeddings")]
        assert found.outcome is Outcome.EXACT and "not tied" in found.reason
        assert run_of(config).wrap.embeddings


def test_frozen_prefixes_have_commas_between_them():
    """ROLL's own help says so; as one name they would match no parameter, and everything would be trained."""
    expected = ("model.visual", "lm_head")
    for written in ("model.visual,lm_head", ["model.visual", "lm_head"], "model.visual.,lm_head."):
        assert run_of({}, model_args={"freeze_module_prefix": written}).config.freeze == expected


@pytest.mark.parametrize(
    ("prefix", "expected"),
    [
        ("model.layers.1", Outcome.NEEDS_DECISION),  # of layers.10 as well
        ("model.embed,model.layers.1", Outcome.NEEDS_DECISION),
        ("model.visual, lm_head.", Outcome.NEEDS_DECISION),  # " lm_head." begins no name
        ("lm_head.,", Outcome.NEEDS_DECISION),  # an empty prefix begins each
        ("", Outcome.NEEDS_DECISION),
        ("model.embed", Outcome.APPROXIMATE),  # of embed_tokens as well
        ("model.layers.1.,model.visual.", Outcome.EXACT),
    ],
)
def test_a_prefix_freezes_no_fewer_parameters_than_roll_did(prefix: str, expected: Outcome):
    """ROLL compares the beginnings of names, and layers.10 would be trained that was frozen beside layers.1."""
    migration = migrate_text(shape(f"{{freeze_module_prefix: '{prefix}'}}"), "run.yaml")
    findings = [each for each in migration.sections[0].findings if "freeze" in each.key]
    assert [each.outcome for each in findings] == [expected], findings
    assert migration.exit_code == expected.blocks


# --- what FSDP2 alone cannot do


@pytest.mark.parametrize(
    ("config", "model_args", "key", "expected"),
    [
        ({"fsdp_size": 4}, {"ulysses_size": 2}, "model_args.ulysses_size", Outcome.EXACT),
        ({"fsdp_size": 1}, {"ulysses_size": 2}, "model_args.ulysses_size", Outcome.NEEDS_DECISION),  # ROLL fails
        ({}, {"ulysses_size": 2}, "model_args.ulysses_size", Outcome.APPROXIMATE),
        ({"ep_size": 2}, {}, "ep_size", Outcome.APPROXIMATE),
        ({"ep_size": 2, "efsdp_size": 4}, {}, "efsdp_size", Outcome.APPROXIMATE),
        ({"efsdp_size": 4}, {}, "efsdp_size", Outcome.UNNEEDED),
        ({"apply_tiled_mlp": True}, {}, "apply_tiled_mlp", Outcome.APPROXIMATE),
        ({"apply_tiled_mlp": True, "tiled_num_shards": 8}, {}, "tiled_num_shards", Outcome.APPROXIMATE),
        ({"apply_tiled_mlp": True, "model_type": "qwen3"}, {}, "apply_tiled_mlp", Outcome.EXACT),
        ({"tiled_num_shards": 8}, {}, "tiled_num_shards", Outcome.UNNEEDED),
        ({"model_type": "qwen3"}, {}, "model_type", Outcome.UNNEEDED),
        ({"moe_use_grouped_mm": True}, {}, "moe_use_grouped_mm", Outcome.APPROXIMATE),
        ({}, {"freeze_module_prefix": "vision_model."}, "model_args.freeze_module_prefix", Outcome.EXACT),
        ({}, {"lora_target": "all"}, "model_args.lora_target", Outcome.APPROXIMATE),
        ({"save_only_model": True}, {}, "save_only_model", Outcome.APPROXIMATE),
        ({"fused_optimizer": True}, {}, "fused_optimizer", Outcome.APPROXIMATE),
    ],
)
def test_what_is_more_than_sharding(config: dict[str, Any], model_args: dict[str, Any], key: str, expected: Outcome):
    """None of it is dropped in silence, and keys that were not read are said to have done nothing."""
    found = finding(read(config, model_args=model_args), key)
    assert found.outcome is expected and found.reason
    if expected.blocks and key != "efsdp_size":
        assert found.hint, "a user needs to know what to do about it"


@pytest.mark.parametrize("row", [row for row in ROLL.rows if row.neutral], ids=lambda row: row.name)
def test_values_that_ask_for_nothing_stand_in_no_ones_way(row: Any):
    """A file that spells out that a feature is off migrates without a question."""
    head, _, name = row.name.rpartition(".")
    config = {name: row.neutral[0]} if not head else {"wrap_policy": {name: row.neutral[0]}}
    worker = {"model_args": {name: row.neutral[0]}} if head == "model_args" else {}
    assert outcome(read({} if worker else config, **worker), row.name) is Outcome.UNNEEDED


# --- bad keys and values


@pytest.mark.parametrize(
    ("config", "key", "expected", "near"),
    [
        ({"fsdp_sise": 4}, "fsdp_sise", Outcome.NEEDS_DECISION, "fsdp_size"),
        (
            {"wrap_policy": {"wrap_embedings": True}},
            "wrap_policy.wrap_embedings",
            Outcome.NEEDS_DECISION,
            "wrap_policy.wrap_embeddings",
        ),
        ({"cp_size": 2}, "cp_size", Outcome.NEEDS_DECISION, "model_args.ulysses_size"),  # not ep_size
        ({"use_batched_model_update": False}, "use_batched_model_update", Outcome.UNNEEDED, "remove it"),
    ],
)
def test_unknown_keys_are_named(config: dict[str, Any], key: str, expected: Outcome, near: str):
    """ROLL takes any key in silence: a misspelt one trained with the default, and one like no other did nothing."""
    found = finding(read(config), key)
    assert found.outcome is expected and near in found.hint


@pytest.mark.parametrize(
    ("config", "key"),
    [
        ({"fsdp_size": "16"}, "fsdp_size"),
        ({"fsdp_size": True}, "fsdp_size"),
        ({"fsdp_size": "${oc.env:SIZE}"}, "fsdp_size"),
        ({"param_dtype": "bf17"}, "param_dtype"),
        ({"reduce_dtype": 32}, "reduce_dtype"),
        ({"reshard_after_forward": "yes"}, "reshard_after_forward"),
        ({"reshard_after_forward": 0}, "reshard_after_forward"),
        ({"wrap_policy": "Layer"}, "wrap_policy"),
        ({"wrap_policy": {"transformer_layer_cls_to_wrap": None}}, "wrap_policy.transformer_layer_cls_to_wrap"),
        ({"wrap_policy": {"transformer_layer_cls_to_wrap": []}}, "wrap_policy.transformer_layer_cls_to_wrap"),
        ({"ep_size": 0}, "ep_size"),
        ({"async_save_ckpt": "no"}, "async_save_ckpt"),
    ],
)
def test_bad_values_are_a_decision(config: dict[str, Any], key: str):
    """A value that ROLL fails with is named with those that would do; nothing is guessed from it."""
    reading = read(config, ranks=16)
    found = finding(reading, key)
    assert found.outcome is Outcome.NEEDS_DECISION and "takes" in found.reason
    assert reading.run is None


VALUES = (
    st.none() | st.booleans() | st.integers(-3, 20) | st.text(max_size=4) | st.lists(st.text(max_size=3), max_size=2)
)
KEYS = st.sampled_from([row.name for row in ROLL.rows if "." not in row.name and row.name != "strategy_name"])
WRAP_KEYS = st.sampled_from(
    ["transformer_layer_cls_to_wrap", "wrap_embeddings", "wrap_lm_output", "moe_experts", "experts"]
)


@examples(100)
@given(
    st.dictionaries(KEYS | st.text(min_size=1, max_size=6), VALUES),
    st.none() | st.dictionaries(WRAP_KEYS, VALUES),
    st.sampled_from(["fsdp2_train", "fsdp2_infer"]),
    st.none() | st.integers(1, 9),
)
def test_every_key_has_exactly_one_finding(
    config: dict[str, Any], wrap: dict[str, Any] | None, strategy: str, ranks: int | None
):
    """Whatever a file says, no key is lost and none is an error; a run is there unless a finding says why not."""
    if wrap is not None:
        config = config | {"wrap_policy": wrap}
    reading = read(config, strategy=strategy, ranks=ranks)
    flat = [
        f"{key}.{name}" if name else key
        for key, value in config.items()
        for name in (value if key == "wrap_policy" and isinstance(value, dict) and value else [""])
    ]
    keys = [each.name for each in reading.findings]
    assert all(keys.count(key) == 1 for key in flat)
    assert len(keys) == len(set(keys))
    if reading.run is None:
        assert any(each.outcome is Outcome.NEEDS_DECISION for each in reading.findings)


# --- as a target


def entries(run: RunConfig) -> dict[str, Any]:
    return {setting.key: setting.value for setting in ROLL.express(run).settings}


def test_a_run_in_rolls_words():
    """HSDP of 8 ranks a replica in bf16 is what ROLL's guide writes for it."""
    run = run_with(
        mesh=MeshSpec.of_degrees(shard=8, replicate=-1),
        param_dtype="bfloat16",
        reduce_dtype="float32",
        cast_root_inputs=False,
        activation_checkpointing=ActivationCheckpointing(checkpoint=True, classes=(), reentrant=False),
        sync_module_states=True,
        precision="amp_bf16",
        wrap=Wrap(kind=WrapKind.CLASSES, classes=("Qwen3DecoderLayer",)),
        state_dict_type="sharded",
        async_save=True,
        max_grad_norm=1.0,
        stored_dtype="float32",
    )
    assert all(finding.outcome is Outcome.EXACT for finding in ROLL.express(run).findings)
    assert entries(run) == {
        "fsdp_size": 8,
        "param_dtype": "bf16",
        "reduce_dtype": "fp32",
        "reshard_after_forward": True,
        "offload_policy": False,
        "wrap_policy": {"transformer_layer_cls_to_wrap": ["Qwen3DecoderLayer"]},
        "async_save_ckpt": True,
    }


@pytest.mark.parametrize(
    ("mesh", "expected"),
    [
        (MeshSpec.of_degrees(shard=1, replicate=-1), Outcome.UNSUPPORTED),
        (MeshSpec.of_degrees(shard=-1, replicate=2), Outcome.NEEDS_DECISION),
        (MeshSpec.of_groups(RankGroups(rule=GroupRule.CONSECUTIVE, number=4)), Outcome.UNSUPPORTED),
    ],
)
def test_meshes_that_roll_has_not(mesh: MeshSpec, expected: Outcome):
    """NO_SHARD would silently become full sharding, since fsdp_size 1 is all ranks to ROLL."""
    found = [each for each in ROLL.express(run_with(mesh=mesh)).findings if each.name == "(mesh)"]
    assert [each.outcome for each in found] == [expected]


@pytest.mark.parametrize(
    ("run", "key"),
    [
        (run_with(), "(units)"),
        (run_with(wrap=Wrap(kind=WrapKind.SIZE, min_num_params=10)), "(units)"),
        (run_with(buffer_dtype="bfloat16"), "(buffer_dtype)"),
        (run_with(prefetch=Prefetch(forward=2)), "(prefetch in forward)"),
        (run_with(collective_guard=9.0), "(collective_guard)"),
        (run_with(accumulation=Accumulation(reshard_after_backward=False)), "(reshard_after_backward)"),
        (run_with(activation_checkpointing=ActivationCheckpointing(cpu_offload=True)), "(activation offloading)"),
        (run_with(context_parallel_degree=2), "(context parallelism)"),
        (run_with(tensor_parallel=2), "(tensor parallelism)"),
        (run_with(max_grad_norm=0.5), "(gradient clipping)"),
    ],
)
def test_what_roll_cannot_say_is_a_finding(run: RunConfig, key: str):
    """Nothing of a run is lost on the way to ROLL without a word."""
    assert key in {each.name for each in ROLL.express(run).findings}


MESHES = [
    MeshSpec(),
    MeshSpec.of_degrees(shard=8, replicate=-1),
    MeshSpec.of_degrees(shard=12, replicate=2),
    MeshSpec.of_degrees(shard=24),
]
DTYPE = st.sampled_from([None, "bfloat16", "float16", "float32"])
LAYERS = Wrap(kind=WrapKind.CLASSES, classes=("Layer",), embeddings=True)
RUNS = st.builds(
    run_with,
    wrap=st.just(LAYERS),
    mesh=st.sampled_from([*MESHES, MeshSpec.of_degrees(shard=-1, replicate=2)]),
    reshard_after_forward=st.sampled_from([True, False, 2, 4]),
    param_dtype=DTYPE,
    reduce_dtype=DTYPE,
    cast_forward_inputs=st.booleans(),
    cast_root_inputs=st.booleans(),
    buffer_dtype=st.sampled_from([None, None, "bfloat16"]),
    gradients=st.sampled_from(GradientDtype),
    cpu_offload=st.booleans(),
    activation_checkpointing=st.builds(
        ActivationCheckpointing,
        checkpoint=st.booleans(),
        classes=st.sampled_from([(), ("Layer",)]),
        reentrant=st.booleans(),
        cpu_offload=st.booleans(),
    ),
    prefetch=st.builds(Prefetch, forward=st.sampled_from([None, 1]), backward=st.sampled_from([None, 0])),
    accumulation=st.builds(
        Accumulation, gradient_sync=st.sampled_from(GradientSync), reshard_after_backward=st.booleans()
    ),
    sync_module_states=st.sampled_from([True, False, None]),
    precision=st.sampled_from(["fp32", "amp_bf16", "amp_fp16"]),
    state_dict_type=st.sampled_from(["full", "sharded"]),
    async_save=st.booleans(),
)
# What is exact in ROLL, so that most examples lack nothing that excuses a difference.
EXACT_RUNS = st.builds(
    lambda **fields: run_with(stored_dtype=fields["reduce_dtype"], **fields),
    wrap=st.just(LAYERS),
    mesh=st.sampled_from(MESHES),
    reshard_after_forward=st.sampled_from([True, False, 2, 4]),
    param_dtype=st.just("bfloat16"),
    reduce_dtype=st.sampled_from(["bfloat16", "float32"]),
    cast_root_inputs=st.just(False),
    cpu_offload=st.booleans(),
    activation_checkpointing=st.just(ActivationCheckpointing(checkpoint=True, classes=(), reentrant=False)),
    accumulation=st.builds(Accumulation, gradient_sync=st.sampled_from([GradientSync.EVERY, GradientSync.LAST])),
    sync_module_states=st.just(True),
    precision=st.just("amp_bf16"),
    state_dict_type=st.just("sharded"),
    async_save=st.booleans(),
    max_grad_norm=st.just(1.0),
)


def resolved(run: RunConfig) -> RunConfig:
    return replace(run, num_ranks=NUM_RANKS, config=replace(run.config, mesh=run.config.mesh.resolve(NUM_RANKS)))


@examples(100)
@given(RUNS | EXACT_RUNS)
def test_what_is_expressed_exactly_is_read_back(run: RunConfig):
    """To ROLL and back is the same run, wherever no finding says otherwise."""
    again = read(entries(run), ranks=NUM_RANKS).run
    if any(finding.outcome is not Outcome.EXACT for finding in ROLL.express(run).findings):
        return
    assert again is not None
    assert resolved(again) == resolved(run)


@examples(100)
@given(EXACT_RUNS)
def test_the_exact_configs_are_exact(run: RunConfig):
    """The property above tests something: all that ROLL has a word for is expressed without a finding."""
    assert all(finding.outcome is Outcome.EXACT for finding in ROLL.express(run).findings)


# ---------------------------------------------------------------------------------------------------------------------
# The tables' own promises


NEUTRAL = [row for name in ("roll", "torchtitan") for row in DIALECTS[name].rows if row.neutral]


@pytest.mark.parametrize("row", NEUTRAL, ids=lambda row: row.name)
def test_a_value_that_asks_for_nothing_is_one_that_the_key_takes(row: Row):
    """A user who spells out that a feature is off would be stopped by it."""
    assert [value for value in row.neutral if not row.takes.fits(value)] == []


def test_ulysses_of_null_asks_for_nothing():
    """ROLL's type for it has null in it; the worker would not be read at all."""
    written = yaml.safe_load(FILE)
    written["actor_train"]["model_args"]["ulysses_size"] = None
    (section, _) = migrate_text(yaml.safe_dump(written), to="composer").sections
    (found,) = [each for each in section.findings if each.key == "model_args.ulysses_size"]
    assert found.outcome is Outcome.UNNEEDED
    assert "(context parallelism)" not in [each.name for each in section.findings]


def test_each_key_becomes_its_own_word():
    """The report would say of strategy_name that it became async_save."""
    worker = yaml.safe_load(FILE)["actor_train"]
    written = {"async_save_ckpt": True, "reduce_scatter_during_grad_accumulation": False, "save_only_model": True}
    worker["strategy_args"]["strategy_config"] |= written
    (section,) = migrate_text(yaml.safe_dump({"actor_train": worker}), to="composer").sections
    became = {each.name: each.target for each in section.findings}
    assert became["async_save_ckpt"] == "async_save: true"
    assert became["reduce_scatter_during_grad_accumulation"] == "gradient_sync: last"
    assert became["model_args.disable_gradient_checkpointing"].startswith("activation_checkpointing: true")
    assert "gradient_sync" not in became["strategy_name"] + became["save_only_model"]
    inference = yaml.safe_load(FILE)["reference"]
    inference["strategy_args"]["strategy_config"] = {"reduce_dtype": "bf16"}
    (section,) = migrate_text(yaml.safe_dump({"reference": inference}), to="composer").sections
    (idle,) = [each for each in section.findings if each.key == "reduce_dtype"]
    assert (idle.outcome, idle.target) == (Outcome.UNNEEDED, "")


def test_a_key_that_is_overruled_or_off_is_told_so():
    """The report would say that checkpoints are written in the background, and that a dtype is decided twice."""
    worker = yaml.safe_load(FILE)["actor_train"]
    worker["strategy_args"]["strategy_config"] |= {"async_save_ckpt": False, "enable_mix_precision": False}
    (section,) = migrate_text(yaml.safe_dump({"actor_train": worker}), to="composer").sections
    found = {each.name: each for each in section.findings}
    assert "while training goes on" not in found["async_save_ckpt"].reason
    assert found["enable_mix_precision"].outcome is Outcome.UNNEEDED


# --- files of the shapes that ROLL's own examples have, written for this test

POLICY = "wrap_policy: {wrap_embeddings: true, moe_experts: [Expert], transformer_layer_cls_to_wrap: [A]}"


def shape(model_args: str = "{}", config: str = "", reference: str = "hf_infer, strategy_config: ~") -> str:
    return (
        "defaults: [../config/envs@_here_]\nhydra: {run: {dir: .}}\nexp_name: x\noutput_dir: ./out/${exp_name}\n"
        "lora: q_proj,v_proj\nmax_grad_norm: 1.0\ncustom_envs:\n  Simple: ${custom_env.Simple}\n"
        f"actor_train:\n  model_args: {model_args}\n  strategy_args:\n    strategy_name: fsdp2_train\n"
        "    strategy_config:\n      enable_mix_precision: true\n      fsdp_size: 8\n      offload_policy: false\n"
        + "".join(f"      {line}\n" for line in config.splitlines())
        + "  device_mapping: list(range(0, 16))\n"
        f"reference:\n  model_args: {model_args}\n  strategy_args: {{strategy_name: {reference}}}\n"
        "  device_mapping: list(range(0, 8))\n"
    )


INFER = "fsdp2_infer, strategy_config: {fsdp_size: 8, offload_policy: true}"
# Each with the keys that a user has to do something about, in whichever worker.
SHAPES: dict[str, tuple[str, list[str]]] = {
    "dense": (shape(), []),
    "a key of no release": (shape(config="use_batched_model_update: false"), []),
    "with a teacher": (shape(reference=INFER), []),
    "adapters": (shape("{disable_gradient_checkpointing: true, lora_target: '${lora}', lora_rank: 32}"), []),
    "frozen tower": (shape("{freeze_module_prefix: model.visual}"), []),
    "patched experts": (
        shape(config=f"apply_expert_patch: true\napply_tiled_mlp: true\n{POLICY}", reference=INFER),
        ["apply_tiled_mlp"],  # of a model that the file does not name
    ),
    "grouped products": (shape("{ulysses_size: 1}", config="moe_use_grouped_mm: true\napply_tiled_mlp: false"), []),
    "Ulysses": (shape("{ulysses_size: 2}", config=POLICY, reference=INFER), []),
    "expert parallelism": (shape(config=f"ep_size: 8\nefsdp_size: 2\n{POLICY}"), []),
    "misspelt": (shape(config="offload: true"), ["offload"]),
}


def test_what_is_divided_there_is_divided_here():
    """Sequences and MLPs that were divided so that they fit, written as keys; what cannot be is told, not lost."""
    for config, expected in (
        ("apply_tiled_mlp: true\nmodel_type: qwen3", {"classes": ["Qwen3MLP"], "chunks": 4}),
        ("apply_tiled_mlp: true\nmodel_type: qwen2_5\ntiled_num_shards: 8", {"classes": ["Qwen2MLP"], "chunks": 8}),
        ("apply_tiled_mlp: true\nmodel_type: qwen3\ntiled_num_shards: 1", None),
        ("apply_tiled_mlp: false\nmodel_type: qwen3", None),
        ("apply_tiled_mlp: true", None),
    ):
        migration = migrate_text(shape("{ulysses_size: 2}", config=config), "run.yaml")
        section = yaml.safe_load(migration.after)["actor_train"]["fsdp_config"]
        assert (section.get("tiled_mlp"), section["context_parallel_degree"]) == (expected, 2), config
    told = {each.key: each for each in migration.sections[0].findings}
    assert told["apply_tiled_mlp"].outcome is Outcome.NEEDS_DECISION
    assert "tiled_mlp: {classes: [" in told["apply_tiled_mlp"].hint


def test_pieces_come_back():
    """ROLL tiles the MLPs that it knows, by their model; those of others it does not."""
    for classes, expected in (
        (("Qwen3MLP",), {"apply_tiled_mlp": True, "tiled_num_shards": 8, "model_type": "qwen3"}),
        (("LlamaMLP", "Qwen2MLP"), {"apply_tiled_mlp": True, "tiled_num_shards": 8}),
        (("MPTMLP",), {}),
        (("MPTMLP", "Qwen3MLP"), {}),
    ):
        expression = ROLL.express(run_with(tiled_mlp=TiledMLP(classes=classes, chunks=8)))
        names = ("apply_tiled_mlp", "tiled_num_shards", "model_type")
        assert {each.key: each.value for each in expression.settings if each.key in names} == expected
        assert bool(expected) is not any(each.key == "tiled MLP" for each in expression.findings)


def test_exit_1_has_a_reason():
    """Nearly every example of ROLL's ended with 1, most only because of its units and what they recompute."""
    for name, (text, expected) in SHAPES.items():
        migration = migrate_text(text, "run.yaml")
        assert [each.key for each in migration.blocking] == expected, name
        assert all(each.reason and each.hint for each in migration.blocking), name
        assert "custom_envs:\n  Simple: ${custom_env.Simple}\n" in migration.after, name


def test_each_worker_gets_its_own_section_in_its_place():
    """A file with an actor and a teacher needs no --at, and the actor's settings do not become the teacher's."""
    after = yaml.safe_load(migrate_text(SHAPES["with a teacher"][0], "run.yaml").after)
    actor, reference = after["actor_train"]["fsdp_config"], after["reference"]["fsdp_config"]
    assert "cpu_offload" not in actor and reference["cpu_offload"] is True
    assert actor["data_parallel_replicate_degree"] == -1 and "data_parallel_replicate_degree" not in reference
    assert not {"strategy_args"} & (after["actor_train"].keys() | after["reference"].keys())


def test_experts_over_ranks_become_shards_that_are_gathered_one_at_a_time():
    """ROLL's experts are modules, to which no key of composer_fsdp2 sends tokens: what is done instead is told."""
    policy = "wrap_policy: {moe_experts: [Qwen3MoeMLP]}"
    for words, asked, place in (
        (f"ep_size: 4, efsdp_size: 2, {policy}", "in_order", "one is gathered at a time"),
        ("ep_size: 4, efsdp_size: 2", None, "wrap_policy.moe_experts"),
    ):
        text = f"actor_train:\n  strategy_args:\n    strategy_name: fsdp2_train\n    strategy_config: {{{words}}}\n"
        migration = migrate_text(text, "run.yaml")
        assert migration.exit_code == 0, str(migration)
        told = next(each for each in migration.sections[0].findings if each.key == "ep_size")
        assert told.outcome is Outcome.APPROXIMATE and place in told.reason + told.hint
        assert "expert_parallel_degree: 4" in told.hint and "torch_dmoe" in told.hint
        section = yaml.safe_load(migration.after)["actor_train"]["fsdp_config"]
        assert section.get("idle_experts") == asked and "expert_parallel_degree" not in section
