"""Canonical names of parameters, without the prefixes of the wrappers under which they were saved."""

import re

# FSDP1's name of a flat parameter, after the wrapped module's path.
FLAT_PARAMETER = "_flat_param"

# The names that FSDP1, activation checkpointing and torch.compile insert into a module's path.
_WRAPPERS = re.compile(r"(?:^|(?<=\.))(?:_fsdp_wrapped_module|_checkpoint_wrapped_module|_fpw_module|_orig_mod)\.")

# The prefixes of models: none, of Composer's HuggingFaceModel, of DDP, and of DDP around HuggingFaceModel.
MODEL_PREFIX = "model."
PREFIXES = ("", MODEL_PREFIX, "module.", f"module.{MODEL_PREFIX}")


def canonical(name: str) -> str:
    """``model._fsdp_wrapped_module.block._checkpoint_wrapped_module.weight`` as ``model.block.weight``."""
    return _WRAPPERS.sub("", name)


def is_flat_parameter(name: object) -> bool:
    """Whether a key is the name of an FSDP1 flat parameter: ``block._flat_param``."""
    return isinstance(name, str) and name.rpartition(".")[2] == FLAT_PARAMETER
