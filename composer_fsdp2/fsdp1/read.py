"""Read a user's configuration: a mapping, or an FSDPConfig or FSDP2Config of Composer."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from composer_fsdp2.errors import ConfigError
from composer_fsdp2.fsdp1.keys import FSDP2_READER, KEYS, KEYS_BY_NAME

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

FSDP2_DEFAULTS: dict[str, Any] = {row.name: row.defaults[FSDP2_READER] for row in KEYS if FSDP2_READER in row.defaults}


@dataclass(frozen=True, slots=True, kw_only=True)
class UserConfig:
    """The keys and values that a user configured, read from a mapping or from the attributes of an object.

    Args:
        given: The keys that the user set.
        defaults: Defaults of FSDP2Config that differ from FSDP1's; empty for a mapping.
        is_fsdp2: Whether it is Composer's FSDP2Config or a similar object.
    """

    given: Mapping[str, Any]
    defaults: Mapping[str, Any]
    mesh: DeviceMesh | None = None
    is_fsdp2: bool = False

    @classmethod
    def read(cls, source: object) -> UserConfig:
        """Read a mapping (also of OmegaConf) or an object with the attributes of FSDPConfig or FSDP2Config.

        Raises:
            ConfigError: ``source`` is neither.
        """
        if isinstance(source, UserConfig):
            return source
        source = _resolved(source)
        if isinstance(source, Mapping):
            given = {str(key): value for key, value in source.items()}
            return cls(given=given, defaults={}, mesh=given.get("device_mesh"))
        if not hasattr(source, "__dict__") or isinstance(source, str | type) or callable(source):
            raise ConfigError(
                f"fsdp_config is a {type(source).__name__}; give a mapping, a composer FSDPConfig or an FSDP2Config"
            )
        return cls._read_object(source)

    @classmethod
    def _read_object(cls, source: object) -> UserConfig:
        # Composer's State stores the mesh that it builds from the degrees in device_mesh; it is redundant.
        present = {key: value for key, value in vars(source).items() if key[0] != "_" and key != "device_mesh"}
        set_here: dict[str, Any] = _resolved(present)
        given = set_here
        fields = dataclasses.fields(source) if dataclasses.is_dataclass(source) else ()
        if fields and all(field.name in vars(source) for field in fields if field.init):
            # A dataclass's __init__ sets every field; a value equal to the class's default counts as not set.
            given = {
                key: value for key, value in set_here.items() if not _same(value, getattr(type(source), key, _ABSENT))
            }
        defaults = {
            key.name: getattr(source, key.name)
            for key in KEYS
            if key.name not in given and hasattr(source, key.name) and key.name != "device_mesh"
        }
        lacks_fsdp1 = not hasattr(source, "sharding_strategy")
        if lacks_fsdp1:
            defaults |= {name: defaults.get(name) or default for name, default in FSDP2_DEFAULTS.items()}
        # By class name, because the engine does not import Composer; compat's subclass of FSDP2Config has FSDP1's keys,
        # too.
        is_fsdp2 = lacks_fsdp1 or any(each.__name__ == "FSDP2Config" for each in type(source).__mro__)
        return cls(given=given, defaults=defaults, mesh=getattr(source, "device_mesh", None), is_fsdp2=is_fsdp2)

    def __getitem__(self, name: str) -> Any:
        if name in self.given:
            return self.given[name]
        return self.defaults.get(name, KEYS_BY_NAME[name].default)


def _resolved(value: Any, at: str = "fsdp_config") -> Any:
    """Convert OmegaConf containers to dicts and lists, also inside plain dicts and lists.

    Other values are returned unchanged.

    Raises:
        ConfigError: a value is missing (``???``) or an interpolation has no target; names ``at`` and the key.
    """
    if "omegaconf" not in sys.modules:  # without the import, no OmegaConf object can exist
        return value
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    if type(value) is dict:
        return {key: _resolved(each, f"{at}.{key}") for key, each in value.items()}
    if type(value) is list:
        return [_resolved(each, f"{at}[{number}]") for number, each in enumerate(value)]
    if not OmegaConf.is_config(value):
        return value
    try:
        return OmegaConf.to_container(value, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        raise ConfigError(f"{at} cannot be resolved: {error}") from error


class _Absent:
    """Not equal to any value of a user."""


_ABSENT = _Absent()


def _same(value: object, default: object) -> bool:
    return type(value) is type(default) and bool(value == default)
