"""Stand-ins for FSDP1's flat parameter and its handle, for libraries that access them."""

from typing import Any

import torch

from composer_fsdp2._torch.private_names import without_wrappers
from composer_fsdp2._torch.wrappers import cast_shards, shards_of
from composer_fsdp2.errors import CallError

REPLACEMENT = "read model.named_parameters(), DTensors, and within FSDP.summon_full_params(model) full tensors"


class FlatView:
    """A view of a unit's parameters with those attributes of ``FlatParameter`` and ``FlatParamHandle`` that accelerate
    uses.

    ``view.data = view.data.to(dtype)`` casts the unit's parameters. accelerate runs this before the first forward, to
    upcast low-precision parameters for mixed precision.
    """

    def __init__(self, unit: Any, dtype: torch.dtype | None = None) -> None:
        self._unit, self._shards = unit, shards_of(unit)
        self.dtype, self.device = dtype or self._shards[0].dtype, self._shards[0].device
        self.requires_grad = any(shard.requires_grad for shard in self._shards)

    @property
    def _fqns(self) -> list[str]:
        own = set(self._shards)
        return [without_wrappers(name) for name, each in self._unit.named_parameters() if each in own]

    @property
    def data(self) -> "FlatView":
        return self

    @data.setter
    def data(self, cast: "FlatView") -> None:
        if not isinstance(cast, FlatView):
            raise CallError(f"a flat parameter's data was set to a {type(cast).__name__}; {REPLACEMENT}")
        cast_shards(self._unit, cast.dtype)

    def to(self, dtype: torch.dtype) -> "FlatView":
        return FlatView(self._unit, dtype)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"{name}: fully_shard has no flat parameters; {REPLACEMENT}")
