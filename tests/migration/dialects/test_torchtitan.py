"""TorchTitan's TOML: what its FSDP2 did with it, and the same run in its words.

TorchTitan is not installed here. Expectations come from its sources up to v0.2.2 (``job_config.py``: names, defaults
and what they take; the models' ``parallelize.py``: meshes, casting, which units are freed), and from its notes on
FSDP2, whose TOML later releases no longer read.
"""

from __future__ import annotations

import tomllib
from dataclasses import replace
from typing import Any

import pytest
from support.runs import run_with as any_run_with

from composer_fsdp2.config.findings import Finding, Outcome
from composer_fsdp2.config.mesh import GroupRule, MeshSpec, RankGroups
from composer_fsdp2.config.sharding import Accumulation, ActivationCheckpointing, GradientSync, MixedPrecision, Prefetch
from composer_fsdp2.migration.dialect import Reading, Section
from composer_fsdp2.migration.dialects.torchtitan import TorchTitanDialect
from composer_fsdp2.migration.migrate import migrate_text
from composer_fsdp2.migration.run import RunConfig, Wrap, WrapKind
from tests.migration.tables import tables_of, with_tables

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


def run_of(values: dict[str, Any]) -> RunConfig:
    run = read(values).run
    assert run is not None
    return run


def parallelism(**written: Any) -> dict[str, Any]:
    return {"parallelism": {"data_parallel_shard_degree": -1} | written}


def finding(reading: Reading, key: str) -> Finding:
    (found,) = [each for each in reading.findings if each.name == key]
    return found


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
    """TorchTitan's files are told from others that have a training table, too."""
    assert TITAN.sections(values) == expected


def test_a_file_is_migrated_without_a_change():
    """v0.2.2's words are FSDP2's already: the file stays what it is, and each key is reported with its line."""
    migration = migrate_text(FILE, "run.toml", to="torchtitan")
    assert not migration.is_changed and migration.exit_code == 0
    (section,) = migration.sections
    places = {each.key: each.where for each in section.findings}
    assert places["data_parallel_shard_degree"] == "run.toml:16"
    assert places["training.max_norm"] == "run.toml:11"
    assert places["checkpoint.async_mode"] == "run.toml:25"


# --- effective behaviour


def test_defaults_are_torchtitans():
    """A file that says nothing of sharding trained sharded over all ranks, in bfloat16, and clipped at 1."""
    reading = read({"model": {"flavor": "debugmodel"}, "training": {"seq_len": 8}})
    assert reading.run is not None
    config = reading.run.config
    assert config.mesh == MeshSpec()
    assert config.reshard_after_forward is True
    assert config.mixed_precision == MixedPrecision(
        param_dtype="bfloat16", reduce_dtype="float32", cast_forward_inputs=True
    )
    assert reading.run.precision == "fp32"  # FSDP2 casts, torch.autocast is for DDP
    assert config.activation_checkpointing == RECOMPUTED
    assert reading.run == replace(
        any_run_with(max_grad_norm=1.0, selective_checkpointing="2", state_dict_type="sharded", stored_dtype="float32"),
        config=config,
    )
    assert finding(reading, "(implicit) training.max_norm").outcome is Outcome.APPROXIMATE
    assert finding(reading, "(implicit) activation_checkpoint.mode").outcome is Outcome.APPROXIMATE


@pytest.mark.parametrize(
    ("replicas", "shards", "shape", "expected"),
    [
        (1, -1, (8,), Outcome.EXACT),
        (1, 8, (8,), Outcome.EXACT),
        (2, -1, (2, 4), Outcome.EXACT),
        (4, 2, (4, 2), Outcome.EXACT),
        (8, 1, (8, 1), Outcome.APPROXIMATE),  # DDP there
    ],
)
def test_meshes(replicas: int, shards: int, shape: tuple[int, ...], expected: Outcome):
    """The same ranks hold the same shards."""
    reading = read(parallelism(data_parallel_replicate_degree=replicas, data_parallel_shard_degree=shards))
    assert reading.run is not None and reading.run.config.mesh.resolve(8).shape == shape
    assert finding(reading, "data_parallel_shard_degree").outcome is expected


@pytest.mark.parametrize(
    ("policy", "pipeline", "reshard", "expected"),
    [
        ("default", 1, True, Outcome.EXACT),
        ("default", 2, False, Outcome.EXACT),
        ("always", 2, True, Outcome.APPROXIMATE),
        ("never", 1, False, Outcome.EXACT),
    ],
)
def test_reshard_after_forward(policy: str, pipeline: int, reshard: bool, expected: Outcome):
    """Under a pipeline the default keeps parameters gathered; memory stays what it was."""
    reading = read(parallelism(fsdp_reshard_after_forward=policy, pipeline_parallel_degree=pipeline))
    assert reading.run is not None and reading.run.config.reshard_after_forward is reshard
    assert finding(reading, "fsdp_reshard_after_forward").outcome is expected


def test_training_keys():
    """Offloading and dtypes are those of the file."""
    values = parallelism() | {"training": {"enable_cpu_offload": True, "mixed_precision_param": "float32"}}
    config = run_of(values).config
    assert config.cpu_offload and config.mixed_precision.param_dtype == "float32"


@pytest.mark.parametrize(
    ("written", "checkpoint", "expected"),
    [
        ({"mode": "none"}, False, Outcome.UNNEEDED),
        ({"mode": "full"}, True, Outcome.EXACT),
        ({"mode": "selective", "selective_ac_option": "1"}, True, Outcome.EXACT),
        ({"mode": "selective", "selective_ac_option": "3"}, True, Outcome.APPROXIMATE),
        ({"mode": "selective", "selective_ac_option": "op"}, True, Outcome.APPROXIMATE),
        ({"mode": "memory_budget"}, True, Outcome.APPROXIMATE),
    ],
)
def test_activation_checkpointing(written: dict[str, Any], checkpoint: bool, expected: Outcome):
    """Recomputing more than before costs time and no numbers: it is said, and stands in nobody's way."""
    reading = read({"activation_checkpoint": written})
    assert reading.run is not None and reading.run.config.activation_checkpointing.checkpoint is checkpoint
    assert finding(reading, "mode").outcome is expected


# --- more than sharding


PARALLELISMS = {
    "tensor": Outcome.NEEDS_DECISION,
    "pipeline": Outcome.UNSUPPORTED,
    "context": Outcome.APPROXIMATE,
    "expert": Outcome.APPROXIMATE,
}


@pytest.mark.parametrize("kind", PARALLELISMS)
def test_other_parallelism_is_told(kind: str):
    """A run that needs it is not turned into one that runs out of memory without a word."""
    key = f"{kind}_parallel_degree"
    found = finding(read(parallelism(**{key: 2})), key)
    assert found.outcome is PARALLELISMS[kind] and found.reason and (found.hint or not found.outcome.blocks)
    assert getattr(run_of(parallelism(**{key: 2})), f"{kind}_parallel") == 2
    assert finding(read(parallelism(**{key: 1})), key).outcome is Outcome.UNNEEDED


@pytest.mark.parametrize(
    ("key", "value", "degree", "expected"),
    [
        ("disable_loss_parallel", True, "tensor_parallel_degree", Outcome.EXACT),
        ("disable_loss_parallel", False, "tensor_parallel_degree", Outcome.APPROXIMATE),
        ("enable_async_tensor_parallel", True, "tensor_parallel_degree", Outcome.APPROXIMATE),
        ("pipeline_parallel_schedule", "Interleaved1F1B", "pipeline_parallel_degree", Outcome.UNSUPPORTED),
        ("context_parallel_rotate_method", "alltoall", "context_parallel_degree", Outcome.APPROXIMATE),
        ("expert_tensor_parallel_degree", 2, "expert_parallel_degree", Outcome.APPROXIMATE),
    ],
)
def test_details_are_read_with_their_feature_only(key: str, value: object, degree: str, expected: Outcome):
    """A schedule in a file without a pipeline stands in nobody's way."""
    assert finding(read(parallelism(**{key: value})), key).outcome is Outcome.UNNEEDED
    assert finding(read(parallelism(**{key: value, degree: 2})), key).outcome is expected


def test_the_ranks_of_a_sequence_shard_parameters_as_well():
    """Its degrees multiply there; here the shard degree counts the ranks of a sequence, too."""
    degrees = {"data_parallel_replicate_degree": 2, "data_parallel_shard_degree": 4, "context_parallel_degree": 2}
    run = run_of(parallelism(**degrees))
    assert run.config.mesh.shape == (2, 8) and run.config.context_parallel_degree == 2
    written = {each.key: each.value for each in TorchTitanDialect().express(run).settings}
    assert {f"parallelism.{key}": value for key, value in degrees.items()}.items() <= written.items()
    odd = any_run_with(mesh=MeshSpec.of_degrees(shard=6, replicate=2), context_parallel_degree=4)
    blocking = [each.key for each in TorchTitanDialect().express(odd).findings if each.outcome.blocks]
    assert "context parallelism" in blocking


@pytest.mark.parametrize(
    ("tables", "key", "expected"),
    [
        ({"compile": {"enable": True}}, "compile.enable", Outcome.APPROXIMATE),
        ({"compile": {"enable": False, "components": ["loss"]}}, "compile.components", Outcome.UNNEEDED),
        ({"training": {"dtype": "bfloat16"}}, "training.dtype", Outcome.APPROXIMATE),
        ({"checkpoint": {"async_mode": "async"}}, "checkpoint.async_mode", Outcome.UNNEEDED),  # saving is off
        ({"checkpoint": {"enable": True, "async_mode": "async"}}, "checkpoint.async_mode", Outcome.EXACT),
        (
            {"checkpoint": {"enable": True, "async_mode": "async_with_pinned_mem"}},
            "checkpoint.async_mode",
            Outcome.APPROXIMATE,
        ),
        ({"model": {"converters": []}}, "model.converters", Outcome.UNNEEDED),
        ({"model": {"converters": ["quantize.linear.float8"]}}, "model.converters", Outcome.UNSUPPORTED),
        ({"model": {"converters": ["mx"]}}, "model.converters", Outcome.UNSUPPORTED),
        ({"model": {"converters": ["my_lora"]}}, "model.converters", Outcome.APPROXIMATE),
        (
            {
                "model": {"converters": ["quantize.linear.float8"]},
                "quantize": {"linear": {"float8": {"enable_fsdp_float8_all_gather": True}}},
            },
            "quantize.linear.float8.enable_fsdp_float8_all_gather",
            Outcome.UNSUPPORTED,
        ),
        (
            {"float8": {"enable_fsdp_float8_all_gather": True}},  # no converter made float8 layers
            "float8.enable_fsdp_float8_all_gather",
            Outcome.UNNEEDED,
        ),
        ({"fault_tolerance": {"enable": True}}, "fault_tolerance.enable", Outcome.UNSUPPORTED),
    ],
)
def test_the_other_tables(tables: dict[str, Any], key: str, expected: Outcome):
    """What other tables say of a sharded run is reported as well."""
    assert finding(read(parallelism() | tables), key).outcome is expected


def test_async_save_needs_saving():
    """async_mode without enable = true wrote nothing, so the run is not one that saves in the background."""
    assert run_of(parallelism() | {"checkpoint": {"async_mode": "async"}}).async_save is False
    assert run_of(parallelism() | {"checkpoint": {"enable": True, "async_mode": "async"}}).async_save is True


# --- bad keys and values


@pytest.mark.parametrize(
    ("values", "key", "expected", "near"),
    [
        (
            parallelism(data_parallel_shard_degre=2),
            "data_parallel_shard_degre",
            Outcome.NEEDS_DECISION,
            "data_parallel_shard_degree",
        ),
        (parallelism(zero_stage=3), "zero_stage", Outcome.UNNEEDED, "remove"),
        (
            parallelism() | {"training": {"enable_cpu_ofload": True}},
            "training.enable_cpu_ofload",
            Outcome.NEEDS_DECISION,
            "enable_cpu_offload",
        ),
        (
            {"job": {"custom_config_module": "flux.job_config"}, "training": {"img_size": 256}, "model": {"flavor": 1}},
            "img_size",
            Outcome.UNNEEDED,
            "flux.job_config",
        ),
        ({"training": {"step": 5}, "model": {"flavor": "8B"}}, "step", Outcome.NEEDS_DECISION, "steps"),
    ],
)
def test_unknown_keys_are_named(values: dict[str, Any], key: str, expected: Outcome, near: str):
    """A misspelt key is asked about; one like no other decides nothing, whether or not a release refuses the file."""
    found = finding(read(values), key)
    assert found.outcome is expected and near in found.hint


# By release: names that its own train_configs set, read in config_manager.py (v0.1.0) and job_config.py (later ones).
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
    """v0.1.0's own files, ten of which set last_save_model_weights_only, were told that no release knows the key."""
    values = RELEASES[release]
    assert [each.key for each in read(values).findings if not each.known] == []
    for table in values.keys() & {"training", "checkpoint"}:  # also where the table is the section itself
        alone = {table: values[table], "model": {"flavor": "8B"}}
        assert [each.key for each in read(alone).findings if not each.known] == []


def test_a_key_of_no_release_is_unknown():
    """enable_fsdp_symm_mem came with the registry in Python: a TOML file with it never ran."""
    assert not finding(read(parallelism(enable_fsdp_symm_mem=True)), "enable_fsdp_symm_mem").known


@pytest.mark.parametrize(
    ("model", "classes", "others"),
    [
        ("llama3", ("TransformerBlock",), ("embeddings", "output")),
        ("flux", ("DoubleStreamBlock", "SingleStreamBlock"), ()),
        ("llama3-siglip2", ("TransformerBlock", "TransformerLayer"), ("embeddings", "output")),
        ("transformers_modeling_backend", (), ("embeddings", "output")),  # as transformers' model says
    ],
)
def test_units_are_the_models(model: str, classes: tuple[str, ...], others: tuple[str, ...]):
    """A migrated run of Flux with `TransformerBlock` as its unit would not start: the model has none."""
    wrap = run_of(parallelism() | {"model": {"name": model, "flavor": "debugmodel"}}).wrap
    assert (wrap.kind, wrap.classes, wrap.others) == (WrapKind.CLASSES, classes, others)


def test_keys_that_have_nothing_to_do_with_sharding_are_not_reported():
    """A report of a hundred lines about data and learning rates would not be read."""
    keys = {each.key for each in read(tomllib.loads(FILE)).findings}
    assert not keys & {"training.seq_len", "training.steps", "checkpoint.folder"}


@pytest.mark.parametrize(
    ("values", "key", "takes"),
    [
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
    ],
)
def test_bad_values_are_a_decision(values: dict[str, Any], key: str, takes: str):
    """A value that TorchTitan refuses is named with those that would do; nothing is guessed from it."""
    reading = read(values)
    found = finding(reading, key)
    assert found.outcome is Outcome.NEEDS_DECISION and takes in found.reason
    assert reading.run is None


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
    """Half of its names became those of v0.2.2: tensor parallelism, compile and float8 were in tables that its own
    release does not know, and the other half in some that the last one refuses."""
    text = OLD.replace("tensor_parallel_degree = 1", "tensor_parallel_degree = 2")
    text += "[float8]\nenable_float8_linear = true\n"
    migration = migrate_text(text, "old.toml", to="torchtitan", dialect="torchtitan", at="training")
    assert not migration.is_changed and migration.exit_code == 0
    moved = migrate_text(text, "old.toml", dialect="torchtitan", at="training")
    outcomes = {each.key: each.outcome for each in moved.sections[0].findings}
    assert outcomes["tensor_parallel_degree"] is Outcome.NEEDS_DECISION
    assert outcomes["float8.enable_float8_linear"] is Outcome.UNSUPPORTED
    assert outcomes["compile"] is Outcome.APPROXIMATE


# --- as a target


BLOCKS = Wrap(kind=WrapKind.CLASSES, classes=("TransformerBlock",))


def run_with(**fields: Any) -> RunConfig:
    return any_run_with(**{"wrap": BLOCKS, "state_dict_type": "sharded", **fields})


def test_a_run_in_torchtitans_words():
    """HSDP in bfloat16 with full recomputation is what TorchTitan's own files say for it."""
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


def test_a_run_is_written_into_a_file():
    """The tables go into a TorchTitan file that keeps its comments and all that has nothing to do with them."""
    run = run_of(tomllib.loads(FILE))
    text = "# mine\n[model]\nflavor = '8B' # small\n\n[training]\nseq_len = 4 # short\n"
    after = with_tables(text, tables_of(TITAN.express(run)))
    assert after.startswith("# mine\n[model]\nflavor = '8B' # small\n\n[training]\nseq_len = 4 # short\nmixed_")
    assert run_of(tomllib.loads(after)) == run


@pytest.mark.parametrize(
    ("run", "key", "expected"),
    [
        (run_with(reshard_after_forward=4), "(reshard_after_forward)", Outcome.UNSUPPORTED),
        (run_with(mesh=MeshSpec.of_degrees(shard=4, replicate=-1)), "(mesh)", Outcome.NEEDS_DECISION),
        (run_with(mesh=MeshSpec.of_degrees(shard=1, replicate=4)), "(mesh)", Outcome.APPROXIMATE),
        (
            run_with(mesh=MeshSpec.of_groups(RankGroups(rule=GroupRule.STRIDED, number=2))),
            "(mesh)",
            Outcome.UNSUPPORTED,
        ),
        (run_with(param_dtype="float16"), "(param_dtype)", Outcome.NEEDS_DECISION),
        (run_with(precision="amp_bf16"), "(autocast)", Outcome.APPROXIMATE),
        (run_with(prefetch=Prefetch(backward=0)), "(prefetch in backward)", Outcome.APPROXIMATE),
        (
            run_with(accumulation=Accumulation(gradient_sync=GradientSync.LAST)),
            "(gradient_sync)",
            Outcome.APPROXIMATE,
        ),
        (run_with(freeze=("vision",)), "(frozen parameters)", Outcome.UNSUPPORTED),
        (run_with(tiled_chunks=4), "(tiled MLP)", Outcome.UNSUPPORTED),
        (run_with(), "(gradient clipping)", Outcome.APPROXIMATE),
    ],
)
def test_what_torchtitan_cannot_say_is_a_finding(run: RunConfig, key: str, expected: Outcome):
    """Nothing of a run is lost on the way to TorchTitan without a word."""
    assert expected in [each.outcome for each in TITAN.express(run).findings if each.name == key]


# --- files of the shapes that each release's own train_configs have, written for this test

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
# Each with the keys that a user has to do something about.
SHAPES: dict[str, tuple[str, list[str]]] = {
    "v0.1.0 dense": (shape("llama3", ONES, V1, BY_OPERATOR, f"[float8]\n{OFF}", training="compile = false\n"), []),
    "v0.1.0 tensors": (
        shape("llama3", ONES.replace("tensor_parallel_degree = 1", "tensor_parallel_degree = 8"), V1, FULLY),
        ["tensor_parallel_degree"],
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


def test_exit_1_has_a_reason():
    """Nearly every file of TorchTitan's ended with 1, most only because of its blocks and what they recompute."""
    for name, (text, expected) in SHAPES.items():
        migration = migrate_text(text, f"{name}.toml")
        assert [each.key for each in migration.blocking] == expected, name
        assert all(each.reason and each.hint for each in migration.blocking), name
        assert migrate_text(text, f"{name}.toml", to="torchtitan").exit_code == 0, name


def test_experts_over_ranks_become_shards():
    """The experts of TorchTitan's own models do not come along; what becomes of them, and where a degree is taken, is
    told, and the file is written."""
    migration = migrate_text("[parallelism]\nexpert_parallel_degree = 4\nexpert_tensor_parallel_degree = 1\n", "m.toml")
    assert migration.exit_code == 0, str(migration)
    told = {each.key: each for each in migration.sections[0].findings}
    degree = told["expert_parallel_degree"]
    assert (
        degree.outcome is Outcome.APPROXIMATE and "torch_dmoe" in degree.hint and "more communication" in degree.reason
    )
    assert told["expert_tensor_parallel_degree"].outcome is not Outcome.UNSUPPORTED
    assert "expert_parallel_degree:" not in migration.after
