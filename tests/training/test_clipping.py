"""Clipping a sharded model scales gradients as clipping the unsharded one does; each root has its own norm, as under
FSDP1."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from support.cases import all_of, for_each
from support.comparing import full
from support.models import Block, Chain, Running, Thin, features, layer, tie, tied_model, tokens
from support.on_ranks import on_ranks
from support.ranks import run_ranks
from support.training import FULL, Inputs, adamw, assert_close
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from composer_fsdp2 import clip_grad_adaptive_, clip_grad_norm_, prepare_fully_shard
from composer_fsdp2.errors import CallError, PlanError
from composer_fsdp2.training.clipping import norm_of_gradients

REPLICAS: dict[str, Any] = {"data_parallel_replicate_degree": 2}
UNSHARDED: dict[str, Any] = {"sharding_strategy": "NO_SHARD"}
SHARDED: dict[str, Any] = {"sharding_strategy": "FULL_SHARD"}


def several_roots() -> nn.Module:
    return Chain(a=Block(), b=Thin(), c=nn.Tanh(), d=Chain({"inner": True}, inner=layer(), rest=layer()))


def model_is_the_root() -> nn.Module:
    model = Chain(a=layer(), b=layer(), c=Block())
    tie(model.a, model.b)
    return model


class Shapes(nn.Module):
    """Parameters of one to four dimensions; most have fewer rows than ranks, or a number of rows that is not a multiple
    of them."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 3, (1, 2))
        self.cube = nn.Parameter(torch.randn(5, 3, 1))
        self.row = nn.Parameter(torch.randn(1, 5))
        self.gain = nn.Parameter(torch.randn(1))
        self.scalar = nn.Parameter(torch.tensor(0.7))
        self.unused = nn.Parameter(torch.randn(4, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.einsum("bcl,lcm->bl", self.conv(x[:, None, None, :])[:, :, 0, :], self.cube)
        return hidden * self.row * self.gain * self.scalar


def shapes() -> nn.Module:
    torch.manual_seed(5)
    return Chain(front=layer(), net=Shapes(), back=nn.Linear(5, 7))


MODELS: dict[str, tuple[Callable[[], nn.Module], Inputs]] = {
    "one root": (tied_model, tokens),
    "thin": (lambda: Chain(net=Thin()), features),
    "several roots": (several_roots, features),
    "the model is the root": (model_is_the_root, features),
    "shapes": (shapes, features),
}


def gradients(name: str, config: dict[str, Any]) -> tuple[nn.Module, nn.Module]:
    """A sharded model and its unsharded copy after one backward on the same data."""
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    build, inputs = MODELS[name]
    model = build()
    reference = copy.deepcopy(model)
    prepare_fully_shard(model, None, FULL | config, device="cpu")
    world_size = dist.get_world_size()
    (100 * model(inputs(dist.get_rank())).square().mean()).backward()
    for rank in range(world_size):
        (100 * reference(inputs(rank)).square().mean() / world_size).backward()
    return model, reference


NORM_TYPES = (2.0, 3.0, math.inf)


def check_clipping(names: Sequence[str], config: dict[str, Any], norm_types: Sequence[float]) -> None:
    """By norm, and adaptively."""
    for name in names:
        sharded, whole = gradients(name, config)
        ours, theirs = saved_gradients(sharded), saved_gradients(whole)

        def clip(check: Callable[..., None], *limits: float) -> None:
            restore_gradients(sharded, ours)  # noqa: B023
            restore_gradients(whole, theirs)  # noqa: B023
            check(name, sharded, whole, *limits)  # noqa: B023

        # The last norm is too large to clip anything.
        of_norms = [(check_clipped, 1e-3, norm_type) for norm_type in norm_types] + [(check_clipped, 1e6, 2.0)]
        for_each(
            clip, {f"{name}, {each[1:]}": each for each in (*of_norms, (check_adaptive, 0.0), (check_adaptive, 0.5))}
        )


def counted(run: Callable[[], Any]) -> tuple[Any, int]:
    """Returns the result of ``run`` and the number of all-reduces that it launched."""
    with mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as all_reduce:
        return run(), all_reduce.call_count


def saved_gradients(model: nn.Module) -> list[torch.Tensor | None]:
    return [None if parameter.grad is None else parameter.grad.clone() for parameter in model.parameters()]


def restore_gradients(model: nn.Module, gradients: list[torch.Tensor | None]) -> None:
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        parameter.grad = None if gradient is None else gradient.clone()


def check_clipped(name: str, model: nn.Module, reference: nn.Module, max_norm: float, norm_type: float) -> None:
    norms = clip_grad_norm_(model, max_norm, norm_type)
    roots = (
        [""] if name == "the model is the root" else [n for n, c in reference.named_children() if list(c.parameters())]
    )
    assert list(norms) == roots, norms
    for root in roots:
        module = reference.get_submodule(root)
        expected = torch.nn.utils.clip_grad_norm_(module.parameters(), max_norm, norm_type)
        assert_close(f"norm of {root}", norms[root], expected, rtol=1e-12, atol=0)
        assert norms[root].dim() == 0
    for path, parameter in reference.named_parameters():
        # A gradient that the backward did not reach is zero, like the rest of its unit.
        expected = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        assert_close(path, full(model.get_parameter(path).grad), expected, rtol=1e-12, atol=1e-14)


MESHES: tuple[tuple[int, dict[str, Any]], ...] = (
    (4, REPLICAS),
    (4, {}),
    (2, UNSHARDED),
    (2, {"data_parallel_replicate_degree": 1}),
    (2, {"cpu_offload": True}),
    (1, {}),
)
FEW_MODELS = ("thin", "several roots")


def check_meshes(world_size: int) -> None:
    """All models and norms on two ranks, some of the models on every mesh."""
    if world_size == 2:
        check_clipping([*MODELS], {}, NORM_TYPES)
    for config in (config for size, config in MESHES if size == world_size):
        check_clipping(FEW_MODELS, config, (2.0, math.inf))


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_clips_as_the_unsharded_model(world_size: int):
    """The logged norm and the step equal those of torch.nn.utils.clip_grad_norm_ on each root. A rank with an empty
    shard neither fails (torch's own function does, for inf) nor blocks other ranks. Replicas are not counted twice, and
    offloaded gradients are included. Adaptive clipping uses the norm of a full row or a full bias, however they are
    sharded."""
    run_ranks(check_meshes, world_size, world_size)


# Keys of the root and of the block below it; whether all ranks average each parameter's gradient.
OWN_MESHES: dict[str, tuple[dict[str, Any], Callable[[], dict[str, Any]], bool]] = {
    "replicas, block over all": (REPLICAS, lambda: {"process_group": "set4"}, True),
    "replicas, block over the node": (REPLICAS, lambda: {"process_group": "node"}, True),
    "replicas, block on a mesh of all": (REPLICAS, lambda: {"device_mesh": init_device_mesh("cpu", (4,))}, True),
    "replicas, block in halves": (REPLICAS, lambda: {"process_group": "set2"}, False),
    "shards, block in halves": ({}, lambda: {"process_group": "mod2"}, False),
    "unsharded, block over all": (UNSHARDED, lambda: {"process_group": "set4"} | SHARDED, True),
    "unsharded, block on each rank": (UNSHARDED, lambda: {"process_group": "self"}, False),
    "halves, block over all": ({"process_group": "set2"}, lambda: {"process_group": "set4"}, False),
    "halves, block on each rank": ({"process_group": "set2"}, lambda: {"process_group": "self"}, False),
}


def check_own_mesh(name: str, norm_types: Sequence[float]) -> list[float]:
    config, settings, _ = OWN_MESHES[name]
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    model = Chain(net=Chain({"block": True}, block=Block(), rest=layer()))
    model.net.fsdp_wrap_fn = lambda module: settings() if isinstance(module, Block) else False
    prepare_fully_shard(model, None, FULL | config, device="cpu")
    model(features(dist.get_rank())).square().mean().backward()
    saved = saved_gradients(model)
    # The gradients on each rank, averaged over the ranks of its groups.
    seen = {path: full(parameter.grad).clone() for path, parameter in model.named_parameters()}
    found = []
    for norm_type in norm_types:
        restore_gradients(model, saved)
        found.append(clipped_norm(name, model, seen, norm_type))
    return found


def clipped_norm(name: str, model: nn.Module, seen: dict[str, torch.Tensor], norm_type: float) -> float:
    config, _, is_averaged = OWN_MESHES[name]
    norms, num_sent = counted(lambda: clip_grad_norm_(model, 1e-3, norm_type))
    (norm,) = norms.values()
    assert num_sent == 1, num_sent
    own = nn.utils.get_total_norm(seen.values(), norm_type)
    if is_averaged:
        expected = own
    else:
        ranks = dist.get_world_size() if "over all" in name or "process_group" not in config else 2
        of_ranks = [None] * dist.get_world_size()
        dist.all_gather_object(of_ranks, own)
        first = dist.get_rank() // ranks * ranks
        together = torch.stack(of_ranks[first : first + ranks])
        expected = together.max() if math.isinf(norm_type) else (together**norm_type).mean() ** (1 / norm_type)
    assert_close("norm", norm, expected, rtol=1e-12, atol=0)
    for path, parameter in model.named_parameters():
        scaled = seen[path] * (1e-3 / (expected + 1e-6))
        assert_close(path, full(parameter.grad), scaled, rtol=1e-12, atol=1e-14)
    return float(norm)


def test_units_on_meshes_of_their_own_are_clipped_by_one_norm():
    """Replicas that scale by different norms would train shards of different models, and nothing would show it. Groups
    of ranks that train alone have their own norms, as under FSDP1."""
    norms = itertools.cycle((2.0, 3.0))
    cases = {name: (name, (next(norms), math.inf)) for name in OWN_MESHES}
    found: list[dict[str, list[float]]] = run_ranks(for_each, 4, check_own_mesh, cases)
    for name in found[0]:
        group = slice(2) if name.startswith("halves, block on each") else slice(4)
        assert len({tuple(of_rank[name]) for of_rank in found[group]}) == 1, name


def check_unaveraged() -> list[float]:
    """Replicated parameters beside a module whose gradient exists on rank 1 only; and a model with equal gradients on
    all ranks."""
    torch.manual_seed(0)
    model = Chain(net=Chain(a=layer(), rest=layer()), other=layer())
    prepare_fully_shard(model, None, FULL | UNSHARDED | {"ignored_modules": [model.net.rest]}, device="cpu")
    model(features(0)).sum().backward()
    if dist.get_rank() == 0:
        model.net.rest.zero_grad()
    norms, num_sent = counted(lambda: clip_grad_norm_(model, 1e-3))
    return [*(norm.item() for norm in norms.values()), num_sent]


def test_replicas_stay_alike_beside_a_module_that_is_not_averaged():
    """Each rank would scale replicated gradients by a different factor, and the copies would diverge."""
    first, second = run_ranks(check_unaveraged, 2)
    assert first == second, (first, second)
    assert first[-1] == 1, "no all-reduce is needed for the root that all ranks have alike"


def check_left_out() -> None:
    """FSDP1 clipped the parameters that it wrapped; the user clips the rest."""
    model = Chain(net=layer(), left=layer())
    model.left._fsdp_wrap = False
    prepare_fully_shard(model, None, {}, device="cpu")
    model(features(0)).sum().backward()
    before = model.left.weight.grad.clone()
    assert list(clip_grad_norm_(model, 1e-3)) == ["net"] and torch.equal(model.left.weight.grad, before)


def check_foreign() -> None:
    """Without the cause in the error, users would look for it in the gradients."""
    model, around_ours = Chain(a=layer()), Chain(a=Chain(b=layer()), c=layer())
    prepare_fully_shard(around_ours.a, None, {}, device="cpu")
    for each in (model, around_ours):
        fully_shard(each)
        with pytest.raises(PlanError, match="Chain was sharded by fully_shard itself"):
            clip_grad_norm_(each, 1.0)


def two_roots() -> nn.Module:
    model = Chain(a=layer(), b=layer())
    prepare_fully_shard(model, None, {}, device="cpu")
    return model


def check_part() -> None:
    """A unit below a root, and a list of units, each clipped by its own norm."""
    model = Chain(net=Chain({"block": True}, block=layer(), rest=layer()))
    prepare_fully_shard(model, None, FULL, device="cpu")
    model(features(0)).sum().backward()
    for part in (model.net.block, nn.ModuleList([model.net.block])):
        expected = torch.stack([full(each.grad).norm() for each in part.parameters()]).norm()
        (norm,) = clip_grad_norm_(part, 1e-3).values()
        assert_close("norm", norm, expected, rtol=1e-6, atol=0)
    assert full(model.net.rest.weight.grad).norm() > 0.1, "the rest stays as it is"


def check_orders() -> None:
    """An order of 0 ended in ZeroDivisionError, and -inf clipped by the largest value."""
    model = two_roots()
    model(features(dist.get_rank())).sum().backward()
    for order in (0, -math.inf, math.nan):
        with pytest.raises(CallError, match=f"norm_type is {order};"):
            clip_grad_norm_(model, 1.0, order)


def check_without_gradients() -> None:
    """A network unused in this step neither fails nor blocks a rank."""
    model = two_roots()
    model.a(features(dist.get_rank())).sum().backward()
    norms = clip_grad_norm_(model, 1.0)
    assert norms["b"].item() == 0.0 and norms["a"].item() > 0, norms


def check_gradients_on_one_rank() -> None:
    """Scripts may drop the gradient on one rank. Communication depends on parameters, which all ranks have."""
    model = two_roots()
    model(features(0)).sum().backward()
    own = torch.stack([parameter.grad.to_local().norm() for parameter in model.a.parameters()]).norm()
    dist.broadcast(own, src=0)
    if dist.get_rank() == 1:
        model.a.zero_grad()
    assert_close("norm", clip_grad_norm_(model, 1.0)["a"], own, rtol=1e-6, atol=0)


def check_low_precision() -> None:
    """bf16 gradients are summed in fp32, so thousands of small ones are not lost."""
    model = Chain(net=nn.Linear(4096, 4, bias=False).bfloat16())
    prepare_fully_shard(model, None, FULL, device="cpu")
    model(torch.full((1, 4096), 0.01, dtype=torch.bfloat16)).sum().backward()
    (norm,) = clip_grad_norm_(model, 1e9).values()
    expected = torch.tensor(0.01, dtype=torch.bfloat16).double().item() * math.sqrt(4 * 4096)
    assert norm.dtype == torch.float32
    assert math.isclose(norm.item(), expected, rel_tol=1e-5), (norm, expected)


def check_not_finite() -> None:
    """A loss scaler sees the same norm on all ranks, so no rank steps alone."""
    model = two_roots()
    scale = math.inf if dist.get_rank() == 1 else 1.0
    (model(features(0)).sum() * scale).backward()
    assert not any(norm.isfinite() for norm in clip_grad_norm_(model, 1.0).values())
    assert not full(model.b.weight.grad).isfinite().all()


def check_after_evaluation() -> None:
    """After an evaluation a root's parameters are unsharded and have no gradients, so clipping would silently do
    nothing."""
    model = Chain(net=layer())
    prepare_fully_shard(model, None, FULL, device="cpu")
    (100 * model(features(0)).sum()).backward()
    with torch.no_grad():
        model(features(0))
    clip_grad_norm_(model, 1e-3)
    model.net.reshard()
    assert full(model.net.weight.grad).norm().item() == pytest.approx(1e-3, rel=1e-3)


OF_GRADIENTS = (
    check_without_gradients,
    check_gradients_on_one_rank,
    check_low_precision,
    check_not_finite,
    check_after_evaluation,
)


def test_edge_cases():
    """Excluded modules, missing, infinite and bf16 gradients, and errors that name the mistake."""
    alone = (
        check_left_out,
        check_foreign,
        check_part,
        check_orders,
        check_special_values,
        check_adaptive_low_precision,
    )
    run_ranks(all_of, 2, *alone, *OF_GRADIENTS)


# ---------------------------------------------------------------------------------------------------------------------
# Adaptive


def rows(model: nn.Module) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Weights and gradients in the slices that Brock et al. 2021 (section 4) clip; vectors and scalars are one
    slice."""
    found = []
    for parameter in (parameter for parameter in model.parameters() if parameter.grad is not None):
        shape = (parameter.shape[0], -1) if parameter.dim() > 1 else (1, -1)
        found.extend(zip(parameter.detach().reshape(shape), parameter.grad.view(shape), strict=True))
    return found


def check_adaptive(name: str, model: nn.Module, reference: nn.Module, quantile: float) -> None:
    ratios = [(grad.norm() / weights.norm()).item() for weights, grad in rows(reference)]
    finite = sorted(filter(math.isfinite, ratios))  # weights of zero stop their gradient
    threshold = finite[int(quantile * (len(finite) - 1))] * (2 if quantile else 0.5)
    for (_, grad), ratio in zip(rows(reference), ratios, strict=True):
        grad.mul_(min(threshold / ratio, 1.0) if ratio else 1.0)
    clip_grad_adaptive_(model, threshold)
    for path, parameter in reference.named_parameters():
        ours = model.get_parameter(path).grad
        if parameter.grad is not None:
            assert_close(f"{name}, {path}", full(ours), parameter.grad, rtol=1e-12, atol=1e-14)
        else:
            assert ours is None or not full(ours).any(), f"{name}, {path}"


def check_special_values() -> None:
    """Zero weights, zero gradients and NaN match torch's unsharded result, row by row."""
    model = Chain(net=nn.Linear(2, 4))
    with torch.no_grad():
        model.net.weight.copy_(torch.tensor([[0.0, 0.0], [0.0, 0.0], [3.0, 4.0], [3.0, 4.0]]))
        model.net.bias.zero_()
    prepare_fully_shard(model, None, FULL, device="cpu")
    model(torch.ones(1, 2)).sum().backward()
    rows = model.net.weight.grad.to_local()
    rows.copy_(torch.tensor([[1.0, 0.0], [0.0, 0.0]] if dist.get_rank() == 0 else [[math.nan, 0.0], [30.0, 40.0]]))
    model.net.bias.grad.to_local().fill_(math.nan if dist.get_rank() else 1.0)
    clip_grad_adaptive_(model, 0.1)
    expected = torch.tensor([[0.0, 0.0], [0.0, 0.0], [math.nan, 0.0], [0.3, 0.4]])
    torch.testing.assert_close(full(model.net.weight.grad), expected, equal_nan=True)
    # The bias is NaN on one rank, so neither rank scales its shard.
    torch.testing.assert_close(full(model.net.bias.grad), torch.tensor([1, 1, math.nan, math.nan]), equal_nan=True)


def check_adaptive_plain() -> tuple[float, float, float, int]:
    """Ignored and excluded parameters, two of them with a gradient on one rank only; and the number of collectives."""
    torch.manual_seed(0)
    model = Chain(**{name: nn.Linear(6, 6) for name in ("a", "b", "left", "rest")})
    model.left._fsdp_wrap = False
    prepare_fully_shard(model, None, FULL | {"ignored_modules": [model.rest]}, device="cpu")
    for name in ("a", "b", "left"):
        model.get_submodule(name)(features(0)).sum().backward()
    if dist.get_rank() == 1:
        model.rest(features(0)).sum().backward()
        model.a.bias.grad = None
    _, num_sent = counted(lambda: clip_grad_adaptive_(model, 1e-3))

    def ratio(module: nn.Module) -> float:
        return (full(module.bias.grad).norm() / full(module.bias).norm()).item() if module.bias.grad is not None else 0

    return ratio(model.b), ratio(model.left), ratio(model.rest), num_sent


def test_adaptive_clipping_of_whole_parameters():
    """Replicated parameters are clipped locally by their own norms, and a gradient on one rank blocks no other. Two
    roots on one mesh take one all-reduce."""
    first, second = run_ranks(check_adaptive_plain, 2)
    assert first[:2] == second[:2] == pytest.approx((1e-3, 1e-3), rel=1e-5)
    assert (first[2], second[2]) == (0, pytest.approx(1e-3, rel=1e-5))
    assert first[3] == second[3] == 1


def check_adaptive_low_precision() -> None:
    """In bf16 the unsharded model rounds norms and factor to bf16, and the sharded one must do the same."""
    torch.manual_seed(0)
    model = Chain(net=nn.Linear(64, 5).bfloat16())
    reference = copy.deepcopy(model)
    prepare_fully_shard(model, None, FULL, device="cpu")
    inputs = torch.randn(3, 64).bfloat16()
    for each in (model, reference):
        each(inputs).sum().backward()
    before = reference.net.weight.grad.clone()
    clip_grad_adaptive_(model, 0.1)
    clip_grad_adaptive_(reference, 0.1)
    assert not torch.equal(reference.net.weight.grad, before)
    for path, parameter in reference.named_parameters():
        assert torch.equal(full(model.get_parameter(path).grad), parameter.grad), path


@on_ranks(4)
def test_ranks_without_rows_send_numbers_of_the_others_dtype(folder: str) -> None:
    """A float64 head with fewer rows than ranks, alone and beside a float32 one. Ranks that sent 4 bytes where others
    sent 8 ended the run."""

    def run(net: Any, x: torch.Tensor) -> torch.Tensor:
        return net.head(net.body(x).double())

    def check(dtype: torch.dtype) -> None:
        torch.manual_seed(0)
        body, head = nn.Linear(8, 4, bias=False, dtype=dtype), nn.Linear(4, 2, bias=False, dtype=torch.float64)
        model = Chain(net=Running(run, body=body, head=head))
        unsharded = copy.deepcopy(model)
        prepare_fully_shard(model, None, FULL, device="cpu")
        batch = torch.ones(3, 8, dtype=dtype)
        for each in (model, unsharded):
            each.net(batch).sum().backward()
        expected = nn.utils.clip_grad_norm_(unsharded.parameters(), 1e-3)
        (norm,) = clip_grad_norm_(model, 1e-3).values()
        torch.testing.assert_close(norm.double(), expected.double(), rtol=1e-6, atol=0)

    for_each(check, {f"{dtype}": (dtype,) for dtype in (torch.float64, torch.float32)})


# ---------------------------------------------------------------------------------------------------------------------
# Ignored modules: excluded from sharding, included in clipping and the optimizer


@on_ranks(2)
def test_ignored_modules(folder: str) -> None:
    """They keep their tensors and their own gradients. Clipping, SAM's norm and the optimizer include them, and all
    ranks scale alike; otherwise ranks would train parts of different models."""
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    model = Chain(net=Chain({"inner": True}, kept=Block(), inner=layer(), rest=layer()))
    reference = copy.deepcopy(model)
    kept = {name: (tensor, tensor.data_ptr()) for name, tensor in model.net.kept.state_dict(keep_vars=True).items()}
    optimizer = adamw(model)
    config = {"ignored_modules": [model.net.kept], "sync_module_states": True, "mixed_precision": {}}
    if dist.get_rank() == 1:
        model.net.kept.scale.data.fill_(0.75)  # differs from rank 0's
        reference.net.kept.scale.data.fill_(0.75)
    prepare_fully_shard(model, optimizer, config, device="cpu")
    for name, (tensor, address) in kept.items():
        now = model.net.kept.state_dict(keep_vars=True)[name]
        assert now is tensor and now.data_ptr() == address, f"{name} was touched"
    for microbatch in range(2):
        model(features(10 * microbatch + dist.get_rank())).square().mean().backward()
    # The gradients that each rank would have alone.
    for microbatch in range(2):
        reference(features(10 * microbatch + dist.get_rank())).square().mean().backward()
    for name, parameter in reference.named_parameters():
        expected = parameter.grad.clone()
        if "kept" not in name:
            dist.all_reduce(expected)
            expected /= dist.get_world_size()
        assert_close(name, full(model.get_parameter(name).grad), expected, rtol=1e-12, atol=1e-14)
    squares = torch.zeros(2)  # of sharded and of ignored parameters
    for name, parameter in model.named_parameters():
        squares[int("kept" in name)] += full(parameter.grad).square().sum()
    dist.all_reduce(squares)
    expected_norm = math.sqrt(squares.sum().item() / dist.get_world_size())
    assert math.isclose(norm_of_gradients(model.parameters()).item(), expected_norm, rel_tol=1e-12)
    (norm,) = clip_grad_norm_(model, 0.01).values()
    assert math.isclose(norm.item(), expected_norm, rel_tol=1e-12)
    before = model.net.kept.fc_in.weight.detach().clone()
    optimizer.step()
    assert bool((model.net.kept.fc_in.weight != before).all())
