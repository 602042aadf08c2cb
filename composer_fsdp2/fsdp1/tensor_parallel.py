"""Parse Composer's ``TPConfig``, or a mapping with its keys: tensor parallel degree and layer plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from composer_fsdp2.config.text import did_you_mean, short
from composer_fsdp2.errors import ConfigError
from composer_fsdp2.fsdp1.policy_values import AUTO

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.parallel import ParallelStyle

_KEYS = ("tensor_parallel_degree", "layer_plan", "device_mesh")
_PLACE = "parallelism_config.tp"


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorParallel:
    """The tensor parallel settings of a run.

    Args:
        degree: The number of consecutive ranks over which layers are TP-sharded; 1: no tensor parallelism.
        layer_plan: Module path -> a ``ParallelStyle`` of torch; "auto" for the plan of a known model.
        mesh: The tensor-parallel slice of the mesh in Composer's State.
        is_idle: Whether the user set a degree of 1 or a plan without a degree, which has no effect.
        gathers_batches: Whether TP peers read different batches. They must then gather and compute all of these.
    """

    degree: int = 1
    layer_plan: Mapping[str, ParallelStyle] | Literal["auto"] = field(default_factory=dict)
    mesh: DeviceMesh | None = None
    is_idle: bool = False
    gathers_batches: bool = False

    @classmethod
    def read(cls, source: object) -> TensorParallel:
        """Read a TPConfig, a mapping, or None for no tensor parallelism.

        Raises:
            ConfigError: unknown keys or invalid values, all in one error.
        """
        if source is None or isinstance(source, TensorParallel):
            return source or cls()
        if isinstance(source, Mapping):
            given = {str(key): value for key, value in source.items()}
        elif hasattr(source, "__dict__") and not isinstance(source, type):
            given = {key: value for key, value in vars(source).items() if key[0] != "_"}
        else:
            raise ConfigError(
                f"{_PLACE} is {short(source)}; give a TPConfig, or a mapping of {' and '.join(_KEYS[:2])}"
            )
        degree, plan = given.get("tensor_parallel_degree", 1), given.get("layer_plan")
        problems = [f"unknown key {_PLACE}.{key}{did_you_mean(key, _KEYS)}" for key in given if key not in _KEYS]
        if type(degree) is not int or degree < 1:
            problems.append(f"{_PLACE}.tensor_parallel_degree is {short(degree)}; give the number of ranks, 1 or more")
        elif degree > 1:
            problems.extend(_problems_of_plan(plan))
        if problems:
            raise ConfigError("\n".join(problems), keys=("tensor_parallel_degree", "layer_plan"))
        if degree == 1:
            return cls(is_idle="tensor_parallel_degree" in given or plan is not None)
        return cls(degree=degree, layer_plan=_by_path(plan), mesh=given.get("device_mesh"))


def _by_path(plan: Any) -> Mapping[str, ParallelStyle] | Literal["auto"]:
    """A single style applies to the whole model, as in torch."""
    if plan == AUTO:
        return "auto"
    return dict(plan) if isinstance(plan, Mapping) else {"": plan}


def _problems_of_plan(plan: object) -> list[str]:
    from torch.distributed.tensor.parallel import ParallelStyle

    if isinstance(plan, ParallelStyle) or plan == AUTO:
        return []
    if not isinstance(plan, Mapping) or not plan:
        return [
            f"{_PLACE}.layer_plan is {short(plan)}; give a mapping from the paths of modules to torch's styles, such "
            "as {'model.layers.*.mlp.up_proj': ColwiseParallel()}, or auto for the plan of a known model"
        ]
    return [
        f"{_PLACE}.layer_plan[{path!r}] is {short(style)}; give a style of torch.distributed.tensor.parallel"
        for path, style in plan.items()
        if not isinstance(path, str) or not isinstance(style, ParallelStyle)
    ]
