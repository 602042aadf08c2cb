"""Rebind an optimizer that was created before sharding to the sharded parameters: same object, same groups."""

from collections.abc import Callable, Collection, Sequence
from typing import Any, TypeAlias, cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from composer_fsdp2._torch.local_tensors import with_local_tensor
from composer_fsdp2._torch.private_names import own_parameters
from composer_fsdp2.config.text import and_more
from composer_fsdp2.errors import PlanError, UnsupportedError
from composer_fsdp2.sharding.placements import sharded_dim

Optimizers: TypeAlias = torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None


def the_optimizer(optimizers: Optimizers) -> torch.optim.Optimizer | None:
    """The only optimizer, or None.

    Raises:
        UnsupportedError: several optimizers.
    """
    if optimizers is None or isinstance(optimizers, torch.optim.Optimizer):
        return optimizers
    found = list(optimizers)
    if len(found) > 1:
        raise UnsupportedError(
            f"Only one optimizer is supported; found {len(found)} optimizers. Put their parameters into groups of one "
            "optimizer, or build them after sharding"
        )
    if found and not isinstance(found[0], torch.optim.Optimizer):
        raise PlanError(f"optimizers holds a {type(found[0]).__name__}; pass a torch.optim.Optimizer or None")
    return found[0] if found else None


def check_optimizers(model: nn.Module, optimizers: Optimizers) -> None:
    """Raise unless every parameter of the optimizer belongs to the model.

    Raises:
        PlanError: a parameter does not belong to the model. FSDP1's message, with the number of such parameters.
        UnsupportedError: more than one optimizer.
    """
    optimizer = the_optimizer(optimizers)
    if optimizer is None:
        return
    own = set(model.parameters())
    foreign = [
        (number, tuple(parameter.shape))
        for number, group in enumerate(optimizer.param_groups)
        for parameter in group["params"]
        if parameter not in own
    ]
    if foreign:
        number, shape = foreign[0]
        raise PlanError(
            "The same model must be passed to the optimizer and trainer: "
            f"{len(foreign)} of the optimizer's parameters are not the model's (the first has shape {shape}, in group "
            f"{number}). Build the optimizer from this model's parameters(), after any change to its modules"
        )


def refuse_frozen(model: nn.Module, optimizers: Optimizers, frozen: Collection[str]) -> None:
    """Raise if freezing leaves the optimizer without trainable parameters.

    Args:
        frozen: The names of the parameters to freeze.
    Raises:
        PlanError: names the frozen parameters of the optimizer.
    """
    optimizer = the_optimizer(optimizers)
    if optimizer is None or not frozen:
        return
    names = {parameter: name for name, parameter in model.named_parameters()}
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    stays = [names[parameter] for parameter in held if names[parameter] in set(frozen)]
    if stays and not any(parameter.requires_grad and names[parameter] not in set(frozen) for parameter in held):
        raise PlanError(
            f"freeze leaves the optimizer nothing to train: it holds {and_more(stays, 3)}, which are frozen, and no "
            "parameter that is trained; build it from the others too, or give freeze other prefixes"
        )


def rebinding(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    """Record the optimizer's parameters. Return a function that rebinds it to the sharded parameters after sharding.

    Parameters of other models are unchanged. Group objects, their order and their options are preserved, because
    schedulers reference them. Existing optimizer state is sharded (FSDP1 cleared it without a warning). Call the
    returned function on all ranks; it does not communicate.
    """
    places: dict[nn.Parameter, tuple[nn.Module, str]] = {}
    for module in model.modules():
        for attribute, parameter in own_parameters(module):
            places.setdefault(parameter, (module, attribute))

    def follow() -> None:
        new = {old: getattr(module, attribute) for old, (module, attribute) in places.items()}
        for group in optimizer.param_groups:
            group["params"][:] = [new.get(old, old) for old in group["params"]]
        state = cast(dict[nn.Parameter, dict[str, Any]], optimizer.state)
        for old in [parameter for parameter in state if parameter in places]:
            if new[old] is not old:
                state[new[old]] = {key: _shard_like(value, old, new[old]) for key, value in state.pop(old).items()}

    return follow


def _shard_like(value: Any, old: nn.Parameter, new: nn.Parameter) -> Any:
    """Shard a state tensor that has the parameter's shape. Other values, such as counters, are returned unchanged."""
    if not (isinstance(value, torch.Tensor) and isinstance(new, DTensor) and value.shape == old.shape and value.dim()):
        return value
    mesh, local = new.device_mesh, new.to_local()
    # Every rank has the full state (for a TP-sharded parameter: the state of its TP shard), so each takes its shard
    # without communication.
    shard, num_axes = value, mesh.ndim
    if isinstance(value, DTensor):
        shard, num_axes = value.to_local(), mesh.ndim - value.device_mesh.ndim
    # Innermost axis first: the parameter was TP-sharded before it was sharded.
    for axis in reversed(range(num_axes)):
        dimension = sharded_dim(new.placements[axis])
        if dimension is not None:
            parts = shard.chunk(mesh.size(axis), dimension)
            place = mesh.get_local_rank(axis)
            # As in torch, the last ranks get empty shards of a tensor with few rows.
            shard = parts[place] if place < len(parts) else shard.narrow(dimension, 0, 0)
    return with_local_tensor(new, shard.to(local.device, copy=True).contiguous())
