"""FSDP1's module attributes that scripts read; other code does not see a wrapped module."""

from __future__ import annotations

import copy
import logging
import operator
from typing import Any

import pytest
import torch
from support.cases import all_of
from support.models import Block, Chain, Model, features, layer
from support.on_ranks import on_ranks
from support.training import FULL
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from composer_fsdp2 import prepare_fully_shard

NAMES = ("module", "_fsdp_wrapped_module", "summon_full_params")


def sharded(config: dict[str, Any] | None = None, model: nn.Module | None = None) -> nn.Module:
    torch.manual_seed(0)
    model = Model(tied=True) if model is None else model
    prepare_fully_shard(model, None, FULL | (config or {}), device="cpu")
    return model


@on_ranks(2, fresh=True)
def test_scripts_written_for_fsdp1_read_on(folder: str) -> None:
    """`trainer.state.model.model.module.config` works, and so do weights under the unit's own summon_full_params. Each
    name logs its replacement once."""
    hints: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: hints.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("composer_fsdp2").addHandler(handler)
    model = sharded()
    root, block = model.decoder, model.decoder.blocks[0]
    assert not hints
    for _ in range(2):
        for unit in (root, block):
            assert unit.module is unit and unit._fsdp_wrapped_module is unit
            assert unit.module.module.forward == unit.forward
            for summon in (
                unit.summon_full_params(unit),
                unit.module.summon_full_params(unit.module, writeback=False),
                unit.summon_full_params(),
                unit.summon_full_params(recurse=False),
                unit._fsdp_wrapped_module.summon_full_params(unit, False, False),
            ):
                with summon:
                    assert all(type(p) is nn.Parameter for p in unit.parameters(recurse=False))
                    assert not any(isinstance(p, DTensor) for p in block.parameters()) or unit is root
        with block.summon_full_params(root, recurse=False):  # a static method: acts on its argument
            assert type(root.embed.weight) is nn.Parameter
            assert isinstance(block.fc_in.weight, DTensor)
    for other in (model, root.embed, root.blocks, nn.Linear(1, 1)):
        for name in NAMES:
            assert not hasattr(other, name), f"{type(other)} {name}"
    assert len(hints) == 3, hints
    for name in NAMES:
        assert sum(f"module.{name} " in hint for hint in hints) == 1, hints


def check_inside_checkpointing_wrappers() -> None:
    """FSDP1's `module` saw through the checkpointing wrapper, so scripts read the block's attributes in either case."""
    config = {"activation_checkpointing": True, "activation_checkpointing_reentrant": False}
    unit = sharded(config).decoder.blocks[0]
    theirs = FullyShardedDataParallel(type(unit).__mro__[2](Block()), device_id=torch.device("cpu"))
    assert type(unit).__name__ == type(theirs._fsdp_wrapped_module).__name__ == "CheckpointWrapper"
    for each in (unit, theirs):
        assert type(each.module) is Block
        assert type(each._fsdp_wrapped_module).__name__ == "CheckpointWrapper"


def unwrapped(model: nn.Module, name: str = "module") -> nn.Module:
    """A common loop in scripts."""
    for _ in range(10):
        if not hasattr(model, name):
            return model
        model = getattr(model, name)
    raise AssertionError(f"no end of {name}")


def check_whoever_asks_is_told_that_nothing_is_wrapped() -> None:
    """A loop that unwraps modules would not end, since the module would be its own wrapper."""
    model = sharded()
    for unit in (model.decoder, model.decoder.blocks[0]):
        for name in ("module", "_fsdp_wrapped_module"):
            assert unwrapped(unit, name) is unit
            assert getattr(unit, name, None) is None
            with pytest.raises(AttributeError, match=name):
                operator.attrgetter(name)(unit)
            with pytest.raises(AttributeError, match=name):
                unit.get_submodule(name)
        assert hasattr(unit, "summon_full_params")


# --- the user's own names


class Wrapping(nn.Module):
    """A user's wrapper with a child called `module`, like Composer's ComposerClassifier."""

    def __init__(self) -> None:
        super().__init__()
        self.module = layer()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.module(x)


class Named(nn.Module):
    """FSDP1's names as a property, a method and a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self._fsdp_wrapped_module = nn.Parameter(torch.ones(6))

    @property
    def module(self) -> str:
        return "mine"

    def summon_full_params(self) -> str:
        return "mine, too"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self._fsdp_wrapped_module


class Later(nn.Module):
    """A class with the child in some of its instances only."""

    def __init__(self, has_module: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(6))
        if has_module:
            self.module = layer()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.module(x) if "module" in self._modules else x) * self.weight


class Handing(nn.Module):
    """A wrapper that delegates missing attributes, as peft's models do."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Wrapping()

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("inner"), name)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


def check_a_users_own_names_come_first() -> None:
    """A model with a child called `module` would call itself instead of the child."""
    model = sharded(model=Chain(wrapping=Wrapping(), named=Named(), handing=Handing()))
    for unit in model.children():
        assert isinstance(unit, FSDPModule)
    for unit in (model.wrapping, model.handing):
        assert type(unit.module) is type(getattr(unit, "module")) is nn.Linear  # noqa: B009
    assert type(unwrapped(model.wrapping)) is nn.Linear
    assert model.named.module == "mine" and model.named.summon_full_params() == "mine, too"
    assert "_fsdp_wrapped_module" in dict(model.named.named_parameters())
    assert isinstance(model.named._fsdp_wrapped_module, nn.Parameter)
    model(features(0)).sum().backward()

    model = sharded(model=Chain(a=Later(False), b=Later(True), c=Later(False)))
    assert type(model.b.module) is nn.Linear
    assert "module" not in vars(type(model.b)), "torch.compile would meet it in the forward"
    assert model.a._fsdp_wrapped_module is model.a
    model = sharded(model=Chain(a=Later(False)))
    assert not hasattr(model.a, "module")  # as long as the process has an instance with it
    later = model.a._fsdp_wrapped_module
    later.summon_full_params_ = None
    later.add_module("_fsdp_wrapped_module", nn.Tanh())
    assert type(model.a._fsdp_wrapped_module) is nn.Tanh


# --- hidden from other code


def check_names_are_seen_by_scripts_only() -> None:
    """Checkpoints, logs and copies of a model would contain the module inside itself."""
    torch.manual_seed(0)
    reference = Model(tied=True)
    model = sharded(model=copy.deepcopy(reference))
    assert str(model) == str(reference)
    for named in ("named_modules", "named_children", "named_parameters", "named_buffers"):
        assert [n for n, _ in getattr(model, named)()] == [n for n, _ in getattr(reference, named)()], named
    assert list(model.state_dict()) == list(reference.state_dict())
    unit = model.decoder.blocks[0]
    assert not set(NAMES) & set(vars(unit)), vars(unit)
    assert not set(NAMES) & (set(unit._modules) | set(unit._parameters) | set(unit._buffers))
    duplicate = copy.copy(unit)  # torch makes it an instance of the user's class
    assert type(duplicate) is Block and not any(hasattr(duplicate, name) for name in NAMES)
    assert list(dict(duplicate.named_modules())) == list(dict(unit.named_modules()))
    state = unit.__reduce_ex__(4)[2]
    assert not set(NAMES) & set(state), state.keys()
    plain = type(reference.decoder)()  # the user's class is unchanged
    assert not any(hasattr(plain, name) for name in NAMES)
    assert not any(hasattr(type(unit), name) for name in NAMES)


def check_compiled_blocks() -> None:
    """torch.compile reads a module's class; an attribute there must not break its graphs or guards."""
    torch.manual_seed(0)
    reference = Chain(net=Chain({"a": True, "b": True}, a=Block(), b=Wrapping(), c=layer()))
    model = copy.deepcopy(reference)
    prepare_fully_shard(model, None, FULL, device="cpu")
    for unit in (model.net.a, model.net.b):
        assert isinstance(unit, FSDPModule)
        unit.compile(backend="aot_eager")
    actual, expected = model(features(0)), reference(features(0))
    torch.testing.assert_close(actual, expected)
    actual.sum().backward()
    assert model.net.a.module is model.net.a and type(model.net.b.module) is nn.Linear
    with model.net.summon_full_params(model.net), torch.no_grad():
        torch.testing.assert_close(model(features(0)), expected)


def check_a_child_whose_modules_are_registered_twice() -> None:
    """`self.fc1 = fc1` beside `super().__init__(module=Sequential(fc1, ...))`, as in Composer's own models, in either
    order: callbacks that call `model.module.summon_full_params(model.module)` still work."""
    first, second = layer(), layer()
    parts = {"fc1": first, "module": Chain(first=first, second=second), "fc2": second}
    for names in (("fc1", "module", "fc2"), ("module", "fc1", "fc2")):
        model = copy.deepcopy(Chain(**{name: parts[name] for name in names}))
        expected = [parameter.detach().clone() for parameter in model.parameters()]
        sharded(model=model)
        # `model.module` is the model's own child, which takes precedence over FSDP1's name.
        with model.module.summon_full_params(model.module, writeback=False):
            found = [parameter.detach() for parameter in model.module.parameters()]
            assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
        model.module(features(0)).sum().backward()
        assert all(isinstance(parameter.grad, DTensor) for parameter in model.module.parameters())


@on_ranks(2)
def test_the_names_of_fsdp1(folder: str) -> None:
    """Scripts find FSDP1's attributes; code that unwraps, copies or compiles a module does not see them."""
    all_of(
        check_inside_checkpointing_wrappers,
        check_whoever_asks_is_told_that_nothing_is_wrapped,
        check_a_users_own_names_come_first,
        check_names_are_seen_by_scripts_only,
        check_compiled_blocks,
        check_a_child_whose_modules_are_registered_twice,
    )
