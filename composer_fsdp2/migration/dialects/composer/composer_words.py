"""Convert the fields of a run to keys and values of an ``fsdp_config``."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from enum import Enum
from operator import attrgetter
from typing import Any

from composer_fsdp2.config.mesh import AxisRole, MeshSpec
from composer_fsdp2.config.sharding import ActivationCheckpointing, GradientDtype, MixedPrecision
from composer_fsdp2.fsdp1.keys import KEYS, Key, KeyGroup
from composer_fsdp2.fsdp1.parallel_words import idle_towers_words, tiled_words
from composer_fsdp2.fsdp1.parsing import BackwardPrefetch, GivenPrecision, mixed_precision_of
from composer_fsdp2.fsdp1.policy_words import checkpointed_words, freeze_words, wrap_policy_words
from composer_fsdp2.migration.lens import unless
from composer_fsdp2.migration.run import RunConfig
from composer_fsdp2.migration.training import adamw_of, count, number_of


def mesh_words(mesh: MeshSpec) -> Iterator[tuple[str, Any]]:
    axes = [mesh.axes[number] for role in (AxisRole.SHARD, AxisRole.REPLICATE) for number in mesh.axes_of(role)]
    if mesh.is_grouped:
        groups = [list(axis.groups.ranks) or str(axis.groups) for axis in axes if axis.groups is not None]
        yield "process_group", groups if len(groups) > 1 else groups[0]
        return
    for axis in axes:
        if axis.size != -1 or axis.role is AxisRole.REPLICATE:
            yield axis.key, axis.size


def precision_words(run: RunConfig) -> str | dict[str, str]:
    """Return Composer's name for the mixed precision (FULL, DEFAULT or PURE) if one matches, otherwise the dtypes."""
    asked = run.config.mixed_precision
    dtypes = {name: getattr(asked, name) for name in ("param_dtype", "reduce_dtype", "buffer_dtype")}
    for word in ("FULL", "DEFAULT", "PURE"):
        if mixed_precision_of(GivenPrecision(word), run.precision) == MixedPrecision(**dtypes):
            return word
    return {name: dtype for name, dtype in dtypes.items() if dtype is not None}


Write = Callable[[RunConfig], Any]


def _field_of(row: Key) -> Write:
    """Return a function that writes a key specific to composer_fsdp2, unless its value is the default.

    Experts are units only if idle experts run as well; classes are written only if activations are recomputed or
    offloaded.
    """

    def write(run: RunConfig) -> Any:
        config = run.config
        if not config.activation_checkpointing.enabled:
            config = replace(config, activation_checkpointing=ActivationCheckpointing())
        if config.idle_experts is None:
            config = replace(config, wrap=replace(config.wrap, experts=()))
        field = attrgetter(*row.fields)(config)
        value = field.value if isinstance(field, Enum) else WORDS.get(row.name, lambda each: each)(field)
        return unless(row.default, value)

    return write


# Conversion of these keys' fields to their values in a file; other systems have keys for these fields, too.
WORDS: Mapping[str, Callable[[Any], Any]] = {
    "wrap_policy": wrap_policy_words,
    "activation_checkpointing_policy": checkpointed_words,
    "freeze": freeze_words,
    "train_only": freeze_words,
    "tiled_mlp": tiled_words,
    "idle_towers": idle_towers_words,
}


def optimizer_words(run: RunConfig) -> Mapping[str, Any]:
    """Return LLM Foundry's AdamW with all options, as its defaults differ from torch's; empty for other optimizers."""
    found = adamw_of(run)
    return found and {
        "name": "decoupled_adamw",
        "lr": found["lr"],
        "betas": [found["beta1"], found["beta2"]],
        "eps": found["eps"],
        "weight_decay": number_of(found["weight_decay"] * found["lr"]),
    }


def _clipping(run: RunConfig) -> dict[str, Any] | None:
    norm = run.max_grad_norm or 0
    return {"gradient_clipping": {"clipping_type": "norm", "clipping_threshold": norm}} if norm > 0 else None


def _duration(run: RunConfig) -> str | None:
    """Return the duration, or None for a fraction of an epoch: Composer takes whole epochs only."""
    return run.max_duration if run.max_duration and count(run.max_duration.rstrip("abep")) else None


# Keys beside the section, with the fields that they set.
BESIDE_WRITTEN: tuple[tuple[str, tuple[str, ...], Write], ...] = (
    ("precision", ("precision",), lambda run: run.precision),
    ("algorithms", ("max_grad_norm",), _clipping),
    ("device_train_microbatch_size", ("microbatch_size",), lambda run: run.microbatch_size),
    (
        "global_train_batch_size",
        ("global_batch_size", "num_microbatches"),
        lambda run: run.with_batches().global_batch_size,
    ),
    ("max_duration", ("max_duration",), _duration),
    ("optimizer", ("optimizer",), lambda run: optimizer_words(run) or None),
)


def _checkpointing(value: Callable[[ActivationCheckpointing], Any]) -> Write:
    """Return a function that writes the value only if activations are recomputed or offloaded."""
    return lambda run: (
        value(run.config.activation_checkpointing) if run.config.activation_checkpointing.enabled else None
    )


def _if(value: Callable[[RunConfig], object]) -> Write:
    """Return a function that writes ``true`` if the value is truthy, otherwise nothing."""
    return lambda run: True if value(run) else None


# Keys with their values for a run, in the order of a new section; None leaves a key out.
WRITTEN: tuple[tuple[str, Write], ...] = (
    ("reshard_after_forward", lambda run: run.config.reshard_after_forward),
    ("mixed_precision", precision_words),
    ("state_dict_type", lambda run: run.state_dict_type),
    ("activation_checkpointing", _checkpointing(lambda each: each.checkpoint)),
    ("activation_checkpointing_reentrant", _checkpointing(lambda each: None if each.reentrant else False)),
    ("backward_prefetch", lambda run: BackwardPrefetch.NONE.value if run.config.prefetch.backward == 0 else None),
    ("backward_prefetch_limit", lambda run: run.config.prefetch.backward or None),
    ("forward_prefetch", _if(lambda run: run.config.prefetch.forward is not None)),
    ("activation_cpu_offload", _if(lambda run: run.config.activation_checkpointing.cpu_offload)),
    ("te_checkpoint_wrapper", _if(lambda run: run.config.activation_checkpointing.transformer_engine)),
    ("forward_prefetch_limit", lambda run: unless(1, run.config.prefetch.forward or 1)),
    ("cpu_offload", _if(lambda run: run.config.cpu_offload)),
    ("sync_module_states", _if(lambda run: run.config.sync_module_states)),
    (
        "keep_low_precision_grads",
        _if(lambda run: run.config.mixed_precision.gradients is not GradientDtype.OF_PARAMETER),
    ),
    *((row.name, _field_of(row)) for row in KEYS if row.group == KeyGroup.OURS and row.sets),
    ("async_save", _if(lambda run: run.async_save)),
    ("verbose", _if(lambda run: run.verbose)),
)
