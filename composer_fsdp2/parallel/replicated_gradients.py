"""Whether parameters that the ranks of a tensor axis do not split get the same gradient on all of these ranks.

[Note: partial gradients] Between a column-wise and a row-wise layer each rank computes with its own heads or features,
and between modules of sequence parallelism with its own part of the sequence. A parameter that is not in the layer plan
and is applied there, such as the weight of a norm over each head's query, gets this rank's part of its gradient alone.
torch does not sum the parts, and the copies of the parameter diverge. Whether that is so depends on the forward, so the
gradients themselves are compared, where the first backward ends.

The opposite mistake, ``SequenceParallel`` on a module whose input each rank has in full, makes the gradient of its
parameters degree times too large, on all ranks alike. So the inputs of these modules are compared as well. Parts of a
sequence differ, unless all of its places are equal; then the comparison is repeated.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor.parallel import SequenceParallel
from torch.utils.hooks import RemovableHandle

from composer_fsdp2._torch.local_tensors import local_tensor
from composer_fsdp2._torch.unit import hooks_of
from composer_fsdp2._torch.unit_parameters import distinct_units
from composer_fsdp2.config.text import and_more
from composer_fsdp2.errors import PlanError
from composer_fsdp2.sharding.agree import device_of_group
from composer_fsdp2.sharding.meshes import UnitMesh
from composer_fsdp2.sharding.modules import at_path, is_at_or_under, parameter_at
from composer_fsdp2.sharding.plan import ShardingPlan, units_by_root
from composer_fsdp2.training.run import Run

# Numbers that are sent of each gradient: its sums over every so many elements.
_WIDTH = 256
# By dtype, of what two copies' gradients may differ: as a share of the gradient's norm, by which equal computations
# differ where kernels add in no fixed order; and as a share of the largest gradient's root mean square, since a smaller
# gradient may be all rounding, as that of a bias of keys is.
_TOLERANCES = {torch.float64: (1e-6, 1e-12)}
_TOLERANCES_OF_OTHERS = (3e-2, 1e-6)
_ROUNDING = 1e-24  # of the square of equal sums' distance from their mean
_INPUTS: WeakKeyDictionary[nn.Module, torch.Tensor] = WeakKeyDictionary()  # of ``_note_input``


def compare_replicated_gradients(
    model: nn.Module, plan: ShardingPlan, run: Run, meshes: Mapping[str, UnitMesh]
) -> None:
    """Have the first backward raise on all ranks if copies of a parameter along the tensor axis would diverge.

    A parameter whose gradient is zero then, or not finite, is compared again, in backwards that are twice as far apart
    each time. After that nothing is left to do, and nothing is sent. It raises as well if ``SequenceParallel`` gets
    inputs that are not divided.

    Args:
        model: Sharded.
        plan: Whose mesh has a tensor axis.
        meshes: Of each unit by its name.

    Called on all ranks; does not communicate.
    """
    for units in units_by_root(plan.units).values():
        root, along = at_path(model, units[-1].name), meshes[units[-1].name].tensor
        assert along is not None, "all units have the model's mesh, beside split layers"
        specs = [spec for unit in units for spec in (*unit.parameters, *unit.replicated)]
        names = [spec.name for spec in specs if spec.tensor_placement is None and spec.is_trained]
        pending = {name: parameter_at(model, name) for name in names}
        divided = [each.path for each in plan.split if isinstance(each.parallelize, SequenceParallel)]
        below = {path: at_path(model, path) for path in divided if is_at_or_under(path, units[-1].name)}
        inputs = {
            path: module
            for path, module in below.items()
            if any(parameter.requires_grad for parameter in module.parameters(recurse=False))
        }
        hooks = {path: module.register_forward_pre_hook(_note_input) for path, module in inputs.items()}
        compare = _Comparison(pending, inputs, hooks, along.get_group(), run.groups[root])
        for unit in distinct_units(at_path(model, path) for each in units for path in each.modules):
            hooks_of(unit).after_reduction.append(compare)


@dataclass(slots=True, eq=False)
class _Comparison:
    """Called where a backward ends that reduced gradients.

    Args:
        pending: By name, the parameters that were not compared yet.
        inputs: By path, the modules of sequence parallelism whose inputs were not compared yet.
        hooks: Of these modules.
        along: The ranks with copies of them.
        groups: Together they reach all ranks of the model.
    """

    pending: dict[str, nn.Parameter]
    inputs: dict[str, nn.Module]
    hooks: dict[str, RemovableHandle]
    along: dist.ProcessGroup
    groups: Sequence[dist.ProcessGroup | None]
    num_backwards: int = 0

    def __call__(self) -> None:
        self.num_backwards += 1
        if not (self.pending or self.inputs) or self.num_backwards & (self.num_backwards - 1):
            return
        differences, norms = self._squares()
        self._compare_inputs(differences, norms)
        parameters = list(self.pending.items())
        norms = norms[: len(parameters)]
        mean_squares = [norm / parameter.numel() for norm, (_, parameter) in zip(norms, parameters, strict=True)]
        largest = max(filter(math.isfinite, mean_squares), default=0.0)
        wrong: list[str] = []
        for (name, parameter), difference, norm in zip(parameters, differences, norms, strict=False):
            if norm == 0 or not math.isfinite(norm):
                continue
            del self.pending[name]
            of_norm, of_largest = _TOLERANCES.get(parameter.dtype, _TOLERANCES_OF_OTHERS)
            if difference > max(of_norm**2 * norm, of_largest**2 * largest * parameter.numel()):
                wrong.append(name)
        if wrong:
            raise PlanError("\n".join(_message(wrong, is_all=len(wrong) == len(parameters))))

    def _compare_inputs(self, differences: Sequence[float], norms: Sequence[float]) -> None:
        of_inputs = zip(list(self.inputs), differences[len(self.pending) :], norms[len(self.pending) :], strict=True)
        compared = [(path, difference <= _ROUNDING * norm) for path, difference, norm in of_inputs if norm > 0]
        for path, _ in compared:
            _INPUTS.pop(self.inputs.pop(path), None)
            self.hooks.pop(path).remove()
        if whole := [path for path, is_same in compared if is_same]:
            raise PlanError(
                f"{and_more(whole, 3)}: SequenceParallel, and each rank of the tensor axis has the whole input, so "
                f"that gradients would be {dist.get_world_size(self.along)} times too large; take it out of the layer "
                "plan, or divide the sequence before it, as RowwiseParallel(output_layouts=Shard(1)) does"
            )

    def _squares(self) -> list[list[float]]:
        """Of each gradient, and then of each input, the square of its distance from the mean along the axis, and of
        its norm.

        Over all ranks of the model: two all-reduces, of 2 KiB and of 16 bytes for each parameter or input.
        """
        device = device_of_group(self.along)
        gradients = [parameter.grad for parameter in self.pending.values()]
        local = [torch.zeros(1) if each is None else local_tensor(each).detach() for each in gradients]
        inputs = [_INPUTS.get(each, torch.zeros(_WIDTH, dtype=torch.float64)) for each in self.inputs.values()]
        folded = torch.stack([each.to(device) for each in (*map(_folded, local), *inputs)])  # (rows, _WIDTH)
        mean = folded.clone()
        dist.all_reduce(mean, group=self.along)
        mean /= dist.get_world_size(self.along)
        norms = [torch.linalg.vector_norm(each, dtype=torch.float64).square().to(device) for each in (*local, *inputs)]
        squares = torch.stack([(folded - mean).square().sum(1), torch.stack(norms)])
        for group in self.groups:
            dist.all_reduce(squares, group=group)
        found: list[list[float]] = squares.tolist()
        return found


def _note_input(module: nn.Module, args: tuple[Any, ...]) -> None:
    """A forward pre-hook: keep this rank's part of the input that a forward in training gets, folded.

    Not in a compiled model: torch 2.7 can end no graph at what a collective returns. A function of this file rather
    than a method or a closure, whose cells Dynamo would guard.
    """
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return
    given = local_tensor(args[0].detach()) if args else torch.zeros(1)
    if given.dim() > 1:
        # Zero where all places are equal: parts of such a sequence are equal, too.
        _INPUTS[module] = _folded(given) * (given != given.narrow(1, 0, 1)).any()


def _folded(tensor: torch.Tensor) -> torch.Tensor:
    """Its elements as rows of ``_WIDTH``, the last one filled up with zeros, added up."""
    flat = tensor.flatten()
    whole = len(flat) // _WIDTH * _WIDTH
    folded = flat[:whole].view(-1, _WIDTH).sum(0, dtype=torch.float64)
    folded[: len(flat) - whole] += flat[whole:]
    return folded


def _message(names: Sequence[str], *, is_all: bool) -> Iterator[str]:
    yield (
        f"{and_more(names, 3)}: the ranks of the tensor axis do not split these parameters, and got different "
        "gradients for them, each of its own heads or part of the sequence, so that their copies would diverge. "
        "layer_plan: auto places those of known models. In a layer plan of your own add, for each norm or other module "
        "that holds them and no modules,"
    )
    # ``layers.0.norm`` is named as ``layers.*.norm``.
    patterns = dict.fromkeys(
        ".".join("*" if each.isdigit() else each for each in name.split(".")[:-1]) for name in names
    )
    yield from (f"  {path!r}: SequenceParallel(use_local_output=True)" for path in [*patterns][:8])
    yield (
        "which sums their gradients. Hold a parameter of a larger module in a module of its own, or leave the split "
        "layers before and behind it out of the plan."
    )
    if is_all:
        yield (
            "No unsplit parameter has the same gradient on these ranks, so they may have read different batches: set "
            "broadcast_batch: first"
        )
