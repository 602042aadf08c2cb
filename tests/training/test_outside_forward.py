"""Parameters used outside their unit's forward: exactly the results of one process, or an error that names them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from support.cases import all_of, for_each
from support.comparing import full
from support.examples import IS_THOROUGH
from support.models import WIDTH, Chain, Model, ModelWithScalar, tokens
from support.on_ranks import on_ranks
from support.ranks import run_ranks
from support.training import FULL, HSDP_2X2, assert_gradients
from torch import nn
from torch.distributed.tensor import DTensor

from composer_fsdp2 import begin_microbatch, clip_grad_norm_, prepare_fully_shard, summon_full_params
from composer_fsdp2.training.outside_forward import FullTensorMode, explain_mixed
from composer_fsdp2.training.run import run_of

Term = Callable[[nn.Module, torch.Tensor], Any]  # of the loss, from the model and its output


def l2(model: nn.Module, output: torch.Tensor) -> Any:
    return sum(parameter.pow(2).sum() for parameter in model.parameters())


def block_weight(model: nn.Module) -> torch.Tensor:
    return model.get_submodule("decoder.blocks.0.fc_in").weight


def orthogonality(model: nn.Module, output: torch.Tensor) -> torch.Tensor:
    """Uses a block's weight together with a plain matrix."""
    weight = block_weight(model)
    return (weight.T @ weight - torch.eye(WIDTH)).pow(2).sum()


def projected(model: nn.Module, output: torch.Tensor) -> torch.Tensor:
    """Passes a batch through a block's weight, so each rank computes a different gradient for it."""
    return F.linear(output[..., :WIDTH], block_weight(model)).pow(2).mean()


def tied_logits(model: nn.Module, output: torch.Tensor) -> torch.Tensor:
    return (output.mean(1)[:, :WIDTH] @ model.get_submodule("decoder.embed").weight.T).pow(2).mean()


def norms(model: nn.Module, output: torch.Tensor) -> torch.Tensor:
    """Reductions of each kind, on shards with a smaller last one; also of tensors in a list, and written in place."""
    weight = block_weight(model)
    total = torch.zeros(())
    total += weight.norm()
    total.add_(weight.abs().sum())
    total = total + torch.stack([weight.mean(), weight.abs().amax(), output.mean()]).sum() + weight.sum() ** 2
    return total + 2 * (weight.pow(2).sum() + 1) + weight.std() + weight.flatten().max(0).values / 3


@torch.compile(backend="aot_eager")
def compiled_projection(model: nn.Module, output: torch.Tensor) -> torch.Tensor:
    return projected(model, output)


def compiled(model: nn.Module, output: torch.Tensor) -> torch.Tensor:
    """For the sharded model only."""
    is_sharded = isinstance(block_weight(model), DTensor)
    return compiled_projection(model, output) if is_sharded else projected(model, output)


TERMS: dict[str, Term] = {
    "l2": l2, "orthogonality": orthogonality, "projected": projected, "tied logits": tied_logits, "norms": norms,
}  # fmt: skip


def all_terms(model: nn.Module, output: torch.Tensor) -> Any:
    return sum(term(model, output) for term in TERMS.values())


def check_term(
    term: Term, config: dict[str, Any], build: Callable[[], nn.Module] = Model, *, dtype: Any = torch.float64
) -> None:
    """Two batches of two microbatches, clipped, compared with one process that trains on all ranks' batches."""
    torch.set_default_dtype(dtype)
    model, reference = (seeded(build) for _ in range(2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    its = torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.9)
    prepare_fully_shard(model, optimizer, FULL | config, device="cpu")
    ranks = dist.get_world_size()
    for step in range(2):
        for number in range(2):
            seed = 2 * step + number
            begin_microbatch(model, is_last=number == 1)
            output = model(tokens(ranks * seed + dist.get_rank()))
            with FullTensorMode():
                loss = output.pow(2).mean() + 0.1 * term(model, output)
            assert not isinstance(loss, DTensor), type(loss)
            loss.backward()
            values = []
            for rank in range(ranks):
                expected = reference(tokens(ranks * seed + rank))
                values.append(expected.pow(2).mean() + 0.1 * term(reference, expected))
                (values[-1] / ranks).backward()
            torch.testing.assert_close(loss, values[dist.get_rank()], rtol=1e-12, atol=0)
        assert_gradients(model, reference)
        clip_grad_norm_(model, 0.5)
        torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.5)
        for each in (optimizer, its):
            each.step()
            each.zero_grad()
    for name, parameter in reference.named_parameters():
        ours = dict(model.named_parameters())[name]
        torch.testing.assert_close(full(ours), parameter.detach(), rtol=1e-11, atol=1e-13, msg=name)


def seeded(build: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(4)
    return build()


CONFIGS: dict[str, dict[str, Any]] = {
    "SHARD_GRAD_OP": {"sharding_strategy": "SHARD_GRAD_OP"},
    "NO_SHARD": {"sharding_strategy": "NO_SHARD"},
    "gathered between microbatches": {"gradient_sync": "last", "reshard_after_backward": False},
    "offloaded": {"cpu_offload": True},
}


def check_terms(world_size: int) -> None:
    cases: dict[str, Any] = {name: (all_terms, config) for name, config in CONFIGS.items()}
    cases |= {"compiled": (compiled, {}), "replicated": (l2, {}, ModelWithScalar)}
    cases |= {name: (term, {}) for name, term in TERMS.items()} if IS_THOROUGH else {"default": (all_terms, {})}
    if world_size == 4:
        cases = {"deferred": (all_terms, HSDP_2X2 | {"gradient_sync": "defer_replica"})}
    for_each(check_term, cases)


@pytest.mark.parametrize("world_size", [pytest.param(2, marks=pytest.mark.any_torch), 4])
def test_a_penalty_trains_as_in_one_process(world_size: int):
    """A loss that uses parameters of a block or the root equals that of one process to the last digits, where FSDP1 did
    the same, and also where FSDP1 computed with 1-D shards. Its gradient is averaged once over shards and replicas,
    even while other gradients wait for the last microbatch."""
    run_ranks(check_terms, world_size, world_size)


def check_shown_between_steps(config: dict[str, Any], optimizer: Callable[..., torch.optim.Optimizer]) -> None:
    torch.set_default_dtype(torch.float64)
    model, reference = seeded(Model), seeded(Model)
    optimizers = [optimizer(each.parameters()) for each in (model, reference)]
    prepare_fully_shard(model, optimizers[0], FULL | config, device="cpu")
    for step in range(2):
        for is_last in (False, True):
            begin_microbatch(model, is_last=is_last)
            with torch.no_grad():
                torch.testing.assert_close(model(tokens(7)), reference(tokens(7)))
            assert all(isinstance(each, DTensor) for each in model.parameters()), "full after an evaluation"
            penalty = l2(model, torch.empty(0)).full_tensor()
            (model(tokens(step)).mean() + penalty).backward()
            (reference(tokens(step)).mean() + l2(reference, torch.empty(0))).backward()
            assert all(isinstance(each, DTensor) for each in model.parameters()), "full after a backward"
        assert_gradients(model, reference)
        with torch.no_grad():  # its unsharded values are outdated after the step
            model(tokens(7))
        for each in optimizers:
            each.step()
            each.zero_grad()
        with torch.no_grad():
            torch.testing.assert_close(model(tokens(7)), reference(tokens(7)))
        model.decoder.blocks[0].fc_in.weight.requires_grad_(step == 1)
        reference.decoder.blocks[0].fc_in.weight.requires_grad_(step == 1)


# Each writes into the shards in another way.
OPTIMIZERS = {
    "one by one": partial(torch.optim.SGD, lr=0.1, foreach=False),
    "foreach": partial(torch.optim.SGD, lr=0.1, foreach=True),
    "fused": partial(torch.optim.AdamW, lr=0.1, fused=True),
}


def test_parameters_are_shards_between_steps():
    """A penalty computed after an evaluation, or between microbatches, used to read memory that its backward had freed.
    A forward after optimizer.step() ran on the weights before it."""
    cases = {name: (CONFIGS[name], OPTIMIZERS["foreach"]) for name in CONFIGS}
    cases |= {how: ({}, OPTIMIZERS[how]) for how in ("one by one", "fused")}
    run_ranks(for_each, 2, check_shown_between_steps, cases)


def noted(model: nn.Module) -> dict[str, Any]:
    return {name: vars(parameter).get("tag") for name, parameter in model.named_parameters()}


def check_attributes(config: dict[str, Any], device: str, tied: bool) -> None:
    torch.manual_seed(0)
    with torch.device(device):
        model = Model(tied=tied)
    if device == "meta":
        model.decoder.param_init_fn = lambda module: getattr(module, "reset_parameters", lambda: None)()
    names = {name: name for name, _ in model.named_parameters()}
    for name, parameter in model.named_parameters():
        parameter.tag, parameter._omit_weight_decay = name, True
    prepare_fully_shard(model, None, FULL | config, device="cpu")
    assert noted(model) == names
    seen: dict[str, Any] = {}
    model.decoder.blocks[0].register_forward_hook(lambda block, *unused: seen.update(noted(block)))
    output = model(tokens(1))
    assert seen == {name: f"decoder.blocks.0.{name}" for name in seen} and seen, seen
    assert noted(model) == names, "after forward"
    output.mean().backward()
    assert noted(model) == names, "after backward"
    with summon_full_params(model):
        assert noted(model) == names, "in full"
    if tied:
        assert model.decoder.head.weight.tag == "decoder.embed.weight"


@on_ranks(2)
def test_what_a_script_noted_on_a_parameter_stays(folder: str) -> None:
    """Parameter attributes (p.optim_group for optimizer groups, Hugging Face's _is_hf_initialized, Foundry's flags)
    must survive sharding; without them, weights are initialised again or decayed."""
    configs = {"FULL_SHARD": {}} | {name: CONFIGS[name] for name in ("SHARD_GRAD_OP", "NO_SHARD")}
    cases = {
        f"{name}, {device}": (config, device, device == "meta")
        for name, config in configs.items()
        for device in ("cpu", "meta")
    }
    for_each(check_attributes, cases)


def check_hooks() -> None:
    """Neither FSDP1 nor FSDP2 runs these hooks; the log lists them, and where to register them instead."""
    model = Model()
    fired: list[str] = []
    weight = model.decoder.head.weight
    weight.register_hook(lambda gradient: fired.append("hook"))
    model.decoder.norm.weight.register_post_accumulate_grad_hook(lambda parameter: fired.append("accumulated"))
    prepare_fully_shard(model, None, FULL, device="cpu")
    sharded = model.decoder.head.weight
    sharded.register_post_accumulate_grad_hook(lambda parameter: fired.append(type(parameter.grad).__name__))
    model(tokens(1)).mean().backward()
    assert fired == ["DTensor"], fired
    plan = run_of(model).plan
    [note] = [note for note in plan.notes if "hook" in note]
    assert note.startswith("decoder.norm.weight, decoder.head.weight: hooks") and "after sharding" in note, note


class Encoding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = Encoder(layer=nn.Linear(4, 4))

    def forward(self, x: torch.Tensor, how: str) -> torch.Tensor:
        if how == "weight":
            return x @ self.encoder.layer.weight
        return self.encoder.encode(x) if how == "encode" else self.encoder.layer(x)


class Encoder(Chain):
    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


def check_explained() -> None:
    """The error names the parameter, the method and module that uses it, and the line to write, besides the
    operator."""
    model = Encoding()
    prepare_fully_shard(model, None, FULL, device="cpu")
    for how, parts in (
        (
            "encode",
            [
                "encoder.layer.weight, encoder.layer.bias are sharded within encoder.encode()",
                'register_fsdp_forward_method(model.encoder, "encode")',
            ],
        ),
        ("layer", ["outside of the forward of its unit, encoder"]),
        ("weight", ["test_outside_forward.py:", "full_tensor()"]),
    ):
        with pytest.raises(RuntimeError) as caught:
            model(torch.ones(2, 4), how)
        explain_mixed(model, caught.value)
        [note] = caught.value.__notes__
        assert all(part in note for part in parts), note


def test_what_a_script_is_told():
    """Scripts are warned of hooks that will not run, and of parameters that they use as shards."""
    run_ranks(all_of, 2, check_hooks, check_explained)
