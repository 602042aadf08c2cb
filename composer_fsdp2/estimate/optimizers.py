"""Memory of optimizers, by their names in torch, Composer, LLM Foundry and Hugging Face."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from composer_fsdp2.config.text import did_you_mean
from composer_fsdp2.config.value import Value
from composer_fsdp2.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerState(Value):
    """The state of an optimizer per trained parameter, and the temporaries of its step.

    Args:
        tensors: The number of state tensors with the size and dtype of the local shard.
        numbers: The number of scalar fp32 state tensors, such as torch's ``step``.
        step_tensors: The number of temporaries of a for-loop ``step()`` for one parameter, each as large as its local
            shard.
        kept_tensors: How many of ``step_tensors`` are freed only after those of the next parameter are allocated.
        foreach_tensors: The number of temporaries of a ``foreach`` step, each as large as all local shards together.
            ``foreach`` is torch's default if all parameters are on a GPU. None: not implemented or disabled.

    Example:
        >>> OptimizerState(name="mine", tensors=2).state_bytes(elements=1000, element_bytes=4)
        8000
    """

    name: str
    tensors: int
    numbers: int = 0
    step_tensors: int = 0
    kept_tensors: int = 0
    foreach_tensors: int | None = None

    def state_bytes(self, elements: int, element_bytes: int) -> int:
        """Return the state bytes of one parameter with ``elements`` local elements.

        An empty shard still has the scalars.
        """
        return self.tensors * elements * element_bytes + self.numbers * 4

    def step_bytes(self, parameter_bytes: Sequence[int], device_type: str) -> int:
        """Return the peak bytes of temporaries in ``step()``.

        Args:
            parameter_bytes: Bytes of the local shard of each trained parameter, in the order of the optimizer.
        """
        if self.foreach_tensors is not None and device_type != "cpu":
            return self.foreach_tensors * sum(parameter_bytes)
        pairs = zip(parameter_bytes, (0, *parameter_bytes), strict=False)  # with the previous parameter
        return max((self.step_tensors * own + self.kept_tensors * before for own, before in pairs), default=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    """An optimizer in the table: its names, and its memory by options.

    Args:
        adds: Options that add a state tensor.
        needs: An option without which the optimizer has no state, such as ``momentum``.
        allocates: Options that add a tensor to ``step_tensors``.
        allocates_foreach: Options that add a tensor to ``foreach_tensors``.
    """

    names: tuple[str, ...]
    state: OptimizerState
    adds: tuple[str, ...] = ()
    needs: str | None = None
    allocates: tuple[str, ...] = ()
    allocates_foreach: tuple[str, ...] = ()


# Temporaries are the square roots of second moments; a for-loop step keeps the previous denominator alive.
_ADAM = OptimizerState(name="Adam", tensors=2, numbers=1, step_tensors=2, kept_tensors=1, foreach_tensors=1)
_ADAMW = replace(_ADAM, name="AdamW")


def _without_allocations(state: OptimizerState) -> OptimizerState:
    """Return the state for a fused step, in which one kernel updates parameters and state in place."""
    return replace(state, step_tensors=0, kept_tensors=0, foreach_tensors=None)


_SGD = OptimizerState(name="SGD", tensors=1, foreach_tensors=0)
# From torch/optim and composer/optim/decoupled_weight_decay.py.
_ROWS = (
    _Row(names=("adam",), state=_ADAM, adds=("amsgrad",), allocates=("weight_decay",)),
    _Row(names=("adamw", "adamw_torch", "adamw_hf"), state=_ADAMW, adds=("amsgrad",)),
    _Row(names=("adamw_torch_fused",), state=_without_allocations(_ADAMW), adds=("amsgrad",)),
    _Row(
        names=("decoupled_adamw", "decoupledadamw"),
        state=replace(_ADAMW, name="DecoupledAdamW", foreach_tensors=None),
        adds=("amsgrad",),
    ),
    _Row(
        names=("decoupled_lionw", "decoupledlionw", "lion", "lion_32bit"),
        state=OptimizerState(name="DecoupledLionW", tensors=1, step_tensors=1),
    ),
    _Row(
        names=("sgd",),
        state=_SGD,
        needs="momentum",
        allocates=("weight_decay", "nesterov"),
        allocates_foreach=("weight_decay",),
    ),
    _Row(
        names=("decoupled_sgdw", "decoupledsgdw"),
        state=replace(_SGD, name="DecoupledSGDW", foreach_tensors=None),
        needs="momentum",
        allocates=("nesterov",),
    ),
)


def optimizer_state(name: str, options: Mapping[str, Any] | None = None) -> OptimizerState:
    """Return the memory of an optimizer, by its name (in any letter case) and options.

    Raises:
        ConfigError: the optimizer is unknown; the message lists the known ones.

    Example:
        >>> optimizer_state("SGD", {"momentum": 0.9}).tensors
        1
    """
    options = options or {}
    row = next((row for row in _ROWS if name.lower() in row.names), None)
    if row is None:
        known = [name for row in _ROWS for name in row.names]
        raise ConfigError(
            f"optimizer {name} is not known{did_you_mean(name.lower(), known)}; known are {', '.join(known)}"
        )
    has_state = row.needs is None or bool(options.get(row.needs))
    state = replace(
        row.state,
        tensors=row.state.tensors + _given(options, row.adds) if has_state else 0,
        step_tensors=row.state.step_tensors + _given(options, row.allocates),
    )
    implementation = options.get("implementation")
    if options.get("fused", implementation == "fused"):
        return _without_allocations(state)
    if state.foreach_tensors is None or options.get("foreach", implementation != "for-loop") is False:
        return replace(state, foreach_tensors=None)
    return replace(state, foreach_tensors=state.foreach_tensors + _given(options, row.allocates_foreach))


def _given(options: Mapping[str, Any], names: Sequence[str]) -> int:
    return sum(bool(options.get(name)) for name in names)
