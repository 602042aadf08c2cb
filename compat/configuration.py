"""Parse parallelism configurations in Composer without dropping keys, and raise errors before Composer's own checks."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from composer.utils import FSDP2Config, FSDPConfig, ParallelismConfig
from composer.utils import dist as composer_dist

from composer_fsdp2.fsdp1.keys import KEYS, KeyGroup
from composer_fsdp2.fsdp1.parsing import mesh_of
from composer_fsdp2.fsdp1.read import FSDP2_DEFAULTS
from composer_fsdp2.fsdp1.tensor_parallel import TensorParallel
from composer_fsdp2.fsdp1.translate import translate

from .seams import seam


class EveryKeyFSDP2Config(FSDP2Config):
    """An FSDP2Config that keeps FSDP1's keys as attributes.

    Composer's class drops FSDP1's keys with a warning and returns constants for them, so degrees, planners and folder
    names are lost. Here they have FSDP1's defaults. FSDP2Config's own keys have its defaults
    (``state_dict_type='sharded'``, non-reentrant activation checkpointing, a broadcast from rank 0 if some ranks have
    no values).
    """

    # Unlike a dataclass, does not set missing fields, which must stay implicit
    def __init__(self, **given: Any) -> None:
        for key, value in given.items():
            setattr(self, key, value)

    @classmethod
    def of(cls, config: FSDP2Config) -> "EveryKeyFSDP2Config":
        """Copy an FSDP2Config.

        Its ``device_mesh`` is converted to degrees, because Composer's State creates the mesh.
        """
        given = {
            key: value
            for key, value in vars(config).items()
            if not key.startswith("_")
            and key != "device_mesh"
            # A dataclass's __init__ sets every field; a value equal to the default counts as not set.
            and (isinstance(config, cls) or value != getattr(FSDP2Config, key, None))
        }
        if config.sync_module_states:  # set on the object, because the constructor does not accept it
            given["sync_module_states"] = True
        if config.device_mesh is not None:
            spec = mesh_of(config.device_mesh, config.device_mesh.device_type, "device_mesh")
            given |= {axis.key: axis.num_ranks for axis in spec.axes}
        return cls(**given)


for _key in KEYS:
    if _key.group == KeyGroup.FSDP1 and _key.name not in FSDP2Config.settable_attrs():
        setattr(EveryKeyFSDP2Config, _key.name, _key.default)
for _name, _default in FSDP2_DEFAULTS.items():
    setattr(EveryKeyFSDP2Config, _name, _default)


@seam(
    "composer.trainer.trainer",
    "Trainer._parse_parallelism_config",
    why="misspelt keys trained as defaults, and a mesh in FSDP2Config was overwritten by a 1-D one",
)
def parse_parallelism_config(
    original: Callable[..., Any], self: Any, parallelism_config: Any
) -> ParallelismConfig | None:
    given = parallelism_config.get("tp") if isinstance(parallelism_config, Mapping) else parallelism_config
    tensor = TensorParallel.read(getattr(given, "tp", given))  # before Composer turns a misspelt key into an object
    parsed = original(self, parallelism_config)
    if parsed is not None:
        if parsed.fsdp2 is not None:
            _check_early(parsed.fsdp2, tensor)
            # A copy: the user may pass the same object to the next Trainer.
            parsed = dataclasses.replace(parsed, fsdp2=EveryKeyFSDP2Config.of(parsed.fsdp2))
            _check_early(parsed.fsdp2, tensor)
        elif parsed.fsdp is not None:
            _check_early(parsed.fsdp, tensor)
    return parsed


def _check_early(config: FSDPConfig | FSDP2Config, tensor: TensorParallel) -> None:
    """Raise ConfigError for invalid keys and degrees, before Composer's State fails with an assertion."""
    world_size = composer_dist.get_world_size()
    translate(config, precision="fp32", world_size=world_size, tensor_parallel_degree=tensor.degree)


@seam(
    "composer.utils.parallelism",
    "FSDP2Config.from_compatible_attrs",
    why="FSDP_VERSION=2 dropped every FSDP1 key with a warning",
)
def from_compatible_attrs(
    original: Callable[..., Any], cls: type[FSDP2Config], attrs: Mapping[str, Any]
) -> FSDP2Config:
    return EveryKeyFSDP2Config(**attrs)


_OURS = {key.name for key in KEYS if key.group == KeyGroup.OURS}


@seam(
    "composer.utils.parallelism",
    "FSDP2Config.__init__",
    why="it accepts only its own keys: those of composer_fsdp2 had to be set on the object afterwards",
)
def make_fsdp2_config(original: Callable[..., None], self: FSDP2Config, *args: Any, **given: Any) -> None:
    original(self, *args, **{key: value for key, value in given.items() if key not in _OURS})
    vars(self).update((key, value) for key, value in given.items() if key in _OURS)
