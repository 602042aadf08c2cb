"""FSDP units in which each rank all-gathers only some rows of each parameter: those of its own experts.

[Note: gathered parts] Each parameter is sharded over all ranks of the unit's shard axis, as without expert parallelism,
so optimizers, clipping and checkpoints see the usual shards under the model's own names. Only the all-gather differs:
within each group of ``degree`` consecutive ranks, each rank needs different rows. An all-to-all therefore replaces the
all-gather of parameters, and another one the reduce-scatter of gradients. A rank receives as many bytes as if its
experts were sharded only over the ranks that need them.
"""

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard import _fsdp_collectives, _fsdp_param_group

from composer_fsdp2._torch.collectives import all_to_all
from composer_fsdp2._torch.groups import groups_of, state_of
from composer_fsdp2._torch.replaced import replaced

_autograd: Any = torch.autograd
# (first row, end) per rank of the expert axis.
Rows = Sequence[tuple[int, int]]


def all_gather_rows(unit: FSDPModule, degree: int, rows: Mapping[nn.Parameter, Rows]) -> None:
    """Make a unit all-gather only the rows of each parameter that this rank needs.

    While the unit is unsharded, its modules have parameters with these rows only, and with zero rows if the rank needs
    none.

    Args:
        unit: Sharded along dimension 0 over a multiple of ``degree`` ranks; currently sharded.
        degree: The number of consecutive ranks of the shard axis that need different rows.
        rows: For each sharded parameter, the rows that each of these ranks needs. A parameter that is missing is needed
            in full.

    Does not communicate.
    """
    _patch_fsdp()
    for group in groups_of(state_of(unit)):
        exchange = _RowExchange(group.mesh_info.shard_mesh_size, group.mesh_info.shard_mesh_rank, degree)
        for number, parameter in enumerate(group.fsdp_params):
            size = parameter._orig_size
            needed = rows.get(parameter.sharded_param) or [(0, size[0])] * degree
            exchange.parts.append(
                _ParameterRows(needed, size[0], math.prod(size[1:]), parameter.padded_sharded_param_size[0])
            )
            parameter.exchange, parameter.number = exchange, number
            first, end = needed[exchange.place % degree]
            # torch creates the unsharded parameter with this size. Its strides are those of the contiguous full
            # parameter.
            parameter._orig_size = torch.Size([end - first, *size[1:]])


@dataclass(frozen=True, slots=True)
class _ParameterRows:
    """The rows of one parameter.

    Args:
        needed: The rows that each rank of the expert axis needs.
        num_rows: The number of rows of the full parameter.
        row_numel: The number of elements of a row.
        padded_rows: The number of rows of a shard, including padding.
    """

    needed: Rows
    num_rows: int
    row_numel: int
    padded_rows: int

    def common_rows(self, shard: int, place: int) -> tuple[int, int]:
        """The rows of a shard that the rank at ``place`` needs."""
        (first, end), start = self.needed[place], shard * self.padded_rows
        first, end = max(first, start), min(end, start + self.padded_rows, self.num_rows)
        return first, max(first, end)


@dataclass(frozen=True, slots=True)
class _Slice:
    """``numel`` elements from ``start`` of one parameter: of this rank's shard, or of its unsharded rows."""

    parameter: int
    start: int
    numel: int


@dataclass(frozen=True)
class _Layout:
    """The slices that a rank sends and receives in an all-to-all.

    Args:
        of_shards: Slices of this rank's shards, by the rank that needs them.
        of_parts: Slices of this rank's unsharded rows, by the rank that owns the shard.
    """

    of_shards: tuple[tuple[_Slice, ...], ...]
    of_parts: tuple[tuple[_Slice, ...], ...]

    @functools.cached_property
    def shard_sizes(self) -> list[int]:
        return [sum(slice_.numel for slice_ in slices) for slices in self.of_shards]

    @functools.cached_property
    def part_sizes(self) -> list[int]:
        return [sum(slice_.numel for slice_ in slices) for slices in self.of_parts]


class _RowExchange:
    """The all-to-all of one unit, which replaces its all-gather and its reduce-scatter ([Note: gathered parts]).

    Args:
        num_shards: The size of the shard axis.
        place: This rank's index along the shard axis.
        degree: The number of consecutive ranks that need different rows.
    """

    def __init__(self, num_shards: int, place: int, degree: int) -> None:
        self.num_shards, self.place, self.degree = num_shards, place, degree
        self.copies = num_shards // degree  # number of ranks that need the same rows
        self.parts: list[_ParameterRows] = []
        self._layouts: dict[tuple[int, ...], _Layout] = {}

    def layout(self, parameters: Sequence[Any]) -> _Layout:
        """The slices to exchange for these parameters: all of the unit, or those with gradients."""
        key = tuple([each.number for each in parameters])
        if key not in self._layouts:
            self._layouts[key] = self._layout([self.parts[number] for number in key])
        return self._layouts[key]

    def _layout(self, parts: Sequence[_ParameterRows]) -> _Layout:
        def slices(shard: int, place: int, *, of_shard: bool) -> Iterator[_Slice]:
            for number, part in enumerate(parts):
                first, end = part.common_rows(shard, place)
                origin = shard * part.padded_rows if of_shard else part.needed[place][0]
                if end > first:
                    yield _Slice(number, (first - origin) * part.row_numel, (end - first) * part.row_numel)

        own = self.place % self.degree
        return _Layout(
            tuple(tuple(slices(self.place, place, of_shard=True)) for place in range(self.degree)),
            tuple(tuple(slices(shard, own, of_shard=False)) for shard in range(self.num_shards)),
        )

    def gather(
        self, parameters: list[Any], group: dist.ProcessGroup, async_op: bool, copy_in: Any, stream: Any, device: Any
    ) -> Any:
        layout, handle = self.layout(parameters), torch.get_device_module(device.type)
        length, received = sum(layout.shard_sizes), sum(layout.part_sizes)
        with handle.stream(copy_in):
            shards = [shard for (shard,) in _fsdp_collectives._get_param_all_gather_inputs(parameters)]
            slices = [shards[p.parameter].narrow(0, p.start, p.numel) for of in layout.of_shards for p in of]
            # One buffer for both directions, as in torch: it is freed after the received rows have been copied out.
            buffer = shards[0].new_empty(self.copies * length + received, device=device)
            sent, arrived = buffer.split([self.copies * length, received])
            if slices:
                sent.view(self.copies, length).copy_(torch.cat(slices))
        stream.wait_stream(copy_in)
        with handle.stream(stream):
            work = all_to_all(
                arrived, sent, layout.part_sizes, layout.shard_sizes * self.copies, group, async_op=async_op
            )
            event = stream.record_event()
        return _fsdp_collectives.AllGatherResult(buffer, event, work, [], [], [])

    @torch.no_grad()
    def copy_out(self, result: Any, parameters: list[Any]) -> None:
        """Copy the received rows into the unsharded parameters, after the all-to-all has finished."""
        buffer = result.all_gather_output
        if result.all_gather_event is not None:
            torch.get_device_module(buffer.device.type).current_stream().wait_event(result.all_gather_event)
        if isinstance(result.all_gather_work, dist.Work):
            result.all_gather_work.wait()
        layout = self.layout(parameters)
        for each in parameters:
            each.init_all_gather_outputs([each._orig_size.numel()], [buffer.dtype], 1, buffer.device)
            each.alloc_all_gather_outputs()
        outputs = [each.all_gather_outputs[0] for each in parameters]
        slices = [slice_ for of_shard in layout.of_parts for slice_ in of_shard]
        arrived = buffer.narrow(0, buffer.numel() - sum(layout.part_sizes), sum(layout.part_sizes))
        with _autograd._unsafe_preserve_version_counter(tuple(outputs)):
            targets = [outputs[each.parameter].narrow(0, each.start, each.numel) for each in slices]
            torch._foreach_copy_(targets, list(arrived.split([each.numel for each in slices])))

    def reduce(
        self, parameters: list[Any], gradients: list[torch.Tensor], group: dist.ProcessGroup
    ) -> list[torch.Tensor]:
        """This rank's padded shards of the gradients' mean over ``group``. Empties ``gradients``."""
        layout = self.layout(parameters)
        dtype, device = parameters[0].reduce_dtype or gradients[0].dtype, parameters[0].device
        length, num_sent = sum(layout.shard_sizes), sum(layout.part_sizes)
        sent = torch.empty(num_sent, dtype=dtype, device=device)
        slices = [slice_ for of_shard in layout.of_parts for slice_ in of_shard]
        flat = [each.reshape(-1) for each in gradients]
        torch._foreach_copy_(
            list(sent.split([each.numel for each in slices])),
            [flat[each.parameter].narrow(0, each.start, each.numel) for each in slices],
        )
        flat.clear()
        gradients.clear()
        arrived = sent.new_empty(self.copies * length)
        all_to_all(arrived, sent, layout.shard_sizes * self.copies, layout.part_sizes, group)
        # At least in fp32: a sum over many ranks must not overflow in fp16, and is rounded once.
        wide = torch.promote_types(dtype, torch.float32)
        total = arrived.view(self.copies, length).sum(0, dtype=wide).div_(self.num_shards)
        shards = [torch.zeros(each.padded_sharded_param_size, dtype=wide, device=device) for each in parameters]
        for of_place, part in zip(layout.of_shards, total.split(layout.shard_sizes), strict=True):
            if of_place:  # rows that several ranks need are summed
                targets = [shards[each.parameter].view(-1).narrow(0, each.start, each.numel) for each in of_place]
                torch._foreach_add_(targets, list(part.split([each.numel for each in of_place])))
        return shards


@functools.cache
def _patch_fsdp() -> None:
    """Replace torch's all-gather, copy-out and reduction by an all-to-all, in units after ``all_gather_rows``."""
    torchs: Any = _fsdp_param_group
    gather, copy_out, reduce = torchs.foreach_all_gather, torchs.foreach_all_gather_copy_out, torchs.foreach_reduce

    @torch.no_grad()
    def foreach_all_gather(parameters: list[Any], *args: Any) -> Any:
        exchange = _row_exchange_of(parameters)
        return gather(parameters, *args) if exchange is None else exchange.gather(parameters, *args[:5])

    def foreach_all_gather_copy_out(result: Any, parameters: list[Any], group: dist.ProcessGroup) -> None:
        exchange = _row_exchange_of(parameters)
        copy_out(result, parameters, group) if exchange is None else exchange.copy_out(result, parameters)

    @torch.no_grad()
    def foreach_reduce(parameters: list[Any], gradients: list[torch.Tensor], group: Any, *args: Any) -> Any:
        exchange = _row_exchange_of(parameters)
        if exchange is None:
            return reduce(parameters, gradients, group, *args)
        shards = exchange.reduce(parameters, gradients, group)
        # torch handles the rest, with the shards as the full gradients of a group of one rank: replicas, offload and
        # accumulation.
        with replaced(_fsdp_collectives, "dist", _SingleRankGroup(vars(_fsdp_collectives)["dist"])):
            return reduce(parameters, shards, _SingleRankGroup, *args)

    torchs.foreach_all_gather = foreach_all_gather
    torchs.foreach_all_gather_copy_out = foreach_all_gather_copy_out
    torchs.foreach_reduce = foreach_reduce


def _row_exchange_of(parameters: Sequence[Any]) -> _RowExchange | None:
    return getattr(parameters[0], "exchange", None) if parameters else None


class _SingleRankGroup:
    """A stand-in for ``torch.distributed`` and for a process group of one rank.

    torch's ``foreach_reduce`` gets it after the all-to-all has reduced the gradients. torch 2.7 reduces on one rank
    too.
    """

    def __init__(self, distributed: Any) -> None:
        self._distributed = distributed

    def __getattr__(self, name: str) -> Any:
        return getattr(self._distributed, name)

    def reduce_scatter_tensor(self, output: torch.Tensor, input: torch.Tensor, **unused: Any) -> None:
        output.copy_(input)

    @staticmethod
    def size() -> int:
        return 1
