"""Unusual model shapes: each trains as the unsharded model does, to the last digits of float64."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from support.cases import for_each
from support.comparing import full, own_name
from support.examples import IS_THOROUGH
from support.models import Block, Chain, Decoder, Model, Running, features, layer, tie, tokens
from support.on_ranks import on_ranks
from support.ranks import run_ranks
from support.training import FULL, adamw, assert_close, compare_training, named_parameters, sgd, train_alike
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from composer_fsdp2 import prepare_fully_shard, reshard
from composer_fsdp2.sharding.ties import tie_groups

ODD = 5  # rows: 3 and 2 on two ranks; 2, 2, 1 and none on four
ODD_VOCABULARY = 101

AC = {"activation_checkpointing": True}
NOT_REENTRANT = {**AC, "activation_checkpointing_reentrant": False}
ZERO_2 = {"sharding_strategy": "SHARD_GRAD_OP"}
SETTINGS: dict[str, dict[str, Any]] = {
    "FULL_SHARD": {},
    "SHARD_GRAD_OP, reentrant": ZERO_2 | AC,
    "not reentrant": NOT_REENTRANT,
}
if IS_THOROUGH:
    SETTINGS |= {"SHARD_GRAD_OP": ZERO_2, "reentrant": AC, "SHARD_GRAD_OP, not reentrant": ZERO_2 | NOT_REENTRANT}


def unit(module: nn.Module, *, recomputed: bool = False) -> Any:
    """Marks it as a unit, checkpointed if ``recomputed``. Reentrant checkpointing finds no gradient for the first
    module of a model, so that one is not checkpointed."""
    module._fsdp_wrap = True
    module._activation_checkpointing = recomputed
    return module


def block(width: int = ODD) -> Any:
    return unit(Block(width), recomputed=True)


def odd_features(seed: int) -> torch.Tensor:
    return features(seed, width=ODD)


def odd_tokens(seed: int) -> torch.Tensor:
    return torch.randint(ODD_VOCABULARY, (3, 4), generator=torch.Generator().manual_seed(seed))


def check_shape(
    build: Callable[[], nn.Module], inputs: Callable[[int], torch.Tensor], settings: dict[str, dict[str, Any]]
) -> None:
    def check(config: dict[str, Any]) -> None:
        ties = tie_groups(build())
        model = train_alike(build, config, inputs, optimizer=adamw, rtol=1e-9, atol=1e-12)
        now = {own_name(name): parameter for name, parameter in model.named_parameters(remove_duplicate=False)}
        assert all(len({id(now[name]) for name in names}) == 1 for names in ties), f"{ties} came apart"

    for_each(check, {f"{build.__name__}, {name}": (config,) for name, config in settings.items()})


# --- ties


def language() -> Decoder:
    """The first and the last module share a weight; each is a unit, as are the blocks."""
    net = Decoder(vocabulary=ODD_VOCABULARY, width=ODD, tied=True)
    unit(net.embed)
    for each in (*net.blocks, net.head):
        unit(each, recomputed=True)
    return net


def tied_units() -> nn.Module:
    return Chain(net=language())


class Weighted(Chain):
    """A chain with a weight that is also its layer's."""

    def __init__(self, **children: nn.Module) -> None:
        super().__init__(**children)
        self.weight = self.net.tied.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x + torch.tanh(x @ self.weight))


def tied_with_the_model() -> nn.Module:
    return Weighted(net=Chain(inner=block(), tied=layer(ODD)))


def tied_with_an_excluded_child() -> nn.Module:
    model = Chain(kept=Chain(tied=layer(ODD), own=layer(ODD)), left=Chain(tied=layer(ODD)))
    model.left._fsdp_wrap = False
    tie(model.kept.tied, model.left.tied)
    return model


def tied_in_a_chain() -> nn.Module:
    parts = {name: unit(Chain(left=layer(ODD), right=layer(ODD))) for name in "abc"}
    tie(parts["a"].right, parts["b"].left)
    tie(parts["b"].right, parts["c"].left)
    return Chain(net=Chain(**parts, rest=layer(ODD)))


TIED: tuple[tuple[Callable[[], nn.Module], Any], ...] = (
    (tied_units, odd_tokens),
    (tied_in_a_chain, odd_features),
    (tied_with_the_model, odd_features),
    (tied_with_an_excluded_child, odd_features),
)


def check_ties(num_shapes: int, settings: dict[str, dict[str, Any]]) -> None:
    """The first case with all settings, the others with one."""
    last = dict([*settings.items()][-1:])
    shapes = enumerate(TIED[:num_shapes])
    for_each(check_shape, {each.__name__: (each, of, last if number else settings) for number, (each, of) in shapes})


def test_ties_whose_rows_do_not_divide():
    """A vocabulary of 101 tied to the head. With fully_shard alone the tie breaks on torch 2.7, and the last rank's
    rows of one copy never train (pytorch#176076)."""
    run_ranks(check_ties, 2, len(TIED), SETTINGS)
    run_ranks(check_ties, 4, 1, {"4 ranks, not reentrant": NOT_REENTRANT})


# --- frozen


def frozen() -> nn.Module:
    """A unit with trainable and frozen parameters, a fully frozen unit, and a frozen weight in the root."""
    net = Chain(inlet=nn.Linear(ODD, ODD), mixed=block(), still=block(), outlet=nn.Linear(ODD, ODD))
    for part in (net.mixed.fc_in.weight, net.mixed.fc_out.bias, net.still, net.outlet.weight):
        part.requires_grad_(False)
    return Chain(net=net)


def check_freezing(config: dict[str, Any], evaluate: bool) -> None:
    """Changes the trainable parameters after each step, once those of a whole unit."""
    torch.set_default_dtype(torch.float64)
    model = frozen()
    reference = copy.deepcopy(model)
    ours, theirs = (torch.optim.AdamW(each.parameters(), lr=0.01, weight_decay=0.1) for each in (model, reference))
    prepare_fully_shard(model, ours, FULL | config, device="cpu")
    for names, trainable in (
        ((), False),
        (("net.mixed.fc_in.bias", "net.outlet.bias"), False),
        (("net.mixed.fc_out.weight",), False),  # the last parameter of its unit
        (("net.mixed.fc_in.weight", "net.still.fc_in.weight", "net.outlet.weight"), True),
    ):
        if evaluate:
            with torch.no_grad():
                model(odd_features(0))
            reshard(model)
        for each in (model, reference):
            parameters = named_parameters(each)
            for name in names:
                parameters[name].requires_grad_(trainable)
        compare_training(model, reference, ours, theirs, odd_features, num_steps=1, rtol=1e-9, atol=1e-12)


@on_ranks(2)
def test_frozen_beside_trainable(folder: str) -> None:
    """In fine-tuning, frozen parameters do not change, including those frozen or thawed between steps (Foundry's
    LayerFreezing) and after an evaluation."""
    for_each(check_freezing, {name: (config, i % 2 == 1) for i, (name, config) in enumerate(SETTINGS.items())})


# --- modules in several places


def pair(own: nn.Module, shared: nn.Module) -> nn.Module:
    return Running(lambda self, x: x + torch.tanh(self.shared(self.own(x))), own=own, shared=shared)


def in_two_units() -> nn.Module:
    shared = nn.Linear(ODD, ODD)
    pairs = {name: unit(pair(layer(ODD), shared), recomputed=True) for name in "ab"}
    return Chain(net=Chain(inlet=layer(ODD), **pairs, outlet=layer(ODD)))


def unit_in_two_units() -> nn.Module:
    """The shared module is a unit, with another unit inside."""
    shared = unit(pair(layer(ODD), block()))
    pairs = {name: unit(pair(layer(ODD), shared), recomputed=name == "b") for name in "ab"}
    return Chain(net=Chain(inlet=layer(ODD), **pairs, outlet=layer(ODD)))


def repeated() -> nn.Module:
    """One unit runs three times in a forward, another before and after it."""

    def run(net: Any, x: torch.Tensor) -> torch.Tensor:
        x = net.around(net.inlet(x))
        for _ in range(3):
            x = net.repeated(x)
        return net.outlet(net.around(x))

    parts = {"repeated": unit(pair(layer(ODD), block())), "around": block()}
    return Chain(net=Running(run, inlet=layer(ODD), **parts, outlet=nn.Linear(ODD, ODD)))


@on_ranks(2)
def test_modules_that_run_more_than_once(folder: str) -> None:
    """Layers shared across a network (ALBERT, recurrent depth) get the gradients of all their uses. They are unsharded
    and resharded between uses, and can be checkpointed."""
    settings = SETTINGS | {"prefetch": {"forward_prefetch": True, "backward_prefetch_limit": 2}}
    some = {name: settings[name] for name in ("SHARD_GRAD_OP, reentrant", "prefetch")}
    builds = {in_two_units: some, unit_in_two_units: some, repeated: settings}
    for_each(check_shape, {build.__name__: (build, odd_features, chosen) for build, chosen in builds.items()})


# --- parameters that cannot be sharded with their unit


class Scaled(Block):
    """A block with two scalars, one of them unused in some batches."""

    def __init__(self) -> None:
        super().__init__(ODD)
        self.gain = nn.Parameter(torch.tensor(0.9))
        self.positive = nn.Parameter(torch.tensor(1.1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = super().forward(x) * self.gain
        return x * self.positive if x.detach()[0, 0] > 0 else x


def contrastive() -> nn.Module:
    """CLIP's temperature in the root, a unit with no sharded parameter, scalars in blocks, one of them shared by two,
    and an unused one."""
    gain = nn.Parameter(torch.tensor(0.8))
    parts = {"inlet": layer(ODD), "scalar": unit(Running(lambda self, x: x * self.gain, gain=gain))}
    parts |= {name: unit(Scaled(), recomputed=True) for name in "abc"}
    parts["c"].gain = parts["b"].gain

    class Contrastive(Chain):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * self.temperature.exp() + self.frozen

    net = Contrastive(**parts)
    net.temperature, net.unread = nn.Parameter(torch.tensor(2.0)), nn.Parameter(torch.tensor(3.0))
    net.frozen = nn.Parameter(torch.tensor(0.5), requires_grad=False)
    return Chain(net=net, end=nn.Linear(ODD, ODD))


def check_scalars(config: dict[str, Any]) -> None:
    """Starts from an optimizer state. Clipping of scalars is tested in ../training/test_clipping.py, averaging over
    several microbatches in ../training/test_microbatches.py."""
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(1)  # decides on each rank which blocks use their second scalar
    model = contrastive()
    ours = torch.optim.AdamW(model.parameters(), lr=0.01)
    model(odd_features(99)).square().mean().backward()
    ours.step()
    ours.zero_grad()
    reference, theirs = copy.deepcopy((model, ours))
    scalars = {name: parameter for name, parameter in model.named_parameters() if not parameter.dim()}
    assert len(scalars) == 9, list(scalars)
    prepare_fully_shard(model, ours, FULL | config, device="cpu")
    for name, parameter in scalars.items():
        assert named_parameters(model)[name] is parameter, f"{name} is another object"
    compare_training(model, reference, ours, theirs, odd_features, rtol=1e-9, atol=1e-12)
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, [parameter.item() for parameter in scalars.values()])
    assert all(values == everyone[0] for values in everyone), f"ranks came apart: {everyone}"


def test_scalars():
    """A temperature is replicated and gets the mean of all ranks' gradients, also from ranks that did not use it.
    Otherwise each rank would train its own; fully_shard and FSDP1 refuse scalars."""
    kinds: dict[str, Any] = {
        "ZERO_2, reentrant": (ZERO_2 | AC,),
        "NO_SHARD": ({"sharding_strategy": "NO_SHARD"},),
        "not reentrant, offloaded": (NOT_REENTRANT | {"cpu_offload": True},),
    }
    run_ranks(for_each, 2, check_scalars, kinds)
    run_ranks(for_each, 4, check_scalars, {"2 x 2": ({"data_parallel_replicate_degree": 2},)})


def adapted() -> nn.Module:
    """A frozen layer with an adapter in float32, as peft adds them to a low-precision base."""

    def run(self: Any, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(x.float())).to(x.dtype)

    down, up = (nn.Linear(*sizes, bias=False, dtype=torch.float32) for sizes in ((ODD, 2), (2, ODD)))
    return Running(run, base=nn.Linear(ODD, ODD).requires_grad_(False), down=down, up=up)


def adapted_inside() -> nn.Module:
    """The adapter's matrices belong to the module of the base weight, so they cannot be a unit."""

    def run(self: Any, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight + (x.float() @ self.down.t() @ self.up.t()).to(x.dtype)

    weight = nn.Parameter(torch.randn(ODD, ODD) / ODD, requires_grad=False)
    down, up = (nn.Parameter(torch.randn(sizes, dtype=torch.float32)) for sizes in ((2, ODD), (ODD, 2)))
    return Running(run, weight=weight, down=down, up=up)


def adapters() -> nn.Module:
    """Adapters in units and in the root, and a norm in float32, as some models have."""
    units = {f"block{i}": unit(Chain(a=adapted(), b=adapted_inside()), recomputed=True) for i in range(2)}
    return Chain(net=Chain(inlet=layer(ODD), **units, in_root=adapted(), end=layer(ODD)))


def check_adapters(config: dict[str, Any]) -> None:
    model = train_alike(adapters, config, odd_features, rtol=1e-5, atol=1e-7)
    dtypes = {each: parameter.dtype for each, parameter in named_parameters(model).items()}
    assert dtypes["net.block0.a.base.weight"] == torch.float64, dtypes
    assert dtypes["net.block0.a.down.weight"] == dtypes["net.block0.b.up"] == torch.float32, dtypes
    assert isinstance(named_parameters(model)["net.block0.a.down.weight"], DTensor)


def check_adapters_computing_low() -> None:
    """Computes in bf16 throughout: a layer that upcasts its input for the adapter still gets weights of one dtype."""
    torch.set_default_dtype(torch.float64)
    model = Chain(net=Chain({"a": True}, a=adapted(), b=adapted()))
    seen: list[torch.dtype] = []
    model.net.b.down.register_forward_hook(lambda module, args, output: seen.append(output.dtype))
    low = {"param_dtype": "bf16", "reduce_dtype": "fp32"}
    prepare_fully_shard(model, None, {"mixed_precision": low}, device="cpu")
    model(odd_features(dist.get_rank())).sum().backward()
    assert model.net.b.down.weight.grad.dtype == torch.float32 and seen == [torch.bfloat16], seen


@on_ranks(2)
def test_adapters_of_another_dtype(folder: str) -> None:
    """LoRA in fp32 on a frozen base in bf16 (here float32 and float64) trains without casting either. torch fails in
    the first forward, and FSDP1 refused it."""
    for_each(check_adapters, {"NO_SHARD": ({"sharding_strategy": "NO_SHARD"},), "not reentrant": (NOT_REENTRANT,)})
    check_adapters_computing_low()


# --- several forwards


def policy() -> nn.Module:
    return Chain(inlet=layer(ODD), a=unit(pair(layer(ODD), block())), b=block(), outlet=nn.Linear(ODD, 1))


def check_several_backwards(config: dict[str, Any], how: str) -> None:
    """Two forwards with one without gradients between them, then one backward for each, in either order, or one for
    both."""
    torch.set_default_dtype(torch.float64)
    model = nn.Sequential(policy())
    reference = copy.deepcopy(model)
    prepare_fully_shard(model, None, FULL | config, device="cpu")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    for _ in range(2):
        for each, ranks in ((model, [rank]), (reference, list(range(world_size)))):
            losses = []
            for seed in range(2):
                outputs = [each(odd_features(10 * seed + peer)) for peer in ranks]
                losses.append(torch.stack(outputs).square().mean())
                with torch.no_grad():
                    each(odd_features(3))
            for loss in {"in order": losses, "reversed": losses[::-1], "at once": [losses[0] + losses[1]]}[how]:
                loss.backward()
    for name, parameter in reference.named_parameters():
        gradient = named_parameters(model)[name].grad
        assert gradient is not None and parameter.grad is not None, name
        assert_close(name, full(gradient), parameter.grad, rtol=1e-12, atol=1e-14)


@on_ranks(2)
def test_two_forwards_before_a_backward(folder: str) -> None:
    """Preference training (DPO: one loss of a chosen and a rejected sequence) works under activation checkpointing;
    plain FSDP2 was reported to fail (pytorch#153354, #171779). Parameters must be unsharded for the recomputation of
    both forwards. If losses are differentiated one by one, they must be unsharded again after the first."""
    ways = ("in order", "reversed", "at once")
    pairs = [(name, how) for i, name in enumerate(SETTINGS) for k, how in enumerate(ways) if IS_THOROUGH or i != k]
    cases = {f"{name}, {how}": (SETTINGS[name], how) for name, how in pairs}
    for_each(check_several_backwards, cases)


# --- entry points besides forward


class Reader(nn.Module):
    """A root whose methods call its own layers before, between and after calls of itself."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(ODD_VOCABULARY, ODD)
        self.body = block()
        self.head = nn.Linear(ODD, ODD_VOCABULARY, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(self.embed(x)))

    def eval_forward(self, batch: torch.Tensor, outputs: torch.Tensor | None = None) -> torch.Tensor:
        return self.head(self.embed(batch))

    def generate(self, x: torch.Tensor, length: int = 3) -> torch.Tensor:
        """Calls the encoder directly, as T5 does, and then the whole model for each token."""
        prompt = self.embed(x).mean(1)
        for _ in range(length):
            scores = self(x)[:, -1] + self.head(prompt)
            x = torch.cat([x, scores.argmax(-1, keepdim=True)], dim=1)
        return torch.cat([x, self.head(self.embed(x)).argmax(-1)])


def check_generate(config: dict[str, Any]) -> int:
    """Before the first step, after it, and between evaluations. Counts distinct tokens: a single one would prove
    little."""
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    model = Chain(reader=Reader())
    reference = copy.deepcopy(model)
    ours, theirs = sgd(model), sgd(reference)
    prepare_fully_shard(model, ours, FULL | config, device="cpu")
    seen: set[int] = set()
    for step in range(2):
        for seed in range(2):
            x = odd_tokens(100 * step + 10 * seed + dist.get_rank())
            with torch.no_grad():
                actual, expected = model.reader.generate(x), reference.reader.generate(x)
                assert torch.equal(actual, expected), f"step {step}: {actual}, unsharded {expected}"
                torch.testing.assert_close(model(x), reference(x))
                torch.testing.assert_close(model.reader.eval_forward(x), reference.reader.eval_forward(x))
            seen.update(actual.flatten().tolist())
        compare_training(model, reference, ours, theirs, odd_tokens, num_steps=1)
    return len(seen)


@on_ranks(2)
def test_generate_is_a_way_in(folder: str) -> None:
    """A model that generates or evaluates through its own layers (T5 runs its encoder first, peft calls the inner
    model) finds full parameters without user code, before training and after each step."""
    seen = for_each(check_generate, {"FULL_SHARD": ({},), "SHARD_GRAD_OP, reentrant": (ZERO_2 | AC,)})
    assert min(seen.values()) > 10, seen


# --- compiled


def compiled(way: str, backend: Any) -> nn.Module:
    """The model with compiled blocks, in one of the ways that scripts use."""
    torch.manual_seed(0)
    model = Model()
    decoder = model.decoder
    for i, each in enumerate(decoder.blocks):
        if way == "in place":
            each.compile(backend=backend, fullgraph=True)
        elif way in ("replaced", "replaced and chosen by attribute"):
            if way != "replaced":
                unit(each, recomputed=True)
            decoder.blocks[i] = torch.compile(each, backend=backend, fullgraph=True)
    if way == "one layer":
        decoder.head = torch.compile(unit(decoder.head), backend=backend, fullgraph=True)
    elif way == "the child in place":
        decoder.compile(backend=backend)
    elif way == "the child replaced":
        model.decoder = torch.compile(decoder, backend=backend)
    return model


COMPILED: tuple[tuple[str, dict[str, Any]], ...] = (
    ("in place", {}),
    ("in place", NOT_REENTRANT),
    ("replaced", AC),
    ("replaced and chosen by attribute", NOT_REENTRANT),
    ("one layer", {}),
    ("the child in place", {}),
    ("the child replaced", AC),
)


def check_compiled(way: str, config: dict[str, Any]) -> None:
    torch.set_default_dtype(torch.float64)
    torch._dynamo.reset()
    graphs: list[torch.fx.GraphModule] = []

    def count(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    has_two = way in ("in place", "replaced") if IS_THOROUGH else (way, config) == ("in place", {})
    for backend in (count, "aot_eager") if has_two else (count,):
        model, reference = compiled(way, backend), compiled("not", None)
        keys, names = list(model.state_dict()), list(dict(model.named_parameters()))
        ours, theirs = sgd(model), sgd(reference)
        prepare_fully_shard(model, ours, FULL | config, device="cpu")
        assert list(model.state_dict()) == keys
        # Unlike own_name, keeps the prefixes of torch.compile.
        assert [name.replace("_checkpoint_wrapped_module.", "") for name, _ in model.named_parameters()] == names
        compare_training(model, reference, ours, theirs, tokens)
        if way not in ("one layer", "the child in place", "the child replaced"):
            held = model.decoder.blocks[0]
            assert isinstance(held, FSDPModule), "the unit is inside what is compiled, which passes by it"
            assert any("heckpoint" in type(each).__name__ for each in held.modules()) == bool(config), "not recomputed"
    assert graphs, "nothing was compiled"


@on_ranks(2)
def test_blocks_compiled_before_sharding(folder: str) -> None:
    """torch.compile per block captures one graph without breaks. The compiled code must run inside the hooks for
    unsharding and checkpointing; otherwise it computes with shards, or saves activations to recompute."""
    ways = dict.fromkeys(way for way, _ in COMPILED)
    cases = [(way, config) for way in ways for config in ({}, AC, NOT_REENTRANT)] if IS_THOROUGH else COMPILED
    for_each(check_compiled, {f"{way}, {config}": (way, config) for way, config in cases})
    torch._dynamo.reset()


# --- visible to user code


@on_ranks(2)
def test_classes(folder: str) -> None:
    """Code that reads a class's name or uses isinstance sees the model's own class."""
    model = Model()
    prepare_fully_shard(model, None, FULL, device="cpu")
    decoder = model.decoder
    cls = type(decoder)
    assert (cls.__name__, cls.__qualname__, cls.__module__) == ("Decoder", "Decoder", Decoder.__module__)
    assert isinstance(decoder, Decoder) and issubclass(cls, Decoder) and isinstance(decoder, FSDPModule)
    assert repr(model).startswith("Model(\n  (decoder): Decoder(\n    (embed): Embedding(11, 6)")
    assert type(model) is Model, "the model itself is not a unit"
