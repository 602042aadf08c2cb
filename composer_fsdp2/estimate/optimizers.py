"""How much state an optimizer keeps, by its name in torch, Composer, LLM Foundry and Hugging Face."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from composer_fsdp2.config.text import did_you_mean
from composer_fsdp2.config.value import Value
from composer_fsdp2.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerState(Value):
    """What an optimizer keeps of each parameter that it trains, and what its step allocates.

    Args:
        tensors: How many as large as the rank's part of it, in its dtype.
        numbers: How many of one element in fp32, such as torch's count of steps.
        step_tensors: How many as large as the rank's part of a parameter ``step()`` allocates for it, where it goes
            from one parameter to the next.
        kept_tensors: How many of these it frees only once it has allocated those of the next parameter.
        foreach_tensors: How many as large as all parts together a ``foreach`` step allocates, which torch takes by
            default where all parameters are on a GPU; None: the optimizer has no such step, or is told not to take it.
    """

    name: str
    tensors: int
    numbers: int = 0
    step_tensors: int = 0
    kept_tensors: int = 0
    foreach_tensors: int | None = None

    def state_bytes(self, elements: int, element_bytes: int) -> int:
        """Of one parameter of which the rank has so many elements; one without any has none but the numbers."""
        return self.tensors * elements * element_bytes + self.numbers * 4

    def step_bytes(self, parameter_bytes: Sequence[int], device_type: str) -> int:
        """The most that ``step()`` allocates at once, beside the state.

        Args:
            parameter_bytes: Of the rank's part of each parameter that it trains, in the optimizer's order.
        """
        if self.foreach_tensors is not None and device_type != "cpu":
            return self.foreach_tensors * sum(parameter_bytes)
        pairs = zip(parameter_bytes, (0, *parameter_bytes), strict=False)  # with the parameter before
        return max((self.step_tensors * own + self.kept_tensors * before for own, before in pairs), default=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    """An optimizer by its names.

    Args:
        adds: Options that add a tensor to the state.
        needs: The option without which it keeps nothing.
        allocates: Options that add a tensor to ``step_tensors``.
        allocates_foreach: Options that add one to ``foreach_tensors``.
    """

    names: tuple[str, ...]
    state: OptimizerState
    adds: tuple[str, ...] = ()
    needs: str | None = None
    allocates: tuple[str, ...] = ()
    allocates_foreach: tuple[str, ...] = ()


# The square roots of second moments; a loop also keeps what it divided by before.
_ADAM = OptimizerState(name="Adam", tensors=2, numbers=1, step_tensors=2, kept_tensors=1, foreach_tensors=1)
_ADAMW = replace(_ADAM, name="AdamW")


def _without_allocations(state: OptimizerState) -> OptimizerState:
    """Of a fused step: one kernel reads and writes parameters and state in place."""
    return replace(state, step_tensors=0, kept_tensors=0, foreach_tensors=None)


_SGD = OptimizerState(name="SGD", tensors=1, foreach_tensors=0)
# After torch/optim and composer/optim/decoupled_weight_decay.py.
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
    """What the optimizer of this name and these options keeps and allocates.

    Raises:
        ConfigError: no such optimizer is known; names the ones that are.
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
