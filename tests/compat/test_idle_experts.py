"""idle_experts with transformers' own mixtures of experts, and with the loop that passes over idle ones."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.cases import for_each
from support.known_models import mixture
from support.oracle import FSDP1, FSDP2
from support.ranks import run_ranks
from support.trainers import build_model, fit, largest_difference
from support.training import FULL, assert_gradients
from torch import nn

from composer_fsdp2 import prepare_fully_shard

pytestmark = pytest.mark.composer

NUM_EXPERTS = 6
LAYERS = {"Qwen3Moe": "Qwen3MoeDecoderLayer", "Qwen2Moe": "Qwen2MoeDecoderLayer", "Mixtral": "MixtralDecoderLayer"}
EXPERTS = {"Qwen3Moe": "Qwen3MoeMLP", "Qwen2Moe": "Qwen2MoeMLP", "Mixtral": "MixtralBlockSparseTop2MLP"}
RECOMPUTED = {"activation_checkpointing": True}


def passing_over(kind: type[nn.Module]) -> type[nn.Module]:
    """A block of experts whose loop calls none without tokens, as later transformers' do."""

    class PassingOver(kind):  # type: ignore[misc,valid-type]
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            experts = [(lambda rows, expert=expert: expert(rows) if len(rows) else rows) for expert in self.experts]
            vars(self)["experts"] = experts  # ahead of the modules of that name
            try:
                return super().forward(*args, **kwargs)
            finally:
                del vars(self)["experts"]

    return PassingOver


def blocks_of(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if isinstance(getattr(module, "experts", None), nn.ModuleList)]


def built(architecture: str, *, skips: bool) -> nn.Module:
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    model = mixture(architecture, NUM_EXPERTS, device="cpu")
    kinds: dict[type, type] = {}
    for block in blocks_of(model):
        kinds.setdefault(type(block), passing_over(type(block)))
        block.__class__ = kinds[type(block)] if skips else type(block)
    return model


def tokens_of(rank: int, step: int) -> torch.Tensor:
    return torch.randint(3, 60, (1, 3), generator=torch.Generator().manual_seed(10 * step + rank))


def loss(model: Any, rank: int, step: int) -> torch.Tensor:
    tokens = tokens_of(rank, step)
    result: torch.Tensor = model.model(tokens, labels=tokens).loss
    return result


def watch_idle(model: nn.Module) -> list[int]:
    """How many experts of the first block got no token, one number a forward."""
    found: list[int] = []

    def look(gate: nn.Module, args: Any, scores: torch.Tensor) -> None:
        found.append(NUM_EXPERTS - len(set(scores.topk(2, dim=-1).indices.flatten().tolist())))

    blocks_of(model)[0].gate.register_forward_hook(look)
    return found


def check(architecture: str, skips: bool, section: dict[str, Any]) -> None:
    model = built(architecture, skips=skips)
    reference = copy.deepcopy(model)
    layer = LAYERS[architecture]
    model.model.activation_checkpointing_fn = lambda module: type(module).__name__ == layer
    idle = watch_idle(model)
    policy = {"transformer_layer_cls_to_wrap": [layer], "moe_experts": [EXPERTS[architecture]]}
    given = {"wrap_policy": policy, "idle_experts": "in_order", "collective_guard": 60}
    prepare_fully_shard(model, None, FULL | given | section, device="cpu")
    world_size = dist.get_world_size()
    for step in range(2):
        loss(model, dist.get_rank(), step).backward()
        for rank in range(world_size):
            (loss(reference, rank, step) / world_size).backward()
    assert_gradients(model, reference)
    assert max(idle) > 0
    if "activation_checkpointing" in section:  # of no matter to what generates
        return
    model.eval(), reference.eval()
    prompt = {"max_new_tokens": 3, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    prompts = torch.cat([tokens_of(dist.get_rank(), step) for step in range(2)])
    generated = [
        each.model.generate(prompts, attention_mask=torch.ones_like(prompts), **prompt) for each in (model, reference)
    ]
    assert torch.equal(*generated)


def check_all(cases: dict[str, tuple[str, bool, dict[str, Any]]]) -> None:
    for_each(check, cases)


@pytest.mark.filterwarnings("ignore")
def test_mixtures_of_experts_train_as_one_process_does():
    """The models that people fine-tune, whose loop passes over idle experts in one release and not in another."""
    reentrant = RECOMPUTED | {"activation_checkpointing_reentrant": True}
    not_reentrant = RECOMPUTED | {"activation_checkpointing_reentrant": False}
    cases: dict[str, tuple[str, bool, dict[str, Any]]] = {
        **{f"{name}, all called": (name, False, {}) for name in LAYERS},
        **{f"{name}, idle passed over": (name, True, {}) for name in LAYERS},
        **{f"{name}, recomputed": (name, True, not_reentrant) for name in ("Qwen3Moe", "Mixtral")},
        **{f"{name}, recomputed, reentrant": (name, True, reentrant) for name in ("Qwen3Moe", "Qwen2Moe")},
    }
    run_ranks(check_all, 2, cases)
    run_ranks(check_all, 4, {name: cases[name] for name in ("Qwen3Moe, idle passed over", "Mixtral, recomputed")})


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x)))


class Mixture(nn.Module):
    """In the place of a block: one of many experts for each token."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(8, 12), nn.ModuleList(Expert() for _ in range(12))
        self.idle = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.reshape(-1, 8)
        weights, chosen = self.gate(rows).softmax(-1).max(-1)
        result = torch.zeros_like(rows)
        for number in chosen.unique().tolist():
            row = torch.where(chosen == number)[0]
            result = result.index_add(0, row, self.experts[number](rows[row]) * weights[row, None])
        self.idle += len(self.experts) - len(chosen.unique())
        return x + result.view_as(x)


def with_mixtures() -> Any:
    model = build_model(tied=False)
    torch.manual_seed(3)
    model.model.blocks = nn.ModuleList(Mixture() for _ in range(2))
    model.model.fsdp_wrap_fn = lambda module: isinstance(module, Mixture)  # FSDP1's; ours may be told otherwise
    return model


def check_trainer() -> None:
    options = {"eval_interval": "2ba", "clip": ("norm", 0.5), "optimizer": "adamw", "microbatch": 1}
    theirs = fit(FSDP1, {"state_dict_type": "sharded"}, model=with_mixtures(), **options)
    policy = {"transformer_layer_cls_to_wrap": ["Mixture"], "moe_experts": ["Expert"]}
    section = {"state_dict_type": "sharded", "wrap_policy": policy, "idle_experts": "in_order", "collective_guard": 60}
    model = with_mixtures()
    ours = fit(FSDP2, section, model=model, **options)
    assert model.model.blocks[0].idle > 0
    assert largest_difference(ours.losses, theirs.losses) <= 1e-6, f"{ours.losses}, FSDP1 {theirs.losses}"
    for name, parameter in theirs.parameters.items():
        torch.testing.assert_close(ours.parameters[name], parameter, rtol=1e-5, atol=1e-5)


def test_a_trainer_with_expert_units_trains_as_fsdp1_with_layers():
    """Clipping, microbatches and evaluations around it must not know the difference."""
    run_ranks(check_trainer, 2)
