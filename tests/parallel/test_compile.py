"""torch.compile around what we hook: compiled blocks and compiled models, beside one uncompiled process.

Backends that compile nothing (eager, aot_eager): what is traced, and where a graph breaks, is the same. Two steps of
clipped gradients in float64, to 1e-12, as in the files that the rows come from.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from support.cases import for_each
from support.language import Language
from support.legality import Carried, check_carried
from support.on_ranks import on_ranks
from torch import nn
from torch._dynamo.utils import counters

from tests.parallel import test_context, test_split_experts, test_tensor
from tests.parallel.order import test_carried_out

BACKENDS = ("eager", "aot_eager")
ROWS: dict[str, Carried] = {
    "units alone": Carried(),
    "recomputed": Carried(config=test_tensor.RECOMPUTED, build=Language),
    "layers split": test_tensor.TRAINED["two layers, recomputed, several groups"],
    "sequence parallelism": test_tensor.TRAINED["sequence, microbatches, reduced in the last"],
    "tiled": test_carried_out.OF_FOUR["split and tiled"],
    "experts split": test_split_experts.TRAINED["two layers, recomputed, kept gathered"],
    "sequences divided": test_context.TRAINED["as many heads as of queries, recomputed"],
}


@dataclass(frozen=True, kw_only=True)
class Compiled(Carried):
    """A row whose blocks are compiled before sharding, or whose root is after it, as a Trainer does.

    Args:
        blocks: Whether it is the blocks.
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


@on_ranks(4)
def test_compiled_models_train_as_in_one_process(folder: str) -> None:
    """A hook that is traced runs once, when it is traced; a forward of an instance that is not is left out."""
    cases = {
        f"{name}, {backend}, {'blocks' if blocks else 'whole'}": (row, backend, blocks)
        for name, row in ROWS.items()
        for backend in BACKENDS
        for blocks in (True, False)
    }
    for_each(check_compiled, cases)
