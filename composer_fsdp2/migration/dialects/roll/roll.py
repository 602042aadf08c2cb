"""ROLL's dialect: where its sections are, what they ask for, and a run in its words."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from composer_fsdp2.config.rows import Aspect, Row
from composer_fsdp2.config.sharding import GradientSync
from composer_fsdp2.migration.dialect import (
    Dialect,
    Expression,
    Question,
    Reading,
    ReplacedBlock,
    Section,
    Setting,
    deciding,
)
from composer_fsdp2.migration.dialects.roll.roll_lacks import LACKS, has_open_replicas, tiles_of
from composer_fsdp2.migration.dialects.roll.roll_patch import patch_steps
from composer_fsdp2.migration.dialects.roll.roll_words import STRATEGIES, word_of
from composer_fsdp2.migration.dialects.roll.worker import Worker
from composer_fsdp2.migration.dialects.roll.worker_findings import findings_of, norm_problem, problem_of
from composer_fsdp2.migration.dialects.roll.worker_keys import BY_NAME, ROWS
from composer_fsdp2.migration.dialects.roll.worker_run import run_of
from composer_fsdp2.migration.patch import Patch, PatchStep
from composer_fsdp2.migration.paths import Path, merged, nested
from composer_fsdp2.migration.run import RunConfig, Wrap, WrapKind


def _wrap_policy(wrap: Wrap) -> dict[str, Any]:
    classes = list(wrap.classes) if wrap.kind is WrapKind.CLASSES else []
    policy = {
        "transformer_layer_cls_to_wrap": classes,
        "wrap_embeddings": wrap.embeddings,
        "wrap_lm_output": wrap.output,
        "moe_experts": list(wrap.experts),
    }
    return {key: value for key, value in policy.items() if value}


def _with_degrees(run: RunConfig) -> RunConfig:
    return run.with_degrees() if has_open_replicas(run.config.mesh) else run


_FILE = {"worker": {"strategy_args": {"strategy_name": STRATEGIES[0], "strategy_config": {}}}}
_PATH: Path = ("worker", "strategy_args", "strategy_config")
# Where in a worker's part of a file keys stand that are not in its strategy_config.
_OUTER = {"strategy_name": "strategy_args", "device_mapping": "", "model_args": ""}


def _place(name: str) -> str:
    where = _OUTER.get(name.split(".")[0], "strategy_args.strategy_config")
    return f"{where}.{name}" if where else name


class RollDialect(Dialect):
    """A worker's ``strategy_args``; its tables are above."""

    name = target = "roll"
    title = "ROLL"
    rows = tuple(replace(row, group=_place(row.name).rpartition(".")[0] or "worker") for row in ROWS)
    lacks = LACKS
    interpolates = True  # Hydra's compose, and OmegaConf.to_container(resolve=True)
    keeps_files = True
    words = ("strategy_args",)
    heads = (("strategy_args", (("strategy_name", "fsdp2_train"),)), ("strategy_config", ()))
    silent = (Section.at(_PATH, _FILE),)

    def find(self, path: Path, values: Mapping[str, Any], parent: Mapping[str, Any]) -> Path | None:
        if path[-1:] != ("strategy_args",) or values.get("strategy_name") not in STRATEGIES:
            return None
        return (*path, "strategy_config") if isinstance(values.get("strategy_config"), Mapping) else path

    def read(self, section: Section) -> Reading:
        worker = Worker.of(section, BY_NAME)
        findings = tuple(findings_of(worker))
        aspects = deciding({row.name: row.aspect for row in ROWS if row.name in worker.given}, findings)
        is_bad = bool(worker.misshapen or norm_problem(worker)) or any(problem_of(worker, row) for row in ROWS)
        return Reading(run=None if is_bad else run_of(worker), findings=findings, aspects=aspects, rows=BY_NAME)

    def express(self, run: RunConfig) -> Expression:
        return super().express(_with_degrees(run))

    def settings(self, run: RunConfig) -> Iterator[Setting]:
        """As a ``strategy_config``; what ROLL says in model_args is a finding, since that lies outside of it."""
        config, precision = run.config, run.config.mixed_precision
        param_dtype = precision.param_dtype or "float32"
        wrap_policy = _wrap_policy(run.wrap)
        is_open = config.mesh.has_replicas and config.mesh.shard_degree == -1
        gradients = config.accumulation.gradient_sync
        chunks, model_type = tiles_of(run)
        for aspect, key, value, is_needed in (
            (Aspect.MESH, "fsdp_size", max(config.mesh.shard_degree, 1), not is_open),
            (Aspect.PRECISION, "param_dtype", word_of(param_dtype), True),
            (Aspect.PRECISION, "reduce_dtype", word_of(precision.reduce_dtype or param_dtype), True),
            (Aspect.RESHARD, "reshard_after_forward", config.reshard_after_forward, True),
            (Aspect.OFFLOAD, "offload_policy", config.cpu_offload, True),
            (Aspect.WRAP, "wrap_policy", wrap_policy, wrap_policy),
            (Aspect.GRADIENT_SYNC, "reduce_scatter_during_grad_accumulation", False, gradients is GradientSync.LAST),
            (Aspect.ASYNC_SAVE, "async_save_ckpt", run.async_save, True),
            (Aspect.OTHER, "apply_expert_patch", True, config.idle_experts is not None),
            (Aspect.OTHER, "ep_size", run.expert_parallel, run.expert_parallel != 1),
            (Aspect.OTHER, "save_only_model", True, run.save_only_model),
            (Aspect.OTHER, "apply_tiled_mlp", True, chunks is not None),
            (Aspect.OTHER, "tiled_num_shards", chunks, chunks is not None),
            (Aspect.OTHER, "model_type", model_type, chunks is not None and model_type),
        ):
            if is_needed:
                yield Setting(aspect=aspect, key=key, value=value)

    def patch_steps(self, patch: Patch, section: Section, reading: Reading) -> Iterator[PatchStep]:
        yield from patch_steps(patch, section)

    def keeps(self, key: str) -> bool:
        return True

    def replaced_block(self, section: Section) -> ReplacedBlock:
        """The worker's ``strategy_args`` goes as a whole."""
        has_name = "strategy_args" in section.path
        entry = section.path[: section.path.index("strategy_args") + 1] if has_name else section.path
        return ReplacedBlock(entry=entry, inner=section.path)

    def places(self, row: Row) -> tuple[str, ...]:
        return (_place(row.name),)

    def questions(self, row: Row, value: Any) -> Iterator[Question]:
        values: dict[str, Any] = _FILE
        for name, each in {**self.switched_on(row), row.name: value}.items():
            values = merged(values, {"worker": nested(_place(name), each)})
        yield Question(section=Section.at(_PATH, values), key=row.name)
