"""FSDP1's keys and values as FSDP2 settings; the expectations come from Composer's code (0.32.1) and torch's
documentation."""

from __future__ import annotations

import copy
import dataclasses
import types
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from support.translations import config_of, refused
from torch.distributed.fsdp import (
    CPUOffload,
    CPUOffloadPolicy,
    MixedPrecision,
    MixedPrecisionPolicy,
    OffloadPolicy,
    ShardingStrategy,
)

from composer_fsdp2 import (
    ActivationCheckpointing,
    ConfigError,
    MeshSpec,
    Outcome,
    Prefetch,
    ShardingConfig,
    Translation,
    UnsupportedError,
    translate,
)
from composer_fsdp2.config.choices import UnitOverrides
from composer_fsdp2.config.sharding import GradientDtype
from composer_fsdp2.config.sharding import MixedPrecision as OurMixedPrecision
from composer_fsdp2.fsdp1.module_settings import read_overrides

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16


FLOAT, HALF, BFLOAT = "float32", "float16", "bfloat16"
LOW = {"fp32": FLOAT, "amp_fp16": HALF, "amp_bf16": BFLOAT, "amp_fp8": BFLOAT}

# --- supported values

STRATEGIES = [
    (None, -1, None, (4,), True),
    ("FULL_SHARD", -1, None, (4,), True),
    ("FULL_SHARD", 4, None, (4,), True),
    ("SHARD_GRAD_OP", -1, None, (4,), False),
    ("NO_SHARD", -1, None, (4, 1), False),
    ("NO_SHARD", 4, None, (4, 1), False),
    ("NO_SHARD", 1, 4, (4, 1), False),
    ("NO_SHARD", 1, -1, (4, 1), False),
    # Composer turns a hybrid strategy on a 1-D mesh into the plain one, and a plain one on a 2-D mesh into the
    # hybrid one (composer/distributed/dist_strategy.py, lines 331 to 344).
    ("HYBRID_SHARD", -1, None, (4,), True),
    ("_HYBRID_SHARD_ZERO2", -1, None, (4,), False),
    ("HYBRID_SHARD", -1, 2, (2, 2), True),
    ("HYBRID_SHARD", 2, -1, (2, 2), True),
    ("_HYBRID_SHARD_ZERO2", 2, 2, (2, 2), False),
    ("FULL_SHARD", -1, 2, (2, 2), True),
    ("SHARD_GRAD_OP", -1, 2, (2, 2), False),
    ("FULL_SHARD", -1, 1, (1, 4), True),
    ("FULL_SHARD", 1, -1, (4, 1), True),
    ("full_shard", -1, None, (4,), True),
    ("hybrid_shard", -1, 2, (2, 2), True),
]
STRATEGY_KEYS = ("sharding_strategy", "data_parallel_shard_degree", "data_parallel_replicate_degree")
# Composer's _get_torch_dtype (composer/distributed/mosaic_parallelism.py).
SPELLINGS = {
    F32: ["float32", "torch.float32", "fp32", F32],
    F16: ["float16", "torch.float16", "half", "fp16", "amp", "amp_fp16", F16],
    BF16: ["bfloat16", "bfloat", "torch.bfloat16", "bf16", "amp_bf16", "amp_fp8", BF16],
}
OFFLOADS = [
    ({}, False),
    ({"cpu_offload": False}, False),
    ({"cpu_offload": None}, False),
    ({"cpu_offload": True}, True),
    ({"cpu_offload": CPUOffload(offload_params=True)}, True),
    ({"cpu_offload": CPUOffload(offload_params=False)}, False),
    ({"cpu_offload": CPUOffloadPolicy(pin_memory=False)}, True),
    ({"offload_policy": CPUOffloadPolicy(pin_memory=False)}, True),
    ({"offload_policy": OffloadPolicy()}, False),
    ({"offload_policy": None}, False),
]
PREFETCHES = [
    ({}, Prefetch()),
    ({"backward_prefetch": "BACKWARD_PRE"}, Prefetch()),
    ({"backward_prefetch": "backward_post"}, Prefetch()),
    ({"backward_prefetch": "NONE"}, Prefetch(backward=0)),
    ({"backward_prefetch": "NONE", "backward_prefetch_limit": 3}, Prefetch(backward=0)),
    ({"backward_prefetch_limit": 3}, Prefetch(backward=3)),
    ({"forward_prefetch": True}, Prefetch(forward=1)),
    ({"forward_prefetch": True, "forward_prefetch_limit": 2}, Prefetch(forward=2)),
    ({"forward_prefetch_limit": 2}, Prefetch()),  # FSDP1 read the limit only if forward_prefetch was on
]
DEVICES = [
    ("gpu", "cuda"),
    ("cuda:1", "cuda"),
    (torch.device("cuda", 0), "cuda"),
    (torch.device("cpu"), "cpu"),
    (types.SimpleNamespace(name="gpu"), "cuda"),  # Composer's Device
    (types.SimpleNamespace(name="cpu"), "cpu"),
]
RESHARDS = [
    ({"reshard_after_forward": False}, False),
    ({"reshard_after_forward": True}, True),
    ({"reshard_after_forward": 2}, 2),
    ({"sharding_strategy": "FULL_SHARD", "reshard_after_forward": 2}, 2),
    ({"sharding_strategy": "SHARD_GRAD_OP", "reshard_after_forward": False}, False),
]


def mixed_precision_of(word: str | None, precision: str) -> OurMixedPrecision:
    """Composer's: get_mixed_precision in composer/distributed/mosaic_parallelism.py."""
    low = LOW[precision]
    dtypes = {"FULL": (None, None, None), "PURE": (low, low, low)}.get(word or "", (low, FLOAT, low))
    return OurMixedPrecision(**dict(zip(("param_dtype", "reduce_dtype", "buffer_dtype"), dtypes, strict=True)))


OF_HYBRID = {"sharding_strategy": "HYBRID_SHARD", "data_parallel_replicate_degree": 2}
RECOMPUTED = ("activation_checkpointing", "activation_cpu_offload", "activation_checkpointing_reentrant")
OF_FOUNDRY = {"param_dtype": "bf16", "reduce_dtype": "fp32", "buffer_dtype": "bf16", "keep_low_precision_grads": False}
# A section, the settings around it, and the expected configuration.
ASKED: list[tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = [
    # Memory and traffic do not change: SHARD_GRAD_OP keeps parameters unsharded, NO_SHARD replicates, HYBRID is 2-D.
    *(
        (
            {key: value for key, value in zip(STRATEGY_KEYS, written, strict=True) if value is not None},
            {},
            {"mesh.shape": shape, "reshard_after_forward": reshard},
        )
        for *written, shape, reshard in STRATEGIES
    ),
    # Without a world size, degrees remain open.
    (OF_HYBRID, {"world_size": None}, {"mesh": MeshSpec.of_degrees(replicate=2)}),
    (
        {"sharding_strategy": "NO_SHARD"},
        {"world_size": None},
        {"mesh": MeshSpec.of_degrees(shard=1, replicate=-1)},
    ),
    # FSDP2's own key is taken as it is, and an integer reshards to the ranks of a node.
    *((written, {}, {"reshard_after_forward": expected}) for written, expected in RESHARDS),
    *(
        (
            {} if word is None else {"mixed_precision": word},
            {"precision": precision},
            {"mixed_precision": mixed_precision_of(word, precision)},
        )
        for word in ("FULL", "DEFAULT", "PURE", "default", None)
        for precision in LOW
    ),
    # Masks and positions passed to a block keep their dtype, as under FSDP1 (MixedPrecision's defaults).
    (
        {},
        {"precision": "amp_bf16"},
        {"mixed_precision.cast_root_inputs": True, "mixed_precision.cast_forward_inputs": False},
    ),
    # A key missing from a dict keeps its default.
    *(
        (
            {"mixed_precision": {key: spelling}},
            {},
            {"mixed_precision": OurMixedPrecision(**{key: str(dtype).removeprefix("torch.")})},
        )
        for dtype, spellings in SPELLINGS.items()
        for spelling in spellings
        for key in ("param_dtype", "reduce_dtype", "buffer_dtype")
    ),
    ({"mixed_precision": OF_FOUNDRY}, {}, {"mixed_precision.param_dtype": BFLOAT}),
    *(({}, {"device": device, "precision": "fp32"}, {"mesh.device_type": name}) for device, name in DEVICES),
    *((written, {}, {"cpu_offload": expected}) for written, expected in OFFLOADS),
    *((written, {}, {"prefetch": expected}) for written, expected in PREFETCHES),
    # FSDP1's own MixedPrecision, passed by a script, keeps each of its fields.
    (
        {
            "mixed_precision": MixedPrecision(
                param_dtype=BF16, reduce_dtype=F32, buffer_dtype=F16, cast_root_forward_inputs=False
            )
        },
        {},
        {
            "mixed_precision": OurMixedPrecision(
                param_dtype=BFLOAT,
                reduce_dtype=FLOAT,
                buffer_dtype=HALF,
                cast_forward_inputs=False,
                cast_root_inputs=False,
            )
        },
    ),
    (
        {"mixed_precision": MixedPrecision(cast_forward_inputs=True)},
        {},
        {"mixed_precision.cast_forward_inputs": True},
    ),
    # FSDP1's key set to None or false, beside FSDP2's policy: the policy applies.
    (
        {"mixed_precision": None, "mp_policy": MixedPrecisionPolicy(param_dtype=BF16)},
        {},
        {"mixed_precision.param_dtype": BFLOAT},
    ),
    ({"cpu_offload": None, "offload_policy": CPUOffloadPolicy()}, {}, {"cpu_offload": True}),
    # FSDP1's default implementation, the reentrant one, is kept.
    (
        {},
        {},
        {
            "activation_checkpointing": ActivationCheckpointing(checkpoint=False, cpu_offload=False, reentrant=True),
            "sync_module_states": False,
        },
    ),
    (
        dict(zip(RECOMPUTED, (True, True, False), strict=True)),
        {},
        {"activation_checkpointing": ActivationCheckpointing(checkpoint=True, cpu_offload=True, reentrant=False)},
    ),
    ({"sync_module_states": True}, {}, {"sync_module_states": True}),
]


@pytest.mark.parametrize(("written", "options", "expected"), ASKED)
def test_what_a_section_asks_for(written: dict[str, Any], options: dict[str, Any], expected: dict[str, Any]):
    """The run trains in the same dtypes, memory and traffic as under FSDP1."""
    config = config_of(written, **options)
    for path, value in expected.items():
        found = attrgetter(path)(config)
        assert (type(found), found) == (type(value), value), path


def test_verbose():
    """The report is logged on request only."""
    assert translate({"verbose": True}, device="cpu").verbose and not translate({}, device="cpu").verbose


def test_precision_of_no_precision(monkeypatch: pytest.MonkeyPatch):
    """Without a precision the run trains in Composer's default for the device: amp_fp16 on CUDA, fp32 on the CPU."""
    assert translate({}, device="cpu").precision == "fp32"
    assert translate({}, device="cuda").precision == "amp_fp16"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert translate({}).precision == "amp_fp16"
    assert config_of({}, device=None).mesh.device_type == "cuda"


# --- refused values

DEGREES = [
    ({"data_parallel_shard_degree": 8}, 12, ["8", "world size is 12", "1, 2, 3, 4, 6 or 12"]),
    ({"data_parallel_replicate_degree": 8}, 12, ["world size 12", "replicate_degree 8", "1, 2, 3, 4, 6 or 12"]),
    ({"data_parallel_shard_degree": 3, "data_parallel_replicate_degree": 3}, 12, ["makes 9 ranks", "12"]),
    ({"data_parallel_shard_degree": -1, "data_parallel_replicate_degree": -1}, 12, ["both -1"]),
    ({"data_parallel_shard_degree": 0}, 12, ["data_parallel_shard_degree is 0"]),
    ({"reshard_after_forward": 3}, 4, ["reshard_after_forward 3", "1, 2 or 4"]),
    ({"reshard_after_forward": 4, "data_parallel_replicate_degree": 2}, 4, ["does not divide the 2 ranks"]),
]
WITHOUT_DTYPES = [
    ("PUR", ["FULL, DEFAULT, PURE", "did you mean PURE?"]),
    (None, ["mixed_precision is None"]),
    (7, ["mixed_precision is 7"]),
    (
        {"param_dtyp": "bf16"},
        ["fsdp_config.mixed_precision is {", "unknown key param_dtyp", "did you mean param_dtype?"],
    ),
    ({"param_dtype": "bfloat61"}, ["in which param_dtype is 'bfloat61'", "did you mean bfloat16?"]),
    ({"param_dtype": ["bf16"]}, ["in which param_dtype is ['bf16']"]),
    ({3: "bf16"}, ["unknown key 3"]),
]
OUTSIDE = [
    ({"sharding_strategy": "FULL_SHRD"}, ["FULL_SHRD", "did you mean FULL_SHARD?", "_HYBRID_SHARD_ZERO2"]),
    ({"backward_prefetch": "PRE"}, ["NONE, BACKWARD_PRE, BACKWARD_POST"]),
    ({"backward_prefetch_limit": 0}, ["backward_prefetch_limit is 0", "from 1 on"]),
    ({"forward_prefetch_limit": -1}, ["forward_prefetch_limit is -1"]),
    ({"state_dict_type": "local"}, ["'sharded'", "0.19"]),
    ({"state_dict_type": "whole"}, ["'full' or 'sharded'"]),
    ({"mp_policy": "PURE"}, ["give a MixedPrecisionPolicy"]),
]
CONTRADICTIONS = [
    ({"sharding_strategy": "FULL_SHARD", "reshard_after_forward": False}, ["freed", "reshard_after_forward False"]),
    ({"sharding_strategy": "SHARD_GRAD_OP", "reshard_after_forward": True}, ["kept"]),
    ({"sharding_strategy": "SHARD_GRAD_OP", "reshard_after_forward": 2}, ["kept"]),
    ({"sharding_strategy": "NO_SHARD", "reshard_after_forward": True}, ["kept"]),
    (
        {"mixed_precision": "PURE", "mp_policy": MixedPrecisionPolicy()},
        ["mixed_precision", "mp_policy", "keep one"],
    ),
    ({"cpu_offload": True, "offload_policy": OffloadPolicy()}, ["cpu_offload", "offload_policy", "keep one"]),
    ({"sharding_strategy": "NO_SHARD", "data_parallel_replicate_degree": 2}, ["NO_SHARD contradicts"]),
    ({"activation_cpu_offload": True, "use_orig_params": False}, ["use_orig_params"]),
]
MISTAKES = {
    "data_parallel_replicate_degree": 3,
    "mixed_precision": "HALF",
    "backward_prefetch_limit": 0,
    "state_dict_type": "whole",
    "cpu_offload": "yes",
    "activation_cpu_offload": True,
    "use_orig_params": False,
}
OF_DEVICES = "sharding runs on 'gpu' ('cuda') or 'cpu'"
REFUSED: list[tuple[Any, dict[str, Any], list[str]]] = [
    # After a change of the number of GPUs, the error lists the valid numbers.
    *((written, {"world_size": world_size}, parts) for written, world_size, parts in DEGREES),
    # A degree with too many zeros is refused at once, where the job would hang at its start.
    (
        {"data_parallel_shard_degree": 10**13, "reshard_after_forward": 7},
        {"world_size": None},
        ["10000000000000"],
    ),
    ({"data_parallel_shard_degree": 10**13}, {}, [str(10**13)]),
    # A misspelt dtype does not train in fp32 at twice the memory.
    *(({"mixed_precision": written}, {}, parts) for written, parts in WITHOUT_DTYPES),
    *(
        ({}, {"precision": precision}, [*parts, "fp32, amp_fp16, amp_bf16, amp_fp8"])
        for precision, parts in (
            ("bf16", ["'bf16'", "amp_bf16"]),
            ("amp_bf61", ["did you mean amp_bf16?"]),
            (3, ["3"]),
        )
    ),
    *(({}, {"device": device}, [OF_DEVICES, repr(device)]) for device in ("tpu", "mps", torch.device("meta"), 3)),
    *(
        (written, {}, ["true, false, a CPUOffload or an OffloadPolicy"])
        for written in ({"cpu_offload": "true"}, {"offload_policy": 1})
    ),
    *((written, {}, parts) for written, parts in OUTSIDE),
    ({"mixed_precision": None, "mp_policy": None}, {}, ["mixed_precision is None"]),
    # Of two contradicting settings, one would silently win.
    *((written, {}, parts) for written, parts in CONTRADICTIONS),
    # Ten mistakes are one edit, not ten queued jobs.
    (
        {"sharding_stratgy": "FULL_SHARD", "verbose": "yes", "colour": 1},
        {},
        [
            "fsdp_config.sharding_stratgy; did you mean sharding_strategy?",
            "fsdp_config.verbose is 'yes'",
            "unknown key fsdp_config.colour",
        ],
    ),
    (
        MISTAKES,
        {"precision": "bf16"},
        ["replicate_degree 3", "HALF", "limit is 0", "'whole'", "'yes'", "use_orig_params", "'bf16'"],
    ),
    # FSDPConfig accepts a misspelt key as well.
    (types.SimpleNamespace(sharding_stratgy="FULL_SHARD"), {}, ["did you mean sharding_strategy?"]),
    # A wrong argument is never read as an empty configuration.
    *(
        (source, {}, ["give a mapping, a composer FSDPConfig or an FSDP2Config"])
        for source in ("FULL_SHARD", 3, None, ["verbose"], types.SimpleNamespace, ShardingConfig(), len)
    ),
]


@pytest.mark.parametrize(("written", "options", "parts"), REFUSED)
def test_what_is_refused(written: Any, options: dict[str, Any], parts: list[str]):
    """Invalid and contradicting values are named together with the valid ones."""
    message = refused(written, **options)
    assert [part for part in parts if part not in message] == []


@pytest.mark.parametrize("written", [{"sharding_strategy": "SHARDED"}, {"backward_prefetch": "LATER"}])
def test_a_problem_is_named_once(written: dict[str, Any]):
    """The error has one line for each mistake."""
    lines = refused(written).splitlines()
    assert len(lines) == len(set(lines)) == 1
    assert len(refused({}, device="tpu", precision=None).splitlines()) == 1


# --- accepted forms


@dataclass
class LikeFSDP2Config:
    """Like Composer's FSDP2Config: a generated __init__ that sets every field."""

    device_mesh: Any = None
    reshard_after_forward: bool | int = True
    activation_checkpointing: bool = False
    state_dict_type: str = "sharded"
    mixed_precision: str = "DEFAULT"
    _sync_module_states: bool = field(default=False, init=False, repr=False)

    @property
    def sync_module_states(self) -> bool:
        return self._sync_module_states

    @property
    def use_orig_params(self) -> bool:
        return True


def keys_of(translation: Translation) -> list[str]:
    return [finding.key for finding in translation.findings]


@dataclass
class Other(LikeFSDP2Config):
    """A subclass with its own defaults. They apply, but the user did not set them."""

    reshard_after_forward: bool | int = False
    activation_checkpointing: bool = True


def test_a_configuration_is_read_for_what_was_said():
    """The report shows the user's settings, without a class's defaults. All keys of a mapping count as set, also those
    equal to the default. With Composer's own classes: tests/compat/test_keys_match_composer.py."""
    of_class = translate(Other(), device="cpu")
    assert of_class.config is not None and not of_class.findings
    assert of_class.config.activation_checkpointing.checkpoint and of_class.config.reshard_after_forward is False
    written = {"verbose": False, "sharding_strategy": "FULL_SHARD"}
    assert keys_of(translate(written, device="cpu")) == [*written]


def test_defaults_of_composers_fsdp2():
    """An empty FSDP2Config trains as under Composer's own FSDP2: checkpointing is not reentrant, and rank 0's values
    are broadcast to ranks without any (composer/distributed, 0.32.1)."""
    expected = dataclasses.replace(
        config_of({}),
        activation_checkpointing=ActivationCheckpointing(reentrant=False),
        sync_module_states=None,
        shard_below_unwrapped=True,
    )
    assert config_of(LikeFSDP2Config()) == expected


def test_omegaconf():
    """LLM Foundry's YAML sections are read directly, including interpolations and nested sections."""
    written = {"sharding_strategy": "${strategy}", "mixed_precision": {"param_dtype": "bf16"}}
    tree = OmegaConf.create({"strategy": "SHARD_GRAD_OP", "fsdp_config": written})
    assert config_of(tree.fsdp_config) == config_of(written | {"sharding_strategy": "SHARD_GRAD_OP"})
    assert config_of({"mixed_precision": tree.fsdp_config.mixed_precision}).mixed_precision.param_dtype == BFLOAT


def test_omegaconf_that_cannot_be_resolved():
    """A broken interpolation raises our error with its key, not OmegaConf's stack trace."""
    assert "nowhere" in refused(OmegaConf.create({"verbose": "${nowhere}"}))
    # A part of a file in a script's own mapping, or in an object made of it.
    for key, part in (
        ("wrap_policy", {"transformer_layer_cls_to_wrap": "???"}),
        ("wrap_policy", {"min_num_params": "${nowhere}"}),
        ("mixed_precision", {"param_dtype": "???"}),
        ("freeze", ["???"]),
    ):
        section = {key: OmegaConf.create(part)}
        for form in (section, types.SimpleNamespace(**section), OmegaConf.create({key: part})):
            text = refused(form)
            assert "cannot be resolved" in text and key in text, form
    inner = {"wrap_policy": {"transformer_layer_cls_to_wrap": OmegaConf.create(["???"])}}
    assert "fsdp_config.wrap_policy.transformer_layer_cls_to_wrap cannot be resolved" in refused(inner)


def test_nothing_is_changed():
    """A configuration object is not modified: it can be used for a second model or a log. For mappings see the
    properties."""
    config = types.SimpleNamespace(sharding_strategy="no_shard", mixed_precision={"param_dtype": "bf16"})
    before = copy.deepcopy(vars(config))
    translate(config, device="cpu", world_size=4)
    assert vars(config) == before


# --- findings

FLAT = {"use_orig_params": False, "fsdp1_metric_names": True}
TOLD: list[tuple[dict[str, Any], str, Outcome, str]] = [
    # LLM Foundry writes it into the dict (llmfoundry/utils/config_utils.py).
    (
        {"mixed_precision": OF_FOUNDRY},
        "mixed_precision.keep_low_precision_grads",
        Outcome.UNNEEDED,
        "never read it",
    ),
    # FSDP2 prefetches earlier than BACKWARD_POST did.
    ({"backward_prefetch": "BACKWARD_POST"}, "backward_prefetch", Outcome.APPROXIMATE, "NONE"),
    ({"backward_prefetch": "BACKWARD_PRE"}, "backward_prefetch", Outcome.EXACT, ""),
    # Without a degree there are no replicas; Composer only warned.
    (
        {"sharding_strategy": "HYBRID_SHARD"},
        "sharding_strategy",
        Outcome.APPROXIMATE,
        "data_parallel_replicate_degree",
    ),
    (OF_HYBRID, "sharding_strategy", Outcome.EXACT, ""),
    # With use_orig_params: false FSDP1's dashboards had one curve for each unit, which no key can restore.
    ({"fsdp1_metric_names": True}, "fsdp1_metric_names", Outcome.EXACT, ""),
    (FLAT, "fsdp1_metric_names", Outcome.APPROXIMATE, "_flat_param"),
    (FLAT | {"fsdp1_metric_names": False}, "fsdp1_metric_names", Outcome.EXACT, ""),
    *(
        ({key: value}, key, Outcome.EXACT, "")
        for key, value in (("keep_low_precision_grads", False), ("ignored_modules", None), ("process_group", None))
    ),
    # An old YAML still runs, and the report lists the lines that can be deleted.
    *(
        ({key: value}, key, Outcome.UNNEEDED, "")
        for key, value in [
            ("min_params", 1e8),
            ("flatten_parameters", True),
            ("load_fsdp_monolith_rank0_only", True),
            ("limit_all_gathers", False),
            ("use_orig_params", False),
            ("auto_wrap", False),
            ("te_checkpoint_wrapper", True),
            ("te_shard_fp8_weight", True),
        ]
    ),
]


@pytest.mark.parametrize(("written", "key", "outcome", "word"), TOLD)
def test_what_is_told_of_a_key(written: dict[str, Any], key: str, outcome: Outcome, word: str):
    """Users see the outcome of each key. Keys that FSDP2 does not need change nothing."""
    translation = translate(written, device="cpu", world_size=4, precision="fp32")
    (finding,) = [each for each in translation.findings if each.key == key]
    assert finding.outcome is outcome and word in f"{finding.reason} {finding.hint}"
    assert translation.config is not None
    if outcome is Outcome.UNNEEDED and len(translation.findings) == 1:
        assert translation.config == translate({}, device="cpu", world_size=4, precision="fp32").config


def test_what_cannot_be_carried_over_blocks():
    """Otherwise results would change silently. The rest of the file can still be planned, and strict changes
    nothing."""
    options = {"device": "cpu", "world_size": 4, "precision": "amp_fp8"}
    for strict in ({}, {"strict": True}, {"strict": False}):
        stopped = translate({"te_shard_fp8_weight": True} | strict, **options)
        assert stopped.config == translate({}, **options).config
        assert [(f.key, f.outcome) for f in stopped.blocking] == [("te_shard_fp8_weight", Outcome.UNSUPPORTED)]
        assert "not possible as it stands" in stopped.explain() and stopped.to_json()["possible"] is False
        assert ("deprecated" in stopped.explain()) == bool(strict)


def test_low_precision_gradients_inside_mixed_precision_are_found():
    """The same setting is reported once, from whichever key it came, and reaches the plan."""
    inside = MixedPrecision(param_dtype=BF16, keep_low_precision_grads=True)
    for outside in ({}, {"keep_low_precision_grads": True}, {"keep_low_precision_grads": False}):
        # FSDP1 read the object and ignored the key beside it.
        both = translate({"mixed_precision": inside, **outside}, device="cpu")
        assert sorted(keys_of(both)) == ["keep_low_precision_grads", "mixed_precision"]
        assert both.config is not None
        assert both.config.mixed_precision.gradients is GradientDtype.AS_REDUCED


def test_report_shows_each_key_and_the_result():
    """One report in the log covers all keys of the YAML."""
    text = str(translate({"sharding_strategy": "SHARD_GRAD_OP", "min_params": 1}, device="cpu", world_size=4))
    for part in ("sharding_strategy: SHARD_GRAD_OP", "min_params: 1", "unneeded", "data_parallel_shard 4"):
        assert part in text
    assert "reshard_after_forward: False" in text


# --- one module's own settings


def overrides_of(given: dict[str, Any], precision: str | None = None, **config: Any) -> UnitOverrides:
    of_model = ShardingConfig(mesh=MeshSpec.of_degrees(shard=4), **config)
    return read_overrides(given, "net.block", config=of_model, precision=precision)


UNIT_SETTINGS = [
    ({"sharding_strategy": "SHARD_GRAD_OP"}, {"reshard_after_forward": False}),
    ({"sharding_strategy": ShardingStrategy.FULL_SHARD}, {"reshard_after_forward": True}),
    ({"reshard_after_forward": 2}, {"reshard_after_forward": 2}),
    ({"backward_prefetch": "NONE"}, {"prefetch": Prefetch(backward=0)}),
    ({"backward_prefetch": None}, {"prefetch": Prefetch(backward=0)}),
    ({"backward_prefetch": "BACKWARD_PRE"}, {}),
    ({"forward_prefetch": True}, {"prefetch": Prefetch(forward=1)}),
    ({"forward_prefetch": False}, {}),
    ({"cpu_offload": CPUOffload(offload_params=True)}, {"cpu_offload": True}),
    ({"cpu_offload": False}, {"cpu_offload": False}),
    ({"limit_all_gathers": True, "use_orig_params": False}, {}),
]
UNIT_PREFETCHES = [
    (Prefetch(backward=0), {"backward_prefetch": "BACKWARD_PRE"}, Prefetch()),
    (Prefetch(backward=3), {"backward_prefetch": "BACKWARD_POST"}, None),
    (Prefetch(forward=2), {"forward_prefetch": True}, None),
    (Prefetch(forward=2), {"forward_prefetch": False}, Prefetch()),
    (Prefetch(forward=2, backward=3), {"backward_prefetch": "NONE"}, Prefetch(forward=2, backward=0)),
    (Prefetch(forward=2, backward=3), {"reshard_after_forward": False}, None),
]
OF_BUFFERS = {"precision": "amp_fp16", "mixed_precision": OurMixedPrecision(buffer_dtype=FLOAT)}
# A wrap function's return value, for a model with these settings, and the resulting change.
OF_UNITS: list[tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = [
    *((given, {}, changed) for given, changed in UNIT_SETTINGS),
    # The model's limit applies.
    *((given, {"prefetch": of_model}, {"prefetch": expected}) for of_model, given, expected in UNIT_PREFETCHES),
    # In another dtype than the rest: as FSDP1's object, as a dtype name at the run's precision, as FSDP2's object.
    (
        {"mixed_precision": MixedPrecision(param_dtype=F16)},
        {},
        {"mixed_precision": OurMixedPrecision(param_dtype=HALF)},
    ),
    (
        {"mixed_precision": "PURE"},
        {"precision": "amp_bf16"},
        {"mixed_precision": OurMixedPrecision(param_dtype=BFLOAT, reduce_dtype=BFLOAT, buffer_dtype=BFLOAT)},
    ),
    (
        {"mp_policy": MixedPrecisionPolicy(output_dtype=F32)},
        {},
        {"mixed_precision": OurMixedPrecision(output_dtype=FLOAT, cast_forward_inputs=True)},
    ),
    # A MixedPrecision also sets the dtype of the unit's buffers, even by omitting it; FSDP2's policy leaves buffers
    # alone.
    *(
        (given, OF_BUFFERS, {"mixed_precision.buffer_dtype": expected})
        for given, expected in (
            ({"mixed_precision": MixedPrecision(buffer_dtype=BF16)}, BFLOAT),
            ({"mixed_precision": MixedPrecision(param_dtype=BF16)}, None),
            ({"mixed_precision": "PURE"}, HALF),
            ({"mp_policy": MixedPrecisionPolicy(param_dtype=BF16)}, FLOAT),
        )
    ),
    ({"cpu_offload": True}, OF_BUFFERS, {"cpu_offload": True, "mixed_precision": None}),
]


@pytest.mark.parametrize(("given", "of_model", "changed"), OF_UNITS)
def test_unit_settings(given: dict[str, Any], of_model: dict[str, Any], changed: dict[str, Any]):
    """A model whose fsdp_wrap_fn returns FSDP1's keyword arguments keeps them for that module, and nothing else."""
    found = overrides_of(given, **of_model)
    assert {path: attrgetter(path)(found) for path in changed} == changed
    if not of_model:
        assert dataclasses.replace(found, notes=()) == UnitOverrides(given=given, **changed)


@pytest.mark.parametrize(
    ("written", "error", "parts"),
    [
        ({"shard_strategy": "X"}, ConfigError, ["'shard_strategy'", "did you mean sharding_strategy?"]),
        ({"sharding_strategy": "HYBRID_SHARD"}, ConfigError, ["HYBRID_SHARD", "data_parallel_replicate_degree"]),
        ({"reshard_after_forward": 3}, ConfigError, ["1, 2 or 4"]),
        ({"reshard_after_forward": "no"}, ConfigError, ["true, false or an integer"]),
        ({"sharding_strategy": "FULL_SHARD", "reshard_after_forward": False}, ConfigError, ["keep one"]),
        ({"mixed_precision": "FULL", "mp_policy": MixedPrecisionPolicy()}, ConfigError, ["keep one"]),
        ({"cpu_offload": True, "offload_policy": CPUOffloadPolicy()}, ConfigError, ["offload_policy", "keep one"]),
        ({"mp_policy": "FULL"}, ConfigError, ["mp_policy", "MixedPrecisionPolicy"]),
        (
            {"mixed_precision": "PURE"},
            ConfigError,
            ["PURE stands for dtypes that depend on the precision"],
        ),
        ({"forward_prefetch": "yes"}, ConfigError, ["forward_prefetch", "true or false"]),
        ({"process_group": "sets2"}, ConfigError, ["process_group", "'sets2'", "'setK'"]),
        ({"process_group": "self", "mesh": None}, ConfigError, ["process_group", "keep one"]),
        ({"device_mesh": object()}, ConfigError, ["device_mesh", "give a DeviceMesh"]),
        ({"mesh": [2, 2]}, ConfigError, ["mesh is [2, 2]", "give a DeviceMesh"]),
        ({"ignored_modules": []}, UnsupportedError, ["ignored_modules"]),
    ],
)
def test_unit_settings_that_cannot_be(written: dict[str, Any], error: type[Exception], parts: list[str]):
    """The error names the module whose wrap function returned the setting."""
    with pytest.raises(error) as caught:
        overrides_of(written)
    assert [part for part in ["'net.block'", *parts] if part not in str(caught.value)] == []
