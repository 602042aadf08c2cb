"""Composer's seams: the functions of Composer that must know of a model sharded by ``fully_shard``.

Each entry of ``SEAMS`` says what goes wrong without it (read and measured on Composer 0.32.1).
"""

import dataclasses
import functools
import logging
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from composer.core import Event, State
from composer.utils import FSDP2Config, FSDPConfig, ParallelismConfig, dist
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler as FSDP1GradScaler

from composer_fsdp2._torch import ShardedGradScaler
from composer_fsdp2.agreement import gather
from composer_fsdp2.clipping import clip_grad_adaptive_, clip_grad_norm_
from composer_fsdp2.compat import microbatching, monitoring
from composer_fsdp2.compat.checkpoint import replacement_for_load_checkpoint
from composer_fsdp2.compat.ema import replacement_for_compute_ema, replacement_for_method
from composer_fsdp2.compat.full_params import replacement_for_summon_full_params
from composer_fsdp2.compat.llmfoundry import use_own_names
from composer_fsdp2.compat.optimizers import update_own_parts
from composer_fsdp2.compat.package import (
    replacement_for_generate,
    replacement_for_is_model_fsdp,
    replacement_for_model_context,
    replacement_for_package_state,
    replacement_for_sharded_write,
)
from composer_fsdp2.compat.refusals import refuse_copies, replacement_for_export
from composer_fsdp2.compat.resting import put_to_rest, replacement_for_run_callbacks
from composer_fsdp2.compat.saving import (
    replacement_for_batch_end,
    replacement_for_fit_end,
    replacement_for_save_checkpoint,
    replacement_for_save_to_folder,
    replacement_for_saver,
    replacement_for_state_dict,
    replacement_for_state_dict_context,
    replacement_for_write,
)
from composer_fsdp2.compat.seams import Seam
from composer_fsdp2.errors import ConfigError, UnsupportedError
from composer_fsdp2.fsdp1.keys import KEYS, Origin
from composer_fsdp2.fsdp1.legacy import FSDP2_DEFAULTS
from composer_fsdp2.fsdp1.translate import translate
from composer_fsdp2.guard import check_guard
from composer_fsdp2.microbatching import begin_microbatch
from composer_fsdp2.optimizer import the_optimizer
from composer_fsdp2.prepare import prepare_fully_shard
from composer_fsdp2.sharded import is_sharded, reshard

__all__ = ["SEAMS", "EveryKeyFSDP2Config"]

log = logging.getLogger(__name__)


class EveryKeyFSDP2Config(FSDP2Config):
    """An FSDP2Config that keeps every key it is given.

    Composer's own drops FSDP1's keys with a warning and answers for them with fixed properties, so degrees, planners
    and folder names are lost. Here they are ordinary attributes with FSDP1's defaults; FSDP2Config's own defaults
    (``state_dict_type='sharded'``, checkpointing that is not reentrant, rank 0's values sent where some ranks have
    none) stay.
    """

    def __init__(self, **said: Any) -> None:  # not the dataclass's: what was not said must stay unsaid
        for key, value in said.items():
            setattr(self, key, value)

    @classmethod
    def of(cls, config: FSDP2Config) -> "EveryKeyFSDP2Config":
        """From a plain FSDP2Config; its mesh becomes degrees, because Composer's State builds the mesh anew."""
        if isinstance(config, cls):
            return config
        said = {
            key: value
            for key, value in vars(config).items()
            if not key.startswith("_") and key != "device_mesh" and value != getattr(FSDP2Config, key)
        }
        if config.sync_module_states:  # set on the object: the constructor does not take it
            said["sync_module_states"] = True
        mesh = config.device_mesh
        if mesh is not None:
            said["data_parallel_shard_degree"] = mesh.size(mesh.ndim - 1)
            if mesh.ndim == 2:
                said["data_parallel_replicate_degree"] = mesh.size(0)
        return cls(**said)


for _key in KEYS:
    if _key.origin is Origin.FSDP1 and _key.name not in FSDP2Config.settable_attrs():
        setattr(EveryKeyFSDP2Config, _key.name, _key.default)
for _name, _default in FSDP2_DEFAULTS.items():
    setattr(EveryKeyFSDP2Config, _name, _default)


# ---------------------------------------------------------------------------------------------------------------------
# Configuration


def _parse_parallelism_config(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def parse(self: Any, parallelism_config: Any) -> ParallelismConfig | None:
        parsed = original(self, parallelism_config)
        if parsed is not None:
            if parsed.fsdp2 is not None:
                _check_early(parsed.fsdp2)
                # A copy: it may be the user's own object, which serves the next Trainer too.
                parsed = dataclasses.replace(parsed, fsdp2=EveryKeyFSDP2Config.of(parsed.fsdp2))
            elif parsed.fsdp is not None:
                _check_early(parsed.fsdp)
            if parsed.tp is not None and parsed.tp.tensor_parallel_degree != 1:
                raise _tensor_parallelism_error()
        return parsed

    return parse


def _check_early(config: FSDPConfig | FSDP2Config) -> None:
    """Bad keys and degrees in our words, before Composer's State asserts something about them in its own."""
    translate(config, precision="fp32", world_size=dist.get_world_size(), strict=False)


def _from_compatible_attrs(original: Any) -> Any:
    def from_compatible_attrs(cls: type[FSDP2Config], attrs: Mapping[str, Any]) -> FSDP2Config:
        return EveryKeyFSDP2Config(**attrs)

    return classmethod(from_compatible_attrs)


def _prepare_tp_module(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def prepare_tp_module(*args: Any, **kwargs: Any) -> None:
        raise _tensor_parallelism_error()

    return prepare_tp_module


def _tensor_parallelism_error() -> UnsupportedError:
    return UnsupportedError(
        "parallelism_config.tp (tensor parallelism) is not supported yet together with FSDP2; leave it out"
    )


# ---------------------------------------------------------------------------------------------------------------------
# Sharding


def _prepare_fsdp_module(original: Callable[..., Any]) -> Callable[..., Any]:
    # A function of its own: uninstall puts the original wherever it finds this one, and must leave ours alone.
    @functools.wraps(prepare_fully_shard)
    def prepare_fsdp_module(
        model: nn.Module, optimizers: Any = None, *args: Any, **kwargs: Any
    ) -> tuple[list[Any], dict[str, nn.Module]]:
        made = prepare_fully_shard(model, optimizers, *args, **kwargs)
        if (optimizer := the_optimizer(optimizers)) is not None:
            update_own_parts(optimizer)
        return made

    return prepare_fsdp_module


def _parallelize_composer_model(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def parallelize(
        composer_model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        config: FSDP2Config,
        precision: Any = None,
    ) -> None:
        has_values = gather(not any(parameter.is_meta for parameter in composer_model.parameters()))
        prepare_fully_shard(composer_model, optimizer, config, precision)
        if any(has_values) and not all(has_values):
            config.sync_module_states = True  # as Composer notes on it that rank 0's values went out

    return parallelize


# ---------------------------------------------------------------------------------------------------------------------
# State


def _resharded_first(original: Callable[..., Any]) -> Callable[..., Any]:
    """A method of State that reads or writes the model's parameters."""

    @functools.wraps(original)
    def method(self: State, *args: Any, **kwargs: Any) -> Any:
        reshard(self.model)
        return original(self, *args, **kwargs)

    return method


def _apply_fsdp(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def apply_fsdp(self: State) -> None:
        original(self)
        if type(self.scaler) in (GradScaler, FSDP1GradScaler) and is_sharded(self.model):
            scaler = ShardedGradScaler()
            scaler.load_state_dict(self.scaler.state_dict())
            self.scaler = scaler

    return apply_fsdp


# Before these, a Trainer's ranks are at one place, whatever the model is: a batch less on one of them shows here.
_MEETINGS = {
    Event.BEFORE_TRAIN_BATCH: "a training batch",
    Event.AFTER_TRAIN_BATCH: "the end of a training batch",
    Event.EVAL_BATCH_START: "an evaluation batch",
    Event.EVAL_END: "the end of an evaluation",
    Event.FIT_END: "the end of fit",
}


def _run_event(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def run_event(self: Any, event: Event | str) -> Any:
        event = Event(event)
        if event in (Event.INIT, Event.FIT_START):
            refuse_copies(self.state)
        put_to_rest(self.state, event)
        if event is Event.FIT_START and is_sharded(self.state.model):
            use_own_names(self.state)
            for optimizer in self.state.optimizers:
                update_own_parts(optimizer)
        microbatching.before_event(self.state, event)
        if event in _MEETINGS:
            check_guard(self.state.model, _MEETINGS[event])
        result = original(self, event)
        microbatching.after_event(self.state, event)
        return result

    return run_event


# ---------------------------------------------------------------------------------------------------------------------
# Microbatches


def _train_microbatch(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def train_microbatch(
        self: Any, use_grad_scaling: bool, current_batch_size: float, is_final_microbatch: bool
    ) -> dict[str, torch.Tensor]:
        begin_microbatch(self.state.model, is_last=is_final_microbatch)
        losses: dict[str, torch.Tensor] = original(self, use_grad_scaling, current_batch_size, is_final_microbatch)
        return losses

    return train_microbatch


def _all_reduce(original: Callable[..., Any]) -> Callable[..., Any]:
    return monitoring.replacement_for_all_reduce(microbatching.replacement_for_all_reduce(original))


# ---------------------------------------------------------------------------------------------------------------------
# Clipping


def _apply_gradient_clipping(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def apply_gradient_clipping(
        model: nn.Module, clipping_type: str, clipping_threshold: float, fsdp_enabled: bool
    ) -> None:
        if not is_sharded(model):
            original(model, clipping_type, clipping_threshold, fsdp_enabled)
        elif clipping_type == "norm":
            clip_grad_norm_(model, clipping_threshold)
        elif clipping_type == "value":
            _say_value_clips_norm()
            clip_grad_norm_(model, clipping_threshold, math.inf)
        elif clipping_type == "adaptive":
            clip_grad_adaptive_(model, clipping_threshold)
        else:
            raise ConfigError(f"clipping_type is {clipping_type!r}; it is 'norm', 'value' or 'adaptive'")

    return apply_gradient_clipping


@functools.cache
def _say_value_clips_norm() -> None:
    log.warning(
        "clipping_type 'value' scales all gradients by their largest absolute value, as Composer did under FSDP1; "
        "it does not clip element by element"
    )


_EMA = "composer.algorithms.ema.ema"
_STATE = "composer.core.state"
_TRAINER = "composer.trainer.trainer"
_SAVER = "composer.callbacks.checkpoint_saver"
SEAMS = (
    Seam(
        module=_TRAINER,
        name="Trainer._parse_parallelism_config",
        make=_parse_parallelism_config,
        why="misspelt keys trained as defaults, and a mesh in FSDP2Config was overwritten by a 1-D one",
    ),
    Seam(
        module="composer.utils.parallelism",
        name="FSDP2Config.from_compatible_attrs",
        make=_from_compatible_attrs,
        why="FSDP_VERSION=2 dropped every FSDP1 key with a warning",
    ),
    Seam(
        module="composer.distributed.dist_strategy",
        name="prepare_fsdp_module",
        make=_prepare_fsdp_module,
        why="the drop-in itself",
    ),
    Seam(
        module="composer.distributed.prepare_distributed",
        name="parallelize_composer_model",
        make=_parallelize_composer_model,
        why="Composer's own FSDP2 raises on tied weights and knows neither replicas nor offload",
    ),
    Seam(
        module="composer.distributed.dist_strategy",
        name="prepare_tp_module",
        make=_prepare_tp_module,
        why="a model split by tensor parallelism cannot be sharded here yet; half of it would be changed by then",
    ),
    Seam(
        module=_STATE,
        name="State._apply_fsdp",
        make=_apply_fsdp,
        why="torch's gradient scalers raise where some gradients are whole (ignored modules, scalars) and some sharded",
    ),
    *(
        Seam(
            module=_STATE,
            name=f"State.{name}",
            make=_resharded_first,
            why="after a forward without gradients parameters are plain tensors, and state dicts raise on them",
        )
        for name in ("get_model_state_dict", "get_optim_state_dict", "load_model_state", "load_optim_state")
    ),
    Seam(
        module=_STATE,
        name="State.state_dict",
        make=replacement_for_state_dict,
        why="shards that an algorithm holds (EMA's averages) were saved as rank 0's alone, in a pickle of DTensors",
    ),
    Seam(
        module="composer.utils.checkpoint",
        name="load_checkpoint",
        make=replacement_for_load_checkpoint,
        why="old checkpoints failed or loaded wrong in silence, and a layout loaded under its own setting only",
    ),
    Seam(
        module="composer.utils.checkpoint",
        name="_save_checkpoint",
        make=replacement_for_write,
        why="a full checkpoint gathered the whole model and optimizer state in rank 0's memory",
    ),
    Seam(
        module="composer.utils.checkpoint",
        name="save_checkpoint",
        make=replacement_for_save_checkpoint,
        why="a checkpoint that is written already is not written again, only linked, uploaded and counted",
    ),
    Seam(
        module=_SAVER,
        name="CheckpointSaver._save_checkpoint",
        make=replacement_for_saver,
        why="a run killed while the latest link was replaced began from nothing; async_save",
    ),
    Seam(
        module=_SAVER,
        name="CheckpointSaver.batch_end",
        make=replacement_for_batch_end,
        why="async_save: links and errors follow once the checkpoint is written",
    ),
    Seam(
        module=_SAVER,
        name="CheckpointSaver.fit_end",
        make=replacement_for_fit_end,
        why="async_save: the last checkpoint is whole when fit returns",
    ),
    Seam(
        module=_TRAINER,
        name="Trainer.save_checkpoint_to_save_folder",
        make=replacement_for_save_to_folder,
        why="async_save: a script that ends after it would lose the checkpoint",
    ),
    Seam(
        module=_STATE,
        name="fsdp_state_dict_type_context",
        make=replacement_for_state_dict_context,
        why="LLM Foundry's MonolithicCheckpointSaver asks FSDP1 for whole state: KeyError, AttributeError",
    ),
    Seam(
        module=_TRAINER,
        name="Trainer._train_microbatch",
        make=_train_microbatch,
        why="gradient_sync and reshard_after_backward: which microbatch of a batch is the last",
    ),
    Seam(
        module=_TRAINER,
        name="Trainer.__init__",
        make=microbatching.replacement_for_init,
        why="device_train_microbatch_size 'auto' was refused with FSDP2",
    ),
    *(
        Seam(
            module=_TRAINER,
            name=f"Trainer.{name}",
            make=microbatching.replacement_for_run,
            why="after an error that a script caught, gradients that had not been communicated were trained on next",
        )
        for name in ("fit", "eval", "predict")
    ),
    Seam(
        module=_TRAINER,
        name="Trainer._train_batch",
        make=microbatching.replacement_for_train_batch,
        why="with 'auto', a rank out of memory left the others waiting, and the model in the midst of a forward",
    ),
    Seam(
        module=_TRAINER,
        name="Trainer._eval_loop",
        make=microbatching.replacement_for_eval_loop,
        why="the same in an evaluation, whose metrics then counted a batch twice",
    ),
    Seam(
        module=_TRAINER,
        name="_is_cuda_oom",
        make=microbatching.replacement_for_is_oom,
        why="where Composer catches the error of one rank, the others must hear of it",
    ),
    Seam(
        module=_TRAINER,
        name="_adjust_device_eval_microbatch_size",
        make=microbatching.replacement_for_adjust_eval,
        why="the batch is evaluated again: metrics, buffers and random states as before it",
    ),
    Seam(
        module=_TRAINER,
        name="_fsdp_reshard_and_cleanup",
        make=microbatching.replacement_for_cleanup,
        why="after an error that a script caught, it looked for FSDP1's modules, and left ours in their pass",
    ),
    Seam(
        module=_TRAINER,
        name="_readd_fsdp_sync_hooks",
        make=microbatching.replacement_for_readd_hooks,
        why="it patches FSDP1, with a function that torch 2.7.1 and later lack",
    ),
    Seam(
        module="composer.utils.dist",
        name="all_reduce",
        make=_all_reduce,
        why="the eval loop's question who is out of memory is the last vote of its batch; and torch's raises for "
        "DTensors, such as the norms in the step of adaptive Lion",
    ),
    Seam(
        module="torch.distributed.fsdp.fully_sharded_data_parallel",
        name="FullyShardedDataParallel.summon_full_params",
        make=replacement_for_summon_full_params,
        why="scripts and Hugging Face's trainers call it on any model; where FSDP1 wraps nothing, it does nothing",
    ),
    Seam(
        module="composer.core.engine",
        name="Engine.run_event",
        make=_run_event,
        why="callbacks read plain tensors after an eval; what copies the model, or matches FSDP1's names, failed late",
    ),
    Seam(
        module="composer.core.engine",
        name="Engine._run_callbacks",
        make=replacement_for_run_callbacks,
        why="after a callback that runs the model (Generate), the next one read plain tensors",
    ),
    Seam(
        module="composer.algorithms.gradient_clipping.gradient_clipping",
        name="apply_gradient_clipping",
        make=_apply_gradient_clipping,
        why="with an FSDPConfig it looks for FSDP1 modules, finds none and clips nothing",
    ),
    Seam(
        module="composer.callbacks.optimizer_monitor",
        name="OptimizerMonitor.batch_end",
        make=monitoring.replacement_for_monitor_batch_end,
        why="it logged the norms of this rank's parts, or raised",
    ),
    Seam(
        module="composer.optim.decoupled_weight_decay",
        name="DecoupledAdamW.pre_reduce_metrics",
        make=monitoring.replacement_for_pre_reduce_metrics,
        why="callbacks of one's own that report metrics: one collective for each",
    ),
    Seam(
        module="composer.optim.decoupled_weight_decay",
        name="DecoupledAdamW.dist_reduce_metrics",
        make=monitoring.replacement_for_dist_reduce_metrics,
        why="the same, and it asks for a CUDA device",
    ),
    Seam(
        module="composer.callbacks.activation_monitor",
        name="ActivationMonitor.before_forward",
        make=monitoring.replacement_for_before_forward,
        why="names of activation checkpointing's wrappers were logged; fsdp1_metric_names",
    ),
    Seam(
        module="composer.callbacks.activation_monitor",
        name="ActivationMonitor.forward_hook",
        make=monitoring.replacement_for_forward_hook,
        why="the same",
    ),
    Seam(
        module=_EMA,
        name="compute_ema",
        make=replacement_for_compute_ema,
        why="averages from a checkpoint are whole, and FSDP1's have other names, so that they were left alone",
    ),
    *(
        Seam(
            module=_EMA,
            name=f"EMAParameters.{name}",
            make=replacement_for_method,
            why="the same; a resumed run ended with 'mixed torch.Tensor and DTensor'",
        )
        for name in ("swap_params", "transfer_ema_params", "move_params_to_device")
    ),
    Seam(
        module=_EMA,
        name="get_model_context_manager",
        make=replacement_for_model_context,
        why="it would gather the whole model for EMA, which averages shards here",
    ),
    Seam(
        module="composer.utils.misc",
        name="is_model_fsdp",
        make=replacement_for_is_model_fsdp,
        why="scripts and callbacks ask it whether a model is sharded",
    ),
    Seam(
        module="composer.checkpoint.state_dict",
        name="_is_model_fsdp",
        make=replacement_for_is_model_fsdp,
        why="composer.checkpoint refused to save or load shards, and took a sharded model for a whole one",
    ),
    *(
        Seam(
            module="composer.checkpoint.state_dict",
            name=name,
            make=replacement_for_package_state,
            why="state of a model that stands gathered after an evaluation was saved as plain tensors",
        )
        for name in ("get_model_state_dict", "get_optim_state_dict")
    ),
    Seam(
        module="composer.checkpoint.save",
        name="_save_sharded_state_dict_to_disk",
        make=replacement_for_sharded_write,
        why="rank 0 asked whether the folder is there while the others were making it: now and then a save hung",
    ),
    Seam(
        module="composer.models.huggingface",
        name="HuggingFaceModel.generate",
        make=replacement_for_generate,
        why="FSDP1 needed the root's full parameters for it; here the forward gathers them",
    ),
    Seam(
        module="composer.utils.inference",
        name="export_for_inference",
        make=replacement_for_export,
        why="rank 0 failed on an assertion of torch's, and the other ranks went on",
    ),
)
