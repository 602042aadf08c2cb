"""Parse the written file with the target's own reader and report each field that the round trip lost."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any

from composer_fsdp2.config.findings import Finding, Origin, Outcome
from composer_fsdp2.config.mesh import MeshSpec
from composer_fsdp2.config.parallel import TiledMLP
from composer_fsdp2.config.sharding import ShardingConfig
from composer_fsdp2.config.text import and_more
from composer_fsdp2.migration.dialect import Dialect, Section
from composer_fsdp2.migration.interpolated import has_interpolation
from composer_fsdp2.migration.run import RunConfig, WrapKind

# Finding key (a capability of ``capabilities.py`` or an implicit behaviour) -> the fields of a run that it covers.
# A field that no finding covers must be equal after the round trip.
_FIELDS: Mapping[str, tuple[str, ...]] = {
    "mesh": ("mesh",),
    "units": ("wrap", "activation_checkpointing.classes"),
    "further units": ("wrap.embeddings", "wrap.output"),
    "expert units": ("wrap.experts",),
    "reshard_after_forward": ("reshard_after_forward",),
    "param_dtype": ("mixed_precision.param_dtype", "precision"),
    "reduce_dtype": ("mixed_precision.reduce_dtype",),
    "dtype of stored parameters": ("stored_dtype",),
    "products in fp8": ("precision",),
    "dtype of outputs": ("mixed_precision.output_dtype",),
    "buffer_dtype": ("mixed_precision.buffer_dtype",),
    "autocast": ("precision",),
    "casting of inputs": ("mixed_precision.cast",),
    "casting of the root's inputs": ("mixed_precision.cast",),
    "keep_low_precision_grads": ("mixed_precision.gradients",),
    "mixed_precision": ("mixed_precision",),
    "mixed_precision.param_dtype": ("mixed_precision.param_dtype",),
    "mixed_precision.reduce_dtype": ("mixed_precision.reduce_dtype",),
    "mixed_precision.cast_forward_inputs": ("mixed_precision.cast", "mixed_precision.output_dtype"),
    "activation_checkpointing": tuple(f"activation_checkpointing.{name}" for name in ("classes", "reentrant")),
    "recomputed modules": ("activation_checkpointing.classes",),
    "reentrant checkpointing": ("activation_checkpointing.reentrant",),
    "non-reentrant checkpointing": ("activation_checkpointing.reentrant",),
    "unused implementation": ("activation_checkpointing.reentrant",),
    "selective checkpointing": ("selective_checkpointing",),
    "activation offloading": ("activation_checkpointing",),
    "Transformer Engine": ("activation_checkpointing.transformer_engine",),
    "prefetch in forward": ("prefetch.forward",),
    "prefetch in backward": ("prefetch.backward",),
    "gradient_sync": ("accumulation.gradient_sync",),
    "reshard_after_backward": ("accumulation.reshard_after_backward",),
    "state_dict_type": ("state_dict_type",),
    "model only": ("save_only_model",),
    "gradient clipping": ("max_grad_norm",),
    "clipping by value": ("max_grad_norm", "other_clipping"),
    "frozen parameters": ("freeze",),
    "tensor parallelism": ("tensor_parallel",),
    "context parallelism": ("context_parallel_degree",),
    "pipeline parallelism": ("pipeline_parallel",),
    "expert parallelism": ("expert_parallel",),
    "split experts": ("expert_parallel_degree",),
    "idle experts": ("idle_experts", "wrap.experts"),
    "idle towers": ("idle_towers",),
    "tiled MLP": ("tiled_mlp",),
    "classes of tiled MLPs": ("tiled_mlp.classes",),
}


def lost_findings(run: RunConfig, target: Dialect, section: Section, lacks: Iterable[Finding]) -> Iterator[Finding]:
    """Yield a finding for each field of ``run`` that the written file lost without another finding for it.

    Args:
        run: The run that the original file configures.
        section: The section of the written file, parsed by ``target``.
        lacks: Findings about settings that the target lacks. A field whose finding is EXACT must be in the file.
    """
    open_ = [key for key, value in section.given.items() if target.interpolates and has_interpolation(value)]
    section = section.without(open_)
    reading = target.read(section)
    if reading.run is None:
        refused = [str(each) for each in reading.findings if each.outcome.blocks]
        yield _lost("the new text", "", f"its own reader refuses it: {and_more(refused, 3)}")
        return
    if target.rewrite(section, reading):
        yield _lost("the new text", "", "its own reader does not take it for FSDP2's")
    excused = {part for each in lacks for part in _parts(each)}
    before, after = _flat(run, run), _flat(reading.run, run)
    for name, value in before.items():
        is_more = value is False and name in _MORE_UNITS
        if after[name] != value and not is_more and not name.startswith(tuple(excused)):
            yield _lost(name, _text(value), f"the new text, read again, says {_text(after[name])}")


def _lost(key: str, value: object, reason: str) -> Finding:
    return Finding(
        key=key,
        value=value,
        outcome=Outcome.NEEDS_DECISION,
        reason=reason,
        hint="write it by hand, and please report the file as a fault of composer-fsdp2's",
        origin=Origin.WRITING,
    )


def _parts(finding: Finding) -> tuple[str, ...]:
    """The fields that a finding covers."""
    if finding.outcome.blocks and finding.key == "activation_checkpointing":
        return ("activation_checkpointing",)
    if finding.outcome is not Outcome.EXACT:
        return _FIELDS.get(finding.key, (finding.key,))
    return ("mesh.replicas",) if finding.key == "mesh" else ()  # the target replicates over all remaining ranks


# Units that the target adds by default. They change no result.
_MORE_UNITS = ("wrap.embeddings", "wrap.output")
# Fields without an effect on training, the number of ranks, and parts of the model's code, whose keys have findings.
_NO_FIELDS = (
    "num_ranks",
    "num_nodes",
    "verbose",
    "has_expert_axis",
    "tiled_chunks",
    "config.",
    "adapter",
    "has_fp8_layers",
)


def _flat(run: RunConfig, asked: RunConfig) -> dict[str, Any]:
    """The fields by dotted name, with the number of ranks of ``asked``."""
    if asked.with_degrees() is not asked:
        run = replace(run, num_ranks=asked.num_ranks).with_degrees()
    config = replace(run.config, mesh=_without_idle_replicas(run.config.mesh))
    if not config.activation_checkpointing.enabled:  # the options of a disabled feature
        config = replace(config, activation_checkpointing=type(config.activation_checkpointing)())
    if config.wrap.kind is not WrapKind.CLASSES:
        config = replace(config, wrap=replace(config.wrap, classes=()))
    if config.activation_checkpointing.classes == config.wrap.classes:  # the model's own classes, implicit or explicit
        config = replace(config, activation_checkpointing=replace(config.activation_checkpointing, classes=()))
    mesh = config.mesh
    found: dict[str, Any] = {
        "mesh.shards": mesh.shard_degree,
        "mesh.replicas": mesh.replicate_degree if mesh.has_replicas else None,
    }
    found |= {"mesh.groups": mesh.groups, **_fields_of(config), **_fields_of(replace(run, config=ShardingConfig()))}
    found["tiled_mlp.chunks"] = run.mlp_chunks
    found["tiled_mlp.classes"] = () if run.config.tiled_mlp is None else run.config.tiled_mlp.classes
    found.pop("tiled_mlp", None)  # compared by the two entries above
    return {name: value for name, value in found.items() if not name.startswith(_NO_FIELDS)}


def _without_idle_replicas(mesh: MeshSpec) -> MeshSpec:
    """Drop a replicate axis of size 1."""
    is_idle = not mesh.is_grouped and mesh.has_replicas and mesh.replicate_degree == 1
    return MeshSpec.of_degrees(mesh.shard_degree, tensor=mesh.tensor_degree) if is_idle else mesh.data_parallel


def _fields_of(value: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for field in fields(value):
        inner = getattr(value, field.name)
        if isinstance(inner, MeshSpec | TiledMLP):
            continue
        if is_dataclass(inner):
            found |= {f"{field.name}.{name}": each for name, each in _fields_of(inner).items()}
        else:
            found[field.name] = inner
    return found


def _text(value: object) -> str:
    return str(getattr(value, "value", value))
