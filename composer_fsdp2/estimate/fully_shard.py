"""``fully_shard``'s own code as a machine of bytes: what its hooks allocate, free and send, in the CPU's order.

What counts is the order in which the CPU asks the allocator: FSDP2 keeps tensors alive by references, not by
``record_stream``. So this follows torch/distributed/fsdp/_fully_shard (2.7 to 2.13: _fsdp_state, _fsdp_param_group,
_fsdp_collectives) statement by statement, local variables that keep a tensor alive for a moment included, and the
additions of ``_torch/unit.py``. Where versions differ, ``TorchWays`` says how.
"""

import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from composer_fsdp2.estimate.ledger import Ledger
from composer_fsdp2.estimate.step import Kind
from composer_fsdp2.estimate.unit_sizes import ParameterSizes, UnitSizes

# op, unit, bytes of the full buffer, ranks
Send = Callable[[str, str, int, Sequence[int]], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchWays:
    """What differs between versions of torch.

    Args:
        skips_groups_of_one: No all-gather and no reduce-scatter where a unit is sharded over one rank.
        recomputation_is_no_forward: A unit that runs forward during backward, inside of a recomputed module, neither
            reshards afterwards nor counts as run.
    """

    skips_groups_of_one: bool
    recomputation_is_no_forward: bool


class _Lies(enum.Enum):
    SHARDED = enum.auto()
    SHARDED_AFTER_FORWARD = enum.auto()  # over fewer ranks
    GATHERED = enum.auto()


class _Doing(enum.Enum):
    NOTHING = enum.auto()
    FORWARD = enum.auto()
    PRE_BACKWARD = enum.auto()
    POST_BACKWARD = enum.auto()


@dataclass(slots=True, eq=False)
class UnitState:
    """One unit in a step."""

    sizes: UnitSizes
    lies: _Lies = _Lies.SHARDED
    doing: _Doing = _Doing.NOTHING
    pending: int | None = None  # the bytes of an all-gather that nobody has copied out yet
    was_gathered: bool = False
    places_in_order: list[int] = field(default_factory=list)
    gradients: dict[str, int] = field(default_factory=dict)  # unsharded, in bytes
    accumulated: dict[str, int] = field(default_factory=dict)  # unsharded, in the dtype they are reduced in
    partial: int = 0  # reduced over shards, not yet over replicas
    all_reduced: int = 0  # the buffer that is kept until the unit's next backward, or the end
    sharded_gradients: set[str] = field(default_factory=set)


@dataclass(slots=True, kw_only=True)
class Syncing:
    """What ``begin_microbatch`` has set."""

    reduces: bool = True
    all_reduces: bool = True
    reshards_after_backward: bool = True


class Root:
    """A root and the units below it, which share what FSDP2 keeps for them together.

    Args:
        units: All of them, in the order of ``named_modules``: the root first.
    """

    def __init__(self, units: Sequence[UnitSizes], ledger: Ledger, send: Send, ways: TorchWays) -> None:
        self.units = [UnitState(sizes) for sizes in units]
        self.by_name: Mapping[str, UnitState] = {unit.sizes.name: unit for unit in self.units}
        self.ledger = ledger
        self.send = send
        self.ways = ways
        self.syncing = Syncing()
        self.order: list[UnitState] = []
        self._last_gather = 0
        self._reduce_scatter_input = 0
        self._first_forward: UnitState | None = None
        self._is_backward = False
        self.host_gradients = 0

    # The hooks

    def pre_forward(self, name: str) -> None:
        unit = self.by_name[name]
        if self._first_forward is None:
            self._first_forward = unit
        unit.doing = _Doing.FORWARD
        self._unshard(unit)
        self._wait(unit)
        for target in unit.sizes.forward_prefetch:
            self._unshard(self.by_name[target])

    def post_forward(self, name: str) -> None:
        unit = self.by_name[name]
        if not (self._is_backward and self.ways.recomputation_is_no_forward):
            self._reshard(unit)
            unit.places_in_order.append(len(self.order))
            self.order.append(unit)
        unit.doing = _Doing.NOTHING
        if self._first_forward is unit:
            self._free_last_gather()
            self._first_forward = None

    def pre_backward(self, name: str) -> None:
        unit = self.by_name[name]
        self._is_backward = True
        if unit.doing is not _Doing.PRE_BACKWARD:
            unit.doing = _Doing.PRE_BACKWARD
            self._unshard(unit)
            self._wait(unit)
            if unit.sizes.backward_prefetch is None and unit.places_in_order:
                place = unit.places_in_order.pop()
                if place:
                    self._unshard(self.order[place - 1])
        for target in unit.sizes.backward_prefetch or ():
            self._unshard(self.by_name[target])

    def gradient(self, name: str, parameter: str) -> None:
        """Autograd has accumulated an unsharded gradient; one that was there already takes no more memory."""
        unit = self.by_name[name]
        if parameter not in unit.gradients:
            sizes = next(each for each in unit.sizes.parameters if each.name == parameter)
            self._take_gradient(unit, sizes)

    def post_backward(self, name: str) -> None:
        unit = self.by_name[name]
        self._finish(unit)
        unit.doing = _Doing.POST_BACKWARD

    def end(self) -> None:
        for unit in self.units:
            if unit.doing is not _Doing.POST_BACKWARD:
                self._finish(unit)  # its inputs needed no gradient
            unit.doing = _Doing.NOTHING
            self._free_all_reduced(unit)
            if unit.pending is not None:  # prefetched for nothing
                self.ledger.give_back(Kind.COMMUNICATION, unit.pending)
                unit.pending = None
            unit.places_in_order.clear()
        self.order.clear()
        self._free_reduce_scatter_input()
        self._is_backward = False

    # Parameters

    def _unshard(self, unit: UnitState) -> None:
        sizes = unit.sizes
        if unit.pending is not None or unit.lies is _Lies.GATHERED or not sizes.parameters:
            return
        if sizes.num_ranks == 1 and self.ways.skips_groups_of_one:
            unit.pending = 0
            return
        ranks = sizes.shard_ranks
        if unit.lies is _Lies.SHARDED_AFTER_FORWARD:
            ranks = _fewer_ranks(sizes)
        num_bytes = sizes.gathered_elements * sizes.param_bytes
        copied_in = _cast_or_copied_in(sizes) if unit.lies is _Lies.SHARDED else num_bytes // len(ranks) * sizes.is_cast
        # An all-to-all has what is sent in its buffer, too, about as much as what arrives.
        op, buffer = ("all_to_all", 2 * num_bytes) if sizes.exchanges else ("all_gather", num_bytes)
        self.ledger.take(Kind.COMMUNICATION, copied_in)
        self.ledger.take(Kind.COMMUNICATION, buffer)
        self.ledger.give_back(Kind.COMMUNICATION, copied_in)
        self.send(op, sizes.name, num_bytes, ranks)
        unit.pending = buffer

    def _wait(self, unit: UnitState) -> None:
        if unit.pending is None:
            return
        sizes, gathered = unit.sizes, unit.pending
        is_forward = unit.doing is _Doing.FORWARD
        # A local variable keeps the one before until the function returns.
        before, self._last_gather = (self._last_gather, 0) if is_forward else (0, self._last_gather)
        for each in sizes.parameters:
            self.ledger.take(Kind.GATHERED, _gathered(each, sizes))
        if unit.lies is _Lies.SHARDED_AFTER_FORWARD:
            self.ledger.give_back(Kind.GATHERED, self._after_forward_bytes(unit))
        unit.lies, unit.pending, unit.was_gathered = _Lies.GATHERED, None, True
        if is_forward:
            self._last_gather = gathered
        else:
            self.ledger.give_back(Kind.COMMUNICATION, gathered)
        self.ledger.give_back(Kind.COMMUNICATION, before)

    def _free_last_gather(self) -> None:
        self.ledger.give_back(Kind.COMMUNICATION, self._last_gather)
        self._last_gather = 0

    def _after_forward_bytes(self, unit: UnitState) -> int:
        return sum(_kept_after_forward(each, unit.sizes) for each in unit.sizes.parameters)

    def _reshard(self, unit: UnitState) -> None:
        """Where forward has ended."""
        if unit.sizes.stays_gathered:
            return
        if unit.sizes.ranks_after_forward < unit.sizes.num_ranks:
            for each in unit.sizes.parameters:
                self.ledger.take(Kind.GATHERED, _kept_after_forward(each, unit.sizes))
                self.ledger.give_back(Kind.GATHERED, _gathered(each, unit.sizes))
            unit.lies = _Lies.SHARDED_AFTER_FORWARD
        else:
            self._to_sharded(unit)

    def _to_sharded(self, unit: UnitState) -> None:
        if unit.lies is _Lies.GATHERED:
            self.ledger.give_back(Kind.GATHERED, sum(_gathered(each, unit.sizes) for each in unit.sizes.parameters))
        elif unit.lies is _Lies.SHARDED_AFTER_FORWARD:
            self.ledger.give_back(Kind.GATHERED, self._after_forward_bytes(unit))
        unit.lies = _Lies.SHARDED

    # Gradients

    def _take_gradient(self, unit: UnitState, sizes: ParameterSizes) -> None:
        num_bytes = sizes.part * unit.sizes.param_bytes
        unit.gradients[sizes.name] = num_bytes
        self.ledger.take(Kind.UNSHARDED_GRADIENTS, num_bytes)

    def _finish(self, unit: UnitState) -> None:
        self._fill_missing(unit)
        for name in [name for name in unit.gradients if name in unit.accumulated]:
            self.ledger.give_back(Kind.UNSHARDED_GRADIENTS, unit.gradients.pop(name))
        if self.syncing.reshards_after_backward:
            self._to_sharded(unit)
        if self.syncing.reduces:
            self._reduce(unit)
        else:
            self._put_off(unit)

    def _fill_missing(self, unit: UnitState) -> None:
        """Zeros for what the backward did not reach, as ``UnitGroup`` has it."""
        trained = [each for each in unit.sizes.parameters if each.is_trained] if unit.was_gathered else []
        missing = [each for each in trained if each.name not in unit.gradients and each.name not in unit.accumulated]
        is_due = bool(unit.partial) and self.syncing.reduces and self.syncing.all_reduces
        if len(missing) < len(trained) or is_due:
            for each in missing:
                self._take_gradient(unit, each)

    def _put_off(self, unit: UnitState) -> None:
        if unit.sizes.reduce_bytes == unit.sizes.param_bytes:
            return
        full = {each.name: each.part for each in unit.sizes.parameters}
        for name, num_bytes in unit.gradients.items():
            unit.accumulated[name] = full[name] * unit.sizes.reduce_bytes
            self.ledger.take(Kind.UNSHARDED_GRADIENTS, unit.accumulated[name])
            self.ledger.give_back(Kind.UNSHARDED_GRADIENTS, num_bytes)
        unit.gradients.clear()

    def _reduce(self, unit: UnitState) -> None:
        sizes, gradients = unit.sizes, {**unit.gradients, **unit.accumulated}
        unit.gradients.clear()
        unit.accumulated.clear()
        self._free_reduce_scatter_input_of(gradients)
        if not gradients:
            return
        self._free_all_reduced(unit)
        reduced = [each for each in sizes.parameters if each.name in gradients]
        if sizes.exchanges:
            gradients = self._exchange(sizes, reduced, gradients)
        elements, num_ranks = sum(each.padded_shard for each in reduced), 1 if sizes.exchanges else sizes.num_ranks
        self._reduce_scatter_input = elements * num_ranks * sizes.reduce_bytes
        self.ledger.take(Kind.COMMUNICATION, self._reduce_scatter_input)
        # A loop's variable keeps the last gradient until the function returns.
        is_looped = num_ranks > 1 or not self.ways.skips_groups_of_one
        last = gradients[reduced[-1].name] if is_looped else 0
        self.ledger.give_back(Kind.UNSHARDED_GRADIENTS, sum(gradients.values()) - last)
        output = elements * sizes.reduce_bytes
        self.ledger.take(Kind.COMMUNICATION, output)
        if is_looped and not sizes.exchanges:
            self.send("reduce_scatter", sizes.name, self._reduce_scatter_input, sizes.shard_ranks)
        self._reduce_over_replicas(unit, reduced, output)
        self.ledger.give_back(Kind.UNSHARDED_GRADIENTS, last)

    def _exchange(
        self, sizes: UnitSizes, reduced: Sequence[ParameterSizes], gradients: Mapping[str, int]
    ) -> dict[str, int]:
        """Of parts that ranks gathered, this rank's shards arrive, are added up, and are what is reduced further.

        Returns:
            The bytes of what takes the gradients' place: sums in fp32 at least.
        """
        num_bytes = sum(each.part for each in reduced) * sizes.reduce_bytes
        self.ledger.take(Kind.COMMUNICATION, num_bytes)
        self.ledger.give_back(Kind.UNSHARDED_GRADIENTS, sum(gradients.values()))
        self.ledger.take(Kind.COMMUNICATION, num_bytes)
        self.send("all_to_all", sizes.name, num_bytes, sizes.shard_ranks)
        sums = {each.name: each.padded_shard * max(sizes.reduce_bytes, 4) for each in reduced}
        self.ledger.take(Kind.UNSHARDED_GRADIENTS, sum(sums.values()))
        self.ledger.give_back(Kind.COMMUNICATION, 2 * num_bytes)
        return sums

    def _reduce_over_replicas(self, unit: UnitState, reduced: Sequence[ParameterSizes], output: int) -> None:
        if unit.sizes.replica_ranks:
            if not self.syncing.all_reduces:
                if unit.partial:
                    self.ledger.give_back(Kind.COMMUNICATION, output)
                else:
                    unit.partial = output
                return
            self.send("all_reduce", unit.sizes.name, output, unit.sizes.replica_ranks)
        self._lay_down(unit, reduced, output)
        self.ledger.give_back(Kind.COMMUNICATION, unit.partial)
        unit.partial = 0

    def _lay_down(self, unit: UnitState, reduced: Sequence[ParameterSizes], output: int) -> None:
        """The reduced gradients become the sharded ones, or are added to them."""
        sizes = unit.sizes
        own = sum(each.padded_shard for each in reduced) * sizes.own_bytes
        is_cast = sizes.reduce_bytes != sizes.own_bytes
        if is_cast:
            self.ledger.take(Kind.GRADIENTS, own)
        is_new = any(each.name not in unit.sharded_gradients for each in reduced)
        if sizes.is_offloaded:
            is_new = False
            self.host_gradients += sum(each.padded_shard for each in reduced if each.name not in unit.sharded_gradients)
        unit.sharded_gradients.update(each.name for each in reduced)
        if is_cast and not is_new:
            self.ledger.give_back(Kind.GRADIENTS, own)
        if sizes.replica_ranks and (is_cast or not is_new):
            unit.all_reduced = output  # kept for the stream that reduces it
        elif is_cast or not is_new:
            self.ledger.give_back(Kind.COMMUNICATION, output)
        else:
            self.ledger.give_back(Kind.COMMUNICATION, output)
            self.ledger.take(Kind.GRADIENTS, own)

    def _free_all_reduced(self, unit: UnitState) -> None:
        self.ledger.give_back(Kind.COMMUNICATION, unit.all_reduced)
        unit.all_reduced = 0

    def _free_reduce_scatter_input_of(self, gradients: Mapping[str, int]) -> None:
        if gradients or self.ways.skips_groups_of_one:  # 2.13 looks before it returns
            self._free_reduce_scatter_input()

    def _free_reduce_scatter_input(self) -> None:
        self.ledger.give_back(Kind.COMMUNICATION, self._reduce_scatter_input)
        self._reduce_scatter_input = 0


def _cast_or_copied_in(sizes: UnitSizes) -> int:
    """What an all-gather's input is put together in, before it is copied into the output."""
    return sizes.shard_elements * sizes.param_bytes if sizes.is_cast or sizes.is_offloaded else 0


def _gathered(each: ParameterSizes, sizes: UnitSizes) -> int:
    return sizes.gathered(each) * sizes.param_bytes


def _kept_after_forward(each: ParameterSizes, sizes: UnitSizes) -> int:
    return _gathered(each, sizes) // sizes.ranks_after_forward


def _fewer_ranks(sizes: UnitSizes) -> tuple[int, ...]:
    """Those of the small group: consecutive ones of the shard group. Which of them does not change the numbers."""
    return sizes.shard_ranks[: sizes.ranks_after_forward]
