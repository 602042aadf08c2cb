"""Composer's and LLM Foundry's optimizers on each rank's own parts of the parameters.

Their updates are elementwise, so a rank can make them on its plain local tensors, with the same bits. On DTensors each
of an update's operations is dispatched in Python: before anything was launched, the step of a model of 80 layers took
AdamW 6.6 times as long, and Lion 9.3 times (benchmarks/dispatch.py). And a step count that lies on a GPU is read once
for each parameter.

Under ``install()`` that is so for every optimizer of a known class, from its next step on: with a Trainer or without,
built before its parameters were sharded or after, loaded, or inside of another one.
"""

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from composer_fsdp2._torch.parts import lion_, local_tensor, local_tensors, with_local_tensor

_Update = Callable[..., None]


def update_local_shards_of_all() -> RemovableHandle:
    """Have all optimizers ``update_local_shards``, each where its next step begins; what is returned ends it.

    Those that have made a step by then stay as they are. Call it on each rank; it communicates nothing.
    """
    return register_optimizer_step_pre_hook(lambda optimizer, *unused: update_local_shards(optimizer))


def update_local_shards(optimizer: torch.optim.Optimizer) -> None:
    """Have ``optimizer`` update this rank's parts of its parameters, if it is one whose updates we know.

    An optimizer of another class stays as it is, and so does one that inherits from a known one and overrides the
    update or the step. Call it on each rank, as often as you like; it communicates nothing.
    """
    known: Any = _known_class(optimizer)
    # torch wraps a class's step when the first optimizer is made of it, a subclass's maybe before that of its base.
    if known is None or inspect.unwrap(type(optimizer).step) is not inspect.unwrap(known.step):
        return
    name, on_local_shards = _UPDATES[full_name(known)]
    if name not in vars(optimizer) and getattr(type(optimizer), name) is getattr(known, name):
        setattr(optimizer, name, on_local_shards(getattr(known, name), optimizer))
        optimizer.register_step_pre_hook(_move_step_counts_to_host)


def _known_class(optimizer: torch.optim.Optimizer) -> type | None:
    return next((kind for kind in type(optimizer).__mro__ if full_name(kind) in _UPDATES), None)


def reports_norms(optimizer: torch.optim.Optimizer) -> bool:
    """Whether ``report_per_parameter_metrics`` gives L2 norms alone, of tensors that lie as the parameter does."""
    known: Any = _known_class(optimizer)
    name = "report_per_parameter_metrics"
    if known is None or name in vars(optimizer) or not hasattr(known, name):
        return False
    functions: dict[str, Any] = getattr(optimizer, "metric_functions", {})
    kind: Any = type(optimizer)
    return kind.report_per_parameter_metrics is known.report_per_parameter_metrics and all(
        name.startswith("l2_norm/") and function.__module__ == known.__module__ for name, function in functions.items()
    )


def full_name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _adamw(update: _Update, optimizer: torch.optim.Optimizer) -> _Update:
    """``DecoupledAdamW.adamw``: of lists of parameters, gradients and state, and of step counts."""

    @functools.wraps(update)
    def adamw(parameters: list[Any], *lists: list[Any], **settings: Any) -> None:
        *tensors, steps = lists
        present = [each for each in tensors if each]  # without amsgrad there are no largest averages
        if all(local_tensors(*alike) is not None for alike in zip(parameters, *present, strict=True)):
            parameters, *tensors = ([local_tensor(tensor) for tensor in each] for each in (parameters, *tensors))
        update(parameters, *tensors, steps, **settings)

    return adamw


def _sgdw(update: _Update, optimizer: torch.optim.Optimizer) -> _Update:
    """``DecoupledSGDW.sgdw``: of lists of parameters, gradients and momenta, among which it puts missing ones."""

    @functools.wraps(update)
    def sgdw(parameters: list[Any], gradients: list[Any], momenta: list[Any], **settings: Any) -> None:
        present = [
            [each for each in alike if each is not None] for alike in zip(parameters, gradients, momenta, strict=True)
        ]
        if any(local_tensors(*each) is None for each in present):
            update(parameters, gradients, momenta, **settings)
            return
        own = [momentum if momentum is None else local_tensor(momentum) for momentum in momenta]
        update([*map(local_tensor, parameters)], [*map(local_tensor, gradients)], own, **settings)
        for number, (parameter, momentum) in enumerate(zip(parameters, own, strict=True)):
            if momenta[number] is None and momentum is not None:
                momenta[number] = with_local_tensor(parameter, momentum)

    return sgdw


def _lionw(update: _Update, optimizer: torch.optim.Optimizer) -> _Update:
    """``DecoupledLionW.lionw``: of one parameter, its gradient and its average; many at once, where the step ends.

    At once only if it gives the bits of the fused operations.
    """
    pending = _PendingUpdates() if _is_lion(update) else None
    if pending is not None:
        optimizer.register_step_pre_hook(lambda *unused: pending.clear())  # of a step that an error ended
        optimizer.register_step_post_hook(lambda *unused: pending.update())

    @functools.wraps(update)
    def lionw(parameter: Any, gradient: Any, average: Any, *settings: float) -> None:
        own = local_tensors(parameter, gradient, average)
        if own is None:
            update(parameter, gradient, average, *settings)
        elif pending is None:
            update(*own, *settings)
        else:
            pending.add(own, settings)

    return lionw


# By the full names of their classes (importing LLM Foundry takes long, and not everybody has it): the static method
# that makes an update, and what makes it on this rank's parts, of one optimizer.
_UPDATES: dict[str, tuple[str, Callable[[_Update, torch.optim.Optimizer], _Update]]] = {
    "composer.optim.decoupled_weight_decay.DecoupledAdamW": ("adamw", _adamw),
    "composer.optim.decoupled_weight_decay.DecoupledSGDW": ("sgdw", _sgdw),
    "llmfoundry.optim.lion.DecoupledLionW": ("lionw", _lionw),
}


class _PendingUpdates:
    """Parameters of one step that Lion is to update, with their gradients and averages."""

    # What fused updates take of memory, about; for a moment, as an update of one parameter does.
    MAX_BYTES = 64 << 20

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self._parts: list[Sequence[torch.Tensor]] = []
        self._settings: tuple[float, ...] = ()
        self._num_bytes = 0

    def add(self, parts: Sequence[torch.Tensor], settings: tuple[float, ...]) -> None:
        if self._num_bytes >= self.MAX_BYTES or settings != self._settings:
            self.update()
            self._settings = settings
        self._parts.append(parts)
        self._num_bytes += parts[0].nbytes

    @torch.no_grad()
    def update(self) -> None:
        """All that wait."""
        if self._parts:
            parameters, gradients, averages = (list(each) for each in zip(*self._parts, strict=True))
            _foreach_lion(parameters, gradients, averages, *self._settings)
        self.clear()


def _foreach_lion(
    parameters: list[torch.Tensor],
    gradients: list[torch.Tensor],
    averages: list[torch.Tensor],
    lr: float,
    initial_lr: float,
    weight_decay: float,
    *betas: float,
) -> None:
    # Decoupled from the learning rate, not from its schedule.
    decay = weight_decay * (lr / initial_lr if initial_lr else 1.0)
    lion_(parameters, gradients, averages, lr=lr, keep=1 - decay, betas=betas)


@functools.cache
def _is_lion(update: _Update) -> bool:
    """Whether Foundry's update of one parameter gives the bits of the fused one, with weight decay and without."""
    generator = torch.Generator().manual_seed(0)
    for weight_decay in (0.0, 1e-4):
        settings = (0.1, 0.3, weight_decay, 0.9, 0.99)
        random = [torch.randn(1000, generator=generator, device="cpu") for _ in range(3)]
        one, all_ = ([tensor.clone() for tensor in random] for _ in range(2))
        update(*one, *settings)
        parameters, gradients, averages = ([tensor] for tensor in all_)
        _foreach_lion(parameters, gradients, averages, *settings)
        if not all(map(torch.equal, one, all_)):
            return False
    return True


def _move_step_counts_to_host(optimizer: torch.optim.Optimizer, *unused: Any) -> None:
    """Move step counts to the host, where torch's AdamW keeps them: the update reads each, and would wait for a GPU."""
    by_device: dict[torch.device, list[dict[str, Any]]] = {}
    for state in optimizer.state.values():
        step = state.get("step") if isinstance(state, dict) else None  # a subclass may keep numbers of its own there
        if isinstance(step, torch.Tensor) and not isinstance(step, DTensor) and step.device.type != "cpu":
            by_device.setdefault(step.device, []).append(state)
    for states in by_device.values():
        counts = torch.stack([state["step"] for state in states]).cpu()
        for state, count in zip(states, counts, strict=True):
            state["step"] = count.clone()  # apart from each other, as they were
