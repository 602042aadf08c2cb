"""Hugging Face's dialect, compared with transformers and accelerate themselves, and its own properties."""

from __future__ import annotations

import json
import random
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.examples import IS_THOROUGH
from support.runs import run_with

from composer_fsdp2.config.findings import Outcome
from composer_fsdp2.config.mesh import MeshSpec
from composer_fsdp2.config.parallel import IdleExperts
from composer_fsdp2.config.sharding import (
    ActivationCheckpointing,
    GradientSync,
    Prefetch,
)
from composer_fsdp2.migration.dialect import Reading, Section
from composer_fsdp2.migration.dialects.composer import ComposerDialect
from composer_fsdp2.migration.dialects.huggingface import HuggingFaceDialect
from composer_fsdp2.migration.dialects.huggingface.values import Reader
from composer_fsdp2.migration.files import Destination, migrate_files, sources_of
from composer_fsdp2.migration.migrate import migrate_text
from composer_fsdp2.migration.run import RunConfig, Wrap, WrapKind
from tests.migration.file_cases import (
    APPROXIMATE,
    NEEDS_DECISION,
    NO_RUN,
    UNNEEDED,
    UNSUPPORTED,
    Case,
    each_case,
    finding,
    settings_of,
)
from tests.migration.huggingface_oracle import ask

NUM_SECTIONS = 600 if IS_THOROUGH else 80  # random sections of each system
YAMLS = Path(__file__).resolve().parents[4] / "yamls"
DIALECT = HuggingFaceDialect()
Written = dict[str, Any]


def read(written: Written) -> Reading:
    return DIALECT.read(Section(path=(), given=written, around=written))


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
    """A run as attributes of accelerate's plugin, each derived from the run's behaviour."""
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
    """The reading equals the oracle's result; without a reading, the oracle's run failed early."""
    reading = read(written)
    if reading.run is None:
        assert [each for each in reading.findings if each.outcome is Outcome.NEEDS_DECISION], written
        assert "error" in answer or breaks_later(answer), (written, answer)
        return
    assert "error" not in answer, (written, answer, reading.run)
    told = {name: value for name, value in answer.items() if name != "unread"}
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
    """Runs that start and then cannot be migrated: unknown class names, flat shards, nodes of unknown size."""
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


def real_sections() -> list[tuple[str, Written]]:
    """The sections of the runs in ``yamls/``; for a Trainer, the keys that it reads from the file."""
    read_by_trainer = ("fsdp", "fsdp_config", "bf16", "gradient_checkpointing")
    runs = [(path.parent.name, yaml.safe_load(path.read_text())) for path in YAMLS.glob("*/*-fsdp1.yaml")]
    trainers = [values.get("training", values) for folder, values in runs if folder == "huggingface"]
    found = [("trainer", {key: each[key] for key in read_by_trainer if key in each}) for each in trainers]
    return found + [("accelerate", values) for folder, values in runs if folder == "accelerate"]


@pytest.fixture(scope="module")
def answered() -> list[tuple[str, Written, dict[str, Any]]]:
    """Random sections, the same in every run, with the oracle's results."""
    rng = random.Random(6)
    cases = [("trainer", random_trainer(rng)) for _ in range(NUM_SECTIONS)]
    cases += [("accelerate", random_accelerate(rng)) for _ in range(NUM_SECTIONS)]
    cases += real_sections()
    return [(*case, answer) for case, answer in zip(cases, ask(cases), strict=True)]


@pytest.mark.parametrize("system", ["trainer", "accelerate"])
def test_a_reading_is_what_the_system_did(system: str, answered: list[tuple[str, Written, dict[str, Any]]]) -> None:
    """Otherwise a user would migrate the file's keys, and lose the behaviour of the run."""
    of_system = [(written, answer) for each, written, answer in answered if each == system]
    for written, answer in of_system:
        check(written, answer)
    read_well = [written for written, answer in of_system if read(written).run is not None]
    assert len(of_system) / 5 < len(read_well) < len(of_system) * 4 / 5


SHARDING = attrgetter(
    "wrap.kind",
    "wrap.classes",
    "wrap.min_num_params",
    "state_dict_type",
    "config.reshard_after_forward",
    "config.cpu_offload",
    "config.mixed_precision.param_dtype",
    "config.mixed_precision.reduce_dtype",
)


def test_a_migrated_file_starts_and_shards_alike(answered: list[tuple[str, Written, dict[str, Any]]]) -> None:
    """A user would get a file that accelerate refuses, or that trains differently."""
    before = [written for system, written, _ in answered if system == "accelerate" and read(written).run is not None]
    # accelerate 1.10 added parallelism_config; the installed release refuses the file.
    pairs = [(written, migrated(written)) for written in before]
    pairs = [(written, new) for written, new in pairs if "parallelism_config" not in new]
    answers = ask([("accelerate", new) for _, new in pairs])
    assert len(pairs) > NUM_SECTIONS / 6
    for (written, new), answer in zip(pairs, answers, strict=True):
        old = read(written).run
        if old.config.mesh.shard_degree == 1:
            assert new == written  # FSDP2 has no form for it, so the file is unchanged
            continue
        assert answer["version"] == 2, (written, answer)
        check(new, answer)
        assert SHARDING(read(new).run) == SHARDING(old), written


def test_a_run_in_accelerates_words_starts_and_shards_alike(
    answered: list[tuple[str, Written, dict[str, Any]]],
) -> None:
    """A user would get a file that accelerate refuses, or that trains differently."""
    before = [run for _, written, _ in answered if (run := read(written).run) is not None]
    pairs = [(run, DIALECT.express(run)) for run in before]
    pairs = [(run, new) for run, new in pairs if not any(each.outcome.blocks for each in new.findings)]
    pairs = [(run, new) for run, new in pairs if "parallelism_config" not in settings_of(new)]
    files = [{"num_processes": 8, **settings_of(new)} for _, new in pairs]
    assert len(files) > NUM_SECTIONS / 6
    for (run, _), file, answer in zip(pairs, files, ask([("accelerate", file) for file in files]), strict=True):
        check(file, answer)
        again = read(file).run
        assert SHARDING(again) == SHARDING(run), file
        assert again.config.sync_module_states == run.config.sync_module_states


# ---------------------------------------------------------------------------------------------------------------------
# A distillation of a Qwen3 MoE, as a well-known guide has it

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
    """A section read in the wrong dialect would be reported as unknown keys, or not found."""
    assert DIALECT.sections(values) == paths
    if paths:
        assert ComposerDialect().sections(values) == []


# ---------------------------------------------------------------------------------------------------------------------
# One by one


def trainer(words: str = "full_shard auto_wrap", settings: Any = None, **beside: Any) -> Written:
    return {"fsdp": words, **({} if settings is None else {"fsdp_config": settings}), **beside}


def wrapped(*classes: str) -> dict[str, Any]:
    return {"wrap": Wrap(kind=WrapKind.CLASSES, classes=classes)}


TWO_NODES = {"num_processes": 16, "num_machines": 2}
DEGREES = {"dp_replicate_size": 2, "dp_shard_size": 8, "tp_size": 1, "cp_size": 1}
SAID_DEGREES = {f"parallelism_config_{name}": degree for name, degree in DEGREES.items()}
EIGHT_OF_SIXTEEN = {"dp_shard_size": 8, "dp_replicate_size": 2}
IN_BF16 = {f"config.mixed_precision.{name}_dtype": "bfloat16" for name in ("param", "reduce", "buffer")}
NEEDLESS = ("use_orig_params", "limit_all_gathers", "forward_prefetch", "cpu_ram_efficient_loading")
CLASSES_KEY = "fsdp_config.fsdp_transformer_layer_cls_to_wrap"
OF_TRANSFORMERS_5 = {
    "fsdp": True,
    "fsdp_config": {
        "fsdp_version": 2,
        "fsdp_reshard_after_forward": False,
        "cpu_offload": True,
        "transformer_layer_cls_to_wrap": ["Block"],
    },
}
SAID_TWICE = accelerate_file(sharding_strategy="SHARD_GRAD_OP")
SAID_TWICE["fsdp_config"] = {"sharding_strategy": "FULL_SHARD", **SAID_TWICE["fsdp_config"]}
CASES = {
    "the prefixed keys of a guide were never read": Case(
        file=DISTILLATION,
        to=None,
        run={
            "wrap": Wrap(kind=WrapKind.ROOT),
            "config.prefetch": Prefetch(backward=0),
            "config.accumulation.gradient_sync": GradientSync.LAST,
        },
        told={
            CLASSES_KEY: (NEEDS_DECISION,),
            "fsdp_config.fsdp_backward_prefetch": (APPROXIMATE, "NO_PREFETCH was in effect", "no number depends on it"),
            "fsdp_config.fsdp_auto_wrap_policy": (NEEDS_DECISION, "as trained", "as written", "auto_wrap in fsdp"),
            "fsdp_config.fsdp_forward_prefetch": (UNNEEDED,),
            "fsdp_config.fsdp_state_dict_type": (UNNEEDED,),
            "fsdp_config.fsdp_offload_params": (UNNEEDED,),
        },
    ),
    "transformers 5 would bring keys to life that the run never knew": Case(
        file=DISTILLATION,
        to="accelerate",
        untold=("learning_rate",),
        after="""\
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
""",
    ),
    "decided by the user: each layer a unit": Case(
        file=trainer(
            settings={"transformer_layer_cls_to_wrap": ["Qwen3MoeDecoderLayer"], "backward_prefetch": "backward_pre"},
            bf16=True,
        ),
        to=None,
        run=wrapped("Qwen3MoeDecoderLayer") | {"config.prefetch": Prefetch()},
        blocking=[],
    ),
    **{
        f"a number with an exponent never started: {number!r}, {system}": Case(
            file=file, to=None, run=NO_RUN, told={key: (NEEDS_DECISION, "100000000")}
        )
        for number in ("1e8", 1e8)
        for system, file, key in (
            ("Trainer", trainer(settings={"min_num_params": number}), "fsdp_config.min_num_params"),
            (
                "accelerate",
                accelerate_file(auto_wrap_policy="SIZE_BASED_WRAP", min_num_params=number),
                "fsdp_config.fsdp_min_num_params",
            ),
        )
    },
    "wrapping by size is read": Case(
        file=trainer(settings={"min_num_params": 1000}),
        to=None,
        run={"wrap": Wrap(kind=WrapKind.SIZE, min_num_params=1000)},
    ),
    "accelerate's FSDP2 breaks on wrapping by size": Case(
        file=accelerate_file(version=2, auto_wrap_policy="SIZE_BASED_WRAP", min_num_params=1000),
        to=None,
        told={"fsdp_config.fsdp_auto_wrap_policy": (UNSUPPORTED,)},
    ),
    **{
        f"FSDP2 refuses flat shards at the launch: {value}, {version}": Case(
            file=accelerate_file(version=version, state_dict_type=value),
            to=None,
            run=NO_RUN,
            told={"fsdp_config.fsdp_state_dict_type": (NEEDS_DECISION, "SHARDED_STATE_DICT", "FULL_STATE_DICT")},
        )
        for value in ("LOCAL_STATE_DICT", "local_state_dict", 2)
        for version in (1, 2)
    },
    "checkpoints were full ones, whatever a Trainer's arguments say": Case(
        file=trainer("full_shard", {"state_dict_type": "SHARDED_STATE_DICT"}),
        to=None,
        run={"state_dict_type": "full"},
        told={"fsdp_config.state_dict_type": (NEEDS_DECISION, "FSDP_STATE_DICT_TYPE")},
    ),
    **{
        f"accelerate's own converter shards what was whole: {strategy!r}": Case(
            file=accelerate_file(sharding_strategy=strategy),
            to="accelerate",
            run={"config.mesh": MeshSpec.of_degrees(replicate=-1, shard=1)},
            told={"(mesh)": (UNSUPPORTED, "MULTI_GPU")},
            after="file",
        )
        for strategy in ("NO_SHARD", "no_shard", 3, "3")
    },
    **{
        f"accelerate's own converter drops replicas: {strategy}": Case(
            file=accelerate_file(sharding_strategy=strategy) | TWO_NODES,
            to="accelerate",
            run={
                "config.mesh": MeshSpec.of_degrees(shard=8, replicate=-1),
                "config.reshard_after_forward": reshards,
            },
            says={"parallelism_config": SAID_DEGREES},
        )
        for strategy, reshards in (("HYBRID_SHARD", True), (4, True), (5, False))
    },
    "FSDP1 counted the GPUs of a node at run time": Case(
        file={"training": trainer("hybrid_shard auto_wrap", bf16=True)},
        to=None,
        run=NO_RUN,
        told={"fsdp": (NEEDS_DECISION, "dp_shard_size")},
    ),
    "sizes without the prefix, which accelerate's launcher passes over": Case(
        file=accelerate_file(version=2) | {"num_processes": 16, "parallelism_config": EIGHT_OF_SIXTEEN},
        to="accelerate",
        told={
            "parallelism_config.dp_shard_size": (NEEDS_DECISION, "as parallelism_config_dp_shard_size"),
            "parallelism_config.dp_replicate_size": (NEEDS_DECISION, "as parallelism_config_dp_replicate_size"),
        },
        run={"config.mesh": MeshSpec()},
        after="file",
    ),
    "such sizes, beside a hybrid of FSDP1's": Case(
        file=accelerate_file(sharding_strategy="HYBRID_SHARD") | TWO_NODES | {"parallelism_config": EIGHT_OF_SIXTEEN},
        to="accelerate",
        says={"parallelism_config": SAID_DEGREES},
    ),
    "a Trainer's hybrid with its degrees": Case(
        file={"training": trainer("hybrid_shard auto_wrap", bf16=True, parallelism_config=EIGHT_OF_SIXTEEN)},
        to="accelerate",
        run={"config.mesh": MeshSpec.of_degrees(shard=8, replicate=2)},
        says={"training.fsdp": "full_shard auto_wrap"},
        keeps=("config.mesh",),
    ),
    **{
        f"accelerate's older name of a prefetch, {value}, stops nothing": Case(
            file=accelerate_file(sharding_strategy="FULL_SHARD", backward_prefetch_policy=value),
            to="accelerate",
            run={"config.prefetch.backward": 0},
            told={"fsdp_config.fsdp_backward_prefetch_policy": (outcome, *words)},
            blocking=[],
            says={"fsdp_config.fsdp_backward_prefetch_policy": None},
        )
        for value, outcome, *words in (
            ("BACKWARD_PRE", APPROXIMATE, "NO_PREFETCH was in effect", "fsdp_backward_prefetch"),
            ("sometimes", APPROXIMATE, "no number depends on it"),
            ("NO_PREFETCH", UNNEEDED, "in effect anyway"),
        )
    },
    "forward prefetch is read": Case(
        file=accelerate_file(forward_prefetch=True), to=None, run={"config.prefetch.forward": 1}
    ),
    "classes without auto_wrap: as trained is one unit, as written is less memory": Case(
        file=trainer("full_shard", {"transformer_layer_cls_to_wrap": ["Block"]}),
        to=None,
        run={"wrap": Wrap(kind=WrapKind.ROOT)},
        told={"fsdp_config.transformer_layer_cls_to_wrap": (NEEDS_DECISION, "auto_wrap in fsdp")},
    ),
    "classes without a policy": Case(
        file=accelerate_file(transformer_layer_cls_to_wrap="Block"), to=None, told={CLASSES_KEY: (NEEDS_DECISION,)}
    ),
    "classes with NO_WRAP are decided": Case(
        file=accelerate_file(transformer_layer_cls_to_wrap="Block", auto_wrap_policy="NO_WRAP"),
        to=None,
        told={CLASSES_KEY: (UNNEEDED,)},
    ),
    "settings in another file would be taken for the defaults": Case(
        file=trainer(settings="fsdp.json"),
        to="accelerate",
        run=NO_RUN,
        told={"fsdp_config": (NEEDS_DECISION,)},
        after="file",
    ),
    "a misspelt key trains with the default": Case(
        file=accelerate_file(sharding_stratgy="NO_SHARD"),
        to=None,
        told={"fsdp_config.fsdp_sharding_stratgy": (None, "fsdp_sharding_strategy")},
    ),
    "a misspelt word": Case(
        file=trainer("full_shrad auto_wrap"), to=None, run=NO_RUN, told={"fsdp": (None, "full_shard")}
    ),
    "a misspelt precision": Case(
        file=accelerate_file() | {"mixed_precision": "nope"},
        to=None,
        told={"mixed_precision": (None, "did you mean no?")},
    ),
    "a Trainer's gradients are reduced in the low dtype": Case(
        file=trainer("full_shard", bf16=True), to=None, run=IN_BF16 | {"precision": "amp_bf16"}
    ),
    "accelerate's gradients are reduced in the low dtype": Case(
        file=accelerate_file() | {"mixed_precision": "bf16"}, to=None, run=IN_BF16 | {"precision": "amp_bf16"}
    ),
    "words of FSDP1 in a file for FSDP2 are without effect": Case(
        file=accelerate_file(
            version=2, reshard_after_forward=False, sharding_strategy="SHARD_GRAD_OP", use_orig_params=False
        ),
        to="accelerate",
        run={"config.reshard_after_forward": False, "state_dict_type": "sharded"},
        told={"fsdp_config.fsdp_sharding_strategy": (UNNEEDED,), "fsdp_config.fsdp_use_orig_params": (UNNEEDED,)},
        after="file",
    ),
    "replicas that a file for FSDP2 does not have": Case(
        file=accelerate_file(version=2, reshard_after_forward=False, sharding_strategy="HYBRID_SHARD"),
        to=None,
        told={"fsdp_config.fsdp_sharding_strategy": (NEEDS_DECISION, "parallelism_config")},
    ),
    "transformers 5 stops at arguments of old": Case(
        file=trainer(fsdp_transformer_layer_cls_to_wrap="Block", seed=1),
        to="accelerate",
        run=wrapped("Block"),
        says={"fsdp_transformer_layer_cls_to_wrap": None},
        keeps=("wrap",),
    ),
    "recomputing as FSDP does keeps no random numbers": Case(
        file=trainer(settings={"activation_checkpointing": True}),
        to=None,
        run={"config.activation_checkpointing": ActivationCheckpointing(checkpoint=True, classes=(), reentrant=False)},
    ),
    "recomputing as the model does": Case(
        file=trainer(gradient_checkpointing=True),
        to=None,
        run={"config.activation_checkpointing": ActivationCheckpointing(checkpoint=True, classes=())},
    ),
    "no file of Composer's recomputes by size": Case(
        file=accelerate_file(auto_wrap_policy="SIZE_BASED_WRAP", min_num_params=1000, activation_checkpointing=True),
        told={"fsdp_config.fsdp_activation_checkpointing": (APPROXIMATE, "by size")},
    ),
    **{
        f"without the model's hook Composer recomputes nothing: {words}, {recomputes}": Case(
            file=trainer(words, gradient_checkpointing=recomputes),
            says={
                "fsdp_config.activation_checkpointing": recomputes or None,
                "fsdp_config.activation_checkpointing_policy": "auto" if recomputes else None,
            },
            blocking=[],
            told={"gradient_checkpointing": (None, "activation_checkpointing: true")} if recomputes else {},
            became={} if recomputes else {"gradient_checkpointing": ""},
        )
        for words in ("full_shard", "full_shard auto_wrap")
        for recomputes in (True, False)
    },
    "accelerate's own converter sorts the file and drops every comment": Case(
        file="""\
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
""",
        to="accelerate",
        after="""\
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
""",
    ),
    **{
        f"the run was not sharded at all; a migrated one would be: {key}": Case(
            file=file, to=None, run=NO_RUN, told={key: (None, "as trained", "as written")}
        )
        for key, file in {
            "fsdp": {"fsdp": "", "fsdp_config": {"min_num_params": 1}},
            "(implicit) fsdp": {"fsdp_config": {"fsdp_min_num_params": 1}},
            "distributed_type": {"distributed_type": "MULTI_GPU", "fsdp_config": {"fsdp_sharding_strategy": 1}},
        }.items()
    },
    "a Trainer clips where nothing is said": Case(file=trainer("full_shard"), to=None, run={"max_grad_norm": 1.0}),
    "a Trainer clips to what is said": Case(
        file=trainer("full_shard", max_grad_norm=0.3), to=None, run={"max_grad_norm": 0.3}
    ),
    **{
        f"with a norm of 0 nothing trains: {norm}": Case(
            file=trainer("full_shard", max_grad_norm=norm), untold=("(gradient clipping)",)
        )
        for norm in (0, 0.0, None, -1)
    },
    "under transformers 4.51.3 the new words train with FSDP1 as before": Case(
        file=trainer(), to="accelerate", told={"(version)": (APPROXIMATE, "4.51.3", "fsdp_version: 2")}
    ),
    "it is said once": Case(
        file=trainer(settings={"version": 2}),
        to="accelerate",
        untold=("(version)",),
        told={"fsdp_config.version": (None,)},
    ),
    "keys that ask for nothing become nothing": Case(
        file=trainer(
            settings=dict(zip(NEEDLESS, (True, True, False, False), strict=True)) | {"fsdp_offload_params": True},
            bf16=True,
            fp16=False,
            gradient_accumulation_steps=4,
        ),
        became={
            "fp16": "",
            **{f"fsdp_config.{name}": "" for name in (*NEEDLESS, "fsdp_offload_params")},
            "bf16": "precision: amp_bf16, mixed_precision: PURE",
        },
    ),
    "each prefetch becomes its own word": Case(
        file=trainer("full_shard", {"forward_prefetch": True, "backward_prefetch": "NO_PREFETCH"}),
        became={
            "fsdp_config.forward_prefetch": "forward_prefetch: true",
            "fsdp_config.backward_prefetch": "backward_prefetch: NONE",
        },
    ),
    "FSDP knows no fp8; the run's own library for it must be looked at": Case(
        file=accelerate_file() | {"mixed_precision": "fp8"},
        to=None,
        run={"config.mixed_precision.param_dtype": "bfloat16", "precision": "amp_fp8"},
        told={"mixed_precision": (APPROXIMATE,)},
    ),
    "transformers 5 stops at a strategy of FSDP1 beside version 2": Case(
        file=trainer("hybrid_shard", {"version": 2}), to=None, run=NO_RUN, told={"fsdp": (NEEDS_DECISION,)}
    ),
    "a Trainer of transformers 5 reads prefixes and words of its own": Case(
        file=OF_TRANSFORMERS_5,
        to=None,
        run=wrapped("Block")
        | {"config.reshard_after_forward": False, "config.cpu_offload": True, "config.prefetch": Prefetch()},
        told={"fsdp_config.fsdp_version": (APPROXIMATE, "4.51.3")},
    ),
    "and keeps them": Case(file=OF_TRANSFORMERS_5, to="accelerate", after="file"),
    "xla in quotes was on: the run was torch_xla's, whose sharding is another": Case(
        file=trainer("full_shard", {"xla": "false"}),
        to=None,
        run=NO_RUN,
        told={"fsdp_config.xla": (NEEDS_DECISION,)},
    ),
    "xla that is off asks nothing": Case(file=trainer("full_shard", {"xla": False}), to=None, blocking=[]),
    "a forward prefetch that is off asks for nothing": Case(
        file=trainer("full_shard", {"forward_prefetch": "false"}, bf16=False),
        to=None,
        told={"fsdp_config.forward_prefetch": (None, "off"), "bf16": (None, "off")},
        became={"fsdp_config.forward_prefetch": ""},
    ),
    "in quotes the launcher's check passes, and its plugin sends the values of rank 0 all the same": Case(
        file=accelerate_file(sync_module_states="false", cpu_ram_efficient_loading=True),
        to=None,
        run={"config.sync_module_states": True},
        told={"fsdp_config.fsdp_sync_module_states": (None, "set it to true")},
    ),
    "without them it refuses": Case(
        file=accelerate_file(sync_module_states=False, cpu_ram_efficient_loading="false"),
        to=None,
        run=NO_RUN,
        told={"fsdp_config.fsdp_sync_module_states": (None, "in quotes")},
    ),
    "of a key said twice, with and without its prefix, accelerate loses the earlier word in silence": Case(
        file=SAID_TWICE,
        to=None,
        run={"config.reshard_after_forward": False},
        told={"fsdp_config.sharding_strategy": (NEEDS_DECISION, "fsdp_config.fsdp_sharding_strategy says it again")},
    ),
    "and the new file says it once": Case(
        file=SAID_TWICE,
        to="accelerate",
        says={
            "fsdp_config": {
                "fsdp_version": 2,
                "fsdp_reshard_after_forward": False,
                "fsdp_state_dict_type": "FULL_STATE_DICT",
            }
        },
    ),
}


@each_case(CASES)
def test_what_becomes_of(case: Case) -> None:
    """Cases that a converter gets wrong if it takes the file literally."""
    case.check()


def test_replicas_in_accelerates_words_are_a_decision_until_the_file_says_them() -> None:
    """The run's accelerate may refuse the whole file: with exit code 0, the launch would fail."""
    written = accelerate_file(sharding_strategy="HYBRID_SHARD") | {"num_processes": 16, "num_machines": 2}
    migration = migrate_text(yaml.safe_dump(written), to="accelerate")
    (found,) = [each for each in migration.sections[0].findings if each.name == "(mesh)"]
    assert migration.exit_code == 1
    assert found.outcome is Outcome.NEEDS_DECISION
    assert "1.10" in found.hint and "all ranks" in found.hint
    (answer,) = ask([("accelerate", yaml.safe_load(migration.after))])
    assert "parallelism_config" in answer["error"]  # of the installed release

    again = migrate_text(migration.after, to="accelerate")
    assert again.exit_code == 0 and not again.is_changed
    by_hand = written | {"parallelism_config": SAID_DEGREES}
    decided = migrate_text(yaml.safe_dump(by_hand), to="accelerate")
    assert decided.exit_code == 0
    assert yaml.safe_load(decided.after)["parallelism_config"] == by_hand["parallelism_config"]


@pytest.mark.parametrize("mesh", [MeshSpec(), MeshSpec.of_degrees(shard=8), MeshSpec.of_degrees(shard=-1, replicate=1)])
@pytest.mark.parametrize("num_ranks", [None, 8])
def test_all_ranks_need_no_word_that_a_release_refuses(mesh: MeshSpec, num_ranks: int | None) -> None:
    """A plain run would get a file that accelerate 1.8.1 refuses to start."""
    run = run_with(Wrap(kind=WrapKind.CLASSES), mesh=mesh, num_ranks=num_ranks)
    expression = DIALECT.express(run)
    assert "parallelism_config" not in settings_of(expression)
    assert not [each for each in expression.findings if each.name == "(mesh)" and each.outcome.blocks]


def test_a_trainers_own_file_claims_nothing_about_words_that_stand_elsewhere() -> None:
    """The report used to claim 'The whole model was one unit', for a run with auto_wrap on its command line."""
    written = {"transformer_layer_cls_to_wrap": ["Block"], "backward_prefetch": "backward_pre"}
    classes = finding(read(written), "transformer_layer_cls_to_wrap")
    assert classes.outcome is Outcome.NEEDS_DECISION and "not known here" in classes.reason
    told = [f"{each.reason} {each.target}" for each in read(written).findings]
    assert not any("no wrapping was asked for" in each or "one unit" in each for each in told)
    assert read(written | {"fsdp": "full_shard auto_wrap"}).run.wrap == Wrap(kind=WrapKind.CLASSES, classes=("Block",))


def test_a_trainers_own_file_for_fsdp2_is_recognized(tmp_path: Path) -> None:
    """In a folder it was skipped, and given alone it was refused as a file without a section."""
    for number, prefix in enumerate(("", "fsdp_")):
        written = {f"{prefix}version": 2, f"{prefix}reshard_after_forward": False}
        assert read(written).run.config.reshard_after_forward is False
        (tmp_path / f"{number}.json").write_text(json.dumps(written))
    results = list(migrate_files(sources_of([tmp_path]), Destination()))
    assert [(each.is_skipped, each.exit_code) for each in results] == [(False, 0)] * 2
    assert DIALECT.sections({"version": 2, "services": {}}) == []


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
    """A ROLL or TorchTitan run would silently lose its clipping or its frozen tower in accelerate."""
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
    """The report would promise prefetching, and the run would not prefetch."""

    def with_value(value: object) -> Written:
        if system == "trainer":
            return {"fsdp": "full_shard auto_wrap", "fsdp_config": {name: value}}
        version = {"fsdp_version": 2} if "2" in system else {}
        file = accelerate_file(auto_wrap_policy="TRANSFORMER_BASED_WRAP")
        return file | {"fsdp_config": file["fsdp_config"] | version | {f"fsdp_{name}": value}}

    key = f"fsdp_config.{name if system == 'trainer' else f'fsdp_{name}'}"
    meant = text in ("true", "on")
    written, plain = finding(read(with_value(text)), key), finding(read(with_value(meant)), key)
    is_taken_for_true = (read(with_value(text)).run, meant) == (read(with_value(True)).run, False)
    if read(with_value(text)).run == read(with_value(meant)).run:
        assert (written.outcome, written.target, written.reason) == (plain.outcome, plain.target, plain.reason)
    elif name in LOADING:
        assert not written.outcome.blocks or "in quotes" in written.reason or plain.outcome.blocks
    else:
        assert is_taken_for_true and written.outcome is Outcome.NEEDS_DECISION
        assert "as trained: true" in written.hint and "as written: false" in written.hint


def test_words_that_are_a_number_are_refused() -> None:
    """The Trainer takes a string, a list or a flag and fails on other values, so these are not read as off."""
    reading = read({"fsdp": 3})
    assert reading.run is None and finding(reading, "fsdp").outcome.blocks


def test_the_launchers_numbers_and_its_empty_values() -> None:
    """``accelerate launch`` takes a prefetch by its number in an enumeration, and an empty precision as none."""

    def prefetching(value: object) -> tuple[Outcome, str]:
        written = finding(read(accelerate_file(backward_prefetch=value)), "fsdp_config.fsdp_backward_prefetch")
        return written.outcome, written.reason

    assert prefetching(1) == prefetching("BACKWARD_PRE") != prefetching(2) == prefetching("BACKWARD_POST")
    plain = accelerate_file()
    assert read(plain | {"mixed_precision": None}).run == read(plain | {"mixed_precision": "no"}).run


def test_the_table_has_a_reason_for_every_key_and_a_default_for_every_reader() -> None:
    """The documentation is generated from it, including empty cells."""
    for row in DIALECT.rows:
        assert row.meaning
        assert row.outcome.blocks or row.reason or row.target, row.name
        has_all = set(row.read_by) <= row.defaults.keys()
        assert not row.defaults or has_all or row.name == "sharding_strategy", row.name
