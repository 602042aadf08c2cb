"""``idle_towers``: a part of the model that a batch does not enter runs on an example, where another rank enters it.

[Note: idle towers] Units in a vision tower are gathered by the ranks that have an image in their batch; the others
would wait at the next unit. So ranks ask each other, before each tower and before each part that all of them run: which
tower is the first that some rank is about to enter? All run that one next, a rank that is about to enter it on its
image, the others on an example, until no rank is about to enter any. However often each rank enters a tower (an image,
then a video), all run the same towers in one order; where nobody has an image, nobody runs it.

What a tower returns is made part of the next part's inputs by a slice of no rows, on ranks with an image as well:
backward then reaches all of the tower on all of them, also a last layer whose output the model does not read. The
example's gradient is exactly zero.

An example is what the user gave (``example_inputs`` on the tower), or the smallest input that this rank saw, with zeros
in the place of its floating point numbers. A rank that saw none gets it from those that did.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from composer_fsdp2._torch.passing import tensors_in, with_tensors
from composer_fsdp2._torch.private_names import BatchNorm, untraced
from composer_fsdp2._torch.replaced import replaced
from composer_fsdp2.config.parallel import TowerModel
from composer_fsdp2.errors import ComposerFSDP2Error, PlanError
from composer_fsdp2.parallel.batches import Packed
from composer_fsdp2.parallel.connecting import connect, is_floating
from composer_fsdp2.sharding.agree import gather
from composer_fsdp2.sharding.modules import at_path
from composer_fsdp2.training.control import Operation
from composer_fsdp2.training.out_of_memory import Ask, asking

EXAMPLE = "example_inputs"
_Arguments = tuple[tuple[Any, ...], dict[str, Any]]  # positional ones, and those by name

_OPERATION = Operation(
    "idle_towers",
    "Ranks must run the same parts of the model in the same order, towers aside: look for a branch on the rank or on "
    "the data, a different number of batches, or a forward on some ranks only",
)


def refuse_examples(model: nn.Module, models: Sequence[TowerModel]) -> None:
    """Raise for an ``example_inputs`` that no tower could be called with.

    Raises:
        PlanError: names the tower.
    """
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
    """Run the idle towers of a model that was just sharded, from now on. Called on all ranks.

    Args:
        before: The modules by their paths, before wrappers of checkpointing were put around some.
        limit_s: For how many seconds ranks wait for each other's answers; None: for as long as for other votes.
    """
    for each in models:
        outer = before[each.model]
        towers = _Towers(each, {path: at_path(model, path) for path in each.towers}, asking(outer, _OPERATION, limit_s))
        outer.register_forward_pre_hook(towers.begin, with_kwargs=True)
        for number, tower in enumerate(towers.modules):
            # Before the tower is gathered; what it returns is looked at before its unit's own hook does so.
            tower.register_forward_pre_hook(towers.before_tower(number), prepend=True, with_kwargs=True)
            tower.register_forward_hook(towers.after_tower, prepend=True)
        for path in each.sync_points:
            meeting = towers.before_meeting(path)
            at_path(model, path).register_forward_pre_hook(meeting, prepend=True, with_kwargs=True)
        outer.register_forward_hook(towers.end, prepend=True)


class _Towers:
    """One forward after the other of the module around towers, on this rank.

    Attributes:
        modules: The towers.
    """

    def __init__(self, plan: TowerModel, towers: Mapping[str, nn.Module], ask: Ask) -> None:
        self._model, self._names, self._ask = plan.model or "the model", plan.towers, ask
        self.modules = list(towers.values())
        self._examples: dict[int, _Example] = {}
        for number, tower in enumerate(self.modules):
            if (given := getattr(tower, EXAMPLE, None)) is not None:
                self._examples[number] = _Example.given(given)
        self._known_to_all: set[int] = set()
        self._checked: set[int] = set()
        self._is_open = self._is_idle = False
        self._device = torch.device("cpu")
        self._unconnected: list[torch.Tensor] = []  # without elements; of the towers that ran since the last meeting

    @untraced
    def begin(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._is_open, self._is_idle, self._unconnected = True, False, []
        self._device = next((tensor.device for tensor in tensors_in((args, kwargs))), self._device)

    def before_tower(self, number: int) -> Callable[..., _Arguments | None]:
        @untraced
        def meet(tower: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Arguments | None:
            if not self._is_open or self._is_idle:
                return None
            self._keep_example(number, args, kwargs)
            has_gradient = torch.is_grad_enabled() and any(each.requires_grad for each in tensors_in((args, kwargs)))
            while (first := self._first(self._names[number], number, has_gradient)) and first[0] != number:
                self._run_idle(*first)
            is_alike = first is None or first[1] is has_gradient
            return None if is_alike else _with_main(args, kwargs, _as_trained)

        return meet

    @untraced
    def after_tower(self, tower: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if self._is_open:
            reached = (each for each in tensors_in(output) if each.requires_grad)
            self._unconnected += [each.reshape(-1)[:0] for each in reached]

    def before_meeting(self, path: str) -> Callable[..., _Arguments | None]:
        @untraced
        def meet(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Arguments | None:
            if not self._is_open or self._is_idle:
                return None
            self._run_all_idle(path)
            if not self._unconnected:
                return None
            # What it computes with, so that backward goes through it on all ranks: tokens with images in them need
            # gradients where text alone may not.
            connected = _with_main(args, kwargs, lambda tensor: connect(tensor, self._unconnected))
            if connected is not None:
                self._unconnected = []
            return connected

        return meet

    @untraced
    def end(self, model: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        self._run_all_idle(f"the end of {self._model}")
        self._is_open, unconnected, self._unconnected = False, self._unconnected, []
        return _connect_to_all(output, unconnected) if unconnected else None

    def _run_all_idle(self, where: str) -> None:
        while first := self._first(where, None, False):
            self._run_idle(*first)

    def _first(self, where: str, own: int | None, has_gradient: bool) -> tuple[int, bool] | None:
        """The first tower that a rank is about to enter, and whether with inputs that need gradients; None: no rank is.

        Args:
            where: Where this rank is.
            own: The tower that it is about to enter.
        """
        code = 0 if own is None else 2 * (len(self.modules) - own) + has_gradient
        [found] = self._ask(where, [code])
        if not found:
            return None
        number = len(self.modules) - found // 2
        if number not in self._known_to_all:
            self._make_known(number, where)
        return number, bool(found % 2)

    def _make_known(self, number: int, where: str) -> None:
        """Give ranks that have no example of a tower that of another: one that is about to enter it has one."""
        [lacks] = self._ask(where, [number not in self._examples])
        if lacks:
            own = self._examples.get(number)
            given = [each for each in gather(own and Packed.of(own)) if each is not None]
            if errors := [each.error for each in given if each.error]:
                raise PlanError(
                    f"idle_towers: what {self._names[number]} was called with cannot be sent to ranks that saw no "
                    f"input of it yet ({errors[0]}); give each rank an example: {EXAMPLE} on that module"
                )
            self._examples.setdefault(number, min((each.open() for each in given), key=lambda each: each.num_elements))
        self._known_to_all.add(number)

    def _keep_example(self, number: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        known = self._examples.get(number)
        if known is None or known.num_elements > sum(each.numel() for each in tensors_in((args, kwargs))):
            self._examples[number] = _Example.seen(args, kwargs)

    def _run_idle(self, number: int, has_gradient: bool) -> None:
        tower, name = self.modules[number], self._names[number]
        args, kwargs = self._examples[number].arguments(self._device)
        if has_gradient:
            args, kwargs = _with_main(args, kwargs, _as_trained) or (args, kwargs)
        self._is_idle = True
        try:
            with _without_statistics(tower):
                output = tower(*args, **kwargs)
        except Exception as error:
            error.add_note(f"idle_towers ran {name} on an example, as only other ranks have an input for it")
            raise
        finally:
            self._is_idle = False
        if number not in self._checked:
            if not all(bool(each.isfinite().all()) for each in tensors_in(output) if each.is_floating_point()):
                raise ComposerFSDP2Error(
                    f"idle_towers: {name} gives NaN or infinity for an example of zeros, and so would its gradients; "
                    f"set {EXAMPLE} on that module to arguments that it computes finite values of"
                )
            self._checked.add(number)


def _with_main(
    args: tuple[Any, ...], kwargs: dict[str, Any], change: Callable[[torch.Tensor], torch.Tensor]
) -> _Arguments | None:
    """The arguments with a change to the tensor that a part computes with; None where there is none.

    Masks and positions are no such tensors.
    """
    places: list[int | str] = [number for number, each in enumerate(args) if is_floating(each)]
    places += [key for key, each in kwargs.items() if is_floating(each) and not key.endswith(("mask", "positions"))]
    if not places:
        return None
    given: dict[int | str, Any] = dict(enumerate(args))
    given.update(kwargs)
    place = next((each for each in places if given[each].requires_grad), places[0])
    given[place] = change(given[place])
    return tuple(given[number] for number in range(len(args))), {key: given[key] for key in kwargs}


def _as_trained(tensor: torch.Tensor) -> torch.Tensor:
    """What comes from a part that is trained, as on another rank: a unit whose inputs need no gradients ends its
    backward later than one whose inputs do."""
    return tensor.detach().requires_grad_()


def _connect_to_all(output: Any, others: Sequence[torch.Tensor]) -> Any:
    """An output of which any tensor may be the loss."""
    return with_tensors(output, lambda each: connect(each, others) if each.is_floating_point() else each)


@contextmanager
def _without_statistics(tower: nn.Module) -> Iterator[None]:
    """No batch norm learns from an example what images are like."""
    with ExitStack() as stack:
        for each in tower.modules():
            if isinstance(each, BatchNorm) and each.training:
                stack.enter_context(replaced(each, "training", False))
        yield


# ---------------------------------------------------------------------------------------------------------------------
# Examples


@dataclass(frozen=True, slots=True, kw_only=True)
class _Like:
    """A tensor of an example: zeros, or ``values``."""

    shape: torch.Size
    dtype: torch.dtype
    stays_on_cpu: bool
    values: torch.Tensor | None = None

    def made(self, device: torch.device) -> torch.Tensor:
        device = torch.device("cpu") if self.stays_on_cpu else device
        if self.values is not None:
            return self.values.to(device)
        return torch.zeros(self.shape, dtype=self.dtype, device=device)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Example:
    """What a tower is called with, with a ``_Like`` in the place of each tensor."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    num_elements: int

    @staticmethod
    def seen(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> "_Example":
        """With zeros, and the numbers of images, sizes and the like as they are."""

        def like(tensor: torch.Tensor) -> _Like:
            is_value = not tensor.is_floating_point()
            values = tensor.detach().clone() if is_value else None
            on_cpu = tensor.device.type == "cpu"
            return _Like(shape=tensor.shape, dtype=tensor.dtype, stays_on_cpu=on_cpu, values=values)

        num_elements = sum(each.numel() for each in tensors_in((args, kwargs)))
        return _Example(
            args=with_tensors(args, like), kwargs=with_tensors(dict(kwargs), like), num_elements=num_elements
        )

    @staticmethod
    def given(inputs: torch.Tensor | tuple[Any, ...] | Mapping[str, Any]) -> "_Example":
        """As it is, on the model's device."""

        def like(tensor: torch.Tensor) -> _Like:
            return _Like(shape=tensor.shape, dtype=tensor.dtype, stays_on_cpu=False, values=tensor.detach())

        args: tuple[Any, ...] = inputs if isinstance(inputs, tuple) else ()
        args = (inputs,) if isinstance(inputs, torch.Tensor) else args
        kwargs = dict(inputs) if isinstance(inputs, Mapping) else {}
        return _Example(
            args=with_tensors(args, like), kwargs=with_tensors(kwargs, like), num_elements=-1
        )  # none is preferred

    def arguments(self, device: torch.device) -> _Arguments:
        def made(like: _Like) -> torch.Tensor:
            return like.made(device)

        return with_tensors(self.args, made, kind=_Like), with_tensors(dict(self.kwargs), made, kind=_Like)
