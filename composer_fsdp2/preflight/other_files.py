"""Runs of files that describe no model themselves, with a ``config.json`` or a function that does."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import nn

from composer_fsdp2.config.findings import Finding, Origin, Outcome
from composer_fsdp2.errors import ConfigError
from composer_fsdp2.migration.dialect import Dialect, Expression, Reading, Section, meets, with_losses
from composer_fsdp2.migration.dialects import DIALECTS
from composer_fsdp2.migration.dialects.composer.around import (
    around_of,
    findings_beside,
    has_automatic_plan,
    precision_of,
    tensor_degree,
)
from composer_fsdp2.migration.dialects.fingerprints import foreign_system
from composer_fsdp2.migration.lens import decides
from composer_fsdp2.migration.paths import has_path, value_at
from composer_fsdp2.preflight.batch_words import read_batches
from composer_fsdp2.preflight.model_config import (
    build_model,
    find_model_config,
    is_model_config,
    longest_sequence,
    no_split_classes,
)
from composer_fsdp2.preflight.planned_model import ModelOrFunction, built, loss_of, of_model
from composer_fsdp2.preflight.preflight_run import PreflightRun
from composer_fsdp2.preflight.run_file import RunFile, assumed

_COMPOSER = DIALECTS["composer"]
_LAYERS = "auto"  # of wrap_policy, activation_checkpointing_policy and layer_plan: those that the model itself names
_CLASSES, _RECOMPUTED = "transformer_layer_cls_to_wrap", "activation_checkpointing_policy"
# Where files of these systems name the model, by a name of the hub's or a folder.
_MODEL_KEYS = ("model_name_or_path", "base_model", "pretrain", "model.hf_assets_path")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Asked:
    """A section in Composer's words.

    Args:
        tensor_degree: Over how many ranks layers are split, by the plan of a known model.
        named: The model's name on the hub, or its folder, where the file tells.
        is_composers: Whether a file of Composer's own says so, and not a command line.
        is_own_model: Whether the system trains models of its own, of whose classes transformers' has none.
    """

    section: Section
    dialect: str
    fsdp: Mapping[str, Any]
    precision: str
    tensor_degree: int = 1
    named: str | None = None
    is_composers: bool = False
    is_own_model: bool = False
    findings: tuple[Finding, ...] = field(default=())
    adapter: str | None = None
    has_fp8_layers: bool = False


def read_other_file(
    file: RunFile,
    *,
    world_size: int,
    gpus_per_node: int,
    model_config: str | Path | None,
    model: ModelOrFunction | None,
    microbatch: int | None,
    sequence: int | None,
    device: str,
) -> PreflightRun:
    """The run of a file that is not Foundry's; see ``read_run``."""
    is_bare = is_model_config(file.document.values)
    asked = _bare(file) if is_bare else _asked(file, world_size)
    whole, has_hooks = model, True
    if whole is None:
        is_own = is_bare and model_config is None
        path = file.path if is_own else find_model_config(model_config, asked.named)
        has_hooks, changes = False, {key: file.values[key] for key in file.document.values} if is_own else {}
        whole = build_model(path, changes)
    whole = built(whole)
    asked = asked if has_hooks else _with_layers(asked, whole)
    context = asked.fsdp.get("context_parallel_degree") or 1
    shared = asked.tensor_degree * (context if isinstance(context, int) else 1)
    batches = read_batches(
        asked.dialect,
        asked.section,
        num_data_ranks=max(world_size // shared, 1),
        microbatch=microbatch,
        sequence=sequence,
        longest=longest_sequence(whole),
    )
    adapters = [_without_adapter(asked.adapter)] if asked.adapter and model is None else []
    findings = [*adapters, *asked.findings, *batches.findings]
    run = of_model(
        whole,
        asked.fsdp,
        world_size=world_size,
        precision=asked.precision,
        tensor_parallel={"tensor_parallel_degree": asked.tensor_degree, "layer_plan": _LAYERS},
        loss=loss_of(whole, keeps_outputs=asked.dialect == _COMPOSER.name and not is_bare),
        microbatch=batches.microbatch,
        num_microbatches=batches.num_microbatches,
        sequence=batches.sequence,
        optimizer=batches.optimizer,
        device=device,
        gpus_per_node=gpus_per_node,
        findings=[replace(each, where=str(file.path)) for each in findings] if is_bare else file.placed(findings),
    )
    return replace(run, has_fp8_layers=asked.has_fp8_layers)


def _without_adapter(adapter: str) -> Finding:
    return Finding(
        key="adapter",
        value=adapter,
        outcome=Outcome.NEEDS_DECISION,
        target="a full fine-tune",
        reason="the adapter is made in code; gradients and optimizer state are counted for all parameters of the model",
        hint="--model MODULE:FUNCTION plans the model with its adapter",
        origin=Origin.IMPLICIT,
    )


def _bare(file: RunFile) -> _Asked:
    """A model's own file says nothing of training; the command line may, in Foundry's words (KEY=VALUE)."""
    given = {key: value for key, value in file.values.items() if key not in file.document.values}
    fsdp = given.get("fsdp_config") or {}
    if not isinstance(fsdp, Mapping):
        raise ConfigError(f"fsdp_config is {fsdp!r}; it takes keys, such as fsdp_config.sharding_strategy=FULL_SHARD")
    section = Section.at(("fsdp_config",), {**given, "fsdp_config": fsdp})
    precision, problem = precision_of(given)
    reason = "a model's own file says nothing of training"
    findings = [problem] if problem else []
    if "precision" not in given:
        findings.append(assumed("precision", precision, reason, "say precision=... behind the file"))
    if not fsdp:
        hint = "say fsdp_config.KEY=VALUE behind the file"
        findings.append(assumed("fsdp_config", "FULL_SHARD, mixed_precision: DEFAULT", reason, hint))
    return _Asked(
        section=section, dialect=_COMPOSER.name, fsdp=dict(fsdp), precision=precision, findings=tuple(findings)
    )


def _asked(file: RunFile, world_size: int) -> _Asked:
    """The first section of the file, in Composer's words."""
    if other := foreign_system(file.values):
        raise ConfigError(f"{file.path}: this is a configuration of {other.name}, which is not read: {other.advice}")
    found = [(of, path) for of in DIALECTS.values() for path in of.sections(_values_for(of, file))]
    if not found:
        raise ConfigError(
            f"{file.path}: nothing here configures sharding, and it is no model's config.json (which has a model_type)"
        )
    dialect, path = found[0]
    values = _values_for(dialect, file)
    section = Section.at(path, values)
    named = next((value_at(values, key.split(".")) for key in _MODEL_KEYS if has_path(values, key.split("."))), None)
    asked = _composers(section) if dialect is _COMPOSER else _of_run(file, dialect, section, world_size)
    several = [
        assumed("section", section.place, f"the file has {len(found)} of them, and the first is planned")
        for _ in found[1:2]
    ]
    named = named if isinstance(named, str) else None
    return replace(asked, named=named, findings=(*asked.findings, *several))


def _values_for(dialect: Dialect, file: RunFile) -> Any:
    """As its system sees them: OmegaConf's interpolations are text to the others."""
    return file.values if dialect.interpolates or file.overrides else file.document.values


def _composers(section: Section) -> _Asked:
    around = around_of(section)
    precision, problem = precision_of(around)
    findings = [problem] if problem else []
    findings += [each for each in findings_beside(around) if each.outcome.blocks]
    degree, has_plan = tensor_degree(around), has_automatic_plan(around)
    if degree > 1 and not has_plan:
        findings.append(_without_layer_plan(section, degree))
    return _Asked(
        section=section,
        dialect=_COMPOSER.name,
        fsdp=dict(section.given),
        precision=precision,
        tensor_degree=degree if has_plan else 1,
        is_composers=True,
        findings=tuple(findings),
    )


def _without_layer_plan(section: Section, degree: int) -> Finding:
    key = "tp" if section.path[-2:-1] == ("parallelism_config",) else "tp_config"
    return Finding(
        key=".".join((*map(str, section.path[:-1]), key)),
        value=degree,
        outcome=Outcome.NEEDS_DECISION,
        target="layers that nobody splits",
        reason="which layers are split, and how, is in the script's layer plan, which no file can hold",
        hint="read the plan as that of a run without tensor parallelism",
    )


def _of_run(file: RunFile, dialect: Dialect, section: Section, world_size: int) -> _Asked:
    """What ``migrate --to composer`` writes, with what it cannot say among the findings."""
    reading = dialect.read(section)
    if reading.run is None:
        blocking = [each for each in file.placed(reading.findings) if each.outcome.blocks]
        text = "\n".join(map(str, blocking)) or "no run can be read from it"
        raise ConfigError(f"{file.path}: {text}", keys=tuple(each.key for each in blocking))
    run = reading.run
    expression = _COMPOSER.express(run.without_training())  # batches are read in batch_words.py
    told = [
        *_undecided(reading, expression),
        *(each for each in expression.findings if each.outcome is not Outcome.EXACT),
    ]
    if run.num_ranks not in (None, world_size):
        told.append(assumed("number of ranks", run.num_ranks, f"{world_size} are planned, as asked for"))
    return _Asked(
        section=section,
        dialect=dialect.name,
        fsdp={setting.key: setting.value for setting in expression.settings},
        precision=run.precision,
        tensor_degree=run.tensor_parallel,
        is_own_model=dialect.has_own_models,
        findings=tuple(told),
        adapter=run.adapter,
        has_fp8_layers=run.has_fp8_layers,
    )


def _undecided(reading: Reading, expression: Expression) -> list[Finding]:
    """What needs a decision whatever Composer has, or changes how the run is sharded, beside what Composer lacks."""
    told, _ = with_losses(reading.findings, expression.losses, reading, _COMPOSER)
    lost = {name for each in expression.losses if not each.is_kept for name in each.fields[:1]}
    found = []
    for each in told:
        row = reading.rows.get(each.key)
        is_lost = row is not None and meets(lost, decides(row))
        changes = row is not None and bool(decides(row)) and each.outcome is Outcome.APPROXIMATE
        if not is_lost and (each.outcome.blocks or (changes and each.origin is Origin.KEY)):
            found.append(each)
    return found


def _with_layers(asked: _Asked, model: nn.Module) -> _Asked:
    """With the layers that transformers' model itself names as units, where nothing in the file names them."""
    fsdp, findings = dict(asked.fsdp), []
    policy = fsdp.get("wrap_policy")
    classes = sorted(no_split_classes(model))
    if policy is None:
        fsdp["wrap_policy"] = {_CLASSES: _LAYERS}
        reason = (
            f"no key names the units; the model's own layers are ({', '.join(classes)}), and the rest is the root's"
        )
        findings.append(assumed("wrap_policy", _LAYERS, reason))
    elif asked.is_own_model and policy.get(_CLASSES) not in (None, _LAYERS):
        fsdp["wrap_policy"] = {**policy, _CLASSES: _LAYERS}
        reason = f"a class of the system's own model; of transformers' it is {', '.join(classes)}"
        findings.append(assumed("wrap_policy", policy[_CLASSES], reason))
    recomputed = fsdp.get(_RECOMPUTED)
    is_recomputing = fsdp.get("activation_checkpointing") or fsdp.get("activation_cpu_offload")
    if is_recomputing and recomputed is None and asked.is_composers:
        reason = "the model has no activation_checkpointing_fn, and Composer recomputes nothing then"
        hint = f"say fsdp_config.{_RECOMPUTED}=auto behind the file for a script whose model has one"
        findings.append(assumed(_RECOMPUTED, "no module", reason, hint))
    elif is_recomputing and (recomputed is None or asked.is_own_model):
        fsdp[_RECOMPUTED] = _LAYERS
    return replace(asked, fsdp=fsdp, findings=(*asked.findings, *findings))
