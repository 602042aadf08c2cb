"""Random models as values: a ``Tree`` describes a model, ``build`` constructs it, ``trees`` generates one.

A tree can be pickled, so that a failing example shrinks in the parent process and each rank builds it again. Every tree
runs: its forward maps a tensor of [batch, width] to one of the same shape.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import example
from hypothesis import strategies as st
from torch import nn

BATCH_SIZE = 4
DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}
# Each is a prefix of the next, like the paths of modules that do not contain each other.
NAMES = ("a", "ab", "a_b", "abc")


def found(arguments: Callable[[Tree], tuple[Any, ...]]) -> Callable[[Any], Any]:
    """A decorator that always tries the trees of ``FOUND`` as well; ``arguments`` are the test's arguments for one of
    them."""

    def decorate(test: Any) -> Any:
        for tree in FOUND.values():
            test = example(*arguments(tree))(test)
        return test

    return decorate


# Descriptions ---------------------------------------------------------------------------------------------------------


class _ShortRepr:
    """Shows only values that differ from the defaults, to keep failing examples readable."""

    def __repr__(self) -> str:
        fields = dataclasses.fields(self)  # type: ignore[arg-type]
        written = {field.name: getattr(self, field.name) for field in fields}
        shown = [f"{f.name}={written[f.name]!r}" for f in fields if written[f.name] != f.default]
        return f"{type(self).__name__}({', '.join(shown)})"


@dataclass(frozen=True, kw_only=True, repr=False)
class Part(_ShortRepr):
    """One module: its kind, its children and its FSDP settings.

    Args:
        children: Of a node, list, dict or sequence.
        order: Children that a node runs, in this order; None for each once. By number, modulo their number.
        index: Of ``again``: the number of an earlier module; else the hidden width of an MLP.
        has_weight: Whether a node has a weight beside its children.
        label: Modules with equal labels share their first parameter, where shape and dtype allow it.
        frozen: Whether the parameters that it registers need no gradient.
        other_dtype: Whether these have the tree's other dtype (one of them, for an MLP).
        answer: The wrap function's return value for this module, called on the direct child above it.
        wrap: Its ``_fsdp_wrap``; None for none.
        is_checkpointed: Its ``_activation_checkpointing``, where it can be called.
    """

    kind: str
    children: tuple[Part, ...] = ()
    order: tuple[int, ...] | None = None
    index: int = 0
    has_weight: bool = False
    label: str = ""
    frozen: bool = False
    other_dtype: bool = False
    answer: Any = False
    wrap: bool | None = None
    is_checkpointed: bool = False


@dataclass(frozen=True, kw_only=True, repr=False)
class Tree(_ShortRepr):
    """A whole model.

    Args:
        top: The model itself, a node; its children are the direct ones.
        wrapped: Kinds whose modules the wrap function all chooses.
        ignored: Modules in ``ignored_modules``, by number, modulo all but the model itself.
    """

    top: Part
    width: int = 3
    wrapped: tuple[str, ...] = ()
    ignored: tuple[int, ...] = ()
    dtype: str = "float64"
    other: str = "float32"

    def __iter__(self) -> Iterator[Part]:
        waiting = [self.top]
        while waiting:
            part = waiting.pop()
            yield part
            waiting.extend(part.children)


# Modules --------------------------------------------------------------------------------------------------------------


def _weight(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape, dtype=torch.float64))


class _Filled(nn.Module):
    """A module whose parameters and buffers have values computed from their shapes."""

    def reset_parameters(self) -> None:
        for tensor in (*self.parameters(recurse=False), *self.buffers(recurse=False)):
            fill(tensor, seed=0)


def fill(tensor: torch.Tensor, seed: int) -> None:
    """Distinct values between -1 and 1."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.rand(tensor.shape, generator=generator, dtype=torch.float64) * 2 - 1
    tensor.data.copy_(values)


def _mix(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x.to(weight.dtype) @ weight).to(x.dtype)


class Square(_Filled):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = _weight(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + _mix(x, self.weight)


class Mlp(_Filled):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.inner = _weight(width, hidden)
        self.outer = _weight(hidden, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + _mix(_mix(x, self.inner), self.outer)


class Scale(_Filled):
    """A weight for each feature, or (``()``) one scalar, with a persistent and a non-persistent buffer."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.weight = _weight(*shape)
        self.register_buffer("offset", torch.empty(shape, dtype=torch.float64))
        self.register_buffer("factor", torch.empty((1,), dtype=torch.float64), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scaled = x.to(self.weight.dtype) * (1 + self.weight / 4)
        return (scaled + self.offset * self.factor).to(x.dtype)


class _LayerNorm(_Filled, nn.LayerNorm):
    """The values depend on the shape only, so they match those of a tied parameter of another module."""


class Norm(nn.Module):
    """A residual around a norm; a large ``eps`` avoids magnifying rounding errors."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.norm(x.to(self.norm.weight.dtype)).to(x.dtype)


class Bag(nn.ParameterList):
    """Parameters without a forward: the parent module uses them."""

    def __init__(self, width: int) -> None:
        super().__init__([_weight(width), _weight(1, width)])

    def reset_parameters(self) -> None:
        for parameter in self:
            fill(parameter, seed=0)


class Node(_Filled):
    """Runs its children, also those inside containers; may have its own weight."""

    def __init__(self, width: int | None, order: tuple[int, ...] | None) -> None:
        super().__init__()
        self.order = order
        self.weight = None if width is None else _weight(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.weight is not None:
            x = x + _mix(x, self.weight)
        children = list(self._modules.values())  # named_children would omit a module's second place
        order = range(len(children)) if self.order is None else self.order
        for i in order if children else ():
            x = _run(children[i % len(children)], x)
        return x


def _run(module: nn.Module | None, x: torch.Tensor) -> torch.Tensor:
    assert module is not None
    if isinstance(module, Bag):
        for weight in module:
            x = (x.to(weight.dtype) * (1 + weight / 4)).to(x.dtype)
    elif isinstance(module, nn.ModuleList | nn.ModuleDict):
        for child in module._modules.values():
            x = _run(child, x)
    else:
        x = module(x)
    return x


# Building -------------------------------------------------------------------------------------------------------------


def build(tree: Tree, device: str = "cpu") -> nn.Module:
    """The model described by ``tree``, always with the same values."""
    with torch.device(device):
        model = _build(tree.top, tree, [])
    for child in model.children():
        child.fsdp_wrap_fn = lambda module: getattr(module, "given_answer", False)
    _tie(model)
    if device != "meta":
        for seed, tensor in enumerate((*model.parameters(), *model.buffers())):
            fill(tensor, seed)
    return model


def ignored_modules(tree: Tree, model: nn.Module) -> list[nn.Module]:
    """The modules of ``build(tree)`` to ignore."""
    modules = [module for module in model.modules() if module is not model]
    return [modules[i % len(modules)] for i in tree.ignored if modules]


def _tie(model: nn.Module) -> None:
    shared: dict[tuple[str, torch.Size, torch.dtype], nn.Parameter] = {}
    for module in model.modules():
        name, parameter = next(module.named_parameters(recurse=False), ("", None))
        label = getattr(module, "given_label", "")
        if label and parameter is not None:
            setattr(module, name, shared.setdefault((label, parameter.shape, parameter.dtype), parameter))


def _build(part: Part, tree: Tree, made: list[nn.Module]) -> nn.Module:
    """``made`` contains completed modules only, so no module can contain itself."""
    if part.kind == "again":
        return made[part.index % len(made)] if made else nn.Tanh()
    module = _bare(part, tree)
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(not part.frozen)
        keeps = part.kind == "mlp" and name == "inner"
        parameter.data = parameter.data.to(DTYPES[tree.other if part.other_dtype and not keeps else tree.dtype])
    for labelled in (module, *module.children()):
        labelled.given_label = part.label
    for i, child in enumerate(part.children):
        name = NAMES[i] if part.kind in ("node", "dict") else str(i)
        below = _build(child, tree, made)
        if part.kind == "sequence" and _is_container(below):
            below = nn.Tanh()
        module.add_module(name, below)
    module.given_answer = part.answer or part.kind in tree.wrapped
    if part.wrap is not None:
        module._fsdp_wrap = part.wrap
    if part.is_checkpointed and not _is_container(module):
        module._activation_checkpointing = True
    made.append(module)
    return module


def _bare(part: Part, tree: Tree) -> nn.Module:
    width = tree.width
    match part.kind:
        case "node":
            return Node(width if part.has_weight else None, part.order)
        case "list":
            return nn.ModuleList()
        case "dict":
            return nn.ModuleDict()
        case "sequence":
            return nn.Sequential()
        case "bag":
            return Bag(width)
        case "mlp":
            return Mlp(width, 1 + part.index)
        case "scale":
            return Scale((width,))
        case "scalar":
            return Scale(())
        case "norm":
            return Norm(_LayerNorm(width, eps=1.0))
        case "batch norm":
            return Norm(nn.BatchNorm1d(width, eps=1.0))
        case "empty":
            return nn.Tanh()
        case _:
            assert part.kind == "square", part.kind
            return Square(width)


def _is_container(module: nn.Module) -> bool:
    return isinstance(module, nn.ModuleList | nn.ModuleDict | nn.ParameterList)


# Found ----------------------------------------------------------------------------------------------------------------

_CHOSEN, _SQUARE = Part(kind="square", answer=True), Part(kind="square")
_AGAIN = Part(kind="again")
# Each of these once failed.
FOUND = {
    "a part of one direct child is another one, which runs first": Tree(
        top=Part(kind="node", children=(Part(kind="node", children=(_CHOSEN, _SQUARE)), _AGAIN), order=(1, 0))
    ),
    "a part of one direct child is in one that is left out, which runs first": Tree(
        top=Part(
            kind="node",
            children=(
                Part(kind="list", children=(_CHOSEN,), wrap=False),
                Part(kind="node", children=(_AGAIN, _SQUARE)),
            ),
        )
    ),
    "a unit inside of what is recomputed, which runs twice": Tree(
        top=Part(
            kind="node",
            children=(Part(kind="node", children=(_CHOSEN,), is_checkpointed=True), _SQUARE),
            order=(0, 1, 0),
        )
    ),
}


# Drawing --------------------------------------------------------------------------------------------------------------

# Return values of a wrap function that do not change the numbers that a model computes.
ANSWERS: tuple[Any, ...] = (
    False,
    True,
    {},
    {"reshard_after_forward": False},
    {"reshard_after_forward": True},
    {"reshard_after_forward": 1},
    {"sharding_strategy": "SHARD_GRAD_OP"},
    {"sharding_strategy": "FULL_SHARD"},
    {"backward_prefetch": "NONE"},
    {"backward_prefetch": "BACKWARD_PRE", "forward_prefetch": True},
    {"forward_prefetch": False, "limit_all_gathers": True},
    {"cpu_offload": True},
    {"mixed_precision": "FULL"},
)


@st.composite
def trees(
    draw: st.DrawFn,
    *,
    batch_norms: bool = False,
    checkpointed: bool = False,
    dtypes: tuple[tuple[str, str], ...] = (("float64", "float32"),),
) -> Tree:
    """Nested modules, containers, modules in two places, ties, parameters that are frozen or of another dtype, modules
    that run twice or never, and all settings of wrap functions and ``_fsdp_wrap``.

    Args:
        batch_norms: Whether to generate batch norms, whose results depend on the division of a batch.
        checkpointed: Whether to generate modules with activation checkpointing.
        dtypes: The dtype of most parameters, and that of the others.
    """
    kinds = ["square"] * 4 + ["scale", "mlp", "norm", "bag", "empty", "again", "again", "scalar"]
    kinds += ["batch norm"] * batch_norms
    written = {
        "label": st.sampled_from(["", "", "", "", "x", "y"]),
        "frozen": _seldom(),
        "other_dtype": _seldom() if draw(st.booleans()) else st.just(False),
        "answer": st.sampled_from((False, True)) | st.sampled_from(ANSWERS),
        "wrap": st.sampled_from((None, None, None, None, None, True, False)),
        "is_checkpointed": _seldom() if checkpointed else st.just(False),
    }
    leaf = st.builds(Part, kind=st.sampled_from(kinds), index=st.integers(0, 6), **written)

    def inside(parts: st.SearchStrategy[Part], kinds: str, min_size: int = 0) -> st.SearchStrategy[Part]:
        return st.builds(
            Part,
            kind=st.sampled_from(kinds.split()),
            children=st.lists(parts, min_size=min_size, max_size=len(NAMES)).map(tuple),
            order=_orders(),
            has_weight=_seldom(),
            **written,
        )

    lower = leaf | leaf | inside(leaf, "node list dict sequence")
    middle = leaf | inside(lower, "node node list dict sequence", min_size=1)
    child = inside(middle, "node node node node sequence list", min_size=2)
    top = Part(
        kind="node",
        children=(draw(child), *draw(st.lists(middle, max_size=2))),
        order=draw(_orders()),
        has_weight=draw(_seldom()),
    )
    dtype, other = draw(st.sampled_from(dtypes))
    return Tree(
        top=top,
        width=draw(st.integers(1, 5)),
        wrapped=draw(st.sampled_from([(), *[("square",)] * 3, ("node",), ("square", "scale", "sequence")])),
        ignored=draw(_numbers()),
        dtype=dtype,
        other=other,
    )


def _seldom() -> st.SearchStrategy[bool]:
    return st.sampled_from((False, False, False, False, True))


def _numbers() -> st.SearchStrategy[tuple[int, ...]]:
    none: tuple[int, ...] = ()
    return st.sampled_from([none] * 4) | st.lists(st.integers(0, 12), min_size=1, max_size=2).map(tuple)


def _orders() -> st.SearchStrategy[tuple[int, ...] | None]:
    return st.none() | st.none() | st.lists(st.integers(0, 3), min_size=1, max_size=4).map(tuple)
