"""Hugging Face's table of keys, and what becomes of a key where its value or another key decides it."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from composer_fsdp2.config.findings import Finding, Outcome
from composer_fsdp2.config.rows import ANY, Aspect, Row, idle
from composer_fsdp2.fsdp1.parsing import ShardingStrategy
from composer_fsdp2.migration.dialects.huggingface.accelerate_words import SIZE_HINT, SIZE_REASON
from composer_fsdp2.migration.dialects.huggingface.values import (
    A1,
    A2,
    AD,
    BF16,
    BOOL,
    CLASSES,
    COUNT,
    DEGREE,
    DEVICE,
    FLAG,
    NOBODY,
    NORM,
    OFFLOADING,
    POLICY,
    PRECISION,
    PREFETCH,
    RECOMPUTING,
    RESHARD,
    STAGE,
    STATE_DICT,
    STEPS,
    STRATEGY,
    SWITCHES,
    T1,
    T2,
    TRUTH,
    VERSION,
    WORDS,
    WORDS_TEXT,
    X1,
    X2,
    Reader,
    Words,
    is_word_for_false,
)
from composer_fsdp2.migration.run import Wrap, WrapKind


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenKey:
    """A key of the section, with its path from there, and whether the system reads it at that place."""

    key: str
    value: Any
    row: Row | None
    is_read: bool = True

    @property
    def is_off(self) -> bool:
        """Whether it says that there is to be none of it."""
        return self.row is not None and self.row.takes in SWITCHES and is_word_for_false(self.value)


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """What holds in the run, given or not, and by key what kept it from starting.

    Args:
        settings: By the names of the table.
        problems: By key: what is wrong with its value, and which would do.
    """

    reader: Reader
    given: tuple[GivenKey, ...]
    around: Mapping[str, Any]
    settings: dict[str, Any]
    problems: dict[str, str]

    def keys_of(self, *names: str) -> list[str]:
        """The keys that are read for one of these names of the table."""
        return [each.key for each in self.given if each.row is not None and each.is_read and each.row.name in names]

    def key_of(self, *names: str) -> str | None:
        """The key that set one of these; None if the file gives none of them."""
        keys = self.keys_of(*names)
        return keys[-1] if keys else None

    def value_of(self, key: str) -> Any:
        return next(each.value for each in self.given if each.key == key)

    @property
    def is_on_one_node(self) -> bool:
        """Whether a file of accelerate's says so, by num_machines, whose default is 1."""
        return not self.reader.is_trainer and self.around.get("num_machines", 1) in (None, 1)

    def asks_for_size(self) -> bool:
        """Whether any number of parameters that is read is above 0."""
        numbers = map(self.value_of, self.keys_of("min_num_params"))
        return any(isinstance(number, int | float) and number > 0 for number in numbers)


def wrap_of(settings: Mapping[str, Any]) -> Wrap:
    policy = settings["auto_wrap_policy"]
    if policy == "TRANSFORMER_BASED_WRAP":
        return Wrap(kind=WrapKind.CLASSES, classes=tuple(dict.fromkeys(settings["transformer_layer_cls_to_wrap"])))
    if policy == "SIZE_BASED_WRAP" and settings["min_num_params"] > 0:
        return Wrap(kind=WrapKind.SIZE, min_num_params=settings["min_num_params"])
    return Wrap(kind=WrapKind.ROOT)  # a size of 0 is passed over as well


# ---------------------------------------------------------------------------------------------------------------------
# Where the value decides


def _words_fate(finding: Finding, held: Held) -> Finding:
    words: Words = held.settings["fsdp"]
    if words.ignored:
        return replace(
            finding,
            outcome=Outcome.NEEDS_DECISION,
            reason=f"of a list, transformers passes over what is not an option: {', '.join(words.ignored)}",
            hint=f"keep of {WORDS_TEXT} those that you mean",
        )
    if held.reader in (T1, X1):
        return _strategy_fate(finding, held)
    if held.reader is X2:
        return finding
    if not (words.auto_wrap or finding.value is True or held.key_of("auto_wrap_policy")):
        return replace(
            finding,
            outcome=Outcome.APPROXIMATE,
            reason="without auto_wrap early releases of transformers 5 wrap nothing, later ones each layer",
            hint="set auto_wrap_policy in fsdp_config",
        )
    return finding


def _strategy_fate(finding: Finding, held: Held) -> Finding:
    strategy = held.settings["sharding_strategy"]
    if strategy is ShardingStrategy.NO_SHARD:
        return replace(
            finding,
            target="2-D mesh with one rank on its shard axis",
            reason="every rank keeps full parameters, gradients are averaged by one all-reduce",
            hint="accelerate's FSDP2 has no form for it: there DDP (distributed_type: MULTI_GPU) is the same run",
        )
    freed = "freed" if strategy.reshards_after_forward else "kept"
    mesh = "a 2-D mesh" if strategy.is_hybrid else "one mesh of all ranks"
    where = "; sharded within a node, replicated over nodes" if strategy.is_hybrid else ""
    if strategy.is_hybrid and held.is_on_one_node:
        mesh, where = "one mesh of all ranks", "; on one machine all ranks are one node, with nobody to replicate to"
    return replace(
        finding,
        target=f"reshard_after_forward={strategy.reshards_after_forward} on {mesh}",
        reason=f"parameters are {freed} after forward{where}",
    )


VERSION_REASON = "transformers 5 reads it; 4.51.3 does not, and trains with FSDP1"
VERSION_HINT = "under 4.51.3 launch with a configuration file of accelerate's that says fsdp_version: 2"


def _version_fate(finding: Finding, held: Held) -> Finding:
    if held.reader is not Reader.TRAINER_FSDP2:
        return finding
    return replace(
        finding,
        outcome=Outcome.APPROXIMATE,
        reason=VERSION_REASON,
        hint=VERSION_HINT,
    )


def _precision_fate(finding: Finding, held: Held) -> Finding:
    if held.settings["mixed_precision"] == "no":
        return replace(finding, target="", reason="no mixed precision")
    if held.settings["mixed_precision"] == "fp8":
        return replace(
            finding,
            outcome=Outcome.APPROXIMATE,
            hint="check that the fp8 library in use takes FSDP2",
            reason="FSDP takes bfloat16; the matrix products in fp8 are another library's",
        )
    return finding


def _type_fate(finding: Finding, held: Held) -> Finding:
    reason = "turns DeepSpeed on, whose place FSDP2 takes"
    return replace(finding, reason=reason) if held.reader is AD else finding


def _bf16_fate(finding: Finding, held: Held) -> Finding:
    match finding.value:
        case "auto":
            return replace(finding, hint="auto is true on every GPU that has bfloat16, and fp16 elsewhere")
        case "full":
            return replace(
                finding,
                outcome=Outcome.APPROXIMATE,
                target="mixed_precision: FULL, and parameters in bfloat16",
                reason="no autocast, and no dtype of FSDP's: parameters, gradients and the optimizer are bfloat16",
                hint="make the model in bfloat16, which no fsdp_config says",
            )
    return finding


def _fp8_fate(finding: Finding, held: Held) -> Finding:
    return finding if held.settings["fp8"] else off(finding)


def _wrap_fate(finding: Finding, held: Held) -> Finding:
    """Classes or a number that the policy has no use for."""
    policy = held.settings["auto_wrap_policy"]
    is_size = finding.key.endswith("min_num_params")
    needed = "SIZE_BASED_WRAP" if is_size else "TRANSFORMER_BASED_WRAP"
    if policy == needed:
        return finding
    if is_size and finding.value == 0:
        return idle(finding, "0 has no effect")
    if held.key_of("auto_wrap_policy") is not None:
        return idle(finding, f"not read under {policy}")
    if held.reader is T1 and "fsdp" not in held.around:
        return replace(
            finding,
            outcome=Outcome.NEEDS_DECISION,
            target="",
            reason="only auto_wrap in fsdp makes use of it, and whether that was given is not known here",
            hint="with auto_wrap: write fsdp here; without it the whole model was one unit: remove this key",
        )
    way = "auto_wrap in fsdp" if held.reader in (T1, T2) else f"auto_wrap_policy: {needed}"
    way = way if held.reader.is_trainer else f"fsdp_{way}"
    return replace(
        finding,
        outcome=Outcome.NEEDS_DECISION,
        target="",
        reason="no wrapping was asked for: the whole model was one unit, all of it gathered at once",
        hint=f"as trained: remove it; as written: {way}",
    )


def _policy_fate(finding: Finding, held: Held) -> Finding:
    settings = held.settings
    if settings["auto_wrap_policy"] == "SIZE_BASED_WRAP" and held.reader.is_fsdp2:
        return replace(finding, outcome=Outcome.UNSUPPORTED, reason=SIZE_REASON, hint=SIZE_HINT)
    if settings["auto_wrap_policy"] == "TRANSFORMER_BASED_WRAP" and not settings["transformer_layer_cls_to_wrap"]:
        return replace(finding, reason="the classes are those of the model's _no_split_modules")
    if wrap_of(settings).kind is WrapKind.ROOT:
        return replace(finding, reason="the whole model is one unit, all of it gathered at once")
    return finding


def _backward_prefetch_fate(finding: Finding, held: Held) -> Finding:
    if held.reader is X1 and held.settings["backward_prefetch"] != "NO_PREFETCH":
        return replace(
            finding,
            outcome=Outcome.APPROXIMATE,
            target="FSDP2's own prefetch",
            reason="axolotl's Trainer went by it up to 0.11; from 0.12 on axolotl drops it, and nothing was "
            "prefetched; no number depends on it",
            hint="one more unit is in memory at the peak; NO_PREFETCH spares it",
        )
    match held.settings["backward_prefetch"]:
        case "NO_PREFETCH":
            hint = "accelerate's FSDP2 always prefetches one: one more unit in memory"
            return replace(finding, reason="no unit is prefetched", hint=hint)
        case "BACKWARD_PRE":
            return replace(finding, target="", reason="FSDP2 does it by itself, in the order that forward ran in")
    return replace(
        finding,
        outcome=Outcome.APPROXIMATE,
        target="FSDP2's own prefetch",
        reason="FSDP2 gathers the next unit before a unit's gradients, not after",
        hint="one more unit is in memory at the peak; NO_PREFETCH spares it",
    )


def _text_fate(finding: Finding, held: Held) -> Finding:
    """A false in quotes, where any text is true."""
    if not (held.reader in (T1, T2) and isinstance(finding.value, str) and is_word_for_false(finding.value)):
        return finding
    return replace(
        finding,
        outcome=Outcome.NEEDS_DECISION,
        target="",
        reason="transformers treats any text as true, so that this was on",
        hint="as trained: true; as written: false, without quotes",
    )


def _checkpointing_fate(finding: Finding, held: Held) -> Finding:
    if not held.settings["activation_checkpointing"]:
        return off(finding)
    if (of_text := _text_fate(finding, held)) is not finding:
        return of_text
    kind = wrap_of(held.settings).kind
    if kind is WrapKind.CLASSES:
        return finding
    if kind is WrapKind.SIZE:
        return replace(
            finding,
            outcome=Outcome.APPROXIMATE,
            reason="accelerate recomputes the modules that its policy chose by size; here the layers that the model "
            "names are recomputed: the same numbers, another memory",
        )
    if held.reader.is_fsdp2:
        return replace(
            finding,
            outcome=Outcome.NEEDS_DECISION,
            target="",
            hint="set a policy, or recompute in the model",
            reason="accelerate recomputes the modules that its policy wraps, and breaks where there is no policy",
        )
    return replace(
        finding,
        outcome=Outcome.APPROXIMATE,
        reason="without a policy accelerate wrapped every module by itself",
        hint="set a policy, so that the layers are recomputed as wholes",
    )


def _gradient_checkpointing_fate(finding: Finding, held: Held) -> Finding:
    if held.settings["gradient_checkpointing"] in ("offload", "offload_disk"):
        return replace(
            finding,
            target="activation_checkpointing, and activation_cpu_offload",
            reason="the layers are recomputed from inputs that rest in host memory, inside their units",
        )
    if held.reader is Reader.TRAINER_FSDP2 and held.settings["gradient_checkpointing"]:
        return replace(finding, outcome=Outcome.EXACT, reason="the model does it, under FSDP2 as before")
    return finding if held.settings["gradient_checkpointing"] else replace(off(finding), outcome=Outcome.EXACT)


def _forward_prefetch_fate(finding: Finding, held: Held) -> Finding:
    return replace(finding, hint="accelerate's FSDP2 has none") if held.settings["forward_prefetch"] else finding


def _sync_fate(finding: Finding, held: Held) -> Finding:
    if held.settings["sync_module_states"]:
        corrected = "accelerate set it to true, since cpu_ram_efficient_loading is on"
        return replace(
            finding,
            reason=corrected if is_word_for_false(finding.value) else finding.reason,
            hint="under accelerate's FSDP2 cpu_ram_efficient_loading: true does it, and nothing else",
        )
    return replace(finding, target="", reason="each rank begins with its own values, which must be the same")


def _loading_fate(finding: Finding, held: Held) -> Finding:
    if held.settings["cpu_ram_efficient_loading"]:
        hint = "where a target has no such word: LLM Foundry's init_device: mixed, with sync_module_states"
        return replace(finding, hint=hint)
    return replace(finding, target="", reason="off: each rank reads the weights itself")


def _degree_fate(finding: Finding, held: Held) -> Finding:
    return idle(finding, "1 has no effect") if finding.value == 1 else finding


def _stage_fate(finding: Finding, held: Held) -> Finding:
    """Of ZeRO 3 FSDP is the form by units; ZeRO 1 and 2 keep parameters, of which SHARD_GRAD_OP keeps less."""
    match held.settings["zero_stage"]:
        case 0:
            return replace(
                finding,
                target="2-D mesh with one rank on its shard axis",
                reason="stage 0 shards nothing: every rank keeps full parameters",
            )
        case 1:
            return replace(
                finding,
                target="SHARD_GRAD_OP: reshard_after_forward=False on one mesh of all ranks",
                reason="stage 1 shards the optimizer's state only; SHARD_GRAD_OP shards gradients too, and parameters "
                "between steps: the same numbers, less memory",
            )
        case 2:
            return replace(
                finding,
                target="SHARD_GRAD_OP: reshard_after_forward=False on one mesh of all ranks",
                reason="parameters are kept from forward to backward; between steps they are sharded, which stage 2 "
                "does not do: the same numbers, less memory",
            )
    return finding


def _device_fate(finding: Finding, held: Held) -> Finding:
    which = "optimizer" if "optimizer" in finding.key else "param"
    device = held.settings[f"offload_{which}_device"]
    if device == "none":
        return off(finding)
    if which == "param" and held.settings["zero_stage"] != 3:
        return idle(finding, "DeepSpeed offloads parameters under stage 3 only")
    if device == "nvme":
        return replace(
            finding,
            outcome=Outcome.NEEDS_DECISION,
            target="",
            reason="FSDP2 keeps nothing on a disk",
            hint="cpu, which needs the host memory; or none",
        )
    others = [held.settings[f"offload_{name}_device"] for name in ("optimizer", "param")]
    if others == ["cpu", "cpu"]:
        return replace(finding, outcome=Outcome.EXACT, reason="all of it rests in host memory, under FSDP2 as well")
    return finding


def _zero3_init_fate(finding: Finding, held: Held) -> Finding:
    if held.settings["zero_stage"] != 3 or not held.settings["zero3_init_flag"]:
        return idle(finding, "off, or without effect below stage 3")
    return finding


def _zero3_save_fate(finding: Finding, held: Held) -> Finding:
    return finding if held.settings["zero3_save_16bit_model"] else off(finding)


def _clipping_fate(finding: Finding, held: Held) -> Finding:
    return finding if held.settings["gradient_clipping"] else idle(finding, "no norm is given here")


def _pinning_fate(finding: Finding, held: Held) -> Finding:
    if held.settings["cpu_offload_pin_memory"]:
        return idle(finding, "pinned, as by default")
    return finding if held.settings["offload_params"] else idle(finding, "nothing is offloaded")


def _last_checkpoint_fate(finding: Finding, held: Held) -> Finding:
    if held.settings["final_state_dict_type"] == held.settings["state_dict_type"]:
        return idle(finding, "what state_dict_type says as well")
    return finding


def _offloading_fate(finding: Finding, held: Held) -> Finding:
    return finding if held.settings["activation_offloading"] else off(finding)


def off(finding: Finding) -> Finding:
    return replace(finding, target="", reason="off, as by default", asks=False)


# ---------------------------------------------------------------------------------------------------------------------
# The table

# Where in a section keys stand.
SETTINGS, BESIDE, DEGREES, DEEPSPEED = "fsdp_config", "beside fsdp_config", "parallelism_config", "deepspeed_config"
_UNPREFIXED = "the same key without the prefix"
_KEPT = "accelerate reads it for FSDP2 as for FSDP1"


def _everywhere(value: Any) -> dict[Reader, Any]:
    return dict.fromkeys(Reader, value)


def _instead(trainer: str, launcher: str = "") -> dict[Reader, str]:
    """What does the same where a key is not read: in a Trainer's arguments for transformers 4.51.3, in a file of
    accelerate's."""
    ways = {T1: trainer, X1: trainer, A1: launcher, A2: launcher}
    return {reader: way for reader, way in ways.items() if way}


# A key of accelerate 1.12, with DeepSpeed's sequence parallelism.
SEQUENCE_DTYPE = "seq_parallel_communication_data_type"
_LAUNCHER = "belongs to DeepSpeed's launcher; torchrun and composer have their own words for the nodes"
# What nothing of FSDP2 depends on.
_OF_DEEPSPEED = (
    ("deepspeed_multinode_launcher", "who starts the processes of several nodes", _LAUNCHER),
    ("deepspeed_hostfile", "the nodes", _LAUNCHER),
    ("deepspeed_exclusion_filter", "nodes and GPUs to leave out", _LAUNCHER),
    ("deepspeed_inclusion_filter", "nodes and GPUs to take", _LAUNCHER),
    ("offload_optimizer_nvme_path", "where a disk takes the optimizer's state", "of use with the device nvme only"),
    ("offload_param_nvme_path", "where a disk takes parameters", "of use with the device nvme only"),
    (
        "deepspeed_moe_layer_cls_names",
        "layers that ZeRO 3 gathers as wholes, since ranks use other experts in them",
        "FSDP2 gathers units as wholes, whichever experts a rank uses",
    ),
    (
        SEQUENCE_DTYPE,
        "of what ranks of one sequence exchange",
        "belongs to DeepSpeed's sequence parallelism",
    ),
)

# fmt: off
_ROWS: tuple[Row, ...] = (
    Row(name="fsdp", takes=WORDS, group=BESIDE, aspect=Aspect.RESHARD, outcome=Outcome.EXACT,
        target="reshard_after_forward, the mesh, cpu_offload, the wrapped modules", read_by=(T1, T2, X1, X2),
        decide=_words_fate, meaning="turns FSDP on: the strategy, offload, auto_wrap",
        reason="each word has its form under FSDP2"),
    Row(name="distributed_type", takes=ANY, group=BESIDE, outcome=Outcome.EXACT, read_by=(A1, A2, AD),
        meaning="FSDP makes accelerate launch read fsdp_config, DEEPSPEED deepspeed_config",
        decide=_type_fate, reason="turns FSDP on; in accelerate's files fsdp_version tells FSDP2 apart"),
    Row(name="mixed_precision", takes=PRECISION, group=BESIDE, aspect=Aspect.PRECISION, outcome=Outcome.EXACT,
        target="mixed_precision: param_dtype and reduce_dtype alike", defaults=_everywhere("no"), read_by=(A1, A2, AD),
        decide=_precision_fate, meaning="autocast, and parameters, gradients and buffers of FSDP in this dtype",
        reason="gradients are reduced in the low dtype, too: accelerate gives all of the policy one dtype"),
    Row(name="bf16", takes=BF16, group=BESIDE, aspect=Aspect.PRECISION, outcome=Outcome.EXACT,
        target="mixed_precision: param_dtype and reduce_dtype bfloat16", defaults=_everywhere(False),
        read_by=(T1, T2, X1, X2), decide=_bf16_fate,
        meaning="autocast, and parameters, gradients and buffers of FSDP in bfloat16",
        reason="gradients are reduced in bfloat16, too: accelerate gives all of the policy one dtype"),
    Row(name="fp16", takes=FLAG, group=BESIDE, aspect=Aspect.PRECISION, outcome=Outcome.EXACT,
        target="mixed_precision: param_dtype and reduce_dtype float16", defaults=_everywhere(False),
        meaning="autocast with loss scaling, and parameters, gradients and buffers of FSDP in float16",
        reason="gradients are reduced in float16, too: accelerate gives all of the policy one dtype"),
    Row(name="fp8", takes=FLAG, group=BESIDE, aspect=Aspect.PRECISION, outcome=Outcome.APPROXIMATE,
        target="precision: amp_fp8; mixed_precision: bfloat16", defaults=_everywhere(False), read_by=(X1, X2),
        decide=_fp8_fate, meaning="matrix products in fp8, by torchao",
        reason="FSDP takes bfloat16; the matrix products in fp8 are another library's",
        hint="check that the fp8 library in use takes FSDP2"),
    Row(name="activation_offloading", takes=OFFLOADING, group=BESIDE, aspect=Aspect.CHECKPOINTING,
        outcome=Outcome.APPROXIMATE, target="activation_checkpointing, and activation_cpu_offload",
        defaults=_everywhere(False), read_by=(X1, X2), decide=_offloading_fate,
        meaning="layers are recomputed, from inputs that rest in host memory",
        reason="the same layers, inside their units; legacy and disk differ in how the inputs are moved"),
    Row(name="gradient_checkpointing", takes=RECOMPUTING, group=BESIDE, aspect=Aspect.CHECKPOINTING,
        outcome=Outcome.APPROXIMATE, target="activation_checkpointing", defaults=_everywhere(False),
        read_by=(T1, T2, X1, X2),
        decide=_gradient_checkpointing_fate,
        meaning="the model recomputes its layers in backward, from outside of their units",
        reason="the same layers are recomputed, but inside their units, which saves a second all-gather"),
    Row(name="gradient_checkpointing_kwargs", takes=ANY, group=BESIDE, aspect=Aspect.CHECKPOINTING,
        outcome=Outcome.EXACT, target="activation_checkpointing: reentrant or not", read_by=(T1, T2, X1, X2),
        meaning="which of torch's implementations recomputes (use_reentrant, true by default; false in axolotl)",
        reason="both implementations run inside a fully_shard unit"),
    Row(name="version", takes=VERSION, outcome=Outcome.EXACT, defaults={T1: 1, A1: 1, X1: 1, T2: 2, A2: 2, X2: 2},
        read_by=(A1, A2, T2, X1, X2), decide=_version_fate, meaning="which FSDP: 1, or 2",
        reason="which FSDP the file is for; in accelerate's words fsdp_version: 2"),
    Row(name="sharding_strategy", takes=STRATEGY, aspect=Aspect.RESHARD, outcome=Outcome.EXACT,
        target="reshard_after_forward and the mesh",
        defaults=dict.fromkeys((T1, A1, X1), ShardingStrategy.FULL_SHARD), read_by=(A1,),
        instead=_instead(trainer="the first word of fsdp", launcher="fsdp_reshard_after_forward, and "
        "parallelism_config for replicas"), decide=_strategy_fate,
        meaning="what is sharded, and when parameters are freed"),
    Row(name="reshard_after_forward", takes=RESHARD, aspect=Aspect.RESHARD, outcome=Outcome.EXACT,
        target="reshard_after_forward", defaults=_everywhere(True), read_by=(T2, A2, X2),
        instead=_instead(trainer="full_shard or shard_grad_op in fsdp", launcher="fsdp_sharding_strategy"),
        meaning="whether parameters are freed after forward; FSDP1 did not read it beside a strategy, which there "
        "always is", reason="FSDP2's own word"),
    Row(name="offload_params", aliases=("cpu_offload",), takes=BOOL, aspect=Aspect.OFFLOAD, outcome=Outcome.EXACT,
        target="CPUOffloadPolicy", defaults=_everywhere(False),
        read_by=(A1, A2, T2, X1, X2), instead=_instead(trainer="the word offload in fsdp"),
        meaning="parameters, gradients and the optimizer rest in host memory", reason="the same under FSDP2"),
    Row(name="auto_wrap_policy", takes=POLICY, aspect=Aspect.WRAP, outcome=Outcome.EXACT,
        target="the modules that fully_shard is called on",
        defaults={**dict.fromkeys((T1, A1, A2, X1, X2), "NO_WRAP"), T2: "TRANSFORMER_BASED_WRAP",
            AD: "TRANSFORMER_BASED_WRAP"},
        read_by=(A1, A2, T2, X1, X2), instead=_instead(trainer="the word auto_wrap in fsdp"), decide=_policy_fate,
        meaning="which modules become units of their own", reason="the same modules, each a unit"),
    Row(name="transformer_layer_cls_to_wrap", takes=CLASSES, aspect=Aspect.WRAP, outcome=Outcome.EXACT,
        target="fully_shard on each module of these classes", defaults=_everywhere(()),
        instead=_instead(trainer=_UNPREFIXED), decide=_wrap_fate,
        meaning="classes of the modules that become units; by default those of the model's _no_split_modules",
        reason="the same modules, each a unit"),
    Row(name="min_num_params", takes=COUNT, aspect=Aspect.WRAP, outcome=Outcome.EXACT,
        target="fully_shard on modules chosen by FSDP1's rule", defaults=_everywhere(0),
        instead=_instead(trainer=_UNPREFIXED), decide=_wrap_fate,
        meaning="under SIZE_BASED_WRAP, modules with at least so many parameters that no unit below them holds",
        reason="the same modules, each a unit"),
    Row(name="backward_prefetch", takes=PREFETCH, aspect=Aspect.BACKWARD_PREFETCH, outcome=Outcome.EXACT,
        target="prefetch in backward",
        defaults={**dict.fromkeys((T1, A1, X1), "NO_PREFETCH"), **dict.fromkeys((T2, A2, X2, AD), "BACKWARD_PRE")},
        read_by=(T1, A1, X1),
        checked_by=(A2,),
        instead=_instead(trainer=_UNPREFIXED, launcher="set_modules_to_backward_prefetch in the script"),
        decide=_backward_prefetch_fate, meaning="when backward gathers the next unit; not at all by default"),
    Row(name="forward_prefetch", takes=BOOL, aspect=Aspect.FORWARD_PREFETCH, outcome=Outcome.EXACT,
        target="set_modules_to_forward_prefetch, one unit ahead", defaults=_everywhere(False), read_by=(T1, A1),
        instead=_instead(trainer=_UNPREFIXED, launcher="set_modules_to_forward_prefetch in the script"),
        decide=_forward_prefetch_fate,
        meaning="forward prefetches the next unit, in the order of the first step",
        reason="each unit prefetches the next one, as FSDP1 did"),
    Row(name="state_dict_type", takes=STATE_DICT, aspect=Aspect.STATE_DICT, outcome=Outcome.EXACT,
        target="state_dict_type",
        defaults={**dict.fromkeys((T1, A1, T2, X1), "full"), **dict.fromkeys((A2, X2, AD), "sharded")},
        read_by=(A1, A2, T2, X1, X2), instead=_instead(trainer="FSDP_STATE_DICT_TYPE in the environment"),
        meaning="what checkpoints hold", reason=_KEPT),
    Row(name="sync_module_states", takes=BOOL, aspect=Aspect.SYNC, outcome=Outcome.EXACT,
        target="sync_module_states; in accelerate's FSDP2 cpu_ram_efficient_loading does it",
        defaults={**dict.fromkeys((T1, A1, X1, AD), True), **dict.fromkeys((T2, A2, X2), False)}, read_by=(T1, A1),
        instead=_instead(trainer=_UNPREFIXED, launcher="fsdp_cpu_ram_efficient_loading"), decide=_sync_fate,
        meaning="rank 0 sends its parameters and buffers to all others",
        reason="rank 0's values go out before training"),
    Row(name="cpu_ram_efficient_loading", takes=BOOL, aspect=Aspect.SYNC, outcome=Outcome.EXACT,
        target="cpu_ram_efficient_loading",
        defaults={**_everywhere(False), A1: True, A2: True},
        instead=_instead(trainer=_UNPREFIXED), decide=_loading_fate,
        meaning="only rank 0 reads a pretrained model's weights; the others get them from it", reason=_KEPT),
    Row(name="use_orig_params", takes=BOOL, outcome=Outcome.UNNEEDED, defaults=_everywhere(True),
        read_by=(T1, A1, X1), instead=_instead(trainer=_UNPREFIXED),
        meaning="parameters keep their own tensors instead of one flat one a unit",
        reason="FSDP2 has no flat parameter: each keeps its own tensor, whatever this says"),
    Row(name="limit_all_gathers", takes=TRUTH, outcome=Outcome.UNNEEDED, defaults=_everywhere(True),
        read_by=(T1, X1), instead=_instead(trainer=_UNPREFIXED),
        meaning="keeps the CPU from queueing more all-gathers than memory can hold",
        reason="FSDP2 bounds the memory of gathered parameters by itself, without blocking the CPU"),
    Row(name="activation_checkpointing", takes=TRUTH, aspect=Aspect.CHECKPOINTING, outcome=Outcome.EXACT,
        target="checkpoint_wrapper on the wrapped modules", defaults=_everywhere(False),
        instead=_instead(trainer=_UNPREFIXED), decide=_checkpointing_fate,
        meaning="wrapped modules are recomputed in backward, by torch's non-reentrant implementation",
        reason="the same modules, inside their units"),
    Row(name="ignored_modules", takes=ANY, outcome=Outcome.NEEDS_DECISION, target="ignored_params", read_by=(NOBODY,),
        instead=_instead(trainer="FullyShardedDataParallelPlugin(ignored_modules=...) in the script"),
        meaning="modules that stay out of FSDP: read from the plugin that a script builds, never from a file",
        reason="no configuration file sets it: accelerate takes modules themselves, from the script"),
    Row(name="mixed_precision_policy", takes=ANY, outcome=Outcome.NEEDS_DECISION, target="MixedPrecisionPolicy",
        read_by=(NOBODY,),
        instead=_instead(trainer="FullyShardedDataParallelPlugin(mixed_precision_policy=...) in the script"),
        meaning="the dtypes one by one: read from the plugin that a script builds, never from a file",
        reason="no configuration file sets it"),
    *(
        Row(
            name=name,
            takes=takes,
            meaning="for TPUs: torch_xla's own FSDP",
            outcome=Outcome.UNSUPPORTED,
            reason="torch_xla's FSDP is another system; FSDP2 has no form for it",
            defaults=_everywhere(None if takes is ANY else False),
            read_by=(T1, T2),
            instead=_instead(trainer=_UNPREFIXED),
            decide=_text_fate if takes is TRUTH else None,
        )
        for name, takes in (
            ("xla", TRUTH),
            ("xla_fsdp_v2", TRUTH),
            ("xla_fsdp_grad_ckpt", TRUTH),
            ("xla_fsdp_settings", ANY),
        )
    ),
    Row(name="dp_replicate_size", takes=DEGREE, group=DEGREES, aspect=Aspect.MESH, outcome=Outcome.EXACT,
        target="data_parallel_replicate_degree", defaults=_everywhere(1),
        meaning="so many replicas, each sharded over dp_shard_size ranks (FSDP2 only, accelerate 1.10)",
        reason="replicas average their gradients"),
    Row(name="dp_shard_size", takes=DEGREE, group=DEGREES, aspect=Aspect.MESH, outcome=Outcome.EXACT,
        target="data_parallel_shard_degree", defaults=_everywhere(1),
        meaning="over how many ranks parameters are sharded (FSDP2 only, accelerate 1.10)",
        reason="the ranks of one replica"),
    *(Row(name=name, takes=DEGREE, group=DEGREES, aspect=Aspect.MESH, meaning=f"{what} over so many ranks "
        "(accelerate 1.10)", outcome=Outcome.EXACT, reason="an axis of its own, beside the shards",
        defaults=_everywhere(1), decide=_degree_fate, capability=what) for name,
        what in (("tp_size", "tensor parallelism"), ("cp_size", "context parallelism"))),
    Row(name="ep_size", takes=DEGREE, group=DEGREES, aspect=Aspect.MESH, outcome=Outcome.EXACT,
        meaning="experts over so many ranks, by axolotl's plugin", reason="an axis of its own, beside the shards",
        defaults=_everywhere(1), read_by=(X1, X2), decide=_degree_fate, capability="expert parallelism"),
    Row(name="cpu_offload_pin_memory", takes=BOOL, outcome=Outcome.APPROXIMATE, target="pinned host memory",
        defaults=_everywhere(True), read_by=(X1, X2), decide=_pinning_fate,
        meaning="whether what rests in host memory is pinned, and so never swapped out",
        reason="offloaded shards are pinned here: faster copies, and the host needs the memory for them"),
    Row(name="final_state_dict_type", takes=STATE_DICT, outcome=Outcome.APPROXIMATE, target="state_dict_type",
        defaults=_everywhere(None), read_by=(X1, X2), decide=_last_checkpoint_fate,
        meaning="what the model that is saved at the end holds, if not what the checkpoints do",
        reason="one key says it for all checkpoints",
        hint="composer-fsdp2 checkpoint convert makes the other form of the last one"),
    Row(name="zero_stage", takes=STAGE, group=DEEPSPEED, aspect=Aspect.RESHARD, outcome=Outcome.APPROXIMATE,
        target="FULL_SHARD: reshard_after_forward=True on one mesh of all ranks", defaults=_everywhere(2),
        read_by=(AD,), decide=_stage_fate, meaning="what DeepSpeed shards: 1 the optimizer's state, 2 gradients too, 3 "
        "parameters too", reason="all is sharded by both; DeepSpeed gathers parameters one by one, within limits that "
        "it sets itself, FSDP2 unit by unit: the same numbers, other memory"),
    *(
        Row(name=f"offload_{what}_device", takes=DEVICE, group=DEEPSPEED, aspect=Aspect.OFFLOAD,
            outcome=Outcome.APPROXIMATE, target="CPUOffloadPolicy", defaults=_everywhere("none"), read_by=(AD,),
            decide=_device_fate, meaning=f"where {text}",
            reason="FSDP2 offloads parameters, gradients and the optimizer's state together")
        for what, text in (("optimizer", "the optimizer's state rests"), ("param", "parameters rest, under stage 3"))
    ),
    Row(name="zero3_init_flag", takes=BOOL, group=DEEPSPEED, aspect=Aspect.SYNC, outcome=Outcome.EXACT,
        target="sync_module_states", defaults=_everywhere(False), read_by=(AD,), decide=_zero3_init_fate,
        meaning="parameters are sharded while from_pretrained makes the model, so that no rank holds all of them",
        reason="DeepSpeed sends rank 0's values out, and so does sync_module_states",
        hint="where a rank has no memory for the whole model: init_device: mixed in LLM Foundry, meta in a script"),
    Row(name="zero3_save_16bit_model", takes=BOOL, group=DEEPSPEED, aspect=Aspect.STATE_DICT,
        outcome=Outcome.APPROXIMATE, target="state_dict_type", defaults=_everywhere(False), read_by=(AD,),
        decide=_zero3_save_fate, meaning="save_pretrained writes full weights, in 16 bits",
        reason="full checkpoints, in the parameters' own dtype"),
    Row(name="gradient_clipping", takes=NORM, group=DEEPSPEED, outcome=Outcome.EXACT, target="gradient clipping",
        defaults=_everywhere(None), read_by=(AD,), decide=_clipping_fate,
        meaning="to which norm DeepSpeed clips gradients", reason="the norm of all gradients, by both"),
    Row(name="gradient_accumulation_steps", takes=STEPS, group=DEEPSPEED, outcome=Outcome.EXACT,
        target="gradient_sync: every from stage 2 on, else last", defaults=_everywhere(1), read_by=(AD,),
        meaning="how many microbatches make a step", reason="stages 2 and 3 reduce gradients in each microbatch"),
    Row(name="deepspeed_config_file", takes=ANY, group=DEEPSPEED, outcome=Outcome.NEEDS_DECISION, read_by=(AD,),
        defaults=_everywhere(None), meaning="DeepSpeed's own settings, in a file of their own, which hold instead",
        reason="the settings are in another file, which is not read here",
        hint="write its zero_optimization.stage here as zero_stage, its offload_... as offload_optimizer_device and "
        "offload_param_device, and remove this"),
    *(
        Row(name=name, takes=ANY, group=DEEPSPEED, outcome=Outcome.UNNEEDED, read_by=(AD,),
            defaults=_everywhere(None), meaning=meaning, reason=reason)
        for name, meaning, reason in _OF_DEEPSPEED
    ),
)
# fmt: on
ROWS = tuple(replace(row, group=row.group or SETTINGS) for row in _ROWS)
SYNC_ROW = next(row for row in ROWS if row.name == "sync_module_states")
BY_PLACE = {(row.group, name): row for row in ROWS for name in (row.name, *row.aliases)}
PREFIX = "fsdp_"
# Arguments of a Trainer from the time before fsdp_config: their names have the prefix, and are read.
OLD_SIBLINGS = ("fsdp_transformer_layer_cls_to_wrap", "fsdp_min_num_params")
# For FSDP2 these say nothing, whatever their value.
WITHOUT_EFFECT = ("use_orig_params", "limit_all_gathers")
# By the name that axolotl has for it beside fsdp_config.
OF_AXOLOTL = {
    "fsdp_version": BY_PLACE[SETTINGS, "version"],
    **{name: BY_PLACE[DEGREES, name] for name in ("dp_shard_size", "dp_replicate_size")},
    "tensor_parallel_size": BY_PLACE[DEGREES, "tp_size"],
    **dict.fromkeys(("context_parallel_size", "sequence_parallel_degree"), BY_PLACE[DEGREES, "cp_size"]),
    "expert_parallel_size": BY_PLACE[DEGREES, "ep_size"],
}
# What accelerate reads of a configuration file, which it refuses as a whole for any other name.
OF_ACCELERATES_FILE = frozenset(
    """
    compute_environment distributed_type mixed_precision use_cpu debug num_processes machine_rank num_machines gpu_ids
    main_process_ip main_process_port rdzv_backend same_network main_training_function enable_cpu_affinity fp8_config
    deepspeed_config fsdp_config megatron_lm_config ipex_config mpirun_config downcast_bf16 tpu_name tpu_zone
    tpu_use_cluster tpu_use_sudo command_file commands tpu_vm tpu_env dynamo_config fp16 dynamo_backend
    parallelism_config
    """.split()  # noqa: SIM905
)
