"""torch.compile with our hooks: compiled blocks and compiled models, compared with one uncompiled process.

The backends eager and aot_eager generate no code, but trace the same graphs with the same graph breaks. Two steps of
clipped gradients in float64, to 1e-12, as in the files that define the rows.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from support.cases import for_each
from support.examples import IS_THOROUGH
from support.language import Language, batch, layer_plan, loss_of
from support.legality import VOCABULARY, Carried, check_carried
from support.on_ranks import on_ranks
from support.training import assert_gradients
from torch import nn
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import parallelize_module

from composer_fsdp2._torch.repairs import repair_cpu_collectives
from tests.parallel import test_context, test_idle_experts, test_idle_towers, test_split_experts, test_tensor

BACKENDS = ("eager", "aot_eager") if IS_THOROUGH else ("aot_eager",)
ROWS: dict[str, Carried] = {
    "units alone": Carried(),
    "recomputed": Carried(config=test_tensor.RECOMPUTED, build=Language),
    "layers split": test_tensor.split(build=Language, plan=lambda: layer_plan(ends=False)),
    "sequence parallelism": test_tensor.TRAINED["sequence, microbatches, reduced in the last"],
    "tiled": Carried(config={"tiled_mlp": {"classes": ["MLP"], "chunks": 2}}),
    "experts split": test_split_experts.TRAINED["two layers, recomputed, kept gathered"],
    "sequences divided": test_context.TRAINED["as many heads as of queries, recomputed"],
}
# torch cannot trace an embedding with sharded rows.
BLOCKS_ALONE = ("sequence parallelism",)


@dataclass(frozen=True, kw_only=True)
class Compiled(Carried):
    """A row with blocks compiled before sharding, or with the root compiled after it, as a Trainer does.

    Args:
        blocks: Whether blocks are compiled.
    """

    backend: str = "eager"
    blocks: bool = True

    def shard(self, model: nn.Module, **options: Any) -> None:
        if self.blocks:
            for layer in self._root(model).layers:
                layer.compile(backend=self.backend)
        super().shard(model, **options)
        if not self.blocks:
            self._root(model).compile(backend=self.backend)

    @staticmethod
    def _root(model: Any) -> Any:
        return model.model


def check_compiled(row: Carried, backend: str, blocks: bool) -> None:
    torch.compiler.reset()
    counters.clear()
    fields = {name: getattr(row, name) for name in row.__dataclass_fields__}
    check_carried(Compiled(**fields, backend=backend, blocks=blocks))
    assert counters["frames"]["ok"], "nothing was compiled"


def is_right_by_hand(row: Carried, backend: str, blocks: bool) -> bool:
    """Whether torch's own parallelize_module and fully_shard, compiled in the same way, compute the gradients of one
    process.

    torch 2.13 raises for a whole model. For blocks with sequence parallelism and aot_eager it silently computes a wrong
    gradient for the embedding. Called on all ranks, with equal results.
    """
    torch.compiler.reset()
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    model = row.build()
    reference = copy.deepcopy(model)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "tensor"))
    parallelize_module(model, mesh["tensor"], row.plan())
    for unit in (*model.model.layers, model.model):
        fully_shard(unit, mesh=mesh["shard"])
    for module in model.model.layers if blocks else [model.model]:
        module.compile(backend=backend)
    tokens = batch(0, 4) % VOCABULARY
    loss_of(reference, tokens).backward()
    try:
        loss_of(model, tokens.chunk(2)[dist.get_rank() // 2]).backward()
        assert_gradients(model, reference)
    except (AssertionError, RuntimeError):
        return False
    return True


@on_ranks(4)
def test_compiled_models_train_as_in_one_process(folder: str) -> None:
    """A traced hook would run only while tracing, and an instance's forward that is not traced would be skipped."""
    repair_cpu_collectives()
    cases = {
        f"{name}, {backend}, {'blocks' if blocks else 'whole'}": (row, backend, blocks)
        for name, row in ROWS.items()
        for backend in BACKENDS
        for blocks in _which(name)
        if row.plan is None or is_right_by_hand(row, backend, blocks)
    }
    assert not IS_THOROUGH or {name.partition(",")[0] for name in cases} == ROWS.keys()
    for_each(check_compiled, cases)


def _which(name: str) -> tuple[bool, ...]:
    """Whether to compile blocks, or the whole model."""
    both = (True, False) if IS_THOROUGH else (False,)
    return (True,) if name in BLOCKS_ALONE else both


def compiling(backend: str, *paths: str) -> Callable[[nn.Module], None]:
    def change(model: nn.Module) -> None:
        torch.compiler.reset()
        for path in paths:
            model.get_submodule(path).compile(backend=backend)

    return change


@on_ranks(2)
def test_compiled_models_with_idle_parts_train_as_in_one_process(folder: str) -> None:
    """Messages between ranks, and the experts and towers run for other ranks, differ from batch to batch."""
    experts, towers = test_idle_experts, test_idle_towers
    blocks, whole = ["decoder.layers.0", "decoder.layers.1"], ["decoder"]
    vision, model = ["model.vision", "model.sound"], ["model"]
    cases: dict[str, Any] = {}
    for backend in BACKENDS:
        for paths in (blocks, whole) if IS_THOROUGH else (whole,):
            arguments = (experts.IN_ORDER, experts.TWO_LAYERS, 1, compiling(backend, *paths))
            cases[f"experts, {backend}, {paths}"] = (experts.check_training, *arguments)
        for paths in (vision, model) if IS_THOROUGH else (model,):
            arguments = (towers.TOWERS, towers.in_turn, compiling(backend, *paths))
            cases[f"towers, {backend}, {paths}"] = (towers.check, *arguments)
    for_each(lambda check, *arguments: check(*arguments), cases)
