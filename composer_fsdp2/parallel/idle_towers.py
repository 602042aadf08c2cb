"""``idle_towers``: optional submodules run on an example on ranks whose batch has no input for them.

A tower is a submodule that the model calls only for some batches, such as an image encoder.

[Note: idle towers] The units in a vision tower are all-gathered by the ranks with an image in their batch, while the
other ranks would wait at the next unit. Before each tower, and before each submodule that all ranks run (a sync point),
the ranks therefore agree on the first tower that any rank is about to call. All ranks run that tower next, a rank that
is about to call it on its image, the others on an example, until no rank is about to call any. Regardless of how often
each rank calls a tower (an image, then a video), all ranks run the same towers in one order. A tower that no rank calls
does not run.

The output of a tower is connected to the input of the next sync point by an empty slice, on ranks with an image as
well. Backward then runs through all of the tower on all ranks, including a last layer whose output the model does not
use. The gradient of the example is exactly zero.

The example is ``example_inputs`` of the tower, or the smallest input that this rank has seen, with its floating point
values replaced by zeros. A rank that has seen none receives one from another rank.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from enum import Enum
from functools import partial, wraps
from typing import Any

import torch
from torch import nn

from composer_fsdp2._torch.private_names import BatchNorm, untraced
from composer_fsdp2._torch.replaced import replaced
from composer_fsdp2._torch.tensor_tree import map_tensors, tensors_in
from composer_fsdp2.config.parallel import TowerModel
from composer_fsdp2.config.text import and_more
from composer_fsdp2.errors import ComposerFSDP2Error, PlanError
from composer_fsdp2.parallel.batches import Packed
from composer_fsdp2.parallel.connecting import Arguments, connect
from composer_fsdp2.sharding.agree import all_gather_object
from composer_fsdp2.sharding.modules import at_path, is_at_or_under
from composer_fsdp2.training.control import Operation
from composer_fsdp2.training.out_of_memory import AllReduceMax, forward_all_reduce_max

EXAMPLE = "example_inputs"

_OPERATION = Operation(
    "idle_towers",
    "Ranks must run the same parts of the model in the same order, towers aside: look for a branch on the rank or on "
    "the data, a different number of batches, or a forward on some ranks only",
)


def refuse_towers(model: nn.Module, models: Sequence[TowerModel], checkpointed: Sequence[str]) -> None:
    """Raise for ``example_inputs`` that do not fit a tower's forward, and for checkpointing around a tower's model.

    Args:
        checkpointed: The paths of the modules with activation checkpointing.
    Raises:
        PlanError: names the module.
    """
    for each in models:
        if around := [path for path in checkpointed if is_at_or_under(each.model, path)]:
            raise PlanError(
                f"idle_towers: {around[0]} is recomputed as one, and ranks could not agree in backward on the "
                f"towers that it calls ({and_more(each.towers)}); recompute the blocks in it and in the towers instead"
            )
    for path in (path for each in models for path in each.towers):
        given = getattr(at_path(model, path), EXAMPLE, None)
        if not isinstance(given, torch.Tensor | tuple | Mapping | None):
            raise PlanError(
                f"{EXAMPLE} of {path} is a {type(given).__name__}; give the arguments that the tower is called with "
                "for a smallest input: a tensor, a tuple of positional ones, or a mapping of those by name"
            )


def start_idle_towers(
    model: nn.Module, models: Sequence[TowerModel], before: Mapping[str, nn.Module], limit_s: float | None = None
) -> None:
    """Register the hooks that run idle towers of a sharded model. Called on all ranks.

    Args:
        before: The modules by path, without checkpoint wrappers.
        limit_s: The timeout of the comparisons across ranks, in seconds; None means that of other votes.
    """
    for each in models:
        outer = before[each.model]
        all_reduce_max = forward_all_reduce_max(outer, _OPERATION, limit_s)
        towers = _Towers(each, [at_path(model, path) for path in each.towers], all_reduce_max)
        _wrap_forward(outer, towers)
        for number, tower in enumerate(towers.modules):
            # Before FSDP's own hooks: the pre-hook all-gathers, the forward hook registers the backward's hooks.
            tower.register_forward_pre_hook(partial(towers.before_tower, number), prepend=True, with_kwargs=True)
            tower.register_forward_hook(towers.after_tower, prepend=True)
        for path in each.sync_points:
            at_path(model, path).register_forward_pre_hook(
                partial(towers.before_sync_point, path), prepend=True, with_kwargs=True
            )


def _wrap_forward(outer: nn.Module, towers: "_Towers") -> None:
    """Replace ``outer.forward`` instead of registering hooks: peft calls ``forward`` of the model that it adapts."""
    forward = outer.forward

    @wraps(forward)
    def with_towers(*args: Any, **kwargs: Any) -> Any:
        towers.begin(args, kwargs)
        return towers.end(forward(*args, **kwargs))

    outer.forward = with_towers


class _Graph(Enum):
    """Which autograd graph a tower's inputs and parameters create. It must be the same on all ranks."""

    NONE = 0  # a model may call a tower that it does not train under ``torch.no_grad``
    PARAMETERS = 1
    THROUGH = 2  # also the gradients of its inputs

    @staticmethod
    def of(inputs: Sequence[torch.Tensor]) -> "_Graph":
        if not torch.is_grad_enabled():
            return _Graph.NONE
        return _Graph.THROUGH if any(each.requires_grad for each in inputs) else _Graph.PARAMETERS


class _Towers:
    """The state of a forward of the model that calls the towers, on this rank.

    Attributes:
        modules: The towers.
    """

    def __init__(self, plan: TowerModel, modules: Sequence[nn.Module], all_reduce_max: AllReduceMax) -> None:
        self._model, self._names, self.modules = plan.model or "the model", plan.towers, modules
        self._all_reduce_max = all_reduce_max
        given = {number: getattr(tower, EXAMPLE, None) for number, tower in enumerate(modules)}
        self._examples = {
            number: _Example.from_example_inputs(inputs) for number, inputs in given.items() if inputs is not None
        }
        self._shared_examples: set[int] = set()  # the towers for which every rank has an example
        self._checked: set[int] = set()
        self._is_open = False  # in the forward
        self._is_comparing = False  # and not in a tower that runs on an example
        self._device = torch.device("cpu")
        self._unconnected: list[torch.Tensor] = []  # empty slices of the outputs of towers since the last sync point

    @untraced
    def begin(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._is_open, self._is_comparing, self._unconnected = True, True, []
        self._device = next((tensor.device for tensor in tensors_in((args, kwargs))), self._device)

    @untraced
    def before_tower(
        self, number: int, tower: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Arguments | None:
        if not self._is_comparing:
            return None
        inputs, known = tensors_in((args, kwargs)), self._examples.get(number)
        if known is None or known.num_elements > sum(each.numel() for each in inputs):
            self._examples[number] = _Example.from_call(args, kwargs)
        graph = _Graph.of(inputs)
        max_graph = self._run_other_ranks_towers(self._names[number], (number, graph))
        return None if graph in (_Graph.NONE, max_graph) else _map_main_input(args, kwargs, _require_grad)

    @untraced
    def after_tower(self, tower: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if self._is_open:
            self._unconnected += [each.reshape(-1)[:0] for each in tensors_in(output) if each.requires_grad]

    @untraced
    def before_sync_point(
        self, path: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Arguments | None:
        if not self._is_comparing:
            return None
        self._run_other_ranks_towers(path)
        # To the sync point's main input: without an image it may not require grad, and backward must pass through it on
        # all ranks.
        unconnected = self._unconnected
        connected = _map_main_input(args, kwargs, lambda tensor: connect(tensor, unconnected)) if unconnected else None
        if connected is not None:
            self._unconnected = []
        return connected

    @untraced
    def end(self, output: Any) -> Any:
        self._run_other_ranks_towers(f"the end of {self._model}")
        self._is_open, self._is_comparing, unconnected, self._unconnected = False, False, self._unconnected, []
        if not unconnected:
            return output
        # Any of these tensors may be the loss.
        return map_tensors(output, lambda each: connect(each, unconnected) if each.is_floating_point() else each)

    def _run_other_ranks_towers(self, where: str, own: tuple[int, _Graph] | None = None) -> _Graph | None:
        """Run the towers that other ranks call next, on examples, until ``own`` is next or no rank calls any.

        Args:
            where: This rank's position in the model.
            own: The tower that this rank is about to call, and its autograd graph.
        Returns:
            The largest graph that ``own`` has on any rank.

        Called on all ranks; compares a number across ranks before each tower.
        """
        code = 0 if own is None else len(_Graph) * (len(self.modules) - own[0]) + own[1].value
        while found := self._all_reduce_max(where, [code])[0]:
            number, graph = len(self.modules) - found // len(_Graph), _Graph(found % len(_Graph))
            if number not in self._shared_examples:
                self._share_example(number, where)
            if own is not None and own[0] == number:
                return graph
            self._run_idle(number, graph)
        return None

    def _share_example(self, number: int, where: str) -> None:
        """All-gather an example of a tower if a rank has none. Called on all ranks.

        A rank that is about to call the tower has one.
        """
        [is_missing] = self._all_reduce_max(where, [number not in self._examples])
        if is_missing:
            own = self._examples.get(number)
            sent = [each for each in all_gather_object(own and Packed.of(own)) if each is not None]
            if errors := [each.error for each in sent if each.error]:
                raise PlanError(
                    f"idle_towers: what {self._names[number]} was called with cannot be sent to ranks that saw no "
                    f"input of it yet ({errors[0]}); give each rank an example: {EXAMPLE} on that module"
                )
            self._examples.setdefault(number, min((each.open() for each in sent), key=lambda each: each.num_elements))
        self._shared_examples.add(number)

    def _run_idle(self, number: int, graph: _Graph) -> None:
        tower, name = self.modules[number], self._names[number]
        args, kwargs = self._examples[number].arguments_on(self._device)
        if graph is _Graph.THROUGH:
            args, kwargs = _map_main_input(args, kwargs, _require_grad) or (args, kwargs)
        try:
            with ExitStack() as stack:
                stack.enter_context(replaced(self, "_is_comparing", False))
                stack.enter_context(torch.set_grad_enabled(graph is not _Graph.NONE))
                for each in tower.modules():
                    if isinstance(each, BatchNorm) and each.training:  # its statistics are of images alone
                        stack.enter_context(replaced(each, "training", False))
                output = tower(*args, **kwargs)
        except Exception as error:
            error.add_note(f"idle_towers ran {name} on an example, as only other ranks have an input for it")
            raise
        if number not in self._checked:
            if not all(bool(each.isfinite().all()) for each in tensors_in(output) if each.is_floating_point()):
                raise ComposerFSDP2Error(
                    f"idle_towers: {name} gives NaN or infinity for an example of zeros, and so would its gradients; "
                    f"set {EXAMPLE} on that module to arguments that it computes finite values of"
                )
            self._checked.add(number)


def _map_main_input(
    args: tuple[Any, ...], kwargs: dict[str, Any], change: Callable[[torch.Tensor], torch.Tensor]
) -> Arguments | None:
    """Apply ``change`` to the main tensor of the arguments: the first floating point one that is no mask or positions.

    None if there is no such tensor.
    """
    given: dict[Any, Any] = dict(enumerate(args)) | kwargs
    places = [
        key
        for key, each in given.items()
        if isinstance(each, torch.Tensor) and each.is_floating_point() and not str(key).endswith(("mask", "positions"))
    ]
    if not places:
        return None
    place = next((key for key in places if given[key].requires_grad), places[0])
    given[place] = change(given[place])
    return tuple(given[number] for number in range(len(args))), {key: given[key] for key in kwargs}


def _require_grad(tensor: torch.Tensor) -> torch.Tensor:
    """Make a tower's input require grad, as it does on a rank where a trained module computed it.

    The backward of a unit ends later if an input requires grad.
    """
    return tensor.detach().requires_grad_()


@dataclass(frozen=True, slots=True)
class _Example:
    """Arguments with which a tower can be called.

    Args:
        num_elements: The number of elements of the tensors. The smallest example is used.
        stays_on_cpu: Whether tensors on the CPU remain there, instead of moving to the device.
    """

    arguments: Arguments
    num_elements: int
    stays_on_cpu: bool

    @staticmethod
    def from_call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> "_Example":
        """Make an example from the arguments of a call.

        Floating point tensors are replaced by zeros. Others, such as image sizes, keep their values.
        """

        def of(tensor: torch.Tensor) -> torch.Tensor:
            # One zero in memory for any shape.
            return tensor.new_zeros(()).expand(tensor.shape) if tensor.is_floating_point() else tensor.detach().clone()

        num_elements = sum(each.numel() for each in tensors_in((args, kwargs)))
        return _Example(map_tensors((args, kwargs), of), num_elements, stays_on_cpu=True)

    @staticmethod
    def from_example_inputs(inputs: torch.Tensor | tuple[Any, ...] | Mapping[str, Any]) -> "_Example":
        """``example_inputs``; preferred to any input seen."""
        inputs = (inputs,) if isinstance(inputs, torch.Tensor) else inputs
        arguments = (inputs, {}) if isinstance(inputs, tuple) else ((), dict(inputs))
        return _Example(arguments, -1, stays_on_cpu=False)

    def arguments_on(self, device: torch.device) -> Arguments:
        def on(tensor: torch.Tensor) -> torch.Tensor:
            to = tensor.device if self.stays_on_cpu and tensor.device.type == "cpu" else device
            return tensor.detach().to(to, copy=True, memory_format=torch.contiguous_format)

        moved: Arguments = map_tensors(self.arguments, on)
        return moved
