"""FSDP1's class as scripts use it: names, methods, errors."""

from __future__ import annotations

import contextlib
import copy
import io
import logging
import time
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from support.models import Block, Decoder
from support.on_ranks import on_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP1
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from composer_fsdp2.errors import CallError, ConfigError, PlanError, UnsupportedError
from composer_fsdp2.fsdp import CPUOffload, MixedPrecision, ShardingStrategy, arguments, optimizers
from composer_fsdp2.fsdp import FullyShardedDataParallel as FSDP
from composer_fsdp2.fsdp.wrap import ModuleWrapPolicy, enable_wrap
from composer_fsdp2.fsdp.wrap import wrap as wrap_by_context

CPU: dict[str, Any] = {"device_id": torch.device("cpu"), "use_orig_params": True}
BLOCKS = ModuleWrapPolicy({Block})


def wrap(net: nn.Module, cls: Any = FSDP, **options: Any) -> Any:
    return cls(net, **{**CPU, "auto_wrap_policy": BLOCKS, **options})


def wrap_by_hand(net: Decoder, **options: Any) -> FSDP:
    for name, block in net.blocks.named_children():
        setattr(net.blocks, name, FSDP(block, **CPU, **options))
    return FSDP(net, **CPU, **options)


@on_ranks(2)
def test_rank_0_prints_one_line_at_the_first_forward():
    """Exit code 0 and a loss are no sign that a script trains on FSDP2."""
    for make in (wrap, wrap_by_hand):
        before, text = io.StringIO(), io.StringIO()
        with contextlib.redirect_stderr(before):
            wrapped = make(Decoder(tied=True), sharding_strategy=ShardingStrategy.SHARD_GRAD_OP)
        units = sum(isinstance(each, FSDP) for each in wrapped.modules())
        with contextlib.redirect_stderr(text):
            for _ in range(2):
                wrapped(torch.zeros(1, 4, dtype=torch.long))
        line = f"composer_fsdp2: {units} units on FSDP2 (2 ranks, SHARD_GRAD_OP)\n"
        assert units > 2 and (before.getvalue(), text.getvalue()) == ("", line if dist.get_rank() == 0 else "")


@on_ranks(2)
def test_an_instance_that_ran_a_forward_may_be_wrapped():
    """A script that tries a block out before it wraps the model got an error that asks for a bug report."""
    losses = []
    for tries_it in (False, True):
        torch.manual_seed(0)
        net = nn.Sequential(FSDP(nn.Linear(4, 4), **CPU), nn.Linear(4, 4))
        if tries_it:
            net[0](torch.ones(1, 4))
        model = FSDP(net, **CPU)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            loss = model(torch.ones(1, 4)).square().sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[0] == losses[1]


@on_ranks(2)
def test_names_and_modules_are_those_of_fsdp1():
    """Scripts find parameters by these names and unwrap modules through these attributes."""
    found, expected = wrap(Decoder(tied=True)), wrap(Decoder(tied=True), FSDP1)
    assert [name for name, _ in found.named_parameters()] == [name for name, _ in expected.named_parameters()]
    assert [name for name, _ in found.named_buffers()] == [name for name, _ in expected.named_buffers()]
    assert [name for name, _ in found.named_modules()] == [name for name, _ in expected.named_modules()]
    with FSDP.summon_full_params(found), FSDP1.summon_full_params(expected):
        for one, other in zip(found.named_parameters(), expected.named_parameters(), strict=True):
            assert one[0] == other[0], (one[0], other[0])
            assert one[1].shape == other[1].shape
        assert [name for name, _ in found.named_buffers()] == [name for name, _ in expected.named_buffers()]
    assert isinstance(found, FSDP) and isinstance(found, FSDPModule) and type(found) is FSDP
    assert type(found).__name__ == "FullyShardedDataParallel"
    assert type(found.module) is Decoder and found.module.blocks[0].module.fc_in is found.blocks[0].fc_in
    assert FSDP.fsdp_modules(found) == [found, found.blocks[0], found.blocks[1]]
    assert FSDP.fsdp_modules(found, root_only=True) == [found]
    assert [each.check_is_root() for each in FSDP.fsdp_modules(found)] == [True, False, False]
    assert all(isinstance(each, DTensor) for each in found.parameters())
    assert found.head.weight is found.embed.weight
    assert not hasattr(found, "nothing_such")


@on_ranks(2)
def test_attributes_are_those_of_fsdp1():
    """Attributes of an instance that scripts read: its arguments and its ranks."""
    single = dist.new_group([0]), dist.new_group([1])
    options = {"cpu_offload": CPUOffload(), "mixed_precision": MixedPrecision(torch.bfloat16), "forward_prefetch": True}
    cases = [
        {},
        {"sharding_strategy": ShardingStrategy.NO_SHARD, "backward_prefetch": None},
        {"process_group": single[dist.get_rank()], "sharding_strategy": ShardingStrategy.SHARD_GRAD_OP},
        {
            "process_group": (single[dist.get_rank()], dist.group.WORLD),
            "sharding_strategy": ShardingStrategy.HYBRID_SHARD,
        },
        {**options, "limit_all_gathers": False, "device_id": "cpu"},
    ]
    names = ["cpu_offload", "mixed_precision", "backward_prefetch", "forward_prefetch", "limit_all_gathers"]
    for case in cases:
        found, expected = wrap(Decoder(), **case), wrap(Decoder(), FSDP1, **case)
        for one, other in zip(FSDP.fsdp_modules(found), FSDP1.fsdp_modules(expected), strict=True):
            for name in (*names, "rank", "world_size", "compute_device"):
                assert getattr(one, name) == getattr(other, name), (case, name)
            ranks = [dist.get_process_group_ranks(each.process_group) for each in (one, other)]
            assert ranks[0] == ranks[1], (case, ranks)
            if "HYBRID" in str(case):
                assert one._inter_node_pg.size() == other._inter_node_pg.size() == 2
            if one.world_size > 1:
                assert one.sharding_strategy == other.sharding_strategy
    assert FSDP(nn.ReLU(), **CPU).world_size == 2


@on_ranks(2)
def test_instances_by_hand_are_nested():
    """Inner instances made first are not roots: they reshard, and only the outermost one casts inputs."""
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    precision = MixedPrecision(torch.bfloat16)
    net[1] = FSDP(net[1], mixed_precision=precision, **CPU)
    seen = []
    net[1].module.register_forward_pre_hook(lambda module, args: seen.append((args[0].dtype, module.weight.dtype)))
    assert net[1].check_is_root()
    model = FSDP(net, **CPU)
    assert model.check_is_root() and not model[1].check_is_root()
    with pytest.raises(RuntimeError, match="same dtype"):  # as under FSDP1: the root computes in fp32
        model(torch.ones(2, 4))
    assert seen == [(torch.float32, torch.bfloat16)], seen
    alone = FSDP(nn.Linear(4, 4), mixed_precision=precision, **CPU)
    assert alone(torch.ones(2, 4)).dtype == torch.bfloat16
    with pytest.raises(PlanError, match="wrap all of them by hand"):
        wrap(nn.Sequential(FSDP(nn.Linear(4, 4), **CPU)))


@on_ranks(2)
def test_a_model_that_ran_is_wrapped_again():
    """Scripts wrap a trained model once more, for inference or around more layers."""
    x = torch.ones(2, 4)
    net = nn.Sequential(FSDP(nn.Linear(4, 4), **CPU), FSDP(nn.Linear(4, 4), **CPU))
    model = FSDP(net, **CPU)
    expected = model(x)
    expected.sum().backward()
    model.zero_grad()
    for inner in (net, nn.Sequential(model, nn.Identity())):
        again = FSDP(inner, **CPU)
        found = again(x)
        found.sum().backward()
        assert torch.equal(found, expected)
        assert all(each.grad is not None for each in again.parameters())
        assert [each for each in FSDP.fsdp_modules(again) if each.check_is_root()] == [again]
        again.zero_grad()


@on_ranks(2)
def test_wrapping_within_enable_wrap():
    with enable_wrap(wrapper_cls=FSDP, **CPU):
        net = nn.Sequential(wrap_by_context(nn.Linear(4, 4)), nn.Linear(4, 4))
    assert isinstance(net[0], FSDP) and type(net[1]) is nn.Linear


@on_ranks(2)
def test_methods_of_the_root_alone():
    model = wrap(Decoder())
    for call in (lambda: model.blocks[0].clip_grad_norm_(1.0), lambda: model.blocks[0].no_sync().__enter__()):
        with pytest.raises(CallError, match="call the root's"):
            call()
    with pytest.raises(UnsupportedError, match="reduce_dtype"):
        model.register_comm_hook(None, None)
    for name in ("_all_handles", "params"):
        with pytest.raises(AttributeError, match="summon_full_params"):
            getattr(model, name)
    with pytest.raises(CallError, match="before wrapping"):
        copy.deepcopy(model)


@on_ranks(2)
def test_a_flat_parameter_is_cast_as_accelerate_does():
    """accelerate casts each instance's flat parameter if mixed precision is used with bf16 parameters."""
    net = Decoder().bfloat16()
    kept = {name: value.clone() for name, value in net.state_dict().items()}
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    model = FSDP(wrap(net), **CPU)  # an outer instance without parameters
    parameters, names = list(model.parameters()), []
    assert not model._has_params and model._flat_param is None and model._handle is None
    for unit in FSDP.fsdp_modules(model)[1:]:
        view = unit._flat_param
        assert (view.dtype, view.device, view.requires_grad) == (torch.bfloat16, torch.device("cpu"), True)
        names += view._fqns
        view.data = view.data.to(torch.float32)
        unit._handle._orig_param_dtype = torch.float32
        with pytest.raises(AttributeError, match="no flat parameters"):
            view.numel()
        with pytest.raises(CallError, match="summon_full_params"):
            view.data = torch.zeros(1)
    assert len(names) == len(parameters)
    assert {each.dtype for each in parameters} == {torch.float32} and all(each._fsdp_flattened for each in parameters)
    assert all(one is two for one, two in zip(model.parameters(), parameters, strict=True))
    before = model.state_dict()
    for name, value in before.items():
        assert value.dtype == (torch.bfloat16 if name.endswith("scale") else torch.float32), name
        assert (value == kept[name]).all(), name
    model(torch.arange(5)).sum().backward()
    optimizer.step()
    assert all(not torch.equal(value, before[name]) for name, value in model.state_dict().items() if "fc" in name)
    with pytest.raises(CallError, match="before the first forward"):
        unit._flat_param.data = unit._flat_param.data.to(torch.bfloat16)


@on_ranks(2)
def test_apply_initialises_full_parameters():
    """Models initialise themselves with ``model.apply(init)`` after wrapping."""
    model = wrap(Decoder())

    def init(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            assert module.weight.dim() == 2 and not isinstance(module.weight, DTensor)
            module.weight.data.fill_(0.5)

    assert model.apply(init) is model
    assert (model.blocks[0].fc_in.weight.full_tensor() == 0.5).all()


@on_ranks(2)
def test_ignored_parameters_and_modules_stay():
    """Ignored parameters and modules are neither sharded nor reduced, even if a policy would wrap them."""
    net = Decoder()
    model = wrap(net, ignored_states=[net.head.weight])
    assert type(net.head.weight) is nn.Parameter and isinstance(net.embed.weight, DTensor)
    net = Decoder()
    kept = [*net.blocks[0].parameters()]
    model = wrap(net, ignored_modules=[net.blocks[0]])
    assert [*model.module.blocks[0].parameters()] == kept and not isinstance(model.module.blocks[0], FSDP)
    assert isinstance(model.module.blocks[1], FSDP)
    model(torch.arange(4) + dist.get_rank()).sum().backward()
    grads = [torch.empty_like(kept[0]) for _ in range(2)]
    dist.all_gather(grads, kept[0].grad)
    assert not torch.equal(*grads)
    net = Decoder()
    scale = net.blocks[0].fc_in.weight
    net.blocks[0] = FSDP(net.blocks[0], ignored_states=[scale], **CPU)
    assert FSDP(net, **CPU).blocks[0].fc_in.weight is scale
    net = Decoder()
    with pytest.raises(ConfigError, match="keep one"):
        wrap(net, ignored_modules=[net.norm], ignored_states=[net.head.weight])
    net.norm = FSDP(net.norm, **CPU)
    for name in ("ignored_modules", "ignored_states"):
        with pytest.raises(ConfigError, match="holds a FullyShardedDataParallel"):
            FSDP(net, **CPU, **{name: [net.norm]})
    with pytest.raises(ConfigError, match="holds a Parameter; give modules"):
        FSDP(net, **CPU, ignored_modules=[net.head.weight])
    with pytest.raises(PlanError, match="itself is ignored"):
        wrap(net, ignored_modules=[net])


@on_ranks(2)
def test_meta_parameters_get_values():
    """From ``reset_parameters``, equal on all ranks; from ``param_init_fn``; or from rank 0."""
    torch.manual_seed(dist.get_rank())
    model = wrap(Decoder(device="meta"))
    full = model.blocks[1].fc_out.weight.full_tensor()
    assert full.std() > 0 and not any(each.is_meta for each in (*model.parameters(), *model.buffers()))

    def init(module: nn.Module) -> None:
        module.to_empty(device=torch.device("cpu"), recurse=False)
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
            nn.init.constant_(tensor, 2.0)

    model = wrap(Decoder(device="meta"), param_init_fn=init)
    assert all((each.full_tensor() == 2).all() for each in model.parameters())

    def init_meta(module: nn.Module) -> None:
        if any(each.is_meta for each in (*module.parameters(recurse=False), *module.buffers(recurse=False))):
            init(module)

    tied = wrap(Decoder(device="meta", tied=True), param_init_fn=init_meta)
    assert all((each.full_tensor() == 2).all() for each in tied.parameters())
    assert tied.head.weight is tied.embed.weight
    with pytest.raises(PlanError, match=r"param_init_fn left .* on the meta device"):
        wrap(Decoder(device="meta"), param_init_fn=lambda module: None)
    with pytest.raises(ConfigError, match="give a function"):
        wrap(Decoder(device="meta"), param_init_fn=42)
    net = Decoder(device="cpu" if dist.get_rank() == 0 else "meta")
    expected = [net.norm.weight.detach().clone().fill_(3)] if dist.get_rank() == 0 else [None]
    if dist.get_rank() == 0:
        net.norm.weight.data.fill_(3)
    dist.broadcast_object_list(expected)
    model = wrap(net, sync_module_states=True)
    assert torch.equal(model.norm.weight.full_tensor(), expected[0])


@on_ranks(2)
def test_an_error_leaves_the_module_as_it_was():
    """A script that catches the error can continue with its module."""
    net = Decoder()
    net.blocks[1].fc_in.weight = net.blocks[0].fc_in.weight
    before = [(name, type(module)) for name, module in net.named_modules()]
    with pytest.raises(PlanError, match=r"is shared between .*blocks\.0.* and .*blocks\.1"):
        wrap(net)
    assert [(name, type(module)) for name, module in net.named_modules()] == before
    net = Decoder(tied=True)
    net.embed = FSDP(net.embed, **CPU)
    with pytest.raises(PlanError, match=r"the instance that was created before and contains .*weight"):
        FSDP(net, **CPU)


@on_ranks(2)
def test_layers_that_are_parallelized_already():
    """No plan would contain them, and they would be reduced over the wrong ranks."""
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "tensor"))
    net = nn.Sequential(parallelize_module(nn.Linear(4, 4), mesh["tensor"], ColwiseParallel()))
    with pytest.raises(UnsupportedError, match="prepare_fully_shard"):
        FSDP(net, device_mesh=mesh["data"], **CPU)


@on_ranks(2)
def test_arguments_that_contradict_each_other():
    mesh = init_device_mesh("cpu", (2,))
    world = dist.group.WORLD
    cases = [
        ({"device_mesh": mesh, "process_group": world}, "keep one"),
        ({"device_mesh": mesh, "sharding_strategy": ShardingStrategy.HYBRID_SHARD}, "two axes"),
        ({"process_group": world, "sharding_strategy": ShardingStrategy.HYBRID_SHARD}, "a pair"),
        ({"process_group": (world, world)}, "one group of ranks"),
        ({"mixed_precision": "bf16"}, "mixed_precision"),
        ({"mixed_precision": MixedPrecision(torch.bfloat16, keep_low_precision_grads=True)}, "cast the model"),
    ]
    for options, message in cases:
        net = Decoder()
        with pytest.raises(ValueError, match=message):
            wrap(net, **options)
        assert type(net.blocks[0]) is Block
    assert wrap(Decoder(), device_mesh=mesh).embed.weight.device_mesh == mesh


@on_ranks(2)
def test_an_error_on_one_rank_ends_the_others():
    """The other ranks would wait for its collectives until they time out."""
    net = Decoder()
    groups = {"process_group": (dist.group.WORLD, dist.group.WORLD)} if dist.get_rank() else {}
    with pytest.raises(ConfigError if dist.get_rank() else PlanError, match="one group of ranks"):
        wrap(net, **groups)
    assert type(net.blocks[0]) is Block


@on_ranks(2)
def test_replicas_from_a_mesh_and_by_node():
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    with mock.patch.dict("os.environ", LOCAL_WORLD_SIZE="1"):
        for options in ({"device_mesh": mesh}, {}):
            model = wrap(Decoder(), sharding_strategy=ShardingStrategy.HYBRID_SHARD, **options)
            assert model.embed.weight.device_mesh.shape == (2, 1), options


@on_ranks(2)
def test_a_parameter_that_is_replaced_before_the_first_step():
    """A DTensor trains, as it did with FSDP1; a plain tensor would exist on no other rank."""
    model = wrap(nn.Linear(4, 4))
    layer = model.module
    layer.weight = nn.Parameter(torch.ones_like(layer.weight) * 2)
    with FSDP.summon_full_params(model):
        assert (layer.weight == 2).all()
    model = wrap(nn.Linear(4, 4))
    model.module.weight = nn.Parameter(torch.ones(5, 4))
    with pytest.raises(CallError, match=r"weight of a Linear was replaced by a plain tensor of shape \(5, 4\)"):
        FSDP.summon_full_params(model).__enter__()


@pytest.mark.others
@on_ranks(2, fresh=True)
def test_torch_itself_ignores_what_is_assigned_to_data_of_a_dtensor():
    """FSDP1 wrote ``parameter.data = ...`` back. Once torch does, ``write_assigned_data`` can go."""
    parameter = nn.Parameter(distribute_tensor(torch.zeros(4), init_device_mesh("cpu", (2,)), [Shard(0)]))
    parameter.data = torch.ones_like(parameter)
    assert (parameter.full_tensor() == 0).all()
    parameter.data.copy_(torch.ones_like(parameter))
    assert (parameter.full_tensor() == 1).all()


@on_ranks(2)
def test_what_is_not_carried_out_is_said_once():
    arguments._warn_once.cache_clear()
    with mock.patch.object(arguments.log, "warning") as warning:
        for _ in range(2):
            wrap(Decoder(), use_orig_params=False)
        wrap(Decoder())
    assert warning.call_count == (dist.get_rank() == 0), warning.mock_calls
    with (
        mock.patch.object(arguments.log, "warning") as warning,
        mock.patch.dict("os.environ", FSDP_USE_FULL_PREC_IN_EVAL="1"),
    ):
        wrap(Decoder())
    assert ("compute in param_dtype too" in str(warning.mock_calls)) == (dist.get_rank() == 0)
    assert arguments.log.isEnabledFor(logging.WARNING)


@on_ranks(2)
def test_an_optimizer_made_before_keeps_its_groups_and_state():
    """FSDP1 kept the optimizer's parameter objects; here it would train tensors that the model no longer uses."""
    net = Decoder()
    other = nn.Linear(2, 2)
    groups = [{"params": [net.embed.weight], "lr": 0.5}, {"params": [*net.blocks.parameters(), other.weight]}]
    optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9)
    before, held = net.embed.weight.detach().clone(), list(map(id, optimizer.param_groups))
    net(torch.arange(3)).sum().backward()
    optimizer.step()
    grad = net.embed.weight.grad.clone()
    model = wrap(net)
    assert list(map(id, optimizer.param_groups)) == held
    assert optimizer.param_groups[0]["params"] == [model.embed.weight]
    assert optimizer.param_groups[1]["params"][-1] is other.weight
    buffer = optimizer.state[model.embed.weight]["momentum_buffer"]
    assert torch.equal(buffer.full_tensor(), grad)
    assert torch.equal(model.embed.weight.full_tensor(), before - 0.5 * grad)


@on_ranks(2)
def test_an_optimizer_that_nobody_noted_is_an_error():
    """It would silently step parameters that have no gradients."""
    net = Decoder()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    optimizers._NOTED.discard(optimizer)
    wrap(net)
    with pytest.raises(PlanError, match=r"import the class from composer_fsdp2\.fsdp before"):
        optimizer.step()


@on_ranks(2)
def test_an_instance_without_parameters():
    """Policies by size or by function wrap activations and dropouts, too."""
    model = FSDP(nn.Sequential(nn.Linear(4, 4), FSDP(nn.ReLU(), **CPU), FSDP(nn.Linear(4, 2), **CPU)), **CPU)
    model(torch.ones(2, 4)).sum().backward()
    norm = model.clip_grad_norm_(1.0)
    assert norm > 0
    assert all(each.grad is not None for each in model.parameters())


class Scaled(nn.Module):
    """Its scale is a scalar, which cannot be sharded."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.scale = nn.Linear(4, 4), nn.Parameter(torch.tensor(2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * self.scale


@on_ranks(2)
def test_scalars_of_nested_instances_are_averaged():
    """FSDP1 refused them; without averaging each rank would silently train its own."""
    model = FSDP(nn.Sequential(FSDP(Scaled(), **CPU), Scaled()), **CPU)
    model(torch.ones(2, 4) * (1 + dist.get_rank())).sum().backward()
    for scaled in (model[0].module, model[1]):
        grads = [torch.empty(()) for _ in range(2)]
        dist.all_gather(grads, scaled.scale.grad)
        assert torch.equal(*grads) and grads[0] != 0


@on_ranks(2)
def test_buffers_keep_their_dtype_in_state_dicts():
    """FSDP1 computed with buffers in bf16 and saved them in their own dtype, as in its checkpoints."""
    states = []
    for cls in (FSDP1, FSDP):
        torch.manual_seed(0)
        model = wrap(Decoder(), cls, mixed_precision=MixedPrecision(torch.bfloat16, buffer_dtype=torch.bfloat16))
        model(torch.arange(4)).float().sum().backward()
        states.append({name: (each.dtype, each.shape) for name, each in model.state_dict().items()})
        assert {each.dtype for each in model.buffers()} == {torch.bfloat16}
    assert states[0] == states[1]
    net = Decoder()
    net.blocks[0] = FSDP(net.blocks[0], **CPU)
    model = FSDP(net, mixed_precision=MixedPrecision(buffer_dtype=torch.bfloat16), **CPU)
    assert [block.offset.dtype for block in model.blocks] == [torch.float32, torch.bfloat16]


@on_ranks(2)
def test_ranks_that_do_not_come_are_waited_for_with_a_warning():
    """With FSDP1 a single group could call the constructor; here it would silently wait."""
    groups = [dist.new_group([rank]) for rank in range(2)]
    logged = mock.Mock()
    if dist.get_rank():
        time.sleep(1)
    with mock.patch.object(arguments, "_PATIENCE_S", 0.1), mock.patch.object(arguments.log, "warning", logged):
        FSDP(nn.Linear(2, 2), groups[dist.get_rank()], device_id=torch.device("cpu"), use_orig_params=True)
    texts = [call.args[0] for call in logged.call_args_list]
    waited = [text for text in texts if "has waited 0.1 s for other ranks" in text]
    assert len(waited) == (dist.get_rank() == 0), texts


@on_ranks(2)
def test_zero_grad_clears_what_no_sync_accumulated():
    """Gradients of an abandoned step, after a NaN loss for instance, would be added to the next one."""

    def given_up(cls: Any, strategy: Any, clear: Any) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = wrap(nn.Sequential(Block(), Block()).double(), cls, sharding_strategy=strategy)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        x = torch.full((2, 6), dist.get_rank() + 1.0, dtype=torch.float64)
        with model.no_sync():
            model(7 * x).pow(2).sum().backward()
        clear(model, optimizer)
        with model.no_sync():
            model(2 * x).sum().backward()
        model(x).sum().backward()
        optimizer.step()
        with cls.summon_full_params(model):
            return [each.detach().clone() for each in model.parameters()]

    for strategy in (ShardingStrategy.FULL_SHARD, ShardingStrategy.NO_SHARD):
        for clear in (
            lambda model, optimizer: optimizer.zero_grad(),
            lambda model, optimizer: optimizer.zero_grad(set_to_none=False),
            lambda model, optimizer: model.zero_grad(),
        ):
            torch.testing.assert_close(
                given_up(FSDP, strategy, clear), given_up(FSDP1, strategy, clear), rtol=1e-12, atol=1e-12
            )


@on_ranks(2)
def test_steps_look_for_waiting_gradients_only_after_no_sync():
    """The check traverses all modules, in each step and each zero_grad of a script."""
    optimizers._ACCUMULATING.clear()  # of earlier tests on these ranks
    model = wrap(nn.Sequential(Block(), Block()))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.ones(2, 6)
    with model.no_sync():
        optimizer.zero_grad()  # finds none, and accumulation continues
        model(x).sum().backward()
        with pytest.raises(CallError, match=r"SGD\.step while gradients"):
            optimizer.step()
    model(x).sum().backward()
    assert model in optimizers._ACCUMULATING
    optimizer.step()
    assert model not in optimizers._ACCUMULATING
    with mock.patch.object(optimizers, "distinct_units") as walk:
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()
    assert not walk.called


@on_ranks(2)
def test_assigned_data_is_written():
    """torch ignores ``dtensor.data = values``: a model would train on without its decayed, clipped or averaged
    weights."""

    def assigned(cls: Any) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = wrap(nn.Sequential(Block(), nn.Linear(6, 6)).double(), cls)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            model(torch.ones(2, 6, dtype=torch.float64)).sum().backward()
            for parameter in model.parameters():
                if parameter.grad is not None:  # FSDP1's shard of it may be empty
                    parameter.grad.data = parameter.grad.data * 3
            optimizer.step()
            optimizer.zero_grad()
            for parameter in model.parameters():
                parameter.data = parameter.data * 0.5
        with cls.summon_full_params(model):
            return [each.detach().clone() for each in model.parameters()]

    torch.testing.assert_close(assigned(FSDP), assigned(FSDP1), rtol=1e-12, atol=1e-12)
    parameter = next(wrap(nn.Linear(4, 4)).parameters())
    with pytest.raises(CallError, match=r"data was set to a Tensor of shape \(4, 4\).*summon_full_params"):
        parameter.data = torch.zeros(4, 4)
    with pytest.raises(CallError, match=r"torch\.bfloat16"):
        parameter.data = parameter.data.bfloat16()


@on_ranks(2)
def test_missing_and_unexpected_keys_are_those_of_fsdp1():
    """Scripts filter them by the names of the unwrapped module."""
    found = []
    for cls in (FSDP, FSDP1):
        model = wrap(Decoder(), cls)
        state = model.state_dict()
        del state["head.weight"], state["blocks.0.fc_in.bias"]
        keys = model.load_state_dict({**state, "other": torch.ones(1), "blocks.1.more": torch.ones(1)}, strict=False)
        found.append((sorted(keys.missing_keys), sorted(keys.unexpected_keys)))
    assert found[0] == found[1], found


@on_ranks(2)
def test_accumulated_gradients_are_neither_clipped_nor_stepped_with():
    """FSDP1's step raised because shapes differ; ours has no gradients at that point, and would not update the
    weights."""
    model = wrap(nn.Sequential(Block(), Block()))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with model.no_sync():
        model(torch.ones(2, 6)).sum().backward()
    with pytest.raises(CallError, match=r"clip_grad_norm_.*no_sync"):
        model.clip_grad_norm_(1.0)
    with pytest.raises(CallError, match=r"SGD.*no_sync"):
        optimizer.step()
    model(torch.ones(2, 6)).sum().backward()
    assert model.clip_grad_norm_(1.0) > 0
    optimizer.step()


@on_ranks(2)
def test_optimizers_that_torch_does_not_compute_on_shards_are_refused():
    """On torch 2.7, Adafactor silently trained other weights; the others raised inside torch."""
    model = wrap(nn.Linear(6, 6))
    model(torch.ones(2, 6)).sum().backward()
    for cls in (torch.optim.Adafactor, torch.optim.LBFGS, torch.optim.Rprop):
        with pytest.raises(UnsupportedError, match=rf"{cls.__name__}.*AdamW"):
            cls(model.parameters()).step(lambda: torch.zeros(()))
    unsharded = nn.Linear(6, 6)
    unsharded.weight.grad = torch.ones(6, 6)
    torch.optim.Adafactor(unsharded.parameters()).step()


@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated")
def test_a_compiled_step_is_traced():
    """The checks before a step cannot be traced: torch 2.13 would raise for any optimizer of the process."""
    model = nn.Linear(2, 2, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    before = model.weight.detach().clone()
    model.weight.grad = torch.ones(2, 2)
    torch.compile(lambda: optimizer.step(), backend="eager")()
    torch.testing.assert_close(model.weight.detach(), before - 1)
