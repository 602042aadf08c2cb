"""Towers that only some ranks' batches use: all ranks unshard them in one order, whichever rank has an image or a
sound."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from support.cases import all_of, for_each
from support.models import Block, tokens
from support.on_ranks import on_ranks
from support.ranks import run_ranks
from support.training import FULL, assert_gradients, named_parameters, reports_soon
from torch import nn

from composer_fsdp2 import (
    ComposerFSDP2Error,
    PlanError,
    RanksDivergedError,
    plan_sharding,
    prepare_fully_shard,
    translate,
)
from composer_fsdp2.training.control import ControlGroup
from composer_fsdp2.training.out_of_memory import OutOfMemoryVote

WIDTH = 6
PARTS = ("vision", "sound", "bridge")
TOWERS = {
    "wrap_policy": {"transformer_layer_cls_to_wrap": ["Block"]},
    "idle_towers": [f"model.{name}" for name in PARTS],
}
GUARD = {"collective_guard": 60}


@dataclass
class Seen:
    read: torch.Tensor
    unread: torch.Tensor


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.returns_dataclass = False
        self.project = nn.Linear(3, WIDTH)
        self.blocks = nn.ModuleList(Block(WIDTH) for _ in range(2))
        self.sizes: list[int] = []

    def forward(self, patches: torch.Tensor, *, sizes: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | Seen:
        """Returns the output for the text, and an unused one from one more layer."""
        self.sizes.append(int(sizes.sum()))
        x = self.project(patches[: int(sizes.sum())])
        for block in self.blocks[:-1]:
            x = block(x)
        seen = x, self.blocks[-1](x)
        return Seen(*seen) if self.returns_dataclass else seen


class Text(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(WIDTH)])

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x if mask is None else x * mask


class Multimodal(nn.Module):
    """Calls its towers in their order in the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, WIDTH)
        self.vision, self.sound, self.text = Tower(), Tower(), Text()
        self.bridge = Block(WIDTH)  # between them, like a projector: its inputs need gradients
        self.head = nn.Linear(WIDTH, 11)
        self.reads_at_the_end = False

    def forward(self, ids: torch.Tensor, parts: list[tuple[str, torch.Tensor]]) -> dict[str, Any]:
        x, mask = self.embed(ids), torch.ones(WIDTH)
        features = torch.zeros(WIDTH)
        if self.reads_at_the_end:
            x = self.text(x, mask=mask)
        for kind, patches in parts:
            seen = getattr(self, kind)(patches, sizes=torch.tensor([len(patches)]))
            features = features + self.bridge(seen.read if isinstance(seen, Seen) else seen[0]).mean(0)
        x = x + features if self.reads_at_the_end else self.text(x + features, mask=mask)
        output = self.head(x)
        return {"loss": output.square().mean(), "logits": output, "name": "of the batch"}


class Untrained(Multimodal):
    """Calls a tower under no_grad, as scripts do for untrained ones, although the tower's parameters need gradients."""

    def forward(self, ids: torch.Tensor, parts: list[tuple[str, torch.Tensor]]) -> dict[str, Any]:
        x = self.embed(ids)
        for kind, patches in parts:
            with torch.no_grad():
                read, _ = getattr(self, kind)(patches, sizes=torch.tensor([len(patches)]))
            x = x + self.bridge(read).mean(0)
        return {"loss": self.head(self.text(x)).square().mean()}


class Adapted(nn.Module):
    """Calls the model's forward itself, bypassing all hooks, as peft's LoraModel does."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.base = model

    def forward(self, *batch: Any) -> Any:
        return self.base.forward(*batch)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.model: Any = Multimodal()

    def forward(self, *batch: Any) -> dict[str, Any]:
        return self.model(*batch)


Batch = tuple[torch.Tensor, list[tuple[str, torch.Tensor]]]
Batches = Callable[[int, int], Batch]  # by step and rank


def batch_of(step: int, rank: int, parts: dict[str, int] | list[tuple[str, int]]) -> Batch:
    draw = torch.Generator().manual_seed(10 * step + rank)
    given = parts.items() if isinstance(parts, dict) else parts
    return tokens(10 * step + rank), [(kind, torch.randn(size, 3, generator=draw)) for kind, size in given]


def an_image_on_the_first(step: int, rank: int) -> Batch:
    return batch_of(step, rank, {} if rank else {"vision": 3})


def in_turn(step: int, rank: int) -> Batch:
    """The rank without inputs, and the tower concerned, change; in the last step no rank has any."""
    parts = [{"vision": 2 + rank}, {"sound": 4}, {}, {"vision": 2, "sound": 3}]
    return batch_of(step, rank, {} if step == 2 else parts[(step + rank) % 4])


def in_different_orders(step: int, rank: int) -> Batch:
    """Two images and a sound before, between or after them."""
    parts = [("vision", 2), ("vision", 3)]
    parts.insert((rank + step) % 3, ("sound", 2))
    return batch_of(step, rank, parts[: 3 - rank % 2])


def build() -> Model:
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    return Model()


def sharded(section: dict[str, Any], change: Callable[[Model], object] = lambda model: None) -> tuple[Model, Model]:
    model = build()
    change(model)
    reference = copy.deepcopy(model)
    prepare_fully_shard(model, None, FULL | GUARD | section, device="cpu")
    for name, parameter in reference.named_parameters():
        parameter.requires_grad_(named_parameters(model)[name].requires_grad)
    return model, reference


def check_step(model: Model, reference: Model, step: int, batches: Batches) -> None:
    world_size = dist.get_world_size()
    model(*batches(step, dist.get_rank()))["loss"].backward()
    for rank in range(world_size):
        loss = reference(*batches(step, rank))["loss"]
        if loss.requires_grad:
            (loss / world_size).backward()
    assert_gradients(model, reference)
    for each in (model, reference):
        each.zero_grad()


def check(section: dict[str, Any], batches: Batches, change: Callable[[Model], object] = lambda model: None) -> None:
    model, reference = sharded(section, change)
    for step in range(3):
        check_step(model, reference, step, batches)
        if step == 0:
            with torch.no_grad():
                model(*batches(step, dist.get_rank()))


def reading_dataclasses_at_the_end(model: Model) -> None:
    model.model.reads_at_the_end = True
    model.model.vision.returns_dataclass = model.model.sound.returns_dataclass = True


def with_example(model: Model) -> None:
    model.model.vision.example_inputs = {"patches": torch.ones(1, 3), "sizes": torch.tensor([1])}


def recomputing_blocks(model: Model) -> None:
    model.model.activation_checkpointing_fn = lambda module: isinstance(module, Block)


def untrained(model: Model) -> None:
    model.model.__class__ = Untrained


def adapted(model: Model) -> None:
    model.model = Adapted(model.model)


BY_SIZE = {"wrap_policy": {"min_num_params": 60}, "freeze": ["model.vision"]}
KEPT = {"activation_checkpointing": True, "activation_checkpointing_reentrant": False}
KEPT |= {"sharding_strategy": "SHARD_GRAD_OP"}
OTHERS = {"freeze": ["model.text", "model.embed", "model.head", "model.bridge"]}
# By the number of ranks.
CASES: dict[int, dict[str, tuple[Any, ...]]] = {
    2: {
        "after the text, dataclasses": (TOWERS, in_turn, reading_dataclasses_at_the_end),
        "recomputed, kept after forward": (TOWERS | KEPT, in_turn, recomputing_blocks),
        "embeddings too, a tower frozen": (TOWERS | BY_SIZE, in_turn),
        "all but the towers frozen": (TOWERS | OTHERS, an_image_on_the_first),
        "without gradients in a tower that could have them": (TOWERS, in_turn, untrained),
        "within an adapter": (TOWERS | {"idle_towers": [f"model.base.{name}" for name in PARTS]}, in_turn, adapted),
    },
    4: {"in turn": (TOWERS, in_turn), "several, in different orders": (TOWERS, in_different_orders)},
}


@pytest.mark.any_torch
def test_towers_train_as_in_one_process():
    """A rank without an image would hang, abort, or train on other gradients."""
    for world_size, cases in CASES.items():
        run_ranks(for_each, world_size, check, cases)


# --- inputs of idle towers


@on_ranks(2)
def test_an_example_is_the_smallest_that_the_rank_saw() -> None:
    """Otherwise idle towers would cost as much as the largest images, and a rank without images would have no input."""
    model, reference = sharded(TOWERS)

    def after(step: int, batches: Batches) -> list[int]:
        """The number of patches in this rank's vision tower: its own, or an example's."""
        model.model.vision.sizes.clear()
        check_step(model, reference, step, batches)
        return list(model.model.vision.sizes)

    # No rank has seen an image; then rank 0 sees one in an evaluation, where inputs need no gradients.
    assert after(0, lambda step, rank: batch_of(step, rank, {})) == []
    with torch.no_grad():
        model(*batch_of(7, dist.get_rank(), {} if dist.get_rank() else {"vision": 5}))
    assert model.model.vision.sizes == [5]  # rank 1, without one, uses the same size
    assert (
        after(1, lambda step, rank: batch_of(step, rank, {"vision": 2} if rank else {})) == [[5], [2]][dist.get_rank()]
    )
    assert (
        after(2, lambda step, rank: batch_of(step, rank, {} if rank else {"vision": 4})) == [[4], [2]][dist.get_rank()]
    )
    assert after(3, lambda step, rank: batch_of(step, rank, {})) == []


def check_given() -> None:
    model, reference = sharded(TOWERS, with_example)
    check_step(model, reference, 0, an_image_on_the_first)
    check_step(model, reference, 1, an_image_on_the_first)
    assert model.model.vision.sizes == [[3, 3], [1, 1]][dist.get_rank()]


def check_without_statistics() -> None:
    """Of a batch norm, which must not include blank images."""

    def change(model: Model) -> None:
        model.model.vision.blocks[0] = nn.Sequential(model.model.vision.blocks[0], nn.BatchNorm1d(WIDTH))

    model, _ = sharded(TOWERS, change)
    norm = model.model.vision.blocks[0][1]
    before = norm.running_mean.clone()
    model(*an_image_on_the_first(0, dist.get_rank()))
    assert torch.equal(norm.running_mean, before) is (dist.get_rank() == 1) and norm.training


class Lock:
    """Cannot be sent to another rank."""

    def __reduce__(self) -> Any:
        raise TypeError("stays here")


class Locking(Untrained):
    """Passes its tower an object that cannot be sent."""

    def forward(self, ids: torch.Tensor, parts: list[tuple[str, torch.Tensor]]) -> Any:
        return [self.vision(patches, sizes=torch.tensor([3]), lock=Lock()) for _, patches in parts]


def locking(model: Model) -> None:
    forward = model.model.vision.forward
    model.model.vision.forward = lambda patches, *, sizes, lock: forward(patches, sizes=sizes)
    model.model.__class__ = Locking


def check_unsent() -> None:
    model = build()
    locking(model)
    prepare_fully_shard(model, None, FULL | GUARD | TOWERS, device="cpu")
    with pytest.raises(
        PlanError, match=r"what model.vision was called with cannot .* \(TypeError: stays here\); give each"
    ):
        model(*an_image_on_the_first(0, dist.get_rank()))


@reports_soon
def check_not_finite() -> None:
    """In an example, on the rank that runs it."""

    def change(model: Model) -> None:
        model.model.vision.project.forward = lambda patches: nn.functional.linear(
            patches / patches.norm(), model.model.vision.project.weight
        )

    model, _ = sharded(TOWERS | {"collective_guard": 2}, change)
    batch = an_image_on_the_first(0, dist.get_rank())
    expected = ComposerFSDP2Error if dist.get_rank() else RanksDivergedError
    with pytest.raises(
        expected, match="model.vision gives NaN .* set example_inputs on" if dist.get_rank() else "did not meet"
    ):
        model(*batch)


@reports_soon
def check_absent() -> None:
    """A rank with one batch less."""
    model, _ = sharded(TOWERS | {"collective_guard": 2})
    if dist.get_rank() == 0:
        with pytest.raises(RanksDivergedError, match="rank 1 has not come") as caught:
            model(*an_image_on_the_first(0, 0))
        assert "Ranks must run the same" in str(caught.value)


@pytest.mark.any_torch
def test_examples_that_are_given_and_those_that_cannot_be_used():
    """A tower's example must not change training, and must never block the other ranks."""
    run_ranks(
        all_of, 2, check_given, check_without_statistics, check_unsent, check_not_finite, check_absent, fresh=True
    )


@on_ranks(2)
def test_ranks_that_run_out_of_memory_go_back_together() -> None:
    """One rank fails before the towers, while the other waits to exchange who uses one. Automatic microbatching would
    end with an error about ranks at different operations."""
    model, reference = sharded(TOWERS)
    votes = OutOfMemoryVote(model)
    votes.start()
    forward, failed = model.model.embed.forward, []

    def fails_once(ids: torch.Tensor) -> torch.Tensor:
        if dist.get_rank() == 0 and not failed:
            failed.append(True)
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return forward(ids)

    model.model.embed.forward = fails_once
    assert not votes.succeeded(lambda: model(*an_image_on_the_first(0, dist.get_rank()))["loss"].backward())
    check_step(model, reference, 0, an_image_on_the_first)


@pytest.mark.any_torch
@on_ranks(2)
def test_text_alone_costs_two_messages() -> None:
    """One message before the text's part and one at the end, because decoding exchanges them at every token."""
    model, _ = sharded(TOWERS)
    batch = batch_of(0, dist.get_rank(), {})
    with patch.object(
        ControlGroup, "_all_reduce_max", autospec=True, side_effect=ControlGroup._all_reduce_max
    ) as asked:
        model(*batch)["loss"].backward()
    assert sum(call.args[1].name == "idle_towers" for call in asked.call_args_list) == 2


# --- in the plan


def plan_of(model: nn.Module, section: dict[str, Any]) -> Any:
    return plan_sharding(model, translate(section, device="cpu").config)


def test_the_plan_says_which_towers_run():
    """The plan lists the towers, and ranks with different keys raise instead of hanging."""
    plan = plan_of(build(), TOWERS)
    [found] = plan.tower_models
    assert (found.model, found.towers, found.sync_points) == ("model", (*TOWERS["idle_towers"],), ("model.text",))
    text = "  idle towers: model.vision, model.sound, model.bridge run on an example where only other ranks' batches"
    assert f"{text} enter them; ranks ask each other before model.text, the end of model" in plan.explain()
    other = plan_of(build(), {**TOWERS, "idle_towers": "model.vision"})
    assert other.tower_models[0].sync_points == ("model.sound", "model.text", "model.bridge")
    assert other.digest != plan.digest
    by_size = plan_of(build(), {**TOWERS, "wrap_policy": {"min_num_params": 60}})
    assert by_size.tower_models[0].sync_points == ("model.embed", "model.text", "model.head")


def test_towers_that_are_roots():
    """Towers that are direct children of a ComposerModel, which calls them itself."""
    model = nn.Module()
    inner = build().model
    for name, child in inner.named_children():
        model.add_module(name, child)
    model.forward = inner.forward
    [found] = plan_of(model, {"idle_towers": ["vision"]}).tower_models
    assert (found.model, found.towers) == ("", ("vision",)) and "text" in found.sync_points


def test_keys_that_cannot_be_followed():
    """A misspelt path would have no effect, and the run would hang at the first batch of text."""
    for given, text in (
        (["model.vison"], r"Model has no module 'model.vison'; did you mean model.vision\?"),
        (["nothing"], "Model has no module 'nothing'; give the path of a module"),
        (
            ["model.vision.blocks"],
            r"model.vision.blocks \(ModuleList\) cannot be called; give the paths of the modules in it",
        ),
        (
            ["model.vision", "model.vision.project"],
            "model.vision.project lies in model.vision; give the outer one alone",
        ),
    ):
        with pytest.raises(PlanError, match=f"fsdp_config.idle_towers: {text}"):
            plan_of(build(), {**TOWERS, "idle_towers": given})
    model = build()
    model.model.sound.example_inputs = 3
    with pytest.raises(PlanError, match=r"example_inputs of model.sound is a int; give the arguments"):
        plan_of(model, TOWERS)
    model = build()
    model.model._activation_checkpointing = True
    recomputed = r"idle_towers: model is recomputed as one, .* \(model.vision and 2 more\); recompute the blocks"
    with pytest.raises(PlanError, match=recomputed):
        plan_of(model, TOWERS | KEPT)
    [note] = plan_of(build(), {"idle_towers": ["model.vision"]}).notes
    assert note.startswith("idle_towers has no effect, because no tower contains a unit")
