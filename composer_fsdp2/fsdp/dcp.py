"""``torch.distributed.checkpoint.state_dict`` on our class: names by FSDP1's rule, values as for ``fully_shard``."""

import functools
from typing import Any

from torch import nn

from composer_fsdp2._torch.private_names import FSDP1Wrapper


@functools.cache
def patch_dcp(ours: type[nn.Module]) -> None:
    """Have ``get_state_dict`` and its relatives leave the wrapper out of names, as they do for FSDP1's class.

    Its static methods stay torch's, which find no instance of FSDP1 and leave the model to what ``fully_shard`` needs.
    Called where the first instance of ``ours`` is made.
    """
    from torch.distributed.checkpoint import state_dict  # slow to import

    class Either(type):
        def __instancecheck__(cls, instance: Any) -> bool:
            return isinstance(instance, FSDP1Wrapper | ours)

    state_dict.FSDP = Either("FSDP", (FSDP1Wrapper,), {})  # type: ignore[assignment,attr-defined]
