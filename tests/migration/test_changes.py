"""What is decided in the same way for every dialect: once, and only where a user has to act."""

from __future__ import annotations

import pytest
import yaml

from composer_fsdp2.config.findings import Finding, Outcome
from composer_fsdp2.migration.capabilities import CAPABILITIES
from composer_fsdp2.migration.dialects import DIALECTS
from composer_fsdp2.migration.migrate import Migration, migrate_text


def found(migration: Migration, key: str) -> Finding:
    (finding,) = [each for each in migration.sections[0].findings if each.key == key]
    return finding


def blocking(migration: Migration) -> list[str]:
    return [each.key for each in migration.blocking if each.key not in ("units", "activation_checkpointing")]


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


def test_a_refusal_is_told_once():
    """Three findings for one tensor parallelism look like three things to do."""
    migration = migrate_text(TITAN, "405b.toml")
    assert blocking(migration) == ["tensor_parallel_degree", "model.converters"]
    assert "tensor parallelism" not in [each.key for each in migration.sections[0].findings]
    detail = found(migration, "enable_async_tensor_parallel")
    assert not detail.outcome.blocks and "split layers" in detail.reason
    refused = found(migration, "tensor_parallel_degree")
    assert "layer_plan" in refused.hint  # what to write instead
    told = [each.key for each in migrate_text(ROLL, "run.yaml").sections[0].findings]
    assert told.count("ep_size") == 1 and "expert parallelism" not in told


def test_what_the_target_has_is_not_refused():
    """ROLL's context parallelism is TorchTitan's, too, by a ring; that its numbers round otherwise is told."""
    migration = migrate_text(ROLL.replace("ep_size: 4, efsdp_size: 2, ", ""), "run.yaml", to="torchtitan")
    kept = found(migration, "model_args.ulysses_size")
    assert kept.outcome is Outcome.APPROXIMATE and kept.target == "parallelism.context_parallel_degree: 2"
    assert "context_parallel_degree = 2" in migration.after
    assert migration.exit_code == 0


def test_a_row_asks_for_something_that_targets_answer():
    """A misspelt capability would leave the key's own words, whatever the target."""
    asked = {row.capability for dialect in DIALECTS.values() for row in dialect.rows if row.capability}
    assert asked and asked <= CAPABILITIES.keys()


def test_a_word_that_did_nothing_goes(monkeypatch: pytest.MonkeyPatch):
    """A dead key needs no decision; one letter away from a real one, it does."""
    migration = migrate_text("fsdp_config:\n  mixed_precision: PURE\n  zzz_pool: 3\n", "run.yaml")
    assert (found(migration, "zzz_pool").outcome, migration.exit_code) == (Outcome.UNNEEDED, 0)
    assert "zzz_pool" not in migration.after and "PURE" in migration.after
    assert migrate_text("fsdp_config:\n  mixed_precison: PURE\n", "run.yaml").exit_code == 1


INTERPOLATED = """\
fsdp_config:
  sharding_strategy: SHARD_GRAD_OP
  state_dict_type: ${oc.env:STATE_DICT_TYPE_OF_NOBODY}  # where it runs
  limit_all_gathers: ${oc.env:STATE_DICT_TYPE_OF_NOBODY}
  load_planner: ${oc.env:STATE_DICT_TYPE_OF_NOBODY}
"""


# By target, a file for it with a key that its system does not know, what goes, and what is told of the system.
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


def test_a_word_that_did_nothing_goes_where_the_system_stays_the_same():
    """TorchTitan's later releases refuse a file with a key that they do not know, and it was called ready."""
    for to, (text, gone, told) in DEAD.items():
        suffix = ".toml" if to == "torchtitan" else ".yaml"
        migration = migrate_text(text, "run" + suffix, to=to)
        key = "fsdp_config." * (to in ("accelerate", "axolotl")) + gone.split()[0].rstrip(":")
        finding = found(migration, key)
        assert (finding.outcome, finding.target, finding.hint) == (Outcome.UNNEEDED, "removed", ""), to
        assert told in finding.reason and migration.exit_code == 0, to
        assert migration.after == text.replace(gone, ""), to
        assert migrate_text(migration.after, "run" + suffix, to=to).after == migration.after, to


def test_a_word_in_the_place_of_a_mapping_is_not_dropped():
    """What it should have held is not known, and the file that came out trained with every default."""
    args = "strategy_args:\n  strategy_name: fsdp2_train\n"
    parallel = "fsdp: full_shard\nbf16: true\n"
    for text, to, key in (
        (args + "  strategy_config: 3\n", "composer", "strategy_config"),
        (args + "  strategy_config: some text\n", "roll", "strategy_config"),
        ("worker:\n  model_args: 3\n  " + args.replace("\n", "\n  "), "composer", "model_args"),
        (parallel + "fsdp_config: 3\n", "composer", "fsdp_config"),
        (parallel + "parallelism_config: 3\n", "accelerate", "parallelism_config"),
        ("distributed_type: FSDP\nfsdp_config: text\n", "accelerate", "fsdp_config"),
        ("parallelism = 3\n[activation_checkpoint]\nmode = 'full'\n", "composer", "parallelism"),
        ("compile = true\n[parallelism]\ndata_parallel_shard_degree = 2\n", "torchtitan", "compile"),
    ):
        migration = migrate_text(text, "run.toml" if " = " in text else "run.yaml", to=to)
        assert found(migration, key).outcome is Outcome.NEEDS_DECISION, text
        assert migration.exit_code == 1, text


def test_an_unset_variable_passes_through_where_nothing_depends_on_it():
    """A file whose variables are set on the cluster is migrated on a laptop."""
    migration = migrate_text(INTERPOLATED, "run.yaml")
    assert migration.exit_code == 0
    assert "state_dict_type: ${oc.env:STATE_DICT_TYPE_OF_NOBODY}  # where it runs\n" in migration.after
    assert "load_planner: ${oc.env:STATE_DICT_TYPE_OF_NOBODY}\n" in migration.after
    assert "limit_all_gathers" not in migration.after  # it did nothing, whatever its value
    assert "reshard_after_forward: false" in migration.after
    assert [each for each in migration.sections[0].findings if each.name == "(implicit) state_dict_type"] == []
    assert not migrate_text(migration.after, "run.yaml").is_changed


@pytest.mark.parametrize(
    ("text", "to"),
    [
        (INTERPOLATED, "roll"),  # what its state_dict_type becomes depends on it
        ("fsdp_config:\n  sharding_strategy: ${oc.env:NOBODY_S}\n", "composer"),
        (INTERPOLATED.replace("SHARD_GRAD_OP", "${oc.env:NOBODY_S}"), "composer"),
    ],
)
def test_an_unset_variable_that_decides_something_is_asked_about(text: str, to: str):
    """Guessing a strategy would train another run."""
    migration = migrate_text(text, "run.yaml", to=to)
    assert migration.exit_code == 1 and not migration.is_changed
    assert any("cannot be resolved" in each.reason for each in migration.blocking)


def test_a_roll_file_stays_one_with_variables():
    """Nothing of ROLL's own words is changed for ROLL, so no value has to be known."""
    text = ROLL.replace("fsdp_size: 8", "fsdp_size: '${oc.env:NOBODY_S}'")
    migration = migrate_text(text, "run.yaml", to="roll")
    assert (migration.exit_code, migration.is_changed) == (0, False)


def test_a_known_number_of_ranks_decides_an_open_degree():
    """16 ranks in groups of 8 are two replicas, and no question."""
    text = ROLL.replace("ep_size: 4, efsdp_size: 2, ", "").replace("{ulysses_size: 2}", "{}")
    migration = migrate_text(text.replace("range(0, 8)", "range(0, 16)"), "run.yaml", to="torchtitan")
    assert "data_parallel_replicate_degree = 2\ndata_parallel_shard_degree = 8\n" in migration.after
    assert migration.exit_code == 0
    unknown = migrate_text(text.replace("list(range(0, 8))", "list(range(0, N))"), "run.yaml", to="torchtitan")
    assert [each.key for each in unknown.blocking] == ["mesh"]


def test_units_of_experts_come_with_what_lets_idle_ones_run():
    """Without the second key ranks that skip idle experts would train on wrong gradients, or not at all."""
    policy = "apply_expert_patch: true, wrap_policy: {moe_experts: [Expert], transformer_layer_cls_to_wrap: [Layer]}"
    text = ROLL.replace("ep_size: 4, efsdp_size: 2, ", policy + ", ").replace("{ulysses_size: 2}", "{}")
    migration = migrate_text(text, "run.yaml")
    experts = found(migration, "wrap_policy.moe_experts")
    assert experts.outcome is Outcome.EXACT and migration.exit_code == 0
    section = yaml.safe_load(migration.after)["actor_train"]["fsdp_config"]
    assert section["wrap_policy"]["moe_experts"] == ["Expert"] and section["idle_experts"] == "in_order"
    kept = found(migrate_text(text, "run.yaml", to="roll"), "wrap_policy.moe_experts")
    assert kept.outcome is Outcome.EXACT
