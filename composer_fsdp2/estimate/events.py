"""One microbatch as FSDP2's hooks see it: a value that a trace of the model gives, and that a replay reads."""

import enum
from dataclasses import dataclass

from composer_fsdp2.config.value import Value


class Hook(enum.Enum):
    """What comes next in a microbatch. The first four are the hooks of ``fully_shard`` around a unit."""

    PRE_FORWARD = "pre_forward"
    POST_FORWARD = "post_forward"
    PRE_BACKWARD = "pre_backward"
    POST_BACKWARD = "post_backward"
    GRADIENT = "gradient"  # autograd has put down (or added to) the unsharded gradient of one parameter
    END = "end"  # of backward; units whose inputs need no gradient reduce theirs here


@dataclass(frozen=True, slots=True, kw_only=True)
class StepEvent(Value):
    """One moment, and what the model's own computation does from it to the next one.

    Args:
        unit: The name of the unit whose hook runs; of a gradient's event, of the unit that holds the parameter.
        parameter: The first name of the parameter whose gradient is there.
        live_bytes: Activations alive right after it: every storage that the computation made and that is neither
            state (parameters, gradients, buffers) nor the replay's.
        peak_bytes: The largest sum of them until the next event; at least ``live_bytes``.
        loss_bytes: How much of ``peak_bytes`` belongs to the output layer and the loss: what was made behind the last
            block and before that block's backward, such as logits and what is made of them.
        host_live_bytes, host_bytes: The same as the first two, of offloaded activations in the host's memory.
        flops: Floating-point operations until the next event: matrix products, convolutions and attention, of which
            causal attention counts half.
        recomputed_flops: Those of them that activation checkpointing does a second time.
        sent: Collectives of the computation itself until the next event, such as those of divided layers: each with its
            kind, the bytes of its full buffer, and its ranks; () for those of the world.
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
    """All moments of one microbatch, in the order in which the CPU comes by them.

    Args:
        is_assumed: The order is that of the plan's units, because no model was traced.
        buffer_bytes: The model's buffers, which lie in full on every rank.
        host_bytes: The most that offloaded activations take of the host's memory.
        notes: What was assumed while tracing, in whole sentences.
    """

    events: tuple[StepEvent, ...]
    is_assumed: bool = False
    buffer_bytes: int = 0
    host_bytes: int = 0
    notes: tuple[str, ...] = ()

    def without_activations(self) -> "MicrobatchTrace":
        """The same moments, where the model's own computation takes no memory."""
        events = (StepEvent(hook=each.hook, unit=each.unit, parameter=each.parameter) for each in self.events)
        return MicrobatchTrace(events=tuple(events), is_assumed=self.is_assumed, buffer_bytes=self.buffer_bytes)
