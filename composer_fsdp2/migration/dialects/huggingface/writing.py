"""Write a run as keys of accelerate or axolotl, convert a section to FSDP2's keys in place, and change keys for a
patch."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from composer_fsdp2.config.rows import Row
from composer_fsdp2.fsdp1.parsing import ShardingStrategy
from composer_fsdp2.migration.dialect import MappingEdit, Section, Setting
from composer_fsdp2.migration.dialects.huggingface.effective import is_bare
from composer_fsdp2.migration.dialects.huggingface.keys import ROWS, EffectiveConfig, GivenKey, wrap_of
from composer_fsdp2.migration.dialects.huggingface.values import (
    A1,
    A2,
    AD,
    BESIDE,
    DEGREES,
    DEGREES_PREFIX,
    NAMES_BY_PRECISION,
    OLD_SIBLINGS,
    PREFIX,
    PREFIXES,
    SETTINGS,
    STATE_DICTS,
    T1,
    TRANSFORMERS,
    X1,
)
from composer_fsdp2.migration.lens import unless
from composer_fsdp2.migration.paths import Path, Settings, merged, nested
from composer_fsdp2.migration.run import RunConfig, WrapKind
from composer_fsdp2.migration.training import DEFAULTS, OF_TRAINERS, duration_in, option

# A key, the fields that it sets, and the function for its value in a run; None omits the key.
Written = tuple[str, tuple[str, ...], Callable[[RunConfig], Any]]


def settings_of(table: Iterable[Written], run: RunConfig) -> Iterator[Setting]:
    """Yield a run as the keys of a table."""
    for key, fields, write in table:
        if (value := write(run)) is not None:
            yield Setting(key=key, value=value, fields=fields)


# ---------------------------------------------------------------------------------------------------------------------
# accelerate's keys


def degrees_of(run: RunConfig) -> dict[str, int]:
    """Return the sizes for ``parallelism_config``. Empty if it is not needed, because accelerate shards over all ranks.

    Also empty for a mesh with a size of -1 that the number of ranks does not determine, and for a mesh that accelerate
    rejects: other axes, and replicas of one rank.
    """
    mesh, tensor, context = run.config.mesh, run.tensor_parallel, run.context_parallel
    if mesh.is_grouped:
        return {}
    replicate, shard = mesh.replicate_degree if mesh.has_replicas else 1, mesh.shard_degree
    is_alone = replicate == tensor == context == 1
    if is_alone and (run.num_ranks is None or shard in (-1, run.num_ranks)):
        return {}
    if run.num_ranks is not None and (replicate == -1) != (shard == -1):
        rest = run.num_ranks // tensor // abs(replicate * shard)
        replicate, shard = (rest if size == -1 else size for size in (replicate, shard))
    # Parameters are also sharded over the ranks of a sequence.
    is_refused = shard == context and replicate > 1 and max(tensor, context) > 1
    if shard < 2 or replicate < 1 or shard % context or is_refused:
        return {}
    return {"dp_replicate_size": replicate, "dp_shard_size": shard // context, "tp_size": tensor, "cp_size": context}


_SETTINGS = {row.name: row for row in ROWS if row.group == SETTINGS}
_OF_PRECISION = ("precision", "mixed_precision")
# fmt: off
WRITTEN_BY_ACCELERATE: tuple[Written, ...] = (
    ("distributed_type", (), lambda run: "FSDP"),
    ("mixed_precision", _OF_PRECISION, lambda run: NAMES_BY_PRECISION[run.precision]),
    ("num_processes", (), lambda run: run.num_ranks),
    ("num_machines", (), lambda run: run.num_nodes),
    *((f"{SETTINGS}.{PREFIX}{name}", row.decides, row.write) for name, row in _SETTINGS.items()),
    *((f"{DEGREES}.{DEGREES_PREFIX}{name}", ("mesh",), lambda run, name=name: degrees_of(run).get(name))
        for name in ("dp_replicate_size", "dp_shard_size", "tp_size", "cp_size")),
)
# fmt: on


# ---------------------------------------------------------------------------------------------------------------------
# axolotl's keys


def _size(run: RunConfig, name: str) -> int | None:
    """Return the size ``name`` of a run's mesh; None if it is 1, because axolotl ignores 1.

    If only the replicate size is set, axolotl shards over the other factor of the ranks.
    """
    mesh, degrees = run.config.mesh, degrees_of(run)
    if not degrees and not mesh.is_grouped and mesh.has_replicas and mesh.shape == (mesh.replicate_degree, -1):
        degrees = {"dp_replicate_size": mesh.replicate_degree}
    return degrees[name] if degrees.get(name, 1) > 1 else None


_OWN: dict[str, Callable[[RunConfig], Any]] = {
    "auto_wrap_policy": lambda run: unless("NO_WRAP", _SETTINGS["auto_wrap_policy"].write(run)),  # not in its schema
    "state_dict_type": lambda run: STATE_DICTS["full" if run.save_only_model else run.state_dict_type],
    "activation_checkpointing": lambda run: unless(
        False,
        run.config.activation_checkpointing.checkpoint and not run.config.activation_checkpointing.cpu_offload,
    ),
}
# fmt: off
WRITTEN_BY_AXOLOTL: tuple[Written, ...] = (
    ("fsdp_version", (), lambda run: 2),
    *((f"{SETTINGS}.{name}", _SETTINGS[name].decides, _OWN.get(name, _SETTINGS[name].write)) for name in (
        "reshard_after_forward", "auto_wrap_policy", "transformer_layer_cls_to_wrap", "min_num_params",
        "offload_params", "cpu_ram_efficient_loading", "state_dict_type", "activation_checkpointing")),
    *((word, _OF_PRECISION, lambda run, word=word: NAMES_BY_PRECISION[run.precision] == word or None)
        for word in ("bf16", "fp16", "fp8")),
    ("dp_replicate_size", ("mesh",), lambda run: _size(run, "dp_replicate_size")),
    ("dp_shard_size", ("mesh",), lambda run: _size(run, "dp_shard_size")),
    ("tensor_parallel_size", ("tensor_parallel",), lambda run: _size(run, "tp_size")),
    ("context_parallel_size", ("context_parallel_degree",), lambda run: _size(run, "cp_size")),
    ("flash_attention", ("context_parallel_degree",), lambda run: _size(run, "cp_size") and True),  # required
    ("expert_parallel_size", ("expert_parallel",), lambda run: unless(1, run.expert_parallel)),
    *((name, ("activation_checkpointing",), lambda run: run.config.activation_checkpointing.cpu_offload or None)
        for name in ("gradient_checkpointing", "activation_offloading")),  # it refuses the second without the first
    ("max_grad_norm", ("max_grad_norm",), lambda run: unless(1.0, run.max_grad_norm or 0.0)),  # 1, a Trainer's default
    ("unfrozen_parameters", ("train_only",),
        lambda run: [each.replace("\\.", ".") for each in run.config.train_only] or None),
    ("save_only_model", ("save_only_model",), lambda run: run.save_only_model or None),
    ("torch_compile", ("compile",), lambda run: run.compile or None),
    ("tiled_mlp", ("tiled_mlp",), lambda run: None if run.mlp_chunks is None else True),
    ("tiled_mlp_num_shards", ("tiled_mlp",), lambda run: run.mlp_chunks),
    ("micro_batch_size", ("microbatch_size",), lambda run: run.microbatch_size),
    ("gradient_accumulation_steps", ("num_microbatches", "global_batch_size"),
        lambda run: run.with_batches().num_microbatches),
    ("max_steps", ("max_duration",), duration_in("ba")),
    ("num_epochs", ("max_duration",), duration_in("ep")),
    ("optimizer", ("optimizer",), option("name")),
    *((key, ("optimizer",), option(name, None if name == "lr" else DEFAULTS[name]))  # it requires a learning rate
        for key, name in OF_TRAINERS.items()),
)
# fmt: on


# ---------------------------------------------------------------------------------------------------------------------
# A section converted in place

# Keys that FSDP2 does not use, and the version, which is written anew.
_REMOVED = (
    *("version", "sharding_strategy", "backward_prefetch", "forward_prefetch", "sync_module_states"),
    *("use_orig_params", "limit_all_gathers"),
)
# By reader: the removed keys at whose position the new ones are inserted; else at the end of the mapping.
_PLACES = {A1: ("sharding_strategy", "version"), T1: ("version",), X1: ("sharding_strategy",)}
_Replacements = dict[str, Settings]


def rewritten(section: Section, config: EffectiveConfig, run: RunConfig) -> list[MappingEdit]:
    """Return the edits that convert a section from FSDP1's or DeepSpeed's keys to FSDP2's."""
    if config.reader is AD:
        return _deepspeed_edits(section, run)
    given, new, settings_keys = section.given, _new_settings(config), _settings_keys(section, config)
    if is_bare(given):
        return [_settings_edit(section.path, settings_keys, new, config, places=())]
    beside: _Replacements = {}
    place = next((name for name in ("fsdp_config", "distributed_type") if name in given), "fsdp")
    if config.reader is T1:
        beside = _trainer_replacements(given, config, new)
    is_edited = isinstance(given.get("fsdp_config"), Mapping) and bool(given["fsdp_config"])
    if config.reader is X1:
        is_edited = not all(_is_removed(each, {}) for each in settings_keys.values())
        beside = _axolotl_replacements(given, is_whole=not is_edited)
        place = next(iter(beside))
    if not is_edited:
        _append(beside, given, place, "fsdp_config", dict(_entries(new, config)))
    degrees = {DEGREES_PREFIX + name: size for name, size in degrees_of(run).items()}
    if config.reader is A1 and degrees and config.key_of("dp_shard_size") is None:
        _append(beside, given, DEGREES if DEGREES in given else "distributed_type", DEGREES, degrees)
    edits = [MappingEdit(path=section.path, replacements=beside)] if beside else []
    if is_edited:
        path = (*section.path, "fsdp_config")
        edits.append(_settings_edit(path, settings_keys, new, config, places=_PLACES[config.reader]))
    return edits


def _append(entries: _Replacements, given: Mapping[str, Any], place: str, key: str, value: Any) -> None:
    """Put a key in its own place, or after another one."""
    kept = [] if place == key else [(place, given[place])]
    entries[place] = [*entries.get(place, kept), (key, value)]


def _deepspeed_edits(section: Section, run: RunConfig) -> list[MappingEdit]:
    """Replace DeepSpeed's section by one of FSDP. Other keys, such as ``num_processes``, do not change.

    DeepSpeed's sequence parallelism becomes context parallelism.
    """
    new: dict[str, Any] = {}
    for setting in settings_of(WRITTEN_BY_ACCELERATE, run):
        new = merged(new, nested(setting.key, setting.value))
    names = {"distributed_type": "distributed_type", "deepspeed_config": "fsdp_config", DEGREES: DEGREES}
    replacements = {
        old: [(name, new[name])] if name in new else [] for old, name in names.items() if old in section.given
    }
    return [MappingEdit(path=section.path, replacements=replacements)]


def _trainer_replacements(given: Mapping[str, Any], config: EffectiveConfig, new: dict[str, Any]) -> _Replacements:
    """Return the changes of a Trainer's arguments. Arguments of earlier releases are moved to the new settings."""
    beside: _Replacements = {name: [] for name in OLD_SIBLINGS if name in given}
    for name in (name.removeprefix(PREFIX) for name in beside):
        if value := config[name]:
            new[name] = list(value) if isinstance(value, tuple) else value
    if config["sharding_strategy"].is_hybrid:
        within = _strategy_like(config["sharding_strategy"], is_hybrid=False, reshards=config["reshard_after_forward"])
        beside["fsdp"] = [("fsdp", _fsdp_options(config, within, offloads=config["offload_params"]))]
    return beside


def _axolotl_replacements(given: Mapping[str, Any], *, is_whole: bool) -> _Replacements:
    """Return the changes of an axolotl file that write ``fsdp_version: 2`` at the position of the first FSDP1 key.

    Args:
        is_whole: Whether all keys in ``fsdp_config`` are removed.
    """
    old = [
        name
        for name in ("fsdp_version", "fsdp", "fsdp_config")
        if name in given and (is_whole or name != "fsdp_config")
    ]
    first = "base_model" if "base_model" in given else str(next(iter(given)))
    place, kept = (old[0], []) if old else (first, [(first, given[first])])  # its comment follows it
    beside: _Replacements = {place: [("fsdp_version", 2), *kept]}
    return beside | {name: [] for name in old[1:]}


def _new_settings(config: EffectiveConfig) -> dict[str, Any]:
    """Return the settings to add so FSDP2 behaves as FSDP1 did. None removes a key.

    FSDP1 read some settings from other keys, or had other defaults.
    """
    new: dict[str, Any] = {} if config.reader is X1 else {"version": 2}
    new["reshard_after_forward"] = config["reshard_after_forward"]
    key, policy = config.key_of("state_dict_type"), config["auto_wrap_policy"]
    if key is None or config.value_of(key) is None:
        new["state_dict_type"] = STATE_DICTS[config["state_dict_type"]]
    if config.reader is T1 and policy != "TRANSFORMER_BASED_WRAP":  # the default, with or without auto_wrap in fsdp
        new["auto_wrap_policy"] = policy
    if config.reader is X1:
        for name in ("offload_params", "auto_wrap_policy"):  # which the options of fsdp set, too
            if config[name] != config.parsed.get(config.key_of(name) or "", _SETTINGS[name].defaults[X1]):
                new[name] = config[name]
        if wrap_of(config).kind is WrapKind.ROOT:  # axolotl's schema has no NO_WRAP
            new["auto_wrap_policy"] = None
    return new


def _entries(new: Mapping[str, Any], config: EffectiveConfig) -> Settings:
    prefix = PREFIX if config.reader is A1 else ""
    return [(prefix + name, value) for name, value in new.items() if value is not None]


def _settings_keys(section: Section, config: EffectiveConfig) -> dict[str, GivenKey]:
    """Return the keys in ``fsdp_config``, or in a file that is the content of one.

    Keys that are not strings are omitted.
    """
    above = "" if is_bare(section.given) else "fsdp_config."
    values = section.given if not above else section.given.get("fsdp_config")
    return {
        name: each
        for each in config.given
        if each.key.startswith(above) and (each.row is None or each.row.group == SETTINGS)
        if (name := each.key.removeprefix(above)) in (values or ())
    }


def _settings_edit(
    path: Path,
    settings_keys: Mapping[str, GivenKey],
    new: Mapping[str, Any],
    config: EffectiveConfig,
    places: Iterable[str],
) -> MappingEdit:
    """Return the edit of the mapping of settings. Prefixes of axolotl's keys, which are deprecated, are removed."""
    entries = dict(_entries(new, config))
    replacements: _Replacements = {}
    for name, given in settings_keys.items():
        plain = name.removeprefix(PREFIX)
        if config.reader is X1 and given.is_read and plain in entries:
            replacements[name] = [(plain, entries.pop(plain))]
        elif _is_removed(given, new):
            replacements[name] = []
        elif config.reader is X1 and plain != name:
            replacements[name] = [(plain, given.value)]
    names = {name.removeprefix(PREFIX): name for name in reversed(replacements)}
    place = next((names[each] for each in places if each in names), None)
    if place is None:
        return MappingEdit(path=path, replacements=replacements, additions=[*entries.items()])
    return MappingEdit(path=path, replacements=replacements | {place: [*entries.items()]})


def _is_removed(given: GivenKey, new: Mapping[str, Any]) -> bool:
    """Return whether to remove a key: FSDP2 does not use it, ``new`` sets it, or FSDP1 ignored it but FSDP2 would
    read it."""
    return given.row is None or given.row.name in (*_REMOVED, *new) or not given.is_read


def _fsdp_options(config: EffectiveConfig, strategy: ShardingStrategy, *, offloads: bool) -> str | list[str]:
    """Return the options of ``fsdp`` with another strategy, as a string or a list, as in the file."""
    is_on = {strategy.name.lower(): True, "offload": offloads, "auto_wrap": config["auto_wrap_policy"] != "NO_WRAP"}
    options = [name for name in is_on if is_on[name]]
    return options if isinstance(config.around["fsdp"], list) else " ".join(options)


# ---------------------------------------------------------------------------------------------------------------------
# A patch


def settings_in_place(config: EffectiveConfig, run: RunConfig) -> Iterator[Setting]:
    """Yield the settings of a run that ``apply_patch`` can change, as keys of a Trainer, or of accelerate or axolotl
    with FSDP1."""
    reader, strategy = config.reader, config["sharding_strategy"]
    if strategy is not None:
        reshards = run.config.reshard_after_forward is not False
        strategy = _strategy_like(strategy, is_hybrid=strategy.is_hybrid, reshards=reshards)
        if config.key_of("fsdp") is not None:
            options = _fsdp_options(config, strategy, offloads=run.config.cpu_offload)
            yield Setting(key="fsdp", value=options, fields=("reshard_after_forward", "cpu_offload"))
        if reader is A1:
            key = usual_place(_SETTINGS["sharding_strategy"], is_transformers=False)
            yield Setting(key=key, value=strategy.name, fields=("reshard_after_forward",))
    if config["gradient_checkpointing"]:
        recomputes = run.config.activation_checkpointing.checkpoint
        yield Setting(key="gradient_checkpointing", value=recomputes, fields=("activation_checkpointing",))
    for row in _SETTINGS.values():
        if reader in row.read_by and (value := row.write(run)) is not None:
            key = usual_place(row, is_transformers=reader in TRANSFORMERS)
            yield Setting(key=key, value=value, fields=row.decides)


def sizes_in_place(config: EffectiveConfig, run: RunConfig) -> Iterator[Setting]:
    """Yield the mesh sizes of an accelerate file that sets some, although the mesh requires none."""
    if config.reader is A2 and config.key_of("dp_shard_size") is not None and not degrees_of(run):
        yield Setting(key="dp_replicate_size", value=run.config.mesh.replicate_degree, fields=("mesh",))
        yield Setting(key="dp_shard_size", value=run.config.mesh.shard_degree, fields=("mesh",))


def usual_place(row: Row, *, is_transformers: bool) -> str:
    """Return the dotted path at which a file has a key. For transformers, names have no prefix."""
    name = row.aliases[0] if row.aliases and is_transformers else row.name
    prefix = "" if is_transformers else PREFIXES[row.group]
    return name if row.group == BESIDE else f"{row.group}.{prefix}{name}"


def _strategy_like(strategy: ShardingStrategy, *, is_hybrid: bool, reshards: bool) -> ShardingStrategy:
    """Return the first strategy with these properties; ``strategy`` itself if it has them."""
    of_kind = (each for each in (strategy, *ShardingStrategy) if each.is_hybrid is is_hybrid)
    return next(each for each in of_kind if each.reshards_after_forward is reshards)
