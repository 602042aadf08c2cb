"""TorchTitan's TOML: its own FSDP2 settings, and runs written as TorchTitan files.

TorchTitan is not installed here. Expectations come from its sources up to v0.2.2 (``job_config.py``: names, defaults
and valid values; the models' ``parallelize.py``: meshes, casting, resharding of units), and from its notes on FSDP2,
whose TOML later releases no longer read.
"""

from __future__ import annotations

import tomllib
from typing import Any

import pytest
from support.runs import run_with as any_run_with

from composer_fsdp2.config.findings import Outcome
from composer_fsdp2.config.mesh import MeshSpec
from composer_fsdp2.config.sharding import ActivationCheckpointing, MixedPrecision
from composer_fsdp2.migration.dialect import Reading, Section
from composer_fsdp2.migration.dialects.torchtitan import TorchTitanDialect
from composer_fsdp2.migration.migrate import migrate_text
from composer_fsdp2.migration.run import RunConfig, Wrap, WrapKind
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
    tables_of,
)

TITAN = TorchTitanDialect()
RECOMPUTED = ActivationCheckpointing(checkpoint=True, classes=("TransformerBlock",), reentrant=False)

FILE = """\
[job]
dump_folder = "./outputs"   # here

[model]
name = "llama3"
flavor = "8B"

[training]
local_batch_size = 1
seq_len = 8192
max_norm = 1.0  # grad norm clipping
steps = 1000

[parallelism]
data_parallel_replicate_degree = 2
data_parallel_shard_degree = -1
tensor_parallel_degree = 1
pipeline_parallel_degree = 1
context_parallel_degree = 1
enable_async_tensor_parallel = false

[checkpoint]
enable = true
folder = "checkpoint"
async_mode = "async"
last_save_model_only = false

[activation_checkpoint]
mode = "full"
"""


def read(values: dict[str, Any]) -> Reading:
    (path,) = TITAN.sections(values)
    return TITAN.read(Section(path=path, given=values[str(path[0])], around=values))


def parallelism(**written: Any) -> dict[str, Any]:
    return {"parallelism": {"data_parallel_shard_degree": -1} | written}


# --- sections


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (tomllib.loads(FILE), [("parallelism",)]),
        ({"model": {"flavor": "8B"}, "training": {"seq_len": 8}}, [("training",)]),
        ({"activation_checkpoint": {"mode": "full"}}, [("activation_checkpoint",)]),
        ({"training": {"fsdp": "full_shard"}, "checkpoint": {"enable": True}}, []),
        ({"parallelism": {"tp": 2}}, []),
        ({"trainer": {"fsdp_config": {}}}, []),
        ({}, []),
    ],
)
def test_a_file_is_one_section(values: dict[str, Any], expected: list[tuple[str, ...]]):
    """TorchTitan's files are distinguished from other files with a training table."""
    assert TITAN.sections(values) == expected


def test_a_file_is_migrated_without_a_change():
    """v0.2.2 already uses FSDP2: the file is unchanged, and each key is reported with its line."""
    migration = migrate_text(FILE, "run.toml", to="torchtitan")
    assert not migration.is_changed and migration.exit_code == 0
    (section,) = migration.sections
    places = {each.key: each.where for each in section.findings}
    assert places["data_parallel_shard_degree"] == "run.toml:16"
    assert places["training.max_norm"] == "run.toml:11"
    assert places["checkpoint.async_mode"] == "run.toml:25"


# --- whole files


@pytest.mark.parametrize(
    ("replicas", "shards", "shape", "expected"),
    [
        (1, -1, (8,), Outcome.EXACT),
        (1, 8, (8,), Outcome.EXACT),
        (2, -1, (2, 4), Outcome.EXACT),
        (4, 2, (4, 2), Outcome.EXACT),
        (8, 1, (8, 1), Outcome.APPROXIMATE),  # TorchTitan uses DDP
    ],
)
def test_meshes(replicas: int, shards: int, shape: tuple[int, ...], expected: Outcome):
    """The same ranks have the same shards."""
    reading = read(parallelism(data_parallel_replicate_degree=replicas, data_parallel_shard_degree=shards))
    assert reading.run is not None and reading.run.config.mesh.resolve(8).shape == shape
    assert finding(reading, "data_parallel_shard_degree").outcome is expected


def test_the_ranks_of_a_sequence_shard_parameters_as_well():
    """TorchTitan multiplies its degrees; here the shard degree includes the CP ranks."""
    degrees = {"data_parallel_replicate_degree": 2, "data_parallel_shard_degree": 4, "context_parallel_degree": 2}
    run = read(parallelism(**degrees)).run
    assert run.config.mesh.shape == (2, 8) and run.config.context_parallel_degree == 2
    written = {each.key: each.value for each in TorchTitanDialect().express(run).settings}
    assert {f"parallelism.{key}": value for key, value in degrees.items()}.items() <= written.items()
    odd = any_run_with(mesh=MeshSpec.of_degrees(shard=6, replicate=2), context_parallel_degree=4)
    blocking = [each.key for each in TorchTitanDialect().express(odd).findings if each.outcome.blocks]
    assert "context parallelism" in blocking


# By release: names in its own train_configs, read in config_manager.py (v0.1.0) and job_config.py (later ones).
RELEASES: dict[str, dict[str, dict[str, Any]]] = {
    "v0.1.0": {
        "training": {"compile": False, "deterministic": False, "seed": 1, "enable_cpu_offload": False},
        "checkpoint": {
            "enable_checkpoint": True,
            "last_save_model_weights_only": False,
            "initial_load_model_weights_only": True,
            "export_dtype": "float32",
            "async_mode": "disabled",
        },
        "parallelism": {"enable_compiled_autograd": False, "pipeline_parallel_split_points": []},
        "float8": {"enable_fsdp_float8_all_gather": False},
    },
    "v0.2.0": {
        "training": {"dtype": "float32", "debug_moe_force_load_balance": False},
        "checkpoint": {"enable": True, "last_save_model_only": False, "last_save_in_hf": False, "load_only": False},
        "activation_checkpoint": {"early_stop": True, "per_op_sac_force_recompute_mm_shapes_by_fqns": []},
        "parallelism": {"expert_parallel_degree": 1, "expert_tensor_parallel_degree": 1},
    },
    "v0.2.2": {
        "training": {"dataloader": {"num_workers": 1}},
        "activation_checkpoint": {"determinism_check": "default", "preserve_rng_state": True, "debug": False},
        "parallelism": {"context_parallel_load_balancer": "headtail", "expert_parallel_comm_backend": "standard"},
    },
}


@pytest.mark.parametrize("release", RELEASES)
def test_no_key_of_a_release_is_unknown(release: str):
    """For v0.1.0's own files, ten of which set last_save_model_weights_only, the report used to claim that no release
    knows the key."""
    values = RELEASES[release]
    assert [each.key for each in read(values).findings if not each.known] == []
    for table in values.keys() & {"training", "checkpoint"}:  # also if the table is the section itself
        alone = {table: values[table], "model": {"flavor": "8B"}}
        assert [each.key for each in read(alone).findings if not each.known] == []


def test_a_key_of_no_release_is_unknown():
    """enable_fsdp_symm_mem was added with the registry in Python: no TOML file with it ever ran."""
    assert not finding(read(parallelism(enable_fsdp_symm_mem=True)), "enable_fsdp_symm_mem").known


# --- names of earlier releases

OLD = """\
[training]
seq_len = 2048
data_parallel_degree = -1   # all
tensor_parallel_degree = 1
compile = true # blocks
[experimental]
pipeline_parallel_degree = 1
enable_cpu_offload = true
[checkpoint]
enable_checkpoint = true
interval = 5
"""


def test_a_file_of_an_earlier_release_stays_as_it_is():
    """The migration used to rename half of its keys to v0.2.2's. Tensor parallelism, compile and float8 were then in
    tables unknown to its own release, and the others in tables that the last release refuses."""
    text = OLD.replace("tensor_parallel_degree = 1", "tensor_parallel_degree = 2")
    text += "[float8]\nenable_float8_linear = true\n"
    migration = migrate_text(text, "old.toml", to="torchtitan", dialect="torchtitan", at="training")
    assert not migration.is_changed and migration.exit_code == 0
    moved = migrate_text(text, "old.toml", to="composer", dialect="torchtitan", at="training")
    outcomes = {each.key: each.outcome for each in moved.sections[0].findings}
    assert outcomes["tensor_parallel_degree"] is Outcome.EXACT
    assert outcomes["float8.enable_float8_linear"] is Outcome.UNSUPPORTED
    assert outcomes["compile"] is Outcome.APPROXIMATE


# --- single files, shaped like each release's own train_configs, written for this test

TRAINING = "local_batch_size = 2\nseq_len = 4096\nmax_norm = 1.0\nsteps = 100\n"
SAVING = 'folder = "checkpoint"\ninterval = 500\nexport_dtype = "float32"\nasync_mode = "disabled"\n'
AXES = "data_parallel_replicate_degree = 1\ndata_parallel_shard_degree = -1\n"
ONES = 'fsdp_reshard_after_forward = "default"\ntensor_parallel_degree = 1\npipeline_parallel_degree = 1\n'
OFF = "enable_fsdp_float8_all_gather = false\nprecompute_float8_dynamic_scale_for_fsdp = false\n"


def shape(model: str, parallel: str, saving: str, recompute: str, *more: str, training: str = "") -> str:
    tables = {"training": TRAINING + training, "parallelism": AXES + parallel, "checkpoint": saving + SAVING}
    tables["activation_checkpoint"] = recompute
    text = f'[model]\nname = "{model}"\nflavor = "small"\n'
    return text + "".join(f"[{name}]\n{lines}" for name, lines in tables.items()) + "".join(more)


BY_OPERATOR, EVERY_SECOND = (f"mode = 'selective'\nselective_ac_option = '{option}'\n" for option in ("op", "2"))
FULLY, KEPT = 'mode = "full"\n', "mode = 'none'\nselective_ac_option = '2'\n"
V1, V2 = (
    "enable_checkpoint = false\nlast_save_model_weights_only = false\n",
    "enable = false\nlast_save_model_only = true\n",
)
COMPILED = '[compile]\nenable = {0}\ncomponents = ["loss"]\n'
LINEAR = f"[quantize.linear.float8]\n{OFF}"
EXPERTS = "expert_parallel_degree = 1\nexpert_tensor_parallel_degree = 8\n"
# Each with the keys that a user must act on.
SHAPES: dict[str, tuple[str, list[str]]] = {
    "v0.1.0 dense": (shape("llama3", ONES, V1, BY_OPERATOR, f"[float8]\n{OFF}", training="compile = false\n"), []),
    "v0.1.0 tensors": (
        shape("llama3", ONES.replace("tensor_parallel_degree = 1", "tensor_parallel_degree = 8"), V1, FULLY),
        [],
    ),
    "v0.1.0 float8": (
        shape(
            "llama3", ONES, V1, FULLY, f"[float8]\n{OFF.replace('false', 'true')}", training="compile = true\n"
        ).replace("[training]", 'converters = ["float8"]\n[training]'),
        ["model.converters"],
    ),
    "v0.1.0 flux": (
        shape(
            "flux",
            "",
            V1,
            FULLY,
            '[experimental]\ncustom_args_module = "flux.job_config"\n',
            training="img_size = 256\n",
        ),
        [],
    ),
    "v0.1.0 pipeline": (
        shape("deepseek_v2", "pipeline_parallel_degree = 2\nexpert_parallel_degree = 2\n", V1, KEPT),
        ["pipeline_parallel_degree"],
    ),
    "v0.2.0 dense": (shape("llama3", ONES, V2, EVERY_SECOND, COMPILED.format("false"), LINEAR), []),
    "v0.2.0 experts": (shape("llama4", ONES + EXPERTS, V2, BY_OPERATOR, LINEAR), []),
    "v0.2.0 compiled loss": (shape("deepseek_v3", ONES, V2, BY_OPERATOR, COMPILED.format("true"), LINEAR), []),
    "v0.2.0 saved": (shape("qwen3", ONES, V2.replace("false", "true"), FULLY + "selective_ac_option = 'op'\n"), []),
    "v0.2.1 transformers": (shape("transformers_modeling_backend", ONES, V2, EVERY_SECOND), []),
    "v0.2.1 vision": (shape("llama3-siglip2", ONES, V2, EVERY_SECOND, training="max_patches_per_image = 1024\n"), []),
    "v0.2.2 kept": (shape("gpt_oss", ONES, V2, KEPT, COMPILED.format("false")), []),
    "v0.2.2 context": (
        shape("llama3", "context_parallel_degree = 2\ncontext_parallel_rotate_method = 'alltoall'\n", V2, FULLY),
        [],
    ),
}


MODE = "config.activation_checkpointing.checkpoint"
PARALLELISMS = {"tensor": EXACT, "pipeline": UNSUPPORTED, "context": APPROXIMATE, "expert": APPROXIMATE}
# Each is read only with its feature.
DETAILS = [
    ("disable_loss_parallel", True, "tensor_parallel_degree", EXACT),
    ("disable_loss_parallel", False, "tensor_parallel_degree", APPROXIMATE),
    ("enable_async_tensor_parallel", True, "tensor_parallel_degree", APPROXIMATE),
    ("pipeline_parallel_schedule", "Interleaved1F1B", "pipeline_parallel_degree", UNSUPPORTED),
    ("context_parallel_rotate_method", "alltoall", "context_parallel_degree", APPROXIMATE),
    ("expert_tensor_parallel_degree", 2, "expert_parallel_degree", APPROXIMATE),
]
RESHARDING = [
    ("default", 1, True, EXACT),
    ("default", 2, False, EXACT),
    ("always", 2, True, APPROXIMATE),
    ("never", 1, False, EXACT),
]
RECOMPUTING = [
    ({"mode": "none"}, False, UNNEEDED),
    ({"mode": "full"}, True, EXACT),
    ({"mode": "selective", "selective_ac_option": "1"}, True, EXACT),
    ({"mode": "selective", "selective_ac_option": "3"}, True, APPROXIMATE),
    ({"mode": "selective", "selective_ac_option": "op"}, True, APPROXIMATE),
    ({"mode": "memory_budget"}, True, APPROXIMATE),
]
TABLES = [
    ({"compile": {"enable": True}}, "compile.enable", APPROXIMATE),
    ({"compile": {"enable": False, "components": ["loss"]}}, "compile.components", UNNEEDED),
    ({"training": {"dtype": "bfloat16"}}, "training.dtype", APPROXIMATE),
    ({"checkpoint": {"async_mode": "async"}}, "checkpoint.async_mode", UNNEEDED),  # saving is off
    ({"checkpoint": {"enable": True, "async_mode": "async"}}, "checkpoint.async_mode", EXACT),
    (
        {"checkpoint": {"enable": True, "async_mode": "async_with_pinned_mem"}},
        "checkpoint.async_mode",
        APPROXIMATE,
    ),
    ({"model": {"converters": []}}, "model.converters", UNNEEDED),
    ({"model": {"converters": ["quantize.linear.float8"]}}, "model.converters", UNSUPPORTED),
    ({"model": {"converters": ["mx"]}}, "model.converters", UNSUPPORTED),
    ({"model": {"converters": ["my_lora"]}}, "model.converters", APPROXIMATE),
    (
        {
            "model": {"converters": ["quantize.linear.float8"]},
            "quantize": {"linear": {"float8": {"enable_fsdp_float8_all_gather": True}}},
        },
        "quantize.linear.float8.enable_fsdp_float8_all_gather",
        UNSUPPORTED,
    ),
    (
        {"float8": {"enable_fsdp_float8_all_gather": True}},  # no converter made float8 layers
        "float8.enable_fsdp_float8_all_gather",
        UNNEEDED,
    ),
    ({"fault_tolerance": {"enable": True}}, "fault_tolerance.enable", UNSUPPORTED),
]
UNKNOWN = [
    (
        parallelism(data_parallel_shard_degre=2),
        "data_parallel_shard_degre",
        NEEDS_DECISION,
        "data_parallel_shard_degree",
    ),
    (parallelism(zero_stage=3), "zero_stage", UNNEEDED, "remove"),
    (
        parallelism() | {"training": {"enable_cpu_ofload": True}},
        "training.enable_cpu_ofload",
        NEEDS_DECISION,
        "enable_cpu_offload",
    ),
    (
        {"job": {"custom_config_module": "flux.job_config"}, "training": {"img_size": 256}, "model": {"flavor": 1}},
        "img_size",
        UNNEEDED,
        "flux.job_config",
    ),
    ({"training": {"step": 5}, "model": {"flavor": "8B"}}, "step", NEEDS_DECISION, "steps"),
]
UNITS = [
    ("llama3", ("TransformerBlock",), ("embeddings", "output")),
    ("flux", ("DoubleStreamBlock", "SingleStreamBlock"), ()),
    ("llama3-siglip2", ("TransformerBlock", "TransformerLayer"), ("embeddings", "output")),
    ("transformers_modeling_backend", (), ("embeddings", "output")),  # from transformers' model
]
BAD = [
    (parallelism(data_parallel_replicate_degree=-1), "data_parallel_replicate_degree", "from 1 on"),
    (parallelism(data_parallel_shard_degree=0), "data_parallel_shard_degree", "-1 for the rest"),
    (parallelism(fsdp_reshard_after_forward=True), "fsdp_reshard_after_forward", "default, always, never"),
    (
        parallelism() | {"training": {"mixed_precision_reduce": "bfloat16"}},
        "training.mixed_precision_reduce",
        "float32",
    ),
    (
        parallelism() | {"training": {"mixed_precision_param": "float16"}},
        "training.mixed_precision_param",
        "bfloat16",
    ),
    ({"activation_checkpoint": {"mode": "some"}}, "mode", "memory_budget"),
    ({"activation_checkpoint": {"mode": "selective", "selective_ac_option": 2}}, "selective_ac_option", "string"),
]
SAVED = {"enable": True, "async_mode": "async"}
OVER_EXPERTS = "[parallelism]\nexpert_parallel_degree = 4\nexpert_tensor_parallel_degree = 1\n"
CASES = {
    "names of earlier releases stay, and the report has those of the last one that reads TOML": Case(
        file="[training]\ndata_parallel_shard_degree = 4\n[parallelism]\ntensor_parallel_degree = 1\n"
        "[experimental]\ncontext_parallel_degree = 2\n",
        name="run.toml",
        to="torchtitan",
        told={
            "training.data_parallel_shard_degree": (EXACT, "v0.2.2", "calls it parallelism.data_parallel_shard_degree"),
            "experimental.context_parallel_degree": (None, "calls it parallelism.context_parallel_degree"),
        },
        after="file",
        blocking=[],
    ),
    "a file that says nothing of sharding trained sharded over all ranks, in bfloat16, and clipped at 1": Case(
        file={"model": {"flavor": "debugmodel"}, "training": {"seq_len": 8}},
        to=None,
        run={
            "config.mesh": MeshSpec(),
            "config.reshard_after_forward": True,
            "config.mixed_precision": MixedPrecision(
                param_dtype="bfloat16", reduce_dtype="float32", cast_forward_inputs=True
            ),
            "precision": "fp32",  # FSDP2 casts; torch.autocast is for DDP
            "config.activation_checkpointing": RECOMPUTED,
            "max_grad_norm": 1.0,
            "selective_checkpointing": "2",
            "state_dict_type": "sharded",
            "stored_dtype": "float32",
            "async_save": False,
            "tensor_parallel": 1,
        },
        told={
            "(implicit) training.max_norm": (APPROXIMATE,),
            "(implicit) activation_checkpoint.mode": (APPROXIMATE,),
        },
    ),
    **{
        f"under a pipeline the default keeps parameters gathered: {policy}, {pipeline}": Case(
            file=parallelism(fsdp_reshard_after_forward=policy, pipeline_parallel_degree=pipeline),
            to=None,
            run={"config.reshard_after_forward": reshard},
            told={"fsdp_reshard_after_forward": (expected,)},
        )
        for policy, pipeline, reshard, expected in RESHARDING
    },
    "offloading and dtypes are those of the file": Case(
        file=parallelism() | {"training": {"enable_cpu_offload": True, "mixed_precision_param": "float32"}},
        to=None,
        run={"config.cpu_offload": True, "config.mixed_precision.param_dtype": "float32"},
    ),
    **{
        f"recomputing more than before stands in nobody's way: {written}": Case(
            file={"activation_checkpoint": written}, to=None, run={MODE: checkpoint}, told={"mode": (expected,)}
        )
        for written, checkpoint, expected in RECOMPUTING
    },
    **{
        f"{kind} parallelism of {degree}": Case(
            file=parallelism(**{f"{kind}_parallel_degree": degree}),
            to=None,
            run={f"{kind}_parallel": degree},
            told={f"{kind}_parallel_degree": (expected if degree > 1 else UNNEEDED,)},
        )
        for kind, expected in PARALLELISMS.items()
        for degree in (1, 2)
    },
    **{
        f"{key} is read with its feature: {value}, {degrees}": Case(
            file=parallelism(**{key: value}, **degrees),
            to=None,
            told={key: (expected if degrees else UNNEEDED,)},
        )
        for key, value, degree, expected in DETAILS
        for degrees in ({}, {degree: 2})
    },
    **{
        f"what other tables say of a sharded run: {tables}": Case(
            file=parallelism() | tables, to=None, told={key: (expected,)}
        )
        for tables, key, expected in TABLES
    },
    **{
        f"async_mode alone wrote nothing: {saving}": Case(
            file=parallelism() | {"checkpoint": saving}, to=None, run={"async_save": saving == SAVED}
        )
        for saving in (SAVED, {"async_mode": "async"})
    },
    **{
        f"a misspelt key is asked about, one like no other decides nothing: {key}": Case(
            file=values, to=None, told={key: (expected, near)}
        )
        for values, key, expected, near in UNKNOWN
    },
    **{
        f"without its own units {model} would not start": Case(
            file=parallelism() | {"model": {"name": model, "flavor": "debugmodel"}},
            to=None,
            run={"wrap.kind": WrapKind.CLASSES, "wrap.classes": classes, "wrap.others": others},
        )
        for model, classes, others in UNITS
    },
    "a report of a hundred lines about data and schedules would not be read": Case(
        file=FILE,
        name="run.toml",
        to=None,
        untold=("training.seq_len", "lr_scheduler.warmup_steps", "checkpoint.folder"),
    ),
    **{
        f"nothing is guessed from a value that TorchTitan refuses: {values}": Case(
            file=values, to=None, run=NO_RUN, told={key: (NEEDS_DECISION, takes)}
        )
        for values, key, takes in BAD
    },
    **{
        f"exit 1 has a reason, {name} to {to}": Case(
            file=text, name="run.toml", to=to, blocking=expected if to == "composer" else [], has_way_out=True
        )
        for name, (text, expected) in SHAPES.items()
        for to in ("composer", "torchtitan")
    },
    "the experts of TorchTitan's own models do not come along": Case(
        file=OVER_EXPERTS,
        name="run.toml",
        told={
            "expert_parallel_degree": (APPROXIMATE, "torch_dmoe", "more communication"),
            "expert_tensor_parallel_degree": (APPROXIMATE,),
        },
        says={"fsdp_config.expert_parallel_degree": None},
        blocking=[],
    ),
}


@each_case(CASES)
def test_what_becomes_of(case: Case):
    """Memory and numerics are preserved, or the difference is reported."""
    case.check()


# --- TorchTitan as target


BLOCKS = Wrap(kind=WrapKind.CLASSES, classes=("TransformerBlock",))


def run_with(**fields: Any) -> RunConfig:
    return any_run_with(**{"wrap": BLOCKS, "state_dict_type": "sharded", **fields})


def test_a_run_in_torchtitans_words():
    """HSDP in bfloat16 with full checkpointing, in the keys that TorchTitan's own files use."""
    run = run_with(
        mesh=MeshSpec.of_degrees(shard=8, replicate=4),
        param_dtype="bfloat16",
        reduce_dtype="float32",
        cast_forward_inputs=True,
        activation_checkpointing=RECOMPUTED,
        max_grad_norm=0.5,
        stored_dtype="bfloat16",
        async_save=True,
    )
    expression = TITAN.express(run)
    assert expression.findings == ()
    assert tables_of(expression) == {
        ("parallelism",): {
            "data_parallel_replicate_degree": 4,
            "data_parallel_shard_degree": 8,
            "fsdp_reshard_after_forward": "default",
        },
        ("training",): {
            "mixed_precision_param": "bfloat16",
            "mixed_precision_reduce": "float32",
            "dtype": "bfloat16",
            "enable_cpu_offload": False,
            "max_norm": 0.5,
        },
        ("activation_checkpoint",): {"mode": "full"},
        ("checkpoint",): {"enable": True, "async_mode": "async"},
    }
