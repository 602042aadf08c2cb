"""Ways to clip gradients, compared with torch's on the unsharded model, and comparisons after them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from support.comparing import full_parameters
from torch import nn
from torch.distributed.tensor import DTensor

from composer_fsdp2 import clip_grad_adaptive_, clip_grad_norm_, summon_full_params

Clip = Callable[[nn.Module], object]


def adaptive(model: nn.Module) -> None:
    """Brock et al. (2021), on an unsharded model: each row by its own norm, a vector by its whole norm."""
    for parameter in model.parameters():
        weights, grad = (
            each.norm() if each.dim() <= 1 else each.norm(dim=tuple(range(1, each.dim())), keepdim=True)
            for each in (parameter.detach(), parameter.grad)
        )
        parameter.grad.mul_((weights * 0.01 / grad).nan_to_num(nan=1.0).clamp(max=1.0))


CLIPS: dict[str, tuple[Clip, Clip]] = {
    "not at all": (lambda model: None, lambda model: None),
    "by the largest": (
        lambda model: clip_grad_norm_(model, 0.01, norm_type=torch.inf),
        lambda model: nn.utils.clip_grad_norm_(model.parameters(), 0.01, norm_type=torch.inf),
    ),
    "by another order": (
        lambda model: clip_grad_norm_(model, 0.1, norm_type=3),
        lambda model: nn.utils.clip_grad_norm_(model.parameters(), 0.1, norm_type=3),
    ),
    "by value": (
        lambda model: nn.utils.clip_grad_value_(model.parameters(), 0.01),
        lambda model: nn.utils.clip_grad_value_(model.parameters(), 0.01),
    ),
    "adaptive": (lambda model: clip_grad_adaptive_(model, 0.01), adaptive),
}


def assert_same_gradients(model: nn.Module, reference: nn.Module, *, atol: float) -> None:
    """Called on all ranks."""
    expected = {name: parameter.grad for name, parameter in reference.named_parameters()}
    for name, parameter in model.named_parameters():
        assert isinstance(parameter.grad, DTensor)
        torch.testing.assert_close(parameter.grad.full_tensor(), expected[name], rtol=0, atol=atol)


def check_summoned(model: nn.Module, reference: nn.Module) -> None:
    """Within ``summon_full_params`` a sharded model has the reference's values, and writes are written back. Called on
    all ranks."""
    expected = {name: parameter.detach() for name, parameter in reference.named_parameters()}
    with summon_full_params(model):
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(parameter.detach(), expected[name], rtol=0, atol=0)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(2)
    for name, value in full_parameters(model).items():
        torch.testing.assert_close(value, 2 * expected[name], rtol=0, atol=0)
