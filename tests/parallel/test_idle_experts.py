"""Idle experts, which none of a rank's tokens chose: all ranks unshard the same experts, without extra arithmetic."""

from __future__ import annotations

import copy
import re
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from support.cases import all_of, for_each
from support.comparing import assert_same
from support.memory import gradients_of_halved, run_out_of_memory
from support.models import tokens
from support.ranks import run_ranks
from support.training import FULL, assert_close, assert_gradients, named_parameters, reports_soon
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.flop_counter import FlopCounterMode

from composer_fsdp2 import (
    ComposerFSDP2Error,
    PlanError,
    RanksDivergedError,
    begin_microbatch,
    plan_sharding,
    prepare_fully_shard,
    translate,
)
from composer_fsdp2._torch.repairs import repair_cpu_collectives
from composer_fsdp2.parallel.idle_experts import run_idle_experts
from composer_fsdp2.sharding.apply import check_plan

WIDTH, NUM_EXPERTS = 6, 5
EXPERTS = {"transformer_layer_cls_to_wrap": ["Layer"], "moe_experts": ["Expert"]}
IN_ORDER = {"wrap_policy": EXPERTS, "idle_experts": "in_order"}
GUARD = {"collective_guard": 60}


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(x)))


class Weighted(Expert):
    """Multiplies its rows by their weights, as Mixtral's experts once did."""

    def forward(self, x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return super().forward(x) * weights


class Moe(nn.Module):
    """Skips experts that no token chose, as recent transformers does."""

    def __init__(
        self,
        expert: type[Expert] = Expert,
        order: Callable[[list[int]], list[int]] = sorted,
        num_experts: int = NUM_EXPERTS,
        shared: str = "",
    ) -> None:
        super().__init__()
        self.shared = shared  # the shared expert of all tokens runs before or after the others
        if shared:
            self.shared_expert = expert()
        self.gate = nn.Linear(WIDTH, num_experts, bias=False)
        self.experts = nn.ModuleList(expert() for _ in range(num_experts))
        self.order, self.experts_weigh = order, issubclass(expert, Weighted)
        self.is_passed_over = False  # no token is routed to any expert
        self.idle: list[int] = []

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rows = x.reshape(-1, WIDTH)
        weights, chosen = self.gate(rows).softmax(-1).topk(2)
        result = torch.zeros_like(rows)
        common = self.shared_expert(rows) if self.shared == "before" else 0
        hit = set() if self.is_passed_over else set(chosen.flatten().tolist())
        self.idle.append(len(self.experts) - len(hit))
        for number in self.order(list(hit)):
            row, place = torch.where(chosen == number)
            arguments = (rows[row], weights[row, place, None])
            expert = self.experts[number]
            output = expert(*arguments) if self.experts_weigh else expert(arguments[0]) * arguments[1]
            result = result.index_add(0, row, output)
        common = self.shared_expert(rows) if self.shared == "after" else common
        return (result + common).view_as(x), weights


class Layer(nn.Module):
    def __init__(self, moe: Moe) -> None:
        super().__init__()
        self.mix, self.moe = nn.Linear(WIDTH, WIDTH), moe

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + torch.tanh(self.mix(x))
        return x + self.moe(x)[0]


class Decoder(nn.Module):
    def __init__(self, num_layers: int = 2, **options: Any) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, WIDTH)
        self.layers = nn.ModuleList(Layer(Moe(**options)) for _ in range(num_layers))
        self.head = nn.Linear(WIDTH, 11)
        self.recomputed: type[nn.Module] | None = None

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)

    def activation_checkpointing_fn(self, module: nn.Module) -> bool:
        return self.recomputed is not None and isinstance(module, self.recomputed)


def build(recomputed: type[nn.Module] | None = None, **options: Any) -> nn.Module:
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    model = nn.Sequential(OrderedDict(decoder=Decoder(**options)))
    model.decoder.recomputed = recomputed
    return model


def batch(number: int, rank: int) -> torch.Tensor:
    return tokens(100 * number + rank, batch_size=1, length=2)


def loss_of(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    return model(ids).square().mean()


def sharded(
    config: dict[str, Any], recomputed: type[nn.Module] | None = None, **options: Any
) -> tuple[nn.Module, nn.Module]:
    """A sharded model and the same model unsharded."""
    model = build(recomputed, **options)
    reference = copy.deepcopy(model)
    prepare_fully_shard(model, None, FULL | GUARD | config, device="cpu")
    for name, parameter in reference.named_parameters():
        parameter.requires_grad_(named_parameters(model)[name].requires_grad)
    return model, reference


def check_training(
    config: dict[str, Any],
    options: dict[str, Any],
    num_microbatches: int = 1,
    change: Callable[[nn.Module], object] = lambda model: None,
) -> None:
    """Two steps with an evaluation between them and different experts on every rank; one layer, unless ``options`` set
    two.

    Args:
        change: Applied to the sharded model.
    """
    model, reference = sharded(config, **{"num_layers": 1} | options)
    change(model)
    world_size, rank = dist.get_world_size(), dist.get_rank()
    for step in range(2):
        for number in range(num_microbatches):
            begin_microbatch(model, is_last=number == num_microbatches - 1)
            at = step * num_microbatches + number
            (loss_of(model, batch(at, rank)) / num_microbatches).backward()
            for peer in range(world_size):
                (loss_of(reference, batch(at, peer)) / num_microbatches / world_size).backward()
        assert_gradients(model, reference)
        assert (
            max(parameter.grad.abs().max() for parameter in reference.parameters() if parameter.grad is not None) > 0.01
        )
        for each in (model, reference):
            each.zero_grad()
        with torch.no_grad():
            assert_close("evaluation", model(batch(9, rank)), reference(batch(9, rank)), rtol=1e-12, atol=1e-14)
    assert max(model.decoder.layers[0].moe.idle) > 0


def recomputing(kind: type[nn.Module], *, reentrant: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    section = {"activation_checkpointing": True, "activation_checkpointing_reentrant": reentrant}
    return IN_ORDER | section, {"recomputed": kind}


def with_units(**words: Any) -> dict[str, Any]:
    return IN_ORDER | {"wrap_policy": words}


LAYERS_RECOMPUTED, BLOCKS_RECOMPUTED, EXPERTS_RECOMPUTED = (
    recomputing(kind, reentrant=kind is Layer) for kind in (Layer, Moe, Expert)
)
# So few experts that some ranks have no idle one.
TWO_LAYERS, FEW = {"num_layers": 2}, {"num_experts": 3}
TRAINED: dict[str, tuple[Any, ...]] = {
    "microbatches, the last": (IN_ORDER | {"gradient_sync": "last"}, {}, 2),
    "layers recomputed, reentrant": (LAYERS_RECOMPUTED[0], LAYERS_RECOMPUTED[1] | FEW),
    "blocks recomputed, kept after forward": (
        BLOCKS_RECOMPUTED[0] | {"sharding_strategy": "SHARD_GRAD_OP"},
        BLOCKS_RECOMPUTED[1] | TWO_LAYERS | FEW,
    ),
    "experts recomputed, prefetching": (
        EXPERTS_RECOMPUTED[0] | {"forward_prefetch": True, "backward_prefetch_limit": 2},
        EXPERTS_RECOMPUTED[1] | TWO_LAYERS | FEW,
    ),
    "blocks too": (with_units(**EXPERTS | {"transformer_layer_cls_to_wrap": ["Layer", "Moe"]}), {}),
    "parts of experts": (with_units(transformer_layer_cls_to_wrap=["Linear", "Layer"]), {}),
    "by size, all below frozen": (
        with_units(min_num_params=100) | {"freeze": ["decoder.embed", "decoder.layers.0"]},
        TWO_LAYERS,
    ),
    "two arguments, frozen below": (
        with_units(**EXPERTS | {"moe_experts": ["Weighted"]})
        | {"freeze": ["decoder.embed", "decoder.layers.0.moe.experts.1"]},
        {"expert": Weighted} | TWO_LAYERS,
    ),
    "a shared expert after the others, as DeepSeek-V3's": (IN_ORDER, {"shared": "after"} | TWO_LAYERS),
    "a shared expert before the others, recomputed": (
        LAYERS_RECOMPUTED[0],
        LAYERS_RECOMPUTED[1] | {"shared": "before"},
    ),
}


def test_idle_experts_train_as_one_process_does():
    """Otherwise ranks would unshard different experts at once and train each parameter on another's gradients."""
    run_ranks(for_each, 2, check_training, TRAINED)


def check_passed_over(reentrant: bool | None) -> None:
    """Experts with two arguments. A rank without tokens has or has not recorded the arguments in an earlier batch."""
    section, options = (IN_ORDER, {}) if reentrant is None else recomputing(Layer, reentrant=reentrant)
    section = section | {"wrap_policy": {**EXPERTS, "moe_experts": ["Weighted"]}}
    model, reference = sharded(section, expert=Weighted, **options)
    for step in range(2):
        for peer in range(2):
            is_passed_over = bool(step and peer)
            for each in (reference, model) if peer == dist.get_rank() else (reference,):
                set_route(each, is_passed_over)
            (loss_of(reference, batch(step, peer)) / 2).backward()
        loss_of(model, batch(step, dist.get_rank())).backward()
        assert_gradients(model, reference)
        for each in (model, reference):
            each.zero_grad()


def check_shared(shared: str, passing: list[set[int]]) -> None:
    """With a shared expert that all tokens use; in each step, ``passing`` lists the ranks without tokens for any
    other."""
    model, reference = sharded(IN_ORDER, shared=shared)
    for step, idle in enumerate(passing):
        for peer in range(dist.get_world_size()):
            for each in (reference, model) if peer == dist.get_rank() else (reference,):
                set_route(each, peer in idle)
            (loss_of(reference, batch(step, peer)) / dist.get_world_size()).backward()
        loss_of(model, batch(step, dist.get_rank())).backward()
        assert_gradients(model, reference)
        for each in (model, reference):
            each.zero_grad()


def test_ranks_without_a_token_beside_a_shared_expert():
    """A rank that has not called any expert yet cannot know whether the shared one runs before or after them."""
    routes = {"one rank, then none": [{1}, set(), {0}], "both, then one": [{0, 1}, {0}, {1}], "none": [set(), {1}]}
    cases = {f"{shared}: {name}": (shared, rows) for shared in ("before", "after") for name, rows in routes.items()}
    run_ranks(for_each, 2, check_shared, cases)


def check_shared_elsewhere() -> None:
    model, _ = sharded(IN_ORDER, shared="before")
    loss_of(model, batch(0, dist.get_rank())).backward()
    for layer in model.decoder.layers:
        layer.moe.shared = "after"
    with pytest.raises(
        ComposerFSDP2Error, match=r"shared_expert of decoder.layers.0.moe before the experts, .* now it"
    ):
        loss_of(model, batch(0, dist.get_rank()))


def test_a_shared_expert_that_changes_its_place_is_an_error():
    """Ranks would unshard it in different order."""
    run_ranks(check_shared_elsewhere, 2)


def set_route(model: nn.Module, is_passed_over: bool) -> None:
    for layer in model.decoder.layers:
        layer.moe.is_passed_over = is_passed_over


def test_ranks_without_a_token_for_any_expert_of_several_arguments():
    """Idle experts run on the arguments of an earlier batch, without its rows; a first batch has none, so it raises."""
    run_ranks(for_each, 2, check_passed_over, {str(each): (each,) for each in (None, True)})
    model = build(expert=Weighted)
    set_route(model, True)
    text = errors_of(model, TypeError)
    assert "missing 1 required positional argument: 'weights'" in text
    assert text.endswith("arguments would tell what it takes. Leave experts in the unit of their layer, which is exact")


# --- cost


def products_of(model: nn.Module) -> int:
    with FlopCounterMode(display=False) as products:
        loss_of(model, batch(0, 0)).backward()
    return products.get_total_flops()


def test_idle_experts_cost_no_arithmetic():
    """Idle experts must add no arithmetic, which a mixture of experts is meant to save."""
    model = build()
    without = products_of(model)
    model.zero_grad()
    assert without > 0 and model.decoder.layers[0].moe.idle[0] > 0
    for layer in model.decoder.layers:
        run_idle_experts(layer.moe, layer.moe.experts)
    assert products_of(model) == without
    assert all(parameter.grad is not None for parameter in model.parameters())  # and all experts ran


def test_what_a_block_returns_can_be_written_to_and_handles_end_it():
    """A model that adds its residual in place must not fail with an error about views."""
    model = build()
    expected = model(batch(0, 0)).detach()
    for layer in model.decoder.layers:
        run_idle_experts(layer.moe, layer.moe.experts)
        layer.forward = partial(in_place, layer)
    output = model(batch(0, 0))
    assert torch.equal(output.detach(), expected)
    output.square().mean().backward()
    # A script that shards by hand can remove the hooks.
    model = build()
    moe = model.decoder.layers[0].moe
    for handle in run_idle_experts(moe, moe.experts):
        handle.remove()
    loss_of(model, batch(0, 0)).backward()
    assert any(expert.up.weight.grad is None for expert in moe.experts)


def in_place(layer: Layer, x: torch.Tensor) -> torch.Tensor:
    x = x + torch.tanh(layer.mix(x))
    return layer.moe(x)[0].add_(x)


# --- by hand


def check_by_hand() -> None:
    model = build()
    reference = copy.deepcopy(model)
    for layer in model.decoder.layers:
        for expert in layer.moe.experts:
            fully_shard(expert)
        fully_shard(layer)
    fully_shard(model)
    for layer in model.decoder.layers:
        run_idle_experts(layer.moe, layer.moe.experts)
    repair_cpu_collectives()
    loss_of(model, batch(0, dist.get_rank())).backward()
    for peer in range(2):
        (loss_of(reference, batch(0, peer)) / 2).backward()
    assert_gradients(model, reference)


def check_hooks_before_sharding() -> None:
    model = build()
    moe = model.decoder.layers[0].moe
    run_idle_experts(moe, moe.experts)
    for expert in moe.experts:
        fully_shard(expert)
    with pytest.raises(PlanError, match=r"experts of Moe were sharded after run_idle_experts, .* call it after"):
        model(batch(0, 0))


def test_the_function_by_itself():
    """Scripts that shard by hand need it, too; hooks in the wrong order would silently have no effect."""
    run_ranks(all_of, 2, check_by_hand, check_hooks_before_sharding)


# --- unsupported experts


def errors_of(model: nn.Module, error_type: type[Exception] = ComposerFSDP2Error) -> str:
    for layer in model.decoder.layers:
        run_idle_experts(layer.moe, layer.moe.experts)
    with pytest.raises(error_type) as caught:
        loss_of(model, batch(0, 0)).backward()
    return "\n".join([str(caught.value), *getattr(caught.value, "__notes__", ())])


def descending(numbers: list[int]) -> list[int]:
    return sorted(numbers, reverse=True)


def twice(numbers: list[int]) -> list[int]:
    return [number for number in sorted(numbers) for _ in range(2)]


def test_another_order_is_an_error():
    """Otherwise ranks would silently unshard different experts again."""
    asked = (
        "idle_experts: in_order runs each expert of Moe once in a forward, in the order of registration; Moe's expert"
    )
    text = errors_of(build(order=descending))
    assert re.fullmatch(rf"{asked} (\d) was called after Moe's expert (\d)\. Leave the experts in the unit .*", text)
    assert re.match(
        rf"{asked} (\d) was called twice\. .* set runs_every_expert = True on", errors_of(build(order=twice))
    )
    model = build()
    moe = model.decoder.layers[0].moe
    run_idle_experts(moe, moe.experts)
    with pytest.raises(ComposerFSDP2Error, match=r"expert 1 was called outside of that module's forward\. Leave"):
        moe.experts[1](torch.zeros(2, WIDTH))


def check_order_without_the_guard() -> None:
    """One rank calls experts in another order, or one twice, in the first or the second block."""

    def check(order: Any, block: int) -> None:
        model, _ = sharded(IN_ORDER | {"collective_guard": None})
        if dist.get_rank():
            model.decoder.layers[block].moe.order = order
        with pytest.raises(ComposerFSDP2Error) as caught:
            loss_of(model, batch(0, dist.get_rank()))
        told = "was called" if dist.get_rank() else "another rank called"
        assert re.search(
            rf"each expert of decoder.layers.{block}.moe once .*; .*{told}.* Leave the experts in the unit of their",
            str(caught.value),
        ), caught.value

    for_each(check, {"descending": (descending, 0), "twice": (twice, 1)})


@reports_soon
def check_order_with_the_guard() -> None:
    """Ranks compare the order in their first forward only; later the guard detects a difference."""
    model, _ = sharded(IN_ORDER | {"collective_guard": 2})
    loss_of(model, batch(0, dist.get_rank())).backward()
    if dist.get_rank():
        for layer in model.decoder.layers:
            layer.moe.order = descending
    with pytest.raises(ComposerFSDP2Error) as caught:
        loss_of(model, batch(0, dist.get_rank()))
    assert isinstance(caught.value, RanksDivergedError) is (dist.get_rank() == 0)
    told = "layers.0.moe.experts" if dist.get_rank() else "rank 1 has not come"
    assert told in str(caught.value), caught.value


@pytest.mark.any_torch
def test_another_order_on_one_rank_ends_all():
    """The others would wait for the rank that raised until the process group's timeout. An order that depends on tokens
    may look right in the first forward; the guard finds it in a later batch."""
    run_ranks(all_of, 2, check_order_without_the_guard, check_order_with_the_guard, fresh=True)


class OverRows(Expert):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * x.mean()


class Pooling(Expert):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).sum(0, keepdim=True)


class Scaled(Expert):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) / x.abs().max()


def test_experts_that_do_not_work_token_by_token_are_named():
    """Otherwise an expert's gradients would be NaN from the first step in which no token chose it."""
    way_out = "it does not treat each token by itself, .* Leave experts in the unit of their layer"
    text = errors_of(build(expert=OverRows))
    assert re.match(rf"Moe's expert \d computes NaN or infinity of no rows: {way_out}", text)
    text = errors_of(build(expert=Pooling))
    assert re.match(rf"Moe's expert \d gives more than no rows for no rows: {way_out}", text)
    model = build()
    model.decoder.layers[0].moe.experts[3].norm = nn.BatchNorm1d(WIDTH)
    with pytest.raises(PlanError, match=rf"decoder.layers.0.moe.experts.3.norm is a BatchNorm1d: {way_out}"):
        plan_of(model, IN_ORDER)
    text = errors_of(build(expert=Scaled), RuntimeError)  # torch's own message, and its cause
    assert "idle_experts: in_order ran Moe's expert" in text and text.endswith("as no token of this rank chose it")


def check_shared_by_hand() -> None:
    model = build(shared="after")
    moe = model.decoder.layers[0].moe
    for expert in (*moe.experts, moe.shared_expert):
        fully_shard(expert)
    with pytest.raises(
        PlanError, match=r"Moe has units beside its experts \(shared_expert\), .* leave them in the unit"
    ):
        run_idle_experts(moe, moe.experts)


def test_a_script_that_shards_a_shared_expert_by_hand_is_told():
    """Its ranks never compare their order."""
    run_ranks(check_shared_by_hand, 1)


# --- in the plan


def plan_of(model: nn.Module, section: dict[str, Any]) -> Any:
    return plan_sharding(model, translate(section, device="cpu").config)


def test_the_plan_says_which_experts_run():
    """Ranks with different keys raise instead of hanging, and the plan shows the experts to the user."""
    plan = plan_of(build(), IN_ORDER)
    paths = [f"decoder.layers.1.moe.experts.{number}" for number in range(NUM_EXPERTS)]
    assert [each.block for each in plan.expert_blocks] == ["decoder.layers.0.moe", "decoder.layers.1.moe"]
    assert plan.expert_blocks[1].experts == tuple(paths) and not plan.notes
    assert (
        "  idle experts: 10 in decoder.layers.0.moe and 1 more run in order on every rank, on no rows" in plan.explain()
    )
    model = build()
    model.decoder.layers[1].moe.runs_every_expert = True
    other = plan_of(model, IN_ORDER)
    assert [each.block for each in other.expert_blocks] == ["decoder.layers.0.moe"] and other.digest != plan.digest
    del model.decoder.layers[1].moe.experts[3]
    with pytest.raises(PlanError, match=r"no module 'decoder.layers.1.moe.experts.4'"):
        check_plan_alone(model, plan)


def check_plan_alone(model: nn.Module, plan: Any) -> None:
    with patch("composer_fsdp2.sharding.apply.dist.get_world_size", return_value=2):
        check_plan(model, plan)


def test_experts_that_the_models_hooks_make_units():
    """Units chosen by the model's hooks are kept. A note warns that ranks may skip experts, and the key fixes that.
    Without expert units the key has no effect, and a note reports it."""
    [note] = plan_of(build(), {**IN_ORDER, "wrap_policy": {"transformer_layer_cls_to_wrap": ["Layer"]}}).notes
    assert note.startswith("idle_experts has no effect, because no expert is a separate unit")
    model = build()
    model.decoder.fsdp_wrap_fn = lambda module: isinstance(module, Expert)
    [note] = plan_of(model, {}).notes
    assert note.startswith("the model's hooks make experts separate units: decoder.layers.0.moe.experts.0 and 9 more")
    assert "set idle_experts: in_order" in note
    plan = plan_of(model, {"idle_experts": "in_order"})
    assert len(plan.expert_blocks) == 2 and not plan.notes
    for layer in model.decoder.layers:
        layer.moe.runs_every_expert = True
    assert not plan_of(model, {}).notes


# --- out of memory


def hungry_model(failing: int | None) -> tuple[nn.Module, list[int]]:
    """Rank ``failing`` runs out of memory once, in its first idle expert. The list is empty after that."""
    model = build()
    prepare_fully_shard(model, None, FULL | IN_ORDER, device="cpu")
    times = [1] * (dist.get_rank() == failing)

    def hungry(expert: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        if times and not len(args[0]):
            times.pop()
            run_out_of_memory("cpu")

    for layer in model.decoder.layers:
        for expert in layer.moe.experts:
            expert.register_forward_pre_hook(hungry)
    return model, times


def check_out_of_memory() -> None:
    rows = torch.cat([batch(number, dist.get_rank()) for number in range(4)])

    def gradients(size: int, failing: int | None) -> dict[str, torch.Tensor]:
        model, times = hungry_model(failing)
        found = gradients_of_halved(model, partial(loss_of, model), rows, size)
        assert not times, "no expert was idle"
        return found

    expected = gradients(2, None)
    for_each(lambda failing: assert_same(gradients(4, failing), expected), {f"rank {each}": (each,) for each in (0, 1)})


def check_out_of_memory_without_votes() -> str:
    model, _ = hungry_model(1)
    with pytest.raises(Exception, match=r"memory|on no rows") as caught:
        loss_of(model, batch(0, dist.get_rank()))
    return str(caught.value)


@pytest.mark.any_torch
def test_out_of_memory_in_an_idle_expert():
    """The batch is halved, as for any other module; the run used to end, because other ranks saw a failed expert.
    Without votes, the other ranks do not wait for the failed one."""
    run_ranks(check_out_of_memory, 2)
    other, failed = run_ranks(check_out_of_memory_without_votes, 2)
    assert "failed on no rows on another rank" in other and "out of memory" in failed
