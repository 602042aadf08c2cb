"""Edit a section of a Trainer or accelerate in place: convert it to FSDP2 keys, or apply a patch of its run."""

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from composer_fsdp2.fsdp1.parsing import ShardingStrategy
from composer_fsdp2.migration.dialect import MappingEdit, Section, Setting
from composer_fsdp2.migration.dialects.huggingface.effective import is_bare
from composer_fsdp2.migration.dialects.huggingface.keys import ROWS, EffectiveConfig, GivenKey, reads
from composer_fsdp2.migration.dialects.huggingface.limits import degrees_of
from composer_fsdp2.migration.dialects.huggingface.values import (
    DEGREES,
    DEGREES_PREFIX,
    OLD_SIBLINGS,
    PREFIX,
    SETTINGS,
    STATE_DICTS,
    WORDS_BY_PRECISION,
    Reader,
)
from composer_fsdp2.migration.paths import merged, nested
from composer_fsdp2.migration.run import RunConfig

# FSDP1 keys that FSDP2 does not use.
GONE = frozenset(
    (
        "sharding_strategy",
        "backward_prefetch",
        "forward_prefetch",
        "sync_module_states",
        "use_orig_params",
        "limit_all_gathers",
    )
)
Entries = list[tuple[str, Any]]
Replacements = dict[str, Entries]


def rewritten(section: Section, config: EffectiveConfig, run: RunConfig) -> list[MappingEdit]:
    """Return the edits that convert a section from FSDP1's or DeepSpeed's keys to FSDP2's."""
    if config.reader is Reader.ACCELERATE_DEEPSPEED:
        return _deepspeed(section, run)
    if not config.reader.is_trainer:
        return _accelerate(section, config, run)
    return _bare(section, config) if is_bare(section.given) else _trainer(section, config)


def settings_of(run: RunConfig) -> Iterator[Setting]:
    """Yield the settings of an accelerate configuration file, for ``accelerate launch --config_file``."""
    yield Setting(key="distributed_type", value="FSDP")
    precision = WORDS_BY_PRECISION[run.precision]
    yield Setting(key="mixed_precision", value=precision, fields=("precision", "mixed_precision"))
    for key, number in (("num_processes", run.num_ranks), ("num_machines", run.num_nodes)):
        if number is not None:
            yield Setting(key=key, value=number)
    for row in ROWS:
        if row.group == SETTINGS and (value := row.write(run)) is not None:
            yield Setting(key=f"{SETTINGS}.{PREFIX}{row.name}", value=value, fields=row.decides)
    for name, size in degrees_of(run).items():
        yield Setting(key=f"{DEGREES}.{DEGREES_PREFIX}{name}", value=size, fields=("mesh",))


def _deepspeed(section: Section, run: RunConfig) -> list[MappingEdit]:
    """Replace DeepSpeed's section by FSDP's; keys such as ``num_processes`` do not change."""
    new: dict[str, Any] = {}
    for setting in settings_of(run):
        new = merged(new, nested(setting.key, setting.value))
    replacements: Replacements = {
        "distributed_type": [("distributed_type", "FSDP")],
        "deepspeed_config": [("fsdp_config", new["fsdp_config"])],
    }
    if "parallelism_config" in section.given:  # DeepSpeed's sequence parallelism is FSDP2's context parallelism
        degrees = new.get("parallelism_config")
        replacements["parallelism_config"] = [] if degrees is None else [("parallelism_config", degrees)]
    return [MappingEdit(path=section.path, replacements=replacements)]


def _accelerate(section: Section, config: EffectiveConfig, run: RunConfig) -> list[MappingEdit]:
    new: Entries = [
        ("fsdp_version", 2),
        ("fsdp_reshard_after_forward", config.settings["reshard_after_forward"]),
    ]
    key = config.key_of("state_dict_type")
    if key is None or config.value_of(key) is None:  # the default differs under FSDP2
        new.append(("fsdp_state_dict_type", STATE_DICTS[run.state_dict_type]))
    edits = []
    beside: Replacements = {}
    if _has_settings(section):
        edits.append(_settings_edit(section, config, new, places=("sharding_strategy", "version")))
    else:
        place = "fsdp_config" if "fsdp_config" in section.given else "distributed_type"
        kept = [] if place == "fsdp_config" else [(place, section.given[place])]
        beside[place] = [*kept, ("fsdp_config", dict(new))]
    degrees = {DEGREES_PREFIX + name: size for name, size in degrees_of(run).items()}
    if degrees and config.key_of("dp_shard_size") is None and DEGREES in section.given:
        beside[DEGREES] = [(DEGREES, degrees)]
    elif degrees and config.key_of("dp_shard_size") is None:
        beside.setdefault("distributed_type", [("distributed_type", section.given["distributed_type"])])
        beside["distributed_type"].append((DEGREES, degrees))
    return [MappingEdit(path=section.path, replacements=beside), *edits] if beside else edits


def _bare(section: Section, config: EffectiveConfig) -> list[MappingEdit]:
    """Return the edits of a Trainer's file that consists of the settings only."""
    new = _new_settings(config)
    gone = [
        each.key
        for each in config.given
        if each.key in section.given and (each.row is None or each.row.group == SETTINGS) and _goes(each, dict(new))
    ]
    return [MappingEdit(path=section.path, replacements={key: [] for key in gone}, additions=new)]


def _trainer(section: Section, config: EffectiveConfig) -> list[MappingEdit]:
    new = _new_settings(config)
    beside: Replacements = {}
    for name in OLD_SIBLINGS:
        if name in section.given:
            beside[name] = []
            value = config.settings[name.removeprefix(PREFIX)]
            if value:
                new.append((name.removeprefix(PREFIX), list(value) if isinstance(value, tuple) else value))
    if config.settings["sharding_strategy"].is_hybrid:
        within = _strategy(is_hybrid=False, reshards=config["reshard_after_forward"])
        beside["fsdp"] = [("fsdp", _words(config, within, offloads=config["offload_params"]))]
    edits = []
    if _has_settings(section):
        edits.append(_settings_edit(section, config, new, places=("version",)))
    elif "fsdp_config" in section.given:
        beside["fsdp_config"] = [("fsdp_config", dict(new))]
    else:
        beside["fsdp"] = [*beside.get("fsdp", [("fsdp", section.given["fsdp"])]), ("fsdp_config", dict(new))]
    return [MappingEdit(path=section.path, replacements=beside), *edits] if beside else edits


def _new_settings(config: EffectiveConfig) -> Entries:
    """Return the settings with which transformers 5 does the same as 4.51.3."""
    new: Entries = [
        ("version", 2),
        ("reshard_after_forward", config.settings["reshard_after_forward"]),
        ("state_dict_type", STATE_DICTS[config.settings["state_dict_type"]]),
    ]
    policy = config.settings["auto_wrap_policy"]
    if policy != "TRANSFORMER_BASED_WRAP":  # the default, with or without auto_wrap in fsdp
        new.append(("auto_wrap_policy", policy))
    return new


def _words(config: EffectiveConfig, strategy: ShardingStrategy, *, offloads: bool) -> str | list[str]:
    """Return the options of ``fsdp`` with another strategy, as text or list as in the file."""
    words = [strategy.name.lower()]
    words += ["offload"] if offloads else []
    words += ["auto_wrap"] if config["auto_wrap_policy"] != "NO_WRAP" else []
    return words if isinstance(config.around["fsdp"], list) else " ".join(words)


def _has_settings(section: Section) -> bool:
    settings = section.given.get("fsdp_config")
    return isinstance(settings, Mapping) and bool(settings)


def _settings_edit(section: Section, config: EffectiveConfig, new: Entries, *, places: tuple[str, ...]) -> MappingEdit:
    """Return the edit of the mapping ``fsdp_config``."""
    replacements: Replacements = {}
    names = {name.removeprefix(PREFIX) for name, _ in new}
    for given in config.given:
        where, _, key = given.key.partition(".")
        if where != "fsdp_config" or not key:
            continue
        if given.row is None and key not in section.given["fsdp_config"]:
            continue  # not a string: left as is
        if _goes(given, names):
            replacements[key] = []
    return edit_in_place(section, replacements, new, places=places)


def _goes(given: GivenKey, new: Collection[str]) -> bool:
    """Whether to remove the key: unused by FSDP2, in ``new``, or not read before but read with FSDP2's keys."""
    return given.row is None or given.row.name in GONE or given.row.name in new or not given.is_read


def edit_in_place(
    section: Section, replacements: Replacements, new: Entries, *, places: tuple[str, ...]
) -> MappingEdit:
    """Return the edit of ``fsdp_config`` that inserts new settings at a replaced key, or at the end.

    Args:
        places: Names of candidate keys, without prefix, in order of preference.
    """
    path = (*section.path, "fsdp_config")
    place = next((key for name in places for key in replacements if key.removeprefix(PREFIX) == name), None)
    if place is None:
        return MappingEdit(path=path, replacements=replacements, additions=new)
    return MappingEdit(path=path, replacements={**replacements, place: new})


# ---------------------------------------------------------------------------------------------------------------------
# A patch


def settings_in_place(config: EffectiveConfig, run: RunConfig) -> Iterator[Setting]:
    """Yield a run's settings that a patch can change, as keys of a Trainer, or for FSDP1 of accelerate or axolotl."""
    reader, strategy = config.reader, config["sharding_strategy"]
    reshards = run.config.reshard_after_forward is not False
    if strategy is not None and strategy.reshards_after_forward is not reshards:
        strategy = _strategy(is_hybrid=strategy.is_hybrid, reshards=reshards)
    if strategy is not None and config.key_of("fsdp") is not None:
        words = _words(config, strategy, offloads=run.config.cpu_offload)
        yield Setting(key="fsdp", value=words, fields=("reshard_after_forward", "cpu_offload"))
    if reader is Reader.ACCELERATE_FSDP1:
        key = f"{SETTINGS}.{PREFIX}sharding_strategy"
        yield Setting(key=key, value=strategy.name, fields=("reshard_after_forward",))
    if config["gradient_checkpointing"]:
        recomputes = run.config.activation_checkpointing.checkpoint
        yield Setting(key="gradient_checkpointing", value=recomputes, fields=("activation_checkpointing",))
    for row in ROWS:
        if row.group == SETTINGS and reads(reader, row) and (value := row.write(run)) is not None:
            name = row.aliases[0] if row.aliases and reader.is_transformers else row.name
            prefix = "" if reader.is_transformers else PREFIX
            yield Setting(key=f"{SETTINGS}.{prefix}{name}", value=value, fields=row.decides)


def sizes_in_place(config: EffectiveConfig, run: RunConfig) -> Iterator[Setting]:
    """Yield the sizes of a mesh that needs none, for an accelerate file that already sets some."""
    if config.reader is Reader.ACCELERATE_FSDP2 and config.key_of("dp_shard_size") is not None and not degrees_of(run):
        yield Setting(key="dp_replicate_size", value=run.config.mesh.replicate_degree, fields=("mesh",))
        yield Setting(key="dp_shard_size", value=run.config.mesh.shard_degree, fields=("mesh",))


def _strategy(*, is_hybrid: bool, reshards: bool) -> ShardingStrategy:
    of_kind = (each for each in ShardingStrategy if each.is_hybrid is is_hybrid)
    return next(each for each in of_kind if each.reshards_after_forward is reshards)
