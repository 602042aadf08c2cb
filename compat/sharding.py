"""Shard a model in a Trainer or script, check whether a model is sharded, and access its full parameters."""

import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from composer.core import State
from composer.utils import FSDP2Config
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler as FSDP1GradScaler

from composer_fsdp2._torch.private_names import FSDP1Wrapper
from composer_fsdp2._torch.scaler import ShardedGradScaler
from composer_fsdp2.config.text import and_more
from composer_fsdp2.fsdp1.attributes import log_replacement
from composer_fsdp2.prepare import prepare_fully_shard
from composer_fsdp2.sharding.agree import all_gather_object
from composer_fsdp2.sharding.confirmation import confirm, lists_units
from composer_fsdp2.sharding.sharded import is_sharded, reshard
from composer_fsdp2.training.full_params import summon_full_params
from composer_fsdp2.training.run import run_of

from .seams import seam
from .tensor_parallel import pop_tensor_config


@seam("composer.distributed.dist_strategy", "prepare_fsdp_module", why="the drop-in itself")
def prepare_fsdp_module(
    original: Callable[..., Any], model: nn.Module, optimizers: Any = None, *args: Any, **kwargs: Any
) -> tuple[list[Any], dict[str, nn.Module]]:
    prepared = prepare_fully_shard(model, optimizers, *args, **kwargs, tensor_parallel=pop_tensor_config(model))
    _confirm(model)
    return prepared


def _confirm(model: nn.Module) -> None:
    """Print a summary of the sharded model on rank 0, so the user sees that FSDP2 is used."""
    plan = run_of(model).plan
    if plan is not None:
        confirm(plan.summary, [plan], with_units=lists_units())


def warn_of_fsdp1(model: nn.Module) -> None:
    """Warn if FSDP1 shards a model although ``install`` is active."""
    found = [path for path, module in model.named_modules() if isinstance(module, FSDP1Wrapper)]
    if found:
        warnings.warn(
            f"composer_fsdp2 is installed, but {len(found)} modules of {type(model).__name__} train on FSDP1 "
            f"({and_more(found)}): the Trainer was made before composer_fsdp2.compat.install(), or the script wrapped "
            "them itself; call install() before the Trainer is made",
            stacklevel=2,
        )


@seam(
    "composer.distributed.prepare_distributed",
    "parallelize_composer_model",
    why="Composer's own FSDP2 raises on tied weights and knows neither replicas nor offload",
)
def parallelize(
    original: Callable[..., Any],
    composer_model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    config: FSDP2Config,
    precision: Any = None,
) -> None:
    has_values = all_gather_object(not any(parameter.is_meta for parameter in composer_model.parameters()))
    prepare_fully_shard(composer_model, optimizer, config, precision, tensor_parallel=pop_tensor_config(composer_model))
    _confirm(composer_model)
    if any(has_values) and not all(has_values):
        config.sync_module_states = True  # Composer records there that rank 0's values were broadcast


@seam(
    "composer.core.state",
    "State.get_model_state_dict",
    "State.get_optim_state_dict",
    "State.load_model_state",
    "State.load_optim_state",
    why="after a forward without gradients parameters are plain tensors, and state dicts raise on them",
)
def with_parameters_sharded(original: Callable[..., Any], self: State, *args: Any, **kwargs: Any) -> Any:
    """Replaces methods of State that read or write the model's parameters."""
    reshard(self.model)
    return original(self, *args, **kwargs)


@seam(
    "composer.core.state",
    "State._apply_fsdp",
    why="torch's gradient scalers raise where some gradients are unsharded (ignored modules, scalars) and some sharded",
)
def apply_fsdp(original: Callable[..., Any], self: State) -> None:
    original(self)
    if type(self.scaler) in (GradScaler, FSDP1GradScaler) and is_sharded(self.model):
        scaler = ShardedGradScaler()
        scaler.load_state_dict(self.scaler.state_dict())
        self.scaler = scaler


@seam("composer.utils.misc", "is_model_fsdp", why="scripts and callbacks query it to know whether a model is sharded")
@seam(
    "composer.checkpoint.state_dict",
    "_is_model_fsdp",
    why="composer.checkpoint refused to save or load shards, and took a sharded model for an unsharded one",
)
def is_model_fsdp(original: Callable[..., Any], model: nn.Module) -> bool:
    """Replaces ``is_model_fsdp`` of ``composer.utils`` and ``composer.checkpoint``: also True for models sharded by
    ``fully_shard``.

    Scripts then call functions of FSDP1 that this package replaces, such as
    ``FullyShardedDataParallel.summon_full_params``.
    """
    return is_sharded(model) or original(model)


@seam(
    "composer.models.huggingface",
    "HuggingFaceModel.generate",
    why="FSDP1 needed the root's full parameters for it; here the forward gathers them",
)
def generate(original: Callable[..., Any], self: Any, input_ids: Any, **kwargs: Any) -> Any:
    """Replaces ``HuggingFaceModel.generate``: omits ``summon_full_params`` of the root module, which only FSDP1 needed.

    ``fully_shard`` all-gathers these parameters in the forward.
    """
    if not is_sharded(self.model):
        return original(self, input_ids, **kwargs)
    if "pad_token_id" not in kwargs:
        kwargs["pad_token_id"] = None if self.tokenizer is None else self.tokenizer.pad_token_id
    return self.model.generate(input_ids=input_ids, **kwargs)


@seam(
    "torch.distributed.fsdp.fully_sharded_data_parallel",
    "FullyShardedDataParallel.summon_full_params",
    why="scripts and Hugging Face's trainers call it on any model; where FSDP1 wraps nothing, it does nothing",
)
def summon_full_params_of_fsdp1(
    original: Callable[..., Any], module: nn.Module, *args: Any, **kwargs: Any
) -> AbstractContextManager[None]:
    """Replaces FSDP1's ``summon_full_params``: calls the original for FSDP1 modules, else
    ``composer_fsdp2.summon_full_params``.

    The latter does nothing for an unsharded model. Called on all ranks.
    """
    if any(isinstance(each, FSDP1Wrapper) for each in module.modules()):
        under_fsdp1: AbstractContextManager[None] = original(module, *args, **kwargs)
        return under_fsdp1
    if is_sharded(module):
        log_replacement(
            "FullyShardedDataParallel.summon_full_params",
            "write `with composer_fsdp2.summon_full_params(module):`",
        )
    return summon_full_params(module, *args, **kwargs)
