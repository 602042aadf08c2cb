"""Make optimizers of Composer and LLM Foundry update local tensors instead of DTensors.

Their updates are elementwise, so results on local tensors are bitwise equal. With DTensors, each operation is
dispatched in Python: the CPU time of a step of an 80-layer model was 6.6 times as long with AdamW, and 9.3 times with
Lion (benchmarks/dispatch.py). In addition, each step count on a GPU would synchronise once per parameter.

After ``install()``, this applies to all optimizers of known classes from their next step on: with or without a Trainer,
created before or after sharding, loaded, or nested in another optimizer.
"""

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from composer_fsdp2._torch.local_tensors import lion_, local_tensor, local_tensors, with_local_tensor

_Update = Callable[..., None]


def update_local_shards_of_all() -> RemovableHandle:
    """Apply ``update_local_shards`` to every optimizer before its next step. Removing the returned handle stops this.

    Optimizers that have already stepped are not reverted. Called on all ranks; does not communicate.
    """
    return register_optimizer_step_pre_hook(lambda optimizer, *unused: update_local_shards(optimizer))


def update_local_shards(optimizer: torch.optim.Optimizer) -> None:
    """Make ``optimizer`` update local tensors instead of DTensors, if its class is known.

    Optimizers of other classes are not modified, nor are those of subclasses that override the update or the step.
    Called on all ranks; further calls have no effect. Does not communicate.
    """
    known: Any = _known_class(optimizer)
    # torch wraps a class's step when its first instance is created, possibly a subclass's before the base class's.
    if known is None or inspect.unwrap(type(optimizer).step) is not inspect.unwrap(known.step):
        return
    name, on_local_shards = _UPDATES[full_name(known)]
    if name not in vars(optimizer) and getattr(type(optimizer), name) is getattr(known, name):
        setattr(optimizer, name, on_local_shards(getattr(known, name), optimizer))
        optimizer.register_step_pre_hook(_move_step_counts_to_host)


def _known_class(optimizer: torch.optim.Optimizer) -> type | None:
    return next((kind for kind in type(optimizer).__mro__ if full_name(kind) in _UPDATES), None)


def reports_norms(optimizer: torch.optim.Optimizer) -> bool:
    """Whether ``report_per_parameter_metrics`` returns only L2 norms of tensors that are sharded like the parameter."""
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
    """Wrap ``DecoupledAdamW.adamw``, which gets lists of parameters, gradients, state and step counts."""

    @functools.wraps(update)
    def adamw(parameters: list[Any], *lists: list[Any], **settings: Any) -> None:
        *tensors, steps = lists
        present = [each for each in tensors if each]  # empty without amsgrad: max_exp_avg_sqs
        if all(local_tensors(*alike) is not None for alike in zip(parameters, *present, strict=True)):
            parameters, *tensors = ([local_tensor(tensor) for tensor in each] for each in (parameters, *tensors))
        update(parameters, *tensors, steps, **settings)

    return adamw


def _sgdw(update: _Update, optimizer: torch.optim.Optimizer) -> _Update:
    """Wrap ``DecoupledSGDW.sgdw``, which gets lists of parameters, gradients and momenta, and sets missing momenta."""

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
    """Wrap ``DecoupledLionW.lionw``, which gets one parameter, its gradient and its average.

    The updates are collected and run by ``foreach`` operations at the end of the step, if their results are bitwise
    equal.
    """
    pending = _PendingUpdates() if _is_lion(update) else None
    if pending is not None:
        optimizer.register_step_pre_hook(lambda *unused: pending.clear())  # left from a step that raised
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


# Full class name (LLM Foundry is slow to import, and optional) -> static method of the update, and its wrapper for
# local shards.
_UPDATES: dict[str, tuple[str, Callable[[_Update, torch.optim.Optimizer], _Update]]] = {
    "composer.optim.decoupled_weight_decay.DecoupledAdamW": ("adamw", _adamw),
    "composer.optim.decoupled_weight_decay.DecoupledSGDW": ("sgdw", _sgdw),
    "llmfoundry.optim.lion.DecoupledLionW": ("lionw", _lionw),
}


class _PendingUpdates:
    """The parameters, gradients and averages of one step, collected for a ``foreach`` Lion update."""

    # Approximate temporary memory of a batched update.
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
        """Update all pending parameters."""
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
    # The decay is independent of the base learning rate, but follows its schedule.
    decay = weight_decay * (lr / initial_lr if initial_lr else 1.0)
    lion_(parameters, gradients, averages, lr=lr, keep=1 - decay, betas=betas)


@functools.cache
def _is_lion(update: _Update) -> bool:
    """Whether LLM Foundry's update of one parameter is bitwise equal to the ``foreach`` update, with and without
    weight decay."""
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
    """Move step counts to the host, as in torch's AdamW. Reading one on a GPU would synchronise."""
    by_device: dict[torch.device, list[dict[str, Any]]] = {}
    for state in optimizer.state.values():
        step = state.get("step") if isinstance(state, dict) else None  # a subclass may store plain numbers
        if isinstance(step, torch.Tensor) and not isinstance(step, DTensor) and step.device.type != "cpu":
            by_device.setdefault(step.device, []).append(state)
    for states in by_device.values():
        counts = torch.stack([state["step"] for state in states]).cpu()
        for state, count in zip(states, counts, strict=True):
            state["step"] = count.clone()  # separate tensors, as before
