"""axolotl: Hugging Face's keys, which axolotl processes in its own way.

Up to 0.11 axolotl exported the keys of an ``fsdp_config`` with the prefix ``fsdp_`` as accelerate's environment
variables; from 0.12 on it strips the prefix, warns that it is deprecated, and exports the same. Prefixed keys are
therefore in effect in all releases, while a plain Trainer ignores them. axolotl exports fewer keys than accelerate
reads: no strategy, which the options of ``fsdp`` decide, and no prefetching. It also passes the section to its Trainer,
which exports the keys that it reads again. Up to 0.11 those keys passed through ``lstrip("fsdp_")``, which strips
letters and not a prefix: ``backward_prefetch`` arrived, ``forward_prefetch`` and ``sync_module_states`` lost their
first letter and did not. From 0.12 on a schema rejects prefetching, and ``sync_module_states`` arrives. Under FSDP2
(``fsdp_version: 2``) axolotl replaces accelerate's function by another one, which recomputes whole layers.

Sources: axolotl 0.8 to 0.13 (``utils/trainer.py``: ``setup_fsdp_envs``, ``setup_parallelism_envs``;
``utils/schemas/fsdp.py`` and ``validation.py``; ``core/trainer_builder.py``, later ``core/builders/``;
``monkeypatch/accelerate/fsdp2.py``; ``docs/multi-gpu.qmd``), transformers 4.51.3 and accelerate 1.8.1 for the rest.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from composer_fsdp2.config.findings import Finding, Outcome
from composer_fsdp2.config.rows import Row
from composer_fsdp2.fsdp1.parsing import ShardingStrategy
from composer_fsdp2.migration.dialect import MappingEdit, Reading, Section, Setting, implicit, with_losses
from composer_fsdp2.migration.dialects.fingerprints import is_axolotl
from composer_fsdp2.migration.dialects.huggingface.effective import effective_config
from composer_fsdp2.migration.dialects.huggingface.huggingface import HuggingFaceDialect, as_own
from composer_fsdp2.migration.dialects.huggingface.keys import (
    OF_AXOLOTL,
    ROWS,
    EffectiveConfig,
    GivenKey,
    Key,
    reads,
    wrap_of,
)
from composer_fsdp2.migration.dialects.huggingface.limits import LIMITS, STORED_AS_CREATED, degrees_of
from composer_fsdp2.migration.dialects.huggingface.rewriting import GONE, Replacements, edit_in_place
from composer_fsdp2.migration.dialects.huggingface.values import BESIDE, NOBODY, PREFIX, SETTINGS, STATE_DICTS, X1, X2
from composer_fsdp2.migration.lens import Limitation, Loss, covers, limits, unless
from composer_fsdp2.migration.paths import Path
from composer_fsdp2.migration.run import OF_TRAINING, RunConfig, WrapKind
from composer_fsdp2.migration.training import DEFAULTS, OF_TRAINERS, duration_in, option

# Keys that axolotl accepts but does not pass on, or only in some releases.
_NOT_PASSED_ON = ("sharding_strategy", "forward_prefetch", "sync_module_states")
_APPROXIMATE, _UNSUPPORTED, _NEEDS_DECISION = Outcome.APPROXIMATE, Outcome.UNSUPPORTED, Outcome.NEEDS_DECISION
# Fields for which accelerate's limitations do not apply to axolotl.
_OWN = (
    "freeze",
    "cpu_offload",  # axolotl's function moves the values
    "reshard_after_forward",
    "activation_checkpointing.checkpoint",
    "activation_checkpointing.cpu_offload",
    "max_grad_norm",
    "save_only_model",
    "compile",
    "expert_parallel",
    "num_ranks",
    "wrap.embeddings",
    "wrap.output",
    "wrap.experts",
    "stored_dtype",
    "tiled_mlp.chunks",
    "mesh",
    "tensor_parallel",
    "context_parallel_degree",
    *OF_TRAINING,
)

# fmt: off
_LIMITS: tuple[Limitation, ...] = (
    *(each for each in LIMITS if each.beside or not covers(_OWN, each.fields[0])),
    limits(_APPROXIMATE, "reshard_after_forward", was=False, target="FSDP_RESHARD_AFTER_FORWARD",
        reason="axolotl 0.12 to 0.14 exports true only: parameters are freed after forward, the same numbers with less "
        "memory and more communication", hint="FSDP_RESHARD_AFTER_FORWARD=false in the environment keeps them"),
    limits(_UNSUPPORTED, "reshard_after_forward", reason="axolotl takes true or false only, no group size"),
    limits(_APPROXIMATE, "state_dict_type", target="state_dict_type: FULL_STATE_DICT",
        reason="a Trainer refuses save_only_model with sharded checkpoints"),
    STORED_AS_CREATED,
    limits(_NEEDS_DECISION, "stored_dtype",
        reason="axolotl's FSDP2 stores trained parameters, and the optimizer's state, in the low dtype that it loads "
        "the model in, and the run stores them in {value}: FSDP1 and accelerate upcast them to float32",
        hint="--to accelerate keeps float32, as fsdp_version: 1 does; --force writes it, to train in the low dtype"),
    limits(_NEEDS_DECISION, "max_grad_norm", target="max_grad_norm",
        reason="axolotl clips nothing at a norm of {value}, with which the run trains nothing, or in the wrong "
        "direction", hint="set a positive norm, or 0 to clip nothing"),
    limits(_NEEDS_DECISION, "train_only", target="unfrozen_parameters",
        reason="axolotl escapes each dot of a pattern before which no + follows, and takes a range in brackets at its "
        "end for rows: {value} would match other names", hint="write names without wildcards"),
    limits(_NEEDS_DECISION, "freeze", target="unfrozen_parameters",
        reason="axolotl names what is trained, not what is frozen",
        hint="unfrozen_parameters: patterns of all names but "
        "those of {value}"),
    limits(_APPROXIMATE, "tiled_mlp.classes", target="tiled_mlp",
        reason="axolotl tiles the MLPs of the model that it loads, and takes no classes: the same numbers"),
    limits(_APPROXIMATE, "wrap.embeddings", "wrap.output", "wrap.experts", is_any=True, title="further units",
        reason="axolotl has no word for {value}, which become parts of the root's unit",
        hint="add their classes to transformer_layer_cls_to_wrap"),
    limits(_UNSUPPORTED, "mesh.groups", "mesh", reason="axolotl shards over all ranks, or replicas of them"),
    limits(_UNSUPPORTED, "mesh.shards", "mesh", was=1, reason="axolotl's FSDP2 has no run without shards (NO_SHARD)",
        hint="leave fsdp_config out, which is DDP"),
    *(limits(_NEEDS_DECISION, field, "mesh", target="dp_shard_size",
        reason="axolotl takes all sizes of a mesh; the number of ranks is not known here, or it refuses them, as it "
        "does other axes beside replicas of one rank",
        hint=f"dp_shard_size: GPUs of a replica, dp_replicate_size: number of replicas{other}")
        for field, other in (
            ("mesh.replicas", ""), ("mesh.shards", ""), ("tensor_parallel", ", tensor_parallel_size: {value}"),
            ("context_parallel_degree", ", context_parallel_size: {value}"),
            ("expert_parallel", ", expert_parallel_size: {value}"))),
    limits(_NEEDS_DECISION, "has_expert_axis", "expert_parallel", target="expert_parallel_size",
        reason="axolotl's ranks of experts are an axis of their own, beside the shards: parameters are sharded over "
        "fewer ranks", hint="write the sizes that are meant, with their product the number of ranks"),
    limits(_APPROXIMATE, "activation_checkpointing.checkpoint", "activation_checkpointing",
        "activation_checkpointing.cpu_offload", was=False, target="activation_offloading",
        title="activation offloading",
        reason="axolotl offloads what recomputation starts from, and recomputes: the same numbers, more computation"),
    limits(_APPROXIMATE, "activation_checkpointing.reentrant", target="activation_checkpointing",
        reason="axolotl's FSDP2 recomputes without reentering: the same numbers"),
    limits(_APPROXIMATE, "num_ranks", target="num_processes",
        reason="axolotl shards over as many ranks as it is launched with", hint="launch {value}"),
    limits(_APPROXIMATE, "undecayed", target="weight_decay",
        reason="axolotl decays neither biases nor the weights of norms, the run all parameters"),
    limits(_APPROXIMATE, *OF_TRAINING, is_any=True, title="batches, steps and optimizer",
        reason="axolotl counts the microbatches of a rank, whose number is not known here, and steps or whole epochs; "
        "its optimizers are a Trainer's",
        hint="set gradient_accumulation_steps, max_steps or num_epochs, optimizer and learning_rate"),
)
# fmt: on


_MODEL = {"base_model": "m", "micro_batch_size": 1}
_BY_LAYER = "TRANSFORMER_BASED_WRAP"
_FILES = {
    reader: Section.at((), {**_MODEL, "fsdp_version": version, "fsdp_config": {"auto_wrap_policy": _BY_LAYER}})
    for version, reader in ((1, X1), (2, X2))
}


class AxolotlDialect(HuggingFaceDialect):
    """axolotl's files, each with one section; its FSDP2 keys have no prefix."""

    name = target = title = "axolotl"
    rows = tuple(row for row in ROWS if reads(X1, row) or reads(X2, row) or row.name in _NOT_PASSED_ON)
    limits = _LIMITS
    readers = (X1, X2)
    companions: Mapping[str, Mapping[str, Any]] = {
        **HuggingFaceDialect.companions,
        "cpu_offload_pin_memory": {"offload_params": True},
    }
    silent = (
        Section.at((), {**_MODEL, "fsdp": ["full_shard"], "bf16": "auto"}),
        Section.at((), {**_MODEL, "fsdp_config": {"state_dict_type": None}}),
    )

    def find(self, path: Path, values: Mapping[str, Any], parent: Mapping[str, Any]) -> Path | None:
        """Return the path of the whole file; None if ``fsdp`` and ``fsdp_config`` are empty: it is not sharded."""
        return path if is_axolotl(values) and (values.get("fsdp") or values.get("fsdp_config")) else None

    def effective(self, section: Section) -> EffectiveConfig:
        return effective_config(section.given, X2 if _version(section.given) == "2" else X1)

    def read(self, section: Section) -> Reading:
        reading = super().read(section)
        findings = (*reading.findings, *_of_the_model(section.given))
        return replace(reading, findings=findings)

    def settings(self, run: RunConfig) -> Iterator[Setting]:
        for key, fields, write in _WRITTEN:
            if (value := write(run)) is not None:
                yield Setting(key=key, value=value, fields=fields)

    def rewrite(self, section: Section, reading: Reading) -> list[MappingEdit]:
        """Replace FSDP1's keys by FSDP2's without the prefix, as in axolotl's documentation of multi-GPU training."""
        config: EffectiveConfig = reading.details
        keeps_all = config["sharding_strategy"] is ShardingStrategy.NO_SHARD
        if reading.run is None or keeps_all or config.reader is X2:
            return []
        old = [name for name in ("fsdp_version", "fsdp", "fsdp_config") if name in section.given]
        beside: Replacements = {name: [] for name in old if name != "fsdp_config"}
        if not any(map(_stays, config.given)):
            beside |= {name: [] for name in old}
            beside[old[0]] = [("fsdp_version", 2), ("fsdp_config", _new_settings(config))]
            return [MappingEdit(path=section.path, replacements=beside)]
        first = "base_model" if "base_model" in section.given else str(next(iter(section.given)))
        place = first if old[0] == "fsdp_config" else old[0]
        kept = [(place, section.given[place])] if place == first else []  # its comment follows it
        beside[place] = [("fsdp_version", 2), *kept]
        return [MappingEdit(path=section.path, replacements=beside), _settings_edit(section, config)]

    def own_findings(self, reading: Reading, lost: Sequence[Loss]) -> tuple[Finding, ...]:
        """Return the findings of the reading, and those for settings that axolotl's FSDP2 lacks or treats differently
        from its FSDP1."""
        findings = tuple(as_own(each) for each in reading.findings if each.key != _TRAINED)
        if reading.run is None or reading.details.reader is X2:
            return (*findings, *(each.finding for each in lost if each.is_fault))
        lost = lost or self.express(reading.run.without_training()).losses
        told, rest = with_losses(findings, lost, reading, self)
        return (*told, *rest, *_rules_of_fsdp2(reading.details))

    def places(self, row: Row) -> tuple[str, ...]:
        beside = tuple(name for name, each in OF_AXOLOTL.items() if each is row)
        if row.group == BESIDE:
            return beside or (row.name,)
        inner = tuple(prefix + row.name for prefix in ("fsdp_config.", f"fsdp_config.{PREFIX}"))
        return beside + (inner if row.group == SETTINGS else ())

    def aliases(self, row: Row) -> tuple[str, ...]:
        return tuple(name for name, each in OF_AXOLOTL.items() if each is row and name != row.name)

    def read_by(self, row: Row) -> tuple[str, ...]:
        return tuple(reader.value for reader in self.readers if reads(reader, row)) or (NOBODY,)

    def files(self, row: Row, value: Any) -> Mapping[str, Section]:
        by_version = (X2 if str(value) == "2" else X1,)  # the key itself determines the reader
        readers = by_version if row.name == "version" else self.readers
        is_read_by_none = self.read_by(row) == (NOBODY,)
        return {reader: _FILES[reader] for reader in readers if is_read_by_none or reads(reader, row)}

    def place(self, row: Row, section: Section) -> str:
        return self.places(row)[0]


def _recomputes(run: RunConfig) -> bool | None:
    checkpointing = run.config.activation_checkpointing
    return True if checkpointing.checkpoint and not checkpointing.cpu_offload else None


def _size(name: str) -> Callable[[RunConfig], int | None]:
    """Return a function for the size ``name`` of a run: None for 1, which axolotl does not pass on.

    With a replica size alone, axolotl shards over the remaining ranks.
    """

    def write(run: RunConfig) -> int | None:
        mesh = run.config.mesh
        is_open = not mesh.is_grouped and mesh.has_replicas and mesh.shape == (mesh.replicate_degree, -1)
        alone = {"dp_replicate_size": mesh.replicate_degree} if is_open and not degrees_of(run) else {}
        size = {**alone, **degrees_of(run)}.get(name, 1)
        return size if size > 1 else None

    return write


def _in_settings(row: Key) -> tuple[str, tuple[str, ...], Callable[[RunConfig], Any]]:
    return f"{SETTINGS}.{row.name}", row.decides, row.write


_BY_NAME = {row.name: row for row in ROWS if row.group == SETTINGS}
# Keys, the fields that they set, and functions for their values in a run; None omits a key.
_WRITTEN: tuple[tuple[str, tuple[str, ...], Callable[[RunConfig], Any]], ...] = (
    ("fsdp_version", (), lambda run: 2),
    *map(_in_settings, (_BY_NAME["reshard_after_forward"],)),
    (
        f"{SETTINGS}.auto_wrap_policy",
        ("wrap",),
        lambda run: unless("NO_WRAP", _BY_NAME["auto_wrap_policy"].write(run)),  # not in axolotl's schema
    ),
    *(
        _in_settings(_BY_NAME[name])
        for name in (
            "transformer_layer_cls_to_wrap",
            "min_num_params",
            "offload_params",
            "cpu_ram_efficient_loading",
        )
    ),
    (
        f"{SETTINGS}.state_dict_type",
        ("state_dict_type",),
        lambda run: STATE_DICTS["full" if run.save_only_model else run.state_dict_type],
    ),
    (f"{SETTINGS}.activation_checkpointing", ("activation_checkpointing",), _recomputes),
    *(
        (word, ("precision", "mixed_precision"), lambda run, name=name: True if run.precision == name else None)
        for word, name in (("bf16", "amp_bf16"), ("fp16", "amp_fp16"), ("fp8", "amp_fp8"))
    ),
    ("dp_replicate_size", ("mesh",), _size("dp_replicate_size")),
    ("dp_shard_size", ("mesh",), _size("dp_shard_size")),
    ("tensor_parallel_size", ("tensor_parallel",), _size("tp_size")),
    ("context_parallel_size", ("context_parallel_degree",), _size("cp_size")),
    ("flash_attention", ("context_parallel_degree",), lambda run: _size("cp_size")(run) and True),  # required
    ("expert_parallel_size", ("expert_parallel",), lambda run: unless(1, run.expert_parallel)),
    *(
        (
            name,
            ("activation_checkpointing",),
            lambda run: unless(False, run.config.activation_checkpointing.cpu_offload),
        )
        for name in ("gradient_checkpointing", "activation_offloading")  # axolotl refuses the second without the first
    ),
    # Without the key a Trainer clips to 1.
    ("max_grad_norm", ("max_grad_norm",), lambda run: unless(1.0, run.max_grad_norm or 0.0)),
    (
        "unfrozen_parameters",
        ("train_only",),
        lambda run: [each.replace("\\.", ".") for each in run.config.train_only] or None,
    ),
    ("save_only_model", ("save_only_model",), lambda run: unless(False, run.save_only_model)),
    ("torch_compile", ("compile",), lambda run: unless(False, run.compile)),
    ("tiled_mlp", ("tiled_mlp",), lambda run: None if run.mlp_chunks is None else True),
    ("tiled_mlp_num_shards", ("tiled_mlp",), lambda run: run.mlp_chunks),
    ("micro_batch_size", ("microbatch_size",), lambda run: run.microbatch_size),
    (
        "gradient_accumulation_steps",
        ("num_microbatches", "global_batch_size"),
        lambda run: run.with_batches().num_microbatches,
    ),
    ("max_steps", ("max_duration",), duration_in("ba")),
    ("num_epochs", ("max_duration",), duration_in("ep")),
    ("optimizer", ("optimizer",), option("name")),
    # axolotl requires a learning rate.
    *(
        (key, ("optimizer",), option(name, None if name == "lr" else DEFAULTS[name]))
        for key, name in OF_TRAINERS.items()
    ),
)


def _version(values: Mapping[str, Any]) -> str:
    settings = values.get("fsdp_config")
    inner = settings if isinstance(settings, Mapping) else {}
    versions = (values.get("fsdp_version"), inner.get("fsdp_version"), inner.get("version"))
    return str(next((version for version in versions if version), 1))


_TRAINED = "trained parameters"


def _of_the_model(values: Mapping[str, Any]) -> Iterator[Finding]:
    """Yield findings for model settings outside ``fsdp_config`` that affect a run that calls ``fully_shard`` itself."""
    if any("spectrum" in str(plugin).lower() for plugin in values.get("plugins") or ()):
        yield implicit(
            _TRAINED,
            Outcome.NEEDS_DECISION,
            "axolotl's SpectrumPlugin chooses them at run time, by the signal-to-noise ratio of their values",
            "train_only, with the list that it printed or wrote",
        )
    if values.get("adapter"):
        yield implicit(
            "adapter",
            Outcome.EXACT,
            "adapters are made where the model is made; frozen and trained parameters of one dtype share a unit",
            "LLM Foundry's models take a peft_config",
            value=values["adapter"],
            target="the model's code",
        )


def _rules_of_fsdp2(config: EffectiveConfig) -> Iterator[Finding]:
    """Yield findings for keys beside the section that axolotl's FSDP2 rejects or treats differently from its FSDP1."""
    for key, applies, outcome, reason, hint in _RULES:
        if applies(config):
            yield Finding(key=key, value=config.around[key], outcome=outcome, reason=reason, hint=hint)


def _is_quantized(config: EffectiveConfig, bits: int) -> bool:
    return config.around.get(f"load_in_{bits}bit") is True


def _makes_kernels(config: EffectiveConfig) -> bool:
    given = config.around
    is_plain = given.get("adapter") in ("lora", "qlora") and not given.get("rl") and not given.get("lora_dropout")
    return is_plain and not any(f"lora_{part}_kernel" in given for part in ("mlp", "qkv", "o"))


# axolotl 0.12.2: check_fsdp2_* of utils/schemas/validation.py, check_auto_enable_lora_kernels of its config.py.
_RULES: tuple[tuple[str, Callable[[EffectiveConfig], bool], Outcome, str, str], ...] = (
    (
        "optimizer",
        lambda config: config.around.get("optimizer") in ("adamw_8bit", "adamw_bnb_8bit"),
        _NEEDS_DECISION,
        "axolotl refuses this optimizer with FSDP2",
        "adamw_torch_8bit, which is torchao's; other 8-bit optimizers pass",
    ),
    *(
        (
            f"load_in_{bits}bit",
            lambda config, bits=bits: _is_quantized(config, bits) and config["cpu_ram_efficient_loading"],
            _NEEDS_DECISION,
            "axolotl refuses it with FSDP2 beside cpu_ram_efficient_loading",
            "fsdp_config.cpu_ram_efficient_loading: false, with which each rank reads the weights",
        )
        for bits in (4, 8)
    ),
    (
        "rl",
        lambda config: (
            config.around.get("rl") in ("dpo", "kto", "orpo", "ipo")
            and any(_is_quantized(config, bits) for bits in (4, 8))
        ),
        _NEEDS_DECISION,
        "axolotl refuses it with FSDP2 beside load_in_4bit or load_in_8bit",
        "train without quantization, or keep fsdp_version: 1",
    ),
    (
        "adapter",
        _makes_kernels,
        _APPROXIMATE,
        "with FSDP2 axolotl turns on its LoRA kernels, which it does not with FSDP1: the same numbers up to rounding",
        "lora_mlp_kernel, lora_qkv_kernel and lora_o_kernel: false keep them off",
    ),
)


def _stays(each: GivenKey) -> bool:
    gone = (*GONE, "version")
    return each.key.startswith("fsdp_config.") and each.row is not None and each.is_read and each.row.name not in gone


def _new_settings(config: EffectiveConfig) -> dict[str, Any]:
    """Return the settings that FSDP1 read from other keys, or that have another default under FSDP2."""
    new: dict[str, Any] = {"reshard_after_forward": config["reshard_after_forward"]}
    if config.key_of("state_dict_type") is None:
        new["state_dict_type"] = STATE_DICTS[config["state_dict_type"]]
    return new | {key: value for key, value in _beside_words(config).items() if value and config.key_of(key) is None}


def _beside_words(config: EffectiveConfig) -> dict[str, Any]:
    """Return the settings that the options of ``fsdp`` also set; axolotl's schema has no NO_WRAP."""
    policy = None if wrap_of(config).kind is WrapKind.ROOT else config["auto_wrap_policy"]
    return {"offload_params": config["offload_params"], "auto_wrap_policy": policy}


def _settings_edit(section: Section, config: EffectiveConfig) -> MappingEdit:
    """Return the in-place edit of ``fsdp_config``: strip prefixes, and remove keys that FSDP2 does not use."""
    replacements: Replacements = {}
    for each in config.given:
        where, _, key = each.key.partition(".")
        if where != "fsdp_config" or key not in section.given["fsdp_config"]:
            continue  # outside the section, or not a string: left as is
        plain = key.removeprefix(PREFIX)
        meant = _beside_words(config).get(plain, ...)
        if not _stays(each) or meant is None:
            replacements[key] = []
        elif meant is not ... and each.row is not None and meant != each.row.takes.parse(each.value, config.reader):
            replacements[key] = [(plain, meant)]
        elif plain != key:
            replacements[key] = [(plain, each.value)]
    new = list(_new_settings(config).items())
    return edit_in_place(section, replacements, new, places=("sharding_strategy",))
