"""The training run that a configuration file describes, independent of a system's keys."""

from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

from composer_fsdp2.config.mesh import MeshSpec
from composer_fsdp2.config.parallel import TiledMLP
from composer_fsdp2.config.sharding import ActivationCheckpointing, ShardingConfig
from composer_fsdp2.config.value import Value, with_field
from composer_fsdp2.config.wrap import Wrap as Wrap
from composer_fsdp2.config.wrap import WrapKind as WrapKind
from composer_fsdp2.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig(Value):
    """The configuration of a training run: all settings that some dialect can express.

    Args:
        config: The sharding configuration. A degree that depends on the number of ranks is -1.
        precision: Composer's precision; ``amp_...`` runs the forward under torch.autocast.
        stored_dtype: The dtype to which the system converts trained parameters, and so also the optimizer's state;
            None: not converted.
        state_dict_type: The format of checkpoints, "full" or "sharded".
        verbose: The key ``verbose`` of an ``fsdp_config``.
        async_save: Whether checkpoints are written while training continues.
        save_only_model: Whether checkpoints omit the optimizer.
        max_grad_norm: The norm to which gradients are clipped.
        other_clipping: Gradient clipping other than by norm, with its threshold, such as ``value 0.5``.
        num_ranks, num_nodes: The numbers of ranks and nodes, if the file sets them.
        tensor_parallel, pipeline_parallel, expert_parallel: Degrees of parallelism, in addition to those of the mesh.
        has_expert_axis: Whether expert parallelism has its own mesh axis, and does not use the shard axis.
        tiled_chunks: The number of chunks of tiled MLPs, if the file does not name their classes.
        selective_checkpointing: Selective activation checkpointing: every n-th module ("n"), or some operators of each
            ("op").
        compile: Whether the model is compiled.
        adapter: The type of adapter that is trained, such as ``lora``. The training script creates it.
        has_fp8_layers: Whether layers are replaced by fp8 layers, independent of ``precision``.
        microbatch_size: Rows of a microbatch on one rank.
        num_microbatches: Microbatches of a rank per optimizer step.
        global_batch_size: Rows of all ranks per optimizer step.
        max_duration: The duration of training in Composer's format: ``1000ba`` (optimizer steps) or ``3ep`` (epochs).
        optimizer: The optimizer's name and options, named as in torch; see ``training.py``.
        undecayed: The parameters that are excluded from weight decay.
    """

    config: ShardingConfig
    precision: str = "fp32"
    stored_dtype: str | None = None
    state_dict_type: str = "full"
    verbose: bool = False
    async_save: bool = False
    save_only_model: bool = False
    max_grad_norm: float | None = None
    other_clipping: str | None = None
    num_ranks: int | None = None
    num_nodes: int | None = None
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    expert_parallel: int = 1
    has_expert_axis: bool = False
    tiled_chunks: int | None = None
    selective_checkpointing: str | None = None
    compile: bool = False
    adapter: str | None = None
    has_fp8_layers: bool = False
    microbatch_size: int | None = None
    num_microbatches: int | None = None
    global_batch_size: int | None = None
    max_duration: str | None = None
    optimizer: Mapping[str, Any] | None = None
    undecayed: str | None = None

    @classmethod
    def of_fields(cls, values: Mapping[str, Any]) -> "RunConfig":
        """Return a run with these fields.

        Nested fields have dotted names; fields of ``config`` are named without ``config.``.

        Raises:
            ConfigError: the values contradict each other.
        """
        return cls(config=ShardingConfig()).with_fields(values)

    def with_fields(self, values: Mapping[str, Any]) -> "RunConfig":
        """Return the run with new values of some fields, named as in ``of_fields``."""
        run = self
        for name, value in values.items():
            run = with_field(run, name if name.partition(".")[0] in _OF_RUN else f"config.{name}", value)
        return run

    @property
    def wrap(self) -> Wrap:
        """The rule that selects the modules wrapped as units."""
        return self.config.wrap

    @property
    def context_parallel(self) -> int:
        """The number of ranks over which sequences are sharded. Parameters are sharded over these ranks as well."""
        return self.config.context_parallel_degree

    @property
    def mlp_chunks(self) -> int | None:
        """The number of chunks of the sequence in which MLPs are computed."""
        return self.tiled_chunks if self.config.tiled_mlp is None else self.config.tiled_mlp.chunks

    @property
    def other_axes(self) -> int:
        """The number of ranks beside each rank of the mesh."""
        return self.tensor_parallel * self.pipeline_parallel * (self.expert_parallel if self.has_expert_axis else 1)

    def with_degrees(self) -> "RunConfig":
        """Return the run with a mesh degree of -1 resolved, if the number of ranks determines it."""
        if self.num_ranks is None or self.other_axes != 1:
            return self
        try:
            mesh = self.config.mesh.resolve(self.num_ranks)
        except ConfigError:  # the mesh does not fit these ranks, and the degree stays open
            return self
        return replace(self, config=replace(self.config, mesh=mesh))

    def without_training(self) -> "RunConfig":
        """Return the run with the fields of ``OF_TRAINING`` unset."""
        return self.with_fields(dict.fromkeys(OF_TRAINING))

    def with_batches(self) -> "RunConfig":
        """Return the run with the global batch computed from a rank's number of microbatches, or the reverse.

        Both are unchanged if the number of ranks is unknown, or several ranks compute the same batch.
        """
        rows, ranks, count, batch = (
            self.microbatch_size,
            _num_ranks(self),
            self.num_microbatches,
            self.global_batch_size,
        )
        if rows is None or ranks is None or self.other_axes * self.context_parallel != 1:
            return self
        if batch is None and count is not None:
            batch = rows * ranks * count
        elif batch is not None and batch % (rows * ranks) == 0:
            count = batch // (rows * ranks)
        return replace(self, num_microbatches=count, global_batch_size=batch)


_OF_RUN = frozenset(field.name for field in fields(RunConfig))
# Set by the model's code or the launcher.
NOT_CONFIGURED = ("num_nodes", "adapter", "has_fp8_layers")
_NOT_COMPARED = (*NOT_CONFIGURED, "config", "mesh", "tiled_mlp", "tiled_chunks")  # the last four by their parts
# Fields that do not affect sharding; None if the file does not set them.
_BATCHES = ("microbatch_size", "num_microbatches", "global_batch_size")
OF_TRAINING = (*_BATCHES, "max_duration", "optimizer", "undecayed")
# Fields without effect if no activation is recomputed or offloaded.
_HOW_RECOMPUTED = {f"activation_checkpointing.{each}" for each in ("reentrant", "classes", "transformer_engine")}
# Fields that a target may add: they change no result, or nothing that the file sets.
_MORE = ("wrap.embeddings", "wrap.output", *_BATCHES, "max_duration", "optimizer")


def fields_of(run: RunConfig) -> dict[str, Any]:
    """Return the fields of a run by name. Options of disabled features are set to their defaults, to compare runs."""
    config = run.config
    checkpointing, precision, wrap = config.activation_checkpointing, config.mixed_precision, config.wrap
    if not checkpointing.enabled:
        checkpointing = ActivationCheckpointing()
    elif checkpointing.classes == wrap.classes and wrap.kind is WrapKind.CLASSES:  # the model's own, named or not
        checkpointing = replace(checkpointing, classes=())
    if precision.param_dtype is None:  # nothing to cast to
        precision = replace(precision, cast_forward_inputs=False, cast_root_inputs=True)
    elif precision.cast_forward_inputs:  # the root is a unit as well
        precision = replace(precision, cast_root_inputs=True)
    if precision.reduce_dtype is None:  # reduced in the dtype of computation
        precision = replace(precision, reduce_dtype=precision.param_dtype)
    config = replace(config, activation_checkpointing=checkpointing, mixed_precision=precision)
    mesh, tiled = config.mesh, config.tiled_mlp
    has_replicas = mesh.has_replicas and (mesh.is_grouped or mesh.replicate_degree != 1)
    found = {
        "mesh.groups": mesh.groups,
        "mesh.shards": mesh.shard_degree,
        "mesh.replicas": mesh.replicate_degree if has_replicas else None,
        **_flattened_fields(config),
        **_flattened_fields(run.with_batches()),
        "tiled_mlp.chunks": run.mlp_chunks,
        "tiled_mlp.classes": () if tiled is None else tiled.classes,
        "num_ranks": _num_ranks(run),
    }
    return {name: value for name, value in found.items() if name not in _NOT_COMPARED}


def _flattened_fields(value: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for field in fields(value):
        inner = getattr(value, field.name)
        if is_dataclass(inner) and not isinstance(inner, MeshSpec | TiledMLP | ShardingConfig):
            found |= {f"{field.name}.{name}": each for name, each in _flattened_fields(inner).items()}
        else:
            found[field.name] = inner
    return found


def changed(before: RunConfig, after: RunConfig) -> dict[str, Any]:
    """Return the fields in which two runs differ on the same number of ranks, with the values in ``after``."""
    expected = replace(before, num_ranks=_num_ranks(before)).with_degrees()
    found = replace(after, num_ranks=expected.num_ranks)
    old = fields_of(expected)
    new = fields_of(found.with_degrees() if expected.with_degrees() is not expected else found)
    new["num_ranks"] = _num_ranks(after)
    ignored = {name for name in _MORE if new[name] and not old[name]}
    if not new["activation_checkpointing.checkpoint"] and not new["activation_checkpointing.cpu_offload"]:
        ignored |= _HOW_RECOMPUTED
    return {name: new[name] for name in old if old[name] != new[name] and name not in ignored}


def _num_ranks(run: RunConfig) -> int | None:
    mesh = run.config.mesh
    is_decided = run.num_ranks is None and not mesh.is_grouped and mesh.is_resolved
    return mesh.size * run.other_axes if is_decided else run.num_ranks
