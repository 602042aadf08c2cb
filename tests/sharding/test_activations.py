"""Recomputing or offloading activations, as a function of its own: which modules, in which order, with which result."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.models import Block, Chain, FakeMetric, Model, features, layer, tokens
from support.ranks import run_ranks
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    CheckpointWrapper,
    OffloadWrapper,
    checkpoint_wrapper,
)
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

from composer_fsdp2 import PlanError, apply_activation_checkpointing


def wrapped_paths(model: nn.Module) -> list[str]:
    paths = [path for path, module in model.named_modules() if isinstance(module, CheckpointWrapper | OffloadWrapper)]
    return sorted({path.replace("._checkpoint_wrapped_module", "") for path in paths})


class Choosing(Chain):
    """A direct child whose activation_checkpointing_fn picks by class."""

    def activation_checkpointing_fn(self, module: nn.Module) -> Any:
        return isinstance(module, Block)


def test_the_models_function_chooses():
    """A Composer model's own hook decides, as under FSDP1; the caller learns what was wrapped."""
    model = Model(num_blocks=2)
    assert apply_activation_checkpointing(model) == ["decoder.blocks.0", "decoder.blocks.1"]
    assert wrapped_paths(model) == ["decoder.blocks.0", "decoder.blocks.1"]
    assert isinstance(model.decoder.blocks[0]._checkpoint_wrapped_module, Block)


@pytest.mark.parametrize(("attribute", "is_wrapped"), [(True, True), (False, False)])
def test_the_attribute_goes_first(attribute: bool, is_wrapped: bool):
    """One marked module goes its own way, against the model's function and against check_fn."""
    for options in ({}, {"check_fn": lambda module: not attribute}):
        model = Chain(net=Choosing(a=Block(), b=layer()))
        chosen = model.net.a if not attribute else model.net.b
        chosen._activation_checkpointing = attribute
        path = "net.a" if not attribute else "net.b"
        assert (path in apply_activation_checkpointing(model, **options)) is is_wrapped


def test_check_fn_goes_before_the_models_function():
    """A script can choose other modules than the model would."""
    model = Chain(net=Choosing(a=Block(), b=layer()))
    assert apply_activation_checkpointing(model, check_fn=lambda module: module is model.net.b) == ["net.b"]


def test_a_plain_model_with_check_fn():
    """Usable with any nn.Module, without hooks, direct children included."""
    model = nn.Sequential(layer(), nn.Sequential(layer(), layer()))
    paths = apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, nn.Linear))
    assert paths == ["0", "1.0", "1.1"]
    assert wrapped_paths(model) == paths
    model(features(0)).sum().backward()


def test_children_before_parents():
    """Nested choices nest: the inner wrapper stays inside the outer one."""
    model = Chain(net=Chain(inner=Chain(deep=layer())))
    paths = apply_activation_checkpointing(model, check_fn=lambda module: True)
    assert paths == ["net.inner.deep", "net.inner", "net"]
    assert wrapped_paths(model) == sorted(paths)


def test_nothing_is_chosen():
    """Without hooks nothing is wrapped, and a function's false-like answer counts as false."""
    assert apply_activation_checkpointing(nn.Sequential(layer())) == []
    assert apply_activation_checkpointing(Model(), check_fn=lambda module: None) == []
    assert apply_activation_checkpointing(Model(), checkpoint=False) == []


def test_excluded_children_and_metrics_are_passed_over():
    """What FSDP1 did not look at is not wrapped."""
    model = Chain(kept=layer(), left=layer())
    model.left._fsdp_wrap = False
    model.add_module("metric", FakeMetric())
    assert apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, nn.Linear)) == ["kept"]


def test_wrapped_modules_are_not_wrapped_again():
    """A model that checkpoints some layers itself keeps them as they are; calling twice changes nothing."""
    model = Chain(net=Choosing(a=checkpoint_wrapper(Block()), b=Block()))
    assert apply_activation_checkpointing(model) == ["net.b"]
    assert apply_activation_checkpointing(model) == []


def test_a_module_in_two_places_is_wrapped_once():
    """A layer that is called twice has one wrapper, in both places."""
    shared = Block()
    model = Chain(net=Choosing(a=shared, b=Chain(again=shared)), other=Choosing(c=shared))
    paths = apply_activation_checkpointing(model)
    assert paths[0] == "net.a"
    assert model.net.a is model.net.b.again is model.other.c
    assert isinstance(model.net.a, CheckpointWrapper) and model.net.a._checkpoint_wrapped_module is shared


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("checkpoint", [True, False])
@pytest.mark.parametrize("cpu_offload", [True, False])
@pytest.mark.filterwarnings("ignore:Please specify CheckpointImpl.NO_REENTRANT:FutureWarning")
def test_which_wrappers(checkpoint: bool, cpu_offload: bool, reentrant: bool):
    """Each switch does its own part, offloading around recomputing, as Composer nested them; results do not change."""
    torch.manual_seed(0)
    model, plain = Model(), Model()
    plain.load_state_dict(model.state_dict())
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


def test_activations_are_recomputed():
    """The memory is saved in fact: a wrapped block runs again in backward, another does not."""
    calls: list[str] = []
    model = Model()
    for name, block in model.decoder.blocks.named_children():
        block.fc_in.register_forward_hook(lambda *_, name=name: calls.append(name))
    model.decoder.blocks[1]._activation_checkpointing = False
    apply_activation_checkpointing(model)
    model(tokens(0)).sum().backward()
    assert sorted(calls) == ["0", "0", "1"]


def test_a_function_that_raises_names_the_module():
    """The first module that a hook cannot handle is named, and nothing has been wrapped by then."""

    def check_fn(module: nn.Module) -> bool:
        if isinstance(module, nn.Embedding):
            raise AttributeError("no ffn")
        return True

    model = Model()
    with pytest.raises(PlanError, match=r"AttributeError for module 'decoder.embed' \(Embedding\): no ffn") as caught:
        apply_activation_checkpointing(model, check_fn=check_fn)
    assert isinstance(caught.value.__cause__, AttributeError)
    assert wrapped_paths(model) == []


def check_refuses_sharded_models() -> list[str]:
    from torch.distributed.device_mesh import init_device_mesh

    messages = []
    inside, whole, fsdp1 = Model(), Model(), Model()
    fully_shard(inside.decoder, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    fully_shard(whole, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    fsdp1.decoder = FullyShardedDataParallel(fsdp1.decoder, device_id=torch.device("cpu"))
    for model in (inside, whole, fsdp1):
        try:
            apply_activation_checkpointing(model)
        except PlanError as error:
            messages.append(str(error))
        assert wrapped_paths(model) == []
    return messages


def test_refuses_a_sharded_model():
    """Wrapping after sharding would put a unit's hooks inside the recomputation; the order is told instead."""
    (messages,) = run_ranks(check_refuses_sharded_models, 1)
    assert len(messages) == 3 and all("call apply_activation_checkpointing before sharding" in m for m in messages)
    assert "'decoder'" in messages[0] and "(the model)" in messages[1] and "'decoder'" in messages[2]
