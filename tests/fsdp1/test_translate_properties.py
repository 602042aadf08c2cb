"""For every configuration, translation is deterministic and accounts for every key."""

from __future__ import annotations

import copy
import json
from types import SimpleNamespace
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf
from support.examples import examples
from torch import nn
from torch.distributed.fsdp import CPUOffload, CPUOffloadPolicy, MixedPrecision, MixedPrecisionPolicy, OffloadPolicy

from composer_fsdp2 import ConfigError, Outcome, ShardingConfig, Translation, translate
from composer_fsdp2.fsdp1.keys import KEYS, KEYS_BY_NAME

WORLD_SIZES = [None, 1, 2, 4]
PRECISIONS = ["fp32", "amp_fp16", "amp_bf16", "amp_fp8", None]
MODULE = nn.Linear(1, 1)

DTYPE_DICTS = st.dictionaries(
    st.sampled_from(["param_dtype", "reduce_dtype", "buffer_dtype"]), st.sampled_from(["bf16", "fp16", "fp32", None])
)
# The values of keys whose kind does not determine them. Plain values can be written in a YAML.
PLAIN: dict[str, st.SearchStrategy[Any]] = {
    "wrap_policy": st.sampled_from(
        [None, {"transformer_layer_cls_to_wrap": "auto", "wrap_embeddings": True}, {"min_num_params": "1e8"}]
    ),
    "activation_checkpointing_policy": st.sampled_from([None, "auto", ["Block"]]),
    "freeze": st.sampled_from([None, [], ["model.embed"]]),
    "context_parallel_degree": st.sampled_from([1, 1, 2]),
    "expert_parallel_degree": st.sampled_from([1, 1, 2]),
    "idle_experts": st.sampled_from([None, "in_order"]),
    "idle_towers": st.sampled_from([None, "auto", ["model.visual"], "model.visual"]),
    "sharding_strategy": st.sampled_from(
        ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "_HYBRID_SHARD_ZERO2", "full_shard"]
    ),
    "backward_prefetch": st.sampled_from(["NONE", "BACKWARD_PRE", "BACKWARD_POST", "backward_pre"]),
    "backward_prefetch_limit": st.integers(1, 4),
    "forward_prefetch_limit": st.integers(1, 4),
    "mixed_precision": st.sampled_from(["FULL", "DEFAULT", "PURE", "pure"]) | DTYPE_DICTS,
    "data_parallel_shard_degree": st.sampled_from([-1, -1, 1, 2, 4]),
    "data_parallel_replicate_degree": st.sampled_from([None, None, -1, 1, 2, 4]),
    "reshard_after_forward": st.sampled_from([True, False, 1, 2]),
    "gradient_sync": st.sampled_from(["every", "last", "defer_replica"]),
    "state_dict_type": st.sampled_from([None, "full", "sharded"]),
    "cpu_offload": st.none() | st.booleans(),
    "process_group": st.sampled_from([None, None, "self", "set2", "mod2", [0, 1], ["set2", "mod2"]]),
}
OBJECTS: dict[str, st.SearchStrategy[Any]] = {
    "mixed_precision": st.sampled_from(
        [MixedPrecision(), MixedPrecision(param_dtype=torch.bfloat16, keep_low_precision_grads=True)]
    ),
    "mp_policy": st.sampled_from([MixedPrecisionPolicy(), MixedPrecisionPolicy(reduce_dtype=torch.float32)]),
    "cpu_offload": st.sampled_from([CPUOffload(offload_params=True), CPUOffload()]),
    "offload_policy": st.sampled_from([OffloadPolicy(), CPUOffloadPolicy()]),
    "ignored_modules": st.sampled_from([[], [MODULE]]),
}
BY_KIND: dict[str, st.SearchStrategy[Any]] = {
    "true or false": st.booleans(),
    "a string or null": st.none() | st.text(max_size=5),
    "a number of seconds, or null": st.none() | st.floats(0.1, 100) | st.integers(1, 100),
    "any value": st.none(),
}
PLAIN_VALUES = {
    key.name: PLAIN[key.name] if key.name in PLAIN else BY_KIND.get(key.takes.text, BY_KIND["any value"])
    for key in KEYS
}
VALUES = {name: values | OBJECTS.get(name, st.nothing()) for name, values in PLAIN_VALUES.items()}


def mappings(values: dict[str, st.SearchStrategy[Any]]) -> st.SearchStrategy[dict[str, Any]]:
    """Some keys, in any order, each with a valid value."""
    names = st.lists(st.sampled_from(sorted(values)), unique=True, max_size=7)
    return names.flatmap(lambda chosen: st.fixed_dictionaries({name: values[name] for name in chosen}))


def answer_to(written: object, **options: Any) -> Translation | str:
    """The translation, or the message of the one permitted error."""
    try:
        return translate(written, **{"device": "cpu", **options})
    except ConfigError as error:
        return f"{type(error).__name__}: {error}"


def config_of(answer: Translation | str) -> ShardingConfig | None:
    return answer.config if isinstance(answer, Translation) else None


@given(mappings(VALUES), st.sampled_from(PRECISIONS), st.sampled_from(WORLD_SIZES), st.data())
@examples(100)
def test_no_key_is_lost(written: dict[str, Any], precision: str | None, world_size: int | None, data: st.DataObject):
    """A silently dropped setting would be found in the loss curve, or never: every key set by the user has its line in
    the report, and the run starts unless a line blocks it. Ranks read the same file and must decide alike. The order of
    its lines does not matter, and the user's mapping is not modified."""
    options = {"precision": precision, "world_size": world_size}
    before = copy.copy(written), {name: repr(value) for name, value in written.items()}
    answer = answer_to(written, **options)
    assert answer_to(written, **options) == answer
    assert list(written.items()) == list(before[0].items())
    assert {name: repr(value) for name, value in written.items()} == before[1]
    shuffled = answer_to({name: written[name] for name in data.draw(st.permutations(sorted(written)))}, **options)
    if isinstance(answer, str):
        assert any(name in answer for name in written), f"{answer} names nothing that was said"
        assert isinstance(shuffled, str) and sorted(shuffled.splitlines()) == sorted(answer.splitlines())
        return
    assert config_of(shuffled) == answer.config
    assert isinstance(shuffled, Translation)
    assert sorted(map(repr, shuffled.findings)) == sorted(map(repr, answer.findings))
    found = [finding.key for finding in answer.findings]
    assert [name for name in written if name not in found] == []
    # A MixedPrecision adds its own key; a part of a value is named after its key.
    brought = {"keep_low_precision_grads"} if isinstance(written.get("mixed_precision"), MixedPrecision) else set()
    assert {key.partition(".")[0] for key in found} <= written.keys() | brought
    for finding in answer.findings:
        assert isinstance(finding.outcome, Outcome)
        assert finding.reason
        assert finding.key in finding.where
        assert finding.key in answer.explain()
    is_blocked = any(finding.outcome.blocks for finding in answer.findings)
    assert answer.to_json()["possible"] == ("not possible" not in answer.explain()) == (not is_blocked)
    json.dumps(answer.to_json())


@given(mappings(PLAIN_VALUES), st.sampled_from(PRECISIONS), st.sampled_from(WORLD_SIZES))
@examples(60)
def test_every_form_says_the_same(written: dict[str, Any], precision: str | None, world_size: int | None):
    """A YAML, a dict in a script and a configuration object train alike."""
    options = {"precision": precision, "world_size": world_size}
    plain = answer_to(written, **options)
    assert answer_to(OmegaConf.create(written), **options) == plain
    # An object without a sharding_strategy is an FSDP2Config, with other defaults.
    whole = {"sharding_strategy": "FULL_SHARD"} | written
    of_mapping, of_object = answer_to(whole, **options), answer_to(SimpleNamespace(**whole), **options)
    assert config_of(of_object) == config_of(of_mapping)
    assert isinstance(of_object, str) == isinstance(of_mapping, str)


# Setting these has an effect even with the default value. reshard_after_forward and sharding_strategy must not
# contradict each other, and each determines the other if that is not set. load_monolith_rank0_only requires
# sync_module_states unless that is set.
MATTERS_TO_SAY = {"sharding_strategy", "reshard_after_forward", "sync_module_states"}
# Only one of two equivalent keys may be set, whatever its value.
SYNONYMS = {"cpu_offload": "offload_policy", "mixed_precision": "mp_policy"}


@given(mappings(VALUES), st.sampled_from(sorted(KEYS_BY_NAME.keys() - MATTERS_TO_SAY)), st.sampled_from(WORLD_SIZES))
@examples(100)
def test_a_default_may_be_said(written: dict[str, Any], name: str, world_size: int | None):
    """A configuration with every default written out trains like one without them."""
    written = {key: value for key, value in written.items() if key not in (name, SYNONYMS.get(name))}
    options = {"precision": "amp_bf16", "world_size": world_size}
    without, with_default = (
        answer_to(mapping, **options) for mapping in (written, written | {name: KEYS_BY_NAME[name].default})
    )
    if isinstance(without, str) or isinstance(with_default, str):
        assert isinstance(without, str) == isinstance(with_default, str), f"{without}; with {name}: {with_default}"
    else:
        assert with_default.config == without.config
