"""Parse and format the values of the parallelism keys."""

from collections.abc import Mapping, Sequence
from typing import Any

from composer_fsdp2.config.parallel import BroadcastBatch, IdleExperts, TiledMLP
from composer_fsdp2.config.text import did_you_mean, short
from composer_fsdp2.errors import ConfigError
from composer_fsdp2.fsdp1.policy_values import AUTO, class_names

TILED_KEYS = _CLASSES, _CHUNKS = ("classes", "chunks")


def parse_broadcast_batch(value: object) -> BroadcastBatch | None:
    """None: the default of the parallelism in use."""
    if value is None:
        return None
    if isinstance(value, str | bool) and value in (each.value for each in BroadcastBatch):
        return BroadcastBatch(value)
    raise ConfigError(
        f"{value!r}; it is false (each rank reads its batch itself), first (all ranks of a group take the first "
        "one's), gather (they take the rows of all of them), or null"
    )


def parse_check_data(value: object) -> bool | None:
    """None: check if ranks share a batch."""
    if isinstance(value, bool | None):
        return value
    raise ConfigError(f"{value!r} ({type(value).__name__}); it is true, false or null")


def parse_tiled_mlp(value: object) -> TiledMLP | None:
    """Parse the MLP classes and the number of chunks."""
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise ConfigError(f"{short(value)}; it is a mapping such as {{classes: [LlamaMLP], chunks: 8}}, or null")
    given = {str(key): each for key, each in value.items()}
    for key in given:
        if key not in TILED_KEYS:
            way_out = did_you_mean(key, TILED_KEYS, f"it takes {' and '.join(TILED_KEYS)}")
            raise ConfigError(f"{short(given)}, with the unknown key {key}{way_out}")
    missing = [key for key in TILED_KEYS if given.get(key) is None]
    if missing:
        raise ConfigError(f"{short(given)}, without {' and '.join(missing)}; give both {' and '.join(TILED_KEYS)}")
    try:
        return TiledMLP(classes=class_names(given[_CLASSES], _CLASSES, "class names"), chunks=given[_CHUNKS])
    except ConfigError as error:
        raise ConfigError(f"{short(given)}, in which {error}") from error


def tiled_mlp_value(tiled: TiledMLP | None) -> dict[str, Any] | None:
    """Inverse of ``parse_tiled_mlp``."""
    return None if tiled is None else {_CLASSES: list(tiled.classes), _CHUNKS: tiled.chunks}


def parse_idle_experts(value: object) -> IdleExperts | None:
    """Parse how ranks treat experts without tokens; None: they skip them."""
    if value is None:
        return None
    words = [each.value for each in IdleExperts]
    if not isinstance(value, str) or value not in words:
        raise ConfigError(f"{short(value)}{did_you_mean(value, words, f'it takes {words[0]}, or null')}")
    return IdleExperts(value)


def parse_idle_towers(value: object) -> tuple[str, ...] | None:
    """Parse the paths of towers. Returns an empty tuple for ``auto``, and None if the key is not set."""
    if value is None:
        return None
    if isinstance(value, str) and value == AUTO:
        return ()
    paths = [value] if isinstance(value, str) else value
    if not isinstance(paths, Sequence) or isinstance(paths, bytes) or not paths:
        raise ConfigError(f"{short(value)}; give {AUTO}, or a list of modules' paths, such as [model.visual]")
    for path in paths:
        if not isinstance(path, str) or not all(part and part == part.strip() for part in path.split(".")):
            raise ConfigError(
                f"{short(value)}, in which {path!r} is no path; give {AUTO}, or a list such as [model.visual]"
            )
        if path == AUTO:
            raise ConfigError(f"{short(value)}, with {AUTO} in a list; give it alone")
    return tuple(dict.fromkeys(paths))


def idle_towers_value(towers: tuple[str, ...] | None) -> list[str] | str | None:
    """Inverse of ``parse_idle_towers``."""
    return None if towers is None else list(towers) or AUTO
