"""The dialect of Composer and LLM Foundry: find and read sections, and write a run as their keys."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from composer_fsdp2.config.findings import Finding, Origin, Outcome
from composer_fsdp2.config.parallel import BroadcastBatch
from composer_fsdp2.config.rows import Row, unknown_key
from composer_fsdp2.errors import ConfigError
from composer_fsdp2.fsdp1.keys import IGNORED_BY_COMPOSER, KEYS, KEYS_BY_NAME, Key, KeyGroup
from composer_fsdp2.fsdp1.translate import Translation, translate
from composer_fsdp2.migration.dialect import (
    Dialect,
    MappingEdit,
    Reading,
    ReplacedBlock,
    Section,
    Setting,
    written,
)
from composer_fsdp2.migration.dialects.composer.around import (
    BESIDE,
    BESIDE_ROWS,
    NUMBERS_OF_TRAINING,
    TRAINER_ROWS,
    Given,
    around_of,
    clipping_problem,
    foundry_model,
    implicit_findings,
    parallelism_findings,
    precision_of,
    runtime_training_findings,
    set_by_foundry,
    tensor_degree,
    training_of,
)
from composer_fsdp2.migration.dialects.composer.launch import launch_findings, unfinished_findings
from composer_fsdp2.migration.dialects.composer.written import CONVERTED, LIMITS, WRITTEN
from composer_fsdp2.migration.dialects.fingerprints import is_hugging_face
from composer_fsdp2.migration.lens import Loss, fault
from composer_fsdp2.migration.paths import Path, value_at
from composer_fsdp2.migration.run import RunConfig

_PLACES = ("fsdp_config", "parallelism_config.fsdp", "parallelism_config.fsdp2")
_OF_TRAINER = (row.name for row in TRAINER_ROWS if row.name != "algorithms")
_ELSEWHERE = {row.name: row.elsewhere for row in KEYS if row.elsewhere} | dict.fromkeys(_OF_TRAINER, "")


class ComposerDialect(Dialect):
    """Composer and LLM Foundry. Sections are read by the table in ``fsdp1/keys.py``."""

    name = target = "composer"
    title = "Composer and LLM Foundry"
    rows = (*KEYS, *BESIDE_ROWS)
    rows_beside = TRAINER_ROWS
    limits = LIMITS
    interpolates = True
    keeps_implicit = True
    heads = (("fsdp_config", ()),)
    unfinished = staticmethod(unfinished_findings)
    elsewhere = staticmethod(lambda key: _ELSEWHERE.get(key, IGNORED_BY_COMPOSER))
    silent = tuple(
        Section.at(("fsdp_config",), {"fsdp_config": {}, **beside})
        for beside in ({}, {"algorithms": {"gradient_clipping": {"clipping_type": "value"}}})
    )
    companions: Mapping[str, Mapping[str, Any]] = {
        "activation_checkpointing_policy": {"activation_checkpointing": True}
    }

    def find(self, path: Path, values: Given, parent: Given) -> Path | None:
        is_section = path[-1:] == ("fsdp_config",) and not is_hugging_face(parent)
        is_section |= path[-2:-1] == ("parallelism_config",) and path[-1] in ("fsdp", "fsdp2")
        return path if is_section else None

    def read(self, section: Section) -> Reading:
        given, around = section.given, around_of(section)
        known = {name: value for name, value in given.items() if name in KEYS_BY_NAME}
        unknown = [_unknown(name, value) for name, value in given.items() if name not in KEYS_BY_NAME]
        precision, problem = precision_of(around)
        problems = [each for each in (problem, clipping_problem(around)) if each is not None]
        elsewhere = (*unknown, *problems, *parallelism_findings(around))
        by_foundry = set_by_foundry(foundry_model(around) or {}, given)
        in_effect = known | {name: each.value for name, each in by_foundry.items()}
        degree = tensor_degree(around)
        read = partial(translate, precision=precision, device="cpu", tensor_parallel_degree=degree)
        try:
            translation, effective = read(known), read(in_effect)
        except ConfigError as error:
            return Reading(run=None, findings=(*_contradictions(in_effect, read, error), *elsewhere), details=section)
        training = training_of(around)
        findings = (
            *(_with_foundry_value(finding, by_foundry) for finding in translation.findings),
            *elsewhere,
            *(finding for name, finding in by_foundry.items() if name not in given),
            *implicit_findings(section, around),
            *runtime_training_findings(around, training),
        )
        if any(each.outcome.blocks for each in unknown) or problems or effective.blocking:
            return Reading(run=None, findings=findings, details=section)
        run = RunConfig(
            config=replace(effective.config, mesh=effective.config.mesh.data_parallel),
            precision=effective.precision,
            state_dict_type=known.get("state_dict_type") or "full",
            verbose=effective.verbose,
            async_save=bool(known.get("async_save")),
            tensor_parallel=degree,
            **training,
        )
        return Reading(run=_count_shared_batches_once(run), findings=findings, rows=KEYS_BY_NAME, details=section)

    def settings(self, run: RunConfig) -> Iterator[Setting]:
        return written(WRITTEN, run)

    def rewrite(self, section: Section, reading: Reading) -> list[MappingEdit]:
        """Replace FSDP1's keys by FSDP2's in place. Keys that Composer's FSDP2 does not have keep their names."""
        replacements = {}
        for name, value in section.given.items():
            row = KEYS_BY_NAME.get(name)
            unchanged = [(name, value)] if row is not None else []  # an unknown key did nothing and is removed
            new = unchanged if row is None or row.rewrite is None else row.rewrite(row, value, section.given)
            if new != [(name, value)]:
                replacements[name] = new
        return [MappingEdit(path=section.path, replacements=replacements)] if replacements else []

    def own_findings(self, reading: Reading, lost: Sequence[Loss]) -> tuple[Finding, ...]:
        """Return the findings of the reading, which already describe FSDP2.

        A field that the new text loses is a bug, and reported.
        """
        faults = (fault(name, "", "the new text loses it") for each in lost for name in each.fields if not each.is_kept)
        found = (each for each in reading.findings if each.key not in NUMBERS_OF_TRAINING)
        return (*found, *launch_findings(reading.details), *faults)

    def is_own(self, finding: Finding) -> bool:
        row = KEYS_BY_NAME.get(finding.key)
        is_ours = row is not None and row.group == KeyGroup.OURS and row.name not in CONVERTED
        return row is not None and is_ours and finding.value != row.default

    def keeps(self, key: str) -> bool:
        return key in KEYS_BY_NAME and KEYS_BY_NAME[key].rewrite is None

    def replaced_block(self, section: Section) -> ReplacedBlock:
        """Return the section, or ``parallelism_config`` if the section is its only entry."""
        holder = value_at(section.around, section.path[:-1])
        is_alone = section.path[-2:-1] == ("parallelism_config",) and len(holder) == 1
        return ReplacedBlock(entry=section.path[:-1] if is_alone else section.path, inner=section.path)

    def places(self, row: Row) -> tuple[str, ...]:
        return super().places(row) if row.group == BESIDE else tuple(f"{place}.{row.name}" for place in _PLACES)

    def values(self, row: Row) -> tuple[Any, ...]:
        return row.takes.choices

    def defaults(self, row: Row) -> Given:
        others = row.defaults if isinstance(row, Key) else {}
        return {"FSDPConfig" if others else "": row.default, **others}


def _count_shared_batches_once(run: RunConfig) -> RunConfig:
    """Return the run with a global batch that counts rows of TP and CP peers once; Composer counts them on every
    rank."""
    shared = run.tensor_parallel * run.context_parallel
    if shared == 1 or run.global_batch_size is None or run.config.effective_broadcast_batch is BroadcastBatch.GATHER:
        return run
    quotient, rest = divmod(run.global_batch_size, shared)
    return replace(run, global_batch_size=None if rest else quotient)


def _with_foundry_value(finding: Finding, by_foundry: Mapping[str, Finding]) -> Finding:
    """Return the finding of a key, changed to the value that LLM Foundry sets."""
    new = by_foundry.get(finding.key) if finding.origin is Origin.KEY else None
    return finding if new is None else replace(finding, target=new.target, reason=new.reason)


# ---------------------------------------------------------------------------------------------------------------------
# Keys that are unknown, or contradict each other

# The runtime's own translation, with the file's other settings applied.
_Read = Callable[[Given], Translation]


def _contradictions(known: Given, read: _Read, error: ConfigError) -> list[Finding]:
    """Return a finding for each key of an invalid section: the usual finding, or the error that names the key."""
    findings, errors = dict[str, Finding](), dict[str, ConfigError]()
    for name in known:
        try:
            findings[name] = _isolated_finding((name,), known, read)
        except ConfigError as own:
            errors[name] = own
    if not errors:  # each key is right, and they contradict each other
        errors[next((name for name in known if name in error.keys), next(iter(known)))] = error
    for name, wrong in errors.items():
        reason = str(wrong)
        findings[name] = Finding(key=name, value=known[name], outcome=Outcome.NEEDS_DECISION, reason=reason)
    return [findings[name] for name in known]


def _isolated_finding(names: tuple[str, ...], known: Given, read: _Read) -> Finding:
    """Return the finding of the first key, read together with only the keys that its error names as required.

    Raises:
        ConfigError: the key is invalid by itself.
    """
    try:
        return read({name: known[name] for name in names}).findings[0]
    except ConfigError as error:
        needed = [name for name in error.keys if name in known and name not in names]
        if not needed:
            raise
        return _isolated_finding((*names, *needed), known, read)


def _unknown(name: Any, value: Any) -> Finding:
    if isinstance(name, str):
        reason = "no version of Composer knew this key; FSDPConfig took it and did nothing with it"
        return unknown_key(name, value, KEYS_BY_NAME, reason, hint="")
    return Finding(
        key=str(name),
        value=value,
        outcome=Outcome.NEEDS_DECISION,
        reason="YAML does not read this key as text, so it cannot be the name of an argument of Composer's FSDPConfig",
        hint="remove it",
        known=False,
    )
