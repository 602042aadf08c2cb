"""Hugging Face: a Trainer's arguments (``fsdp``, ``fsdp_config``) and accelerate's configuration files.

What a file asks for is what its system did with it, which is not always what it says. The keys are in
``huggingface_keys``, how a section is read in ``huggingface_reading``, and a run in accelerate's words in
``huggingface_accelerate``.
"""

from collections.abc import Mapping
from typing import Any

from composer_fsdp2.compat.dialects.base import Expression, Frame, MappingEdit, Part, Path, Reading, Run, Section
from composer_fsdp2.compat.dialects.huggingface_accelerate import degrees_of, differences_of, express
from composer_fsdp2.compat.dialects.huggingface_keys import KEYS, OLD_SIBLINGS, PREFIX, Key, Source
from composer_fsdp2.compat.dialects.huggingface_reading import (
    STATE_DICTS,
    VERSION_HINT,
    VERSION_REASON,
    Effect,
    effect_of,
    findings_of,
    run_of,
    sections_of,
)
from composer_fsdp2.compat.dialects.rows import deciding
from composer_fsdp2.config import ShardingStrategy
from composer_fsdp2.errors import ConfigError
from composer_fsdp2.findings import Finding, Outcome

__all__ = ["KEYS", "HuggingFaceDialect", "Key", "Source"]


class HuggingFaceDialect:
    """See the module."""

    name = "huggingface"

    def sections(self, values: Mapping[str, Any]) -> list[Path]:
        return list(sections_of(values, ()))

    def read(self, section: Section) -> Reading:
        effect = effect_of(section.said)
        run = None
        try:
            run = run_of(effect)
        except ConfigError as error:
            key = effect.key_of("dp_shard_size", "dp_replicate_size") or effect.key_of("sharding_strategy", "fsdp")
            effect.problems.setdefault(key or "mesh", str(error))
        reads_other_file = isinstance(section.said.get("fsdp_config"), str)
        is_readable = not effect.problems and not reads_other_file and not effect.settings["xla"]
        findings = tuple(findings_of(effect))
        return Reading(run=run if is_readable else None, findings=findings, parts=_parts(effect, findings))

    def express(self, run: Run) -> Expression:
        """A configuration file of accelerate's, for ``accelerate launch --config_file``."""
        return express(run)

    def rewrite(self, section: Section, reading: Reading) -> list[MappingEdit]:
        """FSDP2's words for FSDP1's, in place; nothing where FSDP2 has no form for the strategy."""
        effect = effect_of(section.said)
        is_whole = effect.settings["sharding_strategy"] is ShardingStrategy.NO_SHARD
        if reading.run is None or is_whole or effect.source.is_fsdp2:
            return []
        return (
            _rewrite_trainer(section, effect)
            if effect.source.is_trainer
            else _rewrite_accelerate(section, effect, reading.run)
        )

    def own_findings(self, reading: Reading) -> tuple[Finding, ...]:
        """With what Hugging Face's FSDP2 has no word for, or does otherwise than its FSDP1."""
        run = reading.run
        if run is None or run.extras.get("fsdp2"):
            return reading.findings
        only_later = [_TRAINER_FSDP2] if run.extras.get("trainer") else []
        return (*reading.findings, *differences_of(run), *only_later)

    def frame(self, section: Section) -> Frame:
        """What is FSDP's own goes, and so does what decides the precision."""
        names = ("fsdp_config", "fsdp", "distributed_type")
        main = next((name for name in names if section.said.get(name)), "fsdp_config")
        is_nested = isinstance(section.said.get("fsdp_config"), Mapping)
        return Frame(
            entry=(*section.path, main),
            inner=(*section.path, "fsdp_config") if is_nested and main == "fsdp_config" else None,
            prefix="fsdp_config.",
            beside=tuple(map(str, section.said)),
        )


def _parts(effect: Effect, findings: tuple[Finding, ...]) -> dict[str, Part]:
    """By key. One that is not read counts: what holds in its stead goes where the user looks for it."""
    unread = {said.key for said in effect.said if not said.is_read}
    parts = {said.key: said.row.part for said in effect.said if said.row is not None and not said.is_off}
    return deciding(parts, (finding for finding in findings if finding.key not in unread))


# A file that says it already has this finding at its own key.
_TRAINER_FSDP2 = Finding(
    key="(version)",
    value=2,
    outcome=Outcome.APPROXIMATE,
    target="version: 2",
    reason=VERSION_REASON,
    hint=VERSION_HINT,
)


# ---------------------------------------------------------------------------------------------------------------------
# In place

_GONE = frozenset(
    (
        "sharding_strategy",
        "backward_prefetch",
        "forward_prefetch",
        "sync_module_states",
        "use_orig_params",
        "limit_all_gathers",
    )
)
Replacements = dict[str, list[tuple[str, Any]]]


def _rewrite_accelerate(section: Section, effect: Effect, run: Run) -> list[MappingEdit]:
    settings = section.said.get("fsdp_config")
    new: list[tuple[str, Any]] = [
        ("fsdp_version", 2),
        ("fsdp_reshard_after_forward", effect.settings["reshard_after_forward"]),
    ]
    key = effect.key_of("state_dict_type")
    if key is None or effect.value_of(key) is None:  # its default is another one under FSDP2
        new.append(("fsdp_state_dict_type", STATE_DICTS[run.state_dict_type]))
    edits = []
    beside: Replacements = {}
    if isinstance(settings, Mapping) and settings:
        edits.append(_settings_edit(section, effect, new, places=("sharding_strategy", "version")))
    else:
        place = "fsdp_config" if "fsdp_config" in section.said else "distributed_type"
        kept = [] if place == "fsdp_config" else [(place, section.said[place])]
        beside[place] = [*kept, ("fsdp_config", dict(new))]
    degrees = degrees_of(run)
    if degrees and effect.key_of("dp_shard_size") is None:
        beside.setdefault("distributed_type", [("distributed_type", section.said["distributed_type"])])
        beside["distributed_type"].append(("parallelism_config", degrees))
    return [MappingEdit(path=section.path, replacements=beside), *edits] if beside else edits


def _rewrite_trainer(section: Section, effect: Effect) -> list[MappingEdit]:
    settings = section.said.get("fsdp_config")
    new: list[tuple[str, Any]] = [
        ("version", 2),
        ("reshard_after_forward", effect.settings["reshard_after_forward"]),
        ("state_dict_type", STATE_DICTS[effect.settings["state_dict_type"]]),
    ]
    policy = effect.settings["auto_wrap_policy"]
    if policy != "TRANSFORMER_BASED_WRAP":  # transformers 5 takes that one, whether fsdp says auto_wrap or not
        new.append(("auto_wrap_policy", policy))
    beside: Replacements = {}
    for name in OLD_SIBLINGS:
        if name in section.said:
            beside[name] = []
            key = name.removeprefix(PREFIX)
            if effect.settings[key]:
                new.append((key, list(effect.settings[key]) if key.startswith("t") else effect.settings[key]))
    if effect.settings["sharding_strategy"].is_hybrid:
        plain = "full_shard" if effect.settings["reshard_after_forward"] else "shard_grad_op"
        words = [plain, *(["offload"] if effect.settings["offload_params"] else [])]
        words += ["auto_wrap"] if policy != "NO_WRAP" else []
        said = section.said["fsdp"]
        beside["fsdp"] = [("fsdp", words if isinstance(said, list) else " ".join(words))]
    edits = []
    if isinstance(settings, Mapping) and settings:
        edits.append(_settings_edit(section, effect, new, places=("version",)))
    elif "fsdp_config" in section.said:
        beside["fsdp_config"] = [("fsdp_config", dict(new))]
    else:
        beside["fsdp"] = [*beside.get("fsdp", [("fsdp", section.said["fsdp"])]), ("fsdp_config", dict(new))]
    return [MappingEdit(path=section.path, replacements=beside), *edits] if beside else edits


def _settings_edit(
    section: Section, effect: Effect, new: list[tuple[str, Any]], *, places: tuple[str, ...]
) -> MappingEdit:
    """What FSDP2 has no use for goes, and so does what was not read: a system that reads FSDP2's keys would read it."""
    replacements: Replacements = {}
    names = {name.removeprefix(PREFIX) for name, _ in new}
    for said in effect.said:
        where, _, key = said.key.partition(".")
        if where != "fsdp_config" or not key or said.row is None:
            continue
        if said.row.name in _GONE or said.row.name in names or not said.is_read:
            replacements[key] = []
    place = next(
        (key for name in places for key in replacements if key.removeprefix(PREFIX) == name),
        None,
    )
    path = (*section.path, "fsdp_config")
    if place is None:
        return MappingEdit(path=path, replacements=replacements, additions=new)
    replacements[place] = new
    return MappingEdit(path=path, replacements=replacements)
