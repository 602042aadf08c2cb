"""A section of a Trainer's or accelerate's in their FSDP2 words, in its place, with as few changes as possible."""

from collections.abc import Collection, Mapping
from typing import Any

from composer_fsdp2.migration.dialect import MappingEdit, Section
from composer_fsdp2.migration.dialects.huggingface.accelerate_words import STATE_DICTS, degrees_of, settings_of
from composer_fsdp2.migration.dialects.huggingface.given_keys import is_bare
from composer_fsdp2.migration.dialects.huggingface.held import GivenKey, Held
from composer_fsdp2.migration.dialects.huggingface.places import OLD_SIBLINGS, PREFIX, SETTINGS
from composer_fsdp2.migration.dialects.huggingface.readers import Reader
from composer_fsdp2.migration.run import RunConfig

# Keys of FSDP1's that FSDP2 has no use for.
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


def rewritten(section: Section, held: Held, run: RunConfig) -> list[MappingEdit]:
    """The edits that make FSDP2's words of a section in FSDP1's or DeepSpeed's."""
    if held.reader is Reader.ACCELERATE_DEEPSPEED:
        return _deepspeed(section, run)
    if not held.reader.is_trainer:
        return _accelerate(section, held, run)
    return _bare(section, held) if is_bare(section.given) else _trainer(section, held)


def _deepspeed(section: Section, run: RunConfig) -> list[MappingEdit]:
    """DeepSpeed's section becomes FSDP's; num_processes and the like stay as they are."""
    new = {setting.key: setting.value for setting in settings_of(run)}
    replacements: Replacements = {
        "distributed_type": [("distributed_type", "FSDP")],
        "deepspeed_config": [("fsdp_config", new["fsdp_config"])],
    }
    if "parallelism_config" in section.given:  # DeepSpeed's sequence parallelism is FSDP2's context parallelism
        degrees = new.get("parallelism_config")
        replacements["parallelism_config"] = [] if degrees is None else [("parallelism_config", degrees)]
    return [MappingEdit(path=section.path, replacements=replacements)]


def _accelerate(section: Section, held: Held, run: RunConfig) -> list[MappingEdit]:
    new: Entries = [
        ("fsdp_version", 2),
        ("fsdp_reshard_after_forward", held.settings["reshard_after_forward"]),
    ]
    key = held.key_of("state_dict_type")
    if key is None or held.value_of(key) is None:  # its default is another one under FSDP2
        new.append(("fsdp_state_dict_type", STATE_DICTS[run.state_dict_type]))
    edits = []
    beside: Replacements = {}
    if _has_settings(section):
        edits.append(_settings_edit(section, held, new, places=("sharding_strategy", "version")))
    else:
        place = "fsdp_config" if "fsdp_config" in section.given else "distributed_type"
        kept = [] if place == "fsdp_config" else [(place, section.given[place])]
        beside[place] = [*kept, ("fsdp_config", dict(new))]
    degrees = degrees_of(run)
    if degrees and held.key_of("dp_shard_size") is None:
        beside.setdefault("distributed_type", [("distributed_type", section.given["distributed_type"])])
        beside["distributed_type"].append(("parallelism_config", degrees))
    return [MappingEdit(path=section.path, replacements=beside), *edits] if beside else edits


def _bare(section: Section, held: Held) -> list[MappingEdit]:
    """Of a Trainer's file that has nothing but the settings."""
    new = _new_settings(held)
    gone = [
        each.key
        for each in held.given
        if each.key in section.given and (each.row is None or each.row.group == SETTINGS) and _goes(each, dict(new))
    ]
    return [MappingEdit(path=section.path, replacements={key: [] for key in gone}, additions=new)]


def _trainer(section: Section, held: Held) -> list[MappingEdit]:
    new = _new_settings(held)
    beside: Replacements = {}
    for name in OLD_SIBLINGS:
        if name in section.given:
            beside[name] = []
            value = held.settings[name.removeprefix(PREFIX)]
            if value:
                new.append((name.removeprefix(PREFIX), list(value) if isinstance(value, tuple) else value))
    if held.settings["sharding_strategy"].is_hybrid:
        beside["fsdp"] = [("fsdp", _without_replicas(section.given["fsdp"], held))]
    edits = []
    if _has_settings(section):
        edits.append(_settings_edit(section, held, new, places=("version",)))
    elif "fsdp_config" in section.given:
        beside["fsdp_config"] = [("fsdp_config", dict(new))]
    else:
        beside["fsdp"] = [*beside.get("fsdp", [("fsdp", section.given["fsdp"])]), ("fsdp_config", dict(new))]
    return [MappingEdit(path=section.path, replacements=beside), *edits] if beside else edits


def _new_settings(held: Held) -> Entries:
    """What transformers 5 must be told, to do what 4.51.3 did."""
    new: Entries = [
        ("version", 2),
        ("reshard_after_forward", held.settings["reshard_after_forward"]),
        ("state_dict_type", STATE_DICTS[held.settings["state_dict_type"]]),
    ]
    policy = held.settings["auto_wrap_policy"]
    if policy != "TRANSFORMER_BASED_WRAP":  # it takes that one, whether fsdp says auto_wrap or not
        new.append(("auto_wrap_policy", policy))
    return new


def _without_replicas(given: object, held: Held) -> str | list[str]:
    """The words of ``fsdp``, as text or list as before, with the strategy that a hybrid is within a node."""
    words = ["full_shard" if held.settings["reshard_after_forward"] else "shard_grad_op"]
    words += ["offload"] if held.settings["offload_params"] else []
    words += ["auto_wrap"] if held.settings["auto_wrap_policy"] != "NO_WRAP" else []
    return words if isinstance(given, list) else " ".join(words)


def _has_settings(section: Section) -> bool:
    settings = section.given.get("fsdp_config")
    return isinstance(settings, Mapping) and bool(settings)


def _settings_edit(section: Section, held: Held, new: Entries, *, places: tuple[str, ...]) -> MappingEdit:
    """Of the mapping that ``fsdp_config`` is."""
    replacements: Replacements = {}
    names = {name.removeprefix(PREFIX) for name, _ in new}
    for given in held.given:
        where, _, key = given.key.partition(".")
        if where != "fsdp_config" or not key:
            continue
        if given.row is None and key not in section.given["fsdp_config"]:
            continue  # a number, which stays where it is
        if _goes(given, names):
            replacements[key] = []
    return edit_in_place(section, replacements, new, places=places)


def _goes(given: GivenKey, new: Collection[str]) -> bool:
    """What FSDP2 has no use for goes, and so does what was not read: a system that reads FSDP2's keys would read it."""
    return given.row is None or given.row.name in GONE or given.row.name in new or not given.is_read


def edit_in_place(
    section: Section, replacements: Replacements, new: Entries, *, places: tuple[str, ...]
) -> MappingEdit:
    """The edit of ``fsdp_config`` that puts new settings where one of the keys stood that it replaces, or at the end.

    Args:
        places: Names of such keys, without prefix, the best first.
    """
    path = (*section.path, "fsdp_config")
    place = next((key for name in places for key in replacements if key.removeprefix(PREFIX) == name), None)
    if place is None:
        return MappingEdit(path=path, replacements=replacements, additions=new)
    return MappingEdit(path=path, replacements={**replacements, place: new})
