"""Support for ``torch.distributed.checkpoint.state_dict``: FSDP1's names, and values as for ``fully_shard``."""

import functools
from typing import Any

from torch import nn

from composer_fsdp2._torch.private_names import FSDP1Wrapper


@functools.cache
def patch_dcp(ours: type[nn.Module]) -> None:
    """Make DCP's ``get_state_dict`` and related functions omit the wrapper's prefix from FQNs, as for FSDP1's class.

    FSDP1's static methods are not patched. They find no FSDP1 instance, so DCP takes its code path for ``fully_shard``.
    Called before a module is sharded; does not communicate.
    """
    from torch.distributed.checkpoint import state_dict  # slow to import

    class Either(type):
        def __instancecheck__(cls, instance: Any) -> bool:
            return isinstance(instance, FSDP1Wrapper | ours)

    state_dict.FSDP = Either("FSDP", (FSDP1Wrapper,), {})  # type: ignore[assignment,attr-defined]
