"""idle_experts with transformers' own mixtures of experts, and with the loop that passes over idle ones."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.cases import for_each
from support.known_models import mixture
from support.ranks import run_ranks
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
        "Qwen3Moe, all called": ("Qwen3Moe", False, {}),
        "Qwen3Moe, recomputed, reentrant": ("Qwen3Moe", True, reentrant),
        "Qwen2Moe, idle passed over": ("Qwen2Moe", True, {}),
        "Mixtral, all called": ("Mixtral", False, {}),
        "Mixtral, recomputed": ("Mixtral", True, not_reentrant),
    }
    run_ranks(check_all, 2, cases)
    run_ranks(check_all, 4, {"Qwen3Moe, idle passed over": ("Qwen3Moe", True, {})})
