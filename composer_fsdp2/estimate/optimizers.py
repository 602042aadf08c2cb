"""How much state an optimizer keeps, by its name in torch, Composer, LLM Foundry and Hugging Face."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from composer_fsdp2.config.text import did_you_mean
from composer_fsdp2.config.value import Value
from composer_fsdp2.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantized(Value):
    """State in one byte an element: each block of it has a scale in fp32, and smaller tensors are kept in fp32.

    The defaults are bitsandbytes' (``block_wise``, ``min_8bit_size``); its state lies on GPUs only, so nothing here
    was measured.
    """

    block: int = 256
    smallest: int = 4096

    def tensor_bytes(self, elements: int) -> int:
        return elements * 4 if elements < self.smallest else elements + -(-elements // self.block) * 4


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerState(Value):
    """What an optimizer keeps of each parameter that it trains.

    Args:
        tensors: How many as large as the rank's part of it, in its dtype.
        numbers: How many of one element in fp32, such as torch's count of steps.
        quantized: How its tensors are kept instead.
    """

    name: str
    tensors: int
    numbers: int = 0
    quantized: Quantized | None = None

    def state_bytes(self, elements: int, element_bytes: int) -> int:
        """Of one parameter, of which the rank has so many elements of so many bytes."""
        one = elements * element_bytes if self.quantized is None else self.quantized.tensor_bytes(elements)
        return self.tensors * one + self.numbers * 4


@dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    """An optimizer by its names, and what its options change.

    ``adds``: the options that keep one tensor more. ``needs``: the option without which it keeps nothing.
    """

    names: str
    state: OptimizerState
    adds: tuple[str, ...] = ()
    needs: str | None = None


def _row(
    name: str, tensors: int, numbers: int = 0, *, names: str = "", adds: tuple[str, ...] = (), needs: str | None = None
) -> _Row:
    state = OptimizerState(name=name, tensors=tensors, numbers=numbers)
    return _Row(names=f"{name.lower()} {names}", state=state, adds=adds, needs=needs)


_AMSGRAD = ("amsgrad",)
# Counted from the state of each after one step (tests/compat/test_optimizer_states.py).
_ROWS = (
    _row("Adam", 2, 1, adds=_AMSGRAD),
    _row("AdamW", 2, 1, adds=_AMSGRAD, names="adamw_torch adamw_torch_fused adamw_hf adamw_torch_xla"),
    _row("DecoupledAdamW", 2, 1, adds=_AMSGRAD, names="decoupled_adamw"),
    _row("DecoupledLionW", 1, names="decoupled_lionw lion lion_32bit"),
    _row("DecoupledAdaLRLion", 1, names="adalr_lion"),
    _row("DecoupledClipLion", 1, 1, names="clip_lion"),
    _row("SGD", 1, needs="momentum"),
    _row("DecoupledSGDW", 1, needs="momentum", names="decoupled_sgdw"),
    _row("NoOp", 0, names="no_op"),
    _row("Adamax", 2, 1),
    _row("NAdam", 2, 2),
    _row("RAdam", 2, 1),
    _row("Adadelta", 2, 1),
    _row("Adagrad", 1, 1),
    _row("ASGD", 1, 3),
    _row("RMSprop", 1, 1, adds=("momentum", "centered")),
    _row("Rprop", 2, 1),
    _Row(
        names="adamw_8bit adamw_bnb_8bit paged_adamw_8bit",
        state=OptimizerState(name="AdamW in 8 bits", tensors=2, quantized=Quantized()),
    ),
    _Row(
        names="lion_8bit paged_lion_8bit decoupledlionw_8bit",
        state=OptimizerState(name="Lion in 8 bits", tensors=1, quantized=Quantized()),
    ),
)
_BY_NAME: Mapping[str, _Row] = {name: row for row in _ROWS for name in row.names.split()}


def optimizer_state(name: str, options: Mapping[str, Any] | None = None) -> OptimizerState:
    """What the optimizer of this name and these options keeps.

    Raises:
        ConfigError: no such optimizer is known; names the ones that are.
    """
    row, options = _BY_NAME.get(name.lower()), options or {}
    if row is None:
        way_out = did_you_mean(name.lower(), _BY_NAME, f"known are {', '.join(_BY_NAME)}")
        raise ConfigError(f"how much state the optimizer {name} keeps is not known{way_out}")
    if row.needs is not None and not options.get(row.needs):
        return replace(row.state, tensors=0)
    return replace(row.state, tensors=row.state.tensors + sum(bool(options.get(option)) for option in row.adds))
