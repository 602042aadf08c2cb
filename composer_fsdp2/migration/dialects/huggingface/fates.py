"""What becomes of a key where its value or another key decides it: from the usual finding to the one that holds."""

from collections.abc import Callable
from dataclasses import replace

from composer_fsdp2.config.findings import Finding, Outcome
from composer_fsdp2.config.rows import idle, undecided
from composer_fsdp2.fsdp1.parsing import ShardingStrategy
from composer_fsdp2.migration.dialects.huggingface.accelerate_words import SIZE_HINT, SIZE_REASON
from composer_fsdp2.migration.dialects.huggingface.held import Held, wrap_of
from composer_fsdp2.migration.dialects.huggingface.readers import Reader
from composer_fsdp2.migration.dialects.huggingface.values import WORDS_TEXT, Words, is_word_for_false
from composer_fsdp2.migration.run import WrapKind


def off(finding: Finding) -> Finding:
    return replace(finding, target="", reason="off, as by default", asks=False)


def of_switch(name: str) -> Callable[[Finding, Held], Finding]:
    """The fate of a key that asks for something while this setting is on."""
    return lambda finding, held: finding if held.settings[name] else off(finding)


def of_words(finding: Finding, held: Held) -> Finding:
    words: Words = held.settings["fsdp"]
    if words.ignored:
        return replace(
            finding,
            outcome=Outcome.NEEDS_DECISION,
            reason=f"of a list, transformers passes over what is not an option: {', '.join(words.ignored)}",
            hint=f"keep of {WORDS_TEXT} those that you mean",
        )
    if held.reader in (Reader.TRAINER_FSDP1, Reader.AXOLOTL_FSDP1):
        return of_strategy(finding, held)
    if held.reader is Reader.AXOLOTL_FSDP2:
        return finding
    if not (words.auto_wrap or finding.value is True or held.key_of("auto_wrap_policy")):
        return replace(
            finding,
            outcome=Outcome.APPROXIMATE,
            reason="without auto_wrap early releases of transformers 5 wrap nothing, later ones each layer",
            hint="set auto_wrap_policy in fsdp_config",
        )
    return finding


def of_strategy(finding: Finding, held: Held) -> Finding:
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


def of_version(finding: Finding, held: Held) -> Finding:
    if held.reader is not Reader.TRAINER_FSDP2:
        return finding
    return replace(finding, outcome=Outcome.APPROXIMATE, reason=VERSION_REASON, hint=VERSION_HINT)


def of_precision(finding: Finding, held: Held) -> Finding:
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


def of_type(finding: Finding, held: Held) -> Finding:
    reason = "turns DeepSpeed on, whose place FSDP2 takes"
    return replace(finding, reason=reason) if held.reader is Reader.ACCELERATE_DEEPSPEED else finding


def of_bf16(finding: Finding, held: Held) -> Finding:
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


def of_wrap(finding: Finding, held: Held) -> Finding:
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
    if held.reader is Reader.TRAINER_FSDP1 and "fsdp" not in held.around:
        return undecided(
            finding,
            reason="only auto_wrap in fsdp makes use of it, and whether that was given is not known here",
            hint="with auto_wrap: write fsdp here; without it the whole model was one unit: remove this key",
        )
    way = "auto_wrap in fsdp" if held.reader.is_transformers else f"auto_wrap_policy: {needed}"
    way = way if held.reader.is_trainer else f"fsdp_{way}"
    return undecided(
        finding,
        reason="no wrapping was asked for: the whole model was one unit, all of it gathered at once",
        hint=f"as trained: remove it; as written: {way}",
    )


def of_policy(finding: Finding, held: Held) -> Finding:
    settings = held.settings
    if settings["auto_wrap_policy"] == "SIZE_BASED_WRAP" and held.reader.is_fsdp2:
        return replace(finding, outcome=Outcome.UNSUPPORTED, reason=SIZE_REASON, hint=SIZE_HINT)
    if settings["auto_wrap_policy"] == "TRANSFORMER_BASED_WRAP" and not settings["transformer_layer_cls_to_wrap"]:
        return replace(finding, reason="the classes are those of the model's _no_split_modules")
    if wrap_of(settings).kind is WrapKind.ROOT:
        return replace(finding, reason="the whole model is one unit, all of it gathered at once")
    return finding


def of_backward_prefetch(finding: Finding, held: Held) -> Finding:
    if held.reader is Reader.AXOLOTL_FSDP1 and held.settings["backward_prefetch"] != "NO_PREFETCH":
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


def of_text(finding: Finding, held: Held) -> Finding:
    """A false in quotes, where any text is true."""
    if not (held.reader.is_transformers and isinstance(finding.value, str) and is_word_for_false(finding.value)):
        return finding
    return undecided(
        finding,
        reason="transformers treats any text as true, so that this was on",
        hint="as trained: true; as written: false, without quotes",
    )


def of_checkpointing(finding: Finding, held: Held) -> Finding:
    if not held.settings["activation_checkpointing"]:
        return off(finding)
    if (undecided_text := of_text(finding, held)) is not finding:
        return undecided_text
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
        return undecided(
            finding,
            reason="accelerate recomputes the modules that its policy wraps, and breaks where there is no policy",
            hint="set a policy, or recompute in the model",
        )
    return replace(
        finding,
        outcome=Outcome.APPROXIMATE,
        reason="without a policy accelerate wrapped every module by itself",
        hint="set a policy, so that the layers are recomputed as wholes",
    )


def of_gradient_checkpointing(finding: Finding, held: Held) -> Finding:
    if held.settings["gradient_checkpointing"] in ("offload", "offload_disk"):
        return replace(
            finding,
            target="activation_checkpointing, and activation_cpu_offload",
            reason="the layers are recomputed from inputs that rest in host memory, inside their units",
        )
    if held.reader is Reader.TRAINER_FSDP2 and held.settings["gradient_checkpointing"]:
        return replace(finding, outcome=Outcome.EXACT, reason="the model does it, under FSDP2 as before")
    return finding if held.settings["gradient_checkpointing"] else replace(off(finding), outcome=Outcome.EXACT)


def of_forward_prefetch(finding: Finding, held: Held) -> Finding:
    return replace(finding, hint="accelerate's FSDP2 has none") if held.settings["forward_prefetch"] else finding


def of_sync(finding: Finding, held: Held) -> Finding:
    if held.settings["sync_module_states"]:
        corrected = "accelerate set it to true, since cpu_ram_efficient_loading is on"
        return replace(
            finding,
            reason=corrected if is_word_for_false(finding.value) else finding.reason,
            hint="under accelerate's FSDP2 cpu_ram_efficient_loading: true does it, and nothing else",
        )
    return replace(finding, target="", reason="each rank begins with its own values, which must be the same")


def of_loading(finding: Finding, held: Held) -> Finding:
    if held.settings["cpu_ram_efficient_loading"]:
        hint = "where a target has no such word: LLM Foundry's init_device: mixed, with sync_module_states"
        return replace(finding, hint=hint)
    return replace(finding, target="", reason="off: each rank reads the weights itself")


def of_degree(finding: Finding, held: Held) -> Finding:
    return idle(finding, "1 has no effect") if finding.value == 1 else finding


def of_shards(finding: Finding, held: Held) -> Finding:
    return of_degree(finding, held) if held.reader.is_axolotl else finding


# Of ZeRO 3 FSDP is the form by units; 1 and 2 keep parameters, of which SHARD_GRAD_OP keeps less. By stage: the target,
# and the reason.
_KEPT_PARAMETERS = "SHARD_GRAD_OP: reshard_after_forward=False on one mesh of all ranks"
_STAGES = {
    0: ("2-D mesh with one rank on its shard axis", "stage 0 shards nothing: every rank keeps full parameters"),
    1: (
        _KEPT_PARAMETERS,
        "stage 1 shards the optimizer's state only; SHARD_GRAD_OP shards gradients too, and parameters between steps: "
        "the same numbers, less memory",
    ),
    2: (
        _KEPT_PARAMETERS,
        "parameters are kept from forward to backward; between steps they are sharded, which stage 2 does not do: the "
        "same numbers, less memory",
    ),
}


def of_stage(finding: Finding, held: Held) -> Finding:
    target, reason = _STAGES.get(held.settings["zero_stage"], (finding.target, finding.reason))
    return replace(finding, target=target, reason=reason)


def of_device(finding: Finding, held: Held) -> Finding:
    which = "optimizer" if "optimizer" in finding.key else "param"
    device = held.settings[f"offload_{which}_device"]
    if device == "none":
        return off(finding)
    if which == "param" and held.settings["zero_stage"] != 3:
        return idle(finding, "DeepSpeed offloads parameters under stage 3 only")
    if device == "nvme":
        return undecided(
            finding,
            reason="FSDP2 keeps nothing on a disk",
            hint="cpu, which needs the host memory; or none",
        )
    others = [held.settings[f"offload_{name}_device"] for name in ("optimizer", "param")]
    if others == ["cpu", "cpu"]:
        return replace(finding, outcome=Outcome.EXACT, reason="all of it rests in host memory, under FSDP2 as well")
    return finding


def of_zero3_init(finding: Finding, held: Held) -> Finding:
    if held.settings["zero_stage"] != 3 or not held.settings["zero3_init_flag"]:
        return idle(finding, "off, or without effect below stage 3")
    return finding


def of_clipping(finding: Finding, held: Held) -> Finding:
    return finding if held.settings["gradient_clipping"] else idle(finding, "0 clips nothing")


def of_steps(finding: Finding, held: Held) -> Finding:
    steps = held.settings["gradient_accumulation_steps"]
    if steps == 1:
        return idle(finding, "one microbatch, or what the script says")
    return undecided(
        finding,
        f"DeepSpeed took from here how many microbatches make a step; nothing else does, and without it the global "
        f"batch is {steps} times smaller",
        f"Accelerator(gradient_accumulation_steps={steps}) in the script, or ACCELERATE_GRADIENT_ACCUMULATION_STEPS="
        f"{steps} in its environment; in Composer a batch of {steps} device_train_microbatch_size; a Trainer's own "
        "gradient_accumulation_steps holds as before",
    )


def of_syncs(finding: Finding, held: Held) -> Finding:
    return finding if held.settings["accelerator_config"] else idle(finding, "nothing in it is about sharding")


def of_pinning(finding: Finding, held: Held) -> Finding:
    if held.settings["cpu_offload_pin_memory"]:
        return idle(finding, "pinned, as by default")
    return finding if held.settings["offload_params"] else idle(finding, "nothing is offloaded")


def of_last_checkpoint(finding: Finding, held: Held) -> Finding:
    if held.settings["final_state_dict_type"] == held.settings["state_dict_type"]:
        return idle(finding, "what state_dict_type says as well")
    return finding
