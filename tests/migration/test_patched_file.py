"""A patch of a run is written into its file in the file's own keys, or is reported as unavailable."""

from __future__ import annotations

import re
from dataclasses import fields

from hypothesis import event, given
from hypothesis import strategies as st
from support.examples import examples

from composer_fsdp2.errors import ConfigError
from composer_fsdp2.migration.migrate import find_sections
from composer_fsdp2.migration.patch import Degrees, Microbatches, Patch, Recomputation
from composer_fsdp2.migration.patched_file import apply_patch
from tests.migration.generated import ANY_FILE, File

NONE = Recomputation(every=0, recompute=False, offload=False, blocks=(), num_blocks=4)
ALL = Recomputation(every=1, recompute=True, offload=False, blocks=(0, 1, 2, 3), num_blocks=4)
SECOND = Recomputation(every=2, recompute=True, offload=False, blocks=(1, 3), num_blocks=4)
OFFLOADED = Recomputation(every=1, recompute=True, offload=True, blocks=(0, 1, 2, 3), num_blocks=4)
TWO_ROWS = Microbatches(rows=2, number=4, global_rows=128)

# By file and patch, what the file says instead; "" for a line that goes.
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
CASES: list[tuple[str, str, Patch, dict[str, str] | str]] = [
    (FOUNDRY, "run.yaml", Patch(reshard_after_forward=False), {"FULL_SHARD  # as ever": "SHARD_GRAD_OP  # as ever"}),
    (
        FOUNDRY,
        "run.yaml",
        Patch(reshard_after_forward=4),
        {"  sharding_strategy: FULL_SHARD  # as ever": "  reshard_after_forward: 4  # as ever"},
    ),
    (
        FOUNDRY,
        "run.yaml",
        Patch(degrees=Degrees(shards=8, replicas=2)),
        {
            "  activation_checkpointing: false\n": "  activation_checkpointing: false\n"
            "  data_parallel_shard_degree: 8\n  data_parallel_replicate_degree: 2\n"
        },
    ),
    (
        FOUNDRY,
        "run.yaml",
        Patch(activations=SECOND),
        {
            "activation_checkpointing: false": "activation_checkpointing: true",
            "  n_layers: 4\n": "  n_layers: 4\n  activation_checkpointing_target:\n    mptblock: [1, 3]\n",
        },
    ),
    (FOUNDRY, "run.yaml", Patch(microbatches=TWO_ROWS), {"size: 8  # what fits": "size: 2  # what fits"}),
    (FOUNDRY.replace("mpt_causal", "hf_causal"), "run.yaml", Patch(activations=SECOND), "which blocks are recomputed"),
    (
        ACCELERATE,
        "run.yaml",
        Patch(reshard_after_forward=False),
        {"forward: true  # FULL_SHARD": "forward: false  # FULL_SHARD"},
    ),
    (ACCELERATE, "run.yaml", Patch(reshard_after_forward=4), "no group size"),
    (ACCELERATE, "run.yaml", Patch(activations=OFFLOADED), "host memory"),
    (ACCELERATE, "run.yaml", Patch(microbatches=TWO_ROWS), "training script"),
    (TRAINER, "run.yaml", Patch(reshard_after_forward=False), {'"full_shard auto_wrap"': "shard_grad_op auto_wrap"}),
    (TRAINER, "run.yaml", Patch(cpu_offload=True), {'"full_shard auto_wrap"': "full_shard auto_wrap offload"}),
    (
        TRAINER,
        "run.yaml",
        Patch(microbatches=TWO_ROWS),
        {"batch_size: 1": "batch_size: 2", "steps: 8  # 64 rows": "steps: 4  # 64 rows"},
    ),
    (TRAINER, "run.yaml", Patch(degrees=Degrees(shards=8, replicas=2)), "no degrees"),
    (
        TITAN,
        "run.toml",
        Patch(microbatches=TWO_ROWS),
        {"local_batch_size = 8  # what fits\n": "local_batch_size = 2  # what fits\nglobal_batch_size = 128\n"},
    ),
    (
        TITAN,
        "run.toml",
        Patch(activations=SECOND, reshard_after_forward=False),
        {
            "degree = -1\n": 'degree = -1\nfsdp_reshard_after_forward = "never"\n',
            'mode = "full"  # at first\n': 'mode = "selective"  # at first\nselective_ac_option = "2"\n',
        },
    ),
    (TITAN, "run.toml", Patch(cpu_offload=True), {"# what fits\n": "# what fits\nenable_cpu_offload = true\n"}),
    (TITAN, "run.toml", Patch(reshard_after_forward=2), "groups of 2 ranks"),
    (ROLL, "run.yaml", Patch(degrees=Degrees(shards=8, replicas=2)), {"fsdp_size: 16  # all": "fsdp_size: 8  # all"}),
    (
        ROLL,
        "run.yaml",
        Patch(activations=NONE),
        {
            "  device_mapping: list(range(0,16))\n": "  device_mapping: list(range(0,16))\n"
            "  model_args:\n    disable_gradient_checkpointing: true\n"
        },
    ),
    (ROLL, "run.yaml", Patch(activations=SECOND), "all layers, or none"),
    (ROLL, "run.yaml", Patch(microbatches=TWO_ROWS), {"size: 1\n": "size: 2\n", "steps: 8": "steps: 4"}),
]


def test_a_wish_in_each_systems_own_words():
    """A proposal would have to be carried over by hand, or a comment beside the key would be lost."""
    for text, name, patch, expected in CASES:
        found = apply_patch(text, name, patch)
        if isinstance(expected, str):
            assert found.missing and expected in found.missing[0], (name, patch, found.missing)
            assert found.after == text
            assert not found.diff()
            continue
        after = text
        for old, new in expected.items():
            assert after.count(old) == 1, old
            after = after.replace(old, new)
        assert found.missing == (), (name, patch)
        assert found.after == after, found.diff()
        assert found.changes
        assert apply_patch(after, name, patch).changes == ()


def test_what_only_fsdp2_has_words_for_is_written_in_a_migrated_file():
    """DeepSpeed's users would be told that nothing can be changed, where migrating does it."""
    text = "distributed_type: DEEPSPEED\ndeepspeed_config: {zero_stage: 3}\nmixed_precision: bf16\nnum_processes: 8\n"
    found = apply_patch(text, "run.yaml", Patch(reshard_after_forward=False))
    assert found.is_migrated
    assert found.before == text
    assert "fsdp_reshard_after_forward: false" in found.after
    assert "-distributed_type: DEEPSPEED" in found.diff()


def test_what_is_written_elsewhere_as_well_is_left():
    """Another part of the file, which refers to the section, would change with it."""
    text = "a:\n  fsdp_config: &x {sharding_strategy: FULL_SHARD}\nb: {fsdp_config: *x}\n"
    found = apply_patch(text, "run.yaml", Patch(reshard_after_forward=False))
    assert "stands for something else" in found.missing[0]
    assert found.after == text


PATCHES = st.builds(
    Patch,
    reshard_after_forward=st.sampled_from((None, True, False, 2)),
    degrees=st.sampled_from((None, Degrees(shards=8, replicas=2), Degrees(shards=16, replicas=1))),
    activations=st.sampled_from((None, NONE, ALL, SECOND, OFFLOADED)),
    microbatches=st.sampled_from((None, TWO_ROWS)),
    cpu_offload=st.sampled_from((None, True, False)),
)


@examples(80)
@given(ANY_FILE, PATCHES)
def test_every_file_has_the_patch_or_stays(file: File, patch: Patch) -> None:
    """A proposal would change something else of a run, or a run would get less than it was promised."""
    name = f"run{file.suffix}"
    try:
        _, sections = find_sections(file.text, name)
        of, section = sections[0]
        before = of.read(section)
        found = apply_patch(file.text, name, patch)
    except ConfigError as error:  # no such file, or nothing in it: as migrate says
        event(type(error).__name__)
        return
    if found.missing:
        event("missing")
        assert found.after == file.text
        assert all(re.search(r"\w \w", reason) for reason in found.missing)
        return
    event("written" if found.changes else "as it is")
    if not found.is_migrated:
        # ROLL says in model_args, above its section, that nothing is recomputed.
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
