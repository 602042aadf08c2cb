"""Read a training YAML as LLM Foundry does, and build its model without weights, GPU, process group or network."""

import contextlib
import importlib
import logging
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from composer.utils import dist as composer_dist
from composer.utils import reproducibility
from omegaconf import OmegaConf
from omegaconf.resolvers import oc
from torch import nn

from composer_fsdp2._torch.replaced import replaced
from composer_fsdp2.fsdp1.tensor_parallel import TensorParallel

from .configuration import EveryKeyFSDP2Config
from .tensor_parallel import layer_plan_of, resolve_ffn_plan


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundryRun:
    """A training YAML as LLM Foundry's ``train()`` parses, validates and modifies it before it builds anything.

    Args:
        model, fsdp, tensor: Sections of the file as modified by LLM Foundry.
        config: The fields of LLM Foundry's TrainConfig, in which these sections are not modified.
        init_context: The context in which LLM Foundry builds the model.
    """

    model: dict[str, Any]
    fsdp: dict[str, Any] | None
    tensor: dict[str, Any] | None
    config: Any
    init_context: contextlib.AbstractContextManager[Any]


class _ConfigIsRead(BaseException):
    """Ends Foundry's ``train()``. Not an Exception, which Foundry might catch."""


def read_foundry(path: str, overrides: Sequence[str] = (), *, world_size: int) -> FoundryRun:
    """Parse a YAML as ``train_from_yaml`` on ``world_size`` ranks, without building or starting anything.

    Raises LLM Foundry's errors for an invalid file.
    """
    with _quiet_foundry():
        training = importlib.import_module("llmfoundry.command_utils.train")
    prepare, validate = training.process_init_device, training.validate_config
    read: dict[str, Any] = {}

    def process_init_device(model: Any, fsdp: Any, tensor: Any) -> None:
        context = prepare(model, fsdp, tensor)
        read.update(model=model, fsdp=fsdp, tensor=tensor, init_context=context)
        raise _ConfigIsRead

    def validate_config(config: Any) -> None:
        read.update(config=config)
        validate(config)

    with contextlib.ExitStack() as undone:
        undone.enter_context(_quiet_foundry())
        for module, name, value in (
            (training, "process_init_device", process_init_device),
            (training, "validate_config", validate_config),
            (training, "_initialize_dist_with_barrier", lambda dist_timeout: None),
            (composer_dist, "get_world_size", lambda: world_size),
            (reproducibility, "seed_all", lambda seed: None),
        ):
            undone.enter_context(replaced(module, name, value))
        with contextlib.suppress(_ConfigIsRead):
            training.train_from_yaml(path, ["python_log_level=null", *overrides])
    return FoundryRun(**read)


def build_foundry(run: FoundryRun, model: Mapping[str, Any]) -> nn.Module:
    """Build a ComposerModel on the meta device.

    ``model`` is the run's ``model`` section, with substitutes for parts that are unavailable here. Raises any error of
    the model's class.
    """
    builders = importlib.import_module("llmfoundry.utils.builders")
    given = dict(model)
    name, dtype = given.pop("name"), given.pop("master_weights_dtype", None)
    # Foundry's context creates meta parameters and leaves other tensors on the CPU. (That of empty weights would untie
    # T5's.)
    context = run.init_context if run.model.get("init_device") == "meta" else torch.device("meta")
    with _quiet_foundry(), replaced(composer_dist, "get_world_size", lambda: 1):
        built: nn.Module = builders.build_composer_model(name, given, None, context, dtype)
    _replace_closed_configs(built)
    return built


def _replace_closed_configs(model: nn.Module) -> None:
    """Replace MPT's configuration of rotary embeddings by an ordinary one, because it cannot be copied."""
    from llmfoundry.models.mpt.modeling_mpt import PartialLlamaConfig
    from transformers import LlamaConfig

    for module in model.modules():
        closed = module.__dict__.get("config")
        if isinstance(closed, PartialLlamaConfig):
            module.config = LlamaConfig()
            vars(module.config).update(object.__getattribute__(closed, "__dict__"))


@contextlib.contextmanager
def _quiet_foundry() -> Iterator[None]:
    """Suppress LLM Foundry's warnings in the block, and then restore the environment variables and resolvers that it
    changes."""
    environment, has_resolver, disabled = (
        dict(os.environ),
        OmegaConf.has_resolver("oc.env"),
        logging.root.manager.disable,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging.disable(logging.ERROR)
        try:
            yield
        finally:
            logging.disable(disabled)
            os.environ.clear()
            os.environ.update(environment)
            if has_resolver and not OmegaConf.has_resolver("oc.env"):
                OmegaConf.register_new_resolver("oc.env", oc.env)


def fsdp_config_of(run: FoundryRun) -> Any:
    """Return the ``fsdp_config`` as Composer's Trainer parses it: FSDP2Config if the variable ``FSDP_VERSION`` is 2."""
    return EveryKeyFSDP2Config(**(run.fsdp or {})) if os.environ.get("FSDP_VERSION", "1") == "2" else run.fsdp


def tensor_parallel_of(run: FoundryRun, model: nn.Module) -> TensorParallel | None:
    """Foundry's plan for TP-sharding the model's layers."""
    if not run.tensor:
        return None
    builders = importlib.import_module("llmfoundry.utils.builders")
    given = dict(run.tensor)
    strategy = given.pop("strategy")
    with _quiet_foundry():
        plan = layer_plan_of(builders.build_tp_strategies, strategy, model)
    return resolve_ffn_plan(model, TensorParallel.read({**given, "layer_plan": plan}))
