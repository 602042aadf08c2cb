"""A unit's inputs and outputs: every container that FSDP1 traversed trains; others raise."""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple
from weakref import ref

import pytest
import torch
import torch.distributed as dist
from support.cases import all_of, for_each
from support.comparing import full_parameters
from support.models import Chain, Running
from support.on_ranks import on_ranks
from support.ranks import run_ranks
from support.training import FULL, HSDP_2X2, sgd, train_alike
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision
from torch.distributed.fsdp.wrap import CustomPolicy
from torch.distributed.tensor import DTensor
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import register_pytree_node

from composer_fsdp2 import clip_grad_norm_, prepare_fully_shard
from composer_fsdp2._torch.reset import reset_after_error
from composer_fsdp2._torch.tensor_tree import map_tensors, tensors_in
from composer_fsdp2.errors import PlanError
from composer_fsdp2.estimate._torch.counting import Collectives

WIDTH = 6


@dataclass
class Out:
    hidden: Any
    name: str = "out"


@dataclass(frozen=True, slots=True)
class Frozen:
    hidden: Any


@dataclass
class Checked:
    """A field that is not a constructor argument: FSDP1's ``dataclasses.replace`` raises for it."""

    hidden: Any
    rows: int = field(init=False)

    def __post_init__(self) -> None:
        self.rows = len(self.hidden)


@dataclass
class Items(OrderedDict[str, Any]):
    """Like transformers' ModelOutput: a field is also an item. It is not registered with pytree."""

    hidden: Any = None

    def __post_init__(self) -> None:
        OrderedDict.__setitem__(self, "hidden", self.hidden)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self:
            OrderedDict.__setitem__(self, name, value)
        super().__setattr__(name, value)


class Pair(NamedTuple):
    first: Any
    hidden: Any


class MorePair(Pair):
    """A subclass of a named tuple, which pytree does not traverse."""


class Sub(dict[str, Any]):
    pass


class Unset(Mapping[str, Any]):
    """Like OmegaConf's, with a missing value."""

    def __getitem__(self, key: str) -> Any:
        raise ValueError(f"{key} is not set")

    def __iter__(self) -> Iterator[str]:
        return iter(["unset"])

    def __len__(self) -> int:
        return 1


Form = tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]
# Functions that put a tensor into a container and get it out.
IN_FSDP1: dict[str, Form] = {
    "tensor": (lambda h: h, lambda out: out),
    "dataclass": (Out, lambda out: out.hidden),
    "frozen dataclass with slots": (Frozen, lambda out: out.hidden),
    "dataclasses in a list in a dict": (
        lambda h: {"a": [Out(None), Out((Out(h), 1))]},
        lambda out: out["a"][1].hidden[0].hidden,
    ),
    "OrderedDict": (lambda h: OrderedDict(a=None, b=h), lambda out: out["b"]),
    "dict of a class": (lambda h: Sub(b=h), lambda out: out["b"]),
    "named tuple": (lambda h: Pair(1, h), lambda out: out.hidden),
    "class below a named tuple": (lambda h: MorePair("a", h), lambda out: out.hidden),
    "set": (lambda h: {h}, lambda out: next(iter(out))),
    "PackedSequence": (
        lambda h: pack_padded_sequence(h, torch.tensor([3, 2]), batch_first=True),
        lambda out: pad_packed_sequence(out, batch_first=True)[0],
    ),
    "beside a mapping that cannot be read": (lambda h: (h, Unset()), lambda out: out[0]),
}
FORMS = IN_FSDP1 | {
    "dataclass with a field that is computed": (Checked, lambda out: out.hidden),
    "dataclass that is a mapping": (Items, lambda out: out["hidden"]),
    "mapping that cannot be changed": (  # not cast, as under FSDP1
        lambda h: MappingProxyType({"a": 1, "b": h}),
        lambda out: out["b"],
    ),
}


LAYERS = {"layers.0": True, "layers.1": True}


def linear() -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH)


class Layer(nn.Module):
    """A unit that takes and returns a container, as a positional and as a keyword argument."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.fc, self.gate = linear(), linear()
        self.form = form
        self.dtypes: list[torch.dtype] = []

    def forward(self, given: Any, *, named: Any) -> Any:
        pack, unpack = FORMS[self.form]
        x = unpack(given)
        self.dtypes += [x.dtype, unpack(named).dtype]
        return pack(x + torch.tanh(self.fc(x)) * self.gate(unpack(named)))


class Encoder(nn.Module):
    """A root: two units, and its own parameters."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.embed = linear()
        self.layers = nn.ModuleList([Layer(form), Layer(form)])
        self.head = linear()
        self.form = form

    def forward(self, given: Any) -> Any:
        pack, unpack = FORMS[self.form]
        x = pack(self.embed(unpack(given)))
        for layer in self.layers:
            x = layer(x, named=x)
        return pack(self.head(unpack(x)))

    def fsdp_wrap_fn(self, module: nn.Module) -> bool:
        return isinstance(module, Layer)

    activation_checkpointing_fn = fsdp_wrap_fn


def model_of(form: str) -> nn.Module:
    """It takes and returns tensors, and its encoder containers."""
    pack, unpack = FORMS[form]
    return Running(lambda model, x: unpack(model.encoder(pack(x))), encoder=Encoder(form))


class FlatteningLSTM(nn.LSTM):
    """Emulates cuDNN on the CPU, where torch's ``flatten_parameters`` does nothing: one buffer for all weights."""

    def flatten_parameters(self) -> None:
        weights = self._flat_weights
        if any(isinstance(each, DTensor) for each in weights):
            return
        with torch.no_grad():
            flat = torch.cat([each.reshape(-1) for each in weights])
            for each, part in zip(weights, flat.split([each.numel() for each in weights]), strict=True):
                each.set_(part.view_as(each))


def run_lstm(root: Any, x: torch.Tensor) -> torch.Tensor:
    """On rows of different lengths."""
    packed: PackedSequence = root.lstm(pack_padded_sequence(root.embed(x), torch.tensor([3, 2]), batch_first=True))[0]
    return pad_packed_sequence(packed, batch_first=True)[0]


def recurrent(kind: type[nn.LSTM] = nn.LSTM) -> nn.Module:
    """Its unit is an LSTM."""
    return Running(run_lstm, {"lstm": True}, embed=linear(), lstm=kind(WIDTH, WIDTH, batch_first=True))


def in_place() -> nn.Module:
    """A unit that first writes to its input."""
    return Running(lambda unit, x: unit.fc(unit.act(x)), act=nn.ReLU(inplace=True), fc=linear())


def residual(*, is_view: bool) -> nn.Module:
    """Uses tensors after its units have written to them or to their views."""

    def run(root: Any, x: torch.Tensor) -> torch.Tensor:
        x = root.embed(x)
        for layer in root.layers:
            y = x.transpose(0, 1) if is_view else x
            x = x + layer(y).reshape(x.shape) * 0.5 + y.sum()
        return x

    return Running(run, LAYERS, embed=linear(), layers=nn.ModuleList([in_place(), in_place()]))


def viewed() -> nn.Module:
    """A root that returns a view, which the loss writes to."""
    return Running(lambda root, x: root.second(root.first(x)).transpose(0, 1), first=linear(), second=linear())


class Halved(Chain):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = super().forward(x)
        x *= 0.5
        return x


def compiled() -> nn.Module:
    """Its units return dataclasses and are compiled."""
    model = model_of("dataclass")
    for layer in model.encoder.layers:
        layer.compile(backend="aot_eager")
    return model


def whole(encoder: Callable[[], nn.Module], kind: type[Chain] = Chain) -> Chain:
    """Its child is the root, and takes and returns tensors."""
    return kind(encoder=encoder())


OTHERS = {
    "an LSTM as unit": partial(whole, recurrent),
    "its input written to": partial(whole, partial(residual, is_view=False)),
    "a view written to": partial(whole, partial(residual, is_view=True)),
}


def adding(add: Callable[[Any, torch.Tensor], None]) -> nn.Module:
    """A unit that adds an auxiliary loss to a container in its input."""

    def run(unit: Any, x: torch.Tensor, losses: Any) -> torch.Tensor:
        y = x + torch.tanh(unit.fc(x))
        add(losses, y.square().mean())
        return y

    return Running(run, fc=linear())


def written() -> nn.Module:
    """A unit that writes to its first input."""

    def run(unit: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x.mul_(1.5)
        return unit.fc(y * 1)

    return Running(run, fc=linear())


def skipped() -> nn.Module:
    """A unit that returns its input, like a block skipped by stochastic depth, and a tensor of its own."""
    return Running(lambda unit, x: {"hidden": x, "own": unit.fc(x * 1)}, fc=linear())


def calling(make: Callable[[], nn.Module], call: Callable[[Any, torch.Tensor], torch.Tensor]) -> nn.Module:
    """A root that calls its units with ``call``."""

    def run(root: Any, x: torch.Tensor) -> torch.Tensor:
        return root.head(call(root.layers, root.embed(x)))

    return Running(run, LAYERS, embed=linear(), layers=nn.ModuleList([make(), make()]), head=linear())


# An empty container or one with a tensor, a function that adds a loss, and one that sums.
CONTAINERS: dict[
    str, tuple[Callable[[torch.Tensor], Any], Callable[[Any, torch.Tensor], Any], Callable[[Any], Any]]
] = {
    "a list": (lambda x: [], list.append, sum),
    "a dict": (
        lambda x: {"first": x},  # its tensor passes through the unit
        lambda losses, loss: losses.update({str(len(losses)): loss}),
        lambda losses: sum(losses.values()),
    ),
    "a set": (lambda x: {x.mean()}, set.add, sum),
    "a field": (
        lambda x: Out(x.mean()),
        lambda losses, loss: setattr(losses, "hidden", losses.hidden + loss),
        lambda losses: losses.hidden,
    ),
}


def add_to(name: str, layers: Any, x: torch.Tensor) -> torch.Tensor:
    make, _, total = CONTAINERS[name]
    losses = make(x)
    first = set() if name == "a field" else set(tensors_in(losses))
    for number, layer in enumerate(layers):
        x = layer(x, losses=losses) if number else layer(x, losses)
    assert first <= set(tensors_in(losses)), "what the caller put in is another tensor"
    return x * (1 + total(losses))


def write_twice(layers: Any, x: torch.Tensor) -> torch.Tensor:
    for layer in layers:
        x = x * layer(x, x)
    return x


def write_view(layers: Any, x: torch.Tensor) -> torch.Tensor:
    for layer in layers:
        x = x * 1
        x = x + layer(x[:, :2], x)
    return x


def write_slices(layers: Any, x: torch.Tensor) -> torch.Tensor:
    x = x * 1
    parts = [layer(x[:, number : number + 1], x.detach()) for number, layer in enumerate(layers)]
    return x + sum(parts)


def add_to_skipped(layers: Any, x: torch.Tensor) -> torch.Tensor:
    for layer in layers:
        out = layer(x)
        out["hidden"] += out["own"]  # which is x
        x = torch.tanh(x) * 1
    return x


OTHERS |= {
    f"{name} added to": partial(whole, partial(calling, partial(adding, CONTAINERS[name][1]), partial(add_to, name)))
    for name in CONTAINERS
}
OTHERS |= {
    "a tensor passed twice and written to": partial(whole, partial(calling, written, write_twice)),
    "a view written to beside its base": partial(whole, partial(calling, written, write_view)),
    "two slices written to": partial(whole, partial(calling, written, write_slices)),
    "an input returned and written to": partial(whole, partial(calling, skipped, add_to_skipped)),
}


# --- trained with our code, with FSDP1, and in one process


def ours(model: Any, optimizer: torch.optim.Optimizer | None, **config: Any) -> None:
    prepare_fully_shard(model, optimizer, FULL | config, device="cpu")


def fsdp1(model: Any, _: Any = None, **options: Any) -> None:
    model.encoder = FullyShardedDataParallel(
        model.encoder,
        auto_wrap_policy=CustomPolicy(model.encoder.fsdp_wrap_fn),
        device_id=torch.device("cpu"),
        use_orig_params=True,
        **options,
    )


Shard = Callable[..., None]


def batch(seed: int) -> torch.Tensor:
    return torch.randn(2, 3, WIDTH, generator=torch.Generator().manual_seed(seed))


def assert_trains(build: Callable[[], nn.Module], *, num_steps: int = 2, **config: Any) -> None:
    """Trains as in one process with all batches, in float64; an evaluation is a forward without gradients."""
    torch.manual_seed(0)
    model = train_alike(build, config, batch, num_steps=num_steps)
    with torch.no_grad():
        evaluated = model(batch(0))
    torch.testing.assert_close(evaluated, model(batch(0)), rtol=1e-12, atol=1e-14)
    with torch.no_grad():
        torch.testing.assert_close(evaluated, model(batch(0)), rtol=1e-12, atol=1e-14)


RECOMPUTED = {"activation_checkpointing": True, "activation_checkpointing_reentrant": False}


KEPT = {"sharding_strategy": "SHARD_GRAD_OP", "backward_prefetch": "NONE", "forward_prefetch": True}
CASES: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {
    **{name: (partial(model_of, name), {}) for name in FORMS},
    **{name: (build, {}) for name, build in OTHERS.items()},
    "a view that the loss writes to": (partial(whole, viewed, Halved), {}),
    "an LSTM whose weights cuDNN moves": (partial(whole, partial(recurrent, FlatteningLSTM)), {}),
    "dataclass, recomputed": (partial(model_of, "dataclass"), RECOMPUTED),
    "dataclass, offloaded": (partial(model_of, "dataclass"), {"cpu_offload": True}),
    "PackedSequence, kept": (partial(model_of, "PackedSequence"), KEPT),
    "set, recomputed": (partial(model_of, "set"), RECOMPUTED),
    "set, NO_SHARD": (partial(model_of, "set"), {"sharding_strategy": "NO_SHARD"}),
}


def check_cases(names: list[str], config: dict[str, Any]) -> None:
    for_each(lambda name: assert_trains(CASES[name][0], **CASES[name][1], **config), {name: (name,) for name in names})


def test_all_that_fsdp1_walked_trains():
    """A root that returns a dataclass would silently not train; such a block would end the run."""
    run_ranks(check_cases, 2, [*CASES], {"num_steps": 1})


@pytest.mark.slow
@on_ranks(2)
def test_compiled_units_train(folder: str) -> None:
    """A compiled block that returns a dataclass would end the run."""
    assert_trains(compiled)


def test_replicas_train():
    """Gradients of a block that returns a dataclass would not be averaged over replicas."""
    run_ranks(check_cases, 4, ["dataclass", "PackedSequence", "an LSTM as unit"], HSDP_2X2)


# --- casts


def dtypes_seen(form: str, shard: Shard, **options: Any) -> list[torch.dtype]:
    torch.manual_seed(0)
    model = model_of(form)
    layers = list(model.encoder.layers)
    shard(model, None, **options)
    model(batch(0)).sum().backward()
    return [dtype for layer in layers for dtype in layer.dtypes]


def check_casts() -> None:
    """A block with bf16 weights would get fp32 from a dataclass, and raise."""
    low = torch.bfloat16
    theirs = MixedPrecision(param_dtype=low, reduce_dtype=low, cast_forward_inputs=True)
    own = {"mixed_precision": theirs}
    for form in IN_FSDP1.keys() - {"PackedSequence"}:  # FSDP1 does not cast it, and the unit raises
        found, expected = dtypes_seen(form, ours, **own), dtypes_seen(form, fsdp1, mixed_precision=theirs)
        assert found == expected == [low] * 4, (form, found, expected)
    for form in FORMS.keys() - IN_FSDP1.keys() - {"mapping that cannot be changed"} | {"PackedSequence"}:
        assert dtypes_seen(form, ours, **own) == [low] * 4, form


# --- outputs without a hook


class Plain:
    def __init__(self, hidden: torch.Tensor) -> None:
        self.hidden = hidden


class Slots:
    __slots__ = ("hidden",)

    def __init__(self, hidden: torch.Tensor) -> None:
        self.hidden = hidden


class Hiding(nn.Module):
    """Two layers that are in one unit, or in a root alone."""

    def __init__(self, returned: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.first, self.second = linear(), linear()
        self.returned = returned

    def forward(self, x: torch.Tensor) -> Any:
        return self.returned(self.second(torch.tanh(self.first(x))))


def around(run: Callable[[Any, torch.Tensor], torch.Tensor]) -> nn.Module:
    return Running(run, {"inside": True}, inside=Hiding(Plain), last=linear())


def check_guard() -> None:
    """With an output of a class that cannot be traversed, a root would silently not train."""
    model = Chain(encoder=Hiding(Plain))
    ours(model, None)
    with pytest.raises(PlanError, match=r"the root unit \(Hiding\) returned Plain, .* in Plain\.hidden.*dataclass"):
        model(batch(0))

    model = Chain(encoder=around(lambda root, x: root.last(root.inside(x).hidden)))
    ours(model, None)
    with pytest.raises(PlanError, match=r"unit inside \(Hiding\) returned Plain"):
        model(batch(0))
    reset_after_error(model.encoder)

    model = Chain(encoder=Hiding(Slots))
    ours(model, None)
    with pytest.raises(PlanError, match=r"returned Slots, .* in Slots\.hidden"):
        model(batch(0))

    # An output hidden in a closure, or not returned, cannot be detected; then the code after backward raises.
    elsewhere: list[torch.Tensor] = []
    for returned in (lambda hidden: lambda: hidden, elsewhere.append):
        for after in (lambda model: model(batch(0)), lambda model: clip_grad_norm_(model, 1.0), nn.Module.state_dict):
            model = Chain(encoder=Hiding(returned))
            ours(model, None)
            elsewhere.clear()
            output = model(batch(0))
            (elsewhere[0] if output is None else output()).sum().backward()
            with pytest.raises(PlanError, match=r"parameters of the root unit \(Hiding\) without passing"):
                after(model)


def check_legitimate() -> None:
    """Outputs without a gradient, or with one that the unit does not need, train normally."""
    for returned in (
        lambda hidden: None,
        lambda hidden: hidden.argmax(-1),
        lambda hidden: Plain(hidden.detach()),
        lambda hidden: (Plain(hidden), hidden),
    ):
        model = Chain(encoder=Hiding(returned))
        ours(model, None)
        for _ in range(2):
            model(batch(0))
            with torch.no_grad():
                model(batch(0))

    # Gradients that wait for a later microbatch, and forwards without a backward.
    model = Chain(encoder=Hiding(lambda hidden: hidden))
    ours(model, None, sharding_strategy="SHARD_GRAD_OP")
    for is_last in (False, True):
        model.encoder.set_requires_gradient_sync(is_last)
        model.encoder.set_reshard_after_backward(is_last)
        model(batch(0)).sum().backward()
        for _ in range(2):
            model(batch(0))

    # No parameter of the unit is trained, and its parameters are unsharded.
    frozen = Chain(encoder=around(lambda root, x: root.inside(root.last(x)).hidden))
    frozen.encoder.inside.requires_grad_(False)
    ours(frozen, None, sharding_strategy="SHARD_GRAD_OP")
    for _ in range(2):
        frozen(batch(0)).sum().backward()


class Cache:
    """Like a KV cache: pytree knows it, FSDP1 did not."""

    def __init__(self, keys: list[torch.Tensor] | None = None) -> None:
        self.keys, self.num_updates = keys or [], 0

    def update(self, key: torch.Tensor) -> None:
        self.keys.append(key)
        self.num_updates += 1


def run_caching(root: Any, x: torch.Tensor, cache: Cache, seen: list[torch.Tensor]) -> torch.Tensor:
    for layer in root.layers:
        x = layer(x)
        cache.update(x)
        seen.append(x)
    return x


def check_caches() -> None:
    """Cached decoding, and auxiliary losses in a list, would silently lose a unit's additions."""
    with contextlib.suppress(ValueError):  # from another test on these ranks
        register_pytree_node(
            Cache,
            lambda cache: ([cache.keys], None),
            lambda children, _: Cache(*children),
            serialized_type_name="Cache",
        )
    low = torch.bfloat16
    cast = {"mixed_precision": MixedPrecision(param_dtype=low, reduce_dtype=low, cast_forward_inputs=True)}
    for shard, options in ((ours, {}), (ours, cast), (fsdp1, {})):
        for is_training in (True, False):
            model = Chain(encoder=Running(run_caching, layers=nn.ModuleList([linear(), linear()])))
            shard(model, None, **options)
            given = torch.ones(2, WIDTH, requires_grad=is_training) * 1
            cache, seen = Cache([given]), []
            with torch.set_grad_enabled(is_training):
                model.encoder(batch(0)[0][:2], cache, seen)
            assert cache.num_updates == len(seen) == 2 and len(cache.keys) == 3, (shard, options, is_training)
            assert cache.keys[0] is given  # the caller's input


def test_values_without_a_change_are_the_same_objects():
    """A cache that a model passes along would be a new object after each block."""
    for pack, _ in FORMS.values():
        value = pack(torch.ones(2, 3, WIDTH))
        assert map_tensors(value, lambda each: each) is value
        assert map_tensors(value, lambda each: each + 1) is not value
        assert [each.dtype for each in tensors_in(value)].count(torch.float32) == 1


# --- autocast


class Copies(TorchDispatchMode):
    """The bytes of living bf16 copies of weights: current and peak."""

    def __init__(self, shapes: set[torch.Size]) -> None:
        super().__init__()
        self.shapes = shapes
        self.made: list[tuple[Any, int]] = []  # a weak reference to each storage, and its bytes
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and result.dtype is torch.bfloat16 and result.shape in self.shapes:
            self.made.append((ref(result.untyped_storage()), result.nbytes))
            self.peak = max(self.peak, self.alive)
        return result

    @property
    def alive(self) -> int:
        return sum(num_bytes for storage, num_bytes in self.made if storage() is not None)


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):  # a cached copy would sum both gradients in bf16
            x = x + self.down(torch.tanh(self.up(x)))
        return x


def mlps() -> nn.Module:
    blocks = {name: Mlp() for name in "abc"}
    for block in blocks.values():
        block._activation_checkpointing = True
    return Chain(encoder=Chain(dict.fromkeys(blocks, True), **blocks, head=nn.Linear(16, 24)))


def copies_alive(shard: Shard, *, is_recomputed: bool) -> dict[str, Any]:
    """Bytes after and during a forward under autocast, by whether it was an evaluation; and the parameters
    afterwards."""
    torch.manual_seed(0)
    torch.set_autocast_cache_enabled(True)  # another test's error may have ended a forward on these ranks
    model = mlps()
    shapes, optimizer = {each.shape for each in model.parameters() if each.dim() > 1}, sgd(model)
    if is_recomputed and shard is fsdp1:
        apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, Mlp))
    shard(model, optimizer, **(RECOMPUTED if is_recomputed and shard is ours else {}))
    optimizer = sgd(model) if shard is fsdp1 else optimizer
    seen: dict[str, Any] = {}
    for is_training in (False, True, True):
        x = torch.randn(7, 16, generator=torch.Generator().manual_seed(dist.get_rank()))
        with torch.autocast("cpu", torch.bfloat16), torch.set_grad_enabled(is_training), Copies(shapes) as copies:
            loss = model(x).square().mean()
            seen[f"{is_training}: after forward, at most"] = copies.alive, copies.peak
            assert torch.is_autocast_cache_enabled()  # the rest of the run may use it
        if is_training:
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return seen | full_parameters(model)


def check_copies() -> None:
    """Otherwise every rank would keep all weights in bf16 until the forward ends: 14 GB for 7B parameters."""
    for is_recomputed in (True, False):
        found, expected = (copies_alive(shard, is_recomputed=is_recomputed) for shard in (ours, fsdp1))
        assert found.keys() == expected.keys()
        for name, value in found.items():
            if isinstance(value, tuple):
                assert value == expected[name], (is_recomputed, name, value, expected[name])
            else:
                assert torch.equal(value, expected[name]), name
        assert found["False: after forward, at most"] == (0, 16 * 32 * 2)


def check_cache_after_an_error() -> None:
    """Otherwise the script's other models would cast their weights each time under autocast."""
    model = Chain(encoder=Hiding(lambda hidden: hidden.no_such_attribute))
    ours(model, None)
    with pytest.raises(AttributeError):
        model(batch(0))
    assert not torch.is_autocast_cache_enabled()
    reset_after_error(model.encoder)
    assert torch.is_autocast_cache_enabled()


@on_ranks(2)
def test_inputs_and_outputs(folder: str) -> None:
    """Casts of tensors in containers, outputs without a possible backward hook, and caches that units add to."""
    all_of(check_casts, check_guard, check_legitimate, check_caches)


@on_ranks(2)
def test_autocast_keeps_no_copies_of_weights(folder: str) -> None:
    """autocast's cache is off within a unit, and on again afterwards, also after an error."""
    all_of(check_copies, check_cache_after_an_error)


# --- inputs returned by a unit


class Remembering(nn.Module):
    """Appends to a cache, as attention does with keys and values, and returns all of it, as some transformers models
    do."""

    def __init__(self, returns_cache: bool) -> None:
        super().__init__()
        self.linear, self.returns_cache = linear(), returns_cache

    def forward(self, x: torch.Tensor, cache: list[torch.Tensor]) -> tuple[torch.Tensor, Any]:
        cache.append(self.linear(x))
        return torch.tanh(cache[-1]), cache if self.returns_cache else None


def run_remembering(model: Any, x: torch.Tensor) -> torch.Tensor:
    cache: list[torch.Tensor] = []
    for each in model.children():
        x, _ = each(x, cache)
    return x


@on_ranks(2)
def test_a_cache_that_layers_hand_on_has_none_gathered_again(folder: str):
    """Otherwise the backward of each layer would unshard all later layers again and keep the whole model unsharded."""

    def counts(returns_cache: bool) -> dict[str, dict[str, int]]:
        layers = {name: Remembering(returns_cache) for name in "abcd"}
        model = whole(lambda: Running(run_remembering, dict.fromkeys(layers, True), **layers))
        ours(model, None)
        for _ in range(2):
            with Collectives() as sent:
                model(batch(0)).sum().backward()
        return sent.counts

    assert counts(True) == counts(False)
