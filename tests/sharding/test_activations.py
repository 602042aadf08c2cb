"""Checkpointing or offloading activations through the public function: chosen modules, their order, and the result."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.models import Block, Chain, FakeMetric, Model, layer, tokens
from support.on_ranks import on_ranks
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    CheckpointWrapper,
    OffloadWrapper,
    checkpoint_wrapper,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

from composer_fsdp2 import PlanError, apply_activation_checkpointing


def wrapped_paths(model: nn.Module) -> list[str]:
    paths = [path for path, module in model.named_modules() if isinstance(module, CheckpointWrapper | OffloadWrapper)]
    return sorted({path.replace("._checkpoint_wrapped_module", "") for path in paths})


class Choosing(Chain):
    """A direct child with an activation_checkpointing_fn that chooses by class."""

    def activation_checkpointing_fn(self, module: nn.Module) -> Any:
        return isinstance(module, Block)


def marked(model: nn.Module, **children: bool) -> nn.Module:
    for name, value in children.items():
        model.net.get_submodule(name)._activation_checkpointing = value
    return model


def choosing() -> nn.Module:
    return Chain(net=Choosing(a=Block(), b=layer()))


def with_excluded() -> nn.Module:
    model = Chain(kept=layer(), left=layer(), metric=FakeMetric())
    model.left._fsdp_wrap = False
    return model


ANY, LINEAR = {"check_fn": lambda module: True}, {"check_fn": lambda module: isinstance(module, nn.Linear)}
BELOW_A = ("net.a.fc_in", "net.a.fc_out")
Case = tuple[Callable[[], nn.Module], dict[str, Any], list[str]]
CASES: dict[str, Case] = {
    "the model's function": (Model, {}, ["decoder.blocks.0", "decoder.blocks.1"]),
    # A single marked module overrides the function.
    "marked, against the function": (lambda: marked(choosing(), a=False, b=True), {}, ["net.b"]),
    "marked, against check_fn": (lambda: marked(choosing(), a=True, b=False), LINEAR, ["net.a", *BELOW_A]),
    "check_fn goes before the function": (choosing, LINEAR, [*BELOW_A, "net.b"]),
    "a plain model, direct children included": (
        lambda: nn.Sequential(layer(), nn.Sequential(layer(), layer())), LINEAR, ["0", "1.0", "1.1"]
    ),
    # The inner wrapper remains inside the outer one.
    "nested": (lambda: Chain(net=Chain(inner=Chain(deep=layer()))), ANY, ["net", "net.inner", "net.inner.deep"]),
    "no hooks": (lambda: nn.Sequential(layer()), {}, []),
    "an answer that is like false": (Model, {"check_fn": lambda module: None}, []),
    "switched off": (Model, {"checkpoint": False}, []),
    # Modules that FSDP1 ignored.
    "excluded children and metrics": (with_excluded, LINEAR, ["kept"]),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_which_modules_are_wrapped(name: str):
    """Returns the wrapped modules: the same as under FSDP1, and each once, even if chosen twice."""
    build, options, expected = CASES[name]
    model = build()
    assert sorted(apply_activation_checkpointing(model, **options)) == expected == wrapped_paths(model)
    assert apply_activation_checkpointing(model, **options) == []


def test_what_the_model_checkpoints_itself():
    """Layers that the model checkpoints itself are not wrapped; children are wrapped before their parents."""
    model = Chain(net=Choosing(a=checkpoint_wrapper(Block()), b=Block()))
    assert apply_activation_checkpointing(model) == ["net.b"]
    paths = apply_activation_checkpointing(Chain(net=Chain(inner=Chain(deep=layer()))), **ANY)
    assert paths == ["net.inner.deep", "net.inner", "net"]


def test_a_module_in_two_places_is_wrapped_once():
    """A layer that is called twice has one wrapper, in both places."""
    shared = Block()
    model = Chain(net=Choosing(a=shared, b=Chain(again=shared)), other=Choosing(c=shared))
    paths = apply_activation_checkpointing(model)
    assert paths[0] == "net.a"
    assert model.net.a is model.net.b.again is model.other.c
    assert isinstance(model.net.a, CheckpointWrapper) and model.net.a._checkpoint_wrapped_module is shared


@pytest.mark.parametrize(
    ("checkpoint", "cpu_offload", "reentrant"), [(1, 1, 1), (1, 0, 0), (0, 1, 0), (1, 1, 0), (1, 0, 1)]
)
@pytest.mark.filterwarnings("ignore:Please specify CheckpointImpl.NO_REENTRANT:FutureWarning")
def test_which_wrappers(checkpoint: bool, cpu_offload: bool, reentrant: bool):
    """Each option works separately, with offloading around checkpointing, as Composer nested them. Results do not
    change, and a checkpointed layer runs again."""
    torch.manual_seed(0)
    model, plain = Model(), Model()
    plain.load_state_dict(model.state_dict())
    calls: list[int] = []
    model.decoder.blocks[0].fc_in.register_forward_hook(lambda *_: calls.append(0))
    apply_activation_checkpointing(model, checkpoint=checkpoint, cpu_offload=cpu_offload, reentrant=reentrant)
    found, module = [], model.decoder.blocks[0]
    while not isinstance(module, Block):
        found.append(type(module))
        if isinstance(module, CheckpointWrapper):
            assert module.checkpoint_impl is (CheckpointImpl.REENTRANT if reentrant else CheckpointImpl.NO_REENTRANT)
        module = module._checkpoint_wrapped_module
    assert found == [OffloadWrapper] * cpu_offload + [CheckpointWrapper] * checkpoint
    assert list(model.state_dict()) == list(plain.state_dict())
    for each in (model, plain):
        each(tokens(0)).square().mean().backward()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)
    assert len(calls) == 1 + checkpoint


def test_a_function_that_raises_names_the_module():
    """The error names the first module that a hook fails on, and no module has been wrapped."""

    def check_fn(module: nn.Module) -> bool:
        if isinstance(module, nn.Embedding):
            raise AttributeError("no ffn")
        return True

    model = Model()
    with pytest.raises(PlanError, match=r"AttributeError for module 'decoder.embed' \(Embedding\): no ffn") as caught:
        apply_activation_checkpointing(model, check_fn=check_fn)
    assert isinstance(caught.value.__cause__, AttributeError)
    assert wrapped_paths(model) == []


@on_ranks(1)
def test_refuses_a_sharded_model(folder: str) -> None:
    """Wrapping after sharding would run a unit's hooks inside the recomputation; the error shows the right order."""
    inside, whole, fsdp1 = Model(), Model(), Model()
    fully_shard(inside.decoder, mesh=init_device_mesh("cpu", (1,)))
    fully_shard(whole, mesh=init_device_mesh("cpu", (1,)))
    fsdp1.decoder = FullyShardedDataParallel(fsdp1.decoder, device_id=torch.device("cpu"))
    for model, named in ((inside, "'decoder'"), (whole, "(the model)"), (fsdp1, "'decoder'")):
        with pytest.raises(PlanError, match="call apply_activation_checkpointing before sharding") as caught:
            apply_activation_checkpointing(model)
        assert named in str(caught.value) and wrapped_paths(model) == []
