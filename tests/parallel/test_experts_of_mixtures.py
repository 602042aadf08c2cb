"""Expert parallelism of Hugging Face's mixtures, compared with one process: losses, norms and parameters of two
steps."""

from __future__ import annotations

import copy
import re
from dataclasses import replace
from functools import partial, update_wrapper
from types import FunctionType, MethodType
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from support.cases import for_each
from support.known_models import MIXTURES, small_mixture
from support.language import batch
from support.legality import Carried, Refused, check_carried, check_clips, check_refused, check_start, one_layer
from support.on_ranks import on_ranks
from support.synchronisations import Synchronisations
from support.training import FULL, assert_gradients
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from torch.nn import functional as F

from composer_fsdp2 import prepare_fully_shard

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")
IS_FIVE = int(transformers.__version__.partition(".")[0]) > 4


def build(architecture: str, num_layers: int = 1, **config: Any) -> nn.Module:
    model = nn.Module()
    model.model = small_mixture(architecture, num_layers, **config)
    return model


def loss_of(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    """The loss of the logits in their dtype; transformers' own is in float32."""
    with in_float64():
        logits = model.model(tokens[:, :-1], use_cache=False).logits
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def in_float64() -> Any:
    """DeepSeek's router computes in float32, whatever the model's dtype, so its sums over a batch and over parts of it
    differ."""
    from transformers.models.deepseek_v3 import modeling_deepseek_v3

    class Torch:
        float32 = torch.float64

        def __getattr__(self, name: str) -> Any:
            return getattr(torch, name)

    return mock.patch.object(modeling_deepseek_v3, "torch", Torch())


def carried(architecture: str, degree: int, **options: Any) -> Carried:
    config = {"expert_parallel_degree": degree} | options.pop("config", {})
    sizes, frozen = options.pop("sizes", {}), options.pop("frozen", "$^")
    options = {"optimizer": adamw_of} | options

    def partly_frozen() -> nn.Module:
        model = build(architecture, **sizes)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not re.search(frozen, name))
        return model

    return Carried(config=config, build=partly_frozen, loss=loss_of, **options)


def adamw_of(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1)


@on_ranks(4)
def test_each_mixture_trains_as_one_process(folder: str) -> None:
    """An EP-sharded model of a release trains like one process, with AdamW, clipping and different batches on all
    ranks."""
    rows = {f"{name}, {degree}": (carried(name, degree),) for name in MIXTURES for degree in (2, 4)}
    for_each(check_carried, rows)


REPLICAS = {"data_parallel_replicate_degree": 2}


def layers(architecture: str, *, recomputed: bool = True, **config: Any) -> dict[str, Any]:
    """Decoder layers are units, and checkpointed if ``recomputed``."""
    kinds = [f"{architecture}DecoderLayer"]
    policy = {"activation_checkpointing": True, "activation_checkpointing_policy": kinds} if recomputed else {}
    return {"wrap_policy": {"transformer_layer_cls_to_wrap": kinds}} | policy | config


def attention_plan(model: str = "model.model.layers.*") -> dict[str, Any]:
    names = {"q_proj": ColwiseParallel, "k_proj": ColwiseParallel, "v_proj": ColwiseParallel, "o_proj": RowwiseParallel}
    return {f"{model}.self_attn.{name}": style() for name, style in names.items()}


def shared_expert_plan() -> dict[str, Any]:
    names = {"gate_proj": ColwiseParallel, "up_proj": ColwiseParallel, "down_proj": RowwiseParallel}
    return {f"model.model.layers.*.mlp.shared_expert.{name}": names[name]() for name in names}


COMBINED: dict[str, Carried] = {
    "layers as units, recomputed": carried("Qwen3Moe", 2, config=layers("Qwen3Moe")),
    "recomputed, not reentrant, beside replicas": carried(
        "Mixtral",
        2,
        config=layers("Mixtral", activation_checkpointing_reentrant=False) | REPLICAS,
        sizes={"num_layers": 2},
    ),
    "kept gathered, beside replicas": carried(
        "Qwen2Moe", 2, config=layers("Qwen2Moe", recomputed=False, sharding_strategy="SHARD_GRAD_OP") | REPLICAS
    ),
    "offloaded": carried("Olmoe", 2, config={"cpu_offload": True}),
    "microbatches, reduced in the last": carried("Qwen3Moe", 2, config={"gradient_sync": "last"}, num_microbatches=2),
    "microbatches, over replicas in the last": carried(
        "Qwen3Moe", 2, config=REPLICAS | {"gradient_sync": "defer_replica"}, num_microbatches=2
    ),
    "rows that ranks do not divide, guarded": carried(
        "Qwen3Moe", 2, sizes={"moe_intermediate_size": 5}, config={"collective_guard": 60}
    ),
    "fewer rows than ranks": carried("Qwen3Moe", 2, sizes={"moe_intermediate_size": 2}),
    "experts frozen": carried("Qwen2Moe", 2, frozen=r"\.experts\."),
    "all else frozen, recomputed": carried("Mixtral", 4, config=layers("Mixtral"), frozen=r"^(?!.*\.experts\.)"),
    "layers split too": carried("Mixtral", 2, plan=attention_plan, num_shared=2),
    "shared experts split too, recomputed": carried(
        "Qwen2Moe", 2, plan=shared_expert_plan, num_shared=2, config=layers("Qwen2Moe")
    ),
    "layers split by the model's own plan": carried("Qwen2Moe", 2, plan=lambda: "auto", num_shared=2),
    "state from before": carried("DeepseekV3", 2, steps_before=2),
    "another optimizer": carried("Mixtral", 2, optimizer=lambda parameters: torch.optim.SGD(parameters, 0.1, 0.9)),
}


@on_ranks(4)
def test_experts_are_split_beside_everything_else(folder: str) -> None:
    """Tokens are sent within a replica, and replicas average their gradients. Checkpointed layers send their tokens
    again. With TP, all TP ranks have the same tokens."""
    for_each(check_carried, {name: (row,) for name, row in COMBINED.items()})


# --- experts that differ from a release's


def in_transformers(kind: type[nn.Module]) -> type[nn.Module]:
    """The class, whose forward seems to be defined in a transformers file."""
    code: Any = kind.forward.__code__
    kind.forward = FunctionType(code, {"__name__": "transformers.models.limited.modeling_limited", "torch": torch})
    return kind


@in_transformers
class Limited(nn.Module):
    """Like transformers 5's experts whose gate is more than the activation (DeepSeek-V4, Step-3.7)."""

    def __init__(self, num_experts: int = 4, width: int = 16, hidden: int = 8) -> None:
        super().__init__()
        self.act_fn = nn.SiLU()
        self.gate_up_proj = nn.Parameter(torch.randn(num_experts, 2 * hidden, width))
        self.down_proj = nn.Parameter(torch.randn(num_experts, width, hidden))

    def _apply_gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return self.act_fn(gate.clamp(max=0.5)) * up.clamp(-0.5, 0.5)

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        wide = torch.einsum("tw,ehw->teh", hidden_states, self.gate_up_proj)
        out = torch.einsum("teh,ewh->tew", self._apply_gate(wide), self.down_proj)
        chosen = torch.zeros_like(out[..., 0]).scatter(1, top_k_index, top_k_weights)
        return (out * chosen.unsqueeze(-1)).sum(1)


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.router, self.experts = nn.Embedding(24, 16), nn.Linear(16, 4), Limited()

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        rows = self.embedding(tokens).flatten(0, 1)
        weights, chosen = self.router(rows).softmax(-1).topk(2)
        return self.experts(rows, chosen, weights)


@on_ranks(2)
def test_a_gate_of_the_experts_own_is_computed(folder: str) -> None:
    """A model that clamps values between the weights must not silently train as another one."""

    def build() -> nn.Module:
        model = nn.Module()
        model.model = Mixture()
        return model

    def loss(model: Any, tokens: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(model.model(tokens), tokens.flatten() % 16)

    check_carried(Carried(config={"expert_parallel_degree": 2}, build=build, loss=loss))


def halved(module: nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor:
    return output * 0.5


def halved_backwards(module: nn.Module, to_inputs: Any, to_outputs: Any) -> tuple[torch.Tensor]:
    return (to_inputs[0] * 0.5,)


def limit(expert: Any) -> None:
    """Like a script that changes an expert's class."""

    class Narrow(type(expert)):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x).clamp(-0.1, 0.1)

    expert.__class__ = Narrow


CHANGES: dict[str, Any] = {
    "a hook": lambda expert: expert.register_forward_hook(halved),
    "a hook of the backward": lambda expert: expert.register_full_backward_hook(halved_backwards),
    "a hook of the backward, on a layer": lambda expert: expert.up_proj.register_full_backward_hook(halved_backwards),
    "another class": limit,
}


@pytest.mark.skipif(IS_FIVE, reason="experts are no modules there")
@on_ranks(2)
def test_experts_that_a_script_changed_are_called_as_they_are(folder: str) -> None:
    """A hook, or the script's own forward, runs as in one process."""

    def changed(change: Any) -> nn.Module:
        model = build("Qwen3Moe")
        for layer in model.model.model.layers:
            for expert in layer.mlp.experts:
                change(expert)
        return model

    rows = {name: replace(carried("Qwen3Moe", 2), build=partial(changed, each)) for name, each in CHANGES.items()}
    for_each(check_carried, {name: (row,) for name, row in rows.items()})


# A replacement for a method of the module with a layer's experts, by its path in the layer.
OTHER_METHODS: dict[str, tuple[str, str, Any]] = {
    "Qwen3Moe": ("mlp", "forward", lambda self, hidden_states: (hidden_states, None)),
    "DeepseekV3": ("mlp", "moe", lambda self, hidden_states, topk_indices, topk_weights: hidden_states),
}
OF_WEIGHTS = ("mlp.experts", "forward", lambda self, hidden_states, top_k_index, top_k_weights: hidden_states)


def subclass(module: nn.Module, name: str, method: Any) -> None:
    """Like a script that changes a class's computation and keeps its name."""
    kind = type(module)
    module.__class__ = type(kind.__name__, (kind,), {name: method})


def replace_method(module: nn.Module, name: str, method: Any) -> None:
    setattr(module, name, MethodType(method, module))


def replace_wrapped(module: nn.Module, name: str, method: Any) -> None:
    """Like accelerate's hooks, around a forward with the same name and signature."""
    before = getattr(module, name)
    setattr(module, name, update_wrapper(partial(lambda *args: method(module, *args)), before))


@on_ranks(2)
def test_a_block_that_computes_something_else_is_not_known(folder: str) -> None:
    """A script's own forward under a release's class name was replaced by the release's, and silently trained another
    model."""
    torch.set_default_dtype(torch.float64)

    def changed(architecture: str, change: Any) -> nn.Module:
        path, name, method = OF_WEIGHTS if IS_FIVE else OTHER_METHODS[architecture]
        model = build(architecture)
        change(model.model.model.layers[-1].get_submodule(path), name, method)
        return model

    def of_weights() -> nn.Module:
        model = nn.Module()
        model.model = Mixture()
        subclass(model.model.experts, *OF_WEIGHTS[1:])
        return model

    builds = {
        f"{architecture}, {change.__name__}": partial(changed, architecture, change)
        for architecture in OTHER_METHODS
        for change in (subclass, replace_method, replace_wrapped)
    }
    says = ("no layer of experts that is known", "with the forward of their library")
    rows = {name: Refused(says=says, config=EXPERTS, build=each) for name, each in builds.items()}
    rows["experts in two weights"] = Refused(says=says, config=EXPERTS, build=of_weights)
    for_each(check_refused, {name: (row,) for name, row in rows.items()})


# --- sequences


@on_ranks(4)
@mock.patch.object(torch.Tensor, "float", torch.Tensor.double)  # the model computes its loss in it
def test_experts_are_split_beside_divided_sequences(folder: str) -> None:
    """CP ranks have different tokens of one batch, which are sent like those of different batches."""
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    model = build("Qwen3Moe")
    for path, module in list(model.named_modules()):  # torch's norms: the model's own round to float32
        if type(module).__name__ == "Qwen3MoeRMSNorm":
            model.set_submodule(path, nn.RMSNorm(len(module.weight), eps=module.variance_epsilon))
    reference = copy.deepcopy(model)
    prepare_fully_shard(model, None, FULL | {"expert_parallel_degree": 2, "context_parallel_degree": 2}, device="cpu")
    for step in range(2):
        batches = batch(step, 4).chunk(2)
        own = batches[dist.get_rank() // 2]
        loss = model.model(input_ids=own, labels=own, use_cache=False).loss
        loss.backward()
        expected = torch.stack([loss_of(reference, each) for each in batches]).mean()
        expected.backward()
        total = loss.detach().clone()
        dist.all_reduce(total)
        assert abs(total.item() / dist.get_world_size() - expected.item()) <= 1e-12
        assert_gradients(model, reference)
        for each in (model, reference):
            each.zero_grad()


# --- initial values


def drawn(architecture: str) -> nn.Module:
    model = build(architecture)

    def draw(module: nn.Module) -> None:
        for each in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
            nn.init.normal_(each, std=0.3)

    model.model.param_init_fn = draw
    model.model.fsdp_wrap_fn = lambda module: type(module).__name__.endswith("DecoderLayer")
    return model


@on_ranks(4)
def test_split_experts_start_with_the_values_of_an_unsplit_model(folder: str) -> None:
    """A model that is too large is built on the meta device; its experts equal those that one process draws."""

    def start(architecture: str, config: dict[str, Any], start: str) -> None:
        check_start(carried(architecture, 2, config=config), lambda: drawn(architecture), start)

    cases = {
        "meta": ("Qwen2Moe", {}, "meta"),
        "meta, beside replicas": ("DeepseekV3", REPLICAS, "meta"),
        "mixed": ("Mixtral", {}, "mixed"),
    }
    for_each(start, cases)


@on_ranks(4)
def test_gradients_are_clipped_and_parameters_seen_as_in_one_process(folder: str) -> None:
    """Clipping by any norm; within summon_full_params every rank sees all experts, and writes to them are kept."""
    check_clips(carried("Qwen2Moe", 2), "by the largest", "by value", "adaptive")


# --- synchronization with the device


@on_ranks(2)
def test_a_layer_waits_for_its_device_once(folder: str) -> None:
    """A GPU would idle in each layer, once for each expert whose tokens transformers' own loop looks for."""
    for architecture in ("Mixtral", "DeepseekV3"):
        torch.set_default_dtype(torch.float64)
        model = build(architecture, 2)
        prepare_fully_shard(model, None, FULL | {"expert_parallel_degree": 2}, device="cpu")
        loss_of(model, batch(0, 2)).backward()  # the first step finds the roots
        with Synchronisations() as found:
            loss_of(model, batch(1, 2)).backward()
        assert len(found.of_packages("composer_fsdp2")) == 2, found
        assert not [each for each in found.of_packages("transformers") if "experts" in str(each)], found


# --- refused models


def freeze_one(model: Any) -> None:
    next(model.model.model.layers[0].mlp.experts[1].parameters()).requires_grad_(False)


def share(model: Any) -> None:
    first, second, *_ = model.model.model.layers[0].mlp.experts
    second.up_proj.weight = first.up_proj.weight


EXPERTS = {"expert_parallel_degree": 2}
OF_EXPERTS = {"transformer_layer_cls_to_wrap": ["Qwen3MoeDecoderLayer"], "moe_experts": ["Qwen3MoeMLP"]}
REFUSED: dict[str, Refused] = {
    "experts that are units": Refused(
        says=("mlp.experts.0.down_proj.weight", "let no expert be a unit"),
        config=EXPERTS | {"idle_experts": "in_order", "wrap_policy": OF_EXPERTS},
    ),
    "an expert that is ignored": Refused(
        says=("mlp.experts.3.down_proj.weight", "ignored"),
        config=EXPERTS | {"ignored_modules": lambda model: [model.model.model.layers[0].mlp.experts[3]]},
    ),
    "one expert frozen": Refused(
        says=("mlp.experts.1.gate_proj.weight is not", "in all experts of the layer, or in none"),
        config=EXPERTS,
        prepare=freeze_one,
    ),
    "experts that share a weight": Refused(says=("untie it",), config=EXPERTS, prepare=share),
    "experts in the layer plan": Refused(
        says=("mlp.experts.0.up_proj", "take it out of the plan"),
        config=EXPERTS,
        plan=lambda: {"model.model.layers.*.mlp.experts.*.up_proj": ColwiseParallel()},
    ),
    "a degree that the experts do not have": Refused(
        says=("has 6 experts, which expert_parallel_degree 4 does not divide", "1, 2, 3 or 6"),
        config={"expert_parallel_degree": 4},
        build=lambda: build("Qwen3Moe", num_experts=6),
    ),
    "full replicas": Refused(
        says=("over 1 ranks, which is not a multiple of expert_parallel_degree 2",),
        config=EXPERTS | {"sharding_strategy": "NO_SHARD"},
    ),
    "another mixture": Refused(
        says=("no layer of experts that is known", "Mixtral"), config=EXPERTS, build=lambda: build_other()
    ),
}


def build_other() -> nn.Module:
    """Its routing has not been checked."""
    model = build("Qwen3Moe")
    for module in model.modules():
        if type(module).__name__ == "Qwen3MoeSparseMoeBlock":
            module.__class__ = type("OtherSparseMoeBlock", (type(module),), {})
    return model


@pytest.mark.skipif(IS_FIVE, reason="experts are no modules there")
@on_ranks(4)
def test_what_cannot_be_split_is_refused(folder: str) -> None:
    """Errors name the module, on every rank, before anything changes."""
    torch.set_default_dtype(torch.float64)
    of_qwen = {
        name: replace(row, build=lambda: build("Qwen3Moe")) if row.build is one_layer else row
        for name, row in REFUSED.items()
    }
    for_each(check_refused, {name: (row,) for name, row in of_qwen.items()})
