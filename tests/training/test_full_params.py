"""``summon_full_params``: parameters inside a block and after it, compared with torch's FSDP1 and the unsharded
model."""

from __future__ import annotations

import contextlib
import copy
import itertools
import logging
import warnings
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.cases import all_of, for_each
from support.comparing import full, own_name
from support.examples import IS_THOROUGH
from support.models import Block, Chain, Model, features, layer, tokens
from support.on_ranks import on_ranks
from support.ranks import run_ranks
from support.training import FULL, assert_close, named_parameters, sgd
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
from torch.distributed.tensor import DTensor

from composer_fsdp2 import (
    ComposerFSDP2Error,
    UnsupportedError,
    begin_microbatch,
    prepare_fully_shard,
    reshard,
    summon_full_params,
)
from composer_fsdp2.training.out_of_memory import reset

FSDP1, OURS = FullyShardedDataParallel.summon_full_params, summon_full_params
NAMES = ("recurse", "writeback", "rank0_only", "offload_to_cpu", "with_grads")
OPTIONS = [dict(zip(NAMES, values, strict=True)) for values in itertools.product((True, False), repeat=5)]
if not IS_THOROUGH:
    SOME = (
        {"recurse", "writeback", "with_grads"},
        {"recurse", "writeback", "offload_to_cpu", "with_grads"},
        {"recurse", "with_grads"},
        {"writeback"},
        {"writeback", "offload_to_cpu", "with_grads"},
        {"recurse", "rank0_only", "offload_to_cpu"},
        {"rank0_only", "with_grads"},
        {"recurse", "writeback", "rank0_only"},
    )
    OPTIONS = [{name: name in chosen for name in NAMES} for chosen in SOME]


def build() -> nn.Module:
    torch.manual_seed(0)
    return Model(tied=True)


def sharded(config: dict[str, Any] | None = None, build: Callable[[], nn.Module] = build) -> nn.Module:
    model = build()
    prepare_fully_shard(model, None, FULL | (config or {}), device="cpu")
    return model


def wrapped(strategy: ShardingStrategy = ShardingStrategy.FULL_SHARD, **options: Any) -> nn.Module:
    """The same units under FSDP1."""
    model = build()
    options |= {"device_id": torch.device("cpu"), "use_orig_params": True, "sharding_strategy": strategy}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some versions warn of a deprecation, or that nothing is sharded
        for name, block in model.decoder.blocks.named_children():
            setattr(model.decoder.blocks, name, FullyShardedDataParallel(block, **options))
        model.decoder = FullyShardedDataParallel(model.decoder, **options)
    return model


def raised(model: nn.Module, block: Callable[[], Any], **options: Any) -> str:
    """The error of a block that summons ``model``."""
    with pytest.raises(ComposerFSDP2Error) as error, summon_full_params(model, **options):
        block()
    return str(error.value)


def own_names(named: Any) -> dict[str, Any]:
    return {own_name(name): value for name, value in named}


def shapes() -> dict[str, torch.Size]:
    return {name: parameter.shape for name, parameter in build().named_parameters()}


def full_values(model: nn.Module, *, grads: bool = False) -> dict[str, torch.Tensor | None]:
    """Full values of all parameters (or gradients), of an FSDP1 model or of a sharded one. Called on all ranks."""
    if not any(isinstance(each, FullyShardedDataParallel) for each in model.modules()):
        found = {name: p.grad if grads else p for name, p in named_parameters(model).items()}
        return {name: None if value is None else full(value).clone() for name, value in found.items()}
    with FullyShardedDataParallel.summon_full_params(model, with_grads=grads):
        found = {name: p.grad if grads else p for name, p in own_names(model.named_parameters()).items()}
        return {name: None if value is None else value.detach().clone() for name, value in found.items()}


# --- FSDP1's options


def is_whole(tensor: torch.Tensor | None, shape: torch.Size) -> bool:
    return tensor is not None and not isinstance(tensor, DTensor) and tensor.shape == shape


def observe(model: nn.Module, summon: Any, options: dict[str, Any]) -> Any:
    """The values inside one block on this rank and those after it; the block doubles parameters and triples
    gradients."""
    model(tokens(dist.get_rank())).square().mean().backward()
    seen: dict[str, Any] = {}
    # The unit itself where the options are for one unit only.
    with summon(model if options["recurse"] else model.decoder, **options):
        inside = own_names(model.named_parameters())
        summoned = [name for name in inside if options["recurse"] or "blocks" not in name]
        others = [name for name in inside if name not in summoned]
        assert not others or not all(is_whole(inside[name], shapes()[name]) for name in others)
        # A vector may be unsharded because one shard contains all of it; so only count a block with all of them full.
        for name in summoned if all(is_whole(inside[name], shapes()[name]) for name in summoned) else []:
            parameter = inside[name]
            grad = parameter.grad if options["with_grads"] else None
            seen[name] = parameter.detach().clone(), None if grad is None else grad.clone()
            parameter.detach().mul_(2)
            if grad is not None:
                grad.mul_(3)
    return seen, full_values(model), full_values(model, grads=True)


def wrapped_and_sharded() -> tuple[Callable[[], nn.Module], Callable[[], nn.Module]]:
    """On four ranks, two replicas."""
    if dist.get_world_size() == 2:
        return wrapped, sharded
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    return partial(wrapped, ShardingStrategy.HYBRID_SHARD, device_mesh=mesh), partial(sharded, REPLICAS)


def check_options(cases: list[dict[str, Any]]) -> list[int]:
    """Returns how many full parameters each case sees on this rank.

    On CPU, FSDP1's offload_to_cpu frees the memory of the parameters that it shows (a segmentation fault), and FSDP1
    refuses offload_to_cpu with with_grads. The option changes neither values nor writeback, so FSDP1 runs without it.
    """
    of_fsdp1: dict[str, Any] = {}
    wrap, shard = wrapped_and_sharded()

    def check(options: dict[str, Any]) -> int | None:
        if options["writeback"] and options["rank0_only"]:
            for error, model, summon in ((NotImplementedError, wrap(), FSDP1), (UnsupportedError, shard(), OURS)):
                with pytest.raises(error), summon(model.decoder, **options):
                    pass
            return None
        as_theirs = options | {"offload_to_cpu": False}
        if str(as_theirs) not in of_fsdp1:
            of_fsdp1[str(as_theirs)] = observe(wrap(), FSDP1, as_theirs)
        theirs = of_fsdp1[str(as_theirs)]
        ours = observe(shard(), OURS, options)
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)
        return len(ours[0])

    counts = for_each(check, {f"{options}": (options,) for options in cases}).values()
    return [count for count in counts if count is not None]


@pytest.mark.any_torch
def test_options_do_what_fsdp1s_did():
    """Scripts read the same values as under FSDP1, and writeback and rank0_only treat their changes to weights and
    gradients the same."""
    first, second = run_ranks(check_options, 2, OPTIONS)
    everything, of_the_unit = len(shapes()), len([name for name in shapes() if "blocks" not in name])
    assert set(first) == {everything, of_the_unit} and set(second) == {everything, of_the_unit, 0}


def test_replicas():
    """The first rank of each replica gets the full model, as under FSDP1, and all replicas are written alike."""
    everything = len(shapes())
    on_one = dict(zip(NAMES, (True, False, True, False, False), strict=True))
    with_grads = dict(zip(NAMES, (True, True, False, False, True), strict=True))
    assert run_ranks(check_options, 4, [on_one, with_grads]) == [[everything, everything], [0, everything]] * 2


def check_written_in_place(options: dict[str, Any]) -> None:
    """Ranks write different values; nothing is sharded, so each rank's values stay, as FSDP1's documentation states."""

    def written(model: nn.Module, summon: Any) -> dict[str, torch.Tensor]:
        model(tokens(0)).square().mean().backward()
        with summon(model, **options):
            for parameter in model.parameters():
                parameter.detach().fill_(dist.get_rank() + 1.0)
        with summon(model, writeback=False):
            return {name: p.detach().clone() for name, p in own_names(model.named_parameters()).items()}

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = written(wrapped(ShardingStrategy.NO_SHARD), FSDP1)
    torch.testing.assert_close(written(sharded({} if dist.get_world_size() == 1 else NO_SHARD), OURS), theirs)
    assert theirs["decoder.embed.weight"].unique().tolist() == [dist.get_rank() + 1.0]


def check_offloaded() -> None:
    """FSDP1 refused it; here offload_to_cpu makes a copy, and writeback works as documented."""
    model = sharded(NO_SHARD)
    before = full_values(model)
    for writeback, factor in ((False, 1), (True, 2)):
        with summon_full_params(model, offload_to_cpu=True, writeback=writeback):
            for parameter in model.parameters():
                parameter.detach().mul_(2)
        torch.testing.assert_close(full_values(model), {name: factor * value for name, value in before.items()})


def check_no_shard() -> None:
    options = ({}, {"writeback": False}, {"writeback": False, "rank0_only": True})
    for_each(check_written_in_place, {f"{each}": (each,) for each in options})
    check_offloaded()


@pytest.mark.parametrize("world_size", [1, 2])
def test_what_is_not_split_is_written_in_place(world_size: int):
    """A script that sets weights in a block with writeback=False worked under NO_SHARD, and on one rank."""
    run_ranks(check_no_shard, world_size)


@on_ranks(2)
def test_each_rank_writes_its_own_part(folder: str) -> None:
    """When ranks write different values, each rank's own shard is updated and nothing is sent to the others. So it was
    under FSDP1, whose flat parameter can also be sharded inside a row."""
    model = Chain(net=Chain(layer=nn.Linear(3, 4, bias=False)))
    prepare_fully_shard(model, None, FULL, device="cpu")
    with summon_full_params(model):
        model.net.layer.weight.detach().fill_(dist.get_rank() + 1.0)
    assert full(model.net.layer.weight)[:, 0].tolist() == [1.0, 1.0, 2.0, 2.0]


@on_ranks(2, fresh=True)
def test_warns_of_many_copies() -> None:
    """FSDP1 warned that every rank of a machine copies the model into its memory; once is enough."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("composer_fsdp2").addHandler(handler)
    model = sharded()
    for options in ({}, {"offload_to_cpu": True}, {"offload_to_cpu": True}):
        with summon_full_params(model, **options):
            pass
    told = [line for line in lines if "offload_to_cpu" in line]
    assert dist.get_rank() == 1 or (len(told) == 1 and "rank0_only=True" in told[0]), told


# --- what a block sees


NO_SHARD, REPLICAS = {"sharding_strategy": "NO_SHARD"}, {"data_parallel_replicate_degree": 2}
RECOMPUTED = {"activation_checkpointing": True, "activation_checkpointing_reentrant": False}
CONFIGS: dict[int, dict[str, dict[str, Any]]] = {
    2: {
        "kept": {"sharding_strategy": "SHARD_GRAD_OP"},
        "recomputed": RECOMPUTED,
        "offloaded": {"cpu_offload": True},
        "bf16": {"mixed_precision": {"param_dtype": "bf16", "reduce_dtype": "fp32", "buffer_dtype": "bf16"}},
        "no shard": NO_SHARD,
    },
    4: {"shards": {}, "replicas": REPLICAS},
}


def check_what_is_seen(name: str, build_one: Callable[[], nn.Module], inputs: Any, config: dict[str, Any]) -> None:
    reference, model = build_one(), build_one()
    optimizer = sgd(model)
    prepare_fully_shard(model, optimizer, FULL | config, device="cpu")
    before, held = [*model.parameters()], [*optimizer.param_groups[0]["params"]]
    model.eval()
    with torch.no_grad():
        model(inputs(0))  # leaves the root unsharded, in bf16 with mixed precision
    with contextlib.suppress(KeyError), summon_full_params(model):
        assert_unsharded(name, model, reference)
        raise KeyError  # a block that raises leaves the same state as one that does not
    assert_same_objects(name, model.parameters(), before)
    assert_same_objects(name, optimizer.param_groups[0]["params"], held)


def assert_unsharded(name: str, model: nn.Module, reference: nn.Module) -> None:
    seen = own_names(model.named_parameters(remove_duplicate=False))
    expected = dict(reference.named_parameters(remove_duplicate=False))
    assert seen.keys() == expected.keys(), f"{name}: {seen.keys()}"
    for path, parameter in seen.items():
        assert type(parameter) is nn.Parameter, f"{name}, {path}: {type(parameter)}"
        assert torch.equal(parameter, expected[path]), f"{name}, {path}"
        assert parameter.requires_grad == expected[path].requires_grad, f"{name}, {path}"
        assert [n for n in seen if seen[n] is parameter] == [n for n in expected if expected[n] is expected[path]], name
    state = model.state_dict()
    assert state.keys() == reference.state_dict().keys(), f"{name}: {state.keys()}"
    for path, value in reference.state_dict().items():
        # Buffers use the configuration's precision, in which these values are exact.
        found = state[path] if path in expected else state[path].to(value.dtype)
        assert not isinstance(found, DTensor) and torch.equal(found, value), f"{name}, {path}"


def assert_same_objects(name: str, after: Iterable[nn.Parameter], before: list[nn.Parameter]) -> None:
    after = [*after]
    assert len(after) == len(before) and all(a is b for a, b in zip(after, before, strict=True)), name
    assert any(isinstance(parameter, DTensor) for parameter in after), name


class Kinds(Chain):
    """A chain that also runs its scalar and its ignored module."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.second(self.first(x)) * self.scalar
        return self.wide(self.thin(x)) + self.left(x[..., :2]).sum()


def kinds() -> nn.Module:
    """Uneven and empty shards, a module in two units, a frozen parameter and a scalar, and an excluded module."""
    torch.manual_seed(0)
    net = Kinds({"first": True, "second": True}, first=Block(), second=Block(), thin=nn.Linear(6, 1), wide=layer(1))
    net.second.fc_out = net.first.fc_out
    net.first.fc_out.bias.requires_grad_(False)
    net.scalar = nn.Parameter(torch.tensor(3.0))
    net.left = layer(2)
    net.left._fsdp_wrap = False
    return Chain(net=net)


@pytest.mark.parametrize("world_size", CONFIGS)
def test_a_block_sees_the_unsharded_model(world_size: int):
    """Names, ties and full-precision values are right, also after an eval in bf16. Parameters remain the same objects,
    since the optimizer would otherwise step tensors that no longer belong to the model. Ranks with empty shards
    participate."""
    models = {"": (build, tokens), ", kinds": (kinds, features)}
    cases = {
        f"{name}{kind}": (name, *of_kind, config)
        for name, config in CONFIGS[world_size].items()
        for kind, of_kind in models.items()
    }
    run_ranks(for_each, world_size, check_what_is_seen, cases)


# --- forward and backward within a block


def check_forward(recurse: bool, writeback: bool, config: dict[str, Any]) -> None:
    """Twice, with changes in between; then a training step within the block, and one after it."""
    torch.set_default_dtype(torch.float64)
    reference, model = build(), build()
    ours, theirs = sgd(model), sgd(reference)
    prepare_fully_shard(model, ours, FULL | config, device="cpu")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    original = copy.deepcopy(reference.state_dict())

    def compare(what: str) -> None:
        with torch.no_grad():
            assert_close(what, model(tokens(rank)), reference(tokens(rank)), rtol=1e-12, atol=1e-14)

    def backward() -> None:
        model(tokens(rank)).square().mean().backward()
        for peer in range(world_size):
            (reference(tokens(peer)).square().mean() / world_size).backward()

    compare("before the block")  # leaves the root unsharded
    with summon_full_params(model if recurse else model.decoder, recurse=recurse, writeback=writeback):
        backward()
        compare("unchanged")
        for factor in (2.0, 0.5, 3.0):
            for each in (model, reference):
                each.decoder.embed.weight.detach().mul_(factor)
                if recurse:
                    each.decoder.blocks[0].fc_in.weight.detach().add_(factor)
            compare(f"times {factor}")
            assert torch.equal(model.decoder.embed.weight, reference.decoder.embed.weight), "no longer whole"
        backward()
        assert torch.equal(model.decoder.embed.weight, reference.decoder.embed.weight), "no longer whole"
    if not writeback:
        reference.load_state_dict(original)
    compare("after the block")
    reshard(model)  # else the root would run on unsharded parameters
    ours.step()
    theirs.step()
    compare("after a step with the gradients of the block")


def test_forward_and_backward_within_a_block():
    """Text is generated with the weights set in the block, as Composer does. FSDP1's weights were wrong afterwards if
    all units were summoned."""
    cases: dict[str, tuple[bool, bool, dict[str, Any]]] = {
        "kept": (True, True, {}),
        "recomputed": (True, True, RECOMPUTED),
        "of one unit": (False, True, NO_SHARD),
        "of one unit, discarded": (False, False, {}),
        "discarded": (True, False, {"cpu_offload": True}),
    }
    run_ranks(for_each, 2, check_forward, cases)


def check_refused_passes() -> None:
    """Otherwise ranks would run on different weights, or lose gradients. The model trains on afterwards."""
    model = sharded()
    before = [*model.parameters()]
    expected = full_values(model)
    for options, is_backward in (({"rank0_only": True, "writeback": False}, False), ({"with_grads": True}, True)):

        def run(is_backward: bool = is_backward) -> None:
            with torch.set_grad_enabled(is_backward):
                output = model(tokens(0))
            output.sum().backward()

        message = raised(model, run, **options)
        assert f"{next(iter(options))}=True" in message, message
        assert_same_objects("refused", model.parameters(), before)
        torch.testing.assert_close(full_values(model), expected, rtol=0, atol=0)
        model(tokens(0)).sum().backward()  # the refused forward left no state behind
        for parameter in model.parameters():
            assert isinstance(parameter.grad, DTensor)
            parameter.grad = None


def check_failing_forward() -> None:
    reference, model = build(), sharded()
    before = [*model.parameters()]
    handle = model.decoder.norm.register_forward_hook(lambda *unused: 1 / 0)
    with contextlib.suppress(ZeroDivisionError), summon_full_params(model):
        for parameter in model.parameters():
            parameter.detach().mul_(2)
        model(tokens(0))
    handle.remove()
    assert_same_objects("failed", model.parameters(), before)
    for parameter in reference.parameters():
        parameter.detach().mul_(2)
    for _ in range(2):
        assert torch.equal(model(tokens(0)), reference(tokens(0)))
        with summon_full_params(model):
            assert_unsharded("after an error", model, reference)


def test_passes_that_are_refused_or_fail():
    """Writes reach the shards, and neither the next forward nor the next block is refused."""
    run_ranks(all_of, 2, check_refused_passes, check_failing_forward)


# --- parameters that are replaced


def check_replaced() -> list[str]:
    reference, model = build(), sharded()
    before = [*model.parameters()]
    doubled = {name: 2 * value for name, value in reference.state_dict().items()}

    def load() -> None:
        model.load_state_dict(doubled)

    def assign() -> None:
        model.load_state_dict({name: value.clone() for name, value in doubled.items()}, assign=True)
        model.decoder.head.weight = model.decoder.embed.weight

    def data() -> None:
        for name, parameter in model.named_parameters():
            parameter.data = doubled[name].clone()

    def replace() -> None:
        for module in model.modules():
            for name, parameter in [*module.named_parameters(recurse=False)]:
                setattr(module, name, nn.Parameter(2 * parameter.detach()))
        model.decoder.head.weight = model.decoder.embed.weight

    def forward() -> None:
        replace()
        with torch.no_grad():
            model(tokens(0))

    for change in (load, assign, data, replace, forward):
        for writeback in (False, True):
            expected = {name: doubled[name] if writeback else p for name, p in reference.named_parameters()}
            with summon_full_params(model, writeback=writeback):
                change()
            torch.testing.assert_close(
                full_values(model), expected, rtol=0, atol=0, msg=lambda text, c=change: f"{c.__name__}: {text}"
            )
            assert_same_objects(change.__name__, model.parameters(), before)
        with summon_full_params(model):
            for name, parameter in model.named_parameters():
                parameter.detach().copy_(reference.get_parameter(name))
        model(tokens(0)).sum().backward()
    return refused_replacements(model)


def refused_replacements(model: nn.Module) -> list[str]:
    before, expected = [*model.parameters()], full_values(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=True)  # changes no tensor's version

    def other_shape() -> None:
        model.decoder.norm.bias = nn.Parameter(torch.zeros(2))

    def untied() -> None:
        model.decoder.head.weight = nn.Parameter(torch.zeros(11, 6))
        model.decoder.embed.weight = nn.Parameter(torch.ones(11, 6))

    messages = [raised(model, other_shape), raised(model, untied), raised(model, optimizer.step)]
    with contextlib.suppress(KeyError), summon_full_params(model):
        other_shape()
        raise KeyError  # the block's own error is the one to raise
    torch.testing.assert_close(full_values(model), expected, rtol=0, atol=0)
    assert_same_objects("refused", model.parameters(), before)
    optimizer.step()
    assert not torch.equal(full_values(model)["decoder.norm.bias"], expected["decoder.norm.bias"])
    return messages


def test_replaced_parameters_are_kept_or_named():
    """Weights loaded or assigned in a block reach the model, and a failure to write them back raises. FSDP1 kept those
    of load_state_dict and raised a KeyError for an assignment."""
    for shape, untied, step in run_ranks(check_replaced, 2):
        assert "decoder.norm.bias" in shape and "(2,)" in shape, shape
        assert "decoder.embed.weight" in untied and "share" in untied, untied
        assert "SGD.step" in step, step


# --- gradients


@on_ranks(2)
def test_what_a_block_freezes_stays_frozen(folder: str) -> None:
    """Otherwise a script that freezes layers in a block would silently continue to train them."""
    trained = {}
    for name, model, summon in (("FSDP1", wrapped(), FSDP1), ("ours", sharded(), OURS)):
        for options in ({}, {"writeback": False}, {"writeback": False, "recurse": False}):
            for frozen in (True, False):
                with summon(model.decoder, **options):
                    for path, parameter in model.decoder.named_parameters():
                        if "norm" in path or "blocks.1" in path:
                            parameter.requires_grad_(not frozen)
                now = {path: p.requires_grad for path, p in own_names(model.named_parameters()).items()}
                trained[name, str(options), frozen] = now
    for (name, options, frozen), now in trained.items():
        assert now == trained["FSDP1", options, frozen], f"{name}, {options}, frozen {frozen}: {now}"
    model = sharded()
    model.decoder.norm.weight.note = "kept"
    with summon_full_params(model):
        assert model.decoder.norm.weight.note == "kept"


def check_not_between_steps() -> None:
    """Otherwise gradients waiting for the last microbatch would be missing, and writes to them lost."""
    model = sharded({"gradient_sync": "last"})
    begin_microbatch(model, is_last=False)
    model(tokens(0)).sum().backward()
    with summon_full_params(model):  # parameters are available at any time
        pass
    early = raised(model, lambda: None, with_grads=True)
    assert "gradient_sync" in early and "after the last" in early, early
    handle = model.decoder.norm.register_forward_hook(lambda *unused: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(tokens(0))
    handle.remove()
    assert "out_of_memory.reset(model)" in raised(model, lambda: None)
    reset(model)  # as the message advises
    with summon_full_params(model, with_grads=True):
        pass


def check_gradients() -> None:
    """FSDP1 dropped replaced gradients, and kept cleared ones."""
    model = sharded()
    grads = {}

    def block(change: Callable[[nn.Parameter], None], **options: Any) -> dict[str, torch.Tensor | None]:
        model.zero_grad()
        model(tokens(0)).square().mean().backward()
        grads.update(full_values(model, grads=True))
        with summon_full_params(model, **{"with_grads": True, **options}):
            for parameter in model.parameters():
                change(parameter)
        return full_values(model, grads=True)

    def replace(parameter: nn.Parameter) -> None:
        parameter.grad = torch.full_like(parameter, 7.0)

    def clear(parameter: nn.Parameter) -> None:
        parameter.grad = None

    sevens = {name: torch.full(shape, 7.0) for name, shape in shapes().items()}
    torch.testing.assert_close(block(replace), sevens)
    torch.testing.assert_close(block(replace, writeback=False), grads)
    assert block(clear) == dict.fromkeys(shapes())
    torch.testing.assert_close(block(clear, writeback=False), grads)
    model.zero_grad()
    with summon_full_params(model, with_grads=True):  # no gradients yet
        assert all(parameter.grad is None for parameter in model.parameters())
        for parameter in model.parameters():
            replace(parameter)
    torch.testing.assert_close(full_values(model, grads=True), sevens)
    with summon_full_params(model):
        assert all(parameter.grad is None for parameter in model.parameters())
    torch.testing.assert_close(full_values(model, grads=True), sevens)
    message = raised(model, lambda: sum(p.square().sum() for p in model.parameters()).backward())
    assert "with_grads=True" in message and "decoder.blocks.0.fc_in.weight was given" in message, message


def check_missing_gradient() -> None:
    """A rank without this gradient counts as zero, where the others would wait for it."""
    model = sharded()
    model(tokens(0)).square().mean().backward()
    expected = full_values(model, grads=True)["decoder.norm.weight"].clone()
    expected[3:] = 0  # all but the rows of rank 0
    if dist.get_rank() == 1:
        model.decoder.norm.weight.grad = None
    with summon_full_params(model, with_grads=True, writeback=False):
        torch.testing.assert_close(model.decoder.norm.weight.grad, expected, rtol=0, atol=0)


def test_gradients_are_the_blocks():
    """Full gradients that a script clips or penalizes reach the optimizer. A missing gradient raises, or counts as
    zero."""
    run_ranks(all_of, 2, check_not_between_steps, check_gradients, check_missing_gradient)


# --- nested blocks, and models with nothing to summon


def check_nested() -> None:
    """Other options than the enclosing block's would keep or drop its changes, so they raise."""
    reference, model = build(), sharded()
    decoder = model.decoder
    with summon_full_params(decoder, recurse=False), summon_full_params(decoder.blocks[1]):
        assert decoder.blocks[1].fc_in.weight.shape == (12, 6) and decoder.embed.weight.shape == (11, 6)
        assert isinstance(decoder.blocks[0].fc_in.weight, DTensor)
        with summon_full_params(model):  # the rest of the model
            assert_unsharded("nested", model, reference)
            model.decoder.embed.weight.detach().mul_(2)
            model.decoder.blocks[0].fc_in.weight.detach().mul_(2)
        assert isinstance(decoder.blocks[0].fc_in.weight, DTensor)
        assert torch.equal(decoder.embed.weight, 2 * reference.decoder.embed.weight)
    for path in ("decoder.embed", "decoder.blocks.0.fc_in"):
        reference.get_submodule(path).weight.detach().mul_(2)
    torch.testing.assert_close(full_values(model), dict(reference.named_parameters()), rtol=0, atol=0)
    for outer, inner in (({}, {"writeback": False}), ({"writeback": False}, {}), ({}, {"with_grads": True})):
        with summon_full_params(decoder.blocks[0], **outer):
            message = raised(model, lambda: None, **inner)
            assert "inside" in message or "within" in message, message
    with summon_full_params(model):
        assert_unsharded("after a refusal", model, reference)
    around = Chain(net=Chain({"block": True}, block=Block()))  # the root without parameters
    prepare_fully_shard(around, None, FULL, device="cpu")
    with summon_full_params(around.net, recurse=False), summon_full_params(around, writeback=False):
        assert around.net.block.fc_in.weight.shape == (12, 6)


class Summoning(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with summon_full_params(self):
            return super().forward(x)


def check_nothing_to_do() -> None:
    model = sharded()
    before = [*model.parameters()]
    with summon_full_params(model, recurse=False):  # not a unit, as under FSDP1
        assert_same_objects("model", model.parameters(), before)
    plain = build()
    with summon_full_params(plain):
        plain.decoder.embed.weight.detach().zero_()
    assert not plain.decoder.embed.weight.any()
    with summon_full_params(model.decoder.blocks):
        assert not isinstance(model.decoder.blocks[0].fc_in.weight, DTensor)
    part = raised(model.decoder.head, lambda: None)
    assert "weight is sharded by a unit above it" in part, part
    torch.manual_seed(0)
    during = Chain(net=Chain({"block": True}, block=Summoning()))
    prepare_fully_shard(during, None, FULL, device="cpu")
    with pytest.raises(ComposerFSDP2Error, match="forward"):
        during(features(0))


def test_blocks_within_blocks_and_where_there_is_nothing_to_summon():
    """A helper may summon within a caller's block, which FSDP1 refused. Modules above units and unsharded modules are
    passed over, as under FSDP1. Two cases raise: a submodule of a unit, whose weights a script would read as shards,
    and a forward in progress."""
    run_ranks(all_of, 2, check_nested, check_nothing_to_do)
