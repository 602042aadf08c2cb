"""Migrate DeepSpeed's JSON file, which another file references, or which is migrated alone.

The reference is replaced by DeepSpeed's settings under keys of the referencing file's system. This text is then
migrated as any other. Findings name the keys of the JSON. Called by ``migrate_text``; does not read the disk.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from composer_fsdp2.config.findings import Finding, Origin, Outcome
from composer_fsdp2.config.text import printable
from composer_fsdp2.errors import ConfigError
from composer_fsdp2.migration.dialect import Section, implicit
from composer_fsdp2.migration.dialects.fingerprints import is_axolotls_deepspeed, is_deepspeeds
from composer_fsdp2.migration.dialects.huggingface.huggingface import HuggingFaceDialect
from composer_fsdp2.migration.dialects.huggingface.values import STATE_DICTS
from composer_fsdp2.migration.documents import Document, nearest_line, open_document
from composer_fsdp2.migration.paths import Path, Settings, has_path, value_at
from composer_fsdp2.migration.targets import file_text

# Function that returns the text of the file at a path; None if it does not exist.
ReadsFile = Callable[[str], str | None]

# By accelerate's key: the value of ``auto`` in its DeepSpeedPlugin (1.8.1), DeepSpeed's default where it differs from
# accelerate's, and the paths in the JSON, names of earlier releases last.
_ZERO = "zero_optimization"
_SAVING = ("stage3_gather_16bit", "gather_16bit", "stage3_gather_fp16")
_KEYS: dict[str, tuple[Any, Any, tuple[str, ...]]] = {
    "zero_stage": (2, 0, (f"{_ZERO}.stage",)),
    "offload_optimizer_device": ("none", None, (f"{_ZERO}.offload_optimizer.device", f"{_ZERO}.cpu_offload")),
    "offload_param_device": ("none", None, (f"{_ZERO}.offload_param.device", f"{_ZERO}.cpu_offload_param")),
    "zero3_save_16bit_model": (False, None, tuple(f"{_ZERO}.{each}_weights_on_model_save" for each in _SAVING)),
    "gradient_clipping": (None, 0, ("gradient_clipping",)),
    "gradient_accumulation_steps": ("auto", None, ("gradient_accumulation_steps",)),
}
# accelerate raises if its file has one of these beside deepspeed_config_file.
_REFUSED = (*_KEYS, "offload_param_nvme_path")
_OPENED = (_ZERO, "offload_optimizer", "offload_param", "bf16", "fp16")
_BATCHES = ("train_batch_size", "train_micro_batch_size_per_gpu")
# Keys that are also arguments of a Trainer, which axolotl creates; both must agree.
_OF_TRAINERS = ("gradient_clipping", "gradient_accumulation_steps", "bf16.enabled", "fp16.enabled", *_BATCHES)
# DeepSpeed's keys for communication, buffers and logging, without the prefix stage3_.
_SPEED = frozenset(
    """
    aio allgather_bucket_size allgather_partitions allgather_sequential autotuning buffer_count buffer_size
    check_grad_overflow checkpoint comms_logger contiguous_gradients cpu_offload_use_pin_memory disable_allgather
    dump_state elastic_checkpoint enable_sanity_checks fast_init flops_profiler gradient_predivide_factor
    graph_harvesting ignore_unused_parameters immediate_grad_update leaf_module legacy_stage1 load_from_fp32_weights
    log_trace_cache_warnings max_in_cpu max_live_parameters max_reuse_distance memory_breakdown
    memory_efficient_linear mics_hierarchical_params_gather model_persistence_threshold module_granularity_threshold
    nebula nvme_path overlap_comm override_module_apply param_persistence_threshold partition_stream_chunk_size
    pin_memory pipeline pipeline_loading_checkpoint pipeline_read pipeline_write prefetch_bucket_size
    prescale_gradients ratio reduce_bucket_size reduce_scatter round_robin_gradients steps_per_print sub_group_size
    timers use_all_reduce_for_fetch_params use_multi_rank_bucket_allreduce wall_clock_breakdown
    zero_allow_untested_optimizer zero_force_ds_cpu_optimizer zero_hpz_partition_size
    """.split()  # noqa: SIM905
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Json:
    """DeepSpeed's settings at ``path`` in a document."""

    document: Document
    path: Path = ()
    to: str = ""

    def at(self, key: str) -> Any:
        """Return the value of a key; None if it is absent."""
        path = (*self.path, *key.split("."))
        return value_at(self.document.values, path) if has_path(self.document.values, path) else None

    def precision(self) -> str | None:
        """Return accelerate's name of the precision; None if it is float32, or set by the script."""
        return next((name for name in ("bf16", "fp16") if self.at(f"{name}.enabled") is True), None)

    def named(self, finding: Finding, key: str) -> Finding:
        line = nearest_line(self.document, (*self.path, *key.split(".")))
        given = self.at(key) if finding.origin is Origin.KEY else None
        value = finding.value if given is None else printable(given) if isinstance(given, str) else given
        return replace(finding, key=printable(key), value=value, where=f"{self.document.name}:{line}")


# Rules for keys without a counterpart in accelerate's file; the first that applies is used.
_Rule = tuple[Callable[[_Json, str, Any], Any], Outcome, str, str]
_IDLE, _NEAR = Outcome.UNNEEDED, Outcome.APPROXIMATE
# fmt: off
_RULES: tuple[_Rule, ...] = (
    (lambda json, key, value: value is False, _IDLE, "off", ""),
    (lambda json, key, value: value == "auto" and key.endswith(".enabled")
        and (json.precision() or (key == "fp16.enabled" and json.at("bf16.enabled") == "auto")), _IDLE,
        "the other dtype decides", ""),
    (lambda json, key, value: value == "auto" and key.endswith(".enabled") and json.to == "accelerate", _NEAR,
        "the script decides the dtype, as before", ""),
    (lambda json, key, value: value == "auto" and key.endswith(".enabled"), Outcome.NEEDS_DECISION,
        "auto leaves the dtype to the script (a Trainer's bf16 or fp16, Accelerator's mixed_precision)",
        "write true instead of auto for the dtype of the run, or false for float32"),
    (lambda json, key, value: key.startswith("fp16.") and json.at("fp16.enabled") is not True, _IDLE,
        "a detail of fp16, which is not on", ""),
    (lambda json, key, value: key.startswith("fp16."), _NEAR, "torch's GradScaler scales the loss, dynamically", ""),
    (lambda json, key, value: _is_off(value), _IDLE, "off", ""),
    (lambda json, key, value: key.rpartition(".")[2].removeprefix("stage3_") in _SPEED, _IDLE,
        "of DeepSpeed's communication, buffers and logs: no number depends on it", ""),
    (lambda json, key, value: key in _BATCHES and value == "auto", _IDLE, "the script's DataLoader decides", ""),
    (lambda json, key, value: key in _BATCHES, _NEAR, "a script's DataLoader decides, and must agree with it",
        "where DeepSpeed makes the DataLoader: global_train_batch_size and device_train_microbatch_size in Composer"),
    (lambda json, key, value: key == "gradient_clipping", Outcome.EXACT,
        "auto: a Trainer's max_grad_norm, or 1 with accelerate alone", ""),
    (lambda json, key, value: key == "optimizer" and _is_scripts(value), _NEAR,
        "AdamW with the script's own numbers (auto)",
        "a Trainer creates it; replace accelerate's DummyOptim by torch.optim.AdamW"),
    (lambda json, key, value: True, Outcome.NEEDS_DECISION, "DeepSpeed reads it here, and FSDP2 has no such setting",
        "set up in the new run what it does, and remove it"),
)
_TRAINERS_RULE: _Rule = (lambda json, key, value: key in _OF_TRAINERS, _IDLE,
    "the Trainer's own argument takes precedence, and must agree with it", "")
_NO_CLIPPING = implicit("gradient clipping", Outcome.EXACT,
    "DeepSpeed clips nothing without gradient_clipping, whatever max_grad_norm", target="max_grad_norm: 0")
_SYNC = implicit("gradient_sync", Outcome.EXACT, "stages 2 and 3 reduce gradients in each microbatch",
    target="gradient_sync: every")
# Findings of axolotl's FSDP1 that do not apply to DeepSpeed.
_OF_FSDP1 = ("casting of inputs and buffers", "transformer_layer_cls_to_wrap", "sync_module_states", "gradient_sync")
# fmt: on


def _is_off(value: Any) -> bool:
    if isinstance(value, Mapping):
        return not value.get("enabled", True) or all(map(_is_off, value.values()))
    return not value


def _is_scripts(optimizer: Any) -> bool:
    params = optimizer.get("params") if isinstance(optimizer, Mapping) else None
    return isinstance(params, Mapping) and optimizer.get("type") == "AdamW" and {*map(str, params.values())} == {"auto"}


def _leaves(values: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if key in _OPENED and isinstance(value, Mapping):
            yield from _leaves(value, f"{above}{key}.")
        else:
            yield f"{above}{key}", value


def _findings(json: _Json, reported: Iterable[str | None], rules: Sequence[_Rule] = _RULES) -> Iterator[Finding]:
    """Yield findings for the keys that are not in ``reported``."""
    reported_keys = {*reported}
    for key, value in _leaves(value_at(json.document.values, json.path)):
        if key not in reported_keys:
            outcome, reason, hint = next(each[1:] for each in rules if each[0](json, key, value))
            finding = Finding(
                key=key, value=value, outcome=outcome, reason=reason, hint=hint, asks=outcome is not _IDLE
            )
            yield json.named(finding, key)


# ---------------------------------------------------------------------------------------------------------------------
# The file with the settings


@dataclass(frozen=True, slots=True, kw_only=True)
class WithSettings:
    """The text of a file in which DeepSpeed's settings replace the reference to the JSON.

    Args:
        names: Key of a finding -> key of the JSON; None drops the finding.
        findings: Findings for keys of the JSON that are not inserted.
        suffix: The suffix for the format of ``text`` if it differs from that of the file, else "".
    """

    text: str
    json: _Json
    names: Mapping[str, str | None]
    findings: Sequence[Finding]
    suffix: str = ""

    def findings_of_file(self, findings: Iterable[Finding]) -> Iterator[Finding]:
        """Yield the findings of ``text`` under the keys of the original files, and those for keys that are not
        inserted."""
        for each in findings:
            name = self.names.get(each.key, each.key)
            if name is not None:
                yield self.json.named(each, name) if each.key in self.names else each
            elif each.outcome.blocks:
                yield self.json.named(each, _ZERO)
        yield from self.findings


def with_settings(
    document: Document, read: ReadsFile, *, to: str | None, allow_unreferenced: bool
) -> WithSettings | None:
    """Return a document's text with the settings of its DeepSpeed JSON; None if it neither references nor is one.

    Args:
        to: The name of the target system; None: the document's own.
        allow_unreferenced: Whether to migrate a document that is a DeepSpeed JSON itself.
    Raises:
        ConfigError: the referenced file is not JSON, or accelerate rejects it; the message has file and line.
    """
    values = document.values
    if document.problem or not isinstance(values, Mapping):
        return None
    to = to or ("axolotl" if is_axolotls_deepspeed(values) else "accelerate")
    if is_deepspeeds(values):
        return _from_json_alone(_Json(document=document, to=to)) if allow_unreferenced else None
    by_launcher = values.get("distributed_type") == "DEEPSPEED"
    path: Path = _NAMED if by_launcher else ("deepspeed",) if is_axolotls_deepspeed(values) else ()
    given = value_at(values, path) if path and has_path(values, path) else None
    json = _Json(document=document, path=path, to=to)
    if not isinstance(given, Mapping):
        text = read(given) if isinstance(given, str) else None
        if text is None:
            return None
        json = _Json(document=open_document(text, printable(str(given)), ".json"), to=to)
        if json.document.problem or not is_deepspeeds(json.document.values):
            raise ConfigError(json.document.problem or f"{given}:1:1: accelerate refuses it without {_ZERO}")
    return (_in_accelerate_file if by_launcher else _in_axolotl_file)(document, json)


_NAMED = ("deepspeed_config", "deepspeed_config_file")


def _entries(json: _Json) -> tuple[dict[str, Any], dict[str, str | None]]:
    """Return the entries of accelerate's ``deepspeed_config``, and a map from keys of findings to keys of the JSON."""
    entries: dict[str, Any] = {}
    names: dict[str, str | None] = {}
    if precision := json.precision():
        names["mixed_precision"] = f"{precision}.enabled"
    for name, (auto, missing, paths) in _KEYS.items():
        path = next((each for each in paths if json.at(each) is not None), None)
        value = missing if path is None else auto if json.at(path) == "auto" else json.at(path)
        if isinstance(value, bool) and name.endswith("_device"):  # cpu_offload
            value = "cpu" if value else "none"
        if value is not None:
            entries[name] = value
            names[f"deepspeed_config.{name}"] = path or paths[0]
    return entries, names


def _from_json_alone(json: _Json) -> WithSettings:
    """Convert the JSON to a minimal accelerate file."""
    entries, names = _entries(json)
    source = json.document.name.replace("\\", "/").rpartition("/")[2]
    values = {"distributed_type": "DEEPSPEED", "mixed_precision": json.precision() or "no", "deepspeed_config": entries}
    text = file_text(HuggingFaceDialect(), values, source)
    findings = tuple(_findings(json, names.values()))
    names |= dict.fromkeys({"distributed_type", "mixed_precision", "the rest of the file"} - {*names})
    return WithSettings(text=text, json=json, names=names, findings=findings, suffix=".yaml")


def _in_accelerate_file(document: Document, json: _Json) -> WithSettings:
    """Replace the reference in an accelerate file by the JSON's settings, including its precision."""
    values, (section, name) = document.values, _NAMED
    entries, names = _entries(json)
    refused = [key for key in _REFUSED if key in values[section]]
    edits = document.edit_mapping((section,), {name: [*entries.items()], **{key: [] for key in refused}})
    if precision := json.precision():
        beside = [("distributed_type", "DEEPSPEED"), ("mixed_precision", precision)]
        removed: dict[str, Settings] = {key: [] for key in ("mixed_precision",) if key in values}
        edits += document.edit_mapping((), {"distributed_type": beside, **removed})
    refused += ["mixed_precision"] * (values.get("mixed_precision") is not None)
    findings = (_reference_finding(document, _NAMED, refused), *_findings(json, names.values()))
    return WithSettings(text=document.edited(edits), json=json, names=names, findings=findings)


def _reference_finding(document: Document, path: Path, refused: Sequence[str] = ()) -> Finding:
    return Finding(
        key=".".join(map(str, path)),
        value=value_at(document.values, path),
        outcome=Outcome.NEEDS_DECISION if refused else Outcome.EXACT,
        reason=f"accelerate refuses {', '.join(refused)} beside it" if refused else "its settings are read there",
        hint="remove them: the settings of the file take precedence" if refused else "",
        where=f"{document.name}:{nearest_line(document, path)}",
    )


def _in_axolotl_file(document: Document, json: _Json) -> WithSettings:
    """Replace ``deepspeed`` in an axolotl file by keys of FSDP1.

    Batches, precision and clipping are those of axolotl's keys.
    """
    values, (entries, names) = document.values, _entries(json)
    names = {key: each for key, each in names.items() if each not in _OF_TRAINERS}
    entries = {key: each for key, each in entries.items() if key not in _OF_TRAINERS}
    section = {"distributed_type": "DEEPSPEED", "deepspeed_config": entries}
    reading = HuggingFaceDialect().read(Section.at((), section))
    config = reading.details.settings
    new: dict[str, Any] = {
        "fsdp": [config["sharding_strategy"].value.lower(), "auto_wrap", *["offload"] * config["offload_params"]],
        "fsdp_config": {
            "backward_prefetch": "BACKWARD_PRE",
            "state_dict_type": STATE_DICTS[config["state_dict_type"]],
            "sync_module_states": True,
            "cpu_ram_efficient_loading": True,
        },
    }
    section_findings = [each for each in reading.findings if each.key not in ("distributed_type", "gradient clipping")]
    if config["zero_stage"] > 1 and values.get("gradient_accumulation_steps") not in (None, 1):
        new["accelerator_config"] = {"gradient_accumulation_kwargs": {"sync_each_batch": True}}
        section_findings.append(_SYNC)
    if json.at("gradient_clipping") is None:
        new["max_grad_norm"] = 0
        section_findings.append(_NO_CLIPPING)
    removed: dict[str, Settings] = {key: [] for key in new if key in values}
    findings = [_reference_finding(document, ("deepspeed",))]
    findings += (json.named(each, names.get(each.key) or each.key) for each in section_findings)
    findings += _findings(json, names.values(), (_TRAINERS_RULE, *_RULES))
    dropped = (*new, *(f"fsdp_config.{key}" for key in new["fsdp_config"]), *_OF_FSDP1)
    return WithSettings(
        text=document.edited(document.edit_mapping((), {"deepspeed": [*new.items()], **removed})),
        json=json,
        names=dict.fromkeys(dropped),
        findings=findings,
    )
