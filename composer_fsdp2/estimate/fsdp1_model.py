"""FSDP1's step for the same plan, as a model: what its code says, not what was measured. ``compare`` measures it.

After torch/distributed/fsdp (2.7): a unit's parameters are one flat parameter, padded once; an all-gather's output is
that flat parameter, so that nothing is copied out; frees wait for the device (``record_stream``), so that with
``limit_all_gathers`` two units are gathered at once; gradients of a unit are one flat tensor in the parameters' dtype.
"""

from dataclasses import dataclass

from composer_fsdp2.config.sharding import GradientSync
from composer_fsdp2.config.value import Value
from composer_fsdp2.estimate.optimizers import OptimizerState
from composer_fsdp2.estimate.step import Kind, StepEstimate
from composer_fsdp2.estimate.unit_sizes import ParameterSizes, UnitSizes, unit_sizes
from composer_fsdp2.sharding.plan import ShardingPlan

_IN_FLIGHT = 2  # limit_all_gathers


@dataclass(frozen=True, slots=True, kw_only=True)
class Fsdp1Model(Value):
    """Bytes of a rank under FSDP1, modelled, in the places of a ``StepEstimate``.

    Args:
        gathered_peak_bytes: Of gathered units: the root's, and two others in flight (all, where they stay gathered).
        gradients_peak_bytes: Unsharded, with what they are reduced from and to.
        differences: What changes otherwise, in whole sentences.
    """

    parameters_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    gathered_peak_bytes: int
    gradients_peak_bytes: int
    differences: tuple[str, ...]

    @property
    def state_peak_bytes(self) -> int:
        """Without activations; what is gathered and the gradients of one unit are largest together in backward."""
        fixed = self.parameters_bytes + self.gradients_bytes + self.optimizer_bytes
        return fixed + self.gathered_peak_bytes + self.gradients_peak_bytes


def model_fsdp1(
    plan: ShardingPlan, *, world_size: int, optimizer: OptimizerState, num_microbatches: int = 1, rank: int = 0
) -> Fsdp1Model:
    """The step of the same units under FSDP1."""
    plan = plan.resolve(world_size)
    units = [unit_sizes(unit, rank=rank, world_size=world_size) for unit in plan.units]
    gathered = [_flat(each) * each.num_ranks * each.param_bytes for each in units]
    roots = sum(size for each, size in zip(units, gathered, strict=True) if each.is_root)
    inner = sorted(size for each, size in zip(units, gathered, strict=True) if not each.is_root)
    stay = sum(size for each, size in zip(units, gathered, strict=True) if not each.is_root and each.stays_gathered)
    kept = [each for each in units if not each.is_offloaded]
    return Fsdp1Model(
        parameters_bytes=sum(_flat(each) * each.own_bytes for each in kept),
        # A flat parameter's gradient has its whole length, also where some of its parameters are frozen.
        gradients_bytes=sum(_flat(each) * each.own_bytes for each in kept if _trained(each)),
        optimizer_bytes=sum(_state(each, optimizer) for each in kept),
        gathered_peak_bytes=roots + max(stay, sum(inner[-_IN_FLIGHT:])),
        gradients_peak_bytes=_gradients([each for each in units if _trained(each)], plan, num_microbatches),
        differences=tuple(_differences(plan, num_microbatches)),
    )


def _flat(sizes: UnitSizes) -> int:
    """A rank's piece of the flat parameter, which is padded once."""
    return -(-sum(each.full for each in sizes.parameters) // sizes.num_ranks)


def _state(sizes: UnitSizes, optimizer: OptimizerState) -> int:
    """With ``use_orig_params``, as Composer has it, each parameter has numbers of its own."""
    trained = _trained(sizes)
    if not trained:
        return 0
    elements = -(-sum(each.full for each in trained) // sizes.num_ranks)
    further = len(trained) - 1
    return optimizer.state_bytes(elements, sizes.own_bytes) + further * optimizer.state_bytes(0, sizes.own_bytes)


def _trained(sizes: UnitSizes) -> list[ParameterSizes]:
    return [each for each in sizes.parameters if each.is_trained]


def _gradients(units: list[UnitSizes], plan: ShardingPlan, num_microbatches: int) -> int:
    """Of the largest unit while it is reduced; where that is put off, of all units in full, in fp32 from the second
    microbatch on (``no_sync``)."""
    most = max((_flat(each) * each.num_ranks * each.param_bytes for each in units), default=0)
    if plan.config.accumulation.gradient_sync is GradientSync.LAST and num_microbatches > 1:
        return most + sum(_flat(each) * each.num_ranks * each.own_bytes for each in units)
    reduced = max(
        (
            _flat(each)
            * (each.num_ranks * (each.reduce_bytes if each.reduce_bytes != each.param_bytes else 0) + each.reduce_bytes)
            for each in units
        ),
        default=0,
    )
    return most + reduced


def _differences(plan: ShardingPlan, num_microbatches: int) -> list[str]:
    said = [
        "FSDP1 gathers into the flat parameter itself; FSDP2 into a buffer, and copies out of it.",
        "FSDP1 frees what was gathered when the device is done with it, FSDP2 when Python is.",
        "Collectives: FSDP1 sends as many, of flat parameters padded once; FSDP2 pads each parameter.",
    ]
    if any(type(unit.reshard_after_forward) is int and unit.reshard_after_forward > 1 for unit in plan.units):
        said.append("A whole number as reshard_after_forward has no counterpart in FSDP1, which is modelled with true.")
    if plan.replicated:
        said.append("Scalars that FSDP2 leaves on every rank lie in FSDP1's flat parameters.")
    if num_microbatches > 1 and plan.config.accumulation.gradient_sync is not GradientSync.EVERY:
        said.append("Gradients that are not reduced in each microbatch are kept in full in fp32 by FSDP1's no_sync.")
    return said


def state_peak_of(estimate: StepEstimate) -> int:
    """FSDP2's largest sum of all but activations, to compare with."""
    return max(
        sample.total_bytes - sample.bytes_of(Kind.ACTIVATIONS) - sample.bytes_of(Kind.LOSS)
        for sample in estimate.timeline
    )
