"""Read training configurations of other systems, or a model's ``config.json``.

These files have no model definition: the model is the user's function, or built from a ``config.json``.
"""

import copy
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from composer_fsdp2.config.findings import Finding, Origin, Outcome
from composer_fsdp2.config.sharding import ActivationCheckpointing
from composer_fsdp2.config.text import nearest_names
from composer_fsdp2.errors import ConfigError
from composer_fsdp2.migration.dialect import Dialect, Expression, Reading, Section, overlaps, with_losses
from composer_fsdp2.migration.dialects import DIALECTS
from composer_fsdp2.migration.dialects.composer.around import (
    around_of,
    has_automatic_plan,
    parallelism_findings,
    precision_of,
    tensor_degree,
)
from composer_fsdp2.migration.dialects.fingerprints import foreign_system
from composer_fsdp2.migration.interpolated import leaves
from composer_fsdp2.migration.lens import decides
from composer_fsdp2.migration.paths import find_at, has_path, value_at
from composer_fsdp2.preflight.batch_keys import read_batches
from composer_fsdp2.preflight.model_config import (
    build_model,
    find_model_config,
    is_model_config,
    longest_sequence,
    no_split_classes,
)
from composer_fsdp2.preflight.planned_model import Training, built
from composer_fsdp2.preflight.run_file import Request, RunFile, assumed
from composer_fsdp2.preflight.selective import recompute_by_operator, recompute_every

_COMPOSER = DIALECTS["composer"]
# in wrap_policy, activation_checkpointing_policy and layer_plan: the classes of the model's own layers
_LAYERS = "auto"
_CLASSES, _RECOMPUTED = "transformer_layer_cls_to_wrap", "activation_checkpointing_policy"
# The keys of these systems for the model: a name on the hub, or a folder.
_MODEL_KEYS = ("model_name_or_path", "base_model", "pretrain", "model.hf_assets_path")

_MODE = ("activation_checkpoint", "mode")  # TorchTitan's


@dataclass(frozen=True, slots=True, kw_only=True)
class _Config:
    """The sharding section of a file, translated to Composer's keys.

    Args:
        tensor_degree: The TP degree; layers are sharded by the plan of a known model.
        named: The model's name on the Hub, or its folder, if the file has one.
        is_composers: Whether the section is one of Composer, not of another system.
        selective: TorchTitan's selective recomputation: "n" recomputes every n-th layer, ``op`` only some operators of
            each layer.
    """

    section: Section
    dialect: Dialect
    fsdp: Mapping[str, Any]
    precision: str
    tensor_degree: int = 1
    named: str | None = None
    is_composers: bool = False
    findings: tuple[Finding, ...] = ()
    adapter: str | None = None
    has_fp8_layers: bool = False
    selective: str | None = None


def read_other_file(file: RunFile, request: Request) -> tuple[nn.Module, Training]:
    """The file's settings and a model from elsewhere; see ``read_run``."""
    is_config_only = is_model_config(file.document.values)
    config = _read_model_config(file) if is_config_only else _first_section(file, request.world_size)
    if request.model is not None:
        model = built(request.model)  # with FSDP1's hooks, which select the units
    else:
        is_own = is_config_only and request.model_config is None
        path = file.path if is_own else find_model_config(request.model_config, config.named)
        model = built(build_model(path, {key: file.values[key] for key in file.document.values} if is_own else {}))
        config = _with_model_units(config, model)
    if config.selective is not None:
        if isinstance(request.model, nn.Module):  # do not modify the caller's model
            model = copy.deepcopy(model)
        config = replace(config, fsdp=_apply_selective_recomputation(model, config.fsdp, config.selective))
    context = config.fsdp.get("context_parallel_degree") or 1
    num_shared = config.tensor_degree * (context if isinstance(context, int) else 1)
    longest = longest_sequence(model)
    batches = read_batches(
        config.dialect.name,
        config.section,
        num_data_ranks=max(request.world_size // num_shared, 1),
        microbatch=request.microbatch,
        sequence=request.sequence,
        longest=longest,
    )
    findings = [*config.findings, *batches.findings]
    if config.dialect.name == "torchtitan" and config.tensor_degree > 1:
        reason = (
            "TorchTitan shards the sequence between tensor-parallel layers, and the loss over the vocabulary; here "
            "both are full on each rank, so this peak is higher than TorchTitan's"
        )
        findings.insert(0, assumed("activations between layers", "full sequences", reason))
    if longest is not None and batches.sequence > longest:
        reason = f"the model's configuration has {longest} positions"
        findings.insert(0, assumed("sequence", batches.sequence, reason))
    if config.adapter and request.model is None:
        adapter = Finding(
            key="adapter",
            value=config.adapter,
            outcome=Outcome.NEEDS_DECISION,
            target="a full fine-tune",
            reason="the adapter is made in code; gradients and optimizer state are counted for all parameters of the "
            "model",
            hint="--model MODULE:FUNCTION plans the model with its adapter",
            origin=Origin.IMPLICIT,
        )
        findings.insert(0, adapter)
    return model, Training(
        fsdp_config=config.fsdp,
        precision=config.precision,
        tensor_parallel={"tensor_parallel_degree": config.tensor_degree, "layer_plan": _LAYERS},
        batches=batches,
        keeps_outputs=config.dialect is _COMPOSER and not is_config_only,
        has_fp8_layers=config.has_fp8_layers,
        # A model's config.json does not configure training, so no line is named.
        findings=tuple(replace(each, where=str(file.path)) for each in findings)
        if is_config_only
        else file.placed(findings),
    )


def _read_model_config(file: RunFile) -> _Config:
    """Read a model's ``config.json``. Overrides on the command line configure the training, with LLM Foundry's keys."""
    given = {key: value for key, value in file.values.items() if key not in file.document.values}
    fsdp = given.get("fsdp_config") or {}
    if not isinstance(fsdp, Mapping):
        raise ConfigError(f"fsdp_config is {fsdp!r}; it takes keys, such as fsdp_config.sharding_strategy=FULL_SHARD")
    precision, problem = precision_of(given)
    reason = "a model's own file does not configure training"
    findings = [problem] if problem else []
    if "precision" not in given:
        findings.append(assumed("precision", precision, reason, "set precision=... after the file"))
    if not fsdp:
        hint = "set fsdp_config.KEY=VALUE after the file"
        findings.append(assumed("fsdp_config", "FULL_SHARD, mixed_precision: DEFAULT", reason, hint))
    section = Section.at(("fsdp_config",), {**given, "fsdp_config": fsdp})
    return _Config(section=section, dialect=_COMPOSER, fsdp=fsdp, precision=precision, findings=tuple(findings))


def _check_overrides(file: RunFile, dialect: Dialect) -> None:
    """Raise ConfigError for an override that resembles a key of the file or of the dialect, but is neither."""
    document: Any = file.document.values
    known = {name for row in dialect.rows for name in (row.name, *dialect.places(row))}
    known |= {".".join(map(str, path[:depth])) for _, path in leaves(document, ()) for depth in range(1, len(path) + 1)}
    for key in (each.partition("=")[0] for each in file.overrides):
        if key not in known and not has_path(document, tuple(key.split("."))):
            near = nearest_names(key, known, 1, likeness=0.93)
            if near:
                raise ConfigError(
                    f"{key}: neither {file.path} nor {dialect.target} has this key; did you mean {near[0]}?"
                )


def _first_section(file: RunFile, world_size: int) -> _Config:
    if other := foreign_system(file.values):
        raise ConfigError(f"{file.path}: this is a configuration of {other.name}, which is not read: {other.advice}")
    # Systems without OmegaConf read interpolations as plain text.
    values = {
        dialect.name: file.values if dialect.interpolates or file.overrides else file.document.values
        for dialect in DIALECTS.values()
    }
    found = [(each, path) for each in DIALECTS.values() for path in each.sections(values[each.name])]
    if not found:
        raise ConfigError(
            f"{file.path}: nothing here configures sharding, and it is no model's config.json (which has a model_type)"
        )
    dialect, path = found[0]
    _check_overrides(file, dialect)
    around = values[dialect.name]
    section = Section.at(path, around)
    config = (
        _composer_config(section) if dialect is _COMPOSER else _translated_config(file, dialect, section, world_size)
    )
    keys = [key.split(".") for key in _MODEL_KEYS]
    named = next((value_at(around, key) for key in keys if has_path(around, key)), None)
    several = f"the file has {len(found)} of them, and the first is planned"
    findings = (assumed("section", section.place, several),) if len(found) > 1 else ()
    return replace(config, named=named if isinstance(named, str) else None, findings=(*config.findings, *findings))


def _composer_config(section: Section) -> _Config:
    around = around_of(section)
    precision, problem = precision_of(around)
    findings = [problem] if problem else []
    findings += [each for each in parallelism_findings(around) if each.outcome.blocks]
    degree, has_plan = tensor_degree(around), has_automatic_plan(around)
    if degree > 1 and not has_plan:
        key = "tp" if section.path[-2:-1] == ("parallelism_config",) else "tp_config"
        findings.append(
            Finding(
                key=".".join((*map(str, section.path[:-1]), key)),
                value=degree,
                outcome=Outcome.NEEDS_DECISION,
                target="layers without a layer plan",
                reason="which layers are split, and how, is in the script's layer plan, which no file can contain",
                hint="read the plan as that of a run without tensor parallelism",
            )
        )
    return _Config(
        section=section,
        dialect=_COMPOSER,
        fsdp=dict(section.given),
        precision=precision,
        tensor_degree=degree if has_plan else 1,
        is_composers=True,
        findings=tuple(findings),
    )


def _translated_config(file: RunFile, dialect: Dialect, section: Section, world_size: int) -> _Config:
    """Translate a section as ``migrate --to composer`` does.

    Settings that Composer does not have are in the findings.
    """
    reading = dialect.read(section)
    if reading.run is None:
        blocking = [each for each in file.placed(reading.findings) if each.outcome.blocks]
        text = "\n".join(map(str, blocking)) or "no run can be read from it"
        raise ConfigError(f"{file.path}: {text}", keys=tuple(each.key for each in blocking))
    run = reading.run.without_training()  # batches are read in batch_keys.py
    # Selective recomputation is planned exactly, although no key of Composer expresses it.
    fields: dict[str, Any] = {"selective_checkpointing": None}
    is_budgeted = find_at(section.around, _MODE) == "memory_budget"
    if is_budgeted:
        fields["activation_checkpointing"] = ActivationCheckpointing()
    expression = _COMPOSER.express(run.with_fields(fields))
    findings = [each for each in _open_findings(reading, expression) if not each.key.startswith(_MODE[0])]
    if is_budgeted:
        reason = "which activations the compiler keeps is not known; all are counted"
        findings.append(assumed(".".join(_MODE), "memory_budget", reason, "selective or full names them"))
    findings += [each for each in expression.findings if each.outcome is not Outcome.EXACT]
    if run.num_ranks not in (None, world_size):
        findings.append(assumed("number of ranks", run.num_ranks, f"{world_size} are planned, as requested"))
    return _Config(
        section=section,
        dialect=dialect,
        fsdp={setting.key: setting.value for setting in expression.settings},
        precision=run.precision,
        tensor_degree=run.tensor_parallel,
        findings=tuple(findings),
        adapter=run.adapter,
        has_fp8_layers=run.has_fp8_layers,
        selective=run.selective_checkpointing if run.config.activation_checkpointing.checkpoint else None,
    )


def _open_findings(reading: Reading, expression: Expression) -> list[Finding]:
    """Return findings that need a decision or change the sharding in any target system.

    Findings of settings that Composer lacks are omitted here, because ``_translated_config`` adds them.
    """
    findings, _ = with_losses(reading.findings, expression.losses, reading, _COMPOSER)
    lost = {name for each in expression.losses if not each.is_kept for name in each.fields[:1]}
    found = []
    for each in findings:
        decided = decides(reading.rows[each.key]) if each.key in reading.rows else None
        changes = bool(decided) and each.outcome is Outcome.APPROXIMATE and each.origin is Origin.KEY
        is_lost = decided is not None and overlaps(lost, decided)
        if not is_lost and (each.outcome.blocks or changes):
            found.append(each)
    return found


def _with_model_units(config: _Config, model: nn.Module) -> _Config:
    """Make the decoder layers of a transformers model the units if the file does not select units."""
    fsdp, findings = dict(config.fsdp), []
    has_own_models = config.dialect.has_own_models  # their classes do not exist in transformers
    policy = fsdp.get("wrap_policy")
    classes = ", ".join(sorted(no_split_classes(model)))
    if policy is None:
        fsdp["wrap_policy"] = {_CLASSES: _LAYERS}
        reason = f"no key names the units; the model's own layers are ({classes}), and the rest is the root's"
        findings.append(assumed("wrap_policy", _LAYERS, reason))
    elif has_own_models and policy.get(_CLASSES) not in (None, _LAYERS):
        fsdp["wrap_policy"] = {**policy, _CLASSES: _LAYERS}
        reason = f"a class of the system's own model; of transformers' it is {classes}"
        findings.append(assumed("wrap_policy", policy[_CLASSES], reason))
    is_recomputing = fsdp.get("activation_checkpointing") or fsdp.get("activation_cpu_offload")
    if is_recomputing and fsdp.get(_RECOMPUTED) is None and config.is_composers:
        reason = "the model has no activation_checkpointing_fn, and Composer recomputes nothing then"
        hint = f"set fsdp_config.{_RECOMPUTED}=auto after the file for a script whose model has one"
        findings.append(assumed(_RECOMPUTED, "no module", reason, hint))
    elif is_recomputing and (fsdp.get(_RECOMPUTED) is None or has_own_models):
        fsdp[_RECOMPUTED] = _LAYERS
    return replace(config, fsdp=fsdp, findings=(*config.findings, *findings))


def _apply_selective_recomputation(model: nn.Module, fsdp: Mapping[str, Any], selective: str) -> Mapping[str, Any]:
    """Make the model's layers recompute selectively, as TorchTitan does; return the keys that are still to apply."""
    named = fsdp.get(_RECOMPUTED)
    classes = no_split_classes(model) if named == _LAYERS else set(named or ())
    layers = [module for module in model.modules() if type(module).__name__ in classes]
    if selective != "op":
        recompute_every(int(selective), layers)
    elif layers:
        recompute_by_operator(layers)
        return {**fsdp, "activation_checkpointing": False, _RECOMPUTED: None}
    return fsdp
