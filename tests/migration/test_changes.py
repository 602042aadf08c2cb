"""Decisions that are alike for every dialect: reported once, and only if the user must act."""

from __future__ import annotations

from support.runs import run_with

from composer_fsdp2.config.wrap import Wrap, WrapKind
from composer_fsdp2.migration.dialects import DIALECTS
from composer_fsdp2.migration.lens import covers, decides, shown
from composer_fsdp2.migration.run import fields_of
from tests.migration.file_cases import APPROXIMATE, EXACT, NEEDS_DECISION, UNNEEDED, Case, each_case

TITAN = """\
[model]
name = "llama3"
flavor = "405B"
converters = ["float8"]
[parallelism]
tensor_parallel_degree = 8
enable_async_tensor_parallel = true
disable_loss_parallel = true
context_parallel_degree = 2
context_parallel_rotate_method = "alltoall"
[quantize.linear.float8]
enable_fsdp_float8_all_gather = true
"""
ROLL = """\
actor_train:
  model_args: {ulysses_size: 2}
  strategy_args:
    strategy_name: fsdp2_train
    strategy_config: {fsdp_size: 8, ep_size: 4, efsdp_size: 2, reshard_after_forward: true}
  device_mapping: list(range(0, 8))
"""
INTERPOLATED = """\
fsdp_config:
  sharding_strategy: SHARD_GRAD_OP
  state_dict_type: ${oc.env:STATE_DICT_TYPE_OF_NOBODY}  # where it runs
  limit_all_gathers: ${oc.env:STATE_DICT_TYPE_OF_NOBODY}
  load_planner: ${oc.env:STATE_DICT_TYPE_OF_NOBODY}
"""
# By target: a file with a key unknown to its system, the key that is removed, and the finding's text.
DEAD = {
    "torchtitan": ("[parallelism]\ndata_parallel_shard_degree = -1\nzzz = 3\n", "zzz = 3\n", "refuse"),
    "roll": (
        "strategy_args:\n  strategy_name: fsdp2_train\n  strategy_config:\n    fsdp_size: 1\n    zzz: 3\n",
        "    zzz: 3\n",
        "did nothing",
    ),
    "accelerate": (
        "distributed_type: FSDP\nfsdp_config:\n  fsdp_version: 2\n  fsdp_zzz: 3\n  fsdp_offload_params: true\n",
        "  fsdp_zzz: 3\n",
        "passed over it",
    ),
    "axolotl": (
        "base_model: m\nmicro_batch_size: 1\ndatasets: []\nfsdp_version: 2\nfsdp_config:\n  zzz: 3\n"
        "  offload_params: true\n",
        "  zzz: 3\n",
        "passed over it",
    ),
}
# Systems whose files already train with FSDP2 and are unchanged; by target, the key's name.
KEPT = {"torchtitan": "zzz: 3", "roll": "zzz: 3"}
# By target: a text with a string where a mapping belongs, and its key.
ARGS = "strategy_args:\n  strategy_name: fsdp2_train\n"
PARALLEL = "fsdp: full_shard\nbf16: true\n"
NO_MAPPINGS = [
    (ARGS + "  strategy_config: 3\n", "composer", "strategy_config"),
    (ARGS + "  strategy_config: some text\n", "roll", "strategy_config"),
    ("worker:\n  model_args: 3\n  " + ARGS.replace("\n", "\n  "), "composer", "model_args"),
    (PARALLEL + "fsdp_config: 3\n", "composer", "fsdp_config"),
    (PARALLEL + "parallelism_config: 3\n", "accelerate", "parallelism_config"),
    ("distributed_type: FSDP\nfsdp_config: text\n", "accelerate", "fsdp_config"),
    ("parallelism = 3\n[activation_checkpoint]\nmode = 'full'\n", "composer", "parallelism"),
    ("compile = true\n[parallelism]\ndata_parallel_shard_degree = 2\n", "torchtitan", "compile"),
]
# By target: a text that depends on an unset variable, and its key.
UNDECIDED = [
    (INTERPOLATED, "roll", "state_dict_type"),
    ("fsdp_config:\n  sharding_strategy: ${oc.env:NOBODY_S}\n", "composer", "sharding_strategy"),
    (INTERPOLATED.replace("SHARD_GRAD_OP", "${oc.env:NOBODY_S}"), "composer", "sharding_strategy"),
]
WITHOUT_EXPERTS = ROLL.replace("ep_size: 4, efsdp_size: 2, ", "")
PLAIN = WITHOUT_EXPERTS.replace("{ulysses_size: 2}", "{}")
OF_EXPERTS = PLAIN.replace(
    "reshard_after",
    "apply_expert_patch: true, wrap_policy: {moe_experts: [Expert], transformer_layer_cls_to_wrap: [Layer]}, "
    "reshard_after",
)
OF_16, OF_N = (PLAIN.replace("list(range(0, 8))", f"list(range(0, {number}))") for number in ("16", "N"))
ROLL_OF_NOBODY = ROLL.replace("fsdp_size: 8", "fsdp_size: '${oc.env:NOBODY_S}'")


def named(text: str) -> str:
    return "run.toml" if " = " in text else "run.yaml"


def key_of(gone: str, to: str) -> str:
    return "fsdp_config." * (to in ("accelerate", "axolotl")) + gone.split()[0].rstrip(":")


CASES = {
    "three findings for one tensor parallelism look like three things to do": Case(
        file=TITAN,
        name="405b.toml",
        told={
            "tensor_parallel_degree": (EXACT, "layer_plan"),
            "enable_async_tensor_parallel": (None, "split layers"),
        },
        untold=("tensor parallelism",),
        blocking=["model.converters"],
    ),
    "and of split experts": Case(file=ROLL, told={"ep_size": (None,)}, untold=("expert parallelism",)),
    "ROLL's context parallelism is TorchTitan's, too, by a ring; that its numbers round otherwise is told": Case(
        file=WITHOUT_EXPERTS,
        to="torchtitan",
        told={"model_args.ulysses_size": (APPROXIMATE,)},
        became={"model_args.ulysses_size": "parallelism.context_parallel_degree: 2"},
        has=("context_parallel_degree = 2",),
        blocking=[],
    ),
    "a dead key needs no decision": Case(
        file="fsdp_config:\n  mixed_precision: PURE\n  zzz_pool: 3\n",
        told={"zzz_pool": (UNNEEDED,)},
        after="fsdp_config:\n  mixed_precision: PURE\n",
        blocking=[],
    ),
    "one letter away from a real one, it does": Case(
        file="fsdp_config:\n  mixed_precison: PURE\n", told={"mixed_precison": (NEEDS_DECISION,)}
    ),
    **{
        f"a file with a key that {to} does not know was called ready": Case(
            file=text,
            name=named(text),
            to=to,
            told={key_of(gone, to): (UNNEEDED, why)},
            became={key_of(gone, to): KEPT.get(to, "removed")},
            after="file" if to in KEPT else text.replace(gone, ""),
            blocking=[],
        )
        for to, (text, gone, why) in DEAD.items()
    },
    **{
        f"what a word should have held is not known, and every default was trained with: {number}": Case(
            file=text, name=named(text), to=to, told={key: (NEEDS_DECISION,)}
        )
        for number, (text, to, key) in enumerate(NO_MAPPINGS)
    },
    "a file whose variables are set on the cluster is migrated on a laptop": Case(
        file=INTERPOLATED,
        untold=("(implicit) state_dict_type",),
        # limit_all_gathers has no effect, whatever its value.
        after="""\
fsdp_config:
  reshard_after_forward: false
  state_dict_type: ${oc.env:STATE_DICT_TYPE_OF_NOBODY}  # where it runs
  load_planner: ${oc.env:STATE_DICT_TYPE_OF_NOBODY}
""",
        blocking=[],
    ),
    **{
        f"guessing what a variable says would train another run: {number}": Case(
            file=text, to=to, told={key: (NEEDS_DECISION, "cannot be resolved")}, after="file"
        )
        for number, (text, to, key) in enumerate(UNDECIDED)
    },
    "nothing of ROLL's own words is changed for ROLL, so no value has to be known": Case(
        file=ROLL_OF_NOBODY, to="roll", after="file", blocking=[]
    ),
    "16 ranks in groups of 8 are two replicas, and no question": Case(
        file=OF_16,
        to="torchtitan",
        has=("data_parallel_replicate_degree = 2\ndata_parallel_shard_degree = 8\n",),
        blocking=[],
    ),
    "of an unknown number of ranks they are one": Case(file=OF_N, to="torchtitan", blocking=["fsdp_size"]),
    "without the second key ranks that skip idle experts would train on wrong gradients, or not at all": Case(
        file=OF_EXPERTS,
        told={"wrap_policy.moe_experts": (EXACT,)},
        says={
            "actor_train.fsdp_config.wrap_policy.moe_experts": ["Expert"],
            "actor_train.fsdp_config.idle_experts": "in_order",
        },
        blocking=[],
    ),
    "and in ROLL's words": Case(file=OF_EXPERTS, to="roll", told={"wrap_policy.moe_experts": (EXACT,)}),
}


@each_case(CASES)
def test_what_becomes_of(case: Case):
    """A report must not require a decision on clear settings, nor call an undecided file ready."""
    case.check()


def test_rows_and_limitations_name_fields_of_a_run():
    """A misspelt field in a row or a limitation would hide a loss in the target behind the key's own outcome."""
    known = fields_of(run_with()).keys() | {"config", "adapter", "has_fp8_layers", "num_nodes"}
    for dialect in DIALECTS.values():
        named = {name for row in dialect.rows for name in decides(row)}
        named |= {name for each in dialect.limits for name in each.fields}
        assert named and not [name for name in named if not any(covers((name,), each) for each in known)]


def test_units_are_told_by_their_classes():
    """Runs with different classes must not look alike, nor a run with the model's own classes like one without
    units."""
    of_classes = [Wrap(kind=WrapKind.CLASSES, classes=each) for each in (("Block", "Layer"), ())]
    assert [shown(run_with(each), "wrap.classes") for each in of_classes] == ["Block, Layer", "as the model says"]
