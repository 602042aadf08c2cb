"""Whole files migrated from one system to another: the written file, the report, and refused files."""

from __future__ import annotations

import inspect
import tomllib
from typing import Any

import pytest
import yaml

from composer_fsdp2.config.findings import Origin, Outcome
from composer_fsdp2.errors import ConfigError
from composer_fsdp2.migration.dialects import DIALECTS
from composer_fsdp2.migration.documents import Document
from composer_fsdp2.migration.lens import decides, title_of
from composer_fsdp2.migration.migrate import NothingToMigrateError, migrate_text
from composer_fsdp2.migration.targets import TARGETS
from tests.migration.file_cases import (
    APPROXIMATE,
    EXACT,
    NEEDS_DECISION,
    UNSUPPORTED,
    Case,
    asked_of_runtime,
    each_case,
    finding,
    read_first,
)

COMPOSER = """\
# A run.
precision: amp_bf16
trainer:
  fsdp_config:   # how
    # first
    sharding_strategy: SHARD_GRAD_OP  # ZeRO-2
    mixed_precision: "PURE"

    limit_all_gathers: true   # no longer
    state_dict_type: sharded
# The end.
"""


TRAINER = """\
training:
  learning_rate: 1.0e-5
  bf16: true          # on H100
  fsdp: "full_shard auto_wrap"
  fsdp_config:
    transformer_layer_cls_to_wrap: ["LlamaDecoderLayer"]  # the blocks
    limit_all_gathers: true
  gradient_checkpointing: true
  logging_steps: 1
"""


def test_keys_that_stood_beside_the_section_are_in_the_new_text_once():
    """OmegaConf refuses a file with two `precision` keys, and JSON readers take the last of two."""
    algorithms = "algorithms:\n  ema: {half_life: 1ba}  # too\n"
    text = f"output_dir: x\nbf16: true\nprecision: x  # mine\n{algorithms}fsdp: full_shard\n"
    migration = migrate_text(text, "run.yaml", to="composer")
    assert migration.after.startswith("output_dir: x\nprecision: amp_bf16  # mine\n")
    assert yaml.safe_load(migration.after)["algorithms"] == {
        "ema": {"half_life": "1ba"},
        "gradient_clipping": {"clipping_type": "norm", "clipping_threshold": 1.0},  # a Trainer's default
    }
    assert f"\n{algorithms}  gradient_clipping:\n" in migration.after
    of_writing = [each.key for each in migration.sections[0].findings if each.origin is Origin.WRITING]
    assert sorted(of_writing) == ["LLM Foundry", "algorithms", "precision", "the rest of the file"]


def test_a_key_is_told_what_becomes_of_it_in_the_target():
    """A key used to be reported as "exact" with Composer's meaning, and further down with the target's difference."""
    text = "fsdp_config: {activation_checkpointing: true, backward_prefetch_limit: 2, verbose: true}\n"
    migration = migrate_text(text, "run.yaml", to="roll")
    assert finding(migration.sections[0], "backward_prefetch_limit").outcome is Outcome.APPROXIMATE
    for to in ("roll", "accelerate", "torchtitan", "axolotl"):
        findings = migrate_text(text, "run.yaml", to=to).sections[0].findings
        keys = {title_of(name) for row in DIALECTS["composer"].rows if row.name in text for name in decides(row)}
        assert not [each.key for each in findings if each.origin is Origin.LACKING and each.key in keys], to


ROLL = """\
actor_train:
  strategy_args:
    strategy_name: fsdp2_train
    strategy_config:
      fsdp_size: 4
      offload_policy: true  # needed
  device_mapping: list(range(0,8))
reference:
  strategy_args:
    strategy_name: fsdp2_infer
    strategy_config:
      fsdp_size: 8
  device_mapping: list(range(0,8))
"""


def test_sections_are_migrated_one_by_one():
    """The actor and the reference model keep their own settings."""
    migration = migrate_text(ROLL, "roll.yaml", to="composer")
    values = yaml.safe_load(migration.after)
    actor, reference = (values[name]["fsdp_config"] for name in ("actor_train", "reference"))
    assert (actor["data_parallel_shard_degree"], actor["cpu_offload"]) == (4, True)
    assert "data_parallel_shard_degree" not in reference and "cpu_offload" not in reference
    assert [section.place for section in migration.sections] == [
        "actor_train.strategy_args.strategy_config",
        "reference.strategy_args.strategy_config",
    ]
    assert [section.line for section in migration.sections] == [4, 11]


def test_at_chooses_one_of_several():
    """For a target with one section a file, the user migrates one worker at a time."""
    with pytest.raises(ConfigError, match=r"holds one section, and here are 2.*choose one with --at"):
        migrate_text(ROLL, "roll.yaml", to="torchtitan")
    migration = migrate_text(ROLL, "roll.yaml", to="torchtitan", at="actor_train")
    assert tomllib.loads(migration.after)["training"]["enable_cpu_offload"] is True


def test_at_finds_a_section_of_any_name():
    """A section under the user's own name cannot be found by its name."""
    text = "my_run:\n  sharding: {sharding_strategy: NO_SHARD}\n"
    with pytest.raises(NothingToMigrateError):
        migrate_text(text)
    with pytest.raises(ConfigError, match="say --dialect"):
        migrate_text(text, at="my_run.sharding")
    migration = migrate_text(text, at="my_run.sharding", dialect="composer")
    section = yaml.safe_load(migration.after)["my_run"]["sharding"]
    assert section["data_parallel_shard_degree"] == 1 and section["data_parallel_replicate_degree"] == -1


# --- interpolations


def test_an_interpolation_that_cannot_be_resolved_is_a_decision(monkeypatch: pytest.MonkeyPatch):
    """The variable's value is known on the cluster only."""
    monkeypatch.delenv("STRATEGY", raising=False)
    text = "fsdp_config:\n  sharding_strategy: ${oc.env:STRATEGY}\n  limit_all_gathers: true\n"
    migration = migrate_text(text)
    assert finding(migration.sections[0], "sharding_strategy").outcome is Outcome.NEEDS_DECISION
    assert finding(migration.sections[0], "limit_all_gathers").outcome is Outcome.UNNEEDED
    assert not migration.is_changed
    monkeypatch.setenv("STRATEGY", "NO_SHARD")
    assert migrate_text(text).exit_code == 0


def test_an_interpolation_that_is_none_of_the_sections_is_none_of_ours(monkeypatch: pytest.MonkeyPatch):
    """A Trainer's output_dir is often a variable of the cluster, and FSDP does not read it."""
    monkeypatch.delenv("OUT", raising=False)
    text = "output_dir: ${oc.env:OUT}\nbf16: true\nfsdp: full_shard\nfsdp_config:\n  limit_all_gathers: true\n"
    migration = migrate_text(text, to="composer")
    assert migration.is_changed and migration.after.startswith("output_dir: ${oc.env:OUT}\n")
    text = text.replace("limit_all_gathers: true", "sync_module_states: ${oc.env:OUT}\n  limit_all_gathers: true")
    migration = migrate_text(text, to="composer")
    assert finding(migration.sections[0], "fsdp_config.sync_module_states").outcome is Outcome.NEEDS_DECISION
    assert finding(migration.sections[0], "fsdp_config.limit_all_gathers") and not migration.is_changed


def test_values_of_other_kinds_are_findings():
    """A list where a string belongs must not end in a traceback."""
    for value in ("[1, 2]", "{a: 1}", "2024-01-02", "!!binary aGk=", "1e999", "null"):
        for key in ("sharding_strategy", "mixed_precision", "data_parallel_shard_degree", "verbose", "process_group"):
            migration = migrate_text(f"fsdp_config: {{{key}: {value}}}\n")
            assert finding(migration.sections[0], key)
            migration.sections[0].to_json()


@pytest.mark.parametrize(
    "text",
    [
        "fsdp_config: {1: 2}",
        "fsdp: full_shard\nfsdp_config: {1: 2, true: 3}",
        "distributed_type: FSDP\n1: 2\nfsdp_config: {null: 2}",
        "w: {strategy_args: {strategy_name: fsdp2_train, strategy_config: {1: 2}}}",
    ],
)
@pytest.mark.parametrize("to", sorted(TARGETS))
def test_keys_that_are_no_strings_are_findings(text: str, to: str):
    """YAML allows them, and no system reads them."""
    migration = migrate_text(text, to=to)
    assert str(migration) and migration.sections[0].to_json()
    keys = {each.key.rpartition(".")[2] for section in migration.sections for each in section.findings}
    assert keys & {"1", "True", "None"}


# ---------------------------------------------------------------------------------------------------------------------
# Silent losses, and files that would take forever


def test_a_variable_that_the_new_file_does_not_read_is_told(monkeypatch: pytest.MonkeyPatch):
    """Where the variable has another value, on a cluster for instance, the new file would train differently from the
    old one."""
    monkeypatch.setenv("STRATEGY", "FULL_SHARD")
    text = "fsdp_config:\n  sharding_strategy: ${oc.env:STRATEGY}\n  state_dict_type: ${oc.env:NONE,sharded}\n"
    migration = migrate_text(text)
    assert finding(migration.sections[0], "sharding_strategy").outcome is Outcome.APPROXIMATE
    assert "${oc.env:STRATEGY} has here is written out" in finding(migration.sections[0], "sharding_strategy").hint
    assert finding(migration.sections[0], "state_dict_type").outcome is Outcome.EXACT
    assert "${oc.env:NONE,sharded}" in migration.after


@pytest.mark.parametrize("precision", ["fp32", "amp_bf16"])
def test_a_key_that_stands_beside_is_not_written_twice(precision: str):
    """OmegaConf refuses a file with a repeated key; the exit code used to be 0."""
    text = f"precision: {precision}\nw:\n  strategy_args: {{strategy_name: fsdp2_train, strategy_config: {{}}}}\n"
    flat = f"precision: {precision}\nstrategy_args: {{strategy_name: fsdp2_train, strategy_config: {{}}}}\n"
    assert migrate_text(text, to="composer").after.count("precision: amp_bf16") == 1 + (precision == "amp_bf16")
    migration = migrate_text(flat, to="composer")
    assert migration.after.count("\nprecision:") + migration.after.startswith("precision:") == 1
    assert yaml.safe_load(migration.after)["precision"] == "amp_bf16"
    same = precision == "amp_bf16"
    told = [each for each in migration.sections[0].findings if each.key == "precision"]
    assert [each.outcome for each in told] == [Outcome.EXACT if same else Outcome.APPROXIMATE]


def test_the_cost_of_a_section_does_not_grow_with_their_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file of hundreds of runs took minutes, because each section wrote the entries of all others."""
    calls = 0
    own = Document.inline

    def counted(*arguments: Any) -> str:
        nonlocal calls
        calls += 1
        return own(*arguments)

    monkeypatch.setattr(Document, "inline", counted)
    block = "r{}:\n  fsdp_config:\n    sharding_strategy: FULL_SHARD\n    limit_all_gathers: true\n"
    needed = []
    for number in (20, 40):
        calls = 0
        assert len(migrate_text("".join(map(block.format, range(number)))).sections) == number
        needed.append(calls)
    assert 0 < needed[1] <= 2.5 * needed[0], needed


# ---------------------------------------------------------------------------------------------------------------------
# Defaults of the source system, and keys beside its section


CLIPPED = {
    "trainer": ("bf16: true\nfsdp: full_shard auto_wrap\nfsdp_config: {min_num_params: 0}\n", 1.0),
    "axolotl": ("base_model: m\nmicro_batch_size: 1\ndatasets: []\nfsdp: [full_shard]\n", 1.0),
    "deepspeed": ("distributed_type: DEEPSPEED\ndeepspeed_config: {zero_stage: 3}\nnum_processes: 8\n", 1.0),
    "roll": (
        "worker:\n  strategy_args: {strategy_name: fsdp2_train, strategy_config: {param_dtype: bf16}}\n",
        1.0,
    ),
    "accelerate": ("distributed_type: FSDP\nfsdp_config: {fsdp_offload_params: false}\nnum_processes: 8\n", None),
    "composer": ("fsdp_config: {mixed_precision: PURE}\n", None),
}


@pytest.mark.parametrize("to", sorted(TARGETS))
@pytest.mark.parametrize("system", CLIPPED)
def test_clipping_by_default_is_a_setting(system: str, to: str) -> None:
    """ROLL clips to 1 by default, and most of its files do not set it. Migrated runs used to train without clipping."""
    text, norm = CLIPPED[system]
    assert read_first(text).run.max_grad_norm == norm
    migration = migrate_text(text, to=to)
    if migration.after == text:
        return
    again = read_first(migration.after, f"run{migration.suffix}").run
    told = [each for each in migration.sections[0].findings if each.key == "gradient clipping"]
    is_reported = any(each.outcome is not Outcome.EXACT for each in told)
    assert again.max_grad_norm == norm or is_reported


ZERO = "distributed_type: DEEPSPEED\nmixed_precision: bf16\nnum_processes: 4\n"


AXOLOTL = """\
base_model: m
micro_batch_size: 1
datasets: []
bf16: true
fsdp: [full_shard, auto_wrap]
fsdp_config: {fsdp_transformer_layer_cls_to_wrap: LlamaDecoderLayer}
"""
FSDP1 = """\
distributed_type: FSDP
mixed_precision: bf16
num_processes: 8
fsdp_config: {fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP}
"""


@pytest.mark.others
def test_what_accelerate_does_with_stored_parameters() -> None:
    """The report relies on it: accelerate upcasts a model in low precision, under FSDP2 as under FSDP1."""
    from accelerate.accelerator import Accelerator
    from accelerate.utils.fsdp_utils import fsdp2_prepare_model

    assert "model.to(torch.float32)" in inspect.getsource(fsdp2_prepare_model)
    assert "param.data.to(torch.float32)" in inspect.getsource(Accelerator.prepare_model)


# ---------------------------------------------------------------------------------------------------------------------
# One by one

STORED = [
    (AXOLOTL, "axolotl", NEEDS_DECISION),
    (FSDP1, "axolotl", NEEDS_DECISION),
    (FSDP1, "accelerate", None),
    (AXOLOTL, "accelerate", None),
    (AXOLOTL, "composer", APPROXIMATE),
    (FSDP1, "composer", APPROXIMATE),
    (FSDP1.replace("bf16", "'no'"), "axolotl", None),
    (FSDP1.replace("bf16", "'no'"), "composer", None),
    (AXOLOTL.replace("fsdp: ", "fsdp_version: 2\nfsdp: "), "accelerate", APPROXIMATE),
    ("precision: amp_bf16\nfsdp_config: {mixed_precision: PURE}\n", "axolotl", NEEDS_DECISION),
    ("precision: amp_bf16\nfsdp_config: {mixed_precision: PURE}\n", "accelerate", APPROXIMATE),
]
TILED = (
    "tiled_mlp: true\ngradient_accumulation_steps: 4\n"
    "accelerator_config: {gradient_accumulation_kwargs: {sync_each_batch: true}}\n"
)
LAUNCHED = "distributed_type: FSDP\nmixed_precision: bf16\nnum_processes: 2\nfsdp_config:\n  fsdp_version: 1\n"
WHOLE = "variables:\n  fsdp_config: {limit_all_gathers: true, verbose: true}\nfsdp_config: ${variables.fsdp_config}\n"
NAMED = "variables:\n  sharding: {limit_all_gathers: true, verbose: true}\nfsdp_config: ${variables.sharding}  # x\n"
ANCHORED = "a:\n  fsdp_config: &s\n    limit_all_gathers: true\n    verbose: true\nb:\n  fsdp_config: *s\n"
STEPS, CLIPS = (f"deepspeed_config.gradient_{name}" for name in ("accumulation_steps", "clipping"))
OF_8 = "distributed_type: FSDP\nmixed_precision: bf16\nnum_processes: 8\n"
ULYSSES = ZERO + (
    "deepspeed_config: {zero_stage: 3}\nparallelism_config:\n  parallelism_config_sp_size: 2\n"
    "  parallelism_config_dp_shard_size: 2\n  parallelism_config_sp_backend: deepspeed\n"
)
CASES = {
    "the report, the diff and the training script all read the one file that the user knows": Case(
        file=COMPOSER,
        became={"sharding_strategy": "reshard_after_forward: false", "limit_all_gathers": "removed"},
        blocking=[],
        after="""\
# A run.
precision: amp_bf16
trainer:
  fsdp_config:   # how
    # first
    reshard_after_forward: false  # ZeRO-2
    mixed_precision: "PURE"

    # no longer
    state_dict_type: sharded
# The end.
""",
    ),
    "DeepSpeed's sequence parallelism had ranks for half of the mesh": Case(
        file=ULYSSES,
        says={"fsdp_config.data_parallel_shard_degree": 4, "fsdp_config.context_parallel_degree": 2},
        blocking=[],
    ),
    "or a backend that FSDP refuses": Case(
        file=ULYSSES,
        to="accelerate",
        says={
            "parallelism_config": {
                f"parallelism_config_{name}_size": size
                for name, size in {"dp_replicate": 1, "dp_shard": 2, "tp": 1, "cp": 2}.items()
            }
        },
    ),
    "FSDP reads none": Case(
        file="distributed_type: FSDP\nfsdp_config: {fsdp_version: 2}\n"
        "parallelism_config: {parallelism_config_sp_size: 2}\n",
        to="accelerate",
        blocking=["parallelism_config.parallelism_config_sp_size"],
    ),
    "the keys take the places of those that said the same, and comments go with them": Case(
        file=COMPOSER,
        to="roll",
        told={"(units)": (NEEDS_DECISION,)},  # the classes to wrap
        after="""\
# A run.
precision: amp_bf16
trainer:
  strategy_args:
    strategy_name: fsdp2_train
    strategy_config:
      # how
      # first
      reshard_after_forward: false  # ZeRO-2
      param_dtype: bf16
      reduce_dtype: bf16
      # no longer
      fsdp_size: 1
      offload_policy: false
      async_save_ckpt: false
# The end.
""",
    ),
    "TOML cannot stand in YAML": Case(
        file=COMPOSER, to="torchtitan", has=("# run.yaml in keys of torchtitan", 'fsdp_reshard_after_forward = "never"')
    ),
    "accelerate refuses a file with keys that it does not know": Case(
        file=COMPOSER,
        to="accelerate",
        says={
            "fsdp_config.fsdp_version": 2,
            "fsdp_config.fsdp_reshard_after_forward": False,
            "mixed_precision": "bf16",
            "trainer": None,
        },
    ),
    "precision goes beside the section, where Composer reads it; the Trainer's other arguments stay": Case(
        file=TRAINER,
        blocking=[],
        after="""\
training:
  optimizer:
    name: decoupled_adamw
    lr: 1.0e-05
    betas: [0.9, 0.999]
    eps: 1.0e-08
    weight_decay: 0.0
  precision: amp_bf16          # on H100
  fsdp_config:
    wrap_policy:
      transformer_layer_cls_to_wrap: [LlamaDecoderLayer]
    # the blocks
    reshard_after_forward: true
    mixed_precision: PURE
    state_dict_type: full
    activation_checkpointing: true
    backward_prefetch: NONE
    sync_module_states: true
    activation_checkpointing_policy: auto
  algorithms:
    gradient_clipping:
      clipping_type: norm
      clipping_threshold: 1.0
  logging_steps: 1
""",
    ),
    "who stays with Hugging Face gets FSDP2 there": Case(
        file=TRAINER,
        to="accelerate",
        says={"training.fsdp_config.version": 2, "training.fsdp": "full_shard auto_wrap"},
        has=("# the blocks",),
    ),
    "accelerate stops at a file without its section": Case(
        file=LAUNCHED,
        told={"(the rest of the file)": (None, "none of Hugging Face", "--to accelerate")},
    ),
    "in its own words it does not": Case(file=LAUNCHED, to="accelerate", untold=("the rest of the file",)),
    "accelerate to-fsdp2 makes NO_SHARD a sharded run, and says nothing": Case(
        file="distributed_type: FSDP\nmixed_precision: bf16\nfsdp_config:\n  fsdp_sharding_strategy: NO_SHARD\n",
        to="accelerate",
        told={"(mesh)": (UNSUPPORTED,)},
        after="file",
    ),
    "${variables.x} is what the run had; a key that stays keeps its interpolation": Case(
        file="variables: {strategy: SHARD_GRAD_OP, type: full}\n"
        "fsdp_config:\n  sharding_strategy: ${variables.strategy}\n  state_dict_type: ${variables.type}\n",
        has=("  reshard_after_forward: false\n  state_dict_type: ${variables.type}\n",),
    ),
    "a section that runs share is edited where it stands, once": Case(
        file=WHOLE, after=WHOLE.replace("limit_all_gathers: true, ", "")
    ),
    "what others share is written out": Case(
        file=NAMED, after=NAMED.replace(" ${variables.sharding}  # x", "\n  verbose: true  # x")
    ),
    "the run would end with an InterpolationKeyError when its logger is built": Case(
        file="fsdp_config:\n  sharding_strategy: FULL_SHARD\ntags: [a, '${fsdp_config.sharding_strategy}']\n",
        told={"(interpolation)": (NEEDS_DECISION, "line 3")},
    ),
    "an alias of another section stays an alias": Case(
        file=ANCHORED, after=ANCHORED.replace("    limit_all_gathers: true\n", "")
    ),
    "FSDP1's words stay behind at the anchor, and the user would take them for migrated": Case(
        file="shared: &s {limit_all_gathers: true, verbose: true}\nfsdp_config: *s\n",
        told={"(alias)": (None, "line 1")},
        blocking=[],
        after="shared: &s {limit_all_gathers: true, verbose: true}\nfsdp_config:\n  verbose: true\n",
    ),
    "the logger's copy of the section would change with it": Case(
        file="fsdp_config: &s\n  sharding_strategy: FULL_SHARD\nlogged: *s\n", told={"(anchor)": (NEEDS_DECISION,)}
    ),
    "an anchor that nobody uses": Case(
        file="fsdp_config: &s\n  sharding_strategy: FULL_SHARD\nlogged: 1\n", blocking=[]
    ),
    **{
        f"'inputs are cast at roots only' beside 'accelerate casts those of every unit' would help nobody: {to}": Case(
            file=COMPOSER, to=to, untold=("(implicit) casting of inputs and buffers",)
        )
        for to in ("roll", "torchtitan", "accelerate")
    },
    **{
        f"a program that looks up a key would find 'exact' for parameters that train all the same: {to}": Case(
            file="fsdp_config:\n  freeze: [visual]\n  wrap_policy: {transformer_layer_cls_to_wrap: auto}\n",
            to=to,
            told={"freeze": (UNSUPPORTED if to == "torchtitan" else NEEDS_DECISION,)},
            untold=("frozen parameters",),
        )
        for to in ("torchtitan", "accelerate")
    },
    **{
        f"accelerate upcasts weights and Adam's state to float32, axolotl's FSDP2 does not: {number}": Case(
            file=text,
            to=to,
            told={} if expected is None else {"dtype of stored parameters": (expected,)},
            untold=() if expected else ("dtype of stored parameters",),
        )
        for number, (text, to, expected) in enumerate(STORED)
    },
    "without a line the run was out of memory, or communicated otherwise": Case(
        file=AXOLOTL + TILED,
        told={"tiled_mlp": (NEEDS_DECISION,), "accelerator_config": (EXACT,)},
        says={"fsdp_config.gradient_sync": None},
    ),
    "axolotl reduces once": Case(
        file=AXOLOTL + "gradient_accumulation_steps: 4\n", says={"fsdp_config.gradient_sync": "last"}
    ),
    **{
        f"the global batch fell to a quarter, and gradients were not clipped: {to}": Case(
            file=ZERO + "deepspeed_config: {zero_stage: 3, gradient_clipping: 0.5, gradient_accumulation_steps: 4}\n",
            to=to,
            told={
                STEPS: (NEEDS_DECISION, "4 times smaller"),
                CLIPS: (NEEDS_DECISION if to == "accelerate" else EXACT,),
            },
            has=() if to == "accelerate" else ("clipping_threshold: 0.5",),
        )
        for to in ("accelerate", "composer")
    },
    **{
        f"one step asks nothing: {to}": Case(
            file=ZERO + "deepspeed_config: {zero_stage: 3, gradient_accumulation_steps: 1}\n", to=to, blocking=[]
        )
        for to in ("accelerate", "composer")
    },
    **{
        f"accelerate refuses to start with sizes that contradict the number of processes: {sizes}": Case(
            file=f"{OF_8}parallelism_config: {{parallelism_config_dp_shard_size: {sizes}}}\n"
            "fsdp_config: {fsdp_version: 2, fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP}\n",
            blocking=["parallelism_config.parallelism_config_dp_shard_size"] * is_wrong,
        )
        for sizes, is_wrong in (("4, parallelism_config_dp_replicate_size: 2", 0), ("8", 0), ("3", 1), ("4", 1))
    },
}


@each_case(CASES)
def test_what_becomes_of(case: Case):
    """Without these findings, each of these files would train differently or not at all."""
    case.check()


@pytest.mark.parametrize(
    "text", ["mixed_precision: fp8\n" + FSDP1.replace("mixed_precision: bf16\n", ""), AXOLOTL + "fp8: true\n"]
)
def test_products_in_fp8_are_no_amp_fp8(text: str) -> None:
    """Composer's amp_fp8 is Transformer Engine's: layers converted by torchao would compute in bfloat16, with exit code
    0."""
    for to in ("composer", "roll", "torchtitan"):
        assert {each.key for each in migrate_text(text, to=to).blocking} & {"fp8", "products in fp8"}, to


# ---------------------------------------------------------------------------------------------------------------------
# Files that cannot be migrated

LAUGHS = ["a0: xxxxxxxxxx", *(f"a{n}: ${{a{n - 1}}}${{a{n - 1}}}" for n in range(1, 40))]
CHAIN = ["b0: 1", *reversed([f"b{n}: ${{b{n - 1}}}" for n in range(1, 3000)])]
UNUSABLE: list[tuple[str, str, dict[str, Any], str]] = [
    *(
        ("data.yaml", "a: 1\n", {"to": to}, r"^data.yaml:1:1: nothing here configures sharding")
        for to in sorted(TARGETS)
    ),
    *(
        ("run.yaml", COMPOSER, {"at": at}, r"^run\.yaml:")
        for at in ("nowhere", "trainer.fsdp_config.x.y", "precision", "trainer.7")
    ),
    (
        "run.yaml",
        "fsdp_config:\n  verbose: true\n  verbose: false\n",
        {},
        r"^run.yaml:3:3: verbose stands in line 2, too",
    ),
    # A reader takes the last of two strategy_args.
    (
        "run.yaml",
        "fsdp_config:\n  sharding_strategy: FULL_SHARD\nstrategy_args: {a: 1}\n",
        {"to": "roll"},
        "strategy_args stands in line 1, too",
    ),
    # Forty lines would keep a CI busy until it runs out of memory.
    (
        "run.yaml",
        "\n".join([*LAUGHS, "fsdp_config:", "  sharding_strategy: ${a39}"]),
        {},
        r"run.yaml:1:1: interpolations stand for \d+ others",
    ),
    (
        "run.yaml",
        "\n".join([*CHAIN, "fsdp_config: {sharding_strategy: FULL_SHARD}"]),
        {},
        r"interpolations (refer to each other too deep|stand for)",
    ),
    # In a folder, such files used to be skipped with exit code 0, as files that do not configure sharding.
    *(
        ("run.yaml", text, {}, r"fsdp_config is \$\{.*cannot be resolved here")
        for text in ("fsdp_config: ${oc.env:NOT_SET}\n", "a: 1\nfsdp_config: ${nowhere}\n")
    ),
    ("run.json", f'{{"a": {"1" * 5000}}}', {}, "run.json:1:1: .*digits"),
    ("run.toml", f"a = {'1' * 5000}", {}, "run.toml:1:1: .*digits"),
]


@pytest.mark.parametrize(
    ("name", "text", "options", "message"), UNUSABLE, ids=[message[:40] for *_, message in UNUSABLE]
)
def test_what_cannot_be_migrated_is_refused_with_its_place(name: str, text: str, options: dict[str, Any], message: str):
    """The error names the place, without a traceback. Only a file without a section may be skipped."""
    with pytest.raises(ConfigError, match=message) as error:
        migrate_text(text, name, **options)
    assert isinstance(error.value, NothingToMigrateError) == ("nothing here" in message)


# ---------------------------------------------------------------------------------------------------------------------
# Combinations that the runtime refuses

TENSOR = "tp_config: {tensor_parallel_degree: 2, strategy: ffn}\n"
REFUSED = {
    "replicas without shards": (16, "", "sharding_strategy: NO_SHARD, data_parallel_replicate_degree: 2"),
    "full parameters beside split layers": (4, TENSOR, "sharding_strategy: NO_SHARD"),
    "a monolith beside split layers": (4, TENSOR, "load_monolith_rank0_only: true"),
    "groups beside split layers": (4, TENSOR, "process_group: set2"),
    "a group size beside split layers": (4, TENSOR, "reshard_after_forward: 2"),
    "a group size that no group takes": (16, "", "process_group: set2, reshard_after_forward: 8"),
    "groups beside divided sequences": (4, "", "process_group: set2, context_parallel_degree: 2"),
    "experts beside groups": (4, "", "process_group: set2, expert_parallel_degree: 2"),
    "Foundry's mixed init beside split layers": (4, TENSOR + "model: {name: mpt, init_device: mixed}\n", ""),
}
TAKEN = {
    "experts beside replicas": (4, "", "data_parallel_replicate_degree: 2, expert_parallel_degree: 2"),
    "a hybrid of groups": (16, "", "sharding_strategy: HYBRID_SHARD, process_group: [set8, mod8]"),
    "nodes": (16, "", "process_group: node"),
    "nodes, and across them": (
        16,
        "",
        "sharding_strategy: HYBRID_SHARD, process_group: [node, local_rank_across_nodes]",
    ),
    "full parameters": (16, "", "sharding_strategy: NO_SHARD"),
    "Transformer Engine": (
        2,
        "precision: amp_fp8\n",
        "te_checkpoint_wrapper: true, activation_checkpointing: true, activation_checkpointing_reentrant: false",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_the_runtime_refuses_is_a_decision(case: str) -> None:
    """The report used to show `exact` with exit code 0, and the run ended before its first batch."""
    num_ranks, around, keys = REFUSED[case]
    text = f"{around}fsdp_config: {{{keys}}}\n"
    with pytest.raises(ConfigError):
        asked_of_runtime(text, num_ranks)
    for to in TARGETS:
        assert migrate_text(text, to=to).exit_code == 1


@pytest.mark.parametrize("case", TAKEN)
def test_what_the_runtime_takes_is_the_same_afterwards(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pair of groups used to lose the strategy that it needs, and nodes and Transformer Engine were looked up on the
    user's laptop."""
    num_ranks, around, keys = TAKEN[case]
    text = f"{around}fsdp_config: {{{keys}}}\n"
    migration = migrate_text(text)
    assert migration.exit_code == 0
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    expected = asked_of_runtime(text, num_ranks)
    assert expected is not None and asked_of_runtime(migration.after, num_ranks) == expected


@pytest.mark.parametrize(
    "text",
    [
        "a: {strategy_args: {strategy_name: fsdp2_train, strategy_config: {}}}\nmax_grad_norm: {a: null}\n",
        "base_model: m\ndatasets: []\nmicro_batch_size: 1\nfsdp_config: {reshard_after_forward: true}\n"
        "max_grad_norm: '1'\n",
    ],
)
@pytest.mark.parametrize("to", ["composer", "torchtitan", "accelerate"])
def test_a_norm_that_is_no_number_is_a_decision(text: str, to: str) -> None:
    """It used to end in an internal error, or was written as text into a number's key."""
    assert "max_grad_norm" in [each.key for each in migrate_text(text, to=to).blocking]


LOST = {
    "a norm of 0": ("run.toml", "[training]\nlocal_batch_size = 8\nmax_norm = 0\n"),
    "a norm below 0": (
        "run.yaml",
        "a: {strategy_args: {strategy_name: fsdp2_train, strategy_config: {}}}\nmax_grad_norm: -1\n",
    ),
    "one shard": ("run.toml", "[training]\nlocal_batch_size = 8\n[parallelism]\ndata_parallel_shard_degree = 1\n"),
    "TorchTitan's defaults": ("run.toml", "[training]\nlocal_batch_size = 8\n"),
    "tensor parallelism": ("run.yaml", f"{TENSOR}fsdp_config: {{sharding_strategy: FULL_SHARD}}\n"),
    "context parallelism": ("run.yaml", "fsdp_config: {context_parallel_degree: 2}\n"),
    "recomputed experts": (
        "run.yaml",
        "base_model: m\nmicro_batch_size: 1\nexpert_parallel_size: 2\nfsdp_version: 2\nfsdp_config:\n"
        "  auto_wrap_policy: TRANSFORMER_BASED_WRAP\n  activation_checkpointing: true\n",
    ),
    "replicas of experts": (
        "run.yaml",
        "a:\n  strategy_args: {strategy_name: fsdp2_train, strategy_config: {fsdp_size: 2, ep_size: 2}}\n"
        "  device_mapping: list(range(0, 8))\n",
    ),
}


@pytest.mark.parametrize("case", LOST)
def test_what_a_target_has_no_word_for_is_no_fault_of_the_command(case: str) -> None:
    """Instead of the finding with the next step, or beside it, the report used to read 'Please report the file'."""
    name, text = LOST[case]
    for to in TARGETS:
        assert not [each for each in migrate_text(text, name, to=to).blocking if "please report" in each.hint]


NESTED = {
    "axolotl": ("axolotl", "base_model: m\nmicro_batch_size: 1\ndatasets: []\nfsdp_version: 2\nfsdp_config: {@}\n"),
    "huggingface": ("accelerate", "distributed_type: FSDP\nmixed_precision: bf16\nfsdp_config: {fsdp_version: 2, @}\n"),
    "composer": ("composer", "parallelism_config: {fsdp: {sharding_strategy: FULL_SHARD, @}}\n"),
    "roll": ("roll", "a: {strategy_args: {strategy_name: fsdp2_train, strategy_config: {fsdp_size: 2, @}}}\n"),
}
INNER = (
    "fsdp: full_shard",
    "fsdp_config: {fsdp_version: 2}",
    "strategy_args: {strategy_name: fsdp2_train, strategy_config: {}}",
    "distributed_type: DEEPSPEED, deepspeed_config: {zero_stage: 3}",
)


@pytest.mark.parametrize("dialect", NESTED)
def test_a_section_in_another_is_a_key_of_that_one(dialect: str) -> None:
    """`fsdp` inside an fsdp_config used to be read as a second section, whose edits overlapped with those of the
    first."""
    own, text = NESTED[dialect]
    for inner in INNER:
        for to in TARGETS:
            (section,) = migrate_text(text.replace("@", inner), to=to).sections
            assert section.dialect == dialect, (inner, to)
            assert to == own or any(inner.partition(":")[0] in each.key for each in section.findings)
