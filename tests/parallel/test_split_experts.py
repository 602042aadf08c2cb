"""Expert parallelism, compared with one process: every loss, norm and parameter of two steps."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.cases import for_each
from support.comparing import full_parameters
from support.experts import NUM_EXPERTS, MoELanguage
from support.language import VOCABULARY, WIDTH, batch, loss_of
from support.legality import Carried, check_carried, check_clips, check_start
from support.on_ranks import on_ranks
from support.ranks import run_ranks
from support.synchronisations import Synchronisations
from support.training import FULL, adamw, sgd
from support.translations import config_of
from torch import nn
from torch.distributed.checkpoint import save as save_directory
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, PrepareModuleInput, RowwiseParallel

from composer_fsdp2 import (
    ComposerFSDP2Error,
    load_checkpoint,
    plan_sharding,
    prepare_fully_shard,
    save_monolithic,
)
from tests.checkpoint.test_load import composer_state

LAYERS: dict[str, ParallelStyle] = {
    "model.embedding": RowwiseParallel(input_layouts=Replicate()),
    "model.layers.*.mix": ColwiseParallel(output_layouts=Replicate()),
    "model.head": ColwiseParallel(output_layouts=Replicate()),
}

Optimizer = torch.optim.Optimizer


def build() -> MoELanguage:
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    return MoELanguage()


def one_layer() -> MoELanguage:
    return MoELanguage(num_layers=1)


def split_as_foundry(model: nn.Module, degree: int) -> None:
    """LLM Foundry's set-up for MegaBlocks (llmfoundry/models/layers/ffn.py, set_ffn_device_mesh), on a mesh made
    here."""
    shape = (dist.get_world_size() // degree, degree)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("weight_parallel", "expert_parallel"))
    for layer in model.model.layers:
        split_weights(layer.moe.experts.mlp, mesh)
        layer.moe.experts._fsdp_kwargs_dict = {"device_mesh": mesh["weight_parallel"]}


def split_weights(module: nn.Module, mesh: DeviceMesh) -> None:
    for name, weight in list(module.named_parameters()):
        part = distribute_tensor(weight.detach(), mesh["expert_parallel"], [Shard(0)])
        module.register_parameter(name, nn.Parameter(part))


def partly_frozen() -> MoELanguage:
    """The first layer's inputs have no gradients, and its experts are frozen."""
    model = MoELanguage()
    model.model.embedding.requires_grad_(False)
    model.model.layers[0].requires_grad_(False)
    return model


def split(degree: int, *, build: Callable[[], nn.Module] = one_layer, **options: Any) -> Carried:
    config = {"expert_parallel_degree": degree} | options.pop("config", {})
    return Carried(config=config, build=build, **options)


RECOMPUTED, KEPT = {"activation_checkpointing": True}, {"sharding_strategy": "SHARD_GRAD_OP"}
# Each setting once, and pairs of independent settings; order/ has others.
TRAINED: dict[str, Carried] = {
    "two layers, recomputed, kept gathered": split(2, config=RECOMPUTED | KEPT, build=MoELanguage),
    "all ranks, recomputed, not reentrant": split(4, config=RECOMPUTED | {"activation_checkpointing_reentrant": False}),
    "frozen, offloaded": split(2, config={"cpu_offload": True}, build=partly_frozen),
    "microbatches, reduced in the last": split(2, config={"gradient_sync": "last"}, num_microbatches=2),
    "state from before": split(2, optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=0.01), steps_before=2),
    "layers split too, recomputed": split(2, config=RECOMPUTED, plan=lambda: LAYERS, num_shared=2),
    "many experts without tokens": split(4, build=partial(MoELanguage, num_experts=64, num_layers=1)),
}


@on_ranks(4)
def test_training_is_that_of_one_process(folder: str) -> None:
    """An EP-sharded model trains like one process, with different batches on all ranks: no gradient covers some ranks'
    tokens only, or is too large by the number of ranks."""
    for_each(check_carried, {name: (row,) for name, row in TRAINED.items()})


# --- synchronization with the device


@on_ranks(2)
def test_a_layer_waits_for_its_device_once(folder: str) -> None:
    """Otherwise a GPU would idle in each layer, once for each routing count that the host reads. The recomputed forward
    of a checkpointed layer adds one."""
    for config, num_forwards in ({}, 1), ({"activation_checkpointing": True}, 2):
        model = build()
        prepare_fully_shard(model, None, FULL | config | {"expert_parallel_degree": 2}, device="cpu")
        loss_of(model, batch(0, 2)).backward()  # the first step finds the roots
        with Synchronisations() as found:
            loss_of(model, batch(1, 2)).backward()
        ours = found.of_packages("composer_fsdp2")
        assert len(ours) == num_forwards * len(model.model.layers), ours


# --- in bf16


@on_ranks(4)
def test_bf16_is_that_of_the_run_without_split_experts(folder: str) -> None:
    """Under mixed precision tokens are sent in bf16, and only its rounding changes results: gradients of one step and
    losses of several."""
    torch.set_default_dtype(torch.float32)
    found: dict[int, tuple[list[float], dict[str, torch.Tensor]]] = {}
    for degree in (1, 2):
        torch.manual_seed(0)
        model = one_layer()
        optimizer = sgd(model)
        prepare_fully_shard(model, optimizer, {"expert_parallel_degree": degree}, precision="amp_bf16", device="cpu")
        seen: list[torch.dtype] = []
        experts = model.model.layers[0].moe.experts
        experts.register_forward_pre_hook(lambda _, args, seen=seen: seen.append(args[0].dtype))
        losses: list[float] = []
        gradients: dict[str, torch.Tensor] = {}
        for number in range(2):
            loss = loss_of(model, batch(number, 8).chunk(4)[dist.get_rank()])
            loss.backward()
            gradients = gradients or {name: each.grad.full_tensor() for name, each in model.named_parameters()}
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        assert seen[0] == torch.bfloat16 and all(each.dtype == torch.float32 for each in gradients.values())
        found[degree] = losses, gradients
    (losses, gradients), (ours, of_ours) = found[1], found[2]
    torch.testing.assert_close(torch.tensor(ours), torch.tensor(losses), rtol=2**-8, atol=0)
    for name, expected in gradients.items():
        error = ((of_ours[name] - expected).norm() / expected.norm()).item()
        assert error < 2**-7, (name, error)


# --- a layer with its own communication


class OwnExperts(nn.Module):
    """A script's own EP layer, which all-gathers its experts; the caller passes the expert of each token."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(NUM_EXPERTS, WIDTH, WIDTH))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=0.25)

    def forward(self, x: torch.Tensor, expert: torch.Tensor) -> torch.Tensor:
        weight: torch.Tensor = self.weight
        if isinstance(weight, DTensor):
            num_ranks, weight = weight.device_mesh.size(), weight.full_tensor(grad_placements=[Partial()])
            weight = weight / num_ranks + (weight * (1 - 1 / num_ranks)).detach()  # its gradient is the mean over ranks
        return torch.einsum("...d,...de->...e", x, weight[expert])


class OwnDecoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.experts = nn.ModuleList(OwnExperts() for _ in range(2))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for number, experts in enumerate(self.experts):
            x = x + experts(x, (tokens * (number + 3)) % NUM_EXPERTS)
        return self.head(x)

    def fsdp_wrap_fn(self, module: nn.Module) -> object:
        return getattr(module, "_fsdp_kwargs_dict", False)


def own_language() -> nn.Module:
    return nn.Sequential(OrderedDict(model=OwnDecoder()))


def by_script(degree: int) -> Carried:
    def prepare(model: nn.Module) -> None:
        mesh = init_device_mesh("cpu", (4 // degree, degree), mesh_dim_names=("weight_parallel", "expert_parallel"))
        for experts in model.model.experts:
            split_weights(experts, mesh)
            experts._fsdp_kwargs_dict = {"device_mesh": mesh["weight_parallel"]}

    return Carried(build=own_language, prepare=prepare)


@on_ranks(4)
def test_a_layer_that_communicates_by_itself_trains_as_one_process(folder: str) -> None:
    """Weights sharded along the script's own mesh are sharded by FSDP along the other axes, and the layer does its own
    communication."""
    for_each(check_carried, {"two ranks": (by_script(2),), "all ranks": (by_script(4),)})


# --- initial values


@on_ranks(4)
def test_split_experts_start_with_the_values_of_an_unsplit_model(folder: str) -> None:
    """On the meta device each rank would draw the same numbers for its own experts, so all EP shards would be equal."""
    cases = {start: (split(2), one_layer, start) for start in ("meta", "mixed", "unlike")}
    cases["layers, too"] = (split(2, plan=lambda: LAYERS), one_layer, "meta")
    for_each(check_start, cases | {"by script": (by_script(2), own_language, "meta")})


# --- gradients and full parameters


@on_ranks(4)
def test_gradients_are_clipped_and_parameters_seen_as_in_one_process(folder: str) -> None:
    """Clipping by any norm; within summon_full_params a weight contains all experts, and writes to it are kept."""
    check_clips(split(2), "by the largest", "by value", "adaptive")


# --- checkpoints


def step(model: nn.Module, optimizer: Optimizer, number: int, share: int = 1) -> None:
    """``share``: the number of ranks with the same batch."""
    loss_of(model, batch(number, 8).chunk(dist.get_world_size() // share)[dist.get_rank() // share]).backward()
    optimizer.step()
    optimizer.zero_grad()


def prepared(degree: int | None, seed: int = 0, layers: bool = False) -> tuple[nn.Module, Optimizer]:
    """``degree`` None: not sharded. ``layers``: also TP-sharded over two ranks."""
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(seed)
    model = one_layer()
    optimizer = adamw(model)
    if degree is not None:
        split = {"tensor_parallel_degree": 2, "layer_plan": LAYERS} if layers else None
        config = FULL | {"expert_parallel_degree": degree}
        prepare_fully_shard(model, optimizer, config, device="cpu", tensor_parallel=split)
    return model, optimizer


def save_both(folder: str) -> dict[str, torch.Tensor]:
    """Saves after two steps at degree 2, as a directory and as one file. Returns the result of the third step."""
    model, optimizer = prepared(2)
    for number in range(2):
        step(model, optimizer, number)
    save_directory(composer_state(model, optimizer), checkpoint_id=f"{folder}/directory")
    save_monolithic(composer_state(model, optimizer), f"{folder}/file.pt")
    step(model, optimizer, 2)
    return full_parameters(model)


Case = tuple[str, int | None, bool]  # a form, the degree, whether layers are TP-sharded as well


def go_on(folder: str, cases: dict[str, Case]) -> dict[str, dict[str, torch.Tensor]]:
    """Loads, trains and saves again, then loads that at degree 2."""

    def after(form: str, degree: int | None, layers: bool) -> dict[str, torch.Tensor]:
        model, optimizer = prepared(degree, seed=7, layers=layers)
        load_checkpoint(f"{folder}/{form}", model, optimizer)
        if degree in (1, 4) or layers:
            again = f"{folder}/{form} of {degree}, {layers}"
            if form == "directory":
                save_directory(composer_state(model, optimizer), checkpoint_id=again)
            else:
                save_monolithic(composer_state(model, optimizer), again)
            model, optimizer = prepared(2, seed=8)
            layers = False
            load_checkpoint(again, model, optimizer)
        step(model, optimizer, 2, share=2 if layers else 1)
        return full_parameters(model)

    return for_each(after, cases)


@pytest.mark.any_torch
def test_a_checkpoint_of_split_experts_goes_on_anywhere(tmp_path: Path):
    """Weights, optimizer state and the next step are equal after loading at another degree, without EP, with TP, or in
    one process, and after loading back."""
    expected = run_ranks(save_both, 4, str(tmp_path))[0]
    forms = ("directory", "file.pt")
    sharded: list[Case] = [("directory", 4, False), ("directory", 2, True), ("file.pt", 2, True), ("file.pt", 1, False)]
    alone: list[Case] = [(form, None, False) for form in forms]
    runs = {
        str(case): found
        for cases, ranks in ((sharded, 4), (alone, 1))
        for case, found in run_ranks(go_on, ranks, str(tmp_path), {str(case): case for case in cases})[0].items()
    }
    assert len(runs) == 6
    for case, found in runs.items():
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=0, atol=1e-10, msg=lambda t, n=name, c=case: c + n + t)


@on_ranks(4, fresh=True)
def test_what_is_computed_of_split_experts_is_put_together_in_order(folder: str) -> None:
    """torch 2.7 swaps their rows, so a momentum with weight decay would be saved in the wrong order."""
    model, _ = prepared(2)
    weight = model.model.layers[0].moe.experts.mlp.w1
    assert torch.equal((weight * 2).full_tensor(), weight.full_tensor() * 2)


# --- refused models


def with_more_than_experts(model: MoELanguage) -> None:
    model.model.layers[1].moe.experts.mlp.bias = nn.Parameter(torch.zeros(3))


def with_shared_experts(model: MoELanguage) -> None:
    first, second = (layer.moe.experts.mlp for layer in model.model.layers)
    second.w1 = first.w1


def with_a_mesh_of_its_own(model: MoELanguage) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    model.model.layers[0].moe.experts._fsdp_kwargs_dict = {"device_mesh": mesh["b"]}


def split_in_another_dimension(model: MoELanguage) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("weight_parallel", "expert_parallel"))
    weights = model.model.layers[0].moe.experts.mlp
    weights.w1 = nn.Parameter(distribute_tensor(weights.w1.detach(), mesh["expert_parallel"], [Shard(1)]))


def split_by_unknown_layers(model: MoELanguage) -> None:
    """A layer with its own token exchange, and a unit without a mesh."""
    split_as_foundry(model, 2)
    for layer in model.model.layers:
        layer.moe.experts.forward = lambda tokens: tokens
        del layer.moe.experts._fsdp_kwargs_dict


REFUSED: dict[str, tuple[dict[str, Any], Callable[[MoELanguage], None], str]] = {
    "groups": ({"process_group": "set2"}, lambda model: None, "process_group"),
    "whole weights beside": ({}, with_more_than_experts, r"moe.experts.mlp.bias: not split by experts"),
    "shared weights": ({}, with_shared_experts, "no unit of its own"),
    "a mesh of its own": ({}, with_a_mesh_of_its_own, "device_mesh of its own"),
    "split in another dimension": ({"expert_parallel_degree": 1}, split_in_another_dimension, "first dimension"),
    "of a known layer, split by the script": (
        {"expert_parallel_degree": 1},
        lambda model: split_as_foundry(model, 2),
        "experts.mlp.w1.*pass the layer unsplit",
    ),
    "split otherwise": ({"expert_parallel_degree": 4}, lambda model: split_as_foundry(model, 2), "use one degree"),
    "in the layer plan": (
        {
            "layer_plan": LAYERS
            | {
                "model.layers.*.moe.experts": PrepareModuleInput(
                    input_layouts=(Replicate(), None, None, None), desired_input_layouts=(Replicate(), None, None, None)
                )
            }
        },
        lambda model: None,
        "in the layer plan, and split by experts; take it out of the plan",
    ),
    "split by the script, beside layers": (
        {"layer_plan": LAYERS},
        lambda model: split_as_foundry(model, 2),
        "whose consecutive ranks would have different",
    ),
    "split without a mesh": ({"expert_parallel_degree": 1}, split_by_unknown_layers, "mesh for the other ranks"),
}


@pytest.mark.any_torch
@on_ranks(4)
def test_what_cannot_be_split_is_refused(folder: str) -> None:
    """Errors name the module, on every rank, before anything changes; order/ has those of other keys and of the
    model."""

    def refused(config: dict[str, Any], prepare: Callable[[MoELanguage], None], says: str) -> None:
        model = build()
        prepare(model)
        config = {"expert_parallel_degree": 2} | config
        layers = config.pop("layer_plan", None)
        layers = layers and {"tensor_parallel_degree": 2, "layer_plan": layers}
        before = dict(model.named_parameters())
        with pytest.raises(ComposerFSDP2Error, match=says):
            prepare_fully_shard(model, None, FULL | config, device="cpu", tensor_parallel=layers)
        assert all(parameter is before[name] for name, parameter in model.named_parameters())
        assert all("forward" not in vars(layer.moe) for layer in model.model.layers)

    for_each(refused, REFUSED)
    model = build()
    ignored = {"expert_parallel_degree": 2, "ignored_modules": [model.model.layers[0].moe]}
    with pytest.raises(ComposerFSDP2Error, match=r"layers\.0\.moe\.experts: its experts .* no unit of its own"):
        prepare_fully_shard(model, None, FULL | ignored, device="cpu")


def test_the_plan_says_which_experts_are_split():
    """explain() shows where tokens are sent."""
    text = plan_sharding(build(), config_of(FULL | {"expert_parallel_degree": 2})).explain()
    line = f"experts over 2 ranks: model.layers.*.moe.experts (2 modules): 2 of {NUM_EXPERTS} on each, tokens travel"
    assert line in text
