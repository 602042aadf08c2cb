"""How much state an optimizer keeps, by its name in torch, Composer, LLM Foundry and Hugging Face."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from composer_fsdp2.config.text import did_you_mean
from composer_fsdp2.config.value import Value
from composer_fsdp2.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerState(Value):
    """What an optimizer keeps of each parameter that it trains.

    Args:
        tensors: How many as large as the rank's part of it, in its dtype.
        numbers: How many of one element in fp32, such as torch's count of steps.
        update_tensors: How many as large as all of the rank's parameters its step takes for a moment.
    """

    name: str
    tensors: int
    numbers: int = 0
    update_tensors: int = 1

    def state_bytes(self, elements: int, element_bytes: int) -> int:
        """Of one parameter of which the rank has so many elements; one without any has none but the numbers."""
        return self.tensors * elements * element_bytes + self.numbers * 4


@dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    """An optimizer by its names, and which of its options add a tensor."""

    names: tuple[str, ...]
    state: OptimizerState
    adds: Mapping[str, int] = field(default_factory=dict)
    needs: str | None = None  # the option without which it keeps nothing


_ADAM = OptimizerState(name="AdamW", tensors=2, numbers=1)
_ROWS = (
    _Row(names=("adam", "adamw", "adamw_torch", "adamw_torch_fused", "adamw_hf"), state=_ADAM, adds={"amsgrad": 1}),
    _Row(
        names=("decoupled_adamw", "decoupledadamw"),
        state=OptimizerState(name="DecoupledAdamW", tensors=2, numbers=1, update_tensors=1),
        adds={"amsgrad": 1},
    ),
    _Row(
        names=("decoupled_lionw", "decoupledlionw", "lion", "lion_32bit"),
        state=OptimizerState(name="DecoupledLionW", tensors=1),
    ),
    _Row(names=("sgd",), state=OptimizerState(name="SGD", tensors=1), needs="momentum"),
    _Row(
        names=("decoupled_sgdw", "decoupledsgdw"),
        state=OptimizerState(name="DecoupledSGDW", tensors=1),
        needs="momentum",
    ),
)


def optimizer_state(name: str, options: Mapping[str, Any] | None = None) -> OptimizerState:
    """What the optimizer of this name and these options keeps.

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
    state = row.state
    tensors = state.tensors + sum(more for option, more in row.adds.items() if options.get(option))
    if row.needs is not None and not options.get(row.needs):
        tensors = 0
    return OptimizerState(name=state.name, tensors=tensors, numbers=state.numbers, update_tensors=state.update_tensors)
