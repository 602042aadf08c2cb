"""Tiled MLPs, computed in pieces of the sequence: gradients and collectives as untiled, with less memory."""

from __future__ import annotations

import copy
import pickle
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from support import language
from support.cases import for_each
from support.comparing import assert_same, full
from support.memory import HostMemory, gradients_of_halved, run_out_of_memory
from support.models import Chain
from support.on_ranks import on_ranks
from support.ranks import run_ranks
from support.training import FULL, train_alike
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.utils.checkpoint import checkpoint

from composer_fsdp2 import (
    PlanError,
    ShardingConfig,
    TiledMLP,
    plan_sharding,
    prepare_fully_shard,
    tile_mlp,
)
from composer_fsdp2._torch.repairs import repair_cpu_collectives
from composer_fsdp2.estimate._torch.counting import Collectives

WIDTH, HIDDEN, LENGTH, CHUNKS = 6, 16, 19, 4


class SwiGLU(nn.Module):
    """Like Llama's, with a dropout inside."""

    def __init__(self, width: int = WIDTH, hidden: int = HIDDEN, dropout: float = 0.0) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(width, hidden, bias=False), nn.Linear(width, hidden, bias=False)
        self.dropout = nn.Dropout(dropout)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.dropout(nn.functional.silu(self.gate(x)) * self.up(x)))


class GELU(nn.Module):
    """Like GPT's, with biases and a second, non-tensor argument."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, hidden: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return self.down(nn.functional.gelu(self.up(hidden))) * scale


class Layer(nn.Module):
    """A norm, an MLP and a residual; the MLP takes its tensor as a positional or a keyword argument."""

    def __init__(self, mlp: nn.Module) -> None:
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(WIDTH), mlp

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed = self.norm(x)
        return x + (self.mlp(scale=0.5, hidden=normed) if isinstance(self.mlp, GELU) else self.mlp(normed))


class Layers(nn.Sequential):
    """With the hooks of Composer's models: layers are units and are checkpointed."""

    units: type[nn.Module] = Layer

    def fsdp_wrap_fn(self, module: nn.Module) -> bool:
        return isinstance(module, self.units)

    def activation_checkpointing_fn(self, module: nn.Module) -> bool:
        return isinstance(module, Layer)


class MLPUnits(Layers):
    """Each MLP is a unit."""

    units = (SwiGLU, GELU)


def net(cls: type[Layers] = Layers, *, frozen: str = "") -> nn.Module:
    torch.manual_seed(0)
    model = Chain(net=cls(nn.Linear(WIDTH, WIDTH), Layer(SwiGLU()), Layer(GELU()), Layer(SwiGLU())))
    for name, parameter in model.named_parameters():
        if frozen and frozen in name:
            parameter.requires_grad_(False)
    return model


def sequences(seed: int, length: int = LENGTH, batch_size: int = 2) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch_size, length, WIDTH, generator=generator, dtype=torch.float64)


TILED: dict[str, Any] = {"tiled_mlp": {"classes": ["SwiGLU", "GELU"], "chunks": CHUNKS}}


# --- gradients


def check_alike(cls: type[Layers], config: dict[str, Any], options: dict[str, Any]) -> None:
    length = options.pop("length", LENGTH)
    model = train_alike(lambda: net(cls, **options), TILED | config, lambda seed: sequences(seed, length), num_steps=1)
    assert "forward" in vars(model.get_submodule("net.1").mlp)  # proof that it was tiled


RECOMPUTED = {"activation_checkpointing": True, "activation_checkpointing_reentrant": False}
ALIKE: dict[str, tuple[Any, ...]] = {
    "recomputed, shorter than the pieces": (Layers, RECOMPUTED, {"length": 3}),
    "recomputed, reentrant": (Layers, {"activation_checkpointing": True}, {}),
    "offloaded activations": (Layers, {"activation_cpu_offload": True}, {}),
    "MLPs are units, reentrant": (MLPUnits, {"activation_checkpointing": True}, {}),
    "kept for backward": (MLPUnits, {"sharding_strategy": "SHARD_GRAD_OP"}, {}),
    "frozen weights": (Layers, {}, {"frozen": "mlp.gate"}),
    "frozen MLP": (MLPUnits, {}, {"frozen": "net.3.mlp"}),
    "frozen first layer, recomputed, one token": (Layers, RECOMPUTED, {"frozen": "net.1", "length": 1}),
}


def test_gradients_are_those_of_one_piece():
    """A tiled model trains as an untiled one, also with checkpointing, frozen weights, or MLPs that are units."""
    run_ranks(for_each, 2, check_alike, ALIKE)


# --- collectives


@pytest.mark.any_torch
@on_ranks(2)
def test_as_many_gathers_and_reductions_as_in_one_piece() -> None:
    """Tiling does not multiply collectives: parameters are unsharded once in forward and once in backward."""

    def count(cls: type[Layers], config: dict[str, Any]) -> tuple[int, ...]:
        found = []
        for tiled in ({}, TILED):
            model = net(cls)
            prepare_fully_shard(model, None, {**FULL, **config, **tiled}, device="cpu")
            model(sequences(0).float()).sum().backward()  # the first step has additional collectives
            with Collectives() as sent:
                model(sequences(dist.get_rank()).float()).sum().backward()
            found.append(sent.counts)
        assert found[0] == found[1], found
        return tuple(sent.counts[kind]["calls"] for kind in ("_allgather_base_", "_reduce_scatter_base_"))

    gathers = for_each(count, {"layers": (Layers, {}), "MLPs, recomputed": (MLPUnits, RECOMPUTED)})
    # Three units and the root, which does not reshard.
    assert gathers == {"layers": (7, 4), "MLPs, recomputed": (7, 4)}, gathers


# --- tensor parallelism


def layer_plan(sequence: str) -> dict[str, ParallelStyle]:
    """For the first layer: plain TP; or sequence parallel norms and residuals. The sequence is then gathered for the
    whole MLP or by its first projections, and returned as tensors or as DTensors."""
    by_parts, is_local = Shard(1) if sequence else Replicate(), sequence != "DTensors"
    inputs = {"input_layouts": by_parts} if sequence in ("projections", "DTensors") else {}
    plan: dict[str, ParallelStyle] = {f"net.1.mlp.{name}": ColwiseParallel(**inputs) for name in ("gate", "up")}
    plan["net.1.mlp.down"] = RowwiseParallel(output_layouts=by_parts, use_local_output=is_local)
    if sequence:
        plan["net.1"] = PrepareModuleInput(
            input_layouts=Replicate(), desired_input_layouts=by_parts, use_local_output=is_local
        )
        plan["net.1.norm"] = SequenceParallel()
        plan["net.1.whole"] = PrepareModuleOutput(output_layouts=by_parts, desired_output_layouts=Replicate())
    if sequence == "gathered":
        plan["net.1.mlp"] = PrepareModuleInput(input_layouts=by_parts, desired_input_layouts=Replicate())
    return plan


class PlannedLayer(Layer):
    """Its output passes through a module with a path that a layer plan can name."""

    def __init__(self, mlp: nn.Module) -> None:
        super().__init__(mlp)
        self.whole = nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.whole(super().forward(x))


def planned_net() -> nn.Module:
    torch.manual_seed(0)
    return Chain(net=nn.Sequential(nn.Linear(WIDTH, WIDTH), PlannedLayer(SwiGLU()), PlannedLayer(GELU()))).double()


def check_tensor_parallel(sequence: str, is_tiled_first: bool, reentrant: bool | None) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    repair_cpu_collectives()  # gloo lacks averaging in torch 2.7
    model, reference = planned_net(), planned_net()
    if is_tiled_first:
        assert tile_mlp(model, classes=[SwiGLU, "GELU"], chunks=3) == ["net.1.mlp", "net.2.mlp"]
    parallelize_module(model, mesh["tp"], layer_plan(sequence))
    if not is_tiled_first:
        tile_mlp(model, classes=[SwiGLU, "GELU"], chunks=3)
    for layer in model.net[1:]:
        if reentrant is not None:
            layer.forward = partial(checkpoint, layer.forward, use_reentrant=reentrant)
        fully_shard(layer, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    of_dp = [sequences(index, 10) for index in range(2)]
    (sum(reference(x).square().sum() for x in of_dp) / 2).backward()
    model(of_dp[mesh.get_local_rank("dp")]).square().sum().backward()
    whole = dict(reference.named_parameters())
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(full(parameter.grad), whole[name].grad, rtol=1e-12, atol=1e-12, msg=name)


TENSOR_PARALLEL: dict[str, tuple[Any, ...]] = {
    "tensor parallel, tiled later, recomputed": ("", False, False),
    "sequence parallel, reentrant": ("gathered", True, True),
    "gathered by the projections": ("projections", True, None),
    "gathered by the projections, as DTensors": ("DTensors", True, False),
}


def test_gradients_under_tensor_parallelism():
    """Sequence-sharded outputs of pieces must not be concatenated in the wrong order, which would raise no error."""
    run_ranks(for_each, 4, check_tensor_parallel, TENSOR_PARALLEL)


# --- tile_mlp without a plan


def test_in_place_on_instances():
    """Only instances change: classes and names stay, a model can be copied and pickled, and tiling it twice raises."""
    model = net()
    names = list(model.state_dict())
    classes = [type(module) for module in model.modules()]
    assert tile_mlp(model, classes=["SwiGLU"], chunks=2) == ["net.1.mlp", "net.3.mlp"]
    assert list(model.state_dict()) == names and [type(module) for module in model.modules()] == classes
    copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    with torch.no_grad():
        model.net[1].mlp.down.weight.zero_()
    x = sequences(0).float()
    for each in copies:
        assert not torch.equal(each(x), model(x)), "the copy computes with the model's own weights"
        torch.testing.assert_close(each(x), net()(x))
    with pytest.raises(PlanError, match=r"net\.1\.mlp \(SwiGLU\) is tiled already"):
        tile_mlp(model, classes=["SwiGLU", "GELU"], chunks=2)
    assert "forward" not in vars(model.net[2].mlp)


def test_without_gradients():
    """In eval nothing is saved for backward and outputs are equal. A vector has no sequence and is not tiled."""
    model, tiled = net(), net()
    tile_mlp(tiled, classes=["SwiGLU", "GELU"], chunks=CHUNKS)
    x = sequences(0).float()
    for each in (model.eval(), tiled.eval()):
        each.requires_grad_(False)
    torch.testing.assert_close(tiled(x), model(x))
    with torch.no_grad():
        torch.testing.assert_close(tiled(x), model(x))
    with torch.inference_mode():
        torch.testing.assert_close(tiled(x), model(x))
        torch.testing.assert_close(tiled(x[0, 0]), model(x[0, 0]))
        assert tiled(x[:, :0]).shape == (2, 0, WIDTH)


def test_dropout_has_its_random_numbers_again():
    """Backward uses the dropout mask of forward, and the next random number is the same as without tiling."""

    def trained(tiled: bool) -> tuple[list[torch.Tensor], torch.Tensor]:
        torch.manual_seed(0)
        mlp = SwiGLU(dropout=0.5).double()
        x = sequences(1, 8)
        torch.manual_seed(7)
        if tiled:
            tile_mlp(mlp, classes=[SwiGLU], chunks=4)
            output = mlp(x)
        else:
            output = torch.cat([mlp(piece) for piece in x.chunk(4, 1)], 1)
        output.square().sum().backward()
        return [parameter.grad for parameter in mlp.parameters() if parameter.grad is not None], torch.rand(3)

    (gradients, following), (expected, otherwise) = trained(True), trained(False)
    torch.testing.assert_close(gradients, expected, rtol=1e-12, atol=1e-14)
    assert torch.equal(following, otherwise)


def test_autocast_inside_the_pieces():
    """Under autocast, backward recomputes a piece in the dtype of its forward."""
    tiled, model = net(), net()
    tile_mlp(tiled, classes=["SwiGLU", "GELU"], chunks=CHUNKS)
    for each in (tiled, model):
        with torch.autocast("cpu", torch.bfloat16):
            each(sequences(0).float()).square().sum().backward()
    for (name, parameter), other in zip(tiled.named_parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, other.grad, rtol=0.05, atol=0.05, msg=name)


def peak_bytes(*, is_tiled: bool) -> int:
    """The memory of forward and backward of one MLP, without gradients of its weights."""
    torch.manual_seed(0)
    mlp = SwiGLU(width=32, hidden=128)
    for parameter in mlp.parameters():
        parameter.grad = torch.zeros_like(parameter)
    if is_tiled:
        tile_mlp(mlp, classes=["SwiGLU"], chunks=8)
    x = torch.randn(1, 2048, 32, requires_grad=True)
    with HostMemory() as host:
        mlp(x).sum().backward()
    return host.peak_bytes


def test_backward_peaks_below_a_third():
    """A sequence that did not fit untiled fits tiled."""
    tiled, untiled = peak_bytes(is_tiled=True), peak_bytes(is_tiled=False)
    assert tiled < untiled / 3, f"{tiled:,} of {untiled:,} bytes"


# --- refused


class Routed(nn.Module):
    """An MoE block, recognized by the names of its submodules."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(WIDTH, 2), nn.ModuleList([SwiGLU(), SwiGLU()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return sum(expert(x) for expert in self.experts)


class Normed(nn.Sequential):
    """Computes statistics over all tokens."""


class Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.self_attn = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        return self.self_attn(x)


class Two(nn.Module):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x + y


class Cumulative(nn.Module):
    """Changes the number of tokens."""

    def forward(self, x: torch.Tensor, other: torch.Tensor | None = None) -> torch.Tensor:
        return x[..., ::2, :]


REFUSED: dict[str, tuple[nn.Module, str]] = {
    "Swiglu": (SwiGLU(), "tile_mlp.classes: no module of Chain is a Swiglu; did you mean SwiGLU?; it has Chain"),
    "Routed": (Routed(), "mlp (Routed) routes tokens to experts (experts), so it is no token-wise MLP; name the class"),
    "Normed": (Normed(nn.BatchNorm1d(WIDTH)), "mlp (Normed) has a norm whose statistics are of all tokens (0)"),
    "Conv1d": (nn.Conv1d(WIDTH, WIDTH, 3), "mlp (Conv1d) has a convolution over tokens, so pieces of the sequence"),
    "Attending": (Attending(), "mlp (Attending) has attention between tokens (self_attn)"),
    "Two": (Two(), "mlp (Two) takes x, y; only a module that takes one tensor can be cut by"),
    "ModuleList": (nn.ModuleList([SwiGLU()]), "mlp (ModuleList) has no forward; name the class of the MLPs in it"),
}


def test_what_is_no_token_wise_mlp_is_refused_by_name():
    """An MoE block or a batch norm, tiled, would silently train on other numbers."""
    for name, (mlp, message) in REFUSED.items():
        model = Chain(net=Chain(first=SwiGLU(), mlp=mlp))
        with pytest.raises(PlanError) as caught:
            tile_mlp(model, classes=["SwiGLU", name], chunks=2)
        assert message in str(caught.value), str(caught.value)
        assert not any("forward" in vars(module) for module in model.modules())
    experts = Routed()
    assert tile_mlp(experts, classes=["SwiGLU"], chunks=2) == ["experts.0", "experts.1"]


class Responding(SwiGLU):
    """Divides by a norm over tokens, as ConvNeXt V2's response normalization."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x / x.norm(dim=-2, keepdim=True))


class Shifting(SwiGLU):
    """Adds the previous token, as RWKV's channel mixing."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x + nn.functional.pad(x, (0, 0, 1, -1)))


class Gated(Responding):
    """Outputs zeros before it is trained, which hides that it mixes tokens."""

    def __init__(self) -> None:
        super().__init__()
        nn.init.zeros_(self.down.weight)


@pytest.mark.parametrize("kind", [Responding, Shifting])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_an_mlp_that_mixes_tokens_by_another_name_is_an_error(kind: type[SwiGLU], dtype: torch.dtype):
    """Each piece would be divided by its own norm, which silently changes the model."""
    torch.manual_seed(0)
    model = Chain(net=Layers(Layer(kind()))).to(dtype)
    tile_mlp(model, classes=[kind.__name__], chunks=CHUNKS)
    with pytest.raises(
        PlanError, match=rf"mlp \({kind.__name__}\) gives other numbers for a piece .* so it mixes tokens"
    ):
        model(sequences(0).to(dtype))


def test_an_mlp_of_zeros_is_looked_at_again():
    """Zeros cannot show whether tokens are mixed, so the check repeats until the output is nonzero."""
    model = Chain(net=Gated()).double()
    tile_mlp(model, classes=["Gated"], chunks=CHUNKS)
    assert not model(sequences(0)).any()
    nn.init.normal_(model.net.down.weight)
    with pytest.raises(PlanError, match="so it mixes tokens"):
        model(sequences(0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_mlp_of_few_digits_and_dropout_mixes_no_tokens(dtype: torch.dtype):
    """Rounding and dropout must not be mistaken for mixed tokens. The check leaves dropout's random numbers
    unchanged."""
    mlp = SwiGLU(width=64, hidden=256, dropout=0.5).to(dtype)
    x = torch.randn(2, 512, 64, generator=torch.Generator().manual_seed(0)).to(dtype)
    tile_mlp(Chain(net=mlp), classes=["SwiGLU"], chunks=4)
    torch.manual_seed(1)
    first, seen = mlp(x), mlp.forward.is_token_wise
    torch.manual_seed(1)
    assert seen and mlp.training and torch.equal(mlp(x), first)


def test_calls_that_cannot_be_cut_are_errors():
    """A second tensor would be paired with a piece of the first, and a smaller output concatenated in the wrong
    place."""
    x = sequences(0)
    model = Chain(attn=Cumulative(), mlp=GELU().double())
    tile_mlp(model, classes=["Cumulative", "GELU"], chunks=2)
    for call, message in (
        (lambda: model.attn(x), "tiled_mlp: attn (Cumulative) made (2, 5, 6) of (2, 9, 6); an MLP gives one tensor"),
        (lambda: model.attn(x, x), "attn (Cumulative) was called with (0: Tensor, 1: Tensor); only one tensor"),
        (lambda: model.attn(x, other=x), "was called with (0: Tensor, other: Tensor)"),
        (lambda: model.mlp(x, [x]), "was called with (0: Tensor, 1: list)"),
    ):
        with pytest.raises(PlanError) as caught:
            call()
        assert message in str(caught.value), str(caught.value)
    torch.testing.assert_close(model.mlp(x, 2.0), 2 * model.mlp(hidden=x))


def test_the_plan_says_which():
    """Ranks that tile different MLPs raise, and the report names the tiled ones."""
    config = ShardingConfig(tiled_mlp=TiledMLP(classes=("SwiGLU",), chunks=8))
    plan, without = plan_sharding(net(), config), plan_sharding(net(), ShardingConfig())
    assert plan.tiled == ("net.1.mlp", "net.3.mlp") and without.tiled == ()
    assert plan.digest != without.digest
    assert "  tiled: 2 MLPs in 8 pieces, first net.1.mlp" in plan.explain().splitlines()
    assert plan.to_json()["config"]["tiled_mlp"] == {"classes": ["SwiGLU"], "chunks": 8}


# --- out of memory


class Hungry(language.MLP):
    """Runs out of memory after its last collective, once, on rank 1."""

    times = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = super().forward(x)
        if Hungry.times and dist.get_rank() == 1:
            Hungry.times = 0
            run_out_of_memory("cpu")
        return x


@pytest.mark.any_torch
@on_ranks(2)
def test_out_of_memory_in_the_trial_under_tensor_parallelism(folder: str) -> None:
    """The first forward checks an MLP on one piece. If one rank fails in it, all ranks must repeat it: otherwise they
    would run collectives of different layers."""
    tiled = {"tiled_mlp": {"classes": ["Hungry"], "chunks": 2}}
    split = {"tensor_parallel_degree": 2, "layer_plan": language.layer_plan(ends=False)}
    torch.set_default_dtype(torch.float64)

    def gradients(size: int, times: int) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        with mock.patch.object(language, "MLP", Hungry):
            model = language.Language()
        prepare_fully_shard(model, None, FULL | tiled, device="cpu", tensor_parallel=split)
        Hungry.times = times
        found = gradients_of_halved(model, partial(language.loss_of, model), language.batch(0, 4), size)
        assert dist.get_rank() == 0 or not Hungry.times
        return found

    assert_same(gradients(4, 1), gradients(2, 0))
