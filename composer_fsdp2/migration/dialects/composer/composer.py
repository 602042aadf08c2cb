"""The dialect of Composer and LLM Foundry: finds and reads sections, and writes a run as their keys."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from composer_fsdp2.config.findings import Finding
from composer_fsdp2.config.parallel import BroadcastBatch
from composer_fsdp2.config.rows import Row
from composer_fsdp2.config.sharding import ShardingConfig
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
)
from composer_fsdp2.migration.dialects.composer.beside_section import (
    BESIDE,
    BESIDE_ROWS,
    findings_beside,
    tensor_degree,
)
from composer_fsdp2.migration.dialects.composer.composer_words import (
    BESIDE_WRITTEN,
    WORDS,
    WRITTEN,
    mesh_words,
)
from composer_fsdp2.migration.dialects.composer.launch import launch_findings, unfinished_findings
from composer_fsdp2.migration.dialects.composer.limits import LIMITS
from composer_fsdp2.migration.dialects.composer.set_by_foundry import set_by_foundry_in, with_foundrys
from composer_fsdp2.migration.dialects.composer.surroundings import (
    OF_TRAINING_KEYS,
    Given,
    around_of,
    clipped,
    clipping_problem,
    open_training,
    precision_of,
    training_of,
)
from composer_fsdp2.migration.dialects.composer.unread import contradictions_of, unknown_keys
from composer_fsdp2.migration.dialects.composer.unsaid import implicit_findings
from composer_fsdp2.migration.dialects.fingerprints import is_hugging_face
from composer_fsdp2.migration.lens import Loss, fault
from composer_fsdp2.migration.paths import Path, value_at
from composer_fsdp2.migration.run import RunConfig

_PLACES = ("fsdp_config", "parallelism_config.fsdp", "parallelism_config.fsdp2")
_OF_TRAINER = (key for key, _, _ in BESIDE_WRITTEN if key != "algorithms")
_ELSEWHERE = {row.name: row.elsewhere for row in KEYS if row.elsewhere} | dict.fromkeys(_OF_TRAINER, "")


class ComposerDialect(Dialect):
    """Sections for Composer and LLM Foundry, read by the table of ``fsdp1/keys.py``."""

    name = target = "composer"
    title = "Composer and LLM Foundry"
    rows = (*KEYS, *BESIDE_ROWS)
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
        known = {name: value for name, value in section.given.items() if name in KEYS_BY_NAME}
        unknown = unknown_keys(section.given)
        around = around_of(section)
        precision, problem = precision_of(around)
        problems = [each for each in (problem, clipping_problem(around)) if each is not None]
        elsewhere = (*unknown, *problems, *findings_beside(section, around))
        by_foundry = set_by_foundry_in(section)
        in_effect = known | {name: value for name, (value, _) in by_foundry.items()}
        degree = tensor_degree(section, around)
        read = partial(translate, precision=precision, device="cpu", tensor_parallel_degree=degree)
        try:
            translation, effective = read(known), read(in_effect)
        except ConfigError as error:
            return Reading(run=None, findings=(*contradictions_of(in_effect, read, error), *elsewhere), details=section)
        findings = (
            *(with_foundrys(finding, by_foundry) for finding in translation.findings),
            *elsewhere,
            *implicit_findings(section, around, by_foundry),
            *open_training(around),
        )
        if any(each.outcome.blocks for each in unknown) or problems or effective.blocking:
            return Reading(run=None, findings=findings, details=section)
        sharded = replace(effective.config, mesh=effective.config.mesh.data_parallel)
        run = _of_shared_batches(replace(_run(sharded, effective, known, around), tensor_parallel=degree))
        return Reading(run=run, findings=findings, rows=KEYS_BY_NAME, details=section)

    def settings(self, run: RunConfig) -> Iterator[Setting]:
        for key, value in mesh_words(run.config.mesh):
            yield Setting(key=key, value=value, fields=KEYS_BY_NAME[key].fields)
        for key, write in WRITTEN:
            if (value := write(run)) is not None:
                yield Setting(key=key, value=value, fields=KEYS_BY_NAME[key].fields)

    def beside(self, run: RunConfig) -> Iterator[Setting]:
        """Composer's ``precision``, and LLM Foundry's ``algorithms``, batches, duration and ``optimizer``."""
        for key, fields, write in BESIDE_WRITTEN:
            if (new := write(run)) is not None:
                yield Setting(key=key, value=new, fields=fields)

    def rewrite(self, section: Section, reading: Reading) -> list[MappingEdit]:
        """Replace FSDP1's keys by FSDP2's in place; keys whose FSDP2 form only composer_fsdp2 has keep their names."""
        replacements = {}
        for name, value in section.given.items():
            row = KEYS_BY_NAME.get(name)
            kept = [(name, value)] if row is not None else []  # an unknown key did nothing and is removed
            new = kept if row is None or row.rewrite is None else row.rewrite(row, value, section.given)
            if new != [(name, value)]:
                replacements[name] = new
        return [MappingEdit(path=section.path, replacements=replacements)] if replacements else []

    def own_findings(self, reading: Reading, lost: Sequence[Loss]) -> tuple[Finding, ...]:
        """Return the reading's findings, which already describe this target; any loss in the new text is a fault."""
        faults = (fault(name, "", "the new text loses it") for each in lost for name in each.fields if not each.is_kept)
        found = (each for each in reading.findings if each.key not in OF_TRAINING_KEYS)
        return (*found, *launch_findings(reading.details), *faults)

    def is_own(self, finding: Finding) -> bool:
        row = KEYS_BY_NAME.get(finding.key)
        is_ours = row is not None and row.group == KeyGroup.OURS and row.name not in WORDS
        return row is not None and is_ours and finding.value != row.default

    def keeps(self, key: str) -> bool:
        return key in KEYS_BY_NAME and KEYS_BY_NAME[key].rewrite is None

    def replaced_block(self, section: Section) -> ReplacedBlock:
        """Return the section, or the whole ``parallelism_config`` if the section is its only entry."""
        holder = value_at(section.around, section.path[:-1])
        is_alone = section.path[-2:-1] == ("parallelism_config",) and len(holder) == 1
        return ReplacedBlock(entry=section.path[:-1] if is_alone else section.path, inner=section.path)

    def places(self, row: Row) -> tuple[str, ...]:
        if row.group == BESIDE:
            return (row.name, *row.aliases)
        return tuple(f"{place}.{row.name}" for place in _PLACES)

    def values(self, row: Row) -> tuple[Any, ...]:
        return row.takes.choices

    def defaults(self, row: Row) -> Given:
        others = row.defaults if isinstance(row, Key) else {}
        return {"FSDPConfig": row.default, **others} if others else {"": row.default}


def _of_shared_batches(run: RunConfig) -> RunConfig:
    """Count once the rows of ranks that share a batch; Composer divides a global batch among all ranks."""
    shared = run.tensor_parallel * run.context_parallel
    if shared == 1 or run.global_batch_size is None or run.config.batches_are is BroadcastBatch.GATHER:
        return run
    whole, rest = divmod(run.global_batch_size, shared)
    return replace(run, global_batch_size=None if rest else whole)


def _run(config: ShardingConfig, translation: Translation, known: Given, around: Given) -> RunConfig:
    norm, otherwise = clipped(around)
    return RunConfig(
        config=config,
        precision=translation.precision,
        state_dict_type=known.get("state_dict_type") or "full",
        verbose=translation.verbose,
        async_save=bool(known.get("async_save")),
        max_grad_norm=norm,
        other_clipping=otherwise,
        **training_of(around),
    )
