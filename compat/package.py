"""``composer.utils.is_model_fsdp``, ``composer.checkpoint`` and who else asks whether a model is sharded."""

import contextlib
import functools
import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from composer.checkpoint import save
from torch import nn

from composer_fsdp2.agreement import gather
from composer_fsdp2.sharded import is_sharded, reshard

__all__ = [
    "replacement_for_generate",
    "replacement_for_is_model_fsdp",
    "replacement_for_model_context",
    "replacement_for_package_state",
    "replacement_for_sharded_write",
]


def replacement_for_is_model_fsdp(original: Callable[[nn.Module], bool]) -> Callable[[nn.Module], bool]:
    """``composer.utils.is_model_fsdp``, and the like of it in ``composer.checkpoint``: also True for a model of ours.

    What a script does then is written for FSDP1, and works: ``FullyShardedDataParallel.summon_full_params``, state
    dicts of shards.
    """

    @functools.wraps(original)
    def is_model_fsdp(model: nn.Module) -> bool:
        return is_sharded(model) or original(model)

    return is_model_fsdp


def replacement_for_package_state(original: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    """``get_model_state_dict`` and ``get_optim_state_dict`` of ``composer.checkpoint``, which saves and loads by them.

    Called on all ranks, as torch's functions of the same names, which they call.
    """

    @functools.wraps(original)
    def state_dict(model: nn.Module, *args: Any, **kwargs: Any) -> dict[str, Any]:
        reshard(model)
        return original(model, *args, **kwargs)

    return state_dict


def replacement_for_sharded_write(original: Callable[..., str | None]) -> Callable[..., str | None]:
    """``_save_sharded_state_dict_to_disk`` of ``composer.checkpoint``: whether the folder is there, asked in time.

    Composer 0.32.1 has rank 0 ask while the other ranks go on to torch, which makes the folder: of a fresh one a save
    says now and then that it exists, on rank 0 alone, and the others wait for ever.

    Called on all ranks; gathers rank 0's answer.
    """

    @functools.wraps(original)
    def write(
        state_dict: dict[str, Any], destination_file_path: str, overwrite: bool = False, save_format: str = "pt"
    ) -> str | None:
        if not overwrite and gather(os.path.exists(save._strip_suffixes(destination_file_path)))[0]:
            raise ValueError(f"Directory {destination_file_path} already exists. Set overwrite=True to overwrite it.")
        return original(state_dict, destination_file_path, True, save_format)

    return write


def replacement_for_generate(original: Callable[..., Any]) -> Callable[..., Any]:
    """``HuggingFaceModel.generate`` without FSDP1's way to gather a language model's head, which costs a block."""

    @functools.wraps(original)
    def generate(self: Any, input_ids: Any, **kwargs: Any) -> Any:
        if not is_sharded(self.model):
            return original(self, input_ids, **kwargs)
        if "pad_token_id" not in kwargs:
            kwargs["pad_token_id"] = None if self.tokenizer is None else self.tokenizer.pad_token_id
        return self.model.generate(input_ids=input_ids, **kwargs)

    return generate


def replacement_for_model_context(original: Callable[..., Any]) -> Callable[..., Any]:
    """``get_model_context_manager`` of EMA, which averages shards here (``ema.py``)."""

    @functools.wraps(original)
    def get_model_context_manager(model: nn.Module) -> AbstractContextManager[Any]:
        context: AbstractContextManager[Any] = contextlib.nullcontext() if is_sharded(model) else original(model)
        return context

    return get_model_context_manager
