"""A patch of a run is written into its file in the file's own keys, or is reported as unavailable."""

from __future__ import annotations

import re
from dataclasses import fields

from hypothesis import event, given
from hypothesis import strategies as st
from support.examples import examples

from composer_fsdp2.config.mesh import MeshSpec
from composer_fsdp2.errors import ConfigError
from composer_fsdp2.migration.migrate import find_sections
from composer_fsdp2.migration.patched_file import Patch, apply_patch
from tests.migration.generated import ANY_FILE, File


def recomputed(every: int, *, offload: bool = False) -> dict[str, object]:
    """Every n-th block; 0: none."""
    return {
        "activation_checkpointing.checkpoint": every > 0,
        "activation_checkpointing.cpu_offload": offload,
        "selective_checkpointing": str(every) if every > 1 else None,
    }


NONE, ALL, SECOND, OFFLOADED = recomputed(0), recomputed(1), recomputed(2), recomputed(1, offload=True)
REPLICAS = {"mesh": MeshSpec.of_degrees(8, 2)}
SIZES = {"dp_replicate_size": 2, "dp_shard_size": 8, "tp_size": 1, "cp_size": 1}
RESHARD, OFFLOAD = "reshard_after_forward", "cpu_offload"
# By file and patch: the replaced strings of the file; "" for a deleted line.
FOUNDRY = """\
model:
  name: mpt_causal_lm  # ours
  n_layers: 4
global_train_batch_size: 128
device_train_microbatch_size: 8  # what fits
fsdp_config:
  sharding_strategy: FULL_SHARD  # as ever
  mixed_precision: PURE
  activation_checkpointing: false
"""
ACCELERATE = """\
distributed_type: FSDP
fsdp_config:
  fsdp_version: 2
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_reshard_after_forward: true  # FULL_SHARD
mixed_precision: bf16
num_processes: 16
"""
TRAINER = """\
fsdp: "full_shard auto_wrap"
fsdp_config:
  transformer_layer_cls_to_wrap: [LlamaDecoderLayer]
bf16: true
per_device_train_batch_size: 1
gradient_accumulation_steps: 8  # 64 rows
"""
TITAN = """\
[training]
local_batch_size = 8  # what fits

[parallelism]
data_parallel_shard_degree = -1

[activation_checkpoint]
mode = "full"  # at first
"""
ROLL = """\
actor_train:
  training_args:
    per_device_train_batch_size: 1
    gradient_accumulation_steps: 8
  strategy_args:
    strategy_name: fsdp2_train
    strategy_config:
      fsdp_size: 16  # all
  device_mapping: list(range(0,16))
"""
AXOLOTL = """\
base_model: some/model
micro_batch_size: 1
fsdp_version: 2
fsdp_config:
  fsdp_offload_params: false  # it fits
  reshard_after_forward: true
"""
CASES: list[tuple[str, str, Patch, dict[str, str] | str]] = [
    (
        FOUNDRY,
        "run.yaml",
        Patch(fields={RESHARD: False}),
        {"sharding_strategy: FULL_SHARD  # as ever": "reshard_after_forward: false  # as ever"},
    ),
    (
        FOUNDRY,
        "run.yaml",
        Patch(fields={RESHARD: 4}),
        {"  sharding_strategy: FULL_SHARD  # as ever": "  reshard_after_forward: 4  # as ever"},
    ),
    (
        FOUNDRY,
        "run.yaml",
        Patch(fields=REPLICAS),
        {
            "  activation_checkpointing: false\n": "  activation_checkpointing: false\n"
            "  data_parallel_shard_degree: 8\n  data_parallel_replicate_degree: 2\n"
        },
    ),
    (
        FOUNDRY,
        "run.yaml",
        Patch(fields=ALL, keys={("model", "activation_checkpointing_target"): {"mptblock": [1, 3]}}),
        {
            "activation_checkpointing: false": "activation_checkpointing: true",
            "  n_layers: 4\n": "  n_layers: 4\n  activation_checkpointing_target:\n    mptblock: [1, 3]\n",
        },
    ),
    (FOUNDRY, "run.yaml", Patch(fields=SECOND), "entire blocks are recomputed"),
    (
        ACCELERATE,
        "run.yaml",
        Patch(fields={RESHARD: False}),
        {"forward: true  # FULL_SHARD": "forward: false  # FULL_SHARD"},
    ),
    (ACCELERATE, "run.yaml", Patch(fields={RESHARD: 4}), "no group size"),
    (
        ACCELERATE,
        "run.yaml",
        Patch(fields=REPLICAS),
        {
            "num_processes: 16\n": "num_processes: 16\nparallelism_config:\n"
            + "".join(f"  parallelism_config_{name}: {size}\n" for name, size in SIZES.items())
        },
    ),
    (ACCELERATE.replace("version: 2", "version: 1"), "run.yaml", Patch(fields={RESHARD: 4}), "no group size"),
    (ACCELERATE, "run.yaml", Patch(fields=OFFLOADED), "host memory"),
    (TRAINER, "run.yaml", Patch(fields={RESHARD: False}), {'"full_shard auto_wrap"': "shard_grad_op auto_wrap"}),
    (
        TRAINER,
        "run.yaml",
        Patch(fields={OFFLOAD: True}),
        {'"full_shard auto_wrap"': "full_shard offload auto_wrap"},
    ),
    (
        TRAINER.replace("bf16", "gradient_checkpointing: true  # slow\nbf16"),
        "run.yaml",
        Patch(fields=NONE),
        {"checkpointing: true  # slow": "checkpointing: false  # slow"},
    ),
    (
        TRAINER.replace("  transformer", "  version: 2\n  transformer"),
        "run.yaml",
        Patch(fields={OFFLOAD: True}),
        {"Layer]\n": "Layer]\n  cpu_offload: true\n"},
    ),
    (TRAINER, "run.yaml", Patch(fields=REPLICAS), "no key for it (mesh)"),
    (
        TITAN,
        "run.toml",
        Patch(fields={**SECOND, RESHARD: False}),
        {
            "degree = -1\n": 'degree = -1\nfsdp_reshard_after_forward = "never"\n',
            'mode = "full"  # at first\n': 'mode = "selective"  # at first\nselective_ac_option = "2"\n',
        },
    ),
    (
        TITAN,
        "run.toml",
        Patch(fields={OFFLOAD: True}),
        {"# what fits\n": "# what fits\nenable_cpu_offload = true\n"},
    ),
    (
        TITAN,
        "run.toml",
        Patch(fields=REPLICAS),
        {"degree = -1\n": "degree = -1\ndata_parallel_replicate_degree = 2\n"},
    ),
    (
        TITAN.replace("data_parallel_shard_degree = -1", "enable_compiled_autograd = false").replace(
            "local", "data_parallel_degree = 16  # before v0.1.0\nlocal"
        ),
        "run.toml",
        Patch(fields={"mesh": MeshSpec.of_degrees(8)}),
        {"degree = 16  # before": "degree = 8  # before"},
    ),
    (TITAN, "run.toml", Patch(fields={RESHARD: 2}), "groups of 2 ranks"),
    (ROLL, "run.yaml", Patch(fields=REPLICAS), {"fsdp_size: 16  # all": "fsdp_size: 8  # all"}),
    (
        ROLL,
        "run.yaml",
        Patch(fields=NONE),
        {
            "  device_mapping: list(range(0,16))\n": "  device_mapping: list(range(0,16))\n"
            "  model_args:\n    disable_gradient_checkpointing: true\n"
        },
    ),
    (ROLL, "run.yaml", Patch(fields={"mesh": MeshSpec.of_degrees(1, 16)}), "fsdp_size 1 means all ranks"),
    (ROLL, "run.yaml", Patch(fields={RESHARD: 3}), "does not divide the 16 ranks"),
    (ROLL, "run.yaml", Patch(fields=SECOND), "all layers or none"),
    (
        AXOLOTL,
        "run.yaml",
        Patch(fields={OFFLOAD: True}),
        {"params: false  # it": "params: true  # it"},
    ),
    (AXOLOTL, "run.yaml", Patch(fields={RESHARD: False}), "axolotl 0.12 to 0.14 exports true only"),
    # An equivalent key is replaced, and its other effects are preserved.
    (
        FOUNDRY.replace("FULL_SHARD", "NO_SHARD"),
        "run.yaml",
        Patch(fields=REPLICAS),
        {
            "sharding_strategy: NO_SHARD": "reshard_after_forward: false",
            "ing: false\n": "ing: false\n  data_parallel_shard_degree: 8\n  data_parallel_replicate_degree: 2\n",
        },
    ),
    (
        FOUNDRY.replace("FULL_SHARD", "NO_SHARD"),
        "run.yaml",
        Patch(fields={RESHARD: True}),
        {
            "sharding_strategy: NO_SHARD": "reshard_after_forward: true",
            "ing: false\n": "ing: false\n  data_parallel_shard_degree: 1\n  data_parallel_replicate_degree: -1\n",
        },
    ),
    (
        FOUNDRY.replace("ing: false", "ing: true\n  activation_checkpointing_policy: [A]\n  cpu_offload: true"),
        "run.yaml",
        Patch(fields={**NONE, OFFLOAD: False}),
        {"  activation_checkpointing: true\n  activation_checkpointing_policy: [A]\n  cpu_offload: true\n": ""},
    ),
    (
        FOUNDRY + "  cpu_offload: true  # slow\n",
        "run.yaml",
        Patch(fields={OFFLOAD: False}),
        {"offload: true": "offload: false"},
    ),
]


def test_a_wish_in_each_systems_own_words():
    """Otherwise users would have to apply a proposal by hand, or lose a comment beside the key."""
    for text, name, patch, expected in CASES:
        found = apply_patch(text, name, patch)
        if isinstance(expected, str):
            assert found.missing and expected in found.missing, (name, patch, found.missing)
            assert found.after == text
            assert not found.diff()
            continue
        after = text
        for old, new in expected.items():
            assert after.count(old) == 1, old
            after = after.replace(old, new)
        assert not found.missing, (name, patch)
        assert found.after == after, found.diff()
        assert found.changes
        assert apply_patch(after, name, patch).changes == ()


def test_what_only_fsdp2_has_words_for_is_written_in_a_migrated_file():
    """The report to DeepSpeed's users would be that nothing can be changed, although migrating enables it."""
    text = "distributed_type: DEEPSPEED\ndeepspeed_config: {zero_stage: 3}\nmixed_precision: bf16\nnum_processes: 8\n"
    found = apply_patch(text, "run.yaml", Patch(fields={RESHARD: False}))
    assert found.is_migrated
    assert found.before == text
    assert "fsdp_reshard_after_forward: false" in found.after
    assert "-distributed_type: DEEPSPEED" in found.diff()


def test_accelerate_s_replicas_need_fsdp2():
    """accelerate ignores a size beside FSDP1's keys, so the run would shard over all ranks."""
    text = ACCELERATE.replace("version: 2", "version: 1").replace("reshard_after_forward: true", "sharding_strategy: 1")
    found = apply_patch(text, "run.yaml", Patch(fields=REPLICAS))
    assert found.is_migrated
    assert "fsdp_version: 2" in found.after and "parallelism_config_dp_shard_size: 8" in found.after
    again = apply_patch(found.after, "run.yaml", Patch(fields={"mesh": MeshSpec.of_degrees(16)}))
    changes = {each.key.rpartition("config_")[2]: each.after for each in again.changes}
    assert changes == {"dp_replicate_size": 1, "dp_shard_size": 16}


def test_what_is_written_elsewhere_as_well_is_left():
    """Another part of the file refers to the section and would change with it."""
    text = "a:\n  fsdp_config: &x {sharding_strategy: FULL_SHARD}\nb: {fsdp_config: *x}\n"
    found = apply_patch(text, "run.yaml", Patch(fields={RESHARD: False}))
    assert "stands for something else" in found.missing
    assert found.after == text


VALUES: dict[str, list[dict[str, object]]] = {
    RESHARD: [{RESHARD: value} for value in (True, False, 2)],
    "mesh": [REPLICAS, {"mesh": MeshSpec.of_degrees(16)}],
    "activations": [NONE, ALL, SECOND, OFFLOADED],
    "cpu_offload": [{"cpu_offload": value} for value in (True, False)],
}
PATCHES = st.tuples(*(st.sampled_from([{}, *values]) for values in VALUES.values())).map(
    lambda chosen: Patch(fields={name: value for each in chosen for name, value in each.items()})
)


def test_a_key_that_refers_to_a_patched_one_would_change_too():
    """Another worker's batch size, or the evaluation's, would silently change; or a reference would point to a deleted
    key."""
    batch, text = ("device_train_microbatch_size",), "device_train_microbatch_size: 8\nfsdp_config: {}\n"
    assert apply_patch(text, "run.yaml", Patch(keys={batch: 4})).changes
    for line in (
        "device_eval_batch_size: ${device_train_microbatch_size}\n",
        "a: {b: '${.c}', c: '${..device_train_microbatch_size}'}\n",
    ):
        found = apply_patch(text + line, "run.yaml", Patch(keys={batch: 4}))
        assert "interpolation" in found.missing and found.after == text + line
    text = "fsdp_config:\n  sharding_strategy: FULL_SHARD\nvariables: {strategy: '${fsdp_config.sharding_strategy}'}\n"
    assert apply_patch(text, "run.yaml", Patch(fields={RESHARD: False})).missing
    # A value that cannot be edited in place is reported.
    text = "fsdp_config:\n  sharding_strategy: &strategy FULL_SHARD\nother: *strategy\n"
    assert apply_patch(text, "run.yaml", Patch(fields={RESHARD: False})).missing


@examples(80)
@given(ANY_FILE, PATCHES)
def test_every_file_has_the_patch_or_stays(file: File, patch: Patch) -> None:
    """Otherwise a proposal would change another setting of the run, or not take full effect."""
    name = f"run{file.suffix}"
    try:
        _, sections = find_sections(file.text, name)
        of, section = sections[0]
        before = of.read(section)
        found = apply_patch(file.text, name, patch)
    except ConfigError as error:  # no such file, or no section: the same error as migrate's
        event(type(error).__name__)
        return
    if found.missing:
        event("missing")
        assert found.after == file.text
        assert re.search(r"\w \w", found.missing)
        return
    event("written" if found.changes else "as it is")
    if not found.is_migrated:
        # ROLL turns checkpointing off in model_args, above its section.
        assert found.after.replace(", disable_gradient_checkpointing: true", "", 1).startswith(file.before)
        comments = re.findall(r"#[^\r\n\"']*", file.text)
        assert all(found.after.count(comment) >= comments.count(comment) for comment in comments)
    ((again, *_),) = [find_sections(found.after, name)[1]]
    after = again[0].read(again[1])
    assert before.run is not None and after.run is not None
    kept = {each.name for each in fields(before.run)} - {"config", "selective_checkpointing"}
    if not found.is_migrated:
        assert {each: getattr(after.run, each) for each in kept} == {each: getattr(before.run, each) for each in kept}
    assert apply_patch(found.after, name, patch).changes == ()
