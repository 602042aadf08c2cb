"""What a step communicates where the experts of a layer lie on different ranks: ours, and by hand.

    python benchmarks/experts.py
    python benchmarks/experts.py --width 128 --experts 16 --json

Four ranks, a decoder whose layers hold all experts in one weight, as LLM Foundry's torch_dmoe does; two ranks split the
experts between them, each expert is sharded over two, and everything else over all. By hand each rank holds its own
experts, ``fully_shard`` shards them along the other axis of the mesh and all else over all ranks, and the layer sends
tokens by all-to-all. Counted are the collectives of a step, and of one with the gradients clipped; gradients of both
are compared. Exit code 0, or 1 if a bar does not hold.
"""

import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import beside
import report
import torch
import torch.distributed as dist
from launch import on_ranks
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional

from composer_fsdp2 import prepare_fully_shard
from composer_fsdp2._torch.repairs import repair_cpu_collectives

RANKS, EXPERT = 4, 2
VOCABULARY, TOKENS, CHOICES = 512, 64, 2


@dataclass(frozen=True, slots=True)
class Sizes:
    width: int
    layers: int
    experts: int


def main(arguments: Sequence[str] | None = None) -> int:
    parser = report.parser(__doc__)
    for name, default in (("width", 64), ("layers", 4), ("experts", 8)):
        parser.add_argument(f"--{name}", type=report.count, default=default)
    given = parser.parse_args(arguments)
    if given.experts % EXPERT:
        parser.error(f"argument --experts: {EXPERT} ranks do not divide {given.experts}")
    options = asdict(Sizes(given.width, given.layers, given.experts))
    found = on_ranks(measure, RANKS, "cpu", options, start_method="fork")
    return beside.conclude(given, found)


def measure(given: dict[str, int]) -> dict[str, Any]:
    sizes = Sizes(**given)
    torch.set_default_dtype(torch.float64)
    return beside.compare(_ours(sizes), _by_hand(sizes), _loss)


def _loss(model: nn.Module) -> torch.Tensor:
    """Of one row, another on each rank."""
    tokens = torch.randint(VOCABULARY, (1, TOKENS), generator=torch.Generator().manual_seed(dist.get_rank()))
    return functional.cross_entropy(model(tokens)[0], tokens[0])


# ---------------------------------------------------------------------------------------------------------------------
# The model: its experts with the forward of LLM Foundry's


class Weights(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.moe_num_experts, self.width = sizes.experts, sizes.width
        shape = (sizes.experts * 2 * sizes.width, sizes.width)
        self.up, self.down = (nn.Parameter(torch.randn(shape) / sizes.width**0.5) for _ in range(2))

    def forward(self, x: torch.Tensor, expert_idx: int) -> torch.Tensor:
        shape = (self.moe_num_experts, 2 * self.width, self.width)
        up, down = (each.view(shape)[expert_idx] for each in (self.up, self.down))
        return functional.silu(x @ up.t()) @ down


class Experts(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.mlp = Weights(sizes)

    def forward(
        self, x: torch.Tensor, scores: torch.Tensor, expert_weights: torch.Tensor, top_experts: torch.Tensor
    ) -> torch.Tensor:
        raise NotImplementedError("both ways have another")


class Layer(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(sizes.width)
        self.router = nn.Linear(sizes.width, sizes.experts, bias=False)
        self.experts = Experts(sizes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = self.norm(x)
        scores = self.router(rows).flatten(0, 1).softmax(-1)
        return x + self.experts(rows, scores, *scores.topk(CHOICES, -1))


class Holder(nn.Module):
    """As Composer has it: the model is the child of what is trained."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model: Any = model

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.model(tokens)
        return logits


def _build(sizes: Sizes) -> Holder:
    torch.manual_seed(0)
    layers = (Layer(sizes) for _ in range(sizes.layers))
    return Holder(
        nn.Sequential(nn.Embedding(VOCABULARY, sizes.width), *layers, nn.Linear(sizes.width, VOCABULARY, bias=False))
    )


def _is_layer(module: nn.Module) -> bool:
    return isinstance(module, Layer)


def _ours(sizes: Sizes) -> Holder:
    model = _build(sizes)
    model.model.fsdp_wrap_fn = _is_layer
    prepare_fully_shard(model, None, {"expert_parallel_degree": EXPERT, "mixed_precision": "FULL"}, device="cpu")
    return model


# ---------------------------------------------------------------------------------------------------------------------
# By hand


def _by_hand(sizes: Sizes) -> Holder:
    """What an expert writes for this one model, with gradients over gloo averaged."""
    model = _build(sizes)
    mesh = init_device_mesh("cpu", (RANKS // EXPERT, EXPERT), mesh_dim_names=("shard", "expert"))
    repair_cpu_collectives()
    for layer in model.modules():
        if isinstance(layer, Layer):
            _split(layer.experts, mesh["expert"])
            fully_shard(layer.experts, mesh=mesh["shard"])
            fully_shard(layer)
    fully_shard(model.model, reshard_after_forward=False)
    return model


def _split(experts: Any, mesh: DeviceMesh) -> None:
    """Leave this rank's experts in the layer, and have tokens travel to those of others."""
    weights: Weights = experts.mlp
    for name, weight in list(weights.named_parameters()):
        part = weight.detach().chunk(EXPERT)[mesh.get_local_rank()].clone()
        weights.register_parameter(name, nn.Parameter(part))
    weights.moe_num_experts //= EXPERT
    group, here = mesh.get_group(), weights.moe_num_experts

    def forward(
        x: torch.Tensor, scores: torch.Tensor, expert_weights: torch.Tensor, top_experts: torch.Tensor
    ) -> torch.Tensor:
        chosen, rows = top_experts.flatten(), x.flatten(0, -2)
        order = chosen.argsort(stable=True)
        numbers = chosen.bincount(minlength=EXPERT * here)
        counts = torch.empty_like(numbers)
        dist.all_to_all_single(counts, numbers, group=group)
        sent, received = (each.view(EXPERT, here).sum(1).tolist() for each in (numbers, counts))
        arrived = _AllToAll.apply(rows[order // CHOICES], received, sent, group)
        owners = torch.arange(here).repeat(EXPERT).repeat_interleave(counts)
        with_own_scale = {name: _Divided.apply(weight) for name, weight in weights.named_parameters()}
        computed = torch.zeros_like(arrived)
        for number in range(here):
            own = (owners == number).nonzero().flatten()
            output = torch.func.functional_call(weights, with_own_scale, (arrived[own], number))
            computed = computed.index_add(0, own, output)
        back = _AllToAll.apply(computed, sent, received, group)
        weighted = back * expert_weights.flatten()[order, None]
        return torch.zeros_like(rows).index_add(0, order // CHOICES, weighted).view(x.shape)

    experts.forward = forward


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, received: list[int], sent: list[int], group: Any) -> torch.Tensor:
        ctx.back = sent, received, group
        arrived = rows.new_empty(sum(received), rows.shape[1])
        dist.all_to_all_single(arrived, rows.contiguous(), received, sent, group=group)
        return arrived

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return _AllToAll.apply(gradients[0], *ctx.back), None, None, None


class _Divided(torch.autograd.Function):
    """Experts sum the gradients of all ranks' tokens along their axis; fully_shard takes the mean of the others."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor) -> torch.Tensor:
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return gradients[0] / EXPERT


if __name__ == "__main__":
    sys.exit(main())
