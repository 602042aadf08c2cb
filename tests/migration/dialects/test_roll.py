"""ROLL's files: its own FSDP2 settings, and runs written as ROLL files.

ROLL is not installed here. Expectations come from its sources of 2026-08 (``fsdp2_strategy.py``: mesh, dtypes, training
and inference; ``fsdp_utils.py``: the choice of units) and, for the examples, from its FSDP2 guide, without the guide's
errors (wrap_embeddings, the missing expert-parallel keys, torch versions).
"""

from __future__ import annotations

from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from support.examples import examples
from support.runs import run_with

from composer_fsdp2.config.findings import Outcome
from composer_fsdp2.config.mesh import MeshSpec
from composer_fsdp2.config.parallel import IdleExperts, TiledMLP
from composer_fsdp2.config.rows import Row
from composer_fsdp2.config.sharding import (
    Accumulation,
    ActivationCheckpointing,
    GradientSync,
    MixedPrecision,
)
from composer_fsdp2.migration.dialect import Reading, Section
from composer_fsdp2.migration.dialects import DIALECTS
from composer_fsdp2.migration.dialects.roll import RollDialect
from composer_fsdp2.migration.migrate import migrate_text
from composer_fsdp2.migration.paths import nested
from composer_fsdp2.migration.run import Wrap, WrapKind
from tests.migration.file_cases import (
    APPROXIMATE,
    EXACT,
    NEEDS_DECISION,
    NO_RUN,
    UNNEEDED,
    Case,
    each_case,
    finding,
    settings_of,
)

ROLL = RollDialect()

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


def worker(
    config: Any = None, *, strategy: str = "fsdp2_train", ranks: int | None = None, **worker: Any
) -> dict[str, Any]:
    """A file with a worker of this strategy_config."""
    if ranks is not None:
        worker["device_mapping"] = list(range(ranks))
    return {"actor_train": {"strategy_args": {"strategy_name": strategy, "strategy_config": config or {}}, **worker}}


def read(config: Any = None, **around: Any) -> Reading:
    values = worker(config, **around)
    (path,) = ROLL.sections(values)
    return ROLL.read(Section.at(path, values))


# --- sections


@pytest.mark.parametrize(
    ("values", "sections"),
    [
        (
            yaml.safe_load(FILE),
            # vLLM's sections are not changed; the last one has no strategy_config.
            [("actor_train", "strategy_args", "strategy_config"), ("reference", "strategy_args")],
        ),
        (
            {"teachers": [{"strategy_args": {"strategy_name": "fsdp2_infer", "strategy_config": {"fsdp_size": 2}}}]},
            [("teachers", 0, "strategy_args", "strategy_config")],
        ),
        ({"fsdp_config": {"sharding_strategy": "FULL_SHARD"}}, []),
        ({"a": {"strategy_args": {"strategy_name": "megatron_train", "strategy_config": {}}}}, []),
    ],
)
def test_each_fsdp2_worker_is_a_section(values: dict[str, Any], sections: list[Any]):
    """A reward model keeps its own settings instead of getting the actor's, and other systems' files are unchanged."""
    assert ROLL.sections(values) == sections


def test_a_file_is_migrated_without_a_change():
    """ROLL already uses FSDP2, so its file is unchanged, byte for byte, and is reported."""
    migration = migrate_text(FILE, "run.yaml", to="roll", dialect="roll")
    assert not migration.is_changed and migration.exit_code == 0
    actor, reference = migration.sections
    lines = {each.key: each.where for each in actor.findings}
    assert lines["fsdp_size"] == "run.yaml:9" and lines["offload_policy"] == "run.yaml:13"
    assert lines["strategy_name"] == "run.yaml:7" and lines["device_mapping"] == "run.yaml:14"
    assert lines["model_args.dtype"] == "run.yaml:5"  # beside the section
    assert reference.place == "reference.strategy_args"


# --- mesh


@examples(100)
@given(st.integers(-2, 70), st.integers(1, 64))
def test_the_mesh_is_rolls(size: int, ranks: int):
    """A run with replicas keeps them, and so does one over all ranks. A number that does not divide has an error with
    the next step."""
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
    assert finding(reading, "fsdp_size").outcome is Outcome.EXACT


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
    """Without the number of ranks, fsdp_size does not distinguish replicas from full sharding. Code in the value is
    never run."""
    reading = read({"fsdp_size": 4}, device_mapping=mapping)
    assert finding(reading, "device_mapping").outcome is (Outcome.APPROXIMATE if ranks is None else Outcome.EXACT)
    if ranks is None:
        assert finding(reading, "fsdp_size").outcome is Outcome.APPROXIMATE
    elif ranks % 4:
        assert reading.run is not None or ranks > 4
    else:
        assert reading.run is not None and reading.run.config.mesh.resolve(ranks).size == ranks


# --- single files

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


CHECKPOINTING = "config.activation_checkpointing"
DTYPES = ("config.mixed_precision.param_dtype", "config.mixed_precision.reduce_dtype", "precision")
LLAMAS = {"transformer_layer_cls_to_wrap": "LlamaDecoderLayer", "wrap_embeddings": True, "wrap_lm_output": True}
OF_EXPERTS = {"wrap_policy": {"moe_experts": ["Qwen3MoeMLP"]}}
FREEZE = "model_args.freeze_module_prefix"
WITH_ULYSSES = yaml.safe_load(FILE)
WITH_ULYSSES["actor_train"]["model_args"]["ulysses_size"] = None
INFER = "fsdp2_infer, strategy_config: {fsdp_size: 8, offload_policy: true}"
# Files shaped like ROLL's own examples, written for this test, with the keys that a user must act on, for each worker.
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
PLACES = ("data_parallel_replicate_degree", "cpu_offload")
CASES = {
    **{
        f"exit 1 has a reason: {name}": Case(
            file=text, blocking=blocking, has_way_out=True, has=("custom_envs:\n  Simple: ${custom_env.Simple}\n",)
        )
        for name, (text, blocking) in SHAPES.items()
    },
    "a file with an actor and a teacher needs no --at, and the actor's settings do not become the teacher's": Case(
        file=SHAPES["with a teacher"][0],
        says={
            **dict(zip((f"actor_train.fsdp_config.{key}" for key in PLACES), (-1, None), strict=True)),
            **dict(zip((f"reference.fsdp_config.{key}" for key in PLACES), (None, True), strict=True)),
            "actor_train.strategy_args": None,
            "reference.strategy_args": None,
        },
    ),
    "an empty section trains in bf16 with fp32 reduction, recomputes, broadcasts rank 0 and saves in turn": Case(
        file=worker(ranks=4),
        to=None,
        run={
            "config.mixed_precision": MixedPrecision(
                param_dtype="bfloat16", reduce_dtype="float32", cast_root_inputs=False
            ),
            "precision": "amp_bf16",  # a step runs under torch.autocast
            "config.reshard_after_forward": True,
            "config.cpu_offload": False,
            CHECKPOINTING: ActivationCheckpointing(checkpoint=True, classes=(), reentrant=False),
            "config.accumulation.gradient_sync": GradientSync.EVERY,
            "config.sync_module_states": True,
            "wrap": Wrap(kind=WrapKind.CLASSES, embeddings=True),
            "state_dict_type": "sharded",
            "async_save": True,
        },
    ),
    **{
        f"gradients are summed in the dtype that ROLL summed them in: {config}": Case(
            file=worker(config), to=None, run=dict(zip(DTYPES, dtypes, strict=True))
        )
        for config, *dtypes in (
            ({"param_dtype": "fp16"}, "float16", "float32", "amp_fp16"),
            ({"param_dtype": "BF16", "reduce_dtype": "bfloat16"}, "bfloat16", "bfloat16", "amp_bf16"),
            ({"param_dtype": "float"}, "float32", "float32", "fp32"),
            ({"param_dtype": "half", "reduce_dtype": None}, "float16", "float32", "amp_fp16"),
            ({"enable_mix_precision": False}, "bfloat16", "bfloat16", "amp_bf16"),
            ({"enable_mix_precision": False, "reduce_dtype": "fp32"}, "bfloat16", "float32", "amp_bf16"),
        )
    },
    "inference makes no gradients": Case(
        file=worker(
            {"reduce_dtype": "fp32", "reduce_scatter_during_grad_accumulation": False},
            strategy="fsdp2_infer",
            model_args={"disable_gradient_checkpointing": False},
        ),
        to=None,
        told={
            "reduce_dtype": (UNNEEDED,),
            "reduce_scatter_during_grad_accumulation": (UNNEEDED,),
            "model_args.disable_gradient_checkpointing": (UNNEEDED,),
        },
        run={f"{CHECKPOINTING}.checkpoint": False, "config.accumulation.gradient_sync": GradientSync.EVERY},
    ),
    "gradients that were reduced in the last microbatch only still are": Case(
        file=worker({"reduce_scatter_during_grad_accumulation": False}),
        to=None,
        run={"config.accumulation": Accumulation(gradient_sync=GradientSync.LAST)},
    ),
    "nothing is recomputed": Case(
        file=worker(model_args={"disable_gradient_checkpointing": True}),
        to=None,
        run={f"{CHECKPOINTING}.checkpoint": False},
    ),
    **{
        f"ROLL recomputes without being told, and reenters for mixtures of experts: {model_args} {config}": Case(
            file=worker(config, model_args=model_args),
            to=None,
            run={f"{CHECKPOINTING}.checkpoint": True, f"{CHECKPOINTING}.reentrant": reentrant},
        )
        for model_args, config, reentrant in (
            ({"gradient_checkpointing_use_reentrant": True}, {}, True),
            ({}, {"wrap_policy": {"moe_experts": "Qwen3MoeMLP"}, "apply_expert_patch": True}, True),
            ({"gradient_checkpointing_use_reentrant": False}, {"ep_size": 2}, False),
        )
    },
    "ROLL gives fully_shard a None where nothing is said, which torch 2.7 refuses": Case(
        file=worker(), to=None, told={"(implicit) reshard_after_forward": (EXACT, "2.7")}
    ),
    "or where null is": Case(
        file=worker({"reshard_after_forward": None}), to=None, told={"reshard_after_forward": (EXACT, "2.7")}
    ),
    **{
        f"parameters are kept, or freed over some ranks: {config}": Case(
            file=worker(config, ranks=16), to=None, run={"config.reshard_after_forward": value}
        )
        for config, value in (
            ({"reshard_after_forward": False}, False),
            ({"reshard_after_forward": 4, "fsdp_size": 8}, 4),
        )
    },
    **{
        f"torch refuses a group that does not divide the shards: {size} of {ranks}, {group}": Case(
            file=worker({"fsdp_size": size, "reshard_after_forward": group}, ranks=ranks),
            to=None,
            run=NO_RUN,
            told={"reshard_after_forward": (NEEDS_DECISION, "use 1, 2")},
        )
        for size, ranks, group in ((8, 16, 3), (1, 6, 4), (8, None, 5))
    },
    "any text offloads": Case(
        file=worker({"offload_policy": "false"}),
        to=None,
        told={"offload_policy": (NEEDS_DECISION, "as trained: true", "as written: false")},
    ),
    **{
        f"offload: {value}": Case(
            file=worker({"offload_policy": value}), to=None, run={"config.cpu_offload": bool(value)}
        )
        for value in (True, {"pin_memory": True}, None)
    },
    "the same modules become units": Case(
        file=worker({"wrap_policy": LLAMAS}),
        to=None,
        run={"wrap": Wrap(kind=WrapKind.CLASSES, classes=("LlamaDecoderLayer",), embeddings=True, output=True)},
    ),
    "without the patch ROLL left experts in their layer": Case(
        file=worker(OF_EXPERTS), to=None, told={"wrap_policy.moe_experts": (UNNEEDED,)}, run={"wrap.experts": ()}
    ),
    "with the patch experts are units": Case(
        file=worker(OF_EXPERTS | {"apply_expert_patch": True}),
        to=None,
        told={"apply_expert_patch": (EXACT,)},
        run={"wrap.experts": ("Qwen3MoeMLP",), "config.idle_experts": IdleExperts.IN_ORDER},
    ),
    "the patch without experts": Case(
        file=worker({"apply_expert_patch": True}),
        to=None,
        told={"apply_expert_patch": (UNNEEDED,)},
        run={"config.idle_experts": None},
    ),
    **{
        f"the guide says that embeddings are not wrapped, and untied ones are: {config}": Case(
            file=worker(config),
            to=None,
            told={"wrap_policy.wrap_embeddings": (EXACT, "not tied")},
            run={"wrap.embeddings": True},
        )
        for config in ({}, {"wrap_policy": {"wrap_embeddings": False}})
    },
    **{
        f"as one name prefixes would match no parameter: {written}": Case(
            file=worker(model_args={"freeze_module_prefix": written}),
            to=None,
            run={"config.freeze": ("model.visual", "lm_head")},
        )
        for written in ("model.visual,lm_head", ["model.visual", "lm_head"], "model.visual.,lm_head.")
    },
    **{
        f"layers.10 would be trained that was frozen beside layers.1: {prefix!r}": Case(
            file=shape(f"{{freeze_module_prefix: '{prefix}'}}"),
            told={FREEZE: (expected,)},
            blocking=[FREEZE] if expected.blocks else [],
        )
        for prefix, expected in (
            ("model.layers.1", NEEDS_DECISION),  # of layers.10 as well
            ("model.embed,model.layers.1", NEEDS_DECISION),
            ("model.visual, lm_head.", NEEDS_DECISION),  # " lm_head." is the prefix of no name
            ("lm_head.,", NEEDS_DECISION),  # an empty prefix matches each name
            ("", NEEDS_DECISION),
            ("model.embed", APPROXIMATE),  # of embed_tokens as well
            ("model.layers.1.,model.visual.", EXACT),
        )
    },
    **{
        f"what is more than sharding is not dropped in silence: {config} {model_args}": Case(
            file=worker(config, model_args=model_args), to=None, told={key: (expected,)}
        )
        for config, model_args, key, expected in (
            ({"fsdp_size": 4}, {"ulysses_size": 2}, "model_args.ulysses_size", EXACT),
            ({"fsdp_size": 1}, {"ulysses_size": 2}, "model_args.ulysses_size", NEEDS_DECISION),  # ROLL fails
            ({}, {"ulysses_size": 2}, "model_args.ulysses_size", APPROXIMATE),
            ({"ep_size": 2}, {}, "ep_size", APPROXIMATE),
            ({"ep_size": 2, "efsdp_size": 4}, {}, "efsdp_size", APPROXIMATE),
            ({"efsdp_size": 4}, {}, "efsdp_size", UNNEEDED),
            ({"apply_tiled_mlp": True}, {}, "apply_tiled_mlp", APPROXIMATE),
            ({"apply_tiled_mlp": True, "tiled_num_shards": 8}, {}, "tiled_num_shards", APPROXIMATE),
            ({"apply_tiled_mlp": True, "model_type": "qwen3"}, {}, "apply_tiled_mlp", EXACT),
            ({"tiled_num_shards": 8}, {}, "tiled_num_shards", UNNEEDED),
            ({"model_type": "qwen3"}, {}, "model_type", UNNEEDED),
            ({"moe_use_grouped_mm": True}, {}, "moe_use_grouped_mm", APPROXIMATE),
            ({}, {"freeze_module_prefix": "vision_model."}, FREEZE, EXACT),
            ({}, {"lora_target": "all"}, "model_args.lora_target", APPROXIMATE),
            ({"save_only_model": True}, {}, "save_only_model", APPROXIMATE),
            ({"fused_optimizer": True}, {}, "fused_optimizer", APPROXIMATE),
        )
    },
    **{
        f"a misspelt key trained with the default, and one like no other did nothing: {key}": Case(
            file=worker(config), to=None, told={key: (expected, near)}
        )
        for config, key, expected, near in (
            ({"fsdp_sise": 4}, "fsdp_sise", NEEDS_DECISION, "fsdp_size"),
            (
                {"wrap_policy": {"wrap_embedings": True}},
                "wrap_policy.wrap_embedings",
                NEEDS_DECISION,
                "wrap_policy.wrap_embeddings",
            ),
            ({"cp_size": 2}, "cp_size", NEEDS_DECISION, "model_args.ulysses_size"),  # not ep_size
            ({"use_batched_model_update": False}, "use_batched_model_update", UNNEEDED, "remove it"),
        )
    },
    **{
        f"nothing is guessed from a value that ROLL fails with: {config}": Case(
            file=worker(config, ranks=16), to=None, run=NO_RUN, told={key: (NEEDS_DECISION, "takes")}
        )
        for config, key in (
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
        )
    },
    **{
        f"a file that spells out that a feature is off migrates without a question: {row.name}": Case(
            file=worker(**nested(row.name, row.neutral[0]))
            if row.name.startswith("model_args.")
            else worker(nested(row.name, row.neutral[0])),
            to=None,
            told={row.name: (UNNEEDED,)},
        )
        for row in ROLL.rows
        if row.neutral
    },
    "Ulysses of null asks for nothing": Case(
        file=WITH_ULYSSES, told={"model_args.ulysses_size": (UNNEEDED,)}, untold=("(context parallelism)",)
    ),
    "each key becomes its own word": Case(
        file=worker(
            {"async_save_ckpt": True, "reduce_scatter_during_grad_accumulation": False, "save_only_model": True},
            model_args={"disable_gradient_checkpointing": False},
        ),
        became={
            "async_save_ckpt": "async_save: true",
            "reduce_scatter_during_grad_accumulation": "gradient_sync: last",
        },
        told={"model_args.disable_gradient_checkpointing": (None, "activation_checkpointing: true")},
    ),
    "of inference none": Case(
        file=worker({"reduce_dtype": "bf16"}, strategy="fsdp2_infer"),
        told={"reduce_dtype": (UNNEEDED,)},
        became={"reduce_dtype": ""},
    ),
    "a key that is overruled": Case(
        file=worker({"reduce_dtype": "fp32", "enable_mix_precision": False}), told={"enable_mix_precision": (UNNEEDED,)}
    ),
    **{
        f"sequences and MLPs that were divided still are: {config}": Case(
            file=shape("{ulysses_size: 2}", config=config),
            says={
                "actor_train.fsdp_config.tiled_mlp": expected,
                "actor_train.fsdp_config.context_parallel_degree": 2,
            },
            told={} if "model_type" in config else {"apply_tiled_mlp": (NEEDS_DECISION, "tiled_mlp: {classes: [")},
        )
        for config, expected in (
            ("apply_tiled_mlp: true\nmodel_type: qwen3", {"classes": ["Qwen3MLP"], "chunks": 4}),
            ("apply_tiled_mlp: true\nmodel_type: qwen2_5\ntiled_num_shards: 8", {"classes": ["Qwen2MLP"], "chunks": 8}),
            ("apply_tiled_mlp: true\nmodel_type: qwen3\ntiled_num_shards: 1", None),
            ("apply_tiled_mlp: false\nmodel_type: qwen3", None),
            ("apply_tiled_mlp: true", None),
        )
    },
    **{
        f"ROLL's experts are modules, to which no key sends tokens: {words}": Case(
            file=f"actor_train:\n  strategy_args:\n    strategy_name: fsdp2_train\n    strategy_config: {{{words}}}\n",
            told={"ep_size": (APPROXIMATE, place, "expert_parallel_degree: 4", "torch_dmoe")},
            says={
                "actor_train.fsdp_config.idle_experts": asked,
                "actor_train.fsdp_config.expert_parallel_degree": None,
            },
            blocking=[],
        )
        for words, asked, place in (
            (
                "ep_size: 4, efsdp_size: 2, wrap_policy: {moe_experts: [Qwen3MoeMLP]}",
                "in_order",
                "gathers one expert at a time",
            ),
            ("ep_size: 4, efsdp_size: 2", None, "wrap_policy.moe_experts"),
        )
    },
}


@each_case(CASES)
def test_what_becomes_of(case: Case):
    """ROLL's keys are read with ROLL's meaning, and each is reported."""
    case.check()


NEUTRAL = [row for name in ("roll", "torchtitan") for row in DIALECTS[name].rows if row.neutral]


@pytest.mark.parametrize("row", NEUTRAL, ids=lambda row: row.name)
def test_a_value_that_asks_for_nothing_is_one_that_the_key_takes(row: Row):
    """A user who explicitly turns a feature off must not be stopped by it."""
    assert [value for value in row.neutral if not row.takes.fits(value)] == []


# --- ROLL as target


def test_a_run_in_rolls_words():
    """HSDP of 8 ranks a replica in bf16 is written as in ROLL's guide."""
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
    assert settings_of(ROLL.express(run)) == {
        "fsdp_size": 8,
        "param_dtype": "bf16",
        "reduce_dtype": "fp32",
        "reshard_after_forward": True,
        "offload_policy": False,
        "wrap_policy": {"transformer_layer_cls_to_wrap": ["Qwen3DecoderLayer"]},
        "async_save_ckpt": True,
    }


def test_pieces_come_back():
    """ROLL tiles the MLPs of models that it knows, and no others."""
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
