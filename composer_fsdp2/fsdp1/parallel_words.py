"""The values of the keys that say how ranks compute together, each parsed once."""

from composer_fsdp2.config.parallel import BroadcastBatch
from composer_fsdp2.errors import ConfigError


def parse_broadcast_batch(value: object) -> BroadcastBatch | None:
    """None: as the kinds of parallelism need it."""
    if value is None:
        return None
    if isinstance(value, str | bool) and value in (each.value for each in BroadcastBatch):
        return BroadcastBatch(value)
    raise ConfigError(
        f"{value!r}; it is false (each rank reads its batch itself), first (all ranks of a group take the first "
        "one's), gather (they take the rows of all of them), or null"
    )


def parse_check_data(value: object) -> bool | None:
    """None: where ranks share a batch."""
    if isinstance(value, bool | None):
        return value
    raise ConfigError(f"{value!r} ({type(value).__name__}); it is true, false or null")
