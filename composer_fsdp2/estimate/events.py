"""The events of one microbatch at FSDP2's hooks. ``trace.py`` records them, ``replay.py`` reads them."""

import enum
from dataclasses import dataclass

from composer_fsdp2.config.value import Value


class Hook(enum.Enum):
    """A hook that runs in a microbatch. The first four are those of ``fully_shard`` before and after a unit."""

    PRE_FORWARD = "pre_forward"
    POST_FORWARD = "post_forward"
    PRE_BACKWARD = "pre_backward"
    POST_BACKWARD = "post_backward"
    GRADIENT = "gradient"  # autograd has accumulated the unsharded gradient of one parameter
    END = "end"  # of backward; units whose inputs need no gradient reduce theirs here


@dataclass(frozen=True, slots=True, kw_only=True)
class StepEvent(Value):
    """One hook, and the model's computation between this hook and the next.

    Args:
        unit: The name of the unit to which the hook belongs; for GRADIENT, the parameter's unit.
        parameter: For GRADIENT, the parameter's FQN (of a tied parameter, the first).
        live_bytes: Live activations directly after the hook: all storages that the computation allocated, except
            parameters, gradients, buffers, and those that the replay counts.
        peak_bytes: The peak of live activations until the next event; at least ``live_bytes``.
        loss_bytes: The part of ``peak_bytes`` allocated by the output layer and the loss, after the last block's
            forward and before its backward, such as the logits.
        host_live_bytes, host_bytes: As ``live_bytes`` and ``peak_bytes``, for offloaded activations in host memory.
        flops: Floating-point operations until the next event: matrix products, convolutions and attention. Causal
            attention counts half.
        recomputed_flops: The part of ``flops`` recomputed by activation checkpointing.
        sent: Collectives of the model itself until the next event, such as those of TP-sharded layers, as (op, bytes of
            the full buffer, ranks). Empty ranks are all ranks.
    """

    hook: Hook
    unit: str
    parameter: str | None = None
    live_bytes: int = 0
    peak_bytes: int = 0
    loss_bytes: int = 0
    host_live_bytes: int = 0
    host_bytes: int = 0
    flops: int = 0
    recomputed_flops: int = 0
    sent: tuple[tuple[str, int, tuple[int, ...]], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class MicrobatchTrace(Value):
    """All events of one microbatch, in the order in which the CPU issues them.

    Args:
        buffer_bytes: Bytes of the model's buffers, which are not sharded.
        host_bytes: Peak host memory of offloaded activations.
        notes: Assumptions of the trace, as sentences.
    """

    events: tuple[StepEvent, ...]
    buffer_bytes: int = 0
    host_bytes: int = 0
    notes: tuple[str, ...] = ()

    def without_activations(self) -> "MicrobatchTrace":
        """The same hooks without the model's own computation."""
        events = (StepEvent(hook=each.hook, unit=each.unit, parameter=each.parameter) for each in self.events)
        return MicrobatchTrace(events=tuple(events), buffer_bytes=self.buffer_bytes)
