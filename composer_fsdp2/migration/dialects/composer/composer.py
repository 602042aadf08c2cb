"""The dialect of Composer and LLM Foundry: where sections are, what they ask for, and a run in their words."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from composer_fsdp2.config.findings import Finding
from composer_fsdp2.config.rows import Aspect, Row
from composer_fsdp2.config.sharding import GradientDtype, ShardingConfig
from composer_fsdp2.errors import ConfigError
from composer_fsdp2.fsdp1.keys import IGNORED_BY_COMPOSER, KEYS, KEYS_BY_NAME, KeyGroup
from composer_fsdp2.fsdp1.parsing import BackwardPrefetch
from composer_fsdp2.fsdp1.translate import Translation, translate
from composer_fsdp2.migration.dialect import (
    Dialect,
    Expression,
    MappingEdit,
    Question,
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
from composer_fsdp2.migration.dialects.composer.composer_lacks import LACKS
from composer_fsdp2.migration.dialects.composer.composer_patch import patch_steps
from composer_fsdp2.migration.dialects.composer.composer_words import (
    WORDS,
    fields_of_our_own,
    mesh_words,
    precision_words,
)
from composer_fsdp2.migration.dialects.composer.set_by_foundry import REENTRANT, set_by_foundry_in, with_foundrys
from composer_fsdp2.migration.dialects.composer.surroundings import (
    Given,
    around_of,
    clipped,
    clipping_problem,
    precision_of,
)
from composer_fsdp2.migration.dialects.composer.unread import contradictions_of, unknown_keys
from composer_fsdp2.migration.dialects.composer.unsaid import implicit_findings
from composer_fsdp2.migration.dialects.fingerprints import is_hugging_face
from composer_fsdp2.migration.patch import Patch, PatchStep
from composer_fsdp2.migration.paths import Path, value_at
from composer_fsdp2.migration.run import RunConfig

_PLACES = ("fsdp_config", "parallelism_config.fsdp", "parallelism_config.fsdp2")
_ELSEWHERE = {row.name: row.elsewhere for row in KEYS if row.elsewhere} | {
    "precision": ""  # the Trainer's own, beside the section
}


class ComposerDialect(Dialect):
    """Sections for Composer and LLM Foundry, read by the table of ``fsdp1/keys.py``."""

    name = target = "composer"
    title = "Composer and LLM Foundry"
    rows = (*KEYS, *BESIDE_ROWS)
    lacks = LACKS
    interpolates = True
    keeps_implicit = True
    heads = (("fsdp_config", ()),)
    elsewhere = staticmethod(lambda key: _ELSEWHERE.get(key, IGNORED_BY_COMPOSER))
    silent = (
        Section.at(
            ("fsdp_config",), {"fsdp_config": {}, "algorithms": {"gradient_clipping": {"clipping_type": "value"}}}
        ),
    )

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
            return Reading(run=None, findings=(*contradictions_of(in_effect, read, error), *elsewhere))
        findings = (
            *(with_foundrys(finding, by_foundry) for finding in translation.findings),
            *elsewhere,
            *implicit_findings(section, around, by_foundry),
        )
        if any(each.outcome.blocks for each in unknown) or problems or effective.blocking:
            return Reading(run=None, findings=findings)
        aspects = {row.name: row.aspect for row in KEYS if row.aspect is not Aspect.OTHER}
        sharded = replace(effective.config, mesh=effective.config.mesh.data_parallel)
        run = replace(_run(sharded, effective, known, around), tensor_parallel=degree)
        return Reading(run=run, findings=findings, aspects=aspects, rows=KEYS_BY_NAME)

    def express(self, run: RunConfig) -> Expression:
        """The keys of the section, and Composer's ``precision`` and LLM Foundry's ``algorithms`` beside it."""
        beside = [Setting(aspect=Aspect.PRECISION, key="precision", value=run.precision)]
        if run.max_grad_norm is not None and run.max_grad_norm > 0:
            clipping = {"clipping_type": "norm", "clipping_threshold": run.max_grad_norm}
            beside.append(Setting(aspect=Aspect.OTHER, key="algorithms", value={"gradient_clipping": clipping}))
        return replace(super().express(run), beside=tuple(beside))

    def settings(self, run: RunConfig) -> Iterator[Setting]:
        config, checkpointing, prefetch = run.config, run.config.activation_checkpointing, run.config.prefetch
        enabled, reentrant = checkpointing.enabled, checkpointing.reentrant
        keeps = config.mixed_precision.gradients is not GradientDtype.OF_PARAMETER
        for key, value, is_needed in (
            *((key, value, True) for key, value in mesh_words(config.mesh)),
            ("reshard_after_forward", config.reshard_after_forward, True),
            ("mixed_precision", precision_words(run), True),
            ("state_dict_type", run.state_dict_type, True),
            ("activation_checkpointing", checkpointing.checkpoint, enabled),
            (REENTRANT, reentrant, enabled and not reentrant),  # true is FSDP1's default
            ("backward_prefetch", BackwardPrefetch.NONE.value, prefetch.backward == 0),
            ("backward_prefetch_limit", prefetch.backward, prefetch.backward),
            ("forward_prefetch", True, prefetch.forward is not None),
            ("activation_cpu_offload", True, checkpointing.cpu_offload),
            ("te_checkpoint_wrapper", True, checkpointing.transformer_engine),
            ("forward_prefetch_limit", prefetch.forward, (prefetch.forward or 1) != 1),
            ("cpu_offload", True, config.cpu_offload),
            ("sync_module_states", True, config.sync_module_states),
            ("keep_low_precision_grads", True, keeps),
            *fields_of_our_own(config),
            ("async_save", True, run.async_save),
            ("verbose", True, run.verbose),
        ):
            if is_needed:
                row = KEYS_BY_NAME[key]
                aspect = row.aspect if row.detail_of is Aspect.OTHER else row.detail_of
                yield Setting(aspect=aspect, key=key, value=value)

    def rewrite(self, section: Section, reading: Reading) -> list[MappingEdit]:
        """FSDP2's words for FSDP1's, in place; what only composer_fsdp2 has a form for keeps its name."""
        replacements = {}
        for name, value in section.given.items():
            row = KEYS_BY_NAME.get(name)
            kept = [(name, value)] if row is not None else []  # a word that did nothing goes
            new = kept if row is None or row.rewrite is None else row.rewrite(row, value, section.given)
            if new != [(name, value)]:
                replacements[name] = new
        return [MappingEdit(path=section.path, replacements=replacements)] if replacements else []

    def patch_steps(self, patch: Patch, section: Section, reading: Reading) -> Iterator[PatchStep]:
        yield from patch_steps(patch, section)

    def own_findings(self, reading: Reading) -> tuple[Finding, ...]:
        """The reading's: it is about this very target."""
        return reading.findings

    def is_own(self, finding: Finding) -> bool:
        row = KEYS_BY_NAME.get(finding.key)
        is_ours = row is not None and row.group == KeyGroup.OURS and row.name not in WORDS
        return row is not None and is_ours and finding.value != row.default

    def keeps(self, key: str) -> bool:
        return key in KEYS_BY_NAME and KEYS_BY_NAME[key].rewrite is None

    def replaced_block(self, section: Section) -> ReplacedBlock:
        """``parallelism_config`` goes as a whole, if sharding is all that it has."""
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
        return {"FSDPConfig": row.default, **row.defaults} if row.defaults else {"": row.default}

    def questions(self, row: Row, value: Any) -> Iterator[Question]:
        given = {**_COMPANIONS.get(row.name, {}), row.name: value}
        values = {"fsdp_config": {}, **given} if row.group == BESIDE else {"fsdp_config": given}
        yield Question(section=Section.at(("fsdp_config",), values), key=row.name)


# What must stand beside a key for it to mean something.
_COMPANIONS: dict[str, Given] = {"activation_checkpointing_policy": {"activation_checkpointing": True}}


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
    )
