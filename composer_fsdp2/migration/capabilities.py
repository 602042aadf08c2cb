"""What a run may ask of a system, as one table of questions; each dialect says what of it its target lacks.

A question answers with what the report shows as asked for, or None where the run does not ask; nothing is decided by
the answer's words. A new question is a line here, and a ``Lack`` in each dialect whose target has no word for it.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from composer_fsdp2.config.findings import Finding, Origin, Outcome
from composer_fsdp2.config.sharding import GradientDtype, GradientSync
from composer_fsdp2.config.wrap import WrapKind
from composer_fsdp2.migration.run import RunConfig


def _if(value: Any, condition: object) -> Any:
    return value if condition else None


def _recomputed(run: RunConfig) -> str | None:
    checkpointing = run.config.activation_checkpointing
    if checkpointing.classes is None or not checkpointing.enabled:
        return None
    return ", ".join(checkpointing.classes) or "as the model says"


def _units(run: RunConfig) -> str:
    wrap = run.wrap
    if wrap.kind is WrapKind.CLASSES:
        return ", ".join(wrap.classes) or "as the model says"
    words = {WrapKind.HOOKS: "the model's own hooks", WrapKind.ROOT: "one unit"}
    return words.get(wrap.kind, f"modules of {wrap.min_num_params} parameters or more")


_SYNC = {True: "always", False: "never", None: "where ranks lack values"}

CAPABILITIES: dict[str, Callable[[RunConfig], Any]] = {
    "mesh": lambda run: run.config.mesh.text,
    "units": _units,
    "further units": lambda run: ", ".join(run.wrap.others) or None,
    "expert units": lambda run: ", ".join(run.wrap.experts) or None,
    "reshard_after_forward": lambda run: _if(
        run.config.reshard_after_forward, not isinstance(run.config.reshard_after_forward, bool)
    ),
    "param_dtype": lambda run: run.config.mixed_precision.param_dtype or "as created",
    "reduce_dtype": lambda run: run.config.mixed_precision.reduce_dtype or "as computed",
    "dtype of outputs": lambda run: run.config.mixed_precision.output_dtype,
    "buffer_dtype": lambda run: run.config.mixed_precision.buffer_dtype,
    "autocast": lambda run: run.precision,
    "products in fp8": lambda run: _if(run.precision, run.precision == "amp_fp8"),
    "dtype of stored parameters": lambda run: run.stored_dtype or "as created",
    "casting of inputs": lambda run: "at every unit" if run.config.mixed_precision.cast_forward_inputs else "at roots",
    "casting of the root's inputs": lambda run: "done" if run.config.mixed_precision.cast_root_inputs else "not done",
    "keep_low_precision_grads": lambda run: _if(
        True, run.config.mixed_precision.gradients is not GradientDtype.OF_PARAMETER
    ),
    "activation_checkpointing": lambda run: run.config.activation_checkpointing.checkpoint,
    "recomputed modules": _recomputed,
    "reentrant checkpointing": lambda run: _if(
        "reentrant", run.config.activation_checkpointing.checkpoint and run.config.activation_checkpointing.reentrant
    ),
    "non-reentrant checkpointing": lambda run: _if(
        "non-reentrant",
        run.config.activation_checkpointing.checkpoint and not run.config.activation_checkpointing.reentrant,
    ),
    "unused implementation": lambda run: _if(
        "not reentrant",
        not run.config.activation_checkpointing.checkpoint and not run.config.activation_checkpointing.reentrant,
    ),
    "selective checkpointing": lambda run: run.selective_checkpointing,
    "activation offloading": lambda run: _if(True, run.config.activation_checkpointing.cpu_offload),
    "Transformer Engine": lambda run: _if(True, run.config.activation_checkpointing.transformer_engine),
    "prefetch in forward": lambda run: run.config.prefetch.forward,
    "prefetch in backward": lambda run: run.config.prefetch.backward,
    "gradient_sync": lambda run: _if(
        run.config.accumulation.gradient_sync.value,
        run.config.accumulation.gradient_sync is not GradientSync.EVERY,
    ),
    "reshard_after_backward": lambda run: _if("no", not run.config.accumulation.reshard_after_backward),
    "collective_guard": lambda run: run.config.collective_guard,
    "check_data": lambda run: run.config.check_data,
    "broadcast_batch": lambda run: run.config.broadcast_batch and str(run.config.broadcast_batch.value).lower(),
    "sync_module_states": lambda run: _SYNC[run.config.sync_module_states],
    "ignored_modules": lambda run: _if(run.config.ignored_modules, run.config.ignored_modules),
    "state_dict_type": lambda run: run.state_dict_type,
    "async_save": lambda run: _if(True, run.async_save),
    "model only": lambda run: _if(True, run.save_only_model),
    "gradient clipping": lambda run: _if(
        "off" if run.max_grad_norm is None else run.max_grad_norm, run.other_clipping is None
    ),
    "clipping by value": lambda run: run.other_clipping,
    "frozen parameters": lambda run: ", ".join(run.config.freeze) or None,
    "tensor parallelism": lambda run: _if(run.tensor_parallel, run.tensor_parallel != 1),
    "context parallelism": lambda run: _if(run.context_parallel, run.context_parallel != 1),
    "pipeline parallelism": lambda run: _if(run.pipeline_parallel, run.pipeline_parallel != 1),
    "expert parallelism": lambda run: _if(run.expert_parallel, run.expert_parallel != 1),
    "split experts": lambda run: _if(run.config.expert_parallel_degree, run.config.expert_parallel_degree != 1),
    "idle experts": lambda run: run.config.idle_experts and run.config.idle_experts.value,
    "idle towers": lambda run: _if(
        ", ".join(run.config.idle_towers or ()) or "as the model says", run.config.idle_towers is not None
    ),
    "tiled MLP": lambda run: run.mlp_chunks,
    "classes of tiled MLPs": lambda run: run.config.tiled_mlp and ", ".join(run.config.tiled_mlp.classes),
    "compile": lambda run: _if(True, run.compile),
    "number of ranks": lambda run: _if("not known", run.num_ranks is None),
    "verbose": lambda run: _if(True, run.verbose),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Lack:
    """An answer that a target cannot say, or carries out in its own way.

    Args:
        asked: The question, by its name.
        outcome: What becomes of it.
        reason: With ``{value}`` for the answer, and ``{shard_degree}``, ``{replicate_degree}`` and ``{size}`` for the
            mesh's; as ``target`` and ``hint``.
        when: Of which runs that ask it is true.
    """

    asked: str
    outcome: Outcome
    reason: str
    target: str = ""
    hint: str = ""
    when: Callable[[RunConfig], bool] = lambda run: True

    def finding(self, run: RunConfig) -> Finding | None:
        """None if the run does not ask for it."""
        value = CAPABILITIES[self.asked](run)
        if value is None or not self.when(run):
            return None
        return Finding(
            key=self.asked,
            value=value,
            outcome=self.outcome,
            target=_filled(self.target, run, value),
            reason=_filled(self.reason, run, value),
            hint=_filled(self.hint, run, value),
            origin=Origin.LACKING,
        )


def _filled(text: str, run: RunConfig, value: object) -> str:
    mesh = run.config.mesh
    for name in ("shard_degree", "replicate_degree", "size"):
        if f"{{{name}}}" in text:  # groups of ranks have no degrees
            text = text.replace(f"{{{name}}}", str(getattr(mesh, name)))
    return text.replace("{value}", str(value))


def lacking(table: Iterable[Lack], run: RunConfig) -> Iterator[Finding]:
    """What a target lacks of what the run asks for."""
    yield from (finding for lack in table if (finding := lack.finding(run)) is not None)
