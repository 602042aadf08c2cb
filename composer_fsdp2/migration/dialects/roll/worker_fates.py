"""What becomes of a key where its value or another key decides it."""

from dataclasses import replace

from composer_fsdp2.config.findings import Finding, Outcome
from composer_fsdp2.config.rows import idle, undecided
from composer_fsdp2.migration.dialects.roll.roll_words import MLPS, word_of
from composer_fsdp2.migration.dialects.roll.worker import Worker, frozen_in, reduced_in


def of_fsdp_size(finding: Finding, worker: Worker) -> Finding:
    size, ranks = worker["fsdp_size"], worker.num_ranks
    if size <= 1 or (ranks is not None and size >= ranks):
        of_all = f"all {ranks} ranks" if ranks is not None else "all ranks"
        return replace(finding, target="1-D mesh", reason=f"1 or less, or all ranks and more, is: over {of_all}")
    if ranks is not None:
        return replace(
            finding,
            target=f"mesh of {ranks // size} replicas x {size} shards",
            reason=f"{ranks} ranks make {ranks // size} groups, each with all parameters",
        )
    return replace(
        finding,
        outcome=Outcome.APPROXIMATE,
        target=f"mesh of replicas x {size} shards",
        reason="device_mapping does not say how many ranks there are; with this many or fewer ROLL makes no replicas",
        hint=f"with more than {size} ranks nothing is to be done, else set it to 1",
    )


def of_reduce_dtype(finding: Finding, worker: Worker) -> Finding:
    return replace(finding, value=worker.given.get("reduce_dtype") or word_of(reduced_in(worker)))


def of_reshard(finding: Finding, worker: Worker) -> Finding:
    if worker["reshard_after_forward"] is None:
        reason = "torch's own choice: freed in all units but the root"
        hint = "torch 2.7 takes no null here, so that ROLL fails with it: say true"
        return replace(finding, reason=reason, hint=hint)
    return finding


def of_offload(finding: Finding, worker: Worker) -> Finding:
    value = worker["offload_policy"]
    if isinstance(value, str) and value.lower() in ("false", "no", "off", "none", "0"):
        reason = "ROLL treats any text as true, so this run was offloaded"
        return undecided(finding, reason, "as trained: true; as written: false")
    if not value:
        return replace(finding, outcome=Outcome.UNNEEDED, target="", reason="nothing is offloaded")
    return finding


def of_embeddings(finding: Finding, worker: Worker) -> Finding:
    if worker["wrap_policy.wrap_embeddings"]:
        return finding
    return replace(
        finding,
        reason="against its guide, ROLL still makes each embedding a unit that is not tied to the output",
    )


def of_experts(finding: Finding, worker: Worker) -> Finding:
    if worker.wraps_experts:
        return finding
    return idle(finding, "ROLL wraps experts with apply_expert_patch or ep_size only, so here it did not")


def of_patch(finding: Finding, worker: Worker) -> Finding:
    if finding.asks and worker["wrap_policy.moe_experts"] is None:
        return idle(finding, "no expert is a unit of its own, so that all ranks gather the same without it")
    return finding


def of_mix(finding: Finding, worker: Worker) -> Finding:
    if worker.given.get("reduce_dtype") is None:
        return finding
    return replace(finding, outcome=Outcome.UNNEEDED, target="", reason="reduce_dtype is given, and takes precedence")


def of_async_save(finding: Finding, worker: Worker) -> Finding:
    if worker.is_training and not worker["async_save_ckpt"]:
        return replace(finding, target="", reason="training waits until a checkpoint is written")
    return (
        finding
        if worker.is_training
        else replace(finding, outcome=Outcome.UNNEEDED, target="", reason="nothing is saved")
    )


def of_ulysses(finding: Finding, worker: Worker) -> Finding:
    size, shards = worker["model_args.ulysses_size"], worker["fsdp_size"]
    if not (isinstance(size, int) and isinstance(shards, int) and shards < size):
        return finding
    if "fsdp_size" in worker.given:
        reason = f"ROLL fails with it, because fsdp_size {shards} is smaller: no run was trained so"
        return undecided(finding, reason, f"set fsdp_size to {size} or more, or ulysses_size to 1")
    hint = f"ROLL fails where fsdp_size is smaller, and its default is {shards}"  # or an interpolation, read elsewhere
    return replace(finding, outcome=Outcome.APPROXIMATE, hint=hint)


def of_freeze(finding: Finding, worker: Worker) -> Finding:
    """ROLL freezes each parameter whose name starts with a prefix; here a prefix ends at a dot."""
    names = frozen_in(worker)
    if not finding.asks:
        return finding
    if "" in map(str.strip, names):
        return undecided(finding, "an empty prefix freezes every parameter", "remove the comma, or name the modules")
    if names != [each.strip() for each in names]:
        reason = "releases of ROLL that keep the spaces around a comma freeze nothing by such a prefix"
        return undecided(finding, reason, "as written: remove the spaces; as such a release trained: remove the prefix")
    open_ = [each for each in names if not each.endswith(".")]
    if numbered := next((each for each in open_ if each[-1].isdigit()), None):
        reason = f"ROLL freezes all names that start with {numbered}, also those of {numbered}0; here it ends at a dot"
        return undecided(finding, reason, f"{numbered}. for this module alone; or name each of them")
    if not open_:
        return finding
    return replace(
        finding,
        outcome=Outcome.APPROXIMATE,
        reason=f"here {open_[0]} ends at a dot; ROLL also freezes {open_[0]}_2, if the model has such a name",
        hint="name the others, too, if there are any; a prefix with a dot at its end is the same in both",
    )


def of_tiling(finding: Finding, worker: Worker) -> Finding:
    if finding.outcome is not Outcome.EXACT or str(worker["model_type"]) in MLPS:
        return finding
    return replace(
        finding,
        outcome=Outcome.APPROXIMATE,
        target="",
        reason="model_type does not say which MLPs these are, so that they are computed in one piece: the same "
        "numbers, and more memory in long sequences",
        hint=f"name the model (model_type: {', '.join(MLPS)}), or the class in tiled_mlp",
    )


def of_checkpointing(finding: Finding, worker: Worker) -> Finding:
    if worker["model_args.disable_gradient_checkpointing"]:
        return replace(finding, outcome=Outcome.UNNEEDED, target="", reason="activations are kept")
    return replace(finding, reason="on unless it is disabled: each layer's activations are recomputed in backward")


def of_devices(finding: Finding, worker: Worker) -> Finding:
    if worker.num_ranks is None:
        return replace(
            finding,
            outcome=Outcome.APPROXIMATE,
            reason="it does not say how many devices there are without being run",
            hint="write it as a list or as list(range(FROM, TO))",
        )
    return replace(finding, reason=f"{worker.num_ranks} ranks")
