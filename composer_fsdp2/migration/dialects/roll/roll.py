"""The dialect of ROLL: read the part of a file for one worker, and write a run as such a part."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from composer_fsdp2.config.findings import Finding, Outcome
from composer_fsdp2.config.rows import INT, Row, undecided, unknown_key
from composer_fsdp2.migration.dialect import (
    Dialect,
    Reading,
    ReplacedBlock,
    Section,
    Setting,
    implicit,
)
from composer_fsdp2.migration.dialects.roll.keys import (
    BY_NAME,
    GRAD_NORM,
    LIMITS,
    ROWS,
    STRATEGIES,
    Worker,
    reduced_in,
)
from composer_fsdp2.migration.paths import Path, value_at
from composer_fsdp2.migration.run import OF_TRAINING, RunConfig

_PATH: Path = ("strategy_args", "strategy_config")
_FILE = {"strategy_args": {"strategy_name": STRATEGIES[0], "strategy_config": {}}}
# The mapping, in a worker's part of a file, of keys that are not in its strategy_config.
_OUTER = {"strategy_name": "strategy_args", "device_mapping": "", "model_args": "", "training_args": ""}
_UNKNOWN = "ROLL takes any key into strategy_config and reads those only that it knows, so this one did nothing"
# ROLL's key for a degree, by other systems' names, which resemble the name of another key of ROLL's.
_OF_OTHERS = dict.fromkeys(("cp_size", "sp_size", "context_parallel_size"), "model_args.ulysses_size")
# Fields of a worker's run that no key sets.
_FIXED = {
    "mixed_precision.cast_root_inputs": False,
    "sync_module_states": True,
    "state_dict_type": "sharded",
}
# fmt: off
_IMPLICIT_TRAINING = (
    implicit("casting of inputs", Outcome.EXACT,
        "no unit casts its inputs, and a step runs under torch.autocast in param_dtype",
        "precision amp_bf16 does the same in Composer"),
    implicit("gradient norms that are not finite", Outcome.APPROXIMATE,
        "ROLL skips the optimizer's step then; Composer does so with amp_fp16 only",
        "watch the gradient norm with OptimizerMonitor, or stop with NaNMonitor"),
)
_IMPLICIT = (
    implicit("sharded dimension", Outcome.APPROXIMATE,
        "ROLL shards the first dimension that fsdp_size divides; here it is the first one, padded: the same numbers"),
    implicit("state dict", Outcome.APPROXIMATE,
        "a ROLL checkpoint contains shards (dcp/) and the full model for Hugging Face",
        "state_dict_type: sharded, and an export for Hugging Face where one is wanted"),
)
# fmt: on


def _place(name: str) -> str:
    where = _OUTER.get(name.split(".")[0], "strategy_args.strategy_config")
    return f"{where}.{name}" if where else name


class RollDialect(Dialect):
    """A worker's ``strategy_args``; its tables are in ``keys`` and ``limits``."""

    name = target = "roll"
    title = "ROLL"
    rows = tuple(replace(row, group=_place(row.name).rpartition(".")[0] or "worker") for row in ROWS)
    limits = LIMITS
    interpolates = True  # Hydra's compose, and OmegaConf.to_container(resolve=True)
    keeps_files = True
    closed_degree = "shard_degree"
    key_prefixes = ("strategy_args",)
    heads = (("strategy_args", (("strategy_name", "fsdp2_train"),)), ("strategy_config", ()))
    silent = (Section.at(_PATH, _FILE),)

    def find(self, path: Path, values: Mapping[str, Any], parent: Mapping[str, Any]) -> Path | None:
        if path[-1:] != ("strategy_args",) or values.get("strategy_name") not in STRATEGIES:
            return None
        return (*path, "strategy_config") if isinstance(values.get("strategy_config"), Mapping) else path

    def read(self, section: Section) -> Reading:
        worker = _worker(section)
        norm = worker.around.get("max_grad_norm", GRAD_NORM)
        is_number = norm is None or INT.fits(norm) or isinstance(norm, float)
        findings = list(worker.findings(_unknown_key_finding))
        if not is_number:
            findings.append(implicit("max_grad_norm", Outcome.NEEDS_DECISION, "it takes a number", value=norm))
        run = None
        if is_number and worker.is_valid:
            of_training: dict[str, Any] = {"stored_dtype": reduced_in(worker), "max_grad_norm": norm}
            if not worker.is_training:
                of_training = dict.fromkeys(OF_TRAINING)
            run = RunConfig.of_fields({**worker.fields(), **_FIXED, **of_training})
        return Reading(
            run=run,
            findings=(*findings, *(_IMPLICIT_TRAINING if worker.is_training else ()), *_IMPLICIT),
            rows={key: row for key, row in BY_NAME.items() if key in worker.given} | BY_NAME,
        )

    def settings(self, run: RunConfig) -> Iterator[Setting]:
        """``Dialect.settings`` of a section, without keys outside it such as ``model_args``."""
        return (each for each in super().settings(run) if each.key.partition(".")[0] not in _OUTER)

    def settings_in(self, reading: Reading, run: RunConfig) -> Iterator[Setting]:
        return super().settings(run)

    def path_of(self, section: Section, key: str) -> Path:
        if "strategy_args" not in section.path:
            return super().path_of(section, key)
        return (*section.path[: section.path.index("strategy_args")], *_place(key).split("."))

    def keeps(self, key: str) -> bool:
        return True

    def replaced_block(self, section: Section) -> ReplacedBlock:
        """Return the worker's whole ``strategy_args``."""
        has_name = "strategy_args" in section.path
        entry = section.path[: section.path.index("strategy_args") + 1] if has_name else section.path
        return ReplacedBlock(entry=entry, inner=section.path)

    def places(self, row: Row) -> tuple[str, ...]:
        return (_place(row.name),)


def _worker(section: Section) -> Worker:
    """Return the worker of a section, with keys named as in the table. A file configures several workers."""
    given: dict[str, Any] = {}
    around: Mapping[str, Any] = {}
    if "strategy_args" in section.path:
        around = value_at(section.around, section.path[: section.path.index("strategy_args")])
        given["strategy_name"] = around["strategy_args"].get("strategy_name")
    if section.path[-1:] != ("strategy_args",):  # else strategy_config is missing, null or no mapping
        for key, value in section.given.items():
            is_nested = key == "wrap_policy" and isinstance(value, Mapping) and len(value) > 0
            given |= {f"{key}.{name}": each for name, each in value.items()} if is_nested else {str(key): value}
    mappings = {"strategy_config": section.given.get("strategy_config"), "model_args": around.get("model_args")}
    given |= {name: value for name, value in mappings.items() if value is not None and not isinstance(value, Mapping)}
    for group in ("model_args", "training_args"):
        own = around.get(group)
        mapping = own if isinstance(own, Mapping) else {}
        given |= {name: value for key, value in mapping.items() if (name := f"{group}.{key}") in BY_NAME}
    if "device_mapping" in around:
        given["device_mapping"] = around["device_mapping"]
    return Worker(given=given, rows=BY_NAME, around=section.around, mappings=tuple(mappings))


def _unknown_key_finding(key: str, value: Any) -> Finding:
    """Return the finding of a key without a row."""
    if key in _OF_OTHERS:
        usual = Finding(key=key, value=value, outcome=Outcome.NEEDS_DECISION, reason="", known=False)
        return undecided(usual, _UNKNOWN, f"as trained: remove it; ROLL's own key is {_OF_OTHERS[key]}")
    return unknown_key(key, value, BY_NAME, _UNKNOWN)
