"""Check that parameters outside of the layer plan get equal gradients on all ranks of the tensor axis.

[Note: partial gradients] Between a column-wise and a row-wise layer each rank computes its own heads or features, and
between modules of sequence parallelism its own part of the sequence. A parameter that is used there but is not in the
layer plan, such as the weight of a norm over each head's query, gets only this rank's summand of its gradient. torch
does not sum them, and the copies of the parameter diverge. Whether this happens depends on the forward, so the
gradients are compared at the end of the first backward.

The opposite mistake is ``SequenceParallel`` on a module whose input each rank has in full. It makes the gradients of
its parameters degree times too large, equally on all ranks. The inputs of these modules are therefore compared as well.
Parts of a sequence differ, unless all of its positions are equal; in that case the comparison is repeated.
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

# The number of values that are sent per gradient: each is the sum of every 256th element.
_WIDTH = 256
# By dtype, the tolerated difference between two copies' gradients. First, relative to the gradient's norm: equal
# computations differ by this much if kernels add in no fixed order. Second, relative to the root mean square of the
# largest gradient: a smaller gradient may consist of rounding errors only, such as that of a bias of keys.
_TOLERANCES = {torch.float64: (1e-6, 1e-12)}
_TOLERANCES_OF_OTHERS = (3e-2, 1e-6)
_ROUNDING = 1e-24  # squared distance of equal sums from their mean, relative to their squared norm
_INPUTS: WeakKeyDictionary[nn.Module, torch.Tensor] = WeakKeyDictionary()  # written by ``_note_input``


def compare_replicated_gradients(
    model: nn.Module, plan: ShardingPlan, run: Run, meshes: Mapping[str, UnitMesh]
) -> None:
    """Make the first backward raise on all ranks if copies of a parameter along the tensor axis would diverge.

    A parameter whose gradient is zero, or not finite, is compared again in later backwards, at intervals that double
    each time. Once all are compared, it no longer communicates. Also raises if ``SequenceParallel`` gets the full
    sequence as input.

    Args:
        model: The sharded model.
        plan: Its plan; the mesh has a tensor axis.
        meshes: The mesh of each unit by its name.

    Called on all ranks; does not communicate itself.
    """
    for units in units_by_root(plan.units).values():
        root, axis = at_path(model, units[-1].name), meshes[units[-1].name].tensor
        assert axis is not None, "all units have the model's mesh, beside split layers"
        specs = [spec for unit in units for spec in (*unit.parameters, *unit.replicated)]
        names = [spec.name for spec in specs if spec.tensor_placement is None and spec.is_trained]
        pending = {name: parameter_at(model, name) for name in names}
        sequence_parallel = [each.path for each in plan.split if isinstance(each.parallelize, SequenceParallel)]
        in_root = {path: at_path(model, path) for path in sequence_parallel if is_at_or_under(path, units[-1].name)}
        inputs = {
            path: module
            for path, module in in_root.items()
            if any(parameter.requires_grad for parameter in module.parameters(recurse=False))
        }
        hooks = {path: module.register_forward_pre_hook(_note_input) for path, module in inputs.items()}
        compare = _Comparison(pending, inputs, hooks, axis.get_group(), run.groups[root])
        for unit in distinct_units(at_path(model, path) for each in units for path in each.modules):
            hooks_of(unit).after_reduction.append(compare)


@dataclass(slots=True, eq=False)
class _Comparison:
    """A hook that compares copies of parameters at the end of a backward that reduced gradients. Called on all ranks.

    Args:
        pending: The parameters that have not been compared, by name.
        inputs: The modules of sequence parallelism whose inputs have not been compared, by path.
        hooks: The hooks of these modules.
        group: The ranks with copies of the parameters.
        groups: The process groups that together contain all ranks of the model.
    """

    pending: dict[str, nn.Parameter]
    inputs: dict[str, nn.Module]
    hooks: dict[str, RemovableHandle]
    group: dist.ProcessGroup
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
            norm_tolerance, size_tolerance = _TOLERANCES.get(parameter.dtype, _TOLERANCES_OF_OTHERS)
            if difference > max(norm_tolerance**2 * norm, size_tolerance**2 * largest * parameter.numel()):
                wrong.append(name)
        if wrong:
            raise PlanError("\n".join(_message(wrong, is_all=len(wrong) == len(parameters))))

    def _compare_inputs(self, differences: Sequence[float], norms: Sequence[float]) -> None:
        input_squares = zip(
            list(self.inputs), differences[len(self.pending) :], norms[len(self.pending) :], strict=True
        )
        compared = [(path, difference <= _ROUNDING * norm) for path, difference, norm in input_squares if norm > 0]
        for path, _ in compared:
            _INPUTS.pop(self.inputs.pop(path), None)
            self.hooks.pop(path).remove()
        if full_inputs := [path for path, is_same in compared if is_same]:
            raise PlanError(
                f"{and_more(full_inputs, 3)}: SequenceParallel, and each rank of the tensor axis has the whole input, "
                f"so that gradients would be {dist.get_world_size(self.group)} times too large; take it out of the "
                "layer plan, or divide the sequence before it, as RowwiseParallel(output_layouts=Shard(1)) does"
            )

    def _squares(self) -> list[list[float]]:
        """The squared distance from the mean along the axis, and the squared norm, of each gradient and input.

        Summed over all ranks of the model by two all-reduces, of 2 KiB and of 16 bytes per parameter or input.
        """
        device = device_of_group(self.group)
        gradients = [parameter.grad for parameter in self.pending.values()]
        local = [torch.zeros(1) if each is None else local_tensor(each).detach() for each in gradients]
        inputs = [_INPUTS.get(each, torch.zeros(_WIDTH, dtype=torch.float64)) for each in self.inputs.values()]
        folded = torch.stack([each.to(device) for each in (*map(_folded, local), *inputs)])  # (rows, _WIDTH)
        mean = folded.clone()
        dist.all_reduce(mean, group=self.group)
        mean /= dist.get_world_size(self.group)
        norms = [torch.linalg.vector_norm(each, dtype=torch.float64).square().to(device) for each in (*local, *inputs)]
        squares = torch.stack([(folded - mean).square().sum(1), torch.stack(norms)])
        for group in self.groups:
            dist.all_reduce(squares, group=group)
        found: list[list[float]] = squares.tolist()
        return found


def _note_input(module: nn.Module, args: tuple[Any, ...]) -> None:
    """A forward pre-hook: in training, store this rank's input in reduced form (``_folded``).

    Disabled in a compiled model: torch 2.7 cannot break the graph at the result of a collective. A module-level
    function instead of a method or a closure, whose cells Dynamo would guard.
    """
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return
    given = local_tensor(args[0].detach()) if args else torch.zeros(1)
    if given.dim() > 1:
        # Zero if all positions are equal: parts of such a sequence are equal too.
        _INPUTS[module] = _folded(given) * (given != given.narrow(1, 0, 1)).any()


def _folded(tensor: torch.Tensor) -> torch.Tensor:
    """Reshape the elements to rows of ``_WIDTH``, the last one padded with zeros, and return the sum of the rows."""
    flat = tensor.flatten()
    num_full = len(flat) // _WIDTH * _WIDTH
    folded = flat[:num_full].view(-1, _WIDTH).sum(0, dtype=torch.float64)
    folded[: len(flat) - num_full] += flat[num_full:]
    return folded


def _message(names: Sequence[str], *, is_all: bool) -> Iterator[str]:
    yield (
        f"{and_more(names, 3)}: the ranks of the tensor axis do not split these parameters, and got different "
        "gradients for them, each of its own heads or part of the sequence, so that their copies would diverge. "
        "layer_plan: auto places those of known models. In a layer plan of your own add, for each norm or other module "
        "that holds them and no modules,"
    )
    # ``layers.0.norm`` is shown as ``layers.*.norm``.
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
